"""What a cluster says of topics, asked with confluent-kafka from the driver: offsets and identities.

No consumer group is joined and no offset committed: groups and offsets of others stay as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import confluent_kafka.admin
from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import ConfigResource, NewTopic, OffsetSpec

from backend.errors import HistoryLost, RewindError, SourceUnavailable
from backend.kafka_client.identity import TopicIdentity, compare
from backend.kafka_client.refusals import MISSING, answer, hearing, named
from backend.kafka_client.settling import SETTLE_S, while_it_settles

if TYPE_CHECKING:
    from backend.kafka_client.settings import KafkaSettings
    from backend.sources import OffsetRange, TopicPartition

log = logging.getLogger("rewind.kafka")

TIMEOUT_S = 30.0
RECONNECT_MS = 500
"""A client that is kept tries again so soon at most, when its cluster was away; librdkafka waits for ten seconds."""
OUTAGE_S = 120.0
"""How long a running query waits for a cluster that does not answer, as Spark's connector does."""
NEW_TOPIC_S = 2.0
"""How long a topic that was just made may not be known to the broker that is asked."""


def identities(
    settings: KafkaSettings,
    topics: Sequence[str],
    *,
    admin: Any = None,
    timeout_s: float | None = None,
    unknown_s: float | None = None,
) -> dict[str, TopicIdentity]:
    """Ask for the identity of each topic.

    Args:
        settings: The cluster.
        topics: Topics.
        admin: A client to ask with (`admin_client`), for those who ask often.
        timeout_s: How long to wait; None: `TIMEOUT_S`.
        unknown_s: How long a topic may not be known to the broker that is asked; None: `NEW_TOPIC_S`.

    Raises:
        SourceUnavailable: The cluster does not answer.
        TopicMissing: A topic does not exist.
        AccessRefused: The cluster refuses the credentials or their rights.
    """
    admin = admin or admin_client(settings)
    return asked_identities(settings, topics, admin=admin, timeout_s=timeout_s, unknown_s=unknown_s)()


def asked_identities(
    settings: KafkaSettings,
    topics: Sequence[str],
    *,
    admin: Any,
    timeout_s: float | None = None,
    unknown_s: float | None = None,
) -> Callable[[], dict[str, TopicIdentity]]:
    """Ask for the identity of each topic without waiting; what is returned waits, and raises as `identities` does."""
    timeout_s = timeout_s or TIMEOUT_S
    asked = []
    with suppress(KafkaException):  # what cannot be asked is asked, and said, where it is waited for
        asked.append(_ask(admin, topics, timeout_s))

    def answered() -> dict[str, TopicIdentity]:
        return _identities(admin, asked.pop() if asked else _ask(admin, topics, timeout_s), timeout_s)

    def waited() -> dict[str, TopicIdentity]:
        try:
            return while_it_settles(answered, unknown_s=NEW_TOPIC_S if unknown_s is None else unknown_s)
        except (KafkaException, TimeoutError) as error:
            raise _unavailable(settings, topics, error) from None

    return waited


