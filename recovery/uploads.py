"""Whole packages are uploaded beside the next micro-batches, one at a time per worker process.

A package is made of a hard-link checkpoint, so the database goes on changing under it. A shard whose turn comes while
an upload still runs waits for its next turn: a slow or failing upload delays pruning, never a commit.
"""

from __future__ import annotations

import logging
import shutil
import threading
import uuid
from pathlib import Path

from backend.errors import RewindError
from backend.rocks import RocksStore
from recovery.package import Snapshots
from recovery.pointer import CommitRecord

log = logging.getLogger("rewind.uploads")

_busy = threading.Semaphore(1)


def is_due(row: CommitRecord, every: int) -> bool:
    """Tell whether the commit that a database is at should become a package.

    The first commit of a shard is, so that there is something for the steps to build on; then whenever the version
    passes a multiple of `every`, whatever worker it runs on.
    """
    if row.parent is None:
        return True
    return row.commit.version // every != row.parent.version // every


def begin_upload(packages: Snapshots, store: RocksStore, row: CommitRecord, scratch: Path) -> threading.Thread | None:
    """Publish the database as it is now, in a thread; give the thread, None when another upload still runs.

    Args:
        packages: Where to.
        store: Open at `row`.
        row: Its commit.
        scratch: An existing directory on the database's filesystem.
    """
    if not _busy.acquire(blocking=False):
        return None
    copy = scratch / f"upload-{uuid.uuid4().hex}"
    try:
        store.checkpoint(copy)
        thread = threading.Thread(target=_upload, args=(packages, row, copy), name="rewind-upload", daemon=True)
        thread.start()
    except BaseException:
        _busy.release()
        raise
    return thread


def _upload(packages: Snapshots, row: CommitRecord, copy: Path) -> None:
    try:
        packages.publish(row, copy)
    except (RewindError, OSError, ValueError) as error:
        log.warning("shard %d: package of commit %s was not uploaded: %s", row.shard, row.commit.name, error)
    finally:
        shutil.rmtree(copy, ignore_errors=True)
        _busy.release()
