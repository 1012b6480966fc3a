"""The join operator: new messages of both sides meet stored ones, and each other, once (SAMZA-552).

A micro-batch goes left first, then right, each in the order of the source, and its pairs come out in the order

* of the left messages, each with the stored right ones;
* of the right messages, each with the stored left ones and those of this micro-batch;
* then rows without a partner, left and then right.

Partners stand in the order (stream, source partition, offset). Everything is columnar: `join_meet` takes the steps up
to the pairs, `join_read` reads what can be met, `join_match` finds it; `join_life` says how long a message can be met.

State by region: the messages and their index; `WINDOWS` counts them (`join_cells`); `REVISIONS` has those that wait for
a first partner (`join_outer`); `AGGREGATES` rows held back (`join_out`); `OPERATOR` the small rest (`join_state`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from backend.batch import (
    ERROR_SCHEMA,
    NO_TIME,
    MicroBatch,
    Outcome,
    Proof,
    SourcePartition,
)
from backend.chunks import taken_rows
from backend.joins import cells, outer, state
from backend.joins.cells import Place
from backend.joins.liveness import bucket_width, side_clocks, side_of
from backend.joins.out import Out
from backend.joins.probe import Meeting
from backend.joins.read import reach
from backend.joins.rows import JoinRows, Rows
from backend.joins.sides import LEFT, RIGHT
from backend.joins.spec import JoinSpec
from backend.joins.state import JoinLedger
from backend.messages.key_first import digests
from backend.store.rows import StoreRows
from backend.store.workspace import Workspace
from backend.windows.columns.arrays import IntArray, Mask
from backend.windows.micro_batch import joined


class JoinOperator:
    """A windowed join of two streams over one shard; see `backend.batch.Operator`.

    Args:
        spec: What to do.
    """

    def __init__(self, spec: JoinSpec) -> None:
        self.spec = spec
        self.rows = JoinRows(spec)
        self.out = Out(spec)

    @property
    def result_schema(self) -> pa.Schema:
        """Schema of results: `backend.joins.spec.JOIN_FIELDS`, then the fields of both sides."""
        return self.out.schema

    @property
    def input_fields(self) -> Sequence[str]:
        """Names of the message fields that the operator reads: `left.<field>`, then `right.<field>`."""
        return self.spec.input_fields

    @property
    def replays(self) -> bool:
        """A join keeps messages of both sides."""
        return True

    @property
    def counts_offsets(self) -> bool:
        """Tell whether its clocks are offsets; see `backend.batch.counts_offsets`."""
        return self.spec.by_number

    def process(self, batch: MicroBatch, work: Workspace) -> Outcome:
        """Join one micro-batch with the state seen through `work`, and with itself."""
        ledger = state.read(work) or JoinLedger(state.FORMAT, batch.time_ms, bucket_width(self.spec))
        return _Step(self.spec, self.rows, self.out, batch, work, ledger).run()

    def replay_rows(self, messages: pa.Table) -> StoreRows:
        """Give the message-store rows of accepted messages, sorted by key: the same bytes that `process` writes."""
        return self.rows.replay_rows(messages)

    def settle(self, work: Workspace) -> None:
        """Delete messages that were expired one side at a time, or by size, or since an older copy was made."""
        ledger = state.read(work)
        if ledger is not None:
            cells.settle(work, self.spec.layout, ledger.width, ledger.firsts)

    def proofs(self, work: Workspace) -> Iterable[Proof]:
        """Give what the message store must hold, by its cells."""
        ledger = state.read(work)
        return () if ledger is None else cells.proofs(work, self.spec.layout, ledger.width)

    def describe(self) -> dict[str, object]:
        """Give the manifest's entry."""
        return self.spec.describe()

    def with_options(self, options: Mapping[str, Any]) -> JoinOperator:
        """Return this operator under other options; see `backend.batch.Operator.with_options`."""
        return JoinOperator(self.spec.with_options(options))


