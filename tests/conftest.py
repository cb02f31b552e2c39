"""Test setup: the platform, strict promotion, hypothesis profiles and runtime type checks."""

import os
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

_ROOT = Path(__file__).parent.parent
_PACKAGES = ("pallas_kernels", "swa_jax")
_SHAPES = "it is asked about shapes alone, before there are arrays"
_PYTREE = "what jax.eval_shape makes of its pytrees holds shapes in the place of arrays"
_PROTOCOL = "it takes a drafter or a hook, protocols of which only the names can be checked"
_CHECKS_ITSELF = "its public calls check their input, and a test must see their own ValueError"
# The modules whose jaxtyping annotations beartype does not check in the tests, and why.
UNCHECKED_MODULES = {
    "pallas_kernels.checks": _CHECKS_ITSELF,
    "pallas_kernels.codec": "what it gets may be NumPy's where nothing is traced",
    "pallas_kernels.formats": _CHECKS_ITSELF,
    "pallas_kernels.fused_store.triton": _SHAPES,
    "pallas_kernels.indexed_attention.triton": _SHAPES,
    "pallas_kernels.storage": _CHECKS_ITSELF,
    "swa_jax.attention_module": _CHECKS_ITSELF,
    "swa_jax.beams": _PYTREE,
    "swa_jax.cache": _CHECKS_ITSELF,
    "swa_jax.checkpoint": _CHECKS_ITSELF,
    "swa_jax.conversion": _CHECKS_ITSELF,
    "swa_jax.decoding": _CHECKS_ITSELF,
    "swa_jax.drafting": _CHECKS_ITSELF,
    "swa_jax.exported": _CHECKS_ITSELF,
    "swa_jax.generation": _PROTOCOL,
    "swa_jax.layouts": _CHECKS_ITSELF,
    "swa_jax.metadata": _CHECKS_ITSELF,
    "swa_jax.modules": _PROTOCOL,
    "swa_jax.paging": _CHECKS_ITSELF,
    "swa_jax.placement": _CHECKS_ITSELF,
    "swa_jax.prefilling": _CHECKS_ITSELF,
    "swa_jax.prefixes": _CHECKS_ITSELF,
    "swa_jax.prompts": _CHECKS_ITSELF,
    "swa_jax.ring": _CHECKS_ITSELF,
    "swa_jax.rotary": _CHECKS_ITSELF,
    "swa_jax.sampling": _PYTREE,
    "swa_jax.serving": _CHECKS_ITSELF,
    "swa_jax.speculation": _PROTOCOL,
}


def type_checked_modules() -> list[str]:
    """All others with such annotations. Packages are public calls, and name all below them."""
    paths = [path for package in _PACKAGES for path in (_ROOT / package).rglob("*.py")]
    modules = [
        ".".join(path.relative_to(_ROOT).with_suffix("").parts)
        for path in paths
        if path.stem != "__init__" and "from jaxtyping import" in path.read_text()
    ]
    return sorted(set(modules) - set(UNCHECKED_MODULES))


# The first example of a property includes compilation, which deadlines and the too_slow check
# would blame on the test. "normal" tries the same examples every time, so that a run's result
# depends on the code alone; HYPOTHESIS_PROFILE=long looks for new ones.
_PROFILE = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow],
}
settings.register_profile("normal", max_examples=50, derandomize=True, **_PROFILE)
settings.register_profile("long", max_examples=2000, **_PROFILE)
_PROFILE_NAME = os.environ.get("HYPOTHESIS_PROFILE", "normal")
settings.load_profile(_PROFILE_NAME)


def _wants_gpu(config: pytest.Config) -> bool:
    return config.getoption("--gpu") or "cuda" in os.environ.get("JAX_PLATFORMS", "")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu",
        action="store_true",
        help='run on an NVIDIA GPU, with the tests marked "gpu" (as JAX_PLATFORMS=cuda,cpu does)',
    )
    parser.addoption(
        "--first-cases",
        action="store_true",
        help="of each test with several cases only the first: for another JAX or Python",
    )


@pytest.hookimpl(tryfirst=True)  # before hypothesis and the workers look at the seed
def pytest_configure(config: pytest.Config) -> None:
    if not settings.default.derandomize and config.getoption("--hypothesis-seed") is None:
        config.option.hypothesis_seed = str(random.randrange(2**32))

    # The environment, not only jax.config, so that the subprocesses of a test agree.
    gpu = _wants_gpu(config)
    platforms = os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu" if gpu else "cpu")
    if gpu:
        # The workers share the card: none may take most of its memory in advance.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

    import jax

    jax.config.update("jax_platforms", platforms)
    if gpu and jax.default_backend() != "gpu":
        raise pytest.UsageError(f"expected an NVIDIA GPU, JAX found {jax.devices()}")
    # optax mixes dtypes: call it under `jax.numpy_dtype_promotion("standard")`.
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")

    install_import_hook(type_checked_modules(), "type_checker.checked")


def pytest_report_header(config: pytest.Config) -> str:
    """A profile that draws anew says with which seed: --hypothesis-seed=N draws the same again."""
    seed = config.getoption("--hypothesis-seed")
    drawn = "the same every time" if settings.default.derandomize else f"seed {seed}"
    return f"hypothesis profile {_PROFILE_NAME}: {settings.default.max_examples} examples, {drawn}"


@pytest.hookimpl(trylast=True)  # after -m, which may leave a test's later cases only
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--first-cases"):
        first = {item.nodeid.partition("[")[0]: item for item in reversed(items)}
        kept = set(first.values())
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    import jax

    skips = {} if _wants_gpu(config) else {"gpu": "needs --gpu"}
    if jax.config.jax_debug_nans:
        skips |= dict.fromkeys(("makes_nan", "donates"), "not where NaN is an error")
    for item in items:
        for mark, reason in skips.items():
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module", autouse=True)
def optimisation(request: pytest.FixtureRequest) -> None:
    """Compiles the programs of modules marked "quick_compilation" quickly."""
    from quick_compilation import use_quick_compilation

    marked = request.node.get_closest_marker("quick_compilation") is not None
    use_quick_compilation(marked and not _wants_gpu(request.config))
