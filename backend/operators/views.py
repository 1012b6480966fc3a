"""Looking at windows and messages in retention: SAMZA-552's getWindows and getMessages.

Reads only. Ranges are half-open; the seed's inclusive ranges give the same sets when 1 ms is added to their ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backend.batch import SourcePartition
from backend.operators import ledger
from backend.operators.aligned import Aligned
from backend.operators.arrays import union
from backend.operators.arrivals import started
from backend.operators.panes import Panes
from backend.operators.sliding import Sliding
from backend.workspace import Workspace


@dataclass(frozen=True, slots=True)
class WindowView:
    """A window in retention that has a message.

    Attributes:
        start: First event time in it.
        end: End, exclusive; for sliding windows the last event time, inclusive.
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
    """Give the windows that overlap `[start, end)`, ascending.

    Raises:
        ValueError: The kind of window keeps none by event time.
    """
    if isinstance(kind, Aligned):
        return _aligned(kind, work, start, end)
    if isinstance(kind, Sliding):
        return _sliding(kind, work, start, end)
    raise ValueError(f"get_windows: {type(kind).__name__} windows are not kept by event time")


def _aligned(kind: Aligned, work: Workspace, start: int, end: int) -> list[WindowView]:
    grid, clock = kind.grid, started(ledger.read(work).clock)
    first = max(grid.last_ended_at(start), grid.last_ended_at(clock - kind.spec.retention_ms)) + 1
    last = -(-(end - grid.origin) // grid.step) - 1
    if last < first:
        return []
    panes = Panes(grid, work)
    panes.load(
        np.array([first * grid.panes_per_step]), np.array([last * grid.panes_per_step + grid.panes_per_window - 1])
    )
    found = panes.numbers()
    numbers_ = union(np.maximum(grid.first_window(found), first), np.minimum(grid.last_window(found), last))
    views = []
    for number in numbers_.tolist():
        low = number * grid.panes_per_step
        inside = [panes.known[at] for at in range(low, low + grid.panes_per_window) if at in panes.known]
        offsets: dict[SourcePartition, tuple[int, int]] = {}
        for s, p, lowest, highest in (source for pane in inside for source in pane.sources):
            old = offsets.get((s, p), (lowest, highest))
            offsets[s, p] = (min(old[0], lowest), max(old[1], highest))
        begin = number * grid.step + grid.origin
        views.append(WindowView(begin, begin + grid.size, None, sum(pane.count for pane in inside), offsets))
    return views


def _sliding(kind: Sliding, work: Workspace, start: int, end: int) -> list[WindowView]:
    clock = started(ledger.read(work).clock)
    low = max(start, clock - kind.spec.retention_ms)
    stored = kind.partials.scan_from(work, low)
    own = (stored.skip == 0) & (stored.pane < end + kind.size)
    times = stored.pane[own].tolist()
    keys = [array.to_pylist() for array in kind.group_keys.decode(stored.keys.filter(pa.array(own)))]
    rows = zip(times, zip(*keys, strict=True) if keys else [()] * len(times), strict=True)
    return [WindowView(time - kind.size, time, key) for time, key in rows]


def messages(kind: object, work: Workspace, start: int, end: int, key: Mapping[str, Any] | None = None) -> pa.Table:
    """Give the messages in `[start, end)` in order of (event time, stream, partition, offset).

    Args:
        kind: Must keep messages.
        work: Where.
        start: First event time.
        end: Event time, exclusive.
        key: Only messages with these values of fields; None matches null.

    Raises:
        ValueError: No messages are kept, because every aggregate is incremental; or a field is not kept.
    """
    kept = getattr(kind, "kept", None)
    if not isinstance(kind, (Aligned, Sliding)) or kept is None:
        raise ValueError("get_messages: no messages are kept, because no aggregate needs them (median does)")
    found, _ = kept.read(work, np.array([start]), np.array([end]))
    for name, value in (key or {}).items():
        if name not in found.column_names:
            raise ValueError(f"get_messages: {name!r} is not kept; kept are {found.column_names}")
        column = found.column(name)
        found = found.filter(pc.is_null(column) if value is None else pc.equal(column, pa.scalar(value, column.type)))
    return found
