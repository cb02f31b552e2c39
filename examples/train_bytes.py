"""Trains the byte model: a small Decoder over the sources of Python's standard library.

    python examples/train_bytes.py --out bytes

About an hour on two CPU cores. Every machine with Python has the text, nothing is downloaded, and
the seed decides everything: the order of the text, the weights at the start, the result.
"""

import argparse
import collections
import dataclasses
import functools
import json
import math
import os
import platform
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import byte_text
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from command_line import Parser, print_error, whole_number
from jaxtyping import Array, Bool, Float, Int, PyTree
from safetensors.numpy import save_file
from tqdm import tqdm

import swa_jax as swa
from swa_jax.files import read_safetensors
from swa_jax.json_fields import parse_json
from swa_jax.reading import read_regular

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

MATRICES = ("q_a_kv", "q_b", "o_a", "o_b", "gate", "up", "down")  # Muon's; the rest is Adam's
ZERO_AT_START = ("o_b", "down", "head")  # each layer begins as the identity
MUON_RATE = 0.02
ADAM_RATE = 0.01
WARMUP_SHARE = 0.03
FINAL_RATE_SHARE = 0.03

STATE_FILE = "state.safetensors"


@dataclasses.dataclass(frozen=True)
class Run:
    """What the result depends on, besides the text and the model."""

    seed: int = 0
    steps: int = 6000
    batch: int = 4
    length: int = 512
    short_window: int = 64
    short_share: float = 0.5  # of the steps, the first ones: trained with the short window
    row_share: float = 0.1  # of the steps, the last ones: trained through the rows' round trip

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one step learns from."""
        return self.batch * self.length

    def model(self, config: swa.DecoderConfig, step: int) -> swa.Decoder:
        """The model as a step trains it: the same parameters, another window or row form."""
        if step < round(self.short_share * self.steps):
            attention = dataclasses.replace(config.layers[0], window=self.short_window)
            config = dataclasses.replace(config, attention=attention)
        return swa.Decoder(
            config, round_trip=step >= self.steps - round(self.row_share * self.steps)
        )


@dataclasses.dataclass
class TrainingState:
    """All that a run carries from step to step."""

    step: int
    params: PyTree
    optimizer: PyTree
    evaluations: list[dict[str, Any]]


@functools.lru_cache(maxsize=2)
def _block_order(seed: int, epoch: int, blocks: int) -> tuple[int, np.ndarray]:
    random = np.random.default_rng([seed, epoch])
    return int(random.integers(2**31)), random.permutation(blocks)


def training_batch(
    tokens: Int[np.ndarray, " tokens"], run: Run, step: int
) -> Int[np.ndarray, "batch length+1"]:
    """The batch of a step, from the seed and the step alone.

    Each pass over the text cuts it into blocks at a new place and shuffles them, so every token is
    seen once per pass and never behind the same cut.

    Args:
        tokens: the training stream.
        run: its seed, batch and length count.
        step: from 0.

    Returns:
        int32[batch, length + 1]: inputs and, one further, targets.

    Raises:
        ValueError: the stream is shorter than two sequences.
    """
    blocks = (len(tokens) - 1) // run.length - 1  # one less than fit: room to move the cut
    if blocks < 1:
        raise ValueError(f"expected a text of more than {2 * run.length} tokens, got {len(tokens)}")
    rows = []
    for block in range(step * run.batch, (step + 1) * run.batch):
        offset, order = _block_order(run.seed, block // blocks, blocks)
        start = offset % run.length + order[block % blocks] * run.length
        rows.append(tokens[start : start + run.length + 1])
    return np.stack(rows).astype(np.int32)


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


@functools.lru_cache(maxsize=4)
def make_optimizer(steps: int) -> optax.GradientTransformation:
    """Muon for the matrices inside the layers, Adam for everything else.

    Kernels are [..., out, in], so ``in`` is the axis that a product reduces: with these dimension
    numbers optax scales a matrix's update by sqrt(max(1, out / in)).

    Args:
        steps: length of the schedule: linear warm-up, then cosine.

    Returns:
        The optimiser of a whole parameter tree.
    """

    def schedule(peak: float) -> optax.Schedule:
        return optax.warmup_cosine_decay_schedule(
            0.0, peak, math.ceil(WARMUP_SHARE * steps), steps, FINAL_RATE_SHARE * peak
        )

    def dimension_numbers(params: PyTree) -> PyTree:
        kernel = optax.contrib.MuonDimensionNumbers(reduction_axis=-1, output_axis=-2)
        return jax.tree.map_with_path(
            lambda path, _: kernel if _name(path[-1:]) in MATRICES else None, params
        )

    return optax.contrib.muon(
        schedule(MUON_RATE),
        ns_steps=4,
        adam_b1=0.9,
        adam_b2=0.98,
        adam_learning_rate=schedule(ADAM_RATE),
        muon_weight_dimension_numbers=dimension_numbers,
    )


def initial_params(config: swa.DecoderConfig, seed: int) -> PyTree:
    """Parameters before the first step; what writes to the residual stream begins at zero.

    Args:
        config: the model.
        seed: of the random numbers.

    Returns:
        The parameter tree, float32, without partitioning metadata.
    """
    variables = _init(swa.Decoder(config), jax.random.key(seed))
    return jax.tree.map_with_path(
        lambda path, value: value * 0 if _name(path[-1:]) in ZERO_AT_START else value,
        nn.meta.unbox(variables)["params"],
    )


@functools.partial(jax.jit, static_argnames="model")
def _init(model: swa.Decoder, key: Array) -> PyTree:
    return model.init(key, jnp.zeros((1, 8), jnp.int32))


def _nats(
    model: swa.Decoder, params: PyTree, inputs: Int[Array, "b t"], targets: Int[Array, "b t"]
) -> Float[Array, "b t"]:
    variables = {"params": params}
    scores = model.apply(variables, model.apply(variables, inputs), method="logits")
    return optax.softmax_cross_entropy_with_integer_labels(cast(Array, scores), targets)


@functools.partial(jax.jit, static_argnames=("model", "optimizer"), donate_argnums=(0, 1))
def training_step(
    params: PyTree,
    state: PyTree,
    batch: Int[Array, "b t+1"],
    *,
    model: swa.Decoder,
    optimizer: optax.GradientTransformation,
) -> tuple[PyTree, PyTree, Float[Array, ""]]:
    """One step; compiled once for each form of the model.

    Args:
        params: parameter tree, donated.
        state: the optimiser's state, donated.
        batch: int32[batch, length + 1], of `training_batch`.
        model: window and row form as this step trains them.
        optimizer: of `make_optimizer`.

    Returns:
        (params, state, float32[] mean nats per token).
    """

    def loss(params: PyTree) -> Float[Array, ""]:
        return _nats(model, params, batch[:, :-1], batch[:, 1:]).mean()

    nats, gradients = jax.value_and_grad(loss)(params)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, nats


@functools.partial(jax.jit, static_argnames="model")
def _scored_nats(
    params: PyTree,
    inputs: Int[Array, "b t"],
    targets: Int[Array, "b t"],
    scored: Bool[Array, "b t"],
    *,
    model: swa.Decoder,
) -> Float[Array, ""]:
    return jnp.where(scored, _nats(model, params, inputs, targets), 0.0).sum()


def bits_per_byte(
    model: swa.Decoder,
    params: PyTree,
    text: byte_text.Split,
    max_rows: int | None = None,
    report: Callable[[int], object] = lambda row: None,
) -> float:
    """What the model needs to write down a text, file ends included, per byte of it.

    Args:
        model: window and row form count.
        params: its parameters.
        text: the text.
        max_rows: evenly spaced rows of 4096 tokens instead of all.
        report: called after each row.

    Returns:
        Bits per byte.
    """
    context = model.config.num_layers * (model.config.layers[0].window - 1)
    inputs, targets, scored = byte_text.scoring_rows(text.tokens, -(-context // 128) * 128)
    rows = np.unique(np.linspace(0, len(inputs) - 1, max_rows or len(inputs)).round().astype(int))
    nats = 0.0
    for row in rows:
        piece = [array[row : row + 1] for array in (inputs, targets, scored)]
        nats += float(_scored_nats(params, *piece, model=model))
        report(row)
    return nats / math.log(2) / int((scored & (targets != byte_text.BOUNDARY))[rows].sum())


def _leaves(state: TrainingState) -> tuple[dict[str, Any], Any]:
    tree = {"params": state.params, "optimizer": state.optimizer}
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    return {_name(path): leaf for path, leaf in leaves}, structure


def run_identity(config: swa.DecoderConfig, run: Run, text: byte_text.Split) -> dict[str, str]:
    """What a state belongs to, as the metadata of its file.

    Args:
        config: the model.
        run: how it is trained.
        text: what it learns from.

    Returns:
        Texts to compare.
    """
    values = {"run": json.dumps(dataclasses.asdict(run)), "model": config.to_json()}
    return {**values, "training_text": text.sha256}


def save_state(file: Path, state: TrainingState, identity: dict[str, str]) -> None:
    """Writes the whole state of a run; the file is complete or not there at all.

    Args:
        file: where; an earlier state there is replaced.
        state: the state.
        identity: what the run is of; `load_state` compares it.
    """
    tensors = {name: np.asarray(leaf) for name, leaf in _leaves(state)[0].items()}
    progress = {"step": str(state.step), "evaluations": json.dumps(state.evaluations)}
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".partial")
    save_file(tensors, partial, metadata={**identity, **progress})
    os.replace(partial, file)


def load_state(file: Path, like: TrainingState, identity: dict[str, str]) -> TrainingState:
    """Reads a state back.

    Args:
        file: written by `save_state`.
        like: a state of the same shapes.
        identity: as given to `save_state`.

    Returns:
        The state.

    Raises:
        ValueError: the file is of another run, model or text, or is no such file.
        OSError: it cannot be read.
    """
    names, structure = _leaves(like)
    tensors, metadata = read_safetensors(read_regular(file), str(file))
    for key, value in identity.items():
        if metadata.get(key) != value:
            raise ValueError(
                f"{file} is of another {key.replace('_', ' ')}: expected {value}, "
                f"got {metadata.get(key)}"
            )
    want = {name: (leaf.dtype, leaf.shape) for name, leaf in names.items()}
    got = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    if want != got:
        wrong = sorted(name for name in want | got if want.get(name) != got.get(name))
        raise ValueError(f"{file}: expected the tensors of such a state, got others: {wrong[:5]}")
    try:
        step = int(metadata.get("step", ""))
        evaluations = parse_json(metadata.get("evaluations", ""))
    except ValueError as error:
        raise ValueError(f"{file}: expected a step and evaluations, got {error}") from None
    # A copy that JAX owns: the state is donated, and the file's buffer is not ours to give.
    tree = jax.tree.unflatten(structure, [jnp.array(tensors[name]) for name in names])
    return TrainingState(step, tree["params"], tree["optimizer"], evaluations)


def start(
    config: swa.DecoderConfig, run: Run, training: byte_text.Split, state_file: Path | None = None
) -> TrainingState:
    """The state that a run begins with.

    Args:
        config: the model.
        run: how it is trained.
        training: what it learns from.
        state_file: where an interrupted run left its state; None for step 0.

    Returns:
        The state.

    Raises:
        ValueError: the state file is of another run, model or text.
    """
    params = initial_params(config, run.seed)
    state = TrainingState(0, params, make_optimizer(run.steps).init(params), [])
    if state_file is None:
        return state
    return load_state(state_file, state, run_identity(config, run, training))


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
    add, positive = parser.add_argument, whole_number(1)
    add("--out", type=Path, default=Path("bytes"), metavar="DIR",
        help="folder for bytes.safetensors and bytes.json")  # fmt: skip
    add("--work", type=Path, metavar="DIR",
        help="folder for the state of an unfinished run; default OUT-work")  # fmt: skip
    add("--resume", action="store_true", help="go on from the state in --work")
    add(
        "--seed",
        type=whole_number(0),
        default=Run.seed,
        help="decides text order and first weights",
    )
    add("--steps", type=positive, default=Run.steps, help="optimiser steps")
    add("--batch", type=positive, default=Run.batch, help="sequences per step")
    add("--length", type=positive, default=Run.length, help="tokens per sequence")
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
