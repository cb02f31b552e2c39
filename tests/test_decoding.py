"""Decoding loops against the recompute; what a block may touch, copy and compile."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick_compilation import QUICK_COMPILATION
from small_models import attention_config, decoder_config, decoder_params

import swa_jax as swa
from swa_jax import decoding, generation, prefilling, recompute
from swa_jax.prompts import token_ids
from swa_jax.sampling import request_keys

pytestmark = pytest.mark.quick_compilation

WINDOW, ROOM = 16, 6  # the ring has 22 rows
VOCABULARY = 50
CONFIG = decoder_config(attention_config(WINDOW, swa.V41), num_layers=2)
MODEL = swa.Decoder(CONFIG)
PARAMS = decoder_params(CONFIG)

# One token; less than the window; more than window, ring and prefill chunk.
PROMPTS = [np.random.default_rng(n).integers(0, VOCABULARY, n).tolist() for n in (1, 5, 50)]
LIMITS = [40, 30, 15]
BATCH, BLOCK, CHUNK = len(PROMPTS), 8, 32
ROW_TOLERANCE = 3e-2  # of the largest score, where quantised rows are made by different programs

SETTINGS = {
    "greedy": lambda: swa.Sampling.build(BATCH),
    "sampled": lambda: swa.Sampling.build(
        BATCH,
        temperature=[0.7, 1.0, 1.3],
        top_k=[0, 20, 0],
        top_p=[1.0, 1.0, 0.95],
        keys=request_keys(jax.random.key(5), BATCH),
    ),
}


def of_request(sampling: swa.Sampling, i: int) -> swa.Sampling:
    return jax.tree.map(lambda leaf: leaf[i : i + 1], sampling)


def generate(model=MODEL, params=PARAMS, prompts=PROMPTS, **arguments):
    usual = {"max_new_tokens": LIMITS, "block_steps": BLOCK, "prefill_chunk": CHUNK}
    return swa.generate(model, params, prompts, **usual | arguments)


def empty_cache(slots: int = BATCH) -> swa.RingCache:
    return swa.RingCache.for_decoder(CONFIG, slots)


def started(max_new_tokens=100, prompts=PROMPTS, **arguments) -> decoding.DecodeState:
    """Requests after their prefill."""
    usual = {"sampling": SETTINGS["sampled"](), "chunk": CHUNK}
    return decoding.begin(
        MODEL, PARAMS, empty_cache(), prompts, max_new_tokens=max_new_tokens, **usual | arguments
    )


def decode(state: decoding.DecodeState) -> tuple[decoding.DecodeState, np.ndarray]:
    state, tokens = decoding.decode_block(MODEL, PARAMS, state, BLOCK)
    return state, np.asarray(tokens)


def rows_of(cache: swa.RingCache, slot: int) -> np.ndarray:
    """uint8[layers, ring rows, row bytes] of one state slot, in the order they lie in."""
    return np.stack([np.asarray(cache.layer(i).logical())[slot, :, 0] for i in range(cache.layers)])


def assert_same_up_to_ties(got, want, prompt, sampling) -> None:
    """The same tokens, or others that the recompute holds for ties."""
    if got != want:
        found = swa.compare_with_recompute(MODEL, PARAMS, prompt, got, sampling)
        assert found.equal
        assert found.ties


@pytest.fixture(scope="module", params=list(SETTINGS))
def run(request):
    sampling = SETTINGS[request.param]()
    return sampling, generate(sampling=sampling)


@pytest.fixture(scope="module")
def greedy():
    return generate()


# --- the same answer as the recompute


@pytest.mark.parametrize(
    "i", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, BATCH))]
)
def test_tokens_are_those_of_the_recompute(run, i):
    sampling, tokens = run
    found = swa.compare_with_recompute(
        MODEL, PARAMS, PROMPTS[i], tokens[i], of_request(sampling, i)
    )
    assert found.equal
    assert found.differing == 0
    assert found.tokens == LIMITS[i]
    assert found.largest_logit_difference <= ROW_TOLERANCE * found.largest_logit


def test_sampled_tokens_are_not_the_greedy_ones(greedy):
    sampled = generate(sampling=SETTINGS["sampled"]())
    assert all(a != b for a, b in zip(greedy, sampled, strict=True))


@pytest.mark.parametrize("name", SETTINGS)
def test_comparison_finds_a_wrong_token(name, greedy):
    sampling = SETTINGS[name]()
    tokens = greedy if name == "greedy" else generate(sampling=sampling)
    sampling = of_request(sampling, 0)
    last = [*tokens[0][:-1], (tokens[0][-1] + 1) % VOCABULARY]
    found = swa.compare_with_recompute(MODEL, PARAMS, PROMPTS[0], last, sampling)
    assert (found.equal, found.differing) == (False, 1)
    middle = list(tokens[0])
    middle[20] = (middle[20] + 1) % VOCABULARY
    found = swa.compare_with_recompute(MODEL, PARAMS, PROMPTS[0], middle, sampling)
    assert not found.equal
    assert found.differing >= 1


@pytest.mark.parametrize(
    ("share", "want"), [(0.99, (True, 1, 0)), (0.9, (False, 0, 1))], ids=["tie", "not_quite"]
)
def test_comparison_takes_nearly_equal_scores_for_a_tie_and_counts_it(share, want):
    half = VOCABULARY // 2
    head = np.array(PARAMS["params"]["head"])
    head[half:] = head[:half] * np.float32(share)  # every token has a twin, a little worse
    params = {"params": {**PARAMS["params"], "head": head}}
    tokens = generate(params=params)[0]
    assert max(tokens) < half
    twin = [*tokens[:-1], tokens[-1] + half]
    found = swa.compare_with_recompute(MODEL, params, PROMPTS[0], twin)
    assert (found.equal, found.ties, found.differing) == want


def test_comparison_judges_by_the_recompute_and_not_by_the_ring(greedy, monkeypatch):
    right = recompute.ring_logits

    def wrong(*arguments):
        return jnp.roll(right(*arguments), 1, axis=-1)

    monkeypatch.setattr(recompute, "ring_logits", wrong)
    found = swa.compare_with_recompute(MODEL, PARAMS, PROMPTS[0], greedy[0])
    assert found.equal
    assert found.largest_logit_difference > 0.5 * found.largest_logit


@dataclasses.dataclass(frozen=True)
class NarrowWindow:
    """Tokens of the same parameters with half the window, and what its calls compiled."""

    tokens: list[list[int]]
    compiled_first: tuple[int, ...]
    compiled_later: tuple[int, ...]


def programs() -> tuple[int, ...]:
    return (prefilling.prefill_chunk._cache_size(), decoding.decode_block._cache_size())


@pytest.fixture(scope="module")
def narrow():
    model = swa.Decoder(decoder_config(attention_config(WINDOW // 2, swa.V41), num_layers=2))
    other = [[3] * 60, [4] * 33, [5, 6]]
    counts = [programs()]
    tokens = generate(model)
    counts.append(programs())
    generate(model, prompts=other, max_new_tokens=[1, 50, 9], sampling=SETTINGS["sampled"]())
    counts.append(programs())
    first, later = (
        tuple(b - a for a, b in zip(*pair, strict=True)) for pair in (counts[:2], counts[1:])
    )
    return NarrowWindow(tokens, first, later)


@pytest.mark.parametrize("i", range(BATCH))
def test_comparison_finds_a_cache_of_another_window(narrow, i):
    found = swa.compare_with_recompute(MODEL, PARAMS, PROMPTS[i], narrow.tokens[i])
    assert not found.equal
    assert found.differing >= 1


def test_one_program_for_a_batch_and_a_block_and_none_for_a_position(narrow):
    assert narrow.compiled_first == (1, 1), "several chunks and blocks, one program each"
    assert narrow.compiled_later == (0, 0), "other lengths, positions, limits and settings"


def test_replayed_scores_are_those_of_prefill_and_recompute():
    prompt = np.asarray(PROMPTS[2], np.int32)
    ids, padded = np.zeros(1, np.int32), np.full((1, 64), -1, np.int32)
    padded[0, : len(prompt)] = prompt
    replayed, _ = decoding.replay(MODEL, PARAMS, empty_cache(1), ids, padded, ids)
    replayed = np.asarray(replayed)[0, : len(prompt)]
    whole = np.asarray(recompute.whole_sequence_logits(MODEL, PARAMS, prompt[None]))[0]
    _, last = decoding.prefill(MODEL, PARAMS, empty_cache(1), ids, [prompt])
    prefilled = np.asarray(MODEL.apply(PARAMS, last, method="logits"))[0]
    tolerance = ROW_TOLERANCE * np.abs(whole).max()
    np.testing.assert_allclose(replayed, whole, atol=tolerance)
    np.testing.assert_allclose(replayed[-1], prefilled, atol=tolerance)


def test_replay_stores_no_row_for_padding():
    ids, padded = np.zeros(1, np.int32), np.full((1, 64), -1, np.int32)
    padded[0, :5] = PROMPTS[1]
    _, cache = decoding.replay(MODEL, PARAMS, empty_cache(1), ids, padded, ids)
    rows = rows_of(cache, 0)
    assert np.all(rows[:, :5].any(axis=-1))
    assert not rows[:, 5:].any()


def test_requests_go_on_from_rows_that_are_in_the_cache_already(greedy):
    slots = np.array([2, 0, 1], np.int32)
    cache, last = decoding.prefill(MODEL, PARAMS, empty_cache(), slots, PROMPTS, chunk=CHUNK)
    lengths = np.array([len(prompt) for prompt in PROMPTS])
    arguments = {"oldest": [0] * BATCH, "max_new_tokens": 9, "sampling": SETTINGS["greedy"]()}
    for ids, message in ([0, 1, 3], "state_ids: expected 0 to 2"), ([1, 1, 0], "expected distinct"):
        with pytest.raises(ValueError, match=message):
            decoding.begin_prefilled(MODEL, PARAMS, cache, last, ids, lengths, **arguments)
    for change, message in [
        ({"last": last.astype(jnp.int32)}, "last: expected a floating dtype"),
        ({"lengths": [3, 0, 4]}, r"lengths: expected 1 or more, got \[3, 0, 4\]"),
        ({"lengths": [3] * 3, "oldest": [0, 4, 0]}, r"oldest: expected 0 to .* got \[0, 4, 0\]"),
        ({"oldest": [0, 0, -1]}, r"oldest: expected 0 to the lengths .* got \[0, 0, -1\]"),
    ]:
        given = {"last": last, "state_ids": slots, "lengths": lengths} | arguments | change
        with pytest.raises(ValueError, match=message):
            decoding.begin_prefilled(MODEL, PARAMS, cache, **given)
    state = decoding.begin_prefilled(MODEL, PARAMS, cache, last, slots, lengths, **arguments)
    tokens = [[int(token)] for token in state.tokens]
    state, block = decode(state)
    for i in range(BATCH):
        got = tokens[i] + block[i].tolist()
        assert_same_up_to_ties(got, greedy[i][:9], PROMPTS[i], swa.Sampling.build(1))


# --- blocks, chunks, batches


def test_the_block_size_does_not_change_tokens(run):
    sampling, tokens = run
    assert generate(sampling=sampling, block_steps=5) == tokens


def test_the_prefill_chunk_bounds_a_call_and_does_not_change_tokens(run, monkeypatch):
    sampling, tokens = run
    widths = []
    call = prefilling.prefill_chunk

    def recorded(model, params, cache, last, state_ids, chunk, *addresses):
        widths.append(chunk.shape[1])
        return call(model, params, cache, last, state_ids, chunk, *addresses)

    monkeypatch.setattr(prefilling, "prefill_chunk", recorded)
    other = generate(sampling=sampling, prefill_chunk=11)  # shorter than the window
    assert widths == [11] * 5  # of 50 tokens
    for i in range(BATCH):
        assert_same_up_to_ties(other[i], tokens[i], PROMPTS[i], of_request(sampling, i))


@pytest.mark.parametrize("i", range(BATCH))
def test_what_else_is_in_the_batch_does_not_change_tokens(run, i):
    sampling, tokens = run
    prompts = [[7, 8, 9], [1] * 34, [2]]
    limits = [3, 50, 20]
    if i != 1:
        prompts[1] = [1] * 60
    prompts[i], limits[i] = PROMPTS[i], LIMITS[i]
    assert generate(prompts=prompts, max_new_tokens=limits, sampling=sampling)[i] == tokens[i]


def test_a_request_alone_gets_the_tokens_it_gets_in_a_batch(run):
    sampling, tokens = run
    alone = of_request(sampling, 2)
    arguments = {"max_new_tokens": LIMITS[2], "prefill_chunk": 256, "sampling": alone}
    (got,) = generate(prompts=PROMPTS[2:], **arguments)
    assert_same_up_to_ties(got, tokens[2], PROMPTS[2], alone)


def test_requests_in_another_order_get_their_own_tokens(run):
    sampling, tokens = run
    order = np.array([2, 0, 1])
    moved = jax.tree.map(lambda leaf: leaf[order], sampling)
    got = generate(
        prompts=[PROMPTS[i] for i in order],
        max_new_tokens=[LIMITS[i] for i in order],
        sampling=moved,
    )
    for i, mine in zip(order, got, strict=True):
        assert_same_up_to_ties(mine, tokens[i], PROMPTS[i], of_request(sampling, i))


def test_prompts_may_be_bytes_arrays_or_lists(greedy):
    assert generate(prompts=[bytes(PROMPTS[0]), np.array(PROMPTS[1]), tuple(PROMPTS[2])]) == greedy
    square = np.arange(3 * CHUNK, dtype=np.uint16).reshape(BATCH, CHUNK) % VOCABULARY
    assert generate(prompts=square) == generate(prompts=square.tolist())


# --- ends


def test_the_blocks_of_stream_join_to_what_generate_returns(greedy, capsys):
    arguments = {"max_new_tokens": LIMITS, "block_steps": BLOCK, "prefill_chunk": CHUNK}
    blocks = list(swa.stream(MODEL, PARAMS, PROMPTS, **arguments))
    assert [[len(tokens) for tokens in block] for block in blocks] == [
        [1, 1, 1], [8, 8, 8], [8, 8, 6], [8, 8, 0], [8, 5, 0], [7, 0, 0],
    ]  # fmt: skip
    assert [sum((block[i] for block in blocks), []) for i in range(BATCH)] == greedy
    assert capsys.readouterr() == ("", "")


def test_progress_is_shown_on_standard_error(greedy, capsys):
    assert generate(progress=True) == greedy
    output = capsys.readouterr()
    assert output.out == ""
    assert f"{sum(LIMITS)}/{sum(LIMITS)}" in output.err


def test_one_new_token_needs_no_decode_step(greedy):
    arguments = {"max_new_tokens": 1, "prefill_chunk": CHUNK}
    (only,) = swa.stream(MODEL, PARAMS, PROMPTS, **arguments)
    assert only == [tokens[:1] for tokens in greedy]


def test_stop_tokens_end_a_request_and_are_not_returned(run):
    sampling, tokens = run
    stops = [tokens[0][0], tokens[1][9]]  # one ends a request before it began
    want = []
    for row in tokens:
        ends = [place for place, token in enumerate(row) if token in stops]
        want.append(row[: min(ends, default=len(row))])
    assert want[0] == []
    assert generate(sampling=sampling, stop_tokens=stops) == want


def test_a_stopped_request_stores_no_more_rows():
    unstopped, tokens = decode(started())
    chosen = tokens[1].tolist()
    place = next(i for i in range(2, BLOCK) if chosen[i] not in chosen[:i])
    state, tokens = decode(started(stop_tokens=[chosen[place], chosen[place]]))
    assert tokens[1].tolist() == chosen[:place] + [-1] * (BLOCK - place)
    # The step that chose the stop token stored the row of the token before it.
    end = len(PROMPTS[1]) + place + 1
    assert (int(state.positions[1]), int(state.highest[1])) == (end, end - 1)
    assert int(state.remaining[1]) == 0
    rows, free = rows_of(state.cache, 1), rows_of(unstopped.cache, 1)
    np.testing.assert_array_equal(rows[:, :end], free[:, :end])
    assert np.all(rows[:, :end].any(axis=-1))
    assert not rows[:, end:].any()
    assert free[:, end : len(PROMPTS[1]) + BLOCK].any(axis=-1).all()


def test_finished_requests_leave_their_bytes_alone():
    state, tokens = decode(started(max_new_tokens=[100, 3, 100]))
    assert np.sum(tokens >= 0, axis=1).tolist() == [BLOCK, 2, BLOCK]
    assert state.tokens[1] == tokens[1, 1]
    before = np.asarray(state.cache.snapshot().blocks[0])
    held = jax.tree.map(np.asarray, (state.positions[1], state.tokens[1], state.highest[1]))
    state, tokens = decode(state)
    after = np.asarray(state.cache.blocks[0])
    np.testing.assert_array_equal(after[1], before[1])
    assert np.all(np.any(after[[0, 2]] != before[[0, 2]], axis=1))
    assert np.all(tokens[1] == -1)
    assert held == jax.tree.map(np.asarray, (state.positions[1], state.tokens[1], state.highest[1]))
    assert not rows_of(state.cache, 1)[:, len(PROMPTS[1]) + 2 :].any()


# --- donation


@pytest.mark.donates
def test_a_block_updates_the_cache_in_place():
    state = started()
    block = state.cache.blocks[0]
    address = block.unsafe_buffer_pointer()
    state, _ = decode(state)
    assert block.is_deleted()
    assert state.cache.blocks[0].unsafe_buffer_pointer() == address


def test_settings_outlive_the_requests_they_were_given_for():
    sampling = SETTINGS["sampled"]()
    generate(sampling=sampling, max_new_tokens=9)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(sampling))


@functools.cache
def compiled_block(slots: int):
    def make():
        each = [jnp.zeros(BATCH, jnp.int32) for _ in range(6)]
        stops = jnp.full((BATCH, 1), -1, jnp.int32)
        return decoding.DecodeState(empty_cache(slots), *each, stops, swa.Sampling.build(BATCH))

    state = jax.eval_shape(make)
    lowered = decoding.decode_block.lower(MODEL, PARAMS, state, BLOCK)
    return lowered.compile(QUICK_COMPILATION), state.cache.nbytes


@pytest.mark.donates
def test_the_compiled_block_copies_no_cache():
    program, cache_bytes = compiled_block(512)
    assert program.memory_analysis().alias_size_in_bytes >= cache_bytes
    shape = rf"u8\[512,{cache_bytes // 512}\]"
    text = program.as_text()
    assert re.search(shape, text)
    assert not re.search(rf"= {shape}\S* copy", text)


def test_idle_slots_cost_no_working_memory():
    few, many = compiled_block(8)[0].memory_analysis(), compiled_block(512)[0].memory_analysis()
    assert few.temp_size_in_bytes == many.temp_size_in_bytes


# --- rollback


@pytest.fixture(scope="module")
def advanced():
    """Requests one block after their prefill; never donated."""
    return decode(started())[0]


def test_rollback_goes_on_as_if_the_tokens_given_up_had_never_been():
    state, tokens = decode(started())
    first = np.asarray(started().tokens)
    back = np.array([3, ROOM + 1, 0])  # the second as far as the ring allows, the third not at all
    kept = BLOCK - back
    corrected = (np.asarray(state.tokens) + 7) % VOCABULARY
    corrected[2] = state.tokens[2]
    fresh, fresh_tokens = decode(started(max_new_tokens=kept + 1))
    positions = np.array([len(prompt) for prompt in PROMPTS]) + kept
    np.testing.assert_array_equal(fresh.positions, positions)
    for i in range(BATCH):
        np.testing.assert_array_equal(fresh_tokens[i, : kept[i]], tokens[i, : kept[i]])

    remaining = jnp.full(BATCH, 100, jnp.int32)
    fresh = dataclasses.replace(
        fresh, tokens=jnp.asarray(corrected, jnp.int32), remaining=remaining
    )
    rolled = decoding.rollback(state, positions, corrected)
    fresh, want = decode(fresh)
    rolled, got = decode(rolled)
    np.testing.assert_array_equal(got, want)
    assert not np.array_equal(got[0, :3], tokens[0, 5:])
    np.testing.assert_array_equal(rolled.positions, positions + BLOCK)
    for i in range(BATCH):
        end = int(positions[i]) + BLOCK
        np.testing.assert_array_equal(
            rolled.cache.export_slot(i, end).data, fresh.cache.export_slot(i, end).data
        )

    # Of the first request's tokens the recompute would choose every one but the corrected one.
    sequence = [first[0], *tokens[0, : kept[0] - 1], corrected[0], *got[0]]
    found = swa.compare_with_recompute(
        MODEL, PARAMS, PROMPTS[0], sequence, of_request(SETTINGS["sampled"](), 0)
    )
    assert (found.tokens, found.differing) == (6 + BLOCK, 1)


def test_rollback_may_be_repeated_and_is_measured_from_the_highest_row(advanced):
    now, tokens = np.asarray(advanced.positions), np.asarray(advanced.tokens)
    once = decoding.rollback(advanced, now - 4, tokens)
    twice = decoding.rollback(once, now - (ROOM + 1), tokens)
    np.testing.assert_array_equal(twice.positions, now - 7)
    np.testing.assert_array_equal(twice.highest, now - 1)
    with pytest.raises(ValueError, match="positions: expected at most 6"):
        decoding.rollback(once, now - (ROOM + 2), tokens)
    with pytest.raises(ValueError, match="positions: .* not after"):
        decoding.rollback(once, now, tokens)


@pytest.mark.parametrize("request_of_the_batch", range(BATCH))
@pytest.mark.parametrize("shift", [-100, -(ROOM + 2), 1])
def test_rollback_refuses_what_the_ring_does_not_hold(advanced, request_of_the_batch, shift):
    now = np.asarray(advanced.positions)
    positions = now.copy()
    positions[request_of_the_batch] += shift
    message = (
        rf"positions: expected at most 6 \(capacity 22 - window 16\) before the highest stored "
        rf"positions {re.escape(str((now - 1).tolist()))}, .* not after "
        rf"{re.escape(str(now.tolist()))}; got {re.escape(str(positions.tolist()))}\. "
        rf"Go back farther with a snapshot or a new prefill"
    )
    with pytest.raises(ValueError, match=message):
        decoding.rollback(advanced, positions, advanced.tokens)


def test_rollback_refuses_positions_whose_window_was_never_stored(advanced):
    now = np.asarray(advanced.positions)
    imported = jnp.asarray(now - 3 - (WINDOW - 1))  # rows that an import at now - 3 brings
    state = dataclasses.replace(advanced, oldest=jnp.maximum(imported, 0))
    decoding.rollback(state, now - 3, advanced.tokens)
    positions = now.copy()
    positions[2] -= 4
    with pytest.raises(ValueError, match="within rows that were stored"):
        decoding.rollback(state, positions, advanced.tokens)
    decoding.rollback(advanced, positions, advanced.tokens)


@pytest.mark.parametrize(
    ("positions", "tokens", "message"),
    [
        ([1, 2], [1, 2, 3], r"positions: expected shape \(3\), got \(2,\)"),
        ([1, 2, 3], 1, r"tokens: expected shape \(3\), got \(\)"),
        ([1.0, 2.0, 3.0], [1, 2, 3], "positions: expected integers, got dtype float"),
        ([1, 2, 3], [1, -7, 3], r"tokens: expected 0 or more, got \[1, -7, 3\]"),
    ],
)
def test_rollback_refuses_misshapen_arguments(advanced, positions, tokens, message):
    with pytest.raises(ValueError, match=message):
        decoding.rollback(advanced, positions, tokens)


def test_rollback_says_that_it_is_not_for_jit(advanced):
    with pytest.raises(ValueError, match="rollback: expected known values, got traced ones"):
        jax.jit(decoding.rollback)(advanced, advanced.positions, advanced.tokens)


# --- refusals


def changed_sampling(**fields):
    """An argument that `Sampling.build` would have refused."""
    return {"sampling": dataclasses.replace(swa.Sampling.build(3), **fields)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": None}, "model: expected a Decoder, got NoneType"),
        ({"model": CONFIG}, "model: expected a Decoder, got DecoderConfig"),
        ({"model": swa.Decoder}, "model: expected a Decoder, got the class Decoder"),
        ({"params": None}, "params: expected {'params': ...}, got NoneType"),
        ({"params": {"head": 1}}, r"params: expected {'params': ...}, got \['head'\]"),
        ({"prompts": []}, "prompts: expected at least one prompt, got none"),
        ({"prompts": np.zeros((0, 4), int)}, "prompts: expected at least one prompt, got none"),
        ({"prompts": [[1], []]}, r"prompts\[1\]: expected at least one token, got shape \(0,\)"),
        ({"prompts": [b""]}, r"prompts\[0\]: expected at least one token, got shape \(0,\)"),
        ({"prompts": [[[1, 2]]]}, r"prompts\[0\]: expected at least one token, got shape \(1, 2\)"),
        ({"prompts": [[[1, 2], [3]]]}, r"prompts\[0\]: expected values of one shape, got \[\["),
        ({"stop_tokens": [[1], [2, 3]]}, "stop_tokens: expected values of one shape, got"),
        ({"max_new_tokens": [1, [2], 3]}, "max_new_tokens: expected values of one shape, got"),
        ({"prompts": [[1, 50]]}, r"prompts\[0\]: expected token ids from 0 to 49, got \[1, 50\]"),
        ({"prompts": [[3], [-1]]}, r"prompts\[1\]: expected token ids from 0 to 49, got \[-1\]"),
        ({"prompts": [b"text"]}, r"prompts\[0\]: expected token ids from 0 to 49, got b'text'"),
        ({"prompts": [[1.0]]}, r"prompts\[0\]: expected token ids from 0 to 49, got \[1.0\]"),
        ({"prompts": [[True]]}, r"prompts\[0\]: expected token ids from 0 to 49, got \[True\]"),
        ({"block_steps": 0}, "block_steps: expected an integer of 1 or more, got 0"),
        ({"block_steps": 2.0}, "block_steps: expected an integer of 1 or more, got 2.0"),
        ({"block_steps": 2**31}, "block_steps: expected at most 2147483647, got 2147483648"),
        ({"block_steps": True}, "block_steps: expected an integer of 1 or more, got True"),
        ({"prefill_chunk": 0}, "chunk: expected an integer of 1 or more, got 0"),
        ({"prefill_chunk": 8.0}, "chunk: expected an integer of 1 or more, got 8.0"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected an integer of 1 or more, .* got 0"),
        ({"max_new_tokens": [4, 0, 4]}, r"max_new_tokens: expected .* got \[4, 0, 4\]"),
        ({"max_new_tokens": [4, 4]}, r"max_new_tokens: expected .* or 3 of them, got \[4, 4\]"),
        ({"max_new_tokens": 1.5}, "max_new_tokens: expected an integer of 1 or more, .* got 1.5"),
        ({"max_new_tokens": 2**31}, "max_new_tokens: expected .* got 2147483648"),
        ({"max_new_tokens": 2**31 - 3}, "positions within int32, got 2147483645 after a prompt of"),
        ({"prompts": None}, "prompts: expected a list of prompts, got NoneType"),
        ({"prompts": iter(PROMPTS)}, "prompts: expected a list of prompts, got list_iterator"),
        ({"prompts": np.int32(3)}, "prompts: expected a list of prompts, got int32"),
        ({"prompts": [3]}, r"prompts\[0\]: expected at least one token, got shape \(\)"),
        ({"stop_tokens": 5}, "stop_tokens: expected a sequence of token ids, got 5"),
        ({"stop_tokens": None}, "stop_tokens: expected a sequence of token ids, got None"),
        ({"stop_tokens": [50]}, r"stop_tokens: expected token ids from 0 to 49, got \[50\]"),
        ({"stop_tokens": [1.5]}, r"stop_tokens: expected token ids from 0 to 49, got \[1.5\]"),
        ({"sampling": swa.Sampling.build(2)}, r"sampling.*: expected shape \(3\), got \(2,\)"),
        ({"sampling": {}}, "sampling: expected a Sampling, got dict"),
        ({"sampling": 0.7}, "sampling: expected a Sampling, got float"),
        (
            changed_sampling(top_k=np.int32([3])),
            r"sampling.top_k: expected shape \(3\), got \(1,\)",
        ),
        (changed_sampling(top_k=np.int32([0, -1, 0])), "sampling.top_k: expected 0 or more, got"),
        (changed_sampling(top_p=np.float32([0, 1, 1])), "sampling.top_p: expected numbers from"),
        (
            changed_sampling(temperature=np.full(3, np.nan)),
            "sampling.temperature: expected numbers",
        ),
        (changed_sampling(keys=jax.random.key(0)[None]), "sampling.keys: expected 3 keys"),
    ],
)
def test_bad_arguments_of_generate_are_refused(arguments, message):
    prompts = arguments.get("prompts", PROMPTS)
    with pytest.raises(ValueError, match=message):
        generate(**{"max_new_tokens": 4} | arguments | {"prompts": prompts})


def test_stream_refuses_before_it_is_asked_for_a_block():
    with pytest.raises(ValueError, match="prompts: expected at least one prompt, got none"):
        swa.stream(MODEL, PARAMS, [], max_new_tokens=4)
    with pytest.raises(ValueError, match="prefill_chunk: expected an integer of 1 or more, got 0"):
        swa.stream(MODEL, PARAMS, PROMPTS, max_new_tokens=4, prefill_chunk=0)


def test_a_prefill_and_what_follows_it_ask_for_variables():
    cache, last = empty_cache(1), jnp.zeros((1, MODEL.config.hidden_size))
    options = {"max_new_tokens": 1, "sampling": swa.Sampling.build(1)}
    for call in (
        lambda: decoding.prefill(MODEL, PARAMS["params"], cache, [0], [[1]]),
        lambda: decoding.begin_prefilled(MODEL, {}, cache, last, [0], [1], oldest=[0], **options),
        lambda: swa.Server(MODEL, PARAMS["params"]),
    ):
        with pytest.raises(ValueError, match="params: expected {'params': ...}, got "):
            call()


def test_a_prefill_takes_a_state_slot_once():
    with pytest.raises(ValueError, match=r"state_ids: expected distinct .* got \[0, 0\]"):
        decoding.prefill(MODEL, PARAMS, empty_cache(2), [0, 0], PROMPTS[:2])


def test_a_cache_with_too_few_slots_is_refused():
    with pytest.raises(ValueError, match="cache: expected at least 3 state slots, got 2"):
        decoding.begin(
            MODEL,
            PARAMS,
            empty_cache(2),
            PROMPTS,
            max_new_tokens=4,
            sampling=swa.Sampling.build(BATCH),
        )


@pytest.mark.parametrize(
    ("prompt", "tokens", "requests", "message"),
    [
        ([], [1], 1, "prompt: expected at least one token"),
        ([1], [], 1, "tokens: expected at least one token"),
        ([50], [1], 1, r"prompt: expected token ids from 0 to 49, got \[50\]"),
        ([1], [1, -1], 1, r"tokens: expected token ids from 0 to 49, got \[1, -1\]"),
        ([1], [1], 2, r"sampling.*: expected shape \(1\), got \(2,\)"),
    ],
)
def test_bad_arguments_of_the_comparison_are_refused(prompt, tokens, requests, message):
    sampling = swa.Sampling.build(requests)
    with pytest.raises(ValueError, match=message):
        swa.compare_with_recompute(MODEL, PARAMS, prompt, tokens, sampling)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: swa.stream(None, PARAMS, PROMPTS, max_new_tokens=4), "model: expected a Decoder"),
        (lambda: swa.compare_with_recompute(CONFIG, PARAMS, [1], [1]), "model: expected a Decoder"),
        (lambda: swa.compare_with_recompute(MODEL, None, [1], [1]), "params: expected {'params'"),
        (lambda: next(generation.go_on(None, PARAMS, None)), "model: expected a Decoder"),
        (lambda: next(generation.go_on(MODEL, [], None)), "params: .*, got list"),
        (lambda: next(generation.go_on(MODEL, PARAMS, {})), "state: expected a DecodeState"),
        (lambda: generation.first_tokens(None), "state: expected a DecodeState, got NoneType"),
        (lambda: token_ids(None, "tokens", [1]), "model: expected a Decoder, got NoneType"),
    ],
)
def test_another_kind_of_object_is_refused_by_its_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()
