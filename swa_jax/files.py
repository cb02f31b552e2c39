"""safetensors bytes in and out, with an error that names what is wrong."""

import json
from collections.abc import Mapping

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

_DTYPES = {
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
}


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
      ValueError: the bytes are not a whole safetensors file, or hold an unknown dtype.
    """
    try:
        entries = safetensors.deserialize(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    except (safetensors.SafetensorError, ValueError) as error:
        raise ValueError(f"{name}: expected a whole safetensors file, got {error}") from None
    tensors = {}
    for key, entry in entries:
        if entry["dtype"] not in _DTYPES:
            raise ValueError(
                f"{name}: expected tensors of {', '.join(_DTYPES)}, got {entry['dtype']} in {key}"
            )
        array = np.frombuffer(entry["data"], _DTYPES[entry["dtype"]])
        tensors[key] = array.reshape(entry["shape"])
    return tensors, header.get("__metadata__") or {}


def write_safetensors(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """The inverse of `read_safetensors`. Equal contents give equal bytes."""
    data = safetensors.numpy.save(dict(tensors), dict(metadata))
    size = int.from_bytes(data[:8], "little")
    # the library writes the metadata in any order
    header = json.dumps(json.loads(data[8 : 8 + size]), sort_keys=True, separators=(",", ":"))
    padded = header.encode().ljust(-(-len(header.encode()) // 8) * 8)
    return len(padded).to_bytes(8, "little") + padded + data[8 + size :]
