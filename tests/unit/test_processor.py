"""Spark's calls on the processor, made by hand: rows and a timer in one attempt, one timer, the drain, the output."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import replace

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from backend.batch import ERROR_SCHEMA
from backend.boundary import CrossedError
from backend.process import ProcessOperator
from backend.rocks import RocksStore
from backend.sinks import parquet
from backend.sinks.parquet import ParquetSink
from backend.spark import shard_task
from backend.spark.deferred import Deferred
from backend.spark.pack import frames, packing
from backend.spark.processor import ShardProcessor
from backend.spark.shard_task import ProcessorPlan
from recovery.changelog import open_changelog
from recovery.commit.option_sets import ByVersion
from recovery.commit.pointer import decode
from recovery.commit.scratch import scratch_directory
from recovery.files import open_files
from recovery.jobs import ShardJob
from recovery.queue.entries import Queue
from recovery.restore.build import restore_shard
from recovery.snapshots.publisher import Snapshots
from tests.support.counting import CountingOperator

KEY = (pa.field("key", pa.string()),)


class Timers:
    """Spark's state for one grouping key: a value and a set of timers; counts the calls on those."""

    def __init__(self):
        self.value, self.timers, self.calls = None, set(), 0

    def getValueState(self, name, schema):
        return self

    def get(self):
        return self.value

    def update(self, value):
        self.value = value

    def registerTimer(self, at):
        self.calls += 1
        self.timers.add(at)

    def deleteTimer(self, at):
        self.calls += 1
        self.timers.remove(at)  # Spark warns of one that is gone

    def listTimers(self):
        self.calls += 1
        return iter(sorted(self.timers))


class Now:
    def __init__(self, ms):
        self.ms = ms

    def getCurrentProcessingTimeInMs(self):
        return self.ms

    getExpiryTimeInMs = getCurrentProcessingTimeInMs  # noqa: N815 - Spark's name


class Waiting(CountingOperator):
    """Wants to run again ten seconds after rows, and emits one row when it does."""

    def process(self, batch, work):
        outcome = super().process(batch, work)
        due = batch.time_ms + 10_000 if batch.messages.num_rows else None
        results = outcome.results
        if not batch.messages.num_rows and not batch.drain:
            results = pa.Table.from_pylist([{"key": "woken", "count": batch.time_ms}], self.result_schema)
        return replace(outcome, results=results, next_due_ms=due)


@pytest.fixture
def shard(tmp_path, monkeypatch):
    def make(query_id, number, version):
        return ShardJob(query_id, number, tmp_path / "local", Waiting(), KEY, open_changelog(str(tmp_path / "log")))

    wrapper = ShardProcessor(ProcessorPlan({12: 0}, make))
    state = Timers()
    wrapper.init(state)
    wrapper.version = 0
    monkeypatch.setattr(shard_task, "query_and_version", lambda: ("q", wrapper.version))
    return wrapper, state


def packed(offsets, time_ms, *, drain=False, malformed=(), of=0):
    """Give what the shard gets of messages that come to shard `of`."""
    n = len(offsets)
    plan = packing.PackPlan((12, 13), KEY, False, None, {0: "orders"})
    if drain:
        row = pa.record_batch({"drain": [True], "adopt": ["{}"]})
        rows = packing.pack_control(row, plan.grouping, time_ms).to_pandas()
    else:
        batch = pa.RecordBatch.from_pydict(
            {
                "_stream": pa.array([0] * n, pa.int32()),
                "_partition": pa.array([0] * n, pa.int32()),
                "_offset": pa.array(offsets, pa.int64()),
                "_time": pa.array([o * 10 for o in offsets], pa.int64()),
                "_shard": pa.array([of] * n, pa.int32()),
                "_timestamp": pa.array([0] * n, pa.int64()),
                "_key": pa.array([None] * n, pa.binary()),
                "_raw": pa.array([None] * n, pa.binary()),
                "_malformed": pa.array(["not JSON" if o in malformed else None for o in offsets], pa.string()),
                "key": pa.array(["a"] * n),
            }
        )
        rows = packing.pack(batch, plan, time_ms).to_pandas()
    return iter([rows[rows["shard"] == 12]])


