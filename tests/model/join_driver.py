"""Drives the columnar join as the sources, the pack stage and the commit protocol do; rows are told by their places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from backend.batch import BEFORE, MESSAGE_FIELDS, OFFSET, PARTITION, STREAM, TIME
from backend.joins import JoinSpec
from backend.operators.join import JoinOperator
from tests.model.window_driver import Driver, Output
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
    """One shard of a join whose sides have the fields of `SCHEMA`."""

    def __init__(self, spec: JoinSpec, sources: Sequence[Source]) -> None:
        super().__init__(JoinOperator(spec), (), sources, schema=spec.message_schema)
        self.spec = spec

    def batch(self, messages: Sequence[Message], wall_ms: int, **options: Any) -> Output:
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
