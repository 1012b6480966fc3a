"""What a sink keeps of the rows that it published: equal rows are equal, whatever lies around them; others are not."""

from __future__ import annotations

import datetime
import math
from typing import Any

import pyarrow as pa
import pytest

from backend.errors import OutputDiffers
from backend.sinks.record import Digest, check_same, gathered

COLUMNS: dict[str, pa.Array] = {
    "floats": pa.array([1.5, None, -2.25]),
    "infinite": pa.array([math.inf, math.nan, 1e30]),
    "texts": pa.array(["a", None, ""]),
    "views": pa.array(["a", None, "b"], pa.string_view()),
    "bytes": pa.array([b"\x00", None, b""]),
    "flags": pa.array([True, None, False]),
    "times": pa.array([1, None, 3], pa.timestamp("us", "UTC")),
    "spans": pa.array([1, None, 3], pa.duration("ms")),
    "days": pa.array([datetime.date(2020, 1, 1), None, datetime.date(2020, 1, 3)]),
    "decimals": pa.array([1, None, 3], pa.decimal128(10, 2)),
    "lists": pa.array([[1.5, None], None, []], pa.list_(pa.float64())),
    "pairs": pa.array([[1.5, 2.0], None, [0.0, 1.0]], pa.list_(pa.float64(), 2)),
    "maps": pa.array([[("a", 1.5)], None, []], pa.map_(pa.string(), pa.float64())),
    "structs": pa.array([{"x": 1.5, "y": ["a"]}, None, {"x": None, "y": None}],
                        pa.struct([("x", pa.float64()), ("y", pa.list_(pa.string()))])),
    "words": pa.array(["a", None, "b"]).dictionary_encode(),
    "nothing": pa.nulls(3),
}  # fmt: skip


def content(table: pa.Table) -> tuple[int, str]:
    return Digest().add(table).content


@pytest.mark.parametrize("name", COLUMNS)
def test_equal_rows_are_equal_whatever_lies_around_them(name: str) -> None:
    column = COLUMNS[name]
    rows = column.to_pylist()

    def built(*cells: Any) -> pa.Array:
        return pa.array(cells).dictionary_encode() if name == "words" else pa.array(cells, column.type)

    found = content(pa.table({"c": column}))
    assert content(pa.table({"c": built(*rows)})) == found
    doubled = built(*rows, *rows)
    assert content(pa.table({"c": doubled}).slice(3)) == found, "a slice has an offset and more behind it"
    assert content(pa.table({"c": pa.chunked_array([doubled.slice(3, 1), doubled.slice(1, 2)])})) == found, "chunks"
    assert content(pa.table({"other": column})) != found, "the name of a column counts"
    if name != "nothing":
        assert content(pa.table({"c": built(*reversed(rows))})) != found, "rows are compared in their order"
        assert content(pa.table({"c": built(rows[0], rows[1], rows[0])})) != found


def test_what_lies_under_a_null_does_not_count() -> None:
    validity, values = pa.py_buffer(b"\x01"), [pa.py_buffer(bytes([7, 0, 0, 0, n, 0, 0, 0])) for n in (1, 2)]
    one, other = (pa.Array.from_buffers(pa.int32(), 2, [validity, data]) for data in values)
    assert one.to_pylist() == other.to_pylist() == [7, None]
    assert content(pa.table({"c": one})) == content(pa.table({"c": other}))


def test_floats_count_with_seven_digits_also_inside_lists() -> None:
    third = 1 / 3
    for other, same in ((third * (1 + 1e-15), True), (third * (1 + 1e-5), False)):
        for shape in (lambda x: x, lambda x: [x], lambda x: {"x": [x]}):
            one, two = (pa.table({"c": [shape(value)]}) for value in (third, other))
            assert (content(one) == content(two)) is same


def test_where_a_text_ends_counts_and_a_type_counts() -> None:
    tables = [
        pa.table({"a": ["ab", "c"], "b": ["", "d"]}),
        pa.table({"a": ["a", "bc"], "b": ["", "d"]}),
        pa.table({"a": ["ab", ""], "b": ["c", "d"]}),
        pa.table({"a": ["ab"], "b": [""]}),
        pa.table({"a": [None, "c"], "b": ["", "d"]}),
        pa.table({"a": ["", "c"], "b": ["", "d"]}),
        pa.table({"a": [1]}),
        pa.table({"a": pa.array([1], pa.int32())}),
        pa.table({"a": [1.0]}),
    ]
    assert len({content(table) for table in tables}) == len(tables)


def test_a_type_that_state_cannot_hold_is_compared_too() -> None:
    union = pa.UnionArray.from_dense(
        pa.array([0, 1], pa.int8()), pa.array([0, 0], pa.int32()), [pa.array([5]), pa.array(["five"])]
    )
    assert content(pa.table({"c": union})) == content(pa.table({"c": union}))
    assert content(pa.table({"c": union})) != content(pa.table({"c": union.slice(1)}))


def refusal(known: Any, made: Any) -> str:
    with pytest.raises(OutputDiffers) as caught:
        check_same(known, made, version=7, where="out", command="do this")
    assert (caught.value.where, caught.value.command) == ("out", "do this")
    return caught.value.why.partition(":")[0]


def test_the_error_says_which_shards_and_how_many_rows() -> None:
    known = {"results": {0: (2, "a"), 1: (3, "b")}, "errors": {1: (1, "c")}}
    check_same(known, known, version=7, where="out", command="")
    check_same({}, known, version=7, where="out", command="")  # nothing is known of what was published
    check_same({"errors": known["errors"]}, {**known, "results": {}}, version=7, where="out", command="")
    assert refusal(known, {**known, "errors": {}}) == "shard 1 published 1 errors, now 0"
    assert refusal(known, {**known, "results": {0: (2, "x"), 1: (3, "b")}}) == "shard 0 published 2 results, now others"
    many = {"results": dict.fromkeys(range(9), (1, "a"))}
    assert refusal(many, {}) == ", ".join(f"shard {n} published 1 results, now 0" for n in range(3)) + ", and 6 more"


def test_shards_without_rows_are_in_no_record() -> None:
    shards = {1: {"results": (2, "a"), "errors": (0, "e")}, 0: {"results": (0, "e"), "errors": (1, "b")}}
    assert gathered(shards) == {"results": {1: (2, "a")}, "errors": {0: (1, "b")}}


@pytest.mark.parametrize(
    ("rows", "kind", "content"),
    [
        ([[1, 2], None], pa.list_(pa.field("item", pa.int64(), nullable=False), 2), "d8cc3af68b0dda1c"),
        ([[None, None, None]], pa.large_list(pa.null()), "b03f48ed8aa306f3"),
        ([[1.5, 2.5]], pa.large_list(pa.float64()), "ef9d1f8d71d082ab"),
        ([[1.5, 2.5]], pa.list_(pa.float64(), 2), "56b778611e1fa89e"),
    ],
    ids=str,
)
def test_what_other_releases_published_is_compared_with_what_they_wrote(
    rows: list[Any], kind: pa.DataType, content: str
) -> None:
    """Digests as they have always been: another one would refuse a micro-batch that runs again after it."""
    digest = Digest()
    digest.add(pa.table({"c": pa.array(rows, kind)}))
    assert digest.content == (len(rows), content)
