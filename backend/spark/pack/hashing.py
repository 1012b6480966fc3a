"""Spark's own `xxhash64` over Arrow columns, so that Python and the JVM send a message to the same shard.

Source: `org.apache.spark.sql.catalyst.expressions.XXH64` and `HashExpression`: the algorithm is XXH64 (which the tests
compare with), the seed is 42, each column's hash is the seed of the next, and a null leaves it as it is. Integers below
64 bits are hashed as four bytes, others as eight; floating point as bits, with one NaN and one zero.
"""

from __future__ import annotations

from decimal import Context
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

NAME = "xxhash64"
"""Of this hash in the manifest: it decides in which shard a key is."""
SEED = 42
_P1, _P2, _P3, _P4, _P5 = (
    np.uint64(prime)
    for prime in (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
)
_WIDE = Context(prec=50)
_NAN = np.int64(0x7FF8000000000000)

Hashes = npt.NDArray[np.uint64]


def hashable(kind: pa.DataType) -> bool:
    """Tell whether columns of a type can be hashed here as Spark hashes them."""
    return (
        pa.types.is_signed_integer(kind)
        or pa.types.is_boolean(kind)
        or kind in (pa.float32(), pa.float64(), pa.date32())
        or kind in (pa.string(), pa.binary(), pa.large_string(), pa.large_binary())
        or (pa.types.is_timestamp(kind) and kind.unit == "us")
        or pa.types.is_decimal128(kind)
    )


def xxhash64(columns: list[pa.Array], rows: int) -> npt.NDArray[np.int64]:
    """Hash rows of columns as Spark's `xxhash64(...)` does.

    Args:
        columns: Of `hashable` types.
        rows: Their length.
    """
    hashes = np.full(rows, SEED, np.uint64)
    for number, column in enumerate(columns):
        if column.null_count == len(column):
            continue
        found = _hash_column(column, hashes, same_seed=number == 0)
        hashes = np.where(np.asarray(column.is_valid()), found, hashes) if column.null_count else found
    return hashes.view(np.int64)


def _hash_column(column: pa.Array, seeds: Hashes, *, same_seed: bool) -> Hashes:
    """Hash one column on top of seeds; what it gives for nulls means nothing."""
    kind = column.type
    if pa.types.is_boolean(kind) or (pa.types.is_integer(kind) and kind.bit_width < 64) or kind == pa.date32():
        words = np.asarray(column.cast(pa.int32()).fill_null(0), np.int64)
        return _hash_int(words.astype(np.uint32).astype(np.uint64), seeds)
    if pa.types.is_integer(kind) or pa.types.is_timestamp(kind):
        return _hash_long(np.asarray(column.cast(pa.int64()).fill_null(0), np.int64).view(np.uint64), seeds)
    if kind == pa.float64():
        numbers = np.asarray(column.fill_null(0.0), np.float64) + 0.0  # -0.0 becomes 0.0
        return _hash_long(np.where(np.isnan(numbers), _NAN, numbers.view(np.int64)).view(np.uint64), seeds)
    if pa.types.is_decimal128(kind):
        return _hash_decimals(column, seeds)
    if not same_seed:
        return _hash_texts(column, seeds)
    codes = column.dictionary_encode()  # each text once
    hashes = _hash_texts(codes.dictionary, np.full(len(codes.dictionary), SEED, np.uint64))
    return np.take(hashes, np.asarray(codes.indices.fill_null(0)))


def _hash_int(words: Hashes, seeds: Hashes) -> Hashes:
    return _mixed(_turned(seeds + _P5 + np.uint64(4) ^ words * _P1, 23) * _P2 + _P3)


def _hash_long(words: Hashes, seeds: Hashes) -> Hashes:
    return _mixed(_eight(seeds + _P5 + np.uint64(8), words))


def _hash_decimals(column: pa.Array, seeds: Hashes) -> Hashes:
    """Hash unscaled integers: as a long up to 18 digits, else as the fewest bytes, big-endian."""
    column = column.fill_null(0)
    low = np.frombuffer(column.buffers()[1], np.uint64).reshape(-1, 2)[column.offset : column.offset + len(column), 0]
    if column.type.precision <= 18:
        return _hash_long(low, seeds)
    unscaled = [int(value.scaleb(column.type.scale, _WIDE)) for value in column.to_pylist()]
    texts = [one.to_bytes((one if one >= 0 else ~one).bit_length() // 8 + 1, "big", signed=True) for one in unscaled]
    return _hash_texts(pa.array(texts, pa.binary()), seeds)


def _hash_texts(column: pa.Array, seeds: Hashes) -> Hashes:
    """Hash texts and bytes: all of one length at once."""
    column = column.cast(pa.large_binary())
    lengths = np.asarray(pc.binary_length(column).fill_null(0), np.int64)
    # the offsets are read out of the buffer, they know of slices
    _, offsets, data = column.buffers()
    starts = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column)]
    content = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    found = np.empty(len(column), np.uint64)
    for length in np.unique(lengths).tolist():
        rows = np.flatnonzero(lengths == length)
        matrix = content[starts[rows, None] + np.arange(length)]
        found[rows] = _hash_matrix(np.ascontiguousarray(matrix, np.uint8), seeds[rows])
    return found


def _hash_matrix(rows: npt.NDArray[np.uint8], seeds: Hashes) -> Hashes:
    """Hash rows of equal length."""
    length, at = rows.shape[1], 0
    if length >= 32:
        lanes = [seeds + _P1 + _P2, seeds + _P2, seeds.copy(), seeds - _P1]
        while at + 32 <= length:
            for lane in range(4):
                lanes[lane] = _round(lanes[lane], _word(rows, at + 8 * lane, "<u8"))
            at += 32
        hashes = _turned(lanes[0], 1) + _turned(lanes[1], 7) + _turned(lanes[2], 12) + _turned(lanes[3], 18)
        for words in lanes:
            hashes = (hashes ^ _round(np.zeros_like(words), words)) * _P1 + _P4
    else:
        hashes = seeds + _P5
    hashes = hashes + np.uint64(length)
    while at + 8 <= length:
        hashes = _eight(hashes, _word(rows, at, "<u8"))
        at += 8
    if at + 4 <= length:
        hashes = _turned(hashes ^ _word(rows, at, "<u4") * _P1, 23) * _P2 + _P3
        at += 4
    for last in range(at, length):
        hashes = _turned(hashes ^ rows[:, last].astype(np.uint64) * _P5, 11) * _P1
    return _mixed(hashes)


def _word(rows: npt.NDArray[np.uint8], at: int, kind: Any) -> Hashes:
    width = np.dtype(kind).itemsize
    words: Hashes = np.ascontiguousarray(rows[:, at : at + width]).view(kind)[:, 0].astype(np.uint64, copy=False)
    return words


def _round(lane: Hashes, words: Hashes) -> Hashes:
    return _turned(lane + words * _P2, 31) * _P1


def _eight(hashes: Hashes, words: Hashes) -> Hashes:
    return _turned(hashes ^ _round(np.zeros_like(words), words), 27) * _P1 + _P4


def _turned(words: Hashes, bits: int) -> Hashes:
    return words << np.uint64(bits) | words >> np.uint64(64 - bits)


def _mixed(hashes: Hashes) -> Hashes:
    hashes = (hashes ^ hashes >> np.uint64(33)) * _P2
    hashes = (hashes ^ hashes >> np.uint64(29)) * _P3
    return hashes ^ hashes >> np.uint64(32)
