"""JSON values as columns: the one parser of JSON, for every source, stream and replay.

A value must be one JSON object as the standard has it (RFC 8259), in UTF-8; what is not is malformed. Fields are found
by name, the last of one name counts, missing ones are null. What a field may be follows Spark's `from_json`:

=================== ================================================================================================
string              a text; of anything else its JSON, numbers as they are spelled
integers            a number without fraction and exponent, within the type's range
float, double       a number; the texts NaN, Infinity, +Infinity, -Infinity, +INF, -INF
decimal             a number, or a text that is one, rounded half up; within the type's precision
boolean             true, false
date, timestamp     a text as ISO 8601 has it, also shortened (`2013`, `2013-1-5`, `2013-01-05T1:02:03.5+01:00`), years
                    1 to 9999; without a zone in the session's; a timestamp also a whole number of seconds
binary              a text in base64
struct, array, map  an object, an array, an object
=================== ================================================================================================

A field that is something else makes the whole value malformed. `from_json` is not followed where it takes what is no
standard JSON (`NaN`, single quotes), wraps a `tinyint` around, fills in today for a time alone, and spells numbers in a
text anew.

pyarrow parses many values at once, but not all of this, and it takes many values or none. So a block in which it finds
an error, or in which there is what it would take otherwise (looked for by name), is halved, and a few rows are parsed
one by one with Python's own parser. What a value becomes does not depend on the values beside it: a replay cuts blocks
elsewhere.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from decimal import ROUND_HALF_UP, Context, Decimal
from functools import cache, lru_cache, partial
from itertools import accumulate
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from backend.chunks import contains, is_rebuilt, one_chunk, rebuilt

FEW_ROWS = 32
"""A block of so many rows is parsed row by row when it fails."""
BLOCK_BYTES = 4 * 1024 * 1024
"""A longer block is halved at once."""
MAX_DEPTH = 500
"""Levels of nesting; deeper values are malformed."""

_OPENED, _CLOSED, _BREAK = b"{}\n"
_ZERO, _NINE = np.frombuffer(b"09", np.uint8)
_CONSTANT = re.compile(rb"[:,\[]\s*[-+]?(?:NaN|Inf)")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)  # to the end where it does not end: looked at once
_LEVELS = {"{": 1, "[": 1, "}": -1, "]": -1}
_INTEGER = re.compile(r"-?\d+", re.ASCII)
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,4})?", re.ASCII)
_DATE = re.compile(r"(\d{4})(?:-(\d{1,2})(?:-(\d{1,2})(?:[ T].*)?)?)?", re.DOTALL | re.ASCII)
_TIMESTAMP = re.compile(
    r"(\d{4})(?:-(\d{1,2})(?:-(\d{1,2})(?:[ T](\d{1,2}):(\d{1,2})(?::(\d{1,2})(?:\.(\d*))?[ ]?(.+)?)?)?)?)?",
    re.ASCII,
)
_OFFSET = re.compile(r"(?:UTC|GMT)?([+-])(\d{1,2})(?::?([0-5]\d))?(?::?([0-5]\d))?", re.ASCII)
_PLAIN_DATE = r"[12]\d{3}-\d\d-\d\d"
_PLAIN_TIME = r"[12]\d{3}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d{1,6})?"
_ZONE = r"(Z|[+-](0\d|1[0-7]):[0-5]\d)"
_SPECIAL = {
    "NaN": float("nan"),
    **dict.fromkeys(("Infinity", "+Infinity", "+INF"), float("inf")),
    **dict.fromkeys(("-Infinity", "-INF"), float("-inf")),
}
_UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST_S, _LAST_S = -62_135_596_800, 253_402_300_799
"""The years 1 to 9999."""
_RULED = datetime(2038, 1, 1)
"""From here on pyarrow has no daylight saving: it knows what was written down, and no rules."""
_MICRO = timedelta(microseconds=1)
_NAIVE_ZERO = _UNIX_EPOCH.replace(tzinfo=None)
_FIRST_US, _LAST_US = (_FIRST_S + 86_400) * 1_000_000, (_LAST_S - 86_400) * 1_000_000
"""Of these local times Python has dates, and pyarrow an instant in every zone."""
_CYCLE_US = 146_097 * 86_400 * 1_000_000
"""Four hundred years: the calendar begins anew, on the same day of the week."""
_MOST_US = 2**63 - 1

_REST, _HALF = (1 << 29) - 1, 1 << 28
"""Of a float's 64 bits those that 32 do not have, and what they are half-way between two."""
_LEAST_NORMAL = 2.0**-126

