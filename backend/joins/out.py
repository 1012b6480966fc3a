"""Rows of a join's results: built from both sides' fields, and held back where an update period asks for it.

Held rows lie in `Region.AGGREGATES`, in the changelog, until their period has passed by batch time::

    region, kind (1 byte: 0 on time, 1 late), sequence (8)  ->  the row, as backend.rows writes it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backend.joins.fields import out_columns
from backend.joins.sides import LEFT, RIGHT
from backend.joins.spec import JoinSpec
from backend.joins.state import JoinLedger
from backend.rows import RowCodec
from backend.store.protocol import Region
from backend.store.reads import scan_ranges
from backend.store.workspace import Workspace
from backend.windows.columns.arrays import IntArray, Mask

ON_TIME, LATE = 0, 1

Half = tuple[IntArray, pa.Table]
"""Event times and fields of one side's rows."""

_WAITING = bytes([Region.AGGREGATES])


class Out:
    """Makes result rows, and keeps those that are to come later.

    Args:
        spec: The join.
    """

    def __init__(self, spec: JoinSpec) -> None:
        self.schema = spec.result_schema()
        self._columns = out_columns(*spec.sides)
        self._codec = RowCodec(self.schema)
        self._periods = (spec.on_time_ms, spec.late_ms)

    def table(self, reasons: npt.NDArray[np.str_], halves: Mapping[int, Half]) -> pa.Table:
        """Give rows of one or both sides' halves; a side that has none is missing in all of them."""
        count = len(reasons)
        times = [pa.array(halves[side][0]) if side in halves else pa.nulls(count, pa.int64()) for side in (LEFT, RIGHT)]
        columns = [pa.array(reasons, pa.string()), pa.array(np.zeros(count, np.int32)), *times]
        for field, names in self._columns:
            found = [halves[side][1].column(name) for side, name in names.items() if side in halves]
            columns.append(found[0].cast(field.type) if found else pa.nulls(count, field.type))
        return pa.table(columns, schema=self.schema)

    def release(
        self, work: Workspace, ledger: JoinLedger, rows: Sequence[tuple[pa.Table, Mask]], now_ms: int, *, drain: bool
    ) -> list[pa.Table]:
        """Take the pairs of a micro-batch, and give those that are to be sent now, in the order in which they came.

        Args:
            work: Where held rows are.
            ledger: Its `waiting_ms` and `sequence` are kept up to date.
            rows: Pairs, and which of them came late.
            now_ms: Batch time.
            drain: Hold nothing back.
        """
        if not any(self._periods) and ledger.waiting_ms == (None, None):
            return [table for table, _ in rows]
        oldest = [
            now_ms if waiting is None and any((late == bool(kind)).any() for _, late in rows) else waiting
            for kind, waiting in enumerate(ledger.waiting_ms)
        ]
        due = [
            waiting is not None and (drain or now_ms - waiting >= period)
            for waiting, period in zip(oldest, self._periods, strict=True)
        ]
        sent = self._stored(work, [kind for kind in (ON_TIME, LATE) if due[kind]])
        for table, late in rows:
            now = np.where(late, due[LATE], due[ON_TIME])
            if now.any():
                sent.append(table if now.all() else table.filter(pa.array(now)))
            if not now.all():
                self._hold(work, ledger, table.filter(pa.array(~now)), late[~now])
        ledger.waiting_ms = (None if due[ON_TIME] else oldest[ON_TIME], None if due[LATE] else oldest[LATE])
        return sent

    def due_ms(self, ledger: JoinLedger) -> int | None:
        """Give the batch time at which held rows are to be sent."""
        times = [
            waiting + period
            for waiting, period in zip(ledger.waiting_ms, self._periods, strict=True)
            if waiting is not None
        ]
        return min(times, default=None)

    def _hold(self, work: Workspace, ledger: JoinLedger, table: pa.Table, late: Mask) -> None:
        numbers = range(ledger.sequence, ledger.sequence + table.num_rows)
        keys = [_key(int(kind), number) for kind, number in zip(late.tolist(), numbers, strict=True)]
        work.put_many(keys, self._codec.encode(table))
        ledger.sequence += table.num_rows

    def _stored(self, work: Workspace, kinds: Sequence[int]) -> list[pa.Table]:
        keys, values, _ = scan_ranges(work, [(_key(kind, 0), _WAITING + bytes([kind + 1])) for kind in kinds])
        if not keys:
            return []
        work.delete_many(keys)
        rows = sorted(zip(keys, values, strict=True), key=lambda row: row[0][2:])
        return [self._codec.decode([value for _, value in rows])]


def _key(kind: int, number: int) -> bytes:
    return _WAITING + bytes([kind]) + number.to_bytes(8, "big")
