r"""Continues a text with the byte model, through the ring cache of 528-byte rows.

python examples/generate.py
python examples/generate.py $'import json\n\n\nclass Store:\n'
python examples/generate.py --checkpoint DIR --checkpoint-every 100 --resume
python examples/generate.py --evaluate FILE
"""

import argparse
import codecs
import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import byte_text
import jax
from byte_evaluation import evaluate, print_table
from byte_model import PROMPT, WEIGHTS, load_model
from command_line import Parser, output_file, print_error, random_seed, whole_number
from text_checkpoints import Checkpoints, open_checkpoints, saved_blocks

import swa_jax as swa
from swa_jax.speculation import check_draft_tokens

BLOCK = 25  # bytes between two words to the host
UNSAID = {
    "bytes": 200, "temperature": 0.7, "top_k": 0, "top_p": 1.0, "seed": 0, "draft_tokens": 0,
}  # fmt: skip
"""Options that say what is generated, and their values where they are not given."""


def continue_text(
    model: swa.Decoder,
    variables: dict,
    prompt: bytes,
    *,
    max_new_bytes: int,
    sampling: swa.Sampling,
    show: bool,
    draft_tokens: int = 0,
    checkpoints: Checkpoints | None = None,
) -> dict:
    """Generates, streams and reports.

    Args:
      model: the decoder.
      variables: its parameters.
      prompt: any bytes, not empty.
      max_new_bytes: bytes to generate at most; an end of file ends them earlier.
      sampling: of one request.
      show: write prompt and text to standard output as they come.
      draft_tokens: drafts verified in a step, looked up in the text so far; not with checkpoints.
      checkpoints: where to save the state, and to go on from; None: nowhere.

    Returns:
      The report: text, equals_recompute and the rest, under plain names.
    """
    prompt_tokens = [byte_text.BOUNDARY, *prompt]
    if checkpoints is None:
        blocks = swa.stream(
            model,
            variables,
            [prompt_tokens],
            max_new_tokens=max_new_bytes,
            sampling=sampling,
            stop_tokens=[byte_text.BOUNDARY],
            draft_tokens=draft_tokens,
            block_steps=BLOCK,
        )
    else:
        blocks = saved_blocks(
            model,
            variables,
            prompt_tokens,
            max_new_tokens=max_new_bytes,
            sampling=sampling,
            stop_token=byte_text.BOUNDARY,
            block_steps=BLOCK,
            checkpoints=checkpoints,
        )
    write = codecs.getincrementaldecoder("utf-8")("replace").decode
    if show:
        print(write(prompt), end="", flush=True)
    elif sys.stderr.isatty():
        print("compiling and generating ...", file=sys.stderr)
    tokens: list[int] = []
    started, timed = 0.0, 0
    for number, (new,) in enumerate(blocks):
        tokens += new
        if number > 1:  # the prefill and the first block include their compilation
            timed += len(new)
        elif number == 1:
            started = time.perf_counter()
        if show:
            print(write(bytes(new)), end="", flush=True)
    seconds = time.perf_counter() - started
    if show:
        print(write(b"", True))
    config = model.config
    visible = min(len(prompt_tokens) + max(len(tokens) - 1, 0), config.geometry.window)
    cache = jax.eval_shape(lambda: swa.RingCache.for_decoder(config, 1))
    report = {
        "text": bytes(tokens).decode("utf-8", "replace"),
        "bytes_generated": len(tokens),
        "tokens_per_second": timed / seconds if timed else None,
        "cache_bytes": cache.nbytes,
        "row_bytes": config.fmt.row_bytes,
        "layers": config.num_layers,
        "rows_visible": visible,
        "rows_allocated": config.geometry.capacity,
        "equals_recompute": None,
    }
    if tokens:
        found = swa.compare_with_recompute(model, variables, prompt_tokens, tokens, sampling)
        report |= {
            "equals_recompute": found.equal,
            "ties": found.ties,
            "differing": found.differing,
            "largest_logit_difference": found.largest_logit_difference,
            "largest_logit": found.largest_logit,
        }
    return report


