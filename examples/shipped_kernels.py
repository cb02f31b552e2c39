"""The kernels that are shipped, one for each tile and way of use: what tests and tables compile."""

import dataclasses
from collections.abc import Callable
from typing import Any

import gpu_compiler
import jax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels import BF16, F32, V4, V41, V41_FP4, ExtraKV, KVCacheFormat, KVRows

SLOTS, ROWS_PER_SLOT = 64, 134
ROTATED_PAIRS = 32


@dataclasses.dataclass(frozen=True)
class ShippedKernel:
    """One kernel for one card.

    Attributes:
      operation: "attention" or "store".
      card: the device kind.
      fmt: the rows' format.
      heads: query heads, of an attention.
      columns: width of the index lists, of an attention.
      extra: format of the second cache, if there is one, read through 512 indices.
      fused_ends: whether an attention normalises its queries and casts its output.
      pairing: of the rotation.
      hadamard: whether a store applies the transform.
    """

    operation: str
    card: str
    fmt: KVCacheFormat
    heads: int = 64
    columns: int = 128
    extra: KVCacheFormat | None = None
    fused_ends: bool = False
    pairing: str = "interleaved"
    hadamard: bool = False

    @property
    def name(self) -> str:
        """What it is called in a table."""
        parts = [self.operation, self.fmt.name, str(self.fmt.num_elements)]
        if self.operation == "attention":
            parts.append(f"{self.heads} heads {self.columns} keys")
        if self.extra:
            parts.append(f"and 512 {self.extra.name}")
        parts += ["fused ends"] if self.fused_ends else []
        parts += ["Hadamard"] if self.hadamard else []
        return " ".join(parts + (["half split"] if self.pairing == "half_split" else []))

    @property
    def arch(self) -> str:
        """The card's architecture, such as "sm_90"."""
        return gpu_compiler.CARDS[self.card].arch

    def build(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """A function of arrays that has the kernel, and the shapes of its arguments."""
        return self._attention() if self.operation == "attention" else self._store()

    def _attention(self):
        n = 128
        arguments: dict[str, Any] = {
            "q": _shape(n, self.heads, self.fmt.num_elements, dtype=jnp.bfloat16),
            "rows": _rows(self.fmt),
            "indices": _shape(n, self.columns, dtype=jnp.int32),
            "sink": _shape(self.heads),
            "cos": _shape(n, ROTATED_PAIRS),
            "sin": _shape(n, ROTATED_PAIRS),
        }
        if self.extra:
            arguments["extra"] = ExtraKV(_rows(self.extra), _shape(n, 512, dtype=jnp.int32))

        def attention(arguments):
            return pallas_kernels.indexed_attention(
                **arguments,
                pairing=self.pairing,
                query_norm_eps=1e-6 if self.fused_ends else None,
                output_format=V41 if self.fused_ends else None,
                implementation="triton",
            )

        return attention, (arguments,)

    def _store(self):
        n, width = 128, self.fmt.num_elements
        arguments = {
            "rows": _rows(self.fmt),
            "latents": _shape(n, width, dtype=jnp.bfloat16),
            "slots": _shape(n, dtype=jnp.int32),
            "norm_weight": _shape(width),
            "cos": _shape(n, ROTATED_PAIRS),
            "sin": _shape(n, ROTATED_PAIRS),
        }

        def store(arguments):
            return pallas_kernels.fused_store(
                **arguments,
                norm_eps=1e-6,
                pairing=self.pairing,
                hadamard=self.hadamard,
                implementation="triton",
            )

        return store, (arguments,)


def _shape(*sizes: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(sizes, dtype)


def _rows(fmt: KVCacheFormat) -> KVRows:
    return jax.eval_shape(lambda: KVRows.create(SLOTS, ROWS_PER_SLOT, fmt))


H200, A100, L40, B200 = (
    "NVIDIA H200",
    "NVIDIA A100-SXM4-80GB",
    "NVIDIA L40",
    "NVIDIA B200",
)
SHIPPED = (
    ShippedKernel("attention", H200, V41),
    ShippedKernel("attention", H200, V41, fused_ends=True),
    ShippedKernel("attention", H200, V41, heads=128, columns=192, fused_ends=True),
    ShippedKernel("attention", H200, V41, extra=V41_FP4, fused_ends=True),
    ShippedKernel("attention", H200, V41, heads=16, columns=134, pairing="half_split"),
    ShippedKernel("attention", H200, V41, extra=V41_FP4),
    ShippedKernel("attention", H200, V4, extra=V41_FP4),
    ShippedKernel("attention", H200, V4),
    ShippedKernel("attention", H200, BF16),
    ShippedKernel("attention", H200, F32),
    ShippedKernel("attention", A100, V41),
    ShippedKernel("attention", A100, V41, extra=V41_FP4),
    ShippedKernel("attention", L40, V41, fused_ends=True),
    ShippedKernel("attention", B200, V41),
    ShippedKernel("store", H200, V41),
    ShippedKernel("store", H200, V41, hadamard=True, pairing="half_split"),
    ShippedKernel("store", H200, V4),
    ShippedKernel("store", H200, BF16),
    ShippedKernel("store", A100, V41),
    ShippedKernel("store", L40, V41),
    ShippedKernel("store", B200, V41),
)
