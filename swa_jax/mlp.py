"""The feed-forward half of a decoder layer."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from swa_jax.config import AttentionConfig

kernel_init = nn.initializers.variance_scaling(
    1.0, "fan_in", "truncated_normal", in_axis=-1, out_axis=-2
)
"""For kernels [out, in]."""


def swiglu(
    x: Float[Array, "*b hidden"],
    gate: Float[Array, "size hidden"],
    up: Float[Array, "size hidden"],
    down: Float[Array, "hidden size"],
) -> Float[Array, "*b hidden"]:
    """down(silu(gate(x)) * up(x)), in x's dtype.

    Args:
      x: floating[..., hidden].
      gate: floating[size, hidden], and so is `up`.
      up: floating[size, hidden].
      down: floating[hidden, size].

    Returns:
      x's dtype[..., hidden].
    """

    def project(x, kernel):
        return jnp.einsum("...i,oi->...o", x, kernel.astype(x.dtype))

    return project(nn.silu(project(x, gate)) * project(x, up), down)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), kernels [out, in]."""

    config: AttentionConfig
    size: int

    @nn.compact
    def __call__(self, x: Float[Array, "*b hidden"]) -> Float[Array, "*b hidden"]:
        """The sublayer's output, in x's dtype."""
        names, dtype = self.config.axis_names, jnp.dtype(self.config.param_dtype)
        hidden = x.shape[-1]

        def kernel(name, shape, axes) -> Any:
            return self.param(name, nn.with_logical_partitioning(kernel_init, axes), shape, dtype)

        gate = kernel("gate", (self.size, hidden), (names.mlp, names.embed))
        up = kernel("up", (self.size, hidden), (names.mlp, names.embed))
        down = kernel("down", (hidden, self.size), (names.embed, names.mlp))
        return swiglu(x, gate, up, down)
