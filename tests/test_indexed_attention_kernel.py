"""indexed_attention's kernel: float64 numpy and XLA beside it, its edges, and what it refuses."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy_reference as reference
import pytest
import triton_ir
from small_models import quick_jit

import pallas_kernels
from pallas_kernels import (
    BF16,
    F32,
    V4,
    V41,
    V41_FP4,
    ExtraKV,
    KVCacheFormat,
    KVRows,
    triton_common,
    triton_launch,
)
from pallas_kernels.indexed_attention import triton

pytestmark = pytest.mark.slow

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
TRITON_CALL = "__gpu$xla.gpu.triton"
ROWS_PER_SLOT, NUM_ROWS = 7, 147
NAN_ROW = 60
SELECTABLE = np.setdiff1d(np.arange(1, 120), [NAN_ROW])
# Nobody selects the others, among them the first and the last, where clamped indices would point.
POISONED = np.setdiff1d(np.arange(NUM_ROWS), [*SELECTABLE, NAN_ROW])
OUTSIDE = [NUM_ROWS, NUM_ROWS + 1, INT_MAX, INT_MIN, -2, -NUM_ROWS]
SINKS = [-np.inf, 0.3, 80.0, np.inf, -80.0, 1e9, -2.0]
EPS = 1e-3

_indexed_attention = quick_jit(
    pallas_kernels.indexed_attention,
    static_argnames=("query_norm_eps", "pairing", "output_format", "implementation"),
)


@pytest.fixture(params=["interpret", pytest.param("triton", marks=pytest.mark.gpu)])
def implementation(request):
    return request.param


@dataclasses.dataclass
class Cache:
    """Rows with what is asked of them, as bytes for the call and as numbers for the reference."""

    data: np.ndarray  # uint8[num_rows, row_bytes]
    fmt: KVCacheFormat
    indices: np.ndarray
    lengths: np.ndarray | None = None

    @property
    def rows(self):
        """A region in a block whose other bytes are all 0xFF, which is NaN in every format."""
        region = self.data.reshape(-1, ROWS_PER_SLOT * self.fmt.row_bytes)
        block = np.pad(region, ((0, 0), (64, 45)), constant_values=0xFF)
        return KVRows.view(jnp.asarray(block), start=64, rows_per_slot=ROWS_PER_SLOT, fmt=self.fmt)

    def for_call(self):
        lengths = None if self.lengths is None else jnp.asarray(self.lengths, jnp.int32)
        return self.rows, jnp.asarray(self.indices, jnp.int32), lengths

    @np.errstate(invalid="ignore")  # from the poison
    def for_reference(self):
        """The rows as the kernel multiplies them: only those in float32 are rounded."""
        values = reference.dequantize(self.data, self.fmt)
        if self.fmt.raw_dtype == "float32":
            values = reference.to_bfloat16(values)
        return values, self.indices, self.lengths

    def without_lengths(self):
        """The same with -1 beyond the lengths."""
        beyond = np.arange(self.indices.shape[1]) >= self.lengths[:, None]
        indices = np.where(beyond, -1, self.indices)
        return dataclasses.replace(self, indices=indices, lengths=None)

    def of_queries(self, queries):
        lengths = None if self.lengths is None else self.lengths[queries]
        return dataclasses.replace(self, indices=self.indices[queries], lengths=lengths)


def random_rows(fmt, random):
    """Finite rows of many sizes, a NaN row, and poison in the rows that nobody may select."""
    values = random.normal(size=(NUM_ROWS, fmt.num_elements))
    values *= random.uniform(0.1, 3, (NUM_ROWS, 1))
    values[NAN_ROW, 5] = np.nan
    data = reference.quantize(values.astype(np.float32), fmt)
    garbage = random.integers(0, 256, data.shape, dtype=np.uint8)
    nan_codes = np.where(np.arange(fmt.row_bytes) < fmt.data_bytes, 0x7F, 127)
    for i, row in enumerate(POISONED):
        data[row] = [0xFF, nan_codes, garbage[row], 0x7F][i % 4]
    return data


def attend(q, cache, implementation, *, extra=None, sink=None, **options):
    rows, indices, lengths = cache.for_call()
    return _indexed_attention(
        jnp.asarray(q, jnp.bfloat16),
        rows,
        indices,
        lengths=lengths,
        extra=None if extra is None else ExtraKV(*extra.for_call()),
        sink=None if sink is None else jnp.asarray(sink, jnp.float32),
        implementation=implementation,
        **options,
    )


def bits(x):
    """The bits of floating numbers; all NaN alike, whose signs and payloads mean nothing."""
    x = np.asarray(x)
    return np.where(np.isnan(x), -1, x.view(f"u{x.dtype.itemsize}").astype(np.int64))


def assert_same_bits(got, expected):
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(bits(one), bits(other))


def errors(got, expected):
    """Of each query and head: the output's rms error, and lse's, relative where it is large."""
    out, lse = (np.asarray(part, np.float64) for part in got)
    size = np.sqrt(np.sum(expected[0] ** 2, axis=-1))
    # Where a sink leaves that little, some values are below the normal float32 numbers.
    size = np.maximum(size, 1e-34)
    of_out = np.sqrt(np.sum((out - expected[0]) ** 2, axis=-1)) / size
    with np.errstate(invalid="ignore"):
        of_lse = np.abs(lse - expected[1]) / np.maximum(1, np.abs(expected[1]))
    return of_out, np.where(lse == expected[1], 0, of_lse)


# --- corner cases, each one query of a call


def index_lists(k, random):
    """Names, index rows of k columns and lengths."""
    some = functools.partial(random.choice, SELECTABLE)
    poison = functools.partial(random.choice, [*POISONED, NAN_ROW])
    column = np.arange(k)
    bad = random.choice(OUTSIDE, k)
    lists = {
        "all there": some(k),
        "none": np.full(k, -1),
        "holes": np.where(random.random(k) < 0.4, -1, some(k)),
        "outside": np.where(random.random(k) < 0.4, bad, some(k)),
        "all outside": bad,
        "duplicates": random.choice([3, 4, 9], k),
        "the first": np.where(column == 0, some(k), -1),
        "the last": np.where(column == k - 1, some(k), -1),
        "none at first": np.where(column < 3 * k // 4, -1, some(k)),
        "a gap": np.where((column > k // 8) & (column < 7 * k // 8), -1, some(k)),
        "large scores": some(k),
        "sharp scores": some(k),
        "ordered scores": some(k),
        "zero query": some(k),
        "far negative scores": np.where(random.random(k) < 0.4, -1, 7),
        "a NaN row": np.where(column == k // 2, NAN_ROW, some(k)),
    }
    lists = [(name, indices, k) for name, indices in lists.items()]
    for length in [0, 1, k // 2, 63, 64, 65, 128, k - 1, k, k + 5, INT_MAX, -1, -3, INT_MIN]:
        indices = np.where(column < length, some(k), poison(k))
        lists.append((f"length {length}", indices, length))
    return lists


@dataclasses.dataclass(frozen=True)
class Shape:
    heads: int
    width: int
    k: int
    fmt: KVCacheFormat = V41
    extra_k: int | None = None
    extra_fmt: KVCacheFormat = V41_FP4
    with_lengths: bool = True
    with_sink: bool = True


SHAPES = {
    "one-head-one-column": Shape(1, 64, 1, with_sink=False),
    "3-heads-7-columns": Shape(3, 128, 7, BF16),
    "65-heads-133-columns": Shape(65, 64, 133),
    "64-heads-as-in-the-model": Shape(64, 512, 134),
    "128-heads-192-columns": Shape(128, 64, 192, F32),
    "24-heads-128-columns": Shape(24, 256, 128, BF16, with_lengths=False),
    "v4-640-columns": Shape(3, 128, 640, V4, with_sink=False),
    "2048-columns": Shape(2, 64, 2048),
    "v4-and-fp4": Shape(6, 512, 128, V4, extra_k=7),
    "fp4-and-v4": Shape(3, 256, 7, V41_FP4, extra_k=133, extra_fmt=V4, with_lengths=False),
    "v41-and-many-fp4": Shape(24, 128, 134, extra_k=640),
    "f32-and-v41": Shape(6, 64, 64, F32, extra_k=64, extra_fmt=V41),
    "bf16-and-empty": Shape(3, 64, 7, BF16, extra_k=0),
    "empty-and-f32": Shape(3, 64, 0, V41, extra_k=7, extra_fmt=F32),
}
by_shape = pytest.mark.parametrize("shape", SHAPES)


@dataclasses.dataclass
class Problem:
    names: list[str]
    q: np.ndarray
    caches: list[Cache]
    sink: np.ndarray | None

    def attend(self, implementation, **options):
        cache, *extra = self.caches
        extra = extra[0] if extra else None
        return attend(self.q, cache, implementation, extra=extra, sink=self.sink, **options)

    @np.errstate(invalid="ignore")
    def expected(self, q=None):
        caches = [cache.for_reference() for cache in self.caches]
        return reference.attention(self.q if q is None else q, caches, self.sink)

    def of_queries(self, queries):
        names = [self.names[query] for query in queries]
        caches = [cache.of_queries(queries) for cache in self.caches]
        return Problem(names, self.q[queries], caches, self.sink)


@functools.cache
def problem(name):
    """Queries with one corner case each; in a second cache each has another."""
    shape = SHAPES[name]
    random = np.random.default_rng(list(SHAPES).index(name))
    counts = [(shape.k, shape.fmt)]
    if shape.extra_k is not None:
        counts.append((shape.extra_k, shape.extra_fmt))
    caches, names = [], []
    for i, (k, fmt) in enumerate(counts):
        fmt = fmt.with_width(shape.width)
        lists = index_lists(k, random)
        lists = [*lists[5 * i :], *lists[: 5 * i], ("none", np.full(k, -1), k)]
        own, indices, lengths = zip(*lists, strict=True)
        names = own if i == 0 else [f"{a}, {b}" for a, b in zip(names, own, strict=True)]
        cache = Cache(random_rows(fmt, random), fmt, np.stack(indices), np.asarray(lengths))
        caches.append(cache if shape.with_lengths else cache.without_lengths())
    q = random.normal(size=(len(names), shape.heads, shape.width))
    for query, case in enumerate(names):
        q[query] *= 300 if "large" in case else 20 if "sharp" in case else 1
        q[query] *= 0 if "zero" in case else 1
    result = Problem(names, reference.to_bfloat16(q), caches, None)
    for query, case in enumerate(names):
        if (
            case.startswith("ordered") and shape.k
        ):  # each block has a larger score than those before
            values, indices, _ = caches[0].for_reference()
            scores = values[indices[query]] @ result.q[query, 0]
            caches[0].indices[query] = indices[query][np.argsort(scores)]
            result.q[query] *= 8
        if "far negative" in case:  # below any number that could stand for a score that is masked
            row = [c.for_reference()[0][7] for c in caches][not case.startswith("far")]
            factor = -1e5 * np.sqrt(shape.width) / np.sum(row**2)
            result.q[query] = reference.to_bfloat16(factor * row)
    if shape.with_sink:
        result.sink = np.resize(np.roll(SINKS, shape.k), shape.heads)
    return result


def check(case, got):
    """The output to 4e-3 of each query and head, lse to 1e-5; exact where nothing is visible."""
    out, lse = (np.asarray(part, np.float64) for part in got)
    expected = case.expected()
    sees_nan = np.isnan(expected[1]).all(axis=1)
    assert sees_nan.any()
    assert np.isnan(out[sees_nan]).all()
    assert np.isnan(lse[sees_nan]).all()
    of_out, of_lse = errors((out, lse), expected)
    for query in np.flatnonzero(~sees_nan):
        assert of_out[query].max() <= 4e-3, case.names[query]
        assert of_lse[query].max() <= 1e-5, case.names[query]
        zero = ~expected[0][query].any(axis=-1)
        assert not out[query, zero].any(), case.names[query]
    np.testing.assert_array_equal(lse == -np.inf, expected[1] == -np.inf)


@by_shape
def test_corner_cases_equal_float64(shape, implementation):
    case = problem(shape)
    check(case, case.attend(implementation))


OTHER_CARDS = ["65-heads-133-columns", "128-heads-192-columns", "2048-columns", "v4-and-fp4"]


@pytest.mark.parametrize("shape", OTHER_CARDS)
def test_the_tiles_of_other_cards_equal_float64(shape):
    case = problem(shape)
    cache, *extra = [cache.for_call() for cache in case.caches]
    sink = jnp.asarray(case.sink, jnp.float32)

    @quick_jit
    def attend(q, cache, extra):
        scale = jnp.float32(q.shape[-1] ** -0.5)
        return triton.indexed_attention(
            q, *cache, extra, sink, scale, None, None, query_norm_eps=None,
            pairing="interleaved", output_format=None, card="NVIDIA A100-SXM4-80GB", interpret=True,
        )  # fmt: skip

    q, extra = jnp.asarray(case.q, jnp.bfloat16), ExtraKV(*extra[0]) if extra else None
    check(case, attend(q, cache, extra))


@by_shape
def test_corner_cases_are_close_to_xla(shape, implementation):
    case = problem(shape)
    expected = [np.asarray(part, np.float64) for part in case.attend("xla")]
    got = [np.asarray(part, np.float64) for part in case.attend(implementation)]
    np.testing.assert_array_equal(np.isnan(got[0]), np.isnan(expected[0]))
    np.testing.assert_array_equal(np.isnan(got[1]), np.isnan(expected[1]))
    of_out, of_lse = errors(got, expected)
    # One block of columns has one maximum, and probabilities are rounded relative to it; several
    # have one each.
    one_block = SHAPES[shape].k <= 64 and SHAPES[shape].extra_k in (None, 0)
    assert np.sqrt(np.nanmean(of_out**2)) <= (3e-4 if one_block else 1.2e-3)
    assert np.nanmax(of_lse) <= 2e-6


# --- decoding: a query of zeros with one row gives the row


def representable(values):
    """True for zeros and numbers that are normal in bfloat16."""
    size = np.abs(np.asarray(values, np.float64))
    return (size == 0) | ((size >= 2.0**-126) & (size <= 255 * 2.0**120))


def e4m3_rows(codes, scales):
    """Rows of those codes whose product with the scale can be told apart, zeros for the others."""
    values = reference.e4m3_values(codes).astype(np.float64) * 2.0 ** (scales[:, None] - 127.0)
    return np.where(representable(values), codes, 0).astype(np.uint8)


def every_bfloat16(width):
    patterns = np.arange(65536, dtype=np.uint16)
    values = np.where((patterns & 0x7FFF) < 0x7F80, patterns, 0).view(ml_dtypes.bfloat16)
    values = np.where(representable(values), values, ml_dtypes.bfloat16(0))
    return values.reshape(-1, width).view(np.uint8)


def every_v41_row():
    scales = np.arange(1, 255)
    codes = e4m3_rows(np.tile(np.arange(256), (254, 1)), scales)
    return V41.with_width(256), np.concatenate([codes, np.tile(scales[:, None], 8)], axis=1)


def every_v4_row():
    scales = np.repeat(np.arange(1, 255), 4)
    codes = e4m3_rows(np.tile(np.arange(256).reshape(4, 64), (254, 1)), scales)
    raw, pad = every_bfloat16(64)[: len(codes)], np.zeros_like(scales)
    return V4.with_width(128), np.concatenate([codes, raw, scales[:, None], pad[:, None]], axis=1)


def every_fp4_row():
    scales = np.setdiff1d(np.arange(256), [0x7F, 0xFF])
    scales = np.resize(scales, (64, 4))
    low, high = np.arange(0, 16, 2), np.arange(1, 16, 2)
    return V41_FP4.with_width(64), np.concatenate(
        [np.tile(low | high << 4, (64, 4)), scales], axis=1
    )


def rounded_f32_rows():
    """Float32 values around the ties between two bfloat16."""
    random = np.random.default_rng(0)
    upper = random.integers(0x0100, 0x7F00, (128, 64)) | random.choice([0, 0x8000], (128, 64))
    bits = upper << 16 | random.choice([0, 0x7FFF, 0x8000, 0x8001, 0xFFFF], (128, 64))
    return F32.with_width(64), bits.astype(np.uint32).view(np.uint8)


@pytest.mark.parametrize(
    "rows",
    [every_v41_row, every_v4_row, every_fp4_row, lambda: (BF16, every_bfloat16(512)),
     rounded_f32_rows],
    ids=["V41", "V4", "V41_FP4", "BF16", "F32"],
)  # fmt: skip
def test_every_code_and_scale_is_decoded_exactly(rows, implementation):
    fmt, data = rows()
    count = len(data)
    data = np.pad(data, ((0, -count % ROWS_PER_SLOT), (0, 0)), constant_values=0xFF)
    cache = Cache(data.astype(np.uint8), fmt, np.arange(count)[:, None])
    out, lse = attend(np.zeros((count, 1, fmt.num_elements)), cache, implementation)
    values, _, _ = cache.for_reference()
    np.testing.assert_array_equal(np.asarray(out[:, 0], np.float64), values[:count])
    assert not np.any(lse)


# --- what one row, query or head does to the others


@pytest.mark.parametrize("shape", ["3-heads-7-columns", "65-heads-133-columns", "v4-and-fp4"])
def test_one_nan_in_a_selected_row_reaches_exactly_its_queries(shape, implementation):
    case = problem(shape)
    cache, *extra = case.caches
    healthy, sick = cache.data.copy(), cache.data.copy()
    healthy[NAN_ROW] = sick[NAN_ROW] = cache.data[1]
    if cache.fmt.scale_dtype == "ue8m0":  # also if all its values are zeros
        group = slice(cache.fmt.elements_per_scale, 2 * cache.fmt.elements_per_scale)
        healthy[NAN_ROW, group] = sick[NAN_ROW, group] = 0
        sick[NAN_ROW, cache.fmt.data_bytes + 1] = 0xFF
    else:
        sick[NAN_ROW, 6:8] = 0xC0, 0x7F
    before, after = (
        dataclasses.replace(case, caches=[dataclasses.replace(cache, data=data), *extra])
        for data in (healthy, sick)
    )
    expected, got = before.attend(implementation), after.attend(implementation)
    sees = np.asarray([name.startswith("a NaN row") for name in case.names])
    assert sees.sum() == 1
    assert all(np.isnan(part[sees]).all() for part in got)
    assert_same_bits([part[~sees] for part in got], [part[~sees] for part in expected])


@pytest.mark.parametrize("byte", [0x00, 0x3C])
@pytest.mark.parametrize("shape", ["65-heads-133-columns", "f32-and-v41"])
def test_rows_nobody_selects_change_nothing(shape, byte, implementation):
    case = problem(shape)
    caches = [dataclasses.replace(cache, data=cache.data.copy()) for cache in case.caches]
    for cache in caches:
        cache.data[POISONED] = byte
    others = dataclasses.replace(case, caches=caches)
    assert_same_bits(others.attend(implementation), case.attend(implementation))


def test_a_query_that_is_not_finite_makes_its_head_nan_and_no_other(implementation):
    case = problem("65-heads-133-columns")
    q = case.q.copy()
    q[0, 3, 7], q[2, 64, 0], q[4, 0, 63] = np.nan, np.nan, np.nan
    got = dataclasses.replace(case, q=q).attend(implementation)
    expected = case.attend(implementation)
    bad = np.zeros(q.shape[:2], bool)
    bad[[0, 2], [3, 64]] = True  # query 4 sees nothing
    assert case.names[4] == "all outside"
    assert all(np.isnan(part[bad]).all() for part in got)
    assert_same_bits([part[~bad] for part in got], [part[~bad] for part in expected])


def test_an_extra_cache_without_rows_changes_nothing(implementation):
    case = problem("f32-and-v41")
    cache, extra = case.caches
    none = dataclasses.replace(extra, indices=np.full_like(extra.indices, -1))
    empty = dataclasses.replace(extra, indices=extra.indices[:, :0])
    expected = dataclasses.replace(case, caches=[cache]).attend(implementation)
    for other in (none, empty):
        got = dataclasses.replace(case, caches=[cache, other]).attend(implementation)
        assert_same_bits(got, expected)


def test_no_columns_at_all_are_nothing_visible(implementation):
    case = problem("3-heads-7-columns")
    cache = dataclasses.replace(case.caches[0], indices=case.caches[0].indices[:, :0])
    out, lse = dataclasses.replace(case, caches=[cache]).attend(implementation)
    assert not out.any()
    assert (lse == -np.inf).all()


@pytest.mark.parametrize("shape", ["65-heads-133-columns", "2048-columns"])
def test_a_query_depends_neither_on_the_others_nor_on_its_place(shape, implementation):
    case = problem(shape)
    expected = case.attend(implementation)
    assert_same_bits(case.attend(implementation), expected)
    random = np.random.default_rng(0)
    for count in (1, 7, 40):
        queries = random.permutation(np.resize(random.permutation(len(case.names)), count))
        got = case.of_queries(queries).attend(implementation)
        assert_same_bits(got, [part[queries] for part in expected])


def test_a_scale_is_of_the_scores_and_not_of_the_sink(implementation):
    case = problem("one-head-one-column")
    case = dataclasses.replace(case, sink=np.asarray([-0.5]))
    got = case.attend(implementation, scale=0.375)
    caches = [cache.for_reference() for cache in case.caches]
    with np.errstate(invalid="ignore"):
        expected = reference.attention(case.q, caches, case.sink, 0.375)
    of_out, of_lse = errors(got, expected)
    assert np.nanmax(of_out) <= 4e-3
    assert np.nanmax(of_lse) <= 1e-5


def test_literals(implementation):
    """Scores of 0: rows 2 and 4, each of them twice, sinks of log 1, log 2, 0 and infinity."""
    fmt = V41.with_width(64)
    rows = np.zeros((ROWS_PER_SLOT, 64), np.float32)
    rows[0], rows[1] = 2, 4
    indices = np.asarray([[0, 1, -1], [0, 1, 0], [-1, 1, 9], [-1, -1, 7]])
    cache = Cache(reference.quantize(rows, fmt), fmt, indices)
    sink = np.asarray([-np.inf, 0.0, math.log(2), np.inf])
    out, lse = attend(np.zeros((4, 4, 64)), cache, implementation, sink=sink)
    expected = [[3, 2, 1.5, 0], [8 / 3, 2, 1.6, 0], [4, 2, 4 / 3, 0], [0, 0, 0, 0]]
    np.testing.assert_allclose(
        np.asarray(out, np.float32), np.tile(np.asarray(expected)[..., None], 64), rtol=2**-8
    )
    with np.errstate(divide="ignore"):
        expected = np.log([2, 3, 1, 0])
    np.testing.assert_allclose(lse, np.tile(expected[:, None], 4), rtol=1e-6)


# --- fused ends

ENDS = {
    "interleaved": ("3-heads-7-columns", {"half": 12, "pairing": "interleaved", "eps": EPS}),
    "half-split": ("3-heads-7-columns", {"half": 16, "pairing": "half_split", "eps": EPS}),
    "all-values": ("65-heads-133-columns", {"half": 32, "pairing": "half_split", "eps": EPS}),
    "raw-tail": ("v4-and-fp4", {"half": 32, "pairing": "interleaved", "eps": EPS}),
    "pieces": ("2048-columns", {"half": 3, "pairing": "interleaved", "eps": EPS}),
    "norm-alone": ("f32-and-v41", {"half": None, "pairing": "interleaved", "eps": EPS}),
    "rotation-alone": ("f32-and-v41", {"half": 8, "pairing": "half_split", "eps": None}),
}
by_ends = pytest.mark.parametrize("ends", ENDS)


def with_ends(name):
    """A problem, the options of its fused ends, and what they do in float64."""
    shape, ends = ENDS[name]
    case, pairing = problem(shape), ends["pairing"]
    options = {"query_norm_eps": ends["eps"], "pairing": pairing}
    angles = np.zeros((len(case.names), 1, 0))
    if ends["half"] is not None:
        size = len(case.names), 1, ends["half"]
        angles = np.random.default_rng(0).uniform(-np.pi, np.pi, size)
        options["cos"] = jnp.asarray(np.cos(angles[:, 0]), jnp.float32)
        options["sin"] = jnp.asarray(np.sin(angles[:, 0]), jnp.float32)
    query = case.q if ends["eps"] is None else reference.norm(case.q, None, ends["eps"])
    query = reference.to_bfloat16(reference.rotate(query, angles, pairing))
    out, lse = case.expected(query)
    return case, options, (reference.rotate(out, -angles, pairing), lse)


@by_ends
def test_fused_ends_are_the_separate_transforms(ends, implementation):
    case, options, expected = with_ends(ends)
    got = case.attend(implementation, **options)
    of_out, of_lse = errors(got, expected)
    seen = ~np.isnan(expected[1])
    assert np.isnan(got[0][~seen]).all()
    # A query's value beside a tie between two bfloat16 may go the other way.
    assert np.mean((of_out[seen] <= 4e-3) & (of_lse[seen] <= 1e-5)) >= 0.97
    assert of_out[seen].max() <= 2e-2
    assert of_lse[seen].max() <= 1e-2


@pytest.mark.parametrize("fmt", [V41, V41_FP4], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("ends", ["interleaved", "all-values", "pieces"])
def test_output_rows_are_the_output_in_a_format(ends, fmt, implementation):
    case, options, _ = with_ends(ends)
    fmt = fmt.with_width(case.q.shape[-1])
    out, expected_lse = case.attend(implementation, **options)
    rows, lse = case.attend(implementation, output_format=fmt, **options)
    assert (rows.shape, rows.dtype) == ((*case.q.shape[:2], fmt.row_bytes), jnp.uint8)
    np.testing.assert_array_equal(bits(lse), bits(expected_lse))
    # A quantised row is rounded to bfloat16 first, as the output is.
    out = np.asarray(out, np.float32).reshape(-1, fmt.num_elements)
    expected = reference.quantize(out, fmt)
    np.testing.assert_array_equal(np.asarray(rows).reshape(expected.shape), expected)
    assert np.isnan(out).any()


def test_an_output_with_one_value_that_is_not_finite_is_a_nan_row(implementation):
    """A score of -inf has no weight, and its row's infinity times nothing is NaN."""
    case = problem("3-heads-7-columns")
    cache = dataclasses.replace(case.caches[0], data=case.caches[0].data.copy())
    infinite, value = 7, 3
    cache.data[infinite].view(ml_dtypes.bfloat16)[value] = np.inf
    cache.indices = np.where(cache.indices == NAN_ROW, infinite, cache.indices)
    q = case.q.copy()
    q[:, :, value] = -1
    case = dataclasses.replace(case, caches=[cache], q=q)
    out = np.asarray(case.attend(implementation)[0], np.float32).reshape(-1, 128)
    rows, _ = case.attend(implementation, output_format=V41.with_width(128))
    some = np.isnan(out).any(axis=1) & ~np.isnan(out).all(axis=1)
    assert some.any()
    expected = reference.quantize(out, V41.with_width(128))
    np.testing.assert_array_equal(np.asarray(rows).reshape(expected.shape), expected)


