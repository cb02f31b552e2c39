"""Checkpoints under public names: which parameters they become, and what is refused."""

import dataclasses
import functools
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import measure_loading
import ml_dtypes
import numpy as np
import pytest
from checkpoint_cases import (
    ATTENTION,
    ATTENTION_SHAPES,
    DECODER,
    DECODER_SHAPES,
    attention_tensors,
    block_scaled,
    by_naming,
    entry,
    equal_bits,
    equal_trees,
    expected_attention,
    expected_decoder,
    fault_text,
    file_bytes,
    needs_smaps,
    random_codes,
    random_scales,
    random_tensors,
    renamed,
    resident_bytes,
    rounded_to_bfloat16,
    write_file,
)
from flax import linen as nn
from small_models import activations, attention_config, quick_jit

import swa_jax as swa
from swa_jax import block_scales, checkpoint, tensor_files
from swa_jax.checkpoint import load_attention, load_decoder, open_tensors, shard_config

ROOT = Path(__file__).parents[1]


@pytest.fixture
def layer_file(tmp_path):
    return write_file(tmp_path / "layer.safetensors", attention_tensors())


# --- which tensor becomes which parameter


@by_naming
def test_an_attention_layer_is_found_under_every_naming(tmp_path, naming):
    tensors = attention_tensors()
    path = write_file(tmp_path / "layer", renamed(tensors, naming))
    want = {"params": expected_attention(tensors, "model.layers.3.self_attn.")}
    equal_trees(load_attention(path, ATTENTION, 3), want)


@by_naming
@pytest.mark.parametrize("scan_layers", [False, True], ids=["unrolled", "scanned"])
def test_a_decoder_is_found_under_every_naming(tmp_path, naming, scan_layers):
    tensors = random_tensors(DECODER_SHAPES)
    path = write_file(tmp_path / "model.safetensors", renamed(tensors, naming))
    config = dataclasses.replace(DECODER, scan_layers=scan_layers)
    want = expected_decoder(tensors, scan_layers)
    equal_trees(load_decoder(path, config), want)
    equal_trees(load_decoder(tmp_path, config), want)


@pytest.mark.parametrize("scan_layers", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_a_loaded_decoder_has_the_modules_own_parameters(scan_layers, param_dtype):
    attention = dataclasses.replace(ATTENTION, param_dtype=param_dtype)
    config = dataclasses.replace(DECODER, attention=attention, scan_layers=scan_layers)
    loaded = load_decoder(random_tensors(DECODER_SHAPES), config)
    tokens = jnp.zeros((1, 1), jnp.int32)
    want = nn.meta.unbox(jax.eval_shape(swa.Decoder(config).init, jax.random.key(0), tokens))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), loaded) == jax.tree.map(
        lambda x: (x.shape, x.dtype), want
    )
    assert all(isinstance(value, jax.Array) for value in jax.tree.leaves(loaded))


def test_arrays_in_memory_are_loaded_as_files_are(layer_file):
    tensors = attention_tensors()
    on_device = {name: jnp.asarray(value) for name, value in tensors.items()}
    want = load_attention(layer_file, ATTENTION, 3)
    equal_trees(load_attention(tensors, ATTENTION, 3), want)
    equal_trees(load_attention(on_device, ATTENTION, 3), want)
    equal_trees(load_attention(open_tensors(layer_file), ATTENTION, 3), want)
    bare = {name.rpartition("self_attn.")[2]: value for name, value in tensors.items()}
    equal_trees(checkpoint.attention_params(bare, ATTENTION), want)


def test_a_tensor_that_is_not_contiguous_is_loaded_as_its_copy():
    tensors = attention_tensors()
    turned = {name: np.asfortranarray(value) for name, value in tensors.items()}
    turned |= {name: value[::-1][::-1] for name, value in tensors.items() if value.ndim == 1}
    want = load_attention(tensors, ATTENTION, 3)
    equal_trees(load_attention(turned, ATTENTION, 3), want)


# --- numbers


