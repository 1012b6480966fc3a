"""Sliding windows by event time: one per distinct time of a key, by hand."""

from __future__ import annotations

import tracemalloc

import pyarrow as pa
import pytest

from backend.aggregates import collect_list, count, median, reducer, sum_
from backend.store.protocol import Region
from backend.store.workspace import Workspace
from backend.windows.definitions import sliding
from backend.windows.policies import every, policies
from backend.windows.spec import window_spec
from tests.support.counting_store import CountingStore
from tests.unit.one_shard import SCHEMA, OneShard


def shard(aggregates=None, size=10, **options):
    options = {"keys": ["key"], "retention": 100, "max_ahead": None, **options}
    return OneShard(window_spec(sliding(size), SCHEMA, aggregates or {"sum": sum_("value")}, **options))


def test_both_ends_are_in_the_window_and_it_is_full_when_time_passes_it():
    s = shard()
    assert s.batch([(0, 0, "a", 1), (1, 10, "a", 2), (2, 10, "a", 4)]) == [("full", 0, -10, 0, "a", 1)]
    assert s.batch([(3, 11, "a", 8)]) == [("full", 0, 0, 10, "a", 7)]
    assert s.batch([], drain=True) == [("drain", 0, 1, 11, "a", 14)]


def test_every_new_window_counts_as_opened():
    s = shard(size=1600)
    s.batch([(0, 0, "a", 1), (1, 1, "b", 1), (2, 2, "a", 1)])
    assert s.outcome.metrics["opened"] == 3
    s.batch([(3, 3, "c", 1)])
    assert s.outcome.metrics["opened"] == 1
    s.batch([(4, 3, "c", 1), (5, 4, "a", 1), (6, 1, "a", 1), (7, 2, "a", 1)])
    assert s.outcome.metrics["opened"] == 2
    s.batch([])
    assert s.outcome.metrics["opened"] == 0


def test_each_key_has_its_own_windows():
    s = shard()
    assert s.batch([(0, 5, "a", 1), (1, 6, "b", 2), (2, 8, "a", 4), (3, 9, "c", 8)]) == [
        ("full", 0, -5, 5, "a", 1),
        ("full", 0, -4, 6, "b", 2),
        ("full", 0, -2, 8, "a", 5),
    ]


def test_a_message_out_of_order_makes_its_own_window_and_updates_later_ones():
    s = shard(policies=policies(late="each"))
    s.batch([(0, 10, "a", 1), (1, 15, "a", 2), (2, 30, "a", 4)])
    assert s.batch([(3, 7, "a", 8)]) == [
        ("late", 0, -3, 7, "a", 8),
        ("late", 1, 0, 10, "a", 9),
        ("late", 1, 5, 15, "a", 11),
    ]


def test_what_comes_after_the_closing_message_is_not_in_the_full_result():
    s = shard()
    assert s.batch([(0, 5, "a", 1), (1, 6, "a", 2), (2, 4, "a", 4), (3, 5, "a", 8)]) == [("full", 0, -5, 5, "a", 1)]
    assert s.batch([(4, 7, "b", 0)], drain=True) == [
        ("full", 0, -4, 6, "a", 15),
        ("late", 0, -6, 4, "a", 4),
        ("late", 1, -5, 5, "a", 13),
        ("drain", 0, -3, 7, "b", 0),
    ]


def test_a_message_whose_own_window_is_gone_counts_in_later_ones():
    s = shard({"n": count(), "all": collect_list("value"), "m": median("value")}, retention=2)
    s.batch([(0, 10, "a", 1), (1, 13, "a", 2)])
    # stream time 13: window 10 is gone at 13 (10 + 1 + 2), window 13 is open
    assert s.batch([(2, 5, "a", 3)]) == []
    assert s.errors() == []
    assert s.batch([(3, 14, "b", 0)]) == [("full", 0, 3, 13, "a", 3, [1, 2, 3], 2.0)]
    # the last window it could count in is 10 + 0: gone
    assert s.batch([(4, 0, "a", 4)]) == []
    assert s.errors() == [(0, 4, "out_of_retention")]


