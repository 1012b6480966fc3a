"""Looking at one side of a join: SAMZA-552's getWindows and getMessages, in all their forms.

Reads only; what is out of retention is not shown. Ranges are half-open: event times for joins by time, offsets of every
source partition for joins by number. The seed's inclusive ranges give the same sets when 1 is added to their ends.

======================================================== =============================================================
SAMZA-552                                                here, of one side
======================================================== =============================================================
getWindows(startTime, endTime)                           `get_windows(start, end)`
getWindows(sessKey, startTime, endTime)                  `get_windows(start, end, session_key=...)`
getMessages(start, end)                                  `get_messages(start, end)`
getMessages(start, end, joinKeys)                        `get_messages(start, end, join_keys=...)`
getMessages(sessKey, start, end)                         `get_messages(start, end, session_key=...)`
getMessages(sessKey, start, end, joinKeys)               `get_messages(start, end, session_key=..., join_keys=...)`
======================================================== =============================================================

The four forms of getMessages are by event time for joins by time and by offset for joins by number: eight in all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backend.batch import OFFSET, PARTITION, STREAM, TIME
from backend.joins import state
from backend.joins.rows import JoinRows, Rows, offsets_of
from backend.joins.sides import Side
from backend.joins.spec import JoinSpec
from backend.keys import encode_columns
from backend.messages.keys import INDEX, MESSAGES, clock_range
from backend.messages.layout import Part
from backend.store.protocol import region_range
from backend.store.workspace import Workspace
from backend.windows.columns.arrays import grouped, union
from backend.windows.views import WindowView


class SideView:
    """One side of a join, to be looked at.

    Args:
        spec: The join.
        side: The side.
        work: Its state.
    """

    def __init__(self, spec: JoinSpec, side: Side, work: Workspace) -> None:
        self._spec, self._side, self._work = spec, side, work
        self._rows = JoinRows(spec)

    def get_messages(self, start: int, end: int, *, join_keys: Any = None, session_key: Any = None) -> pa.Table:
        """Give the messages in `[start, end)` that can still be joined.

        Args:
            start: First event time; of joins by number the first offset.
            end: Exclusive.
            join_keys: Value of the equal field, or a tuple of them in the order of `on`; None for all.
            session_key: Value of the session key, or a tuple; None for all.

        Returns:
            `_stream`, `_partition`, `_offset`, `_time` and the side's fields, by event time (by number: not) and then
            in the order of the source.

        Raises:
            ValueError: The join has no equal fields, or no session windows, or a value does not fit.
        """
        rows = self._read(start, end, join_keys, session_key)
        order = np.arange(len(rows)) if self._spec.by_number else np.argsort(rows.time, kind="stable")
        rows = rows.take(order)
        place = [pa.array(column) for column in (rows.stream, rows.partition, rows.offset, rows.time)]
        fields = self._rows.fields(rows, np.arange(len(rows)))
        return pa.table([*place, *fields.columns], [STREAM, PARTITION, OFFSET, TIME, *fields.column_names])

    def get_windows(self, start: int, end: int, *, session_key: Any = None) -> list[WindowView]:
        """Give the windows that overlap `[start, end)` and have a message that can still be joined, ascending.

        Args:
            start: First event time; of joins by number the first offset.
            end: Exclusive.
            session_key: For session windows: value of the session key, or a tuple; None for all.

        Returns:
            For windows by number the start is the first offset in the window and the end the last one, for one window
            per source partition each. A side without windows has one that holds all its messages.

        Raises:
            ValueError: As for `get_messages`.
        """
        rows = self._read(None, None, None, session_key)
        found: list[WindowView] = []
        inclusive = self._spec.by_number or self._side.grid is None  # whether the end of a window is in it
        parts = [rows]
        if self._spec.by_number:
            parts = [rows.take(here) for _, here in grouped(rows.stream, rows.partition)]
        for key, some in (group for part in parts for group in self._by_session(part)):
            views = self._windows(some, key)
            found += [view for view in views if view.start < end and view.end + inclusive > start]
        return sorted(found, key=lambda view: (view.start, view.end, str(view.key)))

    # -- reading --------------------------------------------------------------------------------------------------

    def _read(self, start: int | None, end: int | None, join_keys: Any, session_key: Any) -> Rows:
        """Read the messages of a range of event time or offsets, in the order of the source."""
        equal = self._code(join_keys, range(len(self._side.on)), "join_keys", "equal fields")
        session = self._code(session_key, self._spec.session_key, "session_key", "session windows")
        keys, values = self._scan(start, end, equal, session)
        rows = self._rows.split(keys, values)[self._side.number]
        ledger = state.read(self._work)
        if ledger is None:
            return rows.take(np.empty(0, np.int64))
        place = rows.time
        if self._spec.by_number:
            rows.number_from(ledger.firsts)
            place = rows.offset
        gone = offsets_of(ledger.gone, rows.stream, rows.partition)
        picked = (rows.at >= ledger.lows[self._side.number]) & (rows.offset >= gone)
        if start is not None:
            picked &= place >= start
        if end is not None:
            picked &= place < end
        if equal is not None and rows.equal is not None:
            picked &= pc.equal(rows.equal, pa.scalar(equal, pa.binary())).to_numpy(zero_copy_only=False)
        rows = rows.where(picked)
        if session is None or not len(rows):
            return rows
        codes = self._session_codes(rows)
        return rows.where(pc.equal(codes, pa.scalar(session, pa.binary())).to_numpy(zero_copy_only=False))

    def _scan(
        self, start: int | None, end: int | None, equal: bytes | None, session: bytes | None
    ) -> tuple[Sequence[bytes], Sequence[bytes]]:
        """Read the narrowest range that the layout has for what is asked."""
        layout = self._spec.layout
        codes = {Part.SESSION: session, Part.EQUAL: equal}
        leading = [codes[part] for part in layout.leading]
        if not layout.timed:
            start = end = None
        if None not in leading:
            prefix = MESSAGES + b"".join(code for code in leading if code is not None)
            return self._work.scan_arrays(*clock_range(prefix, start, end))
        if start is None and end is None:
            return self._work.scan_arrays(*region_range(MESSAGES[0]))
        index, _ = self._work.scan_arrays(*clock_range(INDEX, start, end))
        keys = sorted(MESSAGES + key[9:] for key in index)
        return keys, [value or b"" for value in self._work.get_many(keys)]

    def _code(self, values: Any, places: Sequence[int], option: str, what: str) -> bytes | None:
        if values is None:
            return None
        given = values if isinstance(values, tuple) else (values,)
        if not places or len(given) != len(places):
            names = [self._side.on[at] for at in places]
            raise ValueError(f"{option}={values!r}: the join has {what} {names}; give a value for each")
        kinds = [self._side.schema.field(self._side.on[at]).type for at in places]
        try:
            columns = [pa.array([value], kind) for value, kind in zip(given, kinds, strict=True)]
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise ValueError(f"{option}={values!r}: {error}; allowed are values of {kinds}") from None
        code: bytes = encode_columns(columns)[0].as_py()
        return code

    # -- windows --------------------------------------------------------------------------------------------------

    def _session_codes(self, rows: Rows) -> pa.Array:
        fields = self._rows.fields(rows, np.arange(len(rows)))
        return encode_columns([fields.column(self._side.on[at]) for at in self._spec.session_key])

    def _by_session(self, rows: Rows) -> Iterable[tuple[tuple[Any, ...] | None, Rows]]:
        """Give the messages of each session key; all of them where the side has no sessions."""
        if self._side.window is None or self._side.window.kind != "session" or not len(rows):
            yield None, rows
            return
        coded = self._session_codes(rows).dictionary_encode()
        for one in range(len(coded.dictionary)):
            some = rows.take(np.flatnonzero(coded.indices.to_numpy() == one))
            first = self._rows.fields(some, np.zeros(1, np.int64))
            yield tuple(first.column(self._side.on[at])[0].as_py() for at in self._spec.session_key), some

    def _windows(self, rows: Rows, key: tuple[Any, ...] | None) -> Iterable[WindowView]:
        """Give the windows of messages, which are of one source partition for joins by number."""
        if not len(rows):
            return
        at, window, grid = rows.at, self._side.window, self._side.grid
        if window is None:
            spans = [(int(at.min()), int(at.max()), np.arange(len(at)))]
        elif grid is not None:
            panes = grid.pane_of(at)
            starts = grid.starts(union(grid.first_window(panes), grid.last_window(panes)))
            spans = [(s, s + grid.size, np.flatnonzero((at >= s) & (at < s + grid.size))) for s in starts.tolist()]
        elif window.kind == "session":
            order = np.argsort(at, kind="stable")
            cuts = np.flatnonzero(np.diff(at[order]) > window.size) + 1
            spans = [(int(at[some].min()), int(at[some].max()), some) for some in np.split(order, cuts)]
        else:
            back = window.size - 1 if self._spec.by_number else window.size
            spans = [(t - back, t, np.flatnonzero((at >= t - back) & (at <= t))) for t in np.unique(at).tolist()]
        for low, high, some in spans:
            mine = rows.take(some)
            offsets = {
                source: (int(mine.offset[of].min()), int(mine.offset[of].max()))
                for source, of in grouped(mine.stream, mine.partition)
            }
            edges = next(iter(offsets.values())) if self._spec.by_number else (low, high)
            yield WindowView(*edges, key, len(mine), offsets)
