"""examples/generate.py with a tiny model: text, report, evaluation, and one line for bad input."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import attention_config, decoder_params

import swa_jax as swa
from swa_jax.recompute import Comparison, whole_sequence_logits
from swa_jax.sampling import sample

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import byte_evaluation
import byte_text
import generate

pytestmark = pytest.mark.quick_compilation

ROOT = Path(__file__).parents[1]

# A ring of 22 rows of 66 bytes, filled up to 1,472 bytes, in each of two layers.
WINDOW, ROWS, ROW_BYTES, CACHE_BYTES = 16, 22, 66, 2944
CONFIG = swa.DecoderConfig(byte_text.VOCAB_SIZE, 2, attention_config(WINDOW, swa.V41), mlp_size=48)
LONG_TEXT = bytes(np.random.default_rng(1).integers(0, 256, 40, dtype=np.uint8))  # not UTF-8
SHIPPED = ROOT / "examples" / "data"


def tiny_params() -> dict:
    """Parameters under which an end of file is most unlikely."""
    params = dict(decoder_params(CONFIG)["params"])
    head = 3 * np.asarray(params["head"])
    head[byte_text.BOUNDARY] = 0
    return params | {"head": head}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Weights, texts, and files that are neither."""
    folder = tmp_path_factory.mktemp("generate")
    entry = {"config": CONFIG.to_json()}
    params = tiny_params()
    swa.checkpoint.save_params(folder / "tiny.safetensors", params, entry, dtype="bfloat16")
    whole = (folder / "tiny.safetensors").read_bytes()
    (folder / "truncated.safetensors").write_bytes(whole[:-100])
    (folder / "garbage.safetensors").write_bytes(np.random.default_rng(0).bytes(5000))
    (folder / "empty").touch()
    swa.checkpoint.save_params(folder / "no_config.safetensors", params)
    swa.checkpoint.save_params(
        folder / "bad_config.safetensors", params, {"config": '{"vocab_size": 257}'}
    )
    uniform = params | {"head": np.zeros_like(params["head"])}
    swa.checkpoint.save_params(folder / "uniform.safetensors", uniform, entry)
    other = params | {"head": params["head"][:-1]}
    swa.checkpoint.save_params(folder / "other_shape.safetensors", other, entry)
    (folder / "long.bin").write_bytes(LONG_TEXT)
    return folder


@pytest.fixture
def run(folder, capsys, monkeypatch):
    """Runs the command line in this process, in the folder and with its weights.

    Returns exit status, standard output, standard error and the report.
    """
    monkeypatch.chdir(folder)

    def call(*arguments):
        report = folder / "report.json"
        report.unlink(missing_ok=True)
        usual = ("--weights", "tiny.safetensors", "--report", "report.json")
        try:
            status = generate.main([*usual, *arguments])
        except SystemExit as end:
            status = end.code
        output = capsys.readouterr()
        written = json.loads(report.read_text()) if report.exists() else None
        return status, output.out, output.err, written

    return call


def command(*arguments) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, ROOT / "examples" / "generate.py", *arguments],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )


# --- text and report


def test_a_file_longer_than_the_window_is_continued_and_the_seed_sets_the_text(run):
    arguments = ("--file", "long.bin", "--bytes", "20")
    status, out, _, first = run(*arguments, "--quiet")
    assert (status, out) == (0, "")
    assert (first["bytes_generated"], first["equals_recompute"]) == (20, True)
    assert (first["rows_visible"], first["rows_allocated"]) == (WINDOW, ROWS)
    assert (first["layers"], first["row_bytes"]) == (2, ROW_BYTES)
    assert first["cache_bytes"] == CACHE_BYTES

    _, out, _, again = run(*arguments)
    assert out == (LONG_TEXT.decode("utf-8", "replace") + first["text"] + "\n")
    assert again["text"] == first["text"]
    assert run(*arguments, "--seed", "1")[3]["text"] != first["text"]
    greedy = run(*arguments, "--temperature", "0")[3]
    assert greedy["text"] != first["text"]
    assert run(*arguments, "--temperature", "0", "--seed", "1")[3]["text"] == greedy["text"]
    assert run(*arguments, "--top-k", "1")[3]["text"] == greedy["text"]
    assert run(*arguments, "--top-p", "1e-9")[3]["text"] == greedy["text"]


