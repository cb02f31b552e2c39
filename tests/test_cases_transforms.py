"""Cases of tests/cases.md: rotation, norm, Hadamard transform, and products in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as reference
import pytest
from ring_layers import RingLayer, show_config, show_params
from small_models import largest_error

import pallas_kernels
import swa_jax as swa
from pallas_kernels import KVRows, dequantize_rows, indexed_attention, transforms
from swa_jax.rotary import rotary_turns

pytestmark = pytest.mark.quick_compilation


@pytest.fixture(params=["xla", "interpret", pytest.param("triton", marks=pytest.mark.gpu)])
def implementation(request):
    return request.param


ON_EACH_PLATFORM = pytest.mark.parametrize(
    "platform", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]
)


@functools.partial(jax.jit, static_argnames=("fmt", "eps", "hadamard", "implementation"))
def store(latents, weight, fmt, eps=1e-6, hadamard=False, implementation=None):
    """The bytes of rows that are not rotated."""
    rows = KVRows.create(len(latents), 1, fmt)
    angles = jnp.zeros((len(latents), 0))
    rows = pallas_kernels.fused_store(
        rows, latents, jnp.arange(len(latents)), norm_weight=weight, norm_eps=eps, cos=angles,
        sin=angles, hadamard=hadamard, implementation=implementation,
    )  # fmt: skip
    return rows.logical()[:, 0, 0]


# --- O: rotation


def test_O01_angles_of_a_bfloat16_layer_are_those_of_float64():
    config = show_config(
        3, 5, rope_dim=64, fmt=swa.F32.with_width(64), dtype="bfloat16", param_dtype="bfloat16"
    )
    params = show_params(config)
    params["params"]["kv_norm"] = jnp.full(64, 2**-0.5)
    layer = RingLayer(config, params)
    pairs = np.tile([1.0, 0.0], 32)  # of which the rotation makes cosines and sines
    layer.decode(pairs[None, None], [0], [[4095]])
    row = layer.data[0, 4095 % 5].view(np.float32)
    angles = 4095 * 10000.0 ** (-np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(row[0::2], np.cos(angles), rtol=0, atol=5e-7)
    np.testing.assert_allclose(row[1::2], np.sin(angles), rtol=0, atol=5e-7)


@ON_EACH_PLATFORM
def test_O03_cosines_and_sines_do_not_drift_with_the_position(platform):
    positions = np.int32([40, 4095, 131_071, 1_048_575])
    turns = rotary_turns(64, 10000.0, None)
    with jax.default_device(jax.devices(platform)[0]):
        cos, sin = jax.jit(lambda p: transforms.rope_cos_sin(p, turns))(positions)
    frequencies = np.longdouble(10000) ** -(np.arange(0, 64, 2) / np.longdouble(64))
    angles = (positions[:, None] * frequencies).astype(np.longdouble)
    np.testing.assert_allclose(cos, np.cos(angles).astype(np.float64), rtol=0, atol=2e-7)
    np.testing.assert_allclose(sin, np.sin(angles).astype(np.float64), rtol=0, atol=2e-7)


@pytest.mark.parametrize(
    ("pairing", "expected"),
    [
        ("interleaved", [-1.14264, 1.92208, 2.95985, 4.02980]),
        ("half_split", [-1.98411, 1.95990, 2.46238, 4.01980]),
    ],
)
def test_O04_pairs_are_neighbours_or_halves_as_chosen(pairing, expected):
    angles = jnp.asarray([1.0, 0.01])
    x = jnp.asarray([1.0, 2.0, 3.0, 4.0])
    got = jax.jit(transforms.rope, static_argnums=3)(x, jnp.cos(angles), jnp.sin(angles), pairing)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
    assert swa.AttentionConfig(8, 8).pairing == "interleaved"


@pytest.mark.parametrize(
    ("fmt", "pairing", "error"),
    [
        (swa.F32, "interleaved", 1e-6),
        pytest.param(swa.V41, "half_split", 2**-4, marks=pytest.mark.slow),
    ],
)
def test_O05_the_output_is_rotated_back_at_the_query(fmt, pairing, error):
    config = show_config(1, 2, rope_dim=64, fmt=fmt.with_width(64), pairing=pairing)
    params = show_params(config)
    params["params"]["kv_norm"] = jnp.ones(64)
    layer = RingLayer(config, params)
    x = np.random.default_rng(0).normal(size=64)
    row = x / np.sqrt(np.mean(x**2))  # not rotated
    for position in (0, 7, 1000):
        y = layer.decode(x[None, None], [0], [[position]])[0, 0]
        assert largest_error(y, row) <= error
    stored = np.asarray(dequantize_rows(jnp.asarray(layer.data[0, 0]), config.fmt))
    assert largest_error(stored, row) > 0.1  # that of position 1000 is rotated


def test_O09_positions_end_with_int32_and_do_not_wrap():
    geometry = swa.RingGeometry(128, 134)
    last = 2**31 - 1
    assert geometry.slots(0, last) == 49
    meta = swa.DecodeMetadata.build(geometry, np.int64([0]), np.int64([[last]]))
    assert meta.slots.tolist() == [49]
    assert (meta.slots.dtype, meta.positions.dtype) == (jnp.int32, jnp.int32)
    with pytest.raises(ValueError, match="positions: expected int32 values, got 2147483648"):
        swa.DecodeMetadata.build(geometry, [0], np.int64([[last + 1]]))
    with pytest.raises(ValueError, match="positions: expected int32 values, got 2147483647 to"):
        swa.DecodeMetadata.build(geometry, [0], np.int64([[last, last + 1]]))
    with pytest.raises(ValueError, match="starts: expected positions within int32"):
        swa.PrefillMetadata.build(geometry, [0], [last], [2], max_tokens=2)
    # Where it is not known it has wrapped: no row.
    assert jax.jit(lambda p: geometry.slots(0, p + 1))(jnp.int32(last)) == -1


# --- P: norm and transform


def test_P01_the_norm_is_rounded_after_its_weight(implementation):
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(100, 512)), jnp.bfloat16)
    weight = np.resize(np.float32([1.05, 0.3]), 512)
    got = store(x, weight, swa.V41, implementation=implementation)
    exact = reference.norm(np.asarray(x, np.float32), None, 1e-6)
    want = reference.quantize((exact * weight).astype(np.float32), swa.V41)
    assert np.any(np.asarray(got) != want, axis=1).sum() <= 1
    early = reference.quantize(reference.to_bfloat16(exact) * weight, swa.V41)
    assert np.any(early != want, axis=1).sum() >= 95  # almost every row shows what comes first


def test_P02_squares_are_summed_in_float32(implementation):
    ones = jnp.ones((1, 512), jnp.bfloat16)
    weight = jnp.ones(512)
    normed = jax.jit(lambda x: transforms.rms_norm(x, weight, 0.0))(ones)
    np.testing.assert_array_equal(normed, np.ones((1, 512)))
    row = store(ones, weight, swa.F32, eps=0.0, implementation=implementation)
    np.testing.assert_array_equal(np.asarray(row).view(np.float32), np.ones((1, 512)))


hadamard = jax.jit(transforms.hadamard)


@pytest.mark.parametrize(
    ("width", "expected"), [(512, 0.0441942), (128, 0.0883883), (32, 0.1767767)]
)
def test_P04_the_hadamard_transform_is_orthonormal(width, expected):
    x = np.random.default_rng(0).normal(size=(3, width)).astype(np.float32)
    x[0] = np.eye(width)[0]
    transformed = np.asarray(hadamard(x))
    np.testing.assert_allclose(transformed[0], np.full(width, expected), rtol=1e-6)
    np.testing.assert_allclose(hadamard(transformed), x, rtol=0, atol=2e-6)
    got, want = (values.astype(np.float64) @ values.T for values in (transformed, x))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.max(np.abs(want)))


def test_P04_a_store_transforms_where_it_is_asked_to(implementation):
    unit = jnp.zeros((1, 512)).at[0, 0].set(1.0)
    weight = jnp.full(512, 512**-0.5)
    row = store(unit, weight, swa.F32, 1e-12, hadamard=True, implementation=implementation)
    values = np.asarray(row).view(np.float32)
    np.testing.assert_allclose(values, np.full((1, 512), 0.0441942), rtol=1e-6)


@ON_EACH_PLATFORM
def test_P06_float32_products_are_not_rounded_to_tf32(platform):
    value = np.float32(1 + 2**-12)  # 1 in TF32
    fmt = swa.F32
    data = reference.quantize(np.full((1, 512), value), fmt)
    rows = KVRows.view(jnp.asarray(data), start=0, rows_per_slot=1, fmt=fmt)
    q, indices = jnp.full((1, 1, 512), value), jnp.zeros((1, 1), jnp.int32)
    place = jax.device_put((q, rows, indices), jax.devices(platform)[0])
    out, lse = jax.jit(indexed_attention)(*place)
    np.testing.assert_allclose(lse, [[22.638467]], rtol=1e-6)  # sqrt(512) * value**2
    np.testing.assert_array_equal(out, np.full((1, 1, 512), value))
    lowered = jax.jit(indexed_attention).trace(q, rows, indices).lower(lowering_platforms=("cuda",))
    products = [line for line in lowered.as_text().splitlines() if "dot_general" in line]
    assert len(products) == 2
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)
    with pytest.raises(NotImplementedError, match="multiplies bfloat16 queries only"):
        indexed_attention(q, rows, indices, implementation="triton")
