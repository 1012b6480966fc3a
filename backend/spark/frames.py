"""Frames: how messages travel from Spark's sources to the shards, many rows in one.

Spark's stateful Python operator groups rows one by one in Python, so it is given few, large rows: the *pack stage*, a
stateless `mapInArrow`, turns every Arrow batch into one frame per shard. The inverse, `assemble`, runs in the shard.

A packed row (format 2)::

    shard   int      grouping value of the shard (see backend.spark.routing)
    header  binary   MessagePack: format, batch time, slices, drain
    frame   binary   Arrow IPC stream of the messages, null when the shard got none of this Arrow batch
    errors  binary   Arrow IPC stream of ERROR_SCHEMA, null when there are none

A *slice* says of one Arrow batch and one source partition what every shard must know even if it got no rows: first
offset, next offset, newest accepted event time. `BEFORE` in a frame counts from the start of its slice; `assemble` puts
slices together by first offset on top of the committed stream time. So lateness depends neither on the shard a row went
to, nor on where Arrow batches, tasks and micro-batches are cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from backend.batch import (
    BEFORE,
    ERROR_SCHEMA,
    MAX_TIME,
    MESSAGE_FIELDS,
    MIN_TIME,
    NO_TIME,
    OFFSET,
    PARTITION,
    RESERVED,
    STREAM,
    TIME,
    Position,
    Positions,
    SourcePartition,
)
from backend.errors import UNDECODABLE, FrameDamaged, SourceWentBack, UnknownFormat

FORMAT = 2
SEAL_BYTES = 8

PACKED_SCHEMA = "shard int, header binary, frame binary, errors binary"
PACKED_ARROW = pa.schema(
    [
        pa.field("shard", pa.int32()),
        pa.field("header", pa.binary()),
        pa.field("frame", pa.binary()),
        pa.field("errors", pa.binary()),
    ]
)

# Columns that the pack stage reads beside the operator's input fields.
SHARD_IN = "_shard"
TOPIC_IN = "_topic"
TIMESTAMP_IN = "_timestamp"
KEY_IN = "_key"
RAW_IN = "_raw"
MALFORMED_IN = "_malformed"
BATCH_TIME_IN = "_batch_ms"
DRAIN_IN = "_drain"
"""Null for messages; set in the rows of the control stream."""

IntArray = npt.NDArray[np.int64]


def column_name(name: str) -> str:
    """Give the name of a field's column on the way to the pack stage.

    Spark's Python functions read column names as expressions, so a dot or a backtick in one is a syntax of its own.

    >>> column_name("delay"), column_name("left.id")
    ('delay', '_x6c6566742e6964')
    """
    return name if re.fullmatch(r"\w+", name) else f"_x{name.encode().hex()}"


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """What one Arrow batch brought of one source partition.

    Attributes:
        stream: Stream number.
        partition: Source partition.
        first: Offset of its first row.
        next: Offset after its last row.
        newest: Newest event time among its accepted rows, `NO_TIME` if none was accepted.
    """

    stream: int
    partition: int
    first: int
    next: int
    newest: int


class Header(msgspec.Struct, frozen=True, array_like=True):
    """The header of a packed row."""

    format: int
    time_ms: int
    slices: list[Slice]
    drain: bool = False


_header_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(Header)


@dataclass(frozen=True, slots=True)
class PackPlan:
    """What the pack stage needs to know.

    Attributes:
        grouping: Grouping value per shard.
        fields: The operator's input fields, with the Arrow types that frames carry.
        by_partition: True when a source partition belongs to one shard, so other shards need not hear of it.
        max_ahead_ms: Event times later than batch time plus this are bad input; None switches the check off.
        sides: For inputs with different fields, the names that each stream has: a frame carries the columns of its
            rows' streams only, and `assemble` fills the others with nulls. Empty: every stream has all fields.
    """

    grouping: tuple[int, ...]
    fields: tuple[pa.Field, ...]
    by_partition: bool
    max_ahead_ms: int | None
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
    control = batch.column(DRAIN_IN)
    if control.null_count < len(control):
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
    header = _sealed(_header_encoder.encode(Header(FORMAT, time_ms, slices)))

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
        errors = _errors(batch, reasons, times, np.flatnonzero(mine & ~good)) if good is not None else None
        own = header
        if plan.by_partition:
            wanted = set(zip(stream[mine].tolist(), partition[mine].tolist(), strict=True))
            told = Header(FORMAT, time_ms, [s for s in slices if (s.stream, s.partition) in wanted])
            own = _sealed(_header_encoder.encode(told))
        rows.append((plan.grouping[number], own, frame, errors))
    return _packed(rows)


def _packed(rows: Sequence[tuple[int, bytes, bytes | None, bytes | None]]) -> pa.RecordBatch:
    columns = zip(*rows, strict=True)
    return pa.RecordBatch.from_arrays(
        [pa.array(list(column), f.type) for column, f in zip(columns, PACKED_ARROW, strict=True)],
        schema=PACKED_ARROW,
    )


def _pack_control(batch: pa.RecordBatch, plan: PackPlan) -> pa.RecordBatch:
    """Hand a control row to every shard. Spark never mixes two sources in one Arrow batch of a union."""
    time_ms = int(batch.column(BATCH_TIME_IN)[0].as_py())
    drain = any(batch.column(DRAIN_IN).to_pylist())
    header = _sealed(_header_encoder.encode(Header(FORMAT, time_ms, [], drain)))
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
    batch: pa.RecordBatch, reasons: npt.NDArray[np.object_] | None, times: IntArray, rows: IntArray
) -> bytes | None:
    if reasons is None or not len(rows):
        return None
    bad = batch.take(pa.array(rows))
    columns = {
        "topic": bad.column(TOPIC_IN),
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


def to_ipc(table: pa.Table) -> bytes:
    """Serialise a table as one Arrow IPC stream, with its checksum at the end (which readers of Arrow pass over)."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return _sealed(sink.getvalue())


