"""Restore shards on Spark's own engine: probe all of them, replay what is missing, build snapshots, prove them.

The planner says how: from nothing, or from an older copy that lies here and lacks only what came since. A copy that
cannot be caught up with (it is damaged, or something else than the committed state comes out) is noted as broken, and
the planner is asked again, in the same call. What only passes, such as a full disk, fails the call.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from backend.batch import SourcePartition
from backend.boundary import crossing
from backend.errors import ChangelogDamaged, HistoryLost, RestoreMismatch, RewindError, StorageFailed
from backend.spark.control import ask_to_adopt
from backend.spark.session.jvm import context_of, cores, run_on_tasks
from backend.store.storage import is_damage
from recovery.changelog import Changelog
from recovery.commit.manifest import query_id
from recovery.commit.pointer import At, Commit, CommitRecord, Pointer, RestoringPointer, state_of
from recovery.failures import PASSING, read
from recovery.files import Files, open_files
from recovery.jobs import ShardJob
from recovery.killpoints import kill_point
from recovery.listener import Listeners, RestoreListener, Restoring
from recovery.restore.planner import Fetch, Local, Lost, Nothing, Rebuild, Remote, next_offsets, plan
from recovery.restore.probe import Unusable, probe, share_all
from recovery.restore.read_again import mend_queue
from recovery.restore.replay import DIRECTORY, build_snapshot, read_pointers, write_chunks
from recovery.restore.standby import bring_copies, names_below
from recovery.restore.versions import committed_record, with_versions
from recovery.snapshots.publisher import Snapshots

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from backend.spark.job import Job

log = logging.getLogger("rewind.restore")
POLL_S = 0.25
_LOST = (HistoryLost, ChangelogDamaged, RestoreMismatch)
"""A shard cannot be restored, now or later; its snapshots may lead there yet."""
POOL = "rewind-restore"
"""Of the restore's jobs beside a running query, where Spark schedules by FAIR."""


@dataclass(frozen=True, slots=True)
class Restores:
    """How shards of a query are restored, and what that needs of it.

    Attributes:
        spark: The session.
        job: The job.
        checkpoint: Spark's checkpoint location.
        make: Makes the job of a shard, as in the processor.
        listeners: Told of each shard.
        arrow_rows: Rows per Arrow batch.
        check_lease: Raises once a newer start has the checkpoint: it alone asks shards to adopt their queues then.
        group: Spark's group of jobs, of which all are that a restore starts in its thread; None leaves it as it is.
        at_once: Tasks side by side, in short jobs: the query beside has its share then; None where none runs.
    """

    spark: SparkSession
    job: Job
    checkpoint: str
    make: Callable[[str, int], ShardJob]
    listeners: Sequence[RestoreListener] = ()
    arrow_rows: int = 200_000
    check_lease: Callable[[], None] = lambda: None
    group: str | None = None
    at_once: int | None = None

    @property
    def of(self) -> Callable[[int], ShardJob]:
        """What makes the job of a shard."""
        return partial(self.make, query_id(self.checkpoint))

    def carry_out(self, plans: Mapping[int, Rebuild]) -> dict[int, str]:
        """Restore shards; give those whose older copy could not be caught up with, and why."""
        watch, make = Listeners(self.listeners), self.of
        under_way = {shard: self._restoring(shard, chosen) for shard, chosen in plans.items()}
        for restoring in under_way.values():
            watch.start(restoring)
        run = f"{DIRECTORY}/{uuid.uuid4().hex}"
        records = {shard: wanted(chosen) for shard, chosen in plans.items()}
        try:
            with following(watch, under_way, open_files(self.checkpoint), run):
                chunks = write_chunks(
                    self.spark, self.job, self.checkpoint, run, records, self.arrow_rows, self.at_once
                )
            built = self._build(make, plans, chunks)
        except BaseException as error:
            for restoring in under_way.values():
                watch.suspended(restoring, str(error))
            raise
        finally:
            open_files(self.checkpoint).delete_folder(run)
        failed = {}
        for shard, result in built.items():
            if isinstance(result, str):
                failed[shard] = result
                watch.suspended(under_way[shard], result)
            else:
                watch.end(under_way[shard], *result)
        return failed

    def _restoring(self, shard: int, chosen: Rebuild) -> Restoring:
        new = chosen.start is None
        return Restoring(
            shard,
            chosen.record.commit.name,
            chosen.why,
            "catch-up" if not new else "replay" if chosen.ranges else "changelog",
            records=chosen.record.message_count if new else None,
            ranges=chosen.ranges,
            topics=self.job.topics,
        )

    def _build(
        self, make: Callable[[int], ShardJob], plans: Mapping[int, Rebuild], chunks: Mapping[int, Sequence[str]]
    ) -> dict[int, tuple[int, int, float] | str]:
        """Build, prove and publish each shard, in parallel; give rows, bytes and seconds per shard, or why not."""
        checkpoint = self.checkpoint

        def build(
            items: Iterable[tuple[int, Commit, Commit | None, Sequence[str]]],
        ) -> Iterator[tuple[int, tuple[int, int, float] | str]]:
            for shard, commit, older, names in items:
                job = make(shard)
                try:
                    restored = build_snapshot(job, commit, checkpoint, names, older)
                except RewindError as error:
                    damaged = is_damage(error) and names_below(error, job.local_dir / job.query_id)
                    if older is None or (isinstance(error, PASSING) and not damaged):
                        raise  # what refuses for a time, or on another disk, says nothing of the copy
                    yield shard, str(error)
                    continue
                yield shard, (restored.rows + restored.messages, restored.length, restored.seconds)

        items = [
            (shard, chosen.record.commit, chosen.start, list(chunks.get(shard, ())))
            for shard, chosen in sorted(plans.items())
        ]
        each = self.at_once or max(1, len(items))
        groups = [items[at : at + each] for at in range(0, len(items), each)]
        return dict(result for group in groups for result in run_on_tasks(self.spark, group, crossing(build)))


