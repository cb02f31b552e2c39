"""Cases of tests/cases.md: e4m3 codes, power-of-two scales, and where the bytes of rows lie."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy_reference as reference
import pytest
from small_models import largest_error, quick_jit

import pallas_kernels
import swa_jax as swa
from pallas_kernels import ExtraKV, KVRows, codec, indexed_attention
from swa_jax import layouts

pytestmark = pytest.mark.quick_compilation

V41 = swa.V41
FLOAT32_MAX = np.finfo(np.float32).max
GROUPS = 16  # of 32 values, in a row of 512

encode = jax.jit(codec.encode_e4m3)
quantize = jax.jit(pallas_kernels.quantize_rows, static_argnums=1)
dequantize = jax.jit(pallas_kernels.dequantize_rows, static_argnums=1)


def hexadecimal(codes) -> str:
    return np.asarray(codes, np.uint8).tobytes().hex(" ").upper()


def row_of(*groups) -> np.ndarray:
    """float32[1, 512]: each group's values and then zeros."""
    row = np.zeros((GROUPS, 32), np.float32)
    for place, values in zip(row, groups, strict=False):
        place[: len(values)] = values
    return row.reshape(1, 512)


def stored(*groups) -> list[tuple[str, int]]:
    """For each group its codes in hexadecimal, as many as it has values, and its scale."""
    data = np.asarray(quantize(row_of(*groups), V41))[0]
    codes, scales = data[:512].reshape(GROUPS, 32), data[512:].tolist()
    return [(hexadecimal(codes[i, : len(values)]), scales[i]) for i, values in enumerate(groups)]


def values_of(*groups) -> np.ndarray:
    """float32[16, 32], what a row of these groups stands for."""
    return np.asarray(dequantize(quantize(row_of(*groups), V41), V41)).reshape(GROUPS, 32)


# --- L: codes


def test_L01_no_finite_value_becomes_the_code_of_nan():
    forced = np.asarray([448, 456, 464, 464.1, 465, 1e30, -465], np.float32)  # under scale 127
    assert hexadecimal(encode(forced)) == "7E 7E 7E 7E 7E 7E FE"
    # A row chooses a scale that nothing passes: half of 456 to 465 is nearest to 224, 1.75 * 2**7.
    groups = [[448], [456], [464], [464.1], [465], [1e30], [-465]]
    assert stored(*groups[:5]) == [("7E", 127), *[("76", 128)] * 4]
    assert stored([-465]) == [("F6", 128)]
    values = values_of(*groups)[:7, 0]
    np.testing.assert_allclose(values, np.ravel(groups), rtol=2**-4)


def test_L02_every_bfloat16_has_the_code_of_ml_dtypes():
    patterns = reference.float32_of_bits(np.arange(1 << 16) << 16)
    finite = patterns[np.isfinite(patterns)]
    assert len(finite) == 65_536 - 256
    np.testing.assert_array_equal(encode(finite), reference.e4m3_codes(finite))
    rows = np.zeros((256, 512), np.float32)
    rows[:, 3] = patterns[~np.isfinite(patterns)]
    assert np.all(np.asarray(quantize(rows, V41))[:, 512:] == 255)


def test_L03_a_value_is_rounded_to_a_code_once():
    values = [68.04805755615234, 336.06964, 6.748203, 1.062744140625]
    assert hexadecimal(encode(np.float32(values))) == "69 7B 4D 39"
    # In a row it is first rounded to bfloat16, as the model's own code does: then all are ties.
    assert stored([448, *values]) == [("7E 68 7A 4E 38", 127)]


def test_L05_subnormal_codes_and_the_sign_of_zero_are_kept():
    values = [2**-9, 2**-10, 1.001 * 2**-10, 1.5 * 2**-9, 2.5 * 2**-9, -0.0]
    assert hexadecimal(encode(np.float32(values))) == "01 00 01 02 02 80"
    # In a row 1.001 is 1 in bfloat16, and its value the tie of 0 and the first code.
    assert stored([448, *values]) == [("7E 01 00 00 02 02 80", 127)]


