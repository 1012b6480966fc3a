"""Kafka topics as a PySpark data source: read with confluent-kafka, values parsed as columns where they are read.

Spark's own connector hands every record through the JVM, where `from_json` and the way into Arrow take two thirds of a
micro-batch. Here a task reads its offset range in Python, and what `JsonColumns` understands crosses the JVM as bundles
(`backend.spark.bundles`); records between them that only Spark can judge follow their bundle as they are.

The offset of the stream is the connector's, `{"<topic>": {"<partition>": next offset}}`, and so are its rules: a
partition that is added is read from offset 0 on, a bound on a micro-batch is shared out by what lies ahead. So a
checkpoint goes on with either.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import BinaryType, StructField, StructType

from backend.errors import SourceWentBack
from backend.sources import OffsetRange, TopicPartition
from backend.sources.formats import record_schema
from backend.sources.json_columns import JsonColumns
from backend.sources.kafka_admin import admin_client, ends
from backend.sources.kafka_fetch import Records, fetch
from backend.sources.kafka_settings import KafkaSettings
from backend.sources.spark_offsets import offset_json, positions_in
from backend.spark.bundles import BUNDLE, bundle

PARSED_ROWS, PARSED_BYTES = 20_000, 4 * 1024 * 1024
BUNDLE_ROWS, BUNDLE_BYTES = 100_000, 8 * 1024 * 1024
"""A stretch to parse, and a bundle, are full at either."""

ROWS = StructType([StructField(BUNDLE, BinaryType()), *record_schema(BinaryType()).fields])
"""Either a bundle, with the number of records that belong between its rows as `offset`; or a record."""
_ROWS = to_arrow_schema(ROWS, timezone="UTC")
_RECORD = pa.schema(list(_ROWS)[1:])


@dataclass
class Piece(InputPartition):
    """One task's share: a half-open offset range of one source partition."""

    topic: str
    partition: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ReaderPlan:
    """What the readers need to know.

    Attributes:
        settings: The cluster; `inlined`, tasks do not have its files.
        topics: The topics.
        isolation: As for `kafka`.
        fields: The values' fields, Spark's schema as JSON.
        key: A field that is the record's key, `string` or `binary`; "" for none.
        names: Fields that bundles carry.
        per_batch: Bound on a micro-batch's offsets; None: none.
        per_task: A longer range of one partition is read by several tasks.
        first: Where a new query begins.
        ranges: What a batch reads: `[[topic, partition, start, end], ...]`, half-open.
    """

    settings: KafkaSettings
    topics: tuple[str, ...]
    isolation: str
    fields: str
    key: str
    names: tuple[str, ...]
    per_batch: int | None
    per_task: int
    first: str = "{}"
    ranges: list[list[Any]] = field(default_factory=list)

    def options(self) -> dict[str, str]:
        """Give the data source's option; Spark hides its value by its name, for there may be a password in it."""
        return {"plan_secret": json.dumps(asdict(self))}

    @classmethod
    def of(cls, options: Mapping[str, str]) -> ReaderPlan:
        """Read `options`."""
        told = json.loads(options["plan_secret"])
        return cls(**told | {"settings": KafkaSettings(**told["settings"])})


class RewindKafka(DataSource):
    """`format("rewind_kafka")`; use `backend.kafka`, which sets its options."""

    @classmethod
    def name(cls) -> str:
        """Give the name of the format."""
        return "rewind_kafka"

    def schema(self) -> StructType:
        """Give `ROWS`."""
        return ROWS

    def reader(self, schema: StructType) -> DataSourceReader:
        """Read fixed ranges."""
        return KafkaBatchReader(ReaderPlan.of(self.options))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Read on and on."""
        return KafkaStreamReader(ReaderPlan.of(self.options))


class _Reader:
    """What both readers share."""

    def __init__(self, plan: ReaderPlan) -> None:
        self.plan = plan

    def cut(self, topic: str, partition: int, start: int, end: int) -> list[Piece]:
        """Cut a range into tasks."""
        bounds = [*range(start, end, self.plan.per_task), end]
        return [Piece(topic, partition, low, high) for low, high in pairwise(bounds)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one piece; runs in a task."""
        if not isinstance(partition, Piece):  # Spark's stand-in for "no partitions at all"
            return iter(())
        return rows_of(self.plan, partition)


class KafkaBatchReader(_Reader, DataSourceReader):
    """Reads the plan's ranges."""

    def partitions(self) -> Sequence[InputPartition]:
        """Plan the ranges."""
        return [piece for wanted in self.plan.ranges for piece in self.cut(*wanted)]


