"""One micro-batch on its way through windows by number of messages: an array operation at each step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from backend.batch import EDGES, FIRST, NO_TIME, TIME
from backend.store.protocol import Region, region_range
from backend.store.reads import get_all
from backend.windows import revisions
from backend.windows.arrivals import started
from backend.windows.by_number.contents import TupleContents
from backend.windows.by_number.falling import STREAM_BITS, FallingOut, stored_runs
from backend.windows.by_number.rows import COUNTER, EDGE_FIELDS, FORMAT, all_counters
from backend.windows.by_number.runs import Runs
from backend.windows.by_number.sent import SentSessions
from backend.windows.columns.arrays import IntArray, compress, dense, firsts, spread
from backend.windows.columns.blocks import combine
from backend.windows.columns.keyed import numbered
from backend.windows.columns.rows import Rows
from backend.windows.full_state import with_full
from backend.windows.merging.rows import EARLY_WAITS, codes_of, first_waiting, firsts_of, scan_waiting, timed_keys
from backend.windows.micro_batch import DRAIN, EARLY, FULL, RETRACTED, Emission, Execution, numbers
from backend.windows.revisions import Revisions
from backend.windows.trigger import Progress, Waiting

if TYPE_CHECKING:
    from backend.windows.by_number.kind import Tuples

_NEVER = 2**62


@dataclass(frozen=True, slots=True)
class Windows(Rows):
    """Windows, and the run of each."""

    window: IntArray
    key: IntArray


class TupleStep:
    """One micro-batch.

    Windows wait and are sent as those by time (backend.windows.trigger): numbered from the first of their run that
    stays open they have one watermark.

    Attributes:
        runs: The runs and their messages; arrays named after runs are as long.
        first: Number of the first message that was still needed before.
        filled: First window that was not full before.
        opened: First window that is not full after.
        begin: First window that stays open: of a run that falls out none does.
        full: Windows that are full and sent, in the order of their last messages.
        leaving: Open windows that are sent because their runs fall out.
        going: Windows that stay open and are sent.
    """

    def __init__(self, kind: Tuples, execution: Execution) -> None:
        self.kind, self.execution, self.work = kind, execution, execution.work
        self.now = execution.batch.time_ms
        policies = kind.spec.policies
        self.early = policies if policies.early and not kind.sliding else None
        """The early policy; a sliding window is full when it begins."""
        self.early_ms = None if self.early is None else self.early.early_ms
        self.at_end = FULL if policies.full else EARLY
        """Reason of a result that is sent with a window's last message."""
        self.drain = execution.batch.drain and not kind.sliding
        self.shows_open = self.drain or (execution.full_off and not kind.sliding)
        """Every open window is sent."""
        stored = partial(stored_runs, timed=kind.spec.retention_ms > 0)
        retention_ms = kind.spec.retention_ms
        self.falling = FallingOut(self.work, kind.most, retention_ms, stored, per_stream=kind.session)

    def run(self) -> None:
        """Take the steps."""
        self._number()
        if len(self.runs):
            self._choose()
            self._load()
            self._send()
            self._store()
        oldest = first_waiting(self.work, EARLY_WAITS) if self.early_ms is not None else None
        self.execution.ledger.due_ms = None if oldest is None or self.early_ms is None else oldest + self.early_ms

    # -- numbers --------------------------------------------------------------------------------------------------

    def _number(self) -> None:
        """Tell runs apart, and number the messages within theirs."""
        self.rows, waiting = self._waiting()
        more, keeps = [self.rows.keys, waiting], self.kind.message_store is not None
        self.runs = Runs(self.execution, self.kind.keys, self.falling, more, keeps=keeps)
        self.row_key = self.runs.find(self.rows.keys)

    def _waiting(self) -> tuple[Revisions, pa.Array]:
        """Read the revisions of what waits and is due; all, and all group keys, when all that is open is."""
        none = pa.array([], pa.binary())
        if self.shows_open:
            rows = revisions.scan(self.work, *region_range(Region.REVISIONS))
            return rows, pa.array([key[2:] for key in all_counters(self.work)[0]], pa.binary())
        if self.execution.policies_changed:
            due = scan_waiting(self.work, EARLY_WAITS, None)
        elif self.early_ms is not None:
            due = scan_waiting(self.work, EARLY_WAITS, self.now - self.early_ms)
        else:
            due = []
        return revisions.get(self.work, firsts_of(due), codes_of(due)), none

    # -- choose ---------------------------------------------------------------------------------------------------

    def _choose(self) -> None:
        """Find the windows that fill, those that are open, and which of these are sent."""
        kind, runs = self.kind, self.runs
        self.filled = np.maximum((runs.next0 - kind.size) // kind.step + 1, kind.lowest)
        self.opened = np.maximum((runs.next1 - kind.size) // kind.step + 1, kind.lowest)
        self.first = np.maximum(self.filled * kind.step, 0)
        window, key = spread(self.filled, self.opened - self.filled)
        trigger = runs.order[runs.at[key] + window * kind.step + kind.size - 1 - runs.next0[key]]
        by_trigger = np.lexsort((window, trigger))
        self.full = Windows(window[by_trigger], key[by_trigger])
        open_count = kind.open_of(runs.next1)
        self.execution.metrics["opened"] += int(((runs.next1 - 1) // kind.step - (runs.next0 - 1) // kind.step).sum())
        self.execution.metrics["expired"] += int(open_count[runs.out & ~runs.ended].sum())
        self.execution.add_open(int(open_count[~runs.out].sum()) - int(kind.open_of(runs.next0).sum()))
        updated = (runs.counted > 0) & (self.early is not None) | self.shows_open
        leaving, going = (
            Windows(*spread(self.opened, np.where(of, open_count, 0))) for of in (runs.out, updated & ~runs.out)
        )
        self.begin = self.opened + np.where(runs.out, _NEVER, 0)
        self._find_waiting(leaving, going)
        if not kind.spec.policies.full:
            self.full, leaving = (
                windows.where(self.waiting.ending(self._since(windows), windows.key))
                for windows in (self.full, leaving)
            )
        if not self.shows_open:
            due = self.waiting.going(len(runs))
            going = Windows(due.window + self.begin[due.key], due.key)
        self.leaving, self.going = self._in_order(leaving), self._in_order(going)

    def _find_waiting(self, leaving: Windows, updated: Windows) -> None:
        """Read the revisions that are concerned, and apply the policies."""
        runs = self.runs
        policies, none = self.kind.spec.policies, np.empty(0, np.int64)
        ends = Windows.concat([self.full, leaving])
        if self.execution.ledger.sent_open and not self.shows_open:
            found = Windows.concat([ends, updated])
            found = found.where(runs.stored[found.key])
            more = revisions.get(self.work, found.window, runs.keys.take(pa.array(found.key)))
            self.rows = Revisions.concat([self.rows, more])  # what waits may be there twice
            self.row_key = runs.find(self.rows.keys)
        first = np.maximum(updated.window * self.kind.step, runs.next0[updated.key])
        ending = ends.where((runs.counted[ends.key] > 0) & policies.early)
        self.waiting = Waiting(
            self.rows,
            self._since(Windows(self.rows.starts, self.row_key)),
            self.row_key,
            (none, none),
            (self._since(updated), updated.key, np.maximum(runs.next1[updated.key] - first, 0)),
            (self._since(ending), ending.key),
            len(runs),
            Progress(-2 * _NEVER, -1, -1, self.now, self.drain, self.execution.full_off),
            policies,
        )

    def _since(self, windows: Windows) -> IntArray:
        """Number windows from the first of their run that stays open: what is closed and gone is below 0."""
        since: IntArray = windows.window - self.begin[windows.key]
        return since

    def _in_order(self, windows: Windows) -> Windows:
        """Put windows in the order in which they are sent: sessions in the order of their last messages."""
        last = self.runs.last[windows.key]
        by = (last >> STREAM_BITS, last % 2**STREAM_BITS) if self.kind.session else (windows.key, windows.window)
        order = np.lexsort(by)
        return Windows(windows.window[order], windows.key[order])

    # -- load -----------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        """Make the table of panes, in order of (key, pane): stored ones that are needed, and new messages folded."""
        kind, runs, count = self.kind, self.runs, len(self.runs)
        self.sends = np.zeros(count, np.bool_)
        self.sends[Windows.concat([self.full, self.leaving, self.going]).key] = True
        low = self.first // kind.pane
        stored = np.where(runs.next0 > self.first, (runs.next0 - 1) // kind.pane - low + 1, 0)
        partly = (stored > 0) & (runs.next0 % kind.pane != 0) & (runs.counted > 0)
        begin = np.where(self.sends, low, low + stored - 1)
        pane, key = spread(begin, np.where(self.sends, stored, np.where(partly, 1, 0)))
        old = self._read_panes(pane, key)
        new_pane = runs.number // kind.pane
        self.low, self.span = (
            low,
            int(max((new_pane - low[runs.key]).max(initial=0), (pane - low[key]).max(initial=0))) + 1,
        )
        code = np.concatenate([key * self.span + pane - low[key], runs.key * self.span + new_pane - low[runs.key]])
        group, self.codes = dense(code, count * self.span)
        self.panes = self._merged(old, group[: len(pane)], group[len(pane) :], len(self.codes))

    def _read_panes(self, pane: IntArray, key: IntArray) -> pa.Table:
        wanted = numbered(Region.WINDOWS, self.runs.keys.take(pa.array(key)), pane)
        return self.kind.codec.decode(get_all(self.work, wanted, "a pane of tuple windows is missing"))

    def _merged(self, old: pa.Table, old_group: IntArray, new_group: IntArray, count: int) -> pa.Table:
        plan = self.kind.incremental
        row, fresh = compress(new_group)
        edges = self._edges(old, old_group, row, fresh, count)
        folded = plan.fold(self.execution.messages, row, len(fresh))
        if len(old_group):
            both = pa.concat_tables([old.select(plan.accumulator_schema.names).cast(plan.accumulator_schema), folded])
            folded = plan.merge(both, np.concatenate([old_group, fresh]), count)
        return pa.table([*edges, *folded.columns], schema=self.kind.pane_schema)

    def _edges(self, old: pa.Table, old_group: IntArray, row: IntArray, fresh: IntArray, count: int) -> list[pa.Array]:
        """Give where panes begin and end, as columns of `EDGE_FIELDS`; messages of a pane come in its order."""
        first = firsts(row, len(fresh))
        last = len(row) - 1 - firsts(row[::-1], len(fresh))
        columns = []
        for (name, source), field in zip(EDGES.items(), EDGE_FIELDS, strict=True):
            new, stored = numbers(self.execution.messages, source), numbers(old, field.name)
            column = np.zeros(count, np.int64)
            if name in FIRST:
                column[fresh] = new[first]
                column[old_group] = stored
            else:
                column[old_group] = stored
                column[fresh] = new[last]
            columns.append(pa.array(column, field.type))
        return columns

    # -- send -----------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        kind, runs = self.kind, self.runs
        if kind.message_store is not None:
            self.contents = TupleContents(kind.message_store, kind.full, self.execution, self.runs, whole=kind.session)
            self.contents.read(self.sends | (self.opened > self.filled) | runs.out)
        if kind.session:
            sent, goes = np.zeros(len(runs), np.bool_), runs.out.copy()
            sent[self.row_key[self.rows.next > 0]] = True
            goes[self.going.key] = True
            self.sent = SentSessions(kind, self.work, runs.keys)
            self.sent.take(sent & goes)
        ended = runs.ended[self.leaving.key]
        self._send_windows(self.at_end, self.full)
        self._send_windows(self.at_end, self.leaving.where(ended))
        self._send_windows(EARLY, self.leaving.where(~ended))
        self._send_windows(DRAIN if self.drain else EARLY, self.going)

    def _send_windows(self, phase: int, windows: Windows) -> None:
        if not len(windows):
            return
        since, key = self._since(windows), windows.key
        edges, values = self._evaluate(windows)
        revision = self.waiting.open(since, key)
        if self.kind.session:
            grown, before, sent = self.sent.grown(key, edges)
            withdrawn = {name: edges[name][grown] for name in FIRST} | before
            self._emit(RETRACTED, revision[grown] - 1, key[grown], withdrawn, sent)
            self.waiting.anew(since[grown], key[grown])
            revision[grown] = 0
            self.sent.put(key, edges, values, ~self.runs.out[key])
        self._emit(phase, revision, key, edges, values)

    def _evaluate(self, windows: Windows) -> tuple[dict[str, IntArray], pa.Table]:
        """Give where windows begin and end, as `EDGES`, and their aggregates."""
        kind, window, key = self.kind, windows.window, windows.key
        low = np.maximum(window * kind.step, 0)
        high = np.minimum(window * kind.step + kind.size, self.runs.next1[key])
        row = np.searchsorted(self.codes, key * self.span + low // kind.pane - self.low[key])
        length = (high - 1) // kind.pane - low // kind.pane + 1
        plan = kind.incremental
        values = plan.result(combine(plan, self.panes.select(plan.accumulator_schema.names), row, length))
        if kind.message_store is not None:
            values = with_full(values, self.contents.values(low, high, key))
        ends = row + length - 1
        return {name: numbers(self.panes, f"_{name}")[row if name in FIRST else ends] for name in EDGES}, values

    def _emit(
        self, phase: int, revision: IntArray, key: IntArray, edges: dict[str, IntArray], values: pa.Table
    ) -> None:
        if len(key):
            codes = self.runs.keys.take(pa.array(key))
            emission = Emission(phase, revision, None, None, codes, values, edges)
            self.execution.results.append(emission.table(self.kind.result_schema, self.kind.keys))

    # -- store ----------------------------------------------------------------------------------------------------

    def _store(self) -> None:
        kind = self.kind
        keep = np.maximum(self.opened * kind.step, 0)
        keep = np.where(self.runs.out, -(-self.runs.next1 // kind.pane) * kind.pane, keep)
        # tumbling windows begin anew with each: numbers start at 0 again, so a finished key leaves nothing behind
        base = np.where(kind.step == kind.size, keep, 0)
        if kind.message_store is not None:
            self.contents.store(keep)
        self._store_panes(keep, base)
        self._store_revisions(base)
        self._store_counters(base)

    def _store_panes(self, keep: IntArray, base: IntArray) -> None:
        kind, runs = self.kind, self.runs
        low = self.first // kind.pane
        gone = np.where(
            runs.next0 > self.first, np.minimum(keep // kind.pane, (runs.next0 - 1) // kind.pane + 1) - low, 0
        )
        pane, key = spread(low, gone)
        self.work.delete_many(numbered(Region.WINDOWS, runs.keys.take(pa.array(key)), pane))
        key = self.codes // self.span
        pane = self.codes % self.span + self.low[key]
        fresh = (pane * kind.pane >= keep[key]) & ((pane + 1) * kind.pane > runs.next0[key]) & (runs.counted[key] > 0)
        values = kind.codec.encode(self.panes.filter(pa.array(fresh)))
        key, pane = key[fresh], pane[fresh]
        names = numbered(Region.WINDOWS, runs.keys.take(pa.array(key)), pane - base[key] // kind.pane)
        self.work.put_many(names, values)

    def _store_revisions(self, base: IntArray) -> None:
        moved = base // self.kind.step
        old, fresh = self.waiting.changes(self.runs.keys, lambda w, k: w + (self.begin - moved)[k], moved > 0)
        revisions.delete(self.work, old)
        revisions.put(self.work, fresh)
        self.work.replace_keys(_waiting_keys(old), _waiting_keys(fresh))
        self.execution.ledger.sent_open |= len(fresh) > 0

    def _store_counters(self, base: IntArray) -> None:
        runs = self.runs
        packed = np.zeros(len(runs), COUNTER)
        packed["stream"], packed["partition"] = runs.source >> 32, runs.source & 0xFFFFFFFF
        packed["mixed"], packed["newest"], packed["last"] = runs.mixed, runs.newest, runs.last
        packed["format"], packed["next"], packed["live"], packed["digest"] = (
            FORMAT,
            runs.next1 - base,
            runs.live,
            runs.digest,
        )
        empty = runs.next1 == base
        if self.kind.spec.retention_ms:  # a key is there until it falls out, also when nothing of it is open
            empty[:] = False
        else:  # nothing stays of a full window
            packed["newest"][base > 0] = started(NO_TIME)
            own = np.flatnonzero((base > 0)[runs.key])
            own = own[runs.number[own] >= base[runs.key[own]]]
            np.maximum.at(packed["newest"], runs.key[own], numbers(self.execution.messages, TIME)[own])
        runs.store(packed, (runs.counted > 0) & ~empty & ~runs.out, (runs.counted > 0) | runs.out)


def _waiting_keys(rows: Revisions) -> set[bytes]:
    """Give the keys of the index of what waits: since when, group key, window."""
    waits = rows.where(rows.pending)
    return set(timed_keys(EARLY_WAITS, waits.since, waits.keys, waits.starts))
