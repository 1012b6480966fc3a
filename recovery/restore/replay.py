"""Replay on Spark's own engine: read exactly the missing offsets, and build a shard's snapshot out of them.

The source and the changelog are the truth. A replay is a batch read of the offset ranges that the commit records name,
through the same parse and pack input as the stream; each Arrow batch becomes, per shard, one sorted chunk of
message-store rows on the checkpoint's filesystem, so memory is bounded by the Arrow batch. Then each shard is built
from its changelog and its chunks, proven by count and digest, and published as a snapshot, which any executor takes.

Files of a run: `<checkpoint>/rewind/replay/<run uuid>/<shard>/<rows>-<uuid>.arrow`, removed when the run ends.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backend.batch import BEFORE, MESSAGE_FIELDS, NO_TIME, Operator, SourcePartition
from backend.errors import StateUnavailable
from backend.rocks import RocksStore
from backend.spark.pack import frames, packing
from backend.spark.pack.assembling import with_fields
from backend.spark.session.settings import apart
from backend.store.rows import StoreRows
from recovery.changelog.rejected import with_rows
from recovery.commit.option_sets import versions_in
from recovery.commit.pointer import Commit, CommitRecord, Pointer, decode, read_commit_row
from recovery.commit.relocation import check_settled
from recovery.commit.scratch import scratch_directory
from recovery.commit.shard_directory import ShardDirectory
from recovery.commit.spark_files import check_state
from recovery.failures import damaged_state, losses_named
from recovery.files import Files, open_files
from recovery.jobs import ShardJob, snapshots
from recovery.killpoints import kill_point
from recovery.restore.build import Restored, above_bounds, accepting, restore_shard
from recovery.restore.planner import replay_ranges

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from backend.spark.job import Job

DIRECTORY = "rewind/replay"
CHUNK_SCHEMA = pa.schema([("key", pa.large_binary()), ("value", pa.large_binary())])
PIECE_BYTES = 8 * 1024 * 1024
READ_TRIES = 3
"""Of the pointers beside a running query."""
_REPAIRING = "spark.sql.streaming.stateStore.autoSnapshotRepair.enabled"
"""Where Spark cannot load a snapshot, it tries older ones, and tells of the oldest in the end."""
_REPORT = "shard int, name string, first binary"
_REPORT_ARROW = pa.schema([("shard", pa.int32()), ("name", pa.string()), ("first", pa.binary())])


def read_pointers(spark: SparkSession, checkpoint: str, shards: int) -> dict[int, Pointer]:
    """Read the last committed pointers out of Spark's state, by shard; only shards that have committed.

    Args:
        spark: The session.
        checkpoint: Spark's checkpoint location.
        shards: Number of shards.

    Raises:
        StateUnavailable: The checkpoint was copied or moved, and not started since.
        PointerDamaged: A file of Spark's state is damaged or gone.
    """
    if not versions_in(checkpoint, "commits"):
        return {}
    check_state(checkpoint, shards)
    check_settled(checkpoint)
    spark.streams.active  # noqa: B018 - starts Spark's state store coordinator, which the reader asks for
    session = apart(spark, shards, 1024, checkpoint)
    reader = session.read.format("statestore").option("stateVarName", "pointer")
    repairing = True
    for tries_left in reversed(range(READ_TRIES + 1)):
        committed = versions_in(checkpoint, "commits")
        try:
            rows = reader.load(checkpoint).selectExpr("value.value as pointer").collect()
            break
        except Exception as error:
            damaged = damaged_state(error, checkpoint)
            if damaged is None:
                raise
            if repairing:  # what was wrong with the newest one is not told yet: a disk that fails is no damage
                repairing = False
                session.conf.set(_REPAIRING, "false")
                continue
            if not tries_left or versions_in(checkpoint, "commits") == committed:
                raise damaged from error
            # else a query runs on, and has let go of what was to be read
    pointers = (decode(bytes(row["pointer"])) for row in rows)
    return {pointer.shard: pointer for pointer in pointers}


def write_chunks(
    spark: SparkSession,
    job: Job,
    checkpoint: str,
    run: str,
    records: Mapping[int, CommitRecord],
    arrow_rows: int,
    at_once: int | None = None,
) -> dict[int, list[str]]:
    """Write the accepted messages of all ranges as sorted chunks; give the chunk names per shard, by their first keys.

    Args:
        spark: The session.
        job: The job.
        checkpoint: Spark's checkpoint location.
        run: Folder of the chunks.
        records: What each shard is restored to.
        arrow_rows: Rows per Arrow batch.
        at_once: Replay in short jobs of so many source partitions, because a query runs beside; None: all in one.
    """
    whole: dict[SourcePartition, tuple[int, int]] = {}
    for record in records.values():
        for key, (low, high) in replay_ranges(record).items():
            known = whole.get(key, (low, high))
            whole[key] = (min(low, known[0]), max(high, known[1]))
    if not whole:
        return {}
    kill_point("restore_replay")
    names: dict[int, list[tuple[bytes, str]]] = {}
    session = apart(spark, len(job.grouping), arrow_rows, session=job.session)
    write = chunk_writer(job.operator, job.message_fields, records, checkpoint, run)
    once = job.looking_once()
    for ranges in slices(whole, at_once) if at_once is not None else (whole,):
        chunks = once.replay(session, ranges, write, _REPORT)
        if chunks is None:
            continue
        # retention may take offsets away while they are read
        with losses_named(partial(job.replay, session, ranges, write, _REPORT)):
            reports = chunks.collect()
        for report in reports:
            names.setdefault(report["shard"], []).append((bytes(report["first"]), report["name"]))
    return {shard: [name for _, name in sorted(found)] for shard, found in names.items()}


SLICE_S = 0.5
"""What one job beside a running query is to take at most."""
FIRST_OFFSETS, LEAST_OFFSETS, MOST_OFFSETS = 10_000, 1_000, 1_000_000
"""Of a source partition: in the first such job, and the bounds of those after it."""
GROWTH = 4.0
"""How many times as many offsets a job may have as the one before it: the first ones mostly wait for their workers."""


def slices(
    ranges: Mapping[SourcePartition, tuple[int, int]], at_once: int, clock: Callable[[], float] = time.monotonic
) -> Iterator[dict[SourcePartition, tuple[int, int]]]:
    """Cut ranges of offsets into jobs of about `SLICE_S`, by what the job before took.

    The time until the next slice is asked for is what the last one took: from it follows how many offsets the next one
    has, at most `GROWTH` times as many as before, so that it takes `SLICE_S` at most.

    Args:
        ranges: Source partition -> first offset and end, exclusive.
        at_once: Source partitions in a slice.
        clock: Seconds.

    >>> list(slices({(0, 0): (0, 12_000), (0, 1): (7, 9)}, at_once=1, clock=lambda: 0.0))
    [{(0, 0): (0, 10000)}, {(0, 0): (10000, 12000)}, {(0, 1): (7, 9)}]
    """
    rest, offsets = {key: (low, end) for key, (low, end) in sorted(ranges.items()) if low < end}, FIRST_OFFSETS
    while rest:
        part = {key: (low, min(low + offsets, end)) for key, (low, end) in islice(rest.items(), at_once)}
        begun_s = clock()
        yield part
        took_s = clock() - begun_s
        longest = max(high - low for low, high in part.values())
        if longest == offsets or took_s > SLICE_S:  # a short rest says nothing of a longer slice, unless it was slow
            wanted = int(longest * min(GROWTH, SLICE_S / took_s if took_s > 0 else GROWTH))
            offsets = min(max(wanted, LEAST_OFFSETS), MOST_OFFSETS)
        for key, (_, high) in part.items():
            if high == rest[key][1]:
                del rest[key]
            else:
                rest[key] = high, rest[key][1]


def chunk_writer(
    operator: Operator,
    message_fields: Sequence[pa.Field],
    records: Mapping[int, CommitRecord],
    checkpoint: str,
    run: str,
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Give the function for `mapInArrow` that turns source rows into sorted chunks of message-store rows."""

    places = [(field.name, field.type) for field in MESSAGE_FIELDS if field.name != BEFORE]

    accept = {shard: accepting(record) for shard, record in records.items()}
    # tasks need no second copy of what they leave out
    bare = {shard: msgspec.structs.replace(record, rejected=[]) for shard, record in records.items()}

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        files = open_files(checkpoint)
        for batch in batches:
            fields = [one for one in message_fields if frames.column_name(one.name) in batch.schema.names]
            schema = pa.schema([*MESSAGE_FIELDS, *fields])
            names = [frames.SHARD_IN, *dict(places), *(frames.column_name(one.name) for one in fields)]
            good, rows = packing.is_good(batch), batch.select(names)
            for piece in pieces(rows if pc.all(good).as_py() else rows.filter(good)):
                for shard, record in bare.items():
                    here = piece.filter(pc.equal(piece.column(frames.SHARD_IN), shard))
                    columns = [
                        *(here.column(name).cast(kind) for name, kind in places),
                        pa.array(np.full(here.num_rows, NO_TIME, dtype=np.int64)),
                        *(here.column(frames.column_name(one.name)).cast(one.type) for one in fields),
                    ]
                    mine = accept[shard](with_fields(pa.Table.from_arrays(columns, schema=schema), message_fields))
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
    rows = above_bounds(operator.replay_rows(messages), record.bounds)
    name = f"{folder}/{len(rows)}-{uuid.uuid4().hex}.arrow"
    data = memoryview(frames.to_ipc_buffer(pa.table([rows.keys, rows.values], CHUNK_SCHEMA)))
    files.write(name, [data], durable=False)  # a restore that dies is made again from its beginning
    report = {"shard": record.shard, "name": name, "first": rows.keys[0].as_py() if len(rows) else b""}
    return pa.RecordBatch.from_pylist([report], _REPORT_ARROW)


