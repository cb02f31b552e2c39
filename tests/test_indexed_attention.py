"""indexed_attention against float64 numpy: corner cases by a generator, literals, gradients."""

import dataclasses
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as reference
import pytest

import pallas_kernels
from pallas_kernels import (
    BF16,
    F32,
    V4,
    V32,
    V41,
    V41_FP4,
    ExtraKV,
    KVCacheFormat,
    KVRows,
    quantize_rows,
    transforms,
)
from pallas_kernels.softmax import merge

pytestmark = pytest.mark.quick_compilation

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
ROWS_PER_SLOT = 7
SINKS = [-np.inf, 0.3, 20.0, np.inf, -1e9, -2.0]

_indexed_attention = jax.jit(
    pallas_kernels.indexed_attention,
    static_argnames=("query_norm_eps", "pairing", "output_format", "implementation"),
)


@pytest.fixture(params=["xla"])
def implementation(request):
    return request.param


@dataclasses.dataclass
class Cache:
    """Rows with what is asked of them, as bytes for the call and as numbers for the reference."""

    data: np.ndarray  # uint8[num_rows, row_bytes]
    fmt: KVCacheFormat
    indices: np.ndarray
    lengths: np.ndarray | None

    @property
    def rows(self):
        """A region in a block whose other bytes are all 0xFF, which is NaN in every format."""
        region = self.data.reshape(-1, ROWS_PER_SLOT * self.fmt.row_bytes)
        block = np.pad(region, ((0, 0), (32, 45)), constant_values=0xFF)
        return KVRows.view(jnp.asarray(block), start=32, rows_per_slot=ROWS_PER_SLOT, fmt=self.fmt)

    def for_reference(self):
        return reference.dequantize(self.data, self.fmt), self.indices, self.lengths

    def selected(self):
        columns = np.arange(self.indices.shape[1])
        lengths = self.indices.shape[1] if self.lengths is None else self.lengths[:, None]
        named = self.indices[(columns < lengths) & (self.indices >= 0)]
        return named[named < len(self.data)]

    def poisoned(self, byte):
        """The rows nobody selects overwritten: NaN, or large numbers."""
        data = self.data.copy()
        data[np.setdiff1d(np.arange(len(data)), self.selected())] = byte
        return dataclasses.replace(self, data=data)


def attend(q, cache, implementation, *, extra=None, sink=None, **options):
    def arguments(part):
        lengths = None if part.lengths is None else jnp.asarray(part.lengths, jnp.int32)
        return part.rows, jnp.asarray(part.indices, jnp.int32), lengths

    rows, indices, lengths = arguments(cache)
    return _indexed_attention(
        jnp.asarray(q),
        rows,
        indices,
        lengths=lengths,
        extra=None if extra is None else ExtraKV(*arguments(extra)),
        sink=None if sink is None else jnp.asarray(sink, jnp.float32),
        implementation=implementation,
        **options,
    )


def check(got, expected):
    """float32: out to 3e-6 of the largest value, lse to 1e-5."""
    out, lse = np.asarray(got[0]), np.asarray(got[1])
    largest = np.abs(expected[0]).max()
    np.testing.assert_allclose(out, expected[0], rtol=0, atol=3e-6 * largest)
    np.testing.assert_allclose(lse, expected[1], rtol=0, atol=1e-5)


# --- corner cases


@dataclasses.dataclass(frozen=True)
class Shape:
    n: int
    heads: int
    width: int
    k: int
    fmt: KVCacheFormat = V41
    extra_k: int | None = None
    extra_fmt: KVCacheFormat | None = None
    slots: int = 21

    def random_cache(self, random, k=None, fmt=None):
        fmt = (fmt or self.fmt).with_width(self.width)
        num_rows = self.slots * ROWS_PER_SLOT
        size = random.uniform(0.1, 3, (num_rows, 1))
        values = random.normal(size=(num_rows, self.width)) * size
        data = reference.quantize(values.astype(np.float32), fmt)
        # Neither the first row nor the last, where clamped and wrapped indices would point.
        indices = random.integers(1, num_rows - 1, (self.n, k or self.k))
        return Cache(data, fmt, indices, np.full(self.n, k or self.k))


