"""KVRows: which bytes a load reads and a store writes, and which they never touch."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import BF16, V41, KVCacheFormat, KVRows
from pallas_kernels import load_rows as load_eagerly
from pallas_kernels import store_rows as store_eagerly

FMT = V41.with_width(64)  # 66 bytes, so that a row starts at no multiple of anything
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
NOTHING = [-1, INT_MIN, 12, 13, 15, 1000, INT_MAX]  # of 4 slots of 3 rows
TRACES = []


@jax.jit
def load_rows(rows, indices):
    return load_eagerly(rows, indices)


@jax.jit
def store_rows(rows, data, slots):
    TRACES.append(slots.shape)
    return store_eagerly(rows, data, slots)


def random_bytes(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 256, shape, np.uint8))


def view(start=64, seed=0):
    """4 slots of 3 rows, in a block whose other bytes are not zero."""
    block = random_bytes(4, 512, seed=seed)
    return KVRows.view(block, start=start, rows_per_slot=3, fmt=FMT)


def stored_by_hand(rows, data, slots):
    """The block after a store, by one slice assignment for each token."""
    block, size = np.array(rows.data), rows.fmt.row_bytes
    for row, slot in zip(np.asarray(data), np.asarray(slots).tolist(), strict=True):
        if 0 <= slot < rows.num_rows:
            first = int(rows.start) + slot % rows.rows_per_slot * size
            block[slot // rows.rows_per_slot, first : first + size] = row
    return block


def test_create_gives_zeros_in_slots_padded_to_32_bytes():
    rows = KVRows.create(4, 3, FMT)
    chex.assert_shape(rows.data, (4, 224))  # 3 * 66 = 198
    assert not np.any(rows.data)
    assert (rows.num_rows, int(rows.start), rows.rows_per_slot, rows.fmt) == (12, 0, 3, FMT)
    chex.assert_shape(KVRows.create(2, 134).data, (2, 70_752))


@given(st.permutations(range(12)), st.integers(0, 2**32 - 1), st.integers(0, 8))
def test_load_gives_what_was_stored_and_no_other_byte_changes(order, seed, start):
    rows, data = view(32 * start, seed), random_bytes(5, 66, seed=seed + 1)
    slots = jnp.asarray(order[:5], jnp.int32)
    before = np.array(rows.data)
    stored = store_rows(rows, data, slots)
    np.testing.assert_array_equal(load_rows(stored, slots), data)
    np.testing.assert_array_equal(stored.data, stored_by_hand(rows, data, slots))
    np.testing.assert_array_equal(rows.data, before)  # the input is a value


def test_row_i_is_row_i_modulo_s_of_slot_i_over_s():
    rows = view(start=96)
    for index in (0, 2, 3, 7, 11):
        first = 96 + index % 3 * 66
        expected = rows.data[index // 3, first : first + 66]
        np.testing.assert_array_equal(load_rows(rows, jnp.asarray([index] * 5))[0], expected)


def test_logical_is_slots_rows_1_bytes():
    rows = view()
    logical = jax.jit(KVRows.logical)(rows)
    chex.assert_shape(logical, (4, 3, 1, 66))
    loaded = load_rows(rows, jnp.arange(12)).reshape(4, 3, 1, 66)
    np.testing.assert_array_equal(logical, loaded)


@pytest.mark.parametrize("index", NOTHING)
def test_an_index_outside_the_rows_names_none(index):
    rows, data = view(), random_bytes(5, 66, seed=1)
    slots = jnp.asarray([3, index, 11, index, 0], jnp.int32)
    loaded = load_rows(rows, slots)
    assert not np.any(loaded[1::2])
    np.testing.assert_array_equal(loaded[::2], load_rows(rows, jnp.asarray([3, 11, 0])))
    stored = store_rows(rows, data, slots)
    np.testing.assert_array_equal(stored.data, stored_by_hand(rows, data, slots))
    # Written out once: row 11 is the last, which a wrapped -1 would overwrite.
    np.testing.assert_array_equal(load_rows(stored, jnp.asarray([11]))[0], data[2])


def test_a_store_of_nothing_but_skipped_tokens_changes_nothing():
    rows = view()
    slots = jnp.asarray([-1, INT_MIN, 12, INT_MAX, -1], jnp.int32)
    stored = store_rows(rows, random_bytes(5, 66, seed=1), slots)
    np.testing.assert_array_equal(stored.data, rows.data)


def test_zero_tokens():
    rows = view()
    stored = store_rows(rows, jnp.zeros((0, 66), jnp.uint8), jnp.zeros(0, jnp.int32))
    np.testing.assert_array_equal(stored.data, rows.data)
    chex.assert_shape(load_rows(rows, jnp.zeros((0, 3), jnp.int32)), (0, 3, 66))


def test_another_start_does_not_recompile():
    data, slots = random_bytes(5, 66, seed=2), jnp.asarray([0, 11, -1, 5, 6], jnp.int32)
    store_rows(view(start=0), data, slots)
    traces = len(TRACES)
    for start in (32, 64, 288):
        rows = view(start)
        stored = store_rows(rows, data, slots)
        np.testing.assert_array_equal(stored.data, stored_by_hand(rows, data, slots))
    assert len(TRACES) == traces


def test_start_may_be_traced():
    @jax.jit
    def load(block, start):
        rows = KVRows.view(block, start=start, rows_per_slot=3, fmt=FMT)
        return load_eagerly(rows, jnp.arange(12))

    rows = view(start=96)
    expected = load_rows(rows, jnp.arange(12))
    np.testing.assert_array_equal(load(rows.data, jnp.int32(96)), expected)


def test_views_of_one_block_do_not_touch_each_other():
    block = random_bytes(4, 512)
    data = random_bytes(12, 66, seed=1)
    first = KVRows.view(block, start=0, rows_per_slot=3, fmt=FMT)
    block = store_rows(first, data, jnp.arange(12)).data
    second = KVRows.view(block, start=224, rows_per_slot=3, fmt=FMT)
    block = store_rows(second, data[::-1], jnp.arange(12)).data
    both = [KVRows.view(block, start=s, rows_per_slot=3, fmt=FMT) for s in (0, 224)]
    np.testing.assert_array_equal(load_rows(both[0], jnp.arange(12)), data)
    np.testing.assert_array_equal(load_rows(both[1], jnp.arange(12)), data[::-1])


def test_vmap_is_a_loop():
    blocks = random_bytes(3, 4, 224)
    starts = jnp.asarray([0, 0, 0], jnp.int32)
    data, slots = random_bytes(3, 2, 66, seed=1), jnp.asarray([[0, 11], [-1, 4], [12, 3]])
    batched = KVRows(blocks, starts, 3, FMT)
    stored = jax.jit(jax.vmap(store_eagerly))(batched, data, slots)
    loaded = jax.jit(jax.vmap(load_eagerly))(stored, slots)
    for i in range(3):
        one = KVRows(blocks[i], starts[i], 3, FMT)
        expected = store_rows(one, data[i], slots[i])
        np.testing.assert_array_equal(stored.data[i], expected.data)
        np.testing.assert_array_equal(loaded[i], load_rows(expected, slots[i]))


@pytest.mark.parametrize(
    "index",
    [
        5,
        np.int64(5),
        np.asarray(5, np.uint8),
        np.asarray([[5]], np.int64),
        np.asarray([5], np.uint64),
        jnp.asarray([5], jnp.uint8),
        jnp.asarray([5], jnp.int16),
        [5],
    ],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', '')}",
)
def test_indices_may_be_integers_of_any_kind(index):
    rows = view()
    loaded = load_eagerly(rows, index)
    chex.assert_shape(loaded, (*np.shape(index), 66))
    np.testing.assert_array_equal(loaded.reshape(66), rows.logical()[1, 2, 0])
    stored = store_eagerly(rows, loaded ^ jnp.uint8(0xFF), index)
    np.testing.assert_array_equal(stored.logical()[1, 2, 0], loaded.reshape(66) ^ 0xFF)


def test_a_block_of_rows_is_a_pytree_with_a_static_format():
    rows = view()
    leaves, structure = jax.tree.flatten(rows)
    assert [leaf.shape for leaf in leaves] == [(4, 512), ()]
    assert structure == jax.tree.structure(view(start=0))
    assert structure != jax.tree.structure(KVRows.create(4, 3, BF16.with_width(33)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        rows.data = leaves[0]


def abstract_view(slots, slot_bytes, rows_per_slot, fmt):
    block = jax.ShapeDtypeStruct((slots, slot_bytes), jnp.uint8)
    return jax.eval_shape(
        lambda block: KVRows.view(block, start=0, rows_per_slot=rows_per_slot, fmt=fmt), block
    )


def test_more_rows_than_an_int32_names_are_refused():
    one = BF16.with_width(1)
    assert abstract_view(2**31 - 1, 2, 1, one).num_rows == 2**31 - 1
    with pytest.raises(ValueError, match="at most 2147483647 rows, .*, got 2147483648"):
        abstract_view(2**15, 2**17, 2**16, one)
    with pytest.raises(ValueError, match="at most 2147483647 rows, .*, got 4294967296"):
        KVRows.create(2**16, 2**16)  # refused before 2 TiB are asked for


BLOCK = jax.ShapeDtypeStruct((4, 512), jnp.uint8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: KVRows.create(0, 3), "slots: expected an integer of 1 or more, got 0"),
        (lambda: KVRows.create(2, -1), "rows_per_slot: expected .*, got -1"),
        (lambda: KVRows.create(2, 1.0), "rows_per_slot: expected .*, got 1.0"),
        (lambda: KVRows.create(True, 1), "slots: expected .*, got True"),
        (lambda: KVRows.create(2, 3, "V41"), "a KVCacheFormat, got str"),
        (
            lambda: KVRows.view(BLOCK, start=0, rows_per_slot=8, fmt=FMT),
            "at least 528 bytes for 8 rows of 66 bytes, got 512",
        ),
        (lambda: KVRows.view(BLOCK, start=320, rows_per_slot=3, fmt=FMT), "at least 518 .*got 512"),
        (lambda: KVRows.view(BLOCK, start=8, rows_per_slot=3, fmt=FMT), "multiple of 32 .*, got 8"),
        (lambda: KVRows.view(BLOCK, start=-32, rows_per_slot=3, fmt=FMT), "from 0, got -32"),
        (lambda: KVRows.view(BLOCK, start=np.int64(8), rows_per_slot=3, fmt=FMT), "32 .*, got 8"),
        (lambda: KVRows.view(BLOCK, start=0.0, rows_per_slot=3, fmt=FMT), "an integer, got 0.0"),
        (
            lambda: KVRows.view(BLOCK, start=np.zeros(4, np.int32), rows_per_slot=3, fmt=FMT),
            "start: expected an integer, got array",
        ),
        (lambda: KVRows.view(BLOCK, start=0, rows_per_slot=0, fmt=FMT), "of 1 or more, got 0"),
        (lambda: KVRows.view(BLOCK, start=0, rows_per_slot=3, fmt="V41"), "KVCacheFormat, got str"),
        (
            lambda: KVRows.view(
                jnp.zeros((4, 512), jnp.float32), start=0, rows_per_slot=3, fmt=FMT
            ),
            r"expected uint8\[slots, slot_bytes\], got float32\(4, 512\)",
        ),
        (
            lambda: KVRows.view(jnp.zeros(512, jnp.uint8), start=0, rows_per_slot=3, fmt=FMT),
            r"expected uint8\[slots, slot_bytes\], got uint8\(512,\)",
        ),
        (
            lambda: KVRows.create(
                2, 3, KVCacheFormat("planar", "e4m3", 64, 32, "ue8m0", token_interleaved=False)
            ),
            "token-interleaved format, got page-planar planar",
        ),
    ],
)
def test_unfit_sizes_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda rows: load_eagerly(rows, jnp.zeros(2)), "indices: expected integers, .*float"),
        (lambda rows: load_eagerly(rows, 1.0), "indices: expected integers, got dtype float64"),
        (lambda rows: load_eagerly(rows, jnp.zeros(2, bool)), "expected integers, got dtype bool"),
        (lambda rows: load_eagerly(rows, True), "indices: expected integers, got dtype bool"),
        (lambda rows: load_eagerly(rows, 2**31), "int32 values, got 2147483648"),
        (lambda rows: load_eagerly(rows.data, 0), "rows: expected a KVRows, got ArrayImpl"),
        (
            lambda rows: store_eagerly(
                rows, jnp.zeros((2, 66), jnp.uint8), jnp.zeros(2, jnp.float32)
            ),
            "slots: expected integers, got dtype float32",
        ),
        (
            lambda rows: store_eagerly(rows, jnp.zeros((2, 66), jnp.uint8), jnp.arange(3)),
            r"data: expected shape \(3, 66\), got \(2, 66\)",
        ),
        (
            lambda rows: store_eagerly(rows, jnp.zeros((3, 528), jnp.uint8), jnp.arange(3)),
            r"data: expected shape \(3, 66\), got \(3, 528\)",
        ),
        (
            lambda rows: store_eagerly(rows, jnp.zeros((3, 66), jnp.float32), jnp.arange(3)),
            "data: expected dtype uint8, got float32",
        ),
        (
            lambda rows: store_eagerly(
                dataclasses.replace(rows, rows_per_slot=8), jnp.zeros((1, 66), jnp.uint8), [0]
            ),
            "at least 528 bytes for 8 rows of format V41, got 512",
        ),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(view())
