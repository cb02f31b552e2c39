"""Programs timed in turn, round by round, and compared within each round."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

# Of the programs that measure what the machine can do: a square matrix and an array.
PRODUCT_SIZE, STREAM_BYTES = 1024, 1 << 26
CASE_SECONDS = 40.0
"""After which a case begins no further round, once there are three."""


class Sampled(Protocol):
    """What can be timed."""

    def sample(self) -> float: ...


@dataclasses.dataclass
class Program:
    """One way to do what a case is about.

    Attributes:
      name: of the program, the same in every case.
      run: does it once, and returns its results when they are there.
      temporary_bytes: the largest memory beside arguments and results, by the compiler's analysis;
        None where no compiler says.
      runs: calls in a sample.
      items: equal parts that a call does one after the other, such as chunks of a prompt: its times
        are of one part.
      parameters: sizes of its own, beside those of its case.
    """

    name: str
    run: Callable[[], Any]
    temporary_bytes: int | None = None
    runs: int = 1
    items: int = 1
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def prepare(self, sample_us: float) -> None:
        """Runs it, and finds how many calls a sample of this length takes."""
        call_us = self.items * self.sample()
        self.runs = min(256, max(1, math.ceil(sample_us / call_us)))

    def sample(self) -> float:
        """Microseconds of one part of a call, over all calls of a sample.

        A call before them is not timed: it finds in the processor's caches what the program before
        it left there, and leaves its own.
        """
        self.run()
        start = time.perf_counter_ns()
        for _ in range(self.runs):
            self.run()
        return (time.perf_counter_ns() - start) / 1000 / self.runs / self.items


def compiled(name: str, function: Callable, *arguments: Any, carry: bool = False) -> Program:
    """A jitted function with its arguments.

    Args:
      name: of the program.
      function: of arrays.
      arguments: its arguments, arrays or pytrees.
      carry: whether the first argument is donated and the first result is the next call's first
        argument, as a decode step's cache is. The argument itself is copied.
    """
    donated = (0,) if carry else ()
    program = jax.jit(function, donate_argnums=donated).lower(*arguments).compile()
    memory = temporary_bytes(program)
    if not carry:
        return Program(name, lambda: jax.block_until_ready(program(*arguments)), memory)
    handed_on = jax.tree.map(jnp.copy, arguments[0])

    def run() -> Any:
        nonlocal handed_on
        handed_on, *others = jax.block_until_ready(program(handed_on, *arguments[1:]))
        return handed_on, *others

    return Program(name, run, memory)


def temporary_bytes(program: jax.stages.Compiled) -> int | None:
    """Bytes beside arguments and results, by the compiler's analysis; None where there is none."""
    analysis = program.memory_analysis()
    return None if analysis is None else analysis.temp_size_in_bytes


@dataclasses.dataclass(frozen=True)
class Case:
    """Programs that do the same thing, or one program under conditions that should not matter.

    Attributes:
      suite: such as "read".
      name: of the case within its suite, such as "N=8".
      parameters: the sizes, for plots.
      programs: the first is the one that the others are compared with.
      work: what a call of the first program must do, by the name of the limit: operations for
        "product", bytes read and written for "copy".
      slower_is_better: whether a peer is wanted slow: a ratio is its time over the first one's.
        False where the others are the first program again; None where none of them is ours, so that
        nobody wants anything of them.
    """

    suite: str
    name: str
    parameters: Mapping[str, Any]
    programs: Sequence[Program]
    work: Mapping[str, float] = dataclasses.field(default_factory=dict)
    slower_is_better: bool | None = True


@dataclasses.dataclass(frozen=True)
class Figure:
    """A number that no clock of this kind measures.

    Attributes:
      suite: such as "memory".
      name: of what was measured, within its suite.
      value: the number.
      unit: such as "MB"; "" for a ratio.
      parameters: the sizes, for plots.
    """

    suite: str
    name: str
    value: float
    unit: str
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, 20th and 80th percentile."""
    low, middle, high = np.percentile(np.asarray(list(values), np.float64), [20, 50, 80])
    return {"median": float(middle), "p20": float(low), "p80": float(high)}


def ratios(slow: Sequence[float], fast: Sequence[float]) -> dict[str, float]:
    """The spread of slow / fast over samples that were taken in turn."""
    return spread(a / b for a, b in zip(slow, fast, strict=True))


def sample_in_turn(
    timed: Mapping[str, Sampled], samples: int, seconds: float = math.inf
) -> dict[str, list[float]]:
    """Samples of several programs, in an order that changes, so that drift meets all alike.

    Args:
      timed: programs by name.
      samples: of each.
      seconds: after which no round begins, once there are three.

    Returns:
      The samples by name, in microseconds.
    """
    taken: dict[str, list[float]] = {name: [] for name in timed}
    end = time.monotonic() + seconds
    names = list(timed)
    for i in range(samples):
        if i >= 3 and time.monotonic() > end:
            break
        first = i % len(names)
        for name in names[first:] + names[:first]:
            taken[name].append(timed[name].sample())
    return taken


@dataclasses.dataclass(frozen=True)
class Limit:
    """What the machine can do.

    Attributes:
      program: does it.
      work: of one call: operations, or bytes read and written.
    """

    program: Program
    work: float


def machine_limits(tiny: bool, dtype: str) -> dict[str, Limit]:
    """A matrix product, and an array that is read and written in place.

    Args:
      tiny: in a rehearsal: small sizes.
      dtype: of the matrix product.
    """
    size = 64 if tiny else PRODUCT_SIZE
    square = jnp.ones((size, size), dtype)
    array = jnp.zeros((1 << 12 if tiny else STREAM_BYTES) // 4, jnp.float32)
    product = compiled("matrix product", lambda a: a @ a, square)
    copy = compiled("copy", lambda x: (x + 1,), array, carry=True)
    return {"product": Limit(product, 2 * size**3), "copy": Limit(copy, 2 * array.nbytes)}


def measure(case: Case, limits: Mapping[str, Limit], rounds: int, sample_us: float) -> list[dict]:
    """Times a case's programs, and the limits that its work is measured by, in turn.

    Args:
      case: what to time.
      limits: of this machine.
      rounds: samples of each program.
      sample_us: how long a sample takes at least.

    Returns:
      One line for each program: suite, case, parameters, program, rounds, us (spread and best) and
      temporary_bytes; of the first one shares of the limits, of the others ratios to it.
    """
    programs = {f"program {i}": program for i, program in enumerate(case.programs)}
    used = {name: limits[name] for name in case.work}
    programs |= {f"limit {name}": limit.program for name, limit in used.items()}
    for program in programs.values():
        program.prepare(sample_us)
    taken = sample_in_turn(programs, rounds, CASE_SECONDS)
    own = taken["program 0"]
    lines = []
    for i, program in enumerate(case.programs):
        samples = taken[f"program {i}"]
        line: dict[str, Any] = {
            "suite": case.suite,
            "case": case.name,
            "parameters": {**case.parameters, **program.parameters},
            "program": program.name,
            "rounds": len(samples),
            "us": spread(samples) | {"best": min(samples)},
            "temporary_bytes": program.temporary_bytes,
        }
        if i:
            line["ratio"] = ratios(samples, own)
            line["slower_is_better"] = case.slower_is_better
        else:
            line["share"] = {
                name: spread(
                    case.work[name] / limit.work * machine / us
                    for machine, us in zip(taken[f"limit {name}"], own, strict=True)
                )
                for name, limit in used.items()
            }
        lines.append(line)
    return lines
