"""Registers pytrees for programs that jax.export saves, with what is static in them as JSON."""

import dataclasses
import json
from typing import Any, TypeVar, cast

from jax import export

T = TypeVar("T")


def register_serialization(cls: type[T]) -> type[T]:
    """Class decorator: lets a saved program take and return values of a registered dataclass.

    A program saved with `jax.export` names the types of its arguments and results; one that is not
    registered cannot be saved. Nothing in the file is code.

    Args:
      cls: a dataclass registered with `jax.tree_util.register_dataclass`, whose static fields are
        ints or dataclasses of JSON's own types, or None. A program that holds another value cannot
        be saved: `jax.export` raises a ValueError.

    Returns:
      The class.
    """
    fields = dataclasses.fields(cast(Any, cls))
    static = [
        (field.name, cast(Any, field.type)) for field in fields if field.metadata.get("static")
    ]

    def serialize(values: tuple[Any, ...]) -> bytes:
        plain = {
            name: dataclasses.asdict(value) if dataclasses.is_dataclass(kind) else value
            for (name, kind), value in zip(static, values, strict=True)
            if value is not None
        }
        for name, value in plain.items():
            if not isinstance(value, int | dict):  # such as a sharding: a file names no devices
                raise ValueError(
                    f"{cls.__name__}: expected no {name} in a saved program, got {value}"
                )
        return json.dumps(plain).encode()

    def deserialize(data: bytes) -> tuple[Any, ...]:
        plain = json.loads(data)
        return tuple(
            None
            if name not in plain
            else kind(**plain[name])
            if isinstance(plain[name], dict)
            else kind(plain[name])
            for name, kind in static
        )

    # The package's name and not the module's: moving a class keeps saved programs.
    export.register_pytree_node_serialization(
        cls,
        serialized_name=f"{cls.__module__.partition('.')[0]}.{cls.__name__}",
        serialize_auxdata=serialize,
        deserialize_auxdata=deserialize,
    )
    return cls
