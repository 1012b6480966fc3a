"""Early emission by number of messages, by hand: what every kind of window sends, and when."""

from __future__ import annotations

import pytest

from backend import every
from backend.aggregates import sum_
from backend.windows import revisions
from backend.windows.definitions import hopping, session, sliding, tumbling
from backend.windows.merging.rows import EARLY_WAITS
from backend.windows.policies import Policies, policies
from backend.windows.spec import window_spec
from tests.unit.one_shard import SCHEMA, OneShard

KINDS = {
    "tumbling": tumbling(100),
    "hopping": hopping(100, 100),
    "session": session(100),
    "tumbling by number": tumbling(messages=50),
    "hopping by number": hopping(messages=50, every=50),
    "session by number": session(messages=50),
}


def spec(window, early, **more):
    retention = 1_000 if window.by_time else None
    chosen = policies(early=early, **more)
    return window_spec(
        window, SCHEMA, {"sum": sum_("value")}, keys=["key"], retention=retention, max_ahead=None, policies=chosen
    )


def sent(rows):
    """Give reason, revision, key and sum, without what was withdrawn."""
    return [(row[0], row[1], row[-2], row[-1]) for row in rows if row[0] != "retracted"]


def revision(kind, number):
    """Give a row's revision: a session by number that has grown is another one."""
    return 0 if kind == "session by number" else number


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_is_sent_when_so_many_messages_came_since_its_last_row(kind):
    s = OneShard(spec(KINDS[kind], every(3)))
    assert s.batch([(0, 1, "a", 1), (1, 1, "a", 2), (2, 1, "b", 10)]) == []
    assert s.outcome.next_due_ms is None
    assert sent(s.batch([(3, 1, "a", 4)])) == [("early", 0, "a", 7)]
    assert s.batch([(4, 1, "a", 8), (5, 1, "b", 20)]) == []
    # four of `a` and three of `b`: one row each, whatever came in one micro-batch
    rows = s.batch([(6, 1, "a", 16), (7, 1, "b", 40), (8, 1, "a", 32), (9, 1, "a", 64)])
    assert sorted(sent(rows)) == sorted([("early", 0, "b", 70), ("early", revision(kind, 1), "a", 127)])
    assert s.batch([]) == []


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_first_sends_it_the_number_or_the_time(kind):
    s = OneShard(spec(KINDS[kind], every(3, or_after="5 s")))
    assert s.batch([(0, 1, "a", 1)], 1_000) == []
    assert s.outcome.next_due_ms == 6_000
    assert sent(s.batch([(1, 1, "a", 2), (2, 1, "a", 4)], 2_000)) == [("early", 0, "a", 7)]
    assert s.batch([(3, 1, "a", 8)], 3_000) == []
    assert s.batch([], 7_999) == []
    assert sent(s.batch([], 8_000)) == [("early", revision(kind, 1), "a", 15)]
    # the time's row was one, too: two more are two
    assert s.batch([(4, 1, "a", 16), (5, 1, "a", 32)], 9_000) == []
    assert sent(s.batch([(6, 1, "a", 64)], 9_000)) == [("early", revision(kind, 2), "a", 127)]


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_messages_send_what_waits_for_more(kind):
    s = OneShard(spec(KINDS[kind], every(10)))
    assert s.batch([(0, 1, "a", 1), (1, 1, "a", 2), (2, 1, "b", 4)]) == []
    s.restart(spec(KINDS[kind], every(2)))
    assert sent(s.batch([])) == [("early", 0, "a", 3)]
    s.restart(spec(KINDS[kind], None))
    assert sent(s.batch([])) == [("early", 0, "b", 4)]


def test_sliding_windows_count_what_their_micro_batch_brought():
    s = OneShard(spec(sliding(10), every(2)))
    assert s.batch([(0, 100, "a", 1)]) == []
    assert sent(s.batch([(1, 100, "a", 2)])) == [("early", 0, "a", 3)]
    # the window to 105 begins with this message, the one to 100 is full
    assert sent(s.batch([(2, 105, "a", 4)])) == [("full", 1, "a", 3)]
    assert sent(s.batch([(3, 105, "a", 8)])) == [("early", 0, "a", 15)]


