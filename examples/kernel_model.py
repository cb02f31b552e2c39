"""How long a compiled kernel takes on a card that is not there: a model, not a measurement.

Its terms are the bytes that a call must move, the instructions that its warps issue and the clocks
of the tensor cores, both on the busiest multiprocessor. `Times` says how they are put together.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Protocol

import gpu_compiler

LAUNCH_MICROSECONDS = 2.5
"""From launch to launch of kernels that do nothing: an assumption, and in none of the terms. CUDA
graphs take less."""

SCHEDULERS = 4  # of a multiprocessor, each issues one instruction of a warp a clock: CUDA guide
WARP = 32
SHARED_BYTES_PER_CLOCK = 128  # 32 banks of 4 bytes: CUDA guide
RESERVED_SHARED_MEMORY = 1024  # bytes of a multiprocessor that every resident program costs
REGISTERS_PER_SCHEDULER = 16384
REGISTER_UNIT = 8  # registers of a thread are rounded up to it
MAX_RESIDENT_PROGRAMS = 32  # sm_80 and sm_90: CUDA guide, table of compute capabilities
OPERAND_BYTES = 2  # of a bfloat16 or float16 number

TENSOR = ("HGMMA", "HMMA")
_LABEL = re.compile(r"(\.L_\w+):")
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@\S+\s+)?([A-Z][\w.]*)\s*([^;]*);")
# Not BRA.CONV and BRA.DIV, which only leave the way where the lanes of a warp diverge.
_JUMPS = ("BRA", "BRA.U")


@dataclasses.dataclass(frozen=True)
class CardModel:
    """Speeds of a card.

    Attributes:
      card: the figures that the compiler knows.
      clock: Hz, under load.
      copy_share: of the nominal bandwidth that a copy of a large array reaches.
      tensor_flops: dense bfloat16 operations of a multiprocessor in a clock.
    """

    card: gpu_compiler.Card
    clock: float
    copy_share: float
    tensor_flops: int

    @property
    def copy_rate(self) -> float:
        """Bytes a second that a copy moves, read and written together."""
        return self.card.bandwidth * self.copy_share


# Clocks are those at which the data sheets' dense bfloat16 rates hold: H200 989 TFLOP/s =
# 132 x 4096 x 1.83 GHz, A100 312 TFLOP/s = 108 x 2048 x 1.41 GHz (NVIDIA's H100 and A100 white
# papers; the H200 has the H100's multiprocessors). Bandwidths are nominal: 4.8 and 2.04 TB/s. The
# share is an assumption, the middle of what copies are usually reported to reach, 0.85 to 0.93.
CARD_MODELS = {
    "NVIDIA H200": CardModel(gpu_compiler.CARDS["NVIDIA H200"], 1.83e9, 0.89, 4096),
    "NVIDIA A100-SXM4-80GB": CardModel(
        gpu_compiler.CARDS["NVIDIA A100-SXM4-80GB"], 1.41e9, 0.89, 2048
    ),
}


class Code(Protocol):
    """What the model reads of `machine_code.MachineCode`."""

    @property
    def registers(self) -> int: ...
    @property
    def shared_memory(self) -> int: ...
    @property
    def sass(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class Work:
    """What one call must move.

    Attributes:
      kernel_bytes: read or written by the kernel, each element that is used counted once.
      merge_bytes: read or written by what follows the kernel, 0 if nothing does.
    """

    kernel_bytes: int
    merge_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Times:
    """The modelled time of one call, in microseconds, by term.

    `model` lets the terms of the kernel overlap entirely: it is the largest of them, and then the
    merge, which waits for the kernel. `one_by_one` adds them up: a multiprocessor that holds one
    program, which loads, multiplies and stores in turn, overlaps only with the others' turns.
    Neither has the launches, nor the latency of a chain of loads.

    Attributes:
      waves: rounds of programs until every multiprocessor is done.
      bytes: the kernel's bytes at the card's copy rate.
      issue: instructions of the busiest multiprocessor, one a clock and scheduler.
      tensor: clocks of its tensor cores.
      merge: bytes of the launches after the kernel, at the copy rate.
    """

    waves: int
    bytes: float
    issue: float
    tensor: float
    merge: float

    @property
    def model(self) -> float:
        """All terms of the kernel at once, then the merge."""
        return max(self.bytes, self.issue, self.tensor) + self.merge

    @property
    def one_by_one(self) -> float:
        """The terms one after the other."""
        return self.bytes + self.issue + self.tensor + self.merge

    @property
    def bound_by(self) -> str:
        """The largest term of the kernel: "bytes", "issue" or "tensor"."""
        return max(("bytes", "issue", "tensor"), key=lambda term: getattr(self, term))


# --- instructions that are executed


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a listing: "HGMMA.64x64x16.F32.BF16" and "R24, gdesc[UR8], RZ"."""

    opcode: str
    operands: str

    @property
    def is_tensor(self) -> bool:
        return self.opcode.split(".")[0] in TENSOR


