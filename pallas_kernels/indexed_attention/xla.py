"""indexed_attention in plain XLA: the definition that the kernels are held to."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from pallas_kernels import transforms
from pallas_kernels.formats import dequantize_rows, quantize_rows
from pallas_kernels.softmax import attend, round_to
from pallas_kernels.storage import KVRows, gather_rows, is_valid_index

# Queries at once: their decoded rows stay in a core's cache, and memory does not grow with n.
_CHUNK_VALUES = 8 * 128 * 512


def indexed_attention(
    q, rows, indices, lengths, extra, sink, scale, cos, sin, *, query_norm_eps, pairing,
    output_format,
):  # fmt: skip
    """See `pallas_kernels.indexed_attention.indexed_attention`."""
    n, heads, width = q.shape
    sink = jnp.full(heads, -jnp.inf, jnp.float32) if sink is None else sink
    caches = [(rows, indices, lengths)]
    if extra is not None:
        caches.append((extra.rows, extra.indices, extra.lengths))

    def chunk(q, index_rows, rotation):
        query = q.astype(jnp.float32)
        if query_norm_eps is not None:
            query = transforms.rms_norm(query, None, query_norm_eps)
        if rotation is not None:
            cos, sin = (angle[:, None, :] for angle in rotation)
            query = transforms.rope(query, cos, sin, pairing)
        query = round_to(query, q.dtype)
        read = [
            _read(cache, cache_indices, q.dtype)
            for (cache, _, _), cache_indices in zip(caches, index_rows, strict=True)
        ]
        out, lse = attend(query, read, sink, scale, q.dtype)
        if rotation is not None:
            out = transforms.rope(out, cos, sin, pairing, inverse=True)
        return out if output_format is None else quantize_rows(out, output_format), lse

    inputs = (
        q,
        [_within_length(cache_indices, length) for _, cache_indices, length in caches],
        None if cos is None else (cos, sin),
    )
    columns = sum(cache_indices.shape[1] for _, cache_indices, _ in caches)
    size = max(1, _CHUNK_VALUES // max(1, columns * width))
    if n <= size:
        return _as_output(*chunk(*inputs), q.dtype)
    chunks = -(-n // size)
    padded = jax.tree.map(lambda x: _pad_rows(x, chunks * size), inputs)
    split = jax.tree.map(lambda x: x.reshape(chunks, size, *x.shape[1:]), padded)
    out, lse = lax.map(lambda args: chunk(*args), split)
    out, lse = (x.reshape(chunks * size, *x.shape[2:])[:n] for x in (out, lse))
    # Cast here and not in a chunk: CPUs would cast the whole bfloat16 output there and back each
    # time, as they know no bfloat16 update of a slice.
    return _as_output(out, lse, q.dtype)


def _read(
    rows: KVRows, indices: Int32[Array, "n k"], compute_dtype: jnp.dtype
) -> tuple[Float32[Array, "n k d"], Bool[Array, "n k 1"]]:
    """The decoded rows, zeros where there is none, and which indices name a row."""
    valid = is_valid_index(rows, indices)
    decoded = dequantize_rows(gather_rows(rows, jnp.where(valid, indices, 0)), rows.fmt)
    if rows.fmt.raw_dtype == "float32":  # the other formats are exact in bfloat16
        decoded = round_to(decoded, compute_dtype)
    # Numbers are selected and not bytes, which CPUs select one at a time. Row 0 stands in for none:
    # a NaN in it goes no further.
    return jnp.where(valid[..., None], decoded, jnp.float32(0)), valid[..., None]


def _within_length(indices, lengths):
    if lengths is None:
        return indices
    columns = jnp.arange(indices.shape[1], dtype=jnp.int32)[None, :]
    return jnp.where(columns < lengths[:, None], indices, -1)


def _pad_rows(x, size):
    """x with rows up to `size`; the index -1 in the new ones."""
    value = -1 if jnp.issubdtype(x.dtype, jnp.integer) else 0
    return jnp.pad(x, ((0, size - x.shape[0]), *((0, 0),) * (x.ndim - 1)), constant_values=value)


def _as_output(out, lse, dtype):
    """The float32 output in the queries' dtype; rows of an output format as they are."""
    return out if out.dtype == jnp.uint8 else out.astype(dtype), lse
