"""Options changed between two starts, and what waits for what: cases small enough to count on fingers."""

from __future__ import annotations

from typing import Any

import pytest

from backend.aggregates import collect_list, count
from backend.windows.definitions import Window, hopping, sliding, tumbling
from backend.windows.operator import WindowOperator
from backend.windows.policies import Policies, policies
from backend.windows.spec import WindowSpec, window_spec
from recovery.testing import OperatorTester
from tests.unit.one_shard import SCHEMA, OneShard

KINDS = pytest.mark.parametrize("window", [tumbling(10), hopping(10, 5), sliding(10)], ids=lambda window: window.kind)
EACH = policies(late="each")


def spec(window: Window, retention: int, policies: Policies = EACH, messages: int | None = None) -> WindowSpec:
    return window_spec(
        window,
        SCHEMA,
        {"n": count(), "all": collect_list("value")},
        keys=["key"],
        retention=retention,
        retention_messages=messages,
        policies=policies,
    )


def change(shard: OneShard, *options: Any, **more: Any) -> None:
    """Start the job again with other options."""
    shard.operator = WindowOperator(spec(shard.operator.spec.window, *options, **more))


def rows(*places: tuple[int, int, str, int]) -> list[dict[str, Any]]:
    return [{"_time": time, "key": key, "value": value} for _, time, key, value in places]


# -- retention -----------------------------------------------------------------------------------------------------


@KINDS
def test_a_message_refused_by_a_shorter_retention_does_not_come_back_with_a_restore(window, tmp_path):
    tester = OperatorTester(WindowOperator(spec(window, 100)), SCHEMA, tmp_path)
    tester.batch(rows((0, 5, "a", 1), (1, 50, "a", 2)))
    tester.change(WindowOperator(spec(window, 10)))
    refused = tester.batch(rows((2, 7, "a", 3)))  # the last window that could show it is over at 18, gone at 28
    assert [(row["offset"], row["reason"]) for row in refused.errors.to_pylist()] == [(2, "out_of_retention")]
    tester.lose_disk()
    assert tester.restore().messages == 1  # that of 50
    assert tester.batch(rows((3, 50, "a", 4))).errors.num_rows == 0


def test_what_waits_when_the_retention_becomes_shorter_is_sent():
    shard = OneShard(spec(tumbling(10), 100, policies(late="10 s")))
    assert shard.batch([(0, 5, "a", 1), (1, 50, "a", 2)]) == [("full", 0, 0, 10, "a", 1, [1])]
    assert shard.batch([(2, 7, "a", 3)], 1_000) == []  # waits until 11,000
    change(shard, 10, policies(late="10 s"))
    # [0, 10) is gone since 20; the stream is at 50
    assert shard.batch([(3, 50, "a", 4)], 2_000) == [("late", 1, 0, 10, "a", 2, [1, 3])]
    assert shard.batch([], 20_000) == []
    assert shard.batch([], 30_000, drain=True) == [("drain", 0, 50, 60, "a", 2, [2, 4])]


def test_a_micro_batch_without_anything_new_sends_what_a_shorter_retention_drops():
    shard = OneShard(spec(tumbling(10), 100, policies(late="10 s")))
    shard.batch([(0, 5, "a", 1), (1, 50, "a", 2)])
    shard.batch([(2, 7, "a", 3)], 1_000)
    change(shard, 10, policies(late="10 s"))
    assert shard.batch([], 2_000) == [("late", 1, 0, 10, "a", 2, [1, 3])]


def test_a_shorter_retention_with_a_clock_that_stands_sends_no_revision_twice():
    shard = OneShard(spec(tumbling(10), 100, policies(late="10 s")))
    shard.batch([(0, 5, "a", 1), (1, 50, "a", 2)])
    shard.batch([(2, 7, "a", 3)], 1_000)
    change(shard, 10, policies(late="10 s"))
    assert shard.batch([], 2_000, drain=True) == [("late", 1, 0, 10, "a", 2, [1, 3]), ("drain", 0, 50, 60, "a", 1, [2])]
    assert shard.batch([], 3_000, drain=True) == []  # no message came since the drain before
    assert shard.batch([(3, 51, "a", 4)], 4_000, drain=True) == [("drain", 1, 50, 60, "a", 2, [2, 4])]


