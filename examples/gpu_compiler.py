"""Lowers for NVIDIA cards that are not there, and compiles in a process of its own.

JAX's CUDA plugin compiles whole programs without a card and without a driver. What it cannot
compile may abort the process (an LLVM fatal error), so it runs in a child that answers one JSON
line with another.
"""

import atexit
import base64
import dataclasses
import importlib.util
import io
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import jax
from jax.sharding import AbstractDevice, AbstractMesh

CHILD_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
INSTALL = "pip install 'swa-jax[gpu-compile]'"


class CompilationError(RuntimeError):
    """The compiler refused its input, or aborted."""


@dataclasses.dataclass(frozen=True)
class Card:
    """What the compiler needs to know of a card.

    Attributes:
      arch: "sm_" and the compute capability.
      multiprocessors: their number.
      shared_memory: bytes a multiprocessor has.
      block_shared_memory: bytes one block may ask for.
      threads: threads a multiprocessor holds.
      float32_units: multiply-adds a multiprocessor starts each clock.
      bandwidth: bytes a second to and from the card's memory.
      l2: bytes of the second-level cache.
      clock: GHz.
      memory: bytes.
    """

    arch: str
    multiprocessors: int
    shared_memory: int
    block_shared_memory: int
    threads: int
    float32_units: int
    bandwidth: float
    l2: int
    clock: float
    memory: float

    def target_config(self, name: str) -> str:
        """XLA's description of the card, a GpuTargetConfig in text format."""
        major, minor = compute_capability(self.arch).split(".")
        info = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "shared_memory_per_block": 48 << 10,
            "shared_memory_per_core": self.shared_memory,
            "shared_memory_per_block_optin": self.block_shared_memory,
            "threads_per_core_limit": self.threads,
            "core_count": self.multiprocessors,
            "fpus_per_core": self.float32_units,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 65535,
            "block_dim_limit_z": 65535,
            "registers_per_core_limit": 65536,
            "registers_per_block_limit": 65536,
            "memory_bandwidth": int(self.bandwidth),
            "l2_cache_size": self.l2,
            "clock_rate_ghz": self.clock,
            "device_memory_size": int(self.memory),
            "cuda_compute_capability": f"{{ major: {major} minor: {minor} }}",
        }
        fields = " ".join(f"{key}: {value}" for key, value in info.items())
        return (
            f'gpu_device_info {{ {fields} }} platform_name: "CUDA" '
            "dnn_version_info { major: 9 minor: 10 } runtime_version { major: 13 } "
            f'device_description_str: "{name}"'
        )


# By the name the driver gives, which is JAX's device_kind. Figures of NVIDIA's data sheets and of
# the CUDA programming guide's table of compute capabilities.
CARDS = {
    "NVIDIA A100-SXM4-80GB": Card(
        "sm_80", 108, 167_936, 166_912, 2048, 64, 2.04e12, 40 << 20, 1.41, 80e9
    ),
    "NVIDIA L40": Card(
        "sm_89", 142, 102_400, 101_376, 1536, 128, 864e9, 96 << 20, 2.52, 48e9
    ),
    "NVIDIA H200": Card(
        "sm_90", 132, 233_472, 232_448, 2048, 128, 4.8e12, 50 << 20, 1.98, 141e9
    ),
    "NVIDIA B200": Card(
        "sm_100", 148, 233_472, 232_448, 2048, 128, 8e12, 126 << 20, 1.965, 180e9
    ),
    "NVIDIA GeForce RTX 5090": Card(
        "sm_120", 170, 102_400, 101_376, 1536, 128, 1.79e12, 96 << 20, 2.41, 32e9
    ),
}  # fmt: skip


def compute_capability(arch: str) -> str:
    """The compute capability of an architecture: "9.0" of "sm_90"."""
    digits = arch.removeprefix("sm_")
    return f"{digits[:-1]}.{digits[-1]}"


