"""The contexts: SAMZA-552's worked examples, refusal, timeout, flush, and what a crash keeps."""

from __future__ import annotations

import logging
from collections import Counter
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest

from backend.aggregates import count, max_, median, min_, reducer, sum_
from backend.batch import Position
from backend.contexts import base as contexts_base
from backend.contexts.windows import AutomaticContext, Message, StandaloneContext
from backend.errors import ManifestMismatch, SelectorDisabled, StateAhead, UnknownFormat
from backend.rocks import RocksStore
from backend.store.memory import MemoryStore
from backend.store.protocol import Changes, Region, region_range
from backend.windows.definitions import hopping, session, sliding, tumbling
from backend.windows.policies import policies
from backend.windows.spec import window_spec

SCHEMA = pa.schema([pa.field("key", pa.string()), pa.field("value", pa.int64())])


SPECIFICATION = (
    b'{"format": 1, "operator": {"aggregates": {"n": {"fields": [], "kind": "count"}}, "columns": ["n"],'
    b' "fields": [["key", "string"]], "format": 1, "keys": [["key", "string"]], "operator": "window",'
    b' "window": {"kind": "tumbling", "origin": 0, "size": 10, "step": 10, "unit": "time"}}}'
)
"""The row of `FIRST` as it is written."""
WITHOUT_COLUMNS = SPECIFICATION.replace(b'"columns": ["n"], ', b"")
"""As it was written first."""
FIRST = {"window": tumbling(10), "aggregates": {"n": count()}, "keys": ["key"], "retention": 50}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"window": tumbling(7)}, "window"),
        ({"window": tumbling(10, origin=5)}, "window"),
        ({"window": hopping(10, 5)}, "window"),
        ({"window": sliding(10)}, "window"),
        ({"aggregates": {"n": sum_("value")}}, "aggregates"),
        ({"keys": []}, "keys"),
        ({"retention": 60}, None),
        ({"policies": policies(late="each")}, None),
        ({"idle_after": 70}, None),
    ],
)
def test_a_store_is_opened_with_the_specification_that_made_its_state(changed, named):
    """Another one would read the state of other windows as its own."""
    store = MemoryStore()
    context = StandaloneContext(spec(**FIRST), store)
    context.add_messages([Message(n, 3 * n, {"key": "a", "value": n}) for n in range(3)], 0)
    context.flush()
    again = spec(**{**FIRST, **changed})
    if named is not None:
        with pytest.raises(ManifestMismatch, match=f"the state of another specification.*{named}: was"):
            StandaloneContext(again, store)
        again = spec(**FIRST)
    context = StandaloneContext(again, store)
    context.add_message(Message(3, 10, {"key": "a", "value": 3}), 0)
    assert [row["n"] for row in context.get_result()] == [3]


def test_aggregates_of_a_store_stay_in_their_order():
    """What is stored of them has no names."""
    of = {"lo": min_("value"), "hi": max_("value")}
    store = MemoryStore()
    StandaloneContext(spec(**{**FIRST, "aggregates": of}), store).flush()
    with pytest.raises(ManifestMismatch, match=r"columns: was \['lo', 'hi'\], is \['hi', 'lo'\]"):
        StandaloneContext(spec(**{**FIRST, "aggregates": {name: of[name] for name in ("hi", "lo")}}), store)


def test_a_store_that_does_not_say_the_order_of_its_aggregates_is_opened():
    assert WITHOUT_COLUMNS != SPECIFICATION
    store = MemoryStore()
    store.write(Changes([contexts_base._SPECIFICATION], [WITHOUT_COLUMNS]))
    StandaloneContext(spec(**FIRST), store)


def test_the_specification_of_a_store_has_a_format(monkeypatch):
    store = MemoryStore()
    StandaloneContext(spec(**FIRST), store).flush()
    assert store.get(contexts_base._SPECIFICATION) == SPECIFICATION
    monkeypatch.setattr(contexts_base, "SPECIFICATION_FORMAT", 2)
    with pytest.raises(UnknownFormat, match="it is format 1, known is 2"):
        StandaloneContext(spec(**FIRST), store)
    StandaloneContext(spec(**FIRST), MemoryStore())  # one of before, which says nothing


