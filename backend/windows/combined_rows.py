"""Rows that stand for several messages (backend.windows.aligned.combining): their columns, and what is asked of them.

A combined row (format of frames, backend.spark.pack.frames) has `MESSAGE_FIELDS` and the group key of its first
message, then

* the accumulator columns of the incremental aggregates, numbered, because a field may have any name;
* `_count` and `_last`: how many messages, and the offset of the last one;
* `_stamp`, `_layout` and `_places`: its own timestamp, and for each message a record of its distances to the one
  before it in offset, event time and own timestamp. A row that turns out to be refused comes out of it message by
  message, with its place and its times.

A record is as wide as the rows of a frame need: Spark copies a frame ten times on its way, and nearly all of it is
this. `_layout` says it in decimal digits: bytes of an offset (1, 2, 4, 8), of an event time, of an own timestamp (0:
it is as far from the one before as the event time), and whether a byte says that there is an own timestamp (else all
have one). Numbers are little-endian and signed.

The fields of such a message are not there any more, so the errors of these windows have no value, wherever messages
were combined and where not: `fetch_refused` reads it from the source.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backend.aggregates import IncrementalPlan
from backend.batch import ERROR_SCHEMA, OFFSET, PARTITION, STREAM, TIME
from backend.windows.columns.arrays import IntArray, Mask

Gaps: TypeAlias = "IntArray | npt.NDArray[np.int32]"

COUNT, LAST, STAMP, LAYOUT, PLACES = "_count", "_last", "_stamp", "_layout", "_places"
OWN_FIELDS = (
    *(pa.field(name, pa.int64(), nullable=False) for name in (COUNT, LAST, STAMP)),
    pa.field(LAYOUT, pa.int16(), nullable=False),
    pa.field(PLACES, pa.binary(), nullable=False),
)
_OLD_LISTS = ("_offsets", "_times", "_stamps")
"""Entries of format 1 (recovery.queue.entries) have these lists of distances from the first message instead."""
OWN_NAMES = frozenset((COUNT, LAST, STAMP, LAYOUT, PLACES, *_OLD_LISTS))
"""Messages with a field of such a name, or of an accumulator column's, are not combined."""
_ACCUMULATOR = "_partial_"
MARKS = frozenset((COUNT, LAST, STAMP))
"""Combined rows have all of them, messages never: `check_marks` refuses such fields, and a join's have prefixes."""


def check_marks(option: str, names: Collection[str]) -> None:
    """Refuse fields that would make messages look like combined rows.

    Raises:
        ValueError: They would.
    """
    if MARKS.issubset(names):
        raise ValueError(f"{option}: the field names {sorted(MARKS)} are reserved together: rename one of the fields")


def may_be_beside(names: Iterable[str]) -> bool:
    """Tell whether fields can stand beside the columns of combined rows."""
    return not any(name in OWN_NAMES or name.startswith(_ACCUMULATOR) for name in names)


def is_combined(messages: pa.Table) -> bool:
    """Tell whether rows are combined ones."""
    return MARKS.issubset(messages.column_names)


def counts(messages: pa.Table) -> IntArray:
    """Return how many messages each row stands for."""
    return _numbers(messages, COUNT) if is_combined(messages) else np.ones(messages.num_rows, np.int64)


def last_offsets(messages: pa.Table) -> IntArray:
    """Return the last offset of each row."""
    return _numbers(messages, LAST if is_combined(messages) else OFFSET)


def fold(messages: pa.Table, plan: IncrementalPlan, group: IntArray, count: int) -> pa.Table:
    """Return one accumulator per group, of messages or of combined rows; see `IncrementalPlan.fold`."""
    if not is_combined(messages):
        return plan.fold(messages, group, count)
    names = [accumulator_name(at) for at in range(len(plan.accumulator_schema))]
    return plan.merge(messages.select(names).rename_columns(plan.accumulator_schema.names), group, count)


