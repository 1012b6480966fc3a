"""Window metadata of tumbling and hopping windows: one row per pane (SAMZA-552, "Window Metadata").

Key: `Region.WINDOWS` and the pane's start (backend.windows.columns.grouping has the bytes), so in order of
expiry. The window `[start, end)` is the panes in it; where size and step are equal the pane is the window. Rows exist
for panes with messages only, so a gap in time costs nothing.

Where messages are kept an index says which pane begins first in a source partition, so that nobody has to read all of
them to know where a replay begins. One row per pane and source partition, and one without more that says that there is
an index; it is made where an older release wrote the panes::

    OPERATOR "f"                                                                  ->  format (1)
    OPERATOR "f" stream (2), partition (4), start offset (8), start of pane (8)   ->  empty
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from backend.batch import Proof, SourcePartition
from backend.errors import UnknownFormat
from backend.keys import prefix_end
from backend.messages.keys import clock_bytes
from backend.store.protocol import Readable, Region
from backend.store.workspace import Workspace
from backend.windows.columns.arrays import IntArray, runs
from backend.windows.columns.grouping import start_bytes
from backend.windows.definitions import Assigner
from backend.windows.ledger import decode_row

FORMAT = 1
INDEX_FORMAT = 1

_INDEX = bytes([Region.OPERATOR]) + b"f"


class Pane(msgspec.Struct, array_like=True):
    """What is known of a pane.

    Attributes:
        format: Format version of this row.
        start: Start in milliseconds.
        end: End, exclusive.
        count: Messages in it.
        digest: Digest of its messages in the message store, 0 where none is kept.
        groups: Accumulators in it: one per (skip, group key).
        skips: The skips other than 0 among them, ascending.
        sources: (stream, partition, start offset, last offset), ascending.
    """

    format: int
    start: int
    end: int
    count: int
    digest: int
    groups: int
    skips: list[int]
    sources: list[tuple[int, int, int, int]]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Pane)


class Panes:
    """The panes of a shard, read range by range as they are needed.

    Args:
        grid: Numbers the panes.
        state: Where they are stored.
    """

    def __init__(self, grid: Assigner, state: Readable) -> None:
        self._grid, self._state = grid, state
        self.known: dict[int, Pane] = {}
        """Panes read so far, by number, as committed."""

    def load(self, firsts: IntArray, lasts: IntArray) -> None:
        """Read the panes of closed ranges of pane numbers."""
        for first, last in zip(*(ends.tolist() for ends in runs(firsts, lasts)), strict=True):
            self.load_range(first, last)

    def load_range(self, first: int | None, last: int | None) -> None:
        """Read the panes of a closed range of numbers; None is without a bound."""
        end = bytes([Region.WINDOWS + 1]) if last is None else self.key(last + 1)
        rows = self._state.scan_arrays(self._start(first), end)[1]
        found = [decode_row(data, _decoder, FORMAT, "window metadata") for data in rows]
        numbers = self._grid.pane_of(np.array([pane.start for pane in found], np.int64))
        self.known.update(zip(numbers.tolist(), found, strict=True))

    def count_from(self, first: int | None) -> int:
        """Count all panes from a number on, all there are for None, without decoding them."""
        return len(self._state.scan_arrays(self._start(first), bytes([Region.WINDOWS + 1]))[0])

    def key(self, number: int) -> bytes:
        """Give the key of a pane's row."""
        return start_bytes(Region.WINDOWS, self._grid.pane_start(number))

    def numbers(self) -> IntArray:
        """Give the numbers of the panes read so far, ascending."""
        return np.array(sorted(self.known), np.int64)

    def fresh(self, number: int) -> Pane:
        """Give an empty pane."""
        return Pane(FORMAT, self._grid.pane_start(number), self._grid.pane_start(number + 1), 0, 0, 0, [], [])

    def _start(self, first: int | None) -> bytes:
        return bytes([Region.WINDOWS]) if first is None else self.key(first)


def all_panes(state: Readable, before: int | None = None) -> Iterable[Pane]:
    """Give every retained pane in order of its start; only those that begin before a time, if one is given."""
    end = bytes([Region.WINDOWS + 1]) if before is None else start_bytes(Region.WINDOWS, before)
    for data in state.scan_arrays(bytes([Region.WINDOWS]), end)[1]:
        yield decode_row(data, _decoder, FORMAT, "window metadata")


def proofs(state: Readable) -> Iterable[Proof]:
    """Give what the message store must hold, pane by pane."""
    for pane in all_panes(state):
        start, end = (start_bytes(Region.MESSAGES, edge) for edge in (pane.start, pane.end))
        yield Proof(f"pane [{pane.start}, {pane.end})", start, end, pane.count, pane.digest)


def write(work: Workspace, rows: Iterable[Pane]) -> None:
    """Store panes."""
    panes = list(rows)
    work.put_many([start_bytes(Region.WINDOWS, pane.start) for pane in panes], [*map(_encoder.encode, panes)])


def ranges(sources: Iterable[tuple[int, int, int, int]]) -> dict[SourcePartition, tuple[int, int]]:
    """Give the smallest and the largest offset per source partition, of (stream, partition, first, last)."""
    found: dict[SourcePartition, tuple[int, int]] = {}
    for s, p, first, last in sources:
        old = found.get((s, p), (first, last))
        found[s, p] = (min(old[0], first), max(old[1], last))
    return found


def extend(pane: Pane, sources: Iterable[tuple[int, int, int, int]]) -> None:
    """Add the offsets of new messages: (stream, partition, first, last)."""
    found = ranges([*pane.sources, *sources])
    pane.sources = [(s, p, first, last) for (s, p), (first, last) in sorted(found.items())]


def index_keys(panes: Iterable[Pane]) -> set[bytes]:
    """Give the keys of panes' index rows."""
    return {
        _INDEX + clock_bytes((s, p, first)) + start_bytes(Region.WINDOWS, pane.start)[1:]
        for pane in panes
        for s, p, first, _ in pane.sources
    }


def start_offsets(work: Workspace) -> dict[SourcePartition, int]:
    """Give the smallest start offset per source partition over retained panes: where a replay has to begin.

    One look per source partition; the first time all panes are read.

    Raises:
        UnknownFormat: Another release wrote the index.
    """
    known = work.get(_INDEX)
    if known is None:
        work.replace_keys(set(), index_keys(all_panes(work)))
        work.put(_INDEX, bytes([INDEX_FORMAT]))
    elif known != bytes([INDEX_FORMAT]):
        raise UnknownFormat("the index of panes has an unknown format", why=f"it is {known!r}, known is {INDEX_FORMAT}")
    found: dict[SourcePartition, int] = {}
    start, end = _INDEX + b"\x00", bytes([_INDEX[0], _INDEX[1] + 1])
    while (row := next(iter(work.scan(start, end)), None)) is not None:
        key = row[0]
        stream, partition, offset = (int.from_bytes(part, "big") for part in (key[2:4], key[4:8], key[8:16]))
        found[stream, partition - 2**31] = offset - 2**63
        start = prefix_end(key[:8]) or end
    return found
