"""What a join's message store holds, counted in cells: a bucket of event time (or of numbers) of a source partition.

One row per cell in `Region.WINDOWS`, in the changelog::

    region, bucket (8 bytes), stream (2), partition (4)  ->  MessagePack [format, count, digest, first, last offset]

A cell dies as a whole: when its newest place in time is expired, or its last offset is out of retention by size. Dead
buckets of both sides are hidden by a bound (layouts that begin with event time), or deleted through the index of keys;
a cell that dies before its bucket's other side is deleted by what the bucket's range holds. So expiring reads what it
evicts. What a pair may still meet is decided per message, not per cell.

After a replay the message store is what the cells say: `settle` takes out what no cell has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, islice

import msgspec
import numpy as np

from backend.batch import NO_TIME, Proof, SourcePartition
from backend.joins.rows import Rows, offsets_of
from backend.joins.state import JoinLedger
from backend.keys import fixed_bytes, to_rows, unpack_fixed
from backend.messages.keys import INDEX, MESSAGES, Clock, clock_range, places_of, source_bytes
from backend.messages.layout import MessageLayout
from backend.messages.rows import Digests, delete_messages, expire_messages, find_messages, total
from backend.store.protocol import Region, region_range
from backend.store.workspace import Workspace
from backend.windows.columns.arrays import IntArray, Mask, grouped
from backend.windows.ledger import decode_row

FORMAT = 1

CellPlace = tuple[int, int, int]
"""(bucket, stream, partition)."""

_WINDOWS = bytes([Region.WINDOWS])
_CELL_BYTES = 1 + 8 + 2 + 4
_PAGE = 65_536
_MASK = 2**64 - 1


class Cell(msgspec.Struct, array_like=True):
    """Messages of one bucket and source partition: how many, their digest, smallest and largest offset."""

    format: int
    count: int
    digest: int
    first: int
    last: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Cell)


class Cells:
    """The cells of a shard, read once per micro-batch.

    Args:
        work: Where they are, and the messages.
        layout: The messages' keys.
        ledger: Says how long a bucket is, and where source partitions begin.
    """

    def __init__(self, work: Workspace, layout: MessageLayout, ledger: JoinLedger) -> None:
        self._work, self._layout, self._ledger = work, layout, ledger
        self._width = ledger.width
        self._touched: set[CellPlace] = set()
        keys, values = work.scan_arrays(*region_range(Region.WINDOWS))
        cells = [decode_row(value, _decoder, FORMAT, "a cell of a join") for value in values]
        self.known = dict(zip(_places(keys), cells, strict=True))

    def add(self, rows: Rows, digests: Digests) -> None:
        """Count messages that are stored."""
        for place, at in self.groups(rows.at, rows.stream, rows.partition):
            offsets = rows.offset[at]
            first, last = int(offsets.min()), int(offsets.max())
            cell = self.known.setdefault(place, Cell(FORMAT, 0, 0, first, last))
            cell.count += len(at)
            cell.digest = (cell.digest + total(digests[at])) & _MASK
            cell.first, cell.last = min(cell.first, first), max(cell.last, last)
            self._touched.add(place)

    def groups(self, at: IntArray, stream: IntArray, partition: IntArray) -> Iterable[tuple[CellPlace, IntArray]]:
        """Give the cells of messages, with the rows of each."""
        return grouped(np.floor_divide(at, self._width) * self._width, stream, partition)

    def write(self) -> None:
        """Write what changed."""
        for place in sorted(self._touched):
            self._work.put(_key(place), _encoder.encode(self.known[place]))

    @property
    def messages(self) -> int:
        """Messages stored."""
        return sum(cell.count for cell in self.known.values())

    @property
    def digest(self) -> int:
        """Their digest."""
        return sum(cell.digest for cell in self.known.values()) & _MASK

    def spans(self) -> dict[SourcePartition, list[tuple[int, int]]]:
        """Give per source partition the first and the last offset of each cell."""
        found: dict[SourcePartition, list[tuple[int, int]]] = {}
        for (_, stream, partition), cell in self.known.items():
            found.setdefault((stream, partition), []).append((cell.first, cell.last))
        return found

    def replay_from(self) -> dict[SourcePartition, int]:
        """Give per source partition the smallest offset that is stored."""
        return {source: min(first for first, _ in spans) for source, spans in self.spans().items()}

    def evict(self, dead: Sequence[CellPlace]) -> None:
        """Take dead cells and their messages out of the store; those below the ledger's bound go by it."""
        work, layout, bound = self._work, self._layout, self._ledger.bound
        if layout.timed and bound != NO_TIME:
            expire_messages(work, layout, bound)
        firsts = {(stream, partition): offset for stream, partition, offset in self._ledger.firsts}
        ranges: dict[tuple[Clock, Clock], set[SourcePartition]] = {}
        for bucket, stream, partition in sorted(dead):
            if not layout.timed:
                first = firsts[stream, partition] + bucket
                low, high = (stream, partition, first), (stream, partition, first + self._width)
                ranges[low, high] = {(stream, partition)}
            elif bucket >= bound:
                ranges.setdefault((bucket, bucket + self._width), set()).add((stream, partition))
        for edges, sources in ranges.items():
            keys = find_messages(work, layout, *edges)
            found = zip(*(part.tolist() for part in places_of(keys)[:2]), strict=True)
            delete_messages(work, layout, [key for key, source in zip(keys, found, strict=True) if source in sources])
        for place in dead:
            del self.known[place]
            self._touched.discard(place)
            work.delete(_key(place))

    def settle(self) -> None:
        """Delete messages that no cell has: replayed ones, and those of an older copy that is caught up with."""
        region, doomed = INDEX[0] if self._layout.indexed else MESSAGES[0], list[bytes]()
        rows = self._work.scan(*region_range(region))
        while page := [key for key, _ in islice(rows, _PAGE)]:
            doomed += self._strangers(page)
        delete_messages(self._work, self._layout, doomed)

    def _strangers(self, keys: list[bytes]) -> list[bytes]:
        """Give the keys of messages that are in no cell; those of layouts by event time begin with it."""
        stream, partition, offset = places_of(keys)
        if self._layout.timed:
            at = unpack_fixed(to_rows([key[1:9] for key in keys], 8), np.int64)
        else:
            at = offset - offsets_of(self._ledger.firsts, stream, partition, 0)
        strange: Mask = np.zeros(len(keys), np.bool_)
        for place, rows in self.groups(at, stream, partition):
            cell = self.known.get(place)
            strange[rows] = True if cell is None else offset[rows] < cell.first
        return [keys[at] for at in np.flatnonzero(strange).tolist()]

    def proofs(self) -> Iterable[Proof]:
        """Give what the message store must hold: per bucket where its messages lie together, else in all."""
        if self._layout.indexed or not self._layout.timed:
            yield Proof("all messages of the join", *region_range(Region.MESSAGES), self.messages, self.digest)
            return
        for bucket, cells in groupby(sorted(self.known.items()), key=lambda cell: cell[0][0]):
            found = [cell for _, cell in cells]
            low, high = clock_range(MESSAGES, bucket, bucket + self._width)
            count, digest = sum(cell.count for cell in found), sum(cell.digest for cell in found) & _MASK
            yield Proof(f"bucket {bucket}", low, high, count, digest)


def _key(place: CellPlace) -> bytes:
    bucket, stream, partition = place
    return _WINDOWS + fixed_bytes(bucket) + source_bytes(stream, partition)


def _places(keys: list[bytes]) -> list[CellPlace]:
    rows = to_rows(keys, _CELL_BYTES)
    bucket = unpack_fixed(rows[:, 1:9], np.int64).tolist()
    stream, partition = unpack_fixed(rows[:, 9:11], np.uint16).tolist(), unpack_fixed(rows[:, 11:], np.int32).tolist()
    return list(zip(bucket, stream, partition, strict=True))
