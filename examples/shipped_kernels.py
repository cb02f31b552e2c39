"""The kernels that are shipped, one for each tile and way of use, and what each has to do.

Tests and tables compile them; the model of their time takes their bytes and trips.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import gpu_compiler
import jax
import jax.numpy as jnp
from kernel_model import Work

import pallas_kernels
from pallas_kernels import BF16, F32, V4, V41, V41_FP4, ExtraKV, KVCacheFormat, KVRows
from pallas_kernels.indexed_attention import triton_tiles

SLOTS, ROWS_PER_SLOT = 64, 134
ROTATED_PAIRS = 32
EXTRA_COLUMNS = 512


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
      requests: decode batches for which its time is modelled.
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
    requests: tuple[int, ...] = ()

    queries: ClassVar[int] = 128
    """Queries of the call that is compiled, or tokens of a store; its grid grows with them."""

    @property
    def name(self) -> str:
        """What it is called in a table."""
        parts = [self.operation, self.fmt.name, str(self.fmt.num_elements)]
        if self.operation == "attention":
            parts.append(f"{self.heads} heads {self.columns} keys")
        if self.extra:
            parts.append(f"and {EXTRA_COLUMNS} {self.extra.name}")
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

    def work(self, requests: int) -> Work:
        """Bytes of one decode call, or of one store.

        Rows, indices, queries, angles, weights and sinks are read once, outputs written once. Lists
        in several pieces are written as float32 sums and merged by what follows the kernel.

        Args:
          requests: of one query or token each; none of their rows are shared.
        """
        width, angles = self.fmt.num_elements, 2 * ROTATED_PAIRS * 4
        if self.operation == "store":
            return Work(requests * (2 * width + 4 + angles + self.fmt.row_bytes) + 4 * width)
        read = 2 * self.heads * width + angles
        for fmt, columns in self._lists():
            read += columns * (4 + fmt.row_bytes)
        output = V41.row_bytes if self.fused_ends else 2 * width
        written = self.heads * (output + 4)  # with the lse
        sinks = 4 * self.heads
        pieces = triton_tiles.num_pieces(sum(columns for _, columns in self._lists()))
        if pieces == 1:
            return Work(requests * (read + written) + sinks)
        sums = pieces * self.heads * 4 * (width + 2)  # with peak and mass
        merged = requests * (sums + angles + written) + sinks
        return Work(requests * (read + sums), merged)

    def trips(self) -> tuple[float, ...]:
        """How often a program of an attention runs each block of its code, on the average.

        Blocks are in the order of the code: each block of each list where the tile is unrolled,
        else one for each list. Programs of a query differ where its lists are in several pieces.
        """
        if self.operation == "store":
            return ()
        lists = self._lists()
        tile = triton_tiles.choose_tile(
            self.card, [fmt for fmt, _ in lists], [columns for _, columns in lists]
        )
        pieces = triton_tiles.num_pieces(sum(columns for _, columns in lists))
        found: list[float] = []
        for _, columns in lists:
            blocks = triton_tiles.blocks_of_piece(columns, tile, pieces)
            last = -(-columns // tile.keys)
            shares = [
                sum(piece * blocks + block < last for piece in range(pieces)) / pieces
                for block in range(blocks)
            ]
            found += shares if tile.unroll else [sum(shares)]
        return tuple(found)

    def _lists(self) -> list[tuple[KVCacheFormat, int]]:
        """The format and the columns of each list that an attention reads."""
        extra = [(self.extra, EXTRA_COLUMNS)] if self.extra else []
        return [(self.fmt, self.columns), *extra]

    def _attention(self):
        n = self.queries
        arguments: dict[str, Any] = {
            "q": _shape(n, self.heads, self.fmt.num_elements, dtype=jnp.bfloat16),
            "rows": _rows(self.fmt),
            "indices": _shape(n, self.columns, dtype=jnp.int32),
            "sink": _shape(self.heads),
            "cos": _shape(n, ROTATED_PAIRS),
            "sin": _shape(n, ROTATED_PAIRS),
        }
        if self.extra:
            arguments["extra"] = ExtraKV(
                _rows(self.extra), _shape(n, EXTRA_COLUMNS, dtype=jnp.int32)
            )

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
        n, width = self.queries, self.fmt.num_elements
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
DECODE_BATCHES = (1, 32, 128, 512)
SHIPPED = (
    ShippedKernel("attention", H200, V41, requests=DECODE_BATCHES),
    ShippedKernel("attention", H200, V41, fused_ends=True),
    ShippedKernel("attention", H200, V41, heads=128, columns=192, fused_ends=True),
    ShippedKernel("attention", H200, V41, extra=V41_FP4, fused_ends=True),
    ShippedKernel("attention", H200, V41, heads=16, columns=134, pairing="half_split"),
    ShippedKernel("attention", H200, V41, extra=V41_FP4, requests=DECODE_BATCHES),
    ShippedKernel("attention", H200, V4, extra=V41_FP4),
    ShippedKernel("attention", H200, V4),
    ShippedKernel("attention", H200, BF16),
    ShippedKernel("attention", H200, F32),
    ShippedKernel("attention", A100, V41, requests=DECODE_BATCHES),
    ShippedKernel("attention", A100, V41, extra=V41_FP4, requests=DECODE_BATCHES),
    ShippedKernel("attention", L40, V41, fused_ends=True),
    ShippedKernel("attention", B200, V41),
    ShippedKernel("store", H200, V41, requests=(512,)),
    ShippedKernel("store", H200, V41, hadamard=True, pairing="half_split"),
    ShippedKernel("store", H200, V4),
    ShippedKernel("store", H200, BF16),
    ShippedKernel("store", A100, V41, requests=(512,)),
    ShippedKernel("store", L40, V41),
    ShippedKernel("store", B200, V41),
)
