"""Produce an archive's messages to a topic: to the same partitions, in the same order, so at the same offsets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from confluent_kafka import Producer

from backend.errors import SourceUnavailable
from backend.kafka_client import admin
from backend.kafka_client.writer import IDEMPOTENT, produce_all

if TYPE_CHECKING:
    from backend.kafka_client.settings import KafkaSettings

TIMEOUT_S = 60.0
_CHUNK_ROWS = 10_000


def create_topic(settings: KafkaSettings, topic: str, partitions: int) -> bool:
    """Create a topic that keeps everything; False when it is there already.

    Kafka's retention goes by the records' own timestamps: flights of 2013 would be deleted within minutes.
    """
    lasting = {"retention.ms": "-1"}
    return admin.create_topic(
        admin.admin_client(settings), topic, partitions, lasting, replication=1, timeout_s=TIMEOUT_S
    )


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
    _, why = produce_all(producer, topic, _paced(rows, per_second), TIMEOUT_S)
    if why:
        raise SourceUnavailable("messages were not acknowledged", where=topic, why=why)


def _paced(rows: pa.Table, per_second: int | None) -> Iterator[dict[str, Any]]:
    """Give the messages of rows, at most so many a second."""
    began = time.monotonic()
    size = min(_CHUNK_ROWS, per_second or _CHUNK_ROWS)
    for start in range(0, rows.num_rows, size):
        chunk = rows.slice(start, size)
        times = chunk["timestamp"].cast(pa.timestamp("ms", tz="UTC")).cast(pa.int64())
        yield from chunk.select(["partition", "key", "value"]).append_column("timestamp", times).to_pylist()
        if per_second is not None:
            time.sleep(max(0.0, began + (start + chunk.num_rows) / per_second - time.monotonic()))
