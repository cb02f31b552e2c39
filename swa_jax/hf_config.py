"""Configurations out of the config.json that lies beside a model's weights, and back."""

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pallas_kernels import V4, V41, V41_FP4, KVCacheFormat
from swa_jax.config import AttentionConfig, DecoderConfig
from swa_jax.files import write_whole
from swa_jax.reading import inside, read_object
from swa_jax.rotary import YarnScaling

OWN = "swa_jax"
"""The model type of configurations that `write_config` wrote."""

# Model type: format of window rows, of compressed rows, and whether queries are normalised.
_FAMILIES: dict[str, tuple[KVCacheFormat, KVCacheFormat, bool]] = {
    "deepseek_v4": (V4, V4, True),
    "deepseek_v41": (V41, V41_FP4, False),
    "deepseek_v41_text": (V41, V41_FP4, False),
}
# What a decoder has that Decoder has not, and the values that mean it has not.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "n_routed_experts": (None, 0),
    "hc_mult": (None, 1),
    "hidden_act": (None, "silu"),
    "swiglu_limit": (None,),
    "mlp_bias": (None, False),
    "tie_word_embeddings": (None, False),
}
_KINDS = {
    "sliding_attention": False,
    "compressed_sparse_attention": True,
    "heavily_compressed_attention": True,
    "shared_compressed_attention": True,
}


def read_config(path: str | os.PathLike[str]) -> DecoderConfig:
    """The decoder that a directory's config.json describes.

    It says which rows a layer keeps as well: V4 rows for DeepSeek-V4, V41 rows for V4.1. Other
    choices are made afterwards with `DecoderConfig.replace_attention`.

    Args:
      path: the directory, or its config.json.

    Raises:
      ValueError: not such a file, or a link out of the directory; another kind of model; or one
        with parts that `Decoder` has not, routed experts and hyper-connections: `read_attention`
        reads the attention of those.
      OSError: it cannot be read.
    """
    name, fields = _read(path)
    if fields.get("model_type") == OWN:
        del fields["model_type"]
        try:
            return DecoderConfig.from_json(json.dumps(fields))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    text = _text_fields(name, fields)
    parts = [f"{key} {text[key]!r}" for key in _PLAIN if text.get(key) not in _PLAIN[key]]
    if parts:
        raise ValueError(
            f"{name}: expected a decoder with one residual stream, a dense SwiGLU without limits "
            f"and biases, and a head of its own, got {', '.join(parts)}; read_attention reads its "
            f"attention layers"
        )
    layers = _layers(name, text)
    return DecoderConfig(
        vocab_size=_number(name, text, "vocab_size"),
        num_layers=len(layers),
        attention=layers if len(set(layers)) > 1 else layers[0],
        mlp_size=_number(name, text, "intermediate_size"),
    )


def read_attention(path: str | os.PathLike[str]) -> tuple[AttentionConfig, ...]:
    """The attention layers that a directory's config.json describes, whatever stands around them.

    Args:
      path: the directory, or its config.json.

    Returns:
      One configuration for each layer.

    Raises:
      ValueError: not such a file, a link out of the directory, or another kind of model.
      OSError: it cannot be read.
    """
    name, fields = _read(path)
    if fields.get("model_type") == OWN:
        return read_config(path).layers
    return _layers(name, _text_fields(name, fields))


def write_config(path: str | os.PathLike[str], config: DecoderConfig) -> None:
    """Writes a config.json from which `read_config` gives the same configuration.

    Args:
      path: the directory.
      config: the decoder's configuration.
    """
    text = json.dumps({"model_type": OWN, **json.loads(config.to_json())}, indent=2)
    write_whole(Path(path) / "config.json", text.encode() + b"\n")


def _read(path) -> tuple[str, dict[str, Any]]:
    file = Path(path)
    file = inside(file, "config.json") if file.is_dir() else file
    return str(file), read_object(file)


