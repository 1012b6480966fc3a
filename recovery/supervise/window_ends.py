"""When the next micro-batch begins, where they run back to back: with the first message behind a window's end.

A window's result comes with the micro-batch that reads the first message behind its end. Back to back, one runs at that
moment that has read too little, and the result waits for it to end. So the next micro-batch is held back if the end
would come while it runs, for less than it takes; then it begins with the end, and the result waits for nothing.

When the end comes follows from the last micro-batches: how far watermarks were behind the time that each was planned
at, and how soon it was planned after the one before it. Nothing is held back where that says little (input that is
caught up with, or comes in bursts), nor where micro-batches take longer than `LONGEST_MS`, or than windows are apart.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Any

from backend.batch import ENDS_APART, NEXT_END, PLANNED, WATERMARK

LONGEST_MS = 500
"""Micro-batches that take longer are busy with messages: to hold them back would cost throughput."""
SEEN, LEAST_SEEN = 16, 8
"""Micro-batches that are looked back at, at most and at least."""
MOST_MISSED = 0.25
"""Share of the last micro-batches that may have been further behind than the one to be expected."""
STEADY = 0.25
"""By what share of the time of a micro-batch the older half of them may have been further behind than the newer one."""


class WindowEnds:
    """Holds micro-batches back until the end of a window can be read.

    Args:
        clock_ms: The wall clock, by which Spark plans.
    """

    def __init__(self, clock_ms: Callable[[], float] = lambda: time.time() * 1000) -> None:
        self._clock_ms = clock_ms
        self._behind: deque[float] = deque(maxlen=SEEN)
        self._takes: deque[float] = deque(maxlen=SEEN)
        self._leads: deque[float] = deque(maxlen=SEEN)
        self._planned: float | None = None
        self._end = self._apart = self._waited = self._released = 0.0

    def published(self, shards: Iterable[Mapping[str, Any]]) -> None:
        """Take the metrics of a micro-batch's shards."""
        reported = [metrics for metrics in shards if NEXT_END in metrics]
        if not reported:
            self._planned = None
            return
        planned = max(float(metrics[PLANNED]) for metrics in reported)
        if self._planned is not None:
            self._takes.append(planned - self._planned - self._waited)
            self._leads.append(planned - self._released)
        self._behind.append(planned - min(float(metrics[WATERMARK]) for metrics in reported))
        self._planned, self._end = planned, min(float(metrics[NEXT_END]) for metrics in reported)
        self._apart = min(float(metrics[ENDS_APART]) for metrics in reported)

    def hold(self, stopped: Callable[[float], bool]) -> None:
        """Wait until the next micro-batch is to begin.

        Args:
            stopped: Waits for so many seconds; tells whether the query is to stop.
        """
        begun = self._clock_ms()
        wait_ms = self._wait_ms(begun)
        if wait_ms > 0:
            stopped(wait_ms / 1000)
        self._released = self._clock_ms()
        self._waited = self._released - begun

    def _wait_ms(self, now: float) -> float:
        if self._planned is None or len(self._takes) < LEAST_SEEN:
            return 0.0
        takes = median(self._takes)
        half = len(self._behind) // 2
        behind = list(self._behind)
        moved = abs(median(behind[:half]) - median(behind[half:]))
        if takes > min(LONGEST_MS, self._apart) or moved > STEADY * takes:
            return 0.0
        expected, cost = self._expected(takes)
        if cost >= median(behind) + takes / 2:  # what a result waits for when nothing is held back
            return 0.0
        wait_ms = self._end + expected - min(self._leads) - now
        return wait_ms if wait_ms < takes else 0.0

    def _expected(self, takes: float) -> tuple[float, float]:
        """Return how far behind the next micro-batch is taken to be, and what a result waits for then.

        A longer wait costs each result; one that was too short costs it a micro-batch.
        """
        behind = sorted(self._behind)
        count = len(behind)
        choices = range(count - 1 - int(MOST_MISSED * count), count)
        costs = [(behind[at] + takes * (count - 1 - at) / count, behind[at]) for at in choices]
        cost, expected = min(costs)
        return expected, cost
