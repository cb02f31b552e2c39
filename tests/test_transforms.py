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


# --- the same numbers in every program

WIDTHS = [1, 2, 3, 64, 96, 512, 7168]


def squares_added_in_pairs(x):
    """In float32, each operation of NumPy's rounded."""
    sums = x * x
    while sums.shape[-1] > 1:
        sums = np.pad(sums, ((0, 0), (0, sums.shape[-1] % 2)))
        sums = sums[:, ::2] + sums[:, 1::2]
    return sums * np.float32(1 / x.shape[-1])


@pytest.mark.parametrize("width", WIDTHS)
def test_the_mean_square_has_the_same_bits_in_every_program(width):
    x = normal(40, width) * np.exp(normal(40, 1, seed=1))
    expected = squares_added_in_pairs(x)
    programs = [
        transforms.mean_square,
        jax.vmap(transforms.mean_square),
        lambda x: transforms.mean_square(x.reshape(8, 5, width)).reshape(40, 1),
        lambda x: transforms.mean_square(x) + jnp.float32(1e-6),
    ]
    *same, plus_eps = [np.asarray(jax.jit(program)(x)) for program in programs]
    for got in same:
        np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(plus_eps, expected + np.float32(1e-6))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", ["normal", "one_dominates", "equal", "tiny", "huge"])
def test_the_mean_square_is_that_of_float64(kind, width):
    x = normal(40, width)
    if kind == "one_dominates":
        x[:, width // 2] *= np.float32(1e4)
    elif kind == "equal":
        x[:] = x[:, :1]
    x *= np.float32({"tiny": 1e-15, "huge": 1e16}.get(kind, 1.0))
    expected = np.square(x, dtype=np.float64).mean(axis=1, keepdims=True)
    got = np.asarray(jax.jit(transforms.mean_square)(x))
    # Each of the roundings of a square, of the sums it is in and of the mean is half a unit.
    units = np.abs(got - expected) / np.spacing(expected.astype(np.float32))
    assert units.max() <= 4


def test_mean_square_literals():
    x = jnp.asarray([[3, 4, 0, 0], [1e-30] * 4, [1e30] * 4, [0] * 4], jnp.float32)
    got = jax.jit(transforms.mean_square)(x)
    np.testing.assert_array_equal(got[:, 0], [6.25, 0.0, np.inf, 0.0])


def test_a_rounded_product_is_not_fused_into_a_sum():
    a, b, c = (normal(4096, seed=seed) for seed in range(3))
    got = jax.jit(lambda a, b, c: transforms.rounded(a * b) + c)(a, b, c)
    np.testing.assert_array_equal(got, a * b + c)


@pytest.mark.makes_nan
def test_rounding_changes_no_number():
    x = np.asarray([0.0, -0.0, 1.5, -3.0, 3.4e38, -3.4e38, np.inf, -np.inf, 2.0**-126], np.float32)
    got = np.asarray(jax.jit(transforms.rounded)(x))
    np.testing.assert_array_equal(got.view(np.uint32), x.view(np.uint32))
    quiet, negative, largest, signalling = 0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0x7F800001
    nans = np.asarray([quiet, negative, largest, signalling], np.uint32).view(np.float32)
    assert np.isnan(jax.jit(transforms.rounded)(nans)).all()


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_a_rotation_rounds_each_product(pairing):
    x, cos, sin = normal(50, 64), normal(50, 32, seed=1), normal(50, 32, seed=2)
    a, b = (x[:, ::2], x[:, 1::2]) if pairing == "interleaved" else np.split(x, 2, axis=1)
    turned = a * cos - b * sin, b * cos + a * sin
    got = np.asarray(rope(x, cos, sin, pairing=pairing))
    order = ([np.s_[:, ::2], np.s_[:, 1::2]], [np.s_[:, :32], np.s_[:, 32:]])
    for part, expected in zip(order[PAIRINGS.index(pairing)], turned, strict=True):
        np.testing.assert_array_equal(got[part], expected)


def test_a_transform_rounds_the_products_it_is_given():
    x, weight = normal(50, 4), normal(50, 4, seed=1)
    a, b, c, d = (x * weight).T
    expected = [(a + b) + (c + d), (a - b) + (c - d), (a + b) - (c + d), (a - b) - (c - d)]
    got = jax.jit(lambda x, weight: transforms.hadamard(x * weight))(x, weight)
    np.testing.assert_array_equal(got, np.stack(expected, axis=1) / 2)


def transform(x, weight, cos, sin):
    return transforms.hadamard(transforms.rope(transforms.rms_norm(x, weight, 0.5), cos, sin))


def plain_transform(x, weight, cos, sin):
    x = x / jnp.sqrt(jnp.mean(x * x) + 0.5) * weight
    a, b = x[::2], x[1::2]
    (a, c), (b, d) = a * cos - b * sin, b * cos + a * sin
    return jnp.stack([a + b + c + d, a - b + c - d, a + b - c - d, a - b - c + d]) / 2


@pytest.mark.parametrize("derivative", [jax.jacfwd, jax.jacrev, jax.hessian])
def test_derivatives_are_those_of_the_plain_formulas(derivative):
    arguments = [normal(5, width, seed=seed) for seed, width in enumerate((4, 4, 2, 2))]
    got, expected = (
        jax.jit(jax.vmap(derivative(function, argnums=(0, 1, 2, 3))))(*arguments)
        for function in (transform, plain_transform)
    )
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-5)


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


@pytest.mark.makes_nan
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
    positions = random.integers(-(2**31), 2**31, 32, np.int32) >> random.integers(
        0, 31, 32, np.int32
    )
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
    np.testing.assert_allclose(got, np.asarray(x) @ reference.hadamard_matrix(width), atol=2e-6)
    np.testing.assert_allclose(hadamard(got), x, atol=2e-6)
    np.testing.assert_allclose(got @ got.T, x @ x.T, atol=1e-4)


@pytest.mark.parametrize("width", [0, 3, 96, 500])
def test_hadamard_refuses_other_widths(width):
    with pytest.raises(ValueError, match=f"a power of two, got {width}"):
        transforms.hadamard(jnp.zeros((1, width)))
