"""examples/batch_decode.py with a tiny model: a result for each line, whatever the line holds."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import batch_decode
import batch_lines
import byte_model
import byte_text
import jax
import numpy as np
import pytest
from small_models import attention_config, decoder_params

import swa_jax as swa
from swa_jax.requests import Request, Result
from swa_jax.serving import Server, serve

pytestmark = pytest.mark.quick_compilation

ROOT = Path(__file__).parents[1]
CONFIG = swa.DecoderConfig(byte_text.VOCAB_SIZE, 1, attention_config(16, swa.V41), mlp_size=48)
BLOCK = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the weights of a model that writes ASCII and, by itself, no end of file."""
    folder = tmp_path_factory.mktemp("batch")
    params = dict(decoder_params(CONFIG)["params"])
    head = 3 * np.asarray(params["head"])
    head[128:] = 0  # unlikely, and never the likeliest
    swa.checkpoint.save_params(
        folder / "tiny.safetensors", params | {"head": head}, {"config": CONFIG.to_json()}
    )
    return folder


@pytest.fixture
def run(folder, tmp_path, capsys, monkeypatch, give_stdin):
    """Runs the command line in this process on lines of a file.

    Returns exit status, results, standard error and the report.
    """

    def call(lines, *arguments):
        (tmp_path / "requests.jsonl").write_bytes(as_bytes(lines))
        report = tmp_path / "report.json"
        report.unlink(missing_ok=True)
        usual = ("--weights", folder / "tiny.safetensors", "--report", report)
        shapes = ("--block-steps", BLOCK, "--chunk", "8")
        if "--sweep" not in arguments:
            shapes = ("--slots", "2", *shapes)
        try:
            status = batch_decode.main(list(map(str, (*usual, *shapes, *arguments))))
        except SystemExit as end:
            status = end.code
        output = capsys.readouterr()
        results = [json.loads(line) for line in output.out.splitlines()]
        written = json.loads(report.read_text()) if report.exists() else None
        return status, results, output.err, written

    monkeypatch.chdir(tmp_path)
    return lambda lines, *arguments: call(lines, "requests.jsonl", *arguments)


