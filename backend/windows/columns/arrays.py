"""Array tools that the operators share: dense group numbers, and ranges of numbers laid out flat."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def dense(values: IntArray, bound: int) -> tuple[IntArray, IntArray]:
    """Number the distinct values in ascending order.

    Args:
        values: In `[0, bound)`.
        bound: Where it is not far over the number of values, flags replace a sort.

    Returns:
        The number of each value, and the distinct values, ascending.

    >>> dense(np.array([7, 3, 7]), 8)
    (array([1, 0, 1]), array([3, 7]))
    """
    if bound > 4 * len(values) + 65_536:
        uniques, numbers = np.unique(values, return_inverse=True)
        return numbers, uniques
    present = np.zeros(bound, np.bool_)
    present[values] = True
    uniques = np.flatnonzero(present)
    number_of = np.empty(bound, np.int64)
    number_of[uniques] = np.arange(len(uniques))
    return number_of[values], uniques


def compress(values: IntArray) -> tuple[IntArray, IntArray]:
    """Number the distinct values in ascending order, whatever their range."""
    if not len(values):
        return values, values
    low, high = int(values.min()), int(values.max())
    if low == high:
        return np.zeros(len(values), np.int64), np.array([low], np.int64)
    if high - low <= 4 * len(values) + 65_536:
        numbers, uniques = dense(values - low, high - low + 1)
        return numbers, uniques + low
    uniques, numbers = np.unique(values, return_inverse=True)
    return numbers, uniques


def places(known: IntArray, values: IntArray) -> IntArray:
    """Give where values stand among known ones, -1 for what is not among them.

    Args:
        known: Distinct, ascending. Where they are not far more apart than the values are many, a table replaces a
            search.
        values: Any numbers.

    >>> places(np.array([3, 7]), np.array([7, 8, 3, 2]))
    array([ 1, -1,  0, -1])
    """
    if not len(known) or not len(values):
        return np.full(len(values), -1, np.int64)
    low, high = int(known[0]), int(known[-1])
    if high - low > 4 * len(values) + 65_536:
        found = np.minimum(np.searchsorted(known, values), len(known) - 1)
        return np.where(known[found] == values, found, -1)
    table = np.full(high - low + 1, -1, np.int64)
    table[known - low] = np.arange(len(known))
    if int(values.min()) >= low and int(values.max()) <= high:
        return table[values - low]
    inside = (values >= low) & (values <= high)
    return np.where(inside, table[np.where(inside, values, low) - low], -1)


def firsts(numbers: IntArray, count: int) -> IntArray:
    """Give the first row of each group number in `[0, count)`; every group has a row.

    Where there are far fewer groups than rows, all have often come among the first of these.
    """
    rows = np.full(count, -1, np.int64)
    for part in (numbers[: 16 * count + 4_096], numbers):
        rows[part[::-1]] = np.arange(len(part) - 1, -1, -1)
        if len(part) == len(numbers) or (rows >= 0).all():
            break
    return rows


def least(values: IntArray, numbers: IntArray, count: int) -> IntArray:
    """Give the smallest value per group number in `[0, count)`; every group has a row."""
    result = np.full(count, np.iinfo(np.int64).max, np.int64)
    np.minimum.at(result, numbers, values)
    return result


def grouped(*columns: IntArray) -> Iterator[tuple[Any, IntArray]]:
    """Give the distinct rows of columns as tuples, ascending, with where each stands, ascending.

    >>> [(row, at.tolist()) for row, at in grouped(np.array([1, 0, 1]), np.array([5, 6, 5]))]
    [((0, 6), [1]), ((1, 5), [0, 2])]
    """
    if not len(columns[0]):
        return
    order = np.lexsort(columns[::-1])
    changes = np.any([np.diff(column[order]) != 0 for column in columns], axis=0)
    for rows in np.split(order, np.flatnonzero(changes) + 1):
        yield tuple(int(column[rows[0]]) for column in columns), rows


def spread(starts: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
    """Lay out `starts[i], starts[i] + 1, ...` (`counts[i]` of them, none if negative) one after the other.

    Returns:
        The numbers, and for each the i it belongs to.

    >>> spread(np.array([5, 9]), np.array([2, 1]))
    (array([5, 6, 9]), array([0, 0, 1]))
    """
    counts = np.maximum(counts, 0)
    owner = np.repeat(np.arange(len(starts)), counts)
    skipped = np.cumsum(counts) - counts
    return np.arange(len(owner)) - skipped[owner] + starts[owner], owner


def parts(sizes: IntArray, most: int) -> Iterator[slice]:
    """Cut rows into runs of at most so much together, or of one row.

    >>> list(parts(np.array([2, 2, 9, 1]), 4))
    [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None)]
    """
    ends = np.cumsum(sizes)
    begin = 0
    while begin < len(ends):
        done = int(ends[begin - 1]) if begin else 0
        stop = max(int(np.searchsorted(ends, done + most, "right")), begin + 1)
        yield slice(begin, stop)
        begin = stop


def union(firsts_: IntArray, lasts: IntArray) -> IntArray:
    """Give every number of the closed ranges once, ascending; ranges with `last < first` are empty.

    The cost follows the numbers, not the gaps between the ranges.
    """
    low, high = runs(firsts_, lasts)
    return spread(low, high - low + 1)[0]


def few(firsts_: IntArray, lasts: IntArray, most: int) -> tuple[IntArray, IntArray]:
    """Join what `runs` gives further, over the smallest gaps, until it is no more than so many."""
    if len(firsts_) <= most:
        return firsts_, lasts
    cuts = np.sort(np.argpartition(firsts_[1:] - lasts[:-1], -most + 1)[-most + 1 :])
    return firsts_[np.concatenate([[0], cuts + 1])], lasts[np.concatenate([cuts, [len(lasts) - 1]])]


def runs(firsts_: IntArray, lasts: IntArray) -> tuple[IntArray, IntArray]:
    """Join closed ranges that touch or overlap: first and last number of each run, ascending."""
    nonempty = firsts_ <= lasts
    firsts_, lasts = firsts_[nonempty], lasts[nonempty]
    if not len(firsts_):
        return firsts_, lasts
    order = np.argsort(firsts_, kind="stable")
    firsts_, lasts = firsts_[order], np.maximum.accumulate(lasts[order])
    opens = np.flatnonzero(np.concatenate([[True], firsts_[1:] > lasts[:-1] + 1]))
    return firsts_[opens], lasts[np.append(opens[1:] - 1, len(lasts) - 1)]


class Order:
    """Finds places in (key, time) pairs that are in order.

    Args:
        keys: Ascending.
        times: Ascending within a key.
    """

    def __init__(self, keys: IntArray, times: IntArray) -> None:
        at, self._distinct = compress(times)
        self._codes = keys * (len(self._distinct) + 1) + at

    def first(self, keys: IntArray, times: IntArray) -> IntArray:
        """Give per key the place of its first time at or after another."""
        return self._find(keys, np.searchsorted(self._distinct, times, "left"))

    def after(self, keys: IntArray, times: IntArray) -> IntArray:
        """Give per key the place of its first time after another."""
        return self._find(keys, np.searchsorted(self._distinct, times, "right"))

    def _find(self, keys: IntArray, at: IntArray) -> IntArray:
        found: IntArray = np.searchsorted(self._codes, keys * (len(self._distinct) + 1) + at, "left")
        return found
