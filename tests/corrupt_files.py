"""Corrupts files of every kind that is read, and sees each refused, or read as what it says.

    python tests/corrupt_files.py KIND COUNT SEED FOLDER

does so within limits of time and memory, and prints what came of it as JSON.
"""

import collections
import faulthandler
import json
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from corrupt_kinds import KINDS, Kind
from own_readers import same

SECONDS = 20
"""After which a file hangs."""
MEMORY = 1 << 30
"""Bytes that reading may take, of addresses, beyond what the process has before."""


class Hang(BaseException):
    """A file takes too long. No Exception, so that nothing takes it for a refusal."""


def try_one(kind: Kind, seed: int) -> str:
    """Corrupts a file once: "refused", or read as "equal" or as "other" values that it says."""
    rng = np.random.default_rng(seed)
    data = kind.whole
    while data == kind.whole:
        data = kind.corrupt(rng, kind.whole)
    kind.path.write_bytes(data)
    try:
        value = kind.load()
    except (OSError, ValueError) as error:
        text = str(error)
        assert kind.named in text, text
        assert len(text) < len(data) + 10_000
        return "refused"
    finally:
        kind.path.write_bytes(kind.whole)
    if same(value, kind.value):
        return "equal"
    assert kind.holds(value, data), "read as other values than it says"
    return "other"


def try_many(kind: Kind, seeds: range) -> dict[str, Any]:
    """Corrupts a file many times, each with a limit of time."""

    def hang(number: int, frame: object) -> None:
        raise Hang

    counts, slowest = collections.Counter(), 0.0
    before = signal.signal(signal.SIGALRM, hang)
    try:
        for seed in seeds:
            started = time.perf_counter()
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            try:
                counts[try_one(kind, seed)] += 1
            except BaseException as error:
                error.add_note(f"{kind.path.name}, seed {seed}")
                raise
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            slowest = max(slowest, time.perf_counter() - started)
    finally:
        signal.signal(signal.SIGALRM, before)
    return {**counts, "slowest": slowest}


def main(name: str, count: str, seed: str, folder: str) -> None:
    """Corrupts a file of a kind, within limits of time and memory, and prints what came of it."""
    kind = KINDS[name](Path(folder))
    try_many(kind, range(int(seed), int(seed) + 20))  # what is compiled and imported on the way
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    faulthandler.enable()
    peak, started = _peak(), time.perf_counter()
    found = try_many(kind, range(int(seed), int(seed) + int(count)))
    seconds = time.perf_counter() - started
    print(json.dumps({**found, "seconds": seconds, "memory": _peak() - peak, "peak": _peak()}))


def _peak() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main(*sys.argv[1:])
