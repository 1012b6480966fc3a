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
    EVENT_TIMES,
    MAX_EVENT_TIME,
    MIN_EVENT_TIME,
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
from backend.joins.liveness import Life, side_of
from backend.joins.out import Out
from backend.joins.read import load, reach
from backend.joins.rows import JoinRows, Rows, together
from backend.joins.sides import LEFT, RIGHT
from backend.joins.spec import JoinSpec
from backend.joins.state import JoinLedger
from backend.store.workspace import Workspace
from backend.windows.columns.arrays import IntArray, Mask, parts
from backend.windows.micro_batch import error_rows, numbers


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
        self.lives = (Life.of(spec, spec.left), Life.of(spec, spec.right))
        self.lows = ledger.lows
        self.errors: list[pa.Table] = []
        self.rejected: list[tuple[int, int, int]] = []
        self.pairs: list[tuple[pa.Table, Mask]] = []
        """Result rows, and which of them came late."""
        self.metrics: Counter[str] = Counter()

    def meet(self) -> None:
        """Accept the new messages and find their pairs."""
        self._change_retentions()
        self._count_offsets()
        messages = self._in_range(self.batch.messages)
        arrived = [self._accept(side.number, self.codec.of_side(messages, side)) for side in self.spec.sides]
        self.tables, self.new = [table for table, _ in arrived], [rows for _, rows in arrived]
        self.matched = [np.zeros(len(rows), np.bool_) for rows in self.new]
        self.cells = Cells(self.work, self.ledger.width)
        self._match()

    def _change_retentions(self) -> None:
        """Note what is gone under the retentions of the last commit, where they were others: it stays gone."""
        ledger, spec = self.ledger, self.spec
        now = tuple((side.retention_ms, side.retention_messages) for side in spec.sides)
        for side, (before, after) in enumerate(zip(ledger.retentions, now, strict=False)):
            if before == after or spec.by_number:
                continue
            life = self.lives[side]
            if before[0] is not None and (life.keep is None or life.keep > before[0]):
                low = replace(life, keep=before[0]).first_alive(ledger.clocks[side])
                closed = max(ledger.closed[side], low)
                ledger.closed = (closed, ledger.closed[RIGHT]) if side == LEFT else (ledger.closed[LEFT], closed)
            if before[1] != after[1]:
                mine = {at: p for at, p in self.batch.before.items() if side_of(at[0], spec) == side}
                state.change_size(self.work, ledger, side, before[1], after[1], mine)
        ledger.retentions = now

    # -- accept ---------------------------------------------------------------------------------------------------

    def _count_offsets(self) -> None:
        """Note where source partitions begin, for windows by number."""
        self.firsts: dict[SourcePartition, int] = {(s, p): offset for s, p, offset in self.ledger.firsts}
        if not self.spec.by_number:
            return
        stream, partition, offset = (numbers(self.batch.messages, name) for name in (STREAM, PARTITION, OFFSET))
        begins = np.ones(len(offset), np.bool_)  # they come sorted by stream, partition and offset
        begins[1:] = (stream[1:] != stream[:-1]) | (partition[1:] != partition[:-1])
        first = (column[begins].tolist() for column in (stream, partition, offset))
        seen = {(s, p): begin for s, p, begin in zip(*first, strict=True)}  # all there is of what older releases queued
        known = {**seen, **self.batch.firsts, **self.spec.first_offsets}
        for source, position in self.batch.after.items():
            if position.next_offset:  # else it has brought nothing yet
                self.firsts.setdefault(source, known.get(source, position.next_offset))
        self.ledger.firsts = [(s, p, offset) for (s, p), offset in sorted(self.firsts.items())]

    def _in_range(self, messages: pa.Table) -> pa.Table:
        """Refuse what the pack stage would have: standalone there is none before the operator."""
        times = numbers(messages, TIME)
        messages = self._refuse(
            messages,
            (times < MIN_EVENT_TIME) | (times > MAX_EVENT_TIME),
            "out_of_range",
            EVENT_TIMES,
        )
        if self.spec.max_ahead_ms is None:
            return messages
        latest = self.batch.time_ms + self.spec.max_ahead_ms
        return self._refuse(messages, numbers(messages, TIME) > latest, "in_future", f"later than {latest} ms")

    def _refuse(self, messages: pa.Table, bad: Mask, reason: str, detail: str) -> pa.Table:
        """Send messages of both sides to the errors; give the others."""
        if not bad.any():
            return messages
        refused = messages.filter(pa.array(bad))
        for side in self.spec.sides:
            self._to_errors(self.codec.of_side(refused, side), reason, detail)
        return messages.filter(pa.array(~bad))

    def _to_errors(self, refused: pa.Table, reason: str, detail: str) -> None:
        """Send messages of one side to the errors; a replay leaves them out."""
        if not refused.num_rows:
            return
        self.errors.append(error_rows(refused, reason, detail))
        bound = NO_TIME if self.spec.by_number else self.ledger.bound
        above = refused.filter(pa.array(numbers(refused, TIME) >= bound))
        columns = (numbers(above, name).tolist() for name in (STREAM, PARTITION, OFFSET))
        self.rejected += zip(*columns, strict=True)

    def _accept(self, side: int, table: pa.Table) -> tuple[pa.Table, Rows]:
        """Refuse what is out of retention; give the rest, and its rows."""
        life, named = self.lives[side], self.spec.sides[side]
        rows = self.codec.arrived(table, named)
        if self.spec.by_number:
            rows.at = rows.clock = self._numbers(rows)
            return table, rows
        gone = (life.expiry(rows.at) <= rows.clock) | (rows.at < self.ledger.closed[side])
        if not gone.any():
            return table, rows
        detail = f"{named.name}_retention is {life.keep} ms"
        self._to_errors(table.filter(pa.array(gone)), "out_of_retention", detail)
        return table.filter(pa.array(~gone)), rows.where(~gone)

    def _numbers(self, rows: Rows) -> IntArray:
        """Give the number of each message in its source partition."""
        return rows.offset - state.offsets_of(self.ledger.firsts, rows.stream, rows.partition)

    # -- match ----------------------------------------------------------------------------------------------------

    def _match(self) -> None:
        """Find the pairs: left messages with stored right ones, then right ones with all left ones."""
        stored = list(load(self.codec, self.work, (self.new[LEFT], self.new[RIGHT]), self.cells.messages))
        for side in (LEFT, RIGHT):
            self._set_clocks(side, stored[side])
        self._meet(LEFT, self._alive(RIGHT, stored[RIGHT]))
        self._arrive(LEFT)
        self._meet(RIGHT, self._alive(LEFT, together(stored[LEFT], self.new[LEFT])))
        self._arrive(RIGHT)

    def _set_clocks(self, side: int, rows: Rows) -> None:
        if self.spec.by_number:
            rows.at = rows.clock = self._numbers(rows)
            return
        asking = self.new[1 - side]
        rows.clock = np.full(len(rows), NO_TIME, np.int64)
        if len(rows) and len(asking) and self.lives[1 - side].keep is not None:
            least = int(self.lives[1 - side].expiry(asking.at).min())
            marks = state.clocks_from(self.work, side, least)
            rows.clock = state.staircase(marks, rows.stream, rows.partition, rows.offset)

    def _alive(self, side: int, rows: Rows) -> Rows:
        """Leave out what can be joined by nobody any more, by time for all, or by size."""
        gone = state.gone_before(self.ledger.gone, rows.stream, rows.partition)
        return rows.where((rows.at >= self.lows[side]) & (rows.offset >= gone))

    def _arrive(self, side: int) -> None:
        rows = self.new[side]
        keep = None if self.spec.by_number else self.spec.sides[side].retention_messages
        state.count_arrivals(self.work, self.ledger, side, keep, (rows.stream, rows.partition, rows.offset))

    def _meet(self, side: int, others: Rows) -> None:
        """Find the pairs of one side's new messages with others, and write them down."""
        rows, spec = self.new[side], self.spec
        if not len(rows) or not len(others):
            return
        lives = self.lives
        mine_until, other_until = lives[side].expiry(rows.at), lives[1 - side].expiry(others.at)
        code, other_code = _codes(rows, others)
        candidates = match.Candidates(other_code, others.time if spec.ranged else None)
        has_met: Mask = np.zeros(len(others), np.bool_)
        for asked, met in candidates.meet(code, *(reach(spec, side, rows.time) if spec.ranged else ())):
            lives_on = (other_until[met] > rows.clock[asked]) & (mine_until[asked] > others.clock[met])
            mine, other = asked[lives_on], met[lives_on]
            if not len(mine):
                continue
            mine, other = np.divmod(np.sort(mine * len(others) + other), len(others))
            sizes = [
                self.codec.sizes(rows, mine, spec.sides[side]),
                self.codec.sizes(others, other, spec.sides[1 - side]),
            ]
            for part in parts(np.maximum(*sizes), match.CHUNK_BYTES):
                self._write_pairs(side, rows, mine[part], others, other[part])
            self.matched[side][mine] = True
            has_met[other] = True
        if spec.sides[1 - side].outer and has_met.any():
            self._note_matched(1 - side, others, np.flatnonzero(has_met))

    def _write_pairs(self, side: int, rows: Rows, mine: IntArray, others: Rows, other: IntArray) -> None:
        late = self.lives[side].late(rows.at, rows.clock)[mine]
        halves = [
            (rows.time[mine], self.codec.fields(rows, mine, self.spec.sides[side])),
            (others.time[other], self.codec.fields(others, other, self.spec.sides[1 - side])),
        ]
        left, right = halves if side == LEFT else halves[::-1]
        reasons = pa.array(np.where(late, "late", "full"), pa.string())
        self.pairs.append((self.out.table(reasons, left, right), late))
        self.metrics["pairs"] += len(mine)
        self.metrics["late"] += int(late.sum())

    def _note_matched(self, side: int, rows: Rows, met: IntArray) -> None:
        """Remember which messages have a partner: stored ones wait no more."""
        fresh, _, new = rows.of_parts(met)
        self.matched[side][new] = True
        stored = rows.take(met[~fresh])
        if len(stored):
            self.ledger.waiting -= outer.matched(self.work, side, stored)


def _codes(rows: Rows, others: Rows) -> tuple[IntArray, IntArray]:
    """Number the equal fields' codes of both; null ones ask for nothing."""
    if rows.equal is None or others.equal is None:
        return np.zeros(len(rows), np.int64), np.zeros(len(others), np.int64)
    both = pa.concat_arrays([part.cast(pa.binary()) for part in (rows.equal, others.equal)]).dictionary_encode()
    code, other = np.split(both.indices.to_numpy().astype(np.int64), [len(rows)])
    return np.where(rows.known, code, -1), other
