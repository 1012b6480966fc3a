"""Sliding windows over event time: one per distinct event time t of a group key, `[t - size, t]`, both ends included.

SAMZA-552's windows "that follow the messages", with the bounds of SQL's `RANGE size PRECEDING`. Window `t` of a key

* is created by the first message of the key at exactly t, if it can still be updated then;
* sees the key's messages in `[t - size, t]`;
* is full when stream time passes t, and can be updated until `t + 1 + retention <= stream time`.

State is one accumulator per (t, skip, key), in order of t, never one per window: a message is stored once,
however many windows see it. Here `skip` is a time: the windows before `t + skip` do not see the message, because they
were out of retention when it came. A message whose own window is out of retention still counts in later ones. It goes
to the errors when the last possible window, `t + size`, is out of retention: at once if it was already, otherwise when
it comes to that and no window was there to show the message (backend.windows.sliding.unseen).

Metadata and messages expire in buckets of a sixteenth of the size, so that they need no row per millisecond.
Results of incremental aggregates cost the logarithm of what a window sees
(backend.windows.sliding.block_tree), full-state ones all of it. A micro-batch reads the state of the times
that its windows see: those that messages came to, that close, or whose updates wait.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from backend.batch import BEFORE, MAX_EVENT_TIME, MAX_TIME, MIN_TIME, NO_TIME, TIME
from backend.messages import time_first
from backend.messages.time_first import MessagesByTime
from backend.store.workspace import Workspace
from backend.windows import panes, shared
from backend.windows.accumulators import FIRST_CLOCK, with_clock
from backend.windows.aligned.evaluate import Results
from backend.windows.arrivals import Arrived, started
from backend.windows.columns.arrays import IntArray, Mask, Order, compress, dense, few, firsts, least, runs
from backend.windows.columns.grouping import KeySpace
from backend.windows.columns.pane_rows import Pairs
from backend.windows.count_retention import Newest
from backend.windows.definitions import Grid
from backend.windows.full_state import FullState, with_full
from backend.windows.micro_batch import Execution, numbers
from backend.windows.panes import Panes
from backend.windows.retention import Gone
from backend.windows.revisions import Revisions
from backend.windows.sliding import unseen
from backend.windows.sliding.block_tree import BlockTree
from backend.windows.sliding.keyed_rows import KeyedRows
from backend.windows.sliding.unseen import Unseen
from backend.windows.spec import WindowSpec

BUCKETS = 16
MAX_SCANS = 64
"""Ranges of event time that are read apart; smaller gaps between them are read, too."""
_EVERY_CLOCK = 2**63 - 1


class Sliding(shared.Shared):
    """The kind for sliding event-time windows.

    Args:
        spec: Its window is one of these.
    """

    def __init__(self, spec: WindowSpec) -> None:
        super().__init__(spec, Grid(1, 1, 0), skip_bytes=8)
        self.size = spec.window.size
        bucket = max(1, self.size // BUCKETS)
        self.buckets = Grid(bucket, bucket, 0)
        self.newest = Newest(spec.retention_messages, self._last_closed)

    def _last_closed(self, clocks: IntArray) -> IntArray:
        """Give the last window that is closed, in steps of a bucket: so the staircase stays small."""
        return np.floor_divide(clocks, self.buckets.pane) * self.buckets.pane - 1

    def step(self, execution: Execution, gone: Gone) -> None:
        """Take one micro-batch that is not quiet."""
        _Step(self, execution, gone).run()

    def count_open(self, work: Workspace, clock: int) -> int:
        """Count the windows that are open at a watermark: event times of a group key at or after it."""
        return int((self.accumulators.scan_from(work, started(clock)).skip == 0).sum())


class _Step(shared.Step):
    """One micro-batch on its way."""

    kind: Sliding

    def __init__(self, kind: Sliding, execution: Execution, gone: Gone) -> None:
        super().__init__(kind, execution, gone)
        self.size = kind.size
        self.tree: tuple[int, BlockTree] | None = None
        self.bound_before = self._bucket_start(gone.before + 1 - self.size)
        self.bound_after = self._bucket_start(gone.after + 1 - self.size)

    def _bucket_start(self, time: int) -> int:
        return time // self.kind.buckets.pane * self.kind.buckets.pane

    def run(self) -> None:
        """Take the steps."""
        self._judge()
        self._fold()
        rows = self.stored_revisions.due()
        self._load(rows)
        self._choose(rows)
        self.send()
        self._store()

    # -- messages -------------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        """Refuse what no window can take; place the rest."""
        execution, keep = self.execution, self.kind.spec.retention_ms
        own = np.maximum(np.maximum(numbers(execution.messages, BEFORE), execution.clock), started(NO_TIME))
        times = numbers(execution.messages, TIME)
        gone = own - keep - 1 if self.gone.each is None else np.maximum(own - keep - 1, self.gone.each)
        refused = times + self.size <= gone
        execution.refuse(refused, "out_of_retention", f"all windows of it ended more than {keep} ms before stream time")
        self.times, own = times[~refused], own[~refused]
        self.skip = np.maximum(gone[~refused] + 1 - self.times, 0)
        self.clock = own if execution.exact else np.full(len(own), started(execution.clock), np.int64)
        self.message_key, self.message_keys = self.kind.group_keys.encode(execution.messages)

    def _fold(self) -> None:
        """Fold messages to one accumulator per (time, skip, clock, key)."""
        number, _ = compress(self.times)
        for column in (self.skip, self.clock, self.message_key):
            other, distinct = compress(column)
            number, _ = dense(number * max(len(distinct), 1) + other, max(len(number), 1) * max(len(distinct), 1))
        count = int(number.max(initial=-1)) + 1
        first = firsts(number, count)
        time, skip, clock, key = (c[first] for c in (self.times, self.skip, self.clock, self.message_key))
        table = with_clock(self.kind.incremental.fold(self.execution.messages, number, count), clock)
        messages = np.bincount(number, minlength=count).astype(np.int64)
        self.arrived = Arrived(time, skip, np.zeros(count, np.int64), key, clock, messages, table)

    # -- load -----------------------------------------------------------------------------------------------------

    def _load(self, rows: Revisions) -> None:
        """Read the accumulators that windows here need: what arrived, what waits, and what closes may lie far apart."""
        self.unseen = self._read_unseen()
        low, high = self._ranges(rows.starts[rows.pending])
        stored = self.kind.accumulators.scan_ranges(self.execution.work, low, high)
        self.space = KeySpace([self.message_keys, rows.keys, stored.keys, self.unseen.codes])
        renumbered, self.row_key, stored_key, _ = self.space.numbers
        self.message_key = renumbered[self.message_key]
        self.arrived_key = renumbered[self.arrived.key]
        self.lay_out(stored, stored_key, self.arrived_key)
        time, skip, key = self.place
        clock = numbers(self.content, FIRST_CLOCK)
        self.keyed_rows = KeyedRows.sorted(key, time, skip, clock)
        # a window exists for each (time, key) of a message that it could take
        own = skip == 0
        self.windows = Pairs(time[own], key[own], len(self.space))
        order = np.lexsort((self.windows.window, self.windows.key))
        self.by_key = self.windows.key[order], self.windows.window[order]
        self.known = Order(*self.by_key)
        at = self.windows.find(time[own], key[own])
        self.window_clock = least(clock[own], at, len(self.windows))
        if self.kind.message_store is not None:
            self._read_messages(self.kind.message_store, low, high)

    def _ranges(self, waiting: IntArray) -> tuple[IntArray, IntArray]:
        """Give the closed ranges of times to read: of windows, and what these see.

        Args:
            waiting: Windows whose updates wait.
        """
        progress, one = self.progress, np.ones(1, np.int64)
        seen = [(self.arrived.pane, self.arrived.pane + self.size), (waiting, waiting)]
        seen.append((self.unseen.time, self.unseen.time + self.size))
        if progress.closed_after > progress.closed_before:
            seen.append((one * (progress.closed_before + 1), one * progress.closed_after))
        if progress.shows_open:
            seen.append((one * (progress.closed_after + 1), one * MAX_EVENT_TIME))
        low, high = (np.concatenate(ends) for ends in zip(*seen, strict=True))
        return few(*runs(np.maximum(low - self.size, max(self.bound_before, MIN_TIME)), high), MAX_SCANS)

    def _read_unseen(self) -> Unseen:
        """Read the messages that nothing shows after this micro-batch, and those that its new windows may show."""
        work, progress = self.execution.work, self.progress
        if progress.drain:
            return unseen.read(work, MIN_TIME, MAX_TIME + 1)
        over = max(progress.gone_after - self.size + 1, MIN_TIME)
        found, fresh = unseen.read(work, MIN_TIME, over), self.arrived.pane[self.arrived.skip == 0]
        if not len(fresh):
            return found
        low, high = max(over, int(fresh.min()) - self.size), int(fresh.max()) + 1
        return Unseen.concat([found, unseen.read(work, low, high)])

    def _read_messages(self, store: MessagesByTime, low: IntArray, high: IntArray) -> None:
        stored, skip = store.read(self.execution.work, low, high + 1)
        number, encoded = self.kind.group_keys.encode(stored)
        key = np.concatenate([self.space.find(encoded)[number], self.message_key])
        time = np.concatenate([numbers(stored, TIME), self.times])
        clock = np.concatenate([np.full(len(skip), started(NO_TIME), np.int64), self.clock])
        self.message_rows = KeyedRows.sorted(key, time, np.concatenate([skip, self.skip]), clock)
        self.full = FullState(self.kind.full, pa.concat_tables([stored, store.select(self.execution.messages)]))

    # -- choose ---------------------------------------------------------------------------------------------------

    def _choose(self, rows: Revisions) -> None:
        """Decide which updates wait, and which of them go out now."""
        policies, progress = self.kind.spec.policies, self.progress
        seen_from, last = self.arrived.pane + self.arrived.skip, self.arrived.pane + self.size
        none = np.empty(0, np.int64)
        late = early = ending = (none, none, none)
        if policies.late_ms is not None:
            late = self._existing(seen_from, np.minimum(last, self.arrived.clock - 1))
        if policies.early:
            early = self._existing(np.maximum(seen_from, progress.closed_after + 1), last)
            if not policies.full:
                in_time = np.maximum(seen_from, self.arrived.clock)
                ending = self._existing(in_time, np.minimum(last, progress.closed_after))
        self.choose(rows, self.row_key, (late[:2], early, ending[:2]))

    def _existing(self, lows: IntArray, highs: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Give the windows of arrived accumulators' keys in closed ranges of times, each once: time, key, messages.

        Many late ones reach over the same windows: what is laid out is never more than windows and accumulators.
        """
        key, window = self.by_key
        wanted = highs >= lows
        lows, highs, arrived = lows[wanted], highs[wanted], self.arrived_key[wanted]
        messages = self.arrived.count[wanted]
        first = self.known.first(arrived, lows)
        after = np.maximum(self.known.after(arrived, highs), first)
        steps = np.zeros((2, len(window) + 1), np.int64)
        for row, amount in zip(steps, (np.ones_like(messages), messages), strict=True):
            np.add.at(row, first, amount)
            np.add.at(row, after, -amount)
        updates, reached = np.cumsum(steps[:, :-1], axis=1)
        at = np.flatnonzero(updates)
        return window[at], key[at], reached[at]

    # -- send -----------------------------------------------------------------------------------------------------

    def shown_bounds(self, windows: IntArray) -> tuple[IntArray, IntArray]:
        """Give the first and the last event time that windows see."""
        return windows - self.size, windows

    def completed_results(self) -> Results | None:
        """Give windows that close now, as of their ends; without full results those of which something waited."""
        progress, windows = self.progress, self.windows.window
        completed = (windows > progress.closed_before) & (windows <= progress.closed_after)
        completed &= self.window_clock <= windows
        if not self.kind.spec.policies.full:
            completed &= self.waiting.ending(windows, self.windows.key)
        at = np.flatnonzero(completed)
        return self._results(at, windows[at]) if len(at) else None

    def results_of(self, pairs: Pairs) -> Results:
        """Give windows as of now."""
        return self._results(self.windows.find(pairs.window, pairs.key), _EVERY_CLOCK)

    def open_results(self) -> Results | None:
        """Give all open windows where they are sent."""
        at = np.flatnonzero(self.windows.window > self.progress.closed_after)
        return self._results(at, _EVERY_CLOCK) if self.progress.shows_open and len(at) else None

    def _results(self, at: IntArray, clock: IntArray | int) -> Results:
        """Compute the results of some of `windows`, from rows up to a clock each."""
        windows, keys = self.windows.window[at], self.windows.key[at]
        clocks = np.broadcast_to(clock, len(at))
        first, count = self.keyed_rows.range(keys, windows - self.size, windows)
        table = self._tree(int(count.max())).results(first, count, windows, clocks)
        if self.kind.message_store is not None:
            table = with_full(table, self._full_results(windows, keys, clocks))
        order = np.lexsort((keys, windows))
        return Results(windows[order], keys[order], self.window_clock[at[order]], table.take(pa.array(order)))

    def _tree(self, longest: int) -> BlockTree:
        """Give the tree over all rows; built once unless a longer range is asked for."""
        if self.tree is None or self.tree[0] < longest:
            keyed_rows, plan = self.keyed_rows, self.kind.incremental
            accumulators = (
                self.content.select(plan.accumulator_schema.names).combine_chunks().take(pa.array(keyed_rows.row))
            )
            self.tree = (
                longest,
                BlockTree(plan, accumulators, keyed_rows.clock, keyed_rows.time + keyed_rows.skip, longest),
            )
        return self.tree[1]

    def _full_results(self, windows: IntArray, keys: IntArray, clocks: IntArray) -> pa.Table:
        values = []
        keyed_rows = self.message_rows
        for seen, owner in keyed_rows.seen_by(self.size, windows, keys, clocks):
            low, high = int(owner[0]), int(owner[-1]) + 1
            values.append(self.full.result(keyed_rows.row[seen], owner - low, high - low))
        return pa.concat_tables(values)

    # -- store ----------------------------------------------------------------------------------------------------

    def _store(self) -> None:
        """Write what changed, of times still in retention."""
        execution, buckets = self.execution, self.kind.buckets
        stays, alive = self.times >= self.bound_after, self.arrived.pane >= self.bound_after
        bucket = buckets.pane_of(self.times)
        known = Panes(buckets, execution.work)
        known.load(np.unique(bucket), np.unique(bucket))
        self.store(known, bucket, self.skip, stays, alive, self.bound_after, groups=False)
        execution.metrics["opened"] += self._more_windows(self.gone.after, self.gone.after)
        execution.add_open(self._more_windows(self.progress.closed_before, self.progress.closed_after))
        self._refuse_unseen()
        self.expire(self.bound_after)

    def _more_windows(self, before: int, after: int) -> int:
        """Give how many windows there are after a time, less those that there were before it after another.

        What closes was read, what was not read stays as it was.
        """
        time, skip, _ = (column[: self.old] for column in self.place)
        stored = (skip == 0) & (time > before)
        return int((self.windows.window > after).sum()) - int(stored.sum())

    def _refuse_unseen(self) -> None:
        """Send messages to the errors that no window showed, once none can any more or the input ends."""
        execution, late = self.execution, self.skip > 0
        messages = execution.messages.filter(pa.array(late))
        codes = self.space.keys.take(pa.array(self.message_key[late]))
        detail = f"its own window was out of retention when it came, and no other window showed it ({self.size} ms)"
        fresh = unseen.arrived(execution.batch, messages, self.skip[late], codes, detail)
        fresh = fresh.where(self._unshown(fresh))
        over = self._is_over(fresh)
        fresh.where(~over).put(execution.work)
        unshown, long_over = self._unshown(self.unseen), self._is_over(self.unseen)
        self.unseen.where(long_over | ~unshown).drop(execution.work)
        refused = Unseen.concat([self.unseen.where(long_over & unshown), fresh.where(over)])
        if len(refused):
            execution.errors.append(refused.errors)
        if self.progress.drain:
            self._take_out(refused.where(refused.time + self.size > self.progress.gone_after))

    def _is_over(self, messages: Unseen) -> Mask:
        """Return which messages no later window can show, or will before the input ends."""
        over: Mask = (messages.time + self.size <= self.progress.gone_after) | self.progress.drain
        return over

    def _unshown(self, messages: Unseen) -> Mask:
        """Return which messages no window of their key shows."""
        key = self.space.find(messages.codes)
        first = self.known.first(key, messages.time + messages.skip)
        unshown: Mask = self.known.after(key, messages.time + self.size) <= first
        return unshown

    def _take_out(self, refused: Unseen) -> None:
        """Take messages out of the state that a later window could show: all of a (time, skip, key), or none."""
        kind, execution = self.kind, self.execution
        kind.accumulators.delete(execution.work, refused.time, refused.skip, refused.codes)
        if kind.message_store is not None and len(refused):
            bucket = kind.buckets.pane_of(refused.time)
            known = Panes(kind.buckets, execution.work)
            known.load(bucket, bucket)
            time_first.take_out(execution, refused.keys, [known.known[at] for at in bucket.tolist()])
            panes.write(execution.work, known.known.values())
