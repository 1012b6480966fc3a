"""The user's job for the command: found by `module:function`, run under a Spark session of the command's own.

The function gets the session and returns a pipeline that is fully said but not started, with its options::

    def job(spark):
        return stream(archive("in"), event_time="t", key="k").window(...).aggregate(...).options(route="partition")
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from backend.boundary import check_function, user_code
from backend.errors import HistoryLost, RewindError
from backend.sources.dataframe import is_ranked
from backend.spark.session.jvm import WORKER_TIME
from backend.texts import one_line
from recovery import ROOT
from recovery.changelog.rejected import with_rows
from recovery.commit.manifest import Manifest, check_same, query_id
from recovery.daemon import OPTION
from recovery.inspect.verify import PROBLEM, SOUND, Finding
from recovery.restore.build import restore_shard

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from backend.spark.job import Job
    from backend.spark.stream import Pipeline
    from recovery.inspect.checkpoint_view import Checkpoint, ShardView
    from recovery.jobs import ShardJob
    from recovery.listener import RestoreListener

RETAIN = 2
ARROW_ROWS = 200_000


@contextmanager
def session(master: str = "local[2]", *, conf: Mapping[str, str] | None = None) -> Iterator[SparkSession]:
    """Start Spark with this interpreter's workers, in UTC, and stop it at the end; leaves nothing behind.

    Args:
        master: Spark's master.
        conf: Further settings.
    """
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    root = str(ROOT)
    paths = [root, str(Path.cwd()), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    with tempfile.TemporaryDirectory(prefix="rewind-spark-", ignore_cleanup_errors=True) as scratch:
        wanted = {
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.driver.memory": "1g",
            WORKER_TIME[0]: WORKER_TIME[1],
            "spark.log.level": "ERROR",
            OPTION[0]: OPTION[1],
            "spark.driver.host": "localhost",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.extraJavaOptions": f"-Duser.timezone=UTC -Dderby.system.home={scratch}",
            "spark.sql.session.timeZone": "UTC",
            "spark.sql.warehouse.dir": f"{scratch}/warehouse",
            "spark.local.dir": f"{scratch}/local",
            **(conf or {}),
        }
        spark = SparkSession.builder.master(master).appName("rewind").config(map=wanted).getOrCreate()
        yield spark
        spark.stop()


def find_job(name: str) -> Callable[[SparkSession], object]:
    """Find the user's function.

    Args:
        name: `module:function`; the current directory is searched too.

    Raises:
        ValueError: There is no such function.
    """
    module, _, function = name.partition(":")
    if not function or not all(module.split(".")) or "/" in module or module.endswith(".py"):
        raise ValueError(f"job={name!r}: must be module:function, such as job:orders; a module is named, not its file")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Callable[[SparkSession], object] = getattr(import_module(module), function)
    except Exception as error:  # whatever the user's module raises while it is imported
        raise ValueError(f"job={name!r}: {type(error).__name__}: {one_line(str(error))}") from error
    check_function(f"job={name!r}", found, ("spark",))
    return found


def load_pipeline(name: str, spark: SparkSession) -> Pipeline:
    """Find the user's function (`find_job`) and call it.

    Raises:
        ValueError: There is no such function, or it gives something else than a pipeline.
        UserCodeFailed: It raised.
    """
    from backend.spark.stream import Pipeline

    function = find_job(name)
    with user_code(f"the function {name}"):
        pipeline = function(spark)
    if not isinstance(pipeline, Pipeline):
        raise ValueError(f"job={name!r}: gave {type(pipeline).__name__}, must give a pipeline that is not started")
    return pipeline


def job_of(pipeline: Pipeline, spark: SparkSession, location: str, manifest: Manifest) -> Job:
    """Make the job as `start` would on a checkpoint with this manifest, and under its session's settings.

    Raises:
        ManifestMismatch: The job is not the one of this checkpoint.
        SourceWentBack: A topic was deleted and made again.
    """
    from backend.kafka_client.identity import TopicIdentity
    from backend.spark.job import describe
    from backend.spark.session.settings import SESSION
    from backend.spark.start import StartOptions, build_job, known_sources, topics_of

    for name, value in manifest.entries.get("session", {}).items():
        spark.conf.set(SESSION[name], str(value))
    job = build_job(
        known_sources(pipeline, manifest, ""),
        spark,
        # where the job does not say it, `start` may have been given it: as the shards, it is the checkpoint's
        StartOptions(**{"route": manifest.entries.get("route", "key"), **pipeline.settings}),
        stored=manifest,
        first_offsets=lambda: manifest.entries["first_offsets"],
    )
    check_same(location, manifest, Manifest(job.shards, job.grouping, {**manifest.entries, **describe(job, {})}))
    topics_of(job, manifest)
    return job.pinned({topic: TopicIdentity(**one) for topic, one in (manifest.entries.get("topics") or {}).items()})


def shard_maker(checkpoint: Checkpoint, job: Job) -> Callable[[str, int], ShardJob]:
    """Give what makes the job of a shard, told the query's id and the shard: as `start` makes it."""
    from recovery.jobs import shard_job

    return partial(
        shard_job,
        checkpoint.local_dir,
        checkpoint.location,
        checkpoint.changelog_uri,
        job.operator,
        job.message_fields,
        RETAIN,
        None,
        owner=checkpoint.manifest.entries.get("query", ""),
        logged=job.logged,
    )


