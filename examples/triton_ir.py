"""The Triton kernels of a program as JAX lowered them, and what they load and store."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import gpu_compiler
from jax._src.pallas.triton import lowering as pallas_triton
from jax.extend.mlir import ir

ACCESSES = {
    "tt.load": "load",
    "tt.store": "store",
    "tt.atomic_rmw": "atomic",
    "tt.atomic_cas": "atomic",
}
# Operations that may multiply a row's number by the row's length.
MULTIPLICATIONS = frozenset(["arith.muli", "arith.shli"])


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One Triton kernel as JAX lowered it.

    Attributes:
      name: the name of its `pallas_call`.
      ir: the Triton module, MLIR bytecode.
      program: a StableHLO program of nothing but this call, as text.
      num_warps: warps of one program.
      num_stages: stages of Triton's pipelined loops.
      grid: programs along x, y and z.
    """

    name: str
    ir: bytes
    program: str
    num_warps: int
    num_stages: int
    grid: tuple[int, int, int]

    @functools.cached_property
    def text(self) -> str:
        """The Triton module as text."""
        with pallas_triton._new_ir_context():
            return str(ir.Module.parse(self.ir))


@dataclasses.dataclass(frozen=True)
class MemoryOperation:
    """One load or store of a Triton module.

    Attributes:
      kind: "load", "store" or "atomic".
      element: the type of one element, such as "i8" or "bf16".
      shape: the elements that one program moves, () for one.
      masked: a mask chooses the elements; where the address depends on a loaded value, one that
        depends on a loaded value too.
      indexed: the address depends on a loaded value: a gather or a scatter.
      offset_bits: of the narrowest integer in which the address is computed; where it depends on
        a loaded value, only that part of the computation counts.
    """

    kind: str
    element: str
    shape: tuple[int, ...]
    masked: bool
    indexed: bool
    offset_bits: int


# --- kernels of a function


def kernels_of(fn: Callable, *abstract_args: Any, card: str = "NVIDIA H200") -> list[Kernel]:
    """The Triton kernels of a function as it is lowered for a card.

    Args:
      fn: a function of arrays.
      *abstract_args: its arguments; shapes and dtypes suffice.
      card: JAX's device kind of the card.

    Returns:
      One entry per call in the program, those in loops, branches and called functions included.
    """
    module: Any = gpu_compiler.lower(fn, *abstract_args, card=card).compiler_ir("stablehlo")
    with module.context:
        return [_read_call(op) for op in _operations(module.operation) if _is_triton_call(op)]


def _operations(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from _operations(inner.operation)


def _is_triton_call(operation: Any) -> bool:
    return operation.name == "stablehlo.custom_call" and "triton" in str(
        operation.attributes["call_target_name"]
    )


def _read_call(call: Any) -> Kernel:
    config = ir.DictAttr(call.attributes["mhlo.backend_config"])
    number = {
        key: ir.IntegerAttr(config[key]).value
        for key in ("num_warps", "num_stages", "grid_x", "grid_y", "grid_z")
    }
    return Kernel(
        name=ir.StringAttr(config["name"]).value,
        ir=ir.StringAttr(config["ir"]).value_bytes,
        program=_program_of(call),
        num_warps=number["num_warps"],
        num_stages=number["num_stages"],
        grid=(number["grid_x"], number["grid_y"], number["grid_z"]),
    )


def _program_of(call: Any) -> str:
    arguments = [str(operand.type) for operand in call.operands]
    results = ", ".join(str(result.type) for result in call.results)
    names = ", ".join(f"%{n}" for n in range(len(arguments)))
    parameters = ", ".join(f"%{n}: {of}" for n, of in enumerate(arguments))
    attributes = ", ".join(f"{a} = {call.attributes[a]}" for a in _attribute_names(call))
    outputs = ", ".join(f"%out#{n}" for n in range(len(call.results)))
    return f"""module @kernel {{
  func.func public @main({parameters}) -> ({results}) {{
    %out:{len(call.results)} = "stablehlo.custom_call"({names}) {{{attributes}}}
      : ({", ".join(arguments)}) -> ({results})
    return {outputs} : {results}
  }}
}}"""


def _attribute_names(call: Any) -> list[str]:
    # Iterating over an operation's attributes gives names, or in older versions named attributes.
    return [getattr(attribute, "name", attribute) for attribute in call.attributes]


# --- loads and stores


def memory_operations(kernel: Kernel) -> list[MemoryOperation]:
    """The loads, stores and atomics of a kernel, before Triton has compiled it.

    Args:
      kernel: of `kernels_of`.

    Returns:
      One entry per operation in the order of the module.
    """
    with pallas_triton._new_ir_context():
        module = ir.Module.parse(kernel.ir)
        return [_describe(op) for op in _operations(module.operation) if op.name in ACCESSES]


def _describe(op: Any) -> MemoryOperation:
    operands = list(op.operands)
    pointer, mask = operands[0], None
    if op.name == "tt.load":
        value = op.results[0]
        if op.attributes["operandSegmentSizes"][1]:
            mask = operands[1]
    else:
        value = operands[1]
        if op.name != "tt.atomic_cas" and len(operands) > 2:
            mask = operands[2]
    indexed = _depends_on_a_load(pointer)
    tensor = isinstance(value.type, ir.RankedTensorType)
    return MemoryOperation(
        kind=ACCESSES[op.name],
        element=str(value.type.element_type if tensor else value.type),
        shape=tuple(value.type.shape) if tensor else (),
        masked=mask is not None and (not indexed or _depends_on_a_load(mask)),
        indexed=indexed,
        offset_bits=_offset_bits(pointer, indexed),
    )


def _depends_on_a_load(value: Any) -> bool:
    return any(_operation(found).name in ACCESSES for found in _history(value))


def _offset_bits(pointer: Any, indexed: bool) -> int:
    bits = 64
    for value in _history(pointer):
        op = _operation(value)
        checked = []
        if op.name == "tt.addptr":
            checked = [op.operands[1]]
        elif op.name in MULTIPLICATIONS and isinstance(value, ir.OpResult):
            checked = [value]
        for number in checked:
            if not indexed or _depends_on_a_load(number):
                bits = min(bits, _width(number.type))
    return bits


def _width(integers: Any) -> int:
    return getattr(integers, "element_type", integers).width


def _history(value: Any) -> set[Any]:
    """A value and all that it is computed from, back to what is loaded."""
    seen: set[Any] = set()
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if value not in seen:
            seen.add(value)
            waiting += _sources(value)
    return seen


def _operation(value: Any) -> Any:
    """The operation a value is a result of, or whose region it is an argument of."""
    owner = value.owner.owner if isinstance(value, ir.BlockArgument) else value.owner
    return owner.operation


def _sources(value: Any) -> list[Any]:
    op = _operation(value)
    if op.name in ACCESSES or op.name == "tt.func":
        return []
    operands = list(op.operands)
    if op.name == "scf.for":
        # The loop's end says how often, not where: its counter follows start and step.
        start, _, step, *initial = operands
        if isinstance(value, ir.OpResult):
            carried = value.result_number
        elif value.arg_number:
            carried = value.arg_number - 1
        else:
            return [start, step]
        return [initial[carried], _yields(op.regions[0])[carried]]
    if op.name in ("scf.if", "scf.while"):
        return operands + [passed for region in op.regions for passed in _yields(region)]
    return operands


def _yields(region: Any) -> list[Any]:
    return [
        value for block in region.blocks for value in list(block.operations)[-1].operation.operands
    ]
