"""A shard that moves between hosts: correct at every micro-batch, and a move costs what changed, not what there is."""

from __future__ import annotations

import fcntl
import json
import os
import random
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from backend.batch import MESSAGE_FIELDS, NO_TIME, Position
from backend.errors import StateUnavailable
from backend.rocks import RocksStore
from backend.sinks.tables import merge_metrics
from backend.store.protocol import Region
from recovery.attempt import run_attempt
from recovery.changelog import open_changelog
from recovery.commit.pointer import CommitRecord
from recovery.commit.scratch import sweep
from recovery.commit.shard_directory import ShardDirectory
from recovery.files import LocalFiles
from recovery.jobs import ShardJob
from recovery.listener import LoggingListener, Restoring
from recovery.operate import Done
from recovery.restore.open_shard import RECLAIM_EVERY
from recovery.restore.tries import moves, relay
from recovery.share import ShardInput
from recovery.snapshots import uploads
from recovery.snapshots.publisher import Snapshots
from tests.support.counting import CountingOperator

KEY = (pa.field("key", pa.string()),)


class CountedFiles(LocalFiles):
    """A checkpoint's filesystem that counts what is fetched and can refuse what is uploaded."""

    fetched = 0
    refuse = False
    hold: threading.Event | None = None

    def get(self, name: str, target: Path, *, link: bool) -> None:
        super().get(name, target, link=False)  # another host: no links
        self.fetched += target.stat().st_size

    def put(self, source: Path, name: str, *, link: bool) -> int:
        if self.refuse:
            raise OSError("the network is down")
        if self.hold is not None:
            assert self.hold.wait(30)
        return super().put(source, name, link=link)


class Cluster:
    """Hosts with a disk of their own and one checkpoint."""

    def __init__(self, home: Path, every: int) -> None:
        self.home = home
        self.files = CountedFiles(home / "snapshots")
        self.snapshots = Snapshots(self.files)
        self.every = every
        self.done: list[Done] = []
        self.rows = 0

    def job(self, host: str) -> ShardJob:
        return ShardJob(
            query_id="q",
            shard=0,
            local_dir=self.home / host,
            operator=CountingOperator(),
            message_fields=KEY,
            changelog=open_changelog(str(self.home / "changelog")),
            snapshots=self.snapshots,
            snapshot_every=self.every,
        )

    def micro_batch(self, host: str, rows: int = 3, *, wait: bool = True) -> Done:
        pointer = self.done[-1].pointer if self.done else None
        first = self.rows
        records = [
            {"_stream": 0, "_partition": 0, "_offset": at, "_time": at, "_before": NO_TIME, "key": f"k{at % 7}"}
            for at in range(first, first + rows)
        ]
        table = pa.Table.from_pylist(records, pa.schema([*MESSAGE_FIELDS, *KEY]))
        after = {(0, 0): Position(first + rows, first + rows - 1, 1000)}
        done = run_attempt(self.job(host), pointer, len(self.done), lambda before: ShardInput(1000, table, after))
        self.done.append(done)
        self.rows += rows
        for thread in threading.enumerate():
            if wait and thread.name.startswith("rewind-"):
                thread.join(30)
        return done

    def counts(self, host: str) -> dict[bytes, bytes]:
        """Give the confirmed counts of a host's database."""
        generation = ShardDirectory(self.home / host, "q", 0).current()
        assert generation is not None
        with RocksStore.open(generation.database, create=False) as store:
            return dict(store.scan(bytes([Region.AGGREGATES]), bytes([Region.AGGREGATES + 1])))

    def expected(self) -> dict[bytes, bytes]:
        """Count by hand what was confirmed: all micro-batches but the last."""
        confirmed = self.rows - int(self.done[-1].metrics["rows"])
        found: dict[bytes, bytes] = {}
        for at in range(confirmed):
            key = bytes([Region.AGGREGATES]) + f"k{at % 7}".encode()
            found[key] = str(int(found.get(key, b"0")) + 1).encode()
        return found


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    memory = "/dev/shm"  # hundreds of small files, each synced: none of it is what is shown here
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as home:
        yield Cluster(Path(home), every=4)


@pytest.mark.slow
def test_a_shard_that_alternates_between_two_hosts_50_times(cluster: Cluster) -> None:
    staged = [cluster.micro_batch("a", rows=2000).metrics["staged_bytes"]]
    fetched: list[int] = []
    for version in range(1, 51):
        before = cluster.files.fetched
        host = "ab"[version % 2]
        done = cluster.micro_batch(host)
        staged.append(done.metrics["staged_bytes"])
        fetched.append(cluster.files.fetched - before)
        assert done.metrics["fetched_bytes"] == fetched[-1]
        assert cluster.counts(host) == cluster.expected()
    assert fetched[0] >= staged[0], "the first move brings everything"
    # the other host's last step: what it staged itself lies there, and nobody looks at the snapshots of every 4 commits
    assert fetched[1] == staged[1]
    assert fetched[2:] == staged[2:-1]
    whole = max(snapshot.length for snapshot in cluster.snapshots.manifests(0) if snapshot.full)
    assert whole > 10 * max(fetched[2:]), "moves cost what changed, not what there is"


