"""Bundles: source rows that cross the JVM as few large binary values, for sources that are read in Python.

A row that goes from a Python reader through the JVM into the Python pack stage is taken apart and put together twice
(measured: half of the time of a micro-batch). So a source that has its values as columns already (`Bundling.bundled`)
hands over each Arrow batch as one binary value, and what `Job.pack_input` lets the JVM say of a row (stream, event
time, shard, whether it is bad) is said here over the columns, in the same way: a checkpoint can go on with either, and
messages lie in the same shards.

A bundle is `frames.to_ipc` of a table with the columns `topic, partition, offset, timestamp, key, value`: the topic may
be a dictionary, `value` is a struct of the fields that the job reads, null for a delete. A replay of an archive does
without bundles: it reads where it works.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backend.batch import OFFSET, PARTITION, STREAM, TIME
from backend.errors import FrameDamaged, SourceDamaged
from backend.limits import MAX_KEY_TEXT_BYTES
from backend.spark import frames
from backend.spark.hashing import hashable, xxhash64

BUNDLE = "bundle"
NULL_VALUE = "the value is null"
MIXED_ROWS = 200_000

Stage = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


@dataclass(frozen=True, slots=True)
class BundleInput:
    """What `Job.pack_input` says of an input's rows, as plain data.

    Attributes:
        streams: Stream number by topic.
        event_time: Field with the event time; None takes the record's timestamp.
        key: Fields that route.
        by_partition: Rows are routed by source partition instead.
        shards: Number of shards.
        fields: Each of the operator's fields with the name that it has in the value, None where it is not of this
            input.
        widen: Integers of all widths hash alike (a join's sides may differ).
    """

    streams: Mapping[str, int]
    event_time: str | None
    key: tuple[str, ...]
    by_partition: bool
    shards: int
    fields: tuple[tuple[pa.Field, str | None], ...]
    widen: bool

    @property
    def names(self) -> frozenset[str]:
        """Fields of the values that are needed."""
        fields = {own for _, own in self.fields if own is not None}
        return frozenset(fields | set(self.key) | ({self.event_time} if self.event_time is not None else set()))


def can_bundle(value: pa.StructType, event_time: str | None, key: tuple[str, ...]) -> bool:
    """Tell whether rows of such values need the JVM for nothing: not its clock's time zone, not its hash of a key."""
    kinds = {field.name: field.type for field in value}
    if event_time is not None:
        kind = kinds[event_time]
        if not (pa.types.is_signed_integer(kind) or (pa.types.is_timestamp(kind) and kind.tz is not None)):
            return False
    return all(hashable(kinds[name]) or pa.types.is_float32(kinds[name]) for name in key)


def bundle(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Give an Arrow batch as one row with one binary value."""
    data = frames.to_ipc_buffer(pa.Table.from_batches([batch]))
    return pa.RecordBatch.from_arrays([frames.one_binary(data)], [BUNDLE])


def unbundled(what: BundleInput, stage: Stage) -> Stage:
    """Put the rows of bundles before a stage that takes what `Job.pack_input` selects."""

    def opened(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for data, time_ms in zip(batch.column(BUNDLE), batch.column(frames.BATCH_TIME_IN), strict=True):
                for rows in frames.from_ipc(data.as_buffer(), "a bundle of source rows").to_batches():
                    if rows.num_rows:
                        yield pack_input(rows, what, time_ms.as_py())

    return lambda batches: stage(opened(batches))


def unmixed(what: BundleInput, stage: Stage, most_rows: int = MIXED_ROWS) -> Stage:
    """Put the rows of bundles together with the rows that `Job.pack_input` selected (`backend.sources.Mixing`).

    The stage gets what both are: the columns of `pack_input`, some `most_rows` at a time, a bundle and the rows between
    its own always at once: lateness goes by the order of offsets, which the pack stage restores within what it gets.
    """

    def opened(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        waiting: list[pa.RecordBatch] = []
        owed = 0
        for batch in batches:
            for rows, brings in _in_order(batch, what):
                owed = brings if brings is not None else max(0, owed - rows.num_rows)
                waiting.append(rows)
                if owed == 0 and sum(one.num_rows for one in waiting) >= most_rows:
                    yield _one(waiting)
                    waiting = []
        if owed:
            raise FrameDamaged("rows between those of a bundle did not come", why=f"{owed} are missing")
        if waiting:
            yield _one(waiting)

    return lambda batches: stage(opened(batches))


def _in_order(batch: pa.RecordBatch, what: BundleInput) -> Iterator[tuple[pa.RecordBatch, int | None]]:
    """Give the rows of each bundle, with the number of rows that belong between them; and rows between, with None."""
    bundles, rows = batch.column(BUNDLE), batch.drop_columns([BUNDLE])
    bundled = np.asarray(bundles.is_valid())
    edges = [0, *(np.flatnonzero(bundled[1:] != bundled[:-1]) + 1).tolist(), len(bundled)]
    for low, high in pairwise(edges):
        if low < high and not bundled[low]:
            yield rows.slice(low, high - low), None
            continue
        for at in range(low, high):
            data, time_ms, brings = (
                column[at] for column in (bundles, rows.column(frames.BATCH_TIME_IN), rows.column(OFFSET))
            )
            found = frames.from_ipc(data.as_buffer(), "a bundle of source rows").combine_chunks().to_batches()
            for part in found:
                yield pack_input(part, what, time_ms.as_py()).cast(rows.schema), brings.as_py()


def _one(parts: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(parts) == 1:
        return parts[0]
    [whole] = pa.Table.from_batches(parts).combine_chunks().to_batches()
    return whole


def reading(
    pieces: Sequence[Any], read: Callable[[Any], Iterator[pa.RecordBatch]], what: BundleInput, stage: Stage
) -> Stage:
    """Read pieces of a source by their number (column `id`), and put their rows through a stage, in one worker.

    This is for replays: no clock is compared with, so the batch time is 0.
    """

    def rows_of(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column("id").to_pylist():
                for rows in read(pieces[number]):
                    yield pack_input(rows, what, 0)

    return lambda batches: stage(rows_of(batches))


def pack_input(rows: pa.RecordBatch, what: BundleInput, time_ms: int) -> pa.RecordBatch:
    """Give what the pack stage reads of source rows: the columns of `Job.pack_input`.

    Args:
        rows: `topic, partition, offset, timestamp, key, value`.
        what: What the job says of them.
        time_ms: The batch time that Spark logged.

    Raises:
        SourceDamaged: A topic that was not there when the job started.
    """
    count = rows.num_rows
    value = rows.column("value")
    named = dict(zip((field.name for field in value.type), value.flatten(), strict=True))  # null where the value is
    stream = _streams(rows.column("topic"), what.streams)
    partition = np.asarray(rows.column("partition"), np.int64)
    time = _millis(rows.column("timestamp") if what.event_time is None else named[what.event_time])
    missing = value.is_null()
    length = _key_length([named[name] for name in what.key], count)
    too_long = pa.array(length > MAX_KEY_TEXT_BYTES) if length is not None else None
    malformed = pc.if_else(missing, NULL_VALUE, pa.scalar(None, pa.string()))
    raw = pa.nulls(count, pa.binary())
    if too_long is not None and too_long.true_count:
        malformed, raw = _with_long_keys(malformed, value, np.asarray(length))
    bad = pc.or_(malformed.is_valid(), time.is_null())
    columns = {
        STREAM: pa.array(stream, pa.int32()),
        PARTITION: rows.column("partition"),
        OFFSET: rows.column("offset"),
        TIME: time,
        frames.SHARD_IN: pa.array(_shards(stream, partition, named, what, count), pa.int32()),
        frames.TIMESTAMP_IN: _millis(rows.column("timestamp")),
        frames.KEY_IN: pc.if_else(bad, rows.column("key"), None) if bad.true_count else pa.nulls(count, pa.binary()),
        frames.RAW_IN: raw,
        frames.MALFORMED_IN: malformed,
        frames.BATCH_TIME_IN: pa.repeat(pa.scalar(time_ms, pa.int64()), count),
    }
    for field, own in what.fields:
        here = named.get(own) if own is not None else None
        columns[frames.column_name(field.name)] = here if here is not None else pa.nulls(count, field.type)
    return pa.RecordBatch.from_arrays(list(columns.values()), list(columns))


def _streams(topics: pa.Array, streams: Mapping[str, int]) -> npt.NDArray[np.int64]:
    codes = topics if pa.types.is_dictionary(topics.type) else topics.dictionary_encode()
    unknown = [name for name in codes.dictionary.to_pylist() if name not in streams]
    if unknown:
        raise SourceDamaged(
            "the source has a topic that was not there when the query started",
            where=str(unknown[0]),
            why=f"the query reads {', '.join(sorted(streams))}",
            command="name the topics that are to be read: archive(..., topics=[...])",
        )
    numbers = np.array([streams[name] for name in codes.dictionary.to_pylist()], np.int64)
    return np.take(numbers, np.asarray(codes.indices))


def _millis(times: pa.Array) -> pa.Array:
    """Give int64 milliseconds, rounded down as `unix_millis` does."""
    if pa.types.is_integer(times.type):
        return times.cast(pa.int64())
    per_ms = {"s": 0, "ms": 1, "us": 1_000, "ns": 1_000_000}[times.type.unit]
    ticks = times.cast(pa.int64())
    if per_ms <= 1:
        return pc.multiply(ticks, 1_000) if per_ms == 0 else ticks
    floor = np.asarray(ticks.fill_null(0), np.int64) // per_ms
    return pa.array(floor, mask=np.asarray(ticks.is_null())) if ticks.null_count else pa.array(floor)


def _key_length(columns: list[pa.Array], count: int) -> npt.NDArray[np.int64] | None:
    """Give the bytes of the texts in each row's key; None when it has no texts."""
    texts = [column for column in columns if _is_text(column.type)]
    if not texts:
        return None
    total = np.zeros(count, np.int64)
    for column in texts:
        total += np.asarray(pc.binary_length(column).fill_null(0), np.int64)
    return total


def _is_text(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_large_binary(kind)
    )


def _with_long_keys(malformed: pa.Array, value: pa.Array, length: npt.NDArray[np.int64]) -> tuple[pa.Array, pa.Array]:
    """Say of rows whose key is too long that they are malformed, and keep what they hold as JSON."""
    reasons = malformed.to_pylist()
    raw: list[bytes | None] = [None] * len(malformed)
    for row in np.flatnonzero(length > MAX_KEY_TEXT_BYTES).tolist():
        reasons[row] = f"the key has {length[row]} bytes, at most {MAX_KEY_TEXT_BYTES} are allowed"
        here = {name: found for name, found in value[row].as_py().items() if found is not None}
        raw[row] = json.dumps(here, separators=(",", ":"), ensure_ascii=False, default=str).encode()
    return pa.array(reasons, pa.string()), pa.array(raw, pa.binary())


def _shards(
    stream: npt.NDArray[np.int64],
    partition: npt.NDArray[np.int64],
    named: Mapping[str, pa.Array],
    what: BundleInput,
    count: int,
) -> npt.NDArray[np.int64]:
    if what.by_partition:
        return (partition + stream) % what.shards
    if not what.key or what.shards == 1:
        return np.zeros(count, np.int64)
    hashes = xxhash64([_normal(named[name], widen=what.widen) for name in what.key], count)
    return np.mod(hashes, what.shards)


def _normal(column: pa.Array, *, widen: bool) -> Any:
    """Give a key field such that equal keys hash alike, as `backend.spark.job._normal` does."""
    if pa.types.is_float32(column.type):
        return column.cast(pa.float64())
    if widen and pa.types.is_integer(column.type):
        return column.cast(pa.int64())
    return column
