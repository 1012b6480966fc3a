"""KIP-94's session windows: the processor that finds, merges, aggregates and stores, and the DSL on top of it.

A record belongs to every session of its key that lies at most the inactivity gap away; two such sessions become one.

>>> from backend.store.memory import MemoryStore
>>> from backend.store.workspace import Workspace
>>> visits = count(SessionWindows.inactivity_gap(5).until("1 hour"), "visits")
>>> processor = visits.processor(visits.store.bind(Workspace(MemoryStore()), 0x40, 0))
>>> for time in (10, 12, 20, 16):
...     for update in processor.process("anna", "a page", time):
...         print(update.session.start, update.session.end, update.value)
10 10 1
10 10 None
10 12 2
20 20 1
10 12 None
20 20 None
10 20 4
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from backend.batch import MAX_TIME, MIN_TIME, PARTITION, STREAM, TIME
from backend.boundary import check_function
from backend.chunks import taken_rows
from backend.python_rows import arrow_value, python_values
from backend.stores.durations import Duration, milliseconds
from backend.stores.named import event_time
from backend.stores.session_store import MIN_SEGMENT_INTERVAL_MS, SessionKey, SessionOptions, SessionStore

DEFAULT_RETENTION_MS = 24 * 60 * 60 * 1000
"""Retention of session windows without `until`."""

Initializer = Callable[[], Any]
"""Gives the aggregate of no records."""
Aggregator = Callable[[Any, Any, Any], Any]
"""(key, value, aggregate) -> aggregate."""
SessionMerger = Callable[[Any, Any, Any], Any]
"""(key, first aggregate, second aggregate) -> aggregate of both."""
Reducer = Callable[[Any, Any], Any]
"""(value, value) -> value."""


@dataclass(frozen=True, slots=True)
class SessionWindows:
    """How sessions are cut: by `SessionWindows.inactivity_gap(...)`, then `.until(...)`.

    Attributes:
        gap_ms: Longest distance of two records of one session, inclusive.
        retention_ms: How long a session is kept for late records, of stream time; at least the gap.
    """

    gap_ms: int
    retention_ms: int

    @classmethod
    def inactivity_gap(cls, gap: Duration) -> SessionWindows:
        """Cut sessions where a key was inactive for longer than `gap`.

        Raises:
            TypeError: The gap is no duration.
            ValueError: It is zero or negative.
        """
        gap_ms = milliseconds(gap, "inactivityGap")
        if gap_ms < 1:
            raise ValueError(f"Gap time cannot be zero or negative: got {gap_ms} ms, allowed is 1 ms and more")
        return cls(gap_ms, max(DEFAULT_RETENTION_MS, gap_ms))

    def until(self, duration: Duration) -> SessionWindows:
        """Keep sessions for late records: a guaranteed lower bound, here exact.

        Raises:
            TypeError: Not a duration.
            ValueError: Shorter than the gap.
        """
        retention_ms = milliseconds(duration, "durationMs")
        if retention_ms < self.gap_ms:
            raise ValueError(
                "Window retention time (durationMs) cannot be smaller than window gap: "
                f"got {retention_ms} ms, the gap is {self.gap_ms} ms"
            )
        return replace(self, retention_ms=retention_ms)


class SessionUpdate(NamedTuple):
    """A change of the table of sessions.

    Attributes:
        session: The session.
        value: Its aggregate; None when the session is no more: merged into another.
    """

    session: SessionKey
    value: Any


class SessionProcessor:
    """Folds records into a session store, one at a time, as KIP-94's processor does.

    Args:
        store: Where the sessions are.
        aggregation: The gap, and what to do with records and aggregates.

    Attributes:
        skipped: Records without a key that were left out.
    """

    def __init__(self, store: SessionStore, aggregation: SessionAggregation) -> None:
        self._store, self._gap_ms, self._how = store, aggregation.windows.gap_ms, aggregation
        self.skipped = 0

    def process(self, key: object, value: object, time: int) -> list[SessionUpdate]:
        """Fold one record; give what it changed: retracted sessions first, then the one it is in.

        A record after the retention is dropped (the store counts it) and changes nothing. A late record that reaches a
        session that is still kept belongs to it.

        Raises:
            KeyInvalid: `time` is no time, or the key has no order.
        """
        if key is None:
            self.skipped += 1
            return []
        time = event_time(time, "the record's time")
        merged = SessionKey(key, time, time)
        aggregate = self._how.initializer()
        found = []
        earliest, latest = max(time - self._gap_ms, MIN_TIME), min(time + self._gap_ms, MAX_TIME)
        for session, part in self._store.find(key, earliest, latest):
            aggregate = self._how.merger(key, aggregate, part)
            merged = SessionKey(key, min(merged.start, session.start), max(merged.end, session.end))
            found.append(session)
        aggregate = self._how.aggregator(key, value, aggregate)
        # the new session goes in first: what cannot be stored is refused before anything was removed
        if not self._store.put(merged, aggregate):
            return []
        updates = []
        for session in found:
            if (session.start, session.end) != (merged.start, merged.end):
                self._store.remove(session)
                updates.append(SessionUpdate(session, None))
        if aggregate is not None or merged in found:
            updates.append(SessionUpdate(merged, aggregate))
        return updates


class _Context(Protocol):
    """What the function of a `SessionAggregation` needs of `process.ProcessContext`."""

    def __getitem__(self, name: str, /) -> Any:
        """Give a store by name."""


@dataclass(frozen=True, slots=True)
class SessionAggregation:
    """What the DSL gives: the store to declare, and the processor over it.

    Attributes:
        windows: Gap and retention.
        store: Declaration of the store, for `process(stores=[...])` and for `StoreSet`.
        initializer: Gives the aggregate of no records.
        aggregator: Adds a record to an aggregate.
        merger: Makes one aggregate of two.
    """

    windows: SessionWindows
    store: SessionOptions
    initializer: Initializer = field(repr=False)
    aggregator: Aggregator = field(repr=False)
    merger: SessionMerger = field(repr=False)

    def processor(self, store: SessionStore) -> SessionProcessor:
        """Give the processor over a store that was bound or opened."""
        return SessionProcessor(store, self)

    def result_schema(self, key_type: pa.DataType, value_type: pa.DataType) -> pa.Schema:
        """Give the schema of what `function` returns: a changelog of the table of sessions."""
        return pa.schema(
            [
                pa.field("reason", pa.string(), nullable=False),  # update | retracted
                pa.field("key", key_type, nullable=False),
                pa.field("session_start", pa.int64(), nullable=False),  # ms
                pa.field("session_end", pa.int64(), nullable=False),  # ms, inclusive
                pa.field("value", value_type),
            ]
        )

    def function(
        self, key: str, value: str | None, *, key_type: pa.DataType, value_type: pa.DataType
    ) -> Callable[[pa.Table, _Context], pa.Table]:
        """Give the function for `process(function, stores=[aggregation.store])`.

        It takes the source partitions of a micro-batch side by side, by the stream time of each: the store has one
        clock over all of them.

        Args:
            key: Column of the record keys; rows without one are left out.
            value: Column of the values; None hands None to the aggregator.
            key_type: Arrow type of the key in the results.
            value_type: Arrow type of the aggregate in the results.
        """
        schema = self.result_schema(key_type, value_type)

        def fold(messages: pa.Table, context: _Context) -> pa.Table:
            processor, messages = self.processor(context[self.store.name]), _side_by_side(messages)
            values = [None] * messages.num_rows if value is None else python_values(messages.column(value))
            rows = zip(python_values(messages.column(key)), values, messages.column(TIME).to_pylist(), strict=True)
            return _table((update for row in rows for update in processor.process(*row)), schema)

        return fold


def _side_by_side(messages: pa.Table) -> pa.Table:
    """Order messages by the newest time of their source partition up to them; within one their order stays."""
    if not {STREAM, PARTITION} <= {*messages.schema.names}:
        return messages
    stream, partition, time = (messages.column(name).to_numpy() for name in (STREAM, PARTITION, TIME))
    order = np.lexsort((partition, stream))
    changes = (np.diff(stream[order]) != 0) | (np.diff(partition[order]) != 0)
    if not changes.any():
        return messages
    # times by rank, and those of each source partition above those before it: one running maximum does for all
    base = np.concatenate([[0], np.cumsum(changes)]) * len(order)
    reached = np.maximum.accumulate(base + np.unique(time[order], return_inverse=True)[1]) - base
    return taken_rows(messages, order[np.argsort(reached, kind="stable")])


def _table(updates: Iterator[SessionUpdate], schema: pa.Schema) -> pa.Table:
    rows = [
        ("retracted" if value is None else "update", session.key, session.start, session.end, value)
        for session, value in updates
    ]
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(schema)
    arrays = [
        pa.array([arrow_value(value, one.type) for value in column], one.type)
        for column, one in zip(columns, schema, strict=True)
    ]
    return pa.table(arrays, schema=schema)


def aggregate(
    initializer: Initializer,
    aggregator: Aggregator,
    session_merger: SessionMerger,
    windows: SessionWindows,
    store_name: str,
    *,
    num_segments: int = 3,
    min_segment_interval: Duration = MIN_SEGMENT_INTERVAL_MS,
    value_type: Any = None,
) -> SessionAggregation:
    """Aggregate each session's records: `KGroupedStream.aggregate(..., SessionWindows, ...)`.

    Args:
        initializer: Gives the aggregate of no records.
        aggregator: (key, value, aggregate) -> aggregate.
        session_merger: (key, first, second) -> aggregate of both.
        windows: Gap and retention.
        store_name: Name of the store.
        num_segments, min_segment_interval: As in `SessionOptions`.
        value_type: Type of the aggregate in the store, as in `values.ValueCodec`.

    Raises:
        TypeError: The windows are no `SessionWindows`.
        ValueError: A function takes other arguments.
    """
    check_function("initializer", initializer, ())
    check_function("aggregator", aggregator, ("key", "value", "aggregate"))
    check_function("session_merger", session_merger, ("key", "first", "second"))
    if not isinstance(windows, SessionWindows):
        raise TypeError(f"windows must be SessionWindows.inactivity_gap(...), not {type(windows).__name__}")
    store = SessionOptions(store_name, windows.retention_ms, num_segments, min_segment_interval, value_type)
    return SessionAggregation(windows, store, initializer, aggregator, session_merger)


def reduce(reducer: Reducer, windows: SessionWindows, store_name: str, *, value_type: Any = None) -> SessionAggregation:
    """Combine each session's values with each other: `KGroupedStream.reduce(reducer, SessionWindows, ...)`.

    Args:
        reducer: (value, value) -> value; it is not called for the first value of a session.
        windows: Gap and retention.
        store_name: Name of the store.
        value_type: Type of the values in the store.
    """
    check_function("reducer", reducer, ("first", "second"))

    def either(first: Any, second: Any) -> Any:
        if first is None or second is None:
            return second if first is None else first
        return reducer(first, second)

    return aggregate(
        lambda: None,
        lambda _key, value, so_far: either(so_far, value),
        lambda _key, first, second: either(first, second),
        windows,
        store_name,
        value_type=value_type,
    )


def count(windows: SessionWindows, store_name: str) -> SessionAggregation:
    """Count each session's records: `KGroupedStream.count(SessionWindows, ...)`."""
    return aggregate(
        lambda: 0,
        lambda _key, _value, so_far: so_far + 1,
        lambda _key, first, second: first + second,
        windows,
        store_name,
        value_type=int,
    )
