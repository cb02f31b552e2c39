"""YaRN: its frequencies against the published formula and hand calculations, and its angles."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import swa_jax as swa
from pallas_kernels.transforms import rope_cos_sin
from swa_jax.rotary import frequencies, rotary_turns

V4_YARN = swa.YarnScaling(factor=16.0, original_max_positions=65536, beta_fast=32.0, beta_slow=1.0)


def test_frequencies_of_the_published_models_are_those_of_the_formula():
    # The pairs that turn 32 times and once in 65,536 positions are 15.45 and 24.71.
    low = 64 * math.log(65536 / (32 * 2 * math.pi)) / (2 * math.log(160000.0))
    high = 64 * math.log(65536 / (1 * 2 * math.pi)) / (2 * math.log(160000.0))
    assert (math.floor(low), math.ceil(high)) == (15, 25)
    plain = [160000.0 ** (-2 * i / 64) for i in range(32)]
    want = [
        f * (1 - min(max((i - 15) / 10, 0), 1)) + f / 16 * min(max((i - 15) / 10, 0), 1)
        for i, f in enumerate(plain)
    ]
    got = frequencies(64, 160000.0, V4_YARN)
    np.testing.assert_allclose(got, want, rtol=1e-15)
    np.testing.assert_array_equal(got[:16], plain[:16])
    np.testing.assert_allclose(got[25:], np.asarray(plain[25:]) / 16, rtol=1e-15)
    assert got[20] == pytest.approx(plain[20] * (0.5 + 0.5 / 16), rel=1e-15)


def test_without_scaling_frequencies_are_powers_of_the_base():
    np.testing.assert_allclose(frequencies(8, 10000.0), [1, 0.1, 0.01, 0.001], rtol=1e-15)


def test_a_factor_of_one_changes_nothing():
    scaling = swa.YarnScaling(factor=1.0)
    np.testing.assert_allclose(
        frequencies(64, 160000.0, scaling), frequencies(64, 160000.0), rtol=1e-15
    )


def test_a_ramp_of_no_width_is_a_step():
    # Pair 0 turns 15.9 times in 100 positions: both bounds are rounded to it.
    scaling = swa.YarnScaling(2.0, 100, beta_fast=16.5, beta_slow=15.95)
    np.testing.assert_allclose(
        frequencies(8, 10000.0, scaling), [1, 0.05, 0.005, 0.0005], rtol=1e-12
    )


def test_angles_are_right_up_to_the_last_position_of_a_million():
    turns = rotary_turns(64, 160000.0, V4_YARN)
    positions = np.array([0, 1, 127, 65_535, 65_536, 524_287, 1_048_575], np.int32)
    cos, sin = jax.jit(lambda p: rope_cos_sin(p, turns))(jnp.asarray(positions))
    two_pi = Fraction(31415926535897932384626433832795028841971693993751, 10**49) * 2
    for i, frequency in enumerate(frequencies(64, 160000.0, V4_YARN).tolist()):
        for n, position in enumerate(positions.tolist()):
            angle = float(Fraction(frequency) * position % two_pi)
            assert abs(float(cos[n, i]) - math.cos(angle)) <= 2e-7
            assert abs(float(sin[n, i]) - math.sin(angle)) <= 2e-7


def test_the_turns_cannot_be_written_to():
    with pytest.raises(ValueError, match="read-only"):
        rotary_turns(64, 160000.0, V4_YARN)[0, 0] = 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"factor": 0.5}, "factor: expected 1 or more, got 0.5"),
        ({"factor": math.inf}, "factor: expected a finite number above 0, got inf"),
        ({"factor": "16"}, "factor: expected a finite number above 0, got '16'"),
        ({"original_max_positions": 0}, "original_max_positions: expected a finite number above 0"),
        ({"original_max_positions": 1e5}, "original_max_positions: expected an integer"),
        ({"beta_fast": 1.0}, "beta_fast: expected more than beta_slow 1.0, got 1.0"),
        ({"beta_slow": True}, "beta_slow: expected a finite number above 0, got True"),
    ],
)
def test_a_scaling_that_cannot_be_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        swa.YarnScaling(**fields)
