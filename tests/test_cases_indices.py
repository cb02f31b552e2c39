"""Cases of tests/cases.md: what indices name, in reads and in stores, and NaN that nobody names."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as reference
import pytest
from equal_scores import (
    COLUMNS,
    EXTRA_COLUMNS,
    FMT,
    HEADS,
    QUERIES,
    ROWS,
    WIDTH,
    attend,
    attention,
    check,
    constant_rows,
)
from ring_layers import RingLayer, ShowLayer, whole_sequence
from small_models import activations, attention_config, largest_error

import pallas_kernels
import swa_jax as swa
from pallas_kernels import ExtraKV, KVRows, load_rows, quantize_rows, store_rows

pytestmark = pytest.mark.quick_compilation

INT_MAX = 2**31 - 1


@pytest.fixture(params=["xla", "interpret", pytest.param("triton", marks=pytest.mark.gpu)])
def implementation(request):
    return request.param


# --- G: indices


@functools.partial(jax.jit, static_argnames="implementation")
def store(rows, latents, slots, implementation):
    angles = jnp.zeros((2, 0))
    return pallas_kernels.fused_store(
        rows, latents, slots, norm_weight=jnp.ones(WIDTH), norm_eps=1e-6, cos=angles, sin=angles,
        implementation=implementation,
    )  # fmt: skip


def store_two(implementation, rows, slots, latents=None):
    if latents is None:
        latents = np.random.default_rng(1).normal(size=(2, WIDTH)).astype(np.float32)
    return store(rows, latents, np.int32(slots), implementation)


def four_rows() -> KVRows:
    data = np.random.default_rng(0).integers(0, 256, (1, 288), np.uint8)
    return KVRows.view(jnp.asarray(data), start=0, rows_per_slot=4, fmt=FMT)


def bytes_of(rows: KVRows) -> np.ndarray:
    return np.asarray(rows.logical())[0, :, 0]


def test_G01_slot_minus_one_is_no_row_and_not_the_last(implementation):
    before = four_rows()
    after = store_two(implementation, before, [-1, 2])
    np.testing.assert_array_equal(bytes_of(after)[[0, 1, 3]], bytes_of(before)[[0, 1, 3]])
    assert np.any(bytes_of(after)[2] != bytes_of(before)[2])
    assert not np.any(load_rows(before, [-1]))
    check(attend(implementation, {7: 7.0}, [[-1]]), [0], [0])


def test_G03_a_padded_row_does_not_write_to_slot_zero(implementation):
    before = four_rows()
    after = store_two(implementation, before, [3, -1])
    np.testing.assert_array_equal(bytes_of(after)[:3], bytes_of(before)[:3])
    show = ShowLayer(3, 5)
    show.prefill([0], [5], 12)
    filled = show.layer.data
    assert show.decode([[0], [-1]], [[5], [60]], state_ids=[1, -1]) == [[{5}], [set()]]
    np.testing.assert_array_equal(show.layer.data[0], filled[0])
    assert show.held() == [0, 1, 2, 3, 4]


def test_G04_an_index_outside_the_rows_is_none(implementation):
    rows = {i: 2.0 + i for i in range(ROWS)}
    check(attend(implementation, rows, [[0, 99, -1, INT_MAX, ROWS], [0]]), [2, 2], [1, 1])


def test_G05_minus_one_may_stand_anywhere(implementation):
    rows = {1: 2.0, 3: 4.0, 0: 100.0, 7: 100.0}
    check(attend(implementation, rows, [[-1, 3, -1, 1], [3, 1, -1, -1]]), [3, 3], [2, 2])


def test_G07_entries_beyond_a_length_are_ignored(implementation):
    rows = {0: 1.0, 1: 3.0, 2: 8.0, 3: 4.0}
    answer = attend(implementation, rows, [[0, 1, 2, 3, -1]] * 4, lengths=[2, 0, 99, -7])
    check(answer, [2, 0, 4, 0], [2, 0, 4, 0])


def test_G08_two_tokens_never_share_a_slot():
    geometry = swa.RingGeometry(3, 5)
    distinct = "state_ids: expected distinct state slots among requests with tokens"
    with pytest.raises(ValueError, match=distinct):
        swa.DecodeMetadata.build(geometry, [1, 1], [[4], [4]])
    with pytest.raises(ValueError, match=distinct):
        swa.PrefillMetadata.build(geometry, [1, 1], [4, 4], [1, 1], max_tokens=1)
    with pytest.raises(ValueError, match="positions: expected consecutive positions"):
        swa.DecodeMetadata.build(geometry, [1], [[4, 4]])
    # Of a chunk that goes round the ring only the last token of each slot is stored.
    build = functools.partial(swa.PrefillMetadata.build, geometry, max_tokens=12)
    slots = jax.jit(build)(np.int32([1]), np.int32([0]), np.int32([12])).slots
    assert slots.tolist() == [-1] * 7 + [7, 8, 9, 5, 6]


def test_G10_rows_at_the_end_of_a_ring_go_on_at_its_beginning():
    assert swa.RingGeometry(3, 5).slots(0, [4, 5, 6]).tolist() == [4, 0, 1]
    show = ShowLayer(3, 5)
    show.prefill([0], [4], 12)
    show.decode([[4, 5, 6]])
    assert show.held() == [5, 6, 2, 3, 4]


@pytest.mark.parametrize("wrap", [lambda call: call, jax.jit], ids=["eager", "jit"])
def test_G11_an_index_just_outside_means_none_whether_compiled_or_not(wrap):
    rows, cache = four_rows(), swa.RingCache.create(3, 1, swa.RingGeometry(3, 5), FMT)
    data = jnp.full((2, FMT.row_bytes), 7, jnp.uint8)
    outside = jnp.asarray([4, 5])
    assert not np.any(wrap(load_rows)(rows, outside))
    np.testing.assert_array_equal(wrap(store_rows)(rows, data, outside).data, rows.data)
    cache = dataclasses.replace(cache, blocks=(cache.blocks[0].at[2].set(9),))
    for source, target in (([2, 2], [3, 4]), ([3, 4], [0, 1])):
        copied = wrap(swa.RingCache.copy_slots)(cache, jnp.asarray(source), jnp.asarray(target))
        np.testing.assert_array_equal(copied.blocks[0], cache.blocks[0])
    read = wrap(cache.geometry.read_indices)
    assert not np.any(load_rows(cache.layer(0), read(jnp.asarray([3, 4]), jnp.asarray([7, 7]))))


# --- K: NaN


@pytest.mark.parametrize("fill", [0x7F, 0xFF])
def test_K01_rows_that_nobody_names_may_be_nan(implementation, fill):
    # The first row and the last are those that clamped and wrapped indices would point to.
    named = {3: 2.0, 4: 4.0}
    indices = [[3, 4, -1, -1, -1], [-1, 4, 99, INT_MAX, -1], [-1] * 5]
    extra = constant_rows({}, fill)
    poisoned = attend(implementation, constant_rows(named, fill), indices)
    check(poisoned, [3, 4, 0], [2, 1, 0])
    clean = attend(implementation, constant_rows(named), indices)
    jax.tree.map(np.testing.assert_array_equal, poisoned, clean)
    out, _ = attention(
        jnp.zeros((QUERIES, HEADS, WIDTH), jnp.bfloat16), constant_rows(named, fill),
        np.full((QUERIES, COLUMNS), 3, np.int32), np.full(QUERIES, 1, np.int32),
        ExtraKV(extra, jnp.full((QUERIES, EXTRA_COLUMNS), -1)), jnp.zeros(HEADS),
        implementation=implementation,
    )  # fmt: skip
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.ones(out.shape))


def test_K02_a_masked_key_that_is_nan_is_not_seen(implementation):
    values = np.full((1, WIDTH), np.nan, np.float32)
    nan_row = np.asarray(jax.jit(quantize_rows, static_argnums=1)(values, FMT))
    rows = store_rows(constant_rows({0: 2.0, 1: 4.0}), jnp.asarray(nan_row), [2])
    answer = attend(implementation, rows, [[0, 1, 2], [0, 1, 2]], lengths=[2, 3])
    np.testing.assert_allclose(answer.out[0], np.full(HEADS, 3.0), rtol=2**-8)
    assert np.all(np.isnan(answer.out[1]))


@pytest.mark.makes_nan
@pytest.mark.parametrize("form", ["prefill", "decode", "sequence"])
def test_K02_a_nan_token_is_not_seen_behind_the_window(form):
    config = attention_config(3, swa.V41)
    x = activations(config, 2, 7)
    x[0, 1] = np.nan
    layer = RingLayer(config)
    if form == "sequence":
        y = np.asarray(whole_sequence(config)(layer.params, jnp.asarray(x)))
    else:
        parts = []
        for first in (0, 3):
            part = x[:, first : first + 3]
            if form == "prefill":
                parts.append(layer.prefill(part, [2, 0], [first] * 2, [3, 3]))
            else:
                parts.append(layer.decode(part, [2, 0], [[first, first + 1, first + 2]] * 2))
        y = np.concatenate(parts, axis=1)
    sees_nan = [False, True, True, True, False, False, False][: y.shape[1]]
    np.testing.assert_array_equal(np.isnan(y[0]).all(axis=-1), sees_nan)
    np.testing.assert_array_equal(np.isnan(y[0]).any(axis=-1), sees_nan)
    assert not np.any(np.isnan(y[1]))


def test_K03_a_padded_token_that_is_nan_stores_nothing(implementation):
    before = four_rows()
    latents = np.full((2, WIDTH), np.nan, np.float32)
    after = store_two(implementation, before, [-1, -1], latents)
    np.testing.assert_array_equal(after.data, before.data)


@pytest.mark.parametrize("form", ["prefill", "decode"])
def test_K03_a_padded_token_that_is_nan_changes_no_ring(form):
    config = attention_config(3, swa.V41)
    x = activations(config, 2, 3)
    x[0, 1:], x[1] = np.nan, np.nan
    layer = RingLayer(config, fill=0x5A)
    before = layer.data
    if form == "prefill":
        y = layer.prefill(x, [2, 0], [0, 0], [1, 0])
    else:
        y = layer.decode(x, [2, 0], [[0, -1, -1], [-1, -1, -1]])
    assert np.all(np.isfinite(y))
    assert not np.any(y[0, 1:])
    assert not np.any(y[1])
    after = layer.data.copy()
    assert np.any(after[2, 0] != before[2, 0])
    after[2, 0] = before[2, 0]
    np.testing.assert_array_equal(after, before)


# --- R03: the edges of a tile


def test_R03_masked_loads_and_partly_filled_tiles_equal_float64(implementation):
    random = np.random.default_rng(0)
    data = reference.quantize(random.normal(size=(ROWS, WIDTH)), FMT)
    q = jnp.asarray(random.normal(size=(QUERIES, HEADS, WIDTH)), jnp.bfloat16)
    indices = np.int32([[0, -1, 8, 5, 7], [7, 7, -1, INT_MAX, 1], [8] * 5, [-8, 9, -1, -2, 3]])
    lengths, sink = np.full(QUERIES, COLUMNS, np.int32), np.float32([-1, 0, 2])
    rows = store_rows(KVRows.create(1, ROWS, FMT), jnp.asarray(data), np.arange(ROWS))
    extra = ExtraKV(constant_rows({}), jnp.full((QUERIES, EXTRA_COLUMNS), -1))
    out, lse = attention(q, rows, indices, lengths, extra, sink, implementation=implementation)
    want, want_lse = reference.attention(
        q, [(reference.dequantize(data, FMT), indices, None)], sink
    )
    assert largest_error(np.asarray(out, np.float32), want) <= 1e-2
    np.testing.assert_allclose(lse, want_lse, rtol=0, atol=1e-5)
