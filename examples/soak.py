r"""An hour of random traffic through a server: nothing grows, nothing compiles, nothing differs.

python examples/soak.py
python examples/soak.py --minutes 1 --seed 7 --report soak.json

Requests of any length, limit and settings arrive at random; some are refused, and now and then all
are cancelled. Each result must be, bit for bit, what the same request gets alone in a second pool
of the same shape: its tokens, why it ended, and the rows that it left in its slot. A request is
drawn anew, and run alone once, or it is one that was drawn before, in other company.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import soak_checks
from byte_model import WEIGHTS, load_model
from command_line import Parser, output_file, print_error, random_seed
from soak_traffic import Outcome, Pool, Sizes, bad_requests, random_request, read_texts

import swa_jax as swa
from swa_jax.prefilling import Params
from swa_jax.requests import Request

CATALOGUE = 48  # requests that may come again
FRESH = 0.2  # of the arrivals: the part that is drawn anew
RATES = (0.05, 0.3, 1.5)  # arrivals per step; four slots finish about 0.4
PHASE = 40  # steps between two choices of the rate
REFUSED, CANCELLED = 0.02, 0.002  # per step: a bad request is submitted; all are cancelled
SAMPLES = 20  # of memory, at least
FAILURES_SHOWN = 20


@dataclasses.dataclass(frozen=True)
class Entry:
    """A request and its outcome alone."""

    request: Request
    alone: Outcome


class Soak:
    """Two pools, the requests that may come again, and what was found so far.

    Attributes:
      counts: steps, requests, tokens and so on, by plain names.
      failures: what went wrong, in words.
      samples: of memory.
    """

    def __init__(self, model: swa.Decoder, params: Params, sizes: Sizes, seed: int):
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.samples: list[soak_checks.Sample] = []
        self._busy, self._alone = (Pool(model, params, sizes) for _ in range(2))
        self._sizes, self._geometry = sizes, model.config.geometry
        self._rng, self._text = np.random.default_rng(seed), read_texts()
        self._bad = bad_requests(sizes)
        self._catalogue: list[Entry] = []
        self._running: dict[int, Entry] = {}
        self._rate = 0.0

    def warm_up(self) -> None:
        """Compiles everything, and fills the list of requests that may come again."""
        while len(self._catalogue) < CATALOGUE:
            self._catalogue.append(self._new_entry())
        for entry in self._catalogue[: 2 * self._sizes.slots]:
            self._submit(entry)
        self._busy.step()
        self._cancel()
        for request, name in self._bad:
            self._refuse(request, name)
        self.drain()

    def step(self) -> None:
        """What arrives now, and one step of the pool."""
        if self.counts["steps"] % PHASE == 0:
            self._rate = float(self._rng.choice(RATES))
        self.counts["steps"] += 1
        for _ in range(self._rng.poisson(self._rate)):
            if self._busy.pending < 4 * self._sizes.slots:
                self._submit(self._arrival())
        if self._rng.random() < REFUSED:
            self._refuse(*self._bad[int(self._rng.integers(len(self._bad)))])
        if self._rng.random() < CANCELLED:
            self._cancel()
        self._advance()

    def drain(self) -> None:
        """Steps until no request is left; then every token and slot must be accounted for."""
        while self._busy.pending:
            self._advance()
        if self._running or not self._busy.all_free:
            self._fail(f"after the last request {len(self._running)} are without a result")
        if self._busy.tokens_chosen != self.counts["tokens"]:
            self._fail(
                f"the server counts {self._busy.tokens_chosen} tokens, its results have "
                f"{self.counts['tokens']}"
            )

    def sample(self, seconds: float) -> None:
        """Notes the memory."""
        self.samples.append(soak_checks.take_sample(seconds))

    def growth(self) -> dict[str, soak_checks.Growth]:
        """How arrays and process grew; one that is too much is a failure."""
        times = [sample.seconds for sample in self.samples]
        found = {}
        for name, bound in (
            ("arrays", soak_checks.ARRAY_GROWTH),
            ("process", soak_checks.PROCESS_GROWTH),
        ):
            values = [getattr(sample, name) for sample in self.samples]
            if None not in values:
                found[name] = soak_checks.measure_growth(times, values, bound)
                if not found[name].ok:
                    self._fail(
                        f"{name}: expected to grow by at most {found[name].bound:,.0f} bytes, got "
                        f"{found[name].growth:,.0f}"
                    )
        return found

    def check_programs(self, compiled: Sequence[str]) -> None:
        """Any program compiled after warm-up is a failure."""
        if compiled:
            self._fail(f"expected no program after warm-up, got {len(compiled)}")

    def progress(self, compiled: Sequence[str]) -> str:
        """Where the run stands, in one line."""
        last, counts = self.samples[-1], self.counts
        process = "-" if last.process is None else f"{last.process / 1e6:,.1f}"
        return (
            f"{last.seconds / 60:.1f} min: {counts['requests']:,} requests, {counts['tokens']:,} "
            f"tokens, {counts['compared']:,} compared, {len(self.failures)} failures, "
            f"{len(compiled)} programs, arrays {last.arrays / 1e6:,.3f} MB, process {process} MB"
        )

    def _arrival(self) -> Entry:
        place = int(self._rng.integers(CATALOGUE))
        if self._rng.random() < FRESH:
            self._catalogue[place] = self._new_entry()
        return self._catalogue[place]

    def _new_entry(self) -> Entry:
        request = random_request(self._rng, self._text, self._geometry, self._sizes)
        self.counts["run alone"] += 1
        return Entry(request, self._alone.alone(request))

    def _submit(self, entry: Entry) -> None:
        self._running[self._busy.submit(entry.request)] = entry
        self.counts["requests"] += 1
        self.counts["most at once"] = max(self.counts["most at once"], self._busy.pending)

    def _refuse(self, request: Request, name: str) -> None:
        self.counts["refused"] += 1
        try:
            self._busy.submit(request)
        except ValueError as error:
            if not str(error).startswith(name):
                self._fail(f"expected a message about {name}, got: {error}")
        else:
            self._fail(f"expected a refusal that names {name}, got none")

    def _cancel(self) -> None:
        self.counts["cancellations"] += 1
        for number, outcome in self._busy.cancel():
            self._compare(number, outcome)

    def _advance(self) -> None:
        if self._busy.pending:
            for number, outcome in self._busy.step():
                self._compare(number, outcome)

    def _compare(self, number: int, outcome: Outcome) -> None:
        """Holds a result to that of the request alone; a cancelled one to its beginning."""
        self.counts[outcome.finish] += 1
        self.counts["tokens"] += len(outcome.tokens)
        self.counts["compared"] += 1
        entry = self._running.pop(number, None)
        if entry is None:
            self._fail(f"request {number}: expected one result, got another")
            return
        alone = entry.alone
        if outcome.finish == "cancelled":
            alone = Outcome(alone.tokens[: len(outcome.tokens)], "cancelled", "")
        for name, got, want in zip(Outcome._fields, outcome, alone, strict=True):
            if got != want:
                self._fail(
                    f"request {number} of {len(entry.request.prompt)} tokens: expected the {name} "
                    f"that it has alone, {want}, got {got}"
                )

    def _fail(self, message: str) -> None:
        self.failures.append(message)
        if len(self.failures) <= FAILURES_SHOWN:
            print(f"FAILED: {message}", file=sys.stderr)


def soak(
    model: swa.Decoder,
    params: Params,
    *,
    sizes: Sizes,
    minutes: float,
    seed: int,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Runs the traffic.

    Args:
      model: the decoder, of bytes and the boundary between texts.
      params: its variables.
      sizes: of both pools.
      minutes: how long.
      seed: decides the traffic.
      clock: seconds.

    Returns:
      The report, under plain names; "failures" is empty where all is well.
    """
    run = Soak(model, params, sizes, seed)
    run.warm_up()
    duration = 60 * minutes
    interval = min(60.0, duration / SAMPLES)
    with soak_checks.compilations() as compiled:
        started = clock()
        run.sample(0.0)
        while (spent := clock() - started) < duration:
            run.step()
            if spent >= run.samples[-1].seconds + interval:
                run.sample(spent)
                print(run.progress(compiled), file=sys.stderr)
        run.drain()
        spent = clock() - started
        run.sample(spent)
        print(run.progress(compiled), file=sys.stderr)
    run.check_programs(compiled)
    growth = run.growth()
    return {
        "ok": not run.failures,
        "minutes": spent / 60,
        "seed": seed,
        "counts": dict(run.counts),
        "programs after warm-up": len(compiled),
        "memory": {name: dataclasses.asdict(value) for name, value in growth.items()},
        "failures": run.failures[:FAILURES_SHOWN],
        "failed": len(run.failures),
        "sizes": dataclasses.asdict(sizes),
        "samples": [dataclasses.asdict(sample) for sample in run.samples],
        "machine": f"{platform.system()} {platform.machine()}, {jax.default_backend()}",
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "numpy")},
    }


