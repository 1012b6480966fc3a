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
    """Executors `<id>`, on hosts `h<id>` but where told, and where each shard is; the clock runs on with each look.

    At the start there are copies of all shards everywhere, unless `copied` is False.
    """

    def __init__(
        self,
        *executors: str,
        places: Mapping[int, str],
        hosts: Mapping[str, str] | None = None,
        own_disks: bool = False,
        copied: bool = True,
    ) -> None:
        self.there, self.places, self.hosts = set(executors), dict(places), dict(hosts or {})
        self.at, self.asked, self.going, self.query = 100.0, 0, set[str](), QUERY
        self.placement = Placement(self, len(places) + 1, lambda: self.at, own_disks=own_disks)
        if copied:
            self.copied(*executors)

    def copied(self, *executors: str, shards: Collection[int] | None = None) -> dict[int, str]:
        """A round of copies, which left on executors these shards, or all, lacking nothing."""
        self.placement.copied(self.query, [(self._of(one), shards or self.places.keys()) for one in executors])
        return dict(self.places)

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

    def look(self, *gone: str, new: str = "") -> dict[int, str]:
        self.there = (self.there - set(gone)) | set(filter(None, [new]))
        self.at += 1.5 * LOOK_S
        self.placement.look(self.query)
        return dict(self.places)

    def give_back(self, later_s: float, *reached: str) -> dict[int, str]:
        self.at += later_s
        self.look()
        return self.copied(*(reached or self.there))


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
    assert spark.give_back(0) == {0: "1", 1: "1", 2: "2"}
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
    spark = Spark("1", "2", "3", places={0: "1", 1: "2"}, hosts={"2": "a", "3": "a"}, copied=False)
    spark.look()
    assert spark.look("1") == {0: "1", 1: "2"}
    assert spark.look("2") == {0: "1", 1: "3"}, "it is on the same host, and has the same disk"
    spark.copied("3")
    assert spark.look() == {0: "3", 1: "3"}, "Spark has not, so far"


def test_a_shard_is_sent_where_its_copy_is_not_where_no_round_has_been() -> None:
    """Two were there when the copies were made; the third has had none of them since it came, and then has."""
    spark = Spark("1", "2", places={0: "1", 1: "2", 2: "2", 3: "2"})
    spark.look()
    spark.at += WARM_S
    spark.look(new="3")
    spark.at += WARM_S
    assert spark.look("1") == {0: "2", 1: "2", 2: "2", 3: "2"}, "3 has fewer shards, but no copies"
    assert spark.look("2") == {0: "2", 1: "2", 2: "2", 3: "2"}, "Spark decides"
    spark.copied("3", shards=[1, 2])
    assert spark.look() == {0: "2", 1: "3", 2: "3", 3: "2"}, "it has copies of these"


def test_without_copies_no_shard_waits_for_one_whose_disk_is_gone_with_it() -> None:
    spark = Spark("1", "2", places={0: "1"}, own_disks=True, copied=False)
    spark.look()
    assert spark.look("1") == {0: "2"}


def test_a_disk_of_its_own_on_the_same_host_is_another_disk() -> None:
    spark = Spark("1", "2", "3", places={0: "1", 1: "3"}, hosts={"1": "a", "2": "a"}, own_disks=True, copied=False)
    spark.look()
    spark.copied("3")
    assert spark.look("1") == {0: "3", 1: "3"}, "where its copy is"


def test_a_look_costs_nothing_before_its_time() -> None:
    spark = Spark("1", places={0: "1"})
    spark.look()
    spark.at += LOOK_S / 2
    spark.placement.look(QUERY)
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


def test_nothing_is_given_to_a_warm_executor_that_no_round_of_copies_has_reached() -> None:
    spark = Spark("1", "2", places={0: "1", 1: "2"}, own_disks=True)
    spark.look()
    assert spark.look("1", new="3") == {0: "2", 1: "2"}
    assert spark.give_back(WARM_S, "2") == {0: "2", 1: "2"}, "the tasks of the round had to wait elsewhere"
    assert spark.copied("3", shards=[1]) == {0: "2", 1: "2"}, "it has another shard's"
    assert spark.placement.returning == {0}, "so that there are more rounds"
    assert spark.copied("3") == {0: "3", 1: "2"}


def test_a_copy_that_another_executor_of_the_host_made_counts_where_they_share_the_disk() -> None:
    for own_disks, after in ((True, "2"), (False, "3")):
        spark = Spark(
            "1", "2", "4", places={0: "1", 1: "2"}, hosts={"3": "h4"}, own_disks=own_disks, copied=False
        )  # fmt: skip
        spark.copied("2", shards=[0])
        spark.look()
        assert spark.look("1", new="3") == {0: "2", 1: "2"}
        assert spark.give_back(WARM_S, "4") == {0: after, 1: "2"}


def test_what_no_new_executor_can_get_more_of_ends_the_rounds_and_what_one_may_get_does_not() -> None:
    spark = Spark("1", "2", "3", places={0: "1", 1: "2", 2: "3"})
    spark.look()
    spark.look("1")
    spark.look(new="4")
    assert spark.placement.returning == {0}
    spark.copied()
    assert spark.placement.returning == {0}, "one of the others has two"
    spark.places = {0: "2", 1: "4", 2: "3"}
    spark.copied()
    assert spark.placement.returning == set(), "as many each, though no copy has come to it"


