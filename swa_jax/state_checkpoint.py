"""Checkpoints of a decode state with its parameters, through orbax: stop, and go on bit for bit.

Import this module by its name: the package does not, as orbax is slow to import. One process saves
and restores; arrays come back to its first device.
"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from pallas_kernels import checks
from swa_jax.config import DecoderConfig, plain_config
from swa_jax.decoding import DecodeState
from swa_jax.files import open_new
from swa_jax.modules import Decoder
from swa_jax.prefilling import Params
from swa_jax.prompts import token_ids
from swa_jax.reading import inside, read_object
from swa_jax.state_arrays import (
    compare,
    identity,
    key_kind,
    state_from_arrays,
    state_to_arrays,
)

CHECKPOINTS_KEPT = 2
"""Older ones are removed once a new one is complete."""

_VERSION = 1
_COMPLETE = re.compile(r"state_(0|[1-9][0-9]*)")
_PARTIAL = re.compile(_COMPLETE.pattern + r"\.partial")
_ARRAYS, _HEADER = "arrays", "header.json"


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a checkpoint held.

    Attributes:
      step: its number.
      params: the parameters, in the dtypes in which they were saved.
      state: the requests, to go on with.
      tokens: the tokens that each request had been given.
    """

    step: int
    params: Params
    state: DecodeState
    tokens: list[list[int]]


