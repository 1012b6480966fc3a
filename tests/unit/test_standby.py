"""A copy on a host that does not own a shard: a takeover catches up, and what is owned is left alone."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from backend.errors import StateUnavailable, StorageFailed
from backend.rocks import RocksStore
from backend.rocks.errors import translated
from backend.store.storage import storage
from recovery import attempt
from recovery.attempt import run_attempt
from recovery.commit.option_sets import ByVersion
from recovery.commit.pointer import decode, read_commit_row
from recovery.files import LocalFiles, open_files
from recovery.queue.entries import Queue
from recovery.restore import open_shard
from recovery.restore.open_shard import RECLAIM_EVERY
from recovery.restore.probe import share
from recovery.restore.standby import Given, keep_copy
from recovery.snapshots.publisher import Snapshots
from tests.unit.test_attempt import counted, directory, given, job, wait_for_uploads  # noqa: F401

MANY = 1 << 30


@pytest.fixture
def hosts(job, tmp_path):  # noqa: F811
    snapshots = Snapshots(str(tmp_path / "snapshots"))
    return [replace(job, local_dir=tmp_path / name, snapshots=snapshots, snapshot_every=100) for name in ("one", "two")]


def ran(host, versions, pointer=None):
    for version in versions:
        pointer = run_attempt(host, pointer, version, given([version])).pointer
        wait_for_uploads()
    return pointer


def commit_of(pointer):
    return (decode(pointer) if isinstance(pointer, bytes) else pointer).commit


def at(host):
    generation = directory(host).current()
    if generation is None:
        return None
    with RocksStore.open(generation.database, create=False) as store:
        return read_commit_row(store).commit


def kept(host, pointer, most_bytes=MANY):
    """Rounds until nothing more is fetched."""
    rounds = []
    while (got := keep_copy(host, commit_of(pointer), most_bytes)).fetched:
        rounds.append(got)
        assert len(rounds) < 20, "a copy that is there is fetched again and again"
    return rounds


def test_a_takeover_with_a_copy_fetches_the_steps_since_alone(hosts):
    one, two = hosts
    pointer = ran(one, range(6))
    assert [one.behind for one in kept(two, pointer)] == [True, False]  # the snapshot of the first commits, then steps
    assert at(two) == commit_of(pointer)
    copy = directory(two).current()
    pointer = ran(one, range(6, 8), pointer)
    done = run_attempt(two, pointer, 8, given([8]))
    assert counted(done) == {"a": 9}
    assert directory(two).current() == copy, "a whole snapshot would have made another generation"


def test_a_copy_goes_to_what_is_committed_and_no_further(hosts):
    one, two = hosts
    committed = ran(one, range(3))
    ran(one, [3], committed)  # its step is published, Spark has not committed it
    kept(two, committed)
    assert at(two) == commit_of(committed)
    assert counted(run_attempt(two, committed, 3, given([3]))) == {"a": 4}


def test_a_locked_shard_is_left_alone(hosts):
    one, two = hosts
    pointer = ran(one, range(3))
    with directory(two).lock():
        assert keep_copy(two, commit_of(pointer), MANY) == Given()
    assert at(two) is None


def test_a_shard_that_is_owned_here_is_left_alone(hosts):
    one, _ = hosts
    pointer = ran(one, range(3))
    before = at(one)
    assert before != commit_of(pointer)  # its staged file waits for the next attempt
    assert keep_copy(one, commit_of(pointer), MANY) == Given()
    assert at(one) == before


def test_a_round_is_bounded(hosts):
    one, two = hosts
    pointer = ran(one, range(6))
    *bounded, last = kept(two, pointer, most_bytes=1)
    assert len(bounded) > 2  # the snapshot, then a step each
    assert all(one.behind for one in bounded)
    assert not last.behind
    assert at(two) == commit_of(pointer)


def test_a_copy_that_is_not_there_is_behind_also_where_no_snapshot_leads_to_it(hosts):
    one, two = (replace(host, snapshot_every=None) for host in hosts)
    pointer = ran(one, range(3))
    assert keep_copy(two, commit_of(pointer), MANY) == Given(behind=True)
    assert at(two) is None
    assert keep_copy(one, commit_of(pointer), MANY) == Given(), "its owner lacks nothing"


def test_a_takeover_during_the_fetch_wins(hosts, monkeypatch):
    one, two = hosts
    pointer = ran(one, range(3))
    fetch = Snapshots.fetch

    def taken_over_meanwhile(snapshots, shard, commit, target):
        monkeypatch.setattr(Snapshots, "fetch", fetch)
        ran(two, [3], pointer)
        return fetch(snapshots, shard, commit, target)

    monkeypatch.setattr(Snapshots, "fetch", taken_over_meanwhile)
    assert keep_copy(two, commit_of(pointer), MANY) == Given()
    assert at(two) == commit_of(pointer), "the older snapshot has not replaced what the takeover made"


def test_a_copy_that_cannot_be_read_is_replaced_and_a_lock_of_the_disk_is_no_damage(hosts, monkeypatch):
    one, two = hosts
    pointer = ran(one, range(3))
    kept(two, pointer)
    bad = directory(two).current()
    sound = RocksStore.open.__func__

    def opened(message):
        def broken(cls, path, *args, **kwargs):
            if bad.path in path.parents:
                raise translated(Exception(message), path)
            return sound(cls, path, *args, **kwargs)

        monkeypatch.setattr(RocksStore, "open", classmethod(broken))

    opened("IO error: No space left on device: LOG")
    with pytest.raises(StorageFailed, match="no room"):
        keep_copy(two, commit_of(pointer), MANY)
    opened("IO error: While pread offset 0 len 53: 000008.sst: Input/output error")
    assert kept(two, pointer)
    assert at(two) == commit_of(pointer)
    assert directory(two).current() != bad


def test_a_copy_reclaims_what_expired_as_often_as_its_owner(hosts, monkeypatch):
    one, two = hosts
    reclaimed = []
    monkeypatch.setattr(open_shard, "SMALL_BYTES", 0)

    def copied():
        with monkeypatch.context() as patch:  # the owner does it by the same rule
            patch.setattr(
                open_shard, "reclaim", lambda store, bounds: reclaimed.append(read_commit_row(store).commit.version)
            )
            kept(two, pointer)

    pointer = ran(one, range(3))
    copied()
    assert reclaimed == []  # a whole snapshot was fetched, and steps of the first commits
    for version in range(3, 20):
        pointer = ran(one, [version], pointer)
        copied()
    assert reclaimed == [RECLAIM_EVERY, 2 * RECLAIM_EVERY]


@pytest.mark.parametrize("suffix", [".sst", ".json"])
def test_a_snapshot_that_its_disk_does_not_give_is_published_anew(hosts, monkeypatch, suffix):
    one, two = hosts
    pointer = ran(one, range(3))
    assert share(one, pointer)
    bad = {path for path in one.snapshots.files.root.rglob(f"*{suffix}") if ".step." not in path.name}
    sound = Path.open

    def read(path, mode="r", *args, **kwargs):
        if path in bad and "r" in mode:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return sound(path, mode, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", read)
        if suffix == ".json":
            patch.setattr(Path, "read_bytes", lambda path: read(path, "rb").read())
        assert not one.snapshots.is_sound(0, commit_of(pointer))
    assert one.snapshots.is_sound(0, commit_of(pointer))
    assert counted(run_attempt(two, pointer, 3, given([3]))) == {"a": 4}


@pytest.mark.parametrize("manifest", [True, False])
def test_a_damaged_snapshot_is_published_anew_from_where_the_state_is_whole(hosts, tmp_path, manifest):
    one, two = hosts
    pointer = ran(one, range(3))
    assert share(one, pointer)
    assert not share(one, pointer)
    for file in (tmp_path / "snapshots" / "0" / "shared").iterdir():
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.unlink()  # a hard link of the database's own
        file.write_bytes(data)
    for file in (tmp_path / "snapshots" / "0").glob("*.step.json"):
        file.unlink()
    with pytest.raises(StateUnavailable):
        run_attempt(two, pointer, 3, given([3]))
    if not manifest:
        for file in (tmp_path / "snapshots" / "0").glob("*.full.json"):
            file.unlink()
    assert share(one, pointer)
    assert counted(run_attempt(two, pointer, 3, given([3]))) == {"a": 4}


@pytest.mark.parametrize("queues", [True, False])
@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.ENOSPC, "no room"),
        (errno.ETIMEDOUT, "disk or filesystem failed"),
        (errno.EIO, "disk or filesystem failed"),
    ],
)
def test_what_refuses_for_a_time_is_no_broken_snapshot(hosts, tmp_path, monkeypatch, queues, number, says):
    """It is waited for: a shard that queues for it would be replayed, one that is restored for it given up soon."""
    one, two = hosts
    pointer = ran(one, range(3))
    assert share(one, pointer)
    if queues:
        two = replace(two, queue=Queue(open_files(tmp_path / "queue"), ByVersion.always(two.operator), begins=True))

    def refuse(files, name, target, *, link):
        with storage(str(target)):
            raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(LocalFiles, "get", refuse)
        heard = MagicMock()
        patch.setattr("recovery.restore.carry_out.Recorder.add", heard)
        with pytest.raises(StorageFailed, match=says):
            run_attempt(two, pointer, 3, given([3]))
        assert heard.call_count == 1
    assert directory(two).current() is None
    assert counted(run_attempt(two, pointer, 3, given([3]))) == {"a": 4}


def test_steps_too_many_for_a_task_are_left_to_a_queue_too(hosts, tmp_path, monkeypatch):
    one, two = hosts
    pointer = ran(one, range(3))
    kept(two, pointer)
    pointer = ran(one, range(3, 6), pointer)
    queue = Queue(open_files(tmp_path / "queue"), ByVersion.always(two.operator), begins=True)
    monkeypatch.setattr(attempt, "TAKEOVER_BYTES", 1)
    queued = run_attempt(replace(two, queue=queue), pointer, 6, given([6]))
    assert queued.metrics["decision"] == "queued"
    assert "a task fetches 1 at most" in queued.metrics["queued_why"]
    kept(two, pointer)
    assert counted(run_attempt(replace(two, queue=queue), pointer, 6, given([6]))) == {"a": 7}
