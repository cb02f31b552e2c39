"""Sizes and inputs of the device check, programs compiled side by side, and float64 attention."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from device_process import Found

import swa_jax as swa
from pallas_kernels import (
    BF16,
    F32,
    V4,
    V41,
    V41_FP4,
    ExtraKV,
    KVCacheFormat,
    KVRows,
    dequantize_rows,
    indexed_attention,
    quantize_rows,
)
from pallas_kernels.storage import region_bytes

EPS = 1e-6

Device = Any
"""A jax.Device, which is no type for type checkers."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of all inputs.

    Attributes:
      width: values in a row.
      half: rotated pairs.
      window: rows that a query sees.
      heads: numbers of heads, the most important first.
      extra: rows of the extra cache that a query sees.
      extra_rows: rows of the extra cache for each request.
      random_rows: rows whose bytes are compared.
      attention_queries: queries whose attention is compared.
      batches: numbers of queries among which a result must not change, ascending.
      decode_layers: layers of the model whose steps are given their caches.
      decode_slots: state slots of those caches.
      requests: numbers of requests to time, the most important first.
      verify_requests: numbers of requests with `verify_tokens` queries each.
      verify_tokens: queries of a request in a verify step.
      layers: rings that a timed program reads in turn.
      copy_bytes: of the copy that measures the memory's bandwidth.
      sample_us: shortest sample of the clock.
      samples: of each program.
    """

    width: int = 512
    half: int = 32
    window: int = 128
    heads: tuple[int, ...] = (64, 128)
    extra: int = 512
    extra_rows: int = 640
    random_rows: int = 16384
    attention_queries: int = 32
    batches: tuple[int, ...] = (1, 7, 128, 1000)
    decode_layers: int = 2
    decode_slots: int = 4096
    requests: tuple[int, ...] = (128, 1, 32, 256, 512)
    verify_requests: tuple[int, ...] = (64, 256, 512, 128)
    verify_tokens: int = 4
    layers: int = 8
    copy_bytes: int = 1 << 30
    sample_us: float = 2000
    samples: int = 25

    @property
    def geometry(self) -> swa.RingGeometry:
        return swa.RingGeometry.for_drafts(self.window)

    @property
    def formats(self) -> list[KVCacheFormat]:
        return [fmt.with_width(self.width) for fmt in (V41, V4, BF16, F32, V41_FP4)]


FULL = Sizes()
TINY = Sizes(
    width=128, half=8, window=4, heads=(2,), extra=16, extra_rows=32, random_rows=128,
    attention_queries=3, batches=(1, 5), decode_layers=1, decode_slots=64, requests=(1,),
    verify_requests=(2,), verify_tokens=2, layers=2, copy_bytes=1 << 20, sample_us=100, samples=3,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Context:
    """Where a stage runs, on what, and where its findings go.

    Attributes:
      sizes: of all inputs.
      kernel: the kernel's implementation, "triton" or "interpret"; None where there is none.
      device: the card, or what stands in for it.
      cpu: a CPU.
      found: what keeps the findings.
    """

    sizes: Sizes
    kernel: Any
    device: Device
    cpu: Device
    found: Found

    def put(self, tree: Any) -> Any:
        """The arrays on the card."""
        return jax.device_put(tree, self.device)


def make_context(found: Found, options: dict) -> Context:
    """The context of a stage, from the command line's options."""
    device = jax.devices()[0]
    if options["tiny"]:
        kernel, sizes = "interpret", TINY
    elif device.platform == "gpu":
        kernel, sizes = "triton", FULL
    else:
        kernel, sizes = None, dataclasses.replace(FULL, copy_bytes=1 << 27, samples=5)
    return Context(sizes, kernel, device, jax.devices("cpu")[0], found)


# --- programs


def compile_all(
    context: Context,
    jobs: Mapping[Any, tuple[Callable, tuple]],
    options: Mapping[Any, dict] | None = None,
) -> dict[Any, Callable]:
    """Compiles programs side by side: most of a short run is compilation.

    Args:
      context: of the stage.
      jobs: by any key, a jitted function and its arguments; shapes and dtypes suffice.
      options: compiler options by key.

    Returns:
      The programs. One that did not compile raises why when it is called.
    """

    def refused(error: Exception) -> Callable:
        def call(*_):
            raise error

        return call

    # The interpreter's programs are large and run for a moment.
    quick = {"xla_backend_optimization_level": 0} if context.kernel == "interpret" else {}

    def compile_one(key):
        chosen = {**quick, **(options or {}).get(key, {})}
        try:
            return lowered[key].compile(compiler_options=chosen or None)
        except Exception as error:
            return refused(error)

    lowered: dict[Any, Any] = {}
    programs = {}
    for key, (function, arguments) in jobs.items():
        try:
            lowered[key] = function.lower(*arguments)
        except Exception as error:
            programs[key] = refused(error)
    with ThreadPoolExecutor(min(12, os.cpu_count() or 1)) as pool:
        programs |= dict(zip(lowered, pool.map(compile_one, lowered), strict=True))
    return programs


