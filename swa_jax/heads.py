"""What happens to queries before attention and to the heads' outputs after it."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels import KVRows, indexed_attention, transforms
from pallas_kernels.dispatch import Implementation
from swa_jax.config import AttentionConfig

Rotation = tuple[Float32[Array, "b t half"], Float32[Array, "b t half"]]


def prepare_queries(
    q: Float[Array, "b t h d"], rotation: Rotation, config: AttentionConfig
) -> Float[Array, "b t h d"]:
    """Norm, rotation and Hadamard transform of the queries, in q's dtype."""
    cos, sin = (angle[:, :, None, :] for angle in rotation)
    query = q.astype(jnp.float32)
    if config.query_norm:
        query = transforms.rms_norm(query, None, config.norm_eps)
    query = transforms.rope(query, cos, sin, config.pairing)
    if config.hadamard:
        query = transforms.hadamard(query)
    return query.astype(q.dtype)


def finish(
    out: Float32[Array, "b t h d"], rotation: Rotation, config: AttentionConfig, dtype: jnp.dtype
) -> Float[Array, "b t h d"]:
    """Undoes the Hadamard transform and the rotation of the heads' outputs."""
    cos, sin = (angle[:, :, None, :] for angle in rotation)
    if config.hadamard:
        out = transforms.hadamard(out)
    return transforms.rope(out, cos, sin, config.pairing, inverse=True).astype(dtype)


def attend_indexed(
    q: Float[Array, "b t h d"],
    rotation: Rotation,
    rows: KVRows,
    indices: Array,
    sink: Float[Array, " h"],
    config: AttentionConfig,
    implementation: Implementation,
) -> Float[Array, "b t h d"]:
    """Attention of raw queries over the rows that indices name, rotated back, in q's dtype.

    Args:
      q: queries before norm and rotation.
      rotation: cosines and sines at their positions.
      rows: the cache.
      indices: int32[B * T, K].
      sink: per head.
      config: the layer's configuration.
      implementation: of `indexed_attention`.
    """
    count = indices.shape[0]
    if config.hadamard:  # the transform stands between the rotation and the dot products
        queries = prepare_queries(q, rotation, config).reshape(count, *q.shape[2:])
        out, _ = indexed_attention(queries, rows, indices, sink=sink, implementation=implementation)
        return finish(out.reshape(q.shape).astype(jnp.float32), rotation, config, q.dtype)
    cos, sin = (angle.reshape(count, -1) for angle in rotation)
    out, _ = indexed_attention(
        q.reshape(count, *q.shape[2:]),
        rows,
        indices,
        sink=sink,
        query_norm_eps=config.norm_eps if config.query_norm else None,
        cos=cos,
        sin=sin,
        pairing=config.pairing,
        implementation=implementation,
    )
    return out.reshape(q.shape)
