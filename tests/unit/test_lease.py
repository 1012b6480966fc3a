"""Who holds a checkpoint: on the same host, on another one, dead, copied, taken at once."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

from backend.errors import CheckpointInUse, CheckpointTaken, StorageFailed
from backend.spark.start import take_lease
from recovery.commit import lease as module
from recovery.commit.lease import DIRECTORY, Lease, check_free, leased, take
from recovery.files import Files, open_files

OTHER_HOST = {"host": "elsewhere", "boot": "b pid:[1]", "pid": 1, "started": 1}


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD_S", 0.05)


@pytest.fixture(params=["local", "memory"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Give a checkpoint on the local filesystem, and on one without a rename that wins."""
    if request.param == "local":
        yield str(tmp_path / "checkpoint")
        return
    uri = f"memory://lease/{tmp_path.name}"
    yield uri
    filesystem = fsspec.filesystem("memory")
    if filesystem.exists("/lease"):
        filesystem.rm("/lease", recursive=True)


def elsewhere(monkeypatch: pytest.MonkeyPatch, **parts: Any) -> None:
    """Be a process of another host from here on."""
    told = {**module._here(), **OTHER_HOST, **parts}
    monkeypatch.setattr(module, "_here", lambda: told)


def stand_still(holder: Lease) -> None:
    """Let a holder renew no more, as a host that was switched off or suspended."""
    holder._ended.set()
    holder._thread.join()
    holder._ended.clear()


def contents(checkpoint: str) -> list[dict[str, Any]]:
    files = open_files(checkpoint)
    return [json.loads(files.read(f"{DIRECTORY}/{name}")) for name in sorted(files.list(DIRECTORY))]


def test_one_holder_at_a_time_and_the_next_after_it(checkpoint: str) -> None:
    first = take(checkpoint, "query 'clicks'")
    with pytest.raises(CheckpointInUse, match="query 'clicks', process") as caught:
        take(checkpoint, "another")
    assert f"process {os.getpid()} on " in caught.value.why
    assert "query.stop()" in caught.value.command
    first.check()
    first.release()
    first.release()
    with pytest.raises(CheckpointTaken, match="this query has ended"):
        first.check()
    with leased(checkpoint, "rewind restore"), pytest.raises(CheckpointInUse, match="rewind restore"):
        check_free(checkpoint)
    check_free(checkpoint)
    assert [one["released"] for one in contents(checkpoint)] == [True], "only the last one stays, and says so"


@pytest.mark.parametrize("ended", [signal.SIGKILL, None])
def test_a_process_of_this_host_is_seen_to_live_and_to_be_dead_at_once(tmp_path: Path, ended: int | None) -> None:
    script = (
        "import sys; from recovery.commit.lease import take; take(sys.argv[1], 'a query'); print('held', flush=True);"
    )
    script += "sys.stdin.read()"
    words = [sys.executable, "-c", script, str(tmp_path)]
    other = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path.cwd())
    assert other.stdout is not None
    assert other.stdin is not None
    assert other.stdout.readline() == "held\n"
    with pytest.raises(CheckpointInUse, match=f"process {other.pid} on"):
        take(str(tmp_path), "here")
    if ended is None:
        other.stdin.close()  # it ends without giving the lease back
    else:
        other.send_signal(ended)  # not waited for yet: it is a zombie, which is dead too
        time.sleep(0.05)
    if ended is None:
        other.wait()
    before = time.monotonic()
    take(str(tmp_path), "here").release()
    assert time.monotonic() - before < module.PATIENCE * 5.0 / 4, "its period is 5 s, and is not waited for"
    other.wait()


def test_a_process_that_got_a_dead_holders_number_is_not_the_holder(tmp_path: Path, monkeypatch: Any) -> None:
    holder = take(str(tmp_path), "a query")
    module._ours.clear()
    parent = {**module._here(), "pid": os.getppid()}
    monkeypatch.setattr(module, "_here", lambda: parent)  # then this process is another one of the host
    with pytest.raises(CheckpointInUse):
        check_free(str(tmp_path))
    (path,) = (tmp_path / DIRECTORY).iterdir()
    stand_still(holder)
    path.write_text(json.dumps({**json.loads(path.read_text()), "started": 1}))
    check_free(str(tmp_path))


