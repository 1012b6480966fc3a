"""The pack stage: what `pack_input` gives of an Arrow batch becomes one frame per shard
(`backend.spark.pack.frames`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backend.aggregates.groups import stable_order
from backend.batch import (
    ERROR_SCHEMA,
    EVENT_TIMES,
    MAX_EVENT_TIME,
    MESSAGE_FIELDS,
    MIN_EVENT_TIME,
    NO_TIME,
    OFFSET,
    OWN_TIMESTAMP,
    PARTITION,
    STREAM,
    TIME,
)
from backend.chunks import is_coded
from backend.spark.pack import frames
from backend.spark.pack.frames import FORMAT, Header, Slice, column_name, encode_header, rises, to_ipc_buffer
from backend.spark.pack.judging import Reasons, filled, judge, latest
from backend.spark.pack.narrow import narrow
from backend.steps import DROPPED, PASSED, POISON
from backend.windows.aligned.combining import Combining
from backend.windows.columns.arrays import IntArray, Mask
from backend.windows.micro_batch import json_rows, numbers
from recovery.commit.option_sets import ByVersion

Binary: TypeAlias = "bytes | pa.Buffer | None"


@dataclass(frozen=True, slots=True)
class PackPlan:
    """What the pack stage needs to know.

    Attributes:
        grouping: Grouping value per shard.
        fields: The operator's input fields, with the Arrow types that frames carry. A frame carries those that are of
            its input, and `assemble` fills the others with nulls.
        by_partition: True when a source partition belongs to one shard, so other shards need not hear of it.
        max_ahead_ms: See `backend.spark.pack.judging`; None switches the check off.
        topics: Topic by stream, for the errors.
        combining: Makes combined rows of messages; None where the operator wants each message.
    """

    grouping: tuple[int, ...]
    fields: tuple[pa.Field, ...]
    by_partition: bool
    max_ahead_ms: int | None
    topics: Mapping[int, str] = field(default_factory=dict)
    combining: Combining | None = None


def packer(
    plans: ByVersion[PackPlan], clock: Callable[[], int]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the stage.

    Args:
        plans: By version: a micro-batch that runs again refuses, and combines, what it did before.
        clock: Returns the batch time that Spark logged, where a task runs.
    """

    def pack_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        plan, time_ms = plans.at(0 if plans.only else _version()), clock()
        for batch in batches:
            if batch.num_rows:
                yield pack(batch, plan, time_ms)

    return pack_batches


def _version() -> int:
    from backend.spark.task import query_and_version  # the stage itself is tested and simulated without Spark

    return query_and_version()[1]


def pack(batch: pa.RecordBatch, plan: PackPlan, time_ms: int) -> pa.RecordBatch:
    """Turn one Arrow batch of source rows into packed rows (`PACKED_ARROW`) of a micro-batch with a batch time."""
    batch, (stream, partition, offset) = _in_offset_order(batch)
    shard = numbers(batch, frames.SHARD_IN)
    times = filled(batch.column(TIME), 0)
    reasons = _reasons(batch, time_ms, plan)
    good = np.array([reason is None for reason in reasons]) if reasons is not None else None
    refused = ~good if good is not None else None
    if frames.VERDICT_IN in batch.schema.names and (dropped := numbers(batch, frames.VERDICT_IN) == DROPPED).any():
        good = ~dropped if good is None else good & ~dropped
        refused = None if refused is None else refused & ~dropped
    before, slices, first = _prefix_maxima(stream, partition, offset, times, good)
    header = encode_header(Header(FORMAT, time_ms, slices))

    columns = [batch.column(name) for name in (STREAM, PARTITION, OFFSET)]
    here = set(batch.schema.names)
    carried = [f for f in plan.fields if column_name(f.name) in here]
    columns += [pa.array(times), pa.array(before), *(batch.column(column_name(f.name)) for f in carried)]
    columns.append(batch.column(frames.TIMESTAMP_IN))
    coded = plan.combining.coded if plan.combining is not None else {f.name for f in carried}
    kinds = [
        f.with_type(c.type) if f.name in coded and is_coded(c.type) else f
        for f, c in zip(carried, columns[5:-1], strict=True)
    ]
    schema = pa.schema([*MESSAGE_FIELDS, *kinds, frames.TIMESTAMP_FIELD])
    columns = [c if c.type == f.type else c.cast(f.type) for c, f in zip(columns, schema, strict=True)]
    messages = pa.RecordBatch.from_arrays(columns, schema=schema)

    shards = np.unique(shard).tolist() if plan.by_partition else range(len(plan.grouping))
    codes = numbers(batch, frames.CODES_IN) if frames.CODES_IN in batch.schema.names else None
    found = _frames(messages, shard, codes, good, shards, plan)
    bad = np.flatnonzero(refused) if refused is not None else np.empty(0, np.int64)
    owners = shard[first]
    rows: list[tuple[int, bytes, Binary, Binary]] = []
    for number in shards:
        errors = _errors(batch, plan, time_ms, reasons, bad[shard[bad] == number]) if len(bad) else None
        own = header
        if plan.by_partition:
            mine = [one for one, owner in zip(slices, owners, strict=True) if owner == number]
            own = encode_header(Header(FORMAT, time_ms, mine))
        rows.append((plan.grouping[number], own, found[number], errors))
    return _packed(rows)


