r"""Draws the pictures of the documentation, each from figures that the library computes.

python examples/draw_tour.py
python examples/draw_tour.py --out DIR --format png
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
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
LINE = "#444444"
STYLE = {
    "font.size": 9,
    "hatch.linewidth": 0.8,
    "svg.fonttype": "path",  # the same glyphs for every reader
    "svg.hashsalt": "swa_jax",  # the same names in every run
}


def draw_band(data: dict[str, Any]) -> Figure:
    """The band of the window; in each cell the row of the ring that the key is read from."""
    figure = Figure(figsize=(7.2, 4.9))
    axes = _axes(figure, 0.09, 0.10, 0.58, 0.80)
    count = len(data["queries"])
    for line, query in enumerate(data["queries"]):
        oldest = query["keys"][0]
        _cells(axes, line, range(oldest), GREY)
        _cells(axes, line, query["keys"], BLUE, query["rows"], "white")
        _cells(axes, line, range(query["position"] + 1, count), "white")
    _grid(axes, range(count), [str(q["position"]) for q in data["queries"]])
    axes.set_xlabel("key position")
    axes.set_ylabel("query position")
    axes.set_title(f"A window of {data['window']} in a ring of {data['capacity']} rows")
    entries = [
        (BLUE, "read; the number is\nthe row of the ring"),
        (GREY, "has left the window"),
        ("white", "in the future"),
    ]
    _legend(figure, entries, (0.69, 0.62))
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
    axes = _axes(figure, 0.10, 0.19, 0.27, 0.66)
    lines = ["before"] + [f"store {query['position']}" for query in data["queries"]]
    for line, held in enumerate(data["states"]):
        _cells(axes, line, range(data["capacity"]), PALE, held)
        if line:
            slot = data["slots"][line - 1]
            lost = str(held[slot]) in data["destroyed"]
            _cells(axes, line, [slot], ORANGE, [held[slot]], hatch="////" if lost else None)
    _grid(axes, range(data["capacity"]), lines)
    axes.set_xlabel("row of the ring; the number is the position it holds")
    axes.set_title("The ring, if the chunk stored first")
    axes = _axes(figure, 0.46, 0.19, 0.42, 0.66)
    first = data["queries"][0]["needs"][0]
    last = data["queries"][-1]["position"]
    for line, query in enumerate(data["queries"]):
        keys = range(first, last + 1)
        _cells(axes, line, keys, "white")
        lost = query["lost"]
        kept = [key for key in query["needs"] if key not in lost]
        _cells(axes, line, kept, BLUE, [""] * len(kept), offset=first)
        _cells(axes, line, lost, ORANGE, ["lost"] * len(lost), hatch="////", offset=first)
    _grid(axes, range(first, last + 1), [str(query["position"]) for query in data["queries"]])
    axes.set_xlabel("key position")
    axes.set_ylabel("query position")
    axes.set_title(f"What each query needs (at most {data['max_tokens_per_step']} are safe)")
    entries = [(BLUE, "needed, still there"), (ORANGE, "stored"), (PALE, "held")]
    _legend(figure, entries, (0.46, 0.0), columns=3)
    return figure


def draw_verify(data: dict[str, Any]) -> Figure:
    """A table: tokens of a step by rows of a ring, and what the first query loses."""
    figure = Figure(figsize=(7.2, 4.5))
    axes = _axes(figure, 0.10, 0.20, 0.86, 0.66)
    for line, lost in enumerate(data["lost"]):
        for column, count in enumerate(lost):
            colour, ink = (BLUE, "white") if count == 0 else (ORANGE, "black")
            hatch = None if count == 0 else "////"
            _cells(axes, line, [column], colour, [count], ink, hatch=hatch)
    _grid(axes, data["capacities"], [str(tokens) for tokens in data["tokens"]])
    default = data["capacities"].index(data["default"])
    axes.add_patch(
        Rectangle(
            (default - 0.5, -0.5), 1, len(data["tokens"]), fill=False, edgecolor="black", lw=2.5
        )
    )
    axes.set_xlabel("rows of the ring; the default for 5 drafts is framed")
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
        axes = _axes(figure, 0.07, 0.72 - 0.30 * place, 0.91, 0.17)
        for block in case["blocks"]:
            colour, ink = colours[block["piece"]]
            left, width = starts[block["list"]] + block["first"], block["end"] - block["first"]
            for head in range(0, data["heads"], case["heads"]):
                axes.add_patch(
                    Rectangle((left, head), width, case["heads"], fc=colour, ec="white", lw=1.2)
                )
            axes.text(left + width / 2, data["heads"] / 2, str(block["piece"]), color=ink,
                      ha="center", va="center", fontweight="bold", fontsize=11)  # fmt: skip
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
    columns: Iterable[int],
    colour: str,
    texts: Sequence[Any] | None = None,
    ink: str = "black",
    hatch: str | None = None,
    offset: int = 0,
) -> None:
    """Cells of one line of a table, from its first column on."""
    for i, column in enumerate(columns):
        corner = (column - offset - 0.5, line - 0.5)
        axes.add_patch(Rectangle(corner, 1, 1, fc=colour, ec=LINE, lw=0.6, hatch=hatch))
        if texts is not None:
            box = {"fc": colour, "ec": "none", "pad": 0.8} if hatch else None
            axes.text(column - offset, line, str(texts[i]), color=ink, ha="center", va="center",
                      bbox=box)  # fmt: skip


def _grid(axes: Axes, columns: Sequence[int], lines: Sequence[str]) -> None:
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.set_xticks(range(len(columns)), [str(column) for column in columns])
    axes.set_yticks(range(len(lines)), lines)
    axes.tick_params(length=0)


def _bar(axes: Axes, line: int, runs: list[list[int]], colour: str, height: float = 0.7) -> None:
    for first, last in runs:
        corner = (first - 0.5, line - height / 2)
        axes.add_patch(Rectangle(corner, last - first + 1, height, fc=colour, ec="none"))


def _legend(
    figure: Figure,
    entries: Sequence[tuple[str, str]],
    corner: tuple[float, float],
    columns: int = 1,
) -> None:
    handles = [Patch(fc=colour, ec=LINE, lw=0.6, label=label) for colour, label in entries]
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
