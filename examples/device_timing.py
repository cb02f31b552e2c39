"""Times both operations, kernel against XLA, side by side in one run."""

import dataclasses
import math
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from benchmark_clock import ratios, sample_in_turn, spread
from device_cases import Context, compile_all, device_arguments
from device_shapes import Shape, inputs_of, loop_of, shapes_of, timed_program, work_of
from jax import lax

NO_COMMAND_BUFFER = {"xla_gpu_enable_command_buffer": ""}
WAVE = 5  # shapes that are compiled at once
PROFILED = 4  # shapes whose kernels are timed by the profiler as well
PROFILE_SECONDS = 15.0
SHAPE_SECONDS = 3.0


# --- the clock


class Timed:
    """A program with its inputs on the card, ready to be timed.

    Args:
      program: compiled; its first argument and its result are what is handed on.
      inputs: its arguments on the card.
      total: calls of the operation in one run.
      sample_us: how long a sample takes at least.
    """

    def __init__(self, program: Callable, inputs: tuple, total: int, sample_us: float):
        self.program, self.total = program, total
        self.handed_on, self.others = jnp.copy(inputs[0]), inputs[1:]
        self.runs = 1
        self.sample()  # warm: the first run loads the code
        took = self.sample() * total
        self.runs = min(64, max(1, math.ceil(sample_us / took)))

    def sample(self) -> float:
        """Microseconds of one call, over all runs of a sample."""
        start = time.perf_counter_ns()
        for _ in range(self.runs):
            self.handed_on = self.program(self.handed_on, *self.others)
        self.handed_on.block_until_ready()
        return (time.perf_counter_ns() - start) / 1000 / (self.runs * self.total)


# --- the stage


def time_table(context: Context) -> None:
    """Times the shapes, the most important first, until the time is over."""
    found, sizes = context.found, context.sizes
    copy = copy_bandwidth(context)
    found.result("copy_gb_per_s", copy)
    found.result("empty_loop_us_per_trip", empty_loop(context))
    # CPUs compute in float32: their bfloat16 is slower.
    dtype = np.float32 if context.kernel is None else ml_dtypes.bfloat16
    shapes = shapes_of(sizes)
    wave_seconds = 0.0
    kept = []
    reserve = PROFILE_SECONDS if context.device.platform == "gpu" else 0
    for first in range(0, len(shapes), WAVE):
        wave = shapes[first : first + WAVE]
        if found.seconds_left - reserve < wave_seconds:
            for shape in shapes[first:]:
                found.append("skipped", str(shape))
            break
        started = time.monotonic()
        found.progress(f"compiling shapes {first + 1} to {first + len(wave)} of {len(shapes)}")
        inputs = {shape: inputs_of(shape, context, dtype) for shape in wave}
        programs = _compile_wave(context, inputs)
        for shape in wave:
            if found.seconds_left <= 0:
                found.append("skipped", str(shape))
                continue
            with found.attempt(f"time of {shape}"):
                found.progress(str(shape))
                found.append("rows", _time_shape(context, shape, programs, inputs[shape], copy))
                if len(kept) < PROFILED and context.kernel is not None:
                    kept.append((shape, programs[shape, "kernel"]))
        wave_seconds = 1.2 * (time.monotonic() - started)
    for shape, program in kept:
        if found.seconds_left < 3:
            break
        found.progress(f"profile of {shape}")
        inputs = context.put(inputs_of(shape, context, dtype))
        found.append("kernels", {"shape": str(shape)} | kernel_times(program, inputs))


def _programs_of(context: Context) -> dict[str, tuple[Any, dict]]:
    """Implementation and compiler options by the program's name; the kernel's own comes first."""
    programs: dict[str, tuple[Any, dict]] = {"xla": ("xla", {})}
    if context.kernel is not None:
        kernel = context.kernel
        programs = {"kernel": (kernel, {}), **programs}
        programs["kernel, no command buffer"] = (kernel, NO_COMMAND_BUFFER)
    return programs