def at(clock: str) -> int:
    """Milliseconds of a time of day."""
    hours, minutes, seconds = (int(part) for part in clock.split(":"))
    return ((hours * 60 + minutes) * 60 + seconds) * 1000


# SAMZA-552, "Case 1: windowed aggregation": (message, system wall clock time)
ORDERS = [
    (Message(1, at("8:59:10"), {"value": 0}), at("9:00:00")),
    (Message(2, at("9:00:01"), {"value": 5}), at("9:00:59")),
    (Message(3, at("8:59:30"), {"value": 9}), at("9:02:01")),
]


def spec(window, aggregates=None, **options):
    options = {"retention": "1 hour", "max_ahead": None, **options}
    return window_spec(window, SCHEMA, aggregates or {"max": max_("value")}, **options)


def deliver_orders(context, until="9:10:00"):
    """Deliver the orders at their wall clocks, with a timer that ticks each second."""
    waiting = list(ORDERS)
    for wall in range(at("9:00:00"), at(until), 1000):
        context.timeout(wall)
        while waiting and waiting[0][1] == wall:
            context.add_message(*waiting.pop(0))


TIME_WINDOW = [
    # the document's [8:59:00, 8:59:59] is [8:59:00, 9:00:00)
    ("full", 0, at("8:59:00"), at("9:00:00"), 0),
    ("early", 0, at("9:00:00"), at("9:01:00"), 5),
    ("late", 1, at("8:59:00"), at("9:00:00"), 9),
]


def as_row(result):
    return (result["reason"], result["revision"], result["window_start"], result["window_end"], result["max"])


def test_samza_time_window_of_one_minute_with_updates_each_minute():
    taken = []
    context = AutomaticContext(
        spec(tumbling("1 minute"), policies=policies(early="1 minute")), lambda result: taken.append(result) is None
    )
    deliver_orders(context)
    assert [as_row(result) for result in taken] == TIME_WINDOW


def test_samza_time_window_in_the_standalone_context():
    context = StandaloneContext(spec(tumbling("1 minute"), policies=policies(early="1 minute")))
    deliver_orders(context)
    assert [as_row(result) for result in context.get_result()] == TIME_WINDOW
    assert [as_row(result) for result in context.get_result()] == TIME_WINDOW  # a copy
    context.flush()
    assert context.get_result() == []


def test_samza_tuple_window_of_three_with_updates_each_minute():
    taken = []
    asked = window_spec(tumbling(messages=3), SCHEMA, {"max": max_("value")}, policies=policies(early="1 minute"))
    deliver_orders(AutomaticContext(asked, lambda result: taken.append(result) is None))
    # the document's wnd=[1,3] is the window that begins at offset 1
    assert [(r["start_offset"], r["max"]) for r in taken] == [(1, 5), (1, 9)]
    assert [(r["reason"], r["revision"], r["last_offset"]) for r in taken] == [("early", 0, 2), ("full", 1, 3)]


class Downstream:
    """Takes results while it has room."""

    def __init__(self, room):
        self.room, self.taken = room, []

    def __call__(self, result):
        if len(self.taken) >= self.room:
            return False
        self.taken.append((result["reason"], result["window_start"], result["key"]))
        return True


