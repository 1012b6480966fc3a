"""The two execution contexts of SAMZA-552, for any operator: backend.contexts.windows says what they do.

A message is a micro-batch of one through the columnar operator that Spark runs.

Offsets. What was given already is a NOOP. With `offsets="ordered"` an offset that was passed without having been given
goes to the errors, reason `out_of_order`; with `offsets="unordered"` it is taken like any other. So which offsets were
given is kept (backend.contexts.offsets_seen).

What an operator cannot take goes to the errors before anything changes, as in Spark: `malformed` where a field does not
fit its type or the key is too long, `no_event_time`, `out_of_range`. Its offset counts as given, its time does not
count. An aggregate of the user's that raises leaves the context as it was: the message can be added again.
"""

from __future__ import annotations

import json
import logging
import reprlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
import pyarrow as pa

from backend.batch import (
    ERROR_SCHEMA,
    EVENT_TIMES,
    FREE_OPTIONS,
    MAX_EVENT_TIME,
    MESSAGE_FIELDS,
    MIN_EVENT_TIME,
    NO_TIME,
    MicroBatch,
    Position,
    SourcePartition,
    counts_offsets,
)
from backend.contexts import offsets_seen
from backend.errors import KeyInvalid, ManifestMismatch, SelectorDisabled, StateAhead, UnknownFormat
from backend.keys import encode_columns
from backend.python_rows import python_rows
from backend.store.bounds import reclaim, stored_bounds
from backend.store.limits import MAX_KEY_TEXT_BYTES, key_text_bytes, large_rows
from backend.store.memory import MemoryStore
from backend.store.protocol import Region, Store
from backend.store.workspace import Workspace
from backend.texts import one_line
from backend.windows.ledger import decode_row

if TYPE_CHECKING:
    from backend.joins.operator import JoinOperator
    from backend.joins.spec import JoinSpec
    from backend.windows.operator import WindowOperator
    from backend.windows.spec import WindowSpec

_Positions = dict[SourcePartition, Position]
_Seen = dict[SourcePartition, offsets_seen.Seen]

FORMAT, WITHOUT_RUNS = 2, 1
"""Format 1 had positions alone: what was passed counted as given."""
Result = dict[str, Any]

_KEY = bytes([Region.OPERATOR]) + b"positions"
RECLAIM_EVERY = 8
"""Flushes between two deletions of what bounds hide: each is a file of the database for each region."""
_SPECIFICATION = bytes([Region.OPERATOR]) + b"specification"
SPECIFICATION_FORMAT = 1
"""Of the row with what the operator says of itself, JSON, but for the options that may change."""
MAX_WHY = 200
"""Characters of a detail: what does not fit may stand in it, and be long."""
_NUMBERS = ("stream", "partition", "offset", "time")
"""Attributes of `Message`, in the order of `MESSAGE_FIELDS`."""
_OUT_OF_ORDER = "out_of_order", "a later offset was given before, and this one was not, or too long ago to be known"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    Attributes:
        offset: Rises within a source partition; gaps are fine. From 0.
        time: Event time, milliseconds.
        fields: Values by name; missing ones are null.
        partition: Source partition, from 0.
        stream: Number of the stream, 0 to 65,535.
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
    due_ms: int | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Saved)


def wall_clock_ms() -> int:
    """Give the system's wall clock."""
    return time.time_ns() // 1_000_000


Spec = TypeVar("Spec", bound="WindowSpec | JoinSpec")
Runs = TypeVar("Runs", bound="WindowOperator | JoinOperator")


