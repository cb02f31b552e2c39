"""Cases of tests/cases.md: windows, rings, chunked prefill and rolled-back drafts."""

import float64_reference
import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as reference
import pytest
from ring_layers import RingLayer, ShowLayer, chunks, whole_sequence, window_of
from small_models import activations, attention_config, largest_error

import swa_jax as swa
from pallas_kernels import ExtraKV, KVRows, indexed_attention, store_rows

pytestmark = pytest.mark.quick_compilation

SLOW_STEPS = [pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3, 4, 5, 6, 8, 9, 10, 11)]
TOO_MANY = r"tokens per step: expected at most {} .* for window {} and capacity {}, got {}"


@pytest.fixture(params=["xla", "interpret", pytest.param("triton", marks=pytest.mark.gpu)])
def implementation(request):
    return request.param


# --- A: the window


def test_A01_a_query_sees_its_window_itself_included():
    show = ShowLayer(3, 5)
    got = [show.decode([[p]])[0][0] for p in range(6)]
    assert got == [{0}, {0, 1}, {0, 1, 2}, {1, 2, 3}, {2, 3, 4}, {3, 4, 5}]


def test_A02_every_implementation_takes_the_mean_of_the_last_four(implementation):
    geometry, fmt = swa.RingGeometry(4, 6), swa.V41.with_width(64)
    rows = KVRows.create(1, 6, fmt)

    @jax.jit
    def step(rows, data, position):
        rows = store_rows(rows, data, geometry.slots(jnp.zeros(1, jnp.int32), position))
        indices = geometry.read_indices(jnp.zeros(1, jnp.int32), position)
        q = jnp.zeros((1, 1, 64), jnp.bfloat16)
        return rows, indexed_attention(q, rows, indices, implementation=implementation)[0]

    got = []
    for p in range(10):
        data = reference.quantize(np.full((1, 64), p, np.float32), fmt)
        rows, out = step(rows, data, np.int32([p]))
        [value] = set(np.asarray(out, np.float32).ravel().tolist())
        got.append(value)
    assert got == [0, 0.5, 1, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5]


def test_A03_a_window_of_one_is_the_token_itself():
    show = ShowLayer(1, 2)
    assert [show.decode([[p]])[0][0] for p in range(3)] == [{0}, {1}, {2}]


def test_A04_each_query_of_a_step_has_its_own_window():
    show = ShowLayer(3, 8)
    show.prefill([0], [4], 4)
    assert show.decode([[4, 5]]) == [[{2, 3, 4}, {3, 4, 5}]]


def test_A06_a_compressed_cache_does_not_widen_the_window():
    show = ShowLayer(3, 5, extra_fmt=swa.V41.with_width(64))
    before = ShowLayer(3, 5)
    values = jnp.eye(64, dtype=jnp.float32)[jnp.asarray([40, 41, 42, 43])]
    extra_rows = store_rows(
        KVRows.create(1, 4, show.config.fmt),
        reference.quantize(values, show.config.fmt),
        np.arange(4),
    )

    def at_10(tag_of_7, indices):
        before.prefill([0], [10], 12, [[*range(7), tag_of_7, 8, 9, -1, -1]])
        show.layer.rows = before.layer.rows
        extra = ExtraKV(extra_rows, jnp.asarray([indices], jnp.int32))
        return show.decode([[10]], extra=extra)[0][0]

    assert at_10(7, [0, -1, 1]) == {8, 9, 10, 40, 41}
    assert at_10(7, [-1, -1, -1]) == {8, 9, 10}
    assert at_10(50, [0, -1, 1]) == {8, 9, 10, 40, 41}


def test_A07_a_chunk_of_seven_and_one_token_are_eight_single_steps():
    chunked, single = ShowLayer(3, 9), ShowLayer(3, 9)
    [got] = chunked.prefill([0], [7], 7)
    got += chunked.decode([[7]])[0]
    assert got == [single.decode([[p]])[0][0] for p in range(8)]
    assert got == [window_of(p, 3) for p in range(8)]
    np.testing.assert_array_equal(chunked.layer.data, single.layer.data)


# --- B: the ring


