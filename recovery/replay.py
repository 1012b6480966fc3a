"""Restore on Spark's own engine: probe all shards, replay exactly the missing offsets, build packages, prove them.

The source and the changelog are the truth. A replay is a batch read of the offset ranges that the commit records name,
through the same parse and pack input as the stream; each Arrow batch becomes, per shard, one sorted chunk of
message-store rows on the checkpoint's filesystem, so memory is bounded by the Arrow batch. Then each shard is built
from its changelog and its chunks, proven by count and digest, and published as a package, which any executor takes.

Files of a run: `<checkpoint>/rewind/replay/<run uuid>/<shard>/<uuid>.arrow`, removed when the run ends.
"""

from __future__ import annotations

import json
import logging
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa

from backend.batch import BEFORE, MESSAGE_FIELDS, NO_TIME, Operator, SourcePartition
from backend.errors import RewindError, StateAhead, StateCorrupted
from backend.rocks import RocksStore
from backend.spark import frames
from backend.spark.settings import settings
from recovery.attempt import ShardJob
from recovery.files import open_files
from recovery.jobs import snapshots
from recovery.killpoints import kill_point
from recovery.listener import Listeners, RestoreListener, Restoring
from recovery.opening import Opening
from recovery.planner import replay_ranges
from recovery.pointer import Commit, CommitRecord, Pointer, decode, encode
from recovery.restore import Restored, Rows, above_bounds, accepted, restore_shard
from recovery.shard import ShardDirectory

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_log = logging.getLogger("rewind.restore")

DIRECTORY = "rewind/replay"
CHUNK_SCHEMA = pa.schema([pa.field("key", pa.large_binary()), pa.field("value", pa.large_binary())])
_REPORT = "shard int, name string, rows bigint, bytes bigint"
_REPORT_ARROW = pa.schema(
    [
        pa.field("shard", pa.int32()),
        pa.field("name", pa.string()),
        pa.field("rows", pa.int64()),
        pa.field("bytes", pa.int64()),
    ]
)


class ReplayableJob(Protocol):
    """What a replay needs of a job (`backend.spark.job.Job`)."""

    @property
    def grouping(self) -> tuple[int, ...]:
        """Grouping value per shard."""

    @property
    def operator(self) -> Operator:
        """The stateful operator."""

    @property
    def message_fields(self) -> tuple[pa.Field, ...]:
        """Arrow fields of its input."""

    def replay(self, spark: SparkSession, ranges: Mapping[SourcePartition, tuple[int, int]]) -> DataFrame | None:
        """Give the rows of the pack stage for exactly these offsets."""


def read_pointers(spark: SparkSession, checkpoint: str, shards: int, version: int | None = None) -> dict[int, Pointer]:
    """Read the committed pointers out of Spark's state, by shard; only shards that have committed.

    Args:
        spark: The session.
        checkpoint: Spark's checkpoint location.
        shards: Number of shards.
        version: Micro-batch; None for the last committed one.
    """
    if not [name for name in open_files(checkpoint).list("commits") if name.isdigit()]:
        return {}
    spark.streams.active  # noqa: B018 - starts Spark's state store coordinator, which the reader asks for
    with settings(spark, shards, 1024):
        reader = spark.read.format("statestore").option("stateVarName", "pointer")
        if version is not None:
            reader = reader.option("batchId", version)
        rows = reader.load(checkpoint).selectExpr("value.value as pointer").collect()
    pointers = (decode(bytes(row["pointer"])) for row in rows)
    return {pointer.shard: pointer for pointer in pointers}


def restore_shards(
    spark: SparkSession,
    job: ReplayableJob,
    checkpoint: str,
    make: Callable[[str, int], ShardJob],
    why: str,
    listeners: Sequence[RestoreListener] = (),
    arrow_rows: int = 200_000,
) -> int:
    """Restore every shard whose state is not usable where it was probed; no task of the query may be running.

    Args:
        spark: The session.
        job: The job.
        checkpoint: Spark's checkpoint location.
        make: Makes the job of a shard, as in the processor.
        why: What the query failed with, for the listeners.
        listeners: Told of each shard.
        arrow_rows: Rows per Arrow batch.

    Returns:
        The number of shards restored, or made available to other hosts when none had to be.

    Raises:
        HistoryLost: The source or the changelog no longer has what is needed.
        RestoreMismatch: Count or digest of the replayed messages differ from the committed ones.
        ChangelogDamaged: The changelog is damaged.
    """
    query_id = _query_id(checkpoint)
    pointers = read_pointers(spark, checkpoint, len(job.grouping))
    found = probe(spark, {shard: pointers.get(shard) for shard in range(len(job.grouping))}, partial(make, query_id))
    # a shard that has committed nothing begins anew once what a rolled back attempt left is put aside
    reasons = {shard: reason for shard, reason in found.items() if shard in pointers}
    if not found:
        # all is well where it was looked at, so the task looked on another host: give it something to take there
        return _share_all(spark, pointers, partial(make, query_id))
    if not reasons:
        return len(found)
    changelog = make(query_id, 0).changelog
    records = {shard: changelog.read(shard, pointers[shard].commit).record for shard in reasons}
    watch = Listeners(listeners)
    under_way = {
        shard: Restoring(
            shard,
            pointers[shard].commit.name,
            reason or why,
            "replay" if records[shard].replay_from else "changelog",
            records=records[shard].message_count,
            ranges=replay_ranges(records[shard]),
        )
        for shard, reason in reasons.items()
    }
    for restoring in under_way.values():
        watch.start(restoring)
    run = f"{DIRECTORY}/{uuid.uuid4().hex}"
    try:
        chunks = write_chunks(spark, job, checkpoint, run, records, arrow_rows)
        built = _build(spark, checkpoint, run, partial(make, query_id), {s: pointers[s] for s in reasons}, chunks)
    except BaseException as error:
        for restoring in under_way.values():
            watch.suspended(restoring, str(error))
        raise
    finally:
        open_files(checkpoint).delete_folder(run)
    for shard, (rows, length, seconds) in built.items():
        watch.end(under_way[shard], rows, length, seconds)
    return len(found)


