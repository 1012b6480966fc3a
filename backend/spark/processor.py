"""The wrapper that Spark's stateful operator calls: one ValueState per shard holds the pointer, one timer wakes it.

`timeMode="ProcessingTime"` makes Spark call `handleInputRows` and then `handleExpiredTimer` of the same key in one task
attempt, each seeing the pointer that the other set (measured). So there is exactly one timer per shard, and when it
fires for a shard that already committed this micro-batch, it only sets the next one.

A timer that fires before anything is due costs no database: the pointer says when the operator wants to run again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
)

from backend.batch import ERROR_SCHEMA, Positions, SourcePartition
from backend.errors import RewindError
from backend.spark.assembling import assemble, packed_rows
from backend.spark.frames import to_ipc
from recovery.attempt import Done, ShardInput, ShardJob, by_reason, run_attempt
from recovery.killpoints import kill_point
from recovery.pointer import Pointer, decode, encode

OUTPUT_SCHEMA = "shard int, version bigint, results binary, errors binary, metrics string"
STATE_VARIABLE = "pointer"
STATE_SCHEMA = "value binary"


@dataclass(frozen=True, slots=True)
class ProcessorPlan:
    """What the processor needs on an executor; travels there once, inside Spark's closure.

    Attributes:
        shards: Grouping value -> shard.
        job: Makes the job of a shard, told the query id and the shard.
        sources: Shard -> source partitions that it reads, as far as known when the query started.
    """

    shards: dict[int, int]
    job: Callable[[str, int], ShardJob]
    sources: Mapping[int, tuple[SourcePartition, ...]] = field(default_factory=dict)


class ShardProcessor(StatefulProcessor):
    """One shard per grouping value."""

    def __init__(self, plan: ProcessorPlan) -> None:
        self._plan = plan

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the state; runs once on the driver too, where there is no task."""
        self._handle = handle
        self._pointer = handle.getValueState(STATE_VARIABLE, STATE_SCHEMA)

    def handleInputRows(  # noqa: N802 - Spark's name
        self,
        key: Any,
        rows: Iterator[pd.DataFrame],
        timerValues: TimerValues,  # noqa: N803
    ) -> Iterator[pd.DataFrame]:
        """Run an attempt on the packed rows of one shard."""
        query_id, version = _task()
        shard = self._plan.shards[int(key[0])]
        job = self._plan.job(query_id, shard)

        def read(before: Positions) -> tuple[ShardInput, pa.Table]:
            known = self._plan.sources.get(shard, ())
            assembled = assemble(packed_rows(rows), before, sources=known, fields=job.message_fields, where=job.where)
            ahead = assembled.errors.filter(pc.equal(assembled.errors["reason"], "in_future"))
            in_future = tuple(
                zip(*(ahead[name].to_pylist() for name in ("stream", "partition", "offset")), strict=True)
            )
            given = ShardInput(assembled.time_ms, assembled.messages, assembled.after, in_future, drain=assembled.drain)
            return given, assembled.errors

        yield self._attempt(job, version, read)

    def handleExpiredTimer(  # noqa: N802 - Spark's name
        self,
        key: Any,
        timerValues: TimerValues,  # noqa: N803
        expiredTimerInfo: ExpiredTimerInfo,  # noqa: N803
    ) -> Iterator[pd.DataFrame]:
        """Run an attempt without rows if something is due, or a drain was asked for."""
        query_id, version = _task()
        now = timerValues.getCurrentProcessingTimeInMs()
        pointer = self._read_pointer()
        if pointer is None or pointer.commit.version >= version:
            # Rows of this very micro-batch came first and were committed; they have set the next timer.
            return
        if pointer.next_due_ms is None or pointer.next_due_ms > now:
            self._rearm(pointer, now)
            return
        job = self._plan.job(query_id, self._plan.shards[int(key[0])])

        def read(before: Positions) -> tuple[ShardInput, pa.Table]:
            return ShardInput(now, None, dict(before)), ERROR_SCHEMA.empty_table()

        yield self._attempt(job, version, read)

    def close(self) -> None:
        """Nothing is held between calls."""

    def _attempt(
        self, job: ShardJob, version: int, read: Callable[[Positions], tuple[ShardInput, pa.Table]]
    ) -> pd.DataFrame:
        bad = ERROR_SCHEMA.empty_table()
        time_ms = 0

        def read_and_keep_errors(before: Positions) -> ShardInput:
            nonlocal bad, time_ms
            given, bad = read(before)
            time_ms = given.time_ms
            return given

        done = run_attempt(job, self._read_pointer(), version, read_and_keep_errors)
        kill_point("before_pointer", version)
        self._pointer.update((encode(done.pointer),))
        self._rearm(done.pointer, time_ms)
        kill_point("after_pointer", version)
        return _output(job.shard, version, done, bad)

    def _read_pointer(self) -> Pointer | None:
        value = self._pointer.get()
        return decode(bytes(value[0])) if value is not None else None

    def _rearm(self, pointer: Pointer, now: int) -> None:
        """Leave exactly one timer, after `now`, if anything is waited for; none otherwise."""
        wake = max(now + 1, pointer.next_due_ms) if pointer.next_due_ms is not None else None
        timers = list(self._handle.listTimers())
        for timer in timers:
            if timer != wake:
                self._handle.deleteTimer(timer)
        if wake is not None and wake not in timers:
            self._handle.registerTimer(wake)


def _task() -> tuple[str, int]:
    context = TaskContext.get()
    if context is None:
        raise RewindError("the stateful operator was called outside a task")
    query_id = context.getLocalProperty("sql.streaming.queryId")
    version = context.getLocalProperty("streaming.sql.batchId")
    if query_id is None or version is None:
        raise RewindError("the task does not say which query and micro-batch it belongs to")
    return query_id, int(version)


def _output(shard: int, version: int, done: Done, bad: pa.Table) -> pd.DataFrame:
    errors = pa.concat_tables([bad, done.outcome.errors.cast(ERROR_SCHEMA)])
    done.metrics |= {"errors": errors.num_rows, **by_reason("errors", errors)}
    results = done.outcome.results
    return pd.DataFrame(
        {
            "shard": pd.Series([shard], dtype="int32"),
            "version": pd.Series([version], dtype="int64"),
            "results": pd.Series([to_ipc(results) if results.num_rows else None], dtype=object),
            "errors": pd.Series([to_ipc(errors) if errors.num_rows else None], dtype=object),
            "metrics": pd.Series([json.dumps({**done.metrics, "commit": done.pointer.commit.name})], dtype=object),
        }
    )
