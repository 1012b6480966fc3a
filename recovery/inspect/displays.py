"""Listeners that show restores: a progress bar for a terminal, and metrics for Prometheus.

They are apart from `recovery.listener` because every worker of Spark imports that one: what draws is not for them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from backend.batch import SourcePartition
from backend.texts import one_line
from recovery.listener import Restoring


class ProgressListener:
    """Draw one progress bar per shard with rate and time left; a shard whose size is not known gets a moving bar.

    Args:
        console: Where to draw; standard error unless told.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            _CountColumn(),
            _RateColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
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
                str(restoring), total=restoring.records, note=one_line(restoring.why)
            )

    def batch(self, restoring: Restoring, end: Mapping[SourcePartition, int], records: int, length: int) -> None:
        """Move the bar."""
        with self._lock:
            self._progress.advance(self._tasks[restoring.shard], records)

    def suspended(self, restoring: Restoring, why: str) -> None:
        """Stop the bar where it is and say why."""
        self._finish(restoring, f"suspended: {one_line(why)}")

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
