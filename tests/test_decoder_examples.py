"""examples/speculative_decode.py and long_decode.py with a tiny model: figures and refusals."""

import json
from pathlib import Path

import byte_text
import long_decode
import numpy as np
import pytest
import speculative_decode
from small_models import attention_config, decoder_params

import swa_jax as swa

pytestmark = pytest.mark.quick_compilation

CONFIG = swa.DecoderConfig(byte_text.VOCAB_SIZE, 2, attention_config(16, swa.V41), mlp_size=48)


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    params = dict(decoder_params(CONFIG)["params"])
    head = 3 * np.array(params["head"])
    head[byte_text.BOUNDARY] = 0  # an end of file would end the decode early
    swa.checkpoint.save_params(path, params | {"head": head}, {"config": CONFIG.to_json()})
    return path


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["ngram", "layers:2"])
def test_drafts_are_measured_beside_plain_decoding_of_the_same_tokens(
    drafter, weights, tmp_path, capsys
):
    report = tmp_path / "report.json"
    arguments = ["abcabcabcabc", "--bytes", "24", "--drafts", "2", "--rounds", "1"]
    arguments += ["--drafter", drafter, "--weights", str(weights), "--report", str(report)]
    assert speculative_decode.main(arguments) == 0
    [result] = json.loads(report.read_text())["results"]
    assert result["equal"]
    assert result["break_even"] == max(result["step_cost"] - 1, 0)
    assert 0 <= result["accepted_per_step"] <= result["drafted_per_step"] <= 2
    if drafter == "layers:2":  # the whole model drafts for itself: three tokens a step, 23 in all
        assert result["drafted_per_step"] == pytest.approx(15 / 8)
        assert result["accepted_per_step"] == pytest.approx(15 / 8)
    assert "equal, " in capsys.readouterr().out


def test_a_thousand_steps_are_one_program_and_take_no_more_memory(weights, tmp_path, capsys):
    report, picture = tmp_path / "report.json", tmp_path / "steps.png"
    arguments = ["--tokens", "1000", "--weights", str(weights)]
    assert long_decode.main([*arguments, "--report", str(report), "--plot", str(picture)]) == 0
    stretches = json.loads(report.read_text())
    assert len(stretches) == 10
    assert {stretch["programs"] for stretch in stretches} == {1}
    assert len({stretch["array_bytes"] for stretch in stretches}) == 1
    first = [stretch["first"] for stretch in stretches]
    assert np.diff(first).tolist() == [100] * 9
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "last step time by first" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("example", "arguments", "message"),
    [
        (speculative_decode, [""], "prompt: expected at least one byte, got none"),
        (speculative_decode, ["--drafts", "7"], "draft_tokens: expected 0 to 6"),
        (speculative_decode, ["--drafts", "0"], "--drafts: expected numbers from 1"),
        (speculative_decode, ["--drafter", "layers:3"], "expected layers:1 to layers:2"),
        (speculative_decode, ["--drafter", "nowhere"], "No such file"),
        (speculative_decode, ["--bytes", "1"], "--bytes: expected 2 to"),
        (long_decode, ["--tokens", "0"], "--tokens: expected 1 to"),
        (long_decode, ["--plot", "nowhere/x.png"], "--plot: expected a file in a folder"),
        (long_decode, ["--plot", "x.nope"], "--plot: expected a name in .png, .svg, .pdf, got x"),
    ],
)
def test_bad_input_is_one_line(example, arguments, message, weights, capsys):
    try:
        status = example.main([*arguments, "--weights", str(weights)])
    except SystemExit as stop:
        status = stop.code
    error = capsys.readouterr().err
    assert status == 2
    assert message in error
    assert len(error.splitlines()) == 1
