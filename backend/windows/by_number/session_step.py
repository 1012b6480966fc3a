"""One micro-batch on its way through sessions by number of messages: found, told apart, sent, stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from backend.batch import EDGES, FIRST, LAST, NO_TIME, PARTITION, STREAM, TIME
from backend.chunks import taken_rows
from backend.errors import StateCorrupted
from backend.keys import fixed_bytes, prefix_end
from backend.messages.key_first import PLACE_BYTES, StoredMessages, digests
from backend.store.protocol import Region
from backend.store.staging import VERIFY
from backend.windows.arrivals import started
from backend.windows.by_number.rows import EDGE_FIELDS, LAST_FIELDS, MESSAGES
from backend.windows.by_number.runs import WHY, Arrivals, FallingOut, clocks, judge
from backend.windows.columns.arrays import IntArray, Mask, compress
from backend.windows.columns.grouping import KeySpace
from backend.windows.columns.keyed import STREAM_BYTES, keyed
from backend.windows.merging.nodes import full_values
from backend.windows.merging.rows import (
    EARLY_WAITS,
    INDEX,
    NEVER,
    SHOWN,
    WINDOWS,
    first_waiting,
    scan_waiting,
    timed_keys,
)
from backend.windows.micro_batch import DRAIN, EARLY, FULL, RETRACTED, Emission, Execution, numbers

_POSITION = bytes([Region.OPERATOR]) + b"P"

if TYPE_CHECKING:
    from backend.windows.by_number.sessions import TupleSessions


class TupleSessionStep:
    """One micro-batch. `stored` are sessions as read; `runs` are sessions after it: new ones, then untouched ones."""

    def __init__(self, kind: TupleSessions, execution: Execution) -> None:
        self.kind, self.execution, self.work = kind, execution, execution.work
        self.now, self.policies = execution.batch.time_ms, kind.spec.policies
        self.retention_ms = kind.spec.retention_ms
        self.shows_open = execution.batch.drain or execution.full_off
        """Every open session is sent."""
        self.falling = FallingOut(self.work, None, self.retention_ms, kind.stored_runs)
        self.showing: list[tuple[bytes, bytes]] = []
        """Rows of what is sent of sessions that stay open."""

    def run(self) -> None:
        """Take the steps."""
        self._number()
        self._read()
        self._judge()
        self._split()
        self._merge()
        self._decide()
        self._read_shown()
        self._read_messages()
        self._emit()
        self._store()

    def _number(self) -> None:
        """Number the messages within their streams."""
        messages, work = self.execution.messages, self.work
        self.stream = numbers(messages, STREAM)
        key, codes = self.kind.keys.encode(messages)
        streams = sorted({*np.unique(self.stream).tolist(), *(stream for stream, _ in self.execution.batch.after)})
        self.end: dict[int, int] = {}
        self.clock, self.clocks_of = clocks(self.execution), dict[int, IntArray]()
        self.position = np.zeros(len(self.stream), np.int64)
        for stream in streams:  # a handful
            name = _POSITION + fixed_bytes(stream, "u2")
            mine = np.flatnonzero(self.stream == stream)
            begin = int.from_bytes(work.get(name) or b"", "big")
            self.position[mine] = begin + np.arange(len(mine))
            self.end[stream] = begin + len(mine)
            self.clocks_of[stream] = self.clock[mine]
            if len(mine):
                work.put(name, self.end[stream].to_bytes(8, "big"))
        self.key, self.codes = key, codes

    def _read(self) -> None:
        """Read the sessions of the messages' group keys, those that end, and those whose update is due."""
        work, found = self.work, set[bytes]()
        for stream, end in self.end.items():
            low = INDEX + fixed_bytes(stream, "u2")
            high = prefix_end(low) if self.shows_open else low + fixed_bytes(end - self.kind.size)
            found.update(work.scan_arrays(low, high)[1])
        if self.execution.policies_changed:
            found.update(scan_waiting(work, EARLY_WAITS, None))
        elif self.policies.early_ms is not None:
            found.update(scan_waiting(work, EARLY_WAITS, self.now - self.policies.early_ms))
        space = KeySpace(
            [self.codes, pa.array(sorted(found), pa.binary()), self.falling.find(0, self.execution.clock_after)]
        )
        self.space = space
        self.key = space.numbers[0][self.key] if len(self.key) else self.key
        values = work.get_many(keyed(WINDOWS, space.keys))
        known = [at for at, value in enumerate(values) if value is not None]
        self.stored_key = np.array(known, np.int64)
        self.stored = self.kind.decode([value for value in values if value is not None])
        self.stored_of = np.full(len(space), -1, np.int64)
        self.stored_of[self.stored_key] = np.arange(len(known))

    def _judge(self) -> None:
        """Refuse messages out of retention; tell where a session begins."""
        last, newest = np.zeros(len(self.space), np.int64), np.zeros(len(self.space), np.int64)
        last[self.stored_key], newest[self.stored_key] = (numbers(self.stored, name) for name in ("_last", "_newest"))
        order = np.argsort(self.key, kind="stable")
        time = numbers(self.execution.messages, TIME)
        arrivals = Arrivals(self.key, self.position, time, self.clock).where(order)
        taken, opens = np.empty(len(order), np.bool_), np.empty(len(order), np.bool_)
        known = self.stored_of >= 0
        taken[order], opens[order] = judge(arrivals, known, last, newest, self.kind.size, self.retention_ms)
        self.execution.refuse(~taken, "out_of_retention", WHY)
        self.opens: Mask = opens[taken]
        self.key, self.position, self.stream = (column[taken] for column in (self.key, self.position, self.stream))
        self.time = numbers(self.execution.messages, TIME)

    def _split(self) -> None:
        """Put each group key's messages into sessions."""
        order = np.argsort(self.key, kind="stable")
        key, opens, known = self.key[order], self.opens[order], self.stored_of[self.key[order]]
        first = np.ones(len(order), np.bool_)
        first[1:] = key[1:] != key[:-1]
        run = np.cumsum(opens | first) - 1
        count = int(run[-1]) + 1 if len(run) else 0
        self.run_of = np.empty(len(order), np.int64)
        self.run_of[order] = run
        begin, end = np.flatnonzero(opens | first), np.append(np.flatnonzero(opens | first)[1:], len(order)) - 1
        self.run_key = key[begin]
        self.begin_row, self.end_row = order[begin], order[end] if count else order[begin]
        goes_on = first[begin] & ~opens[begin]
        self.continues = np.where(goes_on, known[begin], -1)
        self.newest = np.ones(count, np.bool_)
        self.newest[:-1] = self.run_key[1:] != self.run_key[:-1]

    def _merge(self) -> None:
        """Make all sessions: runs of messages, with the stored session that goes on; then other stored ones."""
        plan, stored = self.kind.incremental, self.stored
        count, old = len(self.run_key), self.continues[self.continues >= 0]
        alone = np.setdiff1d(np.arange(stored.num_rows), old)
        self.alone = alone
        folded = plan.fold(self.execution.messages, self.run_of, count)
        before = stored.select(plan.accumulator_schema.names).cast(plan.accumulator_schema)
        goes_on = np.flatnonzero(self.continues >= 0)
        if len(old):
            both = pa.concat_tables([before.take(pa.array(old)), folded])
            folded = plan.merge(both, np.concatenate([goes_on, np.arange(count)]), count)
        self.accumulators = pa.concat_tables([folded, before.take(pa.array(alone))])

        def put(name: str, new: IntArray, *, keep: bool) -> IntArray:
            """Give a column of all sessions; `keep` takes the stored value where a session goes on."""
            column = np.asarray(stored.column(name).cast(pa.int64()).fill_null(NEVER))
            if keep:
                new = new.copy()
                new[goes_on] = column[old]
            return np.concatenate([new, column[alone]])

        self.run_key = np.concatenate([self.run_key, self.stored_key[alone]])
        self.last = put("_last", self.position[self.end_row], keep=False)
        self.edges = {}
        for name, source in EDGES.items():
            first = name in FIRST
            new = numbers(self.execution.messages, source)[self.begin_row if first else self.end_row]
            self.edges[name] = put(f"_{name}", new, keep=first)
        newest = np.full(count, started(NO_TIME), np.int64)
        np.maximum.at(newest, self.run_of, self.time)
        newest[goes_on] = np.maximum(newest[goes_on], numbers(stored, "_newest")[old])
        self.newest_time = np.concatenate([newest, numbers(stored, "_newest")[alone]])
        self.next = put("_next", np.zeros(count, np.int64), keep=True)
        self.since = put("_since", np.full(count, NEVER), keep=True)
        came = np.bincount(self.run_of, minlength=count) if self.policies.early_messages is not None else 0
        self.unsent = put("_unsent", np.zeros(count, np.int64), keep=True)
        self.unsent[:count] += came
        if self.policies.early:
            fresh = np.arange(len(self.since)) < count
            self.since[fresh & (self.since == NEVER)] = self.now
        self.newest = np.concatenate([self.newest, ~np.isin(self.stored_key[alone], self.run_key[:count])])

    def _decide(self) -> None:
        """Tell which sessions ended or fell out, and which open ones are sent."""
        streams = np.array(
            [int.from_bytes(code[:STREAM_BYTES], "big") for code in self.space.keys.to_pylist()], np.int64
        )
        self.run_stream = streams[self.run_key]
        ends, self.fell = np.zeros(len(self.last), np.bool_), ~self.newest
        gone_at = self.newest_time + self.retention_ms
        for stream, end in self.end.items():
            mine = np.flatnonzero(self.run_stream == stream)
            at = self.last[mine] + self.kind.size - (end - len(self.clocks_of[stream]))
            full = at < len(self.clocks_of[stream])  # a message made it so many without the key: not fallen out before?
            ends[mine[full]] = True
            clock = np.full(len(mine), started(self.execution.clock_after))
            clock[full] = self.clocks_of[stream][at[full]]
            self.fell[mine] = (self.fell[mine] & ~full) | ((self.retention_ms > 0) & (gone_at[mine] <= clock))
        self.ended: Mask = ends | self.fell
        still = ~self.ended
        if self.shows_open:
            self.sends = still
        elif self.policies.early:
            waits = still & (self.since != NEVER)
            self.sends = waits & self.policies.early_due(self.since, self.unsent, self.now)
        elif self.execution.policies_changed:
            self.sends = still & (self.since != NEVER)  # the policy that these wait for was turned off
        else:
            self.sends = np.zeros(len(still), np.bool_)

    def _read_shown(self) -> None:
        """Read the rows that were sent of sessions that are sent again or end; of grown ones they are withdrawn."""
        self.revision, self.withdraws = self.next.copy(), np.full(len(self.next), -1, np.int64)
        runs = np.flatnonzero((self.sends | self.ended) & (self.next > 0))
        self.shown_keys = keyed(SHOWN, self.space.keys.take(pa.array(self.run_key[runs])))
        values = self.work.get_many(self.shown_keys)
        if None in values:
            where = self.shown_keys[values.index(None)].hex()
            raise StateCorrupted("the row that was sent of a session is missing", where=where, command=VERIFY)
        kind = self.kind
        self.shown = kind.shown_codec.decode(values) if values else kind.shown_schema.empty_table()  # type: ignore[arg-type]
        other = [numbers(self.shown, f"_{name}") != self.edges[name][runs] for name in LAST]
        grown = np.flatnonzero(np.logical_or.reduce(other))
        self.revision[runs[grown]], self.withdraws[runs[grown]] = 0, grown

    def _read_messages(self) -> None:
        """Read the messages of sessions that are sent or ended, and lay out those that just came."""
        message_store, stored = self.kind.message_store, self.stored
        if message_store is None:
            return
        source = np.concatenate([self.continues, self.alone])
        mine = np.flatnonzero((self.ended | self.sends) & (source >= 0))
        keys = self.space.keys.take(pa.array(self.run_key[mine])).to_pylist()
        starts = [MESSAGES + key for key in keys]
        stops, sizes = (prefix_end(start) or b"\xff" for start in starts), numbers(stored, "_count")[source[mine]]
        found = message_store.read_counted(self.work, starts, stops, sizes, "session")
        self.old = StoredMessages(found.keys, found.values, mine[found.owner])
        self.all_messages = pa.concat_tables(
            [message_store.table(found), message_store.select(self.execution.messages)]
        )
        self.all_run = np.concatenate([self.old.owner, self.run_of])

    def _emit(self) -> None:
        full, goes = self.kind.spec.policies.full, self.since != NEVER
        goes |= full or self.execution.full_off
        ended = np.flatnonzero(self.ended & ~self.fell & goes)
        order = np.lexsort((self.run_stream[ended], self.last[ended]))
        fell = np.flatnonzero(self.fell & goes)
        phases = [
            (FULL if full else EARLY, ended[order]),
            (EARLY, fell[np.argsort(self.last[fell], kind="stable")]),
        ]
        self.execution.metrics["opened"] += int((self.continues < 0).sum())
        self.execution.metrics["expired"] += int(self.fell.sum())
        sent = np.flatnonzero(self.sends)
        phases.append(
            (DRAIN if self.execution.batch.drain else EARLY, sent[np.argsort(self.last[sent], kind="stable")])
        )
        for phase, runs in phases:
            if len(runs):
                self._withdraw(runs[self.withdraws[runs] >= 0])
                self._send(phase, runs)
        self.next[self.sends] = self.revision[self.sends] + 1
        self.since[self.sends | self.ended], self.unsent[self.sends] = NEVER, 0

    def _withdraw(self, runs: IntArray) -> None:
        """Send again, as retracted, what was sent of sessions before they grew."""
        if len(runs):
            shown = self.shown.take(pa.array(self.withdraws[runs]))
            ends = {name: numbers(shown, f"_{name}") for name in LAST}
            values = shown.drop_columns([field.name for field in LAST_FIELDS])
            self._add(RETRACTED, self.next[runs] - 1, runs, values, ends)

    def _send(self, phase: int, runs: IntArray) -> None:
        """Send sessions; what is sent of open ones is kept, to be withdrawn when they grow."""
        values = self._values(runs)
        self._add(phase, self.revision[runs], runs, values, {})
        self.execution.metrics["windows_emitted"] += len(runs)
        open_ = np.flatnonzero(self.sends[runs])
        if len(open_):
            names = self.kind.shown_schema.names[len(LAST) :]
            ends = [self._edge(field, runs) for field in LAST_FIELDS]
            table = pa.table([*ends, *(values.column(name) for name in names)], schema=self.kind.shown_schema)
            codes = self.space.keys.take(pa.array(self.run_key[runs[open_]]))
            rows = zip(keyed(SHOWN, codes), self.kind.shown_codec.encode(table.take(pa.array(open_))), strict=True)
            self.showing = sorted(rows)

    def _edge(self, field: pa.Field, runs: IntArray) -> pa.Array:
        return pa.array(self.edges[field.name[1:]][runs], field.type)

    def _add(
        self, phase: int, revision: IntArray, runs: IntArray, values: pa.Table, ends: Mapping[str, IntArray]
    ) -> None:
        """Add results; `ends` are columns as `LAST`, where they are not the sessions' own."""
        codes = self.space.keys.take(pa.array(self.run_key[runs]))
        edges = {name: column[runs] for name, column in self.edges.items()} | dict(ends)
        emission = Emission(phase, revision, None, None, codes, values, edges)
        self.execution.results.append(emission.table(self.kind.result_schema, self.kind.keys))

    def _values(self, runs: IntArray) -> pa.Table:
        kind = self.kind
        values = kind.incremental.result(self.accumulators.take(pa.array(runs)))
        if kind.message_store is not None:
            number = np.full(len(self.last), -1, np.int64)
            number[runs] = np.arange(len(runs))
            rows = np.flatnonzero(number[self.all_run] >= 0)
            full = full_values(kind.full, number[self.all_run[rows]], rows, len(runs), self.all_messages)
            values = pa.table([*values.columns, *full.columns], schema=pa.schema([*values.schema, *full.schema]))
        return values

    def _store(self) -> None:
        work, stored = self.work, self.stored
        old = self.space.keys.take(pa.array(self.stored_key)).to_pylist()
        last, since = stored.column("_last").to_pylist(), stored.column("_since").to_pylist()
        work.delete_many([INDEX + c[:STREAM_BYTES] + fixed_bytes(at) for c, at in zip(old, last, strict=True)])
        waits = [at for at, value in enumerate(since) if value is not None]
        waited = np.array([since[at] for at in waits], np.int64)
        work.delete_many(sorted(timed_keys(EARLY_WAITS, waited, pa.array([old[at] for at in waits], pa.binary()))))
        remaining = np.flatnonzero(~self.ended)
        self.falling.delete(pa.array(old, pa.binary()), numbers(stored, "_last"), numbers(stored, "_newest"))
        codes = self.space.keys.take(pa.array(self.run_key[remaining])).to_pylist()
        self.execution.add_open(len(remaining) - len(old))
        gone = set(old) - set(codes)
        work.delete_many(sorted(WINDOWS + code for code in gone))
        work.delete_many(sorted(self.shown_keys))
        work.put_many([key for key, _ in self.showing], [value for _, value in self.showing])
        count, digest, starts = self._store_messages()
        since_remaining = self.since[remaining]
        own = [
            pa.array(self.last[remaining]),
            *(self._edge(field, remaining) for field in EDGE_FIELDS),
            pa.array(self.next[remaining]),
            pa.array(since_remaining, mask=since_remaining == NEVER),
            pa.array(self.unsent[remaining]),
            pa.array(count[remaining]),
            pa.array(digest[remaining]),
            pa.array([starts[at] for at in remaining.tolist()], pa.binary()),
            pa.array(self.newest_time[remaining]),
        ]
        table = pa.table([*own, *self.accumulators.take(pa.array(remaining)).columns], schema=self.kind.schema)
        work.put_many([WINDOWS + code for code in codes], self.kind.codec.encode(table))
        index = [
            INDEX + code[:STREAM_BYTES] + fixed_bytes(at)
            for code, at in zip(codes, self.last[remaining].tolist(), strict=True)
        ]
        work.put_many(index, codes)
        self.falling.put(pa.array(codes, pa.binary()), self.last[remaining], self.newest_time[remaining])
        waiting = np.flatnonzero(since_remaining != NEVER)
        waiting_codes = pa.array([codes[at] for at in waiting.tolist()], pa.binary())
        keys = sorted(timed_keys(EARLY_WAITS, since_remaining[waiting], waiting_codes))
        work.put_many(keys, [b""] * len(keys))
        period = self.policies.early_ms
        oldest = first_waiting(work, EARLY_WAITS) if period is not None else None
        self.execution.ledger.due_ms = None if oldest is None or period is None else oldest + period

    def _store_messages(self) -> tuple[IntArray, np.ndarray[tuple[int], np.dtype[np.uint64]], list[bytes | None]]:
        """Drop messages of ended sessions and add those of open ones; gives count, digest and starts of sessions."""
        message_store, execution, total = self.kind.message_store, self.execution, len(self.last)
        count, digest = np.zeros(total, np.int64), np.zeros(total, np.uint64)
        starts: list[bytes | None] = [None] * total
        if message_store is None:
            return count, digest, starts
        source = np.concatenate([self.continues, self.alone])
        known = np.flatnonzero(source >= 0)
        count[known] = numbers(self.stored, "_count")[source[known]]
        digest[known] = self.stored.column("_digest").to_numpy()[source[known]]
        before = self.stored.column("_starts").to_pylist()
        for at in known.tolist():
            starts[at] = before[source[at]]
        message_store.drop(execution, self.old.where(np.flatnonzero(self.ended[self.old.owner])))
        stay = np.flatnonzero(~self.ended[self.run_of])
        codes = self.space.keys.take(pa.array(self.key[stay]))
        keys, values = message_store.rows(taken_rows(execution.messages, stay), codes)
        message_store.put(execution, keys, values)
        np.add.at(count, self.run_of[stay], 1)
        np.add.at(digest, self.run_of[stay], digests(keys, values))
        self._add_starts(starts, stay, keys)
        return count, digest, starts

    def _add_starts(self, starts: list[bytes | None], stay: IntArray, keys: list[bytes]) -> None:
        """Note where each source partition begins in a session: the first message of each, few of all."""
        partition = numbers(self.execution.messages, PARTITION)[stay]
        pair, distinct = compress(self.run_of[stay] * 2**31 + partition)
        firsts = np.full(len(distinct), -1, np.int64)
        firsts[pair[::-1]] = np.arange(len(stay))[::-1]
        for at, run in zip(firsts.tolist(), (distinct // 2**31).tolist(), strict=True):
            place, known = keys[at][-PLACE_BYTES:], starts[run] or b""
            if all(known[i : i + PLACE_BYTES - 8] != place[:-8] for i in range(0, len(known), PLACE_BYTES)):
                starts[run] = known + place
