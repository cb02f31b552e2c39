"""What a compiled program sends from device to device, read from its HLO text."""

import re
from typing import NamedTuple

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
"""HLO's instructions that talk to other devices, without send and recv of pipelines."""

_INSTRUCTION = re.compile(rf"= ([^=]*?) ({'|'.join(KINDS)})(?:-start)?\(")
_SHAPE = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,]*)\]")
_BITS = re.compile(r"\d+")


class Collective(NamedTuple):
    """One instruction, as each device runs it.

    Attributes:
      kind: one of KINDS.
      shapes: HLO's dtype and the shape of each result; operands too where it is asynchronous.
    """

    kind: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all shapes."""
        total = 0
        for dtype, shape in self.shapes:
            bits = 8 if dtype == "pred" else int(_BITS.findall(dtype)[0])
            for size in shape:
                bits *= size
            total += -(-bits // 8)
        return total

    @property
    def has_bytes(self) -> bool:
        """Whether something of it is bytes, as rows are."""
        return any(dtype in ("u8", "s8") for dtype, _ in self.shapes)


def find_collectives(hlo: str) -> list[Collective]:
    """The collectives of a program in the order of its text; one in a loop counts once.

    Args:
      hlo: text of the optimised program, as `jitted.lower(...).compile().as_text()` gives it.
    """
    found = []
    for line in hlo.splitlines():
        match = _INSTRUCTION.search(re.sub(r"/\*.*?\*/", "", line))
        if match is not None:
            shapes = tuple(
                (dtype, tuple(int(size) for size in sizes.split(",") if size))
                for dtype, sizes in _SHAPE.findall(match[1])
            )
            found.append(Collective(match[2], shapes))
    return found


def carrying_rows(found: list[Collective], largest_activation: int) -> list[Collective]:
    """Those that may carry rows of a cache: bytes, or more than any activation has.

    Args:
      found: from `find_collectives`.
      largest_activation: bytes of the largest array of activations on one device. Rows that were
        decoded, or a whole cache in another dtype, are larger.
    """
    return [one for one in found if one.has_bytes or one.nbytes > largest_activation]
