"""Row formats: sizes, every code of the number formats, scales, NaN rows, and recorded rows."""

import dataclasses
import functools
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy_reference as reference
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import BF16, F32, V4, V32, V41, V41_FP4, KVCacheFormat, codec, formats
from pallas_kernels import dequantize_rows as dequantize_eagerly
from pallas_kernels import quantize_rows as quantize_eagerly

FORMATS = list(formats.FORMATS.values())
QUANTIZED = [fmt for fmt in FORMATS if fmt.quantized_dtype is not None]
FLOORS = ["amax", "scale"]
FLOAT32_MAX = np.finfo(np.float32).max

_quantize = jax.jit(quantize_eagerly, static_argnames=("fmt", "scale_floor"))
_dequantize = jax.jit(dequantize_eagerly, static_argnames="fmt")
encode_e4m3, decode_e4m3 = jax.jit(codec.encode_e4m3), jax.jit(codec.decode_e4m3)
encode_e2m1 = jax.jit(codec.encode_e2m1)
by_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)


def quantize_rows(x, fmt, scale_floor="amax"):
    """The compiled call, on rows padded to one number of them: compilation is what takes time."""
    return in_one_shape(lambda rows: _quantize(rows, fmt, scale_floor), x)


def dequantize_rows(data, fmt):
    return in_one_shape(lambda rows: _dequantize(rows, fmt), data)


def in_one_shape(call, x):
    x = np.asarray(x)
    rows = x.reshape(-1, x.shape[-1])
    padded = np.zeros((512, x.shape[-1]), x.dtype)
    padded[: len(rows)] = rows
    return np.asarray(call(padded))[: len(rows)].reshape(*x.shape[:-1], -1)


@functools.cache
def recorded():
    with np.load(Path(__file__).parent / "data" / "quantised_rows.npz") as file:
        return dict(file)


def hex_bytes(codes):
    return np.asarray(codes).tobytes().hex(" ").upper()


def with_neighbours(values):
    """Float32 values, those next below and next above, and the negatives of all."""
    values = np.asarray(values, np.float32)
    below, above = np.nextafter(values, np.float32(-1)), np.nextafter(values, np.float32(np.inf))
    values = np.concatenate([below, values, above])
    return np.concatenate([values, -values])


def one_group(values, fmt=V41):
    """A row of zeros but for the first values."""
    row = np.zeros((1, fmt.num_elements), np.float32)
    row[0, : len(values)] = values
    return row


