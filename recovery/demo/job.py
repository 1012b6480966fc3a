"""The demo's job, a process of its own: started, killed, and started again by `recovery.demo.chapters`.

What happens is told on standard output, one JSON object per line: `started`, `micro_batch`, `adopted`, `restoring`,
`restored`, `ended`, `failed`.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from backend import archive, kafka
from recovery.demo.session import SPARK
from recovery.drill.flights import AIRPORTS, TOPIC
from recovery.drill.job import VALUE, Teller, Wrapped, by_hour, said, tell
from recovery.inspect.user_job import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from backend.sources import Direct, OffsetRange, Source, TopicPartition
    from recovery.supervise.supervisor import RewindQuery

RETENTION = "120 days"
PACE = "1 second"
"""Between micro-batches of a run in which disks are lost: the whole year would be over before one is restored."""
LOCAL, CHECKPOINT, RESULTS, ERRORS, ARCHIVE = "local", "checkpoint", "windows", "errors", "departures"
"""Directories below the demo's output directory."""


def start(spark: SparkSession, options: argparse.Namespace) -> RewindQuery:
    """Start the job: departures per airport and hour, to the end of the archive or topic; options as in `main`."""
    out, servers = options.out, options.servers
    departures: Any = archive(out / ARCHIVE, value=VALUE, max_offsets_per_batch=options.offsets)
    if servers is not None:
        bound = options.offsets * len(AIRPORTS)
        departures = kafka(TOPIC, servers=servers, value=VALUE, max_offsets_per_trigger=bound)
    if options.break_restore:
        departures = Forgetful(departures)
    return by_hour(departures, retention=RETENTION).start(
        spark,
        checkpoint=out / CHECKPOINT,
        results=out / RESULTS,
        errors=out / ERRORS,
        local_dir=out / LOCAL,
        trigger=PACE if options.paced else "0 seconds",
        until=None if options.live else "end",
        changelog=None if servers is None else f"kafka://{servers}/{TOPIC}-changelog",
        listeners=(Teller(),),
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


def follow(query: RewindQuery) -> None:
    """Tell of each micro-batch until the query ends."""
    observed, adopted = -1, 0
    ended = False
    while not ended:
        ended = query.await_termination(0.1)
        progress = query.progress
        if progress.version > observed:
            observed = progress.version
            tell("micro_batch", version=observed, rows=progress.rows, results=progress.results, errors=progress.errors)
        if progress.adopted > adopted:
            adopted = progress.adopted
            tell("adopted", version=observed, run=str(query.query.runId), restores=progress.restores)


def main() -> int:
    """Run the job to the end of the archive."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="the demo's directory")
    parser.add_argument("--offsets", type=int, required=True, help="offsets per airport and micro-batch")
    parser.add_argument("--break-restore", action="store_true", help="leave out one replayed message")
    parser.add_argument("--servers", default=None, help="read the topic there, and keep the changelog there")
    parser.add_argument("--live", action="store_true", help="go on without end")
    parser.add_argument("--paced", action="store_true", help=f"a micro-batch per {PACE}")
    options = parser.parse_args()
    began = time.monotonic()
    with session(conf=SPARK) as spark:
        return run(spark, options, began)


def run(spark: SparkSession, options: argparse.Namespace, began: float) -> int:
    """Run the job under a session; the exit code is 1 when it failed, which is told."""
    try:
        query = start(spark, options)
        tell("started", seconds=time.monotonic() - began, run=str(query.query.runId))
        follow(query)
        tell("ended", micro_batches=query.progress.version + 1, restores=query.progress.restores)
    except Exception as error:
        traceback.print_exc()  # to the log; the parent shows one line and fails
        tell("failed", error=said(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
