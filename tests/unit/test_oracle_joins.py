"""The judge of the joins: SAMZA-552's own outputs, then cases small enough to count on fingers."""

from __future__ import annotations

import pytest

from tests.oracle.joins import LEFT, RIGHT, JoinOracle, JoinSpec, Pair, join, rows_with_fields
from tests.oracle.windows import Error, Message

MINUTE = 60_000


def at(clock: str) -> int:
    hours, minutes, seconds = (int(part) for part in clock.split(":"))
    return ((hours * 60 + minutes) * 60 + seconds) * 1000


def order(offset: int, value: int, number: int, time: str) -> Message:
    return Message(offset, at(time), {"value": value, "id": number}, stream=LEFT)


def shipment(offset: int, cost: int, number: int, time: str) -> Message:
    return Message(offset, at(time), {"cost": cost, "id": number}, stream=RIGHT)


ORDERS = [order(1, 0, 1, "8:59:10"), order(2, 5, 3, "9:00:00"), order(3, 9, 9, "8:59:30")]
SHIPMENTS = [
    shipment(1000, 0, 3, "9:00:10"),
    shipment(1001, 2, 1, "9:00:10"),
    shipment(1002, 3, 1, "9:01:10"),
    shipment(1003, 1, 9, "9:01:20"),
]


@pytest.mark.parametrize(
    "spec",
    [
        JoinSpec(on=(("id", "id"),)),
        JoinSpec(on=(("id", "id"),), before=0, after=2 * MINUTE),
    ],
    ids=["tuple windows", "time windows"],
)
def test_samza_orders_and_shipments(spec):
    oracle = JoinOracle(spec)
    names = (LEFT, "id"), (LEFT, "value"), (RIGHT, "cost")
    oracle.batch([*ORDERS[:2], *SHIPMENTS[:2]], at("9:01:00"))
    assert rows_with_fields(oracle, *names) == [(3, 5, 0), (1, 0, 2)]
    oracle.batch(SHIPMENTS[2:], at("9:02:00"))
    assert rows_with_fields(oracle, *names)[2:] == [(1, 0, 3)]
    oracle.batch(ORDERS[2:], at("9:03:00"))
    assert rows_with_fields(oracle, *names)[3:] == [(9, 9, 1)]


def left(offset: int, time: int, key: int | None = 1) -> Message:
    return Message(offset, time, {"k": key}, stream=LEFT)


def right(offset: int, time: int, key: int | None = 1) -> Message:
    return Message(offset, time, {"k": key}, stream=RIGHT)


def places(oracle: JoinOracle) -> list[tuple[int | None, int | None]]:
    return [(row.left and row.left[2], row.right and row.right[2]) for row in oracle.rows]


ON = (("k", "k"),)


def test_both_ends_of_an_asymmetric_range_are_in():
    spec = JoinSpec(before=5, after=10)
    oracle = join(spec, [[left(0, 100), *[right(n, t) for n, t in enumerate([94, 95, 110, 111])]]])
    assert places(oracle) == [(0, 1), (0, 2)]


def test_a_range_of_zero_width():
    assert places(join(JoinSpec(before=0, after=0), [[left(0, 5), right(0, 4), right(1, 5), right(2, 6)]])) == [(0, 1)]


def test_null_keys_never_match_and_duplicates_match_once():
    oracle = join(
        JoinSpec(on=ON, how="left"), [[left(0, 1, None), left(1, 1), left(1, 1)], [right(0, 1, None), right(1, 1)]]
    )
    assert places(oracle) == [(1, 1), (0, None)]


def test_retention_falls_between_whichever_side_comes_first():
    spec = JoinSpec(on=ON, retention_ms=(10, 100))
    later = [right(0, 10), right(1, 5)]  # the clock of the second is 10: the left message of 0 is gone
    assert places(join(spec, [[left(0, 0)], later])) == [(0, 0)]
    assert places(join(spec, [later, [left(0, 0)]])) == [(0, 0)]


def test_out_of_retention_goes_to_the_errors():
    oracle = join(JoinSpec(on=ON, retention_ms=(10, None)), [[left(0, 20), left(1, 10), left(2, 11)]])
    assert oracle.errors == [Error((LEFT, 0, 1), "out_of_retention")]


def test_retention_by_size_keeps_the_newest():
    spec = JoinSpec(on=ON, retention_messages=(2, None))
    assert places(join(spec, [[left(0, 0), left(1, 0), left(2, 0), right(0, 0)]])) == [(1, 0), (2, 0)]


def test_outer_rows_come_once_when_no_partner_can_come():
    spec = JoinSpec(on=ON, before=0, after=5, how="outer", retention_ms=(100, 10))
    oracle = JoinOracle(spec)
    # a partner of (left, 0) lies in [0, 5] and lives until the right clock is 15
    assert oracle.batch([left(0, 0), right(0, 14, 2)], 0) == []
    assert oracle.batch([right(1, 15, 2)], 0) == [Pair("full", (0, 0, 0), None)]
    assert oracle.batch([], 0, drain=True) == [Pair("drain", None, (1, 0, 0)), Pair("drain", None, (1, 0, 1))]
    assert oracle.batch([], 0, drain=True) == []


def test_a_silent_side_does_not_hold_outer_rows_for_ever():
    spec = JoinSpec(on=ON, before=0, after=5, how="left", retention_ms=(10, 10), idle_after_ms=1000)
    oracle = JoinOracle(spec)
    assert oracle.batch([left(0, 0), right(0, 0, 2)], 0) == []
    assert oracle.batch([left(1, 50)], 999) == []
    assert oracle.batch([left(2, 51)], 1000) == [Pair("full", (0, 0, 0), None)]
