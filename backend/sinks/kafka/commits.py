"""The commit topic of the Kafka sink: whose the output is, which topics it is, and which micro-batch is out.

One partition, compacted, all records under the same key; the value is JSON (format 1)::

    {"format": 1, "query": id, "version": micro-batch, "messages": number,
     "contents": {"results" or "errors": {shard: [number of rows, their digest]}},
     "writer": id of the process's writer, "topics": {name of an output: Kafka's topic id}}

One record per micro-batch with rows: exactly once, in the transaction that brought it out; at least once, when all of
it was acknowledged. And one at each start, by which the writer takes the output over; a query's first has version -1.
It is a topic of its own because what is there must last: a consumer group's offsets expire (by default after a week),
and the output's own end may be retained away.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from backend.errors import SinkUnavailable
from backend.kafka_client.admin import admin_client, configuration, create_topic, is_there, offsets
from backend.kafka_client.reader import consumer, next_messages
from backend.kafka_client.refusals import REFUSALS
from backend.kafka_client.settling import SETTLE_S
from backend.sinks.kafka.delivery import reaching
from recovery.files import decode_struct

if TYPE_CHECKING:
    from backend.kafka_client.settings import KafkaSettings

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
        contents: Output -> shard -> number and digest of its rows; None before the first, and in those of release 0.1.
        writer: Who wrote this: another one at each start; empty in records of release 0.1.
        topics: Outputs and their topic ids; empty in records of release 0.1.
        format: Of this record.
    """

    query: str
    version: int
    messages: int = 0
    contents: dict[str, dict[int, tuple[int, str]]] | None = None
    writer: str = ""
    topics: dict[str, str] = {}
    format: int = FORMAT


def encode(published: Published) -> bytes:
    """Encode a record's value."""
    return msgspec.json.encode(published)


def decode(data: bytes | None, where: str) -> Published:
    """Decode a record's value.

    Raises:
        UnknownFormat: It is of another release, or not ours.
    """
    return decode_struct(
        data or b"",
        Published,
        FORMAT,
        where=where,
        what="the commit topic of a Kafka sink holds a record that cannot be read",
        command="install the release that wrote it; where something else writes there, give another commit topic",
    )


def prepare(settings: KafkaSettings, topic: str, *, known: bool = False) -> None:
    """Make the commit topic where it does not exist, or check it.

    Args:
        settings: The cluster.
        topic: Its name.
        known: It was there: a broker that does not know it may have just come up.

    Raises:
        ValueError: It is there with other settings.
        SinkUnavailable: The cluster does not answer.
    """
    client = admin_client(settings)
    with reaching(settings, topic):
        # who may not create topics finds one made for it
        if not is_there(client, topic, TIMEOUT_S, unknown_s=SETTLE_S if known else 0):
            create_topic(client, topic, 1, SETTINGS, timeout_s=TIMEOUT_S)
        policy = configuration(client, topic, timeout_s=TIMEOUT_S)["cleanup.policy"]
    if policy != SETTINGS["cleanup.policy"]:
        raise ValueError(f"commits: the topic {topic!r} has cleanup.policy={policy}; a sink needs compact")


def was_cut(settings: KafkaSettings, topic: str) -> bool:
    """Return whether the commit topic's first records are gone: nothing that keeps its settings takes them away.

    Raises:
        SinkUnavailable: The cluster does not answer.
    """
    with reaching(settings, topic):
        return offsets(settings, [topic], committed_only=False, unknown_s=SETTLE_S)[topic, 0][0] > 0


def newest(settings: KafkaSettings, topic: str, *, timeout_s: float = TIMEOUT_S) -> Published | None:
    """Read the newest committed record; None when there is none.

    Once the writer's producer is initialized no transaction of its name is open, and the end of the topic is the end of
    what is committed. Who asks before learns of what was committed when it asked.

    Raises:
        SinkUnavailable: The cluster does not answer, or a foreign transaction stays open on the topic.
        UnknownFormat: A record is of another release.
    """
    where = f"{settings.servers}/{topic}"
    with reaching(settings, topic):
        start, end = offsets(settings, [topic], committed_only=False, unknown_s=SETTLE_S)[topic, 0]
        if start == end:
            return None
        found: Published | None = None
        for message in read(settings, topic, start, committed_only=True, timeout_s=timeout_s):
            if message.error() is None:
                found = decode(message.value(), where) if message.value() is not None else found
            elif message.offset() >= end:
                return found
    raise SinkUnavailable(
        "the end of the commit topic of a Kafka sink cannot be read",
        where=where,
        why=f"not reached within {timeout_s:.0f} s: no answer, or somebody else's transaction is open on it",
        command="see that the brokers run and that nothing else writes to the topic",
    )


def read(settings: KafkaSettings, topic: str, start: int, *, committed_only: bool, timeout_s: float) -> Iterator[Any]:
    """Read a topic's first partition from an offset on, for so long; a message with an error is an end of it.

    Raises:
        KafkaException: The client is refused, or cannot go on.
    """
    reader = consumer(settings, "rewind-sink", committed_only=committed_only, auto_offset_reset="earliest")
    deadline = time.monotonic() + timeout_s
    try:
        reader.assign([TopicPartition(topic, 0, start)])
        while time.monotonic() < deadline:
            for message in next_messages(reader, 500, 0.5):
                failure = message.error()
                if failure is None or failure.code() == KafkaError._PARTITION_EOF:
                    yield message
                elif failure.fatal() or failure.code() in REFUSALS:
                    raise KafkaException(failure)
    finally:
        reader.close()
