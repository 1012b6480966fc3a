"""Message keys: built over columns, read back over lists, and the ranges of windows in between.

A key is the region byte and then, in the layout's order (format 1, all big-endian, signs flipped)::

    SESSION  codes of the session key   backend.keys, each ends by itself
    EQUAL    codes of the equal fields  backend.keys, each ends by itself
    TIME     event time, ms             8 bytes
    OFFSET   stream, partition, offset  2 + 4 + 8 bytes: unique in a shard

An index row's key is its region byte, then TIME or OFFSET, then the message's key without the region byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backend.batch import MESSAGE_FIELDS, OFFSET, PARTITION, STREAM, TIME
from backend.errors import KeyInvalid, StateCorrupted
from backend.keys import (
    Bytes2D,
    beside,
    fixed_bytes,
    key_column,
    pack_fixed,
    prefix_end,
    to_keys,
    to_rows,
    unpack_fixed,
)
from backend.messages.layout import MessageLayout, Part
from backend.store.protocol import Region

OFFSET_BYTES = 14
TIME_BYTES = 8
MESSAGES = bytes([Region.MESSAGES])
INDEX = bytes([Region.MESSAGE_INDEX])

Codes = Mapping[Part, pa.BinaryArray]
"""Codes of SESSION and EQUAL, one for each message."""

Clock = int | tuple[int, int, int]
"""What messages expire by: an event time, or a place (stream, partition, offset)."""

_Integers = npt.NDArray[np.int64]


def message_keys(layout: MessageLayout, messages: pa.Table, codes: Codes | None = None) -> list[bytes]:
    """Build the full keys of messages, in their order.

    Args:
        layout: The layout.
        messages: Has the columns `_stream`, `_partition`, `_offset` and, where the layout has it, `_time`.
        codes: `keys.encode_columns` of the session key and of the equal fields, where the layout has them.
    """
    keys: list[bytes] = message_key_column(layout, messages, codes).to_pylist()
    return keys


def message_key_column(layout: MessageLayout, messages: pa.Table, codes: Codes | None) -> pa.BinaryArray:
    """Build what `message_keys` does, as a column."""
    return key_column(MESSAGES, *_parts(layout.parts, messages, codes))


def index_keys(layout: MessageLayout, messages: pa.Table, codes: Codes) -> list[bytes]:
    """Build the full keys of the index rows of messages, in their order; arguments as for `message_keys`."""
    keys: list[bytes] = key_column(INDEX, *_parts((layout.clock, *layout.parts), messages, codes)).to_pylist()
    return keys


def message_order(layout: MessageLayout, messages: pa.Table, codes: Codes | None) -> _Integers:
    """Give the order of messages by their keys, when they come sorted by (stream, partition, offset) as in a batch.

    Arguments as for `message_keys`. Sorting by numbers is many times faster than by the keys made of them.
    """
    ranks: list[_Integers] = []
    for part in layout.parts[:-1]:
        if part is Part.TIME:
            ranks.append(_numbers(messages, TIME, np.int64))
        else:
            known = _parts((part,), messages, codes)[0].dictionary_encode()
            order = pc.array_sort_indices(known.dictionary).to_numpy()
            places = np.empty(len(order), np.int64)
            places[order] = np.arange(len(order))
            ranks.append(places[known.indices.to_numpy()])
    if not ranks:
        return np.arange(len(messages))
    return np.argsort(ranks[0], kind="stable") if len(ranks) == 1 else np.lexsort(ranks[::-1])


def clock_range(prefix: bytes, start: Clock | None, end: Clock | None) -> tuple[bytes, bytes]:
    """Give the range of keys that begin with a prefix and then a clock in `[start, end)`; None leaves a side open."""
    low = prefix if start is None else prefix + clock_bytes(start)
    high = prefix_end(prefix) if end is None else prefix + clock_bytes(end)
    return low, high or b"\xff"


def clock_bytes(at: Clock) -> bytes:
    """Give an event time, or a place, as it stands in a key."""
    if not isinstance(at, tuple):
        return fixed_bytes(int(at))
    return source_bytes(*at[:2]) + fixed_bytes(at[2])


def source_bytes(stream: int, partition: int) -> bytes:
    """Give a source partition as the (stream, partition, offset) of its messages begin in a key."""
    return fixed_bytes(stream, np.uint16) + fixed_bytes(partition, np.int32)


def clocked_keys(
    head: bytes, clocks: _Integers, stream: _Integers, partition: _Integers, offset: _Integers
) -> list[bytes]:
    """Give keys of rows about messages: a head, a clock of 8 bytes, and the message's place."""
    places = [pack_fixed(stream.astype(np.uint16)), pack_fixed(partition.astype(np.int32)), pack_fixed(offset)]
    return [head + key for key in to_keys(beside([pack_fixed(clocks), *places]))]


