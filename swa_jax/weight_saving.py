"""A decoder's parameters as a checkpoint under public names: one file, or several and an index."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import checks
from swa_jax.block_scales import BLOCK_SIZES, E4M3, E8M0, quantize, scales_shape
from swa_jax.config import DecoderConfig
from swa_jax.files import checked_path, make_header, open_new
from swa_jax.tensor_files import INDEX, SINGLE, listed
from swa_jax.weight_names import (
    HUGGING_FACE,
    ORIGINAL,
    Leaf,
    Names,
    Part,
    decoder_leaves,
    parameter_name,
)

_CONVENTIONS = {"huggingface": HUGGING_FACE, "original": ORIGINAL}
# Parameters that stay as they are when the matrices are quantised.
_NOT_QUANTIZED = ("embedding", "head")


class _Output(NamedTuple):
    """A tensor to write, with its scales if it is quantised."""

    value: Any  # the parameter
    layer: int | None  # which of a stacked one
    start: int  # its first row there
    part: Part
    dtype: np.dtype
    entries: dict[str, tuple[np.dtype, tuple[int, ...]]]  # in the order of `_arrays`

    @property
    def nbytes(self) -> int:
        return sum(dtype.itemsize * int(np.prod(shape)) for dtype, shape in self.entries.values())


def save_decoder(
    directory: str | os.PathLike[str],
    params: Mapping[str, Any],
    config: DecoderConfig,
    *,
    names: str = "huggingface",
    dtype: str | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a decoder's parameters as safetensors that `load_decoder` reads.

    One tensor at a time is in memory beside the parameters. Files appear whole or not at all, the
    index last. Equal parameters give equal bytes. The configuration is not among them:
    `hf_config.write_config` puts it beside them.

    Args:
      directory: where to write; made if there is none. It must hold no such checkpoint.
      params: {"params": ...} of the decoder; partitioning boxes are taken off.
      config: its configuration.
      names: "huggingface" or "original".
      dtype: of the matrices: "float32", "bfloat16", "e4m3", or None for what each has. "e4m3"
        gives those of attention and SwiGLU power-of-two scales for blocks of 128 x 128; embedding
        and head keep what they have. So do norm weights and sinks always.
      max_shard_bytes: bytes of tensors in a file, beyond which there are several. A larger tensor
        has a file of its own.

    Raises:
      ValueError: the parameters are not those of the configuration, or another argument is wrong.
      FileExistsError: the directory holds a checkpoint.
      OSError: it cannot be written.
    """
    directory = checked_path("directory", directory)
    checks.check_type("config", config, DecoderConfig)
    checks.check_choice("names", names, tuple(_CONVENTIONS))
    checks.check_choice("dtype", dtype, (None, "float32", "bfloat16", "e4m3"))
    if (checks.known_int("max_shard_bytes", max_shard_bytes) or 0) < 1:
        raise ValueError(f"max_shard_bytes: expected 1 or more, got {max_shard_bytes}")
    convention = _CONVENTIONS[names]
    leaves = decoder_leaves(config, convention)
    values = _values(params, leaves)
    outputs = [
        output
        for leaf, value in zip(leaves, values, strict=True)
        for output in _outputs(leaf, value, dtype, convention)
    ]
    # Layer after layer, whether or not the parameters are stacked.
    unrolled = decoder_leaves(dataclasses.replace(config, scan_layers=False), convention)
    names_in_order = [part.name for leaf in unrolled for part in leaf.parts]
    order = {name: i for i, name in enumerate(names_in_order)}
    outputs.sort(key=lambda output: order[output.part.name])
    _write(directory, _split(outputs, max_shard_bytes))


