"""A windowed join by two nested loops, one message at a time: the judge of the columnar join.

Rules (SAMZA-552, DESIGN.md section 6):

* In a micro-batch the left messages come first, then the right ones, each in the order of its source. Partners of one
  message stand in the order (stream, partition, offset).
* A replay is a NOOP. A message is out of retention when `expiry <= clock`, its clock being the newest event time of its
  own partition before it. Its expiry is its side's retention behind the end of the first window that includes it;
  without a window, behind its own time.
* `(l, r)` is a pair when the equal fields are equal and not null, `-before <= r.time - l.time <= after` with both ends
  in, and each is in a retained window of its side as the other comes: `expiry of l > clock of r`, and the same the
  other way round. So the set of pairs does not depend on which side comes first, nor on cuts.
* How far a side has come is looked at when a micro-batch ends: the smallest clock of its partitions that are not idle.
  What is expired for a side as a whole stays so, also for an idle partition that wakes up.
* Windows by number count each partition's offsets from its first one; then numbers take the place of time.
* Retention by size keeps the newest messages of a side in the order of arrival; then the order of the sides matters.
* An outer row comes once, when no partner can arrive any more: the clocks of the other side have passed the end of the
  range and its retention, or the message's own expiry, or it is out of retention by size.
* Options may change between micro-batches. What was expired or out of retention by size stays so, whatever is longer
  now; when a retention becomes longer, what its side had come too far for is refused from then on, also when it becomes
  shorter again. Where retention by size is first given, messages that had come stay until as many as it keeps came
  since. A pair that the retention of now forbids, because its later message was expired when the earlier one came, may
  come where the retention of then allowed it: both are above the bounds. After that there is `doubt`.
* A pair is late when the message that brought it came after the end of its window. Update periods hold pairs back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.oracle.windows import FOREVER, NEVER, Error, Message, Source

LEFT, RIGHT = 0, 1


@dataclass(frozen=True)
class JoinSpec:
    """What the job asks for; `before` and `after` None are no bound, two values per retention are left and right."""

    on: tuple[tuple[str, str], ...] = ()
    before: int | None = None
    after: int | None = None
    how: str = "inner"
    retention_ms: tuple[int | None, int | None] = (None, None)
    retention_messages: tuple[int | None, int | None] = (None, None)
    idle_after_ms: int | None = None
    max_ahead_ms: int | None = None
    windows: tuple[tuple[str, int, int, int] | None, ...] = (None, None)  # kind, size, step, origin
    by_number: bool = False
    on_time_ms: int = 0
    late_ms: int = 0


@dataclass(frozen=True)
class Pair:
    """An output row: offsets' places of the two messages, None for the missing side of an outer row."""

    reason: str
    left: tuple[int, int, int] | None
    right: tuple[int, int, int] | None


@dataclass
class _Held:
    message: Message
    at: int
    clock: int
    matched: bool = False
    shown: bool = False
    gone: bool = False
    spec: JoinSpec | None = None


