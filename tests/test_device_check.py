"""The device check: its rehearsal, what happens when a stage goes wrong, and its figures."""

import json
import math
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import benchmark
import benchmark_clock
import device_bytes
import device_cases
import device_check
import device_checks
import device_process
import device_report
import device_shapes
import device_timing
import device_worker
import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from quick_compilation import quick_environment

from pallas_kernels import V4, V41, V41_FP4, quantize_rows

ROOT = Path(__file__).parents[1]
STAGES = ["device", "cast", "store", "attention", "donation", "invariance", "tests", "timing"]
PATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

# Stands in for the worker: device answers as a CPU does, and each other stage as its words say.
WORKER = """
import os, sys, time
sys.path.insert(0, {examples!r})
from device_process import serve

def device(found, options):
    found.result("platform", "cpu")
    found.result("worker", os.getpid())

def works(found, options):
    found.result("worker", os.getpid())
    found.append("rows_seen", 1)
    found.append("rows_seen", 2)
    found.check("a figure", 0.5, 1)

def fails(found, options):
    found.check("a figure", 2, 1)
    found.check("nothing", float("nan"), 1)

def raises(found, options):
    found.result("kept", 7)
    raise RuntimeError("an address\\nis illegal")

def attempts(found, options):
    with found.attempt("one part"):
        raise RuntimeError("no such option")
    found.check("the other", 0, 0)

def dies(found, options):
    print("said on the standard output")
    found.result("kept", 7)
    print("LLVM ERROR: no such conversion", file=sys.stderr, flush=True)
    os.abort()

def hangs(found, options):
    found.result("kept", 7)
    time.sleep(60)

serve({{"device": device, **{{name: globals()[what] for name, what in {stages!r}.items()}}}})
"""


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Runs the command line in this process; returns exit status, output, errors and report."""
    monkeypatch.setenv("PYTHONPATH", PATH)
    out = tmp_path / "report.json"

    def call(*arguments, stages=None):
        if stages is not None:
            usual = dict.fromkeys([*device_check.CHECKS, "timing"], "works")
            script = tmp_path / "worker.py"
            examples = str(ROOT / "examples")
            script.write_text(WORKER.format(examples=examples, stages=usual | stages))
            monkeypatch.setattr(device_check, "WORKER", [sys.executable, str(script)])
            tests = device_process.new_stage()
            monkeypatch.setattr(device_check, "run_tests", lambda tiny, seconds: tests)
        try:
            status = benchmark.main(["--quiet", "--out", str(out), *arguments])
        except SystemExit as end:
            status = end.code
        output = capsys.readouterr()
        written = json.loads(out.read_text()) if out.exists() else None
        return status, output.out, output.err, written

    return call


def check(*arguments):
    return ("--tiny", "--device-check", *arguments)


# --- the rehearsal


def numbers(value):
    if isinstance(value, dict):
        return [n for item in value.values() for n in numbers(item)]
    if isinstance(value, list):
        return [n for item in value for n in numbers(item)]
    return [value] if isinstance(value, float) else []


@pytest.mark.slow
def test_the_rehearsal_runs_every_stage(run, tmp_path, monkeypatch):
    for name, value in quick_environment().items():  # its programs run for a moment
        monkeypatch.setenv(name, value)
    figure = tmp_path / "device.png"
    status, out, err, report = run(*check("--plot", str(tmp_path)))
    assert (status, err) == (0, ""), out
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["device.png", "report.json"]
    assert (report["schema"], report["finished"]) == (1, True)
    assert list(report["stages"]) == STAGES
    assert all(math.isfinite(n) for n in numbers(report))
    for name, stage in report["stages"].items():
        assert stage["status"] == "ok", (name, stage)
        assert bool(stage["checks"]) == (name not in ("device", "timing"))
    device = report["stages"]["device"]["results"]
    assert (device["platform"], device["kernel"]) == ("cpu", "interpret")
    assert [tile["rows"] for tile in device["tiles"]] == [
        "V41", "V4", "BF16", "F32", "V41_FP4", "V41 and V41_FP4",
    ]  # fmt: skip
    timing = report["stages"]["timing"]["results"]
    assert "skipped" not in timing
    assert [row["operation"] for row in timing["rows"][:2]] == ["indexed_attention", "fused_store"]
    assert len(timing["rows"]) == len(device_shapes.shapes_of(device_cases.TINY))
    for row in timing["rows"]:
        assert set(row["programs"]) == {"kernel", "xla", "kernel, no command buffer"}
        assert set(row["ratios"]) == {"xla / kernel", "kernel, no command buffer / kernel"}
        for program in row["programs"].values():
            assert 0 < program["us"]["p20"] <= program["us"]["median"] <= program["us"]["p80"]
            assert program["gb_per_s"] > 0
    assert out.count("\n| indexed_attention |") + out.count("\n| fused_store |") == 3 * len(
        timing["rows"]
    )


@pytest.mark.slow
def test_without_a_gpu_a_device_check_is_refused_in_one_line(tmp_path):
    result = subprocess.run(
        [sys.executable, ROOT / "examples" / "benchmark.py", "--device-check", "--quiet"],
        env=os.environ | {"PYTHONPATH": PATH, "JAX_PLATFORMS": "cpu"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "benchmark.py: error: --device-check: expected an NVIDIA GPU, JAX found cpu; with --tiny "
        "it rehearses on the CPU\n"
    )
    assert not list(tmp_path.iterdir())


class Lowered(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["cast", "store", "attention", "invariance", "timing"])
def test_the_programs_of_a_stage_lower_for_a_card(stage, monkeypatch):
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    mesh = AbstractMesh((1,), ("card",), abstract_device=device)
    kernels = {}

    def lower_all(context, jobs, options=None):
        for key, (function, arguments) in jobs.items():
            shapes = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") else x,
                arguments,
            )
            with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated")
                lowered = function.trace(*shapes).lower(lowering_platforms=("cuda",))
            kernels[str(key)] = lowered.as_text().count("__gpu$xla.gpu.triton")
        raise Lowered

    for module in (device_bytes, device_checks, device_timing):
        monkeypatch.setattr(module, "compile_all", lower_all)
    found = device_process.Found(lambda message: None, time.monotonic() + 1000)
    cpu = jax.devices("cpu")[0]
    context = device_cases.Context(device_cases.TINY, "triton", cpu, cpu, found)
    with pytest.raises(Lowered):
        device_worker.STAGES[stage](context)
    xla = [key for key in kernels if any(f"'{name}'" in key for name in ("xla", "cpu", "card"))]
    assert len(kernels) > len(xla)
    for key, count in kernels.items():
        assert (count > 0) == (key not in xla), key


# --- stages that go wrong


def test_all_stages_share_a_worker_while_nothing_goes_wrong(run):
    status, out, _, report = run(*check(), stages={})
    assert status == 0
    stages = report["stages"]
    assert list(stages) == STAGES
    workers = {stage["results"]["worker"] for name, stage in stages.items() if name != "tests"}
    assert len(workers) == 1
    assert stages["store"]["results"]["rows_seen"] == [1, 2]
    assert "| store | ok | 1 of 1 |" in out


@pytest.mark.parametrize(
    ("what", "status", "says", "kept"),
    [
        ("fails", "failed", None, False),
        ("attempts", "failed", None, False),
        ("raises", "error", "RuntimeError: an address is illegal", True),
        ("dies", "error", "LLVM ERROR: no such conversion", True),
    ],
)
def test_a_stage_that_goes_wrong_is_recorded_and_the_others_go_on(run, what, status, says, kept):
    exit_status, out, _, report = run(*check(), stages={"attention": what})
    assert exit_status == 1
    assert report["finished"]
    stages = report["stages"]
    wrong = stages.pop("attention")
    assert wrong["status"] == status
    assert says is None or says in wrong["error"]
    assert (wrong["results"].get("kept") == 7) == kept
    assert all(stage["status"] == "ok" for stage in stages.values())
    # A program that went wrong may have spoiled the device for its process.
    assert stages["store"]["results"]["worker"] != stages["donation"]["results"]["worker"]
    assert f"| attention | {status} |" in out
    assert "- attention: " in out


def test_a_figure_that_is_none_does_not_hold(run):
    _, out, _, report = run(*check(), stages={"cast": "fails"})
    above, nothing = report["stages"]["cast"]["checks"]
    assert above == {"name": "a figure", "value": 2.0, "limit": 1, "ok": False}
    assert nothing == {"name": "nothing", "value": "nan", "limit": 1, "ok": False}
    assert "- cast: a figure: 2.0 is above 1" in out


def test_a_stage_that_hangs_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(device_process, "GRACE_SECONDS", 0.5)
    script = tmp_path / "worker.py"
    stages = {"slow": "hangs", "next": "works"}
    script.write_text(WORKER.format(examples=str(ROOT / "examples"), stages=stages))
    worker = device_process.Worker([sys.executable, str(script)], os.environ)
    started = time.monotonic()
    stage = worker.run("slow", {}, 2, lambda *_: None)
    assert time.monotonic() - started < 30
    assert (stage["status"], stage["error"]) == ("error", "ended after 2 s")
    assert worker.run("next", {}, 30, lambda *_: None)["status"] == "ok"
    worker.close()


def test_stages_that_do_not_fit_are_listed_and_are_not_passed(run, monkeypatch):
    monkeypatch.setattr(device_process, "GRACE_SECONDS", 0.1)
    status, out, _, report = run(*check("--budget", "2"), stages={"cast": "hangs"})
    assert status == 1
    cast = report["stages"]["cast"]
    assert (cast["status"], cast["results"]) == ("error", {"kept": 7})
    for name in ("store", "invariance", "timing"):
        assert report["stages"][name]["error"] == "no time was left of 2 s"
    assert "- timing: no time was left of 2 s" in out


def test_shapes_that_do_not_fit_are_listed_as_skipped(monkeypatch):
    messages = []
    found = device_process.Found(messages.append, time.monotonic() + 1000)
    cpu = jax.devices("cpu")[0]
    context = device_cases.Context(device_cases.TINY, "interpret", cpu, cpu, found)
    monkeypatch.setattr(device_timing, "copy_bandwidth", lambda context: 1.0)
    monkeypatch.setattr(device_timing, "empty_loop", lambda context: 1.0)
    monkeypatch.setattr(device_timing, "_compile_wave", lambda context, inputs: {})
    monkeypatch.setattr(device_timing, "kernel_times", lambda *_: {})

    def time_shape(context, shape, *others):
        found.end = 0  # no time is left after the first shape
        return {}

    monkeypatch.setattr(device_timing, "_time_shape", time_shape)
    monkeypatch.setattr(device_timing, "PROFILED", 0)
    device_timing.time_table(context)
    appended = [message["append"] for message in messages if "append" in message]
    skipped = [value for name, value in appended if name == "skipped"]
    shapes = device_shapes.shapes_of(device_cases.TINY)
    assert [name for name, _ in appended].count("rows") == 1
    assert skipped == [str(shape) for shape in shapes[1:]]


# --- the tests of a card


@pytest.mark.parametrize(
    ("output", "counts"),
    [
        ("....\n4 passed, 2 deselected in 1.50s\n", {"passed": 4, "deselected": 2}),
        (
            "FAILED a\n===== 1 failed, 3 passed, 2 skipped in 61.02s (0:01:01) =====\n",
            {"failed": 1, "passed": 3, "skipped": 2},
        ),
        ("no tests ran\n", {}),
    ],
)
def test_the_last_line_of_pytest_is_read(output, counts):
    assert device_check.test_counts(output) == counts


def test_without_the_tests_their_stage_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(device_check, "ROOT", tmp_path)
    stage = device_check.run_tests(tiny=True, seconds=10)
    assert stage["status"] == "skipped"
    assert stage["reason"].startswith("the tests are not here: expected them in")


@pytest.mark.parametrize(
    ("body", "seconds", "status", "says"),
    [
        ("def test_it(): assert False, 'wrong bytes'", 60, "failed", "wrong bytes"),
        ("import time\ndef test_it(): time.sleep(60)", 3, "error", "ended after 3 s"),
        ("def test_it(): pass", 60, "ok", ""),
    ],
)
def test_tests_that_fail_or_hang_are_recorded(tmp_path, monkeypatch, body, seconds, status, says):
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "conftest.py").touch()
    mark = "import pytest\npytestmark = pytest.mark.gpu\n"
    (tests / "test_gpu.py").write_text(mark + body)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu")
    monkeypatch.setattr(device_check, "ROOT", tmp_path)
    stage = device_check.run_tests(tiny=True, seconds=seconds)
    assert stage["status"] == status
    assert says in str(stage)


# --- figures


def test_ratios_are_those_of_samples_taken_in_turn():
    fast = np.asarray([1.0, 2, 4, 8, 16])  # the card slows down: the ratio does not change
    assert benchmark_clock.ratios(3 * fast, fast) == {"median": 3, "p20": 3, "p80": 3}
    assert benchmark_clock.spread([5, 1, 4, 2, 3]) == pytest.approx(
        {"median": 3, "p20": 1.8, "p80": 4.2}
    )


def test_samples_are_taken_in_turn_and_not_always_in_one_order():
    order = []

    class Timed:
        def __init__(self, name):
            self.name = name

        def sample(self):
            order.append(self.name)
            return 1.0

    timed = {name: Timed(name) for name in "abc"}
    taken = benchmark_clock.sample_in_turn(timed, 3)
    assert {name: len(values) for name, values in taken.items()} == {"a": 3, "b": 3, "c": 3}
    assert "".join(order) == "abcbcacab"


def test_bytes_and_operations_of_a_call():
    # 2 requests of 2 queries see 4 rows each, 5 different ones in a request: 10 rows of 132 bytes.
    context = device_cases.Context(
        device_cases.TINY, "interpret", *[jax.devices("cpu")[0]] * 2, found=None
    )
    shape = device_shapes.Shape("indexed_attention", 2, 2, heads=2, layers=2)
    inputs = device_shapes.inputs_of(shape, context, ml_dtypes.bfloat16)
    moved, operations = device_shapes.work_of(shape, inputs, context.sizes)
    q_and_out, lse, indices, sink, rotation = 2 * 4 * 2 * 128 * 2, 4 * 4 * 2, 4 * 4 * 4, 8, 256
    assert moved == q_and_out + lse + indices + sink + rotation + 10 * 132
    assert operations == 2 * (2 * 4 * 2 * 4 * 128)


@pytest.mark.parametrize("fmt", [V41, V4, V41_FP4], ids=lambda fmt: fmt.name)
def test_steps_between_rows_are_counted(fmt):
    values = np.random.default_rng(0).normal(size=(50, 512)).astype(np.float32)
    a = np.asarray(jax.jit(quantize_rows, static_argnums=1)(values, fmt))
    assert all(value == 0 for value, _ in device_bytes.compare_rows(a, a, fmt).values())
    b = a.copy()
    b[7, 3] ^= 1
    b[9, fmt.data_bytes] += 1
    found = device_bytes.compare_rows(a, b, fmt)
    assert found["share of rows"][0] == 2 / 50
    assert found["largest step"][0] == 1
    b[7, 3] = a[7, 3] ^ 0x80  # another sign
    assert device_bytes.compare_rows(a, b, fmt)["largest step"][0] > 1


def test_an_lse_of_minus_infinity_is_compared_as_such():
    want = np.asarray([-np.inf, 1.0, 100.0])
    assert device_checks.lse_error(want, want) == 0
    assert device_checks.lse_error(want + [0, 0.5, 50], want) == 0.5
    assert device_checks.lse_error(np.asarray([0, 1, 100]), want) == math.inf


def test_a_report_is_replaced_as_a_whole(tmp_path, monkeypatch):
    report = device_report.Report(tmp_path / "r.json", {})
    report.put("device", device_process.new_stage())
    before = (tmp_path / "r.json").read_text()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        report.put("cast", device_process.new_stage())
    assert (tmp_path / "r.json").read_text() == before
