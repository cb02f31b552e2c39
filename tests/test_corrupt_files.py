"""Ten thousand corrupted files, of every kind: each is refused by name, or read as what it says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_cases import needs_smaps
from corrupt_files import SECONDS, try_many
from corrupt_kinds import KINDS

pytestmark = pytest.mark.quick_compilation

COUNTS = {
    "single_file": 1450, "parameters": 1000, "decoder": 500, "scaled_layer": 500, "index": 800,
    "shard": 500, "own_config": 800, "published_config": 600, "dense_config": 400, "exported": 800,
    "forged_slot": 300, "prefix": 600, "request_lines": 500, "benchmark": 500,
    "training_state": 400, "byte_model": 100, "state_header": 100, "state_file": 50,
    "forged_state_header": 50, "forged_state_file": 50,
}  # fmt: skip
SLOW_TO_MAKE = {
    "byte_model",
    "state_header",
    "state_file",
    "forged_state_header",
    "forged_state_file",
}


def test_ten_thousand_files_are_corrupted():
    assert set(COUNTS) == set(KINDS)
    assert sum(COUNTS.values()) == 10_000


@pytest.mark.parametrize("name", [name for name in KINDS if name not in SLOW_TO_MAKE])
def test_some_corrupted_files_are_refused_or_read_as_what_they_say(tmp_path, name):
    found = try_many(KINDS[name](tmp_path), range(10_000, 10_020))
    assert sum(found.get(kind, 0) for kind in ("refused", "equal", "other")) == 20


@pytest.mark.slow
@needs_smaps  # where memory can be limited
@pytest.mark.parametrize(("name", "count"), COUNTS.items(), ids=COUNTS)
def test_corrupted_files_are_refused_or_read_as_what_they_say_within_limits(tmp_path, name, count):
    worker = Path(__file__).with_name("corrupt_files.py")
    done = subprocess.run(
        [sys.executable, str(worker), name, str(count), "0", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(f"{name}: {found}")
    assert sum(found.get(kind, 0) for kind in ("refused", "equal", "other")) == count
    assert found["slowest"] < SECONDS
    assert found["memory"] < 300e6
