"""The suites codec, store, read and step: the operations on rows, beside what others would do."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import benchmark_peers as peers
import jax
import jax.numpy as jnp
from benchmark_clock import Case, Program, compiled
from benchmark_settings import EPS, POSITION, Settings, angles, filled_rows, random_values

import swa_jax as swa
from pallas_kernels import KVRows, dequantize_rows, fused_store, indexed_attention, quantize_rows


@dataclasses.dataclass(frozen=True)
class _Token:
    """One new token of each of n requests.

    Attributes:
      positions: int32[n].
      latents: float32[n, D].
      q: floating[n, H, D].
      weight: float32[D], of the norm.
      sink: float32[H].
      cos: float32[n, R / 2], and so is `sin`.
    """

    positions: jax.Array
    latents: jax.Array
    q: jax.Array
    weight: jax.Array
    sink: jax.Array
    cos: jax.Array
    sin: jax.Array


jax.tree_util.register_dataclass(_Token)


def _token(settings: Settings, n: int, position: int = POSITION) -> _Token:
    return _Token(
        jnp.full(n, position, jnp.int32),
        random_values(settings, n, seed=3),
        random_values(settings, n, settings.heads, seed=4).astype(settings.dtype),
        jnp.ones(settings.width),
        jnp.zeros(settings.heads),
        *angles(settings, n),
    )


def codec(settings: Settings) -> Iterator[Case]:
    """Rows to numbers and numbers to rows, beside casts to and from XLA's own e4m3."""
    for n in (2, 4) if settings.tiny else (128, 1024, 8192):
        values = random_values(settings, n)
        data = jax.jit(peers.naive_quantize)(values)
        work = {"copy": data.nbytes + values.nbytes}
        for name, own, peer, rows in (
            ("decode", dequantize_rows, peers.naive_dequantize, data),
            ("encode", quantize_rows, peers.naive_quantize, values),
        ):
            ours = functools.partial(own, fmt=settings.fmt)
            programs = [compiled("swa_jax", ours, rows), compiled("casts", peer, rows)]
            yield Case("codec", f"{name} {n} rows", {"rows": n}, programs, work)


def store(settings: Settings) -> Iterator[Case]:
    """Norm, rotation, cast and scatter of one row a request."""
    for n in settings.requests:
        token = _token(settings, n)
        rows = filled_rows(settings, n)
        ring = jnp.zeros((n, settings.geometry.capacity, 1, settings.width))
        yield Case(
            "store",
            f"N={n}",
            {"requests": n},
            [
                compiled("swa_jax", _store, rows, token, _slots(settings, token), carry=True),
                compiled("casts, same bytes", _naive_store, _flat(rows), token, carry=True),
                compiled("float32 ring", _plain_store, ring, token, carry=True),
            ],
            {"copy": token.latents.nbytes + n * settings.fmt.row_bytes},
        )


def _slots(settings: Settings, token: _Token) -> jax.Array:
    return settings.geometry.slots(jnp.arange(len(token.positions)), token.positions)


def _store(rows: KVRows, token: _Token, slots: jax.Array) -> tuple[KVRows]:
    rows = fused_store(
        rows, token.latents, slots, norm_weight=token.weight, norm_eps=EPS, cos=token.cos,
        sin=token.sin,
    )  # fmt: skip
    return (rows,)


def _plain_store(ring, token: _Token):
    row = peers.plain_row(token.latents, token.weight, token.cos, token.sin)
    return (peers.ring_store(ring, row, token.positions),)


def _naive_store(data, token: _Token):
    row = peers.plain_row(token.latents, token.weight, token.cos, token.sin)
    capacity = len(data) // len(row)
    slots = jnp.arange(len(row)) * capacity + token.positions % capacity
    return (data.at[slots].set(peers.naive_quantize(row)),)


def _flat(rows: KVRows) -> jax.Array:
    """The rows as uint8[rows, row_bytes]."""
    return rows.logical().reshape(rows.num_rows, -1)


def read(settings: Settings) -> Iterator[Case]:
    """Indexed attention of one query a request over the 128 rows of its window.

    PyTorch's attention, where it is installed, has no sink; it computes the rest. The two products
    alone, of rows that are decoded and gathered already, tell what XLA needs for those.
    """
    for n in settings.requests:
        token = _token(settings, n)
        rows = filled_rows(settings, n)
        numbers = dequantize_rows(rows.logical(), settings.fmt)
        indices = settings.geometry.read_indices(jnp.arange(n), token.positions)
        programs = [
            compiled("swa_jax", _read, rows, token, indices),
            compiled("casts, same bytes", _naive_read, _flat(rows), token, indices),
            compiled("jax.nn, float32 ring", _ring_read(settings), numbers, token),
            compiled(
                "jax.nn, bfloat16 ring", _ring_read(settings), numbers.astype(jnp.bfloat16), token
            ),
            compiled(
                "the two products alone",
                _products,
                _gathered(numbers, indices).astype(settings.dtype),
                token.q,
            ),
        ]
        if settings.torch:
            import benchmark_torch

            ring, capacity = numbers[:, :, 0], settings.geometry.capacity
            visible = peers.ring_visible(token.positions, capacity, settings.window)
            programs += benchmark_torch.read_programs(token.q, _flat(rows), ring, visible, indices)
        yield Case("read", f"N={n}", {"requests": n}, programs, _read_work(settings, n))


