"""The bytes of rows on a card: casts, stores, and how rows that differ do."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device_cases import EPS, Context, angles, compile_all
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import (
    KVCacheFormat,
    KVRows,
    fused_store,
    quantize_rows,
    triton_launch,
    triton_rows,
)

# Of rows that go through norm and rotation, whose last bits differ between programs. bfloat16 has
# 16 times the rounding boundaries of e4m3, and raw float32 keeps every last bit.
QUANTISED_RATE, RAW_RATE, FLOAT32_ERROR = 1e-3, 16e-3, 2e-6


def _cast_kernel(row_ref, out_ref, *, fmt, floor):
    row = pl.program_id(0) * 16 + jnp.arange(16, dtype=jnp.int32)
    column = jnp.arange(fmt.num_elements, dtype=jnp.int32)[None, :]
    exists = row < row_ref.shape[0]
    values = plgpu.load(row_ref.at[row[:, None], column], mask=exists[:, None], other=0)
    triton_rows.store_row(out_ref, (row,), jnp.zeros_like(row), values, fmt, floor, exists)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _cast_by_kernel(rows, fmt: KVCacheFormat, floor: str, implementation: str):
    """`quantize_rows` by the code that the fused store's kernel consists of."""
    return triton_launch.launch(
        functools.partial(_cast_kernel, fmt=fmt, floor=floor),
        [rows],
        jax.ShapeDtypeStruct((len(rows), fmt.row_bytes), jnp.uint8),
        grid=(pl.cdiv(len(rows), 16),),
        num_warps=4,
        interpret=implementation == "interpret",
    )


def cast_inputs(width: int) -> np.ndarray:
    """float32[rows, width]: every bfloat16 in order, the finite ones mixed, and other float32."""
    random = np.random.default_rng(0)
    patterns = np.arange(65536, dtype=np.uint32) << 16
    finite = patterns[(patterns >> 23 & 0xFF) != 0xFF]
    mixed = np.resize(random.permutation(finite), 65536)
    others = random.integers(0, 2**32, 65536, dtype=np.uint32)
    others = np.where((others >> 23 & 0xFF) == 0xFF, others & 0x807FFFFF, others)
    return np.concatenate([patterns, mixed, others]).view(np.float32).reshape(-1, width)


def check_cast(context: Context) -> None:
    """The cast of every bfloat16, and of other float32, has the same bytes on card and CPU."""
    rows = cast_inputs(context.sizes.width)
    cast = jax.jit(quantize_rows, static_argnums=(1, 2))
    places = {"cpu": jax.device_put(rows, context.cpu), "card": context.put(rows)}
    jobs: dict[Any, Any] = {}
    for fmt in context.sizes.formats:
        for floor in ("amax", "scale") if fmt.scale_dtype == "ue8m0" else ("amax",):
            for place, array in places.items():
                jobs[fmt, floor, place] = (cast, (array, fmt, floor))
            kernel = (_cast_by_kernel, (places["card"], fmt, floor, context.kernel))
            jobs[fmt, floor, "kernel"] = kernel
    context.found.progress(f"compiling {len(jobs)} casts")
    programs = compile_all(context, jobs)
    for fmt, floor, place in jobs:
        if place == "cpu":
            expected = np.asarray(programs[fmt, floor, "cpu"](places["cpu"]))
            continue
        name = f"cast to {fmt.name}, floor {floor}: rows that differ, {place} and cpu"
        with context.found.attempt(name):
            got = np.asarray(programs[fmt, floor, place](places["card"]))
            context.found.check(name, (got != expected).any(axis=1).sum(), 0)


def store_inputs(context: Context, n: int) -> tuple:
    """latents, slots, norm weight, cosines and sines of n tokens."""
    random, width = np.random.default_rng(1), context.sizes.width
    size = np.exp(random.normal(size=(n, 1)) + random.normal(size=(1, width)))
    return (
        (random.normal(size=(n, width)) * size).astype(np.float32),
        random.permutation(n).astype(np.int32),
        random.uniform(0.5, 1.5, width).astype(np.float32),
        *angles(random, n, context.sizes.half),
    )


def jitted_store(implementation: Any) -> Callable:
    """`fused_store` as a jitted function of arrays only."""

    def call(rows, latents, slots, weight, cos, sin):
        return fused_store(
            rows, latents, slots, norm_weight=weight, norm_eps=EPS, cos=cos, sin=sin,
            implementation=implementation,
        )  # fmt: skip

    return jax.jit(call)