def fired(wrapper, state, ms):
    """Have the timers fire that are due, behind the rows; Spark deletes each afterwards."""
    outputs = []
    for at in sorted(at for at in state.timers if at <= ms):
        outputs += wrapper.handleExpiredTimer((12,), Now(ms), Now(at))
        state.timers.remove(at)
    return outputs


def rows_of(outputs):
    found = []
    for output in outputs:
        assert isinstance(output, pd.DataFrame)
        for data in output["results"]:
            found += frames.from_ipc(data).to_pylist() if data is not None else []
    return found


def test_a_timer_and_rows_in_one_attempt_make_one_commit(shard):
    wrapper, state = shard
    assert rows_of(wrapper.handleInputRows((12,), packed([0, 1], 1_000), Now(1_000))) == [{"key": "a", "count": 2}]
    assert state.timers == {11_000}
    # ten seconds later rows come, and Spark fires the old timer in the same attempt, with the new pointer in its state
    wrapper.version = 1
    state.timers = {11_000}
    first = rows_of(wrapper.handleInputRows((12,), packed([2], 11_000), Now(11_000)))
    committed = decode(state.value[0]).commit
    second = rows_of(fired(wrapper, state, 11_000))
    assert first == [{"key": "a", "count": 3}]
    assert second == []
    assert decode(state.value[0]).commit == committed
    assert state.timers == {21_000}


def test_what_is_due_later_each_time_leaves_the_timer_until_it_fires(shard):
    wrapper, state = shard
    list(wrapper.handleInputRows((12,), packed([0], 1_000), Now(1_000)))
    assert (state.timers, state.calls) == ({11_000}, 2)  # nothing was there to be deleted
    for wrapper.version, now in enumerate([2_000, 9_000, 11_500], 1):
        list(wrapper.handleInputRows((12,), packed([wrapper.version], now), Now(now)))
        assert decode(state.value[0]).next_due_ms == now + 10_000
        assert (state.timers, state.calls) == ({11_000}, 2), "three round trips are saved"
    assert fired(wrapper, state, 11_500) == [], "the rows were committed"
    assert (state.timers, state.calls) == ({21_500}, 4)
    wrapper.version = 4
    assert rows_of(fired(wrapper, state, 21_500)) == [{"key": "woken", "count": 21_500}]
    assert state.timers == set()


def test_a_timer_that_was_left_fires_early_when_no_rows_come(shard):
    wrapper, state = shard
    for wrapper.version, now in enumerate([1_000, 6_000]):
        list(wrapper.handleInputRows((12,), packed([wrapper.version], now), Now(now)))
    assert state.timers == {11_000}
    wrapper.version = 2
    assert fired(wrapper, state, 11_000) == [], "nothing is due yet"
    assert state.timers == {16_000}
    wrapper.version = 3
    assert rows_of(fired(wrapper, state, 16_000)) == [{"key": "woken", "count": 16_000}]


@pytest.mark.parametrize(
    ("first", "second", "left"),
    [
        ((1_000, 11_000), (2_000, 5_000), {5_000}),
        ((1_000, 11_000), (2_000, None), set()),
        ((1_000, None), (2_000, 5_000), {5_000}),
        ((9_000, 5_000), (1_000, 6_000), {6_000}),  # it was due, so the timer stands at 9,001; the clock went back
        ((9_000, 5_000), (9_500, 5_000), {9_501}),
        ((1_000, 11_000), (12_000, 11_000), {12_001}),
        ((1_000, 11_000), (500, 11_000), {11_000}),
    ],
)
def test_there_is_one_timer_and_none_that_is_late(shard, monkeypatch, first, second, left):
    wrapper, state = shard
    process, due = Waiting.process, [first[1], second[1]]
    monkeypatch.setattr(Waiting, "process", lambda *of: replace(process(*of), next_due_ms=due[wrapper.version]))
    for wrapper.version, now in enumerate([first[0], second[0]]):
        list(wrapper.handleInputRows((12,), packed([wrapper.version], now), Now(now)))
        fired(wrapper, state, now)
    assert state.timers == left


