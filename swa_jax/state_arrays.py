"""A decode state as plain arrays, and what must be the same to go on with it as JSON values."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels import checks
from swa_jax.cache import RingCache
from swa_jax.config import DecoderConfig, plain_config
from swa_jax.decoding import DecodeState
from swa_jax.sampling import Sampling

KEY_KINDS = ("threefry2x32", "rbg", "unsafe_rbg")
"""Implementations of random keys that have a name in JAX."""

_PER_REQUEST = ("state_ids", "positions", "tokens", "remaining", "oldest", "highest")


def identity(
    config: DecoderConfig, batch: int, slots: int, settings: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What must be the same to go on with a state.

    Args:
      config: the decoder's.
      batch: number of requests.
      slots: state slots of the cache.
      settings: what else, as JSON values by name.

    Returns:
      JSON values by name; what is most telling comes first.

    Raises:
      ValueError: settings that are not JSON.
    """
    plain = plain_config(config)
    try:
        known = json.loads(json.dumps(dict(settings or {}), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"settings: expected JSON values, got {error}") from None
    return {
        "format": plain["attention"]["0"]["fmt"],
        "geometry": dataclasses.asdict(config.geometry),
        "layers": config.num_layers,
        "requests": batch,
        "slots": slots,
        "config": plain,
        "settings": known,
    }


def compare(source: object, want: Any, got: Any, name: str = "") -> None:
    """Raises ValueError for the first value of JSON objects that is not as wanted.

    Args:
      source: where `got` comes from, for the message.
      want: JSON values by name.
      got: as many, by the same names.
      name: where in an object they stand.
    """
    if isinstance(want, dict) and isinstance(got, dict):
        for key in want | got:
            compare(source, want.get(key), got.get(key), f"{name}.{key}" if name else key)
    elif want != got:
        raise ValueError(f"{source}: expected {name} {want!r}, got {got!r}")


def state_to_arrays(state: DecodeState, tokens: Sequence[Sequence[int]]) -> dict[str, Array]:
    """The arrays of a state and of the tokens given so far, by name; no key is a typed one.

    Raises:
      ValueError: another number of token lists than requests, or keys of a kind without a name.
    """
    batch = state.state_ids.shape[0]
    if len(tokens) != batch:
        raise ValueError(f"tokens: expected a list for each of {batch} requests, got {len(tokens)}")
    sampling = state.sampling
    checks.check_choice("keys", key_kind(state), KEY_KINDS)
    # one column at least: orbax does not save arrays without elements
    given = np.full((batch, max([1, *map(len, tokens)])), -1, np.int32)
    for row, line in zip(given, tokens, strict=True):
        row[: len(line)] = line
    return {
        **{name: getattr(state, name) for name in (*_PER_REQUEST, "stop_tokens")},
        **{f"block_{i}": block for i, block in enumerate(state.cache.blocks)},
        "given": jnp.asarray(given),
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "keys": jax.random.key_data(sampling.keys),
    }


def state_from_arrays(
    arrays: Mapping[str, Array], config: DecoderConfig, batch: int, slots: int, kind: Any
) -> tuple[DecodeState, list[list[int]]]:
    """The inverse of `state_to_arrays`.

    Args:
      arrays: by name.
      config: the decoder's.
      batch: number of requests.
      slots: state slots of the cache.
      kind: of the keys, one of KEY_KINDS.

    Raises:
      ValueError: the arrays are not those of such a state, or another kind of keys.
    """
    checks.check_choice("keys", kind, KEY_KINDS)
    cache = jax.eval_shape(lambda: RingCache.for_decoder(config, slots))
    key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=kind)))
    shapes = {
        **dict.fromkeys((*_PER_REQUEST, "top_k"), (jnp.int32, (batch,))),
        **dict.fromkeys(("temperature", "top_p"), (jnp.float32, (batch,))),
        **dict.fromkeys(("stop_tokens", "given"), (jnp.int32, (batch, None))),
        **{f"block_{i}": (block.dtype, block.shape) for i, block in enumerate(cache.blocks)},
        "keys": (key.dtype, (batch, *key.shape)),
    }
    if set(arrays) != set(shapes):
        raise ValueError(f"state: expected {sorted(shapes)}, got {sorted(arrays)}")
    for name, (dtype, shape) in shapes.items():
        checks.check_shape(name, arrays[name], shape)
        if arrays[name].dtype != dtype:
            raise ValueError(f"{name}: expected {jnp.dtype(dtype)}, got {arrays[name].dtype}")
    blocks = tuple(arrays[f"block_{i}"] for i in range(len(cache.blocks)))
    sampling = Sampling(
        arrays["temperature"],
        arrays["top_k"],
        arrays["top_p"],
        jax.random.wrap_key_data(arrays["keys"], impl=kind),
    )
    state = DecodeState(
        dataclasses.replace(cache, blocks=blocks),
        **{name: arrays[name] for name in (*_PER_REQUEST, "stop_tokens")},
        sampling=sampling,
    )
    return state, [row[row >= 0].tolist() for row in np.asarray(arrays["given"])]


def key_kind(state: DecodeState) -> str:
    """The implementation of a state's random keys, one of KEY_KINDS or another."""
    return str(jax.random.key_impl(state.sampling.keys))
