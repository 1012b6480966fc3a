"""Windows by number of messages: what is sent when, by hand."""

from __future__ import annotations

import pytest

from backend.aggregates import collect_list, count, max_, sum_
from backend.keys import encode
from backend.operators.spec import window_spec
from backend.policies import policies
from backend.windows import hopping, sliding, tumbling
from tests.unit.one_shard import SCHEMA, OneShard

MINUTE = 60_000


def shard(window, aggregates=None, **options):
    options = {"keys": ["key"], "max_ahead": None, **options}
    return OneShard(window_spec(window, SCHEMA, aggregates or {"sum": sum_("value")}, **options))


def rows(s):
    return [tuple(row.values()) for row in s.outcome.results.to_pylist()]


def test_the_seed_s_orders_max_over_three_with_updates_each_minute():
    s = shard(tumbling(messages=3), {"max": max_("value")}, keys=[], policies=policies(early="1 minute"))
    assert s.batch([(1, -50_000, None, 0)], 0) == []
    assert s.outcome.next_due_ms == MINUTE
    s.batch([(2, 1_000, None, 5)], 59_000)
    assert rows(s) == []
    s.batch([], 60_000)
    assert rows(s) == [("early", 0, None, None, 1, 2, 5)]
    s.batch([(3, -30_000, None, 9)], 121_000)
    # the window of three is full with its third message, so no update by the minute is needed
    assert rows(s) == [("full", 1, None, None, 1, 3, 9)]
    assert s.outcome.next_due_ms is None


def test_a_window_is_full_with_its_last_message_and_leaves_nothing_behind():
    s = shard(tumbling(messages=2))
    s.batch([(10, 5, "a", 1), (11, 5, "b", 2)])
    assert rows(s) == []
    s.batch([(12, 5, "a", 3), (13, 5, "b", None), (14, 1, "b", 7)])
    assert rows(s) == [("full", 0, None, None, 10, 12, "a", 4), ("full", 0, None, None, 11, 13, "b", 2)]
    left = [key for key in s.visible() if encode("a") in key]
    assert left == []  # the group key "a" has no open window, so not even a counter
    assert any(encode("b") in key for key in s.visible())


def test_hopping_by_messages_overlaps():
    s = shard(hopping(messages=3, every=2), {"all": collect_list("value"), "n": count()}, keys=[])
    s.batch([(at, 0, None, at) for at in range(6)])
    assert [row[4:] for row in rows(s)] == [(0, 2, [0, 1, 2], 3), (2, 4, [2, 3, 4], 3)]
    s.batch([(6, 0, None, 6)])
    assert [row[4:] for row in rows(s)] == [(4, 6, [4, 5, 6], 3)]


def test_sliding_by_messages_ends_at_every_message():
    s = shard(sliding(messages=2))
    s.batch([(0, 0, "a", 1), (1, 0, "b", 10), (2, 0, "a", 2), (3, 0, "a", 4)])
    assert [row[4:] for row in rows(s)] == [(0, 0, "a", 1), (1, 1, "b", 10), (0, 2, "a", 3), (2, 3, "a", 6)]
    s.batch([], drain=True)
    assert rows(s) == []


def test_drain_shows_open_windows_and_keeps_them_open():
    s = shard(tumbling(messages=3), {"all": collect_list("value")})
    s.batch([(0, 0, "a", 1), (1, 0, "b", 2)], drain=True)
    assert rows(s) == [("drain", 0, None, None, 0, 0, "a", [1]), ("drain", 0, None, None, 1, 1, "b", [2])]
    s.batch([(2, 0, "a", 3), (3, 0, "a", 5)])
    assert rows(s) == [("full", 1, None, None, 0, 3, "a", [1, 3, 5])]


def test_early_waits_its_time_for_a_key_that_stays_silent():
    s = shard(tumbling(messages=5), policies=policies(early="10 s"))
    s.batch([(0, 0, "a", 1)], 1_000)
    s.batch([(1, 0, "b", 2)], 5_000)
    assert rows(s) == []
    assert s.outcome.next_due_ms == 11_000
    s.batch([(2, 0, "b", 2)], 11_000)
    assert rows(s) == [("early", 0, None, None, 0, 0, "a", 1)]
    assert s.outcome.next_due_ms == 15_000
    s.batch([], 15_000)
    assert rows(s) == [("early", 0, None, None, 1, 2, "b", 4)]
    s.batch([], 99_000)
    assert rows(s) == []


def test_full_off_sends_nothing_when_a_window_fills():
    s = shard(tumbling(messages=1), policies=policies(full=False))
    s.batch([(0, 0, "a", 1)])
    assert rows(s) == []


@pytest.mark.parametrize("aggregates", [{}, {"n": count()}])
def test_a_null_key_is_a_key_and_no_aggregate_is_fine(aggregates):
    s = shard(tumbling(messages=2), aggregates or None)
    s.batch([(0, 0, None, 1), (1, 0, "", 1), (2, 0, None, 1)])
    assert [row[4:7] for row in rows(s)] == [(0, 2, None)]
