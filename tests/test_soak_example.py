"""examples/soak.py with a tiny model: a clean run, and a failure for each thing it looks for."""

import dataclasses
import json
import mmap

import byte_text
import jax
import numpy as np
import pytest
import soak
import soak_checks
from small_models import attention_config, decoder_params

import swa_jax as swa
from swa_jax import decoding, serving
from swa_jax.serving import Server

pytestmark = pytest.mark.quick_compilation

CONFIG = swa.DecoderConfig(byte_text.VOCAB_SIZE, 1, attention_config(16, swa.V41), mlp_size=48)
MODEL = swa.Decoder(CONFIG)
SIZES = soak.Sizes(slots=3, block_steps=4, chunk=8, prefill_lanes=2, max_stop_tokens=4)


def params() -> dict:
    """Of a model that prefers letters, some of which are stop tokens."""
    params = dict(decoder_params(CONFIG)["params"])
    head = np.array(params["head"])
    head[97:123] *= 5
    return {"params": params | {"head": head}}


PARAMS = params()
SECONDS_A_STEP = 0.1  # of a clock that counts how often it is asked


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(soak, "CATALOGUE", 6)
    monkeypatch.setattr(soak, "SAMPLES", 5)
    # the examples' own text changes with every edit, and with it who meets a stop token
    monkeypatch.setattr(soak, "read_texts", lambda: b"abcdefghijklmnopqrstuvwxyz" * 12)


def counting_clock():
    asked = iter(range(10**9))
    return lambda: SECONDS_A_STEP * next(asked)


def run(steps: int = 60) -> dict:
    minutes = steps * SECONDS_A_STEP / 60
    return soak.soak(
        MODEL, PARAMS, sizes=SIZES, minutes=minutes, seed=0, clock=counting_clock()
    )  # fmt: skip


def test_a_clean_run_compares_every_result_and_ends_with_status_0(tmp_path, capsys):
    weights, report = tmp_path / "tiny.safetensors", tmp_path / "report.json"
    swa.checkpoint.save_params(weights, PARAMS["params"], {"config": CONFIG.to_json()})
    arguments = ["--weights", str(weights), "--minutes", "0.3", "--seed", "10"]
    arguments += ["--report", str(report)]
    assert soak.main(arguments, sizes=SIZES, clock=counting_clock()) == 0
    found = json.loads(report.read_text())
    counts = found["counts"]
    assert (found["ok"], found["failures"], found["failed"]) == (True, [], 0)
    assert 0.3 <= found["minutes"] < 0.31
    assert counts["steps"] == 179
    assert counts["compared"] == counts["requests"] > 50
    assert counts["compared"] == counts["stop"] + counts["length"] + counts["cancelled"]
    assert min(counts["stop"], counts["length"], counts["cancelled"]) > 0
    assert 6 < counts["run alone"] < counts["requests"]
    assert counts["refused"] > 8
    assert counts["most at once"] > SIZES.slots
    assert found["programs after warm-up"] == 0
    assert len(found["samples"]) == 6
    assert found["memory"]["arrays"]["bound"] == 16384
    output = capsys.readouterr()
    assert output.out.endswith("all is well\n")
    assert output.err.count(" compared, 0 failures, 0 programs, ") == 5


def wrong_in_company(monkeypatch, change):
    """Changes what a block returns wherever two requests or more decode in it."""

    def decode_block(model, params, state, steps):
        company = int(np.sum(np.array(state.remaining) > 0)) > 1
        state, tokens = decoding.decode_block(model, params, state, steps)
        return change(state, tokens) if company else (state, tokens)

    monkeypatch.setattr(serving, "decode_block", decode_block)


def test_a_wrong_token_is_a_failure(monkeypatch):
    wrong_in_company(
        monkeypatch, lambda state, tokens: (state, np.where(tokens == -1, -1, tokens ^ 1))
    )
    found = run()
    assert not found["ok"]
    assert any("expected the tokens that it has alone" in line for line in found["failures"])


