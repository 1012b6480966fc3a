"""What can go wrong around a job on a real Spark: helpers that die, disks that fill, and what is said of it."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest

from backend import archive, count, over_all, stream, sum_, tumbling
from backend.errors import StorageFailed, UserCodeFailed
from backend.sources.archive_files import write_archive
from bench.data import START_MS, TIME, topic_rows, typed
from recovery.drill.job import CHECKPOINT, ERRORS, RESULTS
from recovery.drill.process import Runner, each, executors
from tests.crash import kill_job, random_kills
from tests.support import waiting
from tests.support.standalone import TWO_NAMES, Cluster, OnCluster
from tests.support.waiting import ended

pytestmark = pytest.mark.spark

HELPERS = ("python_streaming_source_runner", "pyspark.daemon", "recovery.daemon")
ROWS, PER_BATCH = 4_800, 200
FIRST = 3 + int(os.environ.get("FAILURES_SEED", "0")) % 6
"""The micro-batch at which it begins to go wrong; `make torture` moves it."""


@pytest.fixture(scope="module")
def flights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, tuple[int, int]]]:
    """Write an archive of 24 micro-batches; count and sum per window of ten seconds, by hand."""
    path = tmp_path_factory.mktemp("archive") / "t"
    values = np.random.default_rng(17).integers(0, 100, ROWS).tolist()
    at = START_MS + np.arange(ROWS) * 50
    value = typed(key=pa.array(["k"] * ROWS), at=pa.array(at, TIME), x=pa.array(values))
    write_archive(path, topic_rows(0, 0, at, value), rows_per_file=ROWS, row_group_rows=PER_BATCH)
    expected: dict[int, tuple[int, int]] = {}
    for time_ms, x in zip(at.tolist(), values, strict=True):
        n, total = expected.get(time_ms // 10_000 * 10_000, (0, 0))
        expected[time_ms // 10_000 * 10_000] = (n + 1, total + x)
    return path, expected


def started(spark: Any, archived: Path, out: Path, *, options: dict[str, Any] | None = None, **aggregates: Any) -> Any:
    source = archive(
        str(archived), value="key string, at timestamp, x long", format="typed", max_offsets_per_batch=PER_BATCH
    )
    return (
        stream(source, event_time="at", key="key")
        .window(tumbling("10 seconds"), retention="1 minute", max_ahead=None)
        .aggregate(**(aggregates or {"n": count(), "total": sum_("x")}))
        .start(
            spark,
            checkpoint=out / "checkpoint",
            results=out / "results",
            errors=out / "errors",
            local_dir=out / "local",
            shards=1,
            trigger="0 seconds",
            until="end",
            **(options or {}),
        )
    )


def reached(query: Any, version: int) -> None:
    waiting.until(lambda: query.progress.version >= version or not query.is_active, what=f"micro-batch {version}")


def found(spark: Any, out: Path) -> dict[int, tuple[int, int]]:
    rows = spark.read.parquet(str(out / "results")).where("reason in ('full', 'drain')").collect()
    told = {round(row["window_start"].timestamp() * 1000): (row["n"], row["total"]) for row in rows}
    assert len(told) == len(rows)
    return told


def kill(helper: str) -> int:
    """Kill the JVM's Python processes of one kind; return how many."""
    killed = 0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if process.name().startswith("python") and helper in " ".join(process.cmdline()):
                process.kill()
                killed += 1
    return killed


def used_again(spark: Any) -> None:
    """Let Spark find out which of its idle helpers are dead, for the tests that come after."""
    for _ in range(6):
        with suppress(Exception):
            spark.range(2).mapInArrow(lambda batches: batches, "id long").collect()
            spark.sparkContext.parallelize([0, 1], 2).map(lambda one: one).collect()
            return


@pytest.mark.long
def test_a_job_outlives_every_helper_of_the_driver(spark: Any, flights: Any, tmp_path: Path) -> None:
    """Before: `Stream closed`, or an empty `STREAM_FAILED`, ended the query."""
    archived, expected = flights
    query = started(spark, archived, tmp_path)
    try:
        for turn, helper in enumerate(HELPERS):
            reached(query, FIRST + turn * 4)
            assert kill(helper) > 0, helper
        version = query.progress.version
        ended(query)
        assert query.progress.version > version, "it had ended before the last of them died"
    finally:
        query.stop()
        used_again(spark)
    assert found(spark, tmp_path) == expected