@by_naming
@pytest.mark.parametrize("kind", ["e8m0", "uint8", "float32"])
@pytest.mark.parametrize("block", [128, 32])
def test_a_block_scaled_weight_is_its_value_times_its_blocks_scale(naming, kind, block):
    stored, values = block_scaled(random_tensors(DECODER_SHAPES), block, kind)
    assert ".".join(stored).count("weight_scale_inv") == 16
    loaded = load_decoder(renamed(stored, naming), DECODER)
    want = expected_decoder({name: value.astype(np.float32) for name, value in values.items()})
    for got, value in zip(jax.tree.leaves(loaded), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(got, value)
    assert np.isnan(loaded["params"]["layers_0"]["attention"]["q_b"]).sum() > 50


@pytest.mark.parametrize("kind", ["e8m0", "float32"])
def test_a_block_scaled_weight_is_rounded_once_to_bfloat16(kind):
    config = dataclasses.replace(ATTENTION, param_dtype="bfloat16")
    stored, values = block_scaled(attention_tensors(), 32, kind)
    loaded = load_attention(stored, config, 3)
    products = {name: value.astype(np.float32) for name, value in values.items()}
    want = expected_attention(products, "model.layers.3.self_attn.")
    for name, value in loaded["params"].items():
        if value.ndim == 1:
            equal_bits(value, want[name])
            continue
        assert value.dtype == jnp.bfloat16
        rounded = rounded_to_bfloat16(want[name]).astype(np.float32)
        np.testing.assert_array_equal(np.asarray(value, np.float32), rounded)
        differs = (rounded != want[name]) & ~np.isnan(want[name])
        assert np.any(differs) == (kind == "float32")


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
def test_floating_weights_are_rounded_to_the_parameters_dtype(dtype):
    tensors = attention_tensors(dtype=dtype)
    prefix = "model.layers.3.self_attn."
    wide = {name: value.astype(np.float32) for name, value in tensors.items()}
    want = expected_attention(wide, prefix)
    loaded = load_attention(tensors, ATTENTION, 3)["params"]
    equal_trees(loaded, want)
    config = dataclasses.replace(ATTENTION, param_dtype="bfloat16")
    loaded = load_attention(tensors, config, 3)["params"]
    vectors = ("q_a_norm", "kv_norm", "sinks")
    equal_trees(loaded, {k: v if k in vectors else rounded_to_bfloat16(v) for k, v in want.items()})


def test_norm_weights_and_sinks_of_any_floating_dtype_become_float32():
    tensors = attention_tensors()
    narrow = {
        name: value.astype(ml_dtypes.bfloat16) if value.ndim == 1 else value
        for name, value in tensors.items()
    }
    loaded = load_attention(narrow, ATTENTION, 3)["params"]
    for name in ("q_a_norm", "kv_norm", "sinks"):
        assert loaded[name].dtype == jnp.float32
    want = narrow["model.layers.3.self_attn.sinks"].astype(np.float32)
    equal_bits(loaded["sinks"], want)


def test_nan_and_the_ends_of_the_range_pass_through():
    codes = np.array([[0x7F, 0xFF, 0x7E, 0x01], [0x00, 0x80, 0x38, 0xFE]], np.uint8)
    codes = codes.view(ml_dtypes.float8_e4m3fn)
    for exponent, largest, smallest in ((254, np.inf, 2.0**118), (0, 448 * 2.0**-127, 2.0**-136)):
        scales = np.array([[exponent]], np.uint8)
        got = block_scales.dequantize(codes, block_scales.scale_values(scales), 128)
        want = np.array(
            [[np.nan, np.nan, largest, smallest], [0, -0.0, 2.0 ** (exponent - 127), -largest]]
        )
        np.testing.assert_array_equal(got, want.astype(np.float32))
        assert np.signbit(got[1, 1])
        assert not np.signbit(got[1, 0])
    nan = block_scales.scale_values(np.array([[255]], np.uint8))
    assert np.all(np.isnan(block_scales.dequantize(codes, nan, 128)))


def test_where_both_block_sizes_fit_there_is_one_block_by_either():
    def blocks(size, block):
        return -(-size // block)

    both = [size for size in range(1, 2000) if blocks(size, 128) == blocks(size, 32)]
    assert {blocks(size, 128) for size in both} == {1}
    assert max(both) == 32
    # Rows and columns must fit the same size.
    assert block_scales.find_block_size((256, 256), (2, 2)) == 128
    assert block_scales.find_block_size((256, 256), (8, 8)) == 32
    assert block_scales.find_block_size((20, 200), (1, 2)) == 128
    assert block_scales.find_block_size((20, 200), (1, 7)) == 32
    for wrong in ((2, 8), (8, 2), (1, 1), (2,), (2, 2, 1), (256, 2), ()):
        assert block_scales.find_block_size((256, 256), wrong) is None


def test_large_tensors_are_converted_in_pieces_without_a_seam():
    """A piece ends inside a block: 1,500 values in a row, 174 rows in a piece."""
    hidden = 1500
    config = dataclasses.replace(ATTENTION, hidden_size=hidden, q_lora_rank=600)
    shapes = ATTENTION_SHAPES | {
        "q_a_proj.weight": (600, hidden),
        "q_a_norm.weight": (600,),
        "q_b_proj.weight": (256, 600),
        "kv_proj.weight": (64, hidden),
        "o_b_proj.weight": (hidden, 80),
    }
    tensors = random_tensors({f"layers.0.self_attn.{k}": v for k, v in shapes.items()})
    stored, values = block_scaled({f"model.{k}": v for k, v in tensors.items()}, 128, "e8m0")
    loaded = load_attention(stored, config, 0)["params"]
    want = expected_attention(values, "model.layers.0.self_attn.")
    for name, value in want.items():
        np.testing.assert_array_equal(loaded[name], value.astype(np.float32))


# --- what does not fit is one error


@by_naming
def test_one_error_lists_every_tensor_that_does_not_fit(tmp_path, naming):
    tensors = random_tensors(DECODER_SHAPES)
    prefix = "model.layers.1.self_attn."
    del tensors["lm_head.weight"]
    tensors["model.norm.weight"] = np.zeros(161, np.float32)
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((48, 160), np.int32)
    tensors[f"{prefix}q_a_proj.weight"] = random_codes((96, 160))  # without scales
    tensors[f"{prefix}kv_norm.weight"] = random_codes((64,))
    tensors[f"{prefix}kv_proj.weight_scale_inv"] = random_scales((64, 160), 32, "e8m0")
    tensors[f"{prefix}q_b_proj.weight"] = random_codes((256, 96))
    tensors[f"{prefix}q_b_proj.weight_scale_inv"] = random_scales((96, 160), 32, "e8m0")
    tensors[f"{prefix}o_a_proj.weight"] = random_codes((80, 128))
    tensors[f"{prefix}o_a_proj.weight_scale_inv"] = np.ones((1, 1), np.float16)
    tensors["model.layers.2.input_layernorm.weight"] = np.zeros(160, np.float32)
    tensors["model.layers.0.mlp.experts.7.gate_proj.weight"] = np.zeros((2, 2), np.float32)
    tensors["model.layers.0.self_attn.compressor.kv_proj.weight"] = np.zeros(3, np.float32)
    path = write_file(tmp_path / "model.safetensors", renamed(tensors, naming))
    text = fault_text(lambda: load_decoder(path, DECODER))
    assert text.startswith(f"{path}: ")
    q_a, kv = (naming(f"{prefix}{part}_proj.weight") for part in ("q_a", "kv"))
    q_a_scales, kv_scales, q_b_scales, o_a_scales = (
        naming(f"{prefix}{part}_proj.weight_scale_inv") for part in ("q_a", "kv", "q_b", "o_a")
    )
    up, norm = naming("model.layers.0.mlp.up_proj.weight"), naming("model.norm.weight")
    assert sorted(text.removeprefix(f"{path}: ").split("; ")) == sorted(
        [
            f"missing {naming('lm_head.weight')}",
            f"{up}: expected a floating dtype, got int32",
            f"{norm}: expected shape (160,), got (161,)",
            f"{naming(f'{prefix}kv_norm.weight')}: expected a floating dtype of 16 bits or more, "
            f"got float8_e4m3fn",
            f"{q_a}: expected scales {q_a_scales} beside float8_e4m3fn, got none",
            f"{kv_scales}: expected scales beside float8_e4m3fn only, got {kv} in float32",
            f"{q_b_scales}: expected shape (2, 1) or (8, 3), got (3, 5)",
            f"{o_a_scales}: expected dtype float8_e8m0fnu or uint8 or float32, got float16",
            f"unexpected {naming('model.layers.2.input_layernorm.weight')}",
            f"unexpected {naming('model.layers.0.mlp.experts.7.gate_proj.weight')}",
            f"unexpected {naming('model.layers.0.self_attn.compressor.kv_proj.weight')}",
        ]
    )


def test_a_list_of_faults_ends_after_forty():
    tensors = random_tensors(DECODER_SHAPES)
    tensors |= {f"model.layers.9.mlp.experts.{i}.w": np.zeros(1, np.float32) for i in range(100)}
    text = fault_text(lambda: load_decoder(tensors, DECODER))
    assert text.startswith("tensors: unexpected model.layers.9.mlp.experts.0.w; ")
    assert text.count("unexpected") == 40
    assert text.endswith("; and 60 more")


def test_faults_of_the_models_own_tensors_come_before_the_unexpected():
    tensors = random_tensors(DECODER_SHAPES)
    tensors |= {f"a{i}": np.zeros(1, np.float32) for i in range(50)}
    tensors["lm_head.weight"] = np.zeros((1, 2), np.float32)
    del tensors["model.norm.weight"]
    text = fault_text(lambda: load_decoder(tensors, DECODER))
    assert text.startswith(
        "tensors: missing model.norm.weight; lm_head.weight: expected shape (50, 160), got (1, 2); "
        "unexpected a0; "
    )


def test_a_dtype_without_scales_of_its_own_is_refused():
    tensors = attention_tensors()
    name = "model.layers.3.self_attn.q_b_proj.weight"
    tensors[name] = np.zeros((256, 96), ml_dtypes.float8_e5m2)
    assert fault_text(lambda: load_attention(tensors, ATTENTION, 3)) == (
        f"tensors: {name}: expected a floating dtype of 16 bits or more or float8_e4m3fn with "
        f"scales, got float8_e5m2"
    )


def test_a_dtype_that_numpy_has_not_is_listed_and_hurts_only_whoever_asks(tmp_path):
    tensors = attention_tensors()
    name, other = "model.layers.3.self_attn.sinks", "model.layers.3.mlp.experts.0.gate_proj.weight"
    header, data = {}, b""
    for key, array in tensors.items():
        start, data = len(data), data + array.tobytes()
        header[key] = entry("F32", array.shape, start, len(data))
    header[other] = entry("F4", (8,), len(data), len(data) + 4)
    path = tmp_path / "layer"
    path.write_bytes(file_bytes(header, data + bytes(4)))
    load_attention(path, ATTENTION, 3)
    opened = open_tensors(path)
    assert other in opened
    with pytest.raises(ValueError, match=rf"layer: expected tensors of F64.*, got F4 in {other}"):
        opened[other]
    header[name] = entry("F4", (32,), *header[name]["data_offsets"])
    path.write_bytes(file_bytes(header, data + bytes(4)))
    text = fault_text(lambda: load_attention(path, ATTENTION, 3))
    assert text.endswith(f"got F4 in {name}")


@by_naming
def test_what_compresses_keys_is_left_out_of_an_attention_layer_and_nothing_else_is(naming):
    tensors = attention_tensors()
    prefix = "model.layers.3.self_attn."
    for name in ("compressor.kv_proj.weight", "compressor.indexer.kv_norm.weight", "indexer.x"):
        tensors[prefix + name] = np.zeros(3, np.float32)
    tensors["model.layers.3.mlp.gate.weight"] = np.zeros(3, np.float32)
    tensors["model.layers.30.self_attn.other"] = np.zeros(3, np.float32)
    tensors["model.layers.3.input_layernorm.weight"] = np.zeros(3, np.float32)  # attn_norm.weight
    load_attention(renamed(tensors, naming), ATTENTION, 3)
    wrong = [prefix + name for name in ("compressors", "q_c_proj.weight", "sinks.weight_scale_inv")]
    tensors |= dict.fromkeys(wrong, np.zeros(3, np.float32))
    text = fault_text(lambda: load_attention(renamed(tensors, naming), ATTENTION, 3))
    assert text == "tensors: " + "; ".join(sorted(f"unexpected {naming(name)}" for name in wrong))


def test_a_decoder_leaves_out_what_compresses_keys_where_a_layer_has_a_compressed_cache():
    compressed = dataclasses.replace(ATTENTION, extra_fmt=swa.V41.with_width(64))
    config = dataclasses.replace(DECODER, attention=(ATTENTION, compressed))
    tensors = random_tensors(DECODER_SHAPES)
    extra = {
        f"model.layers.{i}.self_attn.{name}": np.zeros(2, np.float32)
        for i in range(2)
        for name in ("compressor.ape", "indexer.wq_b.weight")
    }
    text = fault_text(lambda: load_decoder(tensors | extra, config))
    assert text == (
        "tensors: unexpected model.layers.0.self_attn.compressor.ape; "
        "unexpected model.layers.0.self_attn.indexer.wq_b.weight"
    )
    fitting = {name: value for name, value in extra.items() if ".1." in name}
    equal_trees(load_decoder(tensors | fitting, config), expected_decoder(tensors))


def test_a_layer_that_is_not_there_is_missing_as_a_whole(layer_file):
    text = fault_text(lambda: load_attention(layer_file, ATTENTION, 4))
    assert text.count("missing model.layers.4.self_attn.") == 8
    assert text.count(";") == 7


# --- shards of a layer's heads


@functools.cache
def layer_of(config):
    return quick_jit(swa.SlidingWindowAttention(config).apply)


def whole_and_shards(tensors, count):
    x = activations(ATTENTION, 2, 12)

    def run(config, params):
        return np.asarray(layer_of(config)(params, x), np.float64)

    part = shard_config(ATTENTION, count)
    shards = [
        run(part, load_attention(tensors, ATTENTION, 3, shard=(i, count))) for i in range(count)
    ]
    return run(ATTENTION, load_attention(tensors, ATTENTION, 3)), shards


def small_codes(tensors):
    """The same with no NaN, and values of a size that a layer can bear."""
    return {
        name: (value.view(np.uint8) & 0xB7).view(value.dtype)
        if value.dtype == ml_dtypes.float8_e4m3fn
        else value
        for name, value in tensors.items()
    }


@pytest.mark.parametrize("count", [1, 2, 4], ids=["whole", "a group each", "half a group each"])
@pytest.mark.parametrize("kind", ["float32", "blocks of 128", "blocks of 32"])
def test_the_outputs_of_all_shards_add_up_to_the_layers(tmp_path, count, kind):
    tensors = attention_tensors()
    if kind != "float32":
        tensors = small_codes(block_scaled(tensors, int(kind.split()[-1]), "e8m0")[0])
    path = write_file(tmp_path / "layer", tensors)
    whole, shards = whole_and_shards(path, count)
    assert np.max(np.abs(whole)) > 1e-3
    assert np.max(np.abs(sum(shards) - whole)) <= 2e-6 * np.max(np.abs(whole))
    for shard in shards[: count - 1]:  # and none of them is nothing
        assert np.max(np.abs(shard)) > 1e-2 * np.max(np.abs(whole))


@pytest.mark.parametrize(("count", "heads", "groups"), [(1, 8, 4), (2, 4, 2), (4, 2, 1), (8, 1, 1)])
def test_a_shard_is_a_layer_of_fewer_heads(count, heads, groups):
    config = dataclasses.replace(ATTENTION, num_heads=8, o_groups=4)
    part = shard_config(config, count)
    assert part == dataclasses.replace(config, num_heads=heads, o_groups=groups)


def test_shards_hold_the_heads_in_their_order():
    config = dataclasses.replace(ATTENTION, num_heads=8, o_groups=4)
    shapes = ATTENTION_SHAPES | {
        "q_b_proj.weight": (512, 96),
        "sinks": (8,),
        "o_a_proj.weight": (160, 128),
        "o_b_proj.weight": (160, 160),
    }
    t = random_tensors({f"layers.0.self_attn.{name}": shape for name, shape in shapes.items()})
    q_b, sinks, o_a, o_b = (
        t[f"layers.0.self_attn.{name}"]
        for name in ("q_b_proj.weight", "sinks", "o_a_proj.weight", "o_b_proj.weight")
    )
    second = load_attention(t, config, 0, shard=(1, 2))["params"]
    equal_bits(second["q_b"], q_b[256:])
    equal_bits(second["sinks"], sinks[4:])
    equal_bits(second["o_a"], o_a[80:])
    equal_bits(second["o_b"], np.ascontiguousarray(o_b[:, 80:]))
    sixth = load_attention(t, config, 0, shard=(5, 8))["params"]  # the second half of group 2
    equal_bits(sixth["q_b"], q_b[320:384])
    equal_bits(sixth["sinks"], sinks[5:6])
    equal_bits(sixth["o_a"], np.ascontiguousarray(o_a[80:120, 64:]))
    equal_bits(sixth["o_b"], np.ascontiguousarray(o_b[:, 80:120]))
    for name in ("q_a_kv", "q_a_norm", "kv_norm"):
        equal_bits(second[name], sixth[name])


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "count: expected a divisor of num_heads 12, got 0: a head is not divided"),
        (-2, "count: expected a divisor of num_heads 12, got -2: a head is not divided"),
        (8, "count: expected a divisor of num_heads 12, got 8: a head is not divided"),
        (24, "count: expected a divisor of num_heads 12, got 24: a head is not divided"),
        (6, "count: expected a divisor or a multiple of o_groups 4, got 6: a shard would hold "
            "parts of two groups"),
        (3, "count: expected a divisor or a multiple of o_groups 4, got 3: a shard would hold "
            "parts of two groups"),
        (2.0, "count: expected an integer, got 2.0"),
    ],
)  # fmt: skip
def test_heads_and_groups_that_cannot_be_divided_are_refused(count, text):
    config = dataclasses.replace(ATTENTION, num_heads=12, o_groups=4)
    assert fault_text(lambda: shard_config(config, count)) == text


