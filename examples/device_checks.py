"""What must hold on a card: attention, batch invariance, and donation in place."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from device_bytes import empty_rows, jitted_store, store_inputs
from device_cases import (
    EPS,
    Context,
    Device,
    attend,
    attention_in_float64,
    attention_inputs,
    compile_all,
)

import swa_jax as swa
from pallas_kernels import V41, V41_FP4, ExtraKV, dequantize_rows
from swa_jax import decoding

OUTPUT_ERROR, LSE_ERROR = 4e-3, 1e-5


# --- attention


def attention_cases(context: Context) -> dict[str, tuple[tuple, dict]]:
    """Inputs and options by name."""
    sizes, n = context.sizes, context.sizes.attention_queries
    v41, fp4 = (fmt.with_width(sizes.width) for fmt in (V41, V41_FP4))
    inputs = functools.partial(attention_inputs, context, n)
    cases: dict[str, tuple[tuple, dict]] = {
        f"{fmt.name}, {sizes.heads[0]} heads": (inputs(sizes.heads[0], fmt), {})
        for fmt in sizes.formats
    }
    for heads in sizes.heads:
        cases[f"V41 and V41_FP4, {heads} heads"] = (inputs(heads, v41, fp4), {})
    rotated = inputs(sizes.heads[0], v41, rotated=True)
    cases["V41, norm and rotation"] = (rotated, {"query_norm_eps": EPS})
    cases["V41 to V41"] = (inputs(sizes.heads[0], v41), {"output_format": v41})
    return cases


def check_attention(context: Context) -> None:
    """Attention beside XLA in float32 on the same card, and beside float64."""
    cases = attention_cases(context)
    jobs: dict[Any, Any] = {}
    for name, (inputs, options) in cases.items():
        on_card = context.put(inputs)
        jobs[name, "kernel"] = (attend(context.kernel, **options), on_card)
        wide = (on_card[0].astype(jnp.float32), *on_card[1:])
        jobs[name, "xla"] = (attend("xla", **options), wide)
    context.found.progress(f"compiling {len(jobs)} attentions")
    programs = compile_all(context, jobs)
    for name, (inputs, options) in cases.items():
        with context.found.attempt(f"attention over {name}"):
            want = attention_in_float64(context, *inputs, norm_eps=options.get("query_norm_eps"))
            got = {
                place: [np.asarray(part) for part in programs[name, place](*jobs[name, place][1])]
                for place in ("kernel", "xla")
            }
            fmt = options.get("output_format")
            if fmt is not None:
                for place in got:
                    with jax.default_device(context.cpu):
                        rows = jnp.asarray(got[place][0])
                        got[place][0] = np.asarray(dequantize_rows(rows, fmt))
            # XLA in float32 rounds neither a rotated query nor float32 rows to bfloat16.
            exact = "query_norm_eps" not in options and inputs[1].fmt.raw_dtype != "float32"
            pairs = [("kernel", "float64", got["kernel"], list(want))]
            if exact:
                pairs.append(("kernel", "xla", got["kernel"], got["xla"]))
                pairs.append(("xla", "float64", got["xla"], list(want)))
            for a, b, left, right in pairs:
                prefix = f"attention over {name}, {a} and {b}"
                # e4m3 keeps three bits behind the point.
                limit = OUTPUT_ERROR if fmt is None else 5e-2
                error = rms_error(left[0], right[0])
                context.found.check(f"{prefix}: rms error", error, limit)
                # Now and then a rotated query is rounded the other way.
                limit = LSE_ERROR if "query_norm_eps" not in options else 1e-3
                context.found.check(f"{prefix}: lse", lse_error(left[1], right[1]), limit)


def rms_error(got: np.ndarray, want: np.ndarray) -> float:
    """Root mean square of the error over that of what is wanted."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))


