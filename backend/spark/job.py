"""A job: sources, routing and operator put together into Spark plans, the same for the stream and for a replay.

The way of a message: records -> parsed -> `pack_input` (event time, shard, the fields the operator reads) -> the pack
stage, all in the Python worker that has the records -> `groupBy(shard)` -> the stateful operator -> one row per shard
and micro-batch for the sink. Records come from a source that is read there (`backend.spark.reading`), or through the
JVM from one that Spark reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
from pyspark.errors import PySparkTypeError
from pyspark.sql.pandas.types import from_arrow_schema, from_arrow_type, to_arrow_type
from pyspark.sql.types import DateType, IntegralType, LongType, TimestampNTZType, TimestampType

from backend.batch import Operator, SourcePartition
from backend.boundary import crossing
from backend.sources import BySpark, Direct, Source, is_direct
from backend.sources.dataframe import is_ranked
from backend.spark.control import control_rows
from backend.spark.first_offsets import known_positions, write_positions
from backend.spark.pack import frames
from backend.spark.pack.hashing import NAME, hashable
from backend.spark.pack.pack_input import PackInput, Stage, selecting
from backend.spark.pack.packing import PackPlan, pack_control, packer
from backend.spark.reading import replayed, streamed
from backend.spark.resume import has_begun
from backend.spark.task import batch_time
from backend.steps import DEFAULT_POISON_LIMIT, Step, Steps, schema_after
from backend.windows.operator import combining_of
from recovery.commit.option_sets import ByVersion

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from backend.kafka_client.identity import TopicIdentity

Parser = Callable[[pa.RecordBatch], pa.RecordBatch]
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
        steps: See `backend.steps`.
    """

    source: Source
    event_time: str | None
    key: tuple[str, ...]
    name: str = ""
    steps: tuple[Step, ...] = ()

    def fields(self) -> StructType:
        """Return the fields behind the steps; needs an active Spark session."""
        fields = self.source.fields()
        if not self.steps:
            return fields
        after = schema_after(self.steps, arrow_schema(fields))
        for one in after:
            try:
                from_arrow_type(one.type)
            except PySparkTypeError:
                raise ValueError(
                    f"the steps make the field {one.name!r} of type {one.type}: allowed are types that Spark has, too"
                ) from None
        return from_arrow_schema(after)

    @property
    def direct(self) -> Direct | None:
        """The source, where it is read in the Python workers; None where Spark reads it."""
        return self.source if is_direct(self.source) and self.source.direct else None

    def parse(self, timezone: str, poison_limit: int | None, *, debug: bool = False) -> Parser:
        """Return what parses records and runs the steps; see `backend.sources.Source.parse` and `Steps`."""
        parse = self.source.parse(timezone)
        if not self.steps:
            return parse
        return Steps(parse, self.steps, arrow_schema(self.fields()), poison_limit, debug, is_ranked(self.source))

    def names(self, what: PackInput) -> frozenset[str] | None:
        """Return the fields of the values to read; None for all, which steps may look at."""
        return None if self.steps else what.names

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
        poison_limit: See `Steps`.
        debug_steps: See `Steps`.
        bases: Routed by source partition: the shard of each stream's partition 0. None: the stream's number, as where
            there is one stream, and in manifests of before.
        session: What messages are read under, from the start on (`backend.spark.session.settings.SESSION`).
    """

    inputs: tuple[Input, ...]
    route: str
    grouping: tuple[int, ...]
    operator: Operator
    message_fields: tuple[pa.Field, ...]
    max_ahead_ms: int | None
    poison_limit: int = DEFAULT_POISON_LIMIT
    debug_steps: bool = False
    bases: tuple[int, ...] | None = None
    session: Mapping[str, str] = field(default_factory=dict)

    def check_sources(self) -> None:
        """Check that each source can give again what the operator keeps of it.

        Raises:
            HistoryLost: It cannot.
        """
        for side in self.inputs if self.operator.replays else ():
            getattr(side.source, "check_replayable", lambda: None)()

    def begin(self, checkpoint: str, first_offsets: Sequence[Sequence[int]], *, known: bool) -> None:
        """Write down where a query that has not begun will, in sources that say it: `streaming` goes by it.

        Args:
            checkpoint: Spark's checkpoint location.
            first_offsets: As the manifest will have them: (stream, partition, offset).
            known: There is a manifest: what has begun goes by what it wrote down then. Release 0.1 may have died before
                it did: then the source is asked, once.
        """
        begun = has_begun(checkpoint)
        topics = {stream: named for named, stream in self.streams.items()}
        for number, side in enumerate(self.inputs):
            ask = getattr(side.source, "first_positions", None)
            if ask is None or (begun and known_positions(checkpoint, number) is not None):
                continue
            mine = {
                (topics[stream][1], partition): first
                for stream, partition, first in first_offsets
                if topics[stream][0] == side.name
            }
            write_positions(checkpoint, number, ask() if begun and known else mine)

    def pinned(self, topics: Mapping[str, TopicIdentity]) -> Job:
        """Return the job with sources that refuse topics which were deleted and made again since."""
        return self._with_sources("pinned", topics)

    def looking_once(self) -> Job:
        """Return the job for one restore, of sources that look once at what they hold, however many replays it has."""
        return self._with_sources("looking_once")

    def _with_sources(self, name: str, *given: object) -> Job:
        """Return the job with what a method of its sources gives; those that do not have it stay."""
        changes = [getattr(side.source, name, None) for side in self.inputs]
        sides = zip(self.inputs, changes, strict=True)
        return replace(self, inputs=tuple(replace(s, source=change(*given)) if change else s for s, change in sides))

    @property
    def ranked(self) -> frozenset[int]:
        """Streams whose rows get their offsets in the shard (`backend.spark.ranking`)."""
        mine = {side.name for side in self.inputs if is_ranked(side.source)}
        return frozenset(number for (name, _), number in self.streams.items() if name in mine)

    @property
    def logged(self) -> frozenset[int]:
        """Streams whose messages are logged: the operator keeps them, and nobody can read them again."""
        return self.ranked if self.operator.replays else frozenset()

    @property
    def shards(self) -> int:
        """Number of shards."""
        return len(self.grouping)

    @property
    def streams(self) -> dict[tuple[str, str], int]:
        """Stream number of each (input name, topic)."""
        return number_streams([(side.name, side.source) for side in self.inputs])

    @property
    def direct(self) -> bool:
        """Whether no input's records cross the JVM one by one."""
        return all(side.direct is not None for side in self.inputs)

    def partitions(self, spark: SparkSession, *, bounded: bool) -> list[SourcePartition]:
        """List the source partitions, as far as they are there now.

        Args:
            spark: The session.
            bounded: What comes later is not read, so a partition that is empty now never brings anything.
        """
        return sorted(place for place, (earliest, end) in self.offsets(spark).items() if not bounded or earliest < end)

    def by_shard(self, partitions: Iterable[SourcePartition]) -> dict[int, tuple[SourcePartition, ...]]:
        """Give the source partitions that each shard reads, of these."""
        found = {shard: list[SourcePartition]() for shard in range(self.shards)}
        for stream, partition in sorted(partitions):
            base = stream if self.bases is None else self.bases[stream]
            mine = [(partition + base) % self.shards] if self.route == "partition" else range(self.shards)
            for shard in mine:
                found[shard].append((stream, partition))
        return {shard: tuple(places) for shard, places in found.items()}

    def offsets(self, spark: SparkSession) -> dict[SourcePartition, tuple[int, int]]:
        """Give what the sources hold now: per (stream, partition) the earliest offset and the end, exclusive."""
        return {
            (self.streams[side.name, topic], partition): ends
            for side in self.inputs
            for (topic, partition), ends in side.source.offsets(spark).items()
        }

    def began(self, checkpoint: str) -> dict[SourcePartition, int]:
        """Return where the query began to read source partitions, as far as its checkpoint says it."""
        return {
            (self.streams[side.name, topic], partition): offset
            for number, side in enumerate(self.inputs)
            if hasattr(side.source, "first_positions")
            for (topic, partition), offset in (known_positions(checkpoint, number) or {}).items()
        }

    def streaming(
        self, spark: SparkSession, checkpoint: str, plans: ByVersion[PackPlan], trigger_ms: int = 0
    ) -> DataFrame:
        """Give the packed rows of the live streams and of the control stream.

        Args:
            spark: The session.
            checkpoint: Spark's checkpoint location.
            plans: See `packer`.
            trigger_ms: See `streamed`.
        """
        clock, grouping = partial(batch_time, checkpoint), self.grouping
        pack = packer(plans, clock)
        packed = []
        for number, side in enumerate(self.inputs):  # Spark's offset log has the sources in this order
            # Spark's connector looks there itself
            first = known_positions(checkpoint, number) if hasattr(side.source, "first_positions") else None
            what, direct = replace(self._pack_input(side), coded=True), side.direct
            parse = side.parse(what.timezone, self.poison_limit, debug=self.debug_steps)
            stage = selecting(parse, what, pack)
            if direct is not None:
                reader = direct.stream_reader(side.names(what), first)
                if len(side.key) == 1 and not side.steps and combining_of(self.operator) is not None:
                    getattr(reader, "code", lambda _: None)(side.key[0])
                packed.append(streamed(spark, reader, frames.PACKED_SCHEMA, stage, trigger_ms))
            else:
                rows = cast(BySpark, side.source).stream(spark)
                packed.append(rows.mapInArrow(crossing(stage), frames.PACKED_SCHEMA))

        def handed_on(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            time_ms = clock()
            return (pack_control(rows, grouping, time_ms) for rows in batches if rows.num_rows)

        packed.append(control_rows(spark, checkpoint).mapInArrow(crossing(handed_on), frames.PACKED_SCHEMA))
        return _union(packed)

    def replay(
        self, spark: SparkSession, ranges: Mapping[tuple[int, int], tuple[int, int]], stage: Stage, schema: str
    ) -> DataFrame | None:
        """Put exactly these offsets through a stage that takes the rows of the pack stage; None for empty ranges.

        Args:
            spark: The session.
            ranges: (stream, partition) -> half-open offset range.
            stage: Takes what `pack_input` gives.
            schema: Of what the stage gives, as DDL.

        Raises:
            HistoryLost: The source no longer has a part of the ranges, or may have other messages (compacted topics).
        """
        streams = {number: pair for pair, number in self.streams.items()}
        parts = []
        for side in self.inputs:
            wanted = {
                (streams[stream][1], partition): bounds
                for (stream, partition), bounds in ranges.items()
                if streams[stream][0] == side.name and bounds[0] < bounds[1]
            }
            if not wanted or is_ranked(side.source):  # its messages are in the message log, shard by shard
                continue
            what, direct = self._pack_input(side), side.direct
            select = selecting(side.parse(what.timezone, None), what, stage)
            if direct is not None:
                getattr(direct, "check_replayable", lambda: None)()
                available = {key: [bounds] for key, bounds in wanted.items()}
                pieces, read, _ = direct.pieces(spark, available, side.names(what))
                parts.append(replayed(spark, pieces, read, schema, select))
            else:
                rows = cast(BySpark, side.source).batch(spark, wanted)
                parts.append(rows.mapInArrow(crossing(select), schema))
        return _union(parts) if parts else None

    def _pack_input(self, side: Input) -> PackInput:
        """Return what the job says of an input's rows."""
        own = [(field, side.field_of(field.name)) for field in self.message_fields]
        return PackInput(
            {topic: self.streams[(side.name, topic)] for topic in side.source.topics},
            side.event_time,
            side.key,
            self.route == "partition",
            self.shards,
            tuple((field, name) for field, name in own if name is not None),
            widen=bool(side.name),
            timezone=self.session["timezone"],
            bases=self.bases,
        )

    @property
    def topics(self) -> dict[int, str]:
        """Topic by stream."""
        return {number: topic for (_, topic), number in self.streams.items()}

    def pack_plan(self, max_ahead_ms: int | None = None, operator: Operator | None = None) -> PackPlan:
        """Give the plan of the pack stage.

        Args:
            max_ahead_ms: See `backend.spark.pack.judging`; a replay has no clock to compare with.
            operator: The operator behind it, with the options of a micro-batch; None: it gets each message.
        """
        return PackPlan(
            self.grouping,
            self.message_fields,
            self.route == "partition",
            max_ahead_ms,
            self.topics,
            None if self.ranked or operator is None else combining_of(operator),
        )


def number_streams(inputs: Sequence[tuple[str, Source]]) -> dict[tuple[str, str], int]:
    """Give the stream number of each (input name, topic): inputs in order, topics in the order of their source."""
    pairs = [(name, topic) for name, source in inputs for topic in source.topics]
    return {pair: number for number, pair in enumerate(pairs)}


def _union(parts: Sequence[DataFrame]) -> DataFrame:
    return reduce(lambda whole, other: whole.union(other), parts)


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


def check_key(schema: StructType, key: Sequence[str]) -> None:
    """Check that messages can be routed by fields.

    Raises:
        ValueError: A field is unknown, or of a type without a hash.
    """
    for name in key:
        if name not in schema.fieldNames():
            raise ValueError(f"key={name!r}: allowed are the fields {', '.join(schema.fieldNames())}")
        if not hashable(to_arrow_type(schema[name].dataType, timezone="UTC")):
            kind = schema[name].dataType.simpleString()
            raise ValueError(f"key={name!r}: messages cannot be routed by {kind}: allowed are types of one plain value")


def arrow_schema(schema: StructType) -> pa.Schema:
    """Give the Arrow schema that frames carry for the fields of a value; timestamps in UTC microseconds."""
    return pa.schema([pa.field(field.name, to_arrow_type(field.dataType, timezone="UTC")) for field in schema])


def describe(job: Job, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Give the manifest's entries of a job."""
    return {
        "route": job.route,
        **({} if job.bases is None else {"bases": list(job.bases)}),
        "hash": NAME,
        "streams": [[name, topic, number] for (name, topic), number in job.streams.items()],
        "inputs": [
            {"event_time": side.event_time, "key": list(side.key), "source": side.source.describe()}
            | ({"steps": [step.describe() for step in side.steps]} if side.steps else {})
            for side in job.inputs
        ],
        "operator": job.operator.describe(),
        "message_fields": [[field.name, str(field.type)] for field in job.message_fields],
        "max_ahead_ms": job.max_ahead_ms,
        **extra,
    }
