"""One micro-batch on its way through windows by number of messages: an array operation at each step."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from backend.aggregates.groups import stable_order
from backend.batch import EDGES, FIRST, NO_TIME, OFFSET, PARTITION, STREAM, TIME
from backend.store.protocol import Region, region_range
from backend.store.reads import get_all
from backend.windows import revisions
from backend.windows.arrivals import started
from backend.windows.by_number.contents import TupleContents
from backend.windows.by_number.rows import COUNTER, EDGE_FIELDS, FORMAT, all_counters
from backend.windows.by_number.runs import STREAM_BITS, FallingOut, Runs, stored_runs
from backend.windows.by_number.sent import SentSessions
from backend.windows.columns.arrays import IntArray, Mask, compress, dense, firsts, spread
from backend.windows.columns.blocks import combine
from backend.windows.columns.keyed import numbered
from backend.windows.columns.pane_rows import Pairs
from backend.windows.full_state import with_full
from backend.windows.merging.rows import EARLY_WAITS, codes_of, first_waiting, firsts_of, scan_waiting, timed_keys
from backend.windows.micro_batch import DRAIN, EARLY, FULL, RETRACTED, Emission, Execution, numbers
from backend.windows.revisions import Revisions

if TYPE_CHECKING:
    from backend.windows.by_number.kind import Tuples


class TupleStep:
    """One micro-batch; arrays named after keys are as long as `space`, the group keys at hand.

    Attributes:
        first: Number of the first message that was still needed before (per key).
        next0: Next number before.
        next1: Next number after.
        filled: First window that was not full before.
        opened: First window that is not full after.
    """

    def __init__(self, kind: Tuples, execution: Execution) -> None:
        self.kind, self.execution, self.work = kind, execution, execution.work
        self.now = execution.batch.time_ms
        policies = kind.spec.policies
        self.early = policies if policies.early and not kind.sliding else None
        """The early policy; a sliding window is full when it begins."""
        self.early_ms = None if self.early is None else self.early.early_ms
        self.ends = policies.full or execution.full_off
        """A window is sent when it ends: full, or as it is when its group key falls out."""
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
        if len(self.space):
            self._choose()
            self._load()
            self._send()
            self._store()
        oldest = first_waiting(self.work, EARLY_WAITS) if self.early_ms is not None else None
        self.execution.ledger.due_ms = None if oldest is None or self.early_ms is None else oldest + self.early_ms

    # -- numbers --------------------------------------------------------------------------------------------------

    def _number(self) -> None:
        """Tell runs apart, and number the messages within theirs."""
        execution = self.execution
        self.rows, waiting = self._waiting()
        self.runs = runs = Runs(execution, self.kind.keys, self.falling, [self.rows.keys, waiting])
        self.space, self.row_key = runs, runs.find(self.rows.keys)
        self.key, self.out, self.next0 = runs.key, runs.out, runs.next
        self.live, self.digest = runs.live, runs.digest
        count = len(runs)
        self.counted = np.bincount(self.key, minlength=count)
        self.next1 = self.next0 + self.counted
        self._find_sources()
        self.order = stable_order(self.key, count)
        self.at = np.cumsum(self.counted) - self.counted
        self.number = np.empty(len(self.key), np.int64)
        own = self.key[self.order]
        self.number[self.order] = np.arange(len(own)) - self.at[own] + self.next0[own]

    def _find_sources(self) -> None:
        """Tell which runs have live messages of several source partitions: their numbers are not in order."""
        stream, partition = (numbers(self.execution.messages, name) for name in (STREAM, PARTITION))
        own, stored = stream * 2**32 + partition, self.runs.stored
        self.source, self.mixed0 = np.zeros(len(self.space), np.int64), np.zeros(len(self.space), np.bool_)
        self.source[self.key[::-1]] = own[::-1]
        self.source[stored] = self.runs.source
        self.mixed0[stored] = self.runs.mixed
        self.mixed = self.mixed0.copy()
        if self.kind.message_store is not None:
            self.mixed[self.key[(own != self.source[self.key]) | self._passed(own)]] = True

    def _passed(self, own: IntArray) -> Mask:
        """Tell which messages' offsets were passed before: contexts with `offsets="unordered"` take them."""
        offset, passed = numbers(self.execution.messages, OFFSET), np.zeros(len(own), np.bool_)
        before = {s * 2**32 + p: at.next_offset for (s, p), at in self.execution.batch.before.items()}
        edges = np.flatnonzero(np.diff(own, prepend=-1, append=-1)).tolist()  # in order of their sources
        for low, high in pairwise(edges):
            newest = np.maximum.accumulate(offset[low:high])
            passed[low:high] = offset[low:high] < np.maximum(newest, before.get(int(own[low]), 0))
        return passed

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
        kind = self.kind
        self.filled = np.maximum((self.next0 - kind.size) // kind.step + 1, kind.lowest)
        self.opened = np.maximum((self.next1 - kind.size) // kind.step + 1, kind.lowest)
        self.first = np.maximum(self.filled * kind.step, 0)
        window, key = spread(self.filled, self.opened - self.filled)
        trigger = self.order[self.at[key] + window * kind.step + kind.size - 1 - self.next0[key]]
        by_trigger = np.lexsort((window, trigger))
        self.full_window, self.full_key = window[by_trigger], key[by_trigger]
        open_count = kind.open_of(self.next1)
        chosen = np.ones(len(self.space), np.bool_) if self.shows_open else self.counted > 0
        if self.early is None and not self.shows_open:
            chosen[:] = False
        if self.ends or self.execution.ledger.sent_open:
            chosen |= self.out  # sent as it is; what was sent of it is forgotten
        self.execution.metrics["opened"] += int(((self.next1 - 1) // kind.step - (self.next0 - 1) // kind.step).sum())
        self.execution.metrics["expired"] += int(open_count[self.out & ~self.runs.ended].sum())
        self.execution.add_open(int(open_count[~self.out].sum()) - int(kind.open_of(self.next0).sum()))
        self.open_window, self.open_key = spread(self.opened, np.where(chosen, open_count, 0))
        self._read_revisions()
        self._choose_ended()
        self._decide()

    def _read_revisions(self) -> None:
        if self.shows_open or not self.execution.ledger.sent_open:
            return
        ended, owner = spread(self.filled, self.opened - self.filled)
        window, key = np.concatenate([ended, self.open_window]), np.concatenate([owner, self.open_key])
        stored = self.runs.stored[key]
        found = revisions.get(self.work, window[stored], self.space.keys.take(pa.array(key[stored])))
        self.rows = Revisions.concat([self.rows, found])  # what waits may be there twice
        self.row_key = self.runs.find(self.rows.keys)

    def _choose_ended(self) -> None:
        """Find for each full window its row of revisions; without full results only what waits is sent."""
        pairs = Pairs(self.rows.starts, self.row_key, len(self.space))
        place = np.full(len(pairs) + 1, -1, np.int64)
        place[pairs.find(self.rows.starts, self.row_key)] = np.arange(len(self.rows))
        self.full_row = place[pairs.find(self.full_window, self.full_key)]
        if self.ends or self.kind.spec.policies.early:  # the last message is an update that waits
            return
        waits = self.full_row >= 0
        waits[waits] = self.rows.pending[self.full_row[waits]]
        self.full_window, self.full_key, self.full_row = (
            column[waits] for column in (self.full_window, self.full_key, self.full_row)
        )

    def _decide(self) -> None:
        """Apply the early policy to updated and waiting open windows."""
        rows, count = self.rows, len(self.space)
        still = rows.starts >= self.opened[self.row_key]
        window = np.concatenate([rows.starts[still], self.open_window])
        self.open = Pairs(window, np.concatenate([self.row_key[still], self.open_key]), count)
        at = self.open.find(rows.starts[still], self.row_key[still])
        total = len(self.open)
        self.next, self.since = np.zeros(total, np.int64), np.full(total, self.now, np.int64)
        self.waits, self.open_row = np.zeros(total, np.bool_), np.full(total, -1, np.int64)
        self.next[at], self.waits[at], self.open_row[at] = rows.next[still], rows.pending[still], np.flatnonzero(still)
        waiting = rows.pending[still]
        self.since[at[waiting]] = rows.since[still][waiting]
        self.unsent = np.zeros(total, np.int64)
        self.unsent[at] = rows.unsent[still]
        updated = self.open.find(self.open_window, self.open_key)
        if self.early is not None:
            self.waits[updated[self.counted[self.open_key] > 0]] = True
        if self.early is not None and self.early.early_messages is not None:
            seen = np.maximum(self.open_window * self.kind.step, self.next0[self.open_key])
            self.unsent[updated] += np.maximum(self.next1[self.open_key] - seen, 0)
        # a run that falls out is sent before it goes; without full results what waits of it
        self.goes: Mask = (self.waits | self.ends) & self.out[self.open.key]
        if self.shows_open:
            self.goes[updated] |= ~self.out[self.open.key[updated]]
        elif self.execution.policies_changed and self.early is None:
            self.goes |= self.waits  # the policy that these wait for was turned off
        elif self.early is not None:
            self.goes |= self.waits & self.early.early_due(self.since, self.unsent, self.now)

    # -- load -----------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        """Make the table of panes, in order of (key, pane): stored ones that are needed, and new messages folded."""
        kind, count = self.kind, len(self.space)
        self.sends = np.zeros(count, np.bool_)
        self.sends[self.full_key] = True
        self.sends[self.open.key[self.goes]] = True
        low = self.first // kind.pane
        stored = np.where(self.next0 > self.first, (self.next0 - 1) // kind.pane - low + 1, 0)
        partly = (stored > 0) & (self.next0 % kind.pane != 0) & (self.counted > 0)
        begin = np.where(self.sends, low, low + stored - 1)
        pane, key = spread(begin, np.where(self.sends, stored, np.where(partly, 1, 0)))
        old = self._read_panes(pane, key)
        new_pane = self.number // kind.pane
        self.low, self.span = (
            low,
            int(max((new_pane - low[self.key]).max(initial=0), (pane - low[key]).max(initial=0))) + 1,
        )
        code = np.concatenate([key * self.span + pane - low[key], self.key * self.span + new_pane - low[self.key]])
        group, self.codes = dense(code, count * self.span)
        self.panes = self._merged(old, group[: len(pane)], group[len(pane) :], len(self.codes))

    def _read_panes(self, pane: IntArray, key: IntArray) -> pa.Table:
        wanted = numbered(Region.WINDOWS, self.space.keys.take(pa.array(key)), pane)
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
        kind = self.kind
        if kind.message_store is not None:
            self.contents = TupleContents(
                kind.message_store,
                kind.full,
                self.execution,
                self.space,
                whole=kind.session,
                key=self.key,
                number=self.number,
                counted=self.counted,
                next0=self.next0,
                live=self.live,
                digest=self.digest,
                source=self.source,
                mixed0=self.mixed0,
                mixed=self.mixed,
                out=self.out,
            )
            self.contents.read(self.sends | (self.opened > self.filled) | self.out)
        if len(self.full_key):
            revision = np.zeros(len(self.full_row), np.int64)
            known = self.full_row >= 0
            revision[known] = self.rows.next[self.full_row[known]]
            self._emit(self.at_end, revision, self.full_key, *self._evaluate(self.full_window, self.full_key))
        out, ended = self.out[self.open.key], self.runs.ended[self.open.key]
        if kind.session:
            self.sent = SentSessions(kind, self.work, self.space.keys.take(pa.array(self.open.key)))
            self.sent.take((self.goes | out) & (self.next > 0))
        for phase, which in ((self.at_end, ended), (EARLY, out & ~ended), (DRAIN if self.drain else EARLY, ~out)):
            if len(going := np.flatnonzero(self.goes & which)):
                self._send_open(phase, going)
        self.next[self.goes] += 1
        self.waits[self.goes], self.unsent[self.goes] = False, 0

    def _send_open(self, phase: int, going: IntArray) -> None:
        """Send windows that are open, or that end with their runs: sessions in the order of their last messages."""
        key = self.open.key[going]
        if self.kind.session:
            last = self.runs.last[key]
            order = np.lexsort((last >> STREAM_BITS, last % 2**STREAM_BITS))
            going, key = going[order], key[order]
        edges, values = self._evaluate(self.open.window[going], key)
        if self.kind.session:
            grown, before, sent = self.sent.grown(going, edges)
            withdrawn = {name: edges[name][grown] for name in FIRST} | before
            self._emit(RETRACTED, self.next[going[grown]] - 1, key[grown], withdrawn, sent)
            self.next[going[grown]] = 0
            self.sent.put(going, edges, values, ~self.out[key])
        self._emit(phase, self.next[going], key, edges, values)

    def _evaluate(self, window: IntArray, key: IntArray) -> tuple[dict[str, IntArray], pa.Table]:
        """Give where windows begin and end, as `EDGES`, and their aggregates."""
        kind = self.kind
        low = np.maximum(window * kind.step, 0)
        high = np.minimum(window * kind.step + kind.size, self.next1[key])
        row = np.searchsorted(self.codes, key * self.span + low // kind.pane - self.low[key])
        length = (high - 1) // kind.pane - low // kind.pane + 1
        plan = kind.incremental
        accumulators = combine(plan, self.panes.select(plan.accumulator_schema.names), row, length)
        values = plan.result(accumulators)
        if kind.message_store is not None:
            values = with_full(values, self.contents.values(low, high, key))
        ends = row + length - 1
        return {name: numbers(self.panes, f"_{name}")[row if name in FIRST else ends] for name in EDGES}, values

    def _emit(
        self, phase: int, revision: IntArray, key: IntArray, edges: dict[str, IntArray], values: pa.Table
    ) -> None:
        if len(key):
            codes = self.space.keys.take(pa.array(key))
            emission = Emission(phase, revision, None, None, codes, values, edges)
            self.execution.results.append(emission.table(self.kind.result_schema, self.kind.keys))

    # -- store ----------------------------------------------------------------------------------------------------

    def _store(self) -> None:
        kind = self.kind
        keep = np.maximum(self.opened * kind.step, 0)
        keep = np.where(self.out, -(-self.next1 // kind.pane) * kind.pane, keep)
        # tumbling windows begin anew with each: numbers start at 0 again, so a finished key leaves nothing behind
        base = np.where(kind.step == kind.size, keep, 0)
        if kind.message_store is not None:
            self.contents.store(keep)
        self._store_panes(keep, base)
        self._store_revisions(base)
        self._store_counters(base)

    def _store_panes(self, keep: IntArray, base: IntArray) -> None:
        kind = self.kind
        low = self.first // kind.pane
        gone = np.where(
            self.next0 > self.first, np.minimum(keep // kind.pane, (self.next0 - 1) // kind.pane + 1) - low, 0
        )
        pane, key = spread(low, gone)
        self.work.delete_many(numbered(Region.WINDOWS, self.space.keys.take(pa.array(key)), pane))
        key = self.codes // self.span
        pane = self.codes % self.span + self.low[key]
        fresh = (pane * kind.pane >= keep[key]) & ((pane + 1) * kind.pane > self.next0[key]) & (self.counted[key] > 0)
        values = kind.codec.encode(self.panes.filter(pa.array(fresh)))
        key, pane = key[fresh], pane[fresh]
        names = numbered(Region.WINDOWS, self.space.keys.take(pa.array(key)), pane - base[key] // kind.pane)
        self.work.put_many(names, values)

    def _store_revisions(self, base: IntArray) -> None:
        rows, ledger = self.rows, self.execution.ledger
        window = self.open.window - base[self.open.key] // self.kind.step
        keep = (self.waits | (self.next > 0)) & ~self.out[self.open.key]
        ledger.sent_open = ledger.sent_open or bool(keep.any())
        same = keep & (base[self.open.key] == 0)
        same &= ~rows.changed(self.open_row, self.next, self.waits, self.since, self.unsent)
        stays = np.append(same, False)[self.open.find(rows.starts, self.row_key)]
        gone = rows.where(~stays)
        revisions.delete(self.work, gone)
        keep &= ~same
        fresh = Revisions(
            window[keep],
            self.space.keys.take(pa.array(self.open.key[keep])),
            self.next[keep],
            self.waits[keep],
            self.since[keep],
            self.unsent[keep],
        )
        revisions.put(self.work, fresh)
        self.work.replace_keys(_waiting_keys(gone), _waiting_keys(fresh))

    def _store_counters(self, base: IntArray) -> None:
        packed = np.zeros(len(self.space), COUNTER)
        packed["stream"], packed["partition"] = self.source >> 32, self.source & 0xFFFFFFFF
        packed["mixed"], packed["newest"], packed["last"] = self.mixed, self.runs.newest, self.runs.last
        packed["format"], packed["next"], packed["live"], packed["digest"] = (
            FORMAT,
            self.next1 - base,
            self.live,
            self.digest,
        )
        empty = self.next1 == base
        if self.kind.spec.retention_ms:  # a key is there until it falls out, also when nothing of it is open
            empty[:] = False
        else:  # nothing stays of a full window
            packed["newest"][base > 0] = started(NO_TIME)
            own = np.flatnonzero((base > 0)[self.key])
            own = own[self.number[own] >= base[self.key[own]]]
            np.maximum.at(packed["newest"], self.key[own], numbers(self.execution.messages, TIME)[own])
        self.runs.store(packed, (self.counted > 0) & ~empty & ~self.out, (self.counted > 0) | self.out)


def _waiting_keys(rows: Revisions) -> set[bytes]:
    """Give the keys of the index of what waits: since when, group key, window."""
    waits = rows.where(rows.pending)
    return set(timed_keys(EARLY_WAITS, waits.since, waits.keys, waits.starts))
