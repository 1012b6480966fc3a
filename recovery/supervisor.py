"""The supervisor: the handle that `start()` returns, around Spark's streaming query.

It runs the query, and when a task says that its state is missing or damaged, it restores the shards concerned, with no
task running, and starts the query again. Where Spark itself failed in a way that passes (a Python worker did not come
up in time on a busy host, a worker or executor died too often), it only starts it again. Tries count only without
progress, each is reported. Errors of another kind, user code's above all, are raised and not tried again.

A bounded run (`until="end"`) reads what the source held at the start, then drains: Spark's `availableNow` never ends
with processing-time timers (measured), so the end is seen in the query's progress.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from backend.errors import RestoreFailed, RewindError, code_in, kind_of
from backend.sources.kafka_loss import named_loss
from backend.sources.spark_offsets import positions_in
from recovery.housekeeping import Housekeeping
from recovery.listener import RestoreListener
from recovery.pointer import Commit
from recovery.told import moves, relay

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

log = logging.getLogger("rewind.supervisor")

RESTORABLE = frozenset({"StateUnavailable", "StateCorrupted", "StateAhead"})
PASSING = (
    "Python worker failed to connect back",
    "Python worker exited unexpectedly",
    "ExecutorLostFailure",
    "PythonWorkerFactory.stopWorker",
)
"""What Spark says when processes did not come up, or died (by the kernel for want of memory, say) more often than Spark
tries a task again, once in `local[n]`: nothing is known to be wrong with job or state. The last one is where it finds
that the workers' daemon is dead, in a stack: it tells the daemon to end a worker that is dead too."""
INTERRUPTED = "py4j.protocol.Py4JJavaError: An error occurred while calling publish: java.lang.InterruptedException"
"""How Spark knows from a Python sink that a micro-batch ended because the query was stopped.

It looks for that in the text by a regular expression that needs stack for every character between the two names: given
the real text, with all of the JVM's stack trace, Spark's thread died of a StackOverflowError (measured with Spark 4.2).
"""
MAX_TRIES = 4
BACKOFF_S = 0.5
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class QueryPlan:
    """What the supervisor drives; made by `start()`.

    Attributes:
        spark: The session.
        checkpoint: Spark's checkpoint location.
        launch: Starts Spark's query, told what to call with the frames of each micro-batch.
        publish: Publishes a micro-batch and returns one dict per shard.
        restore: Restores the shards that need it, told why; returns how many.
        drain: Asks the next micro-batch to drain.
        targets: (topic, partition) -> offset at which a bounded run ends, per source; None for a run without end.
        housekeeping: Prunes behind commits.
        shards: Number of shards.
        listeners: Told of restores.
        look_again: Raises a named error when a source no longer has what the query reads next.
    """

    spark: SparkSession
    checkpoint: str
    launch: Callable[[Callable[[DataFrame, int], None]], StreamingQuery]
    publish: Callable[[DataFrame, int], list[dict[str, Any]]]
    restore: Callable[[str], int]
    drain: Callable[[], None]
    housekeeping: Housekeeping
    shards: int
    targets: tuple[Mapping[tuple[str, int], int], ...] | None = None
    listeners: tuple[RestoreListener, ...] = ()
    look_again: Callable[[], None] = lambda: None


@dataclass(slots=True)
class Progress:
    """What a query has done since it was started.

    Attributes:
        version: Newest published micro-batch, -1 before the first.
        micro_batches: Micro-batches published.
        rows: Messages folded.
        results: Result rows.
        errors: Error rows.
        restores: Restores made.
        moves: Times that a task fetched its shard's state, or what its copy lacked, from packages; no restart is
            needed for that.
        last: Metrics per shard of the newest micro-batch.
    """

    version: int = -1
    micro_batches: int = 0
    rows: int = 0
    results: int = 0
    errors: int = 0
    restores: int = 0
    moves: int = 0
    last: list[dict[str, Any]] = field(default_factory=list)


