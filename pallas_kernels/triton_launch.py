"""The launch of a kernel that is lowered through Triton."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu


def launch(
    kernel: Callable[..., None],
    operands: Sequence[jax.Array],
    out: Any,
    *,
    grid: tuple[int, ...],
    num_warps: int,
    aliases: Mapping[int, int] | None = None,
    interpret: bool,
) -> Any:
    """Runs a kernel whose references are whole arrays in the card's memory.

    Args:
      kernel: called with a reference for each operand and result, for each point of the grid. Its
        name is the kernel's in profiles.
      operands: arrays of any shape, of at most `triton_common.MAX_BYTES` each.
      out: pytree of jax.ShapeDtypeStruct, the results, as large at most.
      grid: at most two axes: vmap adds one, and there are three.
      num_warps: warps of a program.
      aliases: which operand's memory a result takes.
      interpret: run step by step by XLA instead, on any device.

    Returns:
      The results.
    """
    whole = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        kernel,
        out_shape=out,
        grid=grid,
        in_specs=[whole] * len(operands),
        out_specs=jax.tree.map(lambda _: whole, out),
        input_output_aliases=dict(aliases or {}),
        # These parameters are what selects Triton: without them Pallas takes Mosaic GPU.
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
    )(*operands)
