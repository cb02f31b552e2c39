"""jit, vmap, grad and export of the public calls, and what makes them compile again."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import (
    activations,
    attention_config,
    decoder_config,
    decoder_params,
    largest_error,
    layer_params,
    quick_jit,
)

import swa_jax as swa
from pallas_kernels import ExtraKV, dispatch, indexed_attention
from swa_jax.exported import ExportedSlot

pytestmark = pytest.mark.quick_compilation

CONFIG = attention_config(3, swa.F32)
GEOMETRY = CONFIG.geometry
LAYER = swa.SlidingWindowAttention(CONFIG)


def random_cache(seed: int, slots: int = 4, layers: int = 1) -> swa.RingCache:
    """Rings of finite rows."""
    cache = swa.RingCache.create(slots, layers, GEOMETRY, CONFIG.fmt)
    values = np.random.default_rng(seed).normal(size=(slots, cache.blocks[0].shape[1] // 4))
    return swa.RingCache(
        (jnp.asarray(values.astype(np.float32).view(np.uint8)),), layers, GEOMETRY, CONFIG.fmt
    )


def stack(*trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


# --- vmap


def test_metadata_of_a_batch_of_calls_is_that_of_each():
    state_ids = np.int32([[0, 1], [2, 0], [3, 1]])
    positions = np.int32([[[0, 1], [5, -1]], [[8, 9], [-1, -1]], [[2, 3], [4, 5]]])
    decode = quick_jit(functools.partial(swa.DecodeMetadata.build, GEOMETRY))
    each = [decode(*one) for one in zip(state_ids, positions, strict=True)]
    chex.assert_trees_all_equal(jax.vmap(decode)(state_ids, positions), stack(*each))
    prefill = quick_jit(functools.partial(swa.PrefillMetadata.build, GEOMETRY, max_tokens=12))
    starts, lengths = np.int32([[0, 3], [9, 1], [0, 0]]), np.int32([[12, 1], [0, 3], [5, 11]])
    each = [prefill(*one) for one in zip(state_ids, starts, lengths, strict=True)]
    chex.assert_trees_all_equal(jax.vmap(prefill)(state_ids, starts, lengths), stack(*each))


@pytest.mark.parametrize("form", ["decode", "prefill"])
def test_a_batch_of_caches_is_each_of_them(form):
    params = layer_params(CONFIG)
    state_ids, starts = np.int32([[0, 1], [3, 2]]), np.int32([[4, 0], [13, 8]])

    def call(cache, x, state_ids, starts):
        if form == "decode":
            positions = starts[:, None] + jnp.arange(3, dtype=jnp.int32)[None]
            meta = swa.DecodeMetadata.build(GEOMETRY, state_ids, positions)
        else:
            lengths = jnp.full(2, 3)
            meta = swa.PrefillMetadata.build(GEOMETRY, state_ids, starts, lengths, max_tokens=3)
        y, rows = LAYER.apply(params, x, cache.layer(0), meta)
        return y, cache.with_layer(0, rows)

    x = jnp.asarray(activations(CONFIG, 2, 2, 3))
    caches = [random_cache(seed) for seed in range(2)]
    y, cache = quick_jit(jax.vmap(call))(stack(*caches), x, state_ids, starts)
    single = quick_jit(call)
    for i, one in enumerate(caches):
        want, after = single(one, x[i], state_ids[i], starts[i])
        assert largest_error(y[i], want) <= 3e-5
        got_rows, want_rows = (
            np.asarray(block).view(np.float32) for block in (cache.blocks[0][i], after.blocks[0])
        )
        assert largest_error(got_rows, want_rows) <= 3e-5


def test_slots_of_a_batch_of_caches_are_copied_exported_and_imported_in_each():
    caches = [random_cache(seed, layers=2) for seed in range(2)]
    src, dst = np.int32([[0, 1], [3, 2]]), np.int32([[2, -1], [0, 1]])
    copied = jax.vmap(swa.RingCache.copy_slots)(stack(*caches), src, dst)
    each = [cache.copy_slots(*one) for cache, *one in zip(caches, src, dst, strict=True)]
    chex.assert_trees_all_equal(copied, stack(*each))
    slots, positions = np.int32([1, 3]), np.int32([1, 30])
    exported = jax.vmap(swa.RingCache.export_slot)(stack(*caches), slots, positions)
    each = [cache.export_slot(*one) for cache, *one in zip(caches, slots, positions, strict=True)]
    chex.assert_trees_all_equal(exported, stack(*each))
    moved = jax.vmap(swa.RingCache.import_slot)(stack(*caches), np.int32([0, 2]), exported)
    each = [cache.import_slot(b, e) for cache, b, e in zip(caches, (0, 2), each, strict=True)]
    chex.assert_trees_all_equal(moved, stack(*each))


def test_per_example_gradients_are_those_of_each_example():
    params = layer_params(CONFIG)

    def loss(params, x):
        return jnp.sum(LAYER.apply(params, x[None]) ** 2)

    x = jnp.asarray(activations(CONFIG, 3, 5))
    gradients = quick_jit(jax.vmap(jax.grad(loss), in_axes=(None, 0)))(params, x)
    single = quick_jit(jax.grad(loss))
    each = stack(*[single(params, one) for one in x])
    chex.assert_trees_all_close(gradients, each, rtol=1e-4, atol=1e-5)


# --- grad through the cached forms: stored bytes carry none, all else does


@pytest.mark.parametrize("form", ["decode", "prefill"])
def test_gradients_of_queries_sinks_and_outputs_are_those_of_the_whole_sequence(form):
    params = layer_params(CONFIG)
    x, weights = (jnp.asarray(activations(CONFIG, 2, 7, seed=seed)) for seed in (0, 1))
    rows = swa.RingCache.create(2, 1, GEOMETRY, CONFIG.fmt).layer(0)
    if form == "decode":
        meta = swa.DecodeMetadata.build(GEOMETRY, [1, 0], np.tile(np.arange(7), (2, 1)))
    else:
        meta = swa.PrefillMetadata.build(GEOMETRY, [1, 0], [0, 0], [7, 7], max_tokens=7)

    def cached(params):
        return jnp.sum(LAYER.apply(params, x, rows, meta)[0] * weights)

    def whole(params):
        return jnp.sum(LAYER.apply(params, x) * weights)

    got = quick_jit(jax.grad(cached))(params)["params"]
    want = quick_jit(jax.grad(whole))(params)["params"]
    for name in ("q_a_norm", "q_b", "sinks", "o_a", "o_b"):
        assert largest_error(got[name], want[name]) <= 1e-5
    assert not np.any(got["kv_norm"])
    assert np.any(want["kv_norm"])


# --- export


@pytest.mark.donates
def test_a_saved_decode_step_is_the_step_and_updates_the_cache_in_place():
    attention = attention_config(3, swa.V41, dtype="bfloat16", param_dtype="bfloat16")
    config = decoder_config(attention, 2)
    model, params = swa.Decoder(config), decoder_params(config)

    def step(params, cache, tokens, meta):
        return model.apply(params, tokens, cache, meta)

    def arguments(start):
        positions = start + np.tile(np.arange(2), (2, 1))
        meta = swa.DecodeMetadata.build(config.geometry, [2, 0], positions)
        return np.int32([[3, 1], [4, 1]]) + start, meta

    cache = swa.RingCache.create(3, 2, config.geometry, config.fmt)
    exported = jax.export.export(
        jax.jit(step), platforms=["cpu", "cuda"], disabled_checks=dispatch.EXPORT_DISABLED_CHECKS
    )(params, cache, *arguments(0))
    saved = exported.serialize()
    assert b"swa_jax.RingCache" in saved
    assert b"pickle" not in saved
    again = jax.export.deserialize(saved).call
    for program in (step, again):
        traced = jax.jit(program).trace(params, cache, *arguments(0))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        for kernel in ("fused_store_kernel", "indexed_attention_kernel"):
            assert kernel in text
    reloaded = quick_jit(again, donate_argnums=1)
    direct = quick_jit(step, donate_argnums=1)
    memory = reloaded.lower(params, cache, *arguments(0)).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= cache.nbytes

    caches = [cache.snapshot(), cache.snapshot()]
    for start in (0, 2, 11):
        first, *_ = before = caches[0].blocks
        want, caches[1] = direct(params, caches[1], *arguments(start))
        got, caches[0] = reloaded(params, caches[0], *arguments(start))
        assert first.is_deleted(), before
        assert isinstance(caches[0], swa.RingCache)
        assert caches[0].geometry == config.geometry
        chex.assert_trees_all_equal(got, want)
        # Of copies: a buffer that NumPy looks at cannot be donated any more.
        chex.assert_trees_all_equal(caches[0].snapshot(), caches[1].snapshot())


def pytrees() -> tuple:
    """One of each that the library has."""
    cache = random_cache(0, layers=2)
    return (
        cache,
        cache.layer(1),
        cache.export_slot(1, 5),
        swa.DecodeMetadata.build(GEOMETRY, [1], [[3]]),
        swa.PrefillMetadata.build(GEOMETRY, [1], [3], [2], max_tokens=4),
        swa.SequenceMetadata.build(1, 2),
        ExtraKV(cache.layer(0), jnp.zeros((1, 2), jnp.int32)),
    )


def test_pytrees_are_values_that_nobody_changes():
    for value in pytrees():
        for field in dataclasses.fields(value):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(value, field.name, None)


def test_every_pytree_of_the_library_survives_a_saved_program():
    values = pytrees()
    exported = jax.export.export(jax.jit(lambda values: values))(values)
    again = jax.export.deserialize(exported.serialize())
    assert again.in_tree == exported.in_tree
    out = again.call(values)
    chex.assert_trees_all_equal(out, values)
    assert [type(value) for value in out] == [type(value) for value in values]
    assert (out[0].layers, out[0].geometry, out[0].fmt) == (2, GEOMETRY, CONFIG.fmt)
    assert isinstance(out[2], ExportedSlot)


# --- what compiles again


def test_positions_lengths_and_state_ids_do_not_compile_again():
    params, traces = layer_params(CONFIG), []

    @functools.partial(jax.jit, donate_argnames="rows")
    def decode(rows, x, state_ids, positions):
        traces.append("decode")
        meta = swa.DecodeMetadata.build(GEOMETRY, state_ids, positions)
        return LAYER.apply(params, x, rows, meta)

    @functools.partial(jax.jit, donate_argnames="rows")
    def prefill(rows, x, state_ids, starts, lengths):
        traces.append("prefill")
        meta = swa.PrefillMetadata.build(GEOMETRY, state_ids, starts, lengths, max_tokens=2)
        return LAYER.apply(params, x, rows, meta)

    rows = random_cache(0).layer(0)
    x = jnp.asarray(activations(CONFIG, 1, 2))
    for state_id, position, length in [(0, 0, 1), (3, 7, 2), (-1, 2**31 - 2, 2), (1, 100, 0)]:
        ids, starts = np.int32([state_id]), np.int32([position])
        places = np.where(np.arange(2) < length, position + np.arange(2), -1).astype(np.int32)
        _, rows = decode(rows, x, ids, places[None])
        _, rows = prefill(rows, x, ids, starts, np.int32([length]))
    assert sorted(traces) == ["decode", "prefill"]


def test_the_start_of_a_view_does_not_compile_again():
    cache, traces = random_cache(0, layers=3), []

    @jax.jit
    def read(rows, q, indices):
        traces.append(None)
        return indexed_attention(q, rows, indices)[0]

    q, indices = jnp.ones((1, 2, 64)), jnp.asarray([[0, 5]])
    outputs = [np.asarray(read(cache.layer(i), q, indices)) for i in range(3)]
    assert len(traces) == 1
    assert not np.array_equal(outputs[0], outputs[1])
    assert not np.array_equal(outputs[1], outputs[2])


def test_other_requests_of_a_step_that_takes_its_metadata_do_not_compile_again():
    params, traces = layer_params(CONFIG), []

    @jax.jit
    def step(rows, x, meta):
        traces.append(type(meta).__name__)
        return LAYER.apply(params, x, rows, meta)

    cache, x = random_cache(0, layers=2), jnp.asarray(activations(CONFIG, 1, 2))
    for layer, state_id, position in [(0, 0, 0), (1, 3, 40)]:
        meta = swa.DecodeMetadata.build(GEOMETRY, [state_id], [[position, position + 1]])
        step(cache.layer(layer), x, meta)
        meta = swa.PrefillMetadata.build(GEOMETRY, [state_id], [position], [layer], max_tokens=2)
        step(cache.layer(layer), x, meta)
    assert sorted(traces) == ["DecodeMetadata", "PrefillMetadata"]
