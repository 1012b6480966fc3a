"""What all transactional producers share."""

from __future__ import annotations


def is_fenced(error: Exception) -> bool:
    """Return whether a client's error says that another producer of the same name was opened since."""
    from confluent_kafka import KafkaError, KafkaException

    fenced = (KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH)
    return isinstance(error, KafkaException) and error.args[0].code() in fenced
