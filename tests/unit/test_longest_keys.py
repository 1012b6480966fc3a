"""The longest key that the pack stage lets through never ends a job, also when each of its bytes is escaped."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from backend import Message, StandaloneContext, StandaloneJoin, count, join_spec, median, session, sliding, tumbling
from backend.batch import MESSAGE_FIELDS, MicroBatch
from backend.process import (
    ProcessContext,
    ProcessOperator,
    key_value_store,
    list_state,
    map_state,
    session_store,
    value_state,
    window_store,
)
from backend.store.limits import MAX_KEY_TEXT_BYTES
from backend.store.memory import MemoryStore
from backend.store.workspace import Workspace
from backend.stores.session_store import SessionKey
from backend.windows.spec import window_spec

FIELDS = pa.schema([("k", pa.string()), ("v", pa.int64())])
KEY = "\0" * MAX_KEY_TEXT_BYTES


@pytest.mark.parametrize(
    "window",
    [tumbling("1 minute"), sliding("1 minute"), session("1 minute"), session(messages=3), tumbling(messages=3)],
)
def test_windows(window: Any) -> None:
    spec = window_spec(window, FIELDS, {"n": count(), "middle": median("v")}, keys=["k"], retention="1 hour")
    context = StandaloneContext(spec)
    context.add_message(Message(offset=1, time=1_000, fields={"k": KEY, "v": 1}))
    context.flush()
    context.add_message(Message(offset=2, time=2_000, fields={"k": KEY, "v": 2}))
    assert context.get_errors() == []


@pytest.mark.parametrize("message_key", ["auto", "join_fields"])
@pytest.mark.parametrize("window", [None, session("1 minute")])
def test_joins(window: Any, message_key: str) -> None:
    options = {"left_window": window, "right_window": window, "message_key": message_key}
    spec = join_spec(FIELDS, FIELDS, on="k", left_retention="1 hour", right_retention="1 hour", **options)
    both = StandaloneJoin(spec)
    both.add_left(Message(offset=1, time=1_000, fields={"k": KEY, "v": 1}))
    both.add_right(Message(offset=1, time=2_000, fields={"k": KEY, "v": 2}))
    assert [row["left_v"] + row["right_v"] for row in both.get_result()] == [3]


def test_stores_of_a_function() -> None:
    def function(messages: pa.Table, context: ProcessContext) -> None:
        stores = context.stores
        for key, time in zip(messages["k"].to_pylist(), messages["_time"].to_pylist(), strict=True):
            stores["windows"].put(key, 1, time)
            stores["sessions"].put(SessionKey(key, time, time), 1)
            stores["value"].update(key, time)
            stores["list"].append_value(key, time)
            stores["map"].update_value(key, key, 1)
            stores["plain"].put(key, 1)

    stores = [
        window_store("windows", retention=100, window_size=10),
        session_store("sessions", retention=100),
        value_state("value", ttl=500),
        list_state("list", ttl=500),
        map_state("map", ttl=500),
        key_value_store("plain"),
    ]
    operator = ProcessOperator(function, pa.schema([("n", pa.int64())]), stores=stores, fields=["k"])
    row = [[0], [0], [0], [10], [0], [KEY]]
    messages = pa.table(row, schema=pa.schema([*MESSAGE_FIELDS, ("k", pa.string())]))
    work = Workspace(MemoryStore(), {})
    operator.process(MicroBatch(0, 1_000, messages, {}, {}), work)
    assert len(work.changes().keys) > len(stores)
