"""The Flax modules: call forms, parameters, lifted transformations, training and configurations."""

import dataclasses
import functools
import json

import chex
import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from small_models import (
    activations,
    attention_config,
    decoder_config,
    decoder_params,
    largest_error,
    layer_params,
    quick_jit,
)

import swa_jax as swa
from pallas_kernels import dequantize_rows, quantize_rows, transforms
from swa_jax.config import AxisNames
from swa_jax.modules import check_model

pytestmark = pytest.mark.quick_compilation

CONFIG = attention_config(3, swa.V41)
EXACT = attention_config(3, swa.F32)
LAYER = swa.SlidingWindowAttention(CONFIG)
TOKENS = 9

apply_layer = quick_jit(LAYER.apply)
apply_exact = quick_jit(swa.SlidingWindowAttention(EXACT).apply)


def stacked(params):
    """A decoder's parameters with its layers stacked, as a scanned decoder has them."""
    tree = dict(params["params"])
    layers = [tree.pop(f"layers_{i}") for i in range(sum(name[:7] == "layers_" for name in tree))]
    return {"params": {**tree, "layers": {"layer": jax.tree.map(lambda *x: np.stack(x), *layers)}}}


# --- call forms


def test_the_metadata_says_which_call_it_is():
    params, geometry = layer_params(CONFIG), CONFIG.geometry
    x = jnp.asarray(activations(CONFIG, 1, TOKENS))
    rows = swa.RingCache.create(2, 1, geometry, CONFIG.fmt).layer(0)
    whole = apply_layer(params, x)
    assert (whole.shape, whole.dtype) == ((1, TOKENS, 32), jnp.float32)
    sequence = swa.SequenceMetadata.build(1, TOKENS)
    np.testing.assert_array_equal(apply_layer(params, x, meta=sequence), whole)
    prefill = swa.PrefillMetadata.build(geometry, [1], [0], [TOKENS], max_tokens=TOKENS)
    y, stored = apply_layer(params, x, rows, prefill)
    assert largest_error(y, whole) <= 3e-2
    decode = swa.DecodeMetadata.build(geometry, [1], [range(2, TOKENS)])
    y, again = apply_layer(params, x[:, 2:], stored, decode)
    assert largest_error(y, whole[:, 2:]) <= 3e-2
    assert type(again) is type(rows)
    assert not np.any(rows.data)  # values: what was given is as it was


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"meta": "decode"}, "meta: expected none without a cache, got DecodeMetadata"),
        ({"rows": True}, "meta: expected metadata with rows, got None"),
        ({"rows": True, "meta": "sequence"}, "rows: expected None in a call without a cache"),
        ({"rows": True, "meta": "decode", "positions": True}, "positions, segment_ids: expected"),
        ({"rows": True, "meta": "wide"}, r"x: expected shape \(1, 5, 32\), got \(1, 2, 32\)"),
        (
            {"rows": True, "meta": "other"},
            r"meta: expected a geometry of window, capacity \(3, 9\)",
        ),
        ({"rows": "other", "meta": "decode"}, "rows: expected format V41 of 64 values, got F32"),
        ({"segment_ids": True}, r"segment_ids: expected shape \(1, 2\)"),
    ],
)
def test_what_does_not_belong_to_a_call_is_refused(arguments, message):
    geometry = CONFIG.geometry
    metadata = {
        "decode": lambda: swa.DecodeMetadata.build(geometry, [0], [[0, 1]]),
        "wide": lambda: swa.DecodeMetadata.build(geometry, [0], [[0, 1, 2, 3, 4]]),
        "other": lambda: swa.DecodeMetadata.build(swa.RingGeometry(3, 8), [0], [[0, 1]]),
        "sequence": lambda: swa.SequenceMetadata.build(1, 2),
    }
    arguments = dict(arguments)
    if "meta" in arguments:
        arguments["meta"] = metadata[arguments["meta"]]()
    if "rows" in arguments:
        fmt = (swa.F32 if arguments["rows"] == "other" else swa.V41).with_width(64)
        arguments["rows"] = swa.RingCache.create(1, 1, geometry, fmt).layer(0)
    for name in ("positions", "segment_ids"):
        if name in arguments:
            arguments[name] = jnp.zeros((1, 3), jnp.int32)
    with pytest.raises(ValueError, match=message):
        LAYER.apply(layer_params(CONFIG), jnp.zeros((1, 2, 32)), **arguments)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: swa.Decoder(CONFIG), "config: expected a DecoderConfig, got AttentionConfig"),
        (lambda: swa.Decoder(None), "config: expected a DecoderConfig, got NoneType"),
        (
            lambda: swa.Decoder(swa.DecoderConfig),
            "config: expected a DecoderConfig, got the class DecoderConfig",
        ),
        (
            lambda: swa.SlidingWindowAttention(decoder_config(CONFIG)),
            "config: expected an AttentionConfig, got DecoderConfig",
        ),
        (
            lambda: swa.DecoderLayer(decoder_config(CONFIG), 48),
            "config: expected an AttentionConfig, got DecoderConfig",
        ),
    ],
)
def test_a_configuration_of_another_kind_is_refused_where_a_module_is_made(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_what_is_no_array_and_no_sequence_is_refused_by_its_name():
    config = decoder_config(CONFIG, 1)
    params, tokens = decoder_params(config), jnp.zeros((1, 2), jnp.int32)
    with pytest.raises(ValueError, match="extra_hooks: expected a Sequence, got int"):
        swa.Decoder(config, extra_hooks=3).apply(params, tokens)
    with pytest.raises(ValueError, match="hidden: expected a floating dtype .*, got list"):
        swa.Decoder(config).apply(params, [1.0], method="logits")
    with pytest.raises(ValueError, match="x: expected a floating dtype .*, got list"):
        LAYER.apply(layer_params(CONFIG), [[[1.0]]])


def test_a_decoder_of_ones_own_is_a_decoder():
    class OwnConfig(swa.DecoderConfig):
        pass

    class OwnDecoder(swa.Decoder):
        size: int = 3

    config = OwnConfig(50, 1, CONFIG, mlp_size=48)
    for kind in (OwnDecoder, nn.remat(OwnDecoder)):
        check_model(kind(config).clone(size=4), flax.core.freeze({"params": {}}))


def test_a_decoder_refuses_the_cache_of_another():
    config = decoder_config(CONFIG, 2)
    model, params = swa.Decoder(config), decoder_params(config)
    tokens = jnp.zeros((1, 1), jnp.int32)
    meta = swa.DecodeMetadata.build(config.geometry, [0], [[0]])
    for cache, message in [
        (swa.RingCache.create(1, 3, config.geometry, config.fmt), "expected layers 2, got 3"),
        (swa.RingCache.create(1, 2, swa.RingGeometry(3, 8), config.fmt), "expected geometry"),
        (swa.RingCache.create(1, 2, config.geometry, swa.F32.with_width(64)), "expected fmt"),
    ]:
        with pytest.raises(ValueError, match=f"cache: {message}"):
            model.apply(params, tokens, cache, meta)


# --- parameters


def test_parameters_have_the_names_shapes_and_dtypes_of_the_design():
    config = dataclasses.replace(CONFIG, param_dtype="bfloat16")
    layer = swa.SlidingWindowAttention(config)
    variables = jax.eval_shape(layer.init, jax.random.key(0), jnp.zeros((1, 2, 32)))
    found = {k: (v.shape, v.dtype.name) for k, v in nn.meta.unbox(variables)["params"].items()}
    assert found == {
        "q_a_kv": ((16 + 64, 32), "bfloat16"),
        "q_a_norm": ((16,), "float32"),
        "q_b": ((2 * 64, 16), "bfloat16"),
        "kv_norm": ((64,), "float32"),
        "sinks": ((2,), "float32"),
        "o_a": ((2 * 8, 64), "bfloat16"),
        "o_b": ((32, 2 * 8), "bfloat16"),
    }


def test_every_parameter_names_its_axes_and_the_names_can_be_changed():
    names = AxisNames(embed="model", heads="head", query_rank="rank", kv="row", output_rank="out")
    for axis_names, expected in [
        (AxisNames(), ("embed", "heads", "query_rank", "kv", "output_rank")),
        (names, ("model", "head", "rank", "row", "out")),
    ]:
        embed, heads, rank, kv, out = expected
        layer = swa.SlidingWindowAttention(dataclasses.replace(CONFIG, axis_names=axis_names))
        variables = jax.eval_shape(layer.init, jax.random.key(0), jnp.zeros((1, 2, 32)))
        assert nn.get_partition_spec(variables)["params"] == {
            "q_a_kv": PartitionSpec(rank, embed),
            "q_a_norm": PartitionSpec(rank),
            "q_b": PartitionSpec(heads, rank),
            "kv_norm": PartitionSpec(kv),
            "sinks": PartitionSpec(heads),
            "o_a": PartitionSpec(out, heads),
            "o_b": PartitionSpec(embed, out),
        }


@pytest.mark.parametrize("scan_layers", [False, True])
def test_a_decoder_names_the_axes_of_all_parameters(scan_layers):
    attention = dataclasses.replace(CONFIG, axis_names=AxisNames(layers="depth", vocab="words"))
    model = swa.Decoder(decoder_config(attention, 2, scan_layers=scan_layers))
    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    specs = nn.get_partition_spec(variables)["params"]
    assert specs["embedding"] == specs["head"] == PartitionSpec("words", "embed")
    assert specs["norm"]["weight"] == PartitionSpec("embed")
    layer = specs["layers"]["layer"] if scan_layers else specs["layers_1"]
    depth = ("depth",) if scan_layers else ()
    assert layer["attention"]["q_b"] == PartitionSpec(*depth, "heads", "query_rank")
    assert layer["mlp"]["gate"] == PartitionSpec(*depth, "mlp", "embed")
    assert layer["mlp"]["up"] == PartitionSpec(*depth, "mlp", "embed")
    assert layer["mlp"]["down"] == PartitionSpec(*depth, "embed", "mlp")
    assert layer["mlp_norm"]["weight"] == PartitionSpec(*depth, "embed")


def test_kernels_are_initialised_for_their_last_axis_as_input():
    config = attention_config(
        3, swa.V41, hidden_size=400, num_heads=8, q_lora_rank=25, o_groups=2, o_lora_rank=50
    )
    layer = swa.SlidingWindowAttention(config)
    variables = quick_jit(layer.init)(jax.random.key(0), jnp.zeros((1, 1, 400)))
    params = nn.meta.unbox(variables)["params"]
    # 1 / sqrt(in) for [89, 400], [512, 25], [100, 256] and [400, 100]
    for name, std in [("q_a_kv", 1 / 20), ("q_b", 1 / 5), ("o_a", 1 / 16), ("o_b", 1 / 10)]:
        np.testing.assert_allclose(np.std(params[name]), std, rtol=0.03)
        np.testing.assert_allclose(np.mean(params[name]), 0, atol=std / 20)
    chex.assert_trees_all_equal(params["q_a_norm"], jnp.ones(25))
    chex.assert_trees_all_equal(params["kv_norm"], jnp.ones(64))
    chex.assert_trees_all_equal(params["sinks"], jnp.zeros(8))


# --- lifted transformations


@pytest.mark.parametrize("lift", [nn.remat, nn.jit])
def test_a_lifted_layer_has_the_same_values_and_gradients(lift):
    params, x = layer_params(EXACT), jnp.asarray(activations(EXACT, 1, 4))

    def loss(module):
        layer = module(EXACT)
        return quick_jit(jax.value_and_grad(lambda params: jnp.sum(layer.apply(params, x) ** 2)))

    want = loss(swa.SlidingWindowAttention)(params)
    got = loss(lift(swa.SlidingWindowAttention))(params)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert largest_error(one, other) <= 1e-5


@functools.cache
def decoder_calls(scan_layers: bool):
    config = decoder_config(EXACT, 2, scan_layers=scan_layers)
    model = swa.Decoder(config)

    @quick_jit
    def loss_and_gradient(params, tokens):
        def loss(params):
            hidden = model.apply(params, tokens)
            scores = model.apply(params, hidden, method="logits")
            return jnp.mean(scores**2)

        return jax.value_and_grad(loss)(params)

    @quick_jit
    def decode(params, tokens, cache, positions):
        meta = swa.DecodeMetadata.build(config.geometry, np.int32([2, 0]), positions)
        return model.apply(params, tokens, cache, meta)

    return config, loss_and_gradient, decode


@pytest.mark.slow
def test_scanned_layers_are_the_unrolled_ones_and_so_are_their_gradients():
    tokens = np.random.default_rng(0).integers(0, 50, (2, TOKENS), dtype=np.int32)
    config, unrolled, _ = decoder_calls(False)
    _, scanned, _ = decoder_calls(True)
    params = decoder_params(config)
    loss, gradient = unrolled(params, tokens)
    scanned_loss, scanned_gradient = scanned(stacked(params), tokens)
    np.testing.assert_allclose(scanned_loss, loss, rtol=1e-6)
    want = stacked(jax.tree.map(np.asarray, gradient))
    for got, expected in zip(jax.tree.leaves(scanned_gradient), jax.tree.leaves(want), strict=True):
        assert largest_error(got, expected) <= 1e-5


def test_scanned_layers_keep_the_same_cache():
    config, _, unrolled = decoder_calls(False)
    _, _, scanned = decoder_calls(True)
    params = decoder_params(config)
    caches = [swa.RingCache.create(3, 2, config.geometry, config.fmt) for _ in range(2)]
    for position in range(0, 14, 2):  # the ring has 9 rows
        tokens = np.random.default_rng(position).integers(0, 50, (2, 2), dtype=np.int32)
        positions = np.tile(np.int32([position, position + 1]), (2, 1))
        hidden, caches[0] = unrolled(params, tokens, caches[0], positions)
        scanned_hidden, caches[1] = scanned(stacked(params), tokens, caches[1], positions)
        assert largest_error(scanned_hidden, hidden) <= 3e-5
    rows = [np.asarray(cache.blocks[0]).view(np.float32) for cache in caches]
    assert largest_error(rows[1], rows[0]) <= 3e-5


# --- packing, gradients, training


@pytest.mark.slow
def test_packed_sequences_are_the_separate_ones_and_so_are_their_gradients():
    x = activations(EXACT, 1, 13)
    weights = activations(EXACT, 1, 13, seed=1)
    layer = swa.SlidingWindowAttention(EXACT)
    parts = [slice(0, 5), slice(5, 12)]  # and one token of padding
    segments = jnp.asarray([[0] * 5 + [1] * 7 + [-1]], jnp.int32)
    positions = jnp.asarray([[*range(5), *range(7), 0]], jnp.int32)

    def packed(params):
        y = layer.apply(params, jnp.asarray(x), positions=positions, segment_ids=segments)
        return jnp.sum(y * weights), y

    def separate(params):
        y = [layer.apply(params, jnp.asarray(x[:, part])) for part in parts]
        y = jnp.concatenate([*y, jnp.zeros((1, 1, 32))], axis=1)
        return jnp.sum(y * weights), y

    params = layer_params(EXACT)
    (_, got), gradient = quick_jit(jax.value_and_grad(packed, has_aux=True))(params)
    (_, want), expected = quick_jit(jax.value_and_grad(separate, has_aux=True))(params)
    assert largest_error(got, want) <= 1e-6
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        assert largest_error(one, other) <= 1e-5


def dense_layer(params, x, config):
    """The layer over all pairs of one sequence, whose rows are rounded in the values alone."""
    p, tokens = params["params"], x.shape[0]
    projected = x @ p["q_a_kv"].T
    low, latent = projected[:, : config.q_lora_rank], projected[:, config.q_lora_rank :]

    def norm(x, weight):
        inverse = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + config.norm_eps)
        return x * inverse * weight[None]

    angle = np.arange(tokens)[:, None] * 10000.0 ** (-np.arange(0, 16, 2) / 16)
    cos, sin = (jnp.asarray(f(angle).astype(np.float32)) for f in (np.cos, np.sin))
    row = transforms.rope(norm(latent, p["kv_norm"]), cos, sin)
    rounded = dequantize_rows(quantize_rows(row, config.fmt), config.fmt)
    row = row + jax.lax.stop_gradient(rounded - row)
    query = (norm(low, p["q_a_norm"]) @ p["q_b"].T).reshape(tokens, config.num_heads, -1)
    query = transforms.rope(query, cos[:, None], sin[:, None])
    scores = jnp.einsum("thd,sd->hts", query, row) * config.head_dim**-0.5
    distance = np.arange(tokens)[:, None] - np.arange(tokens)
    visible = (distance >= 0) & (distance < config.window)
    scores = jnp.where(visible[None], scores, -jnp.inf)
    sink = jnp.broadcast_to(p["sinks"][:, None, None], (config.num_heads, tokens, 1))
    share = jax.nn.softmax(jnp.concatenate([scores, sink], axis=-1), axis=-1)[..., :-1]
    out = jnp.einsum("hts,sd->thd", share, row)
    out = transforms.rope(out, cos[:, None], sin[:, None], inverse=True)
    groups = out.reshape(tokens, config.o_groups, -1)
    o_a = p["o_a"].reshape(config.o_groups, config.o_lora_rank, -1)
    return jnp.einsum("tgd,grd->tgr", groups, o_a).reshape(tokens, -1) @ p["o_b"].T


