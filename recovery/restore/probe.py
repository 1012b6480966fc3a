"""Look where the shards lie: which can be opened at their pointer, and give what lies here to other hosts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from backend.boundary import crossing
from backend.errors import RewindError, StateAhead, StateCorrupted
from backend.rocks import RocksStore
from backend.spark.session.jvm import run_on_tasks
from backend.store.storage import is_damage
from recovery.commit.pointer import CommitRecord, Pointer
from recovery.commit.scratch import scratch_directory
from recovery.commit.shard_directory import ShardDirectory
from recovery.jobs import ShardJob
from recovery.restore.carry_out import commit_of
from recovery.restore.open_shard import Opened, OpenShard

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger("rewind.restore")


@dataclass(frozen=True, slots=True)
class Unusable:
    """A shard that cannot be opened at its pointer where it was looked at.

    Attributes:
        why: Why not.
        row: What the database there is at, when it can be read.
    """

    why: str
    row: CommitRecord | None = None


def probe(
    spark: SparkSession, pointers: Mapping[int, Pointer | None], make: Callable[[int], ShardJob]
) -> dict[int, Unusable]:
    """Open every shard at its pointer, in one Spark job; give the shards that cannot be opened, and why.

    A local state that is newer than the pointer (None: nothing is committed) is put aside here: no task is running, so
    Spark was rolled back.
    """

    def look(items: Iterable[tuple[int, Pointer | None]]) -> Iterator[tuple[int, Unusable]]:
        for shard, pointer in items:
            why = unusable(make(shard), pointer)
            if why is not None:
                yield shard, Unusable(why, commit_here(make(shard)))

    return dict(run_on_tasks(spark, sorted(pointers.items()), crossing(look)))


def commit_here(job: ShardJob) -> CommitRecord | None:
    """Give what the local database of a shard is at, whatever the pointer says; None when it cannot be read."""
    directory = ShardDirectory(job.local_dir, job.query_id, job.shard)
    with directory.lock(job.lock_wait_s), suppress(RewindError):
        return commit_of(directory)[1]
    return None


def unusable(job: ShardJob, pointer: Pointer | None) -> str | None:
    """Say why a shard cannot be opened at its pointer here; None when it can. What is ahead or damaged is put aside."""
    directory = ShardDirectory(job.local_dir, job.query_id, job.shard)
    with directory.lock(job.lock_wait_s):
        opened = None
        try:
            if pointer is None and directory.current() is None:
                return None
            opened = _opened(job, directory, pointer)
            opened.store.close()
            check_database(opened.generation.database)
        except RewindError as error:
            # before it is open, the disk that fails may be that of snapshots
            if is_damage(error) if opened is not None else isinstance(error, StateCorrupted):
                directory.condemn()
            return str(error)
    return None


def _opened(job: ShardJob, directory: ShardDirectory, pointer: Pointer | None) -> Opened:
    """Open a shard; what is newer than the pointer is put aside, and snapshots may lead to the pointer then."""
    open_shard = partial(OpenShard, directory, job.where, job.snapshots)
    try:
        return open_shard().at(pointer)
    except StateAhead as error:
        directory.condemn()
        if pointer is None:
            raise
        try:
            return open_shard().at(pointer)
        except RewindError:
            raise error from None


def share_all(spark: SparkSession, pointers: Mapping[int, Pointer], make: Callable[[int], ShardJob]) -> int:
    """Publish snapshots of all shards, in one Spark job; give how many. An executor that has no state gives none."""

    def look(items: Iterable[tuple[int, Pointer]]) -> Iterator[int]:
        for shard, pointer in items:
            try:
                yield int(share(make(shard), pointer))
            except RewindError as error:
                _log.warning("shard %d is not shared from here: %s", shard, error)

    return sum(run_on_tasks(spark, sorted(pointers.items()), crossing(look)))


def share(job: ShardJob, pointer: Pointer) -> bool:
    """Publish the state of a shard that lies here as a snapshot of its commit, for other hosts.

    Returns:
        False when there is a sound one already, or no place for snapshots.

    Raises:
        StateUnavailable: The state does not lie here.
    """
    directory = ShardDirectory(job.local_dir, job.query_id, job.shard)
    with directory.lock(job.lock_wait_s):
        opened = OpenShard(directory, job.where, job.snapshots).at(pointer)
        try:
            if job.snapshots is None or job.snapshots.is_sound(job.shard, pointer.commit):
                return False
            assert opened.row is not None, "a pointer's database has a commit row"
            with scratch_directory(job.local_dir / job.query_id, "share") as scratch:
                opened.store.checkpoint(scratch / "copy")
                job.snapshots.publish(opened.row, scratch / "copy", check=True)
        finally:
            opened.store.close()
    return True


def check_database(database: Path) -> None:
    """Check every block of a database that nobody writes to.

    Raises:
        StateCorrupted: A file is damaged or missing.
        StorageFailed: The disk does not give one.
    """
    with RocksStore.open(database, read_only=True) as store:
        store.check_files()
