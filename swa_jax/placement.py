"""Where state slots, heads and requests lie on several devices: what a cache's sharding says.

A cache's sharding is a NamedSharding whose spec names the mesh axes that split its state slots.
Every other axis of the mesh splits heads: rows belong to all heads, so they are replicated there.
"""

import dataclasses
import math
from typing import Any

import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, ArrayLike, Bool, Float32, Int, Int32

from pallas_kernels import checks


@dataclasses.dataclass(frozen=True)
class DeviceAxes:
    """The axes of a cache's mesh, by what they split.

    Attributes:
      slots: axes that split state slots, and with them requests; the first varies slowest.
      heads: the others.
      slot_shards: parts that the slots are in.
      head_shards: parts that the heads are in; each holds the same rows.
    """

    slots: tuple[str, ...]
    heads: tuple[str, ...]
    slot_shards: int
    head_shards: int

    @classmethod
    def of(cls, sharding: NamedSharding | None) -> "DeviceAxes":
        """The axes that a cache's sharding names; one part of each without a sharding.

        Args:
          sharding: of a cache.

        Raises:
          ValueError: as `check_sharding`.
        """
        if sharding is None:
            return cls((), (), 1, 1)
        check_sharding(sharding)
        entry = sharding.spec[0] if len(sharding.spec) else None
        slots = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        sizes = sharding.mesh.shape
        heads = tuple(name for name in sharding.mesh.axis_names if name not in slots)
        slot_shards, head_shards = (
            math.prod(sizes[name] for name in names) for names in (slots, heads)
        )
        return cls(slots, heads, slot_shards, head_shards)


@dataclasses.dataclass(frozen=True)
class CacheMemory:
    """What a cache takes.

    Attributes:
      mode: in words, what the devices share out.
      devices: how many there are.
      slots: state slots of the cache.
      slots_per_device: those that a device has.
      copies: how many devices have the same rows.
      bytes_per_device: of all layers' rows on one device.
      bytes_of_all_devices: what they take together.
    """

    mode: str
    devices: int
    slots: int
    slots_per_device: int
    copies: int
    bytes_per_device: int
    bytes_of_all_devices: int

    @classmethod
    def of(cls, sharding: NamedSharding | None, slots: int, nbytes: int) -> "CacheMemory":
        """The memory of a cache.

        Args:
          sharding: of the cache.
          slots: its state slots.
          nbytes: bytes of its rows, each counted once.
        """
        axes = DeviceAxes.of(sharding)
        shards, copies = axes.slot_shards, axes.head_shards
        parts = [f"requests over {shards}"] * (shards > 1) + [
            f"heads over {copies}, each with a copy of the rows"
        ] * (copies > 1)
        return cls(
            mode="; ".join(parts) or "one device",
            devices=shards * copies,
            slots=slots,
            slots_per_device=slots // shards,
            copies=copies,
            bytes_per_device=nbytes // shards,
            bytes_of_all_devices=nbytes * copies,
        )


