"""Any order of calls on a few state slots: each query sees the rows of its window, and no others.

Rows name themselves: the bits of a row's number, layer and position are the signs of its values,
which norm, quarter turns and powers of two keep exact in every format. So the bytes that a call
writes and reads are known to the bit, and its outputs follow from them in float64.
"""

import copy
import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as reference
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from ring_model import RequestModel, RingModel
from small_models import attention_config

import swa_jax as swa
from pallas_kernels import load_rows
from swa_jax import cache as cache_module
from swa_jax import decoding
from swa_jax.attention import decode_attention, prefill_attention
from swa_jax.exported import ExportedSlot

pytestmark = [pytest.mark.quick_compilation, pytest.mark.makes_nan]

SLOTS, LAYERS, WIDTH, HALF = 4, 2, 64, 8
RING = RingModel(window=4, capacity=6)
ROWS, VERIFY_TOKENS, PREFILL_TOKENS = 3, 3, 8  # of one call
LAST = 2**31 - 1

NORM_WEIGHT = np.resize([1.0, 0.5, 2.0, 4.0, 0.25], WIDTH).astype(np.float32)
SINKS = np.asarray([0.5, -1.0], np.float32)
SETTINGS = swa.Sampling.build(1)


# --- rows that name themselves


def signs_of(number: int, layer: int, position: int) -> np.ndarray:
    """float32[64] of +1 and -1."""
    name = np.uint64(number << 36 | layer << 32 | position)
    bits = (name >> np.arange(WIDTH, dtype=np.uint64)) & np.uint64(1)
    return (1 - 2 * bits.astype(np.float32)).astype(np.float32)


def angles_of(positions: Any) -> np.ndarray:
    """A quarter turn times the position for the first pair, twice that for the second, ..."""
    quarters = np.multiply.outer(np.asarray(positions, np.int64), np.arange(1, HALF + 1)) % 4
    return quarters * (np.pi / 2)


# --- the calls, compiled


@functools.cache
def programs(config: swa.AttentionConfig) -> dict[str, Any]:
    """Each call as a function of the cache and its arguments."""
    params = {"kv_norm": jnp.asarray(NORM_WEIGHT), "sinks": jnp.asarray(SINKS)}
    step = functools.partial(jax.jit, donate_argnames="cache")

    def through_layers(attend, cache, meta, q, latents, cos, sin):
        outputs = []
        for layer in range(LAYERS):
            rows = cache.layer(layer)
            out, rows = attend(params, q, latents[layer], (cos, sin), rows, meta, config)
            cache = cache.with_layer(layer, rows)
            outputs.append(out)
        return cache, jnp.stack(outputs)

    def read(cache, slots):
        return jnp.stack([load_rows(cache.layer(layer), slots) for layer in range(LAYERS)])

    @step
    def decode(cache, state_ids, positions, q, latents, cos, sin):
        meta = swa.DecodeMetadata.build(config.geometry, state_ids, positions)
        cache, out = through_layers(decode_attention, cache, meta, q, latents, cos, sin)
        return cache, out, read(cache, meta.indices), meta.slots

    @step
    def prefill(cache, state_ids, starts, lengths, q, latents, cos, sin):
        meta = swa.PrefillMetadata.build(
            config.geometry, state_ids, starts, lengths, max_tokens=PREFILL_TOKENS
        )
        window = read(cache, meta.window_slots)
        cache, out = through_layers(prefill_attention, cache, meta, q, latents, cos, sin)
        return cache, out, window, meta.slots

    return {
        "decode": decode,
        "prefill": prefill,
        "copy": jax.jit(swa.RingCache.copy_slots),
        "export": jax.jit(swa.RingCache.export_slot),
        "import": jax.jit(swa.RingCache.import_slot),
    }


CONFIGS = {
    fmt.name: attention_config(
        RING.window,
        fmt,
        draft_tokens=RING.capacity - RING.window - 1,
        norm_eps=1e-20,  # nothing beside a mean square of 1
        rope_dim=2 * HALF,
        pairing=pairing,
    )
    for fmt, pairing in ((swa.F32, "interleaved"), (swa.V41, "half_split"))
}

