"""A store in memory: what RocksDB answers, without a disk, for contexts that keep nothing and for reading a history."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sortedcontainers import SortedDict

from backend.errors import KeyInvalid, StoreClosed
from backend.store.bounds import FORMAT_KEY, FORMAT_VALUE, rows_of
from backend.store.limits import check_keys, check_values
from backend.store.protocol import Changes


class MemoryStore:
    """A store in memory; gone when it is dropped."""

    def __init__(self) -> None:
        self._rows: SortedDict | None = SortedDict({FORMAT_KEY: FORMAT_VALUE})

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

    def scan_arrays(self, start: bytes, end: bytes | None) -> tuple[list[bytes], list[bytes]]:
        """Return keys and values of `[start, end)` as two lists, in key order."""
        rows = self._open
        keys = list(rows.irange(_bytes(start), end, inclusive=(True, False)))
        return keys, [rows[key] for key in keys]

    def write(self, changes: Changes) -> None:
        """Apply changes at once."""
        keys, values = rows_of(changes)
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

    def close(self) -> None:
        """Forget everything; closing twice does nothing."""
        self._rows = None


def _bytes(key: bytes) -> bytes:
    if type(key) is not bytes:
        raise KeyInvalid("a key must be bytes", where="memory", why=f"{type(key).__name__} was given")
    return key
