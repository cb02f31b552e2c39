"""Samplers: the best token, the softmax's frequencies, the masks, and noise by key and position."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import swa_jax as swa
from swa_jax.sampling import allowed_tokens, perturbed_scores, request_keys, sample

ROWS, VOCABULARY = 4, 8
DRAWS = 20_000
CHI_SQUARE_LIMIT = 29.88  # of 7 degrees of freedom: exceeded by right frequencies 1 time in 10,000

draw = jax.jit(sample)
masks = jax.jit(allowed_tokens)
scored = jax.jit(perturbed_scores)


def keys(seed: int, count: int = ROWS):
    return request_keys(jax.random.key(seed), count)


def random_logits(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def reference_mask(logits, temperature, top_k, top_p) -> tuple[np.ndarray, np.ndarray]:
    """The allowed tokens of one row, and which of them hang on the last digit of a sum."""
    heat = float(temperature) if temperature > 0 else 1.0
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    values = np.array([float(logits[token]) for token in order]) / heat
    share = np.exp(values - values[0])
    share /= share.sum()
    keep, doubtful = np.zeros(len(logits), bool), np.zeros(len(logits), bool)
    mass = 0.0
    for rank, token in enumerate(order):
        within_k = top_k == 0 or rank < top_k
        keep[token] = rank == 0 or (within_k and (top_p == 1 or mass < top_p))
        doubtful[token] = rank > 0 and within_k and top_p < 1 and abs(mass - top_p) < 1e-5
        mass += share[rank]
    return keep, doubtful


def chi_square(tokens: np.ndarray, probability: np.ndarray) -> float:
    counts = np.bincount(tokens, minlength=len(probability))
    expected = probability * len(tokens)
    return float(np.sum((counts - expected) ** 2 / expected))


# --- temperature


@pytest.mark.parametrize("settings", [{}, {"top_k": 3}])
def test_a_request_gets_the_same_token_beside_greedy_ones_and_alone(settings):
    logits, positions = random_logits(5, ROWS, VOCABULARY), np.arange(ROWS, dtype=np.int32)
    temperature = np.asarray([0, 2, 0, 2], np.float32)
    drawn = set()
    for seed in range(8):
        mixed = swa.Sampling.build(ROWS, temperature=temperature, keys=keys(seed), **settings)
        together = np.asarray(draw(logits, positions, mixed))
        for row in range(ROWS):
            alone = swa.Sampling.build(
                1, temperature=float(temperature[row]), keys=keys(seed)[row : row + 1], **settings
            )
            own = draw(logits[row : row + 1], positions[row : row + 1], alone)
            assert together[row] == own[0], (seed, row)
        assert (together[[0, 2]] == logits[[0, 2]].argmax(axis=1)).all()
        drawn.update(together[[1, 3]] == logits[[1, 3]].argmax(axis=1))
    assert drawn == {True, False}  # the others are drawn, and not always the best


def test_temperature_zero_takes_the_best_token_and_of_equal_ones_the_first():
    logits = np.full((ROWS, VOCABULARY), -10, np.float32)
    logits[:, :3] = [[1, 3, 2], [5, 5, 0], [-9, -8, -7], [-10, -10, -10]]
    positions = np.arange(ROWS, dtype=np.int32)
    for dtype in (jnp.float32, jnp.bfloat16):
        got = draw(logits.astype(dtype), positions, swa.Sampling.build(ROWS, keys=keys(0)))
        assert got.dtype == jnp.int32
        np.testing.assert_array_equal(got, [1, 0, 2, 0])


@pytest.mark.parametrize("temperature", [1e-3, 2e-38, 1e-40])
def test_a_tiny_temperature_takes_the_best_token(temperature):
    row = np.array([3, 70, 90, 80, 0, 0, 0, 0], np.float32)
    logits, positions = np.broadcast_to(row, (ROWS, VOCABULARY)), np.arange(ROWS, dtype=np.int32)
    for top_p in (1.0, 0.9):
        request = swa.Sampling.build(ROWS, temperature=temperature, top_p=top_p, keys=keys(0))
        np.testing.assert_array_equal(draw(logits, positions, request), 2)


@pytest.mark.parametrize("one_key", [False, True], ids=["by_key", "by_position"])
def test_tokens_come_as_often_as_the_softmax_says(one_key):
    temperature = 0.7
    row = random_logits(1, VOCABULARY)
    logits = np.broadcast_to(row, (DRAWS, VOCABULARY))
    request = keys(2, DRAWS)
    positions = np.zeros(DRAWS, np.int32)
    if one_key:
        request, positions = (
            jnp.broadcast_to(request[0], (DRAWS,)),
            np.arange(DRAWS, dtype=np.int32),
        )
    tokens = np.asarray(
        draw(logits, positions, swa.Sampling.build(DRAWS, temperature=temperature, keys=request))
    )
    mass = np.exp(row.astype(np.float64) / temperature)
    assert chi_square(tokens, mass / mass.sum()) <= CHI_SQUARE_LIMIT
    other = np.exp(row.astype(np.float64) / (temperature * 1.1))
    assert chi_square(tokens, other / other.sum()) > CHI_SQUARE_LIMIT, "a tenth off must show"


def test_masked_tokens_never_come_and_the_others_as_often_as_their_share_says():
    row = np.log(np.array([0.4, 0.05, 0.2, 0.1, 0.15, 0.02, 0.05, 0.03], np.float32))
    logits = np.broadcast_to(row, (DRAWS, VOCABULARY))
    request = swa.Sampling.build(DRAWS, temperature=1.0, top_k=3, keys=keys(3, DRAWS))
    tokens = np.asarray(draw(logits, np.zeros(DRAWS, np.int32), request))
    counts = np.bincount(tokens, minlength=VOCABULARY)
    share = np.array([0.4, 0.2, 0.15]) / 0.75
    assert counts.sum() == counts[[0, 2, 4]].sum()
    expected = share * DRAWS
    statistic = np.sum((counts[[0, 2, 4]] - expected) ** 2 / expected)
    assert statistic <= 18.42  # of 2 degrees of freedom, 1 time in 10,000


# --- masks


@given(
    seed=st.integers(0, 2**32 - 1),
    steps=st.sampled_from([2, 1000]),  # two steps: nearly all scores are equal to some other
    temperature=st.lists(st.sampled_from([0.0, 0.3, 1.0, 5.0]), min_size=ROWS, max_size=ROWS),
    top_k=st.lists(st.integers(0, VOCABULARY + 3), min_size=ROWS, max_size=ROWS),
    top_p=st.lists(
        st.sampled_from([1e-30, 0.1, 0.5, 0.9, 0.999999, 1.0]), min_size=ROWS, max_size=ROWS
    ),
)
def test_masks_are_those_of_a_plain_reference(seed, steps, temperature, top_k, top_p):
    rng = np.random.default_rng(seed)
    spread = rng.choice([0.1, 1.0, 30.0])
    logits = (rng.integers(-steps, steps, (ROWS, VOCABULARY)) / steps * spread).astype(np.float32)
    request = swa.Sampling.build(ROWS, temperature=temperature, top_k=top_k, top_p=top_p)
    got = np.asarray(masks(logits, request))
    for i in range(ROWS):
        p = float(request.top_p[i])
        want, doubtful = reference_mask(logits[i], temperature[i], top_k[i], p)
        np.testing.assert_array_equal(got[i] | doubtful, want | doubtful)
        assert got[i, np.argmax(logits[i])], "the best token always stays"


@pytest.mark.parametrize(
    ("top_k", "top_p", "want"),
    [
        (0, 1.0, [1, 1, 1, 1, 1, 1, 1, 1]),
        (1, 1.0, [0, 0, 1, 0, 0, 0, 0, 0]),
        (3, 1.0, [0, 1, 1, 0, 1, 0, 0, 0]),  # 1, 4 and 6 are equal: the first two of them
        (8, 1.0, [1, 1, 1, 1, 1, 1, 1, 1]),
        (2**31 - 1, 1.0, [1, 1, 1, 1, 1, 1, 1, 1]),
        (0, 1e-30, [0, 0, 1, 0, 0, 0, 0, 0]),
        (0, 0.49, [0, 0, 1, 0, 0, 0, 0, 0]),
        (0, 0.51, [0, 1, 1, 0, 0, 0, 0, 0]),
        (0, 0.74, [0, 1, 1, 0, 1, 0, 0, 0]),
        (2, 0.74, [0, 1, 1, 0, 0, 0, 0, 0]),
        (5, 0.51, [0, 1, 1, 0, 0, 0, 0, 0]),
    ],
)
def test_masks_by_hand(top_k, top_p, want):
    share = np.array([1, 4, 16, 1, 4, 1, 4, 1], np.float32) / 32
    logits = np.broadcast_to(np.log(share), (ROWS, VOCABULARY))
    got = masks(logits, swa.Sampling.build(ROWS, temperature=1.0, top_k=top_k, top_p=top_p))
    np.testing.assert_array_equal(got, np.broadcast_to(np.array(want, bool), got.shape))


def test_top_p_counts_probabilities_at_the_requests_temperature():
    share = np.array([16, 8, 2, 2, 1, 1, 1, 1], np.float32) / 32
    logits = np.broadcast_to(np.log(share), (ROWS, VOCABULARY))
    # 0.5, 0.25, ...; at temperature 2: 0.29, 0.21, 0.10, 0.10, 0.07, ...
    request = swa.Sampling.build(ROWS, temperature=[1.0, 2.0, 1.0, 2.0], top_p=0.65)
    want = np.array([[1, 1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0]] * 2)
    np.testing.assert_array_equal(masks(logits, request), want)


def test_a_request_without_limits_keeps_every_token_beside_one_with_limits():
    logits = np.zeros((ROWS, VOCABULARY), np.float32)
    logits[0, 3] = 40  # in float32 the others' probabilities vanish beside it
    request = swa.Sampling.build(ROWS, temperature=1.0, top_p=[1.0, 0.4, 1.0, 1.0])
    want = np.ones((ROWS, VOCABULARY), bool)
    want[1, 4:] = False
    np.testing.assert_array_equal(masks(logits, request), want)


# --- noise


def test_noise_depends_on_key_and_position_only():
    logits = random_logits(4, ROWS, VOCABULARY)
    positions = np.array([7, 0, 7, 123_456], np.int32)
    heat = np.array([0.5, 1.0, 1.5, 0.9], np.float32)
    request = keys(5)
    batch = swa.Sampling.build(ROWS, temperature=heat, top_k=[0, 5, 2, 0], keys=request)
    scores = np.asarray(scored(logits, positions, batch))
    tokens = np.asarray(draw(logits, positions, batch))
    for i in range(ROWS):
        one = jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], batch)
        np.testing.assert_array_equal(scored(logits[[i]], positions[[i]], one)[0], scores[i])
        assert draw(logits[[i]], positions[[i]], one).tolist() == [tokens[i]]
    order = np.array([2, 0, 3, 1])
    moved = jax.tree.map(lambda leaf: leaf[order], batch)
    np.testing.assert_array_equal(draw(logits[order], positions[order], moved), tokens[order])


@pytest.mark.parametrize("change", ["key", "position"])
def test_another_key_or_position_is_other_noise(change):
    logits = np.zeros((ROWS, VOCABULARY), np.float32)
    positions = np.arange(ROWS, dtype=np.int32)
    request = swa.Sampling.build(ROWS, temperature=1.0, keys=keys(6))
    scores = np.asarray(scored(logits, positions, request))
    if change == "key":
        request = swa.Sampling.build(ROWS, temperature=1.0, keys=keys(7))
    else:
        positions = positions + np.int32(ROWS)
    assert not np.any(np.asarray(scored(logits, positions, request)) == scores)
    assert len(np.unique(scores)) == scores.size, "rows share no noise either"
    request = dataclasses.replace(request, keys=request.keys[jnp.zeros(ROWS, jnp.int32)])
    scores = np.asarray(scored(logits, positions, request))
    assert len(np.unique(scores)) == scores.size, "nor do positions of one key"


def test_scores_are_the_logits_at_temperature_zero_and_their_differences_above():
    logits = random_logits(8, ROWS, VOCABULARY)
    positions = np.arange(ROWS, dtype=np.int32)
    cold = swa.Sampling.build(ROWS, keys=keys(9))
    np.testing.assert_array_equal(scored(logits, positions, cold), logits)
    warm = swa.Sampling.build(ROWS, temperature=0.5, keys=keys(9))
    noise = np.asarray(scored(np.zeros_like(logits), positions, warm))
    raised = np.asarray(scored(logits, positions, warm)) - noise
    np.testing.assert_allclose(raised - raised[:, :1], (logits - logits[:, :1]) * 2, atol=1e-5)


def test_the_keys_of_the_first_requests_do_not_depend_on_how_many_there_are():
    data = [jax.random.key_data(keys(10, count)) for count in (1, 3, 7)]
    np.testing.assert_array_equal(data[0], data[2][:1])
    np.testing.assert_array_equal(data[1], data[2][:3])
    assert len(np.unique(np.asarray(data[2]), axis=0)) == 7


def test_keys_are_given_and_by_default_those_of_key_zero():
    default = swa.Sampling.build(3, temperature=1.0).keys
    np.testing.assert_array_equal(
        jax.random.key_data(default), jax.random.key_data(request_keys(jax.random.key(0), 3))
    )
    given_keys = keys(11, 3)
    assert swa.Sampling.build(3, temperature=1.0, keys=given_keys).keys is given_keys


def test_settings_may_be_traced():
    def run(temperature, top_k, top_p, request):
        built = swa.Sampling.build(
            ROWS, temperature=temperature, top_k=top_k, top_p=top_p, keys=request
        )
        return draw(logits, positions, built)

    logits = random_logits(12, ROWS, VOCABULARY)
    positions = np.arange(ROWS, dtype=np.int32)
    want = run(np.float32(0.8), np.int32(3), np.float32(0.9), keys(13))
    got = jax.jit(run)(jnp.float32(0.8), jnp.int32(3), jnp.float32(0.9), keys(13))
    np.testing.assert_array_equal(got, want)


# --- refusals


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", -0.1, "temperature: expected numbers from 0 to inf, got -0.1"),
        ("temperature", float("nan"), "temperature: expected numbers from 0 to inf, got nan"),
        ("temperature", [0.5, -1.0], r"temperature: expected numbers .* got \[0.5, -1.0\]"),
        ("temperature", True, "temperature: expected numbers .* got True"),
        ("temperature", "warm", "temperature: expected numbers .* got warm"),
        ("temperature", [1.0, 1.0, 1.0], r"temperature: expected shape \(2\), got \(3,\)"),
        ("temperature", [[1.0, 1.0]], r"temperature: expected shape \(2\), got \(1, 2\)"),
        ("temperature", [[1.0], [2.0, 3.0]], r"temperature: expected values of one shape, got \["),
        ("top_p", [1.0, [1.0]], "top_p: expected values of one shape"),
        ("top_k", [[1], [2, 3]], r"top_k: expected values of one shape, got \[\[1\], \[2, 3\]\]"),
        ("top_p", 0.0, "top_p: expected numbers from .* to 1, got 0"),
        ("top_p", 1.0001, "top_p: expected numbers from .* to 1, got 1.0001"),
        ("top_p", float("nan"), "top_p: expected numbers from .* to 1, got nan"),
        ("top_p", [1.0], r"top_p: expected shape \(2\), got \(1,\)"),
        ("top_k", -1, r"top_k: expected 0 or more, got \[-1, -1\]"),
        ("top_k", 2.0, "top_k: expected integers, got dtype float"),
        ("top_k", 2**31, "top_k: expected int32 values, got 2147483648"),
        ("top_k", [1, 2, 3], r"top_k: expected shape \(2\), got \(3,\)"),
    ],
)
def test_settings_out_of_range_are_refused(name, value, message):
    with pytest.raises(ValueError, match=message):
        swa.Sampling.build(2, **{name: value})


@pytest.mark.parametrize("batch", [-1, 0, 1.0])
def test_a_number_of_requests_that_cannot_be_is_refused(batch):
    with pytest.raises(ValueError, match=f"batch: expected an integer of 1 or more, got {batch}"):
        swa.Sampling.build(batch)


@pytest.mark.parametrize(
    ("bad", "got"),
    [
        (lambda: jax.random.key_data(keys(0, 2)), r"uint32\(2, 2\)"),
        (lambda: keys(0, 3), r"key<fry>\(3,\)"),
        (lambda: jax.random.key(0), r"key<fry>\(\)"),
        (lambda: np.array([1, 2]), r"int64\(2,\)"),
        (lambda: [jax.random.key(0), jax.random.key(1)], "list"),
    ],
    ids=["raw", "too_many", "scalar", "integers", "list"],
)
def test_anything_but_one_typed_key_for_each_request_is_refused(bad, got):
    with pytest.raises(ValueError, match=f"keys: expected 2 keys of jax.random.key.* got {got}"):
        swa.Sampling.build(2, temperature=1.0, keys=bad())
