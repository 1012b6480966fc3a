"""The runs of a drill, in a process of their own that `recovery.drill.drill` starts, tells what to run, and kills.

Its argument is JSON, `{"job": ..., "master": ..., "conf": {...}}`: a `module:function`, Spark's master, and settings of
Spark. It is asked on standard input, one JSON object per line: `{"out": ..., "aged": ..., "hosts": ...,
"alternate": ..., "zombie": ..., "as_it_is": ..., "options": ...}`. What happens is told on standard output, likewise,
with the time since the epoch: `launched`, `ready` (Spark is up), then per run `begun`, `aged` (where its sources begin
now), `started`, `progress`, `restoring`, `suspended`, `restored`, `fetched` (a task took its shard's state from
snapshots, which is no restore), `adopted` (a shard that queued its input has caught up), `ended` or `failed`, and
`idle`.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from backend.errors import HistoryLost, RewindError
from backend.sources.dataframe import is_ranked
from recovery.attempt import positions_of, run_attempt
from recovery.commit.manifest import read_manifest
from recovery.commit.pointer import Pointer, state_of
from recovery.drill.alternation import AlternatingSink, Alternation
from recovery.failures import read
from recovery.inspect.checkpoint_view import Checkpoint
from recovery.inspect.user_job import job_of, load_pipeline, session, shard_maker
from recovery.restore.replay import read_pointers
from recovery.restore.tries import FETCHES
from recovery.share import ShardInput

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from backend.batch import SourcePartition
    from backend.sources import BySpark, Direct, OffsetRange, Source, TopicPartition
    from backend.spark.stream import Pipeline
    from recovery.listener import Restoring

CHECKPOINT, RESULTS, ERRORS, LOCAL, HOSTS, ALTERNATION = (
    "checkpoint",
    "results",
    "errors",
    "local",
    "hosts",
    "alternation",
)
DEFAULT_JOB = "recovery.drill.job:departures"
DATA = "REWIND_DRILL_DATA"
OFFSETS = "REWIND_DRILL_OFFSETS"
VALUE = "origin string, delay double, scheduled timestamp"
"""What a flight is as DDL."""
SNAPSHOT_EVERY = 3


def departures(spark: SparkSession) -> Pipeline:
    """Make the drill's own job."""
    from backend import archive

    data = archive(os.environ[DATA], value=VALUE, max_offsets_per_batch=int(os.environ.get(OFFSETS, "500")))
    return by_hour(data, retention="6 hours", max_ahead=None)


def by_hour(flights: Any, **window: Any) -> Pipeline:
    """Make the job of drill and demo: departures per airport and hour, full-state and incremental aggregates.

    Args:
        flights: A source of `VALUE`.
        window: Options of the windows.
    """
    from backend import count, max_, mean, median, stream, tumbling

    return (
        stream(flights, event_time="scheduled", key="origin")
        .window(tumbling("1 hour"), **window)
        .aggregate(flights=count(), mean=mean("delay"), worst=max_("delay"), typical=median("delay"))
        .options(route="partition")
    )


class Teller:
    """A restore listener that tells the parent process.

    The seconds that it tells are wall clock since the first shard's restore began: reading the source included.
    """

    def __init__(self) -> None:
        self._began: float | None = None

    def start(self, restoring: Restoring) -> None:
        """Tell why and how; a task that takes what was restored restores nothing."""
        if restoring.how in FETCHES:
            return
        self._began = self._began or time.monotonic()
        ranges = [[*key, *span] for key, span in sorted(restoring.ranges.items())]
        tell("restoring", shard=restoring.shard, how=restoring.how, why=restoring.why, ranges=ranges)

    def batch(self, restoring: Restoring, end: Mapping[SourcePartition, int], records: int, length: int) -> None:
        """Leave the details out."""

    def suspended(self, restoring: Restoring, why: str) -> None:
        """Tell that it did not work."""
        tell("suspended", shard=restoring.shard, why=why)

    def end(self, restoring: Restoring, records: int, length: int, seconds: float) -> None:
        """Tell the totals."""
        event = "fetched" if restoring.how in FETCHES else "restored"
        passed = time.monotonic() - self._began if self._began is not None and event == "restored" else seconds
        tell(event, shard=restoring.shard, how=restoring.how, records=records, bytes=length, seconds=passed)


_BECOMES = ("remembering", "pinned", "looking_once")
"""Methods of a source, if it has them, which give the source that it becomes."""