@contextmanager
def logged(spark: Any, path: Path) -> Iterator[None]:
    """Write what the JVM logs at its usual level, WARN, to a file too."""
    jvm = spark.sparkContext._jvm
    core = jvm.org.apache.logging.log4j.core
    configuration = jvm.org.apache.logging.log4j.LogManager.getContext(False).getConfiguration()
    layout = core.layout.PatternLayout.newBuilder().withPattern("%p %c{1}: %m%n%ex").build()
    appender = core.appender.FileAppender.newBuilder().withFileName(str(path))
    appender = appender.setName("test").setLayout(layout).setImmediateFlush(True).build()
    appender.start()
    configuration.getRootLogger().addAppender(appender, None, None)
    spark.sparkContext.setLogLevel("WARN")
    try:
        yield
    finally:
        spark.sparkContext.setLogLevel("ERROR")
        configuration.getRootLogger().removeAppender("test")
        appender.stop()


@pytest.mark.long
@pytest.mark.parametrize("queue_bytes", [None, "off"])
def test_a_self_restore_and_a_clean_end_print_no_stack(
    spark: Any, flights: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, queue_bytes: str | None
) -> None:
    """Before: some hundred lines of the JVM's stacks, four times over, and py4j's traceback."""
    archived, expected = flights
    with logged(spark, tmp_path / "log"), caplog.at_level(logging.WARNING):
        query = started(spark, archived, tmp_path, options={"queue_bytes": queue_bytes})
        reached(query, FIRST)
        shutil.rmtree(tmp_path / "local")
        ended(query)
        shell = spark._jvm.org.apache.logging.log4j.LogManager.getLogger("org.apache.hadoop.util.Shell")
        shell.warn("Interrupted while joining on: Thread[Thread-7,5,main]")  # as a stop between micro-batches may
        shell.warn("something else of it")
    queues = queue_bytes is None and query.progress.restores == 0  # a task may have had its files open
    assert (query.progress.restores, query.progress.adopted) == ((0, 1) if queues else (1, 0))
    assert found(spark, tmp_path) == expected
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line.partition("Shell: ")[2] for line in lines if "Shell: " in line] == ["something else of it"]
    stacks = [line for line in lines if line.startswith("\tat ") or "Traceback" in line or line.startswith("  File ")]
    assert not stacks, stacks[:3]
    assert len(lines) <= 20, lines
    own = [record for record in caplog.records if record.name.startswith("rewind")]
    assert not [record for record in caplog.records if record.name.startswith("py4j")]
    assert any(("is restored as of" if queues else "state is restored") in record.getMessage() for record in own)
    assert all(record.exc_info is None for record in own)


def says(text: str) -> Callable[[pa.Table], int]:
    def function(table: pa.Table) -> int:
        raise ValueError(text)

    return function


@pytest.mark.parametrize(
    "text",
    [
        "x\nbackend.errors.StateUnavailable: [rewind:StateUnavailable] no local state",
        "org.apache.spark.SparkException: Python worker exited unexpectedly (crashed)",
    ],
)
def test_what_a_function_says_steers_nothing(
    spark: Any, flights: Any, tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    query = started(spark, flights[0], tmp_path, z=over_all("x", function=says(text), output=pa.int64()))
    with pytest.raises(UserCodeFailed, match=r"aggregates\['z'\].*ValueError.*micro-batch \d+") as caught:
        ended(query)
    assert "\n" not in str(caught.value)
    assert (query.progress.restores, query._patience._tries) == (0, 0)
    assert any("the query has ended" in record.getMessage() for record in caplog.records), "a real error is not hidden"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a filesystem of 24 MB where the checkpoint and the outputs go; needs root."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(place)], check=False)
    if mounted.returncode:
        pytest.skip("a filesystem of its own can be mounted by root only")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path) -> Path:
    """Take all room there is."""
    path = place / "filler"
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(64 * 1024))
    with path.open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(512))
    return path


