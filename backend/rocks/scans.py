"""Reads of ranges that never end early without an error.

* `items`, `keys` and `values` of rocksdict end without an error at a corrupt block. Only a raw iterator has a status,
  so every read ends by asking one, and a read that stopped early is `StateCorrupted`, never a short result.
* `set_iterate_lower_bound` sets the upper bound: scans against the order check their start themselves.
* An iterator points to the upper bound inside its `ReadOptions` and does not keep them: once they are let go of, the
  scan ends early and silently. Every scan keeps its own.
* `close` keeps the LOCK while an iterator or a snapshot lives: a scan can be released, and what raises here keeps no
  iterator in its frame, because an error that somebody holds on to keeps its frames.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import rocksdict
from rocksdict import ReadOptions

from backend.errors import StateCorrupted, StoreClosed
from backend.rocks.errors import Named


class Scan(Iterator[tuple[bytes, bytes]]):
    """A scan over a raw iterator, which knows whether it ended or failed; lets go of it at its end or at `release`."""

    def __init__(
        self,
        path: Path,
        database: rocksdict.Rdict,
        start: bytes,
        end: bytes | None,
        reverse: bool,
    ) -> None:
        self._path, self._start, self._reverse = path, start, reverse
        self._options = until(end)  # they own the bytes of the upper bound, to which the iterator only points
        native = database.iter(self._options)
        self._native: rocksdict.RdictIter | None = native
        self._done = self._gave = False
        if not reverse:
            native.seek(start)
        elif end is None:
            native.seek_to_last()
        else:
            native.seek_for_prev(end)  # the upper bound keeps `end` itself out

    def __next__(self) -> tuple[bytes, bytes]:
        native = self._native
        if native is None:
            if self._done:
                raise StopIteration
            raise StoreClosed("the store was closed during a scan", where=str(self._path))
        if self._gave:  # not before: behind the last row that is wanted may lie many that were deleted
            native.prev() if self._reverse else native.next()
        if not native.valid():
            self._done, self._native = True, None
            try:
                with Named(self._path):
                    native.status()
            finally:
                del native
            raise StopIteration
        key: bytes = native.key()
        if self._reverse and key < self._start:
            self._done, self._native = True, None
            raise StopIteration
        self._gave = True
        return key, native.value()

    def release(self) -> None:
        """Let go of the database."""
        self._native = None


def until(end: bytes | None) -> ReadOptions:
    """Give read options that stop at a key, exclusive; to be kept as long as the iterator."""
    options = ReadOptions()
    if end is not None:
        options.set_iterate_upper_bound(end)
    return options


def check_ended(probe: rocksdict.RdictIter, last: bytes | None, start: bytes, path: Path) -> None:
    """Check that rows which ended after `last` ended because there are no more, not because of a corrupt block."""
    try:
        probe.seek(start if last is None else last)
        if last is not None and probe.valid():
            probe.next()
        if not probe.valid():
            probe.status()
            return
    finally:
        del probe
    raise StateCorrupted("a scan stopped before its end", where=str(path), why=f"after {last!r}")