def empty_rows(fmt: KVCacheFormat, slots: int, rows_per_slot: int) -> KVRows:
    """Rows of zeros on the host."""
    with jax.default_device(jax.devices("cpu")[0]):
        return jax.device_get(KVRows.create(slots, rows_per_slot, fmt))


def check_store(context: Context) -> None:
    """The rows of a fused store by kernel, by XLA on the card and by XLA on the CPU."""
    n, jobs = context.sizes.random_rows, {}
    for fmt in context.sizes.formats:
        arguments = (empty_rows(fmt, n // 8, 8), *store_inputs(context, n))
        on_card, on_cpu = context.put(arguments), jax.device_put(arguments, context.cpu)
        jobs[fmt, "kernel"] = (jitted_store(context.kernel), on_card)
        jobs[fmt, "xla"] = (jitted_store("xla"), on_card)
        jobs[fmt, "cpu"] = (jitted_store("xla"), on_cpu)
    context.found.progress(f"compiling {len(jobs)} stores")
    programs = compile_all(context, jobs)
    for fmt in context.sizes.formats:
        with context.found.attempt(f"fused_store to {fmt.name}"):
            stored = {}
            for place in ("kernel", "xla", "cpu"):
                rows = programs[fmt, place](*jobs[fmt, place][1])
                stored[place] = np.asarray(rows.data)[:, : 8 * fmt.row_bytes].reshape(n, -1)
            for a, b in (("kernel", "xla"), ("kernel", "cpu"), ("xla", "cpu")):
                name = f"fused_store to {fmt.name}, {a} and {b}"
                for what, (value, limit) in compare_rows(stored[a], stored[b], fmt).items():
                    context.found.check(f"{name}: {what}", value, limit)


def compare_rows(a: np.ndarray, b: np.ndarray, fmt: KVCacheFormat) -> dict[str, tuple]:
    """How the bytes of rows differ: figures and their limits, by what they measure."""
    if fmt.raw_dtype == "float32":
        a, b = a.view(np.float32), b.view(np.float32)
        error = np.abs(a - b).max(axis=1) / np.abs(b).max(axis=1)
        return {"largest error in a row": (error.max(), FLOAT32_ERROR)}
    found = {}
    if fmt.quantized_dtype is not None:
        parts = [
            (
                _ordered(*_codes(x[:, : fmt.quantized_bytes], fmt)),
                x[:, fmt.data_bytes : fmt.data_bytes + fmt.scale_bytes].astype(int),
            )
            for x in (a, b)
        ]
        (codes_a, scales_a), (codes_b, scales_b) = parts
        scale_steps = np.abs(scales_a - scales_b)
        steps = np.abs(codes_a - codes_b).reshape(len(a), fmt.num_scales, -1)
        steps = np.where(scale_steps[..., None] > 0, 0, steps)
        differ = (steps > 0).any(axis=(1, 2)) | (scale_steps > 0).any(axis=1)
        found["share of rows"] = (differ.mean(), QUANTISED_RATE)
        found["largest step"] = (max(steps.max(), scale_steps.max()), 1)
    if fmt.raw_elements:
        raw = slice(fmt.quantized_bytes, fmt.data_bytes)
        values = [np.ascontiguousarray(x[:, raw]).view(np.uint16).astype(int) for x in (a, b)]
        steps = np.abs(_ordered(values[0], 0x8000) - _ordered(values[1], 0x8000))
        found["share of rows, bfloat16 values"] = ((steps > 0).any(axis=1).mean(), RAW_RATE)
        found["largest step, bfloat16 values"] = (steps.max(), 1)
    return found


def _codes(data: np.ndarray, fmt: KVCacheFormat) -> tuple[np.ndarray, int]:
    """The codes of quantised values and their sign bit."""
    if fmt.quantized_dtype == "e4m3":
        return data.astype(int), 0x80
    return np.stack([data & 0xF, data >> 4], axis=-1).reshape(len(data), -1).astype(int), 0x8


def _ordered(codes: np.ndarray, sign: int) -> np.ndarray:
    """Codes of sign and magnitude as integers in the order of what they stand for."""
    magnitude = codes & (sign - 1)
    return np.where(codes & sign, -magnitude, magnitude)
