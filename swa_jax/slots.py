"""Slots: which state slot belongs to which request, as an immutable value."""

import dataclasses
from collections.abc import Hashable

from pallas_kernels import checks


@dataclasses.dataclass(frozen=True)
class Slots:
    """The owners of a pool of state slots.

    Attributes:
      owners: of each slot, the request that it belongs to; None for a free one.
    """

    owners: tuple[Hashable | None, ...]

    @classmethod
    def create(cls, count: int) -> "Slots":
        """A pool of free slots.

        Args:
          count: number of slots.

        Raises:
          ValueError: it is below 1.
        """
        checks.check_count("count", count)
        return cls((None,) * count)

    @property
    def free(self) -> tuple[int, ...]:
        """The slots that belong to nobody, lowest first."""
        return tuple(slot for slot, owner in enumerate(self.owners) if owner is None)

    def acquire(self, owner: Hashable) -> tuple["Slots", int]:
        """Gives the lowest free slot to a request.

        Args:
          owner: the request, by anything hashable but None.

        Returns:
          The new value, and the slot.

        Raises:
          ValueError: the request has a slot, there is none to give, or the owner is None.
        """
        if owner is None:
            raise ValueError("owner: expected a request, got None")
        if owner in self.owners:
            raise ValueError(
                f"owner: expected a request without a slot, got {owner!r}, which has slot "
                f"{self.owners.index(owner)}"
            )
        if not self.free:
            raise ValueError(
                f"owner: expected a free slot for {owner!r}, got none of {self._count}"
            )
        slot = self.free[0]
        return self._with_owner(slot, owner), slot

    def release(self, slot: int, owner: Hashable) -> "Slots":
        """Takes a slot back from the request it belongs to.

        Args:
          slot: which one.
          owner: the request.

        Returns:
          The new value.

        Raises:
          ValueError: there is no such slot, it is free, or it belongs to another request.
        """
        if not 0 <= slot < self._count:
            raise ValueError(f"slot: expected 0 to {self._count - 1}, got {slot}")
        if self.owners[slot] is None:
            raise ValueError(
                f"slot: expected one that belongs to {owner!r}, got {slot}, a free one"
            )
        if self.owners[slot] != owner:
            raise ValueError(
                f"slot: expected one that belongs to {owner!r}, got {slot} of {self.owners[slot]!r}"
            )
        return self._with_owner(slot, None)

    @property
    def _count(self) -> int:
        return len(self.owners)

    def _with_owner(self, slot: int, owner: Hashable | None) -> "Slots":
        return Slots((*self.owners[:slot], owner, *self.owners[slot + 1 :]))
