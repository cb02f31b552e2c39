"""ExportedSlot: the rows of one request, to be put into another slot or process."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, UInt8

from pallas_kernels import KVCacheFormat, checks
from pallas_kernels.serialization import register_serialization
from swa_jax.files import read_safetensors, write_safetensors
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

    def to_bytes(self) -> bytes:
        """The rows and what identifies them, in the safetensors format."""
        metadata = {
            "window": str(self.geometry.window),
            "capacity": str(self.geometry.capacity),
            "format": json.dumps(dataclasses.asdict(self.fmt)),
            "next_position": str(int(self.next_position)),
        }
        return write_safetensors({"rows": np.asarray(self.data)}, metadata)

    @classmethod
    def from_bytes(cls, data: bytes) -> "ExportedSlot":
        """The inverse of `to_bytes`.

        Raises:
          ValueError: the bytes are cut short, or are something else.
        """
        tensors, metadata = read_safetensors(data, "exported slot")
        try:
            fmt = KVCacheFormat(**json.loads(metadata["format"]))
            geometry = RingGeometry(int(metadata["window"]), int(metadata["capacity"]))
            next_position = checks.as_int32("next_position", int(metadata["next_position"]))
            rows = tensors["rows"]
        except KeyError as error:
            raise ValueError(f"exported slot: expected an entry {error}, got none") from None
        except (TypeError, ValueError) as error:
            raise ValueError(f"exported slot: expected another header, got {error}") from None
        if rows.dtype != np.uint8:
            raise ValueError(f"exported slot: expected uint8 rows, got {rows.dtype}")
        checks.check_shape("exported slot", rows, (None, geometry.window - 1, fmt.row_bytes))
        if next_position < 0:
            raise ValueError(f"exported slot: expected a position from 0, got {next_position}")
        return cls(jnp.asarray(rows), next_position, geometry, fmt)