def print_report(report: dict) -> None:
    """The report in a few lines on standard error, apart from the text."""
    speed = report["tokens_per_second"]
    lines = [
        f"{report['bytes_generated']} bytes"
        + ("" if speed is None else f", {speed:,.0f} bytes/s after the first block"),
        f"cache {report['cache_bytes']:,} bytes: {report['layers']} layers of "
        f"{report['rows_allocated']} rows of {report['row_bytes']} bytes, "
        f"{report['rows_visible']} of them visible",
    ]
    if report["equals_recompute"] is None:
        lines.append("nothing was generated, so there is nothing to compare with a recompute")
    else:
        verdict = "equal those" if report["equals_recompute"] else "DIFFER from those"
        lines.append(
            f"the tokens {verdict} of a full recompute without a cache: {report['ties']} ties, "
            f"{report['differing']} differing, largest logit difference "
            f"{report['largest_logit_difference']:.2g} of {report['largest_logit']:.3g}"
        )
    print("\n" + "\n".join(lines), file=sys.stderr)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        prog="generate.py",
        description="Continues a text with the byte model, through the ring cache.",
    )
    add = parser.add_argument
    add("prompt", nargs="?", metavar="PROMPT",
        help="text to continue; by default the start of a Python file")  # fmt: skip
    add("--file", type=Path, help="take the prompt from a file; it may be longer than the window")
    add("--bytes", type=whole_number(1, 2**31 - 1), metavar="N",
        help="bytes to generate (200)")  # fmt: skip
    add("--temperature", type=float, help="0 takes the likeliest byte each time (0.7)")
    add("--top-k", type=int, help="only the K likeliest bytes; 0: all (0)")
    add("--top-p", type=float, help="only the likeliest bytes up to this probability (1)")
    add("--seed", type=random_seed, help="decides what is sampled (0)")
    add("--draft-tokens", type=int, metavar="K",
        help="verify K drafts in a step, looked up in the text so far: the same bytes, 0 to 6 "
        "with the shipped model (0)")  # fmt: skip
    add(
        "--weights",
        type=Path,
        default=WEIGHTS,
        help="file written by train_bytes.py (the shipped one)",
    )
    add("--checkpoint", type=Path, metavar="DIR",
        help="save parameters and state in this directory as the text goes on")  # fmt: skip
    add("--checkpoint-every", type=whole_number(1), metavar="N",
        help=f"bytes between two checkpoints, rounded up to blocks of {BLOCK} (100)")  # fmt: skip
    add("--resume", action="store_true",
        help="go on from the last checkpoint of the same text, if there is one")  # fmt: skip
    add("--report", type=output_file, metavar="FILE", help="write the report as JSON")
    add("--quiet", action="store_true", help="only the report")
    add("--evaluate", type=Path, metavar="FILE",
        help="instead: bits per byte of a file, through ring and recompute, by window and "
        "row format")  # fmt: skip
    add("--evaluate-held-out", action="store_true",
        help="instead: the same for the held-out modules of this Python's standard "
        "library")  # fmt: skip
    add("--rows", type=whole_number(1), metavar="N",
        help="with an evaluation: N evenly spaced rows of 4096 bytes instead of all")  # fmt: skip
    options = parser.parse_args(arguments)
    evaluations = (options.evaluate is not None) + options.evaluate_held_out
    prompts = (options.prompt is not None) + (options.file is not None)
    if evaluations + prompts > 1:
        parser.error("expected one of PROMPT, --file, --evaluate and --evaluate-held-out, got more")
    if options.checkpoint is None and (options.checkpoint_every is not None or options.resume):
        parser.error("argument --checkpoint: expected a directory to save in, got none")
    if options.checkpoint is not None and options.draft_tokens:
        parser.error("argument --draft-tokens: expected 0 with --checkpoint, got more")
    if options.checkpoint is not None and evaluations:
        parser.error("argument --checkpoint: expected a text to generate, got an evaluation")
    if options.quiet and evaluations:
        parser.error("argument --quiet: an evaluation shows no text")
    if options.rows is not None and not evaluations:
        parser.error("argument --rows: needs --evaluate or --evaluate-held-out")
    for name in [name for name in UNSAID if getattr(options, name) is not None]:
        option = f"--{name.replace('_', '-')}"
        if evaluations:
            parser.error(f"argument {option}: an evaluation generates nothing")
        if name in ("top_k", "top_p", "seed") and options.temperature == 0:
            parser.error(f"argument {option}: needs --temperature above 0")
    for name, value in UNSAID.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    options = parse_arguments(arguments)
    try:
        model, variables = load_model(options.weights)
        if options.evaluate is not None or options.evaluate_held_out:
            if options.evaluate is None:
                tokens = byte_text.load_corpus()[1].tokens
            else:
                file: Path = options.evaluate
                tokens = byte_text.make_split({file.name: _read(file)}).tokens
            results = evaluate(model.config, variables, tokens, options.rows)
            print_table(results)
            _write_report(options.report, results)
            return 0
        prompt = PROMPT.encode() if options.prompt is None else os.fsencode(options.prompt)
        if options.file is not None:
            prompt = _read(options.file)
        if not prompt:
            raise ValueError("prompt: expected at least one byte, got none")
        sampling = swa.Sampling.build(
            1,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            keys=jax.random.key(options.seed)[None],
        )
        check_draft_tokens(model.config.geometry, options.draft_tokens)
        checkpoints = None
        if options.checkpoint is not None:
            names = ("bytes", "temperature", "top_k", "top_p", "seed")
            settings = {name: getattr(options, name) for name in names}
            checkpoints = open_checkpoints(
                options.checkpoint,
                options.checkpoint_every or 100,
                model,
                variables,
                settings | {"prompt": hashlib.sha256(prompt).hexdigest()},
                resume=options.resume,
            )
        report = continue_text(
            model,
            variables,
            prompt,
            max_new_bytes=options.bytes,
            sampling=sampling,
            show=not options.quiet,
            draft_tokens=options.draft_tokens,
            checkpoints=checkpoints,
        )
        _write_report(options.report, report)
    except (OSError, ValueError) as error:
        print_error("generate.py", error)
        return 2
    print_report(report)
    return 0 if report["equals_recompute"] in (True, None) else 1


def _read(path: Path) -> bytes:
    text = path.read_bytes()
    if not text:
        raise ValueError(f"{path}: expected at least one byte, got an empty file")
    return text


def _write_report(path: Path | None, report: dict) -> None:
    if path is not None:
        path.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
