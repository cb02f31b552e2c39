r"""What a benchmark found beside its targets, as tables for people.

python examples/benchmark_table.py benchmark.jsonl
python examples/benchmark_table.py benchmark.jsonl --update README.md
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import benchmark_lines
from command_line import Parser, print_error
from marked_text import MarkedDocument

WHERE = ("machine", "cores", "device", "python", "started")
"""What a header says of where it was measured, beside the versions."""
MARKS = "<!-- performance table -->", "<!-- end of performance table -->"


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A figure that was wanted.

    Attributes:
      bound: what it should be at least, or at most; None where it is only told.
      suite: of the line.
      case: of the line; of a figure its name.
      program: of the line; "" for a figure.
      what: "ratio", "share" or "temporary" of a timed line, "value" of a figure.
      at_least: whether the bound is below it.
    """

    bound: float | None
    suite: str
    case: str
    program: str = ""
    what: str = "ratio"
    at_least: bool = True

    def found(self, lines: Sequence[dict]) -> float | None:
        """The figure, or None where it was not measured. Temporary memory is in MB."""
        for line in lines:
            name = line.get("case", line.get("figure"))
            if (line.get("suite"), name, line.get("program", "")) == (
                self.suite, self.case, self.program,
            ):  # fmt: skip
                return self._of(line)
        return None

    def _of(self, line: dict) -> float | None:
        if self.what == "value":
            return line.get("value")
        if self.what == "temporary":
            memory = line.get("temporary_bytes")
            return None if memory is None else memory / 1e6
        shares = self.what == "share"
        spread = line.get("share", {}).get("product") if shares else line.get("ratio")
        return None if spread is None else spread["median"]

    def text(self, lines: Sequence[dict]) -> str:
        """The figure and the bound, with the sign that stands between them."""
        value = self.found(lines)
        if value is None:
            return "not measured"
        text = f"{value:.3f}" if value < 0.1 else f"{value:.{max(0, 3 - len(str(int(value))))}f}"
        if self.bound is None:
            return text
        if self.at_least:
            return f"{text} {'≥' if value >= self.bound else '**<**'} {self.bound:g}"
        return f"{text} {'≤' if value <= self.bound else '**>**'} {self.bound:g}"


REQUESTS = (1, 8, 64, 256)
NO_BOUNDS = (None,) * len(REQUESTS)
BY_REQUESTS: dict[str, tuple[tuple[float | None, ...], str, str, str, str]] = {
    "read, share of a large matrix product's rate": (
        (0.30, 0.55, 0.70, 0.60), "read", "N={}", "swa_jax", "share"),
    "read, beside its two matrix products alone": (
        NO_BOUNDS, "read", "N={}", "the two products alone", "ratio"),
    "read, beside PyTorch's SDPA, float32 rows gathered, no sink": (
        (0.6, 0.8, 1.0, 1.0), "read", "N={}", "torch, float32 rows gathered", "ratio"),
    "read, beside PyTorch's SDPA, float32 rings under a mask, no sink": (
        NO_BOUNDS, "read", "N={}", "torch, float32 ring", "ratio"),
    "read, beside PyTorch's SDPA, the same bytes": (
        NO_BOUNDS, "read", "N={}", "torch, same bytes", "ratio"),
    "store, beside casts to the same bytes": (
        NO_BOUNDS, "store", "N={}", "casts, same bytes", "ratio"),
    "store, beside that of a float32 ring": (
        NO_BOUNDS, "store", "N={}", "float32 ring", "ratio"),
    "step, beside `jax.nn` over a float32 ring": (
        (1.4, 2.2, 2.5, 3.0), "step", "N={}", "jax.nn, float32 ring", "ratio"),
    "step, beside `jax.nn` over a bfloat16 ring": (
        NO_BOUNDS, "step", "N={}", "jax.nn, bfloat16 ring", "ratio"),
    "step, beside casts of the same bytes": (
        (1.6, 1.9, 1.7, 1.9), "step", "N={}", "casts, same bytes", "ratio"),
    "step, beside full attention over 4,096 tokens": (
        (16, 21, 40, 40), "step", "N={}, context 4,096", "jax.nn, full attention", "ratio"),
}  # fmt: skip
"""Bounds for each number of requests, suite, case, program and what of it."""


def row_by_requests(label: str) -> list[Wanted]:
    """The figures of a row, one for each number of requests."""
    bounds, suite, case, program, what = BY_REQUESTS[label]
    return [
        Wanted(bound, suite, case.format(n), program, what)
        for n, bound in zip(REQUESTS, bounds, strict=True)
    ]


def by_requests(lines: Sequence[dict]) -> str:
    """The table with a column for each number of requests."""
    rows = [
        ["", *(f"N={n}" for n in REQUESTS)],
        ["---", *("---:" for _ in REQUESTS)],
    ]
    for label in BY_REQUESTS:
        rows.append([label, *(wanted.text(lines) for wanted in row_by_requests(label))])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