def test_a_query_whose_norm_overflows_makes_its_head_nan_and_no_other(implementation):
    case, options, _ = with_ends("interleaved")
    q = case.q.copy()
    q[0, 1], q[2, 2, 5] = 3e38, np.inf
    got = dataclasses.replace(case, q=q).attend(implementation, **options)
    expected = case.attend(implementation, **options)
    bad = np.zeros(q.shape[:2], bool)
    bad[[0, 2], [1, 2]] = True
    assert all(np.isnan(part[bad]).all() for part in got)
    assert_same_bits([part[~bad] for part in got], [part[~bad] for part in expected])


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("pairing", ["interleaved", "half_split"])
def test_no_pair_and_one_pair_rotate(half, pairing, implementation):
    case, options, _ = with_ends("interleaved")
    angles = {name: options[name][:, :half] for name in ("cos", "sin")}
    out, lse = case.attend(implementation, pairing=pairing, **angles)
    expected, expected_lse = case.attend("xla", pairing=pairing, **angles)
    seen = np.isfinite(expected_lse)
    difference = np.asarray(out, np.float64) - np.asarray(expected, np.float64)
    assert np.abs(difference[seen]).max() <= 2**-7 * np.abs(np.asarray(expected)[seen]).max()
    np.testing.assert_allclose(lse[seen], expected_lse[seen], rtol=1e-5, atol=1e-5)


