"""Mixtures of experts: the maths, the choice, what others in the batch may not change, decoders."""

import dataclasses
import functools
import json

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from small_models import (
    activations,
    attention_config,
    decoder_params,
    largest_error,
    quick_jit,
    random_params,
)

import swa_jax as swa
from swa_jax import checkpoint
from swa_jax.config import AxisNames, ExpertsConfig
from swa_jax.experts import Experts, choose_experts
from swa_jax.hf_config import read_config, write_config
from swa_jax.recompute import ring_logits, whole_sequence_logits

pytestmark = pytest.mark.quick_compilation

ATTENTION = attention_config(3, swa.F32)
HIDDEN = ATTENTION.hidden_size
V41_LIKE = ExpertsConfig(8, 3, 24, shared_size=16, routed_scale=1.5)
ROUTED_ONLY = dataclasses.replace(V41_LIKE, shared_size=0)
ONE = ExpertsConfig(8, 1, 24, scoring="sigmoid")


choose = quick_jit(choose_experts, static_argnums=3)


@functools.cache
def apply(config: ExpertsConfig):
    return quick_jit(Experts(ATTENTION, config).apply)


@functools.cache
def experts_params(config: ExpertsConfig) -> dict:
    shapes = jax.eval_shape(
        Experts(ATTENTION, config).init, jax.random.key(0), jnp.zeros((1, HIDDEN))
    )
    return random_params(nn.meta.unbox(shapes), 0)


@quick_jit
def routed_gradients(params, x, weights, valid):
    """Of the output's products with `weights`."""

    def loss(params, x):
        return jnp.sum(Experts(ATTENTION, ROUTED_ONLY).apply(params, x, valid) * weights)

    return jax.grad(loss, argnums=(0, 1))(params, x)


def with_values(params, **leaves):
    return {"params": {**params["params"], **leaves}}


def changed(params, name, index, value):
    return with_values(params, **{name: params["params"][name].at[index].set(value)})


def float64_silu_product(x, gate, up, down):
    gated = x @ gate.T
    return (gated / (1 + np.exp(-gated)) * (x @ up.T)) @ down.T


def float64_scores(x, params, scoring):
    logits = x @ params["router"].T
    if scoring == "softmax":
        return np.exp(logits) / np.sum(np.exp(logits))
    return 1 / (1 + np.exp(-logits)) if scoring == "sigmoid" else np.sqrt(np.log1p(np.exp(logits)))


