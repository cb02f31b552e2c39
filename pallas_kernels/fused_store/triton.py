"""fused_store as one kernel through Pallas and Triton: a row is read once and written once."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels import triton_common, triton_launch, triton_rows
from pallas_kernels.formats import ScaleFloor
from pallas_kernels.storage import ALIGNMENT, KVRows


def refusal(
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
) -> str | None:
    """Why the kernel cannot do this, or None where it can."""
    del norm_weight, slots, norm_eps, hadamard, scale_floor
    return (
        triton_rows.format_refusal(rows.fmt)
        or triton_rows.rotation_refusal(cos.shape[-1], pairing)
        or triton_common.too_large(rows.data, latents, cos, sin)
    )


# Tokens of a program by the width of a row. A program is one warp, whose 32 lanes hold 16 values
# each: a row of 512 in V41 is then one 16-byte store a lane, and no sum leaves its warp. Two and
# four warps to a row take 1.3 and 1.8 times the instructions; four rows to four warps save a tenth
# but wait for each other, and leave three of four multiprocessors idle in a decode step. The
# machine code of all cards is all but the same, so the table has no card.
_TOKENS = {512: 1, 256: 2, 128: 4, 64: 8}


def fused_store_kernel(
    latent_ref,  # floating[n, d]
    slot_ref,  # int32[n]
    start_ref,  # int32[1]
    weight_ref,  # float32[d]
    *refs,  # cos, sin: float32[n, half] unless half is 0; data in and out: uint8[slots, slot_bytes]
    tokens,
    rows_per_slot,
    fmt,
    norm_eps,
    pairing,
    hadamard,
    scale_floor,
    interpret,
):
    """Norm, rotation, Hadamard transform, cast and store of the rows of a few tokens."""
    *angle_refs, _, data_ref = refs
    n, width = latent_ref.shape
    token = pl.program_id(0) * tokens + jnp.arange(tokens, dtype=jnp.int32)
    column = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None, :], (tokens, width))
    exists = token < n
    slot = plgpu.load(slot_ref.at[token], mask=exists, other=-1)
    live = exists & (slot >= 0) & (slot < data_ref.shape[0] * rows_per_slot)

    # Loads of one shape share one layout, the store's, so little moves between registers. They do
    # not wait for the slot: what a skipped token loads is not used.
    row = plgpu.load(latent_ref.at[token[:, None], column], mask=exists[:, None], other=0)
    weight = plgpu.load(weight_ref.at[column])
    row = triton_rows.rms_norm(row.astype(jnp.float32), weight, norm_eps, interpret)
    if angle_refs:
        cos_ref, sin_ref = angle_refs
        cos, sin = triton_rows.load_angles(cos_ref, sin_ref, token, exists, width, pairing)
        rotated = triton_rows.rotate(row, cos, sin)
        # Not only the rotation by 0 of the others: it could change the sign of a zero.
        row = jnp.where(column < width - 2 * cos_ref.shape[1], row, rotated)
    if hadamard:
        row = triton_rows.hadamard(row)

    # Divided and multiplied, the start is known to be aligned: that is what makes stores wide.
    start = lax.div(start_ref[0], jnp.int32(ALIGNMENT)) * ALIGNMENT
    first = start + lax.rem(slot, jnp.int32(rows_per_slot)) * fmt.row_bytes
    block_slot = lax.div(slot, jnp.int32(rows_per_slot))
    triton_rows.store_row(data_ref, (block_slot,), first, row, fmt, scale_floor, live)


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
    card: str,
    interpret: bool,
) -> KVRows:
    """See `pallas_kernels.fused_store.fused_store`."""
    n, width = latents.shape
    if n == 0:
        return rows
    del card
    tokens = _TOKENS[width]
    kernel = functools.partial(
        fused_store_kernel,
        tokens=tokens,
        rows_per_slot=rows.rows_per_slot,
        fmt=rows.fmt,
        norm_eps=norm_eps,
        pairing=pairing,
        hadamard=hadamard,
        scale_floor=scale_floor,
        interpret=interpret,
    )
    operands = [latents, slots, rows.start.reshape(1), norm_weight]
    if cos.shape[1]:
        operands += [cos, sin]
    data = triton_launch.launch(
        kernel,
        [*operands, rows.data],
        jax.ShapeDtypeStruct(rows.data.shape, rows.data.dtype),
        grid=(pl.cdiv(n, tokens),),
        num_warps=1,
        aliases={len(operands): 0},
        interpret=interpret,
    )
    return dataclasses.replace(rows, data=data)
