"""Rows that stand for several messages (backend.windows.aligned.combining): their columns, and what is asked of them.

A combined row (format of frames, backend.spark.pack.frames) has `MESSAGE_FIELDS` and the group key of its first
message, then

* the partial columns of the incremental aggregates, numbered, because a field may have any name;
* `_count` and `_last`: how many messages, and the offset of the last one;
* `_stamp`, and `_offsets`, `_times`, `_stamps`: its own timestamp, and each message's distances from the first one in
  offset, event time and own timestamp (null where it has none). A row that turns out to be refused comes out of it
  message by message, with its place and its times.

The fields of such a message are not there any more, so the errors of these windows have no value, wherever messages
were combined and where not: `fetch_refused` reads it from the source.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from backend.aggregates import IncrementalPlan
from backend.batch import ERROR_SCHEMA, OFFSET, PARTITION, STREAM, TIME
from backend.windows.columns.arrays import IntArray

COUNT, LAST, STAMP, OFFSETS, TIMES, STAMPS = "_count", "_last", "_stamp", "_offsets", "_times", "_stamps"
OWN_FIELDS = (
    *(pa.field(name, pa.int64(), nullable=False) for name in (COUNT, LAST, STAMP)),
    *(pa.field(name, pa.list_(pa.int32()), nullable=False) for name in (OFFSETS, TIMES, STAMPS)),
)


def is_combined(messages: pa.Table) -> bool:
    """Tell whether rows are combined ones."""
    return COUNT in messages.column_names


def counts(messages: pa.Table) -> IntArray:
    """Return how many messages each row stands for."""
    return _numbers(messages, COUNT) if is_combined(messages) else np.ones(messages.num_rows, np.int64)


def last_offsets(messages: pa.Table) -> IntArray:
    """Return the last offset of each row."""
    return _numbers(messages, LAST if is_combined(messages) else OFFSET)


def fold(messages: pa.Table, plan: IncrementalPlan, group: IntArray, count: int) -> pa.Table:
    """Return one partial per group, of messages or of combined rows; see `IncrementalPlan.fold`."""
    if not is_combined(messages):
        return plan.fold(messages, group, count)
    names = [accumulator_name(at) for at in range(len(plan.accumulator_schema))]
    return plan.merge(messages.select(names).rename_columns(plan.accumulator_schema.names), group, count)


def messages_of(rows: pa.Table) -> pa.Table:
    """Return place and times of each message of combined rows: columns of `ERROR_SCHEMA`, in order of place."""
    sizes = _numbers(rows, COUNT)
    owner = np.repeat(np.arange(len(sizes)), sizes)

    def summed(first: str, distances: str) -> pa.Array:
        flat = rows.column(distances).combine_chunks().flatten()
        known = np.asarray(flat.is_null()) if flat.null_count else None
        return pa.array(_numbers(rows, first)[owner] + np.asarray(flat.fill_null(0), np.int64), mask=known)

    columns = {
        "stream": rows.column(STREAM).take(pa.array(owner)),
        "partition": rows.column(PARTITION).take(pa.array(owner)),
        "offset": summed(OFFSET, OFFSETS),
        "timestamp": summed(STAMP, STAMPS),
        "event_time": summed(TIME, TIMES),
    }
    schema = pa.schema([ERROR_SCHEMA.field(name) for name in columns])
    table = pa.table([array.cast(f.type) for array, f in zip(columns.values(), schema, strict=True)], schema=schema)
    return table.sort_by([(name, "ascending") for name in ("stream", "partition", "offset")])


def error_rows(rows: pa.Table, reason: str, detail: str) -> pa.Table:
    """Return rows of the errors output for the messages of combined rows."""
    table = messages_of(rows)
    columns = {name: table.column(name) for name in table.column_names}
    columns |= {"reason": pa.repeat(reason, table.num_rows), "detail": pa.repeat(detail, table.num_rows)}
    arrays = [columns[f.name] if f.name in columns else pa.nulls(table.num_rows, f.type) for f in ERROR_SCHEMA]
    return pa.table([array.cast(f.type) for array, f in zip(arrays, ERROR_SCHEMA, strict=True)], schema=ERROR_SCHEMA)


def accumulator_name(at: int) -> str:
    """Return the name of a partial column."""
    return f"_partial_{at}"


def _numbers(table: pa.Table, name: str) -> IntArray:
    return np.asarray(table.column(name), dtype=np.int64)
