"""Attention of several tokens over a ring: each query as if it read its window by index."""

import jax.numpy as jnp
import numpy as np
import pytest
from small_models import attention_config, largest_error, quick_jit

import swa_jax as swa
from pallas_kernels import quantize_rows, store_rows, transforms
from swa_jax import verify
from swa_jax.heads import attend_indexed
from swa_jax.verify import verify_attention

WINDOW = 16
CONFIG = attention_config(WINDOW, swa.V41)


def run(attend, q, rows, meta, sinks):
    rotation = transforms.rope_cos_sin(meta.positions, CONFIG.turns)
    return np.asarray(attend(q, rows, meta, sinks, rotation))


@quick_jit
def by_band(q, rows, meta, sinks, rotation):
    return verify_attention(q, rows, meta, sinks, rotation, CONFIG, "xla")


@quick_jit
def by_index(q, rows, meta, sinks, rotation):
    return attend_indexed(q, rotation, rows, meta.indices, sinks, None, CONFIG, "xla")


# The last in blocks, as many tokens are.
@pytest.mark.parametrize(("batch", "tokens", "in_one_piece"), [(8, 3, 64), (17, 6, 64), (7, 5, 4)])
def test_every_query_sees_its_own_window_however_many(batch, tokens, in_one_piece, monkeypatch):
    monkeypatch.setattr(verify, "_TOKENS", in_one_piece)
    geometry, rng = CONFIG.geometry, np.random.default_rng(batch)
    starts = rng.integers(0, 5 * WINDOW, batch)
    starts[0] = 0  # nothing stored before
    lengths = rng.integers(0, tokens + 1, batch)
    lengths[0] = tokens
    column = np.arange(tokens)
    positions = np.where(column < lengths[:, None], starts[:, None] + column, -1).astype(np.int32)
    state_ids = rng.permutation(batch).astype(np.int32)
    meta = swa.DecodeMetadata.build(geometry, state_ids, positions)

    rows = swa.RingCache.create(batch, 1, geometry, CONFIG.fmt).layer(0)
    values = rng.normal(size=(rows.num_rows, CONFIG.head_dim)).astype(np.float32)
    data = np.array(quantize_rows(values, CONFIG.fmt))
    seen = np.zeros(rows.num_rows, bool)
    indices = np.asarray(meta.indices)
    seen[indices[indices >= 0]] = True
    data[~seen] = 0xFF
    rows = store_rows(rows, data, np.arange(rows.num_rows, dtype=np.int32))

    q = rng.normal(size=(batch, tokens, CONFIG.num_heads, CONFIG.head_dim)).astype(np.float32)
    sinks = jnp.asarray(rng.normal(size=CONFIG.num_heads), jnp.float32)
    got, want = (run(attend, q, rows, meta, sinks) for attend in (by_band, by_index))
    assert np.isfinite(got).all()
    assert np.abs(want).max() > 0
    assert largest_error(got, want) < 3e-6
    assert not got[positions < 0].any()
    assert np.all(np.abs(got[positions >= 0]).max(axis=(1, 2)) > 0)


@pytest.mark.makes_nan
def test_a_row_that_is_nan_reaches_exactly_the_queries_that_see_it():
    batch, tokens, geometry, rng = 8, 3, CONFIG.geometry, np.random.default_rng(3)
    positions = (2 * WINDOW + np.arange(tokens, dtype=np.int32))[None].repeat(batch, axis=0)
    meta = swa.DecodeMetadata.build(geometry, np.arange(batch, dtype=np.int32), positions)
    rows = swa.RingCache.create(batch, 1, geometry, CONFIG.fmt).layer(0)
    values = rng.normal(size=(rows.num_rows, CONFIG.head_dim)).astype(np.float32)
    data = np.array(quantize_rows(values, CONFIG.fmt))
    # The oldest row of the first query's window leaves the window of the second.
    oldest = (2 * WINDOW - (WINDOW - 1)) % geometry.capacity
    data[5 * geometry.capacity + oldest] = 0xFF
    rows = store_rows(rows, data, np.arange(rows.num_rows, dtype=np.int32))
    q = rng.normal(size=(batch, tokens, CONFIG.num_heads, CONFIG.head_dim)).astype(np.float32)
    got = run(by_band, q, rows, meta, jnp.zeros(CONFIG.num_heads))
    nan = np.isnan(got).any(axis=(2, 3))
    assert np.argwhere(nan).tolist() == [[5, 0]]


@pytest.mark.parametrize("byte", [0xFF, 0xFE, 0x7E])  # NaN, and infinities: 448 * 2**127 is one
def test_no_byte_of_a_free_row_matters(byte):
    batch, tokens, geometry, rng = 8, 3, CONFIG.geometry, np.random.default_rng(4)
    positions = np.full((batch, tokens), -1, np.int32)
    positions[:4] = np.arange(tokens)  # slots 4 to 7: row 0 is free, and stands in for none
    meta = swa.DecodeMetadata.build(geometry, np.arange(batch, dtype=np.int32)[::-1], positions)
    rows = swa.RingCache.create(batch, 1, geometry, CONFIG.fmt).layer(0)
    values = rng.normal(size=(rows.num_rows, CONFIG.head_dim)).astype(np.float32)
    data = np.array(quantize_rows(values, CONFIG.fmt))
    q = rng.normal(size=(batch, tokens, CONFIG.num_heads, CONFIG.head_dim)).astype(np.float32)
    sinks, every = jnp.zeros(CONFIG.num_heads), np.arange(rows.num_rows, dtype=np.int32)
    found = []
    for free in (0, byte):
        data[np.setdiff1d(every, np.asarray(meta.slots))] = free
        found.append(run(by_band, q, store_rows(rows, data, every), meta, sinks))
    np.testing.assert_array_equal(found[1], found[0])
    assert np.all(np.abs(found[0][:4]).max(axis=(2, 3)) > 0)
