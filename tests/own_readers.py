"""What files say, by readers of the tests' own, and whether what was read is the same."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from checkpoint_cases import dequantized


def same(got: Any, want: Any) -> bool:
    """Whether trees are equal, arrays by their bits but for NaN, which is any NaN."""
    got_leaves, got_tree = jax.tree.flatten(got)
    want_leaves, want_tree = jax.tree.flatten(want)
    return got_tree == want_tree and all(map(_same_leaf, got_leaves, want_leaves))


def _same_leaf(got: Any, want: Any) -> bool:
    arrays = jax.Array | np.ndarray | np.generic
    if not isinstance(got, arrays) or not isinstance(want, arrays):
        return type(got) is type(want) and got == want
    if jax.dtypes.issubdtype(got.dtype, jax.dtypes.prng_key):
        got, want = jax.random.key_data(got), jax.random.key_data(want)
    got, want = np.asarray(got), np.asarray(want)
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return False
    if got.tobytes() == want.tobytes():
        return True
    return got.dtype == np.float32 and np.array_equal(got, want, equal_nan=True)


BY_NAME = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu", "BOOL": "bool",
    **{f"{kind[0].upper()}{bits}": f"{kind}{bits}" for kind in ("int", "uint")
       for bits in (8, 16, 32, 64)},
}  # fmt: skip


def contents(data: bytes) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Tensors and texts of a whole file, whose header is taken at its word."""
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    texts = header.pop("__metadata__", None) or {}
    tensors = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        dtype = jnp.dtype(BY_NAME[entry["dtype"]])
        values = np.frombuffer(data[start + first : start + last], dtype)
        tensors[name] = values.reshape(entry["shape"])
    return tensors, texts


def flat(tree: dict, prefix: str = "") -> dict[str, np.ndarray]:
    """A tree's leaves by their joined names."""
    found = {}
    for name, value in tree.items():
        found |= (
            flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
        )
    return found


def values_of(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Matrices times the scales of their blocks, and everything in float32."""
    found = {}
    for name, tensor in tensors.items():
        scales = tensors.get(f"{name}_scale_inv")
        if scales is not None:
            block = next(b for b in (128, 32)
                         if scales.shape == tuple(-(-n // b) for n in tensor.shape))  # fmt: skip
            tensor = dequantized(tensor, scales, block)
        with np.errstate(over="ignore"):
            found[name] = tensor.astype(np.float32)
    return found


def says(config: str, text: str) -> bool:
    """Whether a configuration has what JSON says, and defaults where it says nothing."""

    def agree(got: Any, want: Any) -> bool:
        if isinstance(want, dict) and isinstance(got, dict):
            return all(name in got and agree(got[name], value) for name, value in want.items())
        if isinstance(want, list) and isinstance(got, list):
            return len(got) == len(want) and all(map(agree, got, want))
        return type(got) is type(want) and got == want

    wanted = json.loads(text)
    wanted.pop("model_type", None)
    return agree(json.loads(config), wanted)
