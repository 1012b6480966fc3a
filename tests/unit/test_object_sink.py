"""Parquet on an object store: moto's S3 server, which runs in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from backend.errors import ManifestMismatch, OutputDiffers, SinkConflict, StorageFailed, UnknownFormat
from backend.sinks import parquet_sink
from backend.sinks.objects import Newest, ObjectOutput
from backend.sinks.outbox import OutboxSink, Written
from backend.sinks.parquet import ParquetSink
from backend.sinks.table_sink import Record
from backend.sources.archive_index import Archive, Gap, read_index_file
from recovery.files import LocalFiles, RemoteFiles
from tests.support.sink_story import Death, Player, Story, check_seen, frame, operator
from tests.unit.test_table_sinks import over

COLUMNS = 'id, reason, shard, epoch_ms(window_start), origin, n, "odd ""total"".x"'


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Give the address of an S3 server."""
    from moto.server import ThreadedMotoServer

    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Give the URI of a new bucket."""
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem.clear_instance_cache()
    filesystem = s3fs.S3FileSystem()
    filesystem.mkdir("out")
    yield "s3://out"
    filesystem.rm("out", recursive=True)
    s3fs.S3FileSystem.clear_instance_cache()


def read(uri: str) -> list[pa.Table]:
    """Read what readers see, file by file, past any cache."""
    import s3fs

    filesystem = s3fs.S3FileSystem()
    filesystem.invalidate_cache()
    tables = []
    for name in sorted(filesystem.glob(f"{uri.removeprefix('s3://')}/batch=*/*.parquet")):
        with filesystem.open(name, "rb") as handle:
            tables.append(pq.read_table(handle))
    return tables


def results(uri: str) -> list[tuple[Any, ...]]:
    tables = read(uri)
    return sorted(over({"o": pa.concat_tables(tables)}, f"SELECT {COLUMNS} FROM o")) if tables else []


def begun(bucket: str, planned: int = -1, query: str = "q") -> Any:
    sink = parquet_sink(f"{bucket}/windows", f"{bucket}/bad")
    sink.begin("/nowhere", operator())
    sink.resume_from(planned)
    sink.open(query)
    return sink


def player(bucket: str, story: Story, deaths: int) -> Player:
    return Player(
        lambda: parquet_sink(f"{bucket}/windows", f"{bucket}/bad"),
        "/nowhere",
        story,
        deaths,
        commits=("append",),
        look=lambda: results(f"{bucket}/windows"),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("batches", "deaths"), [(5, 9), pytest.param(40, 100, marks=pytest.mark.long)])
def test_no_row_comes_twice_and_none_is_missing_wherever_the_driver_dies(
    bucket: str, batches: int, deaths: int
) -> None:
    story = Story(17, batches)
    played = player(bucket, story, deaths)
    played.run()
    assert results(f"{bucket}/windows") == sorted(story.log)
    errors = [(row["id"], row["offset"]) for table in read(f"{bucket}/bad") for row in table.to_pylist()]
    assert sorted(errors) == sorted(row for rows in story.errors for row in rows)
    check_seen(played.seen, deaths)


@pytest.mark.slow
def test_what_died_among_its_files_goes_on_and_other_rows_are_refused(bucket: str) -> None:
    story = Story(7, 8)
    version = next(v for v, rows in enumerate(story.rows) if len({row[2] for row in rows}) > 1)
    played = player(bucket, story, 0)
    sink = begun(bucket)
    output = sink._tables["results"]
    real, left = output._fs.cp_file, [1]

    def copy(*given: Any) -> None:
        real(*given)
        left[0] -= 1
        if not left[0]:
            raise Death("behind the first file")

    with mock.patch.object(output._fs, "cp_file", copy), pytest.raises(Death):
        played.publish(sink, version, story.frames[version])
    [seen] = read(f"{bucket}/windows")
    other = [dict(one, results=story.frames[version - 1][one["shard"]]["results"]) for one in story.frames[version]]
    with pytest.raises(OutputDiffers, match="in part, ran again, and made other rows"):
        played.publish(begun(bucket, version), version, other)
    with pytest.raises(OutputDiffers, match="in part, ran again, and made other rows"):
        played.publish(begun(bucket, version), version, [frame(0, version, [], [])])
    assert read(f"{bucket}/windows") == [seen]
    played.publish(begun(bucket, version), version, story.frames[version])
    assert results(f"{bucket}/windows") == sorted(story.rows[version])


@pytest.mark.slow
def test_what_died_among_its_files_is_named_where_the_checkpoint_was_taken_back_behind_it(bucket: str) -> None:
    """Also where its micro-batch makes no rows now: the record of a later one would let the file count."""
    story = Story(7, 12)
    many = next(story.frames[v] for v, rows in enumerate(story.rows) if len({row[2] for row in rows}) > 1)
    played = player(bucket, story, 0)
    sink = begun(bucket)

    def made(version: int, *given: Any) -> list[Any]:
        return [dict(one, version=version) for one in given or [frame(0, version, [], [])]]

    for version, given in ((5, many), *((empty, ()) for empty in range(6, 10))):
        played.publish(sink, version, made(version, *given))
    real = sink._tables["results"]._bring

    def bring(path: str, name: str) -> None:
        real(path, name)
        raise Death("behind the first file")

    with mock.patch.object(sink._tables["results"], "_bring", bring), pytest.raises(Death):
        played.publish(sink, 10, made(10, *many))
    sink = begun(bucket, planned=7)
    for version, given in ((7, ()), (8, many), (9, ())):
        played.publish(sink, version, made(version, *given))
    for _ in range(2):
        with pytest.raises(OutputDiffers, match="micro-batch 10 was published in part"):
            played.publish(sink, 10, made(10))
        sink = begun(bucket, planned=10)
    sink._tables["results"]._fs.rm(f"{bucket}/windows/batch=10", recursive=True)  # as the error says
    for version, given in ((10, ()), (11, many)):
        played.publish(sink, version, made(version, *given))
    assert sorted({row[0].split("-")[0] for row in results(f"{bucket}/windows")}) == ["11", "5", "8"]


@pytest.mark.slow
def test_a_start_does_not_list_what_it_published(bucket: str) -> None:
    """There may be millions: the mark says whose it is."""
    begun(bucket)
    sound, asked = RemoteFiles.folders, list[str]()

    def folders(files: RemoteFiles) -> list[str]:
        asked.append(files.uri.rstrip("/").rpartition("/")[2])
        return sound(files)

    with mock.patch.object(RemoteFiles, "folders", folders):
        begun(bucket, planned=3)
        assert not {"windows", "bad"} & {*asked}


def test_a_directory_of_another_query_is_refused(bucket: str) -> None:
    story = Story(7, 8)
    sink = begun(bucket)
    player(bucket, story, 0).publish(sink, 7, story.frames[7])
    filesystem, under_way = sink._tables["results"]._fs, f"{bucket}/windows/_rewind/outbox/run-8/results-0.parquet"
    filesystem.pipe_file(under_way, b"of a task of the query whose directory it is")
    with pytest.raises(ManifestMismatch, match="written by q/results"):
        begun(bucket, 9, query="p")
    with pytest.raises(SinkConflict):
        begun(bucket, 3)
    assert filesystem.exists(under_way)
    begun(bucket, 7)
    filesystem.invalidate_cache()
    assert not filesystem.exists(under_way)
    newest = f"{bucket}/windows/_rewind/newest.json"
    filesystem.pipe_file(newest, b'{"format": 2}')
    with pytest.raises(UnknownFormat, match="format 2"):
        begun(bucket, 9)
    filesystem.rm_file(newest)
    with pytest.raises(ManifestMismatch, match="no mark"):
        begun(bucket, 9)


def test_a_store_that_only_begins_a_copy_is_not_asked_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Azure's: the copy is made later, where its source is still there."""
    begun: list[tuple[str, str]] = []

    class Azure(MemoryFileSystem):
        protocol = "abfs"
        store: ClassVar[dict[str, Any]] = {}
        pseudo_dirs: ClassVar[list[str]] = [""]

        @classmethod
        def _strip_protocol(cls, path: Any) -> Any:
            return super()._strip_protocol(path.removeprefix("abfs://"))

        def cp_file(self, path1: str, path2: str, **_: Any) -> None:
            self.pipe_file(path2, b"")
            begun.append((path1, path2))

        def end_copies(self) -> None:
            for source, target in begun:
                if self.exists(source):
                    self.pipe_file(target, self.cat_file(source))

    monkeypatch.setitem(_registry, "abfs", Azure)
    output, sink = ObjectOutput("abfs://c/windows"), OutboxSink(None, "abfs://c/outbox")
    output.open(pa.schema([]), "q/results")
    sink._outbox.write("run-0/results-0-1-ff.parquet", [b"rows"])
    written = Written("abfs://c/outbox/run-0", [{"shard": 0, "results_file": "results-0-1-ff.parquet"}])
    output.append(written.paths("results"), iter(()), Record(0, 1, "ff"))
    sink._remove("run-0")
    Azure().end_copies()
    assert Azure().cat_file("/c/windows/batch=0/results-0-1-ff.parquet") == b"rows"
    Azure().makedirs("/c/archive")
    Archive("abfs://c/archive").write_index([Gap("t", 0, 1, 2)])
    Azure().end_copies()
    assert read_index_file(Azure(), "/c/archive").gaps == [Gap("t", 0, 1, 2)]


