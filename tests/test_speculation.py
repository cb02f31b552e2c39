"""Speculative decoding: the tokens of plain decoding, whatever is drafted, and nothing copied."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from small_models import attention_config, decoder_config, decoder_params

import swa_jax as swa
from pallas_kernels import store_rows
from swa_jax import decoding, recompute, speculation
from swa_jax.drafting import ModelDrafter, NGramDrafter
from swa_jax.sampling import request_keys
from swa_jax.speculation import speculate_block

pytestmark = pytest.mark.quick_compilation

WINDOW, ROOM = 16, 6  # the ring has 22 rows
VOCABULARY = 50
CONFIG = decoder_config(attention_config(WINDOW, swa.V41), num_layers=2)
MODEL = swa.Decoder(CONFIG)
PARAMS = decoder_params(CONFIG)
BATCH, BLOCK = 3, 4
LENGTHS = (1, 17, 80)  # of the prompts: up to five windows
PROMPTS = [np.random.default_rng(n).integers(0, VOCABULARY, n).tolist() for n in LENGTHS]
LIMITS = [90, 40, 60]
STOPS = (8, 38)  # all greedy requests meet one late, one of the sampled ones runs to its limit
SETTINGS = {
    "greedy": swa.Sampling.build(BATCH),
    "sampled": swa.Sampling.build(
        BATCH,
        temperature=[0.7, 1.0, 1.3],
        top_k=[0, 20, 0],
        top_p=[1.0, 1.0, 0.95],
        keys=request_keys(jax.random.key(5), BATCH),
    ),
}


@dataclasses.dataclass(frozen=True)
class ScriptedDrafter:
    """Drafts what it was told stands at each position."""

    def begin(self, model, params, prompts, state, *, draft_tokens):
        del model, prompts, state, draft_tokens
        return jnp.asarray(params)

    def propose(self, params, memory, state, *, draft_tokens):
        del params
        places = state.positions[:, None] + 1 + jnp.arange(draft_tokens, dtype=jnp.int32)[None, :]
        inside = jnp.clip(places, 0, memory.shape[1] - 1)
        return jnp.take_along_axis(memory, inside, axis=1), memory

    def accept(self, memory, state, tokens, counts):
        del state, tokens, counts
        return memory


def empty_cache(slots: int = BATCH) -> swa.RingCache:
    return swa.RingCache.for_decoder(CONFIG, slots)


def started(sampling="greedy", limits=LIMITS, prompts=PROMPTS, stops=True) -> decoding.DecodeState:
    state = decoding.begin(
        MODEL,
        PARAMS,
        empty_cache(len(prompts)),
        prompts,
        max_new_tokens=limits,
        sampling=SETTINGS[sampling] if isinstance(sampling, str) else sampling,
        stop_tokens=STOPS,
    )
    return state if stops else without_stops(state)


def without_stops(state: decoding.DecodeState) -> decoding.DecodeState:
    return dataclasses.replace(state, stop_tokens=jnp.full_like(state.stop_tokens, -1))


def generate(sampling: str, **arguments) -> list[list[int]]:
    return swa.generate(
        MODEL,
        PARAMS,
        PROMPTS,
        max_new_tokens=LIMITS,
        sampling=SETTINGS[sampling],
        stop_tokens=STOPS,
        **arguments,
    )


@functools.cache
def plain_tokens(sampling: str) -> list[list[int]]:
    return generate(sampling)


def script(sampling: str, right: float, seed: int = 0) -> np.ndarray:
    """Each position's token, of prompts and plain tokens, a share of the latter right."""
    rng = np.random.default_rng(seed)
    table = np.full((BATCH, 200), -1, np.int32)
    for row, prompt, tokens in zip(table, PROMPTS, plain_tokens(sampling), strict=True):
        told = np.array(tokens)
        wrong = rng.random(len(told)) >= right
        told[wrong] = (told[wrong] + 1) % VOCABULARY
        row[: len(prompt)] = prompt
        row[len(prompt) : len(prompt) + len(told)] = told
    return table


@dataclasses.dataclass
class Run:
    """What a speculative run chose, and its counts."""

    tokens: list[list[int]]
    counts: speculation.SpeculationCounts
    state: decoding.DecodeState


