"""Named errors from a process to the driver that asked: Spark carries only the text of a Python exception.

Text can contain anything, also what a message made a user's function say. So what is read back is a mark that only we
write: the driver draws a random token, it travels in the functions that tasks run and in the options of our sources,
and `crossing` puts it, with the error's parts as JSON, behind the text of our own errors. `named_in` accepts a mark
with this process's token and nothing else. No word of a text decides anything.

A mark is a line: `[rewind-mark-1 <token>] {"code": ..., "what": ..., "where": ..., "why": ..., "command": ...}`.
"""

from __future__ import annotations

import errno
import functools
import inspect
import json
import os
import re
import reprlib
import secrets
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from backend.errors import (
    UNDECODABLE,
    KeyInvalid,
    RewindError,
    StorageFailed,
    UserCodeFailed,
    ValueInvalid,
    kind_of,
)
from backend.store.storage import storage_failed
from backend.texts import one_line

OPTION = "boundary"
"""Option of our data sources that carries the token."""
PARTS = ("code", "what", "where", "why", "command")
MAX_PART_CHARACTERS = 4_000
_ROOT = Path(__file__).parent.parent
_OWN_CODE = (f"{_ROOT / 'backend'}{os.sep}", f"{_ROOT / 'recovery'}{os.sep}")
_MADE = ("<frozen ", "<attrs generated ")
_COMPILED = (".pxi", ".pyx")
"""Cython's: Arrow's above all."""
_STANDARD_LIBRARY = f"{sysconfig.get_path('stdlib')}{os.sep}"
"""What fails in these, and in ours, when a user's function calls it, fails at the function's line."""
_TOKEN = secrets.token_hex(16)
_STORAGE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS})
PLANNING = (
    "initialOffset",
    "latestOffset",
    "partitions",
    "commit",
    "prepareForTriggerAvailableNow",
    "reportLatestOffset",
)
"""What Spark calls of a data source's reader on the driver; in a task, `read` only."""


class CrossedError(Exception):
    """A named error on its way to the driver: its text, then the mark."""


def token() -> str:
    """Return the token of this process: where it is the driver, of everything that it sends out."""
    return _TOKEN


def crossing(function: Callable[..., Any], mark: str | None = None) -> Callable[..., Any]:
    """Wrap a function that another process runs: its named errors can be told by `named_in` in this one.

    Args:
        function: Returns anything; what an iterator raises later is marked too.
        mark: The driver's token; this process's unless given.
    """
    own = mark if mark is not None else _TOKEN

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with marking(own):
            result = function(*args, **kwargs)
        return _marked(result, own) if isinstance(result, Iterator) else result

    return call


def crossing_reader(reader: Any, options: dict[str, str]) -> Any:
    """Wrap the methods of a data source's reader that Spark calls; where the option is not set, nothing is done."""
    mark = options.get(OPTION)
    for name in (*PLANNING, "read") if mark is not None else ():
        method = getattr(reader, name, None)
        if method is not None:
            setattr(reader, name, crossing(method, mark))
    return reader


def _marked(items: Iterator[Any], own: str) -> Iterator[Any]:
    with marking(own):
        yield from items


@contextmanager
def marking(mark: str) -> Iterator[None]:
    """Put the mark behind named errors that leave a block, and name what a disk or filesystem refused.

    Whatever leaves the block can be sent: PySpark's worker sends an error's traceback, with its causes, as UTF-8, and
    dies namelessly where one of their texts has half a surrogate pair in it.

    Raises:
        CrossedError: Instead of a `RewindError`, and of an error whose traceback is no UTF-8.
    """
    try:
        yield
    except RewindError as error:
        raise CrossedError(_text(error, mark)) from _sendable(error)
    except Exception as error:
        named = as_storage(error) if isinstance(error, OSError) else None
        cause = _sendable(error)
        if named is not None:
            raise CrossedError(_text(named, mark)) from cause
        if cause is not error:
            raise CrossedError(one_line(str(cause))) from cause
        raise


def _sendable(error: Exception) -> Exception:
    """Return the error, or, where its traceback is no UTF-8, one that has that traceback as its text, escaped."""
    trace = "".join(traceback.format_exception(error))
    escaped = trace.encode("utf-8", "backslashreplace").decode("utf-8")
    return error if escaped == trace else CrossedError(escaped)


def as_storage(error: OSError) -> StorageFailed | None:
    """Return the named error for a full, broken or read-only disk; None for any other `OSError`."""
    if error.errno not in _STORAGE:
        return None
    return storage_failed(error, str(error.filename or ""))


def _text(error: RewindError, mark: str) -> str:
    parts = {name: str(getattr(error, name))[:MAX_PART_CHARACTERS] for name in PARTS}
    return f"{one_line(str(error))}\n[rewind-mark-1 {mark}] {json.dumps(parts)}"


