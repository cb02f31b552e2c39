"""safetensors bytes in and out, with an error that names what is wrong."""

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from pallas_kernels import checks
from swa_jax.json_fields import parse_json
from swa_jax.reading import MAX_INDEX_BYTES

DTYPES: dict[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "F64": np.float64,
        "F32": np.float32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "I64": np.int64,
        "I32": np.int32,
        "I16": np.int16,
        "I8": np.int8,
        "U64": np.uint64,
        "U32": np.uint32,
        "U16": np.uint16,
        "U8": np.uint8,
        "BOOL": np.bool_,
    }.items()
}
"""NumPy's dtypes by their names in safetensors. A file may hold others, such as F4."""
_DTYPE_NAMES = tuple(dtype.name for dtype in DTYPES.values())


def read_safetensors(
    data: bytes, name: str = "data"
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Tensors and metadata of a safetensors file's bytes.

    Args:
      data: the whole file.
      name: what it is called in the message.

    Returns:
      Arrays by name, bfloat16 and eight-bit floats included, and the texts of the header.

    Raises:
      ValueError: the bytes are not a whole safetensors file, or hold a name twice, or a dtype or
        shape that NumPy has not.
    """
    try:
        header_size(data[:8])
        entries = safetensors.deserialize(data)
        header = _parse_header(data)
    except (safetensors.SafetensorError, ValueError) as error:
        raise not_safetensors(name, error) from None
    tensors = {
        key: as_array(name, key, entry["dtype"], entry["shape"], entry["data"])
        for key, entry in entries
    }
    return tensors, header.get("__metadata__") or {}


def write_safetensors(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """The inverse of `read_safetensors`. Equal contents give equal bytes.

    Raises:
      ValueError: a tensor has the name of the metadata, or that is no texts by name.
    """
    if "__metadata__" in tensors:
        raise ValueError("tensors: expected other names than '__metadata__', got it")
    checks.check_type("metadata", metadata, Mapping)
    for name, text in metadata.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise ValueError(f"metadata: expected texts by name, got {name!r}: {text!r}")
    data = safetensors.numpy.save(dict(tensors), dict(metadata))
    # the library writes the metadata in any order
    return _encode_header(_parse_header(data)) + data[8 + int.from_bytes(data[:8], "little") :]


def make_header(
    entries: Mapping[str, tuple[np.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """What stands before the tensors' bytes in a safetensors file.

    Args:
      entries: dtype and shape by name, in the order in which the tensors follow. Wider dtypes
        should come first: then every tensor is aligned.
      metadata: texts to keep.

    Returns:
      The bytes. Equal contents give equal ones.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape) in entries.items():
        start, end = end, end + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": names[dtype], "shape": shape, "data_offsets": [start, end]}
    return _encode_header(header)


def open_new(path: Path) -> BinaryIO:
    """A new file to write bytes to, in place of what has its name: no link is followed.

    Raises:
      ValueError: a pipe or a device has it.
      OSError: it cannot be made.
    """
    _check_replaceable(path)
    path.unlink(missing_ok=True)
    return path.open("xb")


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file that is there whole or not at all, in place of what has its name.

    Raises:
      ValueError: a pipe or a device has its name.
      OSError: it cannot be written; nothing of it is left.
    """
    _check_replaceable(path)
    partial = path.with_name(f".{secrets.token_hex(8)}.partial")  # nobody's, and short
    try:
        with partial.open("xb") as file:
            file.write(data)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def check_dtype(name: str, dtype: Any) -> None:
    """Raises ValueError unless a tensor of the dtype can be written and read."""
    if dtype.name not in _DTYPE_NAMES:
        raise ValueError(f"{name}: expected a dtype of {', '.join(_DTYPE_NAMES)}, got {dtype}")


def checked_path(name: str, value: Any) -> Path:
    """A file's or directory's path. ValueError for what is none."""
    if not isinstance(value, str | os.PathLike):
        raise ValueError(f"{name}: expected a path, got {type(value).__name__}")
    return Path(value)


def as_array(
    name: str, key: str, dtype: str, shape: Sequence[int], buffer: Any, offset: int = 0
) -> np.ndarray:
    """A tensor of a file as an array over its bytes.

    Args:
      name: what the file is called in the message.
      key: the tensor's name.
      dtype: its dtype by the name in safetensors.
      shape: its shape.
      buffer: bytes that hold it, or what gives them, such as a memory map.
      offset: where it begins there.

    Raises:
      ValueError: NumPy has no such dtype, or no such shape.
    """
    if dtype not in DTYPES:
        raise ValueError(f"{name}: expected tensors of {', '.join(DTYPES)}, got {dtype} in {key}")
    try:
        return np.ndarray(tuple(shape), DTYPES[dtype], buffer, offset)
    except (OverflowError, TypeError, ValueError) as error:  # many axes, or a size beside a 0
        raise ValueError(f"{name}: expected a shape that NumPy has, got {key}: {error}") from None


def not_safetensors(name: str, error: Exception) -> ValueError:
    """The error for a file that is cut short, or of another kind."""
    return ValueError(f"{name}: expected a whole safetensors file, got {error}")


def header_size(start: bytes) -> int:
    """The length of a safetensors header, from the eight bytes before it.

    Raises:
      ValueError: it is longer than that of any model.
    """
    size = int.from_bytes(start, "little")
    if size > MAX_INDEX_BYTES:
        raise ValueError(f"a header of {size:,} bytes, more than {MAX_INDEX_BYTES:,}")
    return size


def _check_replaceable(path: Path) -> None:
    # Who may unlink /dev/null would leave a file in its place.
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ValueError(f"{path}: expected a file, got a pipe or a device")


def _parse_header(data: bytes) -> dict[str, Any]:
    # The library lets a tensor's name stand twice, and takes the last.
    return parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")])


def _encode_header(header: Mapping[str, Any]) -> bytes:
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    padded = text.ljust(-(-len(text) // 8) * 8)
    return len(padded).to_bytes(8, "little") + padded