@KINDS
def test_a_longer_retention_reopens_nothing(window):
    shard = OneShard(spec(window, 10))
    shard.batch([(0, 5, "a", 1), (1, 50, "a", 2)])  # what is over at 40 is gone
    change(shard, 1_000)
    assert shard.batch([(2, 7, "a", 3)]) == []
    assert shard.errors() == [(0, 2, "out_of_retention")]
    shard.batch([(3, 45, "a", 4)])
    assert shard.errors() == []


def test_a_smaller_number_of_retained_messages_sends_what_waits():
    shard = OneShard(spec(tumbling(10), 1_000, policies(late="10 s"), messages=10))
    shard.batch([(0, 5, "a", 1), (1, 50, "a", 2)])
    shard.batch([(2, 7, "a", 3)], 1_000)
    change(shard, 1_000, policies(late="10 s"), messages=1)
    # message 2 is one before the next: [0, 10) was closed when it came
    assert shard.batch([], 2_000) == [("late", 1, 0, 10, "a", 2, [1, 3])]
    shard.batch([(3, 8, "a", 4)], 3_000)
    assert shard.errors() == [(0, 3, "out_of_retention")]


def test_a_number_of_retained_messages_counts_from_when_it_is_turned_on():
    shard = OneShard(spec(tumbling(10), 1_000))
    shard.batch([(0, 5, "a", 1), (1, 50, "a", 2), (2, 51, "a", 3)])
    change(shard, 1_000, messages=2)
    shard.batch([(3, 7, "a", 4), (4, 8, "a", 5)])
    assert shard.errors() == []  # none and one had come
    shard.batch([(5, 9, "a", 6)])
    assert shard.errors() == [(0, 5, "out_of_retention")]  # closed two messages ago


# -- policies ------------------------------------------------------------------------------------------------------

EARLY_ONLY = policies(early="1 min", full=False, late="each")


@KINDS
@pytest.mark.parametrize("cut", [True, False])
def test_early_without_full_sends_what_waits_when_a_window_ends(window, cut):
    shard = OneShard(spec(window, 100, EARLY_ONLY))
    messages = [(0, 5, "a", 1), (1, 30, "a", 2)]
    sent = shard.batch(messages[:1]) + shard.batch(messages[1:]) if cut else shard.batch(messages)
    ends = {"tumbling": [(0, 10)], "hopping": [(0, 10), (5, 15)], "sliding": [(-5, 5)]}[window.kind]
    assert sent == [("early", 0, *end, "a", 1, [1]) for end in ends]
    assert shard.batch([(2, 5, "a", 3)]) == [("late", 1, *end, "a", 2, [1, 3]) for end in ends]


def test_early_without_full_sends_a_window_at_its_end_once():
    shard = OneShard(spec(tumbling(10), 100, EARLY_ONLY))
    shard.batch([(0, 5, "a", 1)])
    assert shard.batch([], 60_000) == [("early", 0, 0, 10, "a", 1, [1])]
    # nothing of "a" waits any more; of "b" it does, and 7 came after the end
    assert shard.batch([(1, 6, "b", 2), (2, 12, "a", 3), (3, 7, "b", 4)], 61_000) == [
        ("early", 0, 0, 10, "b", 1, [2]),
        ("late", 1, 0, 10, "b", 2, [2, 4]),
    ]


@KINDS
def test_full_results_turned_off_send_what_is_open(window):
    shard = OneShard(spec(window, 100))
    assert shard.batch([(0, 5, "a", 1)]) == []
    change(shard, 100, EARLY_ONLY)
    ends = {"tumbling": [(0, 10)], "hopping": [(0, 10), (5, 15)], "sliding": [(-5, 5)]}[window.kind]
    assert shard.batch([], 1_000) == [("early", 0, *end, "a", 1, [1]) for end in ends]
    assert shard.batch([(1, 40, "a", 2)], 2_000) == []  # they end, and nothing waits