Convert = Callable[[Any], Any]


class Malformed(ValueError):
    """A value is not what its type allows."""


class _Number(str):
    """A number as it is spelled."""


def _refused(text: str) -> Any:
    raise Malformed(text)


_decoder = json.JSONDecoder(parse_float=_Number, parse_int=_Number, parse_constant=_refused)
_encoder = msgspec.json.Encoder(enc_hook=lambda number: msgspec.Raw(number.encode()))
"""Writes what was parsed without blanks, numbers as they were spelled."""


class JsonColumns:
    """Parse values of some fields.

    Args:
        schema: The fields with their Arrow types, as `pyspark.sql.pandas.types.to_arrow_schema` gives them.
        timezone: The session's: of times without a zone.

    Raises:
        ValueError: JSON has no counterpart of a type; or the time zone is unknown.
    """

    def __init__(self, schema: pa.Schema, timezone: str = "UTC") -> None:
        self._type = pa.struct(list(schema))
        self._timezone = timezone
        self._zone = zone_of(timezone)
        apart = contains(self._type, lambda kind: pa.types.is_map(kind) or pa.types.is_binary(kind))
        self._wire = None if apart else pa.schema(list(_wire(self._type)))  # None: pyarrow does not read these
        self._decimals = contains(self._type, pa.types.is_decimal)
        _converter(self._type, self._zone)  # checks the types

    def __call__(self, values: pa.Array) -> pa.StructArray:
        """Return the fields of each value; null where it is null or malformed.

        Args:
            values: Binary, or large binary.
        """
        parts = self._parsed(values.cast(pa.binary()))
        return parts[0] if len(parts) == 1 else pa.concat_arrays(parts)

    def _parsed(self, values: pa.Array) -> list[pa.StructArray]:
        if self._wire is None:
            return [self._one_by_one(values)]
        found = self._block(values)
        if found is not None:
            return [found]
        if len(values) <= FEW_ROWS:
            return [self._one_by_one(values)]
        half = len(values) // 2
        return [*self._parsed(values.slice(0, half)), *self._parsed(values.slice(half))]

    def _block(self, values: pa.Array) -> pa.StructArray | None:
        """Parse a block at once; None where it has to be looked at in parts."""
        data = _lines(values)
        if data is None or self._odd(data, values):
            return None
        options = pj.ParseOptions(explicit_schema=self._wire, unexpected_field_behavior="ignore")
        reading = pj.ReadOptions(use_threads=False, block_size=len(data) + 1)
        try:
            table = pj.read_json(pa.BufferReader(data), read_options=reading, parse_options=options)
            if table.num_rows != len(values):  # one line was two objects
                return None
            if self._decimals:  # its parser does not look whether they are within their precision
                table.validate(full=True)
            columns = [
                _converted(one_chunk(column), field.type, self._timezone)
                for column, field in zip(table.columns, self._type, strict=True)
            ]
        except pa.ArrowInvalid:
            return None
        return pa.StructArray.from_arrays(columns, fields=list(self._type))

    def _odd(self, data: bytes, values: pa.Array) -> bool:
        """Check whether pyarrow may take something otherwise than said above."""
        if not data.isascii():
            try:
                data.decode()
            except UnicodeDecodeError:
                return True
        # one byte is looked for several times as fast as three
        constants = (b"N" in data and b"NaN" in data) or (b"I" in data and b"Inf" in data)
        if constants and _CONSTANT.search(data):
            return True
        if len(data) <= MAX_DEPTH or int(pc.max(pc.binary_length(values)).as_py()) <= MAX_DEPTH:
            return False
        opened = pc.add(pc.count_substring(values, "{"), pc.count_substring(values, "["))
        return int(pc.max(opened).as_py()) > MAX_DEPTH

    def _one_by_one(self, values: pa.Array) -> pa.StructArray:
        convert = _converter(self._type, self._zone)
        rows = [None if value is None else _row(value, convert) for value in values.to_pylist()]
        return pa.array(rows, self._type)


