"""Where a decoder's parameters lie on several devices, for a cache with a sharding."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.spmd import logical_to_mesh
from jax.sharding import NamedSharding, PartitionSpec

from swa_jax.modules import Decoder
from swa_jax.placement import DeviceAxes


def parameter_shardings(model: Decoder, sharding: NamedSharding) -> Any:
    """Shardings of a decoder's variables that go with a cache's: heads split, requests not.

    Queries and sinks are split by heads, the output projection by groups of heads, the
    feed-forward by its inner width, embedding and scores by the vocabulary; what makes the shared
    row is whole everywhere, and so is an MLP or a vocabulary that cannot be divided. XLA adds the
    parts up: two sums of activations a layer.

    Args:
      model: the decoder.
      sharding: of the cache, see `RingCache.create`.

    Returns:
      A NamedSharding for each variable, for `jax.device_put(params, ...)`.

    Raises:
      ValueError: heads or groups of heads cannot be divided.
    """
    axes = DeviceAxes.of(sharding)
    for i, layer in enumerate(model.config.layers):
        for name in ("num_heads", "o_groups"):
            if getattr(layer, name) % axes.head_shards:
                raise ValueError(
                    f"{name}: expected a multiple of {axes.head_shards}, the devices of "
                    f"{axes.heads}, got {getattr(layer, name)} in layer {i}"
                )
    # The first that fits takes the devices: o_a is split by groups and not within them.
    split = [
        getattr(layer.axis_names, kind)
        for kind in ("output_rank", "heads", "mlp", "vocab")
        for layer in model.config.layers
    ]
    rules = [(name, axes.heads or None) for name in dict.fromkeys(split)]
    boxed = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    specs = logical_to_mesh(nn.get_partition_spec(boxed), rules)

    def place(leaf, spec: PartitionSpec) -> NamedSharding:
        fits = all(
            entry is None or size % axes.head_shards == 0
            for size, entry in zip(leaf.shape, spec, strict=False)
        )
        return NamedSharding(sharding.mesh, spec if fits else PartitionSpec())

    return jax.tree.map(place, nn.meta.unbox(boxed), specs)
