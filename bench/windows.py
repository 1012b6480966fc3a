"""Windows beside Spark's own operators: `python -m bench.windows [--quick] [--case NAME]`.

The same messages, 500,000 per micro-batch, read by both from Parquet files in two tasks: ours through the archive
source (typed values), Spark's by its file source, with its RocksDB state store and changelog checkpointing. The two run
in turn in one session, twice (the Python one once), after a warm-up that ends when the JVM's compilers do: they take
more than half a core in a query's first minute, and a query runs for days. The first third of each run is left out; the
median per micro-batch is compared, and every window that Spark closed must be among ours, aggregate by aggregate. The
median is also computed as one writes it with Spark's stateful API in Python: `transformWithStateInPandas`, messages in
a ListState per key.

Below the table: how many of a micro-batch's messages are combined before they come to the shards, and where its
milliseconds go, as the query's own progress tells (medians).
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from backend import count, hopping, max_, median, policies, stream, sum_, tumbling
from backend import session as sessions
from backend.spark.pack.frames import PACKED_SCHEMA, from_ipc
from backend.spark.pack.narrow import widen
from backend.spark.pack.packing import packer
from backend.spark.start import StartOptions, build_job
from backend.windows.combined_rows import counts
from bench.data import START_MS, TIME, read_archive, read_files, topic_rows, typed, write_both
from bench.floor import empty, packed
from bench.session import has_messages, session, sparks_own, steadily
from bench.table import Options, report
from bench.warm import ROUNDS, Warm
from recovery.commit.option_sets import ByVersion

VALUE = "key string, at timestamp, x long"
WARM_UP = 4
SMALL = 60
"""Small micro-batches of each side in a round of the warm-up."""
SHARDS = 2


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
    floor: bool = False
    busy_ms: int | None = None
    """Messages come in so much of each span only; None for all of it."""
    batches: int = 24
    """Micro-batches of a run."""


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
    Case("tumbling", 1_000, 10_000, _sums(tumbling("10 seconds")), _spark_sums("10 seconds"), floor=True),
    Case("keys", 100_000, 10_000, _sums(tumbling("10 seconds")), _spark_sums("10 seconds")),
    Case("hopping", 1_000, 10_000, _sums(hopping("10 seconds", "1 second")), _spark_sums("10 seconds", "1 second")),
    Case("session", 1_000, 10_000, _sums(sessions("5 seconds")), _spark_sums(gap="5 seconds"), busy_ms=4_000),
    Case("median", 1_000, 10_000, _median, _spark_median, python=True, batches=9),
    Case("million keys", 1_000_000, 10_000, _sums(tumbling("10 seconds")), _spark_sums("10 seconds"), batches=12),
    Case(
        "2 million",
        1_000,
        10_000,
        _sums(tumbling("10 seconds")),
        _spark_sums("10 seconds"),
        rows=2_000_000,
        floor=True,
        batches=9,
    ),
]
QUICK = ("hopping", "median")
"""What the quick form runs: an incremental window, and one that keeps every message beside the Python API too."""
STEPS = ("operate_ms", "open_ms", "ingest_ms", "stage_ms", "changelog_ms")
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
    """Write the messages twice: as an archive, and as plain Parquet files, two per micro-batch, in the same order."""
    random = np.random.default_rng(3)
    names = pa.array([f"k{number:07d}" for number in range(case.keys)])
    tables = []
    for number in range(batches):
        at = np.sort(random.integers(0, case.busy_ms or case.span_ms, rows)) + START_MS + number * case.span_ms
        key = names.take(pa.array(random.integers(0, case.keys, rows)))
        value = typed(key=key, at=pa.array(at, TIME), x=pa.array(random.integers(0, 1000, rows)))
        tables.append(topic_rows(0, number * rows, at, value))
    write_both(directory, "messages", tables)


def our_source(directory: Path, rows: int) -> Any:
    """Give the messages, so many per micro-batch, as our archive source."""
    return read_archive(directory, "messages", VALUE, rows)


def sparks_source(spark: Any, directory: Path) -> Any:
    """Give the messages, as many per micro-batch, as Spark's file source."""
    return read_files(spark, directory, "messages", VALUE)


def ours(directory: Path, case: Case) -> Any:
    """Give our job."""
    return case.ours(stream(our_source(directory, case.rows), event_time="at", key="key"))


