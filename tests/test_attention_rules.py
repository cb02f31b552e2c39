"""Rules of one attention layer: what padding, neighbours and later tokens may not change."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import float64_reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import activations, attention_config, largest_error, layer_params

import swa_jax as swa
from pallas_kernels import KVRows, load_rows

pytestmark = pytest.mark.quick_compilation

WINDOW, CAPACITY = 3, 9
SLOTS, BATCH, TOKENS = 4, 2, 7
LAST_POSITION = 2**31 - 1
QUANTISED = attention_config(WINDOW, swa.V41)
EXACT = attention_config(WINDOW, swa.F32)


class Forms(NamedTuple):
    """A layer's three forms, each [2, 7, hidden]; the cached ones start at any position."""

    decode: Callable
    prefill: Callable
    sequence: Callable


@functools.cache
def compiled(config: swa.AttentionConfig) -> Forms:
    layer, params = swa.SlidingWindowAttention(config), layer_params(config)

    @jax.jit
    def decode(rows, x, state_ids, starts, lengths):
        token = jnp.arange(TOKENS, dtype=jnp.int32)[None]
        real = token < lengths[:, None]
        positions = jnp.where(real, starts[:, None] + token, -1)
        meta = swa.DecodeMetadata.build(config.geometry, state_ids, positions)
        return layer.apply(params, x, rows, meta)

    @jax.jit
    def prefill(rows, x, state_ids, starts, lengths):
        meta = swa.PrefillMetadata.build(
            config.geometry, state_ids, starts, lengths, max_tokens=TOKENS
        )
        return layer.apply(params, x, rows, meta)

    @jax.jit
    def sequence(x, positions, segment_ids):
        return layer.apply(params, x, positions=positions, segment_ids=segment_ids)

    return Forms(decode, prefill, sequence)


def old_rows(config: swa.AttentionConfig) -> KVRows:
    """Rings full of finite rows, as other requests leave them."""
    rows = swa.RingCache.create(SLOTS, 1, config.geometry, config.fmt).layer(0)
    x = jnp.asarray(activations(config, BATCH, TOKENS, seed=100))
    fill = compiled(config).prefill
    for states in ([0, 1], [2, 3]):
        for start in (0, 7):
            starts = np.full(BATCH, start, np.int32)
            _, rows = fill(rows, x, np.int32(states), starts, np.full(BATCH, TOKENS, np.int32))
    return rows


@pytest.fixture(params=["decode", "prefill"])
def cached_form(request):
    return request.param


def call(config, form, x, state_ids=(3, 1), starts=(11, 5), lengths=(7, 7), rows=None):
    """The outputs, the rows before and the rows after; by default the ring wraps in both rows."""
    before = old_rows(config) if rows is None else rows
    run = getattr(compiled(config), form)
    y, after = run(before, x, np.int32(state_ids), np.int32(starts), np.int32(lengths))
    return np.asarray(y), np.asarray(before.data), np.asarray(after.data)


def test_padding_gives_zeros_and_stores_nothing_whatever_stands_there(cached_form):
    clean = activations(QUANTISED, BATCH, TOKENS)
    clean[0, 4:] = 0
    clean[1] = 0
    poisoned = clean.copy()
    poisoned[0, 4:] = np.nan
    poisoned[1] = np.nan
    want, before, stored = call(QUANTISED, cached_form, clean, lengths=(4, 0))
    got, _, after = call(QUANTISED, cached_form, poisoned, lengths=(4, 0))
    assert not np.any(got[0, 4:])
    assert not np.any(got[1])
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(after, stored)
    np.testing.assert_array_equal(after[[0, 1, 2]], before[[0, 1, 2]])


def test_padding_of_a_whole_sequence_gives_zeros_whatever_stands_there():
    clean = activations(QUANTISED, BATCH, TOKENS)
    poisoned = clean.copy()
    poisoned[0, 4:] = np.nan
    positions = np.tile(np.arange(TOKENS, dtype=np.int32), (BATCH, 1))
    segments = np.zeros((BATCH, TOKENS), np.int32)
    segments[0, 4:] = -1
    sequence = compiled(QUANTISED).sequence
    got = np.asarray(sequence(poisoned, positions, segments))
    assert not np.any(got[0, 4:])
    np.testing.assert_array_equal(got, sequence(clean, positions, segments))


