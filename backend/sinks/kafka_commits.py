"""The commit topic of the Kafka sink: which micro-batch is out, said in the transaction that brought it out.

One partition, compacted, one record per micro-batch with rows, all under the same key; the value is JSON (format 1)::

    {"format": 1, "query": id, "version": micro-batch, "messages": number, "digest": xxh3-128 of the messages}

It is a topic of its own because what is there must last: a consumer group's offsets expire (by default after a week),
and the output's own end may be retained away. A query's first record has version -1: the output is taken.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from backend.errors import UNDECODABLE, SinkUnavailable, SourceUnavailable, UnknownFormat
from backend.sources.kafka_admin import next_messages, offsets
from backend.sources.kafka_settling import while_it_settles

if TYPE_CHECKING:
    from backend.sources.kafka_settings import KafkaSettings

FORMAT = 1
KEY = b"rewind"
TIMEOUT_S = 60.0
SETTINGS = {"cleanup.policy": "compact", "segment.ms": "3600000", "min.cleanable.dirty.ratio": "0.1"}


class Published(msgspec.Struct, frozen=True):
    """A record of the commit topic.

    Attributes:
        query: Whose output it is.
        version: Micro-batch; -1 before the first.
        messages: How many messages it brought.
        digest: Of the messages.
        format: Of this record.
    """

    query: str
    version: int
    messages: int = 0
    digest: str = ""
    format: int = FORMAT


def encode(published: Published) -> bytes:
    """Encode a record's value."""
    return msgspec.json.encode(published)


def decode(data: bytes | None, where: str) -> Published:
    """Decode a record's value.

    Raises:
        UnknownFormat: It is of another release, or not ours.
    """
    try:
        found = msgspec.json.decode(data or b"", type=Published)
    except UNDECODABLE:
        found = None
    if found is None or found.format != FORMAT:
        raise UnknownFormat(
            "the commit topic of a Kafka sink holds a record of an unknown format",
            where=where,
            why=f"format {found.format}, this release reads {FORMAT}" if found else "something else writes there",
            command="install the release that wrote it, or give the sink another commit topic",
        )
    return found


def prepare(settings: KafkaSettings, topic: str, outputs: tuple[str, ...]) -> None:
    """See that the outputs exist, and make the commit topic where it does not, or check it.

    Args:
        settings: The cluster.
        topic: The commit topic; none for a sink without one.
        outputs: Topics that must exist.

    Raises:
        ValueError: The commit topic is there with other settings.
        SinkUnavailable: The cluster does not answer, or an output does not exist.
    """
    from confluent_kafka import KafkaError, KafkaException, TopicCollection
    from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic

    client = AdminClient(settings.for_client() | {"log_level": 0})

    def described() -> None:
        for name, answer in client.describe_topics(TopicCollection(list(outputs)), request_timeout=TIMEOUT_S).items():
            if any(about.leader is None for about in answer.result(TIMEOUT_S).partitions):
                raise KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE, name))

    def checked() -> Any:
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
        return client.describe_configs([resource], request_timeout=TIMEOUT_S)[resource].result(TIMEOUT_S)

    try:
        while_it_settles(described, timeout_s=2.0)
    except (KafkaException, TimeoutError) as error:
        raise unavailable(settings, ", ".join(outputs), error) from None
    if not topic:
        return
    try:
        new = NewTopic(topic, num_partitions=1, config=SETTINGS)
        client.create_topics([new], request_timeout=TIMEOUT_S)[topic].result(TIMEOUT_S)
    except KafkaException as error:
        if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
            raise unavailable(settings, topic, error) from None
    except TimeoutError as error:
        raise unavailable(settings, topic, error) from None
    try:
        policy = while_it_settles(checked)["cleanup.policy"].value
    except (KafkaException, TimeoutError) as error:
        raise unavailable(settings, topic, error) from None
    if policy != SETTINGS["cleanup.policy"]:
        raise ValueError(f"commits: the topic {topic!r} has cleanup.policy={policy}; a sink needs compact")


def newest(settings: KafkaSettings, topic: str, *, timeout_s: float = TIMEOUT_S) -> Published | None:
    """Read the newest committed record; None when there is none.

    Only the writer may ask, after its producer was initialized: then no transaction of its name is open, and the end of
    the topic is the end of what is committed.

    Raises:
        SinkUnavailable: The cluster does not answer, or a foreign transaction stays open on the topic.
        UnknownFormat: A record is of another release.
    """
    from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

    try:
        start, end = offsets(settings, [topic], committed_only=False)[topic, 0]
    except SourceUnavailable as error:
        raise unavailable(settings, topic, error) from None
    if start == end:
        return None
    consumer = Consumer(
        settings.for_client()
        | {
            "group.id": "rewind-sink",  # the client wants a name; nothing is ever committed under it
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "log_level": 0,
        }
    )
    found: Published | None = None
    deadline = time.monotonic() + timeout_s
    take = partial(decode, where=f"{settings.servers}/{topic}")
    try:
        consumer.assign([TopicPartition(topic, 0, start)])
        while time.monotonic() < deadline:
            for message in next_messages(consumer, 500, 0.5):
                told = message.error()
                if told is None:
                    found = take(message.value()) if message.value() is not None else found
                elif told.code() == KafkaError._PARTITION_EOF and message.offset() >= end:
                    return found
                elif told.fatal():
                    raise unavailable(settings, topic, KafkaException(told))
    except KafkaException as error:
        raise unavailable(settings, topic, error) from None
    finally:
        consumer.close()
    raise SinkUnavailable(
        "the end of the commit topic of a Kafka sink cannot be read",
        where=f"{settings.servers}/{topic}",
        why=f"not reached within {timeout_s:.0f} s: no answer, or somebody else's transaction is open on it",
        command="see that the brokers run and that nothing else writes to the topic",
    )


def unavailable(settings: KafkaSettings, where: str, error: Exception) -> SinkUnavailable:
    """Name a client's error, without secrets."""
    return SinkUnavailable(
        "the output topics cannot be used now",
        where=f"{settings.servers}, {where}",
        why=settings.redact(error) or type(error).__name__,
        command="see that the topics exist, the brokers run and the credentials are right; then start the query again",
    )
