r"""Continues many texts at once with the byte model: requests and results are JSON lines.

python examples/batch_decode.py
python examples/batch_decode.py REQUESTS.jsonl --out RESULTS.jsonl
echo '{"prompt": "import ", "stop": "\n"}' | python examples/batch_decode.py
python examples/batch_decode.py --sweep 1,2,4,8
"""

import argparse
import contextlib
import json
import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from batch_lines import MAX_STOP_TOKENS, encode_line, read_lines, result_line
from byte_model import WEIGHTS, load_model
from command_line import (
    INTERRUPTED,
    MAX_REQUESTS,
    MAX_STEPS,
    Parser,
    output_file,
    print_error,
    whole_number,
)
from tqdm import tqdm

from swa_jax.files import open_new
from swa_jax.requests import Request, Result
from swa_jax.serving import Server

SAMPLE = Path(__file__).parent / "data" / "requests.jsonl"
slot_count = whole_number(1, MAX_REQUESTS)


def run_requests(
    make_server: Callable[[], Server],
    requests: Sequence[Request],
    write: Callable[[dict], None],
    interrupted: Sequence[int],
) -> tuple[list[Result], float]:
    """Serves requests that all arrive at once, and writes each result as it comes.

    Args:
      make_server: a new pool of slots.
      requests: what to continue.
      write: takes a line of the results.
      interrupted: not empty once the user wants to end; the step in flight finishes.

    Returns:
      All results, those cancelled included, and the seconds they took without compilation.
    """
    compile_programs(make_server())
    server = make_server()
    results: list[Result] = []
    most = sum(request.max_new_tokens for request in requests)
    with tqdm(total=most, unit="token", disable=None, leave=False) as bar:
        started = time.perf_counter()
        for request in requests:
            server.submit(request)
        while server.pending:
            finished = server.cancel() if interrupted else server.step()
            results += finished
            with tqdm.external_write_mode():
                for result in finished:
                    write(result_line(result))
                    bar.total -= result.request.max_new_tokens - len(result.tokens)
            bar.set_postfix_str(f"{len(results)}/{len(requests)} requests", refresh=False)
            bar.update(server.tokens_chosen - bar.n)
    return results, time.perf_counter() - started


def compile_programs(server: Server) -> None:
    """One request through a pool, so that times hold no compilation."""
    server.submit(Request([0], max_new_tokens=2))
    while server.pending:
        server.step()


def summarise(results: Sequence[Result], seconds: float, slots: int) -> dict:
    """The figures of a run.

    Args:
      results: of all requests.
      seconds: from the arrival of the requests to the last result.
      slots: requests that decoded at once, at most.

    Returns:
      Counts, throughput and latencies in seconds, under plain names.
    """
    tokens = sum(len(result.tokens) for result in results)
    first = [result.time_to_first_token for result in results if result.reads]
    between = [gap for result in results for gap in result.times_between_tokens]
    return {
        "slots": slots,
        "requests": len(results),
        "cancelled": sum(result.finish == "cancelled" for result in results),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds if tokens else None,
        "time_to_first_token": _spread(first),
        "time_between_tokens": _spread(between),
    }


def print_table(rows: Sequence[dict]) -> None:
    """Figures of runs on standard error, a line for each number of slots."""
    print(
        f"{'slots':>5} {'requests':>8} {'tokens':>7} {'tokens/s':>8}   "
        f"{'to first token, s':^19}   {'between tokens, ms':^19}\n"
        f"{'':31}   {'median':>9} {'95 %':>9}   {'median':>9} {'95 %':>9}",
        file=sys.stderr,
    )
    for row in rows:
        speed = row["tokens_per_second"]
        columns = [f"{'-' if speed is None else format(speed, ',.0f'):>8}"]
        for name, factor in (("time_to_first_token", 1), ("time_between_tokens", 1000)):
            spread = row[name] or {}
            cells = [spread.get("median"), spread.get("percentile_95")]
            shown = ["-" if cell is None else f"{cell * factor:.2f}" for cell in cells]
            columns.append(" ".join(f"{cell:>9}" for cell in shown))
        counts = f"{row['slots']:>5} {row['requests']:>8} {row['tokens']:>7}"
        print(counts + " " + "   ".join(columns), file=sys.stderr)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        prog="batch_decode.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="""\
