"""Runs stages in a process that may be lost, and keeps what each one found until then.

A program on a GPU can end its process (a compiler's abort), spoil it (after an illegal address
every call fails) or hang. So a worker runs the stages and says line by line what it finds, and one
in which something went wrong is replaced before the next stage.
"""

import contextlib
import dataclasses
import json
import math
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

GRACE_SECONDS = 10.0

Stage = dict[str, Any]
"""What a stage found: status ("ok", "failed", "error", "skipped"), seconds, checks, results, and
why it is an error or skipped."""


def new_stage() -> Stage:
    return {"status": "ok", "seconds": 0.0, "checks": [], "results": {}}


def skipped(reason: str) -> Stage:
    return new_stage() | {"status": "skipped", "reason": reason}


def failed(error: str) -> Stage:
    return new_stage() | {"status": "error", "error": error}


def describe(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:1000]


# --- in the worker


@dataclasses.dataclass
class Found:
    """What a stage finds, sent as it comes.

    Attributes:
      send: called with each message.
      end: time.monotonic() at which the stage should be over.
    """

    send: Callable[[dict], None]
    end: float

    @property
    def seconds_left(self) -> float:
        return self.end - time.monotonic()

    def progress(self, text: str) -> None:
        """Says what runs now."""
        self.send({"progress": text})

    def result(self, name: str, value: Any) -> None:
        """Keeps a figure under a name."""
        self.send({"result": [name, value]})

    def append(self, name: str, value: Any) -> None:
        """Keeps a figure at the end of a list."""
        self.send({"append": [name, value]})

    def check(self, name: str, value: float, limit: float) -> None:
        """Checks that a figure is not above its limit; NaN is."""
        value = float(value)
        self.send(
            {"check": {"name": name, "value": value, "limit": limit, "ok": bool(value <= limit)}}
        )

    @contextlib.contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """An exception inside is a check that does not hold."""
        try:
            yield
        except Exception as error:
            self.send({"check": {"name": name, "ok": False, "error": describe(error)}})


def serve(stages: Mapping[str, Callable[[Found, dict], None]]) -> None:
    """The worker: runs the stages that the supervisor names on its standard input.

    Args:
      stages: each called with what keeps its findings, and the options.
    """
    # Libraries print: what goes to the standard output must not meet the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(message: dict) -> None:
        answers.write(json.dumps(_finite(message), allow_nan=False) + "\n")
        answers.flush()

    for line in sys.stdin:
        request = json.loads(line)
        found = Found(send, time.monotonic() + request["seconds"])
        try:
            stages[request["stage"]](found, request["options"])
            send({"done": None})
        except Exception as error:
            send({"done": describe(error)})


def _finite(value: Any) -> Any:
    """The value with text for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# --- in the supervisor


class Worker:
    """A worker process, started when first asked, and again after one was lost."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]):
        self.command = command
        self.environment = environment
        self.process: subprocess.Popen | None = None
        self.errors: TextIO | None = None
        self.messages: queue.Queue[str | None] = queue.Queue()

    def run(
        self,
        name: str,
        options: dict,
        seconds: float,
        on_change: Callable[[Stage, str | None], None],
    ) -> Stage:
        """Runs a stage.

        Args:
          name: of the stage.
          options: what it is told.
          seconds: in which it should be over; GRACE_SECONDS later it is ended.
          on_change: called with what has been found so far, and with what runs now if it says so.

        Returns:
          What it found; status "error" if it raised, ended its process, or was ended.
        """
        stage = new_stage()
        started = time.monotonic()
        self._start()
        self._write({"stage": name, "options": options, "seconds": seconds})
        while True:
            left = started + seconds + GRACE_SECONDS - time.monotonic()
            try:
                line = self.messages.get(timeout=max(left, 0))
            except queue.Empty:
                stage |= failed(f"ended after {seconds + GRACE_SECONDS:.0f} s") | _kept(stage)
                self.close(kill=True)
                break
            if line is None:
                stage |= failed(self._last_words()) | _kept(stage)
                break
            message = json.loads(line)
            if "done" in message:
                if message["done"] is not None:
                    stage |= failed(message["done"]) | _kept(stage)
                elif not all(check["ok"] for check in stage["checks"]):
                    stage["status"] = "failed"
                break
            _add(stage, message)
            on_change(stage, message.get("progress"))
        stage["seconds"] = round(time.monotonic() - started, 2)
        if stage["status"] != "ok":
            self.close(kill=True)
        return stage

    def _start(self) -> None:
        if self.process is not None:
            return
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (as long as the process)
        self.messages = queue.Queue()
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=self.environment,
        )
        threading.Thread(
            target=_forward, args=(self.process.stdout, self.messages), daemon=True
        ).start()

    def _write(self, request: dict) -> None:
        assert self.process
        assert self.process.stdin
        # A process that has ended says why on standard error, and the reader notices.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()

    def _last_words(self) -> str:
        assert self.process
        assert self.errors
        status = self.process.wait()
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors if line.strip()]
        said = " | ".join(lines[-5:]) or "no message"
        return f"the worker ended with status {status}: {said}"[:2000]

    def close(self, kill: bool = False) -> None:
        """Ends the process."""
        if self.process is None:
            return
        assert self.process.stdin
        if kill:
            self.process.kill()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.process = None
        if self.errors is not None:
            self.errors.close()


def _forward(lines: TextIO, messages: queue.Queue) -> None:
    with lines:
        for line in lines:
            messages.put(line)
    messages.put(None)


def _kept(stage: Stage) -> Stage:
    return {"checks": stage["checks"], "results": stage["results"]}


def _add(stage: Stage, message: dict) -> None:
    if "check" in message:
        stage["checks"].append(message["check"])
    elif "result" in message:
        name, value = message["result"]
        stage["results"][name] = value
    elif "append" in message:
        name, value = message["append"]
        stage["results"].setdefault(name, []).append(value)
