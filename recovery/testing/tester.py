"""`OperatorTester`: one shard of a job without Spark, through the code that runs inside Spark's tasks.

It plays Spark: keeps the committed pointer, hands rows to attempts, commits or does not, moves the clock. The attempt,
the local database, the staged files, the changelog and the restore are the product's own.

    tester = OperatorTester(job, pa.schema([("at", pa.int64()), ("n", pa.int64())]), tmp_path)
    tester.batch([{"at": 0, "n": 1}])
    tester.crash([{"at": 10, "n": 2}])       # staged and logged, never committed
    tester.lose_disk()
    tester.restore()                          # changelog and replay, counts and digests proven
    assert tester.batch().results.to_pylist() == [...]   # the rows of the crash come again, once

What happens before a shard sees rows is not here: parsing, routing by key, and of the pack stage's checks `malformed`
and `no_event_time`. `max_ahead` is checked as there: a message may give the record's own timestamp as `_timestamp`,
if that is no field.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from backend.batch import (
    BEFORE,
    ERROR_SCHEMA,
    MESSAGE_FIELDS,
    NO_TIME,
    OFFSET,
    PARTITION,
    STREAM,
    TIME,
    Operator,
    Position,
)
from backend.batch import SourcePartition as Key
from backend.spark.pack.frames import TIMESTAMP_IN
from backend.spark.pack.judging import latest
from backend.windows.definitions import Duration, duration_ms
from backend.windows.micro_batch import error_rows
from recovery.attempt import Done, positions_of, run_attempt
from recovery.changelog import Changelog, FileChangelog
from recovery.commit.pointer import Pointer, decode, encode
from recovery.commit.shard_directory import ShardDirectory
from recovery.jobs import ShardJob
from recovery.restore.build import Restored, above_bounds, accepted, restore_shard
from recovery.share import ShardInput

QUERY_ID = "tester"


@dataclass(frozen=True, slots=True)
class Emitted:
    """What a committed micro-batch gave.

    Attributes:
        results: The operator's result rows.
        errors: Rows that it refused.
        metrics: Its counters.
    """

    results: pa.Table
    errors: pa.Table
    metrics: Mapping[str, float | str]


@dataclass(slots=True)
class _Topic:
    """One source partition: everything ever sent, and what no committed micro-batch has read yet."""

    sent: list[dict[str, Any]] = field(default_factory=list)
    next_offset: int = 0


class OperatorTester:
    """Feed an operator micro-batches, move time, crash it and restore it.

    Args:
        job: What `stream(...).window(...).aggregate(...)`, `join(...)` or `.process(...)` gives, or an `Operator`.
        schema: Fields of a message; of a join two, left and right, unless both sides have the same.
        directory: Local state and changelog; pytest's `tmp_path` for example.
        event_time: Field with the event time, integer milliseconds; by default the job's, of a join each side's.
            Messages may give `_time` instead.
        changelog: Where commits are logged; by default files in `directory`.
        now_ms: Batch time of the first micro-batch.

    Raises:
        ValueError: A schema too many, or too few.
    """

    def __init__(
        self,
        job: Any,
        schema: pa.Schema | Sequence[pa.Schema],
        directory: Path,
        *,
        event_time: str | None = None,
        changelog: Changelog | None = None,
        now_ms: int = 0,
    ) -> None:
        self._sides: tuple[str, ...] = getattr(job, "sides", ("",))
        self._schemas = [schema] * len(self._sides) if isinstance(schema, pa.Schema) else [*schema]
        if len(self._schemas) != len(self._sides):
            raise ValueError(f"schema: {len(self._schemas)} are given, allowed are 1 and {len(self._sides)}")
        self.operator = self._operator(job)
        streams: Sequence[Any] = getattr(job, "streams", ())
        self._event_times = [event_time or one.event_time for one in streams] or [event_time]
        self._left_streams = len(streams[0].source.topics) if len(streams) > 1 else 0
        fields = {
            _named(side, f.name): f.with_name(_named(side, f.name))
            for side, one in zip(self._sides, self._schemas, strict=True)
            for f in one
        }
        self._topics: dict[Key, _Topic] = {}
        self._pointer: bytes | None = None
        self._version = 0
        self._max_ahead_ms: int | None = getattr(job, "max_ahead_ms", None)
        self._refused = ERROR_SCHEMA.empty_table()
        self._job = ShardJob(
            query_id=QUERY_ID,
            shard=0,
            local_dir=directory / "local",
            operator=self.operator,
            message_fields=tuple(fields[name] for name in self.operator.input_fields),
            changelog=changelog or FileChangelog(directory / "changelog"),
            lock_wait_s=5.0,
        )
        self.now_ms = now_ms

    @property
    def pointer(self) -> Pointer | None:
        """The committed pointer, as Spark's state would hold it."""
        return decode(self._pointer) if self._pointer is not None else None

    def send(self, rows: Sequence[Mapping[str, Any]], *, partition: int = 0, stream: int = 0) -> None:
        """Append messages to a source partition; the next micro-batch reads them.

        Raises:
            ValueError: One has no event time; none is sent.
        """
        messages = [self._message(row, stream) for row in rows]
        self._topics.setdefault((stream, partition), _Topic()).sent.extend(messages)

    def batch(
        self, rows: Sequence[Mapping[str, Any]] = (), *, partition: int = 0, stream: int = 0, drain: bool = False
    ) -> Emitted:
        """Run a micro-batch over everything sent and not read yet, and commit it.

        Args:
            rows: Sent first.
            partition: Source partition of `rows`.
            stream: Stream of `rows`: 0, or for a join 0 (left) and 1 (right).
            drain: The bounded input ends with this micro-batch.

        Raises:
            StateUnavailable: The local state was lost; call `restore`.
        """
        self.send(rows, partition=partition, stream=stream)
        done = self._attempt(drain)
        self._pointer = encode(done.pointer)
        self._version += 1
        for key, position in positions_of(done.pointer).items():
            self._topics.setdefault(key, _Topic()).next_offset = position.next_offset
        errors = pa.concat_tables([self._refused, done.outcome.errors])
        return Emitted(done.outcome.results, errors, done.metrics)

    def crash(
        self, rows: Sequence[Mapping[str, Any]] = (), *, partition: int = 0, stream: int = 0, drain: bool = False
    ) -> None:
        """Run a micro-batch and die before Spark commits it: what it staged and logged is there, and must not count.

        The rows are read again by the next `batch`, as Spark would.
        """
        self.send(rows, partition=partition, stream=stream)
        self._attempt(drain)

    def advance(self, by: Duration) -> Emitted | None:
        """Move the clock; run a micro-batch without rows when the operator is due by then, else give None.

        Rows sent and not read yet are read by that micro-batch.
        """
        self.now_ms += duration_ms(by, "by", least=0)
        pointer = self.pointer
        due = pointer.next_due_ms if pointer is not None else None
        return self.batch() if due is not None and due <= self.now_ms else None

    def drain(self) -> Emitted:
        """Run the micro-batch that ends a bounded input: open windows are emitted and stay open."""
        return self.batch(drain=True)

    def change(self, job: Any) -> None:
        """Go on with another job on the same checkpoint, as after a new start: one with other free options.

        Whether the manifest lets it is not looked at.

        Args:
            job: As for the tester itself.
        """
        self.operator = self._operator(job)
        self._job = replace(self._job, operator=self.operator)

    def lose_disk(self) -> None:
        """Delete all local state: what a dead host leaves."""
        shutil.rmtree(self._job.local_dir, ignore_errors=True)

    def restore(self) -> Restored:
        """Rebuild the shard at the committed pointer, from the changelog and by replaying what was sent.

        Raises:
            ValueError: Nothing was committed yet.
            RestoreMismatch: The replayed messages are not the committed ones.
            ChangelogDamaged: The changelog cannot be read.
        """
        pointer = self.pointer
        if pointer is None:
            raise ValueError("restore: nothing was committed yet")
        history = self._job.changelog.read(0, pointer.commit)
        everything = {key: (0, len(topic.sent)) for key, topic in self._topics.items()}
        messages = accepted(self._table(everything, {}), history.record)
        chunks = []
        if messages.num_rows:
            chunks.append(above_bounds(self.operator.replay_rows(messages), history.record.bounds))
        directory = ShardDirectory(self._job.local_dir, QUERY_ID, 0)
        with directory.lock(self._job.lock_wait_s):
            fresh = directory.new_generation()
            try:
                restored = restore_shard(history, chunks, self.operator, fresh.database)
            except BaseException:
                directory.discard(fresh)
                raise
            directory.adopt(fresh)
        return restored

    def tamper(self, offset: int, row: Mapping[str, Any], *, partition: int = 0, stream: int = 0) -> None:
        """Make the source give another message at an offset from now on: a restore that needs it must notice."""
        self._topics[(stream, partition)].sent[offset] = self._message(row, stream)

    def _operator(self, job: Any) -> Operator:
        operator: Operator = job.make(self._schemas, {}) if hasattr(job, "make") else job
        return operator

    def _attempt(self, drain: bool) -> Done:
        pointer = self.pointer
        ranges = {key: (topic.next_offset, len(topic.sent)) for key, topic in self._topics.items()}

        def read(before: Mapping[Key, Position]) -> ShardInput:
            after = dict(before)
            ahead: list[tuple[int, int, int]] = []
            for key, (start, end) in ranges.items():
                old = after.get(key)
                newest = old.stream_time if old is not None else NO_TIME
                for offset, row in enumerate(self._topics[key].sent[start:end], start):
                    if self._is_ahead(row):
                        ahead.append((*key, offset))
                    else:
                        newest = max(newest, row[TIME])
                moved = old is None or end > old.next_offset
                after[key] = Position(end, newest, self.now_ms if moved or old is None else old.active_ms)
            table = self._table(ranges, before, frozenset(ahead))
            parts = [self._table({(s, p): (offset, offset + 1)}, {}) for s, p, offset in ahead]
            self._refused = pa.concat_tables(
                [ERROR_SCHEMA.empty_table(), *(error_rows(part, "in_future", "see max_ahead") for part in parts)]
            )
            return ShardInput(self.now_ms, table if table.num_rows else None, after, tuple(ahead), drain=drain)

        return run_attempt(self._job, pointer, self._version, read)

    def _is_ahead(self, row: Mapping[str, Any]) -> bool:
        """Return whether the pack stage would refuse a message as `in_future`."""
        if self._max_ahead_ms is None:
            return False
        own = row.get(TIMESTAMP_IN) if TIMESTAMP_IN not in self._schemas[0].names or len(self._sides) > 1 else None
        [bound] = latest(np.array([-1 if own is None else own], np.int64), self.now_ms, self._max_ahead_ms).tolist()
        return int(row[TIME]) > int(bound)

    def _table(
        self,
        ranges: Mapping[Key, tuple[int, int]],
        before: Mapping[Key, Position],
        without: frozenset[tuple[int, int, int]] = frozenset(),
    ) -> pa.Table:
        """Make the message table of half-open offset ranges but for some, sorted by (stream, partition, offset)."""
        schema = pa.schema([*MESSAGE_FIELDS, *self._job.message_fields])
        rows: list[dict[str, Any]] = []
        for (stream, partition), (start, end) in sorted(ranges.items()):
            known = before.get((stream, partition))
            newest = known.stream_time if known is not None else NO_TIME
            for offset, row in enumerate(self._topics[(stream, partition)].sent[start:end], start):
                if (stream, partition, offset) in without:
                    continue
                rows.append({STREAM: stream, PARTITION: partition, OFFSET: offset, BEFORE: newest, **row})
                newest = max(newest, row[TIME])
        columns = {name: [row.get(name) for row in rows] for name in schema.names}
        return pa.table([pa.array(columns[f.name], f.type) for f in schema], schema=schema)

    def _message(self, row: Mapping[str, Any], stream: int) -> dict[str, Any]:
        """Return a message as the shard sees it: with its event time, and its side before the names of its fields."""
        side = int(len(self._sides) > 1 and stream >= self._left_streams)
        name = TIME if TIME in row or self._event_times[side] is None else self._event_times[side]
        time = row.get(name)
        if not isinstance(time, int) or isinstance(time, bool):
            raise ValueError(f"message {dict(row)!r}: {name!r} must be the event time in integer milliseconds")
        if not self._sides[side]:
            return {**row, TIME: time}
        own = set(self._schemas[side].names)
        named = {_named(self._sides[side], field) if field in own else field: value for field, value in row.items()}
        return {**named, TIME: time}


def _named(side: str, field: str) -> str:
    """Return the name under which an operator reads a field."""
    return f"{side}.{field}" if side else field
