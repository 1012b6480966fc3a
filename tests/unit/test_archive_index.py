"""An archive is read in offset order, and nothing that is missing or doubled goes unnoticed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem

from backend.errors import HistoryLost, SourceGap, SourceUnavailable, UnknownFormat
from backend.sources import archive_index
from backend.sources.archive import archive
from backend.sources.archive_files import WRITE_SCHEMA, read_range, write_archive
from backend.sources.archive_index import INDEX_NAME, Archive, Gap, PartitionIndex, Slice, check_rows, covered
from backend.sources.archive_reader import ArchiveStreamReader, Piece
from backend.spark.job import Input, Job
from recovery.restore import replay


def messages(offsets: list[int], *, topic: str = "t", partition: int = 0) -> pa.Table:
    n = len(offsets)
    times = pa.array([1000 + offset for offset in offsets], pa.int64()).cast(pa.timestamp("ms", tz="UTC"))
    values = [b"v%d" % offset for offset in offsets]
    return pa.table([[topic] * n, [partition] * n, offsets, times, [b"k"] * n, values], schema=WRITE_SCHEMA)


def put(directory: Path, name: str, offsets: list[int]) -> None:
    pq.write_table(messages(offsets), directory / name)


def declare(directory: Path, *gaps: tuple[int, int]) -> None:
    entries = [{"topic": "t", "partition": 0, "start": start, "end": end} for start, end in gaps]
    (directory / INDEX_NAME).write_text(json.dumps({"format": 1, "gaps": entries}))


def read(directory: Path, start: int, end: int, *, topic: str = "t", partition: int = 0) -> list[int]:
    index = Archive(str(directory)).partitions()[topic, partition]
    batches = read_range(str(directory), Piece(topic, partition, start, end, *index.cut(start, end)), WRITE_SCHEMA)
    return [offset for batch in batches for offset in batch.column("offset").to_pylist()]


def test_files_are_ordered_by_offset_whatever_their_names(tmp_path: Path) -> None:
    put(tmp_path, "a.parquet", [6, 7])
    put(tmp_path, "b.parquet", [0, 1, 2])
    put(tmp_path, "z.parquet", [3, 4, 5])
    assert Archive(str(tmp_path)).partitions()["t", 0].range == (0, 8)
    assert read(tmp_path, 0, 8) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert read(tmp_path, 2, 7) == [2, 3, 4, 5, 6]
    assert read(tmp_path, 4, 5) == [4]
    assert read(tmp_path, 4, 4) == []


def test_one_file_may_hold_several_partitions(tmp_path: Path) -> None:
    tables = [messages([0, 1]), messages([5, 6], partition=1), messages([2, 3]), messages([9], topic="u")]
    pq.write_table(pa.concat_tables(tables), tmp_path / "mixed.parquet")
    found = Archive(str(tmp_path)).partitions()
    assert {key: index.range for key, index in found.items()} == {("t", 0): (0, 4), ("t", 1): (5, 7), ("u", 0): (9, 10)}
    assert read(tmp_path, 1, 4) == [1, 2, 3]
    assert read(tmp_path, 5, 7, partition=1) == [5, 6]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([[0, 1], [3, 4]], ("1.parquet", "offsets 2 to 2")),
        ([[0, 1, 3, 4]], ("0.parquet", "4 rows for 5 offsets")),
        ([[0, 1, 2], [2, 3]], ("1.parquet", "offset 2 comes after offset 2")),
        ([[0, 1, 2, 3], [1]], ("1.parquet", "offset 1 comes after offset 3")),
        ([[0, 1, 1]], ("0.parquet", "3 rows for 2 offsets")),
    ],
)
def test_gaps_and_steps_back_are_errors(tmp_path: Path, files: list[list[int]], words: tuple[str, str]) -> None:
    for number, offsets in enumerate(files):
        put(tmp_path, f"{number}.parquet", offsets)
    with pytest.raises(SourceGap) as caught:
        Archive(str(tmp_path)).partitions()
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(("second", "real"), [([2, 3], False), ([3], True)])
def test_a_listing_that_misses_a_file_of_those_made_meanwhile_is_no_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: list[int], real: bool
) -> None:
    """Directories are listed one after the other: the earlier file was not yet in the first, the later is seen."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    put(tmp_path / "a", "0.parquet", [0, 1])
    sound, listings = LocalFileSystem.ls, list[str]()

    def ls(filesystem: LocalFileSystem, path: str, **options: Any) -> Any:
        found = sorted(sound(filesystem, path, **options), key=lambda info: info["name"])
        if path.endswith("/a"):
            listings.append(path)
            if len(listings) == 1:
                put(tmp_path / "a", "1.parquet", second)
                put(tmp_path / "b", "2.parquet", [4, 5])
        return found

    monkeypatch.setattr(LocalFileSystem, "ls", ls)
    if real:
        with pytest.raises(SourceGap, match="offsets 2 to 2"):
            Archive(str(tmp_path)).partitions()
        assert len(listings) == 3, "the first shows another gap"
    else:
        assert Archive(str(tmp_path)).partitions()["t", 0].range == (0, 6)
        assert len(listings) == 2