def check_sharding(sharding: object) -> None:
    """Raises ValueError unless a cache can lie like this."""
    if not isinstance(sharding, NamedSharding):
        raise ValueError(
            f"sharding: expected a NamedSharding or None, got {type(sharding).__name__}"
        )
    mesh, spec = sharding.mesh, sharding.spec
    if not isinstance(mesh, Mesh):
        raise ValueError(f"sharding: expected a mesh of devices, got {type(mesh).__name__}")
    if any(kind is not AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(
            f"sharding: expected a mesh whose axes have AxisType.Auto, as jax.sharding.Mesh makes "
            f"them, got {mesh.axis_types}"
        )
    names = spec[0] if len(spec) else None
    plain = names is None or isinstance(names, str | tuple)
    if any(entry is not None for entry in spec[1:]) or len(spec) > 2 or not plain:
        raise ValueError(
            f"sharding: expected a spec that names the axes of the slots only, as "
            f"PartitionSpec('data') does: a row is not divided; got {spec}"
        )


def replicated(sharding: NamedSharding | None) -> NamedSharding | None:
    """The sharding of what lies whole on every device of a cache's mesh; None without one."""
    return None if sharding is None else NamedSharding(sharding.mesh, PartitionSpec())


def replicate(tree: Any, sharding: NamedSharding | None) -> Any:
    """A pytree of arrays, each whole on every device of a cache's mesh; without one, as it is."""
    everywhere = replicated(sharding)
    return tree if everywhere is None else lax.with_sharding_constraint(tree, everywhere)


def gather_scores(
    scores: Float32[Array, "b *t vocab"], sharding: NamedSharding | None
) -> Float32[Array, "b *t vocab"]:
    """Vocabulary scores, those of a request whole on the devices that have its slot.

    Args:
      scores: float32[B, ..., vocab].
      sharding: of the cache; without one, the scores are as they were.

    Returns:
      float32[B, ..., vocab].
    """
    if sharding is None:
        return scores
    axes = DeviceAxes.of(sharding)
    requests = axes.slots or None
    specs = [PartitionSpec(requests)]
    if scores.shape[-1] % axes.head_shards == 0:
        # First where the table is: XLA would rather gather the table than scores.
        between = (None,) * (scores.ndim - 2)
        specs.insert(0, PartitionSpec(requests, *between, axes.heads or None))
    for spec in specs:
        scores = lax.with_sharding_constraint(scores, NamedSharding(sharding.mesh, spec))
    return scores


def checked_slots(state_ids: ArrayLike, slots: int) -> Int32[np.ndarray, " b"]:
    """State slots as a NumPy array; ValueError for one that a cache of so many does not have."""
    ids = np.asarray(state_ids)
    if np.any((ids < 0) | (ids >= slots)):
        raise ValueError(f"state_ids: expected 0 to {slots - 1}, got {ids.tolist()}")
    return ids


def check_distinct(
    name: str, ids: Int32[np.ndarray, " b"], counts: Bool[np.ndarray, " b"] | None = None
) -> None:
    """Raises ValueError where a state slot stands twice among those that count, by default all."""
    counted = ids if counts is None else ids[counts]
    if len(np.unique(counted)) != len(counted):
        among = "" if counts is None else " among requests with tokens"
        raise ValueError(f"{name}: expected distinct state slots{among}, got {ids.tolist()}")


def first_state_ids(
    sharding: NamedSharding | None, slots: int, batch: int
) -> Int32[np.ndarray, " b"]:
    """State slots for B requests such that each lies with its request: the first of every shard.

    Args:
      sharding: of the cache.
      slots: its state slots.
      batch: B, a multiple of the parts that the slots are in.

    Returns:
      int32[B]; 0 to B - 1 without a sharding.

    Raises:
      ValueError: more requests than slots, or a number that cannot be divided.
    """
    shards = DeviceAxes.of(sharding).slot_shards
    if batch > slots:
        raise ValueError(f"cache: expected at least {batch} state slots, got {slots}")
    check_batch("requests", batch, shards)
    first = np.arange(shards, dtype=np.int32)[:, None] * (slots // shards)
    return (first + np.arange(batch // shards, dtype=np.int32)).reshape(-1)


def place_requests(
    sharding: NamedSharding | None,
    slots: int,
    state_ids: Int[ArrayLike, " b"],
    per_shard: int | None = None,
) -> tuple[Int32[np.ndarray, " b"], int]:
    """Places in a padded batch at which each request meets the device that has its state slot.

    A server that is given requests in any order makes its arrays with them: `padded =
    np.full(size, -1); padded[places] = state_ids`, the same for tokens and positions, and
    `results[places]` has the results in the order of the requests.

    Args:
      sharding: of the cache.
      slots: its state slots.
      state_ids: integers[B], the requests' state slots.
      per_shard: places of each shard, so that a size stays as requests come and go; by default as
        many as the fullest shard needs.

    Returns:
      int32[B], a place for each request; and the size of the padded batch.

    Raises:
      ValueError: a state slot out of range, or more requests of a shard than places.
    """
    shards = DeviceAxes.of(sharding).slot_shards
    ids = checked_slots(checks.as_int32("state_ids", state_ids), slots)
    checks.check_shape("state_ids", ids, (None,))
    shard = ids // (slots // shards)
    counts = np.bincount(shard, minlength=shards)
    room = max(int(counts.max(initial=0)), 1) if per_shard is None else per_shard
    checks.check_count("per_shard", room)
    if np.any(counts > room):
        raise ValueError(
            f"per_shard: expected at least {counts.max()}, the requests of one device, got {room}"
        )
    order = np.argsort(shard, kind="stable")
    within = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
    places = np.empty(len(ids), np.int32)
    places[order] = shard[order] * room + within
    return places, shards * room


def check_places(
    sharding: NamedSharding | None, slots: int, state_ids: Int32[np.ndarray, " b"]
) -> None:
    """Raises ValueError unless each request's state slot lies with the request.

    Args:
      sharding: of the cache.
      slots: its state slots.
      state_ids: int32[B], known values; -1 for none.
    """
    shards = DeviceAxes.of(sharding).slot_shards
    check_batch("requests", len(state_ids), shards)
    shard = np.arange(len(state_ids)) // (len(state_ids) // shards)
    elsewhere = (state_ids >= 0) & (state_ids // (slots // shards) != shard)
    for request in np.flatnonzero(elsewhere)[:1]:
        first = shard[request] * (slots // shards)
        raise ValueError(
            f"state_ids: expected a state slot from {first} to {first + slots // shards - 1} for "
            f"request {request} of {len(state_ids)}, as its device has those, got "
            f"{state_ids[request]}; place_requests says where requests go"
        )


def check_batch(name: str, count: int, shards: int) -> None:
    """Raises ValueError unless `count` can be divided among the devices that slots lie on."""
    if count == 0 or count % shards:
        raise ValueError(
            f"{name}: expected a multiple of {shards}, the parts that the slots are in, got {count}"
        )
