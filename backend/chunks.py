"""Columns of Arrow tables as one array, and what is within nested ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

MOST_BYTES = 2**31 - 1
"""Of the texts of one array: Arrow's offsets have 32 bits."""
PIECE_BYTES = 2**30
"""Rows with more texts than one array has offsets for are taken in pieces of about so many bytes."""
_LARGE = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}


def one_chunk(column: Any) -> pa.Array:
    """Return a column as one array; not copied where it is one (pyarrow's `combine_chunks` copies always).

    Texts that come in several and are too many for 32-bit offsets become a large type.

    >>> column = pa.chunked_array([[1, 2]])
    >>> one_chunk(column).buffers()[1].address == column.chunk(0).buffers()[1].address
    True
    """
    if not isinstance(column, pa.ChunkedArray):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    if column.type in _LARGE and column.nbytes > MOST_BYTES:
        column = column.cast(_LARGE[column.type])
    return column.combine_chunks()


def repeated(text: str, count: int) -> pa.StringArray:
    """Return an array of one text; a fifth of the time of `pa.repeat`."""
    content = text.encode()
    if len(content) * count > MOST_BYTES:
        raise ValueError(f"{count} texts of {len(content)} bytes are too many for one array")
    ends = np.arange(count + 1, dtype=np.int32) * np.int32(len(content))
    return pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(ends), pa.py_buffer(content * count)])


def is_repeated(texts: pa.Array) -> bool:
    """Return whether an array of texts is all one text.

    >>> is_repeated(pa.array(["a", "a"])), is_repeated(pa.array(["a", "b"])), is_repeated(pa.array(["a", None]))
    (True, False, False)
    """
    if texts.type != pa.string() or texts.null_count or not len(texts):
        return False
    _, ends, data = texts.buffers()
    at = np.frombuffer(ends, np.int32)[texts.offset : texts.offset + len(texts) + 1]
    length = int(at[1] - at[0])
    if not length or not (at[1:] - at[:-1] == length).all():
        return False
    content = np.frombuffer(data, np.uint8)[at[0] : at[-1]]
    return bool((content[length:] == content[:-length]).all())


def taken_rows(table: pa.Table, rows: npt.NDArray[np.int64]) -> pa.Table:
    """Return rows of a table in an order; where a column's texts are too many for one array, in several chunks.

    Arrow puts the chunks of a column together before it takes rows of it, and fails there.
    """
    if not any(column.num_chunks > 1 and column.nbytes > MOST_BYTES for column in table.columns):
        return table.take(pa.array(rows, pa.int64()))
    batches = table.to_batches()
    ends = np.cumsum([len(batch) for batch in batches])
    piece = np.cumsum(_row_bytes(table)[rows]) // PIECE_BYTES
    cuts = np.split(rows, np.flatnonzero(np.diff(piece)) + 1)
    return pa.concat_tables([_piece(batches, ends, cut) for cut in cuts])


def _row_bytes(table: pa.Table) -> npt.NDArray[np.int64]:
    """Return the bytes of each row's texts, and on average those of nested values."""
    sizes = np.zeros(table.num_rows, np.int64)
    for column in table.columns:
        if column.type in _LARGE:
            sizes += np.asarray(pc.fill_null(pc.binary_length(column), 0))
        elif pa.types.is_nested(column.type):
            sizes += -(-column.nbytes // len(column))
    return sizes


def _piece(batches: Sequence[pa.RecordBatch], ends: npt.NDArray[Any], rows: npt.NDArray[np.int64]) -> pa.Table:
    """Return rows of few enough bytes, from the batches that they are in."""
    of = np.searchsorted(ends, rows, "right")
    parts = [batches[at].take(pa.array(rows[of == at] - (ends[at] - len(batches[at])))) for at in np.unique(of)]
    place = np.empty(len(rows), np.int64)
    place[np.argsort(of, kind="stable")] = np.arange(len(rows))
    return pa.Table.from_batches(parts, batches[0].schema).combine_chunks().take(pa.array(place))


def faulty_rows(count: int, is_faulty: Callable[[int, int], bool]) -> Iterator[int]:
    """Find the rows with a fault by halving.

    Args:
        count: How many rows there are.
        is_faulty: Tells whether a row of a half-open range has one.

    >>> list(faulty_rows(9, lambda low, high: low <= 3 < high or low <= 8 < high))
    [3, 8]
    """
    left = [(0, count)] if count else []
    while left:
        low, high = left.pop()
        if not is_faulty(low, high):
            continue
        if high - low == 1:
            yield low
        else:
            half = (low + high) // 2
            left += [(half, high), (low, half)]


def decoded(column: pa.Array) -> pa.Array:
    """Return a column, or the fields of structs, as plain values where they are dictionaries."""
    if pa.types.is_dictionary(column.type):
        return column.dictionary_decode()
    if not is_coded(column.type):
        return column
    return rebuilt(column, plain(column.type), lambda child, _: decoded(child))


def is_coded(kind: pa.DataType) -> bool:
    """Return whether a type is a dictionary, or structs of which a field is one."""
    return bool(pa.types.is_dictionary(kind) or (pa.types.is_struct(kind) and any(is_coded(f.type) for f in kind)))


def plain(kind: pa.DataType) -> pa.DataType:
    """Return the type that `decoded` gives."""
    if pa.types.is_dictionary(kind):
        return kind.value_type
    return pa.struct([field.with_type(plain(field.type)) for field in kind]) if is_coded(kind) else kind


def plain_table(table: pa.Table) -> pa.Table:
    """Return a table whose columns are no dictionaries."""
    if not any(is_coded(field.type) for field in table.schema):
        return table
    return table.cast(pa.schema([field.with_type(plain(field.type)) for field in table.schema]))


def is_str(kind: pa.DataType) -> bool:
    """Return whether a type is of texts, UTF-8."""
    return any(check(kind) for check in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view))


