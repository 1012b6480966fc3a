"""A restore listener that keeps how each try ended."""

from __future__ import annotations

from collections.abc import Mapping

from backend.batch import SourcePartition
from recovery.listener import Restoring
from recovery.restore.tries import Try


class Heard:
    """Keeps tries in the order in which they ended."""

    def __init__(self) -> None:
        self.tries: list[Try] = []

    def start(self, restoring: Restoring) -> None:
        """Wait for how it ends."""

    def batch(self, restoring: Restoring, end: Mapping[SourcePartition, int], records: int, length: int) -> None:
        """Leave the details out."""

    def suspended(self, restoring: Restoring, why: str) -> None:
        """Keep a try that failed."""
        self.tries.append(Try(restoring.shard, restoring.commit, restoring.why, restoring.how, failed=why))

    def end(self, restoring: Restoring, records: int, length: int, seconds: float) -> None:
        """Keep a try that worked."""
        self.tries.append(Try(restoring.shard, restoring.commit, restoring.why, restoring.how, "", length, seconds))
