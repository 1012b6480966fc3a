"""A disk that does not give a file is as if the file were not there: another copy is taken, or made."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backend.errors import RewindError, StateCorrupted, StateUnavailable, StorageFailed
from backend.rocks import RocksStore
from backend.rocks.errors import translated
from backend.store.protocol import Changes
from backend.store.storage import storage
from recovery.changelog.file import FileChangelog
from recovery.changelog.message_log import MessageLog
from recovery.commit.pointer import COMMIT_KEY, Commit, CommitRecord, Pointer, encode_record
from recovery.commit.shard_directory import Generation, ShardDirectory
from recovery.files import LocalFiles, RemoteFiles, copy_file
from recovery.restore.open_shard import OpenShard
from recovery.restore.probe import unusable
from recovery.snapshots.publisher import Snapshots

ROW = b"\x03a"
EIO = OSError(errno.EIO, os.strerror(errno.EIO))


@dataclass
class Shard:
    """A shard at a commit that waits for its staged file, with a snapshot of that commit, whole or as a step."""

    directory: ShardDirectory
    snapshots: Snapshots
    generation: Generation
    pointer: Pointer

    def open(self) -> bytes | None:
        with self.directory.lock():
            opened = OpenShard(self.directory, "here", self.snapshots).at(self.pointer)
            with opened.store as store:
                return store.get(ROW)

    def look(self) -> str | None:
        job: Any = SimpleNamespace(local_dir=self.directory.path.parent.parent, query_id="q", shard=0, lock_wait_s=1.0,
                                   where="here", snapshots=self.snapshots)  # fmt: skip
        return unusable(job, self.pointer)


def shard(home: Path, *, full: bool) -> Shard:
    directory, snapshots = ShardDirectory(home / "local", "q", 0), Snapshots(home / "snapshots")
    commit = Commit(0, "c" * 32)
    record = CommitRecord(0, commit, None, 0, [], {})
    changes = Changes([COMMIT_KEY, ROW], [encode_record(record), b"1"])
    with directory.lock():
        opened = OpenShard(directory, "here", snapshots).at(None)
        with opened.store as store:
            staged = store.stage(changes, opened.generation.staged(commit))
    if full:
        with RocksStore.open(home / "other") as store:
            store.write(changes)
            store.checkpoint(home / "copy")
        snapshots.publish(record, home / "copy")
    else:
        snapshots.publish_step(record, staged)
        for file in (home / "snapshots").rglob("*.sst"):  # on a disk of its own, where no link leads
            content = file.read_bytes()
            file.unlink()
            file.write_bytes(content)
    pointer = Pointer(0, commit, None, staged.length, staged.digest, [], {}, "")
    return Shard(directory, snapshots, opened.generation, pointer)


def based(home: Path) -> Shard:
    """A shard without its database: its staged file lies here and nowhere else, the commit before it is a snapshot."""
    directory, snapshots = ShardDirectory(home / "local", "q", 0), Snapshots(home / "snapshots")
    before, commit = Commit(0, "b" * 32), Commit(1, "c" * 32)
    first = CommitRecord(0, before, None, 0, [], {})
    with RocksStore.open(home / "other") as store:
        store.write(Changes([COMMIT_KEY, ROW], [encode_record(first), b"0"]))
        store.checkpoint(home / "copy")
    snapshots.publish(first, home / "copy")
    record = CommitRecord(0, commit, before, 0, [], {})
    with directory.lock():
        opened = OpenShard(directory, "here", snapshots).at(None)
        with opened.store as store:
            changes = Changes([COMMIT_KEY, ROW], [encode_record(record), b"1"])
            staged = store.stage(changes, opened.generation.staged(commit))
    pointer = Pointer(0, commit, before, staged.length, staged.digest, [], {}, "")
    return Shard(directory, snapshots, opened.generation, pointer)


def broken_reads(monkeypatch: pytest.MonkeyPatch, bad: Callable[[Path], bool]) -> None:
    sound = Path.open

    def read(path: Path, *args: Any, **kwargs: Any) -> Any:
        if bad(path):
            raise EIO
        return sound(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", read)


@pytest.mark.parametrize("full", [False, True])
def test_a_staged_file_that_the_disk_does_not_give_is_taken_from_snapshots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    made = shard(tmp_path, full=full)
    own = made.generation.staged(made.pointer.commit)
    number = own.stat().st_ino
    broken_reads(monkeypatch, lambda path: path.exists() and path.stat().st_ino == number)
    assert made.open() == b"1"
    assert made.look() is None


def test_a_snapshot_that_lies_on_the_same_disk_and_is_not_given_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is fetched is a link to it: the disk that it comes to is not what fails."""
    made = shard(tmp_path, full=True)
    made.generation.staged(made.pointer.commit).unlink()
    bad = {path.stat().st_ino for path in (tmp_path / "snapshots").rglob("*.sst")}
    assert bad
    broken_reads(monkeypatch, lambda path: path.exists() and path.stat().st_ino in bad)
    with pytest.raises(StateUnavailable, match="Input/output error"):
        made.open()


