"""What test_several_devices.py compares, computed on eight virtual CPU devices; prints JSON.

A process has the devices it starts with, so these programs cannot run in the tests' own.
"""

import dataclasses
import json
import re
import sys
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
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
from swa_jax import decoding, placement
from swa_jax.collectives import carrying_rows, find_collectives
from swa_jax.parameter_sharding import parameter_shardings

WINDOW = 16
ATTENTION = attention_config(WINDOW, swa.V41, num_heads=4, o_groups=4)
ROWS, ROW_BYTES = 22, 66


def sharding(data: int, heads: int) -> NamedSharding:
    devices = np.array(jax.devices()[: data * heads]).reshape(data, heads)
    return NamedSharding(Mesh(devices, ("data", "tensor")), PartitionSpec("data"))


def create(config: swa.DecoderConfig, slots: int, where: NamedSharding | None) -> swa.RingCache:
    return swa.RingCache.create(slots, config.num_layers, config.geometry, config.fmt, where)


def place(config: swa.DecoderConfig, where: NamedSharding | None) -> Any:
    params = decoder_params(config)
    if where is None:
        return params
    return jax.device_put(params, parameter_shardings(swa.Decoder(config), where))


def positions(starts: Any, tokens: int) -> Any:
    starts = jnp.asarray(starts, jnp.int32)[:, None]
    steps = starts + jnp.arange(tokens, dtype=jnp.int32)[None]
    return jnp.where(starts >= 0, steps, -1)


# --- S02: the compiled step


def decode_step(config: swa.DecoderConfig):
    model = swa.Decoder(config)

    def step(cache, params, tokens, state_ids, places):
        meta = swa.DecodeMetadata.build(config.geometry, state_ids, places)
        hidden, cache = model.apply(params, tokens, cache, meta)
        return cache, hidden

    return step


def prefill_step(config: swa.DecoderConfig):
    model = swa.Decoder(config)

    def step(cache, params, tokens, state_ids, places):
        meta = swa.PrefillMetadata.build(
            config.geometry,
            state_ids,
            places[:, 0],
            jnp.sum(places >= 0, axis=1, dtype=jnp.int32),
            max_tokens=tokens.shape[1],
        )
        hidden, cache = model.apply(params, tokens, cache, meta)
        return cache, hidden

    return step


def step_figures(step, cache, *arguments, activation: int) -> dict:
    """What a step that donates the cache, its first argument and result, does with it."""
    compiled = jax.jit(step, donate_argnums=0).lower(cache, *arguments).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    block = cache.blocks[0].sharding.shard_shape(cache.blocks[0].shape)
    copy = re.compile(rf"= .*u8\[{block[0]},{block[1]}\].* copy(-start)?\(")
    found = find_collectives(text)
    [out] = compiled.output_shardings[0].blocks
    return {
        "collectives": [[one.kind, one.shapes] for one in found],
        "carrying_rows": len(carrying_rows(found, activation)),
        "cache_per_device": cache.memory.bytes_per_device,
        "aliased": memory.alias_size_in_bytes,
        "copies": len([line for line in text.splitlines() if copy.search(line)]),
        "keeps_sharding": out.is_equivalent_to(cache.blocks[0].sharding, 2),
    }


def compiled_step(kind: str, data: int, heads: int, tokens: int, scan_layers=False) -> dict:
    """64 slots, 8 requests, 2 layers."""
    config = decoder_config(ATTENTION, 2, scan_layers=scan_layers)
    where = sharding(data, heads)
    cache, batch = create(config, 64, where), 8
    step = (prefill_step if kind == "prefill" else decode_step)(config)
    arguments = (
        place(config, where),
        np.zeros((batch, tokens), np.int32),
        placement.first_state_ids(where, 64, batch),
        positions(np.zeros(batch), tokens),
    )
    activation = batch // data * tokens * config.hidden_size * 4
    return step_figures(step, cache, *arguments, activation=activation)


