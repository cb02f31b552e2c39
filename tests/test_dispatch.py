"""Which implementation runs, what a missing one says, and programs saved with jax.export."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import V41, V41_FP4, ExtraKV, KVRows, dispatch, fused_store, indexed_attention

FMT = V41.with_width(64)
MISSING = ["triton", "interpret"]


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def store(rows, latents, slots, cos, sin, implementation=None):
    return fused_store(
        rows, latents, slots, norm_weight=jnp.ones(64), norm_eps=1e-6, cos=cos, sin=sin,
        implementation=implementation,
    )  # fmt: skip


def read(q, rows, indices, extra, sink, implementation=None):
    return indexed_attention(
        q, rows, indices, extra=extra, sink=sink, implementation=implementation
    )


def store_arguments():
    angles = normal(4, 12, seed=1)
    slots = jnp.asarray([5, -1, 0, 3])
    return KVRows.create(2, 3, FMT), normal(4, 64), slots, jnp.cos(angles), jnp.sin(angles)


def read_arguments():
    rows = jax.jit(store)(*store_arguments())
    extra = ExtraKV(KVRows.create(2, 3, V41_FP4.with_width(64)), jnp.zeros((4, 1), jnp.int32))
    indices = jnp.tile(jnp.asarray([0, 3, -1, 5]), (4, 1))
    return normal(4, 2, 64), rows, indices, extra, normal(2, seed=2)


OPERATIONS = {"fused_store": (store, store_arguments), "indexed_attention": (read, read_arguments)}
by_operation = pytest.mark.parametrize("operation", OPERATIONS)


def assert_trees_equal(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@by_operation
def test_the_default_is_xla(operation):
    call, arguments = OPERATIONS[operation]
    compiled = jax.jit(call, static_argnames="implementation")
    expected = compiled(*arguments(), implementation="xla")
    assert_trees_equal(compiled(*arguments()), expected)


@pytest.mark.parametrize("implementation", MISSING)
@by_operation
def test_a_missing_implementation_is_not_replaced(operation, implementation):
    call, arguments = OPERATIONS[operation]
    message = f"{operation}: implementation '{implementation}' .*'xla' can do it"
    with pytest.raises(NotImplementedError, match=message):
        call(*arguments(), implementation=implementation)


@pytest.mark.parametrize("implementation", ["cuda", "", 0, "XLA"])
@by_operation
def test_an_unknown_implementation_is_refused(operation, implementation):
    call, arguments = OPERATIONS[operation]
    with pytest.raises(ValueError, match="implementation: expected one of None, 'xla', .*, got"):
        call(*arguments(), implementation=implementation)


def test_bad_arguments_come_before_a_missing_implementation():
    rows, latents, slots, cos, sin = store_arguments()
    with pytest.raises(ValueError, match="latents: expected shape"):
        store(rows, latents[:, :32], slots, cos, sin, implementation="triton")


def test_the_implementation_that_is_named_runs():
    available = {"xla": lambda: "by xla", "triton": lambda: "by triton"}
    assert dispatch.select("op", "triton", available)() == "by triton"
    assert dispatch.select("op", "xla", available)() == "by xla"
    assert dispatch.select("op", None, {"xla": available["xla"]})() == "by xla"


@by_operation
def test_a_saved_program_gives_the_same_answer(operation):
    call, arguments = OPERATIONS[operation]
    compiled = jax.jit(call)
    exported = jax.export.export(compiled, platforms=["cpu"])(*arguments())
    reloaded = jax.export.deserialize(exported.serialize())
    assert reloaded.platforms == ("cpu",)
    assert_trees_equal(reloaded.call(*arguments()), compiled(*arguments()))


def test_a_saved_program_knows_its_format():
    exported = jax.export.export(jax.jit(store), platforms=["cpu"])(*store_arguments())
    reloaded = jax.export.deserialize(exported.serialize())
    _, *others = store_arguments()
    with pytest.raises(ValueError, match="KVRows"):
        reloaded.call(KVRows.create(2, 3, V41_FP4.with_width(64)), *others)