def test_L06_every_code_decodes_to_its_value_and_nan_is_told_by_the_scale():
    codes = np.arange(256, dtype=np.uint8)
    expected = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    row = np.concatenate([codes, codes, np.full(GROUPS, 127, np.uint8)])
    got = np.asarray(dequantize(row[None], V41))[0, :256]
    number = ~np.isnan(expected)
    assert np.flatnonzero(~number).tolist() == [0x7F, 0xFF]
    np.testing.assert_array_equal(got[number], expected[number])
    assert (got[0x7E], got[0x01]) == (448, 2**-9)
    # A row that is not a number has the scale 255 and is NaN whatever its codes are.
    row[512:] = 255
    assert np.all(np.isnan(dequantize(row[None], V41)))
    assert np.all(np.asarray(quantize(row_of([np.nan]), V41))[0, 512:] == 255)


def test_L08_no_reduction_sees_an_eight_bit_float():
    def program(call):
        return str(jax.make_jaxpr(call)(jnp.zeros((1, 64))))

    assert "f8_e4m3fn" in program(lambda x: x.astype(jnp.float8_e4m3fn))
    for fmt in (swa.V41, swa.V41_FP4):
        text = program(functools.partial(pallas_kernels.quantize_rows, fmt=fmt.with_width(64)))
        assert "reduce_max" in text
        assert "f8_" not in text


# --- M: scales

scale_code = jax.jit(codec.power_of_two_scale, static_argnames="smallest")


def test_M01_the_largest_value_of_a_group_does_not_saturate():
    amax = np.float32([627.2, 449, 640, 895])
    assert scale_code(amax, smallest=0).tolist() == [128] * 4
    # 449 is no bfloat16: in a row it is 448. 895 is 896 there.
    assert stored([627.2], [449], [640], [895]) == [
        ("7A", 128),
        ("7E", 127),
        ("7A", 128),
        ("7E", 128),
    ]
    values = values_of([627.2], [449], [640], [895])[:4, 0]
    assert values.tolist() == [640, 448, 640, 896]
    assert np.all(np.abs(values / amax - 1) <= 0.0625)


def test_M02_values_are_divided_by_the_scale_that_is_stored():
    values = np.float32([449, 224, 1, -300])
    assert scale_code(values[0], smallest=0) == 128
    assert hexadecimal(encode(values / 2)) == "76 6E 30 F1"
    # 450 is the next bfloat16: a row of it has the scale that 449 would have.
    assert stored([450, 224, 1, -300], values) == [("76 6E 30 F1", 128), ("7E 76 38 F9", 127)]
    got = values_of([450, 224, 1, -300])[0, :4]
    assert got.tolist() == [448, 224, 1, -288]
    np.testing.assert_array_less(np.abs(got - [450, 224, 1, -300]), [16.1, 8.1, 0.04, 16.1])


def test_M03_scales_are_exact_at_powers_of_two_and_just_above():
    k = np.arange(-110, 111)
    amax = np.ldexp(np.float32(448), k)
    above = np.nextafter(amax, np.float32(np.inf))
    np.testing.assert_array_equal(scale_code(amax, smallest=0), 127 + k)
    np.testing.assert_array_equal(scale_code(above, smallest=0), 128 + k)
    # Through a row, whose floor is code 105; the next number above is the next bfloat16.
    k = k[k >= -22]
    rows = np.zeros((2, 144, 32), np.float32)
    rows[0, : len(k), 5] = -np.ldexp(np.float32(448), k)
    rows[1, : len(k), 5] = np.ldexp(np.float32(450), k)
    scales = np.asarray(quantize(rows.reshape(18, 512), V41))[:, 512:].reshape(2, 144)
    np.testing.assert_array_equal(scales[0, : len(k)], 127 + k)
    np.testing.assert_array_equal(scales[1, : len(k)], 128 + k)


def test_M05_groups_of_zeros_decode_to_zero_under_a_finite_scale():
    rows = np.full((3, GROUPS, 32), 3.0, np.float32)
    rows[0, 5] = 0
    rows[1] = 0
    rows[2, 0] = -0.0
    data = np.asarray(quantize(rows.reshape(3, 512), V41))
    codes, scales = data[:, :512].reshape(3, GROUPS, 32), data[:, 512:]
    # 3 is 1.5 * 2**8 under 2**-7; a group of zeros has the scale of the least amax, 2**-22.
    assert scales[0].tolist() == [120] * 5 + [105] + [120] * 10
    assert scales[1].tolist() == [105] * 16
    assert scales[2].tolist() == [105] + [120] * 15
    assert not np.any(codes[0, 5])
    assert not np.any(codes[1])
    assert np.all(codes[2, 0] == 0x80)
    np.testing.assert_array_equal(np.asarray(dequantize(data, V41)).reshape(rows.shape), rows)


