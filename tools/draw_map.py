r"""Draws the map of the code, docs/pictures/map.svg, from what the modules import.

python tools/draw_map.py                             # writes it
python tools/draw_map.py --check                     # exit status 1 if it is not up to date

A module stands in the row above the highest one that it imports, so all imports point down. A line
is an import; those that follow from others are left out, and so are those into the other package,
which a dot stands for. Needs nothing but Python's standard library.
"""

import ast
import functools
import math
import sys
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from one_line_parser import OneLineParser

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "pictures" / "map.svg"
PACKAGES = ("swa_jax", "pallas_kernels")  # from above

WIDTH, MARGIN, GAP = 1180, 16, 14
ROW, BOX, LETTER = 54, 24, 6.7  # heights of rows and boxes, width of a letter at 11 px
FONT = "font-family='DejaVu Sans Mono, Menlo, Consolas, monospace'"
INK, LINE, PANEL, FILL, FLAX = "#1b1f24", "#8a94a0", "#f3f5f7", "#ffffff", "#dce9f7"


@functools.cache
def modules() -> dict[str, ast.Module]:
    """The modules of both packages by name, parsed; a package has the name of its folder."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return found


@functools.cache
def imported_names(module: str) -> frozenset[str]:
    """Dotted names that a module imports; `from a import b` gives a.b. All imports are absolute."""
    names = set()
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"{module}: expected absolute imports, got a relative one")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


@functools.cache
def dependencies(module: str) -> frozenset[str]:
    """The modules of both packages that one imports."""
    found = set()
    for name in imported_names(module):
        while name and name not in modules():
            name = name.rpartition(".")[0]
        found.add(name)
    return frozenset(found - {"", module})


def package_of(module: str) -> str:
    """The package that a module belongs to."""
    return module.partition(".")[0]


def inner(module: str) -> set[str]:
    """What a module imports of its own package."""
    return {name for name in dependencies(module) if package_of(name) == package_of(module)}


@functools.cache
def height(module: str) -> int:
    """The row of a module, from the lowest: one above the highest that it imports."""
    return 1 + max(map(height, inner(module)), default=-1)


@functools.cache
def below(module: str) -> frozenset[str]:
    """Everything of its package that a module reaches."""
    return frozenset(inner(module)).union(*map(below, inner(module)))


def lines_from(module: str) -> set[str]:
    """The imports of a module that do not follow from its others."""
    return {
        name for name in inner(module) if not any(name in below(other) for other in inner(module))
    }


def ordered_rows(package: str) -> list[list[str]]:
    """The modules of a package in rows, from the lowest, each near what it is connected with."""
    members = [name for name in modules() if package_of(name) == package and name != package]
    rows = [
        [name for name in members if height(name) == level]
        for level in range(1 + max(map(height, members)))
    ]
    place = {name: (i + 0.5) / len(row) for row in rows for i, name in enumerate(row)}
    up = {name: {other for other in members if name in lines_from(other)} for name in members}
    for turn in range(24):
        neighbours = lines_from if turn % 2 == 0 else up.__getitem__
        for row in rows if turn % 2 == 0 else reversed(rows):
            wish = {
                name: math.fsum(place[other] for other in near) / len(near)
                if (near := neighbours(name))
                else place[name]
                for name in row
            }
            row.sort(key=lambda name: (wish[name], name))
            place |= {name: (i + 0.5) / len(row) for i, name in enumerate(row)}
    return rows


def box_width(module: str) -> float:
    """Width of a module's box."""
    return LETTER * len(label(module)) + 18


def label(module: str) -> str:
    """A module's name within its package."""
    return module.partition(".")[2] or module


def place_boxes(package: str, top: float) -> tuple[dict[str, tuple[float, float]], float]:
    """Centres of the boxes of a package whose panel begins at `top`, and where the panel ends."""
    rows = ordered_rows(package)
    places = {}
    for level, row in enumerate(rows):
        y = top + 58 + ROW * (len(rows) - 1 - level) + BOX / 2
        free = WIDTH - 4 * MARGIN - math.fsum(map(box_width, row))
        gap = max(GAP, free / (len(row) + 1))
        x = WIDTH / 2 - (math.fsum(map(box_width, row)) + gap * (len(row) - 1)) / 2
        for name in row:
            places[name] = (x + box_width(name) / 2, y)
            x += box_width(name) + gap
    return places, top + 58 + ROW * len(rows) - (ROW - BOX) + 14


