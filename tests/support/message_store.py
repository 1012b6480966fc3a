"""A message store by itself, for tests: it writes and reads messages with the keys and ranges that operators use."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backend.batch import OFFSET, PARTITION, STREAM, TIME
from backend.errors import KeyInvalid, StateCorrupted
from backend.keys import code_end
from backend.messages.keys import (
    INDEX,
    MESSAGES,
    OFFSET_BYTES,
    TIME_BYTES,
    Codes,
    clock_range,
    index_keys,
    message_keys,
    message_order,
    stamp_fields,
    stamps,
)
from backend.messages.layout import MessageLayout, Part
from backend.messages.rows import delete_messages, expire_messages, find_messages, sorted_rows
from backend.rows import RowCodec
from backend.store.protocol import Readable
from backend.store.workspace import Workspace


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
    given = {Part.EQUAL: equal, Part.SESSION: session}
    codes = {part: code for part, code in given.items() if code is not None}
    order = message_order(layout, messages, codes)
    if (np.diff(order) < 0).any():
        messages, codes = messages.take(order), _taken(order, codes)
    keys, values = message_keys(layout, messages, codes), codec.encode(messages)
    index: list[bytes] = []
    if layout.indexed:
        names = [TIME] if layout.timed else [OFFSET, PARTITION, STREAM]  # messages are in order of key: ties stay so
        order = np.lexsort([messages.column(name).to_numpy() for name in names])
        index = index_keys(layout, messages.take(order), _taken(order, codes))
        index, _ = sorted_rows(index, index)
    keys, values = sorted_rows(keys, values)
    return keys + index, values + [b""] * len(index)


def _taken(order: npt.NDArray[np.int64], codes: Codes) -> Codes:
    return {part: code.take(order) for part, code in codes.items()}


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


def expire_before(work: Workspace, layout: MessageLayout, before: int | tuple[int, int, int]) -> int:
    """Expire messages before an event time, or of one source partition before an offset; gives how many, -1 unknown."""
    if isinstance(before, int):
        return expire_messages(work, layout, before)
    keys = find_messages(work, layout, (*before[:2], -(2**63)), before)
    delete_messages(work, layout, keys)
    return len(keys)


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

    A window over a layout that begins with a key, or two, is found through the index where the key was not given; equal
    fields behind the time are compared row by row.

    Args:
        store: Where.
        layout: The layout.
        codec: Says which fields are stored.
        start: Event time, or (stream, partition, offset) for layouts without time; None from the first on.
        end: As `start`, exclusive; None to the last.
        equal: Code of the equal fields, `keys.encode` of one value or codes behind each other.
        session: Code of the session key.

    Returns:
        `_stream`, `_partition`, `_offset`, `_time` (where the layout has it) and the codec's fields, in key order.

    Raises:
        StateCorrupted: A row cannot be decoded, or an index row has no message.
        KeyInvalid: A later key was given without an earlier one, or one that the layout does not have.
    """
    bounded = start is not None or end is not None
    codes = {Part.SESSION: session, Part.EQUAL: equal}
    leading = [codes[part] for part in layout.leading]
    if bounded and leading and leading[-1] is None:
        prefix, _ = message_range(layout, None, None, equal=equal, session=session)
        keys, values = _read_indexed(store, start, end, prefix)
    else:
        keys, values = store.scan_arrays(*message_range(layout, start, end, equal=equal, session=session))
    if equal is not None and layout.timed and layout.parts.index(Part.EQUAL) > layout.parts.index(Part.TIME):
        kept = [at for at, code in enumerate(_equal_codes(layout, keys)) if code == equal]
        keys, values = [keys[at] for at in kept], [values[at] for at in kept]
    found = stamps(layout, keys, pa.array(_equal_codes(layout, keys), pa.binary()))
    fields, known = codec.decode(values), stamp_fields(layout)
    columns = [pa.array(column, field.type) for column, field in zip(found, known, strict=True)]
    return pa.Table.from_arrays([*columns, *fields.columns], schema=pa.schema([*known, *codec.schema]))


def message_range(
    layout: MessageLayout,
    start: int | tuple[int, int, int] | None,
    end: int | tuple[int, int, int] | None,
    *,
    equal: bytes | None = None,
    session: bytes | None = None,
) -> tuple[bytes, bytes]:
    """Give the key range of a window, or of all windows, as far as the layout's order can; EQUAL behind TIME cannot.

    Raises:
        KeyInvalid: A part that comes before a narrower one was not given, or one that the layout does not have was.
    """
    for part, code in ((Part.SESSION, session), (Part.EQUAL, equal)):
        if code is not None and part not in layout.parts:
            raise KeyInvalid(f"a range over {layout.name} has no {part}")
    prefix = MESSAGES
    for part in layout.parts:
        code = {Part.SESSION: session, Part.EQUAL: equal}.get(part)
        if part in (Part.TIME, Part.OFFSET):
            return clock_range(prefix, start, end)
        if code is None:
            if start is not None or end is not None or (part is Part.SESSION and equal is not None):
                raise KeyInvalid(f"a range over {layout.name} needs {part}")
            break
        prefix += code
    return clock_range(prefix, None, None)


def _read_indexed(
    store: Readable, start: int | tuple[int, int, int] | None, end: int | tuple[int, int, int] | None, prefix: bytes
) -> tuple[list[bytes], list[bytes]]:
    width = OFFSET_BYTES if isinstance(end if start is None else start, tuple) else TIME_BYTES
    index, _ = store.scan_arrays(*clock_range(INDEX, start, end))
    keys = sorted(key for row in index if (key := MESSAGES + row[1 + width :]).startswith(prefix))
    values = store.get_many(keys)
    if None in values:
        raise StateCorrupted("an index row has no message", where=keys[values.index(None)].hex(), why="message missing")
    return keys, values  # type: ignore[return-value]


def _equal_codes(layout: MessageLayout, keys: list[bytes]) -> list[bytes]:
    """Give the code of the equal fields in keys that have it last; a session key before it is of one field here."""
    if layout.parts[-2:-1] != (Part.EQUAL,):
        return [b""] * len(keys)
    starts = [code_end(key, 1) if Part.SESSION in layout.parts else 1 for key in keys]
    return [
        key[start + (TIME_BYTES if layout.timed else 0) : -OFFSET_BYTES]
        for key, start in zip(keys, starts, strict=True)
    ]
