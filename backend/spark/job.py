"""A job: sources, routing and operator put together into Spark plans, the same for the stream and for a replay.

The way of a message: source rows -> `pack_input` (select in the JVM: event time, shard, the fields the operator reads;
for bundles the same over columns, in Python) -> the pack stage -> `groupBy(shard)` -> the stateful operator -> one row
per shard and micro-batch for the sink.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_type
from pyspark.sql.types import (
    BinaryType,
    DateType,
    IntegralType,
    LongType,
    StringType,
    TimestampNTZType,
    TimestampType,
)

from backend.batch import OFFSET, PARTITION, STREAM, TIME, Operator, SourcePartition
from backend.limits import MAX_KEY_TEXT_BYTES
from backend.sources import Bundling, Mixing, Source, replay_tasks
from backend.spark import frames
from backend.spark.bundles import BUNDLE, BundleInput, Stage, can_bundle, reading, unbundled, unmixed
from backend.spark.control import control_rows
from backend.spark.first_offsets import first_positions
from backend.spark.packing import PackPlan, packer

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

ROUTES = ("key", "partition")


@dataclass(frozen=True, slots=True)
class Input:
    """One input stream of a job.

    Attributes:
        source: Where its messages come from.
        event_time: Field that holds the event time (timestamp, date, or integer milliseconds); None takes the record's
            own timestamp.
        key: Fields that route a message to its shard; empty for none.
        name: Side of a join; empty for a single input. The operator reads a side's field as `<name>.<field>`.
    """

    source: Source
    event_time: str | None
    key: tuple[str, ...]
    name: str = ""

    def field_of(self, name: str) -> str | None:
        """Give the field of this input that the operator reads under a name; None for the other side's."""
        if not self.name:
            return name
        side, _, own = name.partition(".")
        return own if side == self.name else None


