"""Jitted loops over a ring cache: prefill in chunks, decode in blocks of steps, replay."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Float32, Int32

from pallas_kernels import checks
from pallas_kernels.serialization import register_serialization
from swa_jax.cache import RingCache
from swa_jax.metadata import DecodeMetadata, PrefillMetadata
from swa_jax.modules import Decoder
from swa_jax.placement import (
    check_places,
    first_state_ids,
    gather_scores,
    replicate,
    replicated,
)
from swa_jax.sampling import Sampling, sample

Params = Any
"""A module's variables, {"params": ...}."""

Prompt = Sequence[int] | np.ndarray
"""Token ids of one request; bytes count as such."""


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


@functools.partial(jax.jit, static_argnames="model", donate_argnames=("cache", "last"))
def prefill_chunk(
    model: Decoder,
    params: Params,
    cache: RingCache,
    last: Float[Array, "b hidden"],
    state_ids: Int32[Array, " b"],
    tokens: Int32[Array, "b t"],
    starts: Int32[Array, " b"],
    lengths: Int32[Array, " b"],
) -> tuple[RingCache, Float[Array, "b hidden"]]:
    """One chunk of each request's prompt. The cache is donated.

    Args:
      model: the decoder.
      params: its variables.
      cache: the rings.
      last: [B, hidden], hidden states of each request's last token so far.
      state_ids: int32[B].
      tokens: int32[B, T].
      starts: int32[B], positions of the first tokens.
      lengths: int32[B], tokens of each request in this chunk; 0: none.

    Returns:
      The new cache and the new `last`.
    """
    meta = PrefillMetadata.build(
        cache.geometry, state_ids, starts, lengths, max_tokens=tokens.shape[1]
    )
    hidden, cache = _apply(model, params, tokens, cache, meta)
    end = jnp.maximum(lengths - 1, 0)[:, None, None]
    newest = jnp.take_along_axis(hidden, end, axis=1)[:, 0]
    return cache, replicate(jnp.where(lengths[:, None] > 0, newest, last), cache.sharding)


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
        logits, cache = _decode_step(
            model, params, state.cache, state.state_ids, state.tokens, place
        )
        following = state.positions + 1
        token = sample(logits, following, state.sampling)
        stops = jnp.any(token[:, None] == state.stop_tokens, axis=1)
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
    return _settled(state), replicate(tokens.T, state.cache.sharding)


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
        logits, cache = _decode_step(model, params, cache, state_ids, column, place)
        return (cache, position + 1), logits

    (cache, _), logits = lax.scan(step, (cache, starts), tokens.T)
    return jnp.swapaxes(logits, 0, 1), cache


def prefill(
    model: Decoder,
    params: Params,
    cache: RingCache,
    state_ids: ArrayLike,
    prompts: Sequence[Prompt],
    *,
    chunk: int = 256,
) -> tuple[RingCache, Float[Array, "b hidden"]]:
    """Puts whole prompts of any lengths into empty state slots, chunk by chunk.

    Args:
      model: the decoder.
      params: its variables.
      cache: the rings; donated.
      state_ids: integers[B], distinct state slots.
      prompts: B sequences of token ids (bytes count as such), of any lengths but 0.
      chunk: most tokens of a request in one call. One compilation per (B, T); T is `chunk`, or the
        next power of two for shorter prompts.

    Returns:
      The new cache, and the hidden states of each prompt's last token.

    Raises:
      ValueError: no prompt, an empty one, or token ids out of range.
    """
    checks.check_count("chunk", chunk)
    if isinstance(prompts, bytes | str):
        raise ValueError("prompts: expected a list of prompts, got one")
    rows = [token_ids(model, f"prompts[{i}]", prompt) for i, prompt in enumerate(prompts)]
    if not rows:
        raise ValueError("prompts: expected at least one prompt, got none")
    state_ids = checks.as_int32("state_ids", state_ids)
    checks.check_shape("state_ids", state_ids, (len(rows),))
    ids = np.asarray(state_ids)
    if np.any((ids < 0) | (ids >= cache.slots)):
        raise ValueError(f"state_ids: expected 0 to {cache.slots - 1}, got {ids.tolist()}")
    check_places(cache.sharding, cache.slots, ids)
    longest = max(map(len, rows))
    width = min(chunk, 1 << (longest - 1).bit_length())
    dtype = model.config.layers[0].dtype
    shape = (len(rows), model.config.hidden_size)
    last = jnp.zeros(shape, dtype, device=replicated(cache.sharding))
    for start in range(0, longest, width):
        lengths = np.array([min(max(len(row) - start, 0), width) for row in rows], np.int32)
        tokens = np.zeros((len(rows), width), np.int32)
        for i, row in enumerate(rows):
            tokens[i, : lengths[i]] = row[start : start + width]
        starts = np.full(len(rows), start, np.int32)
        cache, last = prefill_chunk(model, params, cache, last, state_ids, tokens, starts, lengths)
    return cache, last


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

    Raises:
      ValueError: as `prefill`, or too few slots, a limit below 1, settings of another number of
        requests, or a stop token out of range.
    """
    batch = len(prompts)
    if batch > cache.slots:
        raise ValueError(f"cache: expected at least {batch} state slots, got {cache.slots}")
    limits = token_limits(max_new_tokens, batch)
    checks.check_shape("sampling.temperature", sampling.temperature, (batch,))
    ends = token_ids(model, "stop_tokens", stop_tokens) if len(stop_tokens) else ()
    stops = np.broadcast_to(np.asarray([-1, *ends], np.int32), (batch, 1 + len(ends)))
    state_ids = first_state_ids(cache.sharding, cache.slots, batch)
    cache, last = prefill(model, params, cache, state_ids, prompts, chunk=chunk)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    return _begin(model, params, cache, last, state_ids, lengths, limits, stops, sampling)


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
      ValueError: a position later than the present one, or farther back than the ring holds: more
        than capacity - window before the highest position stored, or before rows that were
        imported. A snapshot or a new prefill reaches those.
    """
    positions = checks.as_int32("positions", positions)
    tokens = checks.as_int32("tokens", tokens)
    for name, value in (("positions", positions), ("tokens", tokens)):
        checks.check_shape(name, value, state.positions.shape)
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


