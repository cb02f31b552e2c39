"""One answer: decode, verify, chunked prefill and whole-sequence recompute agree, in any split."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import float64_reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_models import attention_config, decoder_config, decoder_params, quick_jit

import swa_jax as swa
from pallas_kernels import dequantize_rows, load_rows

POISON = 0xFF  # as a float32 value, or as the scale of an e4m3 group, it is NaN

SLOTS, LAYERS = 4, 3
ROWS, DECODE_TOKENS, PREFILL_TOKENS = 3, 7, 12  # of one call
REQUESTS, LONGEST = 5, 40


class Programs(NamedTuple):
    """A decoder of three layers and its compiled calls."""

    config: swa.DecoderConfig
    recompute: Callable
    decode: Callable
    prefill: Callable


@functools.cache
def programs(attention: swa.AttentionConfig, jit: Callable = quick_jit) -> Programs:
    config = decoder_config(attention, LAYERS)
    model = swa.Decoder(config)

    def step(params, cache, tokens, meta):
        hidden, cache = model.apply(params, tokens, cache, meta)
        stored = [load_rows(cache.layer(i), meta.slots) for i in range(LAYERS)]
        return hidden, jnp.stack(stored).reshape(LAYERS, *tokens.shape, -1), cache

    @functools.partial(jit, donate_argnames="cache")
    def decode(params, cache, tokens, state_ids, positions):
        meta = swa.DecodeMetadata.build(config.geometry, state_ids, positions)
        return step(params, cache, tokens, meta)

    @functools.partial(jit, donate_argnames="cache")
    def prefill(params, cache, tokens, state_ids, starts, lengths):
        meta = swa.PrefillMetadata.build(
            config.geometry, state_ids, starts, lengths, max_tokens=tokens.shape[1]
        )
        return step(params, cache, tokens, meta)

    @jit
    def recompute(params, tokens, segment_ids):
        return model.apply(params, tokens, segment_ids=segment_ids)

    return Programs(config, recompute, decode, prefill)


# --- a server in miniature: it draws what each call does, and keeps what each position gave


class Call(NamedTuple):
    """What one call does: for each row its request, tokens and how many of them stay."""

    prefill: bool
    requests: tuple[int, ...]
    tokens: tuple[int, ...]
    accepted: tuple[int, ...]
    state_id_of_padding: int


@st.composite
def calls(draw) -> Call:
    prefill = draw(st.booleans())
    requests = draw(st.permutations(range(REQUESTS)))[:ROWS]
    most = PREFILL_TOKENS if prefill else DECODE_TOKENS
    tokens = [draw(st.integers(0, most)) for _ in requests]
    accepted = [draw(st.integers(0, count)) for count in tokens]
    padding = draw(st.integers(-1, SLOTS - 1))
    return Call(prefill, tuple(requests), tuple(tokens), tuple(accepted), padding)


class Server:
    """Requests in the slots of a cache, whose every unneeded byte is poisoned before each call.

    Attributes:
      hidden: float32[requests, longest, hidden], what each position gave.
      rows: uint8[requests, layers, longest, row_bytes], the bytes that each position left.
      stored: bool[requests, longest], whether it left any: a long prefill keeps its last ones.
    """

    def __init__(
        self,
        program: Programs,
        params: Any,
        lengths: Sequence[int],
        seed: int,
        prefill_tokens: int = PREFILL_TOKENS,
        poison_stale_rows: bool = True,
    ):
        self.program, self.params, self.lengths = program, params, lengths
        self.prefill_tokens, self.poison_stale_rows = prefill_tokens, poison_stale_rows
        self.rng = np.random.default_rng(seed)
        config, requests, longest = program.config, len(lengths), max(LONGEST, *lengths)
        self.geometry, self.vocabulary = config.geometry, config.vocab_size
        self.tokens = self._random_tokens(requests, longest)
        self.positions = [0] * requests
        self.slots: dict[int, int] = {}
        self.cache = swa.RingCache.create(SLOTS, LAYERS, self.geometry, config.fmt)
        self.block = np.full(self.cache.blocks[0].shape, POISON, np.uint8)
        self.hidden = np.full((requests, longest, config.hidden_size), np.nan, np.float32)
        self.rows = np.zeros((requests, LAYERS, longest, config.fmt.row_bytes), np.uint8)
        self.stored = np.zeros((requests, longest), bool)

    def run(self, call: Call) -> None:
        width = self.prefill_tokens if call.prefill else DECODE_TOKENS
        state_ids = np.full(ROWS, call.state_id_of_padding, np.int32)
        starts, lengths = np.zeros(ROWS, np.int32), np.zeros(ROWS, np.int32)
        tokens = self._random_tokens(ROWS, width)  # rejected drafts and padding
        kept = {}
        for row, request in enumerate(call.requests):
            start = self.positions[request]
            count = min(call.tokens[row], self.lengths[request] - start)
            if count == 0 or not self._admit(request):
                continue
            # Rejected tokens stay in the ring, which has room for so many.
            least = count - 1 - self.geometry.max_rollback
            accepted = max(min(call.accepted[row], count), least)
            state_ids[row], starts[row], lengths[row] = self.slots[request], start, count
            tokens[row, :accepted] = self.tokens[request, start : start + accepted]
            kept[row] = request, start, accepted
        self._poison()
        self._call(call.prefill, state_ids, starts, lengths, tokens, kept)
        for request, start, accepted in kept.values():
            self.positions[request] = start + accepted
            if start + accepted == self.lengths[request]:
                del self.slots[request]

    def finish(self) -> None:
        """Verify steps, every draft right, until all requests are done."""
        requests = range(len(self.lengths))
        while todo := [r for r in requests if self.positions[r] < self.lengths[r]]:
            todo.sort(key=lambda request: request not in self.slots)
            rows = (todo + [0] * ROWS)[:ROWS]
            counts = [DECODE_TOKENS if i < len(todo) else 0 for i in range(ROWS)]
            self.run(Call(False, tuple(rows), tuple(counts), tuple(counts), -1))

    def _random_tokens(self, *shape: int) -> np.ndarray:
        return self.rng.integers(0, self.vocabulary, shape, dtype=np.int32)

    def _admit(self, request: int) -> bool:
        free = sorted(set(range(SLOTS)) - set(self.slots.values()))
        if request not in self.slots and free:
            self.slots[request] = int(self.rng.choice(free))
        return request in self.slots

    def _poison(self) -> None:
        """NaN in all bytes but the rows that the next queries may see."""
        keep = np.zeros(self.block.shape, bool)
        size, region = self.program.config.fmt.row_bytes, self.block.shape[1] // LAYERS
        for request, slot in self.slots.items():
            position = self.positions[request]
            for seen in range(max(0, position - self.geometry.window + 1), position):
                for layer in range(LAYERS):
                    first = layer * region + seen % self.geometry.capacity * size
                    keep[slot, first : first + size] = True
            if not self.poison_stale_rows:
                keep[slot] = True
        self.block = np.where(keep, self.block, np.uint8(POISON))

    def _call(self, prefill, state_ids, starts, lengths, tokens, kept) -> None:
        cache = dataclasses.replace(self.cache, blocks=(jnp.asarray(self.block),))
        if prefill:
            run, addresses = self.program.prefill, (state_ids, starts, lengths)
        else:
            token = np.arange(tokens.shape[1], dtype=np.int32)
            positions = np.where(token < lengths[:, None], starts[:, None] + token, -1)
            run, addresses = self.program.decode, (state_ids, positions)
        hidden, rows, self.cache = run(self.params, cache, tokens, *addresses)
        hidden, rows = np.asarray(hidden), np.asarray(rows)
        self.block = np.asarray(self.cache.blocks[0])
        padding = np.arange(tokens.shape[1]) >= lengths[:, None]
        assert not np.any(hidden[padding]), "expected zeros at padding"
        for row, (request, start, accepted) in kept.items():
            place = slice(start, start + accepted)
            self.hidden[request, place] = hidden[row, :accepted]
            self.rows[request, :, place] = rows[:, row, :accepted]
            # of a long prefill the ring keeps the last rows only
            survives = np.arange(accepted) >= lengths[row] - self.geometry.capacity
            self.stored[request, place] = survives


def errors_of_positions(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Each position's largest difference, as a fraction of the largest value wanted."""
    got, want = got.astype(np.float64), want.astype(np.float64)
    return np.max(np.abs(got - want), axis=-1) / np.max(np.abs(want))


