"""A job over a Delta table, in a process of its own: Spark needs Delta's jars and extensions from its beginning.

`python -m tests.support.delta_job <home> <jars, by commas>` writes a table with delta-rs, runs to its end, loses the
disk with its second micro-batch planned, which Spark then delivers in another order; loses it once more, appends to the
table, goes on, and writes `{"found": ..., "expected": ..., "runs": [...]}` to `<home>/told.json`.
"""

from __future__ import annotations

import datetime as dt
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa

from backend import count, median, policies, stream, sum_, tumbling
from tests.support.taken_back import take_back


def append(home: Path, numbers: range) -> None:
    at = [dt.datetime(2024, 1, 1, tzinfo=dt.UTC) + dt.timedelta(seconds=10 * n) for n in numbers]
    table = pa.table({"user": [f"u{n % 3}" for n in numbers], "amount": list(numbers), "at": at})
    deltalake.write_deltalake(str(home / "table"), table, mode="append")


def run(spark: Any, home: Path, order: int | None = None) -> None:
    frame = spark.readStream.format("delta").option("maxFilesPerTrigger", 1).load(str(home / "table"))
    if order is not None:
        frame = frame.repartition(order, "amount")
    pipeline = (
        stream(frame, event_time="at", key="user")
        .window(tumbling("1 minute"), retention="1 hour", max_ahead=None, policies=policies(early="each"))
        .aggregate(n=count(), total=sum_("amount"), typical=median("amount"))
    )
    query = pipeline.start(
        spark,
        checkpoint=home / "checkpoint",
        results=home / "results",
        errors=home / "errors",
        local_dir=home / "local",
        until="end",
        trigger="0 seconds",
    )
    query.await_termination()


def main(home: Path, jars: str) -> None:
    from pyspark.sql import SparkSession

    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.jars", jars)
        .config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
        .config("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "localhost")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.log.level", "ERROR")
        .config("spark.local.dir", str(home / "spark"))
        .config("spark.sql.warehouse.dir", str(home / "warehouse"))
        .getOrCreate()
    )
    append(home, range(40))
    append(home, range(40, 80))
    run(spark, home)
    before = sorted(map(str, spark.read.parquet(str(home / "results")).where("version < 2").collect()))
    take_back(home / "checkpoint", 1)
    shutil.rmtree(home / "local")
    run(spark, home, order=5)
    again = sorted(map(str, spark.read.parquet(str(home / "results")).where("version < 2").collect()))
    shutil.rmtree(home / "local")
    append(home, range(80, 100))
    run(spark, home)
    results = spark.read.parquet(str(home / "results")).orderBy("revision").collect()
    found = {f"{r['window_start']} {r['user']}": [r["n"], r["total"], r["typical"]] for r in results}
    spark.read.format("delta").load(str(home / "table")).createOrReplaceTempView("clicks")
    rows = spark.sql(
        "select window(at, '1 minute').start as start, user, count(*) as n, sum(amount) as total,"
        " percentile(amount, 0.5) as typical from clicks group by 1, 2"
    ).collect()
    expected = {f"{r['start']} {r['user']}": [r["n"], r["total"], r["typical"]] for r in rows}
    (home / "told.json").write_text(json.dumps({"found": found, "expected": expected, "runs": [before, again]}))
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
