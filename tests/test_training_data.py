"""The byte model's text, its batches, and a training run that can be stopped anywhere."""

import dataclasses
import json
import math

import byte_text
import byte_training
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import train_bytes
import training_checkpoints
from hypothesis import given, settings
from hypothesis import strategies as st

import swa_jax as swa

pytestmark = pytest.mark.quick_compilation

# By hand: the last hexadecimal digit of `printf %s PATH | sha256sum` is 0.
HELD_OUT = ("posixpath.py", "wave.py", "email/parser.py", "xml/dom/__init__.py")
TRAINING = ("os.py", "ast.py", "email/header.py", "json/decoder.py")

TINY = swa.DecoderConfig(
    vocab_size=byte_text.VOCAB_SIZE,
    num_layers=1,
    attention=swa.AttentionConfig(
        hidden_size=32,
        num_heads=2,
        head_dim=64,
        rope_dim=16,
        q_lora_rank=16,
        o_groups=2,
        o_lora_rank=16,
        window=16,
        fmt=swa.V41.with_width(64),
    ),
    mlp_size=48,
)
# Steps 0 to 2 with the short window, 3 to 5 with the model's and through the rows' round trip.
RUN = byte_training.Run(
    seed=3, steps=6, batch=2, length=32, short_window=8, short_share=0.5, row_share=0.5
)


def sample_split(num_bytes: int, seed: int) -> byte_text.Split:
    random = np.random.default_rng(seed)
    half = num_bytes // 2
    return byte_text.make_split({"a.py": random.bytes(half), "b.py": random.bytes(half)})


@pytest.fixture(autouse=True)
def promotion_as_optax_needs_it():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def training() -> byte_text.Split:
    return sample_split(1000, seed=0)


@pytest.fixture(scope="module")
def held_out() -> byte_text.Split:
    return sample_split(300, seed=1)


@given(st.binary(max_size=300))
@settings(max_examples=50, deadline=None)
def test_decode_undoes_encode(text):
    tokens = byte_text.encode(text)
    assert tokens.shape == (len(text),)
    assert byte_text.decode(tokens) == text


def test_boundaries_have_no_text_and_other_tokens_are_refused():
    assert byte_text.decode(np.array([256, 104, 105, 256])) == b"hi"
    with pytest.raises(ValueError, match="expected 0 to 256, got 0 to 257"):
        byte_text.decode(np.array([0, 257]))