def laid_out(
    offset: IntArray, time: IntArray, stamp: IntArray, known: Mask | None, order: IntArray, sizes: IntArray
) -> tuple[int, pa.BinaryArray]:
    """Return the layout and the records of combined rows.

    Args:
        offset: Of each message.
        time: Event times.
        stamp: Own timestamps, any number where there is none.
        known: Which messages have one; None for all.
        order: The messages row by row, those of a row in order.
        sizes: Messages of each row, at least one.
    """
    begins = np.cumsum(sizes) - sizes

    def gaps(values: IntArray) -> Gaps:
        ordered = np.take(_short(values), order)
        found = np.empty_like(ordered)
        np.subtract(ordered[1:], ordered[:-1], out=found[1:])
        found[begins] = 0
        return found

    columns = {"offset": gaps(offset), "time": gaps(time)}
    ahead = stamp - time
    if known is not None or not np.all(ahead == ahead[:1]):  # else the gaps are those of the event times
        own = gaps(stamp)
        if known is not None or not np.array_equal(own, columns["time"]):
            columns["stamp"] = own
    widths = {name: _width(column) for name, column in columns.items()}
    layout = int(f"{widths['offset']}{widths['time']}{widths.get('stamp', 0)}{int(known is not None)}")
    records = np.empty(len(order), _record(layout))
    for name, column in columns.items():
        records[name] = column
    if known is not None:
        records["known"] = known[order]
    bounds = np.concatenate([[0], np.cumsum(sizes)]) * records.itemsize
    buffers = [None, pa.py_buffer(bounds.astype(np.int32)), pa.py_buffer(records.view(np.uint8))]
    return layout, pa.Array.from_buffers(pa.binary(), len(sizes), buffers)


def _short(values: IntArray) -> Gaps:
    """Return distances from the first value, in 32 bits where those of any two have no more."""
    far = len(values) > 0 and int(values.max()) - int(values.min()) >= 1 << 31
    return values if far else (values - values[:1]).astype(np.int32)


def _width(values: Gaps) -> int:
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    return next(w for w in (1, 2, 4, 8) if -(1 << (8 * w - 1)) <= low and high < 1 << (8 * w - 1))


def _record(layout: int) -> np.dtype[np.void]:
    offset, time, stamp, known = map(int, f"{layout:04d}")
    own = [("stamp", f"<i{stamp}")] if stamp else []
    return np.dtype([("offset", f"<i{offset}"), ("time", f"<i{time}"), *own, *([("known", "?")] if known else [])])


def messages_of(rows: pa.Table) -> pa.Table:
    """Return place and times of each message of combined rows: columns of `ERROR_SCHEMA`, in order of place."""
    parts = list(_in_lists(rows) if PLACES not in rows.column_names else _in_records(rows))
    schema = pa.schema([ERROR_SCHEMA.field(n) for n in ("stream", "partition", "offset", "timestamp", "event_time")])
    tables = [
        pa.table([pa.array(column).cast(f.type) for column, f in zip(p, schema, strict=True)], schema) for p in parts
    ]
    table = pa.concat_tables(tables) if tables else schema.empty_table()
    return table.sort_by([(name, "ascending") for name in ("stream", "partition", "offset")])


def _in_records(rows: pa.Table) -> Iterator[list[Any]]:
    """Return the columns of `messages_of` for the rows of each layout."""
    layouts = _numbers(rows, LAYOUT)
    for layout in np.unique(layouts).tolist():
        mine = rows.filter(pa.array(layouts == layout))
        sizes = _numbers(mine, COUNT)
        records = np.frombuffer(b"".join(mine.column(PLACES).to_pylist()), _record(layout))
        begins, owner = np.cumsum(sizes) - sizes, np.repeat(np.arange(len(sizes)), sizes)

        names = records.dtype.names or ()
        found = []
        for first, gaps in ((OFFSET, "offset"), (STAMP, "stamp" if "stamp" in names else "time"), (TIME, "time")):
            total = np.cumsum(records[gaps], dtype=np.int64)
            found.append(_numbers(mine, first)[owner] + total - total[begins][owner])
        offset, stamp, time = found
        unknown = ~records["known"] if "known" in names else None
        owned = mine.select([STREAM, PARTITION]).take(pa.array(owner))
        yield [*owned.columns, offset, pa.array(stamp, mask=unknown), time]


def _in_lists(rows: pa.Table) -> Iterator[list[Any]]:
    sizes = _numbers(rows, COUNT)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    found = []
    for first, name in zip((OFFSET, TIME, STAMP), _OLD_LISTS, strict=True):
        flat = rows.column(name).combine_chunks().flatten()
        distances = np.asarray(flat.fill_null(0), np.int64)
        found.append(pa.array(_numbers(rows, first)[owner] + distances, mask=np.asarray(flat.is_null())))
    offset, time, stamp = found
    yield [*rows.select([STREAM, PARTITION]).take(pa.array(owner)).columns, offset, stamp, time]


def accumulator_name(at: int) -> str:
    """Return the name of an accumulator column."""
    return f"{_ACCUMULATOR}{at}"


def _numbers(table: pa.Table, name: str) -> IntArray:
    return np.asarray(table.column(name), dtype=np.int64)
