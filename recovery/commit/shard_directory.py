"""The directories of one shard on a local disk, and the lock that guards them.

Layout (format 1)::

    <local_dir>/<query id>/<shard>/
        LOCK                      held (flock) by the task attempt that works on the shard; names its holder
        CURRENT                   JSON {"format": 1, "generation": "<uuid4 hex>"}, replaced atomically
        ASIDE                     the CURRENT of a generation that was found damaged; it stays until another is adopted
        <generation>/db/          the RocksDB
        <generation>/staged/      <version>_<uuid>.sst, written and not yet confirmed, or kept for stale copies

A generation's path is never reused, renamed or built over: a zombie that still has an old directory open writes its
MANIFEST there, and into nothing else. Directories are made with mode 0700.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from backend.errors import UNDECODABLE, StateCorrupted, StorageFailed, StoreLocked, UnknownFormat, unknown_format
from backend.store.staging import sync
from backend.store.storage import storage
from recovery.commit.pointer import Commit
from recovery.files import TEMPORARY, LocalFiles, make_directory

FORMAT = 1
ASIDE = "ASIDE"
_NAME = re.compile(r"\d{20}_[0-9a-f]{32}")
_HOLDER_BYTES = 24
"""Of what names the lock's holder, whoever it is: more than a process id needs."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One life of a shard's local state."""

    path: Path

    @property
    def uuid(self) -> str:
        """The generation's name."""
        return self.path.name

    @property
    def database(self) -> Path:
        """Directory of the RocksDB."""
        return self.path / "db"

    def staged(self, commit: Commit) -> Path:
        """Path of the staged file of a commit."""
        return self.path / "staged" / f"{commit.name}.sst"

    def staged_commits(self) -> list[Commit]:
        """Commits that have a staged file here, oldest first; names that are not ours are left out."""
        stems = (path.stem for path in (self.path / "staged").glob("*.sst"))
        return sorted(Commit.of_name(stem) for stem in stems if _NAME.fullmatch(stem))