def text(x: float, y: float, words: str, anchor: str = "middle", size: int = 11) -> str:
    """A line of text."""
    return (
        f"<text x='{x:.0f}' y='{y:.0f}' text-anchor='{anchor}' font-size='{size}' "
        f"fill='{INK}'>{escape(words)}</text>"
    )


def draw_box(module: str, place: tuple[float, float]) -> list[str]:
    """A module's box, its first line as what a pointer shows, and its dot."""
    x, y = place
    fill = FLAX if any(package_of(name) == "flax" for name in imported_names(module)) else FILL
    width = box_width(module)
    first = (ast.get_docstring(modules()[module]) or "").partition("\n")[0]
    parts = [
        f"<g><title>{escape(module)}: {escape(first)}</title>",
        f"<rect x='{x - width / 2:.1f}' y='{y - BOX / 2:.1f}' width='{width:.1f}' height='{BOX}' "
        f"rx='4' fill='{fill}' stroke='{INK}'/>",
        text(x, y + 4, label(module)),
    ]
    if any(package_of(name) != package_of(module) for name in dependencies(module)):
        parts.append(f"<circle cx='{x - width / 2 + 1:.1f}' cy='{y:.1f}' r='4' fill='{INK}'/>")
    return [*parts, "</g>"]


def draw_lines(places: dict[str, tuple[float, float]]) -> Iterable[str]:
    """A curve from each module down to each that it imports."""
    for module, (x, y) in places.items():
        for other in sorted(lines_from(module)):
            to_x, to_y = places[other]
            start, end = y + BOX / 2, to_y - BOX / 2
            bend = min(26.0, (end - start) / 2)
            yield (
                f"<path d='M{x:.1f} {start:.1f} C{x:.1f} {start + bend:.1f} {to_x:.1f} "
                f"{end - bend:.1f} {to_x:.1f} {end:.1f}' fill='none' stroke='{LINE}'/>"
            )


def draw() -> str:
    """The picture, as SVG."""
    parts, top = [], MARGIN
    parts.append(text(WIDTH / 2, top + 14, "examples, tests, tools", size=13))
    parts.append(text(WIDTH / 2, top + 32, "↓", size=13))
    top += 42
    for package in PACKAGES:
        places, end = place_boxes(package, top)
        parts.append(
            f"<rect x='{MARGIN}' y='{top}' width='{WIDTH - 2 * MARGIN}' height='{end - top:.0f}' "
            f"rx='8' fill='{PANEL}'/>"
        )
        count = sum(package_of(name) == package for name in modules())
        parts.append(text(2 * MARGIN, top + 24, package, "start", 15))
        parts.append(text(2 * MARGIN, top + 41, f"{count} modules", "start"))
        parts += draw_lines(places)
        for name, place in places.items():
            parts += draw_box(name, place)
        top = end
        arrow = "↓" if package == "swa_jax" else "↓ jax, numpy"
        parts.append(text(WIDTH / 2, top + 20, arrow, size=13))
        top += 32
    notes = (
        "A line is an import, downwards; those that follow from others are left out.",
        "Dot: imports pallas_kernels.   Blue: imports flax.",
    )
    parts += [text(2 * MARGIN, top + 14 + 16 * i, note, "start") for i, note in enumerate(notes)]
    total = top + 14 + 16 * len(notes)
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {total:.0f}' {FONT}>",
            "<title>Modules of swa_jax and pallas_kernels, and what each imports</title>",
            f"<rect width='{WIDTH}' height='{total:.0f}' fill='#ffffff'/>",
            *parts,
            "</svg>\n",
        ]
    )


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    parser = OneLineParser(prog="draw_map.py", description="Draws the map of the code.")
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    options = parser.parse_args(arguments)
    picture = draw()
    if not options.check:
        PICTURE.parent.mkdir(parents=True, exist_ok=True)
        PICTURE.write_text(picture, encoding="utf-8")
    elif not PICTURE.exists() or PICTURE.read_text(encoding="utf-8") != picture:
        print(
            f"{PICTURE.relative_to(ROOT)}: out of date: python tools/draw_map.py", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
