"""Restores beside the running query: which shards queue their input, and what is done so that they need not.

What is restored is what committed pointers say, which the driver knows from what their tasks reported, and at a start
from Spark's state. Nothing of a running query is probed or locked: a restore reads the changelog and the source, and
makes files of its own. When the state is proven, the shards are asked to adopt their queues, through the control
stream. A shard that could not is restored again; after `MAX_REFUSED` tries, or when its queue is too long, the query is
stopped, restored, and started again, as for any other loss. Where that does not help `MAX_RESTORES` times, it ends:
micro-batches that other shards commit in between are no progress of this one.
"""

from __future__ import annotations

import logging
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from backend.errors import RestoreFailed, StateUnavailable
from backend.texts import one_line
from recovery.commit.pointer import Commit, Pointer, RestoringPointer, decode
from recovery.failures import Kind, read
from recovery.queue.seals import DECISION, Decision
from recovery.supervise.patience import MAX_RESTORES

log = logging.getLogger("rewind.queue")
MAX_REFUSED = 3
ASKED_FOR = 16
"""Micro-batches that a shard may go on queueing after it was asked to adopt, before it counts as not asked."""
RETRY_S, MAX_TRIES = 2.0, 30
"""Behind a restore that failed by what passes; after so many in a row the query is stopped, and has its patience."""
CANCEL_S = 0.5
PACE_S, SLOWEST_S, LOOK_S = 0.05, 1.0, 0.05
"""While a shard waits for its state, micro-batches begin this long after one another for each one that it has queued,
up to the second: back to back they would fill a queue with nothing in it in seconds."""


@dataclass(frozen=True, slots=True)
class Queued:
    """A shard that queues its input.

    Attributes:
        begun: The first micro-batch that it queued, as far as this driver knows.
        since: The commit that is restored.
        count: Micro-batches queued.
        length: Bytes of their entries.
    """

    begun: int
    since: Pointer
    count: int
    length: int


