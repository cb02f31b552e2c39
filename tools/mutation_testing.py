"""Are the tests any good? Breaks copies of the library on purpose and sees which breaks they miss.

    pip install -e '.[test,mutation]'
    python tools/mutation_testing.py                         # every module of MODULES, an hour
    python tools/mutation_testing.py swa_jax/ring.py --sample 50

cosmic-ray makes the mutants and keeps the record of them. A run that was stopped goes on where it
was: the records lie in the work directory, by the text of the module. Checkouts are only read.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
# cosmic-ray comes with an extra of its own.

import argparse
import compileall
import contextlib
import difflib
import fcntl
import hashlib
import json
import os
import py_compile
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from one_line_parser import OneLineParser
from tqdm import tqdm

PROGRAM = "mutation_testing.py"
try:
    import cosmic_ray.commands
    import mutation_operators
    from cosmic_ray.mutating import use_mutation
    from cosmic_ray.plugins import get_operator, operator_names
    from cosmic_ray.work_db import WorkDB
    from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkItem, WorkResult
except ModuleNotFoundError as error:
    OneLineParser(PROGRAM).error(f"{error}: pip install -e '.[mutation]'")

ROOT = Path(__file__).resolve().parent.parent

# Each module with the tests that hold it, the quickest first. Interpreted kernels do not run it.
STORE = ["tests/test_fused_store.py", "-k", "not interpret"]
READ = ["tests/test_indexed_attention.py"]
PYTREES = ["tests/test_jax_transformations.py::" + name for name in (
    "test_pytrees_are_values_that_nobody_changes",
    "test_every_pytree_of_the_library_survives_a_saved_program",
)]  # fmt: skip
MODULES = {
    "swa_jax/ring.py": ["tests/test_ring.py", "tests/test_metadata.py"],
    "swa_jax/metadata.py": ["tests/test_metadata.py", *PYTREES],
    "swa_jax/cache.py": ["tests/test_cache.py", *PYTREES],
    "pallas_kernels/formats.py": ["tests/test_formats.py"],
    "pallas_kernels/codec.py": ["tests/test_formats.py"],
    "pallas_kernels/fused_store/xla.py": STORE,
    "pallas_kernels/indexed_attention/xla.py": READ,
    "pallas_kernels/softmax.py": READ,
}
PYTEST = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--assert=plain"]
DIRECTORIES = ["swa_jax", "pallas_kernels", "tests", "examples"]
FILES = ["pyproject.toml", "README.md"]
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "OPENBLAS_NUM_THREADS": "1",  # a process with threads should not fork
    "PYTHONDONTWRITEBYTECODE": "1",  # bytecode of a mutant could outlive it
}


class Runner:
    """A copy of the checkout, and a warm process that runs tests in it."""

    def __init__(self, directory: Path, compiled: Path):
        self.directory = directory
        self._output = directory / "output.txt"
        for name in DIRECTORIES:
            ignored = shutil.ignore_patterns("__pycache__", ".*")
            shutil.copytree(ROOT / name, directory / name, ignore=ignored)
        for name in FILES:
            shutil.copy(ROOT / name, directory)
        # Bytecode that is checked against the text, so that no mutant runs as what it was.
        checked = py_compile.PycInvalidationMode.CHECKED_HASH
        for package in DIRECTORIES[:2]:
            compileall.compile_dir(directory / package, quiet=1, invalidation_mode=checked)
        path = os.pathsep.join([str(directory), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | ENVIRONMENT
        environment |= {"PYTHONPATH": path, "JAX_COMPILATION_CACHE_DIR": str(compiled)}
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("mutation_runner.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def run(self, tests: list[str], seconds: int) -> tuple[str, float, str]:
        """passed, failed or timeout, the seconds of CPU time, and what pytest said."""
        request = {
            "directory": str(self.directory), "arguments": [*PYTEST, *tests],
            "output": str(self._output), "seconds": seconds,
        }  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().split()
        if not answer:
            raise RuntimeError("the process that runs the tests has ended")
        return answer[0], float(answer[1]), self._output.read_text(errors="replace")

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


def test_mutant(item: WorkItem, runners: queue.Queue, tests: list[str], seconds: int) -> WorkResult:
    """Applies a mutant to a free copy and runs the tests there."""
    (mutation,) = item.mutations
    runner = runners.get()
    try:
        operator = get_operator(mutation.operator_name)()
        path = runner.directory / mutation.module_path
        with use_mutation(path, operator, mutation.occurrence) as (before, after):
            if after is None:
                raise RuntimeError(f"no such mutant: {mutation}")
            answer, _, output = runner.run(tests, seconds)
        return WorkResult(
            WorkerOutcome.NORMAL,
            answer if answer == "timeout" else output,
            TestOutcome.SURVIVED if answer == "passed" else TestOutcome.KILLED,
            changed_lines(before, after),
        )
    finally:
        runners.put(runner)


def changed_lines(before: str, after: str) -> str:
    """The lines that differ."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0)
    lines = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
    return "\n".join(f"{line[0]} {line[1:]}" for line in lines if line[1:].strip())


