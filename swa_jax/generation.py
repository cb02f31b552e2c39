"""Text out of prompts: the host's loop around jitted prefill and decode blocks."""

from collections.abc import Iterator, Sequence

import numpy as np
from jax.sharding import NamedSharding
from tqdm import tqdm

from pallas_kernels import checks
from swa_jax.cache import RingCache
from swa_jax.decoding import Params, Prompt, begin, decode_block, token_limits
from swa_jax.modules import Decoder
from swa_jax.placement import DeviceAxes, check_batch
from swa_jax.sampling import Sampling


def stream(
    model: Decoder,
    params: Params,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int | Sequence[int],
    sampling: Sampling | None = None,
    stop_tokens: Sequence[int] = (),
    block_steps: int = 32,
    prefill_chunk: int = 256,
    sharding: NamedSharding | None = None,
) -> Iterator[list[list[int]]]:
    """Generates text block by block.

    Args:
      model: the decoder.
      params: its variables.
      prompts: B sequences of token ids, of any lengths but 0.
      max_new_tokens: for all requests or for each.
      sampling: how tokens are chosen; greedy by default.
      stop_tokens: token ids that end a request; they are not part of the result.
      block_steps: tokens per request between two words to the host.
      prefill_chunk: most tokens of a prompt in one call.
      sharding: of the cache, see `RingCache.create`; the parameters' come from
        `parameter_shardings`. B has to be a multiple of the parts that the slots are in.

    Yields:
      The new tokens of each request, after the prefill and after each block.

    Raises:
      ValueError: an empty prompt, a token id or a limit out of range.
    """
    checks.check_count("block_steps", block_steps)
    if len(prompts) == 0:
        raise ValueError("prompts: expected at least one prompt, got none")
    check_batch("prompts", len(prompts), DeviceAxes.of(sharding).slot_shards)
    config = model.config
    cache = RingCache.create(len(prompts), config.num_layers, config.geometry, config.fmt, sharding)
    state = begin(
        model,
        params,
        cache,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=Sampling.build(len(prompts)) if sampling is None else sampling,
        stop_tokens=stop_tokens,
        chunk=prefill_chunk,
    )
    first = np.asarray(state.tokens)
    stopped = np.any(first[:, None] == np.asarray(state.stop_tokens), axis=1)
    yield [[] if stop else [int(token)] for token, stop in zip(first, stopped, strict=True)]
    while np.any(np.asarray(state.remaining) > 0):
        state, tokens = decode_block(model, params, state, block_steps)
        yield [row[row >= 0].tolist() for row in np.asarray(tokens)]


def generate(
    model: Decoder,
    params: Params,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int | Sequence[int],
    sampling: Sampling | None = None,
    stop_tokens: Sequence[int] = (),
    block_steps: int = 32,
    prefill_chunk: int = 256,
    sharding: NamedSharding | None = None,
    progress: bool = False,
) -> list[list[int]]:
    """Generates the continuation of each prompt.

    Args:
      model: the decoder.
      params: its variables.
      prompts: B sequences of token ids, of any lengths but 0.
      max_new_tokens: for all requests or for each.
      sampling: how tokens are chosen; greedy by default.
      stop_tokens: token ids that end a request; they are not part of the result.
      block_steps: tokens per request between two words to the host.
      prefill_chunk: most tokens of a prompt in one call.
      sharding: of the cache, as in `stream`.
      progress: show a progress bar on standard error.

    Returns:
      The new tokens of each request, without prompt and stop token.

    Raises:
      ValueError: an empty prompt, a token id or a limit out of range.
    """
    blocks = stream(
        model,
        params,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop_tokens=stop_tokens,
        block_steps=block_steps,
        prefill_chunk=prefill_chunk,
        sharding=sharding,
    )
    total = int(token_limits(max_new_tokens, len(prompts)).sum(dtype=np.int64))
    results: list[list[int]] = [[] for _ in prompts]
    with tqdm(total=total, unit="token", disable=not progress) as bar:
        for block in blocks:
            for result, new in zip(results, block, strict=True):
                result.extend(new)
            bar.update(sum(map(len, block)))
    return results
