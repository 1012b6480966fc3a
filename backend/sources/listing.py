"""What lies below a directory of any filesystem of fsspec: all of it, or an error.

fsspec's own `find` takes a folder that it could not list for an empty one, and `isdir` a directory that it could not
look at for none: files behind an outage that passes would be as if they had never been there.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import Any

from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

_OF_FSCK = "lost+found"
"""In the root of a disk, and nobody's to read."""


def is_folder(filesystem: Any, path: str) -> bool:
    """Tell whether there is a directory at a path; a link that leads nowhere is none.

    Raises:
        OSError: The filesystem does not say; remote ones may raise what they like.
    """
    if filesystem.isdir(path):  # some know that by a listing alone
        return True
    try:
        return bool(filesystem.info(path)["type"] == "directory")
    except OSError as error:
        if isinstance(error, FileNotFoundError) or error.errno in (errno.ENOTDIR, errno.ELOOP):
            return False
        raise


def is_shown(path: str) -> bool:
    """Tell whether readers see a file: no part of its path begins with `_` or `.`."""
    return not any(part.startswith(("_", ".")) for part in path.split("/"))


def names_in(filesystem: Any, folder: str) -> dict[str, int]:
    """List the names in a directory without looking at what has them; on a local filesystem those of directories.

    Returns:
        Per name the inode, which another directory of that name may get only when the first one is gone; 0 where the
        filesystem says none. Empty where there is no such directory.

    Raises:
        OSError: It cannot be listed; remote filesystems may raise what they like.
    """
    try:
        if isinstance(filesystem, LocalFileSystem):
            with os.scandir(folder) as entries:
                return {entry.name: entry.inode() for entry in entries if entry.is_dir(follow_symlinks=False)}
        return {name.rstrip("/").rpartition("/")[2]: 0 for name in filesystem.ls(folder, detail=False)}
    except FileNotFoundError:
        return {}


def files_below(filesystem: Any, root: str) -> dict[str, dict[str, Any]]:
    """List what lies below a directory and is no directory, and not below a hidden one.

    Args:
        filesystem: Of fsspec.
        root: A directory; one that is taken away meanwhile, and one below it, has no files.

    Returns:
        What the filesystem says of each file, by its path below the root, ascending.

    Raises:
        OSError: Part of it cannot be listed; remote filesystems may raise what they like.
    """
    found = filesystem.find(root, detail=True) if _lists_at_once(filesystem) else dict(_walk(filesystem, root))
    return {name[len(root) :].lstrip("/"): info for name, info in sorted(found.items())}


def _lists_at_once(filesystem: Any) -> bool:
    """Tell whether `find` is the filesystem's own: object stores list all that begins with a prefix."""
    kind = type(filesystem)
    own = kind.find is not AbstractFileSystem.find
    return own or (issubclass(kind, AsyncFileSystem) and kind._find is not AsyncFileSystem._find)


def _walk(filesystem: Any, folder: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        listed = filesystem.ls(folder, detail=True)
    except FileNotFoundError:
        return
    for info in listed:
        path = info["name"].rstrip("/")
        name = path.rpartition("/")[2]
        if info["type"] != "directory":
            yield path, info
        elif path != folder.rstrip("/") and is_shown(name) and name != _OF_FSCK:
            yield from _walk(filesystem, path)
