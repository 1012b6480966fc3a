"""Durations as the options take them: a string, a `timedelta` or whole milliseconds become int64 milliseconds.

The checks are KIP-428's (`validateMillisecondDuration`): the type, then whether the value fits into milliseconds. The
sign is left to whoever knows what a negative duration would mean there.
"""

from __future__ import annotations

import re
from datetime import timedelta
from fractions import Fraction

Duration = str | timedelta | int
"""`"5 minutes"`, `timedelta(minutes=5)` or `300_000`: the same duration."""

MAX_DURATION_MS = 2**63 - 1

_UNITS_MS = {
    "ms": 1,
    "millisecond": 1,
    "s": 1_000,
    "second": 1_000,
    "m": 60_000,
    "minute": 60_000,
    "h": 3_600_000,
    "hour": 3_600_000,
    "d": 86_400_000,
    "day": 86_400_000,
    "w": 604_800_000,
    "week": 604_800_000,
}
_ALIASES = {"sec": "s", "min": "m", "milli": "ms"}
_PART = re.compile(r"\s*([+-]?\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*")


def milliseconds(value: Duration, option: str) -> int:
    """Convert a duration to whole milliseconds.

    Args:
        value: A string of numbers and units (`"1 hour 30 minutes"`, `"250 ms"`), a `timedelta`, or int milliseconds.
        option: Name of the option, for the message.

    Raises:
        TypeError: Not one of the three types (a bool and a float are not).
        ValueError: A string that is no duration, a fraction of a millisecond, or more than int64 milliseconds.

    >>> milliseconds("1 hour 30 minutes", "size"), milliseconds(timedelta(seconds=2), "size"), milliseconds(7, "size")
    (5400000, 2000, 7)
    >>> milliseconds(2**63, "size")
    Traceback (most recent call last):
    ...
    ValueError: Invalid value for parameter "size" (value was: 9223372036854775808). It can't be converted to \
milliseconds: allowed are at most 9223372036854775807 either side of 0.
    """
    prefix = f'Invalid value for parameter "{option}" (value was: {value}).'
    if value is None:
        raise TypeError(f"{prefix} It shouldn't be null.")
    if isinstance(value, bool) or not isinstance(value, (str, timedelta, int)):
        raise TypeError(
            f"{prefix} A duration is a string such as '5 minutes', a timedelta or int milliseconds, "
            f"not {type(value).__name__}."
        )
    if isinstance(value, str):
        exact = _parse(value, prefix)
    elif isinstance(value, timedelta):
        exact = Fraction(value // timedelta(microseconds=1), 1_000)
    else:
        exact = Fraction(value)
    if exact.denominator != 1:
        raise ValueError(f"{prefix} It can't be converted to milliseconds: it has a fraction of one.")
    if abs(exact) > MAX_DURATION_MS:
        raise ValueError(
            f"{prefix} It can't be converted to milliseconds: allowed are at most {MAX_DURATION_MS} either side of 0."
        )
    return int(exact)


def _parse(text: str, prefix: str) -> Fraction:
    total, at = Fraction(0), 0
    while found := _PART.match(text, at):
        number, unit = found.groups()
        name = unit.lower()
        name = _ALIASES.get(name.removesuffix("s") or name, name)
        scale = _UNITS_MS.get(name) or _UNITS_MS.get(name.removesuffix("s"))
        if scale is None:
            raise ValueError(f"{prefix} Unknown unit {unit!r}: allowed are {', '.join(_UNITS_MS)} and their plurals.")
        total += Fraction(number) * scale
        at = found.end()
    if at == 0 or at != len(text):
        raise ValueError(f"{prefix} Allowed are numbers with units, such as '5 minutes' or '1 hour 30 minutes'.")
    return total
