"""A join's own small rows: the ledger, the clocks of messages that came late, and the numbers of arrival.

All are in the changelog and bounded (`Region.OPERATOR`, MessagePack, format version first)::

    "join"                                      the ledger
    "c" side, clock, stream, partition, offset  a stored message's clock, where a later pair may hang on it
    "n" side, number                            a run of arrivals of one source partition, for retention by size

A stored message's clock (the newest event time before it) is not in the source, so a replay cannot give it again. It is
needed only where a message of the other side may still come that was expired for this one already: for messages so far
behind their own stream that it decides, until the other side has passed their clock or the messages are gone. With
retentions that are wider than the time range, in ordered streams, there is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from backend.batch import NO_TIME, Positions, SourcePartition
from backend.joins.rows import Rows
from backend.joins.sides import Side
from backend.keys import fixed_bytes
from backend.messages.keys import clocked_keys, read_clocked
from backend.store.protocol import Readable, Region
from backend.store.workspace import Workspace
from backend.windows.columns.arrays import IntArray, grouped, union
from backend.windows.ledger import decode_row

FORMAT = 1

_KEY = bytes([Region.OPERATOR]) + b"join"
_MARK = bytes([Region.OPERATOR]) + b"c"
_RUN = bytes([Region.OPERATOR]) + b"n"
_SET = bytes([FORMAT])

Retention = tuple[int | None, int | None]
"""Retention of a side: by time, milliseconds, and by number of messages; None for none."""


class JoinLedger(msgspec.Struct, array_like=True):
    """What a join knows of itself between micro-batches.

    Attributes:
        format: Format version of this row.
        started_ms: Batch time of the first micro-batch.
        width: Length of the buckets in which messages are counted and expire.
        clocks: How far the left and the right side have come.
        lows: Per side the smallest `at` that can be joined; never goes back.
        bound: Buckets before this are expired for both sides; `NO_TIME` before the first.
        counted: Messages accepted, per side.
        gone: (stream, partition, offset): messages before the offset are out of retention by size.
        firsts: (stream, partition, offset): first offsets, for windows by number.
        waiting: Messages that wait for a first partner, where rows without one come out.
        sequence: Number of the next row that is held back.
        waiting_ms: Batch time of the oldest row that is held back: on time, late; None for none.
        retentions: Per side the retention by time and by number of messages that the commit was made with; empty where
            an older release wrote the row.
        closed: Per side the smallest `at` that is taken, because a shorter retention was in force before; never goes
            back. A row without a partner may have been sent for want of what would come there.
        older: (side, number of arrivals, stream, partition, offset): messages before the offset, which had come when a
            retention by size was first given, and have no numbers; they go when as many as are kept came since.
    """

    format: int
    started_ms: int
    width: int
    clocks: tuple[int, int] = (NO_TIME, NO_TIME)
    lows: tuple[int, int] = (NO_TIME, NO_TIME)
    bound: int = NO_TIME
    counted: tuple[int, int] = (0, 0)
    gone: list[tuple[int, int, int]] = []
    firsts: list[tuple[int, int, int]] = []
    waiting: int = 0
    sequence: int = 0
    waiting_ms: tuple[int | None, int | None] = (None, None)
    retentions: tuple[Retention, ...] = ()
    closed: tuple[int, int] = (NO_TIME, NO_TIME)
    older: list[tuple[int, int, int, int, int]] = []


class _Run(msgspec.Struct, array_like=True):
    """Arrivals of one source partition, one after the other."""

    format: int
    stream: int
    partition: int
    count: int
    first: int
    steps: bytes  # distances of the offsets, int64 little-endian; empty when all are 1


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(JoinLedger)
_run_decoder = msgspec.msgpack.Decoder(_Run)


def read(state: Readable) -> JoinLedger | None:
    """Read the ledger, None before the first micro-batch.

    Raises:
        UnknownFormat: Another release wrote it.
        StateCorrupted: It cannot be decoded.
    """
    data = state.get(_KEY)
    return None if data is None else decode_row(data, _decoder, FORMAT, "the join's ledger")


def write(work: Workspace, ledger: JoinLedger) -> None:
    """Write the ledger."""
    work.put(_KEY, _encoder.encode(ledger))


# -- clocks of late messages ------------------------------------------------------------------------------------------


def put_clocks(work: Workspace, rows: Rows) -> None:
    """Remember the clocks of messages of one side: where a source partition's rises, as `staircase` reads them."""
    if not len(rows):
        return
    rows = rows.in_order()
    rises = np.any([np.diff(part, prepend=part[0] - 1) != 0 for part in (rows.clock, rows.stream, rows.partition)], 0)
    rows = rows.take(np.flatnonzero(rises)[np.argsort(rows.clock[rises], kind="stable")])
    head = _MARK + bytes([rows.side.number])
    keys = clocked_keys(head, rows.clock, rows.stream, rows.partition, rows.offset)
    work.put_many(keys, [_SET] * len(keys))


def _clocks(work: Workspace, side: int, least: int = -(2**63)) -> tuple[list[bytes], tuple[IntArray, ...]]:
    """Give the keys of the remembered clocks at or above one; the clocks, and stream, partition and offset of each."""
    head = _MARK + bytes([side])
    keys, _ = work.scan_arrays(head + fixed_bytes(least), _MARK + bytes([side + 1]))
    return keys, read_clocked(head, keys)


