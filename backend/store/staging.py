"""Staged files: written and synced beside a store, described by length and digest, applied only when both match."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import xxhash

from backend.errors import StateCorrupted
from backend.store.protocol import Staged
from backend.store.storage import storage


def sync(path: Path) -> None:
    """Make a file's bytes durable, or the names in a directory: of new, replaced and deleted files."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_digest(path: Path) -> tuple[int, str]:
    """Give length in bytes and hex xxh3-128 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128)
        return file.tell(), digest.hexdigest()


def seal(path: Path, rows: int) -> Staged:
    """Sync a file that was just written, and its directory, and describe it."""
    sync(path)
    sync(path.parent)
    length, digest = file_digest(path)
    return Staged(path, length, digest, rows)


def verify(staged: Staged) -> None:
    """Check that a staged file is the one that was described.

    Raises:
        StateCorrupted: The file is missing, or its length or digest differ.
        StorageFailed: The disk does not give it.
    """
    try:
        with storage(str(staged.path)):
            length, digest = file_digest(staged.path)
    except FileNotFoundError as error:
        raise StateCorrupted("a staged file is missing", where=str(staged.path)) from error
    if length != staged.length:
        why = f"{length} bytes, {staged.length} were committed"
        raise StateCorrupted("a staged file has the wrong length", where=str(staged.path), why=why)
    if digest != staged.digest:
        why = f"digest {digest}, {staged.digest} was committed"
        raise StateCorrupted("a staged file does not match its digest", where=str(staged.path), why=why)
