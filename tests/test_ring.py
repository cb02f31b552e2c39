"""RingGeometry: slots, read bounds, read indices, the capacity rule and the hazard check."""

import functools
import operator

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from swa_jax.ring import RingGeometry, StoreHazard, overwritten_visible_rows, store_hazards

DEFAULT = RingGeometry(window=128, capacity=134)
SMALL = RingGeometry(window=3, capacity=5)
LAST_POSITION = 2**31 - 1


# --- the capacity rule


@pytest.mark.parametrize(
    ("arguments", "capacity"),
    [
        ({}, 134),
        ({"draft_tokens": 0}, 129),
        ({"draft_tokens": 7}, 136),
        ({"backtracking_override": 6}, 134),
        ({"backtracking_override": 20}, 148),
        ({"prefill_extra_size": 64}, 134),  # off: its size does not count
        ({"prefill_extra_state": True}, 262),
        ({"prefill_extra_state": True, "prefill_extra_size": 64}, 198),
        ({"yoco_truncation": True, "yoco_keep_tokens": 10}, 134),  # only inside the extra branch
        ({"prefill_extra_state": True, "yoco_keep_tokens": 10}, 262),
        ({"prefill_extra_state": True, "yoco_truncation": True}, 262),
        ({"prefill_extra_state": True, "yoco_truncation": True, "yoco_keep_tokens": 10}, 272),
    ],
)
def test_capacity_is_the_window_plus_the_room_asked_for(arguments, capacity):
    assert RingGeometry.for_drafts(128, **arguments) == RingGeometry(128, capacity)
    # the smallest window as any other
    assert RingGeometry.for_drafts(1, **arguments) == RingGeometry(1, capacity - 127)


@pytest.mark.parametrize(
    ("window", "capacity", "tokens", "rollback"),
    [
        (128, 134, 7, 6),
        (128, 133, 6, 5),
        (128, 128, 1, 0),
        (3, 5, 3, 2),
        (4, 4, 1, 0),
        (1, 1, 1, 0),
    ],
)
def test_room_for_a_step_and_for_a_rollback(window, capacity, tokens, rollback):
    geometry = RingGeometry(window, capacity)
    assert geometry.max_tokens_per_step == tokens
    assert geometry.max_rollback == rollback
    geometry.check_tokens(tokens)
    geometry.check_tokens(0)
    with pytest.raises(ValueError, match="tokens per step"):
        geometry.check_tokens(tokens + 1)


def test_too_many_tokens_names_window_capacity_tokens_and_the_largest_step():
    with pytest.raises(ValueError, match=r"at most 7 .*window 128 .*capacity 134, got 8"):
        DEFAULT.check_tokens(8)


# --- addresses of the default ring, state slot 2 (slots 268 to 401)


@pytest.mark.parametrize(
    ("state_id", "position", "first_read", "write"),
    [
        (2, 0, 268, 268),
        (2, 127, 268, 395),
        (2, 128, 269, 396),
        (2, 133, 274, 401),
        (2, 134, 275, 268),
        (3, 134, 409, 402),
        (0, LAST_POSITION, 56, 49),  # 2147483647 % 134 = 49, and 49 - 127 + 134 = 56
    ],
)
def test_slots_at_the_window_and_ring_boundaries(state_id, position, first_read, write):
    first, length = DEFAULT.read_bounds(state_id, position)
    indices = np.asarray(DEFAULT.read_indices(state_id, position))
    assert (int(first), int(length)) == (first_read, min(position + 1, 128))
    assert int(DEFAULT.slots(state_id, position)) == write
    assert indices[0] == first_read
    assert indices[indices >= 0][-1] == write


def test_a_wrapped_window_continues_at_the_first_slot_of_its_own_ring():
    indices = np.asarray(DEFAULT.read_indices(2, 134))
    np.testing.assert_array_equal(indices, [*range(275, 402), 268])


def test_read_indices_of_a_small_ring():
    expected = [
        [0, -1, -1],
        [0, 1, -1],
        [0, 1, 2],
        [1, 2, 3],
        [2, 3, 4],
        [3, 4, 0],
        [4, 0, 1],
        [0, 1, 2],
    ]
    np.testing.assert_array_equal(SMALL.read_indices(0, np.arange(8)), expected)


