r"""Runs the fast tests with every Python and JAX that the library supports and this machine has.

python tools/test_versions.py                        # hours on two cores: whole fast tests, each
python tools/test_versions.py --first-cases
python tools/test_versions.py --only 3.13:0.12 --only 3.11:0.10 -- tests/test_ring.py

Each combination gets an environment of its own. One that fails does not stop the others. A table at
the end says what was found; exit status 1 if anything failed or no combination ran. Needs nothing
but Python's standard library, the Pythons, and the network for pip.
"""

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from one_line_parser import OneLineParser

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13")
JAXES = {"0.10": "0.10.2", "0.11": "0.11.*", "0.12": "0.12.*"}  # the newest of each, as pip has it
# What an environment would bring along from the one that this runs in.
FOREIGN = ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "JAX_ENABLE_X64", "JAX_DEBUG_NANS")


@dataclasses.dataclass(frozen=True)
class Combination:
    """A Python and a JAX, by their minor versions.

    Attributes:
      python: as "3.13".
      jax: as "0.12".
    """

    python: str
    jax: str

    @property
    def refusal(self) -> str | None:
        """Why there is no such combination; None where there is."""
        if self.jax != "0.10" and self.python == "3.11":
            return f"JAX {self.jax} needs Python 3.12"
        return None


@dataclasses.dataclass
class Outcome:
    """What became of a combination.

    Attributes:
      combination: which.
      verdict: "passed", "FAILED", or why it did not run.
      jax: the exact version that ran.
      counts: tests passed, failed (errors among them) and skipped.
      minutes: for all of it.
    """

    combination: Combination
    verdict: str
    jax: str = "-"
    counts: tuple[int, int, int] | None = None
    minutes: float = 0.0


def find_python(version: str) -> str | None:
    """A Python of that minor version: by name on PATH, or one of pyenv's.

    A name may be a version manager's stub, so each is asked.
    """
    installed = sorted(Path.home().glob(f".pyenv/versions/{version}*/bin/python"))
    for candidate in (f"python{version}", *map(str, installed)):
        question = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
        try:
            answer = subprocess.run([candidate, "-c", question], capture_output=True, text=True)
        except OSError:
            continue
        if answer.returncode == 0 and answer.stdout.strip() == version:
            return candidate
    return None


def read_counts(path: Path) -> tuple[int, int, int]:
    """Tests passed, failed and skipped, of a JUnit file."""
    suites = list(ElementTree.parse(path).getroot().iter("testsuite"))
    total, failures, errors, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites)
        for name in ("tests", "failures", "errors", "skipped")
    )
    return total - failures - errors - skipped, failures + errors, skipped


def run_combination(
    combination: Combination, python: str, work: Path, arguments: Sequence[str]
) -> Outcome:
    """Makes an environment and runs the tests in it.

    Args:
      combination: what to run.
      python: the interpreter.
      work: gets the environment, the log and pytest's report.
      arguments: of pytest.
    """
    started = time.monotonic()
    name = f"python{combination.python}-jax{combination.jax}"
    environment, report, log = work / name, work / f"{name}.xml", work / f"{name}.log"
    shutil.rmtree(environment, ignore_errors=True)
    report.unlink(missing_ok=True)
    inner = environment / "bin" / "python"
    variables = {key: value for key, value in os.environ.items() if key not in FOREIGN}
    variables |= {
        "JAX_PLATFORMS": "cpu",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PATH": f"{inner.parent}{os.pathsep}{variables.get('PATH', '')}",
        # What one process has compiled, the next need not: tests run examples as users do.
        "JAX_COMPILATION_CACHE_DIR": str(work / f"{name}-compiled"),
    }
    outcome = Outcome(combination, "FAILED")
    with log.open("w") as file:

        def call(*command: str | Path) -> bool:
            file.write(f"$ {' '.join(map(str, command))}\n")
            file.flush()
            options = {"stdout": file, "stderr": subprocess.STDOUT, "cwd": ROOT, "env": variables}
            return subprocess.run(list(map(str, command)), **options).returncode == 0

        installed = call(python, "-m", "venv", environment) and call(
            # Bytecode of what is not imported would be most of the installation's time.
            inner, "-m", "pip", "install", "--quiet", "--no-compile", "--editable", ".[test]",
            f"jax=={JAXES[combination.jax]}",
        )  # fmt: skip
        if installed:
            question = "import importlib.metadata as m; print(m.version('jax'))"
            answer = subprocess.run(
                [inner, "-c", question], capture_output=True, text=True, env=variables
            )
            outcome.jax = answer.stdout.strip() or "-"
            passed = call(inner, "-m", "pytest", f"--junitxml={report}", *arguments)
            if report.exists():
                outcome.counts = read_counts(report)
            outcome.verdict = "passed" if passed else "FAILED"
        else:
            outcome.verdict = "FAILED to install"
    outcome.minutes = (time.monotonic() - started) / 60
    if outcome.verdict != "passed":
        lines = log.read_text(errors="replace").splitlines()[-20:]
        print("\n".join(["", *lines, f"(the end of {log})"]), file=sys.stderr)
    return outcome


