"""A join without Spark: results on request, flushes, and the eight forms of getMessages over every layout."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from backend.contexts.base import Message
from backend.contexts.joins import AutomaticJoin, StandaloneJoin
from backend.joins.spec import JoinSpec, join_spec
from backend.store.memory import MemoryStore
from backend.windows.definitions import Window, hopping, session, sliding, tumbling

SIDE = pa.schema([("user", pa.string()), ("item", pa.int64()), ("n", pa.int64())])
BY_TIME = {"left_retention": 1000, "right_retention": 1000, "max_ahead": None}
BY_NUMBER = {"left_retention_messages": 1000, "right_retention_messages": 1000, "max_ahead": None}


def message(offset: int, time: int, user: str | None, item: int, partition: int = 0) -> Message:
    return Message(offset, time, {"user": user, "item": item, "n": offset}, partition)


def filled(spec: JoinSpec) -> StandaloneJoin:
    """Messages 1 to 8 of the left side: (time, user, item), and one right message that meets none."""
    join = StandaloneJoin(spec)
    rows = [
        (10, "a", 1),
        (12, "b", 1),
        (11, "a", 2),
        (20, "a", 1),
        (21, "b", 2),
        (35, "a", 1),
        (36, "a", 2),
        (50, "b", 1),
    ]
    join.add_messages([message(offset, *row) for offset, row in enumerate(rows, 1)], wall_ms=0)
    join.add_right(message(1, 30, "z", 9), wall_ms=0)
    return join


def offsets(table: pa.Table) -> list[int]:
    return table.column("n").to_pylist()


TIMED = [
    {"on": ["user", "item"], "within": 5},  # time, equal fields
    {"on": ["user", "item"], "within": 5, "message_key": "join_fields"},  # equal fields, time
    {"on": ["user", "item"]},
]
SESSIONS = [
    {"on": ["user", "item"], "within": 5, "left_window": session(9), "session_key": "user"},
    {"on": ["user", "item"], "left_window": session(9), "session_key": "user"},
]
SESSIONS_OF_BOTH = [
    {"on": ["user", "item"], "within": 5, "left_window": session(9)},
    {"on": ["user", "item"], "left_window": session(9)},
]


@pytest.mark.parametrize("options", [*TIMED, *SESSIONS, *SESSIONS_OF_BOTH])
def test_messages_by_time(options):
    left = filled(join_spec(SIDE, SIDE, **options, **BY_TIME)).left
    assert offsets(left.get_messages(11, 36)) == [3, 2, 4, 5, 6]  # half-open, by event time
    assert offsets(left.get_messages(0, 100, join_keys=("a", 1))) == [1, 4, 6]
    assert offsets(left.get_messages(11, 36, join_keys=("a", 1))) == [4, 6]
    assert left.get_messages(11, 12).to_pylist() == [
        {"_stream": 0, "_partition": 0, "_offset": 3, "_time": 11, "user": "a", "item": 2, "n": 3}
    ]
    assert offsets(left.get_messages(60, 70)) == []


@pytest.mark.parametrize("options", SESSIONS)
def test_messages_by_time_and_session_key(options):
    left = filled(join_spec(SIDE, SIDE, **options, **BY_TIME)).left
    assert offsets(left.get_messages(11, 36, session_key="a")) == [3, 4, 6]
    assert offsets(left.get_messages(11, 36, session_key="a", join_keys=("a", 1))) == [4, 6]
    assert offsets(left.get_messages(11, 36, session_key="b", join_keys=("a", 1))) == []


@pytest.mark.parametrize("options", SESSIONS_OF_BOTH)
def test_messages_and_windows_by_a_session_key_of_two_fields(options):
    left = filled(join_spec(SIDE, SIDE, **options, **BY_TIME)).left
    assert offsets(left.get_messages(11, 36, session_key=("a", 1))) == [4, 6]
    assert offsets(left.get_messages(11, 36, session_key=("a", 1), join_keys=("a", 2))) == []
    assert [(v.start, v.end, v.key) for v in left.get_windows(15, 36)] == [
        *((20, 20, ("a", 1)), (21, 21, ("b", 2)), (35, 35, ("a", 1)))
    ]


def test_a_source_partition_begins_with_its_first_message_though_that_is_malformed():
    """Number 0 is no message; the left window [0, 2] and 3 numbers more end with number 5."""
    spec = join_spec(SIDE, SIDE, on="item", left_window=tumbling(messages=3), right_retention_messages=99)
    join = StandaloneJoin(spec)
    join.add_left(message(7, 0, "a", 1), wall_ms=0)
    join.add_right(Message(100, 0, {"item": "one"}), wall_ms=0)
    for offset in range(101, 108):
        join.add_right(message(offset, 0, "a", 1), wall_ms=0)
    assert [row["right_n"] for row in join.get_result()] == [*range(101, 106)]
    assert [row["offset"] for row in join.get_errors()] == [100]


TUPLES = [
    {"on": ["user", "item"], "left_window": tumbling(messages=3)},
    {"on": ["user", "item"], "left_window": tumbling(messages=3), "message_key": "join_fields"},
]
TUPLE_SESSIONS = [
    {"on": ["user", "item"], "left_window": session(messages=2), "session_key": "user"},
    {"on": ["user", "item"], "left_window": session(messages=2), "session_key": "user", "message_key": "join_fields"},
]


@pytest.mark.parametrize("options", [*TUPLES, *TUPLE_SESSIONS])
def test_messages_by_offset(options):
    left = filled(join_spec(SIDE, SIDE, **options, **BY_NUMBER)).left
    assert offsets(left.get_messages(2, 5)) == [2, 3, 4]
    assert offsets(left.get_messages(2, 6, join_keys=("a", 1))) == [4]


@pytest.mark.parametrize("options", TUPLE_SESSIONS)
def test_messages_by_offset_and_session_key(options):
    left = filled(join_spec(SIDE, SIDE, **options, **BY_NUMBER)).left
    assert offsets(left.get_messages(2, 7, session_key="a")) == [3, 4, 6]
    assert offsets(left.get_messages(2, 7, session_key="a", join_keys=("a", 2))) == [3]
    assert [(v.start, v.end, v.key) for v in left.get_windows(0, 9)] == [
        *((1, 7, ("a",)), (2, 2, ("b",)), (5, 5, ("b",)), (8, 8, ("b",)))
    ]


@pytest.mark.parametrize(
    ("window", "windows"),
    [
        (None, [(10, 50)]),
        (tumbling(10), [(10, 20), (20, 30)]),
        (hopping(10, 5), [(10, 20), (15, 25), (20, 30)]),
        (sliding(2), [(18, 20), (19, 21)]),
    ],
)
def test_windows_that_overlap_a_range(window: Window | None, windows: list[tuple[int, int]]):
    left = filled(join_spec(SIDE, SIDE, on="user", left_window=window, **BY_TIME)).left
    assert [(view.start, view.end) for view in left.get_windows(15, 30)] == windows


def test_windows_of_sessions():
    left = filled(join_spec(SIDE, SIDE, on="user", left_window=session(9), **BY_TIME)).left
    assert [(v.start, v.end, v.key, v.messages) for v in left.get_windows(15, 40, session_key="a")] == [
        (10, 20, ("a",), 3),
        (35, 36, ("a",), 2),
    ]
    assert [(v.start, v.end, v.key) for v in left.get_windows(15, 40)] == [
        *((10, 20, ("a",)), (12, 21, ("b",)), (35, 36, ("a",)))
    ]


def test_windows_by_number_are_told_by_their_offsets():
    left = filled(join_spec(SIDE, SIDE, on="user", left_window=tumbling(messages=3), **BY_NUMBER)).left
    assert [(v.start, v.end, v.messages, dict(v.offsets)) for v in left.get_windows(3, 7)] == [
        (1, 3, 3, {(0, 0): (1, 3)}),
        (4, 6, 3, {(0, 0): (4, 6)}),
    ]


def test_what_is_out_of_retention_is_not_shown():
    join = filled(join_spec(SIDE, SIDE, on="user", within=5, left_retention=30, right_retention=30, max_ahead=None))
    join.add_right(message(2, 50, "z", 9), wall_ms=0)
    assert offsets(join.left.get_messages(0, 100)) == [5, 6, 7, 8]
    assert offsets(join.right.get_messages(0, 100)) == [1, 2]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"join_keys": 1}, "join_keys=1: the join has equal fields .'user', 'item'.; give a value for each"),
        ({"join_keys": ("a", "b")}, "join_keys=.'a', 'b'.: .*allowed are values of"),
        ({"session_key": "a"}, "session_key='a': the join has session windows"),
    ],
)
def test_bad_questions_are_named(option: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        filled(join_spec(SIDE, SIDE, **TIMED[0], **BY_TIME)).left.get_messages(0, 9, **option)


def test_standalone_results_stay_until_flush_and_a_replay_is_a_noop():
    store = MemoryStore()
    spec = join_spec(SIDE, SIDE, on="user", how="left", **BY_TIME)
    join = StandaloneJoin(spec, store)
    join.add_left(message(1, 10, "a", 1), wall_ms=0)
    join.add_right(message(1, 11, "a", 7), wall_ms=0)
    (row,) = join.get_result()
    assert (row["reason"], row["left_time"], row["right_time"], row["left_n"], row["right_n"]) == ("full", 10, 11, 1, 1)
    assert join.get_result() == [row]
    join.flush()
    assert join.get_result() == []
    again = StandaloneJoin(spec, store)
    again.add_right(message(1, 11, "a", 7), wall_ms=0)
    assert again.get_result() == []
    again.add_right(message(2, 12, "a", 8), wall_ms=0)
    assert [row["right_n"] for row in again.get_result()] == [2]


def test_automatic_results_flow_and_a_refusing_downstream_is_asked_again():
    taken: list[int] = []
    willing = [False, True]
    join = AutomaticJoin(
        join_spec(SIDE, SIDE, on="user", **BY_TIME), lambda row: willing.pop(0) and not taken.append(row["left_n"])
    )
    join.add_left(message(1, 10, "a", 1), wall_ms=0)
    join.add_right(message(1, 10, "a", 1), wall_ms=0)
    assert (taken, join.selector_enabled) == ([], False)
    join.timeout(wall_ms=1)
    assert (taken, join.selector_enabled) == ([1], True)


def test_a_left_message_is_of_a_stream_of_the_left_side():
    side = pa.schema([("id", pa.int64())])
    both = StandaloneJoin(join_spec(side, side, on="id", left_retention=1_000, right_retention=1_000))
    with pytest.raises(ValueError, match="stream=1: allowed are 0 to 0, those of the left side"):
        both.add_left(Message(0, 0, {"id": 1}, stream=1), 0)
    assert both.positions == {}
