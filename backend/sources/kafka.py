"""The Kafka source: topics, live and, for a replay, in exact offset ranges.

There are two readers. `client` (`backend.sources.kafka_reader`) reads in the Python workers, several times as fast as
`connector`, Spark's own, which is for its options, headers, and keys that are read as numbers or times. Both give the
same records, and a checkpoint goes on with either.

Stream and replay read with the same isolation level and parse in the same way, so a replay sees the messages that the
stream saw. Spark keeps the offsets in its checkpoint; no consumer group's offsets are touched.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from backend.errors import HistoryLost
from backend.kafka_client.loss import KEEP
from backend.kafka_client.settings import KafkaSettings, check_topic
from backend.sources import OffsetRange, TopicPartition, replay_tasks
from backend.sources.formats import PLAIN_KEYS, RECORD, TYPED_KEYS, Parse, ValueFormat, parse_ddl, record_schema
from backend.sources.spark_offsets import offset_json, positions_in

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from backend.kafka_client.identity import TopicIdentity
    from backend.sources.kafka_reader import KafkaStreamReader, Piece
    from backend.sources.kafka_watch import TopicWatch

READERS = ("client", "connector")
ISOLATION = ("read_committed", "read_uncommitted")
DEFAULT_OFFSETS_PER_TASK = 500_000

_OURS = frozenset(
    option.lower()
    for option in (
        "assign",
        "subscribe",
        "subscribePattern",
        "startingOffsets",
        "endingOffsets",
        "startingTimestamp",
        "endingTimestamp",
        "startingOffsetsByTimestamp",
        "endingOffsetsByTimestamp",
        "failOnDataLoss",
        "includeHeaders",
        "maxOffsetsPerTrigger",
        "kafka.bootstrap.servers",
        "kafka.isolation.level",
    )
)
IN_BULK = {"kafka.max.partition.fetch.bytes": str(8 * 1024 * 1024), "kafka.max.poll.records": "5000"}
"""Larger answers than the client's own megabyte and 500 records, which take a quarter of the JVM's time more. A task
reads one partition; of it a client holds two answers or so. `options` says otherwise."""

_SECRET = ("kafka.sasl.", "kafka.ssl.", "kafka.security.")


@dataclass(frozen=True, slots=True)
class KafkaSource:
    """What `kafka` makes; see there."""

    topics: tuple[str, ...]
    settings: KafkaSettings
    value: ValueFormat
    key: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    isolation: str = "read_committed"
    starting: str = "earliest"
    max_offsets_per_trigger: int | None = None
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    reader: str | None = None
    known: Mapping[str, TopicIdentity] = field(default_factory=dict, compare=False, repr=False)

    def pinned(self, known: Mapping[str, TopicIdentity]) -> KafkaSource:
        """Return a copy that refuses topics which were deleted and made again since `identities` gave these.

        Raises (in everything that asks the cluster):
            SourceWentBack: A topic has another id, or fewer partitions.
        """
        return replace(self, known={topic: known[topic] for topic in self.topics if topic in known})

    def watch(self) -> TopicWatch:
        """Return what sees, between two micro-batches, that the topics are still the same; needs `pinned`."""
        from backend.sources.kafka_watch import TopicWatch

        return TopicWatch(self.settings, self.topics, self.known)

    def stream(self, spark: SparkSession) -> DataFrame:
        """Return the connector's streaming DataFrame of records; a query that starts anew begins at `starting`.

        Offsets that are gone fail the query. Partitions that are added while it runs are read from their beginning.
        """
        options = {"subscribe": ",".join(self.topics), "startingOffsets": self.starting, "failOnDataLoss": "true"}
        if self.max_offsets_per_trigger is not None:
            options["maxOffsetsPerTrigger"] = str(self.max_offsets_per_trigger)
        return self._rows(spark, options, streaming=True)

    def batch(self, spark: SparkSession, ranges: Mapping[TopicPartition, OffsetRange]) -> DataFrame:
        """Return exactly the records of half-open offset ranges, none of which is empty, as the connector reads them.

        Raises:
            HistoryLost: A range reaches outside of what the topics hold, or a topic is compacted.
            SourceUnavailable: The cluster does not answer.
            TopicMissing: A topic does not exist.
            AccessRefused: The cluster refuses the credentials or their rights.
        """
        wanted = self._available(ranges)
        self.check_replayable()
        options = {
            "assign": json.dumps({topic: [number for name, number in wanted if name == topic] for topic, _ in wanted}),
            "startingOffsets": _by_topic({key: bounds[0] for key, bounds in wanted.items()}),
            "endingOffsets": _by_topic({key: bounds[1] for key, bounds in wanted.items()}),
            "failOnDataLoss": "true",
            "maxRecordsPerPartition": str(DEFAULT_OFFSETS_PER_TASK),
        }
        return self._rows(spark, options, streaming=False)

    def _available(self, ranges: Mapping[TopicPartition, OffsetRange]) -> dict[TopicPartition, OffsetRange]:
        """Give the ranges that are not empty, sorted, having seen that the topics hold them."""
        wanted = {key: bounds for key, bounds in sorted(ranges.items()) if bounds[0] < bounds[1]}
        here = self.offsets() if wanted else {}
        for (topic, partition), (start, end) in wanted.items():
            earliest, latest = here.get((topic, partition), (0, 0))
            if start < earliest or end > latest:
                raise HistoryLost(
                    "the topic does not hold the offsets that a replay needs",
                    where=f"{topic}-{partition}",
                    why=f"needed are {start} to {end - 1}, there are {earliest} to {latest - 1}",
                    command=KEEP,
                )
        return wanted

    @property
    def _unknown_s(self) -> float | None:
        """How long a topic may not be known to the broker that is asked, where another than a new one's is meant."""
        from backend.kafka_client.settling import SETTLE_S

        return SETTLE_S if self.known else None

    @property
    def direct(self) -> bool:
        """Whether the client reads."""
        return self.reader != "connector" and not self._only_connector()

    def parse(self, timezone: str) -> Parse:
        """Return what parses the records; needs an active Spark session."""
        # a plain one that Spark reads is as Spark has it: no manifest says which messages that were
        return self.value.parse(timezone, " ".join(self.key.split()) if self.direct or self._has_typed_key else "")

    def _only_connector(self) -> str:
        """Return which option leaves only Spark's connector; "" when none does."""
        if self.headers:
            return "headers"
        if self.options:
            return "options"
        return f"key={self.key!r}" if self._has_typed_key else ""

    @property
    def _has_typed_key(self) -> bool:
        return any(kind not in PLAIN_KEYS for _, kind in _ddl(self.key))

    def first_positions(self) -> dict[TopicPartition, int]:
        """Give where a new query begins.

        Raises:
            ValueError: `starting` leaves a source partition out, or names an offset that a topic does not have.
            SourceUnavailable: The cluster does not answer.
            TopicMissing: A topic does not exist.
            AccessRefused: The cluster refuses the credentials or their rights.
        """
        here = self.offsets()
        if self.starting in ("earliest", "latest"):
            return {key: bounds[self.starting == "latest"] for key, bounds in here.items()}
        given = positions_in(self.starting)
        if given.keys() != here.keys():
            raise ValueError(f"starting={given!r}: must give offsets for exactly {', '.join(map(str, sorted(here)))}")
        for key, (low, high) in sorted(here.items()):
            if not low <= given[key] <= high:
                raise ValueError(f"starting={given!r}: {key} has offsets from {low}, the next one to come is {high}")
        return given

    def stream_reader(
        self, names: Collection[str] | None = None, first: Mapping[TopicPartition, int] | None = None
    ) -> KafkaStreamReader:
        """Return what plans and reads the stream with the client."""
        from backend.sources.kafka_reader import TOGETHER, KafkaStreamReader

        begin = first if first is not None else self.first_positions()
        settings, bound = self.settings.inlined(), self.max_offsets_per_trigger
        slow = names is None or self.value.function is not None  # steps see all fields; it is users' code
        bounded = bound is not None and bound <= TOGETHER  # a backlog, too, is read in such micro-batches
        together = 0 if slow or bounded else TOGETHER
        per_task, known = DEFAULT_OFFSETS_PER_TASK, self.known
        return KafkaStreamReader(settings, self.topics, self.isolation, bound, per_task, begin, known, together)

    def pieces(
        self,
        spark: SparkSession,
        ranges: Mapping[TopicPartition, Sequence[OffsetRange]],
        names: Collection[str] | None = None,
    ) -> tuple[Sequence[Piece], Callable[[Piece], Iterator[pa.RecordBatch]], StructType]:
        """Return pieces of offset ranges, what reads one (confluent-kafka), and the schema; raises as `batch` does.

        Compacted topics are read, too, as far as they go: a replay asks `check_replayable` besides.
        """
        from backend.sources.kafka_reader import cut, read_records

        self._available({key: (own[0][0], own[-1][1]) for key, own in ranges.items()})
        total = sum(end - start for own in ranges.values() for start, end in own)
        per_task = max(1, min(DEFAULT_OFFSETS_PER_TASK, -(-total // replay_tasks(spark))))
        found = [
            piece
            for key, own in sorted(ranges.items())
            for start, end in own
            for piece in cut(*key, start, end, per_task)
        ]
        configuration = {**self.settings.inlined().for_client(), "isolation.level": self.isolation}
        return found, partial(read_records, configuration), record_schema()

    def offsets(self, spark: SparkSession | None = None) -> dict[TopicPartition, OffsetRange]:
        """Give per source partition the earliest offset and the one after the latest; Spark is not needed for it.

        Raises:
            SourceUnavailable: The cluster does not answer.
            TopicMissing: A topic does not exist.
            AccessRefused: The cluster refuses the credentials or their rights.
        """
        from backend.kafka_client.admin import offsets

        return offsets(self.settings, self.topics, committed_only=self.isolation == "read_committed", known=self.known)

    def fields(self) -> StructType:
        """Give the schema of the column `fields`; needs an active Spark session."""
        from pyspark.sql.types import StructType

        extra = StructType()
        for option, entries in (("key", _ddl(self.key)), ("headers", self.headers.items())):
            for name, kind in entries:
                extra = extra.add(name, parse_ddl(kind, f"{option}={name + ' ' + kind!r}"))
        parsed = self.value.fields()
        twice = {*parsed.names} & {*extra.names} or {name for name in extra.names if extra.names.count(name) > 1}
        if twice:
            raise ValueError(f"field {min(twice)!r}: is given twice by value, key and headers")
        return StructType([*parsed.fields, *extra.fields])

    def identities(self) -> dict[str, TopicIdentity]:
        """Give each topic's id and number of partitions, for `kafka.admin.compare`.

        Raises:
            SourceUnavailable: The cluster does not answer.
            TopicMissing: A topic does not exist.
            AccessRefused: The cluster refuses the credentials or their rights.
        """
        from backend.kafka_client.admin import identities

        return identities(self.settings, self.topics, unknown_s=self._unknown_s)

    def check_replayable(self) -> None:
        """See that what was read can be read again: a job asks that keeps messages.

        Raises:
            HistoryLost: A topic is compacted.
            SourceUnavailable: The cluster does not answer.
            TopicMissing: A topic does not exist.
            AccessRefused: The cluster refuses the credentials or their rights.
        """
        from backend.kafka_client.admin import check_replayable

        check_replayable(self.settings, self.topics, unknown_s=self._unknown_s)

    def check_positions(self, positions: Mapping[TopicPartition, int]) -> None:
        """See that a query can go on where it was.

        Args:
            positions: The next offset to read per source partition; partitions of other topics are passed over.

        Raises:
            HistoryLost: An offset that comes next is gone.
            SourceUnavailable: The cluster does not answer.
            TopicMissing: A topic does not exist.
            AccessRefused: The cluster refuses the credentials or their rights.
        """
        here = self.offsets()
        for (topic, partition), following in sorted(positions.items()):
            earliest, _ = here.get((topic, partition), (following, following))
            if following < earliest:
                raise HistoryLost(
                    "the topic no longer holds the offsets that the query has to read next",
                    where=f"{topic}-{partition}",
                    why=f"offset {following} comes next, the earliest is {earliest}: retention took"
                    f" {earliest - following} offsets that were never read",
                    command=KEEP,
                )

    def describe(self) -> dict[str, object]:
        """Give the manifest's entry: no servers, a cluster may move; nothing secret."""
        return {
            "kind": "kafka",
            "topics": list(self.topics),
            "value": self.value.describe(),
            "key": self.key,
            "headers": dict(self.headers),
            "isolation": self.isolation,
            **({"key_parser": TYPED_KEYS} if self._has_typed_key else {}),
        }

    def _rows(self, spark: SparkSession, options: Mapping[str, str], *, streaming: bool) -> DataFrame:
        from pyspark.sql import functions as f

        from backend.spark.session.connector import ensure_connector

        ensure_connector(spark)
        reader: Any = spark.readStream if streaming else spark.read
        shares = {} if streaming else {"minPartitions": str(replay_tasks(spark))}
        rows = (
            reader.format("kafka")
            .options(**IN_BULK, **shares, **self.settings.for_spark())
            .options(**self.options)  # whatever the case of a name, the option that is set last counts
            .options(**options)
            .option("kafka.isolation.level", self.isolation)
            .option("includeHeaders", str(bool(self.headers)).lower())
            .load()
        )
        self.fields()  # checks the names
        more = [_typed(f.col("key"), kind).alias(name) for name, kind in _ddl(self.key)]
        more += [_typed(_last_header(name), kind).alias(name) for name, kind in self.headers.items()]
        stamp = f.when(f.unix_micros("timestamp") >= 0, f.col("timestamp"))  # -1 ms: it has none, as the client says
        return rows.withColumn("timestamp", stamp).select(*RECORD, *more)


def kafka(
    topics: str | Sequence[str],
    *,
    servers: str | KafkaSettings,
    value: str | StructType = "",
    format: str | Callable[[Any], Any] = "json",
    key: str = "",
    headers: Mapping[str, str] | None = None,
    isolation: str = "read_committed",
    starting: str | Mapping[TopicPartition, int] = "earliest",
    max_offsets_per_trigger: int | None = None,
    options: Mapping[str, str] | None = None,
    reader: str | None = None,
) -> KafkaSource:
    """Read Kafka topics as a replayable stream.

    Args:
        topics: A name or several.
        servers: `host:port,...`, with security from `REWIND_KAFKA_*` in the environment; or `KafkaSettings`.
        value: The fields of a value: Spark DDL or a `StructType`; the schema in JSON for `avro`; nothing for `raw`.
        format: `json`, `avro` (bare binary), `raw`, or a function: `pyarrow.BinaryArray -> pyarrow.StructArray` of the
            same length, null where a value is malformed; it runs again in a replay, so it must be pure.
        key: The message's key as one more field, DDL such as `"user string"`; other types are read from its text.
        headers: Header -> type: the last header of that name as one more field; null without it.
        isolation: `read_committed` (aborted transactions are not seen) or `read_uncommitted`.
        starting: Where a new query begins: `earliest`, `latest`, or an offset for every (topic, partition).
        max_offsets_per_trigger: Bound on the offsets of one micro-batch over all partitions.
        options: More of the connector's options, such as `minPartitions` or `kafka.max.poll.records`.
        reader: `client` (confluent-kafka in the Python workers: a key that is a string or binary, no headers, no
            options) or `connector` (Spark's own, for everything). None: the client where it can be.

    Raises:
        ValueError: Of a bad option, naming it.
    """
    names = (topics,) if isinstance(topics, str) else tuple(topics) if isinstance(topics, list | tuple) else ()
    if not names or len({*map(repr, names)}) != len(names):
        raise ValueError(f"topics={topics!r}: must be one or more different names")
    for name in names:
        check_topic(name, "topics", topics)
    if isolation not in ISOLATION:
        raise ValueError(f"isolation={isolation!r}: must be one of {', '.join(ISOLATION)}")
    bound = max_offsets_per_trigger
    if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int) or bound < 1):
        raise ValueError(f"max_offsets_per_trigger={bound!r}: must be an integer of at least 1, or None")
    _ddl(key)
    _check_texts(options, headers)
    if reader is not None and reader not in READERS:
        raise ValueError(f"reader={reader!r}: must be one of {', '.join(READERS)}, or None")
    if not isinstance(value, str) and not callable(getattr(value, "toDDL", None)):
        raise ValueError(f"value={value!r}: must be Spark DDL or a StructType")
    if format == "typed":
        raise ValueError("format='typed': allowed are json, avro, raw, or a function")
    schema = value if isinstance(value, str) else value.toDDL()
    parsed = ValueFormat("function", schema, format) if callable(format) else ValueFormat(format, schema)
    settings = servers if isinstance(servers, KafkaSettings) else KafkaSettings.from_environment(servers)
    settings.check_files()
    source = KafkaSource(
        topics=tuple(sorted(names)),
        settings=settings,
        value=parsed,
        key=key,
        headers=dict(headers or {}),
        isolation=isolation,
        starting=_starting(starting, names),
        max_offsets_per_trigger=bound,
        options=dict(options or {}),
        reader=reader,
    )
    needs = source._only_connector()
    if reader == "client" and needs:
        raise ValueError(f"reader='client': {needs} needs the connector: allowed are 'connector' and None")
    return source


def _starting(starting: str | Mapping[TopicPartition, int], topics: Sequence[str]) -> str:
    if isinstance(starting, str):
        if starting not in ("earliest", "latest"):
            raise ValueError(f"starting={starting!r}: must be 'earliest', 'latest', or offsets per (topic, partition)")
        return starting
    if (
        not isinstance(starting, Mapping)
        or not all(isinstance(key, tuple) and len(key) == 2 and _is_offset(key[1]) for key in starting)
        or {topic for topic, _ in starting} != set(topics)
        or not all(map(_is_offset, starting.values()))
    ):
        raise ValueError(
            f"starting={starting!r}: must be 'earliest', 'latest', or offsets from 0 for every (topic, partition)"
        )
    return _by_topic(starting)


def _check_texts(options: Mapping[str, str] | None, headers: Mapping[str, str] | None) -> None:
    for option, given in (("options", options), ("headers", headers)):
        if not _texts(given):
            raise ValueError(f"{option}={given!r}: must be a dictionary of texts, or None")
    for name in options or {}:
        if name.lower() in _OURS:
            raise ValueError(f"options: {name!r} is set by the source itself; see the arguments of kafka()")
        if name.lower().startswith(_SECRET):
            raise ValueError(f"options: {name!r} must be given by KafkaSettings, which keeps it out of sight")


def _is_offset(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _texts(given: object) -> bool:
    return given is None or (
        isinstance(given, Mapping) and all(isinstance(text, str) for pair in given.items() for text in pair)
    )


def _by_topic(values: Mapping[TopicPartition, int]) -> str:
    """Write the connector's JSON: topic -> partition -> offset.

    >>> _by_topic({("t", 0): 5, ("t", 1): 7})
    '{"t": {"0": 5, "1": 7}}'
    """
    return json.dumps(offset_json(values))


def _ddl(text: str) -> list[tuple[str, str]]:
    """Split `"name type"` in its two words; nothing for an empty text."""
    if not isinstance(text, str):
        raise ValueError(f"key={text!r}: must be one field, 'name type', or an empty text for none")
    if not text.strip():
        return []
    name, _, kind = text.strip().partition(" ")
    if not kind or "," in text:
        raise ValueError(f"key={text!r}: must be one field, 'name type'")
    return [(name, kind.strip())]


def _typed(column: Column, kind: str) -> Column:
    """Read bytes as a type: binary as it is, anything else from its text; null where the text is not one."""
    return column if kind == "binary" else column.cast("string").try_cast(kind)


def _last_header(name: str) -> Column:
    """Give the value of the last header of a name; null without one."""
    from pyspark.sql import functions as f

    named = f.filter(f.col("headers"), lambda header: header["key"] == f.lit(name))
    return f.try_element_at(named, f.lit(-1))["value"]
