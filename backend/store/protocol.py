"""What a shard's store is: an ordered map of bytes, one prefix byte per region, changed only by whole commits.

Layout of a key (format 1)::

    +--------+----------------------------+
    | region | the region's own key bytes |
    | 1 byte | >= 0 bytes                 |
    +--------+----------------------------+

One column family holds all regions, so that the changes of a micro-batch are one sorted file and one atomic ingest.
All ranges in this package are half-open: `[start, end)`, and `end=None` means "to the end of the store".
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Protocol

FORMAT = 1
"""Version of the key layout and of the value encodings under it."""

MAX_KEY_BYTES = 128 * 1024
"""The longest one has a message's key twice (session windows of a join), each byte escaped: see
`backend.store.limits`.
"""
MAX_VALUE_BYTES = 64 * 1024 * 1024


class Region(IntEnum):
    """The prefix byte of each region of a shard's store; never renumbered."""

    COMMIT = 0x00
    """The commit row and what only the commit protocol reads; not in the changelog (the commit record is)."""
    MESSAGES = 0x01
    """The message store; rebuilt by replaying the source, never in the changelog."""
    MESSAGE_INDEX = 0x02
    """`(time or offset, message key) -> empty` of key-first layouts; rebuilt with the messages."""
    WINDOWS = 0x03
    """One row per window or pane (SAMZA-552's window metadata)."""
    AGGREGATES = 0x04
    """One row per (window or pane, group key) of incremental aggregates."""
    REVISIONS = 0x05
    """One row per (window, group key) that was emitted early or late, or waits to be."""
    SESSION_INDEX = 0x06
    """`(end, session key, start) -> empty` for sessions in the operator."""
    OPERATOR = 0x07
    """Small rows of the operator itself: clocks, totals, counters."""
    REJECTED = 0x08
    """Offsets that a replay leaves out (`recovery.changelog.rejected`)."""
    USER = 0x40
    """0x40 to 0xfe: the named stores of `process()`, numbered in the manifest."""


REPLAYED = frozenset({Region.MESSAGES, Region.MESSAGE_INDEX})
"""Regions that a restore rebuilds from the source instead of the changelog."""

UNLOGGED = REPLAYED | {Region.COMMIT}
"""Regions whose rows are not written to the changelog."""

LOGGED_FROM = max(UNLOGGED) + 1
"""The first region that is: those of the changelog follow on one another, behind all messages."""


def region_range(region: int) -> tuple[bytes, bytes]:
    """Give the half-open key range of a region.

    >>> region_range(Region.MESSAGES)
    (b'\\x01', b'\\x02')
    """
    return bytes([region]), bytes([region + 1])


def region_slice(keys: Sequence[bytes], region: int) -> tuple[int, int]:
    """Give from where to where, exclusive, a region's keys stand among sorted ones.

    >>> region_slice([b"\\x00c", b"\\x01a", b"\\x01b", b"\\x03"], Region.MESSAGES)
    (1, 3)
    """
    start, end = region_range(region)
    return bisect_left(keys, start), bisect_left(keys, end)


@dataclass(frozen=True, slots=True)
class Changes:
    """What one micro-batch does to a store: the last value per key, sorted by key, each key once.

    Attributes:
        keys: Strictly increasing.
        values: As long as `keys`; None is a point delete.
        bounds: Region -> full key; everything of that region below the key is expired. Bounds never go back.
    """

    keys: Sequence[bytes]
    values: Sequence[bytes | None]
    bounds: Mapping[int, bytes] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True, slots=True)
class Staged:
    """A staged file: written and synced, not yet part of any store.

    Attributes:
        path: Where it lies.
        length: Bytes.
        digest: Hex xxh3-128 of the file's bytes.
        rows: Puts and deletes in it.
    """

    path: Path
    length: int
    digest: str
    rows: int


Seen = Callable[[list[bytes], list[bytes]], object]
"""Takes keys and values."""


def unseen(keys: list[bytes], values: list[bytes]) -> None:
    """Do nothing with rows: the default of who may see them."""


def nothing() -> None:
    """Do nothing."""


class Readable(Protocol):
    """Reads that every store, snapshot and workspace answers alike."""

    def get(self, key: bytes) -> bytes | None:
        """Return the value of a key, None when there is none. An empty value is a value."""

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values of many keys, in their order."""

    def scan(self, start: bytes, end: bytes | None, *, reverse: bool = False) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over `[start, end)` in key order (or against it), as it was when the scan began."""

    def scan_arrays(self, start: bytes, end: bytes | None) -> tuple[list[bytes], list[bytes]]:
        """Return keys and values of `[start, end)` as two lists, in key order: the columnar way to read."""


class Store(Readable, Protocol):
    """An ordered map of bytes that changes by whole `Changes` only."""

    def write(self, changes: Changes) -> None:
        """Apply changes at once, atomically and durably: the standalone way, without Spark."""

    def delete_range(self, start: bytes, end: bytes) -> None:
        """Delete `[start, end)`: the janitor's way to reclaim what a bound already hides; idempotent."""

    def close(self) -> None:
        """Release every handle and the LOCK; closing twice does nothing."""
