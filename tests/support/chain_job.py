"""Chained jobs, to be killed: `python -m tests.support.chain_job <directory> <hours | pairs>`.

`hours`: minutes, and hours over them. A process first runs the hours to the end of what the minutes have published, a
micro-batch that Spark has not committed included, and then the minutes to the end of the archive. `pairs`: minutes and
peaks, and a join of both.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from backend import archive, count, join, max_, policies, results_of, stream, sum_, tumbling
from backend.sources.archive_files import write_archive

START_MS = 1_700_000_000_000
MESSAGES = 400


def write(path: Path) -> list[dict[str, Any]]:
    """Make an archive of two source partitions, each in order of event time, over some six hours."""
    draw = random.Random(5)
    rows = []
    for i in range(MESSAGES):
        at = START_MS + i * 60_000
        rows.append({"key": f"k{draw.randrange(3)}", "x": draw.randrange(1000), "at": at, "p": i % 2, "o": i // 2})
    table = pa.table(
        {
            "topic": ["t"] * len(rows),
            "partition": pa.array([row["p"] for row in rows], pa.int32()),
            "offset": pa.array([row["o"] for row in rows], pa.int64()),
            "timestamp": pa.array([row["at"] for row in rows], pa.timestamp("ms", tz="UTC")),
            "key": pa.nulls(len(rows), pa.binary()),
            "value": pa.array([json.dumps(row).encode() for row in rows], pa.binary()),
        }
    )
    write_archive(path, table)
    return rows


def run(spark: Any, home: Path, name: str, job: Any) -> None:
    """Run a job to the end of what is there."""
    query = job.options(shards=2, trigger="0 seconds", until="end", local_dir=home / "local").start(
        spark, checkpoint=home / f"checkpoint-{name}", results=home / name, errors=home / f"{name}-errors"
    )
    query.await_termination()


def minutes(spark: Any, home: Path) -> None:
    """Windows of five minutes."""
    source = archive(home / "archive", value="key string, x long, at long", max_offsets_per_batch=40)
    windows = stream(source, event_time="at", key="key").window(
        tumbling("5 minutes"), retention="0 s", max_ahead=None, idle_after=None, policies=policies(late="off")
    )
    run(spark, home, "minutes", windows.aggregate(n=count(), worst=max_("x")))


def hours(spark: Any, home: Path) -> None:
    """Windows of an hour over them."""
    source = results_of(home / "minutes", value="window_start timestamp, key string, n long, worst long")
    windows = stream(source, event_time="window_start", key="key").window(
        tumbling("1 hour"), retention="1 day", max_ahead=None, idle_after=None
    )
    run(spark, home, "hours", windows.aggregate(n=sum_("n"), worst=max_("worst")))


def peaks(spark: Any, home: Path) -> None:
    """The largest of the messages whose number is even, in windows of five minutes."""
    source = archive(home / "archive", value="key string, x long, at long", max_offsets_per_batch=40)
    windows = (
        stream(source, event_time="at", key="key")
        .where(pc.equal(pc.bit_wise_and(pc.field("x"), 1), 0))
        .window(tumbling("5 minutes"), retention="0 s", max_ahead=None, idle_after=None, policies=policies(late="off"))
    )
    run(spark, home, "peaks", windows.aggregate(peak=max_("x")))


def pairs(spark: Any, home: Path) -> None:
    """The minutes with the peaks of the same window and key, where there is one."""
    left = results_of(home / "minutes", value="window_start timestamp, key string, n long, worst long")
    right = results_of(home / "peaks", value="window_start timestamp, key string, peak long")
    job = join(
        stream(left, event_time="window_start").select("window_start", "key", "n", "worst"),
        stream(right, event_time="at").with_columns(at=pc.field("window_start")).select("at", "key", "peak"),
        on="key",
        within="0 s",
        left_retention="1 day",
        right_retention="1 day",
        max_ahead=None,
        idle_after=None,
    )
    run(spark, home, "pairs", job)


def main(home: Path, second: str) -> None:
    """Run two jobs, or three, unless something kills this process."""
    from recovery.inspect.user_job import session

    with session("local[2]") as spark:
        if second == "pairs":
            minutes(spark, home)
            if (home / "peaks").exists():
                pairs(spark, home)
            peaks(spark, home)
            pairs(spark, home)
            return
        if next((home / "minutes").glob("batch=*"), None) is not None:
            hours(spark, home)
        minutes(spark, home)
        hours(spark, home)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
