"""Windows beside Spark's own operators: `python -m bench.windows [--quick] [--case NAME]`.

The same Parquet files of 500,000 messages each, one file per micro-batch, read by both: ours through the archive source
(typed values), Spark's by its file source, with its RocksDB state store and changelog checkpointing. The two run in
turn in one session; the first micro-batches of each run are left out; the median per micro-batch is compared, and every
window that Spark closed must be among ours, aggregate by aggregate. The median is also computed as one writes it with
Spark's stateful API in Python: `transformWithStateInPandas`, messages in a ListState per key.

Below the table: where a micro-batch's milliseconds go, as the query's own progress tells (medians).
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

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
    rows: int = 500_000
    python: bool = False


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
    Case("median", 1_000, 10_000, _median, _spark_median, python=True),
    Case("million keys", 1_000_000, 10_000, _sums(tumbling("10 seconds")), _spark_sums("10 seconds")),
    Case("2 million", 1_000, 10_000, _sums(tumbling("10 seconds")), _spark_sums("10 seconds"), rows=2_000_000),
]
STEPS = ("operate_ms", "open_ms", "stage_ms", "changelog_ms")
PARTS = ("latestOffset", "queryPlanning", "walCommit", "commitBatch", "commitOffsets", "addBatch")


class Medians(StatefulProcessor):
    """The median per window of ten seconds as users write it: every message of a key in a ListState."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the state."""
        self._messages = handle.getListState("messages", "at long, x long")

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:  # noqa: N802, N803
        """Add the new messages; emit the windows that the watermark has passed, and keep the rest."""
        new = pd.concat(list(rows))
        kept = pd.DataFrame([*self._messages.get()], columns=["at", "x"])
        every = pd.concat([kept, new[["at", "x"]]])
        start = every["at"] // 10_000 * 10_000
        done = start + 10_000 <= timerValues.getCurrentWatermarkInMs()
        self._messages.put([tuple(row) for row in every[~done].itertuples(index=False)])
        closed = every[done].groupby(start[done])["x"]
        yield pd.DataFrame({"key": key[0], "n": closed.size(), "typical": closed.median()}).reset_index(names="start")

    def close(self) -> None:
        """Nothing is open."""


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


def run_ours(spark: Any, directory: Path, case: Case, run: Path) -> list[Any]:
    """Run our job to the end; give the progress of each micro-batch with messages."""
    rows = case.rows
    source = archive(
        str(directory / "archive"), value="key string, at timestamp, x long", format="typed",
        max_offsets_per_batch=rows, max_offsets_per_task=(rows + 1) // 2,
    )  # fmt: skip
    query = case.ours(stream(source, event_time="at", key="key")).start(
        spark, checkpoint=run / "checkpoint", results=run / "results", errors=run / "errors", shards=2,
        local_dir=run / "local", trigger="0 seconds", until="end",
    )  # fmt: skip
    query.await_termination()
    return _measured(query.query.recentProgress)


def run_sparks(spark: Any, directory: Path, case: Case, run: Path) -> list[Any]:
    """Run Spark's own operator over the same files in append mode, as far as windows close."""
    return _run_files(spark, directory, case.sparks, run)


def run_python(spark: Any, directory: Path, case: Case, run: Path) -> list[Any]:
    """Run the median in Spark's stateful Python API."""

    def build(rows: Any) -> Any:
        from pyspark.sql import functions as f

        return (
            rows.withWatermark("at", "1 second")
            .select("key", f.unix_millis("at").alias("at"), "x")
            .groupBy("key")
            .transformWithStateInPandas(
                Medians(), "start long, key string, n long, typical double", "Append", "EventTime"
            )
        )

    return _run_files(spark, directory, build, run)


