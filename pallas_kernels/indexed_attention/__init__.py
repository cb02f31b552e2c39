"""indexed_attention: attention over the rows that indices name, with sink and second cache."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Float32, Int, UInt8

from pallas_kernels import checks, dispatch
from pallas_kernels.formats import KVCacheFormat, check_cache_format
from pallas_kernels.indexed_attention import xla
from pallas_kernels.serialization import register_serialization
from pallas_kernels.storage import KVRows, check_rows
from pallas_kernels.transforms import PAIRINGS, check_rotation, checked_norm_eps

OPERATION = dispatch.operation(
    "indexed_attention", xla.indexed_attention, "pallas_kernels.indexed_attention.triton"
)


@register_serialization
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExtraKV:
    """A second cache that joins the softmax, as a compressed one does.

    Attributes:
      rows: its rows; the format may be another than the first cache's.
      indices: integers[n, k], -1 means none.
      lengths: integers[n], how many leading entries of each index row count; None: all.
    """

    rows: KVRows
    indices: Int[ArrayLike, "n k"]
    lengths: Int[ArrayLike, " n"] | None = None


def indexed_attention(
    q: Float[Array, "n h d"],
    rows: KVRows,
    indices: Int[ArrayLike, "n k"],
    *,
    lengths: Int[ArrayLike, " n"] | None = None,
    extra: ExtraKV | None = None,
    sink: Float[Array, " h"] | None = None,
    scale: float | None = None,
    query_norm_eps: float | None = None,
    cos: Float[Array, "n half"] | None = None,
    sin: Float[Array, "n half"] | None = None,
    pairing: str = "interleaved",
    output_format: KVCacheFormat | None = None,
    implementation: dispatch.Implementation = None,
) -> tuple[Float[Array, "n h d"] | UInt8[Array, "n h b"], Float32[Array, "n h"]]:
    """Softmax attention of each query over the rows its indices name; a row is key and value.

    Scores are float32 dot products times `scale`. The sink of a head adds exp(sink) to the
    denominator and no value. There is no causal or window mask: an index that names a future row
    is read. The rules are those of FlashMLA's sparse decoding, but for an empty row's lse.

    Args:
      q: floating[n, h, d], the queries.
      rows: the cache; d is its format's number of values.
      indices: integers[n, k]; -1 or an index outside the rows means none, anywhere in a row.
        An index given twice counts twice.
      lengths: integers[n], entries of an index row from this column on are ignored; None: none.
      extra: a second cache in the same softmax.
      sink: floating[h]; -inf is no sink, +inf makes the output 0.
      scale: of the scores, a number or floating scalar; d**-0.5 by default.
      query_norm_eps: if given, each query is divided by sqrt(mean(q**2) + eps) first.
      cos: floating[n, half]; if given, with sin, the last 2 * half values of the query are rotated
        (after the norm) and those of the output rotated back.
      sin: floating[n, half].
      pairing: of the rotation, "interleaved" or "half_split".
      output_format: if given, the output comes as rows of this format, for a block-scaled
        projection.
      implementation: None, "xla", "triton" or "interpret".

    Returns:
      The output, q's dtype[n, h, d] or uint8[n, h, output_format.row_bytes], 0 where no row is
      visible; and lse, float32[n, h], the natural log of the sum of exponentials without the sink,
      -inf where no row is visible.

    Raises:
      ValueError: a wrong shape, dtype, format or choice.
      NotImplementedError: the implementation named cannot do it.
    """
    checks.check_floating("q", q)
    checks.check_shape("q", q, (None, None, None))
    q = jnp.asarray(q)
    n, heads, width = q.shape
    indices, lengths = _check_cache("rows", rows, indices, lengths, n, width)
    if extra is not None:
        checks.check_type("extra", extra, ExtraKV)
        extra = ExtraKV(
            extra.rows,
            *_check_cache("extra.rows", extra.rows, extra.indices, extra.lengths, n, width),
        )
    if sink is not None:
        checks.check_floating("sink", sink)
        checks.check_shape("sink", sink, (heads,))
        sink = sink.astype(jnp.float32)
    checks.check_choice("pairing", pairing, PAIRINGS)
    if (cos is None) != (sin is None):
        raise ValueError("cos, sin: expected both or none, got one")
    if cos is not None and sin is not None:
        check_rotation(width, n, cos, sin, pairing)
        cos, sin = cos.astype(jnp.float32), sin.astype(jnp.float32)
    if output_format is not None:
        check_cache_format("output_format", output_format)
        if output_format.num_elements != width:
            raise ValueError(
                f"output_format: expected rows of {width} values, got {output_format.num_elements}"
            )
    if query_norm_eps is not None:
        query_norm_eps = checked_norm_eps("query_norm_eps", query_norm_eps)
    factor = width**-0.5 if scale is None else scale
    checks.check_number("scale", factor)
    checks.check_shape("scale", factor, ())
    factor = jnp.asarray(factor, jnp.float32)
    return OPERATION(
        implementation, q, rows, indices, lengths, extra, sink, factor, cos, sin,
        query_norm_eps=query_norm_eps, pairing=pairing, output_format=output_format,
    )  # fmt: skip


def _check_cache(name, rows, indices, lengths, n, width):
    check_rows(rows, name)
    if rows.fmt.num_elements != width:
        raise ValueError(
            f"{name}: expected rows of {width} values as the queries have, got format "
            f"{rows.fmt.name} with {rows.fmt.num_elements}"
        )
    check_cache_format(name, rows.fmt)
    owner = name.removesuffix("rows")
    indices = checks.as_int32(f"{owner}indices", indices)
    checks.check_shape(f"{owner}indices", indices, (n, None))
    if lengths is not None:
        lengths = checks.as_int32(f"{owner}lengths", lengths)
        checks.check_shape(f"{owner}lengths", lengths, (n,))
    return indices, lengths
