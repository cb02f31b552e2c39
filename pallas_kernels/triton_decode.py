"""Gathers rows by index and decodes them, inside a kernel that is lowered through Triton."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, BFloat16, Bool, Float32, Int32, UInt8

from pallas_kernels import codec
from pallas_kernels.formats import KVCacheFormat


def decode_rows(
    data: Any,
    slot: Int32[Array, " k"],
    first: Int32[Array, " k"],
    live: Bool[Array, " k"],
    fmt: KVCacheFormat,
    start: int,
    width: int,
) -> BFloat16[Array, "k width"]:
    """Some values of the rows that indices name.

    Args:
      data: reference to uint8[slots, slot_bytes].
      slot: the slot of each row.
      first: the row's first byte in its slot.
      live: which rows are read; the others are zeros, whatever lies in memory.
      fmt: the rows' format.
      start: the first value to read; a multiple of width.
      width: how many, a power of two.

    Returns:
      The values. Exact in bfloat16, but for float32 rows, which are rounded.
    """

    def load(offset, count):
        columns = offset + jnp.arange(count, dtype=jnp.int32)
        mask = jnp.broadcast_to(live[:, None], (live.shape[0], count))
        where = data.at[slot[:, None], first[:, None] + columns[None, :]]
        return plgpu.load(where, mask=mask, other=0)

    if start < fmt.quantized_elements:
        values_per_byte = 2 if fmt.quantized_dtype == "e2m1" else 1
        codes = load(start // values_per_byte, width // values_per_byte)
        group = fmt.elements_per_scale
        scales = load(fmt.data_bytes + start // group, width // group)
        return _dequantize(codes, scales, fmt, width)
    offset = start - fmt.quantized_elements
    if fmt.raw_dtype == "bfloat16":
        halves = _join(load(fmt.quantized_bytes + 2 * offset, 2 * width).astype(jnp.uint16), 8)
        return lax.bitcast_convert_type(halves, jnp.bfloat16)
    halves = _join(load(fmt.quantized_bytes + 4 * offset, 4 * width).astype(jnp.uint32), 8)
    return codec.bits_float(_join(halves, 16).astype(jnp.int32)).astype(jnp.bfloat16)


def _dequantize(
    codes: UInt8[Array, "k bytes"], scales: UInt8[Array, "k groups"], fmt: KVCacheFormat, width: int
) -> BFloat16[Array, "k width"]:
    rows, groups = scales.shape
    if fmt.quantized_dtype == "e4m3":
        values = codec.decode_e4m3(codes)
        scale: Float32[Array, "k groups"] = codec.decode_ue8m0(scales)
    else:
        nibbles = jnp.stack([codes & 0xF, codes >> 4], axis=-1)
        values = codec.decode_e2m1(nibbles.reshape(rows, width))
        scale = codec.decode_e4m3_scale(scales)
    scaled = values.reshape(rows, groups, width // groups) * scale[:, :, None]
    return scaled.reshape(rows, width).astype(jnp.bfloat16)


def _join(parts: Array, bits: int) -> Array:
    """Pairs of neighbours as one number each, the low part first."""
    rows, count = parts.shape
    low, high = jnp.unstack(parts.reshape(rows, count // 2, 2), axis=-1)
    return low | (high << bits)
