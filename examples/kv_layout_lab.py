"""Bytes and slots of a window's rows: what a cache holds, where rows live, what a store destroys.

Every figure comes from the library: sizes from swa_jax.sizing and the row format, slots from
RingGeometry, overwrites from the hazard check. Run it with --help for the options.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from command_line import Parser, output_picture, whole_number

from pallas_kernels.formats import V41
from swa_jax.ring import RingGeometry, overwritten_visible_rows, store_hazards
from swa_jax.sizing import format_bytes, rows_bytes, separate_kv_bytes

LAYERS, WIDTH, CONTEXT, WINDOW, DRAFTS = 32, 128, 4096, 128, 5
BOUNDARY_POSITIONS = (127, 128, 133, 134)
LATE_POSITION = 1000  # any position at which the window is full and the ring has wrapped
SMALL_RING, PREFIX_END = RingGeometry(window=3, capacity=5), 3
LONGEST_CHUNK = 1000  # last position of a chunk whose hazards are listed one by one


def generic(kv_heads: int, bytes_per_element: int) -> dict[str, float]:
    """One request's separate keys and values, with full context and with a window."""
    full, window = (
        separate_kv_bytes(LAYERS, kv_heads, WIDTH, CONTEXT, bytes_per_element, window=limit)
        for limit in (None, WINDOW)
    )
    return {
        "layers": LAYERS,
        "kv_heads": kv_heads,
        "width": WIDTH,
        "context_tokens": CONTEXT,
        "window": WINDOW,
        "bytes_per_element": bytes_per_element,
        "full_bytes": full,
        "full_mib": full / 2**20,
        "window_bytes": window,
        "window_mib": window / 2**20,
    }


def row_figures(geometry: RingGeometry) -> dict[str, Any]:
    """The shared row, the window and the ring in bytes, and the row against separate K and V."""
    separate = separate_kv_bytes(1, 8, 128, 1, 2)
    return {
        "values": V41.num_elements,
        "values_per_scale": V41.elements_per_scale,
        "data_bytes": V41.data_bytes,
        "scale_bytes": V41.scale_bytes,
        "row_bytes": V41.row_bytes,
        "visible_rows": geometry.window,
        "visible_bytes": rows_bytes(V41, geometry.window),
        "ring_rows": geometry.capacity,
        "ring_bytes": rows_bytes(V41, geometry.capacity),
        "separate_kv_bytes": separate,
        "separate_over_shared": separate / V41.row_bytes,
    }


def trace(geometry: RingGeometry, state_id: int, position: int) -> dict[str, Any]:
    """Where one query reads and writes, and which position its write replaces."""
    indices = np.asarray(geometry.read_indices(state_id, position))
    indices = indices[indices >= 0]
    replaced = position - geometry.capacity
    return {
        "state_id": state_id,
        "position": position,
        "first_visible": position - len(indices) + 1,
        "last_visible": position,
        "first_read_slot": int(indices[0]),
        "last_read_slot": int(indices[-1]),
        "write_slot": int(geometry.slots(state_id, position)),
        "read_runs": _runs(indices.tolist()),
        "replaced_position": replaced if replaced >= 0 else None,
        # the last query to see it was at replaced + W - 1
        "steps_since_replaced_left": geometry.max_rollback if replaced >= 0 else None,
    }


def owned_slots(geometry: RingGeometry, state_id: int) -> list[int]:
    """First and last flattened slot of one state slot."""
    ends = geometry.slots(state_id, np.array([0, geometry.capacity - 1]))
    return np.asarray(ends).tolist()


def verify_step(window: int, queries: int) -> dict[str, Any]:
    """A decode step of several queries that stores first: rows lost for rings of three sizes."""
    capacities = (window, window + queries - 1, window + queries)
    return {
        "queries": queries,
        "overwritten_visible_rows": {
            str(capacity): overwritten_visible_rows(
                RingGeometry(window, capacity), LATE_POSITION, queries
            )
            for capacity in capacities
        },
        "writes_that_harm_the_first_query": sum(
            LATE_POSITION in hazard.queries
            for hazard in store_hazards(RingGeometry(window, window), LATE_POSITION, queries)
        ),
        "smallest_safe_ring": next(
            capacity
            for capacity in range(window, window + queries + 1)
            if not store_hazards(RingGeometry(window, capacity), LATE_POSITION, queries)
        ),
    }