def executed(sass: str, trips: Sequence[float]) -> list[tuple[Instruction, float]]:
    """The instructions of a kernel and how often a warp executes each.

    A stretch of code that is repeated or skipped as a whole is found by its jump: from a backward
    one to its label, or from a forward one over it. Only stretches with tensor-core instructions
    count, and of nested ones the innermost: these are the blocks of rows that an attention reads.
    Everything else counts once, both sides of a choice too, and nothing after the last EXIT, where
    the slow paths of roots and quotients stand.

    Args:
      sass: the disassembler's listing.
      trips: executions of each stretch in the order of the listing, on the average of programs.

    Returns:
      Each instruction but padding, in order.

    Raises:
      ValueError: the number of stretches is another, or a loop has no tensor-core instruction.
    """
    code, labels = _read(sass)
    stretches = _stretches(code, labels)
    if len(stretches) != len(trips):
        raise ValueError(f"trips: expected one for each of {len(stretches)} blocks, got {trips}")
    counts = [1.0] * len(code)
    for stretch, times in zip(stretches, trips, strict=True):
        for i in stretch:
            counts[i] = times
    return list(zip(code, counts, strict=True))


def _read(sass: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions up to the last EXIT, and the positions of the labels among them."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif (found := _INSTRUCTION.match(line)) and found[1] != "NOP":
            code.append(Instruction(found[1], found[2]))
    exits = [i for i, instruction in enumerate(code) if instruction.opcode == "EXIT"]
    if not exits:
        raise ValueError("sass: expected a kernel with an EXIT, found none")
    code = code[: exits[-1] + 1]
    return code, {label: i for label, i in labels.items() if i < len(code)}


def _stretches(code: list[Instruction], labels: dict[str, int]) -> list[range]:
    found = set()
    for i, instruction in enumerate(code):
        label = re.search(r"\((\.L_\w+)\)", instruction.operands)
        target = labels.get(label[1]) if label and instruction.opcode in _JUMPS else None
        if target is None:
            continue
        stretch = range(target, i + 1) if target <= i else range(i + 1, target)
        if any(code[j].is_tensor for j in stretch):
            found.add(stretch)
        elif target <= i:
            raise ValueError(f"sass: no trips are known of the loop that ends in {instruction}")
    inner = [stretch for stretch in found if not any(set(other) < set(stretch) for other in found)]
    return sorted(inner, key=lambda stretch: stretch.start)


# --- tensor cores


def product_shape(opcode: str) -> tuple[int, int, int]:
    """Rows, columns and depth of one tensor-core instruction.

    Args:
      opcode: such as "HGMMA.64x32x16.F32.BF16" or "HMMA.16816.F32.BF16".

    Raises:
      ValueError: the numbers are not of 16 bits, or the shape is not known.
    """
    name, shape, *types = opcode.split(".")
    if types[-1:] not in (["BF16"], ["F16"], ["F32"]):
        raise ValueError(f"opcode: expected a product of 16-bit numbers, got {opcode!r}")
    if name == "HGMMA" and (found := re.fullmatch(r"(\d+)x(\d+)x(\d+)", shape)):
        return int(found[1]), int(found[2]), int(found[3])
    if name == "HMMA" and shape in ("1688", "16816"):
        return 16, 8, int(shape[3:])
    raise ValueError(f"opcode: expected an HGMMA or HMMA of a known shape, got {opcode!r}")


def tensor_clocks(instruction: Instruction, model: CardModel) -> float:
    """Clocks for which one instruction occupies a multiprocessor's tensor cores.

    An HGMMA reads its second operand from shared memory, and the first one too where that is not in
    registers. With few columns that takes longer than the product.
    """
    rows, columns, depth = product_shape(instruction.opcode)
    clocks = 2 * rows * columns * depth / model.tensor_flops
    if instruction.opcode.startswith("HGMMA"):
        from_registers = re.match(r"R\d+, R\d+, ", instruction.operands)
        shared = columns * depth + (0 if from_registers else rows * depth)
        clocks = max(clocks, shared * OPERAND_BYTES / SHARED_BYTES_PER_CLOCK)
    return clocks


# --- time


def resident_programs(code: Code, warps: int, card: gpu_compiler.Card) -> int:
    """Programs that a multiprocessor holds at once, by registers, shared memory and threads.

    Args:
      code: the kernel.
      warps: of a program.
      card: the card.
    """
    registers = -(-code.registers // REGISTER_UNIT) * REGISTER_UNIT * WARP  # of a warp
    return min(
        REGISTERS_PER_SCHEDULER // registers * SCHEDULERS // warps,
        card.shared_memory // (code.shared_memory + RESERVED_SHARED_MEMORY),
        card.threads // (warps * WARP),
        MAX_RESIDENT_PROGRAMS,
    )


def model_times(
    code: Code, work: Work, *, programs: int, warps: int, trips: Sequence[float], model: CardModel
) -> Times:
    """The modelled time of one call.

    The multiprocessors are filled evenly: the busiest runs ceil(programs / multiprocessors). Where
    it holds one at a time, as with every attention, a partial last wave costs a whole one.

    Pipes that take two clocks for a warp, as that of integers, are no term: they have at most 0.6
    of the instructions of the kernels that are modelled, so a fifth more than issue at most.

    Args:
      code: the kernel.
      work: bytes of the call.
      programs: in the grid.
      warps: of a program.
      trips: see `executed`.
      model: the card.

    Raises:
      ValueError: see `executed` and `product_shape`; or no program fits a multiprocessor.
    """
    card = model.card
    resident = resident_programs(code, warps, card)
    if not resident:
        raise ValueError(
            f"code: expected a program that fits a multiprocessor, got {warps} warps of "
            f"{code.registers} registers and {code.shared_memory} bytes of shared memory"
        )
    busiest = -(-programs // card.multiprocessors)
    counts = executed(code.sass, trips)
    issued = -(-busiest * warps // SCHEDULERS) * sum(times for _, times in counts)
    clocks = 0.0
    for instruction, times in counts:
        if instruction.is_tensor:
            # Four warps execute an HGMMA together, one an HMMA.
            executions = warps / 4 if instruction.opcode.startswith("HGMMA") else warps
            clocks += times * executions * tensor_clocks(instruction, model)
    return Times(
        waves=-(-programs // (card.multiprocessors * resident)),
        bytes=1e6 * work.kernel_bytes / model.copy_rate,
        issue=1e6 * issued / model.clock,
        tensor=1e6 * busiest * clocks / model.clock,
        merge=1e6 * work.merge_bytes / model.copy_rate,
    )
