"""Shards of an executor that is gone are sent to those that are left, and one by one given back to new ones."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from recovery.commit.pointer import Commit
from recovery.restore.standby import Round
from recovery.supervise.placement import LOOK_S, WARM_S, Place, Placement
from recovery.supervise.standby import IDLE_S, MOST_REFUSED, Standby

QUERY = SimpleNamespace(id="the query")


class Spark:
    """Executors `<id>`, on hosts `h<id>` but where told, and where each shard is; the clock runs on with each look."""

    def __init__(
        self,
        *executors: str,
        places: Mapping[int, str],
        hosts: Mapping[str, str] | None = None,
        own_disks: bool = False,
    ) -> None:
        self.there, self.places, self.hosts = set(executors), dict(places), dict(hosts or {})
        self.at, self.asked, self.going, self.query = 100.0, 0, set[str](), QUERY
        self.placement = Placement(self, len(places) + 1, lambda: self.at, own_disks=own_disks)

    def _of(self, executor: str) -> Place:
        return Place(executor, self.hosts.get(executor, f"h{executor}"))

    def executors(self) -> frozenset[str]:
        self.asked += 1
        return frozenset(self.there)

    def active(self, executors: Collection[str]) -> list[Place]:
        return [self._of(one) for one in executors if one not in self.going]

    def place(self, query: Any, shard: int) -> Place | None:
        assert query is self.query
        return self._of(self.places[shard]) if shard in self.places else None

    def prefer(self, query: Any, shard: int, old: Place, new: Place) -> None:
        assert self.place(query, shard) == old
        assert new == self._of(new.executor)
        self.places[shard] = new.executor

    def look(self, *gone: str, new: str = "", copied: bool = True) -> dict[int, str]:
        self.there = (self.there - set(gone)) | set(filter(None, [new]))
        self.at += 1.5 * LOOK_S
        self.placement.look(self.query, copied=copied)
        return dict(self.places)

    def give_back(self, later_s: float) -> dict[int, str]:
        self.at += later_s
        self.look()
        self.placement.give_back(self.query)
        return dict(self.places)


def test_shards_of_the_dead_go_to_those_left_where_the_fewest_are(caplog: pytest.LogCaptureFixture) -> None:
    spark = Spark("1", "2", "3", places={0: "1", 1: "1", 2: "1", 3: "2", 4: "2", 5: "2", 6: "3"})
    assert spark.look() == {0: "1", 1: "1", 2: "1", 3: "2", 4: "2", 5: "2", 6: "3"}
    after = spark.look("1")
    assert Counter(after.values()) == {"2": 4, "3": 3} or Counter(after.values()) == {"2": 3, "3": 4}
    assert (after[0], after[1]) == ("3", "3"), "until there are as many"
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said == [f"executor 1 is gone: shard {shard} is to run on {after[shard]}" for shard in (0, 1, 2)]


def test_an_executor_on_the_same_host_is_taken_first() -> None:
    spark = Spark("1", "2", "3", places={0: "1", 1: "2"}, hosts={"1": "a", "2": "a"})
    spark.look()
    assert spark.look("1") == {0: "2", 1: "2"}


def test_queries_that_do_not_know_of_one_another_do_not_all_choose_the_same() -> None:
    chosen = set[str]()
    for number in range(40):
        spark = Spark("1", "2", "3", places={0: "1"})
        spark.query = SimpleNamespace(id=f"query {number}")
        spark.look()
        chosen.add(spark.look("1")[0])
    assert chosen == {"2", "3"}


def test_an_executor_that_comes_as_another_goes_gets_nothing() -> None:
    spark = Spark("1", "2", places={0: "1", 1: "2"})
    spark.look()
    assert spark.look("1", new="3") == {0: "2", 1: "2"}


def test_one_that_is_there_for_long_is_taken_before_a_new_one() -> None:
    spark = Spark("1", "2", places={0: "1", 1: "1", 2: "2"})
    spark.look()
    spark.at += WARM_S
    spark.look(new="3")
    assert spark.look("2") == {0: "1", 1: "1", 2: "1"}
    assert spark.look("1") == {0: "3", 1: "3", 2: "3"}, "none is there for long"


def test_one_that_is_about_to_go_gets_nothing() -> None:
    spark = Spark("1", "2", "3", places={0: "1", 1: "3"})
    spark.look()
    spark.going = {"2"}
    assert spark.look("1") == {0: "3", 1: "3"}


def test_where_none_is_left_spark_decides() -> None:
    spark = Spark("1", places={0: "1"})
    spark.look()
    assert spark.look("1", new="2") == {0: "1"}


def test_without_copies_spark_decides_where_what_comes_in_its_place_may_find_the_state() -> None:
    spark = Spark("1", "2", "3", places={0: "1", 1: "2"}, hosts={"2": "a", "3": "a"})
    spark.look()
    assert spark.look("1", copied=False) == {0: "1", 1: "2"}
    assert spark.look("2", copied=False) == {0: "1", 1: "3"}, "it is on the same host, and has the same disk"
    assert spark.look() == {0: "3", 1: "3"}, "Spark has not, so far"


def test_without_copies_no_shard_waits_for_one_whose_disk_is_gone_with_it() -> None:
    spark = Spark("1", "2", places={0: "1"}, own_disks=True)
    spark.look()
    assert spark.look("1", copied=False) == {0: "2"}


def test_a_look_costs_nothing_before_its_time() -> None:
    spark = Spark("1", places={0: "1"})
    spark.look()
    spark.at += LOOK_S / 2
    spark.placement.look(QUERY, copied=True)
    assert spark.asked == 1


def test_a_new_executor_gets_shards_back_once_it_is_warm() -> None:
    spark = Spark("1", "2", places={0: "1", 1: "1", 2: "2", 3: "2"})
    spark.look()
    assert spark.look("1") == {0: "2", 1: "2", 2: "2", 3: "2"}
    assert spark.placement.returning == set(), "to whom?"
    spark.look(new="3")
    assert spark.placement.returning == {0, 1}
    assert spark.give_back(WARM_S - 1) == {0: "2", 1: "2", 2: "2", 3: "2"}
    assert spark.give_back(1) == {0: "3", 1: "2", 2: "2", 3: "2"}
    assert spark.give_back(1) == {0: "3", 1: "3", 2: "2", 3: "2"}
    assert spark.give_back(1) == {0: "3", 1: "3", 2: "2", 3: "2"}, "as many each"
    assert spark.placement.returning == set()
    spark.look(new="4")
    assert spark.give_back(WARM_S) == {0: "3", 1: "3", 2: "2", 3: "2"}, "all are back"


def test_a_shard_is_given_back_after_a_round_in_which_no_copy_was_far_behind() -> None:
    clock, asked, made = [100.0], list[Any](), [Round(behind=True), Round(0, {0: "why"}), Round(7, busy=True)]

    class Noted(Placement):
        def look(self, query: Any, *, copied: bool) -> None:
            asked.append(copied)

        def give_back(self, query: Any) -> None:
            asked.append("give back")

    placement = Noted(Spark(places={}), 0)
    standby = Standby(lambda _: made.pop(0), {0: Commit(1, "1" * 32)}, placement=placement, clock=lambda: clock[0])
    for left in (2, 1, 0):
        clock[0] += IDLE_S
        standby.look({})
        assert standby._thread is not None
        standby._thread.join()
        assert len(made) == left
    assert asked == [False] * 3
    standby.look({})
    standby.look({})
    assert asked[3:] == [True, "give back", True]


def test_without_spark_s_inner_parts_it_does_without(caplog: pytest.LogCaptureFixture) -> None:
    class Other(Spark):
        def executors(self) -> frozenset[str]:
            self.asked += 1
            if self.asked == 2:
                return frozenset()
            raise AttributeError("no such method\nat py4j")

    spark, clock = Other(places={}), [100.0]
    spark.placement._clock = lambda: clock[0]
    standby = Standby(lambda _: Round(), {}, placement=spark.placement)
    for _ in range(MOST_REFUSED + 4):
        clock[0] += 1
        standby.look({})
    assert spark.asked == 2 + MOST_REFUSED, "once is no reason"
    assert [r.getMessage() for r in caplog.records] == ["Spark alone says where shards run from now on: no such method"]
