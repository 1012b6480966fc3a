"""Open a shard's database exactly at its pointer: look, ask the planner, try, note what is broken, ask again.

Nothing here reads the source: what cannot be had from the local disk or from snapshots is `StateUnavailable`, and the
supervisor restores it. A piece that turns out damaged is left out of the next plan, so the fallback order goes one step
at a time: the staged file here, the same one among the snapshots, older snapshots and more steps. Each try is reported.
"""

from __future__ import annotations

import time
from collections.abc import Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from backend.errors import RewindError, StateAhead, StateCorrupted, StateUnavailable, StorageFailed
from backend.rocks import RocksStore
from backend.store.bounds import reclaim
from backend.store.protocol import Staged
from backend.store.storage import done_without, is_damage, storage
from recovery.commit.pointer import COMMIT_KEY, At, Commit, CommitRecord, Offer, Pointer, decode_record
from recovery.commit.shard_directory import Generation, ShardDirectory
from recovery.files import copy_file
from recovery.killpoints import kill_point
from recovery.listener import Listeners, RestoreListener, Restoring
from recovery.restore.planner import (
    Advance,
    Ahead,
    Database,
    Fetch,
    Local,
    Missing,
    Nothing,
    Plan,
    Queue,
    Remote,
    Start,
    Step,
    Unreadable,
    Use,
    plan,
)
from recovery.restore.tries import Recorder
from recovery.snapshots.publisher import Snapshots
from recovery.snapshots.reader import Broken

RESTORE_COMMAND = "start the query again (it restores by itself), or run: rewind restore <checkpoint> <module:function>"


@dataclass(slots=True)
class Opened:
    """A shard's database at its pointer; whoever opened it closes the store.

    Attributes:
        generation: The current generation.
        store: Open.
        row: The commit that it is at, None before the first.
    """

    generation: Generation
    store: RocksStore
    row: CommitRecord | None


