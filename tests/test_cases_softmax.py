"""Cases of tests/cases.md: queries that see nothing, sinks, and the lse."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equal_scores import HEADS, ROWS, WIDTH, attend, attention, check, constant_rows
from ring_layers import RingLayer, show_config, show_params, whole_sequence

import swa_jax as swa
from pallas_kernels import softmax

pytestmark = pytest.mark.quick_compilation

merge = jax.jit(softmax.merge)


def part_of(value: float, lse: float) -> tuple[np.ndarray, np.ndarray]:
    """What a part of the rows found: outputs of this value, and an lse."""
    return np.full((1, WIDTH), value, np.float32), np.float32([lse])


EMPTY = part_of(0, -np.inf)


@pytest.fixture(params=["xla", "interpret", pytest.param("triton", marks=pytest.mark.gpu)])
def implementation(request):
    return request.param


# --- H: nothing to see


def test_H01_nothing_in_the_window_and_nothing_in_a_compressed_cache_is_zero(implementation):
    check(attend(implementation, {0: 7.0}, [[-1] * 5], extra=({0: 7.0}, [-1])), [0], [0])
    check(attend(implementation, {0: 7.0}, [[-1] * 5], extra=({0: 7.0}, [0])), [7], [1])


def test_H01_of_eight_parts_seven_may_be_empty():
    part, no_sink = part_of(3, 0.5), np.float32([-np.inf])
    for place in (0, 3, 7):
        parts = [EMPTY] * 7
        parts.insert(place, part)
        np.testing.assert_array_equal(merge(parts, no_sink), part[0])
    np.testing.assert_array_equal(merge([EMPTY] * 8, no_sink), EMPTY[0])


def test_H02_queries_of_length_zero_are_exactly_zero(implementation):
    answer = attend(implementation, {0: 2.0, 1: 4.0}, [[0, 1]] * 3, lengths=[0, 2, 0])
    check(answer, [0, 3, 0], [0, 2, 0])
    assert not np.any(answer.out[[0, 2]])


def test_H03_with_everything_masked_the_output_is_neither_nan_nor_a_mean(implementation):
    answer = attend(implementation, dict.fromkeys(range(ROWS), 7.0), [[-1] * 5])
    np.testing.assert_array_equal(answer.out, np.zeros((1, HEADS)))
    np.testing.assert_array_equal(answer.lse, np.full((1, HEADS), -np.inf))


@pytest.mark.parametrize("sink", [2.0, -1e9])
def test_H06_without_a_row_a_sink_changes_nothing(implementation, sink):
    answer = attend(implementation, dict.fromkeys(range(ROWS), 7.0), [[-1] * 5], sink=sink)
    np.testing.assert_array_equal(answer.out, np.zeros((1, HEADS)))
    np.testing.assert_array_equal(answer.lse, np.full((1, HEADS), -np.inf))


# --- I: sinks


@pytest.mark.parametrize("indices", [[0, 1], [-1, -1, -1, 0, 1], [-1, 0, -1, 1]])
def test_I01_a_sink_joins_the_denominator_once(implementation, indices):
    check(attend(implementation, {0: 2.0, 1: 4.0}, [indices], sink=0.0), [2], [2])


def test_I01_a_sink_joins_once_however_many_parts_are_merged():
    part = part_of(3, math.log(2))  # of rows 2 and 4
    for splits in (1, 2, 4, 8):
        out = merge([EMPTY] * (splits - 1) + [part], np.zeros(1, np.float32))
        np.testing.assert_allclose(out, np.full((1, WIDTH), 2.0), rtol=1e-6)


@functools.cache
def one_query(columns: int, implementation: str):
    """Attention of one query of zeros over index lists that the kernel reads in pieces of 256."""
    call = functools.partial(attention, implementation=implementation)

    @jax.jit
    def run(rows, indices, sink):
        return call(jnp.zeros((1, 1, WIDTH), jnp.bfloat16), rows, indices, None, None, sink)

    return run


BY_SPLITS = pytest.mark.parametrize("splits", [1, 2, 4, 8])
SLOW_PIECES = pytest.mark.parametrize(
    "implementation",
    [
        "xla",
        pytest.param("interpret", marks=pytest.mark.slow),
        pytest.param("triton", marks=pytest.mark.gpu),
    ],
)


@BY_SPLITS
@SLOW_PIECES
def test_I01_a_sink_joins_once_however_many_pieces_of_a_list_are_empty(splits, implementation):
    columns = 256 * splits
    for first, second in ((columns - 2, columns - 1), (0, columns - 1)):
        indices = np.full((1, columns), -1, np.int32)
        indices[0, [first, second]] = 0, 1
        run = one_query(columns, implementation)
        out, lse = run(constant_rows({0: 2.0, 1: 4.0}), indices, jnp.zeros(1))
        np.testing.assert_allclose(np.asarray(out, np.float32), np.full((1, 1, WIDTH), 2.0))
        np.testing.assert_allclose(lse, [[0.693147]], rtol=1e-6)


@pytest.mark.parametrize(("sink", "expected"), [(0, 2.0), (-np.inf, 3.0), (5, 0.0399)])
def test_I02_every_operation_counts_the_sink(implementation, sink, expected):
    for extra in (None, ({1: 4.0}, [1])):
        rows, indices = ({0: 2.0, 1: 4.0}, [[0, 1]]) if extra is None else ({0: 2.0}, [[0]])
        answer = attend(implementation, rows, indices, sink=sink, extra=extra)
        np.testing.assert_allclose(answer.out, np.full((1, HEADS), expected), rtol=5e-3)


@pytest.mark.parametrize(
    ("form", "fmt"),
    [
        ("decode", swa.V41),
        ("verify", swa.V41),
        ("prefill", swa.V41),
        ("sequence", swa.V41),
        ("decode", swa.BF16),
    ],
)
def test_I02_every_form_of_a_layer_counts_the_sink(form, fmt):
    config = show_config(3, 5, fmt=fmt.with_width(WIDTH))
    for sink, expected in ((0, 2.0), (-np.inf, 3.0), (5, 0.0399)):
        params = show_params(config, sink)
        # Two tokens, whose rows are 2 in one place and 4 in another.
        weights = params["params"]["kv_norm"]
        params["params"]["kv_norm"] = weights.at[0].multiply(2).at[1].multiply(4)
        x = np.eye(WIDTH, dtype=np.float32)[None]
        layer = RingLayer(config, params)
        if form == "decode":
            _, y = (layer.decode(x[:, p : p + 1], [0], [[p]])[0, 0] for p in range(2))
        elif form == "verify":
            y = layer.decode(x[:, :3], [0], [[0, 1, -1]])[0, 1]
        elif form == "prefill":
            y = layer.prefill(x[:, :12], [0], [0], [2])[0, 1]
        else:
            y = np.asarray(whole_sequence(config)(params, jnp.asarray(x[:, :2])))[0, 1]
        np.testing.assert_allclose(np.sum(y), expected, rtol=1e-3)


@pytest.mark.parametrize("heads", [1, 3, 24, 43])
@SLOW_PIECES
def test_I05_a_sink_is_a_logit_that_is_not_scaled(heads, implementation):
    rows = constant_rows({0: 2.0, 1: 4.0})
    q, indices = jnp.zeros((1, heads, WIDTH), jnp.bfloat16), jnp.asarray([[0, 1]])
    out, _ = attention(
        q, rows, indices, None, None, jnp.ones(heads), scale=0.5, implementation=implementation
    )
    expected = np.full((1, heads, WIDTH), 6 / (2 + math.e))  # and not 6 / (2 + exp(0.5))
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, rtol=2**-8)


# --- J: lse


def test_J01_lse_is_a_natural_logarithm(implementation):
    answer = attend(implementation, {0: 2.0, 1: 4.0}, [[0, 1]])
    np.testing.assert_allclose(answer.lse, np.full((1, HEADS), 0.693147), rtol=1e-6)


def test_J02_lse_is_without_the_sink_so_that_parts_merge(implementation):
    answer = attend(implementation, {0: 2.0, 1: 4.0}, [[0, 1]], sink=0.0)
    np.testing.assert_allclose(answer.lse, np.full((1, HEADS), 0.693147), rtol=1e-6)
    window, extra = {0: 2.0, 1: 4.0}, ({0: 9.0}, [0])
    parts = [attend(implementation, window, [[0, 1]]), attend(implementation, extra[0], [[0]])]
    parts = [(np.float32(out[..., None]), np.float32(lse)) for out, lse in parts]
    merged = merge(parts, np.zeros((1, HEADS), np.float32))
    joint = attend(implementation, window, [[0, 1]], sink=0.0, extra=extra)
    np.testing.assert_allclose(merged[..., 0], np.full((1, HEADS), 3.75), rtol=1e-6)  # 15 / 4
    np.testing.assert_allclose(joint.out, np.full((1, HEADS), 3.75), rtol=2**-8)
    np.testing.assert_allclose(joint.lse, np.full((1, HEADS), math.log(3)), rtol=1e-6)
