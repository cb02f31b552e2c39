"""Configurations of an attention layer and of a decoder: frozen, hashable, JSON-serialisable."""

import dataclasses
import json
from typing import Any

import numpy as np

from pallas_kernels import V41, KVCacheFormat, checks
from pallas_kernels.formats import SCALE_FLOORS, ScaleFloor, check_cache_format
from pallas_kernels.transforms import PAIRINGS
from swa_jax.json_fields import build, parse_object
from swa_jax.ring import RingGeometry
from swa_jax.rotary import YarnScaling, rotary_turns

# Far beyond any model, and what a configuration takes by itself stays small: a table of rotary
# frequencies on the host, an object for each layer.
_MAX_HEAD_DIM, _MAX_LAYERS = 65536, 10000


@dataclasses.dataclass(frozen=True)
class AxisNames:
    """Logical axis names of the parameters, for sharding rules.

    Raises:
      ValueError: a name is not a string.
    """

    embed: str = "embed"
    mlp: str = "mlp"
    vocab: str = "vocab"
    heads: str = "heads"
    query_rank: str = "query_rank"
    kv: str = "kv"
    output_rank: str = "output_rank"
    layers: str = "layers"
    experts: str = "experts"

    def __post_init__(self):
        for name, value in vars(self).items():
            if not isinstance(value, str):
                raise ValueError(f"{name}: expected a string, got {value!r}")


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
      rope_scaling: YaRN for the rotary frequencies, or None.
      norm_eps: epsilon of the norms.
      query_norm: whether each query head is normalised, without weights (V4 does, V4.1 does not).
      pairing: rotary pairs, "interleaved" or "half_split".
      hadamard: whether rows and queries are Hadamard-transformed.
      fmt: the format of the rows; its number of values is head_dim.
      extra_fmt: the format of a compressed cache's rows, which every call then takes as `extra`;
        None for a layer that reads its window only.
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
    rope_scaling: YarnScaling | None = None
    norm_eps: float = 1e-6
    query_norm: bool = False
    pairing: str = "interleaved"
    hadamard: bool = False
    fmt: KVCacheFormat = V41
    extra_fmt: KVCacheFormat | None = None
    scale_floor: ScaleFloor = "amax"
    dtype: str = "float32"
    param_dtype: str = "float32"
    axis_names: AxisNames = AxisNames()

    def __post_init__(self):
        for name in ("hidden_size", "num_heads", "q_lora_rank", "o_groups", "o_lora_rank",
                     "window"):  # fmt: skip
            _check_int(name, getattr(self, name), 1)
        _check_int("head_dim", self.head_dim, 1, _MAX_HEAD_DIM)
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
            checks.check_positive(name, getattr(self, name))
        if self.rope_scaling is not None:
            if not isinstance(self.rope_scaling, YarnScaling):
                raise ValueError(
                    f"rope_scaling: expected a YarnScaling or None, got {self.rope_scaling!r}"
                )
            if self.rope_theta <= 1:
                raise ValueError(
                    f"rope_theta: expected more than 1 with rope_scaling, got {self.rope_theta!r}"
                )
        for name in ("query_norm", "hadamard"):
            _check_bool(name, getattr(self, name))
        checks.check_choice("pairing", self.pairing, PAIRINGS)
        checks.check_choice("scale_floor", self.scale_floor, SCALE_FLOORS)
        _check_row_format("fmt", self.fmt, self.head_dim)
        if self.extra_fmt is not None:
            _check_row_format("extra_fmt", self.extra_fmt, self.head_dim)
        if self.hadamard and not checks.is_power_of_two(self.head_dim):
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
        return rotary_turns(self.rope_dim, self.rope_theta, self.rope_scaling)

    def to_json(self) -> str:
        """The configuration as JSON text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "AttentionConfig":
        """The inverse of `to_json`. Raises ValueError for any other text."""
        return _attention_from(parse_object("AttentionConfig", text))


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in place of a layer's SwiGLU.

    Attributes:
      num_experts: experts among which each token chooses.
      top_k: how many it chooses.
      expert_size: inner width of an expert, a SwiGLU.
      shared_size: inner width of the SwiGLU that every token has besides; 0 for none.
      scoring: what a token's products with the router become, in float32: "softmax" over the
        experts, "sigmoid", or "sqrt_softplus", the square root of log(1 + exp(.)).
      normalise_weights: whether the scores of those chosen are divided by their sum.
      routed_scale: what their scores are multiplied by in the end.

    Raises:
      ValueError: a value is out of range, or two do not fit, with the reason.
    """

    num_experts: int
    top_k: int
    expert_size: int
    shared_size: int = 0
    scoring: str = "sqrt_softplus"
    normalise_weights: bool = True
    routed_scale: float = 1.0

    def __post_init__(self):
        for name in ("num_experts", "top_k", "expert_size"):
            _check_int(name, getattr(self, name), 1)
        _check_int("shared_size", self.shared_size, 0)
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k: expected at most num_experts {self.num_experts}, got {self.top_k}"
            )
        checks.check_choice("scoring", self.scoring, ("softmax", "sigmoid", "sqrt_softplus"))
        _check_bool("normalise_weights", self.normalise_weights)
        checks.check_positive("routed_scale", self.routed_scale)


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A decoder: embedding, pre-norm layers with SwiGLU or experts, final norm, vocabulary scores.

    Attributes:
      vocab_size: number of token ids.
      num_layers: number of layers.
      attention: one configuration for all layers, or a tuple with one for each. All share the
        hidden size, and what identifies a cache: window, drafts and row format.
      mlp_size: inner width of the SwiGLU; 0 with experts, which say their own.
      scan_layers: run the layers as one scanned layer over stacked parameters: many layers compile
        in the time of one. The layers must be equal. With experts, each step then copies all of a
        layer's, where unrolled layers read those chosen.
      experts: a mixture of experts in place of every layer's SwiGLU, or None.

    Raises:
      ValueError: a value is out of range, or two do not fit, with the reason.
    """

    vocab_size: int
    num_layers: int
    attention: AttentionConfig | tuple[AttentionConfig, ...]
    mlp_size: int
    scan_layers: bool = False
    experts: ExpertsConfig | None = None

    def __post_init__(self):
        _check_int("vocab_size", self.vocab_size, 1)
        _check_int("num_layers", self.num_layers, 1, _MAX_LAYERS)
        check_feed_forward(self.mlp_size, self.experts)
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
        _check_bool("scan_layers", self.scan_layers)
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

    def replace_attention(self, **fields: Any) -> "DecoderConfig":
        """The same decoder with other values in every layer's attention.

        Args:
          **fields: of AttentionConfig.

        Raises:
          ValueError: as AttentionConfig; TypeError for a field that it has not.
        """
        layers = tuple(dataclasses.replace(layer, **fields) for layer in self.layers)
        one = len(set(layers)) == 1
        return dataclasses.replace(self, attention=layers[0] if one else layers)

    def to_json(self) -> str:
        """The configuration as JSON text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "DecoderConfig":
        """The inverse of `to_json`. Raises ValueError for any other text."""
        fields = parse_object("DecoderConfig", text)
        attention = fields.get("attention")
        if isinstance(attention, list):
            fields["attention"] = tuple(_attention_from(layer) for layer in attention)
        elif "attention" in fields:
            fields["attention"] = _attention_from(attention)
        if fields.get("experts") is not None:
            fields["experts"] = build(ExpertsConfig, fields["experts"])
        return build(cls, fields)