def sample_rows(width, n, seed):
    """Rows that are not bfloat16, their groups of very different sizes."""
    random = np.random.default_rng(seed)
    size = np.repeat(random.integers(-30, 30, (n, width // 16)), 16, axis=1)
    return (random.normal(size=(n, width)) * 2.0**size).astype(np.float32)


# --- sizes


SIZES = [
    (V41, 512, 512, 16, 528),
    (V4, 512, 576, 7, 584),
    (V32, 576, 640, 16, 656),
    (BF16, 512, 1024, 0, 1024),
    (F32, 512, 2048, 0, 2048),
    (V41_FP4, 512, 256, 32, 288),
    (V41.with_width(64), 64, 64, 2, 66),
    (V41.with_width(1024), 1024, 1024, 32, 1056),
    (V4.with_width(128), 128, 192, 1, 194),
    (V32.with_width(192), 192, 256, 4, 260),
    (BF16.with_width(3), 3, 6, 0, 6),
    (V41_FP4.with_width(64), 64, 32, 4, 36),
    (KVCacheFormat("", "e4m3", 9, 1, "ue8m0").with_width(1), 1, 1, 1, 2),
]


@pytest.mark.parametrize(
    ("fmt", "elements", "data_bytes", "scale_bytes", "row_bytes"),
    SIZES,
    ids=lambda value: getattr(value, "name", None),
)
def test_sizes(fmt, elements, data_bytes, scale_bytes, row_bytes):
    assert fmt.num_elements == elements
    assert (fmt.data_bytes, fmt.scale_bytes, fmt.row_bytes) == (data_bytes, scale_bytes, row_bytes)
    assert fmt.num_scales == scale_bytes / (4 if fmt.scale_dtype == "float32" else 1)
    data = jax.eval_shape(lambda: quantize_eagerly(jnp.zeros((2, 3, elements)), fmt))
    chex.assert_shape(data, (2, 3, row_bytes))
    chex.assert_type(data, jnp.uint8)
    values = jax.eval_shape(lambda: dequantize_eagerly(jnp.zeros(data.shape, data.dtype), fmt))
    chex.assert_shape(values, (2, 3, elements))
    chex.assert_type(values, jnp.float32)


def test_every_format_has_its_sizes_here():
    assert {fmt for fmt, *_ in SIZES} >= set(FORMATS)


def test_a_row_may_have_one_value_and_a_call_one_row():
    assert KVCacheFormat("f", "e4m3", 1, 1, "ue8m0").row_bytes == 2
    assert KVCacheFormat("f", "e2m1", 2, 1, "e4m3").row_bytes == 3
    fmt = F32.with_width(1)
    data = _quantize(jnp.asarray([-2.0]), fmt)
    assert hex_bytes(data) == "00 00 00 C0"
    assert np.asarray(_dequantize(data, fmt)).tolist() == [-2.0]


def test_a_width_keeps_everything_else():
    assert V41.with_width(64).with_width(512) == V41
    assert V4.with_width(128) != V4


def test_a_note_does_not_make_another_format():
    assert dataclasses.replace(V41, note="") == V41


# --- rows recorded from PyTorch


@pytest.mark.parametrize(("floor", "key"), [("amax", "reference"), ("scale", "flashmla")])
def test_bytes_are_those_recorded(floor, key):
    data = quantize_rows(recorded()["x"], V41, floor)
    np.testing.assert_array_equal(data, recorded()[f"bytes_{key}"])


def test_values_are_those_recorded():
    values = dequantize_rows(recorded()["bytes_reference"], V41)
    np.testing.assert_array_equal(values, recorded()["dequant_reference"])


def test_the_two_floors_differ_in_the_recorded_rows():
    differ = (recorded()["bytes_reference"] != recorded()["bytes_flashmla"]).any(axis=1)
    assert differ.sum() >= 3


# --- every code


@pytest.mark.parametrize("code", [1, 105, 126, 127, 128, 245])
def test_all_e4m3_codes_decode_exactly_under_a_scale(code):
    codes = np.arange(256, dtype=np.uint8)
    row = np.concatenate([codes, codes, np.full(16, code, np.uint8)])
    got = np.asarray(dequantize_rows(row, V41))[:256]
    expected = np.ldexp(codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64), code - 127)
    # The two NaN codes occur only in rows whose scales are NaN, and stand for +-480 elsewhere.
    expected[[0x7F, 0xFF]] = np.ldexp([480.0, -480.0], code - 127)
    # CPUs flush float32 subnormals; no writer uses scales that small.
    expected[np.abs(expected) < 2.0**-126] *= 0
    np.testing.assert_array_equal(got, expected.astype(np.float32))
    np.testing.assert_array_equal(np.signbit(got), codes >= 128)


def test_literal_e4m3_codes():
    codes = jnp.asarray([0x00, 0x01, 0x07, 0x08, 0x38, 0x7E, 0x80, 0xFE], jnp.uint8)
    expected = [0.0, 2**-9, 7 * 2**-9, 2**-6, 1.0, 448.0, -0.0, -448.0]
    assert np.asarray(decode_e4m3(codes)).tolist() == expected


@pytest.mark.makes_nan
def test_all_scale_codes_decode_exactly():
    codes = np.arange(256, dtype=np.uint8)
    row = np.concatenate(
        [np.full((16, 512), 0x38, np.uint8), codes.reshape(16, 16)], axis=1
    )  # 38 is 1.0
    got = np.asarray(dequantize_rows(row, V41)).reshape(256, 32)
    expected = np.exp2(np.arange(256.0) - 127)
    expected[0], expected[255] = 0, np.nan  # code 0 is not written, and 255 is NaN
    np.testing.assert_array_equal(got, np.tile(expected[:, None], 32).astype(np.float32))


@pytest.mark.makes_nan
def test_all_e2m1_codes_decode_exactly_under_every_scale():
    pairs = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scales = np.tile(np.arange(256, dtype=np.uint8)[:, None], 32)
    got = np.asarray(dequantize_rows(np.concatenate([pairs, scales], axis=1), V41_FP4))
    magnitudes = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.concatenate([magnitudes, -magnitudes])
    scale = scales[:, :1].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    low, high = values[pairs & 0xF] * scale, values[pairs >> 4] * scale
    np.testing.assert_array_equal(got[:, 0::2], low.astype(np.float32))
    np.testing.assert_array_equal(got[:, 1::2], high.astype(np.float32))


# --- rounding to codes


def test_bfloat16_rounds_as_ml_dtypes_does_at_every_tie_and_its_neighbours():
    upper = np.arange(0x7F7F)[:, None] << 16  # the next number is the largest
    x = reference.float32_of_bits(upper + [0x7FFF, 0x8000, 0x8001])
    x = np.stack([x, -x])
    expected = x.astype(ml_dtypes.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(jax.jit(codec.bfloat16_bits)(x), expected)


def test_e4m3_rounds_as_ml_dtypes_does_at_every_midpoint_and_its_neighbours():
    values = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    x = with_neighbours(np.concatenate([values, (values[1:] + values[:-1]) / 2]))
    np.testing.assert_array_equal(encode_e4m3(x), reference.e4m3_codes(x))


def test_e4m3_rounds_every_bfloat16_as_ml_dtypes_does():
    x = reference.float32_of_bits(np.arange(1 << 16) << 16)
    x = x[np.isfinite(x)]
    np.testing.assert_array_equal(encode_e4m3(x), reference.e4m3_codes(x))


@given(st.integers(0, 2**32 - 1))
def test_e4m3_rounds_random_float32_as_ml_dtypes_does(seed):
    random = np.random.default_rng(seed)
    magnitude = np.exp2(random.uniform(-14, 10, 4096))
    x = (magnitude * random.choice([-1, 1], 4096)).astype(np.float32)
    np.testing.assert_array_equal(encode_e4m3(x), reference.e4m3_codes(x))


def test_e4m3_literals():
    x = np.asarray([448, 456, 464, 464.1, 465, 1e30, FLOAT32_MAX, -465], np.float32)
    assert hex_bytes(encode_e4m3(x)) == "7E 7E 7E 7E 7E 7E 7E FE"
    # Rounding through bfloat16 first would give 68, through float16 7A, 4E and 38.
    x = np.asarray([68.04805755615234, 336.06964, 6.748203, 1.062744140625], np.float32)
    assert hex_bytes(encode_e4m3(x)) == "69 7B 4D 39"
    x = np.asarray([2**-9, 2**-10, 1.001 * 2**-10, 1.5 * 2**-9, 2.5 * 2**-9, -0.0], np.float32)
    assert hex_bytes(encode_e4m3(x)) == "01 00 01 02 02 80"


def test_subnormal_codes_survive_the_whole_row():
    row = one_group([448, 2**-9, 2**-10, 2**-10 + 2**-17, 1.5 * 2**-9, 2.5 * 2**-9, -0.0])
    data = np.asarray(quantize_rows(row, V41))[0]
    assert hex_bytes(data[:7]) == "7E 01 00 01 02 02 80"
    assert data[512] == 127


def test_e2m1_rounds_as_ml_dtypes_does():
    values = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, 8], np.float32)
    x = np.concatenate([values, (values[1:] + values[:-1]) / 2, np.arange(0, 8, 1 / 64), [1e30]])
    x = with_neighbours(x)
    for scale in (2.0**-9, 0.171875, 1.0, 30.0, 448.0):
        got = encode_e2m1(x * np.float32(scale), jnp.float32(scale))
        np.testing.assert_array_equal(got, reference.e2m1_codes(x))
    ties = jnp.asarray([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.0], jnp.float32)
    assert np.asarray(encode_e2m1(ties, jnp.float32(1))).tolist() == [0, 2, 2, 4, 4, 6, 6, 8]


def test_a_quotient_that_is_a_tie_goes_to_the_even_code():
    # 180 / 6 = 30 is a code and 75 / 30 = 2.5 a tie, which the reciprocal of 30 would miss.
    data = np.asarray(quantize_rows(one_group([180, 75, -75], V41_FP4), V41_FP4))[0]
    assert (data[0], data[1], data[256]) == (0x47, 0x0C, 0x5F)


# --- scales


@pytest.mark.parametrize("floor", FLOORS)
def test_scale_code_is_exact_at_448_times_a_power_of_two_and_just_above(floor):
    k = np.arange(-110, 119)
    amax = np.ldexp(np.float32(448), k)
    least = {"amax": 105, "scale": 114}[floor]
    rows = np.zeros((2, len(k), 512), np.float32)
    rows[0, :, 7] = -amax
    rows[1, :, 7] = amax * np.float32(1 + 2**-7)  # 1.75 + 2**-7 is the next bfloat16
    codes = np.asarray(quantize_rows(rows, V41, floor))[..., 512]
    np.testing.assert_array_equal(codes[0], np.maximum(127 + k, least))
    np.testing.assert_array_equal(codes[1], np.maximum(128 + k, least))


def test_scale_code_of_the_next_float32_is_one_higher():
    k = np.arange(-110, 119)
    amax = np.ldexp(np.float32(448), k)
    code = jax.jit(codec.power_of_two_scale, static_argnames="smallest")
    np.testing.assert_array_equal(code(amax, 0), 127 + k)
    np.testing.assert_array_equal(code(np.nextafter(amax, np.float32(np.inf)), 0), 128 + k)
    np.testing.assert_array_equal(code(np.nextafter(amax, np.float32(0)), 0), 127 + k)


@pytest.mark.parametrize("amax", [627.2, 449, 640, 895])
def test_no_group_maximum_saturates(amax):
    amax = np.float32(amax)
    assert int(codec.power_of_two_scale(jnp.asarray(amax), 0)) == 128
    value = decode_e4m3(encode_e4m3(jnp.asarray([amax / 2]))) * 2
    assert abs(float(value[0]) / amax - 1) <= 0.0625


def test_values_are_divided_by_the_stored_scale():
    data = np.asarray(quantize_rows(one_group([627.2]), V41))[0]
    assert (data[0], data[512]) == (0x7A, 128)
    # As float32, and through the row, where 450 stands for 449: bfloat16 has no 449.
    x = np.asarray([449, 224, 1, -300], np.float32)
    assert hex_bytes(encode_e4m3(x / 2)) == "76 6E 30 F1"
    data = np.asarray(quantize_rows(one_group([450, 224, 1, -300]), V41))[0]
    assert (hex_bytes(data[:4]), data[512]) == ("76 6E 30 F1", 128)
    values = np.asarray(dequantize_rows(data, V41))
    assert values[:4].tolist() == [448, 224, 1, -288]


def test_values_round_to_bfloat16_before_the_scale_is_chosen():
    data = np.asarray(quantize_rows(one_group([449]), V41))[0]  # a tie, to the even 448
    assert (data[0], data[512]) == (0x7E, 127)
    # 1.0625 + 2**-10 is above the tie of two codes, its bfloat16 1.0625 is the tie.
    data = np.asarray(quantize_rows(one_group([448, 1.0625 + 2**-10]), V41))[0]
    assert data[1] == 0x38


@pytest.mark.parametrize(("floor", "code"), [("amax", 105), ("scale", 114)])
def test_zeros_have_the_code_of_the_floor_and_decode_to_zero(floor, code):
    rows = np.zeros((3, 512), np.float32)
    rows[1] = -0.0
    rows[2] = 3.0
    rows[2, 5 * 32 : 6 * 32] = 0
    data = np.asarray(quantize_rows(rows, V41, floor))
    np.testing.assert_array_equal(data[:2, 512:], code)
    assert data[2, 512:].tolist() == [120] * 5 + [code] + [120] * 10  # 3 <= 448 * 2**-7
    np.testing.assert_array_equal(dequantize_rows(data, V41), rows)
    assert set(data[0, :512].tolist()) == {0x00}
    assert set(data[1, :512].tolist()) == {0x80}


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_float32_stays_finite(sign):
    data = np.asarray(quantize_rows(one_group([sign * FLOAT32_MAX]), V41))[0]
    values = np.asarray(dequantize_rows(data, V41))
    assert data[512] == 247
    assert values[0] == sign * 240 * 2.0**120
    np.testing.assert_array_equal(values[1:], 0)


@pytest.mark.parametrize("fmt", [V4, V32, BF16], ids=lambda fmt: fmt.name)
def test_the_largest_float32_stays_finite_as_a_raw_bfloat16(fmt):
    x = np.zeros((1, fmt.num_elements), np.float32)
    x[0, -2:] = FLOAT32_MAX, -FLOAT32_MAX
    values = np.asarray(dequantize_rows(quantize_rows(x, fmt), fmt))
    assert values[0, -2:].tolist() == [240 * 2.0**120, -240 * 2.0**120]


def test_each_group_has_its_own_scale_and_place():
    row = np.repeat(np.exp2(np.arange(16.0) - 8), 32).astype(np.float32)[None]
    data = np.asarray(quantize_rows(row, V41))
    assert data[0, 512:].tolist() == list(range(111, 127))  # 119 + g - 8
    np.testing.assert_array_equal(dequantize_rows(data, V41), row)


def test_decoding_uses_the_stored_scale_only():
    row = np.full((3, 512), 3.0, np.float32)
    data = np.array(quantize_rows(row, V41))
    data[1, 512:] += 1
    data[2, 512:] -= 1
    np.testing.assert_array_equal(dequantize_rows(data, V41)[:, 0], [3.0, 6.0, 1.5])


# --- every format against its rule


@pytest.mark.parametrize("floor", FLOORS)
@by_format
def test_bytes_follow_the_rule_of_the_format(fmt, floor):
    x = sample_rows(fmt.num_elements, 400, seed=1)
    x[0] = 0
    x[1] *= np.float32(1e-6)
    x[2] = 1e-4
    expected = reference.quantize(x, fmt, floor)
    np.testing.assert_array_equal(quantize_rows(x, fmt, floor), expected)


def test_eager_bytes_are_the_compiled_ones():
    x = sample_rows(576, 16, seed=2)
    np.testing.assert_array_equal(quantize_eagerly(jnp.asarray(x), V32), quantize_rows(x, V32))


@by_format
def test_values_follow_the_rule_of_the_format(fmt):
    x = sample_rows(fmt.num_elements, 100, seed=3)
    data = reference.quantize(x, fmt)
    expected = reference.dequantize(data, fmt).astype(np.float32)
    np.testing.assert_array_equal(dequantize_rows(data, fmt), expected)


@pytest.mark.parametrize(("dtype", "fmt"), [(jnp.bfloat16, V41), (jnp.float16, F32)])
def test_narrower_input_means_its_own_values(dtype, fmt):
    x = np.random.default_rng(4).normal(size=(4, 512)).astype(dtype)
    expected = quantize_rows(x.astype(np.float32), fmt)
    np.testing.assert_array_equal(quantize_rows(x, fmt), expected)


@by_format
def test_no_rows_are_no_rows(fmt):
    x = jnp.zeros((0, 3, fmt.num_elements))
    data = jax.eval_shape(lambda: quantize_eagerly(x, fmt))
    chex.assert_shape(data, (0, 3, fmt.row_bytes))
    values = jax.eval_shape(lambda: dequantize_eagerly(jnp.zeros(data.shape, data.dtype), fmt))
    chex.assert_shape(values, x.shape)


def test_leading_axes_are_a_batch():
    x = jnp.asarray(sample_rows(64, 6, seed=8)).reshape(2, 3, 64)
    fmt = V41.with_width(64)
    data = _quantize(x, fmt)
    expected = quantize_rows(np.asarray(x), fmt)
    np.testing.assert_array_equal(data, expected)
    np.testing.assert_array_equal(_dequantize(data, fmt), dequantize_rows(expected, fmt))


@pytest.mark.parametrize("fmt", QUANTIZED, ids=lambda fmt: fmt.name)
def test_quantising_again_changes_no_value(fmt):
    x = np.random.default_rng(5).normal(size=(50, fmt.num_elements)).astype(np.float32)
    once = np.asarray(dequantize_rows(quantize_rows(x, fmt), fmt))
    if fmt.scale_dtype == "float32":  # the values are not bfloat16
        once = reference.to_bfloat16(once)
    again = np.asarray(dequantize_rows(quantize_rows(once, fmt), fmt))
    np.testing.assert_allclose(again, once, rtol=2**-7 if fmt.scale_dtype == "float32" else 0)


def test_raw_values_are_kept():
    x = sample_rows(512, 20, seed=6)
    np.testing.assert_array_equal(dequantize_rows(quantize_rows(x, F32), F32), x)
    bf16 = reference.to_bfloat16(x)
    np.testing.assert_array_equal(dequantize_rows(quantize_rows(x, BF16), BF16), bf16)
    tail = np.asarray(dequantize_rows(quantize_rows(x, V4), V4))[:, 448:]
    np.testing.assert_array_equal(tail, bf16[:, 448:])


def test_byte_order_of_mixed_rows():
    x = one_group([448.0], V4)
    x[0, 448:] = 1.0
    data = np.asarray(quantize_rows(x, V4))[0]
    assert data[0] == 0x7E
    np.testing.assert_array_equal(data[448:576].view(ml_dtypes.bfloat16), 1)
    assert data[576:].tolist() == [127, 105, 105, 105, 105, 105, 105, 0]
    x = one_group([448.0], V32)
    x[0, 512:] = 1.0
    data = np.asarray(quantize_rows(x, V32))[0]
    assert data[512:516].view(np.float32).tolist() == [1.0]
    np.testing.assert_array_equal(data[528:].view(ml_dtypes.bfloat16), 1)


def test_the_low_nibble_comes_first():
    data = np.asarray(quantize_rows(one_group([6.0, -1.0, 0.5], V41_FP4), V41_FP4))[0]
    assert data[:2].tolist() == [0xA7, 0x01]
    assert data[256] == 0x38  # 6 / 6


def test_fp4_scales_stay_between_the_smallest_and_the_largest_code():
    data = np.asarray(quantize_rows(one_group([1e5, 3.0], V41_FP4), V41_FP4))[0]
    assert (data[0], data[256], data[257]) == (0x07, 0x7E, 0x01)


# --- rows that are NaN as a whole


@pytest.mark.makes_nan
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@by_format
def test_one_bad_value_makes_the_whole_row_nan_and_no_other(fmt, bad):
    places = [0, 31, fmt.num_elements // 2, fmt.num_elements - 1]
    clean = np.random.default_rng(7).normal(size=(9, fmt.num_elements)).astype(np.float32)
    x = clean.copy()
    x[[1, 3, 5, 7], places] = bad
    data = np.asarray(quantize_rows(x, fmt))
    nan_row = {
        "V41": [0x7F] * 512 + [0xFF] * 16,
        "V4": [0x7F] * 448 + [0xC0, 0x7F] * 64 + [0xFF] * 7 + [0],
        "V32": [0x7F] * 512 + [0, 0, 0xC0, 0x7F] * 4 + [0xC0, 0x7F] * 64,
        "BF16": [0xC0, 0x7F] * 512,
        "F32": [0, 0, 0xC0, 0x7F] * 512,
        "V41_FP4": [0x7F] * (256 + 32),
    }[fmt.name]
    for row in (1, 3, 5, 7):
        assert data[row].tolist() == nan_row
    np.testing.assert_array_equal(data[::2], np.asarray(quantize_rows(clean, fmt))[::2])
    values = np.asarray(dequantize_rows(data, fmt))
    assert np.isnan(values[1::2]).all()
    assert np.isfinite(values[::2]).all()


# --- errors


def test_page_planar_formats_are_refused():
    planar = KVCacheFormat("planar", "e4m3", 64, 32, "ue8m0", token_interleaved=False)
    for call in (quantize_eagerly, dequantize_eagerly):
        with pytest.raises(ValueError, match="expected a token-interleaved format, got .*planar"):
            call(jnp.zeros((1, 64)), planar)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize_eagerly(jnp.zeros((2, 500)), V41), r"512 values, got shape \(2, 500\)"),
        (lambda: quantize_eagerly(jnp.zeros(()), V41), r"512 values, got shape \(\)"),
        (lambda: quantize_eagerly(jnp.zeros(512, jnp.int32), V41), "floating .*, got int32"),
        (lambda: quantize_eagerly([1.0] * 512, V41), "floating .*, got list"),
        (
            lambda: quantize_eagerly(jnp.zeros(512, jnp.float8_e4m3fn), V41),
            "16 bits or more, got float8_e4m3fn",
        ),
        (lambda: quantize_eagerly(jnp.zeros(512), "V41"), "a KVCacheFormat, got str"),
        (
            lambda: quantize_eagerly(jnp.zeros(512), V41, "none"),
            "scale_floor: expected one of 'amax', 'scale', got 'none'",
        ),
        (
            lambda: dequantize_eagerly(jnp.zeros((2, 512), jnp.uint8), V41),
            r"528 bytes, got shape \(2, 512\)",
        ),
        (lambda: dequantize_eagerly(jnp.zeros((), jnp.uint8), V41), r"528 bytes, got shape \(\)"),
        (lambda: dequantize_eagerly(jnp.zeros(528, jnp.int8), V41), "uint8, got int8"),
        (lambda: dequantize_eagerly([0] * 528, V41), "uint8, got list"),
        (lambda: dequantize_eagerly(jnp.zeros(528, jnp.uint8), 528), "KVCacheFormat, got int"),
    ],
)
def test_bad_rows_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: V41.with_width(100), "V41 expects a multiple of 32, got 100"),
        (lambda: V41.with_width(0), "V41 expects a multiple of 32, got 0"),
        (lambda: V4.with_width(64), "V4 expects a multiple of 64 plus 64, got 64"),
        (lambda: V41.with_width("64"), "num_elements: expected an integer .*, got '64'"),
        (lambda: V41.with_width(64.0), "an integer of 0 or more, got 64.0"),
        (lambda: BF16.with_width(-1), "an integer of 0 or more, got -1"),
        (lambda: KVCacheFormat("none"), "at least one value in a row, got 0"),
        (lambda: KVCacheFormat("f", "e5m2", 64, 32, "ue8m0"), "one of 'e4m3', .*, got 'e5m2'"),
        (lambda: KVCacheFormat("f", "e4m3", 64, 32, "bfloat16"), "one of .*, got 'bfloat16'"),
        (lambda: KVCacheFormat("f", "e4m3", 64, 32), "scale_dtype: expected it exactly when"),
        (lambda: KVCacheFormat("f", None, 64, 32), "quantized_dtype: expected it exactly when"),
        (lambda: KVCacheFormat("f", "e4m3", 64, 0, "ue8m0"), "elements_per_scale 0, got 64"),
        (lambda: KVCacheFormat("f", "e4m3", 64, scale_dtype="ue8m0"), "_per_scale 0, got 64"),
        (lambda: KVCacheFormat("f", "e4m3", 64, 48, "ue8m0"), "elements_per_scale 48, got 64"),
        (lambda: KVCacheFormat("f", "e2m1", 64, 32, "ue8m0"), "e4m3 scales for e2m1 .*'ue8m0'"),
        (
            lambda: KVCacheFormat("f", "e4m3", 64, 32, "e4m3"),
            "and no others, got 'e4m3' for 'e4m3'",
        ),
        (lambda: KVCacheFormat("f", "e2m1", 3, 3, "e4m3"), "even number for e2m1 pairs, got 3"),
        (lambda: KVCacheFormat("f", raw_elements=3), "raw_dtype: expected it exactly when"),
        (
            lambda: KVCacheFormat("f", raw_elements=3, raw_dtype="float16"),
            "one of 'bfloat16', .*, got 'float16'",
        ),
        (
            lambda: KVCacheFormat("f", raw_elements=True, raw_dtype="float32"),
            "integer .*, got True",
        ),
        (lambda: dataclasses.replace(F32, pad_bytes=-1), "pad_bytes: .* 0 or more, got -1"),
        (lambda: KVCacheFormat(None, None), "name: expected a string, got None"),
        (lambda: dataclasses.replace(F32, note=7), "note: expected a string, got 7"),
        (lambda: dataclasses.replace(F32, scales_last=1), "scales_last: expected True .*, got 1"),
        (lambda: dataclasses.replace(F32, token_interleaved=0), "expected True or False, got 0"),
        (
            lambda: formats.check_cache_format("rows", "V41"),
            "rows: expected a KVCacheFormat, got str",
        ),
        (lambda: formats.check_cache_format("rows", V32), "rows: format V32 is for conversion"),
    ],
)
def test_formats_that_mean_nothing_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
