"""ExportedSlot: the rows of one request, to be put into another slot or process."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, UInt8

from pallas_kernels import KVCacheFormat, checks
from pallas_kernels.serialization import register_serialization
from swa_jax.files import read_safetensors, write_safetensors
from swa_jax.json_fields import build, parse_object
from swa_jax.ring import RingGeometry


@register_serialization
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExportedSlot:
    """The rows a request needs to go on: what `RingCache.export_slot` returns.

    Attributes:
      data: uint8[layers, W - 1, row_bytes], the rows before next_position, oldest first; zeros
        where there is none. Equal prefixes give equal bytes.
      next_position: int32 scalar, the position at which the request goes on.
      geometry: of the ring it was taken from.
      fmt: the rows' format.
    """

    data: UInt8[Array, "layers w1 row_bytes"]
    next_position: Int32[Array, ""]
    geometry: RingGeometry = dataclasses.field(metadata={"static": True})
    fmt: KVCacheFormat = dataclasses.field(metadata={"static": True})

    def to_bytes(self, model: str = "") -> bytes:
        """The rows and what identifies them, in the safetensors format.

        Args:
          model: which model the rows are of, as `prefixes.model_fingerprint` names it; who reads
            the bytes has to name the same one.

        Raises:
          ValueError: that is no text.
        """
        return write_safetensors(*self.to_tensors(model))

    @classmethod
    def from_bytes(cls, data: bytes, model: str = "") -> "ExportedSlot":
        """The inverse of `to_bytes`.

        Args:
          data: the bytes.
          model: what `to_bytes` was given.

        Raises:
          ValueError: the bytes are cut short, changed or something else, or the rows are of
            another model.
        """
        checks.check_type("data", data, bytes)
        return cls.from_tensors(*read_safetensors(data, "exported slot"), model)

    def to_tensors(self, model: str = "") -> tuple[dict[str, np.ndarray], dict[str, str]]:
        """What `to_bytes` writes: arrays by name, and the texts of the header."""
        checks.check_type("model", model, str)
        rows = np.asarray(self.data)
        metadata = {
            "window": str(self.geometry.window),
            "capacity": str(self.geometry.capacity),
            "format": json.dumps(dataclasses.asdict(self.fmt)),
            "next_position": str(int(self.next_position)),
            "model": model,
        }
        return {"rows": rows}, metadata | {"sha256": _digest(rows, metadata)}

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str], model: str = ""
    ) -> "ExportedSlot":
        """The inverse of `to_tensors`. Raises ValueError as `from_bytes`; other tensors may be."""
        checks.check_type("model", model, str)
        try:
            texts = {name: metadata[name] for name in _HEADER}
            rows, digest = tensors["rows"], metadata["sha256"]
            fmt = build(KVCacheFormat, parse_object("format", texts["format"]))
            geometry = RingGeometry(int(texts["window"]), int(texts["capacity"]))
            next_position = checks.as_int32("next_position", int(texts["next_position"]))
        except KeyError as error:
            raise ValueError(f"exported slot: expected an entry {error}, got none") from None
        except ValueError as error:
            raise ValueError(f"exported slot: expected another header, got {error}") from None
        if texts["model"] != model:
            raise ValueError(
                f"exported slot: expected rows of model {model!r}, got {texts['model']!r}"
            )
        if rows.dtype != np.uint8:
            raise ValueError(f"exported slot: expected uint8 rows, got {rows.dtype}")
        checks.check_shape("exported slot", rows, (None, geometry.window - 1, fmt.row_bytes))
        if next_position < 0:
            raise ValueError(f"exported slot: expected a position from 0, got {next_position}")
        if _digest(rows, texts) != digest:
            raise ValueError("exported slot: expected rows and header of its sha256, got others")
        return cls(jnp.asarray(rows), next_position, geometry, fmt)


_HEADER = ("window", "capacity", "format", "next_position", "model")


def _digest(rows: UInt8[np.ndarray, "layers w1 row_bytes"], header: Mapping[str, str]) -> str:
    """sha256 over the rows and what the header says of them."""
    digest = hashlib.sha256(json.dumps([header[name] for name in _HEADER]).encode())
    digest.update(rows.tobytes())
    return digest.hexdigest()
