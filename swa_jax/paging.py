"""Rows of requests from an engine's pages into rings, and back."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Int, Int32

from pallas_kernels import KVRows, checks, load_rows, quantize_rows, store_rows
from pallas_kernels.serialization import register_serialization
from pallas_kernels.storage import check_rows, is_valid_index
from swa_jax.layouts import (
    PagedRows,
    check_paged,
    is_valid_slot,
    load_paged,
    store_paged,
)
from swa_jax.placement import check_distinct
from swa_jax.ring import RingGeometry


@register_serialization
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PageAddresses:
    """Where the same rows lie in rings and in pages: built once, shared by all layers.

    Attributes:
      ring_slots: int32[B, S], each request's last S positions in its ring, oldest first; -1 where
        there is none.
      page_slots: int32[B, S], the same positions in pages; -1 where there is none, or no page.
      tokens_per_page: of the pages.
      geometry: of the rings.
    """

    ring_slots: Int32[Array, "b s"]
    page_slots: Int32[Array, "b s"]
    tokens_per_page: int = dataclasses.field(metadata={"static": True})
    geometry: RingGeometry = dataclasses.field(metadata={"static": True})

    @classmethod
    def build(
        cls,
        geometry: RingGeometry,
        state_ids: Int[ArrayLike, " b"],
        next_positions: Int[ArrayLike, " b"],
        block_table: Int[ArrayLike, "b blocks"],
        *,
        tokens_per_page: int,
        first_positions: Int[ArrayLike, " b"] | None = None,
    ) -> "PageAddresses":
        """Addresses of the last S rows of each request, as many as there are.

        Args:
          geometry: of the rings.
          state_ids: integers[B], each request's state slot, distinct; -1 leaves a request out.
          next_positions: integers[B], where each request goes on: its tokens so far.
          block_table: integers[B, blocks]: column j has the page of the tokens_per_page positions
            from j * tokens_per_page; -1 where the page is freed or not there yet.
          tokens_per_page: tokens in a page.
          first_positions: integers[B], the first position that is copied, 0 by default. A ring
            holds fewer than S of the rows before next_position after drafts were rejected (those
            from M - S + 1, M the highest position ever stored), or where its older pages were gone.

        Raises:
          ValueError: a wrong shape or dtype; known values that give two requests one state slot,
            or leave a row of the window before next_position without a page.
        """
        checks.check_type("geometry", geometry, RingGeometry)
        checks.check_count("tokens_per_page", tokens_per_page)
        state_ids = checks.as_int32("state_ids", state_ids)
        checks.check_shape("state_ids", state_ids, (None,))
        if first_positions is None:
            first_positions = jnp.zeros_like(state_ids)
        end = checks.as_int32("next_positions", next_positions)
        first = checks.as_int32("first_positions", first_positions)
        table = checks.as_int32("block_table", block_table)
        checks.check_shape("next_positions", end, state_ids.shape)
        checks.check_shape("first_positions", first, state_ids.shape)
        checks.check_shape("block_table", table, (*state_ids.shape, None))
        before = jnp.arange(-geometry.capacity, 0, dtype=jnp.int32)[None, :]
        positions = jnp.maximum(jnp.maximum(end, 0)[:, None] + before, -1)
        ring_slots = geometry.slots(state_ids, positions)
        # A position behind the last block finds the -1 put there.
        table = jnp.pad(table, ((0, 0), (0, 1)), constant_values=-1)
        column = jnp.clip(positions // tokens_per_page, 0, table.shape[1] - 1)
        page = jnp.take_along_axis(table, column, axis=1)
        there = (ring_slots >= 0) & (positions >= first[:, None])
        # The slot of a larger page number would wrap into another page.
        there &= (page >= 0) & (page < checks.INT32_MAX // tokens_per_page)
        page_slots = jnp.where(there, page * tokens_per_page + positions % tokens_per_page, -1)
        if checks.is_known(state_ids, end, ring_slots, page_slots):
            _check_known_values(geometry, state_ids, end, ring_slots, page_slots)
        return cls(ring_slots, page_slots, tokens_per_page, geometry)


def rings_from_pages(rows: KVRows, paged: PagedRows, addresses: PageAddresses) -> KVRows:
    """One layer's rings with the rows that requests have in pages, byte for byte.

    A row whose page is gone comes as NaN, so that what a former owner of the ring stored is never
    read: a request that goes back to positions before its window may meet it, and every request
    whose window misses a page that was not known when the addresses were built.

    Args:
      rows: the rings, as of `RingCache.layer`.
      paged: the pages, of the same format.
      addresses: of the rows.

    Returns:
      The new rings; rows of other requests are the same.

    Raises:
      ValueError: formats or sizes that differ, or known addresses outside the rings or pages.
    """
    _check_pair(rows, paged, addresses)
    nan = quantize_rows(jnp.full((1, 1, rows.fmt.num_elements), jnp.nan), rows.fmt)
    there = is_valid_slot(paged, addresses.page_slots)[..., None]
    data = jnp.where(there, load_paged(paged, addresses.page_slots), nan)
    return store_rows(rows, data, addresses.ring_slots)


def pages_from_rings(paged: PagedRows, rows: KVRows, addresses: PageAddresses) -> PagedRows:
    """One layer's pages with the rows that requests have in rings, byte for byte.

    Args:
      paged: the pages.
      rows: the rings, of the same format.
      addresses: of the rows; one whose page is gone is left out.

    Returns:
      The new pages; every other byte is the same, padding too.

    Raises:
      ValueError: formats or sizes that differ, or known addresses outside the rings or pages.
    """
    _check_pair(rows, paged, addresses)
    # A row outside the rings is no row: it would be loaded as zeros.
    there = is_valid_index(rows, addresses.ring_slots)
    slots = jnp.where(there, addresses.page_slots, -1)
    return store_paged(paged, load_rows(rows, addresses.ring_slots), slots)


def _check_pair(rows: KVRows, paged: PagedRows, addresses: PageAddresses) -> None:
    check_rows(rows)
    check_paged(paged)
    if not isinstance(addresses, PageAddresses):
        raise ValueError(f"addresses: expected PageAddresses, got {type(addresses).__name__}")
    for name, want, got in (
        ("rows: expected the format of the pages", paged.row_format, rows.fmt),
        ("rows: expected rings of", addresses.geometry.capacity, rows.rows_per_slot),
        ("paged: expected tokens_per_page", addresses.tokens_per_page, paged.tokens_per_page),
    ):
        if want != got:
            raise ValueError(f"{name} {want}, got {got}")
    for name, slots, count in (
        ("state_ids: expected rows of the rings", addresses.ring_slots, rows.num_rows),
        ("block_table: expected rows of the pages", addresses.page_slots, paged.num_rows),
    ):
        largest = np.max(np.asarray(slots), initial=-1) if checks.is_known(slots) else -1
        if largest >= count:
            raise ValueError(f"{name}, 0 to {count - 1}, got {largest}")


def _check_known_values(geometry, state_ids, end, ring_slots, page_slots) -> None:
    states, ends = np.asarray(state_ids), np.asarray(end)
    if np.any(ends < 0):
        raise ValueError(f"next_positions: expected 0 or more, got {ends.tolist()}")
    check_distinct("state_ids", states, (states >= 0) & (ends > 0))
    lost = (np.asarray(ring_slots) >= 0) & (np.asarray(page_slots) < 0)
    lost[:, : geometry.max_rollback + 1] = False  # outside the window before the next position
    for request, column in np.argwhere(lost)[:1].tolist():
        position = ends[request] - geometry.capacity + column
        raise ValueError(
            f"block_table, first_positions: expected a row in a page for each position of the "
            f"window before {ends[request]}, got none for position {position} of request {request}"
        )