def speculate(state, drafter, params, draft_tokens, *, prompts=PROMPTS, poison=False) -> Run:
    """Blocks of verify steps until every request has finished."""
    memory = drafter.begin(MODEL, params, prompts, state, draft_tokens=draft_tokens)
    tokens = [[int(token)] for token in state.tokens]
    total = None
    while np.any(np.asarray(state.remaining) > 0):
        if poison:
            state = dataclasses.replace(state, cache=poisoned(state))
        state, memory, new, counts = speculate_block(
            MODEL, PARAMS, state, drafter, params, memory, steps=BLOCK, draft_tokens=draft_tokens
        )
        total = counts if total is None else jax.tree.map(jnp.add, total, counts)
        for request, row in zip(tokens, np.asarray(new), strict=True):
            request += row[row >= 0].tolist()
    return Run(tokens, jax.device_get(total), state)


def poisoned(state: decoding.DecodeState) -> swa.RingCache:
    """The cache with NaN in every row that no query of the requests may see."""
    cache, geometry = state.cache, state.cache.geometry
    free = np.ones((cache.slots, geometry.capacity), bool)
    for slot, position in zip(
        np.asarray(state.state_ids), np.asarray(state.positions), strict=True
    ):
        seen = np.arange(max(position - (WINDOW - 1), 0), position) % geometry.capacity
        free[slot, seen] = False
    slots = np.flatnonzero(free).astype(np.int32)
    for i in range(cache.layers):
        rows = cache.layer(i)
        data = np.full((free.sum(), rows.fmt.row_bytes), 0xFF, np.uint8)
        data[:, : rows.fmt.data_bytes] = 0x7F
        cache = cache.with_layer(i, store_rows(rows, data, slots))
    return cache


def assert_plain_tokens(got, sampling: str) -> None:
    """The tokens of plain decoding, or others that the recompute holds for ties."""
    for i, want in enumerate(plain_tokens(sampling)):
        assert len(got[i]) == len(want)
        if got[i] != want:
            one = jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], SETTINGS[sampling])
            found = swa.compare_with_recompute(MODEL, PARAMS, PROMPTS[i], got[i], one)
            assert found.equal
            assert found.ties


# --- the same tokens


@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
def test_tokens_are_those_of_plain_decoding_whatever_is_drafted(sampling, right):
    run = speculate(
        started(sampling), ScriptedDrafter(), script(sampling, right), ROOM, poison=True
    )
    assert run.tokens == plain_tokens(sampling), "no ties with these seeds"
    stopped = [len(tokens) < limit for tokens, limit in zip(run.tokens, LIMITS, strict=True)]
    assert sum(stopped) in (2, 3)
    for i in range(BATCH):
        told = script(sampling, right)[i, LENGTHS[i] + 1 :]
        # A stop token is chosen, but neither returned nor in the script.
        chosen = [*plain_tokens(sampling)[i][1:], *[-2] * stopped[i]]
        want = verified(chosen, told[: len(chosen)], ROOM)
        counts = (run.counts.steps, run.counts.drafted, run.counts.accepted)
        assert tuple(int(count[i]) for count in counts)[::2] == want[::2]
        if not stopped[i]:
            assert int(run.counts.drafted[i]) == want[1]


def verified(chosen: list[int], told: np.ndarray, draft_tokens: int) -> tuple[int, int, int]:
    """Steps, drafts and accepted drafts of a request, in plain Python."""
    place = steps = drafted = accepted = 0
    while place < len(chosen):
        drafts = told[place : min(place + draft_tokens, len(chosen) - 1)].tolist()
        right = 0
        while right < len(drafts) and drafts[right] == chosen[place + right]:
            right += 1
        steps, drafted, accepted = steps + 1, drafted + len(drafts), accepted + right
        place += right + 1
    return steps, drafted, accepted


@pytest.mark.slow
@pytest.mark.parametrize("draft_tokens", [1, 2, 3, 4, 5])
def test_tokens_are_those_of_plain_decoding_with_any_number_of_drafts(draft_tokens):
    told = script("sampled", 0.7, seed=draft_tokens)
    run = speculate(started("sampled"), ScriptedDrafter(), told, draft_tokens, poison=True)
    assert_plain_tokens(run.tokens, "sampled")
    assert run.counts.accepted.min() > 0


@pytest.mark.parametrize("sampling", SETTINGS)
def test_generate_with_drafts_returns_what_generate_returns(sampling):
    assert_plain_tokens(generate(sampling, draft_tokens=6), sampling)


def test_the_state_after_a_stop_is_that_of_plain_decoding():
    state = started()
    while np.any(np.asarray(state.remaining) > 0):
        state, _ = decoding.decode_block(MODEL, PARAMS, state, 32)
    run = speculate(started(), ScriptedDrafter(), script("greedy", 1.0), 6)
    assert run.tokens == plain_tokens("greedy")
    for name in ("positions", "tokens", "remaining", "oldest"):
        np.testing.assert_array_equal(getattr(run.state, name), getattr(state, name), name)


