"""Which implementation of an operation runs."""

from collections.abc import Callable, Mapping
from typing import Literal

from pallas_kernels import checks

Implementation = Literal["xla", "triton", "interpret"] | None
IMPLEMENTATIONS = ("xla", "triton", "interpret")


def select(
    operation: str, implementation: Implementation, available: Mapping[str, Callable]
) -> Callable:
    """The function that computes an operation.

    Args:
      operation: its name, for the message.
      implementation: None for the default, or one of "xla", "triton" and "interpret".
      available: the operation's implementations by name.

    Returns:
      The implementation; the default is "xla".

    Raises:
      ValueError: there is no such implementation.
      NotImplementedError: this operation lacks it. A named one is never replaced by another.
    """
    checks.check_choice("implementation", implementation, (None, *IMPLEMENTATIONS))
    name = implementation or "xla"
    if name not in available:
        raise NotImplementedError(
            f"{operation}: implementation {name!r} does not exist yet; "
            f"{', '.join(map(repr, available))} can do it"
        )
    return available[name]
