"""Topics and event streams for tests: named by chance, filled in whole transactions or without, removed afterwards."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from backend.errors import BrokerUnavailable
from backend.kafka_client.writer import IDEMPOTENT, produce_all

if TYPE_CHECKING:
    from backend.kafka_client.settings import KafkaSettings

WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Event:
    """One Kafka record to produce.

    Attributes:
        value: Bytes and None (a tombstone) as they are, text as UTF-8, anything else as JSON.
        key: Bytes, text or None.
        partition: The partition; a test says where its records go.
        timestamp_ms: `CreateTime`, milliseconds; None takes the clock.
        headers: Name -> value.
    """

    value: object
    key: bytes | str | None = None
    partition: int = 0
    timestamp_ms: int | None = None
    headers: Mapping[str, bytes] = field(default_factory=dict)

    def message(self) -> dict[str, Any]:
        """Give it as the client's `produce` takes it."""
        extra = {} if self.timestamp_ms is None else {"timestamp": self.timestamp_ms}
        value, headers = encode(self.value), dict(self.headers)
        return {"value": value, "key": self.key, "partition": self.partition, "headers": headers, **extra}


def encode(value: object) -> bytes | None:
    """Give a record's value bytes.

    >>> encode({"a": 1}), encode("x"), encode(None)
    (b'{"a": 1}', b'x', None)
    """
    if value is None or isinstance(value, bytes):
        return value
    return value.encode() if isinstance(value, str) else json.dumps(value).encode()


class Topics:
    """Topics of one test or session on one broker.

    Args:
        settings: The broker.
    """

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._names: list[str] = []

    def create(self, partitions: int = 1, *, name: str | None = None, **config: object) -> str:
        """Create a topic and give its name; returns when the broker knows it.

        Args:
            partitions: How many.
            name: The whole name; by default one that nobody else has.
            config: Topic settings with `_` for `.`: `message_timestamp_type="LogAppendTime"`. Unless told otherwise
                the topic keeps everything: Kafka's retention goes by the records' timestamps, and tests have old ones.
        """
        topic = name or f"rewind-{uuid.uuid4().hex[:12]}"
        settings = {"retention.ms": "-1"} | {key.replace("_", "."): str(value) for key, value in config.items()}
        new = NewTopic(topic, num_partitions=partitions, replication_factor=1, config=settings)
        self._admin.create_topics([new])[topic].result(WAIT_S)
        self._names.append(topic)
        self._settle(topic, partitions)
        return topic

    def adopt(self, *names: str) -> None:
        """See that topics that the code under test makes go with the test too."""
        self._names.extend(names)

    def grow(self, topic: str, partitions: int) -> None:
        """Raise a topic's number of partitions; returns when the broker knows them."""
        self._admin.create_partitions([NewPartitions(topic, partitions)])[topic].result(WAIT_S)
        self._settle(topic, partitions)

    def delete(self, topic: str) -> None:
        """Delete a topic now; returns when the broker knows no such topic, so that its name may be used again."""
        self._admin.delete_topics([topic])[topic].result(WAIT_S)
        self._settle(topic, 0)
        self._names = [name for name in self._names if name != topic]

    def close(self) -> None:
        """Delete every topic made here that is left; a broker that is gone took them along."""
        if self._names:
            silent = (KafkaError._TIMED_OUT, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN)
            for deleted in self._admin.delete_topics(self._names, request_timeout=WAIT_S).values():
                try:
                    deleted.result(WAIT_S)
                except TimeoutError:
                    break
                except KafkaException as error:
                    code = error.args[0].code()
                    if code in silent:  # one request has them all
                        break
                    if code != KafkaError.UNKNOWN_TOPIC_OR_PART:
                        raise
        self._names = []

    def produce(
        self, topic: str, events: Iterable[Event | object], *, transaction: Literal["commit", "abort"] | None = None
    ) -> int:
        """Produce events in order and wait until the broker has them; give how many.

        Args:
            topic: Where to.
            events: `Event`s; anything else is the value of one.
            transaction: Produce in one transaction, and how it ends.

        Raises:
            ValueError: `transaction` is none of these.
            BrokerUnavailable: Not everything was acknowledged within the bound.
        """
        if transaction not in (None, "commit", "abort"):
            raise ValueError(f"transaction={transaction!r}: allowed are None, 'commit' and 'abort'")

        config: dict[str, Any] = self._settings.for_client() | {"linger.ms": 5, "log_level": 0}
        if transaction:
            config["transactional.id"] = f"rewind-test-{uuid.uuid4().hex}"
        producer = Producer(config | IDEMPOTENT)
        if transaction:
            producer.init_transactions(WAIT_S)
            producer.begin_transaction()
        messages = ((event if isinstance(event, Event) else Event(event)).message() for event in events)
        count, why = produce_all(producer, topic, messages, WAIT_S)
        if why:
            raise BrokerUnavailable("events were not acknowledged", where=topic, why=why)
        if transaction == "commit":
            producer.commit_transaction(WAIT_S)
        elif transaction == "abort":
            producer.abort_transaction(WAIT_S)
        return count

    def _settle(self, topic: str, partitions: int) -> None:
        """Wait until the broker tells of so many partitions with a leader: not at once after a change."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            # all topics are asked for: asking for one by its name may make it, on a broker that makes topics by itself
            about = self._admin.list_topics(timeout=WAIT_S).topics.get(topic)
            led = [part for part in about.partitions.values() if part.leader >= 0] if about is not None else []
            if len(led) == partitions:
                return
            time.sleep(0.05)
        raise BrokerUnavailable("the broker does not follow", where=topic, why=f"not {partitions} partitions yet")

    @cached_property
    def _admin(self) -> Any:
        """One client for all requests: those in flight end with their client."""
        return AdminClient(self._settings.for_client() | {"log_level": 0})
