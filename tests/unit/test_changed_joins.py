"""Joins whose retention changes between two starts: what was decided for want of a partner stays decided."""

from __future__ import annotations

from typing import Any

import msgspec

from backend.joins import state as join_state
from backend.joins.operator import JoinOperator
from backend.joins.spec import JoinSpec, join_spec
from backend.store.protocol import Changes
from tests.model.join_driver import SCHEMA, JoinDriver
from tests.oracle.joins import LEFT, RIGHT, Pair
from tests.oracle.windows import Message

SOURCES = ((LEFT, 0), (RIGHT, 0))


def spec(**options: Any) -> JoinSpec:
    options = {
        "on": "k",
        "left_retention": 100,
        "right_retention": 100,
        "max_ahead": None,
        "idle_after": None,
    } | options
    return join_spec(SCHEMA, SCHEMA, **options)


def left(offset: int, time: int, key: int) -> Message:
    return Message(offset, time, {"k": key}, stream=LEFT)


def right(offset: int, time: int, key: int) -> Message:
    return Message(offset, time, {"k": key}, stream=RIGHT)


def restart(driver: JoinDriver, spec: JoinSpec) -> None:
    driver.spec, driver.operator = spec, JoinOperator(spec)


def pair(one: int, other: int) -> Pair:
    return Pair("full", (LEFT, 0, one), (RIGHT, 0, other))


def test_a_longer_retention_brings_no_partner_for_a_row_that_was_sent_without_one():
    options = {"how": "left", "within": (0, 5)}
    driver = JoinDriver(spec(right_retention=0, **options), SOURCES)
    # at 20 the right side takes nothing up to 20, and the left message's partners end at 5
    assert driver.batch([left(0, 0, 1), right(0, 20, 2)], 0).rows == [Pair("full", (LEFT, 0, 0), None)]
    restart(driver, spec(right_retention=1_000, **options))
    late = driver.batch([right(1, 3, 1), right(2, 21, 9), right(3, 22, 1)], 1)
    assert late.rows == []
    assert late.errors == [((RIGHT, 0, 1), "out_of_retention")]
    driver.check_restore()
    again = driver.batch([left(1, 17, 9), right(4, 18, 9)], 2)  # 21 and 18 are in the range of 17
    assert again.rows == [pair(1, 2)]
    assert again.errors == [((RIGHT, 0, 4), "out_of_retention")]


def test_what_a_longer_retention_did_not_bring_back_stays_refused_when_it_is_shorter_again():
    short, long = ({"idle_after": "10 ms", "right_retention": keep} for keep in (0, 1_000))
    driver = JoinDriver(spec(**short), (*SOURCES, (RIGHT, 1)))
    first = [left(0, 20, 1), right(0, 20, 2), Message(0, 0, {"k": 3}, 1, RIGHT)]
    assert driver.batch(first, 0).errors == []
    driver.batch([left(1, 21, 1), right(1, 21, 2)], 20)  # partition 1 is idle: the right side is at 21
    restart(driver, spec(**long))
    driver.batch([], 21)
    restart(driver, spec(**short))
    # by its own partition's clock, 0, the first would be in time
    woken = driver.batch([Message(1, 5, {"k": 3}, 1, RIGHT), Message(2, 22, {"k": 3}, 1, RIGHT)], 22)
    assert woken.errors == [((RIGHT, 1, 1), "out_of_retention")]
    driver.check_restore()


def test_a_retention_by_size_that_is_first_given_lets_what_had_come_go_when_as_many_came_since():
    driver = JoinDriver(spec(), SOURCES)
    driver.batch([left(0, 0, 1), left(1, 0, 2)], 0)
    restart(driver, spec(left_retention_messages=2))
    assert driver.batch([left(2, 0, 3), right(0, 0, 1)], 1).rows == [pair(0, 0)]
    # the left messages of a micro-batch come first
    assert driver.batch([left(3, 0, 4), right(1, 0, 1), right(2, 0, 3), right(3, 0, 4)], 2).rows == [
        pair(2, 2),
        pair(3, 3),
    ]
    driver.check_restore()


def test_a_shorter_retention_by_size_holds_before_another_message_comes_and_a_longer_one_takes_nothing_back():
    driver = JoinDriver(spec(left_retention_messages=3), SOURCES)
    driver.batch([left(offset, 0, offset) for offset in range(3)], 0)
    restart(driver, spec(left_retention_messages=1))
    assert driver.batch([right(0, 0, 1), right(1, 0, 2)], 1).rows == [pair(2, 1)]
    driver.check_restore()
    restart(driver, spec(left_retention_messages=None))
    assert driver.batch([right(2, 0, 0), right(3, 0, 1), right(4, 0, 2)], 2).rows == [pair(2, 4)]
    driver.check_restore()


def test_a_longer_retention_by_size_takes_back_nothing_of_a_micro_batch_of_which_a_part_went():
    driver = JoinDriver(spec(how="left", left_retention_messages=2), SOURCES)
    gone = [Pair("full", (LEFT, 0, offset), None) for offset in range(4)]
    assert driver.batch([left(offset, 0, offset) for offset in range(6)], 0).rows == gone
    restart(driver, spec(how="left", left_retention_messages=3))
    assert driver.batch([right(0, 0, 3), right(1, 0, 4)], 1).rows == [pair(4, 1)]
    driver.check_restore()


def test_a_row_waiting_for_a_partner_is_sent_once_when_its_side_gets_a_shorter_retention():
    driver = JoinDriver(spec(how="left"), SOURCES)
    driver.batch([left(0, 0, 1), right(0, 50, 2)], 0)
    restart(driver, spec(how="left", left_retention=10))
    assert driver.batch([], 1).rows == [Pair("full", (LEFT, 0, 0), None)]
    restart(driver, spec(how="left", left_retention=1_000))
    assert driver.batch([right(1, 51, 1)], 2, drain=True).rows == []
    driver.check_restore()


def test_a_ledger_of_an_older_release_goes_on():
    driver = JoinDriver(spec(left_retention_messages=3), SOURCES)
    driver.batch([left(offset, 0, offset) for offset in range(3)], 0)
    (shard,) = driver.shards
    row = msgspec.msgpack.decode(shard.store.get(join_state._KEY))
    shard.store.write(Changes([join_state._KEY], [msgspec.msgpack.encode(row[:12])], {}))  # it ended with `waiting_ms`
    assert driver.batch([left(3, 0, 3), right(0, 0, 0), right(1, 0, 1)], 1).rows == [pair(1, 1)]
    driver.check_restore()
