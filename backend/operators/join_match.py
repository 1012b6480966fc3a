"""Which rows meet: equal codes and times in a range, by sorting and searching, in pieces of bounded size.

New rows ask, candidates answer. Candidates are sorted by (code, time), so what a row can meet is one run of them, found
by two binary searches; a hot code costs its pairs, not a cross product, and never all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from backend.operators.arrays import IntArray, spread

CHUNK_PAIRS = 1_000_000
"""Pairs that are looked at together; one row's own run may be longer."""


class Candidates:
    """Rows that can be met, sorted by (code, time).

    Args:
        code: Number of the equal fields' code, -1 for null; zeros without equal fields.
        time: Event times; None when no range is asked for.
        chunk: Pairs that are looked at together.
    """

    def __init__(self, code: IntArray, time: IntArray | None, *, chunk: int = CHUNK_PAIRS) -> None:
        self._chunk = chunk
        known = np.flatnonzero(code >= 0)
        self._times = np.unique(time[known]) if time is not None else np.zeros(1, np.int64)
        rank = np.searchsorted(self._times, time[known]) if time is not None else np.zeros(len(known), np.int64)
        place = code[known] * (len(self._times) + 1) + rank
        order = np.argsort(place, kind="stable")
        self._rows, self._place = known[order], place[order]

    def meet(
        self, code: IntArray, low: IntArray | None = None, high: IntArray | None = None
    ) -> Iterator[tuple[IntArray, IntArray]]:
        """Give (asking row, candidate), by asking row, in pieces.

        Args:
            code: Numbers as of the candidates; -1 meets nothing.
            low: Smallest time of each row, inclusive; None without a range.
            high: Largest time, inclusive.
        """
        asks = np.flatnonzero(code >= 0)
        base = code[asks] * (len(self._times) + 1)
        first, last = base, base + len(self._times)
        if low is not None and high is not None:
            first = base + np.searchsorted(self._times, low[asks], "left")
            last = base + np.searchsorted(self._times, high[asks], "right")
        start = np.searchsorted(self._place, first, "left")
        count = np.searchsorted(self._place, last, "left") - start
        met = np.flatnonzero(count > 0)
        asks, start, count = asks[met], start[met], count[met]
        ends = np.cumsum(count)
        begin = 0
        while begin < len(asks):
            done = int(ends[begin - 1]) if begin else 0
            stop = max(int(np.searchsorted(ends, done + self._chunk, "right")), begin + 1)
            at, owner = spread(start[begin:stop], count[begin:stop])
            yield asks[begin:stop][owner], self._rows[at]
            begin = stop
