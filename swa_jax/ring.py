"""Ring geometry: where a position lives, what a query may read, and how large a ring must be.

One request owns one state slot of S rows. Position p of state slot b lives in flattened slot
b * S + p % S, and nothing else records a position: what a query sees follows from its own position.
Flattened slots count rows; they are neither byte offsets nor array axes. The rules are those of
the DeepInfer serving engine, "the engine" below.
"""

import dataclasses
import operator
from collections import Counter
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Int

from pallas_kernels.checks import as_int32


@dataclasses.dataclass(frozen=True)
class RingGeometry:
    """Window and capacity of one ring; hashable, so that a jitted function can take it as static.

    Attributes:
      window: W, rows a query may read, its own included.
      capacity: S, rows one request owns, at least W. Rows beyond the window are room for drafts:
          a step may store S - W + 1 tokens before it reads.

    Raises:
      ValueError: unless both are ints (not bools) with 1 <= window <= capacity < 2**31.
    """

    window: int
    capacity: int

    def __post_init__(self):
        object.__setattr__(self, "window", _checked_int("window", self.window, 1))
        object.__setattr__(self, "capacity", _checked_int("capacity", self.capacity, 1))
        if not self.window <= self.capacity < 2**31:
            raise ValueError(
                f"capacity: expected window ({self.window}) <= capacity < 2**31, "
                f"got {self.capacity}"
            )

    @classmethod
    def for_drafts(
        cls,
        window: int,
        draft_tokens: int = 5,
        backtracking_override: int = 0,
        prefill_extra_state: bool = False,
        prefill_extra_size: int = 128,
        yoco_truncation: bool = False,
        yoco_keep_tokens: int = 0,
    ) -> "RingGeometry":
        """The ring that a server with this draft configuration allocates.

        S = window + max(backtracking_override, draft_tokens + 1); with prefill extra state on,
        plus prefill_extra_size and, if truncation is on as well, yoco_keep_tokens.

        Args:
          window: W, rows a query may read, its own included.
          draft_tokens: most draft tokens verified in one step; the step has one query more.
          backtracking_override: rows of room asked for explicitly; the larger allowance counts.
          prefill_extra_state: whether prefill keeps extra rows in the ring.
          prefill_extra_size: those rows; counted only when prefill_extra_state is on.
          yoco_truncation: whether shared layers see a truncated prompt; counted only when
              prefill_extra_state is on.
          yoco_keep_tokens: prompt rows kept for them; counted only when both switches are on.

        Returns:
          The geometry; window 128 with the defaults has 134 rows.

        Raises:
          ValueError: for anything but non-negative ints and, for the two switches, bools.

        The engine's own rule for its inference ring.
        """
        window = _checked_int("window", window, 1)
        drafts = _checked_int("draft_tokens", draft_tokens, 0)
        override = _checked_int("backtracking_override", backtracking_override, 0)
        extra = _checked_int("prefill_extra_size", prefill_extra_size, 0)
        keep = _checked_int("yoco_keep_tokens", yoco_keep_tokens, 0)
        for name, switch in [
            ("prefill_extra_state", prefill_extra_state),
            ("yoco_truncation", yoco_truncation),
        ]:
            if not isinstance(switch, bool):
                raise ValueError(f"{name}: expected a bool, got {switch!r}")
        capacity = window + max(override, drafts + 1)
        if prefill_extra_state:
            capacity += extra + (keep if yoco_truncation else 0)
        return cls(window, capacity)

    @property
    def max_tokens_per_step(self) -> int:
        """Most tokens a step may store before it reads: S - W + 1 (7 for 128/134)."""
        return self.capacity - self.window + 1

    @property
    def max_rollback(self) -> int:
        """Farthest a request may go back: S - W (6 for 128/134).

        Going on from position q is exact while the highest position stored so far is at most
        q + max_rollback and the window before q was stored.
        """
        return self.capacity - self.window

    def check_tokens(self, tokens: int) -> None:
        """Refuses a step that would overwrite rows its own earliest query still reads.

        Args:
          tokens: T, new tokens of one request in a step that stores before it reads.

        Raises:
          ValueError: when S < W + T - 1, with W, S, T and the largest T; or T is no int >= 0.
        """
        tokens = _checked_int("tokens", tokens, 0)
        if tokens > self.max_tokens_per_step:
            raise ValueError(
                f"tokens per step: expected at most {self.max_tokens_per_step} "
                f"(capacity - window + 1) for window {self.window} and capacity {self.capacity}, "
                f"got {tokens}: storing them first would overwrite rows the first query reads"
            )

    def slots(
        self, state_ids: Int[ArrayLike, "..."], positions: Int[ArrayLike, "..."]
    ) -> Int[Array, "..."]:
        """Flattened slots in which positions are stored: b * S + p % S.

        Args:
          state_ids: int32, state slot of each request; positions' shape or its leading axes.
          positions: int32 of any shape, tokens from the start of the request; negative: padding.

        Returns:
          int32 of positions' shape, in rows; -1 where the position or the state id is negative,
          or where the state id is so large that no int32 slot exists for it.

        Raises:
          ValueError: if the shapes do not fit or an argument is not of integers in int32 range.

        The write address of the engine's decode metadata kernel.
        """
        return self._slots(*_aligned(state_ids, positions))

    def read_bounds(
        self, state_ids: Int[ArrayLike, "..."], positions: Int[ArrayLike, "..."]
    ) -> tuple[Int[Array, "..."], Int[Array, "..."]]:
        """First slot that each query reads, and how many rows it reads from there, with wrapping.

        Args:
          state_ids: int32, as for `slots`.
          positions: int32 of any shape, the query positions; negative: padding.

        Returns:
          (first, length), int32 of positions' shape, in rows: the slot of the oldest visible
          position and min(p + 1, W). Padding has (-1, 0).

        Raises:
          ValueError: as `slots`.

        The read bounds of the engine's decode metadata kernel.
        """
        state_ids, positions = _aligned(state_ids, positions)
        oldest = jnp.where(positions < 0, -1, self._oldest_visible(positions))
        first = self._slots(state_ids, oldest)
        # min(p + 1, W) would overflow at the last int32 position
        length = jnp.minimum(positions, self.window - 1) + 1
        return first, jnp.where(first < 0, 0, length)

    def read_indices(
        self, state_ids: Int[ArrayLike, "..."], positions: Int[ArrayLike, "..."]
    ) -> Int[Array, "... window"]:
        """Flattened slots that each query reads, oldest row first, then -1.

        Args:
          state_ids: int32, as for `slots`.
          positions: int32 of any shape, the query positions; negative: padding.

        Returns:
          int32[..., W], in rows: min(p + 1, W) slots of positions max(0, p - W + 1) .. p, then
          -1. Padding has -1 throughout. Causality rests on these indices alone.

        Raises:
          ValueError: as `slots`.

        The same addresses as the ring branch of the engine's index kernel.
        """
        state_ids, positions = _aligned(state_ids, positions)
        shape = (*positions.shape, self.window)
        column = lax.broadcasted_iota(jnp.int32, shape, positions.ndim)
        positions = positions[..., None]  # [..., 1]
        # cannot overflow: the last column holds W - 1 or, once the window is full, p
        visible = self._oldest_visible(positions) + column
        return self._slots(state_ids[..., None], jnp.where(visible <= positions, visible, -1))

    def _slots(
        self, state_ids: Int[Array, "..."], positions: Int[Array, "..."]
    ) -> Int[Array, "..."]:
        # a larger state id has no int32 slot, and its product would wrap into another ring
        exists = (positions >= 0) & (state_ids >= 0) & (state_ids <= 2**31 // self.capacity - 1)
        return jnp.where(exists, state_ids * self.capacity + positions % self.capacity, -1)

    def _oldest_visible(self, positions: Int[Array, "..."]) -> Int[Array, "..."]:
        return jnp.maximum(positions - (self.window - 1), 0)


class StoreHazard(NamedTuple):
    """A row that a step which stores before it reads destroys while its own queries need it.

    Attributes:
      destroyed_position: the position whose row is lost.
      overwriting_position: the position stored in its place.
      slot: their slot within the request's ring, 0 .. S-1.
      queries: query positions of the step that should still see the destroyed row.
    """

    destroyed_position: int
    overwriting_position: int
    slot: int
    queries: tuple[int, ...]


def store_hazards(geometry: RingGeometry, first_position: int, tokens: int) -> list[StoreHazard]:
    """Rows that storing a run of positions destroys although queries of that run still need them.

    Every earlier position is taken as stored. Overwriting a row that no query of the run sees is
    harmless and not listed. An empty list means that the step may store before it reads; otherwise
    the old rows have to be read first, as prefill does.

    Args:
      geometry: window and capacity.
      first_position: position of the first new token, >= 0.
      tokens: how many consecutive positions are stored, >= 0.

    Returns:
      One record per destroyed row, by overwriting position.

    Raises:
      ValueError: for anything but non-negative ints.

    Position w takes the slot of w - S, and query q sees positions q - W + 1 .. q.
    """
    first = _checked_int("first_position", first_position, 0)
    end = first + _checked_int("tokens", tokens, 0)
    hazards = []
    for overwriting in range(max(first, geometry.capacity), end):
        destroyed = overwriting - geometry.capacity
        queries = tuple(range(max(first, destroyed), min(end, destroyed + geometry.window)))
        if queries:
            slot = overwriting % geometry.capacity
            hazards.append(StoreHazard(destroyed, overwriting, slot, queries))
    return hazards


def overwritten_visible_rows(geometry: RingGeometry, first_position: int, tokens: int) -> list[int]:
    """For each query of a step that stores first, how many rows it should see are destroyed.

    Args:
      geometry: window and capacity.
      first_position: position of the first query, >= 0.
      tokens: T, queries of the step, >= 0.

    Returns:
      T counts of rows, the earliest query first; all zero iff the step is safe.

    Raises:
      ValueError: for anything but non-negative ints.
    """
    hazards = store_hazards(geometry, first_position, tokens)
    lost = Counter(query for hazard in hazards for query in hazard.queries)
    return [lost[first_position + index] for index in range(tokens)]


def _aligned(
    state_ids: Int[ArrayLike, "..."], positions: Int[ArrayLike, "..."]
) -> tuple[Int[Array, "..."], Int[Array, "..."]]:
    """Both as int32 arrays; state_ids gets trailing axes of one, to broadcast over positions."""
    state_ids = as_int32("state_ids", state_ids)
    positions = as_int32("positions", positions)
    if state_ids.shape != positions.shape[: state_ids.ndim]:
        raise ValueError(
            f"state_ids: expected the shape of positions {positions.shape} or its leading axes, "
            f"got {state_ids.shape}"
        )
    return jnp.expand_dims(state_ids, range(state_ids.ndim, positions.ndim)), positions


def _checked_int(name: str, value: int, minimum: int) -> int:
    """The value as a Python int; NumPy integers are taken, bools and floats are not."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name}: expected an int, got {value!r}") from None
    if number < minimum:
        raise ValueError(f"{name}: expected at least {minimum}, got {number}")
    return number
