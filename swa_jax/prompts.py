"""Prompts and limits of requests: token ids and numbers of tokens, checked."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import ArrayLike, Int32

from pallas_kernels import checks
from swa_jax.modules import Decoder

Prompt = Sequence[int] | np.ndarray
"""Token ids of one request; bytes count as such."""


def token_ids(model: Decoder, name: str, values: Prompt) -> Int32[np.ndarray, " n"]:
    """Token ids as an array, checked.

    Args:
      model: the decoder; its vocabulary sets the range.
      name: the argument's name, for the message.
      values: at least one token id.

    Returns:
      int32[n].

    Raises:
      ValueError: there is none, or one is out of range.
    """
    checks.check_type("model", model, Decoder)
    if isinstance(values, str):
        raise ValueError(f"{name}: expected token ids or bytes, got text {values!r}")
    if isinstance(values, bytes):
        row = np.frombuffer(values, np.uint8)
    else:
        row = checks.known_array(name, values)
    if row.ndim != 1 or row.size == 0:
        raise ValueError(f"{name}: expected at least one token, got shape {row.shape}")
    limit = model.config.vocab_size
    if row.dtype.kind not in "iu" or row.min() < 0 or row.max() >= limit:
        raise ValueError(f"{name}: expected token ids from 0 to {limit - 1}, got {values!r}")
    return row.astype(np.int32)


def all_token_ids(model: Decoder, prompts: Sequence[Prompt]) -> list[Int32[np.ndarray, " n"]]:
    """Token ids of prompts, checked.

    Args:
      model: the decoder; its vocabulary sets the range.
      prompts: at least one.

    Returns:
      int32[n] for each.

    Raises:
      ValueError: it is no sequence of prompts, there is none, or as `token_ids`.
    """
    many = isinstance(prompts, Sequence) or getattr(prompts, "ndim", 0) > 0
    if isinstance(prompts, bytes | str) or not many:
        raise ValueError(f"prompts: expected a list of prompts, got {type(prompts).__name__}")
    if len(prompts) == 0:
        raise ValueError("prompts: expected at least one prompt, got none")
    return [token_ids(model, f"prompts[{i}]", prompt) for i, prompt in enumerate(prompts)]


def stop_token_ids(model: Decoder, stop_tokens: Sequence[int]) -> Int32[np.ndarray, " n"]:
    """Stop tokens as an array, none or more; ValueError for what is no sequence of token ids."""
    given = checks.known_array("stop_tokens", stop_tokens)
    if given.ndim == 0 and not isinstance(stop_tokens, bytes | str):
        raise ValueError(f"stop_tokens: expected a sequence of token ids, got {stop_tokens!r}")
    if len(stop_tokens) == 0:
        return np.zeros(0, np.int32)
    return token_ids(model, "stop_tokens", stop_tokens)


def token_limits(
    max_new_tokens: int | Sequence[int], lengths: Sequence[int] | ArrayLike
) -> Int32[np.ndarray, " b"]:
    """Tokens to choose for each request, from one number for all or one for each.

    Args:
      max_new_tokens: 1 or more.
      lengths: integers[B], tokens of each prompt.

    Returns:
      int32[B].

    Raises:
      ValueError: not integers of 1 or more, not B of them, or positions that int32 does not hold.
    """
    before = np.asarray(lengths, np.int64)
    batch = len(before)
    limits = checks.known_array("max_new_tokens", max_new_tokens)
    fits = limits.dtype.kind in "iu" and limits.shape in ((), (batch,))
    if not fits or np.any((limits < 1) | (limits > checks.INT32_MAX)):
        raise ValueError(
            f"max_new_tokens: expected an integer of 1 or more, or {batch} of them, got "
            f"{max_new_tokens!r}"
        )
    limits = np.broadcast_to(limits, (batch,)).astype(np.int32)
    for i in np.flatnonzero(before + limits > checks.INT32_MAX)[:1]:
        raise ValueError(
            f"max_new_tokens: expected positions within int32, got {limits[i]} after a prompt of "
            f"{before[i]}"
        )
    return limits
