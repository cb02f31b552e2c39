"""Command line: python -m swa_jax doctor | size | trace."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from pallas_kernels.checks import INT32_MAX
from pallas_kernels.formats import FORMATS, V41
from swa_jax.doctor import print_diagnosis
from swa_jax.presets import PRESETS
from swa_jax.ring import RingGeometry, overwritten_visible_rows, store_hazards
from swa_jax.sizing import format_bytes, ring_cache_bytes, separate_kv_bytes

WINDOW, DRAFT_TOKENS = 128, 5
WINDOW_HELP = "rows a query reads, its own included"
DRAFT_TOKENS_HELP = "most drafts verified in a step; sizes the ring"
TRACE_LIMIT = 4096  # positions, and tokens of a step: a trace is for reading
SEPARATE_HEADS, SEPARATE_WIDTH, BFLOAT16_BYTES = 8, 128, 2  # the layout `size` compares with


class OneLineParser(argparse.ArgumentParser):
    """Reports a bad argument in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        """Exits with status 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      arguments: words after the program's name; None for those of this process.

    Returns:
      Exit status: 0, or 1 where doctor finds that an operation does not run, or where nobody reads
      what is printed. Bad arguments exit with status 2 and one line.
    """
    parser = _parser()
    parsed = parser.parse_args(arguments)
    try:
        status = parsed.run(parsed)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # nobody reads on, as after `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ValueError as error:
        parser.exit(2, f"{parser.prog} {parsed.command}: error: {error}\n")


def size(arguments: argparse.Namespace) -> int:
    """Prints the bytes of a cache, beside separate keys and values."""
    fmt, window, drafts = V41, WINDOW, DRAFT_TOKENS
    if arguments.preset is not None:
        preset = PRESETS[arguments.preset]()
        fmt, arguments.layers = preset.fmt, preset.num_layers
        window, drafts = preset.layers[0].window, preset.layers[0].draft_tokens
    if arguments.format is not None:
        fmt = FORMATS[arguments.format]
    if arguments.head_dim is not None:
        fmt = fmt.with_width(arguments.head_dim)
    geometry = RingGeometry.for_drafts(
        window if arguments.window is None else arguments.window,
        draft_tokens=drafts if arguments.draft_tokens is None else arguments.draft_tokens,
    )
    layers, slots, context = arguments.layers, arguments.slots, arguments.context
    separate = (1, SEPARATE_HEADS, SEPARATE_WIDTH, context, BFLOAT16_BYTES)
    layer_bytes = {
        "ring": ring_cache_bytes(fmt, geometry, layers=1, slots=1),
        "separate_kv_window": separate_kv_bytes(*separate, window=geometry.window),
        "separate_kv_full_context": separate_kv_bytes(*separate),
    }
    caches = {
        name: {
            "layer_bytes": count,
            "request_bytes": count * layers,
            "total_bytes": count * layers * slots,
        }
        for name, count in layer_bytes.items()
    }
    figures = {
        "format": fmt.name,
        "head_dim": fmt.num_elements,
        "row_bytes": fmt.row_bytes,
        "data_bytes": fmt.data_bytes,
        "scale_bytes": fmt.scale_bytes,
        "pad_bytes": fmt.pad_bytes,
        "window": geometry.window,
        "capacity": geometry.capacity,
        "max_tokens_per_step": geometry.max_tokens_per_step,
        "layers": layers,
        "slots": slots,
        "context": context,
        **caches,
    }
    if arguments.json:
        print(json.dumps(figures, indent=2))
        return 0
    layout = f"{SEPARATE_HEADS} heads of {SEPARATE_WIDTH} in bfloat16"
    print(
        f"Row {fmt.name}, {fmt.num_elements} values: {fmt.data_bytes} B data + {fmt.scale_bytes} B "
        f"scales + {fmt.pad_bytes} B pad = {fmt.row_bytes} B\n"
        f"Ring: window {geometry.window}, capacity {geometry.capacity} rows, tokens a step "
        f"at most {geometry.max_tokens_per_step}\n"
        f"Layers {layers}, state slots {slots}"
    )
    for title, name in [
        ("Ring cache", "ring"),
        (f"Separate K and V, {layout}, window {geometry.window}", "separate_kv_window"),
        (f"Separate K and V, {layout}, context {context}", "separate_kv_full_context"),
    ]:
        times = layer_bytes[name] / layer_bytes["ring"]
        print(f"\n{title}" + ("" if name == "ring" else f": {times:,.2f} times the ring cache"))
        for label in ("layer", "request", "total"):
            print(f"  {label:<8} {format_bytes(caches[name][f'{label}_bytes'])}")
    return 0


