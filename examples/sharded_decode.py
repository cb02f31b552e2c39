r"""Decodes a batch on several devices, and compares its tokens with those of one device.

python examples/sharded_decode.py
python examples/sharded_decode.py --devices 4 --split-heads 2
python examples/sharded_decode.py --processes 2

Without several GPUs the devices are virtual ones of the CPU: they show what runs where, not speed.
"""

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from byte_model import WEIGHTS, load_model
from collectives import carrying_rows, find_collectives
from command_line import MAX_REQUESTS, Parser, output_file, print_error, whole_number
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

import swa_jax as swa
from swa_jax import decoding
from swa_jax.parameter_sharding import parameter_shardings

BLOCK = 8  # tokens between two words to the host
VIRTUAL_DEVICES = 8
device_count = whole_number(1, 64)  # a virtual device has threads and a cache of its own
TEXT = Path(__file__).read_bytes()
LOOPBACK = "127.0.0.1"
SECONDS_TO_FINISH = 900


def make_prompts(count: int) -> list[bytes]:
    """Pieces of this file of different lengths, some longer than the window."""
    starts = (60 * i % (len(TEXT) - 270) for i in range(count))
    return [TEXT[start : start + 20 + 37 * i % 250] for i, start in enumerate(starts)]


def decode(
    model: swa.Decoder, variables: dict, sharding: NamedSharding | None, batch: int, count: int
) -> dict:
    """Continues the prompts, and reads what the compiled program sends between devices.

    Args:
      model: the decoder.
      variables: its parameters, on one device.
      sharding: of the cache; None for one device.
      batch: number of prompts; each has a state slot.
      count: tokens to choose for each.

    Returns:
      Tokens, memory, collectives and seconds, under plain names.
    """
    started = time.perf_counter()
    config = model.config
    if sharding is not None:
        # From the host: with several processes no device is everybody's.
        variables = jax.device_put(
            jax.tree.map(np.asarray, variables), parameter_shardings(model, sharding)
        )
    cache = swa.RingCache.for_decoder(config, batch, sharding)
    memory = cache.memory
    state = decoding.begin(
        model,
        variables,
        cache,
        make_prompts(batch),
        max_new_tokens=count,
        sampling=swa.Sampling.build(batch, temperature=0.7),
    )
    compiled = decoding.decode_block.lower(model, variables, state, BLOCK).compile()
    found = find_collectives(compiled.as_text() or "")
    aliased: Any = compiled.memory_analysis()
    requests = batch // (memory.devices // memory.copies)
    largest = requests * 4 * max(config.vocab_size, config.hidden_size)
    tokens = [np.asarray(state.tokens)[:, None]]
    while np.any(np.asarray(state.remaining) > 0):
        state, new = compiled(variables, state)
        tokens.append(np.asarray(new))
    rows = np.concatenate(tokens, axis=1)
    return {
        "tokens": [row[row >= 0].tolist() for row in rows],
        "mode": memory.mode,
        "devices": memory.devices,
        "slots": memory.slots,
        "slots_per_device": memory.slots_per_device,
        "copies_of_rows": memory.copies,
        "row_bytes_per_device": memory.bytes_per_device,
        "row_bytes_of_all_devices": memory.bytes_of_all_devices,
        "cache_updated_in_place": aliased.alias_size_in_bytes >= memory.bytes_per_device,
        "collectives": dict(Counter(one.kind for one in found)),
        "collective_bytes": sum(one.nbytes for one in found),
        "collectives_carrying_rows": len(carrying_rows(found, largest)),
        "seconds": time.perf_counter() - started,
    }


