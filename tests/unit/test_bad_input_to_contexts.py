"""What a context cannot take: in the errors, with its reason, before anything changed."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from backend import Message, StandaloneContext, StandaloneJoin, count, join_spec, over_all, tumbling, window_spec
from backend.aggregates import first, last, max_, min_, sum_
from backend.contexts.windows import AutomaticContext
from backend.errors import UserCodeFailed, ValueInvalid
from backend.store.limits import MAX_FIELDS_BYTES, MAX_KEY_TEXT_BYTES
from backend.store.memory import MemoryStore


class Rude:
    """A value that does not say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no")


FIELDS = pa.schema([("key", pa.string()), ("value", pa.int64())])
GOOD: dict[str, Any] = {"key": "a", "value": 1}
HOSTILE: list[tuple[Any, dict[str, Any], str]] = [
    (50, {"key": "x" * 1_000_000}, "malformed"),
    (50, {"key": "\0" * (MAX_KEY_TEXT_BYTES + 1)}, "malformed"),
    (50, {"key": "\ud800"}, "malformed"),
    (50, {"key": b"\xff\xfe"}, "malformed"),
    (50, {"key": 5}, "malformed"),
    (50, {"value": "1"}, "malformed"),
    (50, {"value": 2**63}, "malformed"),
    (50, {"value": 2**70}, "malformed"),
    (50, {"value": 2.5}, "malformed"),
    (50, {"value": {(1, 2): 3}}, "malformed"),
    (50, {"value": Rude()}, "malformed"),
    ("50", {}, "malformed"),
    (50.5, {}, "malformed"),
    (None, {}, "no_event_time"),
    (2**70, {}, "out_of_range"),
]


def spec(**aggregates: Any) -> Any:
    aggregates = {"n": count(), **aggregates}
    return window_spec(tumbling(100), FIELDS, aggregates, keys=["key"], retention=1_000, max_ahead=None)


@pytest.mark.parametrize(("time", "fields", "reason"), HOSTILE)
def test_a_message_that_does_not_fit_is_in_the_errors_and_touches_nothing(
    time: Any, fields: dict[str, Any], reason: str
) -> None:
    store = MemoryStore()
    context = StandaloneContext(spec(), store)
    bad = Message(2, time, GOOD | fields)
    context.add_message(Message(1, 40, GOOD), 0)
    context.add_message(bad, 0)
    context.add_messages([bad, Message(3, 60, GOOD), Message(4, 100, GOOD)], 0)  # the bad one again: a replay
    assert [(row["window_start"], row["n"]) for row in context.get_result()] == [(0, 2)]
    (row,) = context.get_errors()
    assert (row["offset"], row["event_time"], row["reason"]) == (2, time, reason)
    assert 0 < len(row["detail"]) <= 210
    assert len(json.loads(row["value"])) == 2
    context.flush()
    context = StandaloneContext(spec(), store)
    context.add_message(bad, 0)
    assert context.get_errors() == []  # it was given before the flush


def test_a_bad_message_among_good_ones_does_not_stop_an_automatic_context() -> None:
    results: list[Any] = []
    errors: list[Any] = []
    context = AutomaticContext(spec(), lambda row: results.append(row) is None, on_error=errors.append)
    context.add_messages([Message(1, 40, GOOD), Message(2, 900, GOOD | {"key": "\ud800"}), Message(3, 60, GOOD)], 0)
    context.add_message(Message(4, 100, GOOD), 0)
    assert [(row["window_start"], row["n"]) for row in results] == [(0, 2)]  # the bad one's time closed nothing
    assert [(row["offset"], row["reason"]) for row in errors] == [(2, "malformed")]
    assert json.loads(errors[0]["value"])["key"] == "\ud800"


def test_a_join_refuses_by_the_equal_fields_of_the_message_s_own_side() -> None:
    left, right = pa.schema([("id", pa.string())]), pa.schema([("order", pa.string()), ("text", pa.string())])
    options: dict[str, Any] = {"left_retention": 1_000, "right_retention": 1_000, "max_ahead": None}
    join = StandaloneJoin(join_spec(left, right, on=[("id", "order")], **options))
    long = "x" * (MAX_KEY_TEXT_BYTES + 1)
    join.add_left(Message(1, 10, {"id": long}), 0)
    join.add_left(Message(2, 10, {"id": "a"}), 0)
    join.add_right(Message(1, 10, {"order": "a", "text": long}), 0)  # long, but no key
    join.add_right(Message(2, 10, {"order": 5}), 0)
    assert [(row["stream"], row["offset"], row["reason"]) for row in join.get_errors()] == [
        (0, 1, "malformed"),
        (1, 2, "malformed"),
    ]
    assert [row["text"] for row in join.get_result()] == [long]