SHAPES = {
    "one-head-one-row": Shape(n=9, heads=1, width=128, k=1),
    "24-heads": Shape(n=1, heads=24, width=64, k=100, fmt=BF16),
    "odd": Shape(n=7, heads=6, width=64, k=133),
    "in-chunks": Shape(n=65, heads=2, width=512, k=134),
    "float32-rows": Shape(n=9, heads=6, width=64, k=100, fmt=F32),
    "fp4-extra": Shape(n=7, heads=6, width=128, k=9, fmt=V4, extra_k=133, extra_fmt=V41_FP4),
    "bf16-extra": Shape(n=9, heads=24, width=64, k=133, extra_k=9, extra_fmt=BF16),
}


def case_all_there(cache, random):
    pass


def case_every_index_none(cache, random):
    cache.indices[:] = -1


def case_some_queries_empty(cache, random):
    cache.indices[::2] = -1


def case_holes(cache, random):
    cache.indices[random.random(cache.indices.shape) < 0.4] = -1


def case_only_the_last_column(cache, random):
    cache.indices[:, :-1] = -1


def case_outside(cache, random):
    bad = [len(cache.data), len(cache.data) + 1, INT_MAX, INT_MIN, -2]
    outside = random.random(cache.indices.shape) < 0.4
    cache.indices[outside] = random.choice(bad, outside.sum())


def case_duplicates(cache, random):
    cache.indices[:] = random.choice([3, 4, 9], cache.indices.shape)