def test_a_holder_on_another_host_lives_as_long_as_it_renews(checkpoint: str, monkeypatch: Any) -> None:
    holder = take(checkpoint, "a query")
    module._ours.clear()
    elsewhere(monkeypatch)
    for _ in range(2):
        with pytest.raises(CheckpointInUse):
            take(checkpoint, "here")
    stand_still(holder)
    before = time.monotonic()
    later = take(checkpoint, "here")
    assert time.monotonic() - before >= module.PATIENCE * 0.05, "its own period counts"
    with pytest.raises(CheckpointTaken, match="here, process 1 on elsewhere"):
        holder.check()
    later.check()
    later.release()


def test_clocks_are_not_compared(checkpoint: str, monkeypatch: Any) -> None:
    """A holder whose clock is a year behind lives; so does one that was taken a moment ago and is dead, no longer."""
    holder = take(checkpoint, "a query")
    holder._content["since"] = "2020-01-01T00:00:00+00:00"
    module._ours.clear()
    elsewhere(monkeypatch)
    with pytest.raises(CheckpointInUse, match="since 20"):
        take(checkpoint, "here")
    holder.release()


def test_a_holder_that_wakes_up_finds_that_it_was_taken_over_whatever_came_since(checkpoint: str, monkeypatch) -> None:
    holder = take(checkpoint, "a query")
    stand_still(holder)
    module._ours.clear()
    elsewhere(monkeypatch)
    take(checkpoint, "second").release()
    take(checkpoint, "third").release()
    holder._write(holder._content, durable=False)  # it was in the middle of a renewal
    with pytest.raises(CheckpointTaken, match="third"):
        holder.check()
    assert isinstance(holder.lost, CheckpointTaken)


def test_a_checkpoint_by_another_mount_is_no_copy(tmp_path: Path, monkeypatch: Any) -> None:
    """A bind mount, or a second mount of NFS: another path, no link, the same directory."""
    lease = take(str(tmp_path / "checkpoint"), "the holder")
    monkeypatch.setattr(module, "real_place", lambda _: "/mnt/another")
    content = json.loads(next((tmp_path / "checkpoint" / module.DIRECTORY).iterdir()).read_text())
    assert module._is_there(content["place"], str(tmp_path / "checkpoint"))
    assert not module._is_there(content["place"], str(tmp_path))
    assert not module._is_there(None, str(tmp_path / "checkpoint"))
    lease.release()


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_copy_of_a_held_checkpoint_is_free(tmp_path: Path, monkeypatch: Any, where: str) -> None:
    import shutil

    holder = take(str(tmp_path / "checkpoint"), "a query")
    shutil.copytree(tmp_path / "checkpoint", tmp_path / "copy")
    if where == "elsewhere":
        elsewhere(monkeypatch)
    copy = take(str(tmp_path / "copy"), "the copy's query")
    holder.check()
    copy.check()
    for one in (copy, holder):
        one.release()


def test_the_same_checkpoint_under_another_name_is_held(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "checkpoint")
    holder = take(str(tmp_path / "checkpoint"), "a query")
    for name in (f"{tmp_path}/link", f"file://{tmp_path}/x/../checkpoint/"):
        with pytest.raises(CheckpointInUse):
            check_free(name)
    holder.release()


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"format": 2, "released": true}', '{"format": 1}'])
def test_a_lease_that_cannot_be_read_is_watched(tmp_path: Path, monkeypatch: Any, content: str) -> None:
    """Of another release, or damaged: whether it is renewed can still be seen."""
    path = tmp_path / DIRECTORY / f"{7:012d}-{'a' * 32}.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    monkeypatch.setattr(module, "PERIOD_S", 0.02)
    later = take(str(tmp_path), "here")
    assert later._name.startswith(f"{8:012d}-")
    later.release()


