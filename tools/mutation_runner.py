"""Runs pytest again and again in one warm process: what `mutation_testing.py` starts per worker.

Importing JAX, Flax and pytest takes longer than most tests. They are imported once, and each run is
a fork of that process. JAX starts its threads with its first array, so only in the forks.

Reads lines of JSON, {"directory", "arguments", "output", "seconds"}, and answers each with a line,
"passed", "failed" or "timeout" and the seconds of CPU time. Those are also what is limited: time on
the clock depends on what else the machine does, and is limited to an hour.
"""

import contextlib
import importlib
import json
import os
import resource
import signal
import sys

PRELOADED = [
    "beartype", "chex", "flax.linen", "hypothesis", "jax.experimental.pallas.triton", "jaxtyping",
    "ml_dtypes", "orbax.checkpoint", "pytest", "safetensors.numpy", "tqdm", "xdist.plugin",
]  # fmt: skip


def run(directory: str, arguments: list[str], output: str, seconds: int) -> str:
    """What came of one pytest run in a fork, and its CPU time."""
    child = os.fork()
    if child == 0:
        os.setsid()
        # Nobody handles these signals: they end the process wherever it is.
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 10))
        signal.alarm(3600)
        os.chdir(directory)
        sys.path.insert(0, directory)
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        status = 1
        try:
            import pytest

            status = pytest.main(arguments)
        finally:
            sys.stdout.flush()
            os._exit(int(status))
    _, status, usage = os.wait4(child, 0)
    with contextlib.suppress(ProcessLookupError):  # what the tests started and a timeout left
        os.killpg(child, signal.SIGKILL)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGALRM, signal.SIGXCPU):
        outcome = "timeout"
    else:
        outcome = "passed" if status == 0 else "failed"
    return f"{outcome} {usage.ru_utime + usage.ru_stime:.1f}"


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    for name in PRELOADED:
        importlib.import_module(name)
    # A failure is enough: no smaller example of it. The tests' own profiles inherit this.
    from hypothesis import Phase, settings

    settings.register_profile(
        "first", phases=[Phase.explicit, Phase.generate], report_multiple_bugs=False, database=None
    )
    settings.load_profile("first")
    for line in sys.stdin:
        print(run(**json.loads(line)), flush=True)
