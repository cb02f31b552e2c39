"""Checks what only a GPU can show, stage by stage, in a process that may be lost."""

import argparse
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from device_process import Stage, Worker, failed, new_stage, skipped
from device_report import Report, markdown, plot
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
WORKER = [sys.executable, str(Path(__file__).with_name("device_worker.py"))]
CHECKS = ("cast", "store", "attention", "donation", "invariance")
TESTS_SECONDS = 120.0


# --- the tests


def run_tests(tiny: bool, seconds: float) -> Stage:
    """The tests that are marked for a GPU, in a process of their own.

    Args:
      tiny: on the CPU, where a few are collected and skipped.
      seconds: after which they are ended.

    Returns:
      The stage: numbers by outcome, and the end of the output if something went wrong.
    """
    tests = ROOT / "tests"
    if not (tests / "conftest.py").exists():
        return skipped(f"the tests are not here: expected them in {tests}, as in a checkout")
    if importlib.util.find_spec("pytest") is None:
        return skipped("pytest is not installed: pip install -e '.[test]'")
    workers = 0 if tiny else min(4, (os.cpu_count() or 1) // 4)  # most of a test is compilation
    command = [sys.executable, "-m", "pytest", "-m", "gpu", f"-n{workers}", "-q"]
    command += ["-p", "no:cacheprovider", *(["tests/test_gpu.py"] if tiny else ["--gpu"])]
    stage = new_stage()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        environment = worker_environment(tiny) | {
            "HYPOTHESIS_STORAGE_DIRECTORY": folder,
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        with subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            try:
                output, _ = process.communicate(timeout=max(seconds, 1))
            except subprocess.TimeoutExpired:
                stage |= failed(f"ended after {seconds:.0f} s")
                output = _interrupt(process)
    stage["seconds"] = round(time.monotonic() - started, 2)
    counts = test_counts(output)
    stage["results"] = {"command": " ".join(["pytest", *command[3:]]), **counts}
    if process.returncode == 0:
        ran = tiny or counts.get("passed", 0) > 0
        stage["checks"].append({"name": "tests ran and passed", "ok": ran})
    else:
        problems = _test_problems(output, process.returncode)
        stage["checks"].append({"name": "tests passed", "ok": False, "error": problems})
    if stage["status"] == "ok" and not all(check["ok"] for check in stage["checks"]):
        stage["status"] = "failed"
    if stage["status"] != "ok":
        stage["results"]["output"] = output[-8000:]
    return stage


def _interrupt(process: subprocess.Popen) -> str:
    """Ends pytest as a key does, so that it says what it found so far; all its output."""
    process.send_signal(signal.SIGINT)
    try:
        return process.communicate(timeout=10)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]


def test_counts(output: str) -> dict[str, int]:
    """Numbers by outcome in pytest's last line."""
    lines = re.findall(r"^=*\s*((?:\d+ \w+(?:, )?)+) in [\d.]+s", output, re.MULTILINE)
    if not lines:
        return {}
    return {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", lines[-1])}


def _test_problems(output: str, status: int) -> str:
    named = re.findall(r"^(?:FAILED|ERROR) .*", output, re.MULTILINE)
    return f"pytest ended with status {status}: " + (" | ".join(named)[:3000] or output[-500:])


# --- all stages


def worker_environment(tiny: bool) -> dict[str, str]:
    """The environment of what runs beside this process."""
    environment = dict(os.environ)
    platforms = environment.get("JAX_PLATFORMS", "")
    if tiny:
        environment["JAX_PLATFORMS"] = "cpu"
    elif "cuda" in platforms and "cpu" not in platforms:
        environment["JAX_PLATFORMS"] = f"{platforms},cpu"  # the checks compare the card with it
    # The tests share the card with the checks: neither may take most of its memory in advance.
    environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    environment["TF_CPP_MIN_LOG_LEVEL"] = environment.get("TF_CPP_MIN_LOG_LEVEL", "2")
    return environment


def run_stages(options: argparse.Namespace, report: Report) -> None:
    """Runs the stages one after the other, and the tests beside those that time nothing.

    Raises:
      ValueError: no GPU.
    """
    end = report.started + options.budget
    worker = Worker(WORKER, worker_environment(options.tiny))
    names = ["device", *CHECKS, "timing"]
    bar = tqdm(
        total=len(names) + 1, unit="stage", file=sys.stderr, disable=options.quiet, leave=False
    )
    pool = ThreadPoolExecutor(1)
    tests: Future[Stage] | None = None
    try:
        for name in names:
            if name == "timing" and tests is not None:
                bar.set_description("tests")
                report.put("tests", tests.result())
                bar.update()
            bar.set_description(name)
            left = end - time.monotonic()
            if left <= 0:
                report.put(name, failed(f"no time was left of {options.budget:g} s"))
                bar.update()
                continue

            def on_change(stage: Stage, progress: str | None, name: str = name) -> None:
                report.contents["stages"][name] = stage
                if progress:
                    bar.set_description(f"{name}: {progress}")
                else:
                    report.write()

            stage = worker.run(name, {"tiny": options.tiny}, left, on_change)
            report.put(name, stage)
            bar.update()
            if name == "device":
                _check_device(options, stage)
                limit = min(TESTS_SECONDS, end - time.monotonic())
                tests = pool.submit(run_tests, options.tiny, limit)
    finally:
        worker.close(kill=True)
        pool.shutdown(wait=False, cancel_futures=True)
        bar.close()


def _check_device(options: argparse.Namespace, stage: Stage) -> None:
    platform = stage["results"].get("platform")
    if platform is None:
        raise ValueError(f"device: {stage.get('error', 'JAX found none')}")
    if not options.tiny and platform != "gpu":
        raise ValueError(
            f"--device-check: expected an NVIDIA GPU, JAX found {platform}; with --tiny it "
            f"rehearses on the CPU"
        )


def run(options: argparse.Namespace) -> int:
    """Runs the device check.

    Args:
      options: `out`, a JSON file or None; `plot`, a folder for the figure or None; `budget`,
        seconds; `tiny`, whether it is a rehearsal; `quiet`.

    Returns:
      The exit status: 0, or 1 if a check failed or a stage went wrong.

    Raises:
      OSError: a file cannot be written.
      ValueError: there is no GPU, or nothing was timed.
    """
    shown: dict[str, Any] = {
        name: value if not isinstance(value, Path) else str(value)
        for name, value in vars(options).items()
    }
    report = Report(options.out, shown)
    report.write()
    run_stages(options, report)
    report.contents["finished"] = True
    report.write()
    print(markdown(report.contents))
    if options.plot is not None:
        plot(report.contents, options.plot / "device.png")
    return 0 if report.ok else 1
