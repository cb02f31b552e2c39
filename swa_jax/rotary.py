"""Rotary frequencies of a layer: plain, or stretched by YaRN for long contexts."""

import dataclasses
import functools
import math

import numpy as np
from jaxtyping import Float64, UInt32

from pallas_kernels import checks
from pallas_kernels.transforms import turns_per_position


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al., 2023, arXiv:2309.00071) without its scaling of the scores.

    Pairs that turn often within the original context keep their frequency, pairs that turn seldom
    get it divided by `factor`, and those between get a mix. DeepSeek-V4 and V4.1 do so in layers
    that also read a compressed cache.

    Attributes:
      factor: how many times longer the context is than the original one.
      original_max_positions: length of the original context, in positions.
      beta_fast: turns within the original context from which a pair keeps its frequency.
      beta_slow: turns below which its frequency is divided in full.

    Raises:
      ValueError: a value is out of range.
    """

    factor: float = 16.0
    original_max_positions: int = 65536
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self):
        for name in ("factor", "original_max_positions", "beta_fast", "beta_slow"):
            checks.check_positive(name, getattr(self, name))
        if not isinstance(self.original_max_positions, int):
            raise ValueError(
                f"original_max_positions: expected an integer, got {self.original_max_positions!r}"
            )
        if self.factor < 1:
            raise ValueError(f"factor: expected 1 or more, got {self.factor!r}")
        if self.beta_fast <= self.beta_slow:
            raise ValueError(
                f"beta_fast: expected more than beta_slow {self.beta_slow!r}, got "
                f"{self.beta_fast!r}"
            )


def frequencies(
    rope_dim: int, theta: float, scaling: YarnScaling | None = None
) -> Float64[np.ndarray, " half"]:
    """Rotary frequencies, in radians per position.

    Args:
      rope_dim: R, rotated values; even.
      theta: base; pair i has frequency theta**(-2i / R).
      scaling: YaRN, or None.

    Returns:
      float64[R / 2].
    """
    plain = theta ** (-np.arange(0, rope_dim, 2, dtype=np.float64) / rope_dim)
    if scaling is None or rope_dim == 0:
        return plain

    def pair_that_turns(times: float) -> float:
        """The pair, as a real number, that turns so often within the original context."""
        wavelength = scaling.original_max_positions / (times * 2 * math.pi)
        return rope_dim * math.log(wavelength) / (2 * math.log(theta))

    first = max(math.floor(pair_that_turns(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(scaling.beta_slow)), rope_dim - 1)
    # A ramp of no width is a step; the public code widens it by the same thousandth.
    width = last - first if last != first else 0.001
    divided = np.clip((np.arange(rope_dim // 2) - first) / width, 0.0, 1.0)
    return plain * (1 - divided) + plain / scaling.factor * divided


@functools.lru_cache
def rotary_turns(
    rope_dim: int, theta: float, scaling: YarnScaling | None
) -> UInt32[np.ndarray, "2 half"]:
    """The frequencies as `transforms.turns_per_position` gives them. The array is read-only."""
    turns = turns_per_position(frequencies(rope_dim, theta, scaling))
    turns.flags.writeable = False
    return turns
