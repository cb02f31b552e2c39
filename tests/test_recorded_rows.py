"""Rings, two caches in one softmax and FP4 rows against outputs and bytes recorded elsewhere."""

import functools
import zlib
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import row_inputs
from row_inputs import FEW_COLUMNS, HEADS, WIDTH
from small_models import largest_error, quick_jit

import pallas_kernels
import swa_jax as swa
from pallas_kernels import BF16, V41, V41_FP4, ExtraKV, KVRows, fused_store, store_rows
from swa_jax.attention import prefill_attention

DATA = Path(__file__).parent / "data"
EPS = 1e-20  # V4.1's; no mean square in float32 notices it
LSE_TOLERANCE = 1e-5
# One layer as V4.1 has it. Its hidden size and ranks play no part.
CONFIG = swa.AttentionConfig(
    hidden_size=1, num_heads=HEADS, q_lora_rank=1, o_groups=1, o_lora_rank=1, norm_eps=EPS
)

_quantize = quick_jit(pallas_kernels.quantize_rows, static_argnames="fmt")
_dequantize = quick_jit(pallas_kernels.dequantize_rows, static_argnames="fmt")
_fused_store = quick_jit(fused_store, static_argnames=("norm_eps", "implementation"))
_attend = quick_jit(pallas_kernels.indexed_attention, static_argnames="implementation")


@pytest.fixture(
    params=[
        "xla",
        pytest.param("interpret", marks=pytest.mark.slow),
        pytest.param("triton", marks=pytest.mark.gpu),
    ]
)
def implementation(request):
    return request.param


@functools.cache
def recorded(name):
    with np.load(DATA / name) as file:
        return SimpleNamespace(**file)


def as_queries(q, implementation):
    """Queries, which are bfloat16 numbers, in the dtype to test: kernels take bfloat16."""
    return jnp.asarray(q, jnp.float32 if implementation == "xla" else jnp.bfloat16)


def assert_close(out, want):
    """float32 to 3e-6 of the largest value, bfloat16 to a root mean square of 4e-3."""
    if out.dtype == np.float32:
        assert largest_error(out, want) <= 3e-6
    else:
        error = out.astype(np.float64) - want
        assert np.sqrt(np.mean(error**2) / np.mean(want.astype(np.float64) ** 2)) <= 4e-3


# --- rings


@functools.partial(
    quick_jit, static_argnames=("prefill", "implementation"), donate_argnames="cache"
)
def run_call(
    cache, latents, q, rotation, state_ids, starts, lengths, free, prefill, implementation
):
    """One call of the trace, after which the rows in the slots `free` are poisoned."""
    width, rows, lse = latents.shape[1], cache.layer(0), None
    weight = jnp.asarray(row_inputs.norm_weight())
    sink = jnp.asarray(recorded("ring_trace.npz").sink)
    if prefill:
        meta = swa.PrefillMetadata.build(
            cache.geometry, state_ids, starts, lengths, max_tokens=width
        )
        params = {"kv_norm": weight, "sinks": sink}
        # Interpreted chunks take seconds each, and test_prefill_kernel.py has them.
        chunks_by = "xla" if implementation == "interpret" else implementation
        out, rows = prefill_attention(
            params, q, latents, rotation, rows, meta, CONFIG, implementation=chunks_by
        )
    else:
        token = jnp.arange(width, dtype=jnp.int32)[None, :]
        positions = jnp.where(token < lengths[:, None], starts[:, None] + token, -1)
        meta = swa.DecodeMetadata.build(cache.geometry, state_ids, positions)
        latents, q, cos, sin = (x.reshape(-1, *x.shape[2:]) for x in (latents, q, *rotation))
        rows = fused_store(
            rows, latents, meta.slots, norm_weight=weight, norm_eps=EPS, cos=cos, sin=sin,
            implementation=implementation,
        )  # fmt: skip
        out, lse = pallas_kernels.indexed_attention(
            q, rows, meta.indices, sink=sink, cos=cos, sin=sin, implementation=implementation
        )
    poison = jnp.full((*free.shape, V41.row_bytes), 0xFF, jnp.uint8)
    return out, lse, cache.with_layer(0, store_rows(rows, poison, free))


@functools.cache
def run_trace(implementation):
    """Output and lse of each token, NaN where a call gives no lse, and the rings in the end."""
    trace = recorded("ring_trace.npz")
    geometry = CONFIG.geometry
    cache = swa.RingCache.create(len(trace.checksums), 1, geometry)
    cache = jax.tree.map(lambda block: jnp.full_like(block, 0xFF), cache)
    outputs, lses = [], []
    for i, prefill in enumerate(trace.prefill.tolist()):
        starts, lengths, accepted = trace.starts[i], trace.lengths[i], trace.accepted[i]
        width = int(trace.lengths[trace.prefill].max()) if prefill else 7
        latents = np.full((2, width, WIDTH), 0 if prefill else np.nan, np.float32)
        q = np.zeros((2, width, HEADS, WIDTH), np.float32)
        positions = starts[:, None] + np.arange(width)
        for lane, (request, length) in enumerate(zip(trace.requests[i], lengths, strict=True)):
            token = request, positions[lane, :length], row_inputs.versions(length, accepted[lane])
            latents[lane, :length] = row_inputs.latents(*token)
            q[lane, :length] = row_inputs.queries(*token)
        # The rows that the next step may overwrite: none of them is in the next window.
        free = (starts + accepted)[:, None] + np.arange(7)
        free = trace.state_ids[i][:, None] * 134 + free % 134
        out, lse, cache = run_call(
            cache, latents, as_queries(q, implementation), row_inputs.rotation(positions),
            trace.state_ids[i], starts, lengths, free.reshape(-1).astype(np.int32),
            prefill=prefill, implementation=implementation,
        )  # fmt: skip
        real = (np.arange(width) < lengths[:, None]).reshape(-1)
        outputs.append(np.asarray(out).reshape(2 * width, HEADS, WIDTH)[real])
        lse = np.full((2 * width, HEADS), np.nan) if lse is None else np.asarray(lse)
        lses.append(lse[real])
    rings = np.asarray(cache.layer(0).logical())[:, :, 0]
    return np.concatenate(outputs), np.concatenate(lses), rings


