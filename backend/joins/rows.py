"""Messages of a join as rows: how they are stored, found again, and turned back into columns.

Key: by the spec's layout (backend.messages has the bytes). Value: the side's own fields, as a row of `backend.rows`; in
layouts without event time it leads them. The stream in the key tells the side. Messages whose equal fields are null
can meet nobody: they are stored only where rows without a partner come out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backend.batch import BEFORE, MESSAGE_FIELDS, OFFSET, PARTITION, STREAM, TIME
from backend.chunks import taken_rows
from backend.joins import match
from backend.joins.sides import Side
from backend.joins.spec import JoinSpec
from backend.keys import encode_columns, joined
from backend.messages import OFFSET_FIRST, Part, index_keys, message_keys, message_order
from backend.messages.keys import stamps
from backend.rows import RowCodec
from backend.store.rows import StoreRows
from backend.windows.columns.arrays import IntArray, Mask
from backend.windows.micro_batch import numbers

_TIME_FIELD = pa.field(TIME, pa.int64(), nullable=False)


@dataclass
class Rows:
    """Messages of one side, at hand or stored; all arrays are of one length.

    Attributes:
        stream: Number of the stream.
        partition: Source partition.
        offset: Source offset.
        time: Event time.
        at: Event time, or number of the message in its source partition.
        clock: Newest event time before it, or its number; `NO_TIME` where it does not matter.
        equal: Code of the equal fields; None without equal fields.
        known: Rows whose equal fields have no null.
        fields: The side's fields; None where they are still encoded.
        keys: Full keys; empty for messages at hand.
        values: Encoded fields.
        parts: Of rows from two places (`together`): the stored rows, and those at hand.
        origin: Which row each is of these, the ones at hand behind the stored ones.
        sizes: Bytes of each row's encoded fields; None until they are asked for.
    """

    stream: IntArray
    partition: IntArray
    offset: IntArray
    time: IntArray
    at: IntArray
    clock: IntArray
    equal: pa.Array | None
    known: Mask
    fields: pa.Table | None
    keys: list[bytes]
    values: list[bytes]
    parts: tuple[Rows, Rows] | None = None
    origin: IntArray | None = None
    sizes: IntArray | None = None

    def __len__(self) -> int:
        return len(self.offset)

    def where(self, mask: Mask) -> Rows:
        """Give some of the rows."""
        return self if mask.all() else self.take(np.flatnonzero(mask))

    def take(self, rows: IntArray) -> Rows:
        """Give rows in an order."""
        picked = rows.tolist() if self.keys or self.values else []
        return Rows(
            self.stream[rows],
            self.partition[rows],
            self.offset[rows],
            self.time[rows],
            self.at[rows],
            self.clock[rows],
            None if self.equal is None else self.equal.take(pa.array(rows)),
            self.known[rows],
            None if self.fields is None else taken_rows(self.fields, rows),
            [self.keys[at] for at in picked] if self.keys else [],
            [self.values[at] for at in picked] if self.values else [],
            self.parts,
            None if self.origin is None else self.origin[rows],
        )

    def of_parts(self, picked: IntArray) -> tuple[Mask, IntArray, IntArray]:
        """Give which of the picked rows are at hand, the stored rows that the others are, and the rows at hand."""
        first = len(self) if self.parts is None else len(self.parts[0])
        at = picked if self.origin is None else self.origin[picked]
        fresh = at >= first
        return fresh, at[~fresh], at[fresh] - first


@dataclass(frozen=True, slots=True)
class Encoded:
    """Messages as rows of the store.

    Attributes:
        keys: Sorted.
        values: Their values.
        index: Keys of index rows, sorted; empty where the layout has none.
        order: Which message each key is of.
    """

    keys: list[bytes]
    values: list[bytes]
    index: list[bytes]
    order: IntArray


class JoinRows:
    """Turns messages into rows and back.

    Args:
        spec: The join.
    """

    def __init__(self, spec: JoinSpec) -> None:
        self.spec, self.layout = spec, spec.layout
        lead = [] if self.layout.timed else [_TIME_FIELD]
        places: dict[tuple[Part, ...], tuple[int, int]] = {
            (Part.EQUAL, Part.TIME): (1, -22),
            (Part.TIME, Part.EQUAL): (9, -14),
        }
        self._equal_at = places.get(self.layout.parts[:2])
        self._codecs = [RowCodec(pa.schema([*lead, *side.fields])) for side in spec.sides]

    def of_side(self, messages: pa.Table, side: Side) -> pa.Table:
        """Give one side's messages with its fields under their own names."""
        streams = numbers(messages, STREAM)
        mine = (streams < self.spec.left_streams) == (side.number == 0)
        table = messages.select([*(f.name for f in MESSAGE_FIELDS), *(f.name for f in side.columns)])
        table = table if mine.all() else table.filter(pa.array(mine))
        return table.rename_columns([*(f.name for f in MESSAGE_FIELDS), *(f.name for f in side.fields)])

    def arrived(self, table: pa.Table, side: Side) -> Rows:
        """Give messages at hand as rows; `at` and `clock` are their times."""
        time = numbers(table, TIME)
        equal, known = self._equal(table, side)
        columns = [table.column(f.name) for f in side.fields]
        fields = pa.Table.from_arrays(columns, schema=pa.schema(side.fields))
        stream, partition, offset = (numbers(table, name) for name in (STREAM, PARTITION, OFFSET))
        return Rows(stream, partition, offset, time, time, numbers(table, BEFORE), equal, known, fields, [], [])

    def encode(self, table: pa.Table, side: Side) -> Encoded:
        """Give messages as rows of the store, sorted by key; they come in the order of the source."""
        equal, _ = self._equal(table, side)
        session = self._session(table, side)
        codes = {"equal": equal if Part.EQUAL in self.layout.parts else None, "session": session}
        order = message_order(self.layout, table, **codes)
        if (np.diff(order) < 0).any():
            table, rows = taken_rows(table, order), pa.array(order)
            codes = {name: None if code is None else code.take(rows) for name, code in codes.items()}
        keys = message_keys(self.layout, table, **codes)
        index = sorted(index_keys(self.layout, table, **codes)) if self.layout.indexed else []
        return Encoded(keys, self._codecs[side.number].encode(table), index, order)

    def storable(self, known: Mask, side: Side) -> Mask:
        """Tell which messages are worth storing."""
        return np.ones(len(known), np.bool_) if side.outer else known

    def replay_rows(self, messages: pa.Table) -> StoreRows:
        """Give the rows of accepted messages of both sides, index rows included, sorted by key."""
        keys: list[bytes] = []
        values: list[bytes] = []
        index: list[bytes] = []
        for side in self.spec.sides:
            table = self.of_side(messages, side)
            table = taken_rows(table, place_order(*(numbers(table, name) for name in (STREAM, PARTITION, OFFSET))))
            _, known = self._equal(table, side)
            found = self.encode(table.filter(pa.array(self.storable(known, side))), side)
            keys += found.keys
            values += found.values
            index += found.index
        return StoreRows.of(keys + index, values + [b""] * len(index)).sorted()

    def split(self, keys: Sequence[bytes], values: Sequence[bytes]) -> tuple[Rows, Rows]:
        """Give stored messages as rows of the left and of the right side, each in the order of the source."""
        stream = stamps(OFFSET_FIRST, keys)[STREAM].to_numpy()  # which every key ends with
        left = stream < self.spec.left_streams
        parts = []
        for side in self.spec.sides:
            rows = np.flatnonzero(left == (side.number == 0)).tolist()
            found = self.stored([keys[at] for at in rows], [values[at] for at in rows], side)
            parts.append(found.take(place_order(found.stream, found.partition, found.offset)))
        return parts[0], parts[1]

    def stored(self, keys: Sequence[bytes], values: Sequence[bytes], side: Side) -> Rows:
        """Give stored messages of one side as rows; `at` and `clock` are to be set."""
        fields, equal = None, None
        if self.layout.timed and self._equal_at is not None:
            start, end = self._equal_at
            equal = pa.array([key[start:end] for key in keys], pa.binary())
        elif side.on or not self.layout.timed:
            table = self._codecs[side.number].decode(values)
            fields, (equal, _) = table.select([f.name for f in side.fields]), self._equal(table, side)
        place = stamps(self.layout, keys, equal)
        stream, partition, offset = (place[name].to_numpy().astype(np.int64) for name in (STREAM, PARTITION, OFFSET))
        time = place[TIME].to_numpy() if self.layout.timed else numbers(table, TIME)
        known = np.ones(len(keys), np.bool_)  # a code with null in it is never asked for
        return Rows(stream, partition, offset, time, time, time, equal, known, fields, list(keys), list(values))

    def fields(self, rows: Rows, picked: IntArray, side: Side) -> pa.Table:
        """Give the fields of some rows; each is decoded once however often it is picked."""
        if rows.parts is not None:
            fresh, *at = rows.of_parts(picked)
            tables = [self.fields(part, some, side) for part, some in zip(rows.parts, at, strict=True)]
            place = np.argsort(np.concatenate([np.flatnonzero(~fresh), np.flatnonzero(fresh)]))
            return taken_rows(pa.concat_tables(tables), place)
        if rows.fields is not None:
            return taken_rows(rows.fields, picked)
        needed, place = np.unique(picked, return_inverse=True)
        table = self._codecs[side.number].decode([rows.values[at] for at in needed.tolist()])
        return taken_rows(table.select([f.name for f in side.fields]), place)

    def sizes(self, rows: Rows, picked: IntArray, side: Side) -> IntArray:
        """Give the bytes of each picked row's fields; zeros where all together are few, whichever they are."""
        if rows.parts is not None:
            fresh, *at = rows.of_parts(picked)
            found = np.zeros(len(picked), np.int64)
            found[~fresh], found[fresh] = (
                self.sizes(part, some, side) for part, some in zip(rows.parts, at, strict=True)
            )
            return found
        if rows.sizes is None and rows.values:
            rows.sizes = np.fromiter(map(len, rows.values), np.int64, len(rows))
        if rows.sizes is None:
            if rows.fields is None or rows.fields.nbytes * np.bincount(picked, minlength=1).max() <= match.CHUNK_BYTES:
                return np.zeros(len(picked), np.int64)
            encoded = RowCodec(pa.schema(side.fields)).encode_column(rows.fields)
            rows.sizes = pc.binary_length(encoded).to_numpy()
        return rows.sizes[picked]

    def _equal(self, table: pa.Table, side: Side) -> tuple[pa.Array | None, Mask]:
        """Give the code of the equal fields, and which rows have no null in them."""
        if not side.on:
            return None, np.ones(table.num_rows, np.bool_)
        columns = [table.column(name) for name in side.on]
        known = np.ones(table.num_rows, np.bool_)
        for column in columns:
            if column.null_count:
                known &= pc.is_valid(column).to_numpy()
        return encode_columns(columns), known

    def _session(self, table: pa.Table, side: Side) -> pa.Array | None:
        if not self.spec.session_key:
            return None
        return encode_columns([table.column(side.on[at]) for at in self.spec.session_key])

    def prefixes(self, rows: Rows, side: Side) -> pa.Array:
        """Give the code that a message's key begins with, for layouts that begin with one; of rows at hand."""
        assert rows.fields is not None, "rows at hand have their fields"
        parts = [rows.equal if part is Part.EQUAL else self._session(rows.fields, side) for part in self.layout.leading]
        return joined(parts)


def together(stored: Rows, new: Rows) -> Rows:
    """Put stored messages and messages at hand behind each other, in the order of the source."""
    names = ("stream", "partition", "offset", "time", "at", "clock", "known")
    stream, partition, offset, time, at, clock, known = (
        np.concatenate([getattr(stored, name), getattr(new, name)]) for name in names
    )
    equal = None
    if stored.equal is not None and new.equal is not None:
        equal = pa.concat_arrays([part.cast(pa.binary()) for part in (stored.equal, new.equal)])
    origin = np.arange(len(offset))
    both = Rows(stream, partition, offset, time, at, clock, equal, known, None, [], [], (stored, new), origin)
    return both if not len(stored) or not len(new) else both.take(place_order(stream, partition, offset))


def place_order(stream: IntArray, partition: IntArray, offset: IntArray) -> IntArray:
    """Give the rows in the order (stream, source partition, offset)."""
    order: IntArray
    if not len(offset) or ((stream == stream[0]) & (partition == partition[0])).all():
        order = np.argsort(offset, kind="stable")
    else:
        order = np.lexsort((offset, partition, stream))
    return order