def restore_shards(run: Restores, why: str) -> int:
    """Restore every shard whose state is not usable where it was probed; no task of the query may be running.

    Args:
        run: The query's restores.
        why: What the query failed with, for the listeners.

    Returns:
        The number of shards restored, or made available to other hosts when none had to be.

    Raises:
        CheckpointTaken: A newer start has taken the checkpoint over; nothing was asked.
        HistoryLost: The source or the changelog no longer has what is needed.
        RestoreMismatch: Count or digest of the replayed messages differ from the committed ones.
        ChangelogDamaged: The changelog is damaged.
    """
    _in_group(run)
    make = run.of
    committed = read_pointers(run.spark, run.checkpoint, len(run.job.grouping))
    queues = {shard: one for shard, one in committed.items() if isinstance(one, RestoringPointer)}
    for one in queues.values():
        mend_queue(run.spark, run.job, run.checkpoint, one, run.arrow_rows)
    count = _restore(run, make, {shard: state_of(one) for shard, one in committed.items()}, why)
    if queues:
        run.check_lease()
        ask_to_adopt(run.checkpoint, {shard: one.since.commit.name for shard, one in queues.items()})
    return count


def restore_beside(run: Restores, pointers: Mapping[int, Pointer], refused: Collection[int] = ()) -> None:
    """Restore shards beside the running query, and ask them to adopt their queues.

    Nothing that tasks of the query use is looked at: a restore begins with nothing, and its files are its own. Its
    snapshots are brought to the disks where the shards were looked for before they are asked: tasks fetch only what
    could not be brought. A shard to which snapshots lead is restored if they are damaged; if it cannot be, it is asked
    all the same.

    Args:
        run: The query's restores.
        pointers: What the shards queue since.
        refused: Shards that could not adopt their queues with the snapshots that there are.

    Raises:
        CheckpointTaken: A newer start has taken the checkpoint over; nothing was asked.
        HistoryLost: The source or the changelog no longer has what is needed.
        RestoreMismatch: Count or digest of the replayed messages differ from the committed ones.
        ChangelogDamaged: The changelog is damaged.
    """
    _in_group(run)
    spark, job, of = run.spark, run.job, run.of
    why = "its state was missing, and its input is queued"
    led = {shard: pointer.commit for shard, pointer in pointers.items() if _leads(of(shard).snapshots, pointer)}
    there = {shard: commit for shard, commit in led.items() if shard not in refused}
    sound = there.keys() - bring_copies(spark, of, there)  # what a task may not fetch, but is to be had
    lost = {shard: pointer for shard, pointer in pointers.items() if shard not in sound}
    plans = plan_restores(
        lost, dict.fromkeys(lost, Unusable(why)), of(0).changelog, job.offsets(spark), why, job.topics, led
    )
    context_of(spark).setLocalProperty("spark.scheduler.pool", POOL)  # of this thread's jobs, under FAIR scheduling
    restored = _carry_out(replace(run, at_once=max(1, cores(spark) - 1)), plans, led)
    bring_copies(spark, of, {shard: pointers[shard].commit for shard in restored})
    kill_point("before_ask")
    run.check_lease()
    ask_to_adopt(run.checkpoint, {shard: pointer.commit.name for shard, pointer in pointers.items()})
    kill_point("after_ask")


def _in_group(run: Restores) -> None:
    if run.group is not None:
        context_of(run.spark).setJobGroup(run.group, "restore of shards")