def test_gradients_pass_straight_through_the_rounding_of_rows():
    params = layer_params(CONFIG)
    x = jnp.asarray(activations(CONFIG, TOKENS))
    weights = jnp.asarray(activations(CONFIG, TOKENS, seed=1))

    def ours(params, x):
        return jnp.sum(LAYER.apply(params, x[None])[0] * weights)

    def dense(params, x):
        return jnp.sum(dense_layer(params, x, CONFIG) * weights)

    got = quick_jit(jax.value_and_grad(ours, argnums=(0, 1)))(params, x)
    want = quick_jit(jax.value_and_grad(dense, argnums=(0, 1)))(params, x)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert largest_error(one, other) <= 1e-5


def test_without_the_round_trip_rows_are_as_computed():
    params = layer_params(CONFIG)
    x = jnp.asarray(activations(CONFIG, 1, TOKENS))
    plain = quick_jit(swa.SlidingWindowAttention(CONFIG, round_trip=False).apply)(params, x)
    exact = apply_exact(params, x)
    assert largest_error(plain, exact) <= 1e-6
    assert largest_error(apply_layer(params, x), exact) > 1e-3


@pytest.mark.slow
def test_a_decoder_in_bfloat16_learns():
    attention = dataclasses.replace(CONFIG, dtype="bfloat16", param_dtype="bfloat16")
    model = swa.Decoder(decoder_config(attention, 1))
    tokens = np.random.default_rng(0).integers(0, 50, (4, 17), dtype=np.int32)
    params = nn.meta.unbox(quick_jit(model.init)(jax.random.key(0), tokens[:, :1]))
    optimizer = optax.adam(1e-2)

    @quick_jit
    def step(params, state):
        def loss(params):
            hidden = model.apply(params, tokens[:, :-1])
            scores = model.apply(params, hidden, method="logits")
            losses = optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:])
            return jnp.mean(losses)

        value, gradient = jax.value_and_grad(loss)(params)
        with jax.numpy_dtype_promotion("standard"):  # optax relies on it
            updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses = optimizer.init(params), []
    for _ in range(10):
        params, state, value = step(params, state)
        losses.append(float(value))
    assert losses[-1] < 0.7 * losses[0]
    assert params["params"]["head"].dtype == jnp.bfloat16