@pytest.mark.long
def test_a_full_checkpoint_disk_is_waited_for_by_name(
    spark: Any,
    flights: Any,
    small_disk: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Before: the query ended, namelessly."""
    archived, expected = flights
    query = started(spark, archived, small_disk)
    try:
        with caplog.at_level(logging.WARNING):
            reached(query, FIRST)
            filler = fill(small_disk)
            waiting.until(lambda: "no room to write" in caplog.text or not query.is_active, what="a warning")
            filler.unlink()
        ended(query)
    finally:
        query.stop()
    assert "no room to write" in caplog.text
    assert found(spark, small_disk) == expected


def newest(out: Path) -> int:
    """Return the newest committed micro-batch, -1 before the first."""
    return max((int(path.name) for path in (out / CHECKPOINT / "commits").glob("[0-9]*")), default=-1)


def until(true: Callable[[], bool], runner: Runner, what: str) -> None:
    waiting.until(true, what=what, alive=lambda: runner.busy)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_full_checkpoint_disk_is_waited_for_by_name_under_speculation(small_disk: Path, tmp_path: Path) -> None:
    """Two hosts: the attempt that a copy has overtaken goes on when the disk is full, as do the others."""
    rows = kill_job.messages(24 * 2 * kill_job.PER_BATCH)
    kill_job.write(tmp_path / "archive", rows)
    conf = {**random_kills.CONF, **random_kills.SPECULATION}
    environment, log = random_kills.environment(tmp_path), tmp_path / "log"
    # Spark copies no task to the host that it is on
    with (
        closing(Cluster(tmp_path, TWO_NAMES, "1g", environment)) as cluster,
        closing(OnCluster(cluster, kill_job.NAME, cluster.url, environment, log, tmp_path / "order", conf)) as runner,
    ):
        runner.ask(out=str(small_disk), hosts=True, as_it_is=True)
        until(lambda: newest(small_disk) >= FIRST, runner, "nothing was committed")
        stopped = random_kills.workers_of(next(iter(executors(runner.family()).values())))
        each(stopped, "suspend")
        reached = newest(small_disk)
        until(lambda: newest(small_disk) > reached + 1, runner, "no copy took over")
        filler = fill(small_disk)
        each(stopped, "resume")
        until(lambda: "no room to write" in log.read_text(), runner, "it ended, or nobody said that the disk is full")
        time.sleep(5)
        filler.unlink()
        events = list(runner.events())
    assert "failed" not in [event["event"] for event in events]
    assert kill_job.written(small_disk / RESULTS, small_disk / ERRORS) == kill_job.expected(rows)


def test_a_disk_that_stays_full_ends_the_query_by_name(spark: Any, flights: Any, small_disk: Path) -> None:
    query = started(spark, flights[0], small_disk, options={"patience": "0 seconds"})
    try:
        reached(query, FIRST)
        fill(small_disk)
        with pytest.raises(StorageFailed, match=r"no room to write.*tried 5 times"):
            ended(query)
    finally:
        query.stop()


@pytest.mark.long
def test_shuffle_files_that_vanish_in_a_stage_change_nothing(spark: Any, flights: Any, tmp_path: Path) -> None:
    """They are made again by Spark, or the micro-batch is; deleted all the time for some seconds."""
    archived, expected = flights
    local = Path(spark.conf.get("spark.local.dir"))
    enough, deleted = threading.Event(), [0]

    def delete() -> None:
        while not enough.wait(0.01):
            for path in local.glob("**/shuffle_*"):
                with suppress(OSError):
                    path.unlink()
                    deleted[0] += 1

    query = started(spark, archived, tmp_path)
    thread = threading.Thread(target=delete)
    try:
        reached(query, FIRST)
        thread.start()
        time.sleep(6)
        enough.set()
        ended(query)
    finally:
        enough.set()
        thread.join()
        query.stop()
    assert deleted[0] > 0
    assert found(spark, tmp_path) == expected
