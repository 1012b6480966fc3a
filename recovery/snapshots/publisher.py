"""Snapshots: copies of a shard's database on the checkpoint's filesystem, for whichever executor needs them next.

A *full* snapshot is a database at one commit; a *step* is one staged file, which turns its parent's state into its
commit's. A restore and a shard that moves use the same snapshots. Layout under the base directory (format 1)::

    <shard>/<version>_<uuid>.full.json              manifest of a full snapshot, written last
    <shard>/<version>_<uuid>/<snapshot uuid>/<name>  its small files
    <shard>/shared/<xxh3-128>_<bytes>.sst           SST files, named by content: uploaded once, used by many snapshots
    <shard>/<version>_<uuid>.step.json              manifest of a step, written last
    <shard>/<version>_<uuid>.step.sst               its file

Without its manifest a snapshot does not exist. A snapshot is a disposable copy: every file is
checked against the manifest's length and digest before it is used.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import xxhash

from backend.errors import UNDECODABLE, RewindError, StorageFailed
from backend.rocks.blocks import check_blocks
from backend.store.protocol import Staged
from backend.store.staging import file_digest, sync
from backend.store.storage import done_without, storage
from recovery.commit.pointer import Commit, CommitRecord, is_old
from recovery.files import Files, make_directory, open_files
from recovery.killpoints import kill_point, passing
from recovery.snapshots.manifest import (
    SHARED,
    PackedFile,
    Snapshot,
    damaged,
    differs,
    encode_manifest,
    manifest_name,
    where_of,
)
from recovery.snapshots.reader import SnapshotReader

_LEFT_OUT = frozenset({"LOCK", "LOG"})
MOST_KNOWN = 16_384
_known: dict[tuple[int, ...], tuple[int, str]] = {}
"""Length and digest of SST files that this process has read: nobody writes to them, and most are in each snapshot."""
IDLE_S = 3600.0
"""For so long a shared file, or the draft of one, waits for a manifest that names it before it is deleted."""
_IDLE_FORMAT = 2


class _Idle(msgspec.Struct, frozen=True):
    format: int
    since: dict[str, float]


class Snapshots(SnapshotReader):
    """All snapshots under one base directory.

    Args:
        base: `<checkpoint>/rewind/snapshots`: path, fsspec URI, or an opened directory.
        idle_s: See `IDLE_S`.

    Attributes:
        fetched_bytes: Of all files that were fetched, damaged ones too.
    """

    def __init__(self, base: str | os.PathLike[str] | Files, *, idle_s: float = IDLE_S) -> None:
        super().__init__(open_files(base) if isinstance(base, str | os.PathLike) else base)
        self.fetched_bytes = 0
        self._idle_s = idle_s

    # ------------------------------------------------------------------------------------------------------ publish

    def publish(self, record: CommitRecord, directory: Path, *, check: bool = False) -> int:
        """Publish a database as a full snapshot; only SST files that are not there yet are uploaded. Give the bytes.

        Args:
            record: The commit row of the database.
            directory: A closed database or a checkpoint of an open one; its SST files may become hard links of the
                snapshot's and must not be written to (RocksDB never does).
            check: Read the files that are there already, and replace those that are damaged: nothing else does, and
                a database made of an older copy may share its files with snapshots that cannot be used for them.

        Raises:
            ValueError: There is no file, or something other than plain files.
            StateCorrupted: A block of a file that is not there yet does not match its checksum: nothing is published.
        """
        paths = [path for path in sorted(directory.iterdir()) if path.name.split(".")[0] not in _LEFT_OUT]
        if not paths or not all(path.is_file() and not path.is_symlink() for path in paths):
            raise ValueError(f"not a database's directory of plain files: {directory}")
        folder = f"{record.commit.name}/{uuid.uuid4().hex}"
        digest = file_digest if check else _known_digest
        packed = [PackedFile(path.name, *digest(path)) for path in paths]
        snapshot = Snapshot(record.shard, record.commit, record.parent, folder, packed)
        uploaded = self._put_missing(snapshot, paths, check=check)
        uploaded += self._write_manifest(snapshot)
        # nothing named these files before: pruning may have taken those that were there when a slow upload began
        return uploaded + self._put_missing(snapshot, paths)

    def _put_missing(self, snapshot: Snapshot, paths: Sequence[Path], *, check: bool = False) -> int:
        present = self._present(snapshot, self.files.list(f"{snapshot.shard}/{SHARED}"))
        if check:
            present = [file for file in present if self._check(where_of(snapshot, file), file) is None]
        uploaded = 0
        for path, file in zip(paths, snapshot.files, strict=True):
            if file not in present:
                if file.shared is not None:
                    check_blocks(path)  # its digest would call it sound for ever
                uploaded += self.files.put(path, where_of(snapshot, file), link=file.shared is not None)
                kill_point("during_upload", snapshot.commit.version)
        return uploaded

    def publish_step(self, record: CommitRecord, staged: Staged) -> int:
        """Publish a commit's staged file; give the bytes."""
        snapshot = Snapshot(
            record.shard, record.commit, record.parent, "", [PackedFile("staged.sst", staged.length, staged.digest)]
        )
        uploaded = self.files.put(staged.path, where_of(snapshot, snapshot.files[0]), link=True)
        kill_point("during_upload", record.commit.version)
        return uploaded + self._write_manifest(snapshot)

    # --------------------------------------------------------------------------------------------------------- read

    def fetch(self, shard: int, commit: Commit, target: Path) -> None:
        """Copy a full snapshot to a new local directory and check every digest; durable on return.

        Raises:
            FileExistsError: There is something at `target` already.
            StateCorrupted: A piece is missing or differs from the manifest; `target` is gone again.
        """
        snapshot = self._manifest(shard, manifest_name(commit, full=True))
        if target.exists():
            raise FileExistsError(f"a snapshot is fetched to a new directory: {target}")
        make_directory(target.parent)
        target.mkdir(mode=0o700)
        try:
            for file in snapshot.files:
                self._fetch_file(snapshot, file, target / file.name, link=file.shared is not None)
            sync(target)
        except BaseException:
            shutil.rmtree(target)
            raise

    def fetch_step(self, shard: int, commit: Commit, target: Path) -> Staged:
        """Copy a step's file to a local path and check its digest; one that is there already and matches stays.

        Raises:
            StateCorrupted: It is missing or differs from the manifest.
        """
        name = manifest_name(commit, full=False)
        snapshot = self._steps.get((shard, name)) or self._manifest(shard, name)
        file = snapshot.files[0]
        if not _is_there(target, (file.length, file.digest)):
            with storage(str(target)):
                target.unlink(missing_ok=True)
            self._fetch_file(snapshot, file, target, link=True)
            sync(target.parent)
        return Staged(target, file.length, file.digest, 0)

    def is_sound(self, shard: int, commit: Commit) -> bool:
        """Tell whether a full snapshot of a commit is there, and each of its files is what its manifest says."""
        snapshot = self._usable(shard, manifest_name(commit, full=True))
        return snapshot is not None and all(
            self._check(where_of(snapshot, file), file) is None for file in snapshot.files
        )

    def verify(self, shard: int) -> list[RewindError]:
        """Check every file of every snapshot against its manifest; give what is wrong."""
        wrong: list[RewindError] = []
        checked: set[str] = set()
        for name in self._manifests(shard):
            try:
                snapshot = self._manifest(shard, name)
            except RewindError as error:
                wrong.append(error)
                continue
            for file in snapshot.files:
                where = where_of(snapshot, file)
                if where not in checked and (error_found := self._check(where, file)) is not None:
                    wrong.append(error_found)
                checked.add(where)
        return wrong

    # -------------------------------------------------------------------------------------------------------- prune

    def prune(self, shard: int, keep: Iterable[Commit], *, dry_run: bool = False) -> list[str]:
        """Delete what no retained commit needs; only the driver calls it, after a commit.

        A snapshot goes only when its version is not above that of the oldest retained commit, and one that has lost a
        file stands in for no older one. A shared file goes when no snapshot has named it for `idle_s`: an upload that
        runs has written its manifest by then, and a slower one uploads again what it then misses.

        Args:
            shard: The shard.
            keep: Commits of the pointers of all retained Spark checkpoint versions. Empty: nothing is deleted.
            dry_run: Only tell.

        Returns:
            Names deleted, or to be deleted; a folder ends in `/`.
        """
        retained = sorted(set(keep))
        if not retained:
            return []
        oldest = retained[0].version
        manifests = self._manifests(shard)
        shared = self.files.list(f"{shard}/{SHARED}")
        needed = self._needed(shard, retained, set(manifests), shared)
        doomed = [name for name in manifests if is_old(name, oldest) and name not in needed]
        alive = [name for name in manifests if name not in doomed]
        doomed += [
            name
            for name in self.files.list(str(shard))
            if name.endswith(".step.sst") and is_old(name, oldest) and f"{name[:-4]}.json" not in needed
        ]
        doomed += [
            name  # a draft of a writer that died
            for name in self.files.list(str(shard), temporary=True)
            if not name[:20].isdecimal() or is_old(name, oldest)  # without a number: the driver's own, which prunes
        ]
        folders = [
            f"{shard}/{name}"
            for name in self.files.folders(str(shard))
            if is_old(name, oldest) and f"{name}.full.json" not in needed
        ]
        before = self._idle_before(shard)
        idle, gone = self._idle_shared(shard, alive, shared, before)
        names = [*(f"{shard}/{name}" for name in doomed), *(f"{shard}/{SHARED}/{name}" for name in gone)]
        if not dry_run:
            self.files.delete(passing(names, "prune_packages", oldest))  # manifests first: half a package is none
            for folder in passing(folders, "prune_packages", oldest):
                self.files.delete_folder(folder)
            if idle != before:
                self.files.write(f"{shard}/idle.json", [msgspec.json.encode(_Idle(_IDLE_FORMAT, idle))])
        return [*names, *(f"{folder}/" for folder in folders)]

    def _needed(
        self, shard: int, retained: Iterable[Commit], manifests: Collection[str], shared: Mapping[str, int]
    ) -> set[str]:
        """Give the manifests that lead to the retained commits; a path that leads to nothing is not needed.

        The path of a commit that lies on a newer one's is the rest of that, unless it ends at a snapshot of its own: it
        is not walked again, which asks an object store about the same snapshot for each commit.
        """
        needed: set[str] = set()
        for commit in sorted(retained, reverse=True):
            if manifest_name(commit, full=False) in needed and manifest_name(commit, full=True) not in manifests:
                continue
            path = self._back(shard, commit, None, manifests, (), shared)
            if path and (path[-1].full or path[-1].parent is None):
                needed.update(manifest_name(offer.commit, full=offer.full) for offer in path)
        return needed

    def _idle_before(self, shard: int) -> dict[str, float]:
        """Read since when shared files have waited; none where nobody has written it down."""
        try:
            found = msgspec.json.decode(self.files.read(f"{shard}/idle.json"), type=_Idle)
        except (*UNDECODABLE, FileNotFoundError):
            return {}
        return found.since if found.format == _IDLE_FORMAT else {}

    def _idle_shared(
        self, shard: int, alive: Iterable[str], shared: Iterable[str], before: Mapping[str, float]
    ) -> tuple[dict[str, float], list[str]]:
        """Split the shared files that no snapshot names: since when the others wait, and those that waited enough."""
        used: set[str | None] = set()
        for name in alive:
            if name.endswith(".full.json") and (snapshot := self._sound(shard, name)) is not None:
                used.update(file.shared for file in snapshot.files)
        idle = {*shared, *self.files.list(f"{shard}/{SHARED}", temporary=True)} - used
        now = time.time()
        gone = sorted(name for name in idle if name in before and now - before[name] >= self._idle_s)
        return {name: min(before.get(name, now), now) for name in sorted(idle) if name not in gone}, gone

    # ------------------------------------------------------------------------------------------------------ details

    def _write_manifest(self, snapshot: Snapshot) -> int:
        name = f"{snapshot.shard}/{manifest_name(snapshot.commit, full=snapshot.full)}"
        return self.files.write(name, [encode_manifest(snapshot)])

    def _fetch_file(self, snapshot: Snapshot, file: PackedFile, target: Path, *, link: bool) -> None:
        where = where_of(snapshot, file)
        try:
            self.files.get(where, target, link=link)
        except FileNotFoundError as error:
            raise damaged(f"{self.files.uri}/{where}", "a file of a snapshot is missing") from error
        with storage(str(target)):
            linked = target.stat().st_nlink > 1  # then what the disk does not give is the snapshot's own file
        with storage(f"{self.files.uri}/{where}" if linked else str(target)):
            found = file_digest(target)
            if found != (file.length, file.digest):
                target.unlink()
        self.fetched_bytes += found[0]
        if found != (file.length, file.digest):
            raise differs(f"{self.files.uri}/{where}", file, found)
        kill_point("during_fetch", snapshot.commit.version)

    def _check(self, where: str, file: PackedFile) -> RewindError | None:
        digest = xxhash.xxh3_128()
        length = 0
        try:
            for chunk in self.files.chunks(where):
                digest.update(chunk)
                length += len(chunk)
        except FileNotFoundError:
            return damaged(f"{self.files.uri}/{where}", "a file of a snapshot is missing")
        except StorageFailed as error:
            if not error.unreadable:
                raise
            return error
        found = (length, digest.hexdigest())
        return differs(f"{self.files.uri}/{where}", file, found) if found != (file.length, file.digest) else None


def _is_there(path: Path, content: tuple[int, str]) -> bool:
    """Tell whether a file has this length and digest; one that its disk does not give has not."""
    with suppress(FileNotFoundError), done_without(), storage(str(path)):
        return file_digest(path) == content
    return False


def _known_digest(path: Path) -> tuple[int, str]:
    """Return what `file_digest` does; an SST file is read once, under whatever name it lies."""
    if path.suffix != ".sst":
        return file_digest(path)
    found = path.stat()
    key = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
    known = _known.get(key)
    if known is None:
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        known = _known[key] = file_digest(path)
    return known