def test_a_start_sets_its_timers_anew(shard):
    wrapper, state = shard
    list(wrapper.handleInputRows((12,), packed([0], 1_000), Now(1_000)))
    make = wrapper._plan().job
    wrapper._plan = Deferred(replace(wrapper._plan(), job=lambda *of: replace(make(*of), incarnation=1)))
    wrapper.version, state.timers = 1, set()
    list(wrapper.handleInputRows((12,), packed([1], 2_000), Now(2_000)))
    assert state.timers == {12_000}


def test_a_timer_without_rows_runs_the_operator_when_it_is_due(shard):
    wrapper, state = shard
    list(wrapper.handleInputRows((12,), packed([0], 1_000), Now(1_000)))
    wrapper.version = 1
    assert rows_of(fired(wrapper, state, 11_000)) == [{"key": "woken", "count": 11_000}]
    assert decode(state.value[0]).commit.version == 1
    assert state.timers == set()


def test_a_timer_that_is_early_commits_nothing_and_stays_one(shard):
    wrapper, state = shard
    list(wrapper.handleInputRows((12,), packed([0], 1_000), Now(1_000)))
    wrapper.version = 1
    state.timers = {5_000}
    assert rows_of(fired(wrapper, state, 5_000)) == []
    assert decode(state.value[0]).commit.version == 0
    assert state.timers == {11_000}


def test_rows_of_another_shard_leave_what_a_function_asked_for(shard):
    wrapper, state = shard
    times = []

    def close(messages, context):
        times.append((messages.num_rows, context.time_ms))
        if messages.num_rows:
            context.run_again_at(11_000)

    make, operator = wrapper._plan().job, ProcessOperator(close, pa.schema(KEY), fields=["key"])
    wrapper._plan = Deferred(replace(wrapper._plan(), job=lambda *of: replace(make(*of), operator=operator)))
    list(wrapper.handleInputRows((12,), packed([0], 1_000), Now(1_000)))
    for wrapper.version in (1, 2):
        now = 4_000 * wrapper.version
        list(wrapper.handleInputRows((12,), packed([wrapper.version], now, of=1), Now(now)))
        assert (decode(state.value[0]).next_due_ms, state.timers) == (11_000, {11_000})
        assert decode(state.value[0]).commit.version == wrapper.version, "the positions went on"
    wrapper.version = 3
    list(fired(wrapper, state, 11_000))
    assert times == [(1, 1_000), (0, 11_000)]
    assert state.timers == set()


def test_a_shard_that_waits_for_nothing_does_not_ask_spark_for_its_timers(shard, monkeypatch):
    wrapper, state = shard
    process = Waiting.process
    monkeypatch.setattr(Waiting, "process", lambda *of: replace(process(*of), next_due_ms=None))
    asked = []
    monkeypatch.setattr(state, "listTimers", lambda: iter(asked.append(wrapper.version) or sorted(state.timers)))
    for version in range(2):
        wrapper.version = version
        list(wrapper.handleInputRows((12,), packed([version], 1_000), Now(1_000)))
    assert not asked
    monkeypatch.setattr(Waiting, "process", process)
    wrapper.version = 2
    list(wrapper.handleInputRows((12,), packed([2], 1_000), Now(1_000)))
    assert state.timers == {11_000}
    monkeypatch.setattr(Waiting, "process", lambda *of: replace(process(*of), next_due_ms=None))
    wrapper.version = 3
    list(wrapper.handleInputRows((12,), packed([3], 2_000), Now(2_000)))
    assert (asked, state.timers) == ([2, 3], set())


def test_the_drain_reaches_the_operator_and_is_remembered(shard):
    wrapper, state = shard
    list(wrapper.handleInputRows((12,), packed([0, 1, 2], 1_000), Now(1_000)))
    wrapper.version = 1
    [output] = wrapper.handleInputRows((12,), packed([], 2_000, drain=True), Now(2_000))
    assert {"key": "drained", "count": 3} in frames.from_ipc(output["results"][0]).to_pylist()
    assert json.loads(output["metrics"][0])["drained"] == 1
    assert decode(state.value[0]).drained == 1


