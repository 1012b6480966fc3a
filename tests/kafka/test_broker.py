"""The local broker and the fixtures that ship with the package."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition

from backend.errors import BrokerUnavailable
from recovery.testing.broker import LocalBroker, answers
from recovery.testing.events import Event, Topics
from tests.support.waiting import until

pytestmark = pytest.mark.kafka


def read_all(settings, topic, count, *, isolation="read_committed", partitions=1):
    consumer = Consumer(
        settings.for_client()
        | {
            "group.id": "unused",
            "enable.auto.commit": False,
            "isolation.level": isolation,
            "auto.offset.reset": "earliest",
        }
    )
    consumer.assign([TopicPartition(topic, p, 0) for p in range(partitions)])
    got = []
    deadline = time.monotonic() + 30
    while len(got) < count and time.monotonic() < deadline:
        got += [m for m in consumer.consume(100, timeout=0.5) if m.error() is None]
    consumer.close()
    return got


def test_events_arrive_with_everything_they_were_given(kafka_broker, kafka_topics):
    topic = kafka_topics.create(2)
    sent = [
        Event({"a": 1}, key="k", partition=1, timestamp_ms=1_600_000_000_000, headers={"h": b"v"}),
        Event(None, key=b"gone", partition=1),
        b"raw",
    ]
    assert kafka_topics.produce(topic, sent) == 3
    got = {(m.partition(), m.offset()): m for m in read_all(kafka_broker.settings, topic, 3, partitions=2)}
    assert sorted(got) == [(0, 0), (1, 0), (1, 1)]
    first = got[1, 0]
    assert first.value() == b'{"a": 1}'
    assert first.key() == b"k"
    assert first.timestamp()[1] == 1_600_000_000_000
    assert first.headers() == [("h", b"v")]
    assert got[1, 1].value() is None
    assert got[0, 0].value() == b"raw"


def test_an_aborted_transaction_is_there_only_for_read_uncommitted(kafka_broker, kafka_topics):
    topic = kafka_topics.create()
    with pytest.raises(ValueError, match="transaction='rollback': allowed are None, 'commit' and 'abort'"):
        kafka_topics.produce(topic, ["left open"], transaction="rollback")
    kafka_topics.produce(topic, ["no"], transaction="abort")
    kafka_topics.produce(topic, ["yes"], transaction="commit")
    committed = [m.value() for m in read_all(kafka_broker.settings, topic, 1)]
    uncommitted = [m.value() for m in read_all(kafka_broker.settings, topic, 2, isolation="read_uncommitted")]
    assert (committed, uncommitted) == ([b"yes"], [b"no", b"yes"])


def test_a_killed_broker_comes_back_with_its_data(local_kafka_broker):
    topics = Topics(local_kafka_broker.settings)
    topic = topics.create()
    topics.produce(topic, ["before"])
    local_kafka_broker.kill()
    assert not answers(local_kafka_broker.settings, timeout_s=0.5)
    local_kafka_broker.restart()
    topics.produce(topic, ["after"])
    assert [m.value() for m in read_all(local_kafka_broker.settings, topic, 2)] == [b"before", b"after"]
    topics.close()


def test_topics_of_a_broker_that_is_gone_are_closed(local_kafka_broker, monkeypatch):
    topics = Topics(local_kafka_broker.settings)
    for _ in range(3):
        topics.create()
    local_kafka_broker.kill()
    monkeypatch.setattr("recovery.testing.events.WAIT_S", 0.5)
    topics.close()


def test_a_broker_whose_port_another_one_has_did_not_start(local_kafka_broker, monkeypatch):
    taken = local_kafka_broker._ports
    monkeypatch.setattr("recovery.testing.broker._free_port", iter(taken).__next__)
    monkeypatch.setattr("recovery.testing.broker.START_TRIES", 1)
    with pytest.raises(BrokerUnavailable, match="did not start"):
        LocalBroker().start()
    assert answers(local_kafka_broker.settings, timeout_s=5, cluster=local_kafka_broker._cluster)


def test_the_broker_goes_with_a_process_that_is_killed(tmp_path):
    script = (
        "import os, sys, time\n"
        "from recovery.testing.broker import LocalBroker\n"
        "broker = LocalBroker(); broker.start()\n"
        "print(broker.pid, broker._folder, flush=True)\n"
        "time.sleep(120)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid, folder = owner.stdout.readline().split()
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    until(lambda: not Path(f"/proc/{pid}").exists() and not Path(folder).exists(), what="the broker's end")


def test_sasl_lets_in_only_with_the_password_and_never_shows_it(secured_kafka_broker):
    from dataclasses import replace

    from confluent_kafka.admin import AdminClient

    settings = secured_kafka_broker.settings
    assert settings.protocol == "SASL_PLAINTEXT"
    assert answers(settings, timeout_s=5)
    wrong = replace(settings, password="other")
    with pytest.raises(KafkaException):
        AdminClient(wrong.for_client() | {"log_level": 0}).list_topics(timeout=2)
    assert settings.password not in repr(settings)
    assert settings.password not in secured_kafka_broker._log_end()


def test_closing_removes_everything():
    broker = LocalBroker()
    broker.close()
    broker.start()
    folder, pid = broker._folder, broker.pid
    broker.close()
    broker.close()
    assert broker.pid is None
    assert not folder.exists()
    assert not Path(f"/proc/{pid}").exists()
