"""The pool of state slots on the device: none in use at first, and requests put into them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from swa_jax.cache import RingCache
from swa_jax.decoding import DecodeState, choose_tokens
from swa_jax.modules import Decoder
from swa_jax.prefilling import Params
from swa_jax.sampling import Sampling


def idle_state(cache: RingCache, max_stop_tokens: int) -> DecodeState:
    """A pool in which no slot has a request: entry b is of state slot b.

    Args:
      cache: the rings; donated with the state.
      max_stop_tokens: stop tokens that a request may have.
    """
    return DecodeState(
        cache=cache,
        state_ids=jnp.arange(cache.slots, dtype=jnp.int32),
        **{
            name: jnp.zeros(cache.slots, jnp.int32)
            for name in ("positions", "tokens", "remaining", "oldest", "highest")
        },
        stop_tokens=jnp.full((cache.slots, max_stop_tokens), -1, jnp.int32),
        sampling=Sampling.build(cache.slots),
    )


@functools.partial(jax.jit, static_argnames="model", donate_argnames="state")
def admit(
    model: Decoder,
    params: Params,
    state: DecodeState,
    last: Float[Array, "n hidden"],
    slots: Int32[Array, " n"],
    lengths: Int32[Array, " n"],
    limits: Int32[Array, " n"],
    stop_tokens: Int32[Array, "n s"],
    sampling: tuple[Sampling, ...],
) -> tuple[DecodeState, Int32[Array, " n"]]:
    """Chooses the first tokens of prefilled requests, and lets them decode. The state is donated.

    Args:
      model: the decoder.
      params: its variables.
      state: the pool, in which entry b is of state slot b.
      last: floating[n, hidden], of the prompts' last tokens.
      slots: int32[n], the state slots that hold the prompts' rows; -1 for no request.
      lengths: int32[n], tokens of the prompts.
      limits: int32[n], tokens to choose, 1 or more.
      stop_tokens: int32[n, s]; -1 for none.
      sampling: n settings, each of one request.

    Returns:
      The new state; int32[n], the first tokens, -1 for a stop token.
    """
    settings = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *sampling)
    logits: Any = model.apply(params, last, method="logits")
    token, stops = choose_tokens(logits, lengths, stop_tokens, settings)
    # a negative index would count from the end: what is not to be written goes beyond it
    beyond = state.state_ids.shape[0] + jnp.arange(slots.shape[0], dtype=jnp.int32)
    place = jnp.where(slots >= 0, slots, beyond)

    def put(old, new):
        return old.at[place].set(new, mode="drop", unique_indices=True)

    state = dataclasses.replace(
        state,
        positions=put(state.positions, lengths),
        tokens=put(state.tokens, token),
        remaining=put(state.remaining, jnp.where(stops, 0, limits - 1)),
        oldest=put(state.oldest, jnp.zeros_like(lengths)),
        highest=put(state.highest, lengths - 1),
        stop_tokens=put(state.stop_tokens, stop_tokens),
        sampling=jax.tree.map(put, state.sampling, settings),
    )
    return state, jnp.where(stops, -1, token)
