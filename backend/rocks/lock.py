"""Opening a database under its LOCK: a bounded wait, then an error that names the holder."""

from __future__ import annotations

import gc
import os
import random
import re
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from rocksdict import AccessType, Options, Rdict

from backend.errors import StorageFailed, StoreLocked
from backend.rocks.errors import translated

_MOVED_TRIES = 3
_OWN = ("LOCK", "LOG")
"""What each opener has for itself."""
_COPIED = ("CURRENT", "rocksdict-config.json")
"""What a running job replaces, and what rocksdict writes at each open."""
_LOCK_TAKEN = re.compile(r"lock hold by current process|While lock file")


class Links:
    """Links to a database's files, for a reader where nothing may be written: it writes beside them, too.

    Args:
        path: The database.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._made: TemporaryDirectory[str] | None = None

    def make(self) -> str:
        """Make them, as the database is now; gives the directory that they are in. Call `clear` also if it fails."""
        # CURRENT first: the MANIFEST that it names is then among the files
        copies = {name: (self._path / name).read_bytes() for name in _COPIED if (self._path / name).exists()}
        files = [file for file in self._path.iterdir() if not file.name.startswith((*_COPIED, *_OWN))]
        try:
            self._made = TemporaryDirectory(prefix="rewind-reads-")
            links = Path(self._made.name)
            for name, content in copies.items():
                (links / name).write_bytes(content)
            for file in files:
                (links / file.name).symlink_to(file)
        except OSError as error:
            raise StorageFailed(
                "links to a database that may not be written cannot be made",
                where=str(self._path),
                why=str(error),
                command="set TMPDIR to a directory that this process may write, and that has room",
            ) from error
        return str(links)

    def clear(self) -> None:
        """Remove them; twice does nothing."""
        made, self._made = self._made, None
        if made is not None:
            made.cleanup()


def open_locked(path: Path, native: Options, wait_s: float, read_only: bool, links: Links | None = None) -> Rdict:
    """Open a database, waiting at most `wait_s` for its LOCK, with jitter; a reader takes none.

    Args:
        path: Where it is.
        native: Its options.
        wait_s: How long to wait.
        read_only: Only read.
        links: Open these instead, made anew for each try; they are gone when this fails.

    Raises:
        StoreLocked: Another process, or this one, held the LOCK all the time.
        StateCorrupted: The database's own files are damaged.
    """
    access = AccessType.read_only(False) if read_only else AccessType.read_write()
    deadline = time.monotonic() + wait_s
    pause_s = 0.005
    moved = 0
    while True:
        try:
            return Rdict(
                links.make() if links else str(path), native, column_families={"default": native}, access_type=access
            )
        except Exception as error:
            if links is not None:
                links.clear()
            if isinstance(error, StorageFailed):
                raise
            if read_only and "No such file" in str(error) and moved < _MOVED_TRIES:
                moved += 1  # the writer's compaction took a file away between the manifest and us
                time.sleep(0.02 * moved)
                continue
            if not _LOCK_TAKEN.search(str(error)):
                raise translated(error, path) from error
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise StoreLocked(
                    "another process holds the store's LOCK",
                    where=str(path),
                    why=f"waited {wait_s:g} s; {_holder(path, str(error))}",
                    command="end the other process, or wait for it, and run again",
                ) from error
        gc.collect(0)  # a forgotten iterator of this process may hold it
        time.sleep(min(left_s, pause_s * random.uniform(0.5, 1.5)))
        pause_s = min(0.25, pause_s * 2)


def _holder(path: Path, text: str) -> str:
    """Say who holds the LOCK, as far as the system tells."""
    if "current process" in text:
        return f"held by this process, {os.getpid()}"
    try:
        inode = (path / "LOCK").stat().st_ino
        table = Path("/proc/locks").read_text(encoding="ascii")
    except OSError:
        return "the holder is not known"
    for line in table.splitlines():
        words = line.split()
        if len(words) >= 6 and words[5].rpartition(":")[2] == str(inode) and words[4] != "0":
            return f"held by process {words[4]}"
    return "the holder is not known"