def test_a_padded_query_and_the_end_of_a_list_gather_nothing(monkeypatch):
    gathers = []
    decode_rows = triton.decode_rows

    def spy(*arguments):
        jax.debug.callback(lambda: gathers.append(1))
        return decode_rows(*arguments)

    monkeypatch.setattr(triton, "decode_rows", spy)
    rows = KVRows.create(3, 9, V41.with_width(64))
    q = jnp.ones((4, 2, 64), jnp.bfloat16)
    indices = np.full((4, 300), -1, np.int32)
    indices[1, :5], indices[2, 64] = 3, 7  # the first block of 64, and up to the second
    jax.block_until_ready(
        pallas_kernels.indexed_attention(q, rows, indices, implementation="interpret")
    )
    jax.effects_barrier()
    assert len(gathers) == 1 + 2
    jax.clear_caches()  # of programs with the spy


def test_queries_taken_in_parts_have_the_same_bits(monkeypatch):
    case = problem("v4-640-columns")
    expected = case.attend("interpret")
    # As if the sums of the three pieces of all queries were too large, and not those of half.
    monkeypatch.setattr(triton_common, "MAX_BYTES", 3 * case.q.size * 4 - 1)
    monkeypatch.setattr(triton_common, "too_large", lambda *arrays: None)
    sizes = []
    launch = triton_launch.launch

    def spy(kernel, operands, out, **options):
        sizes.append(out[0].shape[0])
        return launch(kernel, operands, out, **options)

    monkeypatch.setattr(triton_launch, "launch", spy)
    jax.clear_caches()
    got = case.attend("interpret")
    assert sizes == [len(case.q) // 2, -(-len(case.q) // 2)]
    assert_same_bits(got, expected)
    jax.clear_caches()  # of programs made under the patch


# --- transformations


def small_arguments():
    """Three rows of queries, caches and indices for vmap."""
    case = problem("3-heads-7-columns")
    parts = []
    for i in range(3):
        queries = np.arange(4 * i, 4 * i + 4)
        rows, indices, lengths = case.caches[0].of_queries(queries).for_call()
        data = jnp.roll(rows.data, i, axis=0)
        rows = dataclasses.replace(rows, data=data)
        parts.append((jnp.asarray(case.q[queries], jnp.bfloat16), rows, indices, lengths))
    return parts


def stack(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def call_of(implementation):
    def call(q, rows, indices, lengths):
        return pallas_kernels.indexed_attention(
            q, rows, indices, lengths=lengths, sink=jnp.zeros(3), implementation=implementation
        )

    return call


@pytest.mark.parametrize("rows_axis", [0, None])
def test_vmap_is_a_loop(rows_axis, implementation):
    call, parts = call_of(implementation), small_arguments()
    shared = parts[0][1]
    stacked = list(stack(parts))
    if rows_axis is None:
        stacked[1] = shared
    stacked[0] = jnp.moveaxis(stacked[0], 0, 2)
    # compiled as users have them: two quickly compiled programs may differ in a last bit
    got = jax.jit(jax.vmap(call, in_axes=(2, rows_axis, 0, 0)))(*stacked)
    one = jax.jit(call)
    for i, (q, rows, indices, lengths) in enumerate(parts):
        rows = shared if rows_axis is None else rows
        assert_same_bits([part[i] for part in got], one(q, rows, indices, lengths))


def test_vmap_of_vmap_is_a_loop_in_a_loop(implementation):
    call, parts = call_of(implementation), small_arguments()
    q, rows, indices, lengths = stack(parts)
    twice = jnp.stack([q, q[:, ::-1]])
    inner = jax.vmap(call, in_axes=(0, 0, None, None))
    got = jax.jit(jax.vmap(inner, in_axes=(0, None, None, None)))(
        twice, rows, indices[0], lengths[0]
    )
    one = jax.jit(call)
    for i in range(2):
        for j in range(3):
            own = jax.tree.map(lambda leaf, j=j: leaf[j], rows)
            expected = one(twice[i, j], own, indices[0], lengths[0])
            assert_same_bits([part[i, j] for part in got], expected)


def loss_of(implementation):
    q, rows, indices, lengths = small_arguments()[0]
    weights = np.random.default_rng(0).normal(size=q.shape)

    def loss(q, sink):
        out, lse = pallas_kernels.indexed_attention(
            q, rows, indices, lengths=lengths, sink=sink, implementation=implementation
        )
        lse = jnp.where(lse == -jnp.inf, 0.0, lse)
        return jnp.sum(out.astype(jnp.float32) * jnp.asarray(weights, jnp.float32)) + jnp.sum(lse)

    return loss, (q, jnp.asarray([0.3, -1.0, 2.0]))


@pytest.mark.parametrize("name", [None, "interpret", "triton"])
def test_gradients_are_those_of_xla_and_no_kernel(name):
    (of_xla, arguments), (of_kernel, _) = loss_of("xla"), loss_of(name)
    expected = quick_jit(jax.grad(of_xla, argnums=(0, 1)))(*arguments)
    assert all(part.any() for part in expected)
    gradient = quick_jit(jax.grad(of_kernel, argnums=(0, 1)))
    assert_same_bits(gradient(*arguments), expected)
    lowered = gradient.trace(*arguments).lower(lowering_platforms=("cuda",))
    assert TRITON_CALL not in lowered.as_text()


def test_per_example_gradients_are_those_of_each_example(implementation):
    loss, (q, sink) = loss_of(implementation)
    gradient = jax.grad(loss, argnums=(0, 1))
    of_q, of_sink = quick_jit(jax.vmap(gradient))(jnp.stack([q, 2 * q]), jnp.stack([sink, -sink]))
    single = quick_jit(gradient)
    for i, arguments in enumerate([(q, sink), (2 * q, -sink)]):
        expected_q, expected_sink = single(*arguments)
        np.testing.assert_allclose(of_sink[i], expected_sink, rtol=1e-5)
        error = np.asarray(of_q[i] - expected_q, np.float32)
        assert np.abs(error).max() <= 1e-2 * np.abs(np.asarray(expected_q, np.float32)).max()


# --- lowering


def lowered_for_cuda(*arguments, implementation=None, **options):
    call = functools.partial(
        pallas_kernels.indexed_attention, implementation=implementation, **options
    )
    return jax.jit(call).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@by_shape
def test_every_shape_is_one_kernel_on_cuda(shape):
    case = problem(shape)
    q = jax.ShapeDtypeStruct(case.q.shape, jnp.bfloat16)
    rows, indices, _ = case.caches[0].for_call()
    options = {"implementation": "triton"}
    if len(case.caches) == 2:
        options["extra"] = ExtraKV(*case.caches[1].for_call())
    text = lowered_for_cuda(q, rows, indices, **options)
    assert text.count(TRITON_CALL) == 1
    assert "indexed_attention_kernel" in text
    assert "stablehlo.gather" not in text


# --- what the kernel does not do


def abstract_arguments(width=512, fmt=V41, n=5, heads=6, half=32, slots=4, k=134, extra=None):
    """Shapes only: nothing is allocated."""
    array = jax.ShapeDtypeStruct

    def rows(fmt):
        slot_bytes = -(-134 * fmt.row_bytes // 32) * 32
        return KVRows(array((slots, slot_bytes), jnp.uint8), array((), jnp.int32), 134, fmt)

    q, indices = array((n, heads, width), jnp.bfloat16), array((n, k), jnp.int32)
    if extra is not None:
        extra = ExtraKV(rows(extra), indices)
    angles = array((n, half), jnp.float32)
    return q, rows(fmt), indices, extra, angles, angles


def attend_abstract(q, rows, indices, extra, cos, sin, **options):
    return pallas_kernels.indexed_attention(
        q, rows, indices, extra=extra, cos=cos, sin=sin, **options
    )


WIDE_TAIL = dataclasses.replace(V4, quantized_elements=384, raw_elements=128)
NO_GROUP = dataclasses.replace(V41, elements_per_scale=128)
REFUSED = {
    "width": (
        {"width": 96, "fmt": V41.with_width(96)},
        {},
        "reads rows of 64, 128, 256, 512 values, got 96",
    ),
    "raw tail": ({"fmt": WIDE_TAIL}, {}, "reads rows with a raw tail of 64 values, got format V4"),
    "raw tail of the extra cache": ({"extra": WIDE_TAIL}, {}, "reads rows with a raw tail of 64"),
    "order": (
        {"fmt": dataclasses.replace(V4, scales_last=False)},
        {},
        "reads rows with a raw tail of 64 values",
    ),
    "group": ({"fmt": NO_GROUP}, {}, "reads groups of at most 64 values, a power of two, got 128"),
    "rotation": ({"half": 48}, {}, "rotates at most 64 values, got 96"),
    "half": (
        {"half": 12},
        {"pairing": "half_split"},
        r"rotates pairs \(i, i \+ half\) where half is a power of two, got 12",
    ),
    "raw output": ({}, {"output_format": BF16}, "writes outputs whose values all have scales"),
    "mixed output": ({}, {"output_format": V4}, "writes outputs whose values all have scales"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernel_cannot_do_is_refused_when_named(name):
    shapes, options, message = REFUSED[name]
    arguments = abstract_arguments(**shapes)
    call = functools.partial(attend_abstract, **options)
    for implementation in ("triton", "interpret"):
        with pytest.raises(NotImplementedError, match=f"'{implementation}' .*{message}"):
            jax.eval_shape(functools.partial(call, implementation=implementation), *arguments)
    traced = jax.jit(call).trace(*arguments)
    assert TRITON_CALL not in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    "options",
    [
        {"pairing": "half_split", "query_norm_eps": EPS},
        {"output_format": V41},
        {"output_format": V41_FP4, "scale": 0.25},
    ],
    ids=["half-split", "V41-output", "V41_FP4-output"],
)
@pytest.mark.parametrize("k", [128, 300])
def test_fused_ends_are_in_the_kernel_on_cuda(k, options):
    call = functools.partial(attend_abstract, implementation="triton", **options)
    traced = jax.jit(call).trace(*abstract_arguments(k=k))
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count(TRITON_CALL) == 1


@pytest.mark.parametrize("card", ["NVIDIA H200", "NVIDIA A100-SXM4-80GB"])
@pytest.mark.parametrize(
    ("k", "options"),
    [(64, {"query_norm_eps": EPS, "output_format": V41.with_width(64)}), (300, {})],
    ids=["one-piece", "two-pieces"],
)
def test_every_load_and_store_of_several_values_is_masked(k, options, card):
    """65 heads fill no tile, and the interpreter drops what a GPU would write to the next query."""
    call = functools.partial(attend_abstract, implementation="triton", **options)
    arguments = abstract_arguments(64, V41.with_width(64), heads=65, k=k)
    [kernel] = triton_ir.kernels_of(call, *arguments, card=card)
    operations = triton_ir.memory_operations(kernel)
    assert {operation.kind for operation in operations} == {"load", "store"}
    assert all(operation.masked for operation in operations if operation.shape)


def test_the_grid_but_for_its_first_axis_does_not_depend_on_the_number_of_queries():
    """Nor do the warps: with equal programs, a query's result does not depend on the others."""
    seen = set()
    for n in (1, 7, 2000):
        traced = jax.jit(attend_abstract).trace(*abstract_arguments(n=n, heads=128, extra=V41_FP4))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert f"grid_x = {n} :" in text
        seen.add(tuple(re.findall(r"(?:grid_y|grid_z|num_warps|num_stages) = \d+", text)))
    assert len(seen) == 1
    assert seen.pop()
