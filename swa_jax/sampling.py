"""Samplers: vocabulary scores into token ids, each request with its own settings and key."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Float32, Int32, Key

from pallas_kernels import checks
from pallas_kernels.serialization import register_serialization


@register_serialization
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How each of B requests chooses its tokens.

    Attributes:
      temperature: float32[B]; 0 takes the best token.
      top_k: int32[B], only the k best tokens; 0: all.
      top_p: float32[B], only the best tokens that together reach this probability; 1: all.
      keys: B random keys. The noise of a token depends on its request's key and its position only,
        so a request gets the same tokens whatever runs beside it.
    """

    temperature: Float32[Array, " b"]
    top_k: Int32[Array, " b"]
    top_p: Float32[Array, " b"]
    keys: Key[Array, " b"]

    @classmethod
    def build(
        cls,
        batch: int,
        *,
        temperature: ArrayLike = 0.0,
        top_k: ArrayLike = 0,
        top_p: ArrayLike = 1.0,
        keys: Key[Array, " b"] | None = None,
    ) -> "Sampling":
        """Settings of B requests from scalars or one value each.

        Args:
          batch: B.
          temperature: number or [B], 0 or more.
          top_k: integer or [B], 0 or more.
          top_p: number or [B], above 0 and at most 1.
          keys: B keys of `jax.random.key`; by default folded from key 0.

        Raises:
          ValueError: a batch below 1, a wrong shape or a known value out of range.
        """
        checks.check_count("batch", batch)
        temperature = _per_request("temperature", batch, temperature, 0.0, np.inf)
        top_p = _per_request("top_p", batch, top_p, np.finfo(np.float32).tiny, 1.0)
        top_k = checks.as_int32("top_k", top_k)
        if top_k.ndim == 0:
            top_k = jnp.broadcast_to(top_k, (batch,))
        checks.check_shape("top_k", top_k, (batch,))
        checks.check_not_negative("top_k", top_k)
        if keys is None:
            keys = request_keys(jax.random.key(0), batch)
        dtype, shape = getattr(keys, "dtype", None), getattr(keys, "shape", None)
        if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key) or shape != (batch,):
            raise ValueError(
                f"keys: expected {batch} keys of jax.random.key in an array, got "
                + (type(keys).__name__ if dtype is None else f"{dtype}{shape}")
            )
        return cls(temperature, top_k, top_p, keys)

    def repeat(self, count: int) -> "Sampling":
        """The settings of B * count tokens: each request's for `count` tokens, one after another.

        Args:
          count: tokens of each request.
        """
        return jax.tree.map(lambda leaf: jnp.repeat(leaf, count, axis=0), self)


def checked_sampling(sampling: Sampling, batch: int, key_type: Any = None) -> Sampling:
    """Settings of B requests as `Sampling.build` makes them; `dataclasses.replace` checks nothing.

    Args:
      sampling: settings.
      batch: B.
      key_type: the dtype that the keys must have; None: of any keys.

    Raises:
      ValueError: another type or number of requests, or a known value out of range.
    """
    checks.check_type("sampling", sampling, Sampling)
    fields = {field.name: getattr(sampling, field.name) for field in dataclasses.fields(Sampling)}
    try:
        built = Sampling.build(batch, **fields)
    except ValueError as error:
        raise ValueError(f"sampling.{error}") from None
    if key_type is not None and built.keys.dtype != key_type:
        raise ValueError(f"sampling.keys: expected {key_type}, got {built.keys.dtype}")
    return built


def request_keys(key: Key[Array, ""], batch: int) -> Key[Array, " b"]:
    """A key for each of `batch` requests; the i-th does not depend on how many there are.

    Args:
      key: a key of `jax.random.key`.
      batch: B.

    Returns:
      B keys.
    """
    return _fold_in_each(key, np.arange(batch, dtype=np.uint32))


# One program, and not an operation of the host for each of its steps.
_fold_in_each = jax.jit(jax.vmap(jax.random.fold_in, (None, 0)))


