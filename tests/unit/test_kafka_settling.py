"""Answers of a broker that pass by themselves: asked again within a bound, everything else is an error at once."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, KafkaException

from backend.kafka_client.settling import while_it_settles


class Broker:
    """Answers with the given codes, then with 7."""

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes)
        self.asked = 0

    def __call__(self) -> int:
        self.asked += 1
        if self.codes:
            raise KafkaException(KafkaError(self.codes.pop(0)))
        return 7


def test_a_partition_without_a_leader_is_asked_again() -> None:
    broker = Broker(KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.UNKNOWN_TOPIC_OR_PART)
    assert while_it_settles(broker) == 7
    assert broker.asked == 3


def test_a_refusal_is_not_asked_again() -> None:
    broker = Broker(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    with pytest.raises(KafkaException):
        while_it_settles(broker)
    assert broker.asked == 1


def test_the_asking_ends() -> None:
    broker = Broker(*[KafkaError.LEADER_NOT_AVAILABLE] * 100)
    with pytest.raises(KafkaException):
        while_it_settles(broker, timeout_s=0.2)
    assert 2 <= broker.asked < 100
