"""The device check's report: a JSON file that is always whole, a Markdown table and a figure."""

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmark_lines import ratio_text
from device_process import Stage

SCHEMA = 1
"""Version of the JSON file's layout."""


class Report:
    """What the stages found, written to a file whenever it changes.

    Attributes:
      contents: the JSON object: schema, options, started, seconds, finished, stages.
    """

    def __init__(self, path: Path | None, options: dict[str, Any]):
        self.path = path
        self.started = time.monotonic()
        self.contents: dict[str, Any] = {
            "schema": SCHEMA,
            "options": options,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "seconds": 0.0,
            "finished": False,
            "stages": {},
        }

    def put(self, name: str, stage: Stage) -> None:
        """Keeps what a stage found."""
        self.contents["stages"][name] = stage
        self.write()

    def write(self) -> None:
        """Writes the file: whoever reads it sees the old contents or the new, never a part."""
        self.contents["seconds"] = round(time.monotonic() - self.started, 2)
        if self.path is None:
            return
        text = json.dumps(self.contents, indent=1, allow_nan=False)
        with tempfile.NamedTemporaryFile(
            "w", dir=self.path.parent, prefix=f".{self.path.name}.", delete=False
        ) as file:
            file.write(text + "\n")
        os.chmod(file.name, 0o644)
        os.replace(file.name, self.path)

    @property
    def ok(self) -> bool:
        """Whether no check failed and no stage went wrong."""
        return all(
            stage["status"] in ("ok", "skipped") for stage in self.contents["stages"].values()
        )


def markdown(contents: dict[str, Any]) -> str:
    """The report for people.

    Args:
      contents: of a Report.
    """
    stages = contents["stages"]
    parts = [_summary(stages)]
    for name, stage in stages.items():
        parts.append(_problems(name, stage))
    if rows := stages.get("timing", {}).get("results", {}).get("rows"):
        parts.append(_table(rows, stages))
    return "\n\n".join(part for part in parts if part)


def _summary(stages: dict[str, Stage]) -> str:
    device = stages.get("device", {}).get("results", {})
    versions = device.get("versions", {})
    lines = [
        f"{device.get('card', 'no device')}, JAX {versions.get('jax')}, "
        f"{' '.join(str(device.get('runtime')).split())}",
        "",
        "| stage | status | checks | seconds |",
        "| --- | --- | ---: | ---: |",
    ]
    for name, stage in stages.items():
        held = sum(check["ok"] for check in stage["checks"])
        checks = f"{held} of {len(stage['checks'])}" if stage["checks"] else ""
        lines.append(f"| {name} | {stage['status']} | {checks} | {stage['seconds']:.1f} |")
    return "\n".join(lines)


def _problems(name: str, stage: Stage) -> str:
    lines = []
    for key in ("error", "reason"):
        if key in stage:
            lines.append(f"- {name}: {stage[key]}")
    for check in stage["checks"]:
        if not check["ok"]:
            why = check.get("error") or f"{check['value']} is above {check['limit']}"
            lines.append(f"- {name}: {check['name']}: {why}")
    return "\n".join(lines)


def _table(rows: list[dict], stages: dict[str, Stage]) -> str:
    results = stages["timing"]["results"]
    lines = [
        "Times are of one call among calls that follow each other: median (20th to 80th "
        "percentile). A ratio is the median of ratios of samples taken in turn. "
        f"Copies move {results.get('copy_gb_per_s', 0):,.0f} GB/s, and a trip of an empty loop "
        f"takes {results.get('empty_loop_us_per_trip', 0):.2f} us.",
        "",
        "| operation | requests x tokens | heads | extra | layers | program | us | GB/s "
        "| of copy | TFLOP/s | time / kernel's |",
        "| --- | --- | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        for name, program in row["programs"].items():
            us, ratio = program["us"], row["ratios"].get(f"{name} / kernel")
            lines.append(
                f"| {row['operation']} | {row['requests']} x {row['tokens']} "
                f"| {row['heads'] or ''} | {row['extra'] or ''} | {row['layers']} | {name} "
                f"| {us['median']:.2f} ({us['p20']:.2f} to {us['p80']:.2f}) "
                f"| {program['gb_per_s']:,.0f} | {program['share_of_copy']:.0%} "
                f"| {program['tflop_per_s']:.1f} "
                + ("|  |" if ratio is None else f"| {ratio_text(ratio)} |")
            )
    for profile in results.get("kernels", []):
        for kernel, us in profile.get("kernels", {}).items():
            lines += [""] if lines[-1].startswith("|") else []
            lines.append(
                f"- {profile['shape']}: {kernel} {us['median']:.2f} us, {us['count']} times "
                "(profiler)"
            )
    skipped = results.get("skipped", [])
    if skipped:
        lines += ["", f"No time was left for {len(skipped)} shapes: {'; '.join(skipped)}."]
    return "\n".join(lines)


def plot(contents: dict[str, Any], path: Path) -> None:
    """Time against queries, for every program and shape of head and extra cache.

    Args:
      contents: of a Report.
      path: of the figure; its suffix says the kind.

    Raises:
      ValueError: nothing was timed, or matplotlib does not know the suffix.
    """
    from matplotlib.figure import Figure

    rows = contents["stages"].get("timing", {}).get("results", {}).get("rows", [])
    lines: dict[tuple, list] = {}
    for row in rows:
        if row["tokens"] > 1 or row["layers"] == 1:
            continue
        for name, program in row["programs"].items():
            if name in ("kernel", "xla"):
                key = (row["operation"], name, row["heads"], row["extra"])
                lines.setdefault(key, []).append((row["queries"], program["us"]))
    if not lines:
        raise ValueError("plot: expected at least one line that was timed, got none")
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = dict(zip(("indexed_attention", "fused_store"), figure.subplots(1, 2), strict=True))
    for (operation, name, heads, extra), points in sorted(lines.items()):
        points.sort(key=lambda point: point[0])
        label = name + f", {heads} heads" * (heads > 0) + f", +{extra} rows" * (extra > 0)
        middle = [us["median"] for _, us in points]
        bars = (
            [us["median"] - us["p20"] for _, us in points],
            [us["p80"] - us["median"] for _, us in points],
        )
        axes[operation].errorbar(
            [queries for queries, _ in points], middle, yerr=bars, label=label, marker="o",
            linestyle="-" if name == "kernel" else "--",
        )  # fmt: skip
    for operation, axis in axes.items():
        axis.set(title=operation, xlabel="queries", ylabel="us a call", xscale="log", yscale="log")
        if axis.has_data():
            axis.legend(fontsize="small")
    figure.savefig(path)