@pytest.mark.parametrize(
    ("shard", "text"),
    [
        ((2, 2), "shard: expected an index from 0 to 1, got 2"),
        ((-1, 2), "shard: expected an index from 0 to 1, got -1"),
        (3, "shard: expected (index, count), got 3"),
        ((1, 2, 3), "shard: expected (index, count), got (1, 2, 3)"),
        (("0", 2), "shard: expected an integer, got '0'"),
        ((0, 3), "count: expected a divisor of num_heads 4, got 3: a head is not divided"),
    ],
)
def test_a_shard_that_is_not_there_is_refused(shard, text):
    call = lambda: load_attention(attention_tensors(), ATTENTION, 3, shard=shard)  # noqa: E731
    assert fault_text(call) == text


@needs_smaps
@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: load_decoder({}, ATTENTION),
         "config: expected a DecoderConfig, got AttentionConfig"),
        (lambda: load_decoder(None, DECODER), "path_or_tensors: expected a path, got NoneType"),
        (lambda: load_attention({}, DECODER, 0),
         "config: expected an AttentionConfig, got DecoderConfig"),
        (lambda: load_attention(3, ATTENTION, 0), "path_or_tensors: expected a path, got int"),
        (lambda: checkpoint.attention_params({}, DECODER),
         "config: expected an AttentionConfig, got DecoderConfig"),
        (lambda: checkpoint.attention_params(None, ATTENTION),
         "tensors: expected a Mapping, got NoneType"),
        (lambda: open_tensors(None), "path: expected a path, got NoneType"),
        (lambda: checkpoint.load_params(b"weights"), "path: expected a path, got bytes"),
    ],
)  # fmt: skip
def test_another_kind_of_object_is_refused_by_its_name(call, text):
    assert fault_text(call) == text


