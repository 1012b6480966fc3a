"""Which rows are bad input by their times alone: the rule of `max_ahead`.

An event time is too far ahead iff it is later than `min(r, batch time) + max_ahead`; r is the record's own timestamp if
it has one (at least 0), else the batch time. So an old archive is judged as the live topic was: by when a message was
written, not by when it is read. Batch times are logged by Spark, so a micro-batch that runs again judges the same.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backend.batch import MAX_EVENT_TIME, MIN_EVENT_TIME
from backend.windows.columns.arrays import IntArray

Reasons = npt.NDArray[np.object_]


def judge(times: pa.Array, timestamps: pa.Array, time_ms: int, max_ahead_ms: int | None) -> Reasons | None:
    """Return the reason per row that is bad by its times, None for good rows; None when all are good.

    Args:
        times: Event times, int64 milliseconds; null for none.
        timestamps: The records' own, int64 milliseconds; null or negative for none.
        time_ms: The batch time that Spark logged.
        max_ahead_ms: None switches the check off.
    """
    known = filled(times, 0)
    own = filled(timestamps, -1)
    if not len(known) or (not times.null_count and _all_good(known, own, time_ms, max_ahead_ms)):
        return None
    out_of_range = (known < MIN_EVENT_TIME) | (known > MAX_EVENT_TIME)
    ahead = known > latest(own, time_ms, max_ahead_ms) if max_ahead_ms is not None else np.zeros(len(known), np.bool_)
    if not times.null_count and not ahead.any() and not out_of_range.any():
        return None
    reasons = np.full(len(known), None, dtype=object)
    reasons[ahead] = "in_future"
    reasons[out_of_range] = "out_of_range"
    reasons[np.asarray(times.is_null())] = "no_event_time"
    return reasons


def _all_good(times: IntArray, own: IntArray, time_ms: int, max_ahead_ms: int | None) -> bool:
    """Return whether the ends tell that all are good: the usual case, without a comparison per row."""
    newest = int(times.max())
    if int(times.min()) < MIN_EVENT_TIME or newest > MAX_EVENT_TIME:
        return False
    if max_ahead_ms is None:
        return True
    oldest = int(own.min())
    return oldest >= 0 and newest <= min(oldest, time_ms) + max_ahead_ms


def filled(column: pa.Array, instead: int) -> IntArray:
    """Return a column of numbers, with one in place of nulls."""
    return np.asarray(column.fill_null(instead) if column.null_count else column, dtype=np.int64)


def latest(timestamps: IntArray, time_ms: int, max_ahead_ms: int) -> IntArray:
    """Return the latest event time that is not too far ahead, for each of the records' own timestamps.

    >>> latest(np.array([50, 100, 150, -1]), 100, 10).tolist()
    [60, 110, 110, 110]
    """
    own: IntArray = np.where(timestamps < 0, time_ms, np.minimum(timestamps, time_ms)) + max_ahead_ms
    return own
