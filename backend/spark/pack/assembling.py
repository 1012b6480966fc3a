"""The inverse of the pack stage: the packed rows of one shard and micro-batch, put together in the shard."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backend.batch import (
    BEFORE,
    ERROR_SCHEMA,
    MESSAGE_FIELDS,
    NO_TIME,
    OFFSET,
    OWN_TIMESTAMP,
    PARTITION,
    RESERVED,
    STREAM,
    TIME,
    Position,
    Positions,
    SourcePartition,
)
from backend.chunks import MOST_BYTES, is_coded, one_chunk, plain_table, taken_rows
from backend.errors import FrameDamaged, SourceWentBack
from backend.spark.pack.frames import Header, decode_header, from_ipc, rises
from backend.spark.pack.narrow import widen
from backend.spark.ranking import check_ranks, first_offset, rank, rank_errors
from backend.texts import source_partition
from backend.windows.aligned.combining import Combining
from backend.windows.combined_rows import is_combined
from backend.windows.micro_batch import numbers, stamped
from recovery.share import ShardInput

_PLACE = [(name, "ascending") for name in ("stream", "partition", "offset")]


@dataclass(frozen=True, slots=True)
class Packed:
    """One packed row as it arrives in the shard."""

    header: bytes
    frame: bytes | None
    errors: bytes | None


def assemble(
    rows: Iterable[Packed],
    before: Positions,
    *,
    sources: Iterable[SourcePartition] = (),
    fields: Sequence[pa.Field] = (),
    shard: int = 0,
    where: str = "",
    topics: Mapping[int, str] = MappingProxyType({}),
    ranked: Collection[int] = (),
    version: int = 0,
    combining: Combining | None = None,
    by_offset: bool = False,
) -> ShardInput:
    """Put the packed rows of one shard and micro-batch together.

    Args:
        rows: In any order.
        before: Committed positions.
        sources: Source partitions of the shard that are known to be there. One that has brought nothing yet holds
            windows open until it is idle: else its first messages would find windows closed without it.
        fields: The operator's input fields: those that no frame carries become columns of nulls. Empty: frames carry
            all of them.
        shard: Its number.
        where: The shard, for errors.
        topics: Topic by stream, for errors.
        ranked: Streams whose rows get their offsets here (`backend.spark.ranking`).
        version: Spark's batch id, for those.
        combining: What combined the messages, where the pack stage found it worth it; None where it never does.
        by_offset: See `backend.batch.counts_offsets`: what is not accepted keeps a source partition from being idle,
            and it counts where source partitions begin.

    Raises:
        SourceWentBack: A source partition delivered an offset below its committed position.
        UnknownFormat: Packed by another release.
        FrameDamaged: A row is not what the pack stage wrote.
    """
    headers: list[Header] = []
    tables: list[pa.Table | None] = []
    coded = combining is None and not ranked
    errors: list[pa.Table] = []
    for row in rows:
        headers.append(decode_header(row.header, where))
        tables.append(widen(from_ipc(row.frame, where), coded=coded) if row.frame is not None else None)
        if row.errors is not None:
            errors.append(from_ipc(row.errors, where))
    time_ms = max(header.time_ms for header in headers)
    after = {key: Position(0, NO_TIME, time_ms) for key in sources} | dict(before)
    starts: dict[tuple[int, int, int, int], int] = {}
    tables = _alike(tables, combining) if combining is not None else tables
    combined = any(table is not None and is_combined(table) for table in tables)
    ends: dict[SourcePartition, int] = {}
    for index, part in sorted(
        ((index, part) for index, header in enumerate(headers) for part in header.slices),
        key=lambda item: (item[1].stream, item[1].partition, item[1].first),
    ):
        key = (part.stream, part.partition)
        known = after.get(key, Position(0, NO_TIME, time_ms))
        active_ms = time_ms if by_offset or part.newest != NO_TIME else known.active_ms
        newest = max(known.stream_time, part.newest)
        if part.stream in ranked:
            after[key] = Position(first_offset(version + 1), newest, active_ms)
            continue
        position = before.get(key)
        if position is not None and part.first < position.next_offset:
            raise SourceWentBack(
                f"{source_partition(*key, topics)} delivered offset {part.first}, which is below"
                f" the committed position {position.next_offset}",
                where=where,
                why="the topic was made again, or this checkpoint belongs to another source",
                command="rewind inspect <checkpoint>",
            )
        if combining is not None and key in ends and part.first < ends[key]:
            raise FrameDamaged(
                f"{topics.get(part.stream, f'stream {part.stream}')} partition {part.partition} was read twice",
                where=where,
                why=f"offset {part.first} comes again in a slice, the one before it ended at {ends[key]}",
                command="start the query again",
            )
        ends[key] = part.next
        starts[(index, *key, part.first)] = known.stream_time
        after[key] = Position(max(part.next, known.next_offset), newest, active_ms)
    bad = pa.concat_tables(errors) if errors else ERROR_SCHEMA.empty_table()
    plain = tables if not ranked else [None if _stream(table) in ranked else table for table in tables]
    parts = [_join(headers, plain, starts)]
    for stream in sorted(ranked):
        check_ranks(version, sum(table.num_rows for table in tables if table is not None) + bad.num_rows, where)
        committed = before.get((stream, 0))
        mine = [table for table in tables if _stream(table) == stream]
        found = rank(mine, version, committed.stream_time if committed is not None else NO_TIME)
        bad = rank_errors(bad, stream, version, found.num_rows if found is not None else 0)
        parts.append(found)
    messages, timestamps = _by_stream([part for part in parts if part is not None]), None
    if messages is not None:
        if OWN_TIMESTAMP in messages.column_names:
            timestamps = messages.column(OWN_TIMESTAMP)
            messages = messages.drop_columns([OWN_TIMESTAMP])
        messages = with_fields(messages, fields) if fields and not combined else messages
    bad = bad.sort_by(_PLACE) if bad.num_rows else bad
    drain = any(header.drain for header in headers)
    return ShardInput(
        time_ms,
        messages,
        after,
        tuple(place for place in _in_future(bad) if place[0] not in ranked),
        drain,
        came=drain or not before or any(header.slices for header in headers),
        adopt=next((header.adopt[shard] for header in headers if shard in header.adopt), ""),
        errors=bad,
        timestamps=timestamps,
        with_values=combining is None,
        firsts=_firsts(starts, before) if by_offset else {},
    )


def _in_future(bad: pa.Table) -> list[tuple[int, int, int]]:
    """Return the places of the errors that are messages of the future."""
    if not bad.num_rows:
        return []
    ahead = bad.filter(pc.equal(bad["reason"], "in_future"))
    return list(zip(*(ahead[name].to_pylist() for name, _ in _PLACE), strict=True))


def _firsts(slices: Iterable[tuple[int, int, int, int]], before: Positions) -> dict[SourcePartition, int]:
    """Return the first offsets of source partitions that had brought nothing, of slices in order: all shards' same."""
    firsts: dict[SourcePartition, int] = {}
    for _, stream, partition, first in slices:
        position = before.get((stream, partition))
        if position is None or not position.next_offset:
            firsts.setdefault((stream, partition), first)
    return firsts