def case_lengths(cache, random):
    """What lies beyond a length names other rows, which are poisoned."""
    n, k = cache.indices.shape
    cache.lengths = np.resize([0, k // 2, 1, k, k + 5, INT_MAX, -3, INT_MIN], n)
    beyond = np.arange(k) >= cache.lengths[:, None]
    cache.indices[:] = np.where(beyond, 70 + cache.indices % 70, cache.indices % 70)


CASES = [
    case_all_there,
    case_every_index_none,
    case_some_queries_empty,
    case_holes,
    case_only_the_last_column,
    case_outside,
    case_duplicates,
    case_lengths,
]


def make_case(shape, case, poison):
    """Queries, cache, extra cache and sinks; the extra cache takes the next case."""
    random = np.random.default_rng([CASES.index(case), shape.n, shape.k])
    q = random.normal(size=(shape.n, shape.heads, shape.width)).astype(np.float32)
    cache, extra = shape.random_cache(random), None
    case(cache, random)
    if shape.extra_k is not None:
        extra = shape.random_cache(random, shape.extra_k, shape.extra_fmt)
        CASES[(CASES.index(case) + 1) % len(CASES)](extra, random)
        if case is case_every_index_none:
            extra.indices[:] = -1
        extra = extra.poisoned(poison)
    sink = np.resize(np.roll(SINKS, CASES.index(case)), shape.heads)
    return q, cache.poisoned(poison), extra, sink


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__[5:])
@pytest.mark.parametrize("shape", SHAPES)
def test_corner_cases_equal_float64(shape, case, implementation):
    poison = 0x7F if CASES.index(case) % 2 else 0xFF
    q, cache, extra, sink = make_case(SHAPES[shape], case, poison)
    got = attend(q, cache, implementation, extra=extra, sink=sink)
    caches = [part.for_reference() for part in (cache, extra) if part is not None]
    expected = reference.attention(q, caches, sink)
    check(got, expected)
    empty = expected[1] == -np.inf
    assert not np.asarray(got[0])[empty].any()
    np.testing.assert_array_equal(np.asarray(got[1]) == -np.inf, empty)
    if case is case_every_index_none:
        assert empty.all()


ODD = SHAPES["odd"]


@pytest.mark.parametrize("byte", [0x00, 0x7F, 0xFF])
def test_rows_nobody_selects_change_nothing(byte, implementation):
    q, cache, _, sink = make_case(ODD, case_outside, 0x3C)
    expected = attend(q, cache, implementation, sink=sink)
    got = attend(q, cache.poisoned(byte), implementation, sink=sink)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.makes_nan
def test_a_selected_nan_row_makes_only_its_queries_nan(implementation):
    q, cache, _, _ = make_case(ODD, case_all_there, 0x00)
    expected = attend(q, cache, implementation, sink=np.zeros(6))
    cache.indices[2, 4] = 0
    cache.data[0] = 0xFF
    out, _ = attend(q, cache, implementation, sink=np.zeros(6))
    assert np.isnan(out[2]).all()
    others = [0, 1, 3, 4, 5, 6]
    np.testing.assert_array_equal(out[others, :], expected[0][others, :])


@pytest.mark.parametrize("scale", [0.5, 0.0])
def test_scale_is_of_the_scores_and_not_of_the_sink(scale, implementation):
    q, cache, _, _ = make_case(ODD, case_holes, 0xFF)
    sink = np.linspace(-1, 1, 6)
    got = attend(q, cache, implementation, sink=sink, scale=scale)
    check(got, reference.attention(q, [cache.for_reference()], sink, scale))


def test_large_scores_do_not_overflow(implementation):
    q, cache, _, sink = make_case(ODD, case_holes, 0xFF)
    q *= 300  # scores to about 1e4
    out, lse = attend(q, cache, implementation, sink=sink)
    expected = reference.attention(q, [cache.for_reference()], sink)
    assert expected[1].max() > 1e3
    np.testing.assert_allclose(lse, expected[1], rtol=3e-6)
    # A score of 1e4 is right to 1e-3, and so is its exponential.
    np.testing.assert_allclose(out, expected[0], rtol=0, atol=1e-2 * np.abs(expected[0]).max())


# --- literals


def two_rows(values=(2.0, 4.0), indices=((-1, 0, -1, 1),), fmt=V41, heads=1):
    """Constant rows and queries of zeros, so that every score is 0."""
    fmt = fmt.with_width(64)
    rows = np.zeros((ROWS_PER_SLOT, 64), np.float32)
    rows[: len(values)] = np.asarray(values)[:, None]
    indices = np.asarray(indices)
    cache = Cache(reference.quantize(rows, fmt), fmt, indices, None)
    return np.zeros((len(indices), heads, 64), np.float32), cache


@pytest.mark.parametrize("fmt", [V41, BF16, F32, V41_FP4], ids=lambda fmt: fmt.name)
def test_sink_joins_the_denominator_once_and_lse_not_at_all(fmt, implementation):
    q, cache = two_rows((3.0, 6.0), fmt=fmt, heads=7)  # 3 and 6 are exact in all formats
    out, lse = attend(q, cache, implementation, sink=[0, -np.inf, 5, np.inf, -1e9, 80, 1e9])
    expected = [3.0, 4.5, 9 / (2 + math.exp(5)), 0.0, 4.5, 9 * math.exp(-80), 0.0]
    np.testing.assert_allclose(out[0], np.tile(np.transpose([expected]), 64), rtol=1e-5)
    np.testing.assert_allclose(lse, np.full((1, 7), 0.693147), rtol=1e-6)


def test_two_rows_and_a_sink_of_zero(implementation):
    q, cache = two_rows()
    out, lse = attend(q, cache, implementation, sink=[0.0])
    np.testing.assert_allclose(out, np.full((1, 1, 64), 2.0), rtol=1e-6)  # (2 + 4) / (2 + 1)
    np.testing.assert_allclose(lse, [[0.6931472]], rtol=1e-6)
    out, _ = attend(q, cache, implementation)
    np.testing.assert_allclose(out, np.full((1, 1, 64), 3.0), rtol=1e-6)


def test_nothing_visible_is_zero_whatever_the_sink(implementation):
    q, cache = two_rows((7.0, 7.0), indices=[[-1, 99, 7, INT_MAX]], heads=5)
    out, lse = attend(q, cache, implementation, sink=[0, -np.inf, 2, np.inf, -1e9])
    np.testing.assert_array_equal(out, np.zeros((1, 5, 64)))
    np.testing.assert_array_equal(lse, np.full((1, 5), -np.inf))


def test_a_repeated_index_counts_twice(implementation):
    q, cache = two_rows(indices=[[0, 1, 0, -1]])
    out, lse = attend(q, cache, implementation)
    np.testing.assert_allclose(out, np.full((1, 1, 64), 8 / 3), rtol=1e-6)
    np.testing.assert_allclose(lse, [[math.log(3)]], rtol=1e-6)


def test_every_row_that_an_index_names_is_read_a_future_one_too(implementation):
    # The queries of tokens 0, 1 and 2 all name row 2, which the third wrote.
    q, cache = two_rows((2.0, 4.0, 12.0), indices=[[0, 2], [1, 2], [2, -1]])
    out, _ = attend(q, cache, implementation)
    np.testing.assert_allclose(out[:, 0, 0], [7.0, 8.0, 12.0], rtol=1e-6)


def test_lengths_are_of_each_query(implementation):
    q, cache = two_rows((2.0, 4.0, 12.0, 1.0), indices=[[0, 1, 2, 3]] * 6)
    cache.lengths = np.asarray([2, 0, 3, 9, -1, 1])
    out, lse = attend(q, cache, implementation)
    np.testing.assert_allclose(out[:, 0, 0], [3.0, 0.0, 6.0, 4.75, 0.0, 2.0], rtol=1e-6)
    np.testing.assert_allclose(np.exp(lse[:, 0]), [2, 0, 3, 4, 0, 1], rtol=1e-6)


# --- relations between calls


def test_the_order_of_the_indices_does_not_matter(implementation):
    q, cache, _, sink = make_case(ODD, case_holes, 0xFF)
    expected = attend(q, cache, implementation, sink=sink)
    cache.indices = np.random.default_rng(0).permuted(cache.indices, axis=1)
    check(attend(q, cache, implementation, sink=sink), [np.asarray(part) for part in expected])


def test_an_extra_cache_is_the_merge_of_two_calls_by_lse(implementation):
    q, cache, extra, sink = make_case(SHAPES["fp4-extra"], case_holes, 0xFF)
    got = attend(q, cache, implementation, extra=extra, sink=sink)
    none = np.full(6, -np.inf)
    parts = [attend(q, part, implementation, sink=none) for part in (cache, extra)]
    outs, lses = (np.asarray(part, np.float64) for part in zip(*parts, strict=True))
    lse = np.logaddexp(*lses)
    weights = np.exp(lses - np.logaddexp(lse, sink))
    check(got, (np.sum(weights[..., None] * outs, axis=0), lse))


def test_a_query_of_more_rows_than_a_chunk_holds_is_a_chunk_of_its_own(implementation):
    q, cache, _, sink = make_case(dataclasses.replace(ODD, n=3, k=8200), case_holes, 0xFF)
    out, lse = attend(q, cache, implementation, sink=sink)
    for t in range(3):
        alone = dataclasses.replace(cache, indices=cache.indices[t : t + 1], lengths=None)
        want = attend(q[t : t + 1], alone, implementation, sink=sink)
        check((out[t : t + 1], lse[t : t + 1]), [np.asarray(part) for part in want])


def test_parts_are_merged_by_their_lse_and_the_sink_counts_once():
    # Values 1 and 4 with masses 1 and 2 give (1 + 8) / 3, and a sink of mass 3 halves that, however
    # large all masses are. A part without rows has no say, and two of them give 0.
    none, two, three = -math.inf, math.log(2), math.log(3)
    first = [0.0, 0.0, 100.0, -100.0, none, none]
    second = [two, two, 100 + two, two - 100, two, none]
    sink = [none, three, 100 + three, three - 100, two, 0.0]
    parts = [
        (np.full((6, 2), value, np.float32), np.float32(lse))
        for value, lse in ((1, first), (4, second))
    ]
    got = jax.jit(merge)(parts, np.float32(sink))
    expected = [3.0, 1.5, 1.5, 1.5, 2.0, 0.0]
    np.testing.assert_allclose(got, np.transpose([expected] * 2), rtol=1e-5)


def test_gradients_of_merged_parts_are_those_of_float64_differences():
    # The second query has no row in either part, and the third none in the first.
    none = -math.inf
    out = np.asarray([[[1.0], [0.0], [0.0]], [[4.0], [0.0], [3.0]]], np.float32)
    lses = np.asarray([[0.2, none, none], [0.7, none, 0.4]], np.float32)
    sink = np.asarray([0.3, 0.3, -0.1], np.float32)

    def loss(sink):
        parts = list(zip(jnp.asarray(out), jnp.asarray(lses), strict=True))
        return jnp.sum(merge(parts, sink))

    def exact(sink):
        mass = np.exp(lses.astype(np.float64))
        total = np.sum(mass, axis=0) + np.exp(sink)
        return np.sum(np.sum(mass * out[..., 0], axis=0) / total)

    step = 1e-5 * np.eye(3)
    slopes = [(exact(sink + change) - exact(sink - change)) / 2e-5 for change in step]
    np.testing.assert_allclose(jax.grad(loss)(sink), slopes, rtol=1e-4)


@pytest.mark.parametrize("k", [9, 0])
def test_an_extra_cache_without_rows_changes_nothing(k, implementation):
    shape = dataclasses.replace(SHAPES["fp4-extra"], extra_k=9)
    q, cache, extra, sink = make_case(shape, case_holes, 0xFF)
    extra.indices = np.full((7, k), -1)
    expected = attend(q, cache, implementation, sink=sink)
    got = attend(q, cache, implementation, extra=extra, sink=sink)
    check(got, [np.asarray(part) for part in expected])
    cache.indices = np.zeros((7, k), int)
    cache.lengths[:] = 0
    out, lse = attend(q, cache, implementation, extra=extra, sink=sink)
    assert not out.any()
    assert (lse == -np.inf).all()


def test_no_queries(implementation):
    q, cache = two_rows()
    cache.indices = np.zeros((0, 4), int)
    out, lse = attend(q[:0], cache, implementation)
    assert (out.shape, lse.shape) == ((0, 1, 64), (0, 1))


@pytest.mark.parametrize("shape", ["odd", "in-chunks"])
def test_a_query_does_not_depend_on_the_others_and_a_call_is_repeatable(shape, implementation):
    q, cache, _, sink = make_case(SHAPES[shape], case_holes, 0xFF)
    expected = attend(q, cache, implementation, sink=sink)
    again = attend(q, cache, implementation, sink=sink)
    jax.tree.map(np.testing.assert_array_equal, again, expected)
    others = np.arange(len(q)) != 5
    q[others] = 100 * q[others][::-1]
    cache.indices[others] = np.roll(cache.indices[others], 1, axis=0)
    cache.lengths[others] = 3
    got = attend(q, cache, implementation, sink=sink)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[5], b[5]), got, expected)


