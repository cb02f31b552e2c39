"""Tables that a command writes into a document, between two marks of theirs."""

import itertools
from collections.abc import Sequence
from pathlib import Path

from swa_jax.files import write_whole
from swa_jax.reading import read_regular


class MarkedDocument:
    """A document with places for tables, read and found good before the tables are made.

    Args:
      path: of the document, UTF-8.
      marks: of each place: what stands before and after it, each on a line of its own.

    Raises:
      OSError: the document cannot be read.
      ValueError: it is not text in a regular file, or the marks are not there, once and in their
        order, or a place begins before another has ended.
    """

    def __init__(self, path: Path, marks: Sequence[tuple[str, str]]):
        self._path, self._marks = path, marks
        self._read()

    def _read(self) -> str:
        """The document as it is now, found good."""
        path = self._path
        try:
            text = read_regular(path).decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: expected text: {error}") from None
        for start, end in self._marks:
            once = text.count(start) == text.count(end) == 1
            if not once or text.find(start) > text.find(end):
                raise ValueError(f"{path}: expected {start!r} and then {end!r}, each once")
        by_place = sorted(self._marks, key=lambda pair: text.find(pair[0]))
        for (_, end), (start, _) in itertools.pairwise(by_place):
            if text.find(end) > text.find(start):
                raise ValueError(f"{path}: expected {end!r} before {start!r}")
        return text

    def write(self, tables: Sequence[str]) -> None:
        """Writes a table into each place of the document as it is now, with its line ends.

        Raises:
          OSError: the document cannot be read or written; it is as it was.
          ValueError: it is no longer such a document.
        """
        text = self._read()  # making the tables may have taken minutes
        newline = "\r\n" if "\r\n" in text else "\n"
        for (start, end), table in zip(self._marks, tables, strict=True):
            before, _, rest = text.partition(start)
            _, _, after = rest.partition(end)
            lines = [start, *table.split("\n"), end]
            text = f"{before}{newline.join(lines)}{after}"
        write_whole(self._path.resolve(), text.encode())  # a link stays one