def test_a_window_of_one_reads_its_own_row_only():
    geometry = RingGeometry(window=1, capacity=2)
    np.testing.assert_array_equal(geometry.read_indices(0, np.arange(3)), [[0], [1], [0]])


def test_a_window_of_the_whole_ring_reads_every_row():
    geometry = RingGeometry(window=4, capacity=4)
    np.testing.assert_array_equal(geometry.read_indices(1, 6), [7, 4, 5, 6])


def test_states_never_share_a_slot():
    positions = np.tile(np.arange(3 * 134), (4, 1))
    indices = np.asarray(DEFAULT.read_indices(np.arange(4), positions))
    for state, rows in enumerate(indices):
        assert set(rows.ravel()) - {-1} == set(range(134 * state, 134 * (state + 1)))


# --- padding and what lies outside


def test_padding_has_no_slot_and_reads_nothing():
    positions = np.array([[4, -1], [-(2**31), 5]])
    np.testing.assert_array_equal(SMALL.slots([0, 1], positions), [[4, -1], [-1, 5]])
    first, length = SMALL.read_bounds([0, 1], positions)
    np.testing.assert_array_equal(first, [[2, -1], [-1, 8]])
    np.testing.assert_array_equal(length, [[3, 0], [0, 3]])
    np.testing.assert_array_equal(
        SMALL.read_indices([0, 1], positions),
        [[[2, 3, 4], [-1, -1, -1]], [[-1, -1, -1], [8, 9, 5]]],
    )


def test_a_negative_state_id_is_padding():
    np.testing.assert_array_equal(SMALL.slots([-1, 1], [4, 4]), [-1, 9])
    np.testing.assert_array_equal(SMALL.read_indices([-1], [4]), [[-1, -1, -1]])
    first, length = SMALL.read_bounds(-(2**31), 4)
    assert (int(first), int(length)) == (-1, 0)


def test_a_state_id_beyond_int32_slots_never_wraps_into_another_ring():
    # 429496728 * 5 + 4 = 2147483644; the next state slot would end above 2**31 - 1
    np.testing.assert_array_equal(SMALL.slots([429496728, 429496729], [4, 4]), [2147483644, -1])
    assert int(SMALL.slots(LAST_POSITION, 0)) == -1
    assert int(RingGeometry(1, 1).slots(LAST_POSITION, 7)) == LAST_POSITION


def test_addresses_are_right_in_a_ring_of_almost_all_int32_rows():
    geometry = RingGeometry(window=3, capacity=2**31 - 1)
    indices = geometry.read_indices(0, [2**31 - 3, 2**31 - 2, LAST_POSITION])
    np.testing.assert_array_equal(
        indices,
        [
            [2147483643, 2147483644, 2147483645],
            [2147483644, 2147483645, 2147483646],
            [2147483645, 2147483646, 0],
        ],
    )


# --- against plain Python integers, at every int32 position

COUNT = 8
positions_lists = st.lists(
    st.integers(0, LAST_POSITION) | st.integers(0, 400) | st.integers(2**31 - 400, LAST_POSITION),
    min_size=COUNT,
    max_size=COUNT,
)


