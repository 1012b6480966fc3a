"""The Kafka sink: results to one topic, errors to another, exactly once or at least once.

*Exactly once* (the default): the frames of a micro-batch come to the driver, and one transaction brings them out with a
record of which micro-batch it was (`backend.sinks.kafka.writer`). Readers with `isolation.level=read_committed` see
each micro-batch once and as a whole, whatever crashed in between. What it rests on: a micro-batch that runs again has
the same input, batch time and options, so it makes the same rows, and those that are out stay. Where it makes others,
the query stops with `OutputDiffers`; `accept_published` lets those that are out count. All rows of a micro-batch pass
through the driver's memory, as with the foreach sink.

*At least once*: the tasks produce, each with an idempotent producer, and nothing passes through the driver; a record in
the commit topic follows when all is acknowledged. A micro-batch that runs again comes again, with the same ids: what an
attempt that failed has brought may be any part of it, and may come late. `backend.Dedupe` tells the copies. Other rows
than those of the record stop the query too, but only once they are in the topics beside the first.

Nothing that is in a row stops either: what is larger than its topic takes goes as `backend.sinks.kafka.sizes` says, and
whole to `overflow` where that is given.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
from confluent_kafka import KafkaException

from backend.boundary import crossing
from backend.kafka_client.admin import NEW_TOPIC_S
from backend.kafka_client.settling import SETTLE_S
from backend.sinks.kafka.commits import prepare
from backend.sinks.kafka.delivery import Delivery, Publication, may_be_too_large
from backend.sinks.kafka.fitting import Cut, send_fitted, tell
from backend.sinks.kafka.rows import Message, check_key, to_messages
from backend.sinks.kafka.topics import check_purpose, failure, look
from backend.sinks.kafka.writer import TransactionalWriter
from backend.sinks.record import Content, Digest, gathered
from backend.sinks.sealing import Seal, Sealing, report_schema
from backend.sinks.tables import (
    ERRORS,
    KINDS,
    RESULTS,
    by_shard,
    empty_outputs,
    merge_metrics,
    read_frames,
    summary,
    warm_up,
)
from recovery.killpoints import kill_point

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from backend.batch import Operator

GUARANTEES = ("exactly_once", "at_least_once")
_REPORT_DDL = "report string"
_REPORT = report_schema(_REPORT_DDL)


class Report(msgspec.Struct):
    """What a shard has in a micro-batch; from a task that produced it, as JSON.

    Attributes:
        shard: The shard.
        contents: Number and digest of its rows, by output.
        metrics: As `Sink.publish` returns them.
        cut: Which of its rows a task cut.
    """

    shard: int
    contents: dict[str, Content]
    metrics: dict[str, Any]
    cut: Cut = (0, [])


Encoded = list[tuple[Report, list[Message]]]
"""The shards of a micro-batch, with their messages."""


class KafkaSink(Sealing):
    """Writes both outputs to topics.

    Args:
        to: Where, of a query and topics that `open` asks for.
        commits: See `kafka_sink`.
        guarantee: One of `GUARANTEES`.
        accept_published: See `kafka_sink`.
    """

    def __init__(self, to: Publication, commits: str, guarantee: str, accept_published: int | None) -> None:
        self._commits, self._guarantee = commits, guarantee
        self._planned = -1
        strict = guarantee == "exactly_once"
        self._writer = TransactionalWriter(to, commits, strict=strict, accept=accept_published)

    def begin(self, outbox: str, operator: Operator) -> None:
        """See that the options fit the job, before `open`; makes nothing.

        Raises:
            ValueError: The results have no column of the key.
        """
        check_key(empty_outputs(operator)[RESULTS], self._to.key)

    def resume_from(self, planned: int) -> None:
        """Take note of the newest micro-batch that the checkpoint has planned, before `open`; -1 for none."""
        self._planned = planned

    def seal_by(self, seal: Seal) -> None:
        """Take what to call after the tasks of a micro-batch ran.

        Raises:
            ValueError: The tasks themselves publish.
        """
        if self._guarantee != "exactly_once":
            raise ValueError(f"guarantee={self._guarantee!r}: tasks publish before it is known that a shard queued")
        super().seal_by(seal)

    def open(self, query: str) -> None:
        """See that the topics are there; take them over for the query, so that an older writer is refused.

        Raises:
            ManifestMismatch: They are another query's, or another query's changelog or commit topic.
            SinkConflict: The commit topic no longer tells what the query has published, or a topic was made again.
            SinkUnavailable: The cluster does not answer.
            TopicMissing: A topic of results or errors does not exist.
            AccessRefused: The cluster refuses the credentials or their rights.
            ValueError: The commit topic is there with other settings, or a topic takes less than a row needs.
        """
        ran = self._planned >= 0
        names = tuple(self._to.topics.values())
        ids, limits = look(self._to.settings, names, settle_s=SETTLE_S if ran else NEW_TOPIC_S)
        if not ran:
            check_purpose(self._to.settings, self._to.topics)
        prepare(self._to.settings, self._commits, known=ran)
        self._writer.open(query, ids, limits, planned=self._planned)

    def publish(self, frames: DataFrame, version: int) -> list[dict[str, Any]]:
        """Publish a micro-batch with one action; acknowledged by all in-sync replicas on return."""
        if self._guarantee == "exactly_once":
            return self.finish(self.collect(frames, version), version)
        self._writer.check(version)
        produce = partial(produce_frames, to=self.publication, version=version)
        return self.note(frames.mapInArrow(crossing(produce), _REPORT_DDL).collect(), version)

    def finish(self, rows: list[dict[str, Any]], version: int) -> list[dict[str, Any]]:
        """Bring out collected frames in one transaction: the second half of `publish`."""
        encoded = _encoded(rows, version, self._to)
        kill_point("before_publish", version)
        messages = [message for _, made in encoded for message in made]
        return self._write(version, [report for report, _ in encoded], messages)

    def note(self, rows: Sequence[Any], version: int) -> list[dict[str, Any]]:
        """Take the reports of tasks that produced: the second half of `publish`, at least once."""
        reports = [msgspec.convert(json.loads(row["report"]), Report) for row in rows]
        tell(version, [report.cut for report in reports])
        return self._write(version, reports, ())

    @property
    def _to(self) -> Publication:
        return self._writer.to

    def _write(self, version: int, reports: list[Report], messages: Sequence[Message]) -> list[dict[str, Any]]:
        contents = {report.shard: report.contents for report in reports}
        self._writer.publish(version, messages, gathered(contents))
        kill_point("after_publish", version)
        return [
            summary(report.shard, report.contents[RESULTS][0], report.contents[ERRORS][0], report.metrics)
            for report in sorted(reports, key=lambda report: report.shard)
        ]

    def close(self) -> None:
        """Let the clients go; the next publication takes the output over again."""
        self._writer.close()

    def places(self) -> dict[str, str]:
        """Return the directory that is written to besides topics, by option."""
        return {"overflow": self._to.overflow} if self._to.overflow is not None else {}

    def topic_places(self) -> list[tuple[str, str]]:
        """Return what is written to, as (option, URI)."""
        named = {**self._to.topics, "commits": self._commits}
        return [(option, uri) for option, topic in named.items() for uri in self._to.settings.places(topic)]

    def describe(self) -> dict[str, object]:
        """Give the kind, the topics and the guarantee; nothing secret."""
        return {"kind": "kafka", "guarantee": self._guarantee, **self._to.topics, "commits": self._commits}

    @property
    def publication(self) -> Publication:
        """What tasks need to produce; topics' limits as of the last look."""
        # tasks do not have the files of the settings
        return replace(self._to, settings=self._to.settings.inlined())