class RewindQuery:
    """A running job: Spark's query and the supervisor around it.

    Made by `start()`. The supervisor is a daemon thread of the driver; it ends with the query.
    """

    def __init__(self, plan: QueryPlan) -> None:
        self._plan = plan
        self._query: StreamingQuery | None = None
        self._error: BaseException | None = None
        self._stopping = threading.Event()
        self._done = threading.Event()
        self._drained: dict[int, int] = {}
        self._asked = False
        self._partitions: dict[int, frozenset[tuple[str, int]]] = {}
        self.progress = Progress()
        self._query = plan.launch(self._publish)
        self._thread = threading.Thread(target=self._run, name="rewind-supervisor", daemon=True)
        self._thread.start()

    @property
    def query(self) -> StreamingQuery:
        """Spark's current query; another object after a restore."""
        assert self._query is not None
        return self._query

    @property
    def is_active(self) -> bool:
        """Whether the supervisor still drives the query (also while it restores)."""
        return not self._done.is_set()

    @property
    def exception(self) -> BaseException | None:
        """What ended the query, None while it runs or when it ended well."""
        return self._error

    def await_termination(self, timeout_s: float | None = None) -> bool:
        """Wait until the query has ended.

        Returns:
            Whether it has ended within the timeout.

        Raises:
            RewindError: What ended it, by name.
            Exception: Spark's own, for everything else.
        """
        ended = self._done.wait(timeout_s)
        if ended and self._error is not None:
            raise self._error
        return ended

    def stop(self) -> None:
        """Stop the query after the running micro-batch's tasks are cancelled; waits for the supervisor."""
        self._stopping.set()
        self.query.stop()
        self._thread.join()

    def drain(self) -> None:
        """Flush pending updates and emit open windows with reason `drain`, in the next micro-batch."""
        self._plan.drain()

    # ------------------------------------------------------------------------------------------------ the supervisor

    def _publish(self, frames: DataFrame, version: int) -> None:
        try:
            shards = self._plan.publish(frames, version)
        except Exception:
            if self._stopping.is_set():
                raise InterruptedError(INTERRUPTED) from None
            raise
        progress = self.progress
        progress.version = version
        progress.micro_batches += 1
        for shard in shards:
            metrics = shard.get("metrics", {})
            progress.rows += int(metrics.get("rows", 0))
            progress.results += int(shard.get("results", 0))
            progress.errors += int(shard.get("errors", 0))
            if "commit" in metrics:
                self._plan.housekeeping.made(int(shard["shard"]), Commit.of_name(metrics["commit"]))
            if metrics.get("drained", -1) == version:
                self._drained[int(shard["shard"])] = version
            tries = moves(metrics)
            progress.moves += sum(not one.failed for one in tries)
            relay(tries, self._plan.listeners)
        progress.last = shards

    def _run(self) -> None:
        tries, reached = 0, -1
        try:
            while not self._stopping.is_set():
                failure = self._watch()
                if failure is None:
                    return
                if self._stopping.is_set() and (code_in(str(failure)) is None or _is_restorable(failure)):
                    log.info("the query was stopped in the middle of something: %s", _text_of(failure))
                    return
                if not _is_restorable(failure) and not _passes(failure):
                    raise self._cause(failure)
                tries = 1 if self.progress.version > reached else tries + 1
                reached = max(reached, self.progress.version)
                if tries > MAX_TRIES:
                    raise RestoreFailed(
                        f"the query fails after {MAX_TRIES} new starts without progress",
                        where=self._plan.checkpoint,
                        why=_text_of(failure),
                        command=f"rewind verify {self._plan.checkpoint}",
                    ) from failure
                log.warning("the query failed (try %d of %d): %s", tries, MAX_TRIES, _text_of(failure))
                time.sleep(BACKOFF_S * (2 ** (tries - 1) - 1))
                if _is_restorable(failure):
                    self._restore(failure)
                if not self._stopping.is_set():
                    self._query = self._plan.launch(self._publish)
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def _restore(self, failure: BaseException) -> None:
        """Restore what the query failed for; a try that Spark failed is made again by the next failure of the query."""
        try:
            self._plan.restore(_text_of(failure))
            self.progress.restores += 1
        except Exception as error:
            if not _passes(error):
                raise
            log.warning("the restore failed: %s", _text_of(error))

    def _cause(self, failure: BaseException) -> BaseException:
        """Give the named error behind a failure: in its text, or found by looking at the sources again."""
        named = _named(failure)
        if not isinstance(named, RewindError):
            try:
                self._plan.look_again()
            except RewindError as found:
                found.__cause__ = failure
                return found
        return named

    def _watch(self) -> BaseException | None:
        """Follow Spark's query until it ends; give what ended it."""
        query = self.query
        maintained = -1
        while query.isActive:
            committed = _committed(query)
            if committed > maintained:
                self._plan.housekeeping.maintain(committed)
                maintained = committed
                self._announce(query.lastProgress)
            if self._plan.targets is not None and self._reached_end(query, committed):
                self._stopping.set()
                query.stop()
                return None
            time.sleep(POLL_S)
        failure: BaseException | None = query.exception()
        return failure

    def _announce(self, progress: Any) -> None:
        """Say in the log which source partitions came while the query runs; Spark reads them from their beginning."""
        for number, source in enumerate(progress["sources"]):
            now = frozenset(positions_in(source["endOffset"]))
            known = self._partitions.get(number) or frozenset(positions_in(source["startOffset"])) or now
            for topic, partition in sorted(now - known):
                log.warning("topic %s has a new partition, %d: it is read from its beginning", topic, partition)
            self._partitions[number] = known | now

    def _reached_end(self, query: StreamingQuery, committed: int) -> bool:
        if self._asked:
            return len(self._drained) == self._plan.shards and committed >= max(self._drained.values())
        progress = query.lastProgress
        if progress is None or not _at(progress, self._plan.targets or ()):
            return False
        self._plan.drain()
        self._asked = True
        return False