class Beside:
    """The shards that queue, and the restore that runs beside the query; one restore at a time, in a thread.

    Args:
        restore: Restores shards as of pointers with a state of their own, and asks them to adopt their queues; told
            those that could not adopt them before.
        most_bytes: The query is stopped when a shard has queued more.
        most_count: The same, in micro-batches.
        restoring: What pointers said at the start, by shard.
    """

    def __init__(
        self,
        restore: Callable[[Mapping[int, Pointer], Collection[int]], None],
        most_bytes: int,
        most_count: int,
        restoring: Mapping[int, RestoringPointer],
    ) -> None:
        self._restore, self._most_bytes, self._most_count = restore, most_bytes, most_count
        self._lock = threading.Lock()
        self.shards = {
            shard: Queued(at.since.commit.version, at.since, at.queued, at.queued_bytes)
            for shard, at in restoring.items()
        }
        self._over: dict[int, int] = {}
        """The micro-batch with which a shard's queue became too long: the query goes on until that is committed."""
        self._asked: dict[int, tuple[Commit, int]] = {}
        self._refused: dict[int, tuple[int, str]] = {}
        self._stopped: dict[int, Commit] = {}
        """Shards that the query was stopped for since the last restore, and since which commit they queue."""
        self._stops: dict[int, tuple[Commit, int]] = {}
        """Restores for which the query was stopped for a shard, since a commit; only its adoption ends the count."""
        self._thread: threading.Thread | None = None
        self._failed: tuple[BaseException, Mapping[int, Pointer]] | None = None
        self._tries, self._not_before = 0, 0.0
        self._paced = 0.0

    def published(self, shard: int, version: int, metrics: Mapping[str, Any]) -> None:
        """Take what a shard's task reported of a micro-batch."""
        decision = metrics.get(DECISION)
        with self._lock:
            if decision == Decision.QUEUED.value:
                since = decode(b64decode(metrics["since"]))
                why = one_line(str(metrics.get("queued_why", "")))
                if shard not in self.shards:
                    log.warning("shard %d queues its input from micro-batch %d on: %s", shard, version, why)
                elif why and self._asked.get(shard, (None, 0))[0] == since.commit:
                    log.warning("shard %d has not adopted its queue: %s", shard, why)
                    del self._asked[shard]
                    self._refused[shard] = self._refused.get(shard, (0, ""))[0] + 1, why
                known = self.shards.get(shard)
                begun = known.begun if known is not None and known.since == since else version
                queued = Queued(begun, since, int(metrics["queued"]), int(metrics["queued_bytes"]))
                self.shards[shard] = queued
                if queued.length > self._most_bytes or queued.count > self._most_count:
                    self._over.setdefault(shard, version)
            elif "commit" in metrics:
                if self.shards.pop(shard, None) is not None:
                    count = int(metrics.get("adopted", 0))
                    log.warning("shard %d has adopted its queue: %d micro-batches", shard, count)
                self._refused.pop(shard, None)
                self._asked.pop(shard, None)
                self._over.pop(shard, None)
                self._stopped.pop(shard, None)
                self._stops.pop(shard, None)

    def look(self, committed: int) -> None:
        """Begin a restore if one is due; called after each commit.

        Args:
            committed: The newest committed micro-batch: what is newer may never have happened.

        Raises:
            StateUnavailable: A queue is too long, or a shard could not adopt it: the query is to be stopped.
            RestoreFailed: So it was, after each of the restores that the query was stopped for.
            Exception: What ended a restore that is still wanted, unless it passes: then there is another one.
        """
        self._judge_failure()
        with self._lock:
            waiting = {shard: queued for shard, queued in self.shards.items() if not self._was_asked(shard, queued)}
            for shard, queued in waiting.items():
                self._check(shard, queued, committed)
            due = {shard: queued.since for shard, queued in waiting.items() if queued.begun <= committed}
            under_way = self._thread is not None and self._thread.is_alive()
            if not due or under_way or time.monotonic() < self._not_before:
                return
            refused = due.keys() & self._refused.keys()
            self._thread = threading.Thread(target=self._run, args=(due, refused), name="rewind-beside", daemon=True)
            self._thread.start()

    def pace(self, stopped: Callable[[float], bool]) -> None:
        """Hold the next micro-batch back while shards wait for their state, the longer the more they have queued.

        Args:
            stopped: Waits for so many seconds; tells whether the query is to stop.
        """
        while time.monotonic() < self._paced + self._apart_s() and not stopped(LOOK_S):
            pass
        self._paced = time.monotonic()

    def _apart_s(self) -> float:
        with self._lock:
            counts = [queued.count for shard, queued in self.shards.items() if not self._was_asked(shard, queued)]
        return min(SLOWEST_S, PACE_S * max(counts, default=0))

    def restored(self, committed: int) -> None:
        """Take note that all was restored with no task running, and that shards were asked to adopt.

        Args:
            committed: The newest committed micro-batch: shards that began to queue after it were not asked.
        """
        with self._lock:
            self._tries = 0
            self._refused.clear()
            for shard, commit in self._stopped.items():
                since, count = self._stops.get(shard, (commit, 0))
                self._stops[shard] = commit, count + 1 if since == commit else 1
            self._stopped.clear()
            self._asked = {
                shard: (queued.since.commit, queued.count)
                for shard, queued in self.shards.items()
                if queued.begun <= committed
            }

    def join(self, cancel: Callable[[], None] | None = None) -> None:
        """Wait for the restore that runs: what failed is found again by the next one.

        Args:
            cancel: Ends the job of the restore that runs now; None lets it come to its end.
        """
        while self._thread is not None and self._thread.is_alive():
            if cancel is not None:
                cancel()
            self._thread.join(CANCEL_S if cancel is not None else None)
        self._failed = None

    def _judge_failure(self) -> None:
        """Raise what ended the last restore, unless it passes, or nobody waits for that restore any more."""
        if self._failed is None:
            return
        (error, due), self._failed = self._failed, None
        failure = read(error)
        with self._lock:
            wanted = any(shard in self.shards and self.shards[shard].since == since for shard, since in due.items())
        self._tries = self._tries + 1 if wanted else 0
        if wanted and (failure.kind is not Kind.PASSES or self._tries >= MAX_TRIES):
            self._tries = 0
            raise error
        log.warning("a restore beside the query failed%s: %s", ", it is tried again" * wanted, failure.text)
        self._not_before = time.monotonic() + RETRY_S

    def _check(self, shard: int, queued: Queued, committed: int) -> None:
        count, why = self._refused.get(shard, (0, ""))
        if count >= MAX_REFUSED:
            why = f"it could not adopt its queue {count} times: {why}"
        elif self._over.get(shard, committed + 1) <= committed:
            refusal = f"; it could not adopt them: {why}" if why else ""
            why = f"{queued.count} micro-batches, {queued.length} bytes are queued while its state is restored{refusal}"
        else:
            return
        if self._stops.get(shard) == (queued.since.commit, MAX_RESTORES):
            raise RestoreFailed(
                f"shard {shard} goes on queueing after {MAX_RESTORES} restores with the query stopped",
                where=f"shard {shard}",
                why=why,
                command="rewind verify <checkpoint>",
            )
        self._stopped[shard] = queued.since.commit
        raise StateUnavailable(f"shard {shard} cannot go on queueing", where=f"shard {shard}", why=why)

    def _was_asked(self, shard: int, queued: Queued) -> bool:
        commit, count = self._asked.get(shard, (None, 0))
        return commit == queued.since.commit and queued.count - count <= ASKED_FOR

    def _run(self, due: Mapping[int, Pointer], refused: Collection[int]) -> None:
        try:
            self._restore(due, refused)
        except BaseException as error:
            self._failed = error, due
            return
        with self._lock:
            self._tries = 0
            counts = {shard: queued.count for shard, queued in self.shards.items()}
            self._asked |= {shard: (pointer.commit, counts.get(shard, 0)) for shard, pointer in due.items()}
        for shard, pointer in sorted(due.items()):
            log.warning("shard %d is restored as of micro-batch %d beside the query", shard, pointer.commit.version)
