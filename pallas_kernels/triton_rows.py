"""The mathematics of rows inside a kernel: norm, rotation, Hadamard transform and cast to bytes.

What Triton lacks shapes it: there are no slices and no bit casts to another width, and maxima lose
NaN. How values lie in registers does too: reductions leave them where they are.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float32, Int32, UInt8

from pallas_kernels import codec, formats, transforms
from pallas_kernels.checks import is_power_of_two
from pallas_kernels.formats import KVCacheFormat, ScaleFloor

WIDTHS = (64, 128, 256, 512)
"""Values in a row that the kernels are made and tried for."""


# --- before the cast


def rms_norm(
    x: Float32[Array, "m d"], weight: Float32[Array, "#m d"] | None, eps: float, interpret: bool
) -> Float32[Array, "m d"]:
    """As `transforms.row_norm`."""
    square = transforms.mean_square(x)
    inverse = _inverse_square_root(square + jnp.float32(eps), interpret)
    x = x * jnp.where(codec.is_finite(square), inverse, jnp.float32(jnp.nan))
    return x if weight is None else x * weight


def _inverse_square_root(x, interpret):
    """1 / sqrt(x), both rounded correctly: a unit in the last place moves 1 row in 1,000."""
    if interpret:
        return 1.0 / jnp.sqrt(x)
    # Triton's own square root and division are approximate.
    (inverse,) = plgpu.elementwise_inline_asm(
        "{ .reg .f32 root; sqrt.rn.f32 root, $1; rcp.rn.f32 $0, root; }",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return inverse


def rotation_refusal(half: int, pairing: str) -> str | None:
    """Why a kernel cannot rotate `half` pairs, or None where it can."""
    if pairing == "half_split" and half and not is_power_of_two(half):
        return f"rotates pairs (i, i + half) where half is a power of two, got {half}"
    return None


def load_angles(
    cos_ref,
    sin_ref,
    token: Int32[Array, " m"],
    live: Bool[Array, " m"],
    width: int,
    pairing: str,
) -> tuple[Float32[Array, "m *pairs"], Float32[Array, "m *pairs"]]:
    """Cosine and sine for every pair of rows of `width` values: 1 and 0 where none rotates.

    Args:
      cos_ref: float32[n, half], half of 1 or more.
      sin_ref: float32[n, half].
      token: which rows of them.
      live: which of the tokens there are; the others are not loaded.
      width: values in a row.
      pairing: "interleaved" or "half_split".

    Returns:
      What `rotate` takes: [m, width / 2] where pairs are neighbours, else
      [m, width / (2 * half), half].
    """
    half = cos_ref.shape[1]
    pair = jnp.arange(width // 2, dtype=jnp.int32)[None, :] - (width // 2 - half)
    # Pairs that do not rotate have negative numbers and are masked: a maximum with 0 would hide
    # from the compiler that the others are neighbours in memory.
    mask = live[:, None] & (pair >= 0)
    cos = plgpu.load(cos_ref.at[token[:, None], pair], mask=mask, other=1.0)
    sin = plgpu.load(sin_ref.at[token[:, None], pair], mask=mask, other=0.0)
    if pairing == "interleaved" or half == 1:
        return cos, sin
    shape = (token.shape[0], width // (2 * half), half)
    return cos.reshape(shape), sin.reshape(shape)


def rotate(
    x: Float32[Array, "m d"],
    cos: Float32[Array, "#m *pairs"],
    sin: Float32[Array, "#m *pairs"],
    inverse: bool = False,
) -> Float32[Array, "m d"]:
    """As `transforms.rope`, with the angles of `load_angles`."""
    step = 1 if cos.ndim == 2 else cos.shape[2]

    def of_values(of_pairs):
        shape = _pairs_shape(of_pairs.shape[0], x.shape[1], step)
        return jnp.broadcast_to(jnp.expand_dims(of_pairs, 2), shape).reshape(shape[0], x.shape[1])

    cos, sin = of_values(cos), of_values(sin)
    # The first of a pair is a * cos - b * sin, the second b * cos + a * sin.
    is_second = _has_bit(x.shape[1], step)
    sin = jnp.where(is_second != inverse, sin, -sin)
    return transforms.rounded(x * cos) + transforms.rounded(_partner(x, step) * sin)


def hadamard(x: Float32[Array, "m d"]) -> Float32[Array, "m d"]:
    """As `transforms.hadamard`, with the same sums in the same order."""
    x = transforms.rounded(x)
    step = 1
    while step < x.shape[1]:
        # Of the values a and b of a pair, a + b and a - b.
        x = _partner(x, step) + jnp.where(_has_bit(x.shape[1], step), -x, x)
        step *= 2
    return x * jnp.float32(x.shape[1] ** -0.5)


def _pairs_shape(m, width, step):
    """The shape of rows whose third axis is the two of a pair, which are `step` apart."""
    last = () if step == 1 else (step,)  # an axis of one value costs a tenth of the instructions
    return (m, width // (2 * step), 2, *last)


def _has_bit(width, step):
    return (jnp.arange(width, dtype=jnp.int32)[None, :] & step) != 0


def _partner(x, step):
    """For each value the one whose index differs in the bit `step`.

    The sum of two integers less one of them is the other: a reduction, which leaves the values in
    the registers they are in, where splitting into pairs and joining them moves all of them.
    """
    m, width = x.shape
    bits = codec.float_bits(x).reshape(_pairs_shape(m, width, step))
    both = jnp.sum(bits, axis=2, keepdims=True)
    return codec.bits_float((both - bits).reshape(x.shape))


# --- the cast


def format_refusal(fmt: KVCacheFormat) -> str | None:
    """Why a kernel cannot write rows of a format, or None where it can."""
    width, group = fmt.num_elements, fmt.elements_per_scale
    if width not in WIDTHS:
        widths = ", ".join(map(str, WIDTHS[:-1]))
        return f"stores rows of {widths} or {WIDTHS[-1]} values, got {width}"
    kind = (fmt.quantized_dtype, fmt.scale_dtype, fmt.raw_dtype)
    if kind not in _KINDS:
        return f"stores e4m3 with ue8m0 scales, e2m1, bfloat16 or float32 rows, got {fmt}"
    if group and not (fmt.scales_last and is_power_of_two(group)):
        return f"stores scales after all data, for groups of a power of two, got {fmt}"
    if fmt.raw_elements and not is_power_of_two(fmt.raw_elements):
        return f"stores a power of two of raw values, got {fmt.raw_elements}"
    if fmt.pad_bytes > (width // group - fmt.num_scales if group else 0):
        return f"pads a row with a byte for each scale that raw values do without, got {fmt}"
    return None


_KINDS = (
    ("e4m3", "ue8m0", None),
    ("e4m3", "ue8m0", "bfloat16"),
    ("e2m1", "e4m3", None),
    (None, None, "bfloat16"),
    (None, None, "float32"),
)


def store_row(
    ref,
    leading: tuple[Int32[Array, " m"], ...],
    first: Int32[Array, " m"],
    row: Float32[Array, "m d"],
    fmt: KVCacheFormat,
    scale_floor: ScaleFloor,
    live: Bool[Array, " m"],
) -> None:
    """Writes rows in a format, with the bytes of `quantize_rows`.

    Args:
      ref: uint8[..., bytes].
      leading: where along each leading axis.
      first: the row's first byte along the last axis.
      row: the numbers.
      fmt: the row format, one that `format_refusal` does not refuse.
      scale_floor: see `quantize_rows`.
      live: which rows are written at all.
    """
    # A dead row goes outside the array: JAX's interpreter writes the old bytes of masked places
    # back, where another row may just have been written.
    outside = jnp.where(live, leading[0], ref.shape[0])
    leading = tuple(index[:, None] for index in (outside, *leading[1:]))
    for offset, count, data in encode_row(row, fmt, scale_floor):
        column = jnp.arange(data.shape[1], dtype=jnp.int32)[None, :]
        mask = live[:, None] & (column < count)
        plgpu.store(ref.at[(*leading, first[:, None] + offset + column)], data, mask=mask)


def encode_row(
    row: Float32[Array, "m d"], fmt: KVCacheFormat, scale_floor: ScaleFloor
) -> list[tuple[int, int, UInt8[Array, "m _"]]]:
    """The bytes of rows, in parts whose sizes are powers of two.

    Args:
      row: the numbers.
      fmt: the row format, one that `format_refusal` does not refuse.
      scale_floor: see `quantize_rows`.

    Returns:
      For each part its first byte in the row, how many of its bytes count, and uint8[m, size].
    """
    m, width = row.shape
    groups = width // (fmt.elements_per_scale or width)
    # Largest magnitudes as integers: Triton's floating-point maximum drops NaN.
    magnitude = (codec.float_bits(row) & codec.MAGNITUDE_MASK).reshape(m, groups, width // groups)
    largest = codec.bits_float(jnp.max(magnitude, axis=2))
    bad = (~codec.is_finite(largest)).astype(jnp.int32)
    finite = jnp.max(bad, axis=1, keepdims=True) == 0
    if fmt.raw_dtype == "float32":
        bits = jnp.where(finite, codec.float_bits(row), codec.FLOAT32_NAN)
        return [(0, fmt.data_bytes, _bytes_of(bits, 4))]
    parts = []
    if fmt.quantized_dtype is not None:
        rounded = codec.round_to_bfloat16(row).reshape(magnitude.shape)
        # Rounding keeps the order, so this is the largest of the rounded values too.
        data, scales = _encode_groups(rounded, codec.round_to_bfloat16(largest), fmt, scale_floor)
        nan_scale = codec.UE8M0_NAN if fmt.scale_dtype == "ue8m0" else codec.E4M3_NAN
        scales = jnp.where(finite, scales, jnp.uint8(nan_scale))
        # Groups of raw values have no scale; the pad stands in their places.
        group = jnp.arange(groups, dtype=jnp.int32)[None, :]
        scales = jnp.where(group < fmt.num_scales, scales, jnp.uint8(0))
        data = jnp.where(finite, data, jnp.uint8(codec.E4M3_NAN))
        parts = [
            (0, fmt.quantized_bytes, data),
            (fmt.data_bytes, fmt.scale_bytes + fmt.pad_bytes, scales),
        ]
    if fmt.raw_dtype is not None:
        raw = codec.bfloat16_bits(codec.round_to_bfloat16(_last(row, fmt.raw_elements)))
        raw = jnp.where(finite, raw, codec.BFLOAT16_NAN)
        parts.append((fmt.quantized_bytes, 2 * fmt.raw_elements, _bytes_of(raw, 2)))
    return parts


def _encode_groups(groups, amax, fmt, scale_floor):
    m, num_groups, size = groups.shape
    if fmt.scale_dtype == "ue8m0":
        exponent = codec.power_of_two_scale(amax, formats.SMALLEST_UE8M0[scale_floor])
        inverse = codec.bits_float((254 - exponent) << 23)
        scaled = (groups * inverse[:, :, None]).reshape(m, num_groups * size)
        return codec.encode_e4m3(scaled), exponent.astype(jnp.uint8)
    # A product and not amax / 6, which the GPU would only approximate; the codes are the same for
    # every bfloat16.
    scale = amax * jnp.float32(1 / codec.E2M1_MAX)
    scales = codec.encode_e4m3(jnp.maximum(scale, jnp.float32(formats.FP4_SCALE_FLOOR)))
    codes = codec.encode_e2m1(groups, codec.decode_e4m3(scales)[:, :, None])
    low, high = jnp.unstack(codes.reshape(m, num_groups * size // 2, 2), axis=-1)
    return low | (high << 4), scales


def _last(row, count):
    """The last values of rows: an integer sum of equal parts of which all but the last are 0."""
    if count == row.shape[1]:
        return row
    parts = codec.float_bits(row).reshape(row.shape[0], row.shape[1] // count, count)
    part = jnp.arange(parts.shape[1], dtype=jnp.int32)[None, :, None]
    return codec.bits_float(jnp.sum(jnp.where(part == parts.shape[1] - 1, parts, 0), axis=1))


def _bytes_of(bits: Int32[Array, "m k"], size: int) -> UInt8[Array, "m _"]:
    """The little-endian bytes of integers of `size` bytes."""
    m, count = bits.shape
    if size == 1:
        return bits.astype(jnp.uint8)
    shift = jnp.int32(4 * size)
    low = bits & ((1 << 4 * size) - 1)
    high = lax.shift_right_logical(bits, shift)
    return _bytes_of(jnp.stack([low, high], axis=-1).reshape(m, 2 * count), size // 2)
