"""What is sent of sessions, and what they come to: decided, computed, laid out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from backend.aggregates import FullPlan, IncrementalPlan
from backend.messages.key_first import MessagesByKey, StoredMessages
from backend.messages.rows import digests
from backend.store.protocol import Region
from backend.store.workspace import Workspace
from backend.windows.columns.arrays import IntArray, Mask, spread
from backend.windows.columns.grouping import GroupKeys
from backend.windows.full_state import with_full
from backend.windows.merging.found import Found
from backend.windows.merging.gather import Gathered
from backend.windows.merging.nodes import Nodes, full_values
from backend.windows.merging.one_by_one import Terms
from backend.windows.merging.rows import LONG_AGO, NEVER, key_range
from backend.windows.micro_batch import DRAIN, EARLY, LATE, RETRACTED, Emission

_MESSAGES = bytes([Region.MESSAGES])
_END = 2**63 - 1
"""Clock of what is due when the micro-batch ends."""


@dataclass(frozen=True, slots=True)
class Ends:
    """What is due of the sessions at the end; arrays as long as they are, `time` and `phase` as `sends`.

    Attributes:
        gone: Out of retention.
        since: Since when an update waits, afterwards.
        unsent: Messages since the last row, afterwards.
        sends: Sessions that are sent.
        phase: Why.
        time: Clock that made it due, `_END` for the end of the micro-batch.
    """

    gone: Mask
    since: IntArray
    unsent: IntArray
    sends: IntArray
    phase: IntArray
    time: IntArray


def finish(gathered: Gathered, terms: Terms) -> Ends:
    """Decide what is sent of each session at the end, and which sessions go."""
    finals = gathered.finals
    closes = finals.last + terms.gap + 1
    completed = finals.open & (closes <= terms.clock_after)
    still = finals.open & ~completed
    gone = finals.last < terms.bound_after
    waits: Mask = finals.since != NEVER
    phase = np.full(len(finals), -1, np.int64)
    policies = terms.policies
    phase[completed & (waits | policies.full | terms.full_off)] = terms.at_end
    phase[waits & ~finals.open & (gone | terms.drain | _due(finals.since, policies.late_ms, terms.now))] = LATE
    if terms.drain:
        phase[still] = DRAIN
    else:
        due = _due(finals.since, policies.early_ms, terms.now)
        if policies.early_messages is not None:
            due |= waits & (finals.unsent >= policies.early_messages)
        phase[still & (terms.full_off | due)] = EARLY
    sends = np.flatnonzero(phase >= 0)
    time = np.where(completed, closes, np.where((phase == LATE) & gone, finals.last + terms.stays, _END))
    since, unsent = np.where(completed | (phase >= 0), NEVER, finals.since), np.where(phase >= 0, 0, finals.unsent)
    return Ends(gone, since, unsent, sends, phase[sends], time[sends])


def _due(since: IntArray, delay_ms: int | None, now_ms: int) -> Mask:
    """Tell which updates have waited for long enough; without a policy those whose policy was turned off."""
    due: Mask = (since != NEVER) & (since <= (LONG_AGO if delay_ms is None else now_ms - delay_ms))
    return due


@dataclass(frozen=True, slots=True)
class Events:
    """Rows that were sent before, then the results of a micro-batch: on the way first, then at the end.

    Attributes:
        old: Number of rows that were sent before: of the others, `phase` and `node` are.
        key: Number of the group key of each row.
        first: First event time.
        last: Last event time.
        revision: Revision.
        phase: Reason.
        node: What it is computed of.
        of_final: Per session its row at the end, -1 for none.
        sends: Rows to send: results, each behind the rows that it withdraws.
        result: Of each of these the result that it is, or that withdraws it.
    """

    old: int
    key: IntArray
    first: IntArray
    last: IntArray
    revision: IntArray
    phase: IntArray
    node: IntArray
    of_final: IntArray
    sends: IntArray
    result: IntArray


def order_events(found: Found, gathered: Gathered, ends: Ends, terms: Terms) -> Events:
    """Put all results in the order in which they were due, each behind the rows that it withdraws."""
    sent, finals, sends = found.sent, gathered.finals, ends.sends
    old, on_the_way = len(sent.keys), np.array(gathered.one_by_one.events, np.int64).reshape(-1, 6).T
    before = (found.stored_key[sent.owner], sent.first, sent.last, sent.revision)
    key, first, last, revision = map(np.concatenate, zip(before, on_the_way[:4], strict=True))
    of_final = np.full(len(finals), -1, np.int64)
    of_final[sends] = len(key) + np.arange(len(sends))
    owner, shown = gathered.shown_of, gathered.shown
    same = (first[shown] == finals.first[owner]) & (last[shown] == finals.last[owner])
    following = np.zeros(len(finals), np.int64)
    following[owner[same]] = revision[shown[same]] + 1
    rows, at_end = (key, first, last, revision), (finals.key, finals.first, finals.last, following)
    key, first, last, revision = (np.concatenate([a, b[sends]]) for a, b in zip(rows, at_end, strict=True))
    node, time = np.concatenate([on_the_way[4], finals.node[sends]]), np.concatenate([on_the_way[5], ends.time])
    phase = np.concatenate([np.full(on_the_way.shape[1], terms.at_end), ends.phase])
    new, away = np.arange(old, len(key)), ~same & (of_final[owner] >= 0)
    taken_by, taken = np.array(gathered.one_by_one.withdrawn, np.int64).reshape(-1, 2).T
    result, row = np.concatenate([new, taken_by, of_final[owner[away]]]), np.concatenate([new, taken, shown[away]])
    due = np.searchsorted(found.clock, time) if terms.exact else (time == _END).astype(np.int64)
    at = result - old
    order = np.lexsort((first[row], row == result, key[row], first[result], time[at], phase[at], due[at]))
    return Events(old, key, first, last, revision, phase, node, of_final, row[order], result[order])


@dataclass(frozen=True, slots=True)
class Contents:
    """Messages of a micro-batch and of the stored sessions that are sent or go, for full-state aggregates.

    Attributes:
        old: Stored messages; `owner` is the stored session.
        table: All messages: stored ones, then new ones.
        node: Node that each directly belongs to.
        keys: Keys of the new ones in the message store.
        values: Their values.
        digests: Their digests.
    """

    old: StoredMessages
    table: pa.Table
    node: IntArray
    keys: list[bytes]
    values: list[bytes]
    digests: np.ndarray[tuple[int], np.dtype[np.uint64]]

    def members(self, nodes: Nodes, of: IntArray) -> tuple[IntArray, IntArray]:
        """Give the messages of nodes: position in `of`, row of `table`."""
        owner, leaf = nodes.leaves(of)
        order = np.argsort(self.node, kind="stable")
        begin, end = (np.searchsorted(self.node[order], leaf, side) for side in ("left", "right"))
        at, of = spread(begin, end - begin)
        return owner[of], order[at]


def read_contents(
    work: Workspace, message_store: MessagesByKey, found: Found, nodes: Nodes, needed: IntArray
) -> Contents:
    """Read the messages that nodes need, and lay out those that just came."""
    stored = found.stored
    wanted = np.unique(nodes.leaves(needed)[1])
    wanted = wanted[wanted < len(stored)]
    ranges = [key_range(_MESSAGES, stored.idents[at], int(stored.last[at])) for at in wanted.tolist()]
    starts, stops = [start for start, _ in ranges], [stop for _, stop in ranges]
    old = message_store.read_counted(work, starts, stops, stored.count[wanted], "session")
    old = StoredMessages(old.keys, old.values, wanted[old.owner])
    keys, values = message_store.rows(found.messages, found.codes(found.key))
    table = pa.concat_tables([message_store.table(old), message_store.select(found.messages)])
    return Contents(old, table, np.concatenate([old.owner, nodes.message_node]), keys, values, digests(keys, values))


def compute(
    fields: Sequence[pa.Field],
    plans: tuple[IncrementalPlan, FullPlan],
    accumulators: pa.Table,
    events: Events,
    nodes: Nodes,
    contents: Contents | None,
) -> pa.Table:
    """Compute the aggregates of events, in the order of `fields`."""
    incremental, full = plans
    values = incremental.result(accumulators.take(pa.array(events.node)))
    if contents is not None:
        owner, member = contents.members(nodes, events.node)
        values = with_full(values, full_values(full, owner, member, len(events.node), contents.table))
    return values.select([field.name for field in fields])


def lay_out(found: Found, events: Events, values: pa.Table, schema: pa.Schema, keys: GroupKeys) -> pa.Table:
    """Give the rows to send."""
    row, columns = events.sends, values
    if values.num_columns:
        columns = pa.concat_tables([found.sent.values.cast(values.schema), values]).take(pa.array(row))
    phase = np.where(row == events.result, events.phase[events.result - events.old], RETRACTED)
    edges = events.first[row], events.last[row]
    return Emission(phase, events.revision[row], *edges, found.codes(events.key[row]), columns).table(schema, keys)