@pytest.mark.parametrize("offsets", [[0, 1, 3, 2, 4], [0, 1, 1, 3, 4]])
def test_disorder_that_footers_cannot_show_is_found_in_the_rows(tmp_path: Path, offsets: list[int]) -> None:
    put(tmp_path, "a.parquet", offsets)
    with pytest.raises(SourceGap, match=r"a\.parquet, t-0"):
        read(tmp_path, 0, 5)


def test_rows_missing_at_the_end_of_the_range_are_found(tmp_path: Path) -> None:
    put(tmp_path, "a.parquet", [0, 1, 2])
    index = Archive(str(tmp_path)).partitions()["t", 0]
    put(tmp_path, "a.parquet", [0, 1])
    with pytest.raises(SourceGap, match="offsets 2 to 2"):
        list(read_range(str(tmp_path), Piece("t", 0, 0, 3, *index.cut(0, 3)), WRITE_SCHEMA))


def test_declared_gaps_are_fine_and_only_those(tmp_path: Path) -> None:
    put(tmp_path, "a.parquet", [0, 1, 4, 5])
    put(tmp_path, "b.parquet", [8, 9])
    declare(tmp_path, (2, 4), (6, 8))
    assert read(tmp_path, 0, 10) == [0, 1, 4, 5, 8, 9]
    assert read(tmp_path, 2, 4) == []
    assert read(tmp_path, 3, 9) == [4, 5, 8]
    declare(tmp_path, (2, 4), (6, 7))
    with pytest.raises(SourceGap, match="offsets 6 to 7"):
        read(tmp_path, 0, 10)


class Looked(list[tuple[int, int]]):
    """Counts the gaps that are looked at."""

    times = 0

    def __getitem__(self, at):  # type: ignore[no-untyped-def]
        self.times += 1
        return super().__getitem__(at)

    def __iter__(self):  # type: ignore[no-untyped-def]
        for one in super().__iter__():
            self.times += 1
            yield one


def test_a_row_behind_a_gap_looks_at_few_of_them() -> None:
    """A topic of transactions has a gap for each; all of them were looked at for each."""
    gaps = Looked((offset + 1, offset + 2) for offset in range(0, 4_000, 2))
    assert check_rows(pa.array(range(0, 4_000, 2)), 0, gaps, "f", "t", 0) == 3_999
    assert gaps.times <= 40 * len(gaps)
    with pytest.raises(SourceGap, match="offsets 3999 to 4001"):
        check_rows(pa.array([4_002]), 3_999, gaps, "f", "t", 0)


@pytest.mark.parametrize(
    ("start", "end", "count"),
    [(0, 30, 14), (2, 4, 2), (3, 10, 3), (4, 8, 0), (9, 9, 0), (20, 50, 0), (19, 50, 1), (10, 5, 0)],
)
def test_offsets_of_gaps_are_counted_between_any_two(start: int, end: int, count: int) -> None:
    assert covered([(2, 4), (8, 20)], start, end) == count