def probe(
    spark: SparkSession, pointers: Mapping[int, Pointer | None], make: Callable[[int], ShardJob]
) -> dict[int, str]:
    """Open every shard at its pointer, in one Spark job; give the shards that cannot be opened, and why.

    A local state that is newer than the pointer (None: nothing is committed) is put aside here: no task is running, so
    Spark was rolled back.
    """
    if not pointers:
        return {}

    def look(items: Iterable[tuple[int, bytes | None]]) -> Iterator[tuple[int, str]]:
        for shard, data in items:
            why = unusable(make(shard), decode(data) if data is not None else None)
            if why is not None:
                yield shard, why

    items = [(s, encode(pointer) if pointer is not None else None) for s, pointer in sorted(pointers.items())]
    return dict(spark.sparkContext.parallelize(items, len(items)).mapPartitions(look).collect())


def unusable(job: ShardJob, pointer: Pointer | None) -> str | None:
    """Say why a shard cannot be opened at its pointer here; None when it can. What is ahead or damaged is put aside."""
    directory = ShardDirectory(job.local_dir, job.query_id, job.shard)
    with directory.lock(job.lock_wait_s):
        if pointer is None and directory.current() is None:
            return None
        try:
            opened = Opening(directory, job.where, job.packages, job.listeners).at(pointer)
        except StateAhead as error:
            directory.condemn()
            return str(error)
        except RewindError as error:
            return str(error)
        try:
            check_readable(opened.store)
        except StateCorrupted as error:
            directory.condemn()
            return str(error)
        finally:
            opened.store.close()
    return None


def _share_all(spark: SparkSession, pointers: Mapping[int, Pointer], make: Callable[[int], ShardJob]) -> int:
    """Publish packages of all shards, in one Spark job; give how many. An executor that has no state gives none."""

    def look(items: Iterable[tuple[int, bytes]]) -> Iterator[int]:
        for shard, data in items:
            try:
                yield int(share(make(shard), decode(data)))
            except RewindError as error:
                _log.warning("shard %d is not shared from here: %s", shard, error)

    items = [(shard, encode(pointer)) for shard, pointer in sorted(pointers.items())]
    return sum(spark.sparkContext.parallelize(items, len(items)).mapPartitions(look).collect()) if items else 0


def share(job: ShardJob, pointer: Pointer) -> bool:
    """Publish the state of a shard that lies here as a package of its commit, for other hosts.

    Returns:
        False when there is one already, or no place for packages.

    Raises:
        StateUnavailable: The state does not lie here.
    """
    directory = ShardDirectory(job.local_dir, job.query_id, job.shard)
    with directory.lock(job.lock_wait_s):
        opened = Opening(directory, job.where, job.packages, job.listeners).at(pointer)
        try:
            offers = job.packages.offers(job.shard) if job.packages is not None else ()
            if job.packages is None or any(offer.full and offer.commit == pointer.commit for offer in offers):
                return False
            assert opened.row is not None, "a pointer's database has a commit row"
            scratch = job.local_dir / job.query_id / f"share-{uuid.uuid4().hex}"
            scratch.mkdir(parents=True, mode=0o700)
            try:
                opened.store.checkpoint(scratch / "copy")
                job.packages.publish(opened.row, scratch / "copy")
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        finally:
            opened.store.close()
    return True


def check_readable(store: RocksStore) -> None:
    """Read every key and value once, so that RocksDB checks each block's checksum.

    Raises:
        StateCorrupted: A block does not match its checksum.
    """
    for _ in store.scan(b"\x00", None):
        pass


