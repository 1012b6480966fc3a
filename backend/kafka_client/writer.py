"""What all transactional producers share."""

from __future__ import annotations

from typing import Any


def is_fenced(error: Exception) -> bool:
    """Return whether a client's error says that another producer of the same name was opened since.

    `produce` only says that the client cannot go on; a producer of ours is fenced long before anything else ends it.
    """
    from confluent_kafka import KafkaError, KafkaException

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
    from confluent_kafka import KafkaError, KafkaException

    if error.code() in (KafkaError._STATE, KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT):
        try:
            producer.begin_transaction()
        except KafkaException as refusal:
            if refusal.args[0].code() != KafkaError._STATE:
                return refusal.args[0]
    return error
