"""What a call of the attention layer is checked for, at trace time."""

import numpy as np

from pallas_kernels import ExtraKV, checks
from pallas_kernels.storage import check_rows
from swa_jax.config import AttentionConfig
from swa_jax.metadata import Metadata, SequenceMetadata


def check_call(x, rows, meta, extra, config: AttentionConfig) -> None:
    """Raises ValueError, with expected and got, unless a layer with this configuration can run.

    Args:
      x: the layer's input.
      rows: its view of the cache, or None.
      meta: metadata of the call.
      extra: the compressed cache, or None.
      config: the layer's configuration.
    """
    checks.check_floating("x", x)
    if not isinstance(meta, Metadata):
        raise ValueError(
            f"meta: expected a DecodeMetadata, PrefillMetadata or SequenceMetadata, got "
            f"{type(meta).__name__}"
        )
    checks.check_shape("x", x, (*meta.positions.shape, config.hidden_size))
    if 0 in meta.positions.shape:
        raise ValueError(f"x: expected at least one request and token, got shape {x.shape}")
    _check_extra(extra, config.extra_fmt, meta.positions.size)
    if isinstance(meta, SequenceMetadata):
        if rows is not None:
            raise ValueError("rows: expected None in a call without a cache, got rows")
        return
    check_rows(rows)
    if rows.fmt != config.fmt:
        want, got = config.fmt, rows.fmt
        raise ValueError(
            f"rows: expected format {want.name} of {want.num_elements} values, got {got.name} of "
            f"{got.num_elements}"
        )
    if checks.is_known(meta.slots) and np.any(np.asarray(meta.slots) >= rows.num_rows):
        raise ValueError(
            f"meta: expected state ids below {rows.data.shape[0]}, the cache's slots, got slots "
            f"up to row {np.max(np.asarray(meta.slots))} of {rows.num_rows}"
        )
    want = (config.window, rows.rows_per_slot)
    got = (meta.geometry.window, meta.geometry.capacity)
    if want != got:
        raise ValueError(f"meta: expected a geometry of window, capacity {want}, got {got}")


def _check_extra(extra, fmt, queries: int) -> None:
    if extra is None:
        if fmt is not None:
            raise ValueError(
                f"extra: expected a compressed cache of {fmt.name} rows, as extra_fmt says, got "
                f"none; dataclasses.replace(config, extra_fmt=None) reads the window only"
            )
        return
    checks.check_type("extra", extra, ExtraKV)
    if fmt is None:
        raise ValueError("extra: expected none, as extra_fmt is None, got a compressed cache")
    check_rows(extra.rows, "extra.rows")
    if extra.rows.fmt != fmt:
        raise ValueError(
            f"extra.rows: expected format {fmt.name} of {fmt.num_elements} values, got "
            f"{extra.rows.fmt.name} of {extra.rows.fmt.num_elements}"
        )
    indices = checks.as_int32("extra.indices", extra.indices)
    checks.check_shape("extra.indices", indices, (queries, None))
    if extra.lengths is not None:
        lengths = checks.as_int32("extra.lengths", extra.lengths)
        checks.check_shape("extra.lengths", lengths, (queries,))