class Context(Generic[Spec, Runs]):
    """What both contexts do.

    Args:
        spec: What runs. Event times later than the wall clock plus its `max_ahead_ms` do not move stream time.
        store: Where state is flushed to; the caller closes it. None keeps it in memory.
        clock: Wall clock in milliseconds, for calls that do not say it.
        offsets: `"ordered"`, or `"unordered"` to take offsets that were passed before.

    Raises:
        ValueError: `offsets` is neither, `store` is none.
    """

    _operator_of: Callable[[Spec], Runs]

    def __init__(
        self,
        spec: Spec,
        store: Store | None = None,
        *,
        clock: Callable[[], int] = wall_clock_ms,
        offsets: str = offsets_seen.ORDERED,
    ) -> None:
        self.operator = self._operator_of(spec)
        allowed = (offsets_seen.ORDERED, offsets_seen.UNORDERED)
        if offsets not in allowed:
            raise ValueError(f"offsets={offsets!r}: allowed are {allowed[0]!r} and {allowed[1]!r}")
        if store is not None and not callable(getattr(store, "write", None)):
            raise ValueError(f"store={store!r}: allowed are None and a store, such as RocksStore.open(path)")
        self._ordered = offsets == offsets_seen.ORDERED
        self._spec, self._max_ahead_ms = spec, spec.max_ahead_ms
        self._store, self._clock = store if store is not None else MemoryStore(), clock
        self._schema = spec.message_schema
        self._work: Workspace = Workspace(self._store, stored_bounds(self._store))
        self._check_specification()
        reclaim(self._store, self._work.bounds)
        self._flushes = 0
        data = self._work.get(_KEY)
        saved = _Saved(FORMAT, 0, [])
        if data is not None:
            saved = decode_row(data, _decoder, FORMAT, "a context's positions", older=(WITHOUT_RUNS,))
        self._version = self._flushed = saved.version
        self._positions: _Positions = {(s, p): position for s, p, position in saved.positions}
        self._seen = offsets_seen.read(self._work, self._positions)
        self.next_due_ms: int | None = saved.due_ms
        """Wall clock at which `timeout` has something to do; None when nothing waits."""
        self._results: deque[Result] = deque()  # to be sent, or fetched
        self._errors: deque[Result] = deque()

    @property
    def positions(self) -> Mapping[SourcePartition, Position]:
        """How far each source partition was added, flushed or not."""
        return dict(self._positions)

    def add_message(self, message: Message, wall_ms: int | None = None) -> None:
        """Add one message as `add_messages` does; a replay of something already added is a NOOP."""
        self.add_messages([message], wall_ms)

    def add_messages(self, messages: Sequence[Message], wall_ms: int | None = None) -> None:
        """Add some messages at once: policies are looked at after the last one."""
        raise NotImplementedError

    def _process(self, messages: Sequence[Message], wall_ms: int | None) -> bool:
        """Run a micro-batch; tells whether there are results, or a window was opened or went out of retention."""
        now = self._clock() if wall_ms is None else wall_ms
        for message in messages:
            _check_place(message)
        first = {_place(one): one for one in map(_plain, reversed(messages))}
        messages = [first[place] for place in sorted(first)]
        fresh, refused, after, seen = self._advance(messages, self._unfit(messages), now)
        if messages and not fresh and not refused:
            return False
        bounds = dict(self._work.bounds)
        first_of = {(one.stream, one.partition): one.offset for one in reversed(messages)}
        firsts = {source: first for source, first in first_of.items() if source not in self._positions}
        batch = MicroBatch(self._version, now, self._table(fresh), self._positions, after, firsts=firsts)
        attempt = Workspace(self._work, bounds)
        outcome = self.operator.process(batch, attempt)  # a function of the user's may raise: then nothing was added
        results = python_rows(outcome.results)
        errors = [*(_error(*one) for one in refused), *python_rows(outcome.errors)]
        self._work.apply(attempt.changes())
        self._positions, self._version, self.next_due_ms = after, self._version + 1, outcome.next_due_ms
        self._seen |= seen
        self._results += results
        self._errors += errors
        found = results or outcome.metrics.get("opened") or outcome.metrics.get("expired")
        return bool(found) or dict(self._work.bounds) != bounds

    def _check_specification(self) -> None:
        """Refuse a store whose state another operator made; stores of before do not say which.

        Raises:
            ManifestMismatch: Names what differs.
            UnknownFormat: Another release wrote what it was.
        """
        data = self._work.get(_SPECIFICATION)
        if data is None:
            return
        row = json.loads(data)
        if row["format"] != SPECIFICATION_FORMAT:
            raise UnknownFormat(
                "what a context's state was made by is written in an unknown format",
                why=f"it is format {row['format']!r}, known is {SPECIFICATION_FORMAT}",
            )
        stored, mine = row["operator"], self._specification()
        if "columns" not in stored:  # of before it was written down
            mine.pop("columns", None)
        wrong = [name for name in sorted({*stored, *mine}) if stored.get(name) != mine.get(name)]
        if wrong:
            raise ManifestMismatch(
                "the store holds the state of another specification",
                why="; ".join(f"{name}: was {stored.get(name)!r}, is {mine.get(name)!r}" for name in wrong),
                command="give the specification as it was, or an empty store",
            )

    def _specification(self) -> dict[str, Any]:
        fixed = {name: one for name, one in self.operator.describe().items() if name not in FREE_OPTIONS}
        return dict(json.loads(json.dumps(fixed)))

    @property
    def _key_columns(self) -> Sequence[str]:
        """The columns of the messages' keys."""
        raise NotImplementedError

    def _unfit(self, messages: Sequence[Message]) -> dict[int, str]:
        """Return why the operator cannot take messages, by `id`."""

        def why(some: Sequence[Message]) -> str | None:
            try:
                table = self._table([(message, NO_TIME) for message in some])
            except (ValueError, TypeError, ArithmeticError) as error:
                return one_line(str(error), MAX_WHY)
            key = [table[name] for name in self._key_columns]
            longest = max(key_text_bytes(key, len(some)), default=0)
            if longest > MAX_KEY_TEXT_BYTES:
                return f"the key has {longest} bytes, at most {MAX_KEY_TEXT_BYTES} are allowed"
            for large in large_rows(table.columns, len(some)).values():
                return large
            try:
                if key:
                    encode_columns(key)
            except KeyInvalid as error:
                return one_line(str(error), MAX_WHY)
            return None

        if why(messages) is None:
            return {}
        return {id(message): found for message in messages if (found := why([message])) is not None}

    def _advance(
        self, messages: Sequence[Message], unfit: Mapping[int, str], now: int
    ) -> tuple[list[tuple[Message, int]], list[tuple[Message, str, str]], _Positions, _Seen]:
        """Drop what was given before, and put the stream time before it beside each other message.

        Args:
            messages: In order of (stream, partition, offset), each place once.
            unfit: Why some cannot be taken, by `id`.
            now: Wall clock.

        Returns:
            The messages to take; those that are refused, with reason and detail; the positions; the offsets that were
            given by then, of the source partitions that have others than before.

        Raises:
            OffsetsScattered: The offsets leave too many gaps; nothing was added.
        """
        after, by_offset = dict(self._positions), counts_offsets(self.operator)
        latest = MAX_EVENT_TIME if self._max_ahead_ms is None else min(MAX_EVENT_TIME, now + self._max_ahead_ms)
        fresh, refused = list[tuple[Message, int]](), list[tuple[Message, str, str]]()
        seen: _Seen = {}
        for message in messages:
            source = (message.stream, message.partition)
            old = after.get(source, Position(message.offset, NO_TIME, now))
            runs = seen.get(source) or self._seen.get(source) or offsets_seen.Seen({})
            if message.offset in runs:
                continue
            runs = seen[source] = runs if source in seen else runs.copy()
            runs.add(message.offset)
            if self._ordered:
                runs.forget()
            elif len(runs) > offsets_seen.MAX_RUNS:
                raise offsets_seen.scattered(source)
            behind, next_offset = message.offset < old.next_offset, max(message.offset + 1, old.next_offset)
            if id(message) in unfit or (self._ordered and behind):
                why = _OUT_OF_ORDER if self._ordered and behind else _unfit_reason(message, unfit[id(message)])
                refused.append((message, *why))
                after[source] = Position(next_offset, old.stream_time, now if by_offset else old.active_ms)
                continue
            fresh.append((message, old.stream_time))
            fits = MIN_EVENT_TIME <= message.time <= latest
            reached = max(old.stream_time, message.time) if fits else old.stream_time
            after[source] = Position(next_offset, reached, now if fits or by_offset else old.active_ms)
        return fresh, refused, after, seen

    def _table(self, messages: Sequence[tuple[Message, int]]) -> pa.Table:
        columns: list[list[Any]] = [[getattr(m, name) for m, _ in messages] for name in _NUMBERS]
        columns.append([before for _, before in messages])
        if not all(isinstance(time, Integral) for time in columns[3]):
            raise TypeError("an event time is an integer, milliseconds")
        columns += [[self._value(m, name) for m, _ in messages] for name in self._schema.names[len(MESSAGE_FIELDS) :]]
        for column, f in zip(columns, self._schema, strict=True):
            if pa.types.is_integer(f.type) and any(map(_is_fraction, column)):
                raise ValueError(f"{f.name} is an integer, and was given as a fraction")  # Arrow would cut it
        arrays = [pa.array(column, f.type) for column, f in zip(columns, self._schema, strict=True)]
        return pa.table(arrays, schema=self._schema)

    def _value(self, message: Message, column: str) -> Any:
        """Give what a message has in a column."""
        return message.fields.get(column)

    def _flush(self) -> None:
        """Write everything since the last flush, positions with it, atomically and durably."""
        data = self._store.get(_KEY)
        stored = _decoder.decode(data).version if data is not None else 0
        if stored != self._flushed:
            raise StateAhead(
                "another context has flushed to the store since this one was opened",
                why=f"it is at {stored}, this one began from {self._flushed}",
                command="open one context on a store; what this one was given since its last flush is added again",
            )
        positions = [(s, p, position) for (s, p), position in sorted(self._positions.items())]
        self._work.put(_KEY, _encoder.encode(_Saved(FORMAT, self._version, positions, self.next_due_ms)))
        if self._work.get(_SPECIFICATION) is None:
            row = {"format": SPECIFICATION_FORMAT, "operator": self._specification()}
            self._work.put(_SPECIFICATION, json.dumps(row, sort_keys=True).encode())
        for source, runs in sorted(self._seen.items()):
            runs.save(self._work, source)
        self._store.write(self._work.changes())
        self._flushed = self._version
        bounds = dict(self._work.bounds)
        self._flushes += 1
        if self._flushes % RECLAIM_EVERY == 0:
            reclaim(self._store, bounds)
        self._work = Workspace(self._store, bounds)


