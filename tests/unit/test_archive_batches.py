"""What is handed out at once of an archive is bounded in bytes, whatever the files' encoding hides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from backend import readable as fields_read
from backend.errors import SourceDamaged, SourceGap, SourceInvalid
from backend.sources import archive_files
from backend.sources.archive_files import BATCH_BYTES, WRITE_SCHEMA, read_range, write_archive
from backend.sources.archive_index import Archive
from backend.sources.archive_reader import Piece
from backend.sources.formats import MALFORMED, Parse
from backend.sources.kafka_fetch import RECORDS


def test_long_messages_come_in_small_batches(tmp_path: Path) -> None:
    count, long = 40_000, b"x" * 1_500  # 60 MB, of which a dictionary in the file leaves next to nothing
    rows = table(["t"] * count, WRITE_SCHEMA, [long] * count)
    batches = read(tmp_path / "a", rows, "t", WRITE_SCHEMA, row_group_rows=count)
    assert sum(batch.num_rows for batch in batches) == count
    assert max(batch.get_total_buffer_size() for batch in batches) < 2 * BATCH_BYTES


def test_long_messages_behind_short_ones_come_in_small_batches(tmp_path: Path) -> None:
    short, count = 300, 30_000
    values = [b"x"] * short + [number.to_bytes(8, "big") * 190 for number in range(count)]  # 46 MB
    rows = table(["t"] * len(values), WRITE_SCHEMA, values)
    batches = read(tmp_path / "a", rows, "t", WRITE_SCHEMA, row_group_rows=len(values))
    assert sum(batch.num_rows for batch in batches) == len(values)
    assert max(batch.get_total_buffer_size() for batch in batches) < 2 * BATCH_BYTES


def test_long_fields_of_structs_come_in_small_batches(tmp_path: Path) -> None:
    """Beside numbers, which are counted, and nested in a struct and a list, where the rows are looked at."""
    count = 40_000
    kind = pa.struct([("n", pa.int64()), ("more", pa.struct([("texts", pa.list_(pa.string()))]))])
    values = pa.array([{"n": 1, "more": {"texts": ["x" * 1_500]}}] * count, kind)
    schema = WRITE_SCHEMA.set(5, pa.field("value", kind))
    batches = read(tmp_path / "a", table(["t"] * count, schema, values), "t", schema, row_group_rows=count)
    assert sum(batch.num_rows for batch in batches) == count
    assert max(batch.get_total_buffer_size() for batch in batches) < 2 * BATCH_BYTES


@pytest.mark.parametrize("statistics", [True, ["offset"]])
def test_the_topic_is_told_by_statistics_or_read(statistics: bool | list[str], tmp_path: Path) -> None:
    """Row groups of one topic, of another, and of both: each row is handed out to its topic, and to no other."""
    topics = [*["a"] * 4, *["b"] * 4, *"aabb"]
    offsets = {"a": iter(range(10)), "b": iter(range(10))}
    rows = table(topics, WRITE_SCHEMA, [topic.encode() for topic in topics])
    rows = rows.set_column(2, WRITE_SCHEMA.field("offset"), pa.array([next(offsets[topic]) for topic in topics]))
    (tmp_path / "x").mkdir()
    pq.write_table(rows, tmp_path / "x" / "both.parquet", row_group_size=4, write_statistics=statistics)
    Archive(str(tmp_path / "x")).write_index([])
    for topic in ("a", "b"):
        slices, gaps = Archive(str(tmp_path / "x")).partitions()[topic, 0].cut(0, 6)
        batches = list(read_range(str(tmp_path / "x"), Piece(topic, 0, 0, 6, slices, gaps), WRITE_SCHEMA))
        found = pa.Table.from_batches(batches)
        assert found.schema == WRITE_SCHEMA
        assert found["topic"].to_pylist() == [topic] * 6
        assert found["value"].to_pylist() == [topic.encode()] * 6
        assert found["offset"].to_pylist() == list(range(6))


@pytest.mark.parametrize("bad", [[0, 6, 1, 7], [-5, -4, -3, -2]], ids=["back", "negative"])
def test_what_is_wrong_with_the_offsets_of_other_topics_is_passed_over(tmp_path: Path, bad: list[int]) -> None:
    write_archive(tmp_path / "x", table(["good"] * 3, WRITE_SCHEMA, [b""] * 3))
    rows = table(["other"] * 4, WRITE_SCHEMA, [b""] * 4)
    rows = rows.set_column(2, WRITE_SCHEMA.field("offset"), pa.array(bad))
    pq.write_table(rows, tmp_path / "x" / "b.parquet", row_group_size=2)
    assert [*Archive(str(tmp_path / "x"), None, ("good",)).partitions()] == [("good", 0)]
    with pytest.raises((SourceGap, SourceInvalid)):
        Archive(str(tmp_path / "x")).partitions()


def test_fields_of_which_no_row_can_be_read_are_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves of rows with all their fields, until each row is alone, cost a task minutes."""
    count, width = 256, 20
    latin = pa.Array.from_buffers(pa.string(), count, pa.array([b"\xe9"] * count).buffers())
    columns = [latin, *[pa.array(["a"] * count)] * width]
    looked: list[int] = []
    fault, as_ = fields_read._fault, archive_files._as
    monkeypatch.setattr(fields_read, "_fault", lambda values: (looked.append(len(values)), fault(values))[1])
    fields = pa.StructArray.from_arrays(columns, [f"c{number}" for number in range(width + 1)])
    found, malformed = fields_read.readable(fields, pa.nulls(count, pa.string()))
    assert set(malformed.to_pylist()) == {"a field cannot be read: Invalid UTF8 sequence at string index 0"}
    assert set(found.field(0).to_pylist()) == {"\ufffd"}
    assert sum(looked) <= 3 * count * (width + 1)
    looked.clear()
    monkeypatch.setattr(archive_files, "_as", lambda one, kind: (looked.append(len(one)), as_(one, kind))[1])
    halves = pa.StructArray.from_arrays([pa.array([0.5] * count)] * 2, ["a", "b"])
    kind = pa.struct([("a", pa.int32()), ("b", pa.float64()), ("c", pa.int8())])
    made, why = archive_files._fitting(halves, kind)
    assert made.null_count == count
    assert set(why.to_pylist()) == {"the value does not fit its field 'a', int32"}
    assert sum(looked) <= count * 20