def device_arguments(arrays: Any, device: Device) -> Any:
    """Arguments to compile for, of the arrays' shapes and dtypes, that lie on a device."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype), sharding=sharding),
        arrays,
    )


# --- inputs


def rows_of(values: np.ndarray, fmt: KVCacheFormat, rows_per_slot: int, cpu: Device) -> KVRows:
    """Rows that hold values [slots * rows_per_slot, width], quantised on the CPU."""
    with jax.default_device(cpu):
        data = np.asarray(jax.jit(quantize_rows, static_argnums=1)(values, fmt))
    region = region_bytes(rows_per_slot, fmt)
    block = np.zeros((len(values) // rows_per_slot, region), np.uint8)
    block[:, : rows_per_slot * fmt.row_bytes] = data.reshape(len(block), -1)
    return KVRows(block, np.int32(0), rows_per_slot, fmt)  # pyright: ignore[reportArgumentType]


def values_of(rows: KVRows, cpu: Device) -> np.ndarray:
    """The numbers of all rows as float64[rows, width], rounded to bfloat16 as kernels read them."""
    with jax.default_device(cpu):
        numbers = np.asarray(dequantize_rows(jax.jit(KVRows.logical)(rows), rows.fmt))
    return numbers.astype(ml_dtypes.bfloat16).astype(np.float64).reshape(rows.num_rows, -1)


def random_indices(random: np.random.Generator, n: int, width: int, rows: int) -> np.ndarray:
    """int32[n, width]: rows from 1 on, now and then none."""
    indices = random.integers(1, rows, (n, width), dtype=np.int32)
    return np.where(random.random((n, width)) < 0.05, np.int32(-1), indices)


def angles(random: np.random.Generator, n: int, half: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines float32[n, half]."""
    turn = random.uniform(-np.pi, np.pi, (n, half))
    return np.cos(turn).astype(np.float32), np.sin(turn).astype(np.float32)


def attention_inputs(
    context: Context,
    n: int,
    heads: int,
    fmt: KVCacheFormat,
    extra_fmt: KVCacheFormat | None = None,
    rotated: bool = False,
) -> tuple:
    """Positional arguments of `attend`: q, rows, indices, lengths, extra, sink, cos, sin.

    Row 0 of the rows is NaN, and no index names it. The first query sees nothing.
    """
    sizes, random = context.sizes, np.random.default_rng(0)
    slots, rows_per_slot = 8, sizes.geometry.capacity
    values = random.normal(size=(slots * rows_per_slot, sizes.width)).astype(np.float32)
    values[0] = np.nan
    rows = rows_of(values, fmt, rows_per_slot, context.cpu)
    indices = random_indices(random, n, sizes.window, rows.num_rows)
    indices[0] = -1
    lengths = random.integers(1, sizes.window + 1, n).astype(np.int32)
    extra = None
    if extra_fmt is not None:
        values = random.normal(size=(2 * sizes.extra_rows, sizes.width)).astype(np.float32)
        extra_rows = rows_of(values, extra_fmt, sizes.extra_rows, context.cpu)
        extra_indices = random_indices(random, n, sizes.extra, extra_rows.num_rows)
        extra_indices[0] = -1
        extra = ExtraKV(extra_rows, extra_indices)
    q = random.normal(size=(n, heads, sizes.width)).astype(ml_dtypes.bfloat16)
    sink = random.normal(size=heads).astype(np.float32)
    cos, sin = angles(random, n, sizes.half) if rotated else (None, None)
    return q, rows, indices, lengths, extra, sink, cos, sin


def attend(implementation: Any, **options: Any) -> Callable:
    """`indexed_attention` as a jitted function of arrays only."""

    def call(q, rows, indices, lengths, extra, sink, cos, sin):
        return indexed_attention(
            q, rows, indices, lengths=lengths, extra=extra, sink=sink, cos=cos, sin=sin,
            implementation=implementation, **options,
        )  # fmt: skip

    return jax.jit(call)


# --- the reference


def attention_in_float64(
    context: Context, q, rows, indices, lengths, extra, sink, cos, sin, norm_eps=None
) -> tuple[np.ndarray, np.ndarray]:
    """The output and lse that `attend` is to give, from the maths."""
    query = np.asarray(q, np.float64)
    if norm_eps is not None:
        query = query / np.sqrt(np.mean(query**2, -1, keepdims=True) + norm_eps)
    if cos is not None:
        query = _rotate(query, cos, sin)
    query = query.astype(ml_dtypes.bfloat16).astype(np.float64)
    lists = [(rows, indices, lengths)]
    if extra is not None:
        lists.append((extra.rows, extra.indices, extra.lengths))
    keys, visible = [], []
    for cache, chosen, length in lists:
        columns = np.arange(chosen.shape[1])
        seen = chosen >= 0 if length is None else (chosen >= 0) & (columns < length[:, None])
        visible.append(seen)
        keys.append(values_of(cache, context.cpu)[np.where(seen, chosen, 1)])
    keys, visible = np.concatenate(keys, 1), np.concatenate(visible, 1)[:, None, :]
    scores = query @ keys.swapaxes(1, 2) * query.shape[-1] ** -0.5
    scores = np.where(visible, scores, -np.inf)
    peak = scores.max(-1)
    base = np.where(np.isinf(peak), 0, peak)[..., None]
    weights = np.exp(scores - base)
    mass = weights.sum(-1)
    with np.errstate(divide="ignore"):
        lse = base[..., 0] + np.log(mass)
    total = mass + np.exp(np.asarray(sink, np.float64) - base[..., 0])
    out = weights @ keys / total[..., None]
    return (out if cos is None else _rotate(out, cos, -sin)), lse


def _rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Rotates neighbours of the last values of x[n, heads, width]."""
    out = x.copy()
    tail = out[..., x.shape[-1] - 2 * cos.shape[-1] :]
    a, b = tail[..., 0::2].copy(), tail[..., 1::2].copy()
    cos, sin = (np.asarray(part, np.float64)[:, None, :] for part in (cos, sin))
    tail[..., 0::2], tail[..., 1::2] = a * cos - b * sin, b * cos + a * sin
    return out
