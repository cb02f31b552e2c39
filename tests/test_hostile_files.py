"""Files that somebody made to do harm: no hang, no crash, no read elsewhere, no silent change."""

import contextlib
import json
import os
import signal

import batch_lines
import benchmark_lines
import jax
import load_hf
import ml_dtypes
import numpy as np
import pytest
import training_checkpoints
from checkpoint_cases import (
    ATTENTION,
    INDEX,
    attention_tensors,
    block_scaled,
    entry,
    fault_text,
    file_bytes,
    write_file,
    write_sharded,
)
from small_models import activations, attention_config, decoder_config, layer_params

import swa_jax as swa
from swa_jax import checkpoint
from swa_jax.exported import ExportedSlot
from swa_jax.files import read_safetensors, write_safetensors
from swa_jax.hf_config import write_config
from swa_jax.json_fields import parse_json
from swa_jax.prefixes import PrefixStore

pytestmark = pytest.mark.quick_compilation

CONFIG = decoder_config(attention_config(8, swa.V41), num_layers=2)


@contextlib.contextmanager
def seconds(limit):
    """Ends what hangs."""

    def hang(number, frame):
        pytest.fail(f"not done after {limit} s")

    before = signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- what is no regular file

REGULAR = "expected a regular file, got a pipe or a device"


def read_slot(path):
    store = PrefixStore(path.parent, "a model")
    cache = swa.RingCache.create(1, 2, CONFIG.geometry, CONFIG.fmt)
    name = store.save([1, 2], cache.export_slot(0, 2))
    name.unlink()
    path.rename(name)
    try:
        return store.longest([1, 2, 3])
    finally:
        name.rename(path)


