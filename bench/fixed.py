"""What a micro-batch costs beside its rows: `python -m bench.fixed [--quick]`.

Micro-batches of 200 messages (100 keys, tumbling windows of ten seconds, every micro-batch closes some), so that rows
cost nothing: milliseconds per micro-batch, and of the first one, of

* ours, with 1, 2 and 4 shards;
* `empty`: a stateful operator in Python that only consumes the same frames and publishes nothing (the floor of
  `transformWithStateInPandas`), with as many shards;
* Spark's own windows on the JVM, with its RocksDB store and changelog checkpointing, with as many partitions.

They run in turn, in one session, once the JVM's compilers have settled (`bench/warm.py`); medians over micro-batches,
the first three of each query left out. The first micro-batch is that of a query in a JVM that has run others; `until
committed` is the time from before the query is started to the end of that micro-batch.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from backend import archive, count, max_, policies, stream, sum_, tumbling
from backend.sources.archive_files import write_archive
from backend.sources.archive_reader import row_schema
from backend.spark.reading import streamed
from bench.data import START_MS, TIME, topic_rows, typed
from bench.floor import empty, until_read
from bench.session import has_messages, session, sparks_own, steadily
from bench.table import Options, report
from bench.warm import ROUNDS, Warm

ROWS = 200
WARM_UP = 3
VALUE = "key string, at timestamp, x long"


def write(directory: Path, batches: int) -> None:
    """Write the archive: two source partitions, half of each micro-batch in each."""
    random = np.random.default_rng(5)
    tables = []
    for partition in range(2):
        n = batches * ROWS // 2
        at = START_MS + np.arange(n) * 60
        keys = pa.array([f"k{number:03d}" for number in range(100)]).take(pa.array(random.integers(0, 100, n)))
        value = typed(key=keys, at=pa.array(at, TIME), x=pa.array(random.integers(0, 1000, n)))
        tables.append(topic_rows(partition, 0, at, value))
    write_archive(directory / "archive", pa.concat_tables(tables), rows_per_file=10**6, row_group_rows=10**4)


def source(directory: Path) -> Any:
    """Give the archive, read in micro-batches of `ROWS`."""
    return archive(str(directory / "archive"), value=VALUE, format="typed", max_offsets_per_batch=ROWS // 2)


def pipeline(directory: Path) -> Any:
    """Give our job."""
    windowed = stream(source(directory), event_time="at", key="key").window(
        tumbling("10 seconds"), retention="1 second", max_ahead=None, policies=policies(late="off")
    )
    return windowed.aggregate(n=count(), total=sum_("x"), worst=max_("x"))


@dataclass(frozen=True, slots=True)
class Taken:
    """What one run took, milliseconds.

    Attributes:
        committed: From before the start to the end of the first micro-batch with messages.
        first: That micro-batch.
        rest: Those after the warm-up.
    """

    committed: float
    first: float
    rest: list[float]


def timed(run: Callable[[], Sequence[Any]]) -> Taken:
    """Run a query to its end, and tell by its progress what it took."""
    began_s = time.time()
    progress = [p for p in run() if has_messages(p)]
    taken = [float(p["durationMs"]["triggerExecution"]) for p in progress]
    triggered_s = datetime.fromisoformat(progress[0]["timestamp"]).timestamp()
    return Taken((triggered_s - began_s) * 1000 + taken[0], taken[0], taken[WARM_UP:])


def run_ours(spark: Any, directory: Path, run: Path, shards: int, batches: int) -> Sequence[Any]:
    """Run our job to its end."""
    query = pipeline(directory).start(
        spark, checkpoint=run / "checkpoint", results=run / "results", errors=run / "errors", shards=shards,
        local_dir=run / "local", trigger="0 seconds", until="end",
    )  # fmt: skip
    query.await_termination()
    assert query.progress.rows == batches * ROWS
    progress: Sequence[Any] = query.query.recentProgress
    return progress


def run_empty(spark: Any, directory: Path, run: Path, shards: int, batches: int) -> Sequence[Any]:
    """Run the same frames into an operator that does nothing."""
    return empty(spark, pipeline(directory), run, shards, batches)


def run_sparks(spark: Any, directory: Path, run: Path, shards: int, batches: int) -> Sequence[Any]:
    """Run Spark's own windows over the same archive."""
    from pyspark.sql import functions as f

    mine = source(directory)
    query = (
        streamed(sparks_own(spark, partitions=shards), mine.stream_reader(), row_schema(mine.value), iter)
        .select("value.*")
        .withWatermark("at", "1 second")
        .groupBy(f.window("at", "10 seconds").alias("w"), "key")
        .agg(f.count("*").alias("n"), f.sum("x").alias("total"), f.max("x").alias("worst"))
        .writeStream.format("parquet")
        .option("path", str(run / "results"))
        .option("checkpointLocation", str(run / "checkpoint"))
        .outputMode("append")
        .trigger(processingTime="0 seconds")
        .start()
    )
    return until_read(query, batches)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it."""
    options = Options("fixed", __doc__).parse(arguments)
    batches, rounds = (WARM_UP + 2, 1) if options.quick else (12, 2)
    rows = []
    with session() as spark, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        directory = Path(name)
        write(directory, batches)

        def warm_up() -> None:
            for go in (run_empty, run_ours, run_sparks):
                steadily(lambda run, go=go: go(spark, directory, run, 2, batches), Path(tempfile.mkdtemp(dir=name)))

        warm = Warm(spark, warm_up, rounds=0 if options.quick else ROUNDS)
        for shards in (2,) if options.quick else (1, 2, 4):
            taken: dict[str, list[float]] = {"ours": [], "empty": [], "sparks": []}
            first: dict[str, list[float]] = {"ours": [], "empty": [], "sparks": []}
            committed: dict[str, list[float]] = {"ours": [], "empty": [], "sparks": []}
            for number in range(rounds):
                for who, run in (("empty", run_empty), ("ours", run_ours), ("sparks", run_sparks)):
                    one = steadily(
                        lambda into, go=run, n=shards: timed(lambda: go(spark, directory, into, n, batches)),
                        directory / f"{who}-{shards}-{number}",
                    )
                    taken[who] += one.rest
                    first[who].append(one.first)
                    committed[who].append(one.committed)
            ours, empty, sparks = (statistics.median(taken[who]) for who in ("ours", "empty", "sparks"))
            rows.append(
                {
                    "shards": shards,
                    "ours ms": ours,
                    "empty operator ms": empty,
                    "Spark's own ms": sparks,
                    "ms per shard above empty": (ours - empty) / shards,
                    "first: ours ms": statistics.median(first["ours"]),
                    "first: empty ms": statistics.median(first["empty"]),
                    "first: Spark's own ms": statistics.median(first["sparks"]),
                    "until committed: ours ms": statistics.median(committed["ours"]),
                    "until committed: empty ms": statistics.median(committed["empty"]),
                    "until committed: Spark's own ms": statistics.median(committed["sparks"]),
                }
            )
        notes = warm.notes()
    report(
        "fixed",
        options,
        f"Micro-batches of {ROWS} messages, two cores",
        rows,
        notes,
    )


if __name__ == "__main__":
    main()
