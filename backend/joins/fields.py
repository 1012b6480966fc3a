"""Fields of a join: which are equal, of which type, and under which names they come out."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from backend.batch import published_name
from backend.boundary import in_order
from backend.joins.sides import LEFT, RIGHT, Side

_TAKEN = ("reason", "revision", "left_time", "right_time")
"""Columns that results have anyway."""
_KINDS = {
    pa.int64(): (pa.types.is_integer,),
    pa.float64(): (pa.types.is_floating,),
    pa.string(): (pa.types.is_string, pa.types.is_large_string),
    pa.binary(): (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary),
    pa.bool_(): (pa.types.is_boolean,),
    pa.date32(): (pa.types.is_date,),
}
"""The type in which all of a kind meet -> what says that a type is of the kind; timestamps are beside it."""


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
    left, right = (kind.value_type if pa.types.is_dictionary(kind) else kind for kind in (left, right))
    common = _widest(left)
    if common is None or common != _widest(right):
        raise ValueError(
            f"on: {pair[0]!r} is {left} and {pair[1]!r} is {right}; allowed are two integers, floats, texts, binaries, "
            "booleans, dates, or timestamps (both with a time zone or both without)"
        )
    return left if left == right else common


def _widest(kind: pa.DataType) -> pa.DataType | None:
    """Give the type in which all of a kind meet; None where the kind has no order."""
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", None if kind.tz is None else "UTC")
    return next((widest for widest, checks in _KINDS.items() if any(check(kind) for check in checks)), None)


def out_columns(left: Side, right: Side) -> list[tuple[pa.Field, dict[int, str]]]:
    """Name the columns that come out: left fields, then right ones.

    Equal fields of one name come out once, where the first of them stands; a name that both sides have otherwise gets
    `left_` or `right_` in front.

    Returns:
        The field, and by number of the side the field that it comes from: both sides' for an equal field.

    Raises:
        ValueError: Two columns would have one name.
    """
    shared = {name for name, other in zip(left.on, right.on, strict=True) if name == other}
    types = [{field.name: field.type for field in side.schema} for side in (left, right)]
    columns: list[tuple[pa.Field, dict[int, str]]] = []
    for side, other in ((left, right), (right, left)):
        for name in side.out:
            kind = types[side.number][name]
            if name not in shared:
                field = pa.field(f"{side.name}_{name}" if name in other.out else name, kind)
                columns.append((field, {side.number: name}))
            elif side is left or name not in left.out:
                kind = equal_type((name, name), types[LEFT][name], types[RIGHT][name])
                columns.append((pa.field(name, kind), {LEFT: name, RIGHT: name}))
    names = [published_name(column.name) for column, _ in columns]
    folded = [name.lower() for name in names]  # a and A are one to Spark
    for name in names:
        if name.lower() in _TAKEN or folded.count(name.lower()) > 1:
            raise ValueError(
                f"left_fields, right_fields: two columns of the results would be called {name!r}; rename the field, or "
                "leave it out"
            )
    return columns