def _row(value: bytes, convert: Convert) -> Any:
    try:
        text = value.decode()
        if text.count("{") + text.count("[") > MAX_DEPTH and _depth(text) > MAX_DEPTH:
            return None
        found = _decoder.decode(text)
        return convert(found) if found is not None else None
    except ValueError:
        return None


def _depth(text: str) -> int:
    """Return the deepest nesting."""
    return max(accumulate((_LEVELS.get(character, 0) for character in _STRING.sub("", text)), initial=0))


def _lines(values: pa.Array) -> bytes | None:
    """Return the values one per line; None for a long block, or where one is not between braces or has a line break."""
    if values.null_count or (values.nbytes > BLOCK_BYTES and len(values) > FEW_ROWS):
        return None
    data: bytes = pc.binary_join(pa.ListArray.from_arrays([0, len(values)], values), b"\n")[0].as_py()
    seen = np.frombuffer(data, np.uint8)
    breaks = np.flatnonzero(seen == _BREAK)
    fine = data[:1] == b"{" and data[-1:] == b"}" and len(breaks) == len(values) - 1
    return data if fine and (seen[breaks - 1] == _CLOSED).all() and (seen[breaks + 1] == _OPENED).all() else None


# ---- what pyarrow reads, and what that becomes


def _wire(kind: pa.DataType) -> pa.DataType:
    """Return the type as which pyarrow reads a type."""
    if pa.types.is_timestamp(kind) or pa.types.is_date32(kind):
        return pa.string()
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _wire(field.type)) for field in kind])
    return pa.list_(pa.field(kind.value_field.name, _wire(kind.value_type))) if pa.types.is_list(kind) else kind


def _converted(column: pa.Array, kind: pa.DataType, timezone: str) -> pa.Array:
    """Return what pyarrow read as the type that is wanted.

    Raises:
        ArrowInvalid: That needs a look at each row; or one has no such value, such as a 30th of February.
    """
    if column.type == kind:
        return column
    if is_rebuilt(kind):
        return rebuilt(column, kind, lambda child, wanted: _converted(child, wanted, timezone))
    if pa.types.is_date32(kind) and _all(column, _PLAIN_DATE):
        return column.cast(kind)
    if pa.types.is_timestamp(kind) and kind.tz is not None and _all(column, _PLAIN_TIME, _ZONE):
        return column.cast(kind)
    if pa.types.is_timestamp(kind) and _all(column, _PLAIN_TIME):
        return instants(column.cast(pa.timestamp("us")), timezone) if kind.tz is not None else column.cast(kind)
    raise pa.ArrowInvalid("the texts are not alike")


def _all(column: pa.Array, pattern: str, zone: str = "") -> bool:
    """Check whether all texts are of a pattern, with a zone behind it."""
    if _alike(column, pattern, zone):
        return True
    return bool(pc.all(pc.match_substring_regex(column, f"^{pattern}{zone}$")).as_py() is not False)


def _alike(column: pa.Array, pattern: str, zone: str) -> bool:
    """Check whether the first text is of a pattern and the others differ from it in digits: sooner said than of each.

    Returns:
        False where that is not known, too.
    """
    count = len(column)
    if not count or column.null_count:
        return False
    first = re.fullmatch(f"({pattern}){zone}".encode(), column[0].as_buffer().to_pybytes())
    if first is None:
        return False
    _, starts, data = column.buffers()
    places = np.frombuffer(starts, np.int32)[column.offset : column.offset + count + 1]
    width = len(first[0])
    if (np.diff(places) != width).any():
        return False
    texts = np.frombuffer(data, np.uint8)[places[0] : places[-1]].reshape(count, width)
    digits = texts - _ZERO <= _NINE - _ZERO
    digits[:, 0] = digits[:, first.end(1) :] = False  # the millennium and the zone are the first one's
    return bool(((texts == texts[0]) | (digits & digits[0])).all())


# ---- one value at a time


