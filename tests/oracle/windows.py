"""SAMZA-552's windowed aggregator, one message at a time, in plain Python: the judge of the columnar operator.

The steps are the seed's `addMessage` (with DESIGN.md section 6: the replay check comes first), `openNextWindow` and
`timeout`. All windows of one group key are plain lists of messages; every result is computed from scratch.

One number says when a window is full: `closes_at`, the smallest stream time that is past its end. It is the end of
`[start, end)` windows, `t + 1` of a sliding window `[t - size, t]`, and `last + gap + 1` of a session. The clock is the
newest event time before the message. A window is closed when `clock >= closes_at` and gone when
`clock >= closes_at + retention`. A message of a session is judged as if it were alone: it is refused when
`clock >= t + gap + 1 + retention`, whatever sessions lie near; so a session has to stay a gap longer, until nothing
that is accepted can come near it.

Options may `change` between micro-batches. `gone` is then what counts: how far windows were once dropped, which no
longer retention undoes. A shorter one refuses from the next message on, and drops at the end of its micro-batch, what
waits first. An update waits only if its policy was on when it came; what waits when its policy is turned off is sent by
the next micro-batch. Open windows wait for their full result: when those are turned off, the next micro-batch sends all
that it finds open or ends, as `early`. Without full results, what waits when a window ends is sent then, as `early`.

The early policy may count messages: those that came to a window since its last row, while the policy counted. A sliding
window begins with those of its micro-batch that it includes.

A message whose own sliding window is gone counts in later ones. If none comes before the last that could show it is
gone, or before the input ends, it goes to the errors: an accepted message is in a window or in the errors.

Windows by number of messages have a retention, too (`retention_ms` 0 is none). What is open of a group key falls out
when its newest message is not among the newest `retention_messages`, or when the newest event time of its messages and
the retention are at or before the clock. It is sent as `early` before it goes, unless full results are off and nothing
waits; then the group key begins anew. A message that finds nothing of its key there and is out of retention by time
itself is refused.

With one source partition all is decided message by message. With several, windows close in `end_of_batch`, by the
smallest stream time of the partitions that are not idle. Then the cuts decide which messages come late. What never
depends on cuts: `errors`, and `last_values` after a drain; with one partition also `full_rows`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.oracle.aggregates import Aggregate, evaluate

NEVER = -(2**63)
FOREVER = 2**63

Key = tuple[Any, ...]
Source = tuple[int, int]


@dataclass(frozen=True)
class Message:
    """One message; `source` is (stream, partition)."""

    offset: int
    time: int
    fields: dict[str, Any]
    partition: int = 0
    stream: int = 0
    timestamp: int | None = None  # the record's own, milliseconds

    @property
    def source(self) -> Source:
        return self.stream, self.partition

    @property
    def place(self) -> tuple[int, int, int]:
        return self.stream, self.partition, self.offset


@dataclass(frozen=True)
class Error:
    """A message that no window can take."""

    place: tuple[int, int, int]
    reason: str


@dataclass(frozen=True)
class Row:
    """A result; `window` is what names the window: (start, end) in time, `first` by number of messages, with `last` of
    sliding ones. `first` and `last` are partition and offset of a message."""

    reason: str
    revision: int
    window: tuple[int, ...]
    key: Key
    values: tuple[Any, ...]
    first: tuple[int, int] | None = None
    last: tuple[int, int] | None = None

    @property
    def start_offset(self) -> int | None:
        return None if self.first is None else self.first[1]

    @property
    def last_offset(self) -> int | None:
        return None if self.last is None else self.last[1]


@dataclass(frozen=True)
class Spec:
    """What the job asks for; aggregates fold in the order (stream, partition, offset).

    `kind` is tumbling, hopping, sliding or session; `unit` is time (milliseconds) or messages. `size` is the gap of a
    session. `early_ms` and `late_ms`: None is off, 0 is per message. `early_messages`: None is off.
    """

    kind: str
    size: int
    step: int = 0
    origin: int = 0
    unit: str = "time"
    keys: tuple[str, ...] = ()
    aggregates: tuple[Aggregate, ...] = (("count", None),)
    retention_ms: int = 0
    retention_messages: int | None = None
    early_ms: int | None = None
    early_messages: int | None = None
    late_ms: int | None = 10_000
    full: bool = True
    idle_after_ms: int | None = None
    max_ahead_ms: int | None = None
    edges: tuple[int, ...] = ()  # tumbling windows of different lengths: where they begin, instead of `size`

    def on(self, window: Window) -> bool:
        """Tell whether updates of a window are sent."""
        return self.late_ms is not None if window.closed else (self.early_ms, self.early_messages) != (None, None)


@dataclass
class Window:
    """One window of one group key.

    `first` and `last` bound it: event times, or numbers of messages. `pending_since` is the wall clock of the oldest
    update that was not sent, `due` that it waits for a policy that was turned off, `sent` the number of rows so far,
    `unsent` that of counted messages since the last one.
    """

    key: Key
    first: int
    last: int
    closes_at: int
    messages: list[Message] = field(default_factory=list)
    closed: bool = False
    sent: int = 0
    unsent: int = 0
    pending_since: int | None = None
    due: bool = False
    withdrawn: list[Row] = field(default_factory=list)
    shown: Row | None = None


class WindowOracle:
    """The windowed aggregator of one stream of messages.

    Args:
        spec: The job.
        partitions: Source partitions; more than one puts off closing to `end_of_batch`.
        batched: Look at early and late policies in `end_of_batch` only, as a micro-batch does.
    """

    def __init__(self, spec: Spec, partitions: int = 1, batched: bool = False) -> None:
        self.spec = spec
        self.exact = partitions == 1
        self.batched = batched
        self.next_offset: dict[Source, int] = {}
        # several source partitions are known from the start: one without a message yet holds windows open
        self.stream_time: dict[Source, int] = {(0, p): NEVER for p in range(partitions)}
        self.active_ms: dict[Source, int] = {}
        self.closing = NEVER
        # retention by size: the stream time before each message of a source partition
        self.befores: dict[Source, list[int]] = {}
        # windows that close at or before it were dropped
        self.gone = NEVER
        self.windows: dict[tuple[Key, int], Window] = {}
        self.accepted: list[Message] = []
        # how many of them came before the micro-batch
        self.accepted_before = 0
        # what was gone for a message when it came
        self.gone_of: dict[tuple[int, int, int], int] = {}
        self.unseen: list[Message] = []
        # by number of messages: how many came, and of each group key the messages since it was last not there
        self.came = 0
        self.there: dict[Key, list[Message]] = {}
        self.came_last: dict[Key, int] = {}
        self.errors: list[Error] = []
        self.rows: list[Row] = []
        # whether a message came since the last drain: without one a drain would show the same again
        self.fresh = False
        self.refusing = False
        self.disabled = False
        self.outbox: list[Row] = []
        self.full_off = False

    def change(self, spec: Spec) -> None:
        """Go on with other options from the next micro-batch on."""
        old, self.spec = self.spec, spec
        self.full_off = old.full and not spec.full
        for window in self.windows.values():
            window.due = window.due or (not spec.on(window) and window.pending_since is not None)
        if spec.unit == "messages" and spec.kind != "session" and not old.retention_ms:
            self._forget_full_windows()
        if old.retention_messages is None or spec.retention_messages is None:
            self.befores = {}
        elif spec.retention_messages > old.retention_messages:  # nobody remembers more than was needed
            for befores in self.befores.values():
                forgotten = max(len(befores) - old.retention_messages, 0)
                befores[:forgotten] = [NEVER] * forgotten

    def _ahead(self, message: Message, wall_ms: int) -> bool:
        """DESIGN.md section 6, "far future"."""
        if self.spec.max_ahead_ms is None:
            return False
        written = message.timestamp if message.timestamp is not None and message.timestamp >= 0 else wall_ms
        return message.time > min(written, wall_ms) + self.spec.max_ahead_ms

    def _forget_full_windows(self) -> None:
        """Forget what was in full tumbling windows by number: without a retention by time nothing stays of them."""
        step = 1 if self.spec.kind == "sliding" else self.spec.step or self.spec.size
        if step != self.spec.size:
            return
        for key, mine in list(self.there.items()):
            full = len(mine) // self.spec.size * self.spec.size
            del mine[:full]
            for window in [w for w in self.windows.values() if w.key == key]:
                del self.windows[key, window.first]
                window.first, window.last = window.first - full, window.last - full
                window.closes_at -= full
                self.windows[key, window.first] = window
            if not mine:
                del self.there[key]

    # -- the seed's API ------------------------------------------------------------------------------------------

    def add_message(self, message: Message, wall_ms: int) -> list[Row]:
        """Run the seed's steps 1 to 7 for one message; gives the rows that were sent."""
        sent_before = len(self.rows)
        # 1: the selector
        if self.disabled:
            raise RuntimeError("the message selector is disabled")
        # 3 before 2: a replay is a NOOP, also when its window is gone
        if message.offset < self.next_offset.get(message.source, NEVER):
            return []
        own = self.stream_time.get(message.source, NEVER)
        self.next_offset[message.source] = message.offset + 1
        self.fresh = True
        self.active_ms.setdefault(message.source, wall_ms)
        # an event time too far ahead of when it was written (or of the wall clock) must not move stream time
        if self._ahead(message, wall_ms):
            self.errors.append(Error(message.place, "in_future"))
            return []
        self.active_ms[message.source] = wall_ms
        before = max(own, self.closing)
        gone = max(before - self.spec.retention_ms, self._outnumbered(message.source, own), self.gone)
        self.stream_time[message.source] = max(own, message.time)
        # 2: out of retention
        key = tuple(message.fields[name] for name in self.spec.keys)
        if self.spec.unit == "messages":
            clock = before if self.exact else self.closing
            self._arrive(key, clock)
            gone = clock - self.spec.retention_ms
        if not self._acceptable(message, key, gone):
            self.errors.append(Error(message.place, "out_of_retention"))
            return []
        # 4: does it belong to a new window? what it passes is full
        if self.exact and self.spec.unit == "time":
            self._open_next_window(max(before, message.time))
        self.accepted.append(message)
        self.gone_of[message.place] = gone
        # 5: add it to every window that includes it
        updated = self._add(message, key, gone)
        for window in updated:
            window.unsent += self.spec.early_messages is not None
            if window.pending_since is None and self.spec.on(window):
                window.pending_since = wall_ms
        if self.spec.unit == "messages" and self.spec.kind != "session":
            self._close_by_number(key)
        # 6 and 7: policies, sending
        if not self.batched:
            self._policies(wall_ms)
            self._send()
        if self.exact and self.spec.unit == "time":
            self._purge(wall_ms)
        return self.rows[sent_before:]

    def skip(self, message: Message, wall_ms: int) -> None:
        """Pass over a message that cannot be read: its time is unknown, its source partition idle as without it."""
        self.next_offset[message.source] = max(self.next_offset.get(message.source, NEVER), message.offset + 1)
        self.fresh = True
        self.active_ms.setdefault(message.source, wall_ms)

    def timeout(self, wall_ms: int, *, early: bool = True) -> list[Row]:
        """Run the seed's timeout: resume sending, then look at the policies again."""
        sent_before = len(self.rows)
        self._send()
        if not self.disabled:
            self._policies(wall_ms, early=early)
            self._send()
        return self.rows[sent_before:]

    def end_of_batch(self, wall_ms: int, drain: bool = False) -> list[Row]:
        """End a micro-batch: close by the partitions' smallest stream time, then timeout, purge, and drain if asked."""
        sent_before = len(self.rows)
        drain, self.fresh = drain and self.fresh, self.fresh and not drain
        if self.spec.unit == "time":
            self._open_next_window(self._smallest_stream_time(wall_ms))
        else:
            self.closing = max(self.closing, self._smallest_stream_time(wall_ms))
            self._fall_out(self.closing)
        # a row of every open window stands for an early one due in the same micro-batch
        self.timeout(wall_ms, early=not drain and not self.full_off)
        if self.full_off and not drain:
            for window in self._in_order():
                if not window.closed:
                    self._emit(window, "early")
            self._send()
        self.full_off = False
        if self.spec.unit == "time":
            self._purge(wall_ms)
        if drain:
            self.drain()
        self.accepted_before = len(self.accepted)
        return self.rows[sent_before:]

    def drain(self) -> None:
        """End bounded input: pending updates are sent, open windows are shown with reason `drain` and stay open."""
        for window in self._in_order():
            if window.closed and window.pending_since is not None:
                self._emit(window, "late")
        for window in self._in_order():
            if not window.closed:
                self._emit(window, "drain")
        self._give_up(FOREVER)
        self._send()

    # -- clocks --------------------------------------------------------------------------------------------------

    def _smallest_stream_time(self, wall_ms: int) -> int:
        return self._smallest(self.stream_time, wall_ms)

    def _smallest(self, clocks: dict[Source, int], wall_ms: int) -> int:
        """Give the smallest clock of the source partitions that are not idle."""
        idle = self.spec.idle_after_ms
        for source in clocks:  # one that never came is silent since the first micro-batch
            self.active_ms.setdefault(source, wall_ms)
        awake = [clock for source, clock in clocks.items() if idle is None or wall_ms - self.active_ms[source] < idle]
        # when all are idle nobody can hold the others back
        return min(awake) if awake else max(clocks.values(), default=NEVER)

    def _outnumbered(self, source: Source, own: int) -> int:
        """Count a message; give the stream time before the one that retention by size counts back to."""
        befores = self.befores.setdefault(source, [])
        befores.append(own)
        return self._standing(source, len(befores) - 1)

    def _standing(self, source: Source, number: int) -> int:
        keep, befores = self.spec.retention_messages, self.befores.get(source, [])
        return befores[number - keep] if keep is not None and number >= keep else NEVER

    def _open_next_window(self, clock: int) -> None:
        """Let the clock pass: every window whose end it reached is full and goes to the outputs."""
        self.closing = max(self.closing, clock)
        for window in self._in_order():
            if not window.closed and window.closes_at <= self.closing:
                window.closed = True
                self._end(window)
        self._send()

    def _purge(self, wall_ms: int) -> None:
        """Drop windows that take nothing any more, what waits of them first."""
        standing = {source: self._standing(source, len(self.befores.get(source, []))) for source in self.stream_time}
        self.gone = max(self.gone, self.closing - self.spec.retention_ms, self._smallest(standing, wall_ms))
        for place, window in sorted(self.windows.items(), key=lambda item: (item[1].closes_at, repr(item[1].key))):
            longer = self.spec.size if self.spec.kind == "session" else 0
            if window.closes_at + longer <= self.gone:
                if window.pending_since is not None:
                    self._emit(window, "late")
                del self.windows[place]
        self._give_up(self.gone)
        self._send()

    def _give_up(self, gone: int) -> None:
        """Refuse what no sliding window showed and none can any more, or none will."""
        for message in [m for m in self.unseen if m.time + self.spec.size + 1 <= gone]:
            self.errors.append(Error(message.place, "out_of_retention"))
            self.unseen.remove(message)
            self.accepted.remove(message)

    # -- which windows -------------------------------------------------------------------------------------------

    def _acceptable(self, message: Message, key: Key, gone: int) -> bool:
        spec = self.spec
        if spec.unit == "messages":
            return key in self.there or not spec.retention_ms or message.time > gone
        if spec.kind == "sliding":
            # the last window that could ever hold it
            return message.time + spec.size + 1 > gone
        if spec.kind == "session":
            return message.time + spec.size + 1 > gone
        return any(self._stop(start) > gone for start in self._starts(message.time))

    def _starts(self, time: int) -> list[int]:
        """Starts of all windows `[start, start + size)` that hold a time, by trying one after the other."""
        spec = self.spec
        if spec.edges:
            return [max(edge for edge in spec.edges if edge <= time)]
        step = spec.step or spec.size
        start = spec.origin + (time - spec.origin) // step * step
        starts = []
        while start + spec.size > time:
            starts.append(start)
            start -= step
        return sorted(starts)

    def _stop(self, start: int) -> int:
        """End of the window that begins at a start."""
        edges = self.spec.edges
        return edges[edges.index(start) + 1] if edges else start + self.spec.size

    def _near(self, time: int, key: Key) -> list[Window]:
        """Sessions of a key at a distance of at most the gap."""
        gap = self.spec.size
        return [w for w in self.windows.values() if w.key == key and w.first - gap <= time <= w.last + gap]

    def _add(self, message: Message, key: Key, gone: int) -> list[Window]:
        if self.spec.unit == "messages":
            return self._add_by_number(message, key)
        if self.spec.kind == "session":
            return self._add_to_session(message, key)
        if self.spec.kind == "sliding":
            return self._add_to_sliding(message, key, gone)
        updated = []
        for start in self._starts(message.time):
            end = self._stop(start)
            if end > gone:
                window = self._window(key, start, end, end)
                window.messages.append(message)
                updated.append(window)
        return updated

    def _window(self, key: Key, first: int, last: int, closes_at: int) -> Window:
        """Find a window or make it; one made after its end is closed from the start, so it only has late rows."""
        window = self.windows.get((key, first))
        if window is None:
            past = self.spec.unit == "time" and closes_at <= self.closing
            window = Window(key, first, last, closes_at, closed=past)
            self.windows[key, first] = window
        return window

    def _add_to_sliding(self, message: Message, key: Key, gone: int) -> list[Window]:
        size, time = self.spec.size, message.time
        own = (key, time - size)
        if own not in self.windows and time + 1 > gone:
            window = self._window(key, time - size, time, time + 1)
            window.messages = [
                m
                for m in self.accepted[:-1]
                if tuple(m.fields[name] for name in self.spec.keys) == key
                and time - size <= m.time <= time
                and window.closes_at > self.gone_of[m.place]
            ]
            self.unseen = [m for m in self.unseen if m not in window.messages]
            if self.spec.early_messages is not None:
                window.unsent = sum(m in window.messages for m in self.accepted[self.accepted_before : -1])
        updated = []
        for window in self.windows.values():
            if window.key == key and window.first <= time <= window.last and window.closes_at > gone:
                window.messages.append(message)
                updated.append(window)
        if not updated:
            self.unseen.append(message)
        return updated

    def _add_to_session(self, message: Message, key: Key) -> list[Window]:
        gap, time = self.spec.size, message.time
        near = self._near(time, key)
        merged = Window(key, time, time, time + gap + 1)
        merged.messages.append(message)
        for window in near:
            merged.first, merged.last = min(merged.first, window.first), max(merged.last, window.last)
            merged.messages.extend(window.messages)
            merged.withdrawn.extend(window.withdrawn)
            if window.pending_since is not None:
                since = merged.pending_since
                merged.pending_since = window.pending_since if since is None else min(since, window.pending_since)
            merged.due = merged.due or window.due
            merged.unsent += window.unsent
            del self.windows[key, window.first]
        merged.messages.sort(key=self.accepted.index)
        merged.closes_at = merged.last + gap + 1
        merged.closed = merged.closes_at <= self.closing
        if not self.spec.on(merged) and not merged.due:
            merged.pending_since = None  # what waited as late is part of an open session again, or the other way round
        for window in near:
            if (window.first, window.last) == (merged.first, merged.last):
                merged.sent, merged.shown = window.sent, window.shown
            elif window.shown is not None:
                merged.withdrawn.append(window.shown)
        self.windows[key, merged.first] = merged
        return [merged]

    def _add_by_number(self, message: Message, key: Key) -> list[Window]:
        spec = self.spec
        mine = self.there.setdefault(key, [])
        number = len(mine)
        mine.append(message)
        self.came_last[key] = self.came - 1
        if spec.kind == "session":
            return self._add_to_tuple_session(message, key)
        if spec.kind == "sliding":
            self._window(key, number - spec.size + 1, number, number)
            window = self.windows[key, number - spec.size + 1]
            window.messages = mine[-spec.size :]
            return [window]
        step = spec.step or spec.size
        updated = []
        for first in range(0, number + 1, step):
            if number < first + spec.size:
                window = self._window(key, first, first + spec.size - 1, first + spec.size - 1)
                window.messages.append(message)
                updated.append(window)
        return updated

    def _close_by_number(self, key: Key) -> None:
        """Windows by number of messages are full with their last message, and nothing can come late."""
        for window in self._in_order():
            if window.key == key and len(self.there[key]) > window.last:
                self._end(window)
                del self.windows[key, window.first]
        self._send()

    def _arrive(self, key: Key, clock: int) -> None:
        """Count a message of a group key; what it makes fall out or end goes first."""
        self._fall_out(clock)
        self.came += 1
        if self.spec.kind != "session":
            return
        for window in self._in_order():  # a session ends when `size` messages in a row came without its key
            if window.key != key and self.came - 1 - window.last >= self.spec.size:
                self._end(window)
                del self.windows[window.key, window.first], self.there[window.key]
        self._send()

    def _fall_out(self, clock: int) -> None:
        """Send and drop what is open of group keys that are out of retention."""
        spec = self.spec
        for key, mine in list(self.there.items()):
            many = spec.retention_messages is not None and self.came - self.came_last[key] > spec.retention_messages
            old = spec.retention_ms and max(m.time for m in mine) + spec.retention_ms <= clock
            if not many and not old:
                continue
            for window in self._in_order():
                if window.key == key:
                    self._end(window, "early")
                    del self.windows[key, window.first]
            del self.there[key]
        self._send()

    def _add_to_tuple_session(self, message: Message, key: Key) -> list[Window]:
        here = self.came - 1
        for window in self.windows.values():
            if window.key == key:
                window.messages.append(message)
                window.last = here
                return [window]
        window = self._window(key, here, here, FOREVER)
        window.messages.append(message)
        return [window]

    # -- what is sent when ---------------------------------------------------------------------------------------

    def _in_order(self) -> list[Window]:
        return sorted(self.windows.values(), key=lambda w: (w.closes_at, w.first, repr(w.key)))

    def _policies(self, wall_ms: int, *, early: bool = True) -> None:
        """Run step 6.2: the early policy for open windows, the late one for past windows."""
        for window in self._in_order():
            if window.pending_since is None:
                continue
            period = self.spec.late_ms if window.closed else self.spec.early_ms
            due = window.due or (period is not None and wall_ms - window.pending_since >= period)
            if self.spec.early_messages is not None and not window.closed:
                due = due or window.unsent >= self.spec.early_messages
            if due and (window.closed or early):
                self._emit(window, "late" if window.closed else "early")

    def _end(self, window: Window, reason: str = "full") -> None:
        """Send a window that is full, or goes unfinished; without full results what waits of it."""
        if self.spec.full or self.full_off or window.pending_since is not None:
            self._emit(window, reason if self.spec.full else "early")

    def _emit(self, window: Window, reason: str) -> None:
        counted = self.spec.kind == "session" and self.spec.unit == "messages"
        if counted and window.shown is not None and window.shown.last != window.messages[-1].place[1:]:
            window.withdrawn.append(window.shown)  # it grew: what was sent is another session
            window.sent = 0
        for row in window.withdrawn:
            self.outbox.append(replace(row, reason="retracted"))
        window.withdrawn = []
        row = self.row_of(window, reason)
        window.shown = row
        window.sent += 1
        window.unsent = 0
        window.pending_since, window.due = None, False
        self.outbox.append(row)

    def row_of(self, window: Window, reason: str) -> Row:
        """Compute a window's row from its messages."""
        fields = [m.fields for m in sorted(window.messages, key=lambda m: m.place)]
        values = tuple(evaluate(aggregate, fields) for aggregate in self.spec.aggregates)
        if self.spec.unit == "messages":
            first, last = (window.messages[at].place[1:] for at in (0, -1))
            name = first + last if self.spec.kind == "sliding" else first
            return Row(reason, window.sent, name, window.key, values, first, last)
        return Row(reason, window.sent, (window.first, window.last), window.key, values)

    def _send(self) -> None:
        """Run step 7: send until the downstream refuses, then disable the selector."""
        while self.outbox and not self.refusing:
            self.rows.append(self.outbox.pop(0))
        self.disabled = bool(self.outbox)


