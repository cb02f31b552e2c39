"""Prefill and decode of a layer through the kernels: beside the band, in splits, with NaN rows."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import numpy_reference as reference
import pytest
from small_models import activations, attention_config, largest_error, layer_params, quick_jit

import swa_jax as swa
from pallas_kernels import load_rows, transforms
from swa_jax import attention

pytestmark = pytest.mark.slow

TRITON_CALL = "__gpu$xla.gpu.triton"
WINDOW, SLOTS, TOKENS = 5, 3, 13
bfloat16_config = functools.partial(
    attention_config, WINDOW, dtype="bfloat16", param_dtype="bfloat16", num_heads=3, o_groups=1
)
CONFIG = bfloat16_config(swa.V41)
CONFIGS = {
    "V41": CONFIG,
    "hadamard": bfloat16_config(swa.V41, hadamard=True),
    "query norm, half split": bfloat16_config(swa.BF16, query_norm=True, pairing="half_split"),
    "V4": dataclasses.replace(bfloat16_config(swa.F32), head_dim=128, fmt=swa.V4.with_width(128)),
    "F32": bfloat16_config(swa.F32),
}


@pytest.fixture(params=["interpret", pytest.param("triton", marks=pytest.mark.gpu)])
def implementation(request):
    return request.param


def inputs(config, batch=2, tokens=TOKENS, seed=0):
    """Queries and latents of consecutive tokens, as the projections would give them."""
    random = np.random.default_rng(seed)
    q = random.normal(size=(batch, tokens, config.num_heads, config.head_dim)) * 2
    latents = random.normal(size=(batch, tokens, config.head_dim))
    return jnp.asarray(q, jnp.bfloat16), jnp.asarray(latents, jnp.bfloat16)


def poisoned_rows(config):
    """A cache whose every byte is 0xFF: NaN, in every format."""
    cache = swa.RingCache.create(SLOTS, 1, config.geometry, config.fmt)
    rows = cache.layer(0)
    return dataclasses.replace(rows, data=jnp.full_like(rows.data, 0xFF))


@functools.cache
def programs(config, implementation):
    params = layer_params(config)["params"]

    def call(attend, q, latents, rows, meta):
        rotation = transforms.rope_cos_sin(meta.positions, config.turns)
        return attend(
            params, q, latents, rotation, rows, meta, config, implementation=implementation
        )

    @quick_jit
    def prefill(q, latents, rows, state_ids, starts, lengths):
        meta = swa.PrefillMetadata.build(
            config.geometry, state_ids, starts, lengths, max_tokens=q.shape[1]
        )
        return call(attention.prefill_attention, q, latents, rows, meta)

    @quick_jit
    def decode(q, latents, rows, state_ids, positions):
        meta = swa.DecodeMetadata.build(config.geometry, state_ids, positions)
        return call(attention.decode_attention, q, latents, rows, meta)

    return prefill, decode


STATE_IDS = np.int32([2, 0])


def in_chunks(config, implementation, q, latents, sizes, starts=(0, 0), rows=None):
    """Prefill of the tokens in chunks of some sizes: the outputs, and the rows after it."""
    prefill, _ = programs(config, implementation)
    rows = poisoned_rows(config) if rows is None else rows
    outs, first = [], 0
    for size in sizes:
        part = slice(first, first + size)
        lengths = np.full(2, size, np.int32)
        out, rows = prefill(
            q[:, part], latents[:, part], rows, STATE_IDS, np.int32(starts) + first, lengths
        )
        outs.append(out)
        first += size
    return jnp.concatenate(outs, axis=1), rows


def float64_attention(config, q, latents):
    """Attention of sequences from position 0 over rows after their round trip, in numpy."""
    params = layer_params(config)["params"]
    frequencies = config.rope_theta ** -(np.arange(0, config.rope_dim, 2) / config.rope_dim)
    angles = np.arange(q.shape[1])[:, None] * frequencies
    query = np.asarray(q, np.float64)
    if config.query_norm:
        query = reference.norm(query, None, config.norm_eps)
    query = reference.rotate(query, angles[:, None], config.pairing)
    rows = reference.norm(np.asarray(latents, np.float64), params["kv_norm"], config.norm_eps)
    rows = reference.rotate(rows, angles, config.pairing)
    if config.hadamard:
        matrix = reference.hadamard_matrix(config.head_dim)
        query, rows = query @ matrix, rows @ matrix
    position = np.arange(q.shape[1])[:, None] - np.arange(config.window)
    outs = []
    for one, own in zip(query, rows, strict=True):
        values = reference.dequantize(reference.quantize(own, config.fmt), config.fmt)
        out, _ = reference.attention(one, [(values, position, None)], params["sinks"])
        outs.append(out @ matrix if config.hadamard else out)
    return reference.rotate(np.stack(outs), -angles[:, None], config.pairing)


def rms_error(got, expected):
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    return np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected**2))


@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_through_the_kernel_equals_the_band_and_float64(name, implementation):
    config = CONFIGS[name]
    q, latents = inputs(config)
    got, rows = in_chunks(config, implementation, q, latents, [TOKENS])
    band, expected_rows = in_chunks(config, "xla", q, latents, [TOKENS])
    assert (got.shape, got.dtype) == (q.shape, jnp.bfloat16)
    # Where a Hadamard transform follows, the kernel's output is rounded once more.
    assert rms_error(got, band) <= (4e-3 if config.hadamard else 1e-3)
    assert rms_error(got, float64_attention(config, q, latents)) <= 4e-3
    different = np.any(np.asarray(rows.logical()) != np.asarray(expected_rows.logical()), axis=-1)
    assert np.mean(different) <= 1e-3


@pytest.mark.parametrize("sizes", [[4, 9], [9, 4], [1] * TOKENS], ids=str)
def test_prefill_in_chunks_has_the_bits_of_one(sizes, implementation):
    q, latents = inputs(CONFIG)
    expected, expected_rows = in_chunks(CONFIG, implementation, q, latents, [TOKENS])
    got, rows = in_chunks(CONFIG, implementation, q, latents, sizes)
    np.testing.assert_array_equal(got, expected)
    stored = np.arange(TOKENS - CONFIG.geometry.capacity, TOKENS)[-WINDOW:]
    slots = CONFIG.geometry.slots(STATE_IDS, np.tile(stored.astype(np.int32), (2, 1)))
    np.testing.assert_array_equal(load_rows(rows, slots), load_rows(expected_rows, slots))


def test_decode_after_prefill_has_the_bits_of_prefill(implementation):
    q, latents = inputs(CONFIG)
    expected, expected_rows = in_chunks(CONFIG, implementation, q, latents, [TOKENS])
    outs, rows = in_chunks(CONFIG, implementation, q, latents, [6])
    outs = [outs]
    _, decode = programs(CONFIG, implementation)
    for first in (6, 9, 12):
        part = slice(first, first + 3)
        positions = np.tile(np.arange(first, first + 3, dtype=np.int32), (2, 1))
        positions = np.where(positions < TOKENS, positions, -1)
        pad = ((0, 0), (0, 3 - q[:, part].shape[1]))
        tokens = (
            jnp.pad(q[:, part], (*pad, (0, 0), (0, 0))),
            jnp.pad(latents[:, part], (*pad, (0, 0))),
        )
        out, rows = decode(*tokens, rows, STATE_IDS, positions)
        assert not np.any(np.asarray(out)[positions < 0])
        outs.append(out)
    got = jnp.concatenate(outs, axis=1)[:, :TOKENS]
    np.testing.assert_array_equal(got, expected)
    slots = CONFIG.geometry.slots(STATE_IDS, np.tile(np.arange(8, TOKENS, dtype=np.int32), (2, 1)))
    np.testing.assert_array_equal(load_rows(rows, slots), load_rows(expected_rows, slots))


def test_padding_is_zero_and_reaches_nobody(implementation):
    prefill, _ = programs(CONFIG, implementation)
    q, latents = inputs(CONFIG)
    whole = np.full(2, TOKENS, np.int32)
    expected, _ = prefill(
        q, latents, poisoned_rows(CONFIG), STATE_IDS, np.zeros(2, np.int32), whole
    )
    lengths = np.int32([7, 0])
    padding = np.arange(TOKENS) >= lengths[:, None]
    q = jnp.where(padding[..., None, None], jnp.bfloat16(jnp.nan), q)
    latents = jnp.where(padding[..., None], jnp.bfloat16(jnp.nan), latents)
    out, rows = prefill(
        q, latents, poisoned_rows(CONFIG), np.int32([2, -1]), np.zeros(2, np.int32), lengths
    )
    np.testing.assert_array_equal(out[0, :7], expected[0, :7])
    assert not np.any(np.asarray(out)[padding])
    assert np.all(np.asarray(rows.data[:2]) == 0xFF)


def test_a_nan_row_reaches_exactly_the_queries_that_see_it(implementation):
    q, latents = inputs(CONFIG)
    expected, _ = in_chunks(CONFIG, implementation, q, latents, [4, 9])
    # Two of one request, one of them before the chunk that reads it; none of the other.
    bad = latents.at[0, 2, 7].set(jnp.nan).at[0, 8, 0].set(jnp.inf)
    got, _ = in_chunks(CONFIG, implementation, q, bad, [4, 9])
    sees = np.zeros((2, TOKENS), bool)
    sees[0, [2, 3, 4, 5, 6, 8, 9, 10, 11, 12]] = True
    got, expected = np.asarray(got, np.float32), np.asarray(expected, np.float32)
    assert np.isnan(got[sees]).all()
    np.testing.assert_array_equal(got[~sees], expected[~sees])


def test_a_layer_prefills_and_decodes_as_with_xla(implementation):
    outs = []
    for name in (implementation, "xla"):
        layer = swa.SlidingWindowAttention(CONFIG, implementation=name)
        params = layer_params(CONFIG)

        @quick_jit
        def run(x, rows, layer=layer, params=params):
            geometry = CONFIG.geometry
            meta = swa.PrefillMetadata.build(geometry, STATE_IDS, [0, 0], [9, 4], max_tokens=9)
            first, rows = layer.apply(params, x[:, :9], rows, meta)
            positions = np.int32([[9, 10, 11], [4, 5, -1]])
            meta = swa.DecodeMetadata.build(geometry, STATE_IDS, positions)
            second, rows = layer.apply(params, x[:, 9:12], rows, meta)
            return jnp.concatenate([first, second], axis=1)

        outs.append(run(jnp.asarray(activations(CONFIG, 2, 12)), poisoned_rows(CONFIG)))
    assert np.all(np.isfinite(np.asarray(outs[0], np.float32)))
    assert not np.any(outs[0][1, 4:9])
    assert largest_error(*outs) <= 2**-7


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("implementation", [None, "triton"])
def test_a_layer_is_kernels_on_cuda(name, implementation):
    config = CONFIGS[name]
    q, latents = inputs(config)
    prefill, decode = programs(config, implementation)
    starts, lengths = np.zeros(2, np.int32), np.full(2, TOKENS, np.int32)
    positions = np.tile(np.arange(3, dtype=np.int32), (2, 1))
    rows = poisoned_rows(config)
    for traced in (
        prefill.trace(q, latents, rows, STATE_IDS, starts, lengths),
        decode.trace(q[:, :3], latents[:, :3], rows, STATE_IDS, positions),
    ):
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count(TRITON_CALL) == 2
        assert "fused_store_kernel" in text
        assert "indexed_attention_kernel" in text
