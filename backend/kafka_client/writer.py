"""What all producers share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from confluent_kafka import KafkaError, KafkaException

IDEMPOTENT = MappingProxyType({"enable.idempotence": True, "max.in.flight.requests.per.connection": 1})
"""Each message once and in order (and with it `acks=all`): one request on its way to a broker, not five.

With more, librdkafka takes a request that succeeds for the proof that those before it did. A broker that knows nothing
of a producer in a partition takes whatever comes first, though: where it refuses the first request (the topic was just
made, the leader has just moved) and takes the second, the messages of the first are never written, are reported as
delivered, and are missing in a transaction that is committed (confluent-kafka-go issue 921).
"""


def hand_over(producer: Any, topic: str, **message: Any) -> None:
    """Hand a message to the client, waiting while its queue is full.

    Args:
        producer: The client.
        topic: Where to.
        message: As for the client's `produce`.
    """
    while True:
        try:
            producer.produce(topic, **message)
            break
        except BufferError:  # let it drain
            producer.poll(0.1)
    producer.poll(0)


def produce_all(producer: Any, topic: str, messages: Iterable[Mapping[str, Any]], timeout_s: float) -> tuple[int, str]:
    """Produce messages in order and wait until the broker has them; return how many, and why it has not all of them.

    Args:
        producer: The client.
        topic: Where to.
        messages: Of each what the client's `produce` takes.
        timeout_s: Bound on the wait behind the last one.
    """
    failures: list[str] = []

    def delivered(error: object, _message: object) -> None:
        if error is not None:
            failures.append(str(error))

    count = 0
    for message in messages:
        hand_over(producer, topic, on_delivery=delivered, **message)
        count += 1
    left = producer.flush(timeout_s)
    return count, failures[0] if failures else f"{left} still in flight" if left else ""


def is_fenced(error: Exception) -> bool:
    """Return whether a client's error says that another producer of the same name was opened since.

    `produce` only says that the client cannot go on; a producer of ours is fenced long before anything else ends it.
    """
    fenced = (KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError._FATAL)
    return isinstance(error, KafkaException) and error.args[0].code() in fenced


def cause_of(producer: Any, error: Any) -> Any:
    """Return what ended a transaction, where an error only says that the client throws away or takes no more.

    The client keeps the cause, and tells it who would begin a transaction; where none has failed, one that runs is in
    the way of that, and the error stays what it is.

    Args:
        producer: In a transaction, or in one that failed.
        error: A client's error.
    """
    if error.code() in (KafkaError._STATE, KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT):
        try:
            producer.begin_transaction()
        except KafkaException as refusal:
            if refusal.args[0].code() != KafkaError._STATE:
                return refusal.args[0]
    return error
