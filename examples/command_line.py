"""What the examples' command lines share: types of options, errors in one line, exit status 2."""

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def print_error(program: str, error: Exception) -> None:
    """An error in one line on standard error."""
    print(f"{program}: error: {' '.join(str(error).split())}", file=sys.stderr)


# --- types of options


def whole_number(smallest: int, largest: int | None = None) -> Callable[[str], int]:
    """The type of an option that is a whole number.

    Args:
      smallest: that is taken.
      largest: that is taken; None: any.
    """
    wanted = f"{smallest} or more" if largest is None else f"{smallest} to {largest}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = smallest - 1
        if value < smallest or (largest is not None and value > largest):
            raise argparse.ArgumentTypeError(f"expected {wanted}, got {text or 'nothing'}")
        return value

    return parse


MAX_STEPS = 65536
"""The most steps that a program may scan, or tokens of a text that it may take at once."""
MAX_REQUESTS = 4096
"""The most requests that may be served, or beams that may be searched, side by side."""
PICTURES = (".png", ".svg", ".pdf")
"""How the name of a picture to draw may end."""
random_seed = whole_number(0, 2**32 - 1)
"""The type of --seed: what `jax.random.key` takes in 32 bits."""


def output_file(text: str) -> Path:
    """The type of an option that names a file to write, in a folder that is there."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in a folder, got {path}")
    return path


def output_picture(text: str) -> Path:
    """The type of an option that names a picture to draw: an `output_file`, and matplotlib."""
    if Path(text).suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(f"expected a name in {', '.join(PICTURES)}, got {text}")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("needs matplotlib: pip install -e '.[examples]'")
    return output_file(text)
