r"""Draws the pictures of the documentation, each from figures that the library computes.

python examples/draw_tour.py
python examples/draw_tour.py --out DIR --format png
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import tour_figures
from command_line import Parser, print_error
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"

# Of Okabe and Ito: told apart by people who see few colours, and by their lightness.
BLUE, ORANGE, GREEN, PALE, GREY = "#0072B2", "#E69F00", "#66C2A0", "#D9E8F2", "#C9C9C9"
LINE, HATCH = "#444444", "////"
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],  # the widest, to leave room for others
    "hatch.linewidth": 0.8,
    "svg.fonttype": "none",  # letters as letters: half the size
    "svg.hashsalt": "swa_jax",  # the same names in every run
}


def draw_band(data: dict[str, Any]) -> Figure:
    """The band of the window; in each cell the row of the ring that the key is read from."""
    figure = Figure(figsize=(7.2, 4.6))
    axes = _axes(figure, 0.09, 0.11, 0.60, 0.81)
    count = len(data["queries"])
    for line, query in enumerate(data["queries"]):
        _cells(axes, line, range(query["keys"][0]), GREY)
        _cells(axes, line, query["keys"], BLUE, query["rows"], "white")
    _grid(axes, range(count), [str(q["position"]) for q in data["queries"]])
    axes.set_xlabel("key position")
    axes.set_ylabel("query position")
    axes.set_title(f"A window of {data['window']} in a ring of {data['capacity']} rows")
    entries = [
        (BLUE, "read; the number is\nthe row of the ring"),
        (GREY, "has left the window"),
        ("white", "in the future"),
    ]
    _legend(figure, entries, (0.70, 0.62))
    return figure


def draw_ring(data: dict[str, Any]) -> Figure:
    """One line for each query position: what its ring holds, what it reads and writes."""
    figure = Figure(figsize=(10.4, 5.0))
    axes = _axes(figure, 0.06, 0.16, 0.56, 0.74)
    for line, query in enumerate(data["queries"]):
        _bar(axes, line, [[0, query["stored"] - 1]], GREY)
        _bar(axes, line, query["reads"], BLUE)
        _bar(axes, line, [[query["writes"], query["writes"]]], ORANGE, 0.86)
    count = len(data["queries"])
    axes.set_xlim(-0.5, data["capacity"] - 0.5)
    axes.set_ylim(count - 0.5, -0.5)
    axes.set_yticks(range(count), [str(query["position"]) for query in data["queries"]])
    axes.set_xticks([0, 20, 40, 60, 80, 100, 120, data["capacity"] - 1])
    axes.tick_params(length=2)
    axes.set_xlabel("row of the ring")
    axes.set_ylabel("query position")
    axes.set_title(f"A window of {data['window']} in a ring of {data['capacity']} rows")
    columns = [
        (0.638, "sees", lambda q: f"{q['first_visible']}–{q['position']}"),
        (0.735, "reads rows", lambda q: ", ".join(_run_text(run) for run in q["reads"])),
        (0.865, "writes", lambda q: str(q["writes"])),
        (0.925, "replaces", lambda q: "–" if q["replaces"] is None else str(q["replaces"])),
    ]
    for x, title, text in columns:
        figure.text(x, 0.92, title, fontweight="bold", va="center")
        for line, query in enumerate(data["queries"]):
            y = 0.16 + 0.74 * (1 - (line + 0.5) / count)
            figure.text(x, y, text(query), va="center")
    entries = [
        ("white", "empty"),
        (GREY, "kept, outside the window"),
        (BLUE, "read"),
        (ORANGE, "written, then read"),
    ]
    _legend(figure, entries, (0.06, 0.0), columns=4)
    return figure


def draw_chunk(data: dict[str, Any]) -> Figure:
    """The ring after each early store, and which keys of the chunk's queries are gone."""
    figure = Figure(figsize=(10.4, 4.3))
    axes = _axes(figure, 0.10, 0.19, 0.33, 0.70)
    for line, held in enumerate(data["states"]):
        stored = data["slots"][line - 1 : line] if line else []
        others = [row for row in range(data["capacity"]) if row not in stored]
        _cells(axes, line, others, PALE, [held[row] for row in others])
        for row in stored:
            harms = str(held[row]) in data["destroyed"]
            _cells(axes, line, [row], ORANGE, [held[row]], hatch=HATCH if harms else None)
    lines = ["before"] + [f"store {query['position']}" for query in data["queries"]]
    _grid(axes, range(data["capacity"]), lines)
    axes.set_xlabel("row of the ring; the number is the position it holds")
    axes.set_title("The ring, if the chunk stored first")
    entries = [(PALE, "held"), (ORANGE, "stored"), (ORANGE, "stored over a needed row", HATCH)]
    _legend(figure, entries, (0.05, 0.0), columns=3)

    axes = _axes(figure, 0.53, 0.19, 0.44, 0.70)
    for line, query in enumerate(data["queries"]):
        kept = [key for key in query["needs"] if key not in query["lost"]]
        _cells(axes, line, kept, BLUE)
        _cells(axes, line, query["lost"], ORANGE, ["lost"] * len(query["lost"]), hatch=HATCH)
    positions = [query["position"] for query in data["queries"]]
    keys = range(data["queries"][0]["needs"][0], positions[-1] + 1)
    _grid(axes, keys, [str(position) for position in positions])
    axes.set_xlabel("key position")
    axes.set_ylabel("query position")
    axes.set_title("The keys that each query of the chunk needs")
    entries = [(BLUE, "needed, still there"), (ORANGE, "needed, overwritten", HATCH)]
    _legend(figure, entries, (0.53, 0.0), columns=2)
    return figure


