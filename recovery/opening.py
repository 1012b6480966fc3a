"""Open a shard's database exactly at its pointer: find out what is here, ask the planner, carry out what it says.

Nothing here reads the source: what cannot be had from the local disk or from packages is `StateUnavailable`, and the
supervisor restores it. A piece that turns out damaged is left out and the planner is asked again, so the ladder goes
down one step at a time: the staged file here, the same one among the packages, older packages and more steps. Each try
is told.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from backend.bounds import reclaim
from backend.errors import RewindError, StateAhead, StateCorrupted, StateUnavailable
from backend.rocks import RocksStore
from backend.store import Staged
from recovery.fetch import fetch_state, fetch_steps
from recovery.killpoints import kill_point
from recovery.listener import Listeners, RestoreListener, Restoring
from recovery.package import Snapshots
from recovery.package_reader import Broken
from recovery.planner import (
    Advance,
    Ahead,
    At,
    Fetch,
    Local,
    Missing,
    Nothing,
    Offer,
    Plan,
    Remote,
    Start,
    Unreadable,
    Use,
    plan,
)
from recovery.pointer import COMMIT_KEY, Commit, CommitRecord, Pointer, decode_record
from recovery.shard import Generation, ShardDirectory
from recovery.told import Recorder

RESTORE_COMMAND = "start the query again (it restores by itself), or run: rewind restore <checkpoint>"


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
class Opening:
    """One try to open a shard; the caller holds the shard's lock.

    Attributes:
        directory: The shard's directories.
        where: Names the shard in errors.
        packages: Copies on the checkpoint's filesystem, None when there is no such place.
        listeners: Told of each try to fetch something.
        launch: The query's start that asks. A database that is newer than the pointer and was made by an earlier start
            is no sign of a zombie: Spark was rolled back in between, and the database is done without.
        told: The same, written down: what the task tells the driver.
        ingest_s: Seconds that ingesting staged files took, checks of their digests included.
    """

    directory: ShardDirectory
    where: str
    packages: Snapshots | None = None
    listeners: tuple[RestoreListener, ...] = ()
    launch: int = 0
    told: Recorder = field(default_factory=Recorder)
    ingest_s: float = 0.0
    _broken: set[Broken] = field(default_factory=set)
    _damaged_here: set[Commit] = field(default_factory=set)

    def at(self, pointer: Pointer | None) -> Opened:
        """Open the database at the pointer.

        Raises:
            StateUnavailable: It is not here and no package leads to it.
            StateAhead: The local state is newer than the pointer; nothing was touched.
        """
        generation = self.directory.current()
        store, database = _open_current(generation)
        try:
            opened = self._carry_out(pointer, generation, store, database)
        except BaseException:
            if store is not None:
                store.close()
            raise
        if store is not None and opened.store is not store:
            store.close()
        return opened

    def _carry_out(
        self,
        pointer: Pointer | None,
        generation: Generation | None,
        store: RocksStore | None,
        database: Nothing | Unreadable | At,
    ) -> Opened:
        began = database.commit.version if isinstance(database, At) and database.commit is not None else -1
        staged = _staged(pointer, generation)
        offers: tuple[Offer, ...] = ()
        looked = False
        while True:
            found = plan(pointer, Local(database, frozenset(staged)), Remote(offers))
            if isinstance(found, Start):
                return self._start(generation, store)
            if isinstance(found, Ahead):
                row = read_commit_row(store) if store is not None else None
                if row is None or row.launch >= self.launch:
                    raise _ahead(found, self.where)
                database, store, staged = Unreadable(f"Spark's checkpoint was rolled back: {found.why}"), None, set()
                continue
            assert pointer is not None, "without a pointer the plan is Start or Ahead"
            if isinstance(found, Use):
                assert generation is not None and store is not None
                return _swept(pointer, generation, store)
            if isinstance(found, Advance):
                assert generation is not None and store is not None
                if self._advance(pointer, database, found, generation, store):
                    return _swept(pointer, generation, store, began)
                # what was ingested stays: it is of the pointer's own lineage; what is damaged is left out from now on
                row = read_commit_row(store)
                database = At(row.commit if row is not None else None)
                staged -= self._damaged_here
                if looked:
                    offers = self._offers(pointer, database)
                continue
            if not looked and self.packages is not None:
                offers, looked = self._offers(pointer, database), True
                continue
            if isinstance(found, Fetch) and self.packages is not None:
                fetched = self._fetch(pointer, found.why)
                if fetched is not None:
                    return fetched
            raise StateUnavailable(
                f"the state of commit {pointer.commit.name} is not here",
                where=self.where,
                why="; ".join(filter(None, [_why(found), self.told.failures])),
                command=RESTORE_COMMAND,
            )

    def _start(self, generation: Generation | None, store: RocksStore | None) -> Opened:
        if generation is not None and store is not None:
            return Opened(generation, store, None)
        fresh = self.directory.new_generation()
        empty = RocksStore.open(fresh.database)
        self.directory.adopt(fresh)
        return Opened(fresh, empty, None)

    def _offers(self, pointer: Pointer, database: Nothing | Unreadable | At) -> tuple[Offer, ...]:
        assert self.packages is not None, "asked only where there are packages"
        start = database if isinstance(database, At) else None
        return self.packages.offers(pointer.shard, toward=pointer.commit, start=start, broken=self._broken)

    def _advance(
        self,
        pointer: Pointer,
        database: Nothing | Unreadable | At,
        found: Advance,
        generation: Generation,
        store: RocksStore,
    ) -> bool:
        """Ingest the steps; False when one is damaged, with the database at the last sound one before it.

        The usual case, this host's own staged file, is no restore and is not told unless it is damaged.
        """
        assert isinstance(database, At), "only a sound database is advanced"
        at = database.commit.name if database.commit is not None else "no commit"
        restoring = Restoring(pointer.shard, pointer.commit.name, f"the local copy is at {at}", "steps")
        watch = Listeners((*self.listeners, self.told))
        fetches = any(not step.local for step in found.steps)
        started, before = time.monotonic(), self.packages.fetched_bytes if self.packages is not None else 0
        if fetches:
            watch.start(restoring)
        for step in found.steps:
            try:
                file = Staged(generation.staged(step.commit), pointer.staged_length, pointer.staged_digest, 0)
                if not step.local:
                    assert self.packages is not None, "an offer comes from packages"
                    [file] = fetch_steps(self.packages, pointer, [step], generation.staged)
                kill_point("before_ingest", step.commit.version)
                ingesting = time.monotonic()
                store.confirm(file)
                self.ingest_s += time.monotonic() - ingesting
                kill_point("after_ingest", step.commit.version)
            except StateCorrupted as error:
                if step.local:
                    self._damaged_here.add(step.commit)
                else:
                    self._broken.add((step.commit, False))
                if not fetches:
                    watch.start(restoring)
                watch.suspended(restoring, str(error))
                return False
        if fetches and self.packages is not None:
            watch.end(restoring, 0, self.packages.fetched_bytes - before, time.monotonic() - started)
        return True

    def _fetch(self, pointer: Pointer, why: str) -> Opened | None:
        assert self.packages is not None, "an offer comes from packages"
        kill_point("fetch", pointer.commit.version)
        fresh = self.directory.new_generation()
        listeners: Iterable[RestoreListener] = (*self.listeners, self.told)
        done = fetch_state(self.packages, pointer, fresh.database, fresh.staged, why=why, listeners=listeners)
        if not done:
            self.directory.discard(fresh)
            return None
        store = RocksStore.open(fresh.database, create=False)
        kill_point("after_fetch", pointer.commit.version)
        self.directory.adopt(fresh)
        return _swept(pointer, fresh, store, -1)


def _open_current(generation: Generation | None) -> tuple[RocksStore | None, Nothing | Unreadable | At]:
    if generation is None:
        return None, Nothing()
    try:
        store = RocksStore.open(generation.database, create=False)
    except StateCorrupted as error:
        return None, Unreadable(str(error))
    try:
        row = read_commit_row(store)
    except StateCorrupted as error:
        store.close()
        return None, Unreadable(str(error))
    except BaseException:
        store.close()
        raise
    return store, At(row.commit if row is not None else None)


def _staged(pointer: Pointer | None, generation: Generation | None) -> set[Commit]:
    """The pointer's own staged file, if one of the right length is here; its digest is checked when it is ingested."""
    if pointer is None or generation is None:
        return set()
    try:
        length = generation.staged(pointer.commit).stat().st_size
    except FileNotFoundError:
        return set()
    return {pointer.commit} if length == pointer.staged_length else set()


