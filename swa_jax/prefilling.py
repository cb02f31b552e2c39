"""Prompts into the rings, chunk by chunk."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int32

from pallas_kernels import checks
from swa_jax.cache import RingCache
from swa_jax.metadata import DecodeMetadata, PrefillMetadata
from swa_jax.modules import Decoder, check_model
from swa_jax.placement import (
    check_distinct,
    check_places,
    checked_slots,
    replicate,
    replicated,
)
from swa_jax.prompts import Prompt, all_token_ids

Params = Any
"""A module's variables, {"params": ...}."""


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
      last: floating[B, hidden], of each request's last token so far.
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
    hidden, cache = apply_model(model, params, tokens, cache, meta)
    end = jnp.maximum(lengths - 1, 0)[:, None, None]
    newest = jnp.take_along_axis(hidden, end, axis=1)[:, 0]
    return cache, replicate(jnp.where(lengths[:, None] > 0, newest, last), cache.sharding)


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
      The new cache, and the hidden states of the prompts' last tokens, floating[B, hidden].

    Raises:
      ValueError: another kind of model or variables; no prompt, an empty one, or token ids out of
        range; a state slot out of range or given twice.
    """
    check_model(model, params)
    checks.check_count("chunk", chunk)
    rows = all_token_ids(model, prompts)
    state_ids = checks.as_int32("state_ids", state_ids)
    checks.check_shape("state_ids", state_ids, (len(rows),))
    ids = checked_slots(state_ids, cache.slots)
    check_distinct("state_ids", ids)
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


def apply_model(
    model: Decoder,
    params: Params,
    tokens: Int32[Array, "b t"],
    cache: RingCache,
    meta: DecodeMetadata | PrefillMetadata,
) -> tuple[Float[Array, "b t hidden"], RingCache]:
    """`model.apply` with a cache, whose type Flax does not tell."""
    apply: Any = model.apply
    return apply(params, tokens, cache, meta)
