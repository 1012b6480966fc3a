"""Replay on Spark's own engine: read exactly the missing offsets, and build a shard's package out of them.

The source and the changelog are the truth. A replay is a batch read of the offset ranges that the commit records name,
through the same parse and pack input as the stream; each Arrow batch becomes, per shard, one sorted chunk of
message-store rows on the checkpoint's filesystem, so memory is bounded by the Arrow batch. Then each shard is built
from its changelog and its chunks, proven by count and digest, and published as a package, which any executor takes.

Files of a run: `<checkpoint>/rewind/replay/<run uuid>/<shard>/<rows>-<uuid>.arrow`, removed when the run ends.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa

from backend.batch import BEFORE, MESSAGE_FIELDS, NO_TIME, Operator, SourcePartition
from backend.errors import StateUnavailable
from backend.rocks import RocksStore
from backend.sources.kafka_loss import losses_named
from backend.spark import frames, packing
from backend.spark.settings import settings
from recovery.attempt import ShardJob
from recovery.files import Files, open_files
from recovery.jobs import snapshots
from recovery.killpoints import kill_point
from recovery.moved import check_settled
from recovery.opening import read_commit_row
from recovery.planner import replay_ranges
from recovery.pointer import Commit, CommitRecord, Pointer, decode
from recovery.restore import Restored, Rows, above_bounds, accepted, catch_up, restore_shard
from recovery.scratch import scratch_directory
from recovery.shard import ShardDirectory

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DIRECTORY = "rewind/replay"
CHUNK_SCHEMA = pa.schema([pa.field("key", pa.large_binary()), pa.field("value", pa.large_binary())])
PIECE_BYTES = 8 * 1024 * 1024
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

    def offsets(self, spark: SparkSession) -> Mapping[SourcePartition, tuple[int, int]]:
        """Give what the sources hold: earliest offset and end, exclusive."""

    def replay(
        self,
        spark: SparkSession,
        ranges: Mapping[SourcePartition, tuple[int, int]],
        stage: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
        schema: str,
    ) -> DataFrame | None:
        """Put exactly these offsets through a stage that takes the rows of the pack stage."""


def read_pointers(spark: SparkSession, checkpoint: str, shards: int, version: int | None = None) -> dict[int, Pointer]:
    """Read the committed pointers out of Spark's state, by shard; only shards that have committed.

    Args:
        spark: The session.
        checkpoint: Spark's checkpoint location.
        shards: Number of shards.
        version: Micro-batch; None for the last committed one.

    Raises:
        StateUnavailable: The checkpoint was copied or moved, and not started since.
    """
    if not [name for name in open_files(checkpoint).list("commits") if name.isdigit()]:
        return {}
    check_settled(checkpoint)
    spark.streams.active  # noqa: B018 - starts Spark's state store coordinator, which the reader asks for
    with settings(spark, shards, 1024):
        reader = spark.read.format("statestore").option("stateVarName", "pointer")
        if version is not None:
            reader = reader.option("batchId", version)
        rows = reader.load(checkpoint).selectExpr("value.value as pointer").collect()
    pointers = (decode(bytes(row["pointer"])) for row in rows)
    return {pointer.shard: pointer for pointer in pointers}


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
        write = chunk_writer(job.operator, job.message_fields, records, checkpoint, run)
        chunks = job.replay(spark, whole, write, _REPORT)
        if chunks is None:
            return {}
        # retention may take offsets away while they are read
        with losses_named(lambda: job.replay(spark, whole, write, _REPORT)):
            reports = chunks.collect()
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
            for piece in pieces(batch):
                good = piece.filter(packing.is_good(piece))
                schema = pa.schema([*MESSAGE_FIELDS, *message_fields])
                columns = [
                    good.column(frames.column_name(field.name)).cast(field.type)
                    if field.name != BEFORE
                    else pa.array(np.full(good.num_rows, NO_TIME, dtype=np.int64))
                    for field in schema
                ]
                messages = pa.RecordBatch.from_arrays(columns, schema=schema)
                shard_of = np.asarray(good.column(frames.SHARD_IN), dtype=np.int64)
                for shard, record in records.items():
                    mine = accepted(pa.Table.from_batches([messages.filter(pa.array(shard_of == shard))]), record)
                    if mine.num_rows:
                        yield _chunk(files, operator, mine, record, f"{run}/{shard}")
                        kill_point("during_replay", record.commit.version)

    return write


def pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Cut an Arrow batch into pieces of about `PIECE_BYTES`: a chunk exists several times over while it is made."""
    rows = max(1, batch.num_rows * PIECE_BYTES // max(PIECE_BYTES, batch.nbytes))
    return (batch.slice(start, rows) for start in range(0, batch.num_rows, rows))


def _chunk(files: Files, operator: Operator, messages: pa.Table, record: CommitRecord, folder: str) -> pa.RecordBatch:
    """Write messages of one shard as a chunk and give its report."""
    keys, values = above_bounds(operator.replay_rows(messages), record.bounds)
    name = f"{folder}/{len(keys)}-{uuid.uuid4().hex}.arrow"
    table = pa.table([pa.array(keys, pa.large_binary()), pa.array(values, pa.large_binary())], CHUNK_SCHEMA)
    data = memoryview(frames.to_ipc_buffer(table))
    files.write(name, [data], durable=False)  # a restore that dies is made again from its beginning
    report = {"shard": record.shard, "name": name, "rows": len(keys), "bytes": table.nbytes}
    return pa.RecordBatch.from_pylist([report], _REPORT_ARROW)


def build_package(
    job: ShardJob, commit: Commit, checkpoint: str, names: Sequence[str], start: Commit | None = None
) -> Restored:
    """Build one shard's database from its changelog and chunks, and publish it as a package of its commit.

    Args:
        job: The shard.
        commit: The committed commit.
        checkpoint: Where chunks and packages are.
        names: Chunks below the checkpoint.
        start: Begin with the local database, which is at this commit.

    Raises:
        StateUnavailable: There is no local database at `start`.
    """
    kill_point("restore_changelog", commit.version)
    history = job.changelog.read(job.shard, commit)
    with scratch_directory(job.local_dir / job.query_id, "restore") as scratch:
        chunks = read_chunks(checkpoint, names)
        if start is None:
            restored = restore_shard(history, chunks, job.operator, scratch / "db")
        else:
            with _older(job, start) as older:
                restored = catch_up(history, chunks, job.operator, older, scratch / "db")
        kill_point("restore_publish", commit.version)
        with RocksStore.open(scratch / "db", create=False) as store:
            store.checkpoint(scratch / "copy")
        snapshots(checkpoint).publish(history.record, scratch / "copy")
    return restored


@contextmanager
def _older(job: ShardJob, start: Commit) -> Iterator[RocksStore]:
    """Open the local database of a shard, which must be at a commit, under its lock."""
    directory = ShardDirectory(job.local_dir, job.query_id, job.shard)
    with directory.lock(job.lock_wait_s):
        generation = directory.current()
        if generation is None:
            raise StateUnavailable("the older copy of a shard is not here", where=job.where)
        with RocksStore.open(generation.database, create=False) as store:
            row = read_commit_row(store)
            if row is None or row.commit != start:
                raise StateUnavailable("the copy of a shard is at another commit by now", where=job.where)
            yield store


def read_chunks(checkpoint: str, names: Sequence[str]) -> Iterator[Rows]:
    """Read what `write_chunks` wrote, one chunk at a time."""
    files = open_files(checkpoint)
    for name in names:
        table = frames.from_ipc(files.read(name), f"{files.uri}/{name}")
        yield table["key"].to_pylist(), table["value"].to_pylist()
