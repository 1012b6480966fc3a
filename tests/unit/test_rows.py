"""The row codec: bytes of format 1 by hand, every type, nulls everywhere, damage."""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
import itertools
import math
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.errors import StateCorrupted, UnknownFormat, ValueInvalid
from backend.rows import RowCodec

MOMENT = dt.datetime(2020, 2, 29, 1, 2, 3, 4000)
INNER = pa.struct([("a", pa.int64()), ("b", pa.struct([("c", pa.string()), ("d", pa.bool_())]))])

TYPES: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int8(), [-128, 0, 127]),
    (pa.uint64(), [0, 2**64 - 1]),
    (pa.int64(), [-(2**63), 0, 2**63 - 1]),
    (pa.float32(), [0.0, -0.0, math.inf, math.nan]),
    (pa.float64(), [0.0, -0.0, 1.1, -math.inf, math.nan]),
    (pa.bool_(), [True, False]),
    (pa.string(), ["", "a", "\0", "é" * 70]),
    (pa.large_string(), ["", "a"]),
    (pa.string_view(), ["", "a", "long enough not to be inlined"]),
    (pa.binary(), [b"", b"\0", b"\xff" * 300]),
    (pa.binary_view(), [b"", b"long enough not to be inlined"]),
    (pa.binary(3), [b"abc", b"\0\0\0"]),
    (pa.timestamp("us", "UTC"), [MOMENT.replace(tzinfo=dt.UTC)]),
    (pa.timestamp("ns"), [MOMENT]),
    (pa.timestamp("s"), [MOMENT.replace(microsecond=0)]),
    (pa.date32(), [MOMENT.date()]),
    (pa.date64(), [MOMENT.date()]),
    (pa.time32("s"), [dt.time(1, 2, 3)]),
    (pa.time64("us"), [MOMENT.time()]),
    (pa.duration("ms"), [dt.timedelta(days=-3)]),
    (pa.decimal128(20, 4), [decimal.Decimal("-123456789012.3456"), decimal.Decimal(0)]),
    (pa.decimal256(50, 1), [decimal.Decimal("9" * 40 + ".5")]),
    (pa.dictionary(pa.int8(), pa.string()), ["x", "y", ""]),
    (pa.null(), []),
    (INNER, [{"a": 1, "b": {"c": "x", "d": True}}, {"a": None, "b": None}, {"a": 2, "b": {"c": None, "d": None}}]),
    (pa.struct([]), [{}]),
    (pa.list_(pa.int32()), [[], [1, None, 3]]),
    (pa.large_list(pa.string()), [[], ["", None, "a\0b"]]),
    (pa.list_(pa.float64(), 2), [[1.5, None]]),
    (pa.list_(pa.timestamp("us", "UTC")), [[MOMENT.replace(tzinfo=dt.UTC), None]]),
    (pa.list_(pa.decimal128(9, 2)), [[decimal.Decimal("1.25")]]),
    (pa.list_(pa.list_(pa.binary())), [[[b"\xff", None], None, []]]),
    (pa.list_(INNER), [[{"a": 1, "b": {"c": "x", "d": True}}, None, {"a": None, "b": None}]]),
    (pa.map_(pa.string(), pa.int64()), [[], [("a", 1), ("b", None)]]),
    (pa.map_(pa.string(), pa.list_(pa.map_(pa.int8(), pa.date32()))), [[("a", [[(1, MOMENT.date())], None])]]),
    (
        pa.struct([("m", pa.map_(pa.string(), pa.bool_())), ("l", pa.list_(pa.int8()))]),
        [{"m": [("a", True)], "l": [1]}],
    ),
    (pa.list_(pa.struct([("m", pa.map_(pa.string(), pa.int8()))])), [[{"m": [("a", 1)]}, {"m": None}, None]]),
]


def bits(table: pa.Table) -> list[Any]:
    """Cells as text, which tells -0.0 from 0.0 and NaN from null."""
    return [repr(cell) for column in table.columns for cell in column.to_pylist()]


