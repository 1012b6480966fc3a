"""Entries that are lost from a shard's queue, made again out of the source.

An entry lies on the checkpoint's filesystem until it is adopted. Where its file is missing or damaged, the source is
read from the position before the micro-batch to the one behind it, through the same parse and pack stage as then, under
that micro-batch's batch time and `max_ahead`. What comes out must be what was queued, by its digest, which the pointer
has. What a source cannot give again, or gives otherwise (it aged, or was compacted), is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from backend.batch import Positions, SourcePartition, counts_offsets
from backend.errors import HistoryLost, StateCorrupted, StateUnavailable
from backend.spark.pack.assembling import Packed, assemble, packed_rows
from backend.spark.pack.frames import PACKED_SCHEMA
from backend.spark.pack.packing import packer
from backend.spark.session.settings import apart
from recovery.commit.manifest import read_manifest
from recovery.commit.option_sets import ByVersion
from recovery.commit.pointer import RestoringPointer
from recovery.failures import losses_named
from recovery.files import Files
from recovery.jobs import queue_files
from recovery.queue.entries import COMMAND, Draft, entry_name, lost_of, read_queue
from recovery.share import ShardInput

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from backend.spark.job import Job

log = logging.getLogger("rewind.queue")
LOST = "a shard's queued input is lost"
Ranges = Mapping[SourcePartition, tuple[int, int]]


def mend_queue(
    spark: SparkSession, job: Job, checkpoint: str, pointer: RestoringPointer, arrow_rows: int = 200_000
) -> int:
    """Make the entries again that are missing or damaged in a shard's queue; return how many.

    Args:
        spark: The session.
        job: The job.
        checkpoint: Spark's checkpoint location.
        pointer: The committed one.
        arrow_rows: Rows per Arrow batch.

    Raises:
        HistoryLost: One cannot be had again.
    """
    files = queue_files(checkpoint)
    try:
        read_queue(files, pointer)
        return 0
    except (StateUnavailable, StateCorrupted) as error:
        log.warning("%s", error)
    max_ahead_ms, once = _max_ahead(checkpoint), job.looking_once()

    def read(draft: Draft, ranges: Ranges) -> list[Packed]:
        return _read(spark, job, once, draft, ranges, max_ahead_ms.at(draft.entry.commit.version), arrow_rows)

    return make_again(files, pointer, job, job.offsets(spark), read, job.began(checkpoint))


def make_again(
    files: Files,
    pointer: RestoringPointer,
    job: Job,
    available: Ranges,
    read: Callable[[Draft, Ranges], list[Packed]],
    began: Mapping[SourcePartition, int] = MappingProxyType({}),
) -> int:
    """Make the entries again that are missing or damaged in a shard's queue; return how many.

    Args:
        files: `<checkpoint>/rewind/queue`.
        pointer: The committed one.
        job: The job.
        available: What the sources hold: first offset and end, exclusive.
        read: Gives the packed rows of the shard for offsets of a micro-batch.
        began: Where the query began to read source partitions, as far as that was said.

    Raises:
        HistoryLost: One cannot be had again.
    """
    lost = lost_of(files, pointer)
    for draft in lost:
        ranges = _ranges(job, files, draft, available, began)
        if not draft.put(files, _assembled(job, draft, read(draft, ranges) if ranges else [])):
            raise _gone(files, draft, "the source gives other messages than those that were queued")
        log.warning("%s was lost, and is made again from the source", entry_name(pointer.shard, draft.entry.commit))
    try:
        read_queue(files, pointer)
    except (StateUnavailable, StateCorrupted) as error:  # of which the pointer knows too little
        raise HistoryLost(LOST, where=error.where, why=f"{error.what}: {error.why}", command=COMMAND) from error
    return len(lost)


def _max_ahead(checkpoint: str) -> ByVersion[int | None]:
    stored = read_manifest(checkpoint)
    assert stored is not None, "a shard that queues has a manifest"
    today = stored.sets[-1].options
    return ByVersion(tuple((one.since, {**today, **one.options}["max_ahead_ms"]) for one in stored.sets))


def _ranges(job: Job, files: Files, draft: Draft, available: Ranges, began: Mapping[SourcePartition, int]) -> Ranges:
    """Return the offsets of a micro-batch; a source partition that has brought nothing before begins where it does."""
    before = draft.entry.positions
    ranges: dict[SourcePartition, tuple[int, int]] = {}
    for stream, partition, position in draft.entry.after:
        key = (stream, partition)
        old = before[key].next_offset if key in before else 0
        if old == position.next_offset:
            continue
        topic = job.topics.get(stream, f"stream {stream}")
        if stream in job.ranked:
            raise _gone(files, draft, f"{topic} is a DataFrame, which cannot be read again")
        earliest, end = available.get(key, (0, 0))
        first = old or began.get(key, 0)
        if position.next_offset > end or (first and position.next_offset <= earliest):
            why = f"{topic} partition {partition} has offsets {earliest} to {end}, {old} to {position.next_offset}"
            raise _gone(files, draft, f"{why} are needed")
        ranges[key] = (max(first, earliest), position.next_offset)
    return ranges


def _read(
    spark: SparkSession,
    job: Job,
    once: Job,
    draft: Draft,
    ranges: Ranges,
    max_ahead_ms: int | None,
    arrow_rows: int,
) -> list[Packed]:
    pack = packer(ByVersion.always(job.pack_plan(max_ahead_ms)), partial(int, draft.entry.time_ms))
    session = apart(spark, len(job.grouping), arrow_rows, session=job.session)
    packed = once.replay(session, ranges, pack, PACKED_SCHEMA)
    if packed is None:
        return []
    with losses_named(partial(job.replay, session, ranges, pack, PACKED_SCHEMA)):
        rows = packed.where(packed["shard"] == job.grouping[draft.entry.shard]).collect()
    return list(packed_rows([{name: [row[name] for row in rows] for name in packed.columns}]))


def _assembled(job: Job, draft: Draft, rows: list[Packed]) -> ShardInput:
    entry = draft.entry
    positions: Positions = entry.positions
    if not rows:
        return ShardInput(entry.time_ms, None, positions)
    where = f"shard {entry.shard}, micro-batch {entry.commit.version}"
    return assemble(
        rows, positions, fields=job.message_fields, shard=entry.shard, where=where, topics=job.topics,
        by_offset=counts_offsets(job.operator),
    )  # fmt: skip


def _gone(files: Files, draft: Draft, why: str) -> HistoryLost:
    where = f"{files.uri}/{entry_name(draft.entry.shard, draft.entry.commit)}"
    return HistoryLost(LOST, where=where, why=why, command=COMMAND)
