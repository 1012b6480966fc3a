"""A message store by itself, for tests: it writes and reads messages with the keys and ranges that operators use."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backend.batch import OFFSET, PARTITION, STREAM, TIME
from backend.errors import StateCorrupted
from backend.messages import (
    OFFSET_BYTES,
    TIME_BYTES,
    MessageLayout,
    Part,
    decode_messages,
    index_keys,
    message_keys,
    message_order,
    message_range,
    sorted_rows,
)
from backend.messages.keys import INDEX, MESSAGES, clock_range, time_starts
from backend.rows import RowCodec
from backend.store.protocol import Readable
from backend.store.staging import VERIFY
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
