"""tools/: the map of the code is up to date, and what the other scripts would object to."""

import fcntl
import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from unittest.mock import MagicMock

import pytest

ROOT = Path(__file__).parents[1]


def load(name: str):
    """A script of tools/ as a module, under a name that pytest does not collect."""
    spec = importlib.util.spec_from_file_location(f"tools_{name}", ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


sys.path.append(str(ROOT / "tools"))  # where scripts import each other by name
check_distribution, draw_map, versions = map(
    load, ("check_distribution", "draw_map", "test_versions")
)


def refusal(capsys, main, *arguments) -> str:
    """The one line that a script says as it ends with status 2."""
    with pytest.raises(SystemExit) as end:
        main(*arguments)
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("tool", [check_distribution, draw_map, versions])
def test_an_unknown_option_is_one_line(tool, capsys):
    said = refusal(capsys, tool.main, ["--unknown"])
    name = tool.__name__.removeprefix("tools_")
    assert said == f"{name}.py: error: unrecognized arguments: --unknown\n"


# --- the map


def test_the_map_of_the_code_is_up_to_date(capsys):
    assert draw_map.main(["--check"]) == 0, "python tools/draw_map.py"
    titles = re.findall(r"<g><title>([\w.]+): ", draw_map.PICTURE.read_text())
    files = [
        path.relative_to(ROOT).with_suffix("")
        for package in draw_map.PACKAGES
        for path in (ROOT / package).rglob("*.py")
    ]
    names = {".".join(path.parts).removesuffix(".__init__") for path in files}
    assert sorted(titles) == sorted(names - set(draw_map.PACKAGES))


def test_a_map_of_other_code_is_out_of_date(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(draw_map, "ROOT", tmp_path)
    monkeypatch.setattr(draw_map, "PICTURE", tmp_path / "map.svg")
    assert draw_map.main(["--check"]) == 1
    assert "map.svg: out of date" in capsys.readouterr().err
    (tmp_path / "map.svg").write_text(draw_map.draw() + " ")
    assert draw_map.main(["--check"]) == 1
    assert draw_map.main([]) == 0
    assert draw_map.main(["--check"]) == 0


def test_a_module_stands_above_all_that_it_imports():
    assert draw_map.height("pallas_kernels.formats") > draw_map.height("pallas_kernels.codec")
    for module in draw_map.modules():
        for other in draw_map.inner(module):
            assert draw_map.height(module) > draw_map.height(other)


# --- versions


@pytest.mark.parametrize(
    ("python", "jax", "refusal"),
    [
        ("3.11", "0.10", None),
        ("3.11", "0.11", "JAX 0.11 needs Python 3.12"),
        ("3.11", "0.12", "JAX 0.12 needs Python 3.12"),
        ("3.12", "0.12", None),
        ("3.13", "0.10", None),
    ],
)
def test_combinations_that_jax_does_not_support_are_named(python, jax, refusal):
    assert versions.Combination(python, jax).refusal == refusal


def test_the_versions_are_those_that_the_package_declares():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    classified = [
        match[1]
        for classifier in project["classifiers"]
        if (match := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", classifier))
    ]
    assert list(versions.PYTHONS) == classified
    assert "jax>=0.10.2,<0.13" in project["dependencies"]
    assert versions.JAXES == {"0.10": "0.10.2", "0.11": "0.11.*", "0.12": "0.12.*"}


def test_what_does_not_run_is_in_the_table_and_nothing_run_is_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(versions, "find_python", lambda version: None)
    assert versions.main(["--only", "3.11:0.12", "--only", "3.13:0.12"]) == 1
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| 3.11 | 0.12 | JAX 0.12 needs Python 3.12 | - | - | - | - |",
        "| 3.13 | 0.12 | no such Python here | - | - | - | - |",
    ]


def test_one_failure_does_not_stop_the_others_and_decides_the_status(monkeypatch, capsys, tmp_path):
    asked = []

    def run_combination(combination, python, work, arguments):
        asked.append((combination.python, combination.jax, tuple(arguments)))
        verdict = "FAILED" if combination.python == "3.12" else "passed"
        return versions.Outcome(combination, verdict, "0.10.2", (5, 1, 2), 0.5)

    monkeypatch.setattr(versions, "find_python", lambda version: "python")
    monkeypatch.setattr(versions, "run_combination", run_combination)
    work = ["--work", str(tmp_path), "--first-cases"]
    assert versions.main([*work, "--only", "3.12:0.10", "--only", "3.13:0.10"]) == 1
    assert asked == [("3.12", "0.10", ("--first-cases",)), ("3.13", "0.10", ("--first-cases",))]
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| 3.12 | 0.10.2 | FAILED | 5 | 1 | 2 | 0.5 |",
        "| 3.13 | 0.10.2 | passed | 5 | 1 | 2 | 0.5 |",
    ]
    assert versions.main([*work, "--only", "3.13:0.10"]) == 0


def test_a_file_is_no_place_for_environments(capsys):
    said = refusal(capsys, versions.main, ["--work", __file__])
    assert said == f"test_versions.py: error: argument --work: expected a folder, got {__file__}\n"


def test_counts_are_read_from_pytests_report(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite tests="10" failures="2" errors="1" skipped="3"/></testsuites>'
    )
    assert versions.read_counts(report) == (4, 3, 3)


def test_a_stub_that_is_another_python_is_not_taken(monkeypatch, tmp_path):
    for name, version in (("python3.12", "3.13"), ("python3.13", "3.13")):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\necho {version}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert versions.find_python("3.12") is None
    assert versions.find_python("3.13") == "python3.13"


# --- the distribution

PROJECT = {
    "name": "swa-jax", "version": "1.2", "description": "What it is", "license": "Apache-2.0",
    "requires-python": ">=3.11", "classifiers": ["Typing :: Typed"],
    "optional-dependencies": {"test": []}, "urls": {"Home": "https://example.org"},
}  # fmt: skip
METADATA = """\
Metadata-Version: 2.4
Name: swa-jax
Version: 1.2
Summary: What it is
License-Expression: Apache-2.0
Requires-Python: >=3.11
Classifier: Typing :: Typed
Provides-Extra: test
Project-URL: Home, https://example.org
Description-Content-Type: text/markdown

"""
INFO = "swa_jax-1.2.dist-info"
TRACKED = {"README.md", "swa_jax/py.typed", "swa_jax/__init__.py", "pallas_kernels/py.typed"}


def wheel() -> dict[str, bytes]:
    packages = dict.fromkeys(TRACKED - {"README.md"}, b"")
    return packages | {
        f"{INFO}/METADATA": (METADATA + (ROOT / "README.md").read_text()).encode(),
        f"{INFO}/WHEEL": b"",
        f"{INFO}/RECORD": b"",
        f"{INFO}/licenses/LICENSE": (ROOT / "LICENSE").read_bytes(),
    }


def test_a_wheel_of_the_packages_their_metadata_and_licence_is_right():
    check_distribution.check_wheel(wheel(), TRACKED, PROJECT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tests/test_x.py": b""}, r"wheel: missing \[\], unexpected \['tests/test_x.py'\]"),
        ({"swa_jax/__init__.py": None}, r"wheel: missing \['swa_jax/__init__.py'\]"),
        ({f"{INFO}/licenses/LICENSE": b"MIT"}, "expected the repository's LICENSE"),
        ({f"{INFO}/METADATA": METADATA.encode()}, "description: expected README.md"),
        ({f"{INFO}/METADATA": METADATA.replace(">=3.11", ">=3.9").encode()}, "Requires-Python: "),
        ({f"{INFO}/METADATA": METADATA.replace("Home, ", "Docs, ").encode()}, "Project-URL: "),
        ({f"{INFO}/METADATA": METADATA.replace("Typed", "Loose").encode()}, "Classifier: "),
    ],
)
def test_a_wheel_with_more_less_or_other_metadata_is_not(change, message):
    files = wheel() | change
    files = {name: data for name, data in files.items() if data is not None}
    with pytest.raises(check_distribution.CheckFailedError, match=message):
        check_distribution.check_wheel(files, TRACKED, PROJECT)


