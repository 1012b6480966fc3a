"""Fields of a join: which are equal, of which type, and under which names they come out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from backend.batch import published_name
from backend.boundary import in_order

_TAKEN = ("reason", "revision", "left_time", "right_time")
"""Columns that results have anyway."""


def read_on(on: Any, left: pa.Schema, right: pa.Schema) -> tuple[tuple[str, str], ...]:
    """Read the option `on` as (left name, right name).

    Raises:
        ValueError: A name is no field, given twice, or the two have types that cannot be equal.
    """
    if on is None:
        return ()
    entries = (on,) if isinstance(on, str) else in_order(on)
    if entries is None:
        raise ValueError(
            f"on={on!r}: must be a field, a list of fields and of pairs (left field, right field), or None"
        )
    pairs: list[tuple[str, str]] = []
    for entry in entries:
        pair = (entry, entry) if isinstance(entry, str) else tuple(entry) if isinstance(entry, list | tuple) else ()
        if len(pair) != 2 or not all(isinstance(name, str) for name in pair):
            raise ValueError(f"on: {entry!r} is neither a field nor (left field, right field)")
        pair = tuple(str.__str__(name) for name in pair)
        for name, schema, side in zip(pair, (left, right), ("left", "right"), strict=True):
            if name not in schema.names:
                raise ValueError(f"on: {name!r} is not a field of the {side} side; allowed are {schema.names}")
        if pair in pairs:
            raise ValueError(f"on: {entry!r} is given twice")
        equal_type(pair, left.field(pair[0]).type, right.field(pair[1]).type)
        pairs.append((pair[0], pair[1]))
    if not pairs:
        raise ValueError(f"on={on!r}: name at least one field, or give None")
    return tuple(pairs)


def equal_type(pair: tuple[str, str], left: pa.DataType, right: pa.DataType) -> pa.DataType:
    """Give the type in which two equal fields meet: the same bytes in a key mean the same value.

    Raises:
        ValueError: They are of different kinds, or of one that has no order.
    """
    left, right = _plain(left), _plain(right)
    kinds = _kind(left), _kind(right)
    if kinds[0] is None or kinds[0] != kinds[1]:
        raise ValueError(
            f"on: {pair[0]!r} is {left} and {pair[1]!r} is {right}; allowed are two integers, floats, texts, binaries, "
            "booleans, dates, or timestamps (both with a time zone or both without)"
        )
    if left == right:
        return left
    common: pa.DataType = {
        "integer": pa.int64(),
        "float": pa.float64(),
        "text": pa.string(),
        "binary": pa.binary(),
        "date": pa.date32(),
        "timestamp": pa.timestamp("us"),
        "timestamp with time zone": pa.timestamp("us", "UTC"),
    }[kinds[0]]
    return common


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _kind(kind: pa.DataType) -> str | None:
    types = pa.types
    if types.is_integer(kind):
        return "integer"
    if types.is_floating(kind):
        return "float"
    if types.is_string(kind) or types.is_large_string(kind):
        return "text"
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return "binary"
    if types.is_boolean(kind):
        return "boolean"
    if types.is_date(kind):
        return "date"
    if types.is_timestamp(kind):
        return "timestamp" if kind.tz is None else "timestamp with time zone"
    return None


def out_columns(
    left: Mapping[str, pa.DataType],
    left_out: Sequence[str],
    right: Mapping[str, pa.DataType],
    right_out: Sequence[str],
    on: Sequence[tuple[str, str]],
) -> list[tuple[pa.Field, str | None, str | None]]:
    """Name the columns that come out: left fields, then right ones.

    Equal fields of one name come out once, where the first of them stands; a name that both sides have otherwise gets
    `left_` or `right_` in front.

    Returns:
        The field, and the left and the right field that it comes from (both for an equal field, else one is None).

    Raises:
        ValueError: Two columns would have one name.
    """
    shared = {name for name, other in on if name == other}
    columns: list[tuple[pa.Field, str | None, str | None]] = []
    for name in left_out:
        if name in shared:
            columns.append((pa.field(name, equal_type((name, name), left[name], right[name])), name, name))
        else:
            columns.append((pa.field(f"left_{name}" if name in right_out else name, left[name]), name, None))
    for name in right_out:
        if name in shared and name in left_out:
            continue
        if name in shared:
            columns.append((pa.field(name, equal_type((name, name), left[name], right[name])), name, name))
        else:
            columns.append((pa.field(f"right_{name}" if name in left_out else name, right[name]), None, name))
    names = [published_name(column.name) for column, _, _ in columns]
    folded = [name.lower() for name in names]  # a and A are one to Spark
    for name in names:
        if name.lower() in _TAKEN or folded.count(name.lower()) > 1:
            raise ValueError(
                f"left_fields, right_fields: two columns of the results would be called {name!r}; rename the field, or "
                "leave it out"
            )
    return columns
