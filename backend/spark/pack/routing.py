"""Grouping values that Spark's own hash sends to distinct shuffle partitions.

Spark places a grouping value in partition `pmod(murmur3(value, seed=42), partitions)`. Shard numbers taken as they are
collide (measured: shards 0 and 1 both landed on one of two tasks, the other idled), so each shard is given the smallest
integer whose hash falls into the shuffle partition of the same number. Source: Spark's `Murmur3Hash` and
`HashPartitioning`; the values are kept in the manifest and never computed anew for an existing checkpoint.
"""

from __future__ import annotations

from itertools import count

MAX_SHARDS = 4096


def murmur3_int(value: int, seed: int = 42) -> int:
    """Hash a 32-bit integer as Spark's `hash()` does; the result is a signed 32-bit integer.

    >>> murmur3_int(0), murmur3_int(1)  # SELECT hash(0), hash(1)
    (933211791, -559580957)
    """
    mask = 0xFFFFFFFF
    k1 = (value & mask) * 0xCC9E2D51 & mask
    k1 = (k1 << 15 | k1 >> 17) & mask
    k1 = k1 * 0x1B873593 & mask
    h1 = (seed & mask) ^ k1
    h1 = (h1 << 13 | h1 >> 19) & mask
    h1 = (h1 * 5 + 0xE6546B64) & mask
    h1 ^= 4
    h1 ^= h1 >> 16
    h1 = h1 * 0x85EBCA6B & mask
    h1 ^= h1 >> 13
    h1 = h1 * 0xC2B2AE35 & mask
    h1 ^= h1 >> 16
    return h1 - 2**32 if h1 >= 2**31 else h1


def grouping_values(shards: int) -> tuple[int, ...]:
    """Give one grouping value per shard, such that shard i falls into shuffle partition i of `shards`.

    Raises:
        ValueError: `shards` is not between 1 and `MAX_SHARDS`.
    """
    if not 1 <= shards <= MAX_SHARDS:
        raise ValueError(f"shards={shards!r}: allowed are 1 to {MAX_SHARDS}")
    found: dict[int, int] = {}
    values = count()
    while len(found) < shards:
        value = next(values)
        found.setdefault(murmur3_int(value) % shards, value)
    return tuple(found[shard] for shard in range(shards))