# What stands in bytes that nobody needs: NaN, infinities, anything; None: what stood there.
PATTERNS = (
    st.none()
    | st.sampled_from([b"\xff", b"\xfe", b"\x7f", b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f"])
    | st.binary(min_size=1, max_size=6)
)
# What is no state slot: of the last, 6 * b is 2 in 32 bits.
NOBODY = [-1, SLOTS, LAST, 715_827_883]
STATE_IDS = st.integers(0, SLOTS - 1) | st.sampled_from(NOBODY)


def call_rows(tokens: int):
    """For each row of a call: which live request or nobody, how many tokens, how many stay."""
    who = st.integers(0, SLOTS - 1) | st.integers(0, SLOTS - 1) | st.sampled_from(NOBODY)
    count = st.just(tokens) | st.integers(0, tokens)
    return st.lists(st.tuples(who, count, count), min_size=ROWS, max_size=ROWS)


class Calls(RuleBasedStateMachine):
    """A cache beside dictionaries that say what each of its slots holds."""

    @initialize(
        name=st.sampled_from(sorted(CONFIGS)),
        begun=st.sets(st.integers(0, SLOTS - 1), min_size=1),
        prompts=call_rows(PREFILL_TOKENS),
    )
    def create(self, name, begun, prompts):
        self.config = CONFIGS[name]
        self.run = programs(self.config)
        self.fmt = self.config.fmt
        region = -(-RING.capacity * self.fmt.row_bytes // 32) * 32
        # Of V41 rows each layer has a block of its own, as in a cache above 2 GiB.
        limit = SLOTS * region if name == "V41" else 2**31 - 1
        with mock.patch.object(cache_module, "MAX_BLOCK_BYTES", limit):
            self.cache = swa.RingCache.create(SLOTS, LAYERS, self.config.geometry, self.fmt)
        self.bytes = np.zeros((SLOTS, LAYERS, region), np.uint8)
        self.requests = {slot: RequestModel() for slot in begun}
        self.row_bytes: list[np.ndarray] = []  # of each row: uint8[layers, bytes of a row]
        self.row_values: list[np.ndarray] = []  # and float64[layers, width]
        self.row_signs: list[np.ndarray] = []
        self.exported: list[tuple[ExportedSlot, RequestModel]] = []
        self.snapshots: list[tuple[swa.RingCache, np.ndarray, dict[int, RequestModel]]] = []
        self.rng = np.random.default_rng(0)
        self.call("prefill", PREFILL_TOKENS, prompts, b"\xff")

    # --- what the cache should hold

    def new_row(self, position: int) -> int:
        number = len(self.row_bytes)
        signs = np.stack([signs_of(number, layer, position) for layer in range(LAYERS)])
        values = reference.rotate(signs * NORM_WEIGHT, angles_of(position), self.config.pairing)
        data = reference.quantize(values.round(9), self.fmt)
        self.row_signs.append(signs)
        self.row_bytes.append(data)
        self.row_values.append(reference.dequantize(data, self.fmt))
        return number

    def place(self, position: int) -> slice:
        first = position % RING.capacity * self.fmt.row_bytes
        return slice(first, first + self.fmt.row_bytes)

    def write(self, slot: int, request: RequestModel) -> None:
        for position, row in request.rows.items():
            self.bytes[slot, :, self.place(position)] = self.row_bytes[row]

    def rows_at(self, positions: list[int | None], rows: dict[int, int]) -> np.ndarray:
        """uint8[layers, positions, bytes of a row]; zeros for None."""
        data = np.zeros((LAYERS, len(positions), self.fmt.row_bytes), np.uint8)
        for i, position in enumerate(positions):
            if position is not None:
                data[:, i] = self.row_bytes[rows[position]]
        return data

    def window_before(self, request: RequestModel, position: int) -> np.ndarray:
        """The W - 1 rows before a position, oldest first; zeros before position 0."""
        before = range(position - RING.window + 1, position)
        return self.rows_at([key if key >= 0 else None for key in before], request.rows)

    def check_bytes(self) -> None:
        got = np.concatenate([np.asarray(block) for block in self.cache.blocks], axis=1)
        np.testing.assert_array_equal(got.reshape(self.bytes.shape), self.bytes)

    def poison(self, pattern: bytes | None) -> None:
        """The pattern in every byte but the rows that count."""
        if pattern is None:
            return
        self.bytes = np.resize(np.frombuffer(pattern, np.uint8), self.bytes.shape).copy()
        for slot, request in self.requests.items():
            self.write(slot, request)
        flat = self.bytes.reshape(SLOTS, -1)
        parts = np.split(flat, len(self.cache.blocks), axis=1)
        blocks = tuple(jnp.asarray(part.copy()) for part in parts)
        self.cache = swa.RingCache(blocks, LAYERS, self.config.geometry, self.fmt)

    # --- calls

    @rule(rows=call_rows(1), pattern=PATTERNS)
    def decode(self, rows, pattern):
        self.call("decode", 1, rows, pattern)

    @rule(rows=call_rows(VERIFY_TOKENS), pattern=PATTERNS)
    def verify(self, rows, pattern):
        self.call("decode", VERIFY_TOKENS, rows, pattern)

    @rule(rows=call_rows(PREFILL_TOKENS), pattern=PATTERNS)
    def prefill(self, rows, pattern):
        self.call("prefill", PREFILL_TOKENS, rows, pattern)

    def call(self, kind, width, rows, pattern):
        self.poison(pattern)
        state_ids = np.asarray([self.state_id(who) for who, _, _ in rows], np.int32)
        starts, lengths = np.zeros(ROWS, np.int32), np.zeros(ROWS, np.int32)
        live: dict[int, tuple[RequestModel, int]] = {}  # by row: the request, how many tokens stay
        nobody = [row for row in range(ROWS) if not 0 <= state_ids[row] < SLOTS]
        for row, (_, tokens, accepted) in enumerate(rows):
            request = self.requests.get(int(state_ids[row]))
            if row in nobody:
                starts[row], lengths[row] = 5 * accepted, tokens
            elif request is not None:  # a second row of a request has no tokens
                starts[row] = min(request.position, LAST)
                if not any(request is other for other, _ in live.values()):
                    lengths[row] = min(tokens, LAST + 1 - request.position)
                if lengths[row]:
                    live[row] = request, min(accepted, int(lengths[row]))
        column = np.arange(width)
        padding = column >= lengths[:, None]
        positions = np.where(padding, -1, starts[:, None].astype(np.int64) + column)
        positions = positions.astype(np.int32)

        # What stands at padding reaches nothing.
        junk = np.resize(np.frombuffer(pattern or b"\x00", np.uint8), 4).view(np.float32)[0]
        q = self.rng.normal(size=(ROWS, width, 2, WIDTH)).astype(np.float32)
        q[padding] = junk
        latents = np.full((LAYERS, ROWS, width, WIDTH), junk, np.float32)
        latents[:, ~padding] = 1.0
        known = {}  # by row: the rows that its queries may see
        for row, (request, _) in live.items():
            before = dict(request.rows)
            numbers = {int(p): self.new_row(int(p)) for p in positions[row, : lengths[row]]}
            for t, number in enumerate(numbers.values()):
                latents[:, row, t] = self.row_signs[number]
            for position, number in numbers.items():
                RING.store(request, position, number)
            known[row] = request.rows if kind == "decode" else before | numbers
            self.write(int(state_ids[row]), request)
        angles = angles_of(positions)
        cos, sin = (part.round(9).astype(np.float32) for part in (np.cos(angles), np.sin(angles)))
        addresses = (positions,) if kind == "decode" else (starts, lengths)
        self.cache, out, read, slots = self.run[kind](
            self.cache, state_ids, *addresses, q, latents, cos, sin
        )

        stored = [
            slot for slot in np.asarray(slots).tolist() if slot in range(SLOTS * RING.capacity)
        ]
        assert len(set(stored)) == len(stored), "expected slots that differ"
        self.check_bytes()
        self.check_read(kind, np.asarray(read), positions, starts, known)
        self.check_outputs(np.asarray(out), q, positions, known, nobody)
        for row, (request, accepted) in live.items():
            stay = accepted if kind == "decode" else int(lengths[row])
            RING.go_on_at(request, int(starts[row]) + stay)

    def check_read(self, kind, read, positions, starts, known):
        """The rows that the metadata names are those that the rule makes visible, to the byte."""
        want = np.zeros_like(read)
        if kind == "decode":
            want = want.reshape(LAYERS, *positions.shape, RING.window, -1)
        for row, rows in known.items():
            if kind == "prefill":
                request = RequestModel(rows=rows)
                want[:, row] = self.window_before(request, int(starts[row]))
                continue
            for t, position in enumerate(positions[row].tolist()):
                if position >= 0:
                    seen = RING.visible(rows, position)
                    assert len(seen) == min(position + 1, RING.window)
                    want[:, row, t, : len(seen)] = self.rows_at(seen, rows)
        np.testing.assert_array_equal(read, want.reshape(read.shape))

    def check_outputs(self, out, q, positions, known, nobody):
        """In float64: attention over the visible rows, rotated; zeros where there is nothing."""
        angles = angles_of(positions)[:, :, None]
        indices, values = [], []
        for row, places in enumerate(positions.tolist()):
            for position in places:
                rows = known.get(row, {})
                seen = RING.visible(rows, position) if position >= 0 else []
                first = len(values)
                values += [self.row_values[rows[key]] for key in seen]
                entry = list(range(first, len(values)))
                indices.append(entry + [-1] * (RING.window - len(entry)))
        ours = np.asarray([row not in nobody for row in range(ROWS)])
        queries = reference.rotate(
            np.where(positions[..., None, None] >= 0, q, 0), angles, self.config.pairing
        )
        for layer in range(LAYERS):
            cache = [value[layer] for value in values], np.asarray(indices), None
            want, _ = reference.attention(queries.reshape(-1, *q.shape[2:]), [cache], SINKS)
            want = reference.rotate(want.reshape(q.shape), -angles, self.config.pairing)
            got = out[layer]
            assert not np.any(got[(positions < 0) & ours[:, None]])
            assert np.all(np.abs(got - want)[ours] <= 3e-5 * max(1.0, np.abs(want).max()))

    # --- requests that come, go, and go back

    def free_slots(self) -> list[int]:
        return [slot for slot in range(SLOTS) if slot not in self.requests]

    def live_slot(self, choice: int) -> int:
        slots = sorted(self.requests)
        return slots[choice % len(slots)]

    def state_id(self, who: int) -> int:
        """The slot of a live request, or what names no slot."""
        return self.live_slot(who) if self.requests and 0 <= who < SLOTS else who

    @precondition(lambda self: len(self.requests) < SLOTS)
    @rule()
    def begin(self):
        self.requests[self.free_slots()[0]] = RequestModel()

    @precondition(lambda self: self.requests)
    @rule(choice=st.integers(0, SLOTS - 1))
    def release(self, choice):
        del self.requests[self.live_slot(choice)]

    @precondition(lambda self: self.requests)
    @rule(choice=st.integers(0, SLOTS - 1), back=st.integers(-1, 9))
    def roll_back(self, choice, back):
        request = self.requests[self.live_slot(choice)]
        target = request.position - back
        if not -LAST <= target <= LAST or request.position > LAST:
            return
        one = jnp.zeros(1, jnp.int32)
        state = decoding.DecodeState(
            cache=self.cache,
            state_ids=one,
            positions=one + request.position,
            tokens=one,
            remaining=one,
            oldest=one + request.oldest,
            highest=one + request.highest,
            stop_tokens=one[:, None],
            sampling=SETTINGS,
        )
        if RING.may_go_on_at(request, target):
            state = decoding.rollback(state, [target], [3])
            assert state.positions.tolist() == [target]
            RING.go_on_at(request, target)
        else:
            with pytest.raises(ValueError, match="positions: expected at most 2 "):
                decoding.rollback(state, [target], [3])

    @precondition(lambda self: self.requests)
    @rule(choice=st.integers(0, SLOTS - 1))
    def forget(self, choice):
        RING.forget(self.requests[self.live_slot(choice)])

    # --- requests that move

    @precondition(lambda self: self.requests)
    @rule(choice=st.integers(0, SLOTS - 1), back=st.integers(0, 2), as_bytes=st.booleans())
    def export_request(self, choice, back, as_bytes):
        slot = self.live_slot(choice)
        request = self.requests[slot]
        position = request.position - back
        if not RING.may_go_on_at(request, position) or position > LAST:
            return
        exported = self.run["export"](self.cache, slot, position)
        np.testing.assert_array_equal(exported.data, self.window_before(request, position))
        if as_bytes:
            exported = ExportedSlot.from_bytes(exported.to_bytes())
        moved = request.fork()
        RING.go_on_at(moved, position)
        RING.forget(moved)
        moved.highest = position - 1
        self.exported = [*self.exported[-3:], (exported, moved)]

    @precondition(lambda self: self.exported and len(self.requests) < SLOTS)
    @rule(choice=st.integers(0, 3))
    def import_request(self, choice):
        exported, moved = self.exported[choice % len(self.exported)]
        self.put(exported, moved.fork())

    @precondition(lambda self: len(self.requests) < SLOTS)
    @rule(position=st.integers(0, 20) | st.integers(LAST - 20, LAST) | st.integers(0, LAST))
    def import_far_request(self, position):
        """A request that was somewhere else, as far as int32 goes."""
        request = RequestModel(position, position - 1, max(0, position - RING.window + 1))
        request.rows = {key: self.new_row(key) for key in range(request.oldest, position)}
        data = jnp.asarray(self.window_before(request, position))
        geometry = self.config.geometry
        self.put(ExportedSlot(data, jnp.int32(position), geometry, self.fmt), request)

    def put(self, exported: ExportedSlot, request: RequestModel) -> None:
        slot = self.free_slots()[-1]
        self.cache, position = self.run["import"](self.cache, slot, exported)
        assert int(position) == request.position
        self.requests[slot] = request
        self.write(slot, request)
        self.check_bytes()

    @rule(
        src=st.lists(st.integers(-1, SLOTS), min_size=ROWS, max_size=ROWS),
        dst=st.lists(STATE_IDS, min_size=ROWS, max_size=ROWS, unique=True),
    )
    def fork(self, src, dst):
        """Copies of slots as they were before: into free ones, over others, or swapped."""
        self.cache = self.run["copy"](self.cache, np.int32(src), np.int32(dst))
        before, requests = self.bytes.copy(), dict(self.requests)
        for source, target in zip(src, dst, strict=True):
            if 0 <= source < SLOTS and 0 <= target < SLOTS:
                self.bytes[target] = before[source]
                self.requests.pop(target, None)
                if source in requests:
                    self.requests[target] = requests[source].fork()
        self.check_bytes()

    @rule()
    def snapshot(self):
        kept = self.cache.snapshot(), self.bytes.copy(), copy.deepcopy(self.requests)
        self.snapshots = [*self.snapshots[-1:], kept]

    @precondition(lambda self: self.snapshots)
    @rule(choice=st.integers(0, 1))
    def restore(self, choice):
        """As far back as one likes, however often the cache was donated since."""
        cache, data, requests = self.snapshots[choice % len(self.snapshots)]
        self.cache, self.bytes = cache.snapshot(), data.copy()
        self.requests = copy.deepcopy(requests)
        self.check_bytes()


TestCalls = Calls.TestCase
TestCalls.settings = settings(stateful_step_count=30)
