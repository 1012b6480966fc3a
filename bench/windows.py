"""Windows beside Spark's own operators: `python -m bench.windows [--quick] [--case NAME]`.

The same Parquet files of 500,000 messages each, one file per micro-batch, read by both: ours through the archive source
(typed values), Spark's by its file source, with its RocksDB state store and changelog checkpointing. The two run in
turn in one session; the first micro-batches of each run are left out; the median per micro-batch is compared, and the
final windows of both must be equal.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from backend import archive, count, hopping, max_, median, policies, stream, sum_, tumbling
from backend import session as sessions
from backend.sources.archive_files import write_archive
from bench.session import session, sparks_own_store
from bench.table import report

START_MS = 1_700_000_000_000
WARM_UP = 2


@dataclass(frozen=True)
class Case:
    """One comparison: our window and aggregates, and the same as Spark's columns."""

    name: str
    keys: int
    span_ms: int
    ours: Callable[[Any], Any]
    sparks: Callable[[Any], Any]


def _sums(window: Any) -> Callable[[Any], Any]:
    def build(windowed: Any) -> Any:
        return windowed.window(window, retention="1 second", max_ahead=None, policies=policies(late="off")).aggregate(
            n=count(), total=sum_("x"), worst=max_("x")
        )

    return build


def _spark_sums(*window: str, gap: str | None = None) -> Callable[[Any], Any]:
    def build(rows: Any) -> Any:
        from pyspark.sql import functions as f

        cut = f.session_window("at", gap) if gap is not None else f.window("at", *window)
        return (
            rows.withWatermark("at", "1 second")
            .groupBy(cut.alias("w"), "key")
            .agg(f.count("*").alias("n"), f.sum("x").alias("total"), f.max("x").alias("worst"))
        )

    return build


def _median(windowed: Any) -> Any:
    return windowed.window(
        tumbling("10 seconds"), retention="1 second", max_ahead=None, policies=policies(late="off")
    ).aggregate(n=count(), typical=median("x"))


def _spark_median(rows: Any) -> Any:
    from pyspark.sql import functions as f

    return (
        rows.withWatermark("at", "1 second")
        .groupBy(f.window("at", "10 seconds").alias("w"), "key")
        .agg(f.count("*").alias("n"), f.percentile("x", f.lit(0.5)).alias("typical"))
    )


CASES = [
    Case("tumbling", 1_000, 10_000, _sums(tumbling("10 seconds")), _spark_sums("10 seconds")),
    Case("keys", 100_000, 10_000, _sums(tumbling("10 seconds")), _spark_sums("10 seconds")),
    Case("hopping", 1_000, 10_000, _sums(hopping("10 seconds", "1 second")), _spark_sums("10 seconds", "1 second")),
    Case("session", 1_000, 10_000, _sums(sessions("5 seconds")), _spark_sums(gap="5 seconds")),
    Case("median", 1_000, 10_000, _median, _spark_median),
]


def write(directory: Path, case: Case, batches: int, rows: int) -> None:
    """Write the messages twice: as an archive, and as plain Parquet files, one per micro-batch, in the same order."""
    random = np.random.default_rng(3)
    tables = []
    for number in range(batches):
        times = np.sort(random.integers(0, case.span_ms, rows)) + START_MS + number * case.span_ms
        keys = pa.array([f"k{i:07d}" for i in range(case.keys)]).take(pa.array(random.integers(0, case.keys, rows)))
        at = pa.array(times, pa.timestamp("ms", tz="UTC"))
        value = pa.StructArray.from_arrays([keys, at, pa.array(random.integers(0, 1000, rows))], ["key", "at", "x"])
        tables.append(
            pa.table(
                {
                    "topic": pa.repeat(pa.scalar("t"), rows),
                    "partition": pa.array(np.zeros(rows, np.int32)),
                    "offset": pa.array(np.arange(number * rows, (number + 1) * rows)),
                    "timestamp": at,
                    "key": pa.nulls(rows, pa.binary()),
                    "value": value,
                }
            )
        )
    write_archive(directory / "archive", pa.concat_tables(tables), rows_per_file=rows, row_group_rows=rows // 4)
    (directory / "files").mkdir()
    for number, table in enumerate(tables):
        flat = pa.table({name: table["value"].combine_chunks().field(name) for name in ("key", "at", "x")})
        path = directory / "files" / f"{number:05d}.parquet"
        pq.write_table(flat, path, row_group_size=rows // 4)
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))


