"""Saves the state of a text as generate.py writes it, and goes on from the last one saved."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import swa_jax as swa
from swa_jax.decoding import begin
from swa_jax.generation import first_tokens, go_on
from swa_jax.prefixes import model_fingerprint
from swa_jax.state_checkpoint import Restored, latest_step, restore_state, save_state


class Checkpoints(NamedTuple):
    """Where the state goes.

    Attributes:
      directory: for the checkpoints of one text.
      every: bytes from one to the next, rounded up to whole blocks.
      settings: what must be the same to go on with the text.
      restored: what to go on from, or None to begin.
    """

    directory: Path
    every: int
    settings: Mapping[str, Any]
    restored: Restored | None


def open_checkpoints(
    directory: Path,
    every: int,
    model: swa.Decoder,
    variables: dict,
    settings: Mapping[str, Any],
    *,
    resume: bool,
) -> Checkpoints:
    """Restores the last checkpoint, if there is one, and says so on standard error.

    Args:
      directory: for the checkpoints of one text.
      every: bytes from one to the next.
      model: the decoder.
      variables: its parameters, of which a fingerprint is kept.
      settings: what else decides the text, as JSON values by name.
      resume: whether to go on from the last checkpoint.

    Raises:
      ValueError: there are checkpoints, and `resume` does not say to go on from them; or the last
        one is of something else, or cannot be read.
    """
    settings = {**settings, "model": model_fingerprint(model.config, variables)}
    if latest_step(directory) is None:
        if resume:
            print(f"{directory}: no checkpoint, starting anew", file=sys.stderr)
        return Checkpoints(directory, every, settings, None)
    if not resume:
        raise ValueError(f"{directory}: expected no checkpoint yet, got one; --resume goes on")
    restored = restore_state(directory, model, batch=1, settings=settings)
    print(f"{directory}: going on after {restored.step} bytes", file=sys.stderr)
    return Checkpoints(directory, every, settings, restored)


def saved_blocks(
    model: swa.Decoder,
    variables: dict,
    prompt_tokens: list[int],
    *,
    max_new_tokens: int,
    sampling: swa.Sampling,
    stop_token: int,
    block_steps: int,
    checkpoints: Checkpoints,
) -> Iterator[list[list[int]]]:
    """What `swa.stream` yields for one prompt, saved on the way.

    Those of the checkpoint that it goes on from come first, together.

    Raises:
      ValueError: the directory holds other things.
      OSError: a checkpoint cannot be written.
    """
    directory, every, settings, restored = checkpoints
    if restored is None:
        config = model.config
        state = begin(
            model,
            variables,
            swa.RingCache.for_decoder(config, 1),
            [prompt_tokens],
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop_tokens=[stop_token],
        )
        tokens = first_tokens(state)
    else:
        variables, state, tokens = restored.params, restored.state, restored.tokens
    yield tokens
    text = list(tokens[0])
    blocks = go_on(model, variables, state, block_steps=block_steps)
    for number, (state, new) in enumerate(blocks, 1):
        text += new[0]
        due = number % -(-every // block_steps) == 0
        if due and state.remaining[0] > 0:  # with nothing left to do there is nothing to save
            save_state(directory, len(text), model, variables, state, [text], settings)
        yield new
