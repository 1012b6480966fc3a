"""The message store: an exactly-once view of the messages in retention, for full-state aggregates and joins.

Which key a message gets is SAMZA-552's matrix, kept here as data (`MATRIX`) and read by one function (`choose_layout`).
A key is the region byte and then, in the layout's order (format 1, all big-endian, signs flipped)::

    SESSION  code of the session key    backend.keys, ends by itself
    EQUAL    code of the equal fields   backend.keys, ends by itself
    TIME     event time, ms             8 bytes
    OFFSET   stream, partition, offset  2 + 4 + 8 bytes: unique in a shard

The offset in every key is what makes a replayed or duplicated message the same row (R.4). Layouts that begin with TIME
expire by a bound (R.3). The others have a row in `Region.MESSAGE_INDEX` per message, `time or offset | message key`
with an empty value, so that expiring reads what it evicts and nothing that stays.

All functions work on a `Workspace` (reads also on any `Readable`); ranges are half-open.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from operator import add, lt
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from backend.batch import OFFSET, PARTITION, STREAM, TIME
from backend.errors import KeyInvalid, StateCorrupted
from backend.keys import code_end, fixed_bytes, pack_fixed, prefix_end, to_binary, to_keys, unpack_fixed
from backend.rows import RowCodec
from backend.staging import VERIFY
from backend.store import Readable, Region
from backend.workspace import Workspace

OFFSET_BYTES = 14
TIME_BYTES = 8
_MASK = 2**64 - 1
_MESSAGES = bytes([Region.MESSAGES])
_INDEX = bytes([Region.MESSAGE_INDEX])


class Part(StrEnum):
    """What a message key is made of."""

    SESSION = "session"
    EQUAL = "equal"
    TIME = "time"
    OFFSET = "offset"


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """The order of the parts of a message key.

    Attributes:
        parts: Each at most once, OFFSET last.
    """

    parts: tuple[Part, ...]

    @property
    def timed(self) -> bool:
        """Whether messages expire by event time; by offset otherwise."""
        return Part.TIME in self.parts

    @property
    def indexed(self) -> bool:
        """Whether a key begins with another message's key, so that expiry needs the index."""
        return self.parts[0] in (Part.SESSION, Part.EQUAL)

    @property
    def name(self) -> str:
        """Name for the manifest, such as `equal_time_offset`."""
        return "_".join(self.parts)


_T, _E, _O, _S = Part.TIME, Part.EQUAL, Part.OFFSET, Part.SESSION

ANY = "any"

MATRIX: tuple[tuple[str, str, str, str, str, tuple[Part, ...]], ...] = (
    # measure, purpose, equal fields, time range, window, message key
    ("tuple", "aggregate", ANY, ANY, ANY, (_O,)),
    ("tuple", "join", "no", ANY, ANY, (_O,)),
    ("tuple", "join", "yes", ANY, "small", (_O,)),
    ("tuple", "join", "yes", ANY, "large", (_E, _O)),
    ("time", "aggregate", ANY, ANY, ANY, (_T, _O)),
    ("time", "join", "no", ANY, ANY, (_T, _O)),
    ("time", "join", "yes", "no", ANY, (_E, _T, _O)),
    ("time", "join", "yes", "yes", "small", (_T, _E, _O)),
    ("time", "join", "yes", "yes", "large", (_E, _T, _O)),
)
"""SAMZA-552, "Message Store": the first row that fits gives the message key."""

TIME_FIRST = MessageLayout((_T, _O))
"""`<timestamp>_<offset>`: time windows, aggregates."""
OFFSET_FIRST = MessageLayout((_O,))
"""`<offset>`: tuple windows."""


