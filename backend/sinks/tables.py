"""From what the operator packed to what a reader gets: shared by all sinks, pure Arrow.

The core counts time in int64 milliseconds; readers get UTC timestamps. Every row gets a deterministic `id`: a
micro-batch that runs again gives the same rows the same ids, so a downstream system can drop what it has seen.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backend.batch import ERROR_SCHEMA, Operator, published_name
from backend.joins.spec import JOIN_FIELDS

FORMAT = 1
"""Version of the columns that sinks write, in the Parquet files' metadata under `rewind.format`."""

RESULTS, ERRORS = "results", "errors"
KINDS = (RESULTS, ERRORS)
"""The two outputs, in the order in which they are published."""
_JOIN = [field.name for field in JOIN_FIELDS]
_JOIN_TIMES = ("left_time", "right_time")
TIMES = {RESULTS: ("window_start", "window_end", *_JOIN_TIMES), ERRORS: ("timestamp", "event_time")}
"""Our own times: milliseconds in the core, timestamps for readers."""
_TIME = pa.timestamp("ms", tz="UTC")
ID_FIELDS = [
    # "<version>-<shard>-<sequence>"; errors: "<version>-<shard>-e<sequence>"
    pa.field("id", pa.string(), nullable=False),
    pa.field("version", pa.int64(), nullable=False),
    pa.field("shard", pa.int32(), nullable=False),
    pa.field("sequence", pa.int64(), nullable=False),
]
"""The leading columns of everything that a sink writes; `sequence` counts from 0 per shard and version.

`version` is the micro-batch that the rows' input came in. A shard that queued it, because its state was being restored,
brings them out in a later one.
"""


@cache
def warm_up() -> None:
    """Load what writing needs before there is something to write; once in a worker, which serves many tasks.

    pyarrow imports pandas at its first scalar, which takes a second of a new worker's time: while the operator before
    it in the task still works, and not after it.
    """
    readable(pa.table({"window_start": pa.array([0])}), RESULTS, 0, 0, 0)


def unpack(data: bytes) -> pa.Table:
    """Read an Arrow IPC stream, as tasks pack a table with rows."""
    with pa.ipc.open_stream(pa.py_buffer(data)) as stream:
        return stream.read_all()


def readable(table: pa.Table, kind: str, version: int, shard: int, first: int) -> pa.Table:
    """Give rows their id, and time as timestamps; a message's own field `id` is called `id_` then.

    Args:
        table: What the operator emitted.
        kind: `RESULTS` or `ERRORS`.
        version: Spark's batch id.
        shard: The shard.
        first: `sequence` of the first row.
    """
    if kind == ERRORS:
        table = _within_dates(table)
    sequence = pa.array(np.arange(first, first + table.num_rows, dtype=np.int64))
    prefix = pa.scalar(f"{version}-{shard}-" + ("e" if kind == ERRORS else ""))
    ids = pc.binary_join_element_wise(prefix, sequence.cast(pa.string()), "")
    repeated = [
        pa.repeat(pa.scalar(version, pa.int64()), table.num_rows),
        pa.repeat(pa.scalar(shard, pa.int32()), table.num_rows),
    ]
    columns = [ids, *repeated, sequence]
    fields = list(ID_FIELDS)
    times = _times(kind, table.schema)
    for field, column in zip(table.schema, table.columns, strict=True):
        is_time = field.name in times and pa.types.is_int64(field.type)
        fields.append(field.with_type(_TIME if is_time else field.type).with_name(published_name(field.name)))
        columns.append(column.cast(_TIME) if is_time else column)
    return pa.table(columns, schema=pa.schema(fields, metadata={"rewind.format": str(FORMAT)}))


