r"""The model of linen_model.py in Flax NNX, twice: on the pure attention function, and bridged.

Weights move between Linen and NNX by their names; the ring cache is no variable of either.

python examples/nnx_model.py
python examples/nnx_model.py $'import json\n\n\nclass Store:\n' --bytes 100
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import model_command
from flax import nnx, traverse_util
from jax import lax
from jaxtyping import Array, Float, Float32, Int32
from linen_model import continue_tokens, feed_forward, kernel_init, normalise

import swa_jax as swa
from swa_jax.attention import attention_layer, parameter_shapes
from swa_jax.sampling import sample


class Attention(nnx.Module):
    """The layer on the pure function."""

    def __init__(self, config: swa.AttentionConfig, *, rngs: nnx.Rngs):
        self.config = config
        constants = {"q_a_norm": jnp.ones, "kv_norm": jnp.ones, "sinks": jnp.zeros}
        for name, shape in parameter_shapes(config).items():
            constant = constants.get(name)
            value = kernel_init(rngs.params(), shape) if constant is None else constant(shape)
            setattr(self, name, nnx.Param(value))

    def __call__(self, x: Array, rows: Any = None, meta: Any = None) -> Any:
        if rows is None:
            meta = swa.SequenceMetadata.build(*x.shape[:2])
        params = {name: getattr(self, name)[...] for name in parameter_shapes(self.config)}
        y, rows = attention_layer(params, x, rows, meta, self.config)
        return y if rows is None else (y, rows)


def bridged_attention(config: swa.AttentionConfig, *, rngs: nnx.Rngs) -> nnx.Module:
    """The Linen layer through Flax's bridge: the same parameters under the same names."""
    layer = nnx.bridge.ToNNX(swa.SlidingWindowAttention(config), rngs=rngs)
    # The layer names its parameters' logical axes. Without a mesh to place them on, NNX must be
    # told not to try; with one, give it the mesh and rules for the names instead.
    with nnx.use_eager_sharding(False):
        layer.lazy_init(jnp.zeros((1, 1, config.hidden_size)))
    # The bridge draws keys in every call, which changes a variable: scan would refuse it.
    layer.to_nnx__rngs = None
    return layer


class Norm(nnx.Module):
    def __init__(self, size: int, eps: float):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones(size))

    def __call__(self, x: Float[Array, "*b hidden"]) -> Float[Array, "*b hidden"]:
        return normalise(x, self.weight[...], self.eps)


class FeedForward(nnx.Module):
    def __init__(self, hidden: int, size: int, *, rngs: nnx.Rngs):
        self.gate = nnx.Param(kernel_init(rngs.params(), (size, hidden)))
        self.up = nnx.Param(kernel_init(rngs.params(), (size, hidden)))
        self.down = nnx.Param(kernel_init(rngs.params(), (hidden, size)))

    def __call__(self, x: Float[Array, "*b hidden"]) -> Float[Array, "*b hidden"]:
        return feed_forward(x, self.gate[...], self.up[...], self.down[...])


class Block(nnx.Module):
    def __init__(self, config, mlp_size: int, attention: Callable, *, rngs: nnx.Rngs):
        self.attention_norm = Norm(config.hidden_size, config.norm_eps)
        self.attention = attention(config, rngs=rngs)
        self.mlp_norm = Norm(config.hidden_size, config.norm_eps)
        self.mlp = FeedForward(config.hidden_size, mlp_size, rngs=rngs)

    def __call__(self, x: Array, rows: Any = None, meta: Any = None) -> Any:
        y = self.attention(self.attention_norm(x), rows, meta)
        y, rows = (y, None) if rows is None else y
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), rows


class LanguageModel(nnx.Module):
    """As the Linen model; `attention` makes each layer's: Attention or bridged_attention."""

    def __init__(
        self,
        vocab_size: int,
        num_layers: int,
        mlp_size: int,
        config: swa.AttentionConfig,
        attention: Callable[..., nnx.Module] = Attention,
        *,
        rngs: nnx.Rngs,
    ):
        table = (vocab_size, config.hidden_size)
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), table))
        self.layers = nnx.List(
            Block(config, mlp_size, attention, rngs=rngs) for _ in range(num_layers)
        )
        self.norm = Norm(config.hidden_size, config.norm_eps)
        self.head = nnx.Param(kernel_init(rngs.params(), table))

    def __call__(
        self,
        tokens: Int32[Array, "b t"],
        cache: swa.RingCache | None = None,
        meta: swa.DecodeMetadata | swa.PrefillMetadata | None = None,
    ) -> Any:
        """Hidden states [B, T, hidden], and with a cache the new cache."""
        x = jnp.take(self.embedding[...], tokens, axis=0)
        if cache is None:
            for layer in self.layers:
                x, _ = layer(x)
            return self.norm(x)
        for i, layer in enumerate(self.layers):
            x, rows = layer(x, cache.layer(i), meta)
            cache = cache.with_layer(i, rows)
        return self.norm(x), cache

    def logits(self, hidden: Float[Array, "*b hidden"]) -> Float32[Array, "*b vocab"]:
        return jnp.einsum("...h,vh->...v", hidden, self.head[...])


