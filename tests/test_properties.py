"""Rules that hold for every value: addresses, bytes of free rows, and rows through store and read.

Examples are values only; shapes are few, so that a program serves all of them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as reference
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import swa_jax as swa
from pallas_kernels import V41_FP4, KVRows, fused_store, indexed_attention

pytestmark = [pytest.mark.quick_compilation, pytest.mark.makes_nan]

LAST = 2**31 - 1


# --- addresses, against Python integers

integers = st.integers(-1, 40) | st.integers(LAST - 40, LAST) | st.integers(-(2**31), LAST)
# Sizes that divide 2**31 evenly, nearly, and not at all.
capacities = (
    st.integers(7, 40)
    | st.sampled_from([2**30 - 1, 2**30, 2**30 + 1])
    | st.integers(LAST - 40, LAST)
    | st.integers(7, LAST)
)
COUNT = 6
lists = st.lists(integers, min_size=COUNT, max_size=COUNT)


def slot_of(capacity: int, state_id: int, position: int) -> int:
    """b * S + p % S; -1 for what is negative, and in a ring whose end int32 does not reach."""
    if position < 0 or state_id < 0 or (state_id + 1) * capacity > 2**31:
        return -1
    return state_id * capacity + position % capacity


@pytest.mark.parametrize("window", [1, 3, 7])
@given(capacity=capacities, state_ids=lists, positions=lists)
@example(capacity=LAST, state_ids=[0] * 6, positions=[0, 6, LAST - 2, LAST - 1, LAST, -1])
@example(capacity=2**30, state_ids=[0, 1, 2, 1, 3, LAST], positions=[LAST] * 6)
def test_addresses_are_those_of_plain_integers_in_a_ring_of_any_size(
    window, capacity, state_ids, positions
):
    geometry = swa.RingGeometry(window, capacity)
    arguments = np.asarray(state_ids, np.int32), np.asarray(positions, np.int32)
    slots = np.asarray(geometry.slots(*arguments))
    first, length = (np.asarray(part) for part in geometry.read_bounds(*arguments))
    indices = np.asarray(geometry.read_indices(*arguments))
    for row, (state_id, position) in enumerate(zip(state_ids, positions, strict=True)):
        seen = range(max(0, position - window + 1), position + 1)
        want = [slot_of(capacity, state_id, key) for key in seen]
        if not want or want[-1] < 0:
            want = []
        assert slots[row] == (want or [-1])[-1]
        assert (first[row], length[row]) == ((want or [-1])[0], len(want))
        assert indices[row].tolist() == want + [-1] * (window - len(want))


starts = st.integers(0, 40) | st.integers(LAST - 40, LAST) | st.integers(0, LAST)


@given(
    capacity=capacities,
    first_state=st.integers(0, 3),
    chunks=st.lists(st.tuples(starts, st.integers(0, 8)), min_size=3, max_size=3),
)
@example(capacity=7, first_state=0, chunks=[(LAST, 1), (LAST - 7, 8), (0, 8)])
@example(capacity=LAST, first_state=0, chunks=[(LAST - 3, 4), (3, 8), (0, 0)])
def test_metadata_names_those_addresses_whatever_the_size_of_the_ring(
    capacity, first_state, chunks
):
    window, width = 3, 8
    geometry = swa.RingGeometry(window, capacity)
    state_ids = [first_state + row for row in range(3)]
    runs = [range(start, min(start + length, LAST + 1)) for start, length in chunks]
    slot = functools.partial(slot_of, capacity)

    meta = swa.PrefillMetadata.build(
        geometry,
        np.int32(state_ids),
        np.asarray([run.start for run in runs], np.int32),
        np.asarray([len(run) for run in runs], np.int32),
        max_tokens=width,
    )
    padded = [[*run, *[-1] * (width - len(run))] for run in runs]
    np.testing.assert_array_equal(meta.positions, padded)
    for row, (state_id, run) in enumerate(zip(state_ids, runs, strict=True)):
        before = [key if run else -1 for key in range(run.start - window + 1, run.start)]
        assert np.asarray(meta.window_slots)[row].tolist() == [slot(state_id, k) for k in before]
        lost = max(0, len(run) - capacity)
        stored = [-1] * lost + [slot(state_id, key) for key in run[lost:]]
        got = np.asarray(meta.slots).reshape(3, width)[row].tolist()
        assert got == stored + [-1] * (width - len(run))

    tokens = 5  # fits a ring of 7
    positions = np.asarray([row[:tokens] for row in padded], np.int32)
    step = swa.DecodeMetadata.build(geometry, np.int32(state_ids), positions)
    indices = np.asarray(step.indices).reshape(3, tokens, window)
    for row, (state_id, run) in enumerate(zip(state_ids, runs, strict=True)):
        for token, query in enumerate(run[:tokens]):
            keys = range(max(0, query - window + 1), query + 1)
            want = [slot(state_id, key) for key in keys]
            want = want if want[-1] >= 0 else []
            assert indices[row, token].tolist() == want + [-1] * (window - len(want))
        assert np.all(indices[row, len(run) :] == -1)
    np.testing.assert_array_equal(
        step.slots, [slot(b, p) for b, row in zip(state_ids, positions, strict=True) for p in row]
    )


# --- rows through store and read, whatever stands in the others

TOKENS, SLOTS, ROWS_PER_SLOT, NAMED, HALF = 4, 3, 4, 3, 8
STORABLE = [swa.V41.with_width(64), swa.V4.with_width(128), swa.BF16.with_width(64)]
STORABLE += [swa.F32.with_width(64), V41_FP4.with_width(64)]
by_format = pytest.mark.parametrize("fmt", STORABLE, ids=lambda fmt: fmt.name)


@functools.cache
def store_and_read(fmt: swa.KVCacheFormat, floor: str, pairing: str):
    """Stores tokens, then averages the rows that each index list names."""

    @jax.jit
    def call(block, latents, slots, norm_weight, cos, sin, indices):
        rows = KVRows.view(block, start=32, rows_per_slot=ROWS_PER_SLOT, fmt=fmt)
        rows = fused_store(
            rows,
            latents,
            slots,
            norm_weight=norm_weight,
            norm_eps=1e-20,  # nothing beside a mean square of 1
            cos=cos,
            sin=sin,
            pairing=pairing,
            scale_floor=floor,
        )
        q = jnp.zeros((indices.shape[0], 2, fmt.num_elements), jnp.float32)
        return rows.data, indexed_attention(q, rows, indices)[0]

    return call


def rotated(rows: np.ndarray, cos: np.ndarray, sin: np.ndarray, pairing: str) -> np.ndarray:
    """The last 2 * half values in pairs (a, b), as (a cos - b sin, b cos + a sin), in float32."""
    rows, start = rows.copy(), rows.shape[1] - 2 * HALF
    if pairing == "interleaved":
        first, second = slice(start, None, 2), slice(start + 1, None, 2)
    else:
        first, second = slice(start, start + HALF), slice(start + HALF, None)
    a, b = rows[:, first].copy(), rows[:, second].copy()
    rows[:, first], rows[:, second] = a * cos - b * sin, b * cos + a * sin
    return rows


def check_store_and_read(fmt, floor, pairing, seed, weights, slots, indices, pattern):
    """Bytes exact, averages to float32, and no other byte changed.

    Latents are +1 and -1, so that a row before its rotation is the weights with signs; a rotation
    by quarter turns moves values and changes none.
    """
    random = np.random.default_rng(seed)
    width = fmt.num_elements
    norm_weight = np.resize(np.asarray(weights, np.float32), width)
    latents = random.choice(np.float32([-1, 1]), (TOKENS, width))
    quarter = random.integers(0, 4, (TOKENS, HALF))
    cos, sin = np.float32([1, 0, -1, 0])[quarter], np.float32([0, 1, 0, -1])[quarter]
    size = 32 + ROWS_PER_SLOT * fmt.row_bytes
    block = np.resize(np.frombuffer(pattern, np.uint8), (SLOTS, size + 5)).copy()

    with np.errstate(invalid="ignore"):  # a weight may be infinite
        rows = rotated(latents * norm_weight, cos, sin, pairing)
    data = reference.quantize(rows, fmt, floor)
    want, values = block.copy(), {}
    for row, slot in enumerate(slots):
        if 0 <= slot < SLOTS * ROWS_PER_SLOT:
            first = 32 + slot % ROWS_PER_SLOT * fmt.row_bytes
            want[slot // ROWS_PER_SLOT, first : first + fmt.row_bytes] = data[row]
            values[slot] = reference.dequantize(data[row : row + 1], fmt)[0]
    # An index names a row that was stored, or none: what stands in the others is anything.
    named = [[slots[i] if slots[i] in values else -1 for i in row] for row in indices]
    got, out = store_and_read(fmt, floor, pairing)(
        block, latents, np.int32(slots), norm_weight, cos, sin, np.int32(named)
    )
    np.testing.assert_array_equal(got, want)
    for row, entries in enumerate(named):
        seen = [values[slot] for slot in entries if slot >= 0]
        mean = np.mean(seen, axis=0) if seen else np.zeros(width)
        error = 0.0
        if len(seen) > 1:  # a weighted value below the smallest normal number is flushed to 0
            tiny = float(np.finfo(np.float32).tiny)
            error = 3e-6 * np.nan_to_num(np.abs(seen)).max() + len(seen) * tiny
        for head in np.asarray(out, np.float64)[row]:
            np.testing.assert_allclose(head, mean, rtol=0, atol=error)


patterns = st.sampled_from([b"\x00", b"\xff", b"\xfe", b"\x7f", b"\x00\x00\xc0\x7f"]) | st.binary(
    min_size=1, max_size=7
)


@by_format
@pytest.mark.parametrize(
    ("floor", "pairing"),
    [
        ("amax", "interleaved"),
        ("scale", "half_split"),
        pytest.param("amax", "half_split", marks=pytest.mark.slow),
        pytest.param("scale", "interleaved", marks=pytest.mark.slow),
    ],
)
@given(
    seed=st.integers(0, 2**32 - 1),
    weights=st.lists(
        st.floats(2.0**-20, 2.0**20, width=32)
        | st.sampled_from([0.0, 1e-4, 2.0**-30, 448.0, 449.0, 3.0e38, np.inf, np.nan])
        | st.floats(width=32, allow_subnormal=False),
        min_size=1,
        max_size=9,
    ),
    slots=st.lists(
        st.integers(-1, SLOTS * ROWS_PER_SLOT) | st.sampled_from([-(2**31), LAST]),
        min_size=TOKENS,
        max_size=TOKENS,
        unique=True,
    ),
    indices=st.lists(
        st.lists(st.integers(0, TOKENS - 1), min_size=NAMED, max_size=NAMED), min_size=3, max_size=3
    ),
    pattern=patterns,
)
@example(seed=0, weights=[2.0**-126], slots=[0, 1, -1, -5], indices=[[0] * 3] * 3, pattern=b"\0")
def test_rows_come_back_as_their_format_says(
    fmt, floor, pairing, seed, weights, slots, indices, pattern
):
    check_store_and_read(fmt, floor, pairing, seed, weights, slots, indices, pattern)


@by_format
def test_no_byte_of_a_row_that_nobody_names_matters(fmt):
    for byte in range(256):
        check_store_and_read(
            fmt, "amax", "interleaved", byte, [1.0, 0.5, 3.0], [9, -1, 5, 1],
            [[0, 2, 3], [1, 1, 1], [3, 1, 0]], bytes([byte]),
        )  # fmt: skip