def open_session(module: str, work: Path, sample: int | None, seed: int) -> tuple[WorkDB, list]:
    """The record of a module as it is now, and those of its mutants that count."""
    source = (ROOT / module).read_text()
    kinds = " ".join(operator_names())
    text = hashlib.sha256((source + kinds).encode()).hexdigest()[:12]
    session = WorkDB(work / f"{module.replace('/', '.')}.{text}.sqlite", WorkDB.Mode.create)
    if not session.num_work_items:
        here = Path.cwd()
        os.chdir(ROOT)  # mutants are recorded with the module's path in the checkout
        cosmic_ray.commands.init([Path(module)], session, {})
        os.chdir(here)
    items = [
        item
        for item in session.work_items
        if mutation_operators.is_wanted(item.mutations[0], source)
    ]
    items.sort(key=lambda item: (item.mutations[0].operator_name, item.mutations[0].occurrence))
    random.Random(seed).shuffle(items)  # so that a sample holds every smaller one
    return session, items[:sample]


def has_survived(result: WorkResult) -> bool:
    """Whether all tests passed."""
    return result.test_outcome == TestOutcome.SURVIVED


def is_timeout(result: WorkResult) -> bool:
    """Whether the tests took too long."""
    return result.output == "timeout"


def test_module(module, session, items, runners, *, again: bool) -> None:
    """Runs what has no result yet; with `again`, survivors and timeouts once more."""
    results = {item.job_id: result for item, result in session.completed_work_items}
    pending = [
        item
        for item in items
        if item.job_id not in results
        or (again and (has_survived(results[item.job_id]) or is_timeout(results[item.job_id])))
    ]
    if not pending or runners.empty():
        return
    tests, runner = MODULES[module], runners.get()
    answer, usual, output = runner.run(tests, 3600)
    runners.put(runner)
    if answer != "passed":
        raise SystemExit(f"{module}: expected its tests to pass unchanged, got\n{output}")
    seconds = 60 + 5 * round(usual)
    with ThreadPoolExecutor(runners.qsize()) as pool:
        jobs = {pool.submit(test_mutant, i, runners, tests, seconds): i for i in pending}
        try:
            for job in tqdm(as_completed(jobs), module, len(jobs), unit="mutant"):
                session.set_result(jobs[job].job_id, job.result())
        finally:
            pool.shutdown(cancel_futures=True)


def report(module: str, total: int, session, items, reasons: dict[str, str]) -> tuple[str, str]:
    """The table's line of a module, and its survivors with what is known about each."""
    results = {item.job_id: result for item, result in session.completed_work_items}
    done = [(item, results[item.job_id]) for item in items if item.job_id in results]
    survivors = [pair for pair in done if has_survived(pair[1])]
    timeouts = sum(is_timeout(result) for _, result in done)
    parts, kinds = [], Counter()
    for item, result in sorted(survivors, key=lambda pair: pair[0].mutations[0].start_pos):
        place = item.mutations[0].definition_name or "the module itself"
        key = f"`{module}`, `{place}`:\n\n```diff\n{result.diff}\n```"
        reason = reasons.get(key, "Not looked at.")
        parts.append(f"{key}\n\n{reason}\n")
        kinds[reason.split()[0].strip(".:,")] += 1
    killed = len(done) - len(survivors)
    known = [kinds[kind] for kind in KINDS]
    counts = [total, len(done), killed, timeouts, *known, len(survivors) - sum(known)]
    unlike = len(done) - kinds["Equivalent"] - kinds["Speed"]
    shares = (f"{100 * killed / size:.1f} %" if size else "-" for size in (len(done), unlike))
    line = f"| `{module}` | {' | '.join(map(str, counts))} | {' | '.join(shares)} |"
    return line, "\n".join(parts)