def test_a_refusal_disables_the_selector_and_timeout_goes_on_where_it_stopped(caplog):
    downstream, store = Downstream(1), MemoryStore()
    context = AutomaticContext(spec(tumbling(10), keys=["key"]), downstream, store)
    for offset, key in enumerate("abc"):
        context.add_message(Message(offset, 5, {"key": key}), 0)
    context.add_message(Message(3, 10, {"key": "a"}), 0)
    assert downstream.taken == [("full", 0, "a")]
    assert not context.selector_enabled
    with caplog.at_level(logging.WARNING), pytest.raises(SelectorDisabled, match="2 rows wait"):
        context.add_message(Message(4, 20, {"key": "a"}), 0)
    assert "selector is disabled" in caplog.text
    downstream.room = 2
    context.timeout(1)
    assert downstream.taken == [("full", 0, "a"), ("full", 0, "b")]
    assert not context.selector_enabled
    downstream.room = 9
    context.timeout(2)
    assert downstream.taken == [("full", 0, "a"), ("full", 0, "b"), ("full", 0, "c")]
    assert context.selector_enabled
    context.add_message(Message(4, 20, {"key": "a"}), 3)
    assert downstream.taken[3:] == [("full", 10, "a")]


def test_what_was_refused_is_made_again_after_a_crash():
    store = MemoryStore()
    context = AutomaticContext(spec(tumbling(10), keys=["key"]), Downstream(0), store)
    context.add_message(Message(0, 5, {"key": "a"}), 0)
    context.add_message(Message(1, 10, {"key": "a"}), 0)
    assert not context.selector_enabled
    context.flush()
    # the process dies: the stored position is not ahead of what was sent
    downstream = Downstream(9)
    again = AutomaticContext(spec(tumbling(10), keys=["key"]), downstream, store)
    assert again.positions[0, 0].next_offset == 1
    again.add_message(Message(1, 10, {"key": "a"}), 0)
    assert downstream.taken == [("full", 0, "a")]


def test_a_replay_is_a_noop_also_when_its_window_is_gone():
    errors = []
    taken = []
    context = AutomaticContext(
        spec(tumbling(10), {"n": count()}, retention=0), lambda r: taken.append(r) is None, on_error=errors.append
    )
    messages = [Message(0, 1, {}), Message(1, 5, {}), Message(2, 30, {})]
    for message in [*messages, *messages, *messages]:
        context.add_message(message, 0)
    assert [(r["window_start"], r["n"]) for r in taken] == [(0, 2)]
    assert errors == []
    context.add_message(Message(3, 2, {}), 0)
    assert [(e["offset"], e["reason"]) for e in errors] == [(3, "out_of_retention")]


@pytest.mark.parametrize("window", [tumbling(10), sliding(10), session(5)], ids=lambda w: w.kind)
def test_what_is_out_of_retention_is_not_stored_for_ever(window, monkeypatch):
    def rows(store):
        return len(list(store.scan(b"\x01", None)))

    def run(store, flushes):
        context = StandaloneContext(asked, store)
        for at in range(flushes):
            context.add_message(Message(at, 100 * at, {"key": "a", "value": at}), 0)
            context.flush()
        return context

    asked = window_spec(window, SCHEMA, {"m": median("value")}, keys=["key"], retention=50)
    store = MemoryStore()
    run(store, 200)
    assert rows(store) < 60
    monkeypatch.setattr(contexts_base, "RECLAIM_EVERY", 10**9)
    kept = MemoryStore()
    run(kept, 200)
    assert rows(kept) > 200
    StandaloneContext(asked, kept)
    assert rows(kept) < 60, "opening it frees what an older release has left"


@pytest.mark.parametrize("window", [tumbling(10), hopping(10, 5), sliding(10), session(5)], ids=lambda w: w.kind)
def test_standalone_state_survives_in_rocksdb_up_to_the_last_flush(tmp_path, window):
    asked = spec(window, {"m": median("value"), "s": sum_("value")}, keys=["key"], policies=policies(late="each"))
    messages = [Message(n, time, {"key": "ab"[n % 2], "value": n}) for n, time in enumerate([1, 5, 12, 3, 14, 29, 2])]
    straight = StandaloneContext(asked)
    for message in messages:
        straight.add_message(message, 0)

    store = RocksStore.open(tmp_path / "db")
    first = StandaloneContext(asked, store)
    for message in messages[:3]:
        first.add_message(message, 0)
    kept = first.get_result()
    first.flush()
    first.add_message(messages[3], 0)  # lost with the process
    store.close()

    store = RocksStore.open(tmp_path / "db")
    second = StandaloneContext(asked, store)
    for message in messages:
        second.add_message(message, 0)
    assert kept + second.get_result() == straight.get_result()
    assert second.get_messages(0, 100).equals(straight.get_messages(0, 100))
    assert second.get_windows(0, 100) == straight.get_windows(0, 100)
    store.close()