def test_where_all_are_back_old_copies_do_not_count_any_more() -> None:
    spark = Spark("1", "2", places={0: "1", 1: "2"}, copied=False, own_disks=True)
    spark.look()
    spark.at += WARM_S
    spark.look("1", new="3")
    assert spark.give_back(WARM_S, "3") == {0: "3", 1: "2"}
    spark.copied()
    assert spark.placement.returning == set()
    assert spark.placement._copied == {"3": {1}}


def test_what_a_round_left_whole_is_noted_with_where_its_tasks_ran(caplog: pytest.LogCaptureFixture) -> None:
    one, two = Place("1", "a"), Place("2", "b")
    clock, noted = [100.0], list[Any]()
    made = [
        Round(busy=True, whole={0: frozenset({0, 1})}),
        Round(failed={1: "why"}, whole={0: frozenset({0}), 1: frozenset({1})}),
        Round(behind=True, whole={1: frozenset(), 2: frozenset({0})}),
        Round(whole={0: frozenset({0})}),
    ]
    ran: list[Any] = [{0: one, 1: two}, {1: two}, {0: one, 1: two, 2: one}, AttributeError("no status store\nat py4j")]

    class Noted(Placement):
        def look(self, query: Any) -> bool:
            noted.append("look")
            return True

        def copied(self, query: Any, copies: Any) -> None:
            noted.append(copies)

    def where() -> Mapping[int, Place]:
        answer = ran.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]

    standby = Standby(
        lambda _: made.pop(0), {0: Commit(1, "1" * 32)}, ran=where,
        placement=Noted(Spark(places={}), 0), clock=lambda: clock[0],
    )  # fmt: skip
    for left in (3, 2, 1, 0):
        clock[0] += IDLE_S
        standby.look({})
        assert standby._thread is not None
        standby._thread.join()
        assert len(made) == left
    standby.look({})
    standby.look({})
    first, second, third = [(one, {0, 1})], [(two, {1})], [(two, set()), (one, {0})]
    assert noted == ["look", "look", first, "look", second, "look", third, "look", [], "look"]
    said = [r.getMessage() for r in caplog.records if "copies" in r.getMessage()]
    assert said == ["Spark does not say where copies of shards are: no status store"]


def test_without_spark_s_inner_parts_it_does_without(caplog: pytest.LogCaptureFixture) -> None:
    class Other(Spark):
        def executors(self) -> frozenset[str]:
            self.asked += 1
            if self.asked == 2:
                return frozenset()
            raise AttributeError("no such method\nat py4j")

    spark, clock = Other(places={}), [100.0]
    spark.placement._clock = lambda: clock[0]
    standby = Standby(lambda _: Round(), {}, placement=spark.placement, clock=lambda: clock[0])
    for _ in range(MOST_REFUSED + 4):
        clock[0] += 1
        standby.look({})
    assert spark.asked == 2 + MOST_REFUSED, "once is no reason"
    assert [r.getMessage() for r in caplog.records] == ["Spark alone says where shards run from now on: no such method"]


def test_shards_of_the_dead_are_looked_at_again_where_nobody_was_left_to_take_them() -> None:
    """Spark's status lags: for a moment the executor that is left is not among those that tasks are given to."""
    spark = Spark("1", "2", places={0: "1", 1: "2"}, hosts={"1": "a", "2": "a"})
    spark.look()
    spark.going = {"2"}
    assert spark.look("1") == {0: "1", 1: "2"}
    assert spark.look() == {0: "1", 1: "2"}
    spark.going = set()
    assert spark.look() == {0: "2", 1: "2"}


def test_shards_that_could_not_be_sent_are_sent_later() -> None:
    class Once(Spark):
        failed = False

        def prefer(self, query: Any, shard: int, old: Place, new: Place) -> None:
            if not self.failed:
                self.failed = True
                raise ConnectionError("the driver did not answer")
            super().prefer(query, shard, old, new)

    spark = Once("1", "2", places={0: "1", 1: "1"}, hosts={"1": "a", "2": "a"})
    spark.look()
    with pytest.raises(ConnectionError):
        spark.look("1")
    assert spark.look() == {0: "2", 1: "2"}


def test_a_spark_that_cannot_place_is_asked_no_more_but_not_for_a_hiccup(caplog: pytest.LogCaptureFixture) -> None:
    class Without(Spark):
        refuses = True

        def place(self, query: Any, shard: int) -> Place | None:
            if self.refuses:
                raise AttributeError("no such method")
            return super().place(query, shard)

    for seconds, given_up in ((0.3, False), (10.0, True)):
        caplog.clear()
        spark, clock = Without("1", "2", places={0: "1"}, hosts={"1": "a", "2": "a"}), [100.0]
        spark.placement._clock = lambda clock=clock: clock[0]
        standby = Standby(lambda _: Round(), {}, placement=spark.placement, clock=lambda clock=clock: clock[0])
        standby.look({}, spark.query)
        spark.there = {"2"}
        for _ in range(int(seconds / 0.05)):  # as often as the supervisor looks
            clock[0] += 0.05
            standby.look({}, spark.query)
        spark.refuses = False
        clock[0] += 1.0
        standby.look({}, spark.query)
        assert spark.places == {0: "1" if given_up else "2"}
        said = [r.getMessage() for r in caplog.records if "Spark alone" in r.getMessage()]
        assert len(said) == given_up