def test_only_the_heads_of_a_shard_are_read(tmp_path, monkeypatch):
    """q_b has 1 GiB, and a shard 4 MiB of it. The file is a hole: it takes no disk."""
    rank, heads = 16384, 256
    config = attention_config(
        8, swa.F32, num_heads=heads, o_groups=1, q_lora_rank=rank, param_dtype="bfloat16"
    )
    shapes = {
        "q_b_proj.weight": (heads * 64, rank),
        "q_a_proj.weight": (rank, 32),
        "q_a_norm.weight": (rank,),
        "kv_proj.weight": (64, 32),
        "kv_norm.weight": (64,),
        "sinks": (heads,),
        "o_a_proj.weight": (8, heads * 64),
        "o_b_proj.weight": (32, 8),
    }
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[f"layers.0.self_attn.{name}"] = entry("F32", shape, start, end)
    path = tmp_path / "layer"
    path.write_bytes(file_bytes(header))
    os.truncate(path, path.stat().st_size + end)
    monkeypatch.setattr(tensor_files.TensorFiles, "release", lambda self, name: None)
    opened = open_tensors(path)
    assert resident_bytes(path) == 0
    load_attention(opened, config, 0, shard=(100, heads))
    assert 2**22 <= resident_bytes(path) <= 2**26


