"""What a filesystem refuses, by name: full, over a limit, broken, read-only, not ours.

Nothing is retried here and nothing given up: what was being written is not published, what is committed is not touched,
and the job goes on from there when the cause is gone.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from backend.errors import RewindError, StateCorrupted, StorageFailed
from backend.texts import one_line

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_OTHER = frozenset({errno.EISDIR, errno.ENOTDIR})
_UNREADABLE = frozenset({errno.EIO, errno.ESTALE})
"""Of a read: what is there cannot be had, as if it were not there."""
_SILENT = frozenset({errno.EAGAIN, errno.EBUSY, errno.EHOSTUNREACH, errno.EIO, errno.ENETUNREACH, errno.ESTALE})
_OF_PROGRAMS: tuple[type[Exception], ...] = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    NameError,
    NotImplementedError,
    TypeError,
    ValueError,
)
_AGAIN = "then start the query again: it goes on after the last committed micro-batch"


def storage_failed(error: OSError, where: str, again: str = _AGAIN) -> StorageFailed:
    """Give the named error for what the operating system, or a client of a filesystem, raised; `again` ends it."""
    if error.errno in _FULL:
        what, command = "there is no room to write", f"make room there (df -h, df -i, quota -s), {again}"
    elif error.errno in _FORBIDDEN:
        what = "a filesystem does not let this process read or write"
        command = f"see who owns what is there (ls -ld), {again}"
    elif error.errno in _OTHER:
        what, command = "a file lies where a directory must be, or the reverse", f"move it away (ls -ld), {again}"
    else:
        what, command = "a disk or filesystem failed", f"check it (dmesg, mount), {again}"
    failed = StorageFailed(what, where=where, why=str(error), command=command)
    failed.unreadable = error.errno in _UNREADABLE
    failed.lasting = error.errno in _FORBIDDEN | _OTHER
    return failed


def is_damage(error: BaseException) -> bool:
    """Tell whether an error says that a local file is damaged, or that its disk does not give it: then others do."""
    return isinstance(error, StateCorrupted) or (isinstance(error, StorageFailed) and error.unreadable)


@contextmanager
def done_without() -> Iterator[None]:
    """Go on behind the block without a copy that is damaged, or that its disk or filesystem does not give."""
    try:
        yield
    except (StateCorrupted, StorageFailed) as error:
        if not is_damage(error):
            raise


@contextmanager
def reached(where: str) -> Iterator[None]:
    """Name what a client of a remote filesystem raises in here; many have kinds of their own, which are no `OSError`.

    A file that is missing, or is there already, is the caller's to judge, and so are errors of a program.

    Raises:
        StorageFailed: Of everything else.
    """
    with storage(where), answered(where):
        yield


@contextmanager
def answered(where: str) -> Iterator[None]:
    """Name what a client of a remote filesystem raises in here when that does not answer.

    Every other `OSError` is the caller's to judge, such as what a library says of a file's content.

    Raises:
        StorageFailed: It did not.
    """
    try:
        yield
    except OSError as error:
        if not isinstance(error, ConnectionError | TimeoutError) and error.errno not in _SILENT:
            raise
        raise storage_failed(error, where) from error
    except (RewindError, pa.ArrowException, *_OF_PROGRAMS):
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {one_line(str(error))}"
        command = f"see that it can be reached and lets this process in, {_AGAIN}"
        raise StorageFailed("a filesystem failed", where=where, why=why, command=command) from error


@contextmanager
def storage(where: str) -> Iterator[None]:
    """Name what a filesystem refuses in here; a file that is missing, or is there already, is the caller's to judge.

    Raises:
        StorageFailed: Of every other `OSError`.
    """
    try:
        yield
    except (FileNotFoundError, FileExistsError):
        raise
    except OSError as error:
        raise storage_failed(error, where) from error
