"""Rows as Python has them; times that it has no date for (of the years before 1 and after 9999) are text, ISO 8601, in
UTC where they have a time zone.

Those for which Arrow has no text (its years are of 16 bits, and beyond them others) are integers, counted from 1970 in
their unit. Each value is looked at alone: what a row is does not depend on the rows beside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

_SPELLED_S = 30_000 * 31_556_952
_DAY_S = 86_400
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def python_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Give rows as dicts."""
    try:
        rows: list[dict[str, Any]] = table.to_pylist()
        return rows
    except (OverflowError, ValueError):
        columns = {name: python_values(table.column(name)) for name in table.column_names}
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def python_values(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Give a column's values."""
    try:
        values: list[Any] = column.to_pylist()
    except (OverflowError, ValueError):
        values = [_value(value) for value in column]
    return values


def arrow_value(value: Any, kind: pa.DataType) -> Any:
    """Return a value of `python_values` as Arrow takes it: a time that is text as the number that it is."""
    if not isinstance(value, str) or not pa.types.is_temporal(kind):
        return value
    unit = kind.unit if pa.types.is_timestamp(kind) else "ms" if pa.types.is_date64(kind) else "D"
    return int(np.datetime64(value.removesuffix("Z")).astype(f"datetime64[{unit}]").astype(np.int64))


def _value(value: pa.Scalar) -> Any:
    kind, types = value.type, pa.types
    if not value.is_valid:
        return None
    if types.is_map(kind):
        return [tuple(_value(part) for part in entry.values()) for entry in value.values]
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [_value(one) for one in value.values]
    if types.is_struct(kind):
        return {name: _value(part) for name, part in value.items()}
    try:
        return value.as_py()
    except (OverflowError, ValueError):
        ticks: int = value.value
        if abs(ticks) >= spelled(kind):
            return ticks
        if types.is_timestamp(kind) and kind.tz is not None:
            value = value.cast(pa.timestamp(kind.unit, "UTC"))
        return value.cast(pa.string()).as_py().replace(" ", "T", 1)


def spelled(kind: pa.DataType) -> int:
    """Return below how many units from 1970 Arrow has a right text for a time."""
    if pa.types.is_timestamp(kind):
        return _SPELLED_S * _PER_SECOND[kind.unit]
    return _SPELLED_S // _DAY_S if pa.types.is_date32(kind) else _SPELLED_S * 1000
