"""The message store of windows that every group key has for itself: `<key>_<offset>`, sessions `<key>_<time>_<offset>`.

SAMZA-552's matrix puts `<session_key>` in front for sessions. Windows by number of messages do the same here, where
the matrix has `<offset>` alone: a window of one key is then one short range, not all keys' messages between its ends.
Without a group key the code is the stream's number, which the offset begins with anyway.

Every message has a row in `Region.MESSAGE_INDEX`, its place (stream, partition, offset; 14 bytes) with an empty value.
The first one of each source partition is where a replay must begin. What is live is told by the window metadata, not by
a bound: a replay brings every message from there on, and `settle` takes out those of windows that are gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa

from backend.batch import SourcePartition
from backend.errors import StateCorrupted
from backend.messages.keys import message_keys, source_bytes
from backend.messages.layout import MessageLayout, Part
from backend.messages.rows import Digests, MessageCodec, digests, sorted_rows, total
from backend.store.protocol import Readable, Region
from backend.store.reads import scan_ranges
from backend.store.rows import StoreRows
from backend.store.workspace import Workspace
from backend.windows.columns.arrays import IntArray
from backend.windows.micro_batch import Execution

PLACE_BYTES = 14
_INDEX = bytes([Region.MESSAGE_INDEX])


class KeyEncoder(Protocol):
    """What knows the codes of messages' group keys."""

    def encode(self, messages: pa.Table) -> tuple[IntArray, pa.Array]:
        """Give for each message the number of its code, and the distinct codes."""


@dataclass(frozen=True, slots=True)
class StoredMessages:
    """Stored messages of several ranges, one range after the other.

    Attributes:
        keys: Full keys, in order of key within a range.
        values: Their values.
        owner: The range of each.
    """

    keys: list[bytes]
    values: list[bytes]
    owner: IntArray

    def where(self, rows: IntArray) -> StoredMessages:
        """Give some of the rows."""
        picked = rows.tolist()
        return StoredMessages([self.keys[at] for at in picked], [self.values[at] for at in picked], self.owner[rows])


class MessagesByKey(MessageCodec):
    """Reads and writes messages by group key.

    Args:
        fields: The messages' fields to keep, in order.
        timed: Whether the event time stands in the key, as for sessions.
    """

    def __init__(self, fields: Sequence[pa.Field], *, timed: bool) -> None:
        parts = (Part.SESSION, Part.TIME, Part.OFFSET) if timed else (Part.SESSION, Part.OFFSET)
        super().__init__(MessageLayout(parts), fields)

    def rows(self, messages: pa.Table, codes: pa.Array) -> tuple[list[bytes], list[bytes]]:
        """Give keys and values of messages, in their order; `codes` is the group key's code of each."""
        return message_keys(self.layout, messages, {Part.SESSION: codes}), self.codec.encode(messages)

    def replay_rows(self, messages: pa.Table, group_keys: KeyEncoder) -> StoreRows:
        """Give the rows of messages and of their index, sorted by key."""
        if not messages.num_rows:
            return StoreRows.of([], [])
        key_of, codes = group_keys.encode(messages)
        keys, values = self.rows(messages, codes.take(pa.array(key_of)))
        index = index_keys(keys)
        return StoreRows.of([*keys, *index], [*values, *[b""] * len(index)]).sorted()

    def put(self, execution: Execution, keys: Sequence[bytes], values: Sequence[bytes]) -> Digests:
        """Store messages and count them; gives the digest of each."""
        execution.work.put_many(*sorted_rows(keys, values))
        execution.work.put_many(places := index_keys(keys), [b""] * len(places))
        found = digests(keys, values)
        execution.ledger.count_stored(len(keys), total(found))
        return found

    def drop(self, execution: Execution, rows: StoredMessages) -> Digests:
        """Take messages out again; gives the digest of each."""
        remove(execution.work, rows.keys)
        found = digests(rows.keys, rows.values)
        execution.ledger.count_stored(-len(found), -total(found))
        return found

    def read(self, state: Readable, ranges: Iterable[tuple[bytes, bytes]]) -> StoredMessages:
        """Read half-open key ranges."""
        keys, values, sizes = scan_ranges(state, ranges)  # one per group key: a wider read would read others
        return StoredMessages(keys, values, np.repeat(np.arange(len(sizes)), sizes))

    def read_counted(
        self, state: Readable, starts: Sequence[bytes], stops: Iterable[bytes], counts: IntArray, what: str
    ) -> StoredMessages:
        """Read half-open key ranges that hold as many messages as the metadata counts.

        Raises:
            StateCorrupted: One holds others.
        """
        found = self.read(state, zip(starts, stops, strict=True))
        sizes = np.bincount(found.owner, minlength=len(starts))
        if (sizes != counts).any():
            wrong = int(np.flatnonzero(sizes != counts)[0])
            raise StateCorrupted(
                f"the messages of a {what} are not those that its metadata says",
                where=starts[wrong].hex(),
                why=f"{sizes[wrong]} messages, {counts[wrong]} expected",
            )
        return found

    def table(self, rows: StoredMessages) -> pa.Table:
        """Give stored messages as a table of `schema`."""
        return self.decode(rows.keys, rows.values)

    def replay_from(self, work: Workspace, partitions: Iterable[SourcePartition]) -> dict[SourcePartition, int]:
        """Give per source partition the smallest offset that is held."""
        found = {}
        for stream, partition in partitions:
            start = _INDEX + source_bytes(stream, partition)
            first = next(iter(work.scan(start + b"\x00" * 8, start + b"\xff" * 9)), None)
            if first is not None:
                found[stream, partition] = int.from_bytes(first[0][-8:], "big") - 2**63
        return found


def index_keys(keys: Sequence[bytes]) -> list[bytes]:
    """Give the index rows' keys of message keys, sorted."""
    return sorted(_INDEX + key[-PLACE_BYTES:] for key in keys)


def remove(work: Workspace, keys: Sequence[bytes]) -> None:
    """Delete messages and their index rows."""
    work.delete_many(keys)
    work.delete_many(index_keys(keys))
