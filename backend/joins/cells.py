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

import msgspec
import numpy as np

from backend.batch import NO_TIME, Proof, SourcePartition
from backend.joins.state import offsets_of
from backend.keys import fixed_bytes, to_rows, unpack_fixed
from backend.messages import MessageLayout, delete_messages, expire_messages, find_messages
from backend.messages.key_first import Digests, total
from backend.messages.keys import INDEX, MESSAGES, clock_range, places_of, source_bytes
from backend.store.protocol import Readable, Region, region_range
from backend.store.workspace import Workspace
from backend.windows.columns.arrays import IntArray, Mask, grouped
from backend.windows.ledger import decode_row

FORMAT = 1

Place = tuple[int, int, int]
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
        state: Where they are.
        width: Length of a bucket.
    """

    def __init__(self, state: Readable, width: int) -> None:
        self.width = width
        self.known: dict[Place, Cell] = {}
        self._touched: set[Place] = set()
        keys, values = state.scan_arrays(*region_range(Region.WINDOWS))
        for place, value in zip(_places(keys), values, strict=True):
            self.known[place] = decode_row(value, _decoder, FORMAT, "a cell of a join")

    def add(self, at: IntArray, stream: IntArray, partition: IntArray, offset: IntArray, digests: Digests) -> None:
        """Count messages that are stored."""
        for place, rows in self.groups(at, stream, partition):
            offsets, found = offset[rows], total(digests[rows])
            cell = self.known.get(place)
            first, last = int(offsets.min()), int(offsets.max())
            if cell is None:
                self.known[place] = Cell(FORMAT, len(rows), found, first, last)
            else:
                cell.count += len(rows)
                cell.digest = (cell.digest + found) & _MASK
                cell.first, cell.last = min(cell.first, first), max(cell.last, last)
            self._touched.add(place)

    def groups(self, at: IntArray, stream: IntArray, partition: IntArray) -> Iterable[tuple[Place, IntArray]]:
        """Give the cells of messages, with the rows of each."""
        return grouped(np.floor_divide(at, self.width) * self.width, stream, partition)

    def drop(self, work: Workspace, places: Iterable[Place]) -> None:
        """Forget cells."""
        for place in places:
            self.known.pop(place)
            self._touched.discard(place)
            work.delete(_key(place))

    def write(self, work: Workspace) -> None:
        """Write what changed."""
        for place in sorted(self._touched):
            work.put(_key(place), _encoder.encode(self.known[place]))

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


def evict(
    work: Workspace,
    layout: MessageLayout,
    cells: Cells,
    dead: Iterable[Place],
    bound: int,
    firsts: dict[SourcePartition, int],
) -> None:
    """Take the messages of dead cells out of the store.

    Args:
        work: Where.
        layout: The layout.
        cells: They are forgotten here, too.
        dead: The cells.
        bound: Buckets before this are expired for both sides; `NO_TIME` for none.
        firsts: First offsets, for layouts by number.
    """
    dead = sorted(dead)
    if layout.timed and bound != NO_TIME:
        expire_messages(work, layout, bound)
    if not layout.timed:
        for bucket, stream, partition in dead:
            first = firsts[stream, partition] + bucket
            start, end = (stream, partition, first), (stream, partition, first + cells.width)
            delete_messages(work, layout, find_messages(work, layout, start, end))
    else:
        buckets: dict[int, set[SourcePartition]] = {}
        for bucket, stream, partition in dead:
            if bucket >= bound:
                buckets.setdefault(bucket, set()).add((stream, partition))
        for bucket, sources in buckets.items():
            keys = find_messages(work, layout, bucket, bucket + cells.width)
            streams, partitions, _ = places_of(keys)
            pairs = zip(streams.tolist(), partitions.tolist(), strict=True)
            delete_messages(work, layout, [key for key, source in zip(keys, pairs, strict=True) if source in sources])
    cells.drop(work, dead)


def settle(work: Workspace, layout: MessageLayout, width: int, firsts: Sequence[tuple[int, int, int]]) -> None:
    """Delete messages that no cell has: replayed ones, and those of an older copy that is caught up with.

    Args:
        work: Where.
        layout: The layout.
        width: Length of a bucket.
        firsts: (stream, partition, first offset), for layouts by number.
    """
    cells = Cells(work, width)
    page: list[bytes] = []
    doomed: list[bytes] = []
    for key, _ in work.scan(*region_range(INDEX[0] if layout.indexed else MESSAGES[0])):
        page.append(key)
        if len(page) == _PAGE:
            doomed += _strangers(page, cells, layout, firsts)
            page = []
    doomed += _strangers(page, cells, layout, firsts)
    delete_messages(work, layout, doomed)


def _strangers(
    keys: list[bytes], cells: Cells, layout: MessageLayout, firsts: Sequence[tuple[int, int, int]]
) -> list[bytes]:
    """Give the keys of messages that are in no cell; those of layouts by event time begin with it."""
    if not keys:
        return []
    stream, partition, offset = places_of(keys)
    if layout.timed:
        at = unpack_fixed(to_rows([key[1:9] for key in keys], 8), np.int64)
    else:
        at = offset - offsets_of(firsts, stream, partition)
    strange: Mask = np.zeros(len(keys), np.bool_)
    for place, rows in cells.groups(at, stream, partition):
        cell = cells.known.get(place)
        strange[rows] = True if cell is None else offset[rows] < cell.first
    return [keys[at] for at in np.flatnonzero(strange).tolist()]


def proofs(state: Readable, layout: MessageLayout, width: int) -> Iterable[Proof]:
    """Give what the message store must hold: per bucket where its messages lie together, else in all."""
    cells = Cells(state, width)
    if layout.indexed or not layout.timed:
        yield Proof("all messages of the join", *region_range(Region.MESSAGES), cells.messages, cells.digest)
        return
    buckets: dict[int, list[Cell]] = {}
    for (bucket, _, _), cell in cells.known.items():
        buckets.setdefault(bucket, []).append(cell)
    for bucket, found in sorted(buckets.items()):
        low, high = clock_range(MESSAGES, bucket, bucket + width)
        count, digest = sum(cell.count for cell in found), sum(cell.digest for cell in found) & _MASK
        yield Proof(f"bucket {bucket}", low, high, count, digest)


def _key(place: Place) -> bytes:
    bucket, stream, partition = place
    return _WINDOWS + fixed_bytes(bucket) + source_bytes(stream, partition)


def _places(keys: list[bytes]) -> list[Place]:
    rows = to_rows(keys, _CELL_BYTES)
    bucket = unpack_fixed(rows[:, 1:9], np.int64).tolist()
    stream, partition = unpack_fixed(rows[:, 9:11], np.uint16).tolist(), unpack_fixed(rows[:, 11:], np.int32).tolist()
    return list(zip(bucket, stream, partition, strict=True))
