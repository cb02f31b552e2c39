"""Checks of arguments at the boundary of a public call: expected and got, at trace time."""

import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Int

INT32_MAX = 2**31 - 1


def is_power_of_two(n: int) -> bool:
    """Whether n is 1, 2, 4, 8, ..."""
    return n > 0 and n & (n - 1) == 0


def is_known(*values: Any) -> bool:
    """Whether values are there to be looked at, not traced."""
    return not any(isinstance(value, Tracer) for value in values)


def known_array(name: str, value: Any) -> np.ndarray:
    """A known value, or several in lists, as an array; ValueError where the lists are ragged."""
    try:
        return np.asarray(value)
    except ValueError:
        raise ValueError(f"{name}: expected values of one shape, got {value!r}") from None


def as_int32(name: str, value: Any) -> Int[Array, "..."]:
    """Integers of any kind as an int32 array.

    Args:
      name: the argument's name, for the message.
      value: a Python or NumPy integer, or an integer array of any shape. A traced array of a
        wider dtype is cast, as nothing is known of its values.

    Returns:
      int32 array of the same shape.

    Raises:
      ValueError: it is not integer (booleans are not), or a value lies outside int32.
    """
    if not hasattr(value, "dtype"):
        value = known_array(name, value)
        if value.size == 0:  # an empty list has the dtype of floats
            value = value.astype(np.int32)
    dtype = value.dtype
    if not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(f"{name}: expected integers, got dtype {dtype}")
    if isinstance(value, jax.Array) and dtype == jnp.int32:
        # A weak type, as of jnp.asarray(5), would be one more program of whoever is given it.
        return lax.convert_element_type(value, jnp.int32) if value.weak_type else value
    if is_known(value):
        values = np.asarray(value)
        if values.size and (values.min() < -(2**31) or values.max() > INT32_MAX):
            raise ValueError(f"{name}: expected int32 values, got {values.min()} to {values.max()}")
        return jnp.asarray(values.astype(np.int32))
    return value.astype(jnp.int32)


def known_int(name: str, value: Any) -> int | None:
    """The Python integer that a scalar is, or None while it is traced.

    Raises:
      ValueError: it is not an integer scalar.
    """
    if not is_known(value):
        check_shape(name, value, ())
        return None
    array = known_array(name, value)
    if array.shape or array.dtype.kind not in "iu":
        raise ValueError(f"{name}: expected an integer, got {value!r}")
    return int(array)


def as_float(name: str, value: Any) -> float:
    """A number that is part of the program, not of its data.

    Raises:
      ValueError: it is traced, or not a number.
    """
    if is_known(value):
        array = known_array(name, value)
        if not array.shape and array.dtype.kind in "iuf":
            return float(array)
    raise ValueError(f"{name}: expected a number known when the program is traced, got {value!r}")


def check_type(name: str, value: object, kind: type) -> None:
    """Raises ValueError unless the value is a `kind`; a class is none, whatever it has."""
    if isinstance(value, type) or not isinstance(value, kind):
        got = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise ValueError(f"{name}: expected {article} {kind.__name__}, got {got}")


def check_number(name: str, value: Any) -> None:
    """Raises ValueError unless the dtype is that of integers or floating numbers."""
    dtype = value.dtype if hasattr(value, "dtype") else known_array(name, value).dtype
    if not (jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)):
        raise ValueError(f"{name}: expected a number, got dtype {dtype}")


def check_not_negative(name: str, value: Any) -> None:
    """Raises ValueError where a known value, or one of an array's, is below 0."""
    if is_known(value) and np.any(np.asarray(value) < 0):
        raise ValueError(f"{name}: expected 0 or more, got {np.asarray(value).tolist()}")


def check_shape(name: str, value: ArrayLike, expected: Sequence[int | None]) -> None:
    """Raises ValueError unless the shape is `expected`, where None stands for any size."""
    shape = jnp.shape(value)
    fits = len(shape) == len(expected) and all(
        want is None or want == got for want, got in zip(expected, shape, strict=True)
    )
    if not fits:
        text = ", ".join("any" if size is None else str(size) for size in expected)
        raise ValueError(f"{name}: expected shape ({text}), got {shape}")


def check_floating(name: str, value: Array) -> None:
    """Raises ValueError unless the dtype is bfloat16, float16, float32 or float64."""
    dtype = getattr(value, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating) or jnp.dtype(dtype).itemsize < 2:
        raise ValueError(
            f"{name}: expected a floating dtype of 16 bits or more, got "
            f"{type(value).__name__ if dtype is None else dtype}"
        )


def check_bytes(name: str, value: Any) -> None:
    """Raises ValueError unless the dtype is uint8."""
    dtype = getattr(value, "dtype", type(value).__name__)
    if dtype != jnp.uint8:
        raise ValueError(f"{name}: expected dtype uint8, got {dtype}")


def check_integer(name: str, value: Any, smallest: int) -> None:
    """Raises ValueError unless the value is a Python integer of `smallest` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
        raise ValueError(f"{name}: expected an integer of {smallest} or more, got {value!r}")


def check_count(name: str, value: Any) -> None:
    """Raises ValueError unless the value is an integer of 1 or more that int32 holds."""
    check_integer(name, value, 1)
    if value > INT32_MAX:
        raise ValueError(f"{name}: expected at most {INT32_MAX}, got {value}")


def check_positive(name: str, value: Any) -> None:
    """Raises ValueError unless the value is a number above 0 in the normal range of float32."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= sys.float_info.max:
        raise ValueError(f"{name}: expected a finite number above 0, got {value!r}")
    smallest, largest = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
    if not smallest <= value <= largest:
        raise ValueError(
            f"{name}: expected a number that float32 holds, from {smallest:.3g} to {largest:.3g}, "
            f"got {value!r}"
        )


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    if value not in choices:
        text = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name}: expected one of {text}, got {value!r}")