def from_ipc(data: bytes, where: str = "") -> pa.Table:
    """Read what `to_ipc` wrote; the table shares memory with `data`.

    Raises:
        FrameDamaged: It does not match its checksum.
    """
    with pa.ipc.open_stream(pa.py_buffer(_unsealed(data, where))) as reader:
        return reader.read_all()


def _sealed(data: bytes | pa.Buffer) -> bytes:
    return b"".join((data, xxhash.xxh3_64_digest(data)))


def _unsealed(data: bytes, where: str) -> memoryview:
    view = memoryview(data)
    content, checksum = view[:-SEAL_BYTES], bytes(view[-SEAL_BYTES:])
    if xxhash.xxh3_64_digest(content) != checksum:
        raise FrameDamaged(
            "packed messages do not match their checksum",
            where=where,
            why=f"{len(data)} bytes that are not what was written",
            command="start the query again; if it comes again, check disks and memory of the executors",
        )
    return content


# --------------------------------------------------------------------------------------------------------- the inverse


@dataclass(frozen=True, slots=True)
class Packed:
    """One packed row as it arrives in the shard."""

    header: bytes
    frame: bytes | None
    errors: bytes | None


@dataclass(frozen=True, slots=True)
class Assembled:
    """A shard's share of a micro-batch, put together.

    Attributes:
        time_ms: The batch time that Spark logged.
        messages: Sorted by (stream, partition, offset), without duplicates; None when the shard got no rows.
        after: Positions after the micro-batch.
        errors: Bad input, `ERROR_SCHEMA`.
        drain: The driver asked to drain.
    """

    time_ms: int
    messages: pa.Table | None
    after: dict[SourcePartition, Position]
    errors: pa.Table
    drain: bool


def assemble(
    rows: Iterable[Packed],
    before: Positions,
    *,
    sources: Iterable[SourcePartition] = (),
    fields: Sequence[pa.Field] = (),
    where: str = "",
) -> Assembled:
    """Put the packed rows of one shard and micro-batch together.

    Args:
        rows: In any order.
        before: Committed positions.
        sources: Source partitions of the shard that are known to be there. One that has brought nothing yet holds
            windows open until it is idle: else its first messages would find windows closed without it.
        fields: The operator's input fields: those that no frame carries become columns of nulls. Empty: frames carry
            all of them.
        where: The shard, for errors.

    Raises:
        SourceWentBack: A source partition delivered an offset below its committed position.
        UnknownFormat: Packed by another release.
        FrameDamaged: A row is not what the pack stage wrote.
    """
    headers: list[Header] = []
    tables: list[pa.Table | None] = []
    errors: list[pa.Table] = []
    for row in rows:
        header = _header_of(row.header, where)
        if header.format != FORMAT:
            raise UnknownFormat("a frame has an unknown format", where=where, why=f"{header.format}, not {FORMAT}")
        headers.append(header)
        tables.append(from_ipc(row.frame, where) if row.frame is not None else None)
        if row.errors is not None:
            errors.append(from_ipc(row.errors, where))
    time_ms = max(header.time_ms for header in headers)
    running = {key: position.stream_time for key, position in before.items()}
    after = {key: Position(0, NO_TIME, time_ms) for key in sources} | dict(before)
    starts: dict[tuple[int, int, int, int], int] = {}
    for index, part in sorted(
        ((index, part) for index, header in enumerate(headers) for part in header.slices),
        key=lambda item: (item[1].stream, item[1].partition, item[1].first),
    ):
        key = (part.stream, part.partition)
        position = before.get(key)
        if position is not None and part.first < position.next_offset:
            raise SourceWentBack(
                f"partition {part.partition} of stream {part.stream} delivered offset {part.first}, which is below"
                f" the committed position {position.next_offset}",
                where=where,
                why="the topic was made again, or this checkpoint belongs to another source",
                command="rewind inspect <checkpoint>",
            )
        starts[(index, *key, part.first)] = running.get(key, NO_TIME)
        running[key] = max(running.get(key, NO_TIME), part.newest)
        reached = max(part.next, after[key].next_offset) if key in after else part.next
        after[key] = Position(reached, running[key], time_ms)
    messages = _join(headers, tables, starts)
    if messages is not None and fields:
        messages = with_fields(messages, fields)
    bad = pa.concat_tables(errors) if errors else ERROR_SCHEMA.empty_table()
    return Assembled(time_ms, messages, after, bad, any(header.drain for header in headers))