def trace(arguments: argparse.Namespace) -> int:
    """Prints where queries read and write, and the rows that a step stored first would destroy."""
    drafts = DRAFT_TOKENS if arguments.draft_tokens is None else arguments.draft_tokens
    if arguments.capacity is None:
        geometry = RingGeometry.for_drafts(arguments.window, draft_tokens=drafts)
    else:
        geometry = RingGeometry(arguments.window, arguments.capacity)
    state_id, (first, last) = arguments.state_id, arguments.positions
    left = INT32_MAX - first + 1  # positions, the first included
    tokens = min(drafts + 1, left) if arguments.tokens is None else arguments.tokens
    if tokens > min(left, TRACE_LIMIT):
        raise ValueError(
            f"--tokens: expected at most {min(left, TRACE_LIMIT)} from position {first}, "
            f"got {tokens}"
        )
    largest = 2**31 // geometry.capacity - 1  # slots are int32
    if state_id > largest:
        raise ValueError(
            f"--state-id: expected at most {largest} for capacity {geometry.capacity}, "
            f"got {state_id}"
        )
    jax.config.update("jax_platforms", "cpu")  # a few integers: leave a GPU's memory alone
    positions = np.arange(first, last + 1)
    writes = np.asarray(geometry.slots(state_id, positions))
    reads, lengths = map(np.asarray, geometry.read_bounds(state_id, positions))
    hazards = store_hazards(geometry, first, tokens)
    figures: dict[str, Any] = {
        "window": geometry.window,
        "capacity": geometry.capacity,
        "max_tokens_per_step": geometry.max_tokens_per_step,
        "state_id": state_id,
        "positions": [
            {
                "position": position,
                "first_visible": position - length + 1,
                "last_visible": position,
                "first_read_slot": read,
                "last_read_slot": write,  # the newest visible row is the query's own
                "write_slot": write,
            }
            for position, length, read, write in zip(
                positions.tolist(), lengths.tolist(), reads.tolist(), writes.tolist(), strict=True
            )
        ],
        "step": {
            "first_position": first,
            "tokens": tokens,
            "safe_to_store_first": not hazards,
            "accepted": tokens <= geometry.max_tokens_per_step,
            "overwritten_visible_rows": overwritten_visible_rows(geometry, first, tokens),
            "hazards": [
                {**hazard._asdict(), "queries": list(hazard.queries)} for hazard in hazards
            ],
        },
    }
    print(json.dumps(figures, indent=2) if arguments.json else _trace_report(figures))
    return 0


def doctor(arguments: argparse.Namespace) -> int:
    """Prints what runs here, see `swa_jax.doctor`."""
    del arguments
    return print_diagnosis()


def _trace_report(figures: dict[str, Any]) -> str:
    state, capacity = figures["state_id"], figures["capacity"]
    lines = [
        f"Window {figures['window']}, capacity {capacity}, tokens a step at most "
        f"{figures['max_tokens_per_step']}",
        f"State slot {state} owns slots {state * capacity} to {(state + 1) * capacity - 1}",
        "",
        f"{'position':>10}  {'sees':>23}  {'reads slots, from / to':>23}  {'writes':>10}",
    ]
    for entry in figures["positions"]:
        sees = f"{entry['first_visible']}..{entry['last_visible']}"
        reads = f"{entry['first_read_slot']} / {entry['last_read_slot']}"
        lines.append(f"{entry['position']:>10}  {sees:>23}  {reads:>23}  {entry['write_slot']:>10}")
    step = figures["step"]
    lines += [
        "",
        f"A step of {step['tokens']} tokens from position {step['first_position']} that stores "
        f"before it reads: {_verdict(step)}",
        f"  visible rows overwritten, by query: {step['overwritten_visible_rows']}",
    ]
    for hazard in step["hazards"]:
        queries = hazard["queries"]
        last = "" if len(queries) == 1 else f" to {queries[-1]}"
        lines.append(
            f"  storing {hazard['overwriting_position']} destroys {hazard['destroyed_position']} "
            f"(row {hazard['slot']} of the ring), needed by query {queries[0]}{last}"
        )
    return "\n".join(lines)