def test_a_package_without_py_typed_or_with_other_files_is_not_built():
    with pytest.raises(check_distribution.CheckFailedError, match="py.typed: missing"):
        check_distribution.check_wheel(wheel(), TRACKED - {"swa_jax/py.typed"}, PROJECT)
    with pytest.raises(check_distribution.CheckFailedError, match=r"got \['swa_jax/x.bin'\]"):
        check_distribution.check_wheel(wheel(), TRACKED | {"swa_jax/x.bin"}, PROJECT)


def test_a_source_distribution_has_what_git_keeps(tmp_path, monkeypatch):
    monkeypatch.setattr(check_distribution, "ROOT", tmp_path / "root")
    tracked = {"swa_jax/a.py", "README.md", ".ci/run"}
    for place, names in (("root", tracked), ("source", {"swa_jax/a.py", "README.md", "PKG-INFO"})):
        for name in names:
            path = tmp_path / place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
    source = tmp_path / "source"
    check_distribution.check_source(source, tracked)
    (source / "README.md").write_text("other")
    with pytest.raises(check_distribution.CheckFailedError, match=r"changed files: .*README.md"):
        check_distribution.check_source(source, tracked)
    (source / "swa_jax" / "a.pyc").write_text("")
    with pytest.raises(check_distribution.CheckFailedError, match=r"unexpected .*a.pyc"):
        check_distribution.check_source(source, tracked)