def test_another_host_at_random(cluster: Cluster) -> None:
    chance = random.Random(7)
    for _ in range(20):
        host = chance.choice("abc")
        cluster.micro_batch(host)
        if len(cluster.done) > 1:
            assert cluster.counts(host) == cluster.expected()


def test_a_new_host_starts_from_the_newest_package(cluster: Cluster) -> None:
    for _ in range(7):
        cluster.micro_batch("a")
    full = [snapshot.commit.version for snapshot in cluster.snapshots.manifests(0) if snapshot.full]
    assert full == [0, 4]
    cluster.micro_batch("b")
    assert cluster.counts("b") == cluster.expected()


def test_an_upload_that_fails_does_not_fail_the_commit(cluster: Cluster) -> None:
    cluster.micro_batch("a")
    cluster.micro_batch("a")
    cluster.files.refuse = True
    last = cluster.micro_batch("a")
    assert last.metrics["uploaded_bytes"] == 0
    with pytest.raises(StateUnavailable):
        cluster.micro_batch("b")  # nothing leads there: the supervisor restores from the changelog
    cluster.files.refuse = False
    last = cluster.micro_batch("a")
    assert cluster.counts("a") == cluster.expected()
    assert last.metrics["uploaded_bytes"] > 0
    cluster.micro_batch("b")  # a whole snapshot was due at once
    assert cluster.counts("b") == cluster.expected()
    assert (cluster.files.uri, 0) not in {*uploads._gaps, *uploads._waiting}


def test_an_upload_that_hangs_does_not_hold_the_commits(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "STEP_WAIT_S", 0.01)
    cluster.micro_batch("a")
    cluster.files.hold = threading.Event()
    waiting = [cluster.micro_batch("a", wait=False) for _ in range(6)]
    assert [done.metrics["uploaded_bytes"] for done in waiting] == [0] * 6
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("rewind-step") == 1, "the commits after it do not wait behind it"
    assert names.count("rewind-upload") <= 1
    cluster.files.hold.set()
    cluster.files.hold = None
    monkeypatch.undo()
    cluster.micro_batch("a")
    cluster.micro_batch("a")
    cluster.micro_batch("b")
    assert cluster.counts("b") == cluster.expected()