@dataclass(frozen=True)
class Wrapped:
    """A source that is another one in all that it does not change; it stays around what that source becomes."""

    source: Source

    def __getattr__(self, name: str) -> Any:
        """Be the source in everything else; where that becomes another one, stay around it."""
        if name not in _BECOMES:
            return getattr(self.source, name)
        become = getattr(self.source, name, None)
        return lambda *given: self if become is None else replace(self, source=become(*given))


@dataclass(frozen=True)
class Aged(Wrapped):
    """A source that no longer has the offsets before `share` of what it holds: what retention does to a topic."""

    share: float

    def offsets(self, spark: SparkSession) -> dict[TopicPartition, OffsetRange]:
        """Give what is left."""
        return {
            key: (first + int((end - first) * self.share), end)
            for key, (first, end) in self.source.offsets(spark).items()
        }

    def batch(self, spark: SparkSession, ranges: Mapping[TopicPartition, OffsetRange]) -> Any:
        """Refuse what is gone, as every source does."""
        self._check_available(spark, ranges)
        return cast("BySpark", self.source).batch(spark, ranges)

    def pieces(
        self, spark: SparkSession, ranges: Mapping[TopicPartition, Sequence[OffsetRange]], names: Any = None
    ) -> Any:
        """Refuse what is gone, of a source that is read in the Python workers."""
        self._check_available(spark, {key: (own[0][0], own[-1][1]) for key, own in ranges.items()})
        return cast("Direct", self.source).pieces(spark, ranges, names)

    def _check_available(self, spark: SparkSession, ranges: Mapping[TopicPartition, OffsetRange]) -> None:
        here = self.offsets(spark)
        for key, (start, end) in sorted(ranges.items()):
            if start < end and start < here[key][0]:
                raise HistoryLost(
                    "the source does not hold the offsets that a replay needs",
                    where=f"{key[0]} partition {key[1]}",
                    why=f"offsets from {start} wanted, the earliest is {here[key][0]}",
                    command="rewind reset <checkpoint> accepts the loss and begins anew",
                )


_out: list[TextIO] = []
"""Where events go once `telling_apart` was called."""


def telling_apart() -> None:
    """Keep standard output for events: what else writes there, such as a job's `print`, goes to standard error."""
    _out[:] = [os.fdopen(os.dup(1), "w", encoding="utf-8")]
    os.dup2(2, 1)
    sys.stdout = sys.stderr


def tell(event: str, **details: object) -> None:
    """Write one event, a line in one piece: listeners, sinks and the main thread all tell, and `print` writes twice."""
    out = _out[0] if _out else sys.stdout
    out.write(json.dumps({"event": event, "at": time.time(), **details}) + "\n")
    out.flush()


def said(error: Exception) -> str:
    """Return one line about an error; a named one, of a task too, begins with its code."""
    found = read(error)
    return str(found.error) if isinstance(found.error, RewindError) else found.text


def aged(pipeline: Pipeline, share: float) -> Pipeline:
    """Give a pipeline whose sources have aged.

    Raises:
        ValueError: One is a DataFrame: nothing of it is read again, so it cannot age.
    """
    if any(is_ranked(side.source) for side in pipeline.streams):
        raise ValueError("job: it reads a DataFrame, of which nothing is read again: it cannot age")
    return replace(pipeline, streams=tuple(replace(side, source=Aged(side.source, share)) for side in pipeline.streams))


def of_the_drill(pipeline: Pipeline) -> Pipeline:
    """Return a job without its own places, and without what brings state back otherwise than a restore does.

    Its changelog is claimed by the query that writes to it first, which must not be a drill's.
    """
    return pipeline.options(changelog=None, snapshots="off", standby=0, queue_bytes=None, name=None)