def _values(params: Mapping[str, Any], leaves: Sequence[Leaf]) -> list[Any]:
    """The parameters in the order of the leaves, after a check of all of them."""
    if not isinstance(params, Mapping) or set(params) != {"params"}:
        got = sorted(params) if isinstance(params, Mapping) else type(params).__name__
        raise ValueError(f"params: expected {{'params': ...}}, got {got}")
    pairs = jax.tree_util.tree_leaves_with_path(params["params"])
    found = {parameter_name(path): value for path, value in pairs}
    names = [".".join(leaf.path) for leaf in leaves]
    faults = [f"missing {name}" for name in names if name not in found]
    for name, leaf in zip(names, leaves, strict=True):
        if name not in found:
            continue
        shape, dtype = jnp.shape(found[name]), jnp.result_type(found[name])
        if shape != leaf.shape:
            faults.append(f"{name}: expected shape {leaf.shape}, got {shape}")
        if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
            faults.append(f"{name}: expected a floating dtype of 16 bits or more, got {dtype}")
    faults += [f"unexpected {name}" for name in sorted(set(found) - set(names))]
    if faults:
        raise ValueError(f"params: {listed(faults)}")
    return [found[name] for name in names]


def _outputs(leaf: Leaf, value: Any, dtype: str | None, names: Names) -> Iterator[_Output]:
    parts_of_layer = len(leaf.parts) // (leaf.layers or 1)
    start = 0
    for i, part in enumerate(leaf.parts):
        if i % parts_of_layer == 0:
            start = 0
        stored = np.dtype(value.dtype)
        if len(part.shape) == 2:
            if dtype == "e4m3" and leaf.path[-1] not in _NOT_QUANTIZED:
                stored = E4M3
            elif dtype in ("float32", "bfloat16"):
                stored = np.dtype(jnp.dtype(dtype))
        entries = {part.name: (stored, part.shape)}
        if stored == E4M3:
            shape = scales_shape(part.shape, BLOCK_SIZES[0])
            entries[names.scale_name(part.name)] = (E8M0, shape)
        layer = None if leaf.layers is None else i // parts_of_layer
        yield _Output(value, layer, start, part, stored, entries)
        start += part.shape[0]


def _arrays(output: _Output) -> Sequence[np.ndarray]:
    """The tensor, and its scales if it has some."""
    value = output.value if output.layer is None else output.value[output.layer]
    if isinstance(value, jax.Array) and output.layer is None:
        value = jnp.copy(value)  # a jax.Array would keep its copy on the host
    rows = np.asarray(value)[output.start : output.start + output.part.shape[0]]
    if output.dtype == E4M3:
        return quantize(rows)
    return (rows.astype(output.dtype, copy=False),)


def _split(outputs: Sequence[_Output], max_bytes: int) -> list[list[_Output]]:
    """The outputs of each file."""
    shards: list[list[_Output]] = []
    size = 0
    for output in outputs:
        if not shards or size + output.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(output)
        size += output.nbytes
    # Wider dtypes first, so that every tensor of a file is aligned.
    return [sorted(shard, key=lambda output: -output.dtype.itemsize) for shard in shards]


def _write(directory: Path, shards: Sequence[Sequence[_Output]]) -> None:
    if len(shards) == 1:
        targets = [SINGLE]
    else:
        targets = [
            f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)
        ]
    for name in (SINGLE, INDEX, *targets):
        if os.path.lexists(directory / name):
            raise FileExistsError(f"{directory}: expected no checkpoint in it, got {name}")
    directory.mkdir(parents=True, exist_ok=True)
    files: dict[Path, Path] = {}
    weight_map: dict[str, str] = {}
    with contextlib.ExitStack() as leftovers:
        for name, shard in zip(targets, shards, strict=True):
            partial = directory / f"{name}.partial"
            leftovers.callback(partial.unlink, missing_ok=True)
            _write_shard(partial, shard)
            files[partial] = directory / name
            weight_map |= {tensor: name for output in shard for tensor in output.entries}
        if len(shards) > 1:
            total = sum(output.nbytes for shard in shards for output in shard)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            partial = directory / f"{INDEX}.partial"
            leftovers.callback(partial.unlink, missing_ok=True)
            with open_new(partial) as file:
                file.write(json.dumps(index, indent=2, sort_keys=True).encode() + b"\n")
            files[partial] = directory / INDEX
        for partial, file in files.items():
            os.replace(partial, file)


def _write_shard(path: Path, shard: Sequence[_Output]) -> None:
    entries = {name: entry for output in shard for name, entry in output.entries.items()}
    with open_new(path) as file:
        # transformers reads only files that name a framework
        file.write(make_header(entries, {"format": "pt"}))
        for output in shard:
            for array in _arrays(output):
                file.write(np.ascontiguousarray(array).view(np.uint8).data)
