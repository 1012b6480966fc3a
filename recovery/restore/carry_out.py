"""Carry out what the planner says: one try to bring a shard's database on this host to its pointer.

What is damaged is noted, so that the next plan leaves it out. The usual case, this host's own staged file, is no
restore and is not reported unless it is damaged.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from backend.errors import RewindError, StateCorrupted, StorageFailed
from backend.rocks import RocksStore
from backend.store.protocol import Staged
from backend.store.storage import is_damage
from recovery.commit.pointer import At, Commit, CommitRecord, Pointer, read_commit_row
from recovery.commit.shard_directory import Generation, ShardDirectory
from recovery.files import copy_file
from recovery.killpoints import kill_point
from recovery.restore.planner import Advance, Database, Fetch, Nothing, Step, Unreadable
from recovery.restore.tries import Recorder, Try
from recovery.snapshots.publisher import Snapshots
from recovery.snapshots.reader import Broken

RESTORE_COMMAND = "start the query again (it restores by itself), or run: rewind restore <checkpoint> <module:function>"


@dataclass(slots=True)
class Here:
    """What this host has of a shard.

    Attributes:
        generation: The current one, if there is one.
        store: Its database, open; None where there is none to use.
        row: The commit that it is at.
        unusable: Why there is no database to use although there is a generation.
    """

    generation: Generation | None = None
    store: RocksStore | None = None
    row: CommitRecord | None = None
    unusable: str = ""

    @property
    def database(self) -> Database:
        """The database as the planner sees it."""
        if self.store is None:
            return Unreadable(self.unusable) if self.unusable else Nothing()
        return At(self.row.commit if self.row is not None else None)

    def open(self, generation: Generation, *, create: bool = False) -> None:
        """Open the database of a generation, instead of the one that is open."""
        self.close()
        self.generation = generation
        self.store = RocksStore.open(generation.database, create=create)
        self.row = read_commit_row(self.store)

    def close(self, why: str = "") -> None:
        """Close the database: it is not used any more, and `why` says why."""
        store, self.store, self.row, self.unusable = self.store, None, None, why
        if store is not None:
            store.close()


def open_here(generation: Generation | None) -> Here:
    """Open the database of the current generation, if it can be read."""
    here = Here()
    try:
        if generation is not None:
            here.open(generation)
    except BaseException as error:
        here.close(str(error))
        if not is_damage(error):
            raise
    return here


def commit_of(directory: ShardDirectory) -> tuple[Generation | None, CommitRecord | None]:
    """Read which generation is current and its commit; a damaged one has none. The caller holds the lock."""
    here = open_here(directory.current())
    found = here.generation, here.row
    here.close()
    return found


@dataclass(slots=True)
class CarryOut:
    """Carries out plans for one shard, whose lock the caller holds.

    Attributes:
        directory: The shard's directories.
        snapshots: Where `Fetch` and steps that are not here come from.
        recorder: Tries to fetch something, as the task tells the driver.
        broken: Snapshots that turned out damaged.
        damaged_here: Commits whose staged file on this host turned out damaged.
        ingest_s: Seconds that ingesting staged files took, checks of their digests included.
    """

    directory: ShardDirectory
    snapshots: Snapshots | None
    recorder: Recorder = field(default_factory=Recorder)
    broken: set[Broken] = field(default_factory=set)
    damaged_here: set[Commit] = field(default_factory=set)
    ingest_s: float = 0.0

    def start(self, here: Here) -> None:
        """Begin with an empty database."""
        if here.store is None:
            fresh = self.directory.new_generation()
            here.open(fresh, create=True)
            self.directory.adopt(fresh)

    def bring(self, pointer: Pointer, found: Advance | Fetch, here: Here, before: str) -> str:
        """Bring what is here to the pointer; give what was wrong, "" when it is there.

        Args:
            pointer: The committed one.
            found: The plan.
            here: What this host has; changed.
            before: What was wrong with the fetch before this one.

        Raises:
            StateCorrupted: The files of an `Advance` were sound, and led elsewhere.
        """
        if isinstance(found, Advance):
            return self._advance(pointer, found, here)
        version = pointer.commit.version
        kill_point("fetch", version)
        fresh = self.directory.new_generation()
        failed = "it was broken off"
        try:
            failed = self._try(pointer, found, here, fresh, before or found.why)
        finally:
            if failed:
                self.directory.discard(fresh)
        if not failed:
            here.open(fresh)
            kill_point("after_fetch", version)
            self.directory.adopt(fresh)
        return failed

    def _advance(self, pointer: Pointer, found: Advance, here: Here) -> str:
        assert here.generation is not None and here.store is not None
        at = here.row.commit.name if here.row is not None else "no commit"
        failed = self._try(pointer, found, here, here.generation, f"the local copy is at {at}")
        here.row = read_commit_row(here.store)  # what was ingested stays: it is of the pointer's own lineage
        if not failed:
            _check_row(pointer, here.generation, here.row)
        return failed

    def _try(self, pointer: Pointer, found: Advance | Fetch, here: Here, target: Generation, why: str) -> str:
        """Carry out a plan in a generation; give what was wrong, and note what is damaged."""
        how = "snapshot" if isinstance(found, Fetch) else "steps"
        ended = partial(Try, pointer.shard, pointer.commit.name, why, how)
        fetches = isinstance(found, Fetch) or any(not step.local for step in found.steps)
        started, before = time.monotonic(), self._fetched_bytes
        piece: Step | None = None  # None: the snapshot that the steps are applied to
        with ExitStack() as made:
            try:
                store = here.store
                if isinstance(found, Fetch):
                    store = made.enter_context(self._base(pointer, found, target))
                assert store is not None, "steps are applied to a database"
                for piece in found.steps:
                    file = self._file(pointer, piece, here.generation, target)
                    kill_point("before_ingest", piece.commit.version)
                    ingesting = time.monotonic()
                    store.confirm(file)
                    self.ingest_s += time.monotonic() - ingesting
                    kill_point("after_ingest", piece.commit.version)
                if isinstance(found, Fetch):
                    piece = None if found.snapshot is not None else piece
                    _check_row(pointer, target, read_commit_row(store))
            except RewindError as error:
                # a snapshot is a copy, done without whatever is wrong with it; what refuses for a time is waited for
                own = piece is not None and piece.local
                damaged = is_damage(error) if isinstance(found, Fetch) or own else isinstance(error, StateCorrupted)
                if isinstance(error, StorageFailed) and not own:  # the disk that it comes to may be what fails
                    damaged = damaged and not Path(error.where).is_relative_to(target.path)
                left_out = damaged or (isinstance(found, Fetch) and not isinstance(error, StorageFailed))
                if fetches or left_out:
                    self.recorder.add(ended(failed=str(error)))
                if not left_out:
                    raise
                self._note(found, piece)
                return str(error)
        if fetches:
            length, seconds = self._fetched_bytes - before, time.monotonic() - started
            self.recorder.add(ended(length=length, seconds=seconds))
        return ""

    def _base(self, pointer: Pointer, found: Fetch, target: Generation) -> RocksStore:
        """Make the database that the steps are applied to."""
        if found.snapshot is None:
            return RocksStore.open(target.database)
        assert self.snapshots is not None, "an offer comes from snapshots"
        self.snapshots.fetch(pointer.shard, found.snapshot, target.database)
        return RocksStore.open(target.database, create=False)

    def _file(self, pointer: Pointer, step: Step, current: Generation | None, target: Generation) -> Staged:
        """Give the staged file of a step, fetched where it is not here; its digest is checked when it is ingested."""
        path = target.staged(step.commit)
        if step.local:
            if current is not None and current != target:
                copy_file(current.staged(step.commit), path, link=True)
            return Staged(path, pointer.staged_length, pointer.staged_digest, 0)
        assert self.snapshots is not None, "an offer comes from snapshots"
        file = self.snapshots.fetch_step(pointer.shard, step.commit, path)
        named = (pointer.staged_length, pointer.staged_digest)
        if step.commit == pointer.commit and (file.length, file.digest) != named:
            raise StateCorrupted(
                "a snapshot's staged file is not the one that the pointer names",
                where=f"shard {pointer.shard}, commit {step.commit.name}",
                why=f"digest {file.digest}, {pointer.staged_digest} was committed",
            )
        return file

    def _note(self, found: Advance | Fetch, piece: Step | None) -> None:
        """Leave a damaged piece out of the plans that follow."""
        if piece is not None and piece.local:
            self.damaged_here.add(piece.commit)
        elif piece is not None:
            self.broken.add((piece.commit, False))
        elif isinstance(found, Fetch):
            full = found.snapshot is not None
            self.broken.add((found.snapshot or found.steps[0].commit, full))

    @property
    def _fetched_bytes(self) -> int:
        return self.snapshots.fetched_bytes if self.snapshots is not None else 0


def _check_row(pointer: Pointer, generation: Generation, row: CommitRecord | None) -> None:
    if row is None or row.commit != pointer.commit:
        raise StateCorrupted(
            "what was done does not lead to the commit that the pointer names",
            where=f"shard {pointer.shard}, {generation.database}",
            why=f"at {row.commit.name if row is not None else 'no commit'}, the pointer names {pointer.commit.name}",
            command=RESTORE_COMMAND,
        )
