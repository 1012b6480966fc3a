"""The row codec: the fields of a row as one value, written and read by columns.

Layout of a value (format 1), for the leaves of the schema in order; a struct is a leaf for its presence, then its
fields, so that only lists and maps are leaves of their own::

    +--------+-------------------+-------------------+--------------------------+-----------------+
    | format | nulls, 1 bit each | fixed-width cells | u32 lengths of variable  | variable cells, |
    | 01     | little bit first  | little-endian     | cells, but for the last  | one by one      |
    +--------+-------------------+-------------------+--------------------------+-----------------+

A bool is one byte. A null cell is zeros or has no bytes, so equal rows are equal bytes: digests rest on that. Lists and
maps are MessagePack of their plain values (timestamps as int64, decimals as text): right, but not fast. The names and
types of the fields are the manifest's to keep; the value only has the format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backend.chunks import is_str, is_text
from backend.errors import UNDECODABLE, StateCorrupted, UnknownFormat, ValueInvalid, unknown_format
from backend.keys import beside, joined, to_binary, to_keys

FORMAT = 1
_MAX_BATCH_BYTES = 2**30
"""Arrow's binary offsets are 32 bits: larger batches are encoded and decoded in parts."""
_DECODE_BYTES = 2**24
"""Rows are decoded in parts of so many bytes: a part is copied twice on the way, the whole is not."""

_Bytes2D = npt.NDArray[np.uint8]


def fixed_values(rows: npt.NDArray[np.void]) -> list[bytes]:
    """Give records of one dtype as a value each; `fixed_rows` reads them."""
    return to_keys(np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), rows.itemsize))