def _converter(kind: pa.DataType, zone: tzinfo) -> Convert:
    """Return what checks and converts what Python's parser gives; it raises `Malformed`.

    Raises:
        ValueError: JSON has no counterpart of the type.
    """
    if pa.types.is_struct(kind):
        return partial(_struct, {field.name: _nullable(_converter(field.type, zone)) for field in kind})
    if pa.types.is_list(kind):
        return partial(_list, _nullable(_converter(kind.value_type, zone)))
    if pa.types.is_map(kind) and pa.types.is_string(kind.key_type):
        return partial(_map, _nullable(_converter(kind.item_type, zone)))
    if pa.types.is_signed_integer(kind):
        return partial(_integer, 1 << (kind.bit_width - 1))
    if pa.types.is_decimal(kind):
        return partial(_decimal, kind.precision, kind.scale)
    if pa.types.is_timestamp(kind):
        return partial(_timestamp, zone if kind.tz is not None else None)
    simple: list[tuple[Callable[[pa.DataType], bool], Convert]] = [
        (pa.types.is_string, _text),
        (pa.types.is_boolean, _boolean),
        (pa.types.is_float32, _single),
        (pa.types.is_floating, _float),
        (pa.types.is_date32, _date),
        (pa.types.is_binary, _bytes),
        (pa.types.is_null, _refused),
    ]
    for fits, convert in simple:
        if fits(kind):
            return convert
    raise ValueError(f"value: JSON has no counterpart of {kind}")


def _nullable(convert: Convert) -> Convert:
    return lambda value: None if value is None else convert(value)


