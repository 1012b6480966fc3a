"""A workspace: one attempt's view over a store. Reads see own writes; nothing reaches the store before the commit.

Bounds hide: whatever lies below a region's bound is invisible on every read path, and writes below it are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from backend.store import Changes, Readable


class Workspace:
    """Overlay of changes over a readable store.

    Args:
        base: Committed state; never written.
        bounds: Region -> full key, as committed.
    """

    def __init__(self, base: Readable, bounds: Mapping[int, bytes] | None = None) -> None:
        raise NotImplementedError

    def get(self, key: bytes) -> bytes | None:
        """Return the value of a key; None when absent, deleted here, or below its region's bound."""
        raise NotImplementedError

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values of many keys, in their order."""
        raise NotImplementedError

    def scan(self, start: bytes, end: bytes | None, *, reverse: bool = False) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over `[start, end)` as it was when the scan began, own writes included."""
        raise NotImplementedError

    def scan_arrays(self, start: bytes, end: bytes | None) -> tuple[list[bytes], list[bytes]]:
        """Return keys and values of `[start, end)` as two lists."""
        raise NotImplementedError

    def put(self, key: bytes, value: bytes) -> None:
        """Set one key. Raises `BoundViolated` below the region's bound, `KeyInvalid` / `ValueInvalid` over a size."""
        raise NotImplementedError

    def put_many(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Set many keys; fastest when `keys` are sorted."""
        raise NotImplementedError

    def delete(self, key: bytes) -> None:
        """Delete one key; deleting what is not there is allowed."""
        raise NotImplementedError

    def delete_many(self, keys: Sequence[bytes]) -> None:
        """Delete many keys."""
        raise NotImplementedError

    def raise_bound(self, region: int, key: bytes) -> None:
        """Expire everything of a region below the full key `key`; bounds never go back (a lower one is ignored)."""
        raise NotImplementedError

    @property
    def bounds(self) -> Mapping[int, bytes]:
        """Bounds as they will be committed."""
        raise NotImplementedError

    def changes(self) -> Changes:
        """Give everything done so far as sorted changes; the workspace stays usable."""
        raise NotImplementedError
