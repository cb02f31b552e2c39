"""Programs that run once are compiled quickly: what the tests' modules and processes ask for."""

import os
from typing import Any

import jax

# JAX 0.10's compiler for CPUs spends half its time on code for fusions that it can also write in an
# older way. Later ones have no choice.
_OLDER_FUSIONS = jax.__version_info__ < (0, 11)

QUICK_COMPILATION: dict[str, Any] = {"xla_backend_optimization_level": 0}
"""Options of a program: a third of the time to compile, and the same buffers."""
if _OLDER_FUSIONS:
    QUICK_COMPILATION["xla_cpu_use_fusion_emitters"] = False


def quick_environment() -> dict[str, str]:
    """What a process is told whose programs are to compile quickly."""
    flags = os.environ.get("XLA_FLAGS", "")
    if _OLDER_FUSIONS:
        flags += " --xla_cpu_use_fusion_emitters=false"
    return {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": flags.strip()}


def use_quick_compilation(quick: bool) -> None:
    """Compiles this process's programs quickly from now on, or as users have them.

    Programs in memory are told apart by their functions and not by how they were compiled: those
    that were compiled quickly are forgotten.
    """
    if not quick and jax.config.read("jax_disable_most_optimizations"):
        jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", quick)


def _take_older_fusions_where_quick() -> None:
    """JAX has a switch for optimisations but none for this option, so its options are completed."""
    from jax._src import compiler

    complete = compiler.get_compile_options

    def get_compile_options(*arguments: Any, **named: Any) -> Any:
        if jax.config.read("jax_disable_most_optimizations"):
            given = named.get("env_options_overrides") or {}
            named["env_options_overrides"] = QUICK_COMPILATION | given
        return complete(*arguments, **named)

    compiler.get_compile_options = get_compile_options


if _OLDER_FUSIONS:
    _take_older_fusions_where_quick()