def token_ids(model: Decoder, name: str, values: Prompt) -> Int32[np.ndarray, " n"]:
    """Token ids as an array, checked.

    Args:
      model: the decoder; its vocabulary sets the range.
      name: the argument's name, for the message.
      values: at least one token id.

    Raises:
      ValueError: there is none, or one is out of range.
    """
    if isinstance(values, str):
        raise ValueError(f"{name}: expected token ids or bytes, got text {values!r}")
    row = np.frombuffer(values, np.uint8) if isinstance(values, bytes) else np.asarray(values)
    if row.ndim != 1 or row.size == 0:
        raise ValueError(f"{name}: expected at least one token, got shape {row.shape}")
    limit = model.config.vocab_size
    if row.dtype.kind not in "iu" or row.min() < 0 or row.max() >= limit:
        raise ValueError(f"{name}: expected token ids from 0 to {limit - 1}, got {values!r}")
    return row.astype(np.int32)


def token_limits(max_new_tokens: int | Sequence[int], batch: int) -> Int32[np.ndarray, " b"]:
    """Tokens to choose for each request, from one number for all or one for each.

    Args:
      max_new_tokens: 1 or more.
      batch: B, number of requests.

    Raises:
      ValueError: not integers of 1 or more, or not B of them.
    """
    limits = np.asarray(max_new_tokens)
    fits = limits.dtype.kind in "iu" and limits.shape in ((), (batch,))
    if not fits or np.any((limits < 1) | (limits > checks.INT32_MAX)):
        raise ValueError(
            f"max_new_tokens: expected an integer of 1 or more, or {batch} of them, got "
            f"{max_new_tokens!r}"
        )
    return np.broadcast_to(limits, (batch,)).astype(np.int32)


def _decode_step(
    model, params, cache, state_ids, tokens, positions
) -> tuple[Float32[Array, "b vocab"], RingCache]:
    """Scores after one token of each request; a position of -1 does nothing."""
    meta = DecodeMetadata.build(cache.geometry, state_ids, positions[:, None])
    hidden, cache = _apply(model, params, tokens[:, None], cache, meta)
    scores = model.apply(params, hidden[:, 0], method="logits")
    return gather_scores(scores, cache.sharding), cache


def _apply(model, params, tokens, cache, meta) -> tuple[Float[Array, "b t hidden"], RingCache]:
    """`model.apply` with a cache, whose type Flax does not tell."""
    return model.apply(params, tokens, cache, meta)


@functools.partial(jax.jit, static_argnames="model", donate_argnames="cache")
def _begin(model, params, cache, last, state_ids, lengths, limits, stop_tokens, sampling):
    scores = gather_scores(model.apply(params, last, method="logits"), cache.sharding)
    token = sample(scores, lengths, sampling)
    stops = jnp.any(token[:, None] == stop_tokens, axis=1)
    state = DecodeState(
        cache=cache,
        state_ids=state_ids,
        positions=lengths,
        tokens=token,
        remaining=jnp.where(stops, 0, limits - 1),
        oldest=jnp.zeros_like(lengths),
        highest=lengths - 1,
        stop_tokens=stop_tokens,
        sampling=sampling,
    )
    return _settled(state)


def _settled(state: DecodeState) -> DecodeState:
    """The state as the next block expects it: all but the rings whole on every device."""
    cache = state.cache
    rest = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    del rest["cache"]
    return dataclasses.replace(state, **replicate(rest, cache.sharding))