def read_frames(
    rows: Sequence[Mapping[str, Any]], kind: str, shard: int, version: int, *, dated: bool = False
) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Unpack a shard's frames of one output: rows as the operator made them, rows as readers get them.

    Args:
        rows: As `backend.sinks` says, in the order in which the shard's task made them.
        kind: `RESULTS` or `ERRORS`.
        shard: The shard.
        version: The micro-batch that is published.
        dated: Our own times of results are null where Spark has no date for them.
    """
    sequences: Counter[int] = Counter()
    for row in rows:
        if row[kind] is None:
            continue
        made, queued_in = unpack(row[kind]), row.get("queued_in")
        came_in = version if queued_in is None else queued_in
        shown = _within_spark(made) if dated and kind == RESULTS else made
        yield made, readable(shown, kind, came_in, shard, sequences[came_in])
        sequences[came_in] += made.num_rows


def _within_dates(errors: pa.Table) -> pa.Table:
    """Return errors whose event times every reader has a date for: Spark cannot read a file with one that it has not.

    An event time that is beyond is null, and in `detail`.
    """
    made, beyond = _cut(errors, "event_time")
    if beyond is None:
        return errors
    said = pc.binary_join_element_wise("the event time is", errors["event_time"].cast(pa.string()), "ms", " ")
    extended = pc.binary_join_element_wise(errors["detail"], said, "; ", null_handling="skip")
    detail = pc.if_else(beyond, extended, errors["detail"])
    return made.set_column(made.schema.get_field_index("detail"), made.schema.field("detail"), detail)


def _within_spark(results: pa.Table) -> pa.Table:
    """Return results of which our own times are null where Spark has no date for them."""
    for name in _times(RESULTS, results.schema):
        results, _ = _cut(results, name)
    return results


def _cut(table: pa.Table, name: str) -> tuple[pa.Table, pa.ChunkedArray | None]:
    """Return a table whose times are null where Spark has no date for them, and where that is; None for nowhere."""
    at = table.schema.get_field_index(name)
    if at < 0 or not pa.types.is_int64(table.schema.field(at).type):
        return table, None
    times = table.column(at)
    beyond = pc.fill_null(pc.or_(pc.less(times, -_LAST_MS), pc.greater(times, _LAST_MS)), False)
    if not pc.any(beyond).as_py():
        return table, None
    return table.set_column(at, table.schema.field(at), pc.if_else(beyond, None, times)), beyond


_LAST_MS = (2**63 - 1) // 1_000
"""Spark's timestamps are microseconds."""


def _times(kind: str, schema: pa.Schema) -> tuple[str, ...]:
    """Give the columns that are our own times here: the names of a join's may be those of a window's aggregates."""
    if kind == RESULTS:
        return _JOIN_TIMES if schema.names[: len(_JOIN)] == _JOIN else TIMES[RESULTS][:2]
    return TIMES[kind]


def empty_errors() -> pa.Table:
    """Return an errors table without rows, as `readable` makes it."""
    return readable(ERROR_SCHEMA.empty_table(), ERRORS, 0, 0, 0)


def empty_outputs(operator: Operator) -> dict[str, pa.Table]:
    """Return both outputs of a job without rows, as `readable` makes them."""
    return {RESULTS: readable(operator.result_schema.empty_table(), RESULTS, 0, 0, 0), ERRORS: empty_errors()}


def merge_metrics(texts: Iterable[str | None]) -> dict[str, Any]:
    """Put the metrics of a shard's rows together: numbers add up; of texts and of `drained` the last counts.

    >>> merge_metrics(['{"rows": 1, "drained": 4, "commit": "a"}', None, '{"rows": 2, "drained": -1, "commit": "b"}'])
    {'rows': 3, 'drained': 4, 'commit': 'b'}
    """
    total: dict[str, Any] = {}
    for text in texts:
        for name, value in (json.loads(text) if text else {}).items():
            if isinstance(value, str):
                total[name] = value
            elif name == "drained":
                total[name] = max(total.get(name, -1), value)
            else:
                total[name] = total.get(name, 0) + value
    return total


def by_shard(rows: Iterable[dict[str, Any]], version: int) -> dict[int, list[dict[str, Any]]]:
    """Return the frames of a micro-batch by shard, shards in order.

    Raises:
        RuntimeError: The sink was handed frames of another one.
    """
    shards: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        if row["version"] != version:
            raise RuntimeError(f"frames of micro-batch {row['version']} handed to the sink as micro-batch {version}")
        shards.setdefault(row["shard"], []).append(row)
    return dict(sorted(shards.items()))


def summary(shard: int, results: int, errors: int, metrics: dict[str, Any]) -> dict[str, Any]:
    """Give what `Sink.publish` returns for a shard."""
    return {"shard": shard, "results": results, "errors": errors, "metrics": metrics}
