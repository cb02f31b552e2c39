"""What a call refuses or keeps apart at its edge: unknown slots, formats, padding, saturation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import attention_config, decoder_config, decoder_params, layer_params

import swa_jax as swa
from pallas_kernels import KVRows, dequantize_rows, indexed_attention, quantize_rows
from swa_jax import decoding

CONFIG = attention_config(3, swa.V41)
DECODER = decoder_config(CONFIG, 1)
X = jnp.asarray(np.random.default_rng(0).normal(size=(1, 4, 32)), jnp.float32)


def cache_of(slots: int) -> swa.RingCache:
    return swa.RingCache.create(slots, 1, CONFIG.geometry, CONFIG.fmt)


def prefill_metadata(state_id: int) -> swa.PrefillMetadata:
    return swa.PrefillMetadata.build(CONFIG.geometry, [state_id], [0], [4], max_tokens=4)


@pytest.mark.parametrize("state_id", [2, 7])
def test_a_state_id_beyond_the_cache_is_refused_by_a_layer(state_id):
    layer = swa.SlidingWindowAttention(CONFIG)
    with pytest.raises(ValueError, match="expected state ids below 2, the cache's slots"):
        layer.apply(layer_params(CONFIG), X, cache_of(2).layer(0), prefill_metadata(state_id))


@pytest.mark.parametrize("state_id", [-1, 2])
def test_a_state_id_beyond_the_cache_is_refused_by_prefill(state_id):
    model, params = swa.Decoder(DECODER), decoder_params(DECODER)
    with pytest.raises(ValueError, match=rf"state_ids: expected 0 to 1, got \[{state_id}\]"):
        decoding.prefill(model, params, cache_of(2), [state_id], [[1, 2]])


@pytest.mark.parametrize("slot", [-1, 2])
def test_a_slot_beyond_the_cache_is_neither_exported_nor_imported(slot):
    cache = cache_of(2)
    with pytest.raises(ValueError, match=f"b: expected a state slot from 0 to 1, got {slot}"):
        cache.export_slot(slot, 3)
    with pytest.raises(ValueError, match=f"b: expected a state slot from 0 to 1, got {slot}"):
        cache.import_slot(slot, cache.export_slot(0, 3))


def test_a_negative_position_is_not_exported():
    with pytest.raises(ValueError, match="next_position: expected 0 or more, got -4"):
        cache_of(1).export_slot(0, -4)


def test_ragged_lists_are_refused_by_the_name_of_the_argument():
    with pytest.raises(
        ValueError, match=r"src: expected values of one shape, got \[\[1\], \[2, 3\]\]"
    ):
        cache_of(2).copy_slots([[1], [2, 3]], [0, 1])
    rows, q = cache_of(1).layer(0), jnp.zeros((1, 1, CONFIG.head_dim))
    for name in ("scale", "query_norm_eps"):
        with pytest.raises(ValueError, match=f"{name}: expected values of one shape"):
            indexed_attention(q, rows, np.int32([[0]]), **{name: [1.0, [2.0]]})


def test_empty_lists_are_lists_of_integers():
    copied = cache_of(2).copy_slots([], [])
    assert not copied.blocks[0].any()


def test_a_layer_that_is_a_known_array_is_checked_as_a_number_is():
    with pytest.raises(ValueError, match="layer: expected 0 to 0, got 7"):
        cache_of(1).layer(jnp.int32(7))
    block = jnp.zeros((1, 1024), jnp.uint8)
    with pytest.raises(ValueError, match="start: expected a multiple of 32 from 0, got 33"):
        KVRows.view(block, start=jnp.int32(33), rows_per_slot=1, fmt=CONFIG.fmt)


def test_a_layer_with_rows_for_conversion_only_cannot_be_configured():
    with pytest.raises(ValueError, match="fmt: format V32 is for conversion only"):
        dataclasses.replace(CONFIG, head_dim=576, fmt=swa.V32)
    with pytest.raises(ValueError, match="fmt: format V32 is for conversion only"):
        swa.RingCache.create(1, 1, CONFIG.geometry, swa.V32)


@pytest.mark.parametrize("fmt", [swa.V41, swa.V4, swa.BF16], ids=lambda fmt: fmt.name)
def test_a_finite_value_stays_finite_in_every_rounded_row(fmt):
    x = jnp.full((1, fmt.num_elements), 3.4e38, jnp.float32)
    values = dequantize_rows(quantize_rows(x, fmt), fmt)
    assert np.all(np.isfinite(values))
    assert np.all(np.asarray(values) > 2.9e38)


@pytest.mark.makes_nan
def test_what_stands_at_padding_reaches_no_gradient():
    params = layer_params(CONFIG)
    layer = swa.SlidingWindowAttention(CONFIG)
    segments = jnp.asarray([[0, 0, 0, -1]], jnp.int32)

    def loss(params, x):
        return jnp.sum(layer.apply(params, x, segment_ids=segments) ** 2)

    gradient = jax.jit(jax.grad(loss))
    clean = gradient(params, X.at[:, 3].set(0.0))
    poisoned = gradient(params, X.at[:, 3].set(jnp.nan))
    jax.tree.map(np.testing.assert_array_equal, poisoned, clean)


@pytest.mark.parametrize("shape", [(1, 0), (0, 1)])
def test_a_call_without_a_token_is_refused(shape):
    layer = swa.SlidingWindowAttention(CONFIG)
    with pytest.raises(ValueError, match="x: expected at least one request and token"):
        layer.apply(layer_params(CONFIG), jnp.zeros((*shape, 32)))


def test_rows_of_another_width_are_told_apart_in_the_message():
    cache = swa.RingCache.create(1, 1, CONFIG.geometry)
    layer = swa.SlidingWindowAttention(CONFIG)
    message = "expected format V41 of 64 values, got V41 of 512"
    with pytest.raises(ValueError, match=message):
        layer.apply(layer_params(CONFIG), X, cache.layer(0), prefill_metadata(0))


def call_of_layer(call, dtype, implementation):
    """A layer's call as a function of its input, with its input."""
    config = dataclasses.replace(CONFIG, dtype=dtype)
    layer = swa.SlidingWindowAttention(config, implementation=implementation)
    meta = prefill_metadata(0)
    if call == "decode":
        meta = swa.DecodeMetadata.build(CONFIG.geometry, [0], [[0, 1, 2, 3]])
    rows, params = cache_of(1).layer(0), layer_params(config)
    return lambda x: layer.apply(params, x, rows, meta)