@dataclass(slots=True)
class OpenShard:
    """One try to open a shard; the caller holds the shard's lock.

    Attributes:
        directory: The shard's directories.
        where: Names the shard in errors.
        snapshots: Copies on the checkpoint's filesystem, None when there is no such place.
        listeners: Told of each try to fetch something.
        incarnation: The query's start that asks. A database that is newer than the pointer and was made by an earlier
            one is no sign of a zombie: Spark was rolled back in between, and the database is done without.
        most_bytes: Snapshots of more bytes are not fetched here; None fetches them.
        recorder: The same, written down: what the task tells the driver.
        ingest_s: Seconds that ingesting staged files took, checks of their digests included.
    """

    directory: ShardDirectory
    where: str
    snapshots: Snapshots | None = None
    listeners: tuple[RestoreListener, ...] = ()
    incarnation: int = 0
    most_bytes: int | None = None
    recorder: Recorder = field(default_factory=Recorder)
    ingest_s: float = 0.0
    _broken: set[Broken] = field(default_factory=set)
    _damaged_here: set[Commit] = field(default_factory=set)

    def at(self, pointer: Pointer | None) -> Opened:
        """Open the database at the pointer.

        Raises:
            StateUnavailable: It is not here and no snapshot leads to it, or more than `most_bytes` of them do.
            StateAhead: The local state is newer than the pointer; nothing was touched.
        """
        generation = self.directory.current()
        store, database = _open_current(generation)
        try:
            opened = self._loop(pointer, generation, store, database)
        except BaseException:
            if store is not None:
                store.close()
            raise
        if store is not None and opened.store is not store:
            store.close()
        return opened

    def _loop(
        self, pointer: Pointer | None, generation: Generation | None, store: RocksStore | None, database: Database
    ) -> Opened:
        began = database.commit.version if isinstance(database, At) and database.commit is not None else -1
        staged = _staged(pointer, generation)
        offers: tuple[Offer, ...] = ()
        looked = self.snapshots is None
        why = ""
        while True:
            found = plan(pointer, Local(database, frozenset(staged - self._damaged_here)), Remote(offers))
            if isinstance(found, Start):
                return self._start(generation, store)
            if isinstance(found, Ahead):
                self._check_ahead(found, store)
                database, store, staged = Unreadable(f"Spark's checkpoint was rolled back: {found.why}"), None, set()
                continue
            assert pointer is not None, "without a pointer the plan is Start or Ahead"
            if isinstance(found, Use):
                assert generation is not None and store is not None
                return _swept(pointer, generation, store)
            if isinstance(found, Advance | Fetch) and looked:
                self._check_length(found, offers)
            if isinstance(found, Advance):
                assert generation is not None and store is not None
                at = database.commit.name if isinstance(database, At) and database.commit is not None else "no commit"
                restoring = Restoring(pointer.shard, pointer.commit.name, f"the local copy is at {at}", "steps")
                if not self._try(pointer, found, generation, generation, store, restoring):
                    return _swept(pointer, generation, store, began)
                # what was ingested stays: it is of the pointer's own lineage
                row = read_commit_row(store)
                database = At(row.commit if row is not None else None)
            elif isinstance(found, Fetch) and looked and self.snapshots is not None:
                kill_point("fetch", pointer.commit.version)
                fresh = self.directory.new_generation()
                restoring = Restoring(pointer.shard, pointer.commit.name, why or found.why, "snapshot")
                why = self._fetch(pointer, found, generation, fresh, restoring)
                if not why:
                    made = RocksStore.open(fresh.database, create=False)
                    kill_point("after_fetch", pointer.commit.version)
                    self.directory.adopt(fresh)
                    return _swept(pointer, fresh, made, -1)
            elif looked or isinstance(found, Queue):
                raise StateUnavailable(
                    f"the state of commit {pointer.commit.name} is not here",
                    where=self.where,
                    why="; ".join(filter(None, [_why(found), self.recorder.failures])),
                    command=RESTORE_COMMAND,
                )
            if self.snapshots is not None:
                offers = self._offers(self.snapshots, pointer, database, staged)
                looked = True

    def _offers(
        self, snapshots: Snapshots, pointer: Pointer, database: Database, staged: Set[Commit]
    ) -> tuple[Offer, ...]:
        """Look at what leads to the commit; where its own step lies here alone, not uploaded, at what leads to that."""
        start = database if isinstance(database, At) else None
        offers = snapshots.offers(pointer.shard, toward=pointer.commit, start=start, broken=self._broken)
        if offers or pointer.parent is None or not staged - self._damaged_here:
            return offers
        return snapshots.offers(pointer.shard, toward=pointer.parent, start=start, broken=self._broken)

    def _check_ahead(self, found: Ahead, store: RocksStore | None) -> None:
        """Refuse a database of this launch that is ahead; that of one before it is of a checkpoint that went back."""
        row = read_commit_row(store) if store is not None else None
        if row is None or row.incarnation >= self.incarnation:
            raise StateAhead(
                found.why,
                where=self.where,
                why="this task is a zombie, or Spark's checkpoint was rolled back",
                command="rewind restore <checkpoint> <module:function> (with no query running)",
            )

    def _check_length(self, found: Advance | Fetch, offers: tuple[Offer, ...]) -> None:
        wanted = {(step.commit, False) for step in found.steps if not step.local}
        if isinstance(found, Fetch) and found.snapshot is not None:
            wanted.add((found.snapshot, True))
        length = sum(offer.length for offer in offers if (offer.commit, offer.full) in wanted)
        if self.most_bytes is not None and length > self.most_bytes:
            raise StateUnavailable(
                "the state is not here, and fetching it would take long",
                where=self.where,
                why=f"{length:,} bytes of snapshots, a task fetches {self.most_bytes:,} at most",
                command=RESTORE_COMMAND,
            )

    def _start(self, generation: Generation | None, store: RocksStore | None) -> Opened:
        if generation is not None and store is not None:
            return Opened(generation, store, None)
        fresh = self.directory.new_generation()
        empty = RocksStore.open(fresh.database)
        self.directory.adopt(fresh)
        return Opened(fresh, empty, None)

    def _fetch(
        self, pointer: Pointer, found: Fetch, current: Generation | None, fresh: Generation, restoring: Restoring
    ) -> str:
        """Carry out a plan in a new generation, as `_try` does; what does not lead to the pointer is deleted."""
        why = "it was broken off"
        try:
            why = self._try(pointer, found, current, fresh, None, restoring)
            return why
        finally:
            if why:
                self.directory.discard(fresh)

    def _try(
        self,
        pointer: Pointer,
        found: Advance | Fetch,
        current: Generation | None,
        target: Generation,
        store: RocksStore | None,
        restoring: Restoring,
    ) -> str:
        """Carry out a plan in a generation; return what was wrong, "" when all is well.

        What is damaged is noted. The usual case, this host's own staged file, is no restore and is not reported unless
        it is damaged.
        """
        watch = Listeners((*self.listeners, self.recorder))
        fetches = any(not step.local for step in found.steps) or store is None
        started, before = time.monotonic(), self._fetched_bytes
        if fetches:
            watch.start(restoring)
        piece: Step | None = None  # None: the snapshot that the steps are applied to
        made = None
        try:
            if isinstance(found, Fetch):
                store = made = self._base(pointer, found, target)
            assert store is not None, "steps are applied to a database"
            for piece in found.steps:
                file = self._file(pointer, piece, current, target)
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
            if not damaged and (not isinstance(found, Fetch) or isinstance(error, StorageFailed)):
                if fetches:
                    watch.suspended(restoring, str(error))
                raise
            self._note(found, piece)
            if not fetches:
                watch.start(restoring)
            watch.suspended(restoring, str(error))
            return str(error)
        finally:
            if made is not None:
                made.close()
        if fetches:
            watch.end(restoring, 0, self._fetched_bytes - before, time.monotonic() - started)
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
            self._damaged_here.add(piece.commit)
        elif piece is not None:
            self._broken.add((piece.commit, False))
        elif isinstance(found, Fetch):
            full = found.snapshot is not None
            self._broken.add((found.snapshot or found.steps[0].commit, full))

    @property
    def _fetched_bytes(self) -> int:
        return self.snapshots.fetched_bytes if self.snapshots is not None else 0


