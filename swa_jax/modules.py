"""Flax Linen modules: the attention layer, a decoder layer and a decoder."""

from typing import Any, cast

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels import KVRows, checks, transforms
from pallas_kernels.dispatch import Implementation
from swa_jax.attention import attention_layer, parameter_shapes
from swa_jax.cache import RingCache
from swa_jax.config import AttentionConfig, DecoderConfig
from swa_jax.metadata import DecodeMetadata, PrefillMetadata, SequenceMetadata

Metadata = DecodeMetadata | PrefillMetadata | SequenceMetadata

_kernel_init = nn.initializers.variance_scaling(
    1.0, "fan_in", "truncated_normal", in_axis=-1, out_axis=-2
)


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

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "b t hidden"],
        rows: KVRows | None = None,
        meta: Metadata | None = None,
        *,
        positions: Int[Array, "b t"] | None = None,
        segment_ids: Int[Array, "b t"] | None = None,
    ) -> Any:
        """The layer's output; with a cache also its new rows.

        Args:
          x: floating[B, T, hidden].
          rows: the layer's view of the cache, or None.
          meta: with rows a DecodeMetadata or PrefillMetadata; its type says which call it is.
          positions: integers[B, T], without a cache only: 0 to T - 1 by default.
          segment_ids: integers[B, T], without a cache only, for packed rows.

        Returns:
          y, config.dtype[B, T, hidden], zero at padding; (y, rows) if rows were given.

        Raises:
          ValueError: a wrong shape, dtype, format or geometry, or metadata without rows.
        """
        if rows is None and not isinstance(meta, SequenceMetadata):
            meta = _sequence_metadata(x, meta, positions, segment_ids)
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
                nn.with_logical_partitioning(inits.get(name, _kernel_init), axes[name]),
                shape,
                jnp.dtype("float32" if name in inits else self.config.param_dtype),
            )
            for name, shape in parameter_shapes(self.config).items()
        }
        y, new_rows = attention_layer(
            params,
            x,
            rows,
            meta,
            self.config,
            round_trip=self.round_trip,
            implementation=self.implementation,
        )
        return y if rows is None else (y, new_rows)


class DecoderLayer(nn.Module):
    """Pre-norm attention and SwiGLU, each with a residual.

    Attributes:
      config: of the attention.
      mlp_size: inner width of the SwiGLU.
      round_trip, implementation: as of SlidingWindowAttention.
    """

    config: AttentionConfig
    mlp_size: int
    round_trip: bool = True
    implementation: Implementation = None

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "b t hidden"],
        rows: KVRows | None = None,
        meta: Metadata | None = None,
    ) -> Any:
        """The layer's output, and its new rows if rows were given. Arguments as the attention's."""
        attention = SlidingWindowAttention(
            self.config, self.round_trip, self.implementation, name="attention"
        )
        normalised = _Norm(self.config, name="attention_norm")(x)
        if rows is None:
            y = attention(normalised, meta=meta)
        else:
            y, rows = attention(normalised, rows, meta)
        x = x + y
        normalised = _Norm(self.config, name="mlp_norm")(x)
        x = x + _SwiGLU(self.config, self.mlp_size, name="mlp")(normalised)
        return x if rows is None else (x, rows)


