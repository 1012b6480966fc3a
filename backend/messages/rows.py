"""The message store: an exactly-once view of the messages in retention, for full-state aggregates and joins.

The offset in every key is what makes a replayed or duplicated message the same row (R.4). Layouts that begin with TIME
expire by a bound (R.3). The others have a row in `Region.MESSAGE_INDEX` per message, `time or offset | message key`
with an empty value, so that expiring reads what it evicts and nothing that stays.

All functions work on a `Workspace` (reads also on any `Readable`); ranges are half-open.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from operator import add, lt
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from backend.batch import OFFSET, PARTITION, STREAM, TIME
from backend.errors import KeyInvalid, StateCorrupted
from backend.messages.keys import (
    INDEX,
    MESSAGES,
    OFFSET_BYTES,
    TIME_BYTES,
    clock_bytes,
    clock_range,
    index_keys,
    message_keys,
    message_order,
    message_range,
    stamp_fields,
    stamps,
    time_starts,
)
from backend.messages.layout import MessageLayout, Part
from backend.rows import RowCodec
from backend.staging import VERIFY
from backend.store import Readable, Region
from backend.workspace import Workspace

_MASK = 2**64 - 1


def sorted_rows(keys: Sequence[bytes], values: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Sort rows by key and drop duplicates (the last one stays); cheap when they are sorted already."""
    if all(map(lt, keys, islice(keys, 1, None))):
        return list(keys), list(values)
    rows = dict(zip(keys, values, strict=True))
    ordered = sorted(rows)
    return ordered, list(map(rows.__getitem__, ordered))


def message_rows(
    layout: MessageLayout,
    codec: RowCodec,
    messages: pa.Table,
    *,
    equal: pa.BinaryArray | None = None,
    session: pa.BinaryArray | None = None,
) -> tuple[list[bytes], list[bytes]]:
    """Give all rows that storing messages writes, index rows included, sorted: `add_messages` and a replay write these.

    Arguments as for `message_keys`; `codec` says which fields are stored.
    """
    order = message_order(layout, messages, equal=equal, session=session)
    if (np.diff(order) < 0).any():
        messages = messages.take(order)
        equal, session = _taken(order, equal=equal, session=session).values()
    keys, values = message_keys(layout, messages, equal=equal, session=session), codec.encode(messages)
    index: list[bytes] = []
    if layout.indexed:
        names = [TIME] if layout.timed else [OFFSET, PARTITION, STREAM]  # messages are in order of key: ties stay so
        order = np.lexsort([messages.column(name).to_numpy() for name in names])
        index = index_keys(layout, messages.take(order), **_taken(order, equal=equal, session=session))
        index, _ = sorted_rows(index, index)
    keys, values = sorted_rows(keys, values)
    return keys + index, values + [b""] * len(index)


def _taken(order: npt.NDArray[np.int64], **codes: pa.BinaryArray | None) -> dict[str, pa.BinaryArray | None]:
    return {name: None if column is None else column.take(order) for name, column in codes.items()}


def add_messages(
    work: Workspace,
    layout: MessageLayout,
    codec: RowCodec,
    messages: pa.Table,
    *,
    equal: pa.BinaryArray | None = None,
    session: pa.BinaryArray | None = None,
) -> tuple[list[bytes], list[bytes]]:
    """Store messages; one that is there already stays one row (R.4). Gives the rows written, for `digest`.

    Raises:
        BoundViolated: A message is below what is expired already; nothing is stored.
    """
    keys, values = message_rows(layout, codec, messages, equal=equal, session=session)
    work.put_many(keys, values)
    return keys, values


def read_messages(
    store: Readable,
    layout: MessageLayout,
    codec: RowCodec,
    start: int | tuple[int, int, int] | None = None,
    end: int | tuple[int, int, int] | None = None,
    *,
    equal: bytes | None = None,
    session: bytes | None = None,
) -> pa.Table:
    """Read the messages of a window, of all windows, per equal fields, per session key (R.1, R.2).

    Arguments as for `message_range`. A window over a layout that begins with a key, or two, is found through the index
    where the key was not given; equal fields behind the time are compared row by row.

    Returns:
        `_stream`, `_partition`, `_offset`, `_time` (where the layout has it) and the codec's fields, in key order.

    Raises:
        StateCorrupted: A row cannot be decoded, or an index row has no message.
        KeyInvalid: A later key was given without an earlier one, or one that the layout does not have.
    """
    bounded = start is not None or end is not None
    codes = {Part.SESSION: session, Part.EQUAL: equal}
    leading = [codes[part] for part in layout.parts[: layout.parts.index(layout.clock)]]
    if bounded and leading and leading[-1] is None:
        prefix, _ = message_range(layout, None, None, equal=equal, session=session)
        keys, values = _read_indexed(store, start, end, prefix)
    else:
        keys, values = store.scan_arrays(*message_range(layout, start, end, equal=equal, session=session))
    if equal is not None and layout.timed and layout.parts.index(Part.EQUAL) > layout.parts.index(Part.TIME):
        keys, values = _with_equal(layout, keys, values, equal)
    return decode_messages(layout, codec, keys, values)


