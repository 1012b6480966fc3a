"""What a filesystem refuses has a name, with the place and what to do; what is missing or there already is no error."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from fsspec.registry import _registry

from backend.errors import RewindError, StorageFailed
from backend.sinks.outbox import Written
from backend.sources.archive_index import Archive
from backend.sources.results_files import ResultsArchive
from backend.store.storage import storage
from recovery import failures
from recovery.files import RemoteFiles, open_files


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.ENOSPC, "no room"),
        (errno.EDQUOT, "no room"),
        (errno.EROFS, "does not let this process read or write"),
        (errno.EACCES, "does not let this process read or write"),
        (errno.EISDIR, "a file lies where a directory must be, or the reverse"),
        (errno.ENOTDIR, "a file lies where a directory must be, or the reverse"),
        (errno.EIO, "a disk or filesystem failed"),
    ],
)
def test_what_it_refuses_is_named(number: int, says: str) -> None:
    with pytest.raises(StorageFailed, match=says) as caught, storage("/there/x"):
        raise OSError(number, os.strerror(number))
    assert caught.value.where == "/there/x"
    assert os.strerror(number) in caught.value.why
    assert "start the query again" in caught.value.command


@pytest.mark.parametrize("kind", [FileNotFoundError, FileExistsError])
def test_a_missing_file_is_the_callers_to_judge(kind: type[OSError]) -> None:
    with pytest.raises(kind), storage("x"):
        raise kind


class ClientError(Exception):
    """As botocore's, aiohttp's and Google's clients have them: no `OSError`."""


CALLS: dict[str, tuple[str, Callable[[RemoteFiles], object]]] = {
    "list": ("ls", lambda there: there.list("a")),
    "folders": ("ls", lambda there: there.folders("a")),
    "read": ("cat_file", lambda there: there.read("a/b")),
    "head": ("cat_file", lambda there: there.head("a/b", 3)),
    "chunks": ("open", lambda there: list(there.chunks("a/b"))),
    "delete": ("rm_file", lambda there: there.delete(["a/b"])),
    "delete_folder": ("rm", lambda there: there.delete_folder("a")),
    "write": ("open", lambda there: there.write("a/c", [b"x"])),
    "get": ("open", lambda there: there.get("a/b", Path("nowhere"), link=False)),
}