def decode_on_meshes(options: argparse.Namespace, progress: bool) -> list[dict]:
    """A result for each way to split, in this process or in all of them."""
    devices = _devices(options)
    model, variables = load_model(options.weights)
    splits = options.split_heads or _splits(model.config, len(devices))
    results = []
    for heads in tqdm(splits, "meshes", disable=not progress):
        if len(devices) % heads:
            raise ValueError(f"--split-heads: expected a divisor of {len(devices)}, got {heads}")
        batch, parts = options.prompts or len(devices), len(devices) // heads
        if batch % parts:
            raise ValueError(f"--prompts: expected a multiple of {parts}, got {batch}")
        mesh = Mesh(np.array(devices).reshape(-1, heads), ("requests", "heads"))
        sharding = NamedSharding(mesh, PartitionSpec("requests"))
        result = decode(model, variables, sharding, batch, options.bytes)
        results.append({"mesh": [parts, heads]} | result)
    return results


def run_processes(options: argparse.Namespace) -> list[dict]:
    """The results of several processes on this machine, which form one mesh.

    Raises:
      ValueError: one of them failed, or they do not agree.
    """
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        address = f"{LOOPBACK}:{probe.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        reports = [Path(folder, f"{i}.json") for i in range(options.processes)]
        common = [sys.executable, __file__, *_common_arguments(options), "--address", address]
        children = []
        for i, report in enumerate(reports):
            command = [*common, "--process", str(i), "--report", str(report)]
            with Path(folder, f"{i}.txt").open("wb") as log:
                environment = os.environ | {"JAX_PLATFORMS": "cpu"}
                children.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        try:
            _wait(children, folder)
        finally:
            for child in children:
                child.kill()
                child.wait()
        first, *others = (json.loads(report.read_text()) for report in reports)
    for other in others:
        for mine, yours in zip(first, other, strict=True):
            if mine["tokens"] != yours["tokens"]:
                raise ValueError("processes: expected the same tokens from each, got others")
    return first


