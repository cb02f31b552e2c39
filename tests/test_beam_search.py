"""Beam search and the best of samples: brute force, a plain beam search, forks, programs."""

import dataclasses
import functools
import itertools
import json
from pathlib import Path

import beam_search as example
import byte_text
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick_compilation import QUICK_COMPILATION
from small_models import attention_config, decoder_params, quick_jit
from whole_copies import whole_copies

import swa_jax as swa
from swa_jax import beams as beam_module
from swa_jax import decoding, prefilling
from swa_jax.beams import BeamState, beam_block, beam_search
from swa_jax.best_of_n import best_of
from swa_jax.continuations import Continuation
from swa_jax.recompute import whole_sequence_logits
from swa_jax.sampling import request_keys, sample

pytestmark = pytest.mark.quick_compilation

VOCABULARY, WINDOW, LIMIT = 6, 4, 4
CONFIG = swa.DecoderConfig(VOCABULARY, 1, attention_config(WINDOW, swa.F32), mlp_size=48)
MODEL = swa.Decoder(CONFIG)
PARAMS = [decoder_params(CONFIG, seed) for seed in range(3)]
PROMPTS = [np.random.default_rng(n).integers(0, VOCABULARY, n) for n in (3, 7, 13)]
CHUNK = 4
CASES = list(zip(PARAMS, PROMPTS, strict=True))
quick_sample = quick_jit(sample)
TIE = 1e-4  # rows are float32: scores of two programs agree to 1e-5


@pytest.fixture(autouse=True)
def _free_rows_are_nan(monkeypatch):
    """New caches hold NaN wherever nothing was stored."""
    create = swa.RingCache.create

    def poisoned(*arguments, **fields):
        return jax.tree.map(lambda block: jnp.full_like(block, 255), create(*arguments, **fields))

    monkeypatch.setattr(swa.RingCache, "create", poisoned)
    rows = poisoned(1, 1, CONFIG.geometry, CONFIG.fmt).layer(0).logical()
    assert np.all(np.isnan(np.asarray(rows).view(np.float32)))


# --- references: log-probabilities without a cache, every sequence, and a plain beam search


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@functools.cache
def chances_after_prefixes(case: int) -> dict[tuple, np.ndarray]:
    """Natural log of the next token's probabilities, in float64, after any up to LIMIT - 1."""
    params, prompt = CASES[case]
    tails = np.array(list(itertools.product(range(VOCABULARY), repeat=LIMIT - 1)))
    whole = np.concatenate([np.tile(prompt, (len(tails), 1)), tails], axis=1).astype(np.int32)
    logits = np.asarray(whole_sequence_logits(MODEL, params, whole), np.float64)
    chances = log_softmax(logits)[:, len(prompt) - 1 :]
    return {
        tuple(tail[:n].tolist()): row[n]
        for tail, row in zip(tails, chances, strict=True)
        for n in range(LIMIT)
    }


def every_sequence(chances, stops, alpha, limit) -> list[Continuation]:
    found = []
    for length in range(1, limit + 1):
        for tokens in itertools.product(range(VOCABULARY), repeat=length):
            stopped = tokens[-1] in stops
            if set(tokens[:-1]) & stops or (length < limit and not stopped):
                continue
            total = sum(chances[tokens[:i]][tokens[i]] for i in range(length))
            kept = list(tokens[: length - stopped])
            found.append(Continuation(kept, total, total / length**alpha, stopped))
    return sorted(found, key=lambda one: -one.score)


def plain_beam_search(chances, stops, alpha, beams) -> list[Continuation]:
    live, ended = [((), 0.0)], []
    for length in range(1, LIMIT + 1):
        longer = [
            ((*tokens, token), total + chances[tokens][token])
            for tokens, total in live
            for token in range(VOCABULARY)
        ]
        for tokens, total in longer:
            if tokens[-1] in stops:
                ended.append(Continuation(list(tokens[:-1]), total, total / length**alpha, True))
        live = [one for one in longer if one[0][-1] not in stops]
        live = sorted(live, key=lambda one: -one[1])[:beams]
    ended += [Continuation(list(one), total, total / LIMIT**alpha, False) for one, total in live]
    return sorted(ended, key=lambda one: -one.score)[:beams]


def ties_between(found: list[Continuation], wanted: list[Continuation]) -> int:
    """Places at which two lists hold different continuations of one score; else they are equal."""
    assert len(found) == len(wanted)
    ties = 0
    for got, want in zip(found, wanted, strict=True):
        assert got.score == pytest.approx(want.score, abs=TIE)
        same = (got.tokens, got.stopped) == (want.tokens, want.stopped)
        ties += not same
        if same:
            assert got.log_probability == pytest.approx(want.log_probability, abs=TIE)
    return ties


