"""Sessions whose fate within one micro-batch depends on the order of its messages: told message by message.

Most sessions need no story. A *component* is a set of stored sessions and new messages of a group key, connected at
distances of at most the gap. As long as no session of it closes before the last of its messages comes, and none falls
out of retention, the order does not matter: the component is one session. `Story` is for the others, some few
components with late messages; it knows times and places only, never values.

What a story leaves are *nodes*: sets of stored sessions and messages, shared between the results that were sent on the
way, so that aggregates are computed afterwards, for all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


@dataclass(frozen=True, slots=True)
class Terms:
    """Numbers that sessions go by within one micro-batch.

    Attributes:
        gap: Greatest distance within a session.
        keep: How long after its last message a session is kept: gap, one more, and the retention.
        exact: Sessions close message by message.
        clock: Closing clock before the micro-batch.
        clock_after: Closing clock after it.
        now: Batch time.
        drain: The input ends with this micro-batch.
        full: Full results are sent.
        early_ms: When updates of open sessions are sent, None for never.
        late_ms: When updates of closed sessions are sent, None for never.
    """

    gap: int
    keep: int
    exact: bool
    clock: int
    clock_after: int
    now: int
    drain: bool
    full: bool
    early_ms: int | None
    late_ms: int | None


class Story:
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
        terms = self._terms
        for row, time, before, clock in messages:
            if terms.exact:
                sessions = self._advance(key, sessions, before, row)
            own = time + terms.keep > before
            if not own and not any(self._near(s, time, before) for s in sessions):
                self.refused.append(row)
                continue
            if terms.exact:
                self._close(key, sessions, clock, row)
            if not own:
                self.near_only.append(row)
            sessions = self._add(sessions, row, time, clock, own)
        for session in sessions:
            self._node(session)
        return sessions

    def _near(self, session: Live, time: int, clock: int) -> bool:
        gap = self._terms.gap
        retained = session.last + self._terms.keep > clock
        return retained and session.first - gap <= time <= session.last + gap

    def _advance(self, key: int, sessions: list[Live], clock: int, row: int) -> list[Live]:
        """Let the clock pass: sessions close, and those out of retention go."""
        self._close(key, sessions, clock, row)
        kept = []
        for session in sessions:
            gone_at = session.last + self._terms.keep
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
            closes_at = session.last + self._terms.gap + 1
            if not session.closed and closes_at <= clock:
                session.closed, session.since = True, NEVER
                if self._terms.full:
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
            return self._shown(shown)
        event = self.events[-1 - shown]
        return event.first, event.last, event.revision

    def _add(self, sessions: list[Live], row: int, time: int, clock: int, own: bool) -> list[Live]:
        terms = self._terms
        merged = Live(time, time, time if own else 2**63 - 1, True, terms.now, [], [], [row])
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
        merged.closed = merged.last + terms.gap + 1 <= (clock if terms.exact else terms.clock)
        if (terms.late_ms if merged.closed else terms.early_ms) is None:
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
