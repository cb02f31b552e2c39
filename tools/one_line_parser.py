"""What the tools' command lines share: errors in one line, exit status 2."""

import argparse
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Ends the program with status 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")
