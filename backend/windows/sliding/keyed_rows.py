"""Rows of sliding windows: accumulators or messages in order of (key, time), and which of them a window sees.

The counterpart of backend.windows.columns.pane_rows for windows that every key has for itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from backend.windows.columns.arrays import IntArray, Order, parts, spread
from backend.windows.columns.pane_rows import MAX_MEMBERS


@dataclass(frozen=True, slots=True)
class KeyedRows:
    """Accumulators or messages, in order of (key, time); all arrays as long as one another.

    Attributes:
        key: Number of the group key, ascending.
        time: Event time, ascending within a key.
        skip: Windows before `time + skip` do not see it.
        clock: Watermark before it.
        row: Row of the table that holds its content.
    """

    key: IntArray
    time: IntArray
    skip: IntArray
    clock: IntArray
    row: IntArray

    @classmethod
    def sorted(cls, key: IntArray, time: IntArray, skip: IntArray, clock: IntArray) -> KeyedRows:
        """Put rows in order; `row` tells where each stood."""
        order = np.lexsort((time, key))
        return cls(key[order], time[order], skip[order], clock[order], order)

    def range(self, keys: IntArray, lows: IntArray, highs: IntArray) -> tuple[IntArray, IntArray]:
        """Give first position and number of the rows of each key in the closed range of times."""
        order = Order(self.key, self.time)
        first = order.first(keys, lows)
        return first, np.maximum(order.after(keys, highs) - first, 0)

    def seen_by(
        self, size: int, windows: IntArray, keys: IntArray, clocks: IntArray
    ) -> Iterator[tuple[IntArray, IntArray]]:
        """Give what each (window, key) sees of rows up to a clock, in chunks: positions, and the window's position."""
        first, count = self.range(keys, windows - size, windows)
        for part in parts(count, MAX_MEMBERS):
            keyed_rows, owner = spread(first[part], count[part])
            owner = owner + part.start
            seen = (self.clock[keyed_rows] <= clocks[owner]) & (
                self.time[keyed_rows] + self.skip[keyed_rows] <= windows[owner]
            )
            yield keyed_rows[seen], owner[seen]
