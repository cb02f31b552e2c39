"""Tables that a command writes into a document, between two marks of theirs."""

from collections.abc import Sequence
from pathlib import Path


class MarkedDocument:
    """A document with places for tables, read and found good before the tables are made.

    Args:
      path: of the document, UTF-8.
      marks: of each place: what stands before and after it, each on a line of its own.

    Raises:
      OSError: the document cannot be read.
      ValueError: it is not text, or the marks are not there, once and in their order.
    """

    def __init__(self, path: Path, marks: Sequence[tuple[str, str]]):
        self._path, self._marks = path, marks
        try:
            self._text = path.read_bytes().decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: expected text: {error}") from None
        for start, end in marks:
            places = self._text.find(start), self._text.find(end)
            once = self._text.count(start) == self._text.count(end) == 1
            if not once or places[0] > places[1]:
                raise ValueError(f"{path}: expected {start!r} and then {end!r}, each once")

    def write(self, tables: Sequence[str]) -> None:
        """Writes a table into each place, with the line ends that the document has.

        Raises:
          OSError: the document cannot be written.
        """
        newline = "\r\n" if "\r\n" in self._text else "\n"
        text = self._text
        for (start, end), table in zip(self._marks, tables, strict=True):
            before, _, rest = text.partition(start)
            _, _, after = rest.partition(end)
            lines = [start, *table.split("\n"), end]
            text = f"{before}{newline.join(lines)}{after}"
        self._path.write_bytes(text.encode())