class Racing:
    """Files on which a second taker does all it does between two steps of the first one."""

    def __init__(self, files: Files, step: int, other: Any) -> None:
        self._files, self._left, self._other = files, step, other

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._left == 0:
                self._left = -1
                self._other()
            self._left -= 1
            return getattr(self._files, name)(*args, **kwargs)

        return call


@pytest.mark.parametrize("step", range(8))
def test_of_two_that_take_at_once_one_is_left(tmp_path: Path, monkeypatch: Any, step: int) -> None:
    won: list[Lease] = []
    plain = module.open_files

    def take_it(name: str) -> None:
        with suppress(CheckpointInUse):
            won.append(take(str(tmp_path), name))

    def other() -> None:
        monkeypatch.setattr(module, "open_files", plain)
        take_it("other")

    racing = Racing(plain(str(tmp_path)), step, other)
    monkeypatch.setattr(module, "open_files", lambda place: racing)
    take_it("one")
    left = []
    for one in won:
        try:
            one.check()
            left.append(one)
        except CheckpointTaken:
            continue
    assert len(left) == 1
    assert len(won) <= 2
    for one in won:
        one.release()


def test_a_filesystem_that_fails_for_a_moment_is_waited_for_and_then_named(tmp_path: Path, monkeypatch: Any) -> None:
    holder = take(str(tmp_path), "a query")
    stand_still(holder)

    def refuse(*_: Any) -> Any:
        raise OSError("no route to host")

    monkeypatch.setattr(module, "_names", refuse)
    holder._seen_s = time.monotonic()
    holder._content["period_s"] = 100.0
    holder.check()
    holder._seen_s -= 401.0
    with pytest.raises(StorageFailed, match="no route to host"):
        holder.check()


@pytest.mark.slow
def test_a_jumping_wall_clock_neither_ends_a_lease_nor_prolongs_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A holder on another host is watched by its renewals, for so many periods of the monotonic clock."""
    checkpoint, real, jumps = str(tmp_path), time.time, itertools.cycle([0.0, -3_600.0, 86_400.0])
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    monkeypatch.setattr(module, "PERIOD_S", 0.3)
    holder = take(checkpoint, "query 'a'")
    module._ours.clear()  # as another process sees it
    elsewhere(monkeypatch)
    with pytest.raises(CheckpointInUse):
        check_free(checkpoint)
    stand_still(holder)
    began = time.monotonic()
    assert len(check_free(checkpoint)) == 1
    assert 0.3 * module.PATIENCE <= time.monotonic() - began < 0.3 * module.PATIENCE + 5


def test_a_start_that_is_refused_leaves_nothing_unless_somebody_held_the_checkpoint_before(tmp_path: Path) -> None:
    checkpoint = str(tmp_path / "checkpoint")

    def refused() -> list[str]:
        with pytest.raises(ValueError, match="refused"), ExitStack() as undo:
            take_lease(checkpoint, "a query", undo)
            raise ValueError("refused")
        return sorted(open_files(checkpoint).list(DIRECTORY))

    assert refused() == []
    with leased(checkpoint, "a command"):
        pass
    [left] = refused()
    assert left.startswith(f"{DIRECTORY}/000000000002-") or left.startswith("000000000002-"), "numbers go on"


def test_a_holder_is_found_by_a_uri_through_another_mount(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert module._is_there(str(tmp_path / "link"), f"file://{tmp_path}/real")
    assert not module._is_there(str(tmp_path / "other"), f"file://{tmp_path}/real")
    assert not module._is_there("a\0b", f"file://{tmp_path}/real")
    assert not module._is_there(None, f"file://{tmp_path}/real")


def test_a_live_holder_is_found_where_no_link_shows_that_two_mounts_are_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bind mount: `realpath` says two names, the device and the number of the directory are one."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.setattr("backend.places.os.path.realpath", os.path.abspath)
    assert module._is_there(str(tmp_path / "link"), f"file://{tmp_path}/real")


def test_a_lease_is_taken_also_where_older_ones_cannot_be_deleted(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It renewed itself for ever, and nobody could give it back: every further start was refused."""
    take(checkpoint, "one").release()

    def fails(*_: Any) -> None:
        raise StorageFailed("no right to delete")

    with monkeypatch.context() as broken:
        broken.setattr(type(open_files(checkpoint)), "delete", fails)
        take(checkpoint, "two").release()
    assert "older leases" in caplog.text
    take(checkpoint, "three").release()


