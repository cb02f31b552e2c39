"""Configurations of an attention layer and of a decoder: frozen, hashable, JSON-serialisable."""

import dataclasses
import functools
import json
from typing import Any

import numpy as np

from pallas_kernels import V41, KVCacheFormat, checks
from pallas_kernels.formats import SCALE_FLOORS, ScaleFloor, check_cache_format
from pallas_kernels.transforms import PAIRINGS, turns_per_position
from swa_jax.ring import RingGeometry


@dataclasses.dataclass(frozen=True)
class AxisNames:
    """Logical axis names of the parameters, for sharding rules."""

    embed: str = "embed"
    mlp: str = "mlp"
    vocab: str = "vocab"
    heads: str = "heads"
    query_rank: str = "query_rank"
    kv: str = "kv"
    output_rank: str = "output_rank"
    layers: str = "layers"


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """One sliding-window latent-attention layer.

    Attributes:
      hidden_size: width of the layer's input and output.
      num_heads: H, query heads.
      head_dim: D, width of a query head and of the shared row.
      rope_dim: R, how many of the last values are rotated.
      q_lora_rank: width of the intermediate query representation.
      o_groups: groups of heads in the output projection.
      o_lora_rank: width of each group's output before the last projection.
      window: W, positions that a query sees, its own included.
      draft_tokens: drafts that a verify step may carry; they set the ring's capacity.
      rope_theta: base of the rotary frequencies.
      norm_eps: epsilon of the norms.
      query_norm: whether each query head is normalised, without weights (V4 does, V4.1 does not).
      pairing: rotary pairs, "interleaved" or "half_split".
      hadamard: whether rows and queries are Hadamard-transformed.
      fmt: the format of the rows; its number of values is head_dim.
      scale_floor: "amax" or "scale", see `pallas_kernels.quantize_rows`.
      dtype: compute dtype of the projections, "float32" or "bfloat16".
      param_dtype: dtype of the projections' parameters; norm weights and sinks are float32.
      axis_names: logical names of the parameters' axes.

    Raises:
      ValueError: a value is out of range, or two do not fit, with the reason.
    """

    hidden_size: int
    num_heads: int
    head_dim: int = 512
    rope_dim: int = 64
    q_lora_rank: int = 1024
    o_groups: int = 8
    o_lora_rank: int = 1024
    window: int = 128
    draft_tokens: int = 5
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    query_norm: bool = False
    pairing: str = "interleaved"
    hadamard: bool = False
    fmt: KVCacheFormat = V41
    scale_floor: ScaleFloor = "amax"
    dtype: str = "float32"
    param_dtype: str = "float32"
    axis_names: AxisNames = AxisNames()

    def __post_init__(self):
        for name in ("hidden_size", "num_heads", "head_dim", "q_lora_rank", "o_groups",
                     "o_lora_rank", "window"):  # fmt: skip
            _check_int(name, getattr(self, name), 1)
        _check_int("draft_tokens", self.draft_tokens, 0)
        _check_int("rope_dim", self.rope_dim, 0)
        if self.rope_dim % 2 or self.rope_dim > self.head_dim:
            raise ValueError(
                f"rope_dim: expected an even number of at most head_dim {self.head_dim}, got "
                f"{self.rope_dim}"
            )
        if self.num_heads % self.o_groups:
            raise ValueError(
                f"o_groups: expected a divisor of num_heads {self.num_heads}, got {self.o_groups}"
            )
        for name in ("rope_theta", "norm_eps"):
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not 0 < value < np.inf
            ):
                raise ValueError(f"{name}: expected a finite number above 0, got {value!r}")
        for name in ("query_norm", "hadamard"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: expected True or False, got {getattr(self, name)!r}")
        checks.check_choice("pairing", self.pairing, PAIRINGS)
        checks.check_choice("scale_floor", self.scale_floor, SCALE_FLOORS)
        check_cache_format("fmt", self.fmt)
        if self.fmt.num_elements != self.head_dim:
            raise ValueError(
                f"fmt: expected rows of head_dim {self.head_dim} values, got {self.fmt.name} with "
                f"{self.fmt.num_elements}; fmt.with_width({self.head_dim}) makes one that fits"
            )
        if self.hadamard and self.head_dim & (self.head_dim - 1):
            raise ValueError(
                f"hadamard: expected a head_dim that is a power of two, got {self.head_dim}"
            )
        if not isinstance(self.axis_names, AxisNames):
            raise ValueError(f"axis_names: expected an AxisNames, got {self.axis_names!r}")
        for name in ("dtype", "param_dtype"):
            checks.check_choice(name, getattr(self, name), ("float32", "bfloat16"))

    @property
    def geometry(self) -> RingGeometry:
        """The ring of this layer."""
        return RingGeometry.for_drafts(self.window, self.draft_tokens)

    @property
    def turns(self) -> np.ndarray:
        """Rotary frequencies as `transforms.turns_per_position` gives them."""
        return _rope_turns(self.rope_dim, self.rope_theta)

    def to_json(self) -> str:
        """The configuration as JSON text."""
        return json.dumps(_attention_dict(self))

    @classmethod
    def from_json(cls, text: str) -> "AttentionConfig":
        """The inverse of `to_json`. Raises ValueError for any other text."""
        return _attention_from(_parse_object("AttentionConfig", text))


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A decoder: embedding, pre-norm layers with SwiGLU, final norm, vocabulary scores.

    Attributes:
      vocab_size: number of token ids.
      num_layers: number of layers.
      attention: one configuration for all layers, or a tuple with one for each. All share the
        hidden size, and what identifies a cache: window, drafts and row format.
      mlp_size: inner width of the SwiGLU.
      scan_layers: run the layers as one scanned layer over stacked parameters: many layers compile
        in the time of one. The layers must be equal.

    Raises:
      ValueError: a value is out of range, or two do not fit, with the reason.
    """

    vocab_size: int
    num_layers: int
    attention: AttentionConfig | tuple[AttentionConfig, ...]
    mlp_size: int
    scan_layers: bool = False

    def __post_init__(self):
        for name in ("vocab_size", "num_layers", "mlp_size"):
            _check_int(name, getattr(self, name), 1)
        if isinstance(self.attention, list):
            object.__setattr__(self, "attention", tuple(self.attention))
        layers = self.layers
        if not all(isinstance(layer, AttentionConfig) for layer in layers):
            raise ValueError(
                f"attention: expected an AttentionConfig or one per layer, got {self.attention!r}"
            )
        if len(layers) != self.num_layers:
            raise ValueError(
                f"attention: expected {self.num_layers} configurations, got {len(layers)}"
            )
        for i, layer in enumerate(layers):
            for name in ("hidden_size", "geometry", "fmt", "dtype", "param_dtype", "norm_eps"):
                want, got = getattr(layers[0], name), getattr(layer, name)
                if want != got:
                    raise ValueError(
                        f"attention: expected the same {name} in every layer, got {want} in layer "
                        f"0 and {got} in layer {i}"
                    )
        if self.scan_layers and len(set(layers)) > 1:
            raise ValueError("scan_layers: expected equal layers, got different configurations")

    @property
    def layers(self) -> tuple[AttentionConfig, ...]:
        """The configuration of each layer."""
        if isinstance(self.attention, tuple):
            return self.attention
        return (self.attention,) * self.num_layers

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return self.layers[0].hidden_size

    @property
    def geometry(self) -> RingGeometry:
        """The rings of all layers."""
        return self.layers[0].geometry

    @property
    def fmt(self) -> KVCacheFormat:
        """The format of all layers' rows."""
        return self.layers[0].fmt

    def to_json(self) -> str:
        """The configuration as JSON text."""
        fields = {name: getattr(self, name) for name in _names(DecoderConfig)}
        if isinstance(self.attention, tuple):
            fields["attention"] = [_attention_dict(layer) for layer in self.attention]
        else:
            fields["attention"] = _attention_dict(self.attention)
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> "DecoderConfig":
        """The inverse of `to_json`. Raises ValueError for any other text."""
        fields = _parse_object("DecoderConfig", text)
        attention = fields.get("attention")
        if isinstance(attention, list):
            fields["attention"] = tuple(_attention_from(layer) for layer in attention)
        else:
            fields["attention"] = _attention_from(attention)
        return _build(cls, fields)


@functools.lru_cache
def _rope_turns(rope_dim: int, theta: float) -> np.ndarray:
    turns = turns_per_position(theta ** (-np.arange(0, rope_dim, 2, dtype=np.float64) / rope_dim))
    turns.flags.writeable = False
    return turns


def _check_int(name: str, value: Any, smallest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
        raise ValueError(f"{name}: expected an integer of {smallest} or more, got {value!r}")


def _names(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def _attention_dict(config: AttentionConfig) -> dict[str, Any]:
    return dataclasses.asdict(config)


def _attention_from(fields: Any) -> AttentionConfig:
    if not isinstance(fields, dict):
        raise ValueError(f"attention: expected an object, got {type(fields).__name__}")
    fields = dict(fields)
    for name, cls in (("fmt", KVCacheFormat), ("axis_names", AxisNames)):
        if name in fields:
            fields[name] = _build(cls, fields[name])
    return _build(AttentionConfig, fields)


def _parse_object(name: str, text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: expected JSON text, got {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{name}: expected a JSON object, got {type(fields).__name__}")
    return fields


def _build(cls: type, fields: Any) -> Any:
    """cls(**fields), where a wrong field is a ValueError that names it."""
    if not isinstance(fields, dict):
        raise ValueError(f"{cls.__name__}: expected an object, got {type(fields).__name__}")
    unknown = sorted(set(fields) - set(_names(cls)))
    required = {
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    missing = sorted(required - set(fields))
    if unknown or missing:
        raise ValueError(f"{cls.__name__}: unknown fields {unknown}, missing fields {missing}")
    return cls(**fields)
