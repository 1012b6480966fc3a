"""Restore shards on Spark's own engine: probe all of them, replay what is missing, build packages, prove them.

The planner says how: from nothing, or from an older copy that lies here and lacks only what came since. A copy that
cannot be caught up with (it is damaged, or something else than the committed state comes out) is done without: then the
shard is rebuilt from nothing, in the same call.
"""

from __future__ import annotations

import json
import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from backend.batch import SourcePartition
from backend.errors import RewindError, StateCorrupted
from recovery.attempt import ShardJob
from recovery.changelog import Changelog
from recovery.files import Files, open_files
from recovery.listener import Listeners, RestoreListener, Restoring
from recovery.planner import At, CatchUp, Local, Lost, Nothing, Rebuild, Remote, plan, replay_ranges
from recovery.pointer import Commit, CommitRecord, Pointer, decode, encode
from recovery.probe import Unusable, probe, share_all
from recovery.replay import DIRECTORY, ReplayableJob, build_package, read_pointers, write_chunks
from recovery.time_travel import committed_record, with_versions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("rewind.restore")
POLL_S = 0.25


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
    reasons = [shard for shard in found if shard in pointers]
    if not found:
        # all is well where it was looked at, so the task looked on another host: give it something to take there
        return share_all(spark, pointers, partial(make, query_id))
    if not reasons:
        return len(found)
    plans = plan_restores(
        {shard: pointers[shard] for shard in reasons}, found, make(query_id, 0).changelog, job.offsets(spark), why
    )
    open_files(checkpoint).delete_folder(DIRECTORY)  # of a restore whose driver died: nobody else restores now
    run = _Run(spark, job, checkpoint, partial(make, query_id), pointers, Listeners(listeners), arrow_rows)
    failed = run.carry_out(plans)
    if failed:  # what an older copy lacked did not make it whole: from nothing, then
        run.carry_out({shard: Rebuild(plans[shard].record, replay_ranges(plans[shard].record), text)
                       for shard, text in failed.items()})  # fmt: skip
    return len(found)


def plan_restores(
    pointers: Mapping[int, Pointer],
    found: Mapping[int, Unusable],
    changelog: Changelog,
    source: Mapping[SourcePartition, tuple[int, int]],
    why: str,
) -> dict[int, Rebuild | CatchUp]:
    """Ask the planner how each shard is restored.

    Args:
        pointers: Of the shards to restore.
        found: What the probe found of them.
        changelog: Has their commits.
        source: What the sources hold.
        why: What the query failed with, where the probe cannot say better.

    Raises:
        HistoryLost: A shard cannot be restored from what there is; names the versions to be had, if any.
        ChangelogDamaged: The changelog is damaged.
    """
    plans: dict[int, Rebuild | CatchUp] = {}
    for shard, pointer in pointers.items():
        record = committed_record(changelog, pointer, pointers, source)
        row = found[shard].row
        here = At(row.commit, _next_offsets(row)) if row is not None else Nothing()
        chosen = plan(pointer, Local(here), Remote(record=record, source=source), in_task=False)
        if isinstance(chosen, Lost):
            raise with_versions(chosen.error, changelog, pointers, source)
        text = found[shard].why or why
        if isinstance(chosen, CatchUp):
            plans[shard] = replace(chosen, why=text)
        else:  # a database at the pointer that could not be read to its end is no copy to begin with
            plans[shard] = Rebuild(record, replay_ranges(record), text)
    return plans


def _next_offsets(row: CommitRecord) -> dict[SourcePartition, int]:
    return {(stream, partition): position.next_offset for stream, partition, position in row.positions}


