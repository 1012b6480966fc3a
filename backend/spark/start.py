"""From a checked pipeline to a running query: settings, manifest, processor, supervisor.

Everything that can be refused is refused here, before Spark plans anything.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from backend.batch import Operator, SourcePartition
from backend.errors import UNDECODABLE, CheckpointInUse, ManifestMismatch, PointerDamaged, StorageFailed
from backend.joins.operator import JoinOperator
from backend.kafka_client.identity import TopicIdentity, compare
from backend.kafka_client.settings import KafkaSettings
from backend.places import check_apart, check_usable
from backend.sources import TopicPartition, remembers
from backend.sources.dataframe import DataFrameSource
from backend.sources.kafka import KafkaSource
from backend.spark.control import ask_to_drain, drain_of, forget_requests
from backend.spark.explain import explained
from backend.spark.first_offsets import known_positions
from backend.spark.job import ROUTES, Input, Job, arrow_schema, check_event_time, check_key, describe, number_streams
from backend.spark.observed import observed
from backend.spark.pack.routing import MAX_SHARDS, grouping_values
from backend.spark.processor import ShardProcessor
from backend.spark.queueing import Sealing, incarnation_of, queue_limit
from backend.spark.resume import check_resumable, clear_unplanned, has_begun, newest_planned
from backend.spark.session import jvm
from backend.spark.session.settings import is_copied, session_entries, settings
from backend.spark.session.versions import check_not_connect
from backend.spark.shard_task import ProcessorPlan
from backend.spark.standby import standby_of
from backend.spark.stream import Known
from backend.spark.watching import SourceWatch
from backend.steps import DEFAULT_POISON_LIMIT
from backend.texts import one_line
from backend.windows.definitions import Duration, duration_ms
from backend.windows.operator import WindowOperator
from recovery.changelog import KAFKA, Changelog, check_changelog, open_changelog
from recovery.commit.lease import Lease, take
from recovery.commit.manifest import CHANGELOG_DIRECTORY, Manifest, changelog_uri, read_manifest, record, settle
from recovery.commit.option_sets import ByVersion, newest_in, sets_from, versions_in
from recovery.commit.outputs import are_new, check_outputs, output_id, read_outputs, write_outputs
from recovery.commit.pointer import Pointer, RestoringPointer
from recovery.commit.relocation import check_alone, settle_in
from recovery.commit.spark_files import check_state, read_spark_file
from recovery.failures import Kind, is_lasting, read
from recovery.files import open_files
from recovery.jobs import ShardJob, message_log, shard_job, snapshots
from recovery.restore.all_shards import Restores, restore_beside, restore_shards
from recovery.restore.lineage import check_lineage
from recovery.restore.replay import DIRECTORY as REPLAY_DIRECTORY
from recovery.restore.replay import read_pointers
from recovery.supervise.beside import Beside
from recovery.supervise.housekeeping import Housekeeping
from recovery.supervise.patience import DEFAULT, Patience
from recovery.supervise.spark_logs import end_reported_by_us, reported_by_us
from recovery.supervise.supervisor import QueryPlan, RewindQuery
from recovery.supervise.under_way import UnderWay
from recovery.supervise.window_ends import WindowEnds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from backend.sinks import Sink
    from backend.spark.stream import Pipeline
    from recovery.listener import RestoreListener

DEFAULT_SNAPSHOT_EVERY = 50
_MOST, _MOST_TO_SPARK = 2**63 - 1, 2**31 - 1
OUTBOX_DIRECTORY = "rewind/outbox"
"""Below the checkpoint: what tasks write for sinks that publish from the driver."""
log = logging.getLogger("rewind.start")
_written: dict[int, tuple[Sink, str]] = {}
"""Sinks of active queries, by identity, with their checkpoints."""


@dataclass(frozen=True, slots=True)
class StartOptions:
    """Options of `Pipeline.start`, which says what each is, with their defaults."""

    shards: int | None = None
    route: str = "key"
    local_dir: str | Path | None = None
    trigger: Duration = "1 second"
    until: str | None = None
    changelog: str | None = None
    retain: int = 2
    snapshots: str | int | None = None
    arrow_rows: int = 200_000
    patience: Duration = DEFAULT
    queue_bytes: str | int | None = None
    standby: int = 0
    name: str | None = None
    listeners: tuple[RestoreListener, ...] = ()
    poison_limit: int = DEFAULT_POISON_LIMIT
    debug_steps: bool = False

    def __post_init__(self) -> None:
        """Check what can be checked without Spark.

        Raises:
            ValueError: A bad option, by name.
        """
        if self.route not in ROUTES:
            raise ValueError(f"route={self.route!r}: allowed are {', '.join(ROUTES)}")
        duration_ms(self.trigger, "trigger", least=0)
        duration_ms(self.patience, "patience", least=0)
        if self.changelog is not None:
            check_changelog(self.changelog)
        self._check_kinds()
        if self.until not in (None, "end"):
            raise ValueError(f"until={self.until!r}: allowed are None and 'end'")
        self._check_numbers()

    def _check_kinds(self) -> None:
        if self.name is not None and (not isinstance(self.name, str) or not self.name.strip()):
            raise ValueError(f"name={self.name!r}: must be a text, or None")
        if self.local_dir is not None and (
            not isinstance(self.local_dir, str | os.PathLike) or not os.fspath(self.local_dir)
        ):
            raise ValueError(f"local_dir={self.local_dir!r}: must be a local path, or None")
        if not isinstance(self.listeners, list | tuple) or not all(
            not isinstance(listener, type) and callable(getattr(listener, method, None))
            for listener in self.listeners
            for method in ("start", "batch", "suspended", "end")
        ):
            raise ValueError(f"listeners={self.listeners!r}: must be a list of RestoreListener")
        if not isinstance(self.debug_steps, bool):
            raise ValueError(f"debug_steps={self.debug_steps!r}: allowed are True and False")

    def _check_numbers(self) -> None:
        for name in ("snapshots", "queue_bytes"):
            value = getattr(self, name)
            if value not in (None, "off") and not _is_whole(value, 1, _MOST):
                raise ValueError(f"{name}={value!r}: allowed are 'off' and an integer from 1 to {_MOST}")
        if isinstance(self.standby, bool) or self.standby not in (0, 1):
            raise ValueError(f"standby={self.standby!r}: allowed are 0 and 1")
        for name, least, most in (
            ("shards", 1, MAX_SHARDS),
            ("retain", 1, _MOST),
            ("arrow_rows", 1, _MOST_TO_SPARK),
            ("poison_limit", 0, _MOST),
        ):
            value = getattr(self, name)
            if not _is_whole(value, least, most) and not (name == "shards" and value is None):
                raise ValueError(f"{name}={value!r}: must be an integer from {least} to {most}")


def _is_whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def start(pipeline: Pipeline, spark: SparkSession, checkpoint: str, sink: Sink, options: StartOptions) -> RewindQuery:
    """Start a pipeline; see `Pipeline.start`."""
    check_not_connect(spark)
    patience = Patience(
        duration_ms(options.patience, "patience", least=0) / 1000, checkpoint, doing="the query does not start"
    )
    used = False
    while True:
        plan = None
        try:
            with ExitStack() as undo:
                plan = _plan(pipeline, spark, checkpoint, sink, options, used, undo)
                query = RewindQuery(plan)
                undo.pop_all()  # the query gives back what was taken, at its end
                return query
        except Exception as error:
            failure = read(error)
            if plan is not None or failure.kind is not Kind.PASSES or is_lasting(failure):
                raise  # a query has waited itself
            used = used or _spark_has_committed(checkpoint)
            if not used:
                raise  # what was never reached may be named wrongly: said at once
            pause_s = patience.after(failure, -1)
        time.sleep(pause_s)


def _plan(
    pipeline: Pipeline,
    spark: SparkSession,
    checkpoint: str,
    sink: Sink,
    options: StartOptions,
    used: bool,
    undo: ExitStack,
) -> QueryPlan:
    """Check everything and open what the query needs; `undo` gives back what was taken if the query does not start."""
    places, inside = _places(pipeline, checkpoint, sink, options)
    check_apart(places, inside=inside)
    check_usable([place for place in places if place[0] not in ("archive", "topics")], checkpoint)
    publishes = snapshot_every(options.snapshots, checkpoint) is not None
    if options.standby and not publishes:
        raise ValueError("standby=1: copies are made of snapshots, which are off: allowed is 0, or snapshots=50 (say)")
    check_session(spark, snapshots=publishes)
    jvm.check_same_files(spark, checkpoint)
    jvm.give_workers_time(spark)
    jvm.use_unix_sockets(spark)
    used = _is_used(checkpoint, used)
    begun = has_begun(checkpoint)
    stored = read_manifest(checkpoint)
    pipeline = known_sources(pipeline, stored, checkpoint)

    @cache
    def first_offsets() -> list[list[Any]]:
        # what another query left there is no answer, nor what a start decided that was refused
        at = checkpoint if begun and not used else None
        known = stored.entries["first_offsets"] if begun and stored is not None else None
        return _first_offsets(pipeline, spark, at) if known is None else known

    job = build_job(pipeline, spark, options, stored=stored, first_offsets=first_offsets)
    if used:  # its topics are there, if one is not known to a broker it has just come up
        job = job.pinned(_identities(stored.entries if stored is not None else {}))
    partitions = job.partitions(spark, bounded=options.until == "end")
    _check_newest(sink, job, partitions, read_outputs(checkpoint) if used else None)
    entries = describe(
        job,
        {
            "session": job.session,
            "changelog": options.changelog or CHANGELOG_DIRECTORY,
            "place": open_files(checkpoint).uri,
            "release": release(),
            "topics": topics_of(job, stored),
            "partitions": [list(place) for place in partitions],
            "first_offsets": first_offsets(),
            # names the query to its outputs: Spark's own id is known only when the first micro-batch may be running
            "query": stored.entries.get("query", uuid.uuid4().hex) if stored is not None else uuid.uuid4().hex,
        },
    )
    lease = take_lease(checkpoint, f"query {options.name!r}" if options.name is not None else "a query", undo)
    if (_is_used(checkpoint, used), has_begun(checkpoint), read_manifest(checkpoint)) != (used, begun, stored):
        raise CheckpointInUse(
            "another query ran on the checkpoint while this start waited for it",
            where=checkpoint,
            why="what this start had gone by is another now",
            command="start the query again",
        )
    use_alone(sink, checkpoint, undo)
    lease.check()
    clear_unplanned(checkpoint)
    return _open(spark, checkpoint, sink, options, job, entries, stored, used, lease)


def explain(pipeline: Pipeline, spark: SparkSession, options: StartOptions) -> str:
    """Return what a pipeline will do; see `Pipeline.explain`."""
    check_not_connect(spark)
    first = partial(_first_offsets, pipeline, spark)
    return explained(build_job(pipeline, spark, options, stored=None, first_offsets=first), options.snapshots)


def take_lease(checkpoint: str, what: str, undo: ExitStack) -> Lease:
    """Take a checkpoint's lease for a query, which gives it back; `undo` does when the query does not start.

    Nothing is left of the first one that a checkpoint has: no older holder may still wake up to its number.
    """
    lease = take(checkpoint, what)
    undo.callback(lease.release, forget=lease.is_first)
    return lease


def use_alone(sink: Sink, checkpoint: str, undo: ExitStack) -> None:
    """Take a sink object for a query, which frees it at its end (`_close`); `undo` does when the query does not start.

    Raises:
        ValueError: Another query writes to it: what it knows of its query is that one's.
    """
    mine = sink, checkpoint
    found = _written.setdefault(id(sink), mine)
    if found is not mine:
        raise ValueError(
            f"sink={sink!r}: another query writes to it, that on {found[1]}: allowed is a sink of its own for each"
            " query, or this one when that query has ended"
        )
    undo.callback(_written.pop, id(sink), None)


def _close(sink: Sink, watch: SourceWatch) -> None:
    """Let go, at a query's end, of its sink and of the clients: who keeps the handle does not keep those."""
    try:
        watch.close()
        getattr(sink, "close", lambda: None)()
    finally:
        _written.pop(id(sink), None)