def save_state(
    directory: str | os.PathLike[str],
    step: int,
    model: Decoder,
    params: Params,
    state: DecodeState,
    tokens: Sequence[Sequence[int]],
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Saves parameters and decode state: whole, or, if the process is killed, not at all.

    When the call returns the checkpoint is complete, and the state may be donated. It holds the
    parameters too, so that it is enough by itself. The last CHECKPOINTS_KEPT are kept.

    Args:
      directory: for checkpoints of this kind alone; made if it is not there.
      step: the checkpoint's number, above those that are there.
      model: the decoder.
      params: its variables: dictionaries of arrays, without partitioning boxes.
      state: the requests.
      tokens: what each of them has been given so far.
      settings: what else must be the same to go on, such as the prompt's digest: JSON values by
        name.

    Raises:
      ValueError: a step that is not above the last one, a state that is not of this model, another
        number of token lists, token ids out of range, or a directory with other things in it.
      OSError: it cannot be written.
    """
    config, cache = model.config, state.cache
    checks.check_integer("step", step, 0)
    for name, want, got in (
        ("format", config.fmt, cache.fmt),
        ("geometry", config.geometry, cache.geometry),
        ("layers", config.num_layers, cache.layers),
    ):
        if want != got:
            raise ValueError(f"state.cache: expected {name} {want}, got {got}")
    directory = Path(directory).absolute()
    steps = _steps(directory)
    if steps and step <= steps[-1]:
        raise ValueError(f"step: expected more than {steps[-1]}, the last one, got {step}")
    given = [
        token_ids(model, f"tokens[{i}]", line).tolist() if len(line) else []
        for i, line in enumerate(tokens)
    ]
    trees = {"params": _plain("params", params), "state": state_to_arrays(state, given)}
    header = identity(config, len(tokens), cache.slots, settings) | {
        "version": _VERSION,
        "config": json.loads(config.to_json()),
        "keys": key_kind(state),
        "arrays": jax.tree.map(lambda leaf: [str(leaf.dtype), *leaf.shape], trees),
    }
    for name in filter(_PARTIAL.fullmatch, _names(directory)):  # a killed process left it
        shutil.rmtree(directory / name)
    path = directory / f"state_{step}"
    partial = _partial(path)
    partial.mkdir(parents=True)
    # In the background it would need a copy of the state, as the next step takes its buffers. And
    # what orbax has finished is not yet a checkpoint: the digests of its files belong to it.
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(partial / _ARRAYS, trees)
        checkpointer.wait_until_finished()
    header["files"] = _file_digests(partial / _ARRAYS)
    with open_new(partial / _HEADER) as file:
        file.write(json.dumps({"header": header, "digest": _text_digest(header)}).encode())
    os.rename(partial, path)
    for old in steps[: max(0, len(steps) + 1 - CHECKPOINTS_KEPT)]:
        path = directory / f"state_{old}"
        os.rename(path, _partial(path))  # in one step, as it came
        shutil.rmtree(_partial(path))


def restore_state(
    directory: str | os.PathLike[str],
    model: Decoder,
    *,
    batch: int,
    slots: int | None = None,
    settings: Mapping[str, Any] | None = None,
    step: int | None = None,
) -> Restored:
    """Restores what `save_state` saved, if it is what the caller expects; or nothing of it.

    Nothing is written. Files are data: none is unpickled or run.

    Args:
      directory: that of the checkpoints.
      model: the decoder to go on with.
      batch: number of requests.
      slots: state slots of the cache; by default as many as requests.
      settings: as given to `save_state`.
      step: which checkpoint; by default the last one.

    Returns:
      Parameters, state and tokens, bit for bit as they were saved.

    Raises:
      ValueError: there is no such checkpoint, or there are other things; it is of another format,
        geometry, configuration, size or settings, with both values; or it is incomplete, changed,
        or something else.
    """
    directory = Path(directory).absolute()
    steps = _steps(directory)
    if not steps:
        raise ValueError(f"{directory}: expected a directory with checkpoints, got none")
    step = steps[-1] if step is None else step
    if step not in steps:
        raise ValueError(f"{directory}: expected one of the steps {steps}, got {step!r}")
    path = directory / f"state_{step}"
    slots = batch if slots is None else slots
    want = identity(model.config, batch, slots, settings)
    header = _read_header(path)
    got = {name: header.get(name) for name in want}
    try:
        # a field that is younger than the checkpoint has its default
        config = DecoderConfig.from_json(json.dumps(got["config"]))
    except ValueError as error:
        raise _not_whole(path, error) from None
    compare(path, want, got | {"config": plain_config(config)})
    # orbax reads many files at once: of several that are cut it would report each in its own way
    found, files = _file_digests(path / _ARRAYS), header.get("files")
    if not isinstance(files, dict):
        raise _not_whole(path, f"{_HEADER} with files {files!r}")
    wrong = sorted(name for name in found | files if found.get(name) != files.get(name))
    if wrong:
        raise _not_whole(path, f"missing, other or changed files {wrong[:3]}")
    arrays = header.get("arrays")
    if not isinstance(arrays, dict):  # orbax would take what there is
        raise _not_whole(path, f"{_HEADER} with arrays {arrays!r}")
    trees = _restore_arrays(path, arrays)
    try:
        state, given = state_from_arrays(
            trees["state"], model.config, batch, slots, header.get("keys")
        )
    except ValueError as error:
        raise _not_whole(path, error) from None
    return Restored(step, trees["params"], state, given)


def latest_step(directory: str | os.PathLike[str]) -> int | None:
    """The number of the last complete checkpoint in a directory, or None if it has none.

    Raises:
      ValueError: the directory holds other things.
    """
    return max(_steps(Path(directory).absolute()), default=None)


def _names(directory: Path) -> list[str]:
    if not directory.exists():
        return []
    return [path.name for path in directory.iterdir() if not path.name.startswith(".")]


def _steps(directory: Path) -> list[int]:
    """The numbers of complete checkpoints: a name without "partial" is given to nothing else.

    Checkpoints are removed in time, so nothing else may lie among them.
    """
    names = _names(directory)
    complete = [found for found in map(_COMPLETE.fullmatch, names) if found]
    others = set(names) - {found[0] for found in complete} - set(filter(_PARTIAL.fullmatch, names))
    if others:
        raise ValueError(f"{directory}: expected nothing but checkpoints, got {sorted(others)[:3]}")
    return sorted(int(found[1]) for found in complete)


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def _file_digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each file below a folder, by its path there. What is elsewhere is none of it."""
    digests = {}
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            digests[str(path.relative_to(folder))] = found
    return digests


def _text_digest(header: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()


def _read_header(path: Path) -> dict[str, Any]:
    try:
        whole = read_object(inside(path, _HEADER))
        inside(path, _ARRAYS)
    except (OSError, ValueError) as error:
        raise _not_whole(path, error) from None
    header = whole.get("header")
    if not isinstance(header, dict) or whole.get("digest") != _text_digest(header):
        raise _not_whole(path, f"another {_HEADER}")
    if header.get("version") != _VERSION:
        raise ValueError(f"{path}: expected version {_VERSION}, got {header.get('version')!r}")
    return header


def _plain(name: str, tree: Any) -> Any:
    """Dictionaries of arrays, as orbax and JSON know them."""
    if isinstance(tree, Mapping):
        return {key: _plain(f"{name}.{key}", value) for key, value in tree.items()}
    if not isinstance(tree, jax.Array | np.ndarray):
        raise ValueError(f"{name}: expected an array or a dictionary, got {type(tree).__name__}")
    array = jnp.asarray(tree)
    if array.dtype != tree.dtype:
        raise ValueError(f"{name}: expected a dtype that JAX keeps, got {tree.dtype}")
    return array


def _restore_arrays(path: Path, shapes: dict[str, Any]) -> dict[str, Any]:
    """The trees of a checkpoint, which has [dtype, *shape] in the place of each array."""
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    try:
        abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf[1:], jnp.dtype(leaf[0]), sharding=device),
            shapes,
            is_leaf=lambda node: isinstance(node, list),
        )
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(path / _ARRAYS, abstract)
    except Exception as error:  # orbax and tensorstore raise errors of many kinds
        text = " ".join(str(error).split())
        raise _not_whole(path, f"{type(error).__name__}: {text[:300]}") from error


def _not_whole(path: Path, found: object) -> ValueError:
    return ValueError(f"{path}: expected a whole checkpoint of a decode state, got {found}")