def test_no_error_is_located_where_there_is_none(shard, monkeypatch):
    wrapper, _ = shard
    monkeypatch.setattr(shard_task, "located", None)
    [output] = wrapper.handleInputRows((12,), packed([0, 1], 1_000, malformed={1}), Now(1_000))
    [error] = frames.from_ipc(output["errors"][0]).to_pylist()
    assert (error["offset"], error["reason"]) == (1, "malformed")
    metrics = json.loads(output["metrics"][0])
    assert (metrics["errors"], metrics["errors_malformed"]) == (1, 1)


def test_a_retry_of_the_micro_batch_counts_once(shard):
    wrapper, state = shard
    list(wrapper.handleInputRows((12,), packed([0, 1], 1_000), Now(1_000)))
    committed = state.value
    wrapper.version = 1
    lost = rows_of(wrapper.handleInputRows((12,), packed([2, 3], 2_000), Now(2_000)))
    state.value = committed  # Spark did not commit the micro-batch: its state is as before
    again = rows_of(wrapper.handleInputRows((12,), packed([2, 3], 2_000), Now(2_000)))
    assert lost == again == [{"key": "a", "count": 4}]


def test_rows_that_leave_something_due_at_once_are_not_committed_again_by_the_timer(shard, monkeypatch):
    wrapper, state = shard
    process = Waiting.process

    def due_at_once(self, batch, work):
        return replace(process(self, batch, work), next_due_ms=batch.time_ms)

    monkeypatch.setattr(Waiting, "process", due_at_once)
    list(wrapper.handleInputRows((12,), packed([0], 1_000), Now(1_000)))
    committed = decode(state.value[0]).commit
    assert rows_of(fired(wrapper, state, 1_000)) == []
    assert decode(state.value[0]).commit == committed


def test_errors_of_the_operator_are_located_and_the_driver_is_told_of_clocks(shard, monkeypatch):
    wrapper, state = shard
    process = Waiting.process
    refused = {"stream": 0, "partition": 0, "offset": 1, "reason": "out_of_retention"}

    def refuse(self, batch, work):
        errors = (
            pa.Table.from_pylist([refused], ERROR_SCHEMA) if batch.messages.num_rows else ERROR_SCHEMA.empty_table()
        )
        return replace(process(self, batch, work), errors=errors)

    monkeypatch.setattr(Waiting, "process", refuse)
    wrapper._plan = Deferred(replace(wrapper._plan(), topics={0: "orders"}, max_ahead_ms=25))
    [output] = wrapper.handleInputRows((12,), packed([0, 1, 4], 1_000), Now(1_000))  # event times 0, 10 and 40
    [error] = frames.from_ipc(output["errors"][0]).to_pylist()
    assert (error["topic"], error["partition"], error["offset"], error["timestamp"]) == ("orders", 0, 1, 0)
    metrics = json.loads(output["metrics"][0])
    told = {"received": 3, "errors": 1, "errors_out_of_retention": 1, "leaps": 1}
    assert metrics | told == metrics
    assert metrics["leap"] == "orders-0, offset 4: by 30 ms"
    wrapper.version = 1
    [output] = fired(wrapper, state, 11_000)
    metrics = json.loads(output["metrics"][0])
    assert metrics["received"] == 0
    assert "leaps" not in metrics


# -- what Spark makes of a frame ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "made",
    [
        pa.RecordBatch.from_pylist(
            [
                {"shard": 3, "version": 2**60 + 1, "queued_in": 7, "results": b"\0a", "errors": None, "metrics": None},
                {"shard": 3, "version": 2**60 + 1, "queued_in": None, "results": b"", "errors": b"b", "metrics": "{}"},
            ],
            schema=shard_task.OUTPUT,
        ),
        pa.RecordBatch.from_pylist(
            [{"shard": 0, "version": 1, "queued_in": None, "results": None, "errors": None, "metrics": "{}"}],
            schema=shard_task.OUTPUT,
        ),
        pa.RecordBatch.from_pylist([], schema=shard_task.OUTPUT),
    ],
    ids=["several", "nulls", "none"],
)
def test_spark_gets_every_value_and_null_of_a_frame(made):
    frame = shard_task._frame(made)
    assert list(frame.columns) == made.schema.names
    for field in made.schema:
        column = frame[field.name]
        # as `pyspark.sql.conversion.PandasToArrowConversion` does
        assert pa.Array.from_pandas(column, type=field.type, mask=column.isnull(), safe=True).equals(made[field.name])


