"""Pruning: behind what Spark keeps, never what a kept commit needs, and a failure stops nothing."""

from __future__ import annotations

import errno
import random
import threading

import msgspec
import pyarrow as pa
import pytest

from backend.batch import MESSAGE_FIELDS
from backend.errors import ChangelogDamaged, ChangelogUnavailable
from backend.store.protocol import Changes
from backend.store.storage import storage_failed
from recovery.changelog import open_changelog
from recovery.changelog.message_log import MessageLog
from recovery.commit.pointer import Commit, CommitRecord
from recovery.files import LocalFiles
from recovery.queue.seals import Decision, read_seal, write_seal
from recovery.snapshots.publisher import Snapshots
from recovery.supervise import housekeeping
from recovery.supervise.housekeeping import APART_S, MARKS, Housekeeping


@pytest.fixture(autouse=True)
def by_commits(monkeypatch):
    monkeypatch.setattr(housekeeping, "APART_S", 0.0)


def record(version, parent):
    commit = Commit(version, f"{version:032x}")
    return CommitRecord(shard=0, commit=commit, parent=parent, time_ms=0, positions=[], bounds={})


def write(changelog, versions, base_at=None):
    parent, made = None, []
    for version in versions:
        one = record(version, parent)
        changelog.append(one, Changes([b"\x03k"], [str(version).encode()]))
        if version == base_at:
            changelog.append_base(one, [(b"\x03k", str(version).encode())])
        parent = one.commit
        made.append(parent)
    return made


def test_it_prunes_behind_the_versions_that_spark_keeps(tmp_path):
    changelog = open_changelog(str(tmp_path / "log"))
    made = write(changelog, range(40), base_at=20)
    keeper = Housekeeping(lambda: changelog, Snapshots(str(tmp_path / "snapshots")), keep_versions=10, every=5)
    for commit in made:
        keeper.made(0, commit)
    assert keeper.maintain(4) == []
    assert keeper.maintain(39)
    for commit in made[29:]:
        assert changelog.read(0, commit).values.to_pylist() == [str(commit.version).encode()]
    assert min(entry.commit.version for entry in changelog.entries(0)) == 20


def test_prunings_are_some_time_apart_unless_as_many_commits_as_spark_keeps_have_come(tmp_path, monkeypatch):
    monkeypatch.setattr(housekeeping, "APART_S", APART_S)
    now, pruned = [100.0], []
    keeper = Housekeeping(
        lambda: pruned.append(version), Snapshots(str(tmp_path)), keep_versions=10, every=5, clock=lambda: now[0]
    )
    for version in range(60):
        keeper.made(0, Commit(version, f"{version:032x}"))
        keeper.maintain(version)
        now[0] += 1.0 if version < 40 else 10.0
    assert pruned == [15, 25, 35, 42, 47, 52, 57]


def test_it_prunes_though_no_start_sees_as_many_commits_as_spark_keeps(tmp_path):
    changelog, place = open_changelog(str(tmp_path / "log")), str(tmp_path / "checkpoint")
    parent, made = None, []
    for start in range(10):
        keeper = Housekeeping(
            lambda: changelog,
            Snapshots(str(tmp_path / "snapshots")),
            keep_versions=10,
            every=3,
            checkpoint=place,
            committed=start * 7 - 1,
        )
        for version in range(start * 7, start * 7 + 7):
            one = record(version, parent)
            changelog.append(one, Changes([b"\x03k"], [str(version).encode()]))
            if version % 8 == 0:
                changelog.append_base(one, [(b"\x03k", str(version).encode())])
            parent = one.commit
            made.append(parent)
            keeper.made(0, parent)
            keeper.maintain(version)
        for commit in made[-11:]:
            assert changelog.read(0, commit).values.to_pylist() == [str(commit.version).encode()]
        assert len(changelog.entries(0)) < 40
    assert min(entry.commit.version for entry in changelog.entries(0)) >= 48


def test_a_shard_that_queues_at_a_start_keeps_what_was_noted_of_it(tmp_path):
    changelog, place = open_changelog(str(tmp_path / "log")), str(tmp_path / "checkpoint")

    def keeper(committed):
        return Housekeeping(
            lambda: changelog,
            Snapshots(str(tmp_path / "snapshots")),
            keep_versions=10,
            every=1,
            checkpoint=place,
            committed=committed,
        )

    before = keeper(-1)
    noted = [Commit(version, f"{version:032x}") for version in range(3)]
    for commit in noted:
        before.made(3, commit)
        before.maintain(commit.version)
    queueing = keeper(4)
    queueing.made(0, Commit(5, "b" * 32))
    queueing.maintain(5)
    assert keeper(5)._marks[3] == noted[1:]
    queueing.made(3, Commit(6, "c" * 32))  # adopted
    queueing.maintain(6)
    assert keeper(6)._marks[3] == [*noted[1:], Commit(6, "c" * 32)]
    keeper(1)  # rolled back to micro-batch 1; this start dies before it has pruned anything
    assert keeper(9)._marks[3] == [noted[1]]


