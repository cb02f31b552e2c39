"""Which tensors of a checkpoint make up which parameter, under both public namings."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from jax.tree_util import GetAttrKey, keystr

from swa_jax.attention import parameter_shapes
from swa_jax.config import AttentionConfig, DecoderConfig
from swa_jax.head_shards import WHOLE, shard_slices


@dataclasses.dataclass(frozen=True)
class Names:
    """One convention.

    Attributes:
      prefix: of all names but the head's.
      attention: of the tensors of a layer's attention, with a dot at its end.
      attention_parts: names of the tensors that make up each parameter of the attention, stacked
        along the first axis.
      layer: names of the layer's other parameters, by their path in the tree.
      embedding: the embedding's name.
      norm: the last norm's.
      head: the head's, which never has the prefix.
      scale: what a scale's name ends with in place of its matrix's "weight".
    """

    prefix: str
    attention: str
    attention_parts: Mapping[str, tuple[str, ...]]
    layer: Mapping[tuple[str, ...], str]
    embedding: str
    norm: str
    head: str
    scale: str

    def attention_prefix(self, layer: int) -> str:
        """What the names of a layer's attention begin with."""
        return f"{self.prefix}layers.{layer}.{self.attention}"

    def scale_name(self, name: str) -> str:
        """The name of a matrix's scales."""
        return name.removesuffix("weight") + self.scale


HUGGING_FACE = Names(
    prefix="model.",
    attention="self_attn.",
    attention_parts={
        "q_a_kv": ("q_a_proj.weight", "kv_proj.weight"),
        "q_a_norm": ("q_a_norm.weight",),
        "q_b": ("q_b_proj.weight",),
        "kv_norm": ("kv_norm.weight",),
        "sinks": ("sinks",),
        "o_a": ("o_a_proj.weight",),
        "o_b": ("o_b_proj.weight",),
    },
    layer={
        ("attention_norm", "weight"): "input_layernorm.weight",
        ("mlp_norm", "weight"): "post_attention_layernorm.weight",
        ("mlp", "gate"): "mlp.gate_proj.weight",
        ("mlp", "up"): "mlp.up_proj.weight",
        ("mlp", "down"): "mlp.down_proj.weight",
    },
    embedding="embed_tokens.weight",
    norm="norm.weight",
    head="lm_head.weight",
    scale="weight_scale_inv",
)
ORIGINAL = Names(
    prefix="",
    attention="attn.",
    attention_parts={
        "q_a_kv": ("wq_a.weight", "wkv.weight"),
        "q_a_norm": ("q_norm.weight",),
        "q_b": ("wq_b.weight",),
        "kv_norm": ("kv_norm.weight",),
        "sinks": ("attn_sink",),
        "o_a": ("wo_a.weight",),
        "o_b": ("wo_b.weight",),
    },
    layer={
        ("attention_norm", "weight"): "attn_norm.weight",
        ("mlp_norm", "weight"): "ffn_norm.weight",
        ("mlp", "gate"): "ffn.w1.weight",
        ("mlp", "up"): "ffn.w3.weight",
        ("mlp", "down"): "ffn.w2.weight",
    },
    embedding="embed.weight",
    norm="norm.weight",
    head="head.weight",
    scale="scale",
)


