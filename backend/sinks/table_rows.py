"""Rows as tables of other systems take them: plain types, and the newest row of each window."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from backend.batch import RESULT_FIELDS
from backend.chunks import contains, is_rebuilt, rebuilt
from backend.keys import encode_columns

ROW_KEY = "row_key"
"""Column that says which rows are one window's, in tables that keep the newest: a digest of 128 bits, as hex."""
START = "window_start"
_LAST_US = 2**63 - 1


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return a type that Delta, Iceberg and SQL have, in which every value of a type fits but times that are beyond.

    Times of day and durations, and decimals of more than 38 digits, are not in all of them: see `unfit`.

    >>> plain_type(pa.uint16()), plain_type(pa.timestamp("ms", "UTC"))
    (DataType(int32), TimestampType(timestamp[us, tz=UTC]))
    """
    types = pa.types
    if types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if types.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz is not None else None)
    if types.is_struct(kind):
        return pa.struct([pa.field(child.name, plain_type(child.type)) for child in kind])
    if types.is_map(kind):
        return pa.map_(plain_type(kind.key_type), plain_type(kind.item_type))
    if _is_list(kind):
        return pa.list_(plain_type(kind.value_type))
    if types.is_time(kind):
        return pa.time64("us")
    if types.is_decimal32(kind) or types.is_decimal64(kind):
        return pa.decimal128(kind.precision, kind.scale)
    return _PLAIN.get(kind, pa.binary() if types.is_fixed_size_binary(kind) else kind)


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    views = types.is_list_view(kind) or types.is_large_list_view(kind)
    return bool(views or types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


_PLAIN = {
    pa.null(): pa.string(),
    pa.int8(): pa.int32(),
    pa.int16(): pa.int32(),
    pa.uint8(): pa.int32(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
    pa.large_string(): pa.string(),
    pa.large_binary(): pa.binary(),
    pa.string_view(): pa.string(),
    pa.binary_view(): pa.binary(),
    pa.date64(): pa.date32(),
}


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """Return a schema in plain types, nothing required and without metadata."""
    return pa.schema([pa.field(field.name, plain_type(field.type)) for field in schema])


def unfit(schema: pa.Schema, *, times: bool, cases: bool, within: bool = False) -> str:
    """Say which column a table cannot have; empty when it can have all.

    Args:
        schema: In plain types.
        times: It has a type for times of day.
        cases: It tells names apart that differ in upper and lower case only.
        within: Where it does not, it does not for fields within a column either.
    """
    for field in schema:
        if contains(field.type, lambda kind: _unfit(kind, times)):
            return f"column {field.name!r}: {field.type} is no type that the table can have; cast it"
    for names in [] if cases else [schema.names, *(_structs(schema) if within else [])]:
        last = {name.lower(): name for name in names}
        for name in names:
            if last[name.lower()] != name:
                return f"columns {name!r} and {last[name.lower()]!r}: the table takes them for one; rename one"
    return ""


def _unfit(kind: pa.DataType, times: bool) -> bool:
    types = pa.types
    return types.is_duration(kind) or types.is_decimal256(kind) or (types.is_time(kind) and not times)


def _structs(fields: Iterable[pa.Field]) -> list[list[str]]:
    """Return the names of the fields of each struct within."""
    kinds = [field.type for field in fields]
    own = [[one.name for one in kind] for kind in kinds if pa.types.is_struct(kind)]
    return own + [names for kind in kinds for names in _structs(kind.field(at) for at in range(kind.num_fields))]


def plain(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return rows in plain types; times that no timestamp of microseconds has are null, a map with one as a key is."""
    columns = [_cast(batch.column(field.name), field.type) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return values in their plain type; fractions of a microsecond are cut off, wherever they are."""
    types = pa.types
    if types.is_dictionary(column.type):
        return _cast(column.cast(column.type.value_type), kind)
    if column.type == kind:
        return column
    if is_rebuilt(kind):
        return rebuilt(column, kind, _cast)
    if types.is_timestamp(kind) and column.type.unit in ("s", "ms"):
        most = _LAST_US // {"s": 1_000_000, "ms": 1_000}[column.type.unit]
        ticks = column.cast(pa.int64())
        within = pc.and_(pc.less_equal(ticks, most), pc.greater_equal(ticks, -most))
        column = pc.if_else(within, column, pa.scalar(None, column.type))
    return column.cast(kind, safe=not types.is_temporal(kind))


_FIRST_S, _LAST_S = -62_135_596_800, 253_402_300_799
"""The years 1 to 9999, in seconds since the epoch."""
_DAY_S = 86_400


def dated(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Return a column of `plain`, null where it has a time or date outside of the years 1 to 9999."""
    if pa.types.is_timestamp(column.type):
        ticks, first, last = column.cast(pa.int64()), _FIRST_S * 1_000_000, _LAST_S * 1_000_000 + 999_999
    elif pa.types.is_date32(column.type):
        ticks, first, last = column.cast(pa.int32()), _FIRST_S // _DAY_S, _LAST_S // _DAY_S
    else:
        return column
    within = pc.and_(pc.greater_equal(ticks, first), pc.less_equal(ticks, last))
    return pc.if_else(within, column, pa.scalar(None, column.type))


def dated_within(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return a column of dates, or of what has some within, null where one is outside of the years 1 to 9999."""
    if is_rebuilt(kind):
        return rebuilt(column, kind, dated_within) if contains(kind, pa.types.is_date) else column
    return dated(column) if pa.types.is_date(kind) else column


def row_keys(rows: pa.Table, names: Sequence[str]) -> pa.Array:
    """Return `ROW_KEY` of rows as the operator's time has it, in milliseconds: equal where all the columns are."""
    parts = [_ticks(rows.column(name)) for name in names]
    return pa.array([xxhash.xxh3_128_hexdigest(key) for key in encode_columns(parts).to_pylist()], pa.string())


def _ticks(column: pa.ChunkedArray) -> pa.ChunkedArray:
    kind = column.type
    return column.cast(pa.int64(), safe=False) if pa.types.is_timestamp(kind) or pa.types.is_uint64(kind) else column


def newest(rows: pa.Table, names: Sequence[str]) -> pa.Table:
    """Return the last row of each key, with `ROW_KEY` behind.

    Args:
        rows: In the order in which they were made.
        names: Columns that make the key.
    """
    keys = row_keys(rows, names)
    codes: npt.NDArray[np.int64] = np.asarray(keys.dictionary_encode().indices, np.int64)
    last = np.zeros(int(codes.max(initial=-1)) + 1, np.int64)
    last[codes] = np.arange(len(codes))  # of equal places the last one written stays
    return rows.append_column(ROW_KEY, keys).take(pa.array(np.sort(last)))


def withdrawn(rows: pa.Table, windows: bool) -> pa.Array:
    """Return which rows only take back what was there.

    Args:
        rows: Results.
        windows: They are of windows: a column `reason` is ours.
    """
    if not windows:
        return pa.array(np.zeros(rows.num_rows, bool))
    return pc.equal(rows.column(RESULT_FIELDS[0].name), "retracted").combine_chunks()
