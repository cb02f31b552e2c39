"""The two operations on rows of a shared key/value cache: fused store and indexed attention."""

from pallas_kernels.formats import BF16 as BF16
from pallas_kernels.formats import F32 as F32
from pallas_kernels.formats import V4 as V4
from pallas_kernels.formats import V32 as V32
from pallas_kernels.formats import V41 as V41
from pallas_kernels.formats import V41_FP4 as V41_FP4
from pallas_kernels.formats import KVCacheFormat as KVCacheFormat
from pallas_kernels.formats import dequantize_rows as dequantize_rows
from pallas_kernels.formats import quantize_rows as quantize_rows
from pallas_kernels.fused_store import fused_store as fused_store
from pallas_kernels.indexed_attention import ExtraKV as ExtraKV
from pallas_kernels.indexed_attention import indexed_attention as indexed_attention
from pallas_kernels.storage import KVRows as KVRows
from pallas_kernels.storage import load_rows as load_rows
from pallas_kernels.storage import store_rows as store_rows

__all__ = [
    "BF16",
    "F32",
    "V4",
    "V32",
    "V41",
    "V41_FP4",
    "ExtraKV",
    "KVCacheFormat",
    "KVRows",
    "dequantize_rows",
    "fused_store",
    "indexed_attention",
    "load_rows",
    "quantize_rows",
    "store_rows",
]