def _open(
    spark: SparkSession,
    checkpoint: str,
    sink: Sink,
    options: StartOptions,
    job: Job,
    entries: Mapping[str, Any],
    stored: Manifest | None,
    used: bool,
    lease: Lease,
) -> QueryPlan:
    output = output_id(checkpoint, entries["query"])
    _begin_sink(sink, checkpoint, output, job.operator)
    queue_bytes = queue_limit(spark, sink, options.queue_bytes)
    uri = changelog_uri(checkpoint, options.changelog)
    changelog = partial(open_changelog, uri, entries["query"])
    entries = {**entries, **_former_places(check_alone(checkpoint, stored, entries["changelog"]))}
    settled = settle(checkpoint, Manifest(job.shards, job.grouping, entries), used=used)
    changelog().check(job.shards, new=not used)
    job = job.pinned(_identities(entries))
    job.check_sources()
    watch = SourceWatch(checkpoint, [side.source for side in job.inputs])
    watch.look()

    def look() -> None:
        check_state(checkpoint, job.shards)
        check_resumable(checkpoint, [side.source for side in job.inputs])

    look()
    lease.check()
    forget_requests(checkpoint)
    settle_in(checkpoint)
    local_dir = _local_dir(options)
    every = snapshot_every(options.snapshots, checkpoint)
    make = partial(
        shard_job, local_dir, checkpoint, uri, job.operator, job.message_fields, options.retain, every,
        owner=entries["query"], logged=job.logged,
    )  # fmt: skip
    restoring = _committed_before(spark, checkpoint, changelog(), job.shards, make) if used else {}
    mine: list[Callable[[], object]] = [
        partial(job.begin, checkpoint, entries["first_offsets"], known=stored is not None),
        partial(record, checkpoint, settled),
        partial(changelog().prepare, job.shards, new=not used),
    ]
    _take_places(mine, partial(_open_sink, sink, checkpoint, output), lease.check, first=stored is None)
    terms = terms_of(job, settled, checkpoint, [one.since.commit.version + 1 for one in restoring.values()])
    keep_versions = int(spark.conf.get("spark.sql.streaming.minBatchesToRetain", "100"))
    sealing = Sealing(sink, lease, bool(restoring))
    every_ms = duration_ms(options.trigger, "trigger", least=0)

    def start_query(publish: Callable[[DataFrame, int], None]) -> StreamingQuery:
        lease.check()
        clear_unplanned(checkpoint)
        started = incarnation_of(checkpoint, terms.map(lambda one: one.operator), queue_bytes is not None)
        sealing.begin(started)
        plan = ProcessorPlan(
            {value: shard for shard, value in enumerate(job.grouping)}, partial(started.job, make),
            terms.map(lambda one: one.sources), job.topics, job.ranked, job.max_ahead_ms,
            writing=getattr(sink, "writing", lambda: None)(),
        )  # fmt: skip
        copied = is_copied(checkpoint, job.shards, ends=options.until is not None)
        with settings(spark, job, options.arrow_rows, checkpoint, copied=copied), reported_by_us(spark):
            packed = job.streaming(
                spark, checkpoint, terms.map(lambda one: job.pack_plan(one.max_ahead_ms, one.operator)),
                every_ms if options.until is None else 0,
            )  # fmt: skip
            states = packed.groupBy("shard").transformWithStateInPandas(
                ShardProcessor(plan), plan.ddl, "Append", "ProcessingTime"
            )
            writer = observed(states).writeStream.foreachBatch(publish).option("checkpointLocation", checkpoint)
            writer = writer.queryName(options.name) if options.name is not None else writer
            query = writer.trigger(processingTime=f"{every_ms} milliseconds").start()
        end_reported_by_us(spark, str(query.id))
        return query

    group = f"rewind-restore {checkpoint} {uuid.uuid4().hex}"
    restores = Restores(
        spark, job, checkpoint, make, (under_way := UnderWay(), *options.listeners), options.arrow_rows, lease.check,
        group,
    )  # fmt: skip

    def restore(why: str) -> int:
        watch.look()
        return restore_shards(restores, why)

    def beside(pointers: Mapping[int, Pointer], refused: Collection[int]) -> None:
        watch.look(beside=True)
        restore_beside(restores, pointers, refused)

    return QueryPlan(
        checkpoint=checkpoint,
        lease=lease,
        start_query=start_query,
        publish=sink.publish,
        restore=restore,
        drain=lambda: ask_to_drain(checkpoint),
        drain_of=lambda version: drain_of(checkpoint, version),
        housekeeping=Housekeeping(
            changelog,
            snapshots(checkpoint),
            keep_versions,
            checkpoint=checkpoint,
            message_log=message_log(checkpoint, job.logged) if job.logged else None,
            committed=newest_in(checkpoint, "commits"),
        ),
        shards=job.shards,
        targets=_targets(job, spark) if options.until == "end" else None,
        listeners=options.listeners,
        look_again=look,
        watch=watch.look,
        patience_s=duration_ms(options.patience, "patience", least=0) / 1000,
        # options of micro-batches whose offsets Spark no longer retains are forgotten: a queue ends long before
        beside=Beside(beside, queue_bytes or 0, keep_versions // 2, restoring),
        under_way=under_way,
        window_ends=WindowEnds() if every_ms == 0 else None,
        end_restores=lambda: jvm.context_of(spark).cancelJobGroup(group),
        close=partial(_close, sink, watch),
        standby=standby_of(spark, checkpoint, make, job.shards, used, options.standby, local_dir) if every else None,
    )


def _committed_before(
    spark: SparkSession, checkpoint: str, changelog: Changelog, shards: int, make: Callable[[str, int], ShardJob]
) -> dict[int, RestoringPointer]:
    """Check that what is committed can be had; return the pointers of the shards that queue their input."""
    open_files(checkpoint).delete_folder(REPLAY_DIRECTORY)  # of a restore whose driver died
    pointers = read_pointers(spark, checkpoint, shards)
    check_lineage(spark, checkpoint, changelog, pointers, make)
    return {shard: one for shard, one in pointers.items() if isinstance(one, RestoringPointer)}


def _take_places(
    mine: Sequence[Callable[[], object]], open_sink: Callable[[], None], check: Callable[[], None], *, first: bool
) -> None:
    """Record what the query is, then make a changelog of its own, and open the sink.

    A query that has a manifest goes by that until its sink is open: what that refuses has changed nothing. The first
    start records its id before anything is the id's own. Each start of a query that has not begun writes down where it
    begins, right before the manifest that says the same. Before each of them the lease is looked at: of two starts at
    the same moment one has lost it by then, and would take from the other what that has taken.
    """
    for step in [*mine, open_sink] if first else [open_sink, *mine]:
        check()
        step()


def _begin_sink(sink: Sink, checkpoint: str, output: str, operator: Operator) -> None:
    """Check a sink against the job and the checkpoint; makes nothing."""
    check_outputs(checkpoint, output, sink)
    getattr(sink, "begin", lambda *_: None)(f"{checkpoint.rstrip('/')}/{OUTBOX_DIRECTORY}", operator)


def _open_sink(sink: Sink, checkpoint: str, output: str) -> None:
    """Open a sink, which learns what may be out already: nothing in outputs that were never the query's."""
    resume_from = getattr(sink, "resume_from", None)
    if resume_from is not None:
        resume_from(-1 if are_new(checkpoint, sink) else newest_planned(checkpoint))
    sink.open(output)
    write_outputs(checkpoint, sink)


def _targets(job: Job, spark: SparkSession) -> tuple[Mapping[TopicPartition, int] | None, ...]:
    """Return the ends of a bounded run by source of Spark's plan; None is that Spark finds nothing new there."""
    targets: list[Mapping[TopicPartition, int] | None] = []
    for side in job.inputs:
        if isinstance(side.source, DataFrameSource):
            targets += [None] * side.source.streaming_sources()
        else:
            targets.append({key: end for key, (_, end) in side.source.offsets(spark).items()})
    return tuple(targets)


def known_sources(pipeline: Pipeline, stored: Manifest | None, checkpoint: str) -> Pipeline:
    """Return a pipeline whose sources are those that the checkpoint knows, with the topics of its first start.

    Args:
        pipeline: What the user said.
        stored: The manifest, if there is one.
        checkpoint: Where sources remember what was read; "" for nowhere.
    """
    entries = stored.entries.get("inputs", []) if stored is not None else []
    streams = []
    for number, side in enumerate(pipeline.streams):
        source = side.source
        if remembers(source):
            entry = entries[number]["source"] if number < len(entries) else {}
            topics = entry["topics"] if entry.get("kind") == "archive" else []
            source = source.remembering(topics, checkpoint, number)
        streams.append(replace(side, source=source))
    return replace(pipeline, streams=tuple(streams))


@dataclass(frozen=True, slots=True)
class Terms:
    """What a micro-batch runs under, besides what was logged for it and what never changes.

    Attributes:
        operator: With the options that hold.
        max_ahead_ms: See `PackPlan`.
        sources: Shard -> source partitions known at the start.
    """

    operator: Operator
    max_ahead_ms: int | None
    sources: Mapping[int, tuple[SourcePartition, ...]]


def terms_of(job: Job, settled: Manifest, checkpoint: str, queued: Sequence[int] = ()) -> ByVersion[Terms]:
    """Make what each micro-batch that may run runs under, out of the manifest's option sets.

    Args:
        job: As it is now.
        settled: What `settle` gave for it.
        checkpoint: Spark's checkpoint location: what is committed there does not run again.
        queued: Micro-batches that shards have queued, the oldest of each: they are yet to run.
    """
    today = settled.sets[-1].options
    following = min([newest_in(checkpoint, "commits") + 1, *queued])

    def terms(options: Mapping[str, Any]) -> Terms:
        named = {**today, **options}  # a manifest of format 1 does not name all
        own = {path.removeprefix("operator."): value for path, value in named.items() if path.startswith("operator.")}
        partitions = [(int(stream), int(partition)) for stream, partition in named["partitions"]]
        operator = job.operator if named == today else job.operator.with_options(own)
        return Terms(operator, named["max_ahead_ms"], job.by_shard(partitions))

    return ByVersion(tuple((one.since, terms(one.options)) for one in sets_from(settled.sets, following)))


def _local_dir(options: StartOptions) -> Path:
    if options.local_dir is None:
        return Path(tempfile.gettempdir()) / "rewind"
    # a variable is each executor's own
    return Path(options.local_dir) if "$" in str(options.local_dir) else Path(options.local_dir).absolute()


def _places(
    pipeline: Pipeline, checkpoint: str, sink: Sink, options: StartOptions
) -> tuple[list[tuple[str, str]], set[tuple[str, str]]]:
    """Return the directories and topics that must be apart, by option, and which of them may lie inside which."""
    outputs: dict[str, str] = getattr(sink, "places", dict)()
    places = [*outputs.items(), ("checkpoint", checkpoint)]
    if options.changelog is not None and not options.changelog.startswith(KAFKA):
        places.append(("changelog", options.changelog))
    if "$" not in str(_local_dir(options)):
        places.append(("local_dir", str(_local_dir(options))))
    inside = {(option, "local_dir") for option, _ in places} | {("changelog", "checkpoint")}
    places += getattr(sink, "topic_places", list)()
    if options.changelog is not None and options.changelog.startswith(KAFKA):
        servers, _, topic = options.changelog.removeprefix(KAFKA).partition("/")
        places += [("changelog", uri) for uri in KafkaSettings(servers).places(topic)]
    for side in pipeline.streams:
        if isinstance(side.source, KafkaSource):
            topics = side.source.topics
            places += [("topics", uri) for topic in topics for uri in side.source.settings.places(topic)]
    archives = dict.fromkeys(str(side.source.path) for side in pipeline.streams if hasattr(side.source, "path"))
    return [*places, *(("archive", path) for path in archives)], inside


def build_job(
    pipeline: Pipeline,
    spark: SparkSession,
    options: StartOptions,
    *,
    stored: Manifest | None,
    first_offsets: Callable[[], list[list[Any]]],
) -> Job:
    """Check a pipeline against its sources' schemas and make the job.

    Args:
        pipeline: What the user said.
        spark: Parses schemas; the job reads messages under its time zone and ANSI mode of now.
        options: Shards and route.
        stored: The manifest, when there is one.
        first_offsets: Asked by joins, and by several topics that are routed by source partition: of the manifest, or
            what will be written there, so that both say the same.

    Raises:
        ValueError: A bad option, by name.
    """
    inputs, schemas = [], []
    message_types = {}
    for name, side in zip(pipeline.sides, pipeline.streams, strict=True):
        one = Input(side.source, side.event_time, side.key, name, side.steps)
        fields = one.fields()
        check_event_time(fields, side.event_time)
        check_key(fields, side.key)
        inputs.append(one)
        schemas.append(arrow_schema(fields))
        message_types.update({_read_as(name, field): field.with_name(_read_as(name, field)) for field in schemas[-1]})
    _check_clusters(inputs)
    firsts = first_offsets() if len(inputs) > 1 else []
    known = Known(
        {(stream, partition): first for stream, partition, first in firsts},
        [len(side.source.topics) for side in inputs],
        {} if stored is None else stored.entries.get("operator", {}),
    )
    operator = pipeline.make(schemas, known)
    if isinstance(operator, JoinOperator):  # the equal fields route
        inputs = [replace(side, key=own.on) for side, own in zip(inputs, operator.spec.sides, strict=True)]
        for one in inputs:
            check_key(one.fields(), one.key)
    grouping = stored.grouping if stored is not None else ()
    shards = options.shards or len(grouping) or _default_shards(pipeline, inputs, spark, options)
    _check_order(pipeline, shards, options)
    _check_dataframes(pipeline, operator, spark, options)
    return Job(
        tuple(inputs),
        options.route,
        grouping if len(grouping) == shards else grouping_values(shards),
        operator,
        tuple(message_types[name] for name in operator.input_fields),
        pipeline.max_ahead_ms,
        options.poison_limit,
        options.debug_steps,
        bases=_bases(inputs, options, stored, first_offsets),
        session=session_entries(spark),
    )


def _bases(
    inputs: Sequence[Input],
    options: StartOptions,
    stored: Manifest | None,
    first_offsets: Callable[[], list[list[Any]]],
) -> tuple[int, ...] | None:
    """Give the shard of each stream's partition 0: each source partition has one for itself, as far as they go."""
    if stored is not None:
        known = stored.entries.get("bases")
        return None if known is None else tuple(known)
    topics = sum(len(side.source.topics) for side in inputs)
    if options.route != "partition" or topics == 1:
        return None
    partitions = [1] * topics
    for stream, partition, _ in first_offsets():
        partitions[stream] = max(partitions[stream], partition + 1)
    return tuple(sum(partitions[:stream]) for stream in range(topics))


def _check_newest(sink: Sink, job: Job, partitions: Sequence[SourcePartition], known: Mapping[str, Any] | None) -> None:
    """Refuse a table of newest rows whose key is that of two windows: by number, they begin at partition and offset.

    Args:
        sink: As given.
        job: What runs.
        partitions: What it reads.
        known: What a query that has run wrote to; in this mode it goes on, though an older release may have begun it.

    Raises:
        ValueError: Names the option.
    """
    said = sink.describe()
    if said.get("mode") != "newest" or said.get("key") is not None or not isinstance(job.operator, WindowOperator):
        return
    if job.operator.spec.window.by_time or len(job.streams) == 1:
        return
    if known is not None and known.get("mode") == "newest" and known.get("key") is None:
        return
    mixed = any(len({stream for stream, _ in places}) > 1 for places in job.by_shard(partitions).values())
    if job.bases is None or mixed:
        raise ValueError(
            "mode='newest': windows by number of two topics may begin at the same partition and offset: allowed are"
            " mode='log', key=[...], one topic, and route='partition' with a shard for each source partition"
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


def _check_dataframes(pipeline: Pipeline, operator: Operator, spark: SparkSession, options: StartOptions) -> None:
    """Refuse what a DataFrame's rows cannot have: partitions, and offsets without gaps.

    Raises:
        ValueError: Names the option.
    """
    for side in pipeline.streams:
        if not isinstance(side.source, DataFrameSource):
            continue
        side.source.check_plan(spark, alone=len(pipeline.streams) == 1)
        if options.route == "partition":
            raise ValueError(
                "route='partition': a DataFrame has no source partitions: allowed are 'key', and shards=1 for windows"
                " that need the whole stream in order"
            )
        if isinstance(operator, JoinOperator) and operator.spec.by_number:
            raise ValueError(
                "left_window, right_window: a join by number of messages counts a source's offsets, and a DataFrame has"
                " none: allowed are windows by time, or none"
            )


def _former_places(places: Sequence[str]) -> dict[str, Any]:
    return {"places": places} if places else {}


def _read_as(side: str, field: pa.Field) -> str:
    """Give the name under which the operator reads a field: the inverse of `Input.field_of`."""
    return f"{side}.{field.name}" if side else str(field.name)


def _default_shards(pipeline: Pipeline, inputs: list[Input], spark: SparkSession, options: StartOptions) -> int:
    if options.route == "partition":
        return max(1, sum(len(side.source.offsets(spark)) for side in inputs))
    return 1 if pipeline.needs_order else max(1, jvm.cores(spark))


def _spark_has_committed(checkpoint: str) -> bool:
    """Tell whether Spark has committed there, and refuse a checkpoint whose state format is too old.

    Raises:
        ManifestMismatch: Checkpoint format 1: a zombie can overwrite committed state under it.
        PointerDamaged: The newest file of Spark's log of commits cannot be read.
    """
    commits = versions_in(checkpoint, "commits")
    if not commits:
        return False
    name = f"commits/{commits[-1]}"
    try:
        head, _, content = read_spark_file(checkpoint, name).decode().partition("\n")
        known = json.loads(content)
        if not head.startswith("v") or not isinstance(known, dict):
            raise ValueError(f"it begins with {head[:40]!r}")
    except UNDECODABLE as error:
        raise PointerDamaged(
            "a file that Spark wrote into the checkpoint is damaged",
            where=f"{checkpoint}/{name}",
            why=one_line(str(error)),
            command="with no query running, put this file back from a copy of the checkpoint, and leave the rest; or go"
            " back to an older copy of the whole checkpoint",
        ) from error
    if "stateUniqueIds" not in known:
        raise ManifestMismatch(
            "the checkpoint has state store checkpoint format 1",
            where=f"{checkpoint}/{name}",
            why="under format 1 a task that finishes late can overwrite committed state",
            command="choose another checkpoint; Rewind always sets"
            " spark.sql.streaming.stateStore.checkpointFormatVersion=2",
        )
    return True


def _is_used(checkpoint: str, was: bool) -> bool:
    """Tell whether Spark has committed there, as `_spark_has_committed`, told whether it had before.

    Raises:
        StorageFailed: It had, and nothing is there.
    """
    used = _spark_has_committed(checkpoint)
    if was and not used:
        raise StorageFailed(
            "the checkpoint that was here is not here any more",
            where=checkpoint,
            command="see that its filesystem is mounted; then start the query again",
        )
    return used


def snapshot_every(option: str | int | None, checkpoint: str) -> int | None:
    """Give every how many commits a shard's snapshot is published; None for never.

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
    from pyspark.sql import SparkSession as Session

    if not isinstance(spark, Session):
        raise ValueError(f"spark={spark!r}: must be a SparkSession")
    if not jvm.pins_threads():
        raise ValueError(
            f"PYSPARK_PIN_THREAD={os.environ.get('PYSPARK_PIN_THREAD')!r}: jobs of a micro-batch run in another thread"
            " then, and their tasks do not know which one they belong to: allowed is 'true', before Spark is started"
        )
    if jvm.speculates(spark) and not snapshots:
        raise ValueError(
            "spark.speculation='true': two attempts of one micro-batch may run on different executors, and without"
            " snapshots only one of them keeps the local state: allowed are 'false', or snapshots=50 (say)"
        )


def topics_of(job: Job, stored: Manifest | None) -> dict[str, Any]:
    """Give the identity of each topic that has one, and announce what changed since the last start.

    Raises:
        SourceWentBack: A topic was deleted and made again: its offsets mean other messages.
    """
    found: dict[str, TopicIdentity] = {}
    for side in job.inputs:
        ask = getattr(side.source, "identities", None)
        found.update(ask() if ask is not None else {})
    for note in compare(_identities(stored.entries if stored is not None else {}), found):
        log.warning("%s", note)
    return {topic: asdict(identity) for topic, identity in found.items()}


def _identities(entries: Mapping[str, Any]) -> dict[str, TopicIdentity]:
    """Return what topics a manifest knows."""
    return {topic: TopicIdentity(**entry) for topic, entry in (entries.get("topics") or {}).items()}


def _check_clusters(inputs: Sequence[Input]) -> None:
    """Refuse topics of one name in two clusters: what is known of a topic is known by its name."""
    servers: dict[str, set[str]] = {}
    for side in inputs:
        settings: Any = getattr(side.source, "settings", None)
        if settings is None:
            continue
        mine = {server.strip() for server in settings.servers.split(",")}
        for topic in side.source.topics:
            known = servers.setdefault(topic, mine)
            if not known & mine:
                raise ValueError(
                    f"servers={settings.servers!r}: the topic {topic!r} is read from {','.join(sorted(known))}, too:"
                    " allowed are topics of two names, or one cluster"
                )
            servers[topic] = known | mine


def _first_offsets(pipeline: Pipeline, spark: SparkSession, checkpoint: str | None = None) -> list[list[Any]]:
    """Give where a new query begins in each source partition: joins align windows by it.

    Args:
        pipeline: What the user said.
        spark: The session.
        checkpoint: Where an earlier start may have said it; None for nowhere.
    """
    sources = list(zip(pipeline.sides, [side.source for side in pipeline.streams], strict=True))
    streams = number_streams(sources)
    found: list[list[Any]] = []
    for number, (side, source) in enumerate(sources):
        ask: Callable[[], Mapping[TopicPartition, int]] | None = getattr(source, "first_positions", None)
        known = None if ask is None or checkpoint is None else known_positions(checkpoint, number)
        begun = known if known is not None or ask is None else ask()
        for (topic, partition), (earliest, _) in source.offsets(spark).items():
            first = earliest if begun is None else begun.get((topic, partition), earliest)
            found.append([streams[side, topic], partition, first])
    return sorted(found)


def release() -> str:
    """Give the installed release, `unknown` in a source tree that was not installed."""
    try:
        return version("spark-rewind")
    except PackageNotFoundError:
        return "unknown"
