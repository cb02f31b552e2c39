r"""Saves a long prefix's rows with the byte model, and goes on from them instead of prefilling.

python examples/prefix_reuse.py
python examples/prefix_reuse.py --file FILE --plot rebuild.png --report prefix.json
"""

import argparse
import functools
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import byte_text
import jax
import numpy as np
import prefix_rebuild
from byte_model import WEIGHTS, load_model
from command_line import (
    MAX_STEPS,
    Parser,
    output_file,
    output_picture,
    print_error,
    whole_number,
)
from tqdm import tqdm

import swa_jax as swa
from swa_jax.decoding import begin_prefilled, decode_block
from swa_jax.prefilling import prefill
from swa_jax.prefixes import PrefixStore, model_fingerprint, prefill_from_prefixes

QUESTIONS = (
    b"\n\ndef main():\n    parser = ",
    b"\n\nclass Test",
    b"\n\nif __name__ == ",
)
FOLLOWING = 64  # tokens whose scores are compared after a rebuilt prefix


def continue_greedily(
    model: swa.Decoder, variables: dict, cache: swa.RingCache, last: Any, length: int, count: int
) -> list[int]:
    """The likeliest tokens after a prompt in the first state slot.

    Args:
      model: the decoder.
      variables: its parameters.
      cache: the rings; donated.
      last: [1, hidden], of the prompt's last token.
      length: tokens of the prompt.
      count: tokens to choose, 2 or more.

    Returns:
      Token ids.
    """
    window = cache.geometry.window
    state = begin_prefilled(
        model,
        variables,
        cache,
        last,
        np.zeros(1, np.int32),
        np.full(1, length, np.int32),
        oldest=np.full(1, max(length - (window - 1), 0), np.int32),
        max_new_tokens=count,
        sampling=swa.Sampling.build(1),
    )
    first = state.tokens.tolist()
    _, block = decode_block(model, variables, state, count - 1)
    return first + np.asarray(block)[0].tolist()


class Reuse:
    """Prompts through a store of prefixes, and the same ones prefilled as a whole.

    Args:
      model: the decoder.
      variables: its parameters.
      store: of prefixes.
      chunk: most tokens in one call.
      new_tokens: tokens to generate after each prompt.
    """

    def __init__(self, model, variables, store: PrefixStore, chunk: int, new_tokens: int):
        self.model, self.variables, self.store = model, variables, store
        self.chunk, self.new_tokens = chunk, new_tokens
        config = model.config
        self.empty = functools.partial(swa.RingCache.for_decoder, config, 1)

    def reused(self, prompt: np.ndarray, save_at: Sequence[int] = ()):
        """Cache, last hidden state, and tokens that were not prefilled."""
        return prefill_from_prefixes(
            self.model, self.variables, self.empty(), 0, prompt, self.store,
            save_at=save_at, chunk=self.chunk,
        )  # fmt: skip

    def whole(self, prompt: np.ndarray):
        """Cache and last hidden state."""
        ids = np.zeros(1, np.int32)
        return prefill(self.model, self.variables, self.empty(), ids, [prompt], chunk=self.chunk)

    def finish(self, prefilled: tuple[swa.RingCache, Any], prompt: np.ndarray) -> dict:
        """The tokens after a prompt, and a sha256 of the rows before them."""
        cache, last = prefilled
        rows = cache.export_slot(0, len(prompt)).to_bytes()
        tokens = continue_greedily(
            self.model, self.variables, cache, last, len(prompt), self.new_tokens
        )
        return {"tokens": tokens, "rows": hashlib.sha256(rows).hexdigest()}

    def compare(self, prompt: np.ndarray, repeats: int) -> dict:
        """Times both ways, in turn, and compares what comes of them."""
        seconds: dict[str, list[float]] = {"whole": [], "reused": []}
        outcome: dict[str, Any] = {}
        found = 0
        for _ in range(repeats):
            started = time.perf_counter()
            outcome["whole"] = jax.block_until_ready(self.whole(prompt))
            seconds["whole"].append(time.perf_counter() - started)
            started = time.perf_counter()
            cache, last, found = self.reused(prompt)
            outcome["reused"] = jax.block_until_ready((cache, last))
            seconds["reused"].append(time.perf_counter() - started)
        whole, reused = (self.finish(outcome[name], prompt) for name in seconds)
        return {
            "prompt_tokens": len(prompt),
            "reused_tokens": found,
            "seconds_whole": statistics.median(seconds["whole"]),
            "seconds_reused": statistics.median(seconds["reused"]),
            "same_rows": whole["rows"] == reused["rows"],
            "same_tokens": whole["tokens"] == reused["tokens"],
            "text": byte_text.decode(np.array(reused["tokens"])).decode("utf-8", "replace"),
        }


