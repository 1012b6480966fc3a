"""A small job to be killed: windows over two source partitions, with everything that a restore needs, and errors."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset

from backend import archive, count, max_, median, stream, tumbling
from backend.sources.archive_files import write_archive

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from backend.spark.stream import Pipeline

ARCHIVE = "REWIND_KILL_JOB_ARCHIVE"
NAME, ON_ONE_SHARD = "tests.crash.kill_job:job", "tests.crash.kill_job:on_one_shard"
QUEUEING = "tests.crash.kill_job:queueing"
EACH = "REWIND_KILL_JOB_PER_BATCH"
MINUTE_MS, HOUR_MS = 60_000, 3_600_000
START_MS = 1_700_000_040_000  # a full minute
PER_BATCH = 16
"""Offsets per source partition and micro-batch, unless `EACH` says otherwise."""

Window = tuple[int, str]
Totals = tuple[int, int, float]


def job(spark: SparkSession, **window: Any) -> Pipeline:
    """Count, maximum and median per key and minute; the median needs every message, so a restore replays.

    Args:
        spark: The session.
        window: Further options of the window.
    """
    each = int(os.environ.get(EACH, PER_BATCH))
    source = archive(os.environ[ARCHIVE], value="key string, x long, at long", max_offsets_per_batch=each)
    return (
        stream(source, event_time="at", key="key")
        .window(tumbling("1 minute"), retention="1 hour", max_ahead=None, **window)
        .aggregate(n=count(), worst=max_("x"), typical=median("x"))
        .options(shards=2, snapshots=2)
    )


def on_one_shard(spark: SparkSession) -> Pipeline:
    """Give the same job with one shard: a second process in a micro-batch is another attempt of the same task."""
    return job(spark).options(shards=1)


def queueing(spark: SparkSession) -> Pipeline:
    """Give the same job, whose shards queue their input when their state is lost; there are no snapshots to take."""
    return job(spark).options(snapshots="off", queue_bytes=1 << 26)


def messages(count: int) -> list[dict[str, Any]]:
    """Message i: key k<i % 5>, one a second and partition; some two minutes back, some hours, some are no JSON."""
    rows = []
    for i in range(count):
        at = START_MS + i // 2 * 1000
        at -= 2 * MINUTE_MS if i % 7 == 0 else 10 * HOUR_MS if i % 61 == 60 else 0
        row = {"key": f"k{i % 5}", "x": i * 37 % 101, "at": at}
        value = b'{"key": ' if i % 43 == 42 else json.dumps(row).encode()
        rows.append({**row, "partition": i % 2, "offset": i // 2, "value": value})
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Make the archive."""
    table = pa.table(
        {
            "topic": ["t"] * len(rows),
            "partition": pa.array([row["partition"] for row in rows], pa.int32()),
            "offset": pa.array([row["offset"] for row in rows], pa.int64()),
            "timestamp": pa.array([row["at"] for row in rows], pa.timestamp("ms", tz="UTC")),
            "key": pa.nulls(len(rows), pa.binary()),
            "value": pa.array([row["value"] for row in rows], pa.binary()),
        }
    )
    write_archive(path, table)


def expected(rows: list[dict[str, Any]]) -> tuple[dict[Window, Totals], Counter[tuple[int, int, str]]]:
    """Give the windows and the errors by plain loops."""
    windows: dict[Window, list[int]] = {}
    errors: Counter[tuple[int, int, str]] = Counter()
    for i, row in enumerate(rows):
        if row["value"].startswith(b'{"key": "'):
            if i % 61 == 60 and i % 7:
                errors[row["partition"], row["offset"], "out_of_retention"] += 1
            else:
                windows.setdefault((row["at"] // MINUTE_MS * MINUTE_MS, row["key"]), []).append(row["x"])
        else:
            errors[row["partition"], row["offset"], "malformed"] += 1
    return {window: _totals(sorted(values)) for window, values in windows.items()}, errors


def _totals(values: list[int]) -> Totals:
    middle = len(values) // 2
    typical = values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2
    return len(values), values[-1], float(typical)


def written(results: Path, errors: Path) -> tuple[dict[Window, Totals], Counter[tuple[int, int, str]]]:
    """Give the last revisions and the errors as any reader of Parquet finds them."""
    newest: dict[Window, tuple[int, Totals]] = {}
    for row in pa.dataset.dataset(results, format="parquet", partitioning="hive").to_table().to_pylist():
        window = (round(row["window_start"].timestamp() * 1000), row["key"])
        if window not in newest or row["revision"] > newest[window][0]:
            newest[window] = row["revision"], (row["n"], row["worst"], row["typical"])
    found = pa.dataset.dataset(errors, format="parquet", partitioning="hive").to_table().to_pylist()
    refused = Counter((row["partition"], row["offset"], row["reason"]) for row in found)
    return {window: totals for window, (_, totals) in newest.items()}, refused
