"""The rows that were sent of open sessions by number of messages: withdrawn when the sessions have grown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from backend.batch import LAST
from backend.store.reads import get_all
from backend.store.workspace import Workspace
from backend.windows.by_number.rows import LAST_FIELDS, SENT
from backend.windows.columns.arrays import IntArray, Mask
from backend.windows.columns.keyed import keyed
from backend.windows.micro_batch import numbers

if TYPE_CHECKING:
    from backend.windows.by_number.kind import Tuples


class SentSessions:
    """One micro-batch's.

    Args:
        kind: Has the rows' fields: `LAST_FIELDS`, then the aggregates.
        work: The state.
        codes: Group keys; rows are told by their places here.
    """

    def __init__(self, kind: Tuples, work: Workspace, codes: pa.Array) -> None:
        self._kind, self._work, self._codes = kind, work, codes
        self._row, self._rows = np.full(len(codes), -1, np.int64), kind.sent_schema.empty_table()

    def take(self, wanted: Mask) -> None:
        """Read rows, and delete them: those that are still good are put again."""
        at = np.flatnonzero(wanted)
        if not len(at):
            return
        names = keyed(SENT, self._codes.take(pa.array(at)))
        values = get_all(self._work, names, "the row that was sent of a session is missing")
        self._work.delete_many(names)
        self._row[at], self._rows = np.arange(len(at)), self._kind.sent_codec.decode(values)

    def grown(self, at: IntArray, edges: Mapping[str, IntArray]) -> tuple[IntArray, dict[str, IntArray], pa.Table]:
        """Give which sessions have another last message than the row that was sent, with what that one said.

        Args:
            at: Sessions.
            edges: Where they begin and end, as `EDGES`.

        Returns:
            Which of them have, columns as `LAST`, aggregates.
        """
        known = np.flatnonzero(self._row[at] >= 0)
        rows = self._rows.take(pa.array(self._row[at[known]]))
        last = {name: numbers(rows, f"_{name}") for name in LAST}
        other = np.logical_or.reduce([last[name] != edges[name][known] for name in LAST])
        values = rows.drop_columns([field.name for field in LAST_FIELDS]).filter(pa.array(other))
        return known[other], {name: column[other] for name, column in last.items()}, values

    def put(self, at: IntArray, edges: Mapping[str, IntArray], values: pa.Table, stay: Mask) -> None:
        """Keep what is sent of sessions that stay open."""
        rows = pa.array(np.flatnonzero(stay))
        if len(rows):
            last = [pa.array(edges[field.name[1:]], field.type) for field in LAST_FIELDS]
            named = (values.column(name) for name in self._kind.spec.aggregates)
            table = pa.table([*last, *named], schema=self._kind.sent_schema).take(rows)
            names = keyed(SENT, self._codes.take(pa.array(at)).take(rows))
            self._work.put_many(names, self._kind.sent_codec.encode(table))
