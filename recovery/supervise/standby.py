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
from recovery.supervise.placement import Place, Placement

log = logging.getLogger("rewind.standby")
CANCEL_S, JOIN_S = 0.5, 60.0
BUSY_S, IDLE_S = 2.0, 20.0
"""Between two rounds: while there is something to bring, and while there is nothing (Spark ends a Python worker that
idles for a minute)."""
MOST_REFUSED, REFUSED_S = 3, 1.0
"""Times in a row, so many seconds apart, that Spark does not say where its executors are: then it is asked no more."""


class Standby:
    """Keeps copies in a thread, one round at a time.

    Args:
        copy: Makes a round towards commits.
        commits: Shard -> its newest commit at the start of the query.
        cancel: Ends a round that runs.
        ran: Number of a task of the last round -> where it ran, of those that succeeded.
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
        ran: Callable[[], Mapping[int, Place]] = dict,
        placement: Placement | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        always: bool = True,
    ) -> None:
        self._copy, self._cancel, self._ran, self._clock, self._always = copy, cancel, ran, clock, always
        self._placement = placement
        self._commits, self._given = dict(commits), dict[int, Commit]()
        self._thread: threading.Thread | None = None
        self._ended_s = float("-inf")
        self._again = self._silent = False
        self._copies: list[tuple[Place, frozenset[int]]] | None = None
        self._refused, self._refused_s = 0, float("-inf")
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
        pause_s = BUSY_S if self._again or (wanted != self._given and self._always) else IDLE_S
        if wanted and self._clock() - self._ended_s >= pause_s:
            self._given, self._again = wanted, False
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
            asked = self._placement.look(query)
            copies = self._copies
            if copies is not None:
                self._copies = None
                self._placement.copied(query, copies)
            self._refused = 0 if asked else self._refused
        except Exception as error:  # of Spark's inner parts, which another version may not have: it does without
            if self._clock() - self._refused_s < REFUSED_S:
                return  # a hiccup, so far
            self._refused, self._refused_s = self._refused + 1, self._clock()
            if self._refused == MOST_REFUSED:
                log.warning("Spark alone says where shards run from now on: %s", str(error).partition("\n")[0])
                self._placement = None

    def _round(self) -> None:
        try:
            made = self._copy(self._given)
            self.fetched += made.fetched
            self._again = made.fetched > 0 and (made.behind or not self._always)
            failed = next(iter(made.failed.values()), "")
            self._copies = self._where(made)
        except Exception as error:  # of Spark: a round that was cancelled, executors that died; the next one does it
            failed = str(error).partition("\n")[0]
        if failed:
            log.warning("a copy of a shard on another host was not kept up, it is tried again: %s", failed)
        self._ended_s = self._clock()

    def _where(self, made: Round) -> list[tuple[Place, frozenset[int]]] | None:
        """Give which shards a round left whole on which executor, as far as Spark says where its tasks ran."""
        if self._placement is None:
            return None
        try:
            places = self._ran()
        except Exception as error:  # of Spark's inner parts: shards stay where they are
            if not self._silent:
                log.warning("Spark does not say where copies of shards are: %s", str(error).partition("\n")[0])
            self._silent = True
            places = {}
        return [(places[number], shards) for number, shards in made.whole.items() if number in places]