def _frames(
    messages: pa.RecordBatch,
    shard: IntArray,
    codes: IntArray | None,
    good: Mask | None,
    shards: Sequence[int],
    plan: PackPlan,
) -> dict[int, Binary]:
    """Return the frame of each shard: its messages, or combined rows of them."""
    if good is not None:
        messages, shard, codes = _chosen(good, messages, shard, codes)
    if not messages.num_rows:
        return dict.fromkeys(shards)
    combined = None
    if plan.combining is not None:
        if (first := _first_of_repeated(messages)) is not None:
            messages, shard, codes = _chosen(first, messages, shard, codes)
        table = pa.Table.from_batches([messages])
        combined = plan.combining.combined(table, messages.column(OWN_TIMESTAMP), shard, codes)
    if combined is not None:
        rows, shard = narrow(combined[0], len(shards)), combined[1]
    else:
        rows = narrow(pa.Table.from_batches([messages]), len(shards))
        if (shard != shard[0]).any():
            order = stable_order(shard, len(plan.grouping))
            rows, shard = rows.take(pa.array(order)), shard[order]
    wanted = np.array(shards, np.int64)
    low, high = (np.searchsorted(shard, edges).tolist() for edges in (wanted, wanted + 1))
    cuts = zip(shards, low, high, strict=True)
    return {n: to_ipc_buffer(rows.slice(a, b - a)) if a < b else None for n, a, b in cuts}


def _chosen(
    mask: Mask, messages: pa.RecordBatch, shard: IntArray, codes: IntArray | None
) -> tuple[pa.RecordBatch, IntArray, IntArray | None]:
    return messages.filter(pa.array(mask)), shard[mask], codes[mask] if codes is not None else None


def _first_of_repeated(messages: pa.RecordBatch) -> Mask | None:
    """Tell the first of messages that came twice, which stand beside one another; None where none did."""
    repeated = np.ones(messages.num_rows - 1, np.bool_)
    for name in (OFFSET, PARTITION, STREAM):
        column = numbers(messages, name)
        repeated &= column[1:] == column[:-1]
        if not repeated.any():
            return None
    return np.concatenate([[True], ~repeated])


def _packed(rows: Sequence[tuple[int, bytes, Binary, Binary]]) -> pa.RecordBatch:
    shards, *binaries = zip(*rows, strict=True)
    columns = [pa.array(list(shards), pa.int32()), *map(_binaries, binaries)]
    return pa.RecordBatch.from_arrays(columns, schema=frames.PACKED_ARROW)


def _binaries(values: Sequence[Binary]) -> pa.BinaryArray:
    """Return values as a column; they are copied once."""
    ends = np.cumsum([0, *(0 if value is None else len(value) for value in values)])
    if int(ends[-1]) >= 2**31:
        raise ValueError(f"{ends[-1]} bytes of packed rows at once, at most {2**31 - 1} are allowed")
    known = pa.array([value is not None for value in values]).buffers()[1]
    content = pa.py_buffer(b"".join(value for value in values if value is not None))
    return pa.Array.from_buffers(pa.binary(), len(values), [known, pa.py_buffer(ends.astype(np.int32)), content])


def pack_control(rows: pa.RecordBatch, grouping: Sequence[int], time_ms: int) -> pa.RecordBatch:
    """Hand the control row of a micro-batch to every shard.

    Args:
        rows: What `backend.spark.control` gives: `drain`, and `adopt` as JSON.
        grouping: Grouping value per shard.
        time_ms: The batch time that Spark logged.
    """
    adopt: dict[int, str] = {}
    for text in rows.column("adopt").to_pylist():
        adopt.update({int(shard): commit for shard, commit in json.loads(text).items()})
    header = encode_header(Header(FORMAT, time_ms, [], any(rows.column("drain").to_pylist()), adopt))
    return _packed([(value, header, None, None) for value in grouping])


def _in_offset_order(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, list[IntArray]]:
    """Return a batch in order of stream, source partition and offset, and these."""
    stream, partition, offset = places = [numbers(batch, name) for name in (STREAM, PARTITION, OFFSET)]
    if _is_one(stream) and _is_one(partition) and bool((offset[1:] >= offset[:-1]).all()):
        return batch, places
    if rises(stream, partition, offset, strictly=False):
        return batch, places
    order = np.lexsort((offset, partition, stream))
    return batch.take(pa.array(order)), [column[order] for column in places]


def _is_one(values: IntArray) -> bool:
    return bool(values[0] == values[-1] and (values == values[0]).all())


