"""The two execution contexts of SAMZA-552, for any operator: backend.operators.contexts says what they do.

A message is a micro-batch of one through the columnar operator that Spark runs.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa

from backend.batch import MAX_TIME, MESSAGE_FIELDS, MIN_TIME, NO_TIME, MicroBatch, Operator, Position, SourcePartition
from backend.bounds import stored_bounds
from backend.errors import SelectorDisabled
from backend.memory import MemoryStore
from backend.operators.ledger import decode_row
from backend.store import Region, Store
from backend.workspace import Workspace

FORMAT = 1
Result = dict[str, Any]

_KEY = bytes([Region.OPERATOR]) + b"positions"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    Attributes:
        offset: Rises within a source partition; gaps are fine.
        time: Event time, milliseconds.
        fields: Values by name; missing ones are null.
        partition: Source partition.
        stream: Number of the stream.
    """

    offset: int
    time: int
    fields: Mapping[str, Any]
    partition: int = 0
    stream: int = 0


class _Saved(msgspec.Struct, array_like=True):
    """What a context keeps in the store beside the operator's state."""

    format: int
    version: int
    positions: list[tuple[int, int, Position]]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Saved)


def wall_clock_ms() -> int:
    """Give the system's wall clock."""
    return time.time_ns() // 1_000_000


class Context:
    """What both contexts do.

    Args:
        operator: What runs.
        fields: The columns that its messages have besides `MESSAGE_FIELDS`.
        max_ahead_ms: Event times later than the wall clock plus this do not move stream time; None for no limit.
        store: Where state is flushed to; the caller closes it. None keeps it in memory.
        clock: Wall clock in milliseconds, for calls that do not say it.
    """

    def __init__(
        self,
        operator: Operator,
        fields: pa.Schema,
        max_ahead_ms: int | None,
        store: Store | None = None,
        *,
        clock: Callable[[], int] = wall_clock_ms,
    ) -> None:
        self._operator, self._max_ahead_ms = operator, max_ahead_ms
        self._store, self._clock = store if store is not None else MemoryStore(), clock
        self._schema = pa.schema([*MESSAGE_FIELDS, *fields])
        self._work = Workspace(self._store, stored_bounds(self._store))
        data = self._work.get(_KEY)
        saved = _Saved(FORMAT, 0, []) if data is None else decode_row(data, _decoder, FORMAT, "a context's positions")
        self._version = saved.version
        self._positions: dict[SourcePartition, Position] = {(s, p): position for s, p, position in saved.positions}
        self.next_due_ms: int | None = None
        """Wall clock at which `timeout` has something to do; None when nothing waits."""

    @property
    def positions(self) -> Mapping[SourcePartition, Position]:
        """How far each source partition was added, flushed or not."""
        return dict(self._positions)

    def _process(self, messages: Sequence[Message], wall_ms: int | None) -> tuple[list[Result], list[Result], bool]:
        """Run a micro-batch; gives results, errors, and whether a window was opened or went out of retention."""
        now = self._clock() if wall_ms is None else wall_ms
        fresh, after = self._advance(messages, now)
        if messages and not fresh:
            return [], [], False
        bounds = dict(self._work.bounds)
        batch = MicroBatch(self._version, now, self._table(fresh), self._positions, after)
        outcome = self._operator.process(batch, self._work)
        self._positions, self._version, self.next_due_ms = after, self._version + 1, outcome.next_due_ms
        told = outcome.metrics.get("opened") or outcome.metrics.get("expired")
        moved = bool(told) or dict(self._work.bounds) != bounds
        return outcome.results.to_pylist(), outcome.errors.to_pylist(), moved

    def _advance(
        self, messages: Sequence[Message], now: int
    ) -> tuple[list[tuple[Message, int]], dict[SourcePartition, Position]]:
        """Drop what was added before; put the stream time before it beside each other message."""
        after = dict(self._positions)
        latest = MAX_TIME if self._max_ahead_ms is None else min(MAX_TIME, now + self._max_ahead_ms)
        fresh = []
        for message in sorted(messages, key=lambda m: (m.stream, m.partition, m.offset)):
            source = (message.stream, message.partition)
            old = after.get(source, Position(message.offset, NO_TIME, now))
            if message.offset < old.next_offset:
                continue
            fresh.append((message, old.stream_time))
            reached = old.stream_time
            if MIN_TIME <= message.time <= latest:
                reached = max(reached, message.time)
            after[source] = Position(message.offset + 1, reached, now)
        return fresh, after

    def _table(self, messages: Sequence[tuple[Message, int]]) -> pa.Table:
        columns: list[list[Any]] = [
            [m.stream for m, _ in messages],
            [m.partition for m, _ in messages],
            [m.offset for m, _ in messages],
            [m.time for m, _ in messages],
            [before for _, before in messages],
        ]
        columns += [[self._value(m, name) for m, _ in messages] for name in self._schema.names[len(MESSAGE_FIELDS) :]]
        arrays = [pa.array(column, f.type) for column, f in zip(columns, self._schema, strict=True)]
        return pa.table(arrays, schema=self._schema)

    def _value(self, message: Message, column: str) -> Any:
        """Give what a message has in a column."""
        return message.fields.get(column)

    def _flush(self) -> None:
        """Write everything since the last flush, positions with it, atomically and durably."""
        positions = [(s, p, position) for (s, p), position in sorted(self._positions.items())]
        self._work.put(_KEY, _encoder.encode(_Saved(FORMAT, self._version, positions)))
        self._store.write(self._work.changes())
        self._work = Workspace(self._store, dict(self._work.bounds))


