"""The rules of the queue, each with a test that fails when its rule is taken out; counts are checked by hand."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import threading
import uuid
import weakref
from base64 import b64decode
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import MagicMock

import fsspec
import msgspec
import pyarrow as pa
import pytest
from pyspark import cloudpickle

from backend import foreach_sink, kafka_sink, parquet_sink, sql_sink
from backend.batch import MESSAGE_FIELDS, NO_TIME, MicroBatch, Outcome, Position
from backend.errors import (
    BrokerUnavailable,
    ChangelogUnavailable,
    CheckpointTaken,
    ControlDamaged,
    HistoryLost,
    RestoreFailed,
    RestoreMismatch,
    RewindError,
    StateAhead,
    StateCorrupted,
    StateUnavailable,
    StorageFailed,
    StoreLocked,
    UserCodeFailed,
)
from backend.rocks import RocksStore
from backend.sinks.sealing import unsealed
from backend.sinks.tables import ERRORS, RESULTS, read_frames
from backend.sources.spark_offsets import positions_in
from backend.spark import queueing
from backend.spark.control import ControlReader, ask_to_adopt, ask_to_drain
from backend.spark.queueing import incarnation_of, queue_limit, seal
from backend.store.storage import storage_failed
from backend.windows.combined_rows import is_combined
from recovery import attempt
from recovery.attempt import run_attempt
from recovery.changelog import open_changelog
from recovery.changelog.message_log import MessageLog
from recovery.changelog.records import Kind
from recovery.commit.lease import take
from recovery.commit.option_sets import ByVersion
from recovery.commit.pointer import At, Commit, Pointer, RestoringPointer, decode, encode, read_commit_row
from recovery.commit.shard_directory import ShardDirectory
from recovery.files import LocalFiles, open_files
from recovery.jobs import Incarnation, ShardJob
from recovery.queue import entries, seals
from recovery.queue.entries import Link, Queue, entries_behind, read_queue
from recovery.queue.seals import Decision
from recovery.restore import all_shards, replay
from recovery.restore.all_shards import Restores, restore_beside, restore_shards
from recovery.restore.build import restore_shard
from recovery.restore.open_shard import OpenShard
from recovery.restore.planner import Local, Missing, Rebuild, Remote, plan
from recovery.restore.replay import slices
from recovery.share import ShardInput
from recovery.snapshots.manifest import PackedFile, Snapshot
from recovery.snapshots.publisher import Snapshots
from recovery.supervise.beside import ASKED_FOR, MAX_REFUSED, MAX_TRIES, RETRY_S, Beside
from recovery.supervise.housekeeping import Housekeeping
from recovery.supervise.patience import MAX_RESTORES
from tests.support.counting import CountingOperator
from tests.support.packed import pack
from tests.unit.test_combining import assembled, rows, spec

KEY = (pa.field("key", pa.string()),)
COMMIT = Commit(4, "a" * 32)


@pytest.fixture
def job(tmp_path: Path) -> ShardJob:
    return job_in(tmp_path)


def job_in(tmp_path: Path) -> ShardJob:
    return ShardJob(
        query_id="q",
        shard=0,
        local_dir=tmp_path / "local",
        operator=CountingOperator(),
        message_fields=KEY,
        changelog=open_changelog(str(tmp_path / "changelog")),
        snapshots=Snapshots(str(tmp_path / "snapshots")),
        lock_wait_s=0.1,
        queue=Queue(open_files(tmp_path / "queue"), ByVersion.always(CountingOperator()), begins=True),
    )


def given(offsets: list[int], time_ms: int = 1_000, **more: Any) -> Any:
    """Messages of one source partition and one key, event time = offset."""
    row = {"_stream": 0, "_partition": 0, "_before": NO_TIME, "key": "a"}
    rows = [{**row, "_offset": o, "_time": o} for o in offsets]
    table = pa.Table.from_pylist(rows, pa.schema([*MESSAGE_FIELDS, *KEY])) if offsets else None
    after = {(0, 0): Position(max(offsets) + 1, max(offsets), time_ms)} if offsets else {}
    return lambda before: ShardInput(time_ms, table, {**before, **after}, **more)


def directory(job: ShardJob) -> ShardDirectory:
    return ShardDirectory(job.local_dir, job.query_id, job.shard)


def take_disk(job: ShardJob) -> None:
    shutil.rmtree(job.local_dir)


def restore(job: ShardJob, pointer: Pointer, offsets: list[int]) -> None:
    """Publish the state as of a pointer, as a restore beside the query does: built elsewhere, out of all messages."""
    history = job.changelog.read(job.shard, pointer.commit)
    messages = given(offsets)({}).messages
    scratch = job.local_dir.parent / f"scratch-{pointer.commit.name}"
    scratch.mkdir()
    restore_shard(history, [job.operator.replay_rows(messages)], job.operator, scratch / "db")
    assert job.snapshots is not None
    with RocksStore.open(scratch / "db", create=False) as store:
        store.checkpoint(scratch / "copy")
    job.snapshots.publish(history.record, scratch / "copy")
    shutil.rmtree(scratch)


def counts(done: Any) -> list[tuple[int, int]]:
    """(version, running count) of each micro-batch that an attempt ran."""
    return [(one.version, one.outcome.results.to_pylist()[0]["count"]) for one in done.ran]


def queued_twice(job: ShardJob) -> tuple[Pointer, RestoringPointer]:
    """Commit offsets 0 and 1, lose the disk, queue offset 2, then 3 and 4."""
    first = run_attempt(job, None, 0, given([0, 1])).pointer
    take_disk(job)
    second = run_attempt(job, first, 1, given([2], 2_000)).pointer
    third = run_attempt(job, second, 2, given([3, 4], 3_000)).pointer
    assert isinstance(third, RestoringPointer)
    return first, third


# -- a shard queues, and adopts -------------------------------------------------------------------------------------


def test_a_shard_without_its_state_queues_and_adopts_once_it_is_asked(job: ShardJob) -> None:
    first, third = queued_twice(job)
    assert (third.since, third.queued, third.positions) == (first, 2, [(0, 0, Position(5, 4, 3_000))])
    restore(job, first, [0, 1])
    done = run_attempt(job, third, 3, given([5], 4_000, adopt=first.commit.name))
    assert counts(done) == [(1, 3), (2, 5), (3, 6)]  # each with its own version; offsets 0 to 5 counted once
    assert type(done.pointer) is Pointer
    assert done.metrics["decision"] == "adopted"
    again = run_attempt(job, done.pointer, 4, given([6], 5_000))
    assert counts(again) == [(4, 7)]


def test_what_lies_in_a_queue_is_listed_by_version_until_it_is_adopted(job: ShardJob) -> None:
    _, third = queued_twice(job)
    assert job.queue is not None
    found = entries_behind(job.queue.files, 0, 0)
    assert list(found) == [1, 2]
    assert sum(found.values()) == third.queued_bytes
    assert list(entries_behind(job.queue.files, 0, 1)) == [2]
    assert entries_behind(job.queue.files, 0, 3) == entries_behind(job.queue.files, 1, 0) == {}


def test_what_is_queued_says_nothing_and_has_no_state(job: ShardJob) -> None:
    first = run_attempt(job, None, 0, given([0])).pointer
    take_disk(job)
    done = run_attempt(job, first, 1, given([1], 2_000))
    assert done.ran == []
    assert decode(b64decode(done.metrics["since"])) == first  # type: ignore[arg-type]
    assert not job.local_dir.exists() or directory(job).current() is None
    assert [entry.commit for entry in job.changelog.entries(0)] == [first.commit]


# -- rule 1: sealed decisions ---------------------------------------------------------------------------------------


def sealed(job: ShardJob, version: int, decision: Decision | None) -> ShardJob:
    assert job.queue is not None
    return replace(job, queue=replace(job.queue, planned=version, sealed={0: decision} if decision else {}))


def test_a_micro_batch_that_may_be_out_with_its_results_is_not_queued(job: ShardJob) -> None:
    first = run_attempt(job, None, 0, given([0])).pointer
    take_disk(job)
    with pytest.raises(StateUnavailable, match="is not here"):
        run_attempt(sealed(job, 1, None), first, 1, given([1]))
    assert run_attempt(sealed(job, 0, None), first, 1, given([1])).ran == []


def test_what_queued_queues_again_where_the_state_is_whole(job: ShardJob) -> None:
    first = run_attempt(job, None, 0, given([0])).pointer
    assert run_attempt(sealed(job, 1, Decision.QUEUED), first, 1, given([1])).ran == []


def test_what_queued_does_not_adopt_when_it_runs_again(job: ShardJob) -> None:
    first, third = queued_twice(job)
    restore(job, first, [0, 1])
    again = sealed(job, 3, Decision.QUEUED)
    assert run_attempt(again, third, 3, given([5], adopt=first.commit.name)).ran == []


def test_what_adopted_never_queues(job: ShardJob) -> None:
    first, third = queued_twice(job)
    with pytest.raises(StateUnavailable):
        run_attempt(sealed(job, 3, Decision.ADOPTED), third, 3, given([5], adopt=first.commit.name))


def test_a_seal_is_read_back_the_newest_start_s_counts(tmp_path: Path) -> None:
    place = str(tmp_path)
    assert seals.read_seal(place, 7) == {}
    rows = [
        {"shard": 0, "metrics": None},
        {"shard": 0, "metrics": '{"decision": "queued"}'},
        {"shard": 1, "metrics": "{}"},
    ]
    seals.write_seal(place, 7, 9, seals.decisions_in(rows))
    seals.write_seal(place, 7, 10, {1: Decision.ADOPTED})
    assert seals.read_seal(place, 7) == {1: Decision.ADOPTED}
    seals.write_seal(place, 7, 8, {0: Decision.QUEUED})  # a driver that was replaced
    assert seals.read_seal(place, 7) == {1: Decision.ADOPTED}
    seals.write_seal(place, 8, 9, {0: Decision.QUEUED})
    seals.write_seal(place, 8, 10, {})
    assert seals.read_seal(place, 8) == {}
    assert sorted(path.name for path in (tmp_path / seals.DIRECTORY).iterdir()) == [
        *("7-10.json", "7-8.json", "7-9.json", "8-10.json", "8-9.json")
    ]
    (tmp_path / seals.DIRECTORY / "7-10.json").write_text('{"format": 2, "shards": {}}')
    with pytest.raises(ControlDamaged, match="format 2"):
        seals.read_seal(place, 7)


def test_seals_and_entries_are_durable_under_their_names_when_they_count(
    tmp_path: Path, job: ShardJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that loses its power keeps what was synced: the file, and the folder once the file has its name."""
    synced: list[str] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        path = Path(f"/proc/self/fd/{handle}").readlink()
        synced.append(f"{path.name}: {sorted(one.name for one in path.iterdir())}" if path.is_dir() else "a file")
        real(handle)

    first = run_attempt(job, None, 0, given([0, 1])).pointer
    take_disk(job)
    monkeypatch.setattr(os, "fsync", fsync)
    seals.write_seal(str(tmp_path / "sealed"), 7, 9, {0: Decision.QUEUED})
    assert synced[-2:] == ["a file", "seals: ['7-9.json']"]
    synced.clear()
    pointer = run_attempt(job, first, 1, given([2])).pointer
    assert isinstance(pointer, RestoringPointer)
    [entry] = (tmp_path / "queue" / "0").iterdir()
    assert pointer.commit.name in entry.name
    at = synced.index(f"0: {[entry.name]}")
    assert synced[at - 1] == "a file"