def choose_layout(
    measure: str,
    purpose: str,
    *,
    equal_fields: bool = False,
    time_range: bool = False,
    large: bool = False,
    session: bool = False,
    key_by_join_fields: bool = False,
) -> MessageLayout:
    """Choose the message key.

    Args:
        measure: `time` or `tuple`: in what windows are measured.
        purpose: `aggregate` or `join`.
        equal_fields: The join has equal fields.
        time_range: The join has a time range.
        large: The window is large: a join should not iterate through it.
        session: Windows are sessions, so the session key comes first.
        key_by_join_fields: SAMZA-552's `setKeyedMessageStore(joinKeys)`: the join fields come first whatever the
            window's size.

    Raises:
        ValueError: The measure or purpose is neither, or the join fields are to come first and there are none.
    """
    if measure not in ("time", "tuple"):
        raise ValueError(f"measure={measure!r}: allowed are 'time' and 'tuple'")
    if purpose not in ("aggregate", "join"):
        raise ValueError(f"purpose={purpose!r}: allowed are 'aggregate' and 'join'")
    if key_by_join_fields and not (purpose == "join" and equal_fields):
        raise ValueError("key_by_join_fields=True: allowed for a join on equal fields only")
    size = "large" if large or key_by_join_fields else "small"
    asked = (measure, purpose, "yes" if equal_fields else "no", "yes" if time_range else "no", size)
    parts = next(row[5] for row in MATRIX if all(cell in (ANY, want) for cell, want in zip(row, asked, strict=False)))
    return MessageLayout((_S, *parts) if session else parts)


def message_keys(
    layout: MessageLayout,
    messages: pa.Table,
    *,
    equal: pa.BinaryArray | None = None,
    session: pa.BinaryArray | None = None,
) -> list[bytes]:
    """Build the full keys of messages, in their order.

    Args:
        layout: The layout.
        messages: Has the columns `_stream`, `_partition`, `_offset` and, where the layout has it, `_time`.
        equal: `keys.encode_columns` of the equal fields, where the layout has them.
        session: `keys.encode_columns` of the session key, where the layout has it.
    """
    return _join_parts(_MESSAGES, _parts(layout.parts, messages, equal, session))


def index_keys(
    layout: MessageLayout,
    messages: pa.Table,
    *,
    equal: pa.BinaryArray | None = None,
    session: pa.BinaryArray | None = None,
) -> list[bytes]:
    """Build the full keys of the index rows of messages, in their order; arguments as for `message_keys`."""
    clock = (Part.TIME if layout.timed else Part.OFFSET,)
    return _join_parts(_INDEX, _parts((*clock, *layout.parts), messages, equal, session))


def message_order(
    layout: MessageLayout,
    messages: pa.Table,
    *,
    equal: pa.BinaryArray | None = None,
    session: pa.BinaryArray | None = None,
) -> npt.NDArray[np.int64]:
    """Give the order of messages by their keys, when they come sorted by (stream, partition, offset) as in a batch.

    Arguments as for `message_keys`. Sorting by numbers is many times faster than by the keys made of them.
    """
    ranks: list[npt.NDArray[Any]] = []
    for part in layout.parts[:-1]:
        if part is Part.TIME:
            ranks.append(_numbers(messages, TIME, np.int64))
        else:
            (codes,) = _parts((part,), messages, equal, session)
            known = codes.dictionary_encode()
            order = pc.array_sort_indices(known.dictionary).to_numpy()
            places = np.empty(len(order), np.int64)
            places[order] = np.arange(len(order))
            ranks.append(places[known.indices.to_numpy()])
    if not ranks:
        return np.arange(len(messages))
    return np.argsort(ranks[0], kind="stable") if len(ranks) == 1 else np.lexsort(ranks[::-1])


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


def message_range(
    layout: MessageLayout,
    start: int | tuple[int, int, int] | None,
    end: int | tuple[int, int, int] | None,
    *,
    equal: bytes | None = None,
    session: bytes | None = None,
) -> tuple[bytes, bytes]:
    """Give the key range of a window, or of all windows, as far as the layout's order can.

    Args:
        layout: The layout.
        start: Event time, or (stream, partition, offset) for layouts without time; None from the first on.
        end: As `start`, exclusive; None to the last.
        equal: Code of the equal fields, `keys.encode` of one value or codes behind each other.
        session: Code of the session key.

    Returns:
        A half-open range. It holds exactly the messages asked for, except that EQUAL behind TIME cannot narrow it.

    Raises:
        KeyInvalid: A part that comes before a narrower one was not given.
    """
    prefix = _MESSAGES
    for part in layout.parts:
        code = {Part.SESSION: session, Part.EQUAL: equal}.get(part)
        if part in (Part.TIME, Part.OFFSET):
            return _clock_range(prefix, start, end)
        if code is None:
            if start is not None or end is not None or (part is Part.SESSION and equal is not None):
                raise KeyInvalid(f"a range over {layout.name} needs {part}")
            break
        prefix += code
    return _clock_range(prefix, None, None)


