"""An executor dies: ours beside Spark's own state store: `python -m bench.failover [--quick] [--case NAME]`.

Two executors, each a process with one core and a disk of its own. The same messages for both: windows with incremental
aggregates, and a median, which keeps every message. As soon as a certain micro-batch has begun, the same executor of
each is killed with its Python workers (SIGKILL), and its disk is lost. Ours fetches the shard's snapshots on another
executor, Spark's loads its RocksDB snapshot and changelog; nobody restarts a query.

For `spark.locality.wait` (three seconds unless told) Spark holds the dead executor's task back, and gives it to the new
executor when that is there before: its JVM and Python start cold. With `0s` the executor that is left takes it at once.
Both are measured; chance decides too, so single runs differ by ten seconds, and the table has the range.

Ours runs a second time with `standby=1`: the executor that is left has a copy of the dead one's shard.

Shown: seconds from the death until that micro-batch is committed, the median of the undisturbed micro-batches around
it, and what the death costs: the seconds *above* the undisturbed ones of the same run, as median and range over the
kills. All must count every message once. Aim: not more than half a second above what a death costs Spark's own store.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from backend import stream
from bench.session import CLUSTER, session, sparks_own
from bench.table import Options, report
from bench.windows import CASES, Case, our_source, sparks_source, write
from recovery.drill.process import each, executors

DISK = "rewind"
SNAPSHOT_EVERY = 5
WAIT_S = 300.0
POLL_S = 0.002
KILLS = 9
WAITS = ("3s", "0s")
"""Values of `spark.locality.wait`; the first is what Spark has."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What one run took.

    Attributes:
        without_s: From the death to the next commit.
        undisturbed_s: Median between commits, without the first ones and the disturbed one.
        total: Messages counted in the results.
        moves: Times that a task of ours fetched something.
    """

    without_s: float
    undisturbed_s: float
    total: int
    moves: int = 0

    @property
    def above_s(self) -> float:
        """What the death cost: seconds more than an undisturbed micro-batch of the same run."""
        return self.without_s - self.undisturbed_s


def until(there: Callable[[], bool], what: str) -> None:
    """Wait.

    Raises:
        TimeoutError: It does not happen.
    """
    deadline = time.monotonic() + WAIT_S
    while not there():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(POLL_S)


def two_executors() -> dict[str, psutil.Process]:
    """Wait until both executors run (the one that was killed is replaced); give them by disk."""
    found: dict[str, psutil.Process] = {}

    def there() -> bool:
        found.clear()
        found.update(executors(psutil.Process().children(recursive=True)))
        return len(found) == 2

    until(there, "there are no two executors")
    return found


def strike(checkpoint: Path, at: int, victim: tuple[str, psutil.Process]) -> float:
    """Kill an executor once micro-batch `at` has begun; give the seconds until it is committed."""
    disk, executor = victim
    until((checkpoint / "offsets" / str(at)).exists, f"micro-batch {at} does not begin")
    each([*executor.children(recursive=True), executor], "kill")
    died = time.monotonic()
    shutil.rmtree(Path(disk) / DISK, ignore_errors=True)
    until((checkpoint / "commits" / str(at)).exists, f"micro-batch {at} is not committed after a death")
    return time.monotonic() - died


def between(checkpoint: Path, at: int) -> float:
    """Give the median of the seconds between commits, the first two and the disturbed one left out."""
    paths = sorted((path for path in (checkpoint / "commits").iterdir() if path.name.isdecimal()), key=_version)
    times = [path.stat().st_mtime for path in paths]
    gaps = [b - a for number, (a, b) in enumerate(pairwise(times), 1) if number not in (1, at)]
    return statistics.median(gaps)


def _version(path: Path) -> int:
    return int(path.name)


def ours(spark: Any, directory: Path, case: Case, rows: int, run: Path, at: int, standby: int = 0) -> Taken:
    """Run our job, with an executor killed."""
    victim = sorted(two_executors().items())[0]
    query = case.ours(stream(our_source(directory, rows), event_time="at", key="key")).start(
        spark, checkpoint=run / "checkpoint", results=run / "results", errors=run / "errors", shards=2,
        local_dir=f"$SPARK_EXECUTOR_DIRS/{DISK}", snapshots=SNAPSHOT_EVERY, trigger="0 seconds", until="end",
        standby=standby,
    )  # fmt: skip
    without = strike(run / "checkpoint", at, victim)
    query.await_termination()
    if query.progress.restores:
        raise RuntimeError("the query was restarted: nothing was moved")
    found = spark.read.parquet(str(run / "results")).where("reason in ('full', 'drain')").agg({"n": "sum"}).collect()
    return Taken(without, between(run / "checkpoint", at), int(found[0][0]), query.progress.moves)


def sparks(spark: Any, directory: Path, case: Case, run: Path, at: int) -> Taken:
    """Run Spark's own operator, with an executor killed; in update mode, so that open windows are seen too."""
    victim = sorted(two_executors().items())[0]
    out = str(run / "results")

    def publish(frame: Any, version: int) -> None:
        frame.write.mode("overwrite").parquet(f"{out}/batch={version}")

    query = (
        case.sparks(sparks_source(sparks_own(spark), directory))
        .writeStream.foreachBatch(publish)
        .option("checkpointLocation", str(run / "checkpoint"))
        .outputMode("update")
        .trigger(availableNow=True)
        .start()
    )
    without = strike(run / "checkpoint", at, victim)
    query.awaitTermination()
    newest = spark.read.parquet(out).groupBy("w", "key").agg({"n": "max"}).agg({"max(n)": "sum"}).collect()
    return Taken(without, between(run / "checkpoint", at), int(newest[0][0]))