def test_a_gap_needs_no_task_however_wide_it_is() -> None:
    far = 10**15
    index = PartitionIndex((Slice("a", 0, 99, 100), Slice("b", far, far + 99, 100)), ((100, far),))
    reader, key = ArchiveStreamReader.__new__(ArchiveStreamReader), ("t", 0)
    reader._source = SimpleNamespace(max_offsets_per_task=60, results=False)  # type: ignore[assignment]
    reader._path = "a"
    planned = [(piece.start, piece.end) for piece in reader.plan({key: index}, key, 0, far + 100)]
    assert planned == [(0, 60), (60, 120), (far, far + 60), (far + 60, far + 100)]
    assert reader.plan({key: index}, key, 100, far) == []
    assert [index.next_present(offset) for offset in (99, 100, far - 1, far)] == [99, far, far, far]


def test_a_declared_gap_that_holds_rows_is_an_error(tmp_path: Path) -> None:
    put(tmp_path, "a.parquet", [0, 1, 2])
    declare(tmp_path, (1, 2))
    with pytest.raises(SourceGap, match="3 rows for 2 offsets"):
        Archive(str(tmp_path)).partitions()


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    rows = pa.concat_tables([messages([7, 3, 4, 5, 6]), messages([0, 2, 1], partition=1)])
    assert write_archive(tmp_path, rows, rows_per_file=2) == []
    assert len(list(tmp_path.glob("*.parquet"))) == 5
    assert read(tmp_path, 3, 8) == [3, 4, 5, 6, 7]
    assert read(tmp_path, 0, 3, partition=1) == [0, 1, 2]
    index = Archive(str(tmp_path)).partitions()["t", 0]
    first = next(read_range(str(tmp_path), Piece("t", 0, 3, 8, *index.cut(3, 8)), WRITE_SCHEMA))
    assert first.slice(0, 1).to_pylist() == rows.filter(pc.field("offset") == 3).slice(0, 1).to_pylist()


@pytest.mark.parametrize("nested", [False, True])
def test_offsets_are_written_as_their_differences(tmp_path: Path, nested: bool) -> None:
    """And all else as a dictionary, as deep as it lies."""
    rows = messages(list(range(5_000)))
    if nested:
        values = pa.array([{"key": "k", "more": [{"a": offset % 3}]} for offset in range(5_000)])
        rows = rows.set_column(5, "value", values)
    write_archive(tmp_path, rows, rows_per_file=5_000, row_group_rows=5_000)
    [path] = tmp_path.glob("*.parquet")
    group = pq.read_metadata(path).row_group(0)
    columns = [group.column(number) for number in range(group.num_columns)]
    encodings = {column.path_in_schema: column.encodings for column in columns}
    assert "DELTA_BINARY_PACKED" in encodings.pop("offset")
    assert group.column(2).total_compressed_size < 1_000, "of 40,000 bytes"
    assert len(encodings) == (6 if nested else 5)
    assert all("RLE_DICTIONARY" in found for found in encodings.values())


def test_the_writer_refuses_gaps_unless_told_to_declare_them(tmp_path: Path) -> None:
    with pytest.raises(SourceGap):
        write_archive(tmp_path / "a", messages([0, 1, 5]))
    assert write_archive(tmp_path / "b", messages([0, 1, 5]), gaps="declare") == [Gap("t", 0, 2, 5)]
    assert read(tmp_path / "b", 0, 6) == [0, 1, 5]


def test_a_stale_entry_of_the_index_is_not_trusted(tmp_path: Path) -> None:
    write_archive(tmp_path, messages([0, 1, 2]))
    [file] = tmp_path.glob("*.parquet")
    put(tmp_path, file.name, list(range(50)))
    assert Archive(str(tmp_path)).partitions()["t", 0].range == (0, 50)


