"""The suites memory and compile: what the compiler allocates and copies, and how long it takes."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from benchmark_clock import Figure
from benchmark_settings import Settings, filled_rows
from whole_copies import whole_copies

import swa_jax as swa
from pallas_kernels import indexed_attention
from pallas_kernels.formats import FORMATS
from swa_jax.decoding import DecodeState, decode_block, decode_step
from swa_jax.prefilling import prefill_chunk
from swa_jax.sampling import Sampling
from swa_jax.sizing import ring_cache_bytes, rows_bytes, separate_kv_bytes
from swa_jax.speculation import speculate_block

KV_HEADS, KV_WIDTH = 8, 128  # of a usual cache with separate keys and values, in bfloat16
SLOTS, REQUESTS = 1024, 2  # state slots and requests of the programs whose copies are counted
QUICK: Any = {"xla_backend_optimization_level": 0}  # half the time to compile, the same buffers
BLOCKS = ("step", "decode", "verify", "prefill")


def memory(settings: Settings) -> Iterator[Figure]:
    """Bytes by the compiler's analysis and by arithmetic; nothing runs."""
    for n in settings.requests[:1] if settings.tiny else (1, 8, 64, 256, 1024):
        yield Figure(
            "memory", f"temporary memory of a read, N={n}", read_bytes(settings, n) / 1e6, "MB",
            {"requests": n},
        )  # fmt: skip
    for block in BLOCKS[1:2] if settings.tiny else BLOCKS:
        for scanned in (False,) if settings.tiny else (False, True):
            kind = "scanned" if scanned else "unrolled"
            yield Figure(
                "memory",
                f"copies of the cache, {block}, {kind} layers",
                cache_copies(block, scanned),
                "",
                {"slots": SLOTS},
            )
    yield from sizes(settings.geometry, settings.context)


def sizes(geometry: swa.RingGeometry, context: int) -> Iterator[Figure]:
    """Bytes of rows of 512 values in each format, beside a usual cache's keys and values.

    Args:
      geometry: of a ring.
      context: tokens of a cache that keeps the whole context.
    """
    for name, fmt in FORMATS.items():
        yield Figure("memory", f"a token in a layer, {name}", rows_bytes(fmt, 1), "B")
    usual = functools.partial(separate_kv_bytes, 1, KV_HEADS, KV_WIDTH, bytes_per_element=2)
    yield Figure("memory", "a token in a layer, keys and values", usual(1), "B")
    ring = ring_cache_bytes(swa.V41, geometry, 1, 1)
    yield Figure("memory", "a request in a layer, V41 ring", ring / 1e6, "MB")
    for name, value in (
        ("V41 rows", rows_bytes(swa.V41, context)),
        ("keys and values", usual(context)),
    ):
        yield Figure("memory", f"a request in a layer, {context:,} {name}", value / 1e6, "MB")


def read_bytes(settings: Settings, n: int) -> int:
    """Bytes beside arguments and results of float32 attention of n queries over their windows."""

    def read(q, rows, indices, sink):
        return indexed_attention(q, rows, indices, sink=sink)

    compiled = (
        jax.jit(read)
        .lower(
            jax.ShapeDtypeStruct((n, settings.heads, settings.width), jnp.float32),
            jax.eval_shape(lambda: filled_rows(settings, n)),
            _integers(n, settings.window),
            jax.ShapeDtypeStruct((settings.heads,), jnp.float32),
        )
        .compile()
    )
    analysis: Any = compiled.memory_analysis()
    return analysis.temp_size_in_bytes


def cache_copies(block: str, scan_layers: bool) -> int:
    """Instructions that copy the whole cache in a compiled program.

    Args:
      block: "step", "decode", "verify" or "prefill".
      scan_layers: whether the layers are scanned or unrolled.
    """
    config = swa.presets.look_alike(swa.presets.v4_flash())
    config = dataclasses.replace(
        config, num_layers=3, attention=config.layers[0], scan_layers=scan_layers
    )
    lowered, cache = _lowered(block, config)
    text = lowered.compile(QUICK).as_text()
    return len(whole_copies(text, cache.blocks[0].shape))


