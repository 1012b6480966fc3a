"""A job's results as a source: every row once, at an offset that never changes, whatever happened to the first job."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.types import LongType, StructField, StructType

from backend.errors import HistoryLost, SourceDamaged, SourceWentBack
from backend.sinks.parquet import ParquetSink
from backend.sources import results_files
from backend.sources.archive_files import BATCH_BYTES
from backend.sources.archive_index import Slice
from backend.sources.archive_reader import ArchiveStreamReader, Piece
from backend.sources.archive_seen import DIRECTORY, Memory
from backend.sources.formats import ValueFormat
from backend.sources.results import results_of
from backend.sources.results_files import TOPIC, ResultsArchive, read_results
from tests.support.sink_story import Story, to_attempts

VALUE = "window_start timestamp, origin string, n long, nowhere string"
SCHEMA = pa.schema(
    [
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", pa.timestamp("us", "UTC")),
        pa.field("key", pa.binary()),
        pa.field(
            "value",
            pa.struct(
                [
                    ("id", pa.string()),
                    ("window_start", pa.timestamp("us", "UTC")),
                    ("n", pa.int64()),
                    ("no", pa.string()),
                ]
            ),
        ),
    ]
)


def publish(home: Path, story: Story, *versions: int) -> None:
    """Publish, each time as a new process does."""
    for version in versions:
        sink = ParquetSink(home / "out", home / "err")
        sink.open("q")
        sink.finish(*to_attempts(sink, version, story.frames[version]))


def read(home: Path, shard: int, start: int, end: int) -> list[tuple[int, str]]:
    archive = ResultsArchive(str(home / "out"))
    slices, gaps = archive.partitions()[TOPIC, shard].cut(start, end)
    batches = read_results(str(home / "out"), Piece(TOPIC, shard, start, end, slices, gaps), SCHEMA)
    return [(row["offset"], row["value"]["id"]) for batch in batches for row in batch.to_pylist()]


def test_every_row_is_read_once_while_micro_batches_are_published_and_replaced(tmp_path: Path) -> None:
    story = Story(7, 20)
    found: dict[int, list[tuple[int, str]]] = {shard: [] for shard in range(story.shards)}
    for version in range(20):
        publish(tmp_path, story, version, *([version] if version % 3 == 0 else []))
        for (_, shard), index in ResultsArchive(str(tmp_path / "out")).partitions().items():
            at = len(found[shard])
            if index.range[1] > at:
                found[shard] += read(tmp_path, shard, at, index.range[1])
        if version % 4 == 0:
            publish(tmp_path, story, version)
    wanted = {
        shard: [row[0] for rows in story.rows for row in rows if row[2] == shard] for shard in range(story.shards)
    }
    assert found == {shard: list(enumerate(names)) for shard, names in wanted.items()}
    assert read(tmp_path, 1, 5, 9) == list(enumerate(wanted[1]))[5:9]


@pytest.mark.parametrize("absent", [False, True])
def test_a_micro_batch_that_is_published_again_is_read_by_its_new_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: bool
) -> None:
    """It was planned by its old name; where directories cannot be exchanged there is none for a moment."""
    story, place = Story(7, 6), str(tmp_path / "out")
    publish(tmp_path, story, *range(6))
    wanted = read(tmp_path, 0, 0, 4)
    slices, gaps = ResultsArchive(place).partitions()[TOPIC, 0].cut(0, 4)
    before = {*(tmp_path / "out").glob("batch=*/*.parquet")}
    publish(tmp_path, story, *range(6))
    assert before.isdisjoint((tmp_path / "out").glob("batch=*/*.parquet"))
    if absent:
        away, here = tmp_path / "away", tmp_path / "out" / slices[0].path.partition("/")[0]
        here.rename(away)
        monkeypatch.setattr(results_files.time, "sleep", lambda _: away.rename(here))
    batches = read_results(place, Piece(TOPIC, 0, 0, 4, slices, gaps), SCHEMA)
    assert [(row["offset"], row["value"]["id"]) for batch in batches for row in batch.to_pylist()] == wanted


def test_values_are_the_columns_asked_for(tmp_path: Path) -> None:
    story = Story(7, 6)
    publish(tmp_path, story, *range(6))
    place = str(tmp_path / "out")
    cut = ResultsArchive(place).partitions()[TOPIC, 0].cut(0, 3)
    rows = [row for batch in read_results(place, Piece(TOPIC, 0, 0, 3, *cut), SCHEMA) for row in batch.to_pylist()]
    first = next(row for rows in story.rows for row in rows if row[2] == 0)
    assert len(rows) == 3
    assert rows[0]["value"] | {"window_start": rows[0]["value"]["window_start"].timestamp() * 1000} == {
        "id": first[0], "window_start": first[3], "n": first[5], "no": None,
    }  # fmt: skip
    assert (rows[0]["timestamp"], rows[0]["key"], rows[0]["partition"]) == (None, None, 0)


def reader(home: Path) -> ArchiveStreamReader:
    """Make the reader as a query does, without a JVM to parse the value's DDL."""
    source = results_of(home / "out", value=VALUE, max_rows_per_batch=4).remembering([], str(home / "checkpoint"), 0)
    fields = StructType([StructField("n", LongType())])
    with mock.patch.object(ValueFormat, "fields", lambda self: fields):
        return ArchiveStreamReader(source)


