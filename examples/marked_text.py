"""Tables that a command writes into a document, between two marks of theirs."""


def replace_between_marks(text: str, marks: tuple[str, str], table: str) -> str:
    """Replaces what stands between two marks.

    Args:
      text: the document.
      marks: before and after the table, each on a line of its own.
      table: what is to stand there.

    Raises:
      ValueError: the marks are not there, or not in this order.
    """
    before, start, rest = text.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not start or not end:
        raise ValueError(f"expected {marks[0]!r} and then {marks[1]!r}")
    return f"{before}{marks[0]}\n{table}\n{marks[1]}{after}"
