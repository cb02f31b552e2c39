"""Matrices in e4m3 with a scale for each square block, as DeepSeek's checkpoints hold them.

A weight is its e4m3 value times the scale of its block. Blocks at the lower and right edge may be
partial: a matrix [out, in] has ceil(out / b) * ceil(in / b) scales.
"""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Float, Float32

from pallas_kernels.codec import power_of_two_scale

BLOCK_SIZES = (128, 32)
"""V4 has blocks of 128 x 128, V4.1 of 32 x 32."""

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
SCALE_DTYPES = (E8M0, np.dtype(np.uint8), np.dtype(np.float32))
"""Of scales; uint8 holds the biased exponent, as E8M0 does."""

# A cast of ml_dtypes takes ten times as long as a look-up.
_E4M3_VALUES = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
# The smallest exponent whose power of two is a normal number: kernels flush others to zero.
_SMALLEST_EXPONENT = 1


def scales_shape(shape: tuple[int, ...], block: int) -> tuple[int, ...]:
    """The shape of a matrix's scales."""
    return tuple(-(-size // block) for size in shape)


def find_block_size(shape: tuple[int, ...], scales: tuple[int, ...]) -> int | None:
    """The size of blocks by which a matrix of a shape has scales of another; None if there is none.

    Two sizes fit only a matrix that is one block by either, so they give the same numbers.
    """
    return next((size for size in BLOCK_SIZES if scales_shape(shape, size) == scales), None)


def scale_values(scales: np.ndarray) -> Float32[np.ndarray, "m n"]:
    """Scales of any of SCALE_DTYPES in float32. The exponent 255 is NaN."""
    if scales.dtype == np.uint8:
        scales = scales.view(E8M0)
    return scales.astype(np.float32)


def wrong_scale(scales: np.ndarray) -> float | None:
    """The first scale that no quantiser gives, NaN, infinite or below 0; None if there is none."""
    values = scale_values(scales)
    wrong = values[~(np.isfinite(values) & (values >= 0))]
    return float(wrong[0]) if wrong.size else None


def dequantize(
    codes: np.ndarray,
    scales: Float32[np.ndarray, "m n"],
    block: int,
    row: int = 0,
    column: int = 0,
) -> Float32[np.ndarray, "out in"]:
    """A part of a matrix: its e4m3 values times their scales, in float32.

    Args:
      codes: e4m3[rows, columns], the part.
      scales: of the whole matrix.
      block: b, size of the blocks.
      row: the part's first row in the matrix.
      column: its first column.

    Returns:
      The part. NaN codes give NaN; a product beyond float32 is infinite.
    """
    rows, columns = codes.shape
    values = np.take(_E4M3_VALUES, codes.view(np.uint8), mode="clip")
    first, last = row // block, -(-(row + rows) // block)
    wide = np.repeat(scales[first:last], block, axis=1)[:, column : column + columns]
    with np.errstate(over="ignore", invalid="ignore"):
        for i in range(first, last):
            start = max(i * block - row, 0)
            values[start : (i + 1) * block - row] *= wide[i - first]
    return values


def quantize(
    values: Float[np.ndarray, "out in"], block: int = BLOCK_SIZES[0]
) -> tuple[np.ndarray, np.ndarray]:
    """A matrix as e4m3 codes with a power-of-two scale for each block.

    The scale is 2**ceil(log2(amax / 448)), where amax is the block's largest finite magnitude, so
    that nothing saturates. What is not finite becomes NaN.

    Args:
      values: floating[out, in].
      block: b, size of the blocks.

    Returns:
      Codes, e4m3[out, in], and scales, e8m0[ceil(out / b), ceil(in / b)].
    """
    rows, columns = values.shape
    starts = range(0, rows, block)
    edges = np.arange(0, columns, block)
    amax = np.empty((len(starts), len(edges)), np.float32)
    for i, row in enumerate(starts):
        part = np.abs(values[row : row + block].astype(np.float32))
        part[~np.isfinite(part)] = 0
        amax[i] = np.maximum.reduceat(part.max(axis=0), edges)
    exponents = np.asarray(power_of_two_scale(jnp.asarray(amax), _SMALLEST_EXPONENT))
    scales = exponents.astype(np.uint8).view(E8M0)
    wide = np.repeat(scales.astype(np.float32), block, axis=1)[:, :columns]
    codes = np.empty(values.shape, E4M3)
    for i, row in enumerate(starts):
        part = values[row : row + block].astype(np.float32) / wide[i]
        codes[row : row + block] = part.astype(E4M3)
    return codes, scales
