"""Which rows meet: equal codes and times in a range, by sorting and searching, in pieces of bounded size.

New rows ask, candidates answer. Candidates are sorted by (code, time), so what a row can meet is one run of them, found
by two binary searches; a hot code costs its pairs, not a cross product, and never all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

from backend.windows.columns.arrays import IntArray, parts, spread

CHUNK_PAIRS = 1_000_000
"""Pairs that are looked at together; one row's own run may be longer."""
CHUNK_BYTES = 2**29
"""Bytes of a side's fields that are laid out together, or one pair's: Arrow's offsets have 32 bits."""
_MOST = 2**62


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
        code, time = code[known], None if time is None else time[known]
        self._low, self._span, self._times = 0, 1, None
        self._top = int(code.max(initial=-1))
        if time is not None and len(time):
            self._low = int(time.min())
            self._span = int(time.max()) - self._low + 1
            if self._span * (self._top + 2) > _MOST:  # times far apart: their ranks are not
                self._times = np.unique(time)
                self._span = len(self._times)
        place = code * (self._span + 1) + (0 if time is None else self._rank(time, "left"))
        order = np.argsort(place, kind="stable")
        self._rows, self._place = known[order], place[order]

    def _rank(self, time: IntArray, side: Literal["left", "right"]) -> IntArray:
        """Give how many of the places of one code are before a time (`left`), or not after it (`right`)."""
        if self._times is not None:
            return np.searchsorted(self._times, time, side)
        last = self._low + self._span
        return np.clip(time, self._low - 1, last) - self._low + (1 if side == "right" else 0)

    def meet(
        self, code: IntArray, low: IntArray | None = None, high: IntArray | None = None
    ) -> Iterator[tuple[IntArray, IntArray]]:
        """Give (asking row, candidate), by asking row, in pieces.

        Args:
            code: Numbers as of the candidates; -1 meets nothing.
            low: Smallest time of each row, inclusive; None without a range.
            high: Largest time, inclusive.
        """
        asks = np.flatnonzero((code >= 0) & (code <= self._top))  # a place beyond would not fit into its 64 bits
        base = code[asks] * (self._span + 1)
        first, last = base, base + self._span
        if low is not None and high is not None:
            first = base + np.clip(self._rank(low[asks], "left"), 0, self._span)
            last = base + np.clip(self._rank(high[asks], "right"), 0, self._span)
        start = np.searchsorted(self._place, first, "left")
        count = np.searchsorted(self._place, last, "left") - start
        met = np.flatnonzero(count > 0)
        asks, start, count = asks[met], start[met], count[met]
        for part in parts(count, self._chunk):
            at, owner = spread(start[part], count[part])
            yield asks[part][owner], self._rows[at]
