"""Server: many requests at once through a pool of state slots, prefill between decode blocks."""

import collections
import dataclasses
import time
from collections.abc import Iterable, Iterator

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

from pallas_kernels import checks
from swa_jax.admission import admit, idle_state
from swa_jax.cache import RingCache
from swa_jax.decoding import decode_block
from swa_jax.modules import Decoder, check_model
from swa_jax.prefilling import Params, prefill_chunk
from swa_jax.prompts import stop_token_ids, token_ids, token_limits
from swa_jax.requests import Finish, Request, Result
from swa_jax.sampling import Sampling, checked_sampling
from swa_jax.slots import Slots


class Server:
    """Decodes requests as slots become free, first come first served.

    A step is one chunk of prefill, for the requests that have a lane of it, and one decode block,
    for the requests that have their first token. The shapes never change, and a request's chunks
    and blocks begin where they would if it were alone: so its tokens do not depend on what runs
    beside it, and nothing is compiled after the first requests.

    Attributes:
      slots: who owns which state slot; owners are numbers in the order of submission.
      state: all slots as the device holds them; a step donates it.
    """

    def __init__(
        self,
        model: Decoder,
        params: Params,
        *,
        slots: int = 8,
        block_steps: int = 16,
        chunk: int = 64,
        prefill_lanes: int = 4,
        max_stop_tokens: int = 4,
    ):
        """A pool of free slots.

        Args:
          model: the decoder.
          params: its variables.
          slots: requests that decode at once, at most.
          block_steps: tokens per request between two words to the host.
          chunk: tokens of a prompt in one call of prefill.
          prefill_lanes: requests in one call of prefill; not more than `slots` are made.
          max_stop_tokens: stop tokens that a request may have.

        Raises:
          ValueError: another kind of model or variables, a number below 1, or rings that do not
            fit, see `RingCache.create`.
        """
        check_model(model, params)
        for name, value in (
            ("block_steps", block_steps),
            ("chunk", chunk),
            ("prefill_lanes", prefill_lanes),
            ("max_stop_tokens", max_stop_tokens),
        ):
            checks.check_count(name, value)
        config = model.config
        self.slots = Slots.create(slots)
        cache = RingCache.for_decoder(config, slots)
        self.state = idle_state(cache, max_stop_tokens)
        self._model, self._params = model, params
        self._block_steps, self._chunk = block_steps, chunk
        self._waiting: collections.deque[_Job] = collections.deque()
        self._lanes: list[_Job | None] = [None] * min(prefill_lanes, slots)
        self._decoding: dict[int, _Job] = {}
        self._submitted = self._tokens_chosen = 0
        self._stepping = False
        dtype = config.layers[0].dtype
        self._last = jnp.zeros((len(self._lanes), config.hidden_size), dtype)
        self._greedy = Sampling.build(1)

    @property
    def pending(self) -> int:
        """Requests that have not finished."""
        return len(self._waiting) + len(self._decoding) + len(self._prefilling)

    @property
    def tokens_chosen(self) -> int:
        """Tokens chosen so far, for all requests."""
        return self._tokens_chosen

    def submit(self, request: Request) -> None:
        """Puts a request behind those that wait. Its time counts from here.

        Args:
          request: what to continue.

        Raises:
          ValueError: an empty prompt, token ids or a limit out of range, settings of several
            requests, or more stop tokens than the pool has room for.
        """
        arrived = time.perf_counter()
        checks.check_type("request", request, Request)
        prompt = token_ids(self._model, "prompt", request.prompt)
        limit = int(token_limits(request.max_new_tokens, [len(prompt)])[0])
        sampling = self._greedy
        if request.sampling is not None:  # put beside others' by admission: keys of one type
            sampling = checked_sampling(request.sampling, 1, self._greedy.keys.dtype)
        stops = np.full(self.state.stop_tokens.shape[1], -1, np.int32)
        ends = stop_token_ids(self._model, request.stop_tokens)
        if len(ends) > len(stops):
            raise ValueError(f"stop_tokens: expected at most {len(stops)}, got {len(ends)}")
        stops[: len(ends)] = ends
        number, self._submitted = self._submitted, self._submitted + 1
        self._waiting.append(_Job(number, request, prompt, limit, sampling, stops, arrived))

    def step(self) -> list[Result]:
        """One chunk of prefill and one decode block.

        Returns:
          The requests that finished, in the order in which they did. Their slots are free.

        Raises:
          ValueError: an earlier step was interrupted.
        """
        if self._stepping:
            raise ValueError(
                "step: expected a server whose last step ended, got one that was "
                "interrupted: tokens may be lost; cancel gives those it has"
            )
        self._stepping = True
        self._assign_lanes()
        finished = self._prefill()
        if self._decoding:
            self.state, tokens = decode_block(
                self._model, self._params, self.state, self._block_steps
            )
            finished += self._collect(np.asarray(tokens), self._decoding)
        self._stepping = False
        return finished

    def cancel(self) -> list[Result]:
        """Ends all requests with the tokens they have, also after a step that was interrupted.

        Returns:
          Their results, those that wait included, in the order of submission.
        """
        jobs = [*self._decoding.values(), *self._prefilling]
        for job in jobs:
            self.slots = self.slots.release(job.slot, job.number)
        jobs += self._waiting
        self._waiting.clear()
        self._decoding.clear()
        self._lanes = [None] * len(self._lanes)
        if not self._stepping:  # else no step follows, and the state may be gone
            idle = jnp.zeros_like(self.state.remaining)
            self.state = dataclasses.replace(self.state, remaining=idle)
        return [job.result("cancelled") for job in sorted(jobs, key=lambda job: job.number)]

    @property
    def _prefilling(self) -> "list[_Job]":
        return [job for job in self._lanes if job is not None]

    def _assign_lanes(self) -> None:
        for lane, job in enumerate(self._lanes):
            if job is None and self._waiting and self.slots.free:
                job = self._waiting.popleft()
                self.slots, job.slot = self.slots.acquire(job.number)
                self._lanes[lane] = job

    def _prefill(self) -> list[Result]:
        """A chunk of the prompts in the lanes, and the first tokens of those that are through."""
        if not self._prefilling:
            return []
        count = len(self._lanes)
        tokens = np.zeros((count, self._chunk), np.int32)
        slots, starts, lengths = np.zeros((3, count), np.int32)
        for lane, job in enumerate(self._lanes):
            if job is not None:
                piece = job.prompt[job.prefilled : job.prefilled + self._chunk]
                tokens[lane, : len(piece)] = piece
                slots[lane], starts[lane], lengths[lane] = job.slot, job.prefilled, len(piece)
        cache, self._last = prefill_chunk(
            self._model,
            self._params,
            self.state.cache,
            self._last,
            slots,
            tokens,
            starts,
            lengths,
        )
        self.state = dataclasses.replace(self.state, cache=cache)
        for job, length in zip(self._lanes, lengths, strict=True):
            if job is not None:
                job.prefilled += int(length)
        through: dict[int, _Job] = {
            lane: job
            for lane, job in enumerate(self._lanes)
            if job is not None and job.prefilled == len(job.prompt)
        }
        return self._admit(through) if through else []

    def _admit(self, jobs: "dict[int, _Job]") -> list[Result]:
        """Lets the requests of some lanes decode, and reads their first tokens."""
        count = len(self._lanes)
        slots = np.full(count, -1, np.int32)
        limits, lengths = np.ones((2, count), np.int32)
        stops = np.full((count, self.state.stop_tokens.shape[1]), -1, np.int32)
        sampling = [self._greedy] * count
        for lane, job in jobs.items():
            slots[lane], limits[lane], lengths[lane] = job.slot, job.limit, len(job.prompt)
            stops[lane], sampling[lane] = job.stop_tokens, job.sampling
            self._decoding[job.slot] = job
            self._lanes[lane] = None
        self.state, first = admit(
            self._model,
            self._params,
            self.state,
            self._last,
            slots,
            lengths,
            limits,
            stops,
            tuple(sampling),
        )
        return self._collect(np.asarray(first)[:, None], jobs)

    def _collect(self, tokens: np.ndarray, jobs: "dict[int, _Job]") -> list[Result]:
        """Gives rows of tokens, -1 after a request's last, to their requests, and ends some."""
        now = time.perf_counter()
        ended: list[tuple[int, int, Result]] = []
        for row, job in list(jobs.items()):
            new = tokens[row][tokens[row] >= 0].tolist()
            job.tokens += new
            self._tokens_chosen += len(new)
            if new:
                job.reads.append((now, len(new)))
            finish: Finish | None = None
            if len(job.tokens) == job.limit:
                finish = "length"
            elif len(new) < tokens.shape[1]:
                finish = "stop"
            if finish is not None:
                del self._decoding[job.slot]
                self.slots = self.slots.release(job.slot, job.number)
                steps = len(new) + (finish == "stop")
                ended.append((steps, job.number, job.result(finish)))
        return [result for _, _, result in sorted(ended, key=lambda entry: entry[:2])]


