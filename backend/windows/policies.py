"""When a window's result is sent: early (still open), full (its end has passed), late (updated after that).

SAMZA-552, "Configuration of A Windowed Aggregator": early emission is off by default, a window is full at the first
message at or past its end, late updates are batched for ten seconds. Early and late count wall-clock time from the
first update that was not sent yet; inside Spark that is the logged batch time, so a micro-batch that runs again decides
alike.

Policies may change between starts. What waits for a policy that was turned off is sent by the next micro-batch; when
full results are turned off, everything that is open waited for them and is sent once, as early.
"""

from __future__ import annotations

from dataclasses import dataclass

from backend.windows.definitions import Duration, duration_ms

DEFAULT_LATE_MS = 10_000


@dataclass(frozen=True, slots=True)
class Policies:
    """The three emission policies of a window operator.

    Attributes:
        early_ms: Send an open window so long after its first unsent update; 0 is with each update, None is off.
        full: Send a window when it is full. Without it, what waits for the early policy when a window ends is sent
            then, with its reason `early`.
        late_ms: Send a past window so long after its first unsent update; 0 is with each update, None is off (late
            messages still count, but only a later reader of the state sees it).
    """

    early_ms: int | None = None
    full: bool = True
    late_ms: int | None = DEFAULT_LATE_MS

    def describe(self) -> dict[str, object]:
        """Give the manifest's entry."""
        return {"early_ms": self.early_ms, "full": self.full, "late_ms": self.late_ms}


def policies(*, early: Duration | None = None, full: bool = True, late: Duration | None = DEFAULT_LATE_MS) -> Policies:
    """Make checked policies.

    Args:
        early: A duration, `"each"` for each update, None or `"off"` for never.
        full: Whether full windows are sent.
        late: As `early`.

    Raises:
        ValueError: An option is not one of these.

    >>> policies(early="1 minute")
    Policies(early_ms=60000, full=True, late_ms=10000)
    >>> policies(late="each").late_ms
    0
    """
    if not isinstance(full, bool):
        raise ValueError(f"full={full!r}: allowed are True and False")
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
