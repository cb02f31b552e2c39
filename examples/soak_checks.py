"""What the soak watches in its own process: memory over time, and programs that are compiled."""

import dataclasses
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np

ARRAY_GROWTH = 16 * 1024
"""Bytes by which live arrays may grow in an hour: requests that wait have 20 bytes each."""

PROCESS_GROWTH = 32 * 2**20
"""Bytes by which the process may grow in an hour: allocators keep what others will use."""

WARM_UP = 0.2
"""The part of a run whose memory is not looked at."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """Memory at a moment.

    Attributes:
      seconds: since the start.
      arrays: bytes of the JAX arrays that are alive.
      process: bytes of the process; None where the system does not say.
    """

    seconds: float
    arrays: int
    process: int | None


@dataclasses.dataclass(frozen=True)
class Growth:
    """A straight line through the samples after warm-up.

    Attributes:
      first: bytes of the first sample after warm-up.
      last: bytes of the last one.
      per_minute: the line's slope, in bytes.
      growth: the slope times the time from the first to the last.
      bound: what `growth` must not pass.
    """

    first: int
    last: int
    per_minute: float
    growth: float
    bound: float

    @property
    def ok(self) -> bool:
        """Whether the growth is within its bound."""
        return self.growth <= self.bound


def take_sample(seconds: float) -> Sample:
    """Memory now, without what Python has not collected yet."""
    gc.collect()
    arrays = sum(array.nbytes for array in jax.live_arrays())
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return Sample(seconds, arrays, None)
    return Sample(seconds, arrays, pages * os.sysconf("SC_PAGE_SIZE"))


def measure_growth(times: list[float], values: list[int], per_hour: float) -> Growth:
    """Fits a line to memory over time.

    Args:
      times: seconds since the start, at least two different ones after warm-up.
      values: bytes.
      per_hour: growth that is allowed in an hour; less time is allowed no less.
    """
    late = [i for i, time in enumerate(times) if time >= WARM_UP * times[-1]]
    seconds, taken = np.array(times)[late], np.array(values, float)[late]
    slope = float(np.polyfit(seconds - seconds[0], taken, 1)[0])
    spent = float(seconds[-1] - seconds[0])
    return Growth(
        first=int(taken[0]),
        last=int(taken[-1]),
        per_minute=60 * slope,
        growth=slope * spent,
        bound=per_hour * max(1.0, spent / 3600),
    )


@contextmanager
def compilations() -> Iterator[list[str]]:
    """A list that gets an entry for each program that XLA compiles, or JAX reads from its cache."""
    heard: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if "backend_compile" in event:
            heard.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield heard
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
