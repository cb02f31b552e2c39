"""Which implementation runs where, for which card, what is refused, and saved programs."""

import dataclasses
import functools
import re
import sys

import chex
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import (
    V41,
    V41_FP4,
    ExtraKV,
    KVRows,
    dispatch,
    fused_store,
    indexed_attention,
    triton_common,
)
from pallas_kernels.indexed_attention import triton_tiles as tiles

pytestmark = pytest.mark.quick_compilation

FMT = V41.with_width(64)
TRITON_CALL = "__gpu$xla.gpu.triton"
A100, H200, B200 = "NVIDIA A100-SXM4-80GB", "NVIDIA H200", "NVIDIA B200"


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    """Here too where there is a GPU, whose card would be the one that programs are made for."""
    monkeypatch.setattr(dispatch, "_local_card", lambda: None)
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def store(rows, latents, slots, cos, sin, implementation=None):
    return fused_store(
        rows, latents, slots, norm_weight=jnp.ones(latents.shape[1]), norm_eps=1e-6, cos=cos,
        sin=sin, implementation=implementation,
    )  # fmt: skip


def read(q, rows, indices, extra, sink, implementation=None):
    return indexed_attention(
        q, rows, indices, extra=extra, sink=sink, implementation=implementation
    )


def store_arguments():
    angles = normal(4, 12, seed=1)
    slots = jnp.asarray([5, -1, 0, 3])
    return KVRows.create(2, 3, FMT), normal(4, 64), slots, jnp.cos(angles), jnp.sin(angles)


def read_arguments(dtype=jnp.bfloat16):
    rows = jax.jit(store)(*store_arguments())
    extra = ExtraKV(KVRows.create(2, 3, V41_FP4.with_width(64)), jnp.zeros((4, 1), jnp.int32))
    indices = jnp.tile(jnp.asarray([0, 3, -1, 5]), (4, 1))
    return normal(4, 2, 64, dtype=dtype), rows, indices, extra, normal(2, seed=2)


OPERATIONS = {"fused_store": (store, store_arguments), "indexed_attention": (read, read_arguments)}
by_operation = pytest.mark.parametrize("operation", OPERATIONS)


def assert_trees_equal(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def lowered(call, arguments, *platforms, **options):
    traced = jax.jit(functools.partial(call, **options)).trace(*arguments)
    return traced.lower(lowering_platforms=platforms).as_text()


def device(card, platform="gpu"):
    """The context of a mesh that only names a card."""
    named = AbstractDevice(device_kind=card, num_cores=None, platform=platform)
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=named))


# --- the choice


@by_operation
def test_the_default_is_xla_on_a_cpu(operation):
    call, arguments = OPERATIONS[operation]
    compiled = jax.jit(call, static_argnames="implementation")
    expected = compiled(*arguments(), implementation="xla")
    assert_trees_equal(compiled(*arguments()), expected)
    assert_trees_equal(jax.jit(call)(*arguments()), expected)


@by_operation
def test_a_call_outside_jit_is_the_call_inside(operation):
    call, arguments = OPERATIONS[operation]
    for implementation in (None, "interpret"):
        one = functools.partial(call, implementation=implementation)
        assert_trees_equal(one(*arguments()), jax.jit(one)(*arguments()))


@pytest.mark.parametrize("implementation", [None, "triton"])
@by_operation
def test_a_program_for_cuda_has_the_kernel(operation, implementation):
    call, arguments = OPERATIONS[operation]
    text = lowered(call, arguments(), "cuda", implementation=implementation)
    assert text.count(TRITON_CALL) == 1
    assert f"{operation}_kernel" in text


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
@by_operation
def test_a_program_for_cuda_has_no_kernel_when_another_is_named(operation, implementation):
    call, arguments = OPERATIONS[operation]
    assert TRITON_CALL not in lowered(call, arguments(), "cuda", implementation=implementation)


