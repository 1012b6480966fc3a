"""Windows and sessions by number of messages: options that change between two starts, early results without full."""

from __future__ import annotations

from typing import Any

import pytest

from backend.aggregates import collect_list, count
from backend.windows.definitions import Window, hopping, session, sliding, tumbling
from backend.windows.policies import Policies
from backend.windows.spec import WindowSpec, window_spec
from tests.unit.one_shard import SCHEMA, OneShard, Row

EARLY = Policies(10_000, False, None)
FULL = Policies(None, True, None)


def spec(window: Window, policies: Policies = FULL, aggregate: Any = None, **options: Any) -> WindowSpec:
    options = {"keys": ["key"], "idle_after": None, "policies": policies, **options}
    return window_spec(window, SCHEMA, {"n": aggregate or count()}, **options)


def offsets(shard: OneShard) -> list[tuple[str, int, int, int, int]]:
    """Give the last results: reason, revision, first and last offset, count."""
    assert shard.outcome is not None
    names = ("reason", "revision", "start_offset", "last_offset", "n")
    return [tuple(row[name] for name in names) for row in shard.outcome.results.to_pylist()]


A = [(n, n, "a", n) for n in range(20)]


@pytest.mark.parametrize("cut", range(5))
@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (tumbling(messages=2), [("early", 0, 0, 1, 2), ("early", 0, 2, 3, 2)]),
        (hopping(messages=3, every=2), [("early", 0, 0, 2, 3)]),
        (sliding(messages=2), [("early", 0, max(n - 1, 0), n, min(n + 1, 2)) for n in range(4)]),
    ],
)
def test_what_waits_is_sent_with_a_windows_last_message_without_full_results(window, expected, cut):
    shard = OneShard(spec(window, EARLY))
    rows = []
    for part in (A[:cut], A[cut:4]):
        shard.batch(part, 1_000)
        rows += offsets(shard)
    assert rows == expected


@pytest.mark.parametrize("cut", range(4))
def test_what_waits_is_sent_when_a_session_ends_without_full_results(cut):
    shard = OneShard(spec(session(messages=2), EARLY))
    stream: list[Row] = [(0, 0, "a", 0), (1, 1, "b", 0), (2, 2, "b", 0), (3, 3, "b", 0)]
    rows = []
    for part in (stream[:cut], stream[cut:]):
        shard.batch(part, 1_000)
        rows += offsets(shard)
    assert rows == [("early", 0, 0, 0, 1)]


def test_nothing_is_sent_twice_when_an_early_result_was_sent_before():
    shard = OneShard(spec(session(messages=2), EARLY))
    shard.batch([(0, 0, "a", 0)], 0)
    shard.batch([], 10_000)
    assert offsets(shard) == [("early", 0, 0, 0, 1)]
    shard.batch([(1, 1, "b", 0), (2, 2, "b", 0)], 10_000)
    assert offsets(shard) == []


@pytest.mark.parametrize("window", [tumbling(messages=3), session(messages=3)])
def test_what_waited_when_the_early_policy_was_turned_off_is_sent_by_the_next_micro_batch(window):
    shard = OneShard(spec(window, EARLY))
    shard.batch([(0, 0, "a", 0)], 0)
    shard.restart(spec(window, Policies(None, False, None)))
    shard.batch([], 1)
    assert offsets(shard) == [("early", 0, 0, 0, 1)]
    shard.batch([(1, 1, "a", 0), (2, 2, "a", 0), *((n, n, "b", 0) for n in range(3, 7))], 60_001)
    assert offsets(shard) == []


@pytest.mark.parametrize("window", [tumbling(messages=3), session(messages=3)])
def test_what_waited_for_a_policy_that_is_off_now_is_sent_when_its_window_ends_at_once(window):
    shard = OneShard(spec(window, EARLY))
    shard.batch([(0, 0, "a", 0)], 0)
    shard.restart(spec(window, Policies(None, False, None)))
    key = "b" if window.kind == "session" else "a"
    shard.batch([(n, n, key, 0) for n in (1, 2, 3, 4)], 1)
    assert offsets(shard) == [("early", 0, 0, 0, 1) if window.kind == "session" else ("early", 0, 0, 2, 3)]


@pytest.mark.parametrize("window", [tumbling(messages=3), session(messages=3)])
@pytest.mark.parametrize("between", [[], [50_000]])
def test_an_early_policy_that_is_made_shorter_finds_what_waits(window, between):
    shard = OneShard(spec(window, Policies(40_000, True, None)))
    shard.batch([(0, 0, "a", 0)], 0)
    for early in between:
        shard.restart(spec(window, Policies(early, True, None)))
        shard.batch([], 5_000)
    shard.restart(spec(window, Policies(10_000, True, None)))
    shard.batch([], 9_999)
    assert offsets(shard) == []
    assert shard.outcome is not None and shard.outcome.next_due_ms == 10_000
    shard.batch([], 10_000)
    assert offsets(shard) == [("early", 0, 0, 0, 1)]


@pytest.mark.parametrize("window", [tumbling(messages=3), session(messages=9)])
def test_what_waits_of_a_key_that_falls_out_is_sent_though_the_policy_was_turned_off(window):
    shard = OneShard(spec(window, EARLY, retention=100))
    shard.batch([(0, 0, "a", 0)], 0)
    shard.restart(spec(window, Policies(None, False, None), retention=10))
    shard.batch([(1, 10, "b", 0)], 1)
    assert offsets(shard) == [("early", 0, 0, 0, 1)]


@pytest.mark.parametrize("window", [tumbling(messages=3), hopping(messages=4, every=2), sliding(messages=3)])
def test_retention_by_number_that_is_first_given_or_made_shorter_lets_keys_fall_out(window):
    shard = OneShard(spec(window, aggregate=collect_list("value")))
    shard.batch([(0, 0, "a", 0), (1, 1, "b", 1), (2, 2, "b", 2)])
    shard.restart(spec(window, aggregate=collect_list("value"), retention_messages=1))
    shard.batch([])
    # two messages came since a's: it is out, and with it its message
    assert shard.outcome is not None and shard.outcome.replay_from == {(0, 0): 1}
    shard.restart(spec(window, aggregate=collect_list("value"), retention_messages=10))
    shard.batch([(3, 3, "a", 3), (4, 4, "a", 4), (5, 5, "a", 5), (6, 6, "a", 6)])
    first = next(row for row in shard.outcome.results.to_pylist() if row["key"] == "a")
    assert first["start_offset"] == 3


@pytest.mark.parametrize("window", [tumbling(messages=3), session(messages=9)])
@pytest.mark.parametrize(
    ("first", "then", "expected"),
    [
        (FULL, FULL, [("early", 0, 0, 0, 1)]),
        (FULL, Policies(10_000, True, None), [("early", 0, 0, 0, 1)]),  # it came before the early policy
        (FULL, Policies(None, False, None), [("early", 0, 0, 0, 1)]),  # it waited for the full result
        (Policies(None, False, None), Policies(None, False, None), []),  # early and full both off
    ],
)
def test_an_unfinished_window_is_sent_before_its_key_falls_out(window, first, then, expected):
    shard = OneShard(spec(window, first, retention=10))
    shard.batch([(0, 0, "a", 0)], 0)
    shard.restart(spec(window, then, retention=10))
    shard.batch([(1, 10, "b", 0)], 1)
    assert [row for row in offsets(shard) if row[2] == 0] == expected