def _plain(message: Message) -> Message:
    """Return a message with numbers of Python, not of numpy."""
    places: dict[str, Any] = {name: getattr(message, name) for name in _NUMBERS}
    if all(type(one) is int or not isinstance(one, Integral) for one in places.values()):
        return message
    plain = {name: int(one) if isinstance(one, Integral) else one for name, one in places.items()}
    return Message(fields=message.fields, **plain)


def _place(message: Message) -> tuple[int, int, int]:
    return message.stream, message.partition, message.offset


def _is_fraction(value: object) -> bool:
    return isinstance(value, Real | Decimal) and not isinstance(value, Integral) and bool(value % 1)


def _check_place(message: Message) -> None:
    """Raise `ValueError` unless a message has a place in its source, and fields."""
    for name, end in (("stream", 2**16), ("partition", 2**31), ("offset", 2**63 - 1)):
        value = getattr(message, name)
        if not isinstance(value, Integral) or not 0 <= int(value) < end:
            raise ValueError(f"{name}={value!r}: allowed are integers from 0 to {end - 1}")
    if not isinstance(message.fields, Mapping):
        raise ValueError(f"fields={reprlib.repr(message.fields)}: allowed are values by name, such as a dict")


def _unfit_reason(message: Message, why: str) -> tuple[str, str]:
    """Return reason and detail of a message that does not fit."""
    when: object = message.time
    if when is None:
        return "no_event_time", "the event time is null"
    if isinstance(when, Integral) and not MIN_EVENT_TIME <= int(when) <= MAX_EVENT_TIME:
        return "out_of_range", EVENT_TIMES
    return "malformed", why


