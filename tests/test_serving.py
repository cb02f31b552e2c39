"""Many requests at once: each gets what it gets alone, in its turn, and nothing is compiled."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import attention_config, decoder_config, decoder_params, largest_error

import swa_jax as swa
from swa_jax import admission, decoding, prefilling, serving
from swa_jax.recompute import whole_sequence_logits
from swa_jax.requests import Request, Result
from swa_jax.sampling import sample
from swa_jax.serving import Server, serve

pytestmark = pytest.mark.quick_compilation

WINDOW, VOCABULARY = 16, 50
CONFIG = decoder_config(attention_config(WINDOW, swa.V41), num_layers=1)
MODEL = swa.Decoder(CONFIG)
PARAMS = decoder_params(CONFIG)

# Chunks and blocks shorter than the window; fewer lanes than slots, fewer slots than requests.
SLOTS, BLOCK, CHUNK, LANES, STOPS = 3, 4, 8, 2, 2
OPTIONS = {
    "slots": SLOTS,
    "block_steps": BLOCK,
    "chunk": CHUNK,
    "prefill_lanes": LANES,
    "max_stop_tokens": STOPS,
}


def random_request(rng: np.random.Generator, name: int) -> Request:
    """A prompt of up to five windows, with any limit, settings and stop tokens."""
    return Request(
        prompt=rng.integers(0, VOCABULARY, rng.integers(1, 5 * WINDOW + 1)).tolist(),
        max_new_tokens=int(rng.choice([1, 2, 7, 25, 40])),
        sampling=swa.Sampling.build(
            1,
            temperature=float(rng.choice([0.0, 0.7, 1.3])),
            top_k=int(rng.choice([0, 10])),
            top_p=float(rng.choice([1.0, 0.9])),
            keys=jax.random.key(name)[None],
        ),
        stop_tokens=rng.integers(0, VOCABULARY, STOPS).tolist(),
        name=name,
    )


REQUESTS = [random_request(np.random.default_rng(109 + name), name) for name in range(16)]

# One width of prefill for each of them alone, however long it is.
OF_SEVERAL_CHUNKS = [request.name for request in REQUESTS if len(request.prompt) > CHUNK]


@jax.jit
def next_scores(params, state: decoding.DecodeState) -> jax.Array:
    """Scores of the next token of each slot, by a step whose rows are not kept."""
    place = jnp.where(state.remaining > 0, state.positions, -1)
    meta = swa.DecodeMetadata.build(CONFIG.geometry, state.state_ids, place[:, None])
    hidden, _ = MODEL.apply(params, state.tokens[:, None], state.cache, meta)
    return MODEL.apply(params, hidden[:, 0], method="logits")


@dataclasses.dataclass
class Run:
    """What was seen of requests, by name.

    Attributes:
      results: in finishing order.
      scores: hidden states of the prompt's end, then scores at the start of each block.
      acquired: the step and the slot in which a request began.
    """

    results: dict[int, Result] = dataclasses.field(default_factory=dict)
    scores: dict[int, list[np.ndarray]] = dataclasses.field(default_factory=dict)
    acquired: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)


def run(arrivals: dict[int, list[Request]], *, poison: bool = False) -> Run:
    """Serves requests that arrive before given steps; the clock counts the steps.

    With `poison` every row of a free slot is NaN before each chunk and each block.
    """
    server, seen = Server(MODEL, PARAMS, **OPTIONS), Run()
    names: list[int] = []
    step = 0

    def poisoned(cache):
        free = np.array(server.slots.free, np.int32)
        if not poison or not free.size:
            return cache
        blocks = tuple(block.at[free].set(255) for block in cache.blocks)
        return dataclasses.replace(cache, blocks=blocks)

    def prefill_chunk(model, params, cache, *arguments):
        for slot, owner in enumerate(server.slots.owners):
            if owner is not None:
                seen.acquired.setdefault(names[owner], (step, slot))
        return prefilling.prefill_chunk(model, params, poisoned(cache), *arguments)

    def admit(model, params, state, last, slots, *arguments):
        for lane in np.flatnonzero(slots >= 0):
            name = names[server.slots.owners[slots[lane]]]
            seen.scores[name] = [np.asarray(last)[lane]]
        return admission.admit(model, params, state, last, slots, *arguments)

    def decode_block(model, params, state, steps):
        state = dataclasses.replace(state, cache=poisoned(state.cache))
        scores, remaining = np.asarray(next_scores(params, state)), np.asarray(state.remaining)
        for slot, owner in enumerate(server.slots.owners):
            if owner is not None and remaining[slot] > 0:
                seen.scores[names[owner]].append(scores[slot])
        return decoding.decode_block(model, params, state, steps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "prefill_chunk", prefill_chunk)
        patch.setattr(serving, "admit", admit)
        patch.setattr(serving, "decode_block", decode_block)
        patch.setattr(serving.time, "perf_counter", lambda: step)
        while server.pending or step <= max(arrivals):
            for request in arrivals.get(step, ()):
                names.append(request.name)
                server.submit(request)
            seen.results |= {result.request.name: result for result in server.step()}
            step += 1
    assert server.slots.free == tuple(range(SLOTS))
    return seen


def arriving(order: str) -> dict[int, list[Request]]:
    """The requests by the step before which they arrive."""
    steps = {
        "at_once": [0] * len(REQUESTS),
        "one_by_one": range(0, 2 * len(REQUESTS), 2),
        "last_first_in_bursts": [9 - 3 * (i // 4) for i in range(len(REQUESTS))],
    }[order]
    arrivals: dict[int, list[Request]] = {}
    for step, request in zip(steps, REQUESTS, strict=True):
        arrivals.setdefault(step, []).append(request)
    return arrivals


def programs() -> tuple[int, ...]:
    calls = (prefilling.prefill_chunk, admission.admit, decoding.decode_block)
    return tuple(call._cache_size() for call in calls)


@pytest.fixture(scope="module")
def first_run():
    """A run, and how many programs prefill, admission and blocks compiled for it."""
    before = programs()
    seen = run(arriving("at_once"), poison=True)
    return seen, tuple(np.subtract(programs(), before).tolist())


@pytest.fixture(scope="module")
def alone(first_run):
    """Each request by itself in the same pool."""
    return {request.name: run({0: [request]}) for request in REQUESTS}


@pytest.fixture(scope="module", params=["at_once", "one_by_one", "last_first_in_bursts"])
def busy(request, first_run):
    return first_run[0] if request.param == "at_once" else run(arriving(request.param), poison=True)


# --- the same answer


def test_each_result_is_that_of_the_request_alone_in_the_same_pool_bit_for_bit(busy, alone):
    assert sorted(busy.results) == sorted(alone)
    for name, seen in alone.items():
        got, want = busy.results[name], seen.results[name]
        assert (got.tokens, got.finish) == (want.tokens, want.finish)
        assert got.request is REQUESTS[name]
        np.testing.assert_array_equal(np.isfinite(seen.scores[name][0]), True)
        assert len(seen.scores[name]) == len(busy.scores[name])
        for mine, others in zip(busy.scores[name], seen.scores[name], strict=True):
            np.testing.assert_array_equal(mine, others)


def test_the_traffic_has_every_kind_of_request(first_run):
    results = first_run[0].results
    assert {result.finish for result in results.values()} == {"stop", "length"}
    lengths = [len(request.prompt) for request in REQUESTS]
    assert min(lengths) < CHUNK
    assert max(lengths) > 8 * CHUNK
    assert len({slot for _, slot in first_run[0].acquired.values()}) == SLOTS
    assert max(len(scores) for scores in first_run[0].scores.values()) > 5
    assert list(results) != sorted(results)


def chosen_from(seen: Run, name: int) -> dict[int, np.ndarray]:
    """The scores that were seen of a request, by the position of the token they chose."""
    end, (hidden, *scores) = len(REQUESTS[name].prompt), seen.scores[name]
    head = np.asarray(PARAMS["params"]["head"])
    return {end: head @ hidden} | {end + 1 + BLOCK * k: row for k, row in enumerate(scores)}


def test_scores_are_those_of_a_recompute_without_a_cache(first_run):
    sequences = np.zeros((len(REQUESTS), 128), np.int32)
    for name, result in first_run[0].results.items():
        sequence = [*REQUESTS[name].prompt, *result.tokens]
        sequences[name, : len(sequence)] = sequence
    whole = np.asarray(whole_sequence_logits(MODEL, PARAMS, sequences))
    errors = [
        largest_error(scores, whole[name, position - 1])
        for name in first_run[0].results
        for position, scores in chosen_from(first_run[0], name).items()
    ]
    assert max(errors) < 3e-2
    assert np.median(errors) < 1e-3


def test_tokens_are_chosen_by_the_settings_of_their_own_request(first_run):
    results = first_run[0].results
    seen = [
        (name, position, scores)
        for name in results
        for position, scores in chosen_from(first_run[0], name).items()
    ]
    settings = [REQUESTS[name].sampling for name, _, _ in seen]
    every = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *settings)
    positions = np.array([position for _, position, _ in seen], np.int32)
    tokens = jax.jit(sample)(np.stack([scores for *_, scores in seen]), positions, every)
    for (name, position, _), token in zip(seen, np.asarray(tokens), strict=True):
        place = position - len(REQUESTS[name].prompt)
        if place == len(results[name].tokens):
            assert token in REQUESTS[name].stop_tokens
        else:
            assert token == results[name].tokens[place]


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_SEVERAL_CHUNKS)
def test_tokens_are_those_of_generate_for_the_request_alone_up_to_ties(first_run, name):
    result, request = first_run[0].results[name], REQUESTS[name]
    (want,) = swa.generate(
        MODEL,
        PARAMS,
        [request.prompt],
        max_new_tokens=request.max_new_tokens,
        sampling=request.sampling,
        stop_tokens=request.stop_tokens,
        block_steps=BLOCK,
        prefill_chunk=CHUNK,
    )
    tokens = list(result.tokens)
    if tokens == want:
        return
    # the stop token was chosen, too: one of them must tie where the tokens end
    ends = [[stop] for stop in request.stop_tokens] if result.finish == "stop" else [[]]
    found = [
        swa.compare_with_recompute(MODEL, PARAMS, request.prompt, tokens + end, request.sampling)
        for end in ends
    ]
    assert any(comparison.equal and comparison.ties for comparison in found)


# --- order and time


def test_requests_begin_in_the_order_of_submission_as_soon_as_slot_and_lane_are_free(busy):
    arrived = {name: result.arrived for name, result in busy.results.items()}
    order = sorted(arrived, key=lambda name: (arrived[name], name))
    steps = [busy.acquired[name][0] for name in order]
    assert steps == sorted(steps)
    finished = {
        name: result.reads[-1][0] if result.reads else None for name, result in busy.results.items()
    }
    for place, name in enumerate(order):
        began = busy.acquired[name][0]
        chunks = -(-len(REQUESTS[name].prompt) // CHUNK)
        reads = busy.results[name].reads
        if reads:  # a chunk in each step, whatever decodes
            assert reads[0][0] == began + chunks - 1
        if began > arrived[name]:  # then the step before had no lane or no slot for it
            now = began - 1
            ahead = order[:place]
            prefilling = sum(
                busy.acquired[other][0]
                <= now
                < busy.acquired[other][0] - (-len(REQUESTS[other].prompt) // CHUNK)
                for other in ahead
            )
            holding = sum(
                busy.acquired[other][0] <= now
                and (finished[other] is None or finished[other] >= now)
                for other in ahead
            )
            assert prefilling == LANES or holding >= SLOTS


def test_a_request_that_decodes_gets_a_block_in_every_step_beside_any_prefill(busy):
    for result in busy.results.values():
        if result.reads:
            (first, one), *blocks = result.reads
            assert one == 1
            # the first block follows the first token in the same step
            assert [step for step, _ in blocks] == list(range(first, first + len(blocks)))
            assert [count for _, count in blocks[:-1]] == [BLOCK] * (len(blocks) - 1)


def test_a_slot_is_used_again_in_the_step_after_its_release():
    """One chunk, the first token and one block: each of these lives for one step."""
    seen = run({0: [Request([name], 1 + BLOCK, name=name) for name in range(7)]})
    assert seen.acquired == {
        0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1), 4: (2, 0), 5: (2, 1), 6: (3, 0),
    }  # fmt: skip
    assert [result.reads for result in seen.results.values()] == [
        ((step, 1), (step, BLOCK)) for step in (0, 0, 1, 1, 2, 2, 3)
    ]


def test_results_come_in_the_order_in_which_requests_finish():
    limits = {"a": 1 + 3, "b": 1 + 2, "c": 1, "d": 1 + 3, "e": 2 + BLOCK}
    requests = [Request([5], limit, name=name) for name, limit in limits.items()]
    seen = run({0: requests})
    assert list(seen.results) == ["b", "a", "c", "d", "e"]
    assert [len(result.tokens) for result in seen.results.values()] == [3, 4, 1, 4, 6]


def test_times_are_from_arrival_to_the_first_token_and_a_block_spread_over_its_tokens():
    result = Result(Request([1], 7), (3,) * 7, "length", 2.0, ((5.0, 1), (6.0, 4), (6.5, 2)))
    assert result.time_to_first_token == 3.0
    assert result.times_between_tokens == (0.25, 0.25, 0.25, 0.25, 0.25, 0.25)
    nothing = Result(Request([1], 7), (), "stop", 2.0, ())
    assert (nothing.time_to_first_token, nothing.times_between_tokens) == (None, ())


# --- ends


def test_a_stop_token_ends_a_request_wherever_it_comes_and_is_not_returned(alone):
    free = run({0: [Request(REQUESTS[0].prompt, 12, name="free")]}).results["free"].tokens
    places = {}
    for place, token in enumerate(free):
        places.setdefault(token, place)
    assert len(places) > 3
    for stop, place in places.items():
        request = Request(REQUESTS[0].prompt, 12, stop_tokens=[stop], name="stopped")
        result = run({0: [request]}).results["stopped"]
        assert (result.tokens, result.finish) == (free[:place], "stop")
        assert (result.time_to_first_token is None) == (place == 0)


def test_cancelled_requests_keep_their_tokens_and_the_pool_goes_on(alone):
    server = Server(MODEL, PARAMS, **OPTIONS)
    long = Request([7] * 5, 100, name="long")
    prefilling = Request([1] * 40, 5, name="prefilling")
    requests = [long, prefilling, *(Request([2] * 40, 5, name=name) for name in "xyz")]
    for request in requests:
        server.submit(request)
    assert server.step() == []
    assert server.step() == []
    assert (server.pending, server.tokens_chosen) == (5, 1 + 2 * BLOCK)
    results = server.cancel()
    assert [result.request for result in results] == requests
    assert [result.finish for result in results] == ["cancelled"] * 5
    assert [len(result.tokens) for result in results] == [1 + 2 * BLOCK, 0, 0, 0, 0]
    assert (server.pending, server.slots.free) == (0, (0, 1, 2))
    # Were "long" still decoding in slot 0, beside the other, then its rows would be those of the
    # positions 21 to 23 when the last chunk of this prompt is prefilled.
    prompt = next(request for request in REQUESTS if 3 * CHUNK < len(request.prompt) < 4 * CHUNK)
    server.submit(prompt)
    server.submit(Request([3], 60))
    after = []
    while server.pending:
        after += server.step()
    tokens = {result.request: result.tokens for result in after}
    assert tokens[prompt] == alone[prompt.name].results[prompt.name].tokens


# --- programs


def test_one_program_each_for_prefill_admission_and_blocks(first_run):
    assert first_run[1] == (1, 1, 1)


def test_nothing_is_compiled_in_a_long_run(first_run):
    compiled = []

    def listen(event, seconds, **_):
        if "backend_compile" in event:
            compiled.append(event)

    rng = np.random.default_rng(7)
    requests = [random_request(rng, 1000 + name) for name in range(60)]
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        results = list(serve(MODEL, PARAMS, requests, **OPTIONS))
        assert compiled == []
        jax.jit(lambda x: x + 1).lower(np.float32(1)).compile()
        assert compiled, "the listener hears of compilations"
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert sorted(result.request.name for result in results) == list(range(1000, 1060))


@pytest.mark.donates
def test_the_cache_stays_where_it_is():
    server = Server(MODEL, PARAMS, **OPTIONS)
    (block,) = server.state.cache.blocks
    address = block.unsafe_buffer_pointer()
    server.submit(Request([1, 2, 3], 20))
    while server.pending:
        server.step()
    assert block.is_deleted()
    assert server.state.cache.blocks[0].unsafe_buffer_pointer() == address


# --- refusals


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": []}, r"prompt: expected at least one token, got shape \(0,\)"),
        ({"prompt": [50]}, r"prompt: expected token ids from 0 to 49, got \[50\]"),
        ({"prompt": "text"}, "prompt: expected token ids or bytes, got text 'text'"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected an integer of 1 or more"),
        ({"max_new_tokens": 1.5}, "max_new_tokens: expected an integer of 1 or more"),
        (
            {"max_new_tokens": 2**31 - 1},
            "max_new_tokens: expected positions within int32, got 2147483647 after a prompt of 1",
        ),
        ({"stop_tokens": [1, 2, 3]}, "stop_tokens: expected at most 2, got 3"),
        ({"stop_tokens": 5}, "stop_tokens: expected a sequence of token ids, got 5"),
        ({"stop_tokens": None}, "stop_tokens: expected a sequence of token ids, got None"),
        ({"stop_tokens": [50]}, r"stop_tokens: expected token ids from 0 to 49, got \[50\]"),
        (
            {"sampling": swa.Sampling.build(2)},
            r"sampling.temperature: expected shape \(1\), got \(2,\)",
        ),
        (
            {"sampling": swa.Sampling.build(1, keys=jax.random.key(0, impl="rbg")[None])},
            "sampling.keys: expected key<fry>, got key<rbg>",
        ),
        ({"sampling": {"temperature": 1}}, "sampling: expected a Sampling, got dict"),
    ],
)
def test_a_bad_request_is_refused_and_leaves_no_trace(fields, message):
    server = Server(MODEL, PARAMS, **OPTIONS)
    with pytest.raises(ValueError, match=message):
        server.submit(Request(**{"prompt": [1], "max_new_tokens": 4} | fields))
    assert server.pending == 0
    assert server.step() == []


@pytest.mark.parametrize(
    ("requests", "options", "message"),
    [
        ([b"a"], {}, "request: expected a Request, got bytes"),
        (None, {}, "requests: expected an Iterable, got NoneType"),
        ([], {"slots": 0}, "count: expected an integer of 1 or more, got 0"),
    ],
)
def test_serve_refuses_before_it_is_asked_for_a_result(requests, options, message):
    with pytest.raises(ValueError, match=message):
        serve(MODEL, PARAMS, requests, **OPTIONS | options)


def test_a_step_that_was_interrupted_is_not_gone_on_from(monkeypatch):
    server = Server(MODEL, PARAMS, **OPTIONS)
    server.submit(Request([1] * (2 * CHUNK), 4))
    server.step()
    call = serving.prefill_chunk

    def interrupted(*arguments):
        call(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(serving, "prefill_chunk", interrupted)
    with pytest.raises(KeyboardInterrupt):
        server.step()
    monkeypatch.setattr(serving, "prefill_chunk", call)
    with pytest.raises(ValueError, match="step: expected a server whose last step ended"):
        server.step()
    assert [result.finish for result in server.cancel()] == ["cancelled"]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("slots", "count"),
        ("block_steps", "block_steps"),
        ("chunk", "chunk"),
        ("prefill_lanes", "prefill_lanes"),
        ("max_stop_tokens", "max_stop_tokens"),
    ],
)
def test_a_pool_without_a_size_is_refused(name, shown):
    with pytest.raises(ValueError, match=f"{shown}: expected an integer of 1 or more, got 0"):
        Server(MODEL, PARAMS, **OPTIONS | {name: 0})
