"""The attention layer as pure functions: decode, prefill and whole sequences without a cache."""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from pallas_kernels import (
    ExtraKV,
    KVRows,
    checks,
    dequantize_rows,
    load_rows,
    quantize_rows,
    store_rows,
    transforms,
)
from pallas_kernels.dispatch import Implementation
from swa_jax.chunk import chunk_attention, chunk_rows
from swa_jax.config import AttentionConfig
from swa_jax.devices import on_each_device
from swa_jax.heads import Rotation, attend_band, attend_indexed
from swa_jax.latents import store_latents, transform_latents
from swa_jax.layer_checks import check_call
from swa_jax.metadata import DecodeMetadata, Metadata, PrefillMetadata, SequenceMetadata
from swa_jax.verify import verify_attention

AttentionParams = Mapping[str, Array]


def parameter_shapes(config: AttentionConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's parameters by name; kernels are [out, in].

    Args:
      config: the layer's configuration.

    Returns:
      A shape for each of q_a_kv, q_a_norm, q_b, kv_norm, sinks, o_a and o_b.
    """
    c = config
    group = c.num_heads * c.head_dim // c.o_groups
    return {
        "q_a_kv": (c.q_lora_rank + c.head_dim, c.hidden_size),
        "q_a_norm": (c.q_lora_rank,),
        "q_b": (c.num_heads * c.head_dim, c.q_lora_rank),
        "kv_norm": (c.head_dim,),
        "sinks": (c.num_heads,),
        "o_a": (c.o_groups * c.o_lora_rank, group),
        "o_b": (c.hidden_size, c.o_groups * c.o_lora_rank),
    }


def attention_layer(
    params: AttentionParams,
    x: Float[Array, "b t hidden"],
    rows: KVRows | None,
    meta: Metadata,
    config: AttentionConfig,
    *,
    extra: ExtraKV | None = None,
    round_trip: bool = True,
    implementation: Implementation = None,
) -> tuple[Float[Array, "b t hidden"], KVRows | None]:
    """One sliding-window latent-attention layer.

    One projection gives an intermediate query and the shared row; the query is normalised and
    expanded to heads, the row is normalised, rotated, cast and stored; each head attends to the
    rows of its window, with a sink; the output is rotated back at the query's position and goes
    through a grouped low-rank projection. The maths is that of DeepSeek-V4's attention.

    A layer with a compressed cache takes it as `extra`: whoever compresses keys and selects among
    them says with indices which rows each query reads. They join the softmax of the window.

    Gradients: rows in a cache are bytes, so a call with a cache treats them, its own new ones
    included, as constants. Train in the form without a cache.

    Args:
      params: q_a_kv [q_lora_rank + D, hidden], q_a_norm [q_lora_rank], q_b [H * D, q_lora_rank],
        kv_norm [D], sinks [H], o_a [groups * o_lora_rank, H * D / groups],
        o_b [hidden, groups * o_lora_rank].
      x: floating[B, T, hidden].
      rows: this layer's view of the cache; None with a SequenceMetadata. With a sharding each
        device works on its slots and heads, see `devices.on_each_device`.
      meta: the kind of call and its addresses.
      config: the layer's configuration.
      extra: the compressed cache, exactly if config.extra_fmt names its format. Its indices are
        int32[B * T, K], query t of request b in row b * T + t.
      round_trip: in a call without a cache, whether rows go through their format and back.
      implementation: of the operations on rows: None, "xla", "triton" or "interpret".

    Returns:
      y, config.dtype[B, T, hidden], zero at padding; and the new rows, None without a cache.

    Raises:
      ValueError: a wrong shape, dtype, format or geometry.
    """
    check_call(x, rows, meta, extra, config)
    _check_params(params, config)
    dtype = jnp.dtype(config.dtype)
    batch, tokens, _ = x.shape
    # Selected before it is used: what stands at padding reaches no gradient either.
    x = jnp.where(meta.positions[..., None] >= 0, x, jnp.zeros((), x.dtype)).astype(dtype)
    projected = _project(x, params["q_a_kv"])
    q_a, latents = projected[..., : config.q_lora_rank], projected[..., config.q_lora_rank :]
    q_a = transforms.rms_norm(q_a, params["q_a_norm"], config.norm_eps).astype(dtype)
    q = _project(q_a, params["q_b"]).reshape(batch, tokens, config.num_heads, config.head_dim)
    rotation = transforms.rope_cos_sin(meta.positions, config.turns)
    arguments = (params, q, latents, rotation)
    if isinstance(meta, SequenceMetadata):
        out = sequence_attention(*arguments, meta, config, extra=extra, round_trip=round_trip)
    else:
        assert rows is not None  # check_call saw to it
        if isinstance(meta, DecodeMetadata):
            out, rows = decode_attention(
                *arguments, rows, meta, config, extra=extra, implementation=implementation
            )
        else:
            out, rows = prefill_attention(
                *arguments, rows, meta, config, extra=extra, implementation=implementation
            )
    groups = out.astype(dtype).reshape(batch, tokens, config.o_groups, -1)
    o_a = params["o_a"].astype(dtype).reshape(config.o_groups, config.o_lora_rank, -1)
    low_rank = jnp.einsum("btgd,grd->btgr", groups, o_a).reshape(batch, tokens, -1)
    y = _project(low_rank, params["o_b"])
    return jnp.where(meta.positions[..., None] >= 0, y, jnp.zeros((), dtype)), rows


def decode_attention(
    params: AttentionParams,
    q: Float[Array, "b t h d"],
    latents: Float[Array, "b t d"],
    rotation: Rotation,
    rows: KVRows,
    meta: DecodeMetadata,
    config: AttentionConfig,
    *,
    extra: ExtraKV | None = None,
    implementation: Implementation = None,
) -> tuple[Float[Array, "b t h d"], KVRows]:
    """Stores the new rows, then reads the ring through indices.

    Several tokens of a request have windows that differ in a row or two: without a compressed cache
    `verify_attention` may read those together.

    Args:
      params: at least kv_norm [D] and sinks [H].
      q: floating[B, T, H, D], queries before norm and rotation.
      latents: floating[B, T, D], rows before norm and rotation.
      rotation: cosines and sines at meta.positions, float32[B, T, R / 2] each.
      rows: this layer's view of the cache.
      meta: addresses of the step.
      config: the layer's configuration.
      extra: a compressed cache in the same softmax.
      implementation: of both operations.

    Returns:
      The heads' outputs, rotated back, in q's dtype[B, T, H, D], and the new rows.

    Raises:
      NotImplementedError: the implementation named cannot do it.
    """
    if rows.sharding is not None:
        attend = functools.partial(decode_attention, config=config, implementation=implementation)
        return on_each_device(attend, params, q, latents, rotation, rows, meta, extra)
    rows = store_latents(
        rows, latents, meta.slots, params["kv_norm"], rotation, config, implementation
    )
    sinks = params["sinks"]
    if q.shape[1] > 1 and extra is None:
        return verify_attention(q, rows, meta, sinks, rotation, config, implementation), rows
    out = attend_indexed(q, rotation, rows, meta.indices, sinks, extra, config, implementation)
    return out, rows


def prefill_attention(
    params: AttentionParams,
    q: Float[Array, "b t h d"],
    latents: Float[Array, "b t d"],
    rotation: Rotation,
    rows: KVRows,
    meta: PrefillMetadata,
    config: AttentionConfig,
    *,
    extra: ExtraKV | None = None,
    implementation: Implementation = None,
) -> tuple[Float[Array, "b t h d"], KVRows]:
    """Reads the old window, attends over old rows and new ones, then stores those that survive.

    Args:
      params: at least kv_norm [D] and sinks [H].
      q: floating[B, T, H, D], queries before norm and rotation.
      latents: floating[B, T, D], rows before norm and rotation.
      rotation: cosines and sines at meta.positions, float32[B, T, R / 2] each.
      rows: this layer's view of the cache.
      meta: addresses of the chunk.
      config: the layer's configuration.
      extra: a compressed cache in the same softmax: old window, chunk and compressed rows.
      implementation: of the attention.

    Returns:
      The heads' outputs, rotated back, in q's dtype[B, T, H, D], and the new rows.

    Raises:
      NotImplementedError: the implementation named cannot do it.
    """
    if rows.sharding is not None:
        attend = functools.partial(prefill_attention, config=config, implementation=implementation)
        return on_each_device(attend, params, q, latents, rotation, rows, meta, extra)
    old = lax.optimization_barrier(load_rows(rows, meta.window_slots))
    new = chunk_rows(latents, params["kv_norm"], rotation, config, implementation)
    # The store's addresses depend on the bytes that were read, once and for all users (hence the
    # barrier). Nothing else tells XLA that the read comes first, and it would keep the old cache
    # alive by copying it whole.
    never = jnp.max(old[:1, :1, :1].astype(jnp.int32), initial=0) >> 8
    slots = meta.slots + never
    rows = store_rows(rows, new.reshape(-1, config.fmt.row_bytes), slots)
    there = jnp.concatenate([meta.window_slots, meta.positions], axis=1) >= 0
    segments = jnp.where(there, jnp.int32(0), jnp.int32(-1))
    data = jnp.concatenate([old, new], axis=1)
    out = chunk_attention(
        q, data, segments, params["sinks"], rotation, extra, config, implementation
    )
    return out, rows


def sequence_attention(
    params: AttentionParams,
    q: Float[Array, "b t h d"],
    latents: Float[Array, "b t d"],
    rotation: Rotation,
    meta: SequenceMetadata,
    config: AttentionConfig,
    *,
    extra: ExtraKV | None = None,
    round_trip: bool = True,
) -> Float[Array, "b t h d"]:
    """Attention within whole sequences, without a cache; differentiable.

    Args:
      params: at least kv_norm [D] and sinks [H].
      q: floating[B, T, H, D], queries before norm and rotation.
      latents: floating[B, T, D], rows before norm and rotation.
      rotation: cosines and sines at meta.positions, float32[B, T, R / 2] each.
      meta: positions and segments.
      config: the layer's configuration.
      extra: a compressed cache in the same softmax; its rows are constants.
      round_trip: whether rows go through their format and back, as they do in a cache; gradients
        pass straight through.

    Returns:
      The heads' outputs, rotated back, in q's dtype[B, T, H, D].
    """
    row = transform_latents(latents, params["kv_norm"], rotation, config)
    if round_trip:
        row = _round_trip(row, config)
    old = ((0, 0), (config.window - 1, 0))
    rows = jnp.pad(row, (*old, (0, 0)))
    segments = jnp.pad(meta.segment_ids, old, constant_values=-1)
    return attend_band(q, rotation, rows, segments, params["sinks"], extra, config)


def _project(x: Float[Array, "*n i"], kernel: Float[Array, "o i"]) -> Float[Array, "*n o"]:
    return jnp.einsum("...i,oi->...o", x, kernel.astype(x.dtype))


def _round_trip(row: Float32[Array, "b t d"], config: AttentionConfig) -> Float32[Array, "b t d"]:
    """The rows after their format and back; the gradient of the identity."""

    @jax.custom_jvp
    def through(row):
        return dequantize_rows(quantize_rows(row, config.fmt, config.scale_floor), config.fmt)

    through.defjvp(lambda primals, tangents: (through(*primals), *tangents))
    return through(row)


def _check_params(params, config: AttentionConfig) -> None:
    shapes = parameter_shapes(config)
    missing = sorted(set(shapes) - set(params))
    if missing:
        raise ValueError(f"params: expected {sorted(shapes)}, got none of {missing}")
    for name, shape in shapes.items():
        checks.check_shape(f"params[{name!r}]", params[name], shape)
