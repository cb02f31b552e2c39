"""Attention of consecutive queries over consecutive rows within a window, block by block."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.softmax import attend, round_to

# Scores that are alive at once, in values: what a core's cache and the memory bound allow.
_GROUP_SCORES = 2**21


def window_attention(
    q: Float[Array, "b t h d"],
    rows: Float32[Array, "b kt d"],
    segments: Int32[Array, "b kt"],
    *,
    window: int,
    sink: Float32[Array, " h"],
    scale: Float32[Array, ""],
) -> tuple[Float32[Array, "b t h d"], Float32[Array, "b t h"]]:
    """Each query attends to the W rows that end with its own, as far as they are of its segment.

    Args:
      q: floating[B, T, H, D]. Query t belongs to row W - 1 + t.
      rows: float32[B, W - 1 + T, D], key and value at once: W - 1 old rows, then T new ones.
      segments: int32[B, W - 1 + T], each row's segment; -1 for a row that nobody sees.
      window: W.
      sink: float32[H].
      scale: of the scores.

    Returns:
      float32[B, T, H, D], 0 where a query sees nothing; and float32[B, T, H], the natural log of
      the sum of exponentials without the sink, -inf there. A row that is NaN reaches exactly the
      queries that see it.
    """
    batch, tokens, heads, width = q.shape
    size = min(_block_size(window), tokens)
    behind = -(-window // size) * size  # old rows of a block, a whole number of blocks
    blocks = -(-tokens // size)
    per_group = max(1, _GROUP_SCORES // (batch * heads * size * (size + behind)))
    groups = -(-blocks // per_group)
    per_group = -(-blocks // groups)  # groups of one size, as full as can be
    padded = groups * per_group * size
    front, back = behind - (window - 1), padded - tokens

    nan = jnp.any(jnp.isnan(rows), axis=-1)
    # A NaN row would reach queries that do not see it through the product with its zero
    # probability, so it is taken out here and put back by selection.
    rows = round_to(jnp.where(nan[..., None], jnp.float32(0), rows), q.dtype)
    query = jnp.pad(q.astype(jnp.float32), ((0, 0), (0, back), (0, 0), (0, 0)))
    own = jnp.pad(segments[:, window - 1 :], ((0, 0), (0, back)), constant_values=-1)
    rows = jnp.pad(rows, ((0, 0), (front, back), (0, 0)))
    segments = jnp.pad(segments, ((0, 0), (front, back)), constant_values=-1)
    nan = jnp.pad(nan, ((0, 0), (front, back)))

    length = per_group * size

    def split(x, overlap):
        """[B, overlap + padded, ...] as [groups, B, overlap + length, ...]."""
        starts = range(0, padded, length)
        return jnp.stack([x[:, start : start + overlap + length] for start in starts])

    def group(args):
        query, own, rows, segments, nan = args
        return _blocks(query, own, rows, segments, nan, size, window, sink, scale, q.dtype)

    inputs = [split(query, 0), split(own, 0)]
    inputs += [split(x, behind) for x in (rows, segments, nan)]
    if groups == 1:
        out, lse = group([x[0] for x in inputs])
    else:
        out, lse = (jnp.moveaxis(x, 0, 1) for x in lax.map(group, inputs))
        out, lse = (x.reshape(batch, padded, *x.shape[3:]) for x in (out, lse))
    return out[:, :tokens], lse[:, :tokens]


def _blocks(query, own, rows, segments, nan, size, window, sink, scale, compute_dtype):
    """The attention of one group of blocks, all at once."""
    batch, length, heads, width = query.shape
    blocks, behind = length // size, rows.shape[1] - length

    def spread(x):
        """Every block's rows, those before it first: [B * blocks, behind + size, ...]."""
        parts = x.reshape(batch, -1, size, *x.shape[2:])
        shifted = [parts[:, i : i + blocks] for i in range(behind // size + 1)]
        return jnp.concatenate(shifted, axis=2).reshape(batch * blocks, -1, *x.shape[2:])

    query = query.reshape(batch * blocks, size * heads, width)
    own = own.reshape(batch * blocks, 1, size)
    segments, nan = spread(segments)[..., None], spread(nan)[..., None]
    distance = np.arange(size)[None, :] + behind - np.arange(behind + size)[:, None]
    in_window = jnp.asarray((distance >= 0) & (distance < window))[None]
    visible = in_window & (segments == own) & (segments >= 0)
    counts = jnp.repeat(visible, heads, axis=2)
    out, lse = attend(query, [(spread(rows), counts)], jnp.tile(sink, size), scale, compute_dtype)
    sees_nan = jnp.any(visible & nan, axis=1).reshape(batch, length, 1)
    out = out.reshape(batch, length, heads, width)
    out = jnp.where(sees_nan[..., None], jnp.float32(jnp.nan), out)
    return out, lse.reshape(batch, length, heads)


def _block_size(window: int) -> int:
    """Queries in a block: few scores are computed in vain, and products stay large."""
    return 64 if window > 32 else 16
