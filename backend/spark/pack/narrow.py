"""Integers, times and texts of frames in as few bytes as their values need.

Spark copies a frame ten times on its way from the pack stage to the shard, and most of it is numbers that differ
little: offsets, event times, timestamps, numbers of streams and partitions. `narrow` gives such a column as distances
from its smallest value, or from the event times where it follows these, and leaves out one whose distances are all the
same. Texts that come again and again, as keys do, are numbers, with each text once beside them. `widen` is the inverse.
The schema that was given, and what was done, travel as metadata of the schema.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backend.batch import NO_TIME, TIME
from backend.chunks import decoded, is_coded, one_chunk, plain

_SCHEMA, _COLUMNS = b"rewind.schema", b"rewind.columns"
_WIDTHS = (np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.uint32))
SAMPLE = 1_024
"""Texts that are looked at first to tell whether they come again."""

Ints = npt.NDArray[np.signedinteger]


class _Column(msgspec.Struct, frozen=True, array_like=True):
    """How a column of numbers is given.

    Attributes:
        at: Its place in the schema that was given.
        base: What the distances count from.
        constant: All distances are 0, and there is no column.
        no_time: A distance of 0 stands for `NO_TIME`, which is far from all others.
        from_time: They count from the event time of the row and the base, not from the base alone.
    """

    at: int
    base: int
    constant: bool
    no_time: bool
    from_time: bool


Narrowed = tuple[_Column, npt.NDArray[np.unsignedinteger] | None]
"""How a column is given, and its distances; None where all are the same."""
_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(list[_Column])


def narrow(rows: pa.Table, frames: int = 1) -> pa.Table:
    """Return rows, their columns of integers and times without nulls as wide as the values need.

    Args:
        rows: If they have event times, these stand before what follows them. Dictionaries are what they stand for.
        frames: How many the rows are cut into: each has all the texts.
    """
    changes: list[_Column] = []
    fields, columns = [], []
    times: Ints | None = None
    for at, (field, column) in enumerate(zip(rows.schema, rows.columns, strict=True)):
        values = _numbers(column) if _is_number(field.type) and len(column) and not column.null_count else None
        found = _narrowest(values, times, at) if values is not None else None
        if field.name == TIME and field.type == pa.int64():
            times = values
        if found is not None:
            changes.append(found[0])
            if found[1] is not None:
                fields.append(pa.field(field.name, pa.from_numpy_dtype(found[1].dtype), nullable=False))
                columns.append(pa.array(found[1]))
            continue
        texts = _numbered(one_chunk(column), frames) if plain(field.type) in (pa.string(), pa.binary()) else None
        if texts is None and is_coded(field.type):
            texts = decoded(one_chunk(column))
        fields.append(field if texts is None else pa.field(field.name, texts.type))
        columns.append(column if texts is None else texts)
    if not columns:  # nothing would say how many rows there are
        return rows
    schema = pa.schema([f.with_type(plain(f.type)) for f in rows.schema], rows.schema.metadata)
    metadata = {_SCHEMA: schema.serialize().to_pybytes(), _COLUMNS: _encoder.encode(changes)}
    return pa.table(columns, schema=pa.schema(fields, metadata))


def widen(rows: pa.Table, *, coded: bool = False) -> pa.Table:
    """Return what `narrow` was given, dictionaries as what they stand for.

    Args:
        rows: What it gave.
        coded: Texts that are numbers are left so, as dictionaries.
    """
    metadata = rows.schema.metadata or {}
    if _COLUMNS not in metadata:
        return rows
    schema = pa.ipc.read_schema(pa.py_buffer(metadata[_SCHEMA]))
    changes, given = {how.at: how for how in _decoder.decode(metadata[_COLUMNS])}, iter(rows.columns)
    columns: list[pa.Array | pa.ChunkedArray] = []
    times: Ints | None = None
    for at, field in enumerate(schema):
        how = changes.get(at)
        if how is None:
            column = next(given)
            if column.type != field.type:
                kind = pa.dictionary(pa.int32(), field.type) if coded else field.type
                column = one_chunk(column).cast(kind)
            columns.append(column)
        else:
            columns.append(_array(_values(how, None if how.constant else next(given), times, len(rows)), field.type))
        if field.name == TIME:
            times = np.asarray(columns[-1])
    if coded:
        schema = pa.schema([f.with_type(c.type) for f, c in zip(schema, columns, strict=True)], schema.metadata)
    return pa.table(columns, schema=schema)


def _values(how: _Column, column: pa.ChunkedArray | None, times: Ints | None, count: int) -> Ints:
    """Return the numbers that a column stands for."""
    base = np.int64(how.base) if times is None or not how.from_time else times + how.base
    if column is None:
        return np.full(count, base, np.int64)
    distances = np.asarray(column)
    values = distances.astype(np.int64) + base
    if how.no_time:
        values[distances == 0] = NO_TIME
    return values


def _is_number(kind: pa.DataType) -> bool:
    types = pa.types
    if types.is_integer(kind):
        return bool(kind != pa.uint64())
    return bool(types.is_temporal(kind) and not types.is_interval(kind))


def _numbers(column: pa.ChunkedArray) -> Ints:
    array = one_chunk(column)
    if not pa.types.is_integer(array.type):
        array = array.view(pa.int64() if array.type.bit_width == 64 else pa.int32())
    return np.asarray(array)


def _numbered(texts: pa.Array, frames: int) -> pa.DictionaryArray | None:
    """Return texts as numbers of each text; None where that would not be half as long in so many frames."""
    if pa.types.is_dictionary(texts.type):
        coded = texts
        if coded.dictionary.null_count:  # Arrow does not put such dictionaries together
            return None
        length = np.asarray(pc.binary_length(coded.dictionary).fill_null(0), np.int64)
        size = 4 * len(coded) + int(np.take(length, np.asarray(coded.indices.drop_null())).sum())
    else:
        some = texts[:SAMPLE]
        if len(some.dictionary_encode().dictionary) * 2 > len(some):
            return None
        coded, size = texts.dictionary_encode(), texts.nbytes
    width = next(w for w in _WIDTHS if len(coded.dictionary) <= np.iinfo(w).max)
    if (coded.dictionary.nbytes * frames + len(coded) * width.itemsize) * 2 > size:
        return None
    return pa.DictionaryArray.from_arrays(coded.indices.cast(pa.from_numpy_dtype(width)), coded.dictionary)


def _narrowest(values: Ints, times: Ints | None, at: int) -> Narrowed | None:
    """Return how a column is given, and its distances; None where they would not be narrower."""
    own = _distances(values, None, at)
    if times is None or values.dtype != np.int64 or (own is not None and _bytes(own) < 2):
        return own
    beside = _distances(values, times, at)
    return beside if beside is not None and (own is None or _bytes(beside) < _bytes(own)) else own


def _bytes(found: Narrowed) -> int:
    return 0 if found[1] is None else found[1].itemsize


def _distances(values: Ints, times: Ints | None, at: int) -> Narrowed | None:
    """Return how a column is given by its distances, from the event times if there are some, and these."""
    low, high = int(values.min()), int(values.max())
    no_time = low == NO_TIME < high
    absent = values == NO_TIME if no_time else None
    counted = values
    if times is not None:
        first, last = int(times.min()), int(times.max())
        floor = int(values[~absent].min()) if absent is not None else low
        if max(abs(high - first), abs(floor - last)) >= 2**62:  # the differences would not be int64
            return None
        counted = values - times  # of `NO_TIME` any number
    if absent is not None or times is not None:
        those = counted[~absent] if absent is not None else counted
        low, high = int(those.min()), int(those.max())
    if low == high and not no_time:
        return _Column(at, low, constant=True, no_time=False, from_time=times is not None), None
    if no_time:
        low -= 1
    width = next((w for w in _WIDTHS if high - low <= np.iinfo(w).max), values.dtype)
    if width.itemsize >= values.itemsize:
        return None
    distances: npt.NDArray[np.unsignedinteger] = (counted - low).astype(width)
    if absent is not None:
        distances[absent] = 0
    return _Column(at, low, constant=False, no_time=no_time, from_time=times is not None), distances


def _array(values: npt.NDArray[np.int64], kind: pa.DataType) -> pa.Array:
    return pa.array(values.astype(f"i{kind.bit_width // 8}", copy=False)).view(kind)