def print_summary(report: dict[str, Any]) -> None:
    """The report in a few lines on standard output."""
    counts = report["counts"]
    print(
        f"{report['minutes']:.1f} minutes, {counts['steps']:,} steps, {counts['requests']:,} "
        f"requests, {counts['tokens']:,} tokens; {counts['compared']:,} results compared with "
        f"{counts['run alone']:,} requests run alone"
    )
    print(f"programs after warm-up: {report['programs after warm-up']}")
    for name, growth in report["memory"].items():
        first, last = (f"{growth[key] / 1e6:,.3f} MB" for key in ("first", "last"))
        print(
            f"{name}: {first} after warm-up, {last} at the end; grew by {growth['growth']:,.0f} of "
            f"{growth['bound']:,.0f} bytes allowed, {growth['per_minute']:,.0f} a minute"
        )
    print("all is well" if report["ok"] else f"{report['failed']} FAILURES")


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        prog="soak.py",
        description="Random traffic through a server for an hour: no growth, no compilation, and "
        "each result the one that its request gets alone. Exit status 1 if not.",
    )
    add = parser.add_argument
    add("--minutes", type=float, default=60.0, metavar="M", help="how long (60)")
    add("--seed", type=random_seed, default=0, help="decides the traffic (0)")
    add("--weights", type=Path, default=WEIGHTS, help="file written by train_bytes.py (shipped)")
    add("--report", type=output_file, metavar="FILE", help="write what was found as JSON")
    options = parser.parse_args(arguments)
    if not 0 < options.minutes <= 10_000:
        parser.error(f"argument --minutes: expected above 0, to 10000, got {options.minutes}")
    return options


def main(
    arguments: Sequence[str],
    *,
    sizes: Sizes | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Runs the command line; returns the exit status."""
    options = parse_arguments(arguments)
    try:
        model, params = load_model(options.weights)
        report = soak(
            model,
            params,
            sizes=sizes or Sizes(),
            minutes=options.minutes,
            seed=options.seed,
            clock=clock,
        )
        if options.report is not None:
            options.report.write_text(json.dumps(report, indent=1) + "\n")
    except (OSError, ValueError) as error:
        print_error("soak.py", error)
        return 2
    print_summary(report)
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
