"""Sessions whose fate within one micro-batch depends on the order of its messages: told message by message.

Most sessions need no story. A *component* is a set of stored sessions and new messages of a group key, connected at
distances of at most the gap. As long as no session of it closes before the last of its messages comes, and none falls
out of retention, the order does not matter: the component is one session. `Story` is for the others, some few
components with late messages; it knows times and places only, never values.

What a story leaves are *nodes*: sets of stored sessions and messages, shared between the results that were sent on the
way, so that aggregates are computed afterwards, for all at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from backend.operators.session_rows import NEVER


@dataclass
class Live:
    """A session in a story.

    Attributes:
        first: First event time.
        last: Last event time.
        core: See backend.operators.session_rows.
        closed: Its full result was due already.
        since: Batch time of the oldest unsent update, or `NEVER`.
        shown: Rows sent and not withdrawn: index of a stored row, or `-1 - event`.
        nodes: Nodes that it is made of.
        rows: Messages that are not in a node yet.
    """

    first: int
    last: int
    core: int
    closed: bool
    since: int
    shown: list[int]
    nodes: list[int]
    rows: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Event:
    """A result that was due on the way.

    Attributes:
        key: Number of the group key.
        first: First event time.
        last: Last event time.
        node: What it is computed of.
        late: Reason `late` instead of `full`.
        revision: Its revision.
        withdraws: Rows it withdraws, as in `Live.shown`.
        time: Clock that made it due.
        row: The message before which, or with which, it was due.
    """

    key: int
    first: int
    last: int
    node: int
    late: bool
    revision: int
    withdraws: list[int]
    time: int
    row: int


@dataclass(frozen=True)
class Rules:
    """Numbers that the stories go by.

    Attributes:
        gap: Greatest distance within a session.
        retention: How long after its end a session takes messages.
        exact: Sessions close message by message.
        clock: Closing clock before the micro-batch.
        now: Batch time.
        full: Full results are sent.
        early: Updates of open sessions are sent.
        late: Updates of closed sessions are sent.
    """

    gap: int
    retention: int
    exact: bool
    clock: int
    now: int
    full: bool
    early: bool
    late: bool


class Story:
    """Tells components one after the other.

    Args:
        rules: The numbers to go by.
        nodes: Number of nodes that there are already (stored sessions).
        shown: (first, last, revision) of stored rows that were sent, by index.
    """

    def __init__(self, rules: Rules, nodes: int, shown: list[tuple[int, int, int]]) -> None:
        self._rules, self._shown = rules, shown
        self._made = nodes
        self.leaves: list[tuple[int, list[int]]] = []
        """New nodes made of messages: node, rows."""
        self.joins: list[tuple[int, list[int]]] = []
        """New nodes made of nodes that come before them."""
        self.events: list[Event] = []
        self.refused: list[int] = []
        self.near_only: list[int] = []
        self.gone: list[tuple[int, Live]] = []
        """(key, session) that fell out of retention on the way."""

    def tell(self, key: int, sessions: list[Live], messages: Iterable[tuple[int, int, int, int]]) -> list[Live]:
        """Tell one component.

        Args:
            key: Number of the group key.
            sessions: Its stored sessions.
            messages: (row, event time, clock before it, clock with it), in order of arrival.

        Returns:
            The sessions that are there at the end, each of one node.
        """
        rules = self._rules
        for row, time, before, clock in messages:
            if rules.exact:
                sessions = self._advance(key, sessions, before, row)
            own = time + rules.gap + 1 + rules.retention > before
            if not own and not any(self._near(s, time, before) for s in sessions):
                self.refused.append(row)
                continue
            if rules.exact:
                self._close(key, sessions, clock, row)
            if not own:
                self.near_only.append(row)
            sessions = self._add(sessions, row, time, clock, own)
        for session in sessions:
            self._node(session)
        return sessions

    def _near(self, session: Live, time: int, clock: int) -> bool:
        gap = self._rules.gap
        retained = session.last + gap + 1 + self._rules.retention > clock
        return retained and session.first - gap <= time <= session.last + gap

    def _advance(self, key: int, sessions: list[Live], clock: int, row: int) -> list[Live]:
        """Let the clock pass: sessions close, and those out of retention go."""
        self._close(key, sessions, clock, row)
        kept = []
        for session in sessions:
            gone_at = session.last + self._rules.gap + 1 + self._rules.retention
            if gone_at > clock:
                kept.append(session)
                continue
            if session.since != NEVER:
                self._send(key, session, True, gone_at, row)
            self._node(session)
            self.gone.append((key, session))
        return kept

    def _close(self, key: int, sessions: list[Live], clock: int, row: int) -> None:
        for session in sessions:
            closes_at = session.last + self._rules.gap + 1
            if not session.closed and closes_at <= clock:
                session.closed, session.since = True, NEVER
                if self._rules.full:
                    self._send(key, session, False, closes_at, row)

    def _send(self, key: int, session: Live, late: bool, time: int, row: int) -> None:
        revision, withdraws = self.revision_of(session)
        node = self._node(session)
        self.events.append(Event(key, session.first, session.last, node, late, revision, withdraws, time, row))
        session.shown, session.since = [-len(self.events)], NEVER

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
            return self._shown[shown]
        event = self.events[-1 - shown]
        return event.first, event.last, event.revision

    def _add(self, sessions: list[Live], row: int, time: int, clock: int, own: bool) -> list[Live]:
        rules = self._rules
        merged = Live(time, time, time if own else 2**63 - 1, True, rules.now, [], [], [row])
        others = []
        taken = [s for s in sessions if self._near(s, time, clock)]
        low, high = min([time, *(s.first for s in taken)]), max([time, *(s.last for s in taken)])
        for session in sessions:
            # sessions never lie across one another, even where one source partition finds one gone and another does not
            if session.first <= high and low <= session.last:
                merged.first, merged.last = min(merged.first, session.first), max(merged.last, session.last)
                merged.core = min(merged.core, session.core)
                merged.shown += session.shown
                merged.nodes += session.nodes
                merged.rows += session.rows
                if session.since != NEVER:
                    merged.since = min(merged.since, session.since)
            else:
                others.append(session)
        merged.closed = merged.last + rules.gap + 1 <= (clock if rules.exact else rules.clock)
        if not (rules.late if merged.closed else rules.early):
            merged.since = NEVER
        return [*others, merged]

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
