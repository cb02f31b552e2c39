"""One attention call on several devices: each works on its own state slots and heads."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from pallas_kernels import ExtraKV, KVRows, checks
from swa_jax.metadata import DecodeMetadata, PrefillMetadata
from swa_jax.placement import DeviceAxes, check_batch, check_places

P = PartitionSpec


def on_each_device(
    attend: Callable[..., tuple[Array, KVRows]],
    params: Any,
    q: Float[Array, "b t h d"],
    latents: Float[Array, "b t d"],
    rotation: Any,
    rows: KVRows,
    meta: DecodeMetadata | PrefillMetadata,
    extra: ExtraKV | None,
) -> tuple[Float[Array, "b t h d"], KVRows]:
    """Runs a call of the attention where its rows are. No row goes from one device to another.

    Request i of B meets the slots of part i // (B / parts): the metadata has to be in that order,
    see `placement.place_requests`. Where its values are known this is checked. In a compiled
    program nothing is known: a request whose state slot lies elsewhere stores nothing there, and
    its output is NaN. So is that of a request that names compressed rows of other devices.

    Args:
      attend: the call for one device: (params, q, latents, rotation, rows, meta, extra=) to
        (outputs, rows).
      params: kv_norm [D] and sinks [H].
      q: floating[B, T, H, D].
      latents: floating[B, T, D].
      rotation: cosines and sines.
      rows: the layer's view of a cache with a sharding.
      meta: addresses in the whole cache.
      extra: a compressed cache, its rows with the same sharding, or without one: then they lie
        whole on every device.

    Returns:
      As `attend`.

    Raises:
      ValueError: requests, slots or heads cannot be divided, or a request stands in the wrong
        place.
      NotImplementedError: the compressed cache has another sharding.
    """
    sharding = rows.sharding
    assert sharding is not None  # the caller saw to it
    axes = DeviceAxes.of(sharding)
    batch, heads = q.shape[0], q.shape[2]
    check_batch("x", batch, axes.slot_shards)
    if heads % axes.head_shards:
        raise ValueError(
            f"num_heads: expected a multiple of {axes.head_shards}, the devices of "
            f"{axes.heads}, got {heads}"
        )
    if checks.is_known(meta.slots):
        _check_known(meta, batch, rows)
    if extra is not None and extra.rows.sharding not in (None, sharding):
        raise NotImplementedError(
            f"extra: a compressed cache has the sharding of the ring, {sharding}, or none; "
            f"got {extra.rows.sharding}"
        )
    by_slot, by_head = P(axes.slots or None), P(axes.heads or None)
    queries = P(axes.slots or None, None, axes.heads or None)

    def local(kv_norm, sinks, q, latents, rotation, data, start, meta, extra):
        part = KVRows(data, start, rows.rows_per_slot, rows.fmt)
        shard = lax.axis_index(axes.slots) if axes.slots else jnp.int32(0)
        lost = jnp.zeros((q.shape[0], 1), bool)
        if extra is not None and extra.rows.sharding is not None:
            own = dataclasses.replace(extra.rows, sharding=None)
            indices = checks.as_int32("extra.indices", extra.indices)
            named = (indices >= 0) & (indices < own.num_rows * axes.slot_shards)
            if extra.lengths is not None:
                column = jnp.arange(indices.shape[1], dtype=jnp.int32)[None, :]
                named &= column < extra.lengths[:, None]
            indices = _within(indices, shard, own)
            lost = named & (indices < 0)
            extra = dataclasses.replace(extra, rows=own, indices=indices)
        mine = meta.replace_addresses(lambda slots: _within(slots, shard, part))
        out, part = attend(
            {"kv_norm": kv_norm, "sinks": sinks}, q, latents, rotation, part, mine, extra=extra
        )
        exists = (meta.slots >= 0) & (meta.slots < rows.num_rows)
        elsewhere = jnp.any((exists & (mine.slots < 0)).reshape(q.shape[0], -1), axis=1)
        elsewhere |= jnp.any(lost.reshape(q.shape[0], -1), axis=1)
        nan = jnp.asarray(jnp.nan, out.dtype)
        return jnp.where(elsewhere[:, None, None, None], nan, out), part.data

    mapped = jax.shard_map(
        local,
        mesh=sharding.mesh,
        in_specs=(
            P(),
            by_head,
            queries,
            by_slot,
            by_slot,
            by_slot,
            P(),
            by_slot,
            _specs_of_extra(extra, by_slot),
        ),  # fmt: skip
        out_specs=(queries, by_slot),
        check_vma=False,  # the kernels say nothing of how their results vary
    )
    out, data = mapped(
        params["kv_norm"], params["sinks"], q, latents, rotation, rows.data, rows.start, meta, extra
    )
    return out, dataclasses.replace(rows, data=data)


def _within(indices: Array, shard: Array, part: KVRows) -> Array:
    """Indices of one device's rows; -1 for those of others."""
    local = indices - shard * part.num_rows
    return jnp.where((indices >= 0) & (local >= 0) & (local < part.num_rows), local, -1)


def _specs_of_extra(extra: ExtraKV | None, by_slot: PartitionSpec) -> Any:
    if extra is None:
        return None
    data = P() if extra.rows.sharding is None else by_slot
    return ExtraKV(
        dataclasses.replace(extra.rows, data=data, start=P()),  # pyright: ignore[reportArgumentType]
        by_slot,  # pyright: ignore[reportArgumentType]
        None if extra.lengths is None else by_slot,  # pyright: ignore[reportArgumentType]
    )


def _check_known(meta, batch: int, rows: KVRows) -> None:
    """Every request's state slot, told by where it stores."""
    slots = np.asarray(meta.slots).reshape(batch, -1)
    state_ids = np.where(slots >= 0, slots // rows.rows_per_slot, -1).max(axis=1)
    check_places(rows.sharding, rows.data.shape[0], state_ids.astype(np.int32))
