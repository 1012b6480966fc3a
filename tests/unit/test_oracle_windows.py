"""The judge is judged first: SAMZA-552's own outputs, then cases small enough to count on fingers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.oracle.windows import Error, Message, Row, Spec, WindowOracle, error_set, full_rows, last_values, run

SECOND = 1000
MINUTE = 60 * SECOND


def at(clock: str) -> int:
    """Milliseconds of a time of day."""
    hours, minutes, seconds = (int(part) for part in clock.split(":"))
    return ((hours * 60 + minutes) * 60 + seconds) * SECOND


def message(offset: int, time: int, value: int | None = 0, key: str | None = "a", partition: int = 0) -> Message:
    return Message(offset, time, {"value": value, "key": key}, partition)


# SAMZA-552, case 1: (message, wall clock)
ORDERS = [
    (message(1, at("8:59:10"), 0), at("9:00:00")),
    (message(2, at("9:00:01"), 5), at("9:00:59")),
    (message(3, at("8:59:30"), 9), at("9:02:01")),
]


def play(oracle: WindowOracle, until: int) -> list[Row]:
    """Deliver the orders with a timer that ticks each second, as an idle container's would."""
    waiting = list(ORDERS)
    for wall in range(at("9:00:00"), until, SECOND):
        oracle.timeout(wall)
        while waiting and waiting[0][1] == wall:
            oracle.add_message(*waiting.pop(0))
    return oracle.rows


def test_samza_max_over_a_tuple_window_of_three_with_updates_each_minute():
    oracle = WindowOracle(
        Spec("tumbling", 3, unit="messages", aggregates=(("max", "value"),), early_ms=MINUTE, retention_ms=60 * MINUTE)
    )
    rows = play(oracle, at("9:10:00"))
    # the document's wnd=[1,3] is the window of three that starts at offset 1
    assert [([r.start_offset, r.start_offset + 2], r.values[0]) for r in rows] == [([1, 3], 5), ([1, 3], 9)]
    assert [(r.reason, r.last_offset) for r in rows] == [("early", 2), ("full", 3)]


def test_samza_max_over_a_time_window_of_one_minute_with_updates_each_minute():
    oracle = WindowOracle(
        Spec("tumbling", MINUTE, aggregates=(("max", "value"),), early_ms=MINUTE, retention_ms=60 * MINUTE)
    )
    rows = play(oracle, at("9:10:00"))
    # [8:59:00, 8:59:59] of the document is [8:59:00, 9:00:00)
    assert [(r.window, r.values[0]) for r in rows] == [
        ((at("8:59:00"), at("9:00:00")), 0),
        ((at("9:00:00"), at("9:01:00")), 5),
        ((at("8:59:00"), at("9:00:00")), 9),
    ]
    assert [r.reason for r in rows] == ["full", "early", "late"]


def test_tumbling_full_late_too_late_and_drain():
    spec = Spec("tumbling", 10, aggregates=(("count", None), ("sum", "value")), retention_ms=10)
    times = [1, 9, 10, 5, 20, 9, 10]  # 5 is late for [0, 10); the second 9 is too late when the clock is 20
    oracle = run(spec, [[message(n, t, 1) for n, t in enumerate(times)]])
    assert full_rows(oracle.rows) == [((0, 10), (), (2, 2)), ((10, 20), (), (1, 1))]
    assert oracle.errors == [Error((0, 0, 5), "out_of_retention")]
    assert last_values(oracle.rows) == {((0, 10), ()): (3, 3), ((10, 20), ()): (2, 2), ((20, 30), ()): (1, 1)}
    assert [r.reason for r in oracle.rows] == ["full", "full", "late", "late", "drain"]


def test_the_last_millisecond_of_retention_counts():
    spec = Spec("tumbling", 10, retention_ms=10)
    late = run(spec, [[message(0, 0), message(1, 19), message(2, 1)]])
    assert late.errors == []
    gone = run(spec, [[message(0, 0), message(1, 20), message(2, 1)]])
    assert error_set(gone.errors) == [((0, 0, 2), "out_of_retention")]


