"""Sessions whose fate within one micro-batch depends on the order of its messages: judged message by message.

Most sessions do not need that. A *component* is a set of stored sessions and new messages of a group key, connected at
distances of at most the gap; when all its messages came it is one session. As long as nothing of it closes before the
last of its messages comes, the order does not matter. `OneByOne` is for the others, some few components with late
messages of a shard with one source partition; it knows times and places only, never values.

What it leaves are *nodes*: sets of stored sessions and messages, shared between the results that were sent on the
way, so that aggregates are computed afterwards, for all at once.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from backend.windows.merging.nodes import Nodes
from backend.windows.merging.rows import EARLY_WAITS, LATE_WAITS, LONG_AGO, NEVER
from backend.windows.micro_batch import EARLY, FULL
from backend.windows.policies import Policies


@dataclass
class Live:
    """A session on the way.

    Attributes:
        first: First event time.
        last: Last event time.
        closed: Its full result was due already.
        since: Batch time of the oldest unsent update, or `NEVER`.
        unsent: Messages since the last row, where the early policy counts them.
        shown: Rows sent and not withdrawn, by their numbers in `OneByOne`.
        nodes: Nodes that it is made of.
        rows: Messages that are not in a node yet.
        number: Place in the order in which sessions of its component were made.
    """

    first: int
    last: int
    closed: bool
    since: int
    unsent: int
    shown: list[int]
    nodes: list[int]
    rows: list[int] = field(default_factory=list)
    number: int = 0


class Event(NamedTuple):
    """A result that was due on the way, when the session ended; its reason is `Terms.at_end`.

    Attributes:
        key: Number of the group key.
        first: First event time.
        last: Last event time.
        revision: Its revision.
        node: What it is computed of.
        time: Clock that made it due.
    """

    key: int
    first: int
    last: int
    revision: int
    node: int
    time: int


@dataclass(frozen=True, slots=True)
class Terms:
    """Numbers that sessions go by within one micro-batch.

    Attributes:
        gap: Greatest distance within a session.
        keep: How long after its event time a message is taken: gap, one more, and the retention.
        exact: Sessions close message by message.
        clock: Watermark before the micro-batch.
        clock_after: Watermark after it.
        bound: Sessions whose last event time is before this were gone when the micro-batch began: the bound in the
            commit, whatever the retention is today.
        counted: Stream time N messages ago, of the source partition where that is earliest: what retention by number of
            messages no longer takes after the micro-batch; at least what the bound and retention by time no longer do.
        now: Batch time.
        drain: The input ends with this micro-batch.
        full_off: Full results were turned off since the last micro-batch: what is open, or closes now, is sent once.
        policies: When sessions are sent.
    """

    gap: int
    keep: int
    exact: bool
    clock: int
    clock_after: int
    bound: int
    counted: int
    now: int
    drain: bool
    full_off: bool
    policies: Policies

    @property
    def retention(self) -> int:
        """How long after its end a session takes messages."""
        return self.keep - self.gap - 1

    @property
    def stays(self) -> int:
        """How long after its last message a session is kept: as long as a message that is taken may touch it."""
        return self.keep + self.gap

    @property
    def bound_after(self) -> int:
        """The bound after the micro-batch: sessions whose last event time is before it are gone then."""
        return max(self.bound, self.clock_after - self.stays + 1, self.counted - 2 * self.gap)

    @property
    def first_taken(self) -> int:
        """The smallest event time that is taken by the bound: an earlier message could touch a session that is gone."""
        return self.bound + self.gap

    @property
    def first_taken_after(self) -> int:
        """The same after the micro-batch."""
        return self.bound_after + self.gap

    @property
    def at_end(self) -> int:
        """Reason of a session's row when it ends: `EARLY` for what waited where full results are not sent."""
        return FULL if self.policies.full else EARLY

    @property
    def delays(self) -> tuple[tuple[bytes, int | None], ...]:
        """How long updates of closed and of open sessions wait, each with the tag of the rows that find them."""
        return (LATE_WAITS, self.policies.late_ms), (EARLY_WAITS, self.policies.early_ms)

    @property
    def counts(self) -> bool:
        """Tell whether the early policy counts messages."""
        return self.policies.early_messages is not None


