"""The figures that the documentation's pictures are drawn from, each computed by the library."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pallas_kernels import V41, V41_FP4
from pallas_kernels.indexed_attention import triton_tiles
from swa_jax.ring import RingGeometry, overwritten_visible_rows, store_hazards

SMALL = RingGeometry(window=4, capacity=6)
SMALL_POSITIONS = 12
CHUNK_FIRST, CHUNK_TOKENS = 6, 6
RING = RingGeometry.for_drafts(128, draft_tokens=5)
BOUNDARY = range(127, 141)
VERIFY_CAPACITIES, VERIFY_TOKENS = range(128, 137), range(1, 10)
LATE = 1000  # a position at which every ring of the table has wrapped
HEADS, WINDOW_COLUMNS, EXTRA_COLUMNS = 64, 128, 512
CARDS = {"H200": "NVIDIA H200", "A100": "NVIDIA A100-SXM4-80GB"}


def band() -> dict[str, Any]:
    """For each query the key positions that it sees, and the rows of the ring they lie in."""
    positions = np.arange(SMALL_POSITIONS)
    rows = np.asarray(SMALL.read_indices(0, positions)).tolist()
    _, lengths = SMALL.read_bounds(0, positions)
    return {
        "window": SMALL.window,
        "capacity": SMALL.capacity,
        "queries": [
            {
                "position": query,
                "keys": list(range(query - count + 1, query + 1)),
                "rows": row[:count],
            }
            for query, count, row in zip(
                positions.tolist(), np.asarray(lengths).tolist(), rows, strict=True
            )
        ],
    }


def ring() -> dict[str, Any]:
    """The rows of one ring while it fills and wraps: read, kept, written and replaced."""
    positions = np.array(BOUNDARY)
    reads = np.asarray(RING.read_indices(0, positions))
    writes = np.asarray(RING.slots(0, positions))
    return {
        "window": RING.window,
        "capacity": RING.capacity,
        "queries": [
            {
                "position": position,
                "first_visible": position - RING.window + 1,
                "reads": runs(row),
                "writes": write,
                "replaces": position - RING.capacity if position >= RING.capacity else None,
                "stored": min(position + 1, RING.capacity),
            }
            for position, row, write in zip(
                positions.tolist(), reads.tolist(), writes.tolist(), strict=True
            )
        ],
    }


def chunk() -> dict[str, Any]:
    """A chunk of a prompt that stores before it reads: what the ring holds, what queries lose."""
    end = CHUNK_FIRST + CHUNK_TOKENS
    slots = np.asarray(SMALL.slots(0, np.arange(end))).tolist()
    _, lengths = SMALL.read_bounds(0, np.arange(end))
    held: list[int] = [-1] * SMALL.capacity
    states = []
    for position in range(end):
        held[slots[position]] = position
        if position >= CHUNK_FIRST - 1:
            states.append(list(held))
    hazards = store_hazards(SMALL, CHUNK_FIRST, CHUNK_TOKENS)
    return {
        "window": SMALL.window,
        "capacity": SMALL.capacity,
        "slots": slots[CHUNK_FIRST:],
        "states": states,
        "destroyed": {
            str(hazard.overwriting_position): hazard.destroyed_position for hazard in hazards
        },
        "queries": [
            {
                "position": query,
                "needs": list(range(query - int(lengths[query]) + 1, query + 1)),
                "lost": [h.destroyed_position for h in hazards if query in h.queries],
            }
            for query in range(CHUNK_FIRST, end)
        ],
    }


def verify() -> dict[str, Any]:
    """Visible rows that the first query of a step loses, by tokens and by rows of a ring."""
    rings = [RingGeometry(RING.window, capacity) for capacity in VERIFY_CAPACITIES]
    return {
        "window": RING.window,
        "default": RING.capacity,
        "capacities": list(VERIFY_CAPACITIES),
        "tokens": list(VERIFY_TOKENS),
        "lost": [
            [overwritten_visible_rows(ring, LATE, tokens)[0] for ring in rings]
            for tokens in VERIFY_TOKENS
        ],
    }


def tiles() -> dict[str, Any]:
    """The blocks of heads and of index columns that each program of a query reads."""
    lists = [("window", V41, WINDOW_COLUMNS), ("compressed", V41_FP4, EXTRA_COLUMNS)]
    return {
        "heads": HEADS,
        "window_columns": WINDOW_COLUMNS,
        "extra_columns": EXTRA_COLUMNS,
        "cases": [_tiled("H200", lists[:1]), _tiled("H200", lists), _tiled("A100", lists)],
    }


def _tiled(card: str, lists: Sequence[tuple[str, Any, int]]) -> dict[str, Any]:
    columns = [count for _, _, count in lists]
    tile = triton_tiles.choose_tile(CARDS[card], [fmt for _, fmt, _ in lists], columns)
    pieces = triton_tiles.num_pieces(sum(columns))
    blocks = []
    for name, _, count in lists:
        of_piece = triton_tiles.blocks_of_piece(count, tile, pieces)
        for block in range(-(-count // tile.keys)):
            first = block * tile.keys
            end = min(first + tile.keys, count)
            blocks.append({"list": name, "piece": block // of_piece, "first": first, "end": end})
    return {
        "card": card,
        "heads": tile.heads,
        "keys": tile.keys,
        "pieces": pieces,
        "programs": pieces * -(-HEADS // tile.heads),
        "blocks": blocks,
    }


def runs(numbers: Sequence[int]) -> list[list[int]]:
    """Numbers in their order as runs of neighbours, [first, last] each."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found
