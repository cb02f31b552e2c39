"""Programs that may use 64 bits: states and results keep their dtypes, whatever numbers come in."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import attention_config, decoder_config, decoder_params, layer_params

import swa_jax as swa
from swa_jax import beams, best_of_n, decoding, prefilling, speculation
from swa_jax.attention import attention_layer

pytestmark = pytest.mark.quick_compilation

CONFIG = decoder_config(attention_config(3, swa.V41), num_layers=1)
MODEL = swa.Decoder(CONFIG)
PARAMS = decoder_params(CONFIG)
BATCH, K = 2, 3
IDS = jnp.arange(BATCH, dtype=jnp.int32)
LAST = jnp.zeros((BATCH, CONFIG.hidden_size), jnp.float32)
DRAFTER = swa.NGramDrafter(longest=3, shortest=2, history=8)


def cache() -> swa.RingCache:
    return swa.RingCache.create(BATCH, 1, CONFIG.geometry, CONFIG.fmt)


def state() -> decoding.DecodeState:
    return decoding.DecodeState(
        cache(), IDS, IDS, IDS, IDS, IDS, IDS, IDS[:, None], swa.Sampling.build(BATCH)
    )


def memory() -> jax.Array:
    return jnp.zeros((BATCH, DRAFTER.history), jnp.int32)


def speculate(both):
    found = speculation.speculate_block(
        MODEL, PARAMS, both[0], DRAFTER, {}, both[1], steps=2, draft_tokens=K
    )
    assert {leaf.dtype.name for leaf in jax.tree.leaves(found[2:])} == {"int32"}
    return found[:2]


def begin(cache):
    return decoding._begin(
        MODEL, PARAMS, cache, LAST, IDS, IDS, IDS, IDS, IDS[:, None], swa.Sampling.build(BATCH)
    )


def prefill(both):
    tokens = jnp.zeros((BATCH, 4), jnp.int32)
    return prefilling.prefill_chunk(MODEL, PARAMS, *both, IDS, tokens, IDS, IDS)


def beam_state(cache):
    alpha, stops = jnp.float32(1), IDS
    return beams._begin_beams(MODEL, PARAMS, cache, LAST[:1], IDS[0], alpha, stops, BATCH, 4)


def samples(cache):
    settings = swa.Sampling.build(BATCH)
    return best_of_n._begin_samples(MODEL, PARAMS, cache, LAST[:1], IDS[0], IDS, settings)[0]


# Each loop with what it starts from; it ends with a state of the same types.
LOOPS = {
    "prefill": (prefill, lambda: (cache(), LAST)),
    "decode": (
        lambda state: decoding.decode_block(MODEL, PARAMS, state, 2)[0],
        lambda: begin(cache()),
    ),
    "speculate": (speculate, lambda: (state(), memory())),
    "beams": (lambda s: beams.beam_block(MODEL, PARAMS, s, 2), lambda: beam_state(cache())),
    "samples": (
        lambda s: best_of_n._sample_block(MODEL, PARAMS, s, IDS, swa.Sampling.build(BATCH), 2)[0],
        lambda: samples(cache()),
    ),
}


def types(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), tree)


@pytest.mark.parametrize("name", LOOPS)
def test_a_block_of_steps_keeps_the_types_of_its_state(name):
    loop, start = LOOPS[name]
    usual = types(jax.eval_shape(start))
    with jax.enable_x64(True):
        first = jax.eval_shape(start)
        assert types(first) == usual
        assert types(jax.eval_shape(loop, first)) == usual


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["decode", "prefill", "sequence"])
def test_a_layer_computes_in_its_own_dtype(form, dtype):
    config = dataclasses.replace(CONFIG.layers[0], dtype=dtype)
    params = layer_params(config)["params"]
    shape = BATCH, 2

    def call(x):
        meta = {
            "decode": lambda: swa.DecodeMetadata.build(config.geometry, IDS, positions),
            "prefill": lambda: swa.PrefillMetadata.build(
                config.geometry, IDS, IDS, IDS, max_tokens=2
            ),
            "sequence": lambda: swa.SequenceMetadata.build(*shape),
        }[form]()
        rows = None if form == "sequence" else cache().layer(0)
        y, rows = attention_layer(params, x, rows, meta, config)
        return y, meta, rows

    with jax.enable_x64(True):
        positions = jnp.asarray([[3, 4], [0, -1]])
        for given in (jnp.float32, jnp.float64):
            y, meta, rows = jax.eval_shape(call, jnp.ones((*shape, config.hidden_size), given))
            assert y.dtype == dtype
            assert {leaf.dtype.name for leaf in jax.tree.leaves(meta)} == {"int32"}
            assert {leaf.dtype.name for leaf in jax.tree.leaves(rows)} <= {"uint8", "int32"}


INTEGERS = [int, np.int64, np.int32, np.uint8, lambda value: jnp.asarray(value, jnp.int64)]
FLOATS = [float, np.float64, np.float32, jnp.float64, jnp.float32]


def test_numbers_of_any_kind_give_one_program():
    traces = []

    @jax.jit
    def step(decode, prefill, sampling, copied):
        traces.append(None)
        return decode.indices, prefill.slots, sampling.temperature, copied.blocks

    with jax.enable_x64(True):
        for integer, number in zip(INTEGERS, FLOATS, strict=True):
            ids, places = [integer(1)], [integer(5)]
            geometry = CONFIG.geometry
            found = step(
                swa.DecodeMetadata.build(geometry, ids, [places]),
                swa.PrefillMetadata.build(geometry, ids, places, [integer(2)], max_tokens=4),
                swa.Sampling.build(1, temperature=number(0.5), top_k=integer(3)),
                cache().copy_slots([integer(0)], ids),
            )
            assert {leaf.dtype.name for leaf in jax.tree.leaves(found)} == {
                "int32",
                "float32",
                "uint8",
            }
    assert len(traces) == 1
