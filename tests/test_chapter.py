"""Every figure of chapter 3 of "Inside DeepInfer", against the two labs and their --json.

The expectations are literals from the text or counted by hand; the labs compute theirs.
"""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
LABS = ("attention_lab", "kv_layout_lab")
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def _path(lab):
    return str(ROOT / "examples" / f"{lab}.py")


def _compute(lab, **options):
    return runpy.run_path(_path(lab))["compute"](**options)


def _run(lab, *arguments):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, _path(lab), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def attention():
    return _compute("attention_lab")


@pytest.fixture(scope="module")
def layout():
    return _compute("kv_layout_lab")


# --- the command line of the labs


@pytest.mark.parametrize("lab", LABS)
@pytest.mark.slow
def test_json_holds_the_computed_figures_and_plot_writes_a_png(lab, tmp_path):
    image = tmp_path / "figure.png"
    result = _run(lab, "--json", "--plot", str(image))
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout) == _compute(lab)
    data = image.read_bytes()
    assert data.startswith(PNG_SIGNATURE)
    assert len(data) > 10_000  # a drawing, not an empty canvas


@pytest.mark.parametrize(
    ("lab", "figures"),
    [
        ("attention_lab", ["15 recomputing, 5 cached", "31 recomputing, 12 cached", "2.790791"]),
        ("kv_layout_lab", ["512 MiB", "70,752 B", "275–401, 268", "[5, 4, 3, 2, 1, 0]", "7.76"]),
    ],
)
def test_text_holds_the_figures(monkeypatch, capsys, lab, figures):
    monkeypatch.setattr(sys, "argv", [lab])
    runpy.run_path(_path(lab), run_name="__main__")
    text = capsys.readouterr().out
    for figure in figures:
        assert figure in text


@pytest.mark.parametrize(
    ("lab", "arguments", "message"),
    [
        ("attention_lab", ["--window", "0"], "--window: expected 1 to 1000, got 0"),
        ("attention_lab", ["--window", "1001"], "--window: expected 1 to 1000, got 1001"),
        ("attention_lab", ["--plot", "x.nope"], "expected a name in .png, .svg, .pdf, got x.nope"),
        ("attention_lab", ["--plot", "no/such/folder/a.png"], "no/such/folder"),
        ("kv_layout_lab", ["--kv-heads", "0"], "--kv-heads: expected 1 or more, got 0"),
        ("kv_layout_lab", ["--element-bytes", "3"], "--element-bytes: invalid choice: 3"),
        ("kv_layout_lab", ["--plot", "x"], "expected a name in .png, .svg, .pdf, got x"),
        ("kv_layout_lab", ["--state-id", "-2"], "state_id: expected"),
        ("kv_layout_lab", ["--chunk-end", "3"], "chunk_end: expected 4 to 1000, got 3"),
    ],
)
def test_bad_options_are_refused_without_a_traceback(monkeypatch, capsys, lab, arguments, message):
    monkeypatch.setattr(sys, "argv", [lab, *arguments])
    with pytest.raises(SystemExit) as exit_info:
        runpy.run_path(_path(lab), run_name="__main__")
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{lab}.py: error: ")
    assert error.count("\n") == 1
    assert message in error


# --- attention over five rows


def test_the_dot_product_of_the_introduction(attention):
    assert attention["dot_product_example"] == 11


def test_rows_of_each_position(attention):
    assert attention["positions"] == [
        {"position": 0, "query": [1, 0], "key": [1, 1], "value": [1, 2]},
        {"position": 1, "query": [0, 1], "key": [-1, 1], "value": [2, -1]},
        {"position": 2, "query": [1, 1], "key": [0, 2], "value": [3, 1]},
        {"position": 3, "query": [2, 0], "key": [2, 2], "value": [2, 4]},
        {"position": 4, "query": [0, 2], "key": [-2, 2], "value": [4, -2]},
    ]


def test_work_of_full_attention(attention):
    full = attention["full"]
    assert full["recompute_projected_rows"] == 15
    assert full["cache_projected_rows"] == 5
    assert full["recompute_pairs_per_prefix"] == [1, 3, 6, 10, 15]
    assert full["recompute_pairs"] == 35
    assert full["cache_pairs_per_query"] == [1, 2, 3, 4, 5]
    assert full["cache_pairs"] == 15
    assert full["retained_rows"] == 5
    np.testing.assert_allclose(full["last_output"], [2.790791, 0.930264], rtol=0, atol=5e-7)


