"""Snapshots of shards that share a worker process: each comes to its turn, however many are due at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from backend.rocks import RocksStore
from backend.store.protocol import Changes, Staged
from backend.store.staging import file_digest
from recovery.commit.pointer import COMMIT_KEY, MAX_ANCESTORS, Commit, CommitRecord, encode_record
from recovery.files import LocalFiles
from recovery.snapshots import uploads
from recovery.snapshots.publisher import Snapshots


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], bool]:
    """Give what asks for a shard's snapshot at a version, and waits until it is there; False when it is not begun."""
    monkeypatch.setattr(uploads, "_waiting", {})
    monkeypatch.setattr(uploads, "_gaps", {})
    monkeypatch.setattr(uploads, "_seen", set())
    snapshots = Snapshots(tmp_path / "snapshots")

    def asked(shard: int, version: int) -> bool:
        place = tmp_path / str(shard)
        row = CommitRecord(shard, Commit(version, f"{version:032x}"), None, 0, [], {})
        with RocksStore.open(place) as store:
            store.write(Changes([COMMIT_KEY], [encode_record(row)]))
            thread = uploads.begin_upload(snapshots, store, row, tmp_path)
            if thread is not None:
                thread.join()
        assert uploads.is_wanted(snapshots, row, 50, tmp_path) == (thread is None)
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


@pytest.fixture
def commit(tmp_path: Path, new_process: Callable[[], None]) -> Callable[[int, int], threading.Thread | None]:
    """Give what commits a version of a shard as a task does, whose parent is the version before; gives the upload."""
    snapshots = Snapshots(tmp_path / "snapshots")

    def committed(shard: int, version: int) -> threading.Thread | None:
        at = [Commit(one, f"{one:032x}") for one in range(version, -1, -1)]
        row = CommitRecord(shard, at[0], at[1] if version else None, 0, [], {}, ancestors=at[1 : MAX_ANCESTORS + 1])
        scratch = tmp_path / str(shard)
        scratch.mkdir(exist_ok=True)
        (scratch / "staged").write_bytes(b"step")
        snapshots.publish_step(row, Staged(scratch / "staged", *file_digest(scratch / "staged"), rows=1))
        with RocksStore.open(scratch / "db") as store:
            store.write(Changes([COMMIT_KEY], [encode_record(row)]))
            if uploads.is_due(row, 5) or uploads.is_wanted(snapshots, row, 5, scratch):
                return uploads.begin_upload(snapshots, store, row, scratch)
        return None

    return committed


@pytest.fixture
def new_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Give what forgets all that a worker process knows, as the next one does."""

    def forget() -> None:
        for name in ("_waiting", "_gaps", "_steps"):
            monkeypatch.setattr(uploads, name, {})
        for name in ("_under_way", "_seen", "_looking"):
            monkeypatch.setattr(uploads, name, set())
        monkeypatch.setattr(uploads, "_busy", threading.Semaphore(1))

    forget()
    return forget


def test_a_new_process_makes_the_snapshot_that_was_due_in_one_that_has_ended(
    commit: Callable[[int, int], threading.Thread | None], new_process: Callable[[], None]
) -> None:
    begun = []
    for version in range(8):
        if version > 5:
            new_process()
        for shard in range(2):
            with ExitStack() as under_way:
                if (shard, version) == (1, 5):
                    under_way.enter_context(uploads._busy)  # shard 1 gets no turn
                thread = commit(shard, version)
            if thread is not None:
                thread.join()
                begun.append((shard, version))
    assert begun == [(0, 0), (1, 0), (0, 5), (1, 6)]


def test_an_upload_whose_process_was_ended_is_begun_again_and_one_that_runs_elsewhere_is_not(
    commit: Callable[[int, int], threading.Thread | None],
    new_process: Callable[[], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = threading.Event()
    with monkeypatch.context() as never:
        never.setattr(Snapshots, "publish", lambda *_: ended.wait(30))
        running = commit(0, 0)
        assert running is not None
        new_process()
        assert commit(0, 1) is None, "its copy is locked: another process uploads it"
        ended.set()
        running.join()
    again = commit(0, 2)
    assert again is not None, "nothing came of it"
    again.join()
    new_process()
    assert commit(0, 3) is None
    next((tmp_path / "snapshots" / "0").glob(f"{3:020d}_*.step.json")).unlink()
    new_process()
    assert commit(0, 4) is not None, "no step leads to it"


def test_what_was_not_uploaded_or_begun_is_tried_at_the_next_commit(
    commit: Callable[[int, int], threading.Thread | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(RocksStore, "checkpoint", refuse)
        assert commit(0, 0) is None
    with monkeypatch.context() as full:
        full.setattr(Snapshots, "publish", refuse)
        failed = commit(0, 1)
        assert failed is not None
        failed.join()
    again = commit(0, 2)
    assert again is not None
    again.join()
    assert commit(0, 3) is None


def test_a_commit_does_not_wait_for_a_store_that_does_not_answer(
    commit: Callable[[int, int], threading.Thread | None],
    new_process: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with uploads._busy:
        assert commit(0, 0) is None
    new_process()
    answers, asked = threading.Event(), list[threading.Thread]()

    def hang(*_: object) -> bool:
        asked.append(threading.current_thread())
        answers.wait(30)
        return True

    with monkeypatch.context() as slow:
        slow.setattr(uploads, "LOOK_WAIT_S", 0.05)
        slow.setattr(Snapshots, "lack", hang)
        assert commit(0, 1) is None
        assert commit(0, 2) is None
        assert len(asked) == 1, "nobody asks twice at a time"
        answers.set()
        asked[0].join()
    thread = commit(0, 3)
    assert thread is not None
    thread.join()


def test_snapshots_that_cannot_be_listed_are_looked_at_with_the_next_commit(
    commit: Callable[[int, int], threading.Thread | None],
    new_process: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with uploads._busy:
        assert commit(0, 0) is None
    new_process()

    def refuse(*_: object, **__: object) -> None:
        raise OSError("the network is down")

    with monkeypatch.context() as down:
        down.setattr(LocalFiles, "list", refuse)
        assert commit(0, 1) is None
    thread = commit(0, 2)
    assert thread is not None
    thread.join()
