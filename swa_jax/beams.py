"""Beam search over the ring: beams are forked, and ranked, inside the jitted block of steps."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int32

from pallas_kernels import checks
from pallas_kernels.serialization import register_serialization
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


@register_serialization
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BeamState:
    """K beams of one prompt, the i-th in state slot i: donated from block to block.

    Attributes:
      cache: the rings, with K slots or more.
      position: int32 scalar, the position of each beam's newest token, which no row stands for yet.
      step: int32 scalar, tokens chosen so far.
      tokens: int32[K, limit], what each beam has chosen; -1 from `step` on.
      log_probability: float32[K], natural log; -inf for a beam that there is not.
      ended_tokens: int32[K, limit], the best continuations that a stop token has ended, without it;
        -1 after their last token.
      ended_log_probability: float32[K], the stop token included; -inf for none.
      ended_scores: float32[K], best first.
      stop_tokens: int32[n].
      alpha: float32 scalar, the power of the length by which log-probabilities are divided.
    """

    cache: RingCache
    position: Int32[Array, ""]
    step: Int32[Array, ""]
    tokens: Int32[Array, "k limit"]
    log_probability: Float32[Array, " k"]
    ended_tokens: Int32[Array, "k limit"]
    ended_log_probability: Float32[Array, " k"]
    ended_scores: Float32[Array, " k"]
    stop_tokens: Int32[Array, " n"]
    alpha: Float32[Array, ""]


@functools.partial(jax.jit, static_argnames=("model", "steps"), donate_argnames="state")
def beam_block(model: Decoder, params: Params, state: BeamState, steps: int) -> BeamState:
    """A block of steps of beam search without a word to the host. The state is donated.

    Args:
      model: the decoder.
      params: its variables.
      state: the beams. At the limit a step changes nothing.
      steps: tokens to choose for each.

    Returns:
      The new state.
    """
    beams, limit = state.tokens.shape
    slots = jnp.arange(beams, dtype=jnp.int32)

    def step(state: BeamState, _):
        newest = state.tokens[:, jnp.maximum(state.step - 1, 0)]
        places = jnp.broadcast_to(jnp.where(state.step < limit, state.position, -1), (beams,))
        logits, cache = decode_step(
            model, params, state.cache, slots, newest[:, None], places[:, None]
        )
        return _choose(dataclasses.replace(state, cache=cache), logits[:, 0]), None

    state, _ = lax.scan(step, state, length=steps)
    return state


def beam_search(
    model: Decoder,
    params: Params,
    prompt: Prompt,
    *,
    beams: int,
    max_new_tokens: int,
    stop_tokens: Sequence[int] = (),
    alpha: float = 1.0,
    block_steps: int = 32,
    prefill_chunk: int = 256,
) -> list[Continuation]:
    """The likeliest continuations that a search with K beams finds.

    In each step every beam may end with any stop token, and the best K of all that have ended are
    kept, by their scores; the K likeliest of all other one-token extensions are the next beams. At
    the limit the beams end as they are. The search stops early once no beam can reach the scores
    of the K that have ended. With K of at least vocab ** max_new_tokens nothing is left out.

    Args:
      model: the decoder.
      params: its variables.
      prompt: token ids of one request, or bytes.
      beams: K.
      max_new_tokens: most tokens of a continuation, a stop token included. One compilation for
        each, and for each number of beams.
      stop_tokens: token ids that end a continuation.
      alpha: 0 or more: a score is a log-probability divided by length ** alpha, the length
        counting a stop token. 0 compares log-probabilities, 1 their means.
      block_steps: steps between two words to the host.
      prefill_chunk: most tokens of the prompt in one call.

    Returns:
      At most K continuations, the best score first.

    Raises:
      ValueError: an empty prompt, a token id or a number out of range.
    """
    for name, value in (
        ("beams", beams),
        ("max_new_tokens", max_new_tokens),
        ("block_steps", block_steps),
    ):
        checks.check_count(name, value)
    if beams * max_new_tokens > checks.INT32_MAX:
        raise ValueError(
            f"max_new_tokens: expected at most {checks.INT32_MAX // beams} for each of {beams} "
            f"beams, got {max_new_tokens}"
        )
    stops, power = checked_stops(model, stop_tokens), checked_alpha(alpha, max_new_tokens)
    cache, last, length = prefill_first(model, params, prompt, beams, prefill_chunk, max_new_tokens)
    state = _begin_beams(
        model,
        params,
        cache,
        last,
        length,
        np.asarray(power, np.float32),
        stops,
        beams=beams,
        limit=max_new_tokens,
    )
    done = 1
    while done < max_new_tokens and not _is_settled(state):
        state = beam_block(model, params, state, block_steps)
        done += block_steps
    return _ranked_beams(state)


@functools.partial(jax.jit, static_argnames=("model", "beams", "limit"), donate_argnames="cache")
def _begin_beams(model, params, cache, last, length, alpha, stop_tokens, beams, limit) -> BeamState:
    """The first token of each beam: only the first beam is there, in whose slot the prompt is."""
    nothing = jnp.full((beams, limit), -1, jnp.int32)
    none = jnp.full(beams, -jnp.inf, jnp.float32)
    state = BeamState(
        cache=cache,
        position=length - 1,
        step=jnp.int32(0),
        tokens=nothing,
        log_probability=none.at[0].set(0),
        ended_tokens=nothing,
        ended_log_probability=none,
        ended_scores=none,
        stop_tokens=stop_tokens,
        alpha=alpha,
    )
    logits = model.apply(params, last, method="logits")
    return _choose(state, jnp.broadcast_to(logits, (beams, logits.shape[1])))


def _choose(state: BeamState, logits: Float32[Array, "k vocab"]) -> BeamState:
    """The beams with one token more, each in its own slot; at the limit, the same ones."""
    beams, limit = state.tokens.shape
    live = state.step < limit
    # A beam that there is not has free rows in its slot, and no scores whatever they make of them.
    there = state.log_probability > -jnp.inf
    total = state.log_probability[:, None] + jax.nn.log_softmax(logits.astype(jnp.float32))
    total = jnp.where(there[:, None] & live, total, -jnp.inf)

    length = (state.step + 1).astype(jnp.float32)
    ending = total[:, state.stop_tokens].reshape(-1)
    chances = jnp.concatenate([state.ended_log_probability, ending])
    scores = jnp.concatenate([state.ended_scores, ending / length**state.alpha])
    texts = jnp.repeat(state.tokens, state.stop_tokens.shape[0], axis=0)
    texts = jnp.concatenate([state.ended_tokens, texts])
    ended_scores, best = lax.top_k(scores, beams)

    total = total.at[:, state.stop_tokens].set(-jnp.inf)
    log_probability, extension = lax.top_k(total.reshape(-1), beams)
    parents, token = extension // logits.shape[1], extension % logits.shape[1]
    slots = jnp.where(live, jnp.arange(beams, dtype=jnp.int32), -1)
    tokens = state.tokens[parents].at[:, state.step].set(token, mode="drop")
    return dataclasses.replace(
        state,
        cache=state.cache.copy_slots(parents, slots),
        position=state.position + 1,
        step=jnp.minimum(state.step + 1, limit),
        tokens=jnp.where(live, tokens, state.tokens),
        log_probability=jnp.where(live, log_probability, state.log_probability),
        ended_tokens=texts[best],
        ended_log_probability=chances[best],
        ended_scores=ended_scores,
    )


def _is_settled(state: BeamState) -> bool:
    """Whether no beam can still reach the worst of K that have ended.

    Log-probabilities only fall; the longest a beam can get is the limit, which divides most.
    """
    limit = state.tokens.shape[1]
    reach = float(jnp.max(state.log_probability)) / limit ** float(state.alpha)
    return float(state.ended_scores[-1]) >= reach


def _ranked_beams(state: BeamState) -> list[Continuation]:
    state = jax.device_get(dataclasses.replace(state, cache=None))
    length = int(state.step)
    ended = zip(state.ended_tokens, state.ended_log_probability, state.ended_scores, strict=True)
    found = [
        Continuation(row[row >= 0].tolist(), float(total), float(score), True)
        for row, total, score in ended
    ]
    for row, total in zip(state.tokens, state.log_probability, strict=True):
        score = float(total) / length ** float(state.alpha)
        found.append(Continuation(row[:length].tolist(), float(total), score, False))
    found = [one for one in found if one.score > -np.inf]
    return sorted(found, key=lambda one: -one.score)[: len(state.tokens)]
