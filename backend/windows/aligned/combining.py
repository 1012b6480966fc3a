"""Combining: messages that every window treats alike become one row before they cross to the shard.

The pack stage combines where that is exact: messages of one slice, shard and group key, in one pane, and in one *cell*
of the newest event time before them (`BEFORE`), on the grid of every window's end and every end plus the retention.
What the operator asks of a message is how many ends the clock before it had passed, and how many of them are out of
retention. The clock is the larger of `BEFORE` and what the shard knows beside it, and a maximum with one number keeps
what is in one cell in one cell. So all messages of a combined row are early, in time, late or refused together, under
any clock that the shard turns out to have, and nothing depends on where slices are cut.

A message that moved the watermark far stands alone, because it is reported, and so does the first of a slice. Where
combined rows would not be far fewer than messages, each message is a row of its own.

Not combined: aggregates over all values, `reducer` (user code runs in the operator), retention by number of messages
(it counts them), fields with the names of combined rows' own columns, sliding windows, sessions, windows by number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from backend.aggregates.groups import stable_order
from backend.batch import BEFORE, MESSAGE_FIELDS, NO_TIME, OFFSET, PARTITION, STREAM, TIME
from backend.chunks import plain_table
from backend.windows.arrivals import started
from backend.windows.columns.arrays import IntArray, compress, dense, firsts
from backend.windows.columns.grouping import GroupKeys
from backend.windows.combined_rows import OWN_FIELDS, accumulator_name, laid_out, may_be_beside
from backend.windows.definitions import assigner
from backend.windows.micro_batch import numbers

if TYPE_CHECKING:
    from backend.aggregates import IncrementalPlan
    from backend.windows.spec import WindowSpec

FEWER = 2
"""A combined row is wider than a message: half as many rows make up for it."""

SAMPLE = 8_192
"""Rows that are looked at first to tell whether it is worth it."""


class Combining:
    """Combines messages for tumbling and hopping windows.

    Args:
        spec: Of these windows, with what `combines` allows.
        fewer: Messages are combined where there are at least so many times as many as combined rows.
        plan: The incremental aggregates, where they are compiled already.
    """

    def __init__(self, spec: WindowSpec, fewer: int = FEWER, *, plan: IncrementalPlan | None = None) -> None:
        self._fewer = fewer
        self._grid = assigner(spec.window)
        self._retention_ms, self._max_ahead_ms = spec.retention_ms, spec.max_ahead_ms
        self._keys, self._key_fields = GroupKeys(spec.key_fields), spec.key_fields
        self._plan = plan if plan is not None else spec.plans()[0]
        read = {name for aggregate in spec.aggregates.values() for name in aggregate.fields}
        self.coded = frozenset(spec.keys) - read
        """Fields that may come as dictionaries."""

    @property
    def schema(self) -> pa.Schema:
        """Schema of combined rows."""
        accumulators = [f.with_name(accumulator_name(at)) for at, f in enumerate(self._plan.accumulator_schema)]
        return pa.schema([*MESSAGE_FIELDS, *self._key_fields, *accumulators, *OWN_FIELDS])

    def combined(
        self, messages: pa.Table, timestamps: pa.Array, shard: IntArray, codes: IntArray | None = None
    ) -> tuple[pa.Table, IntArray] | None:
        """Return combined rows, shard by shard in the order of their first messages, and the shard of each.

        None: it is not worth it.

        Args:
            messages: `MESSAGE_FIELDS` and the fields that the operator reads, in order of (stream, source partition,
                offset), none twice; `BEFORE` counts from the start of each slice.
            timestamps: The messages' own timestamps, milliseconds; may be null.
            shard: Shard of each message.
            codes: A number below that of messages, the same for equal group keys, where it is known.
        """
        rows = messages.num_rows
        if rows > SAMPLE:
            some = codes[:SAMPLE] if codes is not None else None
            if self._distinct(messages.slice(0, SAMPLE), shard[:SAMPLE], some)[1] * self._fewer > SAMPLE:
                return None
        number, count = self._distinct(messages, shard, codes)
        if count * self._fewer > rows:
            return None
        first = firsts(number, count)
        order = np.lexsort((first, shard[first]))
        rank = np.empty(count, np.int64)
        rank[order] = np.arange(count)
        return self._rows(messages, timestamps, rank[number], count), shard[first[order]]

    def each(self, messages: pa.Table, timestamps: pa.Array) -> pa.Table:
        """Return a row for each message: what came uncombined, to stand beside what did not."""
        return self._rows(messages, timestamps, np.arange(messages.num_rows), messages.num_rows)

    def _rows(self, messages: pa.Table, timestamps: pa.Array, group: IntArray, count: int) -> pa.Table:
        """Return a row per group."""
        sizes = np.bincount(group, minlength=count)
        order = stable_order(group, count)
        ends = np.cumsum(sizes)
        first, last = order[ends - sizes], order[ends - 1]
        offset, time = numbers(messages, OFFSET), numbers(messages, TIME)
        stamp = np.asarray(timestamps.fill_null(0) if timestamps.null_count else timestamps, np.int64)
        known = np.asarray(timestamps.is_valid()) if timestamps.null_count else None
        layout, places = laid_out(offset, time, stamp, known, order, sizes)
        heads = messages.select([f.name for f in (*MESSAGE_FIELDS, *self._key_fields)]).take(pa.array(first))
        accumulators = self._plan.fold(messages, group, count)
        layouts = pa.repeat(pa.scalar(layout, pa.int16()), count)
        own = [pa.array(sizes), pa.array(offset[last]), pa.array(stamp[first]), layouts, places]
        return pa.table([*plain_table(heads).columns, *accumulators.columns, *own], schema=self.schema)

    def _distinct(self, messages: pa.Table, shard: IntArray, codes: IntArray | None) -> tuple[IntArray, int]:
        """Number what may be combined, in any order; gives each message's number, and how many there are."""
        time, before = numbers(messages, TIME), numbers(messages, BEFORE)
        apart = np.flatnonzero(before == NO_TIME)
        # what stands alone needs no cell: one far from the others' would only make their numbers sparse
        clock = before.copy()
        clock[apart] = started(int(before.max()))
        number = self._keys.encode(messages)[0] if codes is None else codes
        bound, most = int(number.max()) + 1, 4 * len(number)
        for column in self._apart(messages, time, clock, shard if codes is None else None):
            other, distinct = compress(column)
            if len(distinct) == 1:
                continue
            if bound * len(distinct) > most:
                number, found = dense(number, bound)
                bound = len(found)
            number = number * len(distinct) + other
            bound *= len(distinct)
        if self._max_ahead_ms is not None and int(time.max()) - int(clock.min()) > self._max_ahead_ms:
            apart = np.flatnonzero((before == NO_TIME) | (time - clock > self._max_ahead_ms))
        if number is codes:
            number = number.copy()
        number[apart] = bound + np.arange(len(apart))
        number, found = dense(number, bound + len(apart))
        return number, len(found)

    def _apart(self, messages: pa.Table, time: IntArray, clock: IntArray, shard: IntArray | None) -> Iterator[IntArray]:
        """Give what must be the same of messages beside the key, where it is not the same of all.

        No shard where keys have numbers: the key tells it, or the source partition.
        """
        low, high = self._grid.pane_of(np.array([time.min(), time.max()]))
        if low != high:
            yield self._grid.pane_of(time)
        yield from self._cells(clock)
        if shard is not None:
            yield shard
        stream, partition = messages.column(STREAM), messages.column(PARTITION)
        if stream[0] != stream[-1]:  # they are sorted
            yield numbers(messages, STREAM)
        if stream[0] != stream[-1] or partition[0] != partition[-1]:
            yield numbers(messages, PARTITION)

    def _cells(self, clock: IntArray) -> list[IntArray]:
        """Return how many ends, and ends with the retention, each clock has passed; nothing where it is the same."""
        found = []
        for shift in (0, self._retention_ms):
            low, high = int(clock.min()) - shift, int(clock.max()) - shift
            if self._grid.last_ended_at(low) != self._grid.last_ended_at(high):
                found.append(self._grid.last_ended(clock - shift))
        return found


def combines(spec: WindowSpec) -> bool:
    """Tell whether messages of these windows can be combined exactly."""
    return (
        spec.window.by_time
        and spec.window.kind in {"tumbling", "hopping"}
        and spec.retention_messages is None
        and not spec.full
        and may_be_beside(spec.schema.names)
        and all(aggregate.kind != "reducer" for aggregate in spec.aggregates.values())
    )
