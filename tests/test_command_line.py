"""python -m swa_jax doctor | size | trace: output, --json, and one clear line for bad arguments."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from quick_compilation import quick_environment

from swa_jax import RingCache, presets
from swa_jax.__main__ import main

ROOT = Path(__file__).parent.parent


def _python(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def _swa_jax(*arguments, **environment):
    return _python("-m", "swa_jax", *arguments, **environment)


def _refusal(capsys, *arguments):
    """Exit status, standard output and standard error of a call that ends in the parser."""
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    captured = capsys.readouterr()
    return exit_info.value.code, captured.out, captured.err


def _json(*arguments):
    result = _swa_jax(*arguments, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    return json.loads(result.stdout)


# --- doctor


@pytest.mark.makes_nan
def test_doctor_names_versions_devices_and_implementations():
    result = _swa_jax("doctor", **quick_environment())
    assert (result.returncode, result.stderr) == (0, "")
    words = [line.split() for line in result.stdout.splitlines()]
    assert ["jax", jax.__version__] in words
    assert {"python", "jaxlib", "flax", "device"} <= {line[0] for line in words}
    for operation in ("fused_store", "indexed_attention"):
        assert f"{operation}: implementation=None runs xla\n" in result.stdout
    for name in ("xla", "interpret"):
        assert [line[1:] for line in words if line[0] == name] == [["runs", "here"]] * 2
    assert result.stdout.count("'triton' runs on NVIDIA GPUs only") == 2


def test_doctor_reports_a_platform_that_does_not_start():
    result = _swa_jax("doctor", JAX_PLATFORMS="no_such_platform")
    assert result.returncode == 1
    assert "device      none:" in result.stdout
    assert "Traceback" not in result.stderr


# --- size


def test_size_of_one_request_with_the_default_rows():
    figures = _json("size", "--layers", "32", "--slots", "4")
    assert figures["row_bytes"] == 528
    assert (figures["window"], figures["capacity"]) == (128, 134)
    assert figures["ring"] == {
        "layer_bytes": 70_752,
        "request_bytes": 2_264_064,
        "total_bytes": 9_056_256,
    }
    assert figures["separate_kv_window"]["request_bytes"] == 16_777_216
    assert figures["separate_kv_full_context"] == {
        "layer_bytes": 16_777_216,
        "request_bytes": 536_870_912,
        "total_bytes": 2_147_483_648,
    }


def test_size_follows_its_options():
    figures = _json(
        *("size", "--layers", "2", "--slots", "3", "--window", "3", "--draft-tokens", "1"),
        *("--format", "V41", "--head-dim", "32", "--context", "100"),
    )
    assert figures["capacity"] == 5
    assert figures["ring"] == {"layer_bytes": 192, "request_bytes": 384, "total_bytes": 1152}
    assert figures["separate_kv_window"]["layer_bytes"] == 12_288  # 4096 B a token, 3 tokens
    assert figures["separate_kv_full_context"]["layer_bytes"] == 409_600


def test_size_takes_the_window_and_drafts_of_a_preset(capsys, monkeypatch):
    small = presets.v4_flash().replace_attention(window=64, draft_tokens=10)
    monkeypatch.setitem(presets.PRESETS, "v4-flash", lambda: small)
    assert main(["size", "--preset", "v4-flash", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["window"], figures["capacity"]) == (64, 75)
    assert figures["ring"]["request_bytes"] == RingCache.for_decoder(small, 1).nbytes
    assert main(["size", "--preset", "v4-flash", "--window", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["capacity"] == 19


@pytest.mark.parametrize(
    ("fmt", "row_bytes"), [("V4", 584), ("V32", 656), ("BF16", 1024), ("F32", 2048)]
)
def test_size_knows_the_formats(capsys, fmt, row_bytes):
    assert main(["size", "--format", fmt, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["row_bytes"] == row_bytes


def test_size_as_text(capsys):
    assert main(["size"]) == 0
    text = capsys.readouterr().out
    for figure in ("70,752 B", "2,264,064 B = 2.16 MiB", "536,870,912 B = 512 MiB", "237.13"):
        assert figure in text


# --- trace


def test_trace_of_state_two_across_the_ring_boundary():
    figures = _json("trace", "--window", "128", "--state-id", "2", "--positions", "127:134")
    assert figures["capacity"] == 134
    assert [entry["position"] for entry in figures["positions"]] == list(range(127, 135))
    assert figures["positions"][-1] == {
        "position": 134,
        "first_visible": 7,
        "last_visible": 134,
        "first_read_slot": 275,
        "last_read_slot": 268,
        "write_slot": 268,
    }
    assert figures["step"]["first_position"] == 127
    assert figures["step"]["overwritten_visible_rows"] == [0] * 6
    assert figures["step"]["safe_to_store_first"] is True


def test_trace_finds_the_rows_that_a_step_destroys():
    figures = _json(
        *("trace", "--window", "3", "--capacity", "5", "--positions", "4", "--tokens", "5")
    )
    assert figures["max_tokens_per_step"] == 3
    assert figures["step"]["safe_to_store_first"] is False
    assert figures["step"]["overwritten_visible_rows"] == [2, 1, 0, 0, 0]
    assert figures["step"]["hazards"] == [
        {"destroyed_position": 2, "overwriting_position": 7, "slot": 2, "queries": [4]},
        {"destroyed_position": 3, "overwriting_position": 8, "slot": 3, "queries": [4, 5]},
    ]


def test_trace_at_the_last_position():
    figures = _json("trace", "--positions", "2147483647")
    (entry,) = figures["positions"]
    assert (entry["first_read_slot"], entry["write_slot"]) == (56, 49)
    assert figures["step"]["tokens"] == 1  # the default step ends there


def test_trace_as_text():
    result = _swa_jax("trace", "--capacity", "128", "--state-id", "2", "--positions", "133:134")
    assert (result.returncode, result.stderr) == (0, "")
    for figure in ("6..133", "262 / 261", "NOT SAFE", "[5, 4, 3, 2, 1, 0]", "256 to 383"):
        assert figure in result.stdout


# --- all of them


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: command"),
        (["sizes"], "invalid choice: 'sizes'"),
        (["size", "--layers", "0"], "--layers: expected an integer from 1"),
        (["size", "--slots", "1.5"], "--slots: expected an integer from 1"),
        (["size", "--window", "99999999999"], "--window: expected an integer from 1"),
        (["size", "--format", "FP8"], "invalid choice: 'FP8'"),
        (["size", "--head-dim", "100"], "V41 expects a multiple of 32, got 100"),
        (["trace"], "required: --positions"),
        (["trace", "--positions", "9:5"], "--positions: expected A:B with A <= B"),
        (["trace", "--positions", "5:"], "--positions: expected an integer from 0"),
        (["trace", "--positions", "0:2147483648"], "--positions: expected an integer from 0"),
        (["trace", "--positions", "0:9999"], "at most 4096 positions"),
        (["trace", "--positions", "1", "--tokens", "5000"], "--tokens: expected at most 4096"),
        (
            ["trace", "--positions", "2147483647", "--tokens", "3"],
            "--tokens: expected at most 1 from position 2147483647, got 3",
        ),
        (["trace", "--positions", "1", "--capacity", "100"], "expected window (128) <= capacity"),
        (["trace", "--positions", "1", "--state-id", "99999999"], "--state-id: expected at most"),
        (["trace", "--positions", "1", "--capacity", "134", "--draft-tokens", "5"], "not allowed"),
    ],
)
def test_a_bad_argument_gives_one_line_and_status_2(capsys, arguments, message):
    status, output, error = _refusal(capsys, *arguments)
    assert (status, output) == (2, "")
    assert message in error
    assert len(error.splitlines()) == 1
    assert error.startswith("python -m swa_jax")


def test_a_bad_argument_ends_the_process_with_status_2():
    result = _swa_jax("size", "--layers", "x")
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["size"], ["trace", "--positions", "0:4095"]])
def test_a_reader_that_goes_away_is_status_1_and_no_traceback(monkeypatch, capsys, arguments):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        assert main(arguments) == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", [[], ["doctor"], ["size"], ["trace"]])
def test_help_is_given(capsys, command):
    status, output, _ = _refusal(capsys, *command, "--help")
    assert status == 0
    assert output.startswith("usage: python -m swa_jax")


@pytest.mark.parametrize("arguments", [["size"], ["trace", "--positions", "1"]])
def test_size_and_trace_do_without_flax(arguments):
    # a bare package in place of swa_jax: what its __init__ imports is not the commands' doing
    program = (
        "import sys, types; package = types.ModuleType('swa_jax'); package.__path__ = ['swa_jax']; "
        "sys.modules['swa_jax'] = package; from swa_jax.__main__ import main; "
        f"main({arguments!r}); sys.exit('flax' in sys.modules)"
    )
    assert _python("-c", program).returncode == 0
