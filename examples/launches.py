r"""What a step of a model launches on a card that is not there, and what memory it takes.

python examples/launches.py
python examples/launches.py --step prefill --layers 8 --table

The model has four layers by default and shapes that are those of a large model where kernels
depend on them: 64 heads, rows of 512 values. Needs the extra "gpu-compile".
"""

import argparse
import functools
import sys
from collections.abc import Sequence
from typing import Any

import gpu_compiler
import jax
import jax.numpy as jnp
from command_line import Parser, whole_number
from whole_program import Program, compile_program

import swa_jax as swa
from swa_jax import decoding, prefilling

REQUESTS = 32
DECODE_STEPS = 16  # of a block
VERIFIED_TOKENS = 6
PREFILL_TOKENS = 256
STEPS = ("decode", "verify", "prefill")


def build_config(layers: int, scan_layers: bool = False) -> swa.DecoderConfig:
    """A decoder with bfloat16 products, as the attention kernel takes."""
    attention = swa.AttentionConfig(
        hidden_size=1024,
        num_heads=64,
        q_lora_rank=512,
        o_groups=8,
        o_lora_rank=256,
        query_norm=True,
        dtype="bfloat16",
        param_dtype="bfloat16",
    )
    return swa.DecoderConfig(
        vocab_size=4096,
        num_layers=layers,
        attention=attention,
        mlp_size=2048,
        scan_layers=scan_layers,
    )


def compile_step(step: str, config: swa.DecoderConfig, slots: int, card: str) -> Program:
    """Compiles a step whose cache is donated.

    Args:
      step: "decode", a block of 16 steps with sampling; "verify", 6 tokens of each request; or
        "prefill", a chunk of 256.
      config: the model.
      slots: state slots of the cache.
      card: JAX's device kind.

    Returns:
      The program.
    """
    model = swa.Decoder(config)
    params = jax.eval_shape(model.init, jax.random.key(0), _integers(1, 8))
    cache = build_cache(config, slots)
    requests = _integers(REQUESTS)
    if step == "decode":

        def decode(params, cache, requests, temperature):
            state = decoding.DecodeState(
                cache=cache,
                state_ids=requests,
                positions=requests,
                tokens=requests,
                remaining=requests,
                oldest=requests,
                highest=requests,
                stop_tokens=requests[:, None],
                sampling=swa.Sampling.build(REQUESTS, temperature=temperature),
            )
            return decoding.decode_block(model, params, state, DECODE_STEPS)

        # An argument: a constant would settle which way of choosing tokens is compiled.
        temperature = jax.ShapeDtypeStruct((REQUESTS,), jnp.float32)
        arguments = (params, cache, requests, temperature)
        return compile_program(decode, arguments, donate=1, card=card)
    if step == "verify":

        def verify(params, cache, requests, tokens):
            positions = requests[:, None] + jnp.arange(VERIFIED_TOKENS, dtype=jnp.int32)[None]
            meta = swa.DecodeMetadata.build(config.geometry, requests, positions)
            hidden, cache = model.apply(params, tokens, cache, meta)
            return model.apply(params, hidden, method="logits"), cache

        arguments = (params, cache, requests, _integers(REQUESTS, VERIFIED_TOKENS))
        return compile_program(verify, arguments, donate=1, card=card)
    hidden = jax.ShapeDtypeStruct((REQUESTS, config.hidden_size), config.layers[0].dtype)
    arguments = (params, cache, hidden, requests, _integers(REQUESTS, PREFILL_TOKENS))
    prefill = functools.partial(prefilling.prefill_chunk, model)
    return compile_program(prefill, (*arguments, requests, requests), donate=1, card=card)


def build_cache(config: swa.DecoderConfig, slots: int) -> Any:
    """The shapes of a cache of this many slots."""
    create = functools.partial(swa.RingCache.for_decoder, config, slots)
    return jax.eval_shape(create)


def steps_of_a_call(step: str) -> int:
    """Model steps in one call of a step's program."""
    return DECODE_STEPS if step == "decode" else 1


def launches_of(step: str, program: Program) -> float:
    """Launches of one model step, everything included, on the average of a call."""
    return program.all_launches / steps_of_a_call(step)


def _integers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="launches.py",
        description="Compiles steps of a decoder for a card that need not be here, and prints "
        "launches of a step, everything included, those that one more layer adds, whether the "
        "cache is copied, and memory.",
        epilog=f"needs {gpu_compiler.INSTALL}",
    )
    parser.add_argument("--step", choices=STEPS, help="only this one")
    parser.add_argument(
        "--layers", type=whole_number(1, 1000), default=4, help="of the model (default %(default)s)"
    )
    parser.add_argument("--scan-layers", action="store_true", help="scan over equal layers")
    parser.add_argument(
        "--slots", type=whole_number(1), default=64, help="of the cache (default %(default)s)"
    )
    parser.add_argument(
        "--card", default="NVIDIA H200", choices=gpu_compiler.CARDS, help="default %(default)s"
    )
    parser.add_argument("--table", action="store_true", help="list every launch")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    reason = gpu_compiler.missing_plugin()
    if reason:
        parser.error(reason)
    config = build_config(arguments.layers, arguments.scan_layers)
    try:
        cache = build_cache(config, arguments.slots)
    except ValueError as error:  # more than addresses have bits for
        parser.error(str(error))
    larger = build_config(arguments.layers + 1, arguments.scan_layers)
    print(
        "| step | launches | launches of a layer | copies of the cache | temporary bytes "
        "| loops: trips, launches |"
    )
    print("| --- | ---: | ---: | ---: | ---: | --- |")
    for step in [arguments.step] if arguments.step else STEPS:
        program = compile_step(step, config, arguments.slots, arguments.card)
        launches = launches_of(step, program)
        more = launches_of(step, compile_step(step, larger, arguments.slots, arguments.card))
        copies = sum(len(program.copies(block.shape)) for block in cache.blocks)
        loops = "; ".join(f"{loop.trips}, {loop.launches}" for loop in program.loops) or "none"
        print(
            f"| {step} | {launches:.1f} | {more - launches:.1f} | {copies} "
            f"| {program.temporary_bytes:,} | {loops} |"
        )
        if arguments.table:
            print(f"\n{program.table()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
