"""indexed_attention as a Pallas kernel that is lowered through Triton.

A program takes one query, a block of its heads and a piece of its index lists. It gathers rows as
bytes, decodes them to bfloat16 and keeps a running softmax in float32.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, BFloat16, Bool, Float32, Int32

from pallas_kernels import codec, transforms, triton_common, triton_launch, triton_rows
from pallas_kernels.formats import KVCacheFormat, quantize_rows
from pallas_kernels.indexed_attention import triton_tiles as tiles
from pallas_kernels.indexed_attention.triton_tiles import Tile
from pallas_kernels.storage import ALIGNMENT
from pallas_kernels.triton_decode import decode_rows

_LOG2_E = math.log2(math.e)


class _Softmax(NamedTuple):
    """What has been read so far, relative to the largest score `peak`; powers are of two."""

    peak: Float32[Array, " heads"]
    mass: Float32[Array, " heads"]
    values: tuple[Float32[Array, "heads chunk"], ...]


class _List(NamedTuple):
    """The rows of one cache and the indices into them: arrays, or references in the kernel."""

    data: Any
    start: Any
    indices: Any
    lengths: Any | None


class _Layout(NamedTuple):
    """What is static about the rows of one cache."""

    num_rows: int
    rows_per_slot: int
    fmt: KVCacheFormat


def refusal(
    q, rows, indices, lengths, extra, sink, scale, cos, sin, *, query_norm_eps, pairing,
    output_format,
) -> str | None:  # fmt: skip
    """Why the kernel cannot compute this, or None where it can."""
    if q.dtype != jnp.bfloat16:
        return f"multiplies bfloat16 queries only, as tensor cores round others, got {q.dtype}"
    caches = [rows] if extra is None else [rows, extra.rows]
    for fmt in (cache.fmt for cache in caches):
        reason = tiles.refusal(fmt)
        if reason is not None:
            return reason
    if cos is not None:
        half = cos.shape[-1]
        if 2 * half > tiles.CHUNK:
            return f"rotates at most {tiles.CHUNK} values, got {2 * half}"
        reason = triton_rows.rotation_refusal(half, pairing)
        if reason is not None:
            return reason
    if output_format is not None and (output_format.raw_elements or output_format.pad_bytes):
        return f"writes outputs whose values all have scales, got format {output_format.name}"
    lists = [indices] if extra is None else [indices, extra.indices]
    return triton_common.too_large(q, *lists, *(cache.data for cache in caches))


def indexed_attention(
    q, rows, indices, lengths, extra, sink, scale, cos, sin, *, query_norm_eps, pairing,
    output_format, card, interpret,
):  # fmt: skip
    """See `pallas_kernels.indexed_attention.indexed_attention`."""
    n, heads, width = q.shape
    float32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    out, lse = jax.ShapeDtypeStruct(q.shape, q.dtype), float32((n, heads))
    if output_format is not None:
        out = jax.ShapeDtypeStruct((n, heads, output_format.row_bytes), jnp.uint8)
    if 0 in q.shape:
        return jnp.zeros(out.shape, out.dtype), jnp.zeros(lse.shape, lse.dtype)
    caches = [(rows, indices, lengths)]
    if extra is not None:
        caches.append((extra.rows, extra.indices, extra.lengths))
    caches = [cache for cache in caches if cache[1].shape[1]]
    columns = [cache_indices.shape[1] for _, cache_indices, _ in caches]
    tile = tiles.choose_tile(card, [cache.fmt for cache, _, _ in caches], columns)
    pieces = tiles.num_pieces(sum(columns))
    if pieces > 1 and n * pieces * heads * width * 4 > triton_common.MAX_BYTES:
        # The sums of the pieces would be too large: half of the queries at a time.
        def half(part):
            take = lambda x: None if x is None else x[part]  # noqa: E731
            second = extra and dataclasses.replace(
                extra, indices=extra.indices[part], lengths=take(extra.lengths)
            )
            return indexed_attention(
                q[part], rows, indices[part], take(lengths), second, sink, scale, take(cos),
                take(sin), query_norm_eps=query_norm_eps, pairing=pairing,
                output_format=output_format, card=card, interpret=interpret,
            )  # fmt: skip

        parts = half(slice(n // 2)), half(slice(n // 2, n))
        return tuple(jnp.concatenate(pair) for pair in zip(*parts, strict=True))
    operands = {
        "q": q,
        "lists": [
            _List(cache.data, cache.start.reshape(1), cache_indices, cache_lengths)
            for cache, cache_indices, cache_lengths in caches
        ],
        "sink": sink,
        "scale": scale.reshape(1),
        "rotation": None if cos is None or not cos.shape[1] else (cos, sin),
    }
    leaves, tree = jax.tree.flatten(operands)
    kernel = functools.partial(
        indexed_attention_kernel,
        operands=tree,
        layouts=[_Layout(c.num_rows, c.rows_per_slot, c.fmt) for c, _, _ in caches],
        tile=tile,
        pieces=pieces,
        query_norm_eps=query_norm_eps,
        pairing=pairing,
        output_format=output_format,
    )
    results = [out, lse]
    if pieces > 1:
        results = [float32((n, pieces, heads, width)), *[float32((n, pieces, heads))] * 2]
    results = triton_launch.launch(
        kernel,
        leaves,
        results,
        grid=(n, pieces * pl.cdiv(heads, tile.heads)),
        num_warps=tile.num_warps,
        interpret=interpret,
    )
    if pieces == 1:
        return tuple(results)
    values, peak, mass = results
    out, lse = _merge(values, peak, mass, sink)
    if cos is not None:
        out = transforms.rope(out, cos[:, None], sin[:, None], pairing, inverse=True)
    out = out.astype(q.dtype) if output_format is None else quantize_rows(out, output_format)
    return out, lse


def indexed_attention_kernel(
    *refs: Any,
    operands: Any,
    layouts: list[_Layout],
    tile: Tile,
    pieces: int,
    query_norm_eps: float | None,
    pairing: str,
    output_format: KVCacheFormat | None,
) -> None:
    """One program: query `program_id(0)`, a block of heads and a piece of the lists."""
    inputs = jax.tree.unflatten(operands, refs[: operands.num_leaves])
    results = refs[operands.num_leaves :]
    n = pl.program_id(0)
    heads, width = inputs["q"].shape[1:]
    chunks = width // tiles.CHUNK
    head_blocks = pl.cdiv(heads, tile.heads)
    piece = pl.program_id(1) // head_blocks
    head = pl.program_id(1) % head_blocks * tile.heads + jnp.arange(tile.heads, dtype=jnp.int32)
    exists = head < heads

    rotate = None
    if inputs["rotation"] is not None:
        rotate = functools.partial(_rotate, *inputs["rotation"], n, pairing)
    query = _load_query(inputs["q"], n, head, exists, query_norm_eps, rotate)
    factor = inputs["scale"][0] * _LOG2_E
    state = _Softmax(
        jnp.full((tile.heads,), -jnp.inf, jnp.float32),
        jnp.zeros((tile.heads,), jnp.float32),
        (jnp.zeros((tile.heads, tiles.CHUNK), jnp.float32),) * chunks,
    )
    for source, layout in zip(inputs["lists"], layouts, strict=True):
        state = _read(source, layout, n, piece, pieces, query, factor, state, tile)

    if pieces > 1:
        out_ref, peak_ref, mass_ref = results
        _store_chunks(out_ref, (n, piece), head, exists, state.values)
        plgpu.store(peak_ref.at[n, piece, head], state.peak, mask=exists)
        plgpu.store(mass_ref.at[n, piece, head], state.mass, mask=exists)
        return
    out_ref, lse_ref = results
    sink = inputs["sink"]
    if sink is not None:
        sink = plgpu.load(sink.at[head], mask=exists, other=0)
    kept, lse = _normalise(state.peak, state.mass, sink)
    plgpu.store(lse_ref.at[n, head], lse, mask=exists)
    values = [value * kept[:, None] for value in state.values]
    if rotate is not None:
        values[-1] = rotate(True, values[-1])
    if output_format is None:
        _store_chunks(out_ref, (n,), head, exists, values)
    else:
        _store_quantized(out_ref, n, head, exists, values, output_format)


def _load_query(ref, n, head, exists, norm_eps, rotate) -> list[BFloat16[Array, "heads chunk"]]:
    """The queries of a block of heads in chunks, normalised and rotated; zeros beyond the last."""
    width = ref.shape[-1]
    query = [
        plgpu.load(ref.at[n, head[:, None], column], mask=_wide(exists, column), other=0)
        for column in _columns(width)
    ]
    if norm_eps is not None:
        values = [part.astype(jnp.float32) for part in query]
        total = sum(jnp.sum(part * part, axis=1, keepdims=True) for part in values)
        mean_square = total * jnp.float32(1 / width)
        inverse = 1.0 / jnp.sqrt(mean_square + jnp.float32(norm_eps))
        inverse = jnp.where(codec.is_finite(mean_square), inverse, jnp.float32(jnp.nan))
        query = [(part * inverse).astype(ref.dtype) for part in values]
        last = values[-1] * inverse
    else:
        # What is multiplied as it was loaded stays in shared memory, what is computed takes
        # registers: so these do not go through float32.
        last = query[-1].astype(jnp.float32)
    if rotate is not None:
        query[-1] = rotate(False, last).astype(ref.dtype)
    return query


def _rotate(cos_ref, sin_ref, n, pairing, inverse: bool, x: Float32[Array, "heads chunk"]):
    """The last chunk of all heads of query n, rotated."""
    token, exists = jnp.full((1,), n, jnp.int32), jnp.full((1,), True)
    cos, sin = triton_rows.load_angles(cos_ref, sin_ref, token, exists, tiles.CHUNK, pairing)
    return triton_rows.rotate(x, cos, sin, inverse)


def _read(
    source: _List, layout: _Layout, n, piece, pieces, query, factor, state: _Softmax, tile: Tile
) -> _Softmax:
    """The softmax after this piece of a list."""
    width = source.indices.shape[1]
    end = jnp.int32(width)
    if source.lengths is not None:
        end = jnp.minimum(source.lengths[n], end)
    first_byte = pl.multiple_of(source.start[0], ALIGNMENT)

    def load(column) -> tuple[Int32[Array, " k"], Bool[Array, " k"]]:
        index = plgpu.load(source.indices.at[n, column], mask=column < width, other=-1)
        return index, (column < end) & (index >= 0) & (index < layout.num_rows)

    # A padded query gathers nothing, nor does the end of a list that is none.
    column = jnp.arange(pl.next_power_of_2(width), dtype=jnp.int32)
    used = jnp.max(jnp.where(load(column)[1], column + 1, 0))

    def read_block(block, state: _Softmax) -> _Softmax:
        column = block * tile.keys + jnp.arange(tile.keys, dtype=jnp.int32)
        index, live = load(column)
        index = jnp.where(live, index, 0)
        slot = index // layout.rows_per_slot
        byte = first_byte + index % layout.rows_per_slot * layout.fmt.row_bytes
        rows = [
            decode_rows(source.data, slot, byte, live, layout.fmt, i * tiles.CHUNK, tiles.CHUNK)
            for i in range(len(query))
        ]
        # Else XLA pushes the transpose below up to the load, and decodes every row twice.
        rows = [_fence(row) for row in rows]
        dots = [plgpu.dot(q, row, trans_b=True) for q, row in zip(query, rows, strict=True)]
        score = jnp.where(live[None, :], functools.reduce(jnp.add, dots) * factor, -jnp.inf)
        peak = jnp.maximum(state.peak, jnp.max(score, axis=1))
        base = jnp.where(peak == -jnp.inf, 0.0, peak)
        shrink = jnp.exp2(state.peak - base)
        weight = jnp.exp2(score - base[:, None])
        mass = state.mass * shrink + jnp.sum(weight, axis=1)
        weight = weight.astype(jnp.bfloat16)
        values = tuple(
            value * shrink[:, None] + plgpu.dot(weight, row)
            for value, row in zip(state.values, rows, strict=True)
        )
        return _Softmax(peak, mass, values)

    blocks = tiles.blocks_of_piece(width, tile, pieces)
    first, last = piece * blocks, pl.cdiv(used, tile.keys)
    if not tile.unroll:
        return lax.fori_loop(first, jnp.minimum(first + blocks, last), read_block, state)
    for block in range(blocks):
        read = functools.partial(read_block, first + block)
        state = lax.cond(first + block < last, read, lambda state: state, state)
    return state


def _fence(x: BFloat16[Array, "*s"]) -> BFloat16[Array, "*s"]:
    """The same values, which no layout is pushed through on its way up to the load."""
    return x.reshape(x.size).reshape(x.shape)


def _normalise(peak, mass, sink):
    """The factor that turns summed values into the output, and the natural lse without the sink."""
    empty = mass == 0
    total = jnp.where(empty, 1.0, mass)
    lse = jnp.where(empty, -jnp.inf, peak + jnp.log2(total))
    kept = 1.0 / total
    if sink is not None:
        # An overflow to infinity is right here: such a sink leaves nothing.
        kept = kept / (1.0 + jnp.exp2(sink * _LOG2_E - jnp.where(empty, 0.0, lse)))
    kept = jnp.where(empty, 0.0, kept)
    return kept, lse * jnp.float32(1 / _LOG2_E)


def _merge(values, peak, mass, sink):
    """The output and lse of pieces whose softmax is relative to peaks of their own."""
    top = jnp.max(peak, axis=1)
    share = jnp.exp2(peak - jnp.where(top == -jnp.inf, 0.0, top)[:, None])
    sink = None if sink is None else sink[None, :]
    kept, lse = _normalise(top, jnp.sum(mass * share, axis=1), sink)
    return jnp.sum(values * share[..., None], axis=1) * kept[..., None], lse


def _store_chunks(ref, leading, head, exists, values) -> None:
    for value, column in zip(values, _columns(ref.shape[-1]), strict=True):
        where = ref.at[(*leading, head[:, None], column)]
        plgpu.store(where, value.astype(ref.dtype), mask=_wide(exists, column))


def _store_quantized(ref, n, head, exists, values, fmt: KVCacheFormat) -> None:
    """The output as rows of a format; one with a non-finite value is NaN as a whole."""
    finite = functools.reduce(
        jnp.minimum, [jnp.min(codec.is_finite(value).astype(jnp.int32), axis=1) for value in values]
    )
    for i, value in enumerate(values):
        value = jnp.where((finite == 1)[:, None], value, jnp.float32(jnp.nan))
        starts = i * (fmt.quantized_bytes // len(values)), i * (fmt.scale_bytes // len(values))
        (_, _, data), (_, _, scales) = triton_rows.encode_row(
            value, fmt.with_width(tiles.CHUNK), "amax"
        )
        for part, start in ((data, starts[0]), (scales, fmt.data_bytes + starts[1])):
            column = start + jnp.arange(part.shape[1], dtype=jnp.int32)[None, :]
            where = ref.at[n, head[:, None], column]
            plgpu.store(where, part, mask=_wide(exists, column))


def _columns(width: int) -> list[Int32[Array, "1 chunk"]]:
    chunk = jnp.arange(tiles.CHUNK, dtype=jnp.int32)[None, :]
    return [start + chunk for start in range(0, width, tiles.CHUNK)]


def _wide(exists: Bool[Array, " heads"], column: Int32[Array, "1 _k"]) -> Bool[Array, "heads _k"]:
    return jnp.broadcast_to(exists[:, None], (exists.shape[0], column.shape[1]))