def test_what_was_noted_of_a_history_that_was_rolled_back_is_forgotten(tmp_path):
    changelog, place = open_changelog(str(tmp_path / "log")), str(tmp_path / "checkpoint")

    def start(parent, versions):
        keeper = Housekeeping(
            lambda: changelog,
            Snapshots(str(tmp_path / "snapshots")),
            keep_versions=10,
            every=3,
            checkpoint=place,
            committed=versions.start - 1,
        )
        for version in versions:
            one = record(version, parent)
            one = msgspec.structs.replace(one, commit=Commit(version, one.commit.uuid[:-1] + str(versions.start % 10)))
            changelog.append(one, Changes([b"\x03k"], [str(version).encode()]))
            parent = one.commit
            keeper.made(0, parent)
            keeper.maintain(version)
            yield parent

    made = list(start(None, range(20)))
    again = made[:13]
    for low in range(13, 48, 7):  # Spark's checkpoint was put back to micro-batch 12
        again += start(again[-1], range(low, low + 7))
    for commit in again[-11:]:
        assert changelog.read(0, commit).values.to_pylist() == [str(commit.version).encode()]


def test_a_history_that_was_taken_back_frees_no_messages_however_late_a_shard_commits_again(tmp_path):
    """A shard that queues, or has no input, makes its first commit behind all that was noted of the old history."""
    changelog, place = open_changelog(str(tmp_path / "log")), str(tmp_path / "checkpoint")
    messages = MessageLog(str(tmp_path / "messages"), frozenset({0}))

    def start(parent, first, versions):
        keeper = Housekeeping(
            lambda: changelog,
            Snapshots(str(tmp_path / "snapshots")),
            keep_versions=10,
            every=3,
            checkpoint=place,
            message_log=messages,
            committed=parent.commit.version if parent else -1,
        )
        for version in range(first, versions.start):
            keeper.maintain(version)
        for version in versions:
            one = record(version, parent and parent.commit)
            one = msgspec.structs.replace(one, commit=Commit(version, one.commit.uuid[:-1] + str(first % 10)))
            columns = [[0], [0], [version << 32], [5], [1]]
            segments = messages.append(
                0, one.commit, parent.segments if parent else [], pa.table(columns, schema=pa.schema(MESSAGE_FIELDS))
            )
            parent = msgspec.structs.replace(one, segments=segments)
            changelog.append(parent, Changes([b"\x03k"], [str(version).encode()]))
            keeper.made(0, parent.commit)
            keeper.maintain(version)
            yield parent

    *_, back = list(start(None, 0, range(20)))[:13]
    for one in start(back, 13, range(25, 45)):
        assert messages.verify(one) == [], "every segment that the commit names is there"


def test_a_torn_note_of_what_was_committed_prunes_nothing_too_early(tmp_path):
    changelog, place = open_changelog(str(tmp_path / "log")), tmp_path / "checkpoint"
    (place / "rewind").mkdir(parents=True)
    for content in (b"", b"{", b'{"format": 9, "commits": {}}', b'{"format": 1, "commits": {"0": ["x"]}}'):
        (place / MARKS).write_bytes(content)
        keeper = Housekeeping(
            lambda: changelog,
            Snapshots(str(tmp_path / "snapshots")),
            keep_versions=2,
            every=1,
            checkpoint=str(place),
            committed=8,
        )
        keeper.made(0, Commit(9, "a" * 32))
        assert keeper.maintain(9) == []


def test_seals_that_spark_may_ask_for_stay_however_far_the_query_has_gone_meanwhile(tmp_path):
    changelog, place = open_changelog(str(tmp_path / "log")), str(tmp_path / "checkpoint")
    keeper = Housekeeping(
        lambda: changelog, Snapshots(str(tmp_path / "snapshots")), keep_versions=10, every=5, checkpoint=place
    )
    for commit in write(changelog, range(40), base_at=20):
        keeper.made(0, commit)
    for version in (28, 29, 39, 40, 41, 50):  # pruning takes its time, and the query goes on
        write_seal(place, version, 1, {3: Decision.QUEUED})
    keeper.maintain(39)
    left = [version for version in range(60) if read_seal(place, version)]
    assert left == [29, 39, 40, 41, 50]


