"""The command line of linen_model.py and nnx_model.py: a text, continued and compared."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence

import byte_model
import byte_text
import jax
import numpy as np
from command_line import Parser, print_error, random_seed, whole_number

import swa_jax as swa

TEMPERATURE = 0.7
MAX_BYTES = 10**6

Continue = Callable[[swa.DecoderConfig, dict, list[int], int, swa.Sampling], dict[str, list[int]]]
"""(config, variables, prompt, count, sampling) -> the `count` tokens of each model, by its name."""


def run(prog: str, description: str, arguments: Sequence[str], continue_prompt: Continue) -> int:
    """Continues a text on the byte model's weights, and compares with the library's decoder.

    Args:
      prog: the program's name.
      description: the first line of its help.
      arguments: the command line.
      continue_prompt: the models.

    Returns:
      The exit status: 0 if every model's tokens are those of swa.generate, else 1.
    """
    options = _parse(prog, description, arguments)
    text = os.fsencode(options.prompt)
    prompt = [byte_text.BOUNDARY, *text]
    try:
        decoder, variables = byte_model.load_model(byte_model.WEIGHTS)
    except (OSError, ValueError) as error:
        print_error(prog, error)
        return 2
    key = jax.random.key(options.seed)
    sampling = swa.Sampling.build(1, temperature=TEMPERATURE, keys=key[None])
    found = continue_prompt(decoder.config, variables, prompt, options.bytes, sampling)
    (want,) = swa.generate(
        decoder,
        variables,
        [prompt],
        max_new_tokens=options.bytes,
        sampling=sampling,
        prefill_chunk=2 * len(prompt),  # one call, as the models do
    )
    first = next(iter(found.values()))
    print((text + byte_text.decode(np.asarray(first))).decode("utf-8", "replace"), flush=True)
    for name, tokens in found.items():
        verdict = "equal" if tokens == want else "DIFFER from"
        print(f"{name}: {len(tokens)} tokens {verdict} those of swa.generate", file=sys.stderr)
    return 0 if all(tokens == want for tokens in found.values()) else 1


def _parse(prog: str, description: str, arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog=prog, description=description)
    add = parser.add_argument
    add("prompt", nargs="?", default=byte_model.PROMPT, metavar="PROMPT",
        help="text to continue; by default the start of a Python file")  # fmt: skip
    add("--bytes", type=whole_number(1, MAX_BYTES), default=200, metavar="N",
        help="bytes to generate (200)")  # fmt: skip
    add("--seed", type=random_seed, default=0, help="decides what is sampled (0)")
    options = parser.parse_args(arguments)
    if not options.prompt:
        parser.error("argument PROMPT: expected at least one byte, got none")
    return options
