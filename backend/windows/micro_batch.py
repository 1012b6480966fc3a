"""An execution: one micro-batch on its way through an operator. What all kinds of windows share.

`WindowOperator` makes it: it has already put aside event times that nobody can take, and computed the watermark
before and after. A kind folds `execution.messages` into `execution.work` and leaves results, errors and bookkeeping
here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backend.batch import (
    EDGES,
    ERROR_SCHEMA,
    EVENT_TIMES,
    MAX_EVENT_TIME,
    MIN_EVENT_TIME,
    OFFSET,
    PARTITION,
    RESERVED,
    RESULT_FIELDS,
    STREAM,
    TIME,
    MicroBatch,
    SourcePartition,
)
from backend.python_rows import python_rows
from backend.store.workspace import Workspace
from backend.windows import combined_rows
from backend.windows.columns.arrays import IntArray, Mask
from backend.windows.ledger import Ledger

RETRACTED, FULL, LATE, EARLY, DRAIN = range(5)
"""Phases, in the order in which a micro-batch's results stand: within a phase by window, then by group key.
Retractions come right before the result that replaces them, so they have a phase of their own."""

REASONS = ("retracted", "full", "late", "early", "drain")


@dataclass
class Execution:
    """One micro-batch on its way through an operator.

    Attributes:
        batch: What came in.
        work: Where state is read and left.
        messages: The messages whose event times are acceptable, in order of (stream, partition, offset); or combined
            rows of them (backend.windows.combined_rows), where the job combines.
        ledger: The operator's row: read already, written back by `WindowOperator` when the kind is done.
        clock: Watermark before the micro-batch (`ledger.clock` as committed).
        clock_after: Watermark after it.
        exact: One source partition: closing is decided message by message.
        idle_after_ms: Wall clock after which a silent source partition holds nothing back.
        policies_changed: The policies are others than those of the commit: what waits for one that is off now is due.
        full_off: Full results were turned off since the last micro-batch: what is open waited for them. It is sent now,
            as early, and so is what closes now.
        results: Tables of the result schema, to be emitted in this order.
        errors: Tables of `ERROR_SCHEMA`.
        replay_from: As in `Outcome`.
        rejected: As in `Outcome`.
        refused: The messages that went to the errors and that a replay would bring.
        metrics: Counters.
    """

    batch: MicroBatch
    work: Workspace
    messages: pa.Table
    ledger: Ledger
    clock: int
    clock_after: int
    exact: bool
    idle_after_ms: int | None = None
    policies_changed: bool = False
    full_off: bool = False
    results: list[pa.Table] = field(default_factory=list)
    errors: list[pa.Table] = field(default_factory=list)
    replay_from: dict[SourcePartition, int] = field(default_factory=dict)
    rejected: list[tuple[int, int, int]] = field(default_factory=list)
    refused: list[pa.Table] = field(default_factory=list)
    metrics: Counter[str] = field(default_factory=Counter)

    @property
    def quiet(self) -> bool:
        """True when nothing can change: no message, no clock that moves, nothing due."""
        due = self.ledger.due_ms
        still = self.clock == self.clock_after and not self.batch.drain and not self.batch.messages.num_rows
        return still and not self.full_off and (due is None or due > self.batch.time_ms)

    def refuse(self, rows: Mask, reason: str, detail: str) -> None:
        """Send messages to the errors output and take them out of the micro-batch."""
        if not rows.any():
            return
        refused = self.messages.filter(pa.array(rows))
        self.errors.append(error_rows(refused, reason, detail))
        self.refused.append(refused)
        self.messages = self.messages.filter(pa.array(~rows))

    def add_open(self, count: int) -> None:
        """Note that so many more windows are open than before the micro-batch, or fewer.

        Nothing to add to while the ledger does not say how many were: `WindowOperator` then counts them afterwards.
        """
        if self.ledger.open is not None:
            self.ledger.open += count

    def wait_until(self, due_ms: int | None, *, afresh: bool) -> None:
        """Note when something is due; `afresh` when everything that waits was looked at."""
        times = [due_ms, None if afresh else self.ledger.due_ms]
        self.ledger.due_ms = min((time for time in times if time is not None), default=None)


def numbers(table: pa.Table, name: str) -> IntArray:
    """Give an integer column as int64, without a copy where it is one chunk of int64."""
    return np.asarray(table.column(name), dtype=np.int64)


def time_limits(time_ms: int, max_ahead_ms: int | None) -> Iterator[tuple[int, int, str, str]]:
    """Give what the pack stage refuses by, for what comes without it: first and last event time, reason, detail."""
    yield MIN_EVENT_TIME, MAX_EVENT_TIME, "out_of_range", EVENT_TIMES
    if max_ahead_ms is not None:
        latest = time_ms + max_ahead_ms
        yield MIN_EVENT_TIME, latest, "in_future", f"later than {latest} ms"


def beyond(messages: pa.Table, first: int, last: int) -> Mask:
    """Return which messages are before a first or after a last event time."""
    times = numbers(messages, TIME)
    return (times < first) | (times > last)


def error_rows(messages: pa.Table, reason: str, detail: str) -> pa.Table:
    """Give the rows of the errors output for messages; the value is their fields as JSON, where they have any."""
    if combined_rows.is_combined(messages):
        messages = combined_rows.messages_of(messages)
        columns = dict(zip(messages.column_names, messages.columns, strict=True))
    else:
        fields = messages.select([name for name in messages.column_names if name not in RESERVED])
        columns = {
            "stream": messages.column(STREAM),
            "partition": messages.column(PARTITION),
            "offset": messages.column(OFFSET),
            "event_time": messages.column(TIME),
            "value": pa.array(json_rows(fields) if fields.num_columns else [b"{}"] * messages.num_rows),
        }
    count = messages.num_rows
    columns |= {"reason": pa.repeat(reason, count), "detail": pa.repeat(detail, count)}
    arrays = [columns[f.name] if f.name in columns else pa.nulls(count, f.type) for f in ERROR_SCHEMA]
    return pa.table([array.cast(f.type) for array, f in zip(arrays, ERROR_SCHEMA, strict=True)], schema=ERROR_SCHEMA)


def stamped(errors: pa.Table, messages: pa.Table, timestamps: pa.ChunkedArray | None) -> pa.Table:
    """Return errors with the own timestamps of their messages, where they have none yet.

    Args:
        errors: `ERROR_SCHEMA`.
        messages: Messages of a micro-batch, sorted by (stream, partition, offset); others than these stay without.
        timestamps: As long as `messages`, milliseconds.
    """
    if timestamps is None or not errors.num_rows or not messages.num_rows:
        return errors
    places = [numbers(messages, name) for name in (STREAM, PARTITION, OFFSET)]
    wanted = [numbers(errors, name) for name in ("stream", "partition", "offset")]
    at = np.full(errors.num_rows, -1, np.int64)
    for stream, partition in set(zip(wanted[0].tolist(), wanted[1].tolist(), strict=True)):
        asked = np.flatnonzero((wanted[0] == stream) & (wanted[1] == partition))
        here = np.flatnonzero((places[0] == stream) & (places[1] == partition))  # in order of offset
        if len(here):
            found = here[np.minimum(np.searchsorted(places[2][here], wanted[2][asked]), len(here) - 1)]
            at[asked] = np.where(places[2][found] == wanted[2][asked], found, -1)
    own = timestamps.combine_chunks().take(pa.array(at, mask=at < 0))
    index = errors.schema.get_field_index("timestamp")
    return errors.set_column(index, ERROR_SCHEMA.field("timestamp"), pc.coalesce(errors["timestamp"], own))


def json_rows(fields: pa.Table) -> list[bytes]:
    """Return each row's fields as JSON; bytes in base64, what JSON has no type for as text."""
    return [msgspec.json.encode(row, enc_hook=str) for row in python_rows(fields)]


