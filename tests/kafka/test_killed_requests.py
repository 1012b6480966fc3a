"""A broker that is killed at named points of a request, twenty times under one query: live, and in restores.

Source, changelog and sink are on one broker, behind a proxy that kills it at the point. Nothing may be lost or come
twice, and the query goes on by itself. `KILLED_REQUESTS_READERS=client,connector` takes both readers.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from backend import count, kafka, kafka_sink, median, policies, stream, sum_, tumbling
from backend.kafka_client.admin import identities
from backend.kafka_client.writer import IDEMPOTENT
from backend.spark import start
from recovery.testing.events import Topics
from tests.kafka.storm import PARTITIONS, read
from tests.kafka.test_kafka_sink import frame, results
from tests.kafka.test_kafka_stream import events, windows_of
from tests.support.kafka_proxy import Api, Order, Point, ProxiedBroker

pytestmark = [pytest.mark.kafka, pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(3600)]

PATIENCE_S = 300.0
AWAY_S = 2.0
"""How long the broker is away, and then starts."""
ROWS = 10
"""Messages per partition that are written at each point."""
NUDGE_S = 10.0
"""After so long without a request of the kind, more messages are written."""

SOURCE, RESULTS, CHANGELOG = "messages", "results", "changelog"

At = tuple[Api, Point, str]
"""A kind of request, the point of it, and which topic it is about."""

AT_THE_START: At = (Api.InitProducerId, "answered", RESULTS)
LIVE: list[At] = [
    (Api.Metadata, "arrived", SOURCE),
    (Api.ListOffsets, "forwarded", SOURCE),
    (Api.ListOffsets, "answered", SOURCE),
    (Api.Fetch, "forwarded", SOURCE),
    (Api.Produce, "forwarded", RESULTS),
    (Api.AddPartitionsToTxn, "answered", RESULTS),
    (Api.EndTxn, "arrived", RESULTS),
    (Api.EndTxn, "forwarded", RESULTS),
    (Api.EndTxn, "answered", RESULTS),
    (Api.EndTxn, "answered", CHANGELOG),
]
IN_A_RESTORE: list[At] = [
    (Api.ListOffsets, "arrived", CHANGELOG),
    (Api.Fetch, "forwarded", CHANGELOG),
    (Api.Fetch, "answered", CHANGELOG),
    (Api.Metadata, "answered", SOURCE),
    (Api.ListOffsets, "forwarded", SOURCE),
    (Api.ListOffsets, "answered", SOURCE),
    (Api.DescribeConfigs, "arrived", SOURCE),
    (Api.DescribeConfigs, "answered", SOURCE),
    (Api.Fetch, "forwarded", SOURCE),
    (Api.Fetch, "answered", SOURCE),
]


@dataclass
class Killing:
    """Kills the broker at one point after the other; it comes back `AWAY_S` later."""

    broker: ProxiedBroker
    names: dict[str, tuple[bytes, ...]]
    timers: list[threading.Timer] = field(default_factory=list)
    at_s: float = 0.0

    def order(self, at: At) -> Order:
        api, point, where = at
        return self.broker.proxy.order(api, point, self._kill, mentions=self.names[where])

    def wait(self) -> None:
        for timer in self.timers:
            timer.join()

    def _kill(self) -> None:
        self.broker.kill()
        self.at_s = time.monotonic()
        self.timers.append(threading.Timer(AWAY_S, self.broker.start))
        self.timers[-1].start()


class Restores:
    """Gives an order when a restore begins: from then on all requests are the restore's."""

    def __init__(self, killing: Killing) -> None:
        self._killing, self._restore = killing, start.restore_shards
        self.due: At | None = None
        self.order: Order | None = None

    def restore_shards(self, *arguments: Any, **more: Any) -> int:
        if self.due is not None:
            self.order, self.due = self._killing.order(self.due), None
        return self._restore(*arguments, **more)


