"""Sliding-window latent attention for JAX: rings of 528-byte rows, and the layers that use them."""

from pallas_kernels import BF16 as BF16
from pallas_kernels import F32 as F32
from pallas_kernels import V4 as V4
from pallas_kernels import V32 as V32
from pallas_kernels import V41 as V41
from pallas_kernels import V41_FP4 as V41_FP4
from pallas_kernels import ExtraKV as ExtraKV
from pallas_kernels import KVCacheFormat as KVCacheFormat
from swa_jax import checkpoint as checkpoint
from swa_jax import presets as presets
from swa_jax.attention_module import SlidingWindowAttention as SlidingWindowAttention
from swa_jax.beams import beam_search as beam_search
from swa_jax.best_of_n import best_of as best_of
from swa_jax.cache import RingCache as RingCache
from swa_jax.config import AttentionConfig as AttentionConfig
from swa_jax.config import DecoderConfig as DecoderConfig
from swa_jax.config import ExpertsConfig as ExpertsConfig
from swa_jax.continuations import Continuation as Continuation
from swa_jax.conversion import convert_rows as convert_rows
from swa_jax.drafting import ModelDrafter as ModelDrafter
from swa_jax.drafting import NGramDrafter as NGramDrafter
from swa_jax.generation import generate as generate
from swa_jax.generation import stream as stream
from swa_jax.hf_config import read_attention as read_attention
from swa_jax.hf_config import read_config as read_config
from swa_jax.layouts import PagedRows as PagedRows
from swa_jax.metadata import DecodeMetadata as DecodeMetadata
from swa_jax.metadata import PrefillMetadata as PrefillMetadata
from swa_jax.metadata import SequenceMetadata as SequenceMetadata
from swa_jax.modules import Decoder as Decoder
from swa_jax.modules import DecoderLayer as DecoderLayer
from swa_jax.paging import PageAddresses as PageAddresses
from swa_jax.paging import pages_from_rings as pages_from_rings
from swa_jax.paging import rings_from_pages as rings_from_pages
from swa_jax.parameter_sharding import parameter_shardings as parameter_shardings
from swa_jax.placement import place_requests as place_requests
from swa_jax.prefixes import PrefixStore as PrefixStore
from swa_jax.prefixes import model_fingerprint as model_fingerprint
from swa_jax.prefixes import prefill_from_prefixes as prefill_from_prefixes
from swa_jax.recompute import compare_with_recompute as compare_with_recompute
from swa_jax.requests import Request as Request
from swa_jax.requests import Result as Result
from swa_jax.ring import RingGeometry as RingGeometry
from swa_jax.rotary import YarnScaling as YarnScaling
from swa_jax.sampling import Sampling as Sampling
from swa_jax.serving import Server as Server
from swa_jax.serving import serve as serve

__all__ = [
    "AttentionConfig",
    "BF16",
    "Continuation",
    "DecodeMetadata",
    "Decoder",
    "DecoderConfig",
    "DecoderLayer",
    "ExpertsConfig",
    "ExtraKV",
    "F32",
    "KVCacheFormat",
    "ModelDrafter",
    "NGramDrafter",
    "PageAddresses",
    "PagedRows",
    "PrefillMetadata",
    "PrefixStore",
    "Request",
    "Result",
    "RingCache",
    "RingGeometry",
    "Sampling",
    "SequenceMetadata",
    "Server",
    "SlidingWindowAttention",
    "V32",
    "V4",
    "V41",
    "V41_FP4",
    "YarnScaling",
    "beam_search",
    "best_of",
    "checkpoint",
    "compare_with_recompute",
    "convert_rows",
    "generate",
    "model_fingerprint",
    "pages_from_rings",
    "parameter_shardings",
    "place_requests",
    "prefill_from_prefixes",
    "presets",
    "read_attention",
    "read_config",
    "rings_from_pages",
    "serve",
    "stream",
]