def _read_indexed(
    store: Readable, start: int | tuple[int, int, int] | None, end: int | tuple[int, int, int] | None, prefix: bytes
) -> tuple[list[bytes], list[bytes]]:
    width = OFFSET_BYTES if isinstance(end if start is None else start, tuple) else TIME_BYTES
    index, _ = store.scan_arrays(*clock_range(INDEX, start, end))
    keys = sorted(key for row in index if (key := MESSAGES + row[1 + width :]).startswith(prefix))
    values = store.get_many(keys)
    if None in values:
        raise StateCorrupted(
            "an index row has no message", where=keys[values.index(None)].hex(), why="message missing", command=VERIFY
        )
    return keys, values  # type: ignore[return-value]


def _with_equal(
    layout: MessageLayout, keys: list[bytes], values: list[bytes], equal: bytes
) -> tuple[list[bytes], list[bytes]]:
    starts = time_starts(layout, keys)
    kept = [at for at, (key, start) in enumerate(zip(keys, starts, strict=True)) if key.startswith(equal, start + 8)]
    return [keys[at] for at in kept], [values[at] for at in kept]


def decode_messages(layout: MessageLayout, codec: RowCodec, keys: Sequence[bytes], values: Sequence[bytes]) -> pa.Table:
    """Give rows of the message store as a table: `read_messages` says which columns.

    Raises:
        StateCorrupted: A key or value cannot be decoded.
    """
    found = list(stamps(layout, keys).values())
    fields = codec.decode(values)
    return pa.Table.from_arrays([*found, *fields.columns], schema=pa.schema([*stamp_fields(layout), *codec.schema]))


def expire_messages(work: Workspace, layout: MessageLayout, before: int | tuple[int, int, int]) -> int:
    """Expire all messages before an event time, or of one source partition before an offset (R.3).

    Time first: raises the region's bound, and the janitor reclaims the space. Otherwise deletes what it evicts, which
    it finds through the index or, for `<offset>`, in the range itself; index rows by time go by their own bound.

    Args:
        work: The workspace.
        layout: The layout.
        before: Event time, exclusive; for layouts without time (stream, partition, offset), exclusive, which says
            nothing of other source partitions.

    Returns:
        Rows of messages deleted; -1 when a bound does it and nothing was counted.

    Raises:
        KeyInvalid: A time was given to a layout without time, or the reverse.
    """
    if isinstance(before, int) != layout.timed:
        raise KeyInvalid(f"messages of layout {layout.name} expire by {'time' if layout.timed else 'offset'}")
    if layout.timed and not layout.indexed:
        work.raise_bound(Region.MESSAGES, MESSAGES + clock_bytes(before))
        return -1
    if not layout.indexed:
        evicted, _ = work.scan_arrays(MESSAGES + _partition_start(before), MESSAGES + clock_bytes(before))
        work.delete_many(evicted)
        return len(evicted)
    start = INDEX if layout.timed else INDEX + _partition_start(before)
    index, _ = work.scan_arrays(start, INDEX + clock_bytes(before))
    width = TIME_BYTES if layout.timed else OFFSET_BYTES
    work.delete_many(sorted(MESSAGES + row[1 + width :] for row in index))
    if layout.timed:
        work.raise_bound(Region.MESSAGE_INDEX, INDEX + clock_bytes(before))
    else:
        work.delete_many(index)
    return len(index)


def _partition_start(at: Any) -> bytes:
    return clock_bytes(at)[: OFFSET_BYTES - 8]


def digest(keys: Sequence[bytes], values: Sequence[bytes]) -> int:
    """Give the digest of rows: the sum modulo 2**64 of xxh3-64 over key and value.

    It does not depend on the order, and the digest of two disjoint sets is the sum of theirs modulo 2**64.

    >>> rows = [b"a", b"b"], [b"1", b"2"]
    >>> digest(*rows) == (digest([b"b"], [b"2"]) + digest([b"a"], [b"1"])) % 2**64
    True
    """
    return sum(map(xxhash.xxh3_64_intdigest, map(add, keys, values))) & _MASK
