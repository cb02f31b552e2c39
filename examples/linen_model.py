r"""A Flax Linen model of one's own around `swa.SlidingWindowAttention`, decoded through its rings.

Its parameters have the names of the byte model's, so it runs on the byte model's weights.

python examples/linen_model.py
python examples/linen_model.py $'import json\n\n\nclass Store:\n' --bytes 100
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import model_command
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

import swa_jax as swa
from swa_jax.sampling import sample

BLOCK = 25  # tokens of one jitted call

# Kernels are [out, in], as in the checkpoints.
kernel_init = nn.initializers.lecun_normal(in_axis=-1, out_axis=-2)


class Norm(nn.Module):
    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*b hidden"]) -> Float[Array, "*b hidden"]:
        weight = self.param("weight", nn.initializers.ones, x.shape[-1:], jnp.float32)
        return normalise(x, weight, self.eps)


class FeedForward(nn.Module):
    size: int

    @nn.compact
    def __call__(self, x: Float[Array, "*b hidden"]) -> Float[Array, "*b hidden"]:
        hidden = x.shape[-1]
        gate = self.param("gate", kernel_init, (self.size, hidden), jnp.float32)
        up = self.param("up", kernel_init, (self.size, hidden), jnp.float32)
        down = self.param("down", kernel_init, (hidden, self.size), jnp.float32)
        return feed_forward(x, gate, up, down)


class Block(nn.Module):
    config: swa.AttentionConfig
    mlp_size: int

    def setup(self):
        self.attention_norm = Norm(self.config.norm_eps)
        self.attention = swa.SlidingWindowAttention(self.config)
        self.mlp_norm = Norm(self.config.norm_eps)
        self.mlp = FeedForward(self.mlp_size)

    def __call__(self, x: Array, rows: Any = None, meta: Any = None) -> Any:
        y: Any = self.attention(self.attention_norm(x), rows, meta)
        y, rows = (y, None) if rows is None else y
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), rows


class LanguageModel(nn.Module):
    """Embedding, layers, norm and head. The cache is an argument and a result."""

    vocab_size: int
    num_layers: int
    mlp_size: int
    attention: swa.AttentionConfig

    def setup(self):
        table = (self.vocab_size, self.attention.hidden_size)
        self.embedding = self.param("embedding", nn.initializers.normal(1.0), table, jnp.float32)
        self.layers = [Block(self.attention, self.mlp_size) for _ in range(self.num_layers)]
        self.norm = Norm(self.attention.norm_eps)
        self.head = self.param("head", kernel_init, table, jnp.float32)

    def __call__(
        self,
        tokens: Int32[Array, "b t"],
        cache: swa.RingCache | None = None,
        meta: swa.DecodeMetadata | swa.PrefillMetadata | None = None,
    ) -> Any:
        """Hidden states [B, T, hidden], and with a cache the new cache."""
        x = jnp.take(self.embedding, tokens, axis=0)
        if cache is None:
            for layer in self.layers:
                x, _ = layer(x)
            return self.norm(x)
        for i, layer in enumerate(self.layers):  # one view at a time: taken, used, given back
            x, rows = layer(x, cache.layer(i), meta)
            cache = cache.with_layer(i, rows)
        return self.norm(x), cache

    def logits(self, hidden: Float[Array, "*b hidden"]) -> Float32[Array, "*b vocab"]:
        return jnp.einsum("...h,vh->...v", hidden, self.head)


def normalise(x: Array, weight: Array, eps: float) -> Array:
    inverse = 1 / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * inverse * jnp.broadcast_to(weight, x.shape)


def feed_forward(x: Array, gate: Array, up: Array, down: Array) -> Array:
    inner = nn.silu(x @ gate.T) * (x @ up.T)
    return inner @ down.T


@functools.partial(jax.jit, static_argnames="model", donate_argnames="cache")
def prefill(
    model: LanguageModel,
    variables: dict,
    sampling: swa.Sampling,
    cache: swa.RingCache,
    prompts: Int32[Array, "b t"],
    lengths: Int32[Array, " b"],
) -> tuple[swa.RingCache, Int32[Array, " b"]]:
    """Whole prompts into the rings: the new cache and the token after each prompt."""
    apply: Any = functools.partial(model.apply, variables)
    ids, starts = jnp.arange(len(prompts), dtype=jnp.int32), jnp.zeros_like(lengths)
    width = prompts.shape[1]
    meta = swa.PrefillMetadata.build(cache.geometry, ids, starts, lengths, max_tokens=width)
    hidden, cache = apply(prompts, cache, meta)
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return cache, sample(apply(last, method="logits"), lengths, sampling)


@functools.partial(jax.jit, static_argnames=("model", "steps"), donate_argnames="cache")
def decode_block(
    model: LanguageModel,
    variables: dict,
    sampling: swa.Sampling,
    cache: swa.RingCache,
    tokens: Int32[Array, " b"],
    positions: Int32[Array, " b"],
    steps: int,
) -> tuple[swa.RingCache, Int32[Array, "b steps"]]:
    """The new cache, and the tokens that follow `tokens`, which stand at `positions`."""
    apply: Any = functools.partial(model.apply, variables)

    def step(carry, _):
        cache, tokens, positions = carry
        ids = jnp.arange(len(tokens), dtype=jnp.int32)
        meta = swa.DecodeMetadata.build(cache.geometry, ids, positions[:, None])
        hidden, cache = apply(tokens[:, None], cache, meta)
        tokens = sample(apply(hidden[:, 0], method="logits"), positions + 1, sampling)
        return (cache, tokens, positions + 1), tokens

    (cache, _, _), chosen = lax.scan(step, (cache, tokens, positions), length=steps)
    return cache, chosen.T


def continue_tokens(
    prefill: Callable,
    decode_block: Callable,
    config: swa.DecoderConfig,
    prompt: list[int],
    count: int,
) -> list[int]:
    """The tokens after a prompt: the host's loop.

    The two calls are those above, with model, weights and sampling already given.
    """
    cache = swa.RingCache.for_decoder(config, 1)
    # Padded to a power of two, so that prompts of many lengths share one compiled prefill.
    tokens = np.zeros((1, 1 << (len(prompt) - 1).bit_length()), np.int32)
    tokens[0, : len(prompt)] = prompt
    positions = np.array([len(prompt)], np.int32)
    cache, last = prefill(cache, tokens, positions)
    chosen = last.tolist()
    while len(chosen) < count:
        cache, block = decode_block(cache, last, positions, steps=BLOCK)
        last, positions = block[:, -1], positions + np.int32(BLOCK)
        chosen += block[0].tolist()
    return chosen[:count]


def continue_prompt(
    config: swa.DecoderConfig,
    variables: dict,
    prompt: list[int],
    count: int,
    sampling: swa.Sampling,
) -> dict[str, list[int]]:
    """The model's tokens on the weights of a `swa.Decoder`."""
    model = LanguageModel(config.vocab_size, config.num_layers, config.mlp_size, config.layers[0])
    calls = (
        functools.partial(call, model, variables, sampling) for call in (prefill, decode_block)
    )
    tokens = continue_tokens(*calls, config=config, prompt=prompt, count=count)
    return {"Flax Linen": tokens}


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    description = "Continues a text with a Flax Linen model of one's own."
    return model_command.run("linen_model.py", description, arguments, continue_prompt)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
