"""Rows of the named stores of `process()` as a table: key and value as JSON, times where the store has them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec
import pyarrow as pa

from backend.keys import code_end, decode
from backend.store.workspace import Workspace
from backend.stores.key_value_store import KeyValueStore
from backend.stores.named import BY_KEY, TIME_BYTES, NamedStore, time_of
from backend.stores.session_store import SessionStore
from backend.stores.state_variables import ListState
from backend.stores.ttl import NEVER
from backend.stores.values import ValueCodec
from backend.stores.window_store import WindowStore

STORE = pa.schema(
    [
        pa.field("shard", pa.int32(), nullable=False),
        pa.field("key", pa.string(), nullable=False),
        pa.field("map_key", pa.string()),
        pa.field("start", pa.int64()),
        pa.field("end", pa.int64()),
        pa.field("expires", pa.int64()),
        pa.field("value", pa.string(), nullable=False),
    ]
)
"""`start`: of a window or a session, event time in ms; `end`: of a session, inclusive; `expires`: batch time in ms."""

Row = dict[str, Any]


def rows_of(store: NamedStore, work: Workspace, region: int, now_ms: int) -> Iterator[Row]:
    """Give the visible rows of a store.

    Args:
        store: Bound to `work`.
        work: The committed state.
        region: The store's region.
        now_ms: Batch time: what expires by then is not visible.
    """
    if isinstance(store, WindowStore):
        return ({"key": at.key, "start": at.start, "value": value} for at, value in store.all())
    if isinstance(store, SessionStore):
        return ({"key": at.key, "start": at.start, "end": at.end, "value": value} for at, value in store.all())
    if isinstance(store, KeyValueStore):
        return ({"key": key, "value": value} for key, value in store.all())
    return _expiring(store, work, region, now_ms)


def _expiring(store: NamedStore, work: Workspace, region: int, now_ms: int) -> Iterator[Row]:
    """Give the rows of a state variable: expiration, then the value (see `backend.stores.ttl`)."""
    prefix, values = bytes([region]) + BY_KEY, ValueCodec()
    for key, row in work.scan(prefix, bytes([region, BY_KEY[0] + 1])):
        expires = time_of(row[:TIME_BYTES])
        if expires <= now_ms:
            continue
        element = key[len(prefix) :]
        if isinstance(store, ListState):
            element = element[:-TIME_BYTES]
        end = code_end(element, 0)
        found: Row = {"key": decode(element[:end]), "value": values.decode(row[TIME_BYTES:])}
        if end < len(element):
            found["map_key"] = decode(element[end:])
        yield {**found, "expires": None if expires == NEVER else expires}


def as_table(shard: int, rows: Iterator[Row]) -> pa.Table:
    """Make the table; keys and values as JSON."""
    return pa.Table.from_pylist([{**row, "shard": shard, **_texts(row)} for row in rows], STORE)


def _texts(row: Row) -> Row:
    return {name: as_json(row[name]) for name in ("key", "map_key", "value") if name in row}


def as_json(value: Any) -> str:
    """Return a key or a value as JSON: bytes as hex, and as text the numbers that JSON has not.

    >>> as_json((b"\\xde\\xad", float("nan"), {b"\\x01": float("-inf")}))
    '["dead","NaN",{"01":"-Infinity"}]'
    """
    return msgspec.json.encode(_plain(value), enc_hook=str).decode()


def number(value: float) -> float | str:
    """Return a number as JSON can have it."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float):
        return number(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {_name(name): _plain(item) for name, item in value.items()}
    return value


def _name(key: Any) -> Any:
    """Give the key of a dict as JSON can have it."""
    return as_json(key) if key is None or isinstance(key, bool | tuple) else _plain(key)
