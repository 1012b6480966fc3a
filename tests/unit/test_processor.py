"""Spark's calls on the processor, made by hand: rows and a timer in one attempt, one timer, the drain, the output."""

from __future__ import annotations

import json
from dataclasses import replace

import pandas as pd
import pyarrow as pa
import pytest

from backend.batch import Outcome
from backend.spark import frames, packing, processor
from backend.spark.processor import ProcessorPlan, ShardProcessor
from recovery.attempt import ShardJob
from recovery.changelog import open_changelog
from recovery.pointer import decode
from tests.support.counting import CountingOperator

KEY = (pa.field("key", pa.string()),)


class Timers:
    """Spark's state for one grouping key: a value and a set of timers."""

    def __init__(self):
        self.value, self.timers = None, set()

    def getValueState(self, name, schema):
        return self

    def get(self):
        return self.value

    def update(self, value):
        self.value = value

    def registerTimer(self, at):
        self.timers.add(at)

    def deleteTimer(self, at):
        self.timers.discard(at)

    def listTimers(self):
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
        return Outcome(results, outcome.errors, next_due_ms=due, replay_from=outcome.replay_from)


@pytest.fixture
def shard(tmp_path, monkeypatch):
    def make(query_id, number):
        return ShardJob(query_id, number, tmp_path / "local", Waiting(), KEY, open_changelog(str(tmp_path / "log")))

    wrapper = ShardProcessor(ProcessorPlan({12: 0}, make))
    state = Timers()
    wrapper.init(state)
    wrapper.version = 0
    monkeypatch.setattr(processor, "_task", lambda: ("q", wrapper.version))
    return wrapper, state


def packed(offsets, time_ms, *, drain=False):
    n = len(offsets)
    if drain:
        columns = {"_drain": pa.array([True]), "_batch_ms": pa.array([time_ms], pa.int64())}
        batch = pa.RecordBatch.from_pydict(columns)
    else:
        batch = pa.RecordBatch.from_pydict(
            {
                "_stream": pa.array([0] * n, pa.int32()),
                "_partition": pa.array([0] * n, pa.int32()),
                "_offset": pa.array(offsets, pa.int64()),
                "_time": pa.array([o * 10 for o in offsets], pa.int64()),
                "_shard": pa.array([0] * n, pa.int32()),
                "_timestamp": pa.array([0] * n, pa.int64()),
                "_key": pa.array([None] * n, pa.binary()),
                "_raw": pa.array([None] * n, pa.binary()),
                "_malformed": pa.array([None] * n, pa.string()),
                "_batch_ms": pa.array([time_ms] * n, pa.int64()),
                "key": pa.array(["a"] * n),
            }
        )
    plan = packing.PackPlan((12,), KEY, False, None)
    return iter([packing.pack(batch, plan).to_pandas()])


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
    second = rows_of(wrapper.handleExpiredTimer((12,), Now(11_000), Now(11_000)))
    assert first == [{"key": "a", "count": 3}]
    assert second == []
    assert decode(state.value[0]).commit == committed
    assert state.timers == {21_000}


def test_a_timer_without_rows_runs_the_operator_when_it_is_due(shard):
    wrapper, state = shard
    list(wrapper.handleInputRows((12,), packed([0], 1_000), Now(1_000)))
    wrapper.version = 1
    assert rows_of(wrapper.handleExpiredTimer((12,), Now(11_000), Now(11_000))) == [{"key": "woken", "count": 11_000}]
    assert decode(state.value[0]).commit.version == 1
    assert state.timers == set()


def test_a_timer_that_is_early_commits_nothing_and_stays_one(shard):
    wrapper, state = shard
    list(wrapper.handleInputRows((12,), packed([0], 1_000), Now(1_000)))
    wrapper.version = 1
    state.timers = {5_000}
    assert rows_of(wrapper.handleExpiredTimer((12,), Now(5_000), Now(5_000))) == []
    assert decode(state.value[0]).commit.version == 0
    assert state.timers == {11_000}


def test_the_drain_reaches_the_operator_and_is_remembered(shard):
    wrapper, state = shard
    list(wrapper.handleInputRows((12,), packed([0, 1, 2], 1_000), Now(1_000)))
    wrapper.version = 1
    [output] = wrapper.handleInputRows((12,), packed([], 2_000, drain=True), Now(2_000))
    assert {"key": "drained", "count": 3} in frames.from_ipc(output["results"][0]).to_pylist()
    assert json.loads(output["metrics"][0])["drained"] == 1
    assert decode(state.value[0]).drained == 1


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
    assert rows_of(wrapper.handleExpiredTimer((12,), Now(1_000), Now(1_000))) == []
    assert decode(state.value[0]).commit == committed