def test_vmap_is_a_loop(implementation):
    cases = [make_case(ODD, case, 0xFF) for case in (case_holes, case_lengths)]
    each = [
        (jnp.asarray(q), cache.rows, *map(jnp.asarray, (cache.indices, cache.lengths, sink)))
        for q, cache, _, sink in cases
    ]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)

    def call(q, rows, indices, lengths, sink):
        return pallas_kernels.indexed_attention(
            q, rows, indices, lengths=lengths, sink=sink, implementation=implementation
        )

    got = jax.jit(jax.vmap(call))(*stacked)
    for i, (q, cache, _, sink) in enumerate(cases):
        one = attend(q, cache, implementation, sink=sink)
        check([part[i] for part in got], [np.asarray(part) for part in one])


# --- bfloat16


@pytest.mark.parametrize("fmt", [V41, F32], ids=lambda fmt: fmt.name)
def test_bfloat16_queries_are_within_two_ulp(fmt, implementation):
    shape = dataclasses.replace(ODD, fmt=fmt)
    q, cache, _, sink = make_case(shape, case_holes, 0xFF)
    out, lse = attend(jnp.asarray(q, jnp.bfloat16), cache, implementation, sink=sink)
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    values, indices, lengths = cache.for_reference()
    inputs = reference.to_bfloat16(q), [(reference.to_bfloat16(values), indices, lengths)]
    expected = reference.attention(*inputs, sink)
    error = np.asarray(out, np.float64) - expected[0]
    assert np.sqrt(np.mean(error**2)) <= 4e-3 * np.sqrt(np.mean(expected[0] ** 2))
    assert np.abs(error).max() <= 2**-7 * np.abs(expected[0]).max()
    np.testing.assert_allclose(lse, expected[1], atol=1e-5)  # inputs are exact, so sums are too


