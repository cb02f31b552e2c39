"""What forks of one prompt share: its prefill, and what a continuation is."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int32

from pallas_kernels import checks
from swa_jax.cache import RingCache
from swa_jax.modules import Decoder
from swa_jax.prefilling import Params, prefill
from swa_jax.prompts import Prompt, stop_token_ids, token_ids, token_limits


class Continuation(NamedTuple):
    """One continuation of a prompt.

    Attributes:
      tokens: its token ids, without the stop token.
      log_probability: natural log, of all its tokens after the prompt, a stop token included.
      score: log_probability / (number of those tokens) ** alpha.
      stopped: whether a stop token ended it, and not the limit.
    """

    tokens: list[int]
    log_probability: float
    score: float
    stopped: bool


def prefill_first(
    model: Decoder, params: Params, prompt: Prompt, slots: int, chunk: int, max_new_tokens: int
) -> tuple[RingCache, Float[Array, "1 hidden"], Int32[np.ndarray, ""]]:
    """A cache with the prompt in the first of some slots.

    Args:
      model: the decoder.
      params: its variables.
      prompt: token ids of one request, or bytes.
      slots: how many the cache has.
      chunk: as of `prefill`.
      max_new_tokens: that follow the prompt.

    Returns:
      The cache; the hidden state of the prompt's last token; and the prompt's length.

    Raises:
      ValueError: as `prefill`, or positions that int32 does not hold.
    """
    tokens = token_ids(model, "prompt", prompt)
    token_limits(max_new_tokens, [len(tokens)])
    config = model.config
    cache = RingCache.for_decoder(config, slots)
    cache, last = prefill(model, params, cache, np.zeros(1, np.int32), [tokens], chunk=chunk)
    return cache, last, np.asarray(len(tokens), np.int32)


def checked_stops(model: Decoder, stop_tokens: Sequence[int]) -> Int32[np.ndarray, " n"]:
    """The stop tokens, each once; ValueError for what is no token id."""
    return np.unique(stop_token_ids(model, stop_tokens))


def checked_alpha(alpha: float, max_new_tokens: int) -> float:
    """The power of the length by which log-probabilities are divided.

    Args:
      alpha: 0 or more.
      max_new_tokens: the largest length.

    Raises:
      ValueError: it is below 0, or the power is no float32.
    """
    number = checks.as_float("alpha", alpha)
    if not 0 <= number < np.inf:
        raise ValueError(f"alpha: expected a number of 0 or more, got {alpha!r}")
    if number * np.log2(max_new_tokens) >= 127:
        raise ValueError(
            f"alpha: expected less than {127 / np.log2(max_new_tokens):g}, so that "
            f"{max_new_tokens} ** alpha is finite, got {alpha!r}"
        )
    return number