def write_chunks(
    spark: SparkSession,
    job: ReplayableJob,
    checkpoint: str,
    run: str,
    records: Mapping[int, CommitRecord],
    arrow_rows: int,
) -> dict[int, list[str]]:
    """Write the accepted messages of all ranges as sorted chunks; give the chunk names per shard."""
    whole: dict[SourcePartition, tuple[int, int]] = {}
    for record in records.values():
        for key, (low, high) in replay_ranges(record).items():
            known = whole.get(key, (low, high))
            whole[key] = (min(low, known[0]), max(high, known[1]))
    if not whole:
        return {}
    kill_point("restore_replay")
    with settings(spark, len(job.grouping), arrow_rows):
        rows = job.replay(spark, whole)
        if rows is None:
            return {}
        write = chunk_writer(job.operator, job.message_fields, records, checkpoint, run)
        reports = rows.mapInArrow(write, _REPORT).collect()
    names: dict[int, list[str]] = {}
    for report in reports:
        names.setdefault(report["shard"], []).append(report["name"])
    return names


def chunk_writer(
    operator: Operator,
    message_fields: Sequence[pa.Field],
    records: Mapping[int, CommitRecord],
    checkpoint: str,
    run: str,
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Give the function for `mapInArrow` that turns source rows into sorted chunks of message-store rows."""

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        files = open_files(checkpoint)
        for batch in batches:
            good = batch.filter(frames.is_good(batch))
            schema = pa.schema([*MESSAGE_FIELDS, *message_fields])
            columns = [
                good.column(field.name).cast(field.type)
                if field.name != BEFORE
                else pa.array(np.full(good.num_rows, NO_TIME, dtype=np.int64))
                for field in schema
            ]
            messages = pa.RecordBatch.from_arrays(columns, schema=schema)
            shard_of = np.asarray(good.column(frames.SHARD_IN), dtype=np.int64)
            for shard, record in records.items():
                mine = accepted(pa.Table.from_batches([messages.filter(pa.array(shard_of == shard))]), record)
                if not mine.num_rows:
                    continue
                keys, values = operator.replay_rows(mine)
                keys, values = above_bounds((keys, values), record.bounds)
                name = f"{run}/{shard}/{uuid.uuid4().hex}.arrow"
                table = pa.table([pa.array(keys, pa.large_binary()), pa.array(values, pa.large_binary())], CHUNK_SCHEMA)
                files.write(name, [frames.to_ipc(table)])
                yield pa.RecordBatch.from_pylist(
                    [{"shard": shard, "name": name, "rows": len(keys), "bytes": table.nbytes}], _REPORT_ARROW
                )

    return write


def _build(
    spark: SparkSession,
    checkpoint: str,
    run: str,
    make: Callable[[int], ShardJob],
    pointers: Mapping[int, Pointer],
    chunks: Mapping[int, Sequence[str]],
) -> dict[int, tuple[int, int, float]]:
    """Build, prove and publish each shard, in parallel; give rows, bytes and seconds per shard."""

    def build(items: Iterable[tuple[int, bytes, Sequence[str]]]) -> Iterator[tuple[int, tuple[int, int, float]]]:
        for shard, data, names in items:
            restored = build_package(make(shard), decode(data).commit, checkpoint, names)
            yield shard, (restored.rows + restored.messages, restored.length, restored.seconds)

    items = [(shard, encode(pointer), list(chunks.get(shard, ()))) for shard, pointer in sorted(pointers.items())]
    return dict(spark.sparkContext.parallelize(items, len(items)).mapPartitions(build).collect())


def build_package(job: ShardJob, commit: Commit, checkpoint: str, names: Sequence[str]) -> Restored:
    """Build one shard's database from its changelog and chunks, and publish it as a package of its commit.

    Args:
        job: The shard.
        commit: The committed commit.
        checkpoint: Where chunks and packages are.
        names: Chunks below the checkpoint.
    """
    kill_point("restore_changelog", commit.version)
    history = job.changelog.read(job.shard, commit)
    scratch = job.local_dir / job.query_id / f"restore-{uuid.uuid4().hex}"
    scratch.mkdir(parents=True, mode=0o700)
    try:
        restored = restore_shard(history, read_chunks(checkpoint, names), job.operator, scratch / "db")
        kill_point("restore_publish", commit.version)
        with RocksStore.open(scratch / "db", create=False) as store:
            store.checkpoint(scratch / "copy")
        snapshots(checkpoint).publish(history.record, scratch / "copy")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return restored


def read_chunks(checkpoint: str, names: Sequence[str]) -> Iterator[Rows]:
    """Read what `write_chunks` wrote, one chunk at a time."""
    files = open_files(checkpoint)
    for name in names:
        table = frames.from_ipc(files.read(name))
        yield table["key"].to_pylist(), table["value"].to_pylist()


def _query_id(checkpoint: str) -> str:
    """Read Spark's query id: the name of its local state."""
    try:
        return str(json.loads(open_files(checkpoint).read("metadata"))["id"])
    except (FileNotFoundError, ValueError, KeyError) as error:
        raise StateCorrupted(
            "the checkpoint's metadata cannot be read", where=f"{checkpoint}/metadata", why=str(error)
        ) from error