def lower(
    fn: Callable, *args: Any, card: str = "NVIDIA H200", donate: int | tuple[int, ...] = ()
) -> jax.stages.Lowered:
    """Traces and lowers a function for a card that is not there.

    Args:
      fn: a function of arrays.
      *args: its arguments; shapes and dtypes suffice.
      card: the device kind. The lowering reads it from the abstract mesh.
      donate: positions of the arguments that are given up.

    Returns:
      The lowered function, in StableHLO.
    """
    device = AbstractDevice(device_kind=card, num_cores=None, platform="gpu")
    mesh = AbstractMesh((1,), ("card",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
        # JAX 0.11 and later say so at every lowering.
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated")
        traced = jax.jit(fn, donate_argnums=donate).trace(*args)
        return traced.lower(lowering_platforms=("cuda",))


def missing_plugin() -> str | None:
    """Why programs cannot be compiled for CUDA here; None if they can."""
    plugins = importlib.util.find_spec("jax_plugins")
    if plugins and any(importlib.util.find_spec(f"jax_plugins.xla_cuda{n}") for n in (12, 13)):
        return None
    return f"expected JAX's CUDA plugin, found none: {INSTALL}"


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What XLA made of a program.

    Attributes:
      hlo: its optimised HLO, in the order of execution.
      ptx: the PTX of its own kernels and of the Triton kernels, as XLA hands it to the assembler.
      launches: XLA's list of what it launches, with grids and bytes of shared memory.
      argument_bytes: of the arguments.
      output_bytes: of the results.
      alias_bytes: of the results that take a donated argument's place.
      temporary_bytes: beside arguments and results.
    """

    hlo: str
    ptx: str
    launches: str
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int


class _Child:
    """The compiling process, started when first asked and again after an abort."""

    def __init__(self):
        self.process: subprocess.Popen | None = None
        self.errors: TextIO | None = None

    def ask(self, request: dict) -> dict:
        if self.process is None:
            self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (as long as the process)
            self.process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors,
                text=True,
                env=os.environ | CHILD_ENVIRONMENT,
            )
        assert self.process.stdin
        assert self.process.stdout
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it ended, and says why on standard error
        answer = self.process.stdout.readline()
        if answer:
            return json.loads(answer)
        raise CompilationError(self.last_words())

    def last_words(self) -> str:
        """Ends the process; the reason it gave for its abort."""
        assert self.process
        assert self.errors
        self.process.wait()
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors if line.strip()]
        status = self.close()
        said = [line for line in lines if "ERROR" in line or "Error" in line] or lines
        return f"the compiler aborted (status {status}): {(said or ['no message'])[-1]}"

    def close(self) -> int | None:
        process, errors, self.process, self.errors = self.process, self.errors, None, None
        if process is None:
            return None
        assert process.stdin
        assert process.stdout
        assert errors
        process.stdin.close()
        process.stdout.close()
        status = process.wait()
        errors.close()
        return status


_child = _Child()
atexit.register(_child.close)


def compile_module(module: Any, card: str) -> Compiled:
    """Compiles a StableHLO module as JAX would on a machine with the card.

    Args:
      module: the module, of `lower`.
      card: one of `CARDS`.

    Returns:
      What XLA made of it.

    Raises:
      CompilationError: XLA refused it, or aborted.
      ValueError: the card is not known.
    """
    if card not in CARDS:
        raise ValueError(f"card: expected one of {sorted(CARDS)}, got {card!r}")
    bytecode = io.BytesIO()
    module.operation.write_bytecode(bytecode)
    answer = _child.ask({"module": base64.b64encode(bytecode.getvalue()).decode(), "card": card})
    if "error" in answer:
        raise CompilationError(answer["error"])
    return Compiled(**answer)


# --- the child


def _compile(module: str, card: str, dumps: Path) -> dict:
    from jax._src import compiler, xla_bridge
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
    from jax.experimental import topologies
    from jax.extend.mlir import ir

    if "cuda" not in xla_bridge._backend_factories:
        xla_bridge.discover_pjrt_plugins()
    topology = topologies.get_topology_desc(
        "", "cuda", target_config=CARDS[card].target_config(card), topology="1x1x1"
    )
    with mlir.make_ir_context():
        executable: Any = compiler.backend_compile_and_load(
            topology.devices[0].client,
            ir.Module.parse(base64.b64decode(module)),
            xla_client.DeviceList(tuple(topology.devices)),
            compiler.get_compile_options(num_replicas=1, num_partitions=1),
            [],
        )
    memory = executable.get_compiled_memory_stats()
    return {
        "hlo": executable.hlo_modules()[0].to_string(),
        "ptx": _take(dumps, "*.ptx"),
        "launches": _take(dumps, "*.thunk_sequence.txt"),
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
    }


def _take(dumps: Path, pattern: str) -> str:
    return "\n".join(path.read_text() for path in sorted(dumps.glob(pattern)))


def _serve() -> None:
    # The compiler may print: what goes to the standard output must not meet the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as folder:
        # The name of this emitter stage is what makes JAX 0.12 write PTX and nothing larger.
        flags = f"--xla_dump_to={folder} --xla_dump_emitter_re=ptx"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
        for line in sys.stdin:
            try:
                answer = _compile(**json.loads(line), dumps=Path(folder))
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
            for path in Path(folder).iterdir():
                path.unlink()
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    _serve()
