"""The dict twin of the RocksDB store: the whole of its contract, staged files and copies included, on a dict.

Staged files are real files, so that crashes between stage and confirm can be simulated: MessagePack of
`[FORMAT, keys, values]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path

import msgspec

from backend.errors import UNDECODABLE, StateCorrupted
from backend.store.bounds import FORMAT_KEY, check_format, rows_of
from backend.store.memory import MemoryStore
from backend.store.protocol import FORMAT, Changes, Seen, Staged, nothing, unseen
from backend.store.rows import StoreRows
from backend.store.staging import seal, verify

_CHECKPOINT = "rows.msgpack"
_File = tuple[int, list[bytes], list[bytes | None]]


class MemoryTwin(MemoryStore):
    """A store in memory that does what `RocksStore` does.

    Args:
        rows: What it holds at first, beside its format row.
    """

    def __init__(self, rows: Mapping[bytes, bytes] | None = None) -> None:
        super().__init__()
        self._open.update(rows or {})
        check_format(self._open[FORMAT_KEY], "memory")

    @classmethod
    def open(cls, path: Path) -> MemoryTwin:
        """Read what `checkpoint` wrote.

        Raises:
            StateCorrupted: The file cannot be decoded.
            UnknownFormat: Another release wrote it.
        """
        keys, values = _read(path / _CHECKPOINT)
        return cls({key: value for key, value in zip(keys, values, strict=True) if value is not None})

    def scan_arrays(
        self, start: bytes, end: bytes | None, *, limit: int | None = None
    ) -> tuple[list[bytes], list[bytes]]:
        """Return keys and values of `[start, end)` as two lists, in key order; at most `limit` rows."""
        keys, values = super().scan_arrays(start, end)
        return list(islice(keys, limit)), list(islice(values, limit))

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
        self.write(Changes(*_read(staged.path)))

    def checkpoint(self, path: Path) -> None:
        """Write a copy into a new directory at `path`, which `open` reads."""
        rows = self._open
        path.mkdir()
        target = path / _CHECKPOINT
        target.write_bytes(msgspec.msgpack.encode([FORMAT, list(rows), list(rows.values())]))
        seal(target, len(rows))


def _read(path: Path) -> tuple[list[bytes], Sequence[bytes | None]]:
    try:
        version, keys, values = msgspec.msgpack.decode(path.read_bytes(), type=_File)
    except (*UNDECODABLE, FileNotFoundError) as error:
        raise StateCorrupted("a file of a store in memory cannot be read", where=str(path), why=str(error)) from error
    check_format(str(version).encode(), str(path))
    return keys, values