def test_probabilities_are_rounded_for_the_values_and_not_in_the_denominator(implementation):
    rows = np.zeros((ROWS_PER_SLOT, 64), np.float32)
    rows[0, 1:], rows[1, 0], rows[1, 1:] = 1, 0.5, 2
    fmt = BF16.with_width(64)
    cache = Cache(reference.quantize(rows, fmt), fmt, np.asarray([[0, 1]]), None)
    q = jnp.zeros((1, 1, 64), jnp.bfloat16).at[0, 0, 0].set(-1)
    out, lse = attend(q, cache, implementation, scale=1.0, output_format=F32.with_width(64))
    # The scores are 0 and -0.5; exp(-0.5) = 0.6065307 and its bfloat16 0.60546875.
    np.testing.assert_allclose(lse, [[math.log(1.6065307)]], rtol=1e-6)
    values = np.asarray(out).view(np.float32)
    np.testing.assert_allclose(values[0, 0, 1:], 2.2109375 / 1.6065307, rtol=2e-6)


# --- fused ends


@pytest.mark.parametrize("pairing", ["interleaved", "half_split"])
def test_fused_ends_are_the_separate_transforms(pairing, implementation):
    q, cache, _, sink = make_case(ODD, case_some_queries_empty, 0xFF)
    angles = np.random.default_rng(0).uniform(-np.pi, np.pi, (7, 12))
    cos, sin = jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)
    ends = {"query_norm_eps": 1e-3, "cos": cos, "sin": sin, "pairing": pairing}
    got = attend(q, cache, implementation, sink=sink, **ends)

    query = reference.rotate(reference.norm(q, None, 1e-3), angles[:, None], pairing)
    out, lse = reference.attention(query, [cache.for_reference()], sink)
    check(got, (reference.rotate(out, -angles[:, None], pairing), lse))

    fmt = V41.with_width(64)
    rows, lse = attend(q, cache, implementation, sink=sink, output_format=fmt, **ends)
    assert (rows.shape, rows.dtype) == ((7, 6, 66), jnp.uint8)
    np.testing.assert_array_equal(rows, jax.jit(lambda out: quantize_rows(out, fmt))(got[0]))
    np.testing.assert_array_equal(lse, got[1])