def run(spark: SparkSession, pipeline: Pipeline, out: Path, asked: Mapping[str, Any]) -> None:
    """Run the job to the end of what its sources hold, telling of progress.

    Args:
        spark: The session.
        pipeline: The job.
        out: The run's directory.
        asked: `hosts`: executors have a disk each, and take shards from each other. `alternate`: there are two of them,
            and each runs every other micro-batch alone. `options`: of the query's start, before those that are chosen
            here.
    """
    alternating = Alternation(spark, out / ALTERNATION) if asked.get("alternate") else None
    output: dict[str, Any] = {"results": out / RESULTS, "errors": out / ERRORS}
    if alternating is not None:
        output = {"sink": AlternatingSink(out / RESULTS, out / ERRORS, alternating)}
    own_disks: dict[str, Any] = {"local_dir": f"$SPARK_EXECUTOR_DIRS/{LOCAL}", "snapshots": SNAPSHOT_EVERY}
    disks = own_disks if asked.get("hosts") else {"local_dir": out / LOCAL}
    chosen = {**output, **disks, "until": "end", "trigger": "0 seconds", **asked.get("options", {})}
    query = pipeline.start(spark, checkpoint=out / CHECKPOINT, listeners=(Teller(),), **chosen)
    run = str(query.query.runId)
    tell("started", run=run)
    seen, adopted, ended = -1, 0, False
    try:
        while not ended:
            ended = query.await_termination(0.05)
            progress = query.progress
            if progress.version > seen:
                seen = progress.version
                tell("progress", version=seen, rows=progress.rows, results=progress.results)
            if progress.adopted > adopted:
                adopted = progress.adopted
                tell("adopted", version=seen, run=str(query.query.runId), restores=progress.restores)
    finally:
        if alternating is not None:
            alternating.end()
    # a killed attempt leaves a record of its own in the changelog: only Spark's state says which one is committed
    checkpoint = str(out / CHECKPOINT)
    manifest = read_manifest(checkpoint)
    pointers = read_pointers(spark, checkpoint, manifest.shards) if manifest is not None else {}
    commits = {str(shard): state_of(pointer).commit.name for shard, pointer in pointers.items()}
    same = run == str(query.query.runId)
    tell("ended", version=query.progress.version, restores=query.progress.restores, commits=commits, same=same)


BACK = 2
"""How many commits a zombie is behind."""


def late_attempts(spark: SparkSession, pipeline: Pipeline, out: Path) -> dict[int, str]:
    """Let an old attempt of every shard run again, and give what became of each: the code of an error, or `ran`."""
    checkpoint = Checkpoint(str(out / CHECKPOINT), out / LOCAL)
    job = job_of(pipeline, spark, checkpoint.location, checkpoint.manifest)
    make = partial(shard_maker(checkpoint, job), checkpoint.query_id)
    outcomes = {}
    for shard in checkpoint.shards:
        commit = checkpoint.committed(shard)
        if commit is None:
            continue
        ancestors = checkpoint.changelog.read(shard, commit).record.ancestors
        if len(ancestors) < BACK:
            continue
        old = checkpoint.changelog.read(shard, ancestors[BACK - 1]).record
        pointer = Pointer(shard, old.commit, old.parent, 0, "", old.positions, old.bounds, "")
        given = ShardInput(old.time_ms, None, positions_of(pointer))
        try:
            run_attempt(make(shard), pointer, old.commit.version + 1, lambda before, it=given: it)  # type: ignore[misc]
            outcomes[shard] = "ran"
        except RewindError as error:
            outcomes[shard] = error.code
    return outcomes


def serve(spark: SparkSession, job: str, asked: Mapping[str, Any]) -> None:
    """Do one thing that was asked; what fails is told."""
    out = Path(asked["out"])
    tell("begun")
    try:
        pipeline = load_pipeline(job, spark)
        if not asked.get("as_it_is"):
            pipeline = of_the_drill(pipeline)
        if asked.get("zombie"):
            tell("zombies", outcomes=late_attempts(spark, pipeline, out))
            return
        if asked.get("aged"):
            pipeline = aged(pipeline, float(asked["aged"]))
            left = {key: first for side in pipeline.streams for key, (first, _) in side.source.offsets(spark).items()}
            tell("aged", left={f"{topic} partition {number}": first for (topic, number), first in left.items()})
        run(spark, pipeline, out, asked)
    except Exception as error:
        traceback.print_exc()  # to the log; the parent says one line
        tell("failed", error=said(error))
    finally:
        for query in spark.streams.active:
            query.stop()


def main() -> int:
    """Do what is asked until nothing more comes."""
    given = json.loads(sys.argv[1])
    telling_apart()
    tell("launched")
    with session(given["master"], conf=given["conf"]) as spark:
        tell("ready")
        for line in sys.stdin:
            serve(spark, given["job"], json.loads(line))
            tell("idle")
    return 0


if __name__ == "__main__":
    sys.exit(main())
