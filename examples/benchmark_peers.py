"""What a user of plain JAX would write instead: the peers of the benchmark's operations.

All take one new token of n requests, whose state slots are the first n. A ring of theirs has one
slot for each position modulo its size, as ours has.
"""

import jax
import jax.numpy as jnp
from benchmark_settings import EPS
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt8


def plain_row(latents, weight, cos, sin) -> Float32[Array, "n d"]:
    """RMSNorm and interleaved rotary embedding of the last values, as it is usually written.

    Args:
      latents: floating[n, D].
      weight: float32[D].
      cos: float32[n, R / 2].
      sin: float32[n, R / 2].
    """
    x = latents.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPS) * weight
    rotated = 2 * cos.shape[-1]
    head, a, b = x[:, :-rotated], x[:, -rotated::2], x[:, -rotated + 1 :: 2]
    pairs = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return jnp.concatenate([head, pairs.reshape(len(x), rotated)], axis=-1)


def ring_store(ring: Float[Array, "slots s 1 d"], row, positions: Int32[Array, " n"]):
    """The row of each request's position stored in its ring."""
    requests = jnp.arange(len(row))
    return ring.at[requests, positions % ring.shape[1], 0].set(row.astype(ring.dtype))


def ring_visible(positions: Int32[Array, " n"], capacity: int, window: int) -> Bool[Array, "n s"]:
    """Rows of each ring that are of the window of the request's position."""
    age = (positions[:, None] - jnp.arange(capacity)) % capacity
    return (age < window) & (age <= positions[:, None])


def ring_read(ring: Float[Array, "slots s 1 d"], q: Float32[Array, "n h d"], positions, window):
    """jax.nn.dot_product_attention over whole rings under a mask; the row is key and value."""
    visible = ring_visible(positions, ring.shape[1], window)
    rings = ring[: len(q)].astype(q.dtype)
    out = jax.nn.dot_product_attention(q[:, None], rings, rings, mask=visible[:, None, None, :])
    return out[:, 0]


def naive_quantize(row: Float32[Array, "n d"]) -> UInt8[Array, "n row_bytes"]:
    """A row of e4m3 codes and ue8m0 scales for 32 values each, by casts and logarithms."""
    groups = row.reshape(len(row), -1, 32)
    largest = jnp.maximum(jnp.max(jnp.abs(groups), axis=-1), 1e-4)
    exponent = jnp.ceil(jnp.log2(largest / 448))
    scaled = jnp.clip(groups / jnp.exp2(exponent)[..., None], -448, 448)
    codes = jax.lax.bitcast_convert_type(scaled.astype(jnp.float8_e4m3fn), jnp.uint8)
    scales = (exponent + 127).astype(jnp.uint8)
    return jnp.concatenate([codes.reshape(len(row), -1), scales], axis=-1)


def naive_dequantize(data: UInt8[Array, "*n row_bytes"]) -> Float32[Array, "*n d"]:
    """The numbers of such rows, by casts."""
    width = data.shape[-1] * 32 // 33
    codes = jax.lax.bitcast_convert_type(data[..., :width], jnp.float8_e4m3fn)
    scales = jnp.exp2(data[..., width:].astype(jnp.float32) - 127)
    groups = codes.astype(jnp.float32).reshape(*data.shape[:-1], -1, 32) * scales[..., None]
    return groups.reshape(*data.shape[:-1], width)


def naive_indices(positions, capacity: int, window: int) -> Int32[Array, "n w"]:
    """Rows of the window of each request, -1 before its first token."""
    of_window = positions[:, None] - jnp.arange(window - 1, -1, -1)
    base = jnp.arange(len(positions))[:, None] * capacity
    return jnp.where(of_window >= 0, base + of_window % capacity, -1)


def naive_read(data: UInt8[Array, "rows row_bytes"], q: Float32[Array, "n h d"], indices, sink):
    """Attention over gathered rows of the same bytes as ours, decoded by casts."""
    # A negative index would wrap: the last row, and not none.
    beyond = jnp.where(indices >= 0, indices, len(data))
    rows = naive_dequantize(data.at[beyond].get(mode="fill", fill_value=0))
    scores = jnp.einsum("nhd,nkd->nhk", q, rows) * q.shape[-1] ** -0.5
    scores = jnp.where((indices >= 0)[:, None], scores, -jnp.inf)
    sinks = jnp.broadcast_to(sink[None, :, None], (*scores.shape[:2], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, sinks], axis=-1), axis=-1)
    return jnp.einsum("nhk,nkd->nhd", weights[..., :-1], rows)


def context_store(cache: Float32[Array, "n c 1 d"], row, positions):
    """The row of each request's position stored in a cache of the whole context."""
    return cache.at[jnp.arange(len(row)), positions, 0].set(row)


def context_read(cache: Float32[Array, "n c 1 d"], q: Float32[Array, "n h d"], positions):
    """jax.nn.dot_product_attention over the whole context: full attention and no window."""
    visible = jnp.arange(cache.shape[1]) <= positions[:, None]
    cache = cache.astype(q.dtype)
    out = jax.nn.dot_product_attention(q[:, None], cache, cache, mask=visible[:, None, None, :])
    return out[:, 0]