def is_text(kind: pa.DataType) -> bool:
    """Return whether a type is of texts or bytes, each of a length of its own."""
    others = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)
    return is_str(kind) or any(check(kind) for check in others)


def contains(kind: pa.DataType, what: Callable[[pa.DataType], bool]) -> bool:
    """Return whether a type, or one within it, is of a kind."""
    return what(kind) or any(contains(kind.field(number).type, what) for number in range(kind.num_fields))


def has_kernels(kind: pa.DataType) -> bool:
    """Return whether Arrow takes, filters and compares values of a type, and of those within it.

    It does not those of views, of intervals, and of decimals of 32 and 64 bits.
    """
    types = pa.types
    own = (types.is_string_view, types.is_binary_view, types.is_list_view, types.is_large_list_view)
    if any(check(kind) for check in (*own, types.is_interval, types.is_decimal32, types.is_decimal64)):
        return False
    if types.is_dictionary(kind):
        return has_kernels(kind.value_type)
    return all(has_kernels(kind.field(number).type) for number in range(kind.num_fields))


def rebuilt(column: pa.Array, kind: pa.DataType, change: Callable[[pa.Array, pa.DataType], pa.Array]) -> pa.Array:
    """Return a nested column of what a function makes of its children; a map with a key that comes out null is null.

    Args:
        column: Structs, lists or maps.
        kind: Of what comes: structs, lists or maps as well, with as many fields.
        change: Takes a child and the type that it is to have.
    """
    types = pa.types
    if types.is_struct(kind):
        children = [change(child, field.type) for child, field in zip(column.flatten(), kind, strict=True)]
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=column.is_null())
    if types.is_map(kind):
        column = column.take(np.arange(len(column)))  # a slice has the offsets of what it was cut from
        keys, items, mask = change(column.keys, kind.key_type), change(column.items, kind.item_type), column.is_null()
        if keys.null_count:  # a key cannot be null
            bad = np.flatnonzero(np.asarray(keys.is_null()))
            absent = np.array(mask)
            absent[np.searchsorted(np.asarray(column.offsets), bad, "right") - 1] = True
            keys, mask = pc.fill_null(keys, pa.scalar(0, keys.type)), pa.array(absent)
        return pa.MapArray.from_arrays(column.offsets, keys, items, type=kind, mask=mask)
    lengths = np.asarray(pc.fill_null(pc.list_value_length(column), 0), np.int32)
    ends = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    return pa.ListArray.from_arrays(ends, change(column.flatten(), kind.value_type), kind, mask=column.is_null())


def retyped(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Return structs, maps or lists with what a function makes of the types within; any other type as it is.

    Lists of all kinds but views become those that `rebuilt` gives.
    """

    def changed(field: pa.Field) -> pa.Field:
        return field.with_type(change(field.type))

    types = pa.types
    if types.is_struct(kind):
        return pa.struct([*map(changed, kind)])
    if types.is_map(kind):
        return pa.map_(changed(kind.key_field), changed(kind.item_field))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return pa.list_(changed(kind.value_field))
    return kind


def is_rebuilt(kind: pa.DataType) -> bool:
    """Return whether a type is one that `rebuilt` gives."""
    return bool(pa.types.is_struct(kind) or pa.types.is_map(kind) or pa.types.is_list(kind))


def other_field(found: pa.DataType, declared: pa.DataType, path: str) -> str:
    """Return the path of a field within nested values that only one of two types has, "" for none.

    Arrow's casts make null of what is not there, and drop what was not asked for.
    """
    types = pa.types
    if types.is_struct(found) and types.is_struct(declared):
        names, wanted = {field.name for field in found}, {field.name for field in declared}
        if odd := sorted(names ^ wanted):
            return f"{path}.{odd[0]}"
        pairs = [(found.field(name).type, declared.field(name).type, f"{path}.{name}") for name in sorted(wanted)]
    elif types.is_map(found) and types.is_map(declared):
        pairs = [(found.key_type, declared.key_type, path), (found.item_type, declared.item_type, path)]
    elif hasattr(found, "value_type") and hasattr(declared, "value_type"):
        pairs = [(found.value_type, declared.value_type, path)]
    else:
        return ""
    return next(filter(None, (other_field(*pair) for pair in pairs)), "")
