"""Attention on five small vectors: what caching keys and values saves, what a window changes.

The cached run keeps its rows in a ring and finds them through RingGeometry; the recomputed run
knows only the rule "key k is visible to query q iff 0 <= q - k < window". They must agree.
Arithmetic is float64. Run it with --help for the options.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from command_line import Parser, output_picture, whole_number

from swa_jax.ring import RingGeometry

INPUTS = np.array([(1, 0), (0, 1), (1, 1), (2, 0), (0, 2)], np.float64)
LARGEST_WINDOW = 1000  # more than the inputs are changes nothing but the size of the ring
TOLERANCE = 1e-12  # absolute and relative


def project(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Query, key and value of one input row [2]; fixed formulas in place of learned weights."""
    a, b = x
    return np.array([a, b]), np.array([a - b, a + b]), np.array([a + 2 * b, 2 * a - b])


def attend(query: np.ndarray, keys: np.ndarray, values: np.ndarray) -> dict[str, np.ndarray]:
    """Scaled dot-product attention of one query [D] over keys [L, D] and values [L, V]."""
    dots = keys @ query
    scores = dots / math.sqrt(len(query))
    masses = np.exp(scores - scores.max())
    weights = masses / masses.sum()
    return {"dots": dots, "weights": weights, "output": weights @ values}


def recompute(inputs: np.ndarray, window: int | None) -> tuple[list[np.ndarray], list[int]]:
    """Every output of every growing prefix, from scratch.

    Returns:
      Per prefix, its outputs [n, V] and its number of query/key pairs.
    """
    outputs, pairs = [], []
    for n in range(1, len(inputs) + 1):
        queries, keys, values = map(np.stack, zip(*map(project, inputs[:n]), strict=True))
        first = [0 if window is None else max(0, q - window + 1) for q in range(n)]
        outputs.append(
            np.stack(
                [
                    attend(queries[q], keys[first[q] : q + 1], values[first[q] : q + 1])["output"]
                    for q in range(n)
                ]
            )
        )
        pairs.append(sum(q + 1 - first[q] for q in range(n)))
    return outputs, pairs


def cached(inputs: np.ndarray, window: int | None) -> tuple[np.ndarray, list[list[int]], int]:
    """One output per input, keys and values kept in a ring of `window` rows.

    Returns:
      Outputs [n, V], the positions each query read, and how many rows the ring holds at the end.
    """
    count = len(inputs)
    size = count if window is None else window
    geometry = RingGeometry(window=size, capacity=size)
    slots = np.asarray(geometry.slots(0, np.arange(count)))
    reads = np.asarray(geometry.read_indices(0, np.arange(count)))
    keys, values = np.full((2, size, 2), np.nan)
    owner = np.full(size, -1)  # the position a slot holds
    outputs, visible = [], []
    for position, x in enumerate(inputs):
        query, keys[slots[position]], values[slots[position]] = project(x)
        owner[slots[position]] = position
        read = reads[position][reads[position] >= 0]
        outputs.append(attend(query, keys[read], values[read])["output"])
        visible.append(owner[read].tolist())
    return np.stack(outputs), visible, int((owner >= 0).sum())


def compare(window: int | None) -> dict[str, Any]:
    """Cached against recomputed under one visibility rule: the work, the rows kept, the outputs."""
    outputs, visible, retained = cached(INPUTS, window)
    prefixes, recomputed_pairs = recompute(INPUTS, window)
    pairs = [len(positions) for positions in visible]
    return {
        "window": window,
        "recompute_projected_rows": sum(len(prefix) for prefix in prefixes),
        "cache_projected_rows": len(INPUTS),
        "recompute_pairs_per_prefix": recomputed_pairs,
        "recompute_pairs": sum(recomputed_pairs),
        "cache_pairs_per_query": pairs,
        "cache_pairs": sum(pairs),
        "retained_rows": retained,
        "visible_positions": visible,
        "outputs": outputs.tolist(),
        "last_output": outputs[-1].tolist(),
        "prefix_agrees": [
            bool(np.allclose(outputs[: len(prefix)], prefix, rtol=TOLERANCE, atol=TOLERANCE))
            for prefix in prefixes
        ],
        "largest_difference": max(
            float(np.abs(outputs[: len(prefix)] - prefix).max()) for prefix in prefixes
        ),
    }


def one_query(position: int, window: int | None) -> dict[str, Any]:
    """Dots, weights and output of one query, and the positions it mixes."""
    first = 0 if window is None else max(0, position - window + 1)
    queries, keys, values = map(np.stack, zip(*map(project, INPUTS), strict=True))
    seen = slice(first, position + 1)
    result = attend(queries[position], keys[seen], values[seen])
    return {
        "position": position,
        "positions_read": list(range(first, position + 1)),
        **{name: array.tolist() for name, array in result.items()},
    }


def compute(window: int = 3) -> dict[str, Any]:
    """All figures of this lab.

    Args:
      window: W of the windowed run, in positions.

    Returns:
      JSON-ready figures by plain names.

    Raises:
      ValueError: if the window is not a positive int.
    """
    full = compare(None)
    window_one, wide = compare(1), compare(len(INPUTS) + 3)
    rows = [project(x) for x in INPUTS]
    return {
        "dot_product_example": float(np.dot([1, 2], [3, 4])),
        "positions": [
            {"position": p, "query": q.tolist(), "key": k.tolist(), "value": v.tolist()}
            for p, (q, k, v) in enumerate(rows)
        ],
        "full": full,
        "windowed": compare(window),
        "query_at_position_2": one_query(2, None),
        "last_query_in_window": one_query(len(INPUTS) - 1, window),
        "window_of_one": {
            **window_one,
            "each_output_is_its_value_row": bool(
                np.allclose(window_one["outputs"], [v for _, _, v in rows], rtol=0, atol=TOLERANCE)
            ),
        },
        "window_wider_than_input": {
            **wide,
            "agrees_with_full": bool(
                np.allclose(wide["outputs"], full["outputs"], rtol=TOLERANCE, atol=TOLERANCE)
            ),
        },
    }