@pytest.mark.parametrize("platform", ["cpu", "tpu", "rocm"])
@by_operation
def test_a_program_for_another_platform_is_xla(operation, platform):
    call, arguments = OPERATIONS[operation]
    assert TRITON_CALL not in lowered(call, arguments(), platform)


@by_operation
def test_a_program_for_two_platforms_has_both(operation):
    call, arguments = OPERATIONS[operation]
    text = lowered(call, arguments(), "cpu", "cuda")
    assert text.count(TRITON_CALL) == 1
    assert "stablehlo.case" in text


@by_operation
def test_triton_is_traced_anywhere_and_gives_the_types_of_xla(operation):
    call, arguments = OPERATIONS[operation]
    for implementation in dispatch.IMPLEMENTATIONS:
        got = jax.eval_shape(functools.partial(call, implementation=implementation), *arguments())
        assert got == jax.eval_shape(call, *arguments())


@pytest.mark.parametrize("platforms", [("cpu",), ("cpu", "cuda"), ("tpu",)])
@by_operation
def test_triton_is_not_lowered_for_another_platform(operation, platforms):
    call, arguments = OPERATIONS[operation]
    message = f"{operation}: implementation 'triton' runs on NVIDIA GPUs only; .*'interpret'"
    with pytest.raises(NotImplementedError, match=message):
        lowered(call, arguments(), *platforms, implementation="triton")


@pytest.mark.parametrize("wrap", [lambda call: call, jax.jit], ids=["eager", "jit"])
@by_operation
def test_triton_does_not_run_on_a_cpu(operation, wrap):
    call, arguments = OPERATIONS[operation]
    message = f"{operation}: implementation 'triton' runs on NVIDIA GPUs only; .*'interpret'"
    with pytest.raises(NotImplementedError, match=message):
        wrap(functools.partial(call, implementation="triton"))(*arguments())


@pytest.mark.parametrize("implementation", ["cuda", "", 0, "XLA"])
@by_operation
def test_an_unknown_implementation_is_refused(operation, implementation):
    call, arguments = OPERATIONS[operation]
    with pytest.raises(ValueError, match="implementation: expected one of None, 'xla', .*, got"):
        call(*arguments(), implementation=implementation)


@by_operation
def test_bad_arguments_come_before_the_choice(operation):
    call, arguments = OPERATIONS[operation]
    first, second, *others = arguments()
    bad = (first, second[:, :32]) if operation == "fused_store" else (first[:, :, :32], second)
    with pytest.raises(ValueError, match="expected (shape|rows)"):
        call(*bad, *others, implementation="triton")


# --- refusals: an error where the kernel is named, XLA where it is not


@by_operation
def test_where_pallas_has_no_triton_xla_goes_on_and_the_kernel_says_why(operation, monkeypatch):
    for name in [n for n in sys.modules if n.startswith("pallas_kernels.") and ".triton" in n]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    monkeypatch.delattr(pallas, "triton", raising=False)
    call, arguments = OPERATIONS[operation]
    assert_trees_equal(call(*arguments()), call(*arguments(), implementation="xla"))
    lacks = rf"'triton' needs Pallas' Triton lowering, which JAX {re.escape(jax.__version__)} lacks"
    with pytest.raises(NotImplementedError, match=lacks):
        call(*arguments(), implementation="triton")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_queries_that_are_not_bfloat16_are_refused(dtype):
    arguments = read_arguments(dtype)
    for name in ("triton", "interpret"):
        message = f"indexed_attention: implementation '{name}' multiplies bfloat16 queries only.*"
        message += f"got {dtype.__name__}; 'xla' can do it"
        with pytest.raises(NotImplementedError, match=message):
            jax.eval_shape(functools.partial(read, implementation=name), *arguments)
    assert TRITON_CALL not in lowered(read, arguments, "cuda")
    assert_trees_equal(jax.jit(read)(*arguments), jax.jit(functools.partial(
        read, implementation="xla"))(*arguments))  # fmt: skip