class OneByOne:
    """Tells components one after the other.

    Args:
        terms: The numbers to go by.
        nodes: Gets what sessions are made of; has the stored ones already.
        rows: First, last and revision of the stored rows that were sent. Events are numbered behind them.
    """

    def __init__(self, terms: Terms, nodes: Nodes, rows: Iterable[tuple[int, int, int]]) -> None:
        self._terms, self._nodes = terms, nodes
        self._rows = list(rows)
        self.events: list[Event] = []
        self.withdrawn: list[tuple[int, int]] = []
        """Row of the event, and a row that it withdraws."""

    def tell(self, key: int, sessions: list[Live], messages: Iterable[tuple[int, int, int, int]]) -> Live:
        """Tell one component.

        Args:
            key: Number of the group key.
            sessions: Its stored sessions.
            messages: (row, event time, clock before it, clock with it), in order of arrival; at least one.

        Returns:
            The session that it is at the end, of one node.
        """
        for number, session in enumerate(sessions):
            session.number = number
        line = sorted(sessions, key=_first)  # apart from each other, so by their ends, too
        still_open = [session for session in sessions if not session.closed]  # seldom more than one
        for number, (row, time, before, clock) in enumerate(messages, len(sessions)):
            for now in (before, clock):
                self._close(key, still_open, now)
            still_open = self._add(line, still_open, number, row, time, clock)
        (session,) = line
        self._node(session)
        return session

    def _close(self, key: int, still_open: Iterable[Live], clock: int) -> None:
        for session in still_open:
            closes_at = session.last + self._terms.gap + 1
            if not session.closed and closes_at <= clock:
                session.closed = True
                if self._terms.policies.full or self._terms.full_off or session.since != NEVER:
                    self._send(key, session, closes_at)

    def _send(self, key: int, session: Live, time: int) -> None:
        revision, number = 0, len(self._rows)
        for row in session.shown:
            first, last, sent = self._rows[row]
            if (first, last) == (session.first, session.last):
                revision = sent + 1
            else:
                self.withdrawn.append((number, row))
        self._rows.append((session.first, session.last, revision))
        self.events.append(Event(key, session.first, session.last, revision, self._node(session), time))
        session.shown, session.since, session.unsent = [number], NEVER, 0

    def _add(
        self, line: list[Live], still_open: list[Live], number: int, row: int, time: int, clock: int
    ) -> list[Live]:
        """Put a message into what it touches of a line of sessions; give those that are open then."""
        terms = self._terms
        low, high = bisect_left(line, time - terms.gap, key=_last), bisect_right(line, time + terms.gap, key=_first)
        touched = sorted(line[low:high], key=_number)
        merged = Live(
            min([time, *map(_first, touched)]),
            max([time, *map(_last, touched)]),
            closed=True,
            since=min([terms.now, *(session.since for session in touched if session.since != NEVER)]),
            unsent=int(terms.counts) + sum(session.unsent for session in touched),
            shown=_joined([session.shown for session in touched]),
            nodes=_joined([session.nodes for session in touched]),
            rows=_joined([[row], *(session.rows for session in touched)]),
            number=number,
        )
        line[low:high] = [merged]
        merged.closed = merged.last + terms.gap + 1 <= clock
        on = terms.policies.late_ms is not None if merged.closed else terms.policies.early
        if not on and merged.since != LONG_AGO:
            merged.since = NEVER
        gone = {*map(id, touched)}
        others = [session for session in still_open if not session.closed and id(session) not in gone]
        return others if merged.closed else [*others, merged]

    def _node(self, session: Live) -> int:
        """Put a session into one node."""
        if session.rows:
            session.nodes, session.rows = [*session.nodes, self._nodes.leaf(session.rows)], []
        if len(session.nodes) > 1:
            session.nodes = [self._nodes.join(session.nodes)]
        return session.nodes[0]


_first, _last, _number = attrgetter("first"), attrgetter("last"), attrgetter("number")


def _joined(parts: list[list[int]]) -> list[int]:
    """Put lists behind one another, in the longest of them: a session that grows by and by is not copied each time."""
    if not parts:
        return []
    at = max(range(len(parts)), key=lambda number: len(parts[number]))
    whole = parts[at]
    whole[:0] = [one for part in parts[:at] for one in part]
    for part in parts[at + 1 :]:
        whole += part
    return whole
