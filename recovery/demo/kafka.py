"""The same story on Kafka: flights are produced to a real broker while the job runs, the changelog is a topic too.

The archive stays what the proof is computed from: the topic gets the archive's messages at the archive's offsets.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from recovery.demo.chapters import Demo, Failed
from recovery.demo.produce import create_topic, in_order, produce
from recovery.drill.flights import AIRPORTS, TOPIC

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.console import Console

    from backend.kafka_client.settings import KafkaSettings

HEAD_START = 0.4
"""Share of the messages that are there before the job starts; the others come while it runs."""
PER_SECOND = 20_000


class KafkaDemo(Demo):
    """Runs the demo in a directory and on a broker.

    Args:
        out: Emptied first.
        console: Where it is told.
        days: Of 2013; None for the whole year.
        offsets: Bound on the offsets per airport in a micro-batch.
        settings: The broker; it must not have the demo's topics yet.
    """

    def __init__(self, out: Path, console: Console, *, days: int | None, offsets: int, settings: KafkaSettings) -> None:
        super().__init__(out, console, days=days, offsets=offsets, servers=settings.servers)
        self._settings = settings
        self._producing: threading.Thread | None = None
        self._failure: Exception | None = None

    def prepare(self) -> pa.Table:
        """Write the archive, and produce the first part of it.

        Raises:
            Failed: The broker has the demo's topic already.
        """
        rows = in_order(super().prepare())
        first = int(rows.num_rows * HEAD_START)
        if not create_topic(self._settings, TOPIC, len(AIRPORTS)):
            raise Failed(f"the broker at {self._settings.servers} has a topic {TOPIC!r} already: delete it first")
        began = time.monotonic()
        produce(self._settings, TOPIC, rows.slice(0, first))
        self.say(
            f"topic: {first:,} flights produced in {time.monotonic() - began:.1f} s,"
            f" {rows.num_rows - first:,} more while the job runs"
        )
        self._producing = threading.Thread(
            target=self._produce, args=(rows.slice(first),), name="demo-producer", daemon=True
        )
        self._producing.start()
        return rows

    def restart(self, *, break_restore: bool = False) -> None:
        """Start the job again once everything is produced: it reads to the end of the topic."""
        if self._producing is not None:
            self._producing.join()
        if self._failure is not None:
            raise Failed(str(self._failure))
        super().restart(break_restore=break_restore)

    def _produce(self, rows: pa.Table) -> None:
        try:
            produce(self._settings, TOPIC, rows, per_second=PER_SECOND)
        except Exception as error:  # raised by `restart`, in the thread that waits
            self._failure = error