def compiled_without_a_map() -> dict:
    """The same rows on the same devices, but XLA decides where the attention runs."""
    config = decoder_config(ATTENTION, 1)
    where = sharding(4, 1)

    def step(cache, *arguments):
        blind, hidden = decode_step(config)(dataclasses.replace(cache, sharding=None), *arguments)
        return dataclasses.replace(blind, sharding=where), hidden

    arguments = (
        place(config, where),
        np.zeros((8, 1), np.int32),
        placement.first_state_ids(where, 64, 8),
        positions(np.zeros(8), 1),
    )
    return step_figures(step, create(config, 64, where), *arguments, activation=8 * 32 * 4)


def repeated_steps() -> dict:
    """The same jitted step three times, each with the result of the one before."""
    config = decoder_config(ATTENTION, 1)
    where = sharding(4, 1)
    step = quick_jit(decode_step(config), donate_argnums=0)
    cache, params = create(config, 8, where), place(config, where)
    first, tokens = cache.blocks[0], np.zeros((4, 1), np.int32)
    state_ids = placement.first_state_ids(where, 8, 4)
    before, shardings = str(first.sharding), []
    for position in range(3):
        cache, _ = step(cache, params, tokens, state_ids, positions([position] * 4, 1))
        shardings.append(str(cache.blocks[0].sharding))
    return {
        "programs": step._cache_size(),
        "shardings": sorted({before, *shardings}),
        "donated": first.is_deleted(),
    }


# --- S03: eight slots over four devices, requests in slots 1 and 7


def two_requests() -> dict:
    config = decoder_config(ATTENTION, 1)
    step = quick_jit(decode_step(config))
    tokens, starts = np.array([[5, 6], [7, 8]], np.int32), [0, 3]
    alone, hidden_alone = step(
        create(config, 8, None),
        place(config, None),
        tokens,
        np.array([1, 7], np.int32),
        positions(starts, 2),
    )
    where = sharding(4, 1)
    places, size = placement.place_requests(where, 8, [1, 7])
    padded = {name: np.full(size, -1, np.int32) for name in ("ids", "starts")}
    padded["ids"][places], padded["starts"][places] = [1, 7], starts
    padded_tokens = np.zeros((size, 2), np.int32)
    padded_tokens[places] = tokens
    cache, hidden = step(
        create(config, 8, where),
        place(config, where),
        padded_tokens,
        padded["ids"],
        positions(padded["starts"], 2),
    )
    shards = sorted(cache.blocks[0].addressable_shards, key=lambda shard: shard.device.id)
    heads_only = create(config, 8, sharding(1, 4))
    return {
        "places": places.tolist(),
        "shard_shapes": [shard.data.shape for shard in shards],
        "written": [np.flatnonzero(np.asarray(shard.data).any(axis=1)).tolist() for shard in shards],
        "bytes_differing": int(np.sum(np.asarray(cache.blocks[0]) != np.asarray(alone.blocks[0]))),
        "error": largest_error(np.asarray(hidden)[places], hidden_alone),
        "memory": dataclasses.asdict(cache.memory),
        "memory_of_heads": dataclasses.asdict(heads_only.memory),
        "memory_alone": dataclasses.asdict(alone.memory),
    }


# --- S04: the whole layer with its heads over 1, 2 and 4 devices


def heads_over_devices() -> dict:
    """Prefill of 20 tokens and a step of 2, sinks and query norm included."""
    config = dataclasses.replace(ATTENTION, query_norm=True)
    layer = swa.SlidingWindowAttention(config)
    params = layer_params(config)
    x = activations(config, 2, 22)

    @quick_jit
    def run(cache, params):
        ids, zeros = jnp.arange(2, dtype=jnp.int32), jnp.zeros(2, jnp.int32)
        meta = swa.PrefillMetadata.build(
            config.geometry, ids, zeros, zeros + 20, max_tokens=20
        )
        first, rows = layer.apply(params, x[:, :20], cache.layer(0), meta)
        cache = cache.with_layer(0, rows)
        meta = swa.DecodeMetadata.build(config.geometry, ids, positions([20, 20], 2))
        second, rows = layer.apply(params, x[:, 20:], cache.layer(0), meta)
        return jnp.concatenate([first, second], axis=1), rows.data

    def outputs(where):
        cache = swa.RingCache.create(2, 1, config.geometry, config.fmt, where)
        return [np.asarray(value) for value in run(cache, params)]

    want, rows = outputs(None)
    errors = {}
    for heads in (1, 2, 4):
        got, data = outputs(sharding(1, heads))
        errors[str(heads)] = [largest_error(got, want), float(np.mean(data != rows))]
    return errors