def test_tokens_see_what_their_request_has_stored_and_nothing_else(implementation):
    trace, (out, lse, _) = recorded("ring_trace.npz"), run_trace(implementation)
    assert_close(out[..., FEW_COLUMNS], trace.out)
    assert_close(out[trace.whole_tokens], trace.whole_out)
    decoded = ~np.isnan(lse)
    assert decoded.sum() == 2 * trace.lengths[~trace.prefill].sum()
    np.testing.assert_allclose(lse[decoded], trace.lse[decoded], rtol=0, atol=LSE_TOLERANCE)


def test_rings_hold_the_recorded_bytes(implementation):
    trace, (_, _, rings) = recorded("ring_trace.npz"), run_trace(implementation)
    np.testing.assert_array_equal(rings[:, trace.some_slots], trace.some_rows)
    checksums = [[zlib.crc32(row.tobytes()) for row in ring] for ring in rings]
    np.testing.assert_array_equal(checksums, trace.checksums)


# --- two caches in one softmax

ROW_FORMATS = {"v41": V41, "fp4": V41_FP4, "bfloat16": BF16}


def rows_in_slots(data, slots, fmt):
    block = jnp.asarray(data.reshape(slots, -1))
    return KVRows.view(block, start=0, rows_per_slot=len(data) // slots, fmt=fmt)


def attend(kind, implementation, window=True, extra=True, sink=None):
    """Attention over the window and a compressed cache of a kind, or over one of them alone."""
    merged = recorded("merged_caches.npz")
    q = row_inputs.queries(3, np.arange(len(merged.indices)))
    more = ExtraKV(
        rows_in_slots(row_inputs.extra_rows(kind), 2, ROW_FORMATS[kind]),
        merged.extra_indices,
        merged.extra_lengths * extra,
    )
    out, lse = _attend(
        as_queries(q, implementation),
        rows_in_slots(row_inputs.window_rows(), 3, V41),
        merged.indices,
        lengths=merged.lengths * window,
        extra=more,
        sink=np.full(HEADS, -np.inf, np.float32) if sink is None else sink,
        implementation=implementation,
    )
    return np.asarray(out), np.asarray(lse)


by_kind = pytest.mark.parametrize("kind", ROW_FORMATS)


@by_kind
def test_two_caches_share_one_softmax(kind, implementation):
    merged = recorded("merged_caches.npz")
    out, lse = attend(kind, implementation, sink=merged.sink)
    want = getattr(merged, f"lse_{kind}")
    assert_close(out, getattr(merged, f"out_{kind}"))
    np.testing.assert_allclose(lse, want, rtol=0, atol=LSE_TOLERANCE)
    assert not out[np.isneginf(want)].any()


@by_kind
@pytest.mark.parametrize("cache", ["window", "extra"])
def test_one_cache_alone_gives_its_part(cache, kind, implementation):
    merged = recorded("merged_caches.npz")
    name = "window" if cache == "window" else kind
    out, lse = attend(kind, implementation, window=cache == "window", extra=cache == "extra")
    assert_close(out[..., FEW_COLUMNS], getattr(merged, f"out_part_{name}"))
    want = getattr(merged, f"lse_part_{name}")
    np.testing.assert_allclose(lse, want, rtol=0, atol=LSE_TOLERANCE)


@by_kind
def test_parts_merge_by_their_lse(kind, implementation):
    merged = recorded("merged_caches.npz")
    window, extra = (
        attend(kind, implementation, extra=False),
        attend(kind, implementation, window=False),
    )
    masses = [np.exp(lse.astype(np.float64))[..., None] for _, lse in (window, extra)]
    total = masses[0] + masses[1] + np.exp(merged.sink.astype(np.float64))[:, None]
    out = (masses[0] * window[0] + masses[1] * extra[0]) / total
    assert_close(out.astype(window[0].dtype), getattr(merged, f"out_{kind}"))


# --- FP4 rows


def bfloat16_values(bits):
    return bits.view(ml_dtypes.bfloat16).astype(np.float32)


def test_fp4_rows_have_the_recorded_bytes():
    fp4 = recorded("fp4_rows.npz")
    data = _quantize(bfloat16_values(fp4.x), V41_FP4)
    np.testing.assert_array_equal(data, fp4.bytes)


def test_fp4_rows_stand_for_the_recorded_values():
    fp4 = recorded("fp4_rows.npz")
    np.testing.assert_array_equal(_dequantize(fp4.bytes, V41_FP4), bfloat16_values(fp4.values))


def test_stored_fp4_rows_have_the_recorded_bytes(implementation):
    want = recorded("fp4_rows.npz").stored
    positions = np.arange(len(want), dtype=np.int32)
    cos, sin = row_inputs.rotation(positions)
    rows = _fused_store(
        KVRows.create(1, len(want), V41_FP4), row_inputs.latents(0, positions), positions,
        norm_weight=row_inputs.norm_weight(), norm_eps=EPS, cos=cos, sin=sin,
        implementation=implementation,
    )  # fmt: skip
    np.testing.assert_array_equal(np.asarray(rows.logical())[0, :, 0], want)
