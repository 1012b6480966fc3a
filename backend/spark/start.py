"""From a checked pipeline to a running query: settings, manifest, processor, supervisor.

Everything that can be refused is refused here, before Spark plans anything.
"""

from __future__ import annotations

import logging
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from backend.errors import ManifestMismatch
from backend.sources.kafka_admin import TopicIdentity, compare
from backend.spark.control import ask_to_drain
from backend.spark.job import ROUTES, Input, Job, arrow_schema, check_event_time, describe, number_streams
from backend.spark.observed import observed
from backend.spark.processor import OUTPUT_SCHEMA, ProcessorPlan, ShardProcessor
from backend.spark.resume import check_resumable
from backend.spark.routing import grouping_values
from backend.spark.settings import settings
from backend.windows import Duration, duration_ms
from recovery.changelog import open_changelog
from recovery.files import check_location, open_files
from recovery.housekeeping import Housekeeping
from recovery.jobs import next_launch, of_launch, shard_job, snapshots
from recovery.manifest import Manifest, read_manifest, settle
from recovery.moved import settle_in
from recovery.rebuild import restore_shards
from recovery.supervisor import QueryPlan, RewindQuery

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from backend.sinks import Sink
    from backend.spark.stream import Pipeline
    from recovery.listener import RestoreListener

DEFAULT_SNAPSHOT_EVERY = 50
log = logging.getLogger("rewind.start")

CHANGELOG_DIRECTORY = "rewind/changelog"


@dataclass(frozen=True, slots=True)
class StartOptions:
    """Options of `Pipeline.start`.

    Attributes:
        shards: Number of shards, fixed at the first start. None: one per source partition with `route="partition"`,
            else the session's default parallelism; one when the windows need the whole stream in order.
        route: `key` (any source) or `partition` (Samza's task per partition: cheaper replay, exact lateness).
        local_dir: Local state; `$NAME` is replaced where a task runs, such as `$SPARK_EXECUTOR_DIRS/rewind` where
            executors have disks of their own. None: a directory under the system's temporary directory.
        trigger: Spark's processing-time trigger, such as `"1 second"`; `"0 seconds"` runs micro-batches back to back.
        until: None runs until stopped; `"end"` reads what the source holds at the start, drains, and ends.
        changelog: None keeps it beside the checkpoint; else a URI for `open_changelog`.
        retain: Staged files and commits kept behind the committed version.
        snapshots: `"off"`, or every how many commits a whole package of a shard goes to the checkpoint's filesystem
            (each staged file goes there with its commit). A shard can then move to another executor without a restart
            of the query. None: `"off"` on a local checkpoint, else 50.
        arrow_rows: Rows per Arrow batch in the pack stage: larger is faster, each costs its size in a worker's memory.
        name: Spark's query name.
        listeners: Told of restores.
    """

    shards: int | None = None
    route: str = "key"
    local_dir: str | Path | None = None
    trigger: Duration = "1 second"
    until: str | None = None
    changelog: str | None = None
    retain: int = 2
    snapshots: str | int | None = None
    arrow_rows: int = 200_000
    name: str | None = None
    listeners: tuple[RestoreListener, ...] = ()

    def __post_init__(self) -> None:
        """Check what can be checked without Spark.

        Raises:
            ValueError: A bad option, by name.
        """
        if self.route not in ROUTES:
            raise ValueError(f"route={self.route!r}: allowed are {', '.join(ROUTES)}")
        duration_ms(self.trigger, "trigger", least=0)
        if self.changelog is not None:
            check_location(self.changelog)
        if self.until not in (None, "end"):
            raise ValueError(f"until={self.until!r}: allowed are None and 'end'")
        if self.snapshots not in (None, "off") and (
            isinstance(self.snapshots, bool) or not isinstance(self.snapshots, int) or self.snapshots < 1
        ):
            raise ValueError(f"snapshots={self.snapshots!r}: allowed are 'off' and an integer of at least 1")
        for name, least in (("shards", 1), ("retain", 1), ("arrow_rows", 1)):
            value = getattr(self, name)
            if name == "shards" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r}: must be an integer of at least {least}")