def test_fields_at_the_bound_are_kept_by_four_aggregates_and_more_are_malformed() -> None:
    """A row of state has all of them, and a value of the store has 64 MiB at most."""
    fields = pa.schema([("p", pa.string())])
    kept = {"a": first("p"), "b": last("p"), "c": min_("p"), "d": max_("p")}
    context = StandaloneContext(window_spec(tumbling(10), fields, kept, retention=0, max_ahead=None), MemoryStore())
    text = "x" * (MAX_FIELDS_BYTES - 1_000)
    context.add_message(Message(1, 1, {"p": text}), 0)
    context.flush()
    context.add_messages([Message(2, 2, {"p": text + text[:1_000]}), Message(3, 100, {"p": ""})], 0)
    [row] = context.get_result()
    assert [len(row[name]) for name in kept] == [len(text)] * 4
    [error] = context.get_errors()
    assert (error["offset"], error["reason"]) == (2, "malformed")
    assert error["detail"] == f"the fields have more than {MAX_FIELDS_BYTES} bytes"


@pytest.mark.parametrize("place", [{"offset": -1}, {"offset": 2**63}, {"partition": -1}, {"stream": 2**16}])
def test_a_place_that_is_none_is_refused_by_name(place: dict[str, Any]) -> None:
    context = StandaloneContext(spec())
    (name,) = place
    with pytest.raises(ValueError, match=f"{name}={place[name]}: allowed are"):
        context.add_message(Message(**{"offset": 1, "time": 10, "fields": GOOD, **place}))
    assert context.positions == {}


def test_what_a_function_that_raised_had_begun_is_undone() -> None:
    """By number of messages: a message that is added again must not count twice."""
    fails = True

    def function(table: pa.Table) -> int:
        if fails:
            raise ValueError("not now")
        return table.num_rows

    aggregates = {"all": over_all("value", function=function, output=pa.int64()), "total": sum_("value")}
    windows = window_spec(tumbling(messages=2), FIELDS, aggregates, keys=["key"], retention_messages=4, max_ahead=None)
    context = StandaloneContext(windows)
    context.add_message(Message(1, 10, GOOD | {"key": "b"}), 0)
    context.add_message(Message(2, 10, GOOD), 0)
    for _ in range(3):
        with pytest.raises(UserCodeFailed):
            context.add_message(Message(3, 10, GOOD), 0)
    fails = False
    context.add_message(Message(3, 10, GOOD), 0)
    # two messages came without "b", not five: it is there
    assert [(row["reason"], row["key"], row["all"], row["total"]) for row in context.get_result()] == [
        ("full", "a", 2, 2)
    ]
    assert context.positions[0, 0].next_offset == 4


@pytest.mark.parametrize(
    ("output", "given"),
    [(pa.string(), "\ud800"), (pa.list_(pa.string()), ["\ud800"]), (pa.int64(), "x"), (pa.int64(), 2**70)],
)
def test_a_result_of_a_function_that_does_not_fit_has_a_name(output: pa.DataType, given: Any) -> None:
    context = StandaloneContext(spec(own=over_all("value", function=lambda _: given, output=output)))
    context.add_message(Message(1, 10, GOOD), 0)
    with pytest.raises(ValueInvalid, match=r"aggregates\['own'\]: a function's result does not fit its output type"):
        context.add_message(Message(2, 100, GOOD), 0)


@pytest.mark.parametrize(("kind", "value"), [(pa.uint64(), 2**63), (pa.timestamp("ns"), 1), (pa.timestamp("s"), 2**60)])
def test_a_key_that_no_key_can_hold_is_in_the_errors(kind: pa.DataType, value: int) -> None:
    fields = pa.schema([("key", kind), ("value", pa.int64())])
    windows = window_spec(tumbling(100), fields, {"n": count()}, keys=["key"], retention=1_000, max_ahead=None)
    join = join_spec(fields, fields, on="key", within=100, left_retention=1_000, right_retention=1_000)
    for context in (StandaloneContext(windows), StandaloneJoin(join)):
        context.add_messages([Message(1, 40, {"key": value, "value": 1}), Message(2, 50, {"key": 0, "value": 2})], 0)
        context.add_message(Message(3, 60, {"key": value, "value": 3}), 0)
        context.add_message(Message(4, 200, {"key": 0, "value": 4}), 0)
        assert [(row["offset"], row["reason"]) for row in context.get_errors()] == [(1, "malformed"), (3, "malformed")]
        if isinstance(context, StandaloneContext):
            assert [row["n"] for row in context.get_result()] == [1]
