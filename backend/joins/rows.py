"""Messages of a join as rows: how they are stored, found again, and turned back into columns.

Key: by the spec's layout (backend.messages has the bytes). Value: the side's own fields, as a row of `backend.rows`; in
layouts without event time it leads them. The stream in the key tells the side. Messages whose equal fields are null
can meet nobody: they are stored only where rows without a partner come out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backend.batch import BEFORE, MESSAGE_FIELDS, NO_TIME, OFFSET, PARTITION, STREAM, TIME
from backend.chunks import taken_rows
from backend.joins import match
from backend.joins.sides import Side
from backend.joins.spec import JoinSpec
from backend.keys import encode_columns, joined
from backend.messages.keys import OFFSET_BYTES, TIME_BYTES, index_keys, message_keys, stamps
from backend.messages.layout import OFFSET_FIRST, Part
from backend.messages.rows import MessageCodec
from backend.rows import RowCodec
from backend.store.rows import StoreRows
from backend.windows.columns.arrays import IntArray, Mask
from backend.windows.micro_batch import numbers

_TIME_FIELD = pa.field(TIME, pa.int64(), nullable=False)
_ARRAYS = ("stream", "partition", "offset", "time", "at", "clock", "known", "origin")

Place = tuple[int, int, int]
"""(stream, source partition, offset)."""


@dataclass
class Rows:
    """Messages of one side, stored, at hand, or both; all arrays are of one length.

    Attributes:
        side: The side.
        stream: Number of the stream.
        partition: Source partition.
        offset: Source offset.
        time: Event time.
        at: Event time, or number of the message in its source partition.
        clock: Newest event time before it, or its number; `NO_TIME` where it does not matter.
        known: Rows whose equal fields have no null.
        origin: Which message each row is: of `values`, and behind them of `table`.
        equal: Code of the equal fields; None without equal fields.
        values: Encoded fields of stored messages.
        decoded: The same as columns; None where nothing had to be read from them.
        table: Messages at hand: place, event time and the side's fields.
        sizes: Bytes of the encoded fields of each message; None until they are asked for.
    """

    side: Side
    stream: IntArray
    partition: IntArray
    offset: IntArray
    time: IntArray
    at: IntArray
    clock: IntArray
    known: Mask
    origin: IntArray
    equal: pa.Array | None
    values: Sequence[bytes]
    decoded: pa.Table | None
    table: pa.Table
    sizes: IntArray | None = None

    def __len__(self) -> int:
        return len(self.offset)

    @property
    def fresh(self) -> Mask:
        """Which rows are at hand."""
        return self.origin >= len(self.values)

    @property
    def messages(self) -> pa.Table:
        """The messages of rows that are all at hand."""
        whole = len(self) == len(self.table) and bool((np.diff(self.origin) == 1).all())
        return self.table if whole else taken_rows(self.table, self.origin)

    def number_from(self, firsts: Sequence[Place]) -> None:
        """Let `at` and `clock` be the number of each message in its source partition, which begin with offsets."""
        self.at = self.clock = self.offset - offsets_of(firsts, self.stream, self.partition, 0)

    def where(self, mask: Mask) -> Rows:
        """Give some of the rows."""
        return self if mask.all() else self.take(np.flatnonzero(mask))

    def take(self, rows: IntArray) -> Rows:
        """Give rows in an order."""
        equal = None if self.equal is None else self.equal.take(pa.array(rows))
        return replace(self, equal=equal, **{name: getattr(self, name)[rows] for name in _ARRAYS})

    def in_order(self) -> Rows:
        """Give the rows in the order of the source."""
        if len(self) and (self.stream == self.stream[0]).all() and (self.partition == self.partition[0]).all():
            order = np.argsort(self.offset, kind="stable")
        else:
            order = np.lexsort((self.offset, self.partition, self.stream))
        return self.take(order) if (np.diff(order) < 0).any() else self


class JoinRows:
    """Turns messages into rows and back.

    Args:
        spec: The join.
    """

    def __init__(self, spec: JoinSpec) -> None:
        self.spec, self.layout = spec, spec.layout
        lead = [] if self.layout.timed else [_TIME_FIELD]
        places: dict[tuple[Part, ...], slice] = {
            (Part.EQUAL, Part.TIME): slice(1, -TIME_BYTES - OFFSET_BYTES),
            (Part.TIME, Part.EQUAL): slice(1 + TIME_BYTES, -OFFSET_BYTES),
        }
        self._equal_at = places.get(self.layout.parts[:2])
        self._codecs = [MessageCodec(self.layout, [*lead, *side.fields]) for side in spec.sides]
        self._schemas = [pa.schema([*MESSAGE_FIELDS, *side.fields]) for side in spec.sides]

    def of_side(self, messages: pa.Table, side: Side) -> pa.Table:
        """Give one side's messages with its fields under their own names."""
        mine = (numbers(messages, STREAM) < self.spec.left_streams) == (side.number == 0)
        table = messages.select([*(f.name for f in MESSAGE_FIELDS), *(f.name for f in side.columns)])
        table = table if mine.all() else table.filter(pa.array(mine))
        return pa.Table.from_arrays(table.columns, schema=self._schemas[side.number])

    def arrived(self, table: pa.Table, side: Side) -> Rows:
        """Give one side's messages at hand as rows; `at` and `clock` are their times."""
        stream, partition, offset, time, before = (
            numbers(table, name) for name in (STREAM, PARTITION, OFFSET, TIME, BEFORE)
        )
        equal, known = self._equal(table, side)
        origin = np.arange(len(time))
        return Rows(side, stream, partition, offset, time, time, before, known, origin, equal, [], None, table)

    def stored(self, keys: Sequence[bytes], values: Sequence[bytes], side: Side) -> Rows:
        """Give stored messages of one side as rows; `at` and `clock` are to be set."""
        decoded, equal = None, None
        if self._equal_at is not None:
            equal = pa.array([key[self._equal_at] for key in keys], pa.binary())
        elif side.on or not self.layout.timed:
            decoded = self._codecs[side.number].codec.decode(values)
            equal, _ = self._equal(decoded, side)
        stream, partition, offset, *times = stamps(self.layout, keys, equal)
        time = times[0] if self.layout.timed else numbers(decoded, TIME)
        known, origin = np.ones(len(keys), np.bool_), np.arange(len(keys))  # a code with null in it is never asked for
        none = self._schemas[side.number].empty_table()
        return Rows(side, stream, partition, offset, time, time, time, known, origin, equal, values, decoded, none)

    def split(self, keys: Sequence[bytes], values: Sequence[bytes]) -> tuple[Rows, Rows]:
        """Give stored messages as rows of the left and of the right side, each in the order of the source."""
        left = stamps(OFFSET_FIRST, keys)[0] < self.spec.left_streams  # every key ends with the offset
        parts = []
        for side in self.spec.sides:
            rows = np.flatnonzero(left == (side.number == 0)).tolist()
            parts.append(self.stored([keys[at] for at in rows], [values[at] for at in rows], side).in_order())
        return parts[0], parts[1]

    def storable(self, rows: Rows) -> Mask:
        """Tell which messages are worth storing."""
        return rows.known | rows.side.outer

    def keys(self, rows: Rows) -> list[bytes]:
        """Give the keys of messages at hand, in their order."""
        return message_keys(self.layout, rows.messages, self._codes(rows))

    def encode(self, rows: Rows) -> tuple[StoreRows, list[bytes], Rows]:
        """Give messages at hand, which come in the order of the source, as rows of the store, sorted by key.

        Returns:
            Keys and values; the keys of index rows, where the layout has them; the message of each key.
        """
        table, codes = rows.messages, self._codes(rows)
        found, order = self._codecs[rows.side.number].ordered_rows(table, codes)
        index = sorted(index_keys(self.layout, table, codes)) if self.layout.indexed else []
        return found, index, rows.take(order)

    def replay_rows(self, messages: pa.Table) -> StoreRows:
        """Give the rows of accepted messages of both sides, index rows included, sorted by key."""
        parts = []
        for side in self.spec.sides:
            rows = self.arrived(self.of_side(messages, side), side).in_order()
            found, index, _ = self.encode(rows.where(self.storable(rows)))
            parts += [found, StoreRows.of(index, [b""] * len(index))]
        return StoreRows.joined(parts).sorted()

    def prefixes(self, rows: Rows) -> pa.Array:
        """Give the code that a message's key begins with, for layouts that begin with one; of rows at hand."""
        codes = self._codes(rows)
        return joined([codes[part] for part in self.layout.leading])

    def half(self, rows: Rows, picked: IntArray) -> tuple[IntArray, pa.Table]:
        """Give the event times and the fields of some rows."""
        return rows.time[picked], self.fields(rows, picked)

    def fields(self, rows: Rows, picked: IntArray) -> pa.Table:
        """Give the fields of some rows; each is decoded once however often it is picked."""
        at, first = rows.origin[picked], len(rows.values)
        names = [f.name for f in rows.side.fields]
        fresh, at_hand = at >= first, rows.table.select(names)
        if fresh.all():
            return taken_rows(at_hand, at - first)
        stored, needed = rows.decoded, at[~fresh]
        if stored is None:
            found, needed = np.unique(needed, return_inverse=True)
            stored = self._codecs[rows.side.number].codec.decode([rows.values[one] for one in found.tolist()])
        stored = taken_rows(stored.select(names), needed)
        if not fresh.any():
            return stored
        place = np.argsort(np.concatenate([np.flatnonzero(~fresh), np.flatnonzero(fresh)]))
        return taken_rows(pa.concat_tables([stored, taken_rows(at_hand, at[fresh] - first)]), place)

    def sizes(self, rows: Rows, picked: IntArray) -> IntArray:
        """Give the bytes of each picked row's fields; zeros for those at hand where all together are few."""
        at, first = rows.origin[picked], len(rows.values)
        at_hand = rows.table.select([f.name for f in rows.side.fields])
        if rows.sizes is None:
            rows.sizes = np.zeros(first + len(at_hand), np.int64)
            rows.sizes[:first] = np.fromiter(map(len, rows.values), np.int64, first)
        if len(at_hand) and not rows.sizes[first]:
            most = at_hand.nbytes * np.bincount(at[at >= first] - first, minlength=1).max()
            if most > match.CHUNK_BYTES:
                rows.sizes[first:] = pc.binary_length(RowCodec(at_hand.schema).encode_column(at_hand)).to_numpy()
        return rows.sizes[at]

    def _equal(self, table: pa.Table, side: Side) -> tuple[pa.Array | None, Mask]:
        """Give the code of the equal fields, and which rows have no null in them."""
        known = np.ones(table.num_rows, np.bool_)
        if not side.on:
            return None, known
        columns = [table.column(name) for name in side.on]
        for column in columns:
            if column.null_count:
                known &= pc.is_valid(column).to_numpy()
        return encode_columns(columns), known

    def _codes(self, rows: Rows) -> Mapping[Part, pa.Array]:
        """Give the codes of messages at hand, of which their keys may have some."""
        codes = {} if rows.equal is None else {Part.EQUAL: rows.equal}
        if self.spec.session_key:
            table, on = rows.messages, rows.side.on
            codes[Part.SESSION] = encode_columns([table.column(on[at]) for at in self.spec.session_key])
        return codes


def together(stored: Rows, new: Rows) -> Rows:
    """Put stored messages and messages at hand behind each other, in the order of the source."""
    arrays: dict[str, Any] = {name: np.concatenate([getattr(stored, name), getattr(new, name)]) for name in _ARRAYS}
    arrays["origin"][len(stored) :] += len(stored.values)
    equal = None
    if stored.equal is not None and new.equal is not None:
        equal = pa.concat_arrays([part.cast(pa.binary()) for part in (stored.equal, new.equal)])
    both = replace(new, values=stored.values, decoded=stored.decoded, equal=equal, sizes=None, **arrays)
    return both.in_order()


def offsets_of(known: Sequence[Place], stream: IntArray, partition: IntArray, otherwise: int = NO_TIME) -> IntArray:
    """Give per message the offset that is known of its source partition."""
    out = np.full(len(stream), otherwise, np.int64)
    for s, p, offset in known:
        out[(stream == s) & (partition == p)] = offset
    return out