class KafkaStreamReader(_Reader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads the topics from the plan's first offsets on."""

    _target: dict[TopicPartition, int] | None = None
    _newest: dict[TopicPartition, int] | None = None
    _admin: Any = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Give where a new query begins."""
        return dict(json.loads(self.plan.first))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Give the bound."""
        return ReadAllAvailable() if self.plan.per_batch is None else ReadMaxRows(self.plan.per_batch)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Remember what is there: messages that come later are not read by this run."""
        self._target = self._look()

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        """Give the topics' ends as last seen, for the lag in Spark's progress."""
        return offset_json(self._newest if self._newest is not None else self._look())

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Give the end of the next micro-batch.

        Raises:
            SourceWentBack: A topic ends before what was already read.
        """
        known = positions_in(start)
        here = self._look()
        for key, position in sorted(known.items()):
            end = here.get(key, 0)
            if end < position:
                raise SourceWentBack(
                    "a topic lost offsets at its end, or was deleted and made again",
                    where=f"{key[0]}-{key[1]}",
                    why=f"the next offset to read is {position}, the topic ends at {end}",
                    command="start anew with another checkpoint",
                )
        ahead = {key: (known.get(key, 0), end) for key, end in here.items()}
        if self._target is not None:
            ahead = {
                key: (at, max(at, min(end, self._target[key])))
                for key, (at, end) in ahead.items()
                if key in self._target
            }
        if isinstance(limit, ReadMaxRows):
            ahead = shared_out(ahead, limit.max_rows)
        return offset_json({key: end for key, (_, end) in ahead.items()})

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Plan one micro-batch: the same ranges for the same two offsets, always."""
        starts = positions_in(start)
        wanted = sorted(positions_in(end).items())
        return [piece for key, stop in wanted for piece in self.cut(*key, starts.get(key, 0), stop)]

    def _look(self) -> dict[TopicPartition, int]:
        self._admin = self._admin or admin_client(self.plan.settings)
        committed = self.plan.isolation == "read_committed"
        found = ends(self.plan.settings, self.plan.topics, self._admin, committed_only=committed)
        self._newest = found
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Leave the client out: tasks get a copy of the reader."""
        return {"plan": self.plan}


def shared_out(ahead: Mapping[TopicPartition, OffsetRange], most: int) -> dict[TopicPartition, OffsetRange]:
    """Cut what lies ahead down to a number of offsets in all, each partition by its share; one at least of each.

    >>> shared_out({("t", 0): (0, 300), ("t", 1): (50, 150), ("t", 2): (7, 7)}, 100)
    {('t', 0): (0, 75), ('t', 1): (50, 75), ('t', 2): (7, 7)}
    >>> shared_out({("t", 0): (0, 1000), ("t", 1): (0, 1)}, 10)
    {('t', 0): (0, 9), ('t', 1): (0, 1)}
    >>> shared_out({("t", 0): (0, 7), ("t", 1): (0, 7), ("t", 2): (0, 7)}, 10)
    {('t', 0): (0, 4), ('t', 1): (0, 3), ('t', 2): (0, 3)}
    """
    total = sum(end - at for at, end in ahead.values())
    if total <= most:
        return dict(ahead)
    share = {key: min(end - at, max(1, most * (end - at) // total)) for key, (at, end) in ahead.items()}
    left = most - sum(share.values())
    for key, (at, end) in ahead.items():  # rounding left less than one per partition
        if left > 0 and share[key] < end - at:
            share[key] += 1
            left -= 1
    return {key: (at, at + share[key]) for key, (at, _) in ahead.items()}


def rows_of(plan: ReaderPlan, piece: Piece) -> Iterator[pa.RecordBatch]:
    """Read a piece and give its rows: bundles, each with the records between its own that Spark has to judge."""
    configuration = {**plan.settings.for_client(), "isolation.level": plan.isolation}
    columns = JsonColumns(to_arrow_schema(StructType.fromJson(json.loads(plan.fields)), timezone="UTC"))
    waiting = _Waiting()
    for records in _in_parts(fetch(configuration, piece.topic, piece.partition, piece.start, piece.end)):
        taken, value = columns.parse(records.values)
        places = _places(piece, records)
        keys = pa.array(records.keys(), pa.binary()) if plan.key or not taken.all() else None
        if plan.key and keys is not None and len(value):
            found = _with_key(value, keys.filter(pa.array(taken)), plan.key)
            if found is None:
                taken[:] = False
            value = value[:0] if found is None else found
        if len(value):
            value = _only(value, plan.names)
            # a record's key is told of bad messages only, and these are good, or have no event time
            if any(column.null_count for column in value.flatten()):
                keys = pa.array(records.keys(), pa.binary()) if keys is None else keys
                key = keys.filter(pa.array(taken))
            else:
                key = pa.nulls(len(value), pa.binary())
            own = places if taken.all() else [column.filter(pa.array(taken)) for column in places]
            waiting.add([*own, key, value])
        if not taken.all():
            others = pa.array(~taken)
            left = [places[0].cast(pa.string()), *places[1:], keys, pa.array(records.values, pa.binary())]
            waiting.add_records([column.filter(others) for column in left])
        if waiting.full:
            yield from waiting.taken()
    yield from waiting.taken()


class _Waiting:
    """Rows that wait until they are worth a bundle, and the records that stay as they are."""

    def __init__(self) -> None:
        self._parts: list[pa.RecordBatch] = []
        self._records: list[pa.RecordBatch] = []

    def add(self, columns: Sequence[pa.Array]) -> None:
        """Take rows of the bundle: their places, keys and values."""
        self._parts.append(pa.RecordBatch.from_arrays(columns, [*_RECORD.names]))

    def add_records(self, columns: Sequence[pa.Array]) -> None:
        """Take records for Spark: the columns of `ROWS` but the bundle."""
        nothing = pa.nulls(len(columns[0]), pa.binary())
        self._records.append(pa.RecordBatch.from_arrays([nothing, *columns], schema=_ROWS))

    @property
    def full(self) -> bool:
        """Tell whether there are as many rows, or bytes, as a bundle should have."""
        parts = [*self._parts, *self._records]
        return sum(part.num_rows for part in parts) >= BUNDLE_ROWS or sum(map(_bytes, parts)) >= BUNDLE_BYTES

    def taken(self) -> Iterator[pa.RecordBatch]:
        """Give the bundle, then the records between its rows: their number is the bundle's `offset`."""
        if self._parts:
            [whole] = pa.Table.from_batches(self._parts).combine_chunks().to_batches()
            row = {kind.name: pa.nulls(1, kind.type) for kind in _ROWS}
            row[BUNDLE] = bundle(whole).column(BUNDLE)
            row["offset"] = pa.array([sum(part.num_rows for part in self._records)], pa.int64())
            yield pa.RecordBatch.from_arrays(list(row.values()), schema=_ROWS)
        yield from self._records
        self._parts, self._records = [], []


def _bytes(rows: pa.RecordBatch) -> int:
    return int(rows.nbytes)


def _in_parts(fetched: Iterator[Records]) -> Iterator[Records]:
    """Put what came together until it is worth to be parsed."""
    parts: list[Records] = []
    rows = size = 0
    for records in fetched:
        parts.append(records)
        rows += len(records.offsets)
        size += sum(map(len, filter(None, records.values)))
        if rows >= PARSED_ROWS or size >= PARSED_BYTES:
            yield Records.joined(parts)
            parts, rows, size = [], 0, 0
    if parts:
        yield Records.joined(parts)


def _places(piece: Piece, records: Records) -> list[pa.Array]:
    """Give topic, partition, offset and timestamp of records; the topic takes a byte each."""
    count = len(records.offsets)
    topic = pa.DictionaryArray.from_arrays(pa.nulls(count, pa.int8()).fill_null(0), [piece.topic])
    at = pa.array(records.timestamps, pa.int64()).cast(pa.timestamp("ms", "UTC"))
    partition = pa.repeat(pa.scalar(piece.partition, pa.int32()), count)
    return [topic, partition, pa.array(records.offsets, pa.int64()), at.cast(pa.timestamp("us", "UTC"))]


def _with_key(value: pa.StructArray, keys: pa.Array, name: str) -> pa.StructArray | None:
    """Put the records' keys behind the fields; None where they are no text, though they should be."""
    name, _, kind = name.partition(" ")
    if kind == "string":
        try:
            keys = keys.cast(pa.string())
        except pa.ArrowInvalid:
            return None
    return pa.StructArray.from_arrays([*value.flatten(), keys], [*(f.name for f in value.type), name])


def _only(value: pa.StructArray, names: Sequence[str]) -> pa.StructArray:
    """Leave the fields that nobody reads out; one stays at least."""
    kept = [number for number, one in enumerate(value.type) if one.name in names] or [0]
    return pa.StructArray.from_arrays(
        [value.field(number) for number in kept], fields=[value.type.field(number) for number in kept]
    )
