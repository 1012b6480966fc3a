"""What a cluster says of a sink's topics: which they are, what they take, whether anything was ever in them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError, KafkaException

from backend.errors import AccessRefused, ManifestMismatch, RewindError, SourceUnavailable, TopicMissing
from backend.kafka_client.admin import admin_client, configuration, described, identities, may_not_ask, offsets
from backend.kafka_client.settling import SETTLE_S, while_it_settles
from backend.sinks.kafka.commits import KEY, read
from backend.sinks.kafka.delivery import reaching, unavailable
from backend.sinks.kafka.sizes import LARGEST_LIMIT, LEAST_LIMIT
from recovery.changelog.chunks import is_ours

if TYPE_CHECKING:
    from backend.kafka_client.settings import KafkaSettings

log = logging.getLogger("rewind.sink")

TIMEOUT_S = 60.0
KAFKA_LIMIT = 1_048_588
"""Kafka's default of `max.message.bytes`, for clusters that do not let us ask."""


def look(
    settings: KafkaSettings, topics: Sequence[str], *, settle_s: float = 2.0
) -> tuple[dict[str, str], dict[str, int]]:
    """Ask what the topics are and what they take.

    Args:
        settings: The cluster.
        topics: The topics.
        settle_s: How long one may not be known to a broker, or have no leader.

    Returns:
        By topic, Kafka's id of it, another one when it was deleted and made again; and the bytes of the largest batch
        of records that it takes.

    Raises:
        SinkUnavailable: The cluster does not answer.
        TopicMissing: A topic does not exist.
        AccessRefused: The cluster refuses the credentials or their rights.
        ValueError: A topic takes less than a row needs.
    """
    client, timeout_s = admin_client(settings), TIMEOUT_S

    def led() -> None:
        for name, answer in described(client, topics, timeout_s).items():
            if any(about.leader is None for about in answer.partitions):
                raise KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE, name))

    with reaching(settings, ", ".join(topics)):
        while_it_settles(led, timeout_s=settle_s)
        known = identities(settings, topics, admin=client, timeout_s=timeout_s, unknown_s=settle_s)
    limits = {topic: _limit(settings, client, topic, timeout_s) for topic in topics}
    return {topic: known[topic].id for topic in topics}, limits


def failure(settings: KafkaSettings, topics: Sequence[str], where: str, error: Exception) -> RewindError:
    """Return a client's error by name, in a query that has used the topics before.

    Where it did not find a topic, all of them are asked for: a broker that has just come up may not know one yet.
    """
    found = unavailable(settings, where, error)
    if not isinstance(found, TopicMissing):
        return found
    try:
        identities(settings, topics, timeout_s=SETTLE_S, unknown_s=SETTLE_S)
    except (TopicMissing, AccessRefused) as other:
        return other
    except SourceUnavailable as other:
        log.warning("whether the topics are there is not known now: %s", other)
    return unavailable(settings, where, error, may_come=True)


def _limit(settings: KafkaSettings, client: Any, topic: str, timeout_s: float) -> int:
    try:
        limit = int(configuration(client, topic, timeout_s=timeout_s)["max.message.bytes"])
    except (KafkaException, TimeoutError) as error:
        if not may_not_ask(error):
            raise unavailable(settings, topic, error) from None
        log.warning(
            "max.message.bytes of topic %s cannot be asked for (it takes DescribeConfigs on the topic); Kafka's default"
            " of %d is taken for it", topic, KAFKA_LIMIT,
        )  # fmt: skip
        limit = KAFKA_LIMIT
    if limit < LEAST_LIMIT:
        raise ValueError(f"topic {topic!r} has max.message.bytes={limit}; a sink needs at least {LEAST_LIMIT}")
    return min(limit, LARGEST_LIMIT)


def check_purpose(settings: KafkaSettings, topics: Mapping[str, str]) -> None:
    """See by their first messages that topics are no changelog and no commit topic: rows there would destroy them.

    Args:
        settings: The cluster.
        topics: Output -> topic.

    Raises:
        ManifestMismatch: One is.
        SinkUnavailable: The cluster does not answer.
    """
    for output, topic in topics.items():
        key = _first_key(settings, topic)
        what = "commit topic" if key == KEY else "changelog" if key is not None and is_ours(key) else ""
        if what:
            raise ManifestMismatch(
                f"{output}: the topic is the {what} of a query",
                where=f"{settings.servers}/{topic}",
                why=f"its first message says so; rows in it would make the {what} unreadable",
                command="choose another topic",
            )


def _first_key(settings: KafkaSettings, topic: str) -> bytes | None:
    """Return the key of the first message of a topic's first partition; None where there is no message, or no key."""
    with reaching(settings, topic):
        low, high = offsets(settings, [topic], committed_only=False)[topic, 0]
        if low == high:
            return None
        for message in read(settings, topic, low, committed_only=False, timeout_s=TIMEOUT_S):
            key: bytes | None = message.key() if message.error() is None else None
            return key
    raise unavailable(settings, topic, TimeoutError(f"its first message cannot be read within {TIMEOUT_S:.0f} s"))


def ever_written(settings: KafkaSettings, topics: Sequence[str]) -> list[str]:
    """Return those topics that have, or had, a message.

    Raises:
        SinkUnavailable: The cluster does not answer.
    """
    with reaching(settings, ", ".join(topics)):
        ends = offsets(settings, topics, committed_only=False, unknown_s=SETTLE_S)
    return [topic for topic in topics if any(end > 0 for (name, _), (_, end) in ends.items() if name == topic)]
