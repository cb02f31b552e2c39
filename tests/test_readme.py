"""The Python blocks of the README run as they stand."""

import re
from pathlib import Path

import jax
import pytest

README = Path(__file__).parent.parent / "README.md"
# The block after a mark needs a directory of weights: tests/test_load_example.py runs it.
MARKED = r"<!-- from a directory to tokens -->\n```python\n.*?```"
TEXT = re.sub(MARKED, "", README.read_text(), flags=re.DOTALL)
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_the_readme_has_the_blocks_that_are_run():
    assert len(BLOCKS) == 3


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_python_block_of_the_readme_runs(number):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(compile(BLOCKS[number], f"README block {number}", "exec"), {"__name__": "readme"})