def compare(spark: Any, case: Case, home: Path, *, batches: int, rows: int, kills: int) -> list[dict[str, Any]]:
    """Run all in turn, each with so many kills; one row for ours, one for ours with a standby."""
    directory = home / case.name
    directory.mkdir(parents=True)
    write(directory, case, batches, rows)
    taken: dict[str, list[Taken]] = {"ours": [], "ours, standby=1": [], "sparks": []}
    at = batches * 2 // 3
    for number in range(kills):
        run = directory / f"ours-{number}"
        taken["ours"].append(ours(spark, directory, case, rows, run, at))
        run = directory / f"standby-{number}"
        taken["ours, standby=1"].append(ours(spark, directory, case, rows, run, at, standby=1))
        run = directory / f"sparks-{number}"
        taken["sparks"].append(sparks(spark, directory, case, run, at))
    totals = {one.total for runs in taken.values() for one in runs}
    if totals != {batches * rows}:
        raise RuntimeError(f"{batches * rows} messages, counted {totals}")
    known = {"case": case.name, "keys": case.keys, "messages before the death": at * rows, "kills": kills}
    theirs = taken["sparks"]
    return [line(known, label, taken[label], theirs) for label in ("ours", "ours, standby=1")]


def line(known: dict[str, Any], label: str, mine: Sequence[Taken], theirs: Sequence[Taken]) -> dict[str, Any]:
    """Return a row of the table: medians, and ranges over the kills."""
    moves = [one.moves for one in mine]
    row = {**known, "who": label, "moves min-max": f"{min(moves)}-{max(moves)}"}
    for name, short, runs in (("ours", "ours", mine), ("Spark's own", "Spark", theirs)):
        without, above = [one.without_s for one in runs], [one.above_s for one in runs]
        row[f"{name} s"] = statistics.median(without)
        row[f"{short} min-max"] = f"{min(without):.1f}-{max(without):.1f}"
        row[f"{short} undisturbed s"] = statistics.median(one.undisturbed_s for one in runs)
        row[f"{short} above s"] = statistics.median(above)
        row[f"{short} above min-max"] = f"{min(above):.1f}-{max(above):.1f}"
    row["ours / Spark"] = row["ours s"] / row["Spark's own s"]
    row["above: ours - Spark"] = row["ours above s"] - row["Spark above s"]
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it."""
    names = ("tumbling", "median")
    parser = Options("failover", __doc__)
    parser.add_argument("--case", choices=names)
    parser.add_argument("--kills", type=int, help=f"per line; {KILLS} unless given, 1 of a quick run")
    options = parser.parse(arguments)
    batches, rows = (6, 2_000) if options.quick else (15, 100_000)
    kills = options.kills if options.kills is not None else 1 if options.quick else KILLS
    if kills < 1:
        parser.error(f"--kills={kills}: allowed are 1 and more")
    chosen = [options.case] if options.case else ["median"] if options.quick else names
    started = time.perf_counter()
    found = []
    for wait in WAITS[1:] if options.quick else WAITS:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
            home = Path(name)
            conf = {
                "spark.local.dir": str(home / "disks"),
                "spark.executor.memory": "1g",
                "spark.locality.wait": wait,
            }
            with session(CLUSTER, memory="1g", conf=conf) as spark:
                for case in CASES:
                    if case.name in chosen:
                        lines = compare(spark, case, home, batches=batches, rows=rows, kills=kills)
                        found += [{"locality wait": wait, **one} for one in lines]
    report(
        "failover",
        options,
        f"Seconds without results after an executor's death, {rows:,} messages per micro-batch, two cores",
        found,
        [f"{time.perf_counter() - started:.0f} s in all; medians of {kills}; all counted every message once"],
    )


if __name__ == "__main__":
    main()
