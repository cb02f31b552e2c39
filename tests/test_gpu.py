"""Both operations as an NVIDIA GPU runs them, beside XLA on the same card and on the CPU.

Every test runs with "triton" on a card (pytest -m gpu --gpu) and, with smaller inputs, with the
interpreter everywhere, so that what is wrong with a test shows without a card.
"""

import dataclasses

import device_bytes as row_bytes
import device_cases as cases
import device_checks as checks
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import attention_config, decoder_config, decoder_params

import swa_jax as swa
from pallas_kernels import BF16, F32, V4, V41, V41_FP4, KVRows, dispatch
from swa_jax import decoding

pytestmark = pytest.mark.quick_compilation

TRITON_CALL = "__gpu$xla.gpu.triton"
OUTPUT_ERROR, LSE_ERROR = 4e-3, 1e-5
BY_FORMAT = pytest.mark.parametrize("fmt", [V41, V4, BF16, F32, V41_FP4], ids=lambda fmt: fmt.name)


@pytest.fixture(
    params=[
        pytest.param("triton", marks=pytest.mark.gpu),
        pytest.param("interpret", marks=pytest.mark.slow),
    ]
)
def context(request) -> cases.Context:
    """The implementation, its device, and sizes that it can run in a moment."""
    cpu = jax.devices("cpu")[0]
    if request.param == "triton":
        sizes = dataclasses.replace(cases.FULL, random_rows=8192, attention_queries=33)
        return cases.Context(sizes, "triton", jax.devices()[0], cpu, found=None)
    return cases.Context(cases.TINY, "interpret", cpu, cpu, found=None)


def arrays(result):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(result)]


