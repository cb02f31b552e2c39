"""Checks a decoded sequence against the recompute of the whole sequence without a cache."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax.cache import RingCache
from swa_jax.decoding import replay
from swa_jax.modules import Decoder, check_model
from swa_jax.prefilling import Params, prefill
from swa_jax.prompts import Prompt, token_ids
from swa_jax.sampling import Sampling, allowed_tokens, checked_sampling, perturbed_scores

TIE_TOLERANCE = 2e-2
"""Scores closer than this share of the largest logit (divided by the temperature) are a tie."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What a comparison with the recompute found.

    Attributes:
      equal: whether every token is the recompute's choice, or ties with it.
      tokens: number of tokens compared.
      ties: how many of them are not the recompute's first choice but tie with it.
      differing: how many of them do not even tie.
      largest_logit_difference: between the ring's scores and the recompute's.
      largest_logit: the largest magnitude of a score, to set the difference against.
    """

    equal: bool
    tokens: int
    ties: int
    differing: int
    largest_logit_difference: float
    largest_logit: float


def compare_with_recompute(
    model: Decoder,
    params: Params,
    prompt: Prompt,
    tokens: Prompt,
    sampling: Sampling | None = None,
) -> Comparison:
    """Whether decoded tokens are those of a recompute without a cache, up to ties.

    The recompute is fed the same tokens, and chooses with the same temperature, masks and noise.

    Args:
      model: the decoder.
      params: its variables.
      prompt: token ids of one request.
      tokens: the token ids that were decoded after it.
      sampling: of that one request; greedy by default.

    Raises:
      ValueError: prompt or tokens are empty or out of range, or settings of several requests.
    """
    check_model(model, params)
    sampling = checked_sampling(Sampling.build(1) if sampling is None else sampling, 1)
    sequence = np.concatenate(
        [token_ids(model, "prompt", prompt), token_ids(model, "tokens", tokens)]
    )
    begin, count = len(prompt) - 1, len(tokens)  # scores that chose the tokens start here
    recomputed = whole_sequence_logits(model, params, sequence[None, :-1])[0, begin:]
    through_ring = ring_logits(model, params, sequence[:-1], begin)
    positions = jnp.arange(begin + 1, begin + 1 + count, dtype=jnp.int32)
    every = sampling.repeat(count)
    allowed = allowed_tokens(through_ring, every)
    scores = jnp.where(allowed, perturbed_scores(recomputed, positions, every), -jnp.inf)
    scores, logits = np.asarray(scores), np.asarray(recomputed)
    best = scores.max(axis=1)
    chosen = scores[np.arange(count), sequence[begin + 1 :]]
    largest = np.abs(logits).max(axis=1)
    heat = float(sampling.temperature[0])
    margin = TIE_TOLERANCE * largest / (heat if heat > 0 else 1.0)
    first_choice = chosen == best
    close = best - chosen <= margin
    return Comparison(
        equal=bool(np.all(close)),
        tokens=count,
        ties=int(np.sum(close & ~first_choice)),
        differing=int(np.sum(~close)),
        largest_logit_difference=float(np.abs(np.asarray(through_ring) - logits).max()),
        largest_logit=float(largest.max()),
    )


def ring_logits(model: Decoder, params: Params, sequence: np.ndarray, begin: int) -> jax.Array:
    """Scores after each token from `begin` on: a prefill before it, then token by token.

    Args:
      model: the decoder.
      params: its variables.
      sequence: int32[n], token ids.
      begin: index of the first token that is decoded, not prefilled.

    Returns:
      float32[n - begin, vocab].
    """
    config = model.config
    cache = RingCache.for_decoder(config, 1)
    ids = np.zeros(1, np.int32)
    if begin:
        cache, _ = prefill(model, params, cache, ids, [sequence[:begin]])
    rest = _padded(sequence[None, begin:], -1)
    starts = np.full(1, begin, np.int32)
    logits, _ = replay(model, params, cache, ids, rest, starts)
    return logits[0, : len(sequence) - begin]


def whole_sequence_logits(model: Decoder, params: Params, tokens: np.ndarray) -> jax.Array:
    """Scores after each token of whole sequences, without a cache.

    Args:
      model: the decoder.
      params: its variables.
      tokens: int32[B, n].

    Returns:
      float32[B, n, vocab].
    """
    return _whole(model, params, _padded(tokens, 0))[:, : tokens.shape[1]]


def _padded(tokens: np.ndarray, value: int) -> np.ndarray:
    """Tokens up to a power of two, then to multiples of 512, so that few lengths are compiled."""
    count = tokens.shape[1]
    width = max(64, 1 << (count - 1).bit_length()) if count <= 512 else -(-count // 512) * 512
    return np.pad(tokens, ((0, 0), (0, width - tokens.shape[1])), constant_values=value)


def _apply_whole(model, params, tokens):
    return model.apply(params, model.apply(params, tokens), method="logits")


_whole = jax.jit(_apply_whole, static_argnums=0)
