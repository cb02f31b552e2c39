"""Cases of tests/cases.md: bytes of a cache, weights in files, and the benchmark's clock."""

import dataclasses
import time

import benchmark_clock as clock
import device_cases
import device_shapes
import gpu_compiler
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_cases import (
    ATTENTION,
    ATTENTION_SHAPES,
    attention_tensors,
    equal_bits,
    expected_attention,
    original_name,
    random_tensors,
    write_file,
)
from ring_layers import ShowLayer, window_of
from small_models import attention_config

import swa_jax as swa
from swa_jax import checkpoint, sizing

pytestmark = pytest.mark.quick_compilation

# --- T: memory


def test_T01_a_cache_is_counted_by_slots_layers_and_rows():
    geometry = swa.RingGeometry(128, 134)
    assert sizing.ring_cache_bytes(swa.V41, geometry, layers=1, slots=1) == 70_752
    assert sizing.ring_cache_bytes(swa.V41, geometry, layers=3, slots=1000) == 212_256_000
    cache = jax.eval_shape(lambda: swa.RingCache.create(1000, 3, geometry))
    assert cache.nbytes == 212_256_000
    assert sum(block.size for block in cache.blocks) == 212_256_000


def test_T03_a_shorter_window_is_what_a_short_context_is_given():
    # A ring has the rows of its window, whatever the context: a window of the context's length
    # gives the same answers in a smaller one.
    assert swa.RingGeometry.for_drafts(128).capacity == 134
    show = ShowLayer(64, 70, slots=1)
    [got] = show.prefill([0], [64], 64)
    assert got == [window_of(p, 128) for p in range(64)]


# --- U: weights


def fault(call) -> str:
    with pytest.raises(ValueError, match=r"\S") as raised:
        call()
    return str(raised.value)


def test_U01_a_renamed_tensor_and_one_too_many_are_both_named():
    whole = {
        original_name(f"model.layers.3.self_attn.{name}"): value
        for name, value in random_tensors(ATTENTION_SHAPES).items()
    }
    prefix = "layers.3.attn."
    assert f"{prefix}attn_sink" in whole
    assert set(checkpoint.load_attention(whole, ATTENTION, 3)["params"]) >= {"sinks"}
    whole[f"{prefix}sinks"] = whole.pop(f"{prefix}attn_sink")
    whole[f"{prefix}bias"] = np.zeros(3, np.float32)
    text = fault(lambda: checkpoint.load_attention(whole, ATTENTION, 3))
    assert text == (
        f"tensors: missing {prefix}attn_sink; unexpected {prefix}bias; unexpected {prefix}sinks"
    )


def test_U03_narrow_floats_come_back_with_their_dtypes_and_bytes(tmp_path):
    random = np.random.default_rng(0)
    dtypes = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu, ml_dtypes.bfloat16]
    params = {
        np.dtype(dtype).name: np.frombuffer(random.bytes(24), dtype).reshape(2, -1)
        for dtype in (*dtypes, np.uint8, np.float32)
    }
    checkpoint.save_params(tmp_path / "params", {"params": params}, {"made": "here"})
    loaded, metadata = checkpoint.load_params(tmp_path / "params")
    assert metadata == {"made": "here"}
    assert set(loaded["params"]) == set(params)
    for name, value in params.items():
        equal_bits(loaded["params"][name], value)


def test_U04_a_file_of_e4m3_e8m0_bfloat16_and_float32_is_loaded(tmp_path):
    tensors = attention_tensors()
    prefix = "model.layers.3.self_attn."
    name = f"{prefix}q_b_proj.weight"  # [256, 96]
    codes = np.resize(np.uint8([0x38, 0xB8, 0x40, 0x7E, 0x01]), (256, 96))
    exponents = np.uint8([[126], [129]])  # of blocks of 128 x 128: 0.5 and 4
    stored = dict(tensors)
    stored[name] = codes.view(ml_dtypes.float8_e4m3fn)
    stored[f"{name}_scale_inv"] = exponents.view(ml_dtypes.float8_e8m0fnu)
    stored[f"{prefix}kv_norm.weight"] = np.resize([1.5, -2.0], 64).astype(ml_dtypes.bfloat16)
    path = write_file(tmp_path / "layer.safetensors", stored)
    params = checkpoint.load_attention(path, ATTENTION, 3)["params"]
    values = np.resize([1.0, -1.0, 2.0, 448.0, 2.0**-9], (256, 96))
    values[:128] *= 0.5
    values[128:] *= 4
    np.testing.assert_array_equal(params["q_b"], values)
    np.testing.assert_array_equal(params["kv_norm"], np.resize([1.5, -2.0], 64))
    np.testing.assert_array_equal(params["sinks"], tensors[f"{prefix}sinks"])
    want = expected_attention(tensors, prefix)
    np.testing.assert_array_equal(params["q_a_kv"], want["q_a_kv"])
    # scales as plain bytes are the same scales
    stored[f"{name}_scale_inv"] = exponents
    again = checkpoint.load_attention(stored, ATTENTION, 3)["params"]
    np.testing.assert_array_equal(again["q_b"], values)


