"""How the packages are cut: the directions of imports, the size of modules, documented names.

The imports are read from the source, so an import inside a function counts as well.
"""

import ast
import functools
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pallas_kernels

ROOT = Path(__file__).parent.parent
PACKAGES = ("pallas_kernels", "swa_jax")
MAX_LINES = 400

# From the lowest layer to the highest: no module may reach one of a later set, directly or through
# others. A module that is not named here may stand anywhere, as long as this stays true.
LAYERS = {
    "pallas_kernels": [
        {"checks", "codec"},
        {"formats", "transforms"},
        {"storage", "triton_common"},
        {"dispatch", "triton_decode", "triton_launch", "triton_rows"},
        {"fused_store.xla", "indexed_attention.xla", "indexed_attention.triton_tiles"},
        {"fused_store.triton", "indexed_attention.triton"},
        {"fused_store", "indexed_attention"},
    ],
    "swa_jax": [
        {"conversion", "layouts", "placement", "ring", "rotary", "slots"},
        {"cache", "config", "metadata", "paging", "sizing"},
        {"band"},
        {"heads"},
        {"latents"},
        {"chunk", "devices", "verify"},
        {"attention"},
        {"block_scales", "head_shards"},
        {"tensor_files", "weight_names"},
        {"weight_loading", "weight_saving"},
        {"checkpoint"},
        {"mlp"},
        {"experts"},
        {"attention_module"},
        {"modules"},
        {"parameter_sharding", "prompts"},
        {"prefilling"},
        {"decoding"},
        {"admission", "continuations", "drafting", "prefixes", "requests", "state_arrays"},
        {"beams", "best_of_n", "serving", "speculation", "state_checkpoint"},
        {"generation"},
        {"__main__"},
    ],
}
# Deserialising with one of these runs code from the file.
UNSAFE_SERIALISERS = {"cloudpickle", "dill", "joblib", "pickle", "shelve"}


@functools.cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@functools.cache
def _modules() -> dict[str, Path]:
    """The modules of both packages by name; a package has the name of its folder."""
    modules = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def _imported_names(tree: ast.Module, module: str, is_package: bool) -> set[str]:
    """The dotted names that are imported: `from a import b` gives a.b, be b a module or not."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")[: None if is_package else -1] if node.level else []
            parts = parts[: len(parts) - max(node.level - 1, 0)]
            base = ".".join([*parts, node.module] if node.module else parts)
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


@functools.cache
def _imports(module: str) -> frozenset[str]:
    path = _modules()[module]
    return frozenset(_imported_names(_parse(path), module, path.name == "__init__.py"))


def _from_library(names: frozenset[str], library: str) -> bool:
    return any(name == library or name.startswith(f"{library}.") for name in names)


@functools.cache
def _dependencies(module: str) -> frozenset[str]:
    """The modules of both packages that one imports: of each name, the longest part that is one."""
    found = set()
    for name in _imports(module):
        while name and name not in _modules():
            name = name.rpartition(".")[0]
        found.add(name)
    return frozenset(found - {"", module})


@functools.cache
def _reachable(module: str) -> frozenset[str]:
    seen, todo = set(), [module]
    while todo:
        for name in _dependencies(todo.pop()) - seen:
            seen.add(name)
            todo.append(name)
    return frozenset(seen)


def test_the_parser_sees_the_packages_and_their_imports():
    assert {
        "pallas_kernels",
        "pallas_kernels.formats",
        "pallas_kernels.fused_store",
        "pallas_kernels.fused_store.xla",
        "pallas_kernels.storage",
        "pallas_kernels.transforms",
        "swa_jax.ring",
    } <= set(_modules())
    assert "pallas_kernels.formats" in _dependencies("pallas_kernels.storage")
    assert "pallas_kernels.storage" in _reachable("pallas_kernels.fused_store")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import a.b", {"a.b"}),
        ("from a import b", {"a.b"}),
        ("from . import b", {"p.q.b"}),
        ("from .b import c", {"p.q.b.c"}),
        ("from ..b import c", {"p.b.c"}),
        ("def f():\n    import a", {"a"}),
    ],
)
def test_the_parser_resolves_every_form_of_import(source, expected):
    assert _imported_names(ast.parse(source), "p.q.module", is_package=False) == expected
    assert _imported_names(ast.parse(source), "p.q", is_package=True) == expected


@pytest.mark.parametrize("module", _modules())
def test_pallas_kernels_is_a_leaf(module):
    if module.split(".")[0] == "pallas_kernels":
        assert not _from_library(_imports(module), "swa_jax")
        assert not _from_library(_imports(module), "flax")


@pytest.mark.parametrize("module", _modules())
def test_only_the_flax_modules_and_what_is_above_them_import_flax(module):
    if "swa_jax.mlp" not in {module} | _reachable(module):
        assert not _from_library(_imports(module), "flax")


@pytest.mark.parametrize("module", _modules())
def test_no_module_imports_itself_through_others(module):
    assert module not in _reachable(module)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package):
    layers = [{f"{package}.{name}" for name in layer} for layer in LAYERS[package]]
    upward = {
        f"{module} -> {target}"
        for height, layer in enumerate(layers)
        for module in layer & set(_modules())
        for target in _reachable(module) & set().union({package}, *layers[height + 1 :])
    }
    assert not upward


def _is_of_triton(module: str) -> bool:
    """An operation's triton module, or a part that those share: triton_common and so on."""
    name = module.split(".")[-1]
    return name == "triton" or name.startswith("triton_")


