"""Append records to a partition: an idempotent producer per shard and process, one transaction per record.

Spark's pool gives a shard to one worker process and then to another, in each micro-batch anew. Under one name each
would end the other's producer, and a new one takes longer than what it is for. So a process takes one of `NAMES` names
by chance, and another one when somebody has taken the same.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException

from backend.kafka_client.refusals import hearing, in_pieces
from backend.kafka_client.settling import while_it_settles
from backend.kafka_client.writer import IDEMPOTENT, cause_of, hand_over, is_fenced
from recovery.changelog.chunks import CHUNK_BYTES, ChunkKey, cut
from recovery.changelog.kafka.topic import TIMEOUT_S, unavailable
from recovery.changelog.protocol import ITSELF, Growth
from recovery.changelog.records import Kind

if TYPE_CHECKING:
    from backend.errors import RewindError
    from backend.kafka_client.settings import KafkaSettings
    from recovery.commit.pointer import Commit

MAX_PRODUCERS = 16
"""Shards whose producers a process keeps open; one more closes the one that was used longest ago."""
TRANSACTION_TIMEOUT_S = 300
NAMES = 1024
"""Of producers of a shard: a broker remembers each for a week, by default."""
TRIES = 3


class PartitionWriter:
    """Producers of one process, by shard.

    Args:
        settings: The cluster.
        topic: The topic.
        owner: The query that writes: in every message and in the producers' names; "" for nobody.
        find: Gives the offset of an append's first piece, from the shard, the append id and the number of pieces.
    """

    def __init__(
        self, settings: KafkaSettings, topic: str, owner: str = "", *, find: Callable[[int, bytes, int], int]
    ) -> None:
        self._find = find
        self._settings = settings
        self._topic = topic
        self._owner = owner
        self._name = f"{topic}-{owner}" if owner else topic
        self._producers: OrderedDict[int, Any] = OrderedDict()
        self._number = _chosen(0)
        self._bases: dict[int, str] = {}
        """Names of bases' producers where the one of all processes, which ends what a dead one left open, is taken."""

    def append(self, shard: int, commit: Commit, growth: Growth, data: bytes) -> int:
        """Append a delta with the shard's producer; with a new one, of another name, when somebody has taken its own.

        That is no conflict to settle here: the lineage decides which record counts.

        Args:
            shard: The shard, and the partition.
            commit: What is appended.
            growth: Of the log, for readers.
            data: The record.

        Returns:
            The offset of the first piece.

        Raises:
            ChangelogUnavailable: It was not acknowledged.
        """

        for tries_left in reversed(range(TRIES)):
            producer = self._producers.pop(shard, None) or self._open_producer(f"{self._name}-{shard}-{self._number}")
            try:
                first, _ = self._transact(producer, shard, Kind.DELTA, commit, growth, [data])
                break
            except _Fenced as error:
                self._number = _chosen(self._number)
                if not tries_left:
                    raise self._taken(error) from None
        self._producers[shard] = producer
        while len(self._producers) > MAX_PRODUCERS:
            self._producers.popitem(last=False)
        return first

    def append_alone(self, shard: int, commit: Commit, stream: Iterable[bytes]) -> tuple[int, int]:
        """Append a base with a producer of its own name, so that it does not fence the shard's.

        Returns:
            The offset of the first piece, and the base's bytes.
        """
        producer = self._open_producer(f"{self._name}-{shard}-{self._bases.get(shard, 'base')}")
        try:
            appended = self._transact(producer, shard, Kind.BASE, commit, Growth(begins=ITSELF), stream)
        except _Fenced as error:
            self._bases[shard] = f"base-{_chosen(0)}"
            raise self._taken(error) from None
        self._bases.pop(shard, None)
        return appended

    def close(self) -> None:
        """Let the producers go; they have nothing in flight between two appends."""
        self._producers.clear()

    def _taken(self, error: _Fenced) -> RewindError:
        why = f"another producer of its name was opened, or the client cannot go on: {error}"
        return unavailable(self._settings, self._topic, RuntimeError(why))

    def _transact(
        self, producer: Any, shard: int, kind: Kind, commit: Commit, growth: Growth, stream: Iterable[bytes]
    ) -> tuple[int, int]:
        """Append one record in one transaction; give the offset of its first piece, and its bytes.

        Where the broker answers a request that was repeated with "duplicate", the client reports what it had written
        as delivered, without an offset: it is looked for.

        Raises:
            _Fenced: Another producer of this name was opened since, or the client cannot go on; nothing was appended.
            ChangelogUnavailable: Anything else; the producer must not be used again.
        """
        firsts: list[int | None] = []
        failures: list[Any] = []

        def delivered(error: Any, message: Any) -> None:
            if error is not None:
                failures.append(error)
            elif not firsts:
                firsts.append(message.offset())

        append_id = os.urandom(8)
        number = length = 0
        try:
            producer.begin_transaction()
            for number, (piece, last) in enumerate(cut(stream)):
                key = ChunkKey(kind, commit, append_id, number, last, growth, self._owner).encode()
                hand_over(producer, self._topic, value=piece, key=key, partition=shard, on_delivery=delivered)
                length += len(piece)
            producer.commit_transaction(TIMEOUT_S)
            if failures or not firsts:
                raise KafkaException(failures[0] if failures else KafkaError(KafkaError._MSG_TIMED_OUT))
        except KafkaException as error:
            if is_fenced(error):
                raise _Fenced(error.args[0]) from None
            why = KafkaException(cause_of(producer, error.args[0]))
            _abort(producer)
            raise unavailable(self._settings, self._topic, why) from None
        except BaseException:  # the rows of a base were refused
            _abort(producer)
            raise
        first = firsts[0]
        return self._find(shard, append_id, number + 1) if first is None else first, length

    def _open_producer(self, name: str) -> Any:
        config = (
            self._settings.for_client()
            | IDEMPOTENT
            | {
                "transactional.id": name,
                "linger.ms": 0,
                "transaction.timeout.ms": TRANSACTION_TIMEOUT_S * 1000,
                "queue.buffering.max.kbytes": 64 * 1024,
                "batch.size": CHUNK_BYTES,  # two pieces in one batch may be more than the topic takes
                # a broker that answered by its bootstrap address is connected to by its name after this time
                "reconnect.backoff.ms": 1,
                "log_level": 0,
            }
        )
        producer = hearing(confluent_kafka.Producer, config)
        try:
            # waits for a connection: without one, the client asks for its coordinator again half a second later.
            # The first answer may come from the bootstrap address, while the broker by its name is not connected yet.
            connect = partial(producer.list_topics, self._topic)
            for _ in range(2):
                while_it_settles(lambda: in_pieces(producer, connect, TIMEOUT_S))
            while_it_settles(lambda: in_pieces(producer, producer.init_transactions, TIMEOUT_S))
        except KafkaException as error:
            raise unavailable(self._settings, self._topic, error) from None
        return producer


def _chosen(other: int) -> int:
    """Return another number, by chance: not what a process forked from the same one returns as well."""
    return (other + 1 + int.from_bytes(os.urandom(4)) % (NAMES - 1)) % NAMES


class _Fenced(Exception):
    """Another producer with the same name was opened since, or the client says that it cannot go on."""


def _abort(producer: Any) -> None:
    """Abort what is open; where that fails too, the broker does it when the name is opened again, or after a while."""
    with suppress(KafkaException):
        producer.abort_transaction(TIMEOUT_S)