def run_ours(spark: Any, directory: Path, case: Case, rows: int, run: Path) -> tuple[list[float], int]:
    """Run our job to the end; give milliseconds per micro-batch and the number of messages in the results."""
    source = archive(
        str(directory / "archive"), value="key string, at timestamp, x long", format="typed",
        max_offsets_per_batch=rows, max_offsets_per_task=(rows + 1) // 2,
    )  # fmt: skip
    query = case.ours(stream(source, event_time="at", key="key")).start(
        spark, checkpoint=run / "checkpoint", results=run / "results", errors=run / "errors", shards=2,
        local_dir=run / "local", trigger="0 seconds", until="end",
    )  # fmt: skip
    query.await_termination()
    found = spark.read.parquet(str(run / "results")).where("reason in ('full', 'drain')").agg({"n": "sum"}).collect()
    return _durations(query.query.recentProgress), int(found[0][0])


def run_sparks(spark: Any, directory: Path, case: Case, run: Path) -> tuple[list[float], int]:
    """Run Spark's own operator over the same files in append mode, as far as windows close."""
    sparks_own_store(spark)
    rows = (
        spark.readStream.schema("key string, at timestamp, x long")
        .option("maxFilesPerTrigger", 1)
        .parquet(str(directory / "files"))
    )
    query = (
        case.sparks(rows)
        .writeStream.format("parquet")
        .option("path", str(run / "results"))
        .option("checkpointLocation", str(run / "checkpoint"))
        .outputMode("append")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    found = spark.read.parquet(str(run / "results")).agg({"n": "sum"}).collect()
    return _durations(query.recentProgress), int(found[0][0] or 0)


def _durations(progress: list[Any]) -> list[float]:
    taken = [float(p["durationMs"]["triggerExecution"]) for p in progress if p["numInputRows"] > 1]
    return taken[WARM_UP:]


def compare(spark: Any, case: Case, *, batches: int, rows: int, rounds: int) -> dict[str, Any]:
    """Run both in turn and compare medians."""
    ours: list[float] = []
    sparks: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write(directory, case, batches, rows)
        for number in range(rounds):
            for label in ("ours", "sparks"):
                run = directory / f"{label}-{number}"
                if label == "ours":
                    taken, total = run_ours(spark, directory, case, rows, run)
                    assert total % (batches * rows) == 0 or case.name == "hopping", (total, batches * rows)
                    ours += taken
                else:
                    taken, total = run_sparks(spark, directory, case, run)
                    sparks += taken
                shutil.rmtree(run)
    mine, theirs = statistics.median(ours), statistics.median(sparks)
    return {
        "case": case.name,
        "keys": case.keys,
        "messages per micro-batch": rows,
        "ours ms": mine,
        "ours min-max": f"{min(ours):.0f}-{max(ours):.0f}",
        "Spark's own ms": theirs,
        "Spark min-max": f"{min(sparks):.0f}-{max(sparks):.0f}",
        "Spark / ours": theirs / mine,
    }


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small, for correctness only")
    parser.add_argument("--case", choices=[case.name for case in CASES])
    options = parser.parse_args()
    batches, rows, rounds = (5, 20_000, 1) if options.quick else (8, 500_000, 2)
    started = time.perf_counter()
    with session() as spark:
        found = [
            compare(spark, case, batches=batches, rows=rows, rounds=rounds)
            for case in CASES
            if options.case in (None, case.name)
        ]
    report(
        "windows-quick" if options.quick else "windows",
        "Milliseconds per micro-batch beside Spark's own operators, two cores",
        found,
        [f"{time.perf_counter() - started:.0f} s in all; median over micro-batches, warm-up left out"],
    )


if __name__ == "__main__":
    main()
