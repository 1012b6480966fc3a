"""Scratch directories: removed at the end of their use, or after their user's death by the next user.

A directory `<parent>/<kind>-<uuid>` is locked (flock, `hold`) while its user lives. Whoever makes one of the same kind
first removes those that nobody has locked any more: a process that was killed leaves its copy of a database behind, and
hard links in it keep the bytes of files that were deleted elsewhere long ago.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recovery.files import make_directory


@contextmanager
def scratch_directory(parent: Path, kind: str) -> Iterator[Path]:
    """Make a directory for the time of a `with` block; left ones of the same kind are removed first.

    Args:
        parent: Made when it is missing.
        kind: First part of the name.
    """
    sweep(parent, kind)
    path, handle = _make(parent, kind)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(handle)


def sweep(parent: Path, kind: str) -> list[Path]:
    """Remove the directories of a kind whose users are dead; give them."""
    gone = []
    for path in parent.glob(f"{kind}-*"):
        handle = hold(path)
        if handle is None:
            continue
        try:
            shutil.rmtree(path, ignore_errors=True)
            gone.append(path)
        finally:
            os.close(handle)
    return gone


def _make(parent: Path, kind: str) -> tuple[Path, int]:
    while True:
        path = parent / f"{kind}-{uuid.uuid4().hex}"
        make_directory(path)
        handle = hold(path)
        if handle is not None and path.is_dir():
            return path, handle
        if handle is not None:  # swept between the two calls
            os.close(handle)


def hold(path: Path) -> int | None:
    """Lock a directory until the handle that this gives is closed; None when somebody has it, or it is gone."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle
