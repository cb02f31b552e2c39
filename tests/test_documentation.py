"""Every code block of README.md and docs/ runs, or is a command that another test rehearses.

Python blocks of a page run in order in one namespace, in a folder of their own. A command line is
run here, or is on a list that names the test which rehearses it. Other code does not pass.
"""

import ast
import dataclasses
import functools
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import jax
import matplotlib
import pytest
from quick_compilation import quick_environment
from small_models import attention_config, decoder_config, decoder_params

import pallas_kernels
import swa_jax as swa
from swa_jax.hf_config import write_config

pytestmark = pytest.mark.quick_compilation

ROOT = Path(__file__).parent.parent
PIECES = "docs/pieces/"  # of pages, which put them in
DOCS = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("docs/**/*.md"))]
PAGES = ["README.md", *(page for page in DOCS if not page.startswith(PIECES))]
NOT_CODE = ("text", "json")
OUTPUT = "<!-- output -->"

# Commands that are run as they stand; they write nothing.
RUN = [
    "python -m swa_jax size --preset v41-flash --slots 64",
    "python -m swa_jax trace --state-id 2 --positions 127:134 --tokens 6",
]
RUN_WHEN_SLOW = [
    "python examples/attention_lab.py",
    "python examples/kv_layout_lab.py",
]
# Commands that take long, need a card or write files, and the tests that rehearse them: a function
# there, or what .ci/run calls the README's commands.
REHEARSED = {
    "python -m swa_jax doctor": "test_command_line.py::"
    "test_doctor_names_versions_devices_and_implementations",
    "pytest": "../.ci/run::test_command",
    "python examples/generate.py": "test_generate_example.py::"
    "test_shipped_model_continues_the_default_prompt_with_the_tokens_of_the_recompute",
    "python examples/generate.py --checkpoint state --checkpoint-every 100 --resume": (
        "test_generate_example.py::"
        "test_a_text_that_goes_on_from_a_checkpoint_is_the_text_of_an_undisturbed_run"
    ),
    "python examples/generate.py --evaluate-held-out --rows 16": "test_generate_example.py::"
    "test_evaluation_of_a_file_agrees_with_its_uncut_text",
    "python examples/load_hf.py PATH": "test_load_example.py::"
    "test_layers_are_loaded_described_and_compared",
    "python examples/speculative_decode.py": "test_decoder_examples.py::"
    "test_drafts_are_measured_beside_plain_decoding_of_the_same_tokens",
    "python examples/speculative_decode.py --drafter layers:1 --temperature 0": (
        "test_decoder_examples.py::"
        "test_drafts_are_measured_beside_plain_decoding_of_the_same_tokens"
    ),
    "python examples/batch_decode.py": "test_batch_decode.py::"
    "test_the_shipped_model_serves_the_sample",
    "python examples/batch_decode.py --sweep 1,2,4,8": "test_batch_decode.py::"
    "test_a_sweep_has_a_row_for_each_number_of_slots_and_no_results",
    "python examples/prefix_reuse.py": "test_saved_prefixes.py::"
    "test_the_example_reuses_prefixes_here_and_in_another_process",
    "python examples/prefix_reuse.py --plot rows.png": "test_saved_prefixes.py::"
    "test_the_example_reuses_prefixes_here_and_in_another_process",
    "python examples/beam_search.py": "test_beam_search.py::"
    "test_the_example_prints_ordered_continuations_with_greedys_score_beside",
    "python examples/sharded_decode.py": "test_several_devices.py::"
    "test_two_processes_give_the_tokens_of_one_device",
    "python examples/sharded_decode.py --devices 4 --split-heads 2": "test_several_devices.py::"
    "test_two_processes_give_the_tokens_of_one_device",
    "python examples/linen_model.py": "test_model_examples.py::"
    "test_a_models_tokens_are_the_decoders_and_one_compiled_step_serves_every_position",
    "python examples/nnx_model.py": "test_model_examples.py::"
    "test_a_models_tokens_are_the_decoders_and_one_compiled_step_serves_every_position",
    "python examples/long_decode.py": "test_decoder_examples.py::"
    "test_a_thousand_steps_are_one_program_and_take_no_more_memory",
    "python examples/benchmark.py --tiny": "test_benchmark_example.py::"
    "test_suites_run_in_a_rehearsal",
    "python examples/benchmark.py --out benchmarks/cpu.jsonl --plot benchmarks": (
        "test_benchmark_example.py::test_suites_run_in_a_rehearsal"
    ),
    "python examples/benchmark.py --suite read,step --out new.jsonl": (
        "test_benchmark_example.py::test_suites_run_in_a_rehearsal"
    ),
    "python examples/benchmark.py --suite read,step --compare old.jsonl": (
        "test_benchmark_example.py::test_a_run_that_is_worse_than_an_older_one_fails"
    ),
    "python examples/benchmark.py --device-check --tiny": "test_device_check.py::"
    "test_the_rehearsal_runs_every_stage",
    "python examples/benchmark.py --device-check --out device.json": "test_device_check.py::"
    "test_the_rehearsal_runs_every_stage",
    "python examples/benchmark_table.py benchmarks/cpu.jsonl --update README.md": (
        "test_benchmark_example.py::test_the_tables_replace_what_stands_between_their_marks"
    ),
    "python examples/machine_code.py": "test_machine_code.py::"
    "test_the_tables_go_to_standard_output_and_between_the_marks_of_a_file",
    "python examples/machine_code.py --update README.md": "test_machine_code.py::"
    "test_the_tables_go_to_standard_output_and_between_the_marks_of_a_file",
    "python examples/launches.py": "test_whole_program.py::test_the_command_prints_every_launch",
    "python examples/train_bytes.py --out bytes": "test_training_data.py::"
    "test_resumed_run_equals_an_undisturbed_one",
}
SETTINGS = ["export JAX_PLATFORMS=cpu"]