# -- what does not depend on cuts ----------------------------------------------------------------------------------


def full_rows(rows: Iterable[Row]) -> list[tuple[Any, ...]]:
    """Give the full results in a comparable order: cut-invariant with one source partition."""
    return sorted(((r.window, r.key, r.values) for r in rows if r.reason == "full"), key=repr)


def last_values(rows: Iterable[Row]) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """Give the values of the last row of each window that was not withdrawn: cut-invariant after a drain."""
    last: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for row in rows:
        if row.reason == "retracted":
            last.pop((row.window, row.key), None)
        else:
            last[row.window, row.key] = row.values
    return last


def error_set(errors: Iterable[Error]) -> list[tuple[tuple[int, int, int], str]]:
    """Give the errors in the order of the source: cut-invariant."""
    return sorted((e.place, e.reason) for e in errors)


def run(
    spec: Spec, batches: Sequence[Sequence[Message]], *, partitions: int = 1, walls: Sequence[int] | None = None
) -> WindowOracle:
    """Feed micro-batches to an oracle, drain with the last one, and give the oracle."""
    oracle = WindowOracle(spec, partitions, batched=True)
    walls = walls or [1000 * (number + 1) for number in range(len(batches))]
    for number, (batch, wall) in enumerate(zip(batches, walls, strict=True)):
        for message in batch:
            oracle.add_message(message, wall)
        oracle.end_of_batch(wall, drain=number == len(batches) - 1)
    return oracle