def _verdict(step: dict[str, Any]) -> str:
    if not step["safe_to_store_first"]:
        return "NOT SAFE, and refused"
    return "safe" if step["accepted"] else "safe here, but refused: later positions are not"


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m swa_jax",
        description="Sliding-window latent attention with a ring cache: what runs here, what a "
        "cache weighs, where its rows live.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    command = commands.add_parser(
        "doctor",
        help="versions, devices, and which implementation of each operation runs here",
        description="Versions and devices, and one tiny run of both operations under every "
        "implementation. Exit status 1 if the default choice does not run.",
    )
    command.set_defaults(run=doctor)

    command = commands.add_parser(
        "size",
        help="bytes of a cache per layer, request and in total",
        description="Bytes of a ring cache per layer, request and in total, beside separate keys "
        f"and values of {SEPARATE_HEADS} heads of {SEPARATE_WIDTH} in bfloat16.",
    )
    model = command.add_mutually_exclusive_group()
    model.add_argument(
        "--preset", choices=PRESETS, help="layers, rows and window of this model's caches"
    )
    model.add_argument("--layers", type=_number(1), default=32, help="layers (default: 32)")
    command.add_argument(
        "--slots", type=_number(1), default=1, help="state slots, one a request (default: 1)"
    )
    command.add_argument(
        "--window", type=_number(1), help=f"{WINDOW_HELP} (default: the preset's, else {WINDOW})"
    )
    command.add_argument(
        "--draft-tokens",
        type=_number(0),
        help=f"{DRAFT_TOKENS_HELP} (default: the preset's, else {DRAFT_TOKENS})",
    )
    command.add_argument(
        "--format", choices=FORMATS, help="row format (default: the preset's, else V41)"
    )
    command.add_argument(
        "--head-dim", type=_number(1), help="values in a row (default: the format's own)"
    )
    command.add_argument(
        "--context", type=_number(1), default=4096, help="tokens of full context (default: 4096)"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(run=size)

    command = commands.add_parser(
        "trace",
        help="slots that queries read and write, and whether a step may store first",
        description="For each position: the positions it sees, the first and last slot it reads, "
        "the slot it writes. Then the rows that a step from the first position would destroy.",
    )
    command.add_argument(
        "--window", type=_number(1), default=WINDOW, help=f"{WINDOW_HELP} (default: {WINDOW})"
    )
    room = command.add_mutually_exclusive_group()
    room.add_argument("--capacity", type=_number(1), help="rows of a ring")
    room.add_argument(
        "--draft-tokens",
        type=_number(0),
        help=f"{DRAFT_TOKENS_HELP} (default: {DRAFT_TOKENS})",
    )
    command.add_argument("--state-id", type=_number(0), default=0, help="state slot (default: 0)")
    command.add_argument(
        "--positions",
        type=_positions,
        required=True,
        metavar="A:B",
        help=f"query positions A to B, both included, or one; at most {TRACE_LIMIT}",
    )
    command.add_argument(
        "--tokens",
        type=_number(1),
        help=f"tokens of the step, to position {INT32_MAX} at most (default: draft tokens + 1)",
    )
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(run=trace)
    return parser


def _number(minimum: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if not minimum <= value <= INT32_MAX:
            raise argparse.ArgumentTypeError(
                f"expected an integer from {minimum} to {INT32_MAX}, got {text!r}"
            )
        return value

    return integer


def _positions(text: str) -> tuple[int, int]:
    position = _number(0)
    first, colon, last = text.partition(":")
    bounds = position(first), position(last if colon else first)
    if not 0 <= bounds[1] - bounds[0] < TRACE_LIMIT:
        raise argparse.ArgumentTypeError(
            f"expected A:B with A <= B and at most {TRACE_LIMIT} positions, got {text!r}"
        )
    return bounds


if __name__ == "__main__":
    raise SystemExit(main())
