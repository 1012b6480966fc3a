"""The Kafka sink on a real broker: once whatever crashes, whole or not at all, fenced; and at least once with ids."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from backend import kafka_sink
from backend.batch import ERROR_SCHEMA
from backend.errors import ManifestMismatch, OutputDiffers, SinkConflict, SinkUnavailable, TopicMissing
from backend.sinks.dedupe import Dedupe
from backend.sinks.kafka import commits as kafka_commits
from backend.sinks.kafka import topics as kafka_topics_of_sinks
from backend.sinks.kafka import writer as kafka_writer
from backend.sinks.kafka.sink import produce_frames
from recovery.killpoints import order
from tests.spark.test_sinks_in_spark import frames as spark_frames
from tests.support.packed import pack

pytestmark = [pytest.mark.kafka, pytest.mark.gentle]


def results(*numbers: int) -> bytes | None:
    return pack(pa.table({"origin": pa.array(["JFK"] * len(numbers)), "n": pa.array(numbers, pa.int64())}))


def errors(*offsets: int) -> bytes | None:
    fixed = {"stream": 0, "partition": 0, "reason": "malformed", "value": b"?"}
    return pack(pa.Table.from_pylist([{**fixed, "offset": offset} for offset in offsets], schema=ERROR_SCHEMA))


def frame(shard: int, version: int, res: bytes | None, err: bytes | None = None) -> dict[str, Any]:
    return {"shard": shard, "version": version, "results": res, "errors": err, "metrics": '{"rows": 1}'}


def read(settings: Any, topic: str, partitions: int = 1, *, isolation: str = "read_committed") -> list[dict[str, Any]]:
    """All rows to the end that the isolation level lets through, with where they were."""
    consumer = Consumer(
        settings.for_client()
        | {
            "group.id": "unused",
            "enable.auto.commit": False,
            "isolation.level": isolation,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
        }
    )
    consumer.assign([TopicPartition(topic, p, 0) for p in range(partitions)])
    rows, ended = [], set()
    deadline = time.monotonic() + 30
    while len(ended) < partitions:
        assert time.monotonic() < deadline
        for message in consumer.consume(500, 0.2):
            if message.error() is None:
                rows.append(json.loads(message.value()) | {"_at": (message.topic(), message.partition())})
            elif message.error().code() == KafkaError._PARTITION_EOF:
                ended.add(message.partition())
    consumer.close()
    return rows


FRAMES = pa.schema(
    [("shard", pa.int32()), ("version", pa.int64()), *((n, pa.binary()) for n in ("results", "errors"))]
).append(pa.field("metrics", pa.string()))


def produced(sink: Any, rows: list[dict[str, Any]], version: int) -> list[dict[str, Any]]:
    """What `publish` does at least once, with one task in this process."""
    batch = pa.RecordBatch.from_pylist(rows, schema=FRAMES)
    (report,) = produce_frames(iter([batch]), to=sink.publication, version=version)
    return sink.note(report.to_pylist(), version)


@pytest.fixture
def topics(kafka_topics: Any) -> tuple[str, str]:
    names = kafka_topics.create(), kafka_topics.create()
    kafka_topics.adopt(f"{names[0]}-commits")
    return names


def ids(settings: Any, topic: str, **options: Any) -> list[str]:
    return [row["id"] for row in read(settings, topic, **options)]


def test_a_micro_batch_that_runs_again_is_seen_once_also_by_a_new_process(kafka_broker, topics, caplog):
    settings = kafka_broker.settings
    sink = kafka_sink(*topics, servers=settings)
    sink.open("q")
    batch = [frame(1, 0, results(5)), frame(0, 0, results(3, 4), errors(9))]
    told = sink.finish(batch, 0)
    assert told == [
        {"shard": 0, "results": 2, "errors": 1, "metrics": {"rows": 1}},
        {"shard": 1, "results": 1, "errors": 0, "metrics": {"rows": 1}},
    ]
    assert sink.finish(batch, 0) == told  # Spark could not commit: the same process runs it again
    again = kafka_sink(*topics, servers=settings)
    again.open("q")  # or another process
    assert again.finish(batch, 0) == told
    assert not caplog.records
    again.finish([frame(0, 1, None)], 1)  # nothing to say
    again.finish([frame(0, 2, results(6))], 2)
    with pytest.raises(OutputDiffers):
        again.finish([frame(0, 2, results(7, 8))], 2)
    rows = read(settings, topics[0])
    assert [(row["id"], row["n"]) for row in rows] == [("0-0-0", 3), ("0-0-1", 4), ("0-1-0", 5), ("2-0-0", 6)]
    assert ids(settings, topics[1]) == ["0-0-e0"]


def test_only_the_newest_writer_of_one_query_may_write(kafka_broker, topics):
    settings = kafka_broker.settings
    zombie = kafka_sink(*topics, servers=settings)
    zombie.open("q")
    zombie.finish([frame(0, 4, results(1))], 4)
    sink = kafka_sink(*topics, servers=settings)
    with pytest.raises(ManifestMismatch, match="query q wrote them, this is p"):
        sink.open("p")
    sink.open("q")
    with pytest.raises(SinkConflict, match="another writer has taken the output over"):
        zombie.finish([frame(0, 5, results(2))], 5)
    with pytest.raises(SinkConflict, match="micro-batch 4 is out, this is 3"):
        sink.finish([frame(0, 3, results(3))], 3)
    sink.finish([frame(0, 5, results(2))], 5)
    assert ids(settings, topics[0]) == ["4-0-0", "5-0-0"]


SCRIPT = """
import json, sys
from backend import kafka_sink
from backend.kafka_client.settings import KafkaSettings
from tests.kafka.test_kafka_sink import frame, results
servers, one, two = sys.argv[1:]
sink = kafka_sink(one, two, servers=KafkaSettings(servers))
sink.open("q")
for version in range(2):
    sink.finish([frame(0, version, results(*range(300)))], version)
