"""Compiles a whole program for a card that is not there: copies, memory, loops and launches.

XLA's own list of what it launches is read, not guessed from the HLO: one sort may be dozens of
launches. Two things differ where a card is present: XLA may record launches in CUDA graphs, and it
chooses matrix products by timing them (here all are Triton fusions).
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gpu_compiler
from whole_copies import whole_copies

# Entries of XLA's list that launch nothing themselves.
CONTROL = frozenset(["kWhile", "kConditional", "kSequential", "kCommandBuffer", "kWaitForStreams"])


@dataclasses.dataclass
class Step:
    """One entry of XLA's list of what it runs.

    Attributes:
      kind: XLA's word: kCustomKernel, kCopy, kMemzero, kGemm, kWhile, kConditional and others.
      name: the kernel; of a kind without names, the kind.
      source: the JAX operations it comes from, where the HLO tells.
      grid: blocks along x, y and z.
      threads: of a block, along x, y and z.
      shared_memory: bytes of a block.
      trips: how often a loop runs, None if that is not known.
      inner: of a loop its condition and body, of a conditional its branches; under "" what others
        consist of, such as the copy of a slice.
    """

    kind: str
    name: str
    source: str = ""
    grid: tuple[int, ...] = ()
    threads: tuple[int, ...] = ()
    shared_memory: int = 0
    trips: int | None = None
    inner: dict[str, list["Step"]] = dataclasses.field(default_factory=dict)

    @property
    def launches(self) -> int:
        """Launches of one execution; of a loop, of one trip; of a conditional, the most.

        A loop inside counts with all its trips, or with one if their number is not known.
        """
        if self.kind == "kWhile":
            # The condition of a loop whose trips are known is not evaluated.
            parts = [self.inner["body"]] + [self.inner["condition"]] * (self.trips is None)
            return sum(_count(part) for part in parts)
        if self.inner:
            return max(_count(part) for part in self.inner.values())
        return int(self.kind not in CONTROL and not self.kind.endswith("Done"))


def _count(steps: Sequence[Step]) -> int:
    return sum(step.launches * (1 if step.trips is None else step.trips) for step in steps)


@dataclasses.dataclass(frozen=True)
class Program:
    """A program compiled for one card.

    Attributes:
      compiled: the HLO, the PTX and the bytes of arguments, results and temporaries.
      steps: what it runs, in order.
    """

    compiled: gpu_compiler.Compiled
    steps: list[Step]

    @property
    def temporary_bytes(self) -> int:
        return self.compiled.temporary_bytes

    @property
    def alias_bytes(self) -> int:
        return self.compiled.alias_bytes

    def copies(self, shape: Sequence[int]) -> list[str]:
        """The HLO instructions that copy a whole uint8 array of a shape, inside fusions too.

        Args:
          shape: of the array, such as a block of a cache.
        """
        return whole_copies(self.compiled.hlo, shape)

    @property
    def entry_launches(self) -> int:
        """Launches outside loops; of a conditional, the branch with the most."""
        return _count([step for step in self.steps if step.kind != "kWhile"])

    @property
    def all_launches(self) -> int:
        """Launches of one call; a loop whose trips are not known counts with one."""
        return _count(self.steps)

    @property
    def loops(self) -> list[Step]:
        """All loops, outer before inner."""
        return [step for step, _ in _walk(self.steps) if step.kind == "kWhile"]

    def breakdown(self) -> Counter[tuple[str, str, str]]:
        """Launches by place, name and source.

        The place is "" outside loops and branches; in a loop it names the loop by its number in
        `loops` and its trips: "loop 0, 43 trips". Names are without XLA's running numbers.
        """
        counts: Counter[tuple[str, str, str]] = Counter()
        for step, place in _walk(self.steps):
            if not step.inner and step.launches:
                counts[place, re.sub(r"(_+\d+)+$", "", step.name), step.source] += 1
        return counts

    def table(self) -> str:
        """The breakdown as a Markdown table."""
        rows = ["| place | launches | what | from |", "| --- | ---: | --- | --- |"]
        for (place, name, source), count in self.breakdown().items():
            rows.append(f"| {place} | {count} | {name} | {source} |")
        return "\n".join(rows)


def compile_program(
    fn: Callable,
    shapes: Sequence[Any],
    donate: int | tuple[int, ...] = (),
    card: str = "NVIDIA H200",
) -> Program:
    """Compiles a function for a card that is not there.

    Args:
      fn: a function of arrays.
      shapes: its arguments; shapes and dtypes suffice.
      donate: positions of the arguments that are given up.
      card: JAX's device kind, one of `gpu_compiler.CARDS`.

    Returns:
      The compiled program.

    Raises:
      CompilationError: XLA or Triton refused it.
      ValueError: the card is not known.
    """
    lowered = gpu_compiler.lower(fn, *shapes, card=card, donate=donate)
    compiled = gpu_compiler.compile_module(lowered.compiler_ir("stablehlo"), card)
    return Program(compiled, read_steps(compiled.launches, compiled.hlo))


def _walk(steps: Sequence[Step]) -> Iterator[tuple[Step, str]]:
    """Every step with its place, outer before inner."""
    numbers = iter(range(10**6))

    def visit(steps: Sequence[Step], place: str) -> Iterator[tuple[Step, str]]:
        for step in steps:
            yield step, place
            inside = place
            if step.kind == "kWhile":
                trips = "unknown" if step.trips is None else step.trips
                inside = f"loop {next(numbers)}, {trips} trips"
            for label, part in step.inner.items():
                if label == "condition":
                    # Evaluated only if the number of trips is not known.
                    if step.trips is None:
                        yield from visit(part, f"{inside}, condition")
                elif label in ("body", ""):
                    yield from visit(part, inside)
                else:
                    yield from visit(part, f"{inside}, {label}".removeprefix(", "))

    return visit(steps, "")


# --- XLA's list of launches

_LABEL = re.compile(r"\s*(\w+):\s*$")
_STEP = re.compile(r"(?P<indent>\s*)\d+: (?P<kind>k\w+)\s+\[[^\]]*\]\s*(?P<rest>.*)$")
_KERNEL = re.compile(
    r"(?P<name>\S+) grid: \[(?P<grid>[^\]]*)\] threads: \[(?P<threads>[^\]]*)\]"
    r"\s+shared_memory: (?P<shared>\d+) bytes"
)


def read_steps(launches: str, hlo: str) -> list[Step]:
    """Reads XLA's list of launches, with the trips of its loops and the sources from the HLO."""
    steps: list[Step] = []
    stack, label = [(0, steps)], None  # (indentation, steps) of the lists that are open
    for line in launches.splitlines():
        if found := _LABEL.match(line):
            label = found[1]
        elif found := _STEP.match(line):
            indent = len(found["indent"])
            while stack[-1][0] > indent or (label and stack[-1][0] == indent):
                stack.pop()
            if stack[-1][0] < indent:
                part = stack[-1][1][-1].inner.setdefault(label or "", [])
                stack.append((indent, part))
                label = None
            stack[-1][1].append(_read_step(found["kind"], found["rest"].strip()))
    computations = _computations(hlo)
    _add_trips(steps, computations, "ENTRY")
    sources = _sources(hlo)
    for step, _ in _walk(steps):
        step.source = sources.get(re.sub(r"__\d+$", "", step.name), "")
    return steps