def test_M07_scale_codes_decode_exactly_to_the_ends():
    codes = [0, 1, 126, 127, 128, 253, 254, 255]
    row = np.full((1, 528), 0x38, np.uint8)  # 1.0
    row[0, 512:] = codes * 2
    got = np.asarray(dequantize(row, V41))[0].reshape(GROUPS, 32)[:8]
    expected = np.float32([0, 2.0**-126, 0.5, 1, 2, 2.0**126, 2.0**127, np.nan])  # 0: not written
    np.testing.assert_array_equal(got, np.tile(expected[:, None], 32))


@pytest.mark.makes_nan
def test_M08_the_largest_float32_is_finite_and_infinity_is_a_row_of_nan():
    rows = np.concatenate([row_of([FLOAT32_MAX, 1.0], [1.0]), row_of([np.inf, 1.0], [1.0])])
    data = np.asarray(quantize(rows, V41))
    assert data[0, 512:514].tolist() == [247, 119]
    values = np.asarray(dequantize(data, V41))
    assert np.all(np.isfinite(values[0]))
    assert (values[0, 0], values[0, 32]) == (240 * 2.0**120, 1.0)
    assert data[1].tolist() == [0x7F] * 512 + [0xFF] * 16
    assert np.all(np.isnan(values[1]))


def test_M09_a_reader_uses_the_scales_that_are_stored():
    codes = np.tile(np.uint8([0x7E, 0x38, 0xB8, 0x01]), 128)
    values = np.tile([448, 1, -1, 2**-9], 128)
    scales = np.repeat(np.arange(119, 127), 2)
    lower, higher = (np.concatenate([codes, scales + step]) for step in (-1, 1))
    data = np.stack([lower, higher]).astype(np.uint8)
    expected = [
        values * np.exp2(np.repeat(scales.astype(float) + step - 127, 32)) for step in (-1, 1)
    ]
    np.testing.assert_array_equal(dequantize(data, V41), expected)
    # and so does attention: one row is the answer
    rows = KVRows.view(jnp.asarray(data), start=0, rows_per_slot=1)
    out, _ = jax.jit(indexed_attention)(jnp.zeros((2, 1, 512)), rows, jnp.asarray([[0], [1]]))
    np.testing.assert_array_equal(out[:, 0], expected)


def test_M11_every_group_of_32_has_its_own_scale_the_rotary_ones_too():
    constants = np.exp2(np.arange(16) - 8.0)
    row = np.repeat(constants, 32).astype(np.float32)[None]
    data = np.asarray(quantize(row, V41))
    assert data.shape == (1, 528)
    assert data[0, 512:].tolist() == [*range(111, 127)]  # 119 + g - 8
    np.testing.assert_array_equal(dequantize(data, V41), row)
    # The other record of the family has other sizes: the one is not taken for the other.
    assert (swa.V4.row_bytes, swa.V4.elements_per_scale, swa.V4.raw_dtype) == (584, 64, "bfloat16")
    with pytest.raises(ValueError, match="format V4 expects rows of 584 bytes"):
        dequantize(data, swa.V4)


# --- N: where bytes lie


def test_N01_a_page_is_not_read_as_rows_nor_rows_as_a_page():
    data = np.random.default_rng(0).integers(0, 256, (4, 528), np.uint8)
    pages = layouts.PagedRows.create(1, 4)
    slots = jnp.arange(4)
    pages = layouts.store_paged(pages, jnp.asarray(data), slots)
    page = np.asarray(pages.pages)[0]
    np.testing.assert_array_equal(page[:2048], data[:, :512].ravel())
    np.testing.assert_array_equal(page[2048:2112], data[:, 512:].ravel())
    np.testing.assert_array_equal(layouts.load_paged(pages, slots), data)

    rows = KVRows.view(jnp.asarray(data), start=0, rows_per_slot=1)
    with pytest.raises(ValueError, match="paged: expected a PagedRows, got KVRows"):
        layouts.load_paged(rows, slots)
    with pytest.raises(ValueError, match="rows: expected a KVRows, got PagedRows"):
        indexed_attention(jnp.zeros((1, 1, 512)), pages, [[0]])
    with pytest.raises(
        ValueError, match="expected a token-interleaved format, got page-planar V41"
    ):
        KVRows.view(pages.pages, start=0, rows_per_slot=4, fmt=pages.fmt)


