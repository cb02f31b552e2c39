"""tests/cases.md: each case once, each test that it names, and each test that is of a case."""

import functools
import re
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parent
# Numbers that are missing were never given to a case.
IDS = re.findall(
    r"\S+",
    """
    A01 A02 A03 A04 A06 A07 B01 B02 B03 B05 B07 B10 C01 C02 C03 C05 C07 D01 D02 D03 D07 E01 E02 E03
    E05 F01 F02 F04 G01 G03 G04 G05 G07 G08 G10 G11 H01 H02 H03 H06 I01 I02 I05 J01 J02 K01 K02 K03
    L01 L02 L03 L05 L06 L08 M01 M02 M03 M05 M07 M08 M09 M11 N01 N02 N05 N07 O01 O03 O04 O05 O09 P01
    P02 P04 P06 Q01 Q02 Q04 Q06 Q07 Q09 Q10 R01 R02 R03 R05 R06 R07 R09 R10 S02 S03 S04 T01 T03 U01
    U03 U04 U05 V01 V02 V05
    """,
)
ROW = re.compile(r"\| ([A-V]\d\d) \| (.*) \| (.*) \| \[(.*)\]\((https://\S+)\) \| (.*) \| (.*) \|")
NAMED = re.compile(r"`(test_\w+)\.py::(test_\w+)`")


def rows() -> list[re.Match]:
    lines = (TESTS / "cases.md").read_text().splitlines()
    table = [line for line in lines if re.match(r"\| [A-Z]\d\d ", line)]
    found = [ROW.fullmatch(line) for line in table]
    assert [line for line, row in zip(table, found, strict=True) if row is None] == []
    return [row for row in found if row]


@functools.cache
def functions(path: Path) -> list[str]:
    return re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)


def named() -> dict[str, set[tuple[str, str]]]:
    """The tests that each case's row names, as (module, function)."""
    return {row[1]: set(NAMED.findall(row[6])) for row in rows()}


def test_every_case_is_listed_once():
    assert len(IDS) == 102
    assert [row[1] for row in rows()] == IDS


def test_a_case_names_a_test_or_says_why_not():
    for row in rows():
        assert NAMED.search(row[6]) or row[7].strip(), row[1]


def test_every_test_that_is_named_is_there():
    for case, tests in named().items():
        for module, function in tests:
            assert function in functions(TESTS / f"{module}.py"), case


def test_every_test_of_a_case_is_named_by_it():
    found = defaultdict(set)
    for path in sorted(TESTS.glob("test_*.py")):
        for function in functions(path):
            if case := re.match(r"test_([A-V]\d\d)_", function):
                found[case[1]].add((path.stem, function))
    assert sum(map(len, found.values())) > 100
    assert set(found) <= set(IDS)
    listed = named()
    for case, tests in found.items():
        assert tests <= listed[case], case
