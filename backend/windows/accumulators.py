"""Accumulators: one row per (pane, skip, group key), however many windows overlap.

Key: `Region.AGGREGATES`, the pane's start, the skip, the group key (backend.windows.columns.grouping has
the bytes).
Value: the columns of the incremental aggregates' accumulators and

* `_first_clock` (int64): the watermark before the first message of the row. A window had this group key in time iff
  that is before its end, so nothing needs to be kept per window to tell whether its full result was sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from backend.aggregates import IncrementalPlan
from backend.rows import RowCodec
from backend.store.protocol import Readable, Region, region_range
from backend.store.reads import get_present, scan_ranges
from backend.store.workspace import Workspace
from backend.windows.columns.arrays import IntArray, runs
from backend.windows.columns.grouping import join_keys, split_keys, start_bytes
from backend.windows.columns.rows import Rows
from backend.windows.definitions import Assigner

FIRST_CLOCK = "_first_clock"
_CLOCK_FIELD = pa.field(FIRST_CLOCK, pa.int64(), nullable=False)


@dataclass(frozen=True, slots=True)
class Stored(Rows):
    """Accumulators as read.

    Attributes:
        pane: Pane numbers.
        skip: Skips.
        keys: Encoded group keys, binary.
        table: Accumulator columns and `FIRST_CLOCK`.
    """

    pane: IntArray
    skip: IntArray
    keys: pa.Array
    table: pa.Table


class AccumulatorStore:
    """Reads and writes accumulators.

    Args:
        grid: Numbers the panes.
        plan: The incremental aggregates.
        skip_bytes: Width of a skip in keys.
    """

    def __init__(self, grid: Assigner, plan: IncrementalPlan, *, skip_bytes: int = 2) -> None:
        self._grid, self._skip_bytes = grid, skip_bytes
        self._codec = RowCodec(pa.schema([*plan.accumulator_schema, _CLOCK_FIELD]))

    def scan_ranges(self, state: Readable, first_panes: IntArray, last_panes: IntArray) -> Stored:
        """Read everything in closed ranges of panes, once."""
        edges = zip(*(ends.tolist() for ends in runs(first_panes, last_panes)), strict=True)
        keys, values, _ = scan_ranges(state, ((self._start(first), self._start(last + 1)) for first, last in edges))
        return self._decode(keys, values)

    def scan_from(self, state: Readable, pane: int) -> Stored:
        """Read everything from a pane on."""
        return self._decode(*state.scan_arrays(self._start(pane), region_range(Region.AGGREGATES)[1]))

    def least_skip(self, state: Readable, pane: int) -> int:
        """Give the smallest skip in a pane that has a row."""
        key, _ = next(state.scan(self._start(pane), self._start(pane + 1)))
        return int(split_keys([key], skip_bytes=self._skip_bytes)[1][0])

    def get(self, state: Readable, panes: IntArray, skips: IntArray, keys: pa.Array) -> Stored:
        """Read single rows; those that are not there are left out."""
        return self._decode(*get_present(state, self._keys(panes, skips, keys)))

    def put(self, work: Workspace, panes: IntArray, skips: IntArray, keys: pa.Array, table: pa.Table) -> None:
        """Write rows; they are in order of key when sorted by pane, skip, group key."""
        work.put_many(self._keys(panes, skips, keys), self._codec.encode(table))

    def delete(self, work: Workspace, panes: IntArray, skips: IntArray, keys: pa.Array) -> None:
        """Delete rows; those that are not there do not matter."""
        work.delete_many(self._keys(panes, skips, keys))

    def _keys(self, panes: IntArray, skips: IntArray, keys: pa.Array) -> list[bytes]:
        return join_keys(Region.AGGREGATES, self._grid.pane_starts(panes), keys, skips, skip_bytes=self._skip_bytes)

    def _start(self, pane: int) -> bytes:
        return start_bytes(Region.AGGREGATES, self._grid.pane_start(pane))

    def _decode(self, keys: Sequence[bytes], values: Sequence[bytes]) -> Stored:
        starts, skips, group_keys = split_keys(keys, skip_bytes=self._skip_bytes)
        return Stored(self._grid.pane_of(starts), skips, group_keys, self._codec.decode(values))


def with_clock(accumulators: pa.Table, clock: IntArray) -> pa.Table:
    """Give accumulators with the watermark before the first message of each."""
    return accumulators.append_column(_CLOCK_FIELD, pa.array(clock))
