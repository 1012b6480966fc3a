"""KIP-428's check of a duration, `validateMillisecondDuration`: its type, then whether it fits into milliseconds.

The sign is left to whoever knows what a negative duration would mean there.
"""

from __future__ import annotations

from datetime import timedelta

from backend.windows.definitions import Duration, read_duration

__all__ = ["Duration", "milliseconds"]

MAX_DURATION_MS = 2**63 - 1


def milliseconds(value: Duration, option: str) -> int:
    """Convert a duration to whole milliseconds.

    Args:
        value: A text of numbers and units (`"1 hour 30 minutes"`, `"250 ms"`), a `timedelta`, or int milliseconds.
        option: Name of the option, for the message.

    Raises:
        TypeError: Not one of the three types (a bool and a float are not).
        ValueError: A text that is no duration, a fraction of a millisecond, or more than int64 milliseconds.

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
            f"{prefix} A duration is a text such as '5 minutes', a timedelta or int milliseconds, "
            f"not {type(value).__name__}."
        )
    exact = read_duration(value)
    if exact is None:
        raise ValueError(f"{prefix} Allowed are numbers with units, such as '5 minutes' or '1 hour 30 minutes'.")
    if exact.denominator != 1:
        raise ValueError(f"{prefix} It can't be converted to milliseconds: it has a fraction of one.")
    if abs(exact) > MAX_DURATION_MS:
        raise ValueError(
            f"{prefix} It can't be converted to milliseconds: allowed are at most {MAX_DURATION_MS} either side of 0."
        )
    return int(exact)
