"""The message store of every layout against a dict of messages: adds, replays, expiry, commits, reads of all kinds."""

from __future__ import annotations

from random import Random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.errors import BoundViolated
from backend.keys import encode, encode_columns
from backend.messages.layout import MessageLayout, Part
from backend.messages.rows import digest
from backend.rows import RowCodec
from backend.store.memory import MemoryStore
from backend.store.workspace import Workspace
from tests.support.message_store import add_messages, expire_before, read_messages

S, E, T, O = Part.SESSION, Part.EQUAL, Part.TIME, Part.OFFSET  # noqa: E741
PARTS = [(O,), (T, O), (E, O), (E, T, O), (T, E, O), (S, O), (S, T, O), (S, E, O), (S, E, T, O), (S, T, E, O)]
USERS = ["user_1", "user_12", "", None]
CODEC = RowCodec(pa.schema([("item", pa.int64()), ("user", pa.string()), ("note", pa.string())]))

Place = tuple[int, int, int]

places = st.tuples(st.integers(0, 1), st.integers(-1, 1), st.integers(0, 6))
times = st.integers(-4, 8)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(places, min_size=1, max_size=6)),
        st.tuples(st.just("expire"), st.tuples(times, places)),
        st.tuples(st.just("commit"), st.none()),
    ),
    max_size=8,
)


def message(place: Place, chance: Any) -> tuple[Any, ...]:
    """Give the one message of a place: a replay brings the same."""
    return *place, chance[place][0], *chance[place][1:]


def wide(rows: list[tuple[Any, ...]]) -> pa.Table:
    names = ["_stream", "_partition", "_offset", "_time", "item", "user", "note"]
    kinds = [pa.uint16(), pa.int32(), pa.int64(), pa.int64(), pa.int64(), pa.string(), pa.string()]
    columns = list(zip(*rows, strict=True)) or [()] * len(names)
    return pa.table([pa.array(column, kind) for column, kind in zip(columns, kinds, strict=True)], names=names)


@settings(max_examples=60)
@given(
    parts=st.sampled_from(PARTS),
    content=st.randoms(use_true_random=False),
    run=steps,
    window=st.tuples(times, times, places, places),
    asked=st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from(USERS)),
)
def test_a_message_store_is_a_dict(
    parts: tuple[Part, ...], content: Random, run: list[Any], window: Any, asked: tuple[int, str | None]
) -> None:
    layout = MessageLayout(parts)
    every = [(s, p, o) for s in (0, 1) for p in (-1, 0, 1) for o in range(7)]
    chance = {
        place: (content.randint(-4, 8), content.choice([1, 2]), content.choice(USERS), content.choice(["", "n", "\0"]))
        for place in every
    }
    store = MemoryStore()
    work = Workspace(store)
    model: dict[Place, tuple[Any, ...]] = {}
    bound = -100
    for kind, given_step in run:
        if kind == "add":
            rows = [message(place, chance) for place in given_step]
            table = wide(rows)
            codes = {}
            if E in parts:
                codes["equal"] = encode_columns([table["item"]])
            if S in parts:
                codes["session"] = encode_columns([table["user"]])
            if layout.timed and any(row[3] < bound for row in rows):
                with pytest.raises(BoundViolated):
                    add_messages(work, layout, CODEC, table, **codes)
            else:
                add_messages(work, layout, CODEC, table, **codes)
                model |= {row[:3]: row for row in rows}
        elif kind == "expire":
            time, place = given_step
            expire_before(work, layout, time if layout.timed else place)
            if layout.timed:
                bound = max(bound, time)
                model = {at: row for at, row in model.items() if row[3] >= time}
            else:
                model = {at: row for at, row in model.items() if at[:2] != place[:2] or at >= place}
        else:
            store.write(work.changes())
            work = Workspace(store, work.bounds)
    check(work, layout, model, window, asked)


def check(work: Workspace, layout: MessageLayout, model: dict[Place, Any], window: Any, asked: Any) -> None:
    low, high = (window[0], window[1]) if layout.timed else (window[2], window[3])
    item, user = asked
    keys, values = work.scan_arrays(b"\x01", b"\x02")
    assert len(keys) == len(model)
    cut = len(keys) // 2
    assert (digest(keys[:cut], values[:cut]) + digest(keys[cut:], values[cut:])) % 2**64 == digest(keys, values)
    assert len(work.scan_arrays(b"\x02", b"\x03")[0]) == (len(model) if layout.indexed else 0)
    for with_item in (False, True) if E in layout.parts else (False,):
        for with_user in (False, True) if S in layout.parts else (False,):
            if with_item and S in layout.parts and not with_user:
                continue
            codes = ({"equal": encode(item)} if with_item else {}) | ({"session": encode(user)} if with_user else {})
            mine = [row for row in model.values() if not with_item or row[4] == item]
            mine = [row for row in mine if not with_user or row[5] == user]
            for start, end in ((None, None), (low, high), (low, None), (None, high)):
                expected = [
                    row
                    for row in mine
                    if (start is None or clock(row, layout) >= start) and (end is None or clock(row, layout) < end)
                ]
                found = read_messages(work, layout, CODEC, start, end, **codes)
                names = [name for name in wide([]).column_names if layout.timed or name != "_time"]
                assert found.column_names == names
                cells = sorted(map(repr, zip(*(found[name].to_pylist() for name in names), strict=True)))
                assert cells == sorted(repr(row if layout.timed else (*row[:3], *row[4:])) for row in expected)


def clock(row: tuple[Any, ...], layout: MessageLayout) -> Any:
    return row[3] if layout.timed else row[:3]
