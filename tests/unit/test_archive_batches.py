"""What is handed out at once of an archive is bounded in bytes, whatever the files' encoding hides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from backend.errors import SourceDamaged
from backend.sources.archive_files import BATCH_BYTES, WRITE_SCHEMA, read_range, write_archive
from backend.sources.archive_index import Archive


def test_long_messages_come_in_small_batches(tmp_path: Path) -> None:
    count, long = 40_000, b"x" * 1_500  # 60 MB, of which a dictionary in the file leaves next to nothing
    rows = table(["t"] * count, WRITE_SCHEMA, [long] * count)
    batches = read(tmp_path / "a", rows, "t", WRITE_SCHEMA, row_group_rows=count)
    assert sum(batch.num_rows for batch in batches) == count
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
        batches = list(read_range(str(tmp_path / "x"), topic, 0, (0, 6), slices, gaps, WRITE_SCHEMA))
        found = pa.Table.from_batches(batches)
        assert found.schema == WRITE_SCHEMA
        assert found["topic"].to_pylist() == [topic] * 6
        assert found["value"].to_pylist() == [topic.encode()] * 6
        assert found["offset"].to_pylist() == list(range(6))


def test_a_topic_that_statistics_tell_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    real = pq.ParquetFile.iter_batches

    def iter_batches(self: pq.ParquetFile, *given: Any, columns: list[str], **more: Any) -> Any:
        asked.append(columns)
        return real(self, *given, columns=columns, **more)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", iter_batches)
    read(tmp_path / "a", table(["t"] * 3, WRITE_SCHEMA, [b"x"] * 3), "t", WRITE_SCHEMA)
    assert asked == [["key", "value"], ["partition", "offset", "timestamp", "key", "value"]]


def table(topics: list[str], schema: pa.Schema, values: Any) -> pa.Table:
    count = len(topics)
    times = pa.array([0] * count, pa.timestamp("ms", tz="UTC"))
    return pa.table([topics, [0] * count, list(range(count)), times, [None] * count, values], schema=schema)


def read(place: Path, rows: pa.Table, topic: str, schema: pa.Schema, **options: Any) -> list[pa.RecordBatch]:
    write_archive(place, rows, **options)
    slices, gaps = Archive(str(place)).partitions()[topic, 0].cut(0, rows.num_rows)
    return list(read_range(str(place), topic, 0, (0, rows.num_rows), slices, gaps, schema))


def test_a_long_topic_that_is_not_read_is_counted(tmp_path: Path) -> None:
    count, topic = 140_000, "t" * 200
    rows = table([topic] * count, WRITE_SCHEMA, [b"x"] * count)
    batches = read(tmp_path / "a", rows, topic, WRITE_SCHEMA, row_group_rows=count)
    assert sum(batch.num_rows for batch in batches) == count
    assert max(batch.nbytes for batch in batches) < 1.1 * BATCH_BYTES


@pytest.mark.parametrize("gone", ["topic", "partition", "offset", "value"])
def test_a_file_that_lost_a_column_is_named(gone: str, tmp_path: Path) -> None:
    rows = table(["t"] * 5, WRITE_SCHEMA, [b"x"] * 5)
    read(tmp_path / "a", rows, "t", WRITE_SCHEMA)
    [file] = (tmp_path / "a").glob("**/*.parquet")
    slices, gaps = Archive(str(tmp_path / "a")).partitions()["t", 0].cut(0, 5)
    pq.write_table(rows.drop_columns([gone]), file)
    with pytest.raises(SourceDamaged, match=gone) as caught:
        list(read_range(str(tmp_path / "a"), "t", 0, (0, 5), slices, gaps, WRITE_SCHEMA))
    assert file.name in str(caught.value.where)
