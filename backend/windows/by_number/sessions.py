"""Sessions by number of messages: one ends when a number of messages in a row came without its key (SAMZA-552).

The messages of a stream are numbered as they come to the shard. A session of a group key is open until `size` messages
of its stream came since its last one, and is full with the last of these; the next message of its key opens another. So
there is one open session per group key, nothing comes late, and what is full leaves nothing behind. So no more than
`size` sessions of a stream are open. With a retention by time one falls out, sent as `early` and never to be full, when
the newest event time of its messages and the retention are at or before stream time: backend.windows.by_number.runs has
the rule.

A session that has grown since it was sent is another window, as by event time: the row that was sent is withdrawn
(reason `retracted`: the same first and last message, revision and values) before the new one.

=============== ============================ =====================================================================
region          key                          value
=============== ============================ =====================================================================
OPERATOR        `P`, stream                  number of the next message
OPERATOR        `E`, since, group key        empty; an update that waits for the early policy
REVISIONS       group key                    the row that was sent of the open session: last message, aggregates
WINDOWS         group key                    first and last message, number of the last one, partial aggregates
SESSION_INDEX   stream, number of the last   the group key, in order of ending
MESSAGES        group key, offset            the fields (full-state aggregates only)
=============== ============================ =====================================================================

The group key's code begins with the stream's number. Sessions are found by distances between neighbouring numbers of a
group key, all at once: no row is looked at alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa

from backend.batch import Proof
from backend.keys import prefix_end
from backend.messages.key_first import PLACE_BYTES, MessagesByKey, remove
from backend.rows import RowCodec
from backend.store.rows import StoreRows
from backend.store.workspace import Workspace
from backend.windows.by_number.rows import EDGE_FIELDS, LAST_FIELDS, MESSAGES
from backend.windows.by_number.session_step import TupleSessionStep
from backend.windows.columns.arrays import IntArray
from backend.windows.columns.keyed import WindowKeys
from backend.windows.merging.rows import WINDOWS
from backend.windows.micro_batch import Execution, numbers
from backend.windows.spec import WindowSpec

_OWN = [
    pa.field("_last", pa.int64(), nullable=False),
    *EDGE_FIELDS,
    pa.field("_next", pa.int64(), nullable=False),  # revision of the next row, if the session does not grow
    pa.field("_since", pa.int64()),  # batch time of the oldest unsent update
    pa.field("_unsent", pa.int64(), nullable=False),  # messages since the last row, where the early policy counts them
    pa.field("_count", pa.int64(), nullable=False),
    pa.field("_digest", pa.uint64(), nullable=False),
    pa.field("_starts", pa.binary()),  # place of the first message of each source partition
    pa.field("_newest", pa.int64(), nullable=False),  # newest event time
]


class TupleSessions:
    """The kind for sessions by number of messages.

    Args:
        spec: Its window is one.

    Raises:
        ValueError: There is no group key.
    """

    def __init__(self, spec: WindowSpec) -> None:
        if not spec.keys:
            raise ValueError(
                "keys=(): a session by number of messages ends by messages without its key: give a group key"
            )
        self.spec, self.size = spec, spec.window.size
        self.incremental, self.full = spec.plans()
        self.keys = WindowKeys(spec.key_fields, per_stream=True)
        self.schema = pa.schema([*_OWN, *self.incremental.accumulator_schema])
        self.codec = RowCodec(self.schema)
        fields = [spec.schema.field(name) for name in spec.input_fields()]
        self.message_store = MessagesByKey(fields, timed=False) if spec.full else None
        self.result_schema = spec.result_schema()
        sent = [self.result_schema.field(name) for name in spec.aggregates]
        self.shown_schema = pa.schema([*LAST_FIELDS, *sent])
        self.shown_codec = RowCodec(self.shown_schema)

    def fold(self, execution: Execution) -> None:
        """Take one micro-batch."""
        TupleSessionStep(self, execution).run()
        if self.message_store is not None:
            execution.replay_from = self.message_store.replay_from(execution.work, execution.batch.after)

    def count_open(self, work: Workspace, clock: int) -> int:
        """Count the open sessions of all group keys: those that are there; no clock closes one."""
        return len(work.scan_arrays(WINDOWS, prefix_end(WINDOWS))[0])

    def replay_rows(self, messages: pa.Table) -> StoreRows:
        """Give the message-store rows of messages, sorted by key; `settle` takes out those of ended sessions."""
        if self.message_store is None:
            return StoreRows.of([], [])
        return self.message_store.replay_rows(messages, self.keys)

    def settle(self, work: Workspace) -> None:
        """Leave of replayed messages those at or after the beginning of their group key's session."""
        if self.message_store is None:
            return
        keys, values = work.scan_arrays(WINDOWS, prefix_end(WINDOWS))
        begins: dict[bytes, bytes] = {}
        for key, starts in zip(keys, self.decode(values).column("_starts").to_pylist(), strict=True):
            for at in range(0, len(starts), PLACE_BYTES):
                place = starts[at : at + PLACE_BYTES]
                begins[key[1:] + place[:-8]] = place
        found, _ = work.scan_arrays(MESSAGES, prefix_end(MESSAGES))
        remove(work, [key for key in found if key[-PLACE_BYTES:] < begins.get(key[1:-8], b"\xff")])

    def proofs(self, work: Workspace) -> Iterable[Proof]:
        """Give what the message store must hold, session by session."""
        if self.message_store is None:
            return
        keys, values = work.scan_arrays(WINDOWS, prefix_end(WINDOWS))
        table = self.decode(values).select(["_count", "_digest"])
        for key, row in zip(keys, table.to_pylist(), strict=True):
            start = MESSAGES + key[1:]
            label = f"open session of group key {key[1:].hex()}"
            yield Proof(label, start, prefix_end(start) or b"\xff", row["_count"], row["_digest"])

    def stored_runs(self, work: Workspace) -> tuple[pa.Array, IntArray, IntArray]:
        """Give all open sessions: group keys, number of their newest message, newest event time."""
        keys, values = work.scan_arrays(WINDOWS, prefix_end(WINDOWS))
        table = self.decode(values)
        return pa.array([key[1:] for key in keys], pa.binary()), numbers(table, "_last"), numbers(table, "_newest")

    def decode(self, values: Sequence[bytes]) -> pa.Table:
        """Give open sessions of their rows."""
        return self.codec.decode(values) if values else self.schema.empty_table()
