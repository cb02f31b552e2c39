"""What runs here: versions, devices, and which implementation of each operation."""

import importlib.metadata
import platform
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels import V41, KVRows, dispatch, fused_store, indexed_attention


def print_diagnosis() -> int:
    """Prints versions and devices, and runs both operations once under every implementation.

    Returns:
      Exit status: 0, or 1 where JAX finds no device or the default choice does not run.
    """
    print(f"python      {platform.python_version()}")
    for package in ("swa-jax", "jax", "jaxlib", "flax", "numpy"):
        print(f"{package:<11} {_version(package)}")
    try:
        for device in jax.devices():
            print(f"device      {device.platform}: {device.device_kind} (id {device.id})")
    except Exception as error:  # an absent platform raises a RuntimeError or an AssertionError
        print(f"device      none: {_one_line(error)}")
        return 1
    default_runs = True
    for operation, probe in [
        ("fused_store", _probe_fused_store),
        ("indexed_attention", _probe_indexed_attention),
    ]:
        found = {name: _outcome(probe, name) for name in dispatch.IMPLEMENTATIONS}
        default = _outcome(probe, None)
        default_runs &= default is None
        if default is not None:
            print(f"{operation}: the default fails: {default}")
        else:
            on_gpu = jax.default_backend() == "gpu" and found["triton"] is None
            print(f"{operation}: implementation=None runs {'triton' if on_gpu else 'xla'}")
        for name, failure in found.items():
            print(f"  {name:<10} {failure or 'runs here'}")
    return 0 if default_runs else 1


def _probe_rows() -> KVRows:
    return KVRows.create(slots=1, rows_per_slot=2, fmt=V41.with_width(64))


def _probe_fused_store(implementation: dispatch.Implementation) -> KVRows:
    angles = jnp.zeros((1, 8), jnp.float32)
    return fused_store(
        _probe_rows(),
        jnp.ones((1, 64), jnp.bfloat16),
        jnp.zeros(1, jnp.int32),
        norm_weight=jnp.ones(64, jnp.float32),
        norm_eps=1e-6,
        cos=angles + 1,
        sin=angles,
        implementation=implementation,
    )


def _probe_indexed_attention(
    implementation: dispatch.Implementation,
) -> tuple[jax.Array, jax.Array]:
    query, indices = jnp.ones((1, 16, 64), jnp.bfloat16), jnp.zeros((1, 1), jnp.int32)
    return indexed_attention(query, _probe_rows(), indices, implementation=implementation)


def _outcome(probe: Callable, implementation: str | None) -> str | None:
    """None if the operation ran, else what stopped it, in one line."""
    try:
        jax.block_until_ready(probe(implementation))
    except Exception as error:  # a broken driver or plugin may raise anything: this reports it
        return _one_line(error)
    return None


def _one_line(error: Exception) -> str:
    text = str(error).strip() or "no reason given; JAX's own messages may have it"
    return f"{type(error).__name__}: {text}".splitlines()[0]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
