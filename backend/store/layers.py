"""Layers of changes: sorted rows over older sorted rows. A value of None is a delete."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from operator import lt

Rows = tuple[list[bytes], list[bytes | None]]
Slice = tuple[Sequence[bytes], Sequence[bytes | None]]
Finder = Callable[[bytes], object]
ABSENT = object()
_READS_PER_ROW = 8
"""A bisection costs about as much as putting this many rows into a dict."""


class Run:
    """Rows in strictly increasing key order; immutable once made, so a scan may keep it."""

    __slots__ = ("_lookup", "keys", "values")

    def __init__(self, keys: list[bytes], values: list[bytes | None]) -> None:
        self.keys, self.values = keys, values
        self._lookup: dict[bytes, bytes | None] | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def meets(self, first: bytes, last: bytes) -> bool:
        """Say whether the run may hold a key of the closed range."""
        return self.keys[0] <= last and first <= self.keys[-1]

    def find(self, key: bytes) -> object:
        """Give the value, None for a delete, `ABSENT` when the run says nothing of the key."""
        at = bisect_left(self.keys, key)
        return self.values[at] if at < len(self.keys) and self.keys[at] == key else ABSENT

    def finder(self, reads: int) -> Finder:
        """Give the cheapest `find` for a number of reads: for many, a dict of the run, built once."""
        if self._lookup is None and reads * _READS_PER_ROW < len(self.keys):
            return self.find
        if self._lookup is None:
            self._lookup = dict(zip(self.keys, self.values, strict=True))
        lookup = self._lookup
        return lambda key: lookup.get(key, ABSENT)

    def cut(self, start: bytes, end: bytes | None) -> Slice:
        """Give the rows of `[start, end)`."""
        low = bisect_left(self.keys, start)
        high = len(self.keys) if end is None else bisect_left(self.keys, end, low)
        if low == 0 and high == len(self.keys):
            return self.keys, self.values
        return self.keys[low:high], self.values[low:high]


def increasing(keys: Sequence[bytes]) -> bool:
    """Say whether keys are sorted and each is there once."""
    return all(map(lt, keys, islice(keys, 1, None)))


def sorted_rows(rows: dict[bytes, bytes | None]) -> Rows:
    """Give the rows of a dict in order of key."""
    keys = sorted(rows)
    return keys, list(map(rows.__getitem__, keys))


def merge_layers(layers: Sequence[Slice]) -> Rows:
    """Merge sorted rows, oldest layer first; of equal keys the newest layer's row stays."""
    if not layers:
        return [], []
    apart = sorted(layers, key=lambda layer: layer[0][0])
    if all(low[0][-1] < high[0][0] for low, high in pairwise(apart)):  # regions of their own, mostly
        return _joined(apart)
    merged = layers[0]
    for layer in layers[1:]:
        merged = _merge_two(merged, layer)
    return merged  # type: ignore[return-value]


def _joined(layers: Sequence[Slice]) -> Rows:
    keys: list[bytes] = []
    values: list[bytes | None] = []
    for layer in layers:
        keys += layer[0]
        values += layer[1]
    return keys, values


def _merge_two(older: Slice, newer: Slice) -> Rows:
    """Merge where both have keys; what lies before and behind is of one of them. Messages come mostly in order."""
    first, last = max(older[0][0], newer[0][0]), min(older[0][-1], newer[0][-1])
    parts: list[list[Slice]] = [[], [], []]
    for keys, values in (older, newer):
        low, high = bisect_left(keys, first), bisect_right(keys, last)
        for part, at in zip(parts, (slice(low), slice(low, high), slice(high, None)), strict=True):
            part.append((keys[at], values[at]))
    before, both, behind = parts
    rows: dict[bytes, bytes | None] = {}
    for keys, values in both:
        rows.update(zip(keys, values, strict=True))
    # the sort finds the layers' own order again: its cost is that of merging, not of sorting
    return _joined([*before, sorted_rows(rows), *behind])


def merge_visible(base: tuple[list[bytes], list[bytes]], own: Slice) -> tuple[list[bytes], list[bytes]]:
    """Merge committed rows and own ones; what is deleted is left out."""
    if not own[0]:
        return base
    keys, values = merge_layers([base, own]) if base[0] else (list(own[0]), list(own[1]))
    if None in own[1]:
        present = [(key, value) for key, value in zip(keys, values, strict=True) if value is not None]
        return [key for key, _ in present], [value for _, value in present]
    return keys, values  # type: ignore[return-value]


def merge_scan(base: Iterator[tuple[bytes, bytes]], own: Slice, *, reverse: bool) -> Iterator[tuple[bytes, bytes]]:
    """Merge two ordered sequences of rows; own rows win, deletes hide."""
    before: Callable[[bytes, bytes], bool] = (lambda a, b: a > b) if reverse else lt
    row = next(base, None)
    for key, value in zip(*own, strict=True):
        while row is not None and before(row[0], key):
            yield row
            row = next(base, None)
        if row is not None and row[0] == key:
            row = next(base, None)
        if value is not None:
            yield key, value
    if row is not None:
        yield row
        yield from base