@pytest.mark.parametrize("away", [0, 1])
def test_results_that_are_taken_away_or_changed_are_never_other_offsets(tmp_path: Path, away: int) -> None:
    story = Story(7, 12)
    publish(tmp_path, story, *range(6))
    one = reader(tmp_path)
    offset = one.initialOffset()
    for _ in range(away * 5 + 1):
        offset = one.latestOffset(offset, one.getDefaultReadLimit())
    first = min((tmp_path / "out").glob("batch=*"), key=lambda path: int(path.name[6:]))
    shutil.move(first, tmp_path / "kept")
    publish(tmp_path, story, *range(6, 12))
    with pytest.raises(SourceWentBack, match=r"results were taken away|replaced after it was read"):
        reader(tmp_path).latestOffset(offset, one.getDefaultReadLimit())
    shutil.move(tmp_path / "kept", first)
    reader(tmp_path).latestOffset(offset, one.getDefaultReadLimit())
    [file, *_] = sorted(first.glob("*.parquet"))
    rows, digest = file.name.split("-")[2:4]
    file.rename(file.with_name(file.name.replace(f"-{rows}-{digest}-", f"-{rows}-{'0' * 16}-")))
    with pytest.raises(SourceWentBack, match="replaced after it was read"):
        reader(tmp_path).latestOffset(offset, one.getDefaultReadLimit())


def read_on(home: Path, offset: dict[str, Any], times: int) -> dict[str, Any]:
    for _ in range(times):
        one = reader(home)
        offset = one.latestOffset(offset, one.getDefaultReadLimit())
    return offset


def test_all_that_was_read_may_not_go_while_more_comes(tmp_path: Path) -> None:
    story = Story(7, 30)
    publish(tmp_path, story, *range(3))
    offset = read_on(tmp_path, {"format": 1, "next": {}, "first": {}}, 9)
    for path in (tmp_path / "out").glob("batch=*"):
        shutil.rmtree(path)
    publish(tmp_path, story, *range(3, 30))
    with pytest.raises(SourceWentBack, match="results were taken away"):
        read_on(tmp_path, offset, 1)


def read_to_the_end(one: ArchiveStreamReader) -> dict[str, Any]:
    offset, after = None, one.initialOffset()
    while after != offset:
        offset, after = after, one.latestOffset(after, one.getDefaultReadLimit())
    return after