def _header_of(data: bytes, where: str) -> Header:
    content = _unsealed(data, where)
    try:
        return _header_decoder.decode(content)
    except UNDECODABLE as error:
        raise UnknownFormat(
            "a frame has an unknown format",
            where=where,
            why=str(error),
            command="run driver and executors with one release",
        ) from error


def _join(
    headers: Sequence[Header], tables: Sequence[pa.Table | None], starts: dict[tuple[int, int, int, int], int]
) -> pa.Table | None:
    """Raise `BEFORE` to what the earlier slices reached, then sort and drop duplicates."""
    raised = []
    for index, (header, table) in enumerate(zip(headers, tables, strict=True)):
        if table is None:
            continue
        stream, partition = _table_ints(table, STREAM), _table_ints(table, PARTITION)
        before = _table_ints(table, BEFORE).copy()
        for part in header.slices:
            floor = starts[(index, part.stream, part.partition, part.first)]
            mine = (stream == part.stream) & (partition == part.partition) if len(header.slices) > 1 else slice(None)
            before[mine] = np.maximum(before[mine], floor)
        raised.append(table.set_column(RESERVED.index(BEFORE), MESSAGE_FIELDS[4], pa.array(before)))
    if not raised:
        return None
    messages = pa.concat_tables(raised, promote_options="default")
    stream, partition, offset = (_table_ints(messages, name) for name in (STREAM, PARTITION, OFFSET))
    same = (stream[1:] == stream[:-1]) & (partition[1:] == partition[:-1])
    rising = (stream[1:] > stream[:-1]) | ((stream[1:] == stream[:-1]) & (partition[1:] > partition[:-1]))
    if np.all(rising | (same & (offset[1:] > offset[:-1]))):
        return messages.combine_chunks()
    order = np.lexsort((offset, partition, stream))
    stream, partition, offset = stream[order], partition[order], offset[order]
    repeated = (stream[1:] == stream[:-1]) & (partition[1:] == partition[:-1]) & (offset[1:] == offset[:-1])
    return messages.take(pa.array(order[np.concatenate(([True], ~repeated))])).combine_chunks()


def with_fields(messages: pa.Table, fields: Sequence[pa.Field]) -> pa.Table:
    """Give `MESSAGE_FIELDS` and then exactly these columns, in their order; nulls where there is none."""
    if messages.schema.names[len(MESSAGE_FIELDS) :] == [f.name for f in fields]:
        return messages
    here = set(messages.schema.names)
    columns = [messages[f.name] if f.name in here else pa.nulls(len(messages), f.type) for f in fields]
    head = [messages[f.name] for f in MESSAGE_FIELDS]
    return pa.table([*head, *columns], schema=pa.schema([*MESSAGE_FIELDS, *fields]))


def _table_ints(table: pa.Table, name: str) -> IntArray:
    return np.asarray(table.column(name), dtype=np.int64)


def packed_rows(frames: Iterable[Any]) -> Iterator[Packed]:
    """Read packed rows out of the pandas frames that Spark's stateful operator hands over."""
    for frame in frames:
        for header, data, errors in zip(frame["header"], frame["frame"], frame["errors"], strict=True):
            yield Packed(bytes(header), _bytes(data), _bytes(errors))


def _bytes(value: Any) -> bytes | None:
    return None if value is None else bytes(value)
