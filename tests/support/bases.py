"""Changelogs whose bases come after a few deltas."""

from __future__ import annotations

from typing import TypeVar

from recovery.changelog import FileChangelog
from recovery.changelog.kafka.log import KafkaChangelog

Log = TypeVar("Log", FileChangelog, KafkaChangelog)


def based(log: Log, max_deltas: int = 3, min_base_bytes: int | None = None) -> Log:
    """Let a changelog want its bases earlier than the product does; give it."""
    log.max_deltas = max_deltas
    if min_base_bytes is not None:
        log.min_base_bytes = min_base_bytes
    return log