def test_spark_gets_every_value_and_null_of_what_a_sink_reports():
    made = pa.RecordBatch.from_pylist([{"shard": 1, "version": 2**53 + 1, "metrics": "{}"}], schema=parquet._REPORT)
    frame = shard_task._frame(made)
    for field in made.schema:
        column = frame[field.name]
        assert pa.Array.from_pandas(column, type=field.type, mask=column.isnull(), safe=True).equals(made[field.name])


# -- a sink whose files the operator's tasks write --------------------------------------------------------------------


@pytest.fixture
def writing(shard, tmp_path):
    """The wrapper, a Parquet sink, and what makes the directories of a micro-batch as the sink's `publish` does."""
    wrapper, state = shard
    sink = ParquetSink(tmp_path / "results", tmp_path / "errors")
    sink.open("q")
    wrapper._plan = Deferred(replace(wrapper._plan(), topics={0: "orders"}, writing=sink.writing()))
    return wrapper, state, sink


def test_files_are_written_where_the_operator_runs_and_what_is_reported_is_published(writing, tmp_path):
    wrapper, state, sink = writing
    attempts = sink.attempts(0)
    run = lambda: wrapper.handleInputRows((12,), packed([0, 1, 2], 1_000, malformed={1}), Now(1_000))  # noqa: E731
    list(run())
    state.value = None  # the task ran, and Spark gave it up
    [report] = run()
    assert list(report.columns) == [field.split()[0] for field in wrapper._plan().ddl.split(", ")]
    [row] = report.to_dict("records")
    assert (row["shard"], row["version"], row["results_rows"], row["errors_rows"]) == (0, 0, 1, 1)
    assert json.loads(row["metrics"])["received"] == 3
    assert {kind: len(list(path.iterdir())) for kind, path in attempts.items()} == {"results": 2, "errors": 2}
    [told] = sink.finish([row], 0, attempts)
    assert (told["results"], told["errors"]) == (1, 1)
    [results], [errors] = ([*(tmp_path / kind / "batch=0").iterdir()] for kind in ("results", "errors"))
    assert [(one["id"], one["count"]) for one in pq.read_table(results).to_pylist()] == [("0-0-0", 2)]
    assert [(one["id"], one["offset"]) for one in pq.read_table(errors).to_pylist()] == [("0-0-e0", 1)]


def test_a_shard_that_says_nothing_reports_no_file(writing):
    wrapper, _, sink = writing
    attempts = sink.attempts(0)
    [report] = wrapper.handleInputRows((12,), packed([], 1_000, drain=True), Now(1_000))
    [row] = report.to_dict("records")
    assert (row["errors_file"], row["errors_rows"]) == (None, 0)
    assert not list(attempts["errors"].iterdir())


def test_a_disk_that_refuses_the_sinks_files_is_named(writing, tmp_path, monkeypatch):
    wrapper, _, sink = writing
    sink.attempts(0)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("backend.sinks.parquet.sync", full)
    with pytest.raises(CrossedError) as caught:
        list(wrapper.handleInputRows((12,), packed([0], 1_000, malformed={0}), Now(1_000)))
    assert "[rewind:StorageFailed]" in str(caught.value)
    assert str(tmp_path / "results") in str(caught.value)


# -- a shard that queues --------------------------------------------------------------------------------------------


@pytest.fixture
def queueing(shard, tmp_path, monkeypatch):
    """The wrapper of a shard whose disk can be taken."""
    wrapper, state = shard
    make = wrapper._plan().job
    queue = Queue(open_files(tmp_path / "queue"), ByVersion.always(Waiting()), begins=True)
    snapshots = Snapshots(str(tmp_path / "snapshots"))
    job = lambda *of: replace(make(*of), queue=queue, snapshots=snapshots)  # noqa: E731
    wrapper._plan = Deferred(replace(wrapper._plan(), job=job, topics={0: "orders"}))

    def restored():
        since = decode(state.value[0]).since
        made = job("q", 0, 0)
        with scratch_directory(tmp_path, "restore") as scratch:
            log = made.changelog.read(0, since.commit)
            places = {"_time": [0, 10], "_stream": [0, 0], "_partition": [0, 0], "_offset": [0, 1]}
            rows = pa.table({**places, "key": ["a", "a"]})
            restore_shard(log, [made.operator.replay_rows(rows)], made.operator, scratch / "db")
            with RocksStore.open(scratch / "db", create=False) as store:
                store.checkpoint(scratch / "copy")
            snapshots.publish(log.record, scratch / "copy")
        return since.commit.name

    list(wrapper.handleInputRows((12,), packed([0, 1], 1_000), Now(1_000)))
    shutil.rmtree(tmp_path / "local")
    wrapper.version = 1
    return wrapper, state, restored


