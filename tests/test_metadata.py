"""Metadata of decode, prefill and whole sequences: addresses, padding, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import swa_jax as swa

SMALL = swa.RingGeometry(window=3, capacity=5)
LAST_POSITION = 2**31 - 1

decode = swa.DecodeMetadata.build
prefill = swa.PrefillMetadata.build
sequence = swa.SequenceMetadata.build


# --- decode


def test_a_decode_step_names_the_slots_it_stores_and_the_rows_each_query_reads():
    meta = decode(SMALL, [2, 0], [[3, 4, 5], [0, 1, -1]])
    np.testing.assert_array_equal(meta.positions, [[3, 4, 5], [0, 1, -1]])
    np.testing.assert_array_equal(meta.slots, [13, 14, 10, 0, 1, -1])
    np.testing.assert_array_equal(
        meta.indices,
        [[11, 12, 13], [12, 13, 14], [13, 14, 10], [0, -1, -1], [0, 1, -1], [-1, -1, -1]],
    )
    assert meta.geometry == SMALL
    assert {x.dtype.name for x in jax.tree.leaves(meta)} == {"int32"}


def test_a_decode_step_reaches_the_last_position():
    # 2147483647 % 5 is 2
    meta = decode(SMALL, [1], [[LAST_POSITION - 1, LAST_POSITION]])
    np.testing.assert_array_equal(meta.slots, [6, 7])
    np.testing.assert_array_equal(meta.indices, [[9, 5, 6], [5, 6, 7]])


def test_too_many_tokens_name_window_capacity_tokens_and_the_largest_step():
    geometry = swa.RingGeometry.for_drafts(128)
    decode(geometry, [0], np.arange(7)[None])
    message = r"at most 7 .*window 128 .*capacity 134, got 8"
    with pytest.raises(ValueError, match=message):
        decode(geometry, [0], np.arange(8)[None])
    with pytest.raises(ValueError, match=message):  # T is static: known while tracing
        jax.eval_shape(functools.partial(decode, geometry, [0]), jnp.zeros((1, 8), jnp.int32))


@pytest.mark.parametrize(
    "positions",
    [
        [[3, 5]],  # a gap
        [[3, 3]],
        [[3, 2]],
        [[-1, 3]],  # padding first
        [[3, -1, 4]],
        [[3, -1, 3]],
        [[3, -1, 0]],
    ],
)
def test_positions_of_a_step_are_consecutive_with_padding_last(positions):
    with pytest.raises(ValueError, match=r"positions: expected consecutive .* got \[\["):
        decode(SMALL, [0], positions)


# --- prefill


def test_a_prefill_names_the_old_window_and_the_slots_it_stores():
    # a request that goes on at 4, one that begins, one without tokens
    meta = prefill(SMALL, [1, 0, 2], [4, 0, 7], [2, 3, 0], max_tokens=4)
    np.testing.assert_array_equal(meta.positions, [[4, 5, -1, -1], [0, 1, 2, -1], [-1] * 4])
    np.testing.assert_array_equal(meta.window_slots, [[7, 8], [-1, -1], [-1, -1]])
    np.testing.assert_array_equal(meta.slots, [9, 5, -1, -1, 0, 1, 2, -1, -1, -1, -1, -1])
    assert meta.geometry == SMALL
    assert {x.dtype.name for x in jax.tree.leaves(meta)} == {"int32"}


def test_a_prefill_that_starts_within_the_first_window_has_fewer_old_rows():
    meta = prefill(SMALL, [3], [1], [1], max_tokens=1)
    np.testing.assert_array_equal(meta.window_slots, [[-1, 15]])


def test_of_a_long_prefill_the_last_rows_alone_are_stored():
    meta = prefill(SMALL, [0, 1], [2, 0], [7, 6], max_tokens=8)
    np.testing.assert_array_equal(
        meta.slots, [-1, -1, 4, 0, 1, 2, 3, -1, -1, 6, 7, 8, 9, 5, -1, -1]
    )
    np.testing.assert_array_equal(meta.window_slots, [[0, 1], [-1, -1]])


def test_a_window_of_one_has_no_old_rows():
    meta = prefill(swa.RingGeometry(1, 2), [0, 1], [5, 0], [1, 2], max_tokens=2)
    assert meta.window_slots.shape == (2, 0)
    np.testing.assert_array_equal(meta.slots, [1, -1, 2, 3])


def test_a_prefill_reaches_the_last_position():
    meta = prefill(SMALL, [0], [LAST_POSITION - 1], [2], max_tokens=4)
    np.testing.assert_array_equal(meta.positions, [[LAST_POSITION - 1, LAST_POSITION, -1, -1]])
    np.testing.assert_array_equal(meta.slots, [1, 2, -1, -1])
    with pytest.raises(ValueError, match="starts: expected positions within int32"):
        prefill(SMALL, [0], [LAST_POSITION - 1], [3], max_tokens=4)


@given(
    capacity=st.integers(3, 9),
    requests=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 20)), min_size=3, max_size=3),
)
def test_a_prefill_names_no_slot_twice_and_stores_the_end_of_each_request(capacity, requests):
    geometry = swa.RingGeometry(3, capacity)
    starts, lengths = np.array(requests, np.int32).T
    meta = prefill(geometry, [4, 0, 2], starts, lengths, max_tokens=20)
    slots = np.asarray(meta.slots).reshape(3, 20)
    live = slots[slots >= 0]
    assert len(set(live)) == len(live)
    for state_id, start, length, row in zip([4, 0, 2], starts, lengths, slots, strict=True):
        last = range(start + max(0, length - capacity), start + length)
        assert [slot for slot in row if slot >= 0] == [
            state_id * capacity + position % capacity for position in last
        ]


def test_a_prefill_may_have_as_many_tokens_as_int32_counts():
    build = functools.partial(prefill, SMALL, max_tokens=LAST_POSITION)
    meta = jax.eval_shape(build, *[jax.ShapeDtypeStruct((1,), "int32")] * 3)
    assert meta.slots.shape == (LAST_POSITION,)


# --- what both refuse and take


def test_two_requests_with_tokens_never_share_a_state_slot():
    message = r"state_ids: expected distinct state slots .* got \[1, 0, 1\]"
    with pytest.raises(ValueError, match=message):
        decode(SMALL, [1, 0, 1], [[0], [0], [3]])
    with pytest.raises(ValueError, match=message):
        prefill(SMALL, [1, 0, 1], [0, 0, 0], [1, 1, 1], max_tokens=1)
    for positions in ([[0], [3]], [[0, -1], [3, -1]]):
        with pytest.raises(ValueError, match=r"state_ids: expected distinct .* got \[0, 0\]"):
            decode(SMALL, [0, 0], positions)


def test_requests_without_tokens_or_without_a_slot_may_share_one():
    meta = decode(SMALL, [1, 1, -1, -1], [[0], [-1], [4], [4]])
    np.testing.assert_array_equal(meta.slots, [5, -1, -1, -1])
    meta = prefill(SMALL, [1, 1, -1, -1], [0, 0, 0, 0], [1, 0, 1, 1], max_tokens=1)
    np.testing.assert_array_equal(meta.slots, [5, -1, -1, -1])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: decode(SMALL, [0.0], [[0]]), "state_ids: expected integers, got dtype float64"),
        (lambda: decode(SMALL, [True], [[0]]), "state_ids: expected integers, got dtype bool"),
        (lambda: decode(SMALL, [0], [[0.5]]), "positions: expected integers"),
        (lambda: decode(SMALL, [0], [[2**31]]), "positions: expected int32 values"),
        (lambda: decode(SMALL, [0], [0]), r"positions: expected shape \(any, any\), got \(1,\)"),
        (lambda: decode(SMALL, [0, 1], [[0]]), r"state_ids: expected shape \(1\), got \(2,\)"),
        (lambda: prefill(SMALL, [0.0], [0], [1], max_tokens=1), "state_ids: expected integers"),
        (lambda: prefill(SMALL, 0, 0, 1, max_tokens=1), r"state_ids: expected shape \(any\), got"),
        (lambda: prefill(SMALL, [0], [0.0], [1], max_tokens=1), "starts: expected integers"),
        (lambda: prefill(SMALL, [0], [0], [True], max_tokens=1), "lengths: expected integers"),
        (lambda: prefill(SMALL, [0], [0], [2], max_tokens=1), r"lengths: expected 0 to 1, got \[2"),
        (lambda: prefill(SMALL, [0], [0], [-1], max_tokens=1), "lengths: expected 0 to 1"),
        (
            lambda: prefill(SMALL, [0, 1], [0, 0], [2, 1], max_tokens=1),
            r"lengths: expected 0 to 1, got \[2, 1\]",
        ),
        (lambda: prefill(SMALL, [0], [-1], [1], max_tokens=1), "starts: expected positions within"),
        (
            lambda: prefill(SMALL, [0, 1], [0, -1], [1, 1], max_tokens=1),
            r"starts: expected positions within int32, got \[0, -1\]",
        ),
        (lambda: prefill(SMALL, [0], [0, 1], [1], max_tokens=1), r"starts: expected shape \(1\)"),
        (lambda: prefill(SMALL, [0], [0], [1, 1], max_tokens=1), r"lengths: expected shape \(1\)"),
        (lambda: prefill(SMALL, [0], [0], [1], max_tokens=0), "max_tokens: expected an integer"),
        (lambda: prefill(SMALL, [0], [0], [1], max_tokens=True), "max_tokens: expected an integer"),
        (lambda: prefill(SMALL, [0], [0], [1], max_tokens=2.0), "max_tokens: expected an integer"),
        (lambda: decode(None, [0], [[0]]), "geometry: expected a RingGeometry, got NoneType"),
        (
            lambda: prefill(None, [0], [0], [1], max_tokens=1),
            "geometry: expected a RingGeometry, got NoneType",
        ),
        (
            lambda: prefill(SMALL, [0, 1], [0, 0], [1, 1], max_tokens=2**30),
            "max_tokens: expected at most 2147483647 tokens in all, got 1073741824 for each of 2",
        ),
        (lambda: sequence(1.0, 2), "batch: expected an integer of 0 or more, got 1.0"),
        (lambda: sequence(1, -2), "tokens: expected an integer of 0 or more, got -2"),
        (lambda: sequence(1, 2**40), "tokens: expected at most 2147483647 tokens in all"),
        (lambda: sequence(1, 2, [[0.0, 1.0]]), "positions: expected integers"),
        (lambda: sequence(1, 2, [[0, 1, 2]]), r"positions: expected shape \(1, 2\), got \(1, 3\)"),
        (lambda: sequence(1, 2, None, [0, 1]), r"segment_ids: expected shape \(1, 2\)"),
        (lambda: sequence(1, 3, [[0, 1, 3]]), "positions: expected consecutive .* segment, got"),
        (lambda: sequence(1, 2, [[1, 1]]), "positions: expected consecutive .* segment, got"),
        (
            lambda: sequence(2, 3, [[0, 1, 2], [0, 0, 1]], [[0, 0, 0], [1, 2, 1]]),
            r"segment_ids: expected each .* in one piece, got \[\[0, 0, 0\], \[1, 2, 1\]\]",
        ),
        (
            lambda: sequence(1, 3, [[0, -1, 1]]),
            "segment_ids: expected each segment of a row in one piece",
        ),
    ],
)
def test_what_is_wrong_is_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    "convert", [list, np.int64, np.int16, np.uint8, jnp.int32], ids=lambda f: f.__name__
)
def test_integers_of_every_kind_are_taken(convert):
    meta = decode(SMALL, convert([1]), convert([[3, 4]]))
    np.testing.assert_array_equal(meta.slots, [8, 9])
    meta = prefill(SMALL, convert([1]), convert([3]), convert([2]), max_tokens=2)
    np.testing.assert_array_equal(meta.slots, [8, 9])


def test_metadata_under_jit_is_the_same():
    state_ids, positions = np.int32([2, 0]), np.int32([[3, 4, 5], [0, 1, -1]])
    jitted = jax.jit(functools.partial(decode, SMALL))
    jax.tree.map(
        np.testing.assert_array_equal,
        jitted(state_ids, positions),
        decode(SMALL, state_ids, positions),
    )
    jitted = jax.jit(functools.partial(prefill, SMALL, max_tokens=4))
    arguments = np.int32([1, 0, 2]), np.int32([4, 0, 7]), np.int32([2, 3, 0])
    jax.tree.map(
        np.testing.assert_array_equal,
        jitted(*arguments),
        prefill(SMALL, *arguments, max_tokens=4),
    )


# --- whole sequences


def test_a_row_is_packed_from_sequences_of_any_length_and_first_position():
    positions = [[7, 8, 0, 1, -1, 5], [0, 0, 0, 1, 2, 3], [9, 4, 0, 1, 2, 3]]
    segments = [[1, 1, 0, 0, 0, 3], [4, 3, 2, 2, 2, 2], [-1, -1, 3, 3, 3, 3]]
    meta = sequence(3, 6, positions, segments)
    padding = [[0, 0, 0, 0, 1, 0], [0] * 6, [1, 1, 0, 0, 0, 0]]
    np.testing.assert_array_equal(meta.positions, np.where(padding, -1, positions))
    np.testing.assert_array_equal(meta.segment_ids, np.where(padding, -1, segments))
    assert sequence(2, 0).positions.shape == (2, 0)


def test_a_sequence_is_one_segment_from_position_0_by_default():
    meta = sequence(2, 3)
    np.testing.assert_array_equal(meta.positions, [[0, 1, 2]] * 2)
    np.testing.assert_array_equal(meta.segment_ids, [[0, 0, 0]] * 2)


def test_a_token_without_position_or_segment_is_padding():
    meta = sequence(1, 5, [[0, 1, -1, 0, 0]], [[0, 0, 5, -7, -1]])
    np.testing.assert_array_equal(meta.positions, [[0, 1, -1, -1, -1]])
    np.testing.assert_array_equal(meta.segment_ids, [[0, 0, -1, -1, -1]])