def arguments_of_size(operation, slots):
    """Shapes of calls on that many slots of 134 rows of V41: nothing is allocated."""
    array = jax.ShapeDtypeStruct
    rows = KVRows(array((slots, 70752), jnp.uint8), array((), jnp.int32), 134, V41)
    integers = functools.partial(array, dtype=jnp.int32)
    if operation == "fused_store":
        angles = array((4, 32), jnp.float32)
        return rows, array((4, 512), jnp.bfloat16), integers((4,)), angles, angles
    q = array((4, 2, 512), jnp.bfloat16)
    return q, rows, integers((4, 3)), None, array((2,), jnp.float32)


@by_operation
def test_a_block_above_two_gibibytes_is_refused(operation):
    call, _ = OPERATIONS[operation]
    fits, passes = (arguments_of_size(operation, slots) for slots in (30352, 30353))
    message = f"{operation}: implementation 'triton' addresses arrays of at most 2147483647 bytes, "
    message += r"got uint8\(30353, 70752\) of 2147535456; 'xla' can do it"
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(functools.partial(call, implementation="triton"), *passes)
    assert TRITON_CALL not in lowered(call, passes, "cuda")
    assert TRITON_CALL in lowered(call, fits, "cuda")


def read_arguments_of_shape(n, heads, columns):
    array = jax.ShapeDtypeStruct
    _, rows, *_ = arguments_of_size("indexed_attention", 4)
    return array((n, heads, 512), jnp.bfloat16), rows, array((n, columns), jnp.int32)


def test_indices_above_two_gibibytes_are_refused():
    arguments = read_arguments_of_shape(2**19, 1, 1025)
    call = functools.partial(indexed_attention, implementation="triton")
    with pytest.raises(NotImplementedError, match="addresses arrays of at most 2147483647 bytes"):
        jax.eval_shape(call, *arguments)
    assert TRITON_CALL not in lowered(indexed_attention, arguments, "cuda")


@pytest.mark.parametrize(("n", "kernels"), [(4095, 1), (4096, 2), (8190, 2)])
def test_sums_of_pieces_above_two_gibibytes_are_taken_in_parts(n, kernels):
    # Four pieces of float32[n, 64, 512]: 4095 queries fit, 4096 do not.
    text = lowered(indexed_attention, read_arguments_of_shape(n, 64, 774), "cuda")
    assert text.count(TRITON_CALL) == kernels


@by_operation
def test_a_batch_of_blocks_above_two_gibibytes_is_refused(operation):
    call, _ = OPERATIONS[operation]
    one = arguments_of_size(operation, 512)
    many = jax.tree.map(lambda x: jax.ShapeDtypeStruct((64, *x.shape), x.dtype), one)
    named = functools.partial(call, implementation="triton")
    with pytest.raises(NotImplementedError, match="addresses arrays of at most 2147483647 bytes"):
        jax.eval_shape(jax.vmap(named), *many)
    assert TRITON_CALL not in lowered(jax.vmap(call), many, "cuda")


@by_operation
def test_kernels_count_in_32_bits_where_the_program_may_use_64(operation):
    call, arguments = OPERATIONS[operation]
    arguments = arguments()
    with jax.enable_x64(True):
        got = jax.jit(functools.partial(call, implementation="interpret"))(*arguments)
        expected = jax.jit(functools.partial(call, implementation="xla"))(*arguments)
        assert TRITON_CALL in lowered(call, arguments, "cuda")
    chex.assert_trees_all_close(got, expected, rtol=1e-2)


