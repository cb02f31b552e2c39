"""Drafters: who proposes the tokens that a verify step checks."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32

from pallas_kernels import checks
from swa_jax.cache import RingCache
from swa_jax.decoding import DecodeState, decode_step
from swa_jax.modules import Decoder
from swa_jax.prefilling import Params, prefill
from swa_jax.prompts import Prompt, token_ids
from swa_jax.sampling import sample


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens. Hashable: it is a static argument of the jitted loop.

    What it remembers is a pytree of its own, handed from call to call as the cache is: `begin`
    makes it on the host, and the two other calls run inside jit.
    """

    def begin(
        self,
        model: Decoder,
        params: Params,
        prompts: Sequence[Prompt],
        state: DecodeState,
        *,
        draft_tokens: int,
    ) -> Any:
        """The memory at the beginning.

        Args:
          model: the decoder it drafts for.
          params: the drafter's own variables, if it has any.
          prompts: B prompts, checked.
          state: the requests after their prefill.
          draft_tokens: most tokens it will be asked for at once.

        Raises:
          ValueError: the drafter does not fit the model, or cannot draft so many.
        """
        ...

    def propose(
        self, params: Params, memory: Any, state: DecodeState, *, draft_tokens: int
    ) -> tuple[Int32[Array, "b k"], Any]:
        """Drafts the tokens after `state.tokens`.

        Args:
          params: the drafter's own variables.
          memory: what it remembers.
          state: the requests; finished ones too, whose drafts are ignored.
          draft_tokens: k.

        Returns:
          int32[B, k], the drafts in order; the first -1 ends those of a request; and the memory.
        """
        ...

    def accept(
        self,
        memory: Any,
        state: DecodeState,
        tokens: Int32[Array, "b k1"],
        counts: Int32[Array, " b"],
    ) -> Any:
        """Takes note of the tokens that were chosen.

        Args:
          memory: what it remembers.
          state: the requests as they were in `propose`.
          tokens: int32[B, k + 1]; tokens[:, i] stands at position state.positions + 1 + i.
          counts: int32[B], how many of them count; 0 for a finished request.

        Returns:
          The memory.
        """
        ...


@dataclasses.dataclass(frozen=True)
class NGramDrafter:
    """Prompt lookup: drafts what followed the last time the newest tokens stood together.

    It has no weights. Of the places where the newest `shortest` tokens stood before, it takes one
    where most tokens before them agree as well, up to `longest` in all, and of these the latest.
    Drafts that run into the present go on with themselves, so a loop is drafted to its end.

    Attributes:
      longest: tokens of context beyond which a longer match counts no more.
      shortest: tokens that must agree for a draft at all.
      history: tokens it remembers of each request.

    Raises:
      ValueError: not 1 <= shortest <= longest < history.
    """

    longest: int = 8
    shortest: int = 3
    history: int = 2048

    def __post_init__(self):
        for name in ("longest", "shortest", "history"):
            checks.check_count(name, getattr(self, name))
        if not self.shortest <= self.longest < self.history:
            raise ValueError(
                f"longest: expected shortest ({self.shortest}) <= longest < history "
                f"({self.history}), got {self.longest}"
            )

    def begin(
        self,
        model: Decoder,
        params: Params,
        prompts: Sequence[Prompt],
        state: DecodeState,
        *,
        draft_tokens: int,
    ) -> Int32[Array, "b history"]:
        """Each prompt's newest tokens and the first chosen one, latest last; -1 before them."""
        del params, draft_tokens
        known = np.full((len(prompts), self.history), -1, np.int32)
        for row, prompt in zip(known, prompts, strict=True):
            newest = token_ids(model, "prompt", prompt)[-(self.history - 1) :]
            row[-1 - len(newest) : -1] = newest
        return jnp.asarray(known).at[:, -1].set(state.tokens)

    def propose(
        self,
        params: Params,
        memory: Int32[Array, "b history"],
        state: DecodeState,
        *,
        draft_tokens: int,
    ) -> tuple[Int32[Array, "b k"], Int32[Array, "b history"]]:
        """See `Drafter`."""
        del params, state
        # By the place of a match's last token: how many tokens agree, [B, history - 1].
        length = jnp.zeros((memory.shape[0], self.history - 1), jnp.int32)
        agree = jnp.ones(length.shape, bool)
        for back in range(self.longest):
            newest = memory[:, -1 - back, None]
            same = (memory[:, : self.history - 1 - back] == newest) & (newest >= 0)
            agree = agree & jnp.pad(same, ((0, 0), (back, 0)))
            length += agree.astype(jnp.int32)
        # The first of the reversed ones is the latest.
        age = jnp.argmax(length[:, ::-1], axis=1).astype(jnp.int32)
        best = self.history - 2 - age
        found = jnp.take_along_axis(length, best[:, None], axis=1) >= self.shortest  # [B, 1]
        period = age + 1
        following = jnp.arange(draft_tokens, dtype=jnp.int32)[None, :] % period[:, None]
        drafts = jnp.take_along_axis(memory, best[:, None] + 1 + following, axis=1)
        return jnp.where(found, drafts, -1), memory

    def accept(
        self,
        memory: Int32[Array, "b history"],
        state: DecodeState,
        tokens: Int32[Array, "b k1"],
        counts: Int32[Array, " b"],
    ) -> Int32[Array, "b history"]:
        """See `Drafter`."""
        del state
        both = jnp.concatenate([memory, tokens], axis=1)
        newest = jax.vmap(lambda row, count: lax.dynamic_slice(row, (count,), (self.history,)))
        return newest(both, counts)


