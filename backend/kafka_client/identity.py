"""Which topic it is, whatever its name. Nothing here needs Kafka's client, which may not be installed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from backend.errors import SourceWentBack


@dataclass(frozen=True, slots=True)
class TopicIdentity:
    """Which topic it is, whatever its name.

    Attributes:
        id: Kafka's topic id (KIP-516); another one when a topic was deleted and made again.
        partitions: How many it has.
    """

    id: str
    partitions: int


def compare(before: Mapping[str, TopicIdentity], now: Mapping[str, TopicIdentity]) -> list[str]:
    """Compare identities, as of the checkpoint and now; give what there is to announce, one sentence each.

    Raises:
        SourceWentBack: A topic was deleted and made again: its offsets mean other messages.

    >>> compare({"t": TopicIdentity("a", 1)}, {"t": TopicIdentity("a", 3)})
    ['topic t has 3 partitions, it had 1: the new ones are read from their beginning']
    """
    notes: list[str] = []
    for topic, was in before.items():
        found = now.get(topic)
        if found is None:
            continue
        if found.id != was.id or found.partitions < was.partitions:
            raise SourceWentBack(
                "a topic was deleted and made again",
                where=topic,
                why=f"its id is {found.id}, the checkpoint was made with {was.id}",
                command="start anew with another checkpoint",
            )
        if found.partitions > was.partitions:
            notes.append(
                f"topic {topic} has {found.partitions} partitions, it had {was.partitions}: "
                "the new ones are read from their beginning"
            )
    return notes