def test_a_package_that_cannot_be_begun_does_not_fail_the_commit(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.micro_batch("a")

    def full(store: RocksStore, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RocksStore, "checkpoint", full)
    cluster.micro_batch("a")
    monkeypatch.undo()
    cluster.micro_batch("a")
    assert cluster.counts("a") == cluster.expected()
    for _ in range(3):
        cluster.micro_batch("a")
    assert [snapshot.commit.version for snapshot in cluster.snapshots.manifests(0) if snapshot.full] == [1, 4]


def test_copies_of_uploads_that_died_are_removed(cluster: Cluster) -> None:
    cluster.micro_batch("a")
    generation = ShardDirectory(cluster.home / "a", "q", 0).current()
    assert generation is not None
    dead, alive = generation.path / "upload-dead", generation.path / "upload-alive"
    for copy in (dead, alive):
        copy.mkdir()
        (copy / "000001.sst").write_bytes(b"kept by a hard link")
    lock = os.open(alive, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cluster.micro_batch("a")
        assert not dead.exists()
        assert alive.exists(), "another process uploads it"
    finally:
        os.close(lock)
    for _ in range(4):
        cluster.micro_batch("a")
    assert not list(generation.path.glob("upload-*"))


def test_the_copy_of_an_upload_that_runs_is_its_own(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever works on the shard next sweeps, in another process too: the lock is on the directory."""
    begun, done = threading.Event(), threading.Event()

    def publish(snapshots: Snapshots, record: CommitRecord, database: Path) -> None:
        begun.set()
        done.wait(30)

    monkeypatch.setattr(Snapshots, "publish", publish)
    cluster.micro_batch("a", wait=False)
    cluster.micro_batch("a", wait=False)  # its first commit becomes a snapshot
    assert begun.wait(30)
    generation = ShardDirectory(cluster.home / "a", "q", 0).current()
    assert generation is not None
    assert sweep(generation.path, "upload") == []
    assert len(list(generation.path.glob("upload-*"))) == 1
    done.set()
    [running] = [thread for thread in threading.enumerate() if thread.name == "rewind-upload"]
    running.join(30)
    assert not list(generation.path.glob("upload-*"))


def test_without_snapshots_a_shard_cannot_move(cluster: Cluster) -> None:
    cluster.micro_batch("a")
    job = replace(cluster.job("b"), snapshots=None, snapshot_every=None)
    with pytest.raises(StateUnavailable):
        run_attempt(job, cluster.done[-1].pointer, 1, lambda before: ShardInput(1000, None, before))


def test_a_damaged_step_is_done_without(cluster: Cluster) -> None:
    for _ in range(3):
        cluster.micro_batch("a")
    cluster.micro_batch("b")
    for _ in range(2):
        cluster.micro_batch("a")
    # b is stale and lacks the step of version 4, which is damaged; the snapshot of version 4 leads on
    step = f"0/{cluster.done[4].pointer.commit.name}.step.sst"
    data = bytearray(cluster.files.read(step))
    data[20] ^= 1
    (cluster.files.root / step).unlink()
    cluster.files.write(step, [bytes(data)])
    cluster.micro_batch("a")
    done = cluster.micro_batch("b")
    assert cluster.counts("b") == cluster.expected()
    tries = moves(done.metrics)
    assert [one.how for one in tries] == ["steps", "snapshot"]
    assert step in tries[0].failed
    assert not tries[1].failed
    assert tries[1].length > 0


def test_a_damaged_staged_file_is_fetched_before_anything_larger_is(cluster: Cluster) -> None:
    for _ in range(3):
        cluster.micro_batch("a")
    generation = ShardDirectory(cluster.home / "a", "q", 0).current()
    assert generation is not None
    mine = generation.staged(cluster.done[-1].pointer.commit)
    data = bytearray(mine.read_bytes())
    data[20] ^= 1
    mine.unlink()  # the snapshot's is a link to it
    mine.write_bytes(bytes(data))
    done = cluster.micro_batch("a")
    assert cluster.counts("a") == cluster.expected()
    tries = moves(done.metrics)
    assert [(one.how, bool(one.failed)) for one in tries] == [("steps", True), ("steps", False)]
    assert done.metrics["fetched_bytes"] == len(data)


def test_when_nothing_leads_there_the_error_says_what_was_tried(cluster: Cluster) -> None:
    for _ in range(3):
        cluster.micro_batch("a")
    step = f"0/{cluster.done[-1].pointer.commit.name}.step.sst"
    (cluster.files.root / step).unlink()
    with pytest.raises(StateUnavailable) as caught:
        cluster.micro_batch("b")
    assert caught.value.why.startswith("no local state; by snapshot: ")
    assert step in caught.value.why


def test_what_a_task_fetched_is_told_to_the_drivers_listeners(cluster: Cluster) -> None:
    class Heard(LoggingListener):
        def __init__(self) -> None:
            super().__init__()
            self.heard: list[tuple[str, ...]] = []

        def start(self, restoring: Restoring) -> None:
            self.heard.append(("start", restoring.how, restoring.why))

        def suspended(self, restoring: Restoring, why: str) -> None:
            self.heard.append(("suspended", restoring.how, why))

        def end(self, restoring: Restoring, records: int, length: int, seconds: float) -> None:
            self.heard.append(("end", restoring.how, str(length)))

    cluster.micro_batch("a")
    done = cluster.micro_batch("b")
    listener = Heard()
    carried = merge_metrics([json.dumps(done.metrics)])  # as a sink does
    relay(moves(carried), [listener])
    assert listener.heard == [
        ("start", "snapshot", "no local state"),
        ("end", "snapshot", str(done.metrics["fetched_bytes"])),
    ]
    assert moves(merge_metrics([json.dumps(cluster.micro_batch("b").metrics)])) == [], "what lies here is no move"


@pytest.mark.slow
def test_every_host_reclaims_what_bounds_hide_though_it_sees_every_other_commit_only(tmp_path, monkeypatch):
    reclaimed: dict[str, int] = {"a": 0, "b": 0}

    def counting(store, bounds):
        reclaimed["a" if "/a/" in str(store.path) else "b"] += 1
        return []

    monkeypatch.setattr("recovery.restore.open_shard.reclaim", counting)
    monkeypatch.setattr("recovery.restore.open_shard.SMALL_BYTES", 0)
    cluster = Cluster(tmp_path, every=1000)
    for version in range(4 * RECLAIM_EVERY):
        cluster.micro_batch("ab"[version % 2])
    assert min(reclaimed.values()) >= 3, reclaimed
