"""The byte model that the examples run: its file, and a text to continue with it."""

from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp

import swa_jax as swa

WEIGHTS = Path(__file__).parent / "data" / "bytes.safetensors"
PROMPT = """import os
import sys
import json
import collections


class Registry:
    \"\"\"Names and the objects they stand for.\"\"\"

    def __init__(self, names):
"""


def load_model(path: Path) -> tuple[swa.Decoder, dict]:
    """The byte model of a file written by train_bytes.py.

    Args:
      path: a safetensors file whose header holds the configuration.

    Returns:
      The decoder and its variables, in float32.

    Raises:
      ValueError: the file is not such a file, or is cut short.
      OSError: it cannot be read.
    """
    params, metadata = swa.checkpoint.load_params(path)
    if "config" not in metadata:
        raise ValueError(f"{path}: expected a header entry 'config', got {sorted(metadata)}")
    try:
        config = swa.DecoderConfig.from_json(metadata["config"])
    except ValueError as error:
        raise ValueError(f"{path}: header entry 'config': {error}") from None
    for name, leaf in _named(params):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(f"{path}: expected floating tensors, got {leaf.dtype} in {name}")
    layers = sum(name.startswith("layers_") for name in params)
    if not config.scan_layers and layers != config.num_layers:
        raise ValueError(f"{path}: expected {config.num_layers} layers, got {layers}")
    model = swa.Decoder(config)
    variables = {"params": jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)}
    boxed = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    expected = nn.meta.unbox(boxed)
    want = {name: leaf.shape for name, leaf in _named(expected)}
    got = {name: leaf.shape for name, leaf in _named(variables)}
    if want != got:
        wrong = sorted(name for name in want | got if want.get(name) != got.get(name))
        raise ValueError(f"{path}: expected other tensors for its configuration: {wrong[:5]}")
    return model, variables


def _named(tree) -> list:
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in pairs]
