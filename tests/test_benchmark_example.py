"""examples/benchmark.py: its clock, lines, comparison with an older run, figures and tables."""

import json
import math
import os
import sys
import types
from pathlib import Path

import benchmark
import benchmark_clock as clock
import benchmark_lines
import benchmark_plots
import benchmark_table
import jax
import jax.numpy as jnp
import pytest
from benchmark_settings import make_settings
from marked_text import MarkedDocument

pytestmark = pytest.mark.quick_compilation

ROOT = Path(__file__).parents[1]

# --- the clock


class Counted(clock.Program):
    """A program whose samples are given, in microseconds."""

    def __init__(self, name, samples):
        super().__init__(name, lambda: None, 1_000_000)
        self.samples = iter(samples)

    def prepare(self, sample_us):
        pass

    def sample(self):
        return next(self.samples)


def test_ratios_and_shares_are_taken_within_a_round():
    # The machine slows down by two from round to round: neither changes.
    own, peer, product = [1.0, 2, 4], [3.0, 6, 12], [10.0, 20, 40]
    case = clock.Case(
        "read", "N=1", {"requests": 1}, [Counted("swa_jax", own), Counted("peer", peer)],
        {"product": 500},
    )  # fmt: skip
    limits = {"product": clock.Limit(Counted("product", product), 10_000)}
    first, second = clock.measure(case, limits, rounds=3, sample_us=1)
    assert first["us"] == {
        "median": 2,
        "p20": pytest.approx(1.4),
        "p80": pytest.approx(3.2),
        "best": 1,
    }
    assert second["ratio"] == {"median": 3, "p20": 3, "p80": 3}
    # 500 operations a microsecond, where the machine does 1,000.
    assert first["share"] == {"product": {"median": 0.5, "p20": 0.5, "p80": 0.5}}
    assert "ratio" not in first
    assert "share" not in second
    assert (first["temporary_bytes"], first["rounds"]) == (1_000_000, 3)


def test_a_program_has_sizes_beside_those_of_its_case():
    programs = [Counted("4 slots", [1.0]), Counted("8 slots", [2.0])]
    programs[1].parameters = {"slots": 8}
    case = clock.Case("step", "slots", {"requests": 1}, programs)
    lines = clock.measure(case, {}, rounds=1, sample_us=1)
    assert [found["parameters"] for found in lines] == [
        {"requests": 1}, {"requests": 1, "slots": 8},
    ]  # fmt: skip


def test_a_carried_argument_is_donated_and_handed_on():
    argument = jnp.zeros(3)
    program = clock.compiled("count", lambda x, y: (x + y, x.sum()), argument, 1.0, carry=True)
    assert [program.run()[0].tolist() for _ in range(3)] == [[1] * 3, [2] * 3, [3] * 3]
    assert argument.tolist() == [0, 0, 0]  # it was copied


def test_a_short_program_is_run_many_times_in_a_sample():
    calls = []
    program = clock.Program("short", lambda: calls.append(0))
    program.prepare(sample_us=50)
    assert 1 < program.runs <= 256
    calls.clear()
    assert program.sample() > 0
    assert len(calls) == 1 + program.runs  # the first is not timed


# --- lines


def line(suite, case, program, ratio=None, slower_is_better=True, **others):
    found = {"suite": suite, "case": case, "program": program, "parameters": {}} | others
    if ratio is None:
        return found
    spread = {"median": ratio, "p20": ratio, "p80": ratio}
    return found | {"ratio": spread, "slower_is_better": slower_is_better}


@pytest.mark.parametrize(
    ("then", "now", "slower_is_better", "worse"),
    [
        (2.0, 1.7, True, True),  # 2.0 / 1.7 is 1.18
        (2.0, 1.8, True, False),
        (2.0, 9.0, True, False),
        (1.0, 1.2, False, True),
        (1.0, 1.1, False, False),
        (1.0, 0.5, False, False),
    ],
)
def test_a_ratio_that_is_15_per_cent_worse_is_named(then, now, slower_is_better, worse):
    old = [line("read", "N=1", "peer", then, slower_is_better)]
    new = [line("read", "N=1", "peer", now, slower_is_better)]
    found, compared = benchmark_lines.compare(old, new)
    assert compared == 1
    assert found == ([f"read, N=1, peer: ratio {now:.2f}, was {then:.2f}"] if worse else [])


