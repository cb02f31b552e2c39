r"""Times the library beside what others would do, and checks what only a GPU can show.

python examples/benchmark.py                              # every suite, 15 minutes
python examples/benchmark.py --suite read,step --out new.jsonl --compare old.jsonl
python examples/benchmark.py --device-check --out check.json
python examples/benchmark.py --tiny                       # rehearses it: no figure means anything
"""

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import benchmark_lines
import benchmark_plots
import device_check
from benchmark_clock import Case, Figure, machine_limits, measure
from benchmark_settings import Settings, make_settings
from command_line import INTERRUPTED, Parser, output_file, print_error, whole_number
from tqdm import tqdm

SUITES = {
    "codec": "benchmark_operations",
    "store": "benchmark_operations",
    "read": "benchmark_operations",
    "step": "benchmark_operations",
    "layer": "benchmark_layers",
    "prefill": "benchmark_layers",
    "loop": "benchmark_loops",
    "startup": "benchmark_startup",
    "memory": "benchmark_memory",
    "compile": "benchmark_memory",
}
"""The module of each suite; the suite is a function of the same name."""


def run_suites(
    names: Iterable[str], settings: Settings, rounds: int, sample_us: float, quiet: bool
) -> Iterator[dict]:
    """The lines of suites, as they are measured.

    Args:
      names: of suites.
      settings: what they are told.
      rounds: samples of each program.
      sample_us: how long a sample takes at least.
      quiet: no progress.
    """
    limits = machine_limits(settings.tiny, settings.dtype)
    with tqdm(unit="case", file=sys.stderr, disable=quiet, leave=False) as bar:
        for name in names:
            bar.set_description(name)
            suite: Callable[[Settings], Iterator[Case | Figure]]
            suite = getattr(importlib.import_module(SUITES[name]), name)
            for found in suite(settings):
                bar.set_description(f"{name}, {found.name}")
                if isinstance(found, Figure):
                    yield benchmark_lines.figure_line(found)
                else:
                    yield from measure(found, limits, rounds, sample_us)
                bar.update()


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        prog="benchmark.py",
        description="Times codec, store, read, decode step, layer, prefill, loops and memory "
        "beside what others would do, all in turn, and prints a Markdown table. PyTorch and "
        "Hugging Face "
        "transformers join where they are installed: pip install -e '.[peers]'.",
        epilog="Exit status: 0; 1 if a ratio is worse than the older run's or none could be "
        "compared, a check failed or a stage went wrong; 2 for a bad argument.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--suite", default=",".join(SUITES), metavar="NAME,NAME", help="what to time")
    add(
        "--rounds",
        type=whole_number(1),
        default=15,
        metavar="N",
        help="samples of each program; fewer of a case that takes longer than 40 s",
    )
    add(
        "--sample",
        type=float,
        default=10.0,
        metavar="MS",
        help="shortest sample, milliseconds, up to 60000; 256 calls at most",
    )
    add("--out", type=output_file, metavar="FILE", default=argparse.SUPPRESS,
        help="write every line as JSON as soon as it is measured")  # fmt: skip
    add("--compare", type=Path, metavar="OLD", default=argparse.SUPPRESS,
        help="fail if a paired ratio is more than 15 %% worse than in what an older --out "
        "wrote")  # fmt: skip
    add("--plot", type=Path, metavar="DIR", default=argparse.SUPPRESS,
        help="draw the figures into this folder")  # fmt: skip
    add("--device-check", action="store_true", default=argparse.SUPPRESS,
        help="instead: the tests marked gpu, then bytes, attention, batch invariance and donation "
        "on an NVIDIA GPU, and times beside XLA and a plain copy")  # fmt: skip
    add("--budget", type=float, default=230.0, metavar="SECONDS",
        help="of the device check, up to 86400; what does not fit is skipped")  # fmt: skip
    add("--tiny", action="store_true", default=argparse.SUPPRESS,
        help="rehearse with tiny sizes, a device check on the CPU")  # fmt: skip
    add("--quiet", action="store_true", default=argparse.SUPPRESS, help="no progress bar")
    unset = argparse.Namespace(
        out=None, compare=None, plot=None, device_check=False, tiny=False, quiet=False
    )
    options = parser.parse_args(arguments, unset)
    for name, most in (("sample", 60_000), ("budget", 86_400)):
        value = getattr(options, name)
        if not 0 < value <= most:
            parser.error(f"argument --{name}: expected a number above 0, up to {most}, got {value}")
    _check_device_check(parser, options)
    out, old = options.out, options.compare
    if out is not None and old is not None and out.exists() and old.exists() and out.samefile(old):
        parser.error("expected two files for --compare and --out, got one twice")
    options.suite = list(dict.fromkeys(name.strip() for name in options.suite.split(",")))
    if unknown := [name for name in options.suite if name not in SUITES]:
        parser.error(f"argument --suite: expected some of {', '.join(SUITES)}, got {unknown[0]!r}")
    if options.plot is not None:
        if not options.plot.is_dir():
            parser.error(f"argument --plot: expected a folder, got {options.plot}")
        if importlib.util.find_spec("matplotlib") is None:
            parser.error("argument --plot: needs matplotlib: pip install -e '.[examples]'")
        drawn = benchmark_plots.DRAWN_SUITES
        if not options.device_check and not set(drawn) & set(options.suite):
            parser.error(f"argument --plot: expected one of {', '.join(drawn)} in --suite")
    return options