def plain_config(config: DecoderConfig) -> dict[str, Any]:
    """A configuration as JSON values that are equal for equal models.

    Every layer has its own, as one for all says the same; formats have no notes.
    """
    plain = json.loads(dataclasses.replace(config, attention=config.layers).to_json())
    for layer in plain["attention"]:
        for name in ("fmt", "extra_fmt"):
            if layer[name] is not None:
                del layer[name]["note"]
    return plain | {"attention": {str(i): layer for i, layer in enumerate(plain["attention"])}}


def check_feed_forward(mlp_size: Any, experts: Any) -> None:
    """Raises ValueError unless they are a SwiGLU's width and None, or 0 and experts."""
    if experts is None:
        _check_int("mlp_size", mlp_size, 1)
    elif not isinstance(experts, ExpertsConfig):
        raise ValueError(f"experts: expected an ExpertsConfig or None, got {experts!r}")
    elif mlp_size != 0:
        raise ValueError(
            f"mlp_size: expected 0 with experts, whose expert_size and shared_size say their "
            f"widths, got {mlp_size!r}"
        )


def _check_int(name: str, value: Any, smallest: int, largest: int = checks.INT32_MAX) -> None:
    checks.check_integer(name, value, smallest)
    if value > largest:
        raise ValueError(f"{name}: expected at most {largest}, got {value!r}")


def _check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected True or False, got {value!r}")


def _check_row_format(name: str, fmt: KVCacheFormat, head_dim: int) -> None:
    check_cache_format(name, fmt)
    if fmt.num_elements != head_dim:
        raise ValueError(
            f"{name}: expected rows of head_dim {head_dim} values, got {fmt.name} with "
            f"{fmt.num_elements}; {name}.with_width({head_dim}) makes one that fits"
        )


def _attention_from(fields: Any) -> AttentionConfig:
    if not isinstance(fields, dict):
        raise ValueError(f"attention: expected an object, got {type(fields).__name__}")
    fields = dict(fields)
    for name, cls in _PARTS.items():
        if fields.get(name) is not None:
            fields[name] = build(cls, fields[name])
    return build(AttentionConfig, fields)


_PARTS = {
    "fmt": KVCacheFormat,
    "extra_fmt": KVCacheFormat,
    "rope_scaling": YarnScaling,
    "axis_names": AxisNames,
}