def assert_same_bits(got, expected):
    for a, b in zip(arrays(got), arrays(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(*(np.frombuffer(x.tobytes(), np.uint8) for x in (a, b)))


def store(context, implementation, fmt, n, device):
    inputs = (KVRows.create(n // 8, 8, fmt), *row_bytes.store_inputs(context, n))
    return row_bytes.jitted_store(implementation)(*jax.device_put(inputs, device))


def stored_rows(rows):
    used = rows.rows_per_slot * rows.fmt.row_bytes
    return np.asarray(rows.data)[:, :used].reshape(rows.num_rows, -1)


@BY_FORMAT
def test_a_store_has_the_bytes_of_xla_on_the_same_device_and_on_the_cpu(context, fmt):
    fmt, n = fmt.with_width(context.sizes.width), context.sizes.random_rows
    got = stored_rows(store(context, context.kernel, fmt, n, context.device))
    for device in {context.device, context.cpu}:
        expected = stored_rows(store(context, "xla", fmt, n, device))
        for what, (value, limit) in row_bytes.compare_rows(got, expected, fmt).items():
            assert value <= limit, what


@BY_FORMAT
def test_attention_is_that_of_xla_in_float32_on_the_same_device_and_on_the_cpu(context, fmt):
    heads = context.sizes.heads[-1]
    fmt = fmt.with_width(context.sizes.width)
    inputs = cases.attention_inputs(context, context.sizes.attention_queries, heads, fmt)
    got, got_lse = cases.attend(context.kernel)(*context.put(inputs))
    assert got.dtype == jnp.bfloat16
    if fmt.raw_dtype == "float32":  # tensor cores read such rows as bfloat16
        rounded = cases.values_of(inputs[1], context.cpu).astype(np.float32)
        rounded[0] = np.nan
        rows = cases.rows_of(rounded, fmt, inputs[1].rows_per_slot, context.cpu)
        inputs = (inputs[0], rows, *inputs[2:])
    wide = (inputs[0].astype(np.float32), *inputs[1:])
    for device in {context.device, context.cpu}:
        expected, expected_lse = cases.attend("xla")(*jax.device_put(wide, device))
        assert checks.rms_error(got, expected) <= OUTPUT_ERROR
        assert checks.lse_error(got_lse, expected_lse) <= LSE_ERROR


def test_an_extra_cache_joins_the_softmax(context):
    v41, fp4 = (fmt.with_width(context.sizes.width) for fmt in (V41, V41_FP4))
    n, heads = context.sizes.attention_queries, context.sizes.heads[0]
    inputs = cases.attention_inputs(context, n, heads, v41, fp4, rotated=True)
    got, got_lse = cases.attend(context.kernel)(*context.put(inputs))
    expected, expected_lse = cases.attention_in_float64(context, *inputs)
    assert checks.rms_error(got, expected) <= OUTPUT_ERROR
    # Now and then a rotated query is rounded the other way.
    assert checks.lse_error(got_lse, expected_lse) <= 1e-3


def test_vmap_gives_the_bits_of_one_call_each(context):
    fmt = V41.with_width(context.sizes.width)
    q, rows, indices, _, _, sink, *_ = context.put(
        cases.attention_inputs(context, 4, context.sizes.heads[0], fmt)
    )

    def attend(q, indices):
        return cases.indexed_attention(q, rows, indices, sink=sink, implementation=context.kernel)

    q, indices = q.reshape(2, 2, *q.shape[1:]), indices.reshape(2, 2, -1)
    got = jax.jit(jax.vmap(attend))(q, indices)
    jitted = jax.jit(attend)
    for i in range(2):
        assert_same_bits([part[i] for part in got], jitted(q[i], indices[i]))


def test_the_gradient_is_that_of_xla(context):
    fmt = V41.with_width(context.sizes.width)
    inputs = context.put(cases.attention_inputs(context, 3, context.sizes.heads[0], fmt))

    def loss(q, implementation):
        out, _ = cases.attend(implementation)(q, *inputs[1:])
        return jnp.sum(out.astype(jnp.float32) ** 2)

    got, expected = (
        np.asarray(jax.jit(jax.grad(loss), static_argnums=1)(inputs[0], name), np.float32)
        for name in (context.kernel, "xla")
    )
    assert np.all(np.isfinite(got))
    assert np.abs(expected).max() > 1e-3
    assert checks.rms_error(got, expected) <= 2e-2


def test_prefill_and_decode_of_a_bfloat16_model_agree_with_xla(context):
    attention = attention_config(16, swa.V41, dtype="bfloat16", param_dtype="bfloat16")
    config = decoder_config(attention, 2, scan_layers=True)
    params = context.put(decoder_params(config))
    text = np.random.default_rng(5).integers(0, 50, (2, 36)).astype(np.int32)
    scores = []
    for implementation in (context.kernel, "xla"):
        model = swa.Decoder(config, implementation=implementation)
        cache = swa.RingCache.create(3, 2, config.geometry, config.fmt)
        state_ids = jnp.asarray([2, 0])
        cache, last = decoding.prefill(model, params, cache, state_ids, text[:, :32], chunk=32)
        first = model.apply(params, last, method="logits")
        logits, _ = decoding.replay(
            model, params, cache, state_ids, text[:, 32:], np.full(2, 32, np.int32)
        )
        scores.append(np.concatenate([np.asarray(first)[:, None], np.asarray(logits)], axis=1))
    assert np.all(np.isfinite(scores[0]))
    assert checks.rms_error(*scores) <= 3e-2


def default_store_and_attention(context):
    """Both operations in one function without a named implementation, and its arguments."""
    fmt = V41.with_width(context.sizes.width)
    n = context.sizes.attention_queries
    latents = row_bytes.store_inputs(context, n)
    inputs = cases.attention_inputs(context, n, context.sizes.heads[0], fmt)

    def both(latents, inputs, implementation=None):
        q, rows, *others = inputs
        rows = row_bytes.jitted_store(implementation)(rows, *latents)
        return rows, cases.attend(implementation)(q, rows, *others)

    return both, context.put((latents, inputs))


def test_the_default_is_the_kernel_on_cuda(context):
    both, arguments = default_store_and_attention(context)
    lowered = jax.jit(both).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count(TRITON_CALL) == 2
    if context.kernel == "triton":
        by_name = jax.jit(both, static_argnums=2)(*arguments, "triton")
        assert_same_bits(jax.jit(both)(*arguments), by_name)


def test_a_program_saved_for_cpu_and_cuda_runs_on_both(context):
    both, arguments = default_store_and_attention(context)
    exported = jax.export.export(
        jax.jit(both), platforms=["cpu", "cuda"], disabled_checks=dispatch.EXPORT_DISABLED_CHECKS
    )(*arguments)
    assert TRITON_CALL in exported.mlir_module()
    reloaded = jax.export.deserialize(exported.serialize())
    for device in {context.device, context.cpu}:
        place = jax.device_put(arguments, device)
        assert_same_bits(jax.jit(reloaded.call)(*place), jax.jit(both)(*place))
