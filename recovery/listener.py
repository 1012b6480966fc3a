"""Who is told of restores: one protocol, and a listener for a log; `recovery.inspect.displays` has others.

Nothing in an event is a sentinel: what is not known is None, and shown as such. Ends of offset ranges are exclusive.
A listener that raises does not stop a restore: `Listeners` logs the failure and goes on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from backend.batch import SourcePartition
from backend.texts import one_line, source_partition

log = logging.getLogger("rewind.restore")
_thread = threading.local()


@dataclass(frozen=True, slots=True)
class Restoring:
    """A restore that is under way.

    Attributes:
        shard: The shard.
        commit: Name of the commit that it is restored to.
        why: What was found instead of usable state: "no local state", "checksum mismatch in ...", "other lineage".
        how: `snapshot` and `steps` (in a task, without a restart: a whole copy, or staged files that an older local
            copy lacks), `changelog`, `replay`, or `catch-up` (replay of what an older local copy lacks).
        records: Rows or messages to restore, None when that is not known beforehand.
        ranges: Offsets to replay, half-open; empty when none are.
        topics: Stream -> topic, as far as they are known.
    """

    shard: int
    commit: str
    why: str
    how: str
    records: int | None = None
    ranges: Mapping[SourcePartition, tuple[int, int]] = field(default_factory=dict)
    topics: Mapping[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"shard {self.shard} by {self.how}"


class RestoreListener(Protocol):
    """Is told of each shard's restore: `start`, any number of `batch`, then `end` or `suspended`. From any thread."""

    def start(self, restoring: Restoring) -> None:
        """A restore begins."""

    def batch(self, restoring: Restoring, end: Mapping[SourcePartition, int], records: int, length: int) -> None:
        """Some more is restored.

        Args:
            restoring: The restore.
            end: Per source partition the offset that comes next (exclusive end of this batch); empty where pieces
                come in no order of offsets, as those of a replay in parallel do.
            records: Rows or messages in this batch.
            length: Bytes of their keys and values.
        """

    def suspended(self, restoring: Restoring, why: str) -> None:
        """The restore ended without success; another one may follow."""

    def end(self, restoring: Restoring, records: int, length: int, seconds: float) -> None:
        """The restore is complete and proven; totals."""


class Listeners:
    """Several listeners as one: a listener that raises is logged, neither the others nor the restore suffer from it."""

    def __init__(self, listeners: Iterable[RestoreListener]) -> None:
        self._listeners = tuple(listeners)

    def start(self, restoring: Restoring) -> None:
        """Tell all."""
        self._tell(lambda listener: listener.start(restoring))

    def batch(self, restoring: Restoring, end: Mapping[SourcePartition, int], records: int, length: int) -> None:
        """Tell all."""
        self._tell(lambda listener: listener.batch(restoring, end, records, length))

    def suspended(self, restoring: Restoring, why: str) -> None:
        """Tell all."""
        self._tell(lambda listener: listener.suspended(restoring, why))

    def end(self, restoring: Restoring, records: int, length: int, seconds: float) -> None:
        """Tell all."""
        self._tell(lambda listener: listener.end(restoring, records, length, seconds))

    def _tell(self, call: Callable[[RestoreListener], None]) -> None:
        outer, _thread.telling = is_telling(), True
        try:
            for listener in self._listeners:
                try:
                    call(listener)
                except Exception:
                    log.exception("a restore listener failed: %r", listener)
        finally:
            _thread.telling = outer


def is_telling() -> bool:
    """Tell whether the calling thread is inside a listener: what restores waits for it to return."""
    return getattr(_thread, "telling", False)


class LoggingListener:
    """Log starts, ends and suspensions, and batches at debug level.

    Args:
        logger: Where to; `rewind.restore` unless told.
    """

    def __init__(self, logger: logging.Logger = log) -> None:
        self._log = logger

    def start(self, restoring: Restoring) -> None:
        """Log why, how, and how much."""
        amount = f", {restoring.records:,} records" if restoring.records is not None else ""
        offsets = "".join(
            f", {source_partition(*key, restoring.topics)}: offsets {start} to {end - 1}"
            for key, (start, end) in sorted(restoring.ranges.items())
        )
        self._log.info(
            "restoring %s to %s: %s%s%s", restoring, restoring.commit, one_line(restoring.why), amount, offsets
        )

    def batch(self, restoring: Restoring, end: Mapping[SourcePartition, int], records: int, length: int) -> None:
        """Log what came."""
        self._log.debug("restoring %s: %d records, %d bytes, next %s", restoring, records, length, dict(end))

    def suspended(self, restoring: Restoring, why: str) -> None:
        """Log why."""
        self._log.warning("restore of %s suspended: %s", restoring, one_line(why))

    def end(self, restoring: Restoring, records: int, length: int, seconds: float) -> None:
        """Log the totals and the rate."""
        rate = f" ({records / seconds:,.0f} per second)" if seconds > 0 else ""
        self._log.info(
            "restored %s: %s records, %s bytes in %.3f s%s", restoring, f"{records:,}", f"{length:,}", seconds, rate
        )