def test_only_what_both_runs_have_is_compared_and_nothing_of_peers_alone():
    alone = [line("step", "a peer's slots", "4,096 slots", ratio, None) for ratio in (9.0, 1.0)]
    old = [line("read", "N=1", "peer", 9.0), line("read", "N=1", "swa_jax"), alone[0]]
    new = [line("read", "N=2", "peer", 1.0), line("read", "N=1", "swa_jax"), alone[1]]
    assert benchmark_lines.compare(old, new) == ([], 0)


@pytest.mark.parametrize(
    ("us", "text"), [(0.5, "0.5 us"), (999, "999 us"), (1500, "1.5 ms"), (2.5e6, "2.5 s")]
)
def test_times_are_written_in_the_unit_that_reads_best(us, text):
    assert benchmark_lines.time_text(us) == text


# --- the command line


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Runs the command line over one suite of two cases; status, output, errors and lines."""
    out = tmp_path / "lines.jsonl"
    speed = {"peer": 2.0}

    def suite(settings):
        assert settings == make_settings(tiny=True)
        programs = [Counted("swa_jax", [1.0] * 9), Counted("peer", [speed["peer"]] * 9)]
        yield clock.Case("read", "N=1", {"requests": 1}, programs)
        yield clock.Figure("read", "a figure", 3.25, "MB")

    module = types.ModuleType("benchmark_of_a_test")
    module.read = suite
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(benchmark, "SUITES", {"read": module.__name__})

    def call(*arguments, peer=2.0):
        speed["peer"] = peer
        try:
            status = benchmark.main(
                ["--quiet", "--tiny", "--rounds", "3", "--out", str(out), *arguments]
            )
        except SystemExit as end:
            status = end.code
        output = capsys.readouterr()
        lines = [json.loads(text) for text in out.read_text().splitlines()] if out.exists() else []
        return status, output.out, output.err, lines

    return call


def test_lines_are_written_with_versions_and_device(run):
    status, out, err, (head, own, peer, figure) = run()
    assert (status, err) == (0, "")
    assert head["versions"]["jax"]
    assert (head["platform"], head["cores"] > 0) == ("cpu", True)
    assert (own["program"], peer["program"], peer["ratio"]["median"]) == ("swa_jax", "peer", 2)
    assert (figure["figure"], figure["value"], figure["unit"]) == ("a figure", 3.25, "MB")
    assert "| read | N=1 | peer | 2 us (2 us to 2 us) | 2 us | 2.00 (2.00 to 2.00) |" in out
    assert "| read | a figure | 3.25 MB |" in out


def test_a_run_that_is_worse_than_an_older_one_fails(run, tmp_path):
    _, _, _, lines = run()
    old = tmp_path / "old.jsonl"
    old.write_text("\n".join(map(json.dumps, lines)))
    status, out, _, _ = run("--compare", str(old), peer=1.9)
    machine = lines[0]["machine"]
    assert status == 0
    assert out.splitlines()[-1] == f"1 ratios compared with those of {machine}, 0 worse"
    status, out, _, _ = run("--compare", str(old), peer=1.5)
    assert (status, out.splitlines()[-1]) == (1, "- read, N=1, peer: ratio 1.50, was 2.00")


def test_a_run_that_shares_no_case_with_an_older_one_fails(run, tmp_path):
    old = tmp_path / "old.jsonl"
    lines = {"versions": {}, "tiny": True}, line("read", "N=2", "peer", 2.0)
    old.write_text("\n".join(map(json.dumps, lines)))
    status, out, _, _ = run("--compare", str(old))
    assert status == 1
    assert "0 ratios compared with those of a machine that it does not name, 0 worse" in out


@pytest.mark.parametrize(
    ("tiny", "found", "message"),
    [
        (False, [line("read", "N=1", "peer", 2.0)], "a run with --tiny, got one without"),
        (True, [], "ratios of read, got those of none"),
        (True, [line("step", "N=1", "peer", 2.0)], "ratios of read, got those of step"),
        (True, [line("read", "N=1", "peer", 2.0, None)], "ratios of read, got those of none"),
    ],
)
def test_an_older_run_with_nothing_to_compare_is_refused_before_anything_is_timed(
    run, tmp_path, tiny, found, message
):
    old = tmp_path / "old.jsonl"
    old.write_text("\n".join(map(json.dumps, [{"versions": {}, "tiny": tiny}, *found])))
    status, out, err, lines = run("--compare", str(old))
    assert (status, out, lines) == (2, "", [])
    assert err == f"benchmark.py: error: {old}: expected {message}\n"


def test_the_older_run_is_not_overwritten_by_this_one(run, tmp_path):
    _, _, _, lines = run()
    (tmp_path / "link.jsonl").symlink_to("lines.jsonl")
    for name in ("lines.jsonl", "link.jsonl"):
        status, out, err, left = run("--compare", str(tmp_path / name))
        assert (status, out, left) == (2, "", lines)
        message = "expected two files for --compare and --out, got one twice"
        assert err == f"benchmark.py: error: {message}\n"


def test_an_interrupted_run_keeps_what_it_measured(run, monkeypatch):
    measure = benchmark.measure

    def measure_once(*arguments):
        yield from measure(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmark, "measure", measure_once)
    status, out, err, lines = run()
    assert (status, out, err) == (130, "", "")
    assert [found.get("program") for found in lines] == [None, "swa_jax", "peer"]


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"suite": "read"}', '{"versions": {"a": 1}}'])
def test_a_file_that_is_no_older_run_is_one_line_and_nothing_is_timed(run, tmp_path, text):
    old = tmp_path / "old.jsonl"
    old.write_text(text)
    status, out, err, lines = run("--compare", str(old))
    assert (status, out, lines) == (2, "", [])
    assert err.startswith(f"benchmark.py: error: {old}: ")
    assert "expected " in err
    assert err.count("\n") == 1


def test_figures_are_drawn_into_the_folder(run, tmp_path):
    status, _, err, _ = run("--plot", str(tmp_path))
    assert status == 0
    figure = tmp_path / "time_by_requests.png"
    assert err == f"drew {figure}\n"
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "writing"], "argument --suite: expected some of read, got 'writing'"),
        (["--rounds", "0"], "argument --rounds: expected 1 or more, got 0"),
        (["--sample", "nan"], "--sample: expected a number above 0, up to 60000, got nan"),
        (["--sample", "1e308"], "--sample: expected a number above 0, up to 60000, got 1e+308"),
        (["--budget", "0"], "--budget: expected a number above 0, up to 86400, got 0.0"),
        (["--device-check", "--suite", "x"], "--suite: a device check has no suite"),
        (["--device-check", "--rounds", "4"], "--rounds: a device check has no rounds"),
        (["--budget", "4"], "argument --budget: only a device check has a budget"),
        (["--budget", "soon"], "argument --budget: invalid float value: 'soon'"),
        (["--out", "missing/r.json"], "argument --out: expected a file in a folder, got missing"),
        (["--out", "."], "argument --out: expected a file in a folder, got ."),
        (["--plot", "missing"], "argument --plot: expected a folder, got missing"),
        (["--device-check", "--compare", "x"], "argument --compare: a device check has nothing"),
        (["--unknown"], "unrecognized arguments: --unknown"),
        (["shape"], "unrecognized arguments: shape"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments_are_one_line_and_exit_status_two(run, arguments, message):
    status, out, err, lines = run(*arguments)
    assert (status, out, lines) == (2, "", [])
    assert err.startswith("benchmark.py: error: ")
    assert err.count("\n") == 1
    assert message in err


def test_suites_are_named_with_or_without_spaces():
    assert benchmark.parse_arguments(["--suite", " loop, read,loop"]).suite == ["loop", "read"]


def test_suites_that_have_no_picture_are_refused_a_folder_for_them(tmp_path, capsys):
    with pytest.raises(SystemExit):
        benchmark.parse_arguments(["--suite", "loop,codec", "--plot", str(tmp_path)])
    message = "argument --plot: expected one of read, step, layer, memory in --suite"
    assert capsys.readouterr().err == f"benchmark.py: error: {message}\n"


@pytest.mark.slow
def test_suites_run_in_a_rehearsal(tmp_path, capsys):
    # The suites startup and compile start processes and compile, and little else.
    suites = [name for name in benchmark.SUITES if name not in ("startup", "compile")]
    out = tmp_path / "lines.jsonl"
    arguments = ["--tiny", "--quiet", "--rounds", "2", "--sample", "0.1", "--out", str(out)]
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):  # as users do
        arguments += ["--suite", ",".join(suites), "--plot", str(tmp_path)]
        assert benchmark.main(arguments) == 0
    _, *lines = benchmark_lines.load(out)
    assert {found["suite"] for found in lines} == set(suites)
    for found in lines:
        numbers = [found["value"]] if "figure" in found else list(found["us"].values())
        assert all(math.isfinite(number) and number >= 0 for number in numbers), found
    assert sorted(path.name for path in tmp_path.glob("*.png")) == [
        "bytes_by_format.png", "share_of_limit.png", "time_by_context.png",
        "time_by_requests.png", "time_by_slots.png",
    ]  # fmt: skip


# --- the tables


@pytest.mark.parametrize(
    ("value", "at_least", "text"),
    [(1.5, True, "1.50 ≥ 1.4"), (1.2, True, "1.20 **<** 1.4"), (1.5, False, "1.50 **>** 1.4"),
     (1.4, False, "1.40 ≤ 1.4"), (123.4, True, "123 ≥ 1.4"),
     (None, True, "not measured")],
)  # fmt: skip
def test_a_figure_stands_beside_its_target(value, at_least, text):
    lines = [] if value is None else [line("step", "N=1", "peer", value)]
    lines.append(line("step", "N=2", "peer", 7.0))
    wanted = benchmark_table.Wanted(1.4, "step", "N=1", "peer", at_least=at_least)
    assert wanted.text(lines) == text


def test_shares_memory_and_figures_are_found():
    share = {"product": {"median": 0.25}}
    lines = [
        line("read", "N=1", "swa_jax", share=share, temporary_bytes=3_500_000),
        {"suite": "memory", "figure": "of a read", "value": 4.5, "unit": "MB", "parameters": {}},
    ]
    found = [
        benchmark_table.Wanted(1, "read", "N=1", "swa_jax", "share").found(lines),
        benchmark_table.Wanted(1, "read", "N=1", "swa_jax", "temporary").found(lines),
        benchmark_table.Wanted(1, "memory", "of a read", what="value").found(lines),
    ]
    assert found == [0.25, 3.5, 4.5]


def test_the_tables_replace_what_stands_between_their_marks(tmp_path, capsys):
    lines, document = tmp_path / "lines.jsonl", tmp_path / "page.md"
    head, *found = benchmark_lines.load(ROOT / "benchmarks" / "cpu.jsonl")
    (peer,) = (
        one for one in found
        if (one["suite"], one.get("case"), one.get("program"))
        == ("step", "N=1", "jax.nn, float32 ring")
    )  # fmt: skip
    peer["ratio"]["median"] = 1.63
    lines.write_text("\n".join(map(json.dumps, (head, *found))))
    marks = benchmark_table.MARKS
    old = f"before\n{marks[0]}\nold\n{marks[1]}\nafter\n"
    document.write_text(old)
    assert benchmark_table.main([str(lines), "--update", str(document)]) == 0
    text = document.read_text()
    assert text.startswith(f"before\n{marks[0]}\n|  | N=1 |")
    assert text.endswith(f"\n{marks[1]}\nafter\n")
    assert "| step, beside `jax.nn` over a float32 ring | 1.63 ≥ 1.4 | " in text
    assert "old" not in text
    assert capsys.readouterr().out.strip() in text
    document.write_bytes(old.replace("\n", "\r\n").encode())
    assert benchmark_table.main([str(lines), "--update", str(document)]) == 0
    assert document.read_bytes() == text.replace("\n", "\r\n").encode()
    capsys.readouterr()
    lines.write_text("\n".join(map(json.dumps, (head | {"tiny": True}, peer))))
    assert benchmark_table.main([str(lines), "--update", str(document)]) == 2
    message = f"{lines}: expected a benchmark, got a rehearsal with --tiny"
    assert capsys.readouterr() == ("", f"benchmark_table.py: error: {message}\n")


def test_figures_that_were_not_measured_are_printed_but_take_no_table_from_a_document(
    tmp_path, capsys
):
    lines, document = tmp_path / "lines.jsonl", tmp_path / "page.md"
    head = benchmark_lines.header(["step"], 15, tiny=False)
    peer = line("step", "N=1", "jax.nn, float32 ring", 1.63)
    lines.write_text("\n".join(map(json.dumps, (head, peer))))
    text = "\nold\n".join(benchmark_table.MARKS)
    document.write_text(text)
    assert benchmark_table.main([str(lines)]) == 0
    printed = capsys.readouterr().out
    assert "| step, beside `jax.nn` over a float32 ring | 1.63 ≥ 1.4 | not measured" in printed
    assert benchmark_table.main([str(lines), "--update", str(document)]) == 2
    out, err = capsys.readouterr()
    lacking = printed.count("not measured")
    assert lacking > 60
    message = f"expected every figure for --update, got none for {lacking} of them, such as 'step:"
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"benchmark_table.py: error: {lines}: {message}")
    assert document.read_text() == text


START, END = benchmark_table.MARKS


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (f"{START}\n", "expected '<!-- perf"),
        (f"{END}\n{START}\n", "expected '<!-- perf"),
        (f"{START}\n{END}\n{START}\n{END}\n", "expected '<!-- perf"),
        (f"{START}\n\udcff\n{END}\n", "expected text: "),
    ],
)
def test_a_document_without_one_place_for_the_tables_is_refused(tmp_path, text, fault):
    path = tmp_path / "page.md"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match="page.md: ") as caught:
        MarkedDocument(path, [benchmark_table.MARKS])
    assert str(caught.value).startswith(f"{path}: {fault}")


def test_places_that_overlap_are_refused_and_places_in_another_order_are_not(tmp_path):
    path = tmp_path / "page.md"
    marks = [("<x>", "<y>"), ("<z>", "<w>")]
    path.write_text("<x>\n<z>\n<y>\n<w>\n")
    with pytest.raises(ValueError, match="page.md: expected '<y>' before '<z>'"):
        MarkedDocument(path, marks)
    path.write_text("<z>\n<w>\n<x>\n<y>\n")
    MarkedDocument(path, marks).write(["first", "second"])
    assert path.read_text() == "<z>\nsecond\n<w>\n<x>\nfirst\n<y>\n"


def test_what_was_written_into_a_document_in_the_meantime_stays(tmp_path):
    path, link = tmp_path / "page.md", tmp_path / "link.md"
    path.write_text(f"before\n{START}\n{END}\n")
    link.symlink_to(path)
    document = MarkedDocument(link, [(START, END)])
    path.write_text(f"edited\n{START}\n{END}\n")
    document.write(["table"])
    assert path.read_text() == f"edited\n{START}\ntable\n{END}\n"
    assert link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [link, path]
    path.write_text("other\n")
    with pytest.raises(ValueError, match="link.md: expected '<!-- perf"):
        document.write(["table"])
    assert path.read_text() == "other\n"


def test_a_document_that_cannot_be_replaced_stays_as_it_is(tmp_path, monkeypatch):
    path = tmp_path / "page.md"
    path.write_text(f"{START}\n{END}\n")

    def full(*arguments):
        raise OSError("No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        MarkedDocument(path, [(START, END)]).write(["table"])
    assert path.read_text() == f"{START}\n{END}\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_document_that_is_a_pipe_or_a_device_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(ValueError, match="expected a regular file, got a pipe or a device"):
            MarkedDocument(path, [(START, END)])


def test_every_target_is_measured_under_its_name():
    # The lines that are committed: made by every suite, with all peers.
    lines = benchmark_lines.load(ROOT / "benchmarks" / "cpu.jsonl")
    assert "not measured" not in benchmark_table.tables(lines)


def test_the_readme_has_the_tables_of_the_lines_that_are_committed():
    lines = benchmark_lines.load(ROOT / "benchmarks" / "cpu.jsonl")
    table = "\n".join(benchmark_table.MARKS).replace("\n", f"\n{benchmark_table.tables(lines)}\n")
    assert table in (ROOT / "README.md").read_text()


def test_lines_without_anything_to_draw_are_refused(tmp_path):
    with pytest.raises(ValueError, match="found none"):
        benchmark_plots.plot_all([benchmark_lines.header(["loop"], 1, tiny=False)], tmp_path)
    assert not list(tmp_path.iterdir())