def test_a_micro_batch_costs_what_is_new_however_much_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story(7, 50)
    *before, last = [version for version in range(50) if story.rows[version]]
    publish(tmp_path, story, *before)
    archive = ResultsArchive(str(tmp_path / "out"))
    archive.partitions()
    read_to_the_end(reader(tmp_path))
    seen = Memory(str(tmp_path / "checkpoint"), 0).seen.files
    assert 3 * story.shards < len(seen) < len(archive.files), "one for each micro-batch that was planned"
    monkeypatch.setattr(results_files, "REMEMBERED", 3)
    again = reader(tmp_path)
    again.latestOffset(read_to_the_end(again), again.getDefaultReadLimit())
    assert Memory(str(tmp_path / "checkpoint"), 0).seen.files != seen
    assert len(Memory(str(tmp_path / "checkpoint"), 0).seen.files) == 3 * story.shards
    publish(tmp_path, story, last)
    sound, scanned = os.scandir, list[str]()

    def scan(path: Any = ".") -> Any:
        scanned.append(Path(path).name)
        return sound(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scan)
        found = archive.partitions()
        assert scanned == ["out", f"batch={last}", "out"]
        assert archive.partitions() is found
        assert scanned[3:] == ["out"]
    anew = ResultsArchive(str(tmp_path / "out"))
    assert anew.partitions() == found
    assert anew.files == archive.files


def test_a_first_job_that_was_taken_back_is_noticed(tmp_path: Path) -> None:
    """By the job that reads it while it runs and when it starts, also where every file was remembered by itself."""
    story = Story(7, 20)
    publish(tmp_path, story, *range(20))
    one = reader(tmp_path)
    offset = read_to_the_end(one)
    seen = Memory(str(tmp_path / "checkpoint"), 0).seen
    archive = ResultsArchive(str(tmp_path / "out"))
    archive.partitions()
    plain = [msgspec.structs.replace(entry, digest=entry.digest.rpartition(" ")[0]) for entry in archive.files.values()]
    old = msgspec.structs.replace(seen, files=plain).sealed()
    sink = ParquetSink(tmp_path / "out", tmp_path / "err")
    sink.resume_from(1)
    sink.open("q")
    other = story.other(random.Random(2), 2)
    assert other is not None
    sink.finish(*to_attempts(sink, 2, story.frames[2]))  # the same again
    one.latestOffset(offset, one.getDefaultReadLimit())
    sink.resume_from(1)
    sink.open("q")
    sink.finish(*to_attempts(sink, 2, other))
    for there in (one, reader(tmp_path)):
        with pytest.raises(SourceWentBack, match="replaced after it was read"):
            there.latestOffset(offset, one.getDefaultReadLimit())
    memory = tmp_path / "checkpoint" / DIRECTORY / "0.json"
    memory.write_bytes(msgspec.json.encode(old))
    with pytest.raises(SourceWentBack, match="replaced after it was read"):
        reader(tmp_path).latestOffset(offset, one.getDefaultReadLimit())
    publish_again = ParquetSink(tmp_path / "out", tmp_path / "err")
    publish_again.resume_from(1)
    publish_again.open("q")
    publish_again.finish(*to_attempts(publish_again, 2, story.frames[2]))
    reader(tmp_path).latestOffset(offset, one.getDefaultReadLimit())
    assert all(entry.digest.count(" ") == 2 for entry in Memory(str(tmp_path / "checkpoint"), 0).seen.files)


def test_a_second_job_that_was_taken_back_notices_a_first_one_that_was(tmp_path: Path) -> None:
    """Whichever micro-batch it was taken back to: what it had read until then is not there any more."""
    story = Story(7, 20)
    publish(tmp_path, story, *range(20))
    one, offsets = reader(tmp_path), list[dict[str, Any]]()
    after = one.initialOffset()
    while not offsets or after != offsets[-1]:
        offsets.append(after)
        after = one.latestOffset(after, one.getDefaultReadLimit())
    sink = ParquetSink(tmp_path / "out", tmp_path / "err")
    sink.resume_from(1)
    sink.open("q")
    other = story.other(random.Random(2), 2)
    assert other is not None
    sink.finish(*to_attempts(sink, 2, other))
    begun = ResultsArchive(str(tmp_path / "out"))
    begun.partitions()
    changed = {
        span.partition: span.first for path, entry in begun.files.items() if path.startswith("batch=2/")
        for span in entry.spans
    }  # fmt: skip
    memory = tmp_path / "checkpoint" / DIRECTORY / "0.json"
    before, noticed = memory.read_bytes(), 0
    for offset in offsets[1:]:
        memory.write_bytes(before)
        read_of = {int(partition): following for partition, following in offset["next"][TOPIC].items()}
        if any(read_of.get(partition, 0) > first for partition, first in changed.items()):
            with pytest.raises(SourceWentBack):
                reader(tmp_path).latestOffset(offset, one.getDefaultReadLimit())
            noticed += 1
    assert noticed > 3