def abstract(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_N02_above_two_gibibytes_addresses_are_right_or_refused():
    geometry = swa.RingGeometry(128, 134)
    message = "slots: expected at most 30352, the limit of 2 GiB for one layer's rings, got 30400"
    with pytest.raises(ValueError, match=message):
        swa.RingCache.create(30_400, 1, geometry)
    assert 134 * 528 * 30_400 == 2_150_860_800
    rows = KVRows(abstract((30_400, 70_752), jnp.uint8), abstract((), jnp.int32), 134, V41)
    q, indices = abstract((1, 2, 512), jnp.bfloat16), abstract((1, 3), jnp.int32)
    with pytest.raises(
        NotImplementedError, match="'triton' addresses arrays of at most 2147483647"
    ):
        jax.eval_shape(
            functools.partial(indexed_attention, implementation="triton"), q, rows, indices
        )


@pytest.mark.slow
def test_N02_rows_above_two_gibibytes_are_stored_and_read_in_their_places():
    rows = KVRows.create(30_400, 134)
    data = np.random.default_rng(0).integers(0, 256, (2, 528), np.uint8)
    last, other = 30_399 * 134 + 133, 100 * 134 + 133
    store = jax.jit(pallas_kernels.store_rows, donate_argnums=0)
    rows = store(rows, jnp.asarray(data[:1]), np.int32([other]))
    rows = store(rows, jnp.asarray(data[1:]), np.int32([last]))
    got = jax.jit(pallas_kernels.load_rows)(rows, np.int32([other, last, last - 1, 133]))
    np.testing.assert_array_equal(got, [*data, np.zeros(528), np.zeros(528)])


@pytest.mark.parametrize("more", [0, 1, 64, 513, 2000])
@pytest.mark.parametrize(
    "implementation",
    [
        "xla",
        pytest.param("interpret", marks=pytest.mark.slow),
        pytest.param("triton", marks=pytest.mark.gpu),
    ],
)
def test_N05_a_compressed_cache_may_have_any_number_of_rows(more, implementation):
    random = np.random.default_rng(more)
    fmt, extra_fmt = V41.with_width(64), swa.V41_FP4.with_width(64)
    window = reference.quantize(random.normal(size=(134, 64)), fmt)
    compressed = reference.quantize(random.normal(size=(2000, 64)), extra_fmt)
    q = reference.to_bfloat16(random.normal(size=(1, 2, 64)))
    indices = random.permutation(134)[None, :128]
    extra_indices = random.permutation(2000)[None, :more]
    sink = np.float32([0.5, -1])

    def rows(data, fmt):
        return KVRows.view(jnp.asarray(data), start=0, rows_per_slot=1, fmt=fmt)

    @quick_jit
    def call(q, rows, indices, extra, sink):
        return indexed_attention(
            q, rows, indices, extra=extra, sink=sink, implementation=implementation
        )

    extra = ExtraKV(rows(compressed, extra_fmt), jnp.asarray(extra_indices, jnp.int32))
    dtype = jnp.float32 if implementation == "xla" else jnp.bfloat16
    out, lse = call(
        jnp.asarray(q, dtype), rows(window, fmt), np.int32(indices), extra, jnp.asarray(sink)
    )
    values = reference.dequantize(window, fmt), reference.dequantize(compressed, extra_fmt)
    caches = [(values[0], indices, None), (values[1], extra_indices, None)]
    want, want_lse = reference.attention(q, caches, sink)
    assert largest_error(np.asarray(out, np.float32), want) <= (
        3e-6 if dtype == jnp.float32 else 1e-2
    )
    np.testing.assert_allclose(lse, want_lse, rtol=0, atol=1e-5)