def test_each_fused_end_works_alone(implementation):
    q, cache, _, sink = make_case(ODD, case_holes, 0xFF)
    got = attend(q, cache, implementation, sink=sink, query_norm_eps=1e-3)
    query = np.asarray(transforms.rms_norm(jnp.asarray(q), None, 1e-3))
    check(got, reference.attention(query, [cache.for_reference()], sink))
    angles = jnp.zeros((7, 12))
    got = attend(q, cache, implementation, sink=sink, cos=jnp.cos(angles), sin=jnp.sin(angles))
    check(got, reference.attention(q, [cache.for_reference()], sink))


def test_a_bfloat16_query_is_rounded_once_after_its_norm_and_rotation(implementation):
    q, cache, _, _ = make_case(ODD, case_holes, 0xFF)
    q = jnp.asarray(q, jnp.bfloat16)
    angles = np.random.default_rng(0).uniform(-np.pi, np.pi, (7, 12))
    cos, sin = jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)
    _, lse = attend(q, cache, implementation, query_norm_eps=1e-3, cos=cos, sin=sin)
    query = reference.norm(np.asarray(q, np.float64), None, 1e-3)
    query = reference.to_bfloat16(reference.rotate(query, angles[:, None], "interleaved"))
    _, expected = reference.attention(query, [cache.for_reference()])
    # The median, as a value near a tie may go the other way; without rounding it is 1e-3.
    assert np.median(np.abs(np.asarray(lse) - expected)) <= 1e-5


def test_output_rows_come_from_unrounded_output(implementation):
    q, cache, _, sink = make_case(ODD, case_some_queries_empty, 0xFF)
    q = jnp.asarray(q, jnp.bfloat16)
    fmt = F32.with_width(64)
    rows, _ = attend(q, cache, implementation, sink=sink, output_format=fmt)
    out, _ = attend(q, cache, implementation, sink=sink)
    values = reference.dequantize(np.asarray(rows).reshape(42, -1), fmt).reshape(7, 6, 64)
    np.testing.assert_array_equal(reference.to_bfloat16(values), np.asarray(out, np.float32))
    assert (values != reference.to_bfloat16(values)).any()


# --- gradients


