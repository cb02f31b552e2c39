"""What a program must obey that has kernels lowered through Triton; none of Pallas is needed."""

import contextlib
import math
import warnings
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh

CUSTOM_CALL = "__gpu$xla.gpu.triton"
"""What a kernel is in a lowered program."""

MAX_BYTES = 2**31 - 1
"""The largest array a kernel takes: Pallas' Triton lowering computes offsets with 32 bits."""


def too_large(*arrays: Any) -> str | None:
    """Why a kernel cannot address these arrays, or None where it can."""
    for array in arrays:
        if not all(isinstance(size, int) for size in array.shape):
            return f"needs sizes that are known, got {array.dtype}{array.shape}"
        nbytes = math.prod(array.shape) * array.dtype.itemsize
        if nbytes > MAX_BYTES:
            return (
                f"addresses arrays of at most {MAX_BYTES} bytes, got "
                f"{array.dtype}{array.shape} of {nbytes}"
            )
    return None


@contextlib.contextmanager
def lowering_for(card: str) -> Iterator[None]:
    """The context in which kernels are lowered for a card, there or not."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        # JAX 0.11 and later say so at every lowering; the README says what follows.
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated")
        # JAX 0.11 and later lower for the local GPU or for the one that an abstract mesh names.
        mesh = jax.sharding.get_abstract_mesh()
        named = mesh.abstract_device is not None and mesh.abstract_device.platform == "gpu"
        if not named and jax.default_backend() != "gpu":
            device = AbstractDevice(device_kind=card, num_cores=None, platform="gpu")
            axes = ((1,), ("device",)) if mesh.empty else (mesh.axis_sizes, mesh.axis_names)
            types = None if mesh.empty else mesh.axis_types
            stack.enter_context(
                jax.sharding.use_abstract_mesh(
                    AbstractMesh(*axes, axis_types=types, abstract_device=device)
                )
            )
        yield
