"""The suite loop: blocks of steps in one program, beside Python loops, generate and drafts.

The repetitive text begins with five attributes set to None, the ordinary one with a module's first
lines. Both go on greedily: drafts pay where the model repeats itself.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import speculative_decode
from benchmark_clock import Case, Figure, Program
from benchmark_settings import Settings
from byte_model import PROMPT, WEIGHTS, load_model
from byte_text import BOUNDARY, VOCAB_SIZE
from jaxtyping import Array, Int32

import swa_jax as swa
from swa_jax.decoding import DecodeState, begin, decode_block, decode_step
from swa_jax.sampling import Sampling, sample

BLOCK = 32  # steps between two words to the host, as `swa.generate` has it
DRAFTS = 6  # as many as the ring has room for
FOREVER = 2**30  # tokens that no sample comes to
SHORT = PROMPT.encode()[:31]  # with the boundary a prefill of 32 tokens


def byte_model(settings: Settings) -> tuple[swa.Decoder, dict]:
    """The committed byte model, or in a rehearsal two narrow layers with random weights."""
    if not settings.tiny:
        return load_model(WEIGHTS)
    attention = swa.AttentionConfig(
        hidden_size=32,
        num_heads=settings.heads,
        head_dim=settings.width,
        rope_dim=2 * settings.half,
        q_lora_rank=16,
        o_groups=2,
        o_lora_rank=8,
        window=settings.window,
        fmt=settings.fmt,
    )
    model = swa.Decoder(swa.DecoderConfig(VOCAB_SIZE, 2, attention, mlp_size=48))
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    random = np.random.default_rng(0)

    def value(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(random.normal(size=leaf.shape), leaf.dtype)

    return model, jax.tree.map(value, nn.meta.unbox(shapes))


def start(model: swa.Decoder, variables: Any, n: int) -> DecodeState:
    """The state of n requests after a short prompt, greedy, without an end."""
    config = model.config
    cache = swa.RingCache.for_decoder(config, n)
    return begin(
        model,
        variables,
        cache,
        [[BOUNDARY, *SHORT]] * n,
        max_new_tokens=FOREVER,
        sampling=Sampling.build(n),
    )


def block_loop(
    model: swa.Decoder, variables: Any, state: DecodeState, block: int
) -> Callable[[int], Int32[np.ndarray, "n steps"]]:
    """Decodes blocks of steps, each one program.

    Args:
      model: the decoder.
      variables: its parameters.
      state: the requests, n of them; donated.
      block: steps of a program.

    Returns:
      A function of a number of steps, a multiple of `block`: the tokens of the next ones.
    """

    def run(steps: int) -> Int32[np.ndarray, "n steps"]:
        nonlocal state
        found = []
        for _ in range(steps // block):
            state, tokens = decode_block(model, variables, state, block)
            found.append(tokens)
        return np.concatenate([np.asarray(tokens) for tokens in found], axis=1)

    return run


def python_loop(
    model: swa.Decoder, variables: Any, state: DecodeState
) -> Callable[[int], Int32[np.ndarray, "n steps"]]:
    """As `block_loop`, a program for each step, whose tokens Python waits for, as it must to stop.

    Args:
      model: the decoder.
      variables: its parameters.
      state: the requests, n of them; donated.
    """
    cache, tokens, positions = state.cache, state.tokens, state.positions
    state_ids, sampling = state.state_ids, state.sampling

    def run(steps: int) -> Int32[np.ndarray, "n steps"]:
        nonlocal cache, tokens, positions
        found = []
        for _ in range(steps):
            cache, tokens, positions = _step(
                model, variables, cache, state_ids, tokens, positions, sampling
            )
            found.append(np.asarray(tokens))
        return np.stack(found, axis=1)

    return run


@functools.partial(jax.jit, static_argnames="model", donate_argnames=("cache", "positions"))
def _step(
    model: swa.Decoder,
    variables: Any,
    cache: swa.RingCache,
    state_ids: Int32[Array, " n"],
    tokens: Int32[Array, " n"],
    positions: Int32[Array, " n"],
    sampling: Sampling,
) -> tuple[swa.RingCache, Int32[Array, " n"], Int32[Array, " n"]]:
    logits, cache = decode_step(
        model, variables, cache, state_ids, tokens[:, None], positions[:, None]
    )
    following = positions + 1
    return cache, sample(logits[:, 0], following, sampling), following


def loop(settings: Settings) -> Iterator[Case | Figure]:
    """Greedy steps of the byte model: in one program or many, through generate, with drafts."""
    model, variables = byte_model(settings)
    steps, new = (BLOCK, BLOCK) if settings.tiny else (128, 256)
    requests = (1,) if settings.tiny else (1, 8)
    for n in requests:
        block = block_loop(model, variables, start(model, variables, n), steps)
        python = python_loop(model, variables, start(model, variables, n))
        yield Case(
            "loop",
            f"N={n}, {steps} steps",
            {"requests": n, "steps": steps},
            [
                Program("swa_jax", functools.partial(block, steps)),
                Program("Python loop", functools.partial(python, steps)),
            ],
        )
    for n in requests:
        bare = block_loop(model, variables, start(model, variables, n), BLOCK)
        # The first token comes from the prefill.
        generate = functools.partial(
            swa.generate, model, variables, [[BOUNDARY, *SHORT]] * n, max_new_tokens=new + 1
        )
        yield Case(
            "loop",
            f"N={n}, {new} tokens",
            {"requests": n, "steps": new},
            [
                Program("decode_block", functools.partial(bare, new)),
                Program("generate", generate),
            ],
            slower_is_better=False,
        )
    if settings.tiny:  # drafts would take most of a rehearsal to compile
        return
    prompts = {"repetitive": speculative_decode.REPETITIVE, "ordinary": PROMPT}
    for name, prompt in prompts.items():
        yield from drafts(model, variables, name, prompt.encode(), new + 1, rounds=9)


def drafts(
    model: swa.Decoder, variables: Any, name: str, prompt: bytes, tokens: int, rounds: int
) -> Iterator[Figure]:
    """Drafts by n-grams, beside plain decoding of the same tokens.

    Args:
      model: the decoder.
      variables: its parameters.
      name: of the text.
      prompt: its beginning.
      tokens: how many to generate, greedily.
      rounds: paired measurements.

    Raises:
      ValueError: the tokens are not those of a full recompute.
    """
    text = speculative_decode.Text(model, variables, prompt, tokens, Sampling.build(1))
    found = speculative_decode.measure(name, text, swa.NGramDrafter(), None, DRAFTS, rounds)
    if not found.equal:
        raise ValueError(f"{name} text: expected the tokens of a full recompute, got others")
    figures = [
        ("speed beside plain decoding", found.speed),
        ("drafts proposed a step", found.drafted_per_step),
        ("drafts accepted a step", found.accepted_per_step),
        ("cost of a step in plain steps", found.step_cost),
        ("drafts accepted a step to break even", found.break_even),
    ]
    for what, value in figures:
        yield Figure("loop", f"{name} text: {what}", value, "", {"text": name, "drafts": DRAFTS})
