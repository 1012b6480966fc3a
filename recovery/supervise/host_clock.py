"""Steps back of the host's clock, which Spark's processing-time trigger would wait out.

The trigger waits until the wall clock shows the next full interval. After a step back by an hour that is an hour in
which no micro-batch is planned and nothing is said; a new start of the query reads the clock anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LEAST_S = 5.0
"""Smaller steps are waited out: a new start takes as long."""


def _ahead() -> float:
    return time.time() - time.monotonic()


class HostClock:
    """Compares the wall clock with the monotonic one.

    Args:
        ahead: How far the wall clock is ahead of the monotonic one, in seconds.
    """

    def __init__(self, ahead: Callable[[], float] = _ahead) -> None:
        self._ahead = ahead
        self._highest = ahead()

    def went_back_s(self) -> float:
        """Return by how many seconds the wall clock has gone back, each step once; 0.0 for less than `LEAST_S`.

        Several small steps add up; a clock that goes back slowly is one of many small steps.
        """
        ahead = self._ahead()
        back = self._highest - ahead
        if 0.0 < back < LEAST_S:
            return 0.0
        self._highest = ahead
        return max(back, 0.0)
