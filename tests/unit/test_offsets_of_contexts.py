"""Offsets that come out of order to a context: a replay is a NOOP, what was passed and not seen is never silent."""

from __future__ import annotations

import random

import msgspec
import pyarrow as pa
import pytest

from backend.aggregates import collect_list, count, sum_
from backend.batch import Position
from backend.contexts import base as context_base
from backend.contexts import offsets_seen as seen
from backend.contexts.joins import StandaloneJoin
from backend.contexts.windows import AutomaticContext, Message, StandaloneContext
from backend.errors import OffsetsScattered, UnknownFormat
from backend.joins.spec import join_spec
from backend.store.memory import MemoryStore
from backend.store.protocol import Changes
from backend.windows.definitions import sliding, tumbling
from backend.windows.spec import WindowSpec, window_spec

SCHEMA = pa.schema([("value", pa.int64())])


def spec() -> WindowSpec:
    wanted = {"n": count(), "sum": sum_("value")}
    return window_spec(tumbling(100), SCHEMA, wanted, keys=[], retention=1_000, max_ahead=None)


def message(offset: int, partition: int = 0) -> Message:
    return Message(offset, 10, {"value": offset}, partition)


def refused(context: StandaloneContext | StandaloneJoin) -> list[tuple[int, int, str]]:
    return [(row["partition"], row["offset"], row["reason"]) for row in context.get_errors()]


def total(context: StandaloneContext) -> tuple[int, int] | None:
    """Give number and sum of all messages that were taken: what the first window's full row says."""
    newest = max(position.next_offset for position in context.positions.values())
    context.add_message(Message(newest, 100, {"value": 0}), 0)
    return next(((row["n"], row["sum"]) for row in context.get_result() if row["reason"] == "full"), None)


def test_an_offset_that_was_passed_without_having_come_is_an_error_and_its_repeat_a_noop():
    context = StandaloneContext(spec())
    for offset in (1, 5, 3, 3, 1, 5):
        context.add_message(message(offset), 0)
    assert refused(context) == [(0, 3, "out_of_order")]
    (row,) = context.get_errors()
    assert row["event_time"] == 10 and msgspec.json.decode(row["value"]) == {"value": 3}
    assert context.positions == {(0, 0): Position(6, 10, 0)}
    assert total(context) == (2, 6)


def test_it_is_so_among_messages_that_are_added_at_once_and_for_each_source_partition():
    context = StandaloneContext(spec())
    context.add_messages([message(5), message(1), message(5), message(7, 1)], 0)
    assert refused(context) == []
    context.add_messages([message(8), message(6, 1), message(3), message(3)], 0)
    assert refused(context) == [(0, 3, "out_of_order"), (1, 6, "out_of_order")]


def test_it_survives_a_new_start_as_of_the_last_flush():
    store = MemoryStore()
    context = StandaloneContext(spec(), store)
    for offset in (1, 2, 5):
        context.add_message(message(offset), 0)
    context.flush()
    context.add_message(message(3), 0)
    context.add_message(message(9), 0)
    context = StandaloneContext(spec(), store)  # what came since the flush is given again
    for offset in (1, 2, 5, 3, 9, 7):
        context.add_message(message(offset), 0)
    assert refused(context) == [(0, 3, "out_of_order"), (0, 7, "out_of_order")]
    context.flush()
    context = StandaloneContext(spec(), store)
    for offset in (3, 7, 8):
        context.add_message(message(offset), 0)
    assert refused(context) == [(0, 8, "out_of_order")]
    assert total(context) == (4, 17)


def test_an_automatic_context_tells_it_to_on_error():
    errors: list[str] = []
    context = AutomaticContext(spec(), lambda _: True, on_error=lambda row: errors.append(row["reason"]))
    for offset in (1, 5, 3):
        context.add_message(message(offset), 0)
    assert errors == ["out_of_order"]


def test_joins_do_the_same():
    schema = pa.schema([("id", pa.int64())])
    join = StandaloneJoin(join_spec(schema, schema, on="id", left_retention=9, right_retention=9, max_ahead=None))
    for offset in (1, 5, 3, 5):
        join.add_left(Message(offset, 0, {"id": offset}), 0)
    join.add_right(Message(3, 0, {"id": 3}), 0)
    join.add_right(Message(4, 0, {"id": 1}), 0)
    assert refused(join) == [(0, 3, "out_of_order")]
    (error,) = join.get_errors()
    assert (error["stream"], msgspec.json.decode(error["value"])) == (0, {"id": 3})
    assert len(join.get_result()) == 1


