"""Calendar windows: days, weeks, months, quarters and years of a time zone, numbered like windows of a fixed length.

A window runs from local midnight to local midnight: a day is 23 or 25 hours long when clocks are set, a month 28 to 31
days. Windows of several units are counted from January 1970; weeks begin on Mondays and are counted from 5 January
1970. Of a midnight that clocks pass twice the first one counts; one that they skip is when it would have been.

The rules of time zones are those of the host (Python's `zoneinfo`). They are known for the years 1 to 9999; before and
after, days are UTC's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from zoneinfo import ZoneInfo

import numpy as np

from backend.windows.columns.arrays import IntArray, compress

UNITS = {"day": ("D", 1, 0), "week": ("D", 7, 4), "month": ("M", 1, 0), "quarter": ("M", 3, 0), "year": ("M", 12, 0)}
"""Unit -> what it counts (days or months), how many of them, and the first of them that begins a window."""

MAX_COUNT = 10_000
_TEXT = re.compile(r"\s*(\d+)\s*(" + "|".join(UNITS) + r")s?\s*", re.IGNORECASE)
_DAY_MS = 86_400_000
_UNIX_EPOCH = datetime(1970, 1, 1)
_KNOWN = range((datetime.min - _UNIX_EPOCH).days + 1, (datetime.max - _UNIX_EPOCH).days)
_ENDS = np.array([-(2**63) + 2**50, 2**63 - 2**50], np.int64)


def read_calendar(size: object, timezone: str | None) -> tuple[int, str] | None:
    """Read a length as a number of calendar units; None when it is a fixed length of time.

    Days and weeks are calendar units where a time zone is given, longer units always.

    Raises:
        ValueError: The time zone is unknown, or the length does not go with one.

    >>> read_calendar("3 months", None), read_calendar("1 day", "Europe/Berlin"), read_calendar("1 day", None)
    ((3, 'month'), (1, 'day'), None)
    """
    found = _TEXT.fullmatch(size) if isinstance(size, str) else None
    if timezone is not None:
        _check_zone(timezone)
        if found is None:
            raise ValueError(f"size={size!r} with a timezone: allowed are a number of {'s, '.join(UNITS)}s")
    if found is None or (timezone is None and found[2].lower() in ("day", "week")):
        return None
    if not 1 <= int(found[1]) <= MAX_COUNT:
        raise ValueError(f"size={size!r}: allowed are 1 to {MAX_COUNT} {found[2]}s")
    return int(found[1]), found[2].lower()


_OF_A_HOST = ("localtime", "posixrules", "Factory")
"""Names beside those of time zones: what they mean is each host's own matter."""


def _check_zone(name: object) -> None:
    try:
        if not isinstance(name, str) or name in _OF_A_HOST:
            raise ValueError
        ZoneInfo(name)
    except (OSError, KeyError, ValueError):  # what zoneinfo raises of names that are a folder, unknown, or no name
        raise ValueError(f"timezone={name!r}: allowed are names such as 'Europe/Berlin' and 'UTC'") from None


@dataclass(frozen=True, slots=True)
class CalendarGrid:
    """Numbers calendar windows; see `backend.windows.definitions.Grid`. Each is one pane.

    Attributes:
        count: Units that a window is long.
        unit: One of `UNITS`.
        timezone: Name of the time zone.
    """

    count: int
    unit: str
    timezone: str

    panes_per_window = panes_per_step = 1

    def starts(self, windows: IntArray) -> IntArray:
        """Return the start of each window; of one outside of what int64 can hold, the end of that."""
        code, length, phase = UNITS[self.unit]
        low, high = self._utc_windows(_ENDS).tolist()
        firsts = np.clip(windows, low, high) * (self.count * length) + phase
        days = firsts.astype(f"datetime64[{code}]").astype("datetime64[D]").astype(np.int64)
        number, distinct = compress(days)
        return np.array([_midnight(self.timezone, day) for day in distinct.tolist()], np.int64)[number]

    def start(self, window: int) -> int:
        """Return the start of one window."""
        return _one(self.starts, window)

    def ends(self, windows: IntArray) -> IntArray:
        """Return the end of each window, exclusive."""
        return self.starts(windows + 1)

    pane_starts = starts
    pane_start = start

    def pane_of(self, times: IntArray) -> IntArray:
        """Return the pane of each event time, which is the last window whose start is at or before it."""
        near, windows = compress(self._utc_windows(times))  # local days are never more than one from UTC's
        early, late = self.starts(windows)[near] > times, self.ends(windows)[near] <= times
        found: IntArray = windows[near] - early + late
        return found

    def first_window(self, panes: IntArray) -> IntArray:
        """Return the window that is each pane: the first that holds it, and the last."""
        return panes

    last_window = first_window
    last_begun = pane_of

    def last_begun_at(self, time: int) -> int:
        """Return the last window whose start is at or before one time."""
        return _one(self.pane_of, time)

    def last_ended(self, clocks: IntArray) -> IntArray:
        """Return the last window whose end is at or before each clock."""
        return self.pane_of(clocks) - 1

    def last_ended_at(self, clock: int) -> int:
        """Return the last window whose end is at or before one clock."""
        return _one(self.pane_of, clock) - 1

    def _utc_windows(self, times: IntArray) -> IntArray:
        """Return the windows that times would be in if local time were UTC."""
        code, length, phase = UNITS[self.unit]
        units = times.astype("datetime64[ms]").astype(f"datetime64[{code}]").astype(np.int64)
        return np.floor_divide(units - phase, self.count * length)


def _one(function: Callable[[IntArray], IntArray], value: int) -> int:
    """Apply a function of arrays to one number, or to the nearest that int64 arithmetic can hold."""
    low, high = _ENDS.tolist()
    return int(function(np.array([min(max(value, low), high)], np.int64))[0])


@lru_cache(maxsize=2**16)
def _midnight(timezone: str, day: int) -> int:
    """Return when a day, counted from 1970-01-01, begins in a time zone: milliseconds."""
    if day not in _KNOWN:
        return day * _DAY_MS
    offset = (_UNIX_EPOCH + timedelta(days=day)).replace(tzinfo=ZoneInfo(timezone)).utcoffset()
    assert offset is not None
    return day * _DAY_MS - offset // timedelta(milliseconds=1)
