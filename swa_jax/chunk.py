"""A prefill chunk: the bytes of its rows, and attention over them and the rows before them.

Where kernels run, rows are made by the fused store and each query gathers its window by index;
elsewhere rows are cast as they are, and the band of the window is computed in blocks.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt8

from pallas_kernels import ExtraKV, KVRows, dequantize_rows, quantize_rows
from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.fused_store import OPERATION as FUSED_STORE
from swa_jax.config import AttentionConfig
from swa_jax.heads import Rotation, attend_band, attend_indexed, by_query, indexed_refusal
from swa_jax.latents import store_latents, transform_latents


def chunk_rows(
    latents: Float[Array, "b t d"],
    norm_weight: Float[Array, " d"],
    rotation: Rotation,
    config: AttentionConfig,
    implementation: Implementation = None,
) -> UInt8[Array, "b t row_bytes"]:
    """The bytes of a chunk's rows: norm, rotation, Hadamard transform and cast.

    Args:
      latents: floating[B, T, D], rows before norm and rotation.
      norm_weight: floating[D].
      rotation: cosines and sines at their positions.
      config: the layer's configuration.
      implementation: None, "xla", "triton" or "interpret".

    Returns:
      uint8[B, T, row_bytes].

    Raises:
      NotImplementedError: the implementation named cannot do it.
    """
    return _ROWS(implementation, latents, norm_weight, *rotation, config=config)


def chunk_attention(
    q: Float[Array, "b t h d"],
    data: UInt8[Array, "b kt row_bytes"],
    segments: Int32[Array, "b kt"],
    sink: Float[Array, " h"],
    rotation: Rotation,
    extra: ExtraKV | None,
    config: AttentionConfig,
    implementation: Implementation = None,
) -> Float[Array, "b t h d"]:
    """Each query attends to the W rows that end with its own, and to those of a second cache.

    Args:
      q: floating[B, T, H, D], queries before norm and rotation. Query t belongs to row W - 1 + t.
      data: uint8[B, W - 1 + T, row_bytes], W - 1 old rows, then T new ones.
      segments: int32[B, W - 1 + T], 0, or -1 for a row that nobody sees.
      sink: floating[H].
      rotation: cosines and sines at the queries' positions.
      extra: a compressed cache in the same softmax, its indices [B * T, K]; or None.
      config: the layer's configuration.
      implementation: None, "xla", "triton" or "interpret".

    Returns:
      q's dtype[B, T, H, D], rotated back; 0 where a query sees nothing.

    Raises:
      NotImplementedError: the implementation named cannot do it.
    """
    return _ATTENTION(implementation, q, data, segments, sink, *rotation, extra, config=config)


def _cast(latents, norm_weight, cos, sin, *, config: AttentionConfig):
    row = transform_latents(latents, norm_weight, (cos, sin), config)
    return quantize_rows(row, config.fmt, config.scale_floor)


def _cast_by_store(
    latents, norm_weight, cos, sin, *, config: AttentionConfig, card: str, interpret: bool
):
    del card  # the operation inside asks for itself
    room = _room(latents, config)
    slots = jnp.arange(room.num_rows, dtype=jnp.int32)
    implementation = "interpret" if interpret else "triton"
    rows = store_latents(room, latents, slots, norm_weight, (cos, sin), config, implementation)
    return rows.data.reshape(*latents.shape[:2], -1)


def _room(latents, config: AttentionConfig) -> KVRows:
    """Room for each row of a chunk."""
    size = latents.shape[0] * latents.shape[1], config.fmt.row_bytes
    return KVRows.view(jnp.zeros(size, jnp.uint8), start=0, rows_per_slot=1, fmt=config.fmt)


def _cast_refusal(latents, norm_weight, cos, sin, *, config: AttentionConfig) -> str | None:
    rows = jax.eval_shape(lambda latents: _room(latents, config), latents)
    new, cos, sin = jax.eval_shape(by_query, latents, cos, sin)
    return FUSED_STORE.refusal(
        rows, new, None, norm_weight, cos, sin, norm_eps=config.norm_eps,
        pairing=config.pairing, hadamard=config.hadamard, scale_floor=config.scale_floor,
    )  # fmt: skip


_ROWS = Operation("prefill_rows", _cast, _cast_by_store, _cast_refusal)


def _by_band(q, data, segments, sink, cos, sin, extra, *, config: AttentionConfig):
    rows = dequantize_rows(data, config.fmt)
    return attend_band(q, (cos, sin), rows, segments, sink, extra, config)


def _by_index(
    q, data, segments, sink, cos, sin, extra, *, config: AttentionConfig, card: str, interpret: bool
):
    del card  # the operation inside asks for itself
    rows, indices = _assemble(data, segments, config)
    implementation = "interpret" if interpret else "triton"
    return attend_indexed(q, (cos, sin), rows, indices, sink, extra, config, implementation)


def _assemble(
    data: UInt8[Array, "b kt row_bytes"], segments: Int32[Array, "b kt"], config: AttentionConfig
) -> tuple[KVRows, Int32[Array, "queries window"]]:
    """The rows as a cache with a slot for each request, and the window of each query in it."""
    batch, count = segments.shape
    tokens = count - (config.window - 1)
    rows = KVRows.view(data.reshape(batch, -1), start=0, rows_per_slot=count, fmt=config.fmt)
    local = jnp.arange(tokens, dtype=jnp.int32)[:, None]
    local = local + jnp.arange(config.window, dtype=jnp.int32)[None, :]
    visible = (segments[:, local] >= 0) & (segments[:, config.window - 1 :, None] >= 0)
    first = count * jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    indices = jnp.where(visible, first + local[None], -1)
    return rows, indices.reshape(batch * tokens, config.window)


def _refusal(q, data, segments, sink, cos, sin, extra, *, config: AttentionConfig) -> str | None:
    rows, indices = jax.eval_shape(lambda d, s: _assemble(d, s, config), data, segments)
    return indexed_refusal(q, (cos, sin), rows, indices, sink, extra, config)


_ATTENTION = Operation("prefill_attention", _by_band, _by_index, _refusal)