def test_negative_times_and_origin_use_floor_division():
    spec = Spec("tumbling", 10, origin=3)
    oracle = run(spec, [[message(0, -8), message(1, -7), message(2, 2), message(3, 3)]])
    assert full_rows(oracle.rows) == sorted([((-17, -7), (), (1,)), ((-7, 3), (), (2,))], key=repr)


def test_hopping_is_late_for_one_window_and_in_time_for_the_next():
    spec = Spec("hopping", 10, step=5, retention_ms=100)
    oracle = run(spec, [[message(0, 7), message(1, 11), message(2, 8)]])
    # 7 is in [0, 10) and [5, 15); 11 closes [0, 10); 8 is late there, in time in [5, 15)
    assert full_rows(oracle.rows) == [((0, 10), (), (1,))]
    assert last_values(oracle.rows) == {((0, 10), ()): (2,), ((5, 15), ()): (3,), ((10, 20), ()): (1,)}


def test_hopping_counts_in_what_is_retained_only():
    spec = Spec("hopping", 10, step=5, retention_ms=0)
    oracle = run(spec, [[message(0, 11), message(1, 8), message(2, 4)]])
    # clock 11: 8 fits [5, 15) only; both windows of 4 are gone
    assert last_values(oracle.rows) == {((5, 15), ()): (2,), ((10, 20), ()): (1,)}
    assert error_set(oracle.errors) == [((0, 0, 2), "out_of_retention")]


def test_sliding_window_per_distinct_time_both_ends_in():
    spec = Spec("sliding", 10, aggregates=(("sum", "value"),), retention_ms=100)
    oracle = run(spec, [[message(0, 0, 1), message(1, 10, 2), message(2, 10, 4), message(3, 11, 8)]])
    assert last_values(oracle.rows) == {((-10, 0), ()): (1,), ((0, 10), ()): (7,), ((1, 11), ()): (14,)}
    assert [(r.window, r.reason) for r in oracle.rows] == [((-10, 0), "full"), ((0, 10), "full"), ((1, 11), "drain")]


def test_sliding_late_message_makes_its_own_window_and_joins_later_ones():
    spec = Spec("sliding", 10, aggregates=(("sum", "value"),), retention_ms=100)
    oracle = run(spec, [[message(0, 0, 1), message(1, 20, 2), message(2, 15, 4)]])
    assert full_rows(oracle.rows) == [((-10, 0), (), (1,))]
    assert last_values(oracle.rows) == {((-10, 0), ()): (1,), ((5, 15), ()): (4,), ((10, 20), ()): (6,)}


def test_sessions_close_after_the_gap_and_merge():
    spec = Spec("session", 5, keys=("key",), aggregates=(("count", None),), retention_ms=100)
    oracle = run(spec, [[message(0, 0), message(1, 10), message(2, 5), message(3, 16)]])
    # 10 opens a second session and closes [0, 0]; 5 is at distance 5 of both: one session [0, 10], open until 15
    assert [(r.reason, r.window, r.values) for r in oracle.rows] == [
        ("full", (0, 0), (1,)),
        ("retracted", (0, 0), (1,)),
        ("full", (0, 10), (3,)),
        ("drain", (16, 16), (1,)),
    ]
    assert last_values(oracle.rows) == {((0, 10), ("a",)): (3,), ((16, 16), ("a",)): (1,)}


def test_session_at_the_gap_stays_open_one_past_it_closes():
    spec = Spec("session", 5)
    assert run(spec, [[message(0, 0), message(1, 5)]]).rows[0].window == (0, 5)
    assert [r.window for r in run(spec, [[message(0, 0), message(1, 6)]]).rows] == [(0, 0), (6, 6)]


def test_late_session_is_never_full():
    spec = Spec("session", 5, keys=("key",), retention_ms=100)
    oracle = run(spec, [[message(0, 50), message(1, 10, key="b")]])
    assert [(r.reason, r.window) for r in oracle.rows] == [("late", (10, 10)), ("drain", (50, 50))]


