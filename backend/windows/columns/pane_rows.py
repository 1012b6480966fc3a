"""Rows of panes: what happened in them, stored or just arrived, laid out flat; and which of it a window sees.

A row is an accumulator or a message. It lies in a pane and belongs to a group key. Two numbers decide which of
the windows over its pane see it:

* `skip`: the first `skip` windows over the pane were out of retention when the message arrived. For all but very late
  messages of hopping windows it is 0. Stored with the row, because it cannot be judged again afterwards.
* `interval`: only inside a micro-batch of a shard with one source partition: how many window ends the stream time had
  passed before the message. A window that closes in this micro-batch sees the intervals up to its end, so its full
  result does not depend on where micro-batches are cut. What is stored already counts as interval -1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from backend.windows.columns.arrays import IntArray, compress, parts, places, spread
from backend.windows.columns.rows import Rows
from backend.windows.definitions import Assigner

MAX_MEMBERS = 1 << 21
"""Pairs of a window and a row looked at together: bounds memory where many windows overlap."""

ALL_INTERVALS = 2**62


@dataclass(frozen=True, slots=True)
class PaneRows(Rows):
    """Rows in order of pane; all arrays int64 and as long as one another.

    Attributes:
        pane: Pane number, ascending.
        skip: Windows over the pane that do not see it.
        interval: See above; -1 for what is stored.
        key: Number of the group key.
        row: Row of the table that holds its content.
    """

    pane: IntArray
    skip: IntArray
    interval: IntArray
    key: IntArray
    row: IntArray

    @classmethod
    def sorted(cls, pane: IntArray, skip: IntArray, interval: IntArray, key: IntArray) -> PaneRows:
        """Put rows in order of pane; `row` tells where each stood."""
        if len(pane) < 2 or bool((pane[1:] >= pane[:-1]).all()):
            return cls(pane, skip, interval, key, np.arange(len(pane)))
        order = np.argsort(pane, kind="stable")
        return cls(pane[order], skip[order] if skip.any() else skip, interval[order], key[order], order)

    def seen_by(self, grid: Assigner, windows: IntArray, intervals: IntArray) -> Iterator[tuple[IntArray, IntArray]]:
        """Give what windows see, in chunks of whole windows.

        Args:
            grid: The windows.
            windows: Window numbers, ascending.
            intervals: Per window the last interval it sees.

        Yields:
            Rows (as positions here), and for each the position in `windows` of the window that sees it.
        """
        low = np.searchsorted(self.pane, windows * grid.panes_per_step, "left")
        high = np.searchsorted(self.pane, windows * grid.panes_per_step + grid.panes_per_window, "left")
        all_passed = not len(self) or not len(windows) or int(self.interval.max()) <= int(intervals.min())
        skips = bool(self.skip.any())
        for part in parts(high - low, MAX_MEMBERS):
            pane_rows, owner = spread(low[part], (high - low)[part])
            window = owner + part.start
            if not all_passed:
                passed = self.interval[pane_rows] <= intervals[window]
                pane_rows, window = pane_rows[passed], window[passed]
            if skips:
                seen = self.skip[pane_rows] <= windows[window] - grid.first_window(self.pane[pane_rows])
                pane_rows, window = pane_rows[seen], window[seen]
            yield pane_rows, window


class Pairs:
    """A set of (window, group key), each a number; sorted by window, then key.

    Args:
        windows: Window of each pair; any order, repetitions allowed.
        keys: Key of each pair, in `[0, space)`.
        space: Number of group keys.
    """

    def __init__(self, windows: IntArray, keys: IntArray, space: int) -> None:
        self._space = max(space, 1)
        none: IntArray = np.empty(0, np.int64)
        self.windows = self._codes = self.window = self.key = none
        """`windows` are those that occur, ascending; `window` and `key` are of each distinct pair."""
        if not len(windows):
            return
        at, self.windows = compress(windows)
        self._codes = compress(at * self._space + keys)[1]
        self.window, self.key = self.windows[self._codes // self._space], self._codes % self._space

    def __len__(self) -> int:
        return len(self._codes)

    def find(self, windows: IntArray, keys: IntArray) -> IntArray:
        """Give the positions of pairs among the distinct ones, -1 for unknown ones."""
        return self.places(places(self.windows, windows), keys)

    def places(self, at: IntArray, keys: IntArray) -> IntArray:
        """Give the positions of pairs as `find` does, told the place of each window in `windows`, -1 for unknown."""
        found = places(self._codes, at * self._space + keys)
        known = len(at) == 0 or (int(at.min()) >= 0 and int(keys.min()) >= 0)
        return found if known else np.where((at >= 0) & (keys >= 0), found, -1)

    def contain(self, windows: IntArray, keys: IntArray) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Tell for each pair whether it is in the set."""
        found: np.ndarray[tuple[int], np.dtype[np.bool_]] = self.find(windows, keys) >= 0
        return found
