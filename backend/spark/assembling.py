"""The inverse of the pack stage: the packed rows of one shard and micro-batch, put together in the shard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from backend.batch import (
    BEFORE,
    ERROR_SCHEMA,
    MESSAGE_FIELDS,
    NO_TIME,
    OFFSET,
    PARTITION,
    RESERVED,
    STREAM,
    Position,
    Positions,
    SourcePartition,
)
from backend.errors import SourceWentBack
from backend.spark.frames import (
    Header,
    IntArray,
    decode_header,
    from_ipc,
)


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
        headers.append(decode_header(row.header, where))
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
