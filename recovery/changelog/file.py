"""`FileChangelog`: one file per record beside Spark's checkpoint, on any fsspec filesystem.

::

    <base>/<shard>/<version, 20 digits>_<uuid>.delta      what one commit changed
    <base>/<shard>/<version, 20 digits>_<uuid>.base       every row as of one commit
    <base>/owner-<query>                                  the query whose changelog it is

A file is published whole or not at all (`recovery.files`), its bytes are `recovery.changelog.records`, and its name is
its commit's. Two attempts never write the same delta; a base of one commit holds the same rows whoever writes it.

Two queries that claim a directory at the same time both find the other's name beside their own, and both stop.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from backend.errors import ChangelogDamaged, ManifestMismatch, RewindError, StorageFailed, UnknownFormat
from backend.store.protocol import Changes
from recovery.changelog.protocol import (
    CHEAP_BYTES,
    MAX_DELTAS,
    MIN_BASE_BYTES,
    Entry,
    Growth,
    History,
    Logged,
    foreign,
    place_and_growth,
    read_history,
    verify_lineage,
)
from recovery.changelog.records import (
    Kind,
    LogRecord,
    check_commit,
    decode,
    decode_header,
    encode_base,
    encode_delta,
    missing,
)
from recovery.commit.pointer import Commit, CommitRecord, is_old
from recovery.files import Files, open_files
from recovery.killpoints import passing

CHEAP_FILES = 16
"""A start reads a lineage of at most so many files, and `CHEAP_BYTES`, to its end."""
OWNER = "owner-"

_KINDS = {kind.suffix: kind for kind in Kind}

_GROWN: dict[str, dict[int, tuple[Commit, Growth]]] = {}
"""What had grown at a commit, per base directory and shard, for this process: a task makes a `FileChangelog` of its
own, and lists nothing then."""


class FileChangelog:
    """A `recovery.changelog.protocol.Changelog` in files.

    Args:
        base: Directory (path or fsspec URI), or an opened one.
        owner: The query whose changelog it is; "" for readers, who take what is there.
    """

    max_deltas, min_base_bytes = MAX_DELTAS, MIN_BASE_BYTES

    def __init__(self, base: str | os.PathLike[str] | Files, *, owner: str = "") -> None:
        self.files: Files = open_files(base) if isinstance(base, str | os.PathLike) else base
        self._owner = owner
        self._grown = _GROWN.setdefault(self.files.uri, {})

    def check(self, shards: int, *, new: bool) -> None:
        """Check whose directory it is."""
        if not self._owner:
            return
        owners = self._owners()
        if owners == {self._owner}:
            return
        others = owners - {self._owner}
        if others or (new and any(name.isdecimal() for name in self.files.folders())):
            raise foreign(self.files.uri, min(others, default=""), self._owner)

    def prepare(self, shards: int, *, new: bool = False) -> None:
        """Write the owner's file; directories are made at the first record."""
        self.check(shards, new=new)
        if self._owner and self._owner not in self._owners():
            name = f"{OWNER}{self._owner}"
            self.files.write(name, [b""])
            try:
                self.check(shards, new=False)
            except ManifestMismatch:
                self.files.delete([name])
                raise

    def lost(self, shard: int, commit: Commit, location: str = "", *, whole: bool = False) -> str:
        """Follow the lineage by the names of the files and a few headers; a short one is read."""
        self.check(shard + 1, new=False)
        found = {(entry.commit, entry.kind): entry.length for entry in self._entries(shard)}
        needed: set[tuple[Commit, Kind]] = set()
        try:
            self._mark(shard, commit, set(found), needed)
            empty = [name for name in needed if found.get(name) == 0]
            if empty:
                raise missing(f"{self.files.uri}/{_name(shard, *empty[0])}")
            if whole and len(needed) <= CHEAP_FILES and sum(found.get(name, 0) for name in needed) <= CHEAP_BYTES:
                self.read(shard, commit)
        except (ChangelogDamaged, UnknownFormat, StorageFailed) as error:
            if isinstance(error, StorageFailed) and not error.unreadable:
                raise
            return f"{error.what}, {error.where}"
        return ""

    def append(self, record: CommitRecord, changes: Changes) -> Logged:
        """Publish a commit's delta."""
        name = _name(record.shard, record.commit, Kind.DELTA)
        length = self.files.write(name, [encode_delta(record, changes)])
        tip, before = self._grown.pop(record.shard, (None, Growth()))
        if tip != record.parent:
            return Logged(name, length)
        growth = Growth(before.deltas + 1, before.delta_bytes + length, before.base_bytes)
        self._grown[record.shard] = record.commit, growth
        return Logged(growth.beside(name), length)

    def append_base(self, record: CommitRecord, rows: Iterable[tuple[bytes, bytes]]) -> str:
        """Publish every row as of a commit."""
        name = _name(record.shard, record.commit, Kind.BASE)
        length = self.files.write(name, encode_base(record, rows))
        self._grown[record.shard] = record.commit, Growth(base_bytes=length)
        return name

    def wants_base(self, shard: int, commit: Commit, location: str = "") -> bool:
        """Compare the deltas since the last base with that base; lists nothing where that is known."""
        tip, growth = self._grown.get(shard, (None, Growth()))
        if tip != commit:
            growth = place_and_growth(location)[1] or self._measure(shard, commit)
            self._grown[shard] = commit, growth
        return growth.wants_base(self.max_deltas, self.min_base_bytes)

    def read(self, shard: int, commit: Commit) -> History:
        """Read the rows as of a commit.

        A damaged base does not end it while the deltas before it are still there; `History.notes` tells.
        """
        return read_history(shard, commit, partial(self._load, shard, self.files.list(str(shard))))

    def record(self, shard: int, commit: Commit) -> CommitRecord:
        """Read a commit's delta, or its base."""
        try:
            return self._read(shard, commit, Kind.DELTA).record
        except (ChangelogDamaged, UnknownFormat):
            return self._read(shard, commit, Kind.BASE).record

    def entries(self, shard: int) -> Sequence[Entry]:
        """List a shard's files; names that are not ours are left out."""
        return sorted(self._entries(shard), key=lambda entry: (entry.commit, entry.kind.value))

    def prune(self, shard: int, keep: Iterable[Commit], *, dry_run: bool = False) -> list[str]:
        """Delete files that no retained commit needs, and drafts of writers that died."""
        retained = sorted(set(keep))
        if not retained:
            return []
        self.check(shard + 1, new=False)
        entries = self.entries(shard)
        present = {(entry.commit, entry.kind) for entry in entries}
        needed: set[tuple[Commit, Kind]] = set()
        for commit in reversed(retained):
            self._mark(shard, commit, present, needed)
        oldest = retained[0].version
        doomed = [
            entry.location
            for entry in entries
            if entry.commit.version <= oldest and (entry.commit, entry.kind) not in needed
        ]
        doomed += [f"{shard}/{name}" for name in self.files.list(str(shard), temporary=True) if is_old(name, oldest)]
        if not dry_run:
            self.files.delete(passing(doomed, "prune_changelog", oldest))
        return doomed

    def verify(self, shard: int, commit: Commit | None = None) -> list[RewindError]:
        """Read every file of a shard, then the lineage: a file that was pruned meanwhile is missed by that alone."""
        wrong: list[RewindError] = []
        for entry in self.entries(shard):
            try:
                self._read(shard, entry.commit, entry.kind)
            except RewindError as error:
                if not isinstance(error.__cause__, FileNotFoundError):
                    wrong.append(error)
        return wrong if commit is None else verify_lineage(lambda: self.read(shard, commit), wrong)

    def rest(self) -> None:
        """Do nothing: no handle is kept open."""

    def _entries(self, shard: int) -> Iterator[Entry]:
        for name, length in self.files.list(str(shard)).items():
            parsed = _parse(name)
            if parsed is not None:
                yield Entry(parsed[1], parsed[0], f"{shard}/{name}", length)

    def _owners(self) -> set[str]:
        return {name.removeprefix(OWNER) for name in self.files.list() if name.startswith(OWNER)}

    def _load(self, shard: int, present: dict[str, int], commit: Commit, notes: list[str]) -> LogRecord:
        base, delta = f"{commit.name}.base", f"{commit.name}.delta"
        if base in present:
            try:
                return self._read(shard, commit, Kind.BASE)
            except (ChangelogDamaged, UnknownFormat, StorageFailed) as error:
                if delta not in present or (isinstance(error, StorageFailed) and not error.unreadable):
                    raise
                notes.append(f"went on without a base: {error}")
        return self._read(shard, commit, Kind.DELTA)

    def _read(self, shard: int, commit: Commit, kind: Kind) -> LogRecord:
        name = _name(shard, commit, kind)
        where = f"{self.files.uri}/{name}"
        try:
            data = self.files.read(name)
        except FileNotFoundError as error:
            raise missing(where) from error
        link = decode(data, where)
        check_commit(link.record, shard, commit, where)
        return link

    def _header(self, shard: int, commit: Commit, kind: Kind) -> CommitRecord:
        name = _name(shard, commit, kind)
        where = f"{self.files.uri}/{name}"
        try:
            record = decode_header(partial(self.files.head, name), where)
        except FileNotFoundError as error:
            raise missing(where) from error
        check_commit(record, shard, commit, where)
        return record

    def _mark(
        self, shard: int, commit: Commit, present: set[tuple[Commit, Kind]], needed: set[tuple[Commit, Kind]]
    ) -> None:
        """Mark what a commit needs, down to a base; one header names up to `MAX_ANCESTORS` of them."""
        at = commit
        while (at, Kind.BASE) not in present and (at, Kind.DELTA) not in needed:
            record = self._header(shard, at, Kind.DELTA)
            needed.add((at, Kind.DELTA))
            if record.parent is None:
                return
            *between, at = record.ancestors or [record.parent]
            for ancestor in between:
                if (ancestor, Kind.BASE) in present or (ancestor, Kind.DELTA) in needed:
                    at = ancestor
                    break
                if (ancestor, Kind.DELTA) not in present:
                    raise missing(f"{self.files.uri}/{_name(shard, ancestor, Kind.DELTA)}")
                needed.add((ancestor, Kind.DELTA))
        if (at, Kind.BASE) in present:
            needed.add((at, Kind.BASE))

    def _measure(self, shard: int, commit: Commit) -> Growth:
        """Sum up sizes since the newest base, orphans included: a base comes a little early then."""
        entries = [entry for entry in self.entries(shard) if entry.commit.version <= commit.version]
        bases = [entry for entry in entries if entry.kind is Kind.BASE]
        since = bases[-1].commit.version if bases else -1
        deltas = [entry.length for entry in entries if entry.kind is Kind.DELTA and entry.commit.version > since]
        return Growth(len(deltas), sum(deltas), bases[-1].length if bases else 0)


def _name(shard: int, commit: Commit, kind: Kind) -> str:
    return f"{shard}/{commit.name}{kind.suffix}"


def _parse(name: str) -> tuple[Commit, Kind] | None:
    stem, dot, suffix = name.partition(".")
    version, _, uuid = stem.partition("_")
    kind = _KINDS.get(dot + suffix)
    if kind is not None and len(version) == 20 and version.isdecimal() and uuid:
        return Commit.of_name(stem), kind
    return None
