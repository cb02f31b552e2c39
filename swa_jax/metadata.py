"""Addresses of one decode or prefill call: built once a step, shared by all layers."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Int, Int32

from pallas_kernels import checks
from pallas_kernels.serialization import register_serialization
from swa_jax.placement import check_distinct
from swa_jax.ring import RingGeometry


@register_serialization
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeMetadata:
    """A step that stores T rows of each request and then reads the ring.

    Attributes:
      positions: int32[B, T], -1 for padding.
      slots: int32[B * T], where each row is stored; -1 for none.
      indices: int32[B * T, W], the rows each query reads.
      geometry: of the ring.
    """

    positions: Int32[Array, "b t"]
    slots: Int32[Array, " bt"]
    indices: Int32[Array, "bt w"]
    geometry: RingGeometry = dataclasses.field(metadata={"static": True})

    @classmethod
    def build(
        cls,
        geometry: RingGeometry,
        state_ids: Int[ArrayLike, " b"],
        positions: Int[ArrayLike, "b t"],
    ) -> "DecodeMetadata":
        """Addresses of one step.

        Args:
          geometry: of the ring.
          state_ids: integers[B], each request's state slot; distinct among requests with tokens.
          positions: integers[B, T]: consecutive for each request, padding (-1) last.

        Raises:
          ValueError: a wrong type, shape or dtype; more tokens than the ring holds beside the
            window; known values that are not consecutive, or give two requests one state slot.
        """
        checks.check_type("geometry", geometry, RingGeometry)
        state_ids, positions = (
            checks.as_int32("state_ids", state_ids),
            checks.as_int32("positions", positions),
        )
        checks.check_shape("positions", positions, (None, None))
        checks.check_shape("state_ids", state_ids, positions.shape[:1])
        geometry.check_tokens(positions.shape[1])
        _check_known_values(state_ids, positions)
        return cls(
            positions,
            geometry.slots(state_ids, positions).reshape(-1),
            geometry.read_indices(state_ids, positions).reshape(-1, geometry.window),
            geometry,
        )

    def replace_addresses(self, change: Callable[[Array], Array]) -> "DecodeMetadata":
        """The same step with every flattened slot changed, as for a part of the cache."""
        return dataclasses.replace(self, slots=change(self.slots), indices=change(self.indices))


@register_serialization
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillMetadata:
    """A call that reads the old window, attends over old rows and new, and then stores.

    Attributes:
      positions: int32[B, T], -1 beyond a request's length.
      window_slots: int32[B, W - 1], the rows before each request's first new position, oldest
        first; -1 where there is none.
      slots: int32[B * T], where each row is stored; -1 for padding and for rows that later ones of
        the same call would overwrite.
      geometry: of the ring.
    """

    positions: Int32[Array, "b t"]
    window_slots: Int32[Array, "b w1"]
    slots: Int32[Array, " bt"]
    geometry: RingGeometry = dataclasses.field(metadata={"static": True})

    @classmethod
    def build(
        cls,
        geometry: RingGeometry,
        state_ids: Int[ArrayLike, " b"],
        starts: Int[ArrayLike, " b"],
        lengths: Int[ArrayLike, " b"],
        *,
        max_tokens: int,
    ) -> "PrefillMetadata":
        """Addresses of one chunk of each request's prompt. Any number of tokens is allowed.

        Args:
          geometry: of the ring.
          state_ids: integers[B], each request's state slot; distinct among requests with tokens.
          starts: integers[B], the first position of each chunk.
          lengths: integers[B], tokens of each chunk, 0 to max_tokens.
          max_tokens: T, the width of the call.

        Raises:
          ValueError: a wrong type, shape or dtype; more tokens in all than int32 counts; known
            values that are out of range, or give two requests one state slot.
        """
        checks.check_type("geometry", geometry, RingGeometry)
        checks.check_count("max_tokens", max_tokens)
        state_ids = checks.as_int32("state_ids", state_ids)
        checks.check_shape("state_ids", state_ids, (None,))
        _check_size("max_tokens", state_ids.shape[0], max_tokens)
        starts, lengths = checks.as_int32("starts", starts), checks.as_int32("lengths", lengths)
        checks.check_shape("starts", starts, state_ids.shape)
        checks.check_shape("lengths", lengths, state_ids.shape)
        _check_known_chunks(starts, lengths, max_tokens)
        token = jnp.arange(max_tokens, dtype=jnp.int32)[None, :]
        real = token < lengths[:, None]
        positions = jnp.where(real, starts[:, None] + token, -1)
        _check_known_values(state_ids, positions)
        before = jnp.arange(1 - geometry.window, 0, dtype=jnp.int32)[None, :]
        old = jnp.where(lengths[:, None] > 0, starts[:, None] + before, -1)
        survives = token >= lengths[:, None] - geometry.capacity
        stored = jnp.where(survives, positions, -1)
        return cls(
            positions,
            geometry.slots(state_ids, jnp.maximum(old, -1)),
            geometry.slots(state_ids, stored).reshape(-1),
            geometry,
        )

    def replace_addresses(self, change: Callable[[Array], Array]) -> "PrefillMetadata":
        """The same call with every flattened slot changed, as for a part of the cache."""
        return dataclasses.replace(
            self, window_slots=change(self.window_slots), slots=change(self.slots)
        )


@register_serialization
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SequenceMetadata:
    """Whole sequences without a cache, as in training.

    Attributes:
      positions: int32[B, T], for the rotation; within a segment consecutive. -1 for padding.
      segment_ids: int32[B, T]: a query sees keys of its own segment only; -1 for padding.
    """

    positions: Int32[Array, "b t"]
    segment_ids: Int32[Array, "b t"]

    @classmethod
    def build(
        cls,
        batch: int,
        tokens: int,
        positions: Int[ArrayLike, "b t"] | None = None,
        segment_ids: Int[ArrayLike, "b t"] | None = None,
    ) -> "SequenceMetadata":
        """Positions 0 to T - 1 in one segment, unless said otherwise.

        Args:
          batch: B.
          tokens: T.
          positions: integers[B, T].
          segment_ids: integers[B, T], for rows packed from several sequences, each in one piece.

        Raises:
          ValueError: a wrong shape or dtype; more tokens in all than int32 counts; known values
            that are not consecutive within a segment, or a segment in several pieces.
        """
        checks.check_integer("batch", batch, 0)
        checks.check_integer("tokens", tokens, 0)
        _check_size("tokens", batch, tokens)
        shape = (batch, tokens)
        if positions is None:
            positions = np.broadcast_to(np.arange(tokens, dtype=np.int32), shape)
        if segment_ids is None:
            segment_ids = np.zeros(shape, np.int32)
        positions = checks.as_int32("positions", positions)
        segment_ids = checks.as_int32("segment_ids", segment_ids)
        checks.check_shape("positions", positions, shape)
        checks.check_shape("segment_ids", segment_ids, shape)
        _check_known_segments(positions, segment_ids)
        padding = (positions < 0) | (segment_ids < 0)
        return cls(jnp.where(padding, -1, positions), jnp.where(padding, -1, segment_ids))


Metadata = DecodeMetadata | PrefillMetadata | SequenceMetadata
"""Its type says which kind of call it is."""


def _check_size(name: str, batch: int, tokens: int) -> None:
    """Raises ValueError unless int32 counts the tokens of all requests, as their slots lie flat."""
    if batch * tokens > checks.INT32_MAX:
        raise ValueError(
            f"{name}: expected at most {checks.INT32_MAX} tokens in all, got {tokens} for each of "
            f"{batch} requests"
        )


def _known(*arrays: Any) -> list[np.ndarray] | None:
    """The values of arrays, or None while one of them is traced."""
    if not checks.is_known(*arrays):
        return None
    return [np.asarray(array) for array in arrays]


def _check_known_values(state_ids, positions) -> None:
    known = _known(state_ids, positions)
    if known is None:
        return
    states, places = known
    real = places >= 0
    if np.any(real[:, 1:] & ((places[:, 1:] != places[:, :-1] + 1) | ~real[:, :-1])):
        raise ValueError(
            f"positions: expected consecutive positions with padding (-1) last, got "
            f"{places.tolist()}"
        )
    check_distinct("state_ids", states, real.any(axis=1) & (states >= 0))


def _check_known_segments(positions, segment_ids) -> None:
    known = _known(positions, segment_ids)
    if known is None:
        return
    places, segments = known
    real = (places >= 0) & (segments >= 0)
    goes_on = real[:, 1:] & real[:, :-1] & (segments[:, 1:] == segments[:, :-1])
    if np.any(goes_on & (places[:, 1:] != places[:, :-1] + 1)):
        raise ValueError(
            f"positions: expected consecutive positions within a segment, got {places.tolist()}"
        )
    begins = real.copy()
    begins[:, 1:] &= ~goes_on
    pieces = np.stack([np.nonzero(begins)[0], segments[begins]])
    if np.unique(pieces, axis=1).shape != pieces.shape:
        raise ValueError(
            f"segment_ids: expected each segment of a row in one piece, got {segments.tolist()}"
        )


def _check_known_chunks(starts, lengths, max_tokens: int) -> None:
    known = _known(starts, lengths)
    if known is None:
        return
    starts, lengths = (array.astype(np.int64) for array in known)
    if np.any((lengths < 0) | (lengths > max_tokens)):
        raise ValueError(f"lengths: expected 0 to {max_tokens}, got {lengths.tolist()}")
    if np.any((starts < 0) | (starts + lengths > 2**31)):
        raise ValueError(f"starts: expected positions within int32, got {starts.tolist()}")