def print_table(report: dict) -> None:
    """The report on standard output."""
    print(
        f"{report['processes']} process(es), {report['devices']} devices: {report['device_kind']}"
    )
    print("| requests x heads | slots on a device | row bytes on a device | of all devices | "
          "in place | collectives | carrying rows | tokens equal |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    for mesh in report["meshes"]:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(mesh["collectives"].items()))
        print(
            f"| {mesh['mesh'][0]} x {mesh['mesh'][1]} | {mesh['slots_per_device']} of "
            f"{mesh['slots']} | {mesh['row_bytes_per_device']:,} | "
            f"{mesh['row_bytes_of_all_devices']:,} | "
            f"{'yes' if mesh['cache_updated_in_place'] else 'NO'} | {kinds or 'none'}: "
            f"{mesh['collective_bytes']:,} bytes | {mesh['collectives_carrying_rows']} | "
            f"{'yes' if mesh['tokens_equal'] else 'NO'} |"
        )
    print("Collectives are those in the text of a block's program; a loop's count once.")


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        prog="sharded_decode.py",
        description="Decodes a batch on several devices: requests over some, heads over others. "
        "Compares with one device, and lists what the compiled program sends between devices.",
    )
    add = parser.add_argument
    add("--devices", type=device_count, metavar="N",
        help="devices in all (every GPU; 8 virtual devices of the CPU without any)")  # fmt: skip
    add("--processes", type=device_count, default=1, metavar="N",
        help="processes that share the devices, on this machine's CPU (1)")  # fmt: skip
    add("--split-heads", type=device_count, nargs="+", metavar="N",
        help="devices that split heads; one run for each (all that fit)")  # fmt: skip
    add("--prompts", type=whole_number(1, MAX_REQUESTS), metavar="N",
        help="requests in the batch (one for each device)")  # fmt: skip
    add("--bytes", type=whole_number(1, 2**31 - 1), default=24, metavar="N",
        help="bytes to generate (24)")  # fmt: skip
    add(
        "--weights",
        type=Path,
        default=WEIGHTS,
        help="file written by train_bytes.py (the shipped one)",
    )
    add("--report", type=output_file, metavar="FILE", help="write the report as JSON")
    # One of several processes, started by the first.
    add("--process", type=int, help=argparse.SUPPRESS)
    add("--address", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if (options.devices or VIRTUAL_DEVICES) % options.processes:
        parser.error(
            f"argument --processes: expected a divisor of {options.devices or VIRTUAL_DEVICES} "
            f"devices, got {options.processes}"
        )
    return options


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    options = parse_arguments(arguments)
    try:
        if options.process is not None:
            results = _run_as_process(options)
            options.report.write_text(json.dumps(results))
            return 0
        if options.processes > 1:
            jax.config.update("jax_platforms", "cpu")
            results = run_processes(options)
        else:
            _use_virtual_devices(options.devices or VIRTUAL_DEVICES)
            results = decode_on_meshes(options, progress=sys.stderr.isatty())
        model, variables = load_model(options.weights)
        one = decode(model, variables, None, results[0]["slots"], options.bytes)
        for result in results:
            result["tokens_equal"] = result["tokens"] == one["tokens"]
        report = {
            "processes": options.processes,
            "devices": results[0]["devices"],
            "device_kind": jax.devices()[0].device_kind,
            "one_device": one,
            "meshes": results,
        }
        if options.report is not None:
            options.report.write_text(json.dumps(report, indent=2) + "\n")
    except (OSError, ValueError) as error:
        print_error("sharded_decode.py", error)
        return 2
    print_table(report)
    good = all(r["tokens_equal"] and not r["collectives_carrying_rows"] for r in results)
    return 0 if good else 1


def _use_virtual_devices(count: int) -> None:
    """Lets the CPU count as several devices; GPUs are as many as there are."""
    jax.config.update("jax_num_cpu_devices", count)


def _devices(options: argparse.Namespace) -> list[Any]:
    devices = jax.devices()
    count = options.devices or len(devices)
    if not 2 <= count <= len(devices):
        raise ValueError(
            f"devices: expected 2 to {len(devices)} of {devices[0].device_kind!r}, got {count}; "
            f"with JAX_PLATFORMS=cpu there are as many as are asked for"
        )
    return devices[:count]


def _splits(config: swa.DecoderConfig, devices: int) -> list[int]:
    """In how many parts heads can be, at most all devices."""
    common = math.gcd(devices, *(math.gcd(c.num_heads, c.o_groups) for c in config.layers))
    return [count for count in range(1, common + 1) if common % count == 0]


def _common_arguments(options: argparse.Namespace) -> list[str]:
    devices = options.devices or VIRTUAL_DEVICES
    values = {"devices": devices, "processes": options.processes, "prompts": options.prompts,
              "bytes": options.bytes, "weights": options.weights}  # fmt: skip
    arguments = [f"--{name}={value}" for name, value in values.items() if value is not None]
    if options.split_heads is not None:
        arguments += ["--split-heads", *map(str, options.split_heads)]
    return arguments


def _run_as_process(options: argparse.Namespace) -> list[dict]:
    """One of several processes: joins the others, then does what each of them does."""
    _use_virtual_devices(options.devices // options.processes)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        options.address,
        options.processes,
        options.process,
        coordinator_bind_address=options.address,  # not every network of the machine
    )
    results = decode_on_meshes(options, progress=False)
    jax.distributed.shutdown()
    return results


def _wait(children: list[subprocess.Popen], folder: str) -> None:
    """Until all have finished, or one has failed: the others would wait for it forever."""
    end = time.monotonic() + SECONDS_TO_FINISH
    while any(child.poll() is None for child in children):
        if time.monotonic() > end:
            raise ValueError(f"processes: expected an end within {SECONDS_TO_FINISH} s, got none")
        if any(child.poll() for child in children):
            break
        time.sleep(0.1)
    for i, child in enumerate(children):
        if child.poll():
            lines = Path(folder, f"{i}.txt").read_text(errors="replace").strip().splitlines()
            raise ValueError(f"process {i}: {lines[-1] if lines else 'failed without a word'}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