def produce_frames(batches: Iterator[pa.RecordBatch], *, to: Publication, version: int) -> Iterator[pa.RecordBatch]:
    """Produce a task's frames, at least once; gives one report row per shard. Runs in a task.

    Raises:
        SinkUnavailable: Not everything was acknowledged; any part of it may be in the topics, now or later.
        TopicMissing: A topic does not exist any more.
    """
    warm_up()
    encoded = _encoded([row for batch in batches for row in batch.to_pylist()], version, to)
    if not encoded:
        return
    _produce(encoded, to)
    reports = [{"report": json.dumps(msgspec.to_builtins(report))} for report, _ in encoded]
    yield pa.RecordBatch.from_pylist(reports, schema=_REPORT)


def _produce(encoded: Encoded, to: Publication, *, again: bool = True) -> None:
    """Produce messages, and note in the reports which were cut. Once more where a topic takes less than it did."""
    delivery = None
    try:
        delivery = Delivery(to.settings, to.limits, to.patience_s, {"message.timeout.ms": 0})  # they never expire
        for report, messages in encoded:
            report.cut = send_fitted(delivery, messages, to)
        delivery.finish()
        return
    except KafkaException as error:
        if not again or not may_be_too_large(error.args[0]):
            topics = tuple(to.topics.values())
            raise failure(to.settings, topics, ", ".join(topics), error) from None
    finally:
        if delivery is not None:
            delivery.drop()
    _, limits = look(to.settings, tuple(to.topics.values()), settle_s=SETTLE_S)
    _produce(encoded, replace(to, limits=limits), again=False)


def _encoded(rows: list[dict[str, Any]], version: int, to: Publication) -> Encoded:
    """Encode a micro-batch's frames, in order of (shard, kind, sequence)."""
    encoded: Encoded = []
    for shard, given in by_shard(rows, version).items():
        contents: dict[str, Content] = {}
        messages: list[Message] = []
        for kind in KINDS:
            digest = Digest()
            for made, table in read_frames(given, kind, shard, version):
                messages += to_messages(table, kind, to.topics[kind], to.key, to.query)
                digest.add(made)
            contents[kind] = digest.content
        metrics = merge_metrics(row["metrics"] for row in given)
        encoded.append((Report(shard, contents, metrics), messages))
    return encoded
