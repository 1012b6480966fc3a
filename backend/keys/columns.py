"""The key codec over columns: one key per row, the codes of its values behind each other.

`encode_columns` gives the very bytes that `codes.encode` gives value by value, and `decode_columns` is its inverse.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backend.chunks import has_kernels, is_str, is_text, one_chunk
from backend.errors import KeyInvalid
from backend.keys.codes import (
    ALL64,
    AWARE,
    BYTES,
    DATE,
    ESCAPED,
    FALSE,
    FLOAT,
    INT,
    NAIVE,
    NULL,
    QUIET_NAN,
    SIGN64,
    STR,
    TERMINATOR,
    TRUE,
    undecodable,
)
from backend.keys.fixed import Bytes2D, beside, pack_fixed, to_binary


def encode_columns(arrays: Sequence[pa.Array | pa.ChunkedArray]) -> pa.BinaryArray:
    """Encode columns to one key per row: the codes of the row's values behind each other, without a tuple around.

    Integers of every width become int64, floats float64, timestamps microseconds; dictionaries are decoded.

    Raises:
        KeyInvalid: A column's type has no order here, a value is out of range (uint64 above int64, a timestamp finer
            than a microsecond), or there is no column.
    """
    if not arrays:
        raise KeyInvalid("a key needs at least one column")
    parts: list[Any] = []
    for array in arrays:
        part = _encode_column(array)
        if parts and isinstance(part, np.ndarray) and isinstance(parts[-1], np.ndarray):
            parts[-1] = beside([parts[-1], part])
        elif isinstance(part, list):
            parts.extend(part)
        else:
            parts.append(part)
    whole = [to_binary(part) if isinstance(part, np.ndarray) else part for part in parts]
    return joined(whole)


def has_order(kind: pa.DataType) -> bool:
    """Return whether values of a type can be a key's."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not has_kernels(kind):
        return False
    own = (pa.types.is_null, pa.types.is_boolean, pa.types.is_floating, _is_text)
    fixed = (pa.types.is_integer, pa.types.is_timestamp, pa.types.is_date)
    return any(check(kind) for check in (*own, *fixed))


def _encode_column(array: pa.Array | pa.ChunkedArray) -> Bytes2D | pa.BinaryArray | list[Any]:
    """Give fixed-width codes as rows, and others as binary parts to be joined."""
    array = one_chunk(array)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind = array.type
    if pa.types.is_null(kind):
        return np.full((len(array), 1), NULL, np.uint8)
    if _is_text(kind):
        tag = STR if is_str(kind) else BYTES
        content = array.cast(pa.string() if tag == STR else pa.binary()).cast(pa.binary())
        if b"\x00" in memoryview(content.buffers()[2] or b"").tobytes():
            content = pc.replace_substring(content, pattern=b"\x00", replacement=ESCAPED)
        parts = [pa.scalar(bytes([tag]), pa.binary()), content, pa.scalar(TERMINATOR, pa.binary())]
        return parts if not array.null_count else _with_nulls(array, joined(parts))
    rows = _fixed_rows(array)
    return rows if not array.null_count else _with_nulls(array, to_binary(rows))


def _fixed_rows(array: pa.Array) -> Bytes2D:
    """Give tag and value of every row; rows under a null hold anything."""
    kind = array.type
    if pa.types.is_boolean(kind):
        flags = array.fill_null(False).to_numpy(zero_copy_only=False)
        return np.where(flags, TRUE, FALSE).astype(np.uint8).reshape(-1, 1)
    if pa.types.is_floating(kind):
        with np.errstate(invalid="ignore"):  # a signalling NaN is a NaN
            values = array.fill_null(0).cast(pa.float64()).to_numpy() + 0.0
        bits = np.where(np.isnan(values), np.uint64(QUIET_NAN), values.view(np.uint64))
        bits ^= np.where(bits >> np.uint64(63), np.uint64(ALL64), np.uint64(SIGN64))
        return _tagged(FLOAT, bits.astype(">u8").view(np.uint8).reshape(-1, 8))
    tag = _fixed_tag(kind)
    try:
        if tag in (AWARE, NAIVE):
            array = array.cast(pa.timestamp("us", kind.tz))
        elif tag == DATE:
            array = array.cast(pa.date32()).cast(pa.int32())
        integers = array.cast(pa.int64()).fill_null(0).to_numpy()
    except pa.ArrowInvalid as error:
        raise KeyInvalid("a value of a key column is out of range", where=str(kind), why=str(error)) from error
    return _tagged(tag, pack_fixed(integers))