def test_a_staged_file_that_is_here_alone_goes_onto_the_snapshot_before_it(tmp_path: Path) -> None:
    made = based(tmp_path)
    assert made.open() == b"1"
    assert made.directory.current() != made.generation


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV, errno.EMLINK])
def test_a_filesystem_without_hard_links_gets_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    made = based(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    assert made.open() == b"1"


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_what_was_fetched_is_deleted_where_the_staged_file_does_not_come_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    made = based(tmp_path)
    before = {path.name for path in made.directory.path.iterdir()}

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", refuse)
        with pytest.raises(RewindError, match=os.strerror(number)):
            made.open()
        assert {path.name for path in made.directory.path.iterdir()} == before
    assert made.open() == b"1"


def test_a_copy_never_takes_the_place_of_what_is_there(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"new")
    target.write_bytes(b"old")
    for link in (True, False):
        with pytest.raises((FileExistsError, StorageFailed), match="File exists"):
            copy_file(source, target, link=link)
        assert target.read_bytes() == b"old"


def test_a_database_that_this_user_may_not_look_into_is_not_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = shard(tmp_path, full=False)
    assert made.open() == b"1"

    def refuse(path: Path) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        with pytest.raises(StorageFailed, match="Permission denied"):
            made.directory.current()
    assert made.directory.current() == made.generation


def test_a_current_that_the_disk_does_not_give_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = shard(tmp_path, full=True)
    sound, bad = Path.read_bytes, made.directory.path / "CURRENT"

    def read(path: Path) -> bytes:
        if path == bad and path.exists():
            raise EIO
        return sound(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", read)
        with pytest.raises(StateCorrupted, match=r"CURRENT cannot be read.*Input/output error"):
            made.open()
        assert "Input/output error" in (made.look() or "")
        assert made.look() is None, "it was put aside, and a snapshot leads there"
    assert made.open() == b"1"


def test_a_current_that_is_not_given_before_the_first_commit_is_put_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = shard(tmp_path, full=False)
    (made.directory.path / "CURRENT").write_bytes(b"{")
    made.pointer = None  # type: ignore[assignment]
    assert "CURRENT cannot be read" in (made.look() or "")
    assert made.look() is None


def test_a_staged_file_whose_length_the_disk_does_not_give_is_taken_from_snapshots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = shard(tmp_path, full=True)
    sound, bad = Path.stat, made.generation.staged(made.pointer.commit)

    def stat(path: Path, **how: Any) -> Any:
        if path == bad:
            raise EIO
        return sound(path, **how)

    monkeypatch.setattr(Path, "stat", stat)
    assert made.open() == b"1"


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_what_rocksdb_says_of_a_read_tells_whether_the_disk_gives_it(number: int) -> None:
    text = f"IO error: While open a file for random read: /db/000012.sst: {os.strerror(number)}"
    error = translated(Exception(text), Path("/db"))
    assert isinstance(error, StorageFailed)
    assert error.unreadable


@pytest.mark.parametrize("call", ["get", "put", "upload"])
def test_the_place_that_fails_in_a_copy_is_named(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "source" / "file", tmp_path / "target" / "file"
    for one in (source, target):
        one.parent.mkdir()
    source.write_bytes(b"x")
    broken_reads(monkeypatch, lambda path: path == source)
    copies: dict[str, Callable[[], object]] = {
        "get": lambda: LocalFiles(source.parent).get("file", target, link=False),
        "put": lambda: LocalFiles(target.parent).put(source, "file", link=False),
        "upload": lambda: RemoteFiles("memory://there").put(source, "file", link=False),
    }
    with pytest.raises(StorageFailed) as caught:
        copies[call]()
    assert caught.value.where == str(source)
    assert not target.exists()


@pytest.mark.parametrize("error", ["IO error: While pread offset 0 len 53: /db/000008.sst: Input/output error"])
def test_a_database_that_the_disk_does_not_give_is_taken_from_snapshots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    made = shard(tmp_path, full=True)
    sound: Any = RocksStore.open.__func__  # type: ignore[attr-defined]

    def broken(cls: Any, path: Path, *args: Any, **kwargs: Any) -> RocksStore:
        if made.generation.path in Path(path).parents:
            raise translated(Exception(error), Path(path))
        return sound(cls, path, *args, **kwargs)

    monkeypatch.setattr(RocksStore, "open", classmethod(broken))
    assert made.open() == b"1"  # of the snapshot
    made = shard(tmp_path / "second", full=True)
    made.snapshots = Snapshots(tmp_path / "nothing")
    made.generation.staged(made.pointer.commit).unlink()
    assert "Input/output error" in (made.look() or "")
    made.snapshots = Snapshots(tmp_path / "second" / "snapshots")  # as a restore makes one
    assert made.open() == b"1"


def test_a_block_that_the_disk_does_not_give_is_found_before_a_task_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = shard(tmp_path, full=False)
    assert made.open() == b"1"
    broken_reads(monkeypatch, lambda path: path.suffix == ".sst" and made.generation.database in path.parents)
    assert "Input/output error" in (made.look() or "")
    assert made.directory.current() is None


def test_snapshots_that_are_not_given_condemn_nothing_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = shard(tmp_path, full=True)
    made.generation.staged(made.pointer.commit).unlink()

    def broken(*_: object, **__: object) -> None:
        with storage("s3://snapshots"):
            raise EIO

    monkeypatch.setattr(made.snapshots, "offers", broken)
    assert "s3://snapshots" in (made.look() or "")
    assert made.directory.current() is not None


def test_a_full_disk_is_not_taken_for_a_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = shard(tmp_path, full=True)

    def full(*_: object, **__: object) -> RocksStore:
        raise translated(Exception("IO error: No space left on device: /db/LOG"), made.generation.path)

    monkeypatch.setattr(RocksStore, "open", full)
    with pytest.raises(StorageFailed, match="no room"):
        made.open()
    assert made.directory.current() is not None


@pytest.mark.parametrize("call", ["chunks", "head", "list", "folders", "delete", "delete_folder"])
def test_what_a_local_filesystem_refuses_is_named(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = LocalFiles(tmp_path)
    files.write("a/b", [b"x"])
    calls: dict[str, tuple[Any, str, Callable[[], object]]] = {
        "chunks": (Path, "open", lambda: list(files.chunks("a/b"))),
        "head": (Path, "open", lambda: files.head("a/b", 1)),
        "list": (os, "scandir", lambda: files.list("a")),
        "folders": (Path, "iterdir", lambda: files.folders("a")),
        "delete": (Path, "unlink", lambda: files.delete(["a/b"])),
        "delete_folder": (os, "open", lambda: files.delete_folder("a")),
    }
    where, name, ask = calls[call]

    def refuse(*_: object, **__: object) -> None:
        raise EIO

    with monkeypatch.context() as patch:
        patch.setattr(where, name, refuse)
        with pytest.raises(StorageFailed, match="Input/output error"):
            ask()
    assert files.read("a/b") == b"x"


def test_names_that_are_not_ours_and_drafts_stop_no_pruning(tmp_path: Path) -> None:
    made = shard(tmp_path, full=False)
    home = tmp_path / "snapshots" / "0"
    (home / "foreign.step.sst").touch()
    (home / "idle.json.tmp-1").touch()
    made.snapshots.prune(0, [Commit(5, "d" * 32)])
    assert (home / "foreign.step.sst").exists()
    assert not (home / "idle.json.tmp-1").exists()
    log = MessageLog(str(tmp_path / "log"), frozenset())
    log.files.write("0/x.messages", [b""])
    assert log.prune(CommitRecord(0, Commit(5, "d" * 32), None, 0, [], {})) == []


@pytest.fixture
def not_given(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let no file of a checkpoint be read whose name ends so."""

    def refusing(sound: Callable[..., Any], suffix: str) -> Callable[..., Any]:
        def given(files: LocalFiles, name: str, *more: Any) -> Any:
            with storage(name):
                if name.endswith(suffix):
                    raise EIO
            return sound(files, name, *more)

        return given

    def end(suffix: str) -> None:
        for call in ("read", "head"):
            monkeypatch.setattr(LocalFiles, call, refusing(getattr(LocalFiles, call), suffix))

    return end


def test_a_changelogs_file_that_is_not_given_is_lost_and_done_without(
    tmp_path: Path, not_given: Callable[[str], None]
) -> None:
    log, first, second = FileChangelog(tmp_path), Commit(0, "a" * 32), Commit(1, "b" * 32)
    log.append(CommitRecord(0, first, None, 0, [], {}), Changes([ROW], [b"0"]))
    record = CommitRecord(0, second, first, 0, [], {})
    log.append(record, Changes([ROW], [b"1"]))
    log.append_base(record, [(ROW, b"1")])
    not_given(".base")
    found = log.read(0, second)
    assert found.values.to_pylist() == [b"1"]
    assert "went on without a base" in found.notes[0]
    (tmp_path / "0" / f"{second.name}.base").unlink()
    assert log.lost(0, second) == ""
    not_given(f"{first.name}.delta")
    assert "disk" in log.lost(0, second), "a base is made, as for a file that is not there"


def test_a_manifest_that_is_not_given_is_not_offered_and_nothing_is_pruned(
    tmp_path: Path, not_given: Callable[[str], None]
) -> None:
    made = shard(tmp_path, full=True)
    assert len(made.snapshots.offers(0)) == len(made.snapshots.offers(0, toward=made.pointer.commit)) == 1
    not_given(".full.json")
    assert made.snapshots.offers(0) == made.snapshots.offers(0, toward=made.pointer.commit) == ()
    with pytest.raises(StorageFailed):
        made.snapshots.prune(0, [made.pointer.commit])
