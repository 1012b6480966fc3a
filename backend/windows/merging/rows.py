"""Rows of sessions in the store; a session is `[first, last]` of a group key, event times of its outermost messages.

=============== ========================================== =======================================================
region          key                                        value
=============== ========================================== =======================================================
WINDOWS         group key, first                           `SessionRows.schema`: last, bookkeeping, accumulators
SESSION_INDEX   last, group key, first                     empty; in order of expiry, so one scan finds what closes
REVISIONS       group key, first                           a row that was sent and not withdrawn: last, revision,
                                                           its aggregates, which a retraction repeats
OPERATOR        `E` or `L`, since, group key, first        empty; updates that wait: of open, of closed sessions
OPERATOR        `R`, place                                 event time, group key of a refused message that a session
                                                           covers or may come to cover (see `session_refused`)
=============== ========================================== =======================================================

Rows that were sent keep their own `first`: when sessions merge they stay where they are, inside the merged session's
range, until the merged one is sent and withdraws them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backend.aggregates import IncrementalPlan
from backend.keys import fixed_bytes, pack_fixed, to_rows, unpack_fixed
from backend.messages.keys import TIME_BYTES
from backend.rows import RowCodec
from backend.store.protocol import Readable, Region
from backend.store.reads import get_all
from backend.store.workspace import Workspace
from backend.windows.columns.arrays import IntArray, Order
from backend.windows.columns.grouping import KeySpace
from backend.windows.columns.keyed import keyed
from backend.windows.columns.rows import Rows
from backend.windows.micro_batch import numbers

NEVER = -(2**63)
"""Stands for no batch time: nothing waits."""
LONG_AGO = NEVER + 1
"""Stands for a batch time so long ago that an update that waits since then is due, whatever the policy."""

WINDOWS, INDEX, SHOWN = (bytes([region]) for region in (Region.WINDOWS, Region.SESSION_INDEX, Region.REVISIONS))
EARLY_WAITS, LATE_WAITS, REFUSED = (bytes([Region.OPERATOR]) + tag for tag in (b"E", b"L", b"R"))


@dataclass(frozen=True, slots=True)
class Stored(Rows):
    """Sessions as read; all as long as one another.

    Attributes:
        idents: Group key and first: the key in WINDOWS without its region.
        first: Event time of the first message.
        last: Event time of the last message.
        since: Batch time of the oldest unsent update, or `NEVER`.
        unsent: Messages since the last row, where the early policy counts them.
        shown: Rows in REVISIONS within the session.
        count: Messages in the message store.
        digest: Their digest.
        accumulators: Accumulator columns.
    """

    idents: list[bytes]
    first: IntArray
    last: IntArray
    since: IntArray
    unsent: IntArray
    shown: IntArray
    count: IntArray
    digest: npt.NDArray[np.uint64]
    accumulators: pa.Table

    def before(self, codes: pa.Array, times: IntArray) -> IntArray:
        """Give for each group key and time the newest of these sessions that begins at or before it, -1 for none.

        The sessions must be in order of their idents.
        """
        own, asked = KeySpace([codes_of(self.idents), codes]).numbers
        found = Order(own, self.first).after(asked, times) - 1
        found[np.append(own, -1)[found] != asked] = -1
        return found


class SessionRows:
    """Reads and writes sessions.

    Args:
        plan: The incremental aggregates.
        results: Fields of the aggregates' results.
    """

    def __init__(self, plan: IncrementalPlan, results: Sequence[pa.Field]) -> None:
        self._accumulator = plan.accumulator_schema
        own = [
            pa.field("_last", pa.int64(), nullable=False),
            pa.field("_since", pa.int64()),
            pa.field("_unsent", pa.int64(), nullable=False),
            pa.field("_shown", pa.int32(), nullable=False),
            pa.field("_count", pa.int64(), nullable=False),
            pa.field("_digest", pa.uint64(), nullable=False),
        ]
        self.schema = pa.schema([*own, *self._accumulator])
        self._codec = RowCodec(self.schema)
        sent = [pa.field("_last", pa.int64(), nullable=False), pa.field("_revision", pa.int64(), nullable=False)]
        self.shown_schema = pa.schema([*sent, *results])
        self._shown_codec = RowCodec(self.shown_schema)

    def read(self, state: Readable, idents: list[bytes]) -> Stored:
        """Read sessions; all are there."""
        return self.decode(idents, get_all(state, [WINDOWS + ident for ident in idents], "a session is missing"))

    def decode(self, idents: list[bytes], values: Sequence[bytes]) -> Stored:
        """Give sessions of rows."""
        table = self._codec.decode(values)
        last, unsent, shown, count = (numbers(table, name) for name in ("_last", "_unsent", "_shown", "_count"))
        since = pc.fill_null(table.column("_since"), NEVER).to_numpy()
        digest = table.column("_digest").to_numpy()
        accumulators = table.select(self._accumulator.names)
        return Stored(idents, firsts_of(idents), last, since, unsent, shown, count, digest, accumulators)

    def put(self, work: Workspace, sessions: Stored) -> None:
        """Write rows in WINDOWS; fastest in order of group key and first."""
        since = pa.array(sessions.since, mask=sessions.since == NEVER)
        shown = sessions.shown.astype(np.int32)
        own = [sessions.last, since, sessions.unsent, shown, sessions.count, sessions.digest]
        table = pa.table([*map(pa.array, own), *sessions.accumulators.columns], schema=self.schema)
        work.put_many([WINDOWS + ident for ident in sessions.idents], self._codec.encode(table))

    def encode_shown(self, last: IntArray, revision: IntArray, values: pa.Table) -> list[bytes]:
        """Give the values of rows that were sent."""
        table = pa.table([pa.array(last), pa.array(revision), *values.columns], schema=self.shown_schema)
        return self._shown_codec.encode(table)

    def decode_shown(self, values: Sequence[bytes]) -> pa.Table:
        """Give rows that were sent, as `shown_schema`."""
        return self._shown_codec.decode(values)


def firsts_of(idents: Sequence[bytes]) -> IntArray:
    """Give the first times in idents."""
    firsts: IntArray = unpack_fixed(to_rows([ident[-TIME_BYTES:] for ident in idents], TIME_BYTES), np.int64)
    return firsts


def codes_of(idents: Sequence[bytes]) -> pa.Array:
    """Give the group keys in idents."""
    return pa.array([ident[:-TIME_BYTES] for ident in idents], pa.binary())


def key_range(head: bytes, ident: bytes, last: int) -> tuple[bytes, bytes]:
    """Give the half-open range of keys that lie within a session, of a region whose keys go on with group key, time."""
    return head + ident, head + ident[:-TIME_BYTES] + fixed_bytes(last + 1)


def timed_keys(head: bytes, at: IntArray, codes: pa.Array, first: IntArray | None = None) -> list[bytes]:
    """Build keys `head`, a time or number, the group key, and maybe the first time: index rows, updates that wait."""
    return keyed(head, pack_fixed(at), codes, *([] if first is None else [pack_fixed(first)]))


def index_start(last: int) -> bytes:
    """Give the first index key of sessions that end at or after a time."""
    return INDEX + fixed_bytes(max(last, -(2**63)))


def index_bound(state: Workspace) -> int | None:
    """Return the last time before which sessions are gone, as the commit says; None before the first bound."""
    bound = state.bounds.get(Region.SESSION_INDEX)
    return None if bound is None else int.from_bytes(bound[1 : 1 + TIME_BYTES], "big") - 2**63


def scan_index(state: Readable, start: int | None, end: int | None) -> list[bytes]:
    """Give the idents of sessions whose last time is in `[start, end)`; None is without a bound."""
    low = INDEX if start is None else index_start(start)
    high = bytes([INDEX[0] + 1]) if end is None else index_start(end)
    return [key[1 + TIME_BYTES :] for key in state.scan_arrays(low, high)[0]] if low < high else []


def scan_waiting(state: Readable, tag: bytes, until: int | None) -> list[bytes]:
    """Give the idents of updates that wait since `until` or longer; None is all."""
    end = tag[:1] + bytes([tag[1] + 1]) if until is None else tag + fixed_bytes(until + 1)
    return [key[2 + TIME_BYTES :] for key in state.scan_arrays(tag, end)[0]]


def first_waiting(state: Readable, tag: bytes) -> int | None:
    """Give since when the oldest update waits, None when none does."""
    key = next((key for key, _ in state.scan(tag, tag[:1] + bytes([tag[1] + 1]))), None)
    return None if key is None else int.from_bytes(key[2 : 2 + TIME_BYTES], "big") - 2**63
