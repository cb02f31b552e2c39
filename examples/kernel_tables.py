"""The README's two tables of shipped kernels: what each compiles to, and how long it may take."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import kernel_model

# Each table stands between two marks of a document, in this order.
MARKS = (
    ("<!-- kernel table -->", "<!-- end of kernel table -->"),
    ("<!-- kernel time model -->", "<!-- end of kernel time model -->"),
)
CODE_COLUMNS = (
    "kernel", "card", "registers", "spill bytes", "shared memory", "instructions", "tensor core",
    "16-byte loads", "16-byte stores",
)  # fmt: skip
TIME_COLUMNS = (
    "kernel", "card", "requests", "waves", "bytes us", "issue us", "tensor us", "merge us",
    "model us", "bound by", "one by one us",
)  # fmt: skip


def code_table(compiled: Sequence[tuple[Any, Any, Any]]) -> str:
    """Registers, memory and instructions of every kernel, as a Markdown table.

    Args:
      compiled: entries of `shipped_kernels.SHIPPED`, each with its `triton_ir.Kernel` and its
        `machine_code.MachineCode`.
    """
    return _markdown(CODE_COLUMNS, [_code_row(entry, code) for entry, _, code in compiled])


def _code_row(entry: Any, code: Any) -> list[str]:
    tensor_core = ", ".join(f"{count} {name}" for name, count in sorted(code.tensor_core.items()))
    return [
        entry.name,
        entry.card,
        str(code.registers),
        str(code.spill_stores + code.spill_loads),
        f"{code.shared_memory:,}",
        f"{code.instructions:,}",
        tensor_core or "none",
        str(code.global_loads[16]),
        str(code.global_stores[16]),
    ]


def time_table(compiled: Sequence[tuple[Any, Any, Any]]) -> str:
    """The modelled time of every kernel for its decode batches, as a Markdown table and a line.

    Args:
      compiled: see `code_table`.

    Raises:
      ValueError: see `kernel_model.model_times`.
    """
    table = _markdown(TIME_COLUMNS, [row for one in compiled for row in _time_rows(*one)])
    return f"{table}\n\nA launch adds about {kernel_model.LAUNCH_MICROSECONDS} us, by assumption."


def _time_rows(entry: Any, kernel: Any, code: Any) -> Iterator[list[str]]:
    for requests in entry.requests:
        times = kernel_model.model_times(
            code,
            entry.work(requests),
            programs=math.prod(kernel.grid) // entry.queries * requests,
            warps=kernel.num_warps,
            trips=entry.trips(),
            model=kernel_model.CARD_MODELS[entry.card],
        )
        terms = [times.bytes, times.issue, times.tensor, times.merge, times.model]
        yield [
            entry.name,
            entry.card,
            str(requests),
            str(times.waves),
            *map(_microseconds, terms),
            times.bound_by,
            _microseconds(times.one_by_one),
        ]


def _microseconds(time: float) -> str:
    if not time:
        return "0"
    return f"{time:.2f}" if time < 1 else f"{time:.1f}"


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", "---", *["---:"] * (len(columns) - 2)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, rule, *rows))