def _clock_range(
    prefix: bytes, start: int | tuple[int, int, int] | None, end: int | tuple[int, int, int] | None
) -> tuple[bytes, bytes]:
    low = prefix if start is None else prefix + clock_bytes(start)
    high = prefix_end(prefix) if end is None else prefix + clock_bytes(end)
    return low, high or b"\xff"


def clock_bytes(at: int | tuple[int, int, int]) -> bytes:
    """Give an event time, or a (stream, partition, offset), as it stands in a key."""
    if isinstance(at, int):
        return fixed_bytes(at)
    stream, partition, offset = at
    return fixed_bytes(stream, np.uint16) + fixed_bytes(partition, np.int32) + fixed_bytes(offset)


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

    Arguments as for `message_range`. Where the layout begins with a key that was not given, a window is found through
    the index; equal fields behind the time are compared row by row.

    Returns:
        `_stream`, `_partition`, `_offset`, `_time` (where the layout has it) and the codec's fields, in key order.

    Raises:
        StateCorrupted: A row cannot be decoded, or an index row has no message.
    """
    bounded = start is not None or end is not None
    given = {Part.SESSION: session is not None, Part.EQUAL: equal is not None}
    if layout.indexed and bounded and not given[layout.parts[0]]:
        keys, values = _read_indexed(store, start, end)
    else:
        keys, values = store.scan_arrays(*message_range(layout, start, end, equal=equal, session=session))
    if equal is not None and layout.parts.index(Part.EQUAL) > layout.parts.index(Part.TIME if layout.timed else _O):
        keys, values = _with_equal(layout, keys, values, equal)
    return decode_messages(layout, codec, keys, values)


def _read_indexed(
    store: Readable, start: int | tuple[int, int, int] | None, end: int | tuple[int, int, int] | None
) -> tuple[list[bytes], list[bytes]]:
    width = TIME_BYTES if isinstance(end if start is None else start, int) else OFFSET_BYTES
    index, _ = store.scan_arrays(*_clock_range(_INDEX, start, end))
    keys = sorted(_MESSAGES + row[1 + width :] for row in index)
    values = store.get_many(keys)
    if None in values:
        raise StateCorrupted(
            "an index row has no message", where=keys[values.index(None)].hex(), why="message missing", command=VERIFY
        )
    return keys, values  # type: ignore[return-value]


def _with_equal(
    layout: MessageLayout, keys: list[bytes], values: list[bytes], equal: bytes
) -> tuple[list[bytes], list[bytes]]:
    starts = _time_starts(layout, keys)
    kept = [at for at, (key, start) in enumerate(zip(keys, starts, strict=True)) if key.startswith(equal, start + 8)]
    return [keys[at] for at in kept], [values[at] for at in kept]


def _time_starts(layout: MessageLayout, keys: Sequence[bytes]) -> Iterable[int]:
    if layout.parts[0] is Part.SESSION:  # the code of the session key has to be walked over, key by key
        return [code_end(key, 1) for key in keys]
    return [1] * len(keys)


def decode_messages(layout: MessageLayout, codec: RowCodec, keys: Sequence[bytes], values: Sequence[bytes]) -> pa.Table:
    """Give rows of the message store as a table: `read_messages` says which columns.

    Raises:
        StateCorrupted: A key or value cannot be decoded.
    """
    stamps = _stamps(layout, keys)
    fields = codec.decode(values)
    return pa.Table.from_arrays(
        [*stamps.values(), *fields.columns], schema=pa.schema([*_stamp_fields(layout), *codec.schema])
    )


def _stamp_fields(layout: MessageLayout) -> list[pa.Field]:
    kinds = [(STREAM, pa.uint16()), (PARTITION, pa.int32()), (OFFSET, pa.int64())]
    if layout.timed:
        kinds.append((TIME, pa.int64()))
    return [pa.field(name, kind, nullable=False) for name, kind in kinds]


def _stamps(layout: MessageLayout, keys: Sequence[bytes]) -> dict[str, pa.Array]:
    """Read what the keys say: stream, partition, offset, and the event time where they have it."""
    tail = OFFSET_BYTES + (TIME_BYTES if layout.parts[-2:-1] == (Part.TIME,) else 0)
    rows = _tails(keys, tail)
    stamps = {
        STREAM: pa.array(unpack_fixed(rows[:, -14:-12], np.uint16)),
        PARTITION: pa.array(unpack_fixed(rows[:, -12:-8], np.int32)),
        OFFSET: pa.array(unpack_fixed(rows[:, -8:], np.int64)),
    }
    if tail > OFFSET_BYTES:
        stamps[TIME] = pa.array(unpack_fixed(rows[:, :8], np.int64))
    elif layout.timed:
        starts = _time_starts(layout, keys)
        heads = [key[start : start + 8] for key, start in zip(keys, starts, strict=True)]
        stamps[TIME] = pa.array(unpack_fixed(_tails(heads, 8), np.int64))
    return stamps


def _tails(keys: Sequence[bytes], width: int) -> npt.NDArray[np.uint8]:
    """Give the last bytes of every key as rows."""
    if not len(keys):
        return np.zeros((0, width), np.uint8)
    lengths = np.fromiter(map(len, keys), np.int64, len(keys))
    if lengths.min() < width:
        bad = keys[int(lengths.argmin())]
        raise StateCorrupted("a message key is too short", where=bad.hex(), why=f"{len(bad)} bytes", command=VERIFY)
    data = np.frombuffer(b"".join(keys), np.uint8)
    if lengths.min() == lengths.max():
        return data.reshape(len(keys), -1)[:, -width:]
    rows: npt.NDArray[np.uint8] = np.lib.stride_tricks.sliding_window_view(data, width)[np.cumsum(lengths) - width]
    return rows


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
        work.raise_bound(Region.MESSAGES, _MESSAGES + clock_bytes(before))
        return -1
    if not layout.indexed:
        evicted, _ = work.scan_arrays(_MESSAGES + _partition_start(before), _MESSAGES + clock_bytes(before))
        work.delete_many(evicted)
        return len(evicted)
    start = _INDEX if layout.timed else _INDEX + _partition_start(before)
    index, _ = work.scan_arrays(start, _INDEX + clock_bytes(before))
    width = TIME_BYTES if layout.timed else OFFSET_BYTES
    work.delete_many(sorted(_MESSAGES + row[1 + width :] for row in index))
    if layout.timed:
        work.raise_bound(Region.MESSAGE_INDEX, _INDEX + clock_bytes(before))
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


def _parts(
    parts: Sequence[Part], messages: pa.Table, equal: pa.BinaryArray | None, session: pa.BinaryArray | None
) -> list[Any]:
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
            codes = session if part is Part.SESSION else equal
            if codes is None or len(codes) != len(messages) or codes.null_count:
                raise KeyInvalid("a message key needs the code of each row", where=str(part))
            out.append(codes)
    return out


def _numbers(messages: pa.Table, name: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    column = messages.column(name)
    if column.null_count:
        raise KeyInvalid("a message key cannot be made of null", where=name)
    numbers: npt.NDArray[Any] = column.to_numpy().astype(dtype, copy=False)
    return numbers


def _join_parts(region: bytes, parts: list[Any]) -> list[bytes]:
    """Put the region byte and the parts behind each other, row by row."""
    count = len(parts[0])
    pieces: list[Any] = [np.full((count, 1), region[0], np.uint8)]
    for part in parts:
        if isinstance(part, np.ndarray) and isinstance(pieces[-1], np.ndarray):
            pieces[-1] = np.hstack([pieces[-1], part])
        else:
            pieces.append(part)
    if len(pieces) == 1:
        return to_keys(pieces[0])
    arrays = [to_binary(piece) if isinstance(piece, np.ndarray) else piece for piece in pieces]
    joined: list[bytes] = pc.binary_join_element_wise(*arrays, pa.scalar(b"", pa.binary())).to_pylist()
    return joined