def run(options: argparse.Namespace, directory: Path) -> dict:
    """Saves the prefix, goes on from it in this process and another, and rebuilds it in part."""
    tokens = _tokens(options.file, options.prefix + FOLLOWING)
    prefix, following = tokens[: options.prefix], tokens[options.prefix :]
    model, variables = load_model(options.weights)
    window, layers = model.config.geometry.window, model.config.num_layers
    counts = [window * n // 4 for n in range(4, 4 * layers + 1)]
    if options.prefix <= counts[-1]:
        raise ValueError(f"--prefix: expected more than {counts[-1]} tokens, got {options.prefix}")
    store = PrefixStore(directory, model_fingerprint(model.config, variables))
    reuse = Reuse(model, variables, store, options.chunk, options.new_tokens)
    quarters = range(options.prefix // 4, options.prefix + 1, options.prefix // 4)
    save_at = sorted({-(-n // options.chunk) * options.chunk for n in quarters} - {0})
    save_at = [n for n in save_at if n < options.prefix] + [options.prefix]
    prompts = [np.append(prefix, byte_text.encode(text)) for text in QUESTIONS]
    shared = [np.append(prefix[: options.prefix * n // 8], prompts[0][-9:]) for n in (3, 7)]
    prompts = [prompt.astype(np.int32) for prompt in prompts + shared]
    with tqdm(total=3 + len(prompts) + len(counts), disable=None, leave=False) as bar:
        reuse.reused(np.append(prefix, prompts[0][-1:]), save_at)
        saved = store.longest(prompts[0])
        assert saved is not None
        path = store.save(prefix, saved)
        bar.update()
        reuse.compare(prompts[0], 1)  # compiles
        bar.update()
        results = []
        for prompt in prompts:
            results.append(reuse.compare(prompt, options.repeats))
            bar.update()
        elsewhere = _in_another_process(options, directory, prompts[0])
        here = reuse.finish(reuse.reused(prompts[0])[:2], prompts[0])
        bar.update()
        rebuilt = prefix_rebuild.measure(model, variables, prefix, following, counts, bar.update)
    return {
        "prefix_tokens": options.prefix,
        "saved_at": save_at,
        "file_bytes": path.stat().st_size,
        "row_bytes": layers * (window - 1) * model.config.fmt.row_bytes,
        "model": store.model,
        "prompts": results,
        "another_process": {
            "reused_tokens": elsewhere["reused_tokens"],
            "same_rows": elsewhere["rows"] == here["rows"],
            "same_tokens": elsewhere["tokens"] == here["tokens"],
        },
        "window": window,
        "rebuilt": rebuilt,
    }


def print_report(report: dict) -> None:
    """The report in two tables."""
    print(
        f"prefix of {report['prefix_tokens']:,} tokens, saved at "
        f"{', '.join(map(str, report['saved_at']))}: {report['file_bytes']:,} bytes a file, "
        f"{report['row_bytes']:,} of them rows"
    )
    print(
        f"{'prompt':>7} {'reused':>7} {'whole s':>9} {'reused s':>9} {'ratio':>6}  rows    tokens"
    )
    for one in report["prompts"]:
        print(
            f"{one['prompt_tokens']:>7} {one['reused_tokens']:>7} {one['seconds_whole']:>9.4f} "
            f"{one['seconds_reused']:>9.4f} {one['seconds_whole'] / one['seconds_reused']:>6.1f}  "
            f"{_same(one['same_rows']):7} {_same(one['same_tokens']):7} {one['text'][:24]!r}"
        )
    other = report["another_process"]
    print(
        f"another process, {other['reused_tokens']} tokens from the file: rows "
        f"{_same(other['same_rows'])}, tokens {_same(other['same_tokens'])}"
    )
    rebuilt = [line for line in report["rebuilt"] if line["tokens"] % report["window"] == 0]
    prefix_rebuild.print_table(rebuilt, report["window"])


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        prog="prefix_reuse.py",
        description="Saves the rows of a long prefix, goes on from them, and shows what prefilling "
        "only its last tokens would leave wrong.",
    )
    add = parser.add_argument
    add("--file", type=Path, default=Path(argparse.__file__),
        help="text whose beginning is the prefix (the source of argparse)")  # fmt: skip
    add("--prefix", type=whole_number(8, 2**31 - 1), default=4096, metavar="N",
        help="tokens of the prefix (4096)")  # fmt: skip
    add("--chunk", type=whole_number(1, MAX_STEPS), default=256, metavar="N",
        help="tokens of one prefill call (256)")  # fmt: skip
    add("--new-tokens", type=whole_number(2, MAX_STEPS), default=32, metavar="N",
        help="to generate after each (32)")  # fmt: skip
    add("--repeats", type=whole_number(1), default=3, metavar="N",
        help="times are medians of N (3)")  # fmt: skip
    add("--directory", type=Path,
        help="an existing one to keep the saved prefixes in (a temporary one)")  # fmt: skip
    add("--weights", type=Path, default=WEIGHTS,
        help="file written by train_bytes.py (the shipped one)")  # fmt: skip
    add(
        "--plot",
        type=output_picture,
        metavar="FILE",
        help="draw what is left wrong, layer by layer",
    )
    add("--report", type=output_file, metavar="FILE", help="write the results as JSON")
    add("--resume", type=Path, help=argparse.SUPPRESS)  # the other process: tokens of a prompt
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    options = parse_arguments(arguments)
    try:
        if options.resume is not None:
            print(json.dumps(_resume(options)))
            return 0
        with tempfile.TemporaryDirectory() as temporary:
            report = run(options, options.directory or Path(temporary))
        if options.report is not None:
            options.report.write_text(json.dumps(report, indent=2) + "\n")
        if options.plot is not None:
            prefix_rebuild.plot(report["rebuilt"], report["window"], options.plot)
    except (OSError, ValueError) as error:
        print_error("prefix_reuse.py", error)
        return 2
    print_report(report)
    same = [*report["prompts"], report["another_process"]]
    return 0 if all(one["same_tokens"] for one in same) else 1


def _in_another_process(options: argparse.Namespace, directory: Path, prompt: np.ndarray) -> dict:
    """What this file, run again, makes of a prompt and the saved prefixes."""
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens.json"
        tokens.write_text(json.dumps(prompt.tolist()))
        found = subprocess.run(
            [sys.executable, __file__, "--resume", tokens, "--directory", directory,
             "--weights", options.weights, "--chunk", str(options.chunk),
             "--new-tokens", str(options.new_tokens)],
            capture_output=True, text=True,
        )  # fmt: skip
    if found.returncode:
        raise ValueError(f"the other process failed: {found.stderr.strip()[-300:]}")
    return json.loads(found.stdout)


def _resume(options: argparse.Namespace) -> dict:
    model, variables = load_model(options.weights)
    store = PrefixStore(options.directory, model_fingerprint(model.config, variables))
    reuse = Reuse(model, variables, store, options.chunk, options.new_tokens)
    prompt = np.array(json.loads(options.resume.read_text()), np.int32)
    cache, last, reused = reuse.reused(prompt)
    return reuse.finish((cache, last), prompt) | {"reused_tokens": reused}


def _tokens(path: Path, count: int) -> np.ndarray:
    text = path.read_bytes()[: count - 1]
    if len(text) < count - 1:
        raise ValueError(f"{path}: expected {count - 1} bytes or more, got {len(text)}")
    return np.array([byte_text.BOUNDARY, *text], np.int32)


def _same(equal: bool) -> str:
    return "equal" if equal else "DIFFER"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
