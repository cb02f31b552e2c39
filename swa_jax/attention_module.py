"""Flax Linen: the attention layer."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import ExtraKV, KVRows, checks
from pallas_kernels.dispatch import Implementation
from swa_jax.attention import attention_layer, parameter_shapes
from swa_jax.config import AttentionConfig
from swa_jax.metadata import Metadata, SequenceMetadata
from swa_jax.mlp import kernel_init


class SlidingWindowAttention(nn.Module):
    """A sliding-window latent-attention layer, see `attention.attention_layer`.

    Attributes:
      config: the layer's configuration.
      round_trip: in a call without a cache, whether rows go through their format and back.
      implementation: of the operations on rows.
    """

    config: AttentionConfig
    round_trip: bool = True
    implementation: Implementation = None

    def __post_init__(self):
        checks.check_type("config", self.config, AttentionConfig)
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "b t hidden"],
        rows: KVRows | None = None,
        meta: Metadata | None = None,
        *,
        extra: ExtraKV | None = None,
        positions: Int[Array, "b t"] | None = None,
        segment_ids: Int[Array, "b t"] | None = None,
    ) -> Any:
        """The layer's output; with a cache also its new rows.

        Args:
          x: floating[B, T, hidden].
          rows: the layer's view of the cache, or None.
          meta: with rows a DecodeMetadata or PrefillMetadata; its type says which call it is.
          extra: a compressed cache in the same softmax, exactly if config.extra_fmt names its
            format; indices integers[B * T, K]. Parameters are initialised without it.
          positions: integers[B, T], without a cache only: 0 to T - 1 by default.
          segment_ids: integers[B, T], without a cache only, for packed rows.

        Returns:
          y, config.dtype[B, T, hidden], zero at padding; (y, rows) if rows were given.

        Raises:
          ValueError: a wrong shape, dtype, format or geometry, or metadata without rows.
        """
        checks.check_floating("x", x)
        if rows is None and not isinstance(meta, SequenceMetadata):
            meta = sequence_metadata(x, meta, positions, segment_ids)
        elif meta is None:
            raise ValueError("meta: expected metadata with rows, got None")
        elif positions is not None or segment_ids is not None:
            raise ValueError("positions, segment_ids: expected none with metadata, got some")
        names = self.config.axis_names
        axes = {
            "q_a_kv": (names.query_rank, names.embed),
            "q_a_norm": (names.query_rank,),
            "q_b": (names.heads, names.query_rank),
            "kv_norm": (names.kv,),
            "sinks": (names.heads,),
            "o_a": (names.output_rank, names.heads),
            "o_b": (names.embed, names.output_rank),
        }
        inits = {
            "q_a_norm": nn.initializers.ones,
            "kv_norm": nn.initializers.ones,
            "sinks": nn.initializers.zeros,
        }
        params: dict[str, Any] = {
            name: self.param(
                name,
                nn.with_logical_partitioning(inits.get(name, kernel_init), axes[name]),
                shape,
                jnp.dtype("float32" if name in inits else self.config.param_dtype),
            )
            for name, shape in parameter_shapes(self.config).items()
        }
        config = self.config
        if self.is_initializing() and extra is None:
            config = dataclasses.replace(config, extra_fmt=None)
        y, new_rows = attention_layer(
            params,
            x,
            rows,
            meta,
            config,
            extra=extra,
            round_trip=self.round_trip,
            implementation=self.implementation,
        )
        return y if rows is None else (y, new_rows)


def sequence_metadata(x, meta, positions, segment_ids) -> SequenceMetadata:
    """Metadata of a call without a cache, out of the call's arguments.

    Args:
      x: the call's input, [B, T, ...].
      meta: the call's metadata, None.
      positions: integers[B, T], or None for 0 to T - 1.
      segment_ids: integers[B, T], or None for one segment.

    Raises:
      ValueError: metadata was given, or a wrong shape or dtype.
    """
    if meta is not None:
        raise ValueError(f"meta: expected none without a cache, got {type(meta).__name__}")
    if x.ndim < 2:
        raise ValueError(f"x: expected [batch, tokens, ...], got shape {x.shape}")
    return SequenceMetadata.build(x.shape[0], x.shape[1], positions, segment_ids)
