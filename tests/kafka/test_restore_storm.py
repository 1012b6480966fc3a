"""A restore from Kafka that is interrupted: the broker away before it and in the middle, driver and workers killed.

And topics that change while a job is stopped: partitions added to the source and to the changelog, history cut away.

`RESTORE_STORM_READERS=client,connector` takes both readers, `RESTORE_STORM_AWAY_S=180` keeps the broker away so long.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from backend.errors import ChangelogUnavailable, HistoryLost, SourceUnavailable
from backend.kafka_client import admin as kafka_admin
from backend.spark import start
from recovery.killpoints import order, taken
from recovery.listener import Restoring
from recovery.testing.events import Event, Topics
from tests.kafka.storm import PARTITIONS, Storm
from tests.kafka.test_changelog_kafka import delete_below
from tests.kafka.test_kafka_stream import Job, events, last_revisions, windows_of
from tests.support.waiting import ended, until

pytestmark = [pytest.mark.kafka, pytest.mark.spark]

ROWS = 300
AWAY_S = float(os.environ.get("RESTORE_STORM_AWAY_S", "12"))


class Interrupted:
    """Kills the broker in a restore, once before it asks for anything and once when its replay begins.

    Args:
        broker: The broker.
        away_s: After so many seconds it is back, each time; None: it stays away.
    """

    def __init__(self, broker: Any, away_s: float | None) -> None:
        self._broker, self._away_s = broker, away_s
        self._restore = start.restore_shards
        self._timers: list[threading.Timer] = []
        self.kills: list[str] = []

    def restore_shards(self, *arguments: Any, **more: Any) -> int:
        self._kill("before")
        return self._restore(*arguments, **more)

    def start(self, restoring: Restoring) -> None:
        if restoring.how == "replay":  # a task that takes what was restored tells of it too
            self._kill("replay")

    def batch(self, *_: Any) -> None:
        """Say nothing."""

    suspended = end = batch

    def wait(self) -> None:
        for timer in self._timers:
            timer.join()

    def _kill(self, when: str) -> None:
        if when in self.kills:
            return
        self.wait()
        self.kills.append(when)
        self._broker.kill()
        if self._away_s is not None:
            self._timers.append(threading.Timer(self._away_s, self._broker.start))
            self._timers[-1].start()


def produced(topics: Topics, topic: str, partitions: int, *, first: int) -> list[dict[str, Any]]:
    """Write rows to each partition; give them all."""
    parts = [events(ROWS, seed=10 * first + partition, first=first) for partition in range(partitions)]
    for partition, rows in enumerate(parts):
        topics.produce(topic, [Event(row, partition=partition) for row in rows])
    return [row for rows in parts for row in rows]


@pytest.mark.long
@pytest.mark.timeout(1500 + 4 * AWAY_S)  # on a busy host JVMs take long
@pytest.mark.parametrize("reader", os.environ.get("RESTORE_STORM_READERS", "client").split(","))
def test_the_broker_is_away_at_a_restore_and_is_killed_in_one(
    spark, local_kafka_broker, tmp_path, monkeypatch, caplog, reader
):
    """What comes back within the patience is waited for; what does not ends the query by its name, and is no loss."""
    topics = Topics(local_kafka_broker.settings)
    topic = topics.create(2)
    topics.adopt(f"{topic}-changelog")
    rows = produced(topics, topic, 2, first=0)
    job = Job(spark, local_kafka_broker.settings, topic, tmp_path)
    job.source = replace(job.source, reader=reader)
    ended(job.start(until="end"))
    shutil.rmtree(tmp_path / "local")
    rows += produced(topics, topic, 2, first=ROWS)

    gone = Interrupted(local_kafka_broker, None)
    with monkeypatch.context() as patch:
        for bound in ("TIMEOUT_S", "OUTAGE_S"):  # of one question; how often it is asked is the patience's
            patch.setattr(kafka_admin, bound, 2.0)
        patch.setattr(start, "restore_shards", gone.restore_shards)
        query = job.start(until="end", queue_bytes="off", patience="3 seconds")
        began = time.monotonic()
        with pytest.raises((SourceUnavailable, ChangelogUnavailable), match=r"tried \d+ times in") as caught:
            ended(query)
        print(f"{reader}: ended after {time.monotonic() - began:.1f} s: {caught.value}")
    assert gone.kills == ["before"]
    assert caught.value.command
    local_kafka_broker.start()

    back = Interrupted(local_kafka_broker, AWAY_S)
    caplog.clear()
    with monkeypatch.context() as patch:
        patch.setattr(start, "restore_shards", back.restore_shards)
        began = time.monotonic()
        query = job.start(until="end", queue_bytes="off", patience=f"{2 * AWAY_S + 120:.0f} seconds", listeners=[back])
        seen = set[str]()
        while not query.await_termination(0.5):
            seen.add(query.progress.waiting)
            assert time.monotonic() - began < 2 * AWAY_S + 400
        print(f"{reader}: the broker away twice for {AWAY_S:.0f} s: {time.monotonic() - began:.1f} s")
    back.wait()
    assert back.kills == ["before", "replay"]
    assert query.progress.restores == 1
    assert not query.progress.waiting
    if AWAY_S >= 180:  # what is shorter, a question may wait for
        assert any("next try in" in said for said in seen)
    for record in caplog.records:
        if record.name.startswith("rewind"):
            print(f"{record.created % 10_000:7.1f} {record.getMessage()[:400]}")
    assert last_revisions(tmp_path / "results") == windows_of(rows)
    topics.close()


@pytest.mark.long
@pytest.mark.timeout(1500)  # on a busy host JVMs take long
def test_the_driver_and_then_its_workers_are_killed_in_a_restore_from_kafka(local_kafka_broker, tmp_path, monkeypatch):
    """At chosen points; the source, the changelog and the results are in Kafka."""
    orders = tmp_path / "order"
    monkeypatch.setenv("REWIND_KILL", str(orders))
    storm = Storm(tmp_path, 0, local_kafka_broker)
    storm.topics.adopt(f"{storm.topic}-changelog", f"{storm.topic}-results-commits")
    written = produced(storm.topics, storm.topic, PARTITIONS, first=0)
    try:
        storm._launch()
        storm._wait_for(0)
        storm._kill()
        shutil.rmtree(storm.home / "local")
        written += produced(storm.topics, storm.topic, PARTITIONS, first=ROWS)
        order(orders, "restore_replay")
        storm._launch()
        assert storm.process is not None
        assert storm.process.wait(400) == -signal.SIGKILL, storm._last_words()
        assert taken(orders).exists()
        storm._kill()
        killed = []
        storm.process = None
        order(orders, "during_replay")
        storm._launch(end=True)
        for point in ("restore_changelog", "restore_commit", "restore_publish", None):
            until(taken(orders).exists, what=f"{storm._last_words()}", alive=lambda: storm.process.poll() is None)
            killed.append(point)
            if point is not None:
                order(orders, point)
        assert storm.process.wait(400) == 0, storm._last_words()
    finally:
        storm._kill()
    assert storm.check(written) == len(windows_of(written))
    storm.topics.close()


@pytest.mark.long
def test_topics_that_grow_and_lose_history_while_a_job_is_stopped(spark, kafka_broker, kafka_topics, tmp_path, caplog):
    settings = kafka_broker.settings
    topic = kafka_topics.create(1)
    job = Job(spark, settings, topic, tmp_path)
    log = f"{topic}-changelog"
    kafka_topics.adopt(log)

    def run(rows: list[dict[str, Any]], partition: int) -> Any:
        kafka_topics.produce(topic, [Event(row, partition=partition) for row in rows])
        query = job.start(until="end")
        ended(query)
        return query

    parts = [events(100, seed=1), events(100, seed=2, first=100), events(100, seed=3, first=200)]
    run(parts[0], 0)
    kafka_topics.grow(topic, 2)
    kafka_topics.grow(log, 5)
    run(parts[1], 1)
    assert f"topic {topic} has 2 partitions, it had 1" in caplog.text
    shutil.rmtree(tmp_path / "local")
    assert run(parts[2], 1).progress.adopted > 0
    assert last_revisions(tmp_path / "results") == windows_of([row for part in parts for row in part])

    # retention takes what is committed: a whole local state goes on without it, a lost one is named
    delete_below(settings, topic, 0, 100)
    kafka_topics.produce(topic, [Event(row) for row in events(10, seed=4, first=300)])
    ended(job.start(until="end"))
    shutil.rmtree(tmp_path / "local")
    query = job.start(until="end")
    with pytest.raises(HistoryLost, match=f"{topic} partition 0: offsets from 0 wanted, the earliest is 100") as caught:
        ended(query)
    assert "rewind reset <checkpoint> accepts the loss" in caught.value.command
    # and what is not even read
    kafka_topics.produce(topic, [Event(row) for row in events(10, seed=5, first=310)])
    delete_below(settings, topic, 0, 120)
    with pytest.raises(HistoryLost, match="comes next, the earliest is") as caught:
        job.start(until="end")
    assert "rewind reset" in caught.value.command
