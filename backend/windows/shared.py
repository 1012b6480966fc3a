"""What tumbling, hopping and sliding windows over event time do alike: what is sent, what is written, what expires.

Expiry is always a bound (backend.store.protocol): the regions are keyed start first, so raising it hides everything
that is out of retention at once, and nothing is deleted row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import numpy as np
import pyarrow as pa

from backend.batch import NO_TIME, OFFSET, PARTITION, STREAM, TIME, Proof
from backend.messages import time_first
from backend.messages.rows import digest
from backend.messages.time_first import MessagesByTime
from backend.store.protocol import Region
from backend.store.rows import StoreRows
from backend.store.workspace import Workspace
from backend.windows import combined_rows, panes
from backend.windows.accumulators import FIRST_CLOCK, AccumulatorStore, Stored, with_clock
from backend.windows.aligned.evaluate import Results
from backend.windows.arrivals import Arrived, started
from backend.windows.columns.arrays import IntArray, Mask, compress, dense, firsts, least
from backend.windows.columns.grouping import GroupKeys, KeySpace, start_bytes
from backend.windows.columns.pane_rows import Pairs
from backend.windows.count_retention import NONE_GONE, Newest
from backend.windows.definitions import Assigner
from backend.windows.micro_batch import DRAIN, EARLY, FULL, LATE, Emission, Execution, numbers
from backend.windows.panes import Panes
from backend.windows.retention import Gone
from backend.windows.revisions import Revisions
from backend.windows.spec import WindowSpec
from backend.windows.trigger import Progress, StoredRevisions, Waiting

Updates = tuple[IntArray, IntArray]
"""Windows and numbers of group keys."""
Counted = tuple[IntArray, IntArray, IntArray]
"""The same, and how many messages; all 0 where the early policy does not ask."""


class Shared:
    """What kinds of windows that all group keys share do alike.

    Args:
        spec: The windows.
        grid: Numbers them: the bounds that count for closing, retention, and the keys of revisions.
        skip_bytes: Width of a skip in the keys of accumulators.
    """

    def __init__(self, spec: WindowSpec, grid: Assigner, *, skip_bytes: int = 2) -> None:
        self.spec, self.grid = spec, grid
        self.incremental, self.full = spec.plans()
        self.accumulators = AccumulatorStore(grid, self.incremental, skip_bytes=skip_bytes)
        self.group_keys = GroupKeys(spec.key_fields)
        self.message_store = (
            MessagesByTime([spec.schema.field(name) for name in spec.input_fields()]) if spec.full else None
        )
        self.result_schema = spec.result_schema()

    newest: Newest

    def gone_by_time(self, clock: int) -> int:
        """Return the last window that is out of retention by time at a watermark, at least `NONE_GONE`."""
        return NONE_GONE if clock == NO_TIME else self.grid.last_ended_at(started(clock) - self.spec.retention_ms)

    def step(self, execution: Execution, gone: Gone) -> None:
        """Take one micro-batch that is not quiet."""
        raise NotImplementedError

    def fold(self, execution: Execution) -> None:
        """Take one micro-batch."""
        gone = Gone.of(self, execution)
        if not execution.quiet or gone.moves:
            self.step(execution, gone)
        if self.message_store is not None:
            execution.replay_from = panes.start_offsets(execution.work)
            execution.rejected = time_first.refused(execution.work)

    def replay_rows(self, messages: pa.Table) -> StoreRows:
        """Give the message-store rows of accepted messages."""
        return self.message_store.ordered_rows(messages)[0] if self.message_store is not None else StoreRows.of([], [])

    def proofs(self, work: Workspace) -> Iterable[Proof]:
        """Give what the message store must hold, pane by pane."""
        if self.message_store is not None:
            yield from panes.proofs(work)


class Step:
    """One micro-batch on its way; the attributes are filled in the order of the steps.

    Args:
        kind: The windows.
        execution: The messages.
        gone: What is out of retention.
    """

    space: KeySpace
    arrived: Arrived
    content: pa.Table
    """Accumulator columns and `FIRST_CLOCK`: stored rows first, then arrived ones."""
    place: tuple[IntArray, IntArray, IntArray]
    """Pane, skip, key number of each row of `content`."""
    old: int
    """Number of stored rows."""
    waiting: Waiting

    def __init__(self, kind: Shared, execution: Execution, gone: Gone) -> None:
        self.kind, self.execution, self.grid, self.gone = kind, execution, kind.grid, gone
        self.progress = Progress(
            self.grid.last_ended_at(started(execution.clock)),
            self.grid.last_ended_at(started(execution.clock_after)),
            gone.after,
            execution.batch.time_ms,
            execution.batch.drain,
            execution.full_off,
        )
        self.stored_revisions = StoredRevisions(execution, self.progress, gone.before, self.grid.start)

    def choose(self, rows: Revisions, keys: IntArray, updates: tuple[Updates, Counted, Updates]) -> None:
        """Decide which updates wait, and which of them go out now.

        Args:
            rows: Stored revisions that are due.
            keys: Key number of each.
            updates: Late, early, and of ending windows, as in `Waiting`.
        """
        late, early, _ = updates
        updated = np.concatenate([late[0], early[0]]), np.concatenate([late[1], early[1]])
        others = self.stored_revisions.others(*updated, self.space.keys)
        rows = Revisions.concat([rows, others])
        keys = np.concatenate([keys, self.space.find(others.keys)])
        windows, policies = self.grid.last_begun(rows.starts), self.kind.spec.policies
        self.waiting = Waiting(rows, windows, keys, *updates, len(self.space), self.progress, policies)

    def lay_out(self, stored: Stored, stored_key: IntArray, arrived_key: IntArray) -> None:
        """Put stored and arrived accumulators behind one another; the keys are their numbers in `space`."""
        self.old = len(stored)
        self.content = pa.concat_tables([stored.table, self.arrived.table])
        self.place = (
            np.concatenate([stored.pane, self.arrived.pane]),
            np.concatenate([stored.skip, self.arrived.skip]),
            np.concatenate([stored_key, arrived_key]),
        )

    def shown_bounds(self, windows: IntArray) -> tuple[IntArray, IntArray]:
        """Give start and end of windows as results show them."""
        raise NotImplementedError

    def completed_results(self) -> Results | None:
        """Give windows that close now, as of their ends; without full results those of which something waited."""
        raise NotImplementedError

    def results_of(self, pairs: Pairs) -> Results:
        """Give windows as of now."""
        raise NotImplementedError

    def open_results(self) -> Results | None:
        """Give all open windows where they are sent."""
        raise NotImplementedError

    def send(self) -> None:
        """Send what is full, then what waited, then what is open at the end of the input."""
        policies = self.kind.spec.policies
        completed = self.completed_results()
        if completed is not None:
            if policies.full:
                self._emit(FULL, self.waiting.full(completed.window, completed.key), completed)
            else:
                self._send_open(EARLY, completed, self.waiting.full)
        going = self.waiting.going(len(self.space))
        if len(going):
            self._send_updates(self.results_of(going))
        still_open = self.open_results()
        if still_open is not None:
            self._send_open(DRAIN if self.progress.drain else EARLY, still_open, self.waiting.open)
        self.execution.ledger.sent_open |= still_open is not None or policies.early

    def _send_open(self, phase: int, results: Results, revise: Callable[[IntArray, IntArray], IntArray]) -> None:
        """Send windows that are open or end without a full result: their revisions are not the usual ones."""
        revision = revise(results.window, results.key)
        self._emit(phase, revision, results)
        self.waiting.remember(self.space, self.grid.starts(results.window), results.window, results.key, revision + 1)

    def _send_updates(self, results: Results) -> None:
        past = results.window <= self.progress.closed_after
        ends = self.grid.ends(results.window)
        usual = np.where(past & (results.clock < ends) & self.execution.ledger.full_sent(ends), 1, 0)
        for phase, rows in ((LATE, past), (EARLY, ~past)):
            some = results.where(rows)
            self._emit(phase, self.waiting.take(some.window, some.key, usual[rows]), some)

    def _emit(self, phase: int, revision: IntArray, results: Results) -> None:
        if not len(results):
            return
        starts, ends = self.shown_bounds(results.window)
        keys = self.space.keys.take(pa.array(results.key))
        emission = Emission(phase, revision, starts, ends, keys, results.values)
        self.execution.results.append(emission.table(self.kind.result_schema, self.kind.group_keys))

    def store(
        self, known: Panes, pane: IntArray, skip: IntArray, stays: Mask, alive: Mask, bound: int, *, groups: bool
    ) -> int:
        """Write accumulators, messages, metadata of panes, and what waits; gives how many of the panes are new.

        Args:
            known: The messages' panes as committed, read already.
            pane: Pane of each message; in order of time where messages are kept.
            skip: Skip of each message.
            stays: Which messages are in retention after the micro-batch.
            alive: Which arrived accumulators are.
            bound: The messages' bound after the micro-batch: what was refused at or above it has to be remembered.
            groups: Count accumulators per pane: those of `place` are the panes here.
        """
        digests = self._store_messages(pane, skip, stays, bound) if self.kind.message_store is not None else None
        fresh = self._store_accumulators(alive)
        opened = self._store_panes(known, pane, stays, digests, fresh if groups else (fresh[0][:0], fresh[1][:0]))
        self.waiting.store(self.execution.work, self.space, self.grid.starts)
        self.execution.wait_until(self.waiting.due_ms(), afresh=self.stored_revisions.all)
        return opened

    def _store_accumulators(self, alive: Mask) -> tuple[IntArray, IntArray]:
        """Write the merged accumulators of touched groups; gives pane and skip of the groups that are new."""
        none, old, size = np.empty(0, np.int64), self.old, max(len(self.space), 1)
        if not alive.any():
            return none, none
        rows = np.concatenate([np.arange(old), np.flatnonzero(alive) + old])
        pane, panes_ = compress(self.place[0][rows])
        skip, skips = compress(self.place[1][rows])
        group, codes = dense((pane * len(skips) + skip) * size + self.place[2][rows], len(panes_) * len(skips) * size)
        touched, was = np.zeros(len(codes), np.bool_), np.zeros(len(codes), np.bool_)
        touched[group[old:]], was[group[:old]] = True, True
        needed = touched[group]
        group, codes, was = (np.cumsum(touched) - 1)[group[needed]], codes[touched], was[touched]
        rows = rows[needed]
        clock = least(numbers(self.content, FIRST_CLOCK)[rows], group, len(codes))
        table = with_clock(self.kind.incremental.merge(self.content, group, len(codes), at=rows), clock)
        at, skip = panes_[codes // (len(skips) * size)], skips[codes // size % len(skips)]
        keys = self.space.keys.take(pa.array(codes % size))
        self.kind.accumulators.put(self.execution.work, at, skip, keys, table)
        return at[~was], skip[~was]

    def _store_messages(self, pane: IntArray, skip: IntArray, stays: Mask, bound: int) -> list[int]:
        """Write the micro-batch's messages that stay; gives the digest per pane, in order of pane."""
        assert self.kind.message_store is not None
        execution = self.execution
        messages = execution.messages.filter(pa.array(stays))
        rows, of = self.kind.message_store.ordered_rows(messages)
        keys, values = rows.lists()
        execution.work.put_many(keys, values)
        skip = skip[stays]
        time_first.put_marks(execution.work, time_first.SKIPPED, messages.filter(pa.array(skip > 0)), skip[skip > 0])
        for refused in execution.refused:
            time_first.put_marks(
                execution.work, time_first.REFUSED, refused.filter(pa.array(numbers(refused, TIME) >= bound))
            )
        pane = pane[stays][of]  # ascending, because the keys begin with the time
        edges = np.flatnonzero(np.diff(pane, prepend=pane[:1] - 1, append=pane[-1:] + 1)).tolist()
        digests = [digest(keys[low:high], values[low:high]) for low, high in pairwise(edges)]
        execution.ledger.count_stored(len(keys), sum(digests))
        return digests

    def _store_panes(
        self,
        known: Panes,
        pane: IntArray,
        stays: Mask,
        digests: list[int] | None,
        fresh: tuple[IntArray, IntArray],
    ) -> int:
        """Write the metadata of touched panes; gives how many of them are new.

        Args:
            known: Their panes as committed.
            pane: Pane of each message.
            stays: Which are in retention after the micro-batch.
            digests: Digest per touched pane, in order of pane; None where no message is kept.
            fresh: Pane and skip of each new group.
        """
        execution = self.execution
        number, panes_ = compress(pane[stays])
        if not len(panes_):
            return 0
        touched = [known.known.get(at) or known.fresh(at) for at in panes_.tolist()]
        opened = sum(row.count == 0 for row in touched)
        indexed = panes.index_keys(touched) if digests is not None else set[bytes]()
        counts = np.zeros(len(panes_), np.int64)
        np.add.at(counts, number, combined_rows.counts(execution.messages)[stays])
        new = np.bincount(np.searchsorted(panes_, fresh[0]), minlength=len(panes_)).tolist()
        for row, count, groups, added in zip(touched, counts.tolist(), new, digests or [0] * len(touched), strict=True):
            row.count += count
            row.groups += groups
            row.digest = (row.digest + added) % 2**64
        skipping = fresh[1] > 0
        for at, skip in zip(np.searchsorted(panes_, fresh[0][skipping]), fresh[1][skipping].tolist(), strict=True):
            touched[at].skips = sorted({*touched[at].skips, skip})
        for at, found in _source_ranges(number, execution.messages, stays):
            panes.extend(touched[at], found)
        panes.write(execution.work, touched)
        if digests is not None:
            execution.work.replace_keys(indexed, panes.index_keys(touched))
        return opened

    def expire(self, bound: int) -> None:
        """Move the bounds past what is out of retention, of which results were sent; what begins at a time stays."""
        if not self.gone.moves:
            return
        work, ledger = self.execution.work, self.execution.ledger
        ledger.forget_before(int(self.grid.ends(np.array([self.gone.after]))[0]))
        if self.kind.message_store is not None:
            gone = list(panes.all_panes(work, bound))
            ledger.count_stored(-sum(pane.count for pane in gone), -sum(pane.digest for pane in gone))
            time_first.drop_marks(work, bound)
            work.replace_keys(panes.index_keys(gone), set())
        for region in (Region.MESSAGES, Region.WINDOWS, Region.AGGREGATES):
            work.raise_bound(region, start_bytes(region, bound))
        work.raise_bound(Region.REVISIONS, start_bytes(Region.REVISIONS, self.grid.start(self.gone.after + 1)))


def _source_ranges(
    number: IntArray, messages: pa.Table, stays: Mask
) -> Iterable[tuple[int, list[tuple[int, int, int, int]]]]:
    """Give per pane number (stream, partition, first offset, last offset) of messages; they are in offset order."""
    stream, partition, offset = (numbers(messages, name)[stays] for name in (STREAM, PARTITION, OFFSET))
    last = combined_rows.last_offsets(messages)[stays]
    source, _ = compress(stream * 2**32 + partition)
    sources = int(source.max(initial=0)) + 1
    spot, spots = dense(number * sources + source, (int(number.max(initial=0)) + 1) * sources)
    low = firsts(spot, len(spots))
    high = np.zeros(len(spots), np.int64)
    np.maximum.at(high, spot, last)
    found: dict[int, list[tuple[int, int, int, int]]] = {}
    for at, first, end in zip((spots // sources).tolist(), low.tolist(), high.tolist(), strict=True):
        place = (int(stream[first]), int(partition[first]), int(offset[first]), end)
        found.setdefault(at, []).append(place)
    return found.items()
