"""Tumbling and hopping windows over event time, columnar: state per pane, results per window.

A micro-batch goes through these steps; each costs what it touches, never a gap in time:

1. place    Messages to panes; what no window can take goes to the errors (backend.windows.arrivals).
2. fold     One accumulator per (pane, skip, interval, group key).
3. choose   Windows that close now; updates of past and of open windows; what the policies let go.
4. load     Stored accumulators: whole panes of windows that close, single rows of what was touched or waits.
5. send     Results: full as of the window's end, late and early as of now.
6. store    Merged accumulators, metadata, revisions, messages; then the bound moves: everything of windows out of
            retention is hidden at once, with what waited of them sent before.

Only step 5 looks at windows; everything stored is per pane (`Grid`), so an overlap of 60 stores what tumbling windows
of the pane's length would.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from backend.aggregates.groups import taken
from backend.batch import NO_TIME, TIME
from backend.messages.time_first import MessagesByTime
from backend.store.workspace import Workspace
from backend.windows import shared
from backend.windows.accumulators import Stored
from backend.windows.aligned.evaluate import Evaluator, Results
from backend.windows.arrivals import fold, place, started
from backend.windows.columns.arrays import IntArray, Mask, places, runs, spread, union
from backend.windows.columns.grouping import KeySpace
from backend.windows.columns.pane_rows import ALL_INTERVALS, Pairs, PaneRows
from backend.windows.count_retention import Newest
from backend.windows.definitions import assigner
from backend.windows.full_state import FullState
from backend.windows.micro_batch import Execution, numbers
from backend.windows.panes import Panes
from backend.windows.retention import Gone
from backend.windows.shared import Counted, Updates
from backend.windows.spec import WindowSpec

SCAN_SHARE = 4
"""A pane is read as a whole when at least one in so many of its accumulators is needed."""


class Aligned(shared.Shared):
    """The kind for tumbling and hopping event-time windows.

    Args:
        spec: Its window is one of these.
    """

    def __init__(self, spec: WindowSpec) -> None:
        super().__init__(spec, assigner(spec.window))
        self.newest = Newest(spec.retention_messages, self.grid.last_ended)

    def next_ends(self, clock: int) -> tuple[int, int]:
        """Return when the next two windows end, with a message or not, at a watermark."""
        first, second = self.grid.ends(self.grid.last_ended_at(clock) + np.arange(1, 3)).tolist()
        return first, second

    def step(self, execution: Execution, gone: Gone) -> None:
        """Take one micro-batch that is not quiet."""
        step = _Step(self, execution, gone)
        step.run()
        if self.grid.panes_per_window == 1 and gone.after <= step.progress.closed_after:
            execution.add_open(step.more_open())
        else:
            execution.ledger.open = self.count_open(execution.work, execution.clock_after)

    def count_open(self, work: Workspace, clock: int) -> int:
        """Count the windows with a message that are open at a watermark.

        All group keys share them. Reads the panes from the first open window on, few of all; of windows of several
        panes in every micro-batch: to tell which of them a message is the first of, a running count would need them.
        """
        panes, first = Panes(self.grid, work), self.grid.last_ended_at(started(clock)) + 1
        start = None if clock == NO_TIME else first * self.grid.panes_per_step
        if self.grid.panes_per_window == 1:
            return panes.count_from(start)
        panes.load_range(start, None)
        found = panes.numbers()
        begin = self.grid.first_window(found)
        for at, pane in enumerate(found.tolist()):
            skips = panes.known[pane].skips
            # with several source partitions an open window may be out of retention for a message of one that is ahead
            if skips and begin[at] + skips[0] > first:
                begin[at] += self.accumulators.least_skip(work, pane)
        low, high = runs(np.maximum(begin, first), self.grid.last_window(found))
        return int((high - low + 1).sum())


class _Step(shared.Step):
    """One micro-batch on its way."""

    kind: Aligned

    def __init__(self, kind: Aligned, execution: Execution, gone: Gone) -> None:
        super().__init__(kind, execution, gone)
        self.panes = Panes(kind.grid, execution.work)

    def run(self) -> None:
        """Take the steps."""
        kind, execution, progress = self.kind, self.execution, self.progress
        self.placed = place(execution, self.grid, kind.spec.retention_ms, self.gone.each, kind.group_keys)
        self.arrived = fold(
            self.placed,
            execution.messages,
            kind.incremental,
            counted=kind.spec.policies.early_messages is not None,
        )
        self.completed = self._windows(progress.closed_before + 1, progress.closed_after)
        self.open = self._windows(progress.closed_after + 1, None) if progress.shows_open else np.empty(0, np.int64)
        self._choose()
        self._load()
        self.send()
        self._store()

    def more_open(self) -> int:
        """Return how many more windows are open than before, of windows that are one pane each.

        What came or closes was read. Where less is out of retention than is closed, no open window went.
        """
        progress, known = self.progress, self.panes.known
        came = np.unique(self.arrived.pane[self.arrived.pane > progress.closed_after]).tolist()
        closes = sum(progress.closed_before < number <= progress.closed_after for number in known)
        return sum(number not in known for number in came) - closes

    # -- choose ---------------------------------------------------------------------------------------------------

    def _windows(self, first: int, last: int | None) -> IntArray:
        """Give the windows of a closed range of numbers that have a message, stored or just arrived."""
        if last is not None and last < first:
            return np.empty(0, np.int64)
        per_window, per_step = self.grid.panes_per_window, self.grid.panes_per_step
        clock = self.execution.clock_after if last is None else self.execution.clock
        self.panes.load_range(
            None if clock == NO_TIME else first * per_step, None if last is None else last * per_step + per_window - 1
        )
        found = np.unique(np.concatenate([self.panes.numbers(), self.arrived.pane]))
        ends = self.grid.last_window(found)
        return union(np.maximum(self.grid.first_window(found), first), ends if last is None else np.minimum(ends, last))

    def _choose(self) -> None:
        """Decide which updates wait, and which of them go out now."""
        due = self.stored_revisions.due()
        self.space = KeySpace([self.placed.keys, due.keys])
        self.key_of, row_keys = self.space.numbers
        self.choose(due, row_keys, self._updates())

    def _updates(self) -> tuple[Updates, Counted, Updates]:
        """Give (window, key) of updates to past, open and ending windows, as far as the policies want them."""
        arrived, policies, closed = self.arrived, self.kind.spec.policies, self.progress.closed_after
        if policies.late_ms is None and not policies.early:
            none = np.empty(0, np.int64)
            return (none, none), (none, none, none), (none, none)
        arrived_key = self.key_of[arrived.key]
        first, last = self.grid.first_window(arrived.pane) + arrived.skip, self.grid.last_window(arrived.pane)
        nothing = np.zeros(len(arrived), np.int64)
        ended = self.grid.last_ended(np.maximum(arrived.clock, started(NO_TIME)))
        windows, rows = spread(first, np.minimum(last, ended) - first + 1 if policies.late_ms is not None else nothing)
        late = (windows, arrived_key[rows])
        opened = np.maximum(first, closed + 1)
        windows, rows = spread(opened, last - opened + 1 if policies.early else nothing)
        count = arrived.count[rows] if policies.early_messages is not None else np.zeros(len(rows), np.int64)
        early = (windows, arrived_key[rows], count)
        first, shown = np.maximum(first, ended + 1), policies.full or not policies.early
        windows, rows = spread(first, nothing if shown else np.minimum(last, closed) - first + 1)
        return late, early, (windows, arrived_key[rows])

    # -- load -----------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        """Read the accumulators that are needed; number all group keys in the order of their encoding."""
        going = self.waiting.going(len(self.space))
        first = going.windows * self.grid.panes_per_step
        own = np.unique(self.arrived.pane)
        self.panes.load(np.concatenate([own, first]), np.concatenate([own, first + self.grid.panes_per_window - 1]))
        stored = self._read_accumulators(going)
        self.space, renumbered, stored_key = self.space.extended(stored.keys)
        if renumbered is not None:
            self.key_of = renumbered[self.key_of]
            self.waiting.renumber(renumbered, len(self.space))
        self.lay_out(stored, stored_key, self.key_of[self.arrived.key])
        if len(self.completed) or len(self.open) or len(going):
            self._prepare(going)

    def _prepare(self, going: Pairs) -> None:
        """Lay out what windows that are sent may see."""
        pane, skip, key = self.place
        interval = np.concatenate([np.full(self.old, -1, np.int64), self.arrived.interval])
        pane_rows = PaneRows.sorted(pane, skip, interval, key)
        self.evaluator = Evaluator(self.grid, len(self.space), self.kind.incremental, pane_rows, self.content)
        if self.kind.message_store is not None:
            self._read_messages(self.kind.message_store, going.windows)

    def _read_accumulators(self, going: Pairs) -> Stored:
        known = self.panes.numbers()
        per_step, per_window = self.grid.panes_per_step, self.grid.panes_per_window
        whole = np.zeros(len(known), np.bool_)
        for windows in filter(len, (self.completed, self.open)):
            low, high = runs(windows * per_step, windows * per_step + per_window - 1)
            # never each pane of them: there may be millions with nothing in
            at = np.searchsorted(low, known, "right") - 1
            whole |= (at >= 0) & (known <= high[at])
        at, skip, key = self._single_rows(going, known, whole)
        parts = (
            [self.kind.accumulators.scan_ranges(self.execution.work, known[whole], known[whole])]
            if whole.any() or not len(at)
            else []
        )
        if len(at):
            rows = np.unique(np.stack([at, skip, key]), axis=1)
            keys = self.space.keys.take(pa.array(rows[2]))
            parts.append(self.kind.accumulators.get(self.execution.work, known[rows[0]], rows[1], keys))
        return Stored.concat(parts)

    def _single_rows(self, going: Pairs, known: IntArray, whole: Mask) -> tuple[IntArray, IntArray, IntArray]:
        """Give (position of the pane in `known`, skip, key) of the rows that touched and going groups need.

        Not of panes that are read as a whole; those of which many rows are needed are added to them.
        """
        own = places(known, self.arrived.pane)
        rows = np.flatnonzero(own >= 0)
        own = own[rows]
        # of each group's windows only the panes that there are, each once
        first, count = going.window * self.grid.panes_per_step, max(len(known), 1)
        low, high = (np.searchsorted(known, edge) for edge in (first, first + self.grid.panes_per_window))
        code = union(going.key * count + low, going.key * count + high - 1) if len(going) else first
        at, key = code % count, code // count
        panes = [self.panes.known[number] for number in known.tolist()]
        skips = np.array([skip for pane in panes for skip in (0, *pane.skips)], np.int64)
        each = np.array([1 + len(pane.skips) for pane in panes], np.int64)
        groups = np.array([max(pane.groups, 1) for pane in panes], np.int64)
        needed = np.bincount(own, minlength=len(known)) + np.bincount(at, minlength=len(known)) * each
        whole |= needed * SCAN_SHARE >= groups
        rows, own = rows[~whole[own]], own[~whole[own]]
        at, key = at[~whole[at]], key[~whole[at]]
        # each group's rows of a pane: one for each skip
        place, row = spread((np.cumsum(each) - each)[at], each[at])
        return (
            np.concatenate([own, at[row]]),
            np.concatenate([self.arrived.skip[rows], skips[place]]),
            np.concatenate([self.key_of[self.arrived.key[rows]], key[row]]),
        )

    def _read_messages(self, store: MessagesByTime, going: IntArray) -> None:
        """Put the messages of all windows that are sent beside those that just arrived."""
        windows = np.unique(np.concatenate([self.completed, self.open, going]))
        stored, skip = store.read(self.execution.work, self.grid.starts(windows), self.grid.ends(windows))
        numbers_, encoded = self.kind.group_keys.encode(stored)
        key = self.space.find(encoded)[numbers_]
        wanted = np.flatnonzero(key >= 0)
        skip, key, stored = skip[wanted], key[wanted], taken(stored, wanted)
        pane_rows = PaneRows.sorted(
            np.concatenate([self.grid.pane_of(numbers(stored, TIME)), self.placed.pane]),
            np.concatenate([skip, self.placed.skip]),
            np.concatenate([np.full(len(key), -1, np.int64), self.placed.interval]),
            np.concatenate([key, self.key_of[self.placed.key]]),
        )
        messages = pa.concat_tables([stored, store.select(self.execution.messages)])
        self.evaluator.with_messages(FullState(self.kind.full, messages), pane_rows)

    # -- send -----------------------------------------------------------------------------------------------------

    def shown_bounds(self, windows: IntArray) -> tuple[IntArray, IntArray]:
        """Give start and end of windows."""
        return self.grid.starts(windows), self.grid.ends(windows)

    def completed_results(self) -> Results | None:
        """Give windows that close now, as of their ends; without full results those of which something waited."""
        if not len(self.completed):
            return None
        full = self.evaluator.results(
            self.completed, np.searchsorted(self.placed.ends, self.grid.ends(self.completed), "left")
        )
        return full if self.kind.spec.policies.full else full.where(self.waiting.ending(full.window, full.key))

    def results_of(self, pairs: Pairs) -> Results:
        """Give windows as of now."""
        return self.evaluator.results(pairs.windows, _all(pairs.windows), pairs)

    def open_results(self) -> Results | None:
        """Give all open windows where they are sent."""
        return self.evaluator.results(self.open, _all(self.open)) if len(self.open) else None

    # -- store ----------------------------------------------------------------------------------------------------

    def _store(self) -> None:
        """Write what changed, of windows still in retention."""
        gone, placed = self.progress.gone_after, self.placed
        bound = self.grid.start(gone + 1)
        stays, alive = (self.grid.last_window(pane) > gone for pane in (placed.pane, self.arrived.pane))
        self.execution.metrics["opened"] += self.store(
            self.panes, placed.pane, placed.skip, stays, alive, bound, groups=True
        )
        self.expire(bound)


def _all(windows: IntArray) -> IntArray:
    return np.full(len(windows), ALL_INTERVALS, np.int64)