def test_B01_read_indices_wrap_and_lose_no_live_row():
    indices = swa.RingGeometry(3, 5).read_indices(np.zeros(8, np.int32), np.arange(8))
    expected = [[0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [0, 3, 4], [0, 1, 4], [0, 1, 2]]
    assert [sorted(i for i in row if i >= 0) for row in indices.tolist()] == expected
    assert indices.shape == (8, 3)


def test_B02_after_a_short_prefill_the_live_rows_are_the_last_four():
    show = ShowLayer(4, 6)
    show.prefill([0], [2], 2)
    got = [show.decode([[p]])[0][0] for p in range(2, 11)]
    assert got[:4] == [{0, 1, 2}, {0, 1, 2, 3}, {1, 2, 3, 4}, {2, 3, 4, 5}]
    assert got[4:] == [{3, 4, 5, 6}, {4, 5, 6, 7}, {5, 6, 7, 8}, {6, 7, 8, 9}, {7, 8, 9, 10}]


def test_B03_after_the_wrap_rows_in_higher_slots_are_still_seen():
    assert swa.RingGeometry(3, 5).read_indices(0, 5).tolist() == [3, 4, 0]
    show = ShowLayer(3, 5)
    show.prefill([0], [5], 12)
    assert show.decode([[5]]) == [[{3, 4, 5}]]


def test_B05_a_prompt_longer_than_the_ring_is_causal_and_leaves_its_last_rows():
    show = ShowLayer(3, 5)
    [got] = show.prefill([0], [12], 12)
    assert got[:4] == [{0}, {0, 1}, {0, 1, 2}, {1, 2, 3}]
    assert got == [window_of(p, 3) for p in range(12)]
    assert show.held() == [10, 11, 7, 8, 9]


@pytest.mark.parametrize("width", [4, 6, 134])
def test_B07_two_live_rows_are_two_however_wide_the_index_row(width):
    fmt = swa.F32.with_width(64)
    values = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    rows = store_rows(KVRows.create(1, 6, fmt), reference.quantize(values, fmt), np.arange(6))
    q = np.random.default_rng(1).normal(size=(1, 2, 64)).astype(np.float32)
    live = swa.RingGeometry(4, 6).read_indices(0, 1)
    assert live.tolist() == [0, 1, -1, -1]
    indices = np.pad(np.asarray(live)[None], ((0, 0), (0, width - 4)), constant_values=-1)
    out, lse = jax.jit(indexed_attention)(q, rows, indices)
    want, want_lse = reference.attention(q, [(values, [[0, 1]], None)])
    assert largest_error(out, want) <= 3e-6
    np.testing.assert_allclose(lse, want_lse, atol=1e-5)


@pytest.mark.parametrize(
    ("window", "capacity", "tokens", "fits"),
    [
        (3, 5, 3, True),
        (3, 5, 4, False),
        (128, 134, 7, True),
        (128, 134, 8, False),
        (4, 4, 1, True),
        (4, 4, 2, False),
    ],
)
def test_B10_a_step_stores_first_only_where_the_ring_has_room(window, capacity, tokens, fits):
    geometry = swa.RingGeometry(window, capacity)
    positions = np.arange(tokens)[None]
    if fits:
        meta = jax.eval_shape(lambda: swa.DecodeMetadata.build(geometry, [0], positions))
        assert meta.slots.shape == (tokens,)
        return
    message = TOO_MANY.format(capacity - window + 1, window, capacity, tokens)
    with pytest.raises(ValueError, match=message):
        swa.DecodeMetadata.build(geometry, [0], positions)


# --- C: prompts in chunks


def test_C01_a_chunk_reads_the_rows_that_it_will_overwrite():
    show = ShowLayer(3, 5)
    show.prefill([0], [4], 12)
    [got] = show.prefill([4], [4], 12)
    assert got[:4] == [{2, 3, 4}, {3, 4, 5}, {4, 5, 6}, {5, 6, 7}]
    with pytest.raises(ValueError, match=TOO_MANY.format(3, 3, 5, 4)):
        show.decode([[4, 5, 6, 7]])


SPLITS = [[20], [7, 13], [5, 5, 5, 5], [19, 1], [1] * 20]


def test_C02_every_split_of_a_prompt_gives_one_answer_and_one_ring():
    shown = []
    for lengths in SPLITS:
        show = ShowLayer(4, 10)
        got = []
        for start, length in chunks(lengths):
            if len(lengths) == 20:
                got += show.decode([[start]])[0]
            else:
                got += show.prefill([start], [length], 20)[0][:length]
        assert got == [window_of(p, 4) for p in range(20)]
        shown.append(show.layer.data)
    assert show.held() == [*range(10, 20)]
    for data in shown[1:]:
        np.testing.assert_array_equal(data, shown[0])


def test_C03_padding_of_a_chunk_stores_nothing_and_gives_zeros():
    show = ShowLayer(3, 5, fill=0x5A)
    before = show.layer.data
    [got] = show.prefill([0], [5], 8)
    assert got[:5] == [{0}, {0, 1}, {0, 1, 2}, {1, 2, 3}, {2, 3, 4}]
    assert got[5:] == [set(), set(), set()]
    assert show.held() == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(show.layer.data[1:], before[1:])


@pytest.mark.parametrize("form", ["prefill", "decode", "sequence"])
def test_C05_a_later_token_changes_no_earlier_output(form):
    config = attention_config(3, swa.V41)
    x = activations(config, 2, 3 if form != "sequence" else 7)
    changed = x.copy()
    changed[:, 2] = 3 * x[:, 0]

    def run(x):
        layer = RingLayer(config)
        if form == "prefill":
            return layer.prefill(x, [0, 1], [0, 0], [3, 3])
        if form == "decode":
            return layer.decode(x, [0, 1], [[0, 1, 2]] * 2)
        return np.asarray(whole_sequence(config)(layer.params, jnp.asarray(x)))

    got, other = run(x), run(changed)
    np.testing.assert_array_equal(got[:, :2], other[:, :2])
    assert np.any(got[:, 2] != other[:, 2])


def test_C07_a_module_takes_four_tokens_and_then_one():
    config = attention_config(3, swa.F32)
    x = activations(config, 1, 5)
    layer, single = RingLayer(config), RingLayer(config)
    first = layer.prefill(x[:, :4], [0], [0], [4])
    got = np.concatenate([first, layer.decode(x[:, 4:], [0], [[4]])], axis=1)[0]
    want = [single.decode(x[:, p : p + 1], [0], [[p]])[0, 0] for p in range(5)]
    assert largest_error(got, want) <= 3e-5
    exact = float64_reference.attention_layer(layer.params["params"], x[0], config)
    assert largest_error(got, exact) <= 3e-5


# --- D: drafts that are verified and given up


@pytest.mark.parametrize("tokens", [7, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 6))])
def test_D01_verify_steps_of_up_to_seven_tokens_see_their_windows(tokens):
    starts = [127, 128, 133, 134, 261, 267]
    states = range(len(starts))
    show = ShowLayer(128, 134, width=288, slots=6)
    show.prefill([0] * 6, starts, 267, state_ids=states)
    positions = np.asarray(starts)[:, None] + np.arange(tokens)
    got = show.decode(positions, state_ids=states)
    assert got == [[window_of(p, 128) for p in row] for row in positions.tolist()]
    with pytest.raises(ValueError, match=TOO_MANY.format(7, 128, 134, 8)):
        swa.DecodeMetadata.build(show.config.geometry, [0], [[*range(8)]])


