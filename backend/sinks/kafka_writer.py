"""Write a micro-batch to Kafka in one transaction, once: fenced, and looked up before it is written.

Spark may hand over a micro-batch again: after a crash between the publication and its own commit, or when it could not
tell whether the publication worked. So each transaction also writes to the commit topic which micro-batch it brings,
and a writer that opens reads that back before it writes anything:

1. `init_transactions` under a name made of the output topic. The broker ends what an older producer of that name left
   open (a prepared commit is completed, the rest aborted) and refuses the older producer from then on. So what the
   commit topic says afterwards is final, whoever was writing.
2. The newest record of the commit topic says which micro-batch is out. The same one again is passed over; an older one
   means that the checkpoint went back behind what readers have seen: refused.
3. Messages and the record go out in one transaction: readers of committed messages see all of a micro-batch or nothing.

When a transaction ends unclearly (a timeout while committing), the producer is thrown away and step 1 begins again.
One transaction per micro-batch, not per shard: readers then never see half a micro-batch, and one name is fenced.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from backend.errors import ManifestMismatch, SinkConflict
from backend.sinks.kafka_commits import KEY, TIMEOUT_S, Published, encode, newest, unavailable
from backend.sinks.kafka_rows import Message, digest
from recovery.killpoints import kill_point

if TYPE_CHECKING:
    from backend.sources.kafka_settings import KafkaSettings

log = logging.getLogger("rewind.sink")

TRIES = 3
TRANSACTION_TIMEOUT_S = 120
"""A crashed writer's open transaction holds readers back for so long at most."""


class TransactionalWriter:
    """The one writer of an output. Not for several threads.

    Args:
        settings: The cluster.
        name: The producer's `transactional.id`, the same for every query that writes to this output.
        commits: The commit topic.
    """

    def __init__(self, settings: KafkaSettings, name: str, commits: str) -> None:
        self._settings = settings
        self._name = name
        self._commits = commits
        self._query = ""
        self._producer: Any = None
        self._newest: Published | None = None

    def open(self, query: str) -> None:
        """Take the output over, and for a query that has never written to it, claim it.

        Raises:
            ManifestMismatch: It is another query's.
            SinkUnavailable: The cluster does not answer.
        """
        self._query = query
        self._open_producer()
        if self._newest is None:
            self._write(Published(query, -1), [])

    def publish(self, version: int, messages: Sequence[Message]) -> bool:
        """Write a micro-batch, unless it is out already; visible to readers of committed messages on return.

        Returns:
            False when it was out already; what it said then stays.

        Raises:
            SinkConflict: Another writer took over, or a later micro-batch is out.
            SinkUnavailable: It was not written.
        """
        record = Published(self._query, version, len(messages), digest(messages))
        if self._producer is None:
            self._open_producer()
        known = self._newest
        if known is not None and known.version > version:
            raise SinkConflict(
                "the output is ahead of the checkpoint",
                where=self._where,
                why=f"micro-batch {known.version} is out, this is {version}: the checkpoint went back or is a copy",
                command="start with new output topics, or put the checkpoint back",
            )
        if known is not None and known.version == version:
            if record != known:
                log.warning(
                    "micro-batch %d is out with %d messages; it ran again and made %d, not all the same: they are"
                    " dropped, what readers have seen stays", version, known.messages, record.messages,
                )  # fmt: skip
            return False
        self._write(record, messages)
        return True

    def close(self) -> None:
        """Let the producer go; nothing is in flight between two publications."""
        self._producer = None

    @property
    def _where(self) -> str:
        return f"{self._settings.servers}/{self._commits}"

    def _write(self, record: Published, messages: Sequence[Message]) -> None:
        from confluent_kafka import KafkaError, KafkaException

        for last in (*[False] * (TRIES - 1), True):
            if self._producer is None:
                self._open_producer()
            if self._newest == record:  # the try before this one worked after all
                return
            try:
                self._transact(record, messages)
                self._newest = record
                return
            except KafkaException as error:
                self._producer = None
                if error.args[0].code() in (
                    KafkaError._FENCED,
                    KafkaError.PRODUCER_FENCED,
                    KafkaError.INVALID_PRODUCER_EPOCH,
                ):
                    raise SinkConflict(
                        "another writer has taken the output over",
                        where=self._where,
                        why=f"a newer start of this query, or a transaction longer than {TRANSACTION_TIMEOUT_S} s",
                        command="see that the query runs once; then start it again",
                    ) from None
                failure = unavailable(self._settings, self._commits, error)
                if last:
                    raise failure from None
                log.warning("micro-batch %d is written again: %s", record.version, failure)

    def _transact(self, record: Published, messages: Sequence[Message]) -> None:
        producer = self._producer
        producer.begin_transaction()
        for message in messages:
            send(producer, message.topic, message.value, message.key)
        send(producer, self._commits, encode(record), KEY, 0)
        producer.flush(TIMEOUT_S)  # all of it is on the brokers, and nobody sees it
        kill_point("during_publish", record.version)
        producer.commit_transaction(TIMEOUT_S)

    def _open_producer(self) -> None:
        """Fence and end what went before, then learn what is out."""
        from confluent_kafka import KafkaException, Producer

        producer = Producer(
            self._settings.for_client()
            | {
                "transactional.id": self._name,
                "transaction.timeout.ms": TRANSACTION_TIMEOUT_S * 1000,
                "linger.ms": 5,
                "compression.type": "lz4",
                "partitioner": "murmur2_random",  # as Java's clients: a key's partition is the same for all writers
                "log_level": 0,
            }
        )
        try:
            producer.init_transactions(TIMEOUT_S)
        except KafkaException as error:
            raise unavailable(self._settings, self._commits, error) from None
        self._newest = newest(self._settings, self._commits)
        if self._newest is not None and self._newest.query != self._query:
            raise ManifestMismatch(
                "the output topics belong to another query",
                where=self._where,
                why=f"query {self._newest.query} wrote them, this is {self._query}: their micro-batches would mix",
                command="choose other topics, or delete these and the commit topic",
            )
        self._producer = producer


def send(producer: Any, topic: str, value: bytes, key: bytes, partition: int = -1, **more: Any) -> None:
    """Hand a message to a producer, waiting while its queue is full."""
    while True:
        try:
            producer.produce(topic, value, key, partition, **more)
            break
        except BufferError:
            producer.poll(0.1)
    producer.poll(0)
