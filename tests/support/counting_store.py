"""A store that counts what is read from it, for tests of what a read or a cleaning up may touch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from backend.store.memory import MemoryStore


class CountingStore(MemoryStore):
    """The dict twin; `read` holds the key of every row that left it, in order."""

    def __init__(self) -> None:
        self.read: list[bytes] = []
        super().__init__()

    def get(self, key: bytes) -> bytes | None:
        value = super().get(key)
        if value is not None:
            self.read.append(key)
        return value

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        values = super().get_many(keys)
        self.read += [key for key, value in zip(keys, values, strict=True) if value is not None]
        return values

    def scan(self, start: bytes, end: bytes | None, *, reverse: bool = False) -> Iterator[tuple[bytes, bytes]]:
        return self._counted(super().scan(start, end, reverse=reverse))

    def _counted(self, rows: Iterator[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
        for row in rows:
            self.read.append(row[0])
            yield row

    def scan_arrays(self, start: bytes, end: bytes | None) -> tuple[list[bytes], list[bytes]]:
        keys, values = super().scan_arrays(start, end)
        self.read += keys
        return keys, values
