"""`OperatorTester`: one shard of a job without Spark, through the code that runs inside Spark's tasks.

It plays Spark: keeps the committed pointer, hands rows to attempts, commits or does not, moves the clock. The attempt,
the local database, the staged files, the changelog and the restore are the product's own.

    tester = OperatorTester(job, pa.schema([("at", pa.int64()), ("n", pa.int64())]), tmp_path)
    tester.batch([{"at": 0, "n": 1}])
    tester.crash([{"at": 10, "n": 2}])       # staged and logged, never committed
    tester.lose_disk()
    tester.restore()                          # changelog and replay, counts and digests proven
    assert tester.batch().results.to_pylist() == [...]   # the rows of the crash come again, once

What happens before a shard sees rows is not here, but for steps, which are run: parsing, routing by key,
and of the pack stage's checks `malformed` and `no_event_time`. `max_ahead` and the range of event times are checked
as there: a message may give the record's own timestamp as `_timestamp`, if that is no field.
"""

from __future__ import annotations

import math
import os
import reprlib
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from decimal import Decimal
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from backend.batch import (
    BEFORE,
    ERROR_SCHEMA,
    MAX_EVENT_TIME,
    MESSAGE_FIELDS,
    MIN_EVENT_TIME,
    NO_TIME,
    OFFSET,
    PARTITION,
    RESERVED,
    STREAM,
    TIME,
    Operator,
    Position,
    counts_offsets,
)
from backend.batch import SourcePartition as Key
from backend.boundary import check_names, in_order
from backend.errors import SourceUnavailable
from backend.python_rows import arrow_value, python_rows
from backend.spark.pack.frames import TIMESTAMP_IN
from backend.spark.pack.judging import judge
from backend.spark.pack.pack_input import millis
from backend.spark.stream import Known
from backend.steps import DEFAULT_POISON_LIMIT, DROPPED, PASSED, VERDICT, Steps, schema_after
from backend.windows.definitions import Duration, duration_ms
from backend.windows.micro_batch import error_rows
from recovery.attempt import positions_of, run_attempt
from recovery.changelog import Changelog, FileChangelog
from recovery.changelog.rejected import with_rows
from recovery.commit.pointer import Pointer, decode, encode
from recovery.commit.shard_directory import ShardDirectory
from recovery.jobs import ShardJob
from recovery.operate import Done
from recovery.restore.build import Restored, accepting, restore_shard
from recovery.share import ShardInput

QUERY_ID = "tester"
_ADDED = frozenset(RESERVED) - {TIME}
MAX_STREAM, MAX_PARTITION = 2**16 - 1, 2**31 - 1
_DROPPED = "dropped by a step"


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


@dataclass(frozen=True, slots=True)
class _Message:
    """A message that was sent.

    Attributes:
        row: As the operator reads it, with its event time; of one that did not come through the steps what was given.
        given: The fields that it was sent with.
        verdict: What the steps made of it, as `backend.steps` counts them.
        detail: What a step raised.
    """

    row: dict[str, Any]
    given: dict[str, Any]
    verdict: int = PASSED
    detail: str = ""


@dataclass(slots=True)
class _Topic:
    """One source partition: everything ever sent, and what no committed micro-batch has read yet."""

    sent: list[_Message] = field(default_factory=list)
    next_offset: int = 0


