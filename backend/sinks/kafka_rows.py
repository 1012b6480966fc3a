"""Rows as Kafka messages, and how a consumer tells those that came twice: pure, no client.

A message's value is a JSON object: the columns of the Parquet sink by name, `id` first. The sink's own times
(`window_start`, `window_end`, `timestamp`, `event_time`) are integers, milliseconds since the epoch; bytes are base64;
other timestamps and dates are ISO 8601; numbers that JSON does not have (NaN, infinite) are null. A message's key
decides its partition: the row's `id`, or for results the columns that the sink was told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from backend.sinks.tables import RESULTS, TIMES

FORMAT = 1
"""Version of the messages' shape, in the commit topic beside each micro-batch."""

_MS = pa.timestamp("ms", tz="UTC")


@dataclass(frozen=True, slots=True)
class Message:
    """One row on its way to a topic."""

    topic: str
    key: bytes
    value: bytes


def to_messages(table: pa.Table, kind: str, topic: str, key: Sequence[str]) -> list[Message]:
    """Encode rows.

    Args:
        table: As `backend.sinks.tables.readable` gives it.
        kind: `RESULTS` or `ERRORS`.
        topic: Where they go.
        key: Columns of the key, for results; none takes the `id`.

    Raises:
        ValueError: A column of the key is not there.
    """
    columns = list(key) if kind == RESULTS and key else ["id"]
    unknown = [name for name in columns if name not in table.column_names]
    if unknown:
        raise ValueError(f"key={unknown[0]!r}: allowed are the results' columns {', '.join(table.column_names)}")
    rows = _plain(table, kind).to_pylist()
    return [Message(topic, _key(row, columns), msgspec.json.encode(row)) for row in rows]


def digest(messages: Iterable[Message]) -> str:
    """Give a digest of messages in their order: whether a micro-batch that ran again says the same."""
    total = xxhash.xxh3_128()
    for message in messages:
        for part in (message.topic.encode(), message.key, message.value):
            total.update(len(part).to_bytes(8, "big"))
            total.update(part)
    return total.hexdigest()


class Dedupe:
    """Tells a consumer which rows it has seen: for topics that are written at least once.

    A writer sends the rows of a shard in order of (version, sequence), and again from a version's first row after a
    crash. So of each topic, partition and shard one pair is remembered, however long the topic is. The topic must keep
    its number of partitions: rows go where their key sends them.

    Args:
        seen: `state` of before; a consumer keeps it where it keeps its offsets, in one step with them.

    >>> dedupe = Dedupe()
    >>> row = {"shard": 0, "version": 7, "sequence": 0}
    >>> dedupe.is_new(row, "windows", 2), dedupe.is_new(row, "windows", 2)
    (True, False)
    """

    def __init__(self, seen: Mapping[str, Sequence[int]] | None = None) -> None:
        self._seen = {name: (int(pair[0]), int(pair[1])) for name, pair in (seen or {}).items()}

    def is_new(self, row: Mapping[str, Any], topic: str, partition: int) -> bool:
        """Tell whether a row comes for the first time, and remember it.

        Args:
            row: A message's value, decoded.
            topic: Where it was.
            partition: Where it was.
        """
        name = f"{topic}-{partition}-{row['shard']}"
        at = (int(row["version"]), int(row["sequence"]))
        if at <= self._seen.get(name, (-1, -1)):
            return False
        self._seen[name] = at
        return True

    @property
    def state(self) -> dict[str, list[int]]:
        """What is remembered, as JSON takes it."""
        return {name: list(pair) for name, pair in self._seen.items()}


def _plain(table: pa.Table, kind: str) -> pa.Table:
    """Give our own times as integers, and times of the user's that Python may not hold as text."""
    for at, field in enumerate(table.schema):
        if field.type == _MS and field.name in TIMES[kind]:
            table = table.set_column(at, field.name, table.column(at).cast(pa.int64()))
        elif pa.types.is_timestamp(field.type):
            text = pc.replace_substring(table.column(at).cast(pa.string()), " ", "T", max_replacements=1)
            table = table.set_column(at, field.name, text)
    return table


def _key(row: Mapping[str, Any], columns: Sequence[str]) -> bytes:
    """Encode a key: the text of a single text column as it is, anything else as JSON."""
    if len(columns) == 1:
        value = row[columns[0]]
        return value.encode() if isinstance(value, str) else msgspec.json.encode(value)
    return msgspec.json.encode([row[name] for name in columns])
