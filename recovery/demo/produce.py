"""Produce an archive's messages to a topic: to the same partitions, in the same order, so at the same offsets."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from confluent_kafka import Producer

from backend.errors import SourceUnavailable
from backend.kafka_client.writer import IDEMPOTENT

if TYPE_CHECKING:
    from backend.kafka_client.settings import KafkaSettings

TIMEOUT_S = 60.0
_CHUNK_ROWS = 10_000


def in_order(rows: pa.Table) -> pa.Table:
    """Sort an archive's rows as they happened; the order within each partition stays that of the offsets."""
    return rows.sort_by([("timestamp", "ascending"), ("partition", "ascending"), ("offset", "ascending")])


def produce(settings: KafkaSettings, topic: str, rows: pa.Table, *, per_second: int | None = None) -> None:
    """Produce rows of `partition, key, value, timestamp` in order, and wait until all are acknowledged.

    Args:
        settings: The broker.
        topic: An existing topic with enough partitions.
        rows: As `in_order` gives them, or a slice of it.
        per_second: Bound on the pace.

    Raises:
        SourceUnavailable: Not everything was acknowledged.
    """
    config = {"linger.ms": 20, "compression.type": "lz4"}
    producer = Producer(settings.for_client() | IDEMPOTENT | config)
    failures: list[str] = []

    def delivered(error: object, message: Any) -> None:
        if error is not None:
            failures.append(str(error))

    began, sent = time.monotonic(), 0
    size = min(_CHUNK_ROWS, per_second or _CHUNK_ROWS)
    for start in range(0, rows.num_rows, size):
        chunk = rows.slice(start, size)
        times = chunk["timestamp"].cast(pa.timestamp("ms", tz="UTC")).cast(pa.int64()).to_pylist()
        columns = [chunk[name].to_pylist() for name in ("partition", "key", "value")]
        for partition, key, value, time_ms in zip(*columns, times, strict=True):
            while True:
                try:
                    producer.produce(topic, value, key, partition, timestamp=time_ms, on_delivery=delivered)
                    break
                except BufferError:  # the client's queue is full: let it drain
                    producer.poll(0.1)
        producer.poll(0)
        sent += chunk.num_rows
        if per_second is not None:
            time.sleep(max(0.0, began + sent / per_second - time.monotonic()))
    left = producer.flush(TIMEOUT_S)
    if left or failures:
        raise SourceUnavailable(
            "messages were not acknowledged", where=topic, why=failures[0] if failures else f"{left} still in flight"
        )