def test_a_command_that_fails_is_an_error_with_its_output(tmp_path):
    with pytest.raises(check_distribution.CheckFailedError, match=r"exit status 3\nsaid\n"):
        check_distribution.run(
            sys.executable, "-c", "print('said'); raise SystemExit(3)", cwd=tmp_path
        )


@pytest.fixture
def checked(monkeypatch):
    """The folders that were built and checked in; nothing is built."""
    folders = []
    monkeypatch.setattr(check_distribution, "check", folders.append)
    for name in ("build", "twine"):  # which have an extra of their own
        monkeypatch.setitem(sys.modules, name, MagicMock(__spec__=MagicMock()))
    return folders


@pytest.mark.parametrize("name", ["empty", "new/folder"])
def test_a_distribution_is_built_in_an_empty_folder(checked, name, tmp_path):
    (tmp_path / "empty").mkdir()
    assert check_distribution.main(["--work", str(tmp_path / name)]) == 0
    assert checked == [tmp_path / name]
    assert (tmp_path / name).is_dir()


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (ROOT, f"expected an empty folder, got {ROOT}"),
        (Path(__file__), "[Errno 17] File exists: "),
        (Path(__file__, "folder"), "[Errno 20] Not a directory: "),
    ],
    ids=["full", "file", "within_a_file"],
)
def test_a_distribution_is_built_nowhere_else(checked, work, message, capsys):
    said = refusal(capsys, check_distribution.main, ["--work", str(work)])
    assert said.startswith(f"check_distribution.py: error: argument --work: {message}")
    assert checked == []


@pytest.mark.parametrize("names", [["build"], ["twine"], ["build", "twine"]])
def test_what_a_distribution_is_built_with_is_named(checked, names, monkeypatch, capsys):
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)
    said = refusal(capsys, check_distribution.main, [])
    expected = f"expected {' and '.join(names)}, found none: pip install -e '.[dev]'"
    assert said == f"check_distribution.py: error: {expected}\n"
    assert checked == []


# --- mutation testing


def test_mutation_testing_names_the_extra_that_it_needs(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cosmic_ray", None)
    said = refusal(capsys, load, "mutation_testing")
    assert said.startswith("mutation_testing.py: error: ")
    assert said.endswith(": pip install -e '.[mutation]'\n")


@pytest.fixture
def refuse(monkeypatch, capsys, tmp_path):
    """What mutation_testing.py says on standard error as it ends with status 2.

    cosmic-ray, which has an extra of its own, is not needed for that.
    """
    parts = ("commands", "mutating", "plugins", "work_db", "work_item")
    for name in ("cosmic_ray", *(f"cosmic_ray.{part}" for part in parts), "mutation_operators"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    mutation_testing = load("mutation_testing")
    monkeypatch.setattr(mutation_testing, "Runner", None)  # nothing is begun

    def call(*arguments):
        argv = ["", "--work", str(tmp_path), *arguments]
        monkeypatch.setattr(sys, "argv", argv)
        return refusal(capsys, mutation_testing.main)

    return call


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["swa_jax/nothing.py"], "expected modules among"),
        (["--sample", "0"], "argument --sample: expected 1 or more, got 0"),
        (["--workers", "-1"], "argument --workers: expected 0 or more, got -1"),
        (["--workers", "many"], "argument --workers: invalid int value: 'many'"),
        (["--report", "missing/x.md"], "argument --report: expected a file in a folder, got missi"),
        (["--work", __file__], "argument --work: [Errno 17] File exists"),
    ],
)
def test_mutation_testing_refuses_bad_arguments_before_it_begins(refuse, arguments, message):
    assert refuse(*arguments).startswith(f"mutation_testing.py: error: {message}")


def test_a_second_run_of_mutation_testing_in_the_same_directory_is_refused(refuse, tmp_path):
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        said = refuse()
    message = f"argument --work: another run is at work in {tmp_path}"
    assert said == f"mutation_testing.py: error: {message}\n"
