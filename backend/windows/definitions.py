"""Window definitions: which windows a message belongs to, by event time or by number of messages (SAMZA-552).

A definition is a small checked value; nothing here holds state. Time windows are `[start, end)` in milliseconds, placed
by floor division, so negative times work; `origin` shifts their phase (SAMZA-552's two-minute windows start at 8:59).
Hopping windows are cut into *panes*, the greatest common divisor of size and step: every window is a whole number of
panes, so state is kept once per pane however many windows overlap.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from math import gcd
from typing import Literal

import numpy as np
import numpy.typing as npt

from backend.batch import EDGES, FIRST
from backend.windows.calendars import CalendarGrid, read_calendar

IntArray = npt.NDArray[np.int64]

Duration = int | str | timedelta
"""Milliseconds, a timedelta, or a text such as `"1 hour"` or `"1 minute 30 seconds"`."""

MAX_DURATION_MS = 2**58
"""Upper bound of every duration: sums of an accepted event time and a few durations stay inside int64."""

MAX_OVERLAP = 10_000
"""Upper bound of windows per message (size / step)."""
MAX_PANES = 5_000_000
"""Upper bound of panes per window (size / greatest common divisor of size and step)."""

MAX_MESSAGES = 2**40
"""Upper bound of a size by number of messages."""

_UNITS_MS = {
    "ms": 1,
    "millisecond": 1,
    "s": 1000,
    "sec": 1000,
    "second": 1000,
    "m": 60_000,
    "min": 60_000,
    "minute": 60_000,
    "h": 3_600_000,
    "hour": 3_600_000,
    "d": 86_400_000,
    "day": 86_400_000,
    "w": 604_800_000,
    "week": 604_800_000,
}
_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*,?", re.ASCII)


def duration_ms(value: object, option: str, *, least: int = 1) -> int:
    """Read a duration as milliseconds.

    Args:
        value: See `Duration`. Fractions are fine as long as whole milliseconds come out.
        option: Name of the option, for the error.
        least: Smallest allowed value.

    Raises:
        ValueError: The value is not a duration, not whole milliseconds, or out of `[least, MAX_DURATION_MS]`.

    >>> duration_ms("1 hour 30 min", "size")
    5400000
    >>> duration_ms("0.5 s", "size")
    500
    """
    found = read_duration(value)
    if found is None:
        raise ValueError(
            f"{option}={value!r} is not a duration: give milliseconds as an int, a timedelta, or a text such as '10 "
            "seconds', '1 hour', '1 min 30 s' (units: ms, s, min, h, d, w and their long names)"
        )
    if found.denominator != 1:
        raise ValueError(f"{option}={value!r} is not a whole number of milliseconds")
    if not least <= found <= MAX_DURATION_MS:
        raise ValueError(f"{option}={value!r} is {int(found)} ms; allowed are {least} to {MAX_DURATION_MS} ms")
    return int(found)


def read_duration(value: object) -> Fraction | None:
    """Read a duration as exact milliseconds, of any sign and size; None when the value is none."""
    if isinstance(value, timedelta):
        return Fraction(value // timedelta(microseconds=1), 1000)
    if isinstance(value, int) and not isinstance(value, bool):
        return Fraction(value)
    if not isinstance(value, str) or not value.strip():
        return None
    text = value.strip()
    sign = -1 if text.startswith("-") else 1
    at, total = (1 if sign < 0 else 0), Fraction(0)
    if at == len(text):
        return None
    while at < len(text):
        part = _PART.match(text, at)
        if part is None:
            return None
        unit = part.group(2).lower()
        factor = _UNITS_MS.get(unit) or (_UNITS_MS.get(unit[:-1]) if len(unit) > 3 and unit.endswith("s") else None)
        if factor is None:
            return None
        total += Fraction(part.group(1)) * factor
        at = part.end()
    return sign * total


def _origin_ms(value: Duration | datetime) -> int:
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ValueError(f"origin={value!r} has no time zone: give an aware datetime, milliseconds, or a duration")
        return (value - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)
    return duration_ms(value, "origin", least=-MAX_DURATION_MS)


def _count(value: object, option: str, *, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_MESSAGES:
        raise ValueError(f"{option}={value!r} is not a number of messages: allowed are {least} to {MAX_MESSAGES}")
    return value


Kind = Literal["tumbling", "hopping", "sliding", "session"]
Unit = Literal["time", "messages"]


@dataclass(frozen=True, slots=True)
class Window:
    """A checked window definition; made by `tumbling`, `hopping`, `sliding`, `session`.

    Attributes:
        kind: How windows advance.
        unit: How they are measured: event time in milliseconds, or number of messages.
        size: Length; of a session the gap (time), or the number of messages without its key that end it.
        step: Distance of starts; equal to `size` for tumbling, 0 for sliding and session windows.
        origin: Phase in `[0, step)`; 0 where there is no step.
        calendar: Unit of `size` and `step` where it is of a calendar (`backend.windows.calendars.UNITS`), else None.
        timezone: Time zone of the calendar.
    """

    kind: Kind
    unit: Unit
    size: int
    step: int = 0
    origin: int = 0
    calendar: str | None = None
    timezone: str | None = None

    @property
    def by_time(self) -> bool:
        """True for windows over event time."""
        return self.unit == "time"

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the results that say, with the group key, of which window of a shard a row is."""
        if self.by_time:
            return "window_start", "window_end"
        return tuple(EDGES if self.kind == "sliding" else FIRST)

    def describe(self) -> dict[str, object]:
        """Give the manifest's entry."""
        calendar = {} if self.calendar is None else {"calendar": self.calendar, "timezone": self.timezone}
        fixed = {"kind": self.kind, "unit": self.unit, "size": self.size, "step": self.step, "origin": self.origin}
        return {**fixed, **calendar}