@needs_smaps
def test_no_page_of_a_file_stays_in_memory(tmp_path):
    stored, _ = block_scaled(random_tensors(DECODER_SHAPES), 32, "e8m0")
    path = write_file(tmp_path / "model.safetensors", stored)
    opened = open_tensors(path)
    copies = {name: np.array(value) for name, value in opened.items()}
    assert resident_bytes(path) > 0
    held = opened["model.norm.weight"]
    load_decoder(opened, DECODER)
    assert resident_bytes(path) == 0
    for name, value in copies.items():
        equal_bits(opened[name], value)
    equal_bits(held, copies["model.norm.weight"])


# --- long loads


def test_progress_counts_the_parameters_bytes(tmp_path, layer_file, capsys):
    load_attention(layer_file, ATTENTION, 3)
    assert capsys.readouterr().err == ""
    stored, _ = block_scaled(attention_tensors(), 32, "e8m0")
    config = dataclasses.replace(ATTENTION, param_dtype="bfloat16")
    load_attention(stored, config, 3, progress=True)
    sizes = [
        (2 if len(shape) == 2 else 4) * math.prod(shape) for shape in ATTENTION_SHAPES.values()
    ]
    total = f"{sum(sizes) / 1000:.0f}k"
    bar = capsys.readouterr().err.split("\r")[-1]
    assert bar.startswith("100%|")
    assert f"| {total}/{total} [" in bar
    path = write_file(tmp_path / "model.safetensors", random_tensors(DECODER_SHAPES))
    load_decoder(path, DECODER, progress=True)
    assert "100%" in capsys.readouterr().err


@needs_smaps
@pytest.mark.parametrize(
    "options",
    [(), ("--scan-layers",)],
    ids=["unrolled", "scanned"],
)
@pytest.mark.slow
def test_loading_takes_little_memory_beside_the_parameters(tmp_path, options):
    command = [sys.executable, ROOT / "examples" / "measure_loading.py", "--bytes", "80e6"]
    done = subprocess.run(
        [*command, "--dir", tmp_path, *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nHOLDS: " in done.stdout
    assert list(tmp_path.iterdir()) == []


@needs_smaps
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing"], "No such file or directory: "),
        (["missing", "--scan-layers"], "argument --scan-layers: --load writes no checkpoint"),
        ([None, "--bytes", "1e30"], "argument --bytes: expected 10e6 to 1e15, got 1e+30"),
    ],
)
def test_a_checkpoint_that_cannot_be_measured_is_one_line(tmp_path, capsys, arguments, message):
    loaded = [] if arguments[0] is None else ["--load", str(tmp_path / arguments[0])]
    try:
        status = measure_loading.main([*loaded, *arguments[1:]])
    except SystemExit as end:
        status = end.code
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("measure_loading.py: error: ")
    assert message in err
