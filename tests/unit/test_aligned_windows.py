"""Tumbling and hopping windows by event time: what is sent when, by hand."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from backend.aggregates import collect_list, count, max_, median, sum_
from backend.batch import NO_TIME
from backend.errors import KeyInvalid, UnknownFormat
from backend.keys.columns import encode_columns
from backend.store.protocol import Changes, Region
from backend.store.workspace import Workspace
from backend.windows import ledger, panes, revisions, views
from backend.windows.aligned.kind import SCAN_SHARE, Aligned, _Step
from backend.windows.columns.pane_rows import Pairs
from backend.windows.definitions import assigner, hopping, session, sliding, tumbling
from backend.windows.policies import policies
from backend.windows.spec import window_spec
from tests.support.counting_store import CountingStore
from tests.unit.one_shard import SCHEMA, OneShard


def shard(window=None, aggregates=None, **options):
    options = {"keys": ["key"], "retention": 20, "max_ahead": None, **options}
    return OneShard(window_spec(window or tumbling(10), SCHEMA, aggregates or {"sum": sum_("value")}, **options))


def test_a_window_is_full_at_the_first_message_at_its_end():
    s = shard()
    assert s.batch([(0, 1, "a", 1), (1, 9, "b", 2), (2, 9, "a", 3)]) == []
    assert s.batch([(3, 10, "a", 4)]) == [("full", 0, 0, 10, "a", 4), ("full", 0, 0, 10, "b", 2)]
    assert s.batch([]) == []


def test_a_micro_batch_that_sends_nothing_evaluates_nothing(monkeypatch):
    s, asked = shard(aggregates={"n": count(), "all": collect_list("value")}, policies=policies(late="off")), []
    for owner, name in ((_Step, "_prepare"), (Pairs, "find"), (revisions, "join_keys")):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, real=real, name=name: asked.append(name) or real(*given))
    assert s.batch([(0, 1, "a", 1), (1, 12, "b", 2)]) == [("full", 0, 0, 10, "a", 1, [1])]
    assert asked.count("_prepare") == 1
    asked.clear()
    assert s.batch([(2, 13, "a", 3), (3, 14, "b", 4)]) == []
    assert (asked, s.outcome.results.num_rows, s.outcome.results.schema) == ([], 0, s.operator.result_schema)
    assert s.batch([(4, 20, "a", 5)]) == [("full", 0, 10, 20, "a", 1, [3]), ("full", 0, 10, 20, "b", 2, [2, 4])]


def test_open_windows_that_come_and_close_are_counted_as_a_scan_finds_them(monkeypatch):
    s, asked = shard(retention=5, policies=policies(late="off")), []
    count_open = s.operator.kind.count_open
    monkeypatch.setattr(s.operator.kind, "count_open", lambda *given: asked.append(given))
    s.batch([(0, 1, "a", 1)], more={1: [(0, time, "b", 1) for time in (3, 15, 31, 77)]})
    more = [[(1, 12, "a", 1), (2, 4, "a", 1)], [(3, 45, "a", 1), (4, 33, "a", 1)], [(5, 200, "a", 1)], []]
    found = [s.outcome.metrics["windows_open"]]
    for rows in more:
        s.batch(rows)
        work = Workspace(s.store, s.bounds)
        assert s.outcome.metrics["windows_open"] == count_open(work, ledger.read(work).clock)
        found.append(s.outcome.metrics["windows_open"])
    # [0, 10), [10, 20), [30, 40), [70, 80); the clock is 1, 12, 45 and, as of the partition that lags, 77
    assert (found, asked) == ([4, 3, 2, 2, 2], [])


def test_what_comes_after_the_closing_message_is_late_even_in_its_micro_batch():
    s = shard()
    assert s.batch([(0, 1, "a", 1), (1, 10, "b", 2), (2, 2, "a", 4)], 1000) == [("full", 0, 0, 10, "a", 1)]
    assert s.outcome.next_due_ms == 11_000
    assert s.batch([], 10_999) == []
    assert s.batch([], 11_000) == [("late", 1, 0, 10, "a", 5)]
    assert s.outcome.next_due_ms is None


def test_a_window_first_created_after_its_end_is_late_never_full():
    s = shard(policies=policies(late="each"))
    s.batch([(0, 15, "a", 1)])
    assert s.batch([(1, 3, "b", 2)]) == [("late", 0, 0, 10, "b", 2)]
    assert s.batch([(2, 4, "b", 3)]) == [("late", 1, 0, 10, "b", 5)]


def test_retention_ends_a_window_and_sends_what_waits():
    s = shard()
    s.batch([(0, 1, "a", 1), (1, 12, "a", 1), (2, 2, "a", 5)])
    assert s.batch([(3, 29, "a", 1), (4, 3, "b", 7)]) == [("full", 0, 10, 20, "a", 1)]
    assert s.errors() == []
    # 30 is its end and the retention: what waited goes out, then it is gone
    assert s.batch([(5, 30, "a", 1), (6, 4, "a", 9)]) == [
        ("full", 0, 20, 30, "a", 1),
        ("late", 1, 0, 10, "a", 6),
        ("late", 0, 0, 10, "b", 7),
    ]
    assert s.errors() == [(0, 6, "out_of_retention")]
    windows = [key[1:9] for key in s.visible() if Region.WINDOWS <= key[0] <= Region.REVISIONS]
    assert min(windows) == (2**63 + 10).to_bytes(8, "big")


def test_hopping_windows_share_panes_and_lateness_is_per_window():
    s = shard(hopping(10, 5), {"n": count(), "all": collect_list("value")}, retention=0, policies=policies(late="each"))
    assert s.batch([(0, 1, "a", 1), (1, 7, "a", 2)]) == [("full", 0, -5, 5, "a", 1, [1])]
    # at stream time 10 the window [0, 10) is closed and, without retention, gone; 8 still counts in [5, 15)
    assert s.batch([(2, 11, "a", 3), (3, 8, "a", 4)]) == [("full", 0, 0, 10, "a", 2, [1, 2])]
    assert s.errors() == []
    assert s.batch([(4, 15, "b", 5)]) == [("full", 0, 5, 15, "a", 3, [2, 3, 4])]
    assert s.batch([(5, 4, "a", 6)]) == []
    assert s.errors() == [(0, 5, "out_of_retention")]


def test_what_is_too_late_for_one_window_never_changes_it_later():
    s = shard(hopping(10, 5), {"n": count(), "m": median("value")}, retention=5, policies=policies(late="1 hour"))
    s.batch([(0, 7, "a", 1), (1, 12, "a", 2), (2, 6, "a", 3)])
    assert s.batch([(3, 14, "b", 0)]) == []
    # stream time 15: [0, 10) is out of retention, its late update of offset 2 goes out, offset 4 is not in it
    assert s.batch([(4, 15, "b", 0), (5, 8, "a", 100)]) == [
        ("full", 0, 5, 15, "a", 3, 2.0),
        ("full", 0, 5, 15, "b", 1, 0.0),
        ("late", 1, 0, 10, "a", 2, 2.0),
    ]
    assert s.batch([], drain=True) == [
        ("late", 1, 5, 15, "a", 4, 2.5),
        ("drain", 0, 10, 20, "a", 1, 2.0),
        ("drain", 0, 10, 20, "b", 2, 0.0),
        ("drain", 0, 15, 25, "b", 1, 0.0),
    ]


def test_a_gap_in_time_opens_no_windows():
    s = shard(hopping("1 hour", "1 minute"))
    s.batch([(0, 0, "a", 1)])
    centuries = 10**13
    results = s.batch([(1, centuries, "a", 2)])
    assert len(results) == 60
    assert {row[0] for row in results} == {"full"}


def test_early_results_by_wall_clock_then_full():
    s = shard(policies=policies(early="1 s"))
    assert s.batch([(0, 1, "a", 1), (1, 2, "b", 1)], 500) == []
    assert s.outcome.next_due_ms == 1500
    assert s.batch([(2, 3, "a", 1)], 1500) == [("early", 0, 0, 10, "a", 2), ("early", 0, 0, 10, "b", 1)]
    assert s.outcome.next_due_ms is None
    assert s.batch([], 9000) == []
    assert s.batch([(3, 4, "a", 5)], 10_000) == []
    assert s.batch([(4, 10, "a", 1)], 10_500) == [("full", 1, 0, 10, "a", 7), ("full", 1, 0, 10, "b", 1)]
    assert s.batch([(5, 5, "b", 1)], 10_600, drain=True) == [("late", 2, 0, 10, "b", 2), ("drain", 0, 10, 20, "a", 1)]


def test_policies_off():
    s = shard(policies=policies(full=False, late="off"))
    assert s.batch([(0, 1, "a", 1), (1, 10, "a", 2), (2, 2, "a", 1)]) == []
    assert s.batch([], 10**6, drain=True) == [("drain", 0, 10, 20, "a", 2)]


def test_drained_windows_stay_open_and_count_revisions():
    s = shard()
    assert s.batch([(0, 1, "a", 1)], drain=True) == [("drain", 0, 0, 10, "a", 1)]
    assert s.batch([(1, 2, "a", 1)], drain=True) == [("drain", 1, 0, 10, "a", 2)]
    assert s.batch([(2, 10, "b", 1)]) == [("full", 2, 0, 10, "a", 2)]
    assert s.batch([(3, 3, "a", 1)], drain=True) == [("late", 3, 0, 10, "a", 3), ("drain", 0, 10, 20, "b", 1)]


def test_several_partitions_close_by_the_slowest_that_is_not_idle():
    s = shard(idle_after="10 s")
    assert s.batch([(0, 25, "a", 1)], 0, more={1: [(0, 5, "a", 2)]}) == []
    assert s.batch([(1, 6, "a", 4)], 5000) == []  # its own partition is far on, the window is still open
    assert s.outcome.next_due_ms == 10_000
    assert s.batch([(2, 26, "a", 8)], 10_000) == [("full", 0, 0, 10, "a", 6)]  # partition 1 is idle
    assert s.errors() == []
    assert s.batch([], 11_000, more={1: [(1, 7, "a", 16)]}, drain=True) == [
        ("late", 1, 0, 10, "a", 22),
        ("drain", 0, 20, 30, "a", 9),
    ]


def test_what_is_gone_for_all_by_number_is_gone_for_a_partition_that_was_idle():
    s = shard(retention=1000, retention_messages=1, idle_after="10 s")
    s.batch([(0, 25, "a", 1)], 0, more={1: [(0, 5, "a", 2)]})
    s.batch([(1, 26, "a", 4), (2, 27, "a", 8)], 10_000)
    assert s.batch([], 11_000, more={1: [(1, 7, "a", 16)]}) == []
    assert s.errors() == [(1, 1, "out_of_retention")]


@pytest.mark.parametrize("aggregate", [collect_list("value"), sum_("value")], ids=["full state", "incremental"])
def test_a_message_too_late_by_its_own_partition_stays_out_of_a_window_that_is_still_open(aggregate):
    s = shard(hopping(10, 5), {"x": aggregate}, retention=0, idle_after=None)
    s.batch([(0, 7, "a", 1), (1, 12, "a", 2)], more={1: [(0, 1, "a", 4)]})
    assert s.batch([(2, 8, "a", 8)]) == []
    assert s.errors() == []
    results = {row[2:4]: row[5] for row in s.batch([], more={1: [(1, 15, "b", 0)], 0: [(3, 15, "b", 0)]})}
    assert results[0, 10] == ([1, 4] if isinstance(results[0, 10], list) else 5)
    assert results[5, 15] == ([1, 2, 8] if isinstance(results[5, 15], list) else 11)


def test_one_micro_batch_or_many_leave_the_same_rows_where_a_window_closes_and_is_updated():
    rows = [(0, 1, "a", 1), (1, 10, "a", 1), (2, 2, "a", 1), (3, 3, "b", 1)]
    whole, pieces = shard(), shard()
    whole.batch(rows)
    for row in rows:
        pieces.batch([row])
    assert whole.visible() == pieces.visible()


def test_event_times_that_nobody_can_take():
    s = shard(max_ahead="1 s")
    s.batch([(0, 1001, "a", 1), (1, 1000, "a", 1), (2, -(2**62) - 1, "a", 1)], 0)
    assert s.errors() == [(0, 2, "out_of_range"), (0, 0, "in_future")]


def test_negative_times_nulls_and_no_key():
    s = shard(tumbling(10, origin=3), {"n": count(), "m": max_("value")}, keys=[])
    s.batch([(0, -8, None, None), (1, -8, "a", 1), (2, -7, "b", None)])
    assert s.results() == [("full", 0, -17, -7, 2, 1)]
    keyed = shard()
    assert keyed.batch([(0, 1, None, 1), (1, 1, "", 2), (2, 10, "a", 0)]) == [
        ("full", 0, 0, 10, None, 1),
        ("full", 0, 0, 10, "", 2),
    ]


def test_every_message_is_kept_once_and_proved():
    s = shard(aggregates={"m": median("value")})
    s.batch([(3, 1, "a", 1), (4, 12, "a", 3), (9, 2, "b", 5)])
    assert dict(s.outcome.replay_from) == {(0, 0): 3}
    assert s.outcome.message_count == 3
    proofs = {proof.label: proof.count for proof in s.operator.proofs(_state(s))}
    assert proofs == {"pane [0, 10)": 2, "pane [10, 20)": 1}
    s.batch([(10, 30, "a", 1)])
    assert dict(s.outcome.replay_from) == {(0, 0): 4}
    assert s.outcome.message_count == 2
    assert s.outcome.message_digest == sum(proof.digest for proof in s.operator.proofs(_state(s))) % 2**64


@pytest.mark.parametrize("window", [tumbling(10), sliding(160)], ids=["tumbling", "sliding"])
def test_where_a_replay_begins_is_told_without_reading_all_panes(window):
    s = shard(window, {"l": collect_list("value")}, retention=10**6)
    s.store = CountingStore()
    s.batch([(offset, 10 * offset, "a", 1) for offset in range(1_000)])
    assert s.outcome.replay_from == {(0, 0): 0}
    s.store.read.clear()
    s.batch([])
    assert sum(key[0] == Region.WINDOWS for key in s.store.read) < 5
    assert s.outcome.replay_from == {(0, 0): 0}


INDEX = bytes([Region.OPERATOR]) + b"f"


def replay_by_all_panes(s):
    found = {}
    for pane in panes.all_panes(_state(s)):
        for stream, partition, first, _ in pane.sources:
            found[stream, partition] = min(found.get((stream, partition), first), first)
    return found


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("window", [tumbling(10), hopping(12, 8), sliding(48)], ids=["tumbling", "hopping", "sliding"])
def test_where_a_replay_begins_is_what_all_panes_say(window, seed):
    rng = random.Random(seed)

    def options():
        counted = rng.choice([None, 5, 30])
        return {
            "retention": rng.choice([0, 20, 100]),
            "retention_messages": counted,
            "keys": ["key"],
            "max_ahead": None,
        }

    s = shard(window, {"m": median("value")}, **options())
    begun, clock = Counter(), 0
    for _ in range(60):
        clock += rng.choice([0, 3, 10, 60])
        rows = {}
        for partition in range(rng.choice([1, 3])):
            count = rng.randrange(4)
            first = 1_000 - begun[partition] if rng.random() < 0.1 else 1_000 + begun[partition]  # also out of order
            begun[partition] += count
            times = [max(clock - rng.choice([0, 1, 15, 40, 110]), 0) for _ in range(count)]
            rows[partition] = [(first + at, time, rng.choice("ab"), 1) for at, time in enumerate(times)]
        s.batch(rows.pop(0), more=rows, drain=rng.random() < 0.1)
        assert s.outcome.replay_from == replay_by_all_panes(s)
        index = {key for key in s.visible() if key.startswith(INDEX)}
        assert index == {INDEX, *panes.index_keys(panes.all_panes(_state(s)))}
        if rng.random() < 0.1:  # as an older release left it
            s.store.write(Changes(sorted(index), [None] * len(index)))
        if rng.random() < 0.1:
            s.restart(shard(window, {"m": median("value")}, **options()).operator.spec)


def test_an_index_of_panes_of_another_format_is_named():
    s = shard(aggregates={"m": median("value")})
    s.batch([(0, 1, "a", 1)])
    s.store.write(Changes([INDEX], [b"\x02"]))
    with pytest.raises(UnknownFormat, match="index of panes"):
        s.batch([])


@pytest.mark.parametrize("window", [tumbling(10), sliding(10), session(10)], ids=["tumbling", "sliding", "session"])
def test_what_retention_by_number_remembers_ends_with_retention_by_time(window):
    s = shard(window, retention=50, retention_messages=10**6)
    for offset in range(400):
        s.batch([(offset, 10 * offset, "a", 1)])
        assert s.errors() == []
    assert len(s.visible()[bytes([Region.OPERATOR]) + b"newest"]) < 300
    s.restart(shard(window, retention=10**6, retention_messages=None).operator.spec)  # what is gone stays gone
    s.batch([(400, 3_000, "a", 1)])
    assert s.errors() == [(0, 400, "out_of_retention")]


def test_no_message_is_kept_when_no_aggregate_needs_it():
    s = shard()
    s.batch([(0, 1, "a", 1)])
    assert dict(s.outcome.replay_from) == {}
    assert not any(key[0] == Region.MESSAGES for key in s.visible())


def test_several_key_fields_and_types():
    schema = pa.schema([("a", pa.string()), ("b", pa.int32()), ("c", pa.float64()), ("v", pa.int64())])
    spec = window_spec(tumbling(10), schema, {"n": count()}, keys=["a", "b", "c"], retention=0)
    operator = OneShard(spec).operator
    assert operator.result_schema.names[8:] == ["a", "b", "c", "n"]
    assert operator.input_fields == ["a", "b", "c"]


@pytest.mark.parametrize(
    "kind",
    [pa.decimal128(10, 2), pa.list_(pa.int64()), pa.struct({"a": pa.int64()}), pa.time64("us"), pa.duration("s")],
)
def test_a_key_of_a_type_without_an_order_is_refused_before_anything_starts(kind):
    schema = pa.schema([("m", kind), ("v", pa.int64())])
    with pytest.raises(ValueError, match=r"keys: 'm' is .*allowed in a group key are integers"):
        window_spec(tumbling(10), schema, {"n": count()}, keys=["m"], retention=0)
    with pytest.raises(KeyInvalid):
        encode_columns([pa.nulls(1, kind)])


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.binary(), pa.bool_(), pa.int8(), pa.uint64(), pa.float32(), pa.date32(),
             pa.timestamp("ms"), pa.timestamp("us", "UTC"), pa.dictionary(pa.int32(), pa.string()), pa.null()]
)  # fmt: skip
def test_a_key_of_every_type_that_has_one_is_taken(kind):
    window_spec(tumbling(10), pa.schema([("m", kind)]), {"n": count()}, keys=["m"], retention=0)
    assert len(encode_columns([pa.nulls(2, kind)])) == 2


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"keys": ["nobody"]}, "keys: 'nobody'"),
        ({"keys": ""}, "keys=''"),
        ({"keys": ["key", "key"]}, "keys: 'key' is taken"),
        ({"retention": None}, "retention=None"),
        ({"retention": "-1 s"}, "retention="),
        ({"retention_messages": 0}, "retention_messages=0"),
        ({"idle_after": "later"}, "idle_after="),
        ({"max_ahead": -1}, "max_ahead="),
        ({"aggregates": {"key": count()}}, "'key' is taken"),
        ({"aggregates": {"reason": count()}}, "reason"),
        ({"aggregates": {"n": sum_("nothing")}}, "nothing"),
    ],
)
def test_bad_specifications_name_the_option(options, named):
    with pytest.raises(ValueError, match=named):
        shard(**options)


def test_the_manifest_entry_says_what_must_stay():
    described = shard(hopping(10, 5)).operator.describe()
    assert described["window"] == {"kind": "hopping", "unit": "time", "size": 10, "step": 5, "origin": 0}
    assert described["keys"] == [["key", "string"]]
    assert described["retention_ms"] == 20


def test_a_fresh_shard_has_no_clock():
    s = shard()
    assert s.batch([]) == []
    assert s.batch([], drain=True) == []
    assert s.positions.get((0, 0)) is None
    assert NO_TIME == -(2**63)


def _state(s):
    return Workspace(s.store, s.bounds)


@pytest.mark.parametrize(
    ("window", "clock", "ends"),
    [
        (tumbling(100), 0, (100, 200)),
        (tumbling(100), 99, (100, 200)),
        (tumbling(100), 100, (200, 300)),
        (tumbling(100), -1, (0, 100)),
        (hopping(100, 30), 100, (130, 160)),
        (hopping(100, 30), 129, (130, 160)),
        (tumbling("1 month", timezone="UTC"), 0, (31 * 86_400_000, 59 * 86_400_000)),
    ],
)
def test_a_watermark_says_when_the_next_windows_end(window, clock, ends) -> None:
    schema = pa.schema([pa.field("key", pa.string())])
    spec = window_spec(window, schema, {"n": count()}, keys=["key"], retention=5)
    assert Aligned(spec).next_ends(clock) == ends


def looked_at(shard, start, end):
    return [
        (view.start, view.end, view.messages)
        for view in views.windows(shard.operator.kind, Workspace(shard.store, shard.bounds), start, end)
    ]


DAY = 86_400_000


def test_a_late_message_in_thousands_of_windows_of_many_panes_costs_what_is_there():
    """A day every eleven seconds: 7,855 windows of 86,400 panes, of which two have a message."""
    spec = window_spec(
        hopping("1 day", "11 seconds"), SCHEMA, {"n": count()}, keys=["key"], retention="7 days", max_ahead=None,
        policies=policies(late="each"),
    )  # fmt: skip
    shard = OneShard(spec)
    shard.batch([(0, 10 * DAY, "a", 1)])
    shard.batch([(1, 12 * DAY, "a", 1)])
    late = shard.batch([(2, 10 * DAY + 5, "b", 1), (3, 10 * DAY + 5, "a", 1)])
    counts = Counter((key, n) for *_, key, n in late)
    assert counts == {("a", 2): counts["b", 1], ("b", 1): counts["b", 1]}
    assert counts["b", 1] in (7_854, 7_855)


def test_windows_are_looked_at_by_the_panes_that_there_are():
    spec = window_spec(hopping("1 hour", "1001 ms"), SCHEMA, {"n": count()}, retention="7 days", max_ahead=None)
    shard = OneShard(spec)
    shard.batch([(0, 10 * DAY, "a", 1)])
    found = looked_at(shard, 10 * DAY, 10 * DAY + 1)
    assert len(found) in (3_596, 3_597)
    assert {messages for *_, messages in found} == {1}


def test_the_range_of_a_look_may_end_where_no_time_is():
    shard = OneShard(window_spec(tumbling(10), SCHEMA, {"n": count()}, retention=100, max_ahead=None))
    shard.batch([(0, 25, "a", 1)])
    for start, end in ((-(2**63), 2**63 - 1), (0, 2**63), (-(2**70), 2**70)):
        assert looked_at(shard, start, end) == [(20, 30, 1)]


def test_a_window_that_is_gone_is_not_looked_at_under_a_longer_retention():
    def spec(retention):
        return window_spec(hopping(20, 10), SCHEMA, {"n": count()}, retention=retention, max_ahead=None)

    shard = OneShard(spec(0))
    shard.batch([(0, 5, "a", 1), (1, 15, "a", 1), (2, 25, "a", 1)])
    known = [(10, 30, 2), (20, 40, 1)]
    assert looked_at(shard, -100, 100) == known
    shard.restart(spec(1_000))
    shard.batch([], 1)
    assert looked_at(shard, -100, 100) == known
    by_number = window_spec(
        sliding(20), SCHEMA, {"n": count()}, keys=["key"], retention=1_000, retention_messages=1, max_ahead=None
    )
    shard = OneShard(by_number)
    shard.batch([(at, time, "a", 1) for at, time in enumerate((5, 15, 45, 46, 47))])
    assert [end for _, end, _ in looked_at(shard, -100, 100)] == [46, 47]


def test_what_windows_of_many_panes_cost_does_not_grow_with_the_time_between_messages():
    """Size and step share no divisor: a pane is a millisecond, and a window has five million of them."""
    s = OneShard(
        window_spec(hopping(5_000_000, 4_999_999), SCHEMA, {"n": count()}, keys=[], retention=0, max_ahead=None)
    )
    tracemalloc.start()
    try:
        found = s.batch([(offset, offset * 20_000_000, "a", 1) for offset in range(40)])
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found) == 40, "the first message is in two windows, the last one's is open"
    assert most < 50_000_000


@pytest.mark.parametrize("window", [tumbling(10), sliding(5)])
def test_what_is_due_writes_the_revisions_of_what_waits_and_of_no_other_window(window):
    s = shard(window, retention=10**6, policies=policies(late=10))
    s.batch([(at, 10 * at, "a", 1) for at in range(502)])
    late = s.batch([(502 + at, 10 * at, "a", 1) for at in range(500)], 1) or s.batch([], 50)
    assert {(row[0], row[1]) for row in late} == {("late", 1)}
    assert len(late) == 500
    s.batch([(1002, 100, "a", 1), (1003, 200, "a", 1)], 100)
    assert s.written(Region.REVISIONS) == 2
    s.batch([(1004, 300, "a", 1)], 110)
    assert s.written(Region.REVISIONS) == 3, "two are sent, one begins to wait"
    assert [row[:4] + row[5:] for row in s.results()] == [
        ("late", 2, at, at + 10, 3) if window.kind == "tumbling" else ("late", 2, at - 5, at, 3) for at in (100, 200)
    ]
    s.batch([], 115)
    assert s.written(Region.REVISIONS) == 0
    s.batch([(1005, 400, "a", 1)], 120)
    assert s.written(Region.REVISIONS) == 2
    assert [row[:2] for row in s.results()] == [("late", 2)]


def test_a_row_that_does_not_wait_is_found_when_something_else_is_due():
    s = shard(retention=10**6, policies=policies(early=10, late=10))
    assert s.batch([(0, 1, "a", 1), (1, 11, "a", 1)], 0) == [("full", 0, 0, 10, "a", 1)]
    assert s.batch([(2, 2, "a", 1)], 10) == [("early", 0, 10, 20, "a", 1)]
    assert s.batch([], 20) == [("late", 1, 0, 10, "a", 2)]
    assert s.batch([(3, 12, "b", 1)], 30) == []
    # `b` is due; the rows of `a` wait for nothing, and an update, the window's end or a drain ask for them
    assert s.batch([(4, 3, "a", 1), (5, 13, "a", 1)], 40) == [("early", 0, 10, 20, "b", 1)]
    rows = s.batch([(6, 14, "b", 1)], 50, drain=True)
    assert sorted(row[:2] + row[4:] for row in rows) == [
        ("drain", 1, "a", 2),
        ("drain", 1, "b", 2),
        ("late", 2, "a", 3),
    ]
    s.batch([(7, 15, "b", 1)], 51)
    assert s.batch([(8, 25, "c", 1)], 61) == [("full", 2, 10, 20, "a", 2), ("full", 2, 10, 20, "b", 3)]


def test_the_rows_of_late_updates_are_those_of_each_skip_of_the_panes_that_are_not_read_whole():
    random = np.random.default_rng(5)
    some_whole = some_single = 0
    for _ in range(60):
        grid = assigner(hopping(6, 1))
        numbers = np.flatnonzero(random.random(30) < 0.7)
        panes = {
            pane: SimpleNamespace(
                skips=sorted(random.choice(np.arange(1, 6), random.integers(0, 5), replace=False).tolist()),
                groups=int(random.choice([1, 20, 1_000])),
            )
            for pane in numbers.tolist()
        }
        arrived = SimpleNamespace(
            pane=np.sort(random.integers(0, 30, 8)), skip=random.integers(0, 6, 8), key=random.integers(0, 4, 8)
        )
        step = SimpleNamespace(
            grid=grid, panes=SimpleNamespace(known=panes), arrived=arrived, key_of=np.array([3, 0, 2, 1])
        )
        going = Pairs(random.integers(-5, 35, 6), random.integers(0, 4, 6), 4)
        whole = random.random(len(numbers)) < 0.2
        wanted, counts = set(), Counter()
        for window, key in zip(going.window.tolist(), going.key.tolist(), strict=True):
            for at, pane in enumerate(numbers.tolist()):
                if window <= pane < window + 6:
                    wanted |= {(at, skip, key) for skip in (0, *panes[pane].skips)}
        counts.update(at for at, _, _ in wanted)
        for pane, skip, key in zip(arrived.pane, arrived.skip, step.key_of[arrived.key], strict=True):
            if pane in panes:
                at = int(np.searchsorted(numbers, pane))
                counts[at] += 1
                wanted.add((at, int(skip), int(key)))
        expected = [
            bool(before) or counts[at] * SCAN_SHARE >= panes[pane].groups
            for at, (before, pane) in enumerate(zip(whole, numbers.tolist(), strict=True))
        ]
        rows = _Step._single_rows(step, going, numbers, whole)
        assert whole.tolist() == expected
        found = set(zip(*(column.tolist() for column in rows), strict=True))
        assert found == {row for row in wanted if not expected[row[0]]}
        some_whole, some_single = some_whole + sum(expected), some_single + len(found)
    assert some_whole > 100
    assert some_single > 100


def test_late_updates_of_many_panes_and_skips_cost_what_is_stored_of_them():
    """Each of 600 panes has skips of its own, and 50 group keys are late in five windows over all of them."""
    s = shard(hopping(600, 1), {"n": count()}, retention=5, policies=policies(late="each"))
    rows = [(time - back, "a") for time in range(620) for back in range(min(time, 30), -1, -1)]
    s.batch([(offset, time, key, 1) for offset, (time, key) in enumerate(rows)])
    late = [(len(rows) + at, 613, f"k{at}", 1) for at in range(50)]
    tracemalloc.start()
    try:
        found = s.batch(late)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert {(row[0], row[-1]) for row in found} == {("late", 1)}
    assert len(found) >= 50
    assert most < 10_000_000