def tumbling(
    size: Duration | None = None,
    *,
    messages: int | None = None,
    origin: Duration | datetime = 0,
    timezone: str | None = None,
) -> Window:
    """Define windows that follow one another without gap or overlap.

    Args:
        size: Length in event time; also a number of months, quarters or years, and with `timezone` of days or weeks.
        messages: Length in messages, instead of `size`.
        origin: A time at which some window starts; a shift of the count for `messages` is not possible.
        timezone: Windows begin at midnight there, so a day is 23 or 25 hours long when clocks are set (see
            backend.windows.calendars); of months, quarters and years UTC by default.

    Raises:
        ValueError: An option is missing, given twice, or out of range.
    """
    if messages is not None:
        _only_one("tumbling", size, origin)
        if timezone is not None:
            raise ValueError(f"timezone={timezone!r}: windows by number of messages have no times")
        return Window("tumbling", "messages", _count(messages, "messages"), _count(messages, "messages"))
    calendar = read_calendar(_given("tumbling", "size", size), timezone)
    if calendar is not None:
        if origin != 0:
            raise ValueError(f"origin={origin!r}: calendar windows begin at midnight, give timezone")
        return Window("tumbling", "time", calendar[0], calendar[0], 0, calendar[1], timezone or "UTC")
    length = duration_ms(_given("tumbling", "size", size), "size")
    return Window("tumbling", "time", length, length, _origin_ms(origin) % length)


def hopping(
    size: Duration | None = None,
    step: Duration | None = None,
    *,
    messages: int | None = None,
    every: int | None = None,
    origin: Duration | datetime = 0,
) -> Window:
    """Define windows of one length whose starts are `step` apart; they overlap where the step is smaller.

    Args:
        size: Length in event time.
        step: Distance of the starts; at most `size`, so that no message falls between windows.
        messages: Length in messages, instead of `size`.
        every: Distance of the starts in messages, with `messages`.
        origin: A time at which some window starts.

    Raises:
        ValueError: An option is missing, given twice, or out of range.
    """
    if messages is not None or every is not None:
        _only_one("hopping", size, origin)
        _only_one("hopping", step, 0)
        if messages is None or every is None:
            raise ValueError(f"hopping by number of messages needs messages= and every=, got {messages!r}, {every!r}")
        length, distance = _count(messages, "messages"), _count(every, "every")
        _check_step(length, distance, "every", "messages")
        return Window("hopping", "messages", length, distance)
    length = duration_ms(_given("hopping", "size", size), "size")
    distance = duration_ms(_given("hopping", "step", step), "step")
    _check_step(length, distance, "step", "size")
    panes = length // gcd(length, distance)
    if panes > MAX_PANES:
        raise ValueError(
            f"step={step!r} with size={size!r}: a window would have {panes} panes, each as long as the greatest common"
            f" divisor of both, {length // panes} ms; allowed are {MAX_PANES}: take a rounder step"
        )
    return Window("hopping", "time", length, distance, _origin_ms(origin) % distance)


def sliding(size: Duration | None = None, *, messages: int | None = None) -> Window:
    """Define windows that follow the messages: one per distinct event time t of a key, `[t - size, t]`.

    Both ends are included, as in SQL's `RANGE size PRECEDING`. With `messages=N`, one window per message: it and the
    N - 1 before it.

    Args:
        size: Length in event time.
        messages: Length in messages, instead of `size`.

    Raises:
        ValueError: An option is missing, given twice, or out of range.
    """
    if messages is not None:
        _only_one("sliding", size, 0)
        return Window("sliding", "messages", _count(messages, "messages"))
    return Window("sliding", "time", duration_ms(_given("sliding", "size", size), "size"))


