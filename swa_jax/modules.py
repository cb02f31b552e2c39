"""Flax Linen: a decoder layer and a decoder."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels import ExtraKV, KVRows, checks, transforms
from pallas_kernels.dispatch import Implementation
from swa_jax.attention_module import SlidingWindowAttention, sequence_metadata
from swa_jax.cache import RingCache
from swa_jax.config import AttentionConfig, DecoderConfig, ExpertsConfig, check_feed_forward
from swa_jax.experts import Experts
from swa_jax.hooks import EmbedHook, ExtraHook
from swa_jax.metadata import Metadata
from swa_jax.mlp import SwiGLU, kernel_init


class DecoderLayer(nn.Module):
    """Pre-norm attention and SwiGLU or experts, each with a residual.

    Attributes:
      config: of the attention.
      mlp_size: inner width of the SwiGLU, 0 with experts.
      round_trip, implementation: as of SlidingWindowAttention.
      extra_hook: makes the compressed cache of a call, see `hooks.ExtraHook`.
      experts: what takes the place of the SwiGLU, or None.
    """

    config: AttentionConfig
    mlp_size: int
    round_trip: bool = True
    implementation: Implementation = None
    extra_hook: ExtraHook | None = None
    experts: ExpertsConfig | None = None

    def __post_init__(self):
        checks.check_type("config", self.config, AttentionConfig)
        super().__post_init__()

    def __call__(
        self,
        x: Float[Array, "b t hidden"],
        rows: KVRows | None = None,
        meta: Metadata | None = None,
        *,
        extra: ExtraKV | None = None,
        cross_layer: Any = None,
    ) -> Any:
        """The layer's output; its new rows and the cross-layer value if such were given.

        Args:
          x: floating[B, T, hidden].
          rows: as of the attention, and so are meta and extra.
          meta: the kind of call.
          extra: a compressed cache.
          cross_layer: whatever layers hand to each other: any pytree, {} to begin with. The layer
            itself does not read it; its extra_hook may, and may change it.
        """
        given = cross_layer is not None
        x, rows, cross_layer = self.run(x, rows, meta, extra, cross_layer)
        return _results(x, rows, given, cross_layer)

    @nn.compact
    def run(
        self,
        x: Float[Array, "b t hidden"],
        rows: KVRows | None,
        meta: Metadata | None,
        extra: ExtraKV | None,
        cross_layer: Any,
    ) -> tuple[Float[Array, "b t hidden"], KVRows | None, Any]:
        """As the call: output, new rows and cross-layer value, each None if there is none.

        Raises:
          ValueError: as SlidingWindowAttention; sizes of a SwiGLU and of experts at once, or an
            extra_hook without metadata or with another result.
        """
        check_feed_forward(self.mlp_size, self.experts)
        attention = SlidingWindowAttention(
            self.config, self.round_trip, self.implementation, name="attention"
        )
        normalised = _Norm(self.config, name="attention_norm")(x)
        if self.extra_hook is not None:
            if meta is None:
                raise ValueError("meta: expected metadata with an extra_hook, got None")
            made = self.extra_hook(normalised, meta, extra, cross_layer)
            if not isinstance(made, tuple) or len(made) != 2:
                raise ValueError(
                    f"extra_hook's result: expected (extra, cross_layer), got {type(made).__name__}"
                )
            extra, cross_layer = made
        if rows is None:
            y = attention(normalised, meta=meta, extra=extra)
        else:
            y, rows = attention(normalised, rows, meta, extra=extra)
        x = x + y
        normalised = _Norm(self.config, name="mlp_norm")(x)
        if self.experts is None:
            x = x + SwiGLU(self.config, self.mlp_size, name="mlp")(normalised)
        else:
            valid = None if meta is None else meta.positions >= 0
            x = x + Experts(self.config, self.experts, name="experts")(normalised, valid)
        return x, rows, cross_layer


class Decoder(nn.Module):
    """Embedding, decoder layers and a norm. `logits` turns hidden states into scores.

    Attributes:
      config: the decoder's configuration.
      round_trip, implementation: as of SlidingWindowAttention.
      embed_hook: changes the embedded tokens, as n-gram embeddings and draft models do, see
        `hooks.EmbedHook`.
      extra_hooks: one for each layer, or None where a layer has none: what compresses keys and
        selects among them, see `hooks.ExtraHook`. A hook that is a Flax module has parameters.
    """

    config: DecoderConfig
    round_trip: bool = True
    implementation: Implementation = None
    embed_hook: EmbedHook | None = None
    extra_hooks: Sequence[ExtraHook | None] | None = None

    def __post_init__(self):
        checks.check_type("config", self.config, DecoderConfig)
        super().__post_init__()

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
            "head", nn.with_logical_partitioning(kernel_init, axes), table, dtype
        )
        self.norm = _Norm(layers[0])
        fields = (config.mlp_size, self.round_trip, self.implementation)
        hooks = (None,) * config.num_layers if self.extra_hooks is None else self.extra_hooks
        checks.check_type("extra_hooks", hooks, Sequence)
        if len(hooks) != config.num_layers:
            raise ValueError(
                f"extra_hooks: expected one for each of {config.num_layers} layers, or None, got "
                f"{len(hooks)}"
            )
        if config.scan_layers:
            if any(hook is not None for hook in hooks):
                raise ValueError("extra_hooks: expected none with scan_layers, got some")
            scanned = nn.scan(
                _ScannedLayer,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=cast(Any, (0, nn.broadcast, nn.broadcast)),
                length=config.num_layers,
                metadata_params={nn.PARTITION_NAME: names.layers},
            )
            self.layers: Any = scanned(layers[0], *fields, config.experts)
        else:
            self.layers = [
                DecoderLayer(layer, *fields, hook, config.experts)
                for layer, hook in zip(layers, hooks, strict=True)
            ]

    def __call__(
        self,
        tokens: Int[Array, "b t"],
        cache: RingCache | None = None,
        meta: Metadata | None = None,
        *,
        extra: ExtraKV | Sequence[ExtraKV | None] | None = None,
        cross_layer: Any = None,
        draft_input: Float[Array, "b t _hidden"] | None = None,
        positions: Int[Array, "b t"] | None = None,
        segment_ids: Int[Array, "b t"] | None = None,
    ) -> Any:
        """Hidden states; the new cache and the cross-layer value if such were given.

        Args:
          tokens: integers[B, T], token ids. One outside the vocabulary counts as the nearest;
            whatever stands at padding is ignored.
          cache: rings of all layers, or None.
          meta: with a cache a DecodeMetadata or PrefillMetadata.
          extra: compressed caches: one for each layer, None where a layer has none; or one that all
            layers read. Their indices are integers[B * T, K].
          cross_layer: any pytree, handed to the embed_hook, then from layer to layer through their
            extra_hooks. It comes back last. Without one, what hooks leave ends here.
          draft_input: floating[B, T, ...], what a draft model is given beside its tokens, such as
            hidden states of the model it drafts for. For the embed_hook, which must be there.
          positions: integers[B, T], without a cache only: 0 to T - 1 by default.
          segment_ids: integers[B, T], without a cache only, for packed rows.

        Returns:
          hidden, config.dtype[B, T, hidden], zero at padding; a tuple of it, the cache and the
          cross-layer value if one of these was given.

        Raises:
          ValueError: a wrong shape or dtype, or a cache that is not this decoder's.
        """
        config = self.config
        tokens = checks.as_int32("tokens", tokens)
        checks.check_shape("tokens", tokens, (None, None))
        if cache is None:
            meta = sequence_metadata(tokens, meta, positions, segment_ids)
        else:
            if positions is not None or segment_ids is not None:
                raise ValueError("positions, segment_ids: expected none with a cache, got some")
            if meta is None:
                raise ValueError("meta: expected metadata with a cache, got None")
            self._check_cache(cache)
        if draft_input is not None and self.embed_hook is None:
            raise ValueError("draft_input: expected an embed_hook that reads it, got none")
        extras = self._extra_of_layers(extra)
        given = cross_layer is not None
        dtype = jnp.dtype(config.layers[0].dtype)
        known = jnp.clip(tokens, 0, config.vocab_size - 1)
        x = jnp.take(self.embedding, known, axis=0).astype(dtype)
        if self.embed_hook is not None:
            shape = x.shape
            x = self.embed_hook(x, tokens, meta, cross_layer, draft_input)
            checks.check_floating("embed_hook's result", x)
            checks.check_shape("embed_hook's result", x, shape)
            x = x.astype(dtype)
        if config.scan_layers:
            numbers = jnp.arange(config.num_layers, dtype=jnp.int32)
            (x, cache), _ = self.layers((x, cache), numbers, meta, extras[0])
        else:
            for i, layer in enumerate(self.layers):
                rows = None if cache is None else cache.layer(i)
                x, rows, cross_layer = layer.run(x, rows, meta, extras[i], cross_layer)
                if cache is not None:
                    cache = cache.with_layer(i, rows)
        hidden = jnp.where(meta.positions[..., None] >= 0, self.norm(x), jnp.zeros((), dtype))
        return _results(hidden, cache, given, cross_layer)

    def logits(self, hidden: Float[Array, "*n hidden"]) -> Float32[Array, "*n vocab"]:
        """Vocabulary scores of hidden states.

        Args:
          hidden: floating[..., hidden], as many or as few rows as are needed.

        Returns:
          float32[..., vocab_size].

        Raises:
          ValueError: they are not floating.
        """
        checks.check_floating("hidden", hidden)
        table = self.head.astype(hidden.dtype)
        scores = jnp.einsum("...h,vh->...v", hidden, table, preferred_element_type=jnp.float32)
        return scores.astype(jnp.float32)

    def _extra_of_layers(self, extra) -> Sequence[ExtraKV | None]:
        """The compressed cache of each layer; scanned layers share one."""
        count = self.config.num_layers
        if extra is None or isinstance(extra, ExtraKV):
            return (extra,) * count
        if self.config.scan_layers:
            raise ValueError("extra: expected one for all layers with scan_layers, got several")
        if not isinstance(extra, Sequence) or len(extra) != count:
            got = len(extra) if isinstance(extra, Sequence) else type(extra).__name__
            raise ValueError(
                f"extra: expected an ExtraKV or one for each of {count} layers, got {got}"
            )
        return extra

    def _check_cache(self, cache: RingCache) -> None:
        checks.check_type("cache", cache, RingCache)
        config = self.config
        for name, want, got in (
            ("layers", config.num_layers, cache.layers),
            ("geometry", config.geometry, cache.geometry),
            ("fmt", config.fmt, cache.fmt),
        ):
            if want != got:
                raise ValueError(f"cache: expected {name} {want}, got {got}")


def check_model(model: Any, params: Any) -> None:
    """Raises ValueError unless they are a decoder and variables, {"params": ...}."""
    checks.check_type("model", model, Decoder)
    if not isinstance(params, Mapping) or "params" not in params:
        got = sorted(map(str, params)) if isinstance(params, Mapping) else type(params).__name__
        raise ValueError(f"params: expected {{'params': ...}}, got {got}")


class _ScannedLayer(nn.Module):
    """A decoder layer as the body of a scan: the cache travels in the carry."""

    config: AttentionConfig
    mlp_size: int
    round_trip: bool
    implementation: Implementation
    experts: ExpertsConfig | None

    @nn.compact
    def __call__(self, carry, number, meta, extra):
        x, cache = carry
        fields = (self.config, self.mlp_size, self.round_trip, self.implementation)
        layer = DecoderLayer(*fields, experts=self.experts, name="layer")
        rows = None if cache is None else cache.layer(number)
        x, rows, _ = layer.run(x, rows, meta, extra, None)
        return (x, None if cache is None else cache.with_layer(number, rows)), None


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


def _results(x: Any, cache: Any, given: bool, cross_layer: Any) -> Any:
    """x alone, or a tuple with the cache, if there is one, and the cross-layer value, if given."""
    results = (x, *(() if cache is None else (cache,)), *((cross_layer,) if given else ()))
    return results if len(results) > 1 else x