def float64_experts(params, x, config):
    """One token and one expert after the other."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params["params"])
    out = []
    for token in np.asarray(x, np.float64).reshape(-1, HIDDEN):
        scores = float64_scores(token, p, config.scoring)
        ranked = sorted(range(len(scores)), key=lambda e: (-scores[e] - p["router_bias"][e], e))
        chosen = ranked[: config.top_k]
        total = sum(scores[e] for e in chosen) if config.normalise_weights else 1.0
        y = np.zeros(HIDDEN)
        for e in chosen:
            weight = scores[e] / total * config.routed_scale
            y += weight * float64_silu_product(token, p["gate"][e], p["up"][e], p["down"][e])
        if config.shared_size:
            y += float64_silu_product(token, *(p["shared"][k] for k in ("gate", "up", "down")))
        out.append(y)
    return np.reshape(out, x.shape)


# --- the maths


@pytest.mark.parametrize(
    "config",
    [
        V41_LIKE,
        dataclasses.replace(V41_LIKE, scoring="sigmoid", normalise_weights=False),
        dataclasses.replace(ROUTED_ONLY, scoring="softmax"),
        ONE,
    ],
    ids=["V4.1's", "sigmoid", "softmax", "one expert"],
)
def test_the_output_is_the_float64_sum_over_the_chosen(config):
    params = experts_params(config)
    x = activations(ATTENTION, 3, 25)
    got = apply(config)(params, jnp.asarray(x))
    assert got.dtype == jnp.float32
    assert largest_error(got, float64_experts(params, x, config)) <= 2e-6


def test_all_experts_are_the_dense_sum_by_weight():
    config = dataclasses.replace(
        ROUTED_ONLY, scoring="softmax", normalise_weights=False, top_k=8, routed_scale=1.0
    )
    params, x = experts_params(config), activations(ATTENTION, 3, 25)
    p = {name: np.asarray(leaf, np.float64) for name, leaf in params["params"].items()}
    share = np.exp(x @ p["router"].T)
    share /= share.sum(axis=-1, keepdims=True)
    gated = np.einsum("bth,eih->btei", x, p["gate"])
    inner = gated / (1 + np.exp(-gated)) * np.einsum("bth,eih->btei", x, p["up"])
    want = np.einsum("bte,bteh->bth", share, np.einsum("btei,ehi->bteh", inner, p["down"]))
    assert largest_error(apply(config)(params, jnp.asarray(x)), want) <= 2e-6


def test_products_with_the_router_and_weights_are_float32_whatever_the_layer_computes_in():
    x = jnp.asarray(activations(ATTENTION, 40)).astype(jnp.bfloat16)
    leaves = experts_params(V41_LIKE)["params"]
    chosen, weights = choose(x, leaves["router"], leaves["router_bias"], V41_LIKE)
    p = {name: np.asarray(leaves[name], np.float64) for name in ("router", "router_bias")}
    scores = np.stack([float64_scores(row, p, "sqrt_softplus") for row in np.float64(x)])
    want = np.take_along_axis(scores, np.asarray(chosen), axis=1)
    want *= 1.5 / want.sum(axis=1, keepdims=True)
    assert weights.dtype == jnp.float32
    assert largest_error(weights, want) <= 1e-6  # bfloat16 products: 4e-3
    y = apply(V41_LIKE)({"params": leaves}, x)
    assert y.dtype == jnp.bfloat16
    assert largest_error(y, float64_experts({"params": leaves}, np.float32(x), V41_LIKE)) <= 2e-2


# --- the choice

# Products with the router are 0, 1, 2 and 3: sigmoids 0.5, 0.7310586, 0.8807971, 0.9525741.
ROUTER = np.float32([[0.0], [1.0], [2.0], [3.0]])
ONE_TOKEN = np.ones((1, 1), np.float32)
TWO_OF_FOUR = ExpertsConfig(4, 2, 8, scoring="sigmoid", normalise_weights=False)


@pytest.mark.parametrize(
    ("bias", "chosen", "weights"),
    [
        ([0.0, 0.0, 0.0, 0.0], [3, 2], [0.9525741, 0.8807971]),
        ([9.0, 0.0, 0.0, 0.0], [0, 3], [0.5, 0.9525741]),
        ([0.0, 0.25, 0.0, -9.0], [1, 2], [0.7310586, 0.8807971]),
    ],
)
def test_the_bias_changes_the_choice_but_not_the_weights(bias, chosen, weights):
    got = choose(ONE_TOKEN, ROUTER, np.float32(bias), TWO_OF_FOUR)
    np.testing.assert_array_equal(got[0], [chosen])
    np.testing.assert_allclose(got[1], [weights], rtol=1e-6)


def test_of_equal_scores_the_lower_index_is_chosen_first():
    router = np.float32([[1.0], [2.0], [1.0], [2.0], [2.0]])
    config = dataclasses.replace(TWO_OF_FOUR, num_experts=5)
    for top_k, want in [(2, [1, 3]), (4, [1, 3, 4, 0])]:
        config = dataclasses.replace(config, top_k=top_k)
        chosen, _ = choose(ONE_TOKEN, router, np.zeros(5, np.float32), config)
        np.testing.assert_array_equal(chosen, [want])


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrt_softplus"])
def test_scores_that_vanish_give_finite_weights_and_gradients(scoring):
    config = dataclasses.replace(TWO_OF_FOUR, scoring=scoring, normalise_weights=True)

    @quick_jit
    @jax.value_and_grad
    def total(router):
        bias = jnp.zeros(4, jnp.float32)
        return jnp.sum(choose_experts(jnp.asarray(ONE_TOKEN), router, bias, config)[1])

    for score in (-300, 300):
        value, gradient = total(np.full((4, 1), score, np.float32))
        assert np.isfinite(value)
        chex.assert_tree_all_finite(gradient)


# --- others in the batch


def test_every_token_is_served_when_all_choose_the_same_expert():
    params = changed(experts_params(ONE), "router_bias", 5, 100.0)
    x = activations(ATTENTION, 3, 25)  # 75 rows of one expert: several blocks
    p = params["params"]
    kernels = [np.asarray(p[name][5], np.float64) for name in ("gate", "up", "down")]
    want = float64_silu_product(x.astype(np.float64), *kernels)  # one weight, so it is 1
    assert largest_error(apply(ONE)(params, jnp.asarray(x)), want) <= 2e-6


@pytest.mark.makes_nan
def test_an_expert_that_nobody_chose_reaches_no_one_even_if_it_is_nan():
    params = changed(experts_params(ROUTED_ONLY), "router_bias", 2, -100.0)
    poisoned = params
    for name in ("gate", "up", "down"):
        poisoned = changed(poisoned, name, 2, np.nan)
    x = jnp.asarray(activations(ATTENTION, 3, 25))

    weights = jnp.asarray(activations(ATTENTION, 3, 25, seed=1))
    everywhere = jnp.ones((3, 25), bool)
    y = apply(ROUTED_ONLY)(poisoned, x)
    chex.assert_trees_all_equal(y, apply(ROUTED_ONLY)(params, x))
    got = routed_gradients(poisoned, x, weights, everywhere)
    chex.assert_trees_all_equal(got, routed_gradients(params, x, weights, everywhere))
    chex.assert_tree_all_finite((y, got))
    gradient = got[0]
    assert not np.any(gradient["params"]["gate"][2])


def test_a_token_has_the_same_bits_whatever_else_is_in_a_batch_of_the_same_shape():
    params, rng = experts_params(V41_LIKE), np.random.default_rng(0)
    run = jax.jit(Experts(ATTENTION, V41_LIKE).apply)
    x = activations(ATTENTION, 40)
    alone = np.asarray(run(params, jnp.asarray(x)))
    for _ in range(5):
        others = activations(ATTENTION, 40, seed=int(rng.integers(1, 99)))
        others[7] = np.nan  # and a NaN stays with its own token
        places = rng.permutation(np.delete(np.arange(40), 7))[:20]
        others[places] = x[:20]
        np.testing.assert_array_equal(run(params, jnp.asarray(others))[places], alone[:20])


def test_batches_of_other_shapes_differ_by_rounding():
    params, x = experts_params(V41_LIKE), activations(ATTENTION, 3, 25)
    whole = np.asarray(apply(V41_LIKE)(params, jnp.asarray(x)))
    for part in [(slice(1), slice(1)), (slice(None), slice(7, 8))]:
        got = np.asarray(apply(V41_LIKE)(params, jnp.asarray(x[part])))
        assert np.max(np.abs(got - whole[part])) <= 1e-6 * np.max(np.abs(whole))


def test_padding_is_left_out_and_changes_nothing_of_others():
    params, x = experts_params(ROUTED_ONLY), activations(ATTENTION, 3, 25)
    valid = np.random.default_rng(0).random((3, 25)) < 0.6
    poisoned = np.where(valid[..., None], x, np.float32(np.nan))
    whole = apply(ROUTED_ONLY)(params, jnp.asarray(x))
    for given in (x, poisoned):
        got = np.asarray(apply(ROUTED_ONLY)(params, jnp.asarray(given), jnp.asarray(valid)))
        np.testing.assert_array_equal(got[valid], np.asarray(whole)[valid])
        assert not np.any(got[~valid])
    nobody = apply(ROUTED_ONLY)(params, jnp.asarray(poisoned), jnp.zeros((3, 25), bool))
    assert not np.any(nobody)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_experts():
    def temporary_bytes(num_experts):
        config = dataclasses.replace(ROUTED_ONLY, num_experts=num_experts)
        module = Experts(ATTENTION, config)
        x = jax.ShapeDtypeStruct((128, HIDDEN), jnp.float32)
        params = nn.meta.unbox(jax.eval_shape(module.init, jax.random.key(0), x))
        compiled = quick_jit(module.apply).lower(params, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    scores = 128 * 4  # bytes a further expert takes in each array of the choice
    assert temporary_bytes(64) - temporary_bytes(8) <= 56 * 6 * scores
    assert temporary_bytes(8) <= 6 * 128 * 3 * HIDDEN * 4


# --- gradients and transformations


def dense_experts(params, x, config):
    """All experts of all tokens, those not chosen with weight 0."""
    p = params["params"]
    scores = jnp.sqrt(jax.nn.softplus(jnp.einsum("btH,eH->bte", x, p["router"])))
    # The rank of each score, by comparison with all others.
    biased = jax.lax.stop_gradient(scores + p["router_bias"][None, None])
    rank = jnp.sum(biased[..., None, :] > biased[..., None], axis=-1)
    weights = jnp.where(rank < config.top_k, scores, 0.0)
    weights = config.routed_scale * weights / jnp.sum(weights, axis=-1, keepdims=True)

    def silu_product(x, p, kernel):
        gated, up = (jnp.einsum(f"btH,{kernel}iH->bt{kernel}i", x, p[k]) for k in ("gate", "up"))
        return jnp.einsum(f"bt{kernel}i,{kernel}Hi->bt{kernel}H", nn.silu(gated) * up, p["down"])

    y = jnp.einsum("bte,bteH->btH", weights, silu_product(x, p, "e"))
    return y + silu_product(x, p["shared"], "")


def test_gradients_are_those_of_the_dense_sum():
    params = experts_params(V41_LIKE)
    x, weights = (jnp.asarray(activations(ATTENTION, 3, 25, seed=seed)) for seed in (0, 1))

    def ours(params, x):
        return jnp.sum(Experts(ATTENTION, V41_LIKE).apply(params, x) * weights)

    def dense(params, x):
        return jnp.sum(dense_experts(params, x, V41_LIKE) * weights)

    got = quick_jit(jax.value_and_grad(ours, argnums=(0, 1)))(params, x)
    want = quick_jit(jax.value_and_grad(dense, argnums=(0, 1)))(params, x)
    assert not np.any(got[1][0]["params"].pop("router_bias"))
    assert not np.any(want[1][0]["params"].pop("router_bias"))
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert largest_error(one, other) <= 1e-5


def test_a_gradient_at_padding_reaches_nothing():
    params = experts_params(ROUTED_ONLY)
    x, weights = (jnp.asarray(activations(ATTENTION, 3, 25, seed=seed)) for seed in (0, 1))
    valid = jnp.asarray(np.random.default_rng(0).random((3, 25)) < 0.6)

    of_all = routed_gradients(params, x, weights, valid)
    of_valid = routed_gradients(params, x, jnp.where(valid[..., None], weights, 0.0), valid)
    chex.assert_trees_all_equal(of_all, of_valid)
    assert not np.any(np.asarray(of_all[1])[~np.asarray(valid)])


@pytest.mark.slow
def test_a_mapped_call_is_the_calls_one_by_one():
    params, x = experts_params(V41_LIKE), activations(ATTENTION, 3, 25)
    got = quick_jit(jax.vmap(Experts(ATTENTION, V41_LIKE).apply, (None, 0)))(params, jnp.asarray(x))
    assert largest_error(got, float64_experts(params, x, V41_LIKE)) <= 2e-6


# --- parameters


def test_parameters_have_names_shapes_dtypes_and_axes():
    names = AxisNames(experts="expert", mlp="inner", embed="model")
    attention = dataclasses.replace(ATTENTION, param_dtype="bfloat16", axis_names=names)
    module = Experts(attention, V41_LIKE)
    variables = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, HIDDEN)))
    found = nn.meta.unbox(variables)["params"]
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), found) == {
        "router": ((8, 32), "float32"),
        "router_bias": ((8,), "float32"),
        "gate": ((8, 24, 32), "bfloat16"),
        "up": ((8, 24, 32), "bfloat16"),
        "down": ((8, 32, 24), "bfloat16"),
        "shared": {
            "gate": ((16, 32), "bfloat16"),
            "up": ((16, 32), "bfloat16"),
            "down": ((32, 16), "bfloat16"),
        },
    }
    specs = nn.get_partition_spec(variables)["params"]
    assert "shared" in specs
    del specs["shared"]
    assert specs == {
        "router": PartitionSpec("expert", "model"),
        "router_bias": PartitionSpec("expert"),
        "gate": PartitionSpec("expert", "inner", "model"),
        "up": PartitionSpec("expert", "inner", "model"),
        "down": PartitionSpec("expert", "model", "inner"),
    }


def test_each_expert_is_initialised_as_a_kernel_of_its_own():
    attention = dataclasses.replace(ATTENTION, hidden_size=100)
    module = Experts(attention, ExpertsConfig(16, 1, 25))
    variables = quick_jit(module.init)(jax.random.key(0), jnp.zeros((1, 100)))
    params = nn.meta.unbox(variables)["params"]
    for name, std in [("gate", 1 / 10), ("up", 1 / 10), ("down", 1 / 5), ("router", 1 / 10)]:
        np.testing.assert_allclose(np.std(params[name]), std, rtol=0.05)
    assert not np.any(params["router_bias"])


# --- decoders


def expert_decoder(num_layers: int, **fields) -> swa.DecoderConfig:
    return swa.DecoderConfig(50, num_layers, ATTENTION, mlp_size=0, experts=V41_LIKE, **fields)


@pytest.fixture(scope="module")
def decoder():
    config = expert_decoder(1)
    return swa.Decoder(config), decoder_params(config)


@pytest.mark.slow
def test_token_by_token_gives_the_scores_of_the_whole_sequence(decoder):
    model, params = decoder
    tokens = np.random.default_rng(0).integers(0, 50, 20, dtype=np.int32)  # the ring has 9 rows
    want = whole_sequence_logits(model, params, tokens[None])[0]
    assert largest_error(ring_logits(model, params, tokens, 0), want) <= 3e-5
    assert largest_error(ring_logits(model, params, tokens, 13), want[13:]) <= 3e-5
    # Experts take part: without what they add, the scores are others.
    experts = params["params"]["layers_0"]["experts"]
    layer = params["params"]["layers_0"] | {"experts": experts | {"down": 0 * experts["down"]}}
    without = whole_sequence_logits(model, with_values(params, layers_0=layer), tokens[None])[0]
    assert largest_error(without, want) > 1e-2


@pytest.mark.slow
def test_generated_tokens_are_the_best_of_the_whole_sequence(decoder):
    model, params = decoder
    prompts, limits = [[1, 2, 3, 4, 5, 6, 7], [8, 9]], [9, 12]
    generated = swa.generate(model, params, prompts, max_new_tokens=limits)
    assert [len(tokens) for tokens in generated] == limits
    for prompt, tokens in zip(prompts, generated, strict=True):
        sequence = np.int32([*prompt, *tokens])
        scores = np.asarray(whole_sequence_logits(model, params, sequence[None, :-1]))[0]
        scores = scores[len(prompt) - 1 :]
        got = np.take_along_axis(scores, np.int64(tokens)[:, None], axis=1)[:, 0]
        assert np.all(scores.max(axis=1) - got <= 1e-4 * np.abs(scores).max())


@pytest.mark.slow
def test_scanned_layers_are_the_unrolled_ones_and_so_are_their_gradients():
    config = expert_decoder(2)
    params = decoder_params(config)
    layers = [params["params"][f"layers_{i}"] for i in range(2)]
    others = {k: v for k, v in params["params"].items() if not k.startswith("layers")}

    def stacked(others, layers):
        return {**others, "layers": {"layer": jax.tree.map(lambda *x: jnp.stack(x), *layers)}}

    tokens = np.random.default_rng(0).integers(0, 50, (2, 9), dtype=np.int32)

    def loss_and_gradient(config, params):
        model = swa.Decoder(config)

        def loss(params):
            return jnp.mean(model.apply({"params": params}, tokens) ** 2)

        return quick_jit(jax.value_and_grad(loss))(params)

    want, gradient = loss_and_gradient(config, params["params"])
    scanned = stacked(others, layers)
    loss, scanned_gradient = loss_and_gradient(expert_decoder(2, scan_layers=True), scanned)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    others = {k: v for k, v in gradient.items() if not k.startswith("layers")}
    want = stacked(others, [gradient[f"layers_{i}"] for i in range(2)])
    chex.assert_trees_all_equal_structs(scanned_gradient, want)
    for path, expected in jax.tree_util.tree_leaves_with_path(want):
        if not np.any(expected):  # the bias and the head
            continue
        got = functools.reduce(lambda tree, key: tree[key.key], path, scanned_gradient)
        assert largest_error(got, expected) <= 1e-5


# --- configurations


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": 9}, "top_k: expected at most num_experts 8, got 9"),
        ({"top_k": 0}, "top_k: expected an integer of 1 or more, got 0"),
        ({"num_experts": 8.0}, "num_experts: expected an integer"),
        ({"expert_size": 0}, "expert_size: expected an integer of 1 or more"),
        ({"shared_size": -1}, "shared_size: expected an integer of 0 or more"),
        ({"scoring": "softplus"}, "scoring: expected one of 'softmax', 'sigmoid', 'sqrt_softplus'"),
        ({"normalise_weights": 1}, "normalise_weights: expected True or False, got 1"),
        ({"routed_scale": 0.0}, "routed_scale: expected a finite number above 0"),
    ],
)
def test_a_wrong_configuration_is_refused_by_field(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(V41_LIKE, **fields)


def test_experts_and_a_width_of_the_dense_layer_exclude_each_other():
    with pytest.raises(ValueError, match="mlp_size: expected 0 with experts"):
        swa.DecoderConfig(50, 2, ATTENTION, mlp_size=48, experts=V41_LIKE)
    with pytest.raises(ValueError, match="mlp_size: expected an integer of 1 or more, got 0"):
        swa.DecoderConfig(50, 2, ATTENTION, mlp_size=0)
    with pytest.raises(ValueError, match="experts: expected an ExpertsConfig or None, got 8"):
        swa.DecoderConfig(50, 2, ATTENTION, mlp_size=0, experts=8)
    layer = swa.DecoderLayer(ATTENTION, 48, experts=V41_LIKE)
    with pytest.raises(ValueError, match="mlp_size: expected 0 with experts"):
        layer.init(jax.random.key(0), jnp.zeros((1, 2, HIDDEN)))


def test_a_configuration_with_experts_survives_json_and_files(tmp_path):
    config = expert_decoder(2, scan_layers=True)
    again = swa.DecoderConfig.from_json(config.to_json())
    assert (again, hash(again)) == (config, hash(config))
    assert again.experts == V41_LIKE
    write_config(tmp_path, config)
    assert read_config(tmp_path) == config
    fields = json.loads(config.to_json())
    fields["experts"]["capacity"] = 2
    with pytest.raises(ValueError, match=r"ExpertsConfig: unknown fields \['capacity'\]"):
        swa.DecoderConfig.from_json(json.dumps(fields))


def test_a_configuration_of_before_there_were_experts_is_read():
    config = swa.DecoderConfig(50, 2, ATTENTION, mlp_size=48)
    fields = json.loads(config.to_json())
    del fields["experts"], fields["attention"]["axis_names"]["experts"]
    assert swa.DecoderConfig.from_json(json.dumps(fields)) == config


# --- files


def test_checkpoints_under_public_names_refuse_experts_and_write_nothing(tmp_path):
    config = expert_decoder(1)
    directory = tmp_path / "model"
    with pytest.raises(ValueError, match="experts: expected None in a decoder under public names"):
        checkpoint.save_decoder(directory, decoder_params(config), config)
    assert not directory.exists()
    with pytest.raises(ValueError, match="experts: expected None in a decoder under public names"):
        checkpoint.load_decoder({}, config)


def test_parameters_with_experts_survive_a_file(tmp_path):
    config = expert_decoder(1)
    params = decoder_params(config)
    path = tmp_path / "params.safetensors"
    checkpoint.save_params(path, params, {"config": config.to_json()})
    loaded, metadata = checkpoint.load_params(path)
    chex.assert_trees_all_equal(loaded, params)
    assert swa.DecoderConfig.from_json(metadata["config"]) == config
