"""Looking at windows and messages in retention: SAMZA-552's getWindows and getMessages.

Reads only. Ranges are half-open: event times for windows over time and sessions, offsets for windows by number of
messages (of every source partition); messages of windows over time by either. The seed's inclusive ranges give the same
sets when 1 is added to their ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backend.batch import MAX_TIME, MIN_TIME, OFFSET, TIME, SourcePartition
from backend.python_rows import python_values
from backend.store.protocol import Region
from backend.store.workspace import Workspace
from backend.texts import one_line
from backend.windows.aligned.kind import Aligned
from backend.windows.by_number.kind import Tuples
from backend.windows.by_number.rows import all_counters
from backend.windows.columns.arrays import union
from backend.windows.columns.grouping import start_of
from backend.windows.columns.keyed import split_numbered
from backend.windows.count_retention import NONE_GONE
from backend.windows.merging.kind import Sessions
from backend.windows.merging.rows import codes_of
from backend.windows.panes import Panes, ranges
from backend.windows.sliding.kind import Sliding

_OFFSETS = ("_start_offset", "_last_offset")


@dataclass(frozen=True, slots=True)
class WindowView:
    """A window in retention that has a message.

    Attributes:
        start: First event time in it; of windows by number of messages the first offset.
        end: End, exclusive; for sliding windows and sessions the last event time, inclusive; of windows by number of
            messages the last offset so far, inclusive.
        key: Group key for windows that each key has for itself, None for shared ones.
        messages: Messages in it; None where they are not counted per window.
        offsets: Per source partition the smallest and the largest offset in it; empty where they are not kept.
    """

    start: int
    end: int
    key: tuple[Any, ...] | None = None
    messages: int | None = None
    offsets: Mapping[SourcePartition, tuple[int, int]] = field(default_factory=dict)


def windows(kind: object, work: Workspace, start: int, end: int) -> list[WindowView]:
    """Give the windows that overlap `[start, end)`, ascending by start.

    Windows by number of messages are kept while they are open. Their sliding kind has a window per message, none of
    which is open, and gives none.
    """
    if isinstance(kind, Aligned):
        return _aligned(kind, work, start, end)
    if isinstance(kind, Sliding):
        found = _sliding(kind, work, start, end)
    elif isinstance(kind, Sessions):
        found = _sessions(kind, work, start, end)
    else:
        assert isinstance(kind, Tuples)
        found = _tuples(kind, work, start, end)
    return sorted(found, key=lambda view: (view.start, view.end))


def _aligned(kind: Aligned, work: Workspace, start: int, end: int) -> list[WindowView]:
    grid = kind.grid
    first = max(grid.last_ended_at(max(start, MIN_TIME)) + 1, _first_retained(kind, work))
    last = grid.last_begun_at(min(end - 1, MAX_TIME))
    if last < first:
        return []
    panes = Panes(grid, work)
    panes.load_range(first * grid.panes_per_step, last * grid.panes_per_step + grid.panes_per_window - 1)
    found = panes.numbers()
    numbers_ = union(np.maximum(grid.first_window(found), first), np.minimum(grid.last_window(found), last))
    views = []
    edges = zip(numbers_.tolist(), grid.starts(numbers_).tolist(), grid.ends(numbers_).tolist(), strict=True)
    for number, begin, stop in edges:
        low = number * grid.panes_per_step
        edges_ = np.searchsorted(found, (low, low + grid.panes_per_window))
        inside = [panes.known[at] for at in found[slice(*edges_)].tolist()]
        offsets = ranges(source for pane in inside for source in pane.sources)
        views.append(WindowView(begin, stop, None, sum(pane.count for pane in inside), offsets))
    return views


def _first_retained(kind: Aligned | Sliding, work: Workspace) -> int:
    """Give the first window that is not gone, as the state says: today's retention may be another one than before."""
    bound = work.bounds.get(Region.REVISIONS)
    return NONE_GONE + 1 if bound is None else kind.grid.last_begun_at(start_of(bound))


def _sliding(kind: Sliding, work: Workspace, start: int, end: int) -> list[WindowView]:
    low, end = max(start, MIN_TIME, _first_retained(kind, work)), min(end, MAX_TIME + 1)
    stored = kind.accumulators.scan_from(work, low)
    own = (stored.skip == 0) & (stored.pane < end + kind.size)
    times = stored.pane[own].tolist()
    keys = _keys(kind.group_keys.decode(stored.keys.filter(pa.array(own))), len(times))
    return [WindowView(time - kind.size, time, key) for time, key in zip(times, keys, strict=True)]