def test_split_follows_the_path_hash_and_is_disjoint(tmp_path):
    for path in HELD_OUT + TRAINING:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("#" * 200)
    for path in ("test/wave.py", "config-3/wave.py", "encodings/wave.py", "_sysconfigdata_x.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("#" * 200)
    (tmp_path / "uu.py").write_text("#" * 199)

    training, held_out = byte_text.load_corpus(tmp_path)

    assert training.paths == tuple(sorted(TRAINING))
    assert held_out.paths == tuple(sorted(HELD_OUT))
    assert held_out.num_bytes == 4 * 200
    expected = ([256] + [ord("#")] * 200) * 4
    assert held_out.tokens.tolist() == expected


def test_split_of_this_python_is_disjoint_and_about_a_sixteenth_is_held_out():
    training, held_out = byte_text.load_corpus()
    assert not set(training.paths) & set(held_out.paths)
    assert 0.02 < held_out.num_bytes / training.num_bytes < 0.15


def test_split_hash_changes_with_a_byte_or_a_path():
    splits = [{"a": b"xy"}, {"a": b"xz"}, {"b": b"xy"}, {"a": b"x", "b": b"y"}]
    assert len({byte_text.make_split(files).sha256 for files in splits}) == 4


@pytest.mark.parametrize("length", [2, 9, 10, 41, 57])
def test_every_token_but_the_first_is_scored_once_with_its_context(length):
    tokens = np.arange(length, dtype=np.uint16)
    inputs, targets, scored = byte_text.scoring_rows(tokens, context=5, row=8)
    chex.assert_shape((inputs, targets, scored), (math.ceil((length - 1) / 8), 13))
    assert targets[scored].tolist() == list(range(1, length))
    np.testing.assert_array_equal(inputs[scored], targets[scored] - 1)
    for row in range(1, len(inputs)):
        before = inputs[row, : scored[row].argmax()]
        assert before.tolist() == list(range(8 * row - 5, 8 * row))


def test_batch_is_a_function_of_seed_and_step_alone(training):
    first = byte_training.training_batch(training.tokens, RUN, 7)
    byte_training._block_order.cache_clear()
    for step in (40, 8, 0):
        other = byte_training.training_batch(training.tokens, RUN, step)
        assert not np.array_equal(first, other)
    np.testing.assert_array_equal(first, byte_training.training_batch(training.tokens, RUN, 7))
    reseeded = dataclasses.replace(RUN, seed=4)
    assert not np.array_equal(first, byte_training.training_batch(training.tokens, reseeded, 7))
    chex.assert_shape(first, (2, 33))


def test_a_pass_over_the_text_sees_each_place_once():
    tokens = np.arange(1000, dtype=np.uint16)
    blocks = (1000 - 1) // 32 - 1  # 30: 15 steps of 2
    for epoch in (0, 1):
        steps = range(epoch * blocks // 2, (epoch + 1) * blocks // 2)
        seen = np.concatenate([byte_training.training_batch(tokens, RUN, k)[:, :-1] for k in steps])
        starts = np.sort(seen[:, 0])
        np.testing.assert_array_equal(np.diff(starts), 32)
        assert len(starts) == blocks


def test_text_shorter_than_two_sequences_is_refused():
    with pytest.raises(ValueError, match="more than 64 tokens, got 40"):
        byte_training.training_batch(np.zeros(40, np.uint16), RUN, 0)


def test_phases_of_a_run():
    run = dataclasses.replace(RUN, row_share=0.17)
    models = [run.model(TINY, step) for step in range(run.steps)]
    assert [model.config.attention.window for model in models] == [8, 8, 8, 16, 16, 16]
    assert [model.round_trip for model in models] == [False] * 5 + [True]


def test_muon_update_is_orthogonal_and_scaled_for_kernels_that_are_out_by_in():
    params = {"up": np.zeros((48, 16), np.float32), "down": np.zeros((16, 48), np.float32)}
    gradients = jax.tree.map(
        lambda value: np.random.default_rng(0).normal(size=value.shape).astype(np.float32), params
    )
    optimizer = byte_training.make_optimizer(steps=2)  # warm-up is step 0, the peak step 1
    state = optimizer.init(params)
    for _ in range(2):
        updates, state = jax.jit(optimizer.update)(gradients, state, params)
    # 0.02 * sqrt(48 / 16) and 0.02; four Newton-Schulz steps end between 0.5 and 1.3.
    for name, scale in (("up", 0.02 * 3**0.5), ("down", 0.02)):
        singular = np.linalg.svd(np.asarray(updates[name]), compute_uv=False) / scale
        assert singular.min() > 0.5, name
        assert singular.max() < 1.3, name


def test_every_matrix_inside_the_layers_is_muons_and_nothing_else():
    params = byte_training.initial_params(TINY, seed=0)
    states = byte_training.make_optimizer(6).init(params).inner_states
    tensors = {
        label: {jax.tree_util.keystr(path[-1:], simple=True) for path, leaf in leaves if leaf.ndim}
        for label, leaves in (
            (label, jax.tree.leaves_with_path(states[label].inner_state[0].mu))
            for label in ("muon", "adam")
        )
    }
    assert tensors["muon"] == set(byte_training.MATRICES)
    assert not tensors["adam"] & tensors["muon"]
    for path, value in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path[-1:], simple=True)
        assert (name in byte_training.ZERO_AT_START) == (not np.any(value)) or name == "sinks"


def test_untrained_model_needs_log2_of_the_vocabulary_per_token(held_out):
    params = byte_training.initial_params(TINY, seed=0)
    bits = byte_training.bits_per_byte(swa.Decoder(TINY, round_trip=False), params, held_out)
    # 301 predictions (300 bytes, one boundary) of 8.005625 bits each.
    assert bits == pytest.approx(8.005625 * 301 / 300, rel=1e-5)


@pytest.mark.slow
def test_resumed_run_equals_an_undisturbed_one(tmp_path, training, held_out):
    def go_on(file, stop_after=RUN.steps):
        state = training_checkpoints.start(TINY, RUN, training, file if file.exists() else None)
        train_bytes.train(
            TINY, RUN, training, held_out, state, file,
            evaluate_every=3, stopped=lambda: state.step == stop_after,
        )  # fmt: skip
        return state

    whole = go_on(tmp_path / "whole")
    # After one of the two evaluations, which the rest of the run does not repeat.
    assert go_on(tmp_path / "parts", stop_after=5).step == 5
    parts = go_on(tmp_path / "parts")

    assert parts.step == whole.step == 6
    chex.assert_trees_all_equal(parts.params, whole.params)
    chex.assert_trees_all_equal(parts.optimizer, whole.optimizer)
    assert parts.evaluations == whole.evaluations
    assert [entry["step"] for entry in whole.evaluations] == [3, 6]
    begin = byte_training.initial_params(TINY, RUN.seed)
    assert not np.array_equal(jax.tree.leaves(begin)[0], jax.tree.leaves(whole.params)[0])
    # Each state is written beside its file and renamed: nothing unfinished is left.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts", "whole"]


def test_state_of_another_run_is_refused(tmp_path, training):
    file = tmp_path / "state.safetensors"
    state = training_checkpoints.TrainingState(2, {"up": np.ones(3, np.float32)}, {}, [])
    training_checkpoints.save_state(
        file, state, training_checkpoints.run_identity(TINY, RUN, training)
    )
    other = training_checkpoints.run_identity(TINY, dataclasses.replace(RUN, seed=4), training)
    with pytest.raises(ValueError, match='another run: expected {"seed": 4.*got {"seed": 3'):
        training_checkpoints.load_state(file, state, other)


def test_finished_model_says_what_it_is(tmp_path, training, held_out):
    params = byte_training.initial_params(TINY, seed=0)
    state = training_checkpoints.TrainingState(6, params, None, [])
    train_bytes.write_model(tmp_path, TINY, RUN, training, held_out, state)

    written = json.loads((tmp_path / "bytes.json").read_text())
    assert swa.DecoderConfig.from_json(json.dumps(written["model"])) == TINY
    assert written["tokens"] == 6 * 2 * 32
    assert written["held_out"]["bits_per_byte"] == pytest.approx(8.0323, abs=1e-4)
    assert written["held_out"]["bytes"] == 300
    weights, _ = swa.checkpoint.load_params(tmp_path / "bytes.safetensors")
    assert written["parameters"] == sum(value.size for value in jax.tree.leaves(weights))
    for value in jax.tree.leaves(weights):
        assert value.dtype == (jnp.bfloat16 if value.ndim > 1 else jnp.float32)


def test_default_model_fits_in_its_file():
    params = jax.eval_shape(lambda: byte_training.initial_params(train_bytes.MODEL, 0))
    count = sum(math.prod(value.shape) for value in jax.tree.leaves(params))
    assert count <= 2_500_000
    assert 2 * count < train_bytes.LARGEST_FILE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "1"], "--steps: expected 2 to 2147483647, got 1"),
        (["--steps", "many"], "--steps: expected 2 to 2147483647, got many"),
        (["--short-share", "1.5"], "--short-share: expected 0 to 1, got 1.5"),
        (["--short-window", "200"], "--short-window: expected at most the model's window 128"),
        (["--seed", "-1"], "--seed: expected 0 to 4294967295, got -1"),
        (["--batch", "65537"], "--batch: expected 1 to 65536, got 65537"),
        (["--length", "65537"], "--length: expected 1 to 65536, got 65537"),
        (["--resume"], "--resume: expected a state in"),
        (["--unknown"], "--unknown"),
    ],
)
def test_bad_arguments_end_with_status_2_and_one_line(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_:
        train_bytes.main(["--out", str(tmp_path / "out"), *arguments])
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
    assert not list(tmp_path.iterdir())


def test_unfinished_run_is_not_overwritten(tmp_path, capsys):
    state = tmp_path / "work" / train_bytes.STATE_FILE
    state.parent.mkdir()
    state.write_bytes(b"kept")
    with pytest.raises(SystemExit) as exit_:
        train_bytes.main(["--out", str(tmp_path / "out"), "--work", str(state.parent)])
    assert exit_.value.code == 2
    assert "--resume goes on with it" in capsys.readouterr().err
    assert state.read_bytes() == b"kept"