def test_a_start_hands_its_tasks_the_seal_of_what_was_planned_and_not_committed(tmp_path: Path, job: ShardJob) -> None:
    place, operators = str(tmp_path), ByVersion.always(CountingOperator())
    for log, count in (("offsets", 8), ("commits", 7)):
        (tmp_path / log).mkdir()
        for version in range(count):
            (tmp_path / log / str(version)).write_text("v1")
    for version, decision in ((7, Decision.QUEUED), (9, Decision.ADOPTED)):
        seals.write_seal(place, version, 1, {0: decision})
    started = incarnation_of(place, operators, True)
    assert (started.planned, dict(started.sealed)) == (7, {0: Decision.QUEUED})
    assert seals.read_seal(place, 9) == {}, "it was taken back: what comes will be another micro-batch"
    queue = started.job(lambda *_: job, "q", 0, 7).queue
    assert queue is not None
    assert (queue.planned, dict(queue.sealed)) == (7, {0: Decision.QUEUED})
    (tmp_path / "commits" / "7").write_text("v1")
    later = incarnation_of(place, operators, True)
    assert (later.planned, dict(later.sealed), later.number) == (-1, {}, started.number + 1)


def test_what_a_start_sends_to_its_tasks_has_nothing_of_the_drivers_credentials(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = f"memory://{uuid.uuid4()}"
    monkeypatch.setitem(fsspec.config.conf, "memory", {"secret": "only the driver knows"})
    assert b"only the driver knows" in pickle.dumps(open_files(place)), "an opened filesystem would bring it"
    started = incarnation_of(place, ByVersion.always(CountingOperator()), True)
    assert b"only the driver knows" not in cloudpickle.dumps(started.job)


def test_a_start_that_never_queues_seals_what_it_runs_again_and_nothing_else(tmp_path: Path) -> None:
    """A driver that stood still may seal the planned micro-batch later: what this start did with it counts."""
    place = str(tmp_path)
    (tmp_path / "offsets").mkdir()
    (tmp_path / "offsets" / "0").write_text("v1")
    started = incarnation_of(place, ByVersion.always(CountingOperator()), False)
    sink, lease = SealedBy(), take(place, "query 'a'")
    try:
        queueing.Sealing(sink, lease, False).begin(started)  # type: ignore[arg-type]
        queueing.Sealing(object(), lease, False).begin(started)  # type: ignore[arg-type] # one that cannot: no matter
        assert sink.seal is not None
        for version in (0, 1):
            sink.seal(version, [{"shard": 0, "metrics": None}])
    finally:
        lease.release()
    assert [path.name for path in (tmp_path / seals.DIRECTORY).iterdir()] == [f"0-{started.number}.json"]
    seals.write_seal(place, 0, started.number - 1, {0: Decision.QUEUED})  # the driver that stood still
    assert seals.read_seal(place, 0) == {}
    new = SealedBy()
    (tmp_path / "commits").mkdir()
    (tmp_path / "commits" / "0").write_text("v1")
    queueing.Sealing(new, lease, False).begin(  # type: ignore[arg-type]
        incarnation_of(place, ByVersion.always(CountingOperator()), False)
    )
    assert new.seal is unsealed, "nothing runs again, and nothing is left of a query that it wrote for before"


class SealedBy:
    """A sink that notes what it is to call."""

    seal: Any = None

    def seal_by(self, seal: Any) -> None:
        self.seal = seal


def test_seals_of_micro_batches_that_were_taken_back_go(tmp_path: Path) -> None:
    for version in (3, 4, 9):
        seals.write_seal(str(tmp_path), version, 1, {0: Decision.QUEUED})
    seals.prune_seals(str(tmp_path), oldest=4, planned=8)
    assert [seals.read_seal(str(tmp_path), version) for version in (3, 4, 9)] == [{}, {0: Decision.QUEUED}, {}]


@pytest.mark.parametrize(
    ("speculation", "guarantee", "limits"),
    [
        ("false", "exactly_once", {None: 128 * 1024 * 1024, 7: 7, "off": None}),
        ("false", "at_least_once", {None: None, 7: "at_least_once", "off": None}),
        ("TRUE", "exactly_once", {None: None, 7: "queue_bytes=7: under spark.speculation='true'", "off": None}),
    ],
)
def test_shards_queue_unless_told_or_where_they_cannot(
    speculation: str, guarantee: Any, limits: dict[str | int | None, Any]
) -> None:
    settings = SimpleNamespace(getConf=lambda: {"spark.speculation": speculation})
    sink = kafka_sink("results", "errors", servers="localhost:1", guarantee=guarantee)
    for option, limit in limits.items():
        if isinstance(limit, str):
            with pytest.raises(ValueError, match=limit):
                queue_limit(SimpleNamespace(sparkContext=settings), sink, option)
        else:
            assert queue_limit(SimpleNamespace(sparkContext=settings), sink, option) == limit


class Frames:
    """What the operator's tasks give in micro-batch 7, as a DataFrame."""

    ROW: ClassVar[dict[str, Any]] = {
        "shard": 3,
        "version": 7,
        "queued_in": None,
        "results": pack(pa.table({"x": [1]})),
        "errors": None,
        "metrics": "{}",
    }

    def __init__(self, rows: list[dict[str, Any]] | None = None) -> None:
        self._rows = rows if rows is not None else [self.ROW]

    def collect(self) -> list[Any]:
        return [SimpleNamespace(asDict=lambda row=row: dict(row)) for row in self._rows]


def into_outbox(tmp_path: Path) -> Any:
    sink = sql_sink(f"sqlite:///{tmp_path}/out.db", "results", errors="errors")
    sink.begin(str(tmp_path / "outbox"), CountingOperator())
    return sink


SINKS: dict[str, Callable[[Path], Any]] = {
    "parquet": lambda tmp_path: parquet_sink(tmp_path / "results", tmp_path / "errors"),
    "outbox": into_outbox,
    "kafka": lambda _: kafka_sink("results", "errors", servers="localhost:1"),
    "function": lambda _: foreach_sink(lambda *_: None),
}


@pytest.mark.parametrize("name", SINKS)
def test_a_sink_seals_before_anything_is_out(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink, order = SINKS[name](tmp_path), list[Any]()
    sink.seal_by(lambda version, rows: order.append(("sealed", version, [row["shard"] for row in rows])))
    publishes = "take" if name == "function" else "finish"
    if hasattr(sink, "writing"):
        with pytest.raises(RuntimeError, match="must pass on `writing`"):
            sink.publish(Frames(), 7)
        sink.writing()
    monkeypatch.setattr(sink, publishes, lambda *_: order.append("out"))
    sink.publish(Frames(), 7)
    assert order == [("sealed", 7, [3]), "out"]


# -- rule 2: who queues ---------------------------------------------------------------------------------------------


def test_only_missing_and_corrupt_states_queue(job: ShardJob, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_attempt(job, None, 0, given([0])).pointer
    second = run_attempt(job, first, 1, given([1])).pointer
    run_attempt(job, second, 2, given([2]))  # the database is at the second now
    with pytest.raises(StateAhead):
        run_attempt(job, first, 1, given([1]))
    with directory(job).lock(), pytest.raises(StoreLocked):
        run_attempt(job, second, 2, given([2]))

    def full(*_: object) -> Outcome:
        raise StorageFailed("there is no room to write")

    monkeypatch.setattr(CountingOperator, "process", full)
    with pytest.raises(StorageFailed):  # every shard would queue, on a disk that is full
        run_attempt(job, second, 2, given([2]))

    def corrupt(*_: object) -> Outcome:
        raise StateCorrupted("a block does not match its checksum")

    monkeypatch.setattr(CountingOperator, "process", corrupt)
    assert run_attempt(job, second, 2, given([2])).ran == []


def test_local_state_that_its_disk_does_not_give_is_put_aside_and_queued_for(
    job: ShardJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run_attempt(job, None, 0, given([0, 1])).pointer
    process, places = CountingOperator.process, ["s3://changelog", ""]

    def unreadable(*_: object) -> Outcome:
        raise storage_failed(OSError(errno.EIO, "Input/output error"), places[0])

    monkeypatch.setattr(CountingOperator, "process", unreadable)
    with pytest.raises(StorageFailed):  # of something else: what lies here is sound
        run_attempt(job, first, 1, given([2], 2_000))
    generation = directory(job).current()
    assert generation is not None
    places[0] = str(generation.database / "000012.sst")
    queued = run_attempt(job, first, 1, given([2], 2_000))
    assert queued.metrics["decision"] == "queued"
    assert directory(job).current() is None
    monkeypatch.setattr(CountingOperator, "process", process)
    restore(job, first, [0, 1])
    assert counts(run_attempt(job, queued.pointer, 2, given([3], 3_000, adopt=first.commit.name))) == [(1, 3), (2, 4)]


def test_an_entry_that_its_disk_does_not_give_is_made_again_like_a_missing_one(
    job: ShardJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, third = queued_twice(job)
    sound, bad = LocalFiles.read, entries.entry_name(0, third.commit)

    def read(files: LocalFiles, name: str) -> bytes:
        if name == bad:
            raise storage_failed(OSError(errno.EIO, "Input/output error"), name)
        return sound(files, name)

    monkeypatch.setattr(LocalFiles, "read", read)
    with pytest.raises(StateUnavailable, match="cannot be read"):
        run_attempt(job, third, 3, given([5], 4_000, adopt=first.commit.name))
    assert [draft.entry.commit for draft in entries.lost_of(open_files(job.local_dir.parent / "queue"), third)] == [
        third.commit
    ]


def test_a_disk_that_goes_while_a_task_works_on_it_is_a_missing_state(
    job: ShardJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run_attempt(job, None, 0, given([0, 1])).pointer
    process = CountingOperator.process

    def losing(*arguments: Any) -> Outcome:
        take_disk(job)
        return process(*arguments)

    monkeypatch.setattr(CountingOperator, "process", losing)
    queued = run_attempt(job, first, 1, given([2], 2_000))
    assert (queued.ran, queued.metrics["decision"]) == ([], "queued")
    monkeypatch.setattr(CountingOperator, "process", process)
    restore(job, first, [0, 1])
    assert counts(run_attempt(job, queued.pointer, 2, given([3], 3_000, adopt=first.commit.name))) == [(1, 3), (2, 4)]


def torn(job: ShardJob) -> None:
    (directory(job).path / "CURRENT").write_bytes(b"{")


def without_current(job: ShardJob) -> None:
    [current] = directory(job).path.glob("*/db/CURRENT")
    current.unlink()


def emptied(job: ShardJob) -> None:
    for file in directory(job).path.glob("*/db/*"):
        file.unlink()


@pytest.mark.parametrize("damage", [torn, without_current, emptied])
def test_a_database_that_cannot_be_opened_is_queued_for_and_made_anew(
    job: ShardJob, damage: Callable[[ShardJob], None]
) -> None:
    first = run_attempt(job, None, 0, given([0, 1])).pointer
    second = run_attempt(job, first, 1, given([2])).pointer
    damage(job)
    queued = run_attempt(job, second, 2, given([3], 2_000))
    assert (queued.ran, queued.metrics["decision"]) == ([], "queued")
    restore(job, second, [0, 1, 2])
    done = run_attempt(job, queued.pointer, 3, given([4], 3_000, adopt=second.commit.name))
    assert counts(done) == [(2, 4), (3, 5)]


@pytest.mark.parametrize("error", [StorageFailed, UserCodeFailed, StoreLocked])
def test_an_adoption_that_fails_otherwise_is_not_hidden_by_queueing_on(
    job: ShardJob, monkeypatch: pytest.MonkeyPatch, error: type[RewindError]
) -> None:
    first, third = queued_twice(job)
    restore(job, first, [0, 1])

    def failing(*_: object) -> Outcome:
        raise error("it fails")

    monkeypatch.setattr(CountingOperator, "process", failing)
    with pytest.raises(error):
        run_attempt(job, third, 3, given([5], 4_000, adopt=first.commit.name))


def test_a_copy_that_turns_out_corrupt_in_its_adoption_queues_on(
    job: ShardJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, third = queued_twice(job)
    restore(job, first, [0, 1])

    def corrupt(*_: object) -> Outcome:
        raise StateCorrupted("a block does not match its checksum")

    monkeypatch.setattr(CountingOperator, "process", corrupt)
    done = run_attempt(job, third, 3, given([5], 4_000, adopt=first.commit.name))
    assert (done.ran, done.metrics["decision"]) == ([], "queued")


def test_what_any_queued_micro_batch_refused_is_in_the_record_of_its_adoption(
    job: ShardJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, third = queued_twice(job)  # 2, then 3 and 4
    restore(job, first, [0, 1])
    process = CountingOperator.process

    def refusing(self: CountingOperator, batch: MicroBatch, work: Any) -> Outcome:
        made = process(self, batch, work)
        offsets = batch.messages["_offset"].to_pylist()
        return replace(made, rejected=[(0, 0, offset) for offset in offsets if offset in (2, 5)])

    monkeypatch.setattr(CountingOperator, "process", refusing)
    done = run_attempt(job, third, 3, given([5], 4_000, adopt=first.commit.name))
    assert job.changelog.read(0, done.pointer.commit).record.rejected == [(0, 0, 2), (0, 0, 5)]


def test_what_was_too_far_ahead_in_any_queued_micro_batch_is_in_the_record_of_its_adoption(job: ShardJob) -> None:
    first = run_attempt(job, None, 0, given([0, 1])).pointer
    take_disk(job)
    second = run_attempt(job, first, 1, given([3], 2_000, in_future=[(0, 0, 2)])).pointer
    third = run_attempt(job, second, 2, given([5], 3_000, in_future=[(0, 0, 4)])).pointer
    restore(job, first, [0, 1])
    done = run_attempt(job, third, 3, given([6], 4_000, adopt=first.commit.name))
    assert job.changelog.read(0, done.pointer.commit).record.rejected == [(0, 0, 2), (0, 0, 4)]


def test_without_the_option_nothing_begins_to_queue(job: ShardJob) -> None:
    first = run_attempt(job, None, 0, given([0])).pointer
    take_disk(job)
    for queue in (None, replace(job.queue, begins=False)):  # type: ignore[type-var]
        with pytest.raises(StateUnavailable):
            run_attempt(replace(job, queue=queue), first, 1, given([1]))


def test_what_queues_goes_on_when_the_option_is_gone(job: ShardJob) -> None:
    _, third = queued_twice(job)
    assert run_attempt(replace(job, queue=replace(job.queue, begins=False)), third, 3, given([5])).ran == []  # type: ignore[type-var]


def test_the_micro_batches_of_a_queue_are_decoded_one_at_a_time(job: ShardJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is queued is bounded as it lies in the files; all of it decoded may be many times that."""
    first, pointer = queued_twice(job)
    for version in range(3, 8):
        pointer = run_attempt(job, pointer, version, given([version + 2], 4_000)).pointer  # type: ignore[assignment]
    restore(job, first, [0, 1])
    decoded: list[weakref.ref[pa.Table]] = []
    beside: list[int] = []
    decode_ipc = entries._from_ipc

    def noted(data: bytes) -> pa.Table:
        beside.append(sum(one() is not None for one in decoded))
        table = decode_ipc(data)
        decoded.append(weakref.ref(table))
        return table

    monkeypatch.setattr(entries, "_from_ipc", noted)
    done = run_attempt(job, pointer, 8, given([10], adopt=first.commit.name))
    assert [one.count for one in done.ran] == [1, 2, 1, 1, 1, 1, 1, 1]
    assert len(beside) == 7
    assert max(beside) <= 1
    assert [one.read().messages["_offset"].to_pylist() for one in done.ran[:2]] == [[2], [3, 4]]  # type: ignore[index]


# -- rule 3: entries ------------------------------------------------------------------------------------------------


def test_the_queue_is_followed_by_commits_and_orphans_are_read_by_nobody(job: ShardJob) -> None:
    first, third = queued_twice(job)
    run_attempt(job, third, 3, given([9]))  # an attempt that Spark does not commit
    assert job.queue is not None
    found = read_queue(job.queue.files, third)
    assert [entry.commit for entry in found] == [third.parent, third.commit]
    assert found[0].parent is None
    assert found[1].parent == Link(found[0].commit, *_file(job, found[0].commit))
    assert (found[1].since, found[1].time_ms) == (first.commit, 3_000)
    assert found[1].given().messages["_offset"].to_pylist() == [3, 4]  # type: ignore[index]


def _file(job: ShardJob, commit: Commit) -> tuple[int, str]:
    import xxhash

    assert job.queue is not None
    data = job.queue.files.read(f"0/{commit.name}.entry")
    return len(data), xxhash.xxh3_128_hexdigest(data)


def test_a_missing_entry_is_named(job: ShardJob) -> None:
    first, third = queued_twice(job)
    assert job.queue is not None
    assert third.parent is not None
    job.queue.files.delete([f"0/{third.parent.name}.entry"])
    restore(job, first, [0, 1])
    with pytest.raises(StateUnavailable, match=third.parent.name):
        run_attempt(job, third, 3, given([5], adopt=first.commit.name))


def test_an_entry_that_is_not_the_one_that_was_queued_is_refused(job: ShardJob) -> None:
    first, third = queued_twice(job)
    restore(job, first, [0, 1])
    [path] = job.local_dir.parent.glob(f"queue/0/{third.commit.name}.entry")
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(StateCorrupted, match="not the one that was queued"):
        run_attempt(job, third, 3, given([5], adopt=first.commit.name))


def test_queueing_touches_no_generation(job: ShardJob) -> None:
    first = run_attempt(job, None, 0, given([0])).pointer
    second = run_attempt(job, first, 1, given([1])).pointer
    current = directory(job).current()
    assert current is not None
    current.staged(second.commit).unlink()
    before = set(job.local_dir.rglob("*.sst"))
    third = run_attempt(job, second, 2, given([2])).pointer
    assert isinstance(third, RestoringPointer)
    assert directory(job).current() == current
    with RocksStore.open(current.database, create=False) as store:
        row = read_commit_row(store)
    assert row is not None
    assert row.commit == first.commit  # an older copy, as it was
    assert before == set(job.local_dir.rglob("*.sst"))


# -- rule 6: formats, and the planner -------------------------------------------------------------------------------


def test_a_restoring_pointer_leads_to_nothing_but_the_queue(job: ShardJob) -> None:
    _, third = queued_twice(job)
    for database in (At(third.commit), At(third.parent), At(third.since.commit)):
        found = plan(third, Local(database, frozenset([third.commit])), Remote(), in_task=False)
        assert found == Missing(f"its input is queued since commit {third.since.commit.name}")
    with directory(job).lock(), pytest.raises(StateUnavailable, match="queued since commit"):
        OpenShard(directory(job), job.where, job.snapshots).at(third)


# -- rule 7: one commit ---------------------------------------------------------------------------------------------


def test_an_adoption_is_one_commit_and_the_database_stays_where_it_was(job: ShardJob) -> None:
    first, third = queued_twice(job)
    restore(job, first, [0, 1])
    done = run_attempt(job, third, 3, given([5], 4_000, adopt=first.commit.name))
    assert done.pointer.parent == first.commit
    assert [(e.kind, e.commit.version) for e in job.changelog.entries(0)] == [(Kind.DELTA, 0), (Kind.DELTA, 3)]
    history = job.changelog.read(0, done.pointer.commit)
    assert (history.record.parent, history.record.message_count) == (first.commit, 6)
    current = directory(job).current()
    assert current is not None
    with RocksStore.open(current.database, create=False) as store:
        row = read_commit_row(store)
    assert row is not None
    assert row.commit == first.commit
    other = run_attempt(job, third, 3, given([5], 4_000, adopt=first.commit.name))  # from the same copy
    assert counts(other) == counts(done)


# -- rule 8: the row ------------------------------------------------------------------------------------------------


def test_a_row_of_another_commit_does_nothing_and_one_that_cannot_be_honoured_queues_on(job: ShardJob) -> None:
    first, third = queued_twice(job)
    assert "queued_why" not in run_attempt(job, third, 3, given([5], adopt=third.commit.name)).metrics
    done = run_attempt(job, third, 3, given([5], adopt=first.commit.name))
    assert done.ran == []
    assert "is not here" in str(done.metrics["queued_why"])
    assert "next:" not in str(done.metrics["queued_why"]), "nobody need do anything"


def test_a_state_that_is_found_changes_nothing_by_itself(job: ShardJob) -> None:
    first, third = queued_twice(job)
    restore(job, first, [0, 1])
    assert run_attempt(job, third, 3, given([5])).ran == []


def test_the_control_offset_carries_what_is_adopted(tmp_path: Path) -> None:
    place, reader = str(tmp_path), ControlReader(str(tmp_path))
    begun = reader.latestOffset({"format": 1, "asked": 0}, None)  # type: ignore[arg-type]
    assert begun == {"format": 1, "asked": 0}
    ask_to_adopt(place, {3: COMMIT.name})
    asked = reader.latestOffset(begun, None)  # type: ignore[arg-type]
    ask_to_adopt(place, {1: COMMIT.name})
    ask_to_drain(place)
    later = reader.latestOffset(asked, None)  # type: ignore[arg-type]
    for file in (tmp_path / "rewind/control").iterdir():
        file.unlink()

    def row(start: Any, end: Any) -> tuple[bool, str]:
        return next(reader.read(reader.partitions(start, end)[0]))

    assert row(begun, asked) == (False, f'{{"3": "{COMMIT.name}"}}')
    assert row(asked, later) == (True, f'{{"1": "{COMMIT.name}"}}')
    assert [shard for shard, _, _ in later["adopt"]] == [1, 3]
    assert positions_in(json.dumps(later)) == {}  # nobody takes it for a source's offset
    assert reader.latestOffset(later, None) == later  # type: ignore[arg-type]
    ask_to_adopt(place, {3: COMMIT.name})  # again: another request for the same commit
    assert row(later, reader.latestOffset(later, None)) == (False, f'{{"3": "{COMMIT.name}"}}')  # type: ignore[arg-type]


# -- rule 9: ids ----------------------------------------------------------------------------------------------------


def test_rows_keep_the_version_that_they_were_queued_in_and_count_anew_in_each() -> None:
    parts = [(None, 1), (7, 2), (7, 1), (8, 1), (None, 1)]
    frames = [
        {RESULTS: pack(pa.table({"x": range(rows)})), ERRORS: None, "queued_in": queued_in} for queued_in, rows in parts
    ]
    ids = [name for _, table in read_frames(frames, RESULTS, 2, 9) for name in table["id"].to_pylist()]
    assert ids == ["9-2-0", "7-2-0", "7-2-1", "7-2-2", "8-2-0", "9-2-1"]


# -- rules 5 and 13: what is due, and options -----------------------------------------------------------------------


class Waiting(CountingOperator):
    """Is due `wait` milliseconds after messages; says when it was woken."""

    def __init__(self, wait: int) -> None:
        self.wait = wait

    def process(self, batch: Any, work: Any) -> Outcome:
        made = super().process(batch, work)
        if batch.messages.num_rows:
            return replace(made, next_due_ms=batch.time_ms + self.wait)
        woken = pa.Table.from_pylist([{"key": "woken", "count": batch.time_ms}], self.result_schema)
        return replace(made, results=woken)


def test_a_micro_batch_without_input_is_run_iff_it_was_due(job: ShardJob) -> None:
    job = replace(job, operator=Waiting(1_500), queue=replace(job.queue, operators=ByVersion.always(Waiting(1_500))))  # type: ignore[type-var]
    pointer = first = run_attempt(job, None, 0, given([0, 1], 1_000)).pointer  # due at 2,500
    take_disk(job)
    for version, time_ms in enumerate((2_000, 3_000, 4_000), start=1):
        pointer = run_attempt(job, pointer, version, given([], time_ms, came=False)).pointer
        assert pointer.next_due_ms == time_ms  # woken in every micro-batch
    restore(job, first, [0, 1])
    done = run_attempt(job, pointer, 4, given([], 5_000, came=False, adopt=first.commit.name))
    assert [(one.version, one.outcome.results.to_pylist()) for one in done.ran] == [
        (2, [{"key": "woken", "count": 3_000}])
    ]
    assert done.pointer.next_due_ms is None


def test_an_adoption_in_which_nothing_was_due_is_a_commit_too(job: ShardJob) -> None:
    first = run_attempt(job, None, 0, given([0, 1])).pointer
    take_disk(job)
    second = run_attempt(job, first, 1, given([], 2_000, came=False)).pointer
    restore(job, first, [0, 1])
    done = run_attempt(job, second, 2, given([], 3_000, came=False, adopt=first.commit.name))
    assert done.ran == []
    assert done.pointer.parent == first.commit
    assert counts(run_attempt(job, done.pointer, 3, given([2]))) == [(3, 3)]


def test_each_entry_runs_under_the_options_of_its_version(job: ShardJob) -> None:
    operators = ByVersion(((0, Waiting(100)), (2, Waiting(9_000))))
    job = replace(job, operator=Waiting(9_000), queue=replace(job.queue, operators=operators))  # type: ignore[type-var]
    first = run_attempt(replace(job, operator=Waiting(100)), None, 0, given([0])).pointer
    take_disk(job)
    second = run_attempt(job, first, 1, given([1], 2_000)).pointer  # due at 2,100
    third = run_attempt(job, second, 2, given([], 3_000, came=False)).pointer
    restore(job, first, [0])
    done = run_attempt(job, third, 3, given([2], 4_000, adopt=first.commit.name))
    assert [one.version for one in done.ran] == [1, 2, 3]
    assert done.pointer.next_due_ms == 13_000


def test_drained_is_said_by_the_commit_whose_operator_drained(job: ShardJob) -> None:
    first = run_attempt(job, None, 0, given([0])).pointer
    take_disk(job)
    queued = run_attempt(job, first, 1, given([], 2_000, drain=True))
    assert (queued.pointer.drained, queued.metrics["drained"]) == (-1, -1)
    restore(job, first, [0])
    done = run_attempt(job, queued.pointer, 2, given([], 3_000, came=False, adopt=first.commit.name))
    assert (done.pointer.drained, done.metrics["drained"]) == (2, 2)
    assert [one.version for one in done.ran] == [1]


# -- rule 11: what is kept ------------------------------------------------------------------------------------------


def test_what_a_retained_queue_begins_with_is_kept(job: ShardJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recovery.supervise.housekeeping.APART_S", 0.0)
    place = job.local_dir.parent
    queue = Queue(open_files(place / "rewind" / "queue"), ByVersion.always(job.operator), begins=True)
    job = replace(job, queue=queue)
    first, third = queued_twice(job)
    restore(job, first, [0, 1])
    adopted = run_attempt(job, third, 3, given([5], adopt=first.commit.name)).pointer
    assert job.snapshots is not None
    keeper = Housekeeping(lambda: job.changelog, job.snapshots, keep_versions=3, every=1, checkpoint=str(place))
    keeper.made(0, first.commit)
    keeper.made(0, adopted.commit)
    pointer = adopted
    for version in (4, 5):  # versions 2 to 5 are retained: the queue's last one among them
        pointer = run_attempt(job, pointer, version, given([version + 2])).pointer
        keeper.made(0, pointer.commit)
    keeper.maintain(5)
    assert len(read_queue(queue.files, third)) == 2
    assert any(offer.full and offer.commit == first.commit for offer in job.snapshots.offers(0))
    folder = place / "rewind" / "queue" / "0"
    for version in (2, 9):
        (folder / f"{version:020d}_{'b' * 32}.entry.tmp-1").touch()  # of tasks that died while they wrote
    pointer = run_attempt(job, pointer, 6, given([8])).pointer
    keeper.made(0, pointer.commit)
    keeper.maintain(6)  # version 3, the adoption, is the oldest one retained
    assert [path.name[:20] for path in folder.iterdir()] == [f"{9:020d}"]


# -- the driver -----------------------------------------------------------------------------------------------------


def reported(first: Pointer, queued: int, length: int = 10, why: str = "") -> dict[str, Any]:
    from base64 import b64encode

    since = b64encode(encode(first)).decode()
    told = {"decision": "queued", "since": since, "queued": queued, "queued_bytes": length}
    return {**told, "queued_why": why} if why else told


FIRST = Pointer(0, COMMIT, None, 1, "", [], {}, "")


def queueing_since(first: Pointer, queued: int = 0, length: int = 0) -> RestoringPointer:
    """Return what a start finds committed of a shard that has queued so much."""
    at = Commit(first.commit.version + queued, "c" * 32)
    return RestoringPointer(0, at, first.commit, 1, "", [], {}, "", since=first, queued=queued, queued_bytes=length)


def run_to_its_end(beside: Beside, committed: int) -> None:
    beside.look(committed)
    beside.join()


def test_what_committed_pointers_say_is_restored_once() -> None:
    restored: list[dict[int, Pointer]] = []
    beside = Beside(lambda due, _: restored.append(dict(due)), 100, 10, {})
    beside.published(0, 5, reported(FIRST, 1, why="no local state"))
    run_to_its_end(beside, 4)  # published, and not committed
    assert restored == []
    beside.published(0, 6, reported(FIRST, 2))  # the next one is out before the first one's commit is seen
    run_to_its_end(beside, 5)
    run_to_its_end(beside, 6)
    assert restored == [{0: FIRST}]
    beside.published(0, 7, {"commit": Commit(7, "b" * 32).name, "adopted": 2})
    assert beside.shards == {}


def test_a_shard_that_could_not_adopt_is_restored_again_a_few_times() -> None:
    restored: list[object] = []
    beside = Beside(lambda due, _: restored.append(due), 100, 10, {0: queueing_since(FIRST)})
    for version in range(5, 5 + MAX_REFUSED):
        run_to_its_end(beside, version)
        assert len(restored) == version - 4
        beside.published(0, version + 1, reported(FIRST, 1, why="the snapshot is damaged"))
    with pytest.raises(StateUnavailable, match="could not adopt its queue 3 times: the snapshot is damaged"):
        beside.look(99)


@pytest.mark.parametrize("too_long", [True, False])
def test_a_shard_that_never_adopts_its_queue_is_given_up_after_as_many_stops_as_any_other(too_long: bool) -> None:
    beside = Beside(lambda *_: None, 100, 1_000, {0: queueing_since(FIRST)})
    version, why = 5, "the snapshot is damaged"
    second = Pointer(0, Commit(5, "d" * 32), None, 1, "", [], {}, "")

    def stopped(first: Pointer) -> None:
        nonlocal version
        for _ in range(MAX_REFUSED + 1):
            beside.published(0, version, reported(first, version, 101 if too_long else 10, why))
            run_to_its_end(beside, version)
            version += 1

    def stops(first: Pointer) -> None:
        for _ in range(MAX_RESTORES):
            with pytest.raises(StateUnavailable, match="101 bytes" if too_long else why):
                stopped(first)
            beside.restored(version)

    stops(FIRST)
    beside.published(0, version, {"commit": Commit(version, "b" * 32).name, "adopted": 2})
    stops(FIRST)
    for _ in range(MAX_RESTORES + 1):
        with pytest.raises(StateUnavailable):
            stopped(second)  # Spark did not stop in time: nothing was restored, and nothing counts
    stops(second)  # of another loss: what came in between was not seen
    with pytest.raises(RestoreFailed, match=f"after {MAX_RESTORES} restores.*{why}"):
        stopped(second)


def test_a_restore_is_told_which_shards_could_not_adopt_before() -> None:
    found: list[object] = []
    beside = Beside(lambda _, refused: found.append(set(refused)), 100, 10, {0: queueing_since(FIRST)})
    run_to_its_end(beside, 5)
    beside.published(0, 6, reported(FIRST, 2, why="the snapshot is damaged"))
    run_to_its_end(beside, 6)
    assert found == [set(), {0}]


def test_a_shard_that_goes_on_queueing_after_it_was_asked_is_restored_and_bounded_again() -> None:
    """The row that asked it was lost: nobody else would ever ask again."""
    restored: list[object] = []
    beside = Beside(lambda due, _: restored.append(due), 10_000, 1_000, {})
    for count in range(1, ASKED_FOR + 3):
        beside.published(0, 4 + count, reported(FIRST, count))
        run_to_its_end(beside, 4 + count)
        assert len(restored) == (1 if count <= ASKED_FOR + 1 else 2)
    beside.published(0, 90, reported(FIRST, 2 * ASKED_FOR + 9, 10_001))
    with pytest.raises(StateUnavailable, match="10001 bytes"):
        beside.look(90)


def test_micro_batches_come_the_more_slowly_the_more_a_shard_has_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Back to back they would fill the queue before its state is here: 50 of them are to last half a minute."""
    clock = [100.0]
    monkeypatch.setattr("recovery.supervise.beside.time.monotonic", lambda: clock[0])
    beside = Beside(lambda *_: None, 10_000, 1_000, {})

    def waited(stopped: bool = False) -> float:
        began = clock[0]

        def wait(seconds: float) -> bool:
            clock[0] += seconds
            return stopped

        beside.pace(wait)
        return clock[0] - began

    assert waited() == 0.0  # nothing is queued
    found = []
    for count in range(1, 51):
        beside.published(0, count, reported(FIRST, count))
        found.append(waited())
    assert all(later > earlier - 0.1 for earlier, later in pairwise(found))
    assert found[0] < 0.2
    assert 30 < sum(found) < 60
    assert max(found) < 1.1
    clock[0] += 5  # a trigger of its own is long enough
    assert waited() == 0.0
    assert waited(stopped=True) < 0.1
    beside.restored(50)  # asked to adopt: at once
    assert waited() == 0.0


def test_a_task_queues_where_packages_are_too_much_to_fetch_and_an_adoption_takes_them(
    job: ShardJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run_attempt(job, None, 0, given([0, 1])).pointer
    take_disk(job)
    restore(job, first, [0, 1])  # a whole snapshot
    assert job.snapshots is not None
    [offer] = job.snapshots.offers(0, toward=first.commit)
    assert offer.full
    assert offer.length > 1_000
    monkeypatch.setattr(attempt, "TAKEOVER_BYTES", offer.length - 1)
    queued = run_attempt(job, first, 1, given([2], 2_000))
    assert queued.metrics["decision"] == "queued"
    assert f"{offer.length:,} bytes of snapshots" in str(queued.metrics["queued_why"])
    assert directory(job).current() is None
    later = run_attempt(job, queued.pointer, 2, given([3], 3_000))
    adopted = run_attempt(job, later.pointer, 3, given([4], 4_000, adopt=first.commit.name))
    assert counts(adopted) == [(1, 3), (2, 4), (3, 5)]
    take_disk(job)
    done = run_attempt(replace(job, queue=None), first, 1, given([2], 2_000))
    assert counts(done) == [(1, 3)]  # where nothing queues all is fetched
    assert job.queue is not None
    may_not = [replace(job, queue=replace(job.queue, begins=False)), sealed(job, 1, None)]
    for one in may_not:  # nor may it queue: the option is off, or the micro-batch may be out
        take_disk(job)
        assert counts(run_attempt(one, first, 1, given([2], 2_000))) == [(1, 3)]


def test_just_as_much_as_a_task_may_fetch_is_fetched(job: ShardJob, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_attempt(job, None, 0, given([0, 1])).pointer
    take_disk(job)
    restore(job, first, [0, 1])
    assert job.snapshots is not None
    [offer] = job.snapshots.offers(0, toward=first.commit)
    monkeypatch.setattr(attempt, "TAKEOVER_BYTES", offer.length)
    assert counts(run_attempt(job, first, 1, given([2], 2_000))) == [(1, 3)]


@pytest.mark.parametrize("refused", [(), (1,)])
@pytest.mark.parametrize("damaged", [frozenset(), frozenset({1})])
def test_packages_lie_where_the_shard_runs_before_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: tuple[int, ...], damaged: frozenset[int]
) -> None:
    (tmp_path / "metadata").write_text('{"id": "00000000-0000-0000-0000-000000000001"}')
    done: list[Any] = []
    second = Pointer(1, Commit(3, "c" * 32), None, 0, "", [], {}, "")
    offers = {0: (), 1: (Snapshot(1, second.commit, None, "folder", [PackedFile("f", 9, "")]),)}
    snapshots = SimpleNamespace(offers=lambda shard, toward: offers[shard])

    def bring(_: object, __: object, commits: dict[int, Commit]) -> frozenset[int]:
        done.append(("brought", dict(commits)))
        return damaged & commits.keys() if len(done) == 1 else frozenset()

    monkeypatch.setattr(all_shards, "plan_restores", lambda lost, *_: dict.fromkeys(lost))

    def carry_out(run: Any, plans: dict[int, Any]) -> dict[int, str]:
        done.append(("restored", set(plans)))
        assert run.at_once == 3, "it leaves the query a core"
        assert ("spark.scheduler.pool", all_shards.POOL) in [call.args for call in context.setLocalProperty.mock_calls]
        return {}

    context = MagicMock()
    monkeypatch.setattr(Restores, "carry_out", carry_out)
    monkeypatch.setattr(all_shards, "bring_copies", bring)
    monkeypatch.setattr(all_shards, "probe", lambda *_: pytest.fail("it would take the locks of the query's tasks"))
    monkeypatch.setattr(
        all_shards.open_files(tmp_path).__class__, "delete_folder", lambda *_: pytest.fail("others' files")
    )
    monkeypatch.setattr(all_shards, "ask_to_adopt", lambda _, commits: done.append(("asked", set(commits))))
    monkeypatch.setattr(all_shards, "cores", lambda _: 4)
    monkeypatch.setattr(all_shards, "context_of", lambda _: context)
    make, pointers = lambda *_: SimpleNamespace(snapshots=snapshots, changelog=None), {0: FIRST, 1: second}
    restore_beside(Restores(MagicMock(), MagicMock(), str(tmp_path), make), pointers, refused)  # type: ignore[arg-type]
    rebuilt = {0: FIRST.commit} if not refused and not damaged else {0: FIRST.commit, 1: second.commit}
    first = {} if refused else {1: second.commit}
    assert done == [("brought", first), ("restored", set(rebuilt)), ("brought", rebuilt), ("asked", {0, 1})]


@pytest.mark.parametrize("snapshot", ["sound", "damaged", "refused", "none"])
def test_a_shard_that_the_source_cannot_give_back_goes_by_its_snapshots(
    job: ShardJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: str
) -> None:
    """The query ended as if its history were lost, where one disk was full or a copy could not be made at once."""
    (tmp_path / "metadata").write_text('{"id": "00000000-0000-0000-0000-000000000001"}')
    first, done = run_attempt(job, None, 0, given([0, 1])).pointer, list[Any]()
    if snapshot != "none":
        restore(job, first, [0, 1])
    found = frozenset({0} if snapshot == "damaged" else ())
    monkeypatch.setattr(all_shards, "bring_copies", lambda *_: found)
    monkeypatch.setattr(Restores, "carry_out", lambda _, plans: done.append(plans))
    monkeypatch.setattr(all_shards, "ask_to_adopt", lambda _, commits: done.append(commits))
    monkeypatch.setattr(all_shards, "cores", lambda _: 2)
    monkeypatch.setattr(all_shards, "context_of", lambda _: MagicMock())
    source: Any = SimpleNamespace(offsets=lambda _: {(0, 0): (1, 9)}, topics={})
    expected = pytest.raises(HistoryLost, match="offsets from 0 wanted") if snapshot == "none" else nullcontext()
    with expected:
        run = Restores(MagicMock(), source, str(tmp_path), lambda *_: job)
        restore_beside(run, {0: first}, (0,) if snapshot == "refused" else ())
    assert done == ([] if snapshot == "none" else [{}, {0: first.commit.name}])


@pytest.mark.parametrize("led", [set(), {0}, {1}, {0, 1}])
@pytest.mark.parametrize("shards", [{1}, {0, 1}])
@pytest.mark.parametrize("error", [HistoryLost("aged"), RestoreMismatch("another digest"), BrokerUnavailable("away")])
def test_a_shard_whose_messages_go_while_they_are_replayed_goes_by_its_snapshots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: set[int], led: set[int], error: Exception
) -> None:
    """Retention passes them between the plan and its last slice: those of shard 1."""
    (tmp_path / "metadata").write_text('{"id": "00000000-0000-0000-0000-000000000001"}')
    done: list[Any] = []

    def carry_out(_: object, plans: dict[int, Any]) -> dict[int, str]:
        done.append(set(plans))
        if 1 in plans:
            raise error
        return {}

    monkeypatch.setattr(all_shards, "plan_restores", lambda lost, *_: dict.fromkeys(lost))
    monkeypatch.setattr(Restores, "carry_out", carry_out)
    monkeypatch.setattr(all_shards, "bring_copies", lambda _, __, commits: done.append({*commits}) or frozenset())
    monkeypatch.setattr(all_shards, "_leads", lambda _, pointer: pointer.shard in led)
    monkeypatch.setattr(all_shards, "ask_to_adopt", lambda _, commits: done.append(sorted(commits)))
    monkeypatch.setattr(all_shards, "cores", lambda _: 2)
    monkeypatch.setattr(all_shards, "context_of", lambda _: MagicMock())
    pointers = {shard: msgspec.structs.replace(FIRST, shard=shard) for shard in shards}
    asked = 1 in led and not isinstance(error, BrokerUnavailable)
    with nullcontext() if asked else pytest.raises(type(error)):
        restore_beside(Restores(MagicMock(), MagicMock(), str(tmp_path), lambda *_: MagicMock()), pointers, shards)
    rest = shards - led
    assert done[1:] == [shards, rest, rest, sorted(shards)] if asked else sorted(shards) not in done


OF_COPIES = "/local/q/0/1/db"


@pytest.mark.parametrize(
    ("error", "given_up"),
    [
        (StorageFailed("no room"), False),
        (StoreLocked("held"), False),
        (StateCorrupted("damaged"), True),
        (storage_failed(OSError(errno.EIO, "EIO"), "/nfs/changelog/0/a.delta"), False),
        (storage_failed(OSError(errno.ESTALE, "ESTALE"), "s3://changelog/0/a.delta"), False),
        (storage_failed(OSError(errno.EIO, "EIO"), OF_COPIES), True),
        (storage_failed(OSError(errno.ENOSPC, "full"), OF_COPIES), False),
    ],
)
def test_an_older_copy_is_not_given_up_for_what_passes(
    job: ShardJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, given_up: bool
) -> None:
    """The whole shard was replayed then, and where the source had aged its history was called lost."""
    here = replace(job, local_dir=Path("/local"))
    run = Restores(MagicMock(), MagicMock(), str(tmp_path), MagicMock())

    def build(*_: object) -> None:
        raise error

    monkeypatch.setattr(all_shards, "build_snapshot", build)
    monkeypatch.setattr(all_shards, "crossing", lambda work: work)
    monkeypatch.setattr(all_shards, "run_on_tasks", lambda _, items, work: list(work(items)))
    plans: Any = {0: Rebuild(MagicMock(), {}, "it is behind", start=COMMIT)}
    if given_up:
        assert run._build(lambda _: here, plans, {}) == {0: str(error)}
    else:
        with pytest.raises(type(error)):
            run._build(lambda _: here, plans, {})


def test_each_restore_has_a_folder_of_its_own_and_takes_no_other_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that was replaced may restore yet, while the newer one does."""
    files, seen = open_files(tmp_path), list[str]()
    (tmp_path / "metadata").write_text('{"id": "00000000-0000-0000-0000-000000000001"}')
    run = Restores(MagicMock(), MagicMock(), str(tmp_path), MagicMock())

    def write_chunks(_: Any, __: Any, ___: Any, folder: str, *____: Any) -> dict[int, list[str]]:
        seen.append(folder)
        files.write(f"{folder}/0/00000001-x", [b"x"])
        if len(seen) == 1:
            run.carry_out({})
        assert list(files.list(f"{folder}/0")) == ["00000001-x"]
        return {}

    monkeypatch.setattr(all_shards, "write_chunks", write_chunks)
    assert run.carry_out({}) == {}
    assert len(set(seen)) == 2
    assert not [path for path in (tmp_path / all_shards.DIRECTORY).rglob("*") if path.is_file()]


def test_a_query_is_not_stopped_before_the_micro_batch_is_committed_with_which_a_queue_became_too_long() -> None:
    """It would run again under its seal, be as long, and stop the query again, before its commit."""
    over = threading.Event()
    beside = Beside(lambda *_: over.wait(), 100, 10, {})  # type: ignore[arg-type,return-value]
    for version, length in ((5, 50), (6, 101), (7, 150)):
        beside.published(0, version, reported(FIRST, version - 4, length))
        beside.look(5)
    with pytest.raises(StateUnavailable, match="3 micro-batches, 150 bytes"):
        beside.look(6)
    over.set()
    beside.join()
    beside.restored(6)  # with no task running; it was asked to adopt
    beside.published(0, 7, reported(FIRST, 3, 150))  # planned before: again, under its seal
    beside.look(7)
    beside.published(0, 8, {"commit": Commit(8, "b" * 32).name, "adopted": 3})
    beside.published(0, 9, reported(FIRST, 1, 10))
    beside.look(9)


def test_what_queued_and_runs_again_refuses_nothing(job: ShardJob) -> None:
    first, third = queued_twice(job)
    again = run_attempt(sealed(job, 3, Decision.QUEUED), third, 3, given([5], adopt=first.commit.name))
    assert again.metrics["decision"] == "queued"
    assert "queued_why" not in again.metrics


def test_a_start_knows_how_long_a_queue_is_already() -> None:
    """It was taken for empty: behind a full restore its shard counted as not asked, and was restored once more."""
    due: list[Any] = []
    beside = Beside(lambda shards, _: due.append(dict(shards)), 10**9, 1_000, {0: queueing_since(FIRST, 40, 400)})
    assert beside.shards[0].count == 40
    beside.restored(50)
    beside.published(0, 51, reported(FIRST, 41, 410))
    run_to_its_end(beside, 51)
    assert due == []


def test_a_restore_that_fails_by_what_passes_is_tried_again_beside_the_query(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, tried = [100.0], list[float]()
    monkeypatch.setattr("recovery.supervise.beside.time.monotonic", lambda: clock[0])

    def restore(*_: object) -> None:
        tried.append(clock[0])
        if len(tried) < 3:
            raise ChangelogUnavailable("the brokers do not answer")

    beside = Beside(restore, 10**9, 1_000, {0: queueing_since(FIRST, 1, 1)})
    for _ in range(80):
        beside.look(9)
        if beside._thread is not None:
            beside._thread.join()
        clock[0] += 0.1
    first, second, third = tried
    assert second - first >= RETRY_S
    assert third - second >= RETRY_S


def test_a_restore_that_fails_again_and_again_ends_what_it_runs_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle source fills no queue; the supervisor has patience, and says what it waits for."""
    clock = [100.0]
    monkeypatch.setattr("recovery.supervise.beside.time.monotonic", lambda: clock[0])

    tried: list[float] = []

    def restore(*_: object) -> None:
        tried.append(clock[0])
        raise ChangelogUnavailable("the brokers do not answer")

    beside = Beside(restore, 10**9, 1_000, {0: queueing_since(FIRST, 1, 1)})
    for times in (1, 2):  # and from the beginning once the query goes on
        with pytest.raises(ChangelogUnavailable):
            for _ in range(10 * MAX_TRIES):
                beside.look(9)
                assert beside._thread is not None
                beside._thread.join()
                clock[0] += RETRY_S
        assert len(tried) == times * MAX_TRIES


def test_what_ends_a_restore_that_nobody_waits_for_ends_nothing() -> None:
    """Its shard has adopted its queue meanwhile, by an earlier row."""

    def lost(*_: object) -> None:
        raise HistoryLost("the source no longer has the messages")

    beside = Beside(lost, 100, 10, {0: queueing_since(FIRST)})
    beside.look(5)
    assert beside._thread is not None
    beside._thread.join()
    beside.published(0, 6, {"commit": Commit(6, "b" * 32).name, "adopted": 1})
    beside.look(6)


def test_a_queue_has_bounds() -> None:
    for queued, length in ((11, 10), (1, 101)):
        beside = Beside(lambda *_: None, 100, 10, {})
        beside.published(0, 5, reported(FIRST, queued, length))
        with pytest.raises(StateUnavailable, match=f"{queued} micro-batches, {length} bytes"):
            beside.look(5)
        beside.restored(5)  # with no task running; it was asked to adopt
        beside.look(6)


def test_a_shard_whose_first_queued_micro_batch_was_not_committed_is_asked_by_nobody_and_restored_beside() -> None:
    due: list[Any] = []
    beside = Beside(lambda shards, _: due.append(dict(shards)), 10**9, 50, {})
    beside.published(0, 5, reported(FIRST, 1))  # it is out, and its commit fails: the pointer knows of no queue
    beside.restored(4)
    beside.published(0, 5, reported(FIRST, 1))  # again, under its seal
    run_to_its_end(beside, 5)
    assert due == [{0: FIRST}]


def test_what_ends_a_restore_beside_the_query_ends_the_query() -> None:
    def lost(*_: object) -> None:
        raise HistoryLost("the source no longer has the messages")

    beside = Beside(lost, 100, 10, {0: queueing_since(FIRST)})
    beside.look(5)
    assert beside._thread is not None
    beside._thread.join()
    with pytest.raises(HistoryLost):
        beside.look(5)


def test_a_replay_beside_the_query_is_cut_in_short_jobs() -> None:
    ranges = {(0, 0): (0, 25_000), (0, 1): (7, 9), (0, 2): (0, 12_000), (0, 3): (5, 5)}
    cut = list(slices(ranges, at_once=2, clock=lambda: 0.0))
    assert all(len(one) <= 2 for one in cut)
    covered = sorted((key, piece) for one in cut for key, piece in one.items())
    for key, (start, end) in ranges.items():
        edges = [piece for of, piece in covered if of == key]
        assert [low for low, _ in edges] + [end] == [start, *(high for _, high in edges)]


def test_chunks_are_named_in_the_order_of_their_first_keys_whatever_the_order_of_the_jobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reports = [[(0, "late", b"m"), (1, "only", b"z")], None, [(0, "early", b"a"), (0, "middle", b"b")]]
    names = ("shard", "name", "first")
    frames = [
        None
        if one is None
        else SimpleNamespace(collect=lambda rows=one: [dict(zip(names, row, strict=True)) for row in rows])
        for one in reports
    ]
    once = SimpleNamespace(replay=lambda *_: frames.pop(0))
    job = SimpleNamespace(
        grouping=[], operator=None, message_fields=None, session={}, looking_once=lambda: once, replay=pytest.fail
    )
    monkeypatch.setattr(replay, "apart", lambda *_, **__: None)
    monkeypatch.setattr(replay, "chunk_writer", lambda *_: None)
    monkeypatch.setattr(replay, "replay_ranges", lambda _: {(0, part): (0, 9) for part in range(3)})
    found = replay.write_chunks(None, job, "", "run", {0: None}, 10, at_once=1)  # type: ignore[arg-type, dict-item]
    assert found == {0: ["early", "middle", "late"], 1: ["only"]}
    assert frames == []


def _lengths(ranges: dict[tuple[int, int], tuple[int, int]], took: Callable[[int, int], float]) -> list[int]:
    """Return the lengths of a replay's jobs, one source partition each, that take a time by number and length."""
    now_s, lengths = [0.0], []
    for number, part in enumerate(slices(ranges, 1, lambda: now_s[0])):
        [(low, high)] = part.values()
        lengths.append(high - low)
        now_s[0] += took(number, high - low)
    return lengths


def test_a_job_of_a_replay_beside_the_query_has_what_fits_into_half_a_second() -> None:
    took_s = [0.0625, 0.25, 1.0, 100.0, 0.375, 0.5, 0.5, 0.5]
    lengths = _lengths({(0, 0): (0, 174_166)}, lambda number, _: took_s[number])
    # at most four times as many; 80,000 in 1 s: 40,000; 40,000 in 100 s: the least, not 200; 1,000 in 0.375 s: 1,333
    assert lengths == [10_000, 40_000, 80_000, 40_000, 1_000, 1_333, 1_333, 500]


def test_a_short_rest_of_a_source_partition_does_not_make_the_next_job_shorter() -> None:
    ranges = {(0, 0): (0, 10_010), (0, 1): (0, 20_000)}
    assert _lengths(ranges, lambda _, length: 0.25 if length == 10 else 0.5) == [10_000, 10, 10_000, 10_000]


def test_a_job_of_a_replay_beside_the_query_never_has_more_than_a_million_offsets() -> None:
    lengths = _lengths({(0, 0): (0, 2_850_000)}, lambda *_: 0.0)
    assert lengths == [10_000, 40_000, 160_000, 640_000, 1_000_000, 1_000_000]


def _take_over(place: str) -> None:
    open_files(place).write(f"rewind/lease/{2:012d}-{'f' * 32}.json", [b"{}"])


def test_a_driver_that_was_replaced_seals_nothing(tmp_path: Path) -> None:
    place = str(tmp_path)
    lease = take(place, "the old driver")
    _take_over(place)
    started = Incarnation(place, 1, ByVersion.always(CountingOperator()), True, -1, {})
    row = {"shard": 0, "metrics": json.dumps({seals.DECISION: "queued"})}
    with pytest.raises(CheckpointTaken):
        seal(started, lease, 7, [row])
    assert seals.read_seal(place, 7) == {}
    lease.release()


def test_a_driver_that_is_replaced_while_it_seals_publishes_nothing_and_binds_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stood still between its look at the lease and its seal; the driver that took over ran the micro-batch."""
    place, operators = str(tmp_path), ByVersion.always(CountingOperator())
    lease = take(place, "the old driver")
    queued = {"shard": 0, "metrics": json.dumps({seals.DECISION: "queued"})}
    write = queueing.write_seal

    def late(*given: Any) -> None:
        _take_over(place)
        new = SimpleNamespace(check=lambda: None)
        monkeypatch.setattr(queueing, "write_seal", write)
        seal(Incarnation(place, 2, operators, True, 7, {}), new, 7, [{"shard": 0, "metrics": "{}"}])  # type: ignore[arg-type]
        write(*given)

    monkeypatch.setattr(queueing, "write_seal", late)
    with pytest.raises(CheckpointTaken):
        seal(Incarnation(place, 1, operators, True, -1, {}), lease, 7, [queued])
    assert seals.read_seal(place, 7) == {}, "shard 0 ran it, and what it made is out"
    lease.release()


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_driver_that_was_replaced_while_it_restored_asks_for_no_adoption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool, beside: bool
) -> None:
    place = str(tmp_path)
    (tmp_path / "metadata").write_text('{"id": "00000000-0000-0000-0000-000000000001"}')
    lease = take(place, "the driver")

    def carry_out(*_: object) -> Any:
        if replaced:
            _take_over(place)
        return {}

    queue = Queue(open_files(tmp_path / "rewind/queue"), ByVersion.always(CountingOperator()))
    restoring = queue.put(FIRST, 1, given([2])({}), COMMIT)
    monkeypatch.setattr(all_shards, "plan_restores", lambda *_: {})
    monkeypatch.setattr(Restores, "carry_out", carry_out)
    monkeypatch.setattr(all_shards, "_restore", carry_out)
    monkeypatch.setattr(all_shards, "bring_copies", lambda *_: frozenset())
    monkeypatch.setattr(all_shards, "_leads", lambda *_: False)
    monkeypatch.setattr(all_shards, "read_pointers", lambda *_: {0: restoring})
    monkeypatch.setattr(all_shards, "cores", lambda _: 2)
    monkeypatch.setattr(all_shards, "context_of", lambda _: MagicMock())
    job: Any = MagicMock(grouping=(0,))
    run = Restores(MagicMock(), job, place, MagicMock(), check_lease=lease.check)
    expected = pytest.raises(CheckpointTaken) if replaced else nullcontext()
    with expected:
        if beside:
            restore_beside(run, {0: FIRST})
        else:
            restore_shards(run, "it stopped")
    assert len(open_files(place).list("rewind/control")) == (0 if replaced else 1)
    lease.release()


def test_combined_messages_are_queued_as_they_are(job: ShardJob) -> None:
    alike = rows(*((n, 5, "a", 1) for n in range(6)))
    share = assembled(spec(), alike)
    assert share.messages is not None
    assert is_combined(share.messages)
    assert not share.with_values
    first = run_attempt(job, None, 0, given([0])).pointer
    assert job.queue is not None
    [entry] = read_queue(job.queue.files, job.queue.put(first, 1, share, COMMIT))
    assert entry.given().messages.equals(share.messages)  # type: ignore[union-attr]
    assert entry.given().timestamps == share.timestamps
    assert (entry.given().with_values, entry.given().after) == (False, share.after)


def test_an_adoption_logs_the_messages_of_its_queue_that_nobody_can_read_again(job: ShardJob) -> None:
    job = replace(job, message_log=MessageLog(str(job.local_dir.parent / "messages"), frozenset({0})))
    first = run_attempt(job, None, 0, given([0, 1])).pointer
    take_disk(job)
    second = run_attempt(job, first, 1, given([2], 2_000)).pointer
    third = run_attempt(job, second, 2, given([], 3_000, came=False)).pointer
    restore(job, first, [0, 1])
    done = run_attempt(job, third, 3, given([3, 4], 4_000, adopt=first.commit.name))
    record = job.changelog.read(0, done.pointer.commit).record
    assert job.message_log is not None
    logged = [offset for table in job.message_log.messages(record) for offset in table["_offset"].to_pylist()]
    assert sorted(logged) == [0, 1, 2, 3, 4]