def draw_verify(data: dict[str, Any]) -> Figure:
    """A table: tokens of a step by rows of a ring, and what the first query loses."""
    figure = Figure(figsize=(7.2, 4.4))
    axes = _axes(figure, 0.10, 0.21, 0.87, 0.70)
    for line, lost in enumerate(data["lost"]):
        safe = [c for c, count in zip(data["capacities"], lost, strict=True) if count == 0]
        harmed = [c for c in data["capacities"] if c not in safe]
        _cells(axes, line, safe, BLUE, ["0"] * len(safe), "white")
        _cells(axes, line, harmed, ORANGE, [count for count in lost if count])
    _grid(axes, data["capacities"], [str(tokens) for tokens in data["tokens"]])
    frame = (data["default"] - 0.5, -0.5), 1, len(data["tokens"])
    axes.add_patch(Rectangle(*frame, fill=False, ec="black", lw=2.5, zorder=3))
    axes.set_xlabel("rows of the ring; the default, for 5 drafts, is framed")
    axes.set_ylabel("tokens of a step")
    axes.set_title(f"Rows of a window of {data['window']} that a step's first query loses")
    _legend(figure, [(BLUE, "none: allowed"), (ORANGE, "some: refused")], (0.10, 0.0), columns=2)
    return figure


def draw_tiles(data: dict[str, Any]) -> Figure:
    """For each case the heads and index columns of a query, coloured by the piece they are of."""
    figure = Figure(figsize=(10.4, 5.2))
    gap = 24
    starts = {"window": 0, "compressed": data["window_columns"] + gap}
    colours = [(BLUE, "white"), (ORANGE, "black"), (GREEN, "black")]
    for place, case in enumerate(data["cases"]):
        axes = _axes(figure, 0.07, 0.73 - 0.31 * place, 0.91, 0.19)
        for block in case["blocks"]:
            colour, ink = colours[block["piece"]]
            left, width = starts[block["list"]] + block["first"], block["end"] - block["first"]
            for head in range(0, data["heads"], case["heads"]):
                corner = (left, head)
                axes.add_patch(Rectangle(corner, width, case["heads"], fc=colour, ec="white"))
                middle = (left + width / 2, head + case["heads"] / 2)
                axes.text(*middle, str(block["piece"]), color=ink, ha="center", va="center")
        axes.set_xlim(-4, starts["compressed"] + data["extra_columns"] + 4)
        axes.set_ylim(data["heads"], 0)
        axes.set_yticks(range(0, data["heads"] + 1, case["heads"]))
        ticks = [
            (starts[name] + column, str(column))
            for name in dict.fromkeys(block["list"] for block in case["blocks"])
            for column in (0, 64, 128, *((256, 384, 512) if name == "compressed" else ()))
        ]
        axes.set_xticks(*map(list, zip(*ticks, strict=True)))
        axes.set_ylabel("heads")
        for side in ("top", "right", "left", "bottom"):
            axes.spines[side].set_visible(False)
        programs = "1 program" if case["programs"] == 1 else f"{case['programs']} programs"
        axes.set_title(
            f"{case['card']}: {programs} a query, each {case['heads']} heads and one piece, "
            f"{case['keys']} keys at a time",
            loc="left",
        )
    figure.text(0.07, 0.015, "columns of the window's list, then of the compressed cache's; the "
                "number is the piece")  # fmt: skip
    return figure


