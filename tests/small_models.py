"""Layers and decoders small enough to compile in seconds, with parameters that hide nothing."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from quick_compilation import QUICK_COMPILATION

import swa_jax as swa
from swa_jax.attention import parameter_shapes

quick_jit = functools.partial(jax.jit, compiler_options=QUICK_COMPILATION)


def attention_config(window: int, fmt: swa.KVCacheFormat, **fields: Any) -> swa.AttentionConfig:
    """Two heads over rows of 64 values: the ring has window + 6 rows."""
    values = {
        "hidden_size": 32,
        "num_heads": 2,
        "head_dim": 64,
        "rope_dim": 16,
        "q_lora_rank": 16,
        "o_groups": 2,
        "o_lora_rank": 8,
        "window": window,
        "fmt": fmt.with_width(64),
    }
    return swa.AttentionConfig(**values | fields)


def decoder_config(
    attention: swa.AttentionConfig, num_layers: int = 3, **fields: Any
) -> swa.DecoderConfig:
    return swa.DecoderConfig(50, num_layers, attention, mlp_size=48, **fields)


def layer_params(config: swa.AttentionConfig, seed: int = 0) -> dict[str, Any]:
    """Variables of one attention layer."""
    shapes = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32 if len(shape) == 1 else config.param_dtype)
        for name, shape in parameter_shapes(config).items()
    }
    return {"params": random_params(shapes, seed)}


def decoder_params(config: swa.DecoderConfig, seed: int = 0) -> dict[str, Any]:
    """Variables of a decoder."""
    return random_params(_decoder_shapes(config), seed)


@functools.cache
def _decoder_shapes(config: swa.DecoderConfig) -> Any:
    tokens = jnp.zeros((1, 1), jnp.int32)
    return nn.meta.unbox(jax.eval_shape(swa.Decoder(config).init, jax.random.key(0), tokens))


def random_params(shapes: Any, seed: int) -> Any:
    """Random values: no norm weight is 1, no sink is 0, and kernels keep sizes as they are."""
    rng = np.random.default_rng(seed)

    def value(path, leaf):
        name = path[-1].key
        if name == "sinks":
            number = rng.normal(size=leaf.shape)
        elif name.endswith("norm") or name == "weight":
            number = rng.uniform(0.5, 1.5, leaf.shape)
        else:
            spread = 1.0 if name == "embedding" else leaf.shape[-1] ** -0.5
            number = rng.normal(size=leaf.shape) * spread
        return jnp.asarray(number.astype(leaf.dtype))

    return jax.tree_util.tree_map_with_path(value, shapes)


def activations(config: swa.AttentionConfig, *shape: int, seed: int = 0) -> np.ndarray:
    """Standard normal values [*shape, hidden] in float32."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(*shape, config.hidden_size)).astype(np.float32)


def largest_error(got: Any, want: Any) -> float:
    """The largest difference, as a fraction of the largest value wanted."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.max(np.abs(got - want)) / np.max(np.abs(want)))
