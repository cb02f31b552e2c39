"""Test setup: the platform, strict promotion, hypothesis profiles and runtime type checks."""

import os

import pytest
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

# Modules whose jaxtyping annotations beartype checks in the tests. The public calls are not
# among them: they check their input themselves, and a test must see their own ValueError.
TYPE_CHECKED_MODULES = [
    "pallas_kernels.fused_store.xla",
    "pallas_kernels.indexed_attention.xla",
    "pallas_kernels.transforms",
    "swa_jax.attention",
]

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
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "normal"))


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


def pytest_configure(config: pytest.Config) -> None:
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

    install_import_hook(TYPE_CHECKED_MODULES, "beartype.beartype")


@pytest.hookimpl(trylast=True)  # after -m, which may leave a test's later cases only
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--first-cases"):
        first = {item.nodeid.partition("[")[0]: item for item in reversed(items)}
        kept = set(first.values())
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    if _wants_gpu(config):
        return
    skip = pytest.mark.skip(reason="needs --gpu")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="module", autouse=True)
def optimisation(request: pytest.FixtureRequest) -> None:
    """Compiles the programs of modules marked "quick_compilation" without most optimisations.

    Programs in memory are told apart by their functions and not by how they were compiled: none
    may reach a module that is to see them as users have them.
    """
    import jax

    marked = request.node.get_closest_marker("quick_compilation") is not None
    quick = marked and not _wants_gpu(request.config)
    if not quick and jax.config.read("jax_disable_most_optimizations"):
        jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", quick)
