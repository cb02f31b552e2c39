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


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), kernels [out, in]."""

    config: AttentionConfig
    size: int

    @nn.compact
    def __call__(self, x: Float[Array, "*b hidden"]) -> Float[Array, "*b hidden"]:
        """The sublayer's output, in x's dtype."""
        names, dtype = self.config.axis_names, jnp.dtype(self.config.param_dtype)

        def project(name, x, out, axes):
            init = nn.with_logical_partitioning(kernel_init, axes)
            kernel: Any = self.param(name, init, (out, x.shape[-1]), dtype)
            return jnp.einsum("...i,oi->...o", x, kernel.astype(x.dtype))

        gate = project("gate", x, self.size, (names.mlp, names.embed))
        up = project("up", x, self.size, (names.mlp, names.embed))
        return project("down", nn.silu(gate) * up, x.shape[-1], (names.embed, names.mlp))