def fixed_rows(values: Sequence[bytes], kind: np.dtype[np.void], version: int, what: str) -> npt.NDArray[np.void]:
    """Read values that are records of one dtype, whose first byte is their format; read-only.

    Args:
        values: Of `fixed_values`.
        kind: The dtype.
        version: The format.
        what: What a value is, for the error.

    Raises:
        UnknownFormat: Another release wrote one.
    """
    data = b"".join(values)
    if not {*map(len, values)} <= {kind.itemsize} or data[:: kind.itemsize].count(version) != len(values):
        raise UnknownFormat(f"{what} has an unknown format", why=f"known is format {version}, {kind.itemsize} bytes")
    return np.frombuffer(data, kind)


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One column of the layout.

    Attributes:
        kind: Arrow type of the column; of a dictionary that of its values.
        width: Bytes of a cell; 0 for the presence of a struct and for null columns, -1 for variable cells.
        nested: The leaf is a list or a map.
    """

    kind: pa.DataType
    width: int
    nested: bool = False


class RowCodec:
    """Encodes tables of one schema to a value per row, and back.

    Args:
        schema: Names and types; unions and run-end encoded columns have no codec.

    Raises:
        ValueError: A column's type has no codec.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self._leaves: list[_Leaf] = []
        for column in schema:
            self._leaves += _leaves(column.type, column.name)
        self._null_bytes = (len(self._leaves) + 7) // 8
        self._variable = sum(leaf.width < 0 for leaf in self._leaves)
        fixed = sum(max(leaf.width, 0) for leaf in self._leaves)
        self._head = 1 + self._null_bytes + fixed + 4 * max(0, self._variable - 1)

    def encode(self, table: pa.Table) -> list[bytes]:
        """Give one value per row.

        Args:
            table: Has the schema's columns, in any order and among others.

        Raises:
            ValueInvalid: A column is missing or of another type.
        """
        values: list[bytes] = []
        for columns, count in self._parts(table):
            values += self._encode_part(columns, count).to_pylist()
        return values

    def encode_column(self, table: pa.Table) -> pa.LargeBinaryArray:
        """Give the values that `encode` gives as a column."""
        parts = [self._encode_part(columns, count).cast(pa.large_binary()) for columns, count in self._parts(table)]
        return pa.concat_arrays(parts) if parts else pa.array([], pa.large_binary())

    def feed(self, table: pa.Table, update: Callable[[Any], object]) -> None:
        """Hand a table's rows to a hash, column by column: equal tables give equal bytes.

        Faster than to hash what `encode` gives, but how rows are spread over tables counts, too.

        Args:
            table: As for `encode`.
            update: Takes bytes-like objects.

        Raises:
            ValueInvalid: A column is missing or of another type.
        """
        for columns, _ in self._parts(table):
            for leaf, array, null in self._cells(columns):
                update(np.packbits(null))
                if leaf.width > 0:
                    update(np.ascontiguousarray(_fixed_cells(array, leaf, null)))
                elif leaf.width < 0:
                    texts = _variable_cells(array, leaf, null)
                    at = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset : texts.offset + len(texts) + 1]
                    update(np.diff(at))
                    update(memoryview(texts.buffers()[2] or b"")[at[0] : at[-1]])

    def _parts(self, table: pa.Table) -> Iterator[tuple[list[pa.Array], int]]:
        """Give the columns in parts that Arrow's offsets can hold, and the rows of each."""
        parts = 1 + int(table.nbytes // _MAX_BATCH_BYTES)
        step = -(-len(table) // parts) or 1
        for start in range(0, len(table), step) or (0,):  # the schema of none is checked, too
            part = table.slice(start, step)
            columns = [_column(part, wanted) for wanted in self.schema]
            if start < len(table):
                yield columns, min(step, len(table) - start)

    def _cells(self, columns: Sequence[pa.Array]) -> list[tuple[_Leaf, pa.Array, npt.NDArray[np.bool_]]]:
        cells: list[tuple[_Leaf, pa.Array, npt.NDArray[np.bool_]]] = []
        leaves = iter(self._leaves)
        for column in columns:
            _spread(column, leaves, None, cells)
        return cells

    def _encode_part(self, columns: Sequence[pa.Array], count: int) -> pa.BinaryArray:
        cells = self._cells(columns)
        nulls = np.zeros((count, 8 * self._null_bytes), np.uint8)
        fixed: list[_Bytes2D] = []
        variable: list[pa.BinaryArray] = []
        for index, (leaf, array, null) in enumerate(cells):
            nulls[:, index] = null
            if leaf.width > 0:
                fixed.append(_fixed_cells(array, leaf, null))
            elif leaf.width < 0:
                variable.append(_variable_cells(array, leaf, null))
        lengths = (pc.binary_length(array).to_numpy().astype("<u4") for array in variable[:-1])
        fixed += (length.view(np.uint8).reshape(-1, 4) for length in lengths)
        version = np.full((count, 1), FORMAT, np.uint8)
        head = beside([version, np.packbits(nulls, axis=1, bitorder="little"), *fixed])
        return joined([to_binary(head), *variable])

    def decode(self, values: Sequence[bytes]) -> pa.Table:
        """Give the rows of values as a table of the schema.

        Raises:
            UnknownFormat: Another release wrote a value.
            StateCorrupted: A value is not a row of this schema.
        """
        lengths = np.fromiter(map(len, values), np.int64, len(values))
        if len(values) < 2 or lengths.sum() <= _DECODE_BYTES:
            return self._decode_part(values, lengths)
        half = len(values) // 2
        return pa.concat_tables([self.decode(values[:half]), self.decode(values[half:])])

    def _decode_part(self, values: Sequence[bytes], lengths: npt.NDArray[np.int64]) -> pa.Table:
        count, joined = len(values), b"".join(values)
        head = self._heads(joined, lengths)
        nulls = np.unpackbits(head[:, 1 : 1 + self._null_bytes], axis=1, bitorder="little").view(np.bool_)
        at, texts = 1 + self._null_bytes, self._texts(joined, lengths, head)
        cells: list[pa.Array | None] = []
        for leaf, null in zip(self._leaves, nulls.T, strict=False):
            cell = None
            if leaf.width > 0:
                cell = _from_fixed(head[:, at : at + leaf.width], leaf, null)
                at += leaf.width
            elif leaf.width < 0:
                cell = _from_variable(next(texts), leaf, null)
            cells.append(cell)
        leaves = iter(zip(self._leaves, cells, nulls.T, strict=False))
        columns = [_gathered(column.type, leaves, count) for column in self.schema]
        return pa.Table.from_arrays(columns, schema=self.schema)

    def _heads(self, joined: bytes, lengths: npt.NDArray[np.int64]) -> _Bytes2D:
        """Give the fixed part of every row, checked."""
        data = np.frombuffer(joined, np.uint8)
        short = lengths < self._head if self._variable else lengths != self._head
        if not len(lengths):
            return np.zeros((0, self._head), np.uint8)
        starts = np.cumsum(lengths) - lengths
        formats = data[starts[lengths > 0]]
        if (formats != FORMAT).any():
            raise unknown_format("a row has an unknown format", f"format {formats[formats != FORMAT][0]}", FORMAT)
        if short.any():
            bad = int(np.argmax(short))
            raise _damaged(f"{lengths[bad]} bytes where the schema needs {self._head}")
        if not self._variable:
            return data.reshape(len(lengths), self._head)
        heads: _Bytes2D = np.lib.stride_tricks.sliding_window_view(data, self._head)[starts]
        return heads

    def _texts(self, joined: bytes, lengths: npt.NDArray[np.int64], heads: _Bytes2D) -> Iterator[pa.Array]:
        """Give the variable cells, column by column, as one binary array each, cut from the joined rows."""
        count, columns = len(lengths), self._variable
        cuts = np.empty((count, columns + 1), np.int64)  # lengths of the head and of each cell
        cuts[:, 0] = self._head
        sizes = np.ascontiguousarray(heads[:, self._head - 4 * (columns - 1) :])
        cuts[:, 1:-1] = sizes.view("<u4").reshape(count, columns - 1) if count else 0
        cuts[:, -1] = lengths - cuts[:, :-1].sum(axis=1)
        if (cuts[:, -1] < 0).any():
            raise _damaged("the cells are longer than the row")
        offsets = np.zeros(count * (columns + 1) + 1, np.int32)
        np.cumsum(cuts.ravel(), out=offsets[1:])
        pieces = pa.Array.from_buffers(
            pa.binary(), count * (columns + 1), [None, pa.py_buffer(offsets), pa.py_buffer(joined)]
        )
        for column in range(1, columns + 1):
            yield pieces.take(pa.array(np.arange(column, count * (columns + 1), columns + 1)))


def _damaged(why: str) -> StateCorrupted:
    return StateCorrupted("a row cannot be decoded", why=why)


def _leaves(kind: pa.DataType, name: str) -> list[_Leaf]:
    types = pa.types
    if types.is_struct(kind):
        return [_Leaf(kind, 0), *(leaf for child in kind for leaf in _leaves(child.type, f"{name}.{child.name}"))]
    if types.is_null(kind):
        return [_Leaf(kind, 0)]
    if types.is_boolean(kind):
        return [_Leaf(kind, 1)]
    if types.is_dictionary(kind) and not types.is_nested(kind.value_type):
        return _leaves(kind.value_type, name)
    if is_text(kind):
        return [_Leaf(kind, -1)]
    if types.is_nested(kind) and not types.is_union(kind) and not types.is_run_end_encoded(kind):
        _plain(kind, name)
        return [_Leaf(kind, -1, nested=True)]
    if types.is_primitive(kind) or types.is_decimal(kind) or types.is_fixed_size_binary(kind):
        return [_Leaf(kind, kind.bit_width // 8)]
    raise ValueError(f"column {name!r} has type {kind}: allowed are flat types, text, structs, lists and maps")


def _column(table: pa.Table, wanted: pa.Field) -> pa.Array:
    at = table.schema.get_field_index(wanted.name)
    if at < 0:
        raise ValueInvalid("a row lacks a field", where=wanted.name, why=f"it has {table.schema.names}")
    if table.schema.types[at] != wanted.type:
        why = f"{table.schema.types[at]} where {wanted.type} is stored"
        raise ValueInvalid("a field has another type", where=wanted.name, why=why)
    return table.column(at).combine_chunks()


def _spread(
    array: pa.Array,
    leaves: Any,
    absent: npt.NDArray[np.bool_] | None,
    cells: list[tuple[_Leaf, pa.Array, npt.NDArray[np.bool_]]],
) -> None:
    """Append the cells of a column, a struct's fields after its presence; below an absent struct all is null."""
    leaf = next(leaves)
    null = array.is_null().to_numpy(zero_copy_only=False)
    if absent is not None:
        null = null | absent
    cells.append((leaf, array.dictionary_decode() if pa.types.is_dictionary(array.type) else array, null))
    if pa.types.is_struct(leaf.kind):
        for index in range(leaf.kind.num_fields):
            _spread(array.field(index), leaves, null, cells)


def _fixed_cells(array: pa.Array, leaf: _Leaf, null: npt.NDArray[np.bool_]) -> _Bytes2D:
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    rows = np.frombuffer(array.buffers()[1] or b"", np.uint8)
    rows = rows[array.offset * leaf.width : (array.offset + len(array)) * leaf.width].reshape(len(array), leaf.width)
    if null.any():
        rows = rows.copy()
        rows[null] = 0
    return rows


def _from_fixed(rows: _Bytes2D, leaf: _Leaf, null: npt.NDArray[np.bool_]) -> pa.Array:
    valid = pa.py_buffer(np.packbits(~null, bitorder="little")) if null.any() else None
    if pa.types.is_boolean(leaf.kind):
        data = np.packbits(rows[:, 0].view(np.bool_), bitorder="little")
    else:
        data = np.ascontiguousarray(rows)
    return pa.Array.from_buffers(leaf.kind, len(rows), [valid, pa.py_buffer(data)])


def _variable_cells(array: pa.Array, leaf: _Leaf, null: npt.NDArray[np.bool_]) -> pa.BinaryArray:
    if leaf.nested:
        plain = array.cast(_plain(leaf.kind, "")).to_pylist()
        pack = msgspec.msgpack.Encoder().encode
        return pa.array([b"" if skip else pack(cell) for cell, skip in zip(plain, null, strict=True)], pa.binary())
    texts = array.cast(pa.string() if is_str(array.type) else pa.binary()).cast(pa.binary())
    return pc.if_else(pa.array(null), pa.scalar(b"", pa.binary()), texts) if null.any() else texts


def _from_variable(texts: pa.BinaryArray, leaf: _Leaf, null: npt.NDArray[np.bool_]) -> pa.Array:
    if leaf.nested:
        revive = _reviver(leaf.kind)
        unpack = msgspec.msgpack.Decoder().decode
        try:
            cells = [None if skip else revive(unpack(text)) for text, skip in zip(texts.to_pylist(), null, strict=True)]
            return pa.array(cells, _plain(leaf.kind, "")).cast(leaf.kind)
        except UNDECODABLE as error:
            raise _damaged(str(error)) from error
    if null.any():
        texts = pc.if_else(pa.array(null), pa.scalar(None, pa.binary()), texts)
    try:
        return texts.cast(pa.string()).cast(leaf.kind) if is_str(leaf.kind) else texts.cast(leaf.kind)
    except pa.ArrowInvalid as error:
        raise _damaged(str(error)) from error


def _gathered(kind: pa.DataType, leaves: Any, count: int) -> pa.Array:
    """Put a column together from its leaves: the inverse of `_spread`."""
    _, cells, null = next(leaves)
    if pa.types.is_struct(kind):
        children = [_gathered(child.type, leaves, count) for child in kind]
        if not children:
            return pa.array([None if skip else {} for skip in null], kind)
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=pa.array(null) if null.any() else None)
    if cells is None:
        return pa.nulls(count)
    try:
        return cells.cast(kind) if pa.types.is_dictionary(kind) else cells
    except pa.ArrowInvalid as error:  # more texts than its index can name
        raise _damaged(str(error)) from error


def _plain(kind: pa.DataType, name: str) -> pa.DataType:
    """Give the type whose Python values MessagePack holds exactly, for the inside of lists and maps."""
    types = pa.types
    if types.is_struct(kind):
        return pa.struct([pa.field(child.name, _plain(child.type, f"{name}.{child.name}")) for child in kind])
    if types.is_map(kind):
        return pa.map_(_plain(kind.key_type, name), _plain(kind.item_type, name))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return pa.list_(_plain(kind.value_type, name))
    if types.is_decimal(kind):
        return pa.string()
    if types.is_timestamp(kind) or types.is_duration(kind) or types.is_date64(kind) or types.is_time64(kind):
        return pa.int64()
    if types.is_date32(kind) or types.is_time32(kind):
        return pa.int32()
    if types.is_dictionary(kind):
        return _plain(kind.value_type, name)
    if types.is_float16(kind):
        return pa.float32()
    if types.is_primitive(kind) or is_text(kind) or types.is_null(kind) or types.is_fixed_size_binary(kind):
        return kind
    raise ValueError(f"column {name!r} has type {kind}, which has no codec")


def _reviver(kind: pa.DataType) -> Callable[[Any], Any]:
    """Give what turns plain lists into the pairs that Arrow wants for maps; identity where there is no map."""
    types = pa.types
    if types.is_map(kind):
        key, item = _reviver(kind.key_type), _reviver(kind.item_type)
        return lambda pairs: None if pairs is None else [(key(pair[0]), item(pair[1])) for pair in pairs]
    if types.is_struct(kind):
        inner = {child.name: _reviver(child.type) for child in kind}
        return lambda cell: None if cell is None else {name: revive(cell[name]) for name, revive in inner.items()}
    if types.is_nested(kind):
        element = _reviver(kind.value_type)
        return lambda cells: None if cells is None else [element(cell) for cell in cells]
    return lambda cell: cell