@dataclasses.dataclass(frozen=True)
class ModelDrafter:
    """A smaller decoder with the same vocabulary, and rings of its own.

    It chooses with the request's own settings, masks and noise: where its scores order the best
    tokens as the large model's do, it drafts the token that the large model will choose.

    Attributes:
      model: the decoder that drafts.
    """

    model: Decoder

    def __post_init__(self):
        checks.check_type("model", self.model, Decoder)

    def begin(
        self,
        model: Decoder,
        params: Params,
        prompts: Sequence[Prompt],
        state: DecodeState,
        *,
        draft_tokens: int,
    ) -> RingCache:
        """Prefills the drafter's own rings.

        Raises:
          ValueError: no variables, another vocabulary, or more drafts than those rings have room
            for.
        """
        if params is None:
            raise ValueError("drafter_params: expected the variables of the drafter, got None")
        config = self.model.config
        if config.vocab_size != model.config.vocab_size:
            raise ValueError(
                f"drafter: expected a vocabulary of {model.config.vocab_size}, got "
                f"{config.vocab_size}"
            )
        room = config.geometry.max_tokens_per_step
        if draft_tokens > room:
            raise ValueError(
                f"draft_tokens: expected at most {room} (capacity - window + 1 of the drafter's "
                f"rings), got {draft_tokens}"
            )
        cache = RingCache.for_decoder(config, state.cache.slots, state.cache.sharding)
        cache, _ = prefill(self.model, params, cache, state.state_ids, prompts)
        return cache

    def propose(
        self, params: Params, memory: RingCache, state: DecodeState, *, draft_tokens: int
    ) -> tuple[Int32[Array, "b k"], RingCache]:
        """See `Drafter`."""
        live = state.remaining > 0

        def step(carry, _):
            cache, token, position = carry
            place = jnp.where(live, position, -1)[:, None]
            logits, cache = decode_step(
                self.model, params, cache, state.state_ids, token[:, None], place
            )
            token = sample(logits[:, 0], position + 1, state.sampling)
            return (cache, token, position + 1), token

        # One step more than drafts: if all are accepted, the last one's row is there already.
        begin = (memory, state.tokens, state.positions)
        (memory, _, _), drafts = lax.scan(step, begin, length=draft_tokens + 1)
        return drafts[:-1].T, memory

    def accept(
        self,
        memory: RingCache,
        state: DecodeState,
        tokens: Int32[Array, "b k1"],
        counts: Int32[Array, " b"],
    ) -> RingCache:
        """Nothing to note: rejected rows are overwritten before they could be seen."""
        del state, tokens, counts
        return memory
