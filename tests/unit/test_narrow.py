"""Columns of frames as narrow as their values: whatever goes in comes out."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.batch import NO_TIME, TIME
from backend.spark.pack.frames import from_ipc
from backend.spark.pack.narrow import SAMPLE, narrow, widen
from backend.spark.pack.packing import PackPlan, pack

SMALL = st.integers(-3, 300)
KINDS: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int64(): st.one_of(SMALL, st.integers(-(2**63), 2**63 - 1), st.just(NO_TIME), st.just(2**62)),
    pa.uint64(): st.integers(0, 2**64 - 1),
    pa.int32(): st.one_of(SMALL, st.integers(-(2**31), 2**31 - 1)),
    pa.uint16(): st.integers(0, 2**16 - 1),
    pa.int8(): st.integers(-128, 127),
    pa.timestamp("us", "UTC"): st.one_of(SMALL, st.integers(-(2**60), 2**60)),
    pa.timestamp("ns"): SMALL,
    pa.date32(): st.integers(-(2**31), 2**31 - 1),
    pa.date64(): st.integers(-300, 300).map(lambda day: day * 86_400_000),
    pa.time32("ms"): st.integers(0, 86_399_999),
    pa.time64("us"): st.integers(0, 10**9),
    pa.duration("ms"): SMALL,
    pa.float64(): st.floats(allow_nan=False),
    pa.bool_(): st.booleans(),
    pa.string(): st.text(max_size=3),
    pa.binary(): st.sampled_from([b"", b"left", b"right"]),
}
TIMES = st.one_of(st.integers(10**12, 10**12 + 300), st.integers(-(2**62), 2**62))


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    count = draw(st.integers(0, 30))
    kinds = draw(st.lists(st.sampled_from(list(KINDS)), max_size=6))
    columns, fields = [], []
    if draw(st.booleans()):  # event times, and what follows them
        times = draw(st.lists(TIMES, min_size=count, max_size=count))
        ahead = st.one_of(st.just(0), st.integers(-3, 600), st.just(None))
        beside = [NO_TIME if by is None else at + by for at in times for by in (draw(ahead),)]
        columns = [pa.chunked_array([pa.array(times, pa.int64())]), pa.chunked_array([pa.array(beside, pa.int64())])]
        fields = [pa.field(TIME, pa.int64(), nullable=False), pa.field("before", pa.int64())]
    for at, kind in enumerate(kinds):
        one = st.one_of(st.none(), KINDS[kind]) if (nulls := draw(st.booleans())) else KINDS[kind]
        values = [draw(one)] * count if draw(st.booleans()) else draw(st.lists(one, min_size=count, max_size=count))
        if pa.types.is_temporal(kind) and all(type(value) in (int, type(None)) for value in values):
            array = pa.array(values, pa.int64() if kind.bit_width == 64 else pa.int32()).view(kind)
        else:
            array = pa.array(values, kind)
        cut = draw(st.integers(0, count))
        columns.append(pa.chunked_array([array[:cut], array[cut:]]) if draw(st.booleans()) else pa.chunked_array(array))
        fields.append(pa.field(f"c{at}", kind, nullable=nulls, metadata={"a": "b"} if draw(st.booleans()) else None))
    return pa.table(columns, schema=pa.schema(fields))


@given(tables(), st.data())
def test_what_is_narrow_is_widened_to_what_it_was(table: pa.Table, data: st.DataObject) -> None:
    found = widen(narrow(table))
    assert found.schema.equals(table.schema, check_metadata=True)
    assert found.equals(table)
    mask = data.draw(st.lists(st.booleans(), min_size=len(table), max_size=len(table)))
    chosen = pa.array(mask, pa.bool_())
    assert widen(narrow(table).filter(chosen)).equals(table.filter(chosen))  # as the pack stage does for each shard


@pytest.mark.parametrize(
    ("values", "bits"),
    [
        ([5, 5, 5], None),
        ([10**12, 10**12 + 255], 8),
        ([-1, 255], 16),
        ([NO_TIME, 10**12, 10**12 + 254], 8),
        ([NO_TIME, 10**12, 10**12 + 255], 16),
        ([0, 2**16], 32),
        ([0, 2**32], 64),
        ([NO_TIME, 2**63 - 1], 8),
        ([-(2**63) + 1, 2**63 - 1], 64),
        ([1, None], 64),
    ],
)
def test_a_column_is_as_wide_as_its_values_need(values: list[int | None], bits: int | None) -> None:
    table = pa.table({"text": ["x"] * len(values), "n": pa.array(values, pa.int64())})
    made = narrow(table)
    assert (made.schema.field("n").type.bit_width if "n" in made.column_names else None) == bits
    assert widen(made).equals(table)


T = 10**12


@pytest.mark.parametrize(
    ("times", "beside", "bits"),
    [
        ([T, T + 300, T + 90_000], [T, T + 300, T + 90_000], None),
        ([T, T + 300, T + 90_000], [T - 5, T + 295, T + 89_995], None),
        ([T, T + 300, T + 90_000], [NO_TIME, T, T + 90_000], 16),
        ([T, T + 300, T + 90_000], [NO_TIME, T + 100, T + 89_900], 8),
        ([T, T + 300, T + 90_000], [T + 90_000] * 3, None),
        ([T, T + 300, T + 90_000], [T + 90_000, T + 90_001, T + 90_002], 8),
        ([-(2**62), 2**62], [2**62, 2**62 - 70_000], 32),
    ],
)
def test_a_column_that_follows_the_event_times_is_as_narrow_as_it_follows_them(
    times: list[int], beside: list[int], bits: int | None
) -> None:
    text = ["x"] * len(times)  # too short to be numbered
    table = pa.table({"text": text, TIME: pa.array(times), "n": pa.array(beside, pa.int64())})
    made = narrow(table)
    assert (made.schema.field("n").type.bit_width if "n" in made.column_names else None) == bits
    assert widen(made).equals(table)


@pytest.mark.parametrize(
    ("texts", "frames", "bits"),
    [
        ([f"customer-{n % 100}" for n in range(5_000)], 2, 8),
        ([f"customer-{n % 300}" for n in range(5_000)], 2, 16),
        ([f"customer-{n % 300}" if n % 7 else None for n in range(5_000)], 2, 16),
        ([f"customer-{n % 300}" for n in range(5_000)], 64, None),  # each frame would have all
        ([f"customer-{n}" for n in range(5_000)], 1, None),
        (["a" * 1_000_000, *["b"] * 5_000], 2, None),
        ([f"customer-{n % 100 if n < SAMPLE else n}" for n in range(5_000)], 1, None),
    ],
)
def test_texts_are_numbers_where_that_is_half_as_long(texts: list[str | None], frames: int, bits: int | None) -> None:
    for kind in (pa.string(), pa.binary()):
        table = pa.table({"key": pa.array(texts, pa.string()).cast(kind)})
        made = narrow(table, frames)
        found = made.schema.field("key").type
        assert (found.index_type.bit_width if pa.types.is_dictionary(found) else None) == bits
        assert widen(made).equals(table)
        some = pa.array([4_000, 0, 7])
        assert widen(made.take(some)).equals(table.take(some))
        coded = pa.table({"key": table["key"].dictionary_encode()})
        assert narrow(coded, frames).schema.field("key").type in (found, pa.dictionary(pa.uint16(), kind))
        assert widen(narrow(coded, frames)).equals(table)
        assert [one.type for one in widen(made, coded=True)] == [pa.dictionary(pa.int32(), kind) if bits else kind]


def test_a_dictionary_with_null_among_its_texts_is_what_it_stands_for() -> None:
    codes = pa.array([0, 1, 2, 0] * 500, pa.int32())
    coded = pa.DictionaryArray.from_arrays(codes, pa.array(["a" * 11, None, "b"]))
    made = narrow(pa.table({"key": coded}))
    assert made.schema.field("key").type == pa.string()
    assert made["key"].to_pylist() == ["a" * 11, None, "b", "a" * 11] * 500


def test_rows_of_which_nothing_is_left_stay_as_they_are() -> None:
    table = pa.table({"n": [1, 1], "at": pa.array([datetime(2026, 1, 1, tzinfo=UTC)] * 2)})
    assert narrow(table) is table
    assert widen(table) is table


def test_the_pack_stage_gives_narrow_frames() -> None:
    """Of 10,000 messages: 2 bytes for offset, event time and a small number, 1 for clock and text, none for what is the
    event time."""
    count = 10_000
    numbers = pa.array(range(10**12, 10**12 + count))
    batch = pa.RecordBatch.from_pydict(
        {
            "_stream": pa.array([0] * count, pa.int32()),
            "_partition": pa.array([3] * count, pa.int32()),
            "_offset": numbers,
            "_time": numbers,
            "_shard": pa.array([0] * count, pa.int32()),
            "_timestamp": numbers,
            "_key": pa.nulls(count, pa.binary()),
            "_raw": pa.nulls(count, pa.binary()),
            "_malformed": pa.nulls(count, pa.string()),
            "key": ["a"] * count,
            "x": pa.array([n % 1_000 for n in range(count)]),
        }
    )
    fields = (pa.field("key", pa.string()), pa.field("x", pa.int64()))
    [row] = pack(batch, PackPlan((0,), fields, False, None), 10**12).to_pylist()
    assert 8 * count < len(row["frame"]) < 8 * count + 5_000
    assert widen(from_ipc(row["frame"]))["_offset"].to_pylist() == numbers.to_pylist()