def test_sizes_that_are_not_known_are_refused():
    [n] = jax.export.symbolic_shape("n")
    assert triton_common.too_large(jax.ShapeDtypeStruct((4, 64), jnp.float32)) is None
    unknown = jax.ShapeDtypeStruct((n, 64), jnp.float32)
    assert triton_common.too_large(unknown).startswith("needs sizes that are known, got ")


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_no_query_and_no_token(implementation):
    q, rows, indices, _, sink = read_arguments()
    out, lse = read(q[:0], rows, indices[:0], None, sink, implementation)
    assert (out.shape, lse.shape) == ((0, *q.shape[1:]), (0, q.shape[1]))
    out, lse = read(q[:, :0], rows, indices, None, sink[:0], implementation)
    assert (out.shape, lse.shape) == ((len(q), 0, q.shape[2]), (len(q), 0))
    _, latents, slots, cos, sin = store_arguments()
    same = store(rows, latents[:0], slots[:0], cos[:0], sin[:0], implementation)
    assert_trees_equal(same, rows)


# --- an operation of our own, to see what its parts are called with


@dataclasses.dataclass
class Probe:
    """An operation that multiplies and adds, and writes down its calls."""

    calls: list

    def operation(self):
        return dispatch.Operation("probe", self.xla, self.kernel, self.refusal)

    def xla(self, x, pair, *, factor):
        self.calls.append("xla")
        return {"sum": x * factor + pair["a"], "size": jnp.sum(pair["a"])}

    def kernel(self, x, pair, *, factor, card, interpret):
        self.calls.append(("kernel", card, interpret))
        return {"sum": x * factor + pair["a"], "size": jnp.sum(pair["a"])}

    def refusal(self, x, pair, *, factor):
        return "is not for seven" if factor == 7 else None

    def kernels(self):
        return [call for call in self.calls if call != "xla"]


X, PAIR = np.arange(4, dtype=np.float32), {"a": np.float32(3)}


def probe_call(implementation=None, factor=2.0):
    probe = Probe([])
    operation = probe.operation()
    return probe, lambda x, pair: operation(implementation, x, pair, factor=factor)


def test_an_operation_takes_and_gives_pytrees():
    for implementation in (None, "xla", "interpret"):
        probe, call = probe_call(implementation)
        got = call(X, PAIR)
        assert_trees_equal(got, {"sum": np.float32([3, 5, 7, 9]), "size": np.float32(3)})
        used = [("kernel", H200, True)] if implementation == "interpret" else []
        assert probe.kernels() == used


def test_the_refusal_is_the_message_or_the_reason_for_xla():
    for implementation in ("triton", "interpret"):
        _, call = probe_call(implementation, factor=7)
        message = f"probe: implementation '{implementation}' is not for seven; 'xla' can do it"
        with pytest.raises(NotImplementedError, match=message):
            call(X, PAIR)
    probe, call = probe_call(factor=7)
    lowered(call, (X, PAIR), "cuda")
    assert probe.kernels() == []


def test_the_kernel_is_made_for_the_card_of_the_mesh():
    probe, call = probe_call()
    jitted = jax.jit(call)

    def lower():
        jitted.trace(X, PAIR).lower(lowering_platforms=("cuda",))

    lower()
    for card, platform in [(A100, "gpu"), (B200, "cuda"), ("TPU v5e", "tpu")]:
        with device(card, platform):
            lower()
    # Also one function of both cards: neither finds the other's program.
    assert [card for _, card, _ in probe.kernels()] == [H200, A100, B200, H200]
    assert not any(interpret for *_, interpret in probe.kernels())


def test_the_interpreter_takes_the_card_of_the_mesh():
    probe, call = probe_call("interpret")
    with device(A100):
        lowered(call, (X, PAIR), "cpu")
    assert probe.kernels() == [("kernel", A100, True)]


def test_the_card_chooses_the_tile_of_the_attention(monkeypatch):
    seen, choose = [], tiles.choose_tile

    def recording(card, *arguments):
        seen.append(card)
        return dataclasses.replace(choose(card, *arguments), num_warps=4 if card == A100 else 8)

    monkeypatch.setattr(tiles, "choose_tile", recording)
    arguments = read_arguments()
    with device(A100):
        assert "num_warps = 4" in lowered(read, arguments, "cuda")
    assert "num_warps = 8" in lowered(read, arguments, "cuda")
    assert seen == [A100, H200]


