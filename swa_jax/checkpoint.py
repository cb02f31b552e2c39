"""Weights in and out: safetensors files, and attention weights under their public names."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from swa_jax.attention import parameter_shapes
from swa_jax.config import AttentionConfig
from swa_jax.files import read_safetensors, write_safetensors

# Parameter: tensors that make it up, stacked along the first axis, by each convention.
_HUGGING_FACE = {
    "q_a_kv": ("q_a_proj.weight", "kv_proj.weight"),
    "q_a_norm": ("q_a_norm.weight",),
    "q_b": ("q_b_proj.weight",),
    "kv_norm": ("kv_norm.weight",),
    "sinks": ("sinks",),
    "o_a": ("o_a_proj.weight",),
    "o_b": ("o_b_proj.weight",),
}
_ORIGINAL = {
    "q_a_kv": ("wq_a.weight", "wkv.weight"),
    "q_a_norm": ("q_norm.weight",),
    "q_b": ("wq_b.weight",),
    "kv_norm": ("kv_norm.weight",),
    "sinks": ("attn_sink",),
    "o_a": ("wo_a.weight",),
    "o_b": ("wo_b.weight",),
}
_FLOAT32 = ("q_a_norm", "kv_norm", "sinks")


def attention_params(
    tensors: Mapping[str, Any], config: AttentionConfig
) -> dict[str, dict[str, Array]]:
    """One attention layer's parameters from tensors under their public names.

    Args:
      tensors: floating arrays [out, in] by name, with Hugging Face's names (q_a_proj.weight,
        q_a_norm.weight, q_b_proj.weight, kv_proj.weight, kv_norm.weight, sinks, o_a_proj.weight,
        o_b_proj.weight) or the original ones (wq_a.weight, q_norm.weight, wq_b.weight,
        wkv.weight, kv_norm.weight, attn_sink, wo_a.weight, wo_b.weight).
      config: the layer's configuration.

    Returns:
      {"params": ...} for `SlidingWindowAttention(config).apply`.

    Raises:
      ValueError: missing, unexpected or misshapen tensors; one error lists them all.
    """
    original = "attn_sink" in tensors or "wq_a.weight" in tensors
    names = _ORIGINAL if original else _HUGGING_FACE
    expected = {name for parts in names.values() for name in parts}
    faults = [f"missing {name}" for name in sorted(expected - set(tensors))]
    faults += [f"unexpected {name}" for name in sorted(set(tensors) - expected)]
    shapes = parameter_shapes(config)
    wanted = {parts[0]: shapes[name] for name, parts in names.items()}
    rank = config.q_lora_rank
    query, latent = names["q_a_kv"]
    wanted[query], wanted[latent] = (
        (rank, config.hidden_size),
        (config.head_dim, config.hidden_size),
    )
    for name in sorted(expected & set(tensors)):
        shape, dtype = jnp.shape(tensors[name]), jnp.result_type(tensors[name])
        if shape != wanted[name]:
            faults.append(f"{name}: expected shape {wanted[name]}, got {shape}")
        if not jnp.issubdtype(dtype, jnp.floating):
            faults.append(f"{name}: expected a floating dtype, got {dtype}")
    if faults:
        raise ValueError("tensors: " + "; ".join(faults))
    params = {}
    for name, parts in names.items():
        dtype = jnp.float32 if name in _FLOAT32 else jnp.dtype(config.param_dtype)
        arrays = [jnp.asarray(tensors[part]).astype(dtype) for part in parts]
        params[name] = jnp.concatenate(arrays) if len(arrays) > 1 else arrays[0]
    return {"params": params}


def save_params(
    path: str | os.PathLike[str],
    params: Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
    dtype: str | None = None,
) -> None:
    """Writes a parameter tree as safetensors, with its path joined by dots as each name.

    The file appears whole or not at all.

    Args:
      path: the file.
      params: a tree of arrays, without partitioning boxes.
      metadata: texts to keep in the header.
      dtype: dtype to cast floating arrays of more than one axis to, such as "bfloat16"; vectors
        (norm weights, sinks) stay as they are. None: as they are.
    """
    arrays = {}
    for keys, value in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(keys, simple=True, separator=".")
        array = np.asarray(jax.device_get(value))
        if dtype is not None and array.ndim > 1 and jnp.issubdtype(array.dtype, jnp.floating):
            array = array.astype(jnp.dtype(dtype))
        arrays[name] = np.ascontiguousarray(array)
    target = Path(path)
    partial = target.with_name(target.name + ".partial")
    partial.write_bytes(write_safetensors(arrays, metadata or {}))
    os.replace(partial, target)


def load_params(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Reads what `save_params` wrote.

    Args:
      path: the file.

    Returns:
      The tree of NumPy arrays, in the dtypes of the file, and the metadata.

    Raises:
      ValueError: the file is not safetensors, or is cut short.
      OSError: it cannot be read.
    """
    tensors, metadata = read_safetensors(Path(path).read_bytes(), str(path))
    tree: dict[str, Any] = {}
    for name, array in tensors.items():
        *parents, leaf = name.split(".")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
            if not isinstance(branch, dict):
                raise ValueError(f"{path}: expected {name!r} to lie in a tree, got two kinds of it")
        branch[leaf] = array
    return tree, metadata