# --- reading pages


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
      language: the word behind the fence; "" for none.
      code: what stands between the fences.
      line: number of the fence's line in the page.
      mark: the last line before the fence that is not empty.
    """

    language: str
    code: str
    line: int
    mark: str


def read_blocks(text: str) -> list[Block]:
    """The fenced blocks of a page. ValueError for a fence that is not closed."""
    blocks, mark = [], ""
    lines = _with_pieces(text)
    for number, line in lines:
        fence = re.match(r"( *)(`{3,}|~{3,}) *([\w-]*)", line)
        if fence is None:
            mark = line.strip() or mark
            continue
        indent, fence_text, language = fence.groups()
        code = []
        for _, line in lines:
            if line.strip() == fence_text:
                break
            code.append(line.removeprefix(indent) + "\n")
        else:
            raise ValueError(f"line {number}: expected an end of the block, got none")
        blocks.append(Block(language, "".join(code), number, mark))
        mark = ""
    return blocks


def _with_pieces(text: str) -> Iterator[tuple[int, str]]:
    """Numbered lines; those of a piece have the number of the line that puts it in."""
    for number, line in enumerate(text.splitlines(), 1):
        piece = re.fullmatch(r'( *)--8<-- "(.+)"', line)
        if piece is None:
            yield number, line
        else:
            for part in (ROOT / piece[2]).read_text().splitlines():
                yield number, piece[1] + part


@functools.cache
def page_blocks(page: str) -> list[Block]:
    return read_blocks((ROOT / page).read_text())


def read_commands(code: str) -> list[str]:
    """Command lines without comments; those joined by && are several."""
    found = []
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words:
            end = words.index("&&") if "&&" in words else len(words)
            found.append(" ".join(shlex.quote(word) for word in words[:end]))
            words = words[end + 1 :]
    return found


def page_commands(page: str) -> list[str]:
    commands = (read_commands(b.code) for b in page_blocks(page) if b.language == "bash")
    return [command for block in commands for command in block]


COMMANDS = {command for page in PAGES for command in page_commands(page)}


def test_blocks_are_found_with_their_marks_pieces_and_indents():
    text = 'x\n<!-- a -->\n\n```python title="t"\n1\n```\n\n- y\n\n  ~~~~\n  ```\n    z\n  ~~~~\n'
    assert read_blocks(text) == [
        Block("python", "1\n", 4, "<!-- a -->"),
        Block("", "```\n  z\n", 10, "- y"),
    ]
    [block] = read_blocks('a\n\n--8<-- "docs/pieces/small_model.md"\n')
    assert (block.language, block.line, block.mark) == ("python", 3, "a")
    assert block.code.splitlines()[0] == "import flax.linen as nn"
    with pytest.raises(ValueError, match="line 1: expected an end of the block, got none"):
        read_blocks("```python\n1\n")


def test_commands_are_found_without_comments():
    code = "a 'b c'  # d\n\n# e\nf && g \\\n  h\n"
    assert read_commands(code) == ["a 'b c'", "f", "g h"]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_no_block_that_nothing_runs(page):
    for block in page_blocks(page):
        assert block.language in ("python", "bash", *NOT_CODE), f"{page}, line {block.line}"


# --- Python


def small_checkpoint(folder: Path) -> None:
    """What the README's block on a directory of weights reads."""
    config = decoder_config(attention_config(16, swa.V41), num_layers=1)
    swa.checkpoint.save_decoder(folder / "model", decoder_params(config), config)
    write_config(folder / "model", config)


