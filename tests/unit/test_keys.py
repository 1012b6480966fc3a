r"""The key codec: order, prefix freedom and round trips over nasty values; bytes of format 1 by hand."""

from __future__ import annotations

import datetime as dt
import itertools
import math
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.errors import KeyInvalid, StateCorrupted
from backend.keys import (
    code_end,
    decode,
    decode_columns,
    encode,
    encode_columns,
    fixed_bytes,
    pack_fixed,
    prefix_end,
    to_keys,
    to_rows,
    unpack_fixed,
)
from backend.stores.named import encode_key

LOW, HIGH = -(2**63), 2**63 - 1
NASTY_STR = ["", "\0", "\0\0", "\0\x01", "\x01", "a", "a\0", "a\0b", "a\x01", "aa", "user_1", "user_12", "user_2"]
NASTY_STR += ["\x7f", "é", "\uffff", "\U0001f600"]
NASTY_BYTES = [b"", b"\0", b"\0\0", b"\0\x01", b"\0\xff", b"\x01", b"a", b"a\0", b"aa", b"\xfe", b"\xff"]
NASTY_BYTES += [b"\xff\0", b"\xff\xff"]
NASTY_INT = [LOW, LOW + 1, -256, -255, -1, 0, 1, 255, 256, HIGH - 1, HIGH]
NASTY_FLOAT = [-math.inf, -1.7976931348623157e308, -1.0, -5e-324, 0.0, 5e-324, 1.0, 1.5, math.inf, math.nan]
NASTY_TIME = [dt.datetime(1, 1, 1), dt.datetime(1969, 12, 31, 23, 59, 59, 999999), dt.datetime(1970, 1, 1)]
NASTY_TIME += [dt.datetime(9999, 12, 31, 23, 59, 59, 999999)]
NASTY_DATE = [dt.date(1, 1, 1), dt.date(1969, 12, 31), dt.date(1970, 1, 1), dt.date(9999, 12, 31)]

# ordered by hand: types by their tag, then by value
ORDERED: list[Any] = [
    None,
    False,
    True,
    *NASTY_INT,
    *NASTY_FLOAT,
    *NASTY_STR,
    *NASTY_BYTES,
    *[moment.replace(tzinfo=dt.UTC) for moment in NASTY_TIME],
    *NASTY_TIME,
    *NASTY_DATE,
    (),
    (None,),
    (None, 0),
    (0,),
    (0, "a"),
    ("",),
    ("", ""),
    ("a", "bc"),
    ("a\0",),
    ("ab", "c"),
    ("ab", ("c", None)),
    ((),),
]


def key_of(value: Any) -> Any:
    """What values are sorted by: their type's place, then Python's own order, NaN above infinity."""
    if isinstance(value, tuple):
        return 8, tuple(map(key_of, value))
    places = [type(None), bool, int, float, str, bytes, dt.datetime, dt.date]
    place = places.index(type(value))
    if isinstance(value, dt.datetime):
        return (6, 0, value) if value.tzinfo else (6, 1, value)
    if isinstance(value, float):
        return place, (math.isnan(value), 0.0 if math.isnan(value) else value)
    return place, () if value is None else value


def same(one: Any, two: Any) -> bool:
    if isinstance(one, tuple) and isinstance(two, tuple):
        return len(one) == len(two) and all(itertools.starmap(same, zip(one, two, strict=True)))
    return type(one) is type(two) and (one == two or (one != one and two != two))


scalars = st.one_of(
    st.sampled_from(ORDERED[: ORDERED.index(())]),
    st.none(),
    st.booleans(),
    st.integers(LOW, HIGH),
    st.floats(),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    st.binary(max_size=6),
    st.text("\0\x01ab", max_size=5),
    st.binary(max_size=5).map(lambda data: bytes(byte % 3 * 127 for byte in data)),
    st.datetimes(),
    st.datetimes(timezones=st.just(dt.UTC)),
    st.dates(),
)
some_values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6)


def test_the_nasty_values_are_in_order_and_apart() -> None:
    codes = [encode(value) for value in ORDERED]
    assert codes == sorted(set(codes))
    assert [key_of(value) for value in ORDERED] == sorted(map(key_of, ORDERED))


def test_no_code_is_a_prefix_of_another() -> None:
    codes = sorted(encode(value) for value in ORDERED)
    assert not [one for one, two in itertools.pairwise(codes) if two.startswith(one)]


