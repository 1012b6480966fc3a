"""What somebody does to a topic under a job: made again, cut at its end, emptied, shared. Named, or mended and said."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from backend import count, fetch_refused, kafka, median, stream, sum_, tumbling
from backend.errors import HistoryLost, ManifestMismatch, SourceWentBack
from backend.kafka_client.admin import offsets
from backend.sources import TopicPartition
from backend.spark.start import StartOptions, _first_offsets, build_job
from recovery.changelog import open_changelog
from recovery.commit.option_sets import ByVersion
from recovery.testing.events import Event
from tests.kafka.test_changelog_kafka import delete_below
from tests.kafka.test_kafka_stream import Job, events, last_revisions, windows_of
from tests.support.parsed import records_of
from tests.support.waiting import ended, until

pytestmark = [pytest.mark.kafka, pytest.mark.spark]


def made_again(kafka_topics: Any, topic: str, messages: int) -> None:
    """Delete a topic and make it again with messages of its own."""
    kafka_topics.delete(topic)
    kafka_topics.create(1, name=topic)
    kafka_topics.produce(topic, [{"n": 1_000 + n} for n in range(messages)])


def made(folder: Path) -> set[str]:
    """Give the folders in which a start that was refused has left files."""
    return {path.parent.name for path in folder.rglob("*") if path.is_file()}


def positions(topic: str, following: int) -> Callable[[], dict[TopicPartition, int]]:
    return lambda: {(topic, 0): following}


def test_a_topic_that_was_made_again_is_refused_by_every_look_and_by_a_replay(spark, kafka_broker, kafka_topics):
    """With more messages than it had: offsets alone look right."""
    topic = kafka_topics.create(1)
    kafka_topics.produce(topic, [{"n": n} for n in range(10)])
    plain = kafka(topic, servers=kafka_broker.settings, value="n int")
    source = plain.pinned(plain.identities())
    reader, watch = source.stream_reader(), source.watch()
    assert reader.latestOffset({topic: {"0": 10}}, ReadAllAvailable()) == {topic: {"0": 10}}
    watch.look(positions(topic, 10))
    assert records_of(spark, source, {(topic, 0): (0, 10)}).count() == 10
    made_again(kafka_topics, topic, 27)
    for look in (
        lambda: reader.latestOffset({topic: {"0": 10}}, ReadAllAvailable()),
        lambda: watch.look(positions(topic, 10)),
        lambda: records_of(spark, source, {(topic, 0): (0, 10)}),
        lambda: replace(source, reader="connector").batch(spark, {(topic, 0): (0, 10)}),
        lambda: source.check_positions({(topic, 0): 10}),
    ):
        with pytest.raises(SourceWentBack, match="was deleted and made again"):
            look()


def test_a_partition_that_lost_its_end_is_refused_and_one_that_only_has_a_new_leader_is_not(
    spark, local_kafka_broker, tmp_path
):
    """By the watch, and by a job's start: what a job has read counts as its epochs say, not as its offsets do."""
    from recovery.testing.events import Topics

    broker = local_kafka_broker
    topics = Topics(broker.settings)
    topic = topics.create(1)
    for n in range(5):
        topics.produce(topic, [Event(row) for row in events(20, seed=n, first=20 * n)])
    job = Job(spark, broker.settings, topic, tmp_path)
    ended(job.start(until="end"))
    watch = job.source.watch()
    assert watch.look(positions(topic, 100))
    assert not watch.look(positions(topic, 100))
    before = watch.leader_epochs[topic, 0]
    broker.restart()
    assert watch.look(positions(topic, 100)), "a broker that comes back leads with a new epoch"
    assert watch.leader_epochs[topic, 0] > before
    last = job.start(until="end")
    ended(last)
    broker.kill()
    [log] = (folder for folder in Path(broker._folder).rglob(f"{topic}-0"))
    [segment] = log.glob("*.log")
    with segment.open("r+b") as file:
        file.truncate(segment.stat().st_size * 7 // 10)
    for file in [*log.glob("*.index"), *log.glob("*.timeindex"), *log.glob("*.snapshot")]:
        file.unlink()
    broker.start()
    left = job.source.offsets()[topic, 0][1]
    assert left == 60, "five batches of twenty: the fourth is torn"
    for n in range(5):
        topics.produce(topic, [Event(row) for row in events(20, seed=10 + n, first=20 * n)])
    assert job.source.offsets()[topic, 0] == (0, 160), "the offsets alone look right"
    with pytest.raises(SourceWentBack, match="lost messages at its end") as caught:
        watch.look(positions(topic, 100))
    assert f"{topic}-0" in caught.value.where
    kept = job.source.watch()
    kept.leader_epochs = {(topic, 0): before}
    assert kept.look(positions(topic, 60)), "what was committed is still there"
    with pytest.raises(SourceWentBack, match="lost messages at its end"):
        ended(job.start(until="end"))
    newest = max(int(path.name) for path in (tmp_path / "checkpoint/commits").glob("[0-9]*"))
    assert newest == last.progress.version, "nothing of the other messages is counted"
    topics.close()


def test_a_topic_made_again_between_two_triggers_ends_the_query_by_name(spark, kafka_broker, kafka_topics, tmp_path):
    """With Spark's own reader, which asks for offsets only: nothing of the new topic is counted or published."""
    topic = kafka_topics.create(1)
    kafka_topics.produce(topic, [Event(row) for row in events(100, seed=1)])
    job = Job(spark, kafka_broker.settings, topic, tmp_path)
    job.source = replace(job.source, reader="connector")
    query = job.start(trigger="20 seconds")
    until(lambda: query.progress.rows >= 100 or not query.is_active, what="100 messages")
    version = query.progress.version
    kafka_topics.delete(topic)
    kafka_topics.create(1, name=topic)
    kafka_topics.produce(topic, [Event(row) for row in events(270, seed=2)])
    with pytest.raises(SourceWentBack, match="was deleted and made again"):
        ended(query)
    assert (query.progress.rows, query.progress.version) == (100, version)


def test_a_changelog_is_one_querys_and_what_it_lost_is_written_again_or_named(
    spark, kafka_broker, kafka_topics, tmp_path, caplog
):
    settings = kafka_broker.settings
    topic = kafka_topics.create(1)
    rows = [events(100, seed=seed, first=100 * seed) for seed in range(4)]

    def run(job: Job, more: list[dict[str, Any]]) -> Any:
        kafka_topics.produce(topic, [Event(row) for row in more])
        query = job.start(until="end")
        ended(query)
        return query

    def empty() -> None:
        for (name, shard), (_, end) in offsets(settings, [log], committed_only=False).items():
            delete_below(settings, name, shard, end)

    job = Job(spark, settings, topic, tmp_path / "one")
    log = f"{topic}-changelog"
    kafka_topics.adopt(log)
    run(job, rows[0])
    other = Job(spark, settings, topic, tmp_path / "two")
    before = offsets(settings, [log], committed_only=False)
    with pytest.raises(ManifestMismatch, match="the changelog belongs to another query"):
        other.start(until="end")
    assert offsets(settings, [log], committed_only=False) == before
    assert made(tmp_path / "two") == set()
    began = time.monotonic()
    empty()
    caplog.clear()
    run(job, rows[1])
    print(f"a run after the changelog was emptied: {time.monotonic() - began:.1f} s")
    for shard in (0, 1):
        assert f"the changelog cannot give shard {shard} back: its state is here" in caplog.text
        assert f"the changelog could not give shard {shard} back: a complete base was appended" in caplog.text
    shutil.rmtree(tmp_path / "one" / "local")
    assert run(job, rows[2]).progress.adopted == 2
    assert last_revisions(tmp_path / "one" / "results") == windows_of([row for part in rows[:3] for row in part])
    kafka_topics.delete(log)
    run(job, rows[3])
    assert all(open_changelog(job.changelog).entries(shard) for shard in (0, 1)), "made again, with bases"
    assert last_revisions(tmp_path / "one" / "results") == windows_of([row for part in rows for row in part])
    empty()
    shutil.rmtree(tmp_path / "one" / "local")
    ends = offsets(settings, [log], committed_only=False)
    with pytest.raises(HistoryLost, match="the changelog has lost a shard's state, and the state itself is not here"):
        job.start(until="end")
    assert offsets(settings, [log], committed_only=False) == ends


def test_a_compacted_topic_is_refused_where_messages_are_kept_and_taken_where_none_are(
    spark, kafka_broker, kafka_topics, tmp_path
):
    settings = kafka_broker.settings
    topic = kafka_topics.create(1, cleanup_policy="compact,delete")
    source = kafka(topic, servers=settings, value="at bigint, who string, n int")
    windows = stream(source, event_time="at", key="who").window(tumbling("1 minute"), retention="1 hour")
    places = {"checkpoint": tmp_path / "c", "results": tmp_path / "r", "errors": tmp_path / "e"}
    with pytest.raises(HistoryLost, match="a compacted topic cannot be read again") as caught:
        windows.aggregate(middle=median("n")).start(spark, **places)
    assert "cleanup.policy=compact,delete" in caught.value.why
    assert made(tmp_path / "c") == set()
    kafka_topics.produce(topic, [Event({"n": 1}, key="k")])
    with pytest.raises(HistoryLost, match="compacted"):
        replace(source, reader="connector").batch(spark, {(topic, 0): (0, 1)})
    refused = spark.createDataFrame([(topic, 0, 0)], "topic string, partition int, offset bigint")
    assert [bytes(row["key"]) for row in fetch_refused(spark, source, refused).collect()] == [b"k"]
    counted = windows.aggregate(count=count(), total=sum_("n"))
    assert not build_job(counted, spark, StartOptions(), stored=None, first_offsets=list).operator.replays
    build_job(counted, spark, StartOptions(), stored=None, first_offsets=list).check_sources()


@pytest.mark.parametrize("reader", ["client", "connector"])
def test_where_a_query_begins_at_the_end_is_settled_before_its_first_micro_batch(
    spark, kafka_broker, kafka_topics, tmp_path, reader
):
    """The driver dies before the first trigger: what came since is read by the next start."""
    topic = kafka_topics.create(1)
    kafka_topics.produce(topic, [Event(row) for row in events(50, seed=1)])
    job = Job(spark, kafka_broker.settings, topic, tmp_path)
    kafka_topics.adopt(f"{topic}-changelog")
    job.source = replace(job.source, reader=reader, starting="latest")
    windows = stream(job.source, event_time="at", key="who").window(tumbling("1 minute"), retention="1 hour")
    pipeline, checkpoint = windows.aggregate(count=count()), str(tmp_path / "checkpoint")
    begun = build_job(pipeline, spark, StartOptions(), stored=None, first_offsets=list)
    begun.begin(checkpoint, _first_offsets(pipeline, spark), known=False)
    begun.streaming(spark, checkpoint, ByVersion(((0, None),)))  # what a start plans; no trigger comes
    (tmp_path / "checkpoint" / "metadata").write_text(json.dumps({"id": str(uuid4())}))  # Spark has begun the query
    rows = events(60, seed=2)
    kafka_topics.produce(topic, [Event(row) for row in rows])
    query = job.start(until="end")
    ended(query)
    assert last_revisions(tmp_path / "results") == windows_of(rows)
