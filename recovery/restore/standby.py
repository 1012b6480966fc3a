"""A copy of each shard on hosts that do not own it, so that a takeover catches up and fetches no whole snapshot.

The copies are kept by small Spark jobs, whose tasks fall where cores are free: on each disk one of them does the work;
a host that none of them reaches now is reached by a later one. They keep the executors' Python workers warm besides.

A copy lies where a takeover looks for local state. It is brought to commits that Spark has committed, never further: a
step is published before its commit is, and a database that is newer than its pointer is a zombie's. Everything is
fetched without the shard's lock, into a scratch directory, and taken under it, only if nothing has moved meanwhile. A
shard that is locked is left alone.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from backend.boundary import crossing
from backend.errors import RewindError, StoreLocked
from backend.rocks import RocksStore
from backend.spark.session.jvm import cores, run_on_tasks
from backend.store.protocol import Staged
from backend.store.storage import is_damage
from recovery.commit.pointer import At, Commit, read_commit_row
from recovery.commit.scratch import hold, scratch_directory
from recovery.commit.shard_directory import Generation, ShardDirectory
from recovery.files import make_directory
from recovery.jobs import ShardJob
from recovery.restore.carry_out import commit_of
from recovery.restore.open_shard import reclaim_if_due

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_KIND = "standby"
MOST_BYTES = 1 << 26
"""Of the steps that a copy is given in a round."""
MOST_ROUNDS, WAIT_S = 16, 0.5
log = logging.getLogger("rewind.restore")


class Disks(Enum):
    """On which disks a shard is given a copy.

    Attributes:
        ALL: On all that are reached.
        KNOWN: Where it was looked for before.
        NEW: Where it was, and where no other shards were than those that are given copies: an executor's that has come.
    """

    ALL = 1
    KNOWN = 2
    NEW = 3


@dataclass(frozen=True, slots=True)
class Round:
    """What tasks did about copies.

    Attributes:
        fetched: Bytes.
        failed: Shard -> why its copy was not brought closer.
        damaged: Shards of which a snapshot is damaged, on whatever disk it was fetched to.
        busy: On a disk another task was at it already.
        behind: A disk that was reached has no copy yet of a shard that it is to have, or lacks more of it than a round
            gives.
        whole: Number of a task -> the shards of whose copies its disk lacks nothing that is to be had.
    """

    fetched: int = 0
    failed: dict[int, str] = field(default_factory=dict)
    damaged: frozenset[int] = frozenset()
    busy: bool = False
    behind: bool = False
    whole: dict[int, frozenset[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Given:
    """What a copy was given: bytes, and whether there is none after it or it lacks more that is to be had."""

    fetched: int = 0
    behind: bool = False


def bring_copies(spark: SparkSession, make: Callable[[int], ShardJob], commits: Mapping[int, Commit]) -> frozenset[int]:
    """Bring shards to commits on the disks where they were looked for, so that their tasks need not fetch them.

    Returns:
        Shards of which a snapshot is damaged. What was not brought for another reason (a disk is full, an executor
        died) is logged, and the tasks fetch it.
    """
    made = Round()
    for _ in range(MOST_ROUNDS if commits else 0):
        try:
            made = keep_copies(spark, make, commits, Disks.KNOWN)
        except Exception as error:  # of Spark: executors that died
            made = Round(failed=dict.fromkeys(commits, str(error).partition("\n")[0]))
        if not made.fetched and not made.busy:
            break
        if not made.fetched:
            time.sleep(WAIT_S)  # for a standby that is at it
    for shard, why in made.failed.items():
        log.warning("shard %d was not brought to where it runs: %s", shard, why)
    return made.damaged


def keep_copies(
    spark: SparkSession, make: Callable[[int], ShardJob], commits: Mapping[int, Commit], where: Disks
) -> Round:
    """Bring the copies on all disks that are reached closer to commits.

    Args:
        spark: The session.
        make: Makes the job of a shard, where a task runs.
        commits: Shard -> commit, committed by Spark.
        where: On which disks.
    """
    targets = [(shard, commit.name) for shard, commit in sorted(commits.items())]

    def work(numbers: Iterable[int]) -> Iterator[Round]:
        [number] = numbers
        jobs = [make(shard) for shard, _ in targets]
        yield _on_this_disk(number, jobs, [Commit.of_name(name) for _, name in targets], where)

    rounds: list[Round] = run_on_tasks(spark, range(max(2, cores(spark))), crossing(work)) if targets else []
    failed = {shard: why for one in rounds for shard, why in one.failed.items()}
    damaged = frozenset(shard for one in rounds for shard in one.damaged)
    busy, behind = any(one.busy for one in rounds), any(one.behind for one in rounds)
    whole = {number: shards for one in rounds for number, shards in one.whole.items()}
    return Round(sum(one.fetched for one in rounds), failed, damaged, busy, behind, whole)


def _on_this_disk(number: int, jobs: list[ShardJob], commits: list[Commit], where: Disks) -> Round:
    """Do what a task of this number does, unless another one is at it on the same disk."""
    place = jobs[0].local_dir / jobs[0].query_id / _KIND
    try:
        make_directory(place)
    except OSError as error:
        return Round(failed={job.shard: f"{job.where}: {error}" for job in jobs})
    mine = hold(place)
    if mine is None:
        return Round(busy=True)
    fetched, failed, damaged, behind, whole = 0, dict[int, str](), set[int](), False, set[int]()
    try:
        for job, commit in zip(jobs, commits, strict=True):
            if not _is_wanted(job, where, {str(one.shard) for one in jobs}):
                continue
            try:
                given = keep_copy(job, commit, MOST_BYTES)
            except Exception as error:  # filesystems raise kinds of their own
                failed[job.shard] = f"{job.where}: {error}"
                if is_damage(error) and not names_below(error, place.parent):
                    damaged.add(job.shard)
                continue
            fetched, behind = fetched + given.fetched, behind or given.behind
            if not given.behind:
                whole.add(job.shard)
    finally:
        os.close(mine)
    return Round(fetched, failed, frozenset(damaged), behind=behind, whole={number: frozenset(whole)})


def names_below(error: BaseException, directory: Path) -> bool:
    """Tell whether what an error names lies below a directory: then it is that disk that fails."""
    return isinstance(error, RewindError) and Path(error.where).is_relative_to(directory)


def _is_wanted(job: ShardJob, where: Disks, copied: Collection[str]) -> bool:
    own = ShardDirectory(job.local_dir, job.query_id, job.shard).path
    if where is Disks.ALL or own.is_dir():
        return True
    return where is Disks.NEW and {one.name for one in own.parent.iterdir() if one.name.isdecimal()} <= {*copied}


def keep_copy(job: ShardJob, commit: Commit, most_bytes: int) -> Given:
    """Bring the copy of a shard that lies here closer to a commit.

    One call fetches a whole snapshot, or steps of at most `most_bytes`, but at least one. Nothing is done where the
    shard is owned (it is locked, or the commit was staged here), where the copy is there already or newer, and where
    no snapshot leads to the commit.

    Args:
        job: Of the shard, with snapshots.
        commit: Committed by Spark.
        most_bytes: Bound on the steps.

    Raises:
        StateCorrupted: A snapshot, or the copy, is damaged; the copy is as it was.
    """
    assert job.snapshots is not None, "a standby copies snapshots"
    directory = ShardDirectory(job.local_dir, job.query_id, job.shard)
    known = directory.current()
    if known is not None and known.staged(commit).exists():
        return Given()  # looked at without the lock, which the owner's tasks wait for
    try:
        with directory.lock(0):
            generation, row = commit_of(directory)
    except StoreLocked:
        return Given()
    if row is not None and row.commit.version >= commit.version:
        return Given()
    start = At(row.commit) if row is not None else None
    way = job.snapshots.offers(job.shard, toward=commit, start=start)[::-1]  # oldest first
    if not way or not (way[0].full or (row is not None and way[0].parent == row.commit)):
        return Given(behind=row is None or bool(way))
    fetched = job.snapshots.fetched_bytes
    files: list[Staged] = []
    with scratch_directory(directory.path.parent, _KIND) as scratch:
        if way[0].full:
            job.snapshots.fetch(job.shard, way[0].commit, scratch / "db")
        else:
            for step in way:
                files.append(job.snapshots.fetch_step(job.shard, step.commit, scratch / f"{step.commit.name}.sst"))
                if job.snapshots.fetched_bytes - fetched >= most_bytes:
                    break
        try:
            with directory.lock(0):
                if commit_of(directory) != (generation, row):
                    return Given()
                if files:
                    assert generation is not None
                    assert row is not None
                    _ingest(generation, files, row.commit.version)
                else:
                    fresh = directory.new_generation()
                    (scratch / "db").rename(fresh.database)
                    directory.adopt(fresh)
        except StoreLocked:
            return Given()
    return Given(job.snapshots.fetched_bytes - fetched, behind=len(way) > max(1, len(files)))


def _ingest(generation: Generation, files: Sequence[Staged], before: int) -> None:
    """Take steps into a copy that was at a version."""
    with RocksStore.open(generation.database, create=False) as store:
        for file in files:
            store.confirm(file)
        after = read_commit_row(store)
        if after is not None:
            reclaim_if_due(store, after, before)
        store.settle()
