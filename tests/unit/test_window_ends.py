"""Micro-batches back to back begin with the first message behind a window's end, where that can be foreseen."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from recovery.supervise.window_ends import LEAST_SEEN, WindowEnds

LEAD, TAKES = 30, 200
"""From a publication until the next micro-batch is planned; from one plan to the next, milliseconds."""


DRAW = random.Random(6)


class Stream:
    """A query on a clock of its own: messages come all the time, read `behind(now)` milliseconds after their times."""

    def __init__(self, behind: Callable[[float], float], *, takes: float = TAKES, apart: int = 1_000) -> None:
        self.now, self.behind, self.takes, self.apart = 50_000.0, behind, takes, apart
        self.ends = WindowEnds(lambda: self.now)
        self.held: list[float] = []
        self.waits: list[float] = []
        """Of each result, until the micro-batch that brings it was planned."""

    def _stopped(self, seconds: float) -> bool:
        self.held.append(seconds * 1000)
        self.now += seconds * 1000
        return False

    def run(self, micro_batches: int, *, windows: bool = True) -> Stream:
        closed: float | None = None
        for _ in range(micro_batches):
            planned = self.now
            watermark = planned - self.behind(planned)
            end = watermark // self.apart * self.apart + self.apart
            if closed is not None and end > closed:
                self.waits.append(planned - (end - self.apart))
            closed = end
            self.now += self.takes - LEAD
            told = {"planned": planned, "watermark": watermark, "next_end": end, "ends_apart": self.apart}
            self.ends.published([told, told] if windows else [{"rows": 1}])
            self.ends.hold(self._stopped)
            self.now += LEAD
        return self


def test_a_result_waits_for_nothing_but_its_first_message() -> None:
    query = Stream(lambda now: 12, takes=190).run(300)
    late = query.waits[3:]  # the first windows are those that it learns from
    assert len(late) > 45
    assert max(late) == pytest.approx(12)
    assert all(0 < held < 190 for held in query.held)
    alone = Stream(lambda now: 12, takes=190)
    alone.ends = WindowEnds(lambda: -(10**12))  # its plans are always long past
    assert sum(alone.run(300).waits[3:]) / len(late) > 60


def test_one_that_was_far_behind_does_not_count_for_long() -> None:
    slow = iter([3_000.0, 900.0, 400.0])
    query = Stream(lambda now: next(slow, 12), takes=190).run(300)
    assert max(query.waits[6:]) == pytest.approx(12)


def test_times_that_differ_a_little_are_waited_for() -> None:
    draw = random.Random(5)
    query = Stream(lambda now: draw.uniform(5, 15), takes=190).run(2_000)
    waits = sorted(query.waits[5:])
    assert waits[int(0.9 * len(waits))] <= 15
    assert waits[-1] <= 15 + 190


@pytest.mark.parametrize(
    "query",
    [
        pytest.param(Stream(lambda now: 12, takes=501), id="micro-batches that take long"),
        pytest.param(Stream(lambda now: 12, apart=150), id="windows that end more often than that"),
        pytest.param(Stream(lambda now: 100_000 - now, takes=190), id="caught up with"),
        pytest.param(Stream(lambda now: 20_000 - now / 10, takes=190), id="caught up with slowly"),
        pytest.param(Stream(lambda now: now / 10, takes=190), id="left behind"),
        pytest.param(Stream(lambda now: DRAW.uniform(0, 900), takes=190), id="in bursts"),
    ],
)
def test_what_cannot_be_foreseen_is_not_waited_for(query: Stream) -> None:
    assert query.run(200).held == []


def test_without_windows_nothing_is_held_back() -> None:
    query = Stream(lambda now: 12, takes=190)
    assert query.run(100, windows=False).held == []
    assert query.run(LEAST_SEEN).held == []  # too few to learn from
    assert query.run(100).held


def test_a_stop_ends_the_wait() -> None:
    query = Stream(lambda now: 12, takes=190).run(100)
    asked: list[float] = []
    for _ in range(20):
        query.ends.published(
            [{"planned": query.now, "watermark": query.now - 12, "next_end": query.now + 100, "ends_apart": 1_000}]
        )
        query.ends.hold(lambda seconds: bool(asked.append(seconds) or True))
        query.now += TAKES
    assert asked
