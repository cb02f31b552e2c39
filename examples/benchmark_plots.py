"""The benchmark's figures: time against requests, context and slots, shares, bytes by format."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

OURS = "swa_jax"
DRAWN_SUITES = ("read", "step", "layer", "memory")
"""Suites that have something to draw."""
FORMAT_BYTES = "a token in a layer"
"""How figures of the memory suite begin that are drawn."""


def plot_all(lines: Sequence[dict], folder: Path) -> list[Path]:
    """Draws what the lines have.

    Args:
      lines: of a benchmark, with its header first.
      folder: for the figures; those of an older run are replaced.

    Returns:
      The figures written.

    Raises:
      ValueError: there is nothing to draw.
    """
    where = f"{lines[0]['machine']}, {lines[0]['cores']} cores, JAX {lines[0]['versions']['jax']}"
    parts = {
        "time_by_requests.png": _times(
            lines, "requests", ("read", "step"), "requests, one new token each",
            "Time of one layer's read and decode step"),
        "time_by_context.png": _times(
            lines, "context", ("step",), "tokens of context, eight requests",
            "A ring's step does not know how long the context is"),
        "time_by_slots.png": _times(
            lines, "slots", ("step",), "state slots, eight of them in use",
            "A donated ring's step does not know how many slots are idle", series="ring"),
        "share_of_limit.png": _shares(lines),
        "bytes_by_format.png": _bytes(lines),
    }  # fmt: skip
    drawn = []
    for name, figure in parts.items():
        if figure is not None:
            figure.text(0.995, 0.005, where, ha="right", va="bottom", fontsize=6, color="0.4")
            figure.savefig(folder / name, dpi=120)
            drawn.append(folder / name)
    if not drawn:
        raise ValueError(f"plot: expected lines of {', '.join(DRAWN_SUITES)}, found none")
    return drawn


def _figure(columns: int = 1) -> tuple[Any, Any]:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    engine = ConstrainedLayoutEngine(rect=(0, 0.03, 1, 0.97))  # room for where it was measured
    figure = Figure(figsize=(5.2 * columns + 1.2, 4.2), layout=engine)
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def _times(
    lines: Sequence[dict],
    parameter: str,
    suites: Sequence[str],
    label: str,
    title: str,
    series: str | None = None,
):
    """Times by a parameter: a curve for each program, or for each value of `series`."""
    names = {"requests", parameter} | ({series} if series else set())
    timed = [
        line for line in lines
        if "us" in line and line["suite"] in suites and set(line["parameters"]) == names
    ]  # fmt: skip
    if parameter != "requests" and timed:  # of the number of requests that has most points
        most, _ = Counter(line["parameters"]["requests"] for line in timed).most_common(1)[0]
        timed = [line for line in timed if line["parameters"]["requests"] == most]
    panels = {}
    for line in timed:
        panel = panels.setdefault(line["suite"], {})
        name = line["parameters"][series] if series else line["program"]
        panel.setdefault(name, []).append((line["parameters"][parameter], line))
    if not panels:
        return None
    figure, axes = _figure(len(panels))
    for axis, (suite, programs) in zip(axes, panels.items(), strict=True):
        for program, points in programs.items():
            points.sort(key=lambda point: point[0])
            middle = [line["us"]["median"] / 1000 for _, line in points]
            low = [line["us"]["p20"] / 1000 for _, line in points]
            high = [line["us"]["p80"] / 1000 for _, line in points]
            places = [place for place, _ in points]
            own = program == OURS
            style = {"color": "black", "linewidth": 2.5, "zorder": 3} if own else {}
            (drawn,) = axis.plot(places, middle, marker="o", label=program, **style)
            axis.fill_between(places, low, high, color=drawn.get_color(), alpha=0.15)
        ticks = sorted({place for points in programs.values() for place, _ in points})
        axis.set(xscale="log", yscale="log", xlabel=label, ylabel="milliseconds", title=suite)
        axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    figure.suptitle(title)
    return figure


def _shares(lines: Sequence[dict]):
    series = {}
    for line in lines:
        share = line.get("share", {}).get("product")
        if (
            share
            and line["suite"] in ("read", "step", "layer")
            and "requests" in line["parameters"]
        ):
            series.setdefault(line["suite"], []).append((line["parameters"]["requests"], share))
    if not series:
        return None
    figure, (axis,) = _figure()
    for suite, points in series.items():
        points.sort(key=lambda point: point[0])
        middle = [share["median"] for _, share in points]
        errors = [
            [share["median"] - share["p20"] for _, share in points],
            [share["p80"] - share["median"] for _, share in points],
        ]
        axis.errorbar([n for n, _ in points], middle, yerr=errors, marker="o", label=suite)
    ticks = sorted({n for points in series.values() for n, _ in points})
    axis.set(
        xscale="log", ylim=(0, 1), xlabel="requests, one new token each",
        ylabel="share of the rate of a large matrix product",
        title="How near a decode step is to what the processor can multiply",
    )  # fmt: skip
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend()
    return figure


def _bytes(lines: Sequence[dict]):
    found = {
        line["figure"].removeprefix(f"{FORMAT_BYTES}, "): line["value"]
        for line in lines
        if line.get("figure", "").startswith(f"{FORMAT_BYTES}, ")
    }
    if not found:
        return None
    figure, (axis,) = _figure()
    names = sorted(found, key=lambda name: found[name])
    colors = ["black" if name == "V41" else "tab:blue" for name in names]
    bars = axis.barh(names, [found[name] for name in names], color=colors)
    axis.bar_label(bars, [f"{found[name]:,.0f}" for name in names], padding=3)
    axis.set(xlabel="bytes per token and layer", title="What one token costs a layer's cache")
    axis.margins(x=0.15)
    axis.invert_yaxis()
    return figure
