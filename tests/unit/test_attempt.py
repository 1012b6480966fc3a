"""The rules of the commit (stage, point, confirm), each with a test that fails when its rule is taken out.

The operator here counts by hand-checkable rules (`tests/support/counting.py`); "Spark commits" means that the pointer
of an attempt is handed to the next one, "Spark does not" that it is thrown away.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import threading
from contextlib import suppress
from dataclasses import replace

import pyarrow as pa
import pytest

from backend.batch import MESSAGE_FIELDS, NO_TIME, Position
from backend.errors import StateAhead, StateCorrupted, StateUnavailable, StoreLocked, UnknownFormat
from backend.rocks import RocksStore
from backend.store.memory import MemoryStore
from backend.store.protocol import LOGGED_FROM, Changes, Region, Staged, region_range
from backend.store.workspace import Workspace
from recovery.attempt import run_attempt
from recovery.changelog import open_changelog, rejected
from recovery.changelog.file import _GROWN, FileChangelog
from recovery.changelog.protocol import History
from recovery.changelog.records import Kind
from recovery.changelog.rejected import with_rows
from recovery.commit.pointer import Commit, CommitRecord, decode, encode, read_commit_row
from recovery.commit.shard_directory import ShardDirectory
from recovery.jobs import ShardJob, next_incarnation, planned_at
from recovery.operate import by_reason
from recovery.restore.build import accepting
from recovery.restore.open_shard import RECLAIM_EVERY, RECLAIM_SMALL_EVERY, SMALL_BYTES, OpenShard
from recovery.restore.probe import unusable
from recovery.restore.tries import moves
from recovery.share import ShardInput
from recovery.snapshots.publisher import Snapshots
from tests.support.counting import CountingOperator

KEY = (pa.field("key", pa.string()),)


@pytest.fixture
def job(tmp_path):
    return ShardJob(
        query_id="q",
        shard=0,
        local_dir=tmp_path / "local",
        operator=CountingOperator(),
        message_fields=KEY,
        changelog=open_changelog(str(tmp_path / "changelog")),
        lock_wait_s=0.2,
    )


def given(offsets, key="a", *, drain=False):
    """A micro-batch of messages of one partition, event time = offset."""
    rows = [{"_stream": 0, "_partition": 0, "_offset": o, "_time": o, "_before": NO_TIME, "key": key} for o in offsets]
    table = pa.Table.from_pylist(rows, pa.schema([*MESSAGE_FIELDS, *KEY]))
    after = {(0, 0): Position(max(offsets) + 1, max(offsets), 1000)} if offsets else {}
    return lambda before: ShardInput(1000, table if offsets else None, {**before, **after}, drain=drain)


def directory(job):
    return ShardDirectory(job.local_dir, job.query_id, job.shard)


def counted(done):
    return {row["key"]: row["count"] for row in done.outcome.results.to_pylist()}


def committed_state(job):
    """Everything in the current generation's database but the commit row, read without the product's attempt."""
    with RocksStore.open(directory(job).current().database, create=False) as store:
        return {k: v for k, v in store.scan(b"\x00", None) if k[0] != Region.COMMIT}


def test_an_attempt_that_spark_does_not_commit_leaves_no_trace(job):
    first = run_attempt(job, None, 0, given([0, 1]))
    lost = run_attempt(job, first.pointer, 1, given([2, 3, 4]))
    again = run_attempt(job, first.pointer, 1, given([2, 3, 4]))
    assert counted(lost) == counted(again) == {"a": 5}
    third = run_attempt(job, again.pointer, 2, given([5]))
    assert counted(third) == {"a": 6}
    assert third.outcome.message_count == 6


def test_the_retry_is_what_counts_also_when_it_got_other_rows(job):
    first = run_attempt(job, None, 0, given([0]))
    run_attempt(job, first.pointer, 1, given([1, 2, 3], key="lost"))
    kept = run_attempt(job, first.pointer, 1, given([1], key="kept"))
    run_attempt(job, kept.pointer, 2, given([2]))
    assert not [key for key in committed_state(job) if b"lost" in key]


def test_the_operator_is_told_the_messages_own_timestamps(job):
    told = []

    class Noting(CountingOperator):
        def process(self, batch, work):
            told.append(batch.timestamps)
            return super().process(batch, work)

    own = pa.chunked_array([[70, None]])
    job = replace(job, operator=Noting())
    first = run_attempt(job, None, 0, lambda before: replace(given([0, 1])(before), timestamps=own))
    run_attempt(job, first.pointer, 1, given([2]))
    assert told == [own, None]


def test_commit_ids_differ_between_attempts_of_the_same_micro_batch(job):
    one = run_attempt(job, None, 0, given([0])).pointer
    two = run_attempt(job, None, 0, given([0])).pointer
    assert one.commit.version == two.commit.version == 0
    assert one.commit.uuid != two.commit.uuid
    staged = directory(job).current().staged_commits()
    assert sorted(staged) == sorted([one.commit, two.commit])


def test_the_database_changes_only_when_the_next_attempt_confirms(job):
    first = run_attempt(job, None, 0, given([0]))
    assert committed_state(job) == {}
    run_attempt(job, first.pointer, 1, given([1]))
    assert committed_state(job)[bytes([Region.AGGREGATES]) + b"a"] == b"1"


def test_the_time_of_ingesting_the_parent_is_a_part_of_opening(job):
    first = run_attempt(job, None, 0, given([0]))
    second = run_attempt(job, first.pointer, 1, given([1]))
    again = run_attempt(job, first.pointer, 1, given([1]))  # the parent is in the database already
    assert first.metrics["ingest_ms"] == again.metrics["ingest_ms"] == 0
    assert 0 < second.metrics["ingest_ms"] < second.metrics["open_ms"]


def test_a_staged_file_is_ingested_on_its_parent_only(job):
    pointers = [None]
    for version in range(4):
        pointers.append(run_attempt(job, pointers[-1], version, given([version])).pointer)
    # the database is at commit 2; an old pointer names commit 0, whose staged file may still lie there
    before = committed_state(job)
    with pytest.raises(StateAhead):
        run_attempt(job, pointers[1], 1, given([9]))
    assert committed_state(job) == before
    # a pointer of another lineage, on the same parent version, is not ingested either
    foreign = replace_commit(pointers[4], parent_uuid="f" * 32)
    with pytest.raises(StateUnavailable):
        run_attempt(job, foreign, 4, given([4]))
    assert committed_state(job) == before


def replace_commit(pointer, *, parent_uuid):
    import msgspec

    return msgspec.structs.replace(pointer, parent=msgspec.structs.replace(pointer.parent, uuid=parent_uuid))


@pytest.mark.parametrize("damage", ["flip", "truncate", "gone"])
def test_a_damaged_staged_file_is_never_ingested(job, damage):
    first = run_attempt(job, None, 0, given([0])).pointer
    path = directory(job).current().staged(first.commit)
    data = path.read_bytes()
    if damage == "flip":
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    elif damage == "truncate":
        path.write_bytes(data[:-1])
    else:
        path.unlink()
    with pytest.raises(StateUnavailable):
        run_attempt(job, first, 1, given([1]))
    assert committed_state(job) == {}


def test_a_task_without_its_state_says_so_and_fetches_when_it_can(job, tmp_path):
    first = run_attempt(job, None, 0, given([0])).pointer
    second = run_attempt(job, first, 1, given([1])).pointer
    third = run_attempt(job, second, 2, given([2])).pointer
    del third
    elsewhere = replace(job, local_dir=tmp_path / "other host")
    with pytest.raises(StateUnavailable, match="no local state"):
        run_attempt(elsewhere, second, 2, given([2]))

    snapshots = Snapshots(str(tmp_path / "snapshots"))
    publish(job, snapshots, second)
    done = run_attempt(replace(elsewhere, snapshots=snapshots), second, 2, given([2]))
    assert counted(done) == {"a": 3}


def publish(job, snapshots, pointer):
    """Publish the current generation, brought to the pointer, as a snapshot."""
    opened = OpenShard(directory(job), "here").at(pointer)
    with opened.store as store:
        copy = job.local_dir / "copy"
        store.checkpoint(copy)
        snapshots.publish(opened.row, copy)


def test_a_package_of_another_commit_is_not_taken(job, tmp_path):
    first = run_attempt(job, None, 0, given([0])).pointer
    snapshots = Snapshots(str(tmp_path / "snapshots"))
    publish(job, snapshots, first)
    second = run_attempt(job, first, 1, given([1])).pointer
    with pytest.raises(StateUnavailable):
        run_attempt(replace(job, local_dir=tmp_path / "other", snapshots=snapshots), second, 2, given([2]))


def test_a_shard_that_moves_takes_a_package_and_the_steps_after_it(job, tmp_path):
    snapshots = Snapshots(str(tmp_path / "snapshots"))
    hosts = [replace(job, local_dir=tmp_path / name, snapshots=snapshots, snapshot_every=4) for name in ("one", "two")]
    pointer = None
    for version in range(13):
        pointer = run_attempt(hosts[version % 2], pointer, version, given([version])).pointer
        wait_for_uploads()
    done = run_attempt(hosts[1], pointer, 13, given([13]))
    assert counted(done) == {"a": 14}
    assert done.outcome.message_count == 14


def wait_for_uploads():
    for thread in threading.enumerate():
        if thread.name == "rewind-upload":
            thread.join(10)


def test_a_stale_copy_catches_up_from_where_it_is(job, tmp_path):
    snapshots = Snapshots(str(tmp_path / "snapshots"))
    one, two = (replace(job, local_dir=tmp_path / name, snapshots=snapshots, snapshot_every=100) for name in ("1", "2"))
    pointer = run_attempt(one, None, 0, given([0])).pointer
    pointer = run_attempt(one, pointer, 1, given([1])).pointer
    wait_for_uploads()
    pointer = run_attempt(two, pointer, 2, given([2])).pointer
    stale = directory(two).current().uuid
    for version in range(3, 7):
        pointer = run_attempt(one, pointer, version, given([version])).pointer
    done = run_attempt(two, pointer, 7, given([7]))
    assert counted(done) == {"a": 8}
    assert directory(two).current().uuid == stale


def test_a_damaged_step_is_done_without_and_never_gives_a_wrong_state(job, tmp_path):
    snapshots = Snapshots(str(tmp_path / "snapshots"))
    one, two = (replace(job, local_dir=tmp_path / name, snapshots=snapshots, snapshot_every=3) for name in ("1", "2"))
    pointer = None
    for version in range(6):
        pointer = run_attempt(one, pointer, version, given([version])).pointer
        wait_for_uploads()
    steps = sorted((tmp_path / "snapshots").rglob("*.sst"), key=lambda path: path.stat().st_mtime)
    for path in steps:
        path.unlink()
    with pytest.raises(StateUnavailable):
        run_attempt(two, pointer, 6, given([6]))
    assert counted(run_attempt(one, pointer, 6, given([6]))) == {"a": 7}


def test_a_zombie_with_the_old_generation_open_cannot_harm_the_new_one(job, tmp_path):
    first = run_attempt(job, None, 0, given([0])).pointer
    second = run_attempt(job, first, 1, given([1])).pointer
    old = directory(job).current()
    zombie = RocksStore.open(old.database, create=False)
    try:
        # the state is restored elsewhere and adopted while the zombie still has the old directory open
        snapshots = Snapshots(str(tmp_path / "snapshots"))
        copy = tmp_path / "copy"
        zombie.checkpoint(copy)
        with RocksStore.open(copy, create=False) as store:
            store.confirm(Staged(old.staged(second.commit), second.staged_length, second.staged_digest, 0))
            row = read_commit_row(store)
        snapshots.publish(row, copy)
        directory(job).condemn()
        done = run_attempt(replace(job, snapshots=snapshots), second, 2, given([2]))
        assert directory(job).current().uuid != old.uuid
        with suppress(StateCorrupted):  # its directory may be gone
            zombie.write(Changes([bytes([Region.AGGREGATES]) + b"a"], [b"666"]))
    finally:
        with suppress(StateCorrupted):
            zombie.close()
    after = run_attempt(job, done.pointer, 3, given([3]))
    assert counted(after) == {"a": 4}
    assert b"666" not in committed_state(job).values()


class _Expiring(CountingOperator):
    """Expires every message below event time 10 once it has seen one at or past it."""

    def process(self, batch, work):
        outcome = super().process(batch, work)
        if max(batch.messages["_time"].to_pylist(), default=0) >= 10:
            work.raise_bound(Region.MESSAGES, bytes([Region.MESSAGES]) + (10 + 2**63).to_bytes(8, "big"))
        return outcome


def stored_messages(job) -> list[int]:
    return [int.from_bytes(key[1:9], "big") - 2**63 for key in committed_state(job) if key[0] == Region.MESSAGES]


def test_the_bound_is_applied_at_open_whatever_died_before(job, monkeypatch):
    job = replace(job, operator=_Expiring())
    start = run_attempt(job, None, 0, given([1, 2])).pointer
    first = run_attempt(job, start, RECLAIM_SMALL_EVERY, given([12])).pointer
    # the attempt that confirms dies right after the ingest, before it could reclaim anything
    monkeypatch.setattr("recovery.restore.open_shard.reclaim_if_due", _die)
    with pytest.raises(RuntimeError, match="killed"):
        run_attempt(job, first, RECLAIM_SMALL_EVERY + 1, given([13]))
    monkeypatch.undo()
    assert stored_messages(job) == [1, 2, 12]
    run_attempt(job, first, RECLAIM_SMALL_EVERY + 1, given([13]))
    assert stored_messages(job) == [12]


@pytest.mark.parametrize(("small_bytes", "every"), [(0, RECLAIM_EVERY), (SMALL_BYTES, RECLAIM_SMALL_EVERY)])
def test_what_bounds_hide_is_reclaimed_once_in_so_many_commits(job, monkeypatch, small_bytes, every):
    monkeypatch.setattr("recovery.restore.open_shard.SMALL_BYTES", small_bytes)
    job = replace(job, operator=_Expiring())
    pointer = run_attempt(job, None, 0, given([1, 2])).pointer
    pointer = run_attempt(job, pointer, 1, given([12])).pointer
    for version in (2, every // 2, every):
        pointer = run_attempt(job, pointer, version, given([12 + version])).pointer
        assert stored_messages(job)[:3] == [1, 2, 12], "hidden, and still there"
    run_attempt(job, pointer, every + 1, given([every + 32]))
    assert stored_messages(job)[:2] == [12, 14]


class _Bases(FileChangelog):
    """Keeps the keys that each base is made of."""

    max_deltas = 2

    def append_base(self, record, rows):
        self.given = [key for key, _ in rows]
        return super().append_base(record, [])


def test_a_base_is_made_without_reading_messages(job, tmp_path):
    changelog = _Bases(str(tmp_path / "bases"))
    job = replace(job, changelog=changelog)
    pointer = None
    for version in range(4):
        pointer = run_attempt(job, pointer, version, given([version])).pointer
    assert changelog.given
    assert all(key[0] > Region.MESSAGE_INDEX for key in changelog.given)


def test_a_worker_that_goes_on_with_a_shard_lists_no_changelog_whoever_had_it_before(job, monkeypatch):
    files, listed = job.changelog.files, []
    monkeypatch.setattr(type(files), "list", lambda *_, **__: listed.append(1) or {})
    pointer = None
    for version in range(6):
        pointer = run_attempt(job, pointer, version, given([version])).pointer
        if version > 2:
            _GROWN[files.uri].clear()  # another process goes on
    assert not listed


def _die(*_):
    raise RuntimeError("killed")


def test_staged_files_are_deleted_only_behind_the_committed_pointer(job):
    pointers = [None]
    for version in range(6):
        pointers.append(run_attempt(job, pointers[-1], version, given([version])).pointer)
    kept = [commit.version for commit in directory(job).current().staged_commits()]
    # the newest attempt read pointer 4 with retain=2: versions <= 2 are gone, 3 and 4 are kept, 5 is newer
    assert kept == [3, 4, 5]
    # an attempt of an older micro-batch that comes late must not delete what is newer than its pointer
    generation = directory(job).current()
    directory(job).prune(generation, pointers[1].commit, retain=2)
    assert [commit.version for commit in generation.staged_commits()] == [3, 4, 5]


def test_links_of_an_attempt_that_died_while_ingesting_are_deleted_with_the_lock_held(job):
    pointer = run_attempt(job, None, 0, given([0])).pointer
    staged = directory(job).current().path / "staged"
    left = staged / f".{pointer.commit.name}.sst.{'0' * 32}"
    left.hardlink_to(staged / f"{pointer.commit.name}.sst")
    foreign = staged / "notes.sst"
    foreign.touch()
    run_attempt(job, pointer, 1, given([1]))
    assert not left.exists()
    assert foreign.exists()
    assert (staged / f"{pointer.commit.name}.sst").exists()


def test_drafts_of_a_process_that_died_while_it_adopted_are_removed_by_the_next(job, monkeypatch):
    here = directory(job)
    with here.lock():
        before = here.new_generation()
        with monkeypatch.context() as patch:
            patch.setattr(pathlib.Path, "replace", lambda *_: os._exit(9))
            child = os.fork()
            if child == 0:
                here.adopt(before)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        (draft,) = here.path.glob("CURRENT?*")
        assert here.current() is None, "a draft counts for nothing"
        here.adopt(here.new_generation())
        assert not draft.exists()
        assert sorted(path.name for path in here.path.iterdir() if path.is_file()) == ["CURRENT", "LOCK"]


def test_what_attempts_left_that_died_while_they_fetched_is_removed_and_what_was_put_aside_stays(job, tmp_path):
    """A snapshot that is fetched again and again, each time killed, must not fill the disk."""
    here, snapshots = directory(job), Snapshots(str(tmp_path / "snapshots"))
    job = replace(job, snapshots=snapshots, snapshot_every=100)
    pointer = run_attempt(job, None, 0, given([0])).pointer
    pointer = run_attempt(job, pointer, 1, given([1])).pointer  # begins the upload of the first commit
    wait_for_uploads()
    damaged = here.current()
    here.condemn()
    sound = Snapshots.fetch_step
    for _ in range(3):
        child = os.fork()
        if child == 0:
            Snapshots.fetch_step = lambda *_: os._exit(9)
            run_attempt(job, pointer, 2, given([2]))
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert Snapshots.fetch_step is sound
    left = {path.name for path in here.path.iterdir() if path.is_dir()}
    assert damaged.uuid in left, "for inspection"
    assert len(left) == 2, "and what the last one that died has left"
    done = run_attempt(job, pointer, 2, given([2]))
    assert counted(done) == {"a": 3}
    assert {path.name for path in here.path.iterdir()} == {"CURRENT", "LOCK", here.current().uuid}


def test_a_state_newer_than_the_pointer_is_left_alone(job):
    first = run_attempt(job, None, 0, given([0])).pointer
    second = run_attempt(job, first, 1, given([1])).pointer
    run_attempt(job, second, 2, given([2]))
    before, generation = committed_state(job), directory(job).current().uuid
    for pointer, version in ((first, 1), (None, 0)):
        with pytest.raises(StateAhead, match="zombie"):
            run_attempt(job, pointer, version, given([7]))
    assert committed_state(job) == before
    assert directory(job).current().uuid == generation


def test_a_damaged_database_is_put_aside_and_named(job):
    first = run_attempt(job, None, 0, given([0])).pointer
    run_attempt(job, first, 1, given([1]))
    current = directory(job).current().database / "CURRENT"
    current.write_bytes(b"nonsense")
    with pytest.raises((StateUnavailable, StateCorrupted)):
        run_attempt(job, first, 1, given([1]))


def test_two_attempts_at_once_wait_for_each_other_within_a_bound(job):
    with directory(job).lock(1), pytest.raises(StoreLocked, match="pid"):
        run_attempt(job, None, 0, given([0]))


def test_the_commit_row_tells_the_lineage(job):
    pointers = [None]
    for version in range(3):
        pointers.append(run_attempt(job, pointers[-1], version, given([version])).pointer)
    with RocksStore.open(directory(job).current().database, create=False) as store:
        row = read_commit_row(store)
    assert row.commit == pointers[2].commit
    assert row.parent == pointers[1].commit
    assert row.ancestors == [pointers[1].commit]
    assert row.replay_from == [(0, 0, 0)]
    assert row.positions == [(0, 0, Position(2, 1, 1000))]


def test_the_changelog_has_the_same_state_without_the_messages(job):
    first = run_attempt(job, None, 0, given([0, 1])).pointer
    second = run_attempt(job, first, 1, given([2], key="b")).pointer
    run_attempt(job, second, 2, given([3]))
    history = job.changelog.read(0, second.commit)
    logged = dict(zip(history.keys.to_pylist(), history.values.to_pylist(), strict=True))
    assert logged == {k: v for k, v in committed_state(job).items() if k[0] != Region.MESSAGES}


def test_a_rejected_offset_is_carried_on_while_a_replay_would_meet_it(job):
    def refuse(before):
        return replace(given([0, 2])(before), in_future=((0, 0, 1),))

    first = run_attempt(job, None, 0, refuse).pointer
    second = run_attempt(job, first, 1, given([3])).pointer
    assert job.changelog.read(0, first.commit).record.rejected == [(0, 0, 1)]
    assert job.changelog.read(0, second.commit).record.rejected == [(0, 0, 1)]


def test_what_was_rejected_is_written_once_however_much_it_comes_to(job):
    """A clock that is wrong for months must not make each commit larger, and a replay still leaves out all of it."""
    pointer, lengths, wrong = None, list[float](), list[int]()
    for version in range(60):
        begin = 200 * version
        ahead = list(range(begin + 1, begin + 200, 2))
        wrong += ahead

        def read(before, own=begin, ahead=ahead):
            return replace(given([own, own + 198])(before), in_future=tuple((0, 0, offset) for offset in ahead))

        done = run_attempt(job, pointer, version, read)
        pointer = done.pointer
        lengths.append(done.metrics["logged_bytes"])
    history = job.changelog.read(0, pointer.commit)
    assert len(history.record.rejected) <= rejected.MOST
    assert with_rows(history).rejected == [(0, 0, offset) for offset in wrong]
    assert max(lengths[20:]) < 1.5 * max(lengths[:20]), "the first ones were as long"
    offsets = pa.array(range(0, 12_000))
    nothing = pa.array([0] * 12_000)
    table = pa.table({"_stream": nothing, "_partition": nothing, "_offset": offsets})
    assert accepting(with_rows(history))(table)["_offset"].to_pylist() == [*range(0, 11_999, 2)]


def test_rows_of_rejected_offsets_go_when_no_replay_reaches_them(monkeypatch):
    monkeypatch.setattr(rejected, "MOST", 2)
    work, from_zero = Workspace(MemoryStore()), {(0, 0): 0, (1, 5): 0}
    named = [(0, 0, 2), (0, 0, 70_000), (0, 0, 3), (1, 5, 9)]
    assert rejected.carry(work, named, [], from_zero, 1) == []
    assert rejected.carry(work, [(0, 0, 70_001), (1, 5, 10), (0, 0, 70_002)], [(1, 5, 10)], from_zero, 2) == [
        (0, 0, 70_001), (0, 0, 70_002), (1, 5, 10),
    ], "two are not too many; what the operator gives comes again by itself"  # fmt: skip
    later = {(0, 0): 70_001}
    assert rejected.carry(work, [(0, 0, 70_001), (0, 0, 70_004), (0, 0, 70_002)], [], later, 3) == []
    rows = work.scan_arrays(*region_range(Region.REJECTED))
    columns = [pa.array(column, pa.large_binary()) for column in rows]
    record = CommitRecord(0, Commit(3, "0" * 32), None, 0, [], {}, rejected=[(0, 0, 70_009)])
    found = with_rows(History(record, *columns)).rejected
    assert found == [(0, 0, 70_001), (0, 0, 70_002), (0, 0, 70_004), (0, 0, 70_009)]
    columns[1] = pa.array([b"\x07" + value[1:] for value in rows[1]], pa.large_binary())
    with pytest.raises(UnknownFormat, match="format 07"):
        with_rows(History(record, *columns))


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.string()), pa.map_(pa.string(), pa.int64()), pa.timestamp("us"), pa.int8()]
)
@pytest.mark.parametrize("rows", [0, 2])
def test_reasons_of_a_user_s_own_may_be_of_any_type(kind, rows):
    assert by_reason("results", pa.table({"reason": pa.nulls(rows, kind)})) == ({"results_other": 2} if rows else {})
    texts = pa.array(["late", "mine", None][:rows], pa.string())
    assert by_reason("results", pa.table({"reason": texts})) == (
        {"results_late": 1, "results_other": 1} if rows else {}
    )


def test_the_pointer_is_small_and_comes_back_equal(job):
    pointer = run_attempt(job, None, 0, given([0])).pointer
    data = encode(pointer)
    assert len(data) < 500
    assert decode(data) == pointer


def test_an_unknown_generation_file_is_refused(job):
    run_attempt(job, None, 0, given([0]))
    current = directory(job).path / "CURRENT"
    current.write_text(json.dumps({"format": 1, "generation": "../../../etc"}))
    with pytest.raises(StateCorrupted):
        directory(job).current()


def ahead_of(job, snapshots):
    """Run four micro-batches; give the pointers."""
    pointers = [None]
    for version in range(4):
        pointers.append(run_attempt(replace(job, snapshots=snapshots), pointers[-1], version, given([version])).pointer)
    return pointers[1:]


def test_a_later_start_of_the_query_goes_back_with_spark(job, tmp_path):
    snapshots = Snapshots(str(tmp_path / "snapshots"))
    first = replace(job, incarnation=1, snapshot_every=2)
    pointers = ahead_of(first, snapshots)
    for other in (first, replace(first, incarnation=0)):  # a zombie of this start, or of an earlier one
        with pytest.raises(StateAhead):
            run_attempt(replace(other, snapshots=snapshots), pointers[0], 1, given([1]))
    later = replace(first, incarnation=2)
    with pytest.raises(StateUnavailable, match="rolled back"):
        run_attempt(later, pointers[0], 1, given([1]))  # nothing leads there but changelog and source
    done = run_attempt(replace(later, snapshots=snapshots), pointers[0], 1, given([1]))
    assert counted(done) == {"a": 2}
    assert [(one.how, one.failed) for one in moves(done.metrics)] == [("snapshot", "")]
    again = run_attempt(replace(later, snapshots=snapshots), done.pointer, 2, given([2]))
    assert counted(again) == {"a": 3}


def test_a_later_start_begins_anew_when_spark_went_back_to_nothing(job, tmp_path):
    ahead_of(replace(job, incarnation=1), None)
    done = run_attempt(replace(job, incarnation=2), None, 0, given([0]))
    assert counted(done) == {"a": 1}


def test_starts_are_counted(tmp_path):
    checkpoint = str(tmp_path / "checkpoint")
    stored = tmp_path / "checkpoint" / "rewind" / "launches.json"
    assert [next_incarnation(checkpoint, planned) for planned in (-1, 5, 9)] == [1, 2, 3]
    assert planned_at(checkpoint) == [(1, -1), (2, 5), (3, 9)]
    assert next_incarnation(checkpoint, 5) == 4
    assert planned_at(checkpoint) == [(1, -1), (4, 5)], "the second and the third say nothing that the fourth does not"
    for planned in range(10, 200):
        next_incarnation(checkpoint, planned)
    assert planned_at(checkpoint) == [(planned - 5, planned) for planned in range(100, 200)]
    stored.write_text('{"format": 1, "launch": 7}')  # of release 0.1
    assert (planned_at(checkpoint), next_incarnation(checkpoint, 3)) == ([], 8)
    for damaged in ("{", "[]", '{"format": 1, "launch": 7, "planned": [1]}'):
        stored.write_text(damaged)
        assert (planned_at(checkpoint), next_incarnation(checkpoint, 3)) == ([], 1)


def test_a_probe_puts_aside_what_is_ahead_and_takes_packages(job, tmp_path):
    snapshots = Snapshots(str(tmp_path / "snapshots"))
    with_snapshots = replace(job, snapshots=snapshots, snapshot_every=2)
    pointers = ahead_of(with_snapshots, snapshots)
    assert "the local database is ahead" in str(unusable(job, pointers[0]))
    pointers = ahead_of(replace(with_snapshots, local_dir=tmp_path / "other"), snapshots)
    assert unusable(replace(with_snapshots, local_dir=tmp_path / "other"), pointers[0]) is None


def test_a_changelog_that_lost_its_records_gets_a_base_at_the_first_commit_of_the_next_start(job, tmp_path):
    pointer = None
    for version in range(3):
        pointer = run_attempt(job, pointer, version, given([version])).pointer
    shutil.rmtree(tmp_path / "changelog" / "0")
    done = run_attempt(replace(job, incarnation=1), pointer, 3, given([3]))
    assert "missing" in done.metrics["changelog_lost"]
    assert [entry.kind for entry in job.changelog.entries(0)] == [Kind.BASE, Kind.DELTA]
    restored = job.changelog.read(0, done.pointer.commit)
    logged = {k: v for k, v in committed_state(job).items() if k[0] >= LOGGED_FROM}
    assert logged, "the state has rows that are logged"
    assert restored.record.commit == done.pointer.commit
    assert job.changelog.read(0, pointer.commit).rows == len(logged)
    again = run_attempt(replace(job, incarnation=1), done.pointer, 4, given([4]))
    assert "changelog_lost" not in again.metrics, "said and mended once"


def test_a_running_query_notices_a_changelog_that_lost_its_records_within_eight_commits(job, tmp_path):
    pointer, lost = None, []
    for version in range(20):
        if version == 10:
            shutil.rmtree(tmp_path / "changelog" / "0")
        done = run_attempt(job, pointer, version, given([version]))
        pointer = done.pointer
        lost += [version] * ("changelog_lost" in done.metrics)
    assert lost == [16], "the commit after the fifteenth looks"
    assert job.changelog.read(0, pointer.commit).record.commit == pointer.commit
