"""The sizes that the suites of the benchmark share, and the rings that they time."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np

import swa_jax as swa
from pallas_kernels import KVRows, quantize_rows
from pallas_kernels.storage import region_bytes

EPS = 1e-6
POSITION = 1000  # past the ring's first turn


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the suites are told.

    Attributes:
      tiny: whether it is a rehearsal, in which no figure means anything.
      torch: whether PyTorch's peers run: it is there, and both run on the CPU.
      transformers: whether Hugging Face's layer runs.
      dtype: of queries and projections: that which the device computes fast in.
      requests: numbers of requests, one query each.
      heads: query heads.
      width: values in a row.
      half: rotated pairs.
      window: rows that a query sees.
      context: tokens of a cache that keeps the whole context.
      contexts: the lengths of several such caches.
      slots: numbers of state slots, all but a few idle.
    """

    tiny: bool = False
    torch: bool = False
    transformers: bool = False
    dtype: str = "float32"
    requests: tuple[int, ...] = (1, 8, 64, 256)
    heads: int = 64
    width: int = 512
    half: int = 32
    window: int = 128
    context: int = 4096
    contexts: tuple[int, ...] = (256, 1024, 4096, 16384)
    slots: tuple[int, ...] = (16, 256, 1024, 4096)

    @property
    def geometry(self) -> swa.RingGeometry:
        return swa.RingGeometry.for_drafts(self.window)

    @property
    def fmt(self) -> swa.KVCacheFormat:
        return swa.V41.with_width(self.width)


def make_settings(tiny: bool) -> Settings:
    """The settings of this machine.

    Args:
      tiny: whether it is a rehearsal.
    """
    on_cpu = jax.default_backend() == "cpu"
    torch, transformers = (
        on_cpu and importlib.util.find_spec(name) is not None for name in ("torch", "transformers")
    )
    dtype = "float32" if on_cpu else "bfloat16"
    settings = Settings(torch=torch, transformers=torch and transformers, dtype=dtype)
    if not tiny:
        return settings
    return dataclasses.replace(
        settings, tiny=True, requests=(1, 2), heads=2, width=64, half=8, window=8, context=32,
        contexts=(16, 32), slots=(4, 8),
    )  # fmt: skip


def random_values(settings: Settings, *shape: int, seed: int = 0) -> jax.Array:
    """Normal float32 values [*shape, width]."""
    random = np.random.default_rng(seed)
    return jnp.asarray(random.normal(size=(*shape, settings.width)), jnp.float32)


def filled_rows(settings: Settings, slots: int, fmt: swa.KVCacheFormat | None = None) -> KVRows:
    """One layer's rings, each slot's S rows quantised from random values.

    Args:
      settings: the sizes.
      slots: state slots.
      fmt: of the rows; None for that of the settings.
    """
    capacity, fmt = settings.geometry.capacity, fmt or settings.fmt
    values = random_values(settings, min(slots, 8), capacity, seed=1)
    data = jax.jit(quantize_rows, static_argnums=1)(values, fmt)
    data = jnp.tile(data.reshape(len(values), -1), (-(-slots // len(values)), 1))[:slots]
    data = jnp.pad(data, ((0, 0), (0, region_bytes(capacity, fmt) - data.shape[1])))
    return KVRows.view(data, start=0, rows_per_slot=capacity, fmt=fmt)


def angles(settings: Settings, n: int) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines float32[n, half] of some angles."""
    turn = np.random.default_rng(2).uniform(-np.pi, np.pi, (n, settings.half))
    return jnp.asarray(np.cos(turn), jnp.float32), jnp.asarray(np.sin(turn), jnp.float32)
