"""Prompts and limits of requests: token ids and numbers of tokens, checked."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

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

    Returns:
      int32[B].

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