def start(pipeline: Pipeline, spark: SparkSession, checkpoint: str, sink: Sink, options: StartOptions) -> RewindQuery:
    """Start a pipeline; see `Pipeline.start`."""
    used = _spark_has_committed(checkpoint)
    stored = read_manifest(checkpoint)

    @cache
    def first_offsets() -> list[list[Any]]:
        return stored.entries["first_offsets"] if stored is not None else _first_offsets(pipeline, spark)

    job = build_job(pipeline, spark, options, grouping=stored.grouping if stored else None, first_offsets=first_offsets)
    entries = describe(
        job,
        {
            "session": _session(spark),
            "changelog": options.changelog or CHANGELOG_DIRECTORY,
            "release": release(),
            "topics": _topics(job, stored),
            "first_offsets": first_offsets(),
            # names the query to its outputs: Spark's own id is known only when the first micro-batch may be running
            "query": stored.entries.get("query", uuid.uuid4().hex) if stored is not None else uuid.uuid4().hex,
        },
    )
    settle(checkpoint, Manifest(job.shards, job.grouping, entries), used=used)
    look = partial(check_resumable, checkpoint, [side.source for side in job.inputs])
    look()
    settle_in(checkpoint)
    sink.open(entries["query"])
    local_dir = Path(options.local_dir) if options.local_dir is not None else Path(tempfile.gettempdir()) / "rewind"
    changelog_uri = options.changelog or f"{checkpoint.rstrip('/')}/{CHANGELOG_DIRECTORY}"
    open_changelog(changelog_uri).prepare(job.shards)
    every = snapshot_every(options.snapshots, checkpoint)
    check_session(spark, snapshots=every is not None)
    make = partial(
        shard_job, local_dir, checkpoint, changelog_uri, job.operator, job.message_fields, options.retain, every
    )
    sources = job.sources(spark, bounded=options.until == "end")
    shards = {value: shard for shard, value in enumerate(job.grouping)}

    def launch(publish: Callable[[DataFrame, int], None]) -> StreamingQuery:
        plan = ProcessorPlan(shards, partial(of_launch, make, next_launch(checkpoint)), sources)
        with settings(spark, job.shards, options.arrow_rows, few_rows=job.bundled):
            packed = job.streaming(spark, checkpoint)
            states = packed.groupBy("shard").transformWithStateInPandas(
                ShardProcessor(plan), OUTPUT_SCHEMA, "Append", "ProcessingTime"
            )
            writer = observed(states).writeStream.foreachBatch(publish).option("checkpointLocation", checkpoint)
            if options.name is not None:
                writer = writer.queryName(options.name)
            every_ms = duration_ms(options.trigger, "trigger", least=0)
            return writer.trigger(processingTime=f"{every_ms} milliseconds").start()

    targets = None
    if options.until == "end":
        targets = tuple({key: end for key, (_, end) in side.source.offsets(spark).items()} for side in job.inputs)
    return RewindQuery(
        QueryPlan(
            spark=spark,
            checkpoint=checkpoint,
            launch=launch,
            publish=sink.publish,
            restore=lambda why: restore_shards(
                spark, job, checkpoint, make, why, options.listeners, options.arrow_rows
            ),
            drain=lambda: ask_to_drain(checkpoint),
            housekeeping=Housekeeping(
                lambda: open_changelog(changelog_uri),
                snapshots(checkpoint),
                int(spark.conf.get("spark.sql.streaming.minBatchesToRetain", "100")),
            ),
            shards=job.shards,
            targets=targets,
            listeners=options.listeners,
            look_again=look,
        )
    )


def build_job(
    pipeline: Pipeline,
    spark: SparkSession,
    options: StartOptions,
    *,
    grouping: tuple[int, ...] | None,
    first_offsets: Callable[[], list[list[Any]]],
) -> Job:
    """Check a pipeline against its sources' schemas and make the job.

    Args:
        pipeline: What the user said.
        spark: Parses schemas.
        options: Shards and route.
        grouping: Of the manifest, when there is one.
        first_offsets: Asked by joins: of the manifest, or what will be written there, so that both say the same.

    Raises:
        ValueError: A bad option, by name.
    """
    inputs, schemas = [], []
    message_types = {}
    for name, side in zip(pipeline.sides, pipeline.streams, strict=True):
        fields = side.source.fields()
        check_event_time(fields, side.event_time)
        for key in side.key:
            if key not in fields.fieldNames():
                raise ValueError(f"key={key!r}: allowed are the fields {', '.join(fields.fieldNames())}")
        inputs.append(Input(side.source, side.event_time, side.key, name))
        schemas.append(arrow_schema(fields))
        message_types.update({_read_as(name, field): field.with_name(_read_as(name, field)) for field in schemas[-1]})
    told = first_offsets() if len(inputs) > 1 else []
    operator = pipeline.make(schemas, {(stream, partition): first for stream, partition, first in told})
    if pipeline.routing is not None:
        inputs = [replace(side, key=key) for side, key in zip(inputs, pipeline.routing(operator), strict=True)]
    shards = options.shards
    if grouping is not None:
        shards = shards or len(grouping)
    if shards is None:
        shards = _default_shards(pipeline, inputs, spark, options)
    _check_order(pipeline, shards, options)
    if grouping is None or len(grouping) != shards:
        grouping = grouping_values(shards)
    return Job(
        tuple(inputs),
        options.route,
        grouping,
        operator,
        tuple(message_types[name] for name in operator.input_fields),
        pipeline.max_ahead_ms,
    )