def _lowered(block: str, config: swa.DecoderConfig) -> tuple[Any, swa.RingCache]:
    """A program of the library, with abstract arguments, and its cache."""
    model, variables = swa.Decoder(config), abstract_params(config)
    state = abstract_state(config)
    if block == "step":
        return lower_step(config, variables, state.cache, REQUESTS), state.cache
    if block == "decode":
        return decode_block.lower(model, variables, state, 2), state.cache
    if block == "verify":
        drafter = swa.NGramDrafter(history=64)
        remembered = _integers(REQUESTS, drafter.history)
        lowered = speculate_block.lower(
            model, variables, state, drafter, None, remembered, steps=2, draft_tokens=3
        )
        return lowered, state.cache
    last = jax.ShapeDtypeStruct((REQUESTS, config.hidden_size), config.layers[0].dtype)
    numbers = _integers(REQUESTS)
    lowered = prefill_chunk.lower(
        model, variables, state.cache, last, numbers, _integers(REQUESTS, 32), numbers, numbers
    )
    return lowered, state.cache


def abstract_state(config: swa.DecoderConfig) -> DecodeState:
    """A state of REQUESTS requests in SLOTS slots, shapes only."""
    names = ("state_ids", "positions", "tokens", "remaining", "oldest", "highest")
    fields: dict[str, Any] = dict.fromkeys(names, _integers(REQUESTS))
    fields["stop_tokens"] = _integers(REQUESTS, 1)
    return DecodeState(
        cache=abstract_cache(config, SLOTS),
        sampling=jax.eval_shape(lambda: Sampling.build(REQUESTS)),
        **fields,
    )


def abstract_cache(config: swa.DecoderConfig, slots: int) -> swa.RingCache:
    """Rings of which only the shapes are there."""
    return jax.eval_shape(lambda: swa.RingCache.for_decoder(config, slots))


def abstract_params(config: swa.DecoderConfig) -> Any:
    """Variables of a decoder of which only the shapes are there."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    return nn.meta.unbox(jax.eval_shape(swa.Decoder(config).init, jax.random.key(0), tokens))


def lower_step(config: swa.DecoderConfig, variables: Any, cache: swa.RingCache, n: int) -> Any:
    """A decode step of n requests, the cache donated, traced and lowered."""
    model = swa.Decoder(config)

    def step(cache, variables, state_ids, tokens, positions):
        logits, cache = decode_step(model, variables, cache, state_ids, tokens, positions)
        return cache, logits

    return jax.jit(step, donate_argnums=0).lower(
        cache, variables, _integers(n), _integers(n, 1), _integers(n, 1)
    )


def compile(settings: Settings) -> Iterator[Figure]:
    """Seconds to compile a decode step of one request, of V4-Flash's shape, windows only."""
    config = swa.presets.v4_flash()
    if settings.tiny:
        config = swa.presets.look_alike(config)
    layer = dataclasses.replace(config.layers[0], extra_fmt=None)
    for scanned in (False, True):
        for layers in (1,) if settings.tiny else (1, 8, 43):
            shape = dataclasses.replace(
                config, num_layers=layers, attention=layer, scan_layers=scanned
            )
            variables, cache = abstract_params(shape), abstract_cache(shape, 1)
            lowered, lowering = _timed(functools.partial(lower_step, shape, variables, cache, 1))
            options = QUICK if settings.tiny else None
            _, compiling = _timed(functools.partial(lowered.compile, options))
            kind = "scanned" if scanned else "unrolled"
            for what, seconds in (("trace and lower", lowering), ("compile", compiling)):
                yield Figure(
                    "compile", f"{what}, {layers} {kind} layers", seconds, "s", {"layers": layers}
                )


def _timed(run: Callable[[], Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    result = run()
    return result, time.perf_counter() - started


def _integers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