class ShardDirectory:
    """All generations of one shard under one local directory.

    Args:
        local_dir: Executors on one host may share it; the LOCK guards it.
        query_id: Spark's query id: a new checkpoint never meets old state.
        shard: The shard.

    Raises:
        ValueError: `local_dir` still names a variable: it is not set in the environment here.
    """

    def __init__(self, local_dir: Path, query_id: str, shard: int) -> None:
        if "$" in str(local_dir):
            raise ValueError(f"local_dir={str(local_dir)!r}: the variable is not set in this process's environment")
        self.path = local_dir / query_id / str(shard)
        self.shard = shard

    @contextmanager
    def lock(self, wait_s: float = 30.0) -> Iterator[None]:
        """Hold the shard's lock; the kernel gives it back when the process dies.

        Raises:
            StoreLocked: Another process held it for longer than `wait_s` seconds.
            StorageFailed: The directory cannot be made, or somebody else made it.
        """
        with storage(str(self.path)):
            make_directory(self.path)
            self._check_owners()
            handle = os.open(self.path / "LOCK", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            self._acquire(handle, wait_s)
            with storage(str(self.path)):
                os.pwrite(
                    handle, f"pid {os.getpid()}".ljust(_HOLDER_BYTES).encode(), 0
                )  # truncating is a write of its own
            yield
        finally:
            os.close(handle)

    def _check_owners(self) -> None:
        """Refuse directories that somebody else made for us where everybody may write, such as under `/tmp`."""
        query, local = self.path.parent, self.path.parent.parent
        shared = local.parent.stat().st_mode & stat.S_ISVTX
        for path in (self.path, query, local) if shared else (self.path, query):
            found = path.lstat()
            if found.st_uid not in (os.geteuid(), 0) or stat.S_ISLNK(found.st_mode):
                raise StorageFailed(
                    "local state would lie where another user put something",
                    where=str(path),
                    why=f"it belongs to user {found.st_uid}, this process to {os.geteuid()}",
                    command="choose a local_dir of your own",
                )

    def _acquire(self, handle: int, wait_s: float) -> None:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    holder = os.pread(handle, 100, 0).decode(errors="replace").strip() or "an unknown process"
                    raise StoreLocked(
                        f"shard {self.shard} is locked by {holder}",
                        where=str(self.path),
                        why=f"waited {wait_s:g} s",
                        command="end that process, or wait until it is done",
                    ) from None
                time.sleep(random.uniform(0.01, 0.05))

    def current(self) -> Generation | None:
        """Give the current generation, None when there is none, or nothing in its database's directory.

        Raises:
            StateCorrupted: `CURRENT` cannot be read.
            StorageFailed: The filesystem refuses.
            UnknownFormat: Another release wrote it.
        """
        name = self._named("CURRENT")
        if name is None:
            return None
        generation = Generation(self.path / name)
        try:
            with storage(str(generation.database)), os.scandir(generation.database) as there:
                return generation if any(there) else None
        except FileNotFoundError:
            return None

    def _named(self, file: str) -> str | None:
        """Give the generation that a file names, None when there is no such file; raises what `current` does."""
        path = self.path / file
        try:
            with storage(str(path)):
                data = json.loads(path.read_bytes())
            written, name = data["format"], data["generation"]
        except FileNotFoundError:
            return None
        except (*UNDECODABLE, StorageFailed) as error:
            if isinstance(error, StorageFailed) and not error.unreadable:
                raise
            raise StateCorrupted(f"{file} cannot be read", where=str(path), why=str(error)) from error
        if written != FORMAT:
            raise unknown_format(f"{file} has an unknown format", repr(written), FORMAT, str(path))
        if not isinstance(name, str) or len(name) != 32 or not name.isalnum():
            raise StateCorrupted(f"{file} does not name a generation", where=str(path), why=repr(name))
        return name

    def new_generation(self) -> Generation:
        """Make the directories of a new generation; it becomes current with `adopt` only.

        What attempts that died have left of theirs is removed: the caller holds the lock.
        """
        self._sweep()
        generation = Generation(self.path / uuid.uuid4().hex)
        with storage(str(generation.path)):
            make_directory(generation.path / "staged")
        return generation

    def _sweep(self) -> None:
        try:
            stays = {self._named(file) for file in ("CURRENT", ASIDE)}
        except (StateCorrupted, UnknownFormat):
            return  # which one was put aside is not known: `adopt` removes them all
        with suppress(FileNotFoundError), storage(str(self.path)):
            for other in self.path.iterdir():
                if other.is_dir() and other.name not in stays:
                    shutil.rmtree(other, ignore_errors=True)

    def adopt(self, generation: Generation) -> None:
        """Make a generation current, atomically, then remove the others (disposable copies, by definition)."""
        LocalFiles(self.path).write("CURRENT", [json.dumps({"format": FORMAT, "generation": generation.uuid}).encode()])
        for other in self.path.iterdir():
            if other.is_dir() and other.name != generation.uuid:
                shutil.rmtree(other, ignore_errors=True)
            elif other.name == ASIDE or other.name.startswith(f"CURRENT{TEMPORARY}"):
                other.unlink(missing_ok=True)  # what it names is gone, or it is of a process that died while it wrote

    def condemn(self) -> None:
        """Put the current generation aside: the next attempt finds no local state; the files stay for inspection."""
        # the whole directory may be gone: what has been found is that
        with suppress(FileNotFoundError), storage(str(self.path)):
            (self.path / "CURRENT").replace(self.path / ASIDE)
            sync(self.path)

    def discard(self, generation: Generation) -> None:
        """Remove a generation that was made here and never became current."""
        shutil.rmtree(generation.path, ignore_errors=True)

    def prune(self, generation: Generation, committed: Commit, retain: int) -> None:
        """Delete staged files that no reader can need: `version <= committed.version - retain`.

        A file newer than the committed version may be another attempt's work and is never touched. A hidden link
        of one is left over from an attempt that died while it was ingesting: the caller holds the lock.
        """
        with suppress(FileNotFoundError), os.scandir(generation.path / "staged") as there:
            for file in there:
                stem, _, suffix = file.name.rpartition(".")
                if suffix == "sst" and _NAME.fullmatch(stem):
                    if Commit.of_name(stem).version <= committed.version - retain:
                        Path(file).unlink(missing_ok=True)
                elif file.name.startswith(".") and ".sst." in file.name:
                    Path(file).unlink(missing_ok=True)
