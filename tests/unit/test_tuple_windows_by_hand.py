"""Windows by number of messages: what is sent when, by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest

from backend.aggregates import collect_list, count, max_, sum_
from backend.errors import StateCorrupted
from backend.keys import encode
from backend.store.protocol import Changes, Region
from backend.windows.by_number.rows import COUNTERS, SENT
from backend.windows.definitions import hopping, session, sliding, tumbling
from backend.windows.policies import policies
from backend.windows.spec import WindowSpec, window_spec
from tests.model.tuple_checks import check_messages, check_replay
from tests.unit.one_shard import SCHEMA, OneShard

MINUTE = 60_000


def shard(window, aggregates=None, **options):
    options = {"keys": ["key"], "max_ahead": None, **options}
    return OneShard(window_spec(window, SCHEMA, aggregates or {"sum": sum_("value")}, **options))


def rows(s):
    """Give the last results; there is one source partition."""
    results = s.outcome.results
    assert {*results["start_partition"].to_pylist(), *results["last_partition"].to_pylist()} <= {0}
    return [tuple(row.values()) for row in results.drop_columns(["start_partition", "last_partition"]).to_pylist()]


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


@pytest.mark.parametrize("window", [tumbling(messages=5), hopping(messages=5, every=4)])
def test_what_is_due_writes_the_revisions_of_what_waits_and_of_no_other_window(window):
    s = shard(window, policies=policies(early=10))
    s.batch([(at, 0, f"k{at}", 1) for at in range(300)], 0)
    s.batch([], 10)
    assert len(rows(s)) == 300
    s.batch([(300, 0, "k7", 1), (301, 0, "k8", 1)], 11)
    assert s.written(Region.REVISIONS) == 2
    s.batch([(302, 0, "k9", 1)], 20)
    assert s.written(Region.REVISIONS) == 1, "the other two wait as they did"
    # the rows of `k5` wait for nothing, and are asked for when its window fills
    s.batch([(303, 0, "k8", 1), *((304 + at, 0, "k5", 1) for at in range(4))], 21)
    found = [(row[0], row[1], row[6], row[7]) for row in rows(s)]
    assert sorted(found) == [("early", 1, "k7", 2), ("early", 1, "k8", 3), ("full", 1, "k5", 5)]
    left = 1 if window.kind == "hopping" else 0  # the last message of `k5` begins a window
    assert s.written(Region.REVISIONS) == 3 + left
    s.batch([], 30, drain=True)
    assert {(row[0], row[1]) for row in rows(s) if row[6] in {"k7", "k8", "k9"}} >= {("drain", 2)}


def test_full_off_sends_nothing_when_a_window_fills():
    s = shard(tumbling(messages=1), policies=policies(full=False))
    s.batch([(0, 0, "a", 1)])
    assert rows(s) == []


@pytest.mark.parametrize("aggregates", [{}, {"n": count()}])
def test_a_null_key_is_a_key_and_no_aggregate_is_fine(aggregates):
    s = shard(tumbling(messages=2), aggregates or None)
    s.batch([(0, 0, None, 1), (1, 0, "", 1), (2, 0, None, 1)])
    assert [row[4:7] for row in rows(s)] == [(0, 2, None)]


# -- retention: a group key that went silent falls out ---------------------------------------------------------------


@pytest.mark.parametrize("cuts", [[], [1], [2, 3], [1, 2, 3, 4, 5]])
def test_a_key_falls_out_when_so_many_messages_came_without_it(cuts):
    s = shard(tumbling(messages=3), {"all": collect_list("value")}, retention_messages=2)
    fed = [
        (0, 0, "a", 1),
        (1, 0, "b", 2),
        (2, 0, "b", 3),
        (3, 0, "a", 4),
        (4, 0, "c", 5),
        (5, 0, "c", 6),
        (6, 0, "d", 7),
    ]
    found = []
    for low, high in pairwise([0, *cuts, len(fed)]):
        s.batch(fed[low:high])
        found += rows(s)
    # two came without "a" after the first and after the second one, and without "b": each goes, as it is
    assert sorted(found) == [
        ("early", 0, None, None, 0, 0, "a", [1]),
        ("early", 0, None, None, 1, 2, "b", [2, 3]),
        ("early", 0, None, None, 3, 3, "a", [4]),
    ]
    assert s.errors() == []
    assert not [key for key in s.visible() if encode("a") in key]
    s.batch([(7, 0, "c", 8), (8, 0, "a", 9), (9, 0, "a", 10), (10, 0, "a", 11)])
    assert [(row[0], *row[4:]) for row in rows(s)] == [
        ("full", 4, 7, "c", [5, 6, 8]),
        ("full", 8, 10, "a", [9, 10, 11]),
        ("early", 6, 6, "d", [7]),
    ]


@pytest.mark.parametrize("cuts", [[], [1], [2], [1, 2, 3]])
def test_a_key_falls_out_by_time_and_a_message_that_would_open_a_window_that_is_gone_is_refused(cuts):
    s = shard(hopping(messages=4, every=2), {"all": collect_list("value")}, retention="1 s")
    fed = [(0, 0, "a", 1), (1, 999, "b", 2), (2, 500, "a", 3), (3, 1_500, "b", 4), (4, 400, "a", 5)]
    errors, found = [], []
    for low, high in pairwise([0, *cuts, len(fed)]):
        s.batch(fed[low:high])
        found += rows(s)
        errors += s.errors()
    assert found == [("early", 0, None, None, 0, 2, "a", [1, 3])]
    # 500 is the newest of "a": at 1 500 it is gone, and one of 400 comes too late for a window of its own
    assert errors == [(0, 4, "out_of_retention")]
    assert not [key for key in s.visible() if encode("a") in key]
    s.batch([(5, 501, "a", 6)])
    assert s.errors() == []
    assert s.outcome.message_count == 3


def test_what_waits_is_sent_before_the_key_falls_out():
    s = shard(tumbling(messages=3), retention="1 s", policies=policies(early="10 s"))
    s.batch([(0, 0, "a", 1)], 0)
    s.batch([(1, 0, "a", 2)], 10_000)
    assert rows(s) == [("early", 0, None, None, 0, 1, "a", 3)]
    s.batch([(2, 1, "b", 4)], 11_000)
    s.batch([(3, 1, "a", 5), (4, 1, "a", 8)], 12_000)
    assert rows(s) == [("full", 1, None, None, 0, 3, "a", 8)]
    s.batch([(5, 2_000, "c", 0)], 13_000)
    assert rows(s) == [("early", 0, None, None, 4, 4, "a", 8), ("early", 0, None, None, 2, 2, "b", 4)]
    assert s.outcome.metrics["expired"] == 2
    s.batch([], 14_000, drain=True)
    assert rows(s) == [("drain", 0, None, None, 5, 5, "c", 0)]


def test_without_a_retention_nothing_stays_of_a_full_window_wherever_it_is_cut():
    fed = [(0, 10, "a", 1), (1, 10, "a", 2), (2, 5, "a", 3)]
    whole, parts = shard(tumbling(messages=2)), shard(tumbling(messages=2))
    whole.batch(fed)
    parts.batch(fed[:2])
    parts.batch(fed[2:])
    assert whole.visible() == parts.visible()


@pytest.mark.parametrize("window", [tumbling(messages=3), hopping(messages=4, every=3), sliding(messages=3)])
@pytest.mark.parametrize("retention", [{"retention": "1 s"}, {"retention_messages": 5}])
def test_state_is_bounded_when_each_key_comes_but_once(window, retention):
    s = shard(window, {"n": count(), "all": collect_list("value")}, policies=policies(early="1 hour"), **retention)
    sizes = []
    for at in range(20):
        s.batch([(at, at * 250, f"k{at}", at)], at)
        sizes.append(len(s.visible()))
    assert len(set(sizes[10:])) == 1
    assert s.outcome.message_count <= 6


def test_a_key_with_messages_of_two_partitions_leaves_nothing_behind_either():
    s = shard(tumbling(messages=5), {"all": collect_list("value")}, retention="1 s", idle_after=None)
    s.batch([(0, 0, "a", 1)], more={1: [(0, 500, "a", 2)]})
    s.batch([(1, 1_400, "b", 3)], more={1: [(1, 1_400, "b", 4)]})
    assert s.outcome.message_count == 4
    s.batch([(2, 1_500, "b", 5)], more={1: [(2, 1_500, "b", 6)]})
    assert s.outcome.message_count == 4
    assert not [key for key in s.visible() if encode("a") in key]


def test_a_retention_given_later_holds_for_keys_that_were_there_before():
    s = shard(tumbling(messages=3))
    s.batch([(0, 0, "a", 1), (1, 0, "b", 2)])
    later = shard(tumbling(messages=3), retention="1 s", retention_messages=100)
    later.store, later.bounds, later.positions, later.version = s.store, s.bounds, s.positions, s.version
    later.batch([(2, 5_000, "c", 3)])
    assert not [key for key in later.visible() if encode("a") in key or encode("b") in key]
    s.store, s.bounds, s.positions, s.version = later.store, later.bounds, later.positions, later.version
    s.batch([(3, 9_000, "d", 4), (4, 9_000, "c", 5), (5, 9_000, "c", 6)])
    assert [row[4:] for row in rows(s)] == [(2, 5, "c", 14)]
    assert len([key for key in s.visible() if encode("d") in key]) == 2  # a pane and a counter: no index is left


def test_a_retention_that_is_taken_away_leaves_nothing_of_keys_of_which_nothing_is_open():
    def windows(retention: int | None) -> WindowSpec:
        return window_spec(
            tumbling(messages=1), SCHEMA, {"n": count()}, keys=["key"], max_ahead=None, retention=retention
        )

    shard = OneShard(windows(100))
    shard.batch([(0, 1000, "a", 1), (1, 1000, "b", 1)])
    shard.restart(windows(None))
    shard.batch([])
    assert not [key for key in shard.visible() if key.startswith(COUNTERS)]
    shard.batch([(2, 1050, "b", 1)])
    shard.restart(windows(100))
    assert shard.batch([(3, 500, "a", 1)]) == [], "nothing is known of its message at 1000"
    assert shard.errors() == [(0, 3, "out_of_retention")]


def test_a_restore_brings_only_the_run_that_is_there():
    s = shard(tumbling(messages=4), {"all": collect_list("value")}, retention="1 s")
    fed = [(0, 0, "a", 1), (1, 0, "z", 2), (2, 1_000, "z", 3), (3, 0, "a", 4), (4, 1_000, "a", 5), (5, 1_001, "a", 6)]
    s.batch(fed)
    assert s.errors() == [(0, 3, "out_of_retention")]
    check_messages(s)
    check_replay(s, [{0: fed}])


@pytest.mark.parametrize("aggregate", [sum_("value"), collect_list("value")], ids=["incremental", "full state"])
def test_a_tuple_session_that_grew_since_it_was_sent_withdraws_its_row(aggregate):
    s = shard(session(messages=2), {"all": aggregate}, policies=policies(early="each"))
    one = list if aggregate.kind == "collect_list" else sum
    s.batch([(0, 1, "a", 1)])
    assert rows(s) == [("early", 0, None, None, 0, 0, "a", one([1]))]
    s.batch([(1, 1, "a", 2), (2, 1, "b", 4)])
    assert rows(s) == [
        ("retracted", 0, None, None, 0, 0, "a", one([1])),
        ("early", 0, None, None, 0, 1, "a", one([1, 2])),
        ("early", 0, None, None, 2, 2, "b", one([4])),
    ]
    s.batch([], drain=True)  # nothing grew: the next revisions
    assert rows(s) == [
        ("drain", 1, None, None, 0, 1, "a", one([1, 2])),
        ("drain", 1, None, None, 2, 2, "b", one([4])),
    ]
    s.batch([(3, 1, "b", 8)])
    assert rows(s) == [
        ("full", 2, None, None, 0, 1, "a", one([1, 2])),
        ("retracted", 1, None, None, 2, 2, "b", one([4])),
        ("early", 0, None, None, 2, 3, "b", one([4, 8])),
    ]
    s.batch([(4, 1, "c", 1), (5, 1, "c", 1)])
    assert rows(s)[0] == ("full", 1, None, None, 2, 3, "b", one([4, 8]))
    s.batch([(6, 1, "d", 1), (7, 1, "d", 1), (8, 1, "e", 1), (9, 1, "e", 1)])
    for head in (bytes([Region.REVISIONS]), SENT):
        kept = [key for key in s.visible() if key.startswith(head)]
        assert len(kept) == 1, "what was sent of sessions that ended is forgotten: e's is open"
    s.store.write(Changes(gone := [key for key in s.visible() if key.startswith(SENT)], [None] * len(gone)))
    with pytest.raises(StateCorrupted, match="the row that was sent of a session is missing"):
        s.batch([(10, 1, "e", 1)])


def test_tuple_sessions_count_the_messages_of_their_topic_alone():
    s = shard(session(messages=2), {"all": collect_list("value")})
    s.batch([(0, 0, "a", 1)], more={(1, 0): [(0, 0, "a", 10), (1, 0, "b", 20), (2, 0, "b", 30)]})
    assert rows(s) == [("full", 0, None, None, 0, 0, "a", [10])], "two messages of topic 1 came without it"
    s.batch([(1, 0, "b", 2)], more={(1, 0): [(3, 0, "b", 40)]})
    assert rows(s) == []
    s.batch([(2, 0, "b", 3)])
    assert rows(s) == [("full", 0, None, None, 0, 0, "a", [1])]
    s.batch([], drain=True)
    assert rows(s) == [
        ("drain", 0, None, None, 1, 2, "b", [2, 3]),
        ("drain", 0, None, None, 1, 3, "b", [20, 30, 40]),
    ]


def test_a_tuple_session_falls_out_by_time_before_it_ends():
    s = shard(session(messages=3), {"all": collect_list("value")}, retention="1 s")
    s.batch(
        [(0, 0, "a", 1), (1, 999, "b", 2), (2, 0, "a", 3), (3, 1_000, "b", 4), (4, 1_000, "b", 5), (5, 1_000, "b", 6)]
    )
    # "a" went with offset 3, before the third message without it came
    assert rows(s) == [("early", 0, None, None, 0, 2, "a", [1, 3])]
    assert s.outcome.metrics["expired"] == 1
    s.batch([(6, 1_000, "c", 7), (7, 1_000, "c", 8), (8, 0, "a", 9), (9, 1_000, "c", 9)])
    assert rows(s) == [("full", 0, None, None, 1, 5, "b", [2, 4, 5, 6])]  # the refused one counts as one without it
    assert s.errors() == [(0, 8, "out_of_retention")]


@pytest.mark.parametrize(
    ("window", "option"),
    [(session(messages=3), {"retention_messages": 3}), (tumbling(messages=3), {"retention": "0 s"})],
)
def test_retentions_that_make_no_sense_are_refused(window, option):
    with pytest.raises(ValueError, match=next(iter(option))):
        shard(window, **option)
