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
from small_models import (
    attention_config,
    decoder_config,
    decoder_params,
    largest_error,
    quick_jit,
)

import swa_jax as swa
from pallas_kernels import transforms
from swa_jax import checkpoint, rotary

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


@dataclasses.dataclass
class Recorded:
    """A layer, what went into it and what came out."""

    config: swa.AttentionConfig
    x: np.ndarray  # [2, TOKENS, hidden]
    outputs: list[np.ndarray]
    tolerance: float  # of the largest value
    starts: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(2, np.int32))

    @property
    def params(self):
        return checkpoint.attention_params(layer_tensors(), self.config)

    def check(self, y, first=0):
        for output in self.outputs:
            assert largest_error(y, output[:, first:]) <= self.tolerance


@functools.cache
def data(name):
    with np.load(Path(__file__).parent / "data" / name) as file:
        return dict(file)


def layer_tensors():
    """The weights under their names in transformers."""
    return {name[2:]: value for name, value in data("window_layer.npz").items() if name[:2] == "p_"}


def layer_config(fields, **others):
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
        **others,
    )


@functools.cache
def recorded(case):
    layer, variants = data("window_layer.npz"), data("layer_variants.npz")
    fields, x = json.loads(str(layer["cfg"])), layer["x"]
    if case == "float32":
        return Recorded(layer_config(fields), x, [layer["y"], layer["y64"]], 2e-6)
    if case == "bfloat16":
        config = layer_config(fields, dtype="bfloat16", param_dtype="bfloat16")
        y = variants["y_bfloat16"].view(ml_dtypes.bfloat16)
        return Recorded(config, x, [y, variants["y64_bfloat16"]], 5e-3)
    fields = json.loads(str(variants["cfg_yarn"]))
    config = layer_config(fields, rope_scaling=yarn_scaling(fields))
    if case == "YaRN":
        return Recorded(config, x, [variants["y_yarn"], variants["y64_yarn"]], 2e-6)
    x = np.broadcast_to(x[:1], x.shape)  # one sequence from two positions on
    return Recorded(config, x, [variants["y64_far"]], 2e-6, variants["far_starts"])


def yarn_scaling(fields):
    yarn = fields["rope_scaling"]
    return swa.YarnScaling(
        factor=yarn["factor"],
        original_max_positions=yarn["original_max_position_embeddings"],
        beta_fast=yarn["beta_fast"],
        beta_slow=yarn["beta_slow"],
    )


@functools.cache
def step_of(config):
    """The layer in one call of a fixed width: prefill or decode, padded as needed."""
    layer = swa.SlidingWindowAttention(config)
    params = checkpoint.attention_params(layer_tensors(), config)
    state_ids = np.array([2, 0], np.int32)

    @functools.partial(quick_jit, static_argnames=("kind", "width"), donate_argnames="cache")
    def call(cache, x, starts, length, kind, width):
        if kind == "prefill":
            lengths = jnp.broadcast_to(length, (2,))
            meta = swa.PrefillMetadata.build(
                config.geometry, state_ids, starts, lengths, max_tokens=width
            )
        else:
            token = np.arange(width, dtype=np.int32)[None, :]
            positions = jnp.where(token < length, starts[:, None] + token, -1)
            meta = swa.DecodeMetadata.build(config.geometry, state_ids, positions)
        y, rows = layer.apply(params, x, cache.layer(0), meta)
        return y, cache.with_layer(0, rows)

    return call


by_case = pytest.mark.parametrize("case", ["float32", "bfloat16", "YaRN", "YaRN, far"])


@by_case
def test_a_whole_sequence_is_the_recorded_one(case):
    case = recorded(case)
    positions = case.starts[:, None] + np.arange(TOKENS, dtype=np.int32)
    layer = swa.SlidingWindowAttention(case.config)
    case.check(quick_jit(layer.apply)(case.params, case.x, positions=positions))


# Kind, width of the call, tokens of each call. The ring has 14 rows, and a step at most 7 tokens.
@by_case
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
def test_every_way_of_feeding_the_sequence_is_the_recorded_one(case, calls):
    case = recorded(case)
    cache = swa.RingCache.create(3, 1, case.config.geometry, case.config.fmt)
    outputs, start = [], 0
    for kind, width, length in calls:
        chunk = np.full((2, width, case.config.hidden_size), np.nan, np.float32)
        chunk[:, :length] = case.x[:, start : start + length]
        y, cache = step_of(case.config)(
            cache, chunk, case.starts + start, np.int32(length), kind, width
        )
        outputs.append(np.asarray(y)[:, :length])
        start += length
    assert start == TOKENS
    # Far from 0 the ring is empty before the first position: queries that reach back see zeros.
    first = case.config.window - 1 if case.starts.any() else 0
    case.check(np.concatenate(outputs, axis=1)[:, first:], first)


# --- YaRN


@pytest.mark.parametrize("rope_dim", [16, 64])
@pytest.mark.parametrize(
    ("rope", "theta", "scaling"),
    [("plain", 10000.0, None), ("yarn", 160000.0, swa.YarnScaling())],
    ids=["plain", "YaRN"],
)
def test_frequencies_are_those_recorded(rope, theta, scaling, rope_dim):
    want = data("layer_variants.npz")[f"frequencies_{rope}_{rope_dim}"]
    np.testing.assert_allclose(rotary.frequencies(rope_dim, theta, scaling), want, rtol=2e-7)


def test_angles_are_those_recorded_at_near_and_far_positions():
    variants = data("layer_variants.npz")
    turns = rotary.rotary_turns(64, 160000.0, swa.YarnScaling())
    angles = transforms.rope_cos_sin(jnp.asarray(variants["angle_positions"]), turns)
    np.testing.assert_allclose(angles[0], variants["cos_yarn_64"], rtol=0, atol=2e-7)
    np.testing.assert_allclose(angles[1], variants["sin_yarn_64"], rtol=0, atol=2e-7)


# --- weights under their public names


@pytest.fixture
def tensors():
    return layer_tensors()


@pytest.fixture
def config():
    return recorded("float32").config


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