PREPARED = {"README.md": small_checkpoint}
DRAFTS, SERVER, RESUME = (f"docs/how-to/{name}.md" for name in ("drafts", "server", "resume"))
DEVICES, CONTRACTS = "docs/how-to/devices.md", "docs/contracts.md"  # which makes a row of NaN


def python_pages() -> list[str]:
    return [page for page in PAGES if any(b.language == "python" for b in page_blocks(page))]


def run_python(page: str) -> None:
    names = {"__name__": "documentation"}
    for block in page_blocks(page):
        if block.language == "python":
            # Lines count as in the page, so that a failure names the line that is wrong.
            code = "\n" * block.line + block.code
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                exec(compile(code, str(ROOT / page), "exec"), names)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.makes_nan if page == CONTRACTS else ())
        for page in sorted({*python_pages()} - {DRAFTS, SERVER, RESUME, DEVICES})
    ],
)
def test_the_python_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    if page in PREPARED:
        PREPARED[page](tmp_path)
    monkeypatch.chdir(tmp_path)
    run_python(page)


@pytest.mark.slow
def test_the_python_blocks_on_drafts_run():
    run_python(DRAFTS)


@pytest.mark.slow
def test_the_python_blocks_on_many_requests_run():
    run_python(SERVER)


@pytest.mark.slow
def test_the_python_blocks_on_saving_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_python(RESUME)


@pytest.mark.slow
def test_the_python_blocks_on_devices_run_in_a_process_of_their_own(tmp_path):
    # A process has the devices it starts with.
    code = "\n".join(block.code for block in page_blocks(DEVICES) if block.language == "python")
    environment = os.environ | quick_environment() | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-c", code]
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert (result.returncode, result.stdout) == (0, ""), result.stderr[-3000:]


# --- commands


def extras(command: str) -> list[str] | None:
    """The extras that a pip command installs from the checkout; None for another command."""
    found = re.fullmatch(r"pip install -e (?:\.|'\.\[([\w,-]+)\]')", command)
    return None if found is None else (found[1] or "").split(",")


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_a_command_is_run_or_rehearsed_or_installs_an_extra(command):
    if (named := extras(command)) is not None:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        assert {"", *project["optional-dependencies"]} >= set(named)
    else:
        assert command in [*RUN, *RUN_WHEN_SLOW, *REHEARSED, *SETTINGS]


def test_no_list_has_a_command_that_no_page_has():
    assert {*RUN, *RUN_WHEN_SLOW, *REHEARSED, *SETTINGS} <= COMMANDS


@pytest.mark.parametrize("where", sorted(set(REHEARSED.values())))
def test_the_test_that_rehearses_a_command_is_there(where):
    file, _, name = where.partition("::")
    text = (ROOT / "tests" / file).read_text()
    assert re.search(rf"^(def )?{name}(\(|=)", text, re.MULTILINE)


@pytest.mark.parametrize(
    "command", [*RUN, *(pytest.param(c, marks=pytest.mark.slow) for c in RUN_WHEN_SLOW)]
)
def test_a_command_runs_with_the_output_that_the_page_shows(command):
    words = shlex.split(command)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, *words[1:]], cwd=ROOT, env=environment, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, "")
    for page in PAGES:
        for before, block in zip(page_blocks(page), page_blocks(page)[1:], strict=False):
            if block.mark == OUTPUT and read_commands(before.code)[-1] == command:
                assert block.code == result.stdout, f"{page}, line {block.line}"


def test_output_that_a_page_shows_is_that_of_a_command_that_is_run():
    shown = [
        before.code
        for page in PAGES
        for before, block in zip(page_blocks(page), page_blocks(page)[1:], strict=False)
        if block.mark == OUTPUT
    ]
    assert shown
    assert {read_commands(code)[-1] for code in shown} <= {*RUN, *RUN_WHEN_SLOW}


# --- what pages say twice


def test_the_support_matrix_is_the_readmes():
    tables = [
        (ROOT / page).read_text().partition("## What runs where\n\n")[2].partition("\n\n")[0]
        for page in ("README.md", "docs/index.md")
    ]
    assert tables[0].startswith("| | CPU | NVIDIA GPU |")
    assert tables[0] == tables[1]


def test_every_public_name_is_in_the_api():
    text = "".join(path.read_text() for path in sorted(ROOT.glob("docs/api/*.md")))
    shown = set(re.findall(r"^::: [\w.]*?(\w+)$", text, re.MULTILINE))
    shown |= set(pallas_kernels.formats.FORMATS) & set(re.findall(r"`(\w+)`", text))
    assert {*pallas_kernels.__all__, *swa.__all__} - shown == set()


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text()
    nav = text.partition("\nnav:\n")[2].partition("\nplugins:\n")[0]
    named = re.findall(r": ([\w/-]+\.md)$", nav, re.MULTILINE)
    assert sorted(named) == [page.removeprefix("docs/") for page in PAGES[1:]]