def _read_step(kind: str, rest: str) -> Step:
    kernel = _KERNEL.match(rest)
    if not kernel:
        return Step(kind, kind)
    grid, threads = (tuple(map(int, kernel[key].split(","))) for key in ("grid", "threads"))
    return Step(kind, kernel["name"], "", grid, threads, int(kernel["shared"]))


def _add_trips(steps: Sequence[Step], computations: dict[str, list[str]], name: str) -> None:
    """Finds the HLO of each loop and conditional: both lists are in the order of execution."""
    control = [line for line in computations[name] if re.search(r"\b(while|conditional)\(", line)]
    ours = [step for step in steps if step.kind in ("kWhile", "kConditional")]
    if len(control) != len(ours):
        return
    for step, line in zip(ours, control, strict=True):
        trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
        step.trips = int(trips[1]) if trips and step.kind == "kWhile" else None
        called = re.findall(r"(\w+)_computation=%?([\w.-]+)", line)
        if step.kind == "kWhile":
            called = [(key, _called(key, line)) for key in ("condition", "body")]
        elif branches := re.search(r"branch_computations=\{([^}]*)\}", line):
            names = enumerate(re.findall(r"[\w.-]+", branches[1]))
            called = [(f"branch {number}", name) for number, name in names]
        # By order: XLA's list calls the first of two branches false, the HLO calls it true.
        parts = list(step.inner.values())
        step.inner = {label: part for (label, _), part in zip(called, parts, strict=True)}
        for (_, name), part in zip(called, parts, strict=True):
            _add_trips(part, computations, name)


def _called(key: str, line: str) -> str:
    return re.findall(rf"\b{key}=%?([\w.-]+)", line)[0]


def _computations(hlo: str) -> dict[str, list[str]]:
    """The lines of each computation's instructions; the program's own is called ENTRY."""
    found: dict[str, list[str]] = {}
    name = None
    for line in hlo.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line):
            name = head[1] and "ENTRY" or head[2]
            found[name] = []
        elif line == "}":
            name = None
        elif name:
            found[name].append(line)
    return found


def _sources(hlo: str) -> dict[str, str]:
    """The JAX operations of each HLO instruction, by the name its kernel gets."""
    named = re.findall(r'%([\w.-]+) = .*metadata=\{[^}]*?op_name="([^"]*)"', hlo)
    return {re.sub(r"[.-]", "_", name): source for name, source in named}
