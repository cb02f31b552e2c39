"""The softmax over decoded rows, with a sink: one definition for every XLA path."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32


def attend(
    query: Float32[Array, "n h d"],
    read: Sequence[tuple[Float32[Array, "n _k d"], Bool[Array, "n _k #h"]]],
    sink: Float32[Array, " h"],
    scale: Float32[Array, ""],
    compute_dtype: jnp.dtype,
) -> tuple[Float32[Array, "n h d"], Float32[Array, "n h"]]:
    """Attention over rows that are key and value at once, of one or more caches.

    Args:
      query: float32[n, h, d].
      read: for each cache the decoded rows, float32[n, k, d], and which of them count,
        bool[n, k, h] or bool[n, k, 1]. A row that counts for nobody holds finite numbers.
      sink: float32[h]; exp(sink) joins the denominator only.
      scale: of the scores.
      compute_dtype: probabilities are rounded to it for the product with the values; the
        denominator sums the unrounded ones.

    Returns:
      out float32[n, h, d], 0 where nothing counts; lse float32[n, h], natural, without the sink,
      -inf where nothing counts.
    """
    # As XLA multiplies fastest on CPUs: scores of one n as [n, h, k], of several as [n, k, h].
    axis, layout = (1, "nkh") if query.shape[0] > 1 else (2, "nhk")
    exact = lax.Precision.HIGHEST
    scores = [
        jnp.where(
            counts if axis == 1 else jnp.swapaxes(counts, 1, 2),
            jnp.einsum(f"nkd,nhd->{layout}", rows, query, precision=exact) * scale,
            -jnp.inf,
        )
        for rows, counts in read
    ]
    peak = jnp.max(jnp.concatenate(scores, axis=axis), axis=axis, initial=-jnp.inf)
    finite_peak = lax.stop_gradient(jnp.where(peak == -jnp.inf, jnp.float32(0), peak))
    masses = [jnp.exp(score - jnp.expand_dims(finite_peak, axis)) for score in scores]
    total = sum(jnp.sum(mass, axis=axis) for mass in masses)
    empty = total == 0
    lse = finite_peak + jnp.log(jnp.where(empty, jnp.float32(1), total))
    # total / (total + exp(sink - peak)), from a difference of logarithms that cannot overflow.
    kept = jax.nn.sigmoid(lse - sink[None, :]) / jnp.where(empty, jnp.float32(1), total)
    kept = jnp.expand_dims(jnp.where(empty, jnp.float32(0), kept), axis)
    out = jnp.zeros_like(query)
    for mass, (rows, _) in zip(masses, read, strict=True):
        weights = round_to(mass, compute_dtype) * kept
        out += jnp.einsum(f"{layout},nkd->nhd", weights, rows, precision=exact)
    return out, jnp.where(empty, -jnp.inf, lse)


def merge(
    parts: Sequence[tuple[Float32[Array, "*n d"], Float32[Array, "*n"]]],
    sink: Float32[Array, "*#n"],
) -> Float32[Array, "*n d"]:
    """The softmax over several sets of rows, out of the softmax over each.

    Args:
      parts: out float32[..., d] and lse float32[...] of each set, without a sink.
      sink: float32, broadcast to lse; exp(sink) joins the denominator only.

    Returns:
      float32[..., d], 0 where no set has a row that counts.
    """
    peak = functools.reduce(jnp.maximum, [lse for _, lse in parts])
    empty = peak == -jnp.inf
    base = lax.stop_gradient(jnp.where(empty, jnp.float32(0), peak))
    masses = [jnp.exp(lse - base) for _, lse in parts]
    total = jnp.where(empty, jnp.float32(1), sum(masses))
    sink = jnp.broadcast_to(sink, total.shape)
    kept = jax.nn.sigmoid(base + jnp.log(total) - sink) / total
    kept = jnp.where(empty, jnp.float32(0), kept)
    weighted = [out * mass[..., None] for (out, _), mass in zip(parts, masses, strict=True)]
    return functools.reduce(jnp.add, weighted) * kept[..., None]


def round_to(x: Float[Array, "*s"], dtype: jnp.dtype) -> Float32[Array, "*s"]:
    """Float32 values rounded to what `dtype` holds."""
    info = jnp.finfo(dtype)
    if info.nmant >= 23:
        return x.astype(jnp.float32)
    return lax.reduce_precision(x.astype(jnp.float32), info.nexp, info.nmant)
