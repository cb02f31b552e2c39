"""examples/kernel_model.py: the modelled time of kernels, by hand calculations."""

from types import SimpleNamespace

import device_shapes
import gpu_compiler
import kernel_model
import numpy as np
import pytest
from kernel_model import CARD_MODELS, Instruction, Work
from shipped_kernels import A100, H200, SHIPPED, ShippedKernel

from pallas_kernels import V41, V41_FP4

WINDOW = ShippedKernel("attention", H200, V41)
TWO_LISTS = ShippedKernel("attention", H200, V41, extra=V41_FP4)
# 2 multiprocessors, 1e9 clocks a second; 1e9 bytes a second, of which a copy reaches half.
SMALL = kernel_model.CardModel(
    gpu_compiler.Card("sm_90", 2, 100_000, 99_000, 2048, 64, 1e9, 0, 1.0, 1e9), 1e9, 0.5, 4096
)


def listing(*lines):
    """A disassembler's listing: lines with a colon are labels."""
    return "\n".join(
        line if line.endswith(":") else f"        /*{16 * n:04x}*/                   {line} ;"
        for n, line in enumerate(lines)
    )


def code(sass, registers=32, shared_memory=0):
    return SimpleNamespace(registers=registers, shared_memory=shared_memory, sass=sass)


def counts(sass, trips):
    return [(i.opcode.split(".")[0], times) for i, times in kernel_model.executed(sass, trips)]


HMMA = "HMMA.16816.F32.BF16 R4, R8, R12, R4"


# --- instructions that are executed


def test_a_loop_counts_with_its_trips_and_its_guard_once():
    sass = listing(
        "MOV R1, R2", "@!P0 BRA `(.L_x_9)", "LDG.E R4, [R2]", ".L_x_3:", HMMA, "FADD R1, R1, R2",
        "@P0 BRA `(.L_x_3)", ".L_x_9:", "STG.E [R2], R4", "EXIT",
    )  # fmt: skip
    once = [("MOV", 1), ("BRA", 1), ("LDG", 1)]
    loop = [("HMMA", 5), ("FADD", 5), ("BRA", 5)]
    assert counts(sass, [5]) == [*once, *loop, ("STG", 1), ("EXIT", 1)]


def test_blocks_that_are_jumped_over_count_with_the_share_of_programs_that_run_them():
    sass = listing(
        "@P0 BRA `(.L_x_1)", HMMA, ".L_x_1:", "@P1 BRA `(.L_x_2)", "FMUL R1, R1, R2", HMMA,
        ".L_x_2:", "EXIT",
    )  # fmt: skip
    expected = [("BRA", 1), ("HMMA", 0.5), ("BRA", 1), ("FMUL", 1), ("HMMA", 1), ("EXIT", 1)]
    assert counts(sass, [0.5, 1]) == expected


def test_padding_and_what_stands_after_the_last_exit_do_not_count():
    sass = listing("NOP", "@P0 EXIT", "FADD R1, R1, R2", "EXIT", "MUFU.RSQ R1, R2", "BRA `(.L_x_1)")
    assert counts(sass, []) == [("EXIT", 1), ("FADD", 1), ("EXIT", 1)]


def test_jumps_of_lanes_that_diverge_make_no_block():
    sass = listing("BRA.DIV ~URZ, `(.L_x_1)", HMMA, ".L_x_1:", "EXIT")
    assert counts(sass, []) == [("BRA", 1), ("HMMA", 1), ("EXIT", 1)]


@pytest.mark.parametrize(
    ("lines", "trips", "message"),
    [
        (["@P0 BRA `(.L_x_1)", HMMA, ".L_x_1:", "EXIT"], [], "one for each of 1 blocks"),
        ([".L_x_1:", "FADD R1, R1, R2", "@P0 BRA `(.L_x_1)", "EXIT"], [], "no trips are known"),
        (["FADD R1, R1, R2"], [], "with an EXIT"),
    ],
)
def test_code_that_is_not_understood_is_refused(lines, trips, message):
    with pytest.raises(ValueError, match=message):
        kernel_model.executed(listing(*lines), trips)


