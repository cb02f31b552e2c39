"""What happens to a row before it is stored: RMSNorm, rotary embedding and Hadamard transform."""

import fractions
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import checks, codec

PAIRINGS = ("interleaved", "half_split")

_PI = fractions.Fraction(31415926535897932384626433832795028841971693993751, 10**49)

# --- the same numbers in every program, in a kernel or not


def mean_square(x: Float32[Array, "*batch d"]) -> Float32[Array, "*batch 1"]:
    """The mean of squares along the last axis: sums of pairs of neighbours, then of those, ...

    Compilers add up a reduction in an order of their own, and the last bit differs with it. An
    order that is written out they keep. It has no derivative.

    Args:
      x: rows of one value or more.

    Returns:
      float32.
    """
    sums = rounded(x * x)
    while (count := sums.shape[-1]) > 1:
        if count % 2:
            sums = jnp.concatenate([sums, jnp.zeros_like(sums[..., :1])], axis=-1)
        a, b = jnp.unstack(sums.reshape(*x.shape[:-1], (count + 1) // 2, 2), axis=-1)
        sums = a + b
    return rounded(sums * jnp.float32(1 / x.shape[-1]))


def rounded(product: Float32[Array, "*s"]) -> Float32[Array, "*s"]:
    """A product that no compiler fuses with a sum: a fused multiply-add would not round it.

    Which products are fused differs between programs. It has no derivative.
    """
    # No bits of a number are larger, but no compiler knows that of NaN.
    return codec.bits_float(jnp.minimum(codec.float_bits(product), codec.FLOAT32_NAN))


# Not used in kernels, which need no derivative.
_mean_square = jax.custom_jvp(mean_square)
_rounded = jax.custom_jvp(rounded)


@_mean_square.defjvp
def _mean_square_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    return _mean_square(x), 2 * jnp.mean(x * dx, axis=-1, keepdims=True)


@_rounded.defjvp
def _rounded_jvp(primals, tangents):
    return _rounded(*primals), *tangents


# --- norm, rotation, transform


def rms_norm(
    x: Float[Array, "*batch d"], weight: Float[Array, " d"] | None, eps: float
) -> Float32[Array, "*batch d"]:
    """x / sqrt(mean(x**2) + eps) * weight, in float32.

    Args:
      x: floating, any leading axes.
      weight: per value, or None for a norm without weights.
      eps: added to the mean square.

    Returns:
      float32. A row whose mean square overflows is NaN, not zero.
    """
    x = x.astype(jnp.float32)
    return _normalise(x, jnp.mean(x * x, axis=-1, keepdims=True), weight, eps)


def row_norm(
    x: Float[Array, "*batch d"], weight: Float[Array, " d"], eps: float
) -> Float32[Array, "*batch d"]:
    """As `rms_norm`, and the same bits in every program: for rows that are stored.

    Its sums are in an order that is written out, which GPUs reduce slower than one of their own.
    """
    x = x.astype(jnp.float32)
    return _normalise(x, _mean_square(x), weight, eps)


def _normalise(x, square, weight, eps) -> Float32[Array, "*batch d"]:
    inverse = 1.0 / jnp.sqrt(square + jnp.float32(eps))
    normalised = x * jnp.where(codec.is_finite(square), inverse, jnp.float32(jnp.nan))
    if weight is None:
        return normalised
    return normalised * jnp.broadcast_to(weight.astype(jnp.float32), x.shape)


def checked_norm_eps(name: str, value: Any) -> float:
    """What a norm adds to the mean square, a number that is part of the program.

    Raises:
      ValueError: it is traced, no number, below 0, or beyond float32.
    """
    eps = checks.as_float(name, value)
    if not 0 <= eps <= float(np.finfo(np.float32).max):
        raise ValueError(f"{name}: expected a finite number of 0 or more, got {value!r}")
    return eps


def check_rotation(width, tokens, cos, sin, pairing) -> None:
    """Raises ValueError unless cos and sin rotate pairs of `tokens` rows of `width` values."""
    checks.check_choice("pairing", pairing, PAIRINGS)
    for name, value in (("cos", cos), ("sin", sin)):
        checks.check_floating(name, value)
        checks.check_shape(name, value, (tokens, None))
    if cos.shape != sin.shape or 2 * cos.shape[-1] > width:
        raise ValueError(
            f"cos, sin: expected the same shape with at most {width // 2} pairs, got "
            f"{cos.shape} and {sin.shape}"
        )


def rope(
    x: Float[Array, "*batch d"],
    cos: Float[Array, "*#batch half"],
    sin: Float[Array, "*#batch half"],
    pairing: str = "interleaved",
    inverse: bool = False,
) -> Float32[Array, "*batch d"]:
    """Rotates pairs of the last 2 * half values of each row; the others stay.

    Args:
      x: rows.
      cos: cosine of each pair's angle; leading axes as x's, or of size 1.
      sin: sine of each pair's angle.
      pairing: "interleaved" pairs neighbours (2i, 2i + 1), "half_split" pairs (i, i + half).
      inverse: rotate by the negative angle.

    Returns:
      float32, x's shape.
    """
    half = cos.shape[-1]
    x = x.astype(jnp.float32)
    cos, sin = cos.astype(jnp.float32), sin.astype(jnp.float32)
    sin = -sin if inverse else sin
    kept, rotated = x[..., : x.shape[-1] - 2 * half], x[..., x.shape[-1] - 2 * half :]
    if pairing == "interleaved":
        pairs = rotated.reshape(*x.shape[:-1], half, 2)
        a, b = pairs[..., 0], pairs[..., 1]
    else:
        a, b = rotated[..., :half], rotated[..., half:]
    turned = [
        _rounded(a * cos) - _rounded(b * sin),
        _rounded(b * cos) + _rounded(a * sin),
    ]
    if pairing == "interleaved":
        rotated = jnp.stack(turned, axis=-1).reshape(rotated.shape)
    else:
        rotated = jnp.concatenate(turned, axis=-1)
    return jnp.concatenate([kept, rotated], axis=-1)


def hadamard(x: Float[Array, "*batch d"]) -> Float32[Array, "*batch d"]:
    """The orthonormal Hadamard transform of the last axis, in Sylvester's order.

    It is its own inverse, and keeps every dot product of two transformed rows.

    Args:
      x: rows; d is a power of two.

    Returns:
      float32, x's shape.

    Raises:
      ValueError: d is not a power of two.
    """
    width = x.shape[-1]
    if not checks.is_power_of_two(width):
        raise ValueError(f"x: expected a width that is a power of two, got {width}")
    x = _rounded(x.astype(jnp.float32))
    step = 1
    while step < width:
        pairs = x.reshape(*x.shape[:-1], width // (2 * step), 2, step)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = jnp.stack([a + b, a - b], axis=-2).reshape(x.shape)
        step *= 2
    return x * jnp.float32(width**-0.5)


def turns_per_position(frequencies: np.ndarray) -> np.ndarray:
    """Frequencies as 64-bit fixed-point fractions of a turn, in two words.

    Args:
      frequencies: float64[half], radians per position.

    Returns:
      uint32[2, half]: the high and the low word of frequency / (2 pi) modulo 1, rounded.
    """
    words = np.empty((2, len(frequencies)), np.uint32)
    for i, frequency in enumerate(np.asarray(frequencies, np.float64).tolist()):
        turn = round(fractions.Fraction(frequency) / (2 * _PI) * 2**64) % 2**64
        words[:, i] = turn >> 32, turn & 0xFFFFFFFF
    return words


def rope_cos_sin(
    positions: Int32[Array, "*n"], turns: np.ndarray
) -> tuple[Float32[Array, "*n half"], Float32[Array, "*n half"]]:
    """Cosine and sine of position * frequency, right to 2e-7 at every int32 position.

    The product is taken modulo one turn in 64-bit integers, so nothing of the angle is lost at
    large positions, where a float32 product is off by up to 0.03 radians at a million.

    Args:
      positions: int32, any shape.
      turns: uint32[2, half] from `turns_per_position`.

    Returns:
      Two float32 arrays.
    """
    p = lax.bitcast_convert_type(positions, jnp.uint32)[..., None]
    high = jnp.broadcast_to(jnp.asarray(turns[0]), (*positions.shape, turns.shape[1]))
    low = jnp.broadcast_to(jnp.asarray(turns[1]), high.shape)
    # The top 32 bits of the 64-bit fraction; p stands for 2**32 more than a negative position.
    turn = p * high + _high_word(p, low) - jnp.where(positions[..., None] < 0, low, jnp.uint32(0))
    # Split into the nearest quarter turn and the rest within an eighth, where float32 is fine.
    quarter = (turn + jnp.uint32(1 << 29)) >> 30
    rest = lax.bitcast_convert_type(turn - (quarter << 30), jnp.int32)
    angle = rest.astype(jnp.float32) * jnp.float32(2 * math.pi / 2**32)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    swap, negative_sin = (quarter & 1) == 1, (quarter & 2) == 2
    negative_cos = swap != negative_sin
    cos, sin = jnp.where(swap, sin, cos), jnp.where(swap, cos, sin)
    return jnp.where(negative_cos, -cos, cos), jnp.where(negative_sin, -sin, sin)


def _high_word(a, b):
    """The high 32 bits of the product of two uint32 arrays, from 16-bit halves."""
    a_low, a_high = a & 0xFFFF, a >> 16
    b_low, b_high = b & 0xFFFF, b >> 16
    middle = a_high * b_low + ((a_low * b_low) >> 16)
    carry = a_low * b_high + (middle & 0xFFFF)
    return a_high * b_high + (middle >> 16) + (carry >> 16)