def _sessions(kind: Sessions, work: Workspace, start: int, end: int) -> list[WindowView]:
    stored = kind.all_sessions(work)
    inside = (stored.last >= start) & (stored.first < end)
    firsts, lasts = stored.first[inside].tolist(), stored.last[inside].tolist()
    codes = codes_of(stored.idents).filter(pa.array(inside))
    found = _keys(kind.keys.decode(codes), len(firsts))
    return [WindowView(first, last, key) for first, last, key in zip(firsts, lasts, found, strict=True)]


def _tuples(kind: Tuples, work: Workspace, start: int, end: int) -> list[WindowView]:
    """Give open windows: those whose first pane is kept."""
    keys, values = work.scan_arrays(bytes([Region.WINDOWS]), bytes([Region.WINDOWS + 1]))
    if kind.sliding or not keys:
        return []
    codes, panes = split_numbered(keys)
    table = kind.codec.decode(values)
    firsts, lasts = (table.column(name).to_pylist() for name in _OFFSETS)
    counted, counters = all_counters(work)
    next_of = dict(zip((key[2:] for key in counted), counters["next"].tolist(), strict=True))
    coded, offsets = codes.to_pylist(), dict[bytes, dict[int, tuple[int, int]]]()
    key_of = dict(zip(coded, _keys(kind.keys.decode(codes), len(keys)), strict=True))
    for code, pane, first, last in zip(coded, panes.tolist(), firsts, lasts, strict=True):
        offsets.setdefault(code, {})[pane] = (first, last)
    views = []
    for code, found in offsets.items():
        for pane in (pane for pane in found if pane * kind.pane % kind.step == 0):
            inside = [found[at] for at in range(pane, pane + kind.size // kind.pane) if at in found]
            low, high = inside[0][0], inside[-1][1]
            if high >= start and low < end:
                came = min(next_of[code] - pane * kind.pane, kind.size)
                views.append(WindowView(low, high, key_of[code], came))
    return views


def _keys(arrays: list[pa.Array], count: int) -> list[tuple[Any, ...]]:
    return list(zip(*map(python_values, arrays), strict=True)) if arrays else [()] * count


def messages(
    kind: object,
    work: Workspace,
    start: int,
    end: int,
    key: Mapping[str, Any] | None = None,
    by: str | None = None,
) -> pa.Table:
    """Give the messages in `[start, end)`, in order of the store's keys.

    A range of event time is read alone from the store of windows over time; for any other one all is looked at.

    Args:
        kind: Must keep messages.
        work: Where.
        start: First event time, or offset.
        end: Exclusive.
        key: Only messages with these values of fields; None matches null.
        by: What the range is of: `"time"`, or `"offset"`, of every source partition. None: what the windows count;
            windows by number of messages keep no times.

    Raises:
        ValueError: No messages are kept, because every aggregate is incremental; or a field is not kept, or cannot have
            the value; or `by` is neither.
    """
    axes = {"offset": OFFSET} if isinstance(kind, Tuples) else {"time": TIME, "offset": OFFSET}
    if by not in (None, *axes):
        raise ValueError(f"get_messages: by={by!r}: allowed are None, {' and '.join(map(repr, axes))}")
    column_name = axes[by] if by is not None else next(iter(axes.values()))
    if isinstance(kind, (Aligned, Sliding)) and kind.message_store is not None:
        low, high = (start, end) if column_name == TIME else (MIN_TIME, MAX_TIME + 1)
        found, _ = kind.message_store.read(work, np.array([low]), np.array([high]))
    elif isinstance(kind, (Sessions, Tuples)) and kind.message_store is not None:
        rows = kind.message_store.read(work, [(bytes([Region.MESSAGES]), bytes([Region.MESSAGES + 1]))])
        found = kind.message_store.table(rows)
    else:
        raise ValueError("get_messages: no messages are kept, because no aggregate needs them (median does)")
    column = found.column(column_name)
    found = found.filter(pc.and_(pc.greater_equal(column, start), pc.less(column, end)))
    if not isinstance(key, Mapping | None):
        raise ValueError(f"get_messages: key={key!r}: allowed are None and values by field, such as {{'user': 'ann'}}")
    for name, value in (key or {}).items():
        if name not in found.column_names:
            raise ValueError(f"get_messages: {name!r} is not kept; kept are {found.column_names}")
        column = found.column(name)
        try:
            wanted = pa.scalar(value, column.type)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"get_messages: key {name!r} of type {column.type}: {one_line(str(error))}") from None
        if not wanted.is_valid:
            found = found.filter(pc.is_null(column))
        elif wanted != wanted:  # a NaN: one group, whatever its bits  # noqa: PLR0124
            found = found.filter(pc.is_nan(column))
        else:
            found = found.filter(pc.equal(column, wanted))
    return found
