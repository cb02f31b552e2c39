"""The benchmark's lines: as JSON with versions and device, as a table, and beside an older run."""

import dataclasses
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO, TypeGuard

import jax
from benchmark_clock import Figure

from swa_jax.json_fields import parse_json
from swa_jax.reading import read_regular

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "swa-jax", "torch", "transformers")
WORSE = 1.15
"""How much worse a ratio may be than in an older run: the machine is never the same."""


def header(suites: Sequence[str], rounds: int, tiny: bool) -> dict[str, Any]:
    """The first line: what ran, where and when.

    Args:
      suites: that are timed.
      rounds: samples of each program.
      tiny: whether it is a rehearsal.
    """
    device = jax.devices()[0]
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "device": device.device_kind,
        "platform": device.platform,
        "machine": cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := package_version(name))},
        "suites": list(suites),
        "rounds": rounds,
        "tiny": tiny,
    }


def package_version(name: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The processor, as the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def figure_line(figure: Figure) -> dict[str, Any]:
    """A figure as a line."""
    line = dataclasses.asdict(figure)
    return {"suite": line.pop("suite"), "figure": line.pop("name"), **line}


def write(line: dict[str, Any], file: TextIO) -> None:
    """Writes one line, at once: what was measured is there if the next case ends the run."""
    file.write(json.dumps(line, allow_nan=False) + "\n")
    file.flush()


def load(path: Path, where: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The lines of a file, the header first.

    Args:
      path: the file.
      where: what the header must say beside the versions.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is not a benchmark's.
    """
    lines = []
    for number, line in enumerate(read_regular(path).splitlines(), 1):
        try:
            lines.append(parse_json(line))
        except ValueError as error:
            raise ValueError(f"{path}: line {number}: expected JSON: {error}") from None
    whole = lines and all(isinstance(line, dict) for line in lines)
    versions = lines[0].get("versions") if whole else None
    if not isinstance(versions, dict) or not all(isinstance(v, str) for v in versions.values()):
        raise ValueError(f"{path}: expected what benchmark.py --out wrote, a header line first")
    for name in where:
        value = lines[0].get(name)
        if not (_finite(value) if name == "cores" else isinstance(value, str)):
            raise ValueError(f"{path}: expected {name} in the header, got {value!r}")
    for number, line in enumerate(lines[1:], 2):
        fault = _fault(line)
        if fault is not None:
            raise ValueError(f"{path}: line {number}: expected {fault}")
    return lines


def _fault(line: dict[str, Any]) -> str | None:
    """What a line lacks of what comparisons and tables take from it."""
    texts = ("figure",) if "figure" in line else ("case", "program")
    for name in ("suite", *texts):
        if not isinstance(line.get(name), str):
            return f"a string for {name}, got {line.get(name)!r}"
    if "figure" in line:
        number = _finite(line.get("value"))
        return None if number else f"a number for value, got {line.get('value')!r}"
    memory = line.get("temporary_bytes")
    if memory is not None and not _finite(memory):
        return f"a number for temporary_bytes, got {memory!r}"
    shares = line.get("share", {})
    if not isinstance(shares, dict):
        return f"an object for share, got {shares!r}"
    spreads = [*shares.values(), *([line["ratio"]] if "ratio" in line else [])]
    for spread in spreads:
        median = spread.get("median") if isinstance(spread, dict) else None
        if not _finite(median) or median <= 0:
            return f"ratios and shares with a median above 0, got {spread!r}"
    return None


def _finite(value: Any) -> TypeGuard[float]:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    )


def is_rehearsal(lines: Sequence[dict[str, Any]]) -> bool:
    """Whether lines are of a run with --tiny, whose figures mean nothing."""
    return lines[0].get("tiny", False) is not False


def is_comparable(line: dict[str, Any]) -> bool:
    """Whether a line has a ratio of which it is known in which direction it is better."""
    return "ratio" in line and line.get("slower_is_better") is not None


def compare(old: Iterable[dict], new: Iterable[dict]) -> tuple[list[str], int]:
    """Ratios that are worse than in an older run.

    Args:
      old: lines of the older run.
      new: lines of this run.

    Returns:
      A sentence for each ratio that is worse by more than WORSE; and how many were compared.
    """
    before = {_key(line): line["ratio"]["median"] for line in old if is_comparable(line)}
    worse, compared = [], 0
    for line in new:
        if not is_comparable(line) or _key(line) not in before:
            continue
        compared += 1
        then, now = before[_key(line)], line["ratio"]["median"]
        loss = then / now if line["slower_is_better"] else now / then
        if loss > WORSE:
            worse.append(f"{', '.join(_key(line))}: ratio {now:.2f}, was {then:.2f}")
    return worse, compared


def _key(line: dict) -> tuple[str, str, str]:
    return line["suite"], line["case"], line["program"]


def markdown(lines: Sequence[dict]) -> str:
    """A table of timed lines, and a list of figures.

    Args:
      lines: without the header.
    """
    timed = [line for line in lines if "us" in line]
    text = []
    if timed:
        text = [
            "Times are of one call: median (20th to 80th percentile) and best. A ratio is the "
            "median of ratios to the case's first program, round by round.",
            "",
            "| suite | case | program | time | best | ratio | share of limit | temporary memory |",
            "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |",
            *(_row(line) for line in timed),
        ]
    figures = [line for line in lines if "figure" in line]
    if figures:
        text += ["", "| suite | figure | value |", "| --- | --- | ---: |"]
        text += [
            f"| {line['suite']} | {line['figure']} | {line['value']:,.4g} {line['unit']} |"
            for line in figures
        ]
    return "\n".join(text).strip()


def _row(line: dict) -> str:
    us, ratio, memory = line["us"], line.get("ratio"), line["temporary_bytes"]
    shares = [f"{share['median']:.0%} of {name}" for name, share in line.get("share", {}).items()]
    cells = [
        line["suite"],
        line["case"],
        line["program"],
        f"{time_text(us['median'])} ({time_text(us['p20'])} to {time_text(us['p80'])})",
        time_text(us["best"]),
        ratio_text(ratio) if ratio else "",
        ", ".join(shares),
        "" if memory is None else f"{memory / 1e6:,.1f} MB",
    ]
    return f"| {' | '.join(cells)} |"


def ratio_text(ratio: dict[str, float]) -> str:
    """A spread of ratios."""
    return f"{ratio['median']:.2f} ({ratio['p20']:.2f} to {ratio['p80']:.2f})"


def time_text(us: float) -> str:
    """Microseconds in the unit that reads best."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:.3g} {unit}"
    return f"{us:.3g} us"
