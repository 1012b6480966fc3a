"""Revisions: what was sent of a (window, group key), and what waits to be sent.

Rows exist only where the usual does not hold. Without a row, an open window was never sent; a closed one was sent once,
with reason `full`, if its group key had a message in time, else never.

Key: `Region.REVISIONS`, the window's start, the group key (backend.windows.columns.grouping has the
bytes). Value (format 2)::

    +--------+---------------+---------+---------------------+------------------+
    | format | next revision | pending | pending since, ms   | unsent messages  |
    | 1 byte | int32         | 1 byte  | int64 (batch time)  | int64            |      all big-endian
    +--------+---------------+---------+---------------------+------------------+

Format 1 had no unsent messages, and is read.
A next revision of `UNKNOWN` is the usual one: told from the group key's first message when the row is next sent.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backend.rows import fixed_rows, fixed_values
from backend.store.protocol import Readable, Region, region_range
from backend.store.reads import get_present
from backend.store.workspace import Workspace
from backend.windows.columns.arrays import IntArray, Mask
from backend.windows.columns.grouping import join_keys, split_keys
from backend.windows.columns.rows import Rows

FORMAT = 2
UNKNOWN = -1
_UNSENT_BYTES = 8
_ROW = np.dtype([("format", "u1"), ("next", ">i4"), ("pending", "u1"), ("since", ">i8"), ("unsent", ">i8")])


@dataclass(frozen=True, slots=True)
class Revisions(Rows):
    """Rows of revisions; all arrays as long as one another.

    Attributes:
        starts: Window starts, milliseconds.
        keys: Encoded group keys, binary.
        next: Next revision, or `UNKNOWN`.
        pending: Something waits to be sent.
        since: Batch time of the oldest unsent update; meaningless when nothing is pending.
        unsent: Messages since the last row, where the early policy counts them; 0 when nothing is pending.
    """

    starts: IntArray
    keys: pa.Array
    next: IntArray
    pending: Mask
    since: IntArray
    unsent: IntArray

    def changed(self, at: IntArray, following: IntArray, pending: Mask, since: IntArray, unsent: IntArray) -> Mask:
        """Return which of new rows differ from those at positions here, -1 for none; the rest is as in the fields."""
        known = np.flatnonzero(at >= 0)
        old = at[known]
        differ = (self.next[old] != following[known]) | (self.pending[old] != pending[known])
        waits = (self.since[old] != since[known]) | (self.unsent[old] != unsent[known])
        changed = np.ones(len(at), np.bool_)
        changed[known] = differ | (pending[known] & waits)
        return changed


def scan(state: Readable, start: bytes, end: bytes) -> Revisions:
    """Read the rows of `[start, end)`."""
    return _decode(*state.scan_arrays(start, end))


def pending(state: Readable, ranges: Sequence[tuple[bytes, bytes]]) -> Revisions:
    """Read what waits of all rows, and whatever lies in `[start, end)` ranges of keys."""
    keys, values = state.scan_arrays(*region_range(Region.REVISIONS))
    wanted = _rows(values)["pending"].astype(np.bool_)
    for start, end in ranges:
        wanted[bisect_left(keys, start) : bisect_left(keys, end)] = True
    at = np.flatnonzero(wanted).tolist()
    return _decode([keys[row] for row in at], [values[row] for row in at])


def get(state: Readable, starts: IntArray, keys: pa.Array) -> Revisions:
    """Read single rows; those that are not there are left out."""
    if not len(starts):
        return empty()
    return _decode(*get_present(state, join_keys(Region.REVISIONS, starts, keys)))


@cache
def empty() -> Revisions:
    """Give no rows; nobody changes them."""
    return _decode([], [])


def delete(work: Workspace, rows: Revisions) -> None:
    """Delete rows."""
    work.delete_many(join_keys(Region.REVISIONS, rows.starts, rows.keys))


def put(work: Workspace, rows: Revisions) -> None:
    """Write rows."""
    if not len(rows):
        return
    packed = np.zeros(len(rows), _ROW)
    packed["format"], packed["next"], packed["pending"] = FORMAT, rows.next, rows.pending
    packed["since"], packed["unsent"] = (np.where(rows.pending, column, 0) for column in (rows.since, rows.unsent))
    work.put_many(join_keys(Region.REVISIONS, rows.starts, rows.keys), fixed_values(packed))


def _rows(values: Sequence[bytes]) -> npt.NDArray[np.void]:
    older = _ROW.itemsize - _UNSENT_BYTES
    if older in map(len, values):
        now = bytes([FORMAT])
        values = [now + v[1:] + bytes(_UNSENT_BYTES) if len(v) == older and v[0] == 1 else v for v in values]
    return fixed_rows(values, _ROW, FORMAT, "a row of revisions")


def _decode(keys: Sequence[bytes], values: Sequence[bytes]) -> Revisions:
    rows = _rows(values)
    starts, _, group_keys = split_keys(keys)
    return Revisions(
        starts,
        group_keys,
        rows["next"].astype(np.int64),
        rows["pending"].astype(np.bool_),
        rows["since"].astype(np.int64),
        rows["unsent"].astype(np.int64),
    )
