r"""Beam search with the byte model: forks of one prompt in the ring, ranked by their scores.

python examples/beam_search.py
python examples/beam_search.py --beams 8 --alpha 0.6 $'import os\nimport sy'
python examples/beam_search.py --best-of 8 --temperature 0.8
"""

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import byte_text
import jax
import jax.numpy as jnp
from byte_model import PROMPT, WEIGHTS, load_model
from command_line import (
    MAX_REQUESTS,
    Parser,
    output_file,
    print_error,
    random_seed,
    whole_number,
)

import swa_jax as swa
from swa_jax.beams import BeamState, beam_block, beam_search
from swa_jax.best_of_n import best_of
from swa_jax.continuations import Continuation
from swa_jax.sampling import request_keys

BLOCK = 32  # tokens between two words to the host


def measure_block(model: swa.Decoder, variables: dict, beams: int, limit: int, stops: int) -> dict:
    """Bytes of a compiled block of steps: what is updated in place, and what is needed beside it.

    Args:
      model: the decoder.
      variables: its parameters.
      beams: how many.
      limit: most tokens of a beam.
      stops: number of stop tokens.

    Returns:
      Bytes under plain names.
    """
    config = model.config

    def make() -> BeamState:
        scores, tokens = jnp.zeros(beams), jnp.zeros((beams, limit), jnp.int32)
        return BeamState(
            cache=swa.RingCache.for_decoder(config, beams),
            position=jnp.int32(0),
            step=jnp.int32(0),
            tokens=tokens,
            log_probability=scores,
            ended_tokens=tokens,
            ended_log_probability=scores,
            ended_scores=scores,
            stop_tokens=jnp.zeros(stops, jnp.int32),
            alpha=jnp.float32(0),
        )

    state = jax.eval_shape(make)
    compiled = beam_block.lower(model, variables, state, BLOCK).compile()
    memory: Any = compiled.memory_analysis()
    others = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    others -= state.cache.nbytes
    return {
        "cache_bytes": state.cache.nbytes,
        "cache_bytes_not_in_place": max(
            0, state.cache.nbytes + others - memory.alias_size_in_bytes
        ),
        "temporary_bytes": memory.temp_size_in_bytes,
    }


def describe(found: Continuation) -> dict:
    """A continuation under plain names."""
    return {
        "text": bytes(found.tokens).decode("utf-8", "replace"),
        "bytes": len(found.tokens),
        "log_probability": found.log_probability,
        "score": found.score,
        "stopped": found.stopped,
    }


