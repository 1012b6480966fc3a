"""A small driver of the columnar operator: positions and prefix maxima by plain loops, shards in memory.

It is what the source, the pack stage and the commit protocol do around an operator, without Spark: messages below a
position are dropped, each micro-batch runs on a fresh workspace, and its changes are applied whole or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import xxhash

from backend.batch import (
    BEFORE,
    MESSAGE_FIELDS,
    NO_TIME,
    OFFSET,
    PARTITION,
    RESULT_FIELDS,
    STREAM,
    TIME,
    MicroBatch,
    Operator,
    Outcome,
    Position,
    counts_offsets,
)
from backend.store.protocol import REPLAYED, Changes, Region, region_range
from backend.store.workspace import Workspace
from tests.oracle.windows import Key, Message, Row, Source
from tests.support.twin import MemoryTwin

SCHEMA = pa.schema([pa.field("key", pa.string()), pa.field("value", pa.int64()), pa.field("weight", pa.float64())])


@dataclass
class Shard:
    """Committed state of one shard."""

    store: MemoryTwin = field(default_factory=MemoryTwin)
    bounds: dict[int, bytes] = field(default_factory=dict)
    outcome: Outcome | None = None
    in_future: set[tuple[int, int, int]] = field(default_factory=set)
    """Refused against the wall clock, which a replay cannot do again: the commit keeps them, as the pack stage's."""

    def visible(self) -> dict[bytes, bytes]:
        """Return the rows that no bound hides."""
        return dict(Workspace(self.store, self.bounds).scan(b"\x00", None))


@dataclass
class Output:
    """What one micro-batch gave, over all shards."""

    rows: list[Row]
    errors: list[tuple[tuple[int, int, int], str]]


def shard_of(key: Key, shards: int) -> int:
    """Route a group key; any fixed function will do."""
    return sum(repr(key).encode()) % shards


