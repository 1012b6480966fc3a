"""A disk that is full, broken or slow: the job stops by name, and goes on to the control's end when it is well.

RocksDB's own writes are made to fail by a full filesystem and a limit here, and by a shim in `make torture`
(`tests.crash.faulty_disk`).
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from backend.errors import StorageFailed
from backend.sinks.directory import VersionedDirectory
from backend.store.storage import storage
from recovery import files
from recovery.files import LocalFiles, RemoteFiles
from tests.crash.damage import Job
from tests.crash.faulty_disk import NOT_ALLOWED, compared, control, no_draft_counts, scratch, try_on
from tests.crash.told import told

ROOT = Path(__file__).resolve().parents[2]
ROOMS_KB = ("0", "20", "60", "20000")


def test_no_room_for_files_of_some_size() -> None:
    sizes = ["20", "4000", "20000"]
    command = [sys.executable, "-m", "tests.crash.faulty_disk", "limit", *sizes, "100000000"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert all("[rewind:StorageFailed] there is no room to write" in line for line in lines[: len(sizes)]), lines
    assert lines[-1] == "100000000: nothing was refused"
    told.count("sizes at which the disk was full", str(len(sizes)))


def test_a_filesystem_that_is_full() -> None:
    """Needs to mount one; where that is not allowed it is skipped, and the limit above stands for it."""
    command = [sys.executable, "-m", "tests.crash.faulty_disk", "full", *ROOMS_KB]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode == NOT_ALLOWED:
        pytest.skip(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert all("[rewind:StorageFailed] there is no room to write" in line for line in lines[:-1]), lines
    assert lines[-1] == f"{ROOMS_KB[-1]} kB: it had room enough"
    told.count("rooms in which the filesystem became full", str(len(lines) - 1))


@pytest.fixture(scope="module")
def sound() -> Iterator[tuple[Path, Job, Any]]:
    root = scratch()
    yield root, *control(root)
    shutil.rmtree(root, ignore_errors=True)


class Failing:
    """Fails from the n-th call on, until it is well."""

    def __init__(self, real: Callable[..., Any], at: int, error: int) -> None:
        self.real, self.left, self.error, self.well = real, at, error, False

    def __call__(self, *arguments: Any) -> Any:
        self.left -= 1
        if self.left < 0 and not self.well:
            raise OSError(self.error, os.strerror(self.error))
        return self.real(*arguments)


@pytest.mark.parametrize("call", ["fsync", "link", "replace", "rename", "mkdir"])
def test_calls_that_fail(sound: tuple[Path, Job, Any], monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    root, job, expected = sound
    stopped = 0
    for at in (0, 1, 3, 7):
        home = root / f"{call}{at}"
        shutil.copytree(job.home, home)
        one = Job(home, pointers=list(job.pointers))
        failing = Failing(getattr(os, call), at, (errno.EIO, errno.ENOSPC)[at % 2])
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            stopped += try_on(one) is not None
            failing.well = True
            no_draft_counts(one)
            assert one.finish() == compared(expected, one)
        shutil.rmtree(home)
    assert stopped or call in ("link", "rename", "mkdir"), "none was noticed"
    told.count(f"calls of {call} that failed", "4")


class HalfWritten:
    """A file that takes half of what it is given, and then has no room."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def write(self, data: bytes) -> int:
        self.handle.write(data[: len(data) // 2])
        self.handle.flush()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def __enter__(self) -> HalfWritten:
        return self

    def __exit__(self, *_: object) -> None:
        self.handle.close()


def test_a_file_that_is_written_by_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = LocalFiles(tmp_path)
    there.write("a/b", [b"old"])
    real = files._new
    with monkeypatch.context() as patch:
        patch.setattr(files, "_new", lambda path: HalfWritten(real(path)))
        with pytest.raises(StorageFailed, match="no room") as caught:
            there.write("a/b", [b"new content"])
        with pytest.raises(StorageFailed):
            there.write("a/c", [b"new content"])
    assert "a/b" in caught.value.where
    assert "start the query again" in caught.value.command
    assert there.read("a/b") == b"old"
    assert there.list("a") == {"b": 3}
    assert there.list("a", temporary=True) == {}, "not even a draft is left"


def test_a_remote_filesystem_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    there = RemoteFiles("memory://faulty/base")
    there.write("b", [b"old"])

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "the bucket is on fire")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "mv", refuse)
        with pytest.raises(StorageFailed, match="on fire"):
            there.write("b", [b"new"])
    assert there.read("b") == b"old"
    assert there.list(temporary=True) == {}
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "cat_file", refuse)
        with pytest.raises(StorageFailed, match="on fire"):
            there.read("b")


def test_a_slow_disk_only_takes_longer(sound: tuple[Path, Job, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    root, job, expected = sound
    shutil.copytree(job.home, root / "slow")
    one = Job(root / "slow", pointers=list(job.pointers))
    real = os.fsync

    def slow(handle: int) -> None:
        time.sleep(0.005)
        real(handle)

    monkeypatch.setattr(os, "fsync", slow)
    assert one.finish() == compared(expected, one)


def test_an_output_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = VersionedDirectory(tmp_path / "out")
    output.open("query")
    attempt = output.attempt(3, "run")
    (attempt / "part").write_bytes(b"123")
    monkeypatch.setattr(os, "fsync", Failing(os.fsync, 0, errno.EIO))
    with pytest.raises(StorageFailed) as caught:
        output.publish(3, attempt, [("part", 3)])
    assert str(tmp_path / "out") in caught.value.where
    assert output.published() == [], "nothing is visible by half"


def test_what_is_missing_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), storage("here"):
        (tmp_path / "none").read_bytes()
    with pytest.raises(StorageFailed, match="let this process"), storage("here"):
        raise PermissionError(errno.EACCES, "no")
    with pytest.raises(FileNotFoundError):
        LocalFiles(tmp_path).read("none")


UNMERGED = """
import os, sys, time
from pathlib import Path
from backend.errors import StorageFailed
from backend.rocks import RocksOptions, RocksStore, store as module
from backend.store.protocol import Changes

path, switch = Path(sys.argv[1]), Path(os.environ["FAULTY_IO_WHILE"])
with RocksStore.open(path / "db", options=RocksOptions(level0_files=1000, merged_files=1000)) as store:
    for number in range(40):
        staged = store.stage(Changes([b"\\x01a", b"\\x01z"], [b"%d" % number] * 2), path / f"{number}.sst")
        store.confirm(staged)
switch.touch()
store = RocksStore.open(path / "db")
while store.property("rocksdb.background-errors") == "0":
    time.sleep(0.01)
assert int(store.property("rocksdb.num-files-at-level0")) > 30
module._ROOM_WAIT_S, module._TOO_MANY = 0.0, 1
try:
    store.confirm(staged)
except StorageFailed as error:
    print(error, flush=True)
store.close()
print("closed")
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_database_that_a_full_disk_keeps_from_merging_closes(tmp_path: Path) -> None:
    shim = tmp_path / "faulty_io.so"
    source = ROOT / "tests" / "crash" / "faulty_io.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", shim, source, "-ldl"], check=True)
    environment = {
        "LD_PRELOAD": str(shim),
        "FAULTY_IO_BELOW": ".sst",
        "FAULTY_IO_WHILE": str(tmp_path / "on"),
        "FAULTY_IO_AT": "0",
        "FAULTY_IO_ERRNO": str(errno.ENOSPC),
    }
    command = [sys.executable, "-c", UNMERGED, str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    said, closed = done.stdout.splitlines()
    assert "the database's files cannot be merged" in said
    assert closed == "closed"
