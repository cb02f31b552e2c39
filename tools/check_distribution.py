r"""Builds wheel and source distribution, and uses both as somebody who downloads them.

python tools/check_distribution.py                   # needs the extra "dev", git and the network
python tools/check_distribution.py --work DIR        # keeps what was built

What must hold: twine has no complaint; the wheel has the two packages, their metadata and licence
and nothing else; the source distribution has every file that git keeps but those named below, and
the wheel built from it has the bytes of the wheel built here; in an empty environment, outside the
repository, both labs, `doctor`, `size`, `trace`, the README's decode and examples/generate.py run
from the installed wheel. Exit status 1 at the first thing that does not.
"""

import email
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

from one_line_parser import OneLineParser

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("pallas_kernels", "swa_jax")
# In the repository and not in the source distribution: what only it has a use for.
LEFT_OUT = (".ci/", ".github/")
DECODE = "swa.generate("  # the README's block that has it is run
FOREIGN = ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV")


class CheckFailedError(Exception):
    """Something that must hold does not."""


def run(*command: str | Path, cwd: Path) -> str:
    """Runs a command as if this project's environment were not there; returns what it prints."""
    variables = {key: value for key, value in os.environ.items() if key not in FOREIGN}
    variables |= {"JAX_PLATFORMS": "cpu", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        shown = " ".join(map(str, command))
        raise CheckFailedError(f"{shown}: exit status {done.returncode}\n{done.stdout}")
    return done.stdout


def expect_equal(what: str, got: set[str], want: set[str]) -> None:
    """Raises CheckFailedError with what is missing and what is too much."""
    if got != want:
        raise CheckFailedError(
            f"{what}: missing {sorted(want - got)}, unexpected {sorted(got - want)}"
        )


def tracked_files(root: Path) -> set[str]:
    """The files that git keeps, by their paths in the repository."""
    names = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=root)
    return {name for name in names.split("\0") if name and (root / name).exists()}


def read_wheel(path: Path) -> dict[str, bytes]:
    """The contents of a wheel by name."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def check_wheel(files: dict[str, bytes], tracked: set[str], project: dict) -> None:
    """Raises CheckFailedError unless a wheel has the packages and their metadata, and no more."""
    sources = {name for name in tracked if name.split("/")[0] in PACKAGES}
    unknown = {name for name in sources if not name.endswith((".py", "/py.typed"))}
    if unknown:
        raise CheckFailedError(f"packages: expected modules and py.typed, got {sorted(unknown)}")
    expect_equal("py.typed", {name for name in sources if name.endswith("/py.typed")},
                 {f"{package}/py.typed" for package in PACKAGES})  # fmt: skip
    info = f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    extra = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "licenses/LICENSE")}
    expect_equal("wheel", set(files), sources | extra)
    if files[f"{info}/licenses/LICENSE"] != (ROOT / "LICENSE").read_bytes():
        raise CheckFailedError("wheel: expected the repository's LICENSE, got another text")
    check_metadata(files[f"{info}/METADATA"].decode(), project)


def check_metadata(text: str, project: dict) -> None:
    """Raises CheckFailedError unless a wheel's metadata says what pyproject.toml does."""
    metadata = email.message_from_string(text)

    def every(name: str) -> set[str]:
        return set(metadata.get_all(name) or ())

    urls = {f"{name}, {url}" for name, url in project.get("urls", {}).items()}
    expect_equal("Project-URL", every("Project-URL"), urls)
    expect_equal("Classifier", every("Classifier"), set(project["classifiers"]))
    extras = set(project["optional-dependencies"])
    expect_equal("Provides-Extra", every("Provides-Extra"), extras)
    for name, want in (
        ("Name", project["name"]),
        ("Version", project["version"]),
        ("Summary", project["description"]),
        ("License-Expression", project["license"]),
        ("Requires-Python", project["requires-python"]),
        ("Description-Content-Type", "text/markdown"),
    ):
        expect_equal(name, every(name), {want})
    description = metadata.get_payload()
    if str(description).strip() != (ROOT / "README.md").read_text().strip():
        raise CheckFailedError("description: expected README.md, got another text")


def unpack_source(path: Path, folder: Path) -> Path:
    """Unpacks a source distribution; returns its one folder."""
    with tarfile.open(path) as archive:
        archive.extractall(folder, filter="data")
    [inner] = folder.iterdir()
    return inner


