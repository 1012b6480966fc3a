"""A whole job on Kafka: source, windows, changelog topic; killed brokers, lost disks. Judged by plain Python."""

from __future__ import annotations

import random
import shutil
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from backend import count, kafka, median, stream, sum_, tumbling
from backend.errors import HistoryLost, SourceWentBack
from backend.sinks.parquet import ParquetSink
from recovery.testing.events import Event
from tests.kafka.test_kafka_source import delete_below
from tests.support.waiting import ended, until

pytestmark = [pytest.mark.kafka, pytest.mark.spark]

MINUTE = 60_000
START = 1_700_000_000_000 // MINUTE * MINUTE


def events(n: int, *, seed: int, first: int = 0) -> list[dict[str, Any]]:
    """Rows of one partition: ten seconds apart, up to five minutes out of order."""
    chance = random.Random(seed)
    return [
        {
            "at": START + (first + i) * 10_000 - chance.randrange(5 * MINUTE),
            "who": chance.choice(["ann", "bob", "cy"]),
            "n": chance.randrange(100),
        }
        for i in range(n)
    ]


def windows_of(rows: list[dict[str, Any]]) -> dict[tuple[int, str], tuple[int, int, float]]:
    """Count, sum and median per minute and person: the oracle."""
    groups: dict[tuple[int, str], list[int]] = defaultdict(list)
    for row in rows:
        groups[row["at"] // MINUTE * MINUTE, row["who"]].append(row["n"])
    return {key: (len(ns), sum(ns), _median(ns)) for key, ns in groups.items()}


def _median(ns: list[int]) -> float:
    ordered = sorted(ns)
    return (ordered[(len(ns) - 1) // 2] + ordered[len(ns) // 2]) / 2


def last_revisions(directory: Path) -> dict[tuple[int, str], tuple[int, int, float]]:
    """The newest revision of every window that was emitted."""
    rows = [row for path in sorted(directory.rglob("*.parquet")) for row in pq.ParquetFile(path).read().to_pylist()]
    newest: dict[tuple[int, str], dict[str, Any]] = {}
    for row in rows:
        key = (int(row["window_start"].timestamp() * 1000), row["who"])
        if key not in newest or row["revision"] > newest[key]["revision"]:
            newest[key] = row
    return {key: (row["count"], row["total"], row["middle"]) for key, row in newest.items()}


def errors_in(directory: Path) -> list[tuple[str, bytes]]:
    """Reason and value of each row of the errors."""
    rows = [row for path in directory.rglob("*.parquet") for row in pq.read_table(path).to_pylist()]
    return [(row["reason"], row["value"]) for row in rows]


def produce_with_gaps(topics: Any, topic: str, rows: list[list[dict[str, Any]]]) -> None:
    """Produce the rows of each partition, with an aborted transaction and a message that is no JSON amid them."""
    for partition, mine in enumerate(rows):
        good, lost = ([Event(row, partition=partition) for row in some] for some in (mine, events(50, seed=9)))
        half = len(good) // 2
        topics.produce(topic, good[:half], transaction="commit")
        topics.produce(topic, lost, transaction="abort")
        topics.produce(topic, [Event(b"not json", partition=partition), *good[half:]])


class Job:
    """One job in a directory of its own; started again over the same checkpoint."""

    def __init__(self, spark: Any, settings: Any, topic: str, path: Path, per_trigger: int = 400) -> None:
        self.spark, self.path = spark, path
        value = "at bigint, who string, n int"
        self.source = kafka(topic, servers=settings, value=value, max_offsets_per_trigger=per_trigger)
        self.changelog = f"kafka://{settings.servers}/{topic}-changelog"

    def start(self, **options: Any) -> Any:
        pipeline = (
            stream(self.source, event_time="at", key="who")
            .window(tumbling("1 minute"), retention="1 hour", max_ahead=None)
            .aggregate(count=count(), total=sum_("n"), middle=median("n"))
        )
        return pipeline.start(
            self.spark,
            checkpoint=self.path / "checkpoint",
            local_dir=self.path / "local",
            changelog=self.changelog,
            shards=2,
            **{"trigger": "0 seconds", "sink": self.sink()} | options,
        )

    def sink(self) -> ParquetSink:
        return ParquetSink(self.path / "results", self.path / "errors")


class TakingTheQueue(ParquetSink):
    """Takes away what shards have queued, once, when it publishes the first micro-batch that they queued."""

    def __init__(self, path: Path) -> None:
        super().__init__(path / "results", path / "errors")
        self.queue, self.taken = path / "checkpoint/rewind/queue", 0

    def publish(self, frames: Any, version: int) -> list[dict[str, Any]]:
        shards = super().publish(frames, version)
        if not self.taken and any(shard["metrics"].get("decision") == "queued" for shard in shards):
            for path in self.queue.rglob("*.entry"):
                path.unlink()
                self.taken += 1
        return shards


def test_windows_from_kafka_survive_a_lost_disk_with_the_changelog_in_kafka(
    spark, kafka_broker, kafka_topics, tmp_path, caplog
):
    topic = kafka_topics.create(2)
    before = [events(300, seed=1), events(300, seed=2)]
    after = [events(100, seed=3, first=300), events(100, seed=4, first=300)]
    produce_with_gaps(kafka_topics, topic, before)
    job = Job(spark, kafka_broker.settings, topic, tmp_path)
    first = job.start(until="end")
    ended(first)
    assert first.progress.rows == 600
    shutil.rmtree(tmp_path / "local")
    for partition in (0, 1):
        kafka_topics.produce(topic, [Event(row, partition=partition) for row in after[partition]])
    second = job.start(until="end")
    ended(second)
    assert (second.progress.restores, second.progress.adopted) == (0, 2)
    assert last_revisions(tmp_path / "results") == windows_of([row for rows in before + after for row in rows])
    assert errors_in(tmp_path / "errors") == [("malformed", b"not json")] * 2
    shutil.rmtree(tmp_path / "local")
    later = [events(100, seed=5, first=400), events(100, seed=6, first=400)]
    produce_with_gaps(kafka_topics, topic, later)
    sink = TakingTheQueue(tmp_path)
    third = job.start(until="end", sink=sink)
    ended(third)
    assert (third.progress.restores, third.progress.adopted) == (1, 2)
    assert sink.taken >= 1
    assert "is made again from the source" in caplog.text
    found = last_revisions(tmp_path / "results")
    assert found == windows_of([row for rows in before + after + later for row in rows])
    assert errors_in(tmp_path / "errors") == [("malformed", b"not json")] * 4
    kafka_topics.grow(topic, 3)
    caplog.clear()
    kafka_topics.produce(topic, [Event(row) for row in before[0]] * 30)
    job = Job(spark, kafka_broker.settings, topic, tmp_path, per_trigger=30)  # hundreds of micro-batches lie ahead
    live = job.start()
    assert f"topic {topic} has 3 partitions, it had 2" in caplog.text
    until(lambda: live.progress.rows or not live.is_active, what="a micro-batch")
    for (_, partition), (_, end) in kafka(topic, servers=kafka_broker.settings, format="raw").offsets().items():
        delete_below(kafka_broker.settings, topic, end, partition)
    with pytest.raises(HistoryLost):
        ended(live)
    with pytest.raises(HistoryLost, match="comes next, the earliest is"):
        job.start()
    kafka_topics.delete(topic)
    kafka_topics.create(3, name=topic)
    kafka_topics.produce(topic, [Event(row) for row in before[0] + before[1]])  # as many as there were: offsets fit
    with pytest.raises(SourceWentBack, match="made again"):
        job.start()


@pytest.mark.long
def test_a_broker_that_is_killed_and_a_partition_that_is_added_under_a_running_job(
    spark, local_kafka_broker, tmp_path, caplog
):
    from recovery.testing.events import Topics

    topics = Topics(local_kafka_broker.settings)
    topic = topics.create(1)
    rows = events(200, seed=5)
    topics.produce(topic, rows[:100])
    query = Job(spark, local_kafka_broker.settings, topic, tmp_path).start()

    def wait_for(messages: int) -> None:
        until(lambda: query.progress.rows >= messages or not query.is_active, what=f"{messages} messages")
        assert query.exception is None
        assert query.progress.rows == messages

    wait_for(100)
    local_kafka_broker.kill()
    time.sleep(2)
    local_kafka_broker.restart()
    topics.produce(topic, rows[100:])
    wait_for(200)
    topics.grow(topic, 2)
    added = events(60, seed=6)
    topics.produce(topic, [Event(row, partition=1) for row in added])
    wait_for(260)
    query.drain()
    version = query.progress.version
    until(lambda: query.progress.version >= version + 2, what="two micro-batches more")
    query.stop()
    assert query.exception is None
    assert f"topic {topic} has a new partition, 1" in caplog.text
    assert last_revisions(tmp_path / "results") == windows_of(rows + added)
    topics.close()
