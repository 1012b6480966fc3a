"""Session windows by event time: columnar, and message-exact with one source partition (SAMZA-552, KIP-94).

A session of a group key is `[first, last]`, the event times of its first and last message; a message joins the sessions
at a distance of at most the gap. It is full when the clock passes `last + gap`. A message after that is late; when it
makes the session longer or merges it with others, the rows that were sent under the old bounds are withdrawn (reason
`retracted`: the same bounds, group key, revision and values) right before the new one is sent.

Retention. A message at t is refused iff `t + gap + 1 + retention` is at or before the newest event time before it of
its own source partition (or, when that was idle, the clock by which windows close): what counts is the session that the
message would open alone. Whether a session lies near has no say. Kafka Streams judges by the merged session, so that
there a message is taken or dropped depending on what happened to come before it. Retention by number of messages
(backend.windows.count_retention) refuses iff `t + gap + 1` was at or before the stream time N messages ago, in steps of
a sixteenth of the gap.

In exchange a session stays until nothing that is taken can touch it. A message that is taken later has
`t + gap + 1 + retention > clock`; it touches `[first, last]` only if `t <= last + gap`; so the session may go when
`last + gap + gap + 1 + retention <= clock`, and when `last + gap + gap + 1` is at or before the stream time N messages
ago of every source partition that is not idle. What has gone is said by the bound of `SESSION_INDEX` in the commit, not
by today's retention: a message at t is refused as well when `t - gap` is before it, because it might touch a session
that is gone (a retention that was made longer since takes nothing back). Sessions are therefore the connected
components of the accepted messages of a group key, and neither they nor their last revisions nor the errors depend on
where micro-batches are cut, with any number of source partitions. With one, full results do not either.

Steps of a micro-batch:

1. find     Messages out of retention are refused. The stored sessions that others may touch, and those that close,
            expire, or wait to be sent: by the index over last times, so what does nothing costs nothing.
2. connect  Messages and sessions of a group key to components, by sorting and a running maximum.
3. follow   Components where the order of messages decides what is sent (backend.windows.merging.components) are
            followed message by message (backend.windows.merging.one_by_one): those where a session closes before a
            later message of it.
4. finish   What is due at the end: full, late, early, drained.
5. compute  All aggregates at once, stored or sent.
6. write    Sessions, index, what was sent, what waits, messages (backend.windows.merging.rows has the
bytes).

Results stand in the order in which they were due: by message, then by the clock that made them due.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from backend.aggregates import compile_incremental, max_, min_
from backend.batch import MESSAGE_FIELDS, OFFSET, Proof
from backend.messages.key_first import MessagesByKey, remove
from backend.messages.keys import OFFSET_BYTES, TIME_BYTES
from backend.store.protocol import Region
from backend.store.rows import StoreRows
from backend.store.workspace import Workspace
from backend.windows.arrivals import LOWEST, started
from backend.windows.columns.arrays import IntArray
from backend.windows.columns.grouping import GroupKeys
from backend.windows.count_retention import Newest
from backend.windows.merging import rows
from backend.windows.merging.components import connect
from backend.windows.merging.found import find
from backend.windows.merging.gather import gather
from backend.windows.merging.one_by_one import Terms
from backend.windows.merging.results import compute, finish, lay_out, order_events, read_contents
from backend.windows.merging.rows import SessionRows, Stored
from backend.windows.merging.writer import SessionWriter
from backend.windows.micro_batch import Execution
from backend.windows.spec import WindowSpec

START, LAST = "_start_offset", "_last_offset"
STEPS = 16
_MESSAGES = bytes([Region.MESSAGES])


class Sessions:
    """The kind for session windows by event time.

    Args:
        spec: Its window is one.
    """

    def __init__(self, spec: WindowSpec) -> None:
        self.spec = spec
        self.gap, self.retention = spec.window.size, spec.retention_ms
        self.newest = Newest(spec.retention_messages, self._in_steps)
        _, self.full = spec.plans()
        # SAMZA-552's metadata: the offsets of the first and the last message, here as two more aggregates
        own = {START: min_(OFFSET), LAST: max_(OFFSET)}
        self.plan = compile_incremental({**own, **spec.incremental}, pa.schema([*MESSAGE_FIELDS, *spec.schema]))
        self.keys = GroupKeys(spec.key_fields)
        self.result_schema = spec.result_schema()
        self.value_fields = [self.result_schema.field(name) for name in spec.aggregates]
        self.rows = SessionRows(self.plan, self.value_fields)
        fields = [spec.schema.field(name) for name in spec.input_fields()]
        self.message_store = MessagesByKey(fields, timed=True) if spec.full else None

    def fold(self, execution: Execution) -> None:
        """Take one micro-batch."""
        bound = rows.index_bound(execution.work)
        bound = LOWEST if bound is None else bound
        # as a stream time by which sessions of a message alone are out of retention: see `Terms.bound_after`
        floor = max(bound + 2 * self.gap, started(execution.clock_after) - self.retention)
        each, counted = self.newest.judge(execution, floor)
        terms = self._terms(execution, bound, counted)
        found = find(execution, terms, each, self.keys, self.rows)
        gathered = gather(found, connect(found, terms), terms)
        ends = finish(gathered, terms)
        events = order_events(found, gathered, ends, terms)
        store = SessionWriter(execution, terms, found, gathered, ends, events, self.keys, self.rows)
        contents = None
        if self.message_store is not None:
            needed = np.concatenate([events.node, store.gone_nodes()])
            contents = read_contents(execution.work, self.message_store, found, gathered.nodes, needed)
        accumulators = gathered.nodes.accumulators(self.plan, found.stored, found.messages)
        values = compute(self.value_fields, (self.plan, self.full), accumulators, events, gathered.nodes, contents)
        if len(events.sends):
            execution.results.append(lay_out(found, events, values, self.result_schema, self.keys))
        store.write(accumulators, values, self.message_store, contents)

    def count_open(self, work: Workspace, clock: int) -> int:
        """Count the sessions of all group keys that are open at a watermark: it has not passed last + gap."""
        return len(rows.scan_index(work, started(clock) - self.gap, None))

    def _in_steps(self, clocks: IntArray) -> IntArray:
        """Give clocks in steps of a share of the gap: so the staircase of `Newest` stays small."""
        step = max(1, self.gap // STEPS)
        return np.floor_divide(clocks, step) * step

    def _terms(self, execution: Execution, bound: int, counted: int) -> Terms:
        return Terms(
            self.gap,
            self.gap + 1 + self.retention,
            execution.exact,
            started(execution.clock),
            started(execution.clock_after),
            bound,
            counted,
            execution.batch.time_ms,
            execution.batch.drain,
            execution.full_off,
            self.spec.policies,
        )

    def replay_rows(self, messages: pa.Table) -> StoreRows:
        """Give the message-store rows of messages, sorted by key; `settle` takes out those of gone sessions."""
        if self.message_store is None:
            return StoreRows.of([], [])
        return self.message_store.replay_rows(messages, self.keys)

    def settle(self, work: Workspace) -> None:
        """Leave of replayed messages those of the sessions that are there: whose event times they cover."""
        if self.message_store is None:
            return
        found, _ = work.scan_arrays(_MESSAGES, bytes([Region.MESSAGES + 1]))
        sessions = self.all_sessions(work)
        codes = pa.array([key[1 : -OFFSET_BYTES - TIME_BYTES] for key in found], pa.binary())
        times = rows.firsts_of([key[:-OFFSET_BYTES] for key in found])
        session = sessions.before(codes, times)
        covered = session >= 0
        covered[covered] = times[covered] <= sessions.last[session[covered]]
        remove(work, [found[at] for at in np.flatnonzero(~covered).tolist()])

    def proofs(self, work: Workspace) -> Iterable[Proof]:
        """Give what the message store must hold, session by session."""
        if self.message_store is None:
            return
        sessions = self.all_sessions(work)
        for ident, last, count, digest in zip(
            sessions.idents, sessions.last.tolist(), sessions.count.tolist(), sessions.digest.tolist(), strict=True
        ):
            yield Proof(f"session {ident.hex()} to {last}", *rows.key_range(_MESSAGES, ident, last), count, digest)

    def all_sessions(self, work: Workspace) -> Stored:
        """Give all sessions that are there."""
        keys, values = work.scan_arrays(rows.WINDOWS, bytes([Region.WINDOWS + 1]))
        return self.rows.decode([key[1:] for key in keys], values)