@dataclasses.dataclass(frozen=True)
class Part:
    """A tensor of a checkpoint, and which of its rows and columns are wanted."""

    name: str
    shape: tuple[int, ...]
    slices: tuple[slice, slice] = WHOLE

    @property
    def index(self) -> tuple[slice, ...]:
        """The slices, as many as the tensor has axes."""
        return self.slices[: len(self.shape)]

    @property
    def wanted_shape(self) -> tuple[int, ...]:
        """The shape of what is wanted."""
        pairs = zip(self.index, self.shape, strict=True)
        return tuple(len(range(*piece.indices(size))) for piece, size in pairs)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter: its path in the tree, its parts along the first axis, and its dtype.

    `layers` is how many layers' values are stacked along a leading axis; None without one.
    """

    path: tuple[str, ...]
    parts: tuple[Part, ...]
    dtype: str
    layers: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape."""
        shapes = [part.wanted_shape for part in self.parts]
        rows, others = sum(shape[0] for shape in shapes), shapes[0][1:]
        if self.layers is None:
            return (rows, *others)
        return (self.layers, rows // self.layers, *others)


def find_names(tensors: Iterable[str]) -> Names:
    """The convention that names follow: Hugging Face's, unless some are of the original one."""
    tensors = list(tensors)
    if any(name.endswith(("attn_sink", "wq_a.weight")) for name in tensors):
        return ORIGINAL
    prefixed = any(name.startswith(HUGGING_FACE.prefix) for name in tensors)
    return HUGGING_FACE if prefixed else dataclasses.replace(HUGGING_FACE, prefix="")


def attention_leaves(
    config: AttentionConfig, names: Names, prefix: str = "", shard: tuple[int, int] = (0, 1)
) -> list[Leaf]:
    """The parameters of an attention layer.

    Args:
      config: the whole layer's configuration.
      names: the convention.
      prefix: of the tensors' names.
      shard: (index, count), see `shard_slices`.
    """
    slices = shard_slices(config, shard)
    shapes = parameter_shapes(config)
    heights = {"q_a_kv": (config.q_lora_rank, config.head_dim)}
    leaves = []
    for name, tensors in names.attention_parts.items():
        rows, *columns = shapes[name]
        parts = tuple(
            Part(prefix + tensor, (height, *columns), slices.get(name, WHOLE))
            for tensor, height in zip(tensors, heights.get(name, (rows,)), strict=True)
        )
        leaves.append(Leaf((name,), parts, config.param_dtype if columns else "float32"))
    return leaves


def decoder_leaves(config: DecoderConfig, names: Names) -> list[Leaf]:
    """The parameters of a decoder, those of a layer together; `scan_layers` stacks the layers.

    Args:
      config: the decoder's configuration.
      names: the convention.

    Raises:
      ValueError: the decoder has experts.
    """
    if config.experts is not None:
        raise ValueError(
            f"experts: expected None in a decoder under public names, whose layers have a SwiGLU, "
            f"got {config.experts}; save_params and load_params keep any parameters"
        )
    layers = [_layer_leaves(config, names, i) for i in range(config.num_layers)]
    if config.scan_layers:
        stacked = [
            Leaf(
                ("layers", "layer", *same[0].path),
                tuple(part for leaf in same for part in leaf.parts),
                same[0].dtype,
                config.num_layers,
            )
            for same in zip(*layers, strict=True)
        ]
    else:
        stacked = [
            dataclasses.replace(leaf, path=(f"layers_{i}", *leaf.path))
            for i, leaves in enumerate(layers)
            for leaf in leaves
        ]
    hidden = config.hidden_size
    table, dtype = (config.vocab_size, hidden), config.layers[0].param_dtype
    return [
        _leaf(("embedding",), names.prefix + names.embedding, table, dtype),
        *stacked,
        _leaf(("norm", "weight"), names.prefix + names.norm, (hidden,), "float32"),
        _leaf(("head",), names.head, table, dtype),
    ]


def _layer_leaves(config: DecoderConfig, names: Names, layer: int) -> list[Leaf]:
    """The parameters of a layer; their paths begin in the layer."""
    attention = config.layers[layer]
    shapes = {
        "weight": (config.hidden_size,),
        "gate": (config.mlp_size, config.hidden_size),
        "up": (config.mlp_size, config.hidden_size),
        "down": (config.hidden_size, config.mlp_size),
    }
    leaves = [
        dataclasses.replace(leaf, path=("attention", *leaf.path))
        for leaf in attention_leaves(attention, names, names.attention_prefix(layer))
    ]
    for path, name in names.layer.items():
        shape = shapes[path[-1]]
        dtype = attention.param_dtype if len(shape) > 1 else "float32"
        leaves.append(_leaf(path, f"{names.prefix}layers.{layer}.{name}", shape, dtype))
    return leaves


def _leaf(path: tuple[str, ...], name: str, shape: tuple[int, ...], dtype: str) -> Leaf:
    return Leaf(path, (Part(name, shape),), dtype)


def parameter_name(path: tuple[Any, ...]) -> str:
    """A parameter's path in its tree, joined by dots.

    Args:
      path: keys, as `jax.tree_util.tree_leaves_with_path` gives them. A partitioning box has its
        array as an attribute, which is no part of the name.
    """
    keys = path[:-1] if path and isinstance(path[-1], GetAttrKey) else path
    return keystr(keys, simple=True, separator=".")