# --- tokens and scores


def test_a_token_outside_the_vocabulary_counts_as_the_nearest_one():
    config = decoder_config(EXACT, 1)
    model, params = swa.Decoder(config), decoder_params(config)
    apply = quick_jit(model.apply)
    got = apply(params, np.int32([[-5, 3, 50, 2**31 - 1]]))
    want = apply(params, np.int32([[0, 3, 49, 49]]))
    chex.assert_trees_all_equal(got, want)
    with pytest.raises(ValueError, match="tokens: expected integers, got dtype float32"):
        model.apply(params, jnp.zeros((1, 2), jnp.float32))


@pytest.mark.parametrize("shape", [(), (3,), (2, 4)])
def test_scores_are_float32_products_with_the_head(shape):
    attention = dataclasses.replace(CONFIG, dtype="bfloat16", param_dtype="bfloat16")
    config = decoder_config(attention, 1)
    params = decoder_params(config)
    hidden = jnp.asarray(activations(attention, *shape)).astype(jnp.bfloat16)
    scores = swa.Decoder(config).apply(params, hidden, method="logits")
    assert (scores.shape, scores.dtype) == ((*shape, 50), jnp.float32)
    exact = np.asarray(hidden, np.float64) @ np.asarray(params["params"]["head"], np.float64).T
    assert largest_error(scores, exact) <= 1e-6


