"""Which tile of the attention kernel runs: by card and row format, never by the batch."""

import dataclasses
from collections.abc import Sequence

from pallas_kernels import triton_rows
from pallas_kernels.checks import is_power_of_two
from pallas_kernels.formats import KVCacheFormat

CHUNK = 64
"""Values of a row in one matrix product. The raw tail of a mixed format is one chunk."""

_PIECE_COLUMNS = 256


@dataclasses.dataclass(frozen=True)
class Tile:
    """How one program of the kernel is cut.

    Attributes:
      heads: heads of a program, padded to the tensor cores' tile.
      keys: rows that are gathered and multiplied at once.
      num_warps: warps of a program.
      unroll: straight-line code for a list instead of a loop over its blocks.
    """

    heads: int
    keys: int
    num_warps: int
    unroll: bool


def refusal(fmt: KVCacheFormat) -> str | None:
    """Why the kernel cannot read rows of a format, or None where it can."""
    if fmt.num_elements not in triton_rows.WIDTHS:
        widths = ", ".join(map(str, triton_rows.WIDTHS))
        return f"reads rows of {widths} values, got {fmt.num_elements}"
    if _is_mixed(fmt) and (fmt.raw_elements != CHUNK or not fmt.scales_last):
        return f"reads rows with a raw tail of {CHUNK} values, got format {fmt.name}"
    group = fmt.elements_per_scale
    if group and not (is_power_of_two(group) and group <= CHUNK):
        return f"reads groups of at most {CHUNK} values, a power of two, got {group}"
    return None


# Each compiles without spills; `examples/machine_code.py` prints the figures.
#
# Hopper multiplies 64 heads at once, from shared memory. LLVM would move the addresses of all
# operands out of a loop, more than there are registers: so straight-line code.
_HOPPER_WINDOW = Tile(heads=64, keys=128, num_warps=8, unroll=True)  # all at once: fewest barriers
_HOPPER = Tile(heads=64, keys=64, num_warps=8, unroll=True)  # the most where blocks follow blocks
# Elsewhere a warp multiplies 16 heads; 32 need half as many keys at a time, and then a lane gathers
# less than 16 bytes. On Blackwell too: products in its tensor memory spill or do not fit.
_OTHER = Tile(heads=16, keys=64, num_warps=8, unroll=False)
_OTHER_V4 = Tile(heads=16, keys=32, num_warps=8, unroll=False)  # 64 keys spill
_OTHER_F32 = Tile(heads=16, keys=16, num_warps=8, unroll=False)  # 32 keys spill

_HOPPER_CARDS = ("H100", "H200", "H800", "H20", "GH200")


def choose_tile(card: str, formats: Sequence[KVCacheFormat], columns: Sequence[int]) -> Tile:
    """The tile for a card.

    Args:
      card: the device kind, as JAX names it.
      formats: the formats of the caches.
      columns: the widths of their index lists.

    Returns:
      The tile; the same for every batch, so that a result does not depend on the batch.
    """
    if any(name in card.split() for name in _HOPPER_CARDS):
        return _HOPPER_WINDOW if sum(columns) <= _HOPPER_WINDOW.keys else _HOPPER
    if any(fmt.raw_dtype == "float32" for fmt in formats):
        return _OTHER_F32
    return _OTHER_V4 if any(_is_mixed(fmt) for fmt in formats) else _OTHER


def _is_mixed(fmt: KVCacheFormat) -> bool:
    return fmt.quantized_elements > 0 and fmt.raw_elements > 0


def num_pieces(columns: int) -> int:
    """Programs that share the index lists of one query, by the lists' width.

    Few queries fill a card only if each is several programs; what many lose by it is the merge.
    """
    return max(1, -(-columns // _PIECE_COLUMNS))


def blocks_of_piece(columns: int, tile: Tile, pieces: int) -> int:
    """Blocks of a list that a piece of it has: piece i reads those from i times as many on.

    Args:
      columns: the list's width.
      tile: of the kernel; a block is `tile.keys` columns.
      pieces: as of `num_pieces`, for all lists together.
    """
    return -(-columns // (tile.keys * pieces))