def test_a_wrong_byte_of_a_row_is_a_failure_though_the_tokens_are_right(monkeypatch):
    """A bit of every row of the second slot, which only company reaches, after its last block."""

    def change(state, tokens):
        if int(np.array(state.remaining)[1]) > 0:
            return state, tokens
        cache = state.cache
        blocks = tuple(block.at[1].set(block[1] ^ 1) for block in cache.blocks)
        cache = dataclasses.replace(cache, blocks=blocks)
        return dataclasses.replace(state, cache=cache), tokens

    wrong_in_company(monkeypatch, change)
    found = run()
    assert found["failures"]
    assert all(": expected the rows that it has alone" in line or "program" in line
               for line in found["failures"])  # fmt: skip
    assert any("rows" in line for line in found["failures"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda finished: finished[1:], "after the last request 1 are without a result"),
        (lambda finished: finished + finished[:1], "request 6: expected one result, got another"),
    ],
    ids=["lost", "doubled"],
)
def test_a_result_that_is_lost_or_doubled_is_a_failure(change, message, monkeypatch):
    run = soak.Soak(MODEL, PARAMS, SIZES, 0)
    run.warm_up()
    run._submit(run._catalogue[0])
    finished = []
    while not finished:
        finished = run._busy.step()
    monkeypatch.setattr(run._busy, "step", lambda: change(finished))
    assert run.failures == []
    for number, outcome in run._busy.step():
        run._compare(number, outcome)
    run.drain()
    assert run.failures[0] == message


@pytest.mark.parametrize("kept", ["arrays", "process"])
def test_memory_that_grows_is_a_failure(kept, monkeypatch):
    step, hoard = soak.Soak.step, []

    def leaky(self):
        step(self)
        if kept == "arrays":
            hoard.append(jax.device_put(np.zeros(256)))
        else:  # pages of its own: memory that was used before would not show
            hoard.append(mmap.mmap(-1, 2**20))
            hoard[-1].write(b"1" * 2**20)

    monkeypatch.setattr(soak.Soak, "step", leaky)
    (failure,) = run()["failures"]
    assert failure.startswith(f"{kept}: expected to grow by at most ")


def test_a_program_compiled_after_warm_up_is_a_failure(monkeypatch):
    step = soak.Soak.step

    def compiles(self):
        step(self)
        if self.counts["steps"] == 40:
            jax.jit(lambda x: x + 1)(np.float32(1))

    monkeypatch.setattr(soak.Soak, "step", compiles)
    assert run()["failures"] == ["expected no program after warm-up, got 1"]


@pytest.mark.parametrize(
    ("submit", "message"),
    [
        (lambda *_: None, "expected a refusal that names prompt, got none"),
        (lambda *_: int("x"), "expected a message about prompt, got: invalid literal for int()"),
    ],
)
def test_a_bad_request_that_is_not_refused_by_name_is_a_failure(submit, message, monkeypatch):
    run = soak.Soak(MODEL, PARAMS, SIZES, 0)
    monkeypatch.setattr(Server, "submit", submit)
    run._refuse(swa.Request([], 1), "prompt")
    assert [failure[: len(message)] for failure in run.failures] == [message]


def test_growth_is_the_slope_of_a_line_after_warm_up():
    times = [0.0, 60.0, 120.0, 180.0, 240.0, 300.0]
    values = [0, 1000, 1007, 1014, 1021, 1028]  # the first is in the first fifth
    growth = soak_checks.measure_growth(times, values, 28.0)
    assert (growth.first, growth.last, growth.bound) == (1000, 1028, 28.0)
    np.testing.assert_allclose([growth.per_minute, growth.growth], [7.0, 28.0], rtol=1e-12)
    later = soak_checks.measure_growth([0.0, 3600.0, 10800.0], [9, 10, 40], 10.0)
    np.testing.assert_allclose([later.growth, later.bound], [30.0, 20.0], rtol=1e-12)
    assert not later.ok


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "0"], "--minutes: expected above 0"),
        (["--minutes", "nan"], "--minutes: expected above 0"),
        (["--seed", "-1"], "--seed: expected 0 to"),
        (["--report", "nowhere/x.json"], "--report: expected a file in a folder"),
        (["--weights", "nowhere"], "soak.py: error:"),
    ],
)
def test_a_wrong_command_is_one_line_and_status_2(arguments, message, capsys):
    try:
        status = soak.main(arguments)
    except SystemExit as end:
        status = end.code
    assert status == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]