def _fixed_tag(kind: pa.DataType) -> int:
    if pa.types.is_integer(kind):
        return INT
    if pa.types.is_timestamp(kind):
        return NAIVE if kind.tz is None else AWARE
    if pa.types.is_date(kind):
        return DATE
    raise KeyInvalid("a key column has a type without an order", why=str(kind))


def _is_text(kind: pa.DataType) -> bool:
    return is_text(kind) or bool(pa.types.is_fixed_size_binary(kind))


def _tagged(tag: int, rows: Bytes2D) -> Bytes2D:
    out = np.empty((len(rows), rows.shape[1] + 1), np.uint8)
    out[:, 0] = tag
    out[:, 1:] = rows
    return out


def joined(parts: Sequence[Any]) -> pa.BinaryArray:
    """Put binary arrays, and scalars among them, behind each other, row by row."""
    return parts[0] if len(parts) == 1 else pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.binary()))


def key_column(head: bytes, *parts: Bytes2D | pa.BinaryArray) -> pa.BinaryArray:
    """Build keys: a head, then the parts behind each other, row by row; rows of bytes, or binary where widths vary."""
    heads = np.broadcast_to(np.frombuffer(head, np.uint8), (len(parts[0]), len(head)))
    arrays: list[pa.BinaryArray] = []
    for fixed, neighbours in groupby([heads, *parts], key=lambda part: isinstance(part, np.ndarray)):
        together = list(neighbours)
        arrays += [to_binary(beside(together))] if fixed else together
    return joined(arrays)


def _with_nulls(array: pa.Array, codes: pa.BinaryArray) -> pa.BinaryArray:
    return pc.if_else(array.is_valid(), codes, pa.scalar(bytes([NULL]), pa.binary()))


def decode_columns(keys: pa.BinaryArray | Iterable[bytes], types: Sequence[pa.DataType]) -> list[pa.Array]:
    """Decode keys of `encode_columns` to columns of the types that were encoded; takes a list of bytes too.

    Raises:
        StateCorrupted: A key does not hold values of these types, or holds more.
        KeyInvalid: A type has no order here.
    """
    keys = one_chunk(keys)
    if not isinstance(keys, pa.Array):
        keys = pa.array(keys, pa.binary())
    reader = _Reader(keys)
    columns = [reader.column(kind) for kind in types]
    reader.finish()
    return columns