def build_snapshot(
    job: ShardJob, commit: Commit, checkpoint: str, names: Sequence[str], start: Commit | None = None
) -> Restored:
    """Build one shard's database from its changelog and chunks, and publish it as a snapshot of its commit.

    Args:
        job: The shard.
        commit: The committed commit.
        checkpoint: Where chunks and snapshots are.
        names: Chunks below the checkpoint.
        start: Begin with the local database, which is at this commit.

    Raises:
        StateUnavailable: There is no local database at `start`.
    """
    kill_point("restore_changelog", commit.version)
    history = job.changelog.read(job.shard, commit)
    with scratch_directory(job.local_dir / job.query_id, "restore") as scratch:
        chunks = chain(read_chunks(checkpoint, names), logged_chunks(job, with_rows(history), start))
        with _older(job, start) if start is not None else nullcontext() as older:
            restored = restore_shard(history, chunks, job.operator, scratch / "db", older=older)
        kill_point("restore_publish", commit.version)
        with RocksStore.open(scratch / "db", create=False) as store:
            store.checkpoint(scratch / "copy")
        snapshots(checkpoint).publish(history.record, scratch / "copy", check=start is not None)
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


def logged_chunks(job: ShardJob, record: CommitRecord, above: Commit | None = None) -> Iterator[StoreRows]:
    """Read a shard's logged messages as chunks of message-store rows; none where no messages are logged.

    Args:
        job: The shard.
        record: The commit that is restored.
        above: Only those of later micro-batches than this ancestor's.

    Raises:
        ChangelogDamaged: A segment is missing or damaged.
    """
    if job.message_log is None:
        return
    accept = accepting(record)
    for messages in job.message_log.messages(record, above):
        for batch in accept(messages).combine_chunks().to_batches():
            for piece in pieces(batch):
                yield job.operator.replay_rows(pa.Table.from_batches([piece]))


def read_chunks(checkpoint: str, names: Sequence[str]) -> Iterator[StoreRows]:
    """Read what `write_chunks` wrote, one chunk at a time."""
    files = open_files(checkpoint)
    for name in names:
        table = frames.from_ipc(files.read(name), f"{files.uri}/{name}")
        yield StoreRows(*(column.combine_chunks() for column in table.columns))
