"""What a micro-batch leaves of sessions in the store."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from backend.batch import NO_TIME
from backend.keys import joined, pack_fixed, to_binary
from backend.messages.key_first import MessagesByKey
from backend.store.protocol import Region
from backend.windows.columns.arrays import IntArray, Mask
from backend.windows.columns.grouping import GroupKeys
from backend.windows.columns.keyed import keyed
from backend.windows.merging import rows
from backend.windows.merging.found import TOTAL, Found
from backend.windows.merging.gather import Gathered
from backend.windows.merging.one_by_one import Terms
from backend.windows.merging.refused import Refused
from backend.windows.merging.results import Contents, Ends, Events
from backend.windows.merging.rows import NEVER, SessionRows, Stored
from backend.windows.micro_batch import Execution


@dataclass(frozen=True, slots=True)
class SessionWriter:
    """Writes the sessions of one micro-batch.

    Attributes:
        execution: The micro-batch.
        terms: What sessions go by.
        found: What was there.
        gathered: What is there now.
        ends: What goes, what waits.
        events: What is sent.
        keys: Encodes the group key.
        session_rows: Knows the bytes.
    """

    execution: Execution
    terms: Terms
    found: Found
    gathered: Gathered
    ends: Ends
    events: Events
    keys: GroupKeys
    session_rows: SessionRows

    def gone_nodes(self) -> IntArray:
        """Give the nodes of sessions that are out of retention."""
        return self.gathered.finals.node[self.ends.gone]

    def write(
        self,
        accumulators: pa.Table,
        values: pa.Table,
        message_store: MessagesByKey | None,
        contents: Contents | None,
    ) -> None:
        """Write everything.

        Args:
            accumulators: Per node.
            values: Per event.
            message_store: The message store, if there is one.
            contents: Messages, with a message store.
        """
        execution, work, terms = self.execution, self.execution.work, self.terms
        found, stored = self.found, self.found.stored
        sessions, codes, node = self._sessions(accumulators, self._write_sent(values), contents)
        closed = sessions.last + terms.gap + 1 <= terms.clock_after
        stays = set(sessions.idents)
        execution.metrics["opened"] += len(stays.difference(stored.idents))
        # what closes was found, and what was not found stays as it was
        execution.add_open(int((~closed).sum()) - int(found.is_open.sum()))
        work.delete_many([rows.WINDOWS + ident for ident in stored.idents if ident not in stays])
        self.session_rows.put(work, sessions.where(self._changed(node, sessions)))
        before = self._index_rows(stored, found.codes(found.stored_key), ~found.is_open)
        work.replace_keys(before, self._index_rows(sessions, codes, closed))
        total = int.from_bytes(work.get(TOTAL) or b"", "big") + len(sessions) - len(stored)
        work.put(TOTAL, total.to_bytes(8, "big"))
        if execution.clock_after != NO_TIME:
            work.raise_bound(Region.SESSION_INDEX, rows.index_start(terms.bound_after))
        if message_store is not None and contents is not None:
            self._write_messages(message_store, contents)
        self._note_due()
        execution.ledger.counted += len(found.time)

    def _sessions(
        self, accumulators: pa.Table, shown: IntArray, contents: Contents | None
    ) -> tuple[Stored, pa.Array, IntArray]:
        """Return the sessions that stay, in order of key as the store likes it; group key and node of each."""
        finals, ends, nodes, stored = self.gathered.finals, self.ends, self.gathered.nodes, self.found.stored
        at = np.flatnonzero(~ends.gone)
        at = at[np.lexsort((finals.first[at], finals.key[at]))]  # keys are numbered in the order of their codes
        node, codes, first = finals.node[at], self.found.codes(finals.key[at]), finals.first[at]
        count, digest = np.zeros(len(at), np.int64), np.zeros(len(at), np.uint64)
        if contents is not None:
            count = nodes.sums(stored.count, np.ones(len(contents.keys), np.int64))[node]
            digest = nodes.sums(stored.digest, contents.digests)[node]
        own = finals.last[at], ends.since[at], ends.unsent[at], shown[at], count, digest
        idents = joined([codes, to_binary(pack_fixed(first))]).to_pylist()
        return Stored(idents, first, *own, accumulators.take(pa.array(node))), codes, node

    def _changed(self, node: IntArray, sessions: Stored) -> Mask:
        """Tell which sessions have a new row in WINDOWS."""
        stored = self.found.stored
        changed: Mask = node >= len(stored)
        old = np.flatnonzero(~changed)
        for name in ("since", "unsent", "shown", "count", "digest"):  # what can change without a message
            changed[old] |= getattr(sessions, name)[old] != getattr(stored, name)[node[old]]
        return changed

    def _index_rows(self, sessions: Stored, codes: pa.Array, closed: Mask) -> set[bytes]:
        """Return the rows that find sessions: by last time, and by what waits. The bound takes those below it."""
        live = np.flatnonzero(sessions.last >= self.terms.bound_after)
        found = rows.timed_keys(rows.INDEX, sessions.last[live], codes.take(pa.array(live)), sessions.first[live])
        for tag, mine in ((rows.LATE_WAITS, closed), (rows.EARLY_WAITS, ~closed)):
            at = np.flatnonzero(mine & (sessions.since != NEVER))
            found += rows.timed_keys(tag, sessions.since[at], codes.take(pa.array(at)), sessions.first[at])
        return set(found)

    def _write_sent(self, values: pa.Table) -> IntArray:
        """Write the rows that were sent and still stand; gives the number of them of each session."""
        gathered, events, gone = self.gathered, self.events, self.ends.gone
        owner = gathered.shown_of
        stands = (events.of_final[owner] < 0) & ~gone[owner]
        count: IntArray = np.bincount(owner[stands], minlength=len(gone)).astype(np.int64)
        ends = self.ends.sends[~gone[self.ends.sends]]
        count[ends] = 1
        old, row = events.old, np.concatenate([gathered.shown[stands], events.of_final[ends]])
        withdrawn = np.ones(old, np.bool_)
        withdrawn[row[row < old]] = False
        sent = self.found.sent.keys
        self.execution.work.delete_many([sent[at] for at in np.flatnonzero(withdrawn).tolist()])
        new = row[row >= old]
        new = new[np.lexsort((events.first[new], events.key[new]))]
        keys = keyed(rows.SHOWN, self.found.codes(events.key[new]), pack_fixed(events.first[new]))
        taken = values.take(pa.array(new - old)) if values.num_columns else values
        shown = self.session_rows.encode_shown(events.last[new], events.revision[new], taken)
        self.execution.work.put_many(keys, shown)
        return count

    def _write_messages(self, message_store: MessagesByKey, contents: Contents) -> None:
        """Drop the messages of sessions that go, add those of sessions that stay."""
        execution, work = self.execution, self.execution.work
        _, member = contents.members(self.gathered.nodes, self.gone_nodes())
        old = len(contents.old.owner)
        message_store.drop(execution, contents.old.where(np.unique(member[member < old])))
        stays = np.ones(len(contents.keys), np.bool_)
        stays[member[member >= old] - old] = False
        picked = np.flatnonzero(stays).tolist()
        message_store.put(execution, [contents.keys[at] for at in picked], [contents.values[at] for at in picked])
        execution.replay_from = message_store.replay_from(work, execution.batch.after)
        gone = self.gathered.finals.key[self.ends.gone]
        refused = Refused(execution, self.terms, self.session_rows)
        refused.add(self.found.refused, self.keys)
        execution.rejected += refused.listed(set(self.found.codes(np.unique(gone)).to_pylist()))

    def _note_due(self) -> None:
        work, delays = self.execution.work, self.terms.delays
        waits = [(rows.first_waiting(work, tag), delay) for tag, delay in delays if delay is not None]
        due = (since + delay for since, delay in waits if since is not None)
        self.execution.ledger.due_ms = min(due, default=None)