def said(outputs):
    return [json.loads(line) for output in outputs for line in output["metrics"] if line is not None]


def control(time_ms, adopt):
    row = pa.record_batch({"drain": [False], "adopt": [json.dumps(adopt)]})
    return iter([packing.pack_control(row, (12,), time_ms).to_pandas()])


def test_a_shard_that_queues_says_nothing_and_is_woken_in_every_micro_batch(queueing):
    wrapper, state, _ = queueing
    [output] = wrapper.handleInputRows((12,), packed([2, 3], 2_000), Now(2_000))
    assert (rows_of([output]), list(output["errors"])) == ([], [None])
    assert state.timers == {2_001}
    wrapper.version = 2
    [told] = said(fired(wrapper, state, 2_500))
    assert (told["decision"], told["queued"]) == ("queued", 2)
    assert "commit" not in told, "it has no state: housekeeping would keep it instead of what the queue begins with"
    assert state.timers == {2_501}


def test_a_row_that_asks_several_shards_is_each_ones(queueing):
    """All shards of a lost host are asked in one row."""
    wrapper, _, restored = queueing
    list(wrapper.handleInputRows((12,), packed([2, 3], 2_000), Now(2_000)))
    wrapper.version = 2
    rows = control(3_000, {"1": "0" * 20 + "_" + "a" * 32, "0": restored()})
    assert said(wrapper.handleInputRows((12,), rows, Now(3_000)))[0]["decision"] == "adopted"


def test_a_row_adopts_wherever_the_batch_time_stands(queueing):
    wrapper, _, restored = queueing
    list(wrapper.handleInputRows((12,), packed([2, 3], 2_000), Now(2_000)))
    wrapper.version = 2
    rows = control(1_500, {"0": restored()})  # the clock went back
    assert said(wrapper.handleInputRows((12,), rows, Now(1_500)))[0]["decision"] == "adopted"


def test_a_source_that_goes_back_is_found_while_it_is_queued(queueing):
    wrapper, _, _ = queueing
    list(wrapper.handleInputRows((12,), packed([2, 3], 2_000), Now(2_000)))
    wrapper.version = 2
    with pytest.raises(Exception, match="rewind:SourceWentBack"):
        list(wrapper.handleInputRows((12,), packed([3], 3_000), Now(3_000)))


def test_bad_input_comes_out_with_its_own_version_when_the_queue_is_adopted(queueing):
    wrapper, state, restored = queueing
    [output] = wrapper.handleInputRows((12,), packed([2, 3], 2_000, malformed=[3]), Now(2_000))
    assert output["errors"][0] is None
    commit = restored()
    wrapper.version = 2
    [output] = wrapper.handleInputRows((12,), control(3_000, {"0": commit}), Now(3_000))
    assert [None if pd.isna(one) else int(one) for one in output["queued_in"]] == [1]
    assert list(output["version"]) == [2]
    assert rows_of([output]) == [{"key": "a", "count": 3}]
    [error] = frames.from_ipc(output["errors"][0]).to_pylist()
    assert (error["offset"], error["reason"]) == (3, "malformed")
    assert said([output])[0]["received"] == 2
    assert state.timers == {12_000}  # ten seconds after the messages, which came at 2,000


def test_a_row_for_other_shards_runs_nothing(shard):
    wrapper, state = shard
    list(wrapper.handleInputRows((12,), packed([0], 1_000), Now(1_000)))
    wrapper.version = 1
    assert list(wrapper.handleInputRows((12,), control(2_000, {"1": "0" * 20 + "_" + "a" * 32}), Now(2_000))) == []
    assert decode(state.value[0]).commit.version == 0
    assert state.timers == {11_000}
