"""Models of one's own in Linen and NNX: the same numbers as the library's, weights that move."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import byte_model
import byte_text
import flax.linen as nn
import jax
import jax.numpy as jnp
import linen_model
import nnx_model
import numpy as np
import pytest
from flax import nnx
from quick_compilation import QUICK_COMPILATION
from small_models import (
    activations,
    attention_config,
    decoder_params,
    largest_error,
    layer_params,
)

import swa_jax as swa

pytestmark = pytest.mark.quick_compilation

WINDOW = 16  # the ring has 22 rows
ATTENTION = attention_config(WINDOW, swa.V41)
CONFIG = swa.DecoderConfig(byte_text.VOCAB_SIZE, 2, ATTENTION, mlp_size=48)
SIZES = (byte_text.VOCAB_SIZE, 2, 48, ATTENTION)
PROMPT = "import os\n\nprint('é', 12)\n"  # 27 bytes, more than the ring holds
MODELS = {
    "linen_model.py": (linen_model, ["Flax Linen"]),
    "nnx_model.py": (nnx_model, ["Flax NNX, own attention", "Flax NNX, bridged"]),
}
KINDS = {"own": nnx_model.Attention, "bridged": nnx_model.bridged_attention}


@pytest.fixture(scope="module")
def variables() -> dict:
    return decoder_params(CONFIG)


@pytest.fixture(scope="module")
def declared() -> dict:
    """Shapes of what Linen's init gives the model, boxed."""
    model = linen_model.LanguageModel(*SIZES)
    return jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))


@pytest.fixture(scope="module")
def built(variables) -> dict[str, tuple[nnx.GraphDef, nnx.State]]:
    return {kind: nnx_model.build(CONFIG, variables, layer) for kind, layer in KINDS.items()}


@pytest.fixture
def weights(tmp_path, variables, monkeypatch) -> Path:
    """A file of a tiny model, in the place of the byte model."""
    file = tmp_path / "tiny.safetensors"
    swa.checkpoint.save_params(file, variables["params"], {"config": CONFIG.to_json()})
    monkeypatch.setattr(byte_model, "WEIGHTS", file)
    return file


# --- the command lines


def expected_tokens(decoder, variables, prompt: str, count: int, seed: int) -> list[int]:
    sampling = swa.Sampling.build(1, temperature=0.7, keys=jax.random.key(seed)[None])
    tokens = [byte_text.BOUNDARY, *prompt.encode()]
    return swa.generate(decoder, variables, [tokens], max_new_tokens=count, sampling=sampling)[0]


@pytest.mark.slow
@pytest.mark.parametrize("program", MODELS)
def test_a_models_tokens_are_the_decoders_and_one_compiled_step_serves_every_position(
    program, variables, weights, monkeypatch, capsys
):
    module, names = MODELS[program]
    monkeypatch.setattr(linen_model, "BLOCK", 1)
    module.decode_block.clear_cache()
    assert module.main([PROMPT, "--bytes", "40", "--seed", "3"]) == 0
    assert module.decode_block._cache_size() == len(names)  # models, not their 39 positions each
    tokens = expected_tokens(swa.Decoder(CONFIG), variables, PROMPT, 40, 3)
    output = capsys.readouterr()
    text = PROMPT.encode() + byte_text.decode(np.asarray(tokens))
    assert output.out == text.decode("utf-8", "replace") + "\n"
    verdict = "40 tokens equal those of swa.generate"
    assert output.err.splitlines() == [f"{name}: {verdict}" for name in names]


