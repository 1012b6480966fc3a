"""What a job takes when it is large or runs for long: source partitions, micro-batches, and a worker's memory.

`python -m tests.crash.sizes partitions [<partitions> [<shards>]]` reads many source partitions into many shards on two
cores. `... batches [<micro-batches> [<retained>]]` looks at memory and files while micro-batches run back to back;
`retained` is Spark's `minBatchesToRetain`. `... uncopied [<micro-batches>]` runs so many while Spark makes no copy of
its RocksDB: behind 864 it cannot write to it. `... worker <case> [<count>]` runs one shard without Spark, in a process
of its own, and prints how much its memory grew: the peak of resident memory (VmHWM) less what it was before.

Cases of `worker`: `median` (so many messages of one key in one window), `collect` (so many values of 100 kB), `open`
(so many windows of one shard, one per key, all of which close in one micro-batch at the end). Each step checks its
results; a wrong one, or growth without end, gives exit code 1.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.dataset

from backend import aggregates as agg
from backend.batch import BEFORE, NO_TIME, OFFSET, PARTITION, STREAM, TIME, Position
from backend.sources.archive_files import write_archive
from backend.windows.definitions import tumbling
from backend.windows.operator import WindowOperator
from backend.windows.spec import window_spec
from bench.data import START_MS, topic_rows, typed
from bench.data import TIME as TIME_TYPE
from recovery.attempt import run_attempt
from recovery.changelog import open_changelog
from recovery.commit.pointer import Pointer
from recovery.jobs import ShardJob
from recovery.share import ShardInput
from tests.support.memory import peak_mb

MINUTE_MS = 60_000
BATCHES = 10
"""Micro-batches that bring a worker's messages."""
VALUE_BYTES = 100_000
_FIELDS = pa.schema([pa.field("key", pa.string()), pa.field("x", pa.int64()), pa.field("text", pa.string())])


# -- one worker ----------------------------------------------------------------------------------------------------