@pytest.mark.parametrize(
    ("entry", "trips"),
    [
        (WINDOW, (1,)),
        (ShippedKernel("attention", A100, V41), (2,)),  # 128 keys, 64 at a time
        # Three pieces of 64 keys share 2 blocks of the window and 8 of the other list, as 1, 1, 0
        # and 3, 3, 2.
        (TWO_LISTS, (2 / 3, 1, 1, 2 / 3)),
        (ShippedKernel("attention", A100, V41, extra=V41_FP4), (2 / 3, 8 / 3)),
        (ShippedKernel("store", H200, V41), ()),
    ],
    ids=["H200", "A100", "H200_pieces", "A100_pieces", "store"],
)
def test_trips_follow_from_the_tile(entry, trips):
    assert entry.trips() == pytest.approx(trips)


# --- tensor cores


@pytest.mark.parametrize(
    ("opcode", "shape"),
    [
        ("HGMMA.64x32x16.F32.BF16", (64, 32, 16)),
        ("HGMMA.64x256x16.F32", (64, 256, 16)),
        ("HMMA.16816.F32.BF16", (16, 8, 16)),
        ("HMMA.1688.F32.BF16", (16, 8, 8)),
    ],
)
def test_shapes_of_products(opcode, shape):
    assert kernel_model.product_shape(opcode) == shape


@pytest.mark.parametrize("opcode", ["HMMA.1688.F32.TF32", "HGMMA.64x8x8.F32.TF32", "HMMA.884.F32"])
def test_products_of_other_numbers_or_shapes_are_refused(opcode):
    with pytest.raises(ValueError, match=f"opcode: expected .*, got '{opcode}'"):
        kernel_model.product_shape(opcode)


@pytest.mark.parametrize(
    ("card", "opcode", "operands", "clocks"),
    [
        # 2 x 16 x 8 x 16 = 4096 operations, 2048 a clock.
        (A100, "HMMA.16816.F32.BF16", "R4, R8, R12, R4", 2),
        # 131,072 operations, 4096 a clock; as long as 2 KB and 2 KB from shared memory.
        (H200, "HGMMA.64x64x16.F32.BF16", "R24, gdesc[UR8], R24, gsb0", 32),
        # 65,536 operations are 16 clocks; 1 KB from shared memory takes 8, and 3 KB take 24.
        (H200, "HGMMA.64x32x16.F32.BF16", "R136, R28, gdesc[UR8].tnspB, R136", 16),
        (H200, "HGMMA.64x32x16.F32.BF16", "R136, gdesc[UR8], R136", 24),
    ],
)
def test_clocks_of_products(card, opcode, operands, clocks):
    instruction = Instruction(opcode, operands)
    assert kernel_model.tensor_clocks(instruction, CARD_MODELS[card]) == clocks


@pytest.mark.parametrize(("card", "rate"), [(H200, 989e12), (A100, 312e12)])
def test_cards_have_the_tensor_rates_of_their_data_sheets(card, rate):
    model = CARD_MODELS[card]
    product = model.card.multiprocessors * model.tensor_flops * model.clock
    assert product == pytest.approx(rate, rel=1e-3)


# --- bytes


def test_bytes_of_an_attention():
    # A request has 65,536 bytes of queries and as many of outputs, 128 rows of 528 bytes, 512 of
    # indices, 256 of angles and 256 of lse: 199,680. The sinks are 256 bytes for all.
    assert WINDOW.work(1) == Work(199_936)
    assert WINDOW.work(512) == Work(512 * 199_680 + 256)


def test_bytes_of_an_attention_in_pieces_and_of_their_merge():
    # Beside queries and angles 128 rows of 528 and 512 of 288 bytes, and 4 bytes an index: 283,392.
    # Sums of 64 heads: three times 512 values, a peak and a mass in float32: 394,752.
    [read, sums, written] = [65_536 + 256 + 128 * 532 + 512 * 292, 3 * 64 * 514 * 4, 65_536 + 256]
    assert (read, sums) == (283_392, 394_752)
    assert TWO_LISTS.work(2) == Work(2 * (read + sums), 2 * (sums + written + 256) + 256)


def test_bytes_of_a_store():
    # 1,024 of latent, 4 of slot, 256 of angles, 528 of row; 2,048 of the weight.
    assert ShippedKernel("store", H200, V41).work(10) == Work(10 * 1812 + 2048)


