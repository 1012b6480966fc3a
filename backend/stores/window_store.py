"""`WindowStore` (KIP-428), persistent: key and window start to value, for as long as the retention says.

Layout of the rows behind region byte and sub-byte (see `backend.stores.named`), segments of 1 ms as the KIP has them::

    BY_TIME   | start, 8 bytes | key             | sequence, 8 bytes (retain_duplicates) | -> value
    BY_KEY    | key            | start, 8 bytes  | sequence, 8 bytes (retain_duplicates) | -> empty

The values lie in the order of time, so one bound hides what has expired and gives its space back. Reads of a key go
through the index in the order of keys, and never see other keys. When rows expire, their index rows are deleted one by
one: the scan for them ends where the living begin.

* visible: `start > stream time - retention`, on every read, at once.
* writable: `start > stream time - grace`, or the newest start. Later writes, deletes too, are dropped and counted.
* stream time: the newest start that was put, deletes too; never back; it is stored.
* iterators are snapshots: nothing expires, changes or comes under one.
* rows come in the order of (start, key), as from the KIP's map of maps; ranges are half-open, None is an open end.

>>> from backend.store.memory import MemoryStore
>>> from backend.store.workspace import Workspace
>>> options = WindowOptions("visits", retention=600, window_size=100, grace=200)
>>> store = options.bind(Workspace(MemoryStore()), 0x40, 0)
>>> store.put("anna", 1, 0), store.put("bert", 2, 100), store.put("anna", 3, 300)
(True, True, True)
>>> list(store.fetch("anna", 0, 301))
[(0, 1), (300, 3)]
>>> store.put("anna", 9, 100), store.dropped  # 100 > 300 - 200 does not hold
(False, 1)
>>> store.put("cleo", 4, 650)  # now a start of 50 or less is gone
True
>>> [(row.key, row.start, row.end, value) for row, value in store.all()]
[('bert', 100, 200, 2), ('anna', 300, 400, 3), ('cleo', 650, 750, 4)]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import InitVar, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, cast

from backend.keys import decode
from backend.rocks import RocksOptions
from backend.store.workspace import Workspace
from backend.stores import named
from backend.stores.durations import Duration, milliseconds
from backend.stores.named import (
    BEYOND,
    KEY_AT,
    ROWS_AT,
    TIME_BYTES,
    Clocked,
    NamedStore,
    StreamClock,
    check_name,
    described,
    encode_key,
    event_time,
    time_bytes,
    time_of,
)
from backend.stores.standalone import StoreSet
from backend.stores.values import ValueCodec


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
        for attribute, option, value in (
            ("retention_ms", "retentionPeriod", retention_ms),
            ("window_size_ms", "windowSize", window_size_ms),
            ("grace_ms", "gracePeriod", grace_ms),
        ):
            if value < 0:
                raise ValueError(f"{option} cannot be negative: got {value} ms, allowed are 0 and more")
            object.__setattr__(self, attribute, value)
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

    def bind(self, work: Workspace, region: int, time_ms: int) -> WindowStore:
        """Give the store over one attempt's workspace; its time is that of its own puts."""
        return WindowStore(work, region, self)

    def clock(self) -> StreamClock:
        """Give a clock that keeps what `start > stream time - retention` keeps."""
        return StreamClock(self.retention_ms - 1)

    def describe(self) -> dict[str, object]:
        """Give the manifest's entry; `layout` must stay the same, the durations may change."""
        return described(
            self,
            {"retain_duplicates": self.retain_duplicates},
            retention_ms=self.retention_ms,
            window_size_ms=self.window_size_ms,
            grace_ms=self.grace_ms,
        )


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