def _alike(tables: list[pa.Table | None], combining: Combining) -> list[pa.Table | None]:
    """Return frames that are all combined rows, unless none is."""
    if not any(table is not None and is_combined(table) for table in tables):
        return tables
    return [
        combining.each(table, table.column(OWN_TIMESTAMP).combine_chunks())
        if table is not None and not is_combined(table)
        else table
        for table in tables
    ]


def located(errors: pa.Table, topics: Mapping[int, str], given: ShardInput) -> pa.Table:
    """Return an operator's errors with what it does not say: the topics, and the records' own timestamps.

    Those of windows that combine have no value, whether messages were combined or not: a micro-batch that runs again
    may find it worth it where it did not before, and has to send the same.

    Args:
        errors: `ERROR_SCHEMA`.
        topics: Topic by stream.
        given: The micro-batch. A message that came with an earlier one has its timestamp already.
    """
    if not errors.num_rows:
        return errors
    topic = pa.array([topics.get(stream) for stream in errors["stream"].to_pylist()], pa.string())
    errors = errors.set_column(errors.schema.get_field_index("topic"), ERROR_SCHEMA.field("topic"), topic)
    if not given.with_values:
        nulls = pa.nulls(errors.num_rows, ERROR_SCHEMA.field("value").type)
        errors = errors.set_column(errors.schema.get_field_index("value"), ERROR_SCHEMA.field("value"), nulls)
    return errors if given.messages is None else stamped(errors, given.messages, given.timestamps)


def leaps(given: ShardInput, before: Positions, more_than_ms: int | None, topics: Mapping[int, str]) -> tuple[int, str]:
    """Return how many messages moved the watermark of their source partition by more than a duration.

    Also which of them moved it farthest, and by how much; "" for none.

    Args:
        given: The micro-batch.
        before: Committed positions. The first message of a source partition moves no watermark.
        more_than_ms: None finds none.
        topics: Topic by stream.
    """
    messages = given.messages
    if messages is None or more_than_ms is None or not messages.num_rows:
        return 0, ""
    reached = ((before.get(key), position.stream_time) for key, position in given.after.items())
    near = (
        old is not None and old.stream_time > NO_TIME and now - old.stream_time <= more_than_ms for old, now in reached
    )
    if all(near):
        return 0, ""  # the usual case, without a look at each message
    floor = numbers(messages, BEFORE)
    by = np.where(floor == NO_TIME, 0, numbers(messages, TIME) - floor)
    farthest = int(np.argmax(by))
    if by[farthest] <= more_than_ms:
        return 0, ""
    stream, partition, offset = _place(messages, farthest)
    where = f"{topics.get(stream, stream)}-{partition}, offset {offset}"
    return int((by > more_than_ms).sum()), f"{where}: by {by[farthest]} ms"


