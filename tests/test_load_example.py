"""examples/load_hf.py, and the README's way from a directory of weights to tokens."""

import json
import os
import subprocess
import sys
from pathlib import Path

import float64_reference
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from small_models import activations

import swa_jax as swa

ROOT = Path(__file__).parent.parent
HIDDEN, HEADS, WIDTH, RANK, GROUPS, LOW, MLP, VOCAB, LAYERS = 96, 4, 128, 40, 2, 48, 72, 60, 3
FIELDS = {
    "model_type": "deepseek_v4",
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "head_dim": WIDTH,
    "qk_rope_head_dim": 64,
    "q_lora_rank": RANK,
    "o_groups": GROUPS,
    "o_lora_rank": LOW,
    "sliding_window": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
    "num_hidden_layers": LAYERS,
    "compress_ratios": [0, 4, 0],
    "vocab_size": VOCAB,
    "intermediate_size": MLP,
    "torch_dtype": "float32",
}
ATTENTION = {
    "q_a_proj": (RANK, HIDDEN),
    "kv_proj": (WIDTH, HIDDEN),
    "q_b_proj": (HEADS * WIDTH, RANK),
    "o_a_proj": (GROUPS * LOW, HEADS * WIDTH // GROUPS),
    "o_b_proj": (HIDDEN, GROUPS * LOW),
}


def block_scaled(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """e4m3 codes and float32 scales of 32 x 32 blocks, and the numbers that they stand for."""
    rows, columns = (-(-size // 32) for size in matrix.shape)
    scales = np.random.default_rng(rows * columns).uniform(0.5, 2, (rows, columns)).astype("f4")
    spread = np.kron(scales, np.ones((32, 32), "f4"))[: matrix.shape[0], : matrix.shape[1]]
    codes = (matrix / spread).astype(ml_dtypes.float8_e4m3fn)
    return codes, scales, codes.astype(np.float64) * spread


def make_model(directory: Path, fields=FIELDS) -> list[dict[str, np.ndarray]]:
    """A model with real names in two shards, some matrices block-scaled; its attention weights."""
    rng = np.random.default_rng(0)
    shards: list[dict[str, np.ndarray]] = [{}, {}]
    layers = []
    for i in range(LAYERS):
        prefix, shard = f"model.layers.{i}.", shards[i % 2]
        layer = {}
        for name, shape in ATTENTION.items():
            matrix = rng.normal(size=shape) * shape[1] ** -0.5
            codes, scales, layer[name] = block_scaled(matrix)
            shard[f"{prefix}self_attn.{name}.weight"] = codes
            shard[f"{prefix}self_attn.{name}.weight_scale_inv"] = scales
        for name, size in (("q_a_norm", RANK), ("kv_norm", WIDTH)):
            layer[name] = rng.uniform(0.5, 1.5, size).astype("f4")
            shard[f"{prefix}self_attn.{name}.weight"] = layer[name]
        layer["sinks"] = rng.normal(size=HEADS).astype("f4")
        shard[f"{prefix}self_attn.sinks"] = layer["sinks"]
        for name, shape in (
            ("mlp.gate_proj", (MLP, HIDDEN)),
            ("mlp.up_proj", (MLP, HIDDEN)),
            ("mlp.down_proj", (HIDDEN, MLP)),
        ):
            shard[f"{prefix}{name}.weight"] = rng.normal(size=shape).astype(ml_dtypes.bfloat16)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shard[f"{prefix}{name}.weight"] = np.ones(HIDDEN, "f4")
        layers.append(layer)
    shards[0]["model.embed_tokens.weight"] = rng.normal(size=(VOCAB, HIDDEN)).astype("f4")
    shards[1]["lm_head.weight"] = rng.normal(size=(VOCAB, HIDDEN)).astype("f4")
    shards[1]["model.norm.weight"] = np.ones(HIDDEN, "f4")
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for name, shard in zip(names, shards, strict=True):
        safetensors.numpy.save_file(shard, directory / name)
    where = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (directory / "config.json").write_text(json.dumps(fields))
    return layers


def reference(config: swa.AttentionConfig, layer: dict[str, np.ndarray], x) -> np.ndarray:
    params = {
        "q_a_kv": np.concatenate([layer["q_a_proj"], layer["kv_proj"]]),
        **{name: layer[f"{name}_proj"] for name in ("q_b", "o_a", "o_b")},
        **{name: layer[name] for name in ("q_a_norm", "kv_norm", "sinks")},
    }
    return np.stack([float64_reference.attention_layer(params, row, config) for row in x])


def run(*arguments):
    return subprocess.run(
        [sys.executable, "examples/load_hf.py", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_layers_are_loaded_described_and_compared(tmp_path):
    layers = make_model(tmp_path)
    configs = swa.read_attention(tmp_path)
    x = activations(configs[0], 2, 30)
    outputs = {f"layers.{i}": reference(configs[i], layers[i], x).astype("f4") for i in (0, 1)}
    safetensors.numpy.save_file({"x": x, **outputs}, tmp_path / "reference.safetensors")
    result = run(tmp_path, "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert [entry["layer"] for entry in found] == [0, 1, 2]
    first, second, third = found
    assert first["shapes"] == {
        "q_a_kv": [168, 96],
        "q_a_norm": [40],
        "q_b": [512, 40],
        "kv_norm": [128],
        "sinks": [4],
        "o_a": [96, 256],
        "o_b": [96, 96],
    }
    assert (first["format"], first["row_bytes"]) == ("V4", 194)  # 64 + 128 + 1 scale + 1 pad
    assert first["cache_bytes_per_request"] == 2720  # 14 rows, padded to a multiple of 32
    assert (first["compressed_format"], second["compressed_format"]) == (None, "V4")
    assert (first["rope_theta"], second["rope_theta"]) == (10000, 160000)
    assert (first["yarn_factor"], second["yarn_factor"]) == (None, 16)
    for entry in (first, second):
        assert 1e-4 < entry["difference"] < 5e-2  # rows are rounded to 8 bits
        assert entry["difference_float32_rows"] <= 2e-6
    assert "difference" not in third


def test_the_table_says_the_same_for_people(tmp_path):
    make_model(tmp_path)
    result = run(tmp_path, "--layers", "2")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("from layer 0 on, in float32: q_a_kv (168, 96), q_a_norm (40,)")
    assert lines[2].split() == ["0", "V4", "194", "2,720", "-", "10000", "-", "-"]
    assert lines[3].split() == ["1", "V4", "194", "2,720", "V4", "160000", "YaRN", "16", "-", "-"]
    assert lines[-1].startswith("2 layers: 5,440 cache bytes per request")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: (path / "config.json").unlink(), "No such file or directory"),
        (lambda path: (path / "config.json").write_text("{}"), "expected model_type deepseek_v4"),
        (
            lambda path: (path / "model-00002-of-00002.safetensors").unlink(),
            "model-00002-of-00002.safetensors",
        ),
        (
            lambda path: safetensors.numpy.save_file(
                {"y": np.zeros(3)}, path / "reference.safetensors"
            ),
            "reference.safetensors: expected an input x, got ['y']",
        ),
    ],
)
def test_a_directory_that_is_no_such_model_is_one_line_and_status_two(tmp_path, change, message):
    make_model(tmp_path)
    change(tmp_path)
    result = run(tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("load_hf.py: error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


@pytest.mark.slow
def test_the_readmes_lines_lead_from_a_directory_to_tokens(tmp_path, monkeypatch):
    fields = {**FIELDS, "compress_ratios": [0, 0, 0]}
    (tmp_path / "model").mkdir()
    make_model(tmp_path / "model", fields)
    readme = (ROOT / "README.md").read_text()
    code = readme.partition("<!-- from a directory to tokens -->\n```python\n")[2].partition("```")[
        0
    ]
    assert 0 < len(code.splitlines()) < 10
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    assert [len(row) for row in names["tokens"]] == [20, 20]
    # The same tokens from the same weights, put together by hand.
    params = swa.checkpoint.load_decoder(Path("model"), names["config"])
    hidden = np.asarray(swa.Decoder(names["config"]).apply(params, jnp.asarray([[1, 2, 3]])))
    best = hidden[0, -1] @ np.asarray(params["params"]["head"]).T
    assert names["tokens"][0][0] == np.argmax(best)
