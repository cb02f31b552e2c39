"""Attention of consecutive queries over consecutive rows within a window, block by block."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, Shaped

from pallas_kernels.softmax import attend, round_to

# Scores that are alive at once, in values: what a core's cache and the memory bound allow.
_GROUP_SCORES = 2**21


def in_groups(
    function: Callable[..., Any],
    queries: Sequence[Shaped[Array, "b t ..."]],
    rows: Float32[Array, "b kt d"],
    segments: Int32[Array, "b kt"],
    *,
    window: int,
    heads: int,
) -> Any:
    """Runs a function of queries and their rows on so many queries at once that memory is bounded.

    What the function does before and after attention so needs memory for one group of queries, and
    not for all.

    Args:
      function: of queries [B, t, ...], rows float32[B, W - 1 + t, D] and their segments
        int32[B, W - 1 + t]; its results are arrays [B, t, ...]. It treats each query on its own.
      queries: arrays [B, T, ...], whatever belongs to a query. Query t belongs to row W - 1 + t.
      rows: float32[B, W - 1 + T, D], W - 1 old rows, then T new ones.
      segments: int32[B, W - 1 + T], each row's segment; -1 for a row that nobody sees.
      window: W.
      heads: H.

    Returns:
      The function's results for all queries, [B, T, ...].
    """
    batch, tokens = queries[0].shape[:2]
    size = min(_block_size(window), tokens)
    blocks = -(-tokens // size)
    groups = _groups(blocks, batch * heads * size * (size + _behind(window, size)))
    if groups == 1:
        return function(queries, rows, segments)
    length = -(-blocks // groups) * size
    back = groups * length - tokens

    def split(x, overlap):
        """[B, overlap + T, ...] as [groups, B, overlap + length, ...]."""
        # Rows that are added stand after all queries, which do not see them.
        x = jnp.pad(x, ((0, 0), (0, back), *((0, 0),) * (x.ndim - 2)))
        if batch == 1 and not overlap:  # no copy
            return x.reshape(groups, 1, length, *x.shape[2:])
        starts = range(0, groups * length, length)
        return jnp.stack([x[:, start : start + overlap + length] for start in starts])

    inputs = [split(x, 0) for x in queries], split(rows, window - 1), split(segments, window - 1)
    results = lax.map(lambda group: function(*group), inputs)

    def join(x):
        return jnp.moveaxis(x, 0, 1).reshape(batch, -1, *x.shape[3:])[:, :tokens]

    return jax.tree.map(join, results)


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
    tokens = q.shape[1]
    size = min(_block_size(window), tokens)
    front, back = _behind(window, size) - (window - 1), -tokens % size

    rows, nan = finite_rows(rows, q.dtype)
    query = jnp.pad(q.astype(jnp.float32), ((0, 0), (0, back), (0, 0), (0, 0)))
    own = jnp.pad(segments[:, window - 1 :], ((0, 0), (0, back)), constant_values=-1)
    rows = jnp.pad(rows, ((0, 0), (front, back), (0, 0)))
    segments = jnp.pad(segments, ((0, 0), (front, back)), constant_values=-1)
    nan = jnp.pad(nan, ((0, 0), (front, back)))
    out, lse = _blocks(query, own, rows, segments, nan, size, window, sink, scale, q.dtype)
    return out[:, :tokens], lse[:, :tokens]


def _blocks(query, own, rows, segments, nan, size, window, sink, scale, compute_dtype):
    """The attention of whole blocks, all at once."""
    batch, length, heads, width = query.shape
    blocks, behind = length // size, rows.shape[1] - length

    def spread(x):
        """Every block's rows, those before it first: [B * blocks, behind + size, ...]."""
        parts = x.reshape(batch, -1, size, *x.shape[2:])
        shifted = [parts[:, i : i + blocks] for i in range(behind // size + 1)]
        return jnp.concatenate(shifted, axis=2).reshape(batch * blocks, -1, *x.shape[2:])

    query = query.reshape(batch * blocks, size, heads, width)
    own = own.reshape(batch * blocks, 1, size)
    segments = spread(segments)[..., None]
    visible = in_window(size, behind, window) & (segments == own) & (segments >= 0)
    out, lse = attend_visible(query, spread(rows), spread(nan), visible, sink, scale, compute_dtype)
    return out.reshape(batch, length, heads, width), lse.reshape(batch, length, heads)


def in_window(tokens: int, behind: int, window: int) -> Bool[Array, "1 k t"]:
    """Which of `behind` old rows and then each token's own a token sees: bool[1, k, t]."""
    distance = np.arange(tokens)[None, :] + behind - np.arange(behind + tokens)[:, None]
    return jnp.asarray((distance >= 0) & (distance < window))[None]


def attend_visible(
    query: Float32[Array, "n t h d"],
    rows: Float32[Array, "n k d"],
    nan: Bool[Array, "n k"],
    visible: Bool[Array, "n k t"],
    sink: Float32[Array, " h"],
    scale: Float32[Array, ""],
    compute_dtype: jnp.dtype,
) -> tuple[Float32[Array, "n t h d"], Float32[Array, "n t h"]]:
    """Attention of several queries over the same rows, each over those that it sees.

    Args:
      query: float32[n, t, h, d].
      rows: float32[n, k, d], key and value at once, finite.
      nan: bool[n, k], rows that stand for NaN: whoever sees one gets NaN.
      visible: bool[n, k, t].
      sink: float32[h].
      scale: of the scores.
      compute_dtype: see `pallas_kernels.softmax.attend`.

    Returns:
      float32[n, t, h, d] and lse float32[n, t, h], as `attend`.
    """
    n, tokens, heads, width = query.shape
    out, lse = attend(
        query.reshape(n, tokens * heads, width),
        [(rows, jnp.repeat(visible, heads, axis=2))],
        jnp.tile(sink, tokens),
        scale,
        compute_dtype,
    )
    sees_nan = jnp.any(visible & nan[..., None], axis=1)[..., None, None]
    out = jnp.where(sees_nan, jnp.float32(jnp.nan), out.reshape(query.shape))
    return out, lse.reshape(n, tokens, heads)


def finite_rows(
    rows: Float32[Array, "n k d"], compute_dtype: jnp.dtype
) -> tuple[Float32[Array, "n k d"], Bool[Array, "n k"]]:
    """Rows in the compute dtype's numbers, zeros for those not finite, and which those are.

    Such a row would reach queries that do not see it through the product with its zero probability,
    so it is taken out here, and `attend_visible` puts it back as NaN by selection. Rows are stored
    as numbers or as NaN, but what stands in free bytes may decode to infinities as well.
    """
    rows = round_to(rows, compute_dtype)
    bad = ~jnp.all(jnp.isfinite(rows), axis=-1)
    return jnp.where(bad[..., None], jnp.float32(0), rows), bad


def _block_size(window: int) -> int:
    """Queries in a block: few scores are computed in vain, and products stay large."""
    return 64 if window > 32 else 16


def _behind(window: int, size: int) -> int:
    """Old rows of a block, a whole number of blocks."""
    return -(-window // size) * size


def _groups(blocks: int, scores: int) -> int:
    """How many groups of one size blocks with so many scores each are split into."""
    least = -(-blocks // max(1, _GROUP_SCORES // scores))
    # Where a few groups more divide the blocks, none is padded, and so no queries are copied.
    even = (groups for groups in range(least, 2 * least) if blocks % groups == 0)
    return next(even, least)