Continues many texts at once with the byte model. Each line of the input is a JSON object:

  prompt       text to continue
  max_tokens   bytes to choose at most (64)
  temperature  0 takes the likeliest byte each time (0)
  top_k        only the k likeliest bytes; 0: all (0)
  top_p        only the likeliest bytes up to this probability (1)
  stop         an ASCII character that ends the text and is not part of it, or a list of up to
               seven; an end of file always does
  seed         decides what is sampled (0)
  id           string or integer (the line's number)

Each line gets one result, in finishing order: id, line, text, tokens, finish_reason ("stop",
"length", "cancelled" or "error") and time_to_first_token in seconds, all requests arriving at
once; after an error id, line, finish_reason and error.""",
        epilog="""\
Exit status: 0; 1 if a line was no request; 2 for a wrong command; 130 after Ctrl-C, which ends
the requests that are not finished with the text they have.""",
    )
    add = parser.add_argument
    add("requests", nargs="?", metavar="REQUESTS.jsonl",
        help="file of requests; - is standard input, as is nothing where that is a pipe or a file; "
        "otherwise the sample file")  # fmt: skip
    add(
        "--out", type=output_file, metavar="FILE", help="write results here, not to standard output"
    )
    add("--report", type=output_file, metavar="FILE", help="write throughput and latencies as JSON")
    add("--slots", type=slot_count, metavar="N", help="requests at once, at most (8)")
    add("--block-steps", type=whole_number(1, MAX_STEPS), default=16, metavar="N",
        help="bytes of each request between two words to the host (16)")  # fmt: skip
    add("--chunk", type=whole_number(1, MAX_STEPS), default=64, metavar="N",
        help="bytes of a prompt between two blocks (64)")  # fmt: skip
    add("--sweep", type=_slot_counts, metavar="N,N,...",
        help="instead: throughput and latencies by number of slots, and no results but "
        "errors")  # fmt: skip
    add("--weights", type=Path, default=WEIGHTS,
        help="file written by train_bytes.py (the shipped one)")  # fmt: skip
    options = parser.parse_args(arguments)
    named = [options.out, options.report, options.requests and Path(options.requests)]
    places = [path.resolve() for path in named if path is not None]
    if len(set(places)) < len(places):
        parser.error("expected three files for requests, --out and --report, got one twice")
    if options.sweep is not None and options.slots is not None:
        parser.error("argument --slots: --sweep has its own")
    options.slots = options.slots or 8
    return options


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    options = parse_arguments(arguments)
    try:
        return _run(options)
    except BrokenPipeError:  # nobody reads on, as after `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OSError, ValueError) as error:
        print_error("batch_decode.py", error)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(options: argparse.Namespace) -> int:
    requests, errors = read_lines(_read(options.requests))
    model, variables = load_model(options.weights)

    with contextlib.ExitStack() as stack:
        interrupted = stack.enter_context(_interruptions())
        out = sys.stdout.buffer
        if options.out is not None:
            out = stack.enter_context(open_new(options.out))

        def write(fields: dict) -> None:
            out.write(encode_line(fields))
            out.flush()

        for error in errors:
            write(error)
        rows = []
        for slots in options.sweep or [options.slots]:

            def make_server(slots=slots) -> Server:
                return Server(
                    model,
                    variables,
                    slots=slots,
                    block_steps=options.block_steps,
                    chunk=options.chunk,
                    max_stop_tokens=MAX_STOP_TOKENS,
                )

            ignore = options.sweep is not None
            results, seconds = run_requests(
                make_server, requests, (lambda _: None) if ignore else write, interrupted
            )
            rows.append(summarise(results, seconds, slots))
            if interrupted:
                break
    report = {"errors": len(errors), "runs": rows}
    if options.report is not None:
        options.report.write_text(json.dumps(report, indent=2) + "\n")
    print_table(rows)
    if errors:
        print(f"{len(errors)} lines were no requests: see their results", file=sys.stderr)
    return INTERRUPTED if interrupted else 1 if errors else 0


@contextlib.contextmanager
def _interruptions() -> Iterator[list[int]]:
    """A list that the first Ctrl-C adds to; the second is as usual."""
    signals: list[int] = []

    def note(number: int, frame: object) -> None:
        signals.append(number)
        signal.signal(number, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield signals
    finally:
        signal.signal(signal.SIGINT, before)


def _read(name: str | None) -> bytes:
    """The input's bytes."""
    if name is None:
        kind = os.fstat(sys.stdin.fileno()).st_mode
        if not (stat.S_ISFIFO(kind) or stat.S_ISREG(kind) or stat.S_ISSOCK(kind)):
            return SAMPLE.read_bytes()
        print("reading requests from standard input ...", file=sys.stderr)
    return sys.stdin.buffer.read() if name in (None, "-") else Path(name).read_bytes()


def _spread(values: Sequence[float | None]) -> dict | None:
    if not values:
        return None
    median, high = np.percentile(np.array(values, float), [50, 95])
    return {"median": float(median), "percentile_95": float(high)}


def _slot_counts(text: str) -> list[int]:
    counts = [slot_count(part) for part in text.split(",")]
    if len(set(counts)) < len(counts):
        raise argparse.ArgumentTypeError(f"expected each number once, got {text!r}")
    return counts


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
