"""Drives the columnar join as the sources, the pack stage and the commit protocol do; rows are told by their places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pyarrow as pa

from backend.batch import BEFORE, MESSAGE_FIELDS, OFFSET, PARTITION, STREAM, TIME, MicroBatch, Outcome
from backend.joins import liveness
from backend.joins.operator import JoinOperator
from backend.joins.spec import JoinSpec
from backend.store.memory import MemoryStore
from backend.store.protocol import REPLAYED, Changes, Region, region_range
from recovery.restore.build import above_bounds
from tests.model.window_driver import Driver, Output, Shard, digest
from tests.oracle.joins import Pair
from tests.oracle.windows import Message, Source

SCHEMA = pa.schema([pa.field("k", pa.int64()), pa.field("place", pa.string())])


def told(message: Message) -> str:
    return " ".join(map(str, message.place))


def place_of(text: str | None) -> tuple[int, int, int] | None:
    if text is None:
        return None
    stream, partition, offset = map(int, text.split())
    return stream, partition, offset


class JoinDriver(Driver):
    """One shard of a join whose sides have the fields of `SCHEMA`.

    Args:
        spec: The join.
        sources: As in `Driver`.
        shortest: Shortest bucket in which messages expire; None for the product's own.
    """

    def __init__(self, spec: JoinSpec, sources: Sequence[Source], *, shortest: int | None = 1) -> None:
        super().__init__(JoinOperator(spec), (), sources, schema=spec.message_schema)
        self.spec, self.shortest = spec, shortest

    def _attempt(self, shard: Shard, batch: MicroBatch) -> tuple[Outcome, Changes]:
        if self.shortest is None:
            return super()._attempt(shard, batch)
        shortest = {"MIN_BUCKET_MS": self.shortest, "MIN_BUCKET_MESSAGES": self.shortest}
        with mock.patch.multiple(liveness, **shortest):
            return super()._attempt(shard, batch)

    def batch(self, messages: Sequence[Message], wall_ms: int, **options: Any) -> Output:
        self.sources += sorted({m.source for m in messages} - set(self.sources))
        output = super().batch(messages, wall_ms, **options)
        for shard in self.shards:
            assert shard.outcome is not None
            shard.in_future.update(shard.outcome.rejected)  # the commit record keeps them
        return output

    def table(self, messages: Sequence[tuple[Message, int]]) -> pa.Table:
        columns: dict[str, list[Any]] = {
            STREAM: [m.stream for m, _ in messages],
            PARTITION: [m.partition for m, _ in messages],
            OFFSET: [m.offset for m, _ in messages],
            TIME: [m.time for m, _ in messages],
            BEFORE: [before for _, before in messages],
        }
        fields = self.spec.message_schema.names[len(MESSAGE_FIELDS) :]
        for name in fields:
            side, _, own = name.partition(".")
            left = side == "left"
            columns[name] = [
                (told(m) if own == "place" else m.fields[own]) if (m.stream < self.spec.left_streams) == left else None
                for m, _ in messages
            ]
        return pa.table(columns, schema=self.spec.message_schema)

    def rows_of(self, results: pa.Table) -> list[Any]:
        assert results.schema.equals(self.operator.result_schema), results.schema
        pairs = []
        for row in results.to_pylist():
            left, right = place_of(row["left_place"]), place_of(row["right_place"])
            assert (row["left_time"] is None) == (left is None)
            assert (row["right_time"] is None) == (right is None)
            pairs.append(Pair(row["reason"], left, right))
        return pairs

    def _restored(self, number: int, shard: Shard) -> MemoryStore:
        assert shard.outcome is not None
        start, gone = shard.outcome.replay_from, shard.in_future
        again = [
            (m, before)
            for m, before in self.delivered
            if m.offset >= start.get(m.source, 2**63) and m.place not in gone
        ]
        rows = self.operator.replay_rows(self.table(again))
        assert rows.increasing()
        keys, values = above_bounds(rows, shard.bounds).lists()
        rebuilt = self._rebuilt(shard, dict(zip(keys, values, strict=True)))
        for region in sorted(REPLAYED):
            low, high = region_range(region)
            visible = max(low, shard.bounds.get(region, b""))
            assert dict(rebuilt.scan(low, high)) == dict(shard.store.scan(visible, high))
        stored = dict(rebuilt.scan(*region_range(Region.MESSAGES)))
        assert (shard.outcome.message_count, shard.outcome.message_digest) == (len(stored), digest(stored))
        self._check_proofs(shard, stored)
        return rebuilt
