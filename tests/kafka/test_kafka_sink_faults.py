"""The Kafka sink when brokers go away, topics are cut or made again, and others write there too."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

from backend import kafka_sink
from backend.errors import ManifestMismatch, SinkConflict, SinkUnavailable
from backend.kafka_client.admin import offsets
from backend.kafka_client.settings import KafkaSettings
from backend.sinks.dedupe import Dedupe
from backend.sinks.kafka import writer as kafka_writer
from backend.sinks.kafka.delivery import Delivery
from recovery.changelog.kafka.log import KafkaChangelog
from tests.kafka.test_kafka_sink import errors, frame, ids, produced, read, results

pytestmark = pytest.mark.kafka

QUEUE = 500
"""Messages in a client's queue: the first of a micro-batch wait in it while the others wait outside."""


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients with a short queue, as if micro-batches were large."""
    given = KafkaSettings.for_client
    narrow = {"queue.buffering.max.messages": str(QUEUE), "reconnect.backoff.max.ms": "500"}
    monkeypatch.setattr(KafkaSettings, "for_client", lambda self: given(self) | narrow)


@pytest.fixture
def topics(kafka_topics: Any) -> tuple[str, str]:
    names = kafka_topics.create(2), kafka_topics.create()
    kafka_topics.adopt(f"{names[0]}-commits")
    return names


@contextmanager
def away(broker: Any, seconds: float) -> Iterator[None]:
    """Kill the broker; it comes back so many seconds later, also when what is in here is done earlier or fails."""
    broker.kill()
    comes = threading.Timer(seconds, broker.start)
    comes.start()
    try:
        yield
    finally:
        comes.join()


def once(rows: list[dict[str, Any]]) -> list[str]:
    dedupe = Dedupe()
    return sorted(row["id"] for row in rows if dedupe.is_new(row, *row["_at"]))


def expected(version: int, count: int) -> list[str]:
    return [f"{version}-0-{n}" for n in range(count)]


def test_an_outage_loses_nothing_whether_it_is_waited_for_or_not(local_kafka_broker, kafka_topics, narrow):
    """One outage of the broker, met by tasks that wait for it, tasks that give up, and a transaction."""
    settings, count = local_kafka_broker.settings, 3 * QUEUE
    rows = [frame(0, 0, results(*range(count)))]
    sinks = []
    for guarantee, patience in [("at_least_once", 60), ("at_least_once", 1), ("exactly_once", 60)]:
        names = kafka_topics.create(2), kafka_topics.create()
        kafka_topics.adopt(f"{names[0]}-commits")
        sink = kafka_sink(*names, servers=settings, guarantee=guarantee, patience=f"{patience} seconds")
        sink.open("q")
        sinks.append((names[0], sink))
    (_, patient), (gap, hasty), (_, whole) = sinks
    with away(local_kafka_broker, 2), ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(produced, patient, rows, 0), pool.submit(whole.finish, rows, 0)]
        with pytest.raises(SinkUnavailable, match="none was acknowledged for 1 s"):
            produced(hasty, rows, 0)
        for one in waiting:
            one.result(60)
    hasty = kafka_sink(gap, hasty.describe()["errors"], servers=settings, guarantee="at_least_once")
    hasty.open("q")
    produced(hasty, rows, 0)
    for _, sink in ((gap, hasty), *sinks[::2]):
        (sink.finish if sink is whole else partial(produced, sink))([frame(0, 1, results(1))], 1)
    for topic, _ in sinks:
        found = read(settings, topic, 2)
        assert once(found) == sorted([*expected(0, count), "1-0-0"])
        if topic != gap:
            assert len(found) == count + 1, "what is waited for does not come twice"


def test_a_transaction_that_the_broker_ended_is_no_other_writer(local_kafka_broker, topics, monkeypatch, caplog):
    settings = local_kafka_broker.settings
    monkeypatch.setattr(kafka_writer, "TRANSACTION_TIMEOUT_S", 1)
    sink = kafka_sink(*topics, servers=settings)
    sink.open("q")
    slept = []

    def sleep(point: str, version: int) -> None:
        if not slept:
            slept.append(version)
            time.sleep(3)  # the broker looks every second

    monkeypatch.setattr(kafka_writer, "kill_point", sleep)
    sink.finish([frame(0, 0, results(1, 2))], 0)
    assert slept == [0]
    assert "micro-batch 0 is written again" in caplog.text
    assert sorted(ids(settings, topics[0], partitions=2)) == ["0-0-0", "0-0-1"]


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_a_second_query_is_refused_until_the_topics_are_released(kafka_broker, kafka_topics, topics, guarantee):
    settings = kafka_broker.settings
    one = kafka_sink(*topics, servers=settings, guarantee=guarantee)
    publish = one.finish if guarantee == "exactly_once" else (lambda rows, version: produced(one, rows, version))
    one.open("one")
    publish([frame(0, 0, results(1, 2))], 0)
    two = kafka_sink(*topics, servers=settings, guarantee=guarantee)
    with pytest.raises(ManifestMismatch, match=r"query one wrote them, this is two.*delete the commit topic"):
        two.open("two")
    kafka_topics.delete(f"{topics[0]}-commits")
    kafka_topics.adopt(f"{topics[0]}-commits")
    two.open("two")  # has planned nothing: the topics are given to it
    publish = two.finish if guarantee == "exactly_once" else (lambda rows, version: produced(two, rows, version))
    publish([frame(0, 0, results(1, 2, 3))], 0)
    rows = read(settings, topics[0], 2)
    assert sorted((row["query_id"], row["id"]) for row in rows) == [
        ("one", "0-0-0"), ("one", "0-0-1"), ("two", "0-0-0"), ("two", "0-0-1"), ("two", "0-0-2"),
    ]  # fmt: skip
    assert len(once(rows)) == 5, "the second query's rows are not copies of the first one's"
    one.resume_from(0)
    with pytest.raises(ManifestMismatch, match="query two wrote them, this is one"):
        one.open("one")


def test_rows_go_into_no_changelog_and_no_commit_topic(kafka_broker, kafka_topics, topics):
    """They would make it unreadable for its query, which is not theirs."""
    settings = kafka_broker.settings
    kafka_sink(*topics, servers=settings).open("one")
    log = f"{topics[0]}-log"
    kafka_topics.adopt(log)
    KafkaChangelog(settings, log, owner="01" * 16).prepare(1, new=True)
    other = kafka_topics.create()
    for given, said in (
        ((f"{topics[0]}-commits", other), "results: the topic is the commit topic of a query"),
        ((other, f"{topics[0]}-commits"), "errors: the topic is the commit topic of a query"),
        ((log, other), "results: the topic is the changelog of a query"),
        ((other, log), "errors: the topic is the changelog of a query"),
    ):
        before = offsets(settings, [topics[0] + "-commits", log, other], committed_only=False)
        with pytest.raises(ManifestMismatch, match=said):
            kafka_sink(*given, servers=settings, commits=f"{other}-commits").open("two")
        assert offsets(settings, [topics[0] + "-commits", log, other], committed_only=False) == before
    kafka_sink(*topics, servers=settings).open("one")


def test_a_zombie_of_tasks_is_refused_and_what_it_wrote_is_told(kafka_broker, topics):
    settings = kafka_broker.settings
    zombie = kafka_sink(*topics, servers=settings, guarantee="at_least_once")
    zombie.open("q")
    produced(zombie, [frame(0, 0, results(*range(5)))], 0)
    sink = kafka_sink(*topics, servers=settings, guarantee="at_least_once")
    sink.open("q")
    produced(sink, [frame(0, 0, results(*range(5)))], 0)
    produced(sink, [frame(0, 1, results(*range(5)))], 1)
    with pytest.raises(SinkConflict, match="another writer has taken the output over"):
        produced(zombie, [frame(0, 1, results(*range(5)))], 1)
    with pytest.raises(SinkConflict, match="micro-batch 1 is out, this is 0"):
        sink.publish(None, 0)  # type: ignore[arg-type]
    rows = read(settings, topics[0], 2)
    assert len(rows) == 20
    assert once(rows) == expected(0, 5) + expected(1, 5)


def test_a_start_wins_against_a_zombie_that_opens_its_producer_again_meanwhile(kafka_broker, topics, monkeypatch):
    settings = kafka_broker.settings
    zombie, sink = (kafka_sink(*topics, servers=settings) for _ in range(2))
    zombie.open("q")
    transact = kafka_writer.TransactionalWriter._transact
    meanwhile: list[Callable[[], object]] = [lambda: zombie.finish([frame(0, 0, results(1))], 0)]

    def between(self: Any, record: Any, messages: Any) -> None:
        if self is sink._writer and meanwhile:
            meanwhile.pop()()  # it finds itself in the newest record, and fences the start
        transact(self, record, messages)

    monkeypatch.setattr(kafka_writer.TransactionalWriter, "_transact", between)
    sink.open("q")
    with pytest.raises(SinkConflict, match="another writer has taken the output over"):
        zombie.finish([frame(0, 1, results(2))], 1)
    sink.finish([frame(0, 0, results(1))], 0)
    sink.finish([frame(0, 1, results(2))], 1)
    assert sorted(ids(settings, topics[0], partitions=2)) == ["0-0-0", "1-0-0"]


def test_a_zombie_that_is_fenced_while_it_sends_does_not_fence_the_start(kafka_broker, topics, monkeypatch, caplog):
    """The client then says that it cannot go on, not that it is fenced."""
    settings = kafka_broker.settings
    zombie, sink = (kafka_sink(*topics, servers=settings) for _ in range(2))
    zombie.open("q")
    send, open_producer = Delivery.send, kafka_writer.TransactionalWriter._open_producer
    opened: list[Any] = []

    def fenced(self: Any, topic: str, value: bytes, key: bytes | None, *partition: int) -> None:
        if self is not zombie._writer._delivery:
            send(self, topic, value, key, *partition)
            return
        sink.open("q")
        raise KafkaException(KafkaError(KafkaError._FATAL, "Unable to produce message: Local: Fatal error", fatal=True))

    monkeypatch.setattr(Delivery, "send", fenced)
    monkeypatch.setattr(
        kafka_writer.TransactionalWriter, "_open_producer", lambda self: opened.append(self) or open_producer(self)
    )
    with pytest.raises(SinkConflict, match="another writer has taken the output over"):
        zombie.finish([frame(0, 0, results(1))], 0)
    assert opened == [sink._writer]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        sink.finish([frame(0, 0, results(1))], 0)
    assert "written again" not in caplog.text
    assert ids(settings, topics[0], partitions=2) == ["0-0-0"]


def test_a_commit_topic_that_was_deleted_is_named_where_rows_are_out(kafka_broker, kafka_topics, topics, caplog):
    settings, commits = kafka_broker.settings, f"{topics[0]}-commits"

    def start(planned: int, guarantee: str = "exactly_once") -> Any:
        sink = kafka_sink(*topics, servers=settings, guarantee=guarantee)
        sink.resume_from(planned)
        sink.open("q")
        return sink

    kafka_topics.create(name=commits, cleanup_policy="compact")  # this checkpoint had another sink until now
    start(4).finish([frame(0, 5, results(1))], 5)
    kafka_topics.delete(commits)
    kafka_topics.adopt(commits)
    for _ in range(2):  # also when the first start has made it again
        with pytest.raises(
            SinkConflict, match=f"it is empty, and {topics[0]} is not, while the checkpoint has planned"
        ):
            start(5)
    with caplog.at_level(logging.WARNING):
        start(5, "at_least_once")
    assert "does not say whose the output is" in caplog.text
    start(5)
    assert ids(settings, topics[0], partitions=2) == ["5-0-0"]


def test_a_commit_topic_that_was_emptied_is_named(kafka_broker, topics):
    settings, commits = kafka_broker.settings, f"{topics[0]}-commits"
    sink = kafka_sink(*topics, servers=settings)
    sink.open("q")
    sink.finish([frame(0, 0, results(1))], 0)
    client = AdminClient(settings.for_client())
    policy(client, commits, "delete")
    client.delete_records([TopicPartition(commits, 0, -1)])[TopicPartition(commits, 0)].result(20)
    policy(client, commits, "compact")
    again = kafka_sink(*topics, servers=settings)
    again.resume_from(0)
    with pytest.raises(SinkConflict, match=r"was deleted, made again or emptied.*its records are gone"):
        again.open("q")


@pytest.mark.parametrize("number", [0, 1])
def test_an_output_that_was_made_again_is_named_by_its_id(kafka_broker, kafka_topics, topics, number, caplog):
    settings = kafka_broker.settings
    sink = kafka_sink(*topics, servers=settings)
    sink.open("q")
    sink.finish([frame(0, 0, results(1), errors(1))], 0)
    kafka_topics.delete(topics[number])
    kafka_topics.create(2 - number, name=topics[number])
    again = kafka_sink(*topics, servers=settings)
    again.resume_from(0)
    with pytest.raises(SinkConflict, match=f"an output topic was deleted and made again; where: .*{topics[number]}"):
        again.open("q")
    loose = kafka_sink(*topics, servers=settings, guarantee="at_least_once")
    loose.resume_from(0)
    loose.open("q")
    assert f"{topics[number]} was deleted and made again" in caplog.text


@pytest.mark.parametrize("number", [0, 1])
def test_an_output_that_is_made_again_under_a_running_query_is_named_at_the_micro_batch(
    kafka_broker, kafka_topics, topics, number, caplog
):
    """Results or errors, deleted before a micro-batch: nothing of it is committed to the new topic."""
    settings = kafka_broker.settings

    def again() -> None:
        kafka_topics.delete(topics[number])
        kafka_topics.create(2 - number, name=topics[number])

    sink = kafka_sink(*topics, servers=settings)
    sink.open("q")
    sink.finish([frame(0, 0, results(1), errors(1))], 0)
    again()
    began = time.monotonic()
    with pytest.raises(SinkConflict, match=f"an output topic was deleted and made again; where: .*{topics[number]}"):
        sink.finish([frame(0, 1, results(2), errors(2))], 1)
    assert ids(settings, topics[number], partitions=2 - number) == []
    assert time.monotonic() - began < 30, "no transaction is left open: readers do not wait for it"
    kafka_topics.delete(f"{topics[0]}-commits")
    kafka_topics.adopt(f"{topics[0]}-commits")
    loose = kafka_sink(*topics, servers=settings, guarantee="at_least_once")
    loose.open("q")
    produced(loose, [frame(0, 1, results(2), errors(2))], 1)
    again()
    caplog.clear()
    for version in (2, 3):
        produced(loose, [frame(0, version, results(3), errors(3))], version)
    assert caplog.text.count(f"{topics[number]} was deleted and made again; the query goes on in the new one") == 1
    assert ids(settings, topics[number], partitions=2 - number) == (["2-0-0", "3-0-0"], ["2-0-e0", "3-0-e0"])[number]


def policy(client: AdminClient, topic: str, value: str) -> None:
    entry = ConfigEntry("cleanup.policy", value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[entry])
    client.incremental_alter_configs([resource])[resource].result(20)
