"""Uploads of a shard's snapshots: what is slow or fails costs a step of the fallback order, never a commit.

A *step* (the staged file) is waited for within a bound, so that the commit's state can usually be had elsewhere as soon
as Spark commits it. A *full* snapshot is made of a hard-link checkpoint beside the next micro-batches, one at a time
per worker process; shards that are due while one is under way are served in the order in which they came to be due.
After a step that did not get there nothing leads to later commits, so a full snapshot is due at once.

What waits and what failed is known to one worker process, and Spark ends those that are idle for a minute: one that
comes to a shard for the first time looks once whether all is there.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import uuid
from itertools import takewhile
from pathlib import Path

from backend.errors import StateCorrupted
from backend.rocks import RocksStore
from backend.store.protocol import Staged
from recovery.commit.pointer import CommitRecord
from recovery.commit.scratch import hold, sweep
from recovery.snapshots.publisher import Snapshots

log = logging.getLogger("rewind.uploads")

STEP_WAIT_S = 20.0
"""For so long a commit waits for its step to be uploaded; it goes on without it then."""
LOOK_WAIT_S = 5.0
"""For so long a commit waits for the first listing of its shard's snapshots; what is missing is made later then."""
_KIND = "upload"

_busy = threading.Semaphore(1)
_steps: dict[tuple[str, int], threading.Thread] = {}
"""Uploads of steps that outlasted their commit, by base directory and shard."""
_gaps: dict[tuple[str, int], int] = {}
"""Version of a shard's newest step, or since which its snapshot, did not get there, as far as this process knows."""
_seen: set[tuple[str, int]] = set()
"""Shards of which this process knows whether a snapshot is missing."""
_looking: set[tuple[str, int]] = set()
"""Shards whose snapshots are being listed."""
_under_way: set[tuple[str, int]] = set()
"""Shards whose snapshot is being uploaded."""
_waiting: dict[tuple[str, int], int] = {}
"""Shards whose snapshot is due and not begun, the one that waits longest first: the version at which it asked last."""


def is_due(row: CommitRecord, every: int) -> bool:
    """Tell whether the commit that a database is at should become a snapshot.

    The first commit of a shard is, so that there is something for the steps to build on; then whenever the version
    passes a multiple of `every`, whatever worker it runs on.
    """
    if row.parent is None:
        return True
    return row.commit.version // every != row.parent.version // every


def is_wanted(snapshots: Snapshots, row: CommitRecord, every: int, scratch: Path) -> bool:
    """Tell whether a snapshot that was due is missing, or a step is and no full snapshot has bridged it.

    Args:
        snapshots: Where they are; listed when this process sees the shard for the first time.
        row: The commit that the database is at.
        every: As in `is_due`.
        scratch: As in `begin_upload`.
    """
    place = snapshots.files.uri, row.shard
    if place not in _seen and place not in _looking:
        _looking.add(place)
        thread = threading.Thread(target=_look, args=(snapshots, row, every, scratch), name="rewind-look", daemon=True)
        thread.start()
        thread.join(LOOK_WAIT_S)
    return place in _gaps or place in _waiting


def _look(snapshots: Snapshots, row: CommitRecord, every: int, scratch: Path) -> None:
    place = snapshots.files.uri, row.shard
    try:
        sweep(scratch, _KIND)
        if any(scratch.glob(f"{_KIND}-*")):
            return  # another process uploads it now: what comes of that is seen later
        if snapshots.lack(row, every):
            _gaps.setdefault(place, row.commit.version)
        _seen.add(place)
    except Exception as error:  # filesystems raise kinds of their own
        log.warning("shard %d: its snapshots are not listed now: %s", row.shard, error)
    finally:
        _looking.discard(place)


def _is_next(place: tuple[str, int], version: int) -> bool:
    """Tell whether no other shard here waits for longer; one that has not asked in this micro-batch or the one before
    works elsewhere now, or asked before the checkpoint was taken back.
    """
    _waiting[place] = version
    others = takewhile(lambda other: other != place, _waiting)
    return not any(other[0] == place[0] and version - 1 <= _waiting[other] <= version for other in others)


def upload_step(snapshots: Snapshots, record: CommitRecord, staged: Staged) -> int:
    """Publish a commit's staged file; give the bytes, 0 when it failed or takes longer than `STEP_WAIT_S`."""
    place = snapshots.files.uri, record.shard
    before = _steps.get(place)
    if before is not None and before.is_alive():
        log.warning("shard %d: commit %s is not uploaded: the one before it still is", place[1], record.commit.name)
        _gaps[place] = record.commit.version
        return 0
    uploaded: list[int] = []

    def upload() -> None:
        try:
            uploaded.append(snapshots.publish_step(record, staged))
        except Exception as error:  # filesystems raise kinds of their own
            log.warning("shard %d: commit %s was not uploaded: %s", record.shard, record.commit.name, error)
            _gaps[place] = max(record.commit.version, _gaps.get(place, -1))

    thread = threading.Thread(target=upload, name="rewind-step", daemon=True)
    thread.start()
    thread.join(STEP_WAIT_S)
    if thread.is_alive():
        log.warning("shard %d: the upload of commit %s goes on without it", record.shard, record.commit.name)
        _steps[place] = thread
    return sum(uploaded)


def begin_upload(snapshots: Snapshots, store: RocksStore, row: CommitRecord, scratch: Path) -> threading.Thread | None:
    """Publish the database as it is now, in a thread; give the thread, None when it cannot be done now.

    Args:
        snapshots: Where to.
        store: Open at `row`.
        row: Its commit.
        scratch: An existing directory on the database's filesystem; what dead uploads left there is removed.
    """
    place = snapshots.files.uri, row.shard
    _seen.add(place)
    if place in _under_way or not _is_next(place, row.commit.version) or not _busy.acquire(blocking=False):
        return None
    del _waiting[place]
    _under_way.add(place)
    copy = scratch / f"{_KIND}-{uuid.uuid4().hex}"
    try:
        sweep(scratch, _KIND)  # hard links in copies of dead uploads keep files that the database has deleted
        store.checkpoint(copy)
        lock = hold(copy)
        assert lock is not None, "nobody else knows this name, and the caller holds the shard's lock"
        thread = threading.Thread(target=_upload, args=(snapshots, row, copy, lock), name="rewind-upload", daemon=True)
        thread.start()
    except Exception as error:  # a full disk, above all
        _under_way.discard(place)
        _busy.release()
        _gaps.setdefault(place, row.commit.version)
        log.warning("shard %d: snapshot of commit %s was not begun: %s", row.shard, row.commit.name, error)
        shutil.rmtree(copy, ignore_errors=True)
        return None
    return thread


def _upload(snapshots: Snapshots, row: CommitRecord, copy: Path, lock: int) -> None:
    place = snapshots.files.uri, row.shard
    try:
        snapshots.publish(row, copy)
        if _gaps.get(place, -1) <= row.commit.version:
            _gaps.pop(place, None)
    except Exception as error:  # filesystems raise kinds of their own
        log.warning("shard %d: snapshot of commit %s was not uploaded: %s", row.shard, row.commit.name, error)
        if not isinstance(error, StateCorrupted):  # that is so at the next commit, too
            _gaps.setdefault(place, row.commit.version)
    finally:
        shutil.rmtree(copy, ignore_errors=True)
        os.close(lock)
        _under_way.discard(place)
        _busy.release()
