"""Look at a checkpoint from outside: no Spark, no lock, nothing written, the job may be running.

What is committed is what Spark's state holds, and reading that needs a JVM. Mostly it can be told without: `commits/`
names the last committed micro-batch, and the changelog has one record per shard and attempt. Only where failed attempts
left several records of that version does somebody have to ask Spark (`Undecided`). Records of a history that was taken
back are known by the batch time in Spark's `offsets/`, and where that is gone by the starts since.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, TypeVar

import xxhash

from backend.batch import Position
from backend.errors import UNDECODABLE, HistoryLost, RewindError, StateUnavailable, StorageFailed
from backend.rocks import RocksStore
from backend.store.memory import MemoryStore
from backend.store.protocol import LOGGED_FROM, Changes, Readable, Region
from backend.store.storage import storage
from backend.store.workspace import Workspace
from backend.windows import panes
from recovery.changelog import Changelog, Entry, History, open_changelog
from recovery.changelog.records import Kind
from recovery.commit.manifest import Manifest, changelog_uri, query_id, read_manifest
from recovery.commit.option_sets import versions_in
from recovery.commit.pointer import Commit, CommitRecord, RestoringPointer, read_commit_row
from recovery.commit.shard_directory import Generation
from recovery.commit.spark_files import planned_time
from recovery.files import Files, absolute, open_files
from recovery.jobs import planned_at, queue_files, snapshots
from recovery.queue.entries import entries_behind

_PANED = ("tumbling", "hopping")
_TRIES = 3
T = TypeVar("T")


class Undecided(RewindError):
    """Several attempts left a record of the committed version: only Spark's state says which one counts."""


@dataclass(frozen=True, slots=True)
class LocalCopy:
    """A shard's database on this host.

    Attributes:
        path: Directory of the generation.
        commit: What it is at; None for none.
        length: Bytes, staged files included.
        staged: Commits that have a staged file, oldest first.
        problem: Why it cannot be read, None when it can.
    """

    path: Path
    commit: Commit | None
    length: int
    staged: tuple[Commit, ...]
    problem: RewindError | None = None


@dataclass(frozen=True, slots=True)
class ShardView:
    """What there is of a shard.

    Attributes:
        shard: The shard.
        history: The committed state, as the changelog has it; None when nothing is committed or it cannot be read.
        problem: Why not.
        log: The changelog's records.
        snapshots: Number of snapshots, and their bytes.
        local: Its database on this host; None when there is none.
        regions: Rows per region of the committed state, the commit's own left out.
        windows: (start, end) in ms of retained panes, in order; None for other kinds of windows.
        queue: Micro-batches that are queued behind the committed state, which is being restored, with their bytes.
    """

    shard: int
    history: History | None
    problem: RewindError | None
    log: Sequence[Entry]
    snapshots: tuple[int, int]
    local: LocalCopy | None
    regions: Mapping[int, int]
    windows: Sequence[tuple[int, int]] | None
    queue: Mapping[int, int]

    @property
    def record(self) -> CommitRecord | None:
        """The committed commit's record."""
        return self.history.record if self.history is not None else None

    @property
    def positions(self) -> list[tuple[int, int, Position]]:
        """Where the committed state is in the source: (stream, partition, position); empty where nothing is known."""
        return self.record.positions if self.record is not None else []

    @property
    def log_bytes(self) -> int:
        """Bytes of the changelog."""
        return sum(entry.length for entry in self.log)

    @property
    def bases(self) -> int:
        """Bases in the changelog."""
        return sum(entry.kind is Kind.BASE for entry in self.log)