def from_linen(state: nnx.State, variables: dict) -> nnx.State:
    """The NNX state with the weights of Linen variables.

    Args:
      state: of an NNX model, from nnx.split; its values may be abstract.
      variables: of the Linen model of the same sizes, boxed or not.

    Raises:
      ValueError: the two have other parameters.
    """
    weights: dict[Any, Any] = traverse_util.flatten_dict(nn.meta.unbox(variables["params"]))
    want = {linen_path(path): leaf.shape for path, leaf in nnx.to_flat_state(state)}
    got = {path: leaf.shape for path, leaf in weights.items()}
    if want != got:
        wrong = sorted({"/".join(path) for path, _ in want.items() ^ got.items()})
        raise ValueError(f"variables: expected the model's parameters, got others at {wrong}")
    return nnx.map_state(lambda path, leaf: leaf.replace(weights[linen_path(path)]), state)


def to_linen(state: nnx.State) -> dict:
    """The Linen variables with the weights of an NNX state: the inverse of from_linen."""
    weights = {linen_path(path): leaf[...] for path, leaf in nnx.to_flat_state(state)}
    return {"params": traverse_util.unflatten_dict(weights)}


def linen_path(path: Sequence[Any]) -> tuple[str, ...]:
    """("layers", 0, "mlp", "up") under Linen's names: ("layers_0", "mlp", "up")."""
    names: list[str] = []
    for part in path:
        if isinstance(part, int):
            names[-1] += f"_{part}"
        else:
            names.append(part)
    return tuple(names)


# A model goes in as jax.tree.flatten(nnx.split(model)), made once: nnx.jit would take the module
# apart in every call, and a State takes JAX longer to flatten than a small step to run. What puts
# it together again below runs while tracing only.


@functools.partial(jax.jit, static_argnames="structure", donate_argnames="cache")
def prefill(
    leaves: list[Array],
    structure: Any,
    sampling: swa.Sampling,
    cache: swa.RingCache,
    prompts: Int32[Array, "b t"],
    lengths: Int32[Array, " b"],
) -> tuple[swa.RingCache, Int32[Array, " b"]]:
    """Whole prompts into the rings: the new cache and the token after each prompt."""
    model = nnx.merge(*jax.tree.unflatten(structure, leaves))
    ids, starts = jnp.arange(len(prompts), dtype=jnp.int32), jnp.zeros_like(lengths)
    width = prompts.shape[1]
    meta = swa.PrefillMetadata.build(cache.geometry, ids, starts, lengths, max_tokens=width)
    hidden, cache = model(prompts, cache, meta)
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return cache, sample(model.logits(last), lengths, sampling)


@functools.partial(jax.jit, static_argnames=("structure", "steps"), donate_argnames="cache")
def decode_block(
    leaves: list[Array],
    structure: Any,
    sampling: swa.Sampling,
    cache: swa.RingCache,
    tokens: Int32[Array, " b"],
    positions: Int32[Array, " b"],
    steps: int,
) -> tuple[swa.RingCache, Int32[Array, "b steps"]]:
    """The new cache, and the tokens that follow `tokens`, which stand at `positions`."""
    model = nnx.merge(*jax.tree.unflatten(structure, leaves))

    def step(carry, _):
        cache, tokens, positions = carry
        ids = jnp.arange(len(tokens), dtype=jnp.int32)
        meta = swa.DecodeMetadata.build(cache.geometry, ids, positions[:, None])
        hidden, cache = model(tokens[:, None], cache, meta)
        tokens = sample(model.logits(hidden[:, 0]), positions + 1, sampling)
        return (cache, tokens, positions + 1), tokens

    (cache, _, _), chosen = lax.scan(step, (cache, tokens, positions), length=steps)
    return cache, chosen.T


def build(
    config: swa.DecoderConfig, variables: dict, attention: Callable[..., nnx.Module]
) -> tuple[nnx.GraphDef, nnx.State]:
    """The model of a configuration with given Linen weights; nothing is initialised in between."""
    sizes = (config.vocab_size, config.num_layers, config.mlp_size, config.layers[0])
    abstract = nnx.eval_shape(lambda: LanguageModel(*sizes, attention, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(abstract)
    return graph, from_linen(state, variables)


def continue_prompt(
    config: swa.DecoderConfig,
    variables: dict,
    prompt: list[int],
    count: int,
    sampling: swa.Sampling,
) -> dict[str, list[int]]:
    """Both models' tokens on the weights of a `swa.Decoder`."""
    tokens = {}
    for name, attention in {"own attention": Attention, "bridged": bridged_attention}.items():
        flat = jax.tree.flatten(build(config, variables, attention))
        calls = (functools.partial(call, *flat, sampling) for call in (prefill, decode_block))
        tokens[f"Flax NNX, {name}"] = continue_tokens(
            *calls, config=config, prompt=prompt, count=count
        )
    return tokens


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    description = "Continues a text with a Flax NNX model of one's own, in two forms."
    return model_command.run("nnx_model.py", description, arguments, continue_prompt)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
