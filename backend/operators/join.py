"""The join operator: new messages of both sides meet stored ones, and each other, once (SAMZA-552).

A micro-batch goes left first, then right, each in the order of the source, and its pairs come out in the order

* of the left messages, each with the stored right ones;
* of the right messages, each with the stored left ones and those of this micro-batch;
* then rows without a partner, left and then right.

Partners stand in the order (stream, source partition, offset). Everything is columnar: `join_read` reads what can be
met, `join_match` finds the pairs, `join_life` says how long a message can be joined. State by region: the messages and
their index; `WINDOWS` counts them (`join_cells`); `REVISIONS` has those that wait for a first partner (`join_outer`);
`AGGREGATES` rows held back (`join_out`); `OPERATOR` the small rest (`join_state`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from backend.batch import (
    ERROR_SCHEMA,
    MAX_TIME,
    MIN_TIME,
    NO_TIME,
    OFFSET,
    PARTITION,
    STREAM,
    TIME,
    MicroBatch,
    Outcome,
    Proof,
    SourcePartition,
)
from backend.joins import LEFT, RIGHT, JoinSpec
from backend.operators import join_cells, join_outer, join_state
from backend.operators.arrays import IntArray, Mask
from backend.operators.held import digests
from backend.operators.join_cells import Cells, Place
from backend.operators.join_life import Life, bucket_width, side_clocks, side_of
from backend.operators.join_match import Candidates
from backend.operators.join_out import Out
from backend.operators.join_read import load, reach
from backend.operators.join_rows import JoinRows, Rows, together
from backend.operators.join_state import JoinLedger
from backend.operators.turn import error_rows, joined, numbers
from backend.workspace import Workspace


class JoinOperator:
    """A windowed join of two streams over one shard; see `backend.batch.Operator`.

    Args:
        spec: What to do.
    """

    def __init__(self, spec: JoinSpec) -> None:
        self.spec = spec
        self.rows = JoinRows(spec)
        self.out = Out(spec)
        self.lives = (Life.of(spec, spec.left), Life.of(spec, spec.right))

    @property
    def result_schema(self) -> pa.Schema:
        """Schema of results: `backend.joins.JOIN_FIELDS`, then the fields of both sides."""
        return self.out.schema

    @property
    def input_fields(self) -> Sequence[str]:
        """Names of the message fields that the operator reads: `left.<field>`, then `right.<field>`."""
        return self.spec.input_fields

    def process(self, batch: MicroBatch, work: Workspace) -> Outcome:
        """Join one micro-batch with the state seen through `work`, and with itself."""
        ledger = join_state.read(work) or JoinLedger(join_state.FORMAT, batch.time_ms, bucket_width(self.spec))
        return _Step(self, batch, work, ledger).run()

    def replay_rows(self, messages: pa.Table) -> tuple[Sequence[bytes], Sequence[bytes]]:
        """Give the message-store rows of accepted messages, sorted by key: the same bytes that `process` writes."""
        return self.rows.replay_rows(messages)

    def settle(self, work: Workspace) -> None:
        """Delete replayed messages that were expired one side at a time, or by size."""
        ledger = join_state.read(work)
        if ledger is not None and not self.spec.by_number:
            join_cells.settle(work, self.spec.layout, ledger.width)

    def proofs(self, work: Workspace) -> Iterable[Proof]:
        """Give what the message store must hold, by its cells."""
        ledger = join_state.read(work)
        return () if ledger is None else join_cells.proofs(work, self.spec.layout, ledger.width)

    def describe(self) -> dict[str, object]:
        """Give the manifest's entry."""
        return self.spec.describe()


