"""Consumers without a group: they commit nothing and disturb nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import confluent_kafka
from confluent_kafka import KafkaError

from backend.kafka_client.refusals import hearing

if TYPE_CHECKING:
    from backend.kafka_client.settings import KafkaSettings


def consumer(settings: KafkaSettings, name: str, *, committed_only: bool, **more: object) -> Any:
    """Make a consumer that says where a partition ends.

    Args:
        settings: The cluster.
        name: The client wants a group's name; nothing is ever committed under it.
        committed_only: Read what is committed only, to where the first open transaction begins.
        more: Of librdkafka's configuration, with `_` for `.`.
    """
    fixed = {
        "group.id": name,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "isolation.level": "read_committed" if committed_only else "read_uncommitted",
        "enable.partition.eof": True,
        "fetch.wait.max.ms": 10,  # brokers hold the answer that says where the end is for so long
        "log_level": 0,
    }
    configuration = settings.for_client() | fixed | {key.replace("_", "."): value for key, value in more.items()}
    return hearing(confluent_kafka.Consumer, configuration)


def next_messages(consumer: Any, at_most: int, wait_s: float) -> list[Any]:
    """Wait for a message, and return it with those that have come by then; none after so many seconds.

    `Consumer.consume` waits until it has as many as it may give: behind the end of a partition, its whole time. The
    client asks for its group's coordinator, though it only assigns: that it has no right to the group is no matter.

    Raises:
        KafkaException: The client is refused.
    """
    first = consumer.poll(wait_s)
    if first is None:
        consumer.errors.check()
        return []
    if first.error() is None:
        consumer.errors.begin()
    messages = [first, *consumer.consume(at_most - 1, timeout=0)]
    return [m for m in messages if m.error() is None or m.error().code() != KafkaError.GROUP_AUTHORIZATION_FAILED]