def test_a_model_that_differs_is_exit_status_one(weights, monkeypatch, capsys):
    monkeypatch.setattr(swa, "generate", lambda *arguments, **options: [[256]])
    monkeypatch.setattr(linen_model, "continue_tokens", lambda *arguments, **options: [65])
    assert linen_model.main(["abc", "--bytes", "1"]) == 1
    output = capsys.readouterr()
    assert output.out == "abcA\n"
    assert output.err == "Flax Linen: 1 tokens DIFFER from those of swa.generate\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "argument PROMPT: expected at least one byte, got none"),
        (["--bytes", "0"], "argument --bytes: expected 1 to 1000000, got 0"),
        (["--bytes", "1000001"], "argument --bytes: expected 1 to 1000000, got 1000001"),
        (["--seed", "-1"], "argument --seed: expected 0 to 4294967295, got -1"),
        (["--unknown"], "unrecognized arguments: --unknown"),
    ],
)
@pytest.mark.parametrize("program", MODELS)
def test_bad_input_is_one_line_and_exit_status_two(program, arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        MODELS[program][0].main(arguments)
    assert end.value.code == 2
    assert capsys.readouterr().err == f"{program}: error: {message}\n"


def test_weights_that_cannot_be_read_are_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(byte_model, "WEIGHTS", tmp_path / "missing")
    assert linen_model.main([]) == 2
    error = capsys.readouterr().err
    assert error.startswith("linen_model.py: error: ")
    assert error.count("\n") == 1


# --- weights


def assert_equal_trees(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_the_linen_model_declares_the_parameters_of_the_decoder(variables, declared):
    shapes = jax.tree.map(jnp.shape, nn.meta.unbox(declared))
    assert shapes == jax.tree.map(jnp.shape, variables)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_go_from_linen_to_nnx_and_back_unchanged(kind, variables, built):
    graph, state = built[kind]
    assert_equal_trees(nnx_model.to_linen(state), variables)
    model: Any = nnx.merge(graph, state)
    np.testing.assert_array_equal(
        model.layers[1].attention.q_b[...], variables["params"]["layers_1"]["attention"]["q_b"]
    )


def test_boxed_linen_variables_are_taken_as_they_are(declared, variables, built):
    def numbered(leaf):
        return np.arange(np.prod(leaf.shape), dtype=np.float32).reshape(leaf.shape)

    boxed = jax.tree.map(numbered, declared)
    assert isinstance(boxed["params"]["layers_0"]["attention"]["sinks"], nn.LogicallyPartitioned)
    for _, state in built.values():
        moved = nnx_model.to_linen(nnx_model.from_linen(state, boxed))
        assert_equal_trees(moved, jax.tree.map(numbered, variables))
        assert_equal_trees(nnx_model.to_linen(state), variables)  # the state given is as it was


def test_nnx_initialises_kernels_by_their_inputs_and_the_rest_as_the_linen_layer_does():
    initialise = jax.jit(lambda: nnx.split(nnx_model.Attention(ATTENTION, rngs=nnx.Rngs(0)))[1])
    params = nnx_model.to_linen(initialise())["params"]
    for name, value in params.items():
        if name in ("q_a_norm", "kv_norm", "sinks"):
            np.testing.assert_array_equal(value, 0 if name == "sinks" else 1)
        else:
            assert np.std(value) == pytest.approx(value.shape[1] ** -0.5, rel=0.1)


@pytest.mark.parametrize("name", ["head", "more"])
def test_weights_of_another_model_are_refused(name, variables, built):
    head = variables["params"]["head"]
    params = variables["params"] | {name: head[:-1]}
    message = rf"variables: expected the model's parameters, got others at \['{name}'\]"
    with pytest.raises(ValueError, match=message):
        nnx_model.from_linen(built["own"][1], {"params": params})


def test_numbers_in_a_path_are_parts_of_linens_names():
    assert nnx_model.linen_path(("layers", 10, "mlp", "up")) == ("layers_10", "mlp", "up")
    assert nnx_model.linen_path(("norm", "weight")) == ("norm", "weight")


# --- the same numbers


@functools.partial(jax.jit, static_argnums=0)
def call_nnx(graph, state, *arguments):
    return nnx.merge(graph, state)(*arguments)


@functools.cache
def abstract_layer(kind: str) -> tuple[nnx.GraphDef, nnx.State]:
    return nnx.split(nnx.eval_shape(lambda: KINDS[kind](ATTENTION, rngs=nnx.Rngs(0))))


@pytest.mark.parametrize("call", ["sequence", "prefill", "decode"])
def test_nnx_layers_equal_the_linen_layer_bit_for_bit(call):
    params, geometry = layer_params(ATTENTION), ATTENTION.geometry
    ids, starts = np.arange(2, dtype=np.int32), np.array([30, 7], np.int32)
    x = activations(ATTENTION, 2, 1 if call == "decode" else 24)
    given = ()
    if call != "sequence":
        rows = swa.RingCache.create(2, 1, geometry, ATTENTION.fmt).layer(0)
        # Bytes that are finite both as values and as scales.
        data = np.random.default_rng(0).integers(100, 127, rows.data.shape, dtype=np.uint8)
        rows = dataclasses.replace(rows, data=jnp.asarray(data))
        meta = swa.DecodeMetadata.build(geometry, ids, starts[:, None])
        if call == "prefill":
            lengths = np.array([24, 5], np.int32)
            meta = swa.PrefillMetadata.build(geometry, ids, starts, lengths, max_tokens=24)
        given = (rows, meta)
    want = jax.jit(swa.SlidingWindowAttention(ATTENTION).apply)(params, x, *given)
    y = jax.tree.leaves(want)[0]
    assert np.all(np.isfinite(y))
    assert np.std(y) > 0.1
    for kind in KINDS:
        graph, state = abstract_layer(kind)
        got = call_nnx(graph, nnx_model.from_linen(state, params), x, *given)
        assert_equal_trees(got, want)


@pytest.fixture(scope="module")
def steps(variables, built) -> dict[str, tuple]:
    """Prefill and step of each model with its weights, for one request."""
    sampling = swa.Sampling.build(1, temperature=0.7, keys=jax.random.key(1)[None])
    linen = (linen_model.LanguageModel(*SIZES), variables, sampling)
    found = {"linen": (linen_model.prefill, linen_model.decode_block, linen)}
    for kind, model in built.items():
        flat = (*jax.tree.flatten(model), sampling)
        found[kind] = (nnx_model.prefill, nnx_model.decode_block, flat)
    return found


def create_cache() -> swa.RingCache:
    return swa.RingCache.for_decoder(CONFIG, 1)


@pytest.mark.slow
def test_linen_and_nnx_models_choose_the_same_tokens_and_store_the_same_bytes(steps):
    prompt = np.random.default_rng(1).integers(0, 257, (1, 32), dtype=np.int32)
    results = {}
    for kind, (prefill, decode_block, model) in steps.items():
        positions = np.array([27], np.int32)
        cache, tokens = prefill(*model, create_cache(), prompt, positions)
        chosen = [tokens]
        for step in range(30):
            at = positions + np.int32(step)
            cache, block = decode_block(*model, cache, chosen[-1], at, steps=1)
            chosen.append(block[:, 0])
        results[kind] = (np.stack(chosen), cache.blocks)
    assert len(np.unique(results["linen"][0])) > 10
    for kind in KINDS:
        assert_equal_trees(results[kind], results["linen"])


@pytest.mark.donates
@pytest.mark.parametrize("kind", [pytest.param("linen", marks=pytest.mark.slow), *KINDS])
def test_the_compiled_step_updates_the_cache_in_place(kind, steps):
    cache = jax.eval_shape(create_cache)
    integers = jax.ShapeDtypeStruct((1,), jnp.int32)
    _, decode_block, model = steps[kind]
    lowered = decode_block.lower(*model, cache, integers, integers, steps=1)
    memory = lowered.compile(compiler_options=QUICK_COMPILATION).memory_analysis()
    assert memory.alias_size_in_bytes >= cache.nbytes == 2944  # 2 layers of 22 rows of 66, padded


@pytest.mark.parametrize("kind", KINDS)
def test_an_nnx_model_has_no_variables_but_parameters(kind, variables, built):
    model = nnx.merge(*built[kind])
    assert len(nnx.to_flat_state(nnx.state(model))) == len(jax.tree.leaves(variables))
    assert len(nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.Param)))) == 0