def test_only_dispatch_chooses_a_triton_module():
    """An operation's package names its triton module to dispatch, and nothing imports it."""
    for module in _modules():
        backends = {name for name in _dependencies(module) if _is_of_triton(name)}
        if not _is_of_triton(module):
            # What a program must obey that has kernels, and no kernel.
            common = {"pallas_kernels.triton_common"}
            assert backends <= (common if module == "pallas_kernels.dispatch" else set()), module
    named = {
        node.value
        for module in _modules()
        for node in ast.walk(_parse(_modules()[module]))
        if isinstance(node, ast.Constant)
        and re.fullmatch(r"pallas_kernels\.\w+\.triton", str(node.value))
    }
    operations = "fused_store", "indexed_attention"
    assert named == {f"pallas_kernels.{operation}.triton" for operation in operations}


def test_importing_the_library_imports_no_pallas():
    code = "import sys, swa_jax; print('jax.experimental.pallas' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_a_triton_module_does_not_reach_another_operations():
    for module in _modules():
        if module.split(".")[-1] == "triton":
            others = {name for name in _dependencies(module) if name.split(".")[-1] == "triton"}
            assert not others, f"{module} imports {others}"


def test_pallas_triton_stays_in_triton_modules():
    assert _is_of_triton("pallas_kernels.triton_rows")
    for module in _modules():
        if not _is_of_triton(module):
            for library in ("jax.experimental.pallas", "jax._src.pallas"):
                assert not _from_library(_imports(module), library), module


def test_no_public_call_names_a_thing_of_triton():
    """Not warps, stages or tiles, so that another backend is one more module."""
    for call in ("fused_store", "indexed_attention"):
        parameters = inspect.signature(getattr(pallas_kernels, call)).parameters
        assert not {"num_warps", "num_stages", "tile", "grid", "card"} & set(parameters)


@pytest.mark.parametrize("module", _modules())
def test_a_module_says_what_it_does_and_fits_a_readers_head(module):
    path = _modules()[module]
    docstring = ast.get_docstring(_parse(path), clean=False)
    assert docstring, "expected a docstring"
    assert docstring.splitlines()[0].strip(), "expected it to begin on its first line"
    assert len(path.read_text().splitlines()) <= MAX_LINES


def test_nothing_imports_an_unsafe_serialiser():
    paths = [
        path
        for folder in (*PACKAGES, "examples", "tests")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    assert Path(__file__) in paths
    for path in paths:
        names = _imported_names(_parse(path), path.stem, is_package=False)
        assert not {name.split(".")[0] for name in names} & UNSAFE_SERIALISERS, path


def _public_names(package: str) -> set[str]:
    """What a package exports by `from a import b as b`."""
    return {
        alias.name
        for node in ast.walk(_parse(_modules()[package]))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_are_documented(package):
    module = importlib.import_module(package)
    names = _public_names(package) | set(getattr(module, "__all__", ()))
    assert "KVCacheFormat" in names
    undocumented = []
    for name in sorted(names):
        value = getattr(module, name)
        if not (inspect.isroutine(value) or inspect.isclass(value) or inspect.ismodule(value)):
            value = type(value)  # a constant, such as a format, is described by its class
        # A dataclass without a docstring is given its signature as one.
        if not value.__doc__ or value.__doc__.startswith(f"{name}("):
            undocumented.append(name)
    assert not undocumented


def test_linters_have_one_version():
    pins = [
        dict(re.findall(r'"(ruff|pyright)(?:\[\w+\])?==([\d.]+)"', (ROOT / name).read_text()))
        for name in ("pyproject.toml", ".pre-commit-config.yaml")
    ]
    assert pins[0].keys() == {"ruff", "pyright"}
    assert pins[0] == pins[1]
