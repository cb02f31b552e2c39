"""The best of several sampled continuations of one prompt, which is prefilled once and forked."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32

from pallas_kernels import checks
from swa_jax.cache import RingCache
from swa_jax.continuations import (
    Continuation,
    checked_alpha,
    checked_stops,
    prefill_first,
)
from swa_jax.decoding import decode_step
from swa_jax.modules import Decoder
from swa_jax.prefilling import Params
from swa_jax.prompts import Prompt
from swa_jax.sampling import Sampling, checked_sampling, sample


def best_of(
    model: Decoder,
    params: Params,
    prompt: Prompt,
    *,
    samples: int,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_tokens: Sequence[int] = (),
    alpha: float = 1.0,
    block_steps: int = 32,
    prefill_chunk: int = 256,
) -> list[Continuation]:
    """Sampled continuations of one prompt, which is prefilled once, by their scores.

    Log-probabilities are the model's own, whatever the temperature and the masks were.

    Args:
      model: the decoder.
      params: its variables.
      prompt: token ids of one request, or bytes.
      samples: n, how many.
      max_new_tokens: most tokens of each, a stop token included.
      sampling: of n requests; by default at temperature 1.
      stop_tokens: token ids that end a continuation.
      alpha: 0 or more: a score is a log-probability divided by length ** alpha, the length
        counting a stop token.
      block_steps: steps between two words to the host.
      prefill_chunk: most tokens of the prompt in one call.

    Returns:
      n continuations, the best score first; equal ones may be among them.

    Raises:
      ValueError: an empty prompt, a token id or a number out of range, or settings of another
        number of requests.
    """
    for name, value in (
        ("samples", samples),
        ("max_new_tokens", max_new_tokens),
        ("block_steps", block_steps),
    ):
        checks.check_count(name, value)
    stops, power = checked_stops(model, stop_tokens), checked_alpha(alpha, max_new_tokens)
    sampling = Sampling.build(samples, temperature=1.0) if sampling is None else sampling
    sampling = checked_sampling(sampling, samples)
    cache, last, length = prefill_first(
        model, params, prompt, samples, prefill_chunk, max_new_tokens
    )
    state, first = _begin_samples(model, params, cache, last, length, stops, sampling)
    drawn = [jax.tree.map(lambda new: np.asarray(new)[None], first)]
    done = 1
    while done < max_new_tokens and not np.all(state.stopped):
        state, block = _sample_block(model, params, state, stops, sampling, block_steps)
        drawn.append(block)
        done += block_steps
    tokens, chances = (
        np.concatenate(parts)[:max_new_tokens].T for parts in zip(*drawn, strict=True)
    )
    found = [
        _sampled(row, each, np.isin(row, stops), power)
        for row, each in zip(tokens, chances, strict=True)
    ]
    return sorted(found, key=lambda one: -one.score)


class _Samples(NamedTuple):
    """n continuations that are sampled, the i-th in state slot i."""

    cache: RingCache
    position: Int32[Array, ""]  # of the newest tokens, which no row stands for yet
    tokens: Int32[Array, " n"]
    stopped: Bool[Array, " n"]


@functools.partial(jax.jit, static_argnames="model", donate_argnames="cache")
def _begin_samples(model, params, cache, last, length, stop_tokens, sampling: Sampling):
    """Forks the prompt in the first slot, and the first token of each continuation."""
    slots = jnp.arange(sampling.temperature.shape[0], dtype=jnp.int32)
    cache = cache.copy_slots(jnp.zeros_like(slots), slots)
    logits = model.apply(params, last, method="logits")
    logits = jnp.broadcast_to(logits, (len(slots), logits.shape[1]))
    state = _Samples(cache, length - 1, slots, jnp.zeros(slots.shape, bool))
    return _draw(state, logits, stop_tokens, sampling)


@functools.partial(jax.jit, static_argnames=("model", "steps"), donate_argnames="state")
def _sample_block(model, params, state: _Samples, stop_tokens, sampling: Sampling, steps: int):
    """A block of steps; tokens and log-probabilities are [steps, n]."""
    slots = jnp.arange(state.tokens.shape[0], dtype=jnp.int32)

    def step(state: _Samples, _):
        places = jnp.where(state.stopped, -1, state.position)
        logits, cache = decode_step(
            model, params, state.cache, slots, state.tokens[:, None], places[:, None]
        )
        return _draw(state._replace(cache=cache), logits[:, 0], stop_tokens, sampling)

    return lax.scan(step, state, length=steps)


def _draw(state: _Samples, logits, stop_tokens, sampling: Sampling):
    """Each continuation with one token more, and that token's log-probability."""
    following = state.position + 1
    tokens = sample(logits, jnp.broadcast_to(following, state.tokens.shape), sampling)
    chances = jax.nn.log_softmax(logits.astype(jnp.float32))
    chances = jnp.take_along_axis(chances, tokens[:, None], axis=1)[:, 0]
    stopped = state.stopped | jnp.any(tokens[:, None] == stop_tokens[None], axis=1)
    return _Samples(state.cache, following, tokens, stopped), (tokens, chances)


def _sampled(tokens, chances, is_stop, alpha: float) -> Continuation:
    """One request's tokens and log-probabilities, cut at its first stop token."""
    stopped = bool(np.any(is_stop))
    length = int(np.argmax(is_stop)) + 1 if stopped else len(tokens)
    total = float(np.sum(chances[:length], dtype=np.float64))
    kept = tokens[: length - stopped].tolist()
    return Continuation(kept, total, total / length**alpha, stopped)
