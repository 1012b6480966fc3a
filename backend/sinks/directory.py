"""A directory of micro-batches: `<root>/batch=<version>/`, each replaced as a whole.

Layout::

    <root>/batch=<version>/results-<shard>-...-<uuid>.parquet what readers see; Spark reads `batch` as a column
    <root>/_rewind/owner.json                                 {"format": 1, "query": id, "holds": "results"}
    <root>/_rewind/attempt-<uuid of the run>-<version>/       tasks write here
    <root>/_rewind/ready-<version>-<uuid>/                    only the files of the attempts that count; then renamed
    <root>/_rewind/old-<version>-<uuid>/                      what a replacement moved away, until the new one is there
    <root>/_rewind/stale.json                                 {"format": 1, "versions": {version: digest of file names}}

Names that begin with `_` are invisible to Spark and to `pyarrow.dataset`. Tasks never learn the name of the ready
directory, so a task that Spark has given up cannot add to what is published.

What a reader can see: a whole micro-batch or none of it, never a part. Where the kernel and the filesystem know
`renameat2(RENAME_EXCHANGE)` (Linux, most local filesystems), a replacement is one step; elsewhere the old directory is
renamed away first and for a moment the micro-batch is absent. A micro-batch is replaced only while Spark has not
committed it, that is at most once per crash. A reader that has listed files of a replaced directory may find them gone.

`stale.json` names micro-batches of a history that was taken back: they were out when a query started on a checkpoint
that had not planned them. A start notes them before Spark plans anything, so it is known until each was replaced.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from backend.errors import UNDECODABLE, ManifestMismatch, StateCorrupted, unknown_format
from backend.store.staging import sync
from backend.store.storage import storage
from recovery.files import LocalFiles, read_struct

FORMAT = 1
_PRIVATE = "_rewind"
_OWNER = "owner.json"
_STALE = "stale.json"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class Stale(msgspec.Struct, frozen=True):
    """The file `stale.json`: a digest of the names of each version's files."""

    versions: dict[int, str]
    format: int = FORMAT


