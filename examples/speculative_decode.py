r"""Speculative decoding with the byte model: what drafts cost, and what they bring.

python examples/speculative_decode.py
python examples/speculative_decode.py --drafter layers:1 --temperature 0
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import byte_text
import jax
import numpy as np
from byte_model import PROMPT, WEIGHTS, load_model
from command_line import Parser, output_file, print_error, random_seed, whole_number
from tqdm import tqdm

import swa_jax as swa
from swa_jax.decoding import DecodeState, begin
from swa_jax.drafting import Drafter, ModelDrafter, NGramDrafter
from swa_jax.generation import go_on
from swa_jax.speculation import check_draft_tokens, speculate_block

STEPS = 32  # plain steps between two words to the host; verify steps by as many tokens
# The attributes that a class sets first of all: lines of one form. Where the model takes the
# likeliest byte each time, it goes on with one more such line, again and again.
REPETITIVE = "".join(
    f"        self.{name} = None\n" for name in ("name", "size", "mode", "path", "flags")
)


@dataclasses.dataclass
class Result:
    """One text with one number of drafts.

    Attributes:
      prompt: its name.
      draft_tokens: drafts verified in a step.
      drafted_per_step, accepted_per_step: drafts proposed, and accepted, in a verify step.
      step_cost: time of a step (draft, verify, accept) in plain steps, median of the rounds.
      break_even: drafts that must be accepted per step to be as fast as plain decoding.
      speed: plain time by speculative time for a token, median of the rounds.
      lowest, highest: of that over the rounds.
      equal: whether the tokens are the recompute's, up to ties.
      ties: tokens that tie with the recompute's choice.
    """

    prompt: str
    draft_tokens: int
    drafted_per_step: float
    accepted_per_step: float
    step_cost: float
    break_even: float
    speed: float
    lowest: float
    highest: float
    equal: bool
    ties: int


@dataclasses.dataclass
class Timed:
    """Tokens of one request, the seconds and steps they took, and what became of drafts.

    The last block runs to its end: the steps in which the request was not finished are fewer.
    """

    tokens: list[int]
    seconds: float = 0.0
    steps: int = 0
    unfinished_steps: int = 0
    drafted: int = 0
    accepted: int = 0


class Text:
    """One prompt, to be continued several times from the same state."""

    def __init__(self, model: swa.Decoder, variables: Any, prompt: bytes, limit: int, sampling):
        self.model, self.variables, self.sampling = model, variables, sampling
        self.prompt, self.limit = [byte_text.BOUNDARY, *prompt], limit

    def begin(self) -> DecodeState:
        config = self.model.config
        return begin(
            self.model,
            self.variables,
            swa.RingCache.for_decoder(config, 1),
            [self.prompt],
            max_new_tokens=self.limit,
            sampling=self.sampling,
            stop_tokens=[byte_text.BOUNDARY],
        )

    def plain(self) -> Timed:
        state = self.begin()
        found = Timed([int(state.tokens[0])])
        started = time.perf_counter()
        for _, (new,) in go_on(self.model, self.variables, state, block_steps=STEPS):
            found.tokens += new
            found.steps += STEPS
        found.seconds = time.perf_counter() - started
        return found

    def speculative(self, drafter: Drafter, drafter_variables: Any, draft_tokens: int) -> Timed:
        state = self.begin()
        found = Timed([int(state.tokens[0])])
        memory = drafter.begin(
            self.model, drafter_variables, [self.prompt], state, draft_tokens=draft_tokens
        )
        steps = max(1, STEPS // (draft_tokens + 1))
        started = time.perf_counter()
        while int(state.remaining[0]) > 0:
            state, memory, tokens, counts = speculate_block(
                self.model,
                self.variables,
                state,
                drafter,
                drafter_variables,
                memory,
                steps=steps,
                draft_tokens=draft_tokens,
            )
            new = np.asarray(tokens)[0]
            found.tokens += new[new >= 0].tolist()
            found.steps += steps
            found.unfinished_steps += int(counts.steps[0])
            found.drafted += int(counts.drafted[0])
            found.accepted += int(counts.accepted[0])
        found.seconds = time.perf_counter() - started
        return found


def measure(
    name: str, text: Text, drafter: Drafter, variables: Any, draft_tokens: int, rounds: int
) -> Result:
    """Plain and speculative decoding in turn; the first round compiles and is not counted."""
    pairs = [
        (text.plain(), text.speculative(drafter, variables, draft_tokens))
        for _ in range(rounds + 1)
    ][1:]
    if not pairs[-1][1].steps:
        raise ValueError(f"{name} text: expected more than one byte, the model ends it at once")
    costs = [
        (other.seconds / other.steps) / (plain.seconds / plain.steps) for plain, other in pairs
    ]
    # By the token: plain decoding and drafts run their last blocks to the end, for nothing.
    speeds = [
        (1 + other.accepted / other.unfinished_steps) / cost
        for cost, (_, other) in zip(costs, pairs, strict=True)
    ]
    _, last = pairs[-1]
    found = swa.compare_with_recompute(
        text.model, text.variables, text.prompt, last.tokens, text.sampling
    )
    cost = float(np.median(costs))
    return Result(
        prompt=name,
        draft_tokens=draft_tokens,
        drafted_per_step=last.drafted / last.unfinished_steps,
        accepted_per_step=last.accepted / last.unfinished_steps,
        step_cost=cost,
        break_even=max(cost - 1, 0.0),
        speed=float(np.median(speeds)),
        lowest=min(speeds),
        highest=max(speeds),
        equal=found.equal,
        ties=found.ties,
    )


def find_drafter(
    name: str, model: swa.Decoder, variables: dict[str, Any]
) -> tuple[Drafter, dict[str, Any] | None]:
    """The drafter of a name on the command line, and its variables.

    Args:
      name: "ngram"; "layers:N", the model's own first N layers; or a file of train_bytes.py.
      model: the decoder it drafts for.
      variables: that decoder's.

    Raises:
      ValueError: no such drafter.
    """
    if name == "ngram":
        return NGramDrafter(), None
    if not name.startswith("layers:"):
        smaller, its_own = load_model(Path(name))
        return ModelDrafter(smaller), its_own
    count, config = name.removeprefix("layers:"), model.config
    if not count.isdecimal() or not 1 <= int(count) <= config.num_layers:
        raise ValueError(f"--drafter: expected layers:1 to layers:{config.num_layers}, got {name}")
    first = dataclasses.replace(
        config, num_layers=int(count), attention=config.layers[: int(count)]
    )
    dropped = {f"layers_{i}" for i in range(int(count), config.num_layers)}
    kept = {key: value for key, value in variables["params"].items() if key not in dropped}
    return ModelDrafter(swa.Decoder(first)), {"params": kept}


def print_results(results: Sequence[Result]) -> None:
    """A table on standard output."""
    print(
        f"{'text':12} drafts  drafted/step  accepted/step  step cost  break-even  "
        "speed (lowest to highest)  tokens"
    )
    for r in results:
        verdict = "equal" if r.equal else "DIFFER"
        print(
            f"{r.prompt:12} {r.draft_tokens:6d}  {r.drafted_per_step:12.2f}  "
            f"{r.accepted_per_step:13.2f}  {r.step_cost:9.2f}  {r.break_even:10.2f}  "
            f"{r.speed:5.2f}x ({r.lowest:.2f} to {r.highest:.2f})      "
            f"{verdict}, {r.ties} ties"
        )
    print(
        "\nstep cost: a step with its drafts, in plain steps. break-even: drafts that must be\n"
        "accepted per step to be as fast as plain decoding. speed: against plain decoding of the\n"
        "same tokens in the same run, medians. tokens: against a full recompute without a cache."
    )


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        prog="speculative_decode.py",
        description="Measures speculative decoding against plain decoding of the same tokens.",
    )
    add = parser.add_argument
    add("prompt", nargs="?", metavar="PROMPT",
        help="text to continue; by default one ordinary and one repetitive text")  # fmt: skip
    add("--bytes", type=whole_number(2, 2**31 - 1), default=300, metavar="N",
        help="bytes to generate (300)")  # fmt: skip
    add("--drafts", default="1,3,5,6", metavar="K,K",
        help="drafts in a verify step, 1 to 6 with the shipped model (1,3,5,6)")  # fmt: skip
    add("--drafter", default="ngram", metavar="NAME",
        help="ngram: what followed the same bytes before; layers:N: the model's own first N "
        "layers; or a file written by train_bytes.py (ngram)")  # fmt: skip
    add("--temperature", type=float, default=0.7, help="0 takes the likeliest byte each time (0.7)")
    add("--seed", type=random_seed, default=0, help="decides what is sampled (0)")
    add("--rounds", type=whole_number(1), default=5, metavar="N", help="paired measurements (5)")
    add("--weights", type=Path, default=WEIGHTS, help="file written by train_bytes.py (shipped)")
    add("--report", type=output_file, metavar="FILE", help="write the figures as JSON")
    options = parser.parse_args(arguments)
    counts = options.drafts.split(",")
    if not all(count.isdecimal() and int(count) > 0 for count in counts):
        parser.error(f"argument --drafts: expected numbers from 1, got {options.drafts}")
    options.drafts = [int(count) for count in counts]
    return options


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    options = parse_arguments(arguments)
    try:
        model, variables = load_model(options.weights)
        for count in options.drafts:
            check_draft_tokens(model.config.geometry, count)
        drafter, drafter_variables = find_drafter(options.drafter, model, variables)
        sampling = swa.Sampling.build(
            1, temperature=options.temperature, keys=jax.random.key(options.seed)[None]
        )
        if options.prompt is None:
            prompts = {"ordinary": PROMPT.encode(), "repetitive": REPETITIVE.encode()}
        else:
            prompts = {"given": os.fsencode(options.prompt)}
        if not all(prompts.values()):
            raise ValueError("prompt: expected at least one byte, got none")
        texts = {
            name: Text(model, variables, prompt, options.bytes, sampling)
            for name, prompt in prompts.items()
        }
        cases = [(name, count) for name in texts for count in options.drafts]
        results = [
            measure(name, texts[name], drafter, drafter_variables, count, options.rounds)
            for name, count in tqdm(cases, unit="case", disable=not sys.stderr.isatty())
        ]
    except (OSError, ValueError) as error:
        print_error("speculative_decode.py", error)
        return 2
    print_results(results)
    if options.report is not None:
        report = {"drafter": options.drafter, "results": [dataclasses.asdict(r) for r in results]}
        options.report.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(result.equal for result in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