@dataclass
class JoinOracle:
    """One join over two streams: messages of stream 0 are left, of stream 1 right.

    `sources` are the partitions that are known from the start; others are when their first message comes.
    """

    spec: JoinSpec
    sources: tuple[Source, ...] = ()
    next_offset: dict[Source, int] = field(default_factory=dict)
    first_offset: dict[Source, int] = field(default_factory=dict)
    stream_time: dict[Source, int] = field(default_factory=dict)
    active_ms: dict[Source, int] = field(default_factory=dict)
    started_ms: int | None = None
    clocks: list[int] = field(default_factory=lambda: [NEVER, NEVER])
    held: tuple[list[_Held], list[_Held]] = field(default_factory=lambda: ([], []))
    errors: list[Error] = field(default_factory=list)
    rows: list[Pair] = field(default_factory=list)
    back: list[tuple[bool, Pair]] = field(default_factory=list)
    back_since: dict[bool, int] = field(default_factory=dict)
    numbered: list[int] = field(default_factory=lambda: [0, 0])
    closed: tuple[list[tuple[JoinSpec, int]], ...] = field(default_factory=lambda: ([], []))
    past: list[tuple[JoinSpec, tuple[int, int]]] = field(default_factory=list)
    doubt: bool = False
    settled: list[tuple[JoinSpec, tuple[int, int]]] = field(default_factory=list)

    def change(self, spec: JoinSpec) -> None:
        """Go on with other options; what is gone by now stays gone."""
        old = self.spec
        for side in (LEFT, RIGHT):
            newest = {held.message.place for held in self._newest(side)}
            for held in self.held[side]:
                held.gone |= held.message.place not in newest or self._expired(side, held.at)
            before, now = old.retention_ms[side], spec.retention_ms[side]
            if before is not None and (now is None or now > before):
                self.closed[side].append((old, self.clocks[side]))
            if old.retention_messages[side] is None:
                self.numbered[side] = len(self.held[side])
        self.past.append((old, (self.clocks[LEFT], self.clocks[RIGHT])))
        self.spec = spec

    def _expired(self, side: int, at: int) -> bool:
        """Tell whether a place in time of a side is expired for the other one, or was under earlier options."""
        return any(self._expiry(side, at, spec) <= clocks[1 - side] for spec, clocks in self.past + self.settled)

    def _closed(self, side: int, at: int) -> bool:
        """Tell whether a side had come too far for a place in time under an earlier, shorter retention."""
        return any(self._expiry(side, at, spec) <= clock for spec, clock in self.closed[side])

    def batch(self, messages: Iterable[Message], wall_ms: int, drain: bool = False) -> list[Pair]:
        """Take a micro-batch: left first, then right, then the outer rows that are due."""
        sent_before = len(self.rows)
        if self.started_ms is None:
            self.started_ms = wall_ms
        for source in self.sources:
            self.active_ms.setdefault(source, wall_ms)
        for message in sorted(messages, key=lambda m: m.place):
            self.add_message(message, wall_ms)
        self._release(wall_ms, drain)
        self.clocks = [max(self.clocks[side], self._clock_of(side, wall_ms)) for side in (LEFT, RIGHT)]
        # what is gone is decided when a micro-batch ends, by its options; later ones do not judge by this clock again
        self.settled = [(self.spec, (self.clocks[LEFT], self.clocks[RIGHT]))]
        self._unmatched(drain)
        return self.rows[sent_before:]

    def add_message(self, message: Message, wall_ms: int) -> None:
        """Match one message with everything that the other side holds."""
        source, side = message.source, message.stream
        if message.offset < self.next_offset.get(source, NEVER):
            return
        at, clock = message.time, self.stream_time.get(source, NEVER)
        self.first_offset.setdefault(source, message.offset)
        if self.spec.by_number:
            at = clock = message.offset - self.first_offset[source]
        self.next_offset[source] = message.offset + 1
        ahead = self.spec.max_ahead_ms is not None and message.time > wall_ms + self.spec.max_ahead_ms
        if ahead and not self.spec.by_number:  # clocks that count offsets go on with it
            self.active_ms.setdefault(source, wall_ms)
        else:
            self.active_ms[source] = wall_ms
        if ahead:
            self.errors.append(Error(message.place, "in_future"))
            return
        self.stream_time[source] = max(self.stream_time.get(source, NEVER), message.time)
        mine = _Held(message, at, clock, spec=self.spec)
        if self._expiry(side, at) <= clock or self._closed(side, at):
            self.errors.append(Error(message.place, "out_of_retention"))
            return
        late = self.spec.windows[side] is not None and self._window_end(side, at) <= clock
        for other in sorted(self._newest(1 - side), key=lambda held: held.message.place):
            if other.gone or self._expired(1 - side, other.at):
                continue
            if self._expiry(1 - side, other.at) <= clock:
                continue
            left, right = (mine, other) if side == LEFT else (other, mine)
            met = self._expiry(side, at) > other.clock
            if self._pairs(left, right) and not met and self._expiry(side, at, other.spec) > other.clock:
                self.doubt = True
            if met and self._pairs(left, right):
                left.matched = right.matched = True
                self.back.append((late, Pair("late" if late else "full", left.message.place, right.message.place)))
                self.back_since.setdefault(late, wall_ms)
        self.held[side].append(mine)

    def _release(self, wall_ms: int, drain: bool) -> None:
        """Send the pairs whose update period has passed."""
        for late, period in ((False, self.spec.on_time_ms), (True, self.spec.late_ms)):
            if late in self.back_since and (drain or wall_ms - self.back_since[late] >= period):
                del self.back_since[late]
        self.rows += [pair for late, pair in self.back if late not in self.back_since]
        self.back = [(late, pair) for late, pair in self.back if late in self.back_since]

    def _window_end(self, side: int, at: int) -> int:
        """Give the first clock at which the first window that includes a place in time is over."""
        window = self.spec.windows[side]
        if window is None:
            return at
        kind, size, step, origin = window
        if kind == "session":
            return at + size + 1
        if kind == "sliding":
            return at + 1
        start = origin + (at - origin) // step * step
        while start - step + size > at:
            start -= step
        return start + size

    def _expiry(self, side: int, at: int, spec: JoinSpec | None = None) -> int:
        spec = spec or self.spec
        keep = (spec.retention_messages if spec.by_number else spec.retention_ms)[side]
        return FOREVER if keep is None else self._window_end(side, at) + keep

    def _newest(self, side: int) -> list[_Held]:
        keep = None if self.spec.by_number else self.spec.retention_messages[side]
        first = 0 if keep is None else max(0, len(self.held[side]) - keep)
        return self.held[side] if first < self.numbered[side] else self.held[side][first:]

    def _pairs(self, left: _Held, right: _Held) -> bool:
        spec = self.spec
        for name, other in spec.on:
            value = left.message.fields[name]
            if value is None or value != right.message.fields[other]:
                return False
        distance = right.message.time - left.message.time
        if spec.before is not None and distance < -spec.before:
            return False
        return spec.after is None or distance <= spec.after

    def _reached(self, source: Source) -> int:
        if not self.spec.by_number:
            return self.stream_time.get(source, NEVER)
        return self.next_offset[source] - self.first_offset[source] if source in self.next_offset else 0

    def _clock_of(self, side: int, wall_ms: int) -> int:
        """Give the smallest clock of a side's partitions, without idle ones; of the other side when all are.

        The newest there is when all of both are. A side without partitions is one that was silent from the start.
        """
        idle = self.spec.idle_after_ms
        for which in (side, 1 - side):
            known = {source: since for source, since in self.active_ms.items() if source[0] == which}
            assert self.started_ms is not None
            if not known and (idle is None or wall_ms - self.started_ms < idle):
                return NEVER
            awake = [self._reached(source) for source, since in known.items() if idle is None or wall_ms - since < idle]
            if awake:
                return min(awake)
        return max((self._reached(source) for source in self.active_ms), default=NEVER)

    def _last_chance(self, side: int, held: _Held) -> int:
        """Give the first clock of the other side at which no partner can come any more."""
        spec = self.spec
        reach = spec.after if side == LEFT else spec.before
        if held.gone or self._expired(side, held.at):
            return NEVER
        ends = [self._expiry(side, held.at)]
        if reach is not None and not spec.by_number:
            if self._closed(1 - side, held.message.time + reach):
                return NEVER
            ends.append(self._expiry(1 - side, held.message.time + reach))
        return min(ends)

    def _unmatched(self, drain: bool) -> None:
        for side, kinds in ((LEFT, ("left", "outer")), (RIGHT, ("right", "outer"))):
            if self.spec.how not in kinds:
                continue
            newest = {held.message.place for held in self._newest(side)}
            for held in sorted(self.held[side], key=lambda held: held.message.place):
                place = held.message.place
                due = held.gone or self._last_chance(side, held) <= self.clocks[1 - side] or place not in newest
                if not held.matched and not held.shown and (due or drain):
                    held.shown = True
                    reason = "full" if due else "drain"
                    self.rows.append(Pair(reason, place, None) if side == LEFT else Pair(reason, None, place))


def join(spec: JoinSpec, batches: Sequence[Sequence[Message]], walls: Sequence[int] | None = None) -> JoinOracle:
    """Feed micro-batches to an oracle, drain with the last one, and give the oracle."""
    oracle = JoinOracle(spec)
    for number, batch in enumerate(batches):
        wall = walls[number] if walls else 1000 * (number + 1)
        oracle.batch(batch, wall, drain=number == len(batches) - 1)
    return oracle


def rows_with_fields(oracle: JoinOracle, *names: tuple[int, str]) -> list[tuple[Any, ...]]:
    """Give named fields of the rows: (side, field) each."""
    messages = {held.message.place: held.message for side in oracle.held for held in side}
    out = []
    for row in oracle.rows:
        places = (row.left, row.right)
        out.append(
            tuple(None if (place := places[side]) is None else messages[place].fields[name] for side, name in names)
        )
    return out