def check_source(folder: Path, tracked: set[str]) -> None:
    """Raises CheckFailedError unless a source distribution has what git keeps, byte by byte."""
    got = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    want = {name for name in tracked if not name.startswith(LEFT_OUT)}
    expect_equal("source distribution", got, want | {"PKG-INFO"})
    changed = {name for name in want if (folder / name).read_bytes() != (ROOT / name).read_bytes()}
    expect_equal("changed files", changed, set())


def use_installed(wheel: Path, source: Path, work: Path) -> None:
    """Installs the wheel into an empty environment and runs it from elsewhere, and says what ran.

    Args:
      wheel: the file.
      source: the unpacked source distribution, of which only the examples and README.md are taken.
      work: an empty folder.
    """
    environment, place = work / "environment", work / "elsewhere"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", wheel, cwd=work)
    place.mkdir()
    (source / "examples").rename(place / "examples")
    readme = (source / "README.md").read_text()
    [block] = [text for text in re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
               if DECODE in text and "read_config" not in text]  # fmt: skip
    (place / "readme.py").write_text(block + "\nprint(texts)\n")
    where = "import pallas_kernels, swa_jax; print(pallas_kernels.__file__, swa_jax.__file__)"
    for file in run(python, "-P", "-c", where, cwd=place).split():
        if not Path(file).resolve().is_relative_to(environment.resolve()):
            raise CheckFailedError(f"expected the installed packages, got {file}")
    commands = (
        ("-m", "swa_jax", "doctor"),
        ("-m", "swa_jax", "size", "--preset", "v41-flash", "--slots", "64"),
        ("-m", "swa_jax", "trace", "--state-id", "2", "--positions", "127:134", "--tokens", "6"),
        ("examples/attention_lab.py",),
        ("examples/kv_layout_lab.py",),
        ("readme.py",),
        ("examples/generate.py", "--bytes", "30", "--quiet"),
    )
    for command in commands:
        if not run(python, *command, cwd=place).strip():
            raise CheckFailedError(f"{' '.join(command)}: expected some output, got none")
        print(f"ran, installed: {' '.join(command)}", flush=True)


def check(work: Path) -> None:
    """Builds and checks everything in an empty folder."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tracked = tracked_files(ROOT)
    python = sys.executable

    def build(kind: str, root: Path, folder: str) -> Path:
        run(python, "-m", "build", kind, "--outdir", work / folder, root, cwd=work)
        [path] = (work / folder).glob("*.whl" if kind == "--wheel" else "*.tar.gz")
        return path

    wheel, source = build("--wheel", ROOT, "built"), build("--sdist", ROOT, "built")
    print(f"{wheel.name}: {wheel.stat().st_size:,} bytes")
    print(f"{source.name}: {source.stat().st_size:,} bytes")
    run(python, "-m", "twine", "check", "--strict", wheel, source, cwd=work)
    print("twine: no complaint")
    files = read_wheel(wheel)
    check_wheel(files, tracked, project)
    print(f"wheel: {len(files)} files, {sum(map(len, files.values())):,} bytes unpacked")
    folder = unpack_source(source, work / "source")
    check_source(folder, tracked)
    print(f"source distribution: {sum(path.is_file() for path in folder.rglob('*'))} files")
    again = read_wheel(build("--wheel", folder, "again"))
    expect_equal("wheel of the source distribution", set(again), set(files))
    different = {name for name, data in files.items() if again[name] != data}
    expect_equal("files that differ in the wheel of the source distribution", different, set())
    print("wheel of the source distribution: the same bytes")
    use_installed(wheel, folder, work)


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    parser = OneLineParser(
        prog="check_distribution.py",
        description="Builds wheel and source distribution, and uses both.",
    )
    parser.add_argument("--work", type=Path, metavar="DIR", help="an empty folder, kept")
    options = parser.parse_args(arguments)
    missing = [name for name in ("build", "twine") if importlib.util.find_spec(name) is None]
    if missing:
        parser.error(f"expected {' and '.join(missing)}, found none: pip install -e '.[dev]'")
    if options.work is not None:
        try:
            options.work.mkdir(parents=True, exist_ok=True)
            if any(options.work.iterdir()):
                parser.error(f"argument --work: expected an empty folder, got {options.work}")
        except OSError as error:
            parser.error(f"argument --work: {error}")
    try:
        if options.work is None:
            with tempfile.TemporaryDirectory(prefix="check_distribution-") as work:
                check(Path(work))
        else:
            check(options.work.resolve())
    except (CheckFailedError, OSError, ValueError) as error:
        print(f"check_distribution.py: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
