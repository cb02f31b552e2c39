"""The suite startup: what an import costs, and how soon the first byte of a text is there."""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmark_clock import Figure
from benchmark_settings import Settings
from byte_model import PROMPT

EXAMPLES = Path(__file__).parent
BESIDE, OWN = "import jax, flax", "import jax, flax, swa_jax"
IMPORTS, JOBS = 9, 3  # rounds


def startup(settings: Settings) -> Iterator[Figure]:
    """Seconds of fresh processes."""
    rounds = 1 if settings.tiny else IMPORTS
    if not settings.tiny:
        import_seconds(OWN)  # what is compiled and read from disk once is there for the others
    found = []
    for i in range(rounds):
        order = (BESIDE, OWN) if i % 2 == 0 else (OWN, BESIDE)
        taken = {statement: import_seconds(statement) for statement in order}
        found.append(taken[OWN] - taken[BESIDE])
    yield Figure(
        "startup", "import of swa_jax beyond jax and flax", statistics.median(found), "s",
        {"rounds": rounds},
    )  # fmt: skip
    if not settings.tiny:
        seconds = statistics.median(first_token_seconds() for _ in range(JOBS))
        yield Figure(
            "startup", "generate.py, process start to first token", seconds, "s", {"rounds": JOBS}
        )


def import_seconds(statement: str) -> float:
    """Seconds of a Python that runs one statement, from its start to its end."""
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", statement], check=True, cwd=EXAMPLES.parent, env=_environment()
    )
    return time.perf_counter() - started


def first_token_seconds() -> float:
    """Seconds from the start of generate.py to its first new byte, compilation included.

    It writes its prompt, then each byte as soon as it is chosen.

    Raises:
      ValueError: it ended before.
    """
    started = time.perf_counter()
    command = [sys.executable, str(EXAMPLES / "generate.py")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=_environment()
    ) as process:
        assert process.stdout is not None
        written = process.stdout.read(len(PROMPT.encode()) + 1)
        seconds = time.perf_counter() - started
        process.kill()
    if len(written) <= len(PROMPT.encode()):
        raise ValueError(f"generate.py: expected a byte after its prompt, got {written[-50:]!r}")
    return seconds


def _environment() -> dict[str, str]:
    """This process's, without a cache of compiled programs."""
    return {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