def run_ours(spark: Any, directory: Path, case: Case, run: Path) -> list[Any]:
    """Run our job to the end; give its progress."""
    query = ours(directory, case).start(
        spark, checkpoint=run / "checkpoint", results=run / "results", errors=run / "errors", shards=SHARDS,
        local_dir=run / "local", trigger="0 seconds", until="end",
    )  # fmt: skip
    query.await_termination()
    return list(query.query.recentProgress)


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
    query = (
        build(sparks_source(sparks_own(spark), directory))
        .writeStream.format("parquet")
        .option("path", str(run / "results"))
        .option("checkpointLocation", str(run / "checkpoint"))
        .outputMode("append")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return list(query.recentProgress)


def measured(progress: list[Any], warm_up: int = WARM_UP) -> list[Any]:
    """Leave out what had no messages, and the warm-up."""
    return [p for p in progress if has_messages(p)][warm_up:]


def triggers(progress: list[Any]) -> list[float]:
    """Give the milliseconds of each measured micro-batch."""
    return [float(p["durationMs"]["triggerExecution"]) for p in progress]


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
    assert closed.count() > 0, f"Spark closed no window of {run.name}"
    assert closed.exceptAll(ours.selectExpr("window_start as start", *names)).count() == 0


def breakdown(progress: list[Any]) -> str:
    """Tell where a micro-batch's milliseconds go."""
    parts = [f"{name} {statistics.median(p['durationMs'].get(name, 0) for p in progress):.0f}" for name in PARTS]
    steps = [
        f"{name} {statistics.median(p['observedMetrics']['rewind'][name] for p in progress):.0f}" for name in STEPS
    ]
    return f"{', '.join(parts)}; in the slowest shard's task: {', '.join(steps)}"


def share_combined(spark: Any, directory: Path, case: Case) -> float:
    """Return the share of a micro-batch's messages that come to the shards as rows of several."""
    job = build_job(ours(directory, case), spark, StartOptions(shards=SHARDS), stored=None, first_offsets=list)
    pack = packer(ByVersion.always(job.pack_plan(job.max_ahead_ms, job.operator)), int)
    rows = job.replay(spark, {(0, 0): (0, case.rows)}, pack, PACKED_SCHEMA)
    assert rows is not None
    frames = [bytes(row.frame) for row in rows.collect() if row.frame is not None]
    found = np.concatenate([counts(widen(from_ipc(frame))) for frame in frames])
    return float(found[found > 1].sum() / found.sum())


def compare(spark: Any, case: Case, *, rounds: int) -> tuple[dict[str, Any], str]:
    """Run all in turn and compare medians; also tell where ours go."""
    batches = case.batches

    def floor(what: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        return lambda spark, directory, case, run: what(spark, ours(directory, case), run, SHARDS, batches)

    runs = {"ours": run_ours, "sparks": run_sparks}
    runs |= {"python": run_python} if case.python else {}
    runs |= {"empty": floor(empty), "packed": floor(packed)} if case.floor else {}
    progress: dict[str, list[Any]] = {label: [] for label in runs}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        directory = Path(name)
        write(directory, case, batches, case.rows)
        share = share_combined(spark, directory, case)
        for number in range(rounds):
            # a directory of its own each time: Spark's stores may write to one when their query has long ended
            places = {label: directory / f"{label}-{number}" for label in runs}
            turns = {label: run for label, run in runs.items() if number == 0 or label != "python"}  # which is slow
            for label, run in turns.items():
                told = steadily(lambda into, go=run: go(spark, directory, case, into), places[label])
                progress[label] += measured(told, batches // 3)
            for label in turns.keys() & {"sparks", "python"}:
                check(spark, places[label], places["ours"])
            for place in places.values():
                shutil.rmtree(place, ignore_errors=True)
    taken = {label: triggers(found) for label, found in progress.items()}
    middle = {label: statistics.median(found) for label, found in taken.items()}
    row = {
        "case": case.name,
        "keys": case.keys,
        "messages per micro-batch": case.rows,
        "micro-batches": len(taken["ours"]),
        "ours ms": middle["ours"],
        "ours min-max": f"{min(taken['ours']):.0f}-{max(taken['ours']):.0f}",
        "Spark's own ms": middle["sparks"],
        "Spark min-max": f"{min(taken['sparks']):.0f}-{max(taken['sparks']):.0f}",
        "Spark / ours": middle["sparks"] / middle["ours"],
        "Spark's Python / ours": middle["python"] / middle["ours"] if "python" in middle else "",
        "empty operator ms": middle.get("empty", ""),
        "pack stage alone ms": middle.get("packed", ""),
    }
    return row, f"{case.name}: {share:.1%} of the messages combined; {breakdown(progress['ours'])}"


def warm_up(spark: Any) -> None:
    """Run both sides over small micro-batches."""
    compare(spark, replace(CASES[0], rows=20_000, batches=SMALL), rounds=1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it."""
    parser = Options("windows", __doc__)
    parser.add_argument("--case", choices=[case.name for case in CASES])
    options = parser.parse(arguments)
    names = [options.case] if options.case else QUICK if options.quick else [case.name for case in CASES]
    cases = [case for case in CASES if case.name in names]
    rounds = 2
    if options.quick:
        cases = [
            replace(case, rows=5_000, keys=min(case.keys, 1_000), floor=not case.python, batches=3) for case in cases
        ]
        rounds = 1
    started = time.perf_counter()
    with session() as spark:
        warm = Warm(spark, lambda: warm_up(spark), rounds=0 if options.quick else ROUNDS)
        found = [compare(spark, case, rounds=rounds) for case in cases]
        notes = warm.notes()
    report(
        "windows",
        options,
        "Milliseconds per micro-batch beside Spark's own operators, two cores",
        [row for row, _ in found],
        [
            *(told for _, told in found),
            *notes,
            f"{time.perf_counter() - started:.0f} s in all; median over micro-batches, warm-up left out",
        ],
    )


if __name__ == "__main__":
    main()