def _text_fields(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of the text model."""
    text = fields.get("text_config", fields)
    if not isinstance(text, dict):
        raise ValueError(f"{name}: expected text_config to be an object, got {text!r}")
    kind = text.get("model_type", fields.get("model_type"))
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise ValueError(
            f"{name}: expected model_type {', '.join([*_FAMILIES, OWN])}, got {kind!r}"
        )
    return {**text, "model_type": kind}


def _number(name: str, fields: Mapping[str, Any], key: str) -> Any:
    value = fields.get(key)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not abs(value) <= sys.float_info.max
    ):
        raise ValueError(f"{name}: expected a number for {key}, got {value!r}")
    return value


def _kinds(name: str, fields: Mapping[str, Any], key: str) -> list[Any]:
    value = fields.get(key)
    if not isinstance(value, list):
        raise ValueError(f"{name}: expected a list for {key}, got {value!r}")
    return value


def _layers(name: str, text: dict[str, Any]) -> tuple[AttentionConfig, ...]:
    window_fmt, compressed_fmt, query_norm = _FAMILIES[text["model_type"]]
    head_dim = _number(name, text, "head_dim")
    rope_dim = text.get("qk_rope_head_dim")
    if rope_dim is None:
        factor = _number(name, text, "partial_rotary_factor")
        if not 0 <= factor <= 1:
            raise ValueError(f"{name}: expected partial_rotary_factor from 0 to 1, got {factor!r}")
        rope_dim = round(head_dim * factor)
    dtype = text.get("dtype", text.get("torch_dtype")) or "float32"
    if dtype == "float16":  # the nearest that holds all of its values
        dtype = "float32"
    if text.get("attention_bias") not in (None, False):
        raise ValueError(f"{name}: expected no attention_bias, got {text['attention_bias']!r}")
    plain, compressed = _ropes(name, text)
    try:
        window = AttentionConfig(
            hidden_size=_number(name, text, "hidden_size"),
            num_heads=_number(name, text, "num_attention_heads"),
            head_dim=head_dim,
            rope_dim=rope_dim,
            q_lora_rank=_number(name, text, "q_lora_rank"),
            o_groups=_number(name, text, "o_groups"),
            o_lora_rank=_number(name, text, "o_lora_rank"),
            window=_number(name, text, "sliding_window"),
            norm_eps=_number(name, text, "rms_norm_eps"),
            query_norm=query_norm,
            fmt=window_fmt.with_width(head_dim),
            dtype=dtype,
            param_dtype=dtype,
            **plain,
        )
        extra_fmt = compressed_fmt.with_width(head_dim)
        kinds = {
            False: window,
            True: dataclasses.replace(window, **compressed, extra_fmt=extra_fmt),
        }
    except ValueError as error:
        raise ValueError(f"{name}: {str(error).removeprefix(f'{name}: ')}") from None
    return tuple(kinds[has] for has in _compressed_layers(name, text))


def _compressed_layers(name: str, text: dict[str, Any]) -> list[bool]:
    """For each layer whether it has a compressed cache beside its window."""
    count = _number(name, text, "num_hidden_layers")
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"{name}: expected num_hidden_layers of 1 or more, got {count!r}")
    if text.get("layer_types") is not None:
        kinds = _kinds(name, text, "layer_types")
        if not all(isinstance(kind, str) and kind in _KINDS for kind in kinds):
            raise ValueError(f"{name}: expected layer_types of {', '.join(_KINDS)}, got {kinds}")
        has = [_KINDS[kind] for kind in kinds]
    else:
        ratios = _kinds(name, text, "compress_ratios")
        if not all(type(ratio) is int and ratio >= 0 for ratio in ratios):
            raise ValueError(f"{name}: expected compress_ratios of 0 or more, got {ratios}")
        has = [ratio > 0 for ratio in ratios]
    if len(has) < count:  # draft layers may follow
        raise ValueError(f"{name}: expected kinds of {count} layers, got {len(has)}")
    return has[:count]


def _ropes(name: str, text: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rotation of layers with a window only, and of layers with a compressed cache too."""
    parameters = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise ValueError(f"{name}: expected rope scaling to be an object, got {parameters!r}")
    # One set of parameters alone scales the compressed layers; bases stand beside it.
    if "main" in parameters and "compress" in parameters:
        main, compress = parameters["main"], parameters["compress"]
        if _yarn(name, main) is not None:
            raise ValueError(f"{name}: expected no rope scaling in main, got {main!r}")
        scaling = _yarn(name, compress)
        thetas = _number(name, main, "rope_theta"), _number(name, compress, "rope_theta")
    else:
        thetas = text.get("rope_theta", 10000.0), text.get("compress_rope_theta", 160000.0)
        if parameters.get("rope_theta", thetas[0]) != thetas[0]:
            raise ValueError(
                f"{name}: expected the base {thetas[0]!r} in rope_parameters as beside them, got "
                f"{parameters['rope_theta']!r}"
            )
        scaling = _yarn(name, parameters)
    return {"rope_theta": thetas[0]}, {"rope_theta": thetas[1], "rope_scaling": scaling}


def _yarn(name: str, scaling: Any) -> YarnScaling | None:
    if not isinstance(scaling, dict):
        raise ValueError(f"{name}: expected rope scaling to be an object, got {scaling!r}")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise ValueError(f"{name}: expected rope scaling of type yarn or default, got {kind!r}")
    for key in ("attention_factor", "mscale", "mscale_all_dim"):
        if scaling.get(key) not in (None, 1.0):
            raise ValueError(f"{name}: expected {key} 1 or none, got {scaling[key]!r}")
    try:
        return YarnScaling(
            factor=_number(name, scaling, "factor"),
            original_max_positions=_number(name, scaling, "original_max_position_embeddings"),
            beta_fast=scaling.get("beta_fast", 32.0),
            beta_slow=scaling.get("beta_slow", 1.0),
        )
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
