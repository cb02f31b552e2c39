"""The layer and the decoder in float64 NumPy, written from the maths, to hold the library to.

No cache, no blocks, no chunks: a query sees the keys whose positions its window holds.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from swa_jax import AttentionConfig, DecoderConfig


def rms_norm(x: np.ndarray, weight: np.ndarray | float, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotate(x: np.ndarray, positions: np.ndarray, config: AttentionConfig, sign: int) -> np.ndarray:
    """x[T, ..., D], its last rope_dim values rotated by sign * position * frequency."""
    size, start = config.rope_dim, x.shape[-1] - config.rope_dim
    if config.pairing == "interleaved":
        first, second = slice(start, None, 2), slice(start + 1, None, 2)
    else:
        first, second = slice(start, start + size // 2), slice(start + size // 2, None)
    frequencies = np.longdouble(config.rope_theta) ** -(np.arange(0, size, 2) / np.longdouble(size))
    if config.rope_scaling is not None:
        frequencies = _yarn(frequencies, config)
    angles = positions.astype(np.longdouble)[:, None] * frequencies
    turn = np.exp(sign * 1j * angles.astype(np.float64))
    turned = (x[..., first] + 1j * x[..., second]) * np.expand_dims(
        turn, tuple(range(1, x.ndim - 1))
    )
    out = x.copy()
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


def _yarn(plain: np.ndarray, config: AttentionConfig) -> np.ndarray:
    """Peng et al., 2023: frequencies divided where a pair turns seldom in the original context."""
    yarn = config.rope_scaling
    assert yarn is not None

    def pair(turns: float) -> float:
        ratio = yarn.original_max_positions / (2 * np.pi * turns)
        return len(plain) * np.log(ratio) / np.log(config.rope_theta)

    first = max(np.floor(pair(yarn.beta_fast)), 0)
    last = min(np.ceil(pair(yarn.beta_slow)), 2 * len(plain) - 1)
    divided = np.clip((np.arange(len(plain)) - first) / max(last - first, 1e-3), 0, 1)
    return plain * (1 - divided) + plain / yarn.factor * divided


def shared_rows(
    params: Mapping[str, Any], x: np.ndarray, config: AttentionConfig, positions: np.ndarray
) -> np.ndarray:
    """The rows [T, D] that x [T, hidden] gives, unrounded: key and value of every head."""
    kernel, norm = (np.asarray(params[name], np.float64) for name in ("q_a_kv", "kv_norm"))
    latent = np.asarray(x, np.float64) @ kernel[config.q_lora_rank :].T
    return rotate(rms_norm(latent, norm, config.norm_eps), positions, config, +1)


def attention_layer(
    params: Mapping[str, Any],
    x: np.ndarray,
    config: AttentionConfig,
    positions: np.ndarray | None = None,
    rows: np.ndarray | None = None,
    extra: tuple[np.ndarray, np.ndarray] | None = None,
) -> np.ndarray:
    """One sequence through the layer.

    Args:
      params: the layer's parameters.
      x: [T, hidden].
      config: its configuration; row format, dtypes and Hadamard transform play no part.
      positions: [T]; 0 to T - 1 by default.
      rows: [T, D], the rows to attend to; by default those that x gives, unrounded.
      extra: more rows [M, D], and [T, K], which of them each query sees; -1 for none.

    Returns:
      [T, hidden].
    """
    weights = {name: np.asarray(value, np.float64) for name, value in params.items()}
    x = np.asarray(x, np.float64)
    tokens, heads, width = len(x), config.num_heads, config.head_dim
    positions = np.arange(tokens) if positions is None else np.asarray(positions, np.int64)
    query = x @ weights["q_a_kv"][: config.q_lora_rank].T
    query = rms_norm(query, weights["q_a_norm"], config.norm_eps) @ weights["q_b"].T
    query = query.reshape(tokens, heads, width)
    if config.query_norm:
        query = rms_norm(query, 1.0, config.norm_eps)
    query = rotate(query, positions, config, +1)
    if rows is None:
        rows = shared_rows(params, x, config, positions)
    distance = positions[:, None] - positions[None, :]
    visible = (distance >= 0) & (distance < config.window)
    seen = np.broadcast_to(rows, (tokens, *rows.shape))
    if extra is not None:
        more, indices = extra
        seen = np.concatenate([seen, more[np.maximum(indices, 0)]], axis=1)
        visible = np.concatenate([visible, indices >= 0], axis=1)
    scores = np.einsum("thd,tsd->hts", query, seen) * width**-0.5
    scores = np.where(visible, scores, -np.inf)
    sink = weights["sinks"][:, None, None]
    peak = np.maximum(scores.max(-1, keepdims=True), sink)
    mass = np.exp(scores - peak)
    share = mass / (mass.sum(-1, keepdims=True) + np.exp(sink - peak))
    out = rotate(np.einsum("hts,tsd->thd", share, seen), positions, config, -1)
    groups = out.reshape(tokens, config.o_groups, -1)
    o_a = weights["o_a"].reshape(config.o_groups, config.o_lora_rank, -1)
    return np.einsum("tgd,grd->tgr", groups, o_a).reshape(tokens, -1) @ weights["o_b"].T


def decoder(
    params: Mapping[str, Any],
    tokens: np.ndarray,
    config: DecoderConfig,
    rows: np.ndarray | None = None,
) -> np.ndarray:
    """Hidden states of one sequence.

    Args:
      params: the decoder's parameters, its layers not stacked.
      tokens: [T].
      config: its configuration.
      rows: [layers, T, D], the rows of each layer to attend to; by default the layers' own.

    Returns:
      [T, hidden].
    """
    eps = config.layers[0].norm_eps

    def normalised(x, norm):
        return rms_norm(x, np.asarray(norm["weight"], np.float64), eps)

    x = np.asarray(params["embedding"], np.float64)[tokens]
    for i, layer in enumerate(config.layers):
        part = params[f"layers_{i}"]
        layer_rows = None if rows is None else rows[i]
        attended = normalised(x, part["attention_norm"])
        x = x + attention_layer(part["attention"], attended, layer, rows=layer_rows)
        gate, up, down = (np.asarray(part["mlp"][k], np.float64) for k in ("gate", "up", "down"))
        inner = normalised(x, part["mlp_norm"])
        gated = inner @ gate.T
        x = x + (gated / (1 + np.exp(-gated)) * (inner @ up.T)) @ down.T
    return normalised(x, params["norm"])