def test_a_call_changes_the_bytes_of_its_own_rows_alone(cached_form):
    x = activations(QUANTISED, BATCH, TOKENS)
    _, before, after = call(QUANTISED, cached_form, x, (3, 1), (11, 5), (2, 7))
    size = QUANTISED.fmt.row_bytes
    changed = before != after
    named = np.zeros(before.shape, bool)
    for slot, positions in ((3, [11, 12]), (1, range(5, 12))):
        for position in positions:
            row = slice(position % CAPACITY * size, position % CAPACITY * size + size)
            assert changed[slot, row].any()
            named[slot, row] = True
    assert not changed[~named].any()


def test_a_request_does_not_feel_its_neighbours(cached_form):
    x = activations(QUANTISED, BATCH, TOKENS)
    other, poisoned = x.copy(), x.copy()
    other[1] = activations(QUANTISED, TOKENS, seed=9) * 50
    poisoned[1] = np.nan
    alone, _, stored = call(QUANTISED, cached_form, x, (3, -1), (11, 0), (7, 0))
    for changed in (
        call(QUANTISED, cached_form, x),
        call(QUANTISED, cached_form, other, (3, 0), (11, 17), (7, 3)),
        call(QUANTISED, cached_form, poisoned),
    ):
        np.testing.assert_array_equal(changed[0][0], alone[0])
        np.testing.assert_array_equal(changed[2][3], stored[3])


@pytest.mark.parametrize("form", ["decode", "prefill", "sequence"])
def test_a_token_reaches_the_queries_of_its_window_and_no_others(form):
    x = activations(QUANTISED, BATCH, TOKENS)
    changed = x.copy()
    changed[:, 2] += 1
    if form == "sequence":
        positions = np.tile(np.arange(TOKENS, dtype=np.int32), (BATCH, 1))
        segments = np.zeros((BATCH, TOKENS), np.int32)
        outputs = [compiled(QUANTISED).sequence(v, positions, segments) for v in (x, changed)]
    else:
        outputs = [call(QUANTISED, form, v)[0] for v in (x, changed)]
    same = np.all(np.asarray(outputs[0]) == np.asarray(outputs[1]), axis=(0, 2))
    # token 2 is seen by queries 2, 3 and 4
    np.testing.assert_array_equal(same, [True, True, False, False, False, True, True])


@pytest.mark.makes_nan
@pytest.mark.parametrize("form", ["decode", "prefill"])
def test_a_row_that_is_nan_reaches_the_queries_that_see_it_and_no_others(form):
    x = activations(QUANTISED, BATCH, TOKENS)
    poisoned = x.copy()
    poisoned[0, 6] = np.nan  # position 17, which 18 and 19 see as well
    _, _, stored = call(QUANTISED, form, poisoned)
    rows = dataclasses.replace(old_rows(QUANTISED), data=jnp.asarray(stored))
    y, _, _ = call(QUANTISED, form, x, starts=(18, 12), rows=rows)
    nan = np.isnan(y)
    np.testing.assert_array_equal(nan[0].all(axis=-1), [True, True] + [False] * 5)
    np.testing.assert_array_equal(nan[0].any(axis=-1), [True, True] + [False] * 5)
    assert not nan[1].any()
    poisoned = x.copy()
    poisoned[1, 2] = np.nan
    y, _, _ = call(QUANTISED, form, poisoned)
    seen = [False, False, True, True, True, False, False]
    np.testing.assert_array_equal(np.isnan(y[1]).all(axis=-1), seen)
    np.testing.assert_array_equal(np.isnan(y[1]).any(axis=-1), seen)
    assert not np.isnan(y[0]).any()


@pytest.mark.makes_nan
def test_a_row_that_is_nan_reaches_its_window_in_a_whole_sequence():
    x = activations(QUANTISED, BATCH, TOKENS)
    x[1, 2] = np.nan
    positions = np.tile(np.arange(TOKENS, dtype=np.int32), (BATCH, 1))
    y = np.asarray(compiled(QUANTISED).sequence(x, positions, np.zeros_like(positions)))
    seen = [False, False, True, True, True, False, False]
    np.testing.assert_array_equal(np.isnan(y[1]).all(axis=-1), seen)
    np.testing.assert_array_equal(np.isnan(y[1]).any(axis=-1), seen)
    assert not np.isnan(y[0]).any()


# --- options, each against the maths in float64


