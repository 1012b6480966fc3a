"""Restores that are under way: how far each shard is, how fast, and how long it will take."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from backend.batch import SourcePartition
from recovery.listener import Restoring
from recovery.restore.tries import FETCHES


@dataclass(frozen=True, slots=True)
class Amount:
    """How far the restore of a shard is.

    Attributes:
        records: Messages replayed so far.
        of: Messages to replay; None where that is not known beforehand.
        seconds: Since it began.
    """

    records: int
    of: int | None
    seconds: float

    @property
    def rate(self) -> float:
        """Messages a second; 0.0 before the first ones."""
        return self.records / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Seconds until all are replayed, at this rate; None while that cannot be said. Building comes behind it."""
        if self.of is None or not self.rate:
            return None
        return max(0, self.of - self.records) / self.rate

    def __str__(self) -> str:
        whole = f" of {self.of:,}" if self.of is not None else ""
        left = f", {self.seconds_left:.0f} s to go" if self.seconds_left is not None else ""
        return f"{self.records:,}{whole} messages{left}"


class UnderWay:
    """A restore listener that remembers what runs; it may be asked from any thread.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._begun: dict[int, tuple[float, Amount]] = {}

    @property
    def shards(self) -> dict[int, Amount]:
        """The shards whose restore is under way."""
        now = self._clock()
        with self._lock:
            return {shard: replace(one, seconds=now - begun) for shard, (begun, one) in sorted(self._begun.items())}

    def start(self, restoring: Restoring) -> None:
        """Begin to count; a task that takes what lies ready restores nothing."""
        if restoring.how not in FETCHES:
            with self._lock:
                self._begun[restoring.shard] = self._clock(), Amount(0, restoring.records, 0.0)

    def batch(self, restoring: Restoring, end: Mapping[SourcePartition, int], records: int, length: int) -> None:
        """Count on."""
        with self._lock:
            if restoring.shard in self._begun:
                begun, one = self._begun[restoring.shard]
                self._begun[restoring.shard] = begun, replace(one, records=one.records + records)

    def suspended(self, restoring: Restoring, why: str) -> None:
        """Forget it."""
        with self._lock:
            self._begun.pop(restoring.shard, None)

    def end(self, restoring: Restoring, records: int, length: int, seconds: float) -> None:
        """Forget it."""
        self.suspended(restoring, "")