@pytest.mark.parametrize(("kind", "cells"), TYPES, ids=[str(kind)[:40] for kind, _ in TYPES])
def test_every_type_comes_back(kind: pa.DataType, cells: list[Any]) -> None:
    for values in (cells, [None, *cells, None], [None], []):
        array = pa.array(values, kind)
        sliced = pa.concat_arrays([array, array]).slice(len(array))
        table = pa.table({"before": pa.array(range(len(values)), pa.int16()), "x": array, "after": ["z"] * len(values)})
        table = table.cast(pa.schema([("before", pa.int16()), ("x", kind), ("after", pa.string())]))
        codec = RowCodec(table.schema)
        rows = codec.encode(table)
        back = codec.decode(rows)
        assert back.schema == table.schema
        assert bits(back) == bits(table)
        back.validate(full=True)
        assert rows == codec.encode(table.set_column(1, table.schema.field(1), sliced))
        assert [codec.encode(table.slice(at, 1))[0] for at in range(len(values))] == rows


@given(st.data())
def test_rows_of_any_columns_come_back(data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(TYPES), max_size=12))
    count = data.draw(st.integers(0, 5))
    arrays = [
        pa.array([data.draw(st.sampled_from([None, *cells])) for _ in range(count)], kind) for kind, cells in chosen
    ]
    schema = pa.schema([(f"c{at}", kind) for at, (kind, _) in enumerate(chosen)])
    table = pa.Table.from_arrays(arrays, schema=schema)
    codec = RowCodec(schema)
    rows = codec.encode(table)
    assert bits(codec.decode(rows)) == bits(table)
    assert len(rows) == (count if chosen else 0)


def test_bytes_of_format_1() -> None:
    schema = pa.schema([("i", pa.int64()), ("s", pa.string()), ("b", pa.bool_()), ("t", pa.binary())])
    table = pa.Table.from_pydict(
        {"i": [1, None, -1], "s": ["ab", "", None], "b": [True, None, False], "t": [b"\x00", None, b"xyz"]}, schema
    )
    # format, nulls, int64, bool, length of the first text, the texts
    assert [row.hex() for row in RowCodec(schema).encode(table)] == [
        "010001000000000000000102000000616200",
        "010d00000000000000000000000000",
        "0102ffffffffffffffff000000000078797a",
    ]


def test_equal_rows_are_equal_bytes_whatever_lies_under_a_null() -> None:
    dirty = pa.Array.from_buffers(
        pa.int64(), 1, [pa.py_buffer(b"\x00"), pa.py_buffer(b"\xde\xad\xbe\xef\xde\xad\xbe\xef")]
    )
    struct = pa.StructArray.from_arrays([pa.array([7])], ["a"], mask=pa.array([True]))
    for array in (dirty, struct):
        codec = RowCodec(pa.schema([("x", array.type)]))
        clean = pa.table({"x": pa.nulls(1, array.type)})
        assert codec.encode(pa.table({"x": array})) == codec.encode(clean)


def test_columns_are_found_by_name_and_others_ignored() -> None:
    codec = RowCodec(pa.schema([("a", pa.int64()), ("b", pa.string())]))
    table = pa.table({"z": [0], "b": ["x"], "a": [1]})
    assert codec.decode(codec.encode(table)).to_pylist() == [{"a": 1, "b": "x"}]


def test_chunked_tables_and_large_ones_are_cut_into_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.concat_tables([pa.table({"a": [at], "b": ["x" * at]}) for at in range(50)])
    codec = RowCodec(table.schema)
    whole = codec.encode(table)
    monkeypatch.setattr("backend.rows._MAX_BATCH_BYTES", 100)
    monkeypatch.setattr("backend.rows._DECODE_BYTES", 100)
    assert codec.encode(table) == whole
    assert codec.decode(whole).equals(table)


@pytest.mark.slow
def test_texts_of_more_than_arrow_has_offsets_for_are_cut_first() -> None:
    texts = pa.chunked_array([pa.array(["x" * 2**28])] * 9)
    lengths: list[int] = []
    RowCodec(pa.schema([("a", pa.string())])).feed(pa.table({"a": texts}), lambda data: lengths.append(len(data)))
    assert sum(lengths) > 9 * 2**28