# --- training


TRAINING_TOKENS = np.random.default_rng(2).integers(0, 257, (2, 24), dtype=np.int32)


def loss_of(logits):
    scores = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.mean(jnp.take_along_axis(scores, TRAINING_TOKENS[:, 1:, None], axis=-1))


@pytest.fixture(scope="module")
def one_layer() -> swa.DecoderConfig:
    return dataclasses.replace(CONFIG, num_layers=1)


@pytest.fixture(scope="module")
def linen_gradient(one_layer):
    """Hidden states and the gradient."""
    model = linen_model.LanguageModel(byte_text.VOCAB_SIZE, 1, 48, ATTENTION)

    def loss(variables):
        hidden = model.apply(variables, TRAINING_TOKENS)
        return loss_of(model.apply(variables, hidden, method="logits")), hidden

    gradient, hidden = jax.jit(jax.grad(loss, has_aux=True))(decoder_params(one_layer))
    return hidden, gradient


@pytest.mark.parametrize("kind", KINDS)
def test_training_in_nnx_has_linens_hidden_states_and_gradient_and_lowers_the_loss(
    kind, one_layer, linen_gradient
):
    def loss(model):
        hidden = model(TRAINING_TOKENS)
        return loss_of(model.logits(hidden)), hidden

    model: Any = nnx.merge(*nnx_model.build(one_layer, decoder_params(one_layer), KINDS[kind]))
    loss_and_gradient = nnx.jit(nnx.value_and_grad(loss, has_aux=True))
    (before, hidden), gradient = loss_and_gradient(model)
    want_hidden, want = linen_gradient
    np.testing.assert_array_equal(hidden, want_hidden)
    # The sums over uses of a parameter may be in another order.
    errors = jax.tree.map(largest_error, nnx_model.to_linen(gradient), want)
    assert max(jax.tree.leaves(errors)) < 1e-5
    stepped = jax.tree.map(lambda x, slope: x - 0.1 * slope, nnx.state(model, nnx.Param), gradient)
    nnx.update(model, stepped)
    (after, _), _ = loss_and_gradient(model)
    assert float(after) < float(before) - 0.01
