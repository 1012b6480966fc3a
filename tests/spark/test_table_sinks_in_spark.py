"""Sinks from the outbox on a real Spark: one run of the operator, the newest rows equal to SQL over the input."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from tests.crash import kill_job
from tests.support import sink_job
from tests.support.kills import killed_and_ended
from tests.unit import test_object_sink

bucket, server = test_object_sink.bucket, test_object_sink.server

pytestmark = [pytest.mark.spark, pytest.mark.gentle]

KILLS = (
    ("before_publish", 1),
    ("during_publish", 2),
    ("after_publish", 3),
    ("before_publish", 4),
    ("after_publish", 5),
)


@pytest.fixture
def messages(tmp_path: Path) -> list[dict[str, Any]]:
    rows = kill_job.messages(sink_job.MESSAGES)
    kill_job.write(tmp_path / "archive", rows)
    return rows


def tables(home: Path, kind: str) -> list[pa.Table]:
    """Read results and errors by other libraries than wrote them."""
    if kind == "delta":
        from deltalake import DeltaTable

        return [DeltaTable(home / name).to_pyarrow_table() for name in ("windows", "windows-errors")]
    if kind == "iceberg":
        from pyiceberg.catalog import load_catalog

        found = load_catalog("rewind", **sink_job.catalog(home))
        return [found.load_table(name).scan().to_arrow() for name in ("db.windows", "db.windows_errors")]
    if kind == "sql":
        import sqlite3

        with sqlite3.connect(home / "out.db") as connection:
            names = ("key", "n", "worst", "typical")
            rows = connection.execute(f"SELECT window_start, {', '.join(names)} FROM windows").fetchall()
            bad = connection.execute('SELECT "partition", "offset", reason FROM windows_errors').fetchall()
        starts = pa.array([row[0] for row in rows]).cast(pa.timestamp("us"))
        columns = [starts, *([row[at] for row in rows] for at in range(1, 5))]
        errors = [dict(zip(sink_job.ERRORS, row, strict=True)) for row in bad]
        return [pa.table(columns, ["window_start", *names]), pa.Table.from_pylist(errors)]
    if kind == "s3":
        return [
            pa.concat_tables(test_object_sink.read(f"{sink_job.BUCKET}/{name}"))
            for name in ("windows", "windows-errors")
        ]
    return [ds.dataset(home / name, partitioning="hive").to_table() for name in ("windows", "windows-errors")]


def check(home: Path, kind: str, rows: list[dict[str, Any]]) -> None:
    windows, errors = kill_job.expected(rows)
    found, bad = tables(home, kind)
    if kind in sink_job.LOGS:  # of revisions
        last = "row_number() OVER (PARTITION BY window_start, key ORDER BY version DESC, sequence DESC) = 1"
        with duckdb.connect() as connection:
            found = connection.sql(f"SELECT * FROM found QUALIFY {last}").to_arrow_table()
    starts = found["window_start"].cast(pa.timestamp("ms", "UTC")).cast(pa.int64()).to_pylist()
    values = zip(found["n"].to_pylist(), found["worst"].to_pylist(), found["typical"].to_pylist(), strict=True)
    keyed = list(zip(starts, found["key"].to_pylist(), strict=True))
    assert len(set(keyed)) == len(keyed)
    assert dict(zip(keyed, values, strict=True)) == windows
    assert Counter(tuple(row[name] for name in sink_job.ERRORS) for row in bad.to_pylist()) == errors


def test_the_newest_rows_in_delta_are_what_sql_says(spark: Any, tmp_path: Path, messages: list[dict[str, Any]]) -> None:
    sink_job.start(spark, tmp_path, sink_job.sink_of(tmp_path, "delta")).await_termination()
    check(tmp_path, "delta", messages)
    assert list((tmp_path / "checkpoint" / "rewind" / "outbox").iterdir()) == []
    readable = spark.createDataFrame(tables(tmp_path, "delta")[0].to_pandas())
    assert readable.count() == len(kill_job.expected(messages)[0])


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["delta", "iceberg", "sql", "foreach"])
def test_drivers_that_are_killed(tmp_path: Path, messages: list[dict[str, Any]], kind: str) -> None:
    killed_and_ended("tests.support.sink_job", tmp_path, KILLS, kind)
    check(tmp_path, kind, messages)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_drivers_that_are_killed_over_an_object_store(
    tmp_path: Path, messages: list[dict[str, Any]], bucket: str
) -> None:
    assert bucket == sink_job.BUCKET
    killed_and_ended("tests.support.sink_job", tmp_path, KILLS, "s3")
    check(tmp_path, "s3", messages)
