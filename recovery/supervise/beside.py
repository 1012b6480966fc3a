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


@dataclass(slots=True)
class Queued:
    """A shard that queues its input, until it adopts it.

    Attributes:
        begun: The first micro-batch that it queued, as far as this driver knows.
        since: The commit that is restored.
        count: Micro-batches queued.
        length: Bytes of their entries.
        over: The micro-batch with which the queue became too long: the query goes on until that is committed.
        asked: It was asked to adopt: since which commit it queued, and how many micro-batches it had queued.
        refused: How often it could not adopt since the query was last stopped for a restore.
        why: Why not, the last time.
        stopped: Since which commit it queued when the query was stopped for it; None once that is restored.
        stops: Restores for which the query was stopped for it, and since which commit it queued then.
    """

    begun: int
    since: Pointer
    count: int
    length: int
    over: int | None = None
    asked: tuple[Commit, int] | None = None
    refused: int = 0
    why: str = ""
    stopped: Commit | None = None
    stops: tuple[Commit | None, int] = (None, 0)

    @property
    def was_asked(self) -> bool:
        """Whether it was asked to adopt, and may yet do so."""
        if self.asked is None:
            return False
        commit, count = self.asked
        return commit == self.since.commit and self.count - count <= ASKED_FOR


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
                count, length = int(metrics["queued"]), int(metrics["queued_bytes"])
                queued = self.shards.get(shard)
                if queued is None:
                    log.warning("shard %d queues its input from micro-batch %d on: %s", shard, version, why)
                    queued = self.shards[shard] = Queued(version, since, count, length)
                elif why and queued.asked is not None and queued.asked[0] == since.commit:
                    log.warning("shard %d has not adopted its queue: %s", shard, why)
                    queued.asked, queued.refused, queued.why = None, queued.refused + 1, why
                if queued.since != since:
                    queued.begun, queued.since = version, since
                queued.count, queued.length = count, length
                if queued.over is None and (length > self._most_bytes or count > self._most_count):
                    queued.over = version
            elif "commit" in metrics and self.shards.pop(shard, None) is not None:
                count = int(metrics.get("adopted", 0))
                log.warning("shard %d has adopted its queue: %d micro-batches", shard, count)

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
            waiting = {shard: queued for shard, queued in self.shards.items() if not queued.was_asked}
            for shard, queued in waiting.items():
                self._check(shard, queued, committed)
            due = {shard: queued.since for shard, queued in waiting.items() if queued.begun <= committed}
            under_way = self._thread is not None and self._thread.is_alive()
            if not due or under_way or time.monotonic() < self._not_before:
                return
            refused = {shard for shard in due if self.shards[shard].refused}
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
            counts = [queued.count for queued in self.shards.values() if not queued.was_asked]
        return min(SLOWEST_S, PACE_S * max(counts, default=0))

    def restored(self, committed: int) -> None:
        """Take note that all was restored with no task running, and that shards were asked to adopt.

        Args:
            committed: The newest committed micro-batch: shards that began to queue after it were not asked.
        """
        with self._lock:
            self._tries = 0
            for queued in self.shards.values():
                queued.refused = 0
                if queued.stopped is not None:
                    since, count = queued.stops
                    queued.stops = queued.stopped, count + 1 if since == queued.stopped else 1
                    queued.stopped = None
                queued.asked = (queued.since.commit, queued.count) if queued.begun <= committed else None

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
        if queued.refused >= MAX_REFUSED:
            why = f"it could not adopt its queue {queued.refused} times: {queued.why}"
        elif queued.over is not None and queued.over <= committed:
            refusal = f"; it could not adopt them: {queued.why}" if queued.refused else ""
            why = f"{queued.count} micro-batches, {queued.length} bytes are queued while its state is restored{refusal}"
        else:
            return
        if queued.stops == (queued.since.commit, MAX_RESTORES):
            raise RestoreFailed(
                f"shard {shard} goes on queueing after {MAX_RESTORES} restores with the query stopped",
                where=f"shard {shard}",
                why=why,
                command="rewind verify <checkpoint>",
            )
        queued.stopped = queued.since.commit
        raise StateUnavailable(f"shard {shard} cannot go on queueing", where=f"shard {shard}", why=why)

    def _run(self, due: Mapping[int, Pointer], refused: Collection[int]) -> None:
        try:
            self._restore(due, refused)
        except BaseException as error:
            self._failed = error, due
            return
        with self._lock:
            self._tries = 0
            for shard in due.keys() & self.shards.keys():
                self.shards[shard].asked = due[shard].commit, self.shards[shard].count
        for shard, pointer in sorted(due.items()):
            log.warning("shard %d is restored as of micro-batch %d beside the query", shard, pointer.commit.version)
