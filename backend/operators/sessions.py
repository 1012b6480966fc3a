"""Session windows by event time: columnar, and message-exact with one source partition (SAMZA-552, KIP-94).

A session of a group key is `[first, last]`, the event times of its first and last message; a message joins the sessions
at a distance of at most the gap. It is full when the clock passes `last + gap`. A message after that is late; when it
makes the session longer or merges it with others, the rows that were sent under the old bounds are withdrawn (reason
`retracted`: the same bounds, group key, revision and values) right before the new one is sent. A session is kept while
`last + gap + 1 + retention` is after the clock; a message is refused when that holds neither for itself nor for a
session near it.

Steps of a micro-batch:

1. find     The stored sessions that its messages may touch, and those that close, expire, or wait to be sent: by the
            index over last times, so what does nothing costs nothing.
2. connect  Messages and sessions of a group key to components, by sorting and a running maximum.
3. tell     Components whose fate depends on the order of messages (see `_in_order`) are told one by one
            (backend.operators.session_story): those where a session closes or expires before a later message of the
            component, or with a message that only a session near it makes acceptable.
4. finish   What is due at the end: full, late, early, drained.
5. compute  All aggregates at once, stored or sent (backend.operators.session_nodes).
6. store    (backend.operators.session_rows).

Results stand in the order in which they were due: by message, then by the clock that made them due.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backend.aggregates import compile_incremental, max_, min_
from backend.batch import BEFORE, MESSAGE_FIELDS, NO_TIME, OFFSET, TIME, Proof
from backend.errors import StateCorrupted
from backend.keys import fixed_bytes
from backend.messages import OFFSET_BYTES, TIME_BYTES
from backend.operators import session_rows as rows
from backend.operators.arrays import IntArray, Mask
from backend.operators.grouping import GroupKeys, KeySpace
from backend.operators.held import Held, HeldRows, digests, remove
from backend.operators.session_nodes import Nodes, full_values
from backend.operators.session_rows import NEVER, SessionRows, Stored
from backend.operators.session_story import Live, Rules, Story
from backend.operators.spec import WindowSpec
from backend.operators.turn import DRAIN, EARLY, FULL, LATE, REASONS, RETRACTED, Turn, numbers
from backend.staging import VERIFY
from backend.store import Region
from backend.workspace import Workspace

START, LAST = "_start_offset", "_last_offset"
_MESSAGES = bytes([Region.MESSAGES])
_TOTAL = bytes([Region.OPERATOR]) + b"T"
_LOWEST = -(2**62) - 2**61
_SCAN_SHARE = 16
"""The index is scanned as a whole when at least one in so many sessions may be touched."""


class Sessions:
    """The kind for session windows by event time.

    Args:
        spec: Its window is one.
    """

    def __init__(self, spec: WindowSpec) -> None:
        self.spec = spec
        self.gap, self.retention = spec.window.size, spec.retention_ms
        _, self.full = spec.plans()
        # SAMZA-552's metadata: the offsets of the first and the last message, here as two more aggregates
        own = {START: min_(OFFSET), LAST: max_(OFFSET)}
        self.plan = compile_incremental({**own, **spec.incremental}, pa.schema([*MESSAGE_FIELDS, *spec.schema]))
        self.keys = GroupKeys(spec.key_fields)
        self.result_schema = spec.result_schema()
        self.value_fields = [self.result_schema.field(name) for name in spec.aggregates]
        self.rows = SessionRows(self.plan, self.value_fields)
        fields = [spec.schema.field(name) for name in spec.input_fields()]
        self.held = Held(fields, timed=True) if spec.full else None

    def fold(self, turn: Turn) -> None:
        """Take one micro-batch."""
        _Step(self, turn).run()

    def replay_rows(self, messages: pa.Table) -> tuple[Sequence[bytes], Sequence[bytes]]:
        """Give the message-store rows of messages, sorted by key; `settle` takes out those of gone sessions."""
        if self.held is None or not messages.num_rows:
            return [], []
        key_of, codes = self.keys.encode(messages)
        return self.held.replay_rows(messages, codes.take(pa.array(key_of)))

    def settle(self, work: Workspace) -> None:
        """Leave of replayed messages those of the sessions that are there.

        A message is of a session that covers its event time, unless it is before the session's core: messages that
        only a session near them made acceptable are listed one by one, others there were refused or are gone.
        """
        if self.held is None:
            return
        found, _ = work.scan_arrays(_MESSAGES, bytes([Region.MESSAGES + 1]))
        sessions = self._all(work)
        codes = pa.array([key[1 : -OFFSET_BYTES - TIME_BYTES] for key in found], pa.binary())
        space = KeySpace([rows.codes_of(sessions.idents), codes])
        times = rows.firsts_of([key[:-OFFSET_BYTES] for key in found])
        listed = {key[2:] for key in work.scan_arrays(rows.NEAR_ONLY, rows.NEAR_ONLY[:1] + b"W")[0]}
        count = len(sessions)
        key = np.concatenate(space.numbers)
        at = np.concatenate([sessions.first, times])
        order = np.lexsort((np.arange(len(key)) >= count, at, key))
        before = np.maximum.accumulate(np.where(order < count, np.arange(len(order)), -1))
        session = np.where(before >= 0, order[before], -1)[order >= count]
        message = order[order >= count] - count
        known = session >= 0
        known[known] &= key[session[known]] == space.numbers[1][message[known]]
        known[known] &= times[message[known]] <= sessions.last[session[known]]
        core = np.zeros(len(message), np.bool_)
        core[known] = times[message[known]] >= sessions.core[session[known]]
        doubtful = known & ~core
        core[doubtful] = [found[m][-OFFSET_BYTES:] in listed for m in message[doubtful].tolist()]
        remove(work, sorted(found[m] for m in message[~core].tolist()))

    def proofs(self, work: Workspace) -> Iterable[Proof]:
        """Give what the message store must hold, session by session."""
        if self.held is None:
            return
        sessions = self._all(work)
        for ident, last, count, digest in zip(
            sessions.idents, sessions.last.tolist(), sessions.count.tolist(), sessions.digest.tolist(), strict=True
        ):
            start, end = _MESSAGES + ident, _MESSAGES + ident[:-TIME_BYTES] + fixed_bytes(last + 1)
            yield Proof(f"session {ident.hex()} to {last}", start, end, count, digest)

    def _all(self, work: Workspace) -> Stored:
        keys, values = work.scan_arrays(rows.WINDOWS, bytes([Region.WINDOWS + 1]))
        return self.rows.decode([key[1:] for key in keys], values)


@dataclass(frozen=True, slots=True)
class _Sent:
    """Rows of REVISIONS, as read.

    Attributes:
        idents: Group key and first.
        first: First event times.
        last: Last event times.
        revision: Revisions.
        owner: Stored session that each lies in.
        values: The aggregates.
    """

    idents: list[bytes]
    first: IntArray
    last: IntArray
    revision: IntArray
    owner: IntArray
    values: pa.Table


@dataclass(frozen=True, slots=True)
class _Finals:
    """Sessions as they are when all messages came; all as long as one another.

    Attributes:
        key: Number of the group key.
        first: First event time.
        last: Last event time.
        core: See backend.operators.session_rows.
        open: Not closed by any message so far.
        since: Since when an update waits, or `NEVER`.
        node: What it is made of.
    """

    key: IntArray
    first: IntArray
    last: IntArray
    core: IntArray
    open: Mask
    since: IntArray
    node: IntArray

    def __len__(self) -> int:
        return len(self.key)


class _Step:
    """One micro-batch; the attributes are filled in the order of the steps."""

    def __init__(self, kind: Sessions, turn: Turn) -> None:
        self.kind, self.turn, self.work = kind, turn, turn.work
        policies = kind.spec.policies
        self.gap, self.keep = kind.gap, kind.gap + 1 + kind.retention
        self.rules = Rules(
            kind.gap,
            kind.retention,
            turn.exact,
            turn.clock,
            turn.batch.time_ms,
            policies.full,
            policies.early_ms is not None,
            policies.late_ms is not None,
        )
        self.policies = policies
        self.now = turn.batch.time_ms
        self.clock_after = max(turn.clock_after, _LOWEST)

    def run(self) -> None:
        self._arrive()
        self._find()
        self._connect()
        self._tell()
        self._gather()
        self._finish()
        self._compute()
        self._emit()
        self._store()

    # -- find -----------------------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        turn = self.turn
        self.messages = turn.messages
        self.count = self.messages.num_rows
        self.time = numbers(self.messages, TIME)
        self.before = np.maximum(np.maximum(numbers(self.messages, BEFORE), turn.clock), _LOWEST)
        self.clock = np.maximum(self.before, self.time) if turn.exact else self.before
        self.key, self.codes = self.kind.keys.encode(self.messages)
        self.own = self.time + self.keep > self.before

    def _find(self) -> None:
        """Read the sessions that may be concerned."""
        turn, work, gap = self.turn, self.work, self.gap
        found = dict.fromkeys(self._touched())
        clock = max(turn.clock, _LOWEST)
        if self.clock_after > clock:
            found.update(dict.fromkeys(rows.scan_index(work, clock - gap, self.clock_after - gap)))
            found.update(dict.fromkeys(rows.scan_index(work, None, self.clock_after - self.keep + 1)))
        late_ms, early_ms = self.policies.late_ms, self.policies.early_ms
        if turn.batch.drain:
            found.update(dict.fromkeys(rows.scan_index(work, self.clock_after - gap, None)))
            found.update(dict.fromkeys(rows.scan_waiting(work, rows.LATE_WAITS, None)))
        elif turn.ledger.due_ms is not None and turn.ledger.due_ms <= self.now:
            for tag, delay in ((rows.LATE_WAITS, late_ms), (rows.EARLY_WAITS, early_ms)):
                if delay is not None:
                    found.update(dict.fromkeys(rows.scan_waiting(work, tag, self.now - delay)))
        self.stored = self.kind.rows.read(work, sorted(found))
        space = KeySpace([self.codes, rows.codes_of(self.stored.idents)])
        self.space = space
        self.key = space.numbers[0][self.key] if self.count else self.key
        self.stored_key = space.numbers[1]
        self._read_sent()

    def _touched(self) -> list[bytes]:
        """Find the sessions of the messages' group keys that may be near: by the index, or key by key."""
        if not self.count:
            return []
        low = np.full(len(self.codes), 2**63 - 1, np.int64)
        high = np.full(len(self.codes), -(2**63), np.int64)
        np.minimum.at(low, self.key, self.time - self.gap)
        np.maximum.at(high, self.key, self.time + self.gap)
        total = int.from_bytes(self.work.get(_TOTAL) or b"", "big")
        found: list[bytes] = []
        alone = np.ones(len(self.codes), np.bool_)
        if len(self.codes) * _SCAN_SHARE >= total:
            # open sessions and what a little disorder touches; a message far back looks for itself
            reach = max(int(low.min()), max(self.turn.clock, _LOWEST) - 2 * self.gap)
            alone = low < reach
            near = rows.scan_index(self.work, reach, None)
            known = pc.is_in(rows.codes_of(near), value_set=self.codes).to_numpy(zero_copy_only=False)
            found = [near[at] for at in np.flatnonzero(known).tolist()]
        codes = self.codes.to_pylist()
        for at in np.flatnonzero(alone).tolist():  # one range per group key
            start, end = rows.WINDOWS + codes[at], rows.WINDOWS + codes[at] + fixed_bytes(int(high[at]) + 1)
            found += [key[1:] for key in self.work.scan_arrays(start, end)[0]]
        return found

    def _read_sent(self) -> None:
        """Read the rows that were sent of the stored sessions."""
        stored = self.stored
        idents: list[bytes] = []
        values: list[bytes] = []
        owner: list[int] = []
        one = np.flatnonzero(stored.shown == 1).tolist()
        several = np.flatnonzero(stored.shown > 1).tolist()
        for at, value in zip(one, self.work.get_many([rows.SHOWN + stored.idents[at] for at in one]), strict=True):
            if value is None:
                several.append(at)
            else:
                idents.append(stored.idents[at])
                values.append(value)
                owner.append(at)
        for at in several:  # merged sessions: what was sent of their parts lies within them
            code = stored.idents[at][:-TIME_BYTES]
            end = rows.SHOWN + code + fixed_bytes(int(stored.last[at]) + 1)
            keys, found = self.work.scan_arrays(rows.SHOWN + stored.idents[at], end)
            idents += [key[1:] for key in keys]
            values += found
            owner += [at] * len(keys)
        table = self.kind.rows.decode_shown(values)
        names = [f.name for f in self.kind.value_fields]
        self.sent = _Sent(
            idents,
            rows.firsts_of(idents),
            numbers(table, "_last"),
            numbers(table, "_revision"),
            np.array(owner, np.int64),
            table.select(names),
        )

    # -- connect --------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Number the components: messages and stored sessions of a group key at distances of at most the gap."""
        stored = len(self.stored)
        key = np.concatenate([self.stored_key, self.key])
        first = np.concatenate([self.stored.first, self.time])
        last = np.concatenate([self.stored.last, self.time])
        order = np.lexsort((first, key))
        opens = np.ones(len(order), np.bool_)
        if len(order):
            reach = _running_maximum(last[order], key[order])
            opens[1:] = (key[order][1:] != key[order][:-1]) | (first[order][1:] > reach[:-1] + self.gap)
        component = np.empty(len(order), np.int64)
        component[order] = np.cumsum(opens) - 1
        self.components = int(opens.sum())
        self.stored_part, self.part = component[:stored], component[stored:]
        touched = np.zeros(self.components, np.bool_)
        touched[self.part] = True
        self.touched = touched
        self.ordered = self._in_order()

    def _in_order(self) -> Mask:
        """Tell for each component whether the order of its messages decides what it comes to.

        It does, when one of its sessions closes before a later message of it comes, when one falls out of retention
        before, or when a message needs a session near it to be acceptable.
        """
        count, stored = self.components, self.stored
        decides = np.zeros(count, np.bool_)
        decides[self.part[~self.own]] = True
        newest = np.full(count, _LOWEST, np.int64)
        np.maximum.at(newest, self.part, self.clock)
        is_open = stored.last + self.gap + 1 > max(self.turn.clock, _LOWEST)
        fresh = self.time + self.gap + 1 > self.before
        if not self.turn.exact:  # sessions close and go when the micro-batch ends
            oldest = np.full(count, 2**63 - 1, np.int64)
            np.minimum.at(oldest, self.part, self.time)
            np.minimum.at(oldest, self.stored_part, stored.last)
            return decides | (self.touched & (oldest < newest - self.keep + 1))
        oldest = np.full(count, 2**63 - 1, np.int64)  # of what is late: only that may go while others come
        np.minimum.at(oldest, self.part[~fresh], self.time[~fresh])
        np.minimum.at(oldest, self.stored_part[~is_open], stored.last[~is_open])
        decides |= self.touched & (oldest < newest - self.keep + 1)
        # the open session of a component ends with its newest fresh message: does the clock pass it before the next?
        part = np.concatenate([self.stored_part[is_open], self.part])
        row = np.concatenate([np.full(int(is_open.sum()), -1, np.int64), np.arange(self.count)])
        end = np.concatenate([stored.last[is_open], np.where(fresh, self.time, _LOWEST)])
        clock = np.concatenate([np.full(int(is_open.sum()), _LOWEST, np.int64), self.clock])
        order = np.lexsort((row, part))
        part, end, clock = part[order], end[order], clock[order]
        reach = _running_maximum(end, part)
        passed = (part[1:] == part[:-1]) & (reach[:-1] > _LOWEST) & (clock[1:] > reach[:-1] + self.gap)
        decides[part[1:][passed]] = True
        return decides & self.touched

    # -- tell -----------------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        """Tell the components where the order decides, message by message."""
        sent = self.sent
        shown = list(zip(sent.first.tolist(), sent.last.tolist(), sent.revision.tolist(), strict=True))
        self.story = Story(self.rules, len(self.stored), shown)
        self.told: list[tuple[int, Live]] = []
        mine = np.flatnonzero(self.ordered[self.part])
        if not len(mine):
            return
        lives: dict[int, list[Live]] = {}
        for at in np.flatnonzero(self.ordered[self.stored_part]).tolist():
            lives.setdefault(int(self.stored_part[at]), []).append(self._live(at))
        mine = mine[np.argsort(self.part[mine], kind="stable")]
        parts, starts = np.unique(self.part[mine], return_index=True)
        columns = (mine, self.time[mine], self.before[mine], self.clock[mine])
        messages = list(zip(*(column.tolist() for column in columns), strict=True))
        for part, low, high in zip(parts.tolist(), starts.tolist(), [*starts.tolist()[1:], len(mine)], strict=True):
            key = int(self.key[mine[low]])
            left = self.story.tell(key, lives.get(part, []), messages[low:high])
            self.told += [(key, live) for live in left]

    def _live(self, at: int) -> Live:
        stored = self.stored
        return Live(
            int(stored.first[at]),
            int(stored.last[at]),
            int(stored.core[at]),
            bool(stored.last[at] + self.gap + 1 <= max(self.turn.clock, _LOWEST)),
            int(stored.since[at]),
            np.flatnonzero(self.sent.owner == at).tolist(),
            [at],
        )

    # -- gather ---------------------------------------------------------------------------------------------------

    def _gather(self) -> None:
        """Put all sessions together: told ones, components in one piece, and stored ones that no message touched."""
        story, stored = self.story, self.stored
        self.nodes = Nodes(len(stored), np.full(self.count, -1, np.int64))
        for node, members in story.leaves:
            self.nodes.message_node[members] = node
        for node, parts in story.joins:
            self.nodes.joined.append(np.full(len(parts), node))
            self.nodes.parts.append(np.array(parts, np.int64))
        made = len(stored) + len(story.leaves) + len(story.joins)
        whole = self._whole(made)
        alone = np.flatnonzero(~self.touched[self.stored_part])
        told = [live for _, live in self.told]
        lists = (
            [k for k, _ in self.told],
            *([getattr(x, n) for x in told] for n in ("first", "last", "core", "closed", "since")),
        )
        key, first, last, core, closed, since = (np.array(column, np.int64) for column in lists)
        told_node = np.array([live.nodes[0] for live in told], np.int64)
        was_open = stored.last[alone] + self.gap + 1 > max(self.turn.clock, _LOWEST)
        both = (
            (key, whole.key, self.stored_key[alone]),
            (first, whole.first, stored.first[alone]),
            (last, whole.last, stored.last[alone]),
            (core, whole.core, stored.core[alone]),
            (closed == 0, whole.open, was_open),
            (since, whole.since, stored.since[alone]),
            (told_node, whole.node, alone),
        )
        self.finals = _Finals(*(np.concatenate(columns) for columns in both))
        self._gather_sent(len(told), len(whole), alone)
        self.nodes.close()

    def _whole(self, made: int) -> _Finals:
        """Give the components in one piece."""
        stored, count = self.stored, self.components
        pieces = np.flatnonzero(self.touched & ~self.ordered)
        number = np.full(count, -1, np.int64)
        number[pieces] = np.arange(len(pieces))
        mine, own = number[self.part], number[self.stored_part]
        has, old = mine >= 0, own >= 0
        total = len(pieces)
        key, since = np.zeros(total, np.int64), np.full(total, self.now, np.int64)
        low, core = np.full(total, 2**63 - 1, np.int64), np.full(total, 2**63 - 1, np.int64)
        high = np.full(total, -(2**63), np.int64)
        key[mine[has]] = self.key[has]
        for target, at, values in (
            (low, mine[has], self.time[has]),
            (core, mine[has], self.time[has]),
            (low, own[old], stored.first[old]),
            (core, own[old], stored.core[old]),
        ):
            np.minimum.at(target, at, values)
        np.maximum.at(high, mine[has], self.time[has])
        np.maximum.at(high, own[old], stored.last[old])
        waits = old & (stored.since != NEVER)
        np.minimum.at(since, own[waits], stored.since[waits])
        is_open = np.zeros(total, np.bool_)
        is_open[mine[has & (self.time + self.gap + 1 > (self.before if self.turn.exact else self.turn.clock))]] = True
        is_open[own[old & (stored.last + self.gap + 1 > max(self.turn.clock, _LOWEST))]] = True
        since[~np.where(is_open, self.rules.early, self.rules.late)] = NEVER
        self.nodes.message_node[has] = made + mine[has]
        joined = np.zeros(total, np.bool_)
        joined[own[old]] = True
        node = made + np.arange(total)
        join = np.cumsum(joined) - 1 + made + total
        node[joined] = join[joined]
        self.nodes.joined += [join[own[old]], join[joined]]
        self.nodes.parts += [np.flatnonzero(old), made + np.flatnonzero(joined)]
        self.nodes.total = made + total + int(joined.sum())
        self.piece_of_stored = own
        return _Finals(key, low, high, core, is_open, since, node)

    def _gather_sent(self, told: int, whole: int, alone: IntArray) -> None:
        """Give for each session the rows that were sent of it: index of a stored row, or -1 - event."""
        final = np.full(len(self.stored), -1, np.int64)
        old = self.piece_of_stored >= 0
        final[old] = told + self.piece_of_stored[old]
        final[alone] = told + whole + np.arange(len(alone))
        owner = final[self.sent.owner]
        row = np.flatnonzero(owner >= 0)
        pairs = [(at, shown) for at, (_, live) in enumerate(self.told) for shown in live.shown]
        extra = np.array(pairs, np.int64).reshape(-1, 2)
        self.shown_of = np.concatenate([owner[row], extra[:, 0]])
        self.shown = np.concatenate([row, extra[:, 1]])

    # -- finish ---------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Decide what is sent of each session at the end, and which sessions go."""
        finals, batch = self.finals, self.turn.batch
        closes = finals.last + self.gap + 1
        closing = finals.open & (closes <= self.clock_after)
        self.gone = finals.last + self.keep <= self.clock_after
        waits = ~closing & (finals.since != NEVER)
        past = waits & ~finals.open
        late_ms, early_ms = self.policies.late_ms, self.policies.early_ms
        due = np.zeros(len(finals), np.bool_)
        if late_ms is not None:
            due = past & (self.gone | (finals.since <= self.now - late_ms) | batch.drain)
        still = finals.open & ~closing
        phase = np.full(len(finals), -1, np.int64)
        if self.rules.full:
            phase[closing] = FULL
        phase[due] = LATE
        if batch.drain:
            phase[still] = DRAIN
        elif early_ms is not None:
            phase[still & waits & (finals.since <= self.now - early_ms)] = EARLY
        self.since = np.where(closing | (phase >= 0), NEVER, finals.since)
        sends = np.flatnonzero(phase >= 0)
        time = np.where(phase == FULL, closes, finals.last + self.keep)[sends]
        now = (phase[sends] != FULL) & ~((phase[sends] == LATE) & self.gone[sends])
        self.end_events, self.end_phase = sends, phase[sends]
        self.end_time = np.where(now, 2**63 - 1, time)

    # -- compute --------------------------------------------------------------------------------------------------

    def _compute(self) -> None:
        """Compute the aggregates of all nodes and of what is sent."""
        kind, story = self.kind, self.story
        names = kind.plan.partial_schema.names
        self.partials = self.nodes.partials(kind.plan, self.stored, self.messages).select(names)
        self.event_node = np.concatenate(
            [np.array([event.node for event in story.events], np.int64), self.finals.node[self.end_events]]
        )
        values = kind.plan.result(self.partials.take(pa.array(self.event_node)))
        columns = {name: values.column(name) for name in values.column_names}
        self._read_messages()
        if kind.held is not None:
            owner, member = self._members(self.event_node)
            full = full_values(kind.full, owner, member, len(self.event_node), self.all_messages)
            columns.update({name: full.column(name) for name in full.column_names})
        fields = kind.value_fields
        self.values = pa.table([columns[f.name] for f in fields], schema=pa.schema(fields)) if fields else None

    def _read_messages(self) -> None:
        """Read the messages of stored sessions that are sent or go, and lay out those that just came."""
        held, stored = self.kind.held, self.stored
        self.node_count = np.zeros(self.nodes.total, np.int64)
        self.node_digest = np.zeros(self.nodes.total, np.uint64)
        if held is None:
            return
        gone_nodes = np.array([live.nodes[0] for _, live in self.story.gone], np.int64)
        self.gone_nodes = np.concatenate([self.finals.node[self.gone], gone_nodes])
        wanted = np.unique(self.nodes.leaves(np.concatenate([self.event_node, self.gone_nodes]))[1])
        wanted = wanted[wanted < len(stored)]
        starts = [_MESSAGES + stored.idents[at] for at in wanted.tolist()]
        ends = [
            _MESSAGES + stored.idents[at][:-TIME_BYTES] + fixed_bytes(int(stored.last[at]) + 1)
            for at in wanted.tolist()
        ]
        found = held.read(self.work, zip(starts, ends, strict=True))
        sizes = np.bincount(found.owner, minlength=len(wanted))
        if (sizes != stored.count[wanted]).any():
            wrong = int(np.flatnonzero(sizes != stored.count[wanted])[0])
            raise StateCorrupted(
                "the messages of a session are not those that its metadata says",
                where=starts[wrong].hex(),
                why=f"{sizes[wrong]} messages, {stored.count[wanted[wrong]]} expected",
                command=VERIFY,
            )
        self.old = HeldRows(found.keys, found.values, wanted[found.owner])
        self.all_messages = pa.concat_tables([held.table(found), held.select(self.messages)])
        codes = self.space.keys.take(pa.array(self.key))
        self.message_keys, self.message_values = held.rows(self.messages, codes)
        own = digests(self.message_keys, self.message_values)
        self.node_count = self.nodes.sums(stored.count, np.ones(self.count, np.int64))
        self.node_digest = self.nodes.sums(stored.digest, own)  # type: ignore[arg-type, assignment]

    def _members(self, nodes: IntArray) -> tuple[IntArray, IntArray]:
        """Give the messages of nodes: position in `nodes`, row of `all_messages`."""
        owner, leaf = self.nodes.leaves(nodes)
        node = np.concatenate([self.old.owner, self.nodes.message_node])
        order = np.argsort(node, kind="stable")
        begin, end = np.searchsorted(node[order], leaf, "left"), np.searchsorted(node[order], leaf, "right")
        at = np.repeat(begin - (np.cumsum(end - begin) - (end - begin)), end - begin) + np.arange(
            int((end - begin).sum())
        )
        return np.repeat(owner, end - begin), order[at]

    # -- emit -----------------------------------------------------------------------------------------------------

    def _emit(self) -> None:
        """Lay out what is sent, each row behind those that it withdraws."""
        story, finals, told = self.story, self.finals, len(self.story.events)
        ends = self.end_events
        self.event_of = np.full(len(finals), -1, np.int64)
        self.event_of[ends] = told + np.arange(len(ends))
        sent = [story.sent(shown) for shown in self.shown.tolist()]
        shown_first, shown_last, shown_revision = (np.array([s[at] for s in sent], np.int64) for at in range(3))
        same = (shown_first == finals.first[self.shown_of]) & (shown_last == finals.last[self.shown_of])
        revision = np.zeros(len(finals), np.int64)
        revision[self.shown_of[same]] = shown_revision[same] + 1
        away = ~same & (self.event_of[self.shown_of] >= 0)
        event = np.concatenate(
            [
                np.arange(told + len(ends)),
                np.repeat(np.arange(told), [len(e.withdraws) for e in story.events]),
                self.event_of[self.shown_of[away]],
            ]
        )
        withdrawn = np.array([shown for e in story.events for shown in e.withdraws], np.int64)
        own = np.full(told + len(ends), 2**62)
        shown = np.concatenate([own, withdrawn, self.shown[away]])
        place = np.concatenate([own, [story.sent(row)[0] for row in withdrawn.tolist()], shown_first[away]])
        columns = [(e.key, e.first, e.last, e.revision, LATE if e.late else FULL, e.time) for e in story.events]
        early = np.array(columns, np.int64).reshape(-1, 6).T
        final = (finals.key, finals.first, finals.last, revision)
        pieces = [np.concatenate([a, b[ends]]) for a, b in zip(early[:4], final, strict=True)]
        self.event_key, self.event_first, self.event_last, self.event_revision = pieces
        self.event_phase = np.concatenate([early[4], self.end_phase])
        time = np.concatenate([early[5], self.end_time])
        row = np.searchsorted(self.clock, time) if self.turn.exact else np.where(time < 2**63 - 1, 0, 1)
        order = np.lexsort(
            (place, self.event_key[event], self.event_first[event], time[event], self.event_phase[event], row[event])
        )
        self._lay_out(event[order], shown[order])
        self.turn.metrics["windows_emitted"] += len(ends) + told

    def _lay_out(self, event: IntArray, shown: IntArray) -> None:
        if not len(event):
            return
        kind, sent = self.kind, self.sent
        own, stored = shown == 2**62, (shown >= 0) & (shown < 2**62)
        other = np.where(own | stored, event, -1 - shown)
        at = np.where(stored, shown, 0)
        first, last, revision = self.event_first[other], self.event_last[other], self.event_revision[other]
        first[stored], last[stored], revision[stored] = (c[at[stored]] for c in (sent.first, sent.last, sent.revision))
        phase = np.where(own, self.event_phase[event], RETRACTED)
        codes = self.space.keys.take(pa.array(self.event_key[event]))
        count = len(event)
        leading = [
            pa.array(REASONS).take(pa.array(phase)),
            pa.array(revision, pa.int32()),
            pa.array(first),
            pa.array(last),
            pa.nulls(count, pa.int64()),
            pa.nulls(count, pa.int64()),
        ]
        columns = [*leading, *kind.keys.decode(codes)]
        if self.values is not None:
            values = pa.concat_tables([self.values, sent.values.cast(self.values.schema)])
            columns += values.take(pa.array(np.where(stored, self.values.num_rows + at, other))).columns
        self.turn.results.append(pa.table(columns, schema=kind.result_schema))

    # -- store ----------------------------------------------------------------------------------------------------

    def _store(self) -> None:
        turn, work, finals = self.turn, self.work, self.finals
        kept = np.flatnonzero(~self.gone)
        codes = self.space.keys.take(pa.array(finals.key)).to_pylist()
        idents = [code + fixed_bytes(first) for code, first in zip(codes, finals.first.tolist(), strict=True)]
        shown = self._store_sent(idents)
        node = finals.node[kept]
        sessions = Stored(
            [idents[at] for at in kept.tolist()],
            finals.first[kept],
            finals.last[kept],
            finals.core[kept],
            self.since[kept],
            shown[kept],
            self.node_count[node],
            self.node_digest[node],
            self.partials.take(pa.array(node)),
        )
        bound = self.clock_after - self.keep + 1
        self._delete_old(sessions, bound)
        self.kind.rows.put(work, sessions)
        past = sessions.last + self.gap + 1 <= self.clock_after
        for tag, here in ((rows.LATE_WAITS, past), (rows.EARLY_WAITS, ~past)):
            waits = np.flatnonzero(here & (sessions.since != NEVER))
            keys = rows.waiting_keys(tag, sessions.since[waits], [sessions.idents[at] for at in waits.tolist()])
            work.put_many(keys, [b""] * len(keys))
        total = int.from_bytes(work.get(_TOTAL) or b"", "big") + len(sessions) - len(self.stored)
        work.put(_TOTAL, total.to_bytes(8, "big"))
        if turn.clock_after != NO_TIME:
            work.raise_bound(Region.SESSION_INDEX, rows.index_start(bound))
        self._store_messages()
        self._note_due()
        self._refuse()

    def _delete_old(self, sessions: Stored, bound: int) -> None:
        """Delete what was read and is not written again; index rows below the bound go with it."""
        stored, work = self.stored, self.work
        stay = set(sessions.idents)
        work.delete_many([rows.WINDOWS + ident for ident in stored.idents if ident not in stay])
        index = rows.index_keys(stored.last, stored.idents)
        work.delete_many([key for key, last in zip(index, stored.last.tolist(), strict=True) if last >= bound])
        past = stored.last + self.gap + 1 <= max(self.turn.clock, _LOWEST)
        for tag, here in ((rows.LATE_WAITS, past), (rows.EARLY_WAITS, ~past)):
            waits = np.flatnonzero(here & (stored.since != NEVER))
            idents = [stored.idents[at] for at in waits.tolist()]
            work.delete_many(rows.waiting_keys(tag, stored.since[waits], idents))

    def _store_sent(self, idents: list[bytes]) -> IntArray:
        """Write what was sent and still stands; gives the number of such rows of each session."""
        finals, work = self.finals, self.work
        stands = (self.event_of[self.shown_of] < 0) & ~self.gone[self.shown_of]
        count = np.bincount(self.shown_of[stands], minlength=len(finals))
        ends = self.end_events[~self.gone[self.end_events]]
        count[ends] = 1
        kept = set(self.shown[stands & (self.shown >= 0)].tolist())
        work.delete_many([rows.SHOWN + ident for at, ident in enumerate(self.sent.idents) if at not in kept])
        on_the_way = -1 - self.shown[stands & (self.shown < 0)]
        event = np.concatenate([self.event_of[ends], on_the_way])
        codes = self.space.keys.take(pa.array(self.event_key[event])).to_pylist()
        keys = [rows.SHOWN + c + fixed_bytes(f) for c, f in zip(codes, self.event_first[event].tolist(), strict=True)]
        values = self.values.take(pa.array(event)) if self.values is not None else pa.table({})
        rows_ = self.kind.rows.encode_shown(self.event_last[event], self.event_revision[event], values)
        work.put_many(keys, rows_)
        return count

    def _store_messages(self) -> None:
        held, turn, work = self.kind.held, self.turn, self.work
        if held is None:
            return
        _, member = self._members(self.gone_nodes)
        old = len(self.old.owner)
        gone = self.old.where(np.unique(member[member < old]))
        held.drop(turn, gone)
        work.delete_many(sorted(rows.NEAR_ONLY + key[-OFFSET_BYTES:] for key in gone.keys))
        stays = self.nodes.message_node >= 0
        stays[member[member >= old] - old] = False
        picked = np.flatnonzero(stays).tolist()
        held.put(turn, [self.message_keys[at] for at in picked], [self.message_values[at] for at in picked])
        marked = [at for at in self.story.near_only if stays[at]]
        work.put_many(
            sorted(rows.NEAR_ONLY + self.message_keys[at][-OFFSET_BYTES:] for at in marked), [b""] * len(marked)
        )
        turn.replay_from = held.replay_from(work, turn.batch.after)
        if not turn.exact:  # with one source partition the order of offsets tells them apart
            refused = sorted(rows.REFUSED + self.message_keys[at][-OFFSET_BYTES:] for at in self.story.refused)
            work.put_many(refused, [b""] * len(refused))
        self._note_refused()

    def _note_refused(self) -> None:
        """Give the refused messages that a replay would bring; forget those that it would not."""
        forget = []
        for key in self.work.scan_arrays(rows.REFUSED, rows.REFUSED[:1] + b"S")[0]:
            stream, partition = int.from_bytes(key[2:4], "big"), int.from_bytes(key[4:8], "big") - 2**31
            offset = int.from_bytes(key[8:], "big") - 2**63
            if offset >= self.turn.replay_from.get((stream, partition), 2**63):
                self.turn.rejected.append((stream, partition, offset))
            else:
                forget.append(key)
        self.work.delete_many(forget)

    def _note_due(self) -> None:
        due = []
        for tag, delay in ((rows.LATE_WAITS, self.policies.late_ms), (rows.EARLY_WAITS, self.policies.early_ms)):
            since = rows.first_waiting(self.work, tag) if delay is not None else None
            if since is not None and delay is not None:
                due.append(since + delay)
        self.turn.ledger.due_ms = min(due, default=None)

    def _refuse(self) -> None:
        refused = np.zeros(self.count, np.bool_)
        refused[self.story.refused] = True
        self.turn.ledger.counted += int((~refused).sum())
        self.turn.refuse(refused, "out_of_retention", f"it and every session near it ended {self.keep} ms or more ago")


def _running_maximum(values: IntArray, groups: IntArray) -> IntArray:
    """Give the running maximum within each group; `groups` ascends."""
    distinct, rank = np.unique(values, return_inverse=True)
    reach = np.maximum.accumulate(groups * len(distinct) + rank)
    return distinct[reach - groups * len(distinct)]