def test_a_finished_request_stores_nothing_more():
    state = started(limits=[1, 40, 1])
    before = np.asarray(state.cache.blocks[0])
    run = speculate(state, ScriptedDrafter(), script("greedy", 0.7), 6)
    after = np.asarray(run.state.cache.blocks[0])
    np.testing.assert_array_equal(after[[0, 2]], before[[0, 2]])
    assert not np.array_equal(after[1], before[1])
    assert run.counts.steps[[0, 2]].tolist() == [0, 0]


def test_no_draft_is_stored_beyond_the_last_token_asked_for():
    run = speculate(started(limits=[4, 1, 1]), ScriptedDrafter(), script("greedy", 1.0), 6)
    # Three tokens after the prompt have rows, the last has none.
    assert run.state.highest[0] == len(PROMPTS[0]) + 2
    assert run.counts.drafted[0] == 2


def test_rollback_after_drafts_is_measured_from_the_highest_row_stored():
    state = started()
    memory = jnp.asarray(script("greedy", 0.0))
    state, _, _, _ = speculate_block(
        MODEL, PARAMS, state, ScriptedDrafter(), None, memory, steps=BLOCK, draft_tokens=ROOM
    )
    position = np.asarray(state.positions)  # the last step left six rejected rows behind it
    with pytest.raises(ValueError, match="positions: expected at most 6"):
        decoding.rollback(state, position - 2, state.tokens)
    known = np.array([tokens[BLOCK - 1] for tokens in plain_tokens("greedy")])
    back = decoding.rollback(state, position - 1, known)
    tokens = [tokens[:BLOCK] for tokens in plain_tokens("greedy")]
    while np.any(np.asarray(back.remaining) > 0):
        back, new = decoding.decode_block(MODEL, PARAMS, back, 32)
        for request, row in zip(tokens, np.asarray(new), strict=True):
            request += row[row >= 0].tolist()
    assert_plain_tokens(tokens, "greedy")


# --- drafters


