"""Jobs on two executors with a disk each: `python -m tests.support.moving_job <directory> <rows> <job>`.

`alternate` has one shard, and its tasks run on the other executor at every micro-batch: a task that only waits holds
the slot of the one that had the last turn. `kill` has two shards, and both executors die in turn, with their disks. In
`standby` there are copies of both shards on both disks when one executor dies. `placed`, alone, has them too, and an
executor dies between two micro-batches, where Spark waits long for it; in `returned`, alone, too, without copies, and a
shard is given back to the one that comes. What came of it is told on standard output, one JSON object per line.
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
from backend.spark.session.jvm import Executors
from recovery.drill.alternation import Alternation, until
from recovery.drill.job import tell
from recovery.drill.process import each, executors, inside
from recovery.inspect.user_job import session
from recovery.supervise import placement

VALUE = "key string, at timestamp, x long"
WINDOW = "10 seconds"
RETENTION = "1 hour"
SNAPSHOT_EVERY = 4
DISK = "state"
KILLS = (2, 5)
"""Micro-batches in which an executor dies; each time another one."""
FIRST = 2
"""Micro-batches of `placed` before it is started with copies."""
COPIED_BY = 5
"""Micro-batches, of which a whole snapshot was published, before the copies are waited for."""


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
    """Give the bytes of the newest whole snapshot of shard 0; 0 before there is one."""
    manifests = sorted(out.glob("checkpoint/rewind/snapshots/0/*.full.json"))
    body = json.loads(manifests[-1].read_text())["body"] if manifests else {"files": []}
    return sum(file["length"] for file in body["files"])


def start(spark: Any, data: Path, out: Path, sink: ParquetSink, shards: int, rows: int, **options: Any) -> Any:
    source = archive(str(data), value=VALUE, format="typed", max_offsets_per_batch=rows)
    windows = stream(source, event_time="at", key="key").window(
        tumbling(WINDOW), retention=RETENTION, max_ahead=None, policies=policies(late="off")
    )
    return windows.aggregate(n=count(), total=sum_("x"), typical=median("x")).start(
        spark, checkpoint=out / "checkpoint", sink=sink, shards=shards, trigger="0 seconds", until="end",
        local_dir=f"$SPARK_EXECUTOR_DIRS/{DISK}", snapshots=SNAPSHOT_EVERY, **options,
    )  # fmt: skip


def alternate(spark: Any, data: Path, out: Path, rows: int) -> None:
    turns = Alternation(spark, out / "turns")
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
    places = Executors(spark)
    until(lambda: len(places.executors()) >= 2, "no second executor")
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


def standby(spark: Any, data: Path, out: Path, rows: int) -> None:
    known = executors(psutil.Process().children(recursive=True))

    def copied() -> bool:
        mine = json.loads((out / "checkpoint" / "metadata").read_text())["id"]
        return all((Path(disk) / DISK / mine / shard / "CURRENT").exists() for disk in known for shard in "01")

    def before() -> str:
        if len(sink.published) == COPIED_BY:
            until(copied, "the disks have no copies of both shards")
        return both(spark)

    sink = Reporting(out, before)
    query = start(spark, data, out, sink, 2, rows, standby=1)
    run = str(query.query.runId)
    version = strike(query, out, known, COPIED_BY + 1)
    new: dict[str, psutil.Process] = {}

    def committed() -> bool:
        """Hold the executor that is to replace the dead one meanwhile: the other one, with its copy, takes over."""
        for disk, executor in executors(psutil.Process().children(recursive=True)).items():
            if disk not in known and disk not in new:
                executor.suspend()
                new[disk] = executor
        return (out / "checkpoint" / "commits" / str(version)).exists() or not query.is_active

    try:
        until(committed, f"micro-batch {version} is not committed after a death")
    finally:
        each(list(new.values()), "resume")
    query.await_termination()
    tell("killed", version=version, copied=query.progress.copied)
    tell("ended", job="standby", same=run == str(query.query.runId), restores=query.progress.restores)


def placed(spark: Any, data: Path, out: Path, rows: int) -> None:
    """Kill an executor between two micro-batches, where Spark would hold its shard's task back for a minute.

    The query was started without copies before, and is started with them again.
    """
    without = Reporting(out)
    first = start(spark, data, out, without, 2, rows, standby=0)
    until(lambda: len(without.published) >= FIRST, "nothing was published")
    first.stop()
    known, places = executors(psutil.Process().children(recursive=True)), Executors(spark)
    begun = places.executors()
    told: dict[str, Any] = {}

    def where() -> list[str | None]:
        found = (places.place(query.query, shard) for shard in (0, 1))
        return [one.executor if one is not None else None for one in found]

    def before() -> str:
        if len(sink.published) == COPIED_BY:
            told["before"], told["died_after"] = where(), sink.published[-1][0]
            executor = known[sorted(known)[0]]
            each([*executor.children(recursive=True), executor], "kill")
            until(lambda: not begun <= places.executors(), "the executor does not die")
            told["left"] = sorted(begun & places.executors())
            until(lambda: {*where()} <= {*told["left"]}, "no shard was sent to the executor that is left")
        elif len(sink.published) == COPIED_BY + 1:
            told["after"] = where()
        return ""

    sink = Reporting(out, before)
    query = start(spark, data, out, sink, 2, rows, standby=1)
    query.await_termination()
    restores = first.progress.restores + query.progress.restores
    tell("ended", job="placed", restores=restores, copied=[first.progress.copied, query.progress.copied], **told)


def returned(spark: Any, data: Path, out: Path, rows: int) -> None:
    """Kill an executor between two micro-batches, without copies, and go on when its shard is where another one came.

    Its disk goes with it.

    A new executor counts as warm at once here: that no copy can be made of a state without a snapshot is what holds.
    """
    placement.WARM_S = 0.0
    known, places = executors(psutil.Process().children(recursive=True)), Executors(spark)
    begun = places.executors()
    told: dict[str, Any] = {}

    def where() -> list[str | None]:
        found = (places.place(query.query, shard) for shard in (0, 1))
        return [one.executor if one is not None else None for one in found]

    def before() -> str:
        if len(sink.published) == FIRST:
            disk = sorted(known)[0]
            family = [*known[disk].children(recursive=True), known[disk]]
            each(family, "kill")
            psutil.wait_procs(family, timeout=10)
            # a worker of Spark's gives the directory to the next executor: what was staged there would be a whole copy
            shutil.rmtree(Path(disk) / DISK)
            until(lambda: not begun <= places.executors(), "the executor does not die")
            [told["left"]] = begun & places.executors()
            until(lambda: {*where()} == {told["left"]}, "no shard was sent to the executor that is left")
        elif len(sink.published) == FIRST + 1:
            told["taken"] = where()  # later, a new executor may have been warm for long enough
        elif len(sink.published) == COPIED_BY:
            until(lambda: len({*where()}) == 2, "no shard was given back")
            told["returned"], told["returned_after"] = where(), sink.published[-1][0]
        return ""

    sink = Reporting(out, before)
    query = start(spark, data, out, sink, 2, rows)
    run = str(query.query.runId)
    query.await_termination()
    same = run == str(query.query.runId)
    tell("ended", job="returned", same=same, restores=query.progress.restores, copied=query.progress.copied, **told)


def main(home: Path, rows: int, job: str) -> None:
    alone = {"placed": placed, "returned": returned}
    conf = {
        "spark.local.dir": str(home / "hosts"),
        "spark.executor.memory": "512m",
        # but for `alone` the executor that ran a task before is held: do not wait for it
        "spark.locality.wait": "60s" if job in alone else "0s",
        "spark.shuffle.io.maxRetries": "1",  # of an executor that is dead: not four times five seconds
        "spark.shuffle.io.retryWait": "200ms",
    }
    with session("local-cluster[2,1,1024]", conf=conf) as spark:
        if job in alone:
            (home / job).mkdir()
            both(spark)
            alone[job](spark, home / "many", home / job, rows)
            return
        for name in ("alternate", "kill", "standby"):
            (home / name).mkdir()
        alternate(spark, home / "few", home / "alternate", rows)
        kill(spark, home / "many", home / "kill", rows)
        both(spark)
        standby(spark, home / "many", home / "standby", rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
