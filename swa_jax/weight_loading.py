"""Parameters out of a checkpoint's tensors: checked all at once, then converted piece by piece."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from tqdm import tqdm

from swa_jax.block_scales import (
    BLOCK_SIZES,
    E4M3,
    SCALE_DTYPES,
    dequantize,
    find_block_size,
    scale_values,
    scales_shape,
    wrong_scale,
)
from swa_jax.tensor_files import TensorFiles, listed
from swa_jax.weight_names import Leaf, Names, Part

# Values converted at a time: a megabyte in float32, so that it stays in a core's cache.
_PIECE = 1 << 18
# XLA takes an array of the host's as it is, without a copy, if it begins at such an address.
_ALIGNMENT = 64


def load_leaves(
    source: str,
    tensors: Mapping[str, Any],
    leaves: Sequence[Leaf],
    names: Names,
    present: Iterable[str],
    progress: bool = False,
) -> dict[str, Any]:
    """The tree of some parameters.

    Args:
      source: what the tensors are called in a message.
      tensors: arrays by name.
      leaves: the parameters.
      names: the convention of the tensors' names.
      present: the names among the tensors that must be of these parameters.
      progress: show a bar that counts the parameters' bytes.

    Returns:
      Arrays of JAX on its default device, in nested dictionaries.

    Raises:
      ValueError: missing, misshapen and unexpected tensors, and scales out of range; one error
        lists them.
    """
    _check(source, tensors, leaves, names, set(present))
    tree: dict[str, Any] = {}
    total = sum(_nbytes(leaf) for leaf in leaves)
    with tqdm(total=total, unit="B", unit_scale=True, disable=not progress) as bar:
        for leaf in leaves:
            *parents, last = leaf.path
            branch = tree
            for parent in parents:
                branch = branch.setdefault(parent, {})
            branch[last] = _load(tensors, leaf, names, bar)
    return tree


def _check(source, tensors, leaves: Sequence[Leaf], names: Names, present: set[str]) -> None:
    parts = {part.name: part for leaf in leaves for part in leaf.parts}
    scales = {names.scale_name(name) for name, part in parts.items() if len(part.shape) == 2}
    faults = [f"missing {name}" for name in sorted(set(parts) - present)]
    for name in sorted(set(parts) & present):
        faults += _faults(tensors, parts[name], names)
    # They come last: a checkpoint of another model has thousands of them.
    faults += [f"unexpected {name}" for name in sorted(present - set(parts) - scales)]
    if faults:
        raise ValueError(f"{source}: {listed(faults)}")


def _faults(tensors, part: Part, names: Names) -> Iterator[str]:
    """What is wrong with a tensor and its scales."""
    try:
        shape, dtype = _shape_dtype(tensors[part.name])
        scale = names.scale_name(part.name)
        scaled = len(part.shape) == 2 and scale in tensors
        scale_shape, scale_dtype = _shape_dtype(tensors[scale]) if scaled else ((), None)
    except ValueError as error:  # a dtype that NumPy has not
        yield str(error)
        return
    if shape != part.shape:
        yield f"{part.name}: expected shape {part.shape}, got {shape}"
    if not jnp.issubdtype(dtype, jnp.floating):
        yield f"{part.name}: expected a floating dtype, got {dtype}"
    elif dtype.itemsize < 2 and (dtype != E4M3 or len(part.shape) != 2):
        also = " or float8_e4m3fn with scales" if len(part.shape) == 2 else ""
        yield f"{part.name}: expected a floating dtype of 16 bits or more{also}, got {dtype}"
    elif dtype == E4M3 and not scaled:
        yield f"{part.name}: expected scales {scale} beside float8_e4m3fn, got none"
    if not scaled:
        return
    if dtype != E4M3:
        yield f"{scale}: expected scales beside float8_e4m3fn only, got {part.name} in {dtype}"
    if scale_dtype in SCALE_DTYPES:
        wrong = wrong_scale(np.asarray(tensors[scale]))
        _release(tensors, scale)
        if wrong is not None:
            yield f"{scale}: expected finite scales of 0 or more, got {wrong}"
    if find_block_size(part.shape, scale_shape) is None:
        fitting = " or ".join(str(scales_shape(part.shape, block)) for block in BLOCK_SIZES)
        yield f"{scale}: expected shape {fitting}, got {scale_shape}"
    if scale_dtype not in SCALE_DTYPES:
        fitting = " or ".join(str(dtype) for dtype in SCALE_DTYPES)
        yield f"{scale}: expected dtype {fitting}, got {scale_dtype}"


def _shape_dtype(value: Any) -> tuple[tuple[int, ...], np.dtype]:
    array = value if hasattr(value, "dtype") else np.asarray(value)
    return tuple(array.shape), np.dtype(array.dtype)


def _load(tensors, leaf: Leaf, names: Names, bar: tqdm) -> Array:
    """A parameter: one buffer, filled a piece at a time, which JAX then takes."""
    out = _aligned_empty(leaf)
    start = 0
    for part in leaf.parts:
        rows = part.wanted_shape[0]
        _fill(out[start : start + rows], tensors, part, names, bar)
        start += rows
    # Waited for, so that no more than one buffer is there twice while devices copy.
    return jax.block_until_ready(jax.device_put(out.reshape(leaf.shape)))


def _fill(out: np.ndarray, tensors, part: Part, names: Names, bar: tqdm) -> None:
    """Converts what is wanted of a tensor. Products are float32; then there is one rounding."""
    tensor = np.asarray(tensors[part.name])[part.index]
    scales, block = None, None
    if tensor.dtype == E4M3:
        stored = np.asarray(tensors[names.scale_name(part.name)])
        scales, block = scale_values(stored), find_block_size(part.shape, stored.shape)
        _release(tensors, names.scale_name(part.name))
    first_row, first_column = (piece.start or 0 for piece in part.slices)
    step = max(1, _PIECE // max(1, int(np.prod(out.shape[1:]))))
    edges = [*range(0, len(out), step), len(out)]
    for start, stop in itertools.pairwise(edges):
        piece = tensor[start:stop]
        if scales is not None and block is not None:
            piece = dequantize(piece, scales, block, first_row + start, first_column)
        with np.errstate(over="ignore"):
            out[start:stop] = piece
        _release(tensors, part.name)
        bar.update(out[start:stop].nbytes)


def _release(tensors: Mapping[str, Any], name: str) -> None:
    if isinstance(tensors, TensorFiles):
        tensors.release(name)


def _nbytes(leaf: Leaf) -> int:
    return int(np.prod(leaf.shape)) * np.dtype(jnp.dtype(leaf.dtype)).itemsize


def _aligned_empty(leaf: Leaf) -> np.ndarray:
    """Room for a leaf's parts, one below the other."""
    size = _nbytes(leaf)
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    offset = -memory.ctypes.data % _ALIGNMENT
    values = memory[offset : offset + size].view(jnp.dtype(leaf.dtype))
    return values.reshape(-1, *leaf.parts[0].wanted_shape[1:])