def _run_files(spark: Any, directory: Path, build: Callable[[Any], Any], run: Path) -> list[Any]:
    sparks_own_store(spark)
    rows = (
        spark.readStream.schema("key string, at timestamp, x long")
        .option("maxFilesPerTrigger", 1)
        .parquet(str(directory / "files"))
    )
    query = (
        build(rows)
        .writeStream.format("parquet")
        .option("path", str(run / "results"))
        .option("checkpointLocation", str(run / "checkpoint"))
        .outputMode("append")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return _measured(query.recentProgress)


def _measured(progress: list[Any]) -> list[Any]:
    return [p for p in progress if p["numInputRows"] > 1][WARM_UP:]


def check(spark: Any, run: Path, mine: Path) -> None:
    """Look for every window that Spark closed among ours.

    Raises:
        AssertionError: One is not there, or there are none.
    """
    theirs = spark.read.parquet(str(run / "results"))
    start = "w.start" if "w" in theirs.columns else "timestamp_millis(start)"
    names = [name for name in theirs.columns if name not in ("w", "start")]
    ours = spark.read.parquet(str(mine / "results")).where("reason in ('full', 'drain')")
    closed = theirs.selectExpr(f"{start} as start", *names)
    assert closed.count() > 0
    assert closed.exceptAll(ours.selectExpr("window_start as start", *names)).count() == 0


def breakdown(progress: list[Any]) -> str:
    """Tell where a micro-batch's milliseconds go."""
    parts = [f"{name} {statistics.median(p['durationMs'].get(name, 0) for p in progress):.0f}" for name in PARTS]
    steps = [
        f"{name} {statistics.median(p['observedMetrics']['rewind'][name] for p in progress):.0f}" for name in STEPS
    ]
    return f"{', '.join(parts)}; in the slowest shard's task: {', '.join(steps)}"


def compare(spark: Any, case: Case, *, batches: int, rounds: int) -> tuple[dict[str, Any], str]:
    """Run all in turn and compare medians; also tell where ours go."""
    runs = {"ours": run_ours, "sparks": run_sparks, **({"python": run_python} if case.python else {})}
    progress: dict[str, list[Any]] = {label: [] for label in runs}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write(directory, case, batches, case.rows)
        for _ in range(rounds):
            for label, run in runs.items():
                progress[label] += run(spark, directory, case, directory / label)
            for label in runs.keys() - {"ours"}:
                check(spark, directory / label, directory / "ours")
            for label in runs:
                shutil.rmtree(directory / label)
    taken = {label: [float(p["durationMs"]["triggerExecution"]) for p in found] for label, found in progress.items()}
    middle = {label: statistics.median(found) for label, found in taken.items()}
    row = {
        "case": case.name,
        "keys": case.keys,
        "messages per micro-batch": case.rows,
        "ours ms": middle["ours"],
        "ours min-max": f"{min(taken['ours']):.0f}-{max(taken['ours']):.0f}",
        "Spark's own ms": middle["sparks"],
        "Spark min-max": f"{min(taken['sparks']):.0f}-{max(taken['sparks']):.0f}",
        "Spark / ours": middle["sparks"] / middle["ours"],
        "Spark's Python / ours": middle["python"] / middle["ours"] if "python" in middle else "",
    }
    return row, f"{case.name}: {breakdown(progress['ours'])}"


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small, for correctness only")
    parser.add_argument("--case", choices=[case.name for case in CASES])
    options = parser.parse_args()
    batches, rounds = (5, 1) if options.quick else (8, 2)
    cases = [
        replace(case, rows=case.rows // 25, keys=min(case.keys, 20_000)) if options.quick else case for case in CASES
    ]
    started = time.perf_counter()
    with session() as spark:
        found = [
            compare(spark, case, batches=batches, rounds=rounds) for case in cases if options.case in (None, case.name)
        ]
    report(
        "windows-quick" if options.quick else "windows",
        "Milliseconds per micro-batch beside Spark's own operators, two cores",
        [row for row, _ in found],
        [
            *(told for _, told in found),
            f"{time.perf_counter() - started:.0f} s in all; median over micro-batches, warm-up left out",
        ],
    )


if __name__ == "__main__":
    main()
