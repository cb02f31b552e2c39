"""What happens to queries before attention and to the heads' outputs after it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Shaped

from pallas_kernels import ExtraKV, KVRows, indexed_attention, transforms
from pallas_kernels.dispatch import Implementation
from pallas_kernels.indexed_attention import OPERATION
from pallas_kernels.softmax import merge
from swa_jax.band import in_groups, window_attention
from swa_jax.config import AttentionConfig

Rotation = tuple[Float32[Array, "b t half"], Float32[Array, "b t half"]]


def by_query(*arrays: Shaped[Array, "b t ..."]) -> list[Shaped[Array, "bt ..."]]:
    """[B * T, ...] of arrays [B, T, ...], empty ones too, as angles of no rotation are."""
    return [array.reshape(array.shape[0] * array.shape[1], *array.shape[2:]) for array in arrays]


def prepare_queries(
    q: Float[Array, "b t h d"], rotation: Rotation, config: AttentionConfig
) -> Float[Array, "b t h d"]:
    """Norm, rotation and Hadamard transform of the queries.

    Args:
      q: floating[B, T, H, D].
      rotation: cosines and sines at their positions, float32[B, T, R / 2] each.
      config: the layer's configuration.

    Returns:
      q's dtype[B, T, H, D].
    """
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
    """Undoes the Hadamard transform and the rotation of the heads' outputs.

    Args:
      out: float32[B, T, H, D].
      rotation: cosines and sines at the queries' positions, float32[B, T, R / 2] each.
      config: the layer's configuration.
      dtype: of the result.

    Returns:
      dtype[B, T, H, D].
    """
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
    extra: ExtraKV | None,
    config: AttentionConfig,
    implementation: Implementation,
) -> Float[Array, "b t h d"]:
    """Attention of raw queries over the rows that indices name.

    Args:
      q: floating[B, T, H, D], queries before norm and rotation.
      rotation: cosines and sines at their positions, float32[B, T, R / 2] each.
      rows: the layer's view of the cache.
      indices: int32[B * T, K], -1 for none.
      sink: floating[H].
      extra: a compressed cache in the same softmax, its indices [B * T, K]; or None.
      config: the layer's configuration.
      implementation: of `indexed_attention`.

    Returns:
      q's dtype[B, T, H, D], rotated back; 0 where a query sees nothing.

    Raises:
      NotImplementedError: the implementation named cannot do it.
    """
    if config.hadamard:  # the transform stands between the rotation and the dot products
        [queries] = by_query(prepare_queries(q, rotation, config))
        out, _ = indexed_attention(
            queries, rows, indices, extra=extra, sink=sink, implementation=implementation
        )
        return finish(out.reshape(q.shape).astype(jnp.float32), rotation, config, q.dtype)
    queries, cos, sin = by_query(q, *rotation)
    out, _ = indexed_attention(
        queries,
        rows,
        indices,
        extra=extra,
        sink=sink,
        query_norm_eps=config.norm_eps if config.query_norm else None,
        cos=cos,
        sin=sin,
        pairing=config.pairing,
        implementation=implementation,
    )
    return out.reshape(q.shape)


def indexed_refusal(q, rotation, rows, indices, sink, extra, config: AttentionConfig) -> str | None:
    """Why a kernel cannot do `attend_indexed`; None where it can.

    Args:
      q: floating[B, T, H, D], as of `attend_indexed`, or its shape, and so are the others.
      rotation: float32[B, T, R / 2] each.
      rows: the cache.
      indices: int32[B * T, K].
      sink: floating[H].
      extra: a compressed cache, or None.
      config: the layer's configuration.
    """
    queries, angle = jax.eval_shape(by_query, q, rotation[0])
    angle = None if config.hadamard else angle
    return OPERATION.refusal(
        queries, rows, indices, None, extra, sink, None, angle, angle,
        query_norm_eps=None, pairing=config.pairing, output_format=None,
    )  # fmt: skip


def attend_band(
    q: Float[Array, "b t h d"],
    rotation: Rotation,
    rows: Float32[Array, "b kt d"],
    segments: Int32[Array, "b kt"],
    sink: Float[Array, " h"],
    extra: ExtraKV | None,
    config: AttentionConfig,
) -> Float[Array, "b t h d"]:
    """Attention of raw queries over consecutive rows within the window.

    Args:
      q: floating[B, T, H, D], queries before norm and rotation. Query t belongs to row W - 1 + t.
      rotation: cosines and sines at their positions, float32[B, T, R / 2] each.
      rows: float32[B, W - 1 + T, D], W - 1 old rows, then T new ones, decoded.
      segments: int32[B, W - 1 + T], each row's segment; a query sees rows of its own; -1 for a row
        that nobody sees.
      sink: floating[H].
      extra: a compressed cache in the same softmax, its indices [B * T, K]; or None.
      config: the layer's configuration.

    Returns:
      q's dtype[B, T, H, D], rotated back; 0 where a query sees nothing.
    """
    sink = sink.astype(jnp.float32)

    def attend(queries, rows, segments):
        q, cos, sin = queries
        rotation = cos, sin
        out, lse = window_attention(
            prepare_queries(q, rotation, config),
            rows,
            segments,
            window=config.window,
            sink=sink if extra is None else jnp.full_like(sink, -jnp.inf),
            scale=jnp.float32(config.head_dim**-0.5),
        )
        return finish(out, rotation, config, q.dtype) if extra is None else (out, lse)

    found = in_groups(
        attend, (q, *rotation), rows, segments, window=config.window, heads=q.shape[2]
    )
    if extra is None:
        return found
    [queries] = by_query(prepare_queries(q, rotation, config).astype(jnp.float32))
    more = indexed_attention(
        queries,
        extra.rows,
        extra.indices,
        lengths=extra.lengths,
        implementation="xla",
    )
    parts = [found, tuple(x.reshape(*q.shape[:2], *x.shape[1:]) for x in more)]
    return finish(merge(parts, sink), rotation, config, q.dtype)
