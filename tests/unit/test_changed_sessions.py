"""Sessions whose options change between two starts: what is gone is what the commit says; what waits is sent."""

from __future__ import annotations

import pytest

from backend.aggregates import collect_list, count
from backend.windows.definitions import session
from backend.windows.policies import Policies
from backend.windows.spec import WindowSpec, window_spec
from tests.unit.one_shard import SCHEMA, OneShard

FULL = Policies(None, True, 10_000)


def spec(retention: int, policies: Policies = FULL) -> WindowSpec:
    return window_spec(
        session(5), SCHEMA, {"n": count()}, keys=["key"], retention=retention, policies=policies, idle_after=None
    )


def test_a_longer_retention_takes_nothing_below_the_bound_back():
    shard = OneShard(spec(10))
    # b at 100 leaves sessions whose last time is at least 100 - 10 - 1 - 2 * 5 + 1 = 80
    shard.batch([(0, 0, "a", 1), (1, 78, "a", 1), (2, 100, "b", 1)])
    shard.restart(spec(1_000))
    # 20 lies among what is gone; 82 and 84 could bridge to a session that ended before 80; 85 could not
    assert shard.batch([(3, 20, "a", 1), (4, 82, "a", 1), (5, 84, "a", 1)], 1) == []
    assert shard.errors() == [(0, offset, "out_of_retention") for offset in (3, 4, 5)]
    shard.batch([(6, 85, "a", 1)], 2)
    assert shard.errors() == []
    assert shard.batch(time_ms=10_002) == [("late", 0, 85, 85, "a", 1)]


def test_a_longer_retention_holds_for_what_is_not_gone():
    shard = OneShard(spec(10))
    shard.batch([(0, 100, "b", 1)])
    shard.restart(spec(1_000))
    shard.batch([(1, 400, "b", 1)])  # with the old retention the bound would be 380 now
    shard.batch([(2, 90, "a", 1)])
    assert shard.errors() == []
    assert shard.batch(time_ms=10_000) == [("late", 0, 90, 90, "a", 1)]


@pytest.mark.parametrize("moved", [20, 21])
def test_a_shorter_retention_sends_what_waits_before_the_session_goes(moved):
    shard = OneShard(spec(100))
    assert shard.batch([(0, 0, "a", 1), (1, 20, "b", 1)]) == [("full", 0, 0, 0, "a", 1)]
    assert shard.batch([(2, 3, "a", 1)], 1) == []
    shard.restart(spec(0))
    # the bound goes to 20 - 11 + 1 = 10, whether or not the clock moves
    assert shard.batch([(3, moved, "b", 1)], 2) == [("retracted", 0, 0, 0, "a", 1), ("late", 0, 0, 3, "a", 2)]
    assert shard.batch(time_ms=60_000) == []
    assert shard.batch([(4, 3, "a", 1)], 60_001, drain=True) == [("drain", 0, 20, moved, "b", 2)]
    assert shard.errors() == [(0, 4, "out_of_retention")]


def test_what_waited_when_a_policy_was_turned_off_is_sent_by_the_next_micro_batch():
    shard = OneShard(spec(10))
    shard.batch([(0, 0, "a", 1), (1, 10, "b", 1)])
    shard.batch([(2, 1, "a", 1)], 1)
    shard.restart(spec(10, Policies(None, True, None)))
    assert shard.batch(time_ms=2) == [("retracted", 0, 0, 0, "a", 1), ("late", 0, 0, 1, "a", 2)]
    assert shard.batch([(3, 2, "a", 1)], 3) == []
    assert shard.batch([(4, 100, "b", 1)], 60_001) == [("full", 0, 10, 10, "b", 1)]


def test_a_policy_that_is_made_shorter_finds_what_waits():
    shard = OneShard(spec(1_000, Policies(40_000, True, None)))
    shard.batch([(0, 0, "a", 1)], 0)
    shard.restart(spec(1_000, Policies(10_000, True, None)))
    assert shard.batch(time_ms=9_999) == []
    assert shard.outcome is not None and shard.outcome.next_due_ms == 10_000
    assert shard.batch(time_ms=10_000) == [("early", 0, 0, 0, "a", 1)]


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_an_early_update_is_sent_when_its_session_ends_without_full_results(cut):
    shard = OneShard(spec(100, Policies(10_000, False, None)))
    messages = [(0, 0, "a", 1), (1, 3, "a", 1), (2, 9, "a", 1)]
    rows = shard.batch(messages[:cut], 0) + shard.batch(messages[cut:], 1)
    assert rows == [("early", 0, 0, 3, "a", 2)]


def test_an_early_update_is_sent_when_its_session_ends_among_several_source_partitions():
    shard = OneShard(spec(100, Policies(10_000, False, None)))
    shard.batch([(0, 0, "a", 1)], 0, more={1: [(0, 0, "b", 1)]})
    shard.batch([(1, 9, "b", 1)], 1)
    assert shard.batch([], 2, more={1: [(1, 9, "c", 1)]}) == [("early", 0, 0, 0, "a", 1), ("early", 0, 0, 0, "b", 1)]


def test_what_was_refused_under_a_shorter_retention_is_left_out_of_a_replay_under_a_longer_one():
    wanted = {"all": collect_list("value")}
    specs = [
        window_spec(session(5), SCHEMA, wanted, keys=["key"], retention=retention, idle_after=None)
        for retention in (0, 1_000)
    ]
    shard = OneShard(specs[0])
    shard.batch([(0, 90, "a", 1), (1, 95, "a", 1), (2, 100, "a", 1)])
    shard.batch([(3, 94, "a", 2)])  # a session of it alone ended at 100; the session that is there covers it
    assert shard.errors() == [(0, 3, "out_of_retention")]
    shard.restart(specs[1])
    shard.batch([(4, 95, "a", 3)])
    assert shard.errors() == []
    assert shard.outcome is not None
    assert list(shard.outcome.rejected) == [(0, 0, 3)]
    assert shard.outcome.replay_from == {(0, 0): 0}