@pytest.mark.parametrize("implementation", ["triton", "interpret"])
@pytest.mark.parametrize(
    ("call", "operation"), [("prefill", "prefill_attention"), ("decode", "verify_attention")]
)
def test_a_layer_does_not_replace_a_kernel_that_cannot_do_it(call, operation, implementation):
    message = f"{operation}: implementation '{implementation}' multiplies bfloat16 queries only"
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(call_of_layer(call, "float32", implementation), X)


@pytest.mark.parametrize("call", ["prefill", "decode"])
def test_a_layer_does_not_replace_a_kernel_that_cannot_run_on_a_cpu(call):
    of_layer = call_of_layer(call, "bfloat16", "triton")
    assert jax.eval_shape(of_layer, X)[0].dtype == jnp.bfloat16
    message = "'triton' runs on NVIDIA GPUs only; .*'interpret'"
    on_cpu = jax.default_device(jax.devices("cpu")[0])
    with on_cpu, pytest.raises(NotImplementedError, match=message):
        jax.jit(of_layer)(X)


def test_a_scale_is_one_number():
    rows = KVRows.create(1, 3, CONFIG.fmt)
    q = jnp.zeros((1, 2, 64), jnp.float32)
    with pytest.raises(ValueError, match=r"scale: expected shape \(\), got \(2,\)"):
        indexed_attention(q, rows, [[0]], scale=jnp.ones(2))


@pytest.mark.parametrize(
    ("prompts", "message"),
    [(b"abc", "expected a list of prompts, got bytes"), (["abc"], "token ids or bytes, got text")],
)
def test_text_is_not_taken_for_tokens(prompts, message):
    model, params = swa.Decoder(DECODER), decoder_params(DECODER)
    with pytest.raises(ValueError, match=message):
        swa.generate(model, params, prompts, max_new_tokens=1)


def test_tokens_given_up_by_rollback_may_be_chosen_again():
    cache, ids = cache_of(1), jnp.zeros(1, jnp.int32)
    state = decoding.DecodeState(
        cache=cache,
        state_ids=ids,
        positions=ids + 9,
        tokens=ids,
        remaining=ids + 2,
        oldest=ids,
        highest=ids + 8,
        stop_tokens=ids[:, None] - 1,
        sampling=swa.Sampling.build(1),
    )
    assert decoding.rollback(state, [6], [1]).remaining.tolist() == [5]
    finished = dataclasses.replace(state, remaining=ids)
    assert decoding.rollback(finished, [6], [1]).remaining.tolist() == [3]