# --- configurations


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        dataclasses.replace(
            CONFIG,
            fmt=swa.V4.with_width(128),
            head_dim=128,
            hadamard=True,
            axis_names=AxisNames(heads="tensor"),
        ),
        decoder_config(CONFIG, 2, scan_layers=True),
        swa.DecoderConfig(50, 2, (CONFIG, dataclasses.replace(CONFIG, num_heads=4)), 48),
    ],
    ids=["layer", "layer with options", "decoder", "decoder with two kinds of layer"],
)
def test_a_configuration_survives_json_and_is_a_key(config):
    again = type(config).from_json(config.to_json())
    assert again == config
    assert hash(again) == hash(config)
    assert again is not config
    assert json.loads(config.to_json())


def test_equal_configurations_share_a_compilation():
    traces = []

    @functools.partial(jax.jit, static_argnames="config")
    def call(config):
        traces.append(config)
        return jnp.zeros(config.geometry.capacity)

    call(CONFIG)
    call(swa.AttentionConfig.from_json(CONFIG.to_json()))
    call(attention_config(3, swa.V41))
    assert traces == [CONFIG]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head_dim": 32}, r"fmt: expected rows of head_dim 32 values.*with_width\(32\)"),
        ({"rope_dim": 15}, "rope_dim: expected an even number of at most head_dim 64, got 15"),
        ({"rope_dim": 66}, "rope_dim: expected an even number of at most head_dim 64, got 66"),
        ({"o_groups": 3}, "o_groups: expected a divisor of num_heads 2, got 3"),
        ({"num_heads": 0}, "num_heads: expected an integer of 1 or more, got 0"),
        ({"window": True}, "window: expected an integer of 1 or more, got True"),
        ({"window": 2.0}, "window: expected an integer of 1 or more, got 2.0"),
        ({"draft_tokens": -1}, "draft_tokens: expected an integer of 0 or more, got -1"),
        ({"rope_theta": 0.0}, "rope_theta: expected a finite number above 0, got 0.0"),
        ({"norm_eps": "small"}, "norm_eps: expected a finite number above 0"),
        ({"norm_eps": float("nan")}, "norm_eps: expected a finite number above 0, got nan"),
        ({"hadamard": 1}, "hadamard: expected True or False, got 1"),
        (
            {"hadamard": True, "head_dim": 96, "fmt": swa.V41.with_width(96)},
            "hadamard: expected a head_dim that is a power of two, got 96",
        ),
        ({"pairing": "pairs"}, "pairing: expected one of 'interleaved', 'half_split', got 'pairs'"),
        ({"scale_floor": "max"}, "scale_floor: expected one of 'amax', 'scale', got 'max'"),
        ({"fmt": "V41"}, "^fmt: expected a KVCacheFormat, got str"),
        ({"extra_fmt": "V41"}, "^extra_fmt: expected a KVCacheFormat, got str"),
        ({"dtype": "float16"}, "dtype: expected one of 'float32', 'bfloat16', got 'float16'"),
        ({"param_dtype": "int8"}, "param_dtype: expected one of"),
    ],
)
def test_a_layer_configuration_that_cannot_be_is_refused_with_the_reason(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention": (CONFIG,)}, "attention: expected 3 configurations, got 1"),
        ({"attention": "V41"}, "attention: expected an AttentionConfig or one per layer"),
        ({"vocab_size": 0}, "vocab_size: expected an integer of 1 or more, got 0"),
        (
            {"attention": (CONFIG, CONFIG, dataclasses.replace(CONFIG, window=4))},
            "attention: expected the same geometry in every layer, got .* in layer 2",
        ),
        ({"attention": (CONFIG, EXACT, CONFIG)}, "expected the same fmt in every layer"),
        (
            {"attention": (CONFIG, CONFIG, dataclasses.replace(CONFIG, hidden_size=64))},
            "expected the same hidden_size in every layer, got 32 in layer 0 and 64 in layer 2",
        ),
        (
            {
                "attention": (CONFIG, CONFIG, dataclasses.replace(CONFIG, query_norm=True)),
                "scan_layers": True,
            },
            "scan_layers: expected equal layers",
        ),
    ],
)
def test_a_decoder_configuration_that_cannot_be_is_refused_with_the_reason(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(decoder_config(CONFIG), **fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "AttentionConfig: expected JSON text"),
        ("[]", "AttentionConfig: expected a JSON object, got list"),
        ("{}", r"missing fields \['hidden_size', 'num_heads'\]"),
        ('{"hidden_size": 8, "num_heads": 8, "heads": 2}', r"unknown fields \['heads'\]"),
        ('{"hidden_size": 8, "num_heads": 8, "fmt": {"nam": 1}}', "KVCacheFormat: unknown fields"),
        ('{"hidden_size": 8, "num_heads": 8, "fmt": "V41"}', "KVCacheFormat: expected an object"),
        ('{"hidden_size": 8, "num_heads": "8"}', "num_heads: expected an integer"),
    ],
)
def test_text_that_is_no_configuration_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        swa.AttentionConfig.from_json(text)