def test_equal_calls_are_traced_once():
    probe = Probe([])
    first, second = probe.operation(), probe.operation()
    first(None, X, PAIR, factor=2.0)
    traces = len(probe.calls)
    for operation in (first, second):
        operation(None, X + 1, {"a": np.float32(5)}, factor=2.0)
    assert len(probe.calls) == traces
    first(None, X, PAIR, factor=3.0)
    assert len(probe.calls) == 2 * traces


@pytest.mark.parametrize("implementation", [None, "interpret"])
def test_gradients_and_batches_of_an_operation(implementation):
    _, call = probe_call(implementation)

    def total(x, pair):
        return jnp.sum(call(x, pair)["sum"] ** 2) + call(x, pair)["size"]

    gradient = jax.jit(jax.grad(total, argnums=(0, 1)))
    got = gradient(X, PAIR)
    assert_trees_equal(got, (np.float32([12, 20, 28, 36]), {"a": np.float32(49)}))
    tangent = jax.jvp(call, (X, PAIR), (np.ones_like(X), {"a": np.float32(1)}))[1]
    assert_trees_equal(tangent, {"sum": np.float32([3, 3, 3, 3]), "size": np.float32(1)})
    batch = np.stack([X, X + 1])
    got = jax.vmap(call, in_axes=(0, None))(batch, PAIR)
    assert_trees_equal(got, {"sum": 2 * batch + 3, "size": np.float32([3, 3])})
    got = jax.vmap(jax.vmap(call, in_axes=(None, 0)), in_axes=(1, None))(batch.T, {"a": X})
    assert_trees_equal(got["sum"], 2 * batch[:, None] + X[None, :, None])


def test_integers_have_no_gradient():
    operation = dispatch.Operation(
        "integers",
        lambda x: (x * 2, jnp.int32(1)),
        lambda x, card, interpret: (x * 2, jnp.int32(1)),
        lambda x: None,
    )
    got = jax.grad(lambda x: jnp.sum(operation(None, x)[0]))(X)
    np.testing.assert_array_equal(got, np.full(4, 2.0))


# --- saved programs


@by_operation
def test_a_saved_program_gives_the_same_answer(operation):
    call, arguments = OPERATIONS[operation]
    compiled = jax.jit(call)
    exported = jax.export.export(compiled, platforms=["cpu"])(*arguments())
    reloaded = jax.export.deserialize(exported.serialize())
    assert reloaded.platforms == ("cpu",)
    assert_trees_equal(reloaded.call(*arguments()), compiled(*arguments()))


@by_operation
def test_one_saved_program_is_for_cpu_and_cuda(operation):
    call, arguments = OPERATIONS[operation]
    exported = jax.export.export(
        jax.jit(call),
        platforms=["cpu", "cuda"],
        disabled_checks=dispatch.EXPORT_DISABLED_CHECKS,
    )(*arguments())
    reloaded = jax.export.deserialize(exported.serialize())
    assert reloaded.platforms == ("cpu", "cuda")
    assert_trees_equal(reloaded.call(*arguments()), jax.jit(call)(*arguments()))
    # The kernel is in the program: lowering it again makes none.
    assert lowered(reloaded.call, arguments(), "cuda").count(TRITON_CALL) == 1


def test_a_saved_program_knows_its_format():
    exported = jax.export.export(jax.jit(store), platforms=["cpu"])(*store_arguments())
    reloaded = jax.export.deserialize(exported.serialize())
    _, *others = store_arguments()
    with pytest.raises(ValueError, match="KVRows"):
        reloaded.call(KVRows.create(2, 3, V41_FP4.with_width(64)), *others)