def test_one_by_one_and_at_once_give_the_same_full_results():
    asked = spec(hopping(20, 5), {"n": count(), "m": median("value")}, keys=["key"], retention=5)
    messages = [Message(n, (n * 7) % 40 + n, {"key": "abc"[n % 3], "value": n % 5}) for n in range(60)]
    single, whole = StandaloneContext(asked), StandaloneContext(asked)
    for message in messages:
        single.add_message(message, 0)
    whole.add_messages(messages, 0)
    assert _full(single) == _full(whole) != []
    assert single.get_errors() == whole.get_errors() != []
    assert single.get_messages(-100, 200).equals(whole.get_messages(-100, 200))


def _full(context):
    return [result for result in context.get_result() if result["reason"] == "full"]


def test_windows_and_messages_can_be_looked_at():
    context = StandaloneContext(spec(hopping(20, 10), {"m": median("value")}, keys=["key"], retention=0))
    for n, (time, key) in enumerate([(5, "a"), (15, "b"), (12, None), (31, "a")]):
        context.add_message(Message(n + 7, time, {"key": key, "value": n}), 0)
    assert [(w.start, w.end, w.messages, dict(w.offsets)) for w in context.get_windows(0, 30)] == [
        (20, 40, 1, {(0, 0): (10, 10)}),
    ]
    assert context.get_messages(0, 100, {"key": "a"}).column("value").to_pylist() == [3]
    assert context.get_messages(0, 31).num_rows == 0
    with pytest.raises(ValueError, match="'color' is not kept"):
        context.get_messages(0, 10, {"color": 1})
    with pytest.raises(ValueError, match="key='a': allowed are None and values by field"):
        context.get_messages(0, 10, key="a")
    with pytest.raises(ValueError, match=r"key 'key' of type string: .*'int'"):
        context.get_messages(0, 10, key={"key": 5})
    with pytest.raises(ValueError, match="no messages are kept"):
        StandaloneContext(spec(tumbling(10))).get_messages(0, 10)


def test_sessions_and_windows_by_number_can_be_looked_at():
    sessions = StandaloneContext(spec(session(5), {"m": median("value")}, keys=["key"]))
    for n, (time, key) in enumerate([(1, "a"), (4, "a"), (3, "b"), (20, "a")]):
        sessions.add_message(Message(n, time, {"key": key, "value": n}), 0)
    assert [(w.start, w.end, w.key) for w in sessions.get_windows(0, 100)] == [
        (1, 4, ("a",)),
        (3, 3, ("b",)),
        (20, 20, ("a",)),
    ]
    assert [(w.start, w.key) for w in sessions.get_windows(4, 20)] == [(1, ("a",))]
    assert sessions.get_messages(3, 21, {"key": "a"}).column("value").to_pylist() == [1, 3]
    asked = window_spec(hopping(messages=4, every=2), SCHEMA, {"m": median("value")}, keys=["key"])
    numbered = StandaloneContext(asked)
    for n, key in enumerate("aabaaaa"):
        numbered.add_message(Message(n, 0, {"key": key, "value": n}), 0)
    # of key a only the window that begins with its fifth message is open, of key b its first
    assert [(w.start, w.end, w.key) for w in numbered.get_windows(0, 100)] == [
        (2, 2, ("b",)),
        (5, 6, ("a",)),
    ]
    assert numbered.get_messages(0, 6).column("value").to_pylist() == [5, 2]


