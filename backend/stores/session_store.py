"""`SessionStore` (KIP-94), persistent: (record key, start, end) to aggregate, in segments by session end.

Layout of the rows behind region byte and sub-byte BY_TIME (see `backend.stores.named`)::

    | segment, 8 bytes | key | end, 8 bytes | start, 8 bytes | -> aggregate        segment = end // interval

That is the KIP's composite of record key, end and start, inside the KIP's segments. A read of one key looks into each
segment from the earliest end on, where its sessions lie next to each other; an expired segment goes by one bound. What
is visible and what is dropped does not depend on the segments: they only give space back.

* visible: `end >= stream time - retention`, on every read, at once; earlier puts are dropped and counted.
* stream time: the newest end that was put or removed; never back; it is stored.
* iterators are snapshots. Sessions come in the order of (end, key, start).
* the segment interval is that of the first start: a retention that is changed later does not move it.

>>> from backend.store.memory import MemoryStore
>>> from backend.store.workspace import Workspace
>>> store = SessionOptions("visits", retention="1 hour").bind(Workspace(MemoryStore()), 0x40, 0)
>>> for start, end in ((0, 99), (101, 200), (201, 300), (301, 400)):
...     _ = store.put(SessionKey("anna", start, end), 1)
>>> [(key.start, key.end) for key, _ in store.find("anna", 150, 250)]
[(101, 200), (201, 300)]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import InitVar, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, cast

from backend.batch import NO_TIME
from backend.errors import KeyInvalid
from backend.keys import decode
from backend.rocks import RocksOptions
from backend.store.workspace import Workspace
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

MIN_SEGMENT_INTERVAL_MS = 60_000
"""Shortest segment unless the options say otherwise."""
MAX_SEGMENTS = 1_024
"""A read of one key looks into each live segment, so there is a limit to their number."""

_END_AT, _START_AT = -2 * TIME_BYTES, -TIME_BYTES


class SessionKey(NamedTuple):
    """The key of a session; both ends are times of its data and belong to it.

    Attributes:
        key: The record's key.
        start: Time of the first record, ms.
        end: Time of the last record, ms; equal to `start` for a single one.
    """

    key: Any
    start: int
    end: int


def segment_interval(retention_ms: int, num_segments: int, min_interval_ms: int = MIN_SEGMENT_INTERVAL_MS) -> int:
    """Give the length of a segment: `max(retention / (num_segments - 1), min_interval)` (KIP-94).

    >>> segment_interval(3_600_000, 3), segment_interval(60_000, 3), segment_interval(2_000, 3, 1_000)
    (1800000, 60000, 1000)
    """
    return max(retention_ms // (num_segments - 1), min_interval_ms)


def segment_index(end: int, interval_ms: int) -> int:
    """Give the segment that a session end belongs to.

    >>> [segment_index(end, 1_000) for end in (0, 500, 1_000, 2_000, -1)]
    [0, 0, 1, 2, -1]
    """
    return end // interval_ms


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """A session store by name and options: what `process(stores=[...])` takes.

    Args:
        name: Name of the store.
        retention: A session stays visible while `end >= stream time - retention`.
        num_segments: Into how many segments the retention is cut, at least 2.
        min_segment_interval: Shortest segment.
        value_type: As in `values.ValueCodec`.

    Attributes:
        retention_ms: The retention in milliseconds.
        interval_ms: Length of a segment of a new store.

    Raises:
        TypeError: The name is None, or an option is of the wrong type.
        ValueError: The retention is negative, there are fewer than two segments or more than `MAX_SEGMENTS`, or the
            shortest segment is not positive.
    """

    kind: ClassVar[str] = "session"

    name: str
    retention: InitVar[Duration]
    num_segments: int = 3
    min_segment_interval: InitVar[Duration] = MIN_SEGMENT_INTERVAL_MS
    value_type: Any = None
    retention_ms: int = field(init=False)
    interval_ms: int = field(init=False)

    def __post_init__(self, retention: Duration, min_segment_interval: Duration) -> None:
        check_name(self.name)
        retention_ms = milliseconds(retention, "retentionPeriod")
        shortest_ms = milliseconds(min_segment_interval, "minSegmentInterval")
        if retention_ms < 0:
            raise ValueError(f"retentionPeriod cannot be negative: got {retention_ms} ms, allowed are 0 and more")
        if isinstance(self.num_segments, bool) or not isinstance(self.num_segments, int):
            raise TypeError(f"num_segments must be an int, not {type(self.num_segments).__name__}")
        if self.num_segments < 2:
            raise ValueError(f"num_segments={self.num_segments}: numSegments cannot be smaller than 2")
        if self.num_segments > MAX_SEGMENTS:
            raise ValueError(f"num_segments={self.num_segments}: allowed are 2 to {MAX_SEGMENTS}")
        if shortest_ms < 1:
            raise ValueError(f"min_segment_interval={shortest_ms} ms: allowed is 1 ms and more")
        ValueCodec(self.value_type)
        object.__setattr__(self, "retention_ms", retention_ms)
        object.__setattr__(self, "interval_ms", segment_interval(retention_ms, self.num_segments, shortest_ms))

    def bind(self, work: Workspace, region: int, time_ms: int) -> SessionStore:
        """Give the store over one attempt's workspace; its time is that of its own puts."""
        return SessionStore(work, region, self)

    def describe(self) -> dict[str, object]:
        """Give the manifest's entry; the retention may change, segments of a store that exists stay as they are."""
        return described(self, retention_ms=self.retention_ms)