def test_U05_sinks_of_64_heads_are_cut_for_a_shard_and_otherwise_refused():
    whole = attention_config(3, swa.F32, num_heads=64)
    shapes = {
        "q_a_proj.weight": (16, 32),
        "q_a_norm.weight": (16,),
        "q_b_proj.weight": (64 * 64, 16),
        "kv_proj.weight": (64, 32),
        "kv_norm.weight": (64,),
        "sinks": (64,),
        "o_a_proj.weight": (16, 2048),
        "o_b_proj.weight": (32, 16),
    }
    tensors = {f"layers.0.self_attn.{k}": v for k, v in random_tensors(shapes).items()}
    sinks = np.arange(64, dtype=np.float32)
    tensors["layers.0.self_attn.sinks"] = sinks
    for index, want in enumerate((sinks[:32], sinks[32:])):
        part = checkpoint.load_attention(tensors, whole, 0, shard=(index, 2))["params"]
        np.testing.assert_array_equal(part["sinks"], want)
    half = dataclasses.replace(whole, num_heads=32)
    text = fault(lambda: checkpoint.load_attention(tensors, half, 0))
    assert "layers.0.self_attn.sinks: expected shape (32,), got (64,)" in text


# --- V: the benchmark


def test_V01_the_clock_waits_for_the_result_and_not_for_the_compiler():
    traces = []

    def sleeping(seconds):
        def sleep(x):
            time.sleep(seconds)
            return np.asarray(x)

        def call(x):
            traces.append(seconds)
            return jax.pure_callback(sleep, x, x)

        return call

    seconds = (0.005, 0.1)
    programs = {str(s): clock.compiled(str(s), sleeping(s), jnp.ones(3)) for s in seconds}
    short, long = (min(taken) for taken in clock.sample_in_turn(programs, 3).values())
    assert 5 < long / short < 40
    assert traces == [*seconds]
    # Of what runs while Python goes on, the result is there when the clock is read.
    matrix = jnp.eye(256)
    product = lambda x: jax.lax.fori_loop(0, 50, lambda _, y: y @ x, x)  # noqa: E731
    assert clock.compiled("product", product, matrix).run().is_ready()


def test_V02_operations_are_timed_on_more_rows_than_a_cache_holds_and_on_fewer():
    sizes = device_cases.FULL
    shapes = device_shapes.shapes_of(sizes)
    first = shapes[0]
    assert (first.operation, first.requests, first.layers) == ("indexed_attention", 128, 8)
    read = first.requests * sizes.layers * sizes.window * 528
    assert read > gpu_compiler.CARDS["NVIDIA H200"].l2
    assert read // sizes.layers < gpu_compiler.CARDS["NVIDIA H200"].l2
    alone = dataclasses.replace(first, layers=1)
    assert alone in shapes
    assert (str(first)[-8:], str(alone)[-8:]) == ("8 layers", "1 layers")  # the table says which


def test_V05_a_call_takes_as_long_among_many_as_among_few():
    programs = [clock.Program("a", lambda: time.sleep(1e-3), runs=n) for n in (10, 30, 40, 100)]
    us = [min(program.sample() for _ in range(3)) for program in programs]
    assert max(us) <= 1.2 * min(us)
    [line] = clock.measure(clock.Case("suite", "case", {}, programs[:1]), {}, 3, sample_us=1)
    assert line["us"]["best"] <= line["us"]["median"] <= line["us"]["p80"]
    assert line["rounds"] == 3
