"""Which versions can be had, and the error that says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.batch import Position
from backend.errors import ChangelogDamaged, HistoryLost
from backend.store.protocol import Changes
from recovery.changelog import FileChangelog
from recovery.commit.pointer import Commit, CommitRecord, Pointer
from recovery.restore.all_shards import plan_restores
from recovery.restore.planner import Rebuild
from recovery.restore.probe import Unusable

WHOLE = {(0, 0): (0, 100)}


def lineage(changelog: FileChangelog, shard: int, versions: range, base_at: int) -> dict[int, Pointer]:
    """Log commits that each keep the ten newest messages: version v those of offsets [10 * v, 10 * v + 10)."""
    parent, pointers = None, {}
    for version in versions:
        commit = Commit(version, f"{shard}{version:031x}")
        record = CommitRecord(
            shard=shard,
            commit=commit,
            parent=parent,
            time_ms=0,
            positions=[(0, 0, Position(10 * version + 10, 0, 0))],
            bounds={},
            replay_from=[(0, 0, 10 * version)],
            message_count=10,
        )
        changelog.append(record, Changes([b"\x03k"], [str(version).encode()]))
        if version == base_at:
            changelog.append_base(record, [(b"\x03k", str(version).encode())])
        pointers[version] = Pointer(shard, commit, parent, 0, "", record.positions, {}, "")
        parent = commit
    return pointers


@pytest.fixture
def changelog(tmp_path: Path) -> FileChangelog:
    return FileChangelog(tmp_path / "changelog")


def test_a_version_that_was_pruned_names_those_that_were_not(changelog: FileChangelog) -> None:
    shards = {shard: lineage(changelog, shard, range(9), base_at=4 + shard) for shard in (0, 1)}
    for shard, pointers in shards.items():
        changelog.prune(shard, [pointers[7].commit])
    old = {shard: pointers[2] for shard, pointers in shards.items()}
    lost = {shard: Unusable("no local state") for shard in shards}
    with pytest.raises(HistoryLost) as caught:
        plan_restores(old, lost, changelog, WHOLE, "taken back")
    assert "micro-batch 2 is gone" in caught.value.what
    assert caught.value.why.endswith("versions to be had: 5, 6, 7, 8"), "shard 1 has nothing before 5"
    assert caught.value.command.startswith("put back the entries of commits/ and offsets/")
    good = {shard: pointers[5] for shard, pointers in shards.items()}
    assert set(plan_restores(good, lost, changelog, WHOLE, "taken back")) == {0, 1}


def test_a_source_that_has_aged_names_the_versions_that_it_still_has(changelog: FileChangelog) -> None:
    pointers = lineage(changelog, 0, range(6), base_at=0)
    lost = {0: Unusable("no local state")}
    with pytest.raises(HistoryLost, match="offsets from 10 wanted, the earliest is 35") as caught:
        plan_restores({0: pointers[1]}, lost, changelog, {(0, 0): (35, 100)}, "taken back")
    assert caught.value.why.endswith("versions to be had: 4, 5")
    with pytest.raises(HistoryLost) as caught:
        plan_restores({0: pointers[1]}, lost, changelog, {(0, 0): (99, 100)}, "taken back")
    assert "to be had" not in caught.value.why, "there are none"


def test_a_damaged_record_is_not_called_pruned(changelog: FileChangelog) -> None:
    pointers = lineage(changelog, 0, range(6), base_at=0)
    changelog.files.delete([f"0/{pointers[3].commit.name}.delta"])
    with pytest.raises(ChangelogDamaged):
        plan_restores({0: pointers[3]}, {0: Unusable("gone")}, changelog, WHOLE, "taken back")


def test_a_copy_at_the_pointer_that_is_damaged_is_no_copy(changelog: FileChangelog) -> None:
    """It is rebuilt from nothing, and what is gone of that is named before anything is read."""
    pointers = lineage(changelog, 0, range(6), base_at=0)
    damaged = {0: Unusable("a damaged block", changelog.read(0, pointers[5].commit).record)}
    chosen = plan_restores({0: pointers[5]}, damaged, changelog, WHOLE, "")[0]
    assert isinstance(chosen, Rebuild) and (chosen.ranges, chosen.why) == ({(0, 0): (50, 60)}, "a damaged block")
    with pytest.raises(HistoryLost, match="offsets from 50 wanted, the earliest is 55"):
        plan_restores({0: pointers[5]}, damaged, changelog, {(0, 0): (55, 100)}, "")
