"""tests/mutation.md says of every survivor why, and its table counts what stands below it."""

import re
from collections import Counter
from pathlib import Path

REPORT = (Path(__file__).parent / "mutation.md").read_text()
SURVIVOR = re.compile(
    r"^`([\w/]+\.py)`, `[^`]+`:\n\n```diff\n.*?\n```\n\n(\w+)", re.DOTALL | re.MULTILINE
)
ROW = re.compile(r"^\| `([\w/]+\.py)` \|((?: \d+ \|){8})", re.MULTILINE)


def test_every_survivor_is_explained_and_counted_in_the_table():
    found = Counter(SURVIVOR.findall(REPORT))
    assert {kind for _, kind in found} == {"Equivalent", "Speed", "Text"}
    rows = ROW.findall(REPORT)
    assert len(rows) == 8
    for module, cells in rows:
        mutants, tried, killed, _, *kinds = map(int, cells.replace("|", "").split())
        assert kinds == [found[module, kind] for kind in ("Equivalent", "Speed", "Text")] + [0]
        assert mutants >= tried == killed + sum(kinds)
    assert sum(found.values()) == REPORT.count("```diff")