@pytest.mark.parametrize(("window", "capacity"), [(128, 134), (3, 5), (4, 4), (1, 1), (5, 1000)])
@given(positions=positions_lists, state_id=st.integers(0, 2**31 // 1000 - 1))
@example(positions=[0, 1, 2, 3, 127, 128, 134, LAST_POSITION], state_id=0)
def test_addresses_agree_with_plain_integers(window, capacity, positions, state_id):
    geometry = RingGeometry(window, capacity)
    result = _jitted_addresses(geometry)(state_id, np.array(positions, np.int32))
    slots, (first, length), indices = jax.tree.map(np.asarray, result)
    for row, position in enumerate(positions):
        seen = [q for q in range(position - window + 1, position + 1) if q >= 0]
        expected = [state_id * capacity + q % capacity for q in seen]
        assert slots[row] == expected[-1]
        assert (first[row], length[row]) == (expected[0], len(expected))
        assert indices[row].tolist() == expected + [-1] * (window - len(expected))


@functools.cache
def _jitted_addresses(geometry):
    def addresses(state_id, positions):
        return (
            geometry.slots(state_id, positions),
            geometry.read_bounds(state_id, positions),
            geometry.read_indices(state_id, positions),
        )

    return jax.jit(addresses)


# --- shapes, dtypes, transformations


@pytest.mark.parametrize("state_shape", [(), (2,), (2, 3)])
def test_state_ids_have_leading_axes_of_positions(state_shape):
    state_ids = np.arange(np.prod(state_shape, dtype=int)).reshape(state_shape)
    positions = np.arange(6).reshape(2, 3)
    slots = SMALL.slots(state_ids, positions)
    first, length = SMALL.read_bounds(state_ids, positions)
    indices = SMALL.read_indices(state_ids, positions)
    chex.assert_shape((slots, first, length), (2, 3))
    chex.assert_shape(indices, (2, 3, 3))
    chex.assert_type((slots, first, length, indices), jnp.int32)
    full = np.broadcast_to(state_ids.reshape(*state_shape, *[1] * (2 - len(state_shape))), (2, 3))
    np.testing.assert_array_equal(slots, full * 5 + positions % 5)


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_no_positions_give_no_slots(shape):
    positions = np.zeros(shape, np.int32)
    chex.assert_shape(SMALL.slots(0, positions), shape)
    chex.assert_shape(SMALL.read_indices(0, positions), (*shape, 3))


@pytest.mark.parametrize("integer", [int, np.int8, np.int64, np.uint16, jnp.int32])
def test_integers_of_any_kind_are_taken(integer):
    assert int(SMALL.slots(integer(2), integer(7))) == 12


def test_jit_and_vmap_change_nothing():
    state_ids, positions = jnp.array([2, 0]), jnp.array([[134, 5, -1], [0, 127, 128]])
    for method in ("slots", "read_bounds", "read_indices"):
        call = operator.attrgetter(method)(DEFAULT)
        expected = call(state_ids, positions)
        chex.assert_trees_all_equal(jax.jit(call)(state_ids, positions), expected)
        chex.assert_trees_all_equal(jax.vmap(call)(state_ids, positions), expected)


def test_a_geometry_is_a_static_argument():
    @jax.jit(static_argnums=0)
    def slots(geometry, positions):
        return geometry.slots(1, positions)

    assert int(slots(RingGeometry(3, 5), 7)) == 7
    assert int(slots(RingGeometry(3, 6), 7)) == 7
    assert hash(RingGeometry(np.int64(3), 5)) == hash(SMALL)
    assert RingGeometry(np.int64(3), 5) == SMALL


# --- bad input


@pytest.mark.parametrize(
    ("window", "capacity", "message"),
    [
        (0, 5, "window: expected at least 1, got 0"),
        (-3, 5, "window: expected at least 1, got -3"),
        (3, 2, r"capacity: expected window \(3\) <= capacity < 2\*\*31, got 2"),
        (3, 2**31, r"capacity: .* got 2147483648"),
        (True, 5, "window: expected an int, got True"),
        (3, 5.0, "capacity: expected an int, got 5.0"),
        ("3", 5, "window: expected an int, got '3'"),
        (3, None, "capacity: expected an int, got None"),
        (3, np.bool_(True), "capacity: expected an int"),
    ],
)
def test_a_bad_geometry_is_refused(window, capacity, message):
    with pytest.raises(ValueError, match=message):
        RingGeometry(window, capacity)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"draft_tokens": -1}, "draft_tokens: expected at least 0, got -1"),
        ({"draft_tokens": 5.0}, "draft_tokens: expected an int, got 5.0"),
        ({"backtracking_override": -1}, "backtracking_override: expected at least 0, got -1"),
        ({"backtracking_override": True}, "backtracking_override: expected an int, got True"),
        ({"prefill_extra_size": -128}, "prefill_extra_size: expected at least 0, got -128"),
        ({"yoco_keep_tokens": -1}, "yoco_keep_tokens: expected at least 0, got -1"),
        ({"prefill_extra_state": 1}, "prefill_extra_state: expected a bool, got 1"),
        ({"yoco_truncation": "no"}, "yoco_truncation: expected a bool, got 'no'"),
    ],
)
def test_a_bad_draft_configuration_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        RingGeometry.for_drafts(128, **arguments)