def restore_ahead(
    checkpoint: Checkpoint, pipeline: Pipeline, spark: SparkSession, listeners: Sequence[RestoreListener] = ()
) -> int:
    """Restore what needs it, with no query running, so that the next start finds it; give how many shards.

    Raises:
        RewindError: As the supervisor would end with.
    """
    from recovery.restore.all_shards import Restores, restore_shards

    job = job_of(pipeline, spark, checkpoint.location, checkpoint.manifest)
    restores = Restores(spark, job, checkpoint.location, shard_maker(checkpoint, job), listeners)
    return restore_shards(restores, "restored ahead of a start")


def verify_against_source(checkpoint: Checkpoint, pipeline: Pipeline, spark: SparkSession) -> Iterator[Finding]:
    """Rebuild every shard from the changelog and the source in a scratch directory, and prove it; touches nothing."""
    from recovery.restore.replay import logged_chunks, read_chunks, write_chunks

    job = job_of(pipeline, spark, checkpoint.location, checkpoint.manifest)
    histories, records = {}, {}
    for shard in checkpoint.shards:
        try:
            commit = checkpoint.committed(shard)
            if commit is not None:
                history = checkpoint.changelog.read(shard, commit)
                histories[shard], records[shard] = history, with_rows(history)
        except RewindError as error:  # the others are looked at all the same
            yield _wrong(f"shard {shard}", error)
    make = shard_maker(checkpoint, job)
    with tempfile.TemporaryDirectory(prefix="rewind-verify-", ignore_cleanup_errors=True) as scratch:
        try:
            names = write_chunks(spark, job, scratch, "chunks", records, ARROW_ROWS)
        except HistoryLost as error:
            yield _wrong(error.where, error)
            return
        for shard, history in histories.items():
            where = f"shard {shard}, commit {history.record.commit.name}"
            try:
                logged = logged_chunks(make(query_id(checkpoint.location), shard), records[shard])
                chunks = chain(read_chunks(scratch, names.get(shard, [])), logged)
                restored = restore_shard(history, chunks, job.operator, Path(scratch, f"shard-{shard}"))
            except RewindError as error:
                yield _wrong(where, error)
                continue
            text = (
                f"{restored.messages:,} replayed messages are the committed ones, in {restored.proofs} windows or panes"
            )
            yield Finding(SOUND, "against source", where, text)


def _wrong(where: str, error: RewindError) -> Finding:
    text = f"{error.what}: {error.why}" if error.why else error.what
    return Finding(PROBLEM, "against source", where, text, error.command)


def lag_of(job: Job, spark: SparkSession, shards: Sequence[ShardView]) -> dict[str, int]:
    """Give the messages that wait per source partition, as `<stream>/<partition>` -> count."""
    next_offset: dict[tuple[int, int], int] = {}
    for shard in shards:
        for stream, partition, position in shard.positions:
            known = next_offset.get((stream, partition), position.next_offset)
            next_offset[stream, partition] = min(known, position.next_offset)
    lag = {}
    for side in job.inputs:
        if is_ranked(side.source):  # only Spark knows what waits in a DataFrame's source
            continue
        for (topic, partition), (first, end) in side.source.offsets(spark).items():
            stream = job.streams[side.name, topic]
            lag[f"{stream}/{partition}"] = end - next_offset.get((stream, partition), first)
    return lag
