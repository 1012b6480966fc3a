"""See that topics are still the ones that a query began with, and that no partition has lost its end since.

A topic that was deleted and made again has another id (KIP-516), and offsets that mean other messages. A partition
whose leader died may go on from a copy that was behind (an unclean election), or a broker come back with less than it
had: its end is cut off, and grows again with other messages. The epoch of its leader rises then; so where it has risen,
the broker is asked how far the log of the old epoch reaches (KIP-320: a client does that for a position that names its
epoch).

Spark logs offsets, not epochs. The epochs as of the last look are in `<checkpoint>/rewind/epochs.json` (format 1):
`{"format": 1, "epochs": {"<topic>": {"<partition>": 3}}}`: everything committed was written under these or older ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException

from backend.errors import SourceUnavailable, SourceWentBack
from backend.kafka_client.admin import admin_client, ends
from backend.kafka_client.reader import consumer, next_messages
from backend.kafka_client.refusals import REFUSALS, named
from backend.sources import TopicPartition

if TYPE_CHECKING:
    from backend.kafka_client.identity import TopicIdentity
    from backend.kafka_client.settings import KafkaSettings

WAIT_S = 1.0
VALIDATED_S = 60.0
"""How long a broker may take to say up to where an epoch reaches."""
SILENT = "Kafka does not say whether a partition lost its end"
ANEW = "start anew with another checkpoint: rewind reset <checkpoint> accepts what was counted of the lost messages"


class TopicWatch:
    """Looks at topics from the driver, with one client.

    Args:
        settings: The cluster.
        topics: Topics.
        known: Which topics they must be.

    Attributes:
        leader_epochs: Of each partition's leader, as of the last look; the caller keeps them.
    """

    def __init__(self, settings: KafkaSettings, topics: Sequence[str], known: Mapping[str, TopicIdentity]) -> None:
        self._settings, self.topics, self._known = settings, topics, known
        self._admin: Any = None
        self._seen: Iterable[TopicPartition] = ()
        self.leader_epochs: dict[TopicPartition, int] = {}

    def look(self, positions: Callable[[], Mapping[TopicPartition, int]], *, keep: bool = True) -> bool:
        """Look at all partitions: a question for the topics and one for their ends, from the second look on at once.

        Args:
            positions: Gives the next offset to read as of the last committed micro-batch; asked if a leader is new.
            keep: Keep the epochs that are found. Not while tasks read a micro-batch that is not committed: what it read
                was written under the epochs before, and the next look has to ask for its end.

        Returns:
            Whether `leader_epochs` changed.

        Raises:
            SourceWentBack: A topic is another one, or a partition has lost what was committed.
            SourceUnavailable: The cluster does not answer.
            TopicMissing: A topic does not exist.
            AccessRefused: The cluster refuses the credentials or their rights.
        """
        self._admin = self._admin or admin_client(self._settings)
        found = ends(
            self._settings, self.topics, self._admin, committed_only=False, known=self._known, expected=self._seen
        )
        self._seen = found.keys()
        leader_epochs = {
            key: end.leader_epoch
            for key, end in found.items()
            if end.leader_epoch is not None and end.leader_epoch >= 0
        }
        risen = {
            key: self.leader_epochs[key]
            for key, leader_epoch in leader_epochs.items()
            if self.leader_epochs.get(key, leader_epoch) != leader_epoch
        }
        if risen:
            following = positions()
            for key, leader_epoch in sorted(risen.items()):
                if following.get(key, 0) > 0:
                    check_end(self._settings, key, following[key], leader_epoch)
        if not keep:
            return False
        changed = any(self.leader_epochs.get(key) != leader_epoch for key, leader_epoch in leader_epochs.items())
        self.leader_epochs |= leader_epochs
        return changed

    def close(self) -> None:
        """Let the client go; the next look makes a new one."""
        self._admin = None


def check_end(settings: KafkaSettings, key: TopicPartition, position: int, leader_epoch: int) -> None:
    """Check that a partition still holds what was written below a position under an epoch or older ones.

    Args:
        settings: The cluster.
        key: Topic and partition.
        position: The next offset to read.
        leader_epoch: A leader's epoch under which the log reached the position.

    Raises:
        SourceWentBack: Its end was cut off below the position.
        SourceUnavailable: Nobody says.
        AccessRefused: The cluster refuses the credentials or their rights.
    """
    # a position may be so old that brokers read it from remote storage: those before 3.8 take the wait for their limit
    more = {"auto_offset_reset": "error", "fetch_message_max_bytes": 1024, "fetch_wait_max_ms": 500}
    asking = consumer(settings, "rewind-reader", committed_only=True, **more)
    try:
        asking.assign([confluent_kafka.TopicPartition(*key, position, leader_epoch=leader_epoch)])
        deadline = time.monotonic() + VALIDATED_S
        while time.monotonic() < deadline:
            message = next(iter(next_messages(asking, 1, WAIT_S)), None)
            error = message.error() if message is not None else None
            if message is not None and (error is None or error.code() == KafkaError._PARTITION_EOF):
                return
            if error is None or error.code() not in (KafkaError._AUTO_OFFSET_RESET, KafkaError._LOG_TRUNCATION):
                if error is not None and (error.fatal() or error.code() in REFUSALS):
                    raise KafkaException(error)
                continue
            if "truncation" not in error.str():
                return  # retention has passed the position by: told where it is read
            raise SourceWentBack(
                "a partition has lost messages at its end that are counted already",
                where=f"{key[0]}-{key[1]}",
                why=f"offset {position} comes next, and {error.str()}",
                command=ANEW,
            )
    except KafkaException as error:
        raise named(
            SourceUnavailable,
            SILENT,
            where=f"{settings.servers}, {key[0]}-{key[1]}",
            why=settings.redact(error),
            error=error,
            command="check the brokers",
        ) from None
    finally:
        asking.close()
    raise SourceUnavailable(
        SILENT,
        where=f"{key[0]}-{key[1]}",
        why=f"its leader is new; no answer for {VALIDATED_S:.0f} s about offset {position}",
        command="check the brokers",
    )