@dataclass(frozen=True, slots=True)
class Job:
    """Everything that defines the state: inputs, routing, operator.

    Attributes:
        inputs: One input, or left and right of a join.
        route: `key` or `partition`.
        grouping: Grouping value per shard.
        operator: The stateful operator.
        message_fields: Arrow fields of the operator's input, in the order of `operator.input_fields`.
        max_ahead_ms: See `PackPlan`.
    """

    inputs: tuple[Input, ...]
    route: str
    grouping: tuple[int, ...]
    operator: Operator
    message_fields: tuple[pa.Field, ...]
    max_ahead_ms: int | None

    @property
    def shards(self) -> int:
        """Number of shards."""
        return len(self.grouping)

    @property
    def streams(self) -> dict[tuple[str, str], int]:
        """Stream number of each (input name, topic)."""
        return number_streams([(side.name, side.source) for side in self.inputs])

    @property
    def bundled(self) -> bool:
        """Tell whether the rows of all inputs cross the JVM as bundles, but for a few."""
        return all(_bundling(side) is not None or _mixing(side) is not None for side in self.inputs)

    def sources(self, spark: SparkSession, *, bounded: bool) -> dict[int, tuple[SourcePartition, ...]]:
        """List the source partitions that each shard reads, as far as they are there now.

        Args:
            spark: The session.
            bounded: What comes later is not read, so a partition that is empty now never brings anything.
        """
        streams, found = self.streams, {shard: list[SourcePartition]() for shard in range(self.shards)}
        for side in self.inputs:
            for (topic, partition), (earliest, end) in sorted(side.source.offsets(spark).items()):
                if bounded and earliest >= end:
                    continue
                stream = streams[(side.name, topic)]
                by_partition = self.route == "partition"
                for shard in [(partition + stream) % self.shards] if by_partition else range(self.shards):
                    found[shard].append((stream, partition))
        return {shard: tuple(sorted(places)) for shard, places in found.items()}

    def offsets(self, spark: SparkSession) -> dict[SourcePartition, tuple[int, int]]:
        """Give what the sources hold now: per (stream, partition) the earliest offset and the end, exclusive."""
        return {
            (self.streams[side.name, topic], partition): ends
            for side in self.inputs
            for (topic, partition), ends in side.source.offsets(spark).items()
        }

    def streaming(self, spark: SparkSession, checkpoint: str) -> DataFrame:
        """Give the packed rows of the live streams and of the control stream."""
        stage = packer(self.pack_plan(self.max_ahead_ms))
        packed = []
        for number, side in enumerate(self.inputs):  # Spark's offset log has the sources in this order
            source, mixing = _bundling(side), _mixing(side)
            if mixing is not None:
                what = self._bundle_input(side)
                first = first_positions(checkpoint, number, mixing.first_positions)
                rows = self.pack_input(side, mixing.stream_mixed(spark, what.names, first), beside=[BUNDLE])
                packed.append(rows.mapInArrow(unmixed(what, stage), frames.PACKED_SCHEMA))
            elif source is not None:
                what = self._bundle_input(side)
                timed = source.stream_bundles(spark, what.names).select(
                    BUNDLE, f.unix_millis(f.current_timestamp()).alias(frames.BATCH_TIME_IN)
                )
                packed.append(timed.mapInArrow(unbundled(what, stage), frames.PACKED_SCHEMA))
            else:
                rows = self.pack_input(side, side.source.stream(spark))
                packed.append(rows.mapInArrow(stage, frames.PACKED_SCHEMA))
        control = control_rows(spark, checkpoint).select(
            f.unix_millis(f.current_timestamp()).alias(frames.BATCH_TIME_IN),
            f.coalesce(f.col("drain"), f.lit(False)).alias(frames.DRAIN_IN),
        )
        packed.append(control.mapInArrow(stage, frames.PACKED_SCHEMA))
        return _union(packed)

    def replay(
        self, spark: SparkSession, ranges: Mapping[tuple[int, int], tuple[int, int]], stage: Stage, schema: str
    ) -> DataFrame | None:
        """Put exactly these offsets through a stage that takes the rows of the pack stage; None for empty ranges.

        Args:
            spark: The session.
            ranges: (stream, partition) -> half-open offset range.
            stage: For `mapInArrow`, after `pack_input`.
            schema: Of what the stage gives, as DDL.
        """
        streams = {number: pair for pair, number in self.streams.items()}
        parts = []
        for side in self.inputs:
            wanted = {
                (streams[stream][1], partition): bounds
                for (stream, partition), bounds in ranges.items()
                if streams[stream][0] == side.name and bounds[0] < bounds[1]
            }
            source, mixing = _bundling(side), _mixing(side)
            if wanted and mixing is not None:
                what = self._bundle_input(side)
                rows = self.pack_input(side, mixing.batch_mixed(spark, wanted, what.names), beside=[BUNDLE])
                parts.append(rows.mapInArrow(unmixed(what, stage), schema))
            elif wanted and source is not None:
                what = self._bundle_input(side)
                pieces, read = source.pieces(spark, wanted, what.names)
                tasks = min(len(pieces), replay_tasks(spark))
                numbers = spark.range(0, len(pieces), 1, max(1, tasks))
                parts.append(numbers.mapInArrow(reading(pieces, read, what, stage), schema))
            elif wanted:
                rows = self.pack_input(side, side.source.batch(spark, wanted))
                parts.append(rows.mapInArrow(stage, schema))
        return _union(parts) if parts else None

    def _bundle_input(self, side: Input) -> BundleInput:
        """Say of an input's rows what `pack_input` says of them."""
        here = set(side.source.fields().fieldNames())
        own = [side.field_of(field.name) for field in self.message_fields]
        return BundleInput(
            {topic: self.streams[(side.name, topic)] for topic in side.source.topics},
            side.event_time,
            side.key,
            self.route == "partition",
            self.shards,
            tuple(
                (field, name if name in here else None) for field, name in zip(self.message_fields, own, strict=True)
            ),
            widen=bool(side.name),
        )

    def pack_plan(self, max_ahead_ms: int | None) -> PackPlan:
        """Give the plan of the pack stage; a replay has no clock to compare with and passes None."""
        sides = {}
        if len(self.inputs) > 1:
            names = [f.name for f in self.message_fields]
            own = {side.name: frozenset(n for n in names if side.field_of(n) is not None) for side in self.inputs}
            sides = {number: own[side] for (side, _), number in self.streams.items()}
        topics = {number: topic for (_, topic), number in self.streams.items()}
        return PackPlan(self.grouping, self.message_fields, self.route == "partition", max_ahead_ms, topics, sides)

    def pack_input(self, side: Input, rows: DataFrame, beside: Sequence[str] = ()) -> DataFrame:
        """Select what the pack stage reads out of source rows, behind columns that are kept beside it."""
        stream = f.lit(None).cast("int")
        for topic in side.source.topics:
            stream = f.when(f.col("topic") == topic, f.lit(self.streams[(side.name, topic)])).otherwise(stream)
        time = f.unix_millis("timestamp") if side.event_time is None else _millis(rows, side.event_time)
        if self.route == "partition":
            place: Column = f.pmod(f.col("partition") + stream, f.lit(self.shards))
        elif side.key and self.shards > 1:
            place = f.pmod(
                f.xxhash64(*[_normal(rows, name, widen=bool(side.name)) for name in side.key]), f.lit(self.shards)
            ).cast("int")
        else:
            place = f.lit(0)
        length = _key_length(rows, side.key)
        too_long = length > MAX_KEY_TEXT_BYTES
        allowed = f.lit(f" bytes, at most {MAX_KEY_TEXT_BYTES} are allowed")
        said = f.when(too_long, f.concat(f.lit("the key has "), length.cast("string"), allowed))
        malformed = f.coalesce(f.col("malformed"), said)
        raw = f.coalesce(f.col("raw"), f.when(too_long, f.to_json(f.col("fields")).cast("binary")))
        bad = malformed.isNotNull() | time.isNull()
        here = set(rows.schema["fields"].dataType.fieldNames())
        return rows.select(
            *beside,
            stream.alias(STREAM),
            f.col("partition").alias(PARTITION),
            f.col("offset").alias(OFFSET),
            time.cast("long").alias(TIME),
            place.alias(frames.SHARD_IN),
            f.unix_millis("timestamp").alias(frames.TIMESTAMP_IN),
            f.when(bad, f.col("key")).alias(frames.KEY_IN),
            f.when(bad, raw).alias(frames.RAW_IN),
            malformed.alias(frames.MALFORMED_IN),
            f.unix_millis(f.current_timestamp()).alias(frames.BATCH_TIME_IN),
            *[_field(side.field_of(field.name), field, here) for field in self.message_fields],
        )


