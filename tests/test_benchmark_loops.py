"""The benchmark's suites loop, startup, memory and compile: same tokens, figures by hand."""

import benchmark_loops
import benchmark_memory
import benchmark_startup
import numpy as np
import pytest
import speculative_decode
from benchmark_settings import Settings, make_settings
from byte_model import PROMPT
from whole_copies import whole_copies

import swa_jax as swa

pytestmark = pytest.mark.quick_compilation


@pytest.mark.slow
def test_a_python_loop_chooses_the_tokens_of_the_block_loop_and_goes_on_from_them():
    model, variables = benchmark_loops.byte_model(make_settings(tiny=True))
    begin, steps = benchmark_loops.start, benchmark_loops.BLOCK
    block = benchmark_loops.block_loop(model, variables, begin(model, variables, 1), steps)
    python = benchmark_loops.python_loop(model, variables, begin(model, variables, 1))
    first, then = block(steps), block(2 * steps)
    assert first.shape == (1, steps)
    assert then.shape == (1, 2 * steps)
    assert len(np.unique(first)) > 4
    np.testing.assert_array_equal(python(steps), first)
    np.testing.assert_array_equal(python(2 * steps), then)


def result(equal: bool) -> speculative_decode.Result:
    return speculative_decode.Result(
        prompt="ordinary",
        draft_tokens=6,
        drafted_per_step=4.5,
        accepted_per_step=2.5,
        step_cost=2.0,
        break_even=1.0,
        speed=1.75,
        lowest=1.5,
        highest=2.0,
        equal=equal,
        ties=0,
    )


def drafts(monkeypatch, equal: bool) -> dict[str, float]:
    monkeypatch.setattr(speculative_decode, "measure", lambda *arguments: result(equal))
    model, variables = benchmark_loops.byte_model(make_settings(tiny=True))
    figures = benchmark_loops.drafts(model, variables, "ordinary", b"ab", 8, rounds=1)
    return {figure.name: figure.value for figure in figures}


def test_drafts_are_reported_as_they_were_measured(monkeypatch):
    assert drafts(monkeypatch, equal=True) == {
        "ordinary text: speed beside plain decoding": 1.75,
        "ordinary text: drafts proposed a step": 4.5,
        "ordinary text: drafts accepted a step": 2.5,
        "ordinary text: cost of a step in plain steps": 2.0,
        "ordinary text: drafts accepted a step to break even": 1.0,
    }


def test_drafts_that_change_the_text_are_no_figures(monkeypatch):
    with pytest.raises(ValueError, match="expected the tokens of a full recompute"):
        drafts(monkeypatch, equal=False)


def test_the_repetitive_text_repeats_well_within_the_window():
    lines = speculative_decode.REPETITIVE.splitlines()
    assert {line.split("=")[1] for line in lines} == {" None"}
    assert len(lines) == 5
    assert max(map(len, lines)) < 128 / 4


# --- startup


def test_an_import_costs_the_median_difference_of_processes_in_turn(monkeypatch):
    seconds = {
        benchmark_startup.BESIDE: iter([1.0, 1.5, 1.0]),
        benchmark_startup.OWN: iter([9.0, 1.25, 1.625, 2.0]),  # the first one is not counted
    }
    monkeypatch.setattr(benchmark_startup, "IMPORTS", 3)
    monkeypatch.setattr(benchmark_startup, "import_seconds", lambda code: next(seconds[code]))
    monkeypatch.setattr(benchmark_startup, "first_token_seconds", lambda: 5.0)
    figures = list(benchmark_startup.startup(Settings()))
    assert [figure.value for figure in figures] == [0.25, 5.0]


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A generate.py that prints its prompt and goes on as it is told."""
    monkeypatch.setattr(benchmark_startup, "EXAMPLES", tmp_path)

    def write(rest: str) -> None:
        lines = [f"import time\nprint({PROMPT!r}, end='', flush=True)", rest]
        (tmp_path / "generate.py").write_text("\n".join(lines))

    return write


def test_the_clock_stops_at_the_first_byte_after_the_prompt(job):
    job("time.sleep(0.5)\nprint('x', flush=True)\ntime.sleep(60)")
    assert 0.5 < benchmark_startup.first_token_seconds() < 30


def test_a_job_that_ends_without_a_byte_has_no_time(job):
    job("")
    with pytest.raises(ValueError, match="expected a byte after its prompt"):
        benchmark_startup.first_token_seconds()


# --- memory


def test_sizes_are_those_of_the_formats():
    figures = benchmark_memory.sizes(swa.RingGeometry(128, 134), 4096)
    assert {(figure.name, figure.value, figure.unit) for figure in figures} == {
        ("a token in a layer, V41", 528, "B"),
        ("a token in a layer, V4", 584, "B"),
        ("a token in a layer, V32", 656, "B"),
        ("a token in a layer, BF16", 1024, "B"),
        ("a token in a layer, F32", 2048, "B"),
        ("a token in a layer, V41_FP4", 288, "B"),
        ("a token in a layer, keys and values", 4096, "B"),
        ("a request in a layer, V41 ring", 0.070752, "MB"),  # 134 rows of 528 bytes
        ("a request in a layer, 4,096 V41 rows", 2.162688, "MB"),
        ("a request in a layer, 4,096 keys and values", 16.777216, "MB"),
    }


@pytest.mark.parametrize(
    ("line", "copies"),
    [
        ("  %copy.1 = u8[4,96]{1,0} copy(%p), metadata={}", 1),
        ("  ROOT %c = (u8[4,96]{1,0}, u8[4,96]{1,0}, u32[]) copy-start(%p)", 1),
        ("  %copy.1 = u8[4,32]{1,0} copy(%p)", 0),
        ("  %copy.1 = s32[4,96]{1,0} copy(%p)", 0),
        ("  %copy.1 = u8[4,96]{1,0} fusion(%p), calls=%copy_fusion", 0),
    ],
)
def test_only_copies_of_the_whole_cache_count(line, copies):
    assert len(whole_copies(f"HloModule\n{line}\n", (4, 96))) == copies


@pytest.mark.slow
@pytest.mark.parametrize("block", ["decode", "verify"])
@pytest.mark.parametrize("scan_layers", [False, True])
def test_a_block_of_steps_copies_no_cache(block, scan_layers):
    assert benchmark_memory.cache_copies(block, scan_layers) == 0
