"""The benchmark's lines: as JSON with versions and device, as a table, and beside an older run."""

import dataclasses
import json
import os
import platform
import time
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

import jax
from benchmark_clock import Figure

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "swa-jax", "torch", "transformers")
WORSE = 1.15
"""How much worse a ratio may be than in an older run: the machine is never the same."""


def header() -> dict[str, Any]:
    """The first line: what ran, where and when."""
    device = jax.devices()[0]
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "device": device.device_kind,
        "platform": device.platform,
        "machine": cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
    }


def _version(name: str) -> str | None:
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


def load(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, the header first.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is not a benchmark's.
    """
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    except ValueError as error:
        raise ValueError(f"{path}: expected lines of JSON: {error}") from None
    if not lines or not all(isinstance(line, dict) for line in lines) or "versions" not in lines[0]:
        raise ValueError(f"{path}: expected what benchmark.py --out wrote, a header line first")
    return lines


def compare(old: Iterable[dict], new: Iterable[dict]) -> tuple[list[str], int]:
    """Ratios that are worse than in an older run.

    Args:
      old: lines of the older run.
      new: lines of this run.

    Returns:
      A sentence for each ratio that is worse by more than WORSE; and how many were compared.
    """
    before = {_key(line): line["ratio"]["median"] for line in old if "ratio" in line}
    worse, compared = [], 0
    for line in new:
        if "ratio" not in line or _key(line) not in before:
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
