"""Streaming DataFrames as sources: the same windows as batch SQL, after a lost disk, in whatever order rows come."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from statistics import median as middle_of
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from backend import (
    SourceDamaged,
    archive,
    collect_list,
    count,
    first,
    join,
    max_,
    median,
    policies,
    stream,
    sum_,
    tumbling,
)
from backend.sources.archive_files import WRITE_SCHEMA, write_archive
from backend.sources.dataframe import DataFrameSource
from tests.support.taken_back import newest_commit, take_back
from tests.support.waiting import until

pytestmark = [pytest.mark.spark, pytest.mark.gentle]

SCHEMA = "user string, amount bigint, at timestamp"


def put(spark: Any, place: Path, name: str, rows: list[tuple[str | None, int | None, str | None]]) -> None:
    """Write one Parquet file of a folder that a stream reads; Spark sorts by time, so one second after the last one."""
    place.mkdir(exist_ok=True)
    age = 1_700_000_000 + len(list(place.iterdir()))
    times = pa.array([row[2] for row in rows], pa.string()).cast(pa.timestamp("us")).cast(pa.timestamp("us", tz="UTC"))
    table = pa.table({"user": [r[0] for r in rows], "amount": [r[1] for r in rows], "at": times})
    pq.write_table(table, place / f".{name}")
    os.utime(place / f".{name}", (age, age))
    (place / f".{name}").rename(place / name)


def minute(number: int, second: int) -> str:
    return f"2024-01-01T00:{number:02d}:{second:02d}"


def final(spark: Any, path: Path) -> dict[tuple[Any, Any], Any]:
    rows = spark.read.parquet(str(path)).orderBy("window_start", "user", "revision").collect()
    return {(row["window_start"], row["user"]): row for row in rows}


def test_a_file_source_with_a_lost_disk_equals_batch_sql(spark: Any, tmp_path: Path) -> None:
    rows = [(f"u{n % 3}", n, minute(n // 20, n % 60)) for n in range(300)]
    for number in range(3):
        put(spark, tmp_path / "in", f"{number}.parquet", rows[number * 100 : number * 100 + 100])

    def run() -> None:
        pipeline = (
            stream(files(spark, tmp_path / "in", maxFilesPerTrigger=1), event_time="at", key="user")
            .window(tumbling("1 minute"), retention="1 hour", max_ahead=None)
            .aggregate(n=count(), total=sum_("amount"), most=max_("amount"))
        )
        start(spark, pipeline, tmp_path)

    run()
    shutil.rmtree(tmp_path / "local")
    more = [(f"u{n % 3}", n, minute(n // 20, n % 60)) for n in range(300, 400)]
    put(spark, tmp_path / "in", "3.parquet", more)
    run()
    found = final(spark, tmp_path / "results")
    rows = (
        spark.read.parquet(str(tmp_path / "in"))
        .groupBy("user", "at")
        .agg({"amount": "sum"})
        .selectExpr("user", "date_trunc('minute', at) as start", "`sum(amount)` as amount")
        .collect()
    )
    expected: dict[tuple[Any, Any], int] = {}
    for row in rows:
        expected[row["start"], row["user"]] = expected.get((row["start"], row["user"]), 0) + row["amount"]
    assert {key: row["total"] for key, row in found.items()} == expected


def files(spark: Any, place: Path, **options: Any) -> Any:
    return spark.readStream.schema(SCHEMA).options(**options).parquet(str(place))


def start(spark: Any, pipeline: Any, home: Path, **options: Any) -> None:
    """Run a job to the end of its input."""
    places = {"results": home / "results", "errors": home / "errors", "local_dir": home / "local"}
    query = pipeline.start(
        spark, checkpoint=home / "checkpoint", until="end", trigger="0 seconds", **(places | options)
    )
    query.await_termination()


def test_messages_that_are_kept_outlive_a_lost_disk_and_a_micro_batch_in_another_order(
    spark: Any, tmp_path: Path
) -> None:
    """Its last commit is taken back, the disk is lost, and Spark delivers the planned micro-batch in another order."""
    rows = [(f"u{n % 2}", n * 37 % 101, minute(n // 60, n // 10 % 6)) for n in range(240)]  # ten with one event time
    put(spark, tmp_path / "in", "0.parquet", [*rows[:120], ("u0", 7, None)])
    put(spark, tmp_path / "in", "1.parquet", [*rows[120:], ("u1", None, None)])

    def job(frame: Any) -> Any:
        return (
            stream(frame, event_time="at", key="user", name="clicks")
            .window(tumbling("2 minutes"), retention="1 hour", max_ahead=None, policies=policies(early="each"))
            .aggregate(n=count(), typical=median("amount"), all=collect_list("amount"), head=first("amount"))
        )

    start(spark, job(files(spark, tmp_path / "in", maxFilesPerTrigger=1)), tmp_path)
    before = [row for row in outputs(tmp_path) if row["version"] < 2]
    assert {row["version"] for row in before} == {0, 1}
    segments = sorted(path.name for path in (tmp_path / "checkpoint/rewind/messages").glob("*/*"))
    assert segments, "what is kept is logged"
    take_back(tmp_path / "checkpoint", 1)  # that of the second file
    shutil.rmtree(tmp_path / "local")
    other = files(spark, tmp_path / "in", maxFilesPerTrigger=1).repartition(5, "amount")
    start(spark, job(other), tmp_path)
    assert [row for row in outputs(tmp_path) if row["version"] < 2] == before
    found = final(spark, tmp_path / "results")
    spark.read.parquet(str(tmp_path / "in")).where("at is not null").createOrReplaceTempView("clicks")
    expected = spark.sql(
        "select window(at, '2 minutes').start as window_start, user, count(*) as n, percentile(amount, 0.5) as typical,"
        " array_sort(collect_list(amount)) as amounts from clicks group by 1, 2"
    ).collect()
    assert len(found) == len(expected) == 4
    for row in expected:
        mine = found[row["window_start"], row["user"]]
        assert (mine["n"], mine["typical"], sorted(mine["all"])) == (row["n"], row["typical"], row["amounts"])
        assert mine["head"] in {amount for user, amount, at in rows if user == row["user"]}
    errors = spark.read.parquet(str(tmp_path / "errors")).orderBy("offset").collect()
    assert [(e["topic"], e["partition"], e["reason"]) for e in errors] == [("clicks", 0, "no_event_time")] * 2
    assert {bytes(e["value"]) for e in errors} == {
        b'{"user":"u0","amount":7,"at":null}',
        b'{"user":"u1","amount":null,"at":null}',
    }
    assert [e["offset"] >> 32 for e in errors] == [0, 1]


@pytest.mark.long
def test_the_rate_source_with_a_lost_disk_and_a_micro_batch_in_another_order(spark: Any, tmp_path: Path) -> None:
    """Two micro-batches of 60 rows are a minute, 20 rows for each of three users."""
    begin, each = 1_700_000_040_000, 60

    def run(order: int | None, enough: int) -> None:
        options = {"rowsPerBatch": each, "startTimestamp": begin, "advanceMillisPerBatch": 30_000, "numPartitions": 2}
        frame = spark.readStream.format("rate-micro-batch").options(**options).load()
        frame = frame.selectExpr("concat('u', value % 3) as user", "value as amount", "timestamp as at")
        if order is not None:
            frame = frame.repartition(order, "amount")
        job = (
            stream(frame, event_time="at", key="user", name="rates")
            .window(tumbling("1 minute"), retention="1 hour", max_ahead=None, policies=policies(early="each"))
            .aggregate(n=count(), typical=median("amount"), all=collect_list("amount"))
        )
        places = {name: tmp_path / name for name in ("checkpoint", "results", "errors")}
        query = job.start(spark, **places, local_dir=tmp_path / "local", trigger="0 seconds", shards=2)
        until(lambda: query.progress.micro_batches >= enough, what="micro-batches", alive=lambda: query.is_active)
        query.stop()

    run(None, 4)
    planned = newest_commit(tmp_path / "checkpoint")
    before = [row for row in outputs(tmp_path) if row["version"] <= planned]
    assert {row["version"] for row in before} >= {0, planned}
    take_back(tmp_path / "checkpoint", planned)
    shutil.rmtree(tmp_path / "local")
    run(5, 8)
    found = outputs(tmp_path)
    assert [row for row in found if row["version"] <= planned] == before
    full = [row for row in found if row["reason"] == "full"]
    minutes = sorted({row["window_start"] for row in full})
    assert len(minutes) >= 3
    wanted = {}
    for at, start in enumerate(minutes):
        assert start.timestamp() * 1000 == begin + at * 60_000
        for user in range(3):
            values = [n for n in range(at * 2 * each, (at + 1) * 2 * each) if n % 3 == user]
            wanted[start, f"u{user}"] = (len(values), middle_of(values), values)
    assert len(full) == len(wanted), "a window twice"
    assert {(r["window_start"], r["user"]): (r["n"], r["typical"], sorted(r["all"])) for r in full} == wanted


def outputs(home: Path) -> list[dict[str, Any]]:
    table = ds.dataset(home / "results", format="parquet", partitioning="hive").to_table()
    return sorted(table.to_pylist(), key=lambda row: (row["version"], row["shard"], row["sequence"]))


def test_a_join_with_an_archive_and_a_lost_disk_gives_each_pair_once(spark: Any, tmp_path: Path) -> None:
    clicks = [{"user": f"u{n % 5}", "n": n, "ms": 1_000 * n} for n in range(60)]
    times = pa.array([row["ms"] for row in clicks], pa.int64()).cast(pa.timestamp("ms", tz="UTC"))
    values = [json.dumps(row).encode() for row in clicks]
    table = pa.table([["t"] * 60, [0] * 60, list(range(60)), times, [None] * 60, values], schema=WRITE_SCHEMA)
    write_archive(tmp_path / "archive", table, rows_per_file=20)
    put(spark, tmp_path / "in", "0.parquet", [(f"u{n % 5}", n, f"1970-01-01T00:00:{n:02d}") for n in range(40)])

    def run() -> None:
        left = stream(archive(tmp_path / "archive", value="user string, n bigint, ms bigint"), event_time="ms")
        right = stream(files(spark, tmp_path / "in"), event_time="at")
        pipeline = join(
            left, right, on="user", within="5 s", left_retention="1 hour", right_retention="1 hour", max_ahead=None
        )
        start(spark, pipeline, tmp_path)

    run()
    shutil.rmtree(tmp_path / "local")
    put(spark, tmp_path / "in", "1.parquet", [(f"u{n % 5}", n, f"1970-01-01T00:00:{n:02d}") for n in range(40, 60)])
    run()
    found = spark.read.parquet(str(tmp_path / "results")).select("n", "amount").collect()
    pairs = [(row["n"], row["amount"]) for row in found]
    assert sorted(pairs) == [(n, m) for n in range(60) for m in range(60) if n % 5 == m % 5 and abs(n - m) <= 5]


def test_process_over_the_rate_source(spark: Any, tmp_path: Path) -> None:
    frame = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 50).load()
    frame = frame.withWatermark("timestamp", "1 second")  # Spark's own: nothing here goes by it

    def seen(messages: pa.Table, context: Any) -> pa.Table | None:
        return messages.select(["value"]) if messages.num_rows else None

    pipeline = stream(frame, event_time="timestamp").process(
        seen, result=pa.schema([pa.field("value", pa.int64())]), max_ahead=None
    )
    query = pipeline.start(
        spark, checkpoint=tmp_path / "c", results=tmp_path / "r", errors=tmp_path / "e", local_dir=tmp_path / "l",
        trigger="0 seconds", shards=1,
    )  # fmt: skip
    until(lambda: query.progress.micro_batches >= 3 or not query.is_active, what="3 micro-batches")
    query.stop()
    values = sorted(row["value"] for row in spark.read.parquet(str(tmp_path / "r")).collect())
    assert len(values) >= 100
    assert values == list(range(len(values)))


def test_settings_of_the_session_that_would_hold_a_query_up_are_put_aside_and_back(spark: Any, tmp_path: Path) -> None:
    """Without micro-batches of its own, Spark gives this run no second one, which sees that nothing more comes."""
    put(spark, tmp_path / "in", "0.parquet", [("a", 1, minute(0, 1)), ("b", 2, minute(0, 2))])
    users = {
        "spark.sql.streaming.noDataMicroBatches.enabled": "false",
        "spark.sql.execution.arrow.useLargeVarTypes": "true",
    }
    job = stream(files(spark, tmp_path / "in"), event_time="at", key="user").window(
        tumbling("1 minute"), retention="1 hour", max_ahead=None
    )
    places = {name: tmp_path / name for name in ("checkpoint", "results", "errors")}
    before = {name: spark.conf.get(name) for name in users}
    try:
        for name, value in users.items():
            spark.conf.set(name, value)
        query = job.aggregate(n=sum_("amount")).start(
            spark, **places, local_dir=tmp_path / "local", until="end", trigger="0 seconds"
        )
        try:
            until(lambda: not query.is_active, what="the end")
            query.await_termination()
        finally:
            query.stop()
        assert {name: spark.conf.get(name) for name in users} == users
    finally:
        for name, value in before.items():
            spark.conf.set(name, value)
    assert sorted(row["n"] for row in outputs(tmp_path)) == [1, 2]


def test_a_file_of_other_types_is_named(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"user": ["anna"], "amount": ["many"]}), tmp_path / "in" / "0.parquet")
    job = stream(files(spark, tmp_path / "in"), event_time="at").window(tumbling("1 minute"), retention="1 hour")
    with pytest.raises(SourceDamaged, match=r"a file that a DataFrame reads .*0\.parquet"):
        start(spark, job.aggregate(n=count(), total=sum_("amount")), tmp_path)


def test_what_cannot_be_a_source_is_refused_by_name_before_anything_starts(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from pyspark.sql.functions import rand

    frame = files(spark, tmp_path)
    with pytest.raises(ValueError, match="a batch DataFrame has no micro-batches"):
        stream(spark.range(3), event_time="id")
    with pytest.raises(ValueError, match=r"event_time=None: .* one of user, amount, at"):
        stream(frame)
    with pytest.raises(ValueError, match="event_time='when': allowed are user, amount, at"):
        stream(frame, event_time="when")
    with pytest.raises(ValueError, match="the column 'amount' twice"):
        stream(frame.selectExpr("at", "amount", "amount as Amount"), event_time="at")
    with pytest.raises(ValueError, match="column '_offset' has a name that Rewind uses"):
        stream(frame.withColumnRenamed("amount", "_offset"), event_time="at")
    with pytest.raises(ValueError, match="name=''"):
        stream(frame, event_time="at", name="")
    with pytest.raises(ValueError, match="name='x': only a DataFrame"):
        stream(archive(tmp_path, value="n int"), name="x")

    def refused(source: Any, says: str, **options: Any) -> None:
        job = stream(source, event_time="at", key="user")
        pipeline = job.window(tumbling("1 minute"), retention="1 hour").aggregate(n=count())
        with pytest.raises(ValueError, match=says):
            start(spark, pipeline, tmp_path / "never", **options)

    refused(frame, "route='partition': a DataFrame has no source partitions", route="partition")
    refused(spark.newSession().readStream.schema(SCHEMA).parquet(str(tmp_path)), "of another Spark session")
    refused(frame.dropDuplicates(["user"]), r"keeps state of its own \(dropDuplicates\(\)\)")
    refused(frame.limit(5), r"keeps state of its own \(limit\(\)\)")
    refused(frame.crossJoin(frame.selectExpr("user as other")), "a join of two streams")
    refused(frame.selectExpr("*", "make_ym_interval(1) as y"), "column 'y' of type .* cannot be carried")
    by_number = join(
        stream(frame, event_time="at"),
        stream(frame, event_time="at"),
        on="user",
        left_window=tumbling(messages=3),
        right_window=tumbling(messages=3),
    )
    with pytest.raises(ValueError, match="counts a source's offsets, and a DataFrame has none"):
        start(spark, by_number, tmp_path / "never")
    both = join(
        stream(frame.union(files(spark, tmp_path)), event_time="at"),
        stream(frame, event_time="at"),
        on="user",
        left_retention="1 hour",
        right_retention="1 hour",
    )
    with pytest.raises(ValueError, match="'dataframe' reads 2 streaming sources: in a join it may read one"):
        start(spark, both, tmp_path / "never")
    assert not (tmp_path / "never").exists()
    assert "not deterministic" not in caplog.text
    random = DataFrameSource(frame.withColumn("luck", rand()), "dice")
    random.check_plan(spark, alone=True)
    assert "the DataFrame 'dice' is not deterministic" in caplog.text