def prefill_chunk(last_position: int) -> dict[str, Any]:
    """A chunk after a short prefix: what its queries need, and what storing first would destroy."""
    first = PREFIX_END + 1
    tokens = last_position - PREFIX_END
    capacity, window = SMALL_RING.capacity, SMALL_RING.window
    positions = np.arange(first, last_position + 1)
    slots = np.asarray(SMALL_RING.slots(0, positions)).tolist()
    hazards = store_hazards(SMALL_RING, first, tokens)
    return {
        "last_position": last_position,
        "needs": {
            str(query): list(range(max(0, query - window + 1), query + 1))
            for query in positions.tolist()
        },
        "stores": [
            {
                "position": position,
                "slot": slot,
                "replaces": position - capacity if position >= capacity else None,
            }
            for position, slot in zip(positions.tolist(), slots, strict=True)
        ],
        "destroyed_by_early_store": [
            {**hazard._asdict(), "queries": list(hazard.queries)} for hazard in hazards
        ],
    }


def compute(
    kv_heads: int = 8, bytes_per_element: int = 2, state_id: int = 2, chunk_end: int = 8
) -> dict[str, Any]:
    """All figures of this lab.

    Args:
      kv_heads: stored key/value heads of the generic layout.
      bytes_per_element: of the generic layout.
      state_id: state slot of the boundary table.
      chunk_end: last position of the longest prefill chunk.

    Returns:
      JSON-ready figures by plain names.

    Raises:
      ValueError: if a number is out of range.
    """
    if not PREFIX_END < chunk_end <= LONGEST_CHUNK:
        raise ValueError(
            f"chunk_end: expected {PREFIX_END + 1} to {LONGEST_CHUNK}, got {chunk_end}"
        )
    geometry = RingGeometry.for_drafts(WINDOW, draft_tokens=DRAFTS)
    largest = 2**31 // geometry.capacity - 1  # slots are int32
    if not 0 <= state_id <= largest:
        raise ValueError(f"state_id: expected 0 to {largest}, got {state_id}")
    half_size = generic(8, 1)
    return {
        "generic": generic(kv_heads, bytes_per_element),
        "generic_one_kv_head": generic(1, 2),
        "generic_half_size_elements": {
            **half_size,
            "uncounted_scale_bytes": half_size["full_bytes"] // V41.elements_per_scale,
        },
        "row": row_figures(geometry),
        "ring": {
            "window": geometry.window,
            "draft_tokens": DRAFTS,
            "capacity": geometry.capacity,
            "room_for_backtracking": geometry.max_rollback,
            "max_tokens_per_step": geometry.max_tokens_per_step,
            "capacity_with_prefill_extra_state": RingGeometry.for_drafts(
                WINDOW, draft_tokens=DRAFTS, prefill_extra_state=True
            ).capacity,
        },
        "owned_slots": owned_slots(geometry, state_id),
        "boundary": [trace(geometry, state_id, position) for position in BOUNDARY_POSITIONS],
        "state_3_position_134": {
            **trace(geometry, 3, 134),
            "owned_slots": owned_slots(geometry, 3),
        },
        "verify_step": verify_step(WINDOW, DRAFTS + 1),
        "prefill": {
            "window": SMALL_RING.window,
            "capacity": SMALL_RING.capacity,
            "prefix_end": PREFIX_END,
            "chunks": [prefill_chunk(last) for last in sorted({6, 7, chunk_end})],
        },
    }


