"""Reading many rows: by their keys, those that are there or all of them; by ranges of keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from backend.errors import StateCorrupted
from backend.store.protocol import Readable


def get_present(state: Readable, keys: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Give keys and values of the rows that are there, in the order of the keys."""
    found = [(key, value) for key, value in zip(keys, state.get_many(keys), strict=True) if value is not None]
    return [key for key, _ in found], [value for _, value in found]


def get_all(state: Readable, keys: Sequence[bytes], missing: str) -> list[bytes]:
    """Give the values of rows that are all there.

    Args:
        state: Where.
        keys: Their keys.
        missing: Says of the first one that is not there what is wrong.

    Raises:
        StateCorrupted: One is missing.
    """
    values = state.get_many(keys)
    if None in values:
        raise StateCorrupted(missing, where=keys[values.index(None)].hex())
    return values  # type: ignore[return-value]


def scan_ranges(state: Readable, ranges: Iterable[tuple[bytes, bytes]]) -> tuple[list[bytes], list[bytes], list[int]]:
    """Read half-open ranges of keys, one after the other: keys, values, and how many rows each has."""
    keys: list[bytes] = []
    values: list[bytes] = []
    sizes = []
    for start, end in ranges:
        found = state.scan_arrays(start, end)
        keys += found[0]
        values += found[1]
        sizes.append(len(found[0]))
    return keys, values, sizes