def test_the_references_agree_where_nothing_is_left_out():
    chances = chances_after_prefixes(0)
    assert sum(np.exp(chances[()])) == pytest.approx(1)
    for stops in (set(), {2}, {0, 3}):
        every = every_sequence(chances, stops, 0.7, LIMIT)
        # 6**4 without stop tokens; else each token but the last is one that goes on
        goes_on = VOCABULARY - len(stops)
        want = sum(goes_on ** (n - 1) * len(stops) for n in range(1, 5)) + goes_on**4
        assert len(every) == want
        assert plain_beam_search(chances, stops, 0.7, VOCABULARY**4) == every
        if not stops:
            assert sum(np.exp(one.log_probability) for one in every) == pytest.approx(1)


# --- beam search


def search(params, prompt, beams, stops, alpha, limit=LIMIT) -> list[Continuation]:
    return beam_search(
        MODEL,
        params,
        prompt,
        beams=beams,
        max_new_tokens=limit,
        stop_tokens=stops,
        alpha=alpha,
        block_steps=2,
        prefill_chunk=CHUNK,
    )


@pytest.mark.slow
def test_a_beam_wide_enough_for_everything_finds_what_brute_force_finds():
    ties = 0
    for case, (params, prompt) in enumerate(CASES):
        chances = chances_after_prefixes(case)
        for alpha in (0.0, 0.6, 1.0):
            found = search(params, prompt, 156, [4], alpha, limit=3)
            want = every_sequence(chances, {4}, alpha, limit=3)
            assert len(want) == 156
            ties += ties_between(found, want)
    assert ties <= 20  # of 9 x 156


@pytest.mark.parametrize(
    ("beams", "stops"),
    [(3, [0, 3]), (1, [])],
)
@pytest.mark.slow
def test_a_narrow_beam_is_a_plain_beam_search_on_the_model_without_a_cache(beams, stops):
    for case, (params, prompt) in enumerate(CASES):
        chances = chances_after_prefixes(case)
        for alpha in (0.0, 0.6, 1.0, 2.5):
            found = search(params, prompt, beams, stops, alpha)
            want = plain_beam_search(chances, set(stops), alpha, beams)
            assert ties_between(found, want) == 0
            if not stops:
                assert all(len(one.tokens) == LIMIT and not one.stopped for one in found)


def test_a_search_ends_once_no_beam_can_reach_those_that_have_ended(monkeypatch):
    blocks = []

    def counted(*arguments):
        blocks.append(None)
        return beam_block(*arguments)

    monkeypatch.setattr(beam_module, "beam_block", counted)
    chances = chances_after_prefixes(2)
    for stops, count in [([1, 4], 1), ([0, 3], 2)]:
        blocks.clear()
        found = search(*CASES[2], 3, stops, alpha=0.0)
        assert ties_between(found, plain_beam_search(chances, set(stops), 0.0, 3)) == 0
        assert len(blocks) == count  # of two steps, for three tokens after the first


@pytest.mark.parametrize(
    ("alpha", "worst", "settled"),
    [
        (0.0, -1.5, True),
        (1.0, -1.5, False),  # -4 over 8 tokens is -0.5 each
        (1.0, -0.5, True),
        (1.0, -0.51, False),
        (0.5, -1.4, True),  # -4 / 8**0.5 is -1.414
        (0.5, -1.42, False),
    ],
)
def test_a_beam_may_still_reach_what_its_score_is_if_nothing_but_certain_tokens_follow(
    alpha, worst, settled
):
    state = dataclasses.replace(
        state_of(2, 2),
        log_probability=jnp.asarray([-4.0, -9.0]),
        ended_scores=jnp.asarray([-0.1, worst]),
        alpha=jnp.float32(alpha),
    )
    assert beam_module._is_settled(state) == settled


def test_nothing_is_compiled_again_for_another_prompt_stop_token_or_power():
    def sizes():
        programs = beam_block, beam_module._begin_beams, prefilling.prefill_chunk
        return [program._cache_size() for program in programs]

    search(*CASES[1], 3, [0, 3], 0.5)
    before = sizes()
    search(*CASES[2], 3, [5, 1], 2.0)
    search(*CASES[0], 3, [2, 4], 0.0)
    assert sizes() == before


def state_of(beams: int, slots: int) -> BeamState:
    cache = jax.eval_shape(lambda: swa.RingCache.create(slots, 1, CONFIG.geometry, CONFIG.fmt))
    number, integer = jax.ShapeDtypeStruct((), "float32"), jax.ShapeDtypeStruct((), "int32")
    scores = jax.ShapeDtypeStruct((beams,), "float32")
    tokens = jax.ShapeDtypeStruct((beams, 8), "int32")
    stops = jax.ShapeDtypeStruct((1,), "int32")
    return BeamState(cache, integer, integer, tokens, scores, tokens, scores, scores, stops, number)


