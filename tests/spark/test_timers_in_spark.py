"""A running query without new data: Spark's timers send early and late updates, and close windows of idle input."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pyarrow as pa
import pytest

from backend import archive, collect_list, count, policies, session, stream, tumbling
from backend.sources.archive_files import write_archive

pytestmark = [pytest.mark.spark, pytest.mark.gentle]

START = 1_700_000_040_000  # a full minute
PATIENCE_S = 150  # on a busy machine; it takes some seconds


def write(path: Path, rows: list[tuple[int, int]]) -> None:
    """Write messages (partition, seconds after START), all of them there before the query starts."""
    offsets = {partition: 0 for partition, _ in rows}
    table = []
    for partition, seconds in rows:
        value = json.dumps({"key": f"p{partition}", "at": START + seconds * 1000, "s": seconds}).encode()
        table.append({"topic": "t", "partition": partition, "offset": offsets[partition], "value": value})
        offsets[partition] += 1
    columns = {name: [row[name] for row in table] for name in ("topic", "partition", "offset", "value")}
    arrays = {
        "topic": pa.array(columns["topic"]),
        "partition": pa.array(columns["partition"], pa.int32()),
        "offset": pa.array(columns["offset"]),
        "timestamp": pa.array([START] * len(rows), pa.timestamp("ms", tz="UTC")),
        "key": pa.array([None] * len(rows), pa.binary()),
        "value": pa.array(columns["value"], pa.binary()),
    }
    write_archive(path, pa.table(arrays))


def run_until(spark, path: Path, window, wanted, patience_s=PATIENCE_S, **options):
    """Start a query that is never fed again; gives its rows once they are as many as wanted."""
    source = archive(str(path / "archive"), value="key string, at long, s long")
    query = (
        stream(source, event_time="at", key="key")
        .window(window, retention="1 hour", max_ahead=None, **options)
        .aggregate(n=count(), all=collect_list("s"))
        .start(
            spark,
            checkpoint=path / "checkpoint",
            results=path / "results",
            errors=path / "errors",
            local_dir=path / "local",
            shards=1,
            trigger="500 ms",
        )
    )
    try:
        found = []
        until = time.monotonic() + patience_s
        while len(found) < wanted and time.monotonic() < until:
            assert query.is_active, query.exception
            time.sleep(0.3)
            found = read(spark, path)
        return found
    finally:
        query.stop()


def read(spark, path: Path):
    if not any((path / "results").glob("batch=*")):
        return []
    rows = spark.read.parquet(str(path / "results")).orderBy("version", "sequence").collect()
    return [
        (
            row["reason"],
            row["revision"],
            round(row["window_start"].timestamp() - START / 1000),
            row["key"],
            sorted(row["all"]),
            row["version"] > 0,
        )
        for row in rows
    ]


def test_early_and_late_updates_are_sent_without_new_data(spark, tmp_path):
    write(tmp_path / "archive", [(0, 5), (0, 65), (0, 8)])
    found = run_until(
        spark, tmp_path, tumbling("1 minute"), 3, policies=policies(early="2 seconds", late="1 second"), idle_after=None
    )
    # the full result comes with the message at 65 s, the others by the clock, in a later micro-batch of their own
    assert found == [
        ("full", 0, 0, "p0", [5], False),
        ("late", 1, 0, "p0", [5, 8], True),
        ("early", 0, 60, "p0", [65], True),
    ]


def test_idle_input_closes_windows_without_new_data(spark, tmp_path):
    write(tmp_path / "archive", [(0, 5), (0, 65), (1, 6)])
    found = run_until(spark, tmp_path, session("30 seconds"), 2, idle_after="2 seconds")
    # partition 1 holds both sessions open until it is silent for long enough
    assert found == [("full", 0, 5, "p0", [5], True), ("full", 0, 6, "p1", [6], True)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("10 seconds", "10 seconds", marks=pytest.mark.long),
        pytest.param("1 hour", "2 seconds", marks=pytest.mark.long),
        (None, "2 seconds"),
    ],
)
def test_a_job_that_starts_again_closes_windows_of_idle_input_without_new_data(spark, tmp_path, before, after):
    """Spark makes no micro-batch of its own after a start, until something new comes."""
    write(tmp_path / "archive", [(0, 5), (0, 65), (1, 6)])
    first = run_until(spark, tmp_path, tumbling("1 minute"), 1, idle_after=before, patience_s=8)
    assert first == []
    found = run_until(spark, tmp_path, tumbling("1 minute"), 2, idle_after=after)
    assert found == [("full", 0, 0, "p0", [5], True), ("full", 0, 0, "p1", [6], True)]