def test_logged_messages_go_with_the_oldest_version_that_spark_keeps(tmp_path, monkeypatch):
    changelog, log = open_changelog(str(tmp_path / "log")), MessageLog(str(tmp_path / "messages"), frozenset({0}))
    keeper = Housekeeping(
        lambda: changelog, Snapshots(str(tmp_path / "snapshots")), keep_versions=10, every=5, message_log=log
    )
    parent, segments = None, []
    for version in range(14):
        one = record(version, parent)
        columns = [[0], [0], [version << 32], [5], [1]]
        # each commit keeps the messages of the newest three micro-batches
        segments = log.append(0, one.commit, segments[-2:], pa.table(columns, schema=pa.schema(MESSAGE_FIELDS)))
        one = msgspec.structs.replace(one, segments=segments)
        changelog.append(one, Changes([b"\x03k"], [b""]))
        keeper.made(0, one.commit)
        parent = one.commit
        if version == 3:
            changelog.append_base(one, [(b"\x03k", random.Random(0).randbytes(100_000))])
    read, bytes_of = [], LocalFiles.read
    monkeypatch.setattr(LocalFiles, "read", lambda *given: read.append(bytes_of(*given)) or read[-1])
    keeper.maintain(13)
    assert sum(map(len, read)) < 10_000, "not the state that the commit's record goes with"
    kept = sorted(int(path.name[:20]) for path in (tmp_path / "messages" / "0").iterdir())
    assert kept == list(range(1, 14)), "version 3 is the oldest that Spark keeps, and it needs 1, 2 and 3"


def test_nothing_is_pruned_while_spark_keeps_versions_from_before_this_start(tmp_path):
    changelog = open_changelog(str(tmp_path / "log"))
    made = write(changelog, range(40), base_at=35)
    keeper = Housekeeping(lambda: changelog, Snapshots(str(tmp_path / "snapshots")), keep_versions=10, every=5)
    for commit in made[35:]:
        keeper.made(0, commit)
    assert keeper.maintain(39) == []
    assert len(changelog.entries(0)) >= 40


def test_a_micro_batch_that_ran_again_replaces_its_commit(tmp_path):
    keeper = Housekeeping(lambda: None, Snapshots(str(tmp_path)), keep_versions=1, every=1)
    keeper.made(0, Commit(5, "a" * 32))
    keeper.made(0, Commit(5, "b" * 32))
    assert list(keeper._made[0]) == [Commit(5, "b" * 32)]


def test_a_failure_is_logged_and_stops_nothing(tmp_path, caplog):
    def broken():
        raise ChangelogDamaged("no")

    keeper = Housekeeping(broken, Snapshots(str(tmp_path)), keep_versions=1, every=1)
    for version in range(5):
        keeper.made(0, Commit(version, f"{version:032x}"))
    assert keeper.maintain(4) == []
    assert "pruning shard 0 failed" in caplog.text


def test_what_is_away_is_waited_for_once_not_once_a_shard(tmp_path):
    asked = []

    def away():
        asked.append(1)
        raise ChangelogUnavailable("the brokers do not answer")

    keeper = Housekeeping(away, Snapshots(str(tmp_path)), keep_versions=1, every=1)
    for shard in range(5):
        for version in range(5):
            keeper.made(shard, Commit(version, f"{version:032x}"))
    assert keeper.maintain(4) == []
    assert asked == [1]
    keeper.maintain(5)
    assert asked == [1, 1]


def test_a_file_that_its_disk_does_not_give_stops_the_pruning_of_no_other_shard(tmp_path):
    asked = []

    def unreadable():
        asked.append(1)
        raise storage_failed(OSError(errno.EIO, "Input/output error"), "0/x.delta")

    keeper = Housekeeping(unreadable, Snapshots(str(tmp_path)), keep_versions=1, every=1)
    for shard in range(5):
        for version in range(5):
            keeper.made(shard, Commit(version, f"{version:032x}"))
    assert keeper.maintain(4) == []
    assert len(asked) == 5


def test_commits_may_be_noted_while_it_prunes(tmp_path):
    """The thread that publishes and the supervisor's: one is in the middle of the commits when the other adds one."""
    keeper = Housekeeping(lambda: None, Snapshots(str(tmp_path)), keep_versions=2, every=1)
    begun, threads = threading.Event(), []

    class Looked(Commit, frozen=True):
        """A commit that is followed by another one while its version is asked for."""

        def __getattribute__(self, name):
            if name == "version" and begun.is_set() and not threads:
                threads.append(threading.Thread(target=keeper.made, args=(0, Commit(6, "6" * 32))))
                threads[0].start()
                threads[0].join(0.5)
            return super().__getattribute__(name)

    for commit in (Commit(3, "3" * 32), Commit(4, "4" * 32), Looked(5, "5" * 32)):
        keeper.made(0, commit)
    begun.set()
    keeper.maintain(5)
    threads[0].join()
    assert keeper.newest(6)[0] == Commit(6, "6" * 32)