class _Reader:
    """Reads one column after the other from all keys at once; `at` is where each key is read next."""

    def __init__(self, keys: pa.BinaryArray) -> None:
        offsets = np.frombuffer(keys.buffers()[1] or bytes(4), np.int32)[keys.offset : keys.offset + len(keys) + 1]
        self.ends = offsets[1:].astype(np.int64)
        self.at = offsets[:-1].astype(np.int64)
        data = np.frombuffer(keys.buffers()[2] or b"", np.uint8)
        self.data = np.concatenate([data, np.zeros(9, np.uint8)])  # a truncated key is found after it was read
        self.keys = keys
        self._terminators: npt.NDArray[np.int64] | None = None

    def column(self, kind: pa.DataType) -> pa.Array:
        """Read the next value of every key."""
        if pa.types.is_dictionary(kind):
            return self.column(kind.value_type).cast(kind)
        tags = self.data[self.at]
        null = tags == NULL
        if pa.types.is_null(kind):
            self._expect(null)
            self.at += 1
            return pa.nulls(len(null))
        if _is_text(kind):
            self._expect(null | (tags == (STR if is_str(kind) else BYTES)))
            return self._text(kind, null)
        if pa.types.is_boolean(kind):
            self._expect(null | (tags == FALSE) | (tags == TRUE))
            self.at += 1
            return pa.array(tags == TRUE, mask=null if null.any() else None)
        floating = pa.types.is_floating(kind)
        self._expect(null | (tags == (FLOAT if floating else _fixed_tag(kind))))
        bits = self._eight_bytes(null)
        mask = null if null.any() else None
        if floating:
            bits ^= np.where(bits >> np.uint64(63), np.uint64(SIGN64), np.uint64(ALL64))
            return pa.array(bits.view(np.float64), mask=mask).cast(kind)
        integers = pa.array((bits ^ np.uint64(SIGN64)).view(np.int64), mask=mask)
        try:
            if pa.types.is_timestamp(kind):
                return integers.cast(pa.timestamp("us", kind.tz)).cast(kind)
            if pa.types.is_date(kind):
                return integers.cast(pa.int32()).cast(pa.date32()).cast(kind)
            return integers.cast(kind)
        except pa.ArrowInvalid as error:
            raise undecodable(b"", f"a value out of the range of {kind}: {error}") from error

    def _eight_bytes(self, null: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint64]:
        windows = np.lib.stride_tricks.sliding_window_view(self.data, 8)
        starts = np.where(null, 0, self.at + 1)
        bits = windows[np.minimum(starts, len(windows) - 1)].view(">u8").reshape(-1).astype(np.uint64)
        self.at += np.where(null, 1, 9)
        self._expect(self.at <= self.ends)
        return bits

    def _text(self, kind: pa.DataType, null: npt.NDArray[np.bool_]) -> pa.Array:
        if self._terminators is None:
            zeros = self.data[:-1] == 0
            self._terminators = np.flatnonzero(zeros & (self.data[1:] == 1))
        found = np.append(self._terminators, len(self.data))
        starts = self.at + 1
        stops = found[np.searchsorted(found, starts)]
        self._expect(null | (stops + 2 <= self.ends))
        lengths = np.where(null, 0, stops - starts)
        self.at = np.where(null, self.at + 1, stops + 2)
        content = gather(self.data, starts, lengths, null)
        if b"\x00" in memoryview(content.buffers()[2] or b"").tobytes():
            content = pc.replace_substring(content, pattern=ESCAPED, replacement=b"\x00")
        try:
            return content.cast(pa.string()).cast(kind) if is_str(kind) else content.cast(kind)
        except pa.ArrowInvalid as error:
            raise undecodable(b"", str(error)) from error

    def finish(self) -> None:
        """Check that every key was read to its end."""
        self._expect(self.at == self.ends)

    def _expect(self, right: npt.NDArray[np.bool_]) -> None:
        right = right & (self.at <= self.ends)
        if not right.all():
            raise undecodable(self.keys[int(np.argmin(right))].as_py(), "it does not hold the expected types")


def gather(
    data: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    null: npt.NDArray[np.bool_] | None = None,
) -> pa.BinaryArray:
    """Copy slices of a buffer into one binary array.

    Args:
        data: The buffer.
        starts: int64, start of each slice.
        lengths: int64, length of each slice; 0 where null.
        null: bool, rows that are null; None for none.
    """
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    total = int(offsets[-1])
    index = np.arange(total, dtype=np.int64)
    index += np.repeat(starts - offsets[:-1], lengths)
    valid = None if null is None or not null.any() else pa.py_buffer(np.packbits(~null, bitorder="little"))
    buffers = [valid, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data[index])]
    return pa.Array.from_buffers(pa.binary(), len(lengths), buffers)
