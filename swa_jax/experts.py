"""The feed-forward half of a decoder layer as a mixture of experts, each a SwiGLU."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from swa_jax.config import AttentionConfig, ExpertsConfig
from swa_jax.mlp import SwiGLU, kernel_init, swiglu

# Rows multiplied with an expert at a time: few waste little where experts have few tokens. Measured
# on CPU: a product of fewer than 16 costs as much, and above 64 there is little to gain.
_SMALLEST_BLOCK, _LARGEST_BLOCK = 16, 128
# Added to sums of scores: sigmoids may all be 0. Its square, in the gradient, is not.
_SMALLEST_SUM = 1e-18

_stacked_init = nn.initializers.variance_scaling(
    1.0, "fan_in", "truncated_normal", in_axis=-1, out_axis=-2, batch_axis=(0,)
)


class Experts(nn.Module):
    """A sum of the SwiGLUs that each token chooses, by weight, and of the shared one.

    Every choice is served, however many tokens make the same one. On one device, memory grows with
    tokens * top_k, and only experts that are chosen are read. What else is in a call changes no
    token; calls of other shapes multiply in other blocks, and agree to rounding.

    Parameters: router float32[experts, hidden] and router_bias float32[experts], which moves the
    choice but not the weights and has no gradient: what balances the load sets it. gate and up
    [experts, expert_size, hidden] and down [experts, hidden, expert_size]; shared, a SwiGLU.

    Attributes:
      config: of the layer's attention, for dtypes and names of axes.
      experts: the experts' configuration.
    """

    config: AttentionConfig
    experts: ExpertsConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "*b hidden"], valid: Bool[Array, "*b"] | None = None
    ) -> Float[Array, "*b hidden"]:
        """The sublayer's output, in x's dtype.

        Args:
          x: floating[..., hidden].
          valid: bool[...], False at padding, which no expert but the shared one then computes.
            None: there is no padding.
        """
        names, dtype = self.config.axis_names, jnp.dtype(self.config.param_dtype)
        experts, hidden = self.experts, x.shape[-1]
        count, size = experts.num_experts, experts.expert_size

        def param(name, init, axes, shape, dtype=dtype) -> Any:
            init = nn.with_logical_partitioning(init, (names.experts, *axes))
            return self.param(name, init, (count, *shape), dtype)

        router = param("router", kernel_init, (names.embed,), (hidden,), jnp.float32)
        bias = param("router_bias", nn.initializers.zeros, (), (), jnp.float32)
        gate = param("gate", _stacked_init, (names.mlp, names.embed), (size, hidden))
        up = param("up", _stacked_init, (names.mlp, names.embed), (size, hidden))
        down = param("down", _stacked_init, (names.embed, names.mlp), (hidden, size))

        rows = x.reshape(-1, hidden)
        used = jnp.ones(len(rows), bool) if valid is None else valid.reshape(-1)
        chosen, weights = choose_experts(rows, router, bias, experts)
        # Padding chooses nobody: an index beyond the experts.
        chosen = jnp.where(used[:, None], chosen, count)
        weights = jnp.where(used[:, None], weights, jnp.zeros((), weights.dtype))
        y = _weighted_sum(rows, chosen, weights, gate, up, down).reshape(x.shape)
        if experts.shared_size:
            y = y + SwiGLU(self.config, experts.shared_size, name="shared")(x)
        return y


def choose_experts(
    x: Float[Array, "n hidden"],
    router: Float32[Array, "experts hidden"],
    bias: Float32[Array, " experts"],
    config: ExpertsConfig,
) -> tuple[Int32[Array, "n k"], Float32[Array, "n k"]]:
    """The experts of each token, and what each counts.

    The highest scores with bias are chosen, the lower index first where two are equal. The weights
    come from the scores without bias, as in DeepSeek-V3's choice without an auxiliary loss.

    Args:
      x: floating[n, hidden]. The products are float32.
      router: float32[experts, hidden].
      bias: float32[experts].
      config: the experts' configuration.

    Returns:
      indices, int32[n, top_k], and weights, float32[n, top_k].
    """
    highest = lax.Precision.HIGHEST  # the default may be TF32, whose rounding changes choices
    logits = jnp.einsum("nh,eh->ne", x.astype(jnp.float32), router, precision=highest)
    if config.scoring == "softmax":
        scores = jax.nn.softmax(logits, axis=-1)
    elif config.scoring == "sigmoid":
        scores = jax.nn.sigmoid(logits)
    else:
        # A square root of 0 has no gradient.
        scores = jnp.sqrt(jnp.maximum(jax.nn.softplus(logits), jnp.finfo(jnp.float32).tiny))
    _, chosen = lax.top_k(lax.stop_gradient(scores + bias[None]), config.top_k)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if config.normalise_weights:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + _SMALLEST_SUM)
    return chosen, weights * config.routed_scale


def _weighted_sum(x, chosen, weights, gate, up, down):
    """The experts' outputs by weight, in x's dtype. An index beyond the experts counts as 0."""
    top_k, count = chosen.shape[1], len(gate)
    pairs = chosen.reshape(-1)  # of a token and an expert
    order = jnp.argsort(pairs)
    ends = jnp.searchsorted(pairs[order], jnp.arange(count, dtype=jnp.int32), side="right")
    y = grouped_swiglu(x[order // top_k], ends, gate, up, down)
    # Each token adds in the order of its own choice, whatever the other tokens chose.
    y = y[jnp.argsort(order)].reshape(*chosen.shape, -1).astype(jnp.float32)
    return jnp.sum(y * weights[..., None], axis=1).astype(x.dtype)


@jax.custom_vjp
def grouped_swiglu(
    x: Float[Array, "rows hidden"],
    ends: Int32[Array, " experts"],
    gate: Float[Array, "experts size hidden"],
    up: Float[Array, "experts size hidden"],
    down: Float[Array, "experts hidden size"],
) -> Float[Array, "rows hidden"]:
    """Each expert's SwiGLU of its own rows: those from the end of the expert before to its own.

    A loop over blocks of rows, each of one expert. (`lax.ragged_dot`, unless XLA has a kernel for
    it, multiplies rows * experts with zeros in between: it reads all experts, takes that much
    memory, and one NaN in an expert reaches everyone.)

    Args:
      x: floating[rows, hidden], sorted by expert.
      ends: int32[experts], where each expert's rows end. Rows after the last are nobody's.
      gate: the experts' kernels [experts, size, hidden].
      up: likewise.
      down: [experts, hidden, size].

    Returns:
      x's dtype [rows, hidden]; 0 in rows that are nobody's.
    """
    block = _block_size(x, ends)
    padded = jnp.pad(x, ((0, block), (0, 0)))

    def multiply(state):
        start, y = state
        expert, stop = _next_block(start, ends, block)
        rows = lax.dynamic_slice_in_dim(padded, start, block)
        rows = swiglu(rows, gate[expert], up[expert], down[expert])
        # Rows of the block behind its stop are another expert's, whose own block comes later.
        return stop, lax.dynamic_update_slice_in_dim(y, rows, start, 0)

    first = jnp.zeros((), jnp.int32), jnp.zeros_like(padded)
    _, y = lax.while_loop(lambda state: state[0] < ends[-1], multiply, first)
    somebodys = jnp.arange(len(x), dtype=jnp.int32)[:, None] < ends[-1]
    return jnp.where(somebodys, y[: len(x)], jnp.zeros((), x.dtype))


def _forward(x, ends, gate, up, down):
    return grouped_swiglu(x, ends, gate, up, down), (x, ends, gate, up, down)


def _backward(residuals, dy):
    """By hand, as such a loop has no gradient: blocks are computed anew, sums are float32."""
    x, ends, *kernels = residuals
    block = _block_size(x, ends)
    padded, dy = (jnp.pad(rows, ((0, block), (0, 0))) for rows in (x, dy))

    def multiply(state):
        start, dx, sums = state
        expert, stop = _next_block(start, ends, block)
        own = start + jnp.arange(block, dtype=jnp.int32)[:, None] < stop
        rows, drows = (
            jnp.where(own, lax.dynamic_slice_in_dim(y, start, block), jnp.zeros((), y.dtype))
            for y in (padded, dy)
        )
        _, pull = jax.vjp(swiglu, rows, *(kernel[expert] for kernel in kernels))
        drows, *parts = pull(drows)
        dx = lax.dynamic_update_slice_in_dim(dx, drows, start, 0)
        sums = [
            total.at[expert].add(part.astype(jnp.float32))
            for total, part in zip(sums, parts, strict=True)
        ]
        return stop, dx, sums

    zeros = [jnp.zeros(kernel.shape, jnp.float32) for kernel in kernels]
    first = jnp.zeros((), jnp.int32), jnp.zeros_like(padded), zeros
    _, dx, sums = lax.while_loop(lambda state: state[0] < ends[-1], multiply, first)
    sums = [total.astype(kernel.dtype) for total, kernel in zip(sums, kernels, strict=True)]
    return dx[: len(x)], None, *sums


grouped_swiglu.defvjp(_forward, _backward)


def _block_size(x, ends) -> int:
    """A power of two, about as many rows as an expert has on average."""
    mean = -(-len(x) // len(ends))
    return min(max(1 << (mean - 1).bit_length(), _SMALLEST_BLOCK), _LARGEST_BLOCK)


def _next_block(start, ends, block):
    """The expert whose rows begin at `start`, and where its block stops."""
    expert = jnp.sum(ends <= start, dtype=jnp.int32)
    return expert, jnp.minimum(start + block, ends[expert])