# --- requests in the wrong place, copies, and what else is asked of a cache


def wrong_place() -> dict:
    """Four requests of one layer; the second names a slot of the third's device."""
    where = sharding(4, 1)
    layer, params = swa.SlidingWindowAttention(ATTENTION), layer_params(ATTENTION)
    cache = swa.RingCache.create(8, 1, ATTENTION.geometry, ATTENTION.fmt, where)
    x = activations(ATTENTION, 4, 1)

    def step(cache, ids):
        meta = swa.DecodeMetadata.build(ATTENTION.geometry, ids, positions([0] * 4, 1))
        return layer.apply(params, x, cache.layer(0), meta)

    y, rows = quick_jit(step)(cache, np.array([0, 4, 5, 7], np.int32))
    try:
        step(cache, np.array([0, 4, 5, 7], np.int32))
        message = None
    except ValueError as error:
        message = str(error)
    eager, _ = step(cache, np.array([0, 2, 5, 7], np.int32))
    return {
        "nan": np.isnan(np.asarray(y)).all(axis=(1, 2)).tolist(),
        "finite": np.isfinite(np.asarray(y)).all(axis=(1, 2)).tolist(),
        "written": np.flatnonzero(np.asarray(rows.data).any(axis=1)).tolist(),
        "message": message,
        "eager_error": largest_error(np.asarray(eager)[[0, 2, 3]], np.asarray(y)[[0, 2, 3]]),
    }


def slots_moved() -> dict:
    """copy_slots, export_slot and import_slot of random bytes, against one device."""
    geometry, fmt, where = ATTENTION.geometry, ATTENTION.fmt, sharding(4, 2)
    cache = swa.RingCache.create(16, 2, geometry, fmt, where)
    data = np.random.default_rng(0).integers(0, 256, cache.blocks[0].shape, dtype=np.uint8)
    several = dataclasses.replace(cache, blocks=(jax.device_put(data, cache.blocks[0].sharding),))
    one = dataclasses.replace(cache, blocks=(jnp.asarray(data),), sharding=None)
    src, dst = np.array([0, 5, -1, 3], np.int32), np.array([1, 15, 2, 20], np.int32)

    def calls(cache):
        copied = cache.copy_slots(src, dst)
        exported = cache.export_slot(9, 40)
        imported, _ = cache.import_slot(14, exported)
        return copied, exported, imported

    got, want = quick_jit(calls)(several), quick_jit(calls)(one)
    equal = [
        bool(np.array_equal(a, b))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    ]
    caches = [got[0], got[2], several.snapshot()]
    return {
        "equal": equal,
        "same_sharding": [c.blocks[0].sharding == cache.blocks[0].sharding for c in caches],
    }


FAST = {
    "decode": lambda: compiled_step("decode", 2, 2, 1),
    "without_a_map": compiled_without_a_map,
    "repeated": repeated_steps,
    "two_requests": two_requests,
    "heads": heads_over_devices,
    "wrong_place": wrong_place,
    "slots_moved": slots_moved,
}


if __name__ == "__main__":
    import time

    results = {}
    for name in sys.argv[1:] or FAST:
        t = time.process_time(); w=time.time()
        results[name] = FAST[name]()
        print(name, time.process_time() - t, time.time()-w, file=sys.stderr)
    print(json.dumps(results))