@pytest.mark.slow
def test_a_block_updates_the_donated_cache_in_place_beside_one_copy_of_the_forked_slots():
    temporary = {}
    slots = 1024
    for beams in (2, 64):
        state = state_of(beams, slots)
        lowered = beam_block.lower(MODEL, PARAMS[0], state, 8)
        compiled = lowered.compile(compiler_options=QUICK_COMPILATION)
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= state.cache.nbytes
        assert not whole_copies(compiled.as_text(), state.cache.blocks[0].shape)
        temporary[beams] = memory.temp_size_in_bytes
    assert temporary[2] < state.cache.nbytes / 100  # idle slots cost nothing
    slot_bytes = state.cache.nbytes // slots
    assert 62 * slot_bytes <= temporary[64] - temporary[2] <= 124 * slot_bytes


# --- forks


def test_forked_requests_go_on_independently_as_if_each_had_been_prefilled():
    params, prompt = CASES[2]
    ids = np.int32([0, 1, 2])
    tails = np.random.default_rng(3).integers(0, VOCABULARY, (3, 12), dtype=np.int32)
    starts = np.full(3, len(prompt), np.int32)

    def empty(slots):
        return swa.RingCache.create(slots, 1, CONFIG.geometry, CONFIG.fmt)

    cache, _ = decoding.prefill(MODEL, params, empty(3), [2], [prompt], chunk=CHUNK)
    cache = jax.jit(swa.RingCache.copy_slots)(cache, np.int32([2, 2]), np.int32([0, 1]))
    forked, _ = decoding.replay(MODEL, params, cache, ids, tails, starts)
    for i in range(3):
        alone, _ = decoding.prefill(MODEL, params, empty(3), [i], [prompt], chunk=CHUNK)
        others = np.where(ids[:, None] == i, tails, -1)
        want, _ = decoding.replay(MODEL, params, alone, ids, others, starts)
        np.testing.assert_array_equal(forked[i], want[i])


def sampled_without_a_cache(params, prompt, sampling, limit, stop, alpha) -> Continuation:
    """A continuation of one request, each token from a recompute of all before it."""
    tokens, total = [], 0.0
    while len(tokens) < limit and stop not in tokens:
        whole = np.int32([[*prompt, *tokens]])
        logits = whole_sequence_logits(MODEL, params, whole)[:, -1]
        position = np.full(1, whole.shape[1], np.int32)
        tokens.append(int(quick_sample(logits, position, sampling)[0]))
        total += log_softmax(np.asarray(logits[0], np.float64))[tokens[-1]]
    score = total / len(tokens) ** alpha
    return Continuation([one for one in tokens if one != stop], total, score, stop in tokens)


@pytest.mark.slow
def test_samples_are_those_of_a_recompute_with_the_models_own_log_probabilities():
    keys = request_keys(jax.random.key(1), 3)
    sampling = swa.Sampling.build(3, temperature=[1.3, 0.0, 0.8], top_k=[0, 0, 4], keys=keys)
    stopped = 0
    for params, prompt in CASES:
        found = best_of(
            MODEL,
            params,
            prompt,
            samples=3,
            max_new_tokens=9,
            sampling=sampling,
            stop_tokens=[5],
            alpha=0.8,
            block_steps=5,
            prefill_chunk=CHUNK,
        )
        each = [jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], sampling) for i in range(3)]
        want = [sampled_without_a_cache(params, prompt, one, 9, 5, 0.8) for one in each]
        assert ties_between(found, sorted(want, key=lambda one: -one.score)) == 0
        stopped += sum(one.stopped for one in found)
    assert 0 < stopped < 9


# --- refusals


@pytest.mark.parametrize(
    ("call", "fields", "message"),
    [
        (beam_search, {"beams": 0}, "beams: expected an integer of 1 or more, got 0"),
        (beam_search, {"max_new_tokens": 0}, "max_new_tokens: expected an integer of 1 or more"),
        (beam_search, {"block_steps": 0}, "block_steps: expected an integer of 1 or more, got 0"),
        (beam_search, {"alpha": -0.5}, "alpha: expected a number of 0 or more, got -0.5"),
        (beam_search, {"alpha": float("nan")}, "alpha: expected a number of 0 or more, got nan"),
        (beam_search, {"max_new_tokens": 2**31}, "max_new_tokens: expected .* got 2147483648"),
        (best_of, {"max_new_tokens": 2**31 - 1}, "positions within int32, got 2147483647 after a"),
        (
            best_of,
            {"sampling": dataclasses.replace(swa.Sampling.build(3), top_k=np.int32([3]))},
            r"sampling.top_k: expected shape \(3\), got \(1,\)",
        ),
        (beam_search, {"max_new_tokens": 2**30}, "max_new_tokens: expected at most .* for each of"),
        (beam_search, {"stop_tokens": [6]}, "stop_tokens: expected token ids from 0 to 5"),
        (beam_search, {"prompt": []}, "prompt: expected at least one token"),
        (beam_search, {"prompt": [6]}, "prompt: expected token ids from 0 to 5"),
        (best_of, {"samples": 0}, "samples: expected an integer of 1 or more, got 0"),
        (best_of, {"alpha": -1}, "alpha: expected a number of 0 or more, got -1"),
        (best_of, {"sampling": swa.Sampling.build(2)}, r"expected shape \(3\), got \(2,\)"),
    ],
)
def test_bad_input_is_refused(call, fields, message):
    usual = {"prompt": [1, 2], "max_new_tokens": 2}
    usual |= {"samples": 3} if call is best_of else {"beams": 2}
    with pytest.raises(ValueError, match=message):
        call(MODEL, PARAMS[0], **usual | fields)