def drop_clocks(work: Workspace, side: int, passed: int) -> None:
    """Forget clocks that every source partition of the other side has reached."""
    if passed == NO_TIME:
        return
    head = _MARK + bytes([side])
    keys, _ = work.scan_arrays(head, head + fixed_bytes(passed + 1))
    work.delete_many(keys)


def drop_unused_clocks(work: Workspace, side: int, stored: Mapping[SourcePartition, Sequence[tuple[int, int]]]) -> None:
    """Forget clocks of messages that are gone: a source partition of the other side may be silent for ever.

    Args:
        work: Where clocks are kept.
        side: The side.
        stored: Per source partition of the side, first and last offset of what is stored together.
    """
    keys, (_, *source, offset) = _clocks(work, side)
    unused = set(range(len(keys)))
    for place, mine in grouped(*source):
        marks = mine[np.argsort(offset[mine], kind="stable")]
        first, last = np.array(stored.get(place, np.empty((0, 2))), np.int64).T
        # the mark at or before the first offset is the first one's clock
        low, high = (np.searchsorted(offset[marks], edge, "right") - 1 for edge in (first, last))
        unused.difference_update(marks[union(np.maximum(low, 0), high)].tolist())
    work.delete_many([keys[at] for at in sorted(unused)])


def staircase(work: Workspace, rows: Rows, least: int) -> IntArray:
    """Give each message the clock at or above one that is known of it or of one before it, else `NO_TIME`.

    Before it is in its source partition.
    """
    found = np.full(len(rows), NO_TIME, np.int64)
    _, (clock, *source, offset) = _clocks(work, rows.side.number, least)
    for (stream, partition), marks in grouped(*source):
        here = np.flatnonzero((rows.stream == stream) & (rows.partition == partition))
        steps = marks[np.argsort(offset[marks], kind="stable")]
        at = np.searchsorted(offset[steps], rows.offset[here], "right") - 1
        found[here] = np.where(at >= 0, clock[steps][np.maximum(at, 0)], NO_TIME)
    return found


# -- retention by size ------------------------------------------------------------------------------------------------


def count_arrivals(work: Workspace, ledger: JoinLedger, rows: Rows) -> None:
    """Number accepted messages in the order of their arrival, and move on what is out of retention by size.

    Args:
        work: Where runs of arrivals are kept.
        ledger: `counted` and `gone` are kept up to date.
        rows: The messages, in the order of the source.
    """
    side, keep = rows.side.number, rows.side.newest
    number = ledger.counted[side]
    total = number + len(rows)
    ledger.counted = (total, ledger.counted[1]) if side == 0 else (ledger.counted[0], total)
    if keep is None or not len(rows):
        return
    for (stream, partition), at in grouped(rows.stream, rows.partition):
        offsets = rows.offset[at]
        steps = np.diff(offsets)
        packed = b"" if (steps == 1).all() else steps.astype("<i8").tobytes()
        run = _Run(FORMAT, stream, partition, len(offsets), int(offsets[0]), packed)
        work.put(_run_key(side, number), _encoder.encode(run))
        number += len(offsets)
    _forget(work, ledger, side, total - keep)


def change_size(work: Workspace, ledger: JoinLedger, side: Side, before: int | None, positions: Positions) -> None:
    """Change a side's retention by size between two starts: what went stays gone.

    Args:
        work: Where runs of arrivals are kept.
        ledger: `gone` and `older` are kept up to date.
        side: The side as it is now.
        before: How many of the newest messages could be joined; None for all.
        positions: The side's source partitions as committed.
    """
    counted = ledger.counted[side.number]
    if side.newest is None:
        ledger.older = [row for row in ledger.older if row[0] != side.number]
        work.delete_many(work.scan_arrays(_run_key(side.number, 0), _RUN + bytes([side.number + 1]))[0])
        return
    if before is None:
        ledger.older += [(side.number, counted, s, p, at.next_offset) for (s, p), at in sorted(positions.items())]
    _forget(work, ledger, side.number, counted - side.newest)


def _forget(work: Workspace, ledger: JoinLedger, side: int, first: int) -> None:
    """Let arrivals before number `first` go."""
    if first <= 0:
        return
    went = [row[2:] for row in ledger.older if row[0] == side and row[1] <= first]
    ledger.older = [row for row in ledger.older if row[0] != side or row[1] > first]
    keys, values = work.scan_arrays(_run_key(side, 0), _run_key(side, first))
    for key, value in zip(keys, values, strict=True):
        run = decode_row(value, _run_decoder, FORMAT, "a run of arrivals")
        offsets, left = _offsets(run), first - int.from_bytes(key[-8:], "big")
        if left >= run.count:
            work.delete(key)
        went.append((run.stream, run.partition, int(offsets[left] if left < run.count else offsets[-1] + 1)))
    gone: dict[SourcePartition, int] = {(s, p): offset for s, p, offset in ledger.gone}
    for stream, partition, offset in went:
        # what went stays gone: under a larger retention, a run of which a part went is looked at again
        gone[stream, partition] = max(offset, gone.get((stream, partition), offset))
    ledger.gone = [(s, p, offset) for (s, p), offset in sorted(gone.items())]


def _offsets(run: _Run) -> IntArray:
    steps = np.frombuffer(run.steps, "<i8") if run.steps else np.ones(run.count - 1, np.int64)
    return run.first + np.concatenate([np.zeros(1, np.int64), np.cumsum(steps)])


def _run_key(side: int, number: int) -> bytes:
    return _RUN + bytes([side]) + number.to_bytes(8, "big")