def check_answers(server: Server) -> None:
    """The server's answers are those of one call without a cache, and of the maths in float64."""
    program, params, lengths = server.program, server.params, server.lengths
    fmt = program.config.fmt
    real = np.arange(server.tokens.shape[1]) < np.asarray(lengths)[:, None]
    segments = np.where(real, 0, -1).astype(np.int32)
    whole = np.asarray(program.recompute(params, server.tokens, segments))
    errors = errors_of_positions(server.hidden[real], whole[real])
    if fmt.name == "F32":
        assert errors.max() <= 3e-5
    else:
        # now and then a last bit that differs flips a stored code
        assert errors.max() <= 3e-2
        assert np.median(errors) <= 1e-3
    # Given the rows that the calls left, there is one answer whatever their format.
    rows = np.asarray(dequantize_rows(jnp.asarray(server.rows), fmt), np.float64)
    for request, length in enumerate(lengths):
        if server.stored[request, :length].all():
            tokens = server.tokens[request, :length]
            want = float64_reference.decoder(
                params["params"], tokens, program.config, rows[request, :, :length]
            )
            assert errors_of_positions(server.hidden[request, :length], want).max() <= 3e-5


@pytest.mark.slow
@pytest.mark.parametrize("fmt", [swa.F32, swa.V41], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("window", [1, 3, 16])
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(1, LONGEST), min_size=REQUESTS, max_size=REQUESTS),
    schedule=st.lists(calls(), max_size=12),
    poison_stale_rows=st.booleans(),
)
def test_every_split_into_calls_gives_the_answer_of_the_whole_sequence(
    window, fmt, seed, lengths, schedule, poison_stale_rows
):
    program = programs(attention_config(window, fmt))
    params = decoder_params(program.config, seed)
    server = Server(program, params, lengths, seed, poison_stale_rows=poison_stale_rows)
    for call in schedule:
        server.run(call)
    server.finish()
    check_answers(server)


@pytest.mark.slow
def test_a_window_of_128_in_a_ring_of_134_gives_the_answer_of_the_whole_sequence():
    program = programs(attention_config(128, swa.F32), jax.jit)  # as optimised as a user's
    params = decoder_params(program.config)
    lengths = [290, 275, 180, 128, 1]
    server = Server(program, params, lengths, seed=0, prefill_tokens=160)
    for prefill, requests, tokens, accepted in [
        (True, (0, 1, 2), (160, 133, 3), (153, 133, 0)),  # more than the ring, and a rollback of 6
        (False, (1, 2, 0), (7, 7, 7), (0, 4, 7)),
        (True, (2, 0, 3), (134, 127, 128), (134, 127, 121)),
        (False, (0, 1, 2), (1, 6, 7), (1, 6, 2)),
        (True, (1, 4, 3), (135, 1, 6), (135, 1, 6)),
    ]:
        server.run(Call(prefill, requests, tokens, accepted, 0))
    server.finish()
    check_answers(server)
