"""The process in which the device check's stages run; it answers on its standard output."""

import dataclasses
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import device_bytes
import device_checks
import device_timing
import jax
from benchmark_lines import package_version
from device_cases import Context, make_context
from device_process import Found, serve

from pallas_kernels.indexed_attention import triton_tiles as tiles


def describe_device(context: Context) -> None:
    """Card, versions, and the tiles that the kernels take on it."""
    found, device = context.found, context.device
    memory = device.memory_stats() or {}
    facts = {
        "platform": device.platform,
        "card": device.device_kind,
        "kernel": context.kernel,
        "devices": len(jax.devices()),
        "compute_capability": getattr(device, "compute_capability", None),
        "multiprocessors": getattr(device, "core_count", None),
        "memory_bytes": memory.get("bytes_limit"),
        "runtime": device.client.platform_version,
        "nvidia_smi": _nvidia_smi() if device.platform == "gpu" else None,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "versions": {
            name: package_version(name)
            for name in (
                "jax",
                "jaxlib",
                "numpy",
                "flax",
                "swa-jax",
                "jax-cuda12-plugin",
                "jax-cuda13-plugin",
                "nvidia-cuda-nvcc",
            )
        },  # fmt: skip
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("JAX_", "XLA_", "CUDA_VISIBLE"))
        },
    }
    for name, value in facts.items():
        found.result(name, value)
    sizes = context.sizes
    v41, *_, fp4 = sizes.formats
    lists = {fmt.name: ([fmt], [sizes.window]) for fmt in sizes.formats}
    lists["V41 and V41_FP4"] = ([v41, fp4], [sizes.window, sizes.extra])
    for name, (formats, columns) in lists.items():
        tile = tiles.choose_tile(device.device_kind, formats, columns)
        pieces = tiles.num_pieces(sum(columns))
        found.append("tiles", {"rows": name} | dataclasses.asdict(tile) | {"pieces": pieces})


def _nvidia_smi() -> str | None:
    """Name, driver, clocks, power and temperature, as the driver's own tool says them."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    fields = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"
    try:
        result = subprocess.run(
            [tool, f"--query-gpu={fields}", "--format=csv"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip()


STAGES: dict[str, Callable[[Context], None]] = {
    "device": describe_device,
    "cast": device_bytes.check_cast,
    "store": device_bytes.check_store,
    "attention": device_checks.check_attention,
    "donation": device_checks.check_donation,
    "invariance": device_checks.check_invariance,
    "timing": device_timing.time_table,
}


def main() -> int:
    """Answers until the standard input ends."""

    def on_context(stage: Callable[[Context], None]) -> Callable[[Found, dict], None]:
        def run(found: Found, options: dict[str, Any]) -> None:
            stage(make_context(found, options))

        return run

    serve({name: on_context(stage) for name, stage in STAGES.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
