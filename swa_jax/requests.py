"""Request and Result: what is asked of a pool of state slots, and what comes back and when."""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Literal

from swa_jax.prompts import Prompt
from swa_jax.sampling import Sampling

Finish = Literal["stop", "length", "cancelled"]
"""Why a request ended: at a stop token, at its limit of tokens, or before either."""


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """A prompt to continue. Equal requests are two.

    Attributes:
      prompt: token ids, at least one; bytes count as such.
      max_new_tokens: tokens to choose at most, 1 or more.
      sampling: how tokens are chosen, settings of one request; greedy by default.
      stop_tokens: token ids that end it; they are not part of the result.
      name: anything, to know the result by.
    """

    prompt: Prompt
    max_new_tokens: int
    sampling: Sampling | None = None
    stop_tokens: Sequence[int] = ()
    name: Hashable = None


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
    """The tokens of a request, and when the host had them.

    Attributes:
      request: which one.
      tokens: the new tokens, without prompt and stop token.
      finish: why it ended.
      arrived: seconds of `time.perf_counter` at which it was submitted.
      reads: for each read that brought tokens of it, the seconds and how many. The first brought
        one; each later one is of a block, whose tokens come together.
    """

    request: Request
    tokens: tuple[int, ...]
    finish: Finish
    arrived: float
    reads: tuple[tuple[float, int], ...]

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token, the wait for a slot included; None: no token."""
        return self.reads[0][0] - self.arrived if self.reads else None

    @property
    def times_between_tokens(self) -> tuple[float, ...]:
        """Seconds for each token after the first: a block's time, spread evenly over its tokens."""
        return tuple(
            (now - before) / count
            for (before, _), (now, count) in zip(self.reads, self.reads[1:], strict=False)
            for _ in range(count)
        )