@dataclass(slots=True)
class _Run:
    """One restore of some shards."""

    spark: SparkSession
    job: ReplayableJob
    checkpoint: str
    make: Callable[[int], ShardJob]
    pointers: Mapping[int, Pointer]
    watch: Listeners
    arrow_rows: int

    def carry_out(self, plans: Mapping[int, Rebuild | CatchUp]) -> dict[int, str]:
        """Restore shards; give those whose older copy could not be caught up with, and why."""
        under_way = {shard: self._restoring(shard, chosen) for shard, chosen in plans.items()}
        for restoring in under_way.values():
            self.watch.start(restoring)
        run = f"{DIRECTORY}/{uuid.uuid4().hex}"
        records = {shard: wanted(chosen) for shard, chosen in plans.items()}
        try:
            with following(self.watch, under_way, open_files(self.checkpoint), run):
                chunks = write_chunks(self.spark, self.job, self.checkpoint, run, records, self.arrow_rows)
            built = self._build(plans, chunks)
        except BaseException as error:
            for restoring in under_way.values():
                self.watch.suspended(restoring, str(error))
            raise
        finally:
            open_files(self.checkpoint).delete_folder(run)
        failed = {}
        for shard, result in built.items():
            if isinstance(result, str):
                failed[shard] = result
                self.watch.suspended(under_way[shard], result)
            else:
                self.watch.end(under_way[shard], *result)
        return failed

    def _restoring(self, shard: int, chosen: Rebuild | CatchUp) -> Restoring:
        caught_up = isinstance(chosen, CatchUp)
        return Restoring(
            shard,
            chosen.record.commit.name,
            chosen.why,
            "catch-up" if caught_up else "replay" if chosen.ranges else "changelog",
            records=None if caught_up else chosen.record.message_count,
            ranges=chosen.ranges,
        )

    def _build(
        self, plans: Mapping[int, Rebuild | CatchUp], chunks: Mapping[int, Sequence[str]]
    ) -> dict[int, tuple[int, int, float] | str]:
        """Build, prove and publish each shard, in parallel; give rows, bytes and seconds per shard, or why not."""
        make, checkpoint = self.make, self.checkpoint

        def build(
            items: Iterable[tuple[int, bytes, str | None, Sequence[str]]],
        ) -> Iterator[tuple[int, tuple[int, int, float] | str]]:
            for shard, data, start, names in items:
                older = Commit.of_name(start) if start is not None else None
                try:
                    restored = build_package(make(shard), decode(data).commit, checkpoint, names, older)
                except RewindError as error:
                    if older is None:
                        raise
                    yield shard, str(error)
                    continue
                yield shard, (restored.rows + restored.messages, restored.length, restored.seconds)

        items = [
            (
                shard,
                encode(self.pointers[shard]),
                chosen.start.name if isinstance(chosen, CatchUp) else None,
                list(chunks.get(shard, ())),
            )
            for shard, chosen in sorted(plans.items())
        ]
        return dict(self.spark.sparkContext.parallelize(items, len(items)).mapPartitions(build).collect())


@contextmanager
def following(watch: Listeners, under_way: Mapping[int, Restoring], files: Files, run: str) -> Iterator[None]:
    """Tell listeners of each chunk of a replay while it is made: where they lie, executors and driver see them all."""
    ended = threading.Event()
    seen: set[str] = set()

    def look() -> None:
        for shard, restoring in under_way.items():
            for name, length in files.list(f"{run}/{shard}").items():
                if name not in seen:
                    seen.add(name)
                    watch.batch(restoring, {}, int(name.partition("-")[0]), length)

    def follow() -> None:
        while not ended.wait(POLL_S):
            try:
                look()
            except OSError as error:
                log.warning("the progress of a restore is not known now: %s", error)

    thread = threading.Thread(target=follow, name="rewind-progress", daemon=True)
    thread.start()
    try:
        yield
        look()
    finally:
        ended.set()
        thread.join()


def wanted(chosen: Rebuild | CatchUp) -> CommitRecord:
    """Give the commit's record, with the offsets that are to be replayed instead of all."""
    ranges = sorted((stream, partition, start) for (stream, partition), (start, _) in chosen.ranges.items())
    return msgspec.structs.replace(chosen.record, replay_from=ranges)


def _query_id(checkpoint: str) -> str:
    """Read Spark's query id: the name of its local state."""
    try:
        return str(json.loads(open_files(checkpoint).read("metadata"))["id"])
    except (FileNotFoundError, ValueError, KeyError) as error:
        raise StateCorrupted(
            "the checkpoint's metadata cannot be read",
            where=f"{checkpoint}/metadata",
            why=str(error),
            command="restore the file from a copy of the checkpoint",
        ) from error