def test_a_value_of_which_several_fields_do_not_fit_names_the_first(tmp_path: Path) -> None:
    values = pa.array([{"a": 1.0, "b": 2.5}, {"a": 1.5, "b": 2.5}, {"a": 3.0, "b": 4.0}, None])
    made, why = archive_files._fitting(values, pa.struct([("b", pa.int8()), ("a", pa.int8()), ("c", pa.string())]))
    assert made.to_pylist() == [None, None, {"b": 4, "a": 3, "c": None}, None]
    text = "the value does not fit its field 'b', int8"
    assert why.to_pylist() == [text, text, None, None]


@pytest.mark.parametrize("keys", [[None] * 3, [None, b"k", None]])
def test_a_topic_and_keys_that_statistics_tell_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: list[bytes | None]
) -> None:
    asked: list[list[str]] = []
    real = pq.ParquetFile.iter_batches

    def iter_batches(self: pq.ParquetFile, *given: Any, columns: list[str], **more: Any) -> Any:
        asked.append(columns)
        return real(self, *given, columns=columns, **more)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", iter_batches)
    rows = table(["t"] * 3, WRITE_SCHEMA, [b"x"] * 3).set_column(4, "key", pa.array(keys, pa.binary()))
    found = pa.Table.from_batches(read(tmp_path / "a", rows, "t", WRITE_SCHEMA))
    known = ["key"] if any(keys) else []
    assert asked == [[*known, "value"], ["offset", "timestamp", *known, "value"]]
    assert found["key"].to_pylist() == keys


def table(topics: list[str], schema: pa.Schema, values: Any) -> pa.Table:
    count = len(topics)
    times = pa.array([0] * count, pa.timestamp("ms", tz="UTC"))
    return pa.table([topics, [0] * count, list(range(count)), times, [None] * count, values], schema=schema)


def read(place: Path, rows: pa.Table, topic: str, schema: pa.Schema, **options: Any) -> list[pa.RecordBatch]:
    write_archive(place, rows, **options)
    slices, gaps = Archive(str(place)).partitions()[topic, 0].cut(0, rows.num_rows)
    return list(read_range(str(place), Piece(topic, 0, 0, rows.num_rows, slices, gaps), schema))


