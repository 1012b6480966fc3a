r"""The key codec: bytes that sort as their values do, and of which none is a prefix of another.

Format 1, tag first; the tags order values of different types::

    null      05
    bool      10 false, 11 true
    int64     20 | 8 bytes big-endian, sign bit flipped
    float64   28 | 8 bytes big-endian, sign bit flipped; all bits flipped when negative
    str       30 | UTF-8, 00 written as 00 FF | 00 01
    bytes     38 | the bytes, 00 written as 00 FF | 00 01
    datetime  40 with a timezone, 41 without | microseconds since the epoch as int64 above
    date      44 | days since the epoch as int64 above
    tuple     50 | the elements, each with its tag | 00

The terminator 00 01 is below every continuation of a longer string, and an escaped 00 FF is above it: so `"a"`,
`"a\0"` and `"aa"` sort in this order, and since every code ends by itself, codes can be put behind each other without
meeting: `("a", "bc")` and `("ab", "c")` stay apart.

Floats are normalised as Spark does for grouping: -0.0 is 0.0, and every NaN is one value, above infinity. Everything
else decodes to the same value and type. `encode` and `encode_columns` give the same bytes for the same values.
"""

from __future__ import annotations

import datetime as dt
import struct
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backend.errors import KeyInvalid, StateCorrupted

Bytes2D = npt.NDArray[np.uint8]
"""uint8, one row per key."""

_NULL, _FALSE, _TRUE, _INT, _FLOAT, _STR, _BYTES = 0x05, 0x10, 0x11, 0x20, 0x28, 0x30, 0x38
_AWARE, _NAIVE, _DATE, _TUPLE = 0x40, 0x41, 0x44, 0x50
_TERMINATOR: Final = b"\x00\x01"
_ESCAPED: Final = b"\x00\xff"
_SIGN64 = 1 << 63
_ALL64 = (1 << 64) - 1
_QUIET_NAN = 0x7FF8_0000_0000_0000
_EPOCH = dt.datetime(1970, 1, 1)
_EPOCH_DAY = dt.date(1970, 1, 1).toordinal()
_MICROSECOND = dt.timedelta(microseconds=1)


def encode(value: object) -> bytes:
    r"""Encode one value: None, bool, int (64 bits), float, str, bytes, datetime, date, or a tuple of them.

    >>> encode(("a", 1)).hex()
    '503061000120800000000000000100'
    >>> encode("user_1") < encode("user_12") < encode("user_2")
    True

    Raises:
        KeyInvalid: The type has no order here, an int is out of 64 bits, or a str has no UTF-8.
    """
    out = bytearray()
    _encode(value, out)
    return bytes(out)


