"""Fields that can be read: all texts UTF-8, all values within their types.

Parsers check what they make of bytes. Columns that come as texts may hold anything: those of Parquet files, of a user's
function, of Spark.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backend.chunks import decoded, faulty_rows, is_coded


def readable(fields: pa.StructArray, malformed: pa.Array) -> tuple[pa.StructArray, pa.Array]:
    """Return fields that can be read, and say of rows where one could not that they are malformed."""
    faulty = [column for column in fields.flatten() if _may_be_faulty(column.type) and _fault(column) is not None]
    if not faulty:
        return fields, malformed
    if any(is_coded(column.type) for column in faulty):
        fields = decoded(fields)
    faults = _faults(fields)
    if not faults:
        return fields, malformed
    reasons, bad = malformed.to_pylist(), np.zeros(len(fields), bool)
    for row, fault in faults.items():
        reasons[row], bad[row] = f"a field cannot be read: {fault}", True
    columns = [_mended(column, pa.array(bad)) for column in fields.flatten()]
    mended = pa.StructArray.from_arrays(columns, fields=list(fields.type), mask=fields.is_null())
    return mended, pa.array(reasons, pa.string())


def _may_be_faulty(kind: pa.DataType) -> bool:
    """Return whether Arrow finds anything wrong in some values of a type: of numbers and times it does not."""
    return not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_timestamp(kind))


def _faults(fields: pa.StructArray) -> dict[int, str]:
    """Find the rows that cannot be read, and what Arrow says of the first of their fields that cannot."""
    found: dict[int, str] = {}
    for column in fields.flatten():
        if _fault(column) is not None:
            for row, fault in (_not_utf8 if pa.types.is_string(column.type) else _halved)(column).items():
                found.setdefault(row, fault)
    return found


def _not_utf8(column: pa.Array) -> dict[int, str]:
    found: dict[int, str] = {}
    for row, value in enumerate(column.cast(pa.binary()).to_pylist()):
        try:
            _ = value is None or value.decode()
        except UnicodeDecodeError:
            found[row] = "Invalid UTF8 sequence at string index 0"
    return found


def _halved(column: pa.Array) -> dict[int, str]:
    def fault(low: int, high: int) -> str | None:
        # Arrow looks at all that a slice was cut from
        return _fault(column if high - low == len(column) else column.take(pa.array(np.arange(low, high))))

    rows = faulty_rows(len(column), lambda low, high: fault(low, high) is not None)
    return {row: fault(row, row + 1) or "" for row in rows}


def _fault(values: pa.Array) -> str | None:
    """Return what Arrow finds wrong in values, None where they are sound."""
    try:
        values.validate(full=True)
    except pa.ArrowInvalid as error:
        return str(error).rpartition("Invalid: ")[2]
    return None


def _mended(column: pa.Array, bad: pa.BooleanArray) -> pa.Array:
    """Return a column that can be read: what is no UTF-8 in texts replaced; nested ones null where a row is bad."""
    if _fault(column) is None:
        return column
    if not pa.types.is_string(column.type):
        return pc.if_else(bad, pa.scalar(None, column.type), column)
    received = column.cast(pa.binary()).to_pylist()
    return pa.array([None if one is None else one.decode(errors="replace") for one in received], column.type)
