"""The inputs of the recorded rows: integer formulas, which records and tests both compute.

Nothing here is rounded, whatever computes it: values are small integers over powers of two, a row's
mean square is a power of four, and rotations are by whole quarter turns.
"""

import math

import numpy as np

WIDTH, HALF, HEADS = 512, 32, 2
ROOT_MEAN_SQUARE = 64
WINDOW_ROWS, EXTRA_ROWS = 3 * 67, 2 * 150
FEW_COLUMNS = np.arange(0, WIDTH, 32) + np.arange(16) * 11 % 32
"""A value of each group of 32, at another place in each."""


def hashed(*keys) -> np.ndarray:
    """uint32 that look random: MurmurHash3's finaliser over the sum so far and each key."""
    value = np.zeros(1, np.uint32)
    for key in keys:
        value = value * np.uint32(5) + np.asarray(key, np.int64).astype(np.uint32)
        value = (value ^ (value >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        value = (value ^ (value >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        value = value ^ (value >> np.uint32(16))
    return value


def magnitudes() -> np.ndarray:
    """512 integers below 256, few of them large, whose mean square is 64**2."""
    values = 3 * np.arange(WIDTH, dtype=np.int64) ** 4 >> 30
    rest, i = WIDTH * ROOT_MEAN_SQUARE**2 - int((values**2).sum()), 0
    while rest:
        values[i] = math.isqrt(rest)
        rest, i = rest - int(values[i]) ** 2, i + 1
    return values


def latents(request, position, version=0) -> np.ndarray:
    """Rows before norm and rotation: float32[..., 512], the magnitudes in another order in each.

    Args:
      request: integers of any shape, as the others, to which they broadcast.
      position: the token's position.
      version: 0 for the token that stays, others for drafts at its position.
    """
    row = hashed(request, position, version)[..., None]
    column = np.arange(WIDTH, dtype=np.uint32)
    place = (column * (row | np.uint32(1)) + (row >> np.uint32(16))) % np.uint32(WIDTH)
    sign = 1 - 2 * (hashed(row, column) & 1).astype(np.int64)
    return (sign * magnitudes()[place]).astype(np.float32)


def queries(request, position, version=0) -> np.ndarray:
    """Queries before the rotation: float32[..., 2, 512], multiples of 1/32 from -4 to 127/32."""
    token = hashed(request, position, version)[..., None, None]
    head, column = np.ogrid[:HEADS, :WIDTH]
    return (hashed(token, head, column) & 0xFF).astype(np.float32) / 32 - 4


def versions(length: int, accepted: int) -> np.ndarray:
    """Versions of the tokens of one step: those beyond the accepted ones are drafts."""
    token = np.arange(length)
    return np.where(token < accepted, 0, 1 + token % 3)


def norm_weight() -> np.ndarray:
    """float32[512], of ten bits, from 1/16 to 2."""
    value = hashed(np.arange(WIDTH), 1)
    power = 9 + (value >> np.uint32(16)) % 4
    return np.ldexp((512 + value % 512).astype(np.float32), -power.astype(np.int32))


def rotation(position) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines [..., 32]: pair i turns by 2i + 1 quarters a position."""
    quarter = np.asarray(position)[..., None] * (2 * np.arange(HALF) + 1) % 4
    cos = np.array([1, 0, -1, 0], np.float32)
    return cos[quarter], cos[quarter - 1]


# --- two caches, as bytes


def readable(rows: int) -> np.ndarray:
    """The rows that a query may read: not the first, the last, nor every tenth."""
    row = np.arange(rows)
    return row[(row % 10 > 0) & (row < rows - 1)]


def window_rows() -> np.ndarray:
    """uint8[WINDOW_ROWS, 528]; 0xFF where they are not readable."""
    return _with_poison(_v41_bytes(WINDOW_ROWS, 2))


def extra_rows(kind: str) -> np.ndarray:
    """uint8[EXTRA_ROWS, row_bytes] of the kind "v41", "fp4" or "bfloat16"; 0xFF as window_rows."""
    if kind == "v41":
        return _with_poison(_v41_bytes(EXTRA_ROWS, 3))
    return _with_poison(_fp4_bytes(EXTRA_ROWS) if kind == "fp4" else _bfloat16_bytes(EXTRA_ROWS))


def _with_poison(data: np.ndarray) -> np.ndarray:
    keep = np.isin(np.arange(len(data)), readable(len(data)))
    return np.where(keep[:, None], data, np.uint8(0xFF))


def _v41_bytes(rows: int, seed: int) -> np.ndarray:
    """Rows of 528 bytes: any e4m3 code but NaN, and scales from 2**-10 to 2**-7."""
    row, column = np.ogrid[:rows, : WIDTH + WIDTH // 32]
    value = hashed(row, column, seed)
    codes = np.where((value & 0x7F) == 0x7F, value & 0x80, value & 0xFF)
    return np.where(column < WIDTH, codes, 117 + value % 4).astype(np.uint8)


def _fp4_bytes(rows: int) -> np.ndarray:
    """Rows of 288 bytes: any pair of e2m1 codes, and e4m3 scales, one in eight below 2**-6."""
    row, column = np.ogrid[:rows, : WIDTH // 2 + WIDTH // 16]
    value = hashed(row, column, 4)
    scales = np.where(value % 8 == 0, 1 + (value >> np.uint32(8)) % 7, 0x18 + value % 24)
    return np.where(column < WIDTH // 2, value & 0xFF, scales).astype(np.uint8)


def _bfloat16_bytes(rows: int) -> np.ndarray:
    """Rows of 1024 bytes: multiples of 1/128 from -1 to 127/128."""
    row, column = np.ogrid[:rows, :WIDTH]
    value = (hashed(row, column, 5) & 0xFF).astype(np.float32) / 128 - 1
    return (value.view(np.uint32) >> np.uint32(16)).astype("<u2").view(np.uint8)