def test_a_take_that_fails_gives_the_lease_back(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Lease) -> None:
        raise StorageFailed("the filesystem does not answer")

    with monkeypatch.context() as broken, pytest.raises(StorageFailed):
        broken.setattr(Lease, "check", fails)
        take(checkpoint, "one")
    take(checkpoint, "two").release()


class DeletesFirst:
    """Moves as HDFS does: what is replaced is deleted first. Stands still in between until somebody has listed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fails: int = 0) -> None:
        self.between, self.listed, self.fails = threading.Event(), threading.Event(), fails
        ls = MemoryFileSystem.ls

        def listing(fs: MemoryFileSystem, *args: Any, **kwargs: Any) -> Any:
            found = ls(fs, *args, **kwargs)
            if self.between.is_set():
                self.listed.set()
            return found

        def mv(fs: MemoryFileSystem, source: str, target: str, **_: Any) -> None:
            if fs.exists(target):
                fs.rm_file(target)
                self.between.set()
                self.listed.wait(30)
                self.fails -= 1
                if self.fails >= 0:
                    raise OSError("the name node went away")
            AbstractFileSystem.mv(fs, source, target)

        monkeypatch.setattr(MemoryFileSystem, "ls", listing)
        monkeypatch.setattr(MemoryFileSystem, "mv", mv)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[str]:
    yield f"memory://lease/{tmp_path.name}"
    MemoryFileSystem().rm("/lease", recursive=True)


def test_a_renewal_that_deletes_first_loses_no_lease(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moves = DeletesFirst(monkeypatch)
    holder = take(memory, "a query")
    assert moves.between.wait(30)
    holder.check()
    assert holder.lost is None
    holder.release()


def test_a_renewal_that_deletes_first_makes_no_checkpoint_free(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moves = DeletesFirst(monkeypatch)
    holder = take(memory, "a query")
    assert moves.between.wait(30)
    with pytest.raises(CheckpointInUse, match="a query"):
        check_free(memory)
    holder.release()


def test_a_renewal_that_fails_when_it_has_deleted_is_made_again(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moves = DeletesFirst(monkeypatch, fails=1)
    monkeypatch.setattr(module, "PATIENCE", 1000)
    holder = take(memory, "a query")
    assert moves.between.wait(30)
    holder.check()
    while moves.fails >= 0 or not contents(memory):
        assert holder._thread.is_alive()
        holder.check()
    holder.check()
    holder.release()


def test_a_renewal_that_failed_half_way_makes_no_checkpoint_free(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moves = DeletesFirst(monkeypatch, fails=3)
    monkeypatch.setattr(module, "PATIENCE", 1000)
    holder = take(memory, "a query")
    assert moves.between.wait(30)
    with pytest.raises(CheckpointInUse, match="a query"):
        check_free(memory)
    holder.release()


def test_a_draft_that_a_dead_holder_left_counts_by_its_number_and_goes(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0)
    name = f"{7:012d}-{'0' * 32}.json"
    MemoryFileSystem().pipe_file(f"{memory}/{DIRECTORY}/{name}.tmp-1", b"{}")
    with leased(memory, "a query"):
        [found] = MemoryFileSystem().ls(f"{memory}/{DIRECTORY}", detail=False)
        assert found.rpartition("/")[2].startswith(f"{8:012d}-")


def test_a_lease_that_somebody_deleted_is_lost_at_once(memory: str) -> None:
    holder = take(memory, "a query")
    stand_still(holder)
    MemoryFileSystem().rm(f"/lease/{memory.rpartition('/')[2]}/{DIRECTORY}", recursive=True)
    with pytest.raises(CheckpointTaken, match="its lease was deleted"):
        holder.check()