def _compile_wave(context: Context, inputs: dict[Shape, tuple]) -> dict[Any, Callable]:
    jobs: dict[Any, Any] = {}
    options = {}
    for shape in inputs:
        arguments = device_arguments(inputs[shape], context.device)
        for name, (implementation, compiler_options) in _programs_of(context).items():
            loop = loop_of(context, name)
            function = timed_program(shape, context.sizes, implementation, loop)
            jobs[shape, name] = (function, arguments)
            options[shape, name] = compiler_options
    return compile_all(context, jobs, options)


def _time_shape(context, shape, programs, host: tuple, copy: float) -> dict:
    moved, operations = work_of(shape, host, context.sizes)
    inputs = context.put(host)
    timed, refused = {}, {}
    for name in _programs_of(context):
        try:
            total = loop_of(context, name).total
            timed[name] = Timed(programs[shape, name], inputs, total, context.sizes.sample_us)
        except Exception as error:
            if name in ("kernel", "xla"):
                raise
            refused[name] = str(error)  # an option of the compiler that is not there
    samples = sample_in_turn(timed, context.sizes.samples, SHAPE_SECONDS)
    row = dataclasses.asdict(shape)
    row |= {"queries": shape.queries, "bytes": moved, "operations": operations}
    row["programs"] = {}
    for name, taken in samples.items():
        us = spread(taken)
        rate = moved / us["median"] / 1000
        row["programs"][name] = {
            "us": us,
            "samples": len(taken),
            "calls_per_sample": timed[name].runs * timed[name].total,
            "gb_per_s": rate,
            "tflop_per_s": operations / us["median"] / 1e6,
            "share_of_copy": rate / copy,
        }
    row["ratios"] = {
        f"{name} / kernel": ratios(taken, samples["kernel"])
        for name, taken in samples.items()
        if name != "kernel" and "kernel" in samples
    }
    return row | ({"refused": refused} if refused else {})


def copy_bandwidth(context: Context) -> float:
    """GB/s read and written by copies of a large array on the card: the median of samples."""
    source = context.put(np.zeros(context.sizes.copy_bytes, np.uint8))
    copy = jax.jit(jnp.copy)
    copy(source).block_until_ready()
    rates = []
    end = time.monotonic() + 2
    while len(rates) < context.sizes.samples and (not rates or time.monotonic() < end):
        start = time.perf_counter_ns()
        for _ in range(4):
            result = copy(source)
        result.block_until_ready()
        rates.append(4 * 2 * source.nbytes / (time.perf_counter_ns() - start))
    return spread(rates)["median"]


def empty_loop(context: Context) -> float:
    """Microseconds that a trip of a loop takes with next to nothing in it."""
    trips = 512
    loop = jax.jit(lambda x: lax.fori_loop(0, trips, lambda i, x: x + 1, x), donate_argnums=0)
    timed = Timed(loop, (context.put(np.float32(0)),), trips, context.sizes.sample_us)
    return spread([timed.sample() for _ in range(context.sizes.samples)])["median"]


def kernel_times(program: Callable, inputs: tuple) -> dict:
    """Microseconds of each kernel in one run of a program, from the profiler: without launches.

    Returns:
      "kernels": spread and count by name; or "reason", why there are none.
    """
    try:
        handed_on = program(*inputs)
        handed_on.block_until_ready()
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                program(handed_on, *inputs[1:]).block_until_ready()
            traces = sorted(Path(folder).rglob("*.xplane.pb"))
            profile = jax.profiler.ProfileData.from_file(str(traces[-1]))
            times = defaultdict(list)
            for plane in profile.planes:
                for line in plane.lines if plane.name.startswith("/device:GPU") else ():
                    if line.name.lower().startswith("stream"):  # the others sum these up
                        for event in line.events:
                            times[event.name].append(event.duration_ns / 1000)
    except Exception as error:
        return {"reason": f"{type(error).__name__}: {error}"}
    if not times:
        return {"reason": "the profile names no kernel of a GPU"}
    return {
        "kernels": {
            name: spread(taken) | {"count": len(taken)} for name, taken in sorted(times.items())
        }
    }