@pytest.mark.parametrize("case", [case_some_queries_empty, case_every_index_none])
def test_gradients_are_those_of_float64_differences(case, implementation):
    q, cache, _, sink = make_case(ODD, case, 0xFF)
    random = np.random.default_rng(1)
    of_out, of_lse = (
        random.normal(size=size).astype(np.float32) for size in (q.shape, q.shape[:2])
    )
    rows, indices = cache.rows, jnp.asarray(cache.indices)

    def weighted_sum(out, lse, np=jnp):
        return np.sum(out * of_out) + np.sum(np.where(lse == -np.inf, 0.0, lse) * of_lse)

    @jax.jit
    def loss(q, sink):
        out, lse = pallas_kernels.indexed_attention(
            q, rows, indices, sink=sink, implementation=implementation
        )
        return weighted_sum(out, lse)

    def exact(q, sink):
        return weighted_sum(*reference.attention(q, [cache.for_reference()], sink), np=np)

    sink32 = jnp.asarray(sink, jnp.float32)
    of_q, of_sink = map(np.asarray, jax.grad(loss, argnums=(0, 1))(jnp.asarray(q), sink32))
    seen = (cache.indices >= 0).any(axis=1)
    np.testing.assert_array_equal(of_q[~seen], 0)
    step = 1e-5
    for t in np.flatnonzero(seen):
        direction = np.zeros(q.shape)
        direction[t] = random.normal(size=q.shape[1:])
        slope = exact(q + step * direction, sink) - exact(q - step * direction, sink)
        np.testing.assert_allclose(np.sum(of_q * direction), slope / (2 * step), rtol=1e-4)
    for head in range(6):
        direction = step * (np.arange(6) == head)
        slope = exact(q, sink + direction) - exact(q, sink - direction)
        np.testing.assert_allclose(of_sink[head], slope / (2 * step), rtol=1e-4, atol=1e-5)


def test_gradients_of_many_queries_are_not_those_of_rows_that_fill_the_last_chunk(implementation):
    # 61 such queries fit a chunk; the rows that nobody names, the first two too, are NaN.
    shape = dataclasses.replace(ODD, n=65, heads=2)
    q, cache, _, _ = make_case(shape, case_all_there, 0xFF)
    cache.indices = np.maximum(cache.indices, 2)
    cache = cache.poisoned(0xFF)
    sink, step = np.asarray([0.3, -2.0]), np.diag([1e-5] * 2)

    @jax.jit
    @jax.grad
    def of_sink(sink):
        out, _ = pallas_kernels.indexed_attention(
            q, cache.rows, cache.indices, sink=sink, implementation=implementation
        )
        return jnp.sum(out)

    def exact(sink):
        return np.sum(reference.attention(q, [cache.for_reference()], sink)[0])

    slopes = [(exact(sink + change) - exact(sink - change)) / 2e-5 for change in step]
    np.testing.assert_allclose(of_sink(jnp.asarray(sink, jnp.float32)), slopes, rtol=1e-4)


@pytest.mark.parametrize("implementation", ["xla", None])
def test_bfloat16_gradients_are_finite(implementation):
    q, cache, _, sink = make_case(ODD, case_some_queries_empty, 0xFF)
    rows, indices = cache.rows, jnp.asarray(cache.indices)

    @jax.jit
    @jax.grad
    def of_q(q):
        out, lse = _indexed_attention(
            q, rows, indices, sink=jnp.asarray(sink), implementation=implementation
        )
        return jnp.sum(out.astype(jnp.float32)) + jnp.sum(jnp.where(jnp.isinf(lse), 0.0, lse))

    gradient = of_q(jnp.asarray(q, jnp.bfloat16))
    assert np.isfinite(np.asarray(gradient, np.float32)).all()
    assert gradient[1].any()


# --- memory


# All decoded rows at once would take 64 MiB. CPUs turn bfloat16 queries and outputs to float32.
@pytest.mark.parametrize(("dtype", "copies"), [(jnp.float32, 0), (jnp.bfloat16, 2)])
def test_temporary_memory_is_that_of_a_few_queries(dtype, copies, implementation):
    rows = jax.eval_shape(lambda: KVRows.create(2, 134))
    q = jax.ShapeDtypeStruct((256, 64, 512), dtype)
    indices = jax.ShapeDtypeStruct((256, 128), jnp.int32)
    compiled = _indexed_attention.lower(q, rows, indices, implementation=implementation).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 8e6 + copies * 4 * q.size


# --- arguments


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.int16])
def test_indices_and_lengths_may_be_integers_of_any_kind(dtype, implementation):
    q, cache = two_rows()
    out, lse = jax.eval_shape(
        lambda: pallas_kernels.indexed_attention(
            jnp.asarray(q), cache.rows, np.asarray([[0, 1, 2]], dtype),
            lengths=np.asarray([2], dtype), implementation=implementation,
        )
    )  # fmt: skip
    assert (out.shape, lse.shape) == (q.shape, (1, 1))


