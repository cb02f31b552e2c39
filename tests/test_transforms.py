"""RMSNorm, rotation, angles and the Hadamard transform against float64 and exact arithmetic."""

import fractions
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as reference
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import transforms

TWO_PI = 2 * fractions.Fraction("3.14159265358979323846264338327950288419716939937510")
PAIRINGS = ["interleaved", "half_split"]

rms_norm = jax.jit(transforms.rms_norm, static_argnames="eps")
rope = jax.jit(transforms.rope, static_argnames=("pairing", "inverse"))
hadamard = jax.jit(transforms.hadamard)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# --- norm


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e15])
def test_norm_is_that_of_float64(size):
    x, weight = jnp.asarray(normal(50, 512) * np.float32(size)), jnp.asarray(normal(512, seed=1))
    expected = reference.norm(x, weight, 1e-6)
    np.testing.assert_allclose(rms_norm(x, weight, 1e-6), expected, rtol=1e-6, atol=1e-30)


def test_norm_without_weights_and_of_bfloat16_is_float32():
    x = jnp.asarray(normal(2, 3, 64), jnp.bfloat16)
    got = rms_norm(x, None, 1e-6)
    chex.assert_type(got, jnp.float32)
    expected = reference.norm(np.asarray(x, np.float64), None, 1e-6)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_norm_literal():
    x = jnp.asarray([[3.0, 4.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    got = rms_norm(x, jnp.asarray([1.0, 2.0, 1.0, 1.0]), 6.25)  # mean square 6.25
    np.testing.assert_allclose(got[0], [0.8485281, 2.2627417, 0, 0], rtol=1e-6)
    np.testing.assert_array_equal(got[1], 0)


@pytest.mark.parametrize("bad", [1e20, -3e38, np.inf, -np.inf, np.nan])
def test_a_row_whose_norm_overflows_is_nan_and_no_other(bad):
    x = normal(3, 64)
    clean = rms_norm(jnp.asarray(x), None, 1e-6)
    x[1, 5] = bad
    got = rms_norm(jnp.asarray(x), None, 1e-6)
    assert np.isnan(got[1]).all()
    np.testing.assert_array_equal(got[::2], clean[::2])


# --- rotation


@pytest.mark.parametrize(
    ("pairing", "expected"),
    [
        ("interleaved", [-1.14264, 1.92208, 2.95985, 4.02980]),
        ("half_split", [-1.98411, 1.95990, 2.46238, 4.01980]),
    ],
)
def test_rotation_literals_at_position_one(pairing, expected):
    angles = jnp.asarray([[1.0, 0.01]])
    x = jnp.asarray([[1.0, 2.0, 3.0, 4.0]])
    got = rope(x, jnp.cos(angles), jnp.sin(angles), pairing=pairing)
    np.testing.assert_allclose(got[0], expected, atol=1e-5)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_rotation_turns_the_last_values_and_its_inverse_undoes_it(pairing):
    x = jnp.asarray(normal(7, 5, 64))
    angles = np.random.default_rng(1).uniform(-np.pi, np.pi, (7, 1, 12))
    cos, sin = jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)
    got = rope(x, cos, sin, pairing=pairing)
    np.testing.assert_array_equal(got[..., :40], x[..., :40])
    np.testing.assert_allclose(got, reference.rotate(x, angles, pairing), atol=1e-6)
    undone = rope(got, cos, sin, pairing=pairing, inverse=True)
    np.testing.assert_allclose(undone, x, atol=1e-6)


def test_rotation_takes_narrow_input_and_gives_float32():
    x, angles = jnp.ones((1, 4), jnp.bfloat16), jnp.zeros((1, 2), jnp.bfloat16)
    got = rope(x, jnp.cos(angles), jnp.sin(angles))
    chex.assert_type(got, jnp.float32)
    np.testing.assert_array_equal(got, 1)


# --- angles


@functools.cache
def frequencies(theta):
    return theta ** (-np.arange(0, 64, 2) / 64)


@functools.cache
def rope_cos_sin(theta):
    turns = transforms.turns_per_position(frequencies(theta))
    return jax.jit(lambda positions: transforms.rope_cos_sin(positions, turns))


def exact_cos_sin(positions, theta):
    """The angle modulo a turn in exact arithmetic; only its cosine and sine are float64."""
    angles = [
        [float(int(p) * fractions.Fraction(f) % TWO_PI) for f in frequencies(theta).tolist()]
        for p in positions
    ]
    return np.cos(angles), np.sin(angles)


@pytest.mark.parametrize("theta", [10_000.0, 160_000.0])
@given(st.integers(0, 2**32 - 1))
def test_angles_are_right_at_every_int32_position(theta, seed):
    random = np.random.default_rng(seed)
    positions = random.integers(-(2**31), 2**31, 32, np.int32) >> random.integers(0, 31, 32)
    positions[:7] = 0, 1, 1_000_000, 1_048_575, 2**31 - 1, -1, -(2**31)
    got = rope_cos_sin(theta)(positions)
    chex.assert_shape(got, (32, 32))
    for ours, exact in zip(got, exact_cos_sin(positions, theta), strict=True):
        chex.assert_type(ours, jnp.float32)
        np.testing.assert_allclose(ours, exact, rtol=0, atol=2e-7)


def test_angle_literals():
    turns = transforms.turns_per_position(np.asarray([1.0]))
    # 1 / (2 pi) = 0.15915494309189535 of a turn: 0x28BE60DB 9391054A in 64 bits.
    assert [hex(word) for word in turns[:, 0].tolist()] == ["0x28be60db", "0x9391054a"]
    cos, sin = transforms.rope_cos_sin(jnp.asarray([0, 1, 1_000_000], jnp.int32), turns)
    np.testing.assert_allclose(cos[:, 0], [1, 0.5403023058681398, 0.93675212753314], atol=2e-7)
    np.testing.assert_allclose(sin[:, 0], [0, 0.8414709848078965, -0.34999350217129], atol=2e-7)


# --- Hadamard transform


def test_hadamard_of_the_first_unit_row_is_constant_and_back():
    unit = jnp.zeros((1, 64)).at[0, 0].set(1.0)
    np.testing.assert_array_equal(hadamard(unit), np.full((1, 64), 0.125))
    np.testing.assert_array_equal(hadamard(jnp.ones((1, 64))), unit * 8)


def test_hadamard_literal_in_sylvesters_order():
    got = hadamard(jnp.asarray([1.0, 2.0, 3.0, 4.0]))
    np.testing.assert_array_equal(got, [5.0, -1.0, -2.0, 0.0])


@pytest.mark.parametrize("width", [1, 2, 64, 512])
def test_hadamard_is_orthonormal_and_its_own_inverse(width):
    x = jnp.asarray(normal(5, width))
    got = hadamard(x)
    np.testing.assert_allclose(got, x @ reference.hadamard_matrix(width), atol=2e-6)
    np.testing.assert_allclose(hadamard(got), x, atol=2e-6)
    np.testing.assert_allclose(got @ got.T, x @ x.T, atol=1e-4)


@pytest.mark.parametrize("width", [0, 3, 96, 500])
def test_hadamard_refuses_other_widths(width):
    with pytest.raises(ValueError, match=f"a power of two, got {width}"):
        transforms.hadamard(jnp.zeros((1, width)))
