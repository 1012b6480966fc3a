"""The topic of a `KafkaChangelog`: made with the settings that a log with bases needs, and checked when it exists.

The topic is not compacted: compaction keeps the newest value per key, which may be an orphan's, and drops the committed
one. Kafka deletes nothing by age or size; `KafkaChangelog.prune` cuts below the oldest base that is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import confluent_kafka
from confluent_kafka import KafkaException

from backend.errors import ChangelogUnavailable, RewindError
from backend.kafka_client import admin
from backend.kafka_client.refusals import MISSING, named
from backend.kafka_client.settling import while_it_settles
from backend.kafka_client.writer import IDEMPOTENT
from recovery.changelog.chunks import CHUNK_BYTES, claim_key

if TYPE_CHECKING:
    from backend.kafka_client.settings import KafkaSettings

TIMEOUT_S = 60.0
"""A broker that restarts or hands its partitions on should not fail a task."""
LEAST_MESSAGE_BYTES = CHUNK_BYTES + 4 * 1024
"""What the topic must take: a piece of a record with its key, and what Kafka puts around them."""
REQUIRED = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}


def create_topic(settings: KafkaSettings, topic: str, shards: int) -> None:
    """Create the topic with one partition per shard, and the broker's replication factor, where there is none.

    Args:
        settings: The cluster.
        topic: Its name.
        shards: How many partitions it gets.

    Raises:
        ChangelogUnavailable: The cluster does not answer or refuses.
    """
    client = admin.admin_client(settings)
    try:
        admin.create_topic(client, topic, shards, REQUIRED, timeout_s=TIMEOUT_S)
    except (KafkaException, TimeoutError) as error:
        raise unavailable(settings, topic, error) from None


def partitions_of(settings: KafkaSettings, topic: str, shards: int, *, unknown_s: float) -> int | None:
    """Check the settings of a topic that is there and give its number of partitions; None where there is none.

    Args:
        settings: The cluster.
        topic: Its name.
        shards: How many partitions it must have at least.
        unknown_s: How long it may not be known to the broker that is asked, and be there all the same.

    Raises:
        ValueError: The topic is there with other settings, or with fewer partitions.
        ChangelogUnavailable: The cluster does not answer or refuses.
    """
    client = admin.admin_client(settings)
    try:
        about = while_it_settles(lambda: admin.described(client, [topic], TIMEOUT_S)[topic], unknown_s=unknown_s)
        config = admin.configuration(client, topic, timeout_s=TIMEOUT_S)
    except (KafkaException, TimeoutError) as error:
        if isinstance(error, KafkaException) and error.args[0].code() in MISSING:
            return None
        raise unavailable(settings, topic, error) from None
    wrong = {name: config[name] for name, wanted in REQUIRED.items() if config[name] != wanted}
    if wrong:
        found = ", ".join(f"{name}={value}" for name, value in wrong.items())
        wanted = ", ".join(f"{name}={REQUIRED[name]}" for name in wrong)
        raise ValueError(f"changelog: the topic {topic!r} has {found}; a changelog needs {wanted}")
    limit = config["max.message.bytes"]
    if int(limit) < LEAST_MESSAGE_BYTES:
        raise ValueError(
            f"changelog: the topic {topic!r} has max.message.bytes={limit}; a changelog needs at least"
            f" {LEAST_MESSAGE_BYTES}"
        )
    if len(about.partitions) < shards:
        raise ValueError(f"changelog: the topic {topic!r} has {len(about.partitions)} partitions; {shards} are needed")
    return len(about.partitions)


def claim_topic(settings: KafkaSettings, topic: str, owner: str) -> None:
    """Write a query's claim to the first partition; acknowledged by all in-sync replicas on return.

    Raises:
        ChangelogUnavailable: It was not acknowledged.
    """
    failures: list[Any] = []
    config = {"delivery.timeout.ms": int(TIMEOUT_S * 1000), "log_level": 0}
    producer = confluent_kafka.Producer(settings.for_client() | IDEMPOTENT | config)
    producer.produce(topic, b"", claim_key(owner), 0, on_delivery=lambda error, _: failures.append(error))
    left = producer.flush(TIMEOUT_S)
    failed = [error for error in failures if error is not None]
    if left or failed:
        raise unavailable(settings, topic, KafkaException(failed[0]) if failed else TimeoutError("no acknowledgement"))


def unavailable(settings: KafkaSettings, topic: str, error: Exception) -> RewindError:
    """Name a client's error, without secrets: refused, or unavailable now."""
    return named(
        ChangelogUnavailable,
        "the changelog topic cannot be used now",
        where=f"{settings.servers}/{topic}",
        why=settings.redact(error),
        error=error,
        command="see that the brokers run; the task is tried again",
        may_come=True,
    )