@pytest.mark.parametrize(
    "table", [pa.table({"b": [1]}), pa.table({"a": pa.array([1], pa.int32())}), pa.table({"a": ["1"]})]
)
def test_a_table_of_another_schema_is_refused(table: pa.Table) -> None:
    with pytest.raises(ValueInvalid, match="a"):
        RowCodec(pa.schema([("a", pa.int64())])).encode(table)


@pytest.mark.parametrize(
    "kind",
    [
        pa.sparse_union([pa.field("a", pa.int8())]),
        pa.run_end_encoded(pa.int32(), pa.int8()),
        pa.list_(pa.dense_union([pa.field("a", pa.int8())])),
        pa.dictionary(pa.int8(), pa.list_(pa.int8())),
    ],
    ids=str,
)
def test_a_type_without_a_codec_is_named(kind: pa.DataType) -> None:
    with pytest.raises(ValueError, match="'odd'"):
        RowCodec(pa.schema([("odd", kind)]))


# ---- damage

MIXED = pa.schema([("i", pa.int64()), ("s", pa.string()), ("l", pa.list_(pa.int8())), ("t", pa.string())])
ROWS = RowCodec(MIXED).encode(
    pa.Table.from_pydict({"i": [1, 2], "s": ["ab", "c"], "l": [[1, 2], None], "t": ["é", ""]}, MIXED)
)


def test_an_unknown_format_is_named() -> None:
    codec = RowCodec(MIXED)
    with pytest.raises(UnknownFormat, match="format 2, this release reads 1"):
        codec.decode([ROWS[0], b"\x02" + ROWS[1][1:]])


@pytest.mark.parametrize("cut", range(len(ROWS[0])))
def test_a_truncated_row_is_damage(cut: int) -> None:
    with pytest.raises(StateCorrupted):
        # the last text has no length of its own: a cut in it is found where it is not UTF-8
        RowCodec(MIXED).decode([ROWS[1], ROWS[0][:cut]] if cut != len(ROWS[0]) - 2 else [b""])


@pytest.mark.parametrize("schema", [pa.schema([("i", pa.int64())]), pa.schema([("i", pa.int64()), ("j", pa.int64())])])
def test_a_row_of_fixed_width_has_one_length(schema: pa.Schema) -> None:
    codec = RowCodec(schema)
    (row,) = codec.encode(pa.Table.from_pydict({name: [5] for name in schema.names}, schema))
    for bad in ([row + b"\x00"], [row[:-1]], [row, b""], [row, row[:-1], row + b"\x00"]):
        with pytest.raises(StateCorrupted):
            codec.decode(bad)


def test_lengths_that_overrun_the_row_are_damage() -> None:
    row = bytearray(ROWS[0])
    at = 1 + 1 + 8  # format, nulls, int64: then the lengths
    for length in (2**32 - 1, 100):
        row[at : at + 4] = length.to_bytes(4, "little")
        with pytest.raises(StateCorrupted):
            RowCodec(MIXED).decode([bytes(row)])


@given(st.integers(0, len(ROWS[0]) - 1), st.integers(1, 255))
def test_a_changed_byte_is_a_named_error_or_another_row(at: int, change: int) -> None:
    row = bytearray(ROWS[0])
    row[at] ^= change
    with contextlib.suppress(StateCorrupted, UnknownFormat):
        RowCodec(MIXED).decode([bytes(row), ROWS[1]]).validate(full=True)


def test_no_rows_are_an_empty_table() -> None:
    for schema in (MIXED, pa.schema([("i", pa.int64())]), pa.schema([("x", INNER)])):
        assert RowCodec(schema).decode([]).equals(schema.empty_table())
    for one, two in itertools.pairwise([pa.schema([]), MIXED]):
        assert RowCodec(one).encode(two.empty_table()) == []


def test_more_texts_than_a_dictionary_can_name_are_refused_by_name():
    """Each row was encoded with a dictionary of its own."""
    kind = pa.dictionary(pa.int8(), pa.string())
    codec = RowCodec(pa.schema([("v", kind)]))
    rows = [
        row for at in range(129) for row in codec.encode(pa.table({"v": pa.array([str(at)], pa.string()).cast(kind)}))
    ]
    assert codec.decode(rows[:128])["v"].to_pylist() == [str(at) for at in range(128)]
    with pytest.raises(StateCorrupted, match="not in range"):
        codec.decode(rows)
