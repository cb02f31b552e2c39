"""Files that others wrote: regular ones alone, JSON of bounded size, none elsewhere by a link."""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from swa_jax.json_fields import parse_object

# As objects JSON takes up to thirty times its bytes. An index or header of the largest models has
# half of what it may have, and a configuration some kilobytes.
MAX_INDEX_BYTES, MAX_OBJECT_BYTES = 32_000_000, 4_000_000


@contextlib.contextmanager
def open_regular(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to read bytes from, open within the context.

    Raises:
      ValueError: it is a pipe or a device, which may have no end or never begin.
      OSError: it cannot be opened, or is a directory.
    """
    with open(path, "rb", opener=_open_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{path}: expected a regular file, got a pipe or a device")
        yield file


def read_regular(path: str | os.PathLike[str], most: int | None = None) -> bytes:
    """The bytes of a file.

    Args:
      path: the file.
      most: how many it may have; None for any number.

    Raises:
      ValueError: it has more, or as `open_regular`.
      OSError: as `open_regular`.
    """
    with open_regular(path) as file:
        data = file.read() if most is None else file.read(most + 1)
    if most is not None and len(data) > most:
        raise ValueError(f"{path}: expected at most {most:,} bytes, got more")
    return data


def read_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The fields of the JSON object that a file holds.

    Raises:
      ValueError: it holds something else, or as `read_regular`.
      OSError: as `read_regular`.
    """
    return parse_object(str(path), read_regular(path, MAX_OBJECT_BYTES))


def inside(directory: Path, name: str) -> Path:
    """A file of a model's directory.

    In a snapshot of a Hugging Face cache it may be a link to the cache's blobs.

    Raises:
      ValueError: it is elsewhere, through a link.
    """
    path = directory / name
    folder, target = Path(os.path.realpath(directory)), Path(os.path.realpath(path))
    allowed = [folder]
    if folder.parent.name == "snapshots":  # of a Hugging Face cache: links to files named by hash
        allowed.append(folder.parent.parent / "blobs")
    if target.parent not in allowed:
        raise ValueError(f"{directory}: expected files of its own, got {name}, a link out of it")
    return path


def _open_without_waiting(path: str, flags: int) -> int:
    """Opens a file; of a pipe it does not wait until somebody writes to it."""
    return os.open(path, flags | os.O_NONBLOCK)