def _check_order(pipeline: Pipeline, shards: int, options: StartOptions) -> None:
    """Refuse a number of shards, or a route, under which messages that belong together never meet.

    Raises:
        ValueError: Names the option.
    """
    if len(pipeline.streams) > 1:
        if options.route != "key":
            raise ValueError(f"route={options.route!r}: a join is routed by its equal fields: allowed is 'key'")
        if pipeline.needs_order and shards > 1:
            raise ValueError(f"shards={shards}: a join without equal fields needs all messages in one place: give 1")
    elif pipeline.needs_order and shards > 1 and options.route != "partition":
        raise ValueError(
            f"shards={shards}: windows without a key and sessions by number need the whole stream in order:"
            ' allowed are shards=1, or route="partition" (windows per source partition)'
        )


def _read_as(side: str, field: pa.Field) -> str:
    """Give the name under which the operator reads a field: the inverse of `Input.field_of`."""
    return f"{side}.{field.name}" if side else str(field.name)


def _default_shards(pipeline: Pipeline, inputs: list[Input], spark: SparkSession, options: StartOptions) -> int:
    if options.route == "partition":
        return max(1, sum(len(side.source.offsets(spark)) for side in inputs))
    return 1 if pipeline.needs_order else max(1, spark.sparkContext.defaultParallelism)


def _spark_has_committed(checkpoint: str) -> bool:
    """Tell whether Spark has committed there, and refuse a checkpoint whose state format is too old.

    Raises:
        ManifestMismatch: Checkpoint format 1: a zombie can overwrite committed state under it.
    """
    files = open_files(checkpoint)
    commits = [name for name in files.list("commits") if name.isdigit()]
    if not commits:
        return False
    newest = max(commits, key=int)
    text = files.read(f"commits/{newest}").decode()
    if "stateUniqueIds" not in text:
        raise ManifestMismatch(
            "the checkpoint has state store checkpoint format 1",
            where=f"{checkpoint}/commits/{newest}",
            why="under format 1 a task that finishes late can overwrite committed state",
            command="choose another checkpoint; Rewind always sets"
            " spark.sql.streaming.stateStore.checkpointFormatVersion=2",
        )
    return True


def snapshot_every(option: str | int | None, checkpoint: str) -> int | None:
    """Give every how many commits a shard's package is published; None for never.

    >>> snapshot_every(None, "/data/c"), snapshot_every(None, "s3a://bucket/c"), snapshot_every(7, "/data/c")
    (None, 50, 7)
    """
    if option == "off":
        return None
    if option is None:
        local = "://" not in checkpoint or checkpoint.startswith("file:")
        return None if local else DEFAULT_SNAPSHOT_EVERY
    return int(option)


def check_session(spark: SparkSession, *, snapshots: bool) -> None:
    """Refuse settings of the session under which the guarantee does not hold.

    Raises:
        ValueError: Names the setting, its value, and what is allowed.
    """
    if str(spark.sparkContext.getConf().get("spark.speculation", "false")).lower() == "true" and not snapshots:
        raise ValueError(
            "spark.speculation='true': two attempts of one micro-batch may run on different executors, and without"
            " snapshots only one of them keeps the local state: allowed are 'false', or snapshots=50 (say)"
        )


def _session(spark: SparkSession) -> dict[str, Any]:
    """Give what a replay must parse under."""
    return {
        "timezone": spark.conf.get("spark.sql.session.timeZone"),
        "ansi": spark.conf.get("spark.sql.ansi.enabled"),
    }


def _topics(job: Job, stored: Manifest | None) -> dict[str, Any]:
    """Give the identity of each topic that has one, and announce what changed since the last start.

    Raises:
        SourceWentBack: A topic was deleted and made again: its offsets mean other messages.
    """
    found: dict[str, TopicIdentity] = {}
    for side in job.inputs:
        ask = getattr(side.source, "identities", None)
        found.update(ask() if ask is not None else {})
    before = (stored.entries.get("topics") or {}) if stored is not None else {}
    for note in compare({topic: TopicIdentity(**told) for topic, told in before.items()}, found):
        log.warning("%s", note)
    return {topic: asdict(identity) for topic, identity in found.items()}


def _first_offsets(pipeline: Pipeline, spark: SparkSession) -> list[list[Any]]:
    """Give the earliest offset of each source partition when the query first started: joins align windows by it."""
    sources = [side.source for side in pipeline.streams]
    streams = number_streams(list(zip(pipeline.sides, sources, strict=True)))
    return sorted(
        [streams[(side, topic)], partition, first]
        for side, source in zip(pipeline.sides, sources, strict=True)
        for (topic, partition), (first, _) in source.offsets(spark).items()
    )


def release() -> str:
    """Give the installed release, `unknown` in a source tree that was not installed."""
    try:
        return version("spark-rewind")
    except PackageNotFoundError:
        return "unknown"
