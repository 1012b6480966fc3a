"""The pack stage: every Arrow batch of source rows becomes one frame per shard (`backend.spark.frames`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backend.batch import (
    ERROR_SCHEMA,
    MAX_TIME,
    MESSAGE_FIELDS,
    MIN_TIME,
    NO_TIME,
    OFFSET,
    PARTITION,
    STREAM,
    TIME,
)
from backend.spark.frames import (
    BATCH_TIME_IN,
    DRAIN_IN,
    FORMAT,
    KEY_IN,
    MALFORMED_IN,
    PACKED_ARROW,
    RAW_IN,
    SHARD_IN,
    TIMESTAMP_IN,
    Header,
    IntArray,
    Slice,
    column_name,
    encode_header,
    to_ipc,
)


@dataclass(frozen=True, slots=True)
class PackPlan:
    """What the pack stage needs to know.

    Attributes:
        grouping: Grouping value per shard.
        fields: The operator's input fields, with the Arrow types that frames carry.
        by_partition: True when a source partition belongs to one shard, so other shards need not hear of it.
        max_ahead_ms: Event times later than batch time plus this are bad input; None switches the check off.
        topics: Topic by stream, for the errors.
        sides: For inputs with different fields, the names that each stream has: a frame carries the columns of its
            rows' streams only, and `assemble` fills the others with nulls. Empty: every stream has all fields.
    """

    grouping: tuple[int, ...]
    fields: tuple[pa.Field, ...]
    by_partition: bool
    max_ahead_ms: int | None
    topics: Mapping[int, str] = field(default_factory=dict)
    sides: Mapping[int, frozenset[str]] = field(default_factory=dict)

    def carried(self, streams: Iterable[int]) -> Sequence[pa.Field]:
        """Give the fields that a frame with rows of these streams carries."""
        if not self.sides:
            return self.fields
        wanted = frozenset[str]().union(*(self.sides[stream] for stream in streams))
        return [f for f in self.fields if f.name in wanted]


def packer(plan: PackPlan) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Give the function for `DataFrame.mapInArrow`."""

    def pack_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows:
                yield pack(batch, plan)

    return pack_batches


def pack(batch: pa.RecordBatch, plan: PackPlan) -> pa.RecordBatch:
    """Turn one Arrow batch of source rows into packed rows (`PACKED_ARROW`)."""
    if DRAIN_IN in batch.schema.names:
        return _pack_control(batch, plan)
    batch = _in_offset_order(batch)
    stream, partition, offset = (_ints(batch, name) for name in (STREAM, PARTITION, OFFSET))
    shard = _ints(batch, SHARD_IN)
    time_ms = int(batch.column(BATCH_TIME_IN)[0].as_py())
    time = batch.column(TIME)
    times = np.asarray(time.fill_null(0), dtype=np.int64)
    reasons = _reasons(batch, times, time_ms, plan)
    good = np.array([reason is None for reason in reasons]) if reasons is not None else None
    before, slices = _prefix_maxima(stream, partition, offset, times, good)
    header = encode_header(Header(FORMAT, time_ms, slices))

    columns = [batch.column(name) for name in (STREAM, PARTITION, OFFSET)]
    carried = plan.carried(np.unique(stream).tolist())
    columns += [pa.array(times), pa.array(before), *(batch.column(column_name(f.name)) for f in carried)]
    schema = pa.schema([*MESSAGE_FIELDS, *carried])
    columns = [column.cast(f.type) for column, f in zip(columns, schema, strict=True)]
    messages = pa.RecordBatch.from_arrays(columns, schema=schema)

    rows: list[tuple[int, bytes, bytes | None, bytes | None]] = []
    concerned = np.unique(shard).tolist() if plan.by_partition else range(len(plan.grouping))
    for number in concerned:
        mine = shard == number
        frame = _ipc(_pick(messages, mine if good is None else mine & good))
        errors = _errors(batch, plan, reasons, np.flatnonzero(mine & ~good)) if good is not None else None
        own = header
        if plan.by_partition:
            wanted = set(zip(stream[mine].tolist(), partition[mine].tolist(), strict=True))
            told = Header(FORMAT, time_ms, [s for s in slices if (s.stream, s.partition) in wanted])
            own = encode_header(told)
        rows.append((plan.grouping[number], own, frame, errors))
    return _packed(rows)


def _packed(rows: Sequence[tuple[int, bytes, bytes | None, bytes | None]]) -> pa.RecordBatch:
    columns = zip(*rows, strict=True)
    return pa.RecordBatch.from_arrays(
        [pa.array(list(column), f.type) for column, f in zip(columns, PACKED_ARROW, strict=True)],
        schema=PACKED_ARROW,
    )


