"""fused_store: norm, rotation, Hadamard transform, cast and scatter of new rows, in one call."""

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int

from pallas_kernels import checks, dispatch
from pallas_kernels.formats import SCALE_FLOORS, ScaleFloor, check_cache_format
from pallas_kernels.fused_store import xla
from pallas_kernels.storage import KVRows, check_rows
from pallas_kernels.transforms import check_rotation, checked_norm_eps

OPERATION = dispatch.operation("fused_store", xla.fused_store, "pallas_kernels.fused_store.triton")


def fused_store(
    rows: KVRows,
    latents: Float[Array, "n d"],
    slots: Int[ArrayLike, " n"],
    *,
    norm_weight: Float[Array, " d"],
    norm_eps: float,
    cos: Float[Array, "n half"],
    sin: Float[Array, "n half"],
    pairing: str = "interleaved",
    hadamard: bool = False,
    scale_floor: ScaleFloor = "amax",
    implementation: dispatch.Implementation = None,
) -> KVRows:
    """Transforms new latent rows and writes each to its slot.

    A row is normalised and rotated in float32 (RMSNorm, then RoPE on the last 2 * half values),
    transformed if asked, cast to the rows' format as `quantize_rows` does, and stored.

    Args:
      rows: where to store.
      latents: floating[n, d], the projected rows; d is the format's number of values.
      slots: integers[n], the flattened slot of each token; -1 or one outside the rows skips the
        token. The others are distinct.
      norm_weight: floating[d].
      norm_eps: added to the mean square.
      cos: floating[n, half], the cosines of the rotation at each token's position.
      sin: floating[n, half].
      pairing: "interleaved" or "half_split".
      hadamard: apply the orthonormal Hadamard transform after the rotation.
      scale_floor: "amax" or "scale", see `quantize_rows`.
      implementation: None, "xla", "triton" or "interpret".

    Returns:
      The new rows. A row with a non-finite value is stored as NaN and touches no other.

    Raises:
      ValueError: a wrong shape, dtype or choice.
      NotImplementedError: the implementation named cannot do it.
    """
    check_rows(rows)
    check_cache_format("rows", rows.fmt)
    width = rows.fmt.num_elements
    checks.check_floating("latents", latents)
    checks.check_shape("latents", latents, (None, width))
    tokens = latents.shape[0]
    slots = checks.as_int32("slots", slots)
    checks.check_shape("slots", slots, (tokens,))
    checks.check_floating("norm_weight", norm_weight)
    checks.check_shape("norm_weight", norm_weight, (width,))
    check_rotation(width, tokens, cos, sin, pairing)
    if hadamard and not checks.is_power_of_two(width):
        raise ValueError(f"hadamard: expected a row width that is a power of two, got {width}")
    checks.check_choice("scale_floor", scale_floor, SCALE_FLOORS)
    if latents.dtype == jnp.float64:
        latents = latents.astype(jnp.float32)
    return OPERATION(
        implementation,
        rows,
        latents,
        slots,
        norm_weight.astype(jnp.float32),
        cos.astype(jnp.float32),
        sin.astype(jnp.float32),
        norm_eps=checked_norm_eps("norm_eps", norm_eps),
        pairing=pairing,
        hadamard=hadamard,
        scale_floor=scale_floor,
    )