def _open_current(generation: Generation | None) -> tuple[RocksStore | None, Database]:
    if generation is None:
        return None, Nothing()
    try:
        store = RocksStore.open(generation.database, create=False)
        try:
            row = read_commit_row(store)
        except BaseException:
            store.close()
            raise
    except (StateCorrupted, StorageFailed) as error:
        if not is_damage(error):
            raise
        return None, Unreadable(str(error))
    return store, At(row.commit if row is not None else None)


def _staged(pointer: Pointer | None, generation: Generation | None) -> set[Commit]:
    """The pointer's own staged file, if one of the right length is here; its digest is checked when it is ingested."""
    if pointer is None or generation is None:
        return set()
    path = generation.staged(pointer.commit)
    with suppress(FileNotFoundError), done_without(), storage(str(path)):
        return {pointer.commit} if path.stat().st_size == pointer.staged_length else set()
    return set()


RECLAIM_EVERY = 8
"""Commits between two reclaims of what bounds hide: deleting is a file of the database per region, hiding is free."""
RECLAIM_SMALL_EVERY = 64
"""The same where all files of the database have fewer bytes than `SMALL_BYTES`: no more than that can be hidden."""
SMALL_BYTES = 4 * 1024 * 1024
"""A file of the first level: merging what is hidden, again and again, costs less than deleting it."""


def _swept(pointer: Pointer, generation: Generation, store: RocksStore, began: int | None = None) -> Opened:
    """Reclaim what the bounds hide, when it is due: idempotent, and again after a death between confirm and here.

    Args:
        pointer: Where the database is to be.
        generation: It.
        store: Open.
        began: Version at which this copy was before; None when it did not move: then a death may have come between.

    Raises:
        StateCorrupted: What the plan led to is not the commit that the pointer names.
    """
    row = _check_row(pointer, generation, read_commit_row(store))
    if began is None:
        began = row.parent.version if row.parent is not None else -1
    reclaim_if_due(store, row, began)
    return Opened(generation, store, row)


def reclaim_if_due(store: RocksStore, row: CommitRecord, began: int) -> None:
    """Reclaim what the bounds of a copy hide, if it is due since the version at which the copy was before."""
    version = row.commit.version
    if began // RECLAIM_EVERY == version // RECLAIM_EVERY:  # a shard that moves skips commits on each host
        return
    if began // RECLAIM_SMALL_EVERY == version // RECLAIM_SMALL_EVERY:
        size = store.property("rocksdb.total-sst-files-size")
        if size is not None and int(size) < SMALL_BYTES:
            return
    reclaim(store, row.bounds)


def _check_row(pointer: Pointer, generation: Generation, row: CommitRecord | None) -> CommitRecord:
    if row is None or row.commit != pointer.commit:
        raise StateCorrupted(
            "what was done does not lead to the commit that the pointer names",
            where=f"shard {pointer.shard}, {generation.database}",
            why=f"at {row.commit.name if row is not None else 'no commit'}, the pointer names {pointer.commit.name}",
            command=RESTORE_COMMAND,
        )
    return row


def _why(found: Plan) -> str:
    if isinstance(found, Queue):
        return f"its input is queued since commit {found.since.name}"
    return found.why if isinstance(found, Missing | Fetch) else "no snapshot leads to it"


def read_commit_row(store: RocksStore) -> CommitRecord | None:
    """Read the commit that a database is at."""
    data = store.get(COMMIT_KEY)
    return decode_record(data) if data is not None else None