class WindowStore(Clocked, NamedStore):
    """A window store over a workspace; `open` gives one with a database of its own.

    Args:
        work: Where every read and write goes.
        region: The region that the store owns.
        options: Name, durations, duplicates, value type.
    """

    options: WindowOptions

    def __init__(self, work: Workspace, region: int, options: WindowOptions) -> None:
        self._tail = 2 * TIME_BYTES if options.retain_duplicates else TIME_BYTES
        layout = {"retain_duplicates": options.retain_duplicates}
        super().__init__(work, region, options, layout=layout, clock=options.clock())

    @classmethod
    def open(
        cls,
        path: Path | str,
        *,
        retention: Duration,
        window_size: Duration,
        grace: Duration | None = None,
        retain_duplicates: bool = False,
        value_type: Any = None,
        name: str = "window",
        options: RocksOptions | None = None,
        wait_s: float = 10.0,
    ) -> Self:
        """Open or make a window store of its own at `path`, without Spark; the options are those of `WindowOptions`.

        Raises:
            StoreLocked: Another process holds it for longer than `wait_s` seconds.
            ManifestMismatch: There is another store at `path`.
        """
        declared = WindowOptions(name, retention, window_size, grace, retain_duplicates, value_type)
        return cast(Self, StoreSet.open(path, [declared], options=options, wait_s=wait_s)[name])

    def put(self, key: object, value: object, start: int) -> bool:
        """Set the value of a key's window; None deletes it.

        With `retain_duplicates` a value is added to those that are there, and None deletes nothing.

        Returns:
            False when it came too late and was dropped.

        Raises:
            KeyInvalid: The key is None or has no order, or `start` is no time; nothing changed.
            ValueInvalid: The value cannot be stored; nothing changed.
        """
        encoded, start = encode_key(key), event_time(start, "start")
        data = None if value is None else self._values.encode(value)
        work, clock, duplicates = self._work, self._clock, self.options.retain_duplicates
        if not admit(clock, self.options.grace_ms, start):
            return False
        if start < clock.floor or (data is None and duplicates):
            return True  # a retention of 0 keeps nothing, not even the newest
        at, tail = time_bytes(start), b""
        if duplicates:
            tail, self._sequence = time_bytes(self._sequence), self._sequence + 1
        row, index = self._by_time + at + encoded + tail, self._by_key + encoded + at + tail
        if data is None:
            work.delete(row)
            work.delete(index)
        else:
            work.put(row, data)
            work.put(index, b"")
        return True

    def fetch_one(self, key: object, start: int) -> Any:
        """Return the value of a key's window, None when there is none; of duplicates the one that was put last."""
        encoded = encode_key(key)
        if event_time(start, "start") < self._clock.floor:
            return None
        row = self._by_time + time_bytes(start) + encoded
        if self.options.retain_duplicates:
            data = next((value for _, value in self._work.scan(row, row + BEYOND, reverse=True)), None)
        else:
            data = self._work.get(row)
        return self._values.decode(data)

    def fetch(
        self, key: object, start: int | None = None, end: int | None = None, *, backward: bool = False
    ) -> Iterator[tuple[int, Any]]:
        """Iterate over the windows of a key that start in `[start, end)`, as (start, value), by time.

        Reads only rows of this key.
        """
        prefix = self._by_key + encode_key(key)
        low, high = self._times(start, end)
        scan = self._work.scan(prefix + low, prefix + high, reverse=backward)
        tails = [row[len(prefix) :] for row, _ in scan]
        encoded = prefix[ROWS_AT:]
        rows = [self._by_time + tail[:TIME_BYTES] + encoded + tail[TIME_BYTES:] for tail in tails]
        decode_value = self._values.decode
        return self._iterate(
            (time_of(tail[:TIME_BYTES]), decode_value(value))
            for tail, value in zip(tails, self._work.get_many(rows), strict=True)
            if value is not None
        )

    def fetch_range(
        self,
        first: object,
        last: object,
        start: int | None = None,
        end: int | None = None,
        *,
        backward: bool = False,
    ) -> Iterator[tuple[Windowed, Any]]:
        """Iterate over the windows that start in `[start, end)` of the keys in `[first, last)`.

        Reads the index of these keys only, and holds what it found: for all keys `fetch_all` is the better way.

        Args:
            first: First key, inclusive; None for no limit.
            last: Last key, exclusive; None for no limit.
            start: First start, ms, inclusive; None for no limit.
            end: Last start, ms, exclusive; None for no limit.
            backward: Against the order of (start, key).
        """
        if first is None and last is None:
            return self.fetch_all(start, end, backward=backward)
        low, high = self._times(start, end)
        from_key = self._by_key + (b"" if first is None else encode_key(first))
        to_key = self._by_key + (BEYOND if last is None else encode_key(last))
        rows = []
        for index, _ in self._work.scan(from_key, max(from_key, to_key)):
            tail = index[-self._tail :]
            if low <= tail[:TIME_BYTES] < high:
                encoded = index[ROWS_AT : -self._tail]
                rows.append(self._by_time + tail[:TIME_BYTES] + encoded + tail[TIME_BYTES:])
        rows.sort(reverse=backward)
        found = zip(rows, self._work.get_many(rows), strict=True)
        return self._iterate(self._windowed((row, value) for row, value in found if value is not None))

    def fetch_all(
        self, start: int | None = None, end: int | None = None, *, backward: bool = False
    ) -> Iterator[tuple[Windowed, Any]]:
        """Iterate over the windows of all keys that start in `[start, end)`; reads no others."""
        low, high = self._times(start, end)
        scan = self._work.scan(self._by_time + low, self._by_time + high, reverse=backward)
        return self._iterate(self._windowed(scan))

    def all(self, *, backward: bool = False) -> Iterator[tuple[Windowed, Any]]:
        """Iterate over everything that is visible."""
        return self.fetch_all(backward=backward)

    def _times(self, start: int | None, end: int | None) -> tuple[bytes, bytes]:
        """Give a half-open range of starts as bytes, cut off at what is visible and never turned around."""
        floor = self._clock.floor
        low = time_bytes(floor if start is None else max(floor, event_time(start, "the first start")))
        high = BEYOND if end is None else time_bytes(event_time(end, "the last start"))
        return low, max(low, high)

    def _windowed(self, rows: Iterator[tuple[bytes, bytes]]) -> Iterator[tuple[Windowed, Any]]:
        size, until = self.options.window_size_ms, TIME_BYTES - self._tail or None
        decode_value = self._values.decode
        for row, value in rows:
            start = time_of(row[ROWS_AT:KEY_AT])
            yield Windowed(decode(row[KEY_AT:until]), start, start + size), decode_value(value)

    def _reclaim(self) -> None:
        """Raise the bound to what is visible, and delete the index rows of what went below it."""
        work, until = self._work, TIME_BYTES - self._tail or None
        bound = self._by_time + time_bytes(self._clock.floor)
        scan = work.scan(self._by_time, bound)
        index = []
        for row, _ in islice(scan, named.RECLAIM_ROWS):
            sequence = b"" if until is None else row[until:]
            index.append(self._by_key + row[KEY_AT:until] + row[ROWS_AT:KEY_AT] + sequence)
        beyond = next(scan, None)
        self._expired += len(index)
        work.delete_many(sorted(index))
        work.raise_bound(self._region, bound if beyond is None else beyond[0])