def named_in(text: str) -> RewindError | None:
    """Return the named error that crossed to this process in a text; None when it has no mark of ours.

    >>> named_in("backend.errors.StateUnavailable: [rewind:StateUnavailable] no local state") is None
    True
    """
    found = re.findall(rf"^\[rewind-mark-1 {_TOKEN}\] (.*)$", text, re.MULTILINE)
    if not found:
        return None
    try:
        parts = json.loads(found[-1])
        kind = kind_of(parts["code"])
        return kind(parts["what"], where=parts["where"], why=parts["why"], command=parts["command"])
    except UNDECODABLE:  # Spark cut the text off: what is left of it decides nothing
        return None


def check_function(option: str, function: object, parameters: Sequence[str]) -> None:
    """Check a function that a user gives before anything starts: that it can be called as it will be.

    Args:
        option: Its name where it was given.
        function: The function; a builtin that does not say what it takes is believed.
        parameters: What it is called with, in order.

    Raises:
        ValueError: It is no function, or takes others.
    """
    wanted = f"must be a function of ({', '.join(parameters)})"
    if not callable(function):
        raise ValueError(f"{option}={reprlib.repr(function)}: {wanted}")
    try:
        signature = inspect.signature(function)
    except ValueError:
        return
    try:
        signature.bind(*parameters)
    except TypeError as error:
        raise ValueError(f"{option}={reprlib.repr(function)}: {wanted}: {error}") from None


def in_order(value: object) -> tuple[Any, ...] | None:
    """Return what a list, or something like one, has; None for anything else: a set's order differs between processes.

    >>> in_order(["b", "a"]), in_order({"a": 1}.keys()), in_order({"a"}), in_order({"a": 1}), in_order(b"a")
    (('b', 'a'), ('a',), None, None, None)
    """
    known = isinstance(value, Iterable) and callable(getattr(value, "__len__", None))
    unfit = isinstance(value, str | bytes | bytearray | memoryview | range | Mapping)
    if not known or unfit or (isinstance(value, Set) and not isinstance(value, KeysView)):
        return None
    try:
        return tuple(cast(Iterable[Any], value))
    except TypeError:  # an array without a dimension
        return None


def check_names(option: str, value: object) -> tuple[str, ...]:
    """Return the names of fields that an option gives: one, or a list of them.

    Args:
        option: Its name where it was given.
        value: What was given.

    Raises:
        ValueError: It is neither.

    >>> check_names("key", "a"), check_names("key", ["a", "b"])
    (('a',), ('a', 'b'))
    """
    names = (value,) if isinstance(value, str) else in_order(value)
    if names is None or not all(isinstance(name, str) and name for name in names):
        hint = " (a set has no order)" if names is None and isinstance(value, Set) else ""
        raise ValueError(f"{option}={reprlib.repr(value)}: must be the name of a field, or a list of names{hint}")
    return tuple(str.__str__(name) for name in names)  # of a subclass, such as an enum's, too


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Name what a user's function raises in a block, so that its text is taken for nothing else.

    Args:
        what: The function, such as `the function of process()`.

    Raises:
        UserCodeFailed: It raised, or gave a store what that cannot take; its exception is the cause. Our other errors,
            of the stores that it was given, stay.
    """
    try:
        yield
    except (Exception, SystemExit) as error:  # a worker that exits would be taken for one that died, and tried again
        if isinstance(error, RewindError) and not isinstance(error, KeyInvalid | ValueInvalid):
            raise
        last = _users_line(traceback.extract_tb(error.__traceback__))
        raise UserCodeFailed(
            f"{what} raised {type(error).__qualname__}",
            where=f"{last.filename}:{last.lineno} in {last.name}" if last is not None else "",
            why=said(error),
            command="mend the function, then start the query again: it goes on after the last committed micro-batch",
        ) from error


def _users_line(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """Return the innermost line of a user's code, whoever it called to fail there; None where nothing is known."""
    origins = [_origin(one) for one in frames]
    users = "" if "" in origins else next((one for one in origins if one is not None), None)
    found = [one for one, origin in zip(frames, origins, strict=True) if origin == users is not None]
    return next(reversed(found or [*frames]), None)


def _origin(frame: traceback.FrameSummary) -> str | None:
    """Return the installed package that code is of, "" for code of none; None for ours, and for Python's own."""
    file = frame.filename
    made = file.startswith(_MADE) or (file == "<string>" and frame.name.startswith("__"))
    if made or file.startswith(_OWN_CODE) or file.endswith(_COMPILED):
        return None
    installed = re.search(r"[/\\](?:site|dist)-packages[/\\]([^/\\]+)", file)
    if installed is not None:
        return installed[1]
    return None if file.startswith(_STANDARD_LIBRARY) else ""


def said(error: BaseException) -> str:
    """Return what an exception says; a user's own may not be able to."""
    if isinstance(error, RewindError):
        return one_line("; ".join(filter(None, [error.what, error.why])))
    try:
        return one_line(str(error))
    except Exception as second:
        return f"it cannot say: {type(second).__qualname__}"
