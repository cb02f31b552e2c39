"""What the examples' command lines share: errors in one line, and exit status 2."""

import argparse
import sys
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def print_error(program: str, error: Exception) -> None:
    """An error in one line on standard error."""
    print(f"{program}: error: {' '.join(str(error).split())}", file=sys.stderr)