def print_results(report: dict, shown: int) -> None:
    """The best continuations and greedy's, with their scores."""
    print(f"{'score':>9} {'log-prob':>9} {'bytes':>5}  text")
    lines = [(str(i + 1), one) for i, one in enumerate(report["continuations"][:shown])]
    for name, one in [*lines, ("greedy", report["greedy"])]:
        end = "" if one["stopped"] else " ..."
        print(
            f"{one['score']:9.4f} {one['log_probability']:9.3f} {one['bytes']:5}  "
            f"{one['text']!r}{end}" + (" (greedy)" if name == "greedy" else "")
        )
    relation = "at least" if report["best_at_least_greedy"] else "below"
    print(
        f"the best score is {relation} greedy's; {report['seconds']:.3f} s, and "
        f"{report['seconds_with_compilation']:.1f} s the first time, with compilation"
    )
    if "memory" in report:
        memory = report["memory"]
        print(
            f"a block of {BLOCK} steps: cache {memory['cache_bytes']:,} bytes, "
            f"{memory['cache_bytes_not_in_place']:,} of the donated state not updated in place, "
            f"{memory['temporary_bytes']:,} bytes beside it, the forked slots among them"
        )


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        prog="beam_search.py",
        description="Finds likely continuations of a text: a beam search over forks of one "
        "prefilled prompt, or the best of several samples.",
    )
    add, count = parser.add_argument, whole_number(1, MAX_REQUESTS)
    add("prompt", nargs="?", metavar="PROMPT",
        help="text to continue; by default the start of a Python file")  # fmt: skip
    add("--file", type=Path, help="take the prompt from a file; it may be longer than the window")
    add("--beams", type=count, metavar="K", help="beams that go on side by side (4)")
    add(
        "--best-of", type=count, metavar="N", help="instead of a beam search: the best of N samples"
    )
    add("--temperature", type=float, help="of the samples of --best-of (0.7)")
    add("--seed", type=random_seed, help="decides what --best-of samples (0)")
    add("--bytes", type=count, default=64, metavar="N", help="most bytes of a continuation (64)")
    add("--alpha", type=float, default=1.0,
        help="a score is a log-probability / length ** ALPHA (1)")  # fmt: skip
    add("--line", action=argparse.BooleanOptionalAction, default=True,
        help="a line's end ends a continuation, as the end of a file always does "
        "(--line)")  # fmt: skip
    add("--show", type=count, default=8, metavar="N", help="continuations to print (8)")
    add("--memory", action="store_true",
        help="also what the compiled block of a beam search needs beside the cache")  # fmt: skip
    add("--weights", type=Path, default=WEIGHTS,
        help="file written by train_bytes.py (the shipped one)")  # fmt: skip
    add("--report", type=output_file, metavar="FILE", help="write the results as JSON")
    options = parser.parse_args(arguments)
    if options.prompt is not None and options.file is not None:
        parser.error("expected one of PROMPT and --file, got both")
    sampled = options.best_of is not None
    for name, unused in [
        ("beams", sampled),
        ("memory", sampled),
        ("temperature", not sampled),
        ("seed", not sampled),
    ]:
        if unused and getattr(options, name) not in (None, False):
            parser.error(f"argument --{name}: expected {'no' if sampled else 'a'} --best-of")
    defaults = {"beams": 4, "best_of": 1, "temperature": 0.7, "seed": 0}
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.sampled = sampled
    return options


def run(options: argparse.Namespace) -> dict:
    """Searches, twice, and decodes greedily; returns the report."""
    prompt = PROMPT.encode() if options.prompt is None else os.fsencode(options.prompt)
    if options.file is not None:
        prompt = options.file.read_bytes()
    if not prompt:
        raise ValueError("prompt: expected at least one byte, got none")
    model, variables = load_model(options.weights)
    settings = {
        "max_new_tokens": options.bytes,
        "stop_tokens": [byte_text.BOUNDARY, *(b"\n" if options.line else b"")],
        "alpha": options.alpha,
        "block_steps": BLOCK,
    }
    every = functools.partial(
        best_of, model, variables, [byte_text.BOUNDARY, *prompt], samples=1, **settings
    )
    if options.sampled:
        sampling = swa.Sampling.build(
            options.best_of,
            temperature=options.temperature,
            keys=request_keys(jax.random.key(options.seed), options.best_of),
        )
        search = functools.partial(every, samples=options.best_of, sampling=sampling)
    else:
        search = functools.partial(beam_search, *every.args, beams=options.beams, **settings)
    if sys.stderr.isatty():
        print("compiling and searching ...", file=sys.stderr)
    _, first = _timed(search)
    found, seconds = _timed(search)
    [greedy] = every(sampling=swa.Sampling.build(1))
    report = {
        "mode": "best of samples" if options.sampled else "beam search",
        "forks": options.best_of if options.sampled else options.beams,
        "alpha": options.alpha,
        "prompt_bytes": len(prompt),
        "continuations": [describe(one) for one in found],
        "greedy": describe(greedy),
        "best_at_least_greedy": bool(found[0].score >= greedy.score - 1e-5 * abs(greedy.score)),
        "seconds": seconds,
        "seconds_with_compilation": first,
    }
    if options.memory:
        stops = len(settings["stop_tokens"])
        report["memory"] = measure_block(model, variables, options.beams, options.bytes, stops)
    return report


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    options = parse_arguments(arguments)
    try:
        report = run(options)
        if options.report is not None:
            options.report.write_text(json.dumps(report, indent=2) + "\n")
    except (OSError, ValueError) as error:
        print_error("beam_search.py", error)
        return 2
    print_results(report, options.show)
    return 0


def _timed(search: Callable[[], list[Continuation]]) -> tuple[list[Continuation], float]:
    started = time.perf_counter()
    found = search()
    return found, time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
