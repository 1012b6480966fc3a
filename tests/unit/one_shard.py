"""One shard in memory for tests written by hand: rows in, results out, committed after each micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from backend.batch import EDGES, MESSAGE_FIELDS, NO_TIME, MicroBatch, Outcome, Position, SourcePartition
from backend.store.memory import MemoryStore
from backend.store.protocol import Changes, Region
from backend.store.workspace import Workspace
from backend.windows.operator import WindowOperator
from backend.windows.spec import WindowSpec

SCHEMA = pa.schema([pa.field("key", pa.string()), pa.field("value", pa.int64())])

Row = tuple[int, int, str | None, int | None]
"""(offset, event time, key, value)."""


class OneShard:
    """Runs a window operator over messages of `SCHEMA`."""

    def __init__(self, spec: WindowSpec) -> None:
        self.operator = WindowOperator(spec)
        self.store = MemoryStore()
        self.changes = Changes([], [], {})
        self.bounds: dict[int, bytes] = {}
        self.positions: dict[SourcePartition, Position] = {}
        self.version = 0
        self.outcome: Outcome | None = None

    def restart(self, spec: WindowSpec) -> None:
        """Go on with other options."""
        self.operator = WindowOperator(spec)

    def batch(
        self,
        rows: Sequence[Row] = (),
        time_ms: int = 0,
        *,
        drain: bool = False,
        more: Mapping[int | SourcePartition, Sequence[Row]] | None = None,
        timestamps: Sequence[int | None] | None = None,
    ) -> list[tuple[Any, ...]]:
        """Run and commit a micro-batch; `more` are rows of further partitions, or of (stream, partition).

        Gives the results as tuples.

        `timestamps` are the messages' own, as long as all rows.
        """
        after = dict(self.positions)
        columns: list[tuple[Any, ...]] = []
        for at, its_rows in {0: rows, **(more or {})}.items():
            source = at if isinstance(at, tuple) else (0, at)
            for offset, time, key, value in its_rows:
                old = after.get(source, Position(0, NO_TIME, time_ms))
                columns.append((*source, offset, time, old.stream_time, key, value))
                after[source] = Position(offset + 1, max(old.stream_time, time), time_ms)
        schema = pa.schema([*MESSAGE_FIELDS, *SCHEMA])
        arrays = [pa.array([row[at] for row in columns], f.type) for at, f in enumerate(schema)]
        own = None if timestamps is None else pa.chunked_array([pa.array(timestamps, pa.int64())])
        batch = MicroBatch(self.version, time_ms, pa.table(arrays, schema=schema), self.positions, after, drain, own)
        work = Workspace(self.store, self.bounds)
        self.outcome = self.operator.process(batch, work)
        self.changes = work.changes()
        self.store.write(self.changes)
        self.bounds, self.positions, self.version = dict(work.bounds), after, self.version + 1
        return self.results()

    def results(self) -> list[tuple[Any, ...]]:
        """Give the last results: reason, revision, start, end, then keys and aggregates."""
        assert self.outcome is not None
        rows = self.outcome.results.drop_columns(list(EDGES)).to_pylist()
        return [tuple(row.values()) for row in rows]

    def errors(self) -> list[tuple[int, int, str]]:
        """Give the last errors: partition, offset, reason."""
        assert self.outcome is not None
        return [(row["partition"], row["offset"], row["reason"]) for row in self.outcome.errors.to_pylist()]

    def written(self, region: Region) -> int:
        """Count the rows of a region that the last micro-batch wrote or deleted."""
        return sum(key[0] == region for key in self.changes.keys)

    def visible(self) -> dict[bytes, bytes]:
        """Give all committed rows that no bound hides."""
        return dict(Workspace(self.store, self.bounds).scan(b"\x00", None))