class _Step(Meeting):
    """One micro-batch on its way: what is sent, what is kept, what goes."""

    def run(self) -> Outcome:
        """Take the steps."""
        self.meet()
        clocks, idle_ms = self._move_clocks()
        results = self.out.release(self.work, self.ledger, self.pairs, self.batch.time_ms, drain=self.batch.drain)
        keys = self._store()
        for side in (LEFT, RIGHT):
            if self.spec.sides[side].outer:
                results += self._unmatched(side, clocks[1 - side], keys[side])
        self._expire()
        self.cells.write(self.work)
        state.write(self.work, self.ledger)
        due = [self.out.due_ms(self.ledger), idle_ms if self.ledger.waiting else None]
        return Outcome(
            results=joined(results, self.out.schema),
            errors=joined(self.errors, ERROR_SCHEMA),
            next_due_ms=min((time for time in due if time is not None), default=None),
            replay_from=self.cells.replay_from(),
            rejected=self.rejected,
            message_count=self.cells.messages,
            message_digest=self.cells.digest,
            metrics=self.metrics,
        )

    def _move_clocks(self) -> tuple[tuple[int, int], int | None]:
        """Move both sides' clocks on, and with them what can be joined."""
        reached: dict[SourcePartition, int] = {}
        for source, position in self.batch.after.items():
            reached[source] = position.stream_time
            if self.spec.by_number:
                reached[source] = position.next_offset - self.firsts.get(source, position.next_offset)
        ledger, lives = self.ledger, self.lives
        clocks, idle_ms = side_clocks(ledger.clocks, reached, self.batch, ledger.started_ms, self.spec)
        self.reached = reached
        ledger.clocks = clocks
        ledger.lows = (
            max(self.lows[LEFT], lives[LEFT].first_alive(clocks[RIGHT])),
            max(self.lows[RIGHT], lives[RIGHT].first_alive(clocks[LEFT])),
        )
        return clocks, idle_ms

    def _store(self) -> list[dict[int, bytes]]:
        """Store the new messages whose cells live on; gives the keys of those that may wait for a partner, by row."""
        waiting: list[dict[int, bytes]] = []
        for side, rows in enumerate(self.new):
            named = self.spec.sides[side]
            fitting: Mask = self.codec.storable(rows.known, named)
            for place, here in self.cells.groups(rows.at, rows.stream, rows.partition):
                if self._dead(side, place, int(rows.offset[here].max())):
                    fitting[here] = False
            table, stored = self.tables[side], rows.where(fitting)
            found = self.codec.encode(table if fitting.all() else table.filter(pa.array(fitting)), named)
            stored = stored if not len(found.order) else stored.take(found.order)
            hashes = digests(found.keys, found.values)
            self.cells.add(stored.at, stored.stream, stored.partition, stored.offset, hashes)
            self.work.put_many(found.keys, found.values)
            self.work.put_many(found.index, [b""] * len(found.index))
            self._put_clocks(side, stored)
            at = np.flatnonzero(fitting)[found.order] if named.outer else np.empty(0, np.int64)
            waiting.append(dict(zip(at.tolist(), found.keys, strict=False)))
        return waiting

    def _put_clocks(self, side: int, rows: Rows) -> None:
        """Remember the clocks of stored messages that a later pair may hang on."""
        if self.spec.by_number:
            return
        other, passed = self.lives[1 - side], self._slowest(1 - side)
        state.drop_clocks(self.work, side, passed)
        if other.keep is None:
            return
        wanted = rows.clock > passed
        if self.spec.ranged:
            earliest, _ = reach(self.spec, side, rows.time)
            wanted &= other.expiry(earliest) <= rows.clock
        fitting = rows.where(wanted)
        state.put_clocks(self.work, side, fitting.clock, fitting.stream, fitting.partition, fitting.offset)

    def _slowest(self, side: int) -> int:
        """Give the smallest stream time of a side's source partitions, idle ones too."""
        times = [time for (stream, _), time in self.reached.items() if side_of(stream, self.spec) == side]
        return min(times, default=NO_TIME)

    def _dead(self, side: int, place: Place, last: int) -> bool:
        """Tell whether a cell whose last offset is `last` can be met no more."""
        bucket, stream, partition = place
        gone = next((offset for s, p, offset in self.ledger.gone if (s, p) == (stream, partition)), NO_TIME)
        return bucket + self.ledger.width <= self.ledger.lows[side] or last < gone

    def _unmatched(self, side: int, other_clock: int, keys: Mapping[int, bytes]) -> list[pa.Table]:
        """Show messages that no partner can come for, in the order of the source; the others wait."""
        ledger, named, rows = self.ledger, self.spec.sides[side], self.new[side]
        first = outer.open_from(self.spec, side, ledger.lows[side], other_clock, ledger.closed[1 - side])
        sized, drain = named.retention_messages is not None and not self.spec.by_number, self.batch.drain
        shown = outer.show(self.work, side, first, ledger.gone, sized=sized, drain=drain)
        ledger.waiting -= len(shown.keys)
        lonely = ~self.matched[side]
        due = (rows.at < first) | (rows.offset < state.gone_before(ledger.gone, rows.stream, rows.partition))
        waits = np.flatnonzero(lonely & ~due & (not drain))
        outer.wait(self.work, side, rows.take(waits), [keys[at] for at in waits.tolist()])
        ledger.waiting += len(waits)
        fresh = np.flatnonzero(lonely & (due | drain))
        stored = self.codec.stored(shown.keys, shown.values, named)
        both = [(stored, np.arange(len(stored)), shown.due), (rows, fresh, due[fresh])]
        table = pa.concat_tables([self._lonely(side, some, picked, is_due) for some, picked, is_due in both])
        places = [
            np.concatenate([getattr(some, name)[picked] for some, picked, _ in both])
            for name in ("offset", "partition", "stream")
        ]
        self.metrics["unmatched"] += table.num_rows
        return [taken_rows(table, np.lexsort(places))] if table.num_rows else []

    def _lonely(self, side: int, rows: Rows, picked: IntArray, due: Mask) -> pa.Table:
        half = rows.time[picked], self.codec.fields(rows, picked, self.spec.sides[side])
        reasons = pa.array(np.where(due, "full", "drain"), pa.string())
        return self.out.table(reasons, *((half, None) if side == LEFT else (None, half)))

    def _expire(self) -> None:
        """Take dead cells out of the store, and raise the bound."""
        ledger = self.ledger
        dead = [
            place
            for place, cell in self.cells.known.items()
            if self._dead(side_of(place[1], self.spec), place, cell.last)
        ]
        if not self.spec.by_number and min(ledger.lows) != NO_TIME:
            ledger.bound = max(ledger.bound, min(ledger.lows) // ledger.width * ledger.width)
        cells.evict(self.work, self.spec.layout, self.cells, dead, ledger.bound, self.firsts)
        if dead and not self.spec.by_number:
            for side in (LEFT, RIGHT):
                state.drop_unused_clocks(self.work, side, self.cells.spans())