def test_a_model_that_drafts_for_itself_is_always_accepted():
    run = speculate(started("sampled"), ModelDrafter(MODEL), PARAMS, 2)
    assert_plain_tokens(run.tokens, "sampled")
    if run.tokens == plain_tokens("sampled"):
        fewest = np.array([-(-len(tokens) // 3) for tokens in run.tokens])
        assert np.all(run.counts.steps <= fewest + 1), "all accepted but what ties"


@pytest.mark.slow
def test_a_smaller_model_drafts_for_a_larger_one():
    config = decoder_config(attention_config(8, swa.F32), num_layers=1)
    run = speculate(started(), ModelDrafter(swa.Decoder(config)), decoder_params(config, seed=3), 2)
    assert_plain_tokens(run.tokens, "greedy")


def looked_up(known: list[int], drafter: NGramDrafter, count: int) -> list[int]:
    """Prompt lookup in plain Python."""
    known = known[-drafter.history :]
    best = (0, 0)
    for end in range(len(known) - 1):
        agree = 0
        while agree < min(drafter.longest, end + 1) and known[end - agree] == known[-1 - agree]:
            agree += 1
        if agree >= drafter.shortest:
            best = max(best, (agree, end))
    if best[0] == 0:
        return [-1] * count
    period = len(known) - 1 - best[1]
    return [known[best[1] + 1 + i % period] for i in range(count)]


def test_the_n_gram_drafter_takes_the_longest_match_then_the_latest():
    drafter = NGramDrafter(longest=3, shortest=2, history=16)
    prompt = [1, 2, 3, 4, 9, 2, 3, 5, 9, 2, 3, 6, 1, 2]
    memory = jnp.asarray([[-1, *prompt, 3]], jnp.int32)
    drafts, _ = drafter.propose(None, memory, None, draft_tokens=4)
    assert drafts.tolist() == [[4, 9, 2, 3]]  # 1 2 3 stood at the beginning
    memory = jnp.asarray([[-1, *prompt[:-2], 7, 2, 3]], jnp.int32)[:, -16:]
    drafts, _ = drafter.propose(None, memory, None, draft_tokens=2)
    assert drafts.tolist() == [[6, 7]]  # 2 3 alone: the latest
    memory = jnp.asarray([[-1] * 14 + [2, 3]], jnp.int32)
    assert drafter.propose(None, memory, None, draft_tokens=2)[0].tolist() == [[-1, -1]]
    memory = jnp.asarray([[-1] * 10 + [4, 5, 4, 5, 4, 5]], jnp.int32)
    assert drafter.propose(None, memory, None, draft_tokens=5)[0].tolist() == [[4, 5, 4, 5, 4]]


@pytest.mark.parametrize("shortest", [1, 2])
def test_the_n_gram_drafter_is_a_lookup_in_what_was_written(shortest):
    drafter = NGramDrafter(longest=4, shortest=shortest, history=40)
    rng = np.random.default_rng(shortest)
    prompts = [rng.integers(0, 3, n).tolist() for n in (1, 2, 70)]
    state = started(prompts=prompts, limits=9)
    known = [[*p, int(t)] for p, t in zip(prompts, state.tokens, strict=True)]
    memory = drafter.begin(MODEL, None, prompts, state, draft_tokens=5)
    propose = jax.jit(lambda memory: drafter.propose(None, memory, None, draft_tokens=5)[0])
    accept = jax.jit(lambda *arguments: drafter.accept(arguments[0], None, *arguments[1:]))
    for _ in range(30):
        want = [looked_up(row, drafter, 5) for row in known]
        assert propose(memory).tolist() == want
        tokens, counts = rng.integers(0, 3, (3, 6)), rng.integers(0, 7, 3)
        memory = accept(memory, jnp.asarray(tokens, jnp.int32), jnp.asarray(counts, jnp.int32))
        for row, new, count in zip(known, tokens, counts, strict=True):
            row += new[:count].tolist()


# --- the distribution


@pytest.mark.slow
def test_acceptance_keeps_the_distribution():
    """Of 2,048 requests with one prompt and keys of their own, at the first two positions.

    A right program fails with a probability of 2e-6: two chi-square tests at 1e-6 each.
    """
    prompt, batch, rounds = PROMPTS[1][:5], 256, 8
    fixed = np.full(batch, 7, np.int32)
    favourites = np.tile(np.array([[7, 3, 11, 3, 11, 3, 11, 3]], np.int32), (batch, 1))
    told = np.concatenate([np.tile(np.asarray(prompt, np.int32), (batch, 1)), favourites], axis=1)
    counts = np.zeros((2, VOCABULARY))
    for number in range(rounds):
        keys = request_keys(jax.random.key(number), batch)
        sampling = swa.Sampling.build(batch, temperature=1.5, keys=keys)
        state = started(sampling, 4, [prompt] * batch, stops=False)
        remaining = jnp.full(batch, 3, jnp.int32)  # one whose own first token was a stop as well
        state = dataclasses.replace(state, tokens=jnp.asarray(fixed), remaining=remaining)
        run = speculate(state, ScriptedDrafter(), told, 2, prompts=[prompt] * batch)
        chosen = np.array(run.tokens)[:, 1:3]
        for place in range(2):
            counts[place] += np.bincount(chosen[:, place], minlength=VOCABULARY)
    first = probabilities(np.array([[*prompt, 7]]), 1.5)
    pairs = np.array([[*prompt, 7, token] for token in range(VOCABULARY)])
    second = first[0] @ probabilities(pairs, 1.5)
    assert chi_square(counts[0], first[0]) > 1e-6
    assert chi_square(counts[1], second) > 1e-6
    # The test sees a rule that lets one draft in ten through as it is.
    biased = 0.9 * counts[0]
    biased[3] += 0.1 * counts[0].sum()
    assert chi_square(biased, first[0]) < 1e-6


def probabilities(sequences: np.ndarray, temperature: float) -> np.ndarray:
    """After each sequence, from the recompute without a cache, in float64."""
    logits = recompute.whole_sequence_logits(MODEL, PARAMS, sequences.astype(np.int32))[:, -1]
    scores = np.asarray(logits, np.float64) / temperature
    mass = np.exp(scores - scores.max(axis=1, keepdims=True))
    return mass / mass.sum(axis=1, keepdims=True)


def chi_square(counts: np.ndarray, probability: np.ndarray) -> float:
    """The p-value; tokens expected fewer than five times are one class with the next rarest."""
    order = np.argsort(probability)
    got, want = counts[order], probability[order] * counts.sum()
    rare = np.sum(want < 5) + 1
    got, want = ([values[:rare].sum(), *values[rare:]] for values in (got, want))
    return float(stats.chisquare(got, want).pvalue)


# --- what is compiled


def test_a_thousand_verify_steps_are_one_program():
    state = started(limits=100_000, stops=False)
    drafter = NGramDrafter(history=65)
    memory = drafter.begin(MODEL, None, PROMPTS, state, draft_tokens=3)
    before = speculate_block._cache_size()
    for _ in range(250):
        state, memory, _, counts = speculate_block(
            MODEL, PARAMS, state, drafter, None, memory, steps=BLOCK, draft_tokens=3
        )
    assert speculate_block._cache_size() - before == 1
    assert counts.steps.tolist() == [BLOCK] * BATCH
    assert min(state.positions.tolist()) > 1000


def compiled_block(slots: int):
    sampling = swa.Sampling.build(slots)
    state = jax.eval_shape(
        lambda: decoding.DecodeState(
            empty_cache(slots),
            *(jnp.zeros(slots, jnp.int32) for _ in range(6)),
            jnp.zeros((slots, 3), jnp.int32),
            sampling,
        )
    )
    memory = jax.ShapeDtypeStruct((slots, 64), jnp.int32)
    drafter = NGramDrafter(history=64)
    lowered = speculate_block.lower(
        MODEL, PARAMS, state, drafter, None, memory, steps=2, draft_tokens=3
    )
    return lowered.compile(), state.cache.nbytes


@pytest.mark.donates
def test_the_compiled_block_copies_no_cache():
    compiled, cache_bytes = compiled_block(BATCH)
    analysis = compiled.memory_analysis()
    assert analysis.alias_size_in_bytes >= cache_bytes
    copies = [
        line for line in compiled.as_text().splitlines()
        if " copy(" in line and f"u8[{BATCH}," in line
    ]  # fmt: skip
    assert copies == []


# --- refusals


@pytest.mark.parametrize("draft_tokens", [-1, ROOM + 1, 1.0, True, "2"])
def test_more_drafts_than_the_ring_has_room_for_are_refused(draft_tokens):
    with pytest.raises(ValueError, match=r"draft_tokens: expected 0 to 6 \(capacity 22 - window"):
        swa.generate(MODEL, PARAMS, PROMPTS, max_new_tokens=3, draft_tokens=draft_tokens)


def test_a_drafter_that_does_not_fit_is_refused():
    def generate(drafter, params=None, draft_tokens=3):
        return swa.generate(
            MODEL,
            PARAMS,
            PROMPTS,
            max_new_tokens=3,
            draft_tokens=draft_tokens,
            drafter=drafter,
            drafter_params=params,
        )

    other = dataclasses.replace(CONFIG, vocab_size=51)
    with pytest.raises(ValueError, match="drafter: expected a vocabulary of 50, got 51"):
        generate(ModelDrafter(swa.Decoder(other)), decoder_params(other))
    narrow = decoder_config(attention_config(WINDOW, swa.F32, draft_tokens=0), num_layers=1)
    with pytest.raises(ValueError, match=r"draft_tokens: expected at most 2 .* got 3"):
        generate(ModelDrafter(swa.Decoder(narrow)), decoder_params(narrow))
    with pytest.raises(ValueError, match="draft_tokens: expected 1 or more with a drafter, got 0"):
        generate(NGramDrafter(), draft_tokens=0)
    with pytest.raises(ValueError, match="drafter_params: expected none without a drafter"):
        generate(None, PARAMS)
    with pytest.raises(ValueError, match="drafter: expected a Drafter, got str"):
        generate("x")
    with pytest.raises(ValueError, match="drafter: expected a Drafter, got the class NGramDrafter"):
        generate(NGramDrafter)
    with pytest.raises(ValueError, match="drafter: expected a Drafter, got str"):
        speculate_block(MODEL, PARAMS, started(), "x", None, None, steps=1, draft_tokens=2)


@dataclasses.dataclass(frozen=True)
class ShapelessDrafter(ScriptedDrafter):
    """Drafts of one request for all of them."""

    def propose(self, params, memory, state, *, draft_tokens):
        drafts, memory = super().propose(params, memory, state, draft_tokens=draft_tokens)
        return drafts[:1], memory


def test_drafts_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"the drafter's drafts: expected shape \(3, 2\)"):
        speculate(started(), ShapelessDrafter(), script("greedy", 1.0), 2)
    with pytest.raises(ValueError, match="drafter_params: expected the variables"):
        swa.generate(
            MODEL, PARAMS, PROMPTS, max_new_tokens=3, draft_tokens=2, drafter=ModelDrafter(MODEL)
        )
    with pytest.raises(ValueError, match="model: expected a Decoder, got DecoderConfig"):
        ModelDrafter(CONFIG)


@pytest.mark.parametrize(
    "fields", [{"shortest": 0}, {"longest": 2, "shortest": 3}, {"history": 8}, {"longest": 1.5}]
)
def test_n_gram_sizes_that_make_no_sense_are_refused(fields):
    with pytest.raises(ValueError, match="expected"):
        NGramDrafter(**fields)
