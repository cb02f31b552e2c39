"""fused_store in plain XLA: the definition that the kernels are held to."""

from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import transforms
from pallas_kernels.formats import ScaleFloor, quantize_rows
from pallas_kernels.storage import KVRows, store_rows


def transform_rows(
    latents: Float[Array, "*n d"],
    norm_weight: Float[Array, " d"],
    cos: Float[Array, "*n half"],
    sin: Float[Array, "*n half"],
    norm_eps: float,
    pairing: str,
    hadamard: bool,
) -> Float32[Array, "*n d"]:
    """Norm, rotation and Hadamard transform of latent rows: what a row is before its cast."""
    row = transforms.row_norm(latents, norm_weight, norm_eps)
    row = transforms.rope(row, cos, sin, pairing)
    return transforms.hadamard(row) if hadamard else row


def fused_store(
    rows: KVRows,
    latents: Float[Array, "n d"],
    slots: Int32[Array, " n"],
    norm_weight: Float[Array, " d"],
    cos: Float[Array, "n half"],
    sin: Float[Array, "n half"],
    *,
    norm_eps: float,
    pairing: str,
    hadamard: bool,
    scale_floor: ScaleFloor,
) -> KVRows:
    """See `pallas_kernels.fused_store.fused_store`."""
    row = transform_rows(latents, norm_weight, cos, sin, norm_eps, pairing, hadamard)
    return store_rows(rows, quantize_rows(row, rows.fmt, scale_floor), slots)
