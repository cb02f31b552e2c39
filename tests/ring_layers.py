"""One attention layer with its rings, and one whose output says which tokens each query saw."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from small_models import layer_params

import swa_jax as swa
from pallas_kernels import KVRows, dequantize_rows


@functools.cache
def _program(config: swa.AttentionConfig, form: str) -> Callable:
    layer = swa.SlidingWindowAttention(config)

    @jax.jit
    def call(params, rows, x, addresses, extra):
        if form == "decode":
            meta = swa.DecodeMetadata.build(config.geometry, *addresses)
        else:
            meta = swa.PrefillMetadata.build(config.geometry, *addresses, max_tokens=x.shape[1])
        return layer.apply(params, x, rows, meta, extra=extra)

    return call


class RingLayer:
    """A layer, its parameters and the rings of a few requests.

    Attributes:
      config: of the layer.
      params: its variables; those of `small_models` by default.
      rows: the rings, new after each call.
    """

    def __init__(self, config: swa.AttentionConfig, params: Any = None, slots=4, fill=0):
        self.config = config
        self.params = layer_params(config) if params is None else params
        rows = swa.RingCache.create(slots, 1, config.geometry, config.fmt).layer(0)
        self.rows = dataclasses.replace(rows, data=jnp.full_like(rows.data, fill))

    def decode(self, x, state_ids, positions, extra=None) -> np.ndarray:
        """Stores x[B, T] at positions[B, T], reads, and gives y[B, T]."""
        return self._call("decode", x, (np.int32(state_ids), np.int32(positions)), extra)

    def prefill(self, x, state_ids, starts, lengths) -> np.ndarray:
        """A chunk x[B, T] of each request, of which the first tokens are real."""
        addresses = np.int32(state_ids), np.int32(starts), np.int32(lengths)
        return self._call("prefill", x, addresses, None)

    def _call(self, form, x, addresses, extra) -> np.ndarray:
        x = jnp.asarray(x, jnp.float32)
        y, self.rows = _program(self.config, form)(self.params, self.rows, x, addresses, extra)
        return np.asarray(y)

    @property
    def data(self) -> np.ndarray:
        """uint8[slots, S, row_bytes], all rings' rows."""
        return rows_of_rings(self.rows)


@functools.cache
def whole_sequence(config: swa.AttentionConfig) -> Callable:
    """The layer's call without a cache, of its variables and x[B, T]."""
    return jax.jit(swa.SlidingWindowAttention(config).apply)


def rows_of_rings(rows: KVRows) -> np.ndarray:
    """uint8[slots, S, row_bytes]."""
    size = rows.rows_per_slot * rows.fmt.row_bytes
    used = np.asarray(rows.data)[:, int(rows.start) : int(rows.start) + size]
    return used.reshape(len(used), rows.rows_per_slot, rows.fmt.row_bytes)


# --- which tokens a query saw


def show_config(window: int, capacity: int, width: int = 64, **fields: Any) -> swa.AttentionConfig:
    """A layer for `show_params`: one head, no rotation, and rings of `capacity` rows."""
    values = {
        "hidden_size": width,
        "num_heads": 1,
        "head_dim": width,
        "rope_dim": 0,
        "q_lora_rank": 8,
        "o_groups": 1,
        "o_lora_rank": width,
        "window": window,
        "draft_tokens": capacity - window - 1,
        "norm_eps": 1e-12,
        "fmt": swa.V41.with_width(width),
    }
    return swa.AttentionConfig(**values | fields)


def show_params(config: swa.AttentionConfig, sink: float = -np.inf) -> dict[str, Any]:
    """Queries are zero, so all scores are equal; rows and outputs are what the layer is given.

    A query's output is so the mean of the vectors it sees, each 1 in a place of its own.
    """
    width, dtype = config.head_dim, config.param_dtype
    kernel = np.concatenate([np.zeros((config.q_lora_rank, width)), np.eye(width)])
    vectors = {
        "q_a_norm": np.ones(config.q_lora_rank),
        "kv_norm": np.full(width, width**-0.5),
        "sinks": np.full(1, sink),
    }
    matrices = {
        "q_a_kv": kernel,
        "q_b": np.zeros((width, config.q_lora_rank)),
        "o_a": np.eye(width),
        "o_b": np.eye(width),
    }
    params = {name: jnp.asarray(value, jnp.float32) for name, value in vectors.items()}
    return {
        "params": params | {name: jnp.asarray(value, dtype) for name, value in matrices.items()}
    }


class ShowLayer:
    """Rings of tokens that are told apart by tags, numbers below the width: their positions."""

    def __init__(self, window: int, capacity: int, width=64, slots=4, fill=0, **fields: Any):
        self.config = show_config(window, capacity, width, **fields)
        self.layer = RingLayer(self.config, show_params(self.config), slots, fill)

    def decode(self, positions, tags=None, state_ids=(0,), extra=None) -> list[list[set[int]]]:
        """The tags that each query of a step sees."""
        tags = positions if tags is None else tags
        return seen(self.layer.decode(self.unit(tags), state_ids, positions, extra))

    def prefill(
        self, starts, lengths, tokens: int, tags=None, state_ids=(0,)
    ) -> list[list[set[int]]]:
        """The tags that each query of a chunk sees; padding is the last unit vector."""
        token = np.arange(tokens)
        if tags is None:
            real = token < np.asarray(lengths)[:, None]
            tags = np.where(real, np.asarray(starts)[:, None] + token, -1)
        return seen(self.layer.prefill(self.unit(tags), state_ids, starts, lengths))

    def unit(self, tags) -> np.ndarray:
        """Vectors with 1 at a tag and 0 elsewhere. Tag -1, of padding, is the last place."""
        return np.eye(self.config.head_dim, dtype=np.float32)[np.asarray(tags)]

    def held(self, slot: int = 0) -> list[int | None]:
        """The tag of each row of a ring; None where it holds zeros."""
        values = dequantize_rows(jnp.asarray(self.layer.data[slot]), self.config.fmt)
        return [int(row.argmax()) if row.any() else None for row in np.asarray(values)]


def seen(y: np.ndarray) -> list[list[set[int]]]:
    """For each query of y[B, T, width] the tags it saw; each counted once and all alike."""
    return [[_tags(query) for query in request] for request in y]


def _tags(query: np.ndarray) -> set[int]:
    tags = np.flatnonzero(query)
    if len(tags):
        np.testing.assert_allclose(query[tags], 1 / len(tags), rtol=1e-6)
    return set(tags.tolist())


def window_of(position: int, window: int) -> set[int]:
    """The positions that a query sees."""
    return set(range(max(0, position - window + 1), position + 1))


def chunks(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Start and length of consecutive chunks."""
    return [(sum(lengths[:i]), length) for i, length in enumerate(lengths)]
