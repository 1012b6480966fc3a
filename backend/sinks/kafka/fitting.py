"""Rows made to fit their topic on their way to it: what was cut is kept elsewhere if asked for, and told."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import msgspec

from backend.sinks.kafka.rows import Message
from backend.sinks.kafka.sizes import digest_of, fit
from backend.sinks.kafka.topics import KAFKA_LIMIT
from recovery.files import open_files

log = logging.getLogger("rewind.sink")

_NAMED = 5

Cut = tuple[int, list[str]]
"""How many rows were too large, and which were the first."""


class Fitting:
    """Fits messages to their topics.

    Args:
        limits: Topic -> bytes that it takes.
        overflow: Directory or URI for whole values, as `<digest>.json`; None keeps none.

    Attributes:
        number: How many rows were too large.
        first: The first of them, with their topic.
    """

    def __init__(self, limits: Mapping[str, int], overflow: str | None) -> None:
        self._limits = limits
        self._files = open_files(overflow) if overflow is not None else None
        self.number = 0
        self.first: list[str] = []

    def fit(self, message: Message) -> Message:
        """Return a message that its topic takes; where it is another one, the whole value is durable before.

        Raises:
            StorageFailed: It cannot be kept.
        """
        fitted = fit(message, self._limits.get(message.topic, KAFKA_LIMIT))
        if fitted is not message:
            if self._files is not None:
                self._files.write(f"{digest_of(message.value)}.json", [message.value])
            self.number += 1
            if len(self.first) < _NAMED:
                self.first.append(f"{msgspec.json.decode(fitted.value)['id']} for {message.topic}")
        return fitted

    @property
    def cut(self) -> Cut:
        """What was too large."""
        return self.number, self.first


def tell(version: int, cuts: Iterable[Cut]) -> None:
    """Log which rows of a micro-batch were too large for their topics."""
    total, named = 0, list[str]()
    for number, first in cuts:
        total += number
        named += first
    if total:
        log.warning(
            "micro-batch %d: %d rows are larger than their topic's max.message.bytes; in their place go rows with the"
            " field too_large and without the columns that do not fit: %s%s",
            version, total, ", ".join(named[:_NAMED]), ", ..." if total > _NAMED else "",
        )  # fmt: skip
