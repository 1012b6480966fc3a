"""Spark forks its Python workers from the daemon that has imported what they need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest

from backend import archive, count, stream, sum_, tumbling
from backend.sources.archive_files import write_archive
from backend.spark.session.settings import apart
from bench.data import START_MS, TIME, topic_rows, typed
from tests.support.waiting import ended, until

pytestmark = pytest.mark.spark


def test_workers_of_both_kinds_come_from_the_daemon(spark: Any) -> None:
    def of_arrow(batches: Iterator[Any]) -> Iterator[Any]:
        import gc

        import psutil
        import pyarrow as pa

        for _ in batches:
            parent = psutil.Process().parent()
            told = {"parent": [" ".join(parent.cmdline())], "pid": [parent.pid], "frozen": [gc.get_freeze_count()],
                    "pool": [pa.default_memory_pool().backend_name]}  # fmt: skip
            yield pa.RecordBatch.from_pydict(told)

    def of_rdd(_: Iterator[int]) -> Iterator[tuple[int, int]]:
        import gc
        import os

        yield os.getppid(), gc.get_freeze_count()

    ours = apart(spark, 1, 100)  # with the settings of a query
    fields = "parent string, pid long, frozen long, pool string"
    (row,) = ours.range(1).repartition(1).mapInArrow(of_arrow, fields).collect()
    ((pid, frozen),) = spark.sparkContext.parallelize([0], 1).mapPartitions(of_rdd).collect()
    assert "-m recovery.daemon" in row["parent"]
    assert row["frozen"] > 100_000, "the worker shares what the daemon has imported"
    assert frozen > 100_000
    assert row["pool"] == "system", "it keeps what it frees"
    assert row["pid"] == pid, "one daemon: with Spark's own settings SQL's workers have one of their own"


def of_the_daemon(process: psutil.Process) -> bool:
    with suppress(psutil.Error):  # gone, or dead and not yet waited for
        return "recovery.daemon" in process.cmdline()
    return False


def killed() -> list[psutil.Process]:
    """Kill the daemons, and one worker of each, which have their command line; give the workers that are left."""
    family = [process for process in psutil.Process().children(recursive=True) if of_the_daemon(process)]
    workers = {process.ppid(): process for process in family if process.ppid() in {one.pid for one in family}}
    daemons = [process for process in family if process.pid in workers]
    for process in [*daemons, *workers.values()]:
        process.kill()
    psutil.wait_procs(daemons, timeout=30)
    assert daemons
    return [process for process in family if process not in [*daemons, *workers.values()]]


def used_again(spark: Any) -> None:
    """Let Spark find out which of its idle workers are dead: `local[2]` tries no task again."""
    for _ in range(4):
        with suppress(Exception):
            spark.range(2).mapInArrow(lambda batches: batches, "id long").collect()
            spark.sparkContext.parallelize([0, 1], 2).map(lambda one: one).collect()
            return


@pytest.mark.long
def test_a_job_outlives_the_daemons_and_a_worker_of_each(spark: Any, tmp_path: Path) -> None:
    rows, per_batch = 6_000, 400
    random = np.random.default_rng(31)
    keys, values = random.integers(0, 7, rows).tolist(), random.integers(0, 100, rows).tolist()
    at = START_MS + np.arange(rows) * 50
    value = typed(key=pa.array([f"k{key}" for key in keys]), at=pa.array(at, TIME), x=pa.array(values))
    write_archive(tmp_path / "archive", topic_rows(0, 0, at, value), rows_per_file=rows, row_group_rows=per_batch)
    expected: dict[tuple[int, str], tuple[int, int]] = {}
    for time_ms, key, x in zip(at.tolist(), keys, values, strict=True):
        window = (time_ms // 10_000 * 10_000, f"k{key}")
        n, total = expected.get(window, (0, 0))
        expected[window] = (n + 1, total + x)

    source = archive(
        str(tmp_path / "archive"),
        value="key string, at timestamp, x long",
        format="typed",
        max_offsets_per_batch=per_batch,
    )
    query = (
        stream(source, event_time="at", key="key")
        .window(tumbling("10 seconds"), retention="1 minute", max_ahead=None)
        .aggregate(n=count(), total=sum_("x"))
        .start(
            spark,
            checkpoint=tmp_path / "checkpoint",
            results=tmp_path / "results",
            errors=tmp_path / "errors",
            local_dir=tmp_path / "local",
            shards=2,
            trigger="0 seconds",
            until="end",
        )
    )
    left: list[psutil.Process] = []
    try:
        fourth = tmp_path / "checkpoint" / "commits" / "3"
        until(fourth.exists, what="four micro-batches", alive=lambda: query.is_active)
        version = query.progress.version
        left = killed()
        ended(query)
        assert query.progress.version > version, "it had ended before anybody died"
    finally:
        query.stop()
        for worker in left:  # as long as they are idle Spark does not notice that their daemon is gone
            with suppress(psutil.Error):
                worker.kill()
        used_again(spark)
    found = spark.read.parquet(str(tmp_path / "results")).where("reason in ('full', 'drain')").collect()
    told = {(round(row["window_start"].timestamp() * 1000), row["key"]): (row["n"], row["total"]) for row in found}
    assert len(found) == len(told)
    assert told == expected