def lse_error(got: np.ndarray, want: np.ndarray) -> float:
    """The largest error, relative where lse is above 1; infinite if -inf is not where wanted."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    empty = np.isneginf(want)
    if not np.array_equal(np.isneginf(got), empty):
        return float("inf")
    got, want = got[~empty], want[~empty]
    return float(np.max(np.abs(got - want) / np.maximum(1, np.abs(want))))


# --- batch invariance


def check_invariance(context: Context) -> None:
    """A token's bits do not depend on the batch it comes in, nor on its place there."""
    sizes, random = context.sizes, np.random.default_rng(2)
    *few, all_of_them = sizes.batches
    picks = {n: random.permutation(all_of_them)[:n] for n in few}
    v41, fp4 = (fmt.with_width(sizes.width) for fmt in (V41, V41_FP4))
    jobs: dict[Any, Any] = {}
    cases = [(heads, extra) for heads in sizes.heads for extra in (None, fp4)]
    for heads, extra in cases:
        inputs = attention_inputs(context, all_of_them, heads, v41, extra, rotated=True)
        function = attend(context.kernel)
        for n in sizes.batches:
            part = inputs if n == all_of_them else _pick(inputs, picks[n])
            jobs["attention", heads, extra, n] = (function, context.put(part))
    inputs = store_inputs(context, all_of_them)
    rows = empty_rows(v41, all_of_them, 1)
    for n in sizes.batches:
        part = inputs if n == all_of_them else _pick(inputs, picks[n])
        jobs["store", 0, None, n] = (jitted_store(context.kernel), context.put((rows, *part)))
    context.found.progress(f"compiling {len(jobs)} batches")
    programs = compile_all(context, jobs)

    def run(*key):
        return [np.asarray(leaf) for leaf in jax.tree.leaves(programs[key](*jobs[key][1]))]

    for kind, heads, extra in [*[("attention", *case) for case in cases], ("store", 0, None)]:
        what = f"{kind}, {heads} heads{', extra cache' if extra else ''}" if heads else kind
        with context.found.attempt(f"{what}: batch invariance"):
            whole = run(kind, heads, extra, all_of_them)
            again = run(kind, heads, extra, all_of_them)
            name = f"{what}: values that differ when repeated"
            context.found.check(name, _differing(whole, again), 0)
            for n, pick in picks.items():
                if kind == "attention":
                    expected = [part[pick] for part in whole]
                    got = run(kind, heads, extra, n)
                else:
                    chosen = inputs[1][pick]
                    expected = [whole[0][chosen]]
                    got = [run(kind, heads, extra, n)[0][chosen]]
                name = f"{what}: values that differ, {n} of {all_of_them}"
                context.found.check(name, _differing(got, expected), 0)


def _pick(inputs: tuple, pick: np.ndarray) -> tuple:
    """The inputs of some of the tokens: what has a first axis of tokens is picked from."""
    n = len(inputs[0])

    def chosen(value):
        if isinstance(value, np.ndarray) and value.ndim and len(value) == n:
            return value[pick]
        if isinstance(value, ExtraKV):
            return dataclasses.replace(value, indices=np.asarray(value.indices)[pick])
        return value

    return tuple(chosen(value) for value in inputs)


def _differing(a: list[np.ndarray], b: list[np.ndarray]) -> int:
    pairs = [
        (np.ascontiguousarray(x).view(np.uint8), np.ascontiguousarray(y).view(np.uint8))
        for x, y in zip(a, b, strict=True)
    ]
    return sum(int((x != y).sum()) for x, y in pairs)


# --- donation


def check_donation(context: Context) -> None:
    """Prefill and decode steps take the donated cache's memory, and no second cache's."""
    sizes, found = context.sizes, context.found
    attention = swa.AttentionConfig(
        hidden_size=256, num_heads=sizes.heads[0], head_dim=sizes.width, rope_dim=2 * sizes.half,
        q_lora_rank=128, o_groups=2, o_lora_rank=64, window=sizes.window, dtype="bfloat16",
        param_dtype="bfloat16", fmt=V41.with_width(sizes.width),
    )  # fmt: skip
    config = swa.DecoderConfig(64, sizes.decode_layers, attention, mlp_size=256)
    model = swa.Decoder(config, implementation=context.kernel)
    plain = swa.Decoder(config)
    tokens = jnp.zeros((1, 4), jnp.int32)
    found.progress("compiling prefill and decode")
    params = nn.meta.unbox(jax.jit(plain.init)(jax.random.key(0), tokens))
    cache = swa.RingCache.create(
        sizes.decode_slots, sizes.decode_layers, config.geometry, config.fmt
    )
    prompts = [bytes(range(1, 6 + i)) for i in range(4)]
    sampling = swa.Sampling.build(len(prompts))
    before = _peak(context.device)
    old, pointer = cache, cache.blocks[0].unsafe_buffer_pointer()
    state = decoding.begin(
        model, params, cache, prompts, max_new_tokens=32, sampling=sampling, chunk=8
    )
    _check_in_place(found, "prefill", old, pointer, state.cache)
    old, pointer = state.cache, state.cache.blocks[0].unsafe_buffer_pointer()
    state, chosen = decoding.decode_block(model, params, state, 3)
    _check_in_place(found, "decode", old, pointer, state.cache)
    jax.block_until_ready(chosen)
    after = _peak(context.device)
    found.result("cache_bytes", state.cache.nbytes)
    found.result("peak_bytes", after)
    if before is not None and after is not None:
        in_use = context.device.memory_stats()["bytes_in_use"]
        growth = after - max(before, in_use)
        found.check("decode: peak memory beyond what is kept", growth, state.cache.nbytes / 2)


def _check_in_place(found, name: str, old: swa.RingCache, pointer: int, new: swa.RingCache) -> None:
    moved = new.blocks[0].unsafe_buffer_pointer() != pointer
    found.check(f"{name}: the cache moved", moved, 0)
    found.check(f"{name}: the donated cache is alive", not old.blocks[0].is_deleted(), 0)


def _peak(device: Device) -> int | None:
    stats = device.memory_stats()
    return None if stats is None else stats.get("peak_bytes_in_use")
