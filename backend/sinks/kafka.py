"""The Kafka sink: results to one topic, errors to another, exactly once or at least once.

*Exactly once* (the default): the frames of a micro-batch come to the driver, and one transaction brings them out with a
record of which micro-batch it was (`backend.sinks.kafka_writer`). Readers with `isolation.level=read_committed` see
each micro-batch once and as a whole, whatever crashed in between. What it rests on: a micro-batch that runs again has
the same input and batch time, and what ran first stays; a function of yours that gives something else the second time
is told of in the log. All rows of a micro-batch pass through the driver's memory, as with the foreach sink.

*At least once*: the tasks produce, each with an idempotent producer, and nothing passes through the driver. A
micro-batch that runs again comes again, with the same ids in the same order: `Dedupe` tells the copies.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from backend.errors import SinkUnavailable
from backend.sinks.kafka_commits import TIMEOUT_S, prepare, unavailable
from backend.sinks.kafka_rows import Message, to_messages
from backend.sinks.kafka_writer import TransactionalWriter, send
from backend.sinks.tables import ERRORS, RESULTS, check_version, merge_metrics, readable, summary, unpack, warm_up
from backend.sources.kafka_settings import KafkaSettings
from recovery.killpoints import kill_point

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

GUARANTEES = ("exactly_once", "at_least_once")
_KINDS = (RESULTS, ERRORS)
_REPORT = pa.schema(
    [
        pa.field("shard", pa.int32()),
        pa.field("results", pa.int64()),
        pa.field("errors", pa.int64()),
        pa.field("metrics", pa.string()),
    ]
)
_REPORT_DDL = "shard int, results bigint, errors bigint, metrics string"


class KafkaSink:
    """Writes both outputs to topics; see `backend.sinks.kafka_sink`."""

    def __init__(
        self,
        results: str,
        errors: str,
        *,
        servers: str | KafkaSettings,
        key: str | Sequence[str] = (),
        guarantee: str = "exactly_once",
        commits: str | None = None,
    ) -> None:
        for option, topic in (("results", results), ("errors", errors)):
            if not topic or not isinstance(topic, str):
                raise ValueError(f"{option}={topic!r}: must be the name of a topic")
        if results == errors:
            raise ValueError(f"errors={errors!r}: must be another topic than results")
        if guarantee not in GUARANTEES:
            raise ValueError(f"guarantee={guarantee!r}: allowed are {', '.join(GUARANTEES)}")
        if commits is not None and (guarantee != "exactly_once" or commits in ("", results, errors)):
            raise ValueError(f"commits={commits!r}: must be a topic of its own, and only with guarantee='exactly_once'")
        self._topics = {RESULTS: results, ERRORS: errors}
        self._settings = servers if isinstance(servers, KafkaSettings) else KafkaSettings.from_environment(servers)
        self._key = (key,) if isinstance(key, str) else tuple(key)
        self._guarantee = guarantee
        self._commits = (commits or f"{results}-commits") if guarantee == "exactly_once" else ""
        self._writer = TransactionalWriter(self._settings, f"rewind-sink-{results}", self._commits)

    def open(self, query: str) -> None:
        """See that the topics are there; take them over for the query, so that an older writer is refused.

        Raises:
            ManifestMismatch: They are another query's.
            SinkUnavailable: The cluster does not answer, or a topic does not exist.
            ValueError: The commit topic is there with other settings.
        """
        prepare(self._settings, self._commits, tuple(self._topics.values()))
        if self._commits:
            self._writer.open(query)

    def publish(self, frames: DataFrame, version: int) -> list[dict[str, Any]]:
        """Publish a micro-batch with one action; acknowledged by all in-sync replicas on return."""
        if self._commits:
            return self.finish([row.asDict() for row in frames.collect()], version)
        produce = partial(produce_frames, settings=self._settings, topics=self._topics, key=self._key, version=version)
        rows = frames.mapInArrow(produce, _REPORT_DDL).collect()
        kill_point("after_publish", version)
        return [
            summary(row["shard"], row["results"], row["errors"], merge_metrics([row["metrics"]]))
            for row in sorted(rows, key=lambda row: row["shard"])
        ]

    def finish(self, rows: list[dict[str, Any]], version: int) -> list[dict[str, Any]]:
        """Bring out collected frames in one transaction: the second half of `publish`."""
        shards = _by_shard(rows, version)
        reports = []
        messages: list[Message] = []
        for shard in sorted(shards):
            counts, made = _messages(shards[shard], shard, version, self._topics, self._key)
            messages += made
            metrics = merge_metrics(row["metrics"] for row in shards[shard])
            reports.append(summary(shard, counts[RESULTS], counts[ERRORS], metrics))
        kill_point("before_publish", version)
        if messages:
            self._writer.publish(version, messages)
        kill_point("after_publish", version)
        return reports

    def close(self) -> None:
        """Let the producer go; the next publication takes the output over again."""
        self._writer.close()

    def describe(self) -> dict[str, object]:
        """Give the kind, the topics and the guarantee; nothing secret."""
        return {"kind": "kafka", "guarantee": self._guarantee, **self._topics, "commits": self._commits or None}


def produce_frames(
    batches: Iterator[pa.RecordBatch],
    *,
    settings: KafkaSettings,
    topics: dict[str, str],
    key: tuple[str, ...],
    version: int,
) -> Iterator[pa.RecordBatch]:
    """Produce a task's frames, at least once, in order per shard; gives one report row per shard. Runs in a task.

    Raises:
        SinkUnavailable: Not everything was acknowledged.
    """
    warm_up()
    rows = [row for batch in batches for row in batch.to_pylist()]
    shards = _by_shard(rows, version)
    if not shards:
        return
    failures: list[str] = []

    def delivered(error: Any, _message: Any) -> None:
        if error is not None:
            failures.append(settings.redact(error))

    producer = _idempotent_producer(settings)
    reports = []
    for shard in sorted(shards):
        counts, made = _messages(shards[shard], shard, version, topics, key)
        for message in made:
            send(producer, message.topic, message.value, message.key, on_delivery=delivered)
        metrics = merge_metrics(row["metrics"] for row in shards[shard])
        reports.append({"shard": shard, **counts, "metrics": json.dumps(metrics)})
    left = producer.flush(TIMEOUT_S + 5)  # longer than a delivery may take
    if left or failures:
        raise SinkUnavailable(
            "results were not acknowledged",
            where=f"{settings.servers}, {', '.join(topics.values())}",
            why=failures[0] if failures else f"{left} still in flight",
            command="see that the topics exist and the brokers run; then start the query again",
        )
    yield pa.RecordBatch.from_pylist(reports, schema=_REPORT)


def _idempotent_producer(settings: KafkaSettings) -> Any:
    from confluent_kafka import KafkaException, Producer

    config = settings.for_client() | {
        "enable.idempotence": True,
        "linger.ms": 5,
        "compression.type": "lz4",
        "partitioner": "murmur2_random",
        "delivery.timeout.ms": int(TIMEOUT_S * 1000),
        "log_level": 0,
    }
    try:
        return Producer(config)
    except KafkaException as error:
        raise unavailable(settings, "", error) from None


def _by_shard(rows: list[dict[str, Any]], version: int) -> dict[int, list[dict[str, Any]]]:
    shards: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        check_version(row["version"], version)
        shards.setdefault(row["shard"], []).append(row)
    return shards


def _messages(
    rows: list[dict[str, Any]], shard: int, version: int, topics: dict[str, str], key: tuple[str, ...]
) -> tuple[dict[str, int], list[Message]]:
    """Encode a shard's frames, in order of (kind, sequence); give the rows per kind too."""
    counts = dict.fromkeys(_KINDS, 0)
    made: list[Message] = []
    for kind in _KINDS:
        for row in rows:
            if row[kind] is not None:
                table = readable(unpack(bytes(row[kind])), kind, version, shard, counts[kind])
                made += to_messages(table, kind, topics[kind], key)
                counts[kind] += table.num_rows
    return counts, made