class SessionStore(Clocked, NamedStore):
    """A session store over a workspace; `open` gives one with a database of its own.

    Args:
        work: Where every read and write goes.
        region: The region that the store owns.
        options: Name, retention, segments, value type.
    """

    options: SessionOptions

    def __init__(self, work: Workspace, region: int, options: SessionOptions) -> None:
        self._interval_ms = options.interval_ms
        layout = {"segment_interval_ms": options.interval_ms}
        super().__init__(work, region, options, layout=layout, clock=StreamClock(options.retention_ms))

    @classmethod
    def open(
        cls,
        path: Path | str,
        *,
        retention: Duration,
        num_segments: int = 3,
        min_segment_interval: Duration = MIN_SEGMENT_INTERVAL_MS,
        value_type: Any = None,
        name: str = "session",
        options: RocksOptions | None = None,
        wait_s: float = 10.0,
    ) -> Self:
        """Open or make a session store of its own at `path`, without Spark; options as in `SessionOptions`.

        Raises:
            StoreLocked: Another process holds it for longer than `wait_s` seconds.
            ManifestMismatch: There is another store at `path`.
        """
        declared = SessionOptions(name, retention, num_segments, min_segment_interval, value_type)
        return cast(Self, StoreSet.open(path, [declared], options=options, wait_s=wait_s)[name])

    @property
    def segment_interval_ms(self) -> int:
        """Length of a segment: that of the store's first start."""
        return self._interval_ms

    def put(self, session: SessionKey, value: object) -> bool:
        """Store the aggregate of a session; None deletes it.

        Returns:
            False when the session has ended before the retention and was dropped.

        Raises:
            KeyInvalid: The record key is None or has no order, a time is none, or the session ends before it starts.
            ValueInvalid: The value cannot be stored. In all these cases nothing changed.
        """
        row, end = self._row(session)
        data = None if value is None else self._values.encode(value)
        work, clock = self._work, self._clock
        if end < clock.floor:
            clock.dropped += 1
            return False
        clock.advance(end)
        if data is None:
            work.delete(row)
        else:
            work.put(row, data)
        return True

    def remove(self, session: SessionKey) -> None:
        """Remove a session; one that is not there, or has expired, stays gone."""
        row, end = self._row(session)
        self._work.delete(row)
        self._clock.advance(end)

    def fetch_session(self, key: object, start: int, end: int) -> Any:
        """Return the aggregate of exactly this session, None when there is none."""
        row, end = self._row(SessionKey(key, start, end))
        return self._values.decode(self._work.get(row)) if end >= self._clock.floor else None

    def find(
        self, key: object, earliest_end: int, latest_start: int, *, backward: bool = False
    ) -> Iterator[tuple[SessionKey, Any]]:
        """Iterate over the sessions of a key with `end >= earliest_end` and `start <= latest_start`: the KIP's fetch.

        Both ends are included. Rows are in order of end, so a start that is too late ends nothing: it is left out.
        """
        encoded = encode_key(key)
        low, latest = self._conditions(earliest_end, latest_start)
        found = [
            self._work.scan(prefix + encoded + time_bytes(low), prefix + encoded + BEYOND, reverse=backward)
            for prefix in self._segments(low, backward)
        ]
        return self._iterate(self._sessions((row for scan in found for row in scan), latest))

    def find_range(
        self, first: object, last: object, earliest_end: int, latest_start: int, *, backward: bool = False
    ) -> Iterator[tuple[SessionKey, Any]]:
        """Do as `find` for the keys in `[first, last)`; None is no limit.

        Holds what it found in one segment, to put it in order.
        """
        low, latest = self._conditions(earliest_end, latest_start)
        from_key = b"" if first is None else encode_key(first)
        to_key = BEYOND if last is None else encode_key(last)
        found = [
            self._work.scan(prefix + from_key, prefix + max(from_key, to_key))
            for prefix in self._segments(low, backward)
        ]
        rows = (row for scan in found for row in _by_end(scan, backward) if time_of(row[0][_END_AT:_START_AT]) >= low)
        return self._iterate(self._sessions(rows, latest))

    def fetch(self, key: object, *, backward: bool = False) -> Iterator[tuple[SessionKey, Any]]:
        """Iterate over all visible sessions of a key."""
        return self.find(key, -(2**62), 2**62, backward=backward)

    def fetch_by_end(
        self, start: int | None = None, end: int | None = None, *, backward: bool = False
    ) -> Iterator[tuple[SessionKey, Any]]:
        """Iterate over the sessions of all keys that end in `[start, end)`; None is no limit.

        Reads the segments of these ends whole, and holds one at a time.
        """
        floor = self._clock.floor
        low = floor if start is None else max(floor, event_time(start, "the first end"))
        high = 2**62 + 1 if end is None else event_time(end, "the last end")
        from_row = self._segment(segment_index(low, self._interval_ms))
        to_row = self._segment(segment_index(high - 1, self._interval_ms) + 1)
        scan = self._work.scan(from_row, max(from_row, to_row), reverse=backward)
        rows = (
            row
            for _, segment in groupby(scan, key=lambda row: row[0][:KEY_AT])
            for row in _by_end(segment, backward)
            if low <= time_of(row[0][_END_AT:_START_AT]) < high
        )
        return self._iterate(self._sessions(rows, 2**62))

    def all(self, *, backward: bool = False) -> Iterator[tuple[SessionKey, Any]]:
        """Iterate over everything that is visible."""
        return self.fetch_by_end(backward=backward)

    def _row(self, session: SessionKey) -> tuple[bytes, int]:
        """Check a session; give its row's key and its end."""
        if not isinstance(session, tuple) or len(session) != 3:
            raise KeyInvalid("a session is a SessionKey(key, start, end)", why=f"{type(session).__name__} was given")
        encoded = encode_key(session[0])
        start, end = event_time(session[1], "the session's start"), event_time(session[2], "the session's end")
        if start > end:
            raise KeyInvalid("a session ends before it starts", why=f"start {start}, end {end}")
        segment = self._segment(segment_index(end, self._interval_ms))
        return segment + encoded + time_bytes(end) + time_bytes(start), end

    def _segment(self, index: int) -> bytes:
        return self._by_time + time_bytes(index)

    def _segments(self, low: int, backward: bool) -> list[bytes]:
        """Give the prefixes of the segments that may hold ends of `low` and later, in the order of reading."""
        if self._clock.stream_time == NO_TIME:
            return []
        first = segment_index(low, self._interval_ms)
        last = segment_index(self._clock.stream_time, self._interval_ms)
        # far more than the options allow there are only where a retention was made much longer: look which are there
        numbers = range(first, last + 1) if last - first < MAX_SEGMENTS else self._present(first)
        return [self._segment(number) for number in (reversed(numbers) if backward else numbers)]

    def _present(self, first: int) -> list[int]:
        """Give the segments from `first` on that hold something; one look for each."""
        found: list[int] = []
        end = self._by_time + BEYOND
        while (row := next(self._work.scan(self._segment(first), end), None)) is not None:
            found.append(time_of(row[0][ROWS_AT:KEY_AT]))
            first = found[-1] + 1
        return found

    def _conditions(self, earliest_end: int, latest_start: int) -> tuple[int, int]:
        earliest = event_time(earliest_end, "the earliest end")
        return max(earliest, self._clock.floor), event_time(latest_start, "the latest start")

    def _sessions(self, rows: Iterator[tuple[bytes, bytes]], latest: int) -> Iterator[tuple[SessionKey, Any]]:
        decode_value = self._values.decode
        for row, value in rows:
            start = time_of(row[_START_AT:])
            if start <= latest:
                yield (
                    SessionKey(decode(row[KEY_AT:_END_AT]), start, time_of(row[_END_AT:_START_AT])),
                    decode_value(value),
                )

    def _settle_layout(self, stored: dict[str, int | str | bool]) -> dict[str, int | str | bool]:
        """Keep the segments as they were made."""
        self._interval_ms = int(stored["segment_interval_ms"])
        return stored

    def _reclaim(self) -> None:
        """Raise the bound to the oldest segment that holds something visible."""
        if self._clock.stream_time != NO_TIME:
            oldest = segment_index(self._clock.floor, self._interval_ms)
            self._work.raise_bound(self._region, self._segment(oldest))


def _by_end(rows: Iterator[tuple[bytes, bytes]], backward: bool) -> list[tuple[bytes, bytes]]:
    """Put the rows of one segment in the order of (end, key, start)."""
    return sorted(rows, key=lambda row: (row[0][_END_AT:_START_AT], row[0][KEY_AT:]), reverse=backward)
