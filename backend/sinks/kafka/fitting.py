"""Rows made to fit their topic on their way to it: what was cut is kept elsewhere if asked for, and told."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import msgspec

from backend.sinks.kafka.delivery import Delivery, Publication
from backend.sinks.kafka.rows import Message
from backend.sinks.kafka.sizes import digest_of, fit
from backend.sinks.kafka.topics import KAFKA_LIMIT
from recovery.files import open_files

log = logging.getLogger("rewind.sink")

_NAMED = 5

Cut = tuple[int, list[str]]
"""How many rows were too large, and which were the first."""


def send_fitted(delivery: Delivery, messages: Iterable[Message], to: Publication) -> Cut:
    """Send messages, cut to what their topics take; the whole value of one that is cut is durable before.

    Args:
        delivery: What sends them.
        messages: Whole rows.
        to: What each topic takes, and where whole values go, as `<digest>.json`.

    Returns:
        What was too large.

    Raises:
        KafkaException: As `Delivery.send` does.
        StorageFailed: A whole value cannot be kept.
    """
    files = open_files(to.overflow) if to.overflow is not None else None
    number, first = 0, list[str]()
    for message in messages:
        fitted = fit(message, to.limits.get(message.topic, KAFKA_LIMIT))
        if fitted is not message:
            if files is not None:
                files.write(f"{digest_of(message.value)}.json", [message.value])
            number += 1
            if len(first) < _NAMED:
                first.append(f"{msgspec.json.decode(fitted.value)['id']} for {message.topic}")
        delivery.send(fitted.topic, fitted.value, fitted.key)
    return number, first


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
