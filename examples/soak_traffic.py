"""Random requests for the soak, and pools of state slots that say what each request left behind."""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import byte_text
import jax
import numpy as np

import swa_jax as swa
from pallas_kernels import checks
from swa_jax.decoding import DecodeState
from swa_jax.prefilling import Params
from swa_jax.requests import Finish, Request, Result
from swa_jax.serving import Server
from swa_jax.slots import Slots

TEMPERATURES = (0.0, 0.0, 0.3, 0.7, 1.3)
TOP_K = (0, 0, 1, 10)
TOP_P = (1.0, 1.0, 0.9, 0.5)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The shape of both pools; the same request in another shape may choose other tokens.

    Attributes:
      slots: requests that decode at once.
      block_steps: tokens per request between two words to the host.
      chunk: tokens of a prompt in one call of prefill.
      prefill_lanes: requests in one call of prefill.
      max_stop_tokens: stop tokens that a request may have.
    """

    slots: int = 4
    block_steps: int = 16
    chunk: int = 64
    prefill_lanes: int = 2
    max_stop_tokens: int = 4


class Outcome(NamedTuple):
    """What a request came to.

    Attributes:
      tokens: the tokens it was given.
      finish: why it ended.
      rows: sha256 of the rows of its last window, of all layers, and of the position after them;
        empty for a request that was cancelled.
    """

    tokens: tuple[int, ...]
    finish: Finish
    rows: str


class RecordedSlots(Slots):
    """Slots that remember which one a request was given, also after its release."""

    placed: dict[Any, int]

    def __init__(self, owners: tuple[Any, ...], placed: dict[Any, int]):
        super().__init__(owners)
        object.__setattr__(self, "placed", placed)

    def acquire(self, owner: Any) -> tuple["RecordedSlots", int]:
        """As of `Slots`."""
        slots, slot = super().acquire(owner)
        self.placed[owner] = slot
        return RecordedSlots(slots.owners, self.placed), slot

    def release(self, slot: int, owner: Any) -> "RecordedSlots":
        """As of `Slots`."""
        return RecordedSlots(super().release(slot, owner).owners, self.placed)


@jax.jit
def stored_rows(state: DecodeState, slot: int) -> tuple[jax.Array, jax.Array]:
    """The rows of a slot's last window, uint8[layers, W - 1, row_bytes], and the position after."""
    exported = state.cache.export_slot(slot, state.highest[slot] + 1)
    return exported.data, exported.next_position


class Pool:
    """A server whose requests are told apart by their numbers, from 0."""

    def __init__(self, model: swa.Decoder, params: Params, sizes: Sizes):
        self._server = Server(model, params, **dataclasses.asdict(sizes))
        self._placed: dict[int, int] = {}
        self._server.slots = RecordedSlots(self._server.slots.owners, self._placed)
        self._submitted = 0

    @property
    def pending(self) -> int:
        """Requests that have not finished."""
        return self._server.pending

    @property
    def all_free(self) -> bool:
        """Whether no slot has an owner."""
        return len(self._server.slots.free) == len(self._server.slots.owners)

    @property
    def tokens_chosen(self) -> int:
        """Tokens chosen so far, for all requests."""
        return self._server.tokens_chosen

    def submit(self, request: Request) -> int:
        """The number that the request's outcome will have; ValueError where it is refused."""
        self._server.submit(dataclasses.replace(request, name=self._submitted))
        self._submitted += 1
        return self._submitted - 1

    def step(self) -> list[tuple[int, Outcome]]:
        """One step of the server: the numbers and outcomes of the requests that finished."""
        return [self._outcome(result) for result in self._server.step()]

    def cancel(self) -> list[tuple[int, Outcome]]:
        """Ends all requests."""
        return [self._outcome(result) for result in self._server.cancel()]

    def alone(self, request: Request) -> Outcome:
        """The outcome of a request that has the whole pool, which must be empty."""
        number = self.submit(request)
        finished: list[tuple[int, Outcome]] = []
        while self.pending:
            finished += self.step()
        [(found, outcome)] = finished
        if found != number:
            raise ValueError(f"alone: expected the outcome of request {number}, got {found}")
        return outcome

    def _outcome(self, result: Result) -> tuple[int, Outcome]:
        number: Any = result.request.name
        if result.finish == "cancelled":
            self._placed.pop(number, None)  # one that waited has no slot
            return number, Outcome(result.tokens, result.finish, "")
        # Now: the next step may give the slot to another.
        data, position = stored_rows(self._server.state, self._placed.pop(number))
        digest = hashlib.sha256(np.asarray(data).tobytes() + np.asarray(position).tobytes())
        return number, Outcome(result.tokens, result.finish, digest.hexdigest())


def read_texts() -> bytes:
    """What prompts are cut from: these examples."""
    return b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))


def random_request(
    rng: np.random.Generator, text: bytes, geometry: swa.RingGeometry, sizes: Sizes
) -> Request:
    """A prompt of 1 token to several windows, with any limit, settings and stop tokens.

    Args:
      rng: draws it.
      text: what prompts are cut from, longer than five windows.
      geometry: of the rings.
      sizes: of the pool.
    """
    window, capacity = geometry.window, geometry.capacity
    edges = (1, sizes.chunk, sizes.chunk + 1, window - 1, window, window + 1, capacity + 1)
    longest = (window, window, 5 * window)[rng.integers(3)]
    drawn = rng.integers(1, longest + 1)
    length = int(rng.choice(edges) if rng.random() < 0.25 else drawn)
    start = int(rng.integers(len(text) - length))
    prompt = [byte_text.BOUNDARY, *text[start : start + length]][:length]
    block = sizes.block_steps
    limits = (1, 2, block, block + 1, block + 2, int(rng.integers(1, 2 * window)))
    count = int(rng.integers(sizes.max_stop_tokens)) if rng.random() < 0.3 else 0
    stops = rng.choice(prompt, count).tolist()
    return Request(
        prompt=prompt,
        max_new_tokens=int(rng.choice(limits)),
        sampling=swa.Sampling.build(
            1,
            temperature=float(rng.choice(TEMPERATURES)),
            top_k=int(rng.choice(TOP_K)),
            top_p=float(rng.choice(TOP_P)),
            keys=jax.random.key(int(rng.integers(2**32)))[None],
        ),
        stop_tokens=[byte_text.BOUNDARY, *stops],
    )


def bad_requests(sizes: Sizes) -> Sequence[tuple[Request, str]]:
    """Requests that a server refuses, and the argument that its message names first."""
    return (
        (Request([], 4), "prompt"),
        (Request([byte_text.VOCAB_SIZE], 4), "prompt"),
        (Request("text", 4), "prompt"),  # pyright: ignore[reportArgumentType]
        (Request([1], 0), "max_new_tokens"),
        (Request([1], checks.INT32_MAX), "max_new_tokens"),
        (Request([1], 4, stop_tokens=[1] * (sizes.max_stop_tokens + 1)), "stop_tokens"),
        (Request([1], 4, stop_tokens=[-1]), "stop_tokens"),
        (Request([1], 4, swa.Sampling.build(2)), "sampling"),
    )