def report(figures: dict[str, Any]) -> str:
    """The figures as text."""
    lines = ["Rows of the five inputs (the query is the input itself)"]
    lines += [f"{'position':>10}{'query':>10}{'key':>10}{'value':>10}"]
    for row in figures["positions"]:
        cells = "".join(f"{_row(row[name], 0):>10}" for name in ("query", "key", "value"))
        lines.append(f"{row['position']:>10}{cells}")
    for title, name in [
        ("Full attention", "full"),
        ("Windowed attention", "windowed"),
        ("A window of one", "window_of_one"),
        ("A window wider than the input", "window_wider_than_input"),
    ]:
        run = figures[name]
        window = "" if run["window"] is None else f", W = {run['window']}"
        agreeing, prefixes = sum(run["prefix_agrees"]), len(run["prefix_agrees"])
        lines += [
            "",
            f"{title}{window}",
            f"  prefixes equal to recomputation  {agreeing} of {prefixes}"
            f" (largest difference {run['largest_difference']:.1e})",
            f"  input rows projected             {run['recompute_projected_rows']} recomputing, "
            f"{run['cache_projected_rows']} cached",
            f"  query/key pairs scored           {run['recompute_pairs']} recomputing, "
            f"{run['cache_pairs']} cached ({_sum(run['cache_pairs_per_query'])})",
            f"  key/value rows kept              {run['retained_rows']}",
            f"  output at the last position      {_row(run['last_output'], 6)}",
        ]
        for check in ("each_output_is_its_value_row", "agrees_with_full"):
            if check in run:
                answer = "yes" if run[check] else "NO"
                lines.append(f"  {check.replace('_', ' '):<33}{answer}")
    for title, name in [
        ("One query, position 2, full attention", "query_at_position_2"),
        ("The last query in its window", "last_query_in_window"),
    ]:
        query = figures[name]
        lines += [
            "",
            title,
            f"  reads positions  {', '.join(map(str, query['positions_read']))}",
            f"  dot products     {_row(query['dots'], 0)}",
            f"  weights          {_row(query['weights'], 4)}",
            f"  output           {_row(query['output'], 4)}",
        ]
    return "\n".join(lines)


def plot(figures: dict[str, Any], path: Path) -> None:
    """Draws the window band: which key positions each query position reads."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    run = figures["windowed"]
    count = len(run["visible_positions"])
    state = np.array([[0 if k > q else 2 for k in range(count)] for q in range(count)])
    for q, positions in enumerate(run["visible_positions"]):
        state[q, positions] = 1
    colours = ["white", "#3b75af", "#c9c9c9"]
    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(state, cmap=ListedColormap(colours), vmin=0, vmax=2)
    axes.set_xticks(range(count))
    axes.set_yticks(range(count))
    axes.set_xticks(np.arange(count + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(count + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="#555555", linewidth=0.8)
    axes.tick_params(which="minor", length=0)
    for q, positions in enumerate(run["visible_positions"]):
        for k in positions:
            axes.text(k, q, f"{q}→{k}", color="white", ha="center", va="center", fontsize=9)
    axes.set_xlabel("key position")
    axes.set_ylabel("query position")
    axes.set_title(
        f"What each query reads with a window of {run['window']}, itself included\n"
        f"query/key pairs: {run['cache_pairs']} (full attention: {figures['full']['cache_pairs']})",
        fontsize=11,
    )
    labels = ["in the future", "read by the query", "has left the window"]
    axes.legend(
        handles=[
            Patch(facecolor=colour, edgecolor="#555555", label=label)
            for colour, label in zip(colours, labels, strict=True)
        ],
        loc="center left",
        bbox_to_anchor=(1.02, 0.5),
        frameon=False,
    )
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = Parser(
        prog="attention_lab.py",
        description="Attention over five small vectors, once recomputed for every prefix and once "
        "with keys and values kept in a ring: work, rows kept, outputs, and whether they agree.",
        epilog="Try --window 1, where each output is its own value row, and --window 8, where "
        "nothing leaves the window and the outputs are those of full attention.",
    )
    parser.add_argument(
        "--window",
        type=whole_number(1, LARGEST_WINDOW),
        default=3,
        metavar="N",
        help="positions a query reads, its own included (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print all figures as one JSON object")
    parser.add_argument("--plot", type=output_picture, metavar="FILE", help="draw the window band")
    arguments = parser.parse_args()
    try:
        figures = compute(arguments.window)
        if arguments.plot:
            plot(figures, arguments.plot)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(json.dumps(figures, indent=2) if arguments.json else report(figures))


def _row(numbers: list[float], digits: int) -> str:
    return "(" + ", ".join(f"{number:.{digits}f}" for number in numbers) + ")"


def _sum(numbers: list[int]) -> str:
    return " + ".join(map(str, numbers))


if __name__ == "__main__":
    main()
