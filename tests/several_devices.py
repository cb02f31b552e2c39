"""What test_several_devices.py compares, computed on eight virtual CPU devices; prints JSON.

A process has the devices it starts with, so these programs cannot run in the tests' own.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from quick_compilation import QUICK_COMPILATION
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
from pallas_kernels import KVRows
from swa_jax import decoding, placement
from swa_jax.parameter_sharding import parameter_shardings

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from collectives import carrying_rows, find_collectives
from whole_copies import whole_copies

WINDOW = 16
ATTENTION = attention_config(WINDOW, swa.V41, num_heads=4, o_groups=4)
ROWS, ROW_BYTES = 22, 66


def sharding(data: int, heads: int) -> NamedSharding:
    devices = np.array(jax.devices()[: data * heads]).reshape(data, heads)
    return NamedSharding(Mesh(devices, ("data", "tensor")), PartitionSpec("data"))


def create(config: swa.DecoderConfig, slots: int, where: NamedSharding | None) -> swa.RingCache:
    return swa.RingCache.for_decoder(config, slots, where)


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
    lowered = jax.jit(step, donate_argnums=0).lower(cache, *arguments)
    compiled = lowered.compile(compiler_options=QUICK_COMPILATION)
    text, memory = compiled.as_text(), compiled.memory_analysis()
    block = cache.blocks[0].sharding.shard_shape(cache.blocks[0].shape)
    found = find_collectives(text)
    first, shardings = cache.blocks[0], {str(cache.blocks[0].sharding)}
    for _ in range(3):  # a compiled program takes no argument that lies elsewhere
        cache, _ = compiled(cache, *arguments)
        shardings.add(str(cache.blocks[0].sharding))
    return {
        "collectives": [[one.kind, one.shapes] for one in found],
        "carrying_rows": len(carrying_rows(found, activation)),
        "cache_per_device": cache.memory.bytes_per_device,
        "aliased": memory.alias_size_in_bytes,
        "copies": len(whole_copies(text, block)),
        "shardings": sorted(shardings),
        "donated": first.is_deleted(),
    }


def compiled_step(kind: str, data: int, heads: int, tokens: int, layers: int = 1) -> dict:
    """64 slots, 8 requests."""
    config = decoder_config(ATTENTION, layers)
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
        "places_of_five": placement.place_requests(where, 8, [7, 1, 0, 6, 2], 3)[0].tolist(),
        "shard_shapes": [shard.data.shape for shard in shards],
        "written": [
            np.flatnonzero(np.asarray(shard.data).any(axis=1)).tolist() for shard in shards
        ],
        "bytes_differing": int(np.sum(np.asarray(cache.blocks[0]) != np.asarray(alone.blocks[0]))),
        "error": largest_error(np.asarray(hidden)[places], hidden_alone),
        "memory": dataclasses.asdict(cache.memory),
        "memory_of_heads": dataclasses.asdict(heads_only.memory),
        "memory_alone": dataclasses.asdict(alone.memory),
    }


# --- S04: the whole layer with its heads over 1, 2 and 4 devices


def heads_over_devices() -> dict:
    """A verify step of 3 tokens: sinks and query norm included."""
    config = dataclasses.replace(ATTENTION, query_norm=True)
    layer = swa.SlidingWindowAttention(config)
    params = layer_params(config)
    x = activations(config, 2, 3)
    meta = swa.DecodeMetadata.build(
        config.geometry, np.arange(2, dtype=np.int32), positions([0, 40], 3)
    )

    @quick_jit
    def run(cache, params):
        y, rows = layer.apply(params, x, cache.layer(0), meta)
        return y, rows.data

    def outputs(where):
        cache = swa.RingCache.create(2, 1, config.geometry, config.fmt, where)
        y, rows = run(cache, params)
        return np.asarray(y), np.asarray(rows), rows.sharding == cache.blocks[0].sharding

    want, rows, _ = outputs(None)
    results = {}
    for heads in (2, 4):
        got, data, kept = outputs(sharding(1, heads))
        results[str(heads)] = {
            "error": largest_error(got, want),
            "bytes_differing": int(np.sum(data != rows)),
            "keeps_sharding": kept,
        }
    return results


# --- requests in the wrong place, copies, and what else is asked of a cache


def wrong_place() -> dict:
    """Four requests of one layer; the second names a slot of the third's device."""
    where = sharding(4, 1)
    layer, params = swa.SlidingWindowAttention(ATTENTION), layer_params(ATTENTION)
    cache = swa.RingCache.create(8, 1, ATTENTION.geometry, ATTENTION.fmt, where)
    x = activations(ATTENTION, 4, 1)

    def step(cache, meta):
        return layer.apply(params, x, cache.layer(0), meta)

    ids = np.array([0, 4, 5, 7], np.int32)
    meta = swa.DecodeMetadata.build(ATTENTION.geometry, ids, positions([0] * 4, 1))
    y, rows = quick_jit(step)(cache, meta)
    try:
        jax.eval_shape(lambda cache: step(cache, meta), cache)
        message = None
    except ValueError as error:
        message = str(error)
    return {
        "nan": np.isnan(np.asarray(y)).all(axis=(1, 2)).tolist(),
        "finite": np.isfinite(np.asarray(y)).all(axis=(1, 2)).tolist(),
        "written": np.flatnonzero(np.asarray(rows.data).any(axis=1)).tolist(),
        "message": message,
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


# --- refusals


def refusals() -> dict:
    """The message of each call that cannot be right."""
    geometry, where = ATTENTION.geometry, sharding(4, 2)
    mesh, P = where.mesh, PartitionSpec
    odd = decoder_config(attention_config(WINDOW, swa.V41, num_heads=3, o_groups=3), 1)
    decoder = decoder_config(ATTENTION, 1)
    layer, params = swa.SlidingWindowAttention(odd.attention), layer_params(odd.attention)
    x = activations(odd.attention, 4, 1)
    meta = swa.DecodeMetadata.build(
        geometry, np.array([0, 2, 4, 6], np.int32), positions([0] * 4, 1)
    )
    explicit = jax.make_mesh((4, 2), ("data", "tensor"), (jax.sharding.AxisType.Explicit,) * 2)

    def new(where, slots=8):
        return swa.RingCache.create(slots, 1, geometry, ATTENTION.fmt, where)

    def apply(cache, x, meta):
        jax.eval_shape(lambda x: layer.apply(params, x, cache.layer(0), meta), x)

    def begin(ids):
        return decoding.prefill(
            swa.Decoder(decoder), decoder_params(decoder), new(where), ids, [[1]] * len(ids)
        )

    cache = new(where)
    calls = {
        "mesh": lambda: new(mesh),
        "abstract": lambda: new(NamedSharding(mesh.abstract_mesh, P("data"))),
        "explicit": lambda: new(NamedSharding(explicit, P("data"))),
        "row": lambda: new(NamedSharding(mesh, P("data", "tensor"))),
        "slots": lambda: new(where, 6),
        "heads": lambda: apply(cache, x, meta),
        "batch": lambda: apply(cache, x[:3], jax.tree.map(lambda leaf: leaf[:3], meta)),
        "parameters": lambda: parameter_shardings(swa.Decoder(odd), where),
        "with_layer": lambda: new(None).with_layer(0, cache.layer(0)),
        "prefill": lambda: begin([0, 1, 4, 6]),
        "prompts": lambda: begin([0, 2]),
        "per_shard": lambda: placement.place_requests(where, 8, [0, 1], per_shard=1),
        "place": lambda: placement.place_requests(where, 8, [0, 8]),
    }
    messages = {}
    for name, call in calls.items():
        try:
            call()
            messages[name] = None
        except ValueError as error:
            messages[name] = str(error)
    return messages


# --- slow: more steps, whole generations, second caches, kernels


def generations() -> dict:
    """Eight prompts through prefill in chunks, blocks of steps, and a rollback."""
    config = decoder_config(ATTENTION, 1)
    model = swa.Decoder(config)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 50, n).tolist() for n in (3, 30, 17, 40, 5, 6, 7, 8)]

    def run(where):
        params, sampling = place(config, where), swa.Sampling.build(8, temperature=[0, 1] * 4)
        new = {"max_new_tokens": 9, "sampling": sampling}
        tokens = swa.generate(
            model, params, prompts, **new, block_steps=4, prefill_chunk=16, sharding=where
        )
        state = decoding.begin(model, params, create(config, 8, where), prompts, **new, chunk=16)
        state, first = decoding.decode_block(model, params, state, 4)
        back = np.asarray(state.positions) - 2
        state = decoding.rollback(state, back, np.asarray(first)[:, 1])
        _, again = decoding.decode_block(model, params, state, 4)
        return tokens, np.asarray(first), np.asarray(again)

    want = run(None)
    where = sharding(2, 2)
    sampling = swa.Sampling.build(8, temperature=[0, 1] * 4)
    params = place(config, where)
    drafted = [
        swa.generate(
            model,
            params,
            prompts,
            max_new_tokens=9,
            sampling=sampling,
            draft_tokens=3,
            drafter=drafter,
            drafter_params=drafter_params,
            sharding=where,
        )
        for drafter, drafter_params in (
            (swa.NGramDrafter(shortest=1), None),
            (swa.ModelDrafter(model), params),
        )
    ]
    state = decoding.begin(
        model, params, create(config, 8, where), prompts, max_new_tokens=9, sampling=sampling
    )
    rings = swa.ModelDrafter(model).begin(model, params, prompts, state, draft_tokens=3)
    compiled = []

    def listen(event: str, duration: float, fun_name: str = "", **_: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    got = run(where)
    return {
        "drafted": drafted,
        "drafters_slots": [rings.memory.slots_per_device, rings.memory.copies],
        "tokens": [got[0], want[0]],
        "rolled_back": bool(np.array_equal(got[2][:, :2], got[1][:, 2:])),
        "blocks_equal": [
            bool(np.array_equal(a, b)) for a, b in zip(got[1:], want[1:], strict=True)
        ],
        "compiled": [compiled.count("jit(decode_block)"), compiled.count("jit(prefill_chunk)")],
    }


def second_caches() -> dict:
    """A compressed cache in the same softmax: split as the ring is, and whole on every device."""
    config = dataclasses.replace(ATTENTION, extra_fmt=ATTENTION.fmt)
    layer, params = swa.SlidingWindowAttention(config), layer_params(config)
    where = sharding(4, 2)
    rng = np.random.default_rng(0)
    data = rng.integers(0, 120, (8, 352), dtype=np.uint8)
    rows = KVRows.view(jnp.asarray(data), start=0, rows_per_slot=5, fmt=config.fmt)
    ids = placement.first_state_ids(where, 8, 4)
    # five rows of the request's own slot, of which the last is cut off by its length
    indices = np.repeat(ids[:, None] * 5 + np.arange(5, dtype=np.int32)[None], 2, axis=0)
    lengths = np.full(8, 4, np.int32)
    meta = swa.DecodeMetadata.build(config.geometry, ids, positions([0, 9, 20, 30], 2))
    x = activations(config, 4, 2)

    @quick_jit
    def run(cache, extra):
        return layer.apply(params, x, cache.layer(0), meta, extra=extra)[0]

    def outputs(where, extra_rows, indices=indices):
        cache = swa.RingCache.create(8, 1, config.geometry, config.fmt, where)
        return np.asarray(run(cache, swa.ExtraKV(extra_rows, indices, lengths)))

    # the second request, two queries of each, names a row of the first one's device
    others = indices.copy()
    others[2:4, 1] = indices[0, 1]
    want = outputs(None, rows)
    split = jax.device_put(rows.data, where)
    split = dataclasses.replace(rows, data=split, sharding=where)
    try:
        outputs(where, dataclasses.replace(split, sharding=sharding(2, 4)))
        message = None
    except NotImplementedError as error:
        message = str(error)
    return {
        "whole": largest_error(outputs(where, rows), want),
        "split": largest_error(outputs(where, split), want),
        "message": message,
        "of_others": np.isnan(outputs(where, split, others)).all(axis=(1, 2)).tolist(),
    }


def kernels() -> dict:
    """Prefill and decode by the kernels' interpreter, against XLA on one device; and for a GPU."""
    config = dataclasses.replace(ATTENTION, dtype="bfloat16")
    layer = swa.SlidingWindowAttention(config, implementation="interpret")
    params, x = layer_params(config), activations(config, 2, 1)
    where = sharding(2, 2)
    ids = placement.first_state_ids(where, 4, 2)
    meta = swa.DecodeMetadata.build(ATTENTION.geometry, ids, positions([20, 20], 1))
    before = swa.PrefillMetadata.build(ATTENTION.geometry, ids, [0, 0], [20, 20], max_tokens=20)
    prompt = activations(config, 2, 20, seed=1)

    def run(layer, where):
        @quick_jit
        def steps(cache):
            _, rows = layer.apply(params, prompt, cache.layer(0), before)
            return layer.apply(params, x, rows, meta)[0]

        cache = swa.RingCache.create(4, 1, ATTENTION.geometry, ATTENTION.fmt, where)
        return np.asarray(steps(cache), np.float32)

    want = run(swa.SlidingWindowAttention(config), None)
    cache = swa.RingCache.create(4, 1, config.geometry, config.fmt, where)
    chosen = swa.SlidingWindowAttention(config)  # kernels on CUDA
    traced = jax.jit(lambda cache: chosen.apply(params, x, cache.layer(0), meta)).trace(cache)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return {
        "interpret": largest_error(run(layer, where), want),
        "lowered_for_cuda": text.count("@__gpu$xla.gpu.triton"),
    }


FAST = {
    "refusals": refusals,
    "decode": lambda: compiled_step("decode", 2, 2, 1, layers=2),
    "without_a_map": compiled_without_a_map,
    "two_requests": two_requests,
    "heads": heads_over_devices,
    "wrong_place": wrong_place,
    "slots_moved": slots_moved,
}


SLOW = {
    "verify": lambda: compiled_step("verify", 4, 2, 6),
    "prefill": lambda: compiled_step("prefill", 4, 2, 24),
    "generations": generations,
    "second_caches": second_caches,
    "kernels": kernels,
}


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    checks = {"fast": FAST, "slow": SLOW}[sys.argv[1]]
    print(json.dumps({name: check() for name, check in checks.items()}))