def worker(case: str, count: int, directory: Path) -> dict[str, float]:
    """Run a case and check its results.

    Returns:
        `grown_mb`: growth of the peak while messages came, and with the micro-batches that closed the windows;
        `staged_mb`: the largest staged file.
    """
    aggregates = {
        "median": {"typical": agg.median("x")},
        "collect": {"all": agg.collect_list("text")},
        "open": {"n": agg.count(), "total": agg.sum_("x")},
    }[case]
    spec = window_spec(tumbling("1 minute"), _FIELDS, aggregates, keys=["key"], retention=0, max_ahead=None)
    operator = WindowOperator(spec)
    fields = tuple(_FIELDS.field(name) for name in operator.input_fields)
    shard = ShardJob("sizes", 0, directory / "local", operator, fields, open_changelog(str(directory / "changelog")))
    before = peak_mb("VmRSS")
    run = _Run(shard)
    for first in range(0, count, -(-count // BATCHES)):
        run.batch(_messages(case, first, min(count, first + -(-count // BATCHES))))
    came = peak_mb("VmHWM")
    end = {"key": ["end"], "x": [0], "text": [""]}
    _check(case, count, run.batch((np.array([MINUTE_MS]), pa.table(end, schema=_FIELDS))))
    peak = peak_mb("VmHWM")
    return {
        "before_mb": round(before),
        "messages_grown_mb": round(came - before),
        "grown_mb": round(peak - before),
        "staged_mb": round(run.staged / 2**20, 1),
    }


class _Run:
    """Attempts on one shard, each committed."""

    def __init__(self, shard: ShardJob) -> None:
        self.shard, self.pointer = shard, None
        self.version = self.offset = 0
        self.newest, self.staged = NO_TIME, 0.0
        self.pointer: Pointer | None = None

    def batch(self, given: tuple[np.ndarray[Any, np.dtype[np.int64]], pa.Table]) -> pa.Table:
        """Run a micro-batch of event times and fields; return its results."""
        times, rows = given
        count = len(times)
        before = np.maximum.accumulate(np.concatenate([[self.newest], times[:-1]]))
        columns = {
            STREAM: pa.array(np.zeros(count), pa.uint16()),
            PARTITION: pa.array(np.zeros(count), pa.int32()),
            OFFSET: pa.array(np.arange(self.offset, self.offset + count)),
            TIME: pa.array(times, pa.int64()),
            BEFORE: pa.array(before, pa.int64()),
            **{field.name: rows[field.name] for field in self.shard.message_fields},
        }
        self.newest, self.offset = max(self.newest, int(times.max())), self.offset + count
        shard_input = ShardInput(1, pa.table(columns), {(0, 0): Position(self.offset, self.newest, 1)})
        done = run_attempt(self.shard, self.pointer, self.version, lambda _: shard_input)
        self.pointer, self.version = done.pointer, self.version + 1
        self.staged = max(self.staged, float(done.metrics["staged_bytes"]))
        return done.outcome.results


def _messages(case: str, first: int, last: int) -> tuple[np.ndarray[Any, np.dtype[np.int64]], pa.Table]:
    numbers = np.arange(first, last)
    keys = [f"k{number}" for number in numbers.tolist()] if case == "open" else ["k"] * len(numbers)
    text = [chr(97 + number % 26) * VALUE_BYTES if case == "collect" else "" for number in numbers.tolist()]
    fields = pa.table({"key": keys, "x": pa.array(numbers), "text": text}, schema=_FIELDS)
    return np.zeros(len(numbers), np.int64), fields


def _check(case: str, count: int, results: pa.Table) -> None:
    """Check what the windows' end gave, by hand calculation."""
    found = results.to_pydict()
    if case == "median":
        good = found["typical"] == [(count - 1) / 2]
    elif case == "collect":
        good = [len(text) for text in found["all"][0]] == [VALUE_BYTES] * count
    else:
        good = sorted(found["total"]) == list(range(count)) and set(found["n"]) == {1}
    if not good:
        raise SystemExit(f"wrong results of {case}: {results.slice(0, 3).to_pylist()}")


# -- on Spark ------------------------------------------------------------------------------------------------------


def session(directory: Path, **conf: str) -> Any:
    """Start Spark on two cores."""
    from pyspark.sql import SparkSession

    from recovery.daemon import OPTION
    from tests.conftest import spark_environment

    os.environ.update(spark_environment())
    builder = (
        SparkSession.builder.master("local[2]")
        .config("spark.driver.memory", "1g")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "localhost")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.log.level", "ERROR")
        .config("spark.sql.session.timeZone", "UTC")
        .config(*OPTION)
        .config("spark.sql.warehouse.dir", str(directory / "warehouse"))
        .config("spark.local.dir", str(directory / "spark"))
    )
    for name, value in conf.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def write(path: Path, partitions: int, each: int, step_ms: int) -> dict[tuple[int, int], tuple[int, int]]:
    """Write an archive; return (window's start, key) -> (count, sum), by plain arithmetic.

    Message i of a partition p has key p % 50 and value i, at i steps.
    """
    expected: dict[tuple[int, int], tuple[int, int]] = {}
    rows = []
    for partition in range(partitions):
        numbers = np.arange(each)
        at = START_MS + numbers * step_ms
        value = typed(key=pa.array(np.full(each, partition % 50)), at=pa.array(at, TIME_TYPE), x=pa.array(numbers))
        rows.append(topic_rows(partition, 0, at, value))
        for number, time_ms in zip(numbers.tolist(), at.tolist(), strict=True):
            window = (time_ms // MINUTE_MS * MINUTE_MS, partition % 50)
            count, total = expected.get(window, (0, 0))
            expected[window] = (count + 1, total + number)
    write_archive(path, pa.concat_tables(rows), rows_per_file=100_000, row_group_rows=10_000)
    return expected


def start(spark: Any, directory: Path, shards: int, per_batch: int) -> Any:
    """Start a job over the archive in `directory`, with messages kept, so that everything that may grow is there."""
    from backend import archive, count, median, stream, sum_

    source = archive(
        str(directory / "archive"), value="key long, at timestamp, x long", format="typed",
        max_offsets_per_batch=per_batch,
    )  # fmt: skip
    return (
        stream(source, event_time="at", key="key")
        .window(tumbling("1 minute"), retention="2 minutes", max_ahead=None)
        .aggregate(n=count(), total=sum_("x"), typical=median("x"))
        .start(
            spark, checkpoint=directory / "checkpoint", results=directory / "results", errors=directory / "errors",
            local_dir=directory / "local", shards=shards, trigger="0 seconds", until="end",
        )
    )  # fmt: skip


def found(results: Path) -> dict[tuple[int, int], tuple[int, int]]:
    """Read the results; a window that was sent twice is an error."""
    rows = pa.dataset.dataset(results, format="parquet", partitioning="hive").to_table().to_pylist()
    windows = {(round(row["window_start"].timestamp() * 1000), row["key"]): (row["n"], row["total"]) for row in rows}
    if len(windows) != len(rows):
        raise SystemExit(f"{len(rows)} rows for {len(windows)} windows")
    return windows


def partitions(count: int, shards: int, directory: Path) -> dict[str, float]:
    """Read many source partitions into many shards; return how long it took."""
    expected = write(directory / "archive", count, 600, 500)
    spark = session(directory)
    try:
        began = time.monotonic()
        query = start(spark, directory, shards, 200)
        if not query.await_termination(1200):
            raise SystemExit("not done after 20 minutes")
        took = time.monotonic() - began
        done = query.progress.micro_batches
    finally:
        spark.stop()
    if found(directory / "results") != expected:
        raise SystemExit("the results are not those of plain arithmetic")
    return {"partitions": count, "shards": shards, "seconds": round(took, 1), "micro_batches": done}


PLACES = ("checkpoint/offsets", "checkpoint/commits", "checkpoint/sources", "checkpoint/state", "checkpoint/rewind",
          "local", "spark", "errors", "results")  # fmt: skip
"""Where files may pile up. `results` and `errors` have a file per micro-batch that gave some: they are the output."""
SWEPT = ("spark", "checkpoint/state")
"""Below `spark.local.dir` six shuffle files per micro-batch, and the logs of the state store: Spark deletes them when
the JVM has collected what names them. In the state eight files per micro-batch, deleted at each maintenance."""


def batches(count: int, retained: int, directory: Path) -> list[dict[str, float]]:
    """Run so many micro-batches back to back; return what was there at every fiftieth of them."""
    expected = write(directory / "archive", 2, count * 10, 3_000)
    conf = {
        "spark.sql.streaming.minBatchesToRetain": str(retained),
        "spark.sql.streaming.stateStore.maintenanceInterval": "5s",  # Spark deletes its old files then, not in a minute
        "spark.sql.streaming.stateStore.minDeltasForSnapshot": "10",  # ... and those before its last copy but these
    }
    spark = session(directory, **conf)
    looks: list[dict[str, float]] = []
    try:
        query = start(spark, directory, 2, 10)
        while not query.await_termination(0.1):
            if query.progress.version >= (len(looks) + 1) * count // 50:
                spark.sparkContext._jvm.System.gc()  # Spark deletes shuffle files when what names them is collected
                with suppress(psutil.NoSuchProcess):  # a worker that ended meanwhile: looked at again
                    looks.append(look(directory, query.progress.version))
                    print(json.dumps(looks[-1]), flush=True)
    finally:
        spark.stop()
    if found(directory / "results") != expected:
        raise SystemExit("the results are not those of plain arithmetic")
    return looks


def uncopied(count: int, directory: Path) -> dict[str, int]:
    """Run so many micro-batches back to back in a JVM that has no time for Spark's maintenance of its state."""
    expected = write(directory / "archive", 2, count * 10, 3_000)
    spark = session(directory, **{"spark.sql.streaming.stateStore.maintenanceInterval": "1d"})
    try:
        query = start(spark, directory, 2, 10)
        query.await_termination()
        copies = [len(list((directory / "checkpoint/state/0" / shard).glob("*.zip"))) for shard in "01"]
    finally:
        spark.stop()
    if found(directory / "results") != expected:
        raise SystemExit("the results are not those of plain arithmetic")
    return {"micro_batches": query.progress.version, "restarts": query.progress.restores, "copies": min(copies)}


def look(directory: Path, version: int) -> dict[str, float]:
    """Count files, and the memory of the driver's Python, the JVM and the JVM's Python processes, in MB."""
    driver = psutil.Process()
    below = driver.children(recursive=True)
    jvms = [process for process in below if "java" in process.name()]
    pythons = [process for process in below if "python" in process.name()]
    files = {place: sum(len(names) for _, _, names in os.walk(directory / place)) for place in PLACES}
    return {
        "micro_batch": version,
        "driver_mb": driver.memory_info().rss >> 20,
        "jvm_mb": sum(process.memory_info().rss >> 20 for process in jvms),
        "workers": len(pythons),
        "largest_worker_mb": max((process.memory_info().rss >> 20 for process in pythons), default=0),
        "threads": driver.num_threads() + sum(process.num_threads() for process in jvms),
        "open_files": driver.num_fds() + sum(process.num_fds() for process in jvms),
        **files,
    }


def growing(looks: list[dict[str, float]], retained: int) -> list[str]:
    """Return what grew between the two halves of the looks after more micro-batches than Spark retains.

    Compared is the least of each half: logs and caches fill and are cut. Files have to stay within a tenth and 10,
    memory within a tenth and 20 MB. Results and errors are the output; the JVM's memory is bounded by Spark's settings.
    What Spark frees in sweeps goes up and down by more than that, and a half may have no look right after one: of that
    the first half's mean is compared.
    """
    later = [one for one in looks if one["micro_batch"] > 1.2 * retained + 10]
    half = len(later) // 2
    if not half:
        raise SystemExit(f"too few micro-batches for {retained} retained ones")
    grew = []
    for name in sorted(later[0].keys() - {"micro_batch", "results", "errors", "jvm_mb", "workers"}):
        before, last = [one[name] for one in later[:half]], min(one[name] for one in later[half:])
        first = round(sum(before) / half) if name in SWEPT else min(before)
        if last > first * 1.1 + (20 if name.endswith("_mb") else 10):
            grew.append(f"{name}: {first} -> {last}")
    return grew


def main(arguments: list[str]) -> int:
    """Run from the command line."""
    what, numbers = arguments[0], [int(one) for one in arguments[1:] if one.isdecimal()]
    with tempfile.TemporaryDirectory(prefix="rewind-sizes-") as made:
        directory = Path(made)
        if what == "partitions":
            print(json.dumps(partitions(*(numbers + [200, 64][len(numbers) :]), directory)))  # type: ignore[arg-type]
        elif what == "worker":
            case = arguments[1]
            usual = {"median": 500_000, "collect": 1_000, "open": 1_000_000}[case]
            print(json.dumps({"case": case, **worker(case, *(numbers or [usual]), directory)}))
        elif what == "uncopied":
            print(json.dumps(uncopied(*(numbers or [900]), directory)))
        elif what == "batches":
            count, retained = (numbers + [300, 100][len(numbers) :])[:2]
            grew = growing(batches(count, retained, directory), retained)
            print("\n".join(grew) or "nothing grew")
            return bool(grew)
        else:
            raise SystemExit(__doc__)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
