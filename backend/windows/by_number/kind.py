"""Windows by number of messages: tumbling, hopping, sliding and sessions, counted per group key, or per stream.

The messages of a group key are numbered 0, 1, 2, ... as they come. Window k holds the numbers `[k * step, k * step +
size)` and is full with its last message; nothing comes late, because offsets come in order. A sliding window ends at
every message and holds it and the `size - 1` before it (the first ones fewer). Results carry the offsets of the first
and the last message; the bounds in time are null.

Nothing is kept of a full window. Without a retention an open window is kept until it is full, also of a group key that
went silent for ever. With one the group key falls out (backend.windows.by_number.falling has the rule): its open
windows are sent as `early` (without full results only what waits for the early policy), then they go, and with them
messages, panes, revisions and the counter. Should the key come back, it begins anew: the next window starts with its
next message.

A session ends when a number of messages in a row came without its key (SAMZA-552). It is all of a run: a window that no
number of its own fills, but that is full when its key falls out by number (backend.windows.by_number.falling). All else
of above is said of it, too. A session that has grown since it was sent is another window, as by event time: the row
that was sent is withdrawn (reason `retracted`: the same first and last message, revision and values) before the new
one.

State is kept once per *pane* of gcd(size, step) messages and only while an open window needs it:

====================== ============================== =========================================================
region                 key                            value
====================== ============================== =========================================================
OPERATOR               `n`, group key                 next number; live messages, their digest and source; newest one
OPERATOR               `m`, group key                 places of the live messages by number, if of several sources; of a
                                                      session the number of them of each source
OPERATOR               `s`, group key                 the row that was sent of an open session: last message, aggregates
WINDOWS                group key, pane                first and last message, accumulators
REVISIONS              group key, window              next revision, pending since (early or drained windows only)
OPERATOR               `E`, since, group key, window  empty; an update that waits for the early policy
MESSAGES               group key, offset              the fields (full-state aggregates only)
OPERATOR               `N`, `T`, ...                  what falls out next (backend.windows.by_number.falling)
====================== ============================== =========================================================

SAMZA-552 keys the metadata by `start_offset`. Here several group keys have windows at the same time, and offsets of
several source partitions have no order, so the key is the group key and the number; where the pane begins and ends is
in the value.

Everything is an array operation over ranks within a group key: no row is looked at alone. A micro-batch therefore does
exactly what its messages one by one would, and cuts change neither results nor state.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd

import numpy as np
import pyarrow as pa

from backend.batch import Proof
from backend.keys import prefix_end
from backend.messages.key_first import PLACE_BYTES, MessagesByKey, remove
from backend.messages.keys import source_bytes
from backend.rows import RowCodec
from backend.store.protocol import Region
from backend.store.rows import StoreRows
from backend.store.workspace import Workspace
from backend.windows.by_number.rows import (
    EDGE_FIELDS,
    LAST_FIELDS,
    MESSAGES,
    PLACES,
    all_counters,
    newest,
    split_places,
    unpack_counts,
)
from backend.windows.by_number.step import TupleStep
from backend.windows.columns.arrays import IntArray
from backend.windows.columns.keyed import WindowKeys
from backend.windows.micro_batch import Execution
from backend.windows.spec import WindowSpec

ENDLESS = 2**62
"""Messages of a window that no number of them fills."""


class Tuples:
    """The kind for windows by number of messages.

    Args:
        spec: Its window is one.

    Raises:
        ValueError: The windows are sessions, and there is no group key.
    """

    def __init__(self, spec: WindowSpec) -> None:
        self.spec, window = spec, spec.window
        self.session, self.sliding = (window.kind == kind for kind in ("session", "sliding"))
        if self.session and not spec.keys:
            raise ValueError(
                "keys=(): a session by number of messages ends by messages without its key: give a group key"
            )
        self.size, self.step = (ENDLESS, ENDLESS) if self.session else (window.size, window.step or 1)
        self.most = window.size if self.session else spec.retention_messages
        """How many messages may come without a group key until it falls out; None is without limit."""
        self.pane = gcd(self.size, self.step)
        self.lowest = 1 - self.size if self.sliding else 0
        self.incremental, self.full = spec.plans()
        self.keys = WindowKeys(spec.key_fields, per_stream=self.session)
        self.pane_schema = pa.schema([*EDGE_FIELDS, *self.incremental.accumulator_schema])
        self.codec = RowCodec(self.pane_schema)
        fields = [spec.schema.field(name) for name in spec.input_fields()]
        self.message_store = MessagesByKey(fields, timed=False) if spec.full else None
        self.result_schema = spec.result_schema()
        self.sent_schema = pa.schema([*LAST_FIELDS, *(self.result_schema.field(name) for name in spec.aggregates)])
        self.sent_codec = RowCodec(self.sent_schema)

    def fold(self, execution: Execution) -> None:
        """Take one micro-batch."""
        TupleStep(self, execution).run()
        if self.message_store is not None:
            execution.replay_from = self.message_store.replay_from(execution.work, execution.batch.after)

    def open_of(self, following: IntArray) -> IntArray:
        """Give how many windows have a message and are not full, per run of which this is the next number.

        Of sliding windows none: each is full with the message that it begins with.
        """
        if self.sliding:
            return np.zeros_like(following)
        return (following - 1) // self.step - np.maximum((following - self.size) // self.step, -1)

    def count_open(self, work: Workspace, clock: int) -> int:
        """Count the open windows of all group keys, by their counters; no clock closes one."""
        return int(self.open_of(all_counters(work)[1]["next"].astype(np.int64)).sum())

    def replay_rows(self, messages: pa.Table) -> StoreRows:
        """Give the message-store rows of messages, sorted by key; `settle` takes out those of windows that are gone."""
        if self.message_store is None:
            return StoreRows.of([], [])
        return self.message_store.replay_rows(messages, self.keys)

    def settle(self, work: Workspace) -> None:
        """Leave of replayed messages, per group key, the newest ones of its source partition: as many as counted."""
        if self.message_store is None:
            return
        counters = {key[2:]: row for key, row in zip(*all_counters(work), strict=True)}
        listed = dict(zip(*work.scan_arrays(PLACES, prefix_end(PLACES)), strict=True))
        found: dict[bytes, list[bytes]] = {}
        for key, _ in work.scan(MESSAGES, bytes([Region.MESSAGES + 1])):
            found.setdefault(key[1:-PLACE_BYTES], []).append(key)
        for code, keys in found.items():
            places, row = listed.get(PLACES + code), counters.get(code)
            if places is not None and not self.session:
                wanted = set(split_places(places))
            elif row is None:
                wanted = set()
            else:
                first = {source_bytes(int(row["stream"]), int(row["partition"])): int(row["live"])}
                counts = first if places is None else unpack_counts(places)
                wanted = newest([key[-PLACE_BYTES:] for key in keys], counts)
            remove(work, [key for key in keys if key[-PLACE_BYTES:] not in wanted])

    def proofs(self, work: Workspace) -> Iterable[Proof]:
        """Give what the message store must hold, group key by group key."""
        if self.message_store is None:
            return
        for key, row in zip(*all_counters(work), strict=True):
            start = MESSAGES + key[2:]
            label = f"open windows of group key {key[2:].hex()}"
            yield Proof(label, start, prefix_end(start) or b"\xff", int(row["live"]), int(row["digest"]))
