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
from typing import Any, Final

from backend.errors import UNDECODABLE, KeyInvalid, StateCorrupted

NULL, FALSE, TRUE, INT, FLOAT, STR, BYTES = 0x05, 0x10, 0x11, 0x20, 0x28, 0x30, 0x38
AWARE, NAIVE, DATE, TUPLE = 0x40, 0x41, 0x44, 0x50
TERMINATOR: Final = b"\x00\x01"
ESCAPED: Final = b"\x00\xff"
SIGN64 = 1 << 63
ALL64 = (1 << 64) - 1
QUIET_NAN = 0x7FF8_0000_0000_0000
_UNIX_EPOCH = dt.datetime(1970, 1, 1)
_UNIX_EPOCH_DAY = dt.date(1970, 1, 1).toordinal()
_MICROSECOND = dt.timedelta(microseconds=1)
_FIRST, _LAST = ((one - _UNIX_EPOCH) // _MICROSECOND for one in (dt.datetime.min, dt.datetime.max))


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
        out.append(NULL)
    elif kind is bool:
        out.append(TRUE if value else FALSE)
    elif isinstance(value, int) and kind is int:
        if not -SIGN64 <= value < SIGN64:
            raise KeyInvalid("an int of a key is out of 64 bits", why=str(value))
        out += struct.pack(">BQ", INT, value + SIGN64)
    elif isinstance(value, float) and kind is float:
        out += struct.pack(">BQ", FLOAT, _float_bits(value))
    elif isinstance(value, str) and kind is str:
        try:
            _encode_text(STR, value.encode(), out)
        except UnicodeEncodeError as error:
            raise KeyInvalid("a str of a key cannot be written as UTF-8", why=str(error)) from error
    elif isinstance(value, bytes) and kind is bytes:
        _encode_text(BYTES, value, out)
    elif isinstance(value, dt.date):
        out += struct.pack(">BQ", *_date(value))
    elif isinstance(value, tuple):
        out.append(TUPLE)
        for element in value:
            _encode(element, out)
        out.append(0)
    else:
        raise KeyInvalid("a value of a key has a type without an order", why=kind.__name__)


def _date(value: dt.date) -> tuple[int, int]:
    """Give tag and number of a date, or of a datetime, which is one; pandas has datetimes that no datetime is."""
    if value != value or getattr(value, "nanosecond", None):  # noqa: PLR0124 - NaT
        raise KeyInvalid("a time of a key is none, or finer than a microsecond", why=str(value))
    if not isinstance(value, dt.datetime):
        return DATE, value.toordinal() - _UNIX_EPOCH_DAY + SIGN64
    tag, since = (
        (NAIVE, value - _UNIX_EPOCH) if value.tzinfo is None else (AWARE, value - _UNIX_EPOCH.replace(tzinfo=dt.UTC))
    )
    micros = since // _MICROSECOND
    if not _FIRST <= micros <= _LAST:  # east or west of UTC
        raise KeyInvalid("a time of a key is not within the years 1 to 9999 in UTC", why=str(value))
    return tag, micros + SIGN64


def _encode_text(tag: int, data: bytes, out: bytearray) -> None:
    out.append(tag)
    out += data.replace(b"\x00", ESCAPED)
    out += TERMINATOR


def _float_bits(value: float) -> int:
    if value != value:  # noqa: PLR0124 - NaN
        bits = QUIET_NAN
    else:
        (bits,) = struct.unpack(">Q", struct.pack(">d", value + 0.0))  # -0.0 + 0.0 is 0.0
    return bits ^ (ALL64 if bits & SIGN64 else SIGN64)


def decode(key: bytes) -> Any:
    """Decode what `encode` gave; a datetime with a timezone comes back in UTC.

    Raises:
        StateCorrupted: The bytes are not one encoded value.
    """
    try:
        value, at = _decode(key, 0)
    except (*UNDECODABLE, struct.error) as error:
        raise undecodable(key, str(error)) from error
    if at != len(key):
        raise undecodable(key, f"{len(key) - at} bytes are left over")
    return value


def _decode(key: bytes, at: int) -> tuple[Any, int]:
    tag = key[at]
    at += 1
    if tag == NULL:
        return None, at
    if tag in (FALSE, TRUE):
        return tag == TRUE, at
    if tag in (STR, BYTES):
        end = key.index(TERMINATOR, at)  # an escaped zero is followed by FF, never by 01
        data = key[at:end].replace(ESCAPED, b"\x00")
        return (data.decode() if tag == STR else data), end + 2
    if tag == TUPLE:
        elements = []
        while key[at] != 0:
            element, at = _decode(key, at)
            elements.append(element)
        return tuple(elements), at + 1
    (bits,) = struct.unpack_from(">Q", key, at)
    at += 8
    if tag == INT:
        return bits - SIGN64, at
    if tag == FLOAT:
        return struct.unpack(">d", struct.pack(">Q", bits ^ (SIGN64 if bits & SIGN64 else ALL64)))[0], at
    if tag == DATE:
        return dt.date.fromordinal(bits - SIGN64 + _UNIX_EPOCH_DAY), at
    if tag in (AWARE, NAIVE):
        moment = _UNIX_EPOCH + (bits - SIGN64) * _MICROSECOND
        return (moment.replace(tzinfo=dt.UTC) if tag == AWARE else moment), at
    raise ValueError(f"unknown tag {tag:#04x}")


def code_end(key: bytes, at: int) -> int:
    """Give where the code that begins at `at` ends: the slow way through keys whose parts have no fixed place.

    Raises:
        StateCorrupted: There is no code at that place.
    """
    try:
        return _decode(key, at)[1]
    except (*UNDECODABLE, struct.error) as error:
        raise undecodable(key, str(error)) from error


def undecodable(key: bytes, why: str) -> StateCorrupted:
    """Give the error for bytes that are not the code of what was asked for."""
    return StateCorrupted("a key cannot be decoded", where=key[:64].hex(), why=why)


def prefix_end(prefix: bytes) -> bytes | None:
    r"""Give the end of the half-open range of all keys that begin with a prefix; None when there is no such key.

    >>> prefix_end(b"\x01\xff")
    b'\x02'
    """
    trimmed = prefix.rstrip(b"\xff")
    return trimmed[:-1] + bytes([trimmed[-1] + 1]) if trimmed else None
