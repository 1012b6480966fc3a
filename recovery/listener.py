"""Who is told of restores: one protocol, and ready-made listeners for a log, a terminal, and Prometheus.

Nothing in an event is a sentinel: what is not known is None, and shown as such. Ends of offset ranges are exclusive.
A listener that raises does not stop a restore: `Listeners` logs the failure and goes on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from backend.batch import SourcePartition

log = logging.getLogger("rewind.restore")


@dataclass(frozen=True, slots=True)
class Restoring:
    """A restore that is under way.

    Attributes:
        shard: The shard.
        commit: Name of the commit that it is restored to.
        why: What was found instead of usable state: "no local state", "checksum mismatch in ...", "other lineage".
        how: `package` and `steps` (in a task, without a restart: a whole copy, or staged files that an older local copy
            lacks), `changelog`, `replay`, or `catch-up` (replay of what an older local copy lacks).
        records: Rows or messages to restore, None when that is not known beforehand.
        ranges: Offsets to replay, half-open; empty when none are.
    """

    shard: int
    commit: str
    why: str
    how: str
    records: int | None = None
    ranges: Mapping[SourcePartition, tuple[int, int]] = field(default_factory=dict)

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
        for listener in self._listeners:
            try:
                call(listener)
            except Exception:
                log.exception("a restore listener failed: %r", listener)


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
        offsets = "".join(f", {_offsets(key, span)}" for key, span in sorted(restoring.ranges.items()))
        self._log.info("restoring %s to %s: %s%s%s", restoring, restoring.commit, restoring.why, amount, offsets)

    def batch(self, restoring: Restoring, end: Mapping[SourcePartition, int], records: int, length: int) -> None:
        """Log what came."""
        self._log.debug("restoring %s: %d records, %d bytes, next %s", restoring, records, length, dict(end))

    def suspended(self, restoring: Restoring, why: str) -> None:
        """Log why."""
        self._log.warning("restore of %s suspended: %s", restoring, why)

    def end(self, restoring: Restoring, records: int, length: int, seconds: float) -> None:
        """Log the totals and the rate."""
        rate = f" ({records / seconds:,.0f} per second)" if seconds > 0 else ""
        self._log.info(
            "restored %s: %s records, %s bytes in %.3f s%s", restoring, f"{records:,}", f"{length:,}", seconds, rate
        )


class ProgressListener:
    """Draw one progress bar per shard with rate and time left; a shard whose size is not known gets a moving bar.

    Args:
        console: Where to draw; standard error unless told.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            _CountColumn(),
            _RateColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console or Console(stderr=True),
        )
        self._tasks: dict[int, TaskID] = {}
        self._running = 0
        self._lock = threading.Lock()

    def start(self, restoring: Restoring) -> None:
        """Add a bar."""
        with self._lock:
            if self._running == 0:
                self._progress.start()
            self._running += 1
            old = self._tasks.pop(restoring.shard, None)
            if old is not None:
                self._progress.remove_task(old)
            self._tasks[restoring.shard] = self._progress.add_task(
                str(restoring), total=restoring.records, note=restoring.why
            )

    def batch(self, restoring: Restoring, end: Mapping[SourcePartition, int], records: int, length: int) -> None:
        """Move the bar."""
        with self._lock:
            self._progress.advance(self._tasks[restoring.shard], records)

    def suspended(self, restoring: Restoring, why: str) -> None:
        """Stop the bar where it is and say why."""
        self._finish(restoring, f"suspended: {why}")

    def end(self, restoring: Restoring, records: int, length: int, seconds: float) -> None:
        """Fill the bar."""
        with self._lock:
            self._progress.update(self._tasks[restoring.shard], completed=records, total=records)
        self._finish(restoring, f"done in {seconds:.2f} s")

    def _finish(self, restoring: Restoring, note: str) -> None:
        with self._lock:
            task = self._tasks[restoring.shard]
            self._progress.update(task, note=note)
            self._progress.stop_task(task)
            self._progress.refresh()
            self._running -= 1
            if self._running == 0:
                self._progress.stop()


class PrometheusListener:
    """Count restores for Prometheus; labels are the shard and how it was restored.

    Args:
        registry: Where the metrics are registered; the process's own unless told.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        labels = ["shard", "how"]

        def counter(name: str, text: str) -> Counter:
            return Counter(f"rewind_restore_{name}", text, labels, registry=registry)

        self._started = counter("started", "Restores begun")
        self._ended = counter("completed", "Restores complete and proven")
        self._suspended = counter("suspended", "Restores that ended without success")
        self._records = counter("records", "Rows and messages restored")
        self._bytes = counter("bytes", "Bytes of keys and values restored")
        self._seconds = counter("seconds", "Seconds spent in complete restores")
        self._running = Gauge("rewind_restore_running", "Restores under way", labels, registry=registry)

    def start(self, restoring: Restoring) -> None:
        """Count a start."""
        self._started.labels(*_labels(restoring)).inc()
        self._running.labels(*_labels(restoring)).inc()

    def batch(self, restoring: Restoring, end: Mapping[SourcePartition, int], records: int, length: int) -> None:
        """Count records and bytes."""
        self._records.labels(*_labels(restoring)).inc(records)
        self._bytes.labels(*_labels(restoring)).inc(length)

    def suspended(self, restoring: Restoring, why: str) -> None:
        """Count a suspension."""
        self._suspended.labels(*_labels(restoring)).inc()
        self._running.labels(*_labels(restoring)).dec()

    def end(self, restoring: Restoring, records: int, length: int, seconds: float) -> None:
        """Count a completed restore and its seconds."""
        self._ended.labels(*_labels(restoring)).inc()
        self._seconds.labels(*_labels(restoring)).inc(seconds)
        self._running.labels(*_labels(restoring)).dec()


class _CountColumn(ProgressColumn):
    """Records restored, of how many where that is known."""

    def render(self, task: Task) -> Text:
        of = f"/{int(task.total):,}" if task.total is not None else ""
        return Text(f"{int(task.completed):,}{of}")


class _RateColumn(ProgressColumn):
    """Records per second; nothing before there is a rate."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f}/s" if speed is not None else "")


def _labels(restoring: Restoring) -> tuple[str, str]:
    return str(restoring.shard), restoring.how


def _offsets(key: SourcePartition, span: tuple[int, int]) -> str:
    return f"stream {key[0]} partition {key[1]}: offsets {span[0]} to {span[1] - 1}"
