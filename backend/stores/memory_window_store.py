"""KIP-428's in-memory window store: an ordered map of segments of 1 ms, each an ordered map of keys.

The same rules, rows and order as `window_store.WindowStore`, without a disk under it: what has expired is removed
before each action, as soon as possible. Keys and values are kept as bytes, so nothing that a caller does with an object
afterwards reaches into the store or into a snapshot.

>>> store = in_memory_window_store("visits", 600, 100, 200)
>>> store.put("anna", 1, 0), store.put("anna", 2, 400), store.put("bert", 3, 200)
(True, True, False)
>>> list(store.fetch("anna")), store.dropped
([(0, 1), (400, 2)], 1)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

from sortedcontainers import SortedDict

from backend.errors import StoreClosed
from backend.keys import decode
from backend.stores.durations import Duration
from backend.stores.named import BEYOND, TIME_BYTES, Clocked, encode_key, event_time, time_bytes
from backend.stores.values import ValueCodec
from backend.stores.window_store import Windowed, WindowOptions, admit

SMALL_SEGMENT = 32
"""Up to so many keys a segment is a plain dict, put in order when it is read: most segments of 1 ms are that small, and
an ordered map of its own would cost each of them more than its rows."""

_Segment = dict[bytes, bytes]  # encoded key [+ sequence] -> value; a SortedDict above SMALL_SEGMENT


def in_memory_window_store(
    name: str,
    retention: Duration,
    window_size: Duration,
    grace: Duration,
    *,
    retain_duplicates: bool = False,
    value_type: Any = None,
) -> InMemoryWindowStore:
    """Make a window store in memory: KIP-428's `Stores.inMemoryWindowStore`.

    Args:
        name: Name of the store.
        retention: Rows stay visible while `start > stream time - retention`.
        window_size: Length of a window.
        grace: Writes are taken while `start > stream time - grace`, and at the newest start.
        retain_duplicates: Keep every value of a key and start.
        value_type: As in `values.ValueCodec`.

    Raises:
        TypeError: The name is None ("name cannot be null"), or an option is of the wrong type.
        ValueError: A duration is negative or does not fit into milliseconds, the window size or the grace period
            exceeds the retention.

    >>> in_memory_window_store("visits", 100, 10, 101)
    Traceback (most recent call last):
    ...
    ValueError: The grace period of the window store visits must not exceed its retention period. Got grace \
