"""How long a failing query is started again: a duration without progress, with growing pauses, each reported."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from shlex import quote

from backend.errors import RestoreFailed, RewindError, SparkUnavailable
from recovery.failures import RESTORABLE, Failure, Kind

log = logging.getLogger("rewind.supervisor")

DEFAULT = "10 minutes"
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
MIN_TRIES = 4
"""New starts that are made at least, however long each took to fail."""
MAX_RESTORES = 4
"""Restores without progress: when they are made and do not help, waiting does not either."""


@dataclass(slots=True)
class Patience:
    """The pauses between failures. Progress, a newly committed micro-batch, begins it anew.

    Attributes:
        patience_s: How long failures that pass are waited for.
        checkpoint: Names the query in errors.
        doing: What is tried, for the log.
        clock: Seconds, monotonic.
        said: What was logged of the newest failure.
    """

    patience_s: float
    checkpoint: str
    doing: str = "the query failed"
    clock: Callable[[], float] = field(default=time.monotonic)
    said: str = ""
    _committed: int = -1
    _since: float | None = None
    _tries: int = 0
    _restores: int = 0

    def healthy(self) -> None:
        """Take note that the query runs and finds its sources: what fails from now on has not failed before."""
        self._since = None

    def after(self, failure: Failure, committed: int) -> float:
        """Return the seconds to wait before the next try, and log them; the first restore does not wait.

        Args:
            failure: No final one.
            committed: The newest micro-batch that Spark is known to have committed, -1 for none.

        Raises:
            RestoreFailed: Restores do not help.
            SparkUnavailable: Spark's processes failed all the time.
            RewindError: What was not there all the time, by its own name.
        """
        now = self.clock()
        if committed > self._committed or self._since is None:
            self._committed, self._since = max(committed, self._committed), now
            self._tries = self._restores = 0
        self._tries += 1
        restored = failure.kind is Kind.RESTORE and isinstance(failure.error, RESTORABLE)  # else a restore failed
        self._restores += restored
        if self._restores > MAX_RESTORES:
            raise RestoreFailed(
                f"the query fails after {MAX_RESTORES} restores without progress",
                where=self.checkpoint,
                why=failure.text,
                command=f"rewind verify {quote(self.checkpoint)}",
            ) from failure.error
        left_s = self._since + self.patience_s - now
        if left_s <= 0 and self._tries > MIN_TRIES:
            raise self._given_up(failure, now - self._since) from failure.error
        if restored and self._restores == 1:
            pause_s, self.said = 0.0, f"state is restored: {failure.text}"
        else:
            pause_s = min(FIRST_PAUSE_S * 2.0 ** min(self._tries - 1, 16), LONGEST_PAUSE_S)
            self.said = (
                f"{self.doing}: {failure.text}; next try in {pause_s:.1f} s,"
                f" given up in {max(left_s, 0.0):.0f} s unless it gets on"
            )
        log.warning("%s", self.said)
        return pause_s

    def _given_up(self, failure: Failure, waited_s: float) -> RewindError:
        tried = f"tried {self._tries} times in {waited_s:.0f} s"
        found = failure.error
        if isinstance(found, RewindError):
            why = f"{found.why}; {tried}" if found.why else tried
            return type(found)(found.what, where=found.where or self.checkpoint, why=why, command=found.command)
        return SparkUnavailable(
            "Spark's processes die, or do not come up",
            where=self.checkpoint,
            why=f"{failure.text}; {tried}",
            command="look at load and memory of the hosts (uptime, free -m; dmesg names killed processes), then"
            " start the query again, with a longer patience=... where they stay busy",
        )
