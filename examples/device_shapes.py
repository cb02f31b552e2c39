"""The shapes that are timed, most important first, with their inputs, programs and work."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device_cases import EPS, Context, Sizes, angles, rows_of
from jax import lax

import swa_jax as swa
from pallas_kernels import V41, V41_FP4, ExtraKV, KVRows, fused_store, indexed_attention
from pallas_kernels.storage import region_bytes

_DRAWN = 16


@dataclasses.dataclass(frozen=True)
class Shape:
    """One line of the table.

    Attributes:
      operation: "fused_store" or "indexed_attention".
      requests: in the batch.
      tokens: queries of each request.
      heads: query heads; 0 for a store.
      extra: rows of the extra cache that a query sees.
      layers: rings that are read or written in turn. With one, all that fits is in the card's
        second-level cache; with several, what the other layers leave there.
    """

    operation: str
    requests: int
    tokens: int = 1
    heads: int = 0
    extra: int = 0
    layers: int = 8

    @property
    def queries(self) -> int:
        return self.requests * self.tokens

    def __str__(self) -> str:
        parts = [self.operation, f"{self.requests} x {self.tokens}"]
        parts += [f"{self.heads} heads"] * (self.heads > 0) + [f"+{self.extra}"] * (self.extra > 0)
        return ", ".join([*parts, f"{self.layers} layers"])


def shapes_of(sizes: Sizes) -> list[Shape]:
    """The lines of the table, the most important first."""
    first, *others = sizes.requests
    heads, *more_heads = sizes.heads
    attention = functools.partial(Shape, "indexed_attention", layers=sizes.layers)
    store = functools.partial(Shape, "fused_store", layers=sizes.layers)
    shapes = [attention(first, heads=heads), store(first)]
    shapes += [attention(first, heads=h) for h in more_heads]
    shapes += [attention(first, heads=h, extra=sizes.extra) for h in sizes.heads]
    for n in others:
        shapes += [attention(n, heads=heads), store(n)]
    for n in sizes.verify_requests:
        shapes += [attention(n, sizes.verify_tokens, heads), store(n, sizes.verify_tokens)]
    shapes += [dataclasses.replace(shape, layers=1) for shape in shapes[:2]]
    for n in others:
        shapes += [attention(n, heads=heads, extra=sizes.extra)]
    for h in more_heads:
        shapes += [attention(n, heads=h) for n in others]
        shapes += [attention(n, heads=h, extra=sizes.extra) for n in others]
        shapes += [attention(n, sizes.verify_tokens, h) for n in sizes.verify_requests]
    return shapes


# --- what is timed


@dataclasses.dataclass(frozen=True)
class Loop:
    """How often a timed program runs its operation: calls that follow each other, in a loop.

    The calls in a trip are written out, so that a trip can be a CUDA graph, and the number of trips
    is known, which spares a word to the host for each.
    """

    trips: int
    calls: int

    @property
    def total(self) -> int:
        return self.trips * self.calls


def loop_of(context: Context, program: str) -> Loop:
    layers = context.sizes.layers
    if context.device.platform != "gpu":
        return Loop(2, 1)
    # XLA's own version is some hundred launches a call: fewer of them, as quickly measured.
    return Loop(8, layers) if program != "xla" else Loop(4, 2)


def inputs_of(shape: Shape, context: Context, dtype: Any) -> tuple:
    """The value that a timed program hands on from call to call, and its other arguments.

    A few random queries, latents and lists of rows are repeated: large inputs would take longer to
    draw than to time.
    """
    sizes, random = context.sizes, np.random.default_rng(3)
    geometry, v41 = sizes.geometry, V41.with_width(sizes.width)
    n = shape.queries
    block = _block(context, shape.requests, geometry.capacity, v41, shape.layers)
    positions = np.full((shape.requests, shape.tokens), 5 * sizes.window, np.int32)
    positions += np.arange(shape.tokens, dtype=np.int32)
    with jax.default_device(context.cpu):
        meta = swa.DecodeMetadata.build(
            geometry, np.arange(shape.requests, dtype=np.int32), positions
        )
        slots, indices = np.asarray(meta.slots), np.asarray(meta.indices)
    rotation = angles(random, n, sizes.half)
    if shape.operation == "fused_store":
        drawn = random.normal(size=(sizes.layers, _DRAWN, sizes.width)).astype(dtype)
        copies = [_repeat(latents, n) for latents in drawn]
        return block, copies, slots, np.ones(sizes.width, np.float32), *rotation
    q = _repeat(random.normal(size=(_DRAWN, shape.heads, sizes.width)).astype(dtype), n)
    extra = None
    if shape.extra:
        fp4, rows = V41_FP4.with_width(sizes.width), sizes.extra_rows
        data = _block(context, shape.requests, rows, fp4, shape.layers)
        drawn = [random.permutation(rows)[: shape.extra] for _ in range(_DRAWN)]
        chosen = _repeat(np.stack(drawn), n)
        owner = np.repeat(np.arange(shape.requests), shape.tokens)[:, None]
        extra = data, (owner * rows + chosen).astype(np.int32)
    return q, block, indices, extra, random.normal(size=shape.heads).astype(np.float32), *rotation


def _repeat(drawn: np.ndarray, n: int) -> np.ndarray:
    """The first n of rows that are repeated."""
    return np.concatenate([drawn] * -(-n // len(drawn)))[:n]


def _block(context, slots, rows_per_slot, fmt, layers) -> np.ndarray:
    """Regions of all layers and slots, all with the same rows."""
    random = np.random.default_rng(4)
    values = random.normal(size=(rows_per_slot, fmt.num_elements)).astype(np.float32)
    region = np.asarray(rows_of(values, fmt, rows_per_slot, context.cpu).data)
    return np.tile(region, (slots, layers))


def timed_program(shape: Shape, sizes: Sizes, implementation: Any, loop: Loop) -> Callable:
    """A function of what `inputs_of` returns: the operation many times, each after the one before.

    A store hands on its cache. Attention hands on its output as the next queries. Each call of a
    trip has another layer, as a decode step has; stores have other latents too, or XLA would
    compute them once.
    """
    capacity, v41 = sizes.geometry.capacity, V41.with_width(sizes.width)
    fp4 = V41_FP4.with_width(sizes.width)

    def starts(trip, call, fmt, rows_per_slot):
        layer = call % shape.layers
        if shape.layers > loop.calls:  # as many layers as trips reach, and not only the first ones
            layer = layer + trip % (shape.layers // loop.calls) * loop.calls
        return jnp.asarray(layer, jnp.int32) * region_bytes(rows_per_slot, fmt)

    def store(trip, data, latents, slots, weight, cos, sin):
        for call in range(loop.calls):
            start = starts(trip, call, v41, capacity)
            rows = KVRows.view(data, start=start, rows_per_slot=capacity, fmt=v41)
            data = fused_store(
                rows, latents[call], slots, norm_weight=weight, norm_eps=EPS, cos=cos, sin=sin,
                implementation=implementation,
            ).data  # fmt: skip
        return data

    def attention(trip, q, data, indices, extra, sink, cos, sin):
        for call in range(loop.calls):
            start = starts(trip, call, v41, capacity)
            rows = KVRows.view(data, start=start, rows_per_slot=capacity, fmt=v41)
            second = None
            if extra is not None:
                start = starts(trip, call, fp4, sizes.extra_rows)
                second = KVRows.view(extra[0], start=start, rows_per_slot=sizes.extra_rows, fmt=fp4)
                second = ExtraKV(second, extra[1])
            q, _ = indexed_attention(
                q, rows, indices, extra=second, sink=sink, cos=cos, sin=sin,
                implementation=implementation,
            )  # fmt: skip
        return q

    step = store if shape.operation == "fused_store" else attention

    def program(handed_on, *others):
        return lax.fori_loop(0, loop.trips, lambda trip, x: step(trip, x, *others), handed_on)

    return jax.jit(program, donate_argnums=0)


def work_of(shape: Shape, inputs: tuple, sizes: Sizes) -> tuple[int, int]:
    """Bytes that one call must move, each row once, and its floating-point operations."""
    v41 = V41.with_width(sizes.width)
    if shape.operation == "fused_store":
        _, latents, slots, weight, cos, sin = inputs
        read = latents[0].nbytes + slots.nbytes + weight.nbytes + cos.nbytes + sin.nbytes
        return read + len(slots) * v41.row_bytes, 0
    q, _, indices, extra, sink, cos, sin = inputs
    lse = 4 * shape.queries * shape.heads
    moved = 2 * q.nbytes + lse + indices.nbytes + sink.nbytes + cos.nbytes + sin.nbytes
    moved += len(np.unique(indices[indices >= 0])) * v41.row_bytes
    if extra is not None:
        row_bytes = V41_FP4.with_width(sizes.width).row_bytes
        moved += extra[1].nbytes + len(np.unique(extra[1])) * row_bytes
    keys = indices.shape[1] + shape.extra
    return moved, 4 * shape.queries * shape.heads * keys * sizes.width
