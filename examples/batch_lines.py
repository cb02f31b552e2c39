"""Requests and results of batch_decode.py as JSON lines."""

import dataclasses
import json
from typing import Any, NamedTuple

import byte_text
import jax
import numpy as np

import swa_jax as swa
from pallas_kernels import checks
from swa_jax.json_fields import build, parse_json
from swa_jax.requests import Request, Result

MAX_STOP_TOKENS = 8  # the end of a file and seven bytes


class Name(NamedTuple):
    """What a request is known by: the number of its line, from 1, and its id."""

    line: int
    id: str | int


@dataclasses.dataclass(frozen=True)
class RequestLine:
    """One line of the input, checked.

    Attributes:
      prompt: text to continue, not empty.
      max_tokens: bytes to choose at most, 1 or more.
      temperature: 0 takes the likeliest byte each time.
      top_k: only the k likeliest bytes; 0: all.
      top_p: only the likeliest bytes up to this probability.
      stop: a byte that ends the text, as a string of one ASCII character, or up to seven of them.
      seed: decides what is sampled.
      id: what the result is called; the line's number by default.
    """

    prompt: str
    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    stop: str | list[str] = dataclasses.field(default_factory=list)
    seed: int = 0
    id: str | int | None = None

    def __post_init__(self):
        _check_text("prompt", self.prompt)
        if not self.prompt:
            raise ValueError("prompt: expected at least one character, got none")
        # the end of a file stands before the prompt, and positions are int32
        most = checks.INT32_MAX - 1 - len(self.prompt.encode())
        _check_integer("max_tokens", self.max_tokens, 1, most)
        _check_integer("top_k", self.top_k, 0, checks.INT32_MAX)
        _check_integer("seed", self.seed, 0, 2**32 - 1)
        smallest = float(np.finfo(np.float32).tiny)
        _check_number("temperature", self.temperature, 0.0, float(np.finfo(np.float32).max))
        _check_number("top_p", self.top_p, smallest, 1.0)
        _check_stop(self.stop)
        if self.id is not None and not _is_id(self.id):
            raise ValueError(f"id: expected a string or an integer, got {_shown(self.id)}")
        if isinstance(self.id, str):
            _check_text("id", self.id)

    def request(self, line: int) -> Request:
        """What the server is asked, under a `Name`. An end of file ends it, too."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        return Request(
            prompt=[byte_text.BOUNDARY, *self.prompt.encode()],
            max_new_tokens=self.max_tokens,
            sampling=swa.Sampling.build(
                1,
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                keys=jax.random.key(self.seed)[None],
            ),
            stop_tokens=[byte_text.BOUNDARY, *map(ord, stops)],
            name=Name(line, line if self.id is None else self.id),
        )


def read_lines(data: bytes) -> tuple[list[Request], list[dict]]:
    """The requests of a file of JSON lines, and the results of lines that are none.

    Args:
      data: one JSON object a line, in UTF-8; blank lines are passed over.

    Returns:
      Requests, and error results.
    """
    requests, errors = [], []
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        name: Any = number
        try:
            fields = parse_json(line.decode("utf-8"))
            if isinstance(fields, dict) and _is_id(fields.get("id")):
                name = fields["id"]
            requests.append(build(RequestLine, fields).request(number))
        except ValueError as error:
            errors.append(
                {"id": name, "line": number, "finish_reason": "error", "error": str(error)}
            )
    return requests, errors


def result_line(result: Result) -> dict:
    """A result as it is written."""
    name: Any = result.request.name
    return {
        "id": name.id,
        "line": name.line,
        "text": bytes(result.tokens).decode("utf-8", "replace"),
        "tokens": len(result.tokens),
        "finish_reason": result.finish,
        "time_to_first_token": result.time_to_first_token,
    }


def encode_line(fields: dict) -> bytes:
    """A line of JSON in ASCII, whatever the text."""
    return json.dumps(fields).encode() + b"\n"


def _is_id(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


def _check_integer(name: str, value: Any, smallest: int, largest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not smallest <= value <= largest:
        raise ValueError(
            f"{name}: expected an integer from {smallest} to {largest}, got {_shown(value)}"
        )


def _check_number(name: str, value: Any, smallest: float, largest: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not smallest <= value <= largest:
        raise ValueError(
            f"{name}: expected a number from {smallest:g} to {largest:g}, got {_shown(value)}"
        )


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{name}: expected a string, got {_shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name}: expected text that UTF-8 can hold, got half a pair") from None


def _check_stop(value: Any) -> None:
    stops = [value] if isinstance(value, str) else value
    fits = isinstance(stops, list) and all(
        isinstance(stop, str) and len(stop) == 1 and stop.isascii() for stop in stops
    )
    if not fits or len(stops) >= MAX_STOP_TOKENS:
        raise ValueError(
            f"stop: expected a string of one ASCII character, or up to {MAX_STOP_TOKENS - 1} of "
            f"them, got {_shown(value)}"
        )


def _shown(value: Any) -> str:
    """A value as JSON, cut short."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