class Decoder(nn.Module):
    """Embedding, decoder layers and a norm. `logits` turns hidden states into scores.

    Attributes:
      config: the decoder's configuration.
      round_trip, implementation: as of SlidingWindowAttention.
    """

    config: DecoderConfig
    round_trip: bool = True
    implementation: Implementation = None

    def setup(self):
        """Declares the parameters and layers."""
        config, layers = self.config, self.config.layers
        names, dtype = layers[0].axis_names, jnp.dtype(layers[0].param_dtype)
        table = (config.vocab_size, config.hidden_size)
        axes = (names.vocab, names.embed)
        init = nn.initializers.normal(1.0)
        self.embedding: Any = self.param(
            "embedding", nn.with_logical_partitioning(init, axes), table, dtype
        )
        self.head: Any = self.param(
            "head", nn.with_logical_partitioning(_kernel_init, axes), table, dtype
        )
        self.norm = _Norm(layers[0])
        fields = (config.mlp_size, self.round_trip, self.implementation)
        if config.scan_layers:
            scanned = nn.scan(
                _ScannedLayer,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=cast(Any, (0, nn.broadcast)),
                length=config.num_layers,
                metadata_params={nn.PARTITION_NAME: names.layers},
            )
            self.layers: Any = scanned(layers[0], *fields)
        else:
            self.layers = [DecoderLayer(layer, *fields) for layer in layers]

    def __call__(
        self,
        tokens: Int[Array, "b t"],
        cache: RingCache | None = None,
        meta: Metadata | None = None,
        *,
        positions: Int[Array, "b t"] | None = None,
        segment_ids: Int[Array, "b t"] | None = None,
    ) -> Any:
        """Hidden states; with a cache also the new cache.

        Args:
          tokens: integers[B, T], token ids. One outside the vocabulary counts as the nearest;
            whatever stands at padding is ignored.
          cache: rings of all layers, or None.
          meta: with a cache a DecodeMetadata or PrefillMetadata.
          positions: integers[B, T], without a cache only: 0 to T - 1 by default.
          segment_ids: integers[B, T], without a cache only, for packed rows.

        Returns:
          hidden, config.dtype[B, T, hidden], zero at padding; (hidden, cache) with a cache.

        Raises:
          ValueError: a wrong shape or dtype, or a cache that is not this decoder's.
        """
        config = self.config
        tokens = checks.as_int32("tokens", tokens)
        checks.check_shape("tokens", tokens, (None, None))
        if cache is None:
            meta = _sequence_metadata(tokens, meta, positions, segment_ids)
        else:
            if positions is not None or segment_ids is not None:
                raise ValueError("positions, segment_ids: expected none with a cache, got some")
            if meta is None:
                raise ValueError("meta: expected metadata with a cache, got None")
            self._check_cache(cache)
        dtype = jnp.dtype(config.layers[0].dtype)
        known = jnp.clip(tokens, 0, config.vocab_size - 1)
        x = jnp.take(self.embedding, known, axis=0).astype(dtype)
        if config.scan_layers:
            numbers = jnp.arange(config.num_layers, dtype=jnp.int32)
            (x, cache), _ = self.layers((x, cache), numbers, meta)
        elif cache is None:
            for layer in self.layers:
                x = layer(x, meta=meta)
        else:
            for i, layer in enumerate(self.layers):
                x, rows = layer(x, cache.layer(i), meta)
                cache = cache.with_layer(i, rows)
        hidden = jnp.where(meta.positions[..., None] >= 0, self.norm(x), jnp.zeros((), dtype))
        return hidden if cache is None else (hidden, cache)

    def logits(self, hidden: Float[Array, "*n hidden"]) -> Float32[Array, "*n vocab"]:
        """Vocabulary scores of hidden states.

        Args:
          hidden: floating[..., hidden], as many or as few rows as are needed.

        Returns:
          float32[..., vocab_size].
        """
        table = self.head.astype(hidden.dtype)
        scores = jnp.einsum("...h,vh->...v", hidden, table, preferred_element_type=jnp.float32)
        return scores.astype(jnp.float32)

    def _check_cache(self, cache: RingCache) -> None:
        if not isinstance(cache, RingCache):
            raise ValueError(f"cache: expected a RingCache, got {type(cache).__name__}")
        config = self.config
        for name, want, got in (
            ("layers", config.num_layers, cache.layers),
            ("geometry", config.geometry, cache.geometry),
            ("fmt", config.fmt, cache.fmt),
        ):
            if want != got:
                raise ValueError(f"cache: expected {name} {want}, got {got}")


class _ScannedLayer(nn.Module):
    """A decoder layer as the body of a scan: the cache travels in the carry."""

    config: AttentionConfig
    mlp_size: int
    round_trip: bool
    implementation: Implementation

    @nn.compact
    def __call__(self, carry, number, meta):
        x, cache = carry
        layer = DecoderLayer(
            self.config, self.mlp_size, self.round_trip, self.implementation, name="layer"
        )
        if cache is None:
            return (layer(x, meta=meta), None), None
        x, rows = layer(x, cache.layer(number), meta)
        return (x, cache.with_layer(number, rows)), None


class _Norm(nn.Module):
    """RMSNorm with float32 weights."""

    config: AttentionConfig

    @nn.compact
    def __call__(self, x):
        axes = (self.config.axis_names.embed,)
        weight: Any = self.param(
            "weight",
            nn.with_logical_partitioning(nn.initializers.ones, axes),
            (x.shape[-1],),
            jnp.float32,
        )
        return transforms.rms_norm(x, weight, self.config.norm_eps).astype(x.dtype)


class _SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), kernels [out, in]."""

    config: AttentionConfig
    size: int

    @nn.compact
    def __call__(self, x):
        names, dtype = self.config.axis_names, jnp.dtype(self.config.param_dtype)

        def project(name, x, out, axes):
            init = nn.with_logical_partitioning(_kernel_init, axes)
            kernel: Any = self.param(name, init, (out, x.shape[-1]), dtype)
            return jnp.einsum("...i,oi->...o", x, kernel.astype(x.dtype))

        gate = project("gate", x, self.size, (names.mlp, names.embed))
        up = project("up", x, self.size, (names.mlp, names.embed))
        return project("down", nn.silu(gate) * up, x.shape[-1], (names.embed, names.mlp))


def _sequence_metadata(x, meta, positions, segment_ids) -> SequenceMetadata:
    if meta is not None:
        raise ValueError(f"meta: expected none without a cache, got {type(meta).__name__}")
    if x.ndim < 2:
        raise ValueError(f"x: expected [batch, tokens, ...], got shape {x.shape}")
    return SequenceMetadata.build(x.shape[0], x.shape[1], positions, segment_ids)
