"""Rows requantised to another format, and what that loses."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt8

from pallas_kernels import KVCacheFormat, checks, dequantize_rows, quantize_rows
from pallas_kernels.formats import SCALE_FLOORS, ScaleFloor, check_format
from pallas_kernels.serialization import register_serialization


@register_serialization
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ConversionLoss:
    """How far the values of converted rows are from those before; NaN equals NaN.

    Attributes:
      changed_values: int32[...], for each row the number of values that are not the same.
      largest_error: float32[...], the largest difference of two values of a row; infinite where a
        number has become NaN, or is NaN no longer.
      relative_error: float32[...], the same over the largest finite magnitude of the row.
    """

    changed_values: Int32[Array, "*batch"]
    largest_error: Float32[Array, "*batch"]
    relative_error: Float32[Array, "*batch"]

    @property
    def exact(self) -> Bool[Array, "*batch"]:
        """bool[...], whether all values of a row are the same."""
        return self.changed_values == 0


def convert_rows(
    data: UInt8[Array, "*batch row_bytes"],
    from_fmt: KVCacheFormat,
    to_fmt: KVCacheFormat,
    scale_floor: ScaleFloor = "amax",
) -> tuple[UInt8[Array, "*batch to_row_bytes"], ConversionLoss]:
    """Rows in another format: their values, quantised anew.

    Nothing is lost from a quantised format to BF16 and F32, and from BF16 to F32, within the
    exponents of bfloat16. The other ways lose: F32 to BF16 keeps 8 significant bits; what is
    quantised to e4m3 keeps 4, fewer where it is small beside the largest of its group, and e2m1
    keeps 2. Bytes come back from BF16 or F32 with the same values, but not always as the same
    bytes: a group whose largest code was rounded up or down may get another scale.

    Args:
      data: uint8[..., row_bytes], token-interleaved rows.
      from_fmt: their format.
      to_fmt: the format to convert to. If it is the same, the bytes are returned as they are.
      scale_floor: of the new scales, "amax" or "scale", as for `quantize_rows`.

    Returns:
      The rows, uint8[..., to_fmt.row_bytes], and what they lost.

    Raises:
      ValueError: a wrong shape, dtype or floor; formats of different widths; or V32 and another
        format.
    """
    before = dequantize_rows(data, from_fmt)
    check_format(to_fmt)
    checks.check_choice("scale_floor", scale_floor, SCALE_FLOORS)
    if from_fmt != to_fmt:
        for name, fmt in (("from_fmt", from_fmt), ("to_fmt", to_fmt)):
            if fmt.scale_dtype == "float32":
                raise ValueError(
                    f"{name}: expected a row that is the value too, got {fmt.name}: its value is "
                    f"the first {fmt.quantized_elements} of {fmt.num_elements}, with no rotary "
                    f"part, so that no row of another format stands for it"
                )
        if from_fmt.num_elements != to_fmt.num_elements:
            raise ValueError(
                f"to_fmt: expected rows of {from_fmt.num_elements} values, as those of "
                f"{from_fmt.name}, got {to_fmt.num_elements}"
            )
        data = quantize_rows(before, to_fmt, scale_floor)
    after = dequantize_rows(data, to_fmt)
    same = (before == after) | (jnp.isnan(before) & jnp.isnan(after))
    error = jnp.where(same, 0, jnp.abs(after - before))
    error = jnp.max(jnp.where(jnp.isnan(error), jnp.inf, error), axis=-1)
    magnitude = jnp.max(jnp.where(jnp.isfinite(before), jnp.abs(before), 0), axis=-1)
    relative = error / jnp.maximum(magnitude, jnp.finfo(jnp.float32).tiny)
    changed = jnp.sum(~same, axis=-1, dtype=jnp.int32)
    return data, ConversionLoss(changed, error, relative)
