"""An inner interval join beside Spark's own stream-stream join: `python -m bench.join [--quick]`.

700,000 messages a side in seven micro-batches, the same rows for both: ours through two archive sources, Spark's by
two file sources, with its RocksDB state store and changelog checkpointing, in the state format that it takes by itself
and in its fastest (4). A pair has equal keys and event times at most ten seconds apart, about one pair per message.
They run in turn in one session; the first micro-batches of each run are left out. All must give the same pairs (count
and sum of products).

State bytes: ours on the local disk at the end; Spark's the most that its RocksDB reports for a micro-batch, SST files
and memory. Logged bytes: our changelog and our pointers in Spark's own state; Spark's changelog and snapshot files in
the checkpoint.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from backend import join, stream
from bench.data import START_MS, TIME, read_archive, read_files, topic_rows, typed, write_both
from bench.session import session, size, sparks_own
from bench.table import Options, report
from bench.windows import WARM_UP, measured, triggers

SPAN_MS = 10_000
RANGE = "10 seconds"
SIDES = ("left", "right")
STATE_FORMAT = "spark.sql.streaming.join.stateFormatVersion"
SPARKS = {"Spark's own": 2, "Spark's own, state format 4": 4}
"""Formats of its state: what it takes by itself, and the fastest."""
VALUE = "key bigint, at timestamp, x bigint"


def write(directory: Path, batches: int, rows: int) -> None:
    """Write each side twice: as an archive, and as plain Parquet files, two per micro-batch, in the same order."""
    for seed, side in enumerate(SIDES):
        random = np.random.default_rng(seed)
        tables = []
        for number in range(batches):
            at = np.sort(random.integers(0, SPAN_MS, rows)) + START_MS + number * SPAN_MS
            key = pa.array(random.integers(0, 2 * rows, rows))
            value = typed(key=key, at=pa.array(at, TIME), x=pa.array(random.integers(0, 1000, rows)))
            tables.append(topic_rows(0, number * rows, at, value, side))
        write_both(directory, side, tables)


def run_ours(spark: Any, directory: Path, rows: int, run: Path) -> tuple[list[float], tuple[int, int], int, int]:
    """Run our join; give milliseconds per micro-batch, the pairs, state bytes and logged bytes."""
    sides = [stream(read_archive(directory, side, VALUE, rows), event_time="at") for side in SIDES]
    query = join(
        *sides, on="key", within=RANGE, left_retention="15 seconds", right_retention="15 seconds", max_ahead=None
    ).start(
        spark, checkpoint=run / "checkpoint", results=run / "results", errors=run / "errors", shards=2,
        local_dir=run / "local", trigger="0 seconds", until="end",
    )  # fmt: skip
    query.await_termination()
    found = spark.read.parquet(str(run / "results")).selectExpr("count(*)", "sum(left_x * right_x)").collect()[0]
    logged = size(run / "checkpoint" / "rewind" / "changelog") + size(run / "checkpoint" / "state")
    return triggers(measured(query.query.recentProgress)), (found[0], found[1]), size(run / "local"), logged


def run_sparks(spark: Any, directory: Path, run: Path, state: int) -> tuple[list[float], tuple[int, int], int, int]:
    """Run Spark's own join over the same files, with its state in a format."""
    from pyspark.sql import functions as f

    spark = sparks_own(spark)
    spark.conf.set(STATE_FORMAT, str(state))
    spark.conf.set("spark.sql.streaming.join.stateFormatV4.enabled", str(state == 4).lower())  # of 4.2, for testing
    left, right = (
        read_files(spark, directory, side, VALUE).withWatermark("at", "5 seconds").alias(side) for side in SIDES
    )
    condition = f.expr(
        f"left.key = right.key AND right.at BETWEEN left.at - INTERVAL {RANGE} AND left.at + INTERVAL {RANGE}"
    )
    query = (
        left.join(right, condition)
        .selectExpr("left.x AS left_x", "right.x AS right_x", "left.key", "left.at AS left_at", "right.at AS right_at")
        .writeStream.format("parquet")
        .option("path", str(run / "results"))
        .option("checkpointLocation", str(run / "checkpoint"))
        .outputMode("append")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    found = spark.read.parquet(str(run / "results")).selectExpr("count(*)", "sum(left_x * right_x)").collect()[0]
    operators = [p["stateOperators"][0] for p in query.recentProgress if p["stateOperators"]]
    held = max(int(o["customMetrics"].get("rocksdbSstFileSize", 0)) + int(o["memoryUsedBytes"]) for o in operators)
    logged = size(run / "checkpoint" / "state", ".changelog", ".zip", ".sst")
    return triggers(measured(query.recentProgress)), (found[0], found[1]), held, logged


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it."""
    options = Options("join", __doc__).parse(arguments)
    batches, rows, rounds = (WARM_UP + 2, 5_000, 1) if options.quick else (7, 100_000, 2)
    started = time.perf_counter()
    taken: dict[str, list[float]] = {label: [] for label in ("ours", *SPARKS)}
    bytes_of: dict[str, tuple[int, int]] = {}
    pairs: set[tuple[int, int]] = set()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, session() as spark:
        directory = Path(name)
        write(directory, batches, rows)
        for number in range(rounds):
            for turn, label in enumerate(taken):
                run = directory / f"run-{number}-{turn}"
                if label == "ours":
                    times, found, *sizes = run_ours(spark, directory, rows, run)
                else:
                    times, found, *sizes = run_sparks(spark, directory, run, SPARKS[label])
                taken[label] += times
                bytes_of[label] = (sizes[0], sizes[1])
                pairs.add(found)
                shutil.rmtree(run)
    assert len(pairs) == 1, f"the joins differ: {pairs}"
    messages = 2 * batches * rows
    matched = next(iter(pairs))[0]
    rows_out = [
        {
            "join": label,
            "ms per micro-batch": statistics.median(taken[label]),
            "min-max": f"{min(taken[label]):.0f}-{max(taken[label]):.0f}",
            "this / ours": statistics.median(taken[label]) / statistics.median(taken["ours"]),
            "state bytes": bytes_of[label][0],
            "logged bytes per message": bytes_of[label][1] / messages,
        }
        for label in taken
    ]
    report(
        "join",
        options,
        f"Interval join, {batches * rows:,} messages a side, {2 * rows:,} per micro-batch, {matched:,} pairs",
        rows_out,
        [
            f"{time.perf_counter() - started:.0f} s in all; the first {WARM_UP} micro-batches of each run left out",
            "all gave the same pairs",
        ],
    )


if __name__ == "__main__":
    main()