def _committed(query: StreamingQuery) -> int:
    """Give the newest micro-batch that Spark has committed, -1 for none.

    Spark reports after the commit; but a trigger that found nothing to do reports too, under the number of the
    micro-batch that will come next. Only a micro-batch that ran has `addBatch` among its durations.
    """
    progress = query.lastProgress
    if progress is None:
        return -1
    return int(progress["batchId"]) if "addBatch" in progress["durationMs"] else int(progress["batchId"]) - 1


def _at(progress: Any, targets: tuple[Mapping[tuple[str, int], int], ...]) -> bool:
    """Tell whether every source has reached its target: sources come in the order of the job's inputs."""
    for source, target in zip(progress["sources"], targets, strict=False):
        reached = positions_in(source["endOffset"])
        if any(reached.get(partition, -1) < wanted for partition, wanted in target.items()):
            return False
    return True


def _is_restorable(failure: BaseException) -> bool:
    return code_in(str(failure)) in RESTORABLE


def _passes(failure: BaseException) -> bool:
    text = str(failure)
    return code_in(text) is None and any(sign in text for sign in PASSING)


def _named(failure: BaseException) -> BaseException:
    """Give the named error inside Spark's exception, or Spark's exception itself."""
    text = str(failure)
    code = code_in(text)
    if isinstance(failure, RewindError):
        return failure
    named = kind_of(code)(_text_of(failure)) if code is not None else named_loss(text)
    if named is None:
        return failure
    named.__cause__ = failure
    return named


def _text_of(failure: BaseException) -> str:
    """Give the line of Spark's exception that our own error wrote, without the stack around it."""
    for line in str(failure).splitlines():
        _, marker, rest = line.partition("[rewind:")
        if marker:
            return rest.partition("] ")[2]
    return str(failure).splitlines()[0] if str(failure) else type(failure).__name__