def test_D02_rejected_drafts_are_never_seen_again():
    show, never = ShowLayer(3, 5), ShowLayer(3, 5)
    other = 50  # the token that is chosen after 10, in place of the draft 11
    for layer in (show, never):
        layer.prefill([0], [10], 12)
    assert show.decode([[10, 11, 12]]) == [[{8, 9, 10}, {9, 10, 11}, {10, 11, 12}]]
    never.decode([[10]])
    assert show.decode([[11]], [[other]]) == [[{9, 10, other}]]
    assert never.decode([[11]], [[other]]) == [[{9, 10, other}]]
    assert show.decode([[12]], [[51]]) == never.decode([[12]], [[51]]) == [[{10, other, 51}]]


def test_D03_steps_of_several_tokens_neither_grow_the_ring_nor_widen_the_window():
    show = ShowLayer(3, 5)
    shapes = set()
    for first in range(0, 30, 3):
        positions = [first, first + 1, first + 2]
        assert show.decode([positions]) == [[window_of(p, 3) for p in positions]]
        shapes.add((show.layer.rows.data.shape, show.layer.rows.data.nbytes))
    assert shapes == {((4, 352), 1408)}  # rings of 5 rows of 66 bytes, to a multiple of 32


@pytest.mark.parametrize("tokens", [7, 12, *SLOW_STEPS])
def test_D07_steps_of_one_to_twelve_tokens_are_one_kind_of_step(tokens):
    show = ShowLayer(8, 20)
    show.prefill([0], [20], 20)
    positions = [*range(20, 20 + tokens)]
    assert show.decode([positions]) == [[window_of(p, 8) for p in positions]]
    with pytest.raises(ValueError, match=TOO_MANY.format(13, 8, 20, 14)):
        swa.DecodeMetadata.build(show.config.geometry, [0], [[*range(20, 34)]])