class Checkpoint:
    """A checkpoint to look at.

    Args:
        location: Spark's checkpoint location: path or fsspec URI.
        local_dir: Where this host keeps local state; the default of `start()` unless told.
        pointers: What Spark's state says, by shard, when somebody has asked it.
        queues: Likewise of the shards that queue their input.

    Attributes:
        location: The checkpoint; a relative path made absolute, because executors stand in other directories.
        local_dir: Local state on this host, likewise; a variable in it is each executor's own.
        queues: As given; None when nobody has asked Spark.
        shown: Shard -> the record of the state that was last read of it as a table.

    Raises:
        StateUnavailable: There is no manifest: not a checkpoint of Rewind.
        ValueError: A place is none.
    """

    def __init__(
        self,
        location: str,
        local_dir: Path | None = None,
        pointers: Mapping[int, Commit] | None = None,
        queues: Mapping[int, RestoringPointer] | None = None,
    ) -> None:
        place = location.rstrip("/") or location[:1]
        self.files: Files = open_files(place)
        self.location = absolute(place)
        self.local_dir = local_dir or Path(tempfile.gettempdir()) / "rewind"
        if "$" not in str(self.local_dir):
            self.local_dir = self.local_dir.absolute()
        if self.local_dir.exists() and not self.local_dir.is_dir():
            raise ValueError(f"local_dir={str(self.local_dir)!r}: is a file, must be a directory")
        self.queues = queues
        self.shown: dict[int, CommitRecord] = {}
        self._pointers = dict(pointers) if pointers is not None else None
        manifest = read_manifest(self.location)
        if manifest is None:
            raise StateUnavailable(
                "this is not a checkpoint of Rewind",
                where=self.location,
                why="there is no rewind/manifest.json",
                command="give the checkpoint that start() was given",
            )
        self.manifest: Manifest = manifest
        self.changelog: Changelog = open_changelog(self.changelog_uri)
        self.snapshots = snapshots(self.location)

    @property
    def changelog_uri(self) -> str:
        """For `open_changelog`."""
        return changelog_uri(self.location, self.manifest.entries.get("changelog"))

    @property
    def query_id(self) -> str:
        """Spark's query id; raises as `recovery.commit.manifest.query_id`."""
        return query_id(self.location)

    @property
    def operator(self) -> dict[str, Any]:
        """The operator as the manifest describes it."""
        found: dict[str, Any] = self.manifest.entries.get("operator", {})
        return found

    @property
    def is_paned(self) -> bool:
        """Whether windows are cut at fixed times, and stored as panes."""
        window = self.operator.get("window", {})
        return window.get("kind") in _PANED and window.get("unit") == "time"

    @property
    def shards(self) -> range:
        """All shards."""
        return range(self.manifest.shards)

    def versions(self) -> list[int]:
        """Committed micro-batches that Spark still knows, in order."""
        return versions_in(self.location, "commits")

    def queued(self, shard: int, version: int) -> dict[int, int]:
        """Give the micro-batches behind one that have an entry in a shard's queue, with its bytes."""
        return entries_behind(queue_files(self.location), shard, version)

    def committed(self, shard: int, version: int | None = None) -> Commit | None:
        """Give the commit that counts for a shard; None before its first.

        Args:
            shard: The shard.
            version: As of this micro-batch; the newest unless told.

        Raises:
            ValueError: No micro-batch of that number is committed yet.
            Undecided: Only Spark's state can tell.
            HistoryLost: The changelog no longer has the shard as of that version; names those to be had.
        """
        last = max(self.versions(), default=-1)
        if version is not None and version > last:
            allowed = (
                f"at most {last}, the newest committed micro-batch"
                if last >= 0
                else "none: there is no micro-batch yet"
            )
            raise ValueError(f"version={version}: allowed are {allowed}")
        candidates, queued = self._candidates(shard)
        if not candidates:
            return None
        newest = candidates[0].version
        if version is not None and version < newest and not queued:
            older = self._common_ancestor(shard, candidates, version)
            if older is not None:
                return older
        if len(candidates) + queued > 1:
            raise Undecided(
                f"{len(candidates) + queued} attempts logged micro-batch {newest}" + ", one of them as queued" * queued,
                where=f"shard {shard}",
                why="only one of them is committed, and only Spark's state says which",
                command=f"rewind inspect {quote(self.location)} --spark; verify, show and export take --spark, too",
            )
        return candidates[0]

    def _candidates(self, shard: int) -> tuple[list[Commit], bool]:
        """Give the commits of which one is the newest, and whether it may be one that queued its input instead."""
        if self._pointers is not None:
            return [self._pointers[shard]] if shard in self._pointers else [], False
        committed = max(self.versions(), default=-1)
        commits = {entry.commit for entry in self.changelog.entries(shard) if entry.commit.version <= committed}
        starts = planned_at(self.location)
        for last in sorted({commit.version for commit in commits}, reverse=True):
            found = [commit for commit in commits if commit.version == last]
            later = max((number for number, planned in starts if planned < last), default=0)
            time_ms = planned_time(self.location, last)
            if newest := [commit for commit in found if not self._is_gone(shard, commit, time_ms, later)]:
                return newest, last in self.queued(shard, last - 1)
        return [], False

    def _is_gone(self, shard: int, commit: Commit, time_ms: int | None, later: int) -> bool:
        """Return whether a commit is of a history that was taken back.

        Args:
            shard: The shard.
            commit: The commit.
            time_ms: The batch time of its micro-batch in Spark's log: what was taken back may have been put back.
            later: Where that is gone: the last start that began before its micro-batch, 0 for none.
        """
        try:
            record = self.changelog.record(shard, commit)
            return record.incarnation < later if time_ms is None else record.time_ms != time_ms
        except RewindError:  # whoever reads it next names the damage
            return False

    def _common_ancestor(self, shard: int, candidates: Sequence[Commit], version: int) -> Commit | None:
        """Give the commit as of a version; None where it depends on which of the candidates is the newest."""
        try:
            found = {self._ancestor(shard, candidate, version) for candidate in candidates}
        except RewindError:
            if len(candidates) == 1:
                raise
            return None
        return found.pop() if len(found) == 1 else None

    def _ancestor(self, shard: int, newest: Commit, version: int) -> Commit:
        """Follow the lineage back to a version: the records of failed attempts are never on it."""
        present = {entry.commit for entry in self.changelog.entries(shard)}
        known: list[Commit] = [newest]
        while known[-1].version > version:
            record = self.changelog.record(shard, known[-1])
            older = [commit for commit in record.ancestors if commit in present]
            if not older:
                raise HistoryLost(
                    f"the state as of micro-batch {version} is gone",
                    where=f"shard {shard}, {self.changelog_uri}",
                    why=f"versions to be had: {', '.join(str(commit.version) for commit in reversed(known))}",
                    command=f"rewind inspect {quote(self.location)}",
                )
            known += older
        return max((commit for commit in known if commit.version <= version), key=lambda commit: commit.version)

    def view(self, shard: int) -> ShardView:
        """Look at a shard; what cannot be read is a `problem`, not an exception."""
        history: History | None = None
        problem: RewindError | None = None
        try:
            commit = self.committed(shard)
            if commit is not None:
                history = self.changelog.read(shard, commit)
            elif not self.versions() and any(entry.commit.version for entry in self.changelog.entries(shard)):
                problem = StateUnavailable(
                    "Spark's log of commits names no micro-batch, and the changelog has some",
                    where=f"{self.location}/commits, shard {shard}",
                    command=f"put it back from a copy of the checkpoint; rewind verify {quote(self.location)}",
                )
        except RewindError as error:
            problem = error
        snapshots = list[int]()
        with suppress(RewindError):
            snapshots = [snapshot.length for snapshot in self.snapshots.manifests(shard)]
        state = readable(history) if history is not None else MemoryStore()
        keys, _ = state.scan_arrays(bytes([Region.MESSAGES]), b"\xff")
        paned = history is not None and self.is_paned
        return ShardView(
            shard,
            history,
            problem,
            list(self.changelog.entries(shard)),
            (len(snapshots), sum(snapshots)),
            self.local(shard),
            Counter(key[0] for key in keys),
            [(pane.start, pane.end) for pane in panes.all_panes(state)] if paned else None,
            self.queued(shard, history.record.commit.version) if history else {},
        )

    def local(self, shard: int) -> LocalCopy | None:
        """Look at a shard's database on this host, read-only."""
        home = self.local_dir / self.query_id / str(shard)
        try:
            with storage(str(home)):
                path = home / str(json.loads((home / "CURRENT").read_bytes())["generation"])
        except (*UNDECODABLE, FileNotFoundError):
            return None
        except StorageFailed as error:
            return LocalCopy(home, None, 0, (), error)
        if not (path / "db").is_dir():
            return None
        length = sum(_size(file) for file in path.rglob("*"))
        staged = tuple(Generation(path).staged_commits())
        try:
            commit = read_beside(lambda: commit_of(path / "db"))
        except RewindError as error:
            return LocalCopy(path, None, length, staged, error)
        return LocalCopy(path, commit, length, staged)


