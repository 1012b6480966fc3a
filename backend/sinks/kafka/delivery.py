"""A producer whose messages arrive all, or are given up all at once.

Single messages never expire: an outage in which the first ones do and the later ones are delivered would leave a gap.
Instead there is one bound for the whole: when the cluster has acknowledged nothing for so long, or has refused a
message, everything that waits is thrown away and the caller learns it. What was on its way then may still arrive, also
later than what the next attempt writes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException

from backend.errors import RewindError, SinkUnavailable, SourceUnavailable
from backend.kafka_client.refusals import hearing, named
from backend.kafka_client.writer import IDEMPOTENT, cause_of
from backend.sinks.kafka.sizes import producer_sizes

if TYPE_CHECKING:
    from backend.kafka_client.settings import KafkaSettings

_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Publication:
    """Where rows go: what tasks need to produce.

    Attributes:
        settings: The cluster.
        topics: Kind -> topic.
        key: Columns of the results' key.
        query: Who writes.
        limits: Topic -> bytes that it takes, as far as is known.
        patience_s: How long nothing may be acknowledged.
        overflow: Where whole rows go that are too large for their topic.
    """

    settings: KafkaSettings
    topics: Mapping[str, str]
    key: tuple[str, ...]
    query: str
    limits: Mapping[str, int]
    patience_s: float
    overflow: str | None = None


class Delivery:
    """Messages on their way.

    Args:
        settings: The cluster.
        limits: Topic -> bytes that it takes.
        patience_s: How long the cluster may acknowledge nothing.
        more: Of the producer's configuration.

    Attributes:
        producer: The client, for what concerns transactions.

    Raises:
        KafkaException: The configuration cannot be used.
    """

    def __init__(
        self, settings: KafkaSettings, limits: Mapping[str, int], patience_s: float, more: Mapping[str, object]
    ) -> None:
        self._patience_s, self._transactional = patience_s, "transactional.id" in more
        self._failure: Any = None
        self._sent = self._arrived = 0
        self._moved = time.monotonic()
        self.producer = hearing(
            confluent_kafka.Producer,
            settings.for_client()
            | producer_sizes(limits)
            | IDEMPOTENT
            | {
                "linger.ms": 5,
                "compression.type": "lz4",
                "partitioner": "murmur2_random",  # as Java's clients: a key's partition is the same for all writers
                "delivery.report.only.error": True,
                "on_delivery": self._refused,
                "log_level": 0,
            }
            | dict(more),
        )

    def start(self) -> None:
        """Begin the patience anew: for a producer that was at rest."""
        self._moved = time.monotonic()
        self.producer.errors.begin(self.producer)

    def send(self, topic: str, value: bytes, key: bytes, partition: int = -1) -> None:
        """Hand a message over, waiting while the queue is full.

        Raises:
            KafkaException: As for `finish`.
        """
        while True:
            try:
                self.producer.produce(topic, value, key, partition)
                break
            except BufferError:
                self.producer.poll(_LOOK_S)
                self._check()
            except KafkaException as error:
                raise KafkaException(self._cause(error.args[0])) from None
        self._sent += 1
        self.producer.poll(0)
        if self._failure is not None:
            self._check()

    def finish(self) -> None:
        """Wait until all in-sync replicas have everything.

        Raises:
            KafkaException: A message was refused, or nothing moved for the patience. What waited was thrown away, and
                this must not be used again.
        """
        while self.producer.flush(_LOOK_S):
            self._check()
        self._check()

    def drop(self) -> None:
        """Throw away what waits, so that nothing of it is sent from now on."""
        self.producer.purge()

    def _refused(self, error: Any, _message: Any) -> None:
        if self._failure is None or was_purged(self._failure):
            self._failure = error

    def _check(self) -> None:
        arrived, now = self._sent - len(self.producer), time.monotonic()
        if arrived > self._arrived:
            self._arrived, self._moved = arrived, now
            self.producer.errors.begin()
        failure = self._failure
        if failure is None and now - self._moved > self._patience_s and len(self.producer):
            failure = KafkaError(
                KafkaError._TIMED_OUT,
                f"{len(self.producer)} messages wait, none was acknowledged for {self._patience_s:g} s",
            )
        if failure is None and len(self.producer):
            failure = self.producer.errors.refusal()
        if failure is not None:
            self.drop()
            if was_purged(failure):
                self.producer.flush(_LOOK_S)  # the client threw it away for another message, whose report comes behind
                failure = self._failure
            raise KafkaException(self._cause(failure))

    def _cause(self, error: Any) -> Any:
        return cause_of(self.producer, error) if self._transactional else error


def was_purged(error: Any) -> bool:
    """Return whether an error only says that a message was thrown away, not why."""
    return error.code() in (KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT)


def may_be_too_large(error: Any) -> bool:
    """Return whether a topic may take less than it did: it refused a message, or nobody says why one was not sent."""
    return error.code() == KafkaError.MSG_SIZE_TOO_LARGE or was_purged(error)


def unavailable(settings: KafkaSettings, where: str, error: Exception, *, may_come: bool = False) -> RewindError:
    """Return a client's error by name, without secrets: refused, a topic not there, or unavailable now.

    `may_come`: A topic that is not there is no more than unavailable.
    """
    return named(
        SinkUnavailable,
        "the output topics cannot be used now",
        where=f"{settings.servers}, {where}",
        why=settings.redact(error),
        error=error,
        command="see that the brokers run; then start the query again",
        may_come=may_come,
    )


@contextmanager
def reaching(settings: KafkaSettings, where: str) -> Iterator[None]:
    """Name what a client raises in here, or who asks it for us, as `unavailable` does."""
    try:
        yield
    except (KafkaException, SourceUnavailable, TimeoutError) as error:
        raise unavailable(settings, where, error) from None