def number_streams(inputs: Sequence[tuple[str, Source]]) -> dict[tuple[str, str], int]:
    """Give the stream number of each (input name, topic): inputs in order, topics in the order of their source."""
    pairs = [(name, topic) for name, source in inputs for topic in source.topics]
    return {pair: number for number, pair in enumerate(pairs)}


def _key_length(rows: DataFrame, key: Sequence[str]) -> Column:
    """Give the bytes of the texts in a row's key."""
    kinds = {field.name: field.dataType for field in rows.schema["fields"].dataType}
    total = f.lit(0)
    for name in key:
        if isinstance(kinds[name], (StringType, BinaryType)):
            total += f.coalesce(f.octet_length(f.col("fields").getField(name)), f.lit(0))
    return total


def _bundling(side: Input) -> Bundling | None:
    """Give an input's source if its rows can cross the JVM as bundles."""
    if not isinstance(side.source, Bundling) or not side.source.bundled:
        return None
    return side.source if _can_bundle(side) else None


def _mixing(side: Input) -> Mixing | None:
    """Give an input's source if most of its rows can cross the JVM as bundles."""
    if not isinstance(side.source, Mixing) or not side.source.mixed:
        return None
    return side.source if _can_bundle(side) else None


def _can_bundle(side: Input) -> bool:
    return can_bundle(to_arrow_type(side.source.fields(), timezone="UTC"), side.event_time, side.key)


def _union(parts: Sequence[DataFrame]) -> DataFrame:
    return reduce(lambda whole, other: whole.union(other), parts)


def _millis(rows: DataFrame, name: str) -> Column:
    kind = rows.schema["fields"].dataType[name].dataType
    column = f.col("fields").getField(name)
    if isinstance(kind, (TimestampType, TimestampNTZType)):
        return f.unix_millis(column.cast("timestamp"))
    if isinstance(kind, DateType):
        return f.unix_millis(column.cast("timestamp"))
    return column.cast("long")


def _field(own: str | None, field: pa.Field, here: set[str]) -> Column:
    """Give a field of an input under the name that the operator reads; typed nulls where the input has none."""
    name = frames.column_name(field.name)
    if own is None or own not in here:
        return f.lit(None).cast(from_arrow_type(field.type)).alias(name)
    return f.col("fields").getField(own).alias(name)


def _normal(rows: DataFrame, name: str, *, widen: bool) -> Column:
    """Give a key field such that equal keys hash alike: -0.0 equals 0.0; in a join also integers of other widths."""
    column = f.col("fields").getField(name)
    kind = rows.schema["fields"].dataType[name].dataType
    if kind.typeName() in ("float", "double"):
        return column.cast("double") + f.lit(0.0)
    if widen and isinstance(kind, IntegralType):
        return column.cast("long")
    return column


def check_event_time(schema: StructType, name: str | None) -> None:
    """Check the option `event_time` against the value's fields.

    Raises:
        ValueError: Unknown, or of a type without a time.
    """
    if name is None:
        return
    if name not in schema.fieldNames():
        raise ValueError(f"event_time={name!r}: allowed are the fields {', '.join(schema.fieldNames())}")
    kind = schema[name].dataType
    if not isinstance(kind, (TimestampType, TimestampNTZType, DateType, LongType, IntegralType)):
        raise ValueError(
            f"event_time={name!r}: must be a timestamp, a date or integer milliseconds, not {kind.simpleString()}"
        )


def arrow_fields(schema: StructType, names: Sequence[str]) -> tuple[pa.Field, ...]:
    """Give the Arrow fields that frames carry for fields of a value; timestamps in UTC microseconds."""
    return tuple(pa.field(name, to_arrow_type(schema[name].dataType, timezone="UTC")) for name in names)


def arrow_schema(schema: StructType) -> pa.Schema:
    """Give the Arrow schema of all fields of a value."""
    return pa.schema(arrow_fields(schema, schema.fieldNames()))


def describe(job: Job, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Give the manifest's entries of a job."""
    return {
        "route": job.route,
        "streams": [[name, topic, number] for (name, topic), number in job.streams.items()],
        "inputs": [
            {"event_time": side.event_time, "key": list(side.key), "source": side.source.describe()}
            for side in job.inputs
        ],
        "operator": job.operator.describe(),
        "message_fields": [[field.name, str(field.type)] for field in job.message_fields],
        **extra,
    }
