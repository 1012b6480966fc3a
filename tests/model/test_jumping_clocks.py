"""Batch times that jump an hour back and a day ahead: the operators still do what the oracle does, batch by batch.

And nothing waits for ever: what waits is due within its period after the latest batch time that there ever was.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.model import test_join_model as joins
from tests.model.streams import PAUSES, Feed, feeds, share
from tests.model.test_window_oracle import compare, judge, operator_of, set_of, specs
from tests.model.window_driver import Driver
from tests.oracle.windows import WindowOracle

pytestmark = pytest.mark.slow

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
JUMPS = (-HOUR_MS, -HOUR_MS, DAY_MS, DAY_MS, -DAY_MS, *PAUSES)


@st.composite
def jumping(draw: st.DrawFn, *, partitions: int = 1) -> Feed:
    """Give a stream whose batch times jump: far from its event times, or to where they are in the future."""
    feed = draw(feeds(partitions=partitions))
    return replace(feed, walls=draw(walls(max(0, *feed.walls), len(feed.walls))))


@st.composite
def walls(draw: st.DrawFn, start: int, count: int) -> tuple[int, ...]:
    """Give batch times that jump, none below 0."""
    jumps = draw(st.lists(st.sampled_from(JUMPS), min_size=count, max_size=count))
    start += draw(st.sampled_from((0, HOUR_MS, 40 * DAY_MS)))
    return tuple(max(0, start + sum(jumps[: number + 1])) for number in range(count))


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("kind", ["tumbling", "hopping", "sliding", "session"])
@share(0.12)
@given(data=st.data())
def test_time_windows_equal_the_oracle_under_a_jumping_clock(kind: str, partitions: int, data: st.DataObject) -> None:
    judge(data.draw(specs(kind)), data.draw(jumping(partitions=partitions)), shards=data.draw(st.sampled_from((1, 3))))


@pytest.mark.parametrize("kind", ["tumbling", "hopping", "sliding", "session"])
@share(0.15)
@given(data=st.data())
def test_windows_by_number_equal_the_oracle_under_a_jumping_clock(kind: str, data: st.DataObject) -> None:
    judge(data.draw(specs(kind, "messages")), data.draw(jumping()), shards=1)


@share(0.15)
@given(data=st.data())
def test_joins_equal_the_oracle_under_a_jumping_clock(data: st.DataObject) -> None:
    parts, _ = data.draw(joins.batches(data.draw(joins.streams())))
    joins.compare(data.draw(joins.specs_by_time()), parts, data.draw(walls(0, len(parts))), joins.ONE)


@pytest.mark.parametrize("kind", ["tumbling", "sliding", "session"])
@share(0.15)
@given(data=st.data())
def test_what_waits_is_due_within_its_period_after_the_latest_clock(kind: str, data: st.DataObject) -> None:
    spec = replace(data.draw(specs(kind)), early_ms=5_000, late_ms=4_000, idle_after_ms=60_000, max_ahead_ms=None)
    feed = data.draw(jumping(partitions=2))
    oracle = WindowOracle(spec, 2, batched=True)
    driver = Driver(operator_of(spec), spec.keys, [(0, 0), (0, 1)])
    for batch, wall in zip(feed.batches, feed.walls, strict=True):
        for message in sorted(set_of(batch), key=lambda m: m.place):
            oracle.add_message(message, wall)
        oracle.end_of_batch(wall, False)
        driver.batch(batch, wall)
    now, timers = feed.walls[-1], 0
    while (outcome := driver.shards[0].outcome) is not None and (due := outcome.next_due_ms) is not None:
        assert due <= max(feed.walls) + 60_000 + 5_000, "an idle partition closes windows, then early or late updates"
        now, timers, sent = max(due, now + 1), timers + 1, len(oracle.rows)
        assert timers < 100
        oracle.end_of_batch(now, False)
        compare(driver.batch((), now).rows, oracle.rows[sent:])
    assert all(window.pending_since is None for window in oracle.windows.values()), "something waits without a timer"