print("done")
"""


@pytest.mark.parametrize("point", ["before_publish", "during_publish", "after_publish"])
def test_killed_before_inside_or_after_the_transaction_each_id_is_seen_once(kafka_broker, topics, tmp_path, point):
    settings = kafka_broker.settings
    environment = os.environ | {"REWIND_KILL": str(tmp_path / "order")}
    order(tmp_path / "order", point, 1)
    command = [sys.executable, "-c", SCRIPT, settings.servers, *topics]
    first = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert first.returncode == -signal.SIGKILL, first.stderr
    whole = [f"{version}-0-{n}" for version in (0, 1) for n in range(300)]
    half_written = ids(settings, topics[0], isolation="read_uncommitted")
    assert half_written == (whole[:300] if point == "before_publish" else whole)
    sink = kafka_sink(*topics, servers=settings)
    sink.open("q")  # ends what the dead one left open
    assert ids(settings, topics[0]) == (whole if point == "after_publish" else whole[:300])
    sink.finish([frame(0, 1, results(*range(300)))], 1)  # Spark runs it again: it had not committed
    assert ids(settings, topics[0]) == whole
    written = ids(settings, topics[0], isolation="read_uncommitted")
    assert len(written) == (900 if point == "during_publish" else 600)


def test_a_commit_whose_answer_is_lost_is_looked_up_before_it_is_tried_again(kafka_broker, topics, monkeypatch):
    settings = kafka_broker.settings
    sink = kafka_sink(*topics, servers=settings)
    sink.open("q")
    transact = kafka_writer.TransactionalWriter._transact
    lost = []

    def answer_lost(self: Any, record: Any, messages: Any) -> None:
        transact(self, record, messages)
        if not lost:
            lost.append(record.version)
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

    monkeypatch.setattr(kafka_writer.TransactionalWriter, "_transact", answer_lost)
    sink.finish([frame(0, 0, results(1, 2))], 0)
    sink.finish([frame(0, 1, results(3))], 1)
    assert lost == [0]
    assert ids(settings, topics[0]) == ["0-0-0", "0-0-1", "1-0-0"]


def test_somebody_elses_open_transaction_on_the_commit_topic_is_not_read_past(kafka_broker, topics, monkeypatch):
    settings = kafka_broker.settings
    sink = kafka_sink(*topics, servers=settings)
    sink.open("q")
    foreign = Producer(settings.for_client() | {"transactional.id": f"{topics[0]}-foreign"})
    foreign.init_transactions(20)
    foreign.begin_transaction()
    foreign.produce(f"{topics[0]}-commits", b"x", b"x")
    foreign.flush(20)
    sink.finish([frame(0, 0, results(1))], 0)  # committed, and behind what readers of committed messages may see
    with pytest.raises(SinkUnavailable, match="somebody else's transaction"):
        kafka_commits.newest(settings, f"{topics[0]}-commits", timeout_s=1.0)
    foreign.abort_transaction(20)
    found = kafka_commits.newest(settings, f"{topics[0]}-commits")
    assert found is not None
    assert (found.query, found.version, found.messages) == ("q", 0, 1)


def test_at_least_once_comes_again_with_the_same_ids_and_dedupe_drops_them(kafka_broker, kafka_topics):
    settings = kafka_broker.settings
    topics = {"results": kafka_topics.create(3), "errors": kafka_topics.create()}
    kafka_topics.adopt(f"{topics['results']}-commits")
    sink = kafka_sink(*topics.values(), servers=settings, key="n", guarantee="at_least_once")
    sink.open("q")
    for version in (0, 1, 1, 2):  # micro-batch 1 runs again
        rows = [frame(0, version, results(*range(50)), errors(version)), frame(1, version, results(7))]
        assert produced(sink, rows, version) == [
            {"shard": 0, "results": 50, "errors": 1, "metrics": {"rows": 1}},
            {"shard": 1, "results": 1, "errors": 0, "metrics": {"rows": 1}},
        ]
    found = kafka_commits.newest(settings, f"{topics['results']}-commits")
    assert found is not None
    assert (found.query, found.version, found.messages) == ("q", 2, 52)
    rows = read(settings, topics["results"], 3)
    dedupe = Dedupe()
    kept = [row for row in rows if dedupe.is_new(row, *row["_at"])]
    assert len(rows) == 4 * 51
    assert len(kept) == len({row["id"] for row in kept}) == len({row["id"] for row in rows}) == 3 * 51
    assert len({row["_at"] for row in kept}) == 3, "all partitions are used"
    assert len({row["_at"] for row in rows if row["n"] == 7}) == 1, "one key, one partition"


def test_what_cannot_be_written_is_named(kafka_broker, kafka_topics, topics, monkeypatch):
    settings = kafka_broker.settings
    with pytest.raises(TopicMissing, match="no-such-topic"):
        kafka_sink(topics[0], "no-such-topic", servers=settings).open("q")
    with pytest.raises(ValueError, match=r"cleanup\.policy=delete; a sink needs compact"):
        kafka_sink(*topics, servers=settings, commits=kafka_topics.create()).open("q")
    sink = kafka_sink(*topics, servers=settings)
    sink.open("q")
    sink.finish([frame(0, 0, results(1))], 0)
    assert ids(settings, topics[0]) == ["0-0-0"]
    gone = replace(settings, servers="127.0.0.1:1")
    monkeypatch.setattr(kafka_topics_of_sinks, "TIMEOUT_S", 1.0)
    with pytest.raises(SinkUnavailable, match=r"127\.0\.0\.1:1"):
        kafka_sink(*topics, servers=gone).open("q")


@pytest.mark.spark
@pytest.mark.parametrize(("guarantee", "copies"), [("exactly_once", 1), ("at_least_once", 2)])
def test_frames_from_spark_are_published_by_one_action(spark, kafka_broker, topics, guarantee, copies):
    settings = kafka_broker.settings
    tasks = spark.sparkContext.accumulator(0)
    sink = kafka_sink(*topics, servers=settings, guarantee=guarantee)
    sink.open("q")
    for _ in range(2):  # the micro-batch runs again after a crash
        told = sink.publish(spark_frames(spark, 3, tasks), 3)
    assert told == [
        {"shard": 0, "results": 2, "errors": 0, "metrics": {"late": 1}},
        {"shard": 1, "results": 2, "errors": 2, "metrics": {}},
        {"shard": 2, "results": 0, "errors": 0, "metrics": {}},
    ]
    assert tasks.value == 6  # three frames, evaluated once per publication
    assert sorted(ids(settings, topics[0])) == sorted(["3-0-0", "3-0-1", "3-1-0", "3-1-1"] * copies)
    assert sorted(ids(settings, topics[1])) == sorted(["3-1-e0", "3-1-e1"] * copies)
    with pytest.raises(Exception, match="handed to the sink as micro-batch 4"):
        sink.publish(spark_frames(spark, 3, tasks), 4)