@pytest.mark.parametrize("window", [hopping(20, 10), sliding(10), session(5)], ids=lambda w: w.kind)
def test_messages_of_windows_over_time_can_be_looked_at_by_offset(window):
    context = StandaloneContext(spec(window, {"m": median("value")}, keys=["key"], retention="1 hour"))
    for n, (time, key) in enumerate([(5, "a"), (15, "b"), (12, "a"), (31, "a")]):
        context.add_message(Message(n + 7, time, {"key": key, "value": n}), 0)

    def values(*range_, **options):
        return sorted(context.get_messages(*range_, **options).column("value").to_pylist())

    assert values(8, 10, by="offset") == [1, 2]
    assert values(8, 11, {"key": "a"}, by="offset") == [2, 3]
    assert values(0, 7, by="offset") == []
    assert values(12, 31) == values(12, 31, by="time") == [1, 2]
    with pytest.raises(ValueError, match="by='position': allowed are None, 'time' and 'offset'"):
        context.get_messages(0, 10, by="position")


@pytest.mark.parametrize("window", [tumbling(messages=9), session(messages=9)], ids=lambda w: w.kind)
def test_messages_of_windows_by_number_are_looked_at_by_offset(window):
    context = StandaloneContext(window_spec(window, SCHEMA, {"m": median("value")}, keys=["key"]))
    for n, time in enumerate([50, 10, 30]):
        context.add_message(Message(n + 7, time, {"key": "a", "value": n}), 0)
    assert context.get_messages(10, 50).num_rows == 0
    with pytest.raises(ValueError, match="by='time': allowed are None, 'offset'"):
        context.get_messages(10, 50, by="time")
    assert context.get_messages(8, 10, by="offset").equals(context.get_messages(8, 10))


def test_sessions_by_number_can_be_looked_at():
    context = StandaloneContext(window_spec(session(messages=2), SCHEMA, {"m": median("value")}, keys=["key"]))
    for n, key in enumerate(["a", "a", None]):
        context.add_message(Message(n + 5, 0, {"key": key, "value": n}), 0)
    assert context.get_messages(0, 10, {"key": "a"}).column("value").to_pylist() == [0, 1]
    shown = [(w.start, w.end, w.key, w.messages) for w in context.get_windows(0, 10)]
    assert shown == [(5, 6, ("a",), 2), (7, 7, (None,), 1)]
    assert [w.key for w in context.get_windows(7, 8)] == [(None,)]
    assert [w.key for w in context.get_windows(0, 7)] == [("a",)]
    light = StandaloneContext(window_spec(session(messages=2), SCHEMA, {"n": count()}, keys=["key"]))
    light.add_message(Message(0, 0, {"key": "a"}), 0)
    assert [(w.key, w.messages) for w in light.get_windows(0, 10)] == [(("a",), 1)]


ALL_KINDS = [tumbling(10), hopping(10, 5), sliding(10), session(5)]
ALL_KINDS += [tumbling(messages=3), hopping(messages=4, every=2), sliding(messages=3), session(messages=3)]


@pytest.mark.parametrize("window", ALL_KINDS, ids=lambda w: f"{w.kind} {w.unit}")
@pytest.mark.parametrize("keys", [["key", "value"], []], ids=len)
def test_windows_and_messages_of_every_kind_can_be_looked_at(window, keys):
    if window.kind == "session" and not window.by_time:
        keys = keys or ["key"]  # it ends by messages without its key
    asked = spec(window, {"m": median("value")}, keys=keys)
    context = StandaloneContext(asked)
    assert context.get_windows(-100, 100) == []
    for n in range(4):
        context.add_message(Message(n, n, {"key": None if n else "a", "value": 1}), 0)
    views = context.get_windows(-100, 100)
    assert bool(views) is (window.by_time or window.kind != "sliding")
    assert all(view.start <= view.end for view in views)
    assert context.get_messages(-100, 100).num_rows >= 1
    assert context.get_windows(200, 300) == []


