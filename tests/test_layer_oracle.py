"""The attention layer against Hugging Face's DeepSeek-V4 layer: recorded outputs and weights."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from small_models import attention_config, decoder_config, decoder_params, largest_error

import swa_jax as swa
from swa_jax import checkpoint

TOLERANCE = 2e-6  # of the largest value
TOKENS = 40
ORIGINAL_NAMES = {
    "q_a_proj.weight": "wq_a.weight",
    "q_a_norm.weight": "q_norm.weight",
    "q_b_proj.weight": "wq_b.weight",
    "kv_proj.weight": "wkv.weight",
    "kv_norm.weight": "kv_norm.weight",
    "sinks": "attn_sink",
    "o_a_proj.weight": "wo_a.weight",
    "o_b_proj.weight": "wo_b.weight",
}


@pytest.fixture(scope="module")
def recorded():
    with np.load(Path(__file__).parent / "data" / "window_layer.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def tensors(recorded):
    return {name[2:]: value for name, value in recorded.items() if name.startswith("p_")}


@pytest.fixture(scope="module")
def config(recorded):
    fields = json.loads(str(recorded["cfg"]))
    return swa.AttentionConfig(
        hidden_size=fields["hidden_size"],
        num_heads=fields["num_attention_heads"],
        head_dim=fields["head_dim"],
        rope_dim=fields["qk_rope_head_dim"],
        q_lora_rank=fields["q_lora_rank"],
        o_groups=fields["o_groups"],
        o_lora_rank=fields["o_lora_rank"],
        window=fields["sliding_window"],
        rope_theta=fields["rope_theta"],
        norm_eps=fields["rms_norm_eps"],
        query_norm=True,  # V4 normalises each query head
        fmt=swa.F32.with_width(fields["head_dim"]),  # transformers does not round rows
    )


@pytest.fixture(scope="module")
def step(config, tensors):
    """The layer in one call of a fixed width: prefill or decode, padded as needed."""
    params = checkpoint.attention_params(tensors, config)
    layer = swa.SlidingWindowAttention(config)
    state_ids = np.array([2, 0], np.int32)

    @functools.partial(jax.jit, static_argnames=("kind", "width"), donate_argnames="cache")
    def call(cache, x, start, length, kind, width):
        if kind == "prefill":
            starts, lengths = (np.ones(2, np.int32) * value for value in (start, length))
            meta = swa.PrefillMetadata.build(
                config.geometry, state_ids, starts, lengths, max_tokens=width
            )
        else:
            token = np.arange(width, dtype=np.int32)
            positions = jnp.where(token < length, start + token, -1)
            positions = jnp.broadcast_to(positions, (2, width))
            meta = swa.DecodeMetadata.build(config.geometry, state_ids, positions)
        y, rows = layer.apply(params, x, cache.layer(0), meta)
        return y, cache.with_layer(0, rows)

    def padded(cache, x, start, length, kind, width):
        chunk = np.full((2, width, config.hidden_size), np.nan, np.float32)
        chunk[:, :length] = x[:, start : start + length]
        y, cache = call(cache, chunk, np.int32(start), np.int32(length), kind, width)
        return np.asarray(y)[:, :length], cache

    return padded


def assert_recorded(y, recorded):
    assert largest_error(y, recorded["y64"]) <= TOLERANCE
    assert largest_error(y, recorded["y"]) <= TOLERANCE


def test_a_whole_sequence_is_the_recorded_one(config, tensors, recorded):
    params = checkpoint.attention_params(tensors, config)
    y = jax.jit(swa.SlidingWindowAttention(config).apply)(params, recorded["x"])
    assert_recorded(y, recorded)


# Kind, width of the call, tokens of each call. The ring has 14 rows, and a step at most 7 tokens.
@pytest.mark.parametrize(
    "calls",
    [
        [("prefill", 40, 40)],
        [("prefill", 16, 16), ("prefill", 16, 16), ("prefill", 16, 8)],
        [("prefill", 16, size) for size in (5, 1, 3, 8, 2, 15, 6)],
        [("prefill", 16, 1)] * TOKENS,
        [("decode", 1, 1)] * TOKENS,
        [("decode", 7, 7)] * 5 + [("decode", 7, 5)],
        [("decode", 7, size) for size in (1, 6, 7, 2, 3, 7, 7, 5, 2)],
        [("prefill", 16, 13), ("decode", 7, 4), ("prefill", 16, 9), ("decode", 7, 7)]
        + [("decode", 1, 1)] * 7,
    ],
    ids=["one chunk", "equal chunks", "unequal chunks", "chunks of one", "steps", "verify",
         "unequal verify", "all kinds"],
)  # fmt: skip
def test_every_way_of_feeding_the_sequence_is_the_recorded_one(step, config, recorded, calls):
    cache = swa.RingCache.create(3, 1, config.geometry, config.fmt)
    outputs, start = [], 0
    for kind, width, length in calls:
        y, cache = step(cache, recorded["x"], start, length, kind, width)
        outputs.append(y)
        start += length
    assert start == TOKENS
    assert_recorded(np.concatenate(outputs, axis=1), recorded)


# --- weights under their public names


def test_both_naming_conventions_give_the_same_parameters(config, tensors):
    original = {ORIGINAL_NAMES[name]: value for name, value in tensors.items()}
    params = checkpoint.attention_params(tensors, config)["params"]
    np.testing.assert_array_equal(params["q_a_kv"][:16], tensors["q_a_proj.weight"])
    np.testing.assert_array_equal(params["q_a_kv"][16:], tensors["kv_proj.weight"])
    for name in ("q_b", "o_a", "o_b"):
        np.testing.assert_array_equal(params[name], tensors[f"{name}_proj.weight"])
    for name in ("q_a_norm", "kv_norm"):
        np.testing.assert_array_equal(params[name], tensors[f"{name}.weight"])
    np.testing.assert_array_equal(params["sinks"], tensors["sinks"])
    assert len(params) == 7
    same = checkpoint.attention_params(original, config)["params"]
    jax.tree.map(np.testing.assert_array_equal, same, params)


def test_norms_and_sinks_stay_float32_whatever_the_parameters_dtype(tensors, config):
    config = dataclasses.replace(config, param_dtype="bfloat16")
    params = checkpoint.attention_params(tensors, config)["params"]
    dtypes = {name: value.dtype.name for name, value in params.items()}
    assert dtypes == {
        "q_a_kv": "bfloat16",
        "q_a_norm": "float32",
        "q_b": "bfloat16",
        "kv_norm": "float32",
        "sinks": "float32",
        "o_a": "bfloat16",
        "o_b": "bfloat16",
    }


@pytest.mark.parametrize("naming", ["Hugging Face", "original"])
def test_one_error_lists_every_wrong_tensor(config, tensors, naming):
    def named(name):
        return name if naming == "Hugging Face" else ORIGINAL_NAMES[name]

    wrong = {named(name): value for name, value in tensors.items()}
    del wrong[named("o_b_proj.weight")]
    wrong[named("q_b_proj.weight")] = tensors["q_b_proj.weight"].T
    wrong[named("kv_proj.weight")] = tensors["kv_proj.weight"][:31]
    wrong[named("sinks")] = np.zeros(4, np.int32)
    wrong["compressor.weight"] = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match="^tensors: ") as raised:
        checkpoint.attention_params(wrong, config)
    message = str(raised.value)
    assert f"missing {named('o_b_proj.weight')}" in message
    assert "unexpected compressor.weight" in message
    assert f"{named('q_b_proj.weight')}: expected shape (128, 16), got (16, 128)" in message
    assert f"{named('kv_proj.weight')}: expected shape (32, 64), got (31, 64)" in message
    assert f"{named('sinks')}: expected a floating dtype, got int32" in message
    assert message.count(";") == 4


# --- parameter files


def test_saved_parameters_come_back_bit_for_bit_in_bfloat16(tmp_path):
    params = decoder_params(decoder_config(attention_config(3, swa.F32), num_layers=2))
    path = tmp_path / "decoder.safetensors"
    checkpoint.save_params(path, params, {"note": "two layers"}, dtype="bfloat16")
    loaded, metadata = checkpoint.load_params(path)
    assert metadata == {"note": "two layers"}
    assert [file.name for file in tmp_path.iterdir()] == ["decoder.safetensors"]

    def check(want, got):
        dtype = np.float32 if want.ndim == 1 else ml_dtypes.bfloat16
        assert got.dtype == dtype
        np.testing.assert_array_equal(got.view(np.uint8), want.astype(dtype).view(np.uint8))

    jax.tree.map(check, params, loaded)


def test_without_a_dtype_parameters_are_saved_as_they_are(tmp_path):
    params = {"a": {"b": np.arange(6, dtype=np.float32).reshape(2, 3)}, "c": np.int32([7])}
    checkpoint.save_params(tmp_path / "file", params)
    loaded, metadata = checkpoint.load_params(tmp_path / "file")
    assert metadata == {}
    assert loaded["a"]["b"].dtype == np.float32
    assert loaded["c"].dtype == np.int32
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1])
def test_a_file_that_is_cut_short_is_refused_by_name(tmp_path, keep):
    path = tmp_path / "cut.safetensors"
    checkpoint.save_params(path, {"a": np.zeros((4, 4), np.float32)}, {"note": "x" * 100})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"cut\.safetensors: expected a whole safetensors file"):
        checkpoint.load_params(path)


@pytest.mark.parametrize("data", [b"garbage", b"\xff" * 64, b"PK\x03\x04" + bytes(60)])
def test_a_file_of_another_kind_is_refused(tmp_path, data):
    (tmp_path / "other").write_bytes(data)
    with pytest.raises(ValueError, match="expected a whole safetensors file"):
        checkpoint.load_params(tmp_path / "other")


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        checkpoint.load_params(tmp_path / "none")