def test_what_a_store_does_not_let_go_of_changes_nothing_of_what_is_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise StorageFailed("the storage refuses", where="there", why="no right to delete", command="give it")

    sink = OutboxSink(None, str(tmp_path))
    (tmp_path / "run-0").mkdir()
    monkeypatch.setattr(LocalFiles, "delete_folder", refuse)
    sink._bring_out = lambda *_: None  # type: ignore[method-assign]
    sink.finish(Written(f"{tmp_path}/run-0", []), 0)
    sink.open("q")
    assert caplog.text.count("run-0 is not deleted: no right to delete") == 2


def test_the_record_has_this_form() -> None:
    """Format 1, frozen."""
    text = b'{"owner":"q/results","version":3,"rows":2,"digest":"00ff","format":1}'
    assert msgspec.json.encode(Newest("q/results", 3, 2, "00ff")) == text
    assert msgspec.json.decode(text, type=Newest) == Newest("q/results", 3, 2, "00ff")


def test_bad_places_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="errors="):
        parquet_sink("s3://a/x", "s3://a/x/y")
    with pytest.raises(ValueError, match=r"errors='.*': must be on the filesystem of results='s3://a/x'"):
        parquet_sink("s3://a/x", tmp_path)
    with pytest.raises(ValueError, match="memory:// is seen by one process only"):
        parquet_sink("memory://a", "memory://b")
    assert isinstance(parquet_sink(f"file://{tmp_path}/a", tmp_path / "b"), ParquetSink)


@pytest.mark.slow
def test_a_moved_directory_is_known_by_its_mark(bucket: str) -> None:
    """A job whose output has another place goes on where both directories there are its own."""
    sink = parquet_sink(f"{bucket}/windows", f"{bucket}/bad")
    assert not sink.holds("q")
    begun(bucket)
    assert sink.holds("q")
    assert not sink.holds("p")
    assert not parquet_sink(f"{bucket}/windows", f"{bucket}/other").holds("q")