def allowed_tokens(logits: Float32[Array, "b v"], sampling: Sampling) -> Bool[Array, "b v"]:
    """The tokens that top-k and top-p leave: at least the best one.

    top-p counts probabilities at the request's temperature.

    Args:
      logits: float32[B, V].
      sampling: settings.

    Returns:
      bool[B, V].
    """
    order = jnp.argsort(logits, axis=-1, descending=True)
    scores = jnp.take_along_axis(_at_temperature(logits, sampling), order, axis=-1)
    probability = jax.nn.softmax(scores, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    rank = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, :]
    limit = jnp.where(sampling.top_k > 0, sampling.top_k, logits.shape[-1])
    mass = sampling.top_p[:, None]
    # the rounded sum may reach 1 early, and at 1 nothing is left out
    keep = (rank < limit[:, None]) & ((before < mass) | (mass >= 1))
    keep = keep | (rank == 0)
    return jnp.take_along_axis(keep, jnp.argsort(order, axis=-1), axis=-1)


def perturbed_scores(
    logits: Float32[Array, "b v"], positions: Int32[Array, " b"], sampling: Sampling
) -> Float32[Array, "b v"]:
    """Scores whose largest entry is the sampled token: logits / temperature + Gumbel noise.

    Only differences between a request's scores mean something.

    Args:
      logits: float32[B, V].
      positions: int32[B], the positions of the tokens to choose.
      sampling: settings; where the temperature is 0 the scores are the logits.

    Returns:
      float32[B, V].
    """

    def noise(key, position):
        return jax.random.gumbel(jax.random.fold_in(key, position), logits.shape[-1:], jnp.float32)

    drawn = _at_temperature(logits, sampling) + jax.vmap(noise)(sampling.keys, positions)
    return jnp.where(sampling.temperature[:, None] > 0, drawn, logits)


def sample(
    logits: Float[Array, "b v"], positions: Int32[Array, " b"], sampling: Sampling
) -> Int32[Array, " b"]:
    """The token of each request.

    Args:
      logits: floating[B, V], vocabulary scores.
      positions: int32[B], the positions of the tokens to choose.
      sampling: settings.

    Returns:
      int32[B].
    """
    logits = logits.astype(jnp.float32)

    def best():
        return jnp.argmax(logits, axis=-1)

    def drawn():
        return jnp.argmax(perturbed_scores(logits, positions, sampling), axis=-1)

    def drawn_among_allowed():
        scores = perturbed_scores(logits, positions, sampling)
        return jnp.argmax(jnp.where(allowed_tokens(logits, sampling), scores, -jnp.inf), axis=-1)

    # Noise takes a tenth of a small model's step on CPUs, and sorting more: only where a request
    # needs it. One choice and not two, as each may cost a GPU a word to its host.
    draws = jnp.any(sampling.temperature > 0)
    restricted = jnp.any((sampling.top_k > 0) | (sampling.top_p < 1))
    kind = jnp.where(draws, 1 + restricted.astype(jnp.int32), 0)
    return lax.switch(kind, (best, drawn, drawn_among_allowed)).astype(jnp.int32)


def _at_temperature(logits, sampling) -> Float32[Array, "b v"]:
    """(logits - the best one) / temperature: no small temperature makes the best one infinite."""
    heat = jnp.where(sampling.temperature > 0, sampling.temperature, jnp.float32(1))
    return (logits - jnp.max(logits, axis=-1, keepdims=True)) / heat[:, None]


def _per_request(name, batch, value, smallest, largest) -> Float32[Array, " b"]:
    if checks.is_known(value):
        known = checks.known_array(name, value)
        if known.dtype.kind not in "iuf" or not np.all((known >= smallest) & (known <= largest)):
            raise ValueError(
                f"{name}: expected numbers from {smallest:g} to {largest:g}, got {value}"
            )
    array = jnp.asarray(value).astype(jnp.float32)
    if array.ndim == 0:
        array = jnp.broadcast_to(array, (batch,))
    checks.check_shape(name, array, (batch,))
    return array