@pytest.mark.parametrize(
    ("state_ids", "positions", "message"),
    [
        ([0, 1, 2], np.zeros((2, 3), int), r"state_ids: .*positions \(2, 3\).*got \(3,\)"),
        (np.zeros((2, 1), int), np.zeros((2, 3), int), r"state_ids: .* got \(2, 1\)"),
        ([0, 1], 3, r"state_ids: .* got \(2,\)"),
        (0, 1.0, "positions: .*float"),
        (0.0, 1, "state_ids: .*float"),
        (0, True, "positions: .*bool"),
        (0, 2**31, "positions: .* 2147483648"),
        (-(2**31) - 1, 0, "state_ids: .* -2147483649"),
    ],
)
@pytest.mark.parametrize("method", ["slots", "read_bounds", "read_indices"])
def test_bad_addresses_are_refused(method, state_ids, positions, message):
    with pytest.raises(ValueError, match=message):
        operator.attrgetter(method)(SMALL)(state_ids, positions)


@pytest.mark.parametrize("tokens", [-1, True, 2.0, None])
def test_a_bad_number_of_tokens_is_refused(tokens):
    for check in (
        DEFAULT.check_tokens,
        lambda tokens: store_hazards(DEFAULT, 0, tokens),
        lambda tokens: overwritten_visible_rows(DEFAULT, 0, tokens),
    ):
        with pytest.raises(ValueError, match=r"tokens: expected .*, got"):
            check(tokens)


# --- hazards


@pytest.mark.parametrize("check", [store_hazards, overwritten_visible_rows])
def test_a_first_position_below_0_is_refused(check):
    with pytest.raises(ValueError, match="first_position: expected at least 0, got -1"):
        check(DEFAULT, -1, 1)


@pytest.mark.parametrize("first_position", [134, 500, 10**12])
@pytest.mark.parametrize(
    ("capacity", "lost"), [(128, [5, 4, 3, 2, 1, 0]), (133, [0] * 6), (134, [0] * 6)]
)
def test_visible_rows_overwritten_by_a_verify_step(capacity, lost, first_position):
    assert overwritten_visible_rows(RingGeometry(128, capacity), first_position, 6) == lost


def test_nothing_is_overwritten_before_the_ring_is_full():
    ring = RingGeometry(128, 128)
    assert overwritten_visible_rows(ring, 0, 128) == [0] * 128
    # the window of query 126 begins at 0, and 128 .. 131 take the slots of 0 .. 3
    assert overwritten_visible_rows(ring, 126, 6) == [4, 4, 3, 2, 1, 0]


@pytest.mark.parametrize(
    ("last_position", "hazards"),
    [
        (6, []),
        (7, [StoreHazard(2, 7, 2, (4,))]),
        (8, [StoreHazard(2, 7, 2, (4,)), StoreHazard(3, 8, 3, (4, 5))]),
    ],
)
def test_hazards_of_a_prefill_chunk_that_stored_first(last_position, hazards):
    assert store_hazards(SMALL, 4, last_position - 3) == hazards


def test_a_run_longer_than_the_ring_destroys_rows_of_its_own():
    # W 2, S 2: storing 2 takes the slot of 0, needed by queries 0 and 1, and so on
    assert store_hazards(RingGeometry(2, 2), 0, 4) == [
        StoreHazard(0, 2, 0, (0, 1)),
        StoreHazard(1, 3, 1, (1, 2)),
    ]


@given(
    window=st.integers(1, 8),
    room=st.integers(0, 6),
    first_position=st.integers(0, 60),
    tokens=st.integers(0, 24),
)
def test_hazards_agree_with_a_ring_that_is_written(window, room, first_position, tokens):
    geometry = RingGeometry(window, window + room)
    ring = {}
    for position in range(first_position + tokens):  # the prefix, then the step, all stored
        ring[position % geometry.capacity] = position
    lost = []
    for query in range(first_position, first_position + tokens):
        seen = range(max(0, query - window + 1), query + 1)
        lost.append(sum(ring[position % geometry.capacity] != position for position in seen))
    assert overwritten_visible_rows(geometry, first_position, tokens) == lost
    hazards = store_hazards(geometry, first_position, tokens)
    assert sum(len(hazard.queries) for hazard in hazards) == sum(lost)
    if tokens <= geometry.max_tokens_per_step:
        assert not hazards


@given(window=st.integers(1, 8), room=st.integers(0, 6))
def test_one_token_more_than_allowed_is_a_hazard_once_the_window_is_full(window, room):
    geometry = RingGeometry(window, window + room)
    tokens = geometry.max_tokens_per_step + 1
    assert store_hazards(geometry, 2 * geometry.capacity, tokens - 1) == []
    assert store_hazards(geometry, 2 * geometry.capacity, tokens) != []
