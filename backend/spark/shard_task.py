"""What the stateful operator does in a task: the rows of one shard, or its timer, become an attempt.

`timeMode="ProcessingTime"` makes Spark call `handleInputRows` and then `handleExpiredTimer` of the same key in one task
attempt, each seeing the pointer that the other set (measured). So there is exactly one timer per shard, and when it
fires for a shard that already committed this micro-batch, it only sets the next one.

A timer that fires before anything is due costs no database: the pointer says when the operator wants to run again. So
what is due later with each micro-batch, such as when sources are idle, leaves the timer where it is, and only when it
fires is it set anew: each call on Spark's timers is a round trip, and a change a row of Spark's state. That a timer is
there and not too late is known where the commit before was of this start of the query and left nothing due: its timer
stands at what the pointer says, or earlier. Otherwise, as after a clock that went back, it is set anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle, ValueState

from backend.allocation import begin_task
from backend.batch import ERROR_SCHEMA, SourcePartition, counts_offsets
from backend.boundary import marking, token
from backend.errors import UserCodeFailed
from backend.sinks.sealing import Writing, report_schema
from backend.spark.pack.assembling import assemble, leaps, located, packed_rows
from backend.spark.pack.frames import to_ipc
from backend.spark.task import query_and_version
from backend.windows.operator import combining_of
from recovery.attempt import positions_of, run_attempt
from recovery.commit.option_sets import ByVersion
from recovery.commit.pointer import Pointer, RestoringPointer, decode, encode
from recovery.jobs import ShardJob
from recovery.killpoints import kill_point
from recovery.operate import Done, by_reason
from recovery.share import ShardInput

if TYPE_CHECKING:
    import pandas as pd

OUTPUT_SCHEMA = "shard int, version bigint, queued_in bigint, results binary, errors binary, metrics string"
OUTPUT = report_schema(OUTPUT_SCHEMA)
"""What an attempt made, as `backend.sinks` says; for Spark, `OUTPUT_SCHEMA`."""


@dataclass(frozen=True, slots=True)
class ProcessorPlan:
    """What the processor needs on an executor; travels there once, inside Spark's closure.

    Attributes:
        shards: Grouping value -> shard.
        job: Makes the job of a shard in a micro-batch, told the query id, the shard and the version.
        sources: Shard -> source partitions that it reads, as far as known at the start when the version was planned.
        topics: Topic by stream, for the errors.
        ranked: Streams whose rows get their offsets in the shard.
        max_ahead_ms: A message that moves a watermark by more than this is reported; None reports none.
        mark: The driver's token (`backend.boundary`).
        writing: How the sink's files are written, right here; None hands what was made on to the sink.
    """

    shards: dict[int, int]
    job: Callable[[str, int, int], ShardJob]
    sources: ByVersion[Mapping[int, tuple[SourcePartition, ...]]] = field(default_factory=lambda: ByVersion.always({}))
    topics: Mapping[int, str] = field(default_factory=dict)
    ranked: frozenset[int] = frozenset()
    max_ahead_ms: int | None = None
    mark: str = field(default_factory=token)
    writing: Writing | None = None

    @property
    def ddl(self) -> str:
        """The schema of what the processor gives, for Spark."""
        return self.writing.ddl if self.writing is not None else OUTPUT_SCHEMA

    def task(self, handle: StatefulProcessorHandle, pointer: ValueState) -> ShardTask:
        """Give what a task does with it."""
        return ShardTask(self, handle, pointer)


class ShardTask:
    """A task's work on the shards that it is given rows or timers of.

    Args:
        plan: What the processor needs.
        handle: Spark's, for the timers.
        pointer: The state.
    """

    def __init__(self, plan: ProcessorPlan, handle: StatefulProcessorHandle, pointer: ValueState) -> None:
        self._plan, self._handle, self._pointer = plan, handle, pointer

    def on_rows(self, key: Any, rows: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        """Run an attempt on the packed rows of one shard."""
        with marking(self._plan.mark):
            begin_task()
            query_id, version = query_and_version()
            shard = self._plan.shards[int(key[0])]
            job, pointer = self._plan.job(query_id, shard, version), self._read_pointer()
            given = assemble(
                packed_rows(rows),
                positions_of(pointer),
                sources=self._plan.sources.at(version).get(shard, ()),
                fields=job.message_fields,
                shard=shard,
                where=job.where,
                topics=self._plan.topics,
                ranked=self._plan.ranked,
                version=version,
                combining=None if self._plan.ranked else combining_of(job.operator),
                by_offset=counts_offsets(job.operator),
            )
            restoring = isinstance(pointer, RestoringPointer)
            if pointer is not None and self._plan.sources.changed(pointer.commit.version, version):
                given = replace(given, came=True)  # what waits may be due under the options that are new
            if pointer is None or given.came or restoring or _is_due(pointer, given.time_ms):
                yield self._attempt(job, pointer, version, given)
            else:
                self._rearm(pointer, given.time_ms)  # the driver said something to other shards

    def on_timer(self, key: Any, now: int) -> Iterator[pd.DataFrame]:
        """Run an attempt without rows if something is due, or a drain was asked for.

        Args:
            key: The grouping value.
            now: The batch time, milliseconds.
        """
        with marking(self._plan.mark):
            query_id, version = query_and_version()
            pointer = self._read_pointer()
            if pointer is None:
                return
            # Rows of this very micro-batch may have been committed first, and may have left the timer that fires.
            if pointer.commit.version >= version or not _is_due(pointer, now):
                self._rearm(pointer, now, fired=True)
                return
            job = self._plan.job(query_id, self._plan.shards[int(key[0])], version)
            given = ShardInput(now, None, positions_of(pointer), came=False)
            yield self._attempt(job, pointer, version, given, fired=True)

    def _attempt(
        self, job: ShardJob, pointer: Pointer | None, version: int, given: ShardInput, *, fired: bool = False
    ) -> pd.DataFrame:
        try:
            done = run_attempt(job, pointer, version, lambda _: given)
        except UserCodeFailed as error:
            where = "; ".join(filter(None, [f"{job.where}, micro-batch {version}", error.where]))
            raise UserCodeFailed(error.what, where=where, why=error.why, command=error.command) from error
        kill_point("before_pointer", version)
        self._pointer.update((encode(done.pointer),))
        before, after = pointer.next_due_ms if pointer is not None else None, done.pointer.next_due_ms
        if (before is not None or after is not None) and (fired or not _has_timer(pointer, done)):
            self._rearm(done.pointer, given.time_ms, fired=fired)
        kill_point("after_pointer", version)
        made = _output(job.shard, version, done, self._plan)
        if self._plan.writing is not None:  # in this process: a second function in the query would cost another one
            made = self._plan.writing.write(made, version)
        return _frame(made)

    def _read_pointer(self) -> Pointer | None:
        value = self._pointer.get()
        return decode(bytes(value[0])) if value is not None else None

    def _rearm(self, pointer: Pointer, now: int, *, fired: bool = False) -> None:
        """Leave exactly one timer, after `now`, if anything is waited for; none otherwise.

        Where it fired Spark deletes it, afterwards, and would warn of one that is gone.
        """
        wake = max(now + 1, pointer.next_due_ms) if pointer.next_due_ms is not None else None
        timers = list(self._handle.listTimers())
        for timer in timers:
            if timer != wake and not (fired and timer <= now):
                self._handle.deleteTimer(timer)
        if wake is not None and wake not in timers:
            self._handle.registerTimer(wake)


def _is_due(pointer: Pointer, now: int) -> bool:
    return pointer.next_due_ms is not None and pointer.next_due_ms <= now


def _has_timer(pointer: Pointer | None, done: Done) -> bool:
    """Tell whether the timer that the commit before left is there for certain, and not later than what is due now."""
    if pointer is None or isinstance(pointer, RestoringPointer) or done.began_ms is None:
        return False
    before, after = pointer.next_due_ms, done.pointer.next_due_ms
    return before is not None and after is not None and done.began_ms < before <= after


def _frame(made: pa.RecordBatch) -> pd.DataFrame:
    import pandas as pd  # a second of a core: only where rows come

    # one block of objects: a column with a type of its own takes longer to make and to take apart
    cells = np.empty((made.num_rows, made.num_columns), object)
    for at, column in enumerate(made.columns):
        cells[:, at] = column.to_pylist()  # a null is no float
    return pd.DataFrame(cells, columns=made.schema.names)


def _output(shard: int, version: int, done: Done, plan: ProcessorPlan) -> pa.RecordBatch:
    """Return what an attempt made: a row per micro-batch that it ran, the metrics of all in the last one."""
    rows: list[dict[str, Any]] = []
    received, bad, leap_count, farthest = 0, [], 0, ""
    for one in done.ran:
        given = one.read()
        bad.append(given.errors)
        if one.outcome.errors.num_rows:
            refused = located(one.outcome.errors.cast(ERROR_SCHEMA), plan.topics, given)
            bad[-1] = pa.concat_tables([given.errors, refused])
        received += given.errors.num_rows + one.count
        count, leap = leaps(given, one.before, plan.max_ahead_ms, plan.topics)
        leap_count, farthest = leap_count + count, leap or farthest
        rows.append(
            {
                "queued_in": one.version if one.version != version else None,
                "results": to_ipc(one.outcome.results) if one.outcome.results.num_rows else None,
                "errors": to_ipc(bad[-1]) if bad[-1].num_rows else None,
            }
        )
    all_bad = bad[0] if len(bad) == 1 else pa.concat_tables([ERROR_SCHEMA.empty_table(), *bad])
    metrics = {**done.metrics, "received": received, "errors": all_bad.num_rows, **by_reason("errors", all_bad)}
    if farthest:
        metrics |= {"leaps": leap_count, "leap": farthest}
    if done.ran:
        metrics["commit"] = done.pointer.commit.name
    rows = rows or [{}]
    rows[-1]["metrics"] = json.dumps(metrics)
    return pa.RecordBatch.from_pylist([{"shard": shard, "version": version, **row} for row in rows], OUTPUT)