def serve(
    model: Decoder,
    params: Params,
    requests: Iterable[Request],
    *,
    slots: int = 8,
    block_steps: int = 16,
    chunk: int = 64,
    prefill_lanes: int = 4,
    max_stop_tokens: int = 4,
) -> Iterator[Result]:
    """Decodes requests, many at once, and yields each as it finishes.

    The requests are submitted, and so checked, in the call; steps are made as results are asked
    for.

    Args:
      model: the decoder.
      params: its variables.
      requests: what to continue.
      slots: as of `Server`, and so are the others.
      block_steps: tokens per request between two words to the host.
      chunk: tokens of a prompt in one call of prefill.
      prefill_lanes: requests in one call of prefill.
      max_stop_tokens: stop tokens that a request may have.

    Yields:
      The results, in finishing order.

    Raises:
      ValueError: as `Server` and `Server.submit`.
    """
    server = Server(
        model,
        params,
        slots=slots,
        block_steps=block_steps,
        chunk=chunk,
        prefill_lanes=prefill_lanes,
        max_stop_tokens=max_stop_tokens,
    )
    checks.check_type("requests", requests, Iterable)
    for request in requests:
        server.submit(request)
    return _results(server)


def _results(server: Server) -> Iterator[Result]:
    while server.pending:
        yield from server.step()


@dataclasses.dataclass(eq=False)
class _Job:
    """A request on its way through the pool."""

    number: int
    request: Request
    prompt: Int32[np.ndarray, " n"]
    limit: int
    sampling: Sampling
    stop_tokens: Int32[np.ndarray, " s"]
    arrived: float
    slot: int = -1
    prefilled: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)
    reads: list[tuple[float, int]] = dataclasses.field(default_factory=list)

    def result(self, finish: Finish) -> Result:
        return Result(self.request, tuple(self.tokens), finish, self.arrived, tuple(self.reads))
