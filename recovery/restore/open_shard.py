"""Open a shard's database exactly at its pointer: look, ask the planner, try, note what is broken, ask again.

Nothing here reads the source: what cannot be had from the local disk or from snapshots is `StateUnavailable`, and the
supervisor restores it. A piece that turns out damaged is left out of the next plan, so the fallback order goes one step
at a time: the staged file here, the same one among the snapshots, older snapshots and more steps. Each try is reported.
"""

from __future__ import annotations

from collections.abc import Set
from contextlib import suppress
from dataclasses import dataclass, field

from backend.errors import StateAhead, StateUnavailable
from backend.rocks import RocksStore
from backend.store.bounds import reclaim
from backend.store.storage import done_without, storage
from recovery.commit.pointer import At, Commit, CommitRecord, Pointer
from recovery.commit.shard_directory import Generation, ShardDirectory
from recovery.restore.carry_out import RESTORE_COMMAND, CarryOut, Here, open_here
from recovery.restore.planner import (
    Advance,
    Ahead,
    Fetch,
    Local,
    Missing,
    Remote,
    Start,
    Use,
    plan,
)
from recovery.snapshots.manifest import Snapshot
from recovery.snapshots.publisher import Snapshots


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
        incarnation: The query's start that asks. A database that is newer than the pointer and was made by an earlier
            one is no sign of a zombie: Spark was rolled back in between, and the database is done without.
        most_bytes: Snapshots of more bytes are not fetched here; None fetches them.
        tries: What carries the plans out, and knows what came of it.
    """

    directory: ShardDirectory
    where: str
    snapshots: Snapshots | None = None
    incarnation: int = 0
    most_bytes: int | None = None
    tries: CarryOut = field(init=False)

    def __post_init__(self) -> None:
        self.tries = CarryOut(self.directory, self.snapshots)

    def at(self, pointer: Pointer | None) -> Opened:
        """Open the database at the pointer.

        Raises:
            StateUnavailable: It is not here and no snapshot leads to it, or more than `most_bytes` of them do.
            StateAhead: The local state is newer than the pointer; nothing was touched.
            StateCorrupted: What the local files lead to is not the commit that the pointer names.
        """
        here = open_here(self.directory.current())
        try:
            began = self._lead(pointer, here)
            assert here.generation is not None and here.store is not None
            if here.row is not None:  # also where a death came between an ingest and here: it is idempotent
                reclaim_if_due(here.store, here.row, began)
            return Opened(here.generation, here.store, here.row)
        except BaseException:
            here.close()
            raise

    def _lead(self, pointer: Pointer | None, here: Here) -> int:
        """Bring what is here to the pointer; give the version at which this copy was before, -1 for none."""
        began = here.row.commit.version if here.row is not None else -1
        staged = _staged(pointer, here.generation)
        offers: tuple[Snapshot, ...] = ()
        looked = self.snapshots is None
        why = ""
        while True:
            usable = frozenset(staged - self.tries.damaged_here)
            found = plan(pointer, Local(here.database, usable), Remote(offers))
            if isinstance(found, Start):
                self.tries.start(here)
                return -1
            if isinstance(found, Ahead):
                self._check_ahead(found, here.row)
                here.close(f"Spark's checkpoint was rolled back: {found.why}")
                staged = set()
                continue
            if isinstance(found, Use):
                assert here.row is not None
                return here.row.parent.version if here.row.parent is not None else -1
            assert pointer is not None, "without a pointer the plan is Start or Ahead"
            if isinstance(found, Advance) or (isinstance(found, Fetch) and looked and self.snapshots is not None):
                if looked:
                    self._check_length(found, offers)
                failed = self.tries.bring(pointer, found, here, why)
                if not failed:
                    return began if isinstance(found, Advance) else -1
                why = failed if isinstance(found, Fetch) else why
            elif looked:
                assert isinstance(found, Missing | Fetch), "changelog and source are not asked here"
                raise StateUnavailable(
                    f"the state of commit {pointer.commit.name} is not here",
                    where=self.where,
                    why="; ".join(filter(None, [found.why, self.tries.recorder.failures])),
                    command=RESTORE_COMMAND,
                )
            if self.snapshots is not None:
                offers = self._offers(self.snapshots, pointer, here, usable)
                looked = True

    def _offers(self, snapshots: Snapshots, pointer: Pointer, here: Here, staged: Set[Commit]) -> tuple[Snapshot, ...]:
        """Look at what leads to the commit; where its own step lies here alone, not uploaded, at what leads to that."""
        start, broken = here.database if isinstance(here.database, At) else None, self.tries.broken
        offers = snapshots.offers(pointer.shard, toward=pointer.commit, start=start, broken=broken)
        if offers or pointer.parent is None or not staged - self.tries.damaged_here:
            return offers
        return snapshots.offers(pointer.shard, toward=pointer.parent, start=start, broken=broken)

    def _check_ahead(self, found: Ahead, row: CommitRecord | None) -> None:
        """Refuse a database of this launch that is ahead; that of one before it is of a checkpoint that went back."""
        if row is None or row.incarnation >= self.incarnation:
            raise StateAhead(
                found.why,
                where=self.where,
                why="this task is a zombie, or Spark's checkpoint was rolled back",
                command="rewind restore <checkpoint> <module:function> (with no query running)",
            )

    def _check_length(self, found: Advance | Fetch, offers: tuple[Snapshot, ...]) -> None:
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
