"""The whole state of a training run: begun, saved, and gone on with to the bit."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import byte_text
import jax
import jax.numpy as jnp
import numpy as np
from byte_training import Run, initial_params, make_optimizer, path_name
from jaxtyping import PyTree
from safetensors.numpy import save_file

import swa_jax as swa
from swa_jax.files import read_safetensors
from swa_jax.json_fields import parse_json
from swa_jax.reading import read_regular


@dataclasses.dataclass
class TrainingState:
    """All that a run carries from step to step."""

    step: int
    params: PyTree
    optimizer: PyTree
    evaluations: list[dict[str, Any]]


def _leaves(state: TrainingState) -> tuple[dict[str, Any], Any]:
    tree = {"params": state.params, "optimizer": state.optimizer}
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    return {path_name(path): leaf for path, leaf in leaves}, structure


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