READERS = {
    "a checkpoint": checkpoint.open_tensors,
    "parameters": checkpoint.load_params,
    "a configuration": swa.read_config,
    "a prefix": read_slot,
    "a benchmark": benchmark_lines.load,
    "a training state": lambda path: training_checkpoints.load_state(path, None, {}),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_pipe_or_device_is_refused_and_not_waited_for(tmp_path, read, monkeypatch):
    monkeypatch.setattr(training_checkpoints, "_leaves", lambda like: ({}, None))
    pipe, device = tmp_path / "pipe", tmp_path / "device"
    os.mkfifo(pipe)
    device.symlink_to("/dev/zero")
    for path in (pipe, device):
        with seconds(30):
            text = fault_text(lambda path=path: read(path))
        assert text.endswith(f": {REGULAR}")
        assert read is read_slot or text.startswith(str(path))


def test_a_pipe_in_a_directory_of_weights_is_none_of_its_files(tmp_path):
    directory = write_sharded(tmp_path / "model", {"a.safetensors": {"x": np.ones(2)}})
    (directory / "a.safetensors").unlink()
    os.mkfifo(directory / "a.safetensors")
    with seconds(30):
        assert fault_text(lambda: checkpoint.open_tensors(directory)).endswith("no a.safetensors")
    (directory / INDEX).unlink()
    os.mkfifo(directory / INDEX)
    with seconds(30), pytest.raises(FileNotFoundError, match="got neither"):
        checkpoint.open_tensors(directory)


@pytest.mark.parametrize(
    "read", [swa.read_config, checkpoint.load_params, benchmark_lines.load, read_slot]
)
def test_a_directory_in_the_place_of_a_file_is_an_os_error(tmp_path, read):
    path = tmp_path / "place"
    (path / "config.json").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        read(path)


def test_json_of_any_size_is_not_read(tmp_path):
    for name, read, most in (
        (INDEX, checkpoint.open_tensors, "32,000,000"),
        ("config.json", swa.read_config, "4,000,000"),
    ):
        path = tmp_path / name
        path.touch()
        os.truncate(path, 1 << 40)  # a terabyte without a block on the disk
        text = fault_text(lambda read=read: read(tmp_path))
        assert text == f"{path}: expected at most {most} bytes, got more"


# --- what lies elsewhere


@pytest.mark.parametrize("read", [swa.read_config, swa.read_attention])
def test_a_configuration_elsewhere_is_not_read_through_a_link(tmp_path, read):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    write_config(outside, CONFIG)
    assert read(outside)
    (inside / "config.json").symlink_to(outside / "config.json")
    text = fault_text(lambda: read(inside))
    assert text == f"{inside}: expected files of its own, got config.json, a link out of it"


def test_half_a_surrogate_pair_is_no_name_of_a_shard(tmp_path):
    (tmp_path / INDEX).write_text('{"weight_map": {"x": "\\ud800"}}')
    text = fault_text(lambda: checkpoint.open_tensors(tmp_path))
    assert text == f"{tmp_path / INDEX}: expected names of files beside it, got '\\ud800'"


# --- safetensors

SHAPES = {
    "65 axes": ([1] * 65, 4),
    "an axis past 64 bits, signed": ([0, 2**63], 0),
    "axes past the address space beside none": ([0, 2**40, 2**40], 0),
}


@pytest.mark.parametrize(("shape", "size"), SHAPES.values(), ids=SHAPES)
def test_a_shape_that_numpy_has_not_is_refused_by_file_and_tensor(tmp_path, shape, size):
    path = tmp_path / "file"
    path.write_bytes(file_bytes({"a": entry("F32", shape, 0, size)}, bytes(size)))
    opened = checkpoint.open_tensors(path)
    for read in (lambda: opened["a"], lambda: checkpoint.load_params(path)):
        assert fault_text(read).startswith(f"{path}: expected a shape that NumPy has, got a: ")


def test_a_header_longer_than_any_models_is_not_read(tmp_path):
    path = tmp_path / "file"
    path.write_bytes((32_000_001).to_bytes(8, "little"))
    os.truncate(path, 40_000_000)
    for read in (checkpoint.open_tensors, checkpoint.load_params):
        text = fault_text(lambda read=read: read(path))
        assert text.endswith("got a header of 32,000,001 bytes, more than 32,000,000")


@pytest.mark.parametrize("names", [("a", "a.b"), ("a.b", "a"), ("a.b.c", "a.b"), ("", ".")])
def test_no_tensor_takes_the_place_of_a_branch(tmp_path, names):
    path = write_file(tmp_path / "file", {name: np.ones(2) for name in names})
    text = fault_text(lambda: checkpoint.load_params(path))
    assert text.startswith(f"{path}: expected ")
    assert text.endswith("to lie in a tree, got two kinds of it")


def test_a_tree_as_deep_as_recursion_goes_is_refused(tmp_path):
    path = write_file(tmp_path / "file", {"a." * 100_000: np.ones(2)})
    text = fault_text(lambda: checkpoint.load_params(path))
    assert (
        text == f"{path}: expected a tree of at most 64 levels, got 100000 of them above a tensor"
    )
    deepest = write_file(tmp_path / "file", {"a." * 64: np.ones(2)})
    tree, _ = checkpoint.load_params(deepest)
    assert len(jax.tree.leaves(tree)) == 1


@pytest.mark.parametrize(
    ("kind", "value", "shown"),
    [("float32", np.nan, "nan"), ("float32", -0.5, "-0.5"), ("float32", np.inf, "inf"),
     ("e8m0", 255, "nan"), ("uint8", 255, "nan")],
)  # fmt: skip
def test_a_block_scale_that_no_quantiser_gives_is_refused(kind, value, shown):
    tensors, _ = block_scaled(attention_tensors(), 32, kind)
    name = "model.layers.3.self_attn.o_a_proj.weight_scale_inv"
    scales = tensors[name] if kind == "float32" else tensors[name].view(np.uint8)
    scales[1, 2] = value
    text = fault_text(lambda: checkpoint.load_attention(tensors, ATTENTION, 3))
    assert text == f"tensors: {name}: expected finite scales of 0 or more, got {shown}"
    scales[1, 2] = 0  # the scale of a block of zeros; of exponents the least
    loaded = checkpoint.load_attention(tensors, ATTENTION, 3)["params"]["o_a"]
    codes = np.asarray(tensors[name.removesuffix("_scale_inv")])[32:64, 64:96].view(np.uint8)
    finite = codes & 0x7F != 0x7F
    assert np.all(np.abs(np.asarray(loaded)[32:64, 64:96][finite]) <= 448 * 2.0**-127)


# --- JSON and configurations


@pytest.mark.parametrize("text", ["[" * 66 + "]" * 66, '{"a":' * 66 + "1" + "}" * 66])
def test_json_is_refused_long_before_pythons_own_recursion_ends(text):
    with pytest.raises(ValueError, match="JSON that is nested too deep"):
        parse_json(text)
    assert parse_json("[" * 65 + "]" * 65)


def test_a_request_of_any_depth_is_an_error_of_its_line():
    for depth in (1, 64, 65, *range(900, 1010, 3), 10_000):
        line = b'{"prompt": ' + b"[" * depth + b"]" * depth + b"}"
        requests, errors = batch_lines.read_lines(line)
        assert not requests
        assert errors[0]["error"] in (
            "JSON that is nested too deep",
            f"prompt: expected a string, got {'[' * depth}{']' * depth}",
            f"prompt: expected a string, got {'[' * 57}...",
        )


OWN = json.loads(CONFIG.to_json())
PUBLISHED = {
    "model_type": "deepseek_v41", "head_dim": 64, "hidden_size": 32, "num_attention_heads": 2,
    "num_hidden_layers": 1, "o_groups": 2, "o_lora_rank": 8, "q_lora_rank": 16,
    "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6, "sliding_window": 8, "vocab_size": 50,
    "intermediate_size": 48, "layer_types": ["sliding_attention"],
}  # fmt: skip


def own(**attention):
    return OWN | {"model_type": "swa_jax", "attention": OWN["attention"] | attention}


CONFIGURATIONS = {
    "a million layers": (own() | {"num_layers": 10**6}, "num_layers: expected at most 10000"),
    "wide rows": (
        own(head_dim=2**30, rope_dim=2**30, fmt=OWN["attention"]["fmt"] | {
            "quantized_elements": 2**30}),
        "head_dim: expected at most 65536, got 1073741824",
    ),
    "a list for a name": (
        own(fmt=OWN["attention"]["fmt"] | {"name": [1]}) | {"scan_layers": True},
        "name: expected a string, got [1]",
    ),
    "a text for a switch": (
        own(fmt=OWN["attention"]["fmt"] | {"scales_last": "no"}),
        "scales_last: expected True or False, got 'no'",
    ),
    "a number for an axis": (
        own(axis_names=OWN["attention"]["axis_names"] | {"embed": 7}),
        "embed: expected a string, got 7",
    ),
    "an epsilon of 0 in float32": (
        own(norm_eps=1e-50),
        "norm_eps: expected a number that float32 holds, from 1.18e-38 to 3.4e+38, got 1e-50",
    ),
    "an infinite epsilon in float32": (own(norm_eps=1e39), "norm_eps: expected a number that "),
    "a rotary factor": (
        PUBLISHED | {"head_dim": 1e308, "partial_rotary_factor": 100},
        "expected partial_rotary_factor from 0 to 1, got 100",
    ),
    "another rope": (
        PUBLISHED | {"rope_parameters": {"main": {"rope_theta": 1e4}, "compress": 5}},
        "expected rope scaling to be an object, got 5",
    ),
    "turns past float64": (
        PUBLISHED | {"rope_parameters": {"type": "yarn", "factor": 2, "beta_slow": 1e-320,
                                         "original_max_position_embeddings": 64}},
        "beta_slow: expected a number that float32 holds",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "text"), CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_a_configuration_that_takes_the_library_out_of_its_depth_is_refused(tmp_path, fields, text):
    path = tmp_path / "config.json"
    whole = own() if fields["model_type"] == "swa_jax" else PUBLISHED
    path.write_text(json.dumps(whole))
    assert swa.read_config(tmp_path).num_layers == whole.get("num_layers", 1)
    path.write_text(json.dumps(fields))
    with seconds(30):
        found = fault_text(lambda: swa.read_config(tmp_path))
    assert found.startswith(f"{path}: {text}")


def test_a_configuration_in_another_encoding_is_refused_by_name(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b'{"model_type": "\xe9"}')
    assert fault_text(lambda: swa.read_config(tmp_path)).startswith(f"{path}: expected JSON text, ")


# --- slots and prefixes


def slot_bytes(**changed):
    cache = swa.RingCache.create(1, 2, CONFIG.geometry, CONFIG.fmt)
    tensors, texts = read_safetensors(cache.export_slot(0, 20).to_bytes("a"))
    return write_safetensors(tensors, texts | changed)


@pytest.mark.parametrize("changed", [{"next_position": "21"}, {"capacity": "15"}])
def test_a_header_that_was_changed_is_noticed(changed):
    assert ExportedSlot.from_bytes(slot_bytes(), "a").next_position == 20
    text = fault_text(lambda: ExportedSlot.from_bytes(slot_bytes(**changed), "a"))
    assert text == "exported slot: expected rows and header of its sha256, got others"


def test_a_format_that_is_nested_too_deep_is_refused():
    for depth in (70, 100_000):
        text = fault_text(
            lambda depth=depth: ExportedSlot.from_bytes(slot_bytes(format="[" * depth), "a")
        )
        assert text.startswith("exported slot: expected another header, got ")


def test_tokens_of_another_dtype_are_others(tmp_path):
    store = PrefixStore(tmp_path, "a model")
    cache = swa.RingCache.create(1, 2, CONFIG.geometry, CONFIG.fmt)
    path = store.save([0, 0], cache.export_slot(0, 2))
    tensors, texts = read_safetensors(path.read_bytes())
    for dtype in (np.float32, ml_dtypes.float8_e8m0fnu, np.int64):
        others = tensors | {"tokens": tensors["tokens"].astype(dtype)}
        path.write_bytes(write_safetensors(others, texts))
        text = fault_text(lambda: store.longest([0, 0, 1]))
        assert text == f"{path}: expected the tokens that its name stands for, got others"


# --- files of the examples


def test_a_training_state_that_is_none_is_refused_by_name(tmp_path):
    path, ones = tmp_path / "state", np.ones(2, np.float32)
    state = training_checkpoints.TrainingState(3, {"a": ones}, {"b": ones}, [])
    training_checkpoints.save_state(path, state, {"run": "r"})
    assert training_checkpoints.load_state(path, state, {"run": "r"}).step == 3
    tensors, texts = read_safetensors(path.read_bytes())
    for data, text in (
        (b"abc", "expected a whole safetensors file"),
        (
            write_safetensors(tensors | {"params.a": np.ones(3, np.float32)}, texts),
            "expected the tensors of such a state, got others: ['params.a']",
        ),
        (write_safetensors({"params.a": ones}, texts), "expected the tensors of such a state"),
        (write_safetensors(tensors, {"run": "r"}), "expected a step and evaluations"),
        (write_safetensors(tensors, texts | {"step": "x"}), "expected a step and evaluations"),
    ):
        path.write_bytes(data)
        found = fault_text(lambda: training_checkpoints.load_state(path, state, {"run": "r"}))
        assert found.startswith(f"{path}: {text}")


HEADER = {"versions": {}, "machine": "m", "cores": 2}
TIMED = {"suite": "read", "case": "N=1", "program": "p", "ratio": {"median": 1.5}}
LINES = {
    "a median of 0": (TIMED | {"ratio": {"median": 0}}, "ratios and shares with a median above 0"),
    "a median that is none": (
        TIMED | {"ratio": {"median": float("nan")}},
        "ratios and shares with a median above 0",
    ),
    "an infinite share": (
        TIMED | {"share": {"product": {"median": float("inf")}}},
        "ratios and shares with a median above 0",
    ),
    "a list for a case": (TIMED | {"case": []}, "a string for case, got []"),
    "no suite": ({"case": "c", "program": "p"}, "a string for suite, got None"),
    "a text for a figure": (
        {"suite": "s", "figure": "f", "value": "1"},
        "a number for value, got '1'",
    ),
    "memory that is none": (
        TIMED | {"temporary_bytes": True},
        "a number for temporary_bytes, got True",
    ),
}


@pytest.mark.parametrize(("line", "text"), LINES.values(), ids=LINES)
def test_a_benchmark_with_lines_that_cannot_be_compared_is_refused_before_anything_is_timed(
    tmp_path, line, text
):
    path = tmp_path / "old.jsonl"
    path.write_text("\n".join(map(json.dumps, (HEADER, TIMED))))
    assert len(benchmark_lines.load(path)) == 2
    path.write_text("\n".join(map(json.dumps, (HEADER, TIMED, line))))
    found = fault_text(lambda: benchmark_lines.load(path))
    assert found.startswith(f"{path}: line 3: expected {text}")


def test_a_reference_with_nothing_to_compare_is_refused():
    config = attention_config(8, swa.V41)
    params, x = layer_params(config)["params"], activations(config, 1, 3)
    for want, shown in ((np.zeros_like(x), "0.0"), (x * np.nan, "nan"), (x * np.inf, "inf")):
        text = fault_text(lambda want=want: load_hf.difference(config, params, x, want))
        assert text == (f"reference.safetensors: expected outputs up to a finite size, got {shown}")
