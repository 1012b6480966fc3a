"""The join operator: new messages of both sides meet stored ones, and each other, once (SAMZA-552).

A micro-batch goes left first, then right, each in the order of the source, and its pairs come out in the order

* of the left messages, each with the stored right ones;
* of the right messages, each with the stored left ones and those of this micro-batch;
* then rows without a partner, left and then right.

Partners stand in the order (stream, source partition, offset). Everything is columnar: `probe` takes the steps up to
the pairs, `read` reads what can be met, `match` finds it; `sides` says how long a message can be met.

State by region: the messages and their index; `WINDOWS` counts them (`cells`); `REVISIONS` has those that wait for a
first partner (`outer`); `AGGREGATES` rows held back (`out`); `OPERATOR` the small rest (`state`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from backend.batch import (
    ERROR_SCHEMA,
    NO_TIME,
    MicroBatch,
    Outcome,
    Proof,
)
from backend.joins import outer, state
from backend.joins.cells import CellPlace, Cells
from backend.joins.liveness import bucket_width, side_clocks
from backend.joins.out import Out
from backend.joins.probe import Meeting
from backend.joins.read import reach
from backend.joins.rows import JoinRows, Rows, offsets_of, together
from backend.joins.sides import LEFT, RIGHT
from backend.joins.spec import JoinSpec
from backend.joins.state import JoinLedger
from backend.messages.rows import digests
from backend.store.rows import StoreRows
from backend.store.workspace import Workspace
from backend.windows.micro_batch import joined


class JoinOperator:
    """A windowed join of two streams over one shard; see `backend.batch.Operator`.

    Args:
        spec: What to do.
    """

    replays = True
    """A join keeps messages of both sides."""

    def __init__(self, spec: JoinSpec) -> None:
        self.spec = spec
        self.rows = JoinRows(spec)
        self.out = Out(spec)
        self.result_schema = self.out.schema
        """`backend.joins.spec.JOIN_FIELDS`, then the fields of both sides."""
        self.input_fields = spec.input_fields
        """`left.<field>`, then `right.<field>`."""
        self.counts_offsets = spec.by_number
        """Whether its clocks are offsets; see `backend.batch.counts_offsets`."""

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
            Cells(work, self.spec.layout, ledger).settle()

    def proofs(self, work: Workspace) -> Iterable[Proof]:
        """Give what the message store must hold, by its cells."""
        ledger = state.read(work)
        return () if ledger is None else Cells(work, self.spec.layout, ledger).proofs()

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
        idle_ms = self._move_clocks()
        results = self.out.release(self.work, self.ledger, self.pairs, self.batch.time_ms, drain=self.batch.drain)
        for rows in self.new:
            self._store(rows)
        for rows in self.new:
            if rows.side.outer:
                results += self._unmatched(rows)
        self._expire()
        self.cells.write()
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

    def _move_clocks(self) -> int | None:
        """Move both sides' clocks on, and with them what can be joined; gives when one may move without input."""
        self.reached = {source: position.stream_time for source, position in self.batch.after.items()}
        if self.spec.by_number:
            for source, position in self.batch.after.items():
                self.reached[source] = position.next_offset - self.firsts.get(source, position.next_offset)
        ledger, (left, right) = self.ledger, self.spec.sides
        ledger.clocks, idle_ms = side_clocks(self.spec, ledger, self.reached, self.batch)
        ledger.lows = (
            max(ledger.lows[LEFT], left.first_alive(ledger.clocks[RIGHT])),
            max(ledger.lows[RIGHT], right.first_alive(ledger.clocks[LEFT])),
        )
        return idle_ms

    def _store(self, rows: Rows) -> None:
        """Store the new messages of a side whose cells live on."""
        fitting = self.codec.storable(rows)
        for place, here in self.cells.groups(rows.at, rows.stream, rows.partition):
            if self._dead(place, int(rows.offset[here].max())):
                fitting[here] = False
        found, index, rows = self.codec.encode(rows.where(fitting))
        keys, values = found.lists()
        self.cells.add(rows, digests(keys, values))
        self.work.put_many(keys, values)
        self.work.put_many(index, [b""] * len(index))
        if not self.spec.by_number:
            self._put_clocks(rows)

    def _put_clocks(self, rows: Rows) -> None:
        """Remember the clocks of stored messages that a later pair may hang on."""
        side = rows.side.number
        other = self.spec.sides[1 - side]
        times = [time for (stream, _), time in self.reached.items() if self.spec.side_of(stream) != side]
        passed = min(times, default=NO_TIME)  # by all source partitions of the other side, idle ones too
        state.drop_clocks(self.work, side, passed)
        if other.keep is None:
            return
        wanted = rows.clock > passed
        if self.spec.ranged:
            earliest, _ = reach(self.spec, side, rows.time)
            wanted &= other.expiry(earliest) <= rows.clock
        state.put_clocks(self.work, rows.where(wanted))

    def _dead(self, place: CellPlace, last: int) -> bool:
        """Tell whether a cell whose last offset is `last` can be met no more."""
        bucket, stream, partition = place
        gone = next((offset for s, p, offset in self.ledger.gone if (s, p) == (stream, partition)), NO_TIME)
        return bucket + self.ledger.width <= self.ledger.lows[self.spec.side_of(stream)] or last < gone

    def _unmatched(self, rows: Rows) -> list[pa.Table]:
        """Show messages that no partner can come for, in the order of the source; the others wait."""
        ledger, side, drain = self.ledger, rows.side, self.batch.drain
        first = outer.open_from(self.spec, side.number, ledger)
        keys, values, shown_due = outer.show(self.work, side, first, ledger.gone, drain=drain)
        ledger.waiting -= len(keys)
        lonely = ~self.matched[side.number]
        due = (rows.at < first) | (rows.offset < offsets_of(ledger.gone, rows.stream, rows.partition))
        waits = rows.take(np.flatnonzero(lonely & ~due & (not drain)))
        outer.wait(self.work, waits, self.codec.keys(waits))
        ledger.waiting += len(waits)
        fresh = lonely & (due | drain)
        both = together(self.codec.stored(keys, values, side), rows.take(np.flatnonzero(fresh)))
        self.metrics["unmatched"] += len(both)
        if not len(both):
            return []
        reasons = np.where(np.concatenate([shown_due, due])[both.origin], "full", "drain")
        return [self.out.table(reasons, {side.number: self.codec.half(both, np.arange(len(both)))})]

    def _expire(self) -> None:
        """Take dead cells out of the store, and raise the bound."""
        ledger = self.ledger
        dead = [place for place, cell in self.cells.known.items() if self._dead(place, cell.last)]
        if not self.spec.by_number and min(ledger.lows) != NO_TIME:
            ledger.bound = max(ledger.bound, min(ledger.lows) // ledger.width * ledger.width)
        self.cells.evict(dead)
        if dead and not self.spec.by_number:
            for side in (LEFT, RIGHT):
                state.drop_unused_clocks(self.work, side, self.cells.spans())