def test_the_bytes_are_those_that_the_benchmark_counts():
    entries = {"indexed_attention": WINDOW, "fused_store": ShippedKernel("store", H200, V41)}
    n, floats = 3, np.float32
    angles = np.zeros((n, 32), floats)
    sizes = SimpleNamespace(width=512)
    q, indices = np.zeros((n, 64, 512), np.int16), np.arange(n * 128, dtype=np.int32)
    attention = (q, None, indices.reshape(n, 128), None, np.zeros(64, floats), angles, angles)
    latents, slots = np.zeros((1, n, 512), np.int16), np.zeros(n, np.int32)
    store = (None, latents, slots, np.zeros(512, floats), angles, angles)
    for inputs, (operation, entry) in zip((attention, store), entries.items(), strict=True):
        shape = device_shapes.Shape(operation, n, heads=entry.heads)
        moved, _ = device_shapes.work_of(shape, inputs, sizes)
        assert entry.work(n) == Work(moved)


# --- time


@pytest.mark.parametrize(
    ("registers", "shared_memory", "warps", "programs"),
    [
        (231, 0, 8, 1),  # 232 x 32 = 7,424 of 16,384 registers: two warps a scheduler
        (128, 0, 8, 2),  # 4,096: four warps a scheduler
        (32, 49_000, 8, 1),  # 50,024 bytes, and 100,000 are there
        (32, 48_976, 8, 2),
        (16, 0, 16, 4),  # 2,048 threads
        (170, 0, 4, 2),  # 176 x 32 = 5,632, of which 16,384 has two
        (32, 0, 1, 32),  # never more
        (255, 0, 16, 0),  # 8 warps of 256 registers are all that fits
    ],
)
def test_programs_of_a_multiprocessor(registers, shared_memory, warps, programs):
    compiled = code("", registers, shared_memory)
    assert kernel_model.resident_programs(compiled, warps, SMALL.card) == programs


def times(sass, programs, moved=(0, 0), **figures):
    return kernel_model.model_times(
        code(sass, **figures), Work(*moved), programs=programs, warps=8, trips=(), model=SMALL
    )


@pytest.mark.parametrize(("programs", "waves"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_a_partial_last_wave_costs_a_whole_one(programs, waves):
    # One program fits each of the two multiprocessors; its two warps a scheduler issue three each.
    got = times(listing("MOV R1, R2", "MOV R1, R3", "EXIT"), programs, registers=255)
    assert got.waves == waves
    assert got.issue == pytest.approx(waves * 2 * 3e-3)


def test_a_last_wave_is_spread_over_the_multiprocessors():
    got = times(listing("EXIT"), 3)  # of eight programs that fit each
    assert got.waves == 1
    assert got.issue == pytest.approx(2 * 2 * 1e-3)  # two programs on one of them


def test_the_warps_of_a_program_execute_a_product_alone_or_in_fours():
    # Eight warps: 8 times 4096 operations, and 2 times 131,072; 4096 a clock.
    single = times(listing(HMMA, "EXIT"), 2)
    assert single.tensor == pytest.approx(8e-3)
    assert times(listing(HMMA, "EXIT"), 3).tensor == pytest.approx(2 * 8e-3)  # two on one
    fours = times(listing("HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR8], R24", "EXIT"), 2)
    assert fours.tensor == pytest.approx(2 * 32e-3)


@pytest.mark.parametrize(
    ("kernel_bytes", "products", "bound_by", "model"),
    [
        (0, 0, "issue", 0.002),  # EXIT, by two warps a scheduler, at 1 GHz
        (0, 10, "tensor", 0.08),
        (1000, 10, "bytes", 2.0),  # at half of 1e9 bytes a second
    ],
)
def test_the_largest_term_binds_and_a_merge_follows(kernel_bytes, products, bound_by, model):
    got = times(listing(*[HMMA] * products, "EXIT"), 2, (kernel_bytes, 500))
    assert got.bound_by == bound_by
    assert got.merge == pytest.approx(1.0)
    assert got.model == pytest.approx(model + 1)
    assert got.one_by_one == pytest.approx(got.bytes + got.issue + got.tensor + 1)


def test_a_program_that_fits_no_multiprocessor_is_refused():
    with pytest.raises(ValueError, match="expected a program that fits"):
        times(listing("EXIT"), 1, shared_memory=100_000)


def test_batches_are_modelled_of_cards_whose_speeds_are_known():
    modelled = {entry.card for entry in SHIPPED if entry.requests}
    assert modelled == set(CARD_MODELS)