class Job:
    """The job, its messages, and what a reader of committed results has seen so far."""

    def __init__(self, spark: Any, broker: ProxiedBroker, path: Path, reader: str) -> None:
        self.broker, self.local, self.checkpoint = broker, path / "local", path / "checkpoint"
        self.topics = Topics(broker.settings)
        self.topic = {name: f"killed-requests-{name}" for name in (SOURCE, RESULTS, "errors")}
        for name in self.topic.values():
            self.topics.create(PARTITIONS, name=name)
        self.topic[CHANGELOG] = f"killed-requests-{CHANGELOG}"
        self.start = lambda: (
            stream(
                kafka(
                    self.topic[SOURCE],
                    servers=broker.proxied,
                    value="at bigint, who string, n int",
                    max_offsets_per_trigger=1_000,
                    reader=reader,
                ),
                event_time="at",
                key="who",
            )
            .window(
                tumbling("1 minute"),
                retention="1 hour",
                max_ahead=None,
                policies=policies(early="each", late="each"),
            )
            .aggregate(count=count(), total=sum_("n"), middle=median("n"))
            .start(
                spark,
                checkpoint=path / "checkpoint",
                local_dir=self.local,
                changelog=f"kafka://{broker.proxied.servers}/{self.topic[CHANGELOG]}",
                sink=kafka_sink(self.topic[RESULTS], self.topic["errors"], servers=broker.proxied),
                shards=2,
                trigger="0 seconds",
                snapshots="off",  # what is lost comes from Kafka alone
                queue_bytes="off",  # while it is restored, no other request comes between
            )
        )
        patient = IDEMPOTENT | {"message.timeout.ms": int(PATIENCE_S * 1000), "log_level": 0}
        self.producer = Producer(broker.settings.for_client() | patient)
        seeing = {"group.id": "seeing", "enable.auto.commit": False, "isolation.level": "read_committed"}
        self.consumer = Consumer(broker.settings.for_client() | seeing | {"log_level": 0})
        self.consumer.assign([TopicPartition(self.topic[RESULTS], number, 0) for number in range(PARTITIONS)])
        self.written: list[dict[str, Any]] = []
        self.ids, self.newest = Counter[str](), dict[tuple[int, str], dict[str, Any]]()

    def write(self) -> None:
        """Write some messages to each partition; on return the broker has them, though it was away meanwhile."""
        first, failed = len(self.written) // PARTITIONS, []
        for partition in range(PARTITIONS):
            rows = events(ROWS, seed=PARTITIONS * first + partition, first=first)
            for row in rows:
                self.producer.produce(
                    self.topic[SOURCE],
                    json.dumps(row),
                    partition=partition,
                    on_delivery=lambda error, _: failed.append(error) if error is not None else None,
                )
            self.written += rows
        assert self.producer.flush(PATIENCE_S) == 0, "the broker does not take the messages"
        assert not failed, failed[0]

    def see(self) -> None:
        """Read what has become visible of the results."""
        for message in self.consumer.consume(500, 0.1):
            if message.error() is None:
                self.take(json.loads(message.value()))

    def take(self, row: dict[str, Any]) -> None:
        self.ids[row["id"]] += 1
        key = row["window_start"], row["who"]
        if key not in self.newest or row["revision"] > self.newest[key]["revision"]:
            self.newest[key] = row

    @property
    def differing(self) -> list[tuple[int, str]]:
        """The windows whose newest row is not what plain loops over the messages say."""
        expected, found = windows_of(self.written), contents(self.newest)
        return sorted(key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key))

    @property
    def idle(self) -> bool:
        """Whether Spark has committed what it has planned: the next question about the source is the reader's then."""
        planned, committed = (
            {path.name for path in (self.checkpoint / folder).glob("[0-9]*")} for folder in ("offsets", "commits")
        )
        return planned == committed

    def close(self) -> None:
        self.consumer.close()


def number_of(job: Job, name: str) -> bytes:
    """Return a topic's id, as it is in requests."""
    topic = job.topic[name]
    return bytes.fromhex(identities(job.broker.settings, [topic])[topic].id)


def contents(newest: dict[tuple[int, str], dict[str, Any]]) -> dict[tuple[int, str], tuple[int, int, float]]:
    return {key: (row["count"], row["total"], row["middle"]) for key, row in newest.items()}


class Watched:
    """Follows the query through the points, and prints a line for each."""

    def __init__(self, job: Job, killing: Killing) -> None:
        self.job, self.killing = job, killing
        self.query: Any = None
        self.kills = 0
        self.started_s = time.monotonic()

    def until(self, true: Callable[[], bool], what: str, said: Counter[str]) -> None:
        """Wait; meanwhile the query must not end."""
        deadline = time.monotonic() + PATIENCE_S
        while not true():
            self.job.see()
            if self.query is not None:
                assert self.query.exception is None, f"{what}: the query has ended: {self.query.exception}"
                assert self.query.is_active, f"{what}: the query has ended"
                said[self.query.progress.waiting] += 1
            assert time.monotonic() < deadline, f"{what}: not within {PATIENCE_S:.0f} s; {self.query}"
            time.sleep(0.05)

    def through(self, kind: str, at: At, order: Callable[[], Order | None]) -> None:
        """Write messages until the order is carried out, and wait for all results."""
        api, point, where = at
        name, said, nudged_s = f"{kind}, {api.name} {point} ({where})", Counter[str](), time.monotonic()

        def fired() -> bool:
            nonlocal nudged_s
            given = order()
            if given is not None and given.fired.is_set():
                return True
            if time.monotonic() - nudged_s > NUDGE_S:
                self.job.write()
                nudged_s = time.monotonic()
            return False

        self.until(fired, f"{name}: no such request", said)
        self.until(lambda: not self.job.differing, f"{name}: no results", said)
        took_s = time.monotonic() - self.killing.at_s
        self.until(lambda: self.job.idle, f"{name}: no commit", said)
        assert max(self.job.ids.values()) == 1, f"{name}: rows came twice"
        self.kills += 1
        waited = " | ".join(one[:230] for one in said if one) or "nothing"
        print(
            f"{self.kills:2}  {name}: results {took_s:.1f} s after the kill; said: {waited}",
            flush=True,
        )
        self.killing.wait()


