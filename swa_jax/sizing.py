"""Bytes of a cache, counted before it is made: by the generic formula, and exactly for a ring.

Everything here is arithmetic on Python ints; nothing is allocated.
"""

from pallas_kernels.formats import KVCacheFormat
from pallas_kernels.storage import region_bytes
from swa_jax.ring import RingGeometry


def separate_kv_bytes(
    layers: int,
    kv_heads: int,
    width: int,
    tokens: int,
    bytes_per_element: int,
    window: int | None = None,
) -> int:
    """Payload of one request in a cache with separate key and value arrays of equal width.

    2 * layers * kv_heads * width * min(tokens, window) * bytes_per_element. Query heads do not
    occur: they share the stored heads. Scales, padding and temporary buffers are not counted.

    Args:
      layers: attention layers with a cache of their own.
      kv_heads: stored key/value heads of a layer.
      width: elements of one head's key, and of its value.
      tokens: positions of the context so far.
      bytes_per_element: 2 for bfloat16, 1 for eight-bit values without their scales.
      window: most positions a query sees; None for full attention.

    Returns:
      Bytes.

    Raises:
      ValueError: if an argument is not a non-negative int (window: a positive one).

    The usual count for grouped-query attention; the factor two is keys and values.
    """
    _check_ints(
        layers=layers,
        kv_heads=kv_heads,
        width=width,
        tokens=tokens,
        bytes_per_element=bytes_per_element,
    )
    if window is not None:
        _check_ints(window=window)
        if window == 0:
            raise ValueError("window: expected at least 1, got 0")
        tokens = min(tokens, window)
    return 2 * layers * kv_heads * width * tokens * bytes_per_element


def rows_bytes(fmt: KVCacheFormat, rows: int) -> int:
    """Bytes of shared key/value rows: scales included, no factor two, for the row is both.

    Args:
      fmt: row format.
      rows: how many rows.

    Returns:
      rows * fmt.row_bytes.

    Raises:
      ValueError: if rows is not a non-negative int.
    """
    _check_ints(rows=rows)
    return rows * fmt.row_bytes


def ring_cache_bytes(fmt: KVCacheFormat, geometry: RingGeometry, layers: int, slots: int) -> int:
    """Bytes of the rings of all layers and requests, as the cache allocates them.

    Each ring holds all S rows, padded to the 32 bytes that a layer's region is aligned to. The
    context length does not occur, nor does a short one lower the count: every request owns whole
    rings. A model whose context is shorter than the window is better served by a smaller window.

    Args:
      fmt: row format.
      geometry: window and capacity of every ring.
      layers: layers with a ring.
      slots: state slots, one a request.

    Returns:
      Bytes.

    Raises:
      ValueError: if layers or slots is not a non-negative int.
    """
    _check_ints(layers=layers, slots=slots)
    return layers * slots * region_bytes(geometry.capacity, fmt)


def format_bytes(nbytes: int) -> str:
    """A count of bytes for people: "70,752 B", and from one MiB (2**20 bytes) on "... B = 16 MiB".

    Args:
      nbytes: bytes, >= 0.

    Returns:
      The exact count, and MiB to two decimals where they say something.

    Raises:
      ValueError: if nbytes is not a non-negative int.
    """
    _check_ints(nbytes=nbytes)
    if nbytes < 2**20:
        return f"{nbytes:,} B"
    mebibytes = f"{nbytes / 2**20:,.2f}".rstrip("0").rstrip(".")
    return f"{nbytes:,} B = {mebibytes} MiB"


def _check_ints(**values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name}: expected an int of 0 or more, got {value!r}")