def _reasons(batch: pa.RecordBatch, time_ms: int, plan: PackPlan) -> Reasons | None:
    """Give the reason per row that is bad input, None for good rows; None when every row is good."""
    malformed = batch.column(frames.MALFORMED_IN)
    reasons = judge(batch.column(TIME), batch.column(frames.TIMESTAMP_IN), time_ms, plan.max_ahead_ms)
    if reasons is None:
        if malformed.null_count == len(malformed):
            return None
        reasons = np.full(len(malformed), None, dtype=object)
    reasons[np.asarray(malformed.is_valid())] = "malformed"
    if frames.VERDICT_IN in batch.schema.names:
        reasons[numbers(batch, frames.VERDICT_IN) == POISON] = "poison"
    return reasons


def is_good(batch: pa.RecordBatch) -> pa.BooleanArray:
    """Tell which source rows the pack stage accepts without looking at a clock: a replay takes these."""
    time = batch.column(TIME)
    in_range = pc.and_(pc.greater_equal(time, MIN_EVENT_TIME), pc.less_equal(time, MAX_EVENT_TIME))
    good = pc.and_(pc.is_null(batch.column(frames.MALFORMED_IN)), pc.fill_null(in_range, False))
    if frames.VERDICT_IN in batch.schema.names:
        good = pc.and_(good, pc.equal(batch.column(frames.VERDICT_IN), PASSED))
    return good


def _prefix_maxima(
    stream: IntArray, partition: IntArray, offset: IntArray, times: IntArray, good: Mask | None
) -> tuple[IntArray, list[Slice], list[int]]:
    """Give the newest accepted event time before each row in its slice, the slices, and the first row of each."""
    accepted = times if good is None else np.where(good, times, NO_TIME)
    before = np.empty(len(times), dtype=np.int64)
    edges, slices = [0, len(times)], []
    if stream[0] != stream[-1] or partition[0] != partition[-1]:  # they are sorted
        changes = np.flatnonzero((stream[1:] != stream[:-1]) | (partition[1:] != partition[:-1])) + 1
        edges[1:1] = changes.tolist()
    for low, high in pairwise(edges):
        running = _running_maxima(accepted[low:high])
        before[low] = NO_TIME
        before[low + 1 : high] = running[:-1]
        slices.append(
            Slice(int(stream[low]), int(partition[low]), int(offset[low]), int(offset[high - 1]) + 1, int(running[-1]))
        )
    return before, slices, edges[:-1]


def _running_maxima(times: IntArray) -> IntArray:
    return times if bool((times[1:] >= times[:-1]).all()) else np.maximum.accumulate(times)


def _errors(batch: pa.RecordBatch, plan: PackPlan, time_ms: int, reasons: Reasons | None, rows: IntArray) -> Binary:
    if reasons is None or not len(rows):
        return None
    bad = batch.take(pa.array(rows))
    columns = {
        "topic": pa.array([plan.topics[stream] for stream in bad.column(STREAM).to_pylist()], pa.string()),
        "stream": bad.column(STREAM),
        "partition": bad.column(PARTITION),
        "offset": bad.column(OFFSET),
        "timestamp": bad.column(frames.TIMESTAMP_IN),
        "event_time": bad.column(TIME),
        "reason": pa.array(reasons[rows].tolist(), pa.string()),
        "detail": pc.coalesce(bad.column(frames.MALFORMED_IN), _details(bad, reasons[rows].tolist(), plan, time_ms)),
        "key": bad.column(frames.KEY_IN),
        "value": _received(bad.column(frames.RAW_IN)),
    }
    return to_ipc_buffer(pa.table([columns[f.name].cast(f.type) for f in ERROR_SCHEMA], schema=ERROR_SCHEMA))


def _received(values: pa.Array) -> pa.Array:
    """Return the bytes of bad rows: as received, or their fields as JSON where values are columns already."""
    if not pa.types.is_struct(values.type):
        return values
    texts = json_rows(pa.Table.from_batches([pa.RecordBatch.from_struct_array(values)]))
    known = values.is_valid().to_pylist()
    return pa.array([text if valid else None for text, valid in zip(texts, known, strict=True)], pa.binary())


def _details(bad: pa.RecordBatch, reasons: list[str], plan: PackPlan, time_ms: int) -> pa.Array:
    """Say what was allowed, where a time was refused."""
    bounds = latest(filled(bad.column(frames.TIMESTAMP_IN), -1), time_ms, plan.max_ahead_ms or 0).tolist()
    details = {
        "out_of_range": EVENT_TIMES,
        "no_event_time": "the event time is null",
    }
    return pa.array(
        [
            f"later than {bound} ms, max_ahead after the record's own timestamp or the batch time"
            if reason == "in_future"
            else details.get(reason)
            for reason, bound in zip(reasons, bounds, strict=True)
        ],
        pa.string(),
    )