def read_beside(read: Callable[[], T]) -> T:
    """Read a database that a job may be running on: once its compactions delete a file, again, with those of now.

    Raises:
        RewindError: It cannot be read, three times.
    """
    for _ in range(_TRIES - 1):
        with suppress(RewindError):
            return read()
    return read()


def commit_of(database: Path) -> Commit | None:
    """Read the commit row of a database, read-only."""
    with RocksStore.open(database, read_only=True) as store:
        found = read_commit_row(store, str(database))
    return found.commit if found is not None else None


def logged_differences(store: Readable, history: History) -> list[str]:
    """Say in which regions a database at a commit has other rows than the changelog; none is empty.

    Args:
        store: The database; read row by row.
        history: Of its commit.
    """
    stored = _sums(Workspace(store, history.record.bounds).scan(bytes([LOGGED_FROM]), None))
    logged = _sums(row for keys, values in history.chunks() for row in zip(keys, values, strict=True))
    wrong = []
    for region in sorted(stored[0].keys() | logged[0].keys()):
        (here, digest), (there, wanted) = ((counts[region], sums[region]) for counts, sums in (stored, logged))
        if here != there:
            wrong.append(f"{region_name(region)}: {here} rows, the changelog has {there}")
        elif digest % 2**64 != wanted % 2**64:
            wrong.append(f"{region_name(region)}: {here} rows, as in the changelog, but others")
    return wrong


def _sums(rows: Iterable[tuple[bytes, bytes]]) -> tuple[Counter[int], Counter[int]]:
    """Give count and sum of the hashes of rows by region."""
    counts: Counter[int] = Counter()
    sums: Counter[int] = Counter()
    for key, value in rows:
        counts[key[0]] += 1
        sums[key[0]] += xxhash.xxh3_64_intdigest(key + value)
    return counts, sums


def readable(history: History) -> MemoryStore:
    """Make a history readable like a store; it holds no messages."""
    store = MemoryStore()
    for keys, values in history.chunks():
        store.write(Changes(keys, values))
    return store


def region_name(region: int) -> str:
    """Name a region for people."""
    return Region(region).name.lower() if region < Region.USER else f"user store {region - Region.USER}"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:  # the job goes on meanwhile
        return 0
