"""Which implementation of an operation runs, and for which card.

The choice is made when a program is lowered, so that one traced function serves a CPU and a GPU,
also in one saved program: an operation is a JAX primitive whose lowering for CUDA is its kernel.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Hashable
from typing import Any, Literal, NoReturn, Protocol

import jax
from jax import export
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from pallas_kernels import checks, triton_common

Implementation = Literal["xla", "triton", "interpret"] | None
IMPLEMENTATIONS = ("xla", "triton", "interpret")

DEFAULT_CARD = "NVIDIA H200"
"""The card that programs are made for where neither a local GPU nor an abstract mesh names one."""

# A saved program holds the kernels as Triton IR, which JAX does not promise to read in other
# versions.
EXPORT_DISABLED_CHECKS = (export.DisabledSafetyCheck.custom_call(triton_common.CUSTOM_CALL),)
"""What `jax.export.export(disabled_checks=...)` needs in order to save a program for CUDA."""


class Kernel(Protocol):
    """A GPU implementation of an operation."""

    def __call__(self, *operands: Any, card: str, interpret: bool, **options: Any) -> Any:
        """The result, by a kernel made for `card`, or by JAX's interpreter of kernels."""
        ...


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation and its implementations.

    Attributes:
      name: for messages.
      xla: the definition, called with the operands and the options.
      kernel: the GPU kernel.
      refusal: called with the operands and the options, why the kernel cannot compute this, or
        None where it can. It sees shapes and dtypes only.
    """

    name: str
    xla: Callable[..., Any]
    kernel: Kernel
    refusal: Callable[..., str | None]

    def __call__(self, implementation: Implementation, *operands: Any, **options: Hashable) -> Any:
        """Runs the operation.

        Args:
          implementation: None for the kernel on CUDA where it can and XLA elsewhere, or one of
            "xla", "triton" and "interpret".
          *operands: pytrees of arrays.
          **options: what is static.

        Returns:
          What `xla` returns. Gradients are those of `xla`, whichever implementation runs.

        Raises:
          ValueError: there is no such implementation.
          NotImplementedError: it cannot do this; a named one is never replaced by another.
        """
        checks.check_choice("implementation", implementation, (None, *IMPLEMENTATIONS))
        if implementation == "xla":
            return self.xla(*operands, **options)
        reason = self.refusal(*operands, **options)
        if reason is not None:
            if implementation is None:
                return self.xla(*operands, **options)
            raise _refused(self.name, implementation, reason)
        leaves, tree = jax.tree.flatten(operands)
        static = tuple(sorted(options.items()))
        kernel_static = (*static, ("interpret", implementation == "interpret"))
        call = _Call(
            operation=self.name,
            implementation=implementation,
            xla=_OnLeaves(self.xla, tree, static),
            kernel=_OnLeaves(self.kernel, tree, kernel_static),
            card=_card_of_mesh(),
        )
        leaves = [jax.numpy.asarray(leaf) for leaf in leaves]
        _, result_tree = _results(call.xla, tuple(jax.typeof(leaf) for leaf in leaves))
        return jax.tree.unflatten(result_tree, _primitive.bind(*leaves, call=call))


def operation(name: str, xla: Callable[..., Any], backend: str) -> Operation:
    """An operation whose kernel is in a module that is imported when it is first asked for.

    A program that only imports the package does not wait for Pallas; and where JAX has no Triton
    lowering any more, the operation is XLA's, and who names the kernel is told why.

    Args:
      name: of the operation, and of the kernel in its module.
      xla: the definition.
      backend: the module, which has a `refusal` as well.
    """

    def kernel(*operands, **options):
        return getattr(importlib.import_module(backend), name)(*operands, **options)

    def refusal(*operands, **options):
        try:
            module = importlib.import_module(backend)
        except ImportError as error:
            if not (error.name or "").startswith("jax"):
                raise
            return f"needs Pallas' Triton lowering, which JAX {jax.__version__} lacks ({error})"
        return module.refusal(*operands, **options)

    return Operation(name, xla, kernel, refusal)


@dataclasses.dataclass(frozen=True)
class _OnLeaves:
    """A function of pytrees as one of their leaves, equal to others of the same meaning."""

    function: Callable[..., Any]
    tree: Any  # of the operands
    options: tuple[tuple[str, Hashable], ...]

    def __call__(self, *leaves: jax.Array, **options: Hashable) -> Any:
        operands = jax.tree.unflatten(self.tree, leaves)
        return self.function(*operands, **dict(self.options), **options)


@dataclasses.dataclass(frozen=True)
class _Mapped:
    """A function of leaves over a batch, of which some leaves have the axis and some do not."""

    function: Callable[..., Any]
    axes: tuple[int | None, ...]
    one_by_one: bool

    def __call__(self, *leaves: jax.Array, **options: Hashable) -> Any:
        function = functools.partial(self.function, **options)
        if not self.one_by_one:
            return jax.vmap(function, in_axes=self.axes)(*leaves)
        mapped = {i: leaves[i] for i, axis in enumerate(self.axes) if axis is not None}

        def one(parts):
            return function(*(parts.get(i, leaf) for i, leaf in enumerate(leaves)))

        return jax.lax.map(one, mapped)


@dataclasses.dataclass(frozen=True)
class _Call:
    """The static part of a call: what runs where. Equal calls compile once."""

    operation: str
    implementation: Implementation
    xla: Callable[..., Any]
    kernel: Callable[..., Any]
    card: str | None


_primitive = Primitive("row_operation")
_primitive.multiple_results = True


@functools.lru_cache(maxsize=1024)
def _results(xla: Callable[..., Any], avals: tuple[Any, ...]) -> tuple[list[Any], Any]:
    """The results' types, and the pytree they are the leaves of."""
    jaxpr, result = jax.make_jaxpr(xla, return_shape=True)(*avals)
    return jaxpr.out_avals, jax.tree.structure(result)