def all_forms(config):
    """The first 7 tokens of two requests, in every form."""
    x = activations(config, BATCH, TOKENS)
    forms = compiled(config)
    positions = np.tile(np.arange(TOKENS, dtype=np.int32), (BATCH, 1))
    yield x, forms.sequence(x, positions, np.zeros_like(positions))
    rows = swa.RingCache.create(SLOTS, 1, config.geometry, config.fmt).layer(0)
    arguments = np.int32([2, 0]), np.zeros(2, np.int32), np.full(2, TOKENS, np.int32)
    for form in (forms.decode, forms.prefill):
        yield x, form(rows, x, *arguments)[0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hadamard": True, "o_groups": 1},
        {"pairing": "half_split"},
        {"query_norm": True, "rope_theta": 160000.0, "norm_eps": 1e-3},
    ],
    ids=lambda options: ", ".join(options) or "default",
)
def test_each_option_is_the_maths_in_every_form(options):
    config = attention_config(WINDOW, swa.F32, **options)
    params = layer_params(config)["params"]
    for x, y in all_forms(config):
        want = [float64_reference.attention_layer(params, one, config) for one in x]
        assert largest_error(y, want) <= 2e-6


def test_a_layer_without_rotation_is_the_maths_in_every_form():
    config = attention_config(WINDOW, swa.F32, rope_dim=0)
    params = layer_params(config)["params"]
    for x, y in all_forms(config):
        want = [float64_reference.attention_layer(params, one, config) for one in x]
        assert largest_error(y, want) <= 2e-6


def test_the_options_are_not_the_same_maths():
    params = layer_params(EXACT)["params"]
    x = activations(EXACT, TOKENS)
    want = float64_reference.attention_layer(params, x, EXACT)
    for options in ({"pairing": "half_split"}, {"query_norm": True}, {"rope_theta": 100.0}):
        config = attention_config(WINDOW, swa.F32, **options)
        assert largest_error(float64_reference.attention_layer(params, x, config), want) > 1e-3


def test_positions_up_to_the_last_int32_are_exact():
    first = LAST_POSITION - (TOKENS - 1)
    params = layer_params(EXACT)["params"]
    x = activations(EXACT, BATCH, TOKENS + 2)
    positions = np.arange(first - 2, first + TOKENS, dtype=np.int64)
    want = np.stack(
        [float64_reference.attention_layer(params, one, EXACT, positions) for one in x]
    )[:, 2:]
    forms = compiled(EXACT)
    rows = swa.RingCache.create(SLOTS, 1, EXACT.geometry, EXACT.fmt).layer(0)
    padded = np.pad(x[:, :2], ((0, 0), (0, TOKENS - 2), (0, 0)))
    state_ids, starts = np.int32([3, 0]), np.full(2, first - 2, np.int32)
    _, rows = forms.prefill(rows, padded, state_ids, starts, np.full(2, 2, np.int32))
    # outputs depend on distances; the rows themselves show the angles
    slots = EXACT.geometry.slots(np.full(TOKENS, 3), positions[2:])
    stored = float64_reference.shared_rows(params, x[0, 2:], EXACT, positions[2:])
    for form in (forms.decode, forms.prefill):
        y, after = form(rows, x[:, 2:], state_ids, starts + 2, np.full(2, TOKENS, np.int32))
        assert largest_error(y, want) <= 2e-6
        assert largest_error(np.asarray(load_rows(after, slots)).view(np.float32), stored) <= 2e-6
    places = np.tile(positions[2:].astype(np.int32), (2, 1))
    y = forms.sequence(x[:, 2:], places, np.zeros_like(places))
    assert largest_error(y[:, 2:], want[:, 2:]) <= 2e-6  # the first two lack their old rows


def test_bfloat16_compute_agrees_to_two_units_in_the_last_place():
    config = attention_config(WINDOW, swa.V41, dtype="bfloat16", param_dtype="bfloat16")
    (_, want), *others = all_forms(config)
    assert want.dtype == jnp.bfloat16
    want = np.asarray(want, np.float32)
    unit = 2.0 ** (np.floor(np.log2(np.sqrt(np.mean(want**2)))) - 7)
    for _, got in others:
        assert got.dtype == jnp.bfloat16
        assert np.max(np.abs(np.asarray(got, np.float32) - want)) <= 2 * unit
    exact = layer_params(attention_config(WINDOW, swa.F32))["params"]
    x = activations(config, BATCH, TOKENS)
    reference = [float64_reference.attention_layer(exact, one, config) for one in x]
    assert largest_error(want, reference) <= 0.1  # rows of e4m3 in a sum of bfloat16 products