class OperatorTester:
    """Feed an operator micro-batches, move time, crash it and restore it.

    Args:
        job: What `stream(...).window(...).aggregate(...)`, `join(...)` or `.process(...)` gives, or an `Operator`.
        schema: Fields of a message, before the job's steps; of a join two, left and right, unless both sides have the
            same. Of an `Operator` one, with the names that it reads (of a join's `left.k`, `right.k`), which messages
            have then, too.
        directory: Local state and changelog; pytest's `tmp_path` for example.
        event_time: Field with the event time, integer milliseconds, a timestamp or a date (in UTC), of a join one for
            both sides or a list of two; by default the job's. Messages may give `_time` instead.
        changelog: Where commits are logged; by default files in `directory`.
        now_ms: Batch time of the first micro-batch.

    Raises:
        ValueError: No job, no path, no time; a schema too many, or too few, or what is none; an event time that is no
            name; a step that does not take the fields.
    """

    def __init__(
        self,
        job: Any,
        schema: pa.Schema | Sequence[pa.Schema],
        directory: Path | str,
        *,
        event_time: str | Sequence[str] | None = None,
        changelog: Changelog | None = None,
        now_ms: int = 0,
    ) -> None:
        _check_job(job)
        if not _is_int64(now_ms):
            raise ValueError(f"now_ms={now_ms!r}: allowed are integers, milliseconds")
        if not isinstance(directory, str | os.PathLike):
            raise ValueError(f"directory={directory!r}: allowed is a path")
        self._sides: tuple[str, ...] = getattr(job, "sides", ("",))
        self._schemas = self._given = _schemas(schema, len(self._sides))
        self._described: list[list[dict[str, Any]]] | None = None
        self._steps: list[Steps] = []
        self._event_time = () if event_time is None else check_names("event_time", event_time)
        if len(self._event_time) not in (0, 1, len(self._sides)):
            raise ValueError(f"event_time={event_time!r}: allowed are None, a field, or a list of one per side")
        self._event_times: list[str | None] = [None]
        self._topics: dict[Key, _Topic] = {}
        self._pointer: bytes | None = None
        self._version = 0
        self._refused = ERROR_SCHEMA.empty_table()
        operator, fields = self._take(job)
        self._job = ShardJob(
            query_id=QUERY_ID,
            shard=0,
            local_dir=Path(directory) / "local",
            operator=operator,
            message_fields=fields,
            changelog=changelog or FileChangelog(Path(directory) / "changelog"),
            lock_wait_s=5.0,
        )
        self.now_ms = now_ms

    @property
    def pointer(self) -> Pointer | None:
        """The committed pointer, as Spark's state would hold it."""
        return decode(self._pointer) if self._pointer is not None else None

    def send(self, rows: Sequence[Mapping[str, Any]], *, partition: int = 0, stream: int = 0) -> None:
        """Append messages to a source partition; the next micro-batch reads them.

        Args:
            rows: The messages.
            partition: The source partition.
            stream: As for `batch`.

        Raises:
            ValueError: One has no event time, a value that its field cannot have, or what Rewind adds; there is no such
                partition, or of a join no such stream. None is sent.
            UserCodeFailed: A step raised for more messages in a row than `poison_limit` is by default.
        """
        known = self._topics.get((stream, partition), _Topic())
        known.sent.extend(self._messages(rows, partition, stream, len(known.sent)))
        self._topics[(stream, partition)] = known

    def batch(
        self, rows: Sequence[Mapping[str, Any]] = (), *, partition: int = 0, stream: int = 0, drain: bool = False
    ) -> Emitted:
        """Run a micro-batch over everything sent and not read yet, and commit it.

        Args:
            rows: Sent first.
            partition: Source partition of `rows`.
            stream: Stream of `rows`: the place of their topic among all that the job reads. Of a join the right side's
                come after the left side's: where left has one topic, 0 is left and 1 is right.
            drain: The bounded input ends with this micro-batch.

        Raises:
            ValueError: As of `send`.
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

        Raises:
            ValueError: No job; a join instead of something else, or the reverse; other steps.
        """
        _check_job(job)
        if getattr(job, "sides", ("",)) != self._sides:
            raise ValueError(f"job={reprlib.repr(job)}: a join and what is none cannot go on with one checkpoint")
        operator, fields = self._take(job)
        self._job = replace(self._job, operator=operator, message_fields=fields)

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
        rows = [
            {STREAM: key[0], PARTITION: key[1], OFFSET: offset, BEFORE: NO_TIME, **one.row}
            for key, topic in self._topics.items()
            for offset, one in enumerate(self._read_again(key, topic.sent))
            if one.verdict == PASSED and MIN_EVENT_TIME <= one.row[TIME] <= MAX_EVENT_TIME
        ]
        messages = accepting(with_rows(history))(self._table(rows))
        chunks = []
        if messages.num_rows:
            chunks.append(self.operator.replay_rows(messages))
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
        """Make the source give another message at an offset from now on: a restore that needs it must notice.

        Raises:
            ValueError: As of `send`, or the offset was never sent.
        """
        sent = self._topics.get((stream, partition), _Topic()).sent
        if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset < len(sent):
            raise ValueError(
                f"offset={offset!r}: {len(sent)} messages were sent to partition {partition} of stream {stream}"
            )
        [sent[offset]] = self._messages([row], partition, stream, offset)

    def _take(self, job: Any) -> tuple[Operator, tuple[pa.Field, ...]]:
        """Take what a job says, unless it is refused; give its operator and the fields that it reads of messages."""
        inputs: Sequence[Any] = getattr(job, "streams", ())
        steps = [one.steps for one in inputs] if any(one.steps for one in inputs) else [()] * len(self._sides)
        described = [[step.describe() for step in own] for own in steps]
        if self._described not in (None, described):
            raise ValueError(f"job={reprlib.repr(job)}: has other steps, which are no free option")
        schemas = [schema_after(own, schema) for own, schema in zip(steps, self._given, strict=True)]
        topics = [len(one.source.topics) for one in inputs] if len(inputs) > 1 else []
        before = {} if self._described is None else self.operator.describe()
        operator: Operator = job.make(schemas, Known({}, topics, before)) if hasattr(job, "make") else job
        fields = self._fields(operator, schemas)
        self._described, self._schemas = described, schemas
        self._steps = [Steps(_same, own, schema) for own, schema in zip(steps, schemas, strict=True)]
        spec = getattr(job, "spec", None)  # of an `Operator`
        self._max_ahead_ms: int | None = getattr(job, "max_ahead_ms", getattr(spec, "max_ahead_ms", None))
        self._topic_names: dict[int, str] = {}
        if any(steps):
            with suppress(SourceUnavailable):  # of a source that is not there steps see the stream's number
                self._topic_names = dict(enumerate(topic for one in inputs for topic in one.source.topics))
        self._left_streams, self._last_stream = (topics[0], sum(topics) - 1) if topics else (0, MAX_STREAM)
        named = self._event_time or [one.event_time for one in inputs] or self._event_times
        self._event_times = [*named] * (len(self._sides) // len(named))
        self.operator: Operator = operator
        return operator, fields

    def _fields(self, operator: Operator, schemas: Sequence[pa.Schema]) -> tuple[pa.Field, ...]:
        """Give the fields that an operator reads of messages."""
        fields = {
            _named(side, f.name): f.with_name(_named(side, f.name))
            for side, one in zip(self._sides, schemas, strict=True)
            for f in one
        }
        unknown = [name for name in operator.input_fields if name not in fields]
        if unknown:
            raise ValueError(f"schema: the job reads {unknown}; the fields are {[*fields]}")
        return tuple(fields[name] for name in operator.input_fields)

    def _attempt(self, drain: bool) -> Done:
        by_offset = counts_offsets(self._job.operator)

        def read(before: Mapping[Key, Position]) -> ShardInput:
            after = dict(before)
            rows, errors, ahead = list[dict[str, Any]](), [ERROR_SCHEMA.empty_table()], list[tuple[int, int, int]]()
            for key, topic in self._topics.items():
                old = after.get(key, Position(0, NO_TIME, self.now_ms))
                newest, accepted = old.stream_time, by_offset and len(topic.sent) > old.next_offset
                for offset, one in enumerate(topic.sent[topic.next_offset :], topic.next_offset):
                    place, reason = {STREAM: key[0], PARTITION: key[1], OFFSET: offset}, self._refusal(one, key[0])
                    if reason is None:
                        rows.append({**place, BEFORE: newest, **one.row})
                        newest, accepted = max(newest, one.row[TIME]), True
                    elif reason != _DROPPED:
                        errors.append(self._error(place, one, reason))
                    if reason == "in_future":
                        ahead.append((*key, offset))
                after[key] = Position(len(topic.sent), newest, self.now_ms if accepted else old.active_ms)
            self._refused = pa.concat_tables(errors)
            table = self._table(rows) if rows else None
            firsts = {key: 0 for key, one in self._topics.items() if by_offset and one.next_offset == 0 < len(one.sent)}
            return ShardInput(self.now_ms, table, after, tuple(ahead), drain=drain, firsts=firsts)

        return run_attempt(self._job, self.pointer, self._version, read)

    def _refusal(self, message: _Message, stream: int) -> str | None:
        """Return why the pack stage would refuse a message by its times, or leave it out; None where it would not."""
        row = message.row
        if message.verdict != PASSED:
            return _DROPPED if message.verdict == DROPPED else "poison"
        own = row.get(TIMESTAMP_IN) if TIMESTAMP_IN not in self._given[self._side(stream)].names else None
        times, timestamps = (pa.array([one], pa.int64()) for one in (row[TIME], own))
        reasons = judge(times, timestamps, self.now_ms, self._max_ahead_ms)
        return None if reasons is None else reasons[0]

    def _error(self, place: Mapping[str, int], one: _Message, reason: str) -> pa.Table:
        """Return the row of the errors for a message that the pack stage would refuse."""
        schema = pa.schema([*MESSAGE_FIELDS, *self._given[self._side(place[STREAM])]])
        row = {**one.given, **place, BEFORE: NO_TIME, TIME: one.row.get(TIME)}
        message = pa.Table.from_pylist([row], schema)
        return error_rows(message, reason, "see max_ahead" if reason == "in_future" else one.detail)

    def _table(self, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
        """Make the message table of rows, sorted by (stream, partition, offset)."""
        ordered = sorted(rows, key=itemgetter(STREAM, PARTITION, OFFSET))
        return pa.Table.from_pylist(ordered, pa.schema([*MESSAGE_FIELDS, *self._job.message_fields]))

    def _messages(
        self,
        rows: Sequence[Mapping[str, Any]],
        partition: int,
        stream: int,
        first: int,
        *,
        replayed: bool = False,
    ) -> list[_Message]:
        """Return messages as the shard sees them: with event time, their side before the names of their fields.

        Args:
            rows, partition, stream: As for `send`.
            first: Offset of the first one.
            replayed: They are read again: nothing that steps make of them is an error here.
        """
        listed = in_order(rows)
        if listed is None or not all(isinstance(row, Mapping) for row in listed):
            raise ValueError(f"rows={reprlib.repr(rows)}: allowed is a list of messages, each a dict of its fields")
        places = ("stream", stream, self._last_stream), ("partition", partition, MAX_PARTITION)
        for option, number, greatest in places:
            if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= greatest:
                raise ValueError(f"{option}={number!r}: allowed are 0 to {greatest}")
        side = self._side(stream)
        timed = [self._with_time(row, side) for row in listed]
        self._check_rows(timed, side)
        names, messages = dict(zip(self._schemas[side].names, self._names(side), strict=True)), []
        limit = None if replayed else DEFAULT_POISON_LIMIT
        steps = replace(self._steps[side], poison_limit=limit, _raised={})
        for row, (made, came, detail) in zip(
            timed, self._stepped(timed, steps, side, stream, partition, first), strict=True
        ):
            known, verdict = {names.get(own, own): value for own, value in made.items()}, came
            if verdict == PASSED:
                try:
                    known[TIME] = self._time(row, made, side)
                except ValueError:
                    if not replayed:
                        raise
                    verdict = DROPPED  # it is not the message that was committed
            if TIMESTAMP_IN in row:
                known[TIMESTAMP_IN] = row[TIMESTAMP_IN]
            messages.append(_Message(known, dict(row), verdict, detail))
        return messages

    def _read_again(self, key: Key, sent: Sequence[_Message]) -> Sequence[_Message]:
        """Return messages as a replay reads them: steps are run again, and whatever they raise is no end of it."""
        if not self._steps[self._side(key[0])].steps:
            return sent
        return self._messages([one.given for one in sent], key[1], key[0], 0, replayed=True)

    def _check_rows(self, rows: Sequence[Mapping[str, Any]], side: int) -> None:
        """Refuse rows that cannot be messages of a side."""
        given = self._given[side]
        for row in rows:
            stamp = row.get(TIMESTAMP_IN) if TIMESTAMP_IN not in given.names else None
            if unknown := {*row} - {*given.names, *self._event_times, TIME, TIMESTAMP_IN} - _ADDED:
                raise ValueError(f"message {dict(row)!r}: has {sorted(unknown)}; the fields are {given.names}")
            if not (stamp is None or _is_int64(stamp)) or _ADDED & set(row):
                said = f"{TIMESTAMP_IN!r} is the record's own timestamp in integer milliseconds or None"
                raise ValueError(f"message {dict(row)!r}: {said}, and a message has none of {sorted(_ADDED)}")
            if not self._steps[side].steps:
                self._time(row, row, side)
        for own in given:
            try:
                if any(_has_fraction(row.get(own.name), own.type) for row in rows):
                    raise ValueError("a number with a fraction")
                pa.array([row.get(own.name) for row in rows], own.type)
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                raise ValueError(f"messages: field {own.name!r} of type {own.type}: {error}") from error

    def _with_time(self, row: Mapping[str, Any], side: int) -> Mapping[str, Any]:
        """Return a message whose event time, where it is in milliseconds, is in the unit of its field."""
        name, given = self._event_times[side], self._given[side]
        value = row.get(name) if name is not None and name in given.names else None
        if name is None or not isinstance(value, int) or isinstance(value, bool):
            return row
        return {**row, name: _in_unit(value, given.field(name).type)}

    def _time(self, row: Mapping[str, Any], made: Mapping[str, Any], side: int) -> int:
        """Return a message's event time: `_time` that it was given, else the job's field behind the steps."""
        field, schema = self._event_times[side], self._schemas[side]
        if TIME in row or field is None:
            name, time = TIME, row.get(TIME)
        else:
            name, time = field, made.get(field)
            time = _milliseconds(time, schema.field(name).type) if name in schema.names else time
        if not isinstance(time, int) or not _is_int64(time):
            raise ValueError(
                f"message {dict(row)!r}: {name!r} must be the event time in integer milliseconds, or a time of its type"
            )
        return time

    def _stepped(
        self, rows: Sequence[Mapping[str, Any]], steps: Steps, side: int, stream: int, partition: int, first: int
    ) -> list[tuple[Mapping[str, Any], int, str]]:
        """Return the fields that the steps make of each message, what became of it, and what a step raised."""
        if not steps.steps or not rows:
            return [(row, PASSED, "") for row in rows]
        given, count = self._given[side], len(rows)
        fields = [pa.array([row.get(own.name) for row in rows], own.type) for own in given]
        stamps = pa.array([row.get(TIMESTAMP_IN) for row in rows], pa.timestamp("ms", "UTC"))
        records = pa.RecordBatch.from_pydict(
            {
                "topic": pa.repeat(self._topic_names.get(stream, str(stream)), count),
                "partition": pa.repeat(pa.scalar(partition, pa.int32()), count),
                "offset": pa.array(range(first, first + count), pa.int64()),
                "timestamp": stamps.cast(pa.timestamp("us", "UTC")),
                "key": pa.nulls(count, pa.binary()),
                "fields": pa.StructArray.from_arrays(fields, fields=list(given)),
                "raw": pa.nulls(count),
                "malformed": pa.nulls(count, pa.string()),
            }
        )
        done = steps(records)
        fields_of = {one.name: one.type for one in self._schemas[side]}
        made = [
            {name: arrow_value(value, fields_of[name]) for name, value in row.items()}
            for row in python_rows(pa.table(done.column("fields").flatten(), self._schemas[side].names))
        ]
        verdicts, details = done.column(VERDICT).to_pylist(), done.column("malformed").to_pylist()
        return [
            (one if verdict == PASSED else {}, verdict, detail or "")
            for one, verdict, detail in zip(made, verdicts, details, strict=True)
        ]

    def _side(self, stream: int) -> int:
        return int(len(self._sides) > 1 and stream >= self._left_streams)

    def _names(self, side: int) -> list[str]:
        """Return the names under which an operator reads the fields of a side."""
        return [_named(self._sides[side], name) for name in self._schemas[side].names]


def _check_job(job: Any) -> None:
    if not any(callable(getattr(job, name, None)) for name in ("make", "replay_rows")):
        raise ValueError(f"job={reprlib.repr(job)}: allowed is what aggregate, join or process gives, or an Operator")


def _same(records: pa.RecordBatch) -> pa.RecordBatch:
    """Parse nothing: messages come with their fields."""
    return records


def _in_unit(milliseconds: int, kind: pa.DataType) -> int:
    """Return a time in the unit of a type, rounded down; of a type that is no time as it is."""
    if pa.types.is_timestamp(kind):
        return milliseconds * {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}[kind.unit] // 1_000
    if pa.types.is_date(kind):
        days = milliseconds // 86_400_000
        return days if pa.types.is_date32(kind) else days * 86_400_000
    return milliseconds


def _milliseconds(value: object, kind: pa.DataType) -> object:
    """Return an event time as integer milliseconds; what is none as it is."""
    if value is None or not (pa.types.is_timestamp(kind) or pa.types.is_date(kind)):
        return value
    try:
        return millis(pa.array([value], kind), "UTC")[0].as_py()
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return value


def _has_fraction(value: object, kind: pa.DataType) -> bool:
    """Tell whether a number with a fraction stands where a whole one must, a time too: Arrow would cut it off."""
    types = pa.types
    if types.is_dictionary(kind):
        return _has_fraction(value, kind.value_type)
    if types.is_integer(kind) or types.is_temporal(kind):
        number = isinstance(value, float | Decimal | np.floating)
        return number and math.isfinite(value) and value != int(value)  # type: ignore[arg-type,call-overload]
    if types.is_map(kind):
        pairs = value.items() if isinstance(value, Mapping) else in_order(value) or ()
        sides = (kind.key_type, kind.item_type)
        return any(_has_fraction(one, side) for pair in pairs for one, side in zip(pair, sides, strict=False))
    if types.is_struct(kind):
        known = value.items() if isinstance(value, Mapping) else in_order(value) or ()
        fields = {one.name: one.type for one in kind}
        return any(name in fields and _has_fraction(one, fields[name]) for name, one in known)
    if kind.num_fields == 1:  # lists of all kinds
        return any(_has_fraction(one, kind.field(0).type) for one in in_order(value) or ())
    return False


def _is_int64(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _schemas(given: Any, sides: int) -> list[pa.Schema]:
    """Check schemas; return one per side."""
    schemas = [given] * sides if isinstance(given, pa.Schema) else list(in_order(given) or ())
    if len(schemas) != sides or not all(isinstance(one, pa.Schema) for one in schemas):
        allowed = "a pyarrow.Schema" + (", or a list of two, left and right" if sides > 1 else "")
        raise ValueError(f"schema={' '.join(reprlib.repr(given).split())}: allowed is {allowed}")
    for names in (one.names for one in schemas):
        if len(set(names)) < len(names):
            raise ValueError(f"schema: a field stands twice in {names}")
    return schemas


def _named(side: str, field: str) -> str:
    """Return the name under which an operator reads a field."""
    return f"{side}.{field}" if side else field