@given(some_values, some_values)
def test_codes_sort_as_values_do(one: Any, two: Any) -> None:
    first, second = key_of(one), key_of(two)
    assert (encode(one) < encode(two)) == (first < second)
    assert (encode(one) == encode(two)) == (first == second)


@given(some_values, some_values)
def test_codes_are_prefix_free(one: Any, two: Any) -> None:
    first, second = encode(one), encode(two)
    if first != second:
        assert not first.startswith(second)
        assert not second.startswith(first)


@given(some_values)
def test_values_come_back_with_their_type(value: Any) -> None:
    assert same(decode(encode(value)), value)
    assert code_end(b"xx" + encode(value) + b"yy", 2) == 2 + len(encode(value))


@given(st.lists(scalars, max_size=4), st.lists(scalars, max_size=4))
def test_codes_behind_each_other_do_not_meet(one: list[Any], two: list[Any]) -> None:
    joined = [b"".join(map(encode, values)) for values in (one, two)]
    assert (joined[0] == joined[1]) == (list(map(key_of, one)) == list(map(key_of, two)))


def test_bytes_of_format_1() -> None:
    for value, hexed in [
        (None, "05"),
        (False, "10"),
        (True, "11"),
        (0, "208000000000000000"),
        (-1, "207fffffffffffffff"),
        (1.0, "28bff0000000000000"),
        (-1.0, "28400fffffffffffff"),
        (math.nan, "28fff8000000000000"),
        ("a", "30610001"),
        ("a\0", "306100ff0001"),
        (b"\0", "3800ff0001"),
        (dt.datetime(1970, 1, 1, 0, 0, 1, tzinfo=dt.UTC), "4080000000000f4240"),
        (dt.datetime(1970, 1, 1, 0, 0, 1), "4180000000000f4240"),
        (dt.date(1970, 1, 2), "448000000000000001"),
        ((), "5000"),
        (("a", None), "50306100010500"),
    ]:
        assert encode(value).hex() == hexed


def test_floats_are_normalised_as_for_grouping() -> None:
    assert encode(-0.0) == encode(0.0)
    assert math.copysign(1, decode(encode(-0.0))) == 1
    odd = np.array([0xFFF8000000000001, 0x7FF0000000000001], "u8").view("f8")
    assert {encode(math.nan)} == {encode(-math.nan), *map(encode, odd.tolist())}
    for kind in (pa.float64(), pa.float32()):
        assert encode_columns([pa.array([-0.0, 0.0], kind)]).to_pylist() == [encode(0.0)] * 2
    assert encode_columns([pa.array(odd)]).to_pylist() == [encode(math.nan)] * 2


@pytest.mark.parametrize(("moment", "hours"), [(dt.datetime.max, -5), (dt.datetime.min, 1)])
def test_a_moment_that_no_datetime_in_utc_is_is_refused(moment: dt.datetime, hours: int) -> None:
    """It could be written, and nothing behind it be read any more."""
    with pytest.raises(KeyInvalid, match="1 to 9999 in UTC"):
        encode(moment.replace(tzinfo=dt.timezone(dt.timedelta(hours=hours))))
    for zone in (None, dt.UTC, dt.timezone(dt.timedelta(hours=-hours))):
        own = moment.replace(tzinfo=zone)
        assert decode(encode(own)) == own


def test_a_moment_of_another_timezone_is_the_same_moment() -> None:
    east = dt.timezone(dt.timedelta(hours=9))
    moment = dt.datetime(2020, 1, 1, 9, tzinfo=east)
    assert encode(moment) == encode(dt.datetime(2020, 1, 1, tzinfo=dt.UTC))
    assert decode(encode(moment)).tzinfo is dt.UTC


@pytest.mark.parametrize(
    "value", [LOW - 1, HIGH + 1, "\ud800", [1], {"a": 1}, object(), np.int64(1), bytearray(b"a"), (1, [2]), 1j]
)
def test_what_has_no_order_is_refused(value: object) -> None:
    with pytest.raises(KeyInvalid):
        encode(value)


NOT_CODES = [b"", b"\x00", b"\x99", b"\x20abc", b"\x30a", b"\x30a\x00", b"\x30\xff\x00\x01", b"\x50", b"\x50\x05"]
NOT_CODES += [b"\x05\x05", encode(1) + b"\x00", b"\x40" + b"\xff" * 8]