def report(figures: dict[str, Any]) -> str:
    """The figures as text."""
    lines = ["Separate keys and values, one request"]
    for title, name in [
        ("as configured", "generic"),
        ("one stored head", "generic_one_kv_head"),
        ("one-byte elements", "generic_half_size_elements"),
    ]:
        run = figures[name]
        shape = (
            f"{run['layers']} layers, {run['kv_heads']} KV heads of {run['width']}, "
            f"{run['bytes_per_element']} B an element"
        )
        lines += [
            f"  {title}: {shape}",
            f"    {run['context_tokens']:>5} tokens   {format_bytes(run['full_bytes'])}",
            f"    {run['window']:>5} tokens   {format_bytes(run['window_bytes'])}",
        ]
    scales = figures["generic_half_size_elements"]["uncounted_scale_bytes"]
    row, ring = figures["row"], figures["ring"]
    lines += [
        f"    a scale byte for every {row['values_per_scale']} elements would add "
        f"{format_bytes(scales)}",
        "",
        "One shared row, key and value at once",
        f"  {row['data_bytes']} B of data + {row['scale_bytes']} B of scales = "
        f"{row['row_bytes']} B",
        f"  a window of {row['visible_rows']} rows   {format_bytes(row['visible_bytes'])} a layer",
        f"  a ring of {row['ring_rows']} rows     {format_bytes(row['ring_bytes'])} a layer",
        f"  separate K and V, 8 heads of 128 in bfloat16: {row['separate_kv_bytes']:,} B a token, "
        f"{row['separate_over_shared']:.2f} times as many",
        "",
        f"A ring for {ring['draft_tokens']} drafts: {ring['window']} + max(0, "
        f"{ring['draft_tokens']} + 1) = {ring['capacity']} rows",
        f"  {ring['capacity_with_prefill_extra_state']} with prefill extra state; at most "
        f"{ring['max_tokens_per_step']} tokens a step",
    ]
    state = figures["boundary"][0]["state_id"]
    first, last = figures["owned_slots"]
    lines += [
        "",
        f"State slot {state} owns slots {first} to {last}",
        f"  {'position':>8}  {'sees':>10}  {'reads slots':>24}  {'writes':>6}  replaces",
    ]
    lines += [_trace_line(entry) for entry in figures["boundary"]]
    other = figures["state_3_position_134"]
    first, last = other["owned_slots"]
    lines += [f"State slot 3 owns slots {first} to {last}", _trace_line(other)]
    step, prefill = figures["verify_step"], figures["prefill"]
    lines += [
        "",
        f"A step of {step['queries']} queries that stores first: visible rows lost, by query",
    ]
    lines += [
        f"  ring of {capacity}   {lost}"
        for capacity, lost in step["overwritten_visible_rows"].items()
    ]
    lines += [
        f"  smallest ring that loses none: {step['smallest_safe_ring']}",
        "",
        f"Prefill with a window of {prefill['window']} in a ring of {prefill['capacity']}, "
        f"prefix 0 to {prefill['prefix_end']}, if it stored before reading",
    ]
    for chunk in prefill["chunks"]:
        lines.append(f"  chunk {prefill['prefix_end'] + 1} to {chunk['last_position']}")
        for hazard in chunk["destroyed_by_early_store"]:
            queries = ", ".join(map(str, hazard["queries"]))
            lines.append(
                f"    storing {hazard['overwriting_position']} in slot {hazard['slot']} destroys "
                f"position {hazard['destroyed_position']}, needed by query {queries}"
            )
        if not chunk["destroyed_by_early_store"]:
            lines.append("    destroys nothing that a query of the chunk needs")
    return "\n".join(lines)


