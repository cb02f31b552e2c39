"""Jitted loops over a ring cache: requests begin, decode in blocks of steps, go back, replay."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Float32, Int32

from pallas_kernels import checks
from pallas_kernels.serialization import register_serialization
from swa_jax.cache import RingCache
from swa_jax.metadata import DecodeMetadata
from swa_jax.modules import Decoder, check_model
from swa_jax.placement import (
    check_distinct,
    check_places,
    checked_slots,
    first_state_ids,
    gather_scores,
    replicate,
)
from swa_jax.prefilling import Params, apply_model, prefill
from swa_jax.prompts import Prompt, all_token_ids, stop_token_ids, token_limits
from swa_jax.sampling import Sampling, checked_sampling, sample


@register_serialization
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """B requests in the middle of decoding: an immutable value, donated from step to step.

    Attributes:
      cache: the rings.
      state_ids: int32[B], each request's state slot.
      positions: int32[B], the position at which each request goes on.
      tokens: int32[B], the token chosen for it, which no row stands for yet.
      remaining: int32[B], tokens still to be chosen; 0: the request has finished.
      oldest: int32[B], the lowest position whose row the ring was given.
      highest: int32[B], the highest position stored so far; rows beyond it are free.
      stop_tokens: int32[B, n], tokens that end a request; -1 for none.
      sampling: how tokens are chosen.
    """

    cache: RingCache
    state_ids: Int32[Array, " b"]
    positions: Int32[Array, " b"]
    tokens: Int32[Array, " b"]
    remaining: Int32[Array, " b"]
    oldest: Int32[Array, " b"]
    highest: Int32[Array, " b"]
    stop_tokens: Int32[Array, "b n"]
    sampling: Sampling


@functools.partial(jax.jit, static_argnames=("model", "steps"), donate_argnames="state")
def decode_block(
    model: Decoder, params: Params, state: DecodeState, steps: int
) -> tuple[DecodeState, Int32[Array, "b steps"]]:
    """Decodes a block of steps without a word to the host. The state is donated.

    Args:
      model: the decoder.
      params: its variables.
      state: the requests; finished ones store nothing and choose nothing.
      steps: tokens to choose for each.

    Returns:
      The new state; int32[B, steps], the chosen tokens, -1 from a request's stop token on.
    """

    def step(state: DecodeState, _):
        live = state.remaining > 0
        place = jnp.where(live, state.positions, -1)
        logits, cache = decode_step(
            model, params, state.cache, state.state_ids, state.tokens[:, None], place[:, None]
        )
        following = state.positions + 1
        token, stops = choose_tokens(logits[:, 0], following, state.stop_tokens, state.sampling)
        state = dataclasses.replace(
            state,
            cache=cache,
            positions=jnp.where(live, following, state.positions),
            tokens=jnp.where(live, token, state.tokens),
            remaining=jnp.where(live & ~stops, state.remaining - 1, 0),
            highest=jnp.maximum(state.highest, place),
        )
        return state, jnp.where(live & ~stops, token, -1)

    state, tokens = lax.scan(step, state, length=steps)
    return settled(state), replicate(tokens.T, state.cache.sharding)


@functools.partial(jax.jit, static_argnames="model", donate_argnames="cache")
def replay(
    model: Decoder,
    params: Params,
    cache: RingCache,
    state_ids: Int32[Array, " b"],
    tokens: Int32[Array, "b n"],
    starts: Int32[Array, " b"],
) -> tuple[Float32[Array, "b n vocab"], RingCache]:
    """Scores of known tokens, decoded one by one through the ring. The cache is donated.

    Args:
      model: the decoder.
      params: its variables.
      cache: the rings, with everything before `starts` stored.
      state_ids: int32[B].
      tokens: int32[B, n]; -1 is padding, last.
      starts: int32[B], positions of the first tokens.

    Returns:
      float32[B, n, vocab], entry i scores the token after token i; and the new cache.
    """

    def step(carry, column):
        cache, position = carry
        place = jnp.where(column >= 0, position, -1)
        logits, cache = decode_step(
            model, params, cache, state_ids, column[:, None], place[:, None]
        )
        return (cache, position + 1), logits[:, 0]

    (cache, _), logits = lax.scan(step, (cache, starts), tokens.T)
    return jnp.swapaxes(logits, 0, 1), cache


def decode_step(
    model: Decoder,
    params: Params,
    cache: RingCache,
    state_ids: Int32[Array, " b"],
    tokens: Int32[Array, "b t"],
    positions: Int32[Array, "b t"],
) -> tuple[Float32[Array, "b t vocab"], RingCache]:
    """Scores after each of T tokens of each request, stored before they are read.

    Args:
      model: the decoder.
      params: its variables.
      cache: the rings.
      state_ids: int32[B].
      tokens: int32[B, T]; T is at most geometry.max_tokens_per_step.
      positions: int32[B, T], consecutive for each request; -1 for padding, last, which stores
        nothing.

    Returns:
      float32[B, T, vocab], entry t scores the token after token t, and means nothing at padding;
      and the new cache.

    Raises:
      ValueError: as DecodeMetadata.build.
    """
    meta = DecodeMetadata.build(cache.geometry, state_ids, positions)
    hidden, cache = apply_model(model, params, tokens, cache, meta)
    logits: Any = model.apply(params, hidden, method="logits")
    return gather_scores(logits, cache.sharding), cache


def choose_tokens(
    scores: Float32[Array, "b vocab"],
    positions: Int32[Array, " b"],
    stop_tokens: Int32[Array, "b n"],
    sampling: Sampling,
) -> tuple[Int32[Array, " b"], Bool[Array, " b"]]:
    """The next token of each request, and whether it ends the request.

    Args:
      scores: float32[B, vocab], after the tokens before it.
      positions: int32[B], of the tokens to choose.
      stop_tokens: int32[B, n]; -1 for none.
      sampling: how tokens are chosen.

    Returns:
      int32[B] and bool[B].
    """
    token = sample(scores, positions, sampling)
    return token, jnp.any(token[:, None] == stop_tokens, axis=1)


def begin(
    model: Decoder,
    params: Params,
    cache: RingCache,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int | Sequence[int],
    sampling: Sampling,
    stop_tokens: Sequence[int] = (),
    chunk: int = 256,
) -> DecodeState:
    """Prefills prompts into the first state slots and chooses each request's first token.

    Args:
      model: the decoder.
      params: its variables.
      cache: the rings, at least as many slots as prompts; donated.
      prompts: as in `prefill`.
      max_new_tokens: tokens to choose, for all requests or for each, 1 or more.
      sampling: how tokens are chosen.
      stop_tokens: token ids that end a request.
      chunk: as in `prefill`.

    Returns:
      The requests, each at the position after its prompt, int32[B] each.

    Raises:
      ValueError: as `prefill`, or too few slots, a limit below 1 or beyond int32 positions,
        settings of another number of requests or out of range, or a stop token out of range.
    """
    prompts = all_token_ids(model, prompts)
    state_ids = first_state_ids(cache.sharding, cache.slots, len(prompts))
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    settings = checked_settings(model, lengths, max_new_tokens, sampling, stop_tokens)
    cache, last = prefill(model, params, cache, state_ids, prompts, chunk=chunk)
    oldest = np.zeros_like(lengths)
    return _begin(model, params, cache, last, state_ids, lengths, oldest, *settings)


def begin_prefilled(
    model: Decoder,
    params: Params,
    cache: RingCache,
    last: Float[Array, "b hidden"],
    state_ids: ArrayLike,
    lengths: ArrayLike,
    *,
    oldest: ArrayLike,
    max_new_tokens: int | Sequence[int],
    sampling: Sampling,
    stop_tokens: Sequence[int] = (),
) -> DecodeState:
    """Chooses the first token of requests whose prompts are in the cache already.

    Args:
      model: the decoder.
      params: its variables.
      cache: the rings; donated.
      last: floating[B, hidden], of the prompts' last tokens, as `prefill` returns it.
      state_ids: integers[B], distinct state slots that hold the prompts' rows.
      lengths: integers[B], tokens of the prompts.
      oldest: integers[B], the lowest position whose row each slot was given: 0 after a prefill,
        max(0, n - (W - 1)) after an import with n as its next position.
      max_new_tokens: as in `begin`, and so are the others.
      sampling: how tokens are chosen.
      stop_tokens: token ids that end a request.

    Returns:
      As `begin`.

    Raises:
      ValueError: as `begin`, or a wrong shape or dtype, a number out of range, or a state slot out
        of range or given twice.
    """
    check_model(model, params)
    checks.check_floating("last", last)
    checks.check_shape("last", last, (None, model.config.hidden_size))
    batch = last.shape[0]
    given = {"state_ids": state_ids, "lengths": lengths, "oldest": oldest}
    state_ids, lengths, oldest = (checks.as_int32(name, value) for name, value in given.items())
    for name, value in zip(given, (state_ids, lengths, oldest), strict=True):
        checks.check_shape(name, value, (batch,))
    ids = checked_slots(state_ids, cache.slots)
    check_distinct("state_ids", ids)
    check_places(cache.sharding, cache.slots, ids)
    if np.any(np.asarray(lengths) < 1):
        raise ValueError(f"lengths: expected 1 or more, got {np.asarray(lengths).tolist()}")
    if np.any((np.asarray(oldest) < 0) | (np.asarray(oldest) > np.asarray(lengths))):
        raise ValueError(
            f"oldest: expected 0 to the lengths {np.asarray(lengths).tolist()}, got "
            f"{np.asarray(oldest).tolist()}"
        )
    settings = checked_settings(model, lengths, max_new_tokens, sampling, stop_tokens)
    return _begin(model, params, cache, last, state_ids, lengths, oldest, *settings)


def rollback(state: DecodeState, positions: ArrayLike, tokens: ArrayLike) -> DecodeState:
    """Requests that go on from earlier positions with other tokens.

    Nothing is copied: rows of the positions given up are overwritten as the requests go on. The
    tokens given up may be chosen again: they count as remaining.

    Args:
      state: the requests.
      positions: integers[B], where each request goes on; its present position to stay.
      tokens: integers[B], the token at that position.

    Returns:
      The new state; the old one stays valid until it is donated.

    Raises:
      ValueError: a token below 0, a position later than the present one, or farther back than the
        ring holds: more than capacity - window before the highest position stored, or before rows
        that were imported. A snapshot or a new prefill reaches those. Or a traced value: how far
        a request may go back depends on its numbers.
    """
    if not checks.is_known(positions, tokens, state.positions):
        raise ValueError("rollback: expected known values, got traced ones: call it outside jit")
    positions = checks.as_int32("positions", positions)
    tokens = checks.as_int32("tokens", tokens)
    for name, value in (("positions", positions), ("tokens", tokens)):
        checks.check_shape(name, value, state.positions.shape)
    checks.check_not_negative("tokens", tokens)
    geometry = state.cache.geometry
    new, now = np.asarray(positions), np.asarray(state.positions)
    lowest = np.asarray(state.highest) - geometry.max_rollback
    complete = np.maximum(new - (geometry.window - 1), 0) >= np.asarray(state.oldest)
    if np.any((new > now) | (new < lowest) | (new < 0) | ~complete):
        raise ValueError(
            f"positions: expected at most {geometry.max_rollback} (capacity {geometry.capacity} - "
            f"window {geometry.window}) before the highest stored positions "
            f"{np.asarray(state.highest).tolist()}, within rows that were stored, and not after "
            f"{now.tolist()}; got {new.tolist()}. Go back farther with a snapshot or a new prefill"
        )
    positions, tokens = replicate((positions, tokens), state.cache.sharding)
    remaining = state.remaining + (state.positions - positions)
    return dataclasses.replace(state, positions=positions, tokens=tokens, remaining=remaining)


def settled(state: DecodeState) -> DecodeState:
    """The state as the next block expects it: all but the rings whole on every device."""
    cache = state.cache
    rest = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    del rest["cache"]
    return dataclasses.replace(state, **replicate(rest, cache.sharding))


def checked_settings(
    model: Decoder,
    lengths: Sequence[int] | ArrayLike,
    max_new_tokens: int | Sequence[int],
    sampling: Sampling,
    stop_tokens: Sequence[int],
) -> tuple[Int32[np.ndarray, " b"], Int32[np.ndarray, "b n"], Sampling]:
    """How B requests decode, as arrays.

    Args:
      model: the decoder.
      lengths: integers[B], tokens of the prompts.
      max_new_tokens: as in `begin`, and so are the others.
      sampling: how tokens are chosen.
      stop_tokens: token ids that end a request.

    Returns:
      The limits; the stop tokens of each request, the first -1; and the settings.

    Raises:
      ValueError: as `begin`.
    """
    limits = token_limits(max_new_tokens, lengths)
    ends = stop_token_ids(model, stop_tokens)
    stops = np.broadcast_to(np.asarray([-1, *ends], np.int32), (len(limits), 1 + len(ends)))
    return limits, stops, checked_sampling(sampling, len(limits))


@functools.partial(jax.jit, static_argnames="model", donate_argnames="cache")
def _begin(model, params, cache, last, state_ids, lengths, oldest, limits, stop_tokens, sampling):
    scores = gather_scores(model.apply(params, last, method="logits"), cache.sharding)
    token, stops = choose_tokens(scores, lengths, stop_tokens, sampling)
    state = DecodeState(
        cache=cache,
        state_ids=state_ids,
        positions=lengths,
        tokens=token,
        remaining=jnp.where(stops, 0, limits - 1),
        oldest=oldest,
        highest=lengths - 1,
        stop_tokens=stop_tokens,
        sampling=sampling,
    )
    return settled(state)
