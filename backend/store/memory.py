"""The dict twin of the RocksDB store: the same contract without a disk, for tests and for embedded use.

Staged files are real files, so that crashes between stage and confirm can be simulated: MessagePack of
`[FORMAT, keys, values]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import msgspec
from sortedcontainers import SortedDict

from backend.errors import UNDECODABLE, KeyInvalid, StateCorrupted, StoreClosed
from backend.store.bounds import FORMAT_KEY, FORMAT_VALUE, check_format, rows_of
from backend.store.limits import check_keys, check_values
from backend.store.protocol import FORMAT, Changes, Seen, Staged, nothing, unseen
from backend.store.rows import StoreRows
from backend.store.staging import VERIFY, seal, verify

_CHECKPOINT = "rows.msgpack"
_File = tuple[int, list[bytes], list[bytes | None]]


class MemoryStore:
    """A store in memory; gone when it is dropped.

    Args:
        rows: What it holds at first, beside its format row.
    """

    def __init__(self, rows: Mapping[bytes, bytes] | None = None) -> None:
        self._rows: SortedDict | None = SortedDict(rows or {})
        self._rows.setdefault(FORMAT_KEY, FORMAT_VALUE)
        check_format(self._rows[FORMAT_KEY], "memory")

    @classmethod
    def open(cls, path: Path) -> MemoryStore:
        """Read what `checkpoint` wrote.

        Raises:
            StateCorrupted: The file cannot be decoded.
            UnknownFormat: Another release wrote it.
        """
        keys, values = _read(path / _CHECKPOINT)
        return cls({key: value for key, value in zip(keys, values, strict=True) if value is not None})

    @property
    def _open(self) -> SortedDict:
        if self._rows is None:
            raise StoreClosed("the store is closed", where="memory")
        return self._rows

    def get(self, key: bytes) -> bytes | None:
        """Return the value of a key, None when there is none."""
        return self._open.get(_bytes(key))  # type: ignore[no-any-return]

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values of many keys, in their order."""
        return list(map(self._open.get, map(_bytes, keys)))

    def scan(self, start: bytes, end: bytes | None, *, reverse: bool = False) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over `[start, end)` in key order (or against it), as it was when the scan began."""
        rows = self._open
        keys = list(rows.irange(_bytes(start), end, inclusive=(True, False), reverse=reverse))
        return self._rest([(key, rows[key]) for key in keys])

    def _rest(self, rows: list[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
        for row in rows:
            _ = self._open  # a scan does not outlive its store, here as there
            yield row

    def scan_arrays(
        self, start: bytes, end: bytes | None, *, limit: int | None = None
    ) -> tuple[list[bytes], list[bytes]]:
        """Return keys and values of `[start, end)` as two lists, in key order; at most `limit` rows."""
        rows = self._open
        keys = list(islice(rows.irange(_bytes(start), end, inclusive=(True, False)), limit))
        return keys, [rows[key] for key in keys]

    def write(self, changes: Changes) -> None:
        """Apply changes at once."""
        self._apply(*rows_of(changes))

    def stage(self, changes: Changes, path: Path, *, midway: Callable[[], object] = nothing) -> Staged:
        """Write changes to a new file at `path` and sync file and directory; the store itself is not touched.

        `midway` is called when half of the bytes are written.

        Raises:
            FileExistsError: There is a file already: names of staged files are never used again.
        """
        keys, values = rows_of(changes)
        _ = self._open
        data = msgspec.msgpack.encode([FORMAT, keys, values])
        with path.open("xb") as file:
            file.write(data[: len(data) // 2])
            midway()
            file.write(data[len(data) // 2 :])
        return seal(path, len(keys))

    def stage_columns(self, rows: StoreRows, path: Path, *, seen: Seen = unseen) -> Staged:
        """Write rows that are columns, sorted and one or more, to a new file at `path` as `stage` does."""
        keys, values = rows.lists()
        staged = self.stage(Changes(keys, values), path)
        seen(keys, values)
        return staged

    def confirm(self, staged: Staged) -> None:
        """Check length and digest of a staged file, then apply it. The file is left where it is.

        Raises:
            StateCorrupted: The file is missing or not the one that was staged; nothing was applied.
        """
        _ = self._open
        verify(staged)
        self._apply(*_read(staged.path))

    def _apply(self, keys: Sequence[bytes], values: Sequence[bytes | None]) -> None:
        rows = self._open
        check_keys(keys)
        check_values([value for value in values if value is not None])
        rows.update({key: value for key, value in zip(keys, values, strict=True) if value is not None})
        for key, value in zip(keys, values, strict=True):
            if value is None:
                rows.pop(key, None)

    def delete_range(self, start: bytes, end: bytes) -> None:
        """Delete `[start, end)`; idempotent."""
        rows = self._open
        for key in list(rows.irange(_bytes(start), _bytes(end), inclusive=(True, False))):
            del rows[key]

    def checkpoint(self, path: Path) -> None:
        """Write a copy into a new directory at `path`, which `open` reads."""
        rows = self._open
        path.mkdir()
        target = path / _CHECKPOINT
        target.write_bytes(msgspec.msgpack.encode([FORMAT, list(rows), list(rows.values())]))
        seal(target, len(rows))

    def close(self) -> None:
        """Forget everything; closing twice does nothing."""
        self._rows = None


def _bytes(key: bytes) -> bytes:
    if type(key) is not bytes:
        raise KeyInvalid("a key must be bytes", where="memory", why=f"{type(key).__name__} was given")
    return key


def _read(path: Path) -> tuple[list[bytes], list[bytes | None]]:
    try:
        version, keys, values = msgspec.msgpack.decode(path.read_bytes(), type=_File)
    except (*UNDECODABLE, FileNotFoundError) as error:
        raise StateCorrupted(
            "a file of a store in memory cannot be read", where=str(path), why=str(error), command=VERIFY
        ) from error
    check_format(str(version).encode(), str(path))
    return keys, values
