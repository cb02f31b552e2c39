"""The benchmark's peers compute what the library computes, and its clock counts parts of a call."""

import functools

import benchmark_clock
import benchmark_layers
import benchmark_peers as peers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmark_settings import EPS, angles, filled_rows, make_settings, random_values
from small_models import largest_error
from test_layer_oracle import TOKENS, recorded

import swa_jax as swa
from pallas_kernels import dequantize_rows, fused_store, indexed_attention, quantize_rows
from pallas_kernels.transforms import rope_cos_sin
from swa_jax.heads import finish, prepare_queries

pytestmark = pytest.mark.quick_compilation

SETTINGS = make_settings(tiny=True)
REQUESTS = 2
WINDOW, CAPACITY = SETTINGS.window, SETTINGS.geometry.capacity
LAST_FULL = WINDOW - 1  # the window begins at position 0, as the whole context does
needs_torch = pytest.mark.skipif(not SETTINGS.torch, reason="needs PyTorch")
needs_transformers = pytest.mark.skipif(
    not SETTINGS.transformers, reason="needs Hugging Face transformers"
)


@pytest.fixture(autouse=True)
def promotion():
    """As users of the examples have it."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def token(position):
    """One new token of each request: q, latents, weight, cos, sin and positions."""
    return {
        "q": random_values(SETTINGS, REQUESTS, SETTINGS.heads, seed=4),
        "latents": random_values(SETTINGS, REQUESTS, seed=3),
        "weight": np.linspace(0.5, 1.5, SETTINGS.width, dtype=np.float32),
        "angles": angles(SETTINGS, REQUESTS),
        "positions": np.full(REQUESTS, position, np.int32),
    }


def flat(rows):
    return rows.logical().reshape(rows.num_rows, -1)


def ours(position, sink=None):
    """What the library reads at a position, out of the rings that the benchmark times."""
    sink = np.full(SETTINGS.heads, -np.inf, np.float32) if sink is None else sink
    rows, new = filled_rows(SETTINGS, REQUESTS), token(position)
    indices = SETTINGS.geometry.read_indices(np.arange(REQUESTS, dtype=np.int32), new["positions"])
    return rows, new, indices, read(rows, new["q"], indices, sink)


@jax.jit
def read(rows, q, indices, sink):
    return indexed_attention(q, rows, indices, sink=sink)[0]


@jax.jit
def numbers_of(rows):
    return dequantize_rows(rows.logical(), rows.fmt)


@pytest.mark.parametrize("position", [3, LAST_FULL, 1000])
def test_the_peer_of_the_same_bytes_reads_what_the_library_reads(position):
    sink = np.linspace(-1, 1, SETTINGS.heads, dtype=np.float32)
    rows, new, indices, want = ours(position, sink)
    listed = peers.naive_indices(new["positions"], CAPACITY, WINDOW)
    np.testing.assert_array_equal(np.sort(listed), np.sort(indices))
    got = jax.jit(peers.naive_read)(flat(rows), new["q"], listed, sink)
    assert largest_error(got, want) < 2e-6


@pytest.mark.parametrize("position", [3, LAST_FULL, 1000])
def test_the_peer_with_a_ring_of_numbers_reads_what_the_library_reads(position):
    rows, new, _, want = ours(position)
    peer = jax.jit(peers.ring_read, static_argnums=3)
    got = peer(numbers_of(rows), new["q"], new["positions"], WINDOW)
    assert largest_error(got, want) < 2e-6


@pytest.mark.parametrize("position", [3, LAST_FULL])
def test_the_peer_with_the_whole_context_reads_what_the_library_reads(position):
    rows, new, _, want = ours(position)
    # Of the first positions the ring's slots are the context's places.
    got = jax.jit(peers.context_read)(numbers_of(rows), new["q"], new["positions"])
    assert largest_error(got, want) < 2e-6


@needs_torch
@pytest.mark.parametrize("position", [LAST_FULL, 1000])
def test_the_peers_in_pytorch_read_what_the_library_reads(position):
    import benchmark_torch

    rows, new, indices, want = ours(position)
    visible = peers.ring_visible(new["positions"], CAPACITY, WINDOW)
    arguments = new["q"], flat(rows), numbers_of(rows)[:, :, 0], visible, indices
    q, data, ring, visible, indices = map(benchmark_torch.tensor, arguments)
    for got in (
        benchmark_torch.ring_read(q, ring, visible),
        benchmark_torch.gathered_read(q, ring, indices),
        benchmark_torch.byte_read(q, data, indices),
    ):
        assert largest_error(got.numpy(), want) < 2e-6


@pytest.mark.parametrize("position", [LAST_FULL, 1000])
def test_the_peers_store_the_row_that_the_library_stores(position):
    rows, new = filled_rows(SETTINGS, REQUESTS), token(position)
    slots = SETTINGS.geometry.slots(np.arange(REQUESTS, dtype=np.int32), new["positions"])
    cos, sin = new["angles"]
    store = functools.partial(fused_store, norm_eps=EPS)
    stored = jax.jit(store)(
        rows, new["latents"], slots, norm_weight=new["weight"], cos=cos, sin=sin
    )
    row = jax.jit(peers.plain_row)(new["latents"], new["weight"], cos, sin)
    quantized = jax.jit(peers.naive_quantize)(row)
    got, want = (np.int32(data) for data in (quantized, np.asarray(flat(stored))[slots]))
    # XLA's own cast on CPUs rounds twice, which may end in a neighbour of the nearest code.
    assert np.abs(got - want)[:, : SETTINGS.width].max() <= 1
    np.testing.assert_array_equal(got[:, SETTINGS.width :], want[:, SETTINGS.width :])
    ring = jax.jit(peers.ring_store)(numbers_of(rows), row, new["positions"])
    assert largest_error(ring, numbers_of(stored)) < 2**-4  # the ring's row is not rounded to e4m3
    context = jnp.zeros((REQUESTS, 1024, 1, SETTINGS.width))
    context = jax.jit(peers.context_store)(context, row, new["positions"])
    np.testing.assert_array_equal(np.asarray(context)[:, position, 0], row)


def test_the_peer_of_a_chunk_reads_what_the_library_reads():
    tokens = 3 * WINDOW + 1
    config = benchmark_layers.layer_config(SETTINGS, SETTINGS.fmt)
    params = {
        "kv_norm": np.ones(SETTINGS.width, np.float32),
        "sinks": np.full(SETTINGS.heads, -np.inf, np.float32),  # the peer has none
    }
    q = random_values(SETTINGS, 1, tokens, SETTINGS.heads, seed=4)
    latents = random_values(SETTINGS, 1, tokens, seed=3)
    rows, got = jax.jit(benchmark_layers.chunk_step(SETTINGS))(
        filled_rows(SETTINGS, 1), params, q, latents, np.int32(0)
    )
    positions = np.arange(tokens, dtype=np.int32)

    @jax.jit
    def of_peer(q, latents):
        rotation = rope_cos_sin(jnp.asarray(positions[None]), config.turns)
        row = peers.plain_row(latents[0], params["kv_norm"], *(angle[0] for angle in rotation))
        row = dequantize_rows(quantize_rows(row, config.fmt), config.fmt)
        queries = prepare_queries(q, rotation, config)
        out = benchmark_layers.window_peer(SETTINGS)(queries, row[None, :, None])
        return row, finish(out, rotation, config, jnp.dtype("float32"))

    row, want = of_peer(q, latents)
    assert largest_error(got, want) < 2e-6
    at = positions[-CAPACITY:]  # of the rows that the ring then holds
    np.testing.assert_allclose(
        np.asarray(numbers_of(rows))[0, at % CAPACITY, 0], np.asarray(row)[at], rtol=1e-6
    )


def test_the_layer_that_is_timed_gives_the_recorded_outputs_of_hugging_face():
    case = recorded("float32")
    step = jax.jit(benchmark_layers.layer_step(case.config))
    rows = swa.RingCache.create(2, 1, case.config.geometry, case.config.fmt).layer(0)
    outputs = []
    for t in range(TOKENS):
        positions = np.full(2, t, np.int32)
        rows, y = step(rows, case.params["params"], case.x[:, t : t + 1], positions)
        outputs.append(y)
    case.check(np.concatenate(outputs, axis=1))


@needs_transformers
def test_the_layer_of_hugging_face_computes_what_the_library_computes():
    import benchmark_torch

    config = benchmark_layers.layer_config(SETTINGS, swa.F32)
    params, x = benchmark_layers.layer_params(config), benchmark_layers.layer_inputs(config, 2)
    rows = filled_rows(SETTINGS, REQUESTS, config.fmt)
    position = benchmark_layers.POSITION
    past = benchmark_layers.past_rows(SETTINGS, rows, REQUESTS)
    peer = benchmark_torch.HuggingFaceLayer(params, config, past, position)
    got = peer.step(benchmark_torch.tensor(x)).detach().numpy()
    positions = np.full(REQUESTS, position, np.int32)
    _, want = jax.jit(benchmark_layers.layer_step(config))(rows, params, x, positions)
    assert largest_error(got, want) < 1e-5
    assert peer.cache.layers[0].keys.shape == (REQUESTS, 1, WINDOW - 1, SETTINGS.width)


def test_a_program_of_several_parts_is_timed_by_the_part(monkeypatch):
    now_us = 0

    def four_parts():
        nonlocal now_us
        now_us += 4000

    monkeypatch.setattr(benchmark_clock.time, "perf_counter_ns", lambda: 1000 * now_us)
    program = benchmark_clock.Program("four parts", four_parts, items=4)
    program.prepare(8000)
    assert program.runs == 2  # a sample is as long as it is of one part
    assert program.sample() == 1000
