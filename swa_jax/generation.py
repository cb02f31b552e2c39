"""Text out of prompts: the host's loop around jitted prefill, decode and verify blocks."""

from collections.abc import Iterator, Sequence

import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Int32
from tqdm import tqdm

from pallas_kernels import checks
from swa_jax.cache import RingCache
from swa_jax.decoding import DecodeState, begin, checked_settings, decode_block
from swa_jax.drafting import Drafter, NGramDrafter
from swa_jax.modules import Decoder, check_model
from swa_jax.placement import DeviceAxes, check_batch
from swa_jax.prefilling import Params
from swa_jax.prompts import Prompt, all_token_ids, token_limits
from swa_jax.sampling import Sampling
from swa_jax.speculation import check_draft_tokens, speculate_block


def stream(
    model: Decoder,
    params: Params,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int | Sequence[int],
    sampling: Sampling | None = None,
    stop_tokens: Sequence[int] = (),
    draft_tokens: int = 0,
    drafter: Drafter | None = None,
    drafter_params: Params = None,
    block_steps: int = 32,
    prefill_chunk: int = 256,
    sharding: NamedSharding | None = None,
) -> Iterator[list[list[int]]]:
    """Generates text block by block. Arguments are checked in the call, and work begins later.

    Args:
      model: the decoder.
      params: its variables.
      prompts: B sequences of token ids, of any lengths but 0.
      max_new_tokens: for all requests or for each.
      sampling: how tokens are chosen; greedy by default.
      stop_tokens: token ids that end a request; they are not part of the result.
      draft_tokens: drafts verified in a step, 0 to capacity - window; 0: none. The tokens stay the
        same, up to ties; how fast they come is what drafts change.
      drafter: who drafts; an NGramDrafter by default.
      drafter_params: the variables of a drafter that has any.
      block_steps: most tokens per request between two words to the host.
      prefill_chunk: most tokens of a prompt in one call.
      sharding: of the cache, see `RingCache.create`; the parameters' come from
        `parameter_shardings`. B has to be a multiple of the parts that the slots are in.

    Yields:
      The new tokens of each request, after the prefill and after each block.

    Raises:
      ValueError: another kind of model or variables, an empty prompt, a token id, a limit or a
        setting out of range, more drafts than the ring has room for, a drafter without
        draft_tokens, or variables without their drafter.
    """
    check_model(model, params)
    checks.check_count("block_steps", block_steps)
    checks.check_count("prefill_chunk", prefill_chunk)
    rows = all_token_ids(model, prompts)
    check_batch("prompts", len(rows), DeviceAxes.of(sharding).slot_shards)
    sampling = Sampling.build(len(rows)) if sampling is None else sampling
    checked_settings(model, [len(row) for row in rows], max_new_tokens, sampling, stop_tokens)
    check_draft_tokens(model.config.geometry, draft_tokens)
    if draft_tokens == 0 and (drafter is not None or drafter_params is not None):
        raise ValueError("draft_tokens: expected 1 or more with a drafter, got 0")
    if drafter is None and drafter_params is not None:
        raise ValueError("drafter_params: expected none without a drafter, got some")
    drafter = NGramDrafter() if drafter is None else drafter
    checks.check_type("drafter", drafter, Drafter)

    def blocks() -> Iterator[list[list[int]]]:
        state = begin(
            model,
            params,
            RingCache.for_decoder(model.config, len(rows), sharding),
            rows,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop_tokens=stop_tokens,
            chunk=prefill_chunk,
        )
        if draft_tokens == 0:
            yield first_tokens(state)
            for _, new in go_on(model, params, state, block_steps=block_steps):
                yield new
            return
        memory = drafter.begin(model, drafter_params, rows, state, draft_tokens=draft_tokens)
        yield first_tokens(state)
        steps = max(1, block_steps // (draft_tokens + 1))
        while _unfinished(state):
            state, memory, tokens, _ = speculate_block(
                model,
                params,
                state,
                drafter,
                drafter_params,
                memory,
                steps=steps,
                draft_tokens=draft_tokens,
            )
            yield _of_requests(tokens)

    return blocks()


def generate(
    model: Decoder,
    params: Params,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int | Sequence[int],
    sampling: Sampling | None = None,
    stop_tokens: Sequence[int] = (),
    draft_tokens: int = 0,
    drafter: Drafter | None = None,
    drafter_params: Params = None,
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
      draft_tokens: drafts verified in a step, 0 to capacity - window; 0: none. The tokens stay the
        same, up to ties; how fast they come is what drafts change.
      drafter: who drafts; an NGramDrafter by default.
      drafter_params: the variables of a drafter that has any.
      block_steps: most tokens per request between two words to the host.
      prefill_chunk: most tokens of a prompt in one call.
      sharding: of the cache, as in `stream`.
      progress: show a progress bar on standard error.

    Returns:
      The new tokens of each request, without prompt and stop token.

    Raises:
      ValueError: as `stream`.
    """
    blocks = stream(
        model,
        params,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop_tokens=stop_tokens,
        draft_tokens=draft_tokens,
        drafter=drafter,
        drafter_params=drafter_params,
        block_steps=block_steps,
        prefill_chunk=prefill_chunk,
        sharding=sharding,
    )
    lengths = [len(prompt) for prompt in prompts]
    total = int(token_limits(max_new_tokens, lengths).sum(dtype=np.int64))
    results: list[list[int]] = [[] for _ in prompts]
    with tqdm(total=total, unit="token", disable=not progress) as bar:
        for block in blocks:
            for result, new in zip(results, block, strict=True):
                result.extend(new)
            bar.update(sum(map(len, block)))
    return results


def first_tokens(state: DecodeState) -> list[list[int]]:
    """The token that `begin` chose for each request, or nothing where it is a stop token."""
    checks.check_type("state", state, DecodeState)
    tokens, stops = np.asarray(state.tokens), np.asarray(state.stop_tokens)
    stopped = np.any(tokens[:, None] == stops, axis=1)
    return [[] if stop else [int(token)] for token, stop in zip(tokens, stopped, strict=True)]


def go_on(
    model: Decoder, params: Params, state: DecodeState, *, block_steps: int = 32
) -> Iterator[tuple[DecodeState, list[list[int]]]]:
    """Decodes block by block until every request has finished.

    Args:
      model: the decoder.
      params: its variables.
      state: the requests; donated, as is each state yielded once the next one is asked for.
      block_steps: tokens per request between two words to the host.

    Yields:
      The state after each block, and each request's new tokens.

    Raises:
      ValueError: another kind of model, variables or state, or block_steps below 1.
    """
    check_model(model, params)
    checks.check_type("state", state, DecodeState)
    checks.check_count("block_steps", block_steps)
    while _unfinished(state):
        state, tokens = decode_block(model, params, state, block_steps)
        yield state, _of_requests(tokens)


def _unfinished(state: DecodeState) -> bool:
    return bool(np.any(np.asarray(state.remaining) > 0))


def _of_requests(tokens: Int32[Array, "b n"]) -> list[list[int]]:
    """Each request's tokens of a block, which has -1 where there is none."""
    return [row[row >= 0].tolist() for row in np.asarray(tokens)]
