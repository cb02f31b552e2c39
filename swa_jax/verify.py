"""Attention of a step of several tokens: a verify step, or a few tokens of a prompt.

Where kernels run, each query gathers its window by index. Elsewhere the windows of a request's
queries, which differ in a row or two, are gathered and decoded once.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels import KVRows, dequantize_rows, load_rows
from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.storage import gather_rows, is_valid_index
from swa_jax.band import attend_visible, finite_rows, in_window
from swa_jax.config import AttentionConfig
from swa_jax.heads import (
    Rotation,
    attend_band,
    attend_indexed,
    finish,
    indexed_refusal,
    prepare_queries,
)
from swa_jax.metadata import DecodeMetadata

# Tokens whose scores are computed in one piece. Those of more are mostly outside of the window.
_TOKENS = 64
# Requests at once: memory for decoded rows does not grow with the batch.
_REQUESTS = 8


def verify_attention(
    q: Float[Array, "b t h d"],
    rows: KVRows,
    meta: DecodeMetadata,
    sink: Float[Array, " h"],
    rotation: Rotation,
    config: AttentionConfig,
    implementation: Implementation = None,
) -> Float[Array, "b t h d"]:
    """Each query attends to the rows of its window, which are stored already.

    Args:
      q: floating[B, T, H, D], queries before norm and rotation.
      rows: the layer's view of the cache, with the rows of this step.
      meta: addresses of the step.
      sink: floating[H].
      rotation: cosines and sines at the queries' positions.
      config: the layer's configuration.
      implementation: None, "xla", "triton" or "interpret".

    Returns:
      q's dtype[B, T, H, D], rotated back; 0 where a query sees nothing.

    Raises:
      NotImplementedError: the implementation named cannot do it.
    """
    return _OPERATION(implementation, q, rows, meta, sink, *rotation, config=config)


def _by_band(q, rows, meta, sink, cos, sin, *, config: AttentionConfig):
    def group(inputs):
        q, slots, cos, sin = inputs
        if q.shape[1] <= _TOKENS:
            return _attend_band(q, rows, slots, sink, (cos, sin), config)
        decoded = dequantize_rows(load_rows(rows, slots), rows.fmt)
        segments = jnp.where(slots >= 0, jnp.int32(0), jnp.int32(-1))
        return attend_band(q, (cos, sin), decoded, segments, sink, None, config)

    inputs = (q, _band_slots(meta), cos, sin)
    batch = q.shape[0]
    if batch <= _REQUESTS:
        return group(inputs)
    groups = -(-batch // _REQUESTS)
    missing = groups * _REQUESTS - batch

    def split(x):
        """[groups, _REQUESTS, ...]; the requests added read slot 0, and nobody reads them."""
        x = jnp.pad(x, ((0, missing), *((0, 0),) * (x.ndim - 1)))
        return x.reshape(groups, _REQUESTS, *x.shape[1:])

    out = lax.map(group, jax.tree.map(split, inputs))
    return out.reshape(-1, *out.shape[2:])[:batch]


def _attend_band(
    q: Float[Array, "b t h d"],
    rows: KVRows,
    slots: Int32[Array, "b kt"],
    sink: Float[Array, " h"],
    rotation: Rotation,
    config: AttentionConfig,
) -> Float[Array, "b t h d"]:
    """Query t sees the rows of slots t to t + W - 1, as far as there are any; of a few queries."""
    valid = is_valid_index(rows, slots)
    # Row 0 stands in for none. Decoded once: CPUs would do it again for each use.
    decoded = lax.optimization_barrier(
        dequantize_rows(gather_rows(rows, jnp.where(valid, slots, 0)), rows.fmt)
    )
    decoded, nan = finite_rows(decoded, q.dtype)
    behind = config.window - 1
    real = valid[:, None, behind:]  # padding has no row, and sees none
    visible = in_window(q.shape[1], behind, config.window) & valid[..., None] & real
    out, _ = attend_visible(
        prepare_queries(q, rotation, config).astype(jnp.float32),
        decoded,
        nan,
        visible,
        sink.astype(jnp.float32),
        jnp.float32(config.head_dim**-0.5),
        q.dtype,
    )
    return finish(out, rotation, config, q.dtype)


def _by_index(
    q, rows, meta, sink, cos, sin, *, config: AttentionConfig, card: str, interpret: bool
):
    del card  # the operation inside asks for itself
    implementation = "interpret" if interpret else "triton"
    return attend_indexed(q, (cos, sin), rows, meta.indices, sink, None, config, implementation)


def _band_slots(meta: DecodeMetadata) -> Int32[Array, "b kt"]:
    """The slots of the W - 1 positions before each request's first one, and of its T own."""
    batch, tokens = meta.positions.shape
    window = meta.geometry.window
    # The first query's window has its oldest row first: moved to the end, its own row is last.
    first = meta.indices.reshape(batch, tokens, window)[:, 0]
    missing = jnp.maximum(window - 1 - meta.positions[:, :1], 0)
    column = jnp.arange(window - 1, dtype=jnp.int32)[None, :] - missing
    before = jnp.take_along_axis(first, jnp.clip(column, 0, window - 1), axis=1)
    before = jnp.where(column >= 0, before, -1)
    return jnp.concatenate([before, meta.slots.reshape(batch, tokens)], axis=1)


def _refusal(q, rows, meta, sink, cos, sin, *, config: AttentionConfig) -> str | None:
    return indexed_refusal(q, (cos, sin), rows, meta.indices, sink, None, config)


_OPERATION = Operation("verify_attention", _by_band, _by_index, _refusal)
