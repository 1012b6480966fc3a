"""Options of the window stores with KIP-428's checks, and what a windowed row is called."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from backend.stores.durations import Duration, milliseconds
from backend.stores.named import StreamClock, check_name
from backend.stores.values import ValueCodec, describe_type

if TYPE_CHECKING:
    from backend.stores.window_store import WindowStore
    from backend.workspace import Workspace


class Windowed(NamedTuple):
    """A key and its window.

    Attributes:
        key: The user's key.
        start: Start of the window, ms, inclusive.
        end: `start` and the store's window size, ms, exclusive.
    """

    key: Any
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class WindowOptions:
    """A window store by name and options: what `process(stores=[...])` takes.

    Args:
        name: Name of the store.
        retention: How long a row stays visible: while `start > stream time - retention`.
        window_size: Length of a window; it only tells `Windowed.end`.
        grace: How late a write may be: it is taken while `start > stream time - grace`, and always when its start is
            the newest one. Default: the retention.
        retain_duplicates: Keep every value that is put for a key and start, instead of the last one.
        value_type: As in `values.ValueCodec`.

    Attributes:
        retention_ms, window_size_ms, grace_ms: The durations in milliseconds.

    Raises:
        TypeError: The name is None, or an option is of the wrong type.
        ValueError: A duration is negative or no duration, the window size or the grace period exceeds the retention.

    >>> WindowOptions("visits", retention=1_000, window_size=2_000)
    Traceback (most recent call last):
    ...
    ValueError: The retention period of the window store visits must be no smaller than its window size. Got \
size=[2000], retention=[1000]
    """

    kind: ClassVar[str] = "window"

    name: str
    retention: InitVar[Duration]
    window_size: InitVar[Duration]
    grace: InitVar[Duration | None] = None
    retain_duplicates: bool = False
    value_type: Any = None
    retention_ms: int = field(init=False)
    window_size_ms: int = field(init=False)
    grace_ms: int = field(init=False)

    def __post_init__(self, retention: Duration, window_size: Duration, grace: Duration | None) -> None:
        check_name(self.name)
        retention_ms = milliseconds(retention, "retentionPeriod")
        window_size_ms = milliseconds(window_size, "windowSize")
        grace_ms = retention_ms if grace is None else milliseconds(grace, "gracePeriod")
        for option, value in (
            ("retentionPeriod", retention_ms),
            ("windowSize", window_size_ms),
            ("gracePeriod", grace_ms),
        ):
            if value < 0:
                raise ValueError(f"{option} cannot be negative: got {value} ms, allowed are 0 and more")
        if window_size_ms > retention_ms:
            raise ValueError(
                f"The retention period of the window store {self.name} must be no smaller than its window size. "
                f"Got size=[{window_size_ms}], retention=[{retention_ms}]"
            )
        if grace_ms > retention_ms:
            raise ValueError(
                f"The grace period of the window store {self.name} must not exceed its retention period. "
                f"Got grace period=[{grace_ms}], retention=[{retention_ms}]"
            )
        if not isinstance(self.retain_duplicates, bool):
            raise TypeError(f"retain_duplicates must be True or False, not {self.retain_duplicates!r}")
        ValueCodec(self.value_type)
        for attribute, value in (
            ("retention_ms", retention_ms),
            ("window_size_ms", window_size_ms),
            ("grace_ms", grace_ms),
        ):
            object.__setattr__(self, attribute, value)

    def bind(self, work: Workspace, region: int, time_ms: int) -> WindowStore:
        """Give the store over one attempt's workspace; its time is that of its own puts."""
        from backend.stores.window_store import WindowStore

        return WindowStore(work, region, self)

    def clock(self) -> StreamClock:
        """Give a clock that keeps what `start > stream time - retention` keeps."""
        return StreamClock(self.retention_ms - 1)

    def describe(self) -> dict[str, object]:
        """Give the manifest's entry; `layout` must stay the same, the durations may change."""
        return {
            "name": self.name,
            "kind": self.kind,
            "layout": {"retain_duplicates": self.retain_duplicates},
            "value_type": describe_type(self.value_type),
            "retention_ms": self.retention_ms,
            "window_size_ms": self.window_size_ms,
            "grace_ms": self.grace_ms,
        }


def admit(clock: StreamClock, grace_ms: int, start: int) -> bool:
    """Decide whether a write at a window start is in time, and let the clock see it: KIP-428's grace period.

    The newest start is always in time, so that a grace period of 0 drops nothing that comes in order.

    >>> clock = StreamClock(keep_ms=99)
    >>> [admit(clock, 10, start) for start in (100, 91, 90, 101)], clock.dropped
    ([True, True, False, True], 1)
    """
    newest = max(clock.stream_time, start)
    if start == newest or (start > newest - grace_ms and start >= clock.floor):
        clock.advance(start)
        return True
    clock.dropped += 1
    return False