@pytest.fixture
def broker() -> Iterator[ProxiedBroker]:
    with ProxiedBroker() as broker:
        yield broker


@pytest.mark.parametrize("reader", os.environ.get("KILLED_REQUESTS_READERS", "client").split(","))
def test_a_broker_that_is_killed_at_points_of_requests(spark, broker, tmp_path, monkeypatch, reader):
    job = Job(spark, broker, tmp_path, reader)
    named = {where: (name.encode(),) for where, name in job.topic.items()}
    named[SOURCE] += (number_of(job, SOURCE),)  # a newer Fetch names topics by their ids
    killing = Killing(broker, named)
    watched = Watched(job, killing)
    try:
        run(job, killing, watched, monkeypatch)
    finally:
        killing.wait()
        if watched.query is not None:
            watched.query.stop()
        job.close()
        print(f"requests that went through the proxy: {dict(broker.proxy.seen.most_common())}")
    print(f"{reader}: {watched.kills} kills in {time.monotonic() - watched.started_s:.0f} s")


def run(job: Job, killing: Killing, watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    def order_of(at: At) -> Callable[[], Order]:
        order = killing.order(at)
        return lambda: order

    order = order_of(AT_THE_START)
    job.write()
    watched.query = query = job.start()
    watched.through("start", AT_THE_START, order)
    killing.names[CHANGELOG] += (number_of(job, CHANGELOG),)

    for at in LIVE:
        order = order_of(at)
        job.write()
        watched.through("live", at, order)

    restores = Restores(killing)
    monkeypatch.setattr(start, "restore_shards", restores.restore_shards)
    for at in IN_A_RESTORE:
        before = query.progress.restores
        restores.order, restores.due = None, at
        shutil.rmtree(job.local)
        job.write()
        watched.through("restore", at, lambda: restores.order)
        assert query.progress.restores > before

    assert watched.kills == 1 + len(LIVE) + len(IN_A_RESTORE)
    assert query.is_active
    query.stop()
    assert query.exception is None
    final: dict[tuple[int, str], dict[str, Any]] = {}
    rows = [row for _, row in read(job.broker.settings, job.topic[RESULTS])]
    for row in sorted(rows, key=lambda row: row["revision"]):
        final[row["window_start"], row["who"]] = row
    assert len({row["id"] for row in rows}) == len(rows), "rows came twice"
    assert contents(final) == windows_of(job.written)
    assert read(job.broker.settings, job.topic["errors"]) == []
    print(f"{len(job.written)} messages, {len(rows)} rows of {len(final)} windows")


@pytest.mark.parametrize("when", ["at a start", "when a writer opens again"])
def test_a_sink_is_not_misled_about_its_commit_topic(broker, when):
    """What is out is read there: an answer that does not come is no empty topic, and no other writer."""
    topics = Topics(broker.settings)
    names = topics.create(PARTITIONS), topics.create(PARTITIONS)
    commits = f"{names[0]}-commits"
    killing = Killing(broker, {commits: (commits.encode(),)})
    sink = kafka_sink(*names, servers=broker.proxied)
    sink.open("q")
    sink.finish([frame(0, 0, results(1, 2))], 0)
    order = killing.order((Api.ListOffsets, "answered", commits))
    try:
        if when == "at a start":
            sink = kafka_sink(*names, servers=broker.proxied)
            sink.resume_from(0)
            sink.open("q")
        else:
            sink._writer._let_go()  # as after a transaction that ended unclearly
        for version in (0, 1):
            sink.finish([frame(0, version, results(1, 2))], version)
        assert order.fired.is_set()
    finally:
        killing.wait()
    found = sorted(row["id"] for _, row in read(broker.settings, names[0]))
    assert found == ["0-0-0", "0-0-1", "1-0-0", "1-0-1"]