def test_work_of_a_window_of_three(attention):
    windowed = attention["windowed"]
    assert windowed["window"] == 3
    assert windowed["recompute_projected_rows"] == 15
    assert windowed["cache_projected_rows"] == 5
    assert windowed["recompute_pairs"] == 31
    assert windowed["cache_pairs_per_query"] == [1, 2, 3, 3, 3]
    assert windowed["cache_pairs"] == 12
    assert windowed["retained_rows"] == 3
    assert windowed["visible_positions"] == [[0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4]]
    np.testing.assert_allclose(windowed["last_output"], [3, 1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["full", "windowed", "window_of_one", "window_wider_than_input"])
def test_cached_outputs_match_every_recomputed_prefix(attention, name):
    assert attention[name]["prefix_agrees"] == [True] * 5
    assert attention[name]["largest_difference"] <= 1e-12


def test_the_query_at_position_two(attention):
    query = attention["query_at_position_2"]
    assert query["positions_read"] == [0, 1, 2]
    assert query["dots"] == [2, 0, 2]
    np.testing.assert_allclose(query["weights"], [0.4458, 0.1084, 0.4458], rtol=0, atol=5e-5)
    np.testing.assert_allclose(query["output"], [2, 1.2290], rtol=0, atol=5e-5)


def test_the_last_query_in_its_window(attention):
    query = attention["last_query_in_window"]
    assert query["positions_read"] == [2, 3, 4]
    assert query["dots"] == [4, 4, 4]
    np.testing.assert_allclose(query["weights"], [1 / 3] * 3, rtol=0, atol=1e-15)
    np.testing.assert_allclose(query["output"], [3, 1], rtol=0, atol=1e-12)


def test_a_window_of_one_returns_each_value_row(attention):
    one = attention["window_of_one"]
    assert one["window"] == 1
    assert one["outputs"] == [[1, 2], [2, -1], [3, 1], [2, 4], [4, -2]]
    assert one["each_output_is_its_value_row"] is True


def test_a_window_wider_than_the_input_is_full_attention(attention):
    wide = attention["window_wider_than_input"]
    assert wide["window"] == 8
    assert wide["agrees_with_full"] is True
    np.testing.assert_allclose(wide["outputs"], attention["full"]["outputs"], rtol=0, atol=1e-12)


def test_the_window_option_changes_the_windowed_run():
    assert _compute("attention_lab", window=2)["windowed"]["cache_pairs"] == 9
    assert _compute("attention_lab", window=7)["windowed"]["cache_pairs"] == 15


# --- bytes


@pytest.mark.parametrize(
    ("name", "full_bytes", "full_mib", "window_bytes", "window_mib"),
    [
        ("generic", 536_870_912, 512, 16_777_216, 16),
        ("generic_one_kv_head", 67_108_864, 64, 2_097_152, 2),
        ("generic_half_size_elements", 268_435_456, 256, 8_388_608, 8),
    ],
)
def test_bytes_of_separate_keys_and_values(
    layout, name, full_bytes, full_mib, window_bytes, window_mib
):
    figures = layout[name]
    assert (figures["full_bytes"], figures["full_mib"]) == (full_bytes, full_mib)
    assert (figures["window_bytes"], figures["window_mib"]) == (window_bytes, window_mib)


def test_the_generic_formula_leaves_out_the_scales(layout):
    # one byte for 32 elements: 268,435,456 / 32
    assert layout["generic_half_size_elements"]["uncounted_scale_bytes"] == 8_388_608


def test_the_generic_options_change_the_generic_figures(layout):
    changed = _compute("kv_layout_lab", kv_heads=1, bytes_per_element=1)
    assert changed["generic"]["full_bytes"] == 33_554_432
    del changed["generic"]
    assert changed.items() <= layout.items()


def test_bytes_of_the_shared_row(layout):
    row = layout["row"]
    assert (row["data_bytes"], row["scale_bytes"], row["row_bytes"]) == (512, 16, 528)
    assert (row["values"], row["values_per_scale"]) == (512, 32)
    assert (row["visible_rows"], row["visible_bytes"]) == (128, 67_584)
    assert (row["ring_rows"], row["ring_bytes"]) == (134, 70_752)
    assert row["separate_kv_bytes"] == 4096
    assert round(row["separate_over_shared"], 2) == 7.76


# --- the ring


def test_the_capacity_of_the_ring(layout):
    ring = layout["ring"]
    assert (ring["window"], ring["draft_tokens"], ring["capacity"]) == (128, 5, 134)
    assert ring["room_for_backtracking"] == 6
    assert ring["max_tokens_per_step"] == 7
    assert ring["capacity_with_prefill_extra_state"] == 262  # 134 + 128


TRACE_NAMES = (
    "position",
    "first_visible",
    "last_visible",
    "first_read_slot",
    "last_read_slot",
    "write_slot",
)


@pytest.mark.parametrize(
    "expected",
    [
        (127, 0, 127, 268, 395, 395),
        (128, 1, 128, 269, 396, 396),
        (133, 6, 133, 274, 401, 401),
        (134, 7, 134, 275, 268, 268),
    ],
)
def test_the_boundary_table_of_state_two(layout, expected):
    assert layout["owned_slots"] == [268, 401]
    (entry,) = [row for row in layout["boundary"] if row["position"] == expected[0]]
    assert entry["state_id"] == 2
    assert tuple(entry[name] for name in TRACE_NAMES) == expected


def test_the_write_that_wraps_replaces_a_row_that_left_six_steps_ago(layout):
    *before, wrapped = layout["boundary"]
    assert [entry["replaced_position"] for entry in before] == [None, None, None]
    assert wrapped["read_runs"] == [[275, 401], [268, 268]]
    assert wrapped["replaced_position"] == 0
    assert wrapped["steps_since_replaced_left"] == 6


def test_state_three_at_position_134(layout):
    entry = layout["state_3_position_134"]
    assert tuple(entry[name] for name in TRACE_NAMES) == (134, 7, 134, 409, 402, 402)
    assert entry["owned_slots"] == [402, 535]  # none belongs to state two
    assert entry == {
        **_compute("kv_layout_lab", state_id=3)["boundary"][-1],
        "owned_slots": [402, 535],
    }


def test_rows_that_a_verify_step_overwrites(layout):
    step = layout["verify_step"]
    assert step["queries"] == 6
    assert step["overwritten_visible_rows"] == {
        "128": [5, 4, 3, 2, 1, 0],
        "133": [0, 0, 0, 0, 0, 0],
        "134": [0, 0, 0, 0, 0, 0],
    }
    assert step["writes_that_harm_the_first_query"] == 5
    assert step["smallest_safe_ring"] == 133


# --- prefill: window 3, ring 5, prefix 0 to 3


def _chunk(layout, last_position):
    prefill = layout["prefill"]
    assert (prefill["window"], prefill["capacity"], prefill["prefix_end"]) == (3, 5, 3)
    (chunk,) = [entry for entry in prefill["chunks"] if entry["last_position"] == last_position]
    return chunk


def test_a_chunk_through_six_destroys_nothing_that_is_needed(layout):
    chunk = _chunk(layout, 6)
    assert chunk["needs"] == {"4": [2, 3, 4], "5": [3, 4, 5], "6": [4, 5, 6]}
    assert chunk["stores"] == [
        {"position": 4, "slot": 4, "replaces": None},
        {"position": 5, "slot": 0, "replaces": 0},
        {"position": 6, "slot": 1, "replaces": 1},
    ]
    assert chunk["destroyed_by_early_store"] == []


SEVEN = {"destroyed_position": 2, "overwriting_position": 7, "slot": 2, "queries": [4]}
EIGHT = {"destroyed_position": 3, "overwriting_position": 8, "slot": 3, "queries": [4, 5]}


@pytest.mark.parametrize(("last_position", "destroyed"), [(7, [SEVEN]), (8, [SEVEN, EIGHT])])
def test_a_longer_chunk_destroys_rows_that_early_queries_need(layout, last_position, destroyed):
    assert _chunk(layout, last_position)["destroyed_by_early_store"] == destroyed


def test_the_chunk_option_sets_the_longest_chunk():
    chunks = _compute("kv_layout_lab", chunk_end=9)["prefill"]["chunks"]
    assert [chunk["last_position"] for chunk in chunks] == [6, 7, 9]
    assert chunks[-1]["destroyed_by_early_store"][-1]["queries"] == [4, 5, 6]
