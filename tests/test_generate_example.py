"""examples/generate.py with a tiny model: text, report, evaluation, and one line for bad input."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import byte_evaluation
import byte_model
import byte_text
import generate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import text_checkpoints
from quick_compilation import quick_environment
from small_models import attention_config, decoder_params

import swa_jax as swa
from swa_jax.recompute import Comparison, whole_sequence_logits
from swa_jax.sampling import sample

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


@pytest.mark.slow
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
    assert run(*arguments, "--top-k", "1")[3]["text"] == greedy["text"]
    assert run(*arguments, "--top-p", "1e-9")[3]["text"] == greedy["text"]


@pytest.mark.slow
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


@pytest.mark.slow
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
        (["--temperature", "0", "--top-k", "3"], "--top-k: needs --temperature above 0"),
        (["--temperature", "0", "--top-p", "1"], "--top-p: needs --temperature above 0"),
        (["--temperature", "0", "--seed", "0"], "--seed: needs --temperature above 0"),
        (["--rows", "0"], "argument --rows: expected 1 or more, got 0"),
        (["--rows", "3"], "argument --rows: needs --evaluate or --evaluate-held-out"),
        (["--evaluate", "empty", "--bytes", "200"], "--bytes: an evaluation generates nothing"),
        (["--evaluate", "empty", "--draft-tokens", "0"], "--draft-tokens: an evaluation generates"),
        (["--evaluate", "empty", "--quiet"], "--quiet: an evaluation shows no text"),
        (["--evaluate", "missing"], "No such file or directory: 'missing'"),
        (["--evaluate", "empty"], "empty: expected at least one byte, got an empty file"),
        (["--resume"], "argument --checkpoint: expected a directory to save in, got none"),
        (["--checkpoint-every", "5"], "argument --checkpoint: expected a directory to save in"),
        (
            ["--checkpoint", "new", "--checkpoint-every", "0"],
            "argument --checkpoint-every: expected 1 or more, got 0",
        ),
        (["--checkpoint", "new", "--evaluate", "empty"], "argument --checkpoint: expected a text"),
        (["--checkpoint", ".", "--bytes", "99"], "expected nothing but checkpoints, got ['"),
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


# --- checkpoints


TEXT = ("abc", "--bytes", "160", "--seed", "5")


def without_speed(report: dict) -> dict:
    return {name: value for name, value in report.items() if name != "tokens_per_second"}


@pytest.fixture
def interrupted(run, tmp_path, capsys, monkeypatch) -> Path:
    """The checkpoints of a text that was interrupted after its second one, at 101 bytes."""
    directory = tmp_path / "checkpoints"
    saves = []

    def save_and_stop(*arguments):
        save_state(*arguments)
        saves.append(arguments)
        if len(saves) == 2:
            raise KeyboardInterrupt

    save_state = text_checkpoints.save_state
    with monkeypatch.context() as patched:
        patched.setattr(text_checkpoints, "save_state", save_and_stop)
        with pytest.raises(KeyboardInterrupt):
            run(*TEXT, "--checkpoint", str(directory), "--checkpoint-every", "26")
    capsys.readouterr()
    return directory


@pytest.mark.slow
def test_a_text_that_goes_on_from_a_checkpoint_is_the_text_of_an_undisturbed_run(
    run, interrupted, tmp_path
):
    status, text, _, report = run(*TEXT)
    assert (status, report["bytes_generated"]) == (0, 160)
    # 26 bytes are two blocks of 25, after the byte that the prefill chooses
    assert {path.name for path in interrupted.iterdir()} == {"state_51", "state_101"}
    again = ("--checkpoint", str(interrupted), "--resume")
    for _ in range(2):  # nothing is saved once the text is complete
        status, out, err, found = run(*TEXT, *again)
        assert (status, out) == (0, text)
        assert without_speed(found) == without_speed(report)
        assert err.startswith(f"{interrupted}: going on after 101 bytes\n")
    saved = ("--checkpoint", str(tmp_path / "new" / "folder"), "--checkpoint-every", "1")
    status, out, err, found = run(*TEXT, *saved, "--resume")
    assert (status, out) == (0, text)
    assert without_speed(found) == without_speed(report)
    assert err.startswith(f"{saved[1]}: no checkpoint, starting anew\n")
    assert {path.name for path in Path(saved[1]).iterdir()} == {"state_126", "state_151"}


def test_a_checkpoint_of_another_text_is_refused_before_anything_is_written(
    run, interrupted, folder
):
    other = dict(tiny_params())
    other["head"] = 1.01 * other["head"]
    entry = {"config": CONFIG.to_json()}
    swa.checkpoint.save_params(folder / "other.safetensors", other, entry, dtype="bfloat16")
    changed = CONFIG.replace_attention(fmt=swa.BF16.with_width(64))
    swa.checkpoint.save_params(
        folder / "bf16.safetensors", tiny_params(), {"config": changed.to_json()}, dtype="bfloat16"
    )
    resume = ("--checkpoint", str(interrupted), "--resume")
    cases = [
        (("abd", *TEXT[1:], *resume), "state_101: expected settings.prompt '"),
        ((*TEXT, "--seed", "6", *resume), "state_101: expected settings.seed 6, got 5"),
        ((*TEXT, "--temperature", "1", *resume), "expected settings.temperature 1.0, got 0.7"),
        ((*TEXT, "--top-k", "3", *resume), "expected settings.top_k 3, got 0"),
        ((*TEXT, "--top-p", "0.5", *resume), "expected settings.top_p 0.5, got 1.0"),
        ((*TEXT, "--bytes", "161", *resume), "expected settings.bytes 161, got 160"),
        ((*TEXT, "--weights", "other.safetensors", *resume), "expected settings.model '"),
        ((*TEXT, "--weights", "bf16.safetensors", *resume), "format.name 'BF16', got 'V41'"),
        ((*TEXT, *resume[:2]), "expected no checkpoint yet, got one; --resume goes on"),
    ]
    manifest = interrupted / "state_101" / "arrays" / "manifest.ocdbt"
    for arguments, message in cases:
        status, out, err, report = run(*arguments)
        assert (status, out, report) == (2, "", None)
        assert err.startswith(f"generate.py: error: {interrupted}")
        assert message in err
        assert err.count("\n") == 1
    manifest.write_bytes(manifest.read_bytes()[:-1])
    status, out, err, report = run(*TEXT, *resume)
    assert (status, out, report) == (2, "", None)
    assert err == (
        f"generate.py: error: {interrupted}/state_101: expected a whole checkpoint of a decode "
        "state, got missing, other or changed files ['manifest.ocdbt']\n"
    )


@pytest.mark.slow
def test_killed_at_random_and_while_saving_a_text_still_becomes_that_of_an_undisturbed_run(
    run, folder, tmp_path
):
    arguments = ("abc", "--bytes", "400")
    status, text, _, report = run(*arguments)
    assert (status, report["bytes_generated"]) == (0, 400)
    directory, rng = tmp_path / "checkpoints", np.random.default_rng(0)
    settings = {
        **quick_environment(),  # as in this process
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    call = {"cwd": folder, "env": os.environ | settings}
    line = [sys.executable, ROOT / "examples" / "generate.py", "--weights", "tiny.safetensors"]
    line += [*arguments, "--report", "killed.json"]
    line += ["--checkpoint", directory, "--checkpoint-every", "25", "--resume"]
    before = 0
    for kill in ("while saving", "at random"):
        with subprocess.Popen(line, stdout=subprocess.DEVNULL, **call) as process:
            while (text_checkpoints.latest_step(directory) or 0) <= before:
                assert process.poll() is None
                time.sleep(0.005)
            if kill == "at random":
                time.sleep(rng.uniform(0, 0.1))
            else:
                while True:  # stopped, it cannot finish the save between the look and the kill
                    process.send_signal(signal.SIGSTOP)
                    time.sleep(0.005)
                    if list(directory.glob("*.partial/arrays*")):
                        break
                    process.send_signal(signal.SIGCONT)
                    time.sleep(0.005)
                    assert process.poll() is None
            process.kill()
        assert process.returncode == -signal.SIGKILL
        if kill == "while saving":
            assert list(directory.glob("*.partial/arrays*"))
        before = text_checkpoints.latest_step(directory)
    result = subprocess.run(line, capture_output=True, timeout=600, **call)
    assert result.returncode == 0, result.stderr
    assert result.stdout == text.encode()
    assert f"going on after {before} bytes" in result.stderr.decode()
    assert without_speed(json.loads((folder / "killed.json").read_text())) == without_speed(report)
    assert not list(directory.glob("*.partial"))


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
    assert result.stdout == byte_model.PROMPT + found["text"] + "\n"
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
