"""Read a partition between two offsets, in bulk, and stop exactly there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from backend.errors import ChangelogDamaged, ChangelogUnavailable
from backend.kafka_client.reader import consumer, next_messages
from backend.kafka_client.refusals import REFUSALS, in_pieces
from backend.kafka_client.settling import while_it_settles
from recovery.changelog.kafka.topic import TIMEOUT_S, unavailable

if TYPE_CHECKING:
    from backend.kafka_client.settings import KafkaSettings

Take = Callable[[bytes | None, bytes | None, int], None]
"""Takes key, value and offset of one message."""

BULK = 64
"""Messages per call of the client: at their largest, 48 MiB."""
EMPTY_TRIES = 3
WAIT_S = 0.5
STALLED_S = 60.0
AGAIN_S = 0.5
"""Before a reader that has lost its place in a damaged batch is given it again."""


class PartitionReader:
    """One consumer without a group: it commits nothing and disturbs nobody.

    Args:
        settings: The cluster.
        topic: The topic.
    """

    def __init__(self, settings: KafkaSettings, topic: str) -> None:
        self._settings = settings
        self._topic = topic
        self._consumer: Any = consumer(
            settings,
            "rewind-changelog",
            committed_only=False,
            auto_offset_reset="error",
            queued_max_messages_kbytes=64 * 1024,
            check_crcs=True,
        )

    def watermarks(self, shard: int) -> tuple[int, int]:
        """Ask for the first offset and the one after the last.

        The client asks for each on its own, and where only the first is refused (its leader is new, say) it gives the
        second for both: what seems to be empty is asked for again.

        Raises:
            ChangelogUnavailable: No answer, or there is no such partition.
        """

        def ask(timeout_s: float) -> Any:
            place = TopicPartition(self._topic, shard)
            return self._consumer.get_watermark_offsets(place, timeout=timeout_s, cached=False)

        try:
            for _ in range(EMPTY_TRIES):
                low, high = while_it_settles(lambda: in_pieces(self._consumer, ask, TIMEOUT_S))
                if low < high or not high:
                    break
        except KafkaException as error:
            raise unavailable(self._settings, self._topic, error) from None
        return int(low), int(high)

    def read(self, shard: int, start: int, end: int, take: Take) -> None:
        """Hand every message of `[start, end)` to `take`, in order.

        The end is known: where control records are the last ones before it, the client's "end of partition" tells,
        and no empty poll is waited for.

        Raises:
            ChangelogUnavailable: Nothing came for a minute, or the client gave up.
            ChangelogDamaged: Nothing came for a minute but that a batch does not match its checksum.
        """
        if start >= end:
            return
        try:
            self._consumer.assign([TopicPartition(self._topic, shard, start)])
            self._read(shard, start, end, take)
        except KafkaException as error:
            raise unavailable(self._settings, self._topic, error) from None
        finally:
            self._consumer.unassign()

    def close(self) -> None:
        """Close the consumer."""
        self._consumer.close()

    def _read(self, shard: int, following: int, end: int, take: Take) -> None:
        stalled, why, torn = time.monotonic() + STALLED_S, "", False
        while True:
            good = lost = False
            for message in next_messages(self._consumer, BULK, WAIT_S):
                error = message.error()
                if error is None:
                    good, why, torn = True, "", False
                    if message.offset() >= end:
                        return
                    take(message.key(), message.value(), message.offset())
                    following = message.offset() + 1
                    if following == end:
                        return
                elif message.partition() not in (None, shard):
                    continue  # of what the client read before: errors outlive an assignment
                elif error.code() == KafkaError._PARTITION_EOF:
                    if message.offset() >= end:
                        return
                else:
                    why, torn = self._judged(error, why, torn)
                    lost |= error.code() == KafkaError._AUTO_OFFSET_RESET
            if good:
                stalled = time.monotonic() + STALLED_S
            elif time.monotonic() > stalled:
                raise (ChangelogDamaged if torn else ChangelogUnavailable)(
                    f"nothing came from the changelog topic for {STALLED_S:.0f} s",
                    where=f"{self._settings.servers}/{self._topic}",
                    why=why,
                    command="" if torn else "see that the brokers run",
                )
            if lost:
                time.sleep(AGAIN_S)
                self._consumer.assign([TopicPartition(self._topic, shard, following)])

    def _judged(self, error: Any, why: str, torn: bool) -> tuple[str, bool]:
        """Judge an error; return why no message comes, and whether that is a damaged batch: it comes again and again.

        Args:
            error: The client's.
            why: What was said since the last message.
            torn: Whether that was damage: the client may take bytes of such a batch for its next offset.
        """
        lost = error.code() == KafkaError._AUTO_OFFSET_RESET and not torn
        if error.fatal() or lost or error.code() in REFUSALS:
            raise KafkaException(error)
        return (why, True) if torn else (error.str(), error.code() == KafkaError._BAD_MSG)