def make_table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as Markdown."""
    lines = [
        "| Python | JAX | outcome | passed | failed | skipped | minutes |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for outcome in outcomes:
        counts = ("-",) * 3 if outcome.counts is None else map(str, outcome.counts)
        jax = outcome.combination.jax if outcome.jax == "-" else outcome.jax
        minutes = f"{outcome.minutes:.1f}" if outcome.minutes else "-"
        cells = [outcome.combination.python, jax, outcome.verdict, *counts, minutes]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = OneLineParser(
        prog="test_versions.py",
        description="Runs the fast tests with every supported Python and JAX.",
    )
    add = parser.add_argument
    add("--only", action="append", default=[], metavar="PYTHON:JAX", type=_combination,
        help=f"one combination, as 3.13:0.12; may be repeated (all of {', '.join(PYTHONS)} and "
        f"{', '.join(JAXES)})")  # fmt: skip
    add("--first-cases", action="store_true", help="of each test with several cases the first")
    add("--work", type=Path, metavar="DIR", help="keep environments and logs here")
    add("pytest", nargs="*", metavar="ARGUMENT", help="of pytest, after --")
    options = parser.parse_args(arguments)
    if options.work is not None and options.work.exists() and not options.work.is_dir():
        parser.error(f"argument --work: expected a folder, got {options.work}")
    return options


def _combination(text: str) -> Combination:
    python, _, jax = text.partition(":")
    if python not in PYTHONS or jax not in JAXES:
        raise argparse.ArgumentTypeError(
            f"expected one of {', '.join(PYTHONS)}, a colon and one of {', '.join(JAXES)}, got "
            f"{text!r}"
        )
    return Combination(python, jax)


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    options = parse_arguments(arguments)
    chosen = options.only or [Combination(python, jax) for python in PYTHONS for jax in JAXES]
    extra = [*(["--first-cases"] if options.first_cases else []), *options.pytest]
    work = options.work or Path(tempfile.mkdtemp(prefix="test_versions-"))
    work.mkdir(parents=True, exist_ok=True)
    outcomes = []
    try:
        for combination in chosen:
            python = find_python(combination.python)
            if combination.refusal is not None:
                outcomes.append(Outcome(combination, combination.refusal))
            elif python is None:
                outcomes.append(Outcome(combination, "no such Python here"))
            else:
                print(f"Python {combination.python}, JAX {combination.jax} ...", file=sys.stderr)
                outcomes.append(run_combination(combination, python, work.resolve(), extra))
                if options.work is None:  # half a gigabyte each
                    shutil.rmtree(work / f"python{combination.python}-jax{combination.jax}")
    finally:
        if options.work is None:
            shutil.rmtree(work, ignore_errors=True)
    print(make_table(outcomes))
    ran = [outcome for outcome in outcomes if outcome.minutes]
    return 0 if ran and all(outcome.verdict == "passed" for outcome in ran) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
