"""Jobs on two executors with a disk each, in a process of their own: `python -m tests.support.moving_job <directory>`.

`alternate` has one shard, and its tasks run on the other executor at every micro-batch: a task that only waits holds
the slot of the one that had the last turn. `kill` has two shards, and both executors die in turn, with their disks.
What came of it is told on standard output, one JSON object per line.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from backend import archive, count, median, policies, stream, sum_, tumbling
from backend.sinks.parquet import ParquetSink
from recovery.drill_job import tell
from recovery.drill_process import each, executors, inside
from recovery.drill_turns import Turns, until
from recovery.user_job import session

VALUE = "key string, at timestamp, x long"
WINDOW = "10 seconds"
RETENTION = "1 hour"
SNAPSHOT_EVERY = 4
DISK = "state"
KILLS = (2, 5)
"""Micro-batches in which an executor dies; each time another one."""


class Reporting(ParquetSink):
    """Tells of each micro-batch that is published; `before` is called before its tasks run."""

    def __init__(self, out: Path, before: Callable[[], str] = lambda: "") -> None:
        super().__init__(out / "results", out / "errors")
        self.out, self.before = out, before
        self.published: list[tuple[int, float]] = []

    def publish(self, frames: Any, version: int) -> list[dict[str, Any]]:
        elsewhere = self.before()
        shards = super().publish(frames, version)
        self.published.append((version, time.monotonic()))
        metrics = [shard["metrics"] for shard in shards]
        tell("published", version=version, held=elsewhere, shards=metrics, state_bytes=state_bytes(self.out))
        return shards


def state_bytes(out: Path) -> int:
    """Give the bytes of the newest whole package of shard 0; 0 before there is one."""
    manifests = sorted(out.glob("checkpoint/rewind/snapshots/0/*.full.json"))
    body = json.loads(manifests[-1].read_text())["body"] if manifests else {"files": []}
    return sum(file["length"] for file in body["files"])


def start(spark: Any, data: Path, out: Path, sink: ParquetSink, shards: int, rows: int) -> Any:
    source = archive(str(data), value=VALUE, format="typed", max_offsets_per_batch=rows)
    windows = stream(source, event_time="at", key="key").window(
        tumbling(WINDOW), retention=RETENTION, max_ahead=None, policies=policies(late="off")
    )
    return windows.aggregate(n=count(), total=sum_("x"), typical=median("x")).start(
        spark, checkpoint=out / "checkpoint", sink=sink, shards=shards, trigger="0 seconds", until="end",
        local_dir=f"$SPARK_EXECUTOR_DIRS/{DISK}", snapshots=SNAPSHOT_EVERY,
    )  # fmt: skip


def alternate(spark: Any, data: Path, out: Path, rows: int) -> None:
    turns = Turns(spark, out / "turns")
    query = start(spark, data, out, Reporting(out, turns.next), 1, rows)
    run = str(query.query.runId)
    try:
        query.await_termination()
    finally:
        turns.end()
    tell("ended", job="alternate", same=run == str(query.query.runId), restores=query.progress.restores)


def strike(query: Any, out: Path, known: dict[str, psutil.Process], at: int) -> int:
    """Kill an executor that is inside a micro-batch, from this one on, and lose its disk; give the micro-batch."""
    version = at

    def struck() -> bool:
        nonlocal version
        if not query.is_active:
            raise RuntimeError(f"it ended before micro-batch {at}: {query.exception}")
        while (out / "checkpoint" / "commits" / str(version)).exists():
            version += 1
        for disk, executor in known.items():
            if inside(Path(disk) / DISK, version, query.query.id):  # the job before left files of its own there
                each([*executor.children(recursive=True), executor], "kill")
                shutil.rmtree(Path(disk) / DISK, ignore_errors=True)
                del known[disk]
                return True
        return False

    until(struck, f"no executor was inside micro-batch {at}")
    return version


def both(spark: Any) -> str:
    """Wait until both executors are there: a new one takes over from the next to die, not only the other old one."""
    driver = 1
    until(lambda: spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() - driver >= 2, "no second executor")
    return ""


def kill(spark: Any, data: Path, out: Path, rows: int) -> None:
    sink = Reporting(out, partial(both, spark))
    query = start(spark, data, out, sink, 2, rows)
    run = str(query.query.runId)
    known = executors(psutil.Process().children(recursive=True))
    for at in KILLS:
        version = strike(query, out, known, at)
        before, died = len(sink.published), time.monotonic()
        until(lambda before=before: len(sink.published) > before or not query.is_active, "nothing was published")
        tell("killed", version=version, without_results_s=sink.published[-1][1] - died, left=len(known))
    query.await_termination()
    tell("ended", job="kill", same=run == str(query.query.runId), restores=query.progress.restores)


def main(home: Path, rows: int) -> None:
    conf = {
        "spark.local.dir": str(home / "hosts"),
        "spark.executor.memory": "512m",
        "spark.locality.wait": "0s",  # the executor that ran a task before is held: do not wait for it
        "spark.shuffle.io.maxRetries": "1",  # of an executor that is dead: not four times five seconds
        "spark.shuffle.io.retryWait": "200ms",
    }
    with session("local-cluster[2,1,1024]", conf=conf) as spark:
        for name in ("alternate", "kill"):
            (home / name).mkdir()
        alternate(spark, home / "few", home / "alternate", rows)
        kill(spark, home / "many", home / "kill", rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
