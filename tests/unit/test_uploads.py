"""Snapshots of shards that share a worker process: each comes to its turn, however many are due at once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from backend.rocks import RocksStore
from backend.store.protocol import Changes
from recovery.commit.pointer import COMMIT_KEY, Commit, CommitRecord, encode_record
from recovery.snapshots import uploads
from recovery.snapshots.publisher import Snapshots


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], bool]:
    """Give what asks for a shard's snapshot at a version, and waits until it is there; False when it is not begun."""
    monkeypatch.setattr(uploads, "_waiting", {})
    monkeypatch.setattr(uploads, "_gaps", {})
    snapshots = Snapshots(tmp_path / "snapshots")

    def asked(shard: int, version: int) -> bool:
        place = tmp_path / str(shard)
        row = CommitRecord(shard, Commit(version, f"{version:032x}"), None, 0, [], {})
        with RocksStore.open(place) as store:
            store.write(Changes([COMMIT_KEY], [encode_record(row)]))
            thread = uploads.begin_upload(snapshots, store, row, tmp_path)
            if thread is not None:
                thread.join()
        assert uploads.is_wanted(snapshots, shard) == (thread is None)
        return thread is not None

    return asked


def test_shards_that_are_due_at_once_take_turns(ask: Callable[[int, int], bool]) -> None:
    with uploads._busy:
        assert [ask(shard, 3) for shard in range(4)] == [False] * 4
    begun = []
    for version in range(4, 10):
        with ExitStack() as under_way:
            for shard in range(4):  # all of them due at each commit, always in this order
                if ask(shard, version):
                    begun.append(shard)
                    under_way.enter_context(uploads._busy)  # until the others have committed
    assert begun == [0, 1, 2, 3, 0, 1]


def test_a_shard_that_works_elsewhere_now_holds_nobody_up(ask: Callable[[int, int], bool]) -> None:
    with uploads._busy:
        assert not ask(0, 3)
        assert not ask(1, 3)
    assert not ask(1, 4), "shard 0 may come yet"
    assert ask(1, 5)


def test_a_shard_whose_snapshot_is_under_way_does_not_wait_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Callable[[int, int], bool]
) -> None:
    """A step of it is missing, so it asks at each commit until the snapshot is there."""
    place = str(tmp_path / "snapshots"), 0
    monkeypatch.setattr(uploads, "_under_way", {place})
    with RocksStore.open(tmp_path / "db") as store:
        row = CommitRecord(0, Commit(4, "4" * 32), None, 0, [], {})
        assert uploads.begin_upload(Snapshots(tmp_path / "snapshots"), store, row, tmp_path) is None
    assert not uploads._waiting
    monkeypatch.setattr(uploads, "_under_way", set())
    assert ask(0, 5)
    assert not uploads._under_way


def test_a_checkpoint_that_was_taken_back_does_not_wait_for_what_was_due_before(
    ask: Callable[[int, int], bool],
) -> None:
    with uploads._busy:
        assert not ask(3, 500)
    assert ask(0, 10)