def _encode(value: object, out: bytearray) -> None:
    kind = type(value)
    if value is None:
        out.append(_NULL)
    elif kind is bool:
        out.append(_TRUE if value else _FALSE)
    elif isinstance(value, int) and kind is int:
        if not -_SIGN64 <= value < _SIGN64:
            raise KeyInvalid("an int of a key is out of 64 bits", why=str(value))
        out += struct.pack(">BQ", _INT, value + _SIGN64)
    elif isinstance(value, float) and kind is float:
        out += struct.pack(">BQ", _FLOAT, _float_bits(value))
    elif isinstance(value, str) and kind is str:
        try:
            _encode_text(_STR, value.encode(), out)
        except UnicodeEncodeError as error:
            raise KeyInvalid("a str of a key cannot be written as UTF-8", why=str(error)) from error
    elif isinstance(value, bytes) and kind is bytes:
        _encode_text(_BYTES, value, out)
    elif isinstance(value, dt.datetime):
        tag, since = (
            (_NAIVE, value - _EPOCH) if value.tzinfo is None else (_AWARE, value - _EPOCH.replace(tzinfo=dt.UTC))
        )
        out += struct.pack(">BQ", tag, since // _MICROSECOND + _SIGN64)
    elif isinstance(value, dt.date):
        out += struct.pack(">BQ", _DATE, value.toordinal() - _EPOCH_DAY + _SIGN64)
    elif isinstance(value, tuple):
        out.append(_TUPLE)
        for element in value:
            _encode(element, out)
        out.append(0)
    else:
        raise KeyInvalid("a value of a key has a type without an order", why=kind.__name__)


def _encode_text(tag: int, data: bytes, out: bytearray) -> None:
    out.append(tag)
    out += data.replace(b"\x00", _ESCAPED)
    out += _TERMINATOR


def _float_bits(value: float) -> int:
    if value != value:  # noqa: PLR0124 - NaN
        bits = _QUIET_NAN
    else:
        (bits,) = struct.unpack(">Q", struct.pack(">d", value + 0.0))  # -0.0 + 0.0 is 0.0
    return bits ^ (_ALL64 if bits & _SIGN64 else _SIGN64)


def decode(key: bytes) -> Any:
    """Decode what `encode` gave; a datetime with a timezone comes back in UTC.

    Raises:
        StateCorrupted: The bytes are not one encoded value.
    """
    try:
        value, at = _decode(key, 0)
    except (IndexError, struct.error, UnicodeDecodeError, OverflowError, ValueError) as error:
        raise _undecodable(key, str(error)) from error
    if at != len(key):
        raise _undecodable(key, f"{len(key) - at} bytes are left over")
    return value


def _decode(key: bytes, at: int) -> tuple[Any, int]:
    tag = key[at]
    at += 1
    if tag == _NULL:
        return None, at
    if tag in (_FALSE, _TRUE):
        return tag == _TRUE, at
    if tag in (_STR, _BYTES):
        end = key.index(_TERMINATOR, at)  # an escaped zero is followed by FF, never by 01
        data = key[at:end].replace(_ESCAPED, b"\x00")
        return (data.decode() if tag == _STR else data), end + 2
    if tag == _TUPLE:
        elements = []
        while key[at] != 0:
            element, at = _decode(key, at)
            elements.append(element)
        return tuple(elements), at + 1
    (bits,) = struct.unpack_from(">Q", key, at)
    at += 8
    if tag == _INT:
        return bits - _SIGN64, at
    if tag == _FLOAT:
        return struct.unpack(">d", struct.pack(">Q", bits ^ (_SIGN64 if bits & _SIGN64 else _ALL64)))[0], at
    if tag == _DATE:
        return dt.date.fromordinal(bits - _SIGN64 + _EPOCH_DAY), at
    if tag in (_AWARE, _NAIVE):
        moment = _EPOCH + (bits - _SIGN64) * _MICROSECOND
        return (moment.replace(tzinfo=dt.UTC) if tag == _AWARE else moment), at
    raise ValueError(f"unknown tag {tag:#04x}")


def code_end(key: bytes, at: int) -> int:
    """Give where the code that begins at `at` ends: the slow way through keys whose parts have no fixed place.

    Raises:
        StateCorrupted: There is no code at that place.
    """
    try:
        return _decode(key, at)[1]
    except (IndexError, struct.error, UnicodeDecodeError, OverflowError, ValueError) as error:
        raise _undecodable(key, str(error)) from error


def _undecodable(key: bytes, why: str) -> StateCorrupted:
    return StateCorrupted(
        "a key cannot be decoded", where=key[:64].hex(), why=why, command="rewind verify <checkpoint>"
    )


def prefix_end(prefix: bytes) -> bytes | None:
    r"""Give the end of the half-open range of all keys that begin with a prefix; None when there is no such key.

    >>> prefix_end(b"\x01\xff")
    b'\x02'
    """
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else None


def pack_fixed(values: npt.NDArray[Any]) -> Bytes2D:
    """Give integers as rows of big-endian bytes that sort as the integers do; signed ones have their sign flipped.

    Args:
        values: One dimension, any integer dtype; its width is the width of a row.
    """
    width = values.dtype.itemsize
    unsigned = values.astype(values.dtype.newbyteorder("="), copy=False).view(f"u{width}")
    if values.dtype.kind == "i":
        unsigned = unsigned ^ np.array(1 << (8 * width - 1), f"u{width}")
    return unsigned.astype(f">u{width}").view(np.uint8).reshape(len(values), width)


def unpack_fixed(rows: Bytes2D, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Invert `pack_fixed`: rows as wide as the dtype to integers."""
    kind = np.dtype(dtype)
    width = kind.itemsize
    unsigned = np.ascontiguousarray(rows).view(f">u{width}").reshape(len(rows)).astype(f"u{width}")
    if kind.kind == "i":
        unsigned ^= np.array(1 << (8 * width - 1), f"u{width}")
    return unsigned.view(kind)


def fixed_bytes(value: int, dtype: npt.DTypeLike = np.int64) -> bytes:
    """Give one integer as `pack_fixed` does.

    >>> fixed_bytes(-1).hex(), fixed_bytes(1, "u2").hex()
    ('7fffffffffffffff', '0001')
    """
    kind = np.dtype(dtype)
    flip = 1 << (8 * kind.itemsize - 1) if kind.kind == "i" else 0
    return (value + flip).to_bytes(kind.itemsize, "big")


def to_keys(rows: Bytes2D) -> list[bytes]:
    """Give rows of bytes as a list of bytes objects, trailing zeros included."""
    if not rows.size:
        return [b""] * len(rows)
    # dtype V keeps trailing zeros, S would strip them
    return np.ascontiguousarray(rows).view(f"V{rows.shape[1]}").ravel().tolist()


def to_rows(keys: Sequence[bytes], width: int) -> Bytes2D:
    """Give keys of one width as rows of bytes; read-only.

    Raises:
        StateCorrupted: A key is not `width` bytes long.
    """
    joined = b"".join(keys)
    if len(joined) != width * len(keys) or any(len(key) != width for key in keys[:1]):
        bad = next((key for key in keys if len(key) != width), b"")
        raise _undecodable(bad, f"{len(bad)} bytes, {width} were expected")
    return np.frombuffer(joined, np.uint8).reshape(len(keys), width)


def encode_columns(arrays: Sequence[pa.Array | pa.ChunkedArray]) -> pa.BinaryArray:
    """Encode columns to one key per row: the codes of the row's values behind each other, without a tuple around.

    Integers of every width become int64, floats float64, timestamps microseconds; dictionaries are decoded.

    Raises:
        KeyInvalid: A column's type has no order here, a value is out of range (uint64 above int64, a timestamp finer
            than a microsecond), or there is no column.
    """
    if not arrays:
        raise KeyInvalid("a key needs at least one column")
    parts: list[Any] = []
    for array in arrays:
        part = _encode_column(array)
        if parts and isinstance(part, np.ndarray) and isinstance(parts[-1], np.ndarray):
            parts[-1] = np.hstack([parts[-1], part])
        elif isinstance(part, list):
            parts.extend(part)
        else:
            parts.append(part)
    whole = [to_binary(part) if isinstance(part, np.ndarray) else part for part in parts]
    return whole[0] if len(whole) == 1 else pc.binary_join_element_wise(*whole, pa.scalar(b"", pa.binary()))


def _encode_column(array: pa.Array | pa.ChunkedArray) -> Bytes2D | pa.BinaryArray | list[Any]:
    """Give fixed-width codes as rows, and others as binary parts to be joined."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind = array.type
    if pa.types.is_null(kind):
        return np.full((len(array), 1), _NULL, np.uint8)
    if _is_text(kind):
        tag = _STR if _is_str(kind) else _BYTES
        content = array.cast(pa.string() if tag == _STR else pa.binary()).cast(pa.binary())
        if b"\x00" in memoryview(content.buffers()[2] or b"").tobytes():
            content = pc.replace_substring(content, pattern=b"\x00", replacement=_ESCAPED)
        parts = [pa.scalar(bytes([tag]), pa.binary()), content, pa.scalar(_TERMINATOR, pa.binary())]
        return parts if not array.null_count else _with_nulls(array, _joined(parts))
    rows = _fixed_rows(array)
    return rows if not array.null_count else _with_nulls(array, to_binary(rows))


def _fixed_rows(array: pa.Array) -> Bytes2D:
    """Give tag and value of every row; rows under a null hold anything."""
    kind = array.type
    if pa.types.is_boolean(kind):
        flags = array.fill_null(False).to_numpy(zero_copy_only=False)
        return np.where(flags, _TRUE, _FALSE).astype(np.uint8).reshape(-1, 1)
    if pa.types.is_floating(kind):
        values = array.fill_null(0).cast(pa.float64()).to_numpy() + 0.0
        bits = np.where(np.isnan(values), np.uint64(_QUIET_NAN), values.view(np.uint64))
        bits ^= np.where(bits >> np.uint64(63), np.uint64(_ALL64), np.uint64(_SIGN64))
        return _tagged(_FLOAT, bits.astype(">u8").view(np.uint8).reshape(-1, 8))
    tag = _fixed_tag(kind)
    try:
        if tag in (_AWARE, _NAIVE):
            array = array.cast(pa.timestamp("us", kind.tz))
        elif tag == _DATE:
            array = array.cast(pa.date32()).cast(pa.int32())
        integers = array.cast(pa.int64()).fill_null(0).to_numpy()
    except pa.ArrowInvalid as error:
        raise KeyInvalid("a value of a key column is out of range", where=str(kind), why=str(error)) from error
    return _tagged(tag, pack_fixed(integers))


def _fixed_tag(kind: pa.DataType) -> int:
    if pa.types.is_integer(kind):
        return _INT
    if pa.types.is_timestamp(kind):
        return _NAIVE if kind.tz is None else _AWARE
    if pa.types.is_date(kind):
        return _DATE
    raise KeyInvalid("a key column has a type without an order", why=str(kind))


def _is_str(kind: pa.DataType) -> bool:
    return any(check(kind) for check in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view))


