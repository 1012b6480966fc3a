"""Spark's hash in Python: against XXH64 by another implementation, and against values that Spark gave."""

from __future__ import annotations

import struct

import numpy as np
import pyarrow as pa
import pytest
import xxhash

from backend.spark.pack.hashing import hashable, xxhash64


def _one_by_one(values: list[bytes | None], seed: int = 42) -> list[int]:
    found = [seed if value is None else xxhash.xxh64_intdigest(value, seed) for value in values]
    return [number - 2**64 if number >= 2**63 else number for number in found]


def test_texts_of_all_lengths() -> None:
    values = [bytes((7 * number + at) % 256 for at in range(number)) for number in range(0, 131)]
    values += [None, b"", b"again", b"again", "ä€😀".encode()]
    array = pa.array(values, pa.binary())
    assert xxhash64([array], len(array)).tolist() == _one_by_one(values)
    part = array.slice(3, 40)
    assert xxhash64([part], len(part)).tolist() == _one_by_one(values[3:43])
    texts = [None if value is None else value.hex() for value in values]
    expected = _one_by_one([None if text is None else text.encode() for text in texts])
    assert xxhash64([pa.array(texts)], len(texts)).tolist() == expected


@pytest.mark.parametrize(
    ("kind", "values", "packed"),
    [
        (pa.int64(), [0, 1, -1, 2**63 - 1, -(2**63)], "<q"),
        (pa.int32(), [0, 1, -1, 2**31 - 1, -(2**31)], "<i"),
        (pa.int16(), [0, 1, -1, 2**15 - 1], "<i"),
        (pa.int8(), [0, 127, -128], "<i"),
        (pa.bool_(), [True, False], "<i"),
        (pa.date32(), [0, 19_000, -1], "<i"),
        (pa.timestamp("us", "UTC"), [0, 1_700_000_000_000_000, -1], "<q"),
        (pa.float64(), [0.0, 1.5, -2.25, float("inf")], "<d"),
    ],
)
def test_numbers(kind: pa.DataType, values: list[float], packed: str) -> None:
    array = pa.array([*values, None], kind)
    expected = [*(_one_by_one([struct.pack(packed, value)])[0] for value in values), 42]
    assert xxhash64([array], len(array)).tolist() == expected
    assert hashable(kind)


def test_one_nan_and_one_zero() -> None:
    quiet, other = np.array([0x7FF8000000000000, 0xFFF8000000000001], np.uint64).view(np.float64)
    array = pa.array([0.0, -0.0, quiet, other])
    first, second, third, fourth = xxhash64([array], 4).tolist()
    assert first == second
    assert third == fourth == _one_by_one([struct.pack("<d", float("nan"))])[0]


def test_a_columns_hash_is_the_seed_of_the_next() -> None:
    texts, numbers = ["a", None, "a", "bb"], [1, 2, None, 4]
    found = xxhash64([pa.array(numbers), pa.array(texts)], 4).tolist()
    for number, text, hashed in zip(numbers, texts, found, strict=True):
        seed = 42 if number is None else xxhash.xxh64_intdigest(struct.pack("<q", number), 42)
        assert hashed == _one_by_one([None if text is None else text.encode()], seed)[0] or (
            text is None and hashed % 2**64 == seed
        )


def test_what_cannot_be_hashed_is_said() -> None:
    assert not hashable(pa.decimal256(10, 2))
    assert not hashable(pa.timestamp("ms"))
    assert not hashable(pa.list_(pa.int64()))
