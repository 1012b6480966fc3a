"""The message store: an exactly-once view of the messages in retention, for full-state aggregates and joins.

The offset in every key is what makes a replayed or duplicated message the same row (R.4). Layouts that begin with TIME
expire by a bound (R.3). The others have a row in `Region.MESSAGE_INDEX` per message, `time or offset | message key`
with an empty value, so that expiring reads what it evicts and nothing that stays.

All functions work on a `Workspace` (reads also on any `Readable`); ranges are half-open.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import add

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from backend.chunks import taken_rows
from backend.messages.keys import (
    INDEX,
    MESSAGES,
    OFFSET_BYTES,
    TIME_BYTES,
    Clock,
    Codes,
    clock_bytes,
    clock_range,
    message_key_column,
    message_order,
    stamp_fields,
    stamps,
)
from backend.messages.layout import MessageLayout
from backend.rows import RowCodec
from backend.store.layers import increasing
from backend.store.protocol import Region
from backend.store.rows import StoreRows
from backend.store.workspace import Workspace
from backend.windows.columns.arrays import IntArray

Digests = npt.NDArray[np.uint64]


def sorted_rows(keys: Sequence[bytes], values: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Sort rows by key and drop duplicates (the last one stays); cheap when they are sorted already."""
    if increasing(keys):
        return list(keys), list(values)
    return StoreRows.of(keys, values).sorted().lists()


class MessageCodec:
    """What messages are in the store, and given back.

    Args:
        layout: Of their keys.
        fields: The messages' fields to keep, in order.
    """

    def __init__(self, layout: MessageLayout, fields: Iterable[pa.Field]) -> None:
        self.layout, self.codec = layout, RowCodec(pa.schema(list(fields)))
        self.schema = pa.schema([*stamp_fields(layout), *self.codec.schema])
        """`_stream`, `_partition`, `_offset`, `_time` (where the layout has it) and the fields."""

    def select(self, messages: pa.Table) -> pa.Table:
        """Give the columns of `schema` of messages that just arrived."""
        return messages.select(self.schema.names).cast(self.schema)

    def ordered_rows(self, messages: pa.Table, codes: Codes | None = None) -> tuple[StoreRows, IntArray]:
        """Give the rows of messages in order of key, and which message each is of.

        Args:
            messages: In order of (stream, partition, offset); `_time` counts, whether it is in the key or not.
            codes: As for `message_keys`.
        """
        order = message_order(self.layout, messages, codes)
        if (np.diff(order) < 0).any():
            messages, rows = taken_rows(messages, order), pa.array(order)
            codes = {part: code.take(rows) for part, code in (codes or {}).items()}
        keys = message_key_column(self.layout, messages, codes).cast(pa.large_binary())
        return StoreRows(keys, self.codec.encode_column(messages)), order

    def decode(self, keys: Sequence[bytes], values: Sequence[bytes]) -> pa.Table:
        """Give rows of the message store as a table of `schema`, in their order.

        Raises:
            StateCorrupted: A key or value cannot be decoded.
        """
        stamped = [pa.array(column, f.type) for column, f in zip(stamps(self.layout, keys), self.schema, strict=False)]
        return pa.Table.from_arrays([*stamped, *self.codec.decode(values).columns], schema=self.schema)


def expire_messages(work: Workspace, layout: MessageLayout, before: int) -> int:
    """Expire all messages before an event time (R.3), of a layout that has it.

    Time first: raises the region's bound, and the janitor reclaims the space. Otherwise deletes what it evicts, which
    it finds through the index; index rows go by their own bound.

    Args:
        work: The workspace.
        layout: The layout.
        before: Event time, exclusive.

    Returns:
        Rows of messages deleted; -1 when a bound does it and nothing was counted.
    """
    if not layout.indexed:
        work.raise_bound(Region.MESSAGES, MESSAGES + clock_bytes(before))
        return -1
    index, _ = work.scan_arrays(INDEX, INDEX + clock_bytes(before))
    _delete_indexed(work, layout, index)
    work.raise_bound(Region.MESSAGE_INDEX, INDEX + clock_bytes(before))
    return len(index)


def find_messages(work: Workspace, layout: MessageLayout, start: Clock, end: Clock) -> list[bytes]:
    """Give the keys of a range of what messages expire by, as `delete_messages` takes them; arguments as `clock_range`.

    They are those of the index where the layout has one, for that is where such a range lies together.
    """
    return work.scan_arrays(*clock_range(INDEX if layout.indexed else MESSAGES, start, end))[0]


def delete_messages(work: Workspace, layout: MessageLayout, keys: list[bytes]) -> None:
    """Delete messages; `keys` are those of their index rows where the layout has them."""
    work.delete_many(keys)
    if layout.indexed:
        _delete_indexed(work, layout, keys)


def _delete_indexed(work: Workspace, layout: MessageLayout, index: list[bytes]) -> None:
    """Delete the messages of index rows, and leave these."""
    width = TIME_BYTES if layout.timed else OFFSET_BYTES
    work.delete_many(sorted(MESSAGES + row[1 + width :] for row in index))


def digests(keys: Sequence[bytes], values: Sequence[bytes]) -> Digests:
    """Give the digest of each row, xxh3-64 over key and value."""
    return np.fromiter(map(xxhash.xxh3_64_intdigest, map(add, keys, values)), np.uint64, len(keys))


def total(found: Digests) -> int:
    """Add digests up, modulo 2**64."""
    return int(found.sum(dtype=np.uint64))


def digest(keys: Sequence[bytes], values: Sequence[bytes]) -> int:
    """Give the digest of rows: the sum of theirs modulo 2**64.

    It does not depend on the order, and the digest of two disjoint sets is the sum of theirs modulo 2**64.

    >>> rows = [b"a", b"b"], [b"1", b"2"]
    >>> digest(*rows) == (digest([b"b"], [b"2"]) + digest([b"a"], [b"1"])) % 2**64
    True
    """
    return total(digests(keys, values))
