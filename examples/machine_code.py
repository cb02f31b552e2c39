r"""What the Triton kernels compile to, for NVIDIA cards that are not there.

python examples/machine_code.py
python examples/machine_code.py --card "NVIDIA H200"
python examples/machine_code.py --update README.md

Prints two tables of the shipped kernels: what each compiles to, and a model of its time.

As a module: `kernels_of` finds the Triton kernels of a function, and `compile_kernel` has XLA and
NVIDIA's assembler and disassembler make machine code of one. XLA compiles it inside a program, as
it does where the card is: the passes it runs before Triton's own change shared memory and
registers, so Triton alone would give other figures. Needs the extra "gpu-compile".
"""

import argparse
import dataclasses
import importlib
import importlib.util
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gpu_compiler
import kernel_tables
from command_line import Parser
from gpu_compiler import CARDS, CompilationError
from jax._src.interpreters import mlir
from jax.extend.mlir import ir
from marked_text import MarkedDocument
from tqdm import tqdm
from triton_ir import Kernel, kernels_of

TENSOR_CORE = frozenset(
    ["HMMA", "IMMA", "DMMA", "QMMA", "OMMA"]  # of a warp
    + ["HGMMA", "IGMMA", "BGMMA", "QGMMA"]  # of four warps, sm_90
    + ["UTCHMMA", "UTCIMMA", "UTCQMMA", "UTCOMMA"]  # of one thread, sm_100
)
GLOBAL_LOADS = frozenset(["LDG", "LDGSTS", "UBLKCP", "UTMALDG"])
GLOBAL_STORES = frozenset(["STG", "RED", "REDG", "ATOM", "ATOMG", "UTMASTG"])
LOCAL = frozenset(["LDL", "STL"])


@dataclasses.dataclass(frozen=True)
class MachineCode:
    """A kernel compiled for one architecture. Counts are of instructions, not of executions.

    Attributes:
      target: the assembler's name of the architecture, such as "sm_90a".
      registers: per thread.
      spill_stores: bytes per thread written to local memory for want of registers.
      spill_loads: bytes per thread read back.
      stack: bytes of a thread's stack frame.
      shared_memory: bytes of one program, dynamic and static.
      instructions: all but padding.
      opcodes: how often each occurs, with its modifiers ("LDG.E.128").
      ptx: what Triton wrote.
      sass: what the assembler made of it.
    """

    target: str
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared_memory: int
    instructions: int
    opcodes: Counter[str]
    ptx: str
    sass: str

    @property
    def tensor_core(self) -> Counter[str]:
        """Tensor-core instructions by opcode, such as HGMMA."""
        counts: Counter[str] = Counter()
        for opcode, count in self._of(TENSOR_CORE).items():
            counts[opcode.split(".")[0]] += count
        return counts

    @property
    def global_loads(self) -> Counter[int]:
        """Loads from global memory by bytes a lane."""
        return _by_width(self._of(GLOBAL_LOADS))

    @property
    def global_stores(self) -> Counter[int]:
        """Stores to global memory by bytes a lane."""
        return _by_width(self._of(GLOBAL_STORES))

    @property
    def local(self) -> Counter[str]:
        """Loads from and stores to local memory: spills and indexed private arrays."""
        return self._of(LOCAL)

    def _of(self, names: frozenset[str]) -> Counter[str]:
        return Counter({op: n for op, n in self.opcodes.items() if op.split(".")[0] in names})


def _by_width(opcodes: Counter[str]) -> Counter[int]:
    widths: Counter[int] = Counter()
    for opcode, count in opcodes.items():
        bits = re.search(r"\.[US]?(8|16|64|128|256)\b", opcode)
        widths[int(bits[1]) // 8 if bits else 4] += count
    return widths


# --- machine code


def find_tool(name: str) -> Path:
    """A program of NVIDIA's, from its pip package.

    Raises:
      FileNotFoundError: the package is not installed.
    """
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob(f"*/bin/{name}")):
            return path
    raise FileNotFoundError(
        f"{name}: expected it in an nvidia package, found none: {gpu_compiler.INSTALL}"
    )


def missing() -> str | None:
    """Why kernels cannot be compiled to machine code here; None if they can."""
    try:
        find_tool("ptxas")
        find_tool("nvdisasm")
    except FileNotFoundError as error:
        return str(error)
    return gpu_compiler.missing_plugin()


