"""RingCache: the rings of all layers of a model, as one immutable value."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array, ArrayLike, Int, Int32, UInt8

from pallas_kernels import V41, KVCacheFormat, KVRows, checks, load_rows, store_rows
from pallas_kernels.formats import check_cache_format
from pallas_kernels.serialization import register_serialization
from pallas_kernels.storage import check_rows, region_bytes
from swa_jax.config import DecoderConfig
from swa_jax.exported import ExportedSlot
from swa_jax.placement import CacheMemory, DeviceAxes, check_batch, check_distinct
from swa_jax.ring import RingGeometry

MAX_BLOCK_BYTES = 2**31 - 1
"""Blocks stay below 2 GiB, where 32-bit byte offsets end."""


@register_serialization
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RingCache:
    """Rings of all layers: a region for each layer in the state slot of each request.

    The value is immutable. Take a layer's view, use it, give the result back, and only then take
    the next: two live views of a block would be two versions of it.

    Attributes:
      blocks: uint8[slots, block bytes] each: one for all layers, several only above 2 GiB.
      layers: number of layers.
      geometry: of every ring.
      fmt: the rows' format.
      sharding: how the slots are split among devices; None on one device.
    """

    blocks: tuple[UInt8[Array, "slots _bytes"], ...]
    layers: int = dataclasses.field(metadata={"static": True})
    geometry: RingGeometry = dataclasses.field(metadata={"static": True})
    fmt: KVCacheFormat = dataclasses.field(metadata={"static": True})
    sharding: NamedSharding | None = dataclasses.field(default=None, metadata={"static": True})

    @classmethod
    def create(
        cls,
        slots: int,
        layers: int,
        geometry: RingGeometry,
        fmt: KVCacheFormat = V41,
        sharding: NamedSharding | None = None,
    ) -> "RingCache":
        """Empty rings.

        Args:
          slots: state slots; one request owns one.
          layers: number of layers.
          geometry: of every ring.
          fmt: the rows' format.
          sharding: puts the cache on several devices, and every call with it works where the rows
            are. The spec names the mesh axes that split the slots, as PartitionSpec("data") does.
            All other axes of the mesh split heads: along them the rows are replicated.

        Raises:
          ValueError: a size below 1, an unfit format or sharding, slots that cannot be divided, or
            a layer of more than 2 GiB on a device.
        """
        check_cache_format("fmt", fmt)
        checks.check_type("geometry", geometry, RingGeometry)
        for name, value in (("slots", slots), ("layers", layers)):
            checks.check_count(name, value)
        parts = DeviceAxes.of(sharding).slot_shards
        check_batch("slots", slots, parts)
        region = region_bytes(geometry.capacity, fmt)
        per_block = min(layers, MAX_BLOCK_BYTES // (slots // parts * region))
        if per_block == 0:
            raise ValueError(
                f"slots: expected at most {MAX_BLOCK_BYTES // region * parts}, the limit of 2 GiB "
                f"for one layer's rings, got {slots}"
            )
        blocks = tuple(
            jnp.zeros((slots, min(per_block, layers - first) * region), jnp.uint8, device=sharding)
            for first in range(0, layers, per_block)
        )
        return cls(blocks, layers, geometry, fmt, sharding)

    @classmethod
    def for_decoder(
        cls, config: DecoderConfig, slots: int, sharding: NamedSharding | None = None
    ) -> "RingCache":
        """Empty rings of all layers of a decoder.

        Args:
          config: the decoder's configuration.
          slots: state slots; one request owns one.
          sharding: as in `create`.

        Raises:
          ValueError: as `create`.
        """
        return cls.create(slots, config.num_layers, config.geometry, config.fmt, sharding)

    @property
    def slots(self) -> int:
        """State slots."""
        return self.blocks[0].shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, each counted once however many devices have a copy."""
        return sum(block.size for block in self.blocks)

    @property
    def memory(self) -> CacheMemory:
        """What the rows take on each device, and how they are split."""
        return CacheMemory.of(self.sharding, self.slots, self.nbytes)

    def layer(self, i: int | Int32[Array, ""]) -> KVRows:
        """The view of one layer's rows, without a copy.

        Args:
          i: the layer. It may be traced while all layers lie in one block, as when layers are
            scanned.

        Raises:
          ValueError: there is no such layer, or a traced index meets several blocks.
        """
        block, start = self._place(i)
        rows = KVRows.view(
            self.blocks[block],
            start=start,
            rows_per_slot=self.geometry.capacity,
            fmt=self.fmt,
        )
        return dataclasses.replace(rows, sharding=self.sharding)

    def with_layer(self, i: int | Int32[Array, ""], rows: KVRows) -> "RingCache":
        """The cache with a layer's new rows.

        Args:
          i: the layer whose view `rows` came from.
          rows: what an operation made of that view.

        Raises:
          ValueError: the rows are not of this cache's shape, format, geometry or sharding; or of
            another layer, where that is known.
        """
        block, start = self._place(i)
        check_rows(rows)
        if (
            rows.data.shape != self.blocks[block].shape
            or rows.fmt != self.fmt
            or rows.rows_per_slot != self.geometry.capacity
        ):
            raise ValueError(
                f"rows: expected {self.geometry.capacity} rows of {self.fmt.row_bytes} bytes "
                f"({self.fmt.name}) in {self.blocks[block].shape}, got {rows.rows_per_slot} of "
                f"{rows.fmt.row_bytes} ({rows.fmt.name}) in {rows.data.shape}"
            )
        if checks.is_known(start) and checks.is_known(rows.start) and start != rows.start:
            raise ValueError(
                f"rows: expected layer {i}, from byte {start} of a slot, got rows from byte "
                f"{rows.start}"
            )
        if rows.sharding != self.sharding:
            raise ValueError(f"rows: expected sharding {self.sharding}, got {rows.sharding}")
        blocks = (*self.blocks[:block], rows.data, *self.blocks[block + 1 :])
        return dataclasses.replace(self, blocks=blocks)

    def snapshot(self) -> "RingCache":
        """A copy that outlives the donation of this value."""
        return dataclasses.replace(self, blocks=tuple(jnp.copy(block) for block in self.blocks))

    def copy_slots(self, src: Int[ArrayLike, " n"], dst: Int[ArrayLike, " n"]) -> "RingCache":
        """Copies state slots into others, as when a request is forked.

        On several devices this is the one call that sends rows from one to another: each of the n
        slots to all of them.

        Args:
          src: integers[n], the slots to copy from, as they are before the call.
          dst: integers[n], the slots to copy to, distinct; -1 or a slot outside skips a pair, and
            so does such a src.

        Returns:
          The new cache.

        Raises:
          ValueError: a wrong shape or dtype, or known values that name a dst twice.
        """
        src, dst = checks.as_int32("src", src), checks.as_int32("dst", dst)
        checks.check_shape("src", src, (None,))
        checks.check_shape("dst", dst, src.shape)
        fits = (src >= 0) & (src < self.slots) & (dst >= 0)
        fits &= dst < self.slots
        if checks.is_known(src, dst):
            check_distinct("dst", np.asarray(dst)[np.asarray(fits)])
        beyond = self.slots + jnp.arange(dst.shape[0], dtype=jnp.int32)
        dst = jnp.where(fits, dst, beyond)
        source = jnp.where(fits, src, 0)
        blocks = tuple(
            block.at[dst].set(block[source], mode="drop", unique_indices=True)
            for block in self.blocks
        )
        if self.sharding is not None:
            blocks = lax.with_sharding_constraint(blocks, self.sharding)
        return dataclasses.replace(self, blocks=blocks)

    def export_slot(self, b: Int[ArrayLike, ""], next_position: Int[ArrayLike, ""]) -> ExportedSlot:
        """What a request in slot b needs to go on at next_position.

        Only rows of the positions next_position - (W - 1) to next_position - 1 are taken: no row
        of a former owner of the slot goes along.

        Args:
          b: integer, the state slot.
          next_position: integer, the position at which the request goes on.

        Raises:
          ValueError: not integers.
        """
        slots = self._window_slots(b, next_position)
        data = jnp.stack([load_rows(self.layer(i), slots) for i in range(self.layers)])
        next_position = checks.as_int32("next_position", next_position)
        return ExportedSlot(data, next_position, self.geometry, self.fmt)

    def import_slot(
        self, b: Int[ArrayLike, ""], exported: ExportedSlot
    ) -> tuple["RingCache", Int32[Array, ""]]:
        """Puts exported rows into a slot.

        Args:
          b: integer, the state slot.
          exported: from `export_slot` of a cache with the same layers, geometry and format.

        Returns:
          The new cache, and the position at which the request goes on.

        Raises:
          ValueError: another format, geometry, number of layers or width.
        """
        checks.check_type("exported", exported, ExportedSlot)
        for name in ("fmt", "geometry"):
            want, got = getattr(self, name), getattr(exported, name)
            if want != got:
                raise ValueError(f"exported: expected {name} {want}, got {got}")
        shape = (self.layers, self.geometry.window - 1, self.fmt.row_bytes)
        checks.check_shape("exported.data", exported.data, shape)
        slots = self._window_slots(b, exported.next_position)
        cache = self
        for i in range(self.layers):
            cache = cache.with_layer(i, store_rows(cache.layer(i), exported.data[i], slots))
        return cache, exported.next_position

    def _place(self, i) -> tuple[int, int | Int32[Array, ""]]:
        """Block and first byte of a layer."""
        region = region_bytes(self.geometry.capacity, self.fmt)
        number = checks.known_int("layer", i)
        if number is not None:
            if not 0 <= number < self.layers:
                raise ValueError(f"layer: expected 0 to {self.layers - 1}, got {number}")
            per_block = self.blocks[0].shape[1] // region
            return number // per_block, number % per_block * region
        if len(self.blocks) > 1:
            raise ValueError(
                f"layer: a traced index needs all layers in one block, got {len(self.blocks)} "
                f"blocks: use fewer slots, or layers that are not scanned"
            )
        return 0, i * region

    def _window_slots(self, b, next_position) -> Int32[Array, " w1"]:
        b, position = checks.as_int32("b", b), checks.as_int32("next_position", next_position)
        checks.check_shape("b", b, ())
        checks.check_shape("next_position", position, ())
        if checks.is_known(b) and not 0 <= b < self.slots:
            raise ValueError(f"b: expected a state slot from 0 to {self.slots - 1}, got {b}")
        checks.check_not_negative("next_position", position)
        before = jnp.arange(1 - self.geometry.window, 0, dtype=jnp.int32)
        positions = jnp.maximum(position + before, -1)
        return self.geometry.slots(jnp.broadcast_to(b, positions.shape), positions)