def described(admin: Any, topics: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """Ask once what the cluster says of each topic.

    Raises:
        KafkaException: Not answered, or refused.
        TimeoutError: Not answered.
    """
    return _answers(admin, _ask(admin, topics, timeout_s), timeout_s)


def is_there(admin: Any, topic: str, timeout_s: float, *, unknown_s: float = 0) -> bool:
    """Ask whether the cluster has a topic, again while it settles; raises as `described`.

    Args:
        admin: A client to ask with.
        topic: Its name.
        timeout_s: How long an answer may take.
        unknown_s: How long it may not be known to the broker that is asked, and be there all the same.
    """
    try:
        while_it_settles(lambda: described(admin, [topic], timeout_s), unknown_s=unknown_s)
    except KafkaException as error:
        if error.args[0].code() in MISSING:
            return False
        raise
    return True


def _ask(admin: Any, topics: Sequence[str], timeout_s: float) -> dict[str, Any]:
    asked: dict[str, Any] = admin.describe_topics(TopicCollection(list(topics)), request_timeout=timeout_s)
    return asked


def _answers(admin: Any, asked: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    return {topic: answer(admin, one, timeout_s) for topic, one in asked.items()}


def _identities(admin: Any, asked: Mapping[str, Any], timeout_s: float) -> dict[str, TopicIdentity]:
    answers = _answers(admin, asked, timeout_s)
    return {topic: TopicIdentity(_hex(about.topic_id), len(about.partitions)) for topic, about in answers.items()}


@dataclass(frozen=True, slots=True)
class End:
    """The end of a partition.

    Attributes:
        offset: The offset after the latest.
        leader_epoch: It rises with each new leader of the partition (KIP-101); None where the broker is silent.
    """

    offset: int
    leader_epoch: int | None


def offsets(
    settings: KafkaSettings,
    topics: Sequence[str],
    *,
    committed_only: bool,
    known: Mapping[str, TopicIdentity] | None = None,
    unknown_s: float | None = None,
) -> dict[TopicPartition, OffsetRange]:
    """Ask for the earliest offset and the one after the latest of every partition.

    Args:
        settings: The cluster.
        topics: Topics.
        committed_only: End where the first open transaction begins, as a `read_committed` reader does.
        known: Which topics they must be.
        unknown_s: How long a topic may not be known to the broker that is asked; None: `SETTLE_S` where they are known
            here, else `NEW_TOPIC_S`.

    Raises:
        SourceUnavailable: The cluster does not answer.
        TopicMissing: A topic does not exist.
        AccessRefused: The cluster refuses the credentials or their rights.
        SourceWentBack: A topic is another one.
    """
    specs = (OffsetSpec.earliest(), OffsetSpec.latest())
    admin = admin_client(settings)
    first, end = _look(settings, topics, admin, specs, committed_only, TIMEOUT_S, known, unknown_s=unknown_s)
    return {key: (first[key].offset, end[key].offset) for key in end}


def ends(
    settings: KafkaSettings,
    topics: Sequence[str],
    admin: Any,
    *,
    committed_only: bool,
    known: Mapping[str, TopicIdentity] | None = None,
    expected: Iterable[TopicPartition] = (),
) -> dict[TopicPartition, End]:
    """Ask for the end of every partition; arguments and errors as for `offsets`.

    For those who ask often: `admin` is a client to ask with (`admin_client`), and where the partitions are the
    `expected` ones both questions are asked at once. An outage of `OUTAGE_S` is waited for.
    """
    return _look(settings, topics, admin, (OffsetSpec.latest(),), committed_only, OUTAGE_S, known, expected)[0]


def _look(
    settings: KafkaSettings,
    topics: Sequence[str],
    admin: Any,
    specs: Sequence[Any],
    committed_only: bool,
    timeout_s: float,
    known: Mapping[str, TopicIdentity] | None,
    expected: Iterable[TopicPartition] = (),
    unknown_s: float | None = None,
) -> list[dict[TopicPartition, End]]:
    """Ask which topics these are and, in the same breath, for offsets.

    The client asks the leaders that it knows, and learns of new ones by the first question only: both are asked again
    while it settles.
    """
    level = IsolationLevel.READ_COMMITTED if committed_only else IsolationLevel.READ_UNCOMMITTED

    def ask(wanted: Sequence[TopicPartition]) -> list[Any]:
        return [
            admin.list_offsets(
                {confluent_kafka.TopicPartition(*key): spec for key in wanted},
                isolation_level=level,
                request_timeout=timeout_s,
            )
            for spec in specs
        ]

    likely = sorted(expected)

    def looked() -> list[dict[TopicPartition, End]]:
        asked = ask(likely) if likely else []
        found = _identities(admin, _ask(admin, topics, timeout_s), timeout_s)
        compare(known or {}, found)
        wanted = [(topic, number) for topic in topics for number in range(found[topic].partitions)]
        if likely != sorted(wanted):
            asked = ask(wanted)
        answers = [
            {(at.topic, at.partition): answer(admin, one, timeout_s) for at, one in each.items()} for each in asked
        ]
        if any(each[key].offset < 0 for each in answers for key in wanted):  # its broker died: the client says no more
            raise KafkaException(KafkaError(KafkaError._TRANSPORT, "an answer without an offset"))
        return [{key: End(each[key].offset, each[key].leader_epoch) for key in wanted} for each in answers]

    unknown_s = unknown_s if unknown_s is not None else SETTLE_S if known else NEW_TOPIC_S
    try:
        return while_it_settles(looked, unknown_s=unknown_s)
    except (KafkaException, TimeoutError) as error:
        raise _unavailable(settings, topics, error) from None


def check_replayable(settings: KafkaSettings, topics: Sequence[str], *, unknown_s: float | None = None) -> None:
    """Check that no topic is compacted: of messages with the same key a replay would find the newest only.

    Args:
        settings: The cluster.
        topics: Topics.
        unknown_s: How long one may not be known to the broker that is asked; None: `NEW_TOPIC_S`.

    Raises:
        HistoryLost: `cleanup.policy` of a topic contains `compact`.
        SourceUnavailable: The cluster does not answer.
        TopicMissing: A topic does not exist.
        AccessRefused: The cluster refuses the credentials or their rights.
    """
    admin = admin_client(settings)
    for topic in sorted(topics):
        try:
            bound_s = NEW_TOPIC_S if unknown_s is None else unknown_s
            policy = configuration(admin, topic, unknown_s=bound_s)["cleanup.policy"]
        except (KafkaException, TimeoutError) as error:
            if not may_not_ask(error):
                raise _unavailable(settings, topics, error) from None
            log.warning("whether %s is compacted cannot be seen: grant DescribeConfigs on it", topic)
            continue
        if "compact" in policy:
            raise HistoryLost(
                "a compacted topic cannot be read again as it was",
                where=topic,
                why=f"cleanup.policy={policy}: of messages with the same key only the newest stay, and this job keeps"
                " messages, which a restore replays (aggregates over all values, joins)",
                command="set cleanup.policy=delete on the topic, with a retention longer than the windows'; or use"
                " aggregates that keep no messages, such as count, sum, min, max, mean",
            )


def admin_client(settings: KafkaSettings) -> Any:
    """Give a client for questions about a cluster; for each micro-batch the same."""
    return hearing(
        confluent_kafka.admin.AdminClient,
        settings.for_client() | {"log_level": 0, "reconnect.backoff.max.ms": RECONNECT_MS},
    )


def configuration(
    admin: Any,
    topic: str,
    timeout_s: float | None = None,
    unknown_s: float | None = None,
) -> dict[str, str]:
    """Ask for a topic's settings; the broker's where the topic has none of its own.

    Raises:
        KafkaException: Not answered, or not allowed.
        TimeoutError: Not answered.
    """
    timeout_s = timeout_s or TIMEOUT_S

    def asked() -> dict[str, str]:
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
        answers = answer(admin, admin.describe_configs([resource], request_timeout=timeout_s)[resource], timeout_s)
        return {name: entry.value for name, entry in answers.items()}

    return while_it_settles(asked, unknown_s=unknown_s)


def create_topic(
    admin: Any, topic: str, partitions: int, config: Mapping[str, str], *, replication: int = -1, timeout_s: float
) -> bool:
    """Create a topic where there is none; one that is there stays as it is. Return whether there was none.

    Raises:
        KafkaException: Refused.
        TimeoutError: Not answered.
    """
    new = NewTopic(topic, num_partitions=partitions, replication_factor=replication, config=dict(config))
    try:
        while_it_settles(lambda: answer(admin, admin.create_topics([new], request_timeout=timeout_s)[topic], timeout_s))
    except KafkaException as error:
        if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
            raise
        return False
    return True


def _hex(uuid: Any) -> str:
    """Give a topic id as hex; the client shows it as two signed halves."""
    high, low = uuid.get_most_significant_bits(), uuid.get_least_significant_bits()
    return f"{high % 2**64:016x}{low % 2**64:016x}"


def may_not_ask(error: Exception) -> bool:
    """Return whether an answer says that this client has no right to ask, though it was let in."""
    denied = (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED)
    return isinstance(error, KafkaException) and error.args[0].code() in denied


def _unavailable(settings: KafkaSettings, topics: Iterable[str], error: Exception) -> RewindError:
    return named(
        SourceUnavailable,
        "Kafka does not tell about the topics",
        where=f"{settings.servers}, {', '.join(topics)}",
        why=settings.redact(error),
        error=error,
        command="check the servers, and that the brokers run",
    )