def compile_kernel(kernel: Kernel, arch: str, *, ptxas: Path | None = None) -> MachineCode:
    """Compiles one kernel for one architecture.

    Args:
      kernel: of `kernels_of`.
      arch: "sm_80", "sm_89", "sm_90", "sm_100" or "sm_120".
      ptxas: another assembler than the pip package's.

    Returns:
      Its machine code and what there is to count.

    Raises:
      CompilationError: Triton or the assembler refused it.
      FileNotFoundError: a tool is missing.
      ValueError: no card of this architecture is known.
    """
    ptxas, nvdisasm = ptxas or find_tool("ptxas"), find_tool("nvdisasm")
    card = next((name for name, card in CARDS.items() if card.arch == arch), None)
    if card is None:
        raise ValueError(f"arch: expected one of {[c.arch for c in CARDS.values()]}, got {arch!r}")
    with mlir.make_ir_context():
        compiled = gpu_compiler.compile_module(ir.Module.parse(kernel.program), card)
    ptx = compiled.ptx
    target = re.findall(r"^\.target (\w+)", ptx, re.M)[0]
    dynamic = sum(map(int, re.findall(r"shared_memory: (\d+) bytes", compiled.launches)))
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        report = _run(ptxas, "-v", "-O3", f"--gpu-name={target}", source, "-o", binary).stderr
        sass = _run(nvdisasm, "-c", binary).stdout
    opcodes = Counter(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@\S+\s+)?([A-Z][\w.]*)", sass))
    opcodes.pop("NOP", None)

    def figure(pattern: str) -> int:
        return max(map(int, re.findall(pattern, report)), default=0)

    return MachineCode(
        target=target,
        registers=figure(r"Used (\d+) registers"),
        spill_stores=figure(r"(\d+) bytes spill stores"),
        spill_loads=figure(r"(\d+) bytes spill loads"),
        stack=figure(r"(\d+) bytes stack frame"),
        shared_memory=dynamic + figure(r"(\d+) bytes smem"),
        instructions=opcodes.total(),
        opcodes=opcodes,
        ptx=ptx,
        sass=sass,
    )


def _run(program: Path, *arguments: Any) -> subprocess.CompletedProcess[str]:
    result = subprocess.run([str(program), *arguments], capture_output=True, text=True)
    if result.returncode:
        lines = (result.stderr or result.stdout).strip().splitlines() or ["no message"]
        raise CompilationError(f"{program.name}: {lines[0]}")
    return result


# --- the command


def compile_shipped(
    cards: Sequence[str], ptxas: Path | None
) -> Iterator[tuple[Any, Kernel, MachineCode]]:
    """Every tile that is shipped, for its card: its entry, the kernel and the machine code."""
    shipped = importlib.import_module("shipped_kernels").SHIPPED
    known = sorted({entry.card for entry in shipped})
    if unknown := [card for card in cards if card not in known]:
        raise ValueError(f"--card: expected {known}, got {unknown}")
    chosen = [entry for entry in shipped if not cards or entry.card in cards]
    for entry in tqdm(chosen, unit="kernel", disable=None):
        fn, abstract_args = entry.build()
        kernels = kernels_of(fn, *abstract_args, card=entry.card)
        if not kernels:
            raise ValueError(f"{entry.name}: expected a Triton kernel, found none")
        for kernel in kernels:
            yield entry, kernel, compile_kernel(kernel, entry.arch, ptxas=ptxas)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="machine_code.py",
        description="Compiles every shipped Triton tile for its card, which need not be here, and "
        "prints two Markdown tables: registers per thread, bytes spilled, bytes of shared memory, "
        "instructions in all, those of the tensor cores, and 16-byte loads and stores; and the "
        "modelled time of decode batches, by term.",
        epilog=f"needs {gpu_compiler.INSTALL}",
    )
    parser.add_argument(
        "--card",
        action="append",
        default=[],
        metavar="KIND",
        help=f"only this card; may be repeated. Known: {', '.join(CARDS)}",
    )
    parser.add_argument(
        "--ptxas", type=Path, metavar="PATH", help="another assembler than the pip package's"
    )
    parser.add_argument(
        "--update",
        type=Path,
        metavar="FILE",
        help="write the tables of every card into this file, between their marks: "
        + " and ".join(mark for mark, _ in kernel_tables.MARKS),
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.update and arguments.card:
        parser.error("argument --update: writes the tables of every card, not with --card")
    reason = missing()
    if reason:
        parser.error(reason)
    try:
        document = arguments.update and MarkedDocument(arguments.update, kernel_tables.MARKS)
        compiled = list(compile_shipped(arguments.card, arguments.ptxas))
        tables = [kernel_tables.code_table(compiled), kernel_tables.time_table(compiled)]
        print("\n\n".join(tables))
        if document is not None:
            document.write(tables)
    except (CompilationError, ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