def test_tumbling_by_number_counts_per_key_and_closes_with_its_last_message():
    spec = Spec("tumbling", 2, unit="messages", keys=("key",), aggregates=(("sum", "value"),))
    keys = ["a", "b", "a", None, "a", "a"]
    oracle = run(spec, [[message(n, 0, 2**n, key) for n, key in enumerate(keys)]])
    assert [(r.reason, r.key, r.start_offset, r.last_offset, r.values) for r in oracle.rows if r.reason == "full"] == [
        ("full", ("a",), 0, 2, (5,)),
        ("full", ("a",), 4, 5, (48,)),
    ]
    assert last_values(oracle.rows) == {
        ((0, 0), ("a",)): (5,),
        ((0, 1), ("b",)): (2,),
        ((0, 3), (None,)): (8,),
        ((0, 4), ("a",)): (48,),
    }


def test_hopping_and_sliding_by_number():
    hopping = run(
        Spec("hopping", 3, step=2, unit="messages", aggregates=(("collect_list", "value"),)),
        [[message(n, 0, n) for n in range(5)]],
    )
    assert last_values(hopping.rows) == {
        ((0, 0), ()): ([0, 1, 2],),
        ((0, 2), ()): ([2, 3, 4],),
        ((0, 4), ()): ([4],),
    }
    assert [r.reason for r in hopping.rows] == ["full", "full", "drain"]
    sliding = run(
        Spec("sliding", 2, unit="messages", aggregates=(("collect_list", "value"),)),
        [[message(n, 0, n) for n in range(3)]],
    )
    assert [r.values[0] for r in sliding.rows] == [[0], [0, 1], [1, 2]]


def test_session_by_number_ends_after_that_many_messages_without_its_key():
    spec = Spec("session", 2, unit="messages", keys=("key",))
    oracle = run(spec, [[message(n, 0, key=key) for n, key in enumerate("abaabba")]])
    assert [(r.reason, r.key, r.start_offset, r.last_offset) for r in oracle.rows] == [
        ("full", ("b",), 1, 1),
        ("full", ("a",), 0, 3),
        ("drain", ("b",), 4, 5),
        ("drain", ("a",), 6, 6),
    ]


def test_a_replay_is_a_noop_also_when_its_window_is_gone():
    spec = Spec("tumbling", 10, retention_ms=0)
    oracle = WindowOracle(spec)
    first = [message(0, 0), message(1, 50)]
    for m in first + first:
        oracle.add_message(m, 0)
    assert oracle.errors == []
    assert [r.values for r in oracle.rows] == [(1,)]


def test_late_updates_wait_ten_seconds_by_default():
    oracle = WindowOracle(Spec("tumbling", 10, retention_ms=100))
    for m in [message(0, 0), message(1, 10), message(2, 1)]:
        oracle.add_message(m, 0)
    assert oracle.timeout(9_999) == []
    assert [(r.reason, r.revision, r.values) for r in oracle.timeout(10_000)] == [("late", 1, (2,))]
    assert oracle.timeout(30_000) == []


def test_pending_late_updates_come_before_the_purge():
    oracle = WindowOracle(Spec("tumbling", 10, retention_ms=10))
    for m in [message(0, 0), message(1, 10), message(2, 1), message(3, 20)]:
        oracle.add_message(m, 0)
    assert [(r.reason, r.window, r.values) for r in oracle.rows] == [
        ("full", (0, 10), (1,)),
        ("full", (10, 20), (1,)),
        ("late", (0, 10), (2,)),
    ]


def test_a_refusing_downstream_disables_the_selector_until_timeout_resumes():
    oracle = WindowOracle(Spec("tumbling", 10))
    oracle.add_message(message(0, 0), 0)
    oracle.refusing = True
    assert oracle.add_message(message(1, 10), 0) == []
    with pytest.raises(RuntimeError):
        oracle.add_message(message(2, 20), 0)
    oracle.refusing = False
    assert [r.window for r in oracle.timeout(0)] == [(0, 10)]
    assert [r.window for r in oracle.add_message(message(2, 20), 0)] == [(10, 20)]


def test_without_full_results_what_waits_when_a_window_ends_is_sent_as_early():
    oracle = WindowOracle(Spec("tumbling", 10, retention_ms=100, early_ms=60_000, full=False, late_ms=0))
    oracle.add_message(message(0, 1), 0)
    assert oracle.timeout(60_000)[0].revision == 0
    assert oracle.add_message(message(1, 12), 60_000) == []  # nothing waits of [0, 10)
    assert [(r.reason, r.window, r.values) for r in oracle.add_message(message(2, 20), 60_000)] == [
        ("early", (10, 20), (1,))
    ]