def _error(message: Message, reason: str, detail: str) -> Result:
    """Return the row of the errors output of a message that is refused here."""
    row: Result = dict.fromkeys(ERROR_SCHEMA.names)
    row |= {"stream": message.stream, "partition": message.partition, "offset": message.offset}
    row |= {"event_time": message.time, "reason": reason, "detail": detail}
    row["value"] = _value(dict(message.fields))
    return row


def _value(fields: Mapping[str, Any]) -> bytes:
    """Return a message's fields as JSON; where that cannot be, their names and the types of their values."""
    encoders: list[Callable[[Any], bytes]] = [
        lambda one: msgspec.json.encode(one, enc_hook=str),
        lambda one: json.dumps(one, default=str).encode(),  # half of a surrogate pair, an integer beyond 64 bits
    ]
    for encode in encoders:
        with suppress(Exception):  # values are anything: a key that is a tuple, a text of their own that raises
            return encode(fields)
    return json.dumps({str(name): type(value).__name__ for name, value in fields.items()}).encode()


class Automatic(Context[Spec, Runs]):
    """SAMZA-552's automatic execution context: results flow on by themselves.

    Args:
        spec: As for both contexts.
        downstream: Takes one result; False refuses it for now, None does not.
        store: As for both contexts.
        on_error: Takes one row of the errors output (out of retention, ...); None drops them.
        clock: Wall clock in milliseconds.
        offsets: As for both contexts.
    """

    def __init__(
        self,
        spec: Spec,
        downstream: Callable[[Result], bool],
        store: Store | None = None,
        *,
        on_error: Callable[[Result], None] | None = None,
        clock: Callable[[], int] = wall_clock_ms,
        offsets: str = offsets_seen.ORDERED,
    ) -> None:
        super().__init__(spec, store, clock=clock, offsets=offsets)
        self._downstream, self._on_error = downstream, on_error
        self._must_flush = False

    @property
    def selector_enabled(self) -> bool:
        """False while a downstream refuses results, or raises: messages must not be delivered then."""
        return not self._results and not self._errors

    def add_messages(self, messages: Sequence[Message], wall_ms: int | None = None) -> None:
        """Add some messages at once: policies are looked at after the last one.

        What the policies have due by now is sent, also when messages are refused (SAMZA-552 waits for the next message
        or `timeout` then).

        Raises:
            SelectorDisabled: A downstream refuses output; call `timeout` first. Nothing was added.
        """
        if not self.selector_enabled:
            waiting = len(self._results) + len(self._errors)
            _log.warning("a message came while the selector is disabled: %d rows wait", waiting)
            raise SelectorDisabled(
                "a message came while a downstream refuses output",
                why=f"{waiting} rows wait to be sent",
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
        self._must_flush |= self._process(messages, wall_ms)
        if self._on_error is None:
            self._errors.clear()
        self._send()

    def _send(self) -> bool:
        """Send until the downstream refuses; flush after the last result (SAMZA-552, step 7).

        What a function of the user's raises for is sent again by the next call.
        """
        while self._errors:
            assert self._on_error is not None
            self._on_error(self._errors[0])
            self._errors.popleft()
        while self._results:
            taken = self._downstream(self._results[0])
            if not taken and taken is not None:  # a function that says nothing, such as `list.append`, takes it
                return False
            self._results.popleft()
        if self._must_flush:
            self._flush()
            self._must_flush = False
        return True


class Standalone(Context[Spec, Runs]):
    """SAMZA-552's standalone context: the caller fetches results and flushes."""

    def add_messages(self, messages: Sequence[Message], wall_ms: int | None = None) -> None:
        """Add some messages at once: policies are looked at after the last one."""
        if messages:
            self._process(messages, wall_ms)

    def timeout(self, wall_ms: int | None = None) -> None:
        """Look at the policies without a message."""
        self._process([], wall_ms)

    def get_result(self) -> list[Result]:
        """Give a copy of the results since the last `flush`."""
        return list(self._results)

    def get_errors(self) -> list[Result]:
        """Give a copy of the refused messages since the last `flush`, as rows of the errors output."""
        return list(self._errors)

    def flush(self) -> None:
        """Clear results and errors, and write state and positions durably, as a whole."""
        self._flush()
        self._results.clear()
        self._errors.clear()