SMALL = KVRows.create(2, 3, V41.with_width(64))


def test_a_query_of_numpys_own_dtype_is_taken_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, _ = pallas_kernels.indexed_attention(np.ones((1, 2, 64)), SMALL, [[0]])
    assert out.dtype == jnp.zeros((), jnp.result_type(float)).dtype


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": jnp.zeros((4, 64))}, r"q: expected shape \(any, any, any\), got \(4, 64\)"),
        ({"q": jnp.zeros((4, 2, 64), jnp.int32)}, "q: expected a floating .*, got int32"),
        ({"q": jnp.zeros((4, 2, 32))}, "rows of 32 values .* V41 with 64"),
        ({"rows": SMALL.data}, "rows: expected a KVRows, got ArrayImpl"),
        (
            {"rows": KVRows.create(2, 3, V32.with_width(192)), "q": jnp.zeros((4, 2, 192))},
            "format V32 is for conversion only",
        ),
        ({"indices": jnp.zeros((5, 3), jnp.int32)}, r"indices: .*\(4, any\), got \(5, 3\)"),
        ({"indices": jnp.zeros(4, jnp.int32)}, r"indices: expected .*, got \(4,\)"),
        (
            {"indices": jnp.zeros((4, 3), jnp.float32)},
            "indices: expected integers, got dtype float32",
        ),
        ({"indices": jnp.zeros((4, 3), bool)}, "indices: expected integers, got dtype bool"),
        ({"lengths": jnp.zeros(3, jnp.int32)}, r"lengths: expected shape \(4\), got \(3,\)"),
        ({"lengths": jnp.zeros(4, jnp.float32)}, "lengths: expected integers, got dtype float32"),
        ({"sink": jnp.zeros(3)}, r"sink: expected shape \(2\), got \(3,\)"),
        ({"sink": jnp.zeros(2, jnp.int32)}, "sink: expected a floating .*, got int32"),
        ({"extra": SMALL}, "extra: expected an ExtraKV, got KVRows"),
        (
            {"extra": ExtraKV(KVRows.create(2, 3, BF16), jnp.zeros((4, 1), jnp.int32))},
            "extra.rows: expected rows of 64 values .* BF16 with 512",
        ),
        (
            {"extra": ExtraKV(SMALL, jnp.zeros((3, 1), jnp.int32))},
            r"indices: expected shape \(4, any\), got \(3, 1\)",
        ),
        ({"cos": jnp.zeros((4, 3))}, "cos, sin: expected both or none, got one"),
        ({"cos": jnp.zeros((4, 3)), "sin": jnp.zeros((4, 2))}, "cos, sin: expected the same shape"),
        ({"cos": jnp.zeros((4, 33)), "sin": jnp.zeros((4, 33))}, "at most 32 pairs"),
        ({"cos": jnp.zeros((3, 3)), "sin": jnp.zeros((3, 3))}, r"\(4, any\), got \(3, 3\)"),
        ({"scale": "1"}, "scale: expected a number, got dtype <U1"),
        ({"scale": True}, "scale: expected a number, got dtype bool"),
        ({"pairing": "half"}, "pairing: expected one of .*, got 'half'"),
        ({"output_format": V41}, "output_format: expected rows of 64 values, got 512"),
        ({"output_format": "V41"}, "output_format: expected a KVCacheFormat, got str"),
        (
            {"output_format": dataclasses.replace(SMALL.fmt, token_interleaved=False)},
            "output_format: expected a token-interleaved format, got page-planar V41",
        ),
        ({"query_norm_eps": -1.0}, "query_norm_eps: expected a finite number of 0 or more, .*-1.0"),
        ({"query_norm_eps": np.nan}, "query_norm_eps: expected a finite number .*, got nan"),
        ({"query_norm_eps": np.inf}, "query_norm_eps: expected a finite number .*, got inf"),
    ],
)
def test_bad_arguments_are_refused(changes, message):
    arguments = {"q": jnp.zeros((4, 2, 64)), "rows": SMALL, "indices": jnp.zeros((4, 3), jnp.int32)}
    with pytest.raises(ValueError, match=message):
        pallas_kernels.indexed_attention(**(arguments | changes))