@pytest.mark.parametrize("key", NOT_CODES)
def test_what_is_not_a_code_is_damage(key: bytes) -> None:
    with pytest.raises(StateCorrupted):
        decode(key)


def test_prefix_end_bounds_exactly_the_keys_with_the_prefix() -> None:
    for prefix in (b"a", b"a\xff", b"\x01\xff\xff", b"\x00"):
        end = prefix_end(prefix)
        assert end is not None
        for key in (prefix, prefix + b"\x00", prefix + b"\xff" * 9):
            assert prefix <= key < end
        assert not (prefix <= end < end)
        assert end[:-1] == prefix[: len(end) - 1]
    assert prefix_end(b"") is None
    assert prefix_end(b"\xff\xff") is None


# ---- columns

COLUMNS: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int64(), NASTY_INT),
    (pa.int8(), [-128, -1, 0, 127]),
    (pa.uint32(), [0, 1, 2**32 - 1]),
    (pa.uint64(), [0, HIGH]),
    (pa.float64(), NASTY_FLOAT),
    (pa.float32(), [-math.inf, -1.5, 0.0, 1.5, math.nan]),
    (pa.bool_(), [False, True]),
    (pa.string(), NASTY_STR),
    (pa.large_string(), NASTY_STR),
    (pa.string_view(), NASTY_STR),
    (pa.binary(), NASTY_BYTES),
    (pa.large_binary(), NASTY_BYTES),
    (pa.binary(2), [b"\0\0", b"\0\x01", b"a\0", b"\xff\xff"]),
    (pa.timestamp("us"), NASTY_TIME),
    (pa.timestamp("us", "UTC"), [moment.replace(tzinfo=dt.UTC) for moment in NASTY_TIME]),
    (pa.timestamp("ms"), [dt.datetime(1969, 12, 31), dt.datetime(1970, 1, 1)]),
    (pa.timestamp("ns", "UTC"), [dt.datetime(2020, 1, 1, tzinfo=dt.UTC)]),
    (pa.date32(), NASTY_DATE),
    (pa.date64(), NASTY_DATE),
    (pa.dictionary(pa.int8(), pa.string()), ["a", "a\0", "b"]),
    (pa.null(), []),
]


def plain(value: Any, kind: pa.DataType) -> Any:
    """The value that `encode` takes for a cell."""
    if value is not None and pa.types.is_floating(kind):
        return float(value)
    return value


@pytest.mark.parametrize(
    ("kind", "cells"), COLUMNS, ids=lambda given: str(given) if isinstance(given, pa.DataType) else ""
)
def test_a_column_is_encoded_as_its_values_are_and_comes_back(kind: pa.DataType, cells: list[Any]) -> None:
    for values in (cells, [None, *cells, None], [None], []):
        array = pa.array(values, kind)
        chunks = pa.chunked_array([array.slice(0, 1), array.slice(1)], kind)
        sliced = pa.concat_arrays([array, array]).slice(len(array))
        for given_array in (array, chunks, sliced):
            keys = encode_columns([given_array])
            assert keys.to_pylist() == [encode(plain(value, kind)) for value in values]
            (back,) = decode_columns(keys, [kind])
            assert back.type == kind
            assert all(itertools.starmap(same, zip(back.to_pylist(), array.to_pylist(), strict=True)))


def draw_column(data: st.DataObject, kind: pa.DataType, cells: list[Any], count: int) -> pa.Array:
    pick = st.sampled_from([None, *cells])
    return pa.array([data.draw(pick) for _ in range(count)], kind)


@given(st.data())
def test_several_columns_are_codes_behind_each_other(data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(COLUMNS), min_size=1, max_size=4))
    count = data.draw(st.integers(0, 6))
    arrays = [draw_column(data, kind, cells, count) for kind, cells in chosen]
    keys = encode_columns(arrays)
    rows = list(zip(*(array.to_pylist() for array in arrays), strict=True))
    kinds = [kind for kind, _ in chosen]
    assert keys.to_pylist() == [b"".join(encode(plain(v, k)) for v, k in zip(row, kinds, strict=True)) for row in rows]
    for given_keys in (keys, keys.to_pylist(), pa.concat_arrays([keys, keys]).slice(count)):
        back = [array.to_pylist() for array in decode_columns(given_keys, kinds)]
        assert all(itertools.starmap(same, zip(zip(*back, strict=True), rows, strict=True)))


