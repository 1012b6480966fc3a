"""Results of windows: from the accumulators that they see, and where aggregates need them all, from their messages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from backend.aggregates import IncrementalPlan
from backend.windows.accumulators import FIRST_CLOCK
from backend.windows.columns.arrays import IntArray, dense, least
from backend.windows.columns.pane_rows import Pairs, PaneRows
from backend.windows.columns.rows import Rows
from backend.windows.definitions import Assigner
from backend.windows.full_state import FullState, with_full
from backend.windows.micro_batch import numbers


@dataclass(frozen=True, slots=True)
class Results(Rows):
    """Results of (window, group key) pairs, in order of window, then key; all as long as `values`.

    Attributes:
        window: Window numbers.
        key: Numbers of group keys.
        clock: Watermark before the first message of each pair.
        values: The aggregates.
    """

    window: IntArray
    key: IntArray
    clock: IntArray
    values: pa.Table


class Evaluator:
    """Computes results from accumulators and messages.

    Args:
        grid: The windows.
        space: Number of group keys.
        plan: The incremental aggregates.
        pane_rows: Accumulators by pane.
        content: Accumulator columns and `FIRST_CLOCK`; `PaneRows.row` points here.
    """

    def __init__(
        self, grid: Assigner, space: int, plan: IncrementalPlan, pane_rows: PaneRows, content: pa.Table
    ) -> None:
        self._grid, self._space, self._plan, self._pane_rows = grid, max(space, 1), plan, pane_rows
        self._clock = numbers(content, FIRST_CLOCK)
        self._content = content.select(plan.accumulator_schema.names).combine_chunks()
        self._full: tuple[FullState, PaneRows] | None = None

    def with_messages(self, full: FullState, pane_rows: PaneRows) -> None:
        """Add what full-state aggregates read; `pane_rows` are messages, their `row` points to those of `full`."""
        self._full = full, pane_rows

    def results(self, windows: IntArray, intervals: IntArray, pairs: Pairs | None = None) -> Results:
        """Compute results.

        Args:
            windows: Window numbers, ascending.
            intervals: Per window the last interval it sees.
            pairs: Only these; None is every group key that a window sees.
        """
        parts = [
            self._chunk(windows, seen, owner) for seen, owner in self._seen(windows, intervals, pairs) if len(seen)
        ]
        if not parts:
            empty = np.empty(0, np.int64)
            values = self._plan.result(self._plan.accumulator_schema.empty_table())
            parts = [Results(empty, empty, empty, values)]
        found = Results.concat(parts)
        return found if self._full is None else self._add_full(found, windows, intervals)

    def _seen(self, windows: IntArray, intervals: IntArray, pairs: Pairs | None) -> Iterator[tuple[IntArray, IntArray]]:
        for seen, owner in self._pane_rows.seen_by(self._grid, windows, intervals):
            wanted = pairs.contain(windows[owner], self._pane_rows.key[seen]) if pairs is not None else None
            yield (seen, owner) if wanted is None else (seen[wanted], owner[wanted])

    def _chunk(self, windows: IntArray, seen: IntArray, owner: IntArray) -> Results:
        low = int(owner[0])
        group, codes = dense(
            (owner - low) * self._space + self._pane_rows.key[seen], (int(owner[-1]) - low + 1) * self._space
        )
        rows = self._pane_rows.row[seen]
        accumulators = self._plan.merge(self._content, group, len(codes), at=rows)
        clock = least(self._clock[rows], group, len(codes))
        return Results(windows[codes // self._space + low], codes % self._space, clock, self._plan.result(accumulators))

    def _add_full(self, found: Results, windows: IntArray, intervals: IntArray) -> Results:
        assert self._full is not None
        state, pane_rows = self._full
        pairs = Pairs(found.window, found.key, self._space)
        last = intervals[np.searchsorted(windows, pairs.windows)]
        parts = []
        for seen, owner in pane_rows.seen_by(self._grid, pairs.windows, last):
            place, rows = pairs.places(owner, pane_rows.key[seen]), pane_rows.row[seen]
            if len(place) and int(place.min()) < 0:
                place, rows = place[place >= 0], rows[place >= 0]
            if len(place):
                low, high = int(place.min()), int(place.max()) + 1
                parts.append(state.result(rows, place - low, high - low))
        full = pa.concat_tables(parts) if parts else state.result(windows[:0], windows[:0], 0)
        return replace(found, values=with_full(found.values, full))