def _axes(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    return figure.add_axes((left, bottom, width, height))


def _cells(
    axes: Axes,
    line: int,
    columns: Sequence[int],
    colour: str,
    texts: Sequence[Any] = (),
    ink: str = "black",
    hatch: str | None = None,
) -> None:
    """Cells of one line of a table: neighbours, or single ones if they are hatched."""
    single = [[column, column] for column in columns]
    for first, last in single if hatch else tour_figures.runs(columns):
        corner = (first - 0.5, line - 0.5)
        edge = LINE if hatch else "none"  # a hatch has the colour of the edge
        axes.add_patch(
            Rectangle(corner, last - first + 1, 1, fc=colour, ec=edge, lw=0, hatch=hatch)
        )
    for column, text in zip(columns, texts, strict=False):
        box = {"fc": colour, "ec": "none", "pad": 0.8} if hatch else None
        axes.text(column, line, str(text), color=ink, ha="center", va="center", bbox=box)


def _grid(axes: Axes, columns: Sequence[int], lines: Sequence[str]) -> None:
    """Lines between cells, and what each line and column of a table stands for."""
    left, right, bottom = columns[0] - 0.5, columns[-1] + 0.5, len(lines) - 0.5
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, -0.5)
    axes.set_xticks(columns, [str(column) for column in columns])
    axes.set_yticks(range(len(lines)), lines)
    axes.tick_params(length=0)
    inner = {"colors": LINE, "linewidths": 0.6}
    axes.hlines([line + 0.5 for line in range(len(lines) - 1)], left, right, **inner)
    axes.vlines([column + 0.5 for column in columns[:-1]], -0.5, bottom, **inner)


def _bar(axes: Axes, line: int, runs: list[list[int]], colour: str, height: float = 0.7) -> None:
    for first, last in runs:
        corner = (first - 0.5, line - height / 2)
        axes.add_patch(Rectangle(corner, last - first + 1, height, fc=colour, ec="none"))


def _legend(
    figure: Figure,
    entries: Sequence[tuple[str, ...]],
    corner: tuple[float, float],
    columns: int = 1,
) -> None:
    """Colours and what they mean, and the hatch if there is one."""
    handles = [
        Patch(fc=colour, ec=LINE, lw=0.6, label=label, hatch="".join(hatch) or None)
        for colour, label, *hatch in entries
    ]
    figure.legend(handles=handles, loc="lower left", bbox_to_anchor=corner, ncols=columns,
                  frameon=False)  # fmt: skip


def _run_text(run: list[int]) -> str:
    return str(run[0]) if run[0] == run[1] else f"{run[0]}–{run[1]}"


# --- files

PAIRS: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[dict[str, Any]], Figure]]] = {
    "band": (tour_figures.band, draw_band),
    "ring": (tour_figures.ring, draw_ring),
    "chunk": (tour_figures.chunk, draw_chunk),
    "verify": (tour_figures.verify, draw_verify),
    "tiles": (tour_figures.tiles, draw_tiles),
}
"""What computes each picture's figures, and what draws them."""


def write(folder: Path, suffix: str = "svg") -> list[Path]:
    """Writes every picture; an SVG has the figures it was drawn from as its description.

    Args:
      folder: where to.
      suffix: "svg" or "png".

    Returns:
      The files.
    """
    paths = []
    for name, (compute, draw) in PAIRS.items():
        with matplotlib.rc_context(STYLE):
            data = compute()
            path = folder / f"{name}.{suffix}"
            svg = {"Date": None, "Description": json.dumps(data)}
            draw(data).savefig(path, dpi=110, metadata=svg if suffix == "svg" else None)
        paths.append(path)
    return paths


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    parser = Parser(prog="draw_tour.py", description="Draws the pictures of the documentation.")
    parser.add_argument("--out", type=Path, default=PICTURES, metavar="DIR",
                        help="where to write (docs/pictures)")  # fmt: skip
    parser.add_argument("--format", choices=("svg", "png"), default="svg", help="of the files")
    options: argparse.Namespace = parser.parse_args(arguments)
    try:
        for path in write(options.out, options.format):
            print(path)
    except OSError as error:
        print_error("draw_tour.py", error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