def test_a_short_prompt_fills_a_part_of_the_window(run):
    status, out, err, report = run("abc", "--bytes", "1")
    assert status == 0
    assert out == "abc" + report["text"] + "\n"
    assert report["rows_visible"] == 4  # the file's start and three bytes
    assert report["tokens_per_second"] is None
    assert err.startswith("\n1 bytes\n")


def test_an_end_of_file_before_the_first_byte_is_said_so(run):
    # Without scores all 257 tokens are equally likely: look for a seed that draws the last.
    seeds = np.arange(4000, dtype=np.uint32)
    keys = jax.vmap(jax.random.key)(seeds)
    drawn = jax.jit(sample)(
        jnp.zeros((len(seeds), byte_text.VOCAB_SIZE)),
        jnp.full(len(seeds), 4, jnp.int32),
        swa.Sampling.build(len(seeds), temperature=0.7, keys=keys),
    )
    seed = int(np.argmax(np.asarray(drawn) == byte_text.BOUNDARY))
    assert drawn[seed] == byte_text.BOUNDARY
    status, out, err, report = run("abc", "--weights", "uniform.safetensors", "--seed", str(seed))
    assert (status, out) == (0, "abc\n")
    assert (report["text"], report["bytes_generated"]) == ("", 0)
    assert report["equals_recompute"] is None
    assert "nothing was generated" in err


def test_tokens_that_differ_from_the_recompute_are_exit_status_one(run, monkeypatch):
    wrong = Comparison(False, 1, 0, 1, 0.5, 2.0)
    monkeypatch.setattr(swa, "compare_with_recompute", lambda *arguments: wrong)
    status, _, err, report = run("abc", "--bytes", "1")
    assert status == 1
    assert (report["equals_recompute"], report["differing"]) == (False, 1)
    assert "the tokens DIFFER from those of a full recompute" in err


# --- evaluation


def test_evaluation_of_a_file_agrees_with_its_uncut_text(run, folder, monkeypatch):
    text = (ROOT / "examples" / "byte_text.py").read_bytes()[:300]
    (folder / "text.py").write_bytes(text)
    monkeypatch.setattr(byte_evaluation, "WINDOWS", (32,))
    monkeypatch.setattr(byte_evaluation, "FORMATS", (swa.F32, swa.V41))
    monkeypatch.setattr(byte_evaluation, "SCORED_PER_ROW", 256)
    status, out, _, results = run("--evaluate", "text.py")
    assert status == 0
    assert list(results) == ["window 32, F32", "window 32, V41"]
    for line in results.values():
        assert line["bytes"] == len(text)
        assert line["ring_bits_per_byte"] == pytest.approx(
            line["recompute_bits_per_byte"], abs=1e-3
        )
    exact, v41 = results.values()
    assert exact["largest_logit_difference"] < 1e-4
    assert exact["largest_logit_difference_to_f32"] == 0
    assert 1e-3 < v41["largest_logit_difference_to_f32"] < 2

    attention = attention_config(32, swa.F32)
    config = swa.DecoderConfig(byte_text.VOCAB_SIZE, 2, attention, mlp_size=48)
    model, (params, _) = (
        swa.Decoder(config),
        swa.checkpoint.load_params(folder / "tiny.safetensors"),
    )
    variables = {"params": jax.tree.map(lambda leaf: leaf.astype(np.float32), params)}
    tokens = np.array([byte_text.BOUNDARY, *text], np.int32)
    logits = whole_sequence_logits(model, variables, tokens[None, :-1])[0]
    chosen = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(text)), tokens[1:]]
    bits = -chosen.sum(dtype=np.float64) / math.log(2) / len(text)
    assert exact["recompute_bits_per_byte"] == pytest.approx(bits, abs=1e-4)

    table = out.splitlines()
    assert table[0] == "300 bytes"
    assert [line.split()[:2] for line in table[3:]] == [["32", "F32"], ["32", "V41"]]


