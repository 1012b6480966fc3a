"""Spark's own `xxhash64` over Arrow columns, so that Python and the JVM send a message to the same shard.

Source: `org.apache.spark.sql.catalyst.expressions.XXH64` and `HashExpression`: the algorithm is XXH64 (of numbers over
whole columns, which the tests compare with the library's), the seed is 42, each column's hash is the seed of the next,
and a null leaves it as it is. Integers below 64 bits are hashed as four bytes, others as eight; floating point as bits,
with one NaN and one zero.
"""

from __future__ import annotations

from decimal import Context

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

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
    """Hash texts and bytes."""
    texts = column.cast(pa.large_binary()).fill_null(b"").to_pylist()
    return np.fromiter(map(xxhash.xxh64_intdigest, texts, seeds.tolist()), np.uint64, len(texts))


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