class VersionedDirectory:
    """One root of micro-batches.

    Args:
        root: A directory on a POSIX filesystem that the driver and all executors see under this path.
        holds: What is in it, `results` or `errors`.
    """

    def __init__(self, root: str | Path, holds: str = "results") -> None:
        self.root = Path(root)
        self.holds = holds
        self._stale: dict[int, str] = {}

    def published(self) -> list[int]:
        """Give the versions that readers see, in order."""
        if not self.root.is_dir():
            return []
        with os.scandir(self.root) as entries:  # as many as there are micro-batches: no path for each
            names = [entry.name.removeprefix("batch=") for entry in entries if entry.name.startswith("batch=")]
        return sorted(int(name) for name in names if name.isdecimal())

    def path(self, version: int) -> Path:
        """Give where a version is published."""
        return self.root / f"batch={version}"

    def open(self, query: str, planned: int | None = None) -> None:
        """Take the directory for a query, once, and remove what crashed attempts left.

        Args:
            query: The query's id.
            planned: Newest micro-batch that its checkpoint has planned; what is out of later ones is stale from here
                on. None: that is not known, and nothing is.

        Raises:
            ManifestMismatch: It is another query's, or holds its other output.
            StateCorrupted: The file that says whose it is cannot be read.
            StorageFailed: The filesystem refused.
            UnknownFormat: Another release noted what is stale.
        """
        with storage(str(self.root)):
            self._open(query)
            if planned is not None:
                self._note_stale(planned)

    def is_stale(self, version: int) -> bool:
        """Check whether what is out of a version is of a history that the checkpoint does not know any more."""
        return version in self._stale and self._stale[version] == self._names(version)

    def _open(self, query: str) -> None:
        private = self.root / _PRIVATE
        owner = private / _OWNER
        found = self._owner(query)
        if found is not None:
            if found.get("query") != query:
                raise ManifestMismatch(
                    "the output directory belongs to another query",
                    where=str(self.root),
                    why=f"it was written by query {found.get('query')}, this is {query}: their micro-batches would mix",
                    command="choose another directory, or remove this one",
                )
            if found.get("holds", self.holds) != self.holds:
                raise ManifestMismatch(
                    "an output directory holds the other output of this query",
                    where=str(self.root),
                    why=f"it holds {found['holds']}, given for {self.holds}",
                    command="give each directory for what it holds",
                )
        elif self.published():
            raise ManifestMismatch(
                "the output directory already holds micro-batches",
                where=str(self.root),
                why=f"there is no {owner.name} that says whose they are",
                command="choose another directory, or remove this one",
            )
        else:
            private.mkdir(parents=True, exist_ok=True)
            part = private / f"owner.{uuid.uuid4().hex}"
            part.write_bytes(msgspec.json.encode({"format": FORMAT, "query": query, "holds": self.holds}))
            sync(part)
            part.replace(owner)
            sync(private)
        self._put_back(private)
        for left in [*private.glob("attempt-*"), *private.glob("ready-*"), *private.glob("old-*")]:
            shutil.rmtree(left, ignore_errors=True)

    def _put_back(self, private: Path) -> None:
        """Put back what a replacement had moved away when it died; a withdrawal has nothing ready to come instead."""
        for old in private.glob("old-*-*"):
            version = old.name.split("-")[1]
            target = self.root / f"batch={version}"
            if any(private.glob(f"ready-{version}-*")) and not target.exists():
                old.rename(target)
                sync(self.root)

    def _note_stale(self, planned: int) -> None:
        """Note what is stale; one that was planned since, and not committed, may not have been replaced yet."""
        files = LocalFiles(self.root / _PRIVATE)
        known = read_struct(
            files,
            _STALE,
            Stale,
            FORMAT,
            what="the note of micro-batches that were taken back cannot be read",
            command="install the release that wrote it; or delete the file: then one of them may be compared with what"
            " takes its place",
        )
        before = known.versions if known is not None else {}
        out = [version for version in self.published() if version >= planned]
        names = {version: self._names(version) for version in out}
        self._stale = {at: name for at, name in names.items() if at > planned or before.get(at) == name}
        if self._stale and self._stale != before:
            files.write(_STALE, [msgspec.json.encode(Stale(self._stale))])
        elif before and not self._stale:
            files.delete([_STALE])

    def _names(self, version: int) -> str:
        """Digest the names of a version's files: each has an id of its own."""
        names = sorted(path.name for path in self.path(version).glob("*.parquet"))
        return xxhash.xxh3_64_hexdigest("\n".join(names).encode())

    def is_of(self, query: str) -> bool:
        """Check whether the directory holds this output of a query, under whatever path; touches nothing."""
        found = self._owner(query)
        return found is not None and found.get("query") == query and found.get("holds", self.holds) == self.holds

    @property
    def owner(self) -> str:
        """The query whose output it holds; "" where nothing says it. Raises as `open` for the file that says it."""
        found = self._owner("")
        return "" if found is None else str(found.get("query"))

    def _owner(self, query: str) -> dict[str, Any] | None:
        owner = self.root / _PRIVATE / _OWNER
        try:
            found = msgspec.json.decode(owner.read_bytes(), type=dict[str, Any])
        except FileNotFoundError:
            return None
        except UNDECODABLE as error:
            raise StateCorrupted(
                "the file that says whose output this is cannot be read",
                where=str(owner),
                why=str(error),
                command=f"see that {self.root} is this query's; then put the file back: "
                f'{{"format": {FORMAT}, "query": "{query}"}}',
            ) from error
        if found.get("format") != FORMAT:
            written = f"format {found.get('format')!r}"
            raise unknown_format("the output directory has an unknown format", written, FORMAT, str(owner))
        return found

    def parts(self) -> tuple[list[Path], list[str]]:
        """Give the directories that are its own, and the names of what else lies in the root, both in order."""
        own, others = [], []
        for path in sorted(self.root.iterdir()) if self.root.is_dir() else ():
            ours = path.name == _PRIVATE or path.name.removeprefix("batch=").isdecimal()
            own += [path] if ours else []
            others += [] if ours else [path.name]
        return own, others

    def delete(self) -> None:
        """Delete what is its own, whose it is last, and the root, if nothing else lies there."""
        own, others = self.parts()
        for path in sorted(own, key=lambda path: path.name == _PRIVATE):
            shutil.rmtree(path)
        if not others and self.root.is_dir():
            with suppress(OSError):  # a link, a mount, or in a directory of somebody else's: it stays, empty
                self.root.rmdir()

    def attempts(self, run: str) -> str:
        """Name the directories of a run of the query, for its tasks: what this gives, and then the version."""
        return str(self.root / _PRIVATE / f"attempt-{run}-")

    def attempt(self, version: int, run: str) -> Path:
        """Make the directory for the tasks of one attempt to write into; a run makes a version once."""
        path = Path(f"{self.attempts(run)}{version}")
        path.mkdir(parents=True)
        return path

    def publish(self, version: int, attempt: Path, files: Sequence[tuple[str, int]]) -> None:
        """Make exactly these files of an attempt the content of a version, durably.

        Args:
            version: Spark's batch id.
            attempt: What `attempt` gave; removed.
            files: (name, length in bytes), each written and synced; empty withdraws the version.

        Raises:
            FileNotFoundError: A file is missing: the executors do not share this directory.
            StorageFailed: A file is of another length, or the filesystem refused; readers see what they saw before.
        """
        target, private, name = self.path(version), self.root / _PRIVATE, f"{version}-{uuid.uuid4().hex}"
        ready, old = private / f"ready-{name}", private / f"old-{name}"
        with storage(str(self.root)):
            if files:
                ready.mkdir()
                for file, length in files:
                    found = (attempt / file).stat().st_size
                    if found != length:
                        raise OSError(errno.EIO, f"{found} bytes, the task wrote {length}", str(attempt / file))
                    (attempt / file).rename(ready / file)
                sync(ready)
                _replace(ready, target, old)
                sync(self.root)
            elif target.exists():
                target.rename(old)
                sync(self.root)
            # after an exchange the old content is at `ready`
            for gone in (ready, *private.glob(f"old-{version}-*"), attempt):
                shutil.rmtree(gone, ignore_errors=True)


def _replace(source: Path, target: Path, aside: Path) -> None:
    if not target.exists():
        source.rename(target)
    elif not _exchange(source, target):
        target.rename(aside)
        try:
            source.rename(target)
        except OSError:
            aside.rename(target)
            raise


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; False where that does not exist."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):  # not Linux, or a libc before glibc 2.28
        return False
    if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))
