"""Speculative decoding: one verify step stores and scores a token and its drafts."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from pallas_kernels import checks
from pallas_kernels.serialization import register_serialization
from swa_jax.decoding import DecodeState, decode_step, settled
from swa_jax.drafting import Drafter
from swa_jax.modules import Decoder
from swa_jax.placement import replicate
from swa_jax.prefilling import Params
from swa_jax.ring import RingGeometry
from swa_jax.sampling import Sampling, sample


@register_serialization
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SpeculationCounts:
    """What became of the drafts of B requests.

    Attributes:
      steps: int32[B], verify steps of each request while it was not finished.
      drafted: int32[B], drafts verified in them.
      accepted: int32[B], drafts that were the model's own choice.
    """

    steps: Int32[Array, " b"]
    drafted: Int32[Array, " b"]
    accepted: Int32[Array, " b"]


@functools.partial(
    jax.jit,
    static_argnames=("model", "drafter", "steps", "draft_tokens"),
    donate_argnames=("state", "memory"),
)
def speculate_block(
    model: Decoder,
    params: Params,
    state: DecodeState,
    drafter: Drafter,
    drafter_params: Params,
    memory: Any,
    *,
    steps: int,
    draft_tokens: int,
) -> tuple[DecodeState, Any, Int32[Array, "b n"], SpeculationCounts]:
    """Drafts, verifies and accepts for a block of steps, without a word to the host.

    A verify step stores a request's token and its drafts, then reads, and the model chooses a token
    after each of them. Drafts count up to the first that is not the model's choice; that choice
    counts as well. A token's random noise depends on its request and position only, so every
    token is the one that decoding without drafts chooses, greedy or sampled, up to ties between
    scores of programs of different shapes. In this way acceptance keeps the distribution: with
    noise g drawn anew at each position, argmax(logits / temperature + g) is a sample of the
    softmax whatever was drafted.

    Args:
      model: the decoder.
      params: its variables.
      state: the requests; donated.
      drafter: who drafts.
      drafter_params: the drafter's variables.
      memory: what it remembers; donated.
      steps: verify steps.
      draft_tokens: k, drafts in each.

    Returns:
      The new state and memory; int32[B, steps * (k + 1)], the chosen tokens in order with -1
      wherever there is none; and the counts of this block.

    Raises:
      ValueError: no drafter, more drafts than the ring has room for, or other drafts than
        int32[B, k].
    """
    check_draft_tokens(state.cache.geometry, draft_tokens)
    checks.check_type("drafter", drafter, Drafter)

    # The settings of each position's token: once a block and not in every step.
    every = state.sampling.repeat(draft_tokens + 1)

    def step(carry, _):
        state, memory = carry
        drafts, memory = drafter.propose(drafter_params, memory, state, draft_tokens=draft_tokens)
        drafts = checks.as_int32("the drafter's drafts", drafts)
        checks.check_shape("the drafter's drafts", drafts, (state.tokens.shape[0], draft_tokens))
        new, tokens, accepted, drafted = _verify(model, params, state, drafts, every)
        counts = jnp.sum(tokens >= 0, axis=1, dtype=jnp.int32)
        memory = drafter.accept(memory, state, tokens, counts)
        live = (state.remaining > 0).astype(jnp.int32)
        return (new, memory), (tokens, SpeculationCounts(live, drafted, accepted))

    (state, memory), (tokens, counts) = lax.scan(step, (state, memory), length=steps)
    tokens = jnp.swapaxes(tokens, 0, 1).reshape(tokens.shape[1], -1)
    counts = jax.tree.map(lambda x: jnp.sum(x, axis=0, dtype=jnp.int32), counts)
    return settled(state), memory, *replicate((tokens, counts), state.cache.sharding)


def check_draft_tokens(geometry: RingGeometry, draft_tokens: int) -> None:
    """Refuses more drafts than a verify step can store beside the window.

    Args:
      geometry: of the model's ring.
      draft_tokens: drafts in a verify step.

    Raises:
      ValueError: unless it is an int from 0 to capacity - window.
    """
    room = geometry.max_rollback
    if type(draft_tokens) is not int or not 0 <= draft_tokens <= room:
        raise ValueError(
            f"draft_tokens: expected 0 to {room} (capacity {geometry.capacity} - window "
            f"{geometry.window}), got {draft_tokens!r}"
        )


def _verify(model, params, state: DecodeState, drafts, every: Sampling):
    """One step: new state, tokens int32[B, k + 1] (-1: none), accepted and drafted int32[B]."""
    batch, width = drafts.shape[0], drafts.shape[1] + 1
    live = state.remaining > 0
    # No draft beyond the last token that is asked for: its row would be stored for nothing.
    usable = jnp.cumprod(drafts >= 0, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)
    drafted = jnp.where(live, jnp.minimum(usable, state.remaining - 1), 0)
    column = jnp.arange(width, dtype=jnp.int32)[None, :]
    given = live[:, None] & (column <= drafted[:, None])
    places = jnp.where(given, state.positions[:, None] + column, -1)
    tokens = jnp.concatenate([state.tokens[:, None], drafts], axis=1)
    logits, cache = decode_step(model, params, state.cache, state.state_ids, tokens, places)
    following = state.positions[:, None] + 1 + column
    chosen = sample(logits.reshape(batch * width, -1), following.reshape(-1), every)
    chosen = chosen.reshape(batch, width)
    right = (chosen[:, :-1] == drafts) & (column[:, :-1] < drafted[:, None])
    accepted = jnp.cumprod(right, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)
    # Tokens up to the choice after the accepted drafts, and up to the first stop.
    stops = jnp.any(chosen[..., None] == state.stop_tokens[:, None, :], axis=2)
    before = jnp.cumprod(~stops, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)
    stopped = live & (before <= accepted)
    accepted = jnp.where(live, jnp.minimum(accepted, before), 0)
    moved = jnp.where(live, accepted + 1, 0)
    newest = jnp.take_along_axis(chosen, accepted[:, None], axis=1)[:, 0]
    counted = column < jnp.where(stopped, moved - 1, moved)[:, None]
    state = dataclasses.replace(
        state,
        cache=cache,
        positions=state.positions + moved,
        tokens=jnp.where(live, newest, state.tokens),
        remaining=jnp.where(stopped, 0, state.remaining - moved),
        highest=jnp.maximum(state.highest, jnp.max(places, axis=1)),
    )
    return state, jnp.where(counted, chosen, -1), accepted, drafted