def bare_powers(text: str) -> list[str]:
    """Powers that are not code: Markdown takes two of them for bold letters."""
    return re.findall(r"\w\*\*[\w(-].*", re.sub(r"```.*?```|`[^`]+`", "", text, flags=re.DOTALL))


@pytest.mark.parametrize("page", DOCS)
def test_powers_in_a_page_are_code(page):
    assert bare_powers((ROOT / page).read_text()) == []


def test_no_paragraph_of_a_docstring_has_two_bare_powers():
    for path in sorted([*ROOT.glob("swa_jax/*.py"), *ROOT.glob("pallas_kernels/**/*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
                    if not re.match(r"\w+:\n", paragraph):  # of arguments each is one of its own
                        assert len(bare_powers(paragraph)) < 2, f"{path}: {paragraph}"


# --- pictures


@pytest.fixture(scope="module")
def draw_tour():
    examples = str(ROOT / "examples")
    sys.path.insert(0, examples)
    try:
        spec = importlib.util.spec_from_file_location("draw_tour", f"{examples}/draw_tour.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(examples)


def svg_texts(path: Path) -> tuple[str, dict]:
    """Who made an SVG, and the figures that it was drawn from."""
    names = {"dc": "http://purl.org/dc/elements/1.1/"}
    root = ET.parse(path).getroot()
    maker = root.find(".//dc:creator//dc:title", names)
    figures = root.find(".//dc:description", names)
    return maker.text, json.loads(figures.text)


def test_pictures_are_those_that_the_example_draws(draw_tour, tmp_path):
    for drawn in draw_tour.write(tmp_path):
        kept = ROOT / "docs/pictures" / drawn.name
        maker, figures = svg_texts(kept)
        assert figures == svg_texts(drawn)[1]
        if f"v{matplotlib.__version__}," in maker:
            assert kept.read_text() == drawn.read_text()
        assert kept.stat().st_size < 60_000


def test_every_picture_is_shown(draw_tour):
    text = "".join((ROOT / page).read_text() for page in PAGES)
    assert sorted(re.findall(r"\]\(pictures/(\w+)\.svg\)", text)) == sorted(draw_tour.PAIRS)


def test_figures_of_the_pictures(draw_tour):
    figures = {name: compute() for name, (compute, _) in draw_tour.PAIRS.items()}
    # A window of 4 in a ring of 6, by hand: position p in row p % 6.
    assert figures["band"]["queries"][1] == {"position": 1, "keys": [0, 1], "rows": [0, 1]}
    assert figures["band"]["queries"][7] == {
        "position": 7, "keys": [4, 5, 6, 7], "rows": [4, 5, 0, 1],
    }  # fmt: skip
    # The chapter: position 134 wraps to row 0, and 0 left the window six steps before.
    assert figures["ring"]["queries"][7] == {
        "position": 134, "first_visible": 7, "reads": [[7, 133], [0, 0]], "writes": 0,
        "replaces": 0, "stored": 134,
    }  # fmt: skip
    assert figures["ring"]["queries"][0]["stored"] == 128
    # Positions 9, 10 and 11 take the rows of 3, 4 and 5.
    assert figures["chunk"]["destroyed"] == {"9": 3, "10": 4, "11": 5}
    assert [query["lost"] for query in figures["chunk"]["queries"]] == [
        [3, 4, 5], [4, 5], [5], [], [], [],
    ]  # fmt: skip
    assert figures["chunk"]["states"][0] == [0, 1, 2, 3, 4, 5]
    assert figures["chunk"]["states"][-1] == [6, 7, 8, 9, 10, 11]
    # S >= W + T - 1
    assert figures["verify"]["lost"] == [
        [max(0, 128 + tokens - 1 - capacity) for capacity in range(128, 137)]
        for tokens in range(1, 10)
    ]
    # 640 columns in three pieces of at most 256, blocks of 64.
    window, both, ampere = figures["tiles"]["cases"]
    assert (window["programs"], both["programs"], ampere["programs"]) == (1, 3, 12)
    assert window["blocks"] == [{"list": "window", "piece": 0, "first": 0, "end": 128}]
    ends = [0, 64, 128, 192, 256, 320, 384, 448, 512]
    assert [(block["piece"], block["first"], block["end"]) for block in both["blocks"]] == [
        (0, 0, 64), (1, 64, 128),
        *zip([0, 0, 0, 1, 1, 1, 2, 2], ends[:-1], ends[1:], strict=True),
    ]  # fmt: skip
