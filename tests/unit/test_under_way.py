"""How far restores are: counted by hand."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from recovery.listener import Restoring
from recovery.supervise.metrics import ProgressCollector
from recovery.supervise.supervisor import Progress
from recovery.supervise.under_way import Amount, UnderWay

REPLAY = Restoring(3, "c", "no local state", "replay", records=5_000)
FOLLOWED = Restoring(1, "c", "older copy", "catch-up")


def test_rate_and_time_to_go_are_of_what_came_since_the_start() -> None:
    now = [100.0]
    watch = UnderWay(lambda: now[0])
    watch.start(REPLAY)
    assert watch.shards == {3: Amount(0, 5_000, 0.0)}
    assert (watch.shards[3].rate, watch.shards[3].seconds_left) == (0.0, None)
    watch.start(FOLLOWED)
    watch.start(Restoring(2, "c", "moved", "snapshot"))
    now[0] = 104.0
    watch.batch(REPLAY, {}, 1_200, 9)
    watch.batch(REPLAY, {}, 800, 9)
    watch.batch(FOLLOWED, {}, 40, 9)
    found = watch.shards
    assert sorted(found) == [1, 3]  # a task that takes a snapshot restores nothing
    assert (found[3].rate, found[3].seconds_left) == (500.0, 6.0)
    assert str(found[3]) == "2,000 of 5,000 messages, 6 s to go"
    assert str(found[1]) == "40 messages"
    watch.suspended(FOLLOWED, "why")
    watch.end(REPLAY, 5_000, 9, 1.0)
    assert watch.shards == {}


def test_prometheus_says_it_per_shard() -> None:
    now = [0.0]
    watch = UnderWay(lambda: now[0])
    watch.start(REPLAY)
    watch.batch(REPLAY, {}, 1_000, 9)
    now[0] = 2.0
    registry = CollectorRegistry()
    registry.register(ProgressCollector(lambda: Progress(queued={3: 7}, under_way=watch)))

    def value(name: str) -> float | None:
        return registry.get_sample_value(f"rewind_{name}", {"shard": "3"})

    names = ("queued", "restoring_done", "restoring_of", "restoring_rate")
    assert [value(name) for name in names] == [7.0, 1_000.0, 5_000.0, 500.0]
    watch.end(REPLAY, 1_000, 9, 2.0)
    assert [value(name) for name in names] == [7.0, None, None, None]