# --- the example

BYTES = swa.DecoderConfig(byte_text.VOCAB_SIZE, 2, attention_config(16, swa.V41), mlp_size=48)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("beams")
    entry = {"config": BYTES.to_json()}
    swa.checkpoint.save_params(folder / "w.safetensors", decoder_params(BYTES)["params"], entry)
    (folder / "empty").touch()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "count"), [(["--beams", "3", "--memory"], 3), (["--best-of", "1", "--seed", "2"], 1)]
)
def test_the_example_prints_ordered_continuations_with_greedys_score_beside(
    folder, mode, count, capsys
):
    report = folder / "report.json"
    arguments = ["--weights", str(folder / "w.safetensors"), "--report", str(report), "--show", "2"]
    assert example.main(["abc", *mode, "--bytes", "5", "--alpha", "0.5", *arguments]) == 0
    written = json.loads(report.read_text())
    found = written["continuations"]
    assert len(found) == count
    assert [one["score"] for one in found] == sorted((one["score"] for one in found), reverse=True)
    for one in [*found, written["greedy"]]:
        length = one["bytes"] + one["stopped"]
        assert one["score"] == pytest.approx(one["log_probability"] / length**0.5)
    best, greedy = found[0]["score"], written["greedy"]["score"]
    assert written["best_at_least_greedy"] == (best >= greedy - 1e-5 * abs(greedy))
    lines = capsys.readouterr().out.splitlines()
    assert f"{best:9.4f}" in lines[1]
    of_greedy = lines[1 + min(2, count)]
    assert f"{greedy:9.4f}" in of_greedy
    assert of_greedy.endswith("(greedy)")
    if "--memory" in mode:
        memory = written["memory"]
        assert memory["cache_bytes_not_in_place"] == 0
        assert memory["temporary_bytes"] >= memory["cache_bytes"] == 3 * 2 * 1472


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "prompt: expected at least one byte, got none"),
        (["--file", "empty"], "prompt: expected at least one byte, got none"),
        (["--file", "missing"], "No such file or directory: 'missing'"),
        (["a", "--file", "empty"], "expected one of PROMPT and --file, got both"),
        (["--weights", "empty"], "empty: expected a whole safetensors file"),
        (["--beams", "0"], "argument --beams: expected 1 to 4096, got 0"),
        (["--best-of", "5000"], "argument --best-of: expected 1 to 4096, got 5000"),
        (["--beams", "2", "--best-of", "2"], "argument --beams: expected no --best-of"),
        (["--seed", "1"], "argument --seed: expected a --best-of"),
        (["--seed", "-1", "--best-of", "2"], "argument --seed: expected 0 to 4294967295, got -1"),
        (["--alpha", "-1"], "alpha: expected a number of 0 or more, got -1.0"),
        (["--report", "missing/r.json"], "argument --report: expected a file in a folder"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_bad_command_lines_are_one_line_and_exit_status_two(
    folder, capsys, monkeypatch, arguments, message
):
    monkeypatch.chdir(folder)
    try:
        status = example.main(["--weights", "w.safetensors", *arguments])
    except SystemExit as end:
        status = end.code
    output = capsys.readouterr()
    assert (status, output.out) == (2, "")
    assert output.err.startswith("beam_search.py: error: ")
    assert output.err.count("\n") == 1
    assert message in output.err


@pytest.mark.parametrize("alpha", [-1, float("nan"), float("inf"), 200.0, 1e4])
def test_a_power_of_the_length_that_is_no_number_is_refused(alpha):
    with pytest.raises(ValueError, match="alpha: expected "):
        beam_search(MODEL, PARAMS[0], PROMPTS[0], beams=2, max_new_tokens=LIMIT, alpha=alpha)
    with pytest.raises(ValueError, match="alpha: expected "):
        best_of(MODEL, PARAMS[0], PROMPTS[0], samples=2, max_new_tokens=LIMIT, alpha=alpha)
