"""Trains the byte model: a small Decoder over the sources of Python's standard library.

    python examples/train_bytes.py --out bytes

About an hour on two CPU cores. Every machine with Python has the text, nothing is downloaded, and
the seed decides everything: the order of the text, the weights at the start, the result.
"""

import argparse
import collections
import dataclasses
import json
import math
import platform
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import byte_text
import jax
import jax.numpy as jnp
import numpy as np
import optax
from byte_training import Run, bits_per_byte, make_optimizer, training_batch, training_step
from command_line import MAX_STEPS, Parser, print_error, random_seed, whole_number
from tqdm import tqdm
from training_checkpoints import TrainingState, run_identity, save_state, start

import swa_jax as swa

MODEL = swa.DecoderConfig(
    vocab_size=byte_text.VOCAB_SIZE,
    num_layers=4,
    attention=swa.AttentionConfig(
        hidden_size=192,
        num_heads=2,
        head_dim=512,
        rope_dim=64,
        q_lora_rank=64,
        o_groups=2,
        o_lora_rank=64,
        window=128,
    ),
    mlp_size=512,
)
LARGEST_FILE = 5_000_000  # bytes of the finished bfloat16 weights: it has to fit in a repository
STATE_FILE = "state.safetensors"


def train(
    config: swa.DecoderConfig,
    run: Run,
    training: byte_text.Split,
    held_out: byte_text.Split,
    state: TrainingState,
    state_file: Path,
    *,
    checkpoint_every: int = 500,
    evaluate_every: int = 1000,
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Trains to the last step; stopped and gone on with, the result is the same to the bit.

    Args:
        config: the model.
        run: everything else that the result depends on.
        training: text to learn from.
        held_out: text to evaluate on as it goes; 16 rows of 4096 tokens.
        state: of `start`; it moves on in place, its old arrays are donated.
        state_file: where the state is kept.
        checkpoint_every: steps between two states written.
        evaluate_every: steps between two evaluations.
        stopped: asked after each step; True writes the state and returns.
    """
    optimizer = make_optimizer(run.steps)
    identity = run_identity(config, run, training)
    bar = tqdm(
        total=run.steps * run.tokens_per_step,
        initial=state.step * run.tokens_per_step,
        unit="token",
        unit_scale=True,
        smoothing=0.05,
        mininterval=1.0 if sys.stderr.isatty() else 60.0,
    )
    unread: collections.deque[jax.Array] = collections.deque()
    recent: collections.deque[float] = collections.deque(maxlen=50)
    with bar:
        while state.step < run.steps:
            model = run.model(config, state.step)
            batch = training_batch(training.tokens, run, state.step)
            state.params, state.optimizer, nats = training_step(
                state.params, state.optimizer, batch, model=model, optimizer=optimizer
            )
            state.step += 1
            unread.append(nats)
            if (
                len(unread) > 2
            ):  # only the loss of a step long done, so reading it waits for nothing
                recent.append(float(unread.popleft()) / math.log(2))
                bar.set_postfix_str(f"{np.mean(recent):.3f} bits per byte", refresh=False)
            bar.update(run.tokens_per_step)

            if state.step % evaluate_every == 0 or state.step == run.steps:
                bits = bits_per_byte(model, state.params, held_out, max_rows=16)
                window = model.config.layers[0].window
                state.evaluations.append(
                    {"step": state.step, "window": window, "bits_per_byte": round(bits, 4)}
                )
                bar.write(f"step {state.step}: {bits:.4f} bits per byte held out, window {window}")
            stop = stopped()
            if stop or state.step % checkpoint_every == 0 or state.step == run.steps:
                save_state(state_file, state, identity)
            if stop:
                break


def write_model(
    out: Path,
    config: swa.DecoderConfig,
    run: Run,
    training: byte_text.Split,
    held_out: byte_text.Split,
    state: TrainingState,
) -> dict[str, Any]:
    """Writes the finished weights in bfloat16, evaluates that file, and writes what it is.

    Args:
        out: folder for bytes.safetensors and bytes.json.
        config: the model.
        run: how it was trained.
        training: what it learned from.
        held_out: what it is evaluated on, all of it.
        state: the finished state.

    Returns:
        The content of bytes.json; nothing in it depends on the clock or the machine.
    """
    out.mkdir(parents=True, exist_ok=True)
    file = out / "bytes.safetensors"
    swa.checkpoint.save_params(file, state.params, {"config": config.to_json()}, dtype="bfloat16")
    params, _ = swa.checkpoint.load_params(file)
    params = jax.tree.map(lambda value: jnp.asarray(value, jnp.float32), params)
    size = file.stat().st_size
    if size > LARGEST_FILE:
        raise ValueError(f"expected at most {LARGEST_FILE} bytes of weights, got {size} in {file}")
    rows = -(-len(held_out.tokens) // 4096)
    with tqdm(total=rows, unit="row", desc="held out") as bar:
        bits = bits_per_byte(
            swa.Decoder(config, round_trip=True), params, held_out, report=lambda _: bar.update()
        )
    options = " ".join(
        f"--{name.replace('_', '-')} {value}" for name, value in dataclasses.asdict(run).items()
    )
    description = {
        "command": f"python examples/train_bytes.py {options}",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "optax": optax.__version__,
        "seed": run.seed,
        "steps": run.steps,
        "tokens": run.steps * run.tokens_per_step,
        "model": json.loads(config.to_json()),
        "parameters": sum(value.size for value in jax.tree.leaves(params)),
        "file_bytes": size,
        "training": {
            "files": len(training.paths),
            "bytes": training.num_bytes,
            "sha256": training.sha256,
        },
        "held_out": {
            "files": len(held_out.paths),
            "bytes": held_out.num_bytes,
            "sha256": held_out.sha256,
            "window": config.layers[0].window,
            "row_bytes": config.fmt.row_bytes,
            "bits_per_byte": round(bits, 4),
        },
        "evaluations": state.evaluations,
    }
    (out / "bytes.json").write_text(json.dumps(description, indent=2) + "\n")
    return description


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"expected 0 to 1, got {value}")
    return value


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Reads the command line; a mistake ends the program with status 2 and one line.

    Args:
        arguments: without the program's name.

    Returns:
        The options; ``run`` holds those that decide the result.
    """
    parser = Parser(
        prog="train_bytes.py",
        description="Trains the byte model on the sources of Python's standard library.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, positive, size = parser.add_argument, whole_number(1), whole_number(1, MAX_STEPS)
    add("--out", type=Path, default=Path("bytes"), metavar="DIR",
        help="folder for bytes.safetensors and bytes.json")  # fmt: skip
    add("--work", type=Path, metavar="DIR",
        help="folder for the state of an unfinished run; default OUT-work")  # fmt: skip
    add("--resume", action="store_true", help="go on from the state in --work")
    add(
        "--seed",
        type=random_seed,
        default=Run.seed,
        help="decides text order and first weights",
    )
    add("--steps", type=whole_number(2, 2**31 - 1), default=Run.steps,
        help="optimiser steps; the first warms up")  # fmt: skip
    add("--batch", type=size, default=Run.batch, help="sequences per step")
    add("--length", type=size, default=Run.length, help="tokens per sequence")
    add("--short-window", type=positive, default=Run.short_window,
        help="window of the first steps, at most the model's")  # fmt: skip
    add("--short-share", type=_share, default=Run.short_share,
        help="share of the steps, the first ones, with the short window")  # fmt: skip
    add("--row-share", type=_share, default=Run.row_share,
        help="share of the steps, the last ones, through the cache's row format")  # fmt: skip
    add("--checkpoint-every", type=positive, default=500, metavar="STEPS",
        help="steps between two states written")  # fmt: skip
    add("--evaluate-every", type=positive, default=1000, metavar="STEPS",
        help="steps between two evaluations on 64 KB of the held-out text")  # fmt: skip
    options = parser.parse_args(arguments)

    window = MODEL.layers[0].window
    options.work = options.work or options.out.with_name(options.out.name + "-work")
    state = options.work / STATE_FILE
    if options.short_window > window:
        parser.error(
            f"argument --short-window: expected at most the model's window {window}, "
            f"got {options.short_window}"
        )
    if options.resume and not state.is_file():
        parser.error(f"argument --resume: expected a state in {options.work}, got none")
    if not options.resume and state.is_file():
        parser.error(f"{state} is of an earlier run: --resume goes on with it, or remove it")
    fields = [field.name for field in dataclasses.fields(Run)]
    options.run = Run(**{name: getattr(options, name) for name in fields})
    return options


def main(arguments: list[str]) -> int:
    """Trains, evaluates and writes the model.

    Args:
        arguments: the command line without the program's name.

    Returns:
        Exit status: 0, 2 if the text or the state does not fit, 130 if interrupted.
    """
    options = parse_arguments(arguments)
    signals: list[int] = []

    def stop(number: int, frame: object) -> None:
        signals.append(number)  # the step in flight finishes; a second signal ends at once
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    state_file = options.work / STATE_FILE
    try:
        training, held_out = byte_text.load_corpus()
        state = start(MODEL, options.run, training, state_file if options.resume else None)
    except (OSError, ValueError) as error:
        print_error("train_bytes.py", error)
        return 2
    print(
        f"training {len(training.tokens):,} tokens in {len(training.paths)} files, "
        f"held out {len(held_out.tokens):,} in {len(held_out.paths)}",
        file=sys.stderr,
    )
    train(
        MODEL,
        options.run,
        training,
        held_out,
        state,
        state_file,
        checkpoint_every=options.checkpoint_every,
        evaluate_every=options.evaluate_every,
        stopped=lambda: bool(signals),
    )
    if state.step < options.run.steps:
        print(f"stopped after step {state.step}; --resume goes on", file=sys.stderr)
        return 130
    description = write_model(options.out, MODEL, options.run, training, held_out, state)
    bits, size = description["held_out"]["bits_per_byte"], description["file_bytes"]
    print(f"{bits} bits per byte on the held-out text, {size:,} bytes of weights")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
