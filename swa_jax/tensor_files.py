"""A checkpoint's safetensors files, one or many, as one read-only mapping of memory-mapped arrays.

Nothing is read before it is asked for, and nothing outside the directory is opened.
"""

import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import safetensors

from swa_jax.files import as_array, checked_path, header_size, not_safetensors
from swa_jax.json_fields import parse_json
from swa_jax.reading import MAX_INDEX_BYTES, inside, open_regular, read_regular

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_MAX_LISTED = 40
_PICKLED = (".bin", ".ckpt", ".pkl", ".pt", ".pth")


class _Entry(NamedTuple):
    """Where a tensor lies."""

    file: str
    data: mmap.mmap
    dtype: str
    shape: tuple[int, ...]
    start: int


class TensorFiles(Mapping[str, np.ndarray]):
    """Tensors of files by name, see `open_tensors`. Arrays are read-only views of memory maps.

    A file must stay as it is while arrays of it are in use: where it has become shorter, reading
    ends the process.
    """

    def __init__(self, entries: Mapping[str, _Entry]):
        self._entries = entries

    def __getitem__(self, name: str) -> np.ndarray:
        """A tensor. ValueError if NumPy has no such dtype or shape; KeyError if there is none."""
        file, data, dtype, shape, start = self._entries[name]
        return as_array(file, name, dtype, shape, data, start)

    def __contains__(self, name: object) -> bool:
        return name in self._entries  # whatever its dtype

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def release(self, name: str) -> None:
        """Takes the pages of a tensor's file out of this process's memory.

        They come back when they are read. All pages of the file, because the kernel puts neighbours
        of a page there together with it.
        """
        self._entries[name].data.madvise(mmap.MADV_DONTNEED)


def open_tensors(path: str | os.PathLike[str]) -> TensorFiles:
    """The tensors of a checkpoint by name, without reading them.

    Args:
      path: a safetensors file; or a directory that holds model.safetensors, or the files that its
        model.safetensors.index.json names. Only files of the directory itself are opened; in a
        snapshot of a Hugging Face cache they may be links to the cache's blobs.

    Returns:
      A mapping of read-only arrays. Its files stay open as long as it, or an array, is alive, and
      must not become shorter meanwhile: reading what is gone ends the process.

    Raises:
      ValueError: a file is not whole or not safetensors, or the index and its files differ.
      OSError: there is no such file, or it cannot be read.
    """
    path = checked_path("path", path)
    if not path.is_dir():
        return TensorFiles(_read_entries(path))
    single, index = path / SINGLE, path / INDEX
    if single.is_file() and index.is_file():
        raise ValueError(f"{path}: expected one of {SINGLE} and {INDEX}, got both")
    if index.is_file():
        return TensorFiles(_read_sharded(path, index))
    if single.is_file():
        return TensorFiles(_read_entries(inside(path, SINGLE)))
    pickled = sorted(file.name for file in path.iterdir() if file.suffix in _PICKLED)
    if pickled:
        raise ValueError(
            f"{path}: expected {SINGLE} or {INDEX}, got {pickled[0]}: reading pickled weights runs "
            f"code from the file; convert them to safetensors where they come from"
        )
    raise FileNotFoundError(f"{path}: expected {SINGLE} or {INDEX}, got neither")


def listed(faults: Iterable[str]) -> str:
    """Faults as one text, of which no more than a reader can use."""
    faults = list(faults)
    more = len(faults) - _MAX_LISTED
    return "; ".join(faults[:_MAX_LISTED]) + (f"; and {more} more" if more > 0 else "")


def _read_entries(path: Path) -> dict[str, _Entry]:
    """The header of one file; the library checks that offsets and shapes fit it without holes."""
    with open_regular(path) as file:
        try:
            size = header_size(file.read(8))
            with safetensors.safe_open(path, framework="numpy"):
                header = parse_json(file.read(size))
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (safetensors.SafetensorError, ValueError) as error:
            raise not_safetensors(str(path), error) from None
    header.pop("__metadata__", None)
    entries = {}
    for name, field in header.items():
        start = 8 + size + field["data_offsets"][0]
        entries[name] = _Entry(str(path), data, field["dtype"], tuple(field["shape"]), start)
    return entries


def _read_sharded(directory: Path, index: Path) -> dict[str, _Entry]:
    """The headers of all files that the index names, which must say the same as it."""
    weight_map = _read_index(inside(directory, INDEX))
    wanted: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        wanted.setdefault(shard, set()).add(name)
    files = {shard: inside(directory, shard) for shard in sorted(wanted)}
    missing = [f"no {shard}" for shard, path in files.items() if not path.is_file()]
    if missing:
        raise ValueError(f"{index}: expected its files beside it, got {listed(missing)}")
    entries: dict[str, _Entry] = {}
    faults = []
    for shard, path in files.items():
        found = _read_entries(path)
        faults += [f"{shard} lacks {name}" for name in sorted(wanted[shard] - set(found))]
        faults += [
            f"{shard} holds {name}, which the index does not list there"
            for name in sorted(set(found) - wanted[shard])
        ]
        entries |= {name: entry for name, entry in found.items() if name in wanted[shard]}
    if faults:
        raise ValueError(f"{index}: expected what its files hold, got {listed(faults)}")
    return {name: entries[name] for name in weight_map}


def _read_index(index: Path) -> dict[str, str]:
    """The weight map of an index. Its total_size is not looked at: converters leave wrong ones."""
    data = read_regular(index, MAX_INDEX_BYTES)
    try:
        fields = parse_json(data)
    except ValueError as error:
        raise ValueError(f"{index}: expected JSON text, got {error}") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("weight_map"), dict):
        raise ValueError(f"{index}: expected an object with a weight_map, got none")
    for shard in fields["weight_map"].values():
        plain = isinstance(shard, str) and shard not in ("", ".", "..")
        # half a surrogate pair is no name either, as no file system can hold it
        if not plain or any(c in "/\\\0" or "\ud800" <= c <= "\udfff" for c in shard):
            raise ValueError(f"{index}: expected names of files beside it, got {shard!r}")
    return fields["weight_map"]