def session(gap: Duration | None = None, *, messages: int | None = None) -> Window:
    """Define windows of dynamic length per group key, opened by a message and kept open by the next ones.

    A time session ends when the next message of its key is more than `gap` later. A tuple session (`messages=N`) ends
    after N messages without its key in a row.

    Args:
        gap: Longest pause in event time within a session.
        messages: Longest pause in messages, instead of `gap`.

    Raises:
        ValueError: An option is missing, given twice, or out of range.
    """
    if messages is not None:
        _only_one("session", gap, 0)
        return Window("session", "messages", _count(messages, "messages"))
    return Window("session", "time", duration_ms(_given("session", "gap", gap), "gap"))


def _given(window: str, option: str, value: Duration | None) -> Duration:
    if value is None:
        raise ValueError(f"{option}=None: a {window} window needs {option} (a duration) or messages (a number)")
    return value


def _only_one(window: str, size: object, origin: object) -> None:
    if size is not None:
        raise ValueError(f"a {window} window is measured by time or by messages: got {size!r} and a number of messages")
    if origin != 0:
        raise ValueError(f"origin={origin!r}: windows by number of messages start at the first message")


def _check_step(length: int, distance: int, step: str, size: str) -> None:
    if distance > length:
        raise ValueError(f"{step}={distance} is over {size}={length}: messages between windows would be lost")
    if -(-length // distance) > MAX_OVERLAP:
        raise ValueError(
            f"{step}={distance} with {size}={length}: each message would belong to more than {MAX_OVERLAP} windows"
        )


@dataclass(frozen=True, slots=True)
class Grid:
    """The assigner of windows of a fixed length.

    Windows and panes ascend with time. Functions take and give int64 numbers, or arrays of them.
    Window `k` is `[origin + k * step, origin + k * step + size)`; pane `p` is `[origin + p * pane, ... + pane)`.
    """

    size: int
    step: int
    origin: int

    @classmethod
    def of(cls, window: Window) -> Grid:
        """Give the grid of a tumbling or hopping event-time window."""
        return cls(window.size, window.step, window.origin)

    @property
    def pane(self) -> int:
        """Length of a pane in milliseconds."""
        return gcd(self.size, self.step)

    @property
    def panes_per_window(self) -> int:
        """Panes that a window is made of."""
        return self.size // self.pane

    @property
    def panes_per_step(self) -> int:
        """Panes between the starts of neighbouring windows: window `k` begins with pane `k` times that."""
        return self.step // self.pane

    def start(self, window: int) -> int:
        """Give the start of one window."""
        return window * self.step + self.origin

    def starts(self, windows: IntArray) -> IntArray:
        """Give the start of each window."""
        return windows * self.step + self.origin

    def ends(self, windows: IntArray) -> IntArray:
        """Give the end of each window, exclusive."""
        return windows * self.step + (self.origin + self.size)

    def pane_start(self, pane: int) -> int:
        """Give the start of one pane; the next one begins at its end."""
        return pane * self.pane + self.origin

    def pane_starts(self, panes: IntArray) -> IntArray:
        """Give the start of each pane."""
        return panes * self.pane + self.origin

    def pane_of(self, times: IntArray) -> IntArray:
        """Give the pane of each event time."""
        return np.floor_divide(times - self.origin, self.pane)

    def first_window(self, panes: IntArray) -> IntArray:
        """Give the first window that holds each pane."""
        return -np.floor_divide(self.panes_per_window - 1 - panes, self.panes_per_step)

    def last_window(self, panes: IntArray) -> IntArray:
        """Give the last window that holds each pane."""
        return np.floor_divide(panes, self.panes_per_step)

    def last_begun(self, times: IntArray) -> IntArray:
        """Give the last window whose start is at or before each time."""
        return np.floor_divide(times - self.origin, self.step)

    def last_begun_at(self, time: int) -> int:
        """Give the last window whose start is at or before one time."""
        return (time - self.origin) // self.step

    def last_ended(self, clocks: IntArray) -> IntArray:
        """Give the last window whose end is at or before each clock."""
        return np.floor_divide(clocks - self.size - self.origin, self.step)

    def last_ended_at(self, clock: int) -> int:
        """Give the last window whose end is at or before one clock."""
        return (clock - self.size - self.origin) // self.step


Assigner = Grid | CalendarGrid
"""Numbers windows that all group keys share, and their panes: which a message belongs to, and nothing else."""


def assigner(window: Window) -> Assigner:
    """Return the assigner of a tumbling or hopping event-time window."""
    if window.calendar is not None:
        return CalendarGrid(window.size, window.calendar, window.timezone or "UTC")
    return Grid.of(window)
