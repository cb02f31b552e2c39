"""What a decoder leaves to others: compressed caches, n-gram embeddings and inputs of draft models.

Each is a named input. A hook is a function, or a Flax module if it has parameters.
"""

from typing import Any, Protocol

from jaxtyping import Array, Float, Int32

from pallas_kernels import ExtraKV
from swa_jax.metadata import Metadata


class ExtraHook(Protocol):
    """Makes the compressed cache that a layer reads: it compresses keys and selects among them."""

    def __call__(
        self,
        hidden: Float[Array, "b t hidden"],
        meta: Metadata,
        extra: ExtraKV | None,
        cross_layer: Any,
    ) -> tuple[ExtraKV | None, Any]:
        """Called before the layer's attention.

        Args:
          hidden: floating[B, T, hidden], the attention's input, after its norm.
          meta: the call's metadata; meta.positions int32[B, T] has -1 at padding.
          extra: what the caller gave for this layer.
          cross_layer: what the layer before left, as when layers share a selection.

        Returns:
          The cache for the attention, and the value for the layers that follow.
        """
        ...


class EmbedHook(Protocol):
    """Changes embedded tokens: adds n-gram embeddings, or joins the input of a draft model."""

    def __call__(
        self,
        embedded: Float[Array, "b t hidden"],
        tokens: Int32[Array, "b t"],
        meta: Metadata,
        cross_layer: Any,
        draft_input: Float[Array, "b t _hidden"] | None,
    ) -> Float[Array, "b t hidden"]:
        """Called before the first layer.

        Args:
          embedded: floating[B, T, hidden], the tokens' embeddings.
          tokens: int32[B, T], their ids; anything at padding.
          meta: the call's metadata.
          cross_layer: the caller's value; the place for tokens before this call.
          draft_input: the caller's floating[B, T, ...], or None.

        Returns:
          What the first layer gets, floating[B, T, hidden].
        """
        ...
