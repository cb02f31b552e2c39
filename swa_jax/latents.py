"""Latent rows as a layer's configuration has them: transformed, or transformed and stored."""

from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import KVRows, fused_store
from pallas_kernels.dispatch import Implementation
from pallas_kernels.fused_store.xla import transform_rows
from swa_jax.config import AttentionConfig
from swa_jax.heads import Rotation, by_query


def transform_latents(
    latents: Float[Array, "b t d"],
    norm_weight: Float[Array, " d"],
    rotation: Rotation,
    config: AttentionConfig,
) -> Float32[Array, "b t d"]:
    """Norm, rotation and Hadamard transform of latent rows: what a row is before its cast.

    Args:
      latents: floating[B, T, D].
      norm_weight: floating[D].
      rotation: cosines and sines at the rows' positions, float32[B, T, R / 2] each.
      config: the layer's configuration.

    Returns:
      float32[B, T, D].
    """
    cos, sin = rotation
    return transform_rows(
        latents, norm_weight, cos, sin, config.norm_eps, config.pairing, config.hadamard
    )


def store_latents(
    rows: KVRows,
    latents: Float[Array, "b t d"],
    slots: Int32[Array, " bt"],
    norm_weight: Float[Array, " d"],
    rotation: Rotation,
    config: AttentionConfig,
    implementation: Implementation,
) -> KVRows:
    """Latent rows transformed, cast to the rows' format and stored, see `fused_store`.

    Args:
      rows: where to store.
      latents: floating[B, T, D].
      slots: int32[B * T], the flattened slot of each; -1 skips one.
      norm_weight: floating[D].
      rotation: cosines and sines at the rows' positions, float32[B, T, R / 2] each.
      config: the layer's configuration.
      implementation: of `fused_store`.

    Returns:
      The new rows.

    Raises:
      NotImplementedError: the implementation named cannot do it.
    """
    new, cos, sin = by_query(latents, *rotation)
    return fused_store(
        rows,
        new,
        slots,
        norm_weight=norm_weight,
        norm_eps=config.norm_eps,
        cos=cos,
        sin=sin,
        pairing=config.pairing,
        hadamard=config.hadamard,
        scale_floor=config.scale_floor,
        implementation=implementation,
    )
