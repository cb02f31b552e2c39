r"""A long decode: step time and memory do not depend on how far it has come.

python examples/long_decode.py
python examples/long_decode.py --tokens 20000 --plot steps.png
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import byte_text
import jax
import numpy as np
from byte_model import PROMPT, WEIGHTS, load_model
from command_line import (
    Parser,
    output_file,
    output_picture,
    print_error,
    random_seed,
    whole_number,
)
from tqdm import tqdm

import swa_jax as swa
from swa_jax.decoding import begin, decode_block

BLOCK = 100  # steps between two words to the host


@dataclasses.dataclass
class Stretch:
    """A tenth of the decode.

    Attributes:
      first: position of its first token.
      step_us: median microseconds per step.
      array_bytes: bytes of the arrays alive at its end.
      process_bytes: the process' memory at its end; None where the system does not say.
      programs: programs that decoding has compiled so far.
    """

    first: int
    step_us: float
    array_bytes: int
    process_bytes: int | None
    programs: int


def decode(model: swa.Decoder, variables: dict, tokens: int, seed: int) -> list[Stretch]:
    """Decodes one request for so many tokens, and looks at the clock and the memory.

    Args:
      model: the decoder.
      variables: its parameters.
      tokens: rounded up to ten times a block.
      seed: of the sampling: what a model writes at length without it is a loop.
    """
    config = model.config
    blocks = -(-tokens // (10 * BLOCK))
    state = begin(
        model,
        variables,
        swa.RingCache.for_decoder(config, 1),
        [[byte_text.BOUNDARY, *PROMPT.encode()]],
        max_new_tokens=10 * blocks * BLOCK + BLOCK + 1,
        sampling=swa.Sampling.build(1, temperature=0.7, keys=jax.random.key(seed)[None]),
    )
    before = _programs()
    state, _ = decode_block(model, variables, state, BLOCK)  # compiles
    stretches = []
    with tqdm(total=10 * blocks * BLOCK, unit="token", disable=not sys.stderr.isatty()) as bar:
        for _ in range(10):
            first, times = int(state.positions[0]), []
            for _ in range(blocks):
                started = time.perf_counter()
                state, new = decode_block(model, variables, state, BLOCK)
                np.asarray(new)
                times.append((time.perf_counter() - started) / BLOCK)
                bar.update(BLOCK)
            stretches.append(
                Stretch(
                    first,
                    1e6 * float(np.median(times)),
                    sum(array.nbytes for array in jax.live_arrays()),
                    _process_bytes(),
                    _programs() - before,
                )
            )
    return stretches


def _programs() -> int:
    return cast(Any, decode_block)._cache_size()


def _process_bytes() -> int | None:
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def print_table(stretches: Sequence[Stretch]) -> None:
    """The stretches on standard output."""
    print("from position  us/step  arrays, MB  process, MB  programs")
    for s in stretches:
        process = "-" if s.process_bytes is None else f"{s.process_bytes / 1e6:,.1f}"
        print(
            f"{s.first:13,d}  {s.step_us:7,.0f}  {s.array_bytes / 1e6:10,.3f}  {process:>11}  "
            f"{s.programs:8d}"
        )
    ratio = stretches[-1].step_us / stretches[0].step_us
    print(f"\nlast step time by first: {ratio:.2f}")


def plot(stretches: Sequence[Stretch], path: Path) -> None:
    """Step time and memory by position, as a picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    positions = [s.first for s in stretches]
    upper.plot(positions, [s.step_us for s in stretches], marker="o")
    upper.set_ylabel("µs per step")
    lower.plot(positions, [s.array_bytes / 1e6 for s in stretches], marker="o", label="arrays")
    if all(s.process_bytes is not None for s in stretches):
        process = [(s.process_bytes or 0) / 1e6 for s in stretches]
        lower.plot(positions, process, marker="o", label="process")
    lower.set_ylabel("MB")
    lower.set_xlabel("position")
    for axes in (upper, lower):
        axes.set_ylim(bottom=0)
    lower.legend()
    figure.savefig(path)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        prog="long_decode.py",
        description="Decodes one request at length; shows step time and memory along the way.",
    )
    add = parser.add_argument
    add("--tokens", type=whole_number(1, 10**9), default=100_000, metavar="N",
        help="bytes to generate, rounded up to thousands (100000: some minutes)")  # fmt: skip
    add("--seed", type=random_seed, default=0, help="decides what is sampled (0)")
    add("--weights", type=Path, default=WEIGHTS, help="file written by train_bytes.py (shipped)")
    add("--plot", type=output_picture, metavar="FILE", help="draw the figures")
    add("--report", type=output_file, metavar="FILE", help="write the figures as JSON")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    options = parse_arguments(arguments)
    try:
        model, variables = load_model(options.weights)
        stretches = decode(model, variables, options.tokens, options.seed)
        print_table(stretches)
        if options.report is not None:
            figures = [dataclasses.asdict(stretch) for stretch in stretches]
            options.report.write_text(json.dumps(figures, indent=2) + "\n")
        if options.plot is not None:
            plot(stretches, options.plot)
    except (OSError, ValueError) as error:
        print_error("long_decode.py", error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
