"""Attempts that crash before or after they stage leave no trace; what was confirmed is as if nothing had crashed."""

from __future__ import annotations

import tempfile
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

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
from backend.store.workspace import Workspace
from backend.stores.session_store import SessionKey
from tests.support.twin import MemoryTwin

MESSAGES = pa.schema([*MESSAGE_FIELDS, ("user", pa.string())])
RESULT = pa.schema([("what", pa.string())])
ROWS = st.lists(st.tuples(st.sampled_from(["a", "ab", "b"]), st.integers(0, 200)), max_size=6)
FATES = st.sampled_from(["confirmed", "confirmed twice", "crashed", "staged, then crashed"])


def _use_all(messages: pa.Table, context: ProcessContext) -> pa.Table:
    stores = context.stores
    for user, time in zip(messages["user"].to_pylist(), messages["_time"].to_pylist(), strict=True):
        stores["windows"].put(user, (stores["windows"].fetch_one(user, time) or 0) + 1, time)
        stores["all values"].put(user, time, time // 2)
        stores["sessions"].put(SessionKey(user, time, time), time)
        stores["last"].update(user, time)
        stores["list"].append_value(user, time)
        stores["map"].update_value(user, time % 3, time)
        stores["totals"].put(user, (stores["totals"].get(user) or 0) + 1)
    seen = [
        list(stores["windows"].all()),
        list(stores["all values"].all()),
        list(stores["sessions"].all()),
        list(stores["last"].items()),
        list(stores["list"].items()),
        [list(stores["map"].items(user)) for user in ("a", "ab", "b")],
        list(stores["totals"].all()),
        [stores[name].dropped for name in ("windows", "all values", "sessions")],
    ]
    return pa.table({"what": [repr(one) for one in seen]})


OPERATOR = ProcessOperator(
    _use_all,
    RESULT,
    fields=["user"],
    stores=[
        window_store("windows", retention=50, window_size=10, grace=20),
        window_store("all values", retention=50, window_size=10, retain_duplicates=True),
        session_store("sessions", retention=50, min_segment_interval=7),
        value_state("last", ttl=30),
        list_state("list", ttl=30),
        map_state("map", ttl=30),
        key_value_store("totals"),
    ],
)


def _batch(rows: list[tuple[str, int]], time_ms: int) -> MicroBatch:
    zero, numbers = [0] * len(rows), list(range(len(rows)))
    columns: list[Any] = [zero, zero, numbers, [time for _, time in rows], zero, [user for user, _ in rows]]
    return MicroBatch(time_ms, time_ms, pa.table(columns, schema=MESSAGES), {}, {}, due_ms=time_ms)


@settings(max_examples=12)
@given(attempts=st.lists(st.tuples(ROWS, FATES, st.integers(0, 40)), min_size=1, max_size=8))
def test_only_what_was_confirmed_is_there(attempts: list[tuple[list[tuple[str, int]], str, int]]) -> None:
    with tempfile.TemporaryDirectory() as place:
        store, bounds, time_ms = MemoryTwin(), {}, 1_000
        untroubled = Workspace(MemoryTwin())  # the same shard, never restarted, without the attempts that crashed
        for rows, fate, step in attempts:
            time_ms += step
            batch = _batch(rows, time_ms)
            work = Workspace(store, bounds)
            outcome = OPERATOR.process(batch, work)
            if fate == "crashed":
                continue
            changes = work.changes()
            staged = store.stage(changes, Path(place) / uuid.uuid4().hex)
            if fate == "staged, then crashed":
                continue
            store.confirm(staged)
            if fate == "confirmed twice":  # crashed after it ingested, before it could say so
                store.confirm(staged)
            bounds = dict(changes.bounds)
            assert outcome.results.equals(OPERATOR.process(batch, untroubled).results)
        left = list(Workspace(store, bounds).scan(b"\x40", b"\xff"))
        assert left == list(untroubled.scan(b"\x40", b"\xff"))