def known_reasons(path: Path | None) -> dict[str, str]:
    """What a report says below each survivor, to be said again."""
    if path is None or not path.exists():
        return {}
    pattern = re.compile(
        r"^(`[^\n]*:\n\n```diff\n.*?\n```)\n\n(.*?)\n(?=\n|\Z)", re.DOTALL | re.MULTILINE
    )
    return dict(pattern.findall(path.read_text()))


KINDS = ("Equivalent", "Speed", "Text")
HEADER = """# Mutation testing

`python tools/mutation_testing.py --report tests/mutation.md` breaks the library in one place at a
time and runs the tests that hold it; a mutant survives if they all pass. Timeouts are among the
killed. What is written below a survivor stays when the report is made again, and its first word is
counted: an *Equivalent* mutant does the same, one of *Speed* does it slower or faster, one of
*Text* changes what an error says. The last column leaves out the first two. Where fewer are tried
than there are, they are a random sample.

| module | mutants | tried | killed | timeouts | equivalent | speed | text | other | killed | net |
|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|
"""


@contextlib.contextmanager
def locked(work: Path) -> Iterator[None]:
    """The directory of the records, while no other run is at work in it."""
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(f"another run is at work in {work}") from None
        yield


def main() -> None:
    """The command."""
    parser = OneLineParser(
        prog=PROGRAM, description="Breaks copies of the library; runs the tests."
    )
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"of {', '.join(MODULES)}")
    parser.add_argument("--workers", type=int, default=2, help="mutants at once; 0 only reports")
    parser.add_argument("--sample", type=int, help="at most so many mutants of a module")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--again", action="store_true", help="try survivors and timeouts again")
    parser.add_argument("--report", type=Path, help="Markdown to write; keeps what it explains")
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()) / "swa_jax_mutation",
        help="directory for records and compiled programs",
    )  # fmt: skip
    arguments = parser.parse_args()
    modules = arguments.modules or list(MODULES)
    if unknown := set(modules) - set(MODULES):
        parser.error(f"expected modules among {', '.join(MODULES)}, got {', '.join(unknown)}")
    for name, smallest in (("workers", 0), ("sample", 1)):
        value = getattr(arguments, name)
        if value is not None and value < smallest:
            parser.error(f"argument --{name}: expected {smallest} or more, got {value}")
    to_write = arguments.report
    if to_write and (to_write.is_dir() or not to_write.parent.is_dir()):
        parser.error(f"argument --report: expected a file in a folder, got {to_write}")
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(arguments.work))
        except OSError as error:
            parser.error(f"argument --work: {error}")
        run(modules, arguments)


def run(modules: Sequence[str], arguments: argparse.Namespace) -> None:
    """Tries the mutants of modules and says what survived."""
    reasons = known_reasons(arguments.report)
    lines, survivors = [], []
    with tempfile.TemporaryDirectory() as copies:
        runners: queue.Queue[Runner] = queue.Queue()
        for i in range(arguments.workers):
            (Path(copies) / str(i)).mkdir()
            runners.put(Runner(Path(copies) / str(i), arguments.work / "compiled"))
        try:
            for module in modules:
                session, every = open_session(module, arguments.work, None, 0)
                _, items = open_session(module, arguments.work, arguments.sample, arguments.seed)
                test_module(module, session, items, runners, again=arguments.again)
                line, part = report(module, len(every), session, items, reasons)
                lines.append(line)
                survivors += [part] if part else []
                print(f"{line}\n\n{part}")
        finally:
            while not runners.empty():
                runners.get().close()
    if arguments.report:
        arguments.report.write_text(HEADER + "\n".join(lines) + "\n\n" + "\n".join(survivors))


if __name__ == "__main__":
    main()
