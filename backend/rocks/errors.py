"""What rocksdict raises, as errors with a name: the one place that knows its texts."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import rocksdict

from backend.errors import KeyInvalid, RewindError, StateCorrupted, StoreClosed, ValueInvalid
from backend.store.storage import storage_failed

_OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""Of what rocksdict writes itself."""
_NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO, errno.ESTALE)
_SIGNS = {number: os.strerror(number) for number in _NUMBERS}


class Named:
    """Names what rocksdict raises inside `with`; may be entered again and again.

    Args:
        path: The database, or the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _frames: object) -> None:
        if isinstance(error, Exception):
            raise translated(error, self._path) from error


def translated(error: Exception, path: Path) -> Exception:
    """Give the named error for what rocksdict raised: the one place that knows its texts."""
    text = str(error)
    if isinstance(error, ValueError) and "raw mode" in text:
        return ValueInvalid("a value must be bytes", where=str(path), why=text)
    own = _OS_ERROR.search(text)
    by_system = isinstance(error, OSError) and error.errno is not None
    if isinstance(error, RewindError | ValueError) or (isinstance(error, OSError) and not by_system and own is None):
        return error
    if isinstance(error, rocksdict.DbClosedError):
        return StoreClosed("the store is closed", where=str(path))
    if isinstance(error, KeyError | TypeError) or "strict ascending order" in text:
        return KeyInvalid("keys must be bytes, sorted where a file is written", where=str(path), why=text)
    if text.startswith("Corruption") or "No such file or directory" in text:
        return StateCorrupted("the database cannot be read", where=str(path), why=text)
    if isinstance(error, OSError) and by_system:
        return storage_failed(error, str(path))
    if "IO error" in text or own:
        number = int(own[1]) if own else next((number for number, sign in _SIGNS.items() if sign in text), None)
        return storage_failed(OSError(text) if number is None else OSError(number, text), str(path))
    return OSError(f"RocksDB at {path}: {text}")
