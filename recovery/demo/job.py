"""The demo's job: departures per airport and hour, to the end of the archive or topic.

`recovery.drill.job` runs it in a process of its own, which `recovery.demo.chapters` starts, kills, and starts again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from backend import archive, kafka
from recovery.drill.flights import AIRPORTS, TOPIC
from recovery.drill.job import DATA, OFFSETS, VALUE, Wrapped, by_hour

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from backend.sources import Direct, OffsetRange, Source, TopicPartition
    from backend.spark.stream import Pipeline

JOB = "recovery.demo.job:departures"
RETENTION = "120 days"
SERVERS = "REWIND_DEMO_SERVERS"
"""In the job's environment: where the topic and the changelog are, where they are not files."""
FORGETFUL = "REWIND_DEMO_FORGETFUL"
"""Likewise: leave out one message that is replayed."""


def departures(spark: SparkSession) -> Pipeline:
    """Make the job."""
    offsets, servers = int(os.environ[OFFSETS]), os.environ.get(SERVERS)
    flights: Any = archive(os.environ[DATA], value=VALUE, max_offsets_per_batch=offsets)
    if servers:
        flights = kafka(TOPIC, servers=servers, value=VALUE, max_offsets_per_trigger=offsets * len(AIRPORTS))
    if FORGETFUL in os.environ:
        flights = Forgetful(flights)
    return by_hour(flights, retention=RETENTION).options(
        changelog=f"kafka://{servers}/{TOPIC}-changelog" if servers else None
    )


@dataclass(frozen=True)
class Forgetful(Wrapped):
    """A source that leaves out one message when it is replayed: the demo must then fail."""

    source: Source

    def pieces(
        self, spark: SparkSession, ranges: Mapping[TopicPartition, Sequence[OffsetRange]], names: Any = None
    ) -> Any:
        """Leave out the last message of the ranges that parses."""
        found, read, schema = cast("Direct", self.source).pieces(spark, ranges, names)
        last, parse = found[-1], self.source.parse("UTC")
        parsed = pa.Table.from_batches([parse(rows).select(["offset", "malformed"]) for rows in read(last)])
        lost = pc.max(parsed.filter(pc.is_null(parsed["malformed"]))["offset"])

        def read_less(piece: Any) -> Iterator[pa.RecordBatch]:
            for rows in read(piece):
                yield rows.filter(pc.not_equal(rows.column("offset"), lost)) if piece == last else rows

        return found, read_less, schema