@pytest.mark.parametrize("raised", [ClientError("slow down"), OSError(errno.EBUSY, "slow down"), TimeoutError("slow")])
@pytest.mark.parametrize("call", CALLS)
def test_whatever_a_remote_filesystem_raises_is_named_and_passes(
    call: str, raised: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = RemoteFiles("memory://slow")
    there.write("a/b", [b"content"])
    name, ask = CALLS[call]

    def refuse(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr(MemoryFileSystem, name, refuse)
    with pytest.raises(StorageFailed, match="slow") as caught:
        ask(there)
    assert "slow/a" in caught.value.where
    assert failures.read(caught.value).kind is failures.Kind.PASSES


@pytest.mark.parametrize("raised", [ClientError("slow down"), OSError(errno.EBUSY, "slow down"), TimeoutError("slow")])
@pytest.mark.parametrize(
    ("source", "call"),
    [*((Archive, call) for call in ("info", "find", "open")), (ResultsArchive, "info"), (ResultsArchive, "ls"),
     (Written, "open")],
)  # fmt: skip
def test_so_is_what_an_archive_and_an_outbox_are_read_through(
    source: type, call: str, raised: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = MemoryFileSystem()
    fs.pipe_file("/asked/a.parquet", b"PAR1")
    if source is Written:
        written = Written("memory://asked", [{"results_file": "a.parquet", "shard": 0}])
        ask: Callable[[], object] = lambda: list(written.batches("results"))  # noqa: E731
    else:
        ask = source("memory://asked").partitions

    def refuse(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr(MemoryFileSystem, call, refuse)
    with pytest.raises(StorageFailed, match="slow") as caught:
        ask()
    assert "asked" in caught.value.where
    assert failures.read(caught.value).kind is failures.Kind.PASSES


@pytest.mark.parametrize("raised", [ConnectionResetError("reset"), ClientError("reset")])
def test_a_download_that_breaks_off_is_the_remote_filesystems_failure(
    raised: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = RemoteFiles("memory://breaks")
    there.write("a", [bytes(3_000_000)])
    pieces = iter([b"one"])

    def read(*_: object) -> bytes:
        for piece in pieces:
            return piece
        raise raised

    monkeypatch.setattr(MemoryFile, "read", read)
    with pytest.raises(StorageFailed, match="reset") as caught:
        there.get("a", tmp_path / "a", link=False)
    assert "breaks/a" in caught.value.where


@pytest.mark.parametrize("raised", [ClientError("mine"), OSError("mine"), KeyError("mine")])
def test_what_the_bytes_giver_raises_is_not_the_filesystems(raised: Exception) -> None:
    there = RemoteFiles("memory://givers")
    there.write("b", [b"old"])

    def chunks() -> Iterator[bytes]:
        yield b"half"
        raise raised

    with pytest.raises(type(raised), match="mine") as caught:
        there.write("b", chunks())
    assert caught.value is raised
    assert there.read("b") == b"old"


def test_a_missing_remote_file_is_the_callers_to_judge(tmp_path: Path) -> None:
    there = RemoteFiles("memory://missing")
    for ask in (lambda: there.read("a"), lambda: there.head("a", 1), lambda: list(there.chunks("a"))):
        with pytest.raises(FileNotFoundError):
            ask()
    with pytest.raises(FileNotFoundError):
        there.get("a", tmp_path / "a", link=False)
    assert not (tmp_path / "a").exists()
    there.delete(["a"])
    there.delete_folder("a")
    assert there.list("a") == {}


class Other(MemoryFileSystem):
    """A filesystem for one test."""

    protocol = "other"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(path.partition("://")[2] if "://" in path else path)


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> type[Other]:
    """Give a filesystem that is known as other://, empty and to be changed at will."""

    class Mine(Other):
        store: ClassVar[dict[str, Any]] = {}
        pseudo_dirs: ClassVar[list[str]] = [""]

    monkeypatch.setitem(_registry, "other", Mine)
    return Mine


@pytest.mark.parametrize("protocol", ["other", ("other", "s3")])
@pytest.mark.parametrize("name", ["a[1]", "a?", "*"])
def test_names_are_no_patterns(other: type[Other], name: str, protocol: Any) -> None:
    other.protocol = protocol
    for place in (name, "a1"):
        there = RemoteFiles(f"other://{place}")
        assert there.write("x/f", [b"1"]) == there.write("x/y/[z]/g", [b"1"]) == 1
        there.write("stays", [b"1"])
    RemoteFiles(f"other://{name}").delete_folder("x")
    left = {*other().find("")}
    assert left == {f"/{name}/stays", "/a1/stays", "/a1/x/f", "/a1/x/y/[z]/g"}
    if protocol == "other":
        assert not other().exists(f"/{name}/x")


@pytest.mark.parametrize("protocol", ["other", ("other", "s3")])
@pytest.mark.parametrize("refused", [True, False])
def test_what_a_deletion_at_once_passes_over_is_deleted_or_named(
    other: type[Other], protocol: Any, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    other.protocol = protocol
    there = RemoteFiles("other://c")
    there.write("x/f", [b"1"])
    there.write("x/y/g", [b"1"])
    monkeypatch.setattr(other, "rm", lambda fs, *_, **__: fs.rm_file("/c/x/f"))
    if not refused:
        there.delete_folder("x")
        assert other().find("") == []
        return

    def refuse(fs: Other, path: str) -> None:
        if path.endswith("g"):
            raise PermissionError(errno.EACCES, "Access Denied")
        del fs.store[path]

    monkeypatch.setattr(other, "rm_file", refuse)
    with pytest.raises(StorageFailed, match="Access Denied"):
        there.delete_folder("x")


@pytest.mark.parametrize("protocol", ["other", ("other", "s3")])
@pytest.mark.parametrize("most", [None, 3])
def test_a_file_is_written_whatever_its_handle_returns(
    other: type[Other], protocol: Any, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SFTP's gives nothing back; one without a buffer may take a part."""
    other.protocol = protocol
    there = RemoteFiles("other://written")
    write = MemoryFile.write

    def some(handle: MemoryFile, data: Any) -> int | None:
        taken = write(handle, data[:most])
        return taken if most else None

    monkeypatch.setattr(MemoryFile, "write", some)
    content = np.arange(3, dtype=np.int64)
    assert there.write("a", [b"12345", content.data, b""]) == 5 + content.nbytes
    assert there.read("a") == b"12345" + content.tobytes()


def test_a_directory_where_a_file_must_be(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    (tmp_path / "a").mkdir()
    with pytest.raises(StorageFailed, match="a file lies where a directory must be") as caught:
        files.read("a")
    assert caught.value.where == f"{tmp_path}/a"
    with pytest.raises(StorageFailed, match="a file lies where a directory must be"):
        files.write("a", [b"x"])
    assert not [path for path in tmp_path.iterdir() if path.name != "a"]
    (tmp_path / "b").write_text("")
    with pytest.raises(RewindError, match="a file lies where a directory must be"):
        files.write("b/c", [json.dumps(1).encode()])


def test_a_move_that_fails_when_it_has_deleted_what_it_replaces_leaves_the_draft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As HDFS moves: the draft is the only copy then. Where the old file is still there the draft goes."""
    there = RemoteFiles("memory://torn")
    there.write("a/old", [b"one"])

    def refuse(fs: MemoryFileSystem, source: str, target: str) -> None:
        if deletes:
            fs.rm_file(target)
        raise OSError(errno.EIO, "the name node went away")

    monkeypatch.setattr(MemoryFileSystem, "mv", refuse)
    for deletes in (False, True):
        with pytest.raises(StorageFailed, match="name node"):
            there.write("a/old", [b"two"])
        drafts = there.list("a", temporary=True)
        assert (len(there.list("a")), len(drafts)) == ((0, 1) if deletes else (1, 0))
    assert there.read(f"a/{next(iter(drafts))}") == b"two"