def test_a_store_of_an_older_release_goes_on():
    store = MemoryStore()
    saved = [1, 1, [[0, 0, [6, 10, 0]]]]  # format 1: positions alone
    store.write(Changes([context_base._KEY], [msgspec.msgpack.encode(saved)], {}))
    context = StandaloneContext(spec(), store)
    for offset in (3, 6, 9, 7):
        context.add_message(message(offset), 0)
    assert refused(context) == [(0, 7, "out_of_order")]
    context.flush()
    context = StandaloneContext(spec(), store)
    for offset in (3, 7, 8):
        context.add_message(message(offset), 0)
    assert refused(context) == [(0, 8, "out_of_order")]


def test_an_unknown_format_is_named():
    store = MemoryStore()
    store.write(Changes([seen._RUNS + bytes(14)], [b"\x09" + bytes(8)], {}))
    with pytest.raises(UnknownFormat, match="a run of offsets has an unknown format"):
        StandaloneContext(spec(), store)


def test_what_is_remembered_is_bounded_and_what_is_forgotten_is_not_silent(monkeypatch):
    monkeypatch.setattr(seen, "MAX_RUNS", 3)
    store = MemoryStore()
    context = StandaloneContext(spec(), store)
    for offset in range(0, 20, 2):
        context.add_message(message(offset), 0)
    context.flush()
    assert len(list(store.scan(seen._RUNS, seen._RUNS + b"\xff"))) == 3
    context = StandaloneContext(spec(), store)
    for offset in (14, 16, 18, 12):
        context.add_message(message(offset), 0)
    assert refused(context) == [(0, 12, "out_of_order")]


def test_unordered_offsets_are_taken_once(monkeypatch):
    store, rng = MemoryStore(), random.Random(7)
    offsets = list(range(200))
    rng.shuffle(offsets)
    context = StandaloneContext(spec(), store, offsets="unordered")
    at, flushed = 0, 0
    while at < len(offsets):
        fate = rng.choice(["add", "add", "add", "repeat", "flush", "crash", "some"])
        if fate in ("add", "some"):
            count_ = rng.randint(2, 9) if fate == "some" else 1
            context.add_messages([message(offset) for offset in offsets[at : at + count_]], 0)
            at += count_
        elif fate == "repeat" and at:
            context.add_message(message(rng.choice(offsets[:at])), 0)
        elif fate == "flush":
            context.flush()
            flushed = at
        elif fate == "crash":
            context, at = StandaloneContext(spec(), store, offsets="unordered"), flushed
    assert refused(context) == []
    assert total(context) == (200, 199 * 100)
    context.flush()
    assert len(list(store.scan(seen._RUNS, seen._RUNS + b"\xff"))) == 1


def test_windows_by_number_count_unordered_offsets_as_they_come_and_fold_them_by_offset():
    spec = window_spec(
        sliding(messages=3),
        pa.schema([("v", pa.int64())]),
        {"sum": sum_("v"), "all": collect_list("v")},
        max_ahead=None,
    )
    context = StandaloneContext(spec, offsets="unordered")
    for offset in (5, 3, 4, 6):
        context.add_message(Message(offset=offset, time=0, fields={"v": offset}), 0)
    found = [(row["sum"], row["all"]) for row in context.get_result()]
    assert found == [(5, [5]), (8, [3, 5]), (12, [3, 4, 5]), (13, [3, 4, 6])]


def test_unordered_offsets_with_too_many_gaps_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(seen, "MAX_RUNS", 3)
    context = StandaloneContext(spec(), offsets="unordered")
    for offset in (0, 2, 4, 5):
        context.add_message(message(offset), 0)
    with pytest.raises(OffsetsScattered, match="stream 0, partition 0"):
        context.add_messages([message(6), message(8)], 0)
    assert context.positions[0, 0].next_offset == 6  # nothing was added
    context.add_messages([message(3), message(6), message(8)], 0)
    assert total(context) == (7, 28)


def test_a_bad_option_is_named():
    with pytest.raises(ValueError, match="offsets='any': allowed are 'ordered' and 'unordered'"):
        StandaloneContext(spec(), offsets="any")


def test_offsets_that_fill_gaps_are_taken_before_those_that_open_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in the order of the offsets the runs are never too many, so none is forgotten on the way there."""
    monkeypatch.setattr(seen, "MAX_RUNS", 3)
    context = StandaloneContext(spec(), offsets="unordered")
    for offset in (0, 3, 6):
        context.add_message(message(offset), 0)
    context.add_messages([message(1), message(2), Message(100, None, {"value": 1})], 0)  # type: ignore[arg-type]
    for again in (0, 1, 3, 6):
        context.add_message(message(again), 0)
    assert refused(context) == [(0, 100, "no_event_time")]
    assert total(context) == (5, 12)
