"""examples/machine_code.py and whole_program.py, and the machine code of every shipped tile."""

import functools
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gpu_compiler
import jax
import jax.numpy as jnp
import kernel_model
import kernel_tables
import launches
import machine_code
import pytest
import triton_ir
import whole_program
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

ROOT = Path(__file__).parents[1]
MISSING = machine_code.missing()
compiles = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
H200, A100 = "NVIDIA H200", "NVIDIA A100-SXM4-80GB"


def array(*shape, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def call(kernel, out, *, num_warps=4, grid=(1,)):
    """A Pallas kernel for Triton whose references are whole arrays."""

    def fn(*operands):
        whole = pl.BlockSpec(memory_space=pl.ANY)
        return pl.pallas_call(
            kernel,
            out_shape=out,
            grid=grid,
            in_specs=[whole] * len(operands),
            out_specs=whole,
            compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        )(*operands)

    return fn


def doubling(x_ref, out_ref):
    out_ref[...] = x_ref[...] * 2


def product(x_ref, y_ref, out_ref):
    out_ref[...] = plgpu.dot(x_ref[...], y_ref[...])


DOUBLE = call(doubling, array(512), num_warps=1)
BF16 = functools.partial(array, dtype=jnp.bfloat16)


@functools.cache
def compiled_product(arch):
    [kernel] = triton_ir.kernels_of(call(product, array(64, 64)), BF16(64, 64), BF16(64, 64))
    return machine_code.compile_kernel(kernel, arch)


# --- kernels


def test_kernels_in_loops_branches_and_called_functions_are_found():
    def fn(x, choice):
        x = jax.lax.fori_loop(0, choice, lambda _, x: jax.jit(DOUBLE)(x), x)
        branches = [call(doubling, array(512), grid=(3, 2)), lambda x: x]
        return jax.lax.switch(choice, branches, x), DOUBLE(x)

    kernels = triton_ir.kernels_of(fn, array(512), array(dtype=jnp.int32))
    grids = sorted((kernel.name, kernel.num_warps, kernel.grid) for kernel in kernels)
    once = ("doubling", 1, (1, 1, 1))
    assert grids == [once, once, ("doubling", 4, (3, 2, 1))]
    assert all(kernel.num_stages == 1 for kernel in kernels)
    assert "tt.func public @doubling" in kernels[0].text


def test_a_function_without_kernels_has_none():
    assert triton_ir.kernels_of(jnp.sin, array(8)) == []


def test_the_lowering_is_told_the_card():
    seen = []

    def fn(x):
        seen.append(jax.sharding.get_abstract_mesh().abstract_device.device_kind)
        return x

    triton_ir.kernels_of(fn, array(8), card=A100)
    assert seen == [A100]


# --- loads and stores


def gather(mask):
    def kernel(rows_ref, index_ref, out_ref):
        index = index_ref[...]
        row, column = index[:, None], jnp.arange(64, dtype=jnp.int32)[None, :]
        chosen = {
            "index": lambda: jnp.broadcast_to((index >= 0)[:, None], (16, 64)),
            "column": lambda: jnp.broadcast_to(column < 60, (16, 64)),
            "none": lambda: None,
        }[mask]()
        other = None if chosen is None else 0
        out_ref[...] = plgpu.load(rows_ref.at[row, column], mask=chosen, other=other)

    return call(kernel, array(16, 64, dtype=jnp.uint8))


def gathers_of(mask, rows=4096):
    arguments = array(rows, 64, dtype=jnp.uint8), array(16, dtype=jnp.int32)
    [kernel] = triton_ir.kernels_of(gather(mask), *arguments)
    return [operation for operation in triton_ir.memory_operations(kernel) if operation.indexed]


@pytest.mark.parametrize(("mask", "masked"), [("index", True), ("column", False), ("none", False)])
def test_a_gather_is_masked_if_its_mask_depends_on_what_was_loaded(mask, masked):
    expected = triton_ir.MemoryOperation("load", "i8", (16, 64), masked, True, 32)
    assert gathers_of(mask) == [expected]


def test_row_addresses_have_64_bits_in_caches_above_4_gib():
    assert [operation.offset_bits for operation in gathers_of("index", 2**26 + 1)] == [64]


def test_addresses_through_loops_are_followed():
    def kernel(x_ref, next_ref, out_ref):
        def body(step, at):
            plgpu.store(out_ref.at[step], x_ref[at])
            return next_ref[at]

        jax.lax.fori_loop(0, next_ref[0], body, jnp.int32(0))

    arguments = array(32), array(32, dtype=jnp.int32)
    [found] = triton_ir.kernels_of(call(kernel, array(32)), *arguments)
    operations = triton_ir.memory_operations(found)
    loads = [(op.element, op.indexed) for op in operations if op.kind == "load" and not op.shape]
    assert loads[0] == ("i32", False)  # next_ref[0]
    assert ("f32", True) in loads
    assert ("i32", True) in loads[1:]
    assert not any(op.indexed for op in operations if op.kind == "store")


# --- machine code


@compiles
def test_a_kernel_without_a_product_uses_no_tensor_core_and_wide_loads_and_stores():
    [kernel] = triton_ir.kernels_of(DOUBLE, array(512))
    code = machine_code.compile_kernel(kernel, "sm_90")
    assert code.target == "sm_90a"
    assert not code.tensor_core
    assert (code.global_loads, code.global_stores) == ({16: 4}, {16: 4})
    assert (code.spill_stores, code.spill_loads, code.stack, code.local) == (0, 0, 0, {})
    assert code.shared_memory == 0
    assert 0 < code.registers < 64
    assert 10 < code.instructions < 100
    assert ".target sm_90a" in code.ptx
    assert "LDG.E.128" in code.sass


@compiles
@pytest.mark.parametrize(("arch", "opcode"), [("sm_80", "HMMA"), ("sm_90", "HGMMA")])
def test_a_product_runs_on_the_tensor_cores(arch, opcode):
    code = compiled_product(arch)
    assert list(code.tensor_core) == [opcode]
    assert code.shared_memory >= 2 * 64 * 64 * 2


@compiles
def test_a_kernel_with_too_few_registers_is_seen_to_spill():
    def kernel(x_ref, out_ref):
        x = x_ref[...]
        out_ref[...] = x - jnp.max(x, axis=0, keepdims=True) * jnp.sum(x, axis=1, keepdims=True)

    [found] = triton_ir.kernels_of(call(kernel, array(128, 128), num_warps=1), array(128, 128))
    code = machine_code.compile_kernel(found, "sm_90")
    assert min(code.spill_stores, code.spill_loads, code.stack) > 0
    assert sum(code.local.values()) > 0


@compiles
def test_too_much_shared_memory_is_refused_in_one_line():
    big = call(product, array(256, 256), num_warps=8)
    [kernel] = triton_ir.kernels_of(big, BF16(256, 512), BF16(512, 256))
    with pytest.raises(machine_code.CompilationError, match="Shared memory size limit") as refusal:
        machine_code.compile_kernel(kernel, "sm_89")
    assert "\n" not in str(refusal.value)


@compiles
def test_an_abort_of_the_compiler_is_an_error_and_the_next_kernel_compiles():
    def kernel(x_ref, out_ref):
        eight_bits = x_ref[...].astype(jnp.float8_e4m3fn)
        out_ref[...] = eight_bits.astype(jnp.float32)

    [found] = triton_ir.kernels_of(call(kernel, array(512)), array(512))
    with pytest.raises(machine_code.CompilationError, match="compute capability >= 89"):
        machine_code.compile_kernel(found, "sm_80")
    assert machine_code.compile_kernel(found, "sm_89").instructions


@compiles
def test_an_unknown_architecture_is_refused():
    [kernel] = triton_ir.kernels_of(DOUBLE, array(512))
    with pytest.raises(ValueError, match="arch: expected one of .*'sm_90'.*, got 'sm_70'"):
        machine_code.compile_kernel(kernel, "sm_70")


# --- whole programs


def stores(cache, at):
    return cache.at[at].set(7), cache.shape[0] + at


def reads_late(cache, at):
    new = cache.at[at].set(7)
    return new, cache[at] + new[0]


@pytest.mark.donates
@compiles
@pytest.mark.parametrize(
    ("fn", "donate", "copies", "alias"),
    [(stores, (0,), False, 2**20), (stores, (), True, 0), (reads_late, (0,), True, 2**20)],
)
def test_a_copy_of_a_cache_is_seen(fn, donate, copies, alias):
    cache = array(2**10, 2**10, dtype=jnp.uint8)
    program = whole_program.compile_program(fn, (cache, array(dtype=jnp.int32)), donate)
    assert bool(program.copies(cache.shape)) == copies
    assert program.alias_bytes == alias
    assert program.copies((2**10, 2**9)) == []


@compiles
def test_launches_and_trips_of_a_program_are_counted():
    def fn(x, end):
        x = jax.lax.fori_loop(0, 5, lambda _, x: DOUBLE(jnp.sort(DOUBLE(x))), x)
        x = jax.lax.while_loop(lambda x: x[0] < end, DOUBLE, x)
        return DOUBLE(x)

    program = whole_program.compile_program(fn, (array(512), array()))
    known, unknown = program.loops
    assert (known.trips, unknown.trips) == (5, None)
    counts = program.breakdown()

    def doublings(place):
        return sum(n for key, n in counts.items() if key[:2] == (place, "doubling"))

    assert doublings("") == 1
    assert doublings("loop 0, 5 trips") == 2
    assert doublings("loop 1, unknown trips") == 1
    assert any(place == "loop 1, unknown trips, condition" for place, _, _ in counts)
    assert any("sort" in source for _, _, source in counts)
    assert known.launches >= 3  # and the count of trips
    assert unknown.launches >= 2
    assert program.all_launches == (program.entry_launches + 5 * known.launches + unknown.launches)
    assert "| loop 0, 5 trips | 2 | doubling |" in program.table()


@compiles
def test_an_unknown_card_is_refused():
    with pytest.raises(ValueError, match="card: expected one of .*, got 'NVIDIA GTX 1'"):
        whole_program.compile_program(jnp.sin, (array(8),), card="NVIDIA GTX 1")


LAUNCHES = """\
001: kCopy         [source | next=002 (1)] kCopy
002: kWhile        [prev=001 (1) | sink]
condition:
    003: kCustomKernel [source | sink] compare grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
  body:
    004: kCustomKernel [source | sink] rows_7 grid: [9, 2, 1] threads: [64, 1, 1]  shared_memory: 768 bytes
    009: kConditional  [source | sink]
      false_branch:
        005: kWhile [source | sink]
condition:
            006: kCustomKernel [source | sink] compare grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
          body:
            007: kMemzero [source | sink] kMemzero
      true_branch:
        008: kCopy [source | sink] kCopy
    010: kDynamicSliceFusion [source | sink] params=1, results=1
        012: kCopy [source | sink] kCopy
011: kCustomKernel [source | sink] sort_1__12 grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
"""  # noqa: E501
HLO = """\
HloModule jit_f

%inner_condition (p: s32[]) -> pred[] {
}

%inner_body (p: s32[]) -> s32[] {
}

%first (p: s32[]) -> s32[] {
  ROOT %while.3 = s32[] while(%p), condition=%inner_condition, body=%inner_body
}

%second (p: s32[]) -> s32[] {
}

%outer_condition (p: s32[]) -> pred[] {
}

%outer_body (p: s32[]) -> s32[] {
  %rows.7 = s32[] fusion(%p), metadata={op_name="jit(f)/rows" stack_frame_id=1}
  ROOT %c = s32[] conditional(%p), true_computation=%first, false_computation=%second
}

ENTRY %main.1 (p: s32[]) -> s32[] {
  %w = s32[] while(%p), condition=%outer_condition, body=%outer_body, \
backend_config={"known_trip_count":{"n":"43"}}
  ROOT %sort.1 = s32[] sort(%w), metadata={op_name="jit(f)/sort"}
}
"""


def test_nested_loops_and_branches_of_the_list_of_launches_are_read():
    steps = whole_program.read_steps(LAUNCHES, HLO)
    assert [step.kind for step in steps] == ["kCopy", "kWhile", "kCustomKernel"]
    copy, outer, sort = steps
    assert (copy.launches, sort.launches, sort.source) == (1, 1, "jit(f)/sort")
    assert outer.trips == 43
    rows, conditional, last = outer.inner["body"]
    assert (rows.grid, rows.threads, rows.shared_memory) == ((9, 2, 1), (64, 1, 1), 768)
    assert (rows.source, last.kind, last.launches) == ("jit(f)/rows", "kDynamicSliceFusion", 1)
    [inner] = conditional.inner["true"]  # the HLO says which branch is which
    assert (inner.trips, inner.launches) == (None, 2)  # a condition and a memzero
    assert conditional.launches == 2
    assert outer.launches == 4
    program = whole_program.Program(SimpleNamespace(), steps)
    assert (program.entry_launches, program.all_launches) == (2, 2 + 43 * 4)
    assert program.breakdown()["loop 0, 43 trips", "rows", "jit(f)/rows"] == 1
    assert program.breakdown()["loop 0, 43 trips", "kCopy", ""] == 1
    assert program.breakdown()["loop 1, unknown trips", "kMemzero", ""] == 1


def test_trips_are_unknown_where_the_two_lists_do_not_agree():
    [_, outer, _] = whole_program.read_steps(LAUNCHES, HLO.replace("while(%p)", "other(%p)"))
    assert outer.trips is None
    assert outer.launches == 5  # with its condition


# --- the command


@pytest.fixture
def shipped(monkeypatch):
    entry = SimpleNamespace(
        name="double",
        card=H200,
        arch="sm_90",
        build=lambda: (DOUBLE, [array(512)]),
        queries=1,
        requests=(3,),
        trips=lambda: (),
        work=lambda requests: kernel_model.Work(requests * 10**9),
    )
    module = SimpleNamespace(SHIPPED=(entry,))
    monkeypatch.setitem(sys.modules, "shipped_kernels", module)
    return entry


@pytest.fixture
def run(capsys):
    def call(*arguments):
        try:
            status = machine_code.main([str(argument) for argument in arguments])
        except SystemExit as end:
            status = end.code
        output = capsys.readouterr()
        return status, output.out, output.err

    return call


@compiles
def test_the_tables_go_to_standard_output_and_between_the_marks_of_a_file(run, shipped, tmp_path):
    document = tmp_path / "README.md"
    (start, end), (time_start, time_end) = kernel_tables.MARKS
    text = f"# Title\n{start}\n%s\n{end}\nbetween\n{time_start}\n%s\n{time_end}\nmore\n"
    document.write_text(text % ("old", "old"))
    status, out, _ = run("--update", document)
    assert status == 0
    code, times = out.rstrip().split("\n\n", 1)
    head, rule, row = code.splitlines()
    assert head.startswith("| kernel | card | registers | spill bytes |")
    assert rule.count("---") == head.count("|") - 1
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:2] == ["double", H200]
    assert cells[3:5] == ["0", "0"]
    assert cells[6:] == ["none", "4", "4"]
    head, rule, row, *_ = times.splitlines()
    assert rule.count("---") == head.count("|") - 1
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    # 3 GB at 0.89 of 4.8 TB/s are 702 us, beside which all else is nothing.
    assert cells[:5] == ["double", H200, "3", "1", "702.2"]
    assert cells[8:10] == ["702.2", "bytes"]
    assert document.read_text() == text % (code, times)