def _check_device_check(parser: Parser, options: argparse.Namespace) -> None:
    """Refuses options that what was asked for does not look at."""
    if options.device_check:
        if options.compare is not None:
            parser.error("argument --compare: a device check has nothing to compare")
        others, why = ("suite", "rounds", "sample"), "a device check has no"
    else:
        others, why = ("budget",), "only a device check has a"
    for name in others:
        if getattr(options, name) != parser.get_default(name):
            parser.error(f"argument --{name}: {why} {name}")


def load_older(options: argparse.Namespace) -> list[dict]:
    """The lines of the run that --compare names.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is not a benchmark's, or has no ratio that this run could be compared with.
    """
    path = options.compare
    old = benchmark_lines.load(path)
    if benchmark_lines.is_rehearsal(old) != options.tiny:
        have, want = ("without", "with") if options.tiny else ("with", "without")
        raise ValueError(f"{path}: expected a run {want} --tiny, got one {have}")
    there = dict.fromkeys(line["suite"] for line in old if benchmark_lines.is_comparable(line))
    if not set(there) & set(options.suite):
        raise ValueError(
            f"{path}: expected ratios of {', '.join(options.suite)}, "
            f"got those of {', '.join(there) or 'none'}"
        )
    return old


def run(options: argparse.Namespace) -> int:
    """Runs the suites; returns the exit status."""
    old = None if options.compare is None else load_older(options)
    settings = make_settings(options.tiny)
    head, lines = benchmark_lines.header(options.suite, options.rounds, options.tiny), []
    with nullcontext() if options.out is None else options.out.open("w") as file:
        if file is not None:
            benchmark_lines.write(head, file)
        for line in run_suites(
            options.suite, settings, options.rounds, 1000 * options.sample, options.quiet
        ):
            lines.append(line)
            if file is not None:
                benchmark_lines.write(line, file)
    print(benchmark_lines.markdown(lines))
    status = 0 if old is None else print_comparison(old, lines)
    if options.plot is not None:
        for path in benchmark_plots.plot_all([head, *lines], options.plot):
            print(f"drew {path}", file=sys.stderr)
    return status


def print_comparison(old: Sequence[dict], lines: Sequence[dict]) -> int:
    """Says which ratios are worse than in an older run; returns the exit status."""
    worse, compared = benchmark_lines.compare(old, lines)
    where = old[0].get("machine", "a machine that it does not name")
    print(f"\n{compared} ratios compared with those of {where}, {len(worse)} worse")
    for sentence in worse:
        print(f"- {sentence}")
    return 1 if worse or not compared else 0


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    options = parse_arguments(arguments)
    try:
        return device_check.run(options) if options.device_check else run(options)
    except (OSError, ValueError) as error:
        print_error("benchmark.py", error)
        return 2
    except KeyboardInterrupt:  # --out has what was measured
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