@_primitive.def_abstract_eval
def _abstract_eval(*avals, call: _Call):
    return _results(call.xla, avals)[0]


@functools.partial(jax.jit, static_argnames="call")
def _jitted(*leaves, call: _Call):
    return _primitive.bind(*leaves, call=call)


_primitive.def_impl(_jitted)


def _lower(ctx, *operands, call: _Call):
    if call.implementation == "triton":
        _refuse_platform(call.operation)
    if call.implementation == "interpret":
        return _lower_kernel(ctx, operands, call, call.card or DEFAULT_CARD)
    return _lower_function(ctx, call.xla, operands)


def _lower_for_cuda(ctx, *operands, call: _Call):
    if call.implementation == "interpret":
        return _lower(ctx, *operands, call=call)
    card = call.card or _local_card() or DEFAULT_CARD
    with triton_common.lowering_for(card):
        return _lower_kernel(ctx, operands, call, card)


def _lower_kernel(ctx, operands, call: _Call, card: str):
    # Kernels count in 32 bits, also where the program around them may use 64.
    with jax.enable_x64(False):
        # Inside a shard_map types name its mesh, whose devices need not be what is lowered for.
        mesh = jax.sharding.get_abstract_mesh()
        avals = [
            aval if aval.sharding.mesh == mesh else ShapedArray(aval.shape, aval.dtype)
            for aval in ctx.avals_in
        ]
        kernel = functools.partial(call.kernel, card=card)
        return _lower_function(ctx.replace(avals_in=avals), kernel, operands)


def _lower_function(ctx, function, operands):
    flat = lambda *leaves: jax.tree.leaves(function(*leaves))  # noqa: E731
    return mlir.lower_fun(flat, multiple_results=True)(ctx, *operands)


def _refused(operation: str, implementation: Implementation, reason: str) -> NotImplementedError:
    return NotImplementedError(
        f"{operation}: implementation {implementation!r} {reason}; 'xla' can do it"
    )


def _refuse_platform(operation: str) -> NoReturn:
    raise NotImplementedError(
        f"{operation}: implementation 'triton' runs on NVIDIA GPUs only; elsewhere 'interpret' "
        f"runs the same kernel step by step, and 'xla' computes the same"
    )


mlir.register_lowering(_primitive, _lower)
mlir.register_lowering(_primitive, _lower_for_cuda, platform="cuda")


def _batch(leaves, axes, *, call: _Call):
    leaves = [
        leaf if axis is None else jax.numpy.moveaxis(leaf, axis, 0)
        for leaf, axis in zip(leaves, axes, strict=True)
    ]
    axes = tuple(None if axis is None else 0 for axis in axes)
    mapped = dataclasses.replace(
        call,
        xla=_Mapped(call.xla, axes, one_by_one=False),
        # The first axis is one more of the kernel's grid, which has room for one.
        kernel=_Mapped(call.kernel, axes, one_by_one=isinstance(call.kernel, _Mapped)),
    )
    results, _ = _results(mapped.xla, tuple(jax.typeof(leaf) for leaf in leaves))
    reason = triton_common.too_large(*leaves, *results)
    if reason is None:
        out = _primitive.bind(*leaves, call=mapped)
    elif call.implementation is None:
        out = jax.tree.leaves(mapped.xla(*leaves))
    else:
        raise _refused(call.operation, call.implementation, reason)
    return out, [0] * len(out)


batching.primitive_batchers[_primitive] = _batch


def _jvp(primals, tangents, *, call: _Call):
    moving = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]

    def function(*values):
        # A constant may come as a NumPy array.
        leaves = [jax.numpy.asarray(primal) for primal in primals]
        for i, value in zip(moving, values, strict=True):
            leaves[i] = value
        return jax.tree.leaves(call.xla(*leaves))

    out, moved = jax.jvp(function, [primals[i] for i in moving], [tangents[i] for i in moving])
    moved = [
        ad.Zero(jax.typeof(value).to_tangent_aval())
        if tangent.dtype == jax.dtypes.float0
        else tangent
        for value, tangent in zip(out, moved, strict=True)
    ]
    return out, moved


ad.primitive_jvps[_primitive] = _jvp


def _card_of_mesh() -> str | None:
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.device_kind if device is not None and device.platform in ("gpu", "cuda") else None


def _local_card() -> str | None:
    try:
        return jax.local_devices(backend="cuda")[0].device_kind
    except RuntimeError:
        return None