# --- refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "prompt: expected at least one byte, got none"),
        (["--file", "empty"], "empty: expected at least one byte, got an empty file"),
        (["--file", "missing"], "No such file or directory: 'missing'"),
        (["--file", "."], "Is a directory"),
        (["text", "--file", "long.bin"], "expected one of PROMPT, --file, --evaluate and"),
        (["--weights", "missing"], "No such file or directory: 'missing'"),
        (["--weights", "."], "Is a directory"),
        (["--weights", "empty"], "empty: expected a whole safetensors file"),
        (["--weights", "truncated.safetensors"], "expected a whole safetensors file"),
        (["--weights", "garbage.safetensors"], "expected a whole safetensors file"),
        (["--weights", "no_config.safetensors"], "expected a header entry 'config', got []"),
        (
            ["--weights", "bad_config.safetensors"],
            "bad_config.safetensors: header entry 'config': DecoderConfig: unknown fields [], ",
        ),
        (["--weights", "other_shape.safetensors"], "expected other tensors"),
        (["--temperature", "-1"], "temperature: expected numbers from 0 to inf, got -1.0"),
        (["--temperature", "nan"], "temperature: expected numbers from 0 to inf, got nan"),
        (["--temperature", "warm"], "argument --temperature: invalid float value: 'warm'"),
        (["--top-p", "0"], "top_p: expected numbers from"),
        (["--top-k", "-1"], "top_k: expected 0 or more, got [-1]"),
        (["--bytes", "0"], "argument --bytes: expected 1 to 2147483647, got 0"),
        (["--bytes", "2147483648"], "argument --bytes: expected 1 to 2147483647, got 2147483648"),
        (["--seed", "-1"], "argument --seed: expected 0 to 4294967295, got -1"),
        (["--seed", "18446744073709551616"], "argument --seed: expected 0 to 4294967295"),
        (["--rows", "0"], "argument --rows: expected 1 or more, got 0"),
        (["--evaluate", "missing"], "No such file or directory: 'missing'"),
        (["--evaluate", "empty"], "empty: expected at least one byte, got an empty file"),
        (["--unknown"], "unrecognized arguments: --unknown"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_status_two(run, arguments, message):
    status, out, err, report = run(*arguments)
    assert (status, out, report) == (2, "", None)
    assert err.startswith("generate.py: error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert message in err


def test_a_report_that_cannot_be_written_is_one_line(run):
    status, _, err, _ = run("abc", "--bytes", "1", "--report", "missing/report.json")
    assert status == 2
    assert err == (
        "generate.py: error: argument --report: expected a file in a folder, got "
        "missing/report.json\n"
    )


def test_the_command_shows_no_traceback(folder):
    result = command("--weights", folder / "truncated.safetensors")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("generate.py: error: ")
    assert result.stderr.count("\n") == 1


# --- the shipped model


def test_shipped_model_is_what_its_description_says():
    description = json.loads((SHIPPED / "bytes.json").read_text())
    weights = SHIPPED / "bytes.safetensors"
    assert description["file_bytes"] == weights.stat().st_size <= 5_000_000
    assert description["held_out"]["bits_per_byte"] <= 1.55
    params, metadata = swa.checkpoint.load_params(weights)
    assert json.loads(metadata["config"]) == description["model"]
    assert description["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(params))
    config = swa.DecoderConfig.from_json(metadata["config"])
    assert description["held_out"]["window"] == config.geometry.window
    assert description["held_out"]["row_bytes"] == config.fmt.row_bytes


@pytest.mark.slow
def test_shipped_model_continues_the_default_prompt_with_the_tokens_of_the_recompute(tmp_path):
    report = tmp_path / "report.json"
    result = command("--report", report)
    assert result.returncode == 0, result.stderr
    found = json.loads(report.read_text())
    assert result.stdout == generate.PROMPT + found["text"] + "\n"
    assert (found["equals_recompute"], found["differing"]) == (True, 0)
    assert 0 < found["bytes_generated"] <= 200
    assert found["tokens_per_second"] > 0
    assert 0 <= found["largest_logit_difference"] <= 3e-2 * found["largest_logit"]
    assert (found["rows_visible"], found["rows_allocated"]) == (128, 134)
    assert (found["layers"], found["row_bytes"]) == (4, 528)
    assert found["cache_bytes"] == 4 * 134 * 528
    size, cache, verdict = result.stderr.strip().splitlines()
    assert size.startswith(f"{found['bytes_generated']} bytes, ")
    assert cache == "cache 283,008 bytes: 4 layers of 134 rows of 528 bytes, 128 of them visible"
    assert verdict.startswith("the tokens equal those of a full recompute without a cache: ")