def test_a_message_that_is_refused_later_is_told_with_its_own_timestamp():
    s = shard(retention=2)
    s.batch([(0, 10, "a", 1), (1, 13, "a", 2)], timestamps=[90, 91])
    s.batch([(5, 5, "b", 3), (7, 6, "b", 3), (9, 4, "b", 3)], timestamps=[92, None, 94])
    assert s.errors() == []
    # the last windows that could show them end at 14, 15 and 16: stream time 17 leaves the first out of retention
    told = []
    for at, drain in ((17, False), (18, False), (30, True)):
        s.batch([(at, at, "a", 1)], timestamps=[100 + at], drain=drain)
        told.append([(row["offset"], row["event_time"], row["timestamp"]) for row in s.outcome.errors.to_pylist()])
    assert told == [[(9, 4, 94)], [(5, 5, 92)], [(7, 6, None)]]


def test_messages_are_kept_in_buckets_and_proved():
    s = shard({"m": median("value")}, size=160, retention=0)
    s.batch([(7, 0, "a", 1), (8, 9, "a", 3), (9, 10, "b", 5)])
    assert dict(s.outcome.replay_from) == {(0, 0): 7}
    assert [(p.label, p.count) for p in s.operator.proofs(Workspace(s.store, s.bounds))] == [
        ("pane [0, 10)", 2),
        ("pane [10, 20)", 1),
    ]
    s.batch([(10, 172, "a", 1)])
    assert dict(s.outcome.replay_from) == {(0, 0): 9}
    assert s.outcome.message_count == 2


def test_early_results_of_open_windows():
    s = shard(policies=policies(early="1 s"))
    s.batch([(0, 5, "a", 1)], 0)
    assert s.outcome.next_due_ms == 1000
    assert s.batch([(1, 5, "a", 2)], 1000) == [("early", 0, -5, 5, "a", 3)]
    assert s.batch([(2, 6, "a", 4)], 1500) == [("full", 1, -5, 5, "a", 3)]


def test_a_reducer_is_told_what_is_earlier_first():
    """Blocks of several messages stood behind single ones: the last list was [3, 1, 2]."""
    join = reducer("value", init=list, add=lambda s, v: [*s, v], merge=lambda a, b: a + b, output=pa.list_(pa.int64()))
    for size in (3, 10):
        for messages in range(1, 12):
            s = shard({"all": join}, size=size, retention=0)
            rows = s.batch([*((n, n, "a", n) for n in range(messages)), (messages, messages, "b", 99)])
            found = [row[-1] for row in rows if row[4] == "a"]
            assert found == [[*range(max(0, last - size), last + 1)] for last in range(messages)]


def test_many_late_messages_take_no_more_memory_than_their_windows():
    """Each is an update to every window behind it: their pairs are as many as the square of the messages."""
    count = 4_000
    s = shard(size=100_000, retention=1_000_000, policies=policies(late="each"))
    s.batch([(0, 200_000, "a", 1)])
    rows = [(number, number * 2, "a", 1) for number in range(1, count + 1)]
    tracemalloc.start()
    found = s.batch(rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [row[-1] for row in found] == [*range(1, count + 1)]
    assert peak < 100_000_000, f"{peak:,} bytes; {count**2 // 2:,} pairs"


def test_early_by_number_counts_all_messages_that_a_window_sees():
    for number, early in ((3, [("early", 0, 0, 10, "a", 31)]), (4, [])):
        s = shard(size=10, policies=policies(early=every(number)))
        assert s.batch([(0, 0, "a", 1), (1, 5, "a", 2)]) == [("full", 0, -10, 0, "a", 1)]
        # of [0, 10] three came now, at two times
        full = [("full", 0, -5, 5, "a", 3), ("full", 0, -1, 9, "a", 7)]
        assert s.batch([(2, 9, "a", 4), (3, 10, "a", 8), (4, 10, "a", 16)]) == [*full, *early]


@pytest.mark.parametrize(
    ("aggregate", "late"),
    [(sum_("value"), [(103, 1_010), (110, 1_021)]), (median("value"), [(103, 505), (110, 11)])],
    ids=["incremental", "full"],
)
def test_a_message_that_is_late_by_far_reads_what_is_near_it(aggregate, late):
    """Not all that came since: with a long retention that is more than a worker has memory for."""
    s = shard({"v": aggregate}, retention=10**6, policies=policies(late="each"))
    s.store = CountingStore()
    s.batch([(at, 10 * at, "a", at) for at in range(500)])
    s.store.read.clear()
    found = s.batch([(500, 103, "a", 1_000), (501, 4_999, "b", 7)])
    assert len([key for key in s.store.read if key[0] in (Region.AGGREGATES, Region.MESSAGES)]) < 20
    assert [(end, value) for reason, _, _, end, _, value in found if reason == "late"] == late