def test_sessions_that_merge_add_what_they_count():
    s = OneShard(spec(session(10), every(4)))
    assert s.batch([(0, 100, "a", 1), (1, 100, "a", 2), (2, 89, "a", 4)]) == []
    assert sent(s.batch([(3, 95, "a", 8)])) == [("early", 0, "a", 15)]


def test_what_a_full_window_sent_is_not_counted_for_the_next():
    s = OneShard(spec(tumbling(messages=3), every(2)))
    assert sent(s.batch([(0, 1, "a", 1), (1, 1, "a", 2)])) == [("early", 0, "a", 3)]
    assert sent(s.batch([(2, 1, "a", 4), (3, 1, "a", 8)])) == [("full", 1, "a", 7)]
    assert sent(s.batch([(4, 1, "a", 16)])) == [("early", 0, "a", 24)]


@pytest.mark.parametrize("number", [0, -1, 2**31, True, 2.0, "3", None])
def test_a_number_that_is_none_is_named(number):
    with pytest.raises(ValueError, match=r"every: messages=.*whole number from 1 to 2147483647"):
        every(number)


def test_options_are_checked_and_written_down():
    assert policies(early=every(5, or_after="2 s"), full=False) == Policies(2_000, False, 10_000, 5)
    assert policies(early=every(5)).describe() == {
        "early_ms": None, "full": True, "late_ms": 10_000, "early_messages": 5,
    }  # fmt: skip
    with pytest.raises(ValueError, match="every: or_after='soon'"):
        every(5, or_after="soon")
    with pytest.raises(ValueError, match="late="):
        policies(late=every(5))


def test_a_shard_on_which_nothing_waits_any_more_is_not_due_again():
    shard = OneShard(spec(tumbling(messages=2), "1 minute"))
    shard.batch([(0, 1, "a", 1)], 0)
    assert shard.outcome.next_due_ms == 60_000
    shard.batch([(1, 1, "a", 2)], 1_000)  # it is full: the time may be early
    shard.batch([], 60_000)
    assert shard.outcome.next_due_ms is None
    shard = OneShard(spec(sliding(messages=2), every(2)))
    shard.batch([(0, 1, "a", 1)], 0)
    shard.restart(spec(sliding(messages=2), None))
    shard.batch([], 10)
    assert shard.outcome.next_due_ms is None


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.endswith("by number")])
def test_what_is_due_is_read_without_what_was_sent_before(kind, monkeypatch):
    s = OneShard(spec(KINDS[kind], "5 s"))
    s.batch([(0, 1, "a", 1), (1, 1, "b", 2), (2, 1, "c", 4)], 1_000)
    assert sorted(sent(s.batch([], 6_000))) == [("early", 0, "a", 1), ("early", 0, "b", 2), ("early", 0, "c", 4)]
    s.batch([(3, 1, "b", 8)], 7_000)
    s.batch([(4, 1, "c", 16)], 9_000)
    assert s.outcome.next_due_ms == 12_000
    read = []
    real = revisions.get

    def get(state, starts, keys):
        read.append(len(starts))
        return real(state, starts, keys)

    monkeypatch.setattr(revisions, "get", get)
    for name in ("scan", "pending"):
        monkeypatch.delattr(revisions, name)
    assert sent(s.batch([], 12_000)) == [("early", revision(kind, 1), "b", 10)]
    assert sum(read) == 1, "the row of b alone: of two that wait, and three that were sent"
    assert s.outcome.next_due_ms == 14_000
    assert sent(s.batch([], 14_000)) == [("early", revision(kind, 1), "c", 20)]
    assert s.outcome.next_due_ms is None
    waiting = [key for key in s.visible() if key.startswith(EARLY_WAITS)]
    assert waiting == []
