"""How the byte model learns: what a run is, its batches, optimiser and steps, and bits per byte."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, cast

import byte_text
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

import swa_jax as swa

MATRICES = ("q_a_kv", "q_b", "o_a", "o_b", "gate", "up", "down")  # Muon's; the rest is Adam's
ZERO_AT_START = ("o_b", "down", "head")  # each layer begins as the identity
MUON_RATE = 0.02
ADAM_RATE = 0.01
WARMUP_SHARE = 0.03
FINAL_RATE_SHARE = 0.03


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


def path_name(path: tuple[Any, ...]) -> str:
    """A leaf's place in a tree: its keys, joined by dots."""
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
            lambda path, _: kernel if path_name(path[-1:]) in MATRICES else None, params
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
        lambda path, value: value * 0 if path_name(path[-1:]) in ZERO_AT_START else value,
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
