"""A shard that moves between hosts: correct at every micro-batch, and a move costs what changed, not what there is."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from backend.batch import MESSAGE_FIELDS, NO_TIME, Position
from backend.errors import StateUnavailable
from backend.rocks import RocksStore
from backend.store import Region
from recovery.attempt import Done, ShardInput, ShardJob, run_attempt
from recovery.changelog import open_changelog
from recovery.files import LocalFiles
from recovery.package import Snapshots
from recovery.shard import ShardDirectory
from tests.support.counting import CountingOperator

KEY = (pa.field("key", pa.string()),)


class CountedFiles(LocalFiles):
    """A checkpoint's filesystem that counts what is fetched and can refuse what is uploaded."""

    fetched = 0
    refuse = False

    def get(self, name: str, target: Path, *, link: bool) -> None:
        super().get(name, target, link=False)  # another host: no links
        self.fetched += target.stat().st_size

    def put(self, source: Path, name: str, *, link: bool) -> int:
        if self.refuse:
            raise OSError("the network is down")
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
            packages=self.snapshots,
            snapshot_every=self.every,
        )

    def micro_batch(self, host: str, rows: int = 3) -> Done:
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
            if thread.name == "rewind-upload":
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
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    yield Cluster(tmp_path, every=4)


def test_a_shard_that_alternates_between_two_hosts(cluster: Cluster) -> None:
    cluster.micro_batch("a", rows=2000)
    fetched = []
    for version in range(1, 14):
        before = cluster.files.fetched
        host = "ab"[version % 2]
        cluster.micro_batch(host)
        fetched.append(cluster.files.fetched - before)
        assert cluster.counts(host) == cluster.expected()
    whole = fetched[0]  # the first move brings everything
    assert whole > 10 * max(fetched[1:]), "every later one brings two small steps"
    assert all(fetched[1:])


def test_another_host_at_random(cluster: Cluster) -> None:
    chance = random.Random(7)
    for _ in range(14):
        host = chance.choice("abc")
        cluster.micro_batch(host)
        if len(cluster.done) > 1:
            assert cluster.counts(host) == cluster.expected()


def test_a_new_host_starts_from_the_newest_package(cluster: Cluster) -> None:
    for _ in range(7):
        cluster.micro_batch("a")
    full = [package.commit.version for package in cluster.snapshots.packages(0) if package.full]
    assert full == [0, 4]
    cluster.micro_batch("b")
    assert cluster.counts("b") == cluster.expected()


def test_an_upload_that_fails_does_not_fail_the_commit(cluster: Cluster) -> None:
    cluster.micro_batch("a")
    cluster.micro_batch("a")
    cluster.files.refuse = True
    cluster.micro_batch("a")
    cluster.micro_batch("a")
    cluster.files.refuse = False
    last = cluster.micro_batch("a")
    assert cluster.counts("a") == cluster.expected()
    assert last.metrics["uploaded_bytes"] > 0
    with pytest.raises(StateUnavailable):
        cluster.micro_batch("b")  # the chain is broken: the supervisor restores from the changelog
    for _ in range(4):
        cluster.micro_batch("a")
    cluster.micro_batch("b")  # the next package mends it
    assert cluster.counts("b") == cluster.expected()


def test_without_snapshots_a_shard_cannot_move(cluster: Cluster) -> None:
    cluster.micro_batch("a")
    job = replace(cluster.job("b"), packages=None, snapshot_every=None)
    with pytest.raises(StateUnavailable):
        run_attempt(job, cluster.done[-1].pointer, 1, lambda before: ShardInput(1000, None, before))


def test_a_damaged_step_falls_down_the_ladder(cluster: Cluster) -> None:
    for _ in range(3):
        cluster.micro_batch("a")
    cluster.micro_batch("b")
    for _ in range(2):
        cluster.micro_batch("a")
    # b is stale and lacks the step of version 4, which is damaged; the package of version 4 leads on
    step = f"0/{cluster.done[4].pointer.commit.name}.step.sst"
    data = bytearray(cluster.files.read(step))
    data[20] ^= 1
    (cluster.files.root / step).unlink()
    cluster.files.write(step, [bytes(data)])
    cluster.micro_batch("a")
    cluster.micro_batch("b")
    assert cluster.counts("b") == cluster.expected()