class Driver:
    """Runs an operator over one or more shards.

    Args:
        operator: The operator under test.
        keys: Fields of the group key, which is also the routing key.
        sources: All source partitions, known from the start as a source's listing gives them.
        shards: How many.
        schema: The messages' own fields.
        by_number: Windows are named by their first message.
        max_ahead_ms: Event times further ahead of the batch time do not move stream time.
    """

    def __init__(
        self,
        operator: Operator,
        keys: Sequence[str],
        sources: Sequence[Source],
        *,
        shards: int = 1,
        schema: pa.Schema = SCHEMA,
        by_number: bool = False,
        max_ahead_ms: int | None = None,
    ) -> None:
        self.operator, self.keys, self.schema, self.by_number = operator, tuple(keys), schema, by_number
        self.max_ahead_ms = max_ahead_ms
        self.shards = [Shard() for _ in range(shards)]
        self.sources = list(sources)
        self.positions: dict[Source, Position] = {}
        self.delivered: list[tuple[Message, int]] = []
        self.version = 0

    def batch(
        self,
        messages: Sequence[Message],
        wall_ms: int,
        *,
        drain: bool = False,
        twice: bool = False,
        skipped: Sequence[Message] = (),
    ) -> Output:
        """Run one micro-batch on all shards and commit it.

        Args:
            messages: Any order; those below a position are dropped, and of equal places all but one.
            wall_ms: Batch time.
            drain: The input ends.
            twice: Throw a first attempt away and compare it with the second.
            skipped: Messages that the pack stage refused: their source partitions are as idle as without them.
        """
        fresh, after = self._advance(messages, wall_ms)
        for message in skipped:
            position = after[message.source]
            reached = max(position.next_offset, message.offset + 1)
            after[message.source] = Position(reached, position.stream_time, position.active_ms)
        firsts: dict[Source, int] = {}
        for message in [*(m for m, _ in fresh), *skipped]:
            if message.source not in self.positions or not self.positions[message.source].next_offset:
                firsts[message.source] = min(firsts.get(message.source, message.offset), message.offset)
        output = Output([], [])
        for number, shard in enumerate(self.shards):
            mine = [(m, b) for m, b in fresh if shard_of(self._key(m), len(self.shards)) == number]
            table = self.table(mine)
            batch = MicroBatch(self.version, wall_ms, table, dict(self.positions), after, drain, firsts=firsts)
            outcome, changes = self._attempt(shard, batch)
            if twice:
                again, same = self._attempt(shard, batch)
                assert again.results.equals(outcome.results)
                assert again.errors.equals(outcome.errors)
                assert (list(same.keys), list(same.values)) == (list(changes.keys), list(changes.values))
            shard.store.write(changes)
            shard.bounds, shard.outcome = dict(changes.bounds), outcome
            output.rows.extend(self.rows_of(outcome.results))
            errors = _errors_of(outcome.errors)
            shard.in_future.update(place for place, reason in errors if reason == "in_future")
            output.errors.extend(errors)
        self.positions = after
        self.delivered.extend(fresh)
        self.version += 1
        return output

    def _attempt(self, shard: Shard, batch: MicroBatch) -> tuple[Outcome, Changes]:
        work = Workspace(shard.store, shard.bounds)
        outcome = self.operator.process(batch, work)
        return outcome, work.changes()

    def _advance(
        self, messages: Sequence[Message], wall_ms: int
    ) -> tuple[list[tuple[Message, int]], dict[Source, Position]]:
        after = dict(self.positions)
        for source in self.sources:
            after.setdefault(source, Position(0, NO_TIME, wall_ms))
        fresh = []
        for message in sorted(messages, key=lambda m: m.place):
            position = after[message.source]
            if message.offset < position.next_offset:
                continue
            fresh.append((message, position.stream_time))
            time, active_ms = position.stream_time, position.active_ms
            accepted = self.max_ahead_ms is None or message.time <= wall_ms + self.max_ahead_ms
            if accepted:
                time = max(time, message.time)
            if accepted or counts_offsets(self.operator):
                active_ms = wall_ms
            after[message.source] = Position(message.offset + 1, time, active_ms)
        return fresh, after

    def _key(self, message: Message) -> Key:
        return tuple(message.fields[name] for name in self.keys)

    def table(self, messages: Sequence[tuple[Message, int]]) -> pa.Table:
        """Lay out messages, each with the newest event time before it, as an operator reads them."""
        columns: dict[str, list[Any]] = {
            STREAM: [m.stream for m, _ in messages],
            PARTITION: [m.partition for m, _ in messages],
            OFFSET: [m.offset for m, _ in messages],
            TIME: [m.time for m, _ in messages],
            BEFORE: [before for _, before in messages],
        }
        fields = [self.schema.field(name) for name in self.operator.input_fields]
        for entry in fields:
            columns[entry.name] = [m.fields[entry.name] for m, _ in messages]
        return pa.table(columns, schema=pa.schema([*MESSAGE_FIELDS, *fields]))

    def rows_of(self, results: pa.Table) -> list[Row]:
        """Give results as the oracle writes them."""
        assert results.schema.equals(self.operator.result_schema), results.schema
        rows = []
        values = [n for n in results.column_names[len(RESULT_FIELDS) :] if n not in self.keys]
        for row in results.to_pylist():
            key, aggregates = tuple(row[name] for name in self.keys), tuple(row[name] for name in values)
            rows.append(Row(row["reason"], row["revision"], *self._named(row, key, aggregates)))
        return rows

    def _named(self, row: dict[str, Any], *values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Give what names a row's window, its values, and of windows by number the first and the last message."""
        if not self.by_number:
            return (row["window_start"], row["window_end"]), *values
        first, last = ((row[f"{side}_partition"], row[f"{side}_offset"]) for side in ("start", "last"))
        return (first + last if self.operator.spec.window.kind == "sliding" else first), *values, first, last

    # -- what a restore must give ---------------------------------------------------------------------------------

    def check_restore(self) -> None:
        """Rebuild each shard's messages from the source as a restore does, and compare with what is stored."""
        for number, shard in enumerate(self.shards):
            self._restored(number, shard)

    def lose_disk(self) -> None:
        """Go on with what a restore gives, without the rows that bounds hide."""
        for number, shard in enumerate(self.shards):
            if shard.outcome is not None:
                before, shard.store = shard.visible(), self._restored(number, shard)
                shard.store = MemoryTwin(shard.visible())
                assert shard.visible() == before

    def _restored(self, number: int, shard: Shard) -> MemoryTwin:
        outcome = shard.outcome
        assert outcome is not None
        again = [
            (m, b)
            for m, b in self.delivered
            if shard_of(self._key(m), len(self.shards)) == number
            and m.offset >= outcome.replay_from.get(m.source, 2**63)
            and m.place not in {*outcome.rejected, *shard.in_future}
        ]
        keys, values = self.operator.replay_rows(self.table(again)).lists()
        assert list(keys) == sorted(keys)
        assert {key[0] for key in keys} <= REPLAYED
        rebuilt = self._rebuilt(shard, {k: v for k, v in zip(keys, values, strict=True) if _alive(shard, k)})
        for region in sorted(REPLAYED):
            assert dict(rebuilt.scan(*region_range(region))) == dict(shard.store.scan(*_visible(shard, region)))
        stored = dict(rebuilt.scan(*region_range(Region.MESSAGES)))
        assert outcome.message_count == len(stored)
        assert outcome.message_digest == digest(stored)
        self._check_proofs(shard, stored)
        return rebuilt

    def _rebuilt(self, shard: Shard, rows: dict[bytes, bytes]) -> MemoryTwin:
        """Put replayed rows beside everything that the changelog gives, and let the operator settle them."""
        logged = {key: value for key, value in shard.store.scan(b"", None) if key[0] not in REPLAYED}
        store = MemoryTwin({**logged, **rows})
        work = Workspace(store, shard.bounds)
        self.operator.settle(work)
        store.write(work.changes())
        return store

    def _check_proofs(self, shard: Shard, stored: dict[bytes, bytes]) -> None:
        for proof in self.operator.proofs(Workspace(shard.store, shard.bounds)):
            inside = {k: v for k, v in stored.items() if proof.start <= k < proof.end}
            assert (len(inside), digest(inside)) == (proof.count, proof.digest), proof.label


def digest(rows: dict[bytes, bytes]) -> int:
    """Sum the hashes of messages, as the contract says."""
    return sum(xxhash.xxh3_64_intdigest(key + value) for key, value in rows.items()) % 2**64


def _alive(shard: Shard, key: bytes) -> bool:
    return key >= shard.bounds.get(key[0], b"")


def _visible(shard: Shard, region: int) -> tuple[bytes, bytes]:
    start, end = region_range(region)
    return max(start, shard.bounds.get(region, b"")), end


def _errors_of(errors: pa.Table) -> list[tuple[tuple[int, int, int], str]]:
    return [((e["stream"], e["partition"], e["offset"]), e["reason"]) for e in errors.to_pylist()]
