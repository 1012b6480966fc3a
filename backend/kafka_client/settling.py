"""Answers of a Kafka cluster that pass by themselves: asked again, within a bound."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

SETTLE_S = 10.0
RETRY_S = 0.1

T = TypeVar("T")


def while_it_settles(ask: Callable[[], T], timeout_s: float = SETTLE_S) -> T:
    """Ask a broker again, within a bound, while a partition has no leader, or is not known to every broker, or a
    coordinator is not ready yet.

    A topic just made, and one whose broker just started, answers so for a moment (Kafka names these codes retriable).

    Raises:
        KafkaException: Any other answer, or still the same one after `timeout_s` seconds.
    """
    from confluent_kafka import KafkaError, KafkaException

    passing = {
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError._NOENT,  # the client knows no leader of any partition that it is asked for
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.OFFSET_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.NOT_COORDINATOR,
    }
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return ask()
        except KafkaException as error:
            if error.args[0].code() not in passing or time.monotonic() > deadline:
                raise
        time.sleep(RETRY_S)