period=[101], retention=[100]
    """
    return InMemoryWindowStore(WindowOptions(name, retention, window_size, grace, retain_duplicates, value_type))


class InMemoryWindowStore(Clocked):
    """A window store that ends with its process.

    Args:
        options: Name, durations, duplicates, value type.
    """

    def __init__(self, options: WindowOptions) -> None:
        self.options = options
        self.name = options.name
        self._clock = options.clock()
        self._values = ValueCodec(options.value_type)
        self._sequence = 0
        self._open: SortedDict | None = SortedDict()  # start -> _Segment

    def put(self, key: object, value: object, start: int) -> bool:
        """Set the value of a key's window; None deletes it, or nothing with `retain_duplicates`.

        Returns:
            False when it came too late and was dropped.

        Raises:
            KeyInvalid: The key is None or has no order, or `start` is no time; nothing changed.
            ValueInvalid: The value cannot be stored; nothing changed.
        """
        encoded, start = encode_key(key), event_time(start, "start")
        data = None if value is None else self._values.encode(value)
        self._segments()  # a closed store takes nothing
        if not admit(self._clock, self.options.grace_ms, start):
            return False
        segments, duplicates = self._segments(), self.options.retain_duplicates
        if start < self._clock.floor or (data is None and duplicates):
            return True  # a retention of 0 keeps nothing, not even the newest
        if duplicates:
            encoded, self._sequence = encoded + time_bytes(self._sequence), self._sequence + 1
        segment = segments.get(start)
        if data is None:
            if segment is not None:
                segment.pop(encoded, None)
                if not segment:
                    del segments[start]
        elif segment is None:
            segments[start] = {encoded: data}
        else:
            segment[encoded] = data
            if len(segment) > SMALL_SEGMENT and type(segment) is dict:
                segments[start] = SortedDict(segment)
        return True

    def fetch_one(self, key: object, start: int) -> Any:
        """Return the value of a key's window, None when there is none; of duplicates the one that was put last."""
        encoded = encode_key(key)
        segment = self._segments().get(event_time(start, "start"))
        rows = [] if segment is None else self._of_key(segment, encoded)
        return self._values.decode(rows[-1]) if rows else None

    def fetch(
        self, key: object, start: int | None = None, end: int | None = None, *, backward: bool = False
    ) -> Iterator[tuple[int, Any]]:
        """Iterate over the windows of a key that start in `[start, end)`, as (start, value), by time."""
        encoded = encode_key(key)
        rows = [(at, data) for at, segment in self._between(start, end) for data in self._of_key(segment, encoded)]
        return ((at, self._values.decode(data)) for at, data in (reversed(rows) if backward else rows))

    def fetch_range(
        self,
        first: object,
        last: object,
        start: int | None = None,
        end: int | None = None,
        *,
        backward: bool = False,
    ) -> Iterator[tuple[Windowed, Any]]:
        """Iterate over the windows that start in `[start, end)` of the keys in `[first, last)`; None is no limit."""
        low = None if first is None else encode_key(first)
        high = None if last is None else encode_key(last)
        rows = [
            (at, key, segment[key]) for at, segment in self._between(start, end) for key in _ordered(segment, low, high)
        ]
        return self._windowed(rows[::-1] if backward else rows)

    def fetch_all(
        self, start: int | None = None, end: int | None = None, *, backward: bool = False
    ) -> Iterator[tuple[Windowed, Any]]:
        """Iterate over the windows of all keys that start in `[start, end)`."""
        return self.fetch_range(None, None, start, end, backward=backward)

    def all(self, *, backward: bool = False) -> Iterator[tuple[Windowed, Any]]:
        """Iterate over everything that is visible."""
        return self.fetch_all(backward=backward)

    def flush(self) -> None:
        """Do nothing: there is no disk."""

    def close(self) -> None:
        """Forget everything; snapshots that were handed out go on. Closing twice does nothing."""
        self._open = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _segments(self) -> SortedDict:
        """Give the segments, without those that have expired since the last action."""
        if self._open is None:
            raise StoreClosed("the store is closed", where=self.name)
        while self._open and self._open.peekitem(0)[0] < self._clock.floor:
            self._open.popitem(0)
        return self._open

    def _between(self, start: int | None, end: int | None) -> list[tuple[int, _Segment]]:
        low = None if start is None else event_time(start, "the first start")
        high = None if end is None else event_time(end, "the last start")
        segments = self._segments()
        return [(at, segments[at]) for at in segments.irange(low, high, inclusive=(True, False))]

    def _of_key(self, segment: _Segment, encoded: bytes) -> list[bytes]:
        if self.options.retain_duplicates:
            return [segment[row] for row in _ordered(segment, encoded, encoded + BEYOND)]
        return [segment[encoded]] if encoded in segment else []

    def _windowed(self, rows: list[tuple[int, bytes, bytes]]) -> Iterator[tuple[Windowed, Any]]:
        size, until = self.options.window_size_ms, -TIME_BYTES if self.options.retain_duplicates else None
        for at, key, data in rows:
            yield Windowed(decode(key[:until]), at, at + size), self._values.decode(data)


def _ordered(segment: _Segment, low: bytes | None, high: bytes | None) -> list[bytes]:
    """Give the keys of a segment in `[low, high)`, in order."""
    if isinstance(segment, SortedDict):
        return list(segment.irange(low, high, inclusive=(True, False)))
    return sorted(key for key in segment if (low is None or low <= key) and (high is None or key < high))
