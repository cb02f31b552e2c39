"""Configurations of published models: their figures, as the models' own files have them."""

import json

import pytest

import swa_jax as swa
from swa_jax.__main__ import main
from swa_jax.hf_config import write_config

YARN = swa.YarnScaling(16.0, 65536, 32.0, 1.0)
# The public config.json of DeepSeek-V4-Flash, as far as it concerns attention and widths.
V4_FLASH_JSON = {
    "model_type": "deepseek_v4",
    "head_dim": 512,
    "hc_mult": 4,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_attention_heads": 64,
    "num_hidden_layers": 43,
    "num_key_value_heads": 1,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "sliding_window": 128,
    "torch_dtype": "bfloat16",
    "vocab_size": 129280,
    "compress_rope_theta": 160000,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],  # the last is the draft layer's
}
DENSE = {
    **V4_FLASH_JSON,
    "n_routed_experts": None,
    "hc_mult": 1,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "compress_ratios": None,
    "layer_types": ["sliding_attention"] * 3,
}


FIGURES = [
    ("v4-flash", 43, 2, 4096, 64, 1024, 8, 584, 584, 1e-6, True),
    ("v4-pro", 61, 0, 7168, 128, 1536, 16, 584, 584, 1e-6, True),
    ("v41-flash", 40, 2, 5120, 64, 1280, 8, 528, 288, 1e-20, False),
]


def test_every_preset_has_its_figures_here():
    assert {name for name, *_ in FIGURES} == set(swa.presets.PRESETS)


@pytest.mark.parametrize(
    ("name", "layers", "window_only", "hidden", "heads", "q_rank", "groups", "row", "extra", "eps",
     "query_norm"),
    FIGURES,
)  # fmt: skip
def test_a_preset_has_the_figures_of_its_model(
    name, layers, window_only, hidden, heads, q_rank, groups, row, extra, eps, query_norm
):
    config = swa.presets.PRESETS[name]()
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (layers, hidden, 129280)
    assert (config.geometry.window, config.geometry.capacity) == (128, 134)
    for i, layer in enumerate(config.layers):
        assert (layer.num_heads, layer.head_dim, layer.rope_dim) == (heads, 512, 64)
        assert (layer.q_lora_rank, layer.o_groups, layer.o_lora_rank) == (q_rank, groups, 1024)
        assert (layer.norm_eps, layer.query_norm) == (eps, query_norm)
        assert (layer.fmt.row_bytes, layer.scale_floor) == (row, "amax")
        assert (layer.pairing, layer.hadamard) == ("interleaved", False)
        if i < window_only:
            assert (layer.rope_theta, layer.rope_scaling, layer.extra_fmt) == (10000.0, None, None)
        else:
            assert (layer.rope_theta, layer.rope_scaling) == (160000.0, YARN)
            assert layer.extra_fmt is not None
            assert layer.extra_fmt.row_bytes == extra
    assert swa.DecoderConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize("name", swa.presets.PRESETS)
def test_a_look_alike_keeps_everything_but_the_sizes(name):
    config = swa.presets.PRESETS[name]()
    small = swa.presets.look_alike(config)
    assert small.num_layers == 4
    assert small.geometry.window == 16
    for large, layer in zip(config.layers[:4], small.layers, strict=True):
        for field in ("rope_dim", "rope_theta", "rope_scaling", "norm_eps", "query_norm", "pairing",
                      "hadamard", "scale_floor", "draft_tokens"):  # fmt: skip
            assert getattr(layer, field) == getattr(large, field)
        assert layer.fmt == large.fmt.with_width(128)
        assert (layer.extra_fmt is None) == (large.extra_fmt is None)


def write(directory, fields):
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


def test_a_published_file_gives_the_preset(tmp_path):
    layers = swa.read_attention(write(tmp_path, V4_FLASH_JSON))
    assert layers == swa.presets.v4_flash().layers


def test_every_spelling_of_the_rotation_gives_the_same_layers(tmp_path):
    want = swa.presets.v4_flash().layers
    plain = {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.125}
    yarn = {**V4_FLASH_JSON["rope_scaling"], "rope_type": "yarn", "attention_factor": 1.0}
    fields = {k: v for k, v in V4_FLASH_JSON.items() if not k.startswith("rope")}
    flat = {**fields, "rope_theta": 10000, "rope_parameters": {**yarn, "rope_theta": 10000}}
    assert swa.read_attention(write(tmp_path, flat)) == want
    nested = {"main": plain, "compress": {**yarn, "rope_theta": 160000}}
    types = ["sliding_attention"] * 2 + ["compressed_sparse_attention"] * 41
    fields = {k: v for k, v in fields.items() if not k.startswith(("compress", "qk"))}
    new = {**fields, "rope_parameters": nested, "layer_types": types}
    new["partial_rotary_factor"] = 0.125
    assert swa.read_attention(write(tmp_path, new)) == want


def test_a_text_model_inside_another_is_found(tmp_path):
    text = {
        **V4_FLASH_JSON,
        "model_type": "deepseek_v41_text",
        "hidden_size": 5120,
        "q_lora_rank": 1280,
        "num_hidden_layers": 40,
        "rms_norm_eps": 1e-20,
        "compress_ratios": [0, 0, *[2] * 18, *[1] * 20, 0, 0, 0],
    }
    path = write(tmp_path, {"model_type": "deepseek_v41", "text_config": text})
    assert swa.read_attention(path / "config.json") == swa.presets.v41_flash().layers