def test_a_sliding_message_that_no_window_shows_goes_to_the_errors():
    spec = Spec("sliding", 10, keys=("key",))
    oracle = WindowOracle(spec)
    for m in [message(0, 100), message(1, 95, key="b"), message(2, 105)]:
        oracle.add_message(m, 0)
    assert oracle.errors == []  # a message of "b" at 105 or before would show it
    oracle.add_message(message(3, 106), 0)
    assert oracle.errors == [Error((0, 0, 1), "out_of_retention")]


def test_a_longer_retention_reopens_nothing_and_a_shorter_one_drops_at_the_end_of_its_micro_batch():
    spec = Spec("tumbling", 10, retention_ms=10)
    oracle = WindowOracle(spec, batched=True)
    oracle.add_message(message(0, 50), 0)
    oracle.end_of_batch(0)  # what ended at 40 is gone
    oracle.change(replace(spec, retention_ms=100))
    oracle.add_message(message(1, 39), 0)
    oracle.add_message(message(2, 40), 0)
    assert error_set(oracle.errors) == [((0, 0, 1), "out_of_retention")]
    oracle.end_of_batch(0)
    oracle.change(replace(spec, retention_ms=0))
    assert [(r.reason, r.window) for r in oracle.end_of_batch(0)] == [("late", (40, 50))]
    assert list(oracle.windows) == [((), 50)]


def test_several_partitions_close_by_the_slowest_that_is_not_idle():
    spec = Spec("tumbling", 10, retention_ms=100, idle_after_ms=60_000)
    oracle = WindowOracle(spec, partitions=2, batched=True)
    oracle.add_message(message(0, 30), 0)
    oracle.add_message(message(0, 5, partition=1), 0)
    assert oracle.end_of_batch(0) == []
    oracle.add_message(message(1, 31), 59_999)
    assert oracle.end_of_batch(59_999) == []
    oracle.add_message(message(2, 32), 60_000)
    assert [(r.window, r.values) for r in oracle.end_of_batch(60_000)] == [((0, 10), (1,))]


def test_what_is_not_accepted_keeps_no_partition_awake():
    spec = Spec("tumbling", 10, retention_ms=100, idle_after_ms=60_000, max_ahead_ms=100_000)
    oracle = WindowOracle(spec, partitions=2, batched=True)
    oracle.add_message(message(0, 30), 0)
    oracle.add_message(message(0, 5, partition=1), 0)
    oracle.skip(message(1, 0, partition=1), 59_999)
    assert oracle.end_of_batch(59_999) == []
    oracle.add_message(message(1, 31), 60_000)
    oracle.add_message(message(2, 10**9, partition=1), 60_000)
    assert [(r.window, r.values) for r in oracle.end_of_batch(60_000)] == [((0, 10), (1,))]


def test_too_late_is_judged_by_the_message_s_own_partition():
    spec = Spec("tumbling", 10, retention_ms=0)
    oracle = WindowOracle(spec, partitions=2, batched=True)
    for m in [message(0, 30), message(0, 5, partition=1), message(1, 6), message(1, 7, partition=1)]:
        oracle.add_message(m, 0)
    oracle.end_of_batch(0)
    assert error_set(oracle.errors) == [((0, 0, 1), "out_of_retention")]


@pytest.mark.parametrize("cut", range(1, 6))
def test_cuts_do_not_change_full_rows_errors_and_last_values(cut):
    messages = [message(n, t, n) for n, t in enumerate([1, 9, 10, 5, 31, 9])]
    for spec in (Spec("tumbling", 10, retention_ms=10), Spec("hopping", 10, 5, retention_ms=10), Spec("session", 3)):
        whole, parts = run(spec, [messages]), run(spec, [messages[:cut], messages[cut:]])
        assert full_rows(whole.rows) == full_rows(parts.rows)
        assert whole.errors == parts.errors
        assert last_values(whole.rows) == last_values(parts.rows)
