"""An attention layer cut by heads for tensor parallelism: each shard is a layer of fewer heads.

The outputs of all shards add up to the layer's: the last projection is a sum over groups, and the
one before it a sum over the heads of a group.
"""

import dataclasses

from pallas_kernels import checks
from swa_jax.config import AttentionConfig

WHOLE = (slice(None), slice(None))
"""All rows and columns of a matrix [out, in]."""


def shard_config(config: AttentionConfig, count: int) -> AttentionConfig:
    """The configuration of one of several shards of a layer.

    Args:
      config: the whole layer's configuration.
      count: number of shards. Each holds whole groups of heads, or part of one group.

    Returns:
      The same with num_heads / count heads, in o_groups / count groups or in one.

    Raises:
      ValueError: heads or groups cannot be divided so.
    """
    count = _integer("count", count)
    if count < 1 or config.num_heads % count:
        raise ValueError(
            f"count: expected a divisor of num_heads {config.num_heads}, got {count}: a head is "
            f"not divided"
        )
    if config.o_groups % count and count % config.o_groups:
        raise ValueError(
            f"count: expected a divisor or a multiple of o_groups {config.o_groups}, got {count}: "
            f"a shard would hold parts of two groups"
        )
    return dataclasses.replace(
        config, num_heads=config.num_heads // count, o_groups=max(config.o_groups // count, 1)
    )


def shard_slices(config: AttentionConfig, shard: tuple[int, int]) -> dict[str, tuple[slice, slice]]:
    """Rows and columns of the layer's parameters that a shard holds.

    Args:
      config: the whole layer's configuration.
      shard: (index, count).

    Returns:
      Slices for sinks (whose columns mean nothing), q_b, o_a and o_b. Every shard holds the others
      whole.

    Raises:
      ValueError: the index is out of range, or the count as in `shard_config`.
    """
    if not isinstance(shard, tuple) or len(shard) != 2:
        raise ValueError(f"shard: expected (index, count), got {shard!r}")
    index, count = (_integer("shard", value) for value in shard)
    part = shard_config(config, count)
    if not 0 <= index < count:
        raise ValueError(f"shard: expected an index from 0 to {count - 1}, got {index}")
    first_head = index * part.num_heads
    heads_of_group = config.num_heads // config.o_groups
    first_group, head_in_group = divmod(first_head, heads_of_group)
    group_heads = part.num_heads // part.o_groups
    output_ranks = _span(first_group, part.o_groups, config.o_lora_rank)
    return {
        "sinks": (_span(first_head, part.num_heads), slice(None)),
        "q_b": (_span(first_head, part.num_heads, config.head_dim), slice(None)),
        "o_a": (output_ranks, _span(head_in_group, group_heads, config.head_dim)),
        "o_b": (slice(None), output_ranks),
    }


def _span(first: int, count: int, size: int = 1) -> slice:
    """`count` things of some size from the first on."""
    return slice(first * size, (first + count) * size)


def _integer(name: str, value: object) -> int:
    number = checks.known_int(name, value)
    if number is None:
        raise ValueError(f"{name}: expected an integer, got a traced value")
    return number