@compiles
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--card", "NVIDIA GTX 1"], f"--card: expected ['{H200}'], got ['NVIDIA GTX 1']"),
        (
            ["--card", "NVIDIA GTX 1", "--card", H200],
            f"--card: expected ['{H200}'], got ['NVIDIA GTX 1']",
        ),
        (["--card", H200, "--update", "x"], "--update: writes the tables of every card, not with"),
        (["--update", "missing.md"], "No such file or directory: 'missing.md'"),
        (["--update", "unmarked.md"], "expected '<!-- kernel table -->' and then '<!-- end of"),
        (["--update", "half.md"], "expected '<!-- kernel time model -->' and then '<!-- end of"),
        (["--ptxas", "missing"], "No such file or directory: 'missing'"),
        (["--unknown"], "unrecognized arguments: --unknown"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments_are_one_line(run, shipped, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("unmarked.md").write_text("no marks\n")
    Path("half.md").write_text("\n".join(kernel_tables.MARKS[0]))
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    last = err.splitlines()[-1]  # after the progress, if any
    assert last.startswith("machine_code.py: error: ")
    assert message in last
    assert Path("unmarked.md").read_text() == "no marks\n"


def test_a_missing_tool_names_the_extra(run, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    status, out, err = run()
    assert (status, out) == (2, "")
    assert err == (
        "machine_code.py: error: ptxas: expected it in an nvidia package, found none: "
        "pip install 'swa-jax[gpu-compile]'\n"
    )


def test_launches_of_a_layer_are_those_that_one_more_layer_adds(monkeypatch, capsys):
    def compile_step(step, config, slots, card):
        made = 16 * (7 + 20 * config.num_layers) + 5  # of 16 steps, and 5 before their loop
        return SimpleNamespace(
            all_launches=made, temporary_bytes=0, loops=[], copies=lambda shape: []
        )

    monkeypatch.setattr(launches, "compile_step", compile_step)
    monkeypatch.setattr(gpu_compiler, "missing_plugin", lambda: None)
    assert launches.main(["--step", "decode", "--layers", "3"]) == 0
    head, _, row = capsys.readouterr().out.splitlines()
    assert head.startswith("| step | launches | launches of a layer |")
    assert row.startswith("| decode | 67.3 | 20.0 |")


@pytest.mark.parametrize("option", ["--layers", "--slots"])
def test_a_model_without_layers_or_slots_is_refused(option, capsys):
    with pytest.raises(SystemExit) as end:
        launches.main([option, "0"])
    out, err = capsys.readouterr()
    assert (end.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"launches.py: error: argument {option}: expected 1 ")


def test_help_names_the_cards():
    result = subprocess.run(
        [sys.executable, ROOT / "examples" / "machine_code.py", "--help"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0
    assert "B200" in result.stdout
    assert result.stderr == ""


def test_cards_have_the_shared_memory_that_nvidia_names():
    limits = {card.arch: card.block_shared_memory for card in gpu_compiler.CARDS.values()}
    assert limits == {
        "sm_80": 163 << 10,
        "sm_89": 99 << 10,
        "sm_90": 227 << 10,
        "sm_100": 227 << 10,
        "sm_120": 99 << 10,
    }
