"""Whole steps of a four-layer model, compiled for an H200 that is not here.

The cache is updated in place, idle slots cost nothing, and launches are counted.
"""

import functools

import gpu_compiler
import launches
import pytest

MISSING = gpu_compiler.missing_plugin()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]
LAYERS = 4
# As measured, with a little room for another version of XLA: of a layer, a step has two kernels of
# this library, seven matrix products, three norms of two launches each, and what lies between.
MOST_LAUNCHES = {"decode": 110, "verify": 80, "prefill": 110}
by_step = pytest.mark.parametrize("step", launches.STEPS)


@functools.cache
def program(step, slots):
    return launches.compile_step(step, launches.build_config(LAYERS), slots, "NVIDIA H200")


@by_step
@pytest.mark.parametrize("slots", [64, 2048])
def test_the_cache_is_updated_in_place(step, slots):
    [block] = launches.build_cache(launches.build_config(LAYERS), slots).blocks
    compiled = program(step, slots)
    assert not compiled.copies(block.shape)
    assert compiled.alias_bytes >= block.size


@by_step
def test_memory_does_not_grow_with_idle_slots(step):
    assert program(step, 64).temporary_bytes == program(step, 2048).temporary_bytes


@by_step
def test_every_layer_runs_both_kernels(step):
    kernels = ("fused_store_kernel", "indexed_attention_kernel")
    counts = dict.fromkeys(kernels, 0)
    for (_, name, _), count in program(step, 64).breakdown().items():
        if name in counts:
            counts[name] += count
    assert counts == dict.fromkeys(kernels, LAYERS)


def test_a_block_is_one_loop_of_known_trips():
    [loop] = program("decode", 64).loops
    assert loop.trips == launches.DECODE_STEPS


@by_step
def test_launches_of_a_step(step, record_property):
    compiled = program(step, 64)
    count = launches.launches_of(step, compiled)
    record_property("launches", count)
    assert count <= MOST_LAUNCHES[step], compiled.table()


def test_the_command_prints_every_launch(capsys):
    assert launches.main(["--step", "verify", "--layers", "1", "--table"]) == 0
    out = capsys.readouterr().out
    assert "| verify | " in out
    assert "indexed_attention_kernel" in out
