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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import attrgetter

from backend.windows.merging.rows import LONG_AGO, NEVER
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
        shown: Rows sent and not withdrawn: index of a stored row, or `-1 - event`.
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


@dataclass(frozen=True)
class Event:
    """A result that was due on the way, when the session ended.

    Attributes:
        key: Number of the group key.
        first: First event time.
        last: Last event time.
        node: What it is computed of.
        phase: Its reason: `FULL`, or `EARLY` for what waited when the session ended and full results are not sent.
        revision: Its revision.
        withdraws: Rows it withdraws, as in `Live.shown`.
        time: Clock that made it due.
        row: The message before which, or with which, it was due.
    """

    key: int
    first: int
    last: int
    node: int
    phase: int
    revision: int
    withdraws: list[int]
    time: int
    row: int


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
        """Reason of what waits when a session ends."""
        return FULL if self.policies.full else EARLY

    @property
    def counts(self) -> bool:
        """Tell whether the early policy counts messages."""
        return self.policies.early_messages is not None


class OneByOne:
    """Tells components one after the other.

    Args:
        terms: The numbers to go by.
        nodes: Number of nodes that there are already (stored sessions).
        shown: Gives (first, last, revision) of a stored row that was sent, by index.
    """

    def __init__(self, terms: Terms, nodes: int, shown: Callable[[int], tuple[int, int, int]]) -> None:
        self._terms, self._shown = terms, shown
        self._made = nodes
        self.leaves: list[tuple[int, list[int]]] = []
        """New nodes made of messages: node, rows."""
        self.joins: list[tuple[int, list[int]]] = []
        """New nodes made of nodes that come before them."""
        self.events: list[Event] = []

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
                self._close(key, still_open, now, row)
            still_open = self._add(line, still_open, number, row, time, clock)
        (session,) = line
        self._node(session)
        return session

    def _close(self, key: int, still_open: Iterable[Live], clock: int, row: int) -> None:
        for session in still_open:
            closes_at = session.last + self._terms.gap + 1
            if not session.closed and closes_at <= clock:
                session.closed = True
                if self._terms.policies.full or self._terms.full_off or session.since != NEVER:
                    self._send(key, session, closes_at, row)

    def _send(self, key: int, session: Live, time: int, row: int) -> None:
        revision, withdraws = self.revision_of(session)
        node = self._node(session)
        phase = self._terms.at_end
        self.events.append(Event(key, session.first, session.last, node, phase, revision, withdraws, time, row))
        session.shown, session.since, session.unsent = [-len(self.events)], NEVER, 0

    def revision_of(self, session: Live) -> tuple[int, list[int]]:
        """Give the revision of a session's next row, and what that row withdraws."""
        revision, withdraws = 0, []
        for shown in session.shown:
            first, last, sent = self.sent(shown)
            if (first, last) == (session.first, session.last):
                revision = sent + 1
            else:
                withdraws.append(shown)
        return revision, withdraws

    def sent(self, shown: int) -> tuple[int, int, int]:
        """Give first, last and revision of a row that was sent."""
        if shown >= 0:
            return self._shown(shown)
        event = self.events[-1 - shown]
        return event.first, event.last, event.revision

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
            self.leaves.append((self._made, session.rows))
            session.nodes, session.rows = [*session.nodes, self._made], []
            self._made += 1
        if len(session.nodes) > 1:
            self.joins.append((self._made, session.nodes))
            session.nodes = [self._made]
            self._made += 1
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
