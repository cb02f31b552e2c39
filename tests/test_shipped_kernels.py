"""The machine code of every shipped kernel, for cards that need not be here.

Compiled as JAX would where the card is; skipped without the extra "gpu-compile".
"""

import functools
import math

import kernel_model
import machine_code
import pytest
import triton_ir
from shipped_kernels import SHIPPED

from pallas_kernels import V41
from pallas_kernels.indexed_attention.triton_tiles import choose_tile

MISSING = machine_code.missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]


def each(entries):
    name = "{0.name} on {0.card}".format
    return pytest.mark.parametrize(
        "entry", [pytest.param(entry, id=name(entry).replace(" ", "_")) for entry in entries]
    )


every_tile = each(SHIPPED)
every_attention = each([entry for entry in SHIPPED if entry.operation == "attention"])
# One for each card: compiling takes a while.
every_plain_modelled = each(
    [e for e in SHIPPED if e.requests and e.operation == "attention" and not e.extra]
)
every_wide_v41 = each([entry for entry in SHIPPED if entry.fmt == V41])
SHARED_MEMORY = {"sm_80": 166_912, "sm_89": 101_376, "sm_90": 232_448, "sm_100": 232_448}


@functools.cache
def shipped_kernels_of(entry):
    fn, abstract_args = entry.build()
    return triton_ir.kernels_of(fn, *abstract_args, card=entry.card)


@functools.cache
def shipped_code(entry):
    kernels = shipped_kernels_of(entry)
    assert kernels
    return [machine_code.compile_kernel(kernel, entry.arch) for kernel in kernels]


@every_tile
def test_a_shipped_tile_has_a_triton_kernel_whose_gathers_are_masked(entry):
    kernels = shipped_kernels_of(entry)
    assert kernels
    operations = [op for kernel in kernels for op in triton_ir.memory_operations(kernel)]
    indexed = [op for op in operations if op.indexed]
    assert indexed
    assert [op for op in indexed if not op.masked] == []


@every_tile
def test_a_shipped_tile_spills_nothing_and_fits_its_card(entry):
    for code in shipped_code(entry):
        assert (code.spill_stores, code.spill_loads) == (0, 0)
        assert not code.local
        assert code.shared_memory <= SHARED_MEMORY[entry.arch]


@every_attention
def test_a_shipped_attention_multiplies_on_tensor_cores(entry):
    # Blackwell's own instructions leave too few registers: it runs those of a warp.
    opcode = "HGMMA" if entry.arch == "sm_90" else "HMMA"
    for code in shipped_code(entry):
        assert code.tensor_core[opcode]
        assert "trap;" not in code.ptx  # what Triton emits for a kernel that does not fit


@every_wide_v41
def test_v41_rows_of_512_values_move_16_bytes_a_lane(entry):
    [kernel], [code] = shipped_kernels_of(entry), shipped_code(entry)
    lanes = 32 * kernel.num_warps
    if entry.operation == "store":
        assert code.global_stores[16] == 1
    else:
        columns = [entry.columns] + ([512] if entry.extra else [])
        tile = choose_tile(entry.card, [entry.fmt], columns)
        assert code.global_loads[16] >= tile.keys * 512 // (16 * lanes)


@every_plain_modelled
def test_the_products_that_are_modelled_are_those_of_the_operation(entry):
    [kernel], [code] = shipped_kernels_of(entry), shipped_code(entry)
    operations = 0.0
    for instruction, times in kernel_model.executed(code.sass, entry.trips()):
        if instruction.is_tensor:
            rows, columns, depth = kernel_model.product_shape(instruction.opcode)
            warps = kernel.num_warps / (4 if instruction.opcode.startswith("HGMMA") else 1)
            operations += 2 * rows * columns * depth * warps * times
    operations *= math.prod(kernel.grid) / entry.queries  # of the programs of one query
    needed = 4 * entry.heads * entry.columns * 512
    # On Hopper both groups of four warps of a program compute all scores.
    assert operations == pytest.approx(needed * (1.5 if entry.arch == "sm_90" else 1))