def _struct(fields: Mapping[str, Convert], value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise Malformed
    return {name: convert(value.get(name)) for name, convert in fields.items()}


def _list(convert: Convert, value: Any) -> list[Any]:
    if type(value) is not list:
        raise Malformed
    return [convert(one) for one in value]


def _map(convert: Convert, value: Any) -> list[tuple[str, Any]]:
    if type(value) is not dict:
        raise Malformed
    return [(_text(name), convert(one)) for name, one in value.items()]


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else _encoder.encode(value).decode()
    text.encode()  # half of a surrogate pair is no text
    return str(text)


def _boolean(value: Any) -> bool:
    if type(value) is not bool:
        raise Malformed
    return value


def _integer(bound: int, value: Any) -> int:
    if type(value) is not _Number or len(value) > 20 or not _INTEGER.fullmatch(value):
        raise Malformed
    found = int(value)
    if not -bound <= found < bound:
        raise Malformed
    return found


def _float(value: Any) -> float:
    if type(value) is _Number:
        return float(value)
    if type(value) is not str or value not in _SPECIAL:
        raise Malformed
    return _SPECIAL[value]


def _single(value: Any) -> float:
    """Return the nearest of 32 bits, as pyarrow's parser does: the one of 64 bits may lie between two of them."""
    found = _float(value)
    if type(value) is _Number:
        (bits,) = struct.unpack(">Q", struct.pack(">d", found))
        if bits & _REST == _HALF or abs(found) < _LEAST_NORMAL:
            return float(pa.scalar(str(value)).cast(pa.float32()).as_py())
    return found


def _decimal(precision: int, scale: int, value: Any) -> Decimal:
    if not isinstance(value, str) or len(value) > 1_000 or not _NUMBER.fullmatch(value):
        raise Malformed
    context = Context(prec=2_000, rounding=ROUND_HALF_UP)
    found = Decimal(value)
    if found and found.adjusted() >= precision - scale:
        raise Malformed
    found = found.quantize(Decimal(1).scaleb(-scale), context=context)
    if len(found.as_tuple().digits) > precision:
        raise Malformed
    return found


def _bytes(value: Any) -> bytes:
    if type(value) is not str or len(value) % 4:
        raise Malformed
    return base64.b64decode(value, validate=True)


def _date(value: Any) -> int:
    found = _DATE.fullmatch(value.strip()) if type(value) is str else None
    if found is None:
        raise Malformed
    year, month, day = (int(part or 1) for part in found.groups())
    return (datetime(year, month, day, tzinfo=UTC) - _UNIX_EPOCH).days


def _timestamp(zone: tzinfo | None, value: Any) -> int:
    """Return microseconds since the epoch; without a zone those of the local time."""
    if type(value) is _Number and zone is not None and _INTEGER.fullmatch(value) and len(value) <= 13:
        seconds = int(value)
        if not _FIRST_S <= seconds <= _LAST_S:
            raise Malformed(value)
        return seconds * 1_000_000
    found = _TIMESTAMP.fullmatch(value.strip()) if type(value) is str else None
    if found is None:
        raise Malformed
    *parts, fraction, place = found.groups()
    year, month, day, hour, minute, second = (
        int(part) if part else least for part, least in zip(parts, (1, 1, 1, 0, 0, 0), strict=True)
    )
    if place is not None and zone is None:
        raise Malformed
    own = zone_of(place) if place is not None else zone or UTC
    micros = int(((fraction or "") + "000000")[:6])
    return instant(datetime(year, month, day, hour, minute, second, micros), own)


def instant(local: datetime, zone: tzinfo) -> int:
    """Return the microseconds since the epoch of a local time; of two the earlier, in a gap as far behind it."""
    return (local.replace(tzinfo=zone) - _UNIX_EPOCH) // _MICRO


def instants(local: pa.Array, timezone: str) -> pa.Array:
    """Return local times (`timestamp[us]`) as instants, as `instant` does; the first or the last one of what is beyond.

    Args:
        local: Without a zone.
        timezone: Of the session.
    """
    kind = pa.timestamp("us", "UTC")
    zone = zone_of(timezone)
    given = np.asarray(pc.fill_null(local.cast(pa.int64()), 0), np.int64)
    if not isinstance(zone, ZoneInfo):
        apart = int((zone.utcoffset(None) or timedelta()) / _MICRO)
        there = np.clip(given, -_MOST_US + max(apart, 0), _MOST_US + min(apart, 0)) - apart
        return pa.array(there, mask=np.asarray(local.is_null())).cast(kind)
    near = pc.if_else(pa.array((given >= _FIRST_US) & (given <= _LAST_US)), local, pa.scalar(None, local.type))
    found = pc.assume_timezone(near, zone.key, ambiguous="earliest", nonexistent="latest").cast(kind)
    back = pc.local_timestamp(found.cast(pa.timestamp("us", zone.key)))
    other = pc.or_(pc.not_equal(back, local), pc.greater_equal(local, pa.scalar(_RULED, pa.timestamp("us"))))
    rows = np.flatnonzero(np.asarray(pc.and_(local.is_valid(), pc.fill_null(other, True))))
    if not len(rows):
        return found
    ticks = found.cast(pa.int64()).to_pylist()
    for row, moment in zip(rows.tolist(), given[rows].tolist(), strict=True):
        # Python has dates of ten thousand years: what is beyond has a zone's rules as so many cycles before or after
        cycles = max(0, -((_LAST_US - moment) // _CYCLE_US)) - max(0, -((moment - _FIRST_US) // _CYCLE_US))
        at = instant(_NAIVE_ZERO + (moment - cycles * _CYCLE_US) * _MICRO, zone) + cycles * _CYCLE_US
        ticks[row] = min(max(at, -_MOST_US), _MOST_US)
    return pa.array(ticks, pa.int64()).cast(kind)


@cache
def _regions() -> frozenset[str]:
    """Return the names of regions: not what a host calls its own, nor files beside them."""
    return frozenset(available_timezones() - {"localtime", "posixrules", "Factory"})


@lru_cache(maxsize=64)
def zone_of(name: str) -> tzinfo:
    """Return a time zone by its name as Java has it: a region, an offset, `Z`.

    Raises:
        ValueError: There is none.
    """
    if name in ("Z", "UTC", "GMT", "Etc/UTC"):
        return UTC
    offset = _OFFSET.fullmatch(name)
    if offset is not None:
        sign, hours, minutes, seconds = offset.groups()
        apart = timedelta(hours=int(hours), minutes=int(minutes or 0), seconds=int(seconds or 0))
        if apart <= timedelta(hours=18):
            return timezone(-apart if sign == "-" else apart)
    else:
        try:
            if name in _regions():
                return ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            pass
    raise ValueError(f"spark.sql.session.timeZone={name!r}: is no time zone")