RECLAIM_EVERY = 8
"""Commits between two reclaims of what bounds hide: deleting is a file of the database per region, hiding is free."""


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
    row = read_commit_row(store)
    if row is None or row.commit != pointer.commit:
        raise StateCorrupted(
            "the steps to a commit lead to another one",
            where=f"shard {pointer.shard}, {generation.database}",
            why=f"at {row.commit.name if row is not None else 'no commit'}, the pointer names {pointer.commit.name}",
            command=RESTORE_COMMAND,
        )
    if began is None:
        began = row.parent.version if row.parent is not None else -1
    if began // RECLAIM_EVERY != row.commit.version // RECLAIM_EVERY:  # a shard that moves skips commits on each host
        reclaim(store, row.bounds)
    return Opened(generation, store, row)


def _why(found: Plan) -> str:
    return found.why if isinstance(found, Missing | Fetch) else "no package leads to it"


def _ahead(found: Ahead, where: str) -> RewindError:
    return StateAhead(
        found.why,
        where=where,
        why="this task is a zombie, or Spark's checkpoint was rolled back",
        command="rewind restore <checkpoint> (with no query running)",
    )


def read_commit_row(store: RocksStore) -> CommitRecord | None:
    """Read the commit that a database is at."""
    data = store.get(COMMIT_KEY)
    return decode_record(data) if data is not None else None