def test_a_window_that_ends_as_full_results_are_turned_off_is_sent_and_counted():
    shard = OneShard(spec(tumbling(10), 100))
    shard.batch([(0, 5, "a", 1)])
    change(shard, 100, policies(full=False, late="each"))
    assert shard.batch([(1, 12, "a", 2)]) == [("early", 0, 0, 10, "a", 1, [1]), ("early", 0, 10, 20, "a", 1, [2])]
    assert shard.batch([(2, 7, "a", 3)]) == [("late", 1, 0, 10, "a", 2, [1, 3])]


def test_revisions_go_on_when_full_results_are_turned_off_or_on():
    shard = OneShard(spec(tumbling(10), 100))
    assert shard.batch([(0, 5, "a", 1), (1, 12, "a", 2)]) == [("full", 0, 0, 10, "a", 1, [1])]
    change(shard, 100, policies(full=False, late="each"))
    assert shard.batch([(2, 7, "a", 3)])[:1] == [("late", 1, 0, 10, "a", 2, [1, 3])]

    shard = OneShard(spec(tumbling(10), 100, policies(full=False, late="each")))
    assert shard.batch([(0, 5, "a", 1), (1, 12, "a", 2)]) == []
    change(shard, 100)
    assert shard.batch([(2, 7, "a", 3)]) == [("late", 0, 0, 10, "a", 2, [1, 3])]


def test_what_waits_for_a_policy_that_is_turned_off_is_sent():
    shard = OneShard(spec(tumbling(10), 100, policies(early="1 min", late="1 min")))
    shard.batch([(0, 5, "a", 1), (1, 12, "a", 2), (2, 7, "a", 3)])
    change(shard, 100, policies(late=None))
    assert shard.batch([], 1_000) == [("late", 1, 0, 10, "a", 2, [1, 3]), ("early", 0, 10, 20, "a", 1, [2])]


def test_a_shorter_period_sends_what_has_waited_so_long():
    shard = OneShard(spec(tumbling(10), 100, policies(late="1 min")))
    shard.batch([(0, 5, "a", 1), (1, 12, "a", 2), (2, 7, "a", 3)])
    change(shard, 100, policies(late="1 s"))
    assert shard.batch([], 1_000) == [("late", 1, 0, 10, "a", 2, [1, 3])]


# -- sliding messages that no window shows -------------------------------------------------------------------------


def late_for_its_own() -> OneShard:
    """Begin with a message of 95 that comes at 100: its own window is gone, those until 105 are not."""
    shard = OneShard(spec(sliding(10), 0))
    shard.batch([(0, 100, "a", 1), (1, 95, "b", 2)])
    assert shard.errors() == []
    return shard


def test_a_message_that_no_window_showed_is_refused_when_none_can_any_more():
    shard = late_for_its_own()
    shard.batch([(2, 105, "a", 3)])
    assert shard.errors() == []
    shard.batch([(3, 106, "a", 4)])
    assert shard.errors() == [(0, 1, "out_of_retention")]
    shard.batch([(4, 120, "a", 5)], drain=True)
    assert shard.errors() == []


def test_a_message_that_a_later_window_shows_is_no_error():
    shard = late_for_its_own()
    shard.batch([(2, 103, "b", 3)])
    assert ("full", 0, 93, 103, "b", 2, [2, 3]) in shard.batch([(3, 120, "a", 4)])
    assert shard.errors() == []


def test_a_message_that_a_window_shows_that_was_there_is_no_error():
    shard = OneShard(spec(sliding(10), 0))
    shard.batch([(0, 100, "a", 1), (1, 95, "a", 2)])
    assert shard.batch([(2, 120, "b", 4)]) == [("full", 0, 90, 100, "a", 2, [1, 2])]
    assert shard.errors() == []


def test_a_message_that_no_window_showed_is_refused_when_the_input_ends(tmp_path):
    shard = late_for_its_own()
    shard.batch(drain=True)
    assert shard.errors() == [(0, 1, "out_of_retention")]
    # and counts in none that comes after that
    assert shard.batch([(2, 103, "b", 3)], drain=True)[-1] == ("drain", 0, 93, 103, "b", 1, [3])
    assert shard.errors() == []

    tester = OperatorTester(WindowOperator(spec(sliding(10), 0)), SCHEMA, tmp_path)
    tester.batch(rows((0, 100, "a", 1), (1, 95, "b", 2)))
    tester.drain()
    tester.lose_disk()
    assert tester.restore().messages == 1