def _pack_control(batch: pa.RecordBatch, plan: PackPlan) -> pa.RecordBatch:
    """Hand a control row to every shard."""
    time_ms = int(batch.column(BATCH_TIME_IN)[0].as_py())
    drain = any(batch.column(DRAIN_IN).to_pylist())
    header = encode_header(Header(FORMAT, time_ms, [], drain))
    return _packed([(value, header, None, None) for value in plan.grouping])


def _in_offset_order(batch: pa.RecordBatch) -> pa.RecordBatch:
    stream, partition, offset = (_ints(batch, name) for name in (STREAM, PARTITION, OFFSET))
    same = (stream[1:] == stream[:-1]) & (partition[1:] == partition[:-1])
    rising = (stream[1:] > stream[:-1]) | ((stream[1:] == stream[:-1]) & (partition[1:] > partition[:-1]))
    if bool(np.all(rising | (same & (offset[1:] >= offset[:-1])))):
        return batch
    return batch.take(pa.array(np.lexsort((offset, partition, stream))))


def _ints(batch: pa.RecordBatch, name: str) -> IntArray:
    return np.asarray(batch.column(name), dtype=np.int64)


def _reasons(batch: pa.RecordBatch, times: IntArray, time_ms: int, plan: PackPlan) -> npt.NDArray[np.object_] | None:
    """Give the reason per row that is bad input, None for good rows; None when every row is good."""
    malformed = batch.column(MALFORMED_IN)
    no_time = batch.column(TIME)
    out_of_range = (times < MIN_TIME) | (times > MAX_TIME)
    ahead = times > time_ms + plan.max_ahead_ms if plan.max_ahead_ms is not None else np.zeros(len(times), dtype=bool)
    if malformed.null_count == len(malformed) and not no_time.null_count and not (out_of_range | ahead).any():
        return None
    reasons = np.full(len(times), None, dtype=object)
    reasons[ahead] = "in_future"
    reasons[out_of_range] = "out_of_range"
    reasons[np.asarray(no_time.is_null())] = "no_event_time"
    reasons[np.asarray(malformed.is_valid())] = "malformed"
    return reasons


def is_good(batch: pa.RecordBatch) -> pa.BooleanArray:
    """Tell which source rows the pack stage accepts without looking at a clock: a replay takes these."""
    time = batch.column(TIME)
    in_range = pc.and_(pc.greater_equal(time, MIN_TIME), pc.less_equal(time, MAX_TIME))
    return pc.and_(pc.is_null(batch.column(MALFORMED_IN)), pc.fill_null(in_range, False))


def _prefix_maxima(
    stream: IntArray, partition: IntArray, offset: IntArray, times: IntArray, good: npt.NDArray[np.bool_] | None
) -> tuple[IntArray, list[Slice]]:
    """Give the newest accepted event time before each row in its slice, and the slices."""
    accepted = times if good is None else np.where(good, times, NO_TIME)
    before = np.empty(len(times), dtype=np.int64)
    changes = np.flatnonzero((stream[1:] != stream[:-1]) | (partition[1:] != partition[:-1])) + 1
    edges = [0, *changes.tolist(), len(times)]
    slices = []
    for low, high in pairwise(edges):
        running = np.maximum.accumulate(accepted[low:high])
        before[low] = NO_TIME
        before[low + 1 : high] = running[:-1]
        slices.append(
            Slice(int(stream[low]), int(partition[low]), int(offset[low]), int(offset[high - 1]) + 1, int(running[-1]))
        )
    return before, slices


def _pick(batch: pa.RecordBatch, mask: npt.NDArray[np.bool_]) -> pa.RecordBatch:
    return batch if mask.all() else batch.filter(pa.array(mask))


def _errors(
    batch: pa.RecordBatch, plan: PackPlan, reasons: npt.NDArray[np.object_] | None, rows: IntArray
) -> bytes | None:
    if reasons is None or not len(rows):
        return None
    bad = batch.take(pa.array(rows))
    columns = {
        "topic": pa.array([plan.topics[stream] for stream in bad.column(STREAM).to_pylist()], pa.string()),
        "stream": bad.column(STREAM),
        "partition": bad.column(PARTITION),
        "offset": bad.column(OFFSET),
        "timestamp": bad.column(TIMESTAMP_IN),
        "event_time": bad.column(TIME),
        "reason": pa.array(reasons[rows].tolist(), pa.string()),
        "detail": bad.column(MALFORMED_IN),
        "key": bad.column(KEY_IN),
        "value": bad.column(RAW_IN),
    }
    return _ipc(pa.RecordBatch.from_arrays([columns[f.name].cast(f.type) for f in ERROR_SCHEMA], schema=ERROR_SCHEMA))


def _ipc(batch: pa.RecordBatch) -> bytes | None:
    return to_ipc(pa.Table.from_batches([batch])) if batch.num_rows else None