def test_a_long_topic_that_is_not_read_is_counted(tmp_path: Path) -> None:
    count, topic = 140_000, "t" * 200
    rows = table([topic] * count, WRITE_SCHEMA, [b"x"] * count)
    batches = read(tmp_path / "a", rows, topic, WRITE_SCHEMA, row_group_rows=count)
    assert sum(batch.num_rows for batch in batches) == count
    assert max(batch.nbytes for batch in batches) < 1.1 * BATCH_BYTES


def test_a_value_that_does_not_fit_its_declared_type_is_malformed_and_no_other(tmp_path: Path) -> None:
    """An integer too large, a text that is none, a fraction; a field that is not declared may be anything."""
    kind = pa.struct([("n", pa.int64()), ("count", pa.string()), ("x", pa.float64()), ("more", pa.int64())])
    values = [
        {"n": 7, "count": "8", "x": 9.0, "more": 2**40},
        {"n": 2**31, "count": "8", "x": 9.0},
        None,
        {"n": 7, "count": "eight", "x": 9.0},
        {"n": 7, "count": "8", "x": 0.5},
        {"n": -(2**31), "count": None, "x": None},
    ]
    rows = table(["t"] * 6, WRITE_SCHEMA.set(5, pa.field("value", kind)), pa.array(values, kind))
    declared = pa.struct([("n", pa.int32()), ("count", pa.int64()), ("x", pa.int16())])
    schema = WRITE_SCHEMA.set(5, pa.field("value", declared)).append(pa.field(MALFORMED, pa.string()))
    parsed = pa.Table.from_batches(map(Parse("typed", None, ""), read(tmp_path / "a", rows, "t", schema)))
    good = {0: {"n": 7, "count": 8, "x": 9}, 5: {"n": -(2**31), "count": None, "x": None}}
    assert parsed["fields"].to_pylist() == [good.get(offset) for offset in range(6)]
    assert parsed["malformed"].to_pylist() == [
        None,
        "the value does not fit its field 'n', int32",
        "the value is null",
        "the value does not fit its field 'count', int64",
        "the value does not fit its field 'x', int16",
        None,
    ]
    assert parsed["offset"].to_pylist() == [*range(6)]


@pytest.mark.parametrize("kind", [pa.int64(), pa.uint64(), pa.timestamp("ms")])
def test_a_timestamp_beyond_those_of_spark_is_none(kind: pa.DataType, tmp_path: Path) -> None:
    """Such as nanoseconds that were taken for milliseconds."""
    times = [1_700_000_000, 2**63 - 1, None, 1_700_000_001]
    rows = table(["t"] * 4, WRITE_SCHEMA, [b"x"] * 4)
    rows = rows.set_column(3, "timestamp", pa.array(times, pa.uint64()).cast(pa.int64()).cast(kind))
    (tmp_path / "a").mkdir()
    pq.write_table(rows, tmp_path / "a" / "own.parquet")
    slices, gaps = Archive(str(tmp_path / "a")).partitions()["t", 0].cut(0, 4)
    found = pa.Table.from_batches(read_range(str(tmp_path / "a"), Piece("t", 0, 0, 4, slices, gaps), RECORDS))
    us = found["timestamp"].cast(pa.int64()).to_pylist()
    assert us == [1_700_000_000_000, None, None, 1_700_000_001_000]


@pytest.mark.parametrize("gone", ["topic", "partition", "offset", "value"])
def test_a_file_that_lost_a_column_is_named(gone: str, tmp_path: Path) -> None:
    rows = table(["t"] * 5, WRITE_SCHEMA, [b"x"] * 5)
    read(tmp_path / "a", rows, "t", WRITE_SCHEMA)
    [file] = (tmp_path / "a").glob("**/*.parquet")
    slices, gaps = Archive(str(tmp_path / "a")).partitions()["t", 0].cut(0, 5)
    pq.write_table(rows.drop_columns([gone]), file)
    with pytest.raises(SourceDamaged, match=gone) as caught:
        list(read_range(str(tmp_path / "a"), Piece("t", 0, 0, 5, slices, gaps), WRITE_SCHEMA))
    assert file.name in str(caught.value.where)
