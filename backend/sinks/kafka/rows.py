"""Rows as Kafka messages: pure, no client.

A message's value is a JSON object: the columns of the Parquet sink by name, `id` first, and behind `sequence` the
`query_id` of the query that wrote it, since a topic may have had several, one after the other. The sink's own times
(`window_start`, `window_end`, `timestamp`, `event_time`) are integers, milliseconds since the epoch; bytes are base64;
other timestamps, dates and durations are ISO 8601 (beyond the year 30,000 integers); numbers that JSON does not have
(NaN, infinite) are null. A message's key decides its partition: the row's `id`, or for results the columns that the
sink was told. What is larger than a topic takes: `backend.sinks.kafka.sizes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from backend.python_rows import python_rows, spelled
from backend.sinks.tables import ID_FIELDS, RESULTS, TIMES

QUERY = "query_id"
NAMES = ("id", "version", "shard", "sequence", QUERY)
"""The fields that every message begins with; together they tell it from all others of its topic."""
MARK = "too_large"
"""The field of a message that stands in place of a larger one; no other message has it."""

_MS = pa.timestamp("ms", tz="UTC")


@dataclass(frozen=True, slots=True)
class Message:
    """One row on its way to a topic."""

    topic: str
    key: bytes
    value: bytes


def to_messages(table: pa.Table, kind: str, topic: str, key: Sequence[str], query: str) -> list[Message]:
    """Encode rows, whole, whatever their size.

    Args:
        table: As `backend.sinks.tables.readable` gives it.
        kind: `RESULTS` or `ERRORS`.
        topic: Where they go.
        key: Columns of the key, for results; none takes the `id`.
        query: Id of the query that writes.
    """
    table = _with_query(table, query)
    columns = list(key) if kind == RESULTS and key else ["id"]
    rows = python_rows(_plain(table, kind))
    return [Message(topic, _key(row, columns), _json(row)) for row in rows]


def check_key(table: pa.Table, key: Sequence[str]) -> None:
    """See that results have the columns of a key.

    Args:
        table: Results, as `backend.sinks.tables.readable` gives them; no rows are needed.
        key: The columns.

    Raises:
        ValueError: One is not there.
    """
    names = _with_query(table, "").column_names
    for name in key:
        if name not in names:
            raise ValueError(f"key={name!r}: allowed are the results' columns {', '.join(names)}")


def _with_query(table: pa.Table, query: str) -> pa.Table:
    renamed = [f"{name}_" if name in (QUERY, MARK) else name for name in table.column_names]
    wrote = pa.repeat(pa.scalar(query), table.num_rows)
    return table.rename_columns(renamed).add_column(len(ID_FIELDS), QUERY, wrote)


def _plain(table: pa.Table, kind: str) -> pa.Table:
    """Give our own times as integers, and times of the user's that Python may not hold as text."""
    for at, field in enumerate(table.schema):
        if field.type == _MS and field.name in TIMES[kind]:
            table = table.set_column(at, field.name, table.column(at).cast(pa.int64()))
        elif pa.types.is_timestamp(field.type):
            ticks, most = table.column(at).cast(pa.int64()), spelled(field.type)
            text = pc.replace_substring(table.column(at).cast(pa.string()), " ", "T", max_replacements=1)
            text = pc.if_else(pc.and_(pc.less(ticks, most), pc.greater(ticks, -most)), text, ticks.cast(pa.string()))
            table = table.set_column(at, field.name, text)
    return table


def _key(row: Mapping[str, Any], columns: Sequence[str]) -> bytes:
    """Encode a key: the text of a single text column as it is, anything else as JSON."""
    if len(columns) == 1:
        value = row[columns[0]]
        return value.encode() if isinstance(value, str) else _json(value)
    return _json([row[name] for name in columns])


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value, enc_hook=_text)


def _text(value: Any) -> str:
    """Return as ISO 8601 what pandas has types for: durations, and nested times, of nanoseconds."""
    if not isinstance(value, timedelta):
        return str(value.isoformat())
    nanoseconds = int(value.value)  # type: ignore[attr-defined]
    days, rest = divmod(abs(nanoseconds), 86_400 * 10**9)
    seconds = f"{rest // 10**9}.{rest % 10**9:09d}".rstrip("0").rstrip(".")
    return f"{'-' if nanoseconds < 0 else ''}P{f'{days}D' if days else ''}T{seconds}S"  # as msgspec spells them