def read_clocked(head: bytes, keys: Sequence[bytes]) -> tuple[_Integers, _Integers, _Integers, _Integers]:
    """Invert `clocked_keys`: clock, stream, partition and offset of each."""
    rows = to_rows(keys, len(head) + TIME_BYTES + OFFSET_BYTES)
    return unpack_fixed(rows[:, len(head) : -OFFSET_BYTES], np.int64), *_places(rows)


def _places(rows: Bytes2D) -> tuple[_Integers, _Integers, _Integers]:
    """Give stream, partition and offset, which rows of bytes end with."""
    parts = ((rows[:, -14:-12], np.uint16), (rows[:, -12:-8], np.int32), (rows[:, -8:], np.int64))
    stream, partition, offset = (unpack_fixed(part, kind).astype(np.int64, copy=False) for part, kind in parts)
    return stream, partition, offset


def places_of(keys: Sequence[bytes]) -> tuple[_Integers, _Integers, _Integers]:
    """Give stream, partition and offset, which every message key and index key ends with."""
    return _places(to_rows([key[-OFFSET_BYTES:] for key in keys], OFFSET_BYTES))


def stamp_fields(layout: MessageLayout) -> list[pa.Field]:
    """Give the columns that `stamps` reads from keys."""
    names = (STREAM, PARTITION, OFFSET, TIME) if layout.timed else (STREAM, PARTITION, OFFSET)
    return [field for field in MESSAGE_FIELDS if field.name in names]


def stamps(layout: MessageLayout, keys: Sequence[bytes], equal: pa.Array | None = None) -> list[_Integers]:
    """Read what the keys say: stream, partition, offset, and the event time where they have it.

    Args:
        layout: The layout.
        keys: The messages' full keys.
        equal: The codes of their equal fields; needed where these and the session key have the time between them.
    """
    timed_tail = layout.parts[-2:-1] == (Part.TIME,)
    rows = _tails(keys, OFFSET_BYTES + TIME_BYTES * timed_tail)
    stamps = [*_places(rows)]
    if timed_tail:
        stamps.append(unpack_fixed(rows[:, :TIME_BYTES], np.int64))
    elif layout.timed:
        stamps.append(unpack_fixed(_tails(_before_equal(layout, keys, equal), TIME_BYTES), np.int64))
    return stamps


def _tails(keys: Sequence[bytes], width: int) -> npt.NDArray[np.uint8]:
    """Give the last bytes of every key as rows."""
    if not len(keys):
        return np.zeros((0, width), np.uint8)
    lengths = np.fromiter(map(len, keys), np.int64, len(keys))
    if lengths.min() < width:
        bad = keys[int(lengths.argmin())]
        raise StateCorrupted("a message key is too short", where=bad.hex(), why=f"{len(bad)} bytes")
    data = np.frombuffer(b"".join(keys), np.uint8)
    if lengths.min() == lengths.max():
        return data.reshape(len(keys), -1)[:, -width:]
    rows: npt.NDArray[np.uint8] = np.lib.stride_tricks.sliding_window_view(data, width)[np.cumsum(lengths) - width]
    return rows


def _before_equal(layout: MessageLayout, keys: Sequence[bytes], equal: pa.Array | None) -> list[bytes]:
    """Return what each key has before EQUAL, without the region byte: it ends with the event time."""
    if layout.parts[0] is Part.TIME:
        return [key[1 : 1 + TIME_BYTES] for key in keys]
    if equal is None:
        raise KeyInvalid("the time in a message key is found by the code of the equal fields", where=layout.name)
    widths = pc.binary_length(equal).to_pylist()  # from the end: a session key is of any number of codes
    return [key[1 : -OFFSET_BYTES - width] for key, width in zip(keys, widths, strict=True)]


def _parts(parts: Sequence[Part], messages: pa.Table, codes: Codes | None) -> list[Any]:
    """Give each part of the keys as rows of bytes, or as a binary array where its width varies."""
    out: list[Any] = []
    for part in parts:
        if part is Part.TIME:
            out.append(pack_fixed(_numbers(messages, TIME, np.int64)))
        elif part is Part.OFFSET:
            out.append(pack_fixed(_numbers(messages, STREAM, np.uint16)))
            out.append(pack_fixed(_numbers(messages, PARTITION, np.int32)))
            out.append(pack_fixed(_numbers(messages, OFFSET, np.int64)))
        else:
            code = (codes or {}).get(part)
            if code is None or len(code) != len(messages) or code.null_count:
                raise KeyInvalid("a message key needs the code of each row", where=str(part))
            out.append(code)
    return out


def _numbers(messages: pa.Table, name: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    column = messages.column(name)
    if column.null_count:
        raise KeyInvalid("a message key cannot be made of null", where=name)
    numbers: npt.NDArray[Any] = column.to_numpy().astype(dtype, copy=False)
    return numbers
