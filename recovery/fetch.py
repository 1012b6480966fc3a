"""Bring a shard's state from packages to this host: what carries out the planner's `Fetch` and `Advance`.

Everything is fetched and checked before a database is opened on it. A damaged piece is left out and the planner asked
again: the ladder goes down one step at a time, from the newest package to older ones with more steps.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from backend.errors import RewindError, StateCorrupted
from backend.rocks import RocksOptions, RocksStore
from backend.store import Staged
from recovery.listener import Listeners, RestoreListener, Restoring
from recovery.package import Snapshots
from recovery.package_reader import Broken
from recovery.planner import Fetch, Local, Nothing, Remote, Step, plan
from recovery.pointer import COMMIT_KEY, Commit, Pointer, decode_record


def fetch_state(
    snapshots: Snapshots,
    pointer: Pointer,
    database: Path,
    staged: Callable[[Commit], Path],
    *,
    why: str = "no local state",
    options: RocksOptions | None = None,
    listeners: Iterable[RestoreListener] = (),
) -> bool:
    """Make a new local database at the pointer from packages.

    Args:
        snapshots: The packages.
        pointer: What the database must be at.
        database: Where to make it; must not exist.
        staged: Gives the local path for a commit's staged file, in a directory that exists.
        why: What was found instead, for listeners.
        options: How RocksDB is run.
        listeners: Are told of each try.

    Returns:
        Whether the database is there, closed, with the pointer's commit row. When not, nothing is at `database`.
    """
    watchers = Listeners(listeners)
    broken: set[Broken] = set()
    while True:
        offers = snapshots.offers(pointer.shard, toward=pointer.commit, broken=broken)
        found = plan(pointer, Local(Nothing()), Remote(offers))
        if not isinstance(found, Fetch):
            return False
        restoring = Restoring(pointer.shard, pointer.commit.name, why, "package")
        watchers.start(restoring)
        started = time.monotonic()
        before = snapshots.fetched_bytes
        failed = _try(snapshots, pointer, found, database, staged, options)
        if failed is None:
            watchers.end(restoring, 0, snapshots.fetched_bytes - before, time.monotonic() - started)
            return True
        piece, error = failed
        why = str(error)
        watchers.suspended(restoring, why)
        broken.add(piece)


def fetch_steps(
    snapshots: Snapshots, pointer: Pointer, steps: Sequence[Step], staged: Callable[[Commit], Path]
) -> list[Staged]:
    """Fetch the remote ones of some steps and describe all of them, in order: what `Advance` confirms.

    Raises:
        StateCorrupted: A step is missing, damaged, or not the one that the pointer names.
    """
    return [_step(snapshots, pointer, step, staged) for step in steps]


def _try(
    snapshots: Snapshots,
    pointer: Pointer,
    found: Fetch,
    database: Path,
    staged: Callable[[Commit], Path],
    options: RocksOptions | None,
) -> tuple[Broken, RewindError] | None:
    """Carry out one plan; give what was damaged and how, None when nothing was."""
    at, full = found.package or found.steps[0].commit, found.package is not None
    try:
        _base(snapshots, pointer, found, database)
        files = []
        for step in found.steps:
            at, full = step.commit, False
            files.append(_step(snapshots, pointer, step, staged))
        at, full = (found.package, True) if found.package is not None else (found.steps[-1].commit, False)
        _apply(database, pointer, files, options)
    except RewindError as error:
        shutil.rmtree(database, ignore_errors=True)
        return (at, full), error
    return None


def _base(snapshots: Snapshots, pointer: Pointer, found: Fetch, database: Path) -> None:
    """Make the database that the steps are applied to."""
    if found.package is not None:
        snapshots.fetch(pointer.shard, found.package, database)
    else:
        RocksStore.open(database).close()


def _step(snapshots: Snapshots, pointer: Pointer, step: Step, staged: Callable[[Commit], Path]) -> Staged:
    path = staged(step.commit)
    if step.local:
        return Staged(path, pointer.staged_length, pointer.staged_digest, 0)
    file = snapshots.fetch_step(pointer.shard, step.commit, path)
    if step.commit == pointer.commit and (file.length, file.digest) != (pointer.staged_length, pointer.staged_digest):
        raise StateCorrupted(
            "a package's staged file is not the one that the pointer names",
            where=f"shard {pointer.shard}, commit {step.commit.name}",
            why=f"digest {file.digest}, {pointer.staged_digest} was committed",
            command="rewind verify <checkpoint>",
        )
    return file


def _apply(database: Path, pointer: Pointer, files: Sequence[Staged], options: RocksOptions | None) -> None:
    with RocksStore.open(database, create=False, options=options or RocksOptions()) as store:
        for file in files:
            store.confirm(file)
        row = store.get(COMMIT_KEY)
    found = decode_record(row, where=str(database)).commit.name if row is not None else "no commit"
    if found != pointer.commit.name:
        raise StateCorrupted(
            "a package does not lead to the commit that it names",
            where=f"shard {pointer.shard}, {database}",
            why=f"at {found}, the pointer names {pointer.commit.name}",
            command="rewind verify <checkpoint>",
        )
