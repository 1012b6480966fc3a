"""The demo's job, a process of its own: started, killed, and started again by `recovery.demo.run`.

What happens is told on standard output, one JSON object per line: `started`, `micro_batch`, `restoring`, `restored`,
`ended`, `failed`.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend import archive, count, kafka, max_, mean, median, stream, tumbling
from recovery.demo.flights import AIRPORTS, TOPIC
from recovery.demo.session import session
from recovery.drill_job import tell
from recovery.told import FETCHES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from backend.batch import SourcePartition
    from backend.sources import OffsetRange, Source, TopicPartition
    from recovery.listener import Restoring
    from recovery.supervisor import RewindQuery

RETENTION = "6 hours"
VALUE = "origin string, delay double, scheduled timestamp"
LOCAL, CHECKPOINT, RESULTS, ERRORS, ARCHIVE = "local", "checkpoint", "windows", "errors", "departures"
"""Directories below the demo's output directory."""


def start(
    spark: SparkSession,
    out: Path,
    *,
    offsets: int,
    break_restore: bool = False,
    servers: str | None = None,
    live: bool = False,
) -> RewindQuery:
    """Start the job: departures per airport and hour, to the end of the archive or topic.

    Args:
        spark: The session.
        out: The demo's directory.
        offsets: Bound on the offsets per airport in a micro-batch.
        break_restore: Leave out one replayed message.
        servers: Read the topic there instead of the archive, and keep the changelog there.
        live: Go on without end.
    """
    departures: Any = archive(out / ARCHIVE, value=VALUE, max_offsets_per_batch=offsets)
    if servers is not None:
        bound = offsets * len(AIRPORTS)
        departures = kafka(TOPIC, servers=servers, value=VALUE, max_offsets_per_trigger=bound)
    if break_restore:
        departures = Forgetful(departures)
    return (
        stream(departures, event_time="scheduled", key="origin")
        .window(tumbling("1 hour"), retention=RETENTION)
        .aggregate(flights=count(), mean=mean("delay"), worst=max_("delay"), typical=median("delay"))
        .start(
            spark,
            checkpoint=out / CHECKPOINT,
            results=out / RESULTS,
            errors=out / ERRORS,
            local_dir=out / LOCAL,
            route="partition",
            trigger="0 seconds",
            until=None if live else "end",
            changelog=None if servers is None else f"kafka://{servers}/{TOPIC}-changelog",
            listeners=(Teller(),),
        )
    )


class Teller:
    """A restore listener that tells the parent process: restores alone, not that tasks took what was restored.

    The seconds that it tells are wall clock since the first shard's restore began: reading the archive included.
    """

    def __init__(self) -> None:
        self._began: float | None = None

    def start(self, restoring: Restoring) -> None:
        """Tell that a shard is being restored, and how."""
        if restoring.how in FETCHES:
            return
        self._began = self._began or time.monotonic()
        ranges = [[*key, *span] for key, span in sorted(restoring.ranges.items())]
        tell("restoring", shard=restoring.shard, how=restoring.how, why=restoring.why, ranges=ranges)

    def batch(self, restoring: Restoring, end: Mapping[SourcePartition, int], records: int, length: int) -> None:
        """Leave the details out."""

    def suspended(self, restoring: Restoring, why: str) -> None:
        """Tell that it did not work."""
        tell("suspended", shard=restoring.shard, why=why)

    def end(self, restoring: Restoring, records: int, length: int, seconds: float) -> None:
        """Tell the totals."""
        if restoring.how in FETCHES:
            return
        passed = time.monotonic() - self._began if self._began is not None else seconds
        tell("restored", shard=restoring.shard, how=restoring.how, records=records, bytes=length, seconds=passed)


@dataclass(frozen=True)
class Forgetful:
    """A source that leaves out one message when it is replayed: the demo must then fail."""

    source: Source

    def batch(self, spark: SparkSession, ranges: Mapping[TopicPartition, OffsetRange]) -> DataFrame:
        """Leave out the last message before the end of a range that parses."""
        rows = self.source.batch(spark, ranges)
        good = rows.where("malformed is null")
        last = good.selectExpr("max_by(struct(partition, offset), offset) as last").collect()[0].last
        return rows.where(f"not (partition = {last.partition} and offset = {last.offset})")

    def __getattr__(self, name: str) -> Any:
        """Be the source in everything else."""
        return getattr(self.source, name)


def one_line(error: BaseException) -> str:
    """Give the line of a long text that says what happened: our own named error, or else Python's."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "[rewind:" in line]
    python = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]
    return next(iter(named or python[::-1] or lines), type(error).__name__)


def follow(query: RewindQuery) -> None:
    """Tell of each micro-batch until the query ends."""
    told = -1
    ended = False
    while not ended:
        ended = query.await_termination(0.1)
        progress = query.progress
        if progress.version > told:
            told = progress.version
            tell("micro_batch", version=told, rows=progress.rows, results=progress.results, errors=progress.errors)


def main() -> int:
    """Run the job to the end of the archive."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--offsets", type=int, required=True)
    parser.add_argument("--break-restore", action="store_true")
    parser.add_argument("--servers", default=None)
    parser.add_argument("--live", action="store_true")
    options = parser.parse_args()
    began = time.monotonic()
    spark = session("rewind-demo", options.out / "scratch")
    try:
        query = start(
            spark,
            options.out,
            offsets=options.offsets,
            break_restore=options.break_restore,
            servers=options.servers,
            live=options.live,
        )
        tell("started", seconds=time.monotonic() - began)
        follow(query)
        tell("ended", micro_batches=query.progress.version + 1, restores=query.progress.restores)
    except Exception as error:
        traceback.print_exc()  # to the log; the parent shows one line and fails
        tell("failed", error=one_line(error))
        return 1
    finally:
        spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
