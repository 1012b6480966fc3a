"""What came to a join, and what it meets: the first half of a micro-batch.

New messages are accepted or refused, stored ones that they can reach are read, and pairs are written down in the order
in which backend.joins.operator says they come out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pyarrow as pa

from backend.batch import (
    NO_TIME,
    OFFSET,
    PARTITION,
    STREAM,
    TIME,
    MicroBatch,
    SourcePartition,
)
from backend.joins import match, outer, state
from backend.joins.cells import Cells
from backend.joins.out import Out
from backend.joins.read import load, reach
from backend.joins.rows import JoinRows, Place, Rows, offsets_of, together
from backend.joins.sides import LEFT, RIGHT, Side
from backend.joins.spec import JoinSpec
from backend.joins.state import JoinLedger
from backend.store.workspace import Workspace
from backend.windows.columns.arrays import IntArray, Mask, grouped, parts
from backend.windows.micro_batch import beyond, error_rows, numbers, time_limits


class Meeting:
    """New messages of both sides, and their pairs.

    Args:
        spec: The join.
        codec: Its rows.
        out: Its results.
        batch: What came in.
        work: Where state is read and left.
        ledger: The join's ledger; its counts of arrivals are kept up to date.
    """

    def __init__(
        self, spec: JoinSpec, codec: JoinRows, out: Out, batch: MicroBatch, work: Workspace, ledger: JoinLedger
    ) -> None:
        self.spec, self.codec, self.out = spec, codec, out
        self.batch, self.work, self.ledger = batch, work, ledger
        self.errors: list[pa.Table] = []
        self.rejected: list[Place] = []
        self.pairs: list[tuple[pa.Table, Mask]] = []
        """Result rows, and which of them came late."""
        self.metrics: Counter[str] = Counter()

    def meet(self) -> None:
        """Accept the new messages and find their pairs."""
        self._change_retentions()
        self._count_offsets()
        tables = [self.codec.of_side(self.batch.messages, side) for side in self.spec.sides]
        for first, last, reason, detail in time_limits(self.batch.time_ms, self.spec.max_ahead_ms):
            tables = [self._refuse(table, beyond(table, first, last), reason, detail) for table in tables]
        self.new = [self._accept(table, side) for table, side in zip(tables, self.spec.sides, strict=True)]
        self.matched = [np.zeros(len(rows), np.bool_) for rows in self.new]
        self.cells = Cells(self.work, self.spec.layout, self.ledger)
        self._match()

    def _change_retentions(self) -> None:
        """Note what is gone under the retentions of the last commit, where they were others: it stays gone."""
        ledger, spec = self.ledger, self.spec
        now = tuple((side.retention_ms, side.retention_messages) for side in spec.sides)
        closed = [*ledger.closed]
        for side, before, after in zip(spec.sides, ledger.retentions, now, strict=False):
            if before == after or spec.by_number:
                continue
            if before[0] is not None and (side.keep is None or side.keep > before[0]):
                low = replace(side, retention_ms=before[0]).first_alive(ledger.clocks[side.number])
                closed[side.number] = max(closed[side.number], low)
            if before[1] != after[1]:
                mine = {at: p for at, p in self.batch.before.items() if spec.side_of(at[0]) == side.number}
                state.change_size(self.work, ledger, side, before[1], mine)
        ledger.closed, ledger.retentions = (closed[LEFT], closed[RIGHT]), now

    # -- accept ---------------------------------------------------------------------------------------------------

    def _count_offsets(self) -> None:
        """Note where source partitions begin, for windows by number."""
        self.firsts: dict[SourcePartition, int] = {(s, p): offset for s, p, offset in self.ledger.firsts}
        fresh = {
            source: position.next_offset
            for source, position in self.batch.after.items()
            if position.next_offset and source not in self.firsts  # else it has brought nothing yet
        }
        if not self.spec.by_number or not fresh:
            return
        stream, partition, offset = (numbers(self.batch.messages, name) for name in (STREAM, PARTITION, OFFSET))
        # all there is of what older releases queued
        seen = {source: int(offset[rows[0]]) for source, rows in grouped(stream, partition)}
        known = {**fresh, **seen, **self.batch.firsts, **self.spec.first_offsets}
        self.firsts |= {source: known[source] for source in fresh}
        self.ledger.firsts = [(s, p, offset) for (s, p), offset in sorted(self.firsts.items())]

    def _refuse(self, table: pa.Table, bad: Mask, reason: str, detail: str) -> pa.Table:
        """Send messages of one side to the errors, which a replay leaves out; give the others."""
        if not bad.any():
            return table
        refused = table.filter(pa.array(bad))
        self.errors.append(error_rows(refused, reason, detail))
        above = refused.filter(pa.array(numbers(refused, TIME) >= self.ledger.bound))
        columns = (numbers(above, name).tolist() for name in (STREAM, PARTITION, OFFSET))
        self.rejected += zip(*columns, strict=True)
        return table.filter(pa.array(~bad))

    def _accept(self, table: pa.Table, side: Side) -> Rows:
        """Refuse what is out of retention; give the rest as rows."""
        rows = self.codec.arrived(table, side)
        if self.spec.by_number:
            rows.number_from(self.ledger.firsts)
        gone = (side.expiry(rows.at) <= rows.clock) | (rows.at < self.ledger.closed[side.number])
        if not gone.any():
            return rows
        table = self._refuse(table, gone, "out_of_retention", f"{side.name}_retention is {side.keep} ms")
        return replace(rows.where(~gone), table=table, origin=np.arange(len(table)))

    # -- match ----------------------------------------------------------------------------------------------------

    def _match(self) -> None:
        """Find the pairs: left messages with stored right ones, then right ones with all left ones."""
        left, right = self.new
        stored = load(self.codec, self.work, (left, right), self.cells.messages)
        for rows in stored:
            self._set_clocks(rows)
        self._meet(left, self._alive(stored[RIGHT]))
        state.count_arrivals(self.work, self.ledger, left)
        self._meet(right, self._alive(together(stored[LEFT], left)))
        state.count_arrivals(self.work, self.ledger, right)

    def _set_clocks(self, rows: Rows) -> None:
        if self.spec.by_number:
            rows.number_from(self.ledger.firsts)
            return
        asking = self.new[1 - rows.side.number]
        rows.clock = np.full(len(rows), NO_TIME, np.int64)
        if len(rows) and len(asking) and asking.side.keep is not None:
            rows.clock = state.staircase(self.work, rows, int(asking.side.expiry(asking.at).min()))

    def _alive(self, rows: Rows) -> Rows:
        """Leave out what can be joined by nobody any more, by time for all, or by size."""
        gone = offsets_of(self.ledger.gone, rows.stream, rows.partition)
        return rows.where((rows.at >= self.ledger.lows[rows.side.number]) & (rows.offset >= gone))

    def _meet(self, rows: Rows, others: Rows) -> None:
        """Find the pairs of one side's new messages with others, and write them down."""
        if not len(rows) or not len(others):
            return
        ranged = self.spec.ranged
        mine_until, other_until = rows.side.expiry(rows.at), others.side.expiry(others.at)
        code, other_code = _codes(rows, others)
        candidates = match.Candidates(other_code, others.time if ranged else None)
        has_met: Mask = np.zeros(len(others), np.bool_)
        for asked, met in candidates.meet(code, *(reach(self.spec, rows.side.number, rows.time) if ranged else ())):
            lives_on = (other_until[met] > rows.clock[asked]) & (mine_until[asked] > others.clock[met])
            mine, other = asked[lives_on], met[lives_on]
            if not len(mine):
                continue
            mine, other = np.divmod(np.sort(mine * len(others) + other), len(others))
            sizes = np.maximum(self.codec.sizes(rows, mine), self.codec.sizes(others, other))
            for part in parts(sizes, match.CHUNK_BYTES):
                self._write_pairs(rows, mine[part], others, other[part])
            self.matched[rows.side.number][mine] = True
            has_met[other] = True
        if others.side.outer and has_met.any():
            self._note_matched(others.where(has_met))

    def _write_pairs(self, rows: Rows, mine: IntArray, others: Rows, other: IntArray) -> None:
        late = rows.side.late(rows.at, rows.clock)[mine]
        halves = {rows.side.number: self.codec.half(rows, mine), others.side.number: self.codec.half(others, other)}
        self.pairs.append((self.out.table(np.where(late, "late", "full"), halves), late))
        self.metrics["pairs"] += len(mine)
        self.metrics["late"] += int(late.sum())

    def _note_matched(self, rows: Rows) -> None:
        """Remember which messages have a partner: stored ones wait no more."""
        fresh = rows.fresh
        self.matched[rows.side.number][rows.origin[fresh] - len(rows.values)] = True
        if not fresh.all():
            self.ledger.waiting -= outer.matched(self.work, rows.where(~fresh))


def _codes(rows: Rows, others: Rows) -> tuple[IntArray, IntArray]:
    """Number the equal fields' codes of both; null ones ask for nothing."""
    if rows.equal is None or others.equal is None:
        return np.zeros(len(rows), np.int64), np.zeros(len(others), np.int64)
    both = pa.concat_arrays([part.cast(pa.binary()) for part in (rows.equal, others.equal)]).dictionary_encode()
    code, other = np.split(both.indices.to_numpy().astype(np.int64), [len(rows)])
    return np.where(rows.known, code, -1), other