class _Step:
    """One micro-batch on its way."""

    def __init__(self, operator: JoinOperator, batch: MicroBatch, work: Workspace, ledger: JoinLedger) -> None:
        self.operator, self.spec, self.codec = operator, operator.spec, operator.rows
        self.batch, self.work, self.ledger = batch, work, ledger
        self.lows = ledger.lows
        self.errors: list[pa.Table] = []
        self.rejected: list[tuple[int, int, int]] = []
        self.pairs: list[tuple[pa.Table, Mask]] = []
        self.metrics: Counter[str] = Counter()

    def run(self) -> Outcome:
        """Take the steps."""
        self._count_offsets()
        messages = self._in_range(self.batch.messages)
        tables = [self.codec.of_side(messages, side) for side in self.spec.sides]
        arrived = [self._accept(side, table) for side, table in enumerate(tables)]
        self.tables, self.new = [table for table, _ in arrived], [rows for _, rows in arrived]
        self.matched = [np.zeros(len(rows), np.bool_) for rows in self.new]
        self.cells = Cells(self.work, self.ledger.width)
        self._match()
        clocks, idle_ms = self._move_clocks()
        results = self.operator.out.release(
            self.work, self.ledger, self.pairs, self.batch.time_ms, drain=self.batch.drain
        )
        keys = self._store()
        for side in (LEFT, RIGHT):
            if self.spec.sides[side].kept:
                results += self._unmatched(side, clocks[1 - side], keys[side])
        self._expire()
        self.cells.write(self.work)
        join_state.write(self.work, self.ledger)
        due = [self.operator.out.due_ms(self.ledger), idle_ms if self.ledger.waiting else None]
        return Outcome(
            results=joined(results, self.operator.result_schema),
            errors=joined(self.errors, ERROR_SCHEMA),
            next_due_ms=min((time for time in due if time is not None), default=None),
            replay_from=self.cells.replay_from(),
            rejected=self.rejected,
            message_count=self.cells.messages,
            message_digest=self.cells.digest,
            metrics=self.metrics,
        )

    # -- accept ---------------------------------------------------------------------------------------------------

    def _count_offsets(self) -> None:
        """Note where source partitions begin, for windows by number."""
        self.firsts: dict[SourcePartition, int] = {(s, p): offset for s, p, offset in self.ledger.firsts}
        if not self.spec.by_number:
            return
        messages = self.batch.messages
        seen: dict[SourcePartition, int] = {}
        columns = (numbers(messages, name).tolist() for name in (STREAM, PARTITION, OFFSET))
        for stream, partition, offset in zip(*columns, strict=True):
            seen.setdefault((stream, partition), offset)
        for source, position in self.batch.after.items():
            known = self.batch.before.get(source, position).next_offset
            begin = self.spec.first_offsets.get(source, min(known, seen.get(source, known)))
            self.firsts.setdefault(source, begin)
        self.ledger.firsts = [(s, p, offset) for (s, p), offset in sorted(self.firsts.items())]

    def _in_range(self, messages: pa.Table) -> pa.Table:
        """Refuse what the pack stage would have: standalone there is none before the operator."""
        times = numbers(messages, TIME)
        messages = self._refuse(
            messages,
            (times < MIN_TIME) | (times > MAX_TIME),
            "out_of_range",
            f"allowed are {MIN_TIME} to {MAX_TIME} ms",
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
        self.metrics[reason] += refused.num_rows

    def _accept(self, side: int, table: pa.Table) -> tuple[pa.Table, Rows]:
        """Refuse what is out of retention; give the rest, and its rows."""
        life, named = self.operator.lives[side], self.spec.sides[side]
        rows = self.codec.arrived(table, named)
        if self.spec.by_number:
            rows.at = rows.clock = self._numbers(rows)
            return table, rows
        gone = life.expiry(rows.at) <= rows.clock
        if not gone.any():
            return table, rows
        detail = f"{named.name}_retention is {life.keep} ms"
        self._to_errors(table.filter(pa.array(gone)), "out_of_retention", detail)
        return table.filter(pa.array(~gone)), rows.where(~gone)

    def _numbers(self, rows: Rows) -> IntArray:
        """Give the number of each message in its source partition."""
        first = np.zeros(len(rows), np.int64)
        for (stream, partition), offset in self.firsts.items():
            first[(rows.stream == stream) & (rows.partition == partition)] = offset
        return rows.offset - first

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
        if len(rows) and len(asking) and self.operator.lives[1 - side].keep is not None:
            least = int(self.operator.lives[1 - side].expiry(asking.at).min())
            marks = join_state.clocks_from(self.work, side, least)
            rows.clock = join_state.staircase(marks, rows.stream, rows.partition, rows.offset)

    def _alive(self, side: int, rows: Rows) -> Rows:
        """Leave out what can be joined by nobody any more, by time for all, or by size."""
        gone = join_state.gone_before(self.ledger.gone, rows.stream, rows.partition)
        return rows.where((rows.at >= self.lows[side]) & (rows.offset >= gone))

    def _arrive(self, side: int) -> None:
        rows = self.new[side]
        keep = None if self.spec.by_number else self.spec.sides[side].retention_messages
        join_state.count_arrivals(self.work, self.ledger, side, keep, (rows.stream, rows.partition, rows.offset))

    def _meet(self, side: int, others: Rows) -> None:
        """Find the pairs of one side's new messages with others, and write them down."""
        rows, spec = self.new[side], self.spec
        if not len(rows) or not len(others):
            return
        lives = self.operator.lives
        mine_until, other_until = lives[side].expiry(rows.at), lives[1 - side].expiry(others.at)
        code, other_code = _codes(rows, others)
        candidates = Candidates(other_code, others.time if spec.ranged else None)
        has_met: Mask = np.zeros(len(others), np.bool_)
        for asked, met in candidates.meet(code, *(reach(spec, side, rows.time) if spec.ranged else ())):
            lives_on = (other_until[met] > rows.clock[asked]) & (mine_until[asked] > others.clock[met])
            mine, other = asked[lives_on], met[lives_on]
            if not len(mine):
                continue
            mine, other = np.divmod(np.sort(mine * len(others) + other), len(others))
            self._write_pairs(side, rows, mine, others, other)
            self.matched[side][mine] = True
            has_met[other] = True
        if spec.sides[1 - side].kept and has_met.any():
            self._note_matched(1 - side, others, np.flatnonzero(has_met))

    def _write_pairs(self, side: int, rows: Rows, mine: IntArray, others: Rows, other: IntArray) -> None:
        late = self.operator.lives[side].late(rows.at, rows.clock)[mine]
        halves = [
            (rows.time[mine], self.codec.fields(rows, mine, self.spec.sides[side])),
            (others.time[other], self.codec.fields(others, other, self.spec.sides[1 - side])),
        ]
        left, right = halves if side == LEFT else halves[::-1]
        reasons = pa.array(np.where(late, "late", "full"), pa.string())
        self.pairs.append((self.operator.out.table(reasons, left, right), late))
        self.metrics["pairs"] += len(mine)
        self.metrics["late"] += int(late.sum())

    def _note_matched(self, side: int, rows: Rows, met: IntArray) -> None:
        """Remember which messages have a partner: stored ones wait no more."""
        fresh = rows.fresh[met] if rows.fresh is not None else np.full(len(met), -1, np.int64)
        self.matched[side][fresh[fresh >= 0]] = True
        stored = rows.take(met[fresh < 0])
        if len(stored):
            self.ledger.waiting -= join_outer.matched(self.work, side, stored)

    # -- store ----------------------------------------------------------------------------------------------------

    def _move_clocks(self) -> tuple[tuple[int, int], int | None]:
        """Move both sides' clocks on, and with them what can be joined."""
        reached: dict[SourcePartition, int] = {}
        for source, position in self.batch.after.items():
            reached[source] = position.stream_time
            if self.spec.by_number:
                reached[source] = position.next_offset - self.firsts[source]
        ledger, lives = self.ledger, self.operator.lives
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
            kept: Mask = self.codec.storable(rows.known, named)
            for place, here in self.cells.groups(rows.at, rows.stream, rows.partition):
                if self._dead(side, place, int(rows.offset[here].max())):
                    kept[here] = False
            table, stored = self.tables[side], rows.where(kept)
            found = self.codec.encode(table if kept.all() else table.filter(pa.array(kept)), named)
            stored = stored if not len(found.order) else stored.take(found.order)
            hashes = digests(found.keys, found.values)
            self.cells.add(stored.at, stored.stream, stored.partition, stored.offset, hashes)
            self.work.put_many(found.keys, found.values)
            self.work.put_many(found.index, [b""] * len(found.index))
            self._put_clocks(side, stored)
            at = np.flatnonzero(kept)[found.order] if named.kept else np.empty(0, np.int64)
            waiting.append(dict(zip(at.tolist(), found.keys, strict=False)))
        return waiting

    def _put_clocks(self, side: int, rows: Rows) -> None:
        """Remember the clocks of stored messages that a later pair may hang on."""
        other = self.operator.lives[1 - side]
        if self.spec.by_number or other.keep is None:
            return
        passed = self._slowest(1 - side)
        wanted = rows.clock > passed
        if self.spec.ranged:
            earliest, _ = reach(self.spec, side, rows.time)
            wanted &= other.expiry(earliest) <= rows.clock
        kept = rows.where(wanted)
        join_state.put_clocks(self.work, side, kept.clock, kept.stream, kept.partition, kept.offset)
        join_state.drop_clocks(self.work, side, passed)

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
        first = join_outer.open_from(self.spec, side, ledger.lows[side], other_clock)
        sized, drain = named.retention_messages is not None and not self.spec.by_number, self.batch.drain
        shown = join_outer.show(self.work, side, first, ledger.gone, sized=sized, drain=drain)
        ledger.waiting -= len(shown.keys)
        lonely = ~self.matched[side]
        due = (rows.at < first) | (rows.offset < join_state.gone_before(ledger.gone, rows.stream, rows.partition))
        waits = np.flatnonzero(lonely & ~due & (not drain))
        join_outer.wait(self.work, side, rows.take(waits), [keys[at] for at in waits.tolist()])
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
        return [table.take(pa.array(np.lexsort(places)))] if table.num_rows else []

    def _lonely(self, side: int, rows: Rows, picked: IntArray, due: Mask) -> pa.Table:
        half = rows.time[picked], self.codec.fields(rows, picked, self.spec.sides[side])
        reasons = pa.array(np.where(due, "full", "drain"), pa.string())
        return self.operator.out.table(reasons, *((half, None) if side == LEFT else (None, half)))

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
        join_cells.evict(self.work, self.spec.layout, self.cells, dead, ledger.bound, self.firsts)


def _codes(rows: Rows, others: Rows) -> tuple[IntArray, IntArray]:
    """Number the equal fields' codes of both; null ones ask for nothing."""
    if rows.equal is None or others.equal is None:
        return np.zeros(len(rows), np.int64), np.zeros(len(others), np.int64)
    both = pa.concat_arrays([part.cast(pa.binary()) for part in (rows.equal, others.equal)]).dictionary_encode()
    code, other = np.split(both.indices.to_numpy().astype(np.int64), [len(rows)])
    return np.where(rows.known, code, -1), other
