"""Copies of shards on other hosts while the query runs: when a round of them is due, and towards which commits.

Without `standby=1` there are rounds only while shards that were sent away are to be given back to a new executor.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from recovery.commit.pointer import Commit
from recovery.restore.standby import Round
from recovery.supervise.placement import Placement

log = logging.getLogger("rewind.standby")
CANCEL_S, JOIN_S = 0.5, 60.0
BUSY_S, IDLE_S = 2.0, 20.0
"""Between two rounds: while shards commit, and while none does (Spark ends a Python worker that idles for a minute)."""
MOST_REFUSED = 3
"""Times in a row that Spark does not say where its executors are, before it is no longer asked."""


class Standby:
    """Keeps copies in a thread, one round at a time.

    Args:
        copy: Makes a round towards commits.
        commits: Shard -> its newest commit at the start of the query.
        cancel: Ends a round that runs.
        placement: Sends the shards of an executor that is gone to one that is left; None leaves it to Spark.
        clock: Seconds.
        always: Keep copies of all shards, all the time; else only of those that are to be given back.

    Attributes:
        fetched: Bytes that copies were given since the start.
    """

    def __init__(
        self,
        copy: Callable[[Mapping[int, Commit]], Round],
        commits: Mapping[int, Commit],
        cancel: Callable[[], None] = lambda: None,
        placement: Placement | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        always: bool = True,
    ) -> None:
        self._copy, self._cancel, self._clock, self._always = copy, cancel, clock, always
        self._placement = placement
        self._commits, self._given = dict(commits), dict[int, Commit]()
        self._thread: threading.Thread | None = None
        self._ended_s = float("-inf")
        self._close = self._copied = False
        self._refused = 0
        self.fetched = 0

    def look(self, commits: Mapping[int, Commit], query: Any = None) -> None:
        """Begin a round if one is due, and see to shards whose executor is gone.

        Args:
            commits: Shard -> its newest commit that Spark has committed, of the shards that are known to have one.
            query: Spark's, which runs.
        """
        self._place(query)
        self._commits.update(commits)
        if self._thread is not None and self._thread.is_alive():
            return
        wanted = {shard: commit for shard, commit in self._commits.items() if self._always or self._returns(shard)}
        pause_s = BUSY_S if wanted != self._given else IDLE_S
        if wanted and self._clock() - self._ended_s >= pause_s:
            self._given = wanted
            self._thread = threading.Thread(target=self._round, name="rewind-standby", daemon=True)
            self._thread.start()

    def join(self) -> None:
        """End the round that runs, and wait for it, `JOIN_S` at most: it may not have asked Spark for anything yet."""
        deadline = time.monotonic() + JOIN_S
        while self._thread is not None and self._thread.is_alive() and time.monotonic() < deadline:
            try:
                self._cancel()
            except Exception as error:  # the session is gone, and the round fails with it
                log.info("a round of copies could not be cancelled: %s", error)
            self._thread.join(CANCEL_S)

    def _returns(self, shard: int) -> bool:
        return self._placement is not None and shard in self._placement.returning

    def _place(self, query: Any) -> None:
        if self._placement is None:
            return
        try:
            self._placement.look(query, copied=self._always and self._copied)
            if self._close:
                self._close = False
                self._placement.give_back(query)
            self._refused = 0
        except Exception as error:  # of Spark's inner parts, which another version may not have: it does without
            self._refused += 1
            if self._refused == MOST_REFUSED:
                log.warning("Spark alone says where shards run from now on: %s", str(error).partition("\n")[0])
                self._placement = None

    def _round(self) -> None:
        try:
            made = self._copy(self._given)
            self.fetched += made.fetched
            self._close = not made.failed and not made.behind
            self._copied = self._copied or self._close
            failed = next(iter(made.failed.values()), "")
        except Exception as error:  # of Spark: a round that was cancelled, executors that died; the next one does it
            failed = str(error).partition("\n")[0]
        if failed:
            log.warning("a copy of a shard on another host was not kept up, it is tried again: %s", failed)
        self._ended_s = self._clock()