def as_bytes(lines) -> bytes:
    return b"".join(
        (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines
    )


def by_line(results) -> dict[int, dict]:
    numbers = [result["line"] for result in results]
    assert len(set(numbers)) == len(numbers), "one result for a line"
    return {result["line"]: result for result in results}


@pytest.fixture
def give_stdin(monkeypatch):
    """Puts a file in the place of standard input."""
    with contextlib.ExitStack() as stack:
        yield lambda path: monkeypatch.setattr(sys, "stdin", stack.enter_context(open(path)))


# --- results


def test_each_request_gets_the_text_that_it_gets_from_a_server_alone(run, folder):
    lines = [
        {"prompt": "a" * 50, "max_tokens": 20},
        {"prompt": "Zeile\n", "max_tokens": 9, "temperature": 0.7, "seed": 3, "id": "mine"},
        {"prompt": "Straße", "max_tokens": 12, "temperature": 0.7, "top_k": 5, "top_p": 0.9},
        {"prompt": "x", "max_tokens": 1, "id": 7},
    ]
    status, results, _, report = run(lines)
    assert status == 0
    found = by_line(results)
    assert [found[line]["id"] for line in (1, 2, 3, 4)] == [1, "mine", 3, 7]
    model, variables = byte_model.load_model(folder / "tiny.safetensors")
    for number, line in enumerate(lines, 1):
        request = Request(
            [256, *line["prompt"].encode()],
            line["max_tokens"],
            swa.Sampling.build(
                1,
                temperature=line.get("temperature", 0),
                top_k=line.get("top_k", 0),
                top_p=line.get("top_p", 1),
                keys=jax.random.key(line.get("seed", 0))[None],
            ),
        )
        shapes = {"slots": 2, "block_steps": BLOCK, "chunk": 8, "max_stop_tokens": 8}
        (alone,) = serve(model, variables, [request], **shapes)
        result = found[number]
        assert result["text"] == bytes(alone.tokens).decode()
        assert (result["tokens"], result["finish_reason"]) == (line["max_tokens"], "length")
        assert len(result["text"]) == line["max_tokens"]
        assert result["time_to_first_token"] > 0
    (figures,) = report["runs"]
    assert (report["errors"], figures["slots"], figures["requests"]) == (0, 2, 4)
    assert (figures["tokens"], figures["cancelled"]) == (42, 0)
    for name in ("time_to_first_token", "time_between_tokens"):
        assert 0 < figures[name]["median"] <= figures[name]["percentile_95"]
    assert figures["tokens_per_second"] == pytest.approx(42 / figures["seconds"])


def test_results_come_in_the_order_in_which_requests_finish_and_go_to_the_named_file(run, tmp_path):
    limits = [30, 2, 10]
    lines = [{"prompt": "ab", "max_tokens": limit} for limit in limits]
    (tmp_path / "victim").write_text("left alone")
    (tmp_path / "out.jsonl").symlink_to("victim")
    status, results, err, _ = run(lines, "--out", "out.jsonl")
    assert (status, results) == (0, [])
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [result["line"] for result in written] == [2, 3, 1]
    assert (tmp_path / "victim").read_text() == "left alone"
    assert err.splitlines()[-1].split()[:3] == ["2", "3", "42"]


def test_a_stop_byte_ends_a_text_and_is_not_part_of_it(run):
    request = {"prompt": "abc", "max_tokens": 20}
    (free,) = run([request])[1]
    stop = free["text"][10]
    first = free["text"].index(stop)
    lines = [request | {"stop": stop}, request | {"stop": [free["text"][0], stop]}]
    status, results, _, _ = run(lines)
    assert status == 0
    found = by_line(results)
    assert found[1]["text"] == free["text"][:first]
    assert (found[2]["text"], found[2]["tokens"]) == ("", 0)
    assert found[2]["time_to_first_token"] is None
    assert {result["finish_reason"] for result in results} == {"stop"}


# --- lines that are no requests

GOOD = {"prompt": "a", "max_tokens": 2}
BAD_LINES = {
    b"nope": "Expecting value: line 1 column 1 (char 0)",
    b"\xff": "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
    b"[]": "RequestLine: expected an object, got list",
    b'{"prompt": "a", "prompt": "b"}': "'prompt' twice",
    b"[" * 100_000: "JSON that is nested too deep",
    b"{}": "RequestLine: unknown fields [], missing fields ['prompt']",
    b'{"prompt": "a", "n": 1}': "RequestLine: unknown fields ['n'], missing fields []",
    b'{"prompt": 1}': "prompt: expected a string, got 1",
    b'{"prompt": ""}': "prompt: expected at least one character, got none",
    b'{"prompt": "\\ud800"}': "prompt: expected text that UTF-8 can hold, got half a pair",
    b'{"prompt": "a", "max_tokens": 0}': (
        "max_tokens: expected an integer from 1 to 2147483645, got 0"
    ),
    b'{"prompt": "a", "max_tokens": 2147483647}': (
        "max_tokens: expected an integer from 1 to 2147483645, got 2147483647"
    ),
    b'{"prompt": "a", "max_tokens": true}': (
        "max_tokens: expected an integer from 1 to 2147483645, got true"
    ),
    b'{"prompt": "a", "max_tokens": 2.0}': (
        "max_tokens: expected an integer from 1 to 2147483645, got 2.0"
    ),
    b'{"prompt": "a", "temperature": -1}': (
        "temperature: expected a number from 0 to 3.40282e+38, got -1"
    ),
    b'{"prompt": "a", "temperature": NaN}': (
        "temperature: expected a number from 0 to 3.40282e+38, got NaN"
    ),
    b'{"prompt": "a", "temperature": "hot"}': (
        'temperature: expected a number from 0 to 3.40282e+38, got "hot"'
    ),
    b'{"prompt": "a", "top_k": -1}': "top_k: expected an integer from 0 to 2147483647, got -1",
    b'{"prompt": "a", "top_p": 0}': "top_p: expected a number from 1.17549e-38 to 1, got 0",
    b'{"prompt": "a", "top_p": 1.5}': "top_p: expected a number from 1.17549e-38 to 1, got 1.5",
    b'{"prompt": "a", "seed": 4294967296}': (
        "seed: expected an integer from 0 to 4294967295, got 4294967296"
    ),
    b'{"prompt": "a", "id": 1.5}': "id: expected a string or an integer, got 1.5",
    b'{"prompt": "a", "stop": "ab"}': (
        'stop: expected a string of one ASCII character, or up to 7 of them, got "ab"'
    ),
    b'{"prompt": "a", "stop": ["a", 1]}': (
        'stop: expected a string of one ASCII character, or up to 7 of them, got ["a", 1]'
    ),
    b'{"prompt": "a", "stop": "\\u00e9"}': (
        'stop: expected a string of one ASCII character, or up to 7 of them, got "\\u00e9"'
    ),
    b'{"prompt": "a", "stop": ["1", "2", "3", "4", "5", "6", "7", "8"]}': (
        "stop: expected a string of one ASCII character, or up to 7 of them, got "
        '["1", "2", "3", "4", "5", "6", "7", "8"]'
    ),
}


def test_a_line_that_is_no_request_gets_an_error_and_the_others_go_on(run):
    lines = [GOOD, *BAD_LINES, b"", b"  ", b'{"prompt": "a", "id": "x", "seed": -1}', GOOD]
    status, results, err, report = run(lines)
    assert status == 1
    found = by_line(results)
    last = len(lines)
    for number, message in enumerate(BAD_LINES.values(), 2):
        result = found.pop(number)
        assert (result["finish_reason"], result["error"]) == ("error", message)
        assert set(result) == {"id", "line", "finish_reason", "error"}
    assert found.pop(last - 1)["id"] == "x"
    assert sorted(found) == [1, last], "blank lines are passed over"
    assert found[1]["text"] == found[last]["text"]
    assert report["errors"] == len(BAD_LINES) + 1
    assert f"{len(BAD_LINES) + 1} lines were no requests" in err


def test_an_empty_file_has_no_results(run):
    status, results, err, report = run([])
    assert (status, results) == (0, [])
    (figures,) = report["runs"]
    assert (report["errors"], figures["requests"], figures["tokens"]) == (0, 0, 0)
    assert figures["tokens_per_second"] is None
    assert figures["time_to_first_token"] is None
    assert figures["time_between_tokens"] is None
    assert err.splitlines()[-1].split() == ["2", "0", "0", *"-----"]


# --- where requests come from


@pytest.mark.parametrize("argument", [("-",), ()])
def test_requests_come_from_standard_input(
    run, folder, tmp_path, capsys, monkeypatch, give_stdin, argument
):
    (tmp_path / "piped").write_bytes(as_bytes([GOOD | {"id": "piped"}]))
    give_stdin(tmp_path / "piped")
    monkeypatch.setattr(batch_decode, "SAMPLE", tmp_path / "missing")
    shapes = ["--slots", "2", "--block-steps", str(BLOCK), "--chunk", "8"]
    assert (
        batch_decode.main([*argument, "--weights", str(folder / "tiny.safetensors"), *shapes]) == 0
    )
    output = capsys.readouterr()
    assert json.loads(output.out)["id"] == "piped"
    assert ("reading requests from standard input" in output.err) == (argument == ())


def test_without_an_argument_and_a_pipe_the_sample_is_taken(
    folder, tmp_path, capsys, monkeypatch, give_stdin
):
    give_stdin(os.devnull)
    sample = tmp_path / "sample"
    sample.write_bytes(as_bytes([GOOD | {"id": "sample"}]))
    monkeypatch.setattr(batch_decode, "SAMPLE", sample)
    shapes = ["--slots", "2", "--block-steps", str(BLOCK), "--chunk", "8"]
    assert batch_decode.main(["--weights", str(folder / "tiny.safetensors"), *shapes]) == 0
    assert json.loads(capsys.readouterr().out)["id"] == "sample"


def test_the_sample_holds_requests_only():
    requests, errors = batch_lines.read_lines(batch_decode.SAMPLE.read_bytes())
    assert errors == []
    assert 8 <= len(requests) <= 12
    assert max(len(request.prompt) for request in requests) > 2 * 128


# --- interruption


def test_an_interruption_ends_all_requests_with_the_text_they_have(run, monkeypatch):
    whole = by_line(run([{"prompt": "a", "max_tokens": 60}])[1])[1]["text"]
    step, steps = Server.step, []

    def interrupted(server):
        if server.pending == 2 and server.tokens_chosen > 20:
            steps.append(server.tokens_chosen)
            signal.raise_signal(signal.SIGINT)
        return step(server)

    monkeypatch.setattr(Server, "step", interrupted)
    before = signal.getsignal(signal.SIGINT)
    lines = [b"nope", {"prompt": "a", "max_tokens": 10**6}, GOOD, {"prompt": "b" * 40, "id": "w"}]
    lines += [{"prompt": "a", "max_tokens": 10**6}]
    status, results, err, report = run(lines)
    assert status == 130
    assert len(steps) == 1, "the step in flight was the last"
    found = by_line(results)
    assert [found[line]["finish_reason"] for line in (1, 3, 4)] == ["error", "length", "length"]
    for line in (2, 5):
        assert found[line]["finish_reason"] == "cancelled"
        assert found[line]["tokens"] == len(found[line]["text"])
    assert found[2]["tokens"] > 0
    assert found[2]["text"].startswith(whole[:20])
    assert report["runs"][0]["cancelled"] == 2
    assert "Traceback" not in err
    assert signal.getsignal(signal.SIGINT) is before


def command(folder, *arguments) -> list:
    script = ROOT / "examples" / "batch_decode.py"
    return [sys.executable, script, "--weights", folder / "tiny.safetensors", *arguments]


def environment() -> dict:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path}