class Automatic(Context):
    """SAMZA-552's automatic execution context: results flow on by themselves.

    Args:
        operator: As for both contexts.
        fields: As for both contexts.
        max_ahead_ms: As for both contexts.
        downstream: Takes one result; False refuses it for now.
        store: As for both contexts.
        on_error: Takes one row of the errors output (out of retention, ...); None drops them.
        clock: Wall clock in milliseconds.
    """

    def __init__(
        self,
        operator: Operator,
        fields: pa.Schema,
        max_ahead_ms: int | None,
        downstream: Callable[[Result], bool],
        store: Store | None = None,
        *,
        on_error: Callable[[Result], None] | None = None,
        clock: Callable[[], int] = wall_clock_ms,
    ) -> None:
        super().__init__(operator, fields, max_ahead_ms, store, clock=clock)
        self._downstream, self._on_error = downstream, on_error
        self._unsent: deque[Result] = deque()
        self._must_flush = False

    @property
    def selector_enabled(self) -> bool:
        """False while a downstream refuses results: messages must not be delivered then."""
        return not self._unsent

    def add_message(self, message: Message, wall_ms: int | None = None) -> None:
        """Add one message; a replay of something already added is a NOOP.

        What the policies have due by now is sent, also when the message itself is refused (SAMZA-552 waits for the next
        message or `timeout` then).

        Raises:
            SelectorDisabled: A downstream refuses output; call `timeout` first.
        """
        self.add_messages([message], wall_ms)

    def add_messages(self, messages: Sequence[Message], wall_ms: int | None = None) -> None:
        """Add some messages at once: policies are looked at after the last one.

        Raises:
            SelectorDisabled: As for `add_message`; nothing was added.
        """
        if not self.selector_enabled:
            _log.warning("a message came while the selector is disabled: %d results wait", len(self._unsent))
            raise SelectorDisabled(
                "a message came while a downstream refuses output",
                why=f"{len(self._unsent)} results wait to be sent",
                command="call timeout() until selector_enabled is true, then add the message again",
            )
        self._run(messages, wall_ms)

    def timeout(self, wall_ms: int | None = None) -> None:
        """Go on sending where the downstream refused; when it takes everything, look at the policies."""
        if self._send():
            self._run([], wall_ms)

    def flush(self) -> None:
        """Write the state now. While results are refused it waits, so that they are made again after a failure."""
        if self.selector_enabled:
            self._flush()

    def _run(self, messages: Sequence[Message], wall_ms: int | None) -> None:
        results, errors, moved = self._process(messages, wall_ms)
        for error in errors:
            if self._on_error is not None:
                self._on_error(error)
        self._unsent.extend(results)
        self._must_flush |= moved or bool(results)
        self._send()

    def _send(self) -> bool:
        """Send until the downstream refuses; flush after the last result (SAMZA-552, step 7)."""
        while self._unsent:
            if not self._downstream(self._unsent[0]):
                return False
            self._unsent.popleft()
        if self._must_flush:
            self._flush()
            self._must_flush = False
        return True


class Standalone(Context):
    """SAMZA-552's standalone context: the caller fetches results and flushes."""

    def __init__(
        self,
        operator: Operator,
        fields: pa.Schema,
        max_ahead_ms: int | None,
        store: Store | None = None,
        *,
        clock: Callable[[], int] = wall_clock_ms,
    ) -> None:
        super().__init__(operator, fields, max_ahead_ms, store, clock=clock)
        self._results: list[Result] = []
        self._errors: list[Result] = []

    def add_message(self, message: Message, wall_ms: int | None = None) -> None:
        """Add one message; a replay of something already added is a NOOP."""
        self.add_messages([message], wall_ms)

    def add_messages(self, messages: Sequence[Message], wall_ms: int | None = None) -> None:
        """Add some messages at once: policies are looked at after the last one."""
        if messages:
            self._run(messages, wall_ms)

    def timeout(self, wall_ms: int | None = None) -> None:
        """Look at the policies without a message."""
        self._run([], wall_ms)

    def get_result(self) -> list[Result]:
        """Give a copy of the results since the last `flush`."""
        return list(self._results)

    def get_errors(self) -> list[Result]:
        """Give a copy of the refused messages since the last `flush`, as rows of the errors output."""
        return list(self._errors)

    def flush(self) -> None:
        """Clear results and errors, and write state and positions durably, as a whole."""
        self._results.clear()
        self._errors.clear()
        self._flush()

    def _run(self, messages: Sequence[Message], wall_ms: int | None) -> None:
        results, errors, _ = self._process(messages, wall_ms)
        self._results += results
        self._errors += errors