@pytest.mark.parametrize("window", ALL_KINDS, ids=lambda w: f"{w.kind} {w.unit}")
def test_a_window_that_is_opened_is_flushed_with_the_offset(window):
    store = MemoryStore()
    asked = spec(window, {"n": count()}, keys=["key"], policies=policies(full=False, late=None))
    context = AutomaticContext(asked, Downstream(9), store)
    context.add_message(Message(0, 100, {"key": "a"}), 0)
    assert AutomaticContext(asked, Downstream(9), store).positions[0, 0].next_offset == 1
    if window.unit == "time" or window.kind in {"tumbling", "session"}:
        context.add_message(Message(1, 100, {"key": "a"}), 0)  # opens nothing, sends nothing
        assert AutomaticContext(asked, Downstream(9), store).positions[0, 0].next_offset == 1


def test_each_sliding_window_is_flushed_when_it_is_opened():
    store = MemoryStore()
    asked = spec(sliding(1_600), {"n": count()}, keys=["key"], policies=policies(full=False, late=None))
    context = AutomaticContext(asked, Downstream(9), store)
    for offset, (key, time) in enumerate([("a", 100), ("a", 101), ("b", 101)]):
        context.add_message(Message(offset, time, {"key": key}), 0)
        assert AutomaticContext(asked, Downstream(9), store).positions[0, 0].next_offset == offset + 1


def test_a_group_key_that_falls_out_of_retention_is_flushed():
    store = MemoryStore()
    asked = spec(tumbling(messages=3), {"n": count()}, keys=["key"], retention="1 s")
    context = AutomaticContext(asked, Downstream(9), store)
    for offset, (key, time) in enumerate([("a", 0), ("b", 900), ("b", 1_000)]):
        context.add_message(Message(offset, time, {"key": key}), 0)
    again = StandaloneContext(asked, store)
    assert [view.key for view in again.get_windows(0, 10)] == [("b",)]


def test_far_ahead_messages_do_not_move_stream_time():
    context = StandaloneContext(spec(tumbling(10), {"n": count()}, max_ahead="1 s"))
    context.add_message(Message(0, 5, {}), 0)
    context.add_message(Message(1, 10**9, {}), 0)
    context.add_message(Message(2, 6, {}), 0)
    context.add_message(Message(3, 10, {}), 0)
    assert [(r["reason"], r["n"]) for r in context.get_result()] == [("full", 2)]
    assert [(e["offset"], e["reason"]) for e in context.get_errors()] == [(1, "in_future")]


@pytest.mark.parametrize("window", [tumbling(10), sliding(10)])
def test_event_times_that_nobody_can_take_leave_nothing_behind(window):
    store = MemoryStore()
    context = StandaloneContext(spec(window, {"m": median("value")}, max_ahead="1 s"), store)
    context.add_message(Message(0, 5, {"value": 1}), 0)
    context.flush()
    operators = region_range(Region.OPERATOR)
    before = [key for key, _ in store.scan(*operators)]
    for offset in range(1, 101):
        context.add_message(Message(offset, 10**15 if offset % 2 else 2**61, {"value": 1}), 0)
    assert Counter(e["reason"] for e in context.get_errors()) == {"in_future": 50, "out_of_range": 50}
    context.flush()
    assert [key for key, _ in store.scan(*operators)] == before


def test_what_is_due_is_sent_also_when_the_message_itself_is_refused():
    taken, refused = [], []
    early = spec(tumbling(10), retention=0, policies=policies(early="5 s"))
    context = AutomaticContext(early, lambda row: taken.append(as_row(row)) or True, on_error=refused.append)
    context.add_message(Message(0, 100, {"value": 3}), 0)
    context.add_message(Message(1, 0, {"value": 9}), 4999)  # its window ended at 10, a retention of 0 before 100
    assert taken == []
    context.add_message(Message(2, 1, {"value": 9}), 5000)
    assert taken == [("early", 0, 100, 110, 3)]
    assert [row["reason"] for row in refused] == ["out_of_retention", "out_of_retention"]