@pytest.mark.parametrize(
    "array",
    [
        pa.array([2**63], pa.uint64()),
        pa.array([1], pa.timestamp("ns")),
        pa.array([[1]]),
        pa.array([{"a": 1}]),
        pa.array([1], pa.duration("s")),
    ],
    ids=str,
)
def test_columns_without_an_order_are_refused(array: pa.Array) -> None:
    with pytest.raises(KeyInvalid):
        encode_columns([array])
    with pytest.raises(KeyInvalid):
        encode_columns([pa.array(["a"]), array])


def test_no_columns_are_refused() -> None:
    with pytest.raises(KeyInvalid):
        encode_columns([])


@given(st.lists(scalars, min_size=1, max_size=3), st.data())
def test_truncated_or_foreign_keys_are_damage_not_values(values: list[Any], data: st.DataObject) -> None:
    good = b"".join(map(encode, values))
    kinds = {type(None): pa.null(), bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}
    kinds |= {bytes: pa.binary(), dt.date: pa.date32()}
    types = [
        pa.timestamp("us", "UTC" if v.tzinfo else None) if isinstance(v, dt.datetime) else kinds[type(v)]
        for v in values
    ]
    cut = data.draw(st.integers(0, len(good) - 1))
    for bad in (good[:cut], good + b"\x05"):
        with pytest.raises(StateCorrupted):
            decode_columns([good, bad], types)
    other = data.draw(st.sampled_from([pa.int64(), pa.string(), pa.bool_(), pa.date32()]))
    if values[0] is not None and types[0] != other:
        with pytest.raises(StateCorrupted):
            decode_columns([good], [other, *types[1:]])


# ---- fixed width


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.int16, np.uint16, np.uint64, np.int8])
def test_fixed_width_integers_sort_as_bytes(kind: type[np.integer[Any]]) -> None:
    info = np.iinfo(kind)
    numbers = np.array([info.min, info.min + 1, info.max // 2, 0, 1, info.max - 1, info.max, info.min], kind)
    rows = pack_fixed(numbers)
    assert rows.shape == (8, numbers.itemsize)
    keys = to_keys(rows)
    assert [numbers[at] for at in np.argsort(np.array(keys, dtype=object), kind="stable")] == sorted(numbers)
    assert keys == [fixed_bytes(int(number), kind) for number in numbers]
    assert unpack_fixed(to_rows(keys, numbers.itemsize), kind).tolist() == numbers.tolist()
    assert unpack_fixed(rows, kind).dtype == kind


def test_big_endian_and_strided_numbers_are_packed_too() -> None:
    numbers = np.arange(-4, 4, dtype=np.int64)
    assert (pack_fixed(numbers.astype(">i8")) == pack_fixed(numbers)).all()
    assert (pack_fixed(numbers[::2]) == pack_fixed(numbers)[::2]).all()


def test_fixed_width_keys_keep_their_zeros() -> None:
    rows = np.array([[1, 0, 0], [0, 0, 0]], np.uint8)
    assert to_keys(rows) == [b"\x01\0\0", b"\0\0\0"]
    assert to_keys(np.zeros((0, 3), np.uint8)) == []
    assert to_rows([], 3).shape == (0, 3)


@pytest.mark.parametrize("keys", [[b"ab", b"abcd"], [b"abcd", b"ab"], [b"abc", b"ab"], [b""]])
def test_keys_of_other_widths_are_damage(keys: list[bytes]) -> None:
    with pytest.raises(StateCorrupted):
        to_rows(keys, 3)


@pytest.mark.parametrize("number", [LOW - 1, HIGH + 1])
def test_numbers_out_of_range_are_not_wrapped(number: int) -> None:
    with pytest.raises(OverflowError):
        fixed_bytes(number)


@pytest.mark.parametrize(
    "key",
    [
        pd.Timestamp(1), pd.NaT, np.datetime64("NaT"), np.datetime64(1, "ns"), np.timedelta64(1, "ns"),
        np.timedelta64(1, "us"), None,
    ],
)  # fmt: skip
def test_times_that_a_key_cannot_hold_are_refused(key: object) -> None:
    with pytest.raises(KeyInvalid):
        encode_key(key)


def test_times_of_microseconds_are_keys_whoever_made_them() -> None:
    when = dt.datetime(2024, 1, 2, 3, 4, 5, 6)
    assert encode_key(pd.Timestamp(when)) == encode_key(np.datetime64(when)) == encode_key(when)
