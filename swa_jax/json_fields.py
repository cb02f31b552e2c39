"""JSON objects in, and dataclasses out of them, with errors that name the field."""

import dataclasses
import json
from typing import Any

_MAX_DEPTH = 64
"""Of values in values: far below what Python's own recursion bears, in a message for instance."""


def parse_json(text: str | bytes) -> Any:
    """A JSON value in which no object has a name twice.

    Raises:
      ValueError: one has, values are nested more than 64 deep, or the text is not JSON.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("JSON that is nested too deep") from None
    level = [value]
    for _ in range(_MAX_DEPTH + 1):
        containers = [one for one in level if isinstance(one, dict | list)]
        level = [
            inner
            for one in containers
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return value
    raise ValueError("JSON that is nested too deep")


def parse_object(name: str, text: str | bytes) -> dict[str, Any]:
    """The fields of a JSON object.

    Args:
      name: what the object is, for the message.
      text: JSON.

    Raises:
      ValueError: other text, another value, or a name given twice.
    """
    try:
        fields = parse_json(text)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: expected JSON text, got {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{name}: expected a JSON object, got {type(fields).__name__}")
    return fields


def build(cls: type, fields: Any) -> Any:
    """cls(**fields), where a wrong field is a ValueError that names it."""
    if not isinstance(fields, dict):
        raise ValueError(f"{cls.__name__}: expected an object, got {type(fields).__name__}")
    known = dataclasses.fields(cls)
    required = {
        field.name
        for field in known
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    unknown = sorted(set(fields) - {field.name for field in known})
    missing = sorted(required - set(fields))
    if unknown or missing:
        raise ValueError(f"{cls.__name__}: unknown fields {unknown}, missing fields {missing}")
    return cls(**fields)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise ValueError(f"{name!r} twice")
        fields[name] = value
    return fields
