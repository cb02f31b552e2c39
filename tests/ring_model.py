"""A ring in dictionaries: which rows it holds and which of them a query sees, by the window rule.

Nothing here is shared with the library. A row is a number; the test knows what its bytes are.
"""

import dataclasses


@dataclasses.dataclass
class RequestModel:
    """One request and the rows that its ring still holds.

    Attributes:
      position: where it goes on.
      highest: the highest position stored so far, by requests it was forked from too.
      oldest: the lowest position whose row the ring was given and nobody has given up since.
      rows: the row of each position that counts. Rejected positions have none.
    """

    position: int = 0
    highest: int = -1
    oldest: int = 0
    rows: dict[int, int] = dataclasses.field(default_factory=dict)

    def fork(self) -> "RequestModel":
        return dataclasses.replace(self, rows=dict(self.rows))


@dataclasses.dataclass(frozen=True)
class RingModel:
    """The rules of a ring, for one request at a time."""

    window: int
    capacity: int

    def visible(self, rows: dict[int, int], query: int) -> list[int]:
        """The positions that a query sees, oldest first."""
        return sorted(key for key in rows if 0 <= query - key < self.window)

    def store(self, request: RequestModel, position: int, row: int) -> None:
        """Position p takes the place of every other position that is p modulo the capacity."""
        for key in list(request.rows):
            if (key - position) % self.capacity == 0:
                del request.rows[key]
        request.rows[position] = row
        request.highest = max(request.highest, position)

    def go_on_at(self, request: RequestModel, position: int) -> None:
        """Rows from a position on count no longer."""
        request.position = position
        request.rows = {key: row for key, row in request.rows.items() if key < position}

    def has_window_of(self, request: RequestModel, position: int) -> bool:
        """Whether all that a query at a position sees, but for its own row, is there."""
        before = range(max(0, position - self.window + 1), position)
        return all(key in request.rows for key in before)

    def may_go_on_at(self, request: RequestModel, position: int) -> bool:
        """Whether a request may go back to a position."""
        if not 0 <= position <= request.position:
            return False
        room = self.capacity - self.window
        return request.highest - position <= room and self.has_window_of(request, position)

    def forget(self, request: RequestModel) -> None:
        """Gives up every row that the query at the request's position does not see."""
        least = max(0, request.position - self.window + 1)
        request.rows = {key: row for key, row in request.rows.items() if key >= least}
        request.oldest = max(request.oldest, least)