def plot(path: Path, state_id: int) -> None:
    """Draws one ring while positions 127 to 134 are stored: read, kept, written rows."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    geometry = RingGeometry.for_drafts(WINDOW, draft_tokens=DRAFTS)
    positions = range(127, 135)
    base, last = owned_slots(geometry, state_id)
    traces = [trace(geometry, state_id, position) for position in positions]
    state = np.zeros((len(positions), geometry.capacity))
    for line, entry in zip(state, traces, strict=True):
        line[: min(entry["position"], geometry.capacity - 1) + 1] = 1  # stored so far
        for start, end in entry["read_runs"]:
            line[start - base : end - base + 1] = 2
        line[entry["write_slot"] - base] = 3
    colours = ["white", "#c9c9c9", "#8fb4dc", "#d1495b"]
    labels = ["empty", "kept, outside the window", "read", "written, then read"]
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(
        state,
        cmap=ListedColormap(colours),
        vmin=0,
        vmax=3,
        aspect="auto",
        interpolation="nearest",
        extent=(base - 0.5, last + 0.5, len(positions) - 0.5, -0.5),
    )
    for line, entry in enumerate(traces):
        axes.axhline(line + 0.5, color="white", linewidth=3)
        runs = ", ".join(_run_text(run) for run in entry["read_runs"])
        replaced = entry["replaced_position"]
        over = "" if replaced is None else f", over position {replaced}"
        text = (
            f"sees {entry['first_visible']}–{entry['last_visible']}: reads slots {runs}; "
            f"writes {entry['write_slot']}{over}"
        )
        axes.text((base + last) / 2, line, text, ha="center", va="center", fontsize=9)
    axes.set_yticks(range(len(positions)), [str(position) for position in positions])
    axes.set_ylabel("query position")
    axes.set_xticks([base, *range(base + 20, last - 5, 20), last])
    axes.set_xlabel(f"flattened slot (state slot {state_id} owns {base} to {last})")
    axes.set_title(
        f"A window of {geometry.window} in a ring of {geometry.capacity} rows: the window is full "
        f"from position {geometry.window - 1}, the ring wraps at {geometry.capacity}",
        fontsize=11,
    )
    handles = [
        Patch(facecolor=colour, edgecolor="#555555", label=label)
        for colour, label in zip(colours, labels, strict=True)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = Parser(
        prog="kv_layout_lab.py",
        description="Bytes of separate and shared key/value rows, slots of a ring around the "
        "position where it wraps, and the rows that storing too early would destroy.",
        epilog="Try --kv-heads 1, --element-bytes 1, --state-id 3 or --chunk-end 9.",
    )
    for option, kind, default, metavar, text in [
        ("--kv-heads", whole_number(1), 8, "N", "stored heads of the generic layout"),
        ("--state-id", int, 2, "B", "state slot of the boundary table and the plot"),
        ("--chunk-end", int, 8, "P", "last position of the longest prefill chunk"),
    ]:
        parser.add_argument(
            option, type=kind, default=default, metavar=metavar, help=f"{text} (default: {default})"
        )
    parser.add_argument(
        "--element-bytes",
        type=int,
        choices=(1, 2, 4, 8),
        default=2,
        help="bytes of an element of the generic layout (default: 2)",
    )
    parser.add_argument("--json", action="store_true", help="print all figures as one JSON object")
    parser.add_argument(
        "--plot", type=output_picture, metavar="FILE", help="draw the ring as it wraps"
    )
    arguments = parser.parse_args()
    try:
        figures = compute(
            arguments.kv_heads, arguments.element_bytes, arguments.state_id, arguments.chunk_end
        )
        if arguments.plot:
            plot(arguments.plot, arguments.state_id)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(json.dumps(figures, indent=2) if arguments.json else report(figures))


def _runs(slots: list[int]) -> list[list[int]]:
    """Slots in reading order as runs of consecutive ones, [first, last] each."""
    runs = [[slots[0], slots[0]]]
    for slot in slots[1:]:
        if slot == runs[-1][1] + 1:
            runs[-1][1] = slot
        else:
            runs.append([slot, slot])
    return runs


def _run_text(run: list[int]) -> str:
    return str(run[0]) if run[0] == run[1] else f"{run[0]}–{run[1]}"


def _trace_line(entry: dict[str, Any]) -> str:
    sees = f"{entry['first_visible']}–{entry['last_visible']}"
    runs = ", ".join(_run_text(run) for run in entry["read_runs"])
    replaced = entry["replaced_position"]
    note = "nothing" if replaced is None else f"position {replaced}"
    if replaced is not None:
        note += f", out of the window for {entry['steps_since_replaced_left']} steps"
    return f"  {entry['position']:>8}  {sees:>10}  {runs:>24}  {entry['write_slot']:>6}  {note}"


if __name__ == "__main__":
    main()