def _carry_out(run: Restores, plans: Mapping[int, Rebuild], led: Collection[int]) -> Collection[int]:
    """Restore shards; if one is found lost meanwhile, only those to which no snapshots lead. Give what is restored."""
    try:
        failed = run.carry_out(plans)
    except Exception as error:  # also Spark's, with what the connector says that the source has lost
        rest, failure = {shard: chosen for shard, chosen in plans.items() if shard not in led}, read(error)
        if len(rest) == len(plans) or not isinstance(failure.error, _LOST):
            raise
        left = sorted(plans.keys() - rest.keys())
        log.warning("shards %s are not restored, and go by their snapshots: %s", left, failure.text)
        return _carry_out(run, rest, ())
    assert not failed, "only an older copy may fail and be done without"
    return plans.keys()


def _leads(snapshots: Snapshots | None, pointer: Pointer) -> bool:
    """Return whether snapshots lead to a commit, by their manifests."""
    offers = snapshots.offers(pointer.shard, toward=pointer.commit) if snapshots is not None else ()
    return isinstance(plan(pointer, Local(Nothing()), Remote(offers)), Fetch)


def _restore(run: Restores, make: Callable[[int], ShardJob], pointers: Mapping[int, Pointer], why: str) -> int:
    found = probe(run.spark, {shard: pointers.get(shard) for shard in range(len(run.job.grouping))}, make)
    # a shard that has committed nothing begins anew once what a rolled back attempt left is put aside
    reasons = [shard for shard in found if shard in pointers]
    if not reasons:
        # all is well where it was looked at, so the task looked on another host: give it something to take there
        return share_all(run.spark, pointers, make)
    changelog, source = make(0).changelog, run.job.offsets(run.spark)
    broken = {shard: found[shard] for shard in reasons}
    while broken:
        plans = plan_restores(
            {shard: pointers[shard] for shard in broken}, broken, changelog, source, why, run.job.topics
        )
        # an older copy that did not come out whole is not looked at again: nothing can fail twice
        broken = {shard: Unusable(text) for shard, text in run.carry_out(plans).items()}
    return len(reasons)


def plan_restores(
    pointers: Mapping[int, Pointer],
    found: Mapping[int, Unusable],
    changelog: Changelog,
    source: Mapping[SourcePartition, tuple[int, int]],
    why: str,
    topics: Mapping[int, str] = MappingProxyType({}),
    led: Collection[int] = (),
) -> dict[int, Rebuild]:
    """Ask the planner how each shard is restored.

    Args:
        pointers: Of the shards to restore.
        found: What the probe found of them.
        changelog: Has their commits.
        source: What the sources hold.
        why: What the query failed with, where the probe cannot say better.
        topics: Stream -> topic, for errors.
        led: Shards to which snapshots lead: one of them that cannot be restored is left out.

    Raises:
        HistoryLost: A shard cannot be restored from what there is; names the versions to be had, if any.
        ChangelogDamaged: The changelog is damaged.
    """

    def plan_one(shard: int, pointer: Pointer) -> Rebuild:
        record = committed_record(changelog, pointer, pointers, source)
        row = found[shard].row
        # a database at the pointer that could not be read to its end is no copy to begin with
        usable = row is not None and row.commit != pointer.commit
        here = At(row.commit, next_offsets(row)) if row is not None and usable else Nothing()
        chosen = plan(pointer, Local(here), Remote(record=record, source=source, topics=topics), in_task=False)
        if isinstance(chosen, Lost):
            raise with_versions(chosen.error, changelog, pointers, source)
        assert isinstance(chosen, Rebuild), "the supervisor was offered no snapshots"
        return replace(chosen, why=found[shard].why or why)

    plans: dict[int, Rebuild] = {}
    for shard, pointer in pointers.items():
        try:
            plans[shard] = plan_one(shard, pointer)
        except (HistoryLost, ChangelogDamaged) as error:
            if shard not in led:
                raise
            log.warning("shard %d is not restored, and goes by its snapshots: %s", shard, error)
    return plans


@contextmanager
def following(watch: Listeners, under_way: Mapping[int, Restoring], files: Files, run: str) -> Iterator[None]:
    """Tell listeners of each chunk of a replay while it is made: where they lie, executors and driver see them all."""
    ended = threading.Event()
    seen: set[str] = set()

    def look() -> None:
        try:
            for shard, restoring in under_way.items():
                for name, length in files.list(f"{run}/{shard}").items():
                    if name not in seen:
                        seen.add(name)
                        watch.batch(restoring, {}, int(name.partition("-")[0]), length)
        except (OSError, StorageFailed) as error:
            log.warning("the progress of a restore is not known now: %s", error)

    def follow() -> None:
        while not ended.wait(POLL_S):
            look()

    thread = threading.Thread(target=follow, name="rewind-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    look()


def wanted(chosen: Rebuild) -> CommitRecord:
    """Give the commit's record, with the offsets that are to be replayed instead of all."""
    ranges = sorted((stream, partition, start) for (stream, partition), (start, _) in chosen.ranges.items())
    return msgspec.structs.replace(chosen.record, replay_from=ranges)
