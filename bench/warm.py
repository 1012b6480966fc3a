"""A JVM that has compiled what it runs.

Its compilers take half to three quarters of a core in a query's first minute, of two, and a query runs for days. Ours
suffers more than what runs in the JVM alone: its Python workers want the other core.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

ROUNDS, SETTLED = 10, 0.15
"""At most so many rounds of a warm-up, until the compilers take so much of a core."""


class Warm:
    """Runs rounds of what will be measured, smaller, until the JVM's compilers have settled.

    Args:
        spark: The session.
        run: One round.
        rounds: At most so many; 0 for none, as in a quick form.
    """

    def __init__(self, spark: Any, run: Callable[[], None], *, rounds: int = ROUNDS) -> None:
        self._bean = spark._jvm.java.lang.management.ManagementFactory.getCompilationMXBean()
        self._shares: list[float] = []
        self._began = self._now()
        while len(self._shares) < rounds and (not self._shares or self._shares[-1] > SETTLED):
            run()
            self._shares.append(self._share())
            self._began = self._now()

    def notes(self) -> list[str]:
        """Return what the compilers took of a core, by round, and since: at the end of what is measured."""
        rounds = ", ".join(f"{share:.2f}" for share in self._shares)
        by_round = [f"share of a core that the JVM's compilers took, by round of the warm-up: {rounds}"]
        return [*by_round[: len(self._shares)], f"share of it while measuring: {self._share():.2f}"]

    def _now(self) -> tuple[float, int]:
        return time.perf_counter(), self._bean.getTotalCompilationTime()

    def _share(self) -> float:
        (began, before), (now, after) = self._began, self._now()
        return (after - before) / 1000 / (now - began)
