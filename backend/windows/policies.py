"""When a window's result is sent: early (still open), full (its end has passed), late (updated after that).

SAMZA-552, "Configuration of A Windowed Aggregator": early emission is off by default, a window is full at the first
message at or past its end, late updates are batched for ten seconds. Early and late count wall-clock time from the
first update that was not sent yet; inside Spark that is the logged batch time, so a micro-batch that runs again decides
alike. Early may count messages too (`every`): those of a window and group key since the last row of them, looked at
when a micro-batch ends, so a row may stand for more than were asked for.

Policies may change between starts. What waits for a policy that was turned off is sent by the next micro-batch; when
full results are turned off, everything that is open waited for them and is sent once, as early.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from backend.windows.columns.arrays import IntArray, Mask
from backend.windows.definitions import Duration, duration_ms

DEFAULT_LATE_MS = 10_000
MOST_MESSAGES = 2**31 - 1
"""The largest number that `every` takes."""


@dataclass(frozen=True, slots=True)
class Every:
    """Early emission by number of messages; `every` makes it.

    Attributes:
        messages: Send an open window when so many messages came since its last row.
        or_after_ms: Or so long after its first unsent update; None is never.
    """

    messages: int
    or_after_ms: int | None


def every(messages: int, *, or_after: Duration | None = None) -> Every:
    """Make an early policy by number of messages.

    Args:
        messages: An open window's row of a group key is sent at the end of a micro-batch in which at least so many
            messages have come to it since its last row.
        or_after: Also so long after its first unsent update, however few messages came. None is never.

    Raises:
        ValueError: An option is not one of these.

    >>> every(100, or_after="10 seconds")
    Every(messages=100, or_after_ms=10000)
    """
    if isinstance(messages, bool) or not isinstance(messages, int) or not 1 <= messages <= MOST_MESSAGES:
        raise ValueError(f"every: messages={messages!r}: must be a whole number from 1 to {MOST_MESSAGES}")
    return Every(messages, None if or_after is None else duration_ms(or_after, "every: or_after", least=0))


@dataclass(frozen=True, slots=True)
class Policies:
    """The three emission policies of a window operator.

    Attributes:
        early_ms: Send an open window so long after its first unsent update; 0 is with each update, None is off.
        full: Send a window when it is full. Without it, what waits for the early policy when a window ends is sent
            then, with its reason `early`.
        late_ms: Send a past window so long after its first unsent update; 0 is with each update, None is off (late
            messages still count, but only a later reader of the state sees it).
        early_messages: Send an open window when so many messages came since its last row; None is off.
    """

    early_ms: int | None = None
    full: bool = True
    late_ms: int | None = DEFAULT_LATE_MS
    early_messages: int | None = None

    @property
    def early(self) -> bool:
        """Tell whether open windows are sent."""
        return self.early_ms is not None or self.early_messages is not None

    def early_due(self, since: IntArray, unsent: IntArray, now_ms: int) -> Mask:
        """Return which open windows are due, of those whose update waits.

        Args:
            since: Batch time of the oldest unsent update of each.
            unsent: Messages since the last row of each.
            now_ms: Batch time.
        """
        due: Mask = np.zeros(len(since), np.bool_)
        if self.early_ms is not None:
            due |= since <= now_ms - self.early_ms
        if self.early_messages is not None:
            due |= unsent >= self.early_messages
        return due

    def describe(self) -> dict[str, object]:
        """Give the manifest's entry."""
        return {
            "early_ms": self.early_ms,
            "full": self.full,
            "late_ms": self.late_ms,
            "early_messages": self.early_messages,
        }


def policies(
    *, early: Duration | Every | None = None, full: bool = True, late: Duration | None = DEFAULT_LATE_MS
) -> Policies:
    """Make checked policies.

    Args:
        early: A duration, `"each"` for each update, `every(n)` for each n messages, None or `"off"` for never.
        full: Whether full windows are sent.
        late: As `early`, but for `every`.

    Raises:
        ValueError: An option is not one of these.

    >>> policies(early="1 minute")
    Policies(early_ms=60000, full=True, late_ms=10000, early_messages=None)
    >>> policies(late="each").late_ms
    0
    """
    if not isinstance(full, bool):
        raise ValueError(f"full={full!r}: allowed are True and False")
    if isinstance(early, Every):
        return Policies(early.or_after_ms, full, _period(late, "late"), early.messages)
    return Policies(_period(early, "early"), full, _period(late, "late"))


def _period(value: Duration | None, option: str) -> int | None:
    if value is None or value == "off":
        return None
    if value == "each":
        return 0
    try:
        return duration_ms(value, option, least=0)
    except ValueError as error:
        raise ValueError(f"{error}; also allowed are 'each' and 'off'") from None
