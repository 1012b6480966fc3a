"""What all transactional producers share."""

from __future__ import annotations


def is_fenced(error: Exception) -> bool:
    """Return whether a client's error says that another producer of the same name was opened since.

    `produce` only says that the client cannot go on; a producer of ours is fenced long before anything else ends it.
    """
    from confluent_kafka import KafkaError, KafkaException

    fenced = (KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError._FATAL)
    return isinstance(error, KafkaException) and error.args[0].code() in fenced
