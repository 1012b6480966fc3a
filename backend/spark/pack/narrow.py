"""Integers and times of frames in as few bytes as their values need.

Spark copies a frame ten times on its way from the pack stage to the shard, and most of it is numbers that differ
little: offsets, event times, timestamps, numbers of streams and partitions. `narrow` gives such a column as distances
from its smallest value, and leaves out one whose values are all the same; `widen` is the inverse. The schema that was
given, and what was done, travel as metadata of the schema.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backend.batch import NO_TIME
from backend.chunks import one_chunk

_SCHEMA, _COLUMNS = b"rewind.schema", b"rewind.columns"
_WIDTHS = (np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.uint32))


class _Column(msgspec.Struct, frozen=True, array_like=True):
    """How a column is given.

    Attributes:
        at: Its place in the schema that was given.
        base: What the distances count from.
        constant: All are the base, and there is no column.
        no_time: A distance of 0 stands for `NO_TIME`, which is far from all others.
    """

    at: int
    base: int
    constant: bool
    no_time: bool


_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(list[_Column])


def narrow(rows: pa.Table) -> pa.Table:
    """Return rows, their columns of integers and times without nulls as wide as the values need."""
    changes: list[_Column] = []
    fields, columns = [], []
    for at, (field, column) in enumerate(zip(rows.schema, rows.columns, strict=True)):
        found = _distances(column, at) if _is_number(field.type) and len(column) and not column.null_count else None
        if found is None:
            fields.append(field)
            columns.append(column)
            continue
        changes.append(found[0])
        if found[1] is not None:
            fields.append(pa.field(field.name, pa.from_numpy_dtype(found[1].dtype), nullable=False))
            columns.append(pa.array(found[1]))
    if not columns:  # nothing would say how many rows there are
        return rows
    metadata = {_SCHEMA: rows.schema.serialize().to_pybytes(), _COLUMNS: _encoder.encode(changes)}
    return pa.table(columns, schema=pa.schema(fields, metadata))


def widen(rows: pa.Table) -> pa.Table:
    """Return what `narrow` was given."""
    metadata = rows.schema.metadata or {}
    if _COLUMNS not in metadata:
        return rows
    schema = pa.ipc.read_schema(pa.py_buffer(metadata[_SCHEMA]))
    changes, given = {how.at: how for how in _decoder.decode(metadata[_COLUMNS])}, iter(rows.columns)
    columns = []
    for at, field in enumerate(schema):
        how = changes.get(at)
        if how is None:
            columns.append(next(given))
        elif how.constant:
            columns.append(_array(np.full(rows.num_rows, how.base, np.int64), field.type))
        else:
            distances = np.asarray(next(given))
            values = distances.astype(np.int64) + how.base
            if how.no_time:
                values[distances == 0] = NO_TIME
            columns.append(_array(values, field.type))
    return pa.table(columns, schema=schema)


def _is_number(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        (types.is_integer(kind) and kind != pa.uint64())
        or types.is_timestamp(kind)
        or types.is_date(kind)
        or types.is_time(kind)
        or types.is_duration(kind)
    )


def _distances(column: pa.ChunkedArray, at: int) -> tuple[_Column, npt.NDArray[np.unsignedinteger] | None] | None:
    """Return how a column is given, and its distances; None where they would not be narrower."""
    array = one_chunk(column)
    if not pa.types.is_integer(array.type):
        array = array.view(pa.int64() if array.type.bit_width == 64 else pa.int32())
    values = np.asarray(array)
    low, high = int(values.min()), int(values.max())
    if low == high:
        return _Column(at, low, constant=True, no_time=False), None
    no_time = low == NO_TIME
    if no_time:
        low = int(values[values != NO_TIME].min()) - 1
    width = next((w for w in _WIDTHS if high - low <= np.iinfo(w).max), values.dtype)
    if width.itemsize >= values.itemsize:
        return None
    distances = (values - low).astype(width)
    if no_time:
        distances[values == NO_TIME] = 0
    return _Column(at, low, constant=False, no_time=no_time), distances


def _array(values: npt.NDArray[np.int64], kind: pa.DataType) -> pa.Array:
    if pa.types.is_integer(kind):
        return pa.array(values.astype(kind.to_pandas_dtype(), copy=False))
    return pa.array(values.astype(f"i{kind.bit_width // 8}", copy=False)).view(kind)
