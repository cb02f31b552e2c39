"""The compiled steps: the donated cache is updated in place, and idle slots cost nothing."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from quick_compilation import QUICK_COMPILATION
from small_models import attention_config, decoder_config, decoder_params
from whole_copies import whole_copies

import swa_jax as swa
from pallas_kernels import load_rows, store_rows

FEW, MANY = 64, 1024  # state slots
BATCH = 2
ATTENTION = attention_config(16, swa.V41)
# The ring has 22 rows: the verify step is the largest, the prefill more than the ring.
TOKENS = {"decode": 1, "verify": 7, "prefill": 24}


class Compiled(NamedTuple):
    """What a compiled step does with the cache, which is its first output or argument.

    Attributes:
      copies: instructions that copy a whole block.
      unaliased: bytes of the cache that the result does not share with the argument.
      temporary: bytes beside arguments and results.
    """

    copies: list[str]
    unaliased: int
    temporary: int


def compile_step(step: Callable, cache: swa.RingCache, *others: Any, donate=True) -> Compiled:
    jitted = jax.jit(step, donate_argnums=0 if donate else ())
    compiled = jitted.lower(cache, *others).compile(compiler_options=QUICK_COMPILATION)
    text = compiled.as_text()
    assert text is not None
    memory = compiled.memory_analysis()
    return Compiled(
        whole_copies(text, cache.blocks[0].shape),
        cache.nbytes - memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
    )


def abstract_cache(config: swa.DecoderConfig, slots: int) -> swa.RingCache:
    create = functools.partial(swa.RingCache.for_decoder, config, slots)
    return jax.eval_shape(create)


def integers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


@functools.cache
def compile_kind(kind: str, layers: int, scan_layers: bool, slots: int) -> Compiled:
    config = decoder_config(ATTENTION, layers, scan_layers=scan_layers)
    model, geometry, tokens = swa.Decoder(config), config.geometry, TOKENS[kind]

    def step(cache, params, ids, state_ids, starts):
        if kind == "prefill":
            lengths = jnp.full(BATCH, tokens)
            meta = swa.PrefillMetadata.build(
                geometry, state_ids, starts, lengths, max_tokens=tokens
            )
        else:
            positions = starts[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None]
            meta = swa.DecodeMetadata.build(geometry, state_ids, positions)
        hidden, cache = model.apply(params, ids, cache, meta)
        return cache, hidden

    arguments = integers(BATCH, tokens), integers(BATCH), integers(BATCH)
    return compile_step(step, abstract_cache(config, slots), decoder_params(config), *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TOKENS)
@pytest.mark.parametrize(
    ("layers", "scan_layers"), [(1, False), (3, False), (8, False), (3, True), (8, True)]
)
def test_a_step_updates_the_donated_cache_in_place(kind, layers, scan_layers):
    compiled = compile_kind(kind, layers, scan_layers, MANY)
    assert not compiled.copies
    assert compiled.unaliased <= 0
    region = abstract_cache(decoder_config(ATTENTION, 1), MANY).nbytes
    assert compiled.temporary < region / 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", TOKENS)
@pytest.mark.parametrize("scan_layers", [False, True])
def test_memory_does_not_grow_with_idle_slots(kind, scan_layers):
    few, many = (compile_kind(kind, 3, scan_layers, slots) for slots in (FEW, MANY))
    assert many.temporary == few.temporary


# --- what the checks above would say of a step that copies


def bad_steps():
    cache = abstract_cache(decoder_config(ATTENTION, 1), MANY)
    row = jax.ShapeDtypeStruct((BATCH, cache.fmt.row_bytes), jnp.uint8)

    def stores(cache, slots, row):
        return cache.with_layer(0, store_rows(cache.layer(0), row, slots))

    def reads_the_old_cache_after_the_store(cache, slots, row):
        new = store_rows(cache.layer(0), row, slots)
        later = slots + jnp.max(load_rows(new, slots).astype(jnp.int32)) // 256
        return cache.with_layer(0, new), load_rows(cache.layer(0), later)

    def keeps_two_versions(cache, slots, row):
        return stores(cache, slots, row), stores(cache, slots + 1, row)

    arguments = cache, integers(BATCH), row
    return cache.nbytes, {
        "good": lambda: compile_step(stores, *arguments),
        "not donated": lambda: compile_step(stores, *arguments, donate=False),
        "reads late": lambda: compile_step(reads_the_old_cache_after_the_store, *arguments),
        "two versions": lambda: compile_step(keeps_two_versions, *arguments),
    }


@pytest.mark.donates
@pytest.mark.parametrize(
    ("name", "copies", "unaliased"),
    [("good", 0, 0), ("not donated", 1, 1), ("reads late", 1, 0), ("two versions", 1, 0)],
)
def test_the_checks_see_a_copy_of_the_cache(name, copies, unaliased):
    nbytes, steps = bad_steps()
    compiled = steps[name]()
    assert bool(compiled.copies) == bool(copies)
    assert compiled.unaliased == unaliased * nbytes
