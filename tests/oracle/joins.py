"""A windowed join by two nested loops, one message at a time: the judge of the columnar join.

Rules (SAMZA-552, DESIGN.md section 6):

* In a micro-batch the left messages come first, then the right ones, each in the order of its source.
* A replay is a NOOP. A message is out of retention when `time + retention <= clock`, its clock being the newest event
  time of its own partition before it.
* `(l, r)` is a pair when the equal fields are equal and not null, `-before <= r.time - l.time <= after` with both ends
  in, and each is in a retained window of its side as the other comes: `l.time + retention_left > clock of r`, and the
  same the other way round. So the set of pairs does not depend on which side comes first, nor on cuts.
* Retention by size keeps the newest messages of a side in the order of arrival; then the order of the sides matters.
* An outer row comes once, when no partner can arrive any more: the clocks of the other side have passed the end of the
  range and its retention, or the message's own retention. Idle partitions hold nothing back.
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


@dataclass(frozen=True)
class Pair:
    """An output row: offsets' places of the two messages, None for the missing side of an outer row."""

    reason: str
    left: tuple[int, int, int] | None
    right: tuple[int, int, int] | None


@dataclass
class _Held:
    message: Message
    clock: int
    matched: bool = False
    shown: bool = False


@dataclass
class JoinOracle:
    """One join over two streams: messages of stream 0 are left, of stream 1 right."""

    spec: JoinSpec
    next_offset: dict[Source, int] = field(default_factory=dict)
    stream_time: dict[Source, int] = field(default_factory=dict)
    active_ms: dict[Source, int] = field(default_factory=dict)
    held: tuple[list[_Held], list[_Held]] = field(default_factory=lambda: ([], []))
    errors: list[Error] = field(default_factory=list)
    rows: list[Pair] = field(default_factory=list)

    def batch(self, messages: Iterable[Message], wall_ms: int, drain: bool = False) -> list[Pair]:
        """Take a micro-batch: left first, then right, then the outer rows that are due."""
        sent_before = len(self.rows)
        for message in sorted(messages, key=lambda m: m.place):
            self.add_message(message, wall_ms)
        self._unmatched(wall_ms, drain)
        return self.rows[sent_before:]

    def add_message(self, message: Message, wall_ms: int) -> None:
        """Match one message with everything that the other side holds."""
        source, side = message.source, message.stream
        if message.offset < self.next_offset.get(source, NEVER):
            return
        clock = self.stream_time.get(source, NEVER)
        self.next_offset[source] = message.offset + 1
        self.stream_time[source] = max(clock, message.time)
        self.active_ms[source] = wall_ms
        if not self._lives(side, message, clock):
            self.errors.append(Error(message.place, "out_of_retention"))
            return
        mine = _Held(message, clock)
        for other in self._newest(1 - side):
            left, right = (mine, other) if side == LEFT else (other, mine)
            if self._pairs(left, right):
                left.matched = right.matched = True
                self.rows.append(Pair("full", left.message.place, right.message.place))
        self.held[side].append(mine)

    def _lives(self, side: int, message: Message, clock: int) -> bool:
        keep = self.spec.retention_ms[side]
        return keep is None or message.time + keep > clock

    def _newest(self, side: int) -> list[_Held]:
        keep = self.spec.retention_messages[side]
        return self.held[side] if keep is None else self.held[side][max(0, len(self.held[side]) - keep) :]

    def _pairs(self, left: _Held, right: _Held) -> bool:
        spec = self.spec
        for name, other in spec.on:
            value = left.message.fields[name]
            if value is None or value != right.message.fields[other]:
                return False
        distance = right.message.time - left.message.time
        if spec.before is not None and distance < -spec.before:
            return False
        if spec.after is not None and distance > spec.after:
            return False
        return self._lives(LEFT, left.message, right.clock) and self._lives(RIGHT, right.message, left.clock)

    def _clock_of(self, side: int, wall_ms: int) -> int:
        """Give the smallest stream time of a side's partitions, without idle ones; of the other side when all are."""
        idle = self.spec.idle_after_ms
        for which in (side, 1 - side):
            awake = [
                time
                for source, time in self.stream_time.items()
                if source[0] == which and (idle is None or wall_ms - self.active_ms[source] < idle)
            ]
            if awake:
                return min(awake)
            if idle is None:
                break
        return NEVER

    def _last_chance(self, side: int, message: Message) -> int:
        """Give the first clock of the other side at which no partner can come any more."""
        spec = self.spec
        own, other = spec.retention_ms[side], spec.retention_ms[1 - side]
        reach = spec.after if side == LEFT else spec.before
        ends = [FOREVER]
        if own is not None:
            ends.append(message.time + own)
        if reach is not None and other is not None:
            ends.append(message.time + reach + other)
        return min(ends)

    def _unmatched(self, wall_ms: int, drain: bool) -> None:
        for side, kinds in ((LEFT, ("left", "outer")), (RIGHT, ("right", "outer"))):
            if self.spec.how not in kinds:
                continue
            clock = self._clock_of(1 - side, wall_ms)
            for held in self.held[side]:
                due = self._last_chance(side, held.message) <= clock
                if not held.matched and not held.shown and (due or drain):
                    held.shown = True
                    place = held.message.place
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