def _stream(table: pa.Table | None) -> int | None:
    """Return the stream of a frame's first row: the rows of a ranked stream have frames of their own."""
    return table.column(STREAM)[0].as_py() if table is not None else None


def _by_stream(parts: Sequence[pa.Table]) -> pa.Table | None:
    """Put sorted parts, each of other streams, together in order of stream; None for none."""
    if len(parts) < 2:
        return parts[0] if parts else None
    messages = pa.concat_tables(parts, promote_options="default")
    return taken_rows(messages, np.argsort(numbers(messages, STREAM), kind="stable")).combine_chunks()


def _join(
    headers: Sequence[Header], tables: Sequence[pa.Table | None], starts: dict[tuple[int, int, int, int], int]
) -> pa.Table | None:
    """Raise `BEFORE` to what the earlier slices reached, then sort and drop duplicates."""
    frames: list[tuple[tuple[int, ...], tuple[int, ...], pa.Table]] = []
    in_order = True
    for index, (header, table) in enumerate(zip(headers, tables, strict=True)):
        if table is None:
            continue
        floors = [starts[(index, part.stream, part.partition, part.first)] for part in header.slices]
        before, offset = numbers(table, BEFORE), numbers(table, OFFSET)
        if len(floors) == 1:
            before = np.maximum(before, floors[0])
            in_order = in_order and bool((offset[1:] > offset[:-1]).all())
        else:
            before = before.copy()
            stream, partition = numbers(table, STREAM), numbers(table, PARTITION)
            for part, floor in zip(header.slices, floors, strict=True):
                mine = (stream == part.stream) & (partition == part.partition)
                before[mine] = np.maximum(before[mine], floor)
            in_order = in_order and rises(stream, partition, offset, strictly=True)
        rows = table.set_column(RESERVED.index(BEFORE), MESSAGE_FIELDS[4], pa.array(before))
        frames.append((_place(rows, 0), _place(rows, len(rows) - 1), rows))
    if not frames:
        return None
    frames.sort(key=itemgetter(0))
    messages = _concatenated([rows for _, _, rows in frames])
    if in_order and all(last < first for (_, last, _), (first, _, _) in pairwise(frames)):
        return messages
    stream, partition, offset = (numbers(messages, name) for name in (STREAM, PARTITION, OFFSET))
    order = np.lexsort((offset, partition, stream))
    stream, partition, offset = stream[order], partition[order], offset[order]
    repeated = (stream[1:] == stream[:-1]) & (partition[1:] == partition[:-1]) & (offset[1:] == offset[:-1])
    return taken_rows(messages, order[np.concatenate(([True], ~repeated))]).combine_chunks()


def _place(rows: pa.Table, row: int) -> tuple[int, ...]:
    """Return stream, source partition and offset of a row."""
    return tuple(rows.column(name)[row].as_py() for name in (STREAM, PARTITION, OFFSET))


def _concatenated(tables: list[pa.Table]) -> pa.Table:
    """Return the rows of tables; texts that are numbers become texts, at once where they fit one array."""
    names = {field.name for table in tables for field in table.schema if is_coded(field.type)}
    here = [(table, name) for table in tables for name in names if name in table.column_names]
    all_coded = all(is_coded(table.schema.field(name).type) for table, name in here)
    if names and not (all_coded and sum(_most_bytes(table.column(name)) for table, name in here) <= MOST_BYTES):
        tables = [plain_table(table) for table in tables]
    return plain_table(pa.concat_tables(tables, promote_options="default").combine_chunks())


def _most_bytes(column: pa.ChunkedArray) -> int:
    """Return how many bytes the texts of a dictionary's rows have at most."""
    texts = one_chunk(column).dictionary
    return len(column) * int(pc.max(pc.binary_length(texts)).as_py() or 0)


def with_fields(messages: pa.Table, fields: Sequence[pa.Field]) -> pa.Table:
    """Give `MESSAGE_FIELDS` and then exactly these columns, in their order; nulls where there is none."""
    if messages.schema.names[len(MESSAGE_FIELDS) :] == [f.name for f in fields]:
        return messages
    here = set(messages.schema.names)
    columns = [messages[f.name] if f.name in here else pa.nulls(len(messages), f.type) for f in fields]
    head = [messages[f.name] for f in MESSAGE_FIELDS]
    return pa.table([*head, *columns], schema=pa.schema([*MESSAGE_FIELDS, *fields]))


def packed_rows(frames: Iterable[Any]) -> Iterator[Packed]:
    """Read packed rows out of the pandas frames that Spark's stateful operator hands over."""
    for frame in frames:
        for header, data, errors in zip(frame["header"], frame["frame"], frame["errors"], strict=True):
            yield Packed(bytes(header), _bytes(data), _bytes(errors))


def _bytes(value: Any) -> bytes | None:
    return None if value is None else bytes(value)
