"""Weights in and out: checkpoints under public names, and parameter trees in one file."""

import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels import checks
from swa_jax.config import AttentionConfig, DecoderConfig
from swa_jax.files import (
    check_dtype,
    checked_path,
    read_safetensors,
    write_safetensors,
    write_whole,
)
from swa_jax.head_shards import shard_config as shard_config
from swa_jax.reading import read_regular
from swa_jax.tensor_files import open_tensors as open_tensors
from swa_jax.weight_loading import load_leaves
from swa_jax.weight_names import attention_leaves, decoder_leaves, find_names, parameter_name
from swa_jax.weight_saving import save_decoder as save_decoder

_COMPRESSION = ("compressor.", "indexer.")
# Trees are walked by recursion, in Python and in JAX.
_MAX_PARENTS = 64


def attention_params(
    tensors: Mapping[str, Any], config: AttentionConfig
) -> dict[str, dict[str, Array]]:
    """One attention layer's parameters from tensors under their public names.

    Args:
      tensors: floating arrays [out, in] by name, with Hugging Face's names (q_a_proj.weight,
        q_a_norm.weight, q_b_proj.weight, kv_proj.weight, kv_norm.weight, sinks, o_a_proj.weight,
        o_b_proj.weight) or the original ones (wq_a.weight, q_norm.weight, wq_b.weight,
        wkv.weight, kv_norm.weight, attn_sink, wo_a.weight, wo_b.weight). Matrices may be
        block-scaled, see `load_attention`.
      config: the layer's configuration.

    Returns:
      {"params": ...} for `SlidingWindowAttention(config).apply`.

    Raises:
      ValueError: missing, unexpected or misshapen tensors; one error lists them all.
    """
    checks.check_type("tensors", tensors, Mapping)
    checks.check_type("config", config, AttentionConfig)
    names = find_names(tensors)
    leaves = attention_leaves(config, names)
    return {"params": load_leaves("tensors", tensors, leaves, names, tensors)}


def load_attention(
    path_or_tensors: str | os.PathLike[str] | Mapping[str, Any],
    config: AttentionConfig,
    layer: int,
    *,
    shard: tuple[int, int] = (0, 1),
    progress: bool = False,
) -> dict[str, dict[str, Array]]:
    """One attention layer's parameters out of a whole model's checkpoint.

    Names are Hugging Face's (model.layers.0.self_attn.q_a_proj.weight; "model." may be absent) or
    the original ones (layers.0.attn.wq_a.weight). Other layers, and what is not attention, are not
    looked at. The layer's tensors under "compressor." and "indexer." are left out: what they make
    comes to this library's layer as `extra`.

    Matrices are floating, or e4m3 with scales for blocks of 128 x 128 or 32 x 32 beside them
    (q_a_proj.weight_scale_inv or wq_a.scale, [ceil(out / b), ceil(in / b)]; ue8m0, its biased
    exponents in uint8, or float32; finite, 0 or more). They are multiplied in float32 and rounded
    once, to config.param_dtype; NaN stays. Norm weights and sinks become float32.

    Args:
      path_or_tensors: a file or directory as `open_tensors` takes it; or arrays by name.
      config: the whole layer's configuration.
      layer: the layer's number.
      shard: (index, count), for tensor parallelism: only the heads of this one of `count` shards
        are read. The shards' outputs add up to the layer's.
      progress: show a bar on standard error.

    Returns:
      {"params": ...} for a layer with `shard_config(config, count)`.

    Raises:
      ValueError: missing, unexpected or misshapen tensors, or scales out of range, one error
        lists them; a layer that cannot be cut so; or as `open_tensors`.
      OSError: as `open_tensors`.
    """
    checks.check_type("config", config, AttentionConfig)
    checks.check_integer("layer", layer, 0)
    source, tensors = _opened(path_or_tensors)
    names = find_names(tensors)
    prefix = names.attention_prefix(layer)
    leaves = attention_leaves(config, names, prefix, shard)
    left_out = tuple(prefix + part for part in _COMPRESSION)
    present = [
        name for name in tensors if name.startswith(prefix) and not name.startswith(left_out)
    ]
    return {"params": load_leaves(source, tensors, leaves, names, present, progress)}


