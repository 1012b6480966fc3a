"""Offsets that a replay leaves out: the newest in the commit record, older ones in rows of their own.

A message that was refused for a reason that a replay does not see (its event time was too far ahead of the clock of its
micro-batch) is named for as long as a replay may reach it, which may be months. A record is written whole with each
commit, so it names `MOST` of them at most, beside those that the operator gives each time; what is more goes into rows
of the region `REJECTED`, each of which is written once::

    stream (2 bytes), partition (4), last offset (8), version (8) -> format (1), width (1), first offset (8), steps

`steps` are the distances from each offset to the next one, little-endian, `width` bytes each. Rows that no replay
reaches any more go when others are written.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec
import numpy as np

from backend.batch import SourcePartition
from backend.errors import unknown_format
from backend.keys import fixed_bytes, to_rows, unpack_fixed
from backend.store.protocol import Region, region_range
from backend.store.rows import StoreRows
from backend.store.workspace import Workspace
from recovery.changelog.protocol import History
from recovery.commit.pointer import CommitRecord

MOST = 1_000
FORMAT = 1
Place = tuple[int, int, int]
_START, _END = region_range(Region.REJECTED)
_KEY_BYTES, _HEAD_BYTES = 23, 10


def carry(
    work: Workspace,
    rejected: Collection[Place],
    given: Collection[Place],
    replay_from: Mapping[SourcePartition, int],
    version: int,
) -> list[Place]:
    """Return what a commit's record names of rejected offsets; what is too much for it is written into rows.

    Args:
        work: The commit's changes.
        rejected: (stream, partition, offset) that the record or the rows have to name.
        given: Those of them that the operator gives with each commit.
        replay_from: Where a replay begins, by source partition.
        version: The commit's.
    """
    older = sorted({*rejected} - {*given})
    if len(older) <= MOST:
        return sorted(rejected)
    keys, _ = work.scan_arrays(_START, _END)
    places = zip(*_columns(keys)[:3], strict=True) if keys else ()
    work.delete_many(
        [
            key
            for key, (stream, partition, last) in zip(keys, places, strict=True)
            if last < replay_from.get((stream, partition), last + 1)
        ]
    )
    offsets: dict[SourcePartition, list[int]] = {}
    for stream, partition, offset in older:
        offsets.setdefault((stream, partition), []).append(offset)
    rows = sorted((_key(place, found[-1], version), _value(found)) for place, found in offsets.items())
    work.put_many([key for key, _ in rows], [value for _, value in rows])
    return sorted(given)


def with_rows(history: History) -> CommitRecord:
    """Return a commit's record with the offsets that stand in rows, too: for a replay, not to be written.

    Raises:
        UnknownFormat: Another release wrote a row.
    """
    rows = StoreRows(history.keys, history.values)
    keys, values = rows.part(rows.find(_START), rows.find(_END)).lists()
    if not keys:
        return history.record
    found = set(history.record.rejected)
    for stream, partition, value in zip(*_columns(keys)[:2], values, strict=True):
        found.update((stream, partition, offset) for offset in _offsets(value))
    return msgspec.structs.replace(history.record, rejected=sorted(found))


def _key(place: SourcePartition, last: int, version: int) -> bytes:
    return _START + fixed_bytes(place[0], "u2") + fixed_bytes(place[1], "i4") + fixed_bytes(last) + fixed_bytes(version)


def _columns(keys: list[bytes]) -> list[list[int]]:
    """Return streams, partitions, last offsets and versions of rows."""
    data = to_rows(keys, _KEY_BYTES)
    parts = ((1, 3, "u2"), (3, 7, "i4"), (7, 15, "i8"), (15, 23, "i8"))
    return [unpack_fixed(data[:, start:end], kind).tolist() for start, end, kind in parts]


def _value(offsets: list[int]) -> bytes:
    steps = np.diff(np.array(offsets, np.int64))
    packed = steps.astype(np.min_scalar_type(int(steps.max(initial=0))).newbyteorder("<"))
    return bytes([FORMAT, packed.dtype.itemsize]) + fixed_bytes(offsets[0]) + packed.tobytes()


def _offsets(value: bytes) -> list[int]:
    if value[:1] != bytes([FORMAT]):
        raise unknown_format("a row of rejected offsets has an unknown format", f"format {value[:1].hex()}", FORMAT)
    [first] = unpack_fixed(to_rows([value[2:_HEAD_BYTES]], 8), "i8").tolist()
    steps = np.frombuffer(value[_HEAD_BYTES:], f"<u{value[1]}").astype(np.int64)
    return (first + np.concatenate([[0], np.cumsum(steps)])).tolist()  # type: ignore[no-any-return]