def test_new_files_are_seen_and_old_footers_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "a.parquet", [0, 1])
    seen = Archive(str(tmp_path))
    assert seen.partitions()["t", 0].range == (0, 2)
    opened: list[str] = []
    real = archive_index.read_entry
    monkeypatch.setattr(
        archive_index, "read_entry", lambda handle, path, *rest: (opened.append(path), real(handle, path, *rest))[1]
    )
    put(tmp_path, "b.parquet", [2, 3])
    assert seen.partitions()["t", 0].range == (0, 4)
    assert seen.partitions()["t", 0].range == (0, 4)
    assert opened == ["b.parquet"]


def test_an_index_of_a_newer_release_is_refused(tmp_path: Path) -> None:
    put(tmp_path, "a.parquet", [0])
    (tmp_path / INDEX_NAME).write_text('{"format": 99}')
    with pytest.raises(UnknownFormat, match="format 99"):
        Archive(str(tmp_path)).partitions()
    (tmp_path / INDEX_NAME).write_text("nonsense")
    with pytest.raises(UnknownFormat):
        Archive(str(tmp_path)).partitions()


def test_a_file_that_is_no_archive_file_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"offset": [1]}), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=r"x\.parquet: it lacks topic, partition, timestamp, key, value"):
        Archive(str(tmp_path)).partitions()
    with pytest.raises(SourceUnavailable, match="nowhere"):
        Archive(str(tmp_path / "nowhere")).partitions()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"value": ""}, "value=''"),
        ({"value": "a int", "format": "xml"}, "format='xml'"),
        ({"value": "a int", "format": "raw"}, "value='a int'"),
        ({"value": "a int", "max_offsets_per_batch": 0}, "max_offsets_per_batch=0"),
        ({"value": "a int", "max_offsets_per_task": True}, "max_offsets_per_task=True"),
        ({"value": "a int", "topics": "abc"}, "topics='abc'"),
    ],
)
def test_bad_options_are_named(options: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        archive("x", **options)  # type: ignore[arg-type]


def test_a_restore_in_many_jobs_opens_each_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And looks anew where a job fails: files that are gone by then are named."""
    for first in range(0, 30, 5):
        put(tmp_path, f"{first}.parquet", [*range(first, first + 5)])
    opened, failing, sound = list[str](), list[Exception](), archive_index._opened

    def opening(filesystem: Any, root: str, path: str, *more: Any) -> Any:
        opened.append(path)
        return sound(filesystem, root, path, *more)

    def collect() -> list[Any]:
        if failing:
            (tmp_path / "0.parquet").unlink(missing_ok=True)
            raise failing[0]
        return []

    def replayed(job: Job, _: Any, ranges: Any, *__: Any) -> Any:
        [side] = job.inputs
        found, *_ = side.source.pieces(None, {("t", 0): [ranges[0, 0]]})  # type: ignore[attr-defined]
        jobs.append([(piece.start, piece.end) for piece in found])
        return SimpleNamespace(collect=collect)

    def restored() -> None:
        replay.write_chunks(None, job, "", "run", {0: None}, 10, at_once=1)  # type: ignore[arg-type, dict-item]

    jobs: list[Any] = []
    monkeypatch.setattr(archive_index, "_opened", opening)
    monkeypatch.setattr(Job, "replay", replayed)
    monkeypatch.setattr(replay, "apart", lambda *_, **__: None)
    monkeypatch.setattr(replay, "chunk_writer", lambda *_: None)
    monkeypatch.setattr(replay, "replay_ranges", lambda _: {(0, 0): (0, 30)})
    monkeypatch.setattr(replay, "slices", lambda *_: [{(0, 0): (at, at + 3)} for at in range(0, 30, 3)])
    source = archive(tmp_path, format="raw", topics=["t"])
    job = Job((Input(source, None, ()),), "key", (0,), cast("Any", SimpleNamespace()), (), None)
    for times in (1, 2):  # the next restore looks for itself
        restored()
        assert jobs == [[(at, at + 3)] for at in range(0, 30, 3)] * times
        assert sorted(opened) == sorted([f"{first}.parquet" for first in range(0, 30, 5)] * times)
    failing.append(RuntimeError("a task has failed"))
    with pytest.raises(HistoryLost, match="needed are 0 to 2, there are 5 to 29"):
        restored()