def _is_text(kind: pa.DataType) -> bool:
    others = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view, pa.types.is_fixed_size_binary)
    return _is_str(kind) or any(check(kind) for check in others)


def _tagged(tag: int, rows: Bytes2D) -> Bytes2D:
    out = np.empty((len(rows), rows.shape[1] + 1), np.uint8)
    out[:, 0] = tag
    out[:, 1:] = rows
    return out


def to_binary(rows: Bytes2D) -> pa.BinaryArray:
    """Give rows of bytes as a binary array; shares the rows' memory."""
    count, width = rows.shape
    offsets = np.arange(0, width * (count + 1), width, dtype=np.int32)[: count + 1]
    data = pa.py_buffer(np.ascontiguousarray(rows))
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), data])


def _joined(parts: Sequence[Any]) -> pa.BinaryArray:
    return pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.binary()))


def _with_nulls(array: pa.Array, codes: pa.BinaryArray) -> pa.BinaryArray:
    return pc.if_else(array.is_valid(), codes, pa.scalar(bytes([_NULL]), pa.binary()))


def decode_columns(keys: pa.BinaryArray | Iterable[bytes], types: Sequence[pa.DataType]) -> list[pa.Array]:
    """Decode keys of `encode_columns` to columns of the types that were encoded; takes a list of bytes too.

    Raises:
        StateCorrupted: A key does not hold values of these types, or holds more.
        KeyInvalid: A type has no order here.
    """
    if isinstance(keys, pa.ChunkedArray):
        keys = keys.combine_chunks()
    if not isinstance(keys, pa.Array):
        keys = pa.array(keys, pa.binary())
    reader = _Reader(keys)
    columns = [reader.column(kind) for kind in types]
    reader.finish()
    return columns


