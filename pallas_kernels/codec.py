"""Bit-exact number conversions: e4m3, e2m1 and power-of-two scales, by integer arithmetic."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt8

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E4M3_NAN = 0x7F
UE8M0_NAN = 0xFF
BFLOAT16_NAN = 0x7FC0
FLOAT32_NAN = 0x7FC00000
# The largest magnitude that stays finite through e4m3 and back: 255 * 2**120 rounds up to 2**128.
QUANTIZED_MAX = 240.0 * 2.0**120

MAGNITUDE_MASK = 0x7FFFFFFF
_EXPONENT_MASK = 0x7F800000
_MANTISSA_MASK = 0x007FFFFF


def float_bits(x: Float[Array, "*s"]) -> Int32[Array, "*s"]:
    """The IEEE bits of float32 values."""
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)


def bits_float(bits: Int32[Array, "*s"]) -> Float32[Array, "*s"]:
    """The float32 values of IEEE bits."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def is_finite(x: Float[Array, "*s"]) -> Bool[Array, "*s"]:
    """True where a value is neither NaN nor infinite, read from the exponent bits."""
    return (float_bits(x) & _EXPONENT_MASK) != _EXPONENT_MASK


def bfloat16_bits(x: Float[Array, "*s"]) -> Int32[Array, "*s"]:
    """The 16 bits of the nearest bfloat16, ties to even. NaN has no meaning here.

    Integers and not a cast: a cast there and back may be removed by XLA, and subnormals are
    flushed on some devices and not on others.
    """
    bits = float_bits(x)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


def round_to_bfloat16(x: Float[Array, "*s"]) -> Float32[Array, "*s"]:
    """Float32 values rounded to the nearest bfloat16, saturating at +-QUANTIZED_MAX."""
    return bits_float(bfloat16_bits(jnp.clip(x, -QUANTIZED_MAX, QUANTIZED_MAX)) << 16)


def encode_e4m3(x: Float32[Array, "*s"]) -> UInt8[Array, "*s"]:
    """Nearest-even e4m3 codes, saturating at +-448; the sign of zero stays. Input is finite."""
    bits = float_bits(x)
    magnitude = bits & MAGNITUDE_MASK
    # Normal codes: keep three mantissa bits, ties to even, and move the bias from 127 to 7.
    rounded = magnitude + 0x7FFFF + ((magnitude >> 20) & 1)
    normal = (rounded >> 20) - ((127 - 7) << 3)
    # Below 2**-6 codes are multiples of 2**-9. Adding 2**14 leaves exactly those in the mantissa.
    shifted = float_bits(bits_float(magnitude) + jnp.float32(2.0**14))
    subnormal = shifted - 0x46800000
    code = jnp.where(magnitude < 0x3C800000, subnormal, jnp.minimum(normal, 0x7E))
    return (code | ((bits >> 24) & 0x80)).astype(jnp.uint8)


def decode_e4m3(codes: UInt8[Array, "*s"]) -> Float32[Array, "*s"]:
    """The exact float32 values of e4m3 codes, for all but the two NaN codes (those give +-480).

    The code is moved into float16, whose exponent range holds subnormal codes as well: float32
    and bfloat16 subnormals are flushed to zero on CPUs.
    """
    # Sign extension puts the sign in both bits above the code; one of them is cleared.
    wide = lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.int16)
    half = lax.bitcast_convert_type((wide << 7) & jnp.int16(-0x4001), jnp.float16)
    return half.astype(jnp.float32) * jnp.float32(256.0)


def decode_e4m3_scale(codes: UInt8[Array, "*s"]) -> Float32[Array, "*s"]:
    """The exact float32 values of e4m3 codes, the NaN codes included."""
    nan = (codes & 0x7F) == E4M3_NAN
    return jnp.where(nan, jnp.float32(jnp.nan), decode_e4m3(codes))


def encode_e2m1(x: Float32[Array, "*s"], scale: Float32[Array, "*#s"]) -> UInt8[Array, "*s"]:
    """Nearest-even e2m1 codes (0, 0.5, 1, 1.5, 2, 3, 4, 6) of x / scale, saturating at +-6.

    The code is in the low nibble. The scale is an e4m3 number, so its products with the midpoints
    are exact; a quotient is not, where XLA multiplies by the reciprocal.
    """
    magnitude = jnp.abs(x)
    # A tie goes to the even code, so a midpoint below an even code belongs to that code.
    above = [magnitude > scale * 0.25, magnitude >= scale * 0.75, magnitude > scale * 1.25]
    above += [magnitude >= scale * 1.75, magnitude > scale * 2.5, magnitude >= scale * 3.5]
    above += [magnitude > scale * 5.0]
    code = sum(step.astype(jnp.int32) for step in above)
    return (code | ((float_bits(x) >> 28) & 0x8)).astype(jnp.uint8)


def decode_e2m1(codes: UInt8[Array, "*s"]) -> Float32[Array, "*s"]:
    """The exact float32 values of e2m1 codes in the low nibble, through float16 as e4m3's."""
    wide = codes.astype(jnp.uint16)
    half = lax.bitcast_convert_type(((wide & 0x8) << 12) | ((wide & 0x7) << 9), jnp.float16)
    return half.astype(jnp.float32) * jnp.float32(2.0**14)


def divide(a: Float32[Array, "*s"], b: Float32[Array, "*#s"]) -> Float32[Array, "*s"]:
    """a / b, correctly rounded, where b may be constant or broadcast along the last axis.

    XLA would multiply by the reciprocal of such a divisor, which is wrong in the last bit.
    """
    return a / lax.optimization_barrier(jnp.broadcast_to(b, a.shape))


def power_of_two_scale(amax: Float32[Array, "*s"], smallest: int) -> Int32[Array, "*s"]:
    """Biased exponents of 2**ceil(log2(amax / 448)), `smallest` at least.

    448 is 1.75 * 2**8, so the exponent is amax's own less 8, plus one where its mantissa passes
    1.75: exact, where a floating-point logarithm is not.
    """
    bits = float_bits(amax)
    exponent = (bits >> 23) - 8 + ((bits & _MANTISSA_MASK) > 0x600000).astype(jnp.int32)
    return jnp.maximum(exponent, smallest)


def decode_ue8m0(codes: UInt8[Array, "*s"]) -> Float32[Array, "*s"]:
    """2**(code - 127), exact for codes 1 to 254; code 0 gives 0 and code 255 NaN."""
    value = bits_float(codes.astype(jnp.int32) << 23)
    return jnp.where(codes == UE8M0_NAN, jnp.float32(jnp.nan), value)


def to_bytes(x: jax.Array) -> UInt8[Array, "..."]:
    """Little-endian bytes of the last axis: [..., n] of k bytes each becomes uint8[..., n * k]."""
    size = x.shape[-1] * x.dtype.itemsize
    return lax.bitcast_convert_type(x, jnp.uint8).reshape(*x.shape[:-1], size)


def from_bytes(data: UInt8[Array, "..."], dtype: jnp.dtype) -> jax.Array:
    """The inverse of `to_bytes`: uint8[..., n * k] becomes [..., n] of `dtype`."""
    size = jnp.dtype(dtype).itemsize
    parts = data.reshape(*data.shape[:-1], data.shape[-1] // size, size)
    return lax.bitcast_convert_type(parts, dtype)
