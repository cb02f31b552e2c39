"""The attention of consecutive queries: in groups as all at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swa_jax import band

pytestmark = [pytest.mark.quick_compilation, pytest.mark.makes_nan]

WINDOW, HEADS, WIDTH = 8, 2, 16
BLOCK = 16  # of queries, for such a window
SCORES = HEADS * BLOCK * 2 * BLOCK  # of a block


def attend(queries, rows, segments):
    return band.window_attention(
        *queries,
        rows,
        segments,
        window=WINDOW,
        sink=jnp.zeros(HEADS, jnp.float32),
        scale=jnp.float32(0.25),
    )


def inputs(batch, tokens):
    """Queries, rows and segments: two sequences, rows that nobody sees, and a row that is NaN."""
    random = np.random.default_rng(0)
    count = WINDOW - 1 + tokens
    q = random.normal(size=(batch, tokens, HEADS, WIDTH)).astype(np.float32)
    rows = random.normal(size=(batch, count, WIDTH)).astype(np.float32)
    rows[:, BLOCK + 3] = np.nan
    segments = np.broadcast_to(np.arange(count) // (count // 2), (batch, count)).astype(np.int32)
    segments = np.where(np.arange(count) % 11 == 5, -1, segments)
    return (jnp.asarray(q),), jnp.asarray(rows), jnp.asarray(segments)


def in_groups(function=attend):
    return functools.partial(band.in_groups, function, window=WINDOW, heads=HEADS)


# The groups divide 64 tokens; of 70 the last one is not full.
@pytest.mark.parametrize(("tokens", "fit"), [(64, 1), (70, 3)])
@pytest.mark.parametrize("batch", [1, 2])
def test_queries_in_groups_see_what_they_see_all_at_once(monkeypatch, batch, tokens, fit):
    monkeypatch.setattr(band, "_GROUP_SCORES", fit * batch * SCORES)
    arguments = inputs(batch, tokens)
    got, want = (jax.jit(function)(*arguments) for function in (in_groups(), attend))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert np.isnan(want[0]).any()


def test_gradients_in_groups_are_those_of_all_at_once(monkeypatch):
    monkeypatch.setattr(band, "_GROUP_SCORES", SCORES)
    (q,), rows, segments = inputs(1, 64)
    rows = jnp.nan_to_num(rows)

    def loss(function, q, rows):
        out, _ = function((q,), rows, segments)
        return jnp.sum(jnp.sin(out))

    gradient = jax.grad(loss, argnums=(1, 2))
    got, want = (jax.jit(gradient, static_argnums=0)(f, q, rows) for f in (in_groups(), attend))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        assert np.abs(other).max() > 0.01


# Blocks that fit into a group, and the groups. As many more as divide the blocks are made, but not
# twice as many: of 5 or 11 blocks the last group is padded.
@pytest.mark.parametrize(
    ("tokens", "fit", "group"),
    [(64, 4, 64), (64, 3, 32), (64, 1, 16), (80, 3, 48), (144, 4, 48), (176, 4, 64), (70, 4, 48)],
)
def test_groups_are_of_one_size_and_padded_only_where_none_divides(monkeypatch, tokens, fit, group):
    monkeypatch.setattr(band, "_GROUP_SCORES", fit * SCORES)
    seen = set()

    def function(queries, rows, segments):
        seen.add((queries[0].shape[1], rows.shape[1] - (WINDOW - 1), segments.shape[1]))
        return queries[0]

    out = jax.eval_shape(in_groups(function), *inputs(1, tokens))
    assert seen == {(group, group, group + WINDOW - 1)}
    assert out.shape == (1, tokens, HEADS, WIDTH)