class _Reader:
    """Reads one column after the other from all keys at once; `at` is where each key is read next."""

    def __init__(self, keys: pa.BinaryArray) -> None:
        offsets = np.frombuffer(keys.buffers()[1] or bytes(4), np.int32)[keys.offset : keys.offset + len(keys) + 1]
        self.ends = offsets[1:].astype(np.int64)
        self.at = offsets[:-1].astype(np.int64)
        data = np.frombuffer(keys.buffers()[2] or b"", np.uint8)
        self.data = np.concatenate([data, np.zeros(9, np.uint8)])  # a truncated key is found after it was read
        self.keys = keys
        self._terminators: npt.NDArray[np.int64] | None = None

    def column(self, kind: pa.DataType) -> pa.Array:
        """Read the next value of every key."""
        if pa.types.is_dictionary(kind):
            return self.column(kind.value_type).cast(kind)
        tags = self.data[self.at]
        null = tags == _NULL
        if pa.types.is_null(kind):
            self._expect(null)
            self.at += 1
            return pa.nulls(len(null))
        if _is_text(kind):
            self._expect(null | (tags == (_STR if _is_str(kind) else _BYTES)))
            return self._text(kind, null)
        if pa.types.is_boolean(kind):
            self._expect(null | (tags == _FALSE) | (tags == _TRUE))
            self.at += 1
            return pa.array(tags == _TRUE, mask=null if null.any() else None)
        floating = pa.types.is_floating(kind)
        self._expect(null | (tags == (_FLOAT if floating else _fixed_tag(kind))))
        bits = self._eight_bytes(null)
        mask = null if null.any() else None
        if floating:
            bits ^= np.where(bits >> np.uint64(63), np.uint64(_SIGN64), np.uint64(_ALL64))
            return pa.array(bits.view(np.float64), mask=mask).cast(kind)
        integers = pa.array((bits ^ np.uint64(_SIGN64)).view(np.int64), mask=mask)
        if pa.types.is_timestamp(kind):
            return integers.cast(pa.timestamp("us", kind.tz)).cast(kind)
        if pa.types.is_date(kind):
            return integers.cast(pa.int32()).cast(pa.date32()).cast(kind)
        return integers.cast(kind)

    def _eight_bytes(self, null: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint64]:
        windows = np.lib.stride_tricks.sliding_window_view(self.data, 8)
        starts = np.where(null, 0, self.at + 1)
        bits = windows[np.minimum(starts, len(windows) - 1)].view(">u8").reshape(-1).astype(np.uint64)
        self.at += np.where(null, 1, 9)
        self._expect(self.at <= self.ends)
        return bits

    def _text(self, kind: pa.DataType, null: npt.NDArray[np.bool_]) -> pa.Array:
        if self._terminators is None:
            zeros = self.data[:-1] == 0
            self._terminators = np.flatnonzero(zeros & (self.data[1:] == 1))
        found = np.append(self._terminators, len(self.data))
        starts = self.at + 1
        stops = found[np.searchsorted(found, starts)]
        self._expect(null | (stops + 2 <= self.ends))
        lengths = np.where(null, 0, stops - starts)
        self.at = np.where(null, self.at + 1, stops + 2)
        content = gather(self.data, starts, lengths, null)
        if b"\x00" in memoryview(content.buffers()[2] or b"").tobytes():
            content = pc.replace_substring(content, pattern=_ESCAPED, replacement=b"\x00")
        try:
            return content.cast(pa.string()).cast(kind) if _is_str(kind) else content.cast(kind)
        except pa.ArrowInvalid as error:
            raise _undecodable(b"", str(error)) from error

    def finish(self) -> None:
        """Check that every key was read to its end."""
        self._expect(self.at == self.ends)

    def _expect(self, right: npt.NDArray[np.bool_]) -> None:
        right = right & (self.at <= self.ends)
        if not right.all():
            raise _undecodable(self.keys[int(np.argmin(right))].as_py(), "it does not hold the expected types")


def gather(
    data: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    null: npt.NDArray[np.bool_] | None = None,
) -> pa.BinaryArray:
    """Copy slices of a buffer into one binary array.

    Args:
        data: The buffer.
        starts: int64, start of each slice.
        lengths: int64, length of each slice; 0 where null.
        null: bool, rows that are null; None for none.
    """
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    total = int(offsets[-1])
    index = np.arange(total, dtype=np.int64)
    index += np.repeat(starts - offsets[:-1], lengths)
    valid = None if null is None or not null.any() else pa.py_buffer(np.packbits(~null, bitorder="little"))
    buffers = [valid, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data[index])]
    return pa.Array.from_buffers(pa.binary(), len(lengths), buffers)
