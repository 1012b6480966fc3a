"""The archive as a Spark source: order, bounds, formats, restarts, and errors before anything is counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from backend.errors import HistoryLost, SourceGap, SourceWentBack
from backend.sources.archive import ArchiveSource, archive
from backend.sources.archive_files import WRITE_SCHEMA, write_archive
from backend.sources.formats import COLUMNS
from recovery.failures import read
from tests.support.parsed import replayed, streamed

pytestmark = [pytest.mark.spark, pytest.mark.gentle]


def messages(values: list[bytes | None], *, partition: int = 0, first: int = 0) -> pa.Table:
    n = len(values)
    times = pa.array([1_000 * offset for offset in range(n)], pa.int64()).cast(pa.timestamp("ms", tz="UTC"))
    offsets = list(range(first, first + n))
    return pa.table([["t"] * n, [partition] * n, offsets, times, [b"k"] * n, values], schema=WRITE_SCHEMA)


def numbers(n: int, *, partition: int = 0, first: int = 0) -> pa.Table:
    return messages([b'{"n": %d}' % number for number in range(first, first + n)], partition=partition, first=first)


def run(spark: Any, source: ArchiveSource, checkpoint: Path) -> list[list[tuple[int, int]]]:
    """Run to the end of the archive; per micro-batch the (partition, offset) in the order they came."""
    batches: list[list[tuple[int, int]]] = []

    def take(frame: Any, version: int) -> None:
        assert frame.columns == list(COLUMNS)
        batches.append([(row.partition, row.offset) for row in frame.select("partition", "offset").collect()])

    writer = streamed(spark, source).writeStream.foreachBatch(take).option("checkpointLocation", str(checkpoint))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    return batches


def test_micro_batches_are_bounded_and_in_offset_order_and_a_restart_goes_on(spark: Any, tmp_path: Path) -> None:
    write_archive(tmp_path / "a", pa.concat_tables([numbers(7), numbers(4, partition=1, first=10)]), rows_per_file=3)
    source = archive(tmp_path / "a", value="n int", max_offsets_per_batch=3)
    batches = run(spark, source, tmp_path / "c")
    by_partition = [{p: [o for q, o in batch if q == p] for p in (0, 1)} for batch in batches if batch]
    assert by_partition == [
        {0: [0, 1, 2], 1: [10, 11, 12]},
        {0: [3, 4, 5], 1: [13]},
        {0: [6], 1: []},
    ]
    pq.write_table(numbers(2, first=7), tmp_path / "a" / "0-older-name.parquet")
    pq.write_table(numbers(1, partition=2, first=5), tmp_path / "a" / "new-partition.parquet")
    assert [sorted(batch) for batch in run(spark, source, tmp_path / "c")] == [[(0, 7), (0, 8), (2, 5)]]


def test_a_replay_gives_exactly_the_ranges_parsed_in_the_same_way(spark: Any, tmp_path: Path) -> None:
    write_archive(tmp_path / "a", pa.concat_tables([numbers(9), numbers(5, partition=1)]), rows_per_file=4)
    source = archive(tmp_path / "a", value="n int", max_offsets_per_task=2)
    assert source.offsets(spark) == {("t", 0): (0, 9), ("t", 1): (0, 5)}
    rows = replayed(spark, source, {("t", 0): (2, 8), ("t", 1): (1, 2)})
    assert rows.columns == list(COLUMNS)
    found = sorted((row.partition, row.offset, row.fields.n) for row in rows.collect())
    assert found == [(0, 2, 2), (0, 3, 3), (0, 4, 4), (0, 5, 5), (0, 6, 6), (0, 7, 7), (1, 1, 1)]
    assert replayed(spark, source, {("t", 0): (3, 3)}).collect() == []
    with pytest.raises(HistoryLost, match="needed are 5 to 9, there are 0 to 8"):
        replayed(spark, source, {("t", 0): (5, 10)})


def test_what_does_not_parse_is_kept_with_a_reason(spark: Any, tmp_path: Path) -> None:
    good_value = b'{"n": 1, "at": "2013-01-01T10:15:00Z"}'
    arrays = [b"[]", b' [{"n": 1}, {"n": 2}]']
    values = [good_value, b'{"n": "x"}', b"no json", b"", None, *arrays, b"null", b"\xff\xfe", b"{}", b'{"other": 1}']
    write_archive(tmp_path / "a", messages(values))
    source = archive(tmp_path / "a", value="n int, at timestamp")
    rows = {row.offset: row for row in replayed(spark, source, source.offsets(spark)).collect()}
    good = {offset for offset, row in rows.items() if row.malformed is None}
    assert good == {0, 9, 10}
    assert rows[0].fields.n == 1
    assert rows[0].fields.at.isoformat() == "2013-01-01T10:15:00"
    assert rows[9].fields.asDict() == {"n": None, "at": None}
    assert all(row.raw == values[offset] for offset, row in rows.items())
    for offset in set(rows) - good:
        assert rows[offset].fields is None
    assert rows[4].malformed == "the value is null"
    assert "struct<n:int,at:timestamp>" in rows[2].malformed


def test_typed_and_raw_values(spark: Any, tmp_path: Path) -> None:
    plain = numbers(3)
    struct = pa.StructArray.from_arrays([pa.array([1, 2, 3], pa.int32())], ["n"], mask=pa.array([False, False, True]))
    write_archive(tmp_path / "typed", plain.set_column(5, "value", struct))
    source = archive(tmp_path / "typed", value="n int", format="typed")
    rows = replayed(spark, source, source.offsets(spark)).collect()
    assert [row.fields and row.fields.n for row in rows] == [1, 2, None]
    assert [row.malformed for row in rows] == [None, None, "the value is null"]
    source = archive(tmp_path / "wider", value="n tinyint", format="typed")
    wider = pa.StructArray.from_arrays([pa.array([1, 2**40, -128])], ["n"])
    write_archive(tmp_path / "wider", plain.set_column(5, "value", wider))
    rows = replayed(spark, source, source.offsets(spark)).collect()
    assert [row.fields and row.fields.n for row in rows] == [1, None, -128]
    assert [row.malformed for row in rows] == [None, "the value does not fit its field 'n', int8", None]
    write_archive(tmp_path / "raw", plain)
    source = archive(tmp_path / "raw", format="raw")
    rows = replayed(spark, source, source.offsets(spark)).collect()
    assert [bytes(row.fields.value) for row in rows] == [b'{"n": 0}', b'{"n": 1}', b'{"n": 2}']


def test_a_gap_stops_the_query_before_anything_is_counted(spark: Any, tmp_path: Path) -> None:
    write_archive(tmp_path / "a", numbers(4))
    pq.write_table(numbers(2, first=5), tmp_path / "a" / "later.parquet")
    source = archive(tmp_path / "a", value="n int", max_offsets_per_batch=2)
    with pytest.raises(Exception, match=r"later\.parquet, t-0.*offsets 4 to 4") as caught:
        run(spark, source, tmp_path / "c")
    assert isinstance(read(caught.value).error, SourceGap)


def test_an_archive_that_lost_what_was_read_is_refused(spark: Any, tmp_path: Path) -> None:
    write_archive(tmp_path / "a", numbers(4))
    source = archive(tmp_path / "a", value="n int")
    run(spark, source, tmp_path / "c")
    for file in (tmp_path / "a").iterdir():
        file.unlink()
    write_archive(tmp_path / "a", numbers(2))
    with pytest.raises(Exception, match="next offset to read is 4") as caught:
        run(spark, source, tmp_path / "c")
    assert isinstance(read(caught.value).error, SourceWentBack)


def test_the_offset_in_sparks_log_has_a_format_version(spark: Any, tmp_path: Path) -> None:
    write_archive(tmp_path / "a", numbers(2))
    run(spark, archive(tmp_path / "a", value="n int"), tmp_path / "c")
    logged = (tmp_path / "c" / "offsets" / "0").read_text().splitlines()[-1]
    assert json.loads(logged) == {"format": 1, "next": {"t": {"0": 2}}, "first": {"t": {"0": 0}}}