@pytest.mark.slow
def test_ctrl_c_exits_with_130_and_a_result_for_each_line(folder):
    lines = [{"prompt": "a", "max_tokens": 10**7}, GOOD, {"prompt": "a", "max_tokens": 10**7}]
    with subprocess.Popen(
        command(folder, "-"),
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        process.stdin.write(as_bytes(lines))
        process.stdin.close()
        first = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        rest = [json.loads(line) for line in process.stdout]
        err = process.stderr.read().decode()
        assert process.wait(60) == 130
    assert (first["line"], first["finish_reason"]) == (2, "length")
    assert [(result["line"], result["finish_reason"]) for result in rest] == [
        (1, "cancelled"), (3, "cancelled"),
    ]  # fmt: skip
    assert all(result["tokens"] > 0 for result in rest)
    assert "Traceback" not in err


def test_a_reader_that_goes_away_is_exit_status_one_and_no_traceback(run, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        status, _, err, _ = run([GOOD, GOOD])
    assert (status, err) == (1, "")


# --- figures


def test_a_sweep_has_a_row_for_each_number_of_slots_and_no_results(run, monkeypatch):
    pools = []

    class Recorded(Server):
        def __init__(self, *arguments, slots, **options):
            pools.append(slots)
            super().__init__(*arguments, slots=2, **options)  # of compiled shapes

    monkeypatch.setattr(batch_decode, "Server", Recorded)
    status, results, err, report = run([GOOD, b"nope", GOOD], "--sweep", "1,4")
    assert status == 1
    assert [result["line"] for result in results] == [2]
    assert pools == [1, 1, 4, 4]  # the first of each compiles
    assert [figures["slots"] for figures in report["runs"]] == [1, 4]
    assert [figures["tokens"] for figures in report["runs"]] == [4, 4]
    rows = [line.split() for line in err.splitlines()[-3:-1]]
    assert [row[:3] for row in rows] == [["1", "2", "4"], ["4", "2", "4"]]


def test_figures_are_medians_and_95th_percentiles_in_seconds():
    def result(first: float, *blocks: tuple[float, int]) -> Result:
        reads = ((first, 1), *blocks)
        tokens = (7,) * sum(count for _, count in reads)
        return Result(Request([1], len(tokens)), tokens, "length", 100.0, reads)

    # gaps of 1 s nineteen times, and one of 21 s
    results = [result(104.0, (114.0, 10), (123.0, 9)), result(100.0, (121.0, 1)), result(102.0)]
    figures = batch_decode.summarise(results, 4.0, 8)
    assert figures["time_to_first_token"] == pytest.approx({"median": 2, "percentile_95": 3.8})
    assert figures["time_between_tokens"] == pytest.approx({"median": 1, "percentile_95": 2})
    assert (figures["tokens"], figures["tokens_per_second"]) == (23, 5.75)


@pytest.mark.slow
def test_the_shipped_model_serves_the_sample(tmp_path):
    report = tmp_path / "report.json"
    script = ROOT / "examples" / "batch_decode.py"
    result = subprocess.run(
        [sys.executable, script, "--report", report],
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    results = [json.loads(line) for line in result.stdout.splitlines()]
    assert sorted(by_line(results)) == list(range(1, len(results) + 1))
    assert {result["finish_reason"] for result in results} == {"stop", "length"}
    (figures,) = json.loads(report.read_text())["runs"]
    assert figures["requests"] == len(results)
    assert figures["tokens"] == sum(result["tokens"] for result in results) > 300


# --- refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slots", "0"], "argument --slots: expected 1 to 4096, got 0"),
        (["--slots", "two"], "argument --slots: expected 1 to 4096, got two"),
        (["--slots", "99999999999"], "argument --slots: expected 1 to 4096, got 99999999999"),
        (["--sweep", "1,,2"], "argument --sweep: expected 1 to 4096, got nothing"),
        (["--sweep", "1,4097"], "argument --sweep: expected 1 to 4096, got 4097"),
        (["--sweep", "2,02"], "argument --sweep: expected each number once, got '2,02'"),
        (["--sweep", "2", "--slots", "8"], "argument --slots: --sweep has its own"),
        (["--chunk", "-8"], "argument --chunk: expected 1 to 65536, got -8"),
        (["--chunk", "65537"], "argument --chunk: expected 1 to 65536, got 65537"),
        (["--block-steps", "1.5"], "argument --block-steps: expected 1 to 65536, got 1.5"),
        (["--block-steps", "65537"], "argument --block-steps: expected 1 to 65536, got 65537"),
        (
            ["--out", "missing/file"],
            "argument --out: expected a file in a folder, got missing/file",
        ),
        (["--report", "missing/file"], "argument --report: expected a file in a folder"),
        (["--out", "requests.jsonl"], "expected three files for requests, --out and --report"),
        (["--out", "x", "--report", "./x"], "expected three files for requests, --out and"),
        (["--out", "."], "argument --out: expected a file in a folder, got ."),
        (["--weights", "missing"], "No such file or directory: 'missing'"),
        (["--unknown"], "unrecognized arguments: --unknown"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_command_is_one_line_and_exit_status_two(run, arguments, message):
    status, results, err, _ = run([GOOD], *arguments)
    assert (status, results) == (2, [])
    assert err.startswith("batch_decode.py: error: ")
    assert err.count("\n") == 1
    assert message in err


def test_a_file_that_is_not_there_is_one_line(capsys):
    assert batch_decode.main(["missing.jsonl"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_results_never_take_the_place_of_a_pipe_or_a_device(run, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    status, results, err, _ = run([GOOD], "--out", str(pipe))
    assert (status, results) == (2, [])
    assert err == f"batch_decode.py: error: {pipe}: expected a file, got a pipe or a device\n"
    assert pipe.is_fifo()