def test_a_dense_decoder_is_read_whole(tmp_path):
    config = swa.read_config(write(tmp_path, DENSE))
    assert (config.vocab_size, config.num_layers, config.mlp_size) == (129280, 3, 96)
    assert config.attention == swa.presets.v4_flash().layers[0]


@pytest.mark.parametrize("name", swa.presets.PRESETS)
def test_a_written_configuration_comes_back(tmp_path, name):
    config = swa.presets.PRESETS[name]().replace_attention(hadamard=True, pairing="half_split")
    write_config(tmp_path, config)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
    assert swa.read_config(tmp_path) == config
    assert swa.read_attention(tmp_path) == config.layers


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (V4_FLASH_JSON, r"got n_routed_experts 256, hc_mult 4; read_attention reads"),
        ({**DENSE, "hidden_act": "gelu"}, "got hidden_act 'gelu'"),
        ({**DENSE, "swiglu_limit": 10.0}, "got swiglu_limit 10.0"),
        ({**DENSE, "tie_word_embeddings": True}, "got tie_word_embeddings True"),
        ({**DENSE, "attention_bias": True}, "expected no attention_bias, got True"),
        ({**DENSE, "model_type": ["deepseek_v4"]}, "expected model_type deepseek_v4, "),
        ({**DENSE, "num_hidden_layers": -1}, "expected num_hidden_layers of 1 or more, got -1"),
        ({**DENSE, "num_hidden_layers": 2.0}, "expected num_hidden_layers of 1 or more, got 2.0"),
        (
            {**DENSE, "layer_types": ["full_attention"] * 3},
            "expected layer_types of sliding_",
        ),
        (
            {**DENSE, "layer_types": None, "compress_ratios": [0, False, 0]},
            "expected compress_ratios of 0 or more",
        ),
        ({**DENSE, "rope_scaling": True}, "expected rope scaling to be an object, got True"),
        (
            {**DENSE, "rope_parameters": {"main": None, "compress": None}},
            "expected rope scaling to be an object, got None",
        ),
        (
            {**DENSE, "rope_parameters": {"rope_type": "default", "rope_theta": 777}},
            "expected the base 10000 in rope_parameters as beside them, got 777",
        ),
        (
            {**DENSE, "rope_scaling": {**V4_FLASH_JSON["rope_scaling"], "mscale": 0.7}},
            "expected mscale 1 or none, got 0.7",
        ),
        ({**DENSE, "rope_theta": 10**400}, "rope_theta: expected a finite number above 0"),
        ({**DENSE, "rms_norm_eps": float("inf")}, "expected a number for rms_norm_eps, got inf"),
        ({**DENSE, "model_type": "llama"}, "expected model_type deepseek_v4, .*, got 'llama'"),
        ({**DENSE, "head_dim": None}, "expected a number for head_dim, got None"),
        ({**DENSE, "layer_types": None}, "expected a list for compress_ratios, got None"),
        ({**DENSE, "head_dim": "512"}, "expected a number for head_dim, got '512'"),
        ({**DENSE, "head_dim": 500}, "V4 expects a multiple of 64 plus 64, got 500"),
        ({**DENSE, "rope_theta": None}, "rope_theta: expected a finite number above 0, got None"),
        ({**DENSE, "rope_scaling": "yarn"}, "expected rope scaling to be an object, got 'yarn'"),
        ({**DENSE, "num_hidden_layers": 4}, "expected kinds of 4 layers, got 3"),
        ({**DENSE, "o_groups": 7}, "o_groups: expected a divisor of num_heads 64, got 7"),
        (
            {**DENSE, "rope_scaling": {"type": "linear", "factor": 2}},
            "expected rope scaling of type yarn or default, got 'linear'",
        ),
        ({**DENSE, "rope_scaling": {"type": "yarn"}}, "expected a number for factor, got None"),
        ({**DENSE, "model_type": "swa_jax"}, "DecoderConfig: unknown fields"),
    ],
)
def test_a_file_that_describes_no_such_decoder_is_refused_by_name(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        swa.read_config(write(tmp_path, fields))


def test_a_float16_model_computes_in_float32(tmp_path):
    config = swa.read_config(write(tmp_path, {**DENSE, "torch_dtype": "float16"}))
    assert (config.layers[0].dtype, config.layers[0].param_dtype) == ("float32", "float32")


def test_a_link_in_the_way_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "precious").write_text("as it was")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").symlink_to(tmp_path / "precious")
    write_config(tmp_path / "model", swa.presets.v4_pro())
    assert (tmp_path / "precious").read_text() == "as it was"
    assert not (tmp_path / "model" / "config.json").is_symlink()


def test_a_name_given_twice_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "swa_jax", "model_type": "llama"}')
    with pytest.raises(ValueError, match="'model_type' twice"):
        swa.read_config(tmp_path)


def test_one_value_is_replaced_in_every_layer():
    config = swa.presets.v41_flash().replace_attention(dtype="float32")
    assert {layer.dtype for layer in config.layers} == {"float32"}
    assert config.layers[0].extra_fmt is None
    assert swa.presets.v4_pro().replace_attention(window=64).layers[60].window == 64


def test_size_takes_layers_and_rows_from_a_preset(capsys):
    assert main(["size", "--preset", "v41-flash", "--slots", "2", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["layers"], figures["row_bytes"]) == (40, 528)
    assert figures["ring"]["total_bytes"] == 2 * 40 * 134 * 528
    assert main(["size", "--preset", "v41-flash", "--format", "V4", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["layers"], figures["row_bytes"]) == (40, 584)
