"""Answers of a broker that pass by themselves: asked again within a bound, everything else is an error at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from confluent_kafka import KafkaError, KafkaException

from backend.kafka_client import admin, settling
from backend.kafka_client.settings import KafkaSettings
from backend.kafka_client.settling import RETRY_S, while_it_settles
from backend.sinks.kafka import commits


class Clock:
    """Stands still but for what requests and waits take; in place of the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(settling, "time", clock)
    yield clock


class Broker:
    """Answers with the given codes, each when a request has been under way for a while, then with 7."""

    def __init__(self, clock: Clock, *codes: int, request_s: float = 0.0) -> None:
        self.clock = clock
        self.codes = list(codes)
        self.request_s = request_s
        self.asked = 0

    def __call__(self) -> int:
        self.asked += 1
        if self.codes:
            self.clock.now += self.request_s
            raise KafkaException(KafkaError(self.codes.pop(0)))
        return 7


def test_a_partition_without_a_leader_is_asked_again(clock: Clock) -> None:
    broker = Broker(clock, KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.UNKNOWN_TOPIC_OR_PART)
    assert while_it_settles(broker) == 7
    assert broker.asked == 3


@pytest.mark.parametrize(
    "code", [KafkaError._TRANSPORT, KafkaError._TIMED_OUT, KafkaError._ALL_BROKERS_DOWN, KafkaError._DESTROY_BROKER]
)
@pytest.mark.parametrize("request_s", [0.0, 0.5, 300.0])
def test_a_broker_that_dies_while_a_request_is_under_way_is_asked_again(
    clock: Clock, code: int, request_s: float
) -> None:
    broker = Broker(clock, code, request_s=request_s)
    assert while_it_settles(broker, timeout_s=2.0) == 7
    assert broker.asked == 2


@pytest.mark.parametrize(
    "code", [KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError._AUTHENTICATION, KafkaError._SSL, KafkaError._FATAL]
)
def test_a_refusal_is_not_asked_again(clock: Clock, code: int) -> None:
    broker = Broker(clock, code)
    with pytest.raises(KafkaException):
        while_it_settles(broker)
    assert broker.asked == 1


def test_a_refusal_after_a_passing_answer_ends_it(clock: Clock) -> None:
    broker = Broker(clock, KafkaError._TRANSPORT, KafkaError.TOPIC_AUTHORIZATION_FAILED)
    with pytest.raises(KafkaException):
        while_it_settles(broker)
    assert broker.asked == 2


@pytest.mark.parametrize("request_s", [0.0, 5.0])
def test_the_asking_ends(clock: Clock, request_s: float) -> None:
    began = clock.now
    broker = Broker(clock, *[KafkaError._TRANSPORT] * 1000, request_s=request_s)
    with pytest.raises(KafkaException):
        while_it_settles(broker, timeout_s=20.0)
    # the first answer begins the patience; the last request may be under way when it ends
    assert 20.0 < clock.now - began - request_s <= 20.0 + RETRY_S + request_s + 1e-6
    assert broker.asked > 1


@pytest.mark.parametrize("code", [KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC])
def test_a_topic_counts_as_unknown_since_nothing_else_was_said(clock: Clock, code: int) -> None:
    broker = Broker(clock, code, KafkaError._TRANSPORT, code, request_s=30.0)
    assert while_it_settles(broker, timeout_s=120.0, unknown_s=2.0) == 7
    broker = Broker(clock, code, code, request_s=30.0)
    with pytest.raises(KafkaException):
        while_it_settles(broker, timeout_s=120.0, unknown_s=2.0)


def test_a_topic_that_is_not_there_is_made_without_waiting_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that is there is not made: who has no right to make topics finds it made."""
    made: list[str] = []
    there = [False]

    def described(*_: object) -> dict[str, object]:
        if not there[0]:
            raise KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
        return {"t": None}

    waited: list[float] = []
    monkeypatch.setattr(settling.time, "sleep", waited.append)
    monkeypatch.setattr(admin, "described", described)
    monkeypatch.setattr(commits, "admin_client", lambda _: None)
    monkeypatch.setattr(commits, "configuration", lambda *_, **__: commits.SETTINGS)
    monkeypatch.setattr(commits, "create_topic", lambda _, topic, *__, **___: made.append(topic))
    for there[0], wanted in ((False, ["t"]), (True, ["t"])):
        commits.prepare(KafkaSettings("host:1"), "t")
        assert made == wanted
    assert sum(waited) <= 2 * RETRY_S
