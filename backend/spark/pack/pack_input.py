"""What the job says of each row: stream, event time, shard, and the fields that the operator reads.

Here parsed records (`backend.sources.formats.Parse`) become the columns of the pack stage and of replays, over whole
Arrow batches, wherever they were read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backend.batch import OFFSET, PARTITION, STREAM, TIME
from backend.chunks import decoded, is_coded, is_repeated
from backend.errors import SourceDamaged
from backend.readable import readable
from backend.sources import GATHERED_BYTES, GATHERED_ROWS
from backend.sources.json_columns import instants
from backend.spark.pack import frames
from backend.spark.pack.hashing import xxhash64
from backend.spark.pack.narrow import SAMPLE
from backend.steps import VERDICT
from backend.store.limits import MAX_KEY_TEXT_BYTES, key_text_bytes, large_rows

DAY_MS = 86_400_000
CODED_ROWS = GATHERED_ROWS // 2
"""Batches of as many rows are not gathered, as those with dictionaries are not."""
_DATES_MS = (2**63 - 1) // 1_000 - 2 * DAY_MS
"""Dates up to there have a first moment, in microseconds, in each time zone."""
Stage = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PackInput:
    """What a job says of an input's rows, as plain data.

    Attributes:
        streams: Stream number by topic.
        event_time: Field with the event time; None takes the record's timestamp.
        key: Fields that route.
        by_partition: Rows are routed by source partition instead.
        shards: Number of shards.
        fields: The operator's fields that are of this input, each with the name that it has in the value.
        widen: Integers of all widths hash alike (a join's sides may differ).
        timezone: The session's: of event times without one.
        bases: Where rows are routed by source partition, the shard of partition 0 by stream; None: the stream's number.
        coded: What takes the rows takes a key that is a dictionary.
    """

    streams: Mapping[str, int]
    event_time: str | None
    key: tuple[str, ...]
    by_partition: bool
    shards: int
    fields: tuple[tuple[pa.Field, str], ...]
    widen: bool
    timezone: str = "UTC"
    bases: tuple[int, ...] | None = None
    coded: bool = False

    @property
    def hashes(self) -> bool:
        """Whether the key says which shard a row goes to."""
        return bool(self.key) and self.shards > 1 and not self.by_partition

    @property
    def names(self) -> frozenset[str]:
        """Fields of the values that are needed."""
        fields = {own for _, own in self.fields}
        return frozenset(fields | set(self.key) | ({self.event_time} if self.event_time is not None else set()))


def selecting(parse: Callable[[pa.RecordBatch], pa.RecordBatch], what: PackInput, stage: Stage) -> Stage:
    """Return a stage that takes records, out of one that takes what `pack_input` gives.

    Args:
        parse: Of the source.
        what: What the job says of its rows.
        stage: Takes the columns of `pack_input`.
    """

    def select(records: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        known = TextShards(what.shards)
        waiting: list[pa.RecordBatch] = []
        for batch in records:
            made = pack_input(parse(batch), what, known) if batch.num_rows else None
            if made is not None and any(is_coded(field.type) for field in made.schema):
                if waiting:
                    yield _together(waiting)
                    waiting = []
                yield made  # gathered, it would have to be decoded
            elif made is not None:
                waiting.append(made)
            if sum(one.num_rows for one in waiting) >= GATHERED_ROWS or sum(map(_bytes, waiting)) >= GATHERED_BYTES:
                yield _together(waiting)
                waiting = []
        if waiting:
            yield _together(waiting)

    return lambda records: stage(select(records))


def _together(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Return one batch of all; each one's key numbers are its own."""
    if len(batches) == 1:
        return batches[0]
    return pa.concat_batches([b.drop_columns([n for n in b.schema.names if n == frames.CODES_IN]) for b in batches])


def _bytes(rows: pa.RecordBatch) -> int:
    return int(rows.nbytes)


class TextShards:
    """Shards of texts; those that were asked for lately are known, each batch has nearly the same.

    Args:
        shards: Number of shards.
    """

    def __init__(self, shards: int) -> None:
        self._number = shards
        self._texts, self._shards = pa.array([], pa.string()), np.empty(0, np.int64)

    def of(self, texts: pa.Array) -> Ints:
        """Return the shard of each text."""
        if self._texts.equals(texts):  # batches of a row group have one dictionary
            return self._shards
        place = pc.index_in(texts, self._texts)
        new = texts.filter(place.is_null())
        shards = np.empty(len(texts), np.int64)
        unknown = np.asarray(place.is_null())
        shards[unknown] = np.mod(xxhash64([new], len(new)), self._number)
        shards[~unknown] = self._shards[np.asarray(place.drop_null())]
        self._texts, self._shards = texts, shards
        return shards


def pack_input(rows: pa.RecordBatch, what: PackInput, texts: TextShards | None = None) -> pa.RecordBatch:
    """Return what the pack stage and replays read of rows.

    Args:
        rows: `backend.sources.COLUMNS`.
        what: What the job says of them.
        texts: Knows the shards of the texts of the batch before.

    Raises:
        SourceDamaged: A topic that was not there when the job started.
    """
    count = rows.num_rows
    fields, malformed = readable(rows.column("fields"), rows.column("malformed"))
    named = dict(zip((field.name for field in fields.type), fields.flatten(), strict=True))  # null where the row is bad
    stream = _streams(rows.column("topic"), what.streams)
    partition = np.asarray(rows.column("partition"), np.int64)
    time = rows.column("timestamp") if what.event_time is None else named[what.event_time]
    named |= {name: decoded(named[name]) for name in what.key if not _is_short(named[name])}
    if what.coded and len(what.key) == 1 and what.hashes and count >= CODED_ROWS:
        named[what.key[0]] = _as_numbers(named[what.key[0]])
    keys = {name: named[name] for name in what.key}
    length = key_text_bytes([key for key in keys.values() if not pa.types.is_dictionary(key.type)], count)
    reasons = large_rows([named[own] for own in dict.fromkeys(own for _, own in what.fields)], count)
    if (length > MAX_KEY_TEXT_BYTES).any():
        reasons |= _long_keys(length)
        long = pa.array(length > MAX_KEY_TEXT_BYTES)  # they go where null does: nothing is made of such a key
        keys = {name: pc.if_else(long, pa.scalar(None, key.type), key) for name, key in keys.items()}
    if reasons:
        malformed = pa.array([reasons.get(row, why) for row, why in enumerate(malformed.to_pylist())], pa.string())
    shards, codes = _shards(stream, partition, keys, what, texts or TextShards(what.shards))
    columns = {
        STREAM: pa.array(stream.astype(np.int32)),
        PARTITION: rows.column("partition"),
        OFFSET: rows.column("offset"),
        TIME: millis(time, what.timezone),
        frames.SHARD_IN: pa.array(shards.astype(np.int32)),
        frames.TIMESTAMP_IN: millis(rows.column("timestamp"), what.timezone),
        frames.KEY_IN: rows.column("key"),
        frames.RAW_IN: fields if pa.types.is_null(rows.column("raw").type) else rows.column("raw"),
        frames.MALFORMED_IN: malformed,
    }
    if codes is not None:
        columns[frames.CODES_IN] = codes
    if VERDICT in rows.schema.names:
        columns[frames.VERDICT_IN] = rows.column(VERDICT)
    for field, own in what.fields:
        columns[frames.column_name(field.name)] = named[own]
    return pa.RecordBatch.from_arrays(list(columns.values()), list(columns))


def _streams(topics: pa.Array, streams: Mapping[str, int]) -> Ints:
    whole, count = is_repeated(topics), len(topics)  # as nearly always
    topics = topics[:1] if whole else topics
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
    return np.full(count, numbers[0]) if whole else np.take(numbers, np.asarray(codes.indices))


def millis(times: pa.Array, timezone: str) -> pa.Array:
    """Return event times as int64 milliseconds, rounded down.

    Args:
        times: Integers (milliseconds), timestamps, or dates: their first moment.
        timezone: Of dates, and of timestamps without one.
    """
    if pa.types.is_integer(times.type):
        return times.cast(pa.int64())
    if pa.types.is_date(times.type):
        own = times.cast(pa.date64()).cast(pa.int64())
        beyond = pc.fill_null(pc.or_(pc.greater(own, _DATES_MS), pc.less(own, -_DATES_MS)), False)
        if pc.any(beyond).as_py():  # no timestamp says them, and no zone has rules for them
            return pc.if_else(beyond, own, millis(pc.if_else(beyond, None, times), timezone))
    if pa.types.is_date(times.type) or times.type.tz is None:
        times = instants(times.cast(pa.timestamp("us")), timezone)
    per_ms = {"s": 0, "ms": 1, "us": 1_000, "ns": 1_000_000}[times.type.unit]
    ticks = times.cast(pa.int64())
    if per_ms <= 1:
        return pc.multiply(ticks, 1_000) if per_ms == 0 else ticks
    if not ticks.null_count:
        return pa.array(np.asarray(ticks) // per_ms)
    return pa.array(np.asarray(ticks.fill_null(0)) // per_ms, mask=np.asarray(ticks.is_null()))


def _long_keys(length: Ints) -> dict[int, str]:
    """Return the rows whose key is too long, and what is said of each."""
    return {
        row: f"the key has {length[row]} bytes, at most {MAX_KEY_TEXT_BYTES} are allowed"
        for row in np.flatnonzero(length > MAX_KEY_TEXT_BYTES).tolist()
    }


def _shards(
    stream: Ints, partition: Ints, keys: Mapping[str, pa.Array], what: PackInput, known: TextShards
) -> tuple[Ints, pa.Array | None]:
    """Return each row's shard, and the number of its key where it is one text."""
    columns = [_normal(keys[name], widen=what.widen) for name in what.key]
    hashed = what.hashes
    texts = codes = None
    if len(columns) == 1 and (is_coded(columns[0].type) or (hashed and pa.types.is_string(columns[0].type))):
        texts, codes = _texts(columns[0])  # each text once
    numbers = None if codes is None else pa.array(codes)
    if what.by_partition:
        base = stream if what.bases is None else np.take(np.array(what.bases, np.int64), stream)
        return (partition + base) % what.shards, numbers
    if not hashed:
        return np.zeros(len(stream), np.int64), numbers
    if texts is None or codes is None:
        return np.mod(xxhash64(columns, len(stream)), what.shards), None
    return np.take(known.of(texts), codes), numbers


def _texts(column: pa.Array) -> tuple[pa.Array, npt.NDArray[np.int32]]:
    """Return the texts of a column, each once, null among them, and each row's place there."""
    if not pa.types.is_dictionary(column.type):
        column = pc.dictionary_encode(column, null_encoding="encode")
        return column.dictionary, np.asarray(column.indices)
    texts, codes = column.dictionary, column.indices
    if codes.null_count:
        texts, codes = pa.concat_arrays([texts, pa.nulls(1, texts.type)]), codes.fill_null(len(texts))
    once = pc.dictionary_encode(texts, null_encoding="encode")  # a file's dictionary may have one twice
    if len(once.dictionary) == len(texts):
        return texts, np.asarray(codes)
    return once.dictionary, np.take(np.asarray(once.indices), np.asarray(codes))


def _as_numbers(keys: pa.Array) -> pa.Array:
    """Return texts that come again as a dictionary, if none of them is too long; others as they are."""
    if keys.type != pa.string() or len(keys[:SAMPLE].dictionary_encode().dictionary) * 2 > SAMPLE:
        return keys
    coded = keys.dictionary_encode()
    return coded if len(coded.dictionary) * 2 <= len(coded) and _is_short(coded) else keys


def _is_short(column: pa.Array) -> bool:
    """Return whether a key is none that is a dictionary, or one of fewer texts than rows, none of them too long."""
    if not pa.types.is_dictionary(column.type):
        return True
    texts = column.dictionary
    return len(texts) < len(column) and (pc.max(pc.binary_length(texts)).as_py() or 0) <= MAX_KEY_TEXT_BYTES


def _normal(column: pa.Array, *, widen: bool) -> Any:
    """Return a key field such that equal keys hash alike."""
    if pa.types.is_float32(column.type):
        return column.cast(pa.float64())
    if widen and pa.types.is_integer(column.type):
        return column.cast(pa.int64())
    return column
