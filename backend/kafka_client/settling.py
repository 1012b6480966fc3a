"""Answers of a Kafka cluster that pass by themselves: asked again, within a bound."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from confluent_kafka import KafkaError, KafkaException

from backend.kafka_client.refusals import MISSING

PASSING = MISSING | {
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError._UNKNOWN_PARTITION,
    KafkaError._NOENT,  # the client knows no leader of any partition that it is asked for
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.OFFSET_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
    KafkaError._TRANSPORT,
    KafkaError._DESTROY_BROKER,  # the client let go of a broker that it asked
    KafkaError._TIMED_OUT,
    KafkaError._ALL_BROKERS_DOWN,
}
"""Codes of what may be otherwise in a moment."""
SETTLE_S = 10.0
RETRY_S = 0.1

T = TypeVar("T")


def while_it_settles(ask: Callable[[], T], timeout_s: float | None = None, unknown_s: float | None = None) -> T:
    """Ask a broker again, within a bound, while a partition has no leader, or is not known to every broker, or a
    coordinator is not ready yet, or no broker answers.

    A topic just made, and one whose broker just started, answers so for a moment (Kafka names these codes retriable).
    A request under way when its broker dies fails at once (`_TRANSPORT`), whatever its own timeout is; the next one
    waits for a broker as long as that timeout allows.

    Args:
        ask: What to ask; called again after each passing answer.
        timeout_s: How long to go on asking, counted from the first passing answer: how long `ask` waited for it does
            not matter. None: `SETTLE_S`.
        unknown_s: The same where the topic is unknown to the broker, since nothing else was said; None: `timeout_s`.

    Raises:
        KafkaException: Any other answer, or a passing one more than so many seconds after the first.
    """
    firsts: dict[bool, float] = {}
    timeout_s = SETTLE_S if timeout_s is None else timeout_s
    while True:
        try:
            return ask()
        except KafkaException as error:
            code = error.args[0].code()
            if code not in PASSING:
                raise
            now = time.monotonic()
            unknown = code in MISSING
            if not unknown:
                firsts.pop(True, None)
            bound_s = unknown_s if unknown and unknown_s is not None else timeout_s
            if now > firsts.setdefault(unknown, now) + bound_s:
                raise
        time.sleep(RETRY_S)
