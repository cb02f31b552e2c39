"""The suites layer and prefill: an attention layer's decode step, and chunks of a prompt."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from benchmark_clock import Case, Figure, Program, compiled, temporary_bytes
from benchmark_settings import POSITION, Settings, filled_rows, random_values

import swa_jax as swa
from pallas_kernels import KVRows, dequantize_rows, transforms
from swa_jax.attention import attention_layer, parameter_shapes, prefill_attention
from swa_jax.presets import v4_flash

FLAX_REQUESTS = 8  # whose whole contexts take 1 GB


def layer_config(settings: Settings, fmt: swa.KVCacheFormat) -> swa.AttentionConfig:
    """DeepSeek-V4-Flash's layer in the dtype of the settings.

    Args:
      settings: the sizes of heads, rows and window.
      fmt: of the rows.
    """
    small = {"hidden_size": 64, "q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 16}
    return dataclasses.replace(
        v4_flash().layers[0],
        num_heads=settings.heads,
        head_dim=settings.width,
        rope_dim=2 * settings.half,
        window=settings.window,
        fmt=fmt.with_width(settings.width),
        dtype=settings.dtype,
        param_dtype=settings.dtype,
        **(small if settings.tiny else {}),
    )


def layer_params(config: swa.AttentionConfig) -> dict[str, jax.Array]:
    """Random parameters of `attention_layer` that keep the size of what they multiply."""
    random = np.random.default_rng(5)

    def value(shape: tuple[int, ...]) -> jax.Array:
        if len(shape) == 1:
            return jnp.asarray(random.uniform(0.5, 1.5, shape), jnp.float32)
        drawn = random.standard_normal(shape, np.float32) * np.float32(shape[1] ** -0.5)
        return jnp.asarray(drawn, config.param_dtype)

    return {name: value(shape) for name, shape in parameter_shapes(config).items()}


def layer(settings: Settings) -> Iterator[Case]:
    """An attention layer's decode step of one token a request, its parameters read once.

    Beside the layer of Hugging Face, eager, which computes the same, and Flax's own attention with
    its decode cache, another layer of the same width: full attention over the whole context.
    """
    config = layer_config(settings, settings.fmt)
    params = layer_params(config)
    size = sum(value.size for value in params.values())
    for n in (2,) if settings.tiny else (1, 8, 32):
        x, positions = layer_inputs(config, n), jnp.full(n, POSITION, jnp.int32)
        programs = []
        for name, fmt in (("swa_jax", config.fmt), ("swa_jax, F32 rows", swa.F32)):
            own = layer_config(settings, fmt)
            rows = filled_rows(settings, n, own.fmt)
            step = layer_step(own)
            programs.append(compiled(name, step, rows, params, x, positions, carry=True))
        if settings.transformers:
            from benchmark_torch import HuggingFaceLayer

            past = past_rows(settings, rows, n)
            programs.append(HuggingFaceLayer(params, config, past, POSITION).program(x))
        if n <= FLAX_REQUESTS:
            programs.append(_flax_step(settings, x))
        work = {
            "product": 2 * n * size + 4 * n * settings.heads * settings.window * settings.width,
            "copy": size * jnp.dtype(settings.dtype).itemsize,
        }
        yield Case("layer", f"N={n}", {"requests": n}, programs, work)


def layer_inputs(config: swa.AttentionConfig, n: int) -> jax.Array:
    """Normal values float32[n, 1, hidden]."""
    random = np.random.default_rng(6)
    return jnp.asarray(random.normal(size=(n, 1, config.hidden_size)), jnp.float32)


def layer_step(config: swa.AttentionConfig):
    """A decode step of the first n state slots: (rows, params, x, positions) to (rows, y)."""

    def step(rows: KVRows, params, x, positions):
        requests = jnp.arange(len(positions), dtype=jnp.int32)
        meta = swa.DecodeMetadata.build(config.geometry, requests, positions[:, None])
        y, new_rows = attention_layer(params, x, rows, meta, config)
        return new_rows, y

    return step


def past_rows(settings: Settings, rows: KVRows, n: int) -> jax.Array:
    """The numbers float32[n, W - 1, D] of the rows before each request's token at POSITION."""
    positions = jnp.full(n, POSITION, jnp.int32)
    indices = settings.geometry.read_indices(jnp.arange(n), positions)[:, :-1]
    return dequantize_rows(rows.logical().reshape(rows.num_rows, -1)[indices], rows.fmt)


def _flax_step(settings: Settings, x: jax.Array) -> Program:
    """Flax's attention as it comes, at the last position of the context."""
    n, _, hidden = x.shape
    module = nn.MultiHeadDotProductAttention(
        num_heads=settings.heads, qkv_features=hidden, use_bias=False, decode=True
    )
    whole = jax.ShapeDtypeStruct((n, settings.context, hidden), jnp.float32)
    variables = jax.eval_shape(module.init, jax.random.key(0), whole)
    scale = hidden**-0.5
    params, cache = (
        jax.tree.map(lambda leaf: jnp.full(leaf.shape, scale, leaf.dtype), variables[name])
        for name in ("params", "cache")
    )
    cache["cache_index"] = jnp.int32(settings.context - 1)

    def step(cache, params, x):
        y, new = module.apply({"params": params, "cache": cache}, x, mutable=["cache"])
        # The same position again, so that no call runs over the end.
        return {**new["cache"], "cache_index": cache["cache_index"]}, y

    name = f"Flax, context {settings.context:,}"
    return compiled(name, step, cache, params, x, carry=True)


