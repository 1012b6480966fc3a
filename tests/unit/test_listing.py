"""A directory is listed whole or not at all: what a filesystem does not give is never taken for what is not there."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem

from backend.errors import SourceUnavailable, StorageFailed
from backend.sources import results_files
from backend.sources.archive import archive
from backend.sources.archive_index import Archive
from backend.sources.listing import files_below, is_folder
from backend.sources.results_files import TOPIC, ResultsArchive
from recovery import failures


def refusing(monkeypatch: pytest.MonkeyPatch, bad: Path, number: int = errno.EIO) -> None:
    """Let no folder at or below a path be listed."""
    sound = os.scandir

    def scan(path: Any = ".") -> Any:
        if Path(path) == bad or bad in Path(path).parents:
            raise OSError(number, os.strerror(number), str(path))
        return sound(path)

    monkeypatch.setattr(os, "scandir", scan)


def written(home: Path) -> None:
    for partition in (0, 1):
        rows = {
            "topic": ["t"] * 2,
            "partition": pa.array([partition] * 2, pa.int32()),
            "offset": pa.array([0, 1], pa.int64()),
            "timestamp": pa.array([0, 1], pa.timestamp("us", "UTC")),
            "key": pa.array([b"", b""]),
            "value": pa.array([b"{}", b"{}"]),
        }
        place = home / f"year=1/part={partition}"
        place.mkdir(parents=True)
        pq.write_table(pa.table(rows), place / "x.parquet")


@pytest.mark.parametrize("bad", ["", "year=1", "year=1/part=1"])
def test_a_folder_that_is_not_given_is_no_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str) -> None:
    written(tmp_path)
    reader, later = archive(tmp_path, format="raw").stream_reader(), archive(tmp_path, format="raw")
    with monkeypatch.context() as patch:
        refusing(patch, tmp_path / bad)
        asked: list[Callable[[], object]] = [
            reader.prepareForTriggerAvailableNow,
            lambda: later.pieces(None, {("t", 1): [(0, 2)]}),
            lambda: Archive(tmp_path).write_index(),
        ]
        for ask in asked:
            with pytest.raises(StorageFailed, match="Input/output error") as caught:
                ask()
            assert failures.read(caught.value).kind is failures.Kind.PASSES
    assert sorted(Archive(tmp_path).partitions()) == [("t", 0), ("t", 1)]


def test_results_of_a_micro_batch_that_is_not_given_change_no_offsets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in (0, 1):
        place = tmp_path / f"batch={version}"
        place.mkdir()
        (place / f"results-00000-20-{'a' * 16}.parquet").touch()
    with monkeypatch.context() as patch:
        refusing(patch, tmp_path / "batch=0")
        with pytest.raises(StorageFailed):
            ResultsArchive(tmp_path).partitions()
    (index,) = ResultsArchive(tmp_path).partitions().values()
    assert [(piece.first, piece.last) for piece in index.slices] == [(0, 19), (20, 39)]


def results(home: Path, version: int) -> Path:
    place = home / f"batch={version}"
    place.mkdir()
    (place / f"results-00000-20-{'a' * 16}.parquet").touch()
    return place


class Listing:
    """What `os.scandir` gives, decided beforehand."""

    def __init__(self, entries: list[os.DirEntry[str]]) -> None:
        self._entries = entries

    def __enter__(self) -> Iterator[os.DirEntry[str]]:
        return iter(self._entries)

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("known", [0, 4])
def test_what_is_published_while_results_are_listed_changes_no_offsets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: int
) -> None:
    """POSIX leaves open whether a listing has what comes while it is made: here it has the second and not the first."""
    archive, sound, due = ResultsArchive(tmp_path), os.scandir, [4]
    for version in range(known):
        results(tmp_path, version)
    archive.partitions()
    for version in range(known, 4):
        results(tmp_path, version)

    def scan(path: Any = ".") -> Any:
        if Path(path) != tmp_path or not due:
            return sound(path)
        with sound(path) as listed:
            entries = list(listed)
        missed = results(tmp_path, due.pop())
        last = results(tmp_path, 5)
        with sound(path) as listed:
            return Listing([*entries, *(entry for entry in listed if entry.name == last.name != missed.name)])

    monkeypatch.setattr(os, "scandir", scan)
    for _ in range(2):
        (index,) = archive.partitions().values()
        assert [piece.path.split("/")[0] for piece in index.slices] == [f"batch={version}" for version in range(6)]


def test_results_that_are_replaced_while_they_are_listed_are_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound, places = os.scandir, [results(tmp_path, version) for version in range(3)]
    due = [places[1]]

    def scan(path: Any = ".") -> Any:
        if Path(path) not in due:
            return sound(path)
        due.pop().rename(tmp_path / "_old")
        results(tmp_path, 1)
        return Listing([])  # the old one, whose files are deleted by now

    monkeypatch.setattr(os, "scandir", scan)
    (index,) = ResultsArchive(tmp_path).partitions().values()
    assert [(piece.first, piece.path.split("/")[0]) for piece in index.slices] == [
        (0, "batch=0"), (20, "batch=1"), (40, "batch=2"),
    ]  # fmt: skip


def test_newest_results_that_are_away_for_a_moment_are_not_taken_for_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in range(3):
        results(tmp_path, version)
    archive = ResultsArchive(tmp_path)
    before, sound, away = archive.partitions(), results_files.names_in, [True, False]

    def names(filesystem: Any, folder: str) -> dict[str, int]:
        found = sound(filesystem, folder)
        if away and away.pop(0):
            del found["batch=2"]
        return found

    monkeypatch.setattr(results_files, "names_in", names)
    monkeypatch.setattr(results_files, "REPLACED_S", 0.0)
    assert archive.partitions() == before


def test_another_directory_with_the_inode_of_one_that_is_gone_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results_files, "names_in", lambda *_: {"batch=0": 7})
    first = results(tmp_path, 0)
    archive = ResultsArchive(tmp_path)
    before = archive.partitions()
    assert archive.partitions() is before
    shutil.rmtree(first)
    (first / "results-00000-5-0123456789abcdef.parquet").parent.mkdir()
    (first / "results-00000-5-0123456789abcdef.parquet").touch()
    [index] = archive.partitions().values()
    assert index.range == (0, 5)


def test_results_that_never_stop_changing_are_no_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = itertools.cycle([{"batch=0": 0, "batch=9": 0}, {"batch=1": 0, "batch=9": 0}])
    monkeypatch.setattr(results_files, "names_in", lambda *_: next(given))
    with pytest.raises(StorageFailed, match="change while they are listed") as caught:
        ResultsArchive(tmp_path).partitions()
    assert failures.read(caught.value).kind is failures.Kind.PASSES


def test_inodes_that_are_others_at_each_look_are_borne(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results(tmp_path, 0)
    inodes = itertools.count()
    monkeypatch.setattr(results_files, "names_in", lambda *_: {"batch=0": next(inodes)})
    archive = ResultsArchive(tmp_path)
    found = archive.partitions()
    assert [*found] == [(TOPIC, 0)]
    monkeypatch.setattr(results_files, "files_below", None)
    assert archive.partitions() is found, "from then on the names decide"


def test_a_directory_that_cannot_be_looked_at_is_not_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SourceUnavailable, match="there is no archive"):
        Archive(tmp_path / "nothing").partitions()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    monkeypatch.setattr(LocalFileSystem, "info", refuse)
    with pytest.raises(StorageFailed):
        Archive(tmp_path).partitions()


def test_what_is_hidden_or_of_the_disk_or_goes_meanwhile_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_attempts", ".snapshot", "lost+found", "a", "gone"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.parquet").touch()
    (tmp_path / "_index").touch()
    (tmp_path / "link").symlink_to(tmp_path / "a", target_is_directory=True)
    sound = os.scandir

    def scan(path: Any = ".") -> Any:
        name = Path(path).name
        assert name not in ("_attempts", ".snapshot", "lost+found"), "nobody may look in there"
        if name == "gone":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return sound(path)

    monkeypatch.setattr(os, "scandir", scan)
    filesystem = fsspec.filesystem("file")
    assert list(files_below(filesystem, str(tmp_path))) == ["_index", "a/x.parquet", "link"]
    assert is_folder(filesystem, str(tmp_path / "link"))
    assert not is_folder(filesystem, str(tmp_path / "_index"))


class ByListing:
    """Knows a directory by what lies in it; nobody may look at its name (S3 with rights on what lies below alone)."""

    def __init__(self, there: bool) -> None:
        self.there = there

    def isdir(self, path: str) -> bool:
        return self.there

    def info(self, path: str) -> dict[str, Any]:
        raise PermissionError("Forbidden")


def test_a_directory_is_taken_from_who_knows_it_by_a_listing_alone() -> None:
    assert is_folder(ByListing(True), "bucket/archive")
    with pytest.raises(PermissionError):
        is_folder(ByListing(False), "bucket/archive")


def test_links_that_lead_nowhere_are_no_directories(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "below").symlink_to(tmp_path / "file" / "x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    filesystem = fsspec.filesystem("file")
    assert not is_folder(filesystem, str(tmp_path / "below"))
    assert not is_folder(filesystem, str(tmp_path / "loop"))
