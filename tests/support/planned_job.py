"""A job whose options change between starts: `python -m tests.support.planned_job <directory>` is the first start."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa

from backend import archive, count, policies, stream, tumbling
from backend.sources.archive_files import write_archive

MINUTE_MS, START_MS = 60_000, 1_700_000_040_000  # a full minute
FAR_MS = 4_100_000_000_000  # in 2099
PER_BATCH = 10
BATCHES = 6


def write(path: Path) -> None:
    """Make an archive: in each micro-batch a message two minutes late, and one of 2099 as its last."""
    times = []
    for batch in range(BATCHES):
        start = START_MS + batch * 5 * MINUTE_MS
        times += [*(start + n * MINUTE_MS // 2 for n in range(8)), start + MINUTE_MS, FAR_MS]
    rows = len(times)
    table = pa.table(
        {
            "topic": ["t"] * rows,
            "partition": pa.array([0] * rows, pa.int32()),
            "offset": pa.array(range(rows), pa.int64()),
            "timestamp": pa.array(times, pa.timestamp("ms", tz="UTC")),
            "key": pa.nulls(rows, pa.binary()),
            "value": pa.array([json.dumps({"key": "k", "at": at}).encode() for at in times], pa.binary()),
        }
    )
    write_archive(path, table)


def start(spark: Any, home: Path, *, late: str, max_ahead: str | None) -> Any:
    """Start the job on its checkpoint."""
    source = archive(str(home / "archive"), value="key string, at long", max_offsets_per_batch=PER_BATCH)
    return (
        stream(source, event_time="at", key="key")
        .window(tumbling("1 minute"), retention="1 hour", policies=policies(late=late), max_ahead=max_ahead)
        .aggregate(n=count())
        .start(
            spark, checkpoint=home / "checkpoint", results=home / "results", errors=home / "errors", shards=1,
            trigger="0 seconds", until="end", local_dir=home / "local",
        )
    )  # fmt: skip


def main(home: Path) -> None:
    """Run to the end, unless something kills this process."""
    from recovery.inspect.user_job import session

    write(home / "archive")
    with session("local[1]") as spark:
        start(spark, home, late="each", max_ahead="1 day").await_termination()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
