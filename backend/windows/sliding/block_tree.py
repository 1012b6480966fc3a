"""Merged accumulators of ranges of rows, without merging each row anew for each range: a segment tree, level by level.

Sliding windows of one key overlap almost wholly: a window that sees 1,000 accumulators shares 999 with the next. Block
i of level j holds the merged rows `[i << j, (i + 1) << j)`, so a range is at most two blocks per level, and all levels
together hold fewer than twice the rows. Any mergeable aggregate will do; nothing has to be taken out again.

Rows that a window must not see (too late for it) make their blocks unusable for it: such a block is replaced by its
halves, down to the rows that are in question.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from backend.aggregates import IncrementalPlan
from backend.windows.columns.arrays import IntArray, spread
from backend.windows.columns.pane_rows import MAX_MEMBERS


class BlockTree:
    """A tree over accumulators.

    Args:
        plan: Merges them.
        accumulators: The rows.
        clock: Per row the clock before it; a window sees clocks up to its own.
        seen_from: Per row the first window that may see it.
        longest: Rows of the longest range that will be asked for.
    """

    def __init__(
        self, plan: IncrementalPlan, accumulators: pa.Table, clock: IntArray, seen_from: IntArray, longest: int
    ) -> None:
        self._plan = plan
        tables, clocks, froms = [accumulators], [clock], [seen_from]
        while len(clocks[-1]) > 1 and 1 << len(clocks) <= longest:
            pairs = np.arange(len(clocks[-1])) >> 1
            edges = np.arange(0, len(pairs), 2)
            tables.append(plan.merge(tables[-1], pairs, len(edges)))
            clocks.append(np.maximum.reduceat(clocks[-1], edges))
            froms.append(np.maximum.reduceat(froms[-1], edges))
        self._starts = np.concatenate([[0], np.cumsum([len(level) for level in clocks])])
        self._blocks = pa.concat_tables(tables).combine_chunks()
        self._clock, self._from = np.concatenate(clocks), np.concatenate(froms)

    def results(self, first: IntArray, count: IntArray, windows: IntArray, clocks: IntArray) -> pa.Table:
        """Give the result of each window over the rows `[first, first + count)` that it sees.

        Args:
            first: First row of each window.
            count: Rows of each, at least one of which it sees.
            windows: The windows, as in `seen_from`.
            clocks: Per window the last clock that it sees.
        """
        values = [
            self._plan.result(self._plan.merge(self._blocks, owner - low, high - low, at=blocks))
            for blocks, owner, low, high in self._chunks(first, count, windows, clocks)
        ]
        return pa.concat_tables(values)

    def _chunks(
        self, first: IntArray, count: IntArray, windows: IntArray, clocks: IntArray
    ) -> Iterator[tuple[IntArray, IntArray, int, int]]:
        step = max(1, MAX_MEMBERS // (2 * len(self._starts)))
        for low in range(0, len(first), step):
            high = min(low + step, len(first))
            blocks, owner = self._cover(first[low:high], first[low:high] + count[low:high])
            blocks, owner = self._visible(blocks, owner + low, windows, clocks)
            yield blocks, owner, low, high

    def _cover(self, low: IntArray, high: IntArray) -> tuple[IntArray, IntArray]:
        """Cover half-open ranges by blocks, from left to right: at most two of each level, more of the last one."""
        blocks: list[IntArray] = []
        owners: list[IntArray] = []
        behind: list[tuple[IntArray, IntArray]] = []
        who = np.arange(len(low))
        for start in self._starts[:-2].tolist():
            left, right = (low & 1 == 1) & (low < high), (high & 1 == 1) & (low < high)
            blocks.append(start + low[left])
            owners.append(who[left])
            low = low + left
            right &= low < high
            high = high - right
            behind.append((start + high[right], who[right]))
            low, high = low >> 1, high >> 1
        rest, owner = spread(low, high - low)
        blocks.append(int(self._starts[-2]) + rest)
        owners.append(owner)
        for own, whose in behind[::-1]:
            blocks.append(own)
            owners.append(whose)
        return np.concatenate(blocks), np.concatenate(owners)

    def _visible(
        self, blocks: IntArray, owner: IntArray, windows: IntArray, clocks: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Replace blocks that a window sees only in part by their halves; from left to right, too."""
        whole: list[IntArray] = []
        owners: list[IntArray] = []
        while len(blocks):
            seen = (self._clock[blocks] <= clocks[owner]) & (self._from[blocks] <= windows[owner])
            whole.append(blocks[seen])
            owners.append(owner[seen])
            level = np.searchsorted(self._starts, blocks, "right") - 1
            split = ~seen & (level > 0)
            below = self._starts[level[split] - 1]
            half = (blocks[split] - self._starts[level[split]]) * 2
            owner = np.concatenate([owner[split], owner[split]])
            last = self._starts[level[split]] - below
            halves = np.concatenate([half, half + 1])
            exists = halves < np.concatenate([last, last])
            blocks = (np.concatenate([below, below]) + halves)[exists]
            owner = owner[exists]
        found, owned = np.concatenate(whole), np.concatenate(owners)
        if len(whole) == 1:
            return found, owned
        level = np.searchsorted(self._starts, found, "right") - 1
        order = np.lexsort(((found - self._starts[level]) << level, owned))
        return found[order], owned[order]
