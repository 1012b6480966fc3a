"""The topic of a `KafkaChangelog`: made with the settings that a log with bases needs, and checked when it exists.

The topic is not compacted: compaction keeps the newest value per key, which may be an orphan's, and drops the committed
one. Kafka deletes nothing by age or size; `KafkaChangelog.prune` cuts below the oldest base that is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backend.errors import ChangelogUnavailable
from backend.sources.kafka_settling import while_it_settles

if TYPE_CHECKING:
    from backend.sources.kafka_settings import KafkaSettings

TIMEOUT_S = 60.0
"""A broker that restarts or hands its partitions on should not fail a task."""
REQUIRED = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}


def admin(settings: KafkaSettings) -> Any:
    """Give an admin client; it must be kept until its requests are answered."""
    from confluent_kafka.admin import AdminClient

    return AdminClient(settings.for_client() | {"log_level": 0})


def prepare_topic(settings: KafkaSettings, topic: str, shards: int, replication: int) -> None:
    """Create the topic with one partition per shard, or check the one that is there.

    Args:
        settings: The cluster.
        topic: Its name.
        shards: How many partitions it must have at least.
        replication: Replication factor of a new topic; -1 takes the broker's default.

    Raises:
        ValueError: The topic is there with other settings, or with fewer partitions.
        ChangelogUnavailable: The cluster does not answer or refuses.
    """
    from confluent_kafka import KafkaError, KafkaException
    from confluent_kafka.admin import NewTopic

    client = admin(settings)
    new = NewTopic(topic, num_partitions=shards, replication_factor=replication, config=REQUIRED)
    try:
        client.create_topics([new], request_timeout=TIMEOUT_S)[topic].result(TIMEOUT_S)
    except KafkaException as error:
        if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
            raise unavailable(settings, topic, error) from None
    except TimeoutError as error:
        raise unavailable(settings, topic, error) from None
    _check(settings, client, topic, shards)


def _check(settings: KafkaSettings, client: Any, topic: str, shards: int) -> None:
    from confluent_kafka import KafkaException, TopicCollection
    from confluent_kafka.admin import ConfigResource

    resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
    names = TopicCollection([topic])

    def described() -> tuple[Any, Any]:
        told = client.describe_topics(names, request_timeout=TIMEOUT_S)[topic].result(TIMEOUT_S)
        return told, client.describe_configs([resource], request_timeout=TIMEOUT_S)[resource].result(TIMEOUT_S)

    try:
        told, config = while_it_settles(described)
    except (KafkaException, TimeoutError) as error:
        raise unavailable(settings, topic, error) from None
    wrong = {name: config[name].value for name, wanted in REQUIRED.items() if config[name].value != wanted}
    if wrong:
        found = ", ".join(f"{name}={value}" for name, value in wrong.items())
        wanted = ", ".join(f"{name}={REQUIRED[name]}" for name in wrong)
        raise ValueError(f"changelog: the topic {topic!r} has {found}; a changelog needs {wanted}")
    if len(told.partitions) < shards:
        raise ValueError(f"changelog: the topic {topic!r} has {len(told.partitions)} partitions; {shards} are needed")


def unavailable(settings: KafkaSettings, topic: str, error: Exception) -> ChangelogUnavailable:
    """Name a client's error, without secrets."""
    return ChangelogUnavailable(
        "the changelog topic cannot be used now",
        where=f"{settings.servers}/{topic}",
        why=settings.redact(error) or type(error).__name__,
        command="see that the brokers run and the credentials are right; the task is tried again",
    )
