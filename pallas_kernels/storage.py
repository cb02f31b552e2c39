"""KVRows: the bytes, the format and the place of one layer's rows; what both operations work on."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array, ArrayLike, Bool, Int, Int32, UInt8

from pallas_kernels import checks
from pallas_kernels.formats import V41, KVCacheFormat, check_format
from pallas_kernels.serialization import register_serialization

ALIGNMENT = 32
"""Regions start at multiples of this many bytes, and so do slots."""


@register_serialization
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVRows:
    """Rows of one format in a region of every slot of a block.

    Row i is row `i % rows_per_slot` of slot `i // rows_per_slot`. The value is immutable: an
    operation that stores rows returns a new one. Under jit with the block donated, the new value
    takes the old one's memory.

    Attributes:
      data: uint8[slots, slot_bytes], the block; other layers' regions may lie in it.
      start: int32 scalar, the region's first byte in a slot, a multiple of 32.
      rows_per_slot: rows in a slot, S for a ring.
      fmt: the rows' format.
      sharding: how a cache on several devices splits its slots; None on one device. Who attends
        over such rows maps the operations over the devices; called on their own, the operations
        leave it to XLA where they run.
    """

    data: UInt8[Array, "slots slot_bytes"]
    start: Int32[Array, ""]
    rows_per_slot: int = dataclasses.field(metadata={"static": True})
    fmt: KVCacheFormat = dataclasses.field(metadata={"static": True})
    sharding: NamedSharding | None = dataclasses.field(default=None, metadata={"static": True})

    @classmethod
    def create(cls, slots: int, rows_per_slot: int, fmt: KVCacheFormat = V41) -> "KVRows":
        """Rows of zeros in a block of their own.

        Args:
          slots: number of slots.
          rows_per_slot: rows in each.
          fmt: the rows' format.

        Raises:
          ValueError: a size below 1, an unfit format, more rows than an int32 index names, or
            slots above 2 GiB.
        """
        check_format(fmt)
        checks.check_count("slots", slots)
        checks.check_count("rows_per_slot", rows_per_slot)
        slot_bytes = region_bytes(rows_per_slot, fmt)
        _check_size("rows", slots * rows_per_slot, slot_bytes)  # before they are allocated
        data = jnp.zeros((slots, slot_bytes), jnp.uint8)
        return cls.view(data, start=0, rows_per_slot=rows_per_slot, fmt=fmt)

    @classmethod
    def view(
        cls,
        block: UInt8[Array, "slots slot_bytes"],
        *,
        start: ArrayLike,
        rows_per_slot: int,
        fmt: KVCacheFormat = V41,
    ) -> "KVRows":
        """Rows in a region of a larger block. Nothing is copied.

        Args:
          block: uint8[slots, slot_bytes].
          start: int32 scalar, the region's first byte in a slot, a multiple of 32. It may be
            traced: another start does not recompile.
          rows_per_slot: rows in each slot.
          fmt: the rows' format.

        Raises:
          ValueError: the region does not fit, more rows than an int32 index names, or slots above
            2 GiB.
        """
        dtype = getattr(block, "dtype", type(block).__name__)
        if dtype != jnp.uint8 or block.ndim != 2:
            raise ValueError(
                f"block: expected uint8[slots, slot_bytes], got {dtype}{jnp.shape(block)}"
            )
        check_format(fmt)
        checks.check_count("rows_per_slot", rows_per_slot)
        end = rows_per_slot * fmt.row_bytes
        first = checks.known_int("start", start)
        if first is not None:
            if first < 0 or first % ALIGNMENT:
                raise ValueError(f"start: expected a multiple of {ALIGNMENT} from 0, got {first}")
            end += first
        if end > block.shape[1]:
            raise ValueError(
                f"block: expected slots of at least {end} bytes for {rows_per_slot} rows of "
                f"{fmt.row_bytes} bytes, got {block.shape[1]}"
            )
        rows = cls(block, checks.as_int32("start", start), rows_per_slot, fmt)
        check_rows(rows)
        return rows

    @property
    def num_rows(self) -> int:
        """Rows in all slots."""
        return self.data.shape[0] * self.rows_per_slot

    def logical(self) -> UInt8[Array, "slots rows_per_slot 1 row_bytes"]:
        """All rows, as (slots, rows, 1, bytes of a row)."""
        size = self.rows_per_slot * self.fmt.row_bytes
        region = lax.dynamic_slice_in_dim(self.data, self.start, size, axis=1)
        return region.reshape(self.data.shape[0], self.rows_per_slot, 1, self.fmt.row_bytes)


def region_bytes(rows_per_slot: int, fmt: KVCacheFormat) -> int:
    """Bytes of one layer's region in a slot: the rows, padded to a multiple of 32."""
    return -(-rows_per_slot * fmt.row_bytes // ALIGNMENT) * ALIGNMENT


def check_rows(rows: KVRows, name: str = "rows") -> None:
    """Raises ValueError unless `rows` is a KVRows whose sizes agree."""
    checks.check_type(name, rows, KVRows)
    check_format(rows.fmt)
    if rows.data.dtype != jnp.uint8 or rows.data.ndim != 2:
        raise ValueError(
            f"{name}: expected uint8[slots, slot_bytes], got {rows.data.dtype}{rows.data.shape}"
        )
    if rows.rows_per_slot * rows.fmt.row_bytes > rows.data.shape[1]:
        raise ValueError(
            f"{name}: expected slots of at least {rows.rows_per_slot * rows.fmt.row_bytes} bytes "
            f"for {rows.rows_per_slot} rows of format {rows.fmt.name}, got {rows.data.shape[1]}"
        )
    _check_size(name, rows.num_rows, rows.data.shape[1])


def _check_size(name: str, num_rows: int, slot_bytes: int) -> None:
    if num_rows > checks.INT32_MAX:
        raise ValueError(
            f"{name}: expected at most {checks.INT32_MAX} rows, the limit of an int32 index, got "
            f"{num_rows}"
        )
    if slot_bytes > checks.INT32_MAX:
        raise ValueError(
            f"{name}: expected slots of at most {checks.INT32_MAX} bytes, the limit of an int32 "
            f"offset, got {slot_bytes}"
        )


def load_rows(rows: KVRows, indices: Int[ArrayLike, "*n"]) -> UInt8[Array, "*n row_bytes"]:
    """The bytes of the rows that indices name.

    Args:
      rows: the rows.
      indices: integers of any shape; -1 or an index outside the rows means none.

    Returns:
      uint8[..., row_bytes]; zeros where the index means none.

    Raises:
      ValueError: the indices are not integers.
    """
    check_rows(rows)
    indices = checks.as_int32("indices", indices)
    valid = is_valid_index(rows, indices)
    data = gather_rows(rows, jnp.where(valid, indices, 0))
    return jnp.where(valid[..., None], data, jnp.uint8(0))


def store_rows(
    rows: KVRows, data: UInt8[Array, "*n row_bytes"], slots: Int[ArrayLike, "*n"]
) -> KVRows:
    """Rows with new bytes in some slots.

    Args:
      rows: the rows.
      data: uint8[..., row_bytes], the new bytes.
      slots: integers, the flattened slot of each; -1 or a slot outside the rows skips that one.
        The others are distinct.

    Returns:
      The new rows; every other byte is the same.

    Raises:
      ValueError: wrong shape or dtype.
    """
    check_rows(rows)
    slots = checks.as_int32("slots", slots)
    checks.check_bytes("data", data)
    checks.check_shape("data", data, (*slots.shape, rows.fmt.row_bytes))
    slots, data = slots.reshape(-1), data.reshape(-1, rows.fmt.row_bytes)
    valid = is_valid_index(rows, slots)
    # A skipped token goes to a slot of its own beyond the end: negative indices would wrap, and
    # the scatter may assume that no slot is named twice.
    beyond = rows.data.shape[0] + jnp.arange(slots.shape[0], dtype=jnp.int32)
    block_slot = jnp.where(valid, slots // rows.rows_per_slot, beyond)
    offset = rows.start + (slots % rows.rows_per_slot) * rows.fmt.row_bytes
    stored = lax.scatter(
        rows.data,
        jnp.stack([block_slot, offset], axis=-1),
        data,
        lax.ScatterDimensionNumbers(
            update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
        ),
        unique_indices=True,
        mode=lax.GatherScatterMode.FILL_OR_DROP,
    )
    return dataclasses.replace(rows, data=stored)


def is_valid_index(rows: KVRows, indices: Int32[Array, "*n"]) -> Bool[Array, "*n"]:
    """True where an index names a row."""
    return (indices >= 0) & (indices < rows.num_rows)


def gather_rows(rows: KVRows, indices: Int32[Array, "*n"]) -> UInt8[Array, "*n row_bytes"]:
    """The bytes of rows whose indices are all valid.

    The slot and the byte in the slot are two coordinates, so no address is computed in 32 bits.
    """
    row = indices % rows.rows_per_slot
    where = [indices // rows.rows_per_slot, rows.start + row * rows.fmt.row_bytes]
    return lax.gather(
        rows.data,
        jnp.stack(where, axis=-1),
        lax.GatherDimensionNumbers(
            offset_dims=(indices.ndim,), collapsed_slice_dims=(0,), start_index_map=(0, 1)
        ),
        slice_sizes=(1, rows.fmt.row_bytes),
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )
