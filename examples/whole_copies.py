"""Which instructions of a compiled program copy a whole block of a cache, from its HLO text."""

import re
from collections.abc import Sequence


def whole_copies(text: str, shape: Sequence[int]) -> list[str]:
    """Instructions that copy a whole array of bytes, inside fusions too.

    Args:
      text: the program, as XLA prints it.
      shape: of the uint8 array, such as a block of a cache.

    Returns:
      Their lines.
    """
    array = re.escape(f"u8[{','.join(map(str, shape))}]")
    copy = re.compile(rf"= .*{array}.* copy(-start)?\(")
    return [line.strip() for line in text.splitlines() if copy.search(line)]
