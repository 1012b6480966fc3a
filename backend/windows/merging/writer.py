"""What a micro-batch leaves of sessions in the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backend.batch import NO_TIME
from backend.keys import pack_fixed
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


class SessionWriter:
    """Writes the sessions of one micro-batch.

    Args:
        execution: The micro-batch.
        terms: What sessions go by.
        found: What was there.
        gathered: What is there now.
        ends: What goes, what waits.
        events: What is sent.
        keys: Encodes the group key.
    """

    def __init__(
        self,
        execution: Execution,
        terms: Terms,
        found: Found,
        gathered: Gathered,
        ends: Ends,
        events: Events,
        keys: GroupKeys,
    ) -> None:
        self._execution, self._work, self._terms, self._keys = execution, execution.work, terms, keys
        self._found, self._gathered, self._ends, self._events = found, gathered, ends, events
        # in order of key, as the store likes it; group keys are numbered in the order of their codes
        remaining = np.flatnonzero(~ends.gone)
        finals = gathered.finals
        self._remaining = remaining[np.lexsort((finals.first[remaining], finals.key[remaining]))]

    def gone_nodes(self) -> IntArray:
        """Give the nodes of sessions that are out of retention."""
        return self._gathered.finals.node[self._ends.gone]

    def write(
        self,
        session_rows: SessionRows,
        accumulators: pa.Table,
        values: pa.Table,
        message_store: MessagesByKey | None,
        contents: Contents | None,
    ) -> None:
        """Write everything.

        Args:
            session_rows: Knows the bytes.
            accumulators: Per node.
            values: Per event.
            message_store: The message store, if there is one.
            contents: Messages, with a message store.
        """
        finals, remaining = self._gathered.finals, self._remaining
        node, codes = finals.node[remaining], self._found.codes(finals.key[remaining])
        count, digest = np.zeros(len(remaining), np.int64), np.zeros(len(remaining), np.uint64)
        if contents is not None:
            nodes, stored = self._gathered.nodes, self._found.stored
            count = nodes.sums(stored.count, np.ones(len(contents.keys), np.int64))[node]
            digest = nodes.sums(stored.digest, contents.digests)[node]
        first, last, since = finals.first[remaining], finals.last[remaining], self._ends.since[remaining]
        shown = self._write_sent(session_rows, values)[remaining]
        unsent = self._ends.unsent[remaining]
        read = [rows.WINDOWS + ident for ident in self._found.stored.idents]
        stays = {*keyed(rows.WINDOWS, codes, pack_fixed(first))}
        self._execution.metrics["opened"] += len(stays.difference(read))
        # what closes was found, and what was not found stays as it was
        past = last + self._terms.gap + 1 <= self._terms.clock_after
        self._execution.add_open(int((~past).sum()) - int(self._found.is_open.sum()))
        self._work.delete_many([key for key in read if key not in stays])
        columns: tuple[npt.NDArray[Any], ...] = (since, unsent, shown, count, digest)
        new = self._changed(node, columns)
        changed = accumulators.take(pa.array(node[new]))
        picked = since[new], unsent[new], shown[new], count[new], digest[new]
        sessions = Stored([], first[new], last[new], *picked, changed)
        session_rows.put(self._work, codes.filter(pa.array(new)), sessions)
        self._write_index(codes, first, last)
        self._write_waiting(codes, first, since, past)
        total = int.from_bytes(self._work.get(TOTAL) or b"", "big") + len(remaining) - len(self._found.stored)
        self._work.put(TOTAL, total.to_bytes(8, "big"))
        if self._execution.clock_after != NO_TIME:
            self._work.raise_bound(Region.SESSION_INDEX, rows.index_start(self._terms.bound_after))
        if message_store is not None and contents is not None:
            self._write_messages(session_rows, message_store, contents)
        self._note_due()
        self._execution.ledger.counted += len(self._found.time)

    def _changed(self, node: IntArray, columns: Sequence[npt.NDArray[Any]]) -> Mask:
        """Tell which sessions have a new row in WINDOWS; `columns` are what can change without a message."""
        stored = self._found.stored
        read = (stored.since, stored.unsent, stored.shown, stored.count, stored.digest)
        changed: Mask = node >= len(stored)  # all others are as they were, but for `columns`
        old = np.flatnonzero(~changed)
        for column, before in zip(columns, read, strict=True):
            changed[old] |= column[old] != before[node[old]]
        return changed

    def _write_index(self, codes: pa.Array, first: IntArray, last: IntArray) -> None:
        """Write the index rows; those below the bound go with it."""
        stored = self._found.stored
        live = np.flatnonzero(stored.last >= self._terms.bound_after)
        here = self._found.codes(self._found.stored_key[live])
        old = rows.timed_keys(rows.INDEX, stored.last[live], here, stored.first[live])
        self._work.replace_keys(set(old), set(rows.timed_keys(rows.INDEX, last, codes, first)))

    def _write_waiting(self, codes: pa.Array, first: IntArray, since: IntArray, past: Mask) -> None:
        stored, is_open = self._found.stored, self._found.is_open
        for tag, was_mine, mine in ((rows.LATE_WAITS, ~is_open, past), (rows.EARLY_WAITS, is_open, ~past)):
            waited = np.flatnonzero(was_mine & (stored.since != NEVER))
            here = self._found.codes(self._found.stored_key[waited])
            old = rows.timed_keys(tag, stored.since[waited], here, stored.first[waited])
            waits = np.flatnonzero(mine & (since != NEVER))
            self._work.replace_keys(
                set(old), set(rows.timed_keys(tag, since[waits], codes.take(pa.array(waits)), first[waits]))
            )

    def _write_sent(self, session_rows: SessionRows, values: pa.Table) -> IntArray:
        """Write the rows that were sent and still stand; gives the number of them of each session."""
        gathered, events, gone = self._gathered, self._events, self._ends.gone
        owner, shown = gathered.shown_of, gathered.shown
        stands = (events.of_final[owner] < 0) & ~gone[owner]
        count: IntArray = np.bincount(owner[stands], minlength=len(gone)).astype(np.int64)
        ends = self._ends.sends[~gone[self._ends.sends]]
        count[ends] = 1
        row, old, idents = np.concatenate([shown[stands], events.of_final[ends]]), events.old, self._found.sent.idents
        withdrawn = np.ones(old, np.bool_)
        withdrawn[row[row < old]] = False
        self._work.delete_many([rows.SHOWN + idents[at] for at in np.flatnonzero(withdrawn).tolist()])
        new = row[row >= old]
        new = new[np.lexsort((events.first[new], events.key[new]))]
        keys = keyed(rows.SHOWN, self._found.codes(events.key[new]), pack_fixed(events.first[new]))
        taken = values.take(pa.array(new - old)) if values.num_columns else values
        self._work.put_many(keys, session_rows.encode_shown(events.last[new], events.revision[new], taken))
        return count

    def _write_messages(self, session_rows: SessionRows, message_store: MessagesByKey, contents: Contents) -> None:
        """Drop the messages of sessions that go, add those of sessions that stay."""
        execution, work = self._execution, self._work
        _, member = contents.members(self._gathered.nodes, self.gone_nodes())
        old = len(contents.old.owner)
        message_store.drop(execution, contents.old.where(np.unique(member[member < old])))
        stays = np.ones(len(contents.keys), np.bool_)
        stays[member[member >= old] - old] = False
        picked = np.flatnonzero(stays).tolist()
        message_store.put(execution, [contents.keys[at] for at in picked], [contents.values[at] for at in picked])
        execution.replay_from = message_store.replay_from(work, execution.batch.after)
        gone = self._gathered.finals.key[self._ends.gone]
        refused = Refused(execution, self._terms, session_rows)
        refused.add(self._found.refused, self._keys)
        execution.rejected += refused.listed(set(self._found.codes(np.unique(gone)).to_pylist()))

    def _note_due(self) -> None:
        due = []
        policies = self._terms.policies
        for tag, delay in ((rows.LATE_WAITS, policies.late_ms), (rows.EARLY_WAITS, policies.early_ms)):
            since = rows.first_waiting(self._work, tag) if delay is not None else None
            if since is not None and delay is not None:
                due.append(since + delay)
        self._execution.ledger.due_ms = min(due, default=None)