def load_decoder(
    path_or_tensors: str | os.PathLike[str] | Mapping[str, Any],
    config: DecoderConfig,
    *,
    progress: bool = False,
) -> dict[str, Any]:
    """A decoder's parameters out of its checkpoint.

    Names and dtypes are those of `load_attention`; of each layer also the norms before attention
    and SwiGLU and the SwiGLU's matrices, and embedding, last norm and head. Every tensor must have
    its place, but for "compressor." and "indexer." of layers whose extra_fmt is given. One tensor
    at a time is read, and no page of a file stays in memory.

    The configuration is not read here: `hf_config.read_config` reads the config.json beside it.

    Args:
      path_or_tensors: a file or directory as `open_tensors` takes it; or arrays by name.
      config: the decoder's configuration.
      progress: show a bar on standard error.

    Returns:
      {"params": ...} for `Decoder(config).apply`, stacked if config.scan_layers.

    Raises:
      ValueError: missing, unexpected or misshapen tensors, or scales out of range, one error
        lists them; or as `open_tensors`.
      OSError: as `open_tensors`.
    """
    checks.check_type("config", config, DecoderConfig)
    source, tensors = _opened(path_or_tensors)
    names = find_names(tensors)
    leaves = decoder_leaves(config, names)
    left_out = tuple(
        names.attention_prefix(i) + part
        for i, layer in enumerate(config.layers)
        if layer.extra_fmt is not None
        for part in _COMPRESSION
    )
    present = [name for name in tensors if not name.startswith(left_out)]
    return {"params": load_leaves(source, tensors, leaves, names, present, progress)}


def _opened(path_or_tensors) -> tuple[str, Mapping[str, Any]]:
    """What messages call the tensors, and the tensors."""
    if isinstance(path_or_tensors, Mapping):
        return "tensors", path_or_tensors
    path = checked_path("path_or_tensors", path_or_tensors)
    return str(path), open_tensors(path)


def save_params(
    path: str | os.PathLike[str],
    params: Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
    dtype: str | None = None,
) -> None:
    """Writes a parameter tree as safetensors, with its path joined by dots as each name.

    The file appears whole or not at all, and what `load_params` would not read is not written.

    Args:
      path: the file.
      params: a tree of arrays; partitioning boxes are taken off. It comes back as dictionaries:
        a dot in a name parts it in two, and items of a list are named by their numbers.
      metadata: texts to keep in the header.
      dtype: dtype to cast floating arrays of more than one axis to, such as "bfloat16"; vectors
        (norm weights, sinks) stay as they are. None: as they are.

    Raises:
      ValueError: there is no parameter, two have one name, or one lies where another has its
        branches; an array has a dtype that safetensors or NumPy has not; the metadata is no texts
        by name; or the dtype is no floating one.
      OSError: the file cannot be written.
    """
    path = checked_path("path", path)
    checks.check_type("params", params, Mapping)
    if dtype is not None:
        checks.check_choice("dtype", dtype, ("bfloat16", "float16", "float32"))
    arrays = {}
    for keys, value in jax.tree_util.tree_leaves_with_path(params):
        name = parameter_name(keys)
        if name in arrays:
            raise ValueError(f"params: expected a name for each parameter, got {name} twice")
        # a key's dtype is none of NumPy's, so it is looked at before the value
        kind = value.dtype if isinstance(value, jax.Array) else np.asarray(value).dtype
        if dtype is not None and np.ndim(value) > 1 and jnp.issubdtype(kind, jnp.floating):
            kind = jnp.dtype(dtype)
        check_dtype(f"params: {name}", kind)
        arrays[name] = np.asarray(jax.device_get(value), kind, order="C")
    if not arrays:
        raise ValueError("params: expected at least one array, got none")
    _as_tree("params", arrays)
    write_whole(path, write_safetensors(arrays, {} if metadata is None else metadata))


def load_params(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Reads what `save_params` wrote.

    Args:
      path: the file.

    Returns:
      The tree of NumPy arrays, in the dtypes of the file, and the metadata.

    Raises:
      ValueError: the file is not safetensors, is cut short, or its names are not those of a tree.
      OSError: it cannot be read.
    """
    path = checked_path("path", path)
    tensors, metadata = read_safetensors(read_regular(path), str(path))
    return _as_tree(str(path), tensors), metadata


def _as_tree(source: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors in the tree that the dots of their names make; ValueError where they make none."""
    tree: dict[str, Any] = {}
    for name, array in tensors.items():
        *parents, leaf = name.split(".")
        if len(parents) > _MAX_PARENTS:
            raise ValueError(
                f"{source}: expected a tree of at most {_MAX_PARENTS} levels, got {len(parents)} "
                f"of them above a tensor"
            )
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
            if not isinstance(branch, dict):
                break
        if not isinstance(branch, dict) or leaf in branch:
            raise ValueError(f"{source}: expected {name!r} to lie in a tree, got two kinds of it")
        branch[leaf] = array
    return tree
