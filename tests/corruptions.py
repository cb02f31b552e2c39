"""Corruptions of files, decided by a random generator: of bytes, and of JSON by its structure."""

import copy
import json

import numpy as np

DEEP = 100_000
_RAW, _AGAIN = "raw value", "again "

# JSON values, as they stand in a file, at the ends of what anything can hold.
EXTREMES = (
    "-1", "0", "1", "0.5", "1.0", "-0.0", "2147483647", "2147483648", "-2147483649", "4294967296",
    "9223372036854775807", "9223372036854775808", "18446744073709551615", "18446744073709551616",
    "1" + 400 * "0", "1" + 5000 * "0", "1e308", "1e39", "1e-320", "1e400", "NaN", "Infinity",
    "-Infinity", "true", "false", "null", "[]", "{}", '""', '"\\u0000"', '"\\ud800"', '"../x"',
    '"/etc/passwd"', '"a/b"', '"."', '"' + 300 * "x" + '"', "[[1]]", '{"a": 1}',
    70 * "[" + 70 * "]", 970 * "[" + 970 * "]", DEEP * "[" + DEEP * "]",
    70 * '{"a":' + "1" + 70 * "}",
)  # fmt: skip


def corrupt_bytes(rng: np.random.Generator, data: bytes) -> bytes:
    """A file with some of its bytes flipped, replaced, cut off, put in, left out or moved."""
    start = _place(rng, len(data))
    stop = min(len(data), start + int(rng.integers(1, 40)))
    middle, rest = data[start:stop], data[stop:]
    kind = rng.integers(8)
    if kind == 0:  # of one byte a bit
        flipped = bytes([data[start] ^ (1 << int(rng.integers(8)))]) if data[start:] else b""
        return data[:start] + flipped + data[start + 1 :]
    if kind == 1:
        return data[:start] + rng.bytes(len(middle)) + rest
    if kind == 2:
        return data[:start] + len(middle) * rng.choice([b"\0", b"\xff", b"9", b" "]) + rest
    if kind == 3:
        return data[:start]
    if kind == 4:
        return data[:start] + rng.bytes(int(rng.integers(1, 40))) + data[start:]
    if kind == 5:
        return data[:start] + rest
    if kind == 6:  # twice
        return data[:stop] + middle + rest
    other = _place(rng, len(data))  # what stood somewhere else
    taken = data[other : other + len(middle)]
    return data[:start] + taken + data[start + len(taken) :]


def corrupt_json(rng: np.random.Generator, value: dict) -> str:
    """The text of a JSON object in which one thing is another."""
    value = copy.deepcopy(value)
    holders = _holders(value)
    holder = holders[rng.integers(len(holders))]
    keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
    key = keys[rng.integers(len(keys))]
    found, raw = holder[key], EXTREMES[rng.integers(len(EXTREMES))]
    kind = rng.integers(7)
    if kind == 0 and isinstance(found, int | float):
        holder[key] = [found + 1, -found, 2 * found, found / 2, float(found)][rng.integers(5)]
    elif kind == 1 and isinstance(found, str):
        holder[key] = corrupt_bytes(rng, found.encode()).decode("utf-8", "replace")
    elif kind == 2:
        del holder[key]
    elif kind == 3:  # two values change places
        other = holders[rng.integers(len(holders))]
        names = list(other) if isinstance(other, dict) else list(range(len(other)))
        name = names[rng.integers(len(names))]
        taken = other[name]
        if not _within(found, other) and not _within(taken, holder):
            holder[key], other[name] = taken, found
    elif kind == 4 and isinstance(holder, dict):
        holder[_AGAIN + key] = found
    elif kind == 5 and isinstance(holder, dict):
        name = corrupt_bytes(rng, key.encode()).decode("utf-8", "replace")
        holder[name] = holder.pop(key)
    else:
        holder[key] = _RAW
    text = json.dumps(value).replace(f'"{_AGAIN}', '"')
    return text.replace(f'"{_RAW}"', raw)


def corrupt_safetensors(rng: np.random.Generator, data: bytes) -> bytes:
    """A safetensors file with other bytes, another size of its header, or another header."""
    size = int.from_bytes(data[:8], "little")
    kind = rng.integers(8)
    if kind < 3:
        return corrupt_bytes(rng, data)
    if kind == 3:
        size = int(rng.choice([0, 1, size - 1, size + 1, 2 * size, 10**8, 2**31, 2**60, 2**63]))
        return size.to_bytes(8, "little") + data[8:]
    text = corrupt_json(rng, json.loads(data[8 : 8 + size])).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def corrupt_json_file(rng: np.random.Generator, data: bytes) -> bytes:
    """A file of one JSON object."""
    if rng.integers(2):
        return corrupt_bytes(rng, data)
    return corrupt_json(rng, json.loads(data)).encode()


def corrupt_json_lines(rng: np.random.Generator, data: bytes) -> bytes:
    """A file of a JSON object a line."""
    if rng.integers(2):
        return corrupt_bytes(rng, data)
    lines = data.splitlines()
    i = int(rng.integers(len(lines)))
    lines[i] = corrupt_json(rng, json.loads(lines[i])).encode()
    return b"\n".join(lines)


def _place(rng: np.random.Generator, size: int) -> int:
    """Anywhere in a file, and as often near its beginning."""
    return int(rng.integers(min(size, 400) if rng.integers(2) else size)) if size else 0


def _holders(value: dict | list) -> list[dict | list]:
    """The objects and lists in a JSON value that hold something."""
    found: list[dict | list] = [value] if value else []
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, dict | list):
            found += _holders(inner)
    return found


def _within(value, holder: dict | list) -> bool:
    return isinstance(value, dict | list) and any(holder is one for one in _holders(value))