def test_windows_by_number_of_two_streams_without_a_group_key_are_told_apart():
    context = StandaloneContext(
        window_spec(tumbling(messages=5), pa.schema([("v", pa.int64())]), {"n": count()}, max_ahead=None)
    )
    for stream, offset in ((0, 1), (1, 100)):
        context.add_message(Message(offset=offset, time=0, fields={"v": 1}, stream=stream), 0)
    assert [(view.start, view.end) for view in context.get_windows(0, 1000)] == [(1, 1), (100, 100)]


def test_what_an_error_handler_raised_for_comes_again_and_no_result_is_lost():
    refused, results = [], []

    def on_error(row):
        refused.append((row["offset"], row["reason"]))
        if len(refused) == 1:
            raise RuntimeError("the errors' sink is away")

    spec = window_spec(tumbling(60_000), SCHEMA, {"n": count()}, retention=60_000, max_ahead=None)
    context = AutomaticContext(spec, lambda row: not results.append(row["n"]), on_error=on_error)
    context.add_message(Message(1, 1000, {}), 0)
    with pytest.raises(RuntimeError, match="is away"):
        context.add_messages([Message(2, "bad", {}), Message(3, 70_000, {})], 0)  # type: ignore[arg-type]
    assert not context.selector_enabled
    with pytest.raises(SelectorDisabled):
        context.add_message(Message(4, 80_000, {}), 0)
    context.timeout(0)
    assert refused == [(2, "malformed"), (2, "malformed")]
    assert results == [1]


def test_what_is_due_is_known_after_a_restart():
    spec = window_spec(
        tumbling(60_000), SCHEMA, {"n": count()}, retention=60_000, max_ahead=None, policies=policies(early="1 minute")
    )
    store = MemoryStore()
    first = StandaloneContext(spec, store)
    first.add_message(Message(1, 1000, {}), 1_000_000)
    first.flush()
    again = StandaloneContext(spec, store)
    assert again.next_due_ms == 1_060_000
    again.timeout(1_060_000)
    assert [row["reason"] for row in again.get_result()] == ["early"]
    assert again.next_due_ms is None


def test_a_fraction_is_no_integer_whatever_its_type():
    spec = window_spec(tumbling(60_000), pa.schema([("v", pa.int64())]), {"s": sum_("v")}, retention=0, max_ahead=None)
    context = StandaloneContext(spec)
    odd = (Decimal("1.5"), np.float32(1.5), Fraction(3, 2), Decimal("sNaN"), Decimal("Infinity"))
    for offset, value in enumerate(odd):
        context.add_message(Message(offset, 1000, {"v": value}), 0)
    assert [row["reason"] for row in context.get_errors()] == ["malformed"] * len(odd)


def test_a_date_that_python_does_not_have_loses_no_result():
    schema = pa.schema([("key", pa.string()), ("d", pa.date32())])
    spec = window_spec(tumbling(100), schema, {"m": max_("d")}, keys=["key"], retention=0, max_ahead=None)
    context = StandaloneContext(spec)
    for offset, time, key, day in ((1, 40, "a", 4_000_000), (2, 41, "b", 1), (3, 200, "a", 1)):
        context.add_message(Message(offset, time, {"key": key, "d": day}), 0)
    assert [(row["key"], str(row["m"])) for row in context.get_result()] == [("a", "12921-08-18"), ("b", "1970-01-02")]


def test_a_function_of_an_aggregate_is_given_text_for_a_date_that_python_does_not_have():
    schema = pa.schema([("d", pa.date32())])
    longest = reducer("d", init=lambda: 0, add=lambda state, d: max(state, len(str(d))), merge=max, output=pa.int64())
    context = StandaloneContext(window_spec(tumbling(100), schema, {"longest": longest}, retention=0, max_ahead=None))
    for offset, time, day in ((1, 40, 4_000_000), (2, 41, 1), (3, 200, 1)):
        context.add_message(Message(offset, time, {"d": day}), 0)
    assert [row["longest"] for row in context.get_result()] == [11]