def prefill(settings: Settings) -> Iterator[Case | Figure]:
    """The attention of one request's chunk of T tokens, 8 heads; and of prompts in such chunks.

    Ours normalises and rotates queries and rows, casts the rows, reads the old window and stores;
    the peer is handed queries and rows that are ready, and sees the chunk only.
    """
    settings = dataclasses.replace(settings, heads=min(settings.heads, 8))
    chunk, large = (8, 8) if settings.tiny else (1024, 8192)
    for tokens in (chunk,) if settings.tiny else (256, chunk, 2048):
        peer = compiled("jax.nn", window_peer(settings), *_ready_chunk(settings, tokens))
        programs = [_own_chunks("swa_jax", settings, tokens, [POSITION]), peer]
        work = {"product": 4 * tokens * settings.heads * settings.window * settings.width}
        yield Case("prefill", f"T={tokens:,}", {"tokens": tokens}, programs, work)
    own = _own_chunks("swa_jax", settings, large, [POSITION])
    yield Case("prefill", f"T={large:,}, alone", {"tokens": large}, [own])
    yield from _memory(settings, large, own.temporary_bytes)
    prompts = [
        _own_chunks(f"prompt of {chunk * n:,}", settings, chunk, [chunk * i for i in range(n)])
        for n in ((1, 2) if settings.tiny else (1, 4, 16, 64))
    ]
    name = f"each {chunk:,} tokens of a prompt"
    yield Case("prefill", name, {"tokens": chunk}, prompts, slower_is_better=False)


def chunk_step(settings: Settings):
    """Prefill of a chunk of one request: (rows, params, q, latents, start) to (rows, out)."""
    config = layer_config(settings, settings.fmt)

    def step(rows: KVRows, params, q, latents, start):
        lengths = jnp.full(1, q.shape[1], jnp.int32)
        meta = swa.PrefillMetadata.build(
            config.geometry, jnp.zeros_like(lengths), start[None], lengths, max_tokens=q.shape[1]
        )
        rotation = transforms.rope_cos_sin(meta.positions, config.turns)
        out, rows = prefill_attention(params, q, latents, rotation, rows, meta, config)
        return rows, out

    return step


def window_peer(settings: Settings):
    """jax.nn.dot_product_attention with a causal window: q [1, T, H, D], rows [1, T, 1, D]."""

    def attend(q, rows):
        window = settings.window - 1, 0
        return jax.nn.dot_product_attention(q, rows, rows, is_causal=True, local_window_size=window)

    return attend


def _ready_chunk(settings: Settings, tokens: int) -> tuple[jax.Array, jax.Array]:
    """Queries [1, T, H, D] and rows [1, T, 1, D]."""
    queries = random_values(settings, 1, tokens, settings.heads, seed=4)
    rows = random_values(settings, 1, tokens, 1, seed=3)
    return queries.astype(settings.dtype), rows.astype(settings.dtype)


@functools.cache
def _compiled_chunk(settings: Settings, tokens: int):
    queries, latents = _ready_chunk(settings, tokens)
    arguments = _chunk_params(settings), queries, latents[:, :, 0], jnp.int32(0)
    step = jax.jit(chunk_step(settings), donate_argnums=0)
    return step.lower(filled_rows(settings, 1), *arguments).compile()


def _chunk_params(settings: Settings) -> dict[str, jax.Array]:
    return {"kv_norm": jnp.ones(settings.width), "sinks": jnp.zeros(settings.heads)}


def _own_chunks(name: str, settings: Settings, tokens: int, starts: Sequence[int]) -> Program:
    """Chunks of T tokens, one after the other; a chunk is an item."""
    step, rows = _compiled_chunk(settings, tokens), filled_rows(settings, 1)
    queries, latents = _ready_chunk(settings, tokens)
    arguments = _chunk_params(settings), queries, latents[:, :, 0]
    positions = [jnp.int32(start) for start in starts]

    def run() -> None:
        nonlocal rows
        for start in positions:
            rows, out = step(rows, *arguments, start)
            jax.block_until_ready((rows, out))

    return Program(name, run, temporary_bytes(step), items=len(starts))


def _memory(settings: Settings, tokens: int, own: int | None) -> Iterator[Figure]:
    """Temporary memory by the compiler's analysis: the peer is compiled and not run."""
    shapes = [
        jax.ShapeDtypeStruct((1, tokens, heads, settings.width), settings.dtype)
        for heads in (settings.heads, 1)
    ]
    peer = temporary_bytes(jax.jit(window_peer(settings)).lower(*shapes).compile())
    if own is None or peer is None:
        return
    name, parameters = f"temporary memory of {tokens:,} tokens", {"tokens": tokens}
    yield Figure("prefill", f"{name}, swa_jax", own / 1e6, "MB", parameters)
    yield Figure("prefill", f"{name}, jax.nn", peer / 1e6, "MB", parameters)
    yield Figure("prefill", f"{name}, share of jax.nn's", own / peer, "", parameters)
