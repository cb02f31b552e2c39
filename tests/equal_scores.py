"""Attention of queries of zeros over rows of one value each: answers that a hand can compute."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as reference

import pallas_kernels
import swa_jax as swa
from pallas_kernels import ExtraKV, KVRows, store_rows

WIDTH, ROWS = 64, 8
FMT = swa.V41.with_width(WIDTH)
# One shape for almost all calls, so that few programs are compiled; 3 heads and 5 columns fill no
# tile of the kernel.
QUERIES, HEADS, COLUMNS, EXTRA_COLUMNS = 4, 3, 5, 2


@functools.partial(jax.jit, static_argnames=("scale", "implementation"))
def attention(q, rows, indices, lengths, extra, sink, scale=None, implementation=None):
    return pallas_kernels.indexed_attention(
        q, rows, indices, lengths=lengths, extra=extra, sink=sink, scale=scale,
        implementation=implementation,
    )  # fmt: skip


class Answer(NamedTuple):
    """out[queries, heads], the one value of each output, and lse[queries, heads]."""

    out: np.ndarray
    lse: np.ndarray


def constant_rows(values, fill=0, fmt=FMT) -> KVRows:
    """Rows of one value each; the others have `fill` in all bytes."""
    data = np.full((ROWS, fmt.row_bytes), fill, np.uint8)
    for row, value in values.items():
        data[row] = reference.quantize(np.full((1, WIDTH), value, np.float32), fmt)
    return store_rows(KVRows.create(1, ROWS, fmt), jnp.asarray(data), np.arange(ROWS))


def attend(implementation, rows, indices, *, lengths=None, sink=-np.inf, extra=None) -> Answer:
    """Attention of queries of zeros, whose scores are all 0, over rows of one value each."""
    if isinstance(rows, dict):
        rows = constant_rows(rows)
    named = np.full((QUERIES, COLUMNS), -1, np.int32)
    for place, row in zip(named, indices, strict=False):
        place[: len(row)] = row
    counts = np.full(QUERIES, COLUMNS, np.int32)
    if lengths is not None:
        counts[: len(lengths)] = lengths
    extra_rows, extra_indices = ({}, [-1]) if extra is None else extra
    extra_named = np.full((QUERIES, EXTRA_COLUMNS), -1, np.int32)
    extra_named[:, : len(extra_indices)] = extra_indices
    out, lse = attention(
        jnp.zeros((QUERIES, HEADS, WIDTH), jnp.bfloat16),
        rows,
        named,
        counts,
        ExtraKV(constant_rows(extra_rows), jnp.asarray(extra_named)),
        jnp.full(HEADS, sink, jnp.float32),
        implementation=implementation,
    )
    out = np.asarray(out, np.float32)[: len(indices)]
    np.testing.assert_array_equal(out, np.broadcast_to(out[..., :1], out.shape))
    return Answer(out[..., 0], np.asarray(lse)[: len(indices)])


def check(answer: Answer, out, number_of_rows) -> None:
    """The output of each query, to bfloat16, and its lse, the log of how many rows it sees."""
    out, counts = (np.asarray(x, np.float64)[:, None] for x in (out, number_of_rows))
    with np.errstate(divide="ignore"):
        lse = np.log(counts)
    np.testing.assert_allclose(answer.out, np.tile(out, HEADS), rtol=2**-8)
    np.testing.assert_allclose(answer.lse, np.tile(lse, HEADS), atol=1e-6)