def test_messages_of_a_key_that_is_nan_are_those_of_its_group():
    fields = pa.schema([("k", pa.float64()), ("v", pa.int64())])
    context = StandaloneContext(window_spec(tumbling(10), fields, {"m": median("v")}, keys=["k"], retention=50))
    for offset, key in enumerate([float("nan"), None, -0.0, 0.0, -float("nan"), 1.0]):
        context.add_message(Message(offset, 1, {"k": key, "v": offset}), 0)

    def found(key):
        return sorted(context.get_messages(0, 10, {"k": key}).column("v").to_pylist())

    assert [found(key) for key in (float("nan"), None, 0.0, 1.0)] == [[0, 4], [1], [2, 3], [5]]


def test_a_downstream_that_says_nothing_takes_what_it_is_given():
    taken = []
    context = AutomaticContext(spec(tumbling(10), {"n": count()}, retention=50), taken.append)
    for offset in range(3):
        context.add_message(Message(offset, 10 * offset, {"key": "a", "value": 1}), 0)
    assert context.selector_enabled
    assert [row["window_start"] for row in taken] == [0, 10]


def test_of_two_contexts_on_one_store_the_second_to_flush_is_refused():
    """Each would count its own messages over the other's."""
    store = MemoryStore()
    one, two = (StandaloneContext(spec(**FIRST), store) for _ in range(2))
    for context in (one, two):
        context.add_message(Message(0, 1, {"key": "a", "value": 1}), 0)
    one.flush()
    with pytest.raises(StateAhead, match="another context has flushed to the store"):
        two.flush()
    one.add_message(Message(1, 2, {"key": "a", "value": 1}), 0)
    one.flush()
    assert [window.messages for window in StandaloneContext(spec(**FIRST), store).get_windows(0, 10)] == [2]


def test_what_is_no_store_and_a_message_without_fields_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"^store='x/y': allowed are None and a store"):
        StandaloneContext(spec(**FIRST), "x/y")
    context = StandaloneContext(spec(**FIRST))
    with pytest.raises(ValueError, match=r"^fields=None: allowed are values by name"):
        context.add_message(Message(0, 5, None), 0)
    assert context.positions == {}


def test_numbers_of_numpy_are_numbers():
    context = StandaloneContext(spec(**FIRST))
    context.add_message(Message(np.int64(0), np.int64(5), {"key": "a", "value": 1}, np.int32(0)), 0)
    context.add_message(Message(np.int64(1), np.int64(10), {"key": "a", "value": 1}), 0)
    assert [(row["window_start"], row["n"]) for row in context.get_result()] == [(0, 1)]
    assert context.positions == {(0, 0): Position(2, 10, 0)}


@pytest.mark.parametrize("bad", [{"value": "x"}, {"value": 1, "time": 10**9}], ids=["malformed", "in_future"])
def test_a_source_partition_of_which_nothing_is_accepted_becomes_idle(bad):
    context = StandaloneContext(spec(tumbling(10), {"n": count()}, max_ahead="1 minute", idle_after="10 s"))
    context.add_messages([Message(0, 0, {"value": 1}), Message(0, 0, {"value": 1}, 1)], 0)
    for number, wall_ms in enumerate((5_000, 10_000), 1):
        assert context.get_result() == []
        refused = Message(number, bad.get("time", 0), {"value": bad["value"]}, 1)
        context.add_messages([Message(number, 10 * number, {"value": 1}), refused], wall_ms)
    assert [(row["window_start"], row["n"]) for row in context.get_result()] == [(0, 2), (10, 1)]
    assert context.positions == {(0, 0): Position(3, 20, 10_000), (0, 1): Position(3, 0, 0)}