def _gathered(numbers: jax.Array, indices: jax.Array) -> jax.Array:
    """Rows [n, W, D] that indices name."""
    return numbers.reshape(-1, numbers.shape[-1])[indices]


def _products(rows: jax.Array, q: jax.Array) -> jax.Array:
    layout = "nkh" if len(q) > 1 else "nhk"  # as ours has it
    scores = jnp.einsum(f"nkd,nhd->{layout}", rows, q)
    return jnp.einsum(f"{layout},nkd->nhd", scores, rows)


def _read_work(settings: Settings, n: int) -> dict[str, float]:
    return {"product": 4 * n * settings.heads * settings.window * settings.width}


def _read(rows: KVRows, token: _Token, indices):
    return indexed_attention(token.q, rows, indices, sink=token.sink)


def _naive_read(data, token: _Token, indices):
    return peers.naive_read(data, token.q, indices, token.sink)


def _ring_read(settings: Settings):
    return lambda ring, token: peers.ring_read(ring, token.q, token.positions, settings.window)


def step(settings: Settings) -> Iterator[Case]:
    """A decode step's part of one layer: indices, store and read.

    First for each number of requests, then beside full attention over the whole context; last the
    step itself under conditions that should not change it: more state slots, a later position.
    """
    for n in settings.requests:
        yield Case("step", f"N={n}", {"requests": n}, _steps(settings, n), _read_work(settings, n))
    n, own = settings.requests[1], _own_step(settings)
    # Cases of their own: whole contexts leave nothing of the others in the processor's caches.
    for context in settings.contexts:
        yield _context_case(settings, n, context)
    for other in settings.requests:
        if other != n:
            yield _context_case(settings, other, settings.context)
    yield from _slots_cases(settings, n)
    rows = filled_rows(settings, n)
    programs = [
        compiled(f"position {place:,}", own, rows, _token(settings, n, place), carry=True)
        for place in (POSITION, 1_000_000)
    ]
    yield Case("step", f"N={n}, position", {}, programs, slower_is_better=False)


def _slots_cases(settings: Settings, n: int) -> Iterator[Case]:
    """Of ours and of each plain ring: the same step where most of the slots are idle."""
    token = _token(settings, n)
    own, plain = _own_step(settings), _plain_step(settings)
    shape = settings.geometry.capacity, 1, settings.width
    rings: dict[str, tuple[Callable, Callable[[int], Any]]] = {
        "swa_jax": (own, lambda slots: filled_rows(settings, slots)),
        "jax.nn, float32 ring": (plain, lambda slots: jnp.zeros((slots, *shape))),
        "jax.nn, bfloat16 ring": (plain, lambda slots: jnp.zeros((slots, *shape), jnp.bfloat16)),
    }
    for name, (run, make) in rings.items():
        programs = []
        for slots in settings.slots:
            program = compiled(f"{slots:,} slots", run, make(slots), token, carry=True)
            programs.append(dataclasses.replace(program, parameters={"slots": slots}))
        case = f"N={n}, state slots, {name}"
        parameters = {"requests": n, "ring": name}
        better = False if name == "swa_jax" else None
        yield Case("step", case, parameters, programs, slower_is_better=better)


def _own_step(settings: Settings):
    def run(rows: KVRows, token: _Token):
        requests = jnp.arange(len(token.positions), dtype=jnp.int32)
        meta = swa.DecodeMetadata.build(settings.geometry, requests, token.positions[:, None])
        (rows,) = _store(rows, token, meta.slots)
        return rows, _read(rows, token, meta.indices)

    return run


def _steps(settings: Settings, n: int) -> list[Program]:
    token, rows = _token(settings, n), filled_rows(settings, n)
    capacity, window = settings.geometry.capacity, settings.window

    def naive(data, token):
        (data,) = _naive_store(data, token)
        indices = peers.naive_indices(token.positions, capacity, window)
        return data, _naive_read(data, token, indices)

    ring = dequantize_rows(rows.logical(), settings.fmt)
    return [
        compiled("swa_jax", _own_step(settings), rows, token, carry=True),
        compiled("casts, same bytes", naive, _flat(rows), token, carry=True),
        compiled("jax.nn, float32 ring", _plain_step(settings), ring, token, carry=True),
        _bfloat16_step(settings, ring, token),
    ]


def _plain_step(settings: Settings):
    def run(ring, token: _Token):
        (ring,) = _plain_store(ring, token)
        return ring, _ring_read(settings)(ring, token)

    return run


def _bfloat16_step(settings: Settings, ring: jax.Array, token: _Token) -> Program:
    ring = ring.astype(jnp.bfloat16)
    return compiled("jax.nn, bfloat16 ring", _plain_step(settings), ring, token, carry=True)


def _context_case(settings: Settings, n: int, context: int) -> Case:
    def run(cache, token):
        row = peers.plain_row(token.latents, token.weight, token.cos, token.sin)
        cache = peers.context_store(cache, row, token.positions)
        return cache, peers.context_read(cache, token.q, token.positions)

    last = _token(settings, n, context - 1)
    cache = jnp.zeros((n, context, 1, settings.width))
    programs = [
        compiled("swa_jax", _own_step(settings), filled_rows(settings, n), last, carry=True),
        compiled("jax.nn, full attention", run, cache, last, carry=True),
    ]
    parameters = {"requests": n, "context": context}
    return Case("step", f"N={n}, context {context:,}", parameters, programs)