class KeyDecoder(Protocol):
    """What knows the fields of encoded group keys."""

    def decode(self, encoded: pa.Array) -> list[pa.Array]:
        """Give the fields of encoded keys."""


@dataclass(frozen=True, slots=True)
class Emission:
    """Results of some windows and group keys, one row each.

    Attributes:
        phase: `FULL`, `LATE`, ... of all rows, or of each.
        revisions: Revision of each row.
        starts: Window starts, or None for tuple windows.
        ends: Window ends, or None.
        keys: Encoded group key of each row, binary.
        values: The aggregates.
        edges: Windows by number of messages: columns named as `EDGES`.
    """

    phase: int | IntArray
    revisions: IntArray
    starts: IntArray | None
    ends: IntArray | None
    keys: pa.Array
    values: pa.Table
    edges: Mapping[str, IntArray] = field(default_factory=dict)

    def table(self, schema: pa.Schema, group_keys: KeyDecoder) -> pa.Table:
        """Give the rows in the operator's result schema."""
        count = len(self.revisions)
        leading: dict[str, pa.Array] = {
            "reason": pa.array(REASONS).take(pa.array(np.full(count, self.phase))),
            "revision": pa.array(self.revisions, pa.int32()),
            "window_start": _or_nulls(self.starts, count, pa.int64()),
            "window_end": _or_nulls(self.ends, count, pa.int64()),
            **{name: _or_nulls(self.edges.get(name), count, schema.field(name).type) for name in EDGES},
        }
        coded = self.keys.dictionary_encode()
        decoded = [array.take(coded.indices) for array in group_keys.decode(coded.dictionary)]
        names = schema.names[len(RESULT_FIELDS) + len(decoded) :]
        columns = [*leading.values(), *decoded, *(self.values.column(name) for name in names)]
        return pa.table(columns, schema=schema)


def _or_nulls(values: IntArray | None, count: int, kind: pa.DataType) -> pa.Array:
    return pa.nulls(count, kind) if values is None else pa.array(values, kind)


def joined(tables: Sequence[pa.Table], schema: pa.Schema) -> pa.Table:
    """Concatenate tables of one schema; an empty one for none."""
    return pa.concat_tables(tables) if tables else pa.Table.from_batches([], schema)
