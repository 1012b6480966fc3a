"""What a cluster says of topics, asked with confluent-kafka from the driver: offsets and identities.

No consumer group is joined and no offset committed: groups and offsets of others stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from backend.errors import SourceUnavailable, SourceWentBack
from backend.sources import OffsetRange, TopicPartition
from backend.sources.kafka_settling import while_it_settles

if TYPE_CHECKING:
    from backend.sources.kafka_settings import KafkaSettings

TIMEOUT_S = 30.0
OUTAGE_S = 120.0
"""How long a running query waits for a cluster that does not answer, as Spark's connector does."""
NEW_TOPIC_S = 2.0
"""How long a topic that was just made may not be known to the broker that is asked."""


@dataclass(frozen=True, slots=True)
class TopicIdentity:
    """Which topic it is, whatever its name.

    Attributes:
        id: Kafka's topic id (KIP-516); another one when a topic was deleted and made again.
        partitions: How many it has.
    """

    id: str
    partitions: int


def identities(
    settings: KafkaSettings, topics: Sequence[str], *, admin: Any = None, timeout_s: float | None = None
) -> dict[str, TopicIdentity]:
    """Ask for the identity of each topic.

    Args:
        settings: The cluster.
        topics: Topics.
        admin: A client to ask with (`admin_client`), for those who ask often.
        timeout_s: How long to wait; None: `TIMEOUT_S`.

    Raises:
        SourceUnavailable: The cluster does not answer, or a topic does not exist.
    """
    from confluent_kafka import KafkaException, TopicCollection

    admin = admin or admin_client(settings)
    timeout_s = timeout_s or TIMEOUT_S

    def described() -> dict[str, TopicIdentity]:
        asked = admin.describe_topics(TopicCollection(list(topics)), request_timeout=timeout_s)
        told = {topic: answer.result(timeout_s) for topic, answer in asked.items()}
        return {topic: TopicIdentity(_hex(about.topic_id), len(about.partitions)) for topic, about in told.items()}

    try:
        return while_it_settles(described, timeout_s=NEW_TOPIC_S)
    except (KafkaException, TimeoutError) as error:
        raise _unavailable(settings, topics, error) from None


def offsets(
    settings: KafkaSettings, topics: Sequence[str], *, committed_only: bool
) -> dict[TopicPartition, OffsetRange]:
    """Ask for the earliest offset and the one after the latest of every partition.

    Args:
        settings: The cluster.
        topics: Topics.
        committed_only: End where the first open transaction begins, as a `read_committed` reader does.

    Raises:
        SourceUnavailable: The cluster does not answer, or a topic does not exist.
    """
    from confluent_kafka.admin import OffsetSpec

    admin = admin_client(settings)
    wanted = _partitions(settings, topics, admin, TIMEOUT_S)
    listed = partial(_listed, settings, wanted, admin, committed_only=committed_only, timeout_s=TIMEOUT_S)
    first, end = listed(OffsetSpec.earliest()), listed(OffsetSpec.latest())
    return {key: (first[key], end[key]) for key in wanted}


def ends(
    settings: KafkaSettings, topics: Sequence[str], admin: Any, *, committed_only: bool
) -> dict[TopicPartition, int]:
    """Ask for the offset after the latest of every partition; arguments and errors as for `offsets`.

    `admin` is a client to ask with (`admin_client`), for those who ask often; an outage of `OUTAGE_S` is waited for.
    """
    from confluent_kafka.admin import OffsetSpec

    wanted = _partitions(settings, topics, admin, OUTAGE_S)
    return _listed(settings, wanted, admin, OffsetSpec.latest(), committed_only=committed_only, timeout_s=OUTAGE_S)


def _partitions(settings: KafkaSettings, topics: Sequence[str], admin: Any, timeout_s: float) -> list[TopicPartition]:
    known = identities(settings, topics, admin=admin, timeout_s=timeout_s)
    return [(topic, number) for topic in topics for number in range(known[topic].partitions)]


def _listed(
    settings: KafkaSettings,
    wanted: Sequence[TopicPartition],
    admin: Any,
    spec: Any,
    *,
    committed_only: bool,
    timeout_s: float,
) -> dict[TopicPartition, int]:
    from confluent_kafka import IsolationLevel, KafkaException, TopicPartition

    level = IsolationLevel.READ_COMMITTED if committed_only else IsolationLevel.READ_UNCOMMITTED

    def listed() -> dict[tuple[str, int], int]:
        asked = admin.list_offsets(
            {TopicPartition(*key): spec for key in wanted}, isolation_level=level, request_timeout=timeout_s
        )
        return {(key.topic, key.partition): answer.result(timeout_s).offset for key, answer in asked.items()}

    try:
        return while_it_settles(listed)
    except (KafkaException, TimeoutError) as error:
        raise _unavailable(settings, [topic for topic, _ in wanted], error) from None


def compare(before: Mapping[str, TopicIdentity], now: Mapping[str, TopicIdentity]) -> list[str]:
    """Compare identities, as of the checkpoint and now; give what there is to announce, one sentence each.

    Raises:
        SourceWentBack: A topic was deleted and made again: its offsets mean other messages.

    >>> compare({"t": TopicIdentity("a", 1)}, {"t": TopicIdentity("a", 3)})
    ['topic t has 3 partitions, it had 1: the new ones are read from their beginning']
    """
    notes: list[str] = []
    for topic, was in before.items():
        found = now.get(topic)
        if found is None:
            continue
        if found.id != was.id or found.partitions < was.partitions:
            raise SourceWentBack(
                "a topic was deleted and made again",
                where=topic,
                why=f"its id is {found.id}, the checkpoint was made with {was.id}",
                command="start anew with another checkpoint",
            )
        if found.partitions > was.partitions:
            notes.append(
                f"topic {topic} has {found.partitions} partitions, it had {was.partitions}: "
                "the new ones are read from their beginning"
            )
    return notes


def next_messages(consumer: Any, at_most: int, wait_s: float) -> list[Any]:
    """Wait for a message, and give it with those that have come by then; none after so many seconds.

    `Consumer.consume` waits until it has as many as it may give: behind the end of a partition, its whole time.
    """
    first = consumer.poll(wait_s)
    return [] if first is None else [first, *consumer.consume(at_most - 1, timeout=0)]


def admin_client(settings: KafkaSettings) -> Any:
    """Give a client for questions about a cluster."""
    from confluent_kafka.admin import AdminClient

    return AdminClient(settings.for_client() | {"log_level": 0})


def _hex(uuid: Any) -> str:
    """Give a topic id as hex; the client shows it as two signed halves."""
    high, low = uuid.get_most_significant_bits(), uuid.get_least_significant_bits()
    return f"{high % 2**64:016x}{low % 2**64:016x}"


def _unavailable(settings: KafkaSettings, topics: Iterable[str], error: Exception) -> SourceUnavailable:
    return SourceUnavailable(
        "Kafka does not tell about the topics",
        where=f"{settings.servers}, {', '.join(topics)}",
        why=settings.redact(error) or type(error).__name__,
        command="check the servers, the topics' names and the credentials",
    )
