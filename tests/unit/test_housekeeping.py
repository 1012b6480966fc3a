"""Pruning: behind what Spark keeps, never what a kept commit needs, and a failure stops nothing."""

from __future__ import annotations

from backend.errors import ChangelogDamaged
from backend.store import Changes
from recovery.changelog import open_changelog
from recovery.housekeeping import Housekeeping
from recovery.package import Snapshots
from recovery.pointer import Commit, CommitRecord


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
    keeper = Housekeeping(lambda: changelog, Snapshots(str(tmp_path / "packages")), keep_versions=10, every=5)
    for commit in made:
        keeper.made(0, commit)
    assert keeper.maintain(4) == []
    assert keeper.maintain(39)
    for commit in made[29:]:
        assert changelog.read(0, commit).values.to_pylist() == [str(commit.version).encode()]
    assert min(entry.commit.version for entry in changelog.entries(0)) == 20


def test_nothing_is_pruned_while_spark_keeps_versions_from_before_this_start(tmp_path):
    changelog = open_changelog(str(tmp_path / "log"))
    made = write(changelog, range(40), base_at=35)
    keeper = Housekeeping(lambda: changelog, Snapshots(str(tmp_path / "packages")), keep_versions=10, every=5)
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