@pytest.mark.parametrize("same", [False, True])
def test_long_results_come_in_small_batches(tmp_path: Path, same: bool) -> None:
    count, long = 1_000, 50_000
    path = f"batch=0/results-00000-{count}-{'a' * 16}.parquet"
    draw = random.Random(1)
    values = [b"x" * long] * count if same else [draw.randbytes(long) for _ in range(count)]
    (tmp_path / "batch=0").mkdir()
    pq.write_table(pa.table({"a.b": values}), tmp_path / path)
    schema = SCHEMA.set(5, pa.field("value", pa.struct([("a.b", pa.binary())])))
    batches = list(
        read_results(str(tmp_path), Piece(TOPIC, 0, 0, count, [Slice(path, 0, count - 1, count)], []), schema)
    )
    assert [offset for batch in batches for offset in batch.column("offset").to_pylist()] == list(range(count))
    assert [row["a.b"] for batch in batches for row in batch.column("value").to_pylist()] == values
    assert max(batch.nbytes for batch in batches) < 2 * BATCH_BYTES


def test_results_that_come_before_what_was_read_are_refused(tmp_path: Path) -> None:
    publish(tmp_path, Story(7, 6), *range(6))
    first = min((tmp_path / "out").glob("batch=*"), key=lambda path: int(path.name[6:]))
    shutil.move(first, tmp_path / "kept")
    offset = read_on(tmp_path, {"format": 1, "next": {}, "first": {}}, 9)
    shutil.move(tmp_path / "kept", first)
    with pytest.raises(SourceWentBack, match="replaced after it was read"):
        read_on(tmp_path, offset, 1)


def test_what_is_there_is_checked(tmp_path: Path) -> None:
    with pytest.raises(HistoryLost, match="there are no results of a job"):
        results_of(tmp_path / "nowhere")
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="there are no results yet: say what they will be"):
        results_of(tmp_path / "out")
    for bad in (0, True, "1"):
        with pytest.raises(ValueError, match="max_rows_per_batch="):
            results_of(tmp_path / "out", value=VALUE, max_rows_per_batch=bad)  # type: ignore[arg-type]
    story = Story(7, 6)
    publish(tmp_path, story, *range(6))
    [piece, *_] = ResultsArchive(str(tmp_path / "out")).partitions()[TOPIC, 0].slices
    longer = Slice(piece.path, piece.first, piece.last + 1, piece.count + 1)
    with pytest.raises(SourceDamaged, match="its name says"):
        list(read_results(str(tmp_path / "out"), Piece(TOPIC, 0, 0, 1, [longer], []), SCHEMA))


def test_the_columns_are_those_of_the_first_results(tmp_path: Path) -> None:
    publish(tmp_path, Story(7, 6), *range(6))
    named: Any = results_of(tmp_path / "out").value.schema
    assert "`window_start` timestamp" in named
    assert "`n` bigint" in named
    assert '`odd "total".x` double' in named


def test_of_an_object_store_only_whole_micro_batches_are_read(tmp_path: Path) -> None:
    publish(tmp_path, Story(7, 6), *range(6))
    last = max(int(path.name[6:]) for path in (tmp_path / "out").glob("batch=*"))
    index = ResultsArchive(str(tmp_path / "out"))
    rows = sum(one.range[1] for one in index.partitions().values())
    newest = tmp_path / "out" / "_rewind" / "newest.json"
    newest.write_text(f'{{"format": 1, "owner": "q/results", "version": {last - 1}, "rows": 0, "digest": ""}}')
    assert sum(one.range[1] for one in index.partitions().values()) < rows
    newest.write_text("[]")
    with pytest.raises(SourceDamaged, match="which results are whole"):
        index.partitions()