OTHERS: dict[str, Wanted] = {
    "step: 4,096 state slots / 16": Wanted(
        1.10, "step", "N=8, state slots, swa_jax", "4,096 slots", at_least=False),
    "step: position 1,000,000 / 1,000": Wanted(
        1.05, "step", "N=8, position", "position 1,000,000", at_least=False),
    "read of 256 requests: temporary memory, MB": Wanted(
        8, "read", "N=256", "swa_jax", "temporary", at_least=False),
    "decoding 1,024 rows: casts / ours": Wanted(
        None, "codec", "decode 1024 rows", "casts"),
    "encoding 1,024 rows: casts / ours": Wanted(
        None, "codec", "encode 1024 rows", "casts"),
    "layer of V4-Flash's widths, 1 request: Hugging Face, eager / ours": Wanted(
        None, "layer", "N=1", "Hugging Face, eager"),
    "layer of V4-Flash's widths, 8 requests: Hugging Face, eager / ours": Wanted(
        2.5, "layer", "N=8", "Hugging Face, eager"),
    "layer of V4-Flash's widths, 32 requests: Hugging Face, eager / ours": Wanted(
        6, "layer", "N=32", "Hugging Face, eager"),
    "prefill of 256 tokens, 8 heads: `jax.nn` with a window / ours": Wanted(
        None, "prefill", "T=256", "jax.nn"),
    "prefill of 2,048 tokens, 8 heads: `jax.nn` with a window / ours": Wanted(
        4, "prefill", "T=2,048", "jax.nn"),
    "prefill of 8,192 tokens: temporary memory, ours / `jax.nn`'s": Wanted(
        0.05, "prefill", "temporary memory of 8,192 tokens, share of jax.nn's", what="value",
        at_least=False),
    "prefill: a token of 65,536 / of 1,024": Wanted(
        1.1, "prefill", "each 1,024 tokens of a prompt", "prompt of 65,536", at_least=False),
    "byte model: a Python loop, synchronised each token / one program": Wanted(
        2.5, "loop", "N=1, 128 steps", "Python loop"),
    "byte model, 8 requests: a Python loop, synchronised each token / one program": Wanted(
        None, "loop", "N=8, 128 steps", "Python loop"),
    "byte model: `generate` / the bare loop": Wanted(
        1.15, "loop", "N=1, 256 tokens", "generate", at_least=False),
    "drafts by n-grams, repetitive text: plain decoding / drafts": Wanted(
        1.5, "loop", "repetitive text: speed beside plain decoding", what="value"),
    "drafts by n-grams, repetitive text: accepted a step": Wanted(
        None, "loop", "repetitive text: drafts accepted a step", what="value"),
    "drafts by n-grams, repetitive text: accepted a step to break even": Wanted(
        None, "loop", "repetitive text: drafts accepted a step to break even", what="value"),
    "drafts by n-grams, ordinary text: plain decoding / drafts": Wanted(
        None, "loop", "ordinary text: speed beside plain decoding", what="value"),
    "drafts by n-grams, ordinary text: accepted a step": Wanted(
        None, "loop", "ordinary text: drafts accepted a step", what="value"),
    "drafts by n-grams, ordinary text: accepted a step to break even": Wanted(
        None, "loop", "ordinary text: drafts accepted a step to break even", what="value"),
    "import beyond jax and flax, seconds": Wanted(
        0.3, "startup", "import of swa_jax beyond jax and flax", what="value", at_least=False),
    "`generate.py`: process start to first token, compilation included, seconds": Wanted(
        8, "startup", "generate.py, process start to first token", what="value", at_least=False),
    "compiling a step of V4-Flash's shape, 1 layer, seconds": Wanted(
        None, "compile", "compile, 1 unrolled layers", what="value"),
    "compiling a step of V4-Flash's shape, 8 layers, seconds": Wanted(
        None, "compile", "compile, 8 unrolled layers", what="value"),
    "compiling a step of V4-Flash's shape, 43 layers, seconds": Wanted(
        None, "compile", "compile, 43 unrolled layers", what="value"),
    "compiling a step of V4-Flash's shape, 43 layers scanned, seconds": Wanted(
        None, "compile", "compile, 43 scanned layers", what="value"),
}  # fmt: skip
"""Single figures."""


def others(lines: Sequence[dict]) -> str:
    """The table of single figures."""
    rows = [["figure", "measured, target"], ["---", "---:"]]
    rows += [[label, wanted.text(lines)] for label, wanted in OTHERS.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def not_measured(lines: Sequence[dict]) -> list[str]:
    """The figures of both tables that the lines lack."""
    every = dict(OTHERS)
    for label in BY_REQUESTS:
        every |= {
            f"{label}, N={n}": wanted
            for n, wanted in zip(REQUESTS, row_by_requests(label), strict=True)
        }
    return [name for name, wanted in every.items() if wanted.found(lines) is None]


def tables(lines: Sequence[dict]) -> str:
    """Both tables, and where they were measured.

    Args:
      lines: of a benchmark, its header first.
    """
    head = lines[0]
    versions = ", ".join(f"{name} {version}" for name, version in head["versions"].items())
    where = (
        f"{head['machine']}, {head['cores']} cores, {head['device']}, Python {head['python']}, "
        f"{versions}, {head['started'][:10]}."
    )
    return f"{by_requests(lines)}\n\n{others(lines)}\n\n{where}"


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    parser = Parser(
        prog="benchmark_table.py",
        description="Prints what a benchmark measured beside its targets, as Markdown.",
    )
    parser.add_argument("lines", type=Path, metavar="FILE", help="what benchmark.py --out wrote")
    parser.add_argument(
        "--update", type=Path, metavar="FILE",
        help=f"write the tables into this file, between {MARKS[0]} and {MARKS[1]}; every figure "
        "must have been measured",
    )  # fmt: skip
    options: argparse.Namespace = parser.parse_args(arguments)
    try:
        lines = benchmark_lines.load(options.lines, WHERE)
        if benchmark_lines.is_rehearsal(lines):
            raise ValueError(f"{options.lines}: expected a benchmark, got a rehearsal with --tiny")
        lacking = not_measured(lines)
        if options.update and lacking:
            raise ValueError(
                f"{options.lines}: expected every figure for --update, got none for {len(lacking)} "
                f"of them, such as {lacking[0]!r}"
            )
        document = options.update and MarkedDocument(options.update, [MARKS])
        text = tables(lines)
        print(text)
        if document is not None:
            document.write([text])
    except (OSError, ValueError) as error:
        print_error("benchmark_table.py", error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
