"""The supervisor: the handle that `start()` returns, around Spark's streaming query.

It runs the query, and when a task says that its state is missing or damaged, it restores the shards concerned, with no
task running, and starts the query again. What passes by itself (a Python worker did not come up in time on a busy
host, a process died, a disk was full) is waited for: it starts the query again, with patience.
Errors of another kind, user code's above all, are raised and not tried again. `recovery.failures` tells them apart.

One thread, the supervisor's, starts and stops Spark's query: `stop()` asks it to, and whatever ends it (an error too),
Spark's query is stopped before the handle says that it has ended, and the checkpoint's lease is given back.

A bounded run (`until="end"`) reads what the source held at the start, then drains: Spark's `availableNow` never ends
with processing-time timers (measured), so the end is seen in the query's progress.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from backend.errors import QueryStopped, RewindError
from backend.sources.spark_offsets import is_ours, positions_in
from backend.texts import one_line
from recovery.commit.lease import Lease
from recovery.commit.option_sets import newest_in
from recovery.commit.pointer import Commit
from recovery.failures import Failure, Kind, QueryFailed, is_interruption, java_chain, read, summary
from recovery.listener import RestoreListener, is_telling
from recovery.restore.lineage import based
from recovery.restore.tries import moves, relay
from recovery.supervise.beside import Beside
from recovery.supervise.host_clock import HostClock
from recovery.supervise.housekeeping import Housekeeping
from recovery.supervise.patience import Patience
from recovery.supervise.spark_logs import MicroBatchFailed
from recovery.supervise.standby import Standby
from recovery.supervise.under_way import Amount, UnderWay
from recovery.supervise.warnings import warnings_of
from recovery.supervise.window_ends import WindowEnds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

log = logging.getLogger("rewind.supervisor")

INTERRUPTED = "py4j.protocol.Py4JJavaError: An error occurred while calling publish: java.lang.InterruptedException"
"""How Spark knows from a Python sink that a micro-batch ended because the query was stopped.

It looks for that in the text by a regular expression that needs stack for every character between the two names: given
the real text, with all of the JVM's stack trace, Spark's thread died of a StackOverflowError (measured with Spark 4.2).
"""
POLL_S = 0.05
IDLE_LOOKS = 20
"""Of so many looks one asks Spark for its last report where none is expected: it is long, and comes as text."""
CANCEL_S = 0.5
"""Between two tries to end a restore: it may be between two jobs."""
STOP_S = 30.0
"""Bound on waiting for a micro-batch that runs when the end of the input is reached."""


@dataclass(frozen=True, slots=True)
class QueryPlan:
    """What the supervisor drives; made by `start()`.

    Attributes:
        checkpoint: Spark's checkpoint location.
        lease: Of the checkpoint; looked at before each publication and after each commit, given back at the end.
        start_query: Starts Spark's query, told what to call with the frames of each micro-batch.
        publish: Publishes a micro-batch and returns one dict per shard.
        restore: Restores the shards that need it, told why; returns how many.
        drain: Asks the next micro-batch to drain; gives the number of the request.
        drain_of: Gives the number of the newest request that a planned micro-batch, or one before it, carries.
        targets: (topic, partition) -> offset at which a bounded run ends, per source; None of a source that Spark
            reads: when a micro-batch finds nothing new there. None for a run without end.
        housekeeping: Prunes behind commits.
        shards: Number of shards.
        listeners: Told of restores.
        look_again: Raises a named error when a source no longer has what the query reads next.
        watch: Raises a named error when a source is not the one any more that the query began with; called in each
            micro-batch, before anything of it is read or published.
        patience_s: See `StartOptions.patience`.
        beside: The shards that queue their input, and what is done about it.
        under_way: Told of the restores that run.
        standby: Keeps copies of shards on other hosts; None keeps none.
        window_ends: Says when the next micro-batch begins; None where a trigger does.
        end_restores: Cancels the jobs of restores, which fail then.
        close: Lets go of the sink and of clients, at the end.
    """

    checkpoint: str
    lease: Lease
    start_query: Callable[[Callable[[DataFrame, int], None]], StreamingQuery]
    publish: Callable[[DataFrame, int], list[dict[str, Any]]]
    restore: Callable[[str], int]
    drain: Callable[[], int]
    drain_of: Callable[[int], int]
    housekeeping: Housekeeping
    shards: int
    targets: tuple[Mapping[tuple[str, int], int] | None, ...] | None = None
    listeners: tuple[RestoreListener, ...] = ()
    look_again: Callable[[], None] = lambda: None
    watch: Callable[[], None] = lambda: None
    patience_s: float = 600.0
    beside: Beside = field(default_factory=lambda: Beside(lambda *_: None, 0, 0, {}))
    under_way: UnderWay = field(default_factory=UnderWay)
    standby: Standby | None = None
    window_ends: WindowEnds | None = None
    end_restores: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None


@dataclass(slots=True)
class Progress:
    """What a query has done since it was started.

    Attributes:
        version: Newest published micro-batch, -1 before the first.
        micro_batches: Micro-batches published.
        rows: Messages folded.
        results: Result rows.
        errors: Error rows.
        restores: Restores that the query was stopped for.
        adopted: Times that a shard, restored beside the query, adopted what it had queued.
        moves: Times that a task fetched its shard's state, or what its copy lacked, from snapshots; no restart is
            needed for that.
        copied: Bytes that a standby has given to copies on other hosts.
        last: Metrics per shard of the newest micro-batch.
        warnings: What to look at in the newest micro-batch; at most two.
        queued: Shard -> micro-batches that it has queued: its state is being restored beside the query.
        waiting: After a failure that may pass: what it was, when it is tried again, and when given up. Empty from the
            next micro-batch on.
        under_way: Told of the restores that run.
    """

    version: int = -1
    micro_batches: int = 0
    rows: int = 0
    results: int = 0
    errors: int = 0
    restores: int = 0
    adopted: int = 0
    moves: int = 0
    copied: int = 0
    last: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    queued: dict[int, int] = field(default_factory=dict)
    waiting: str = ""
    under_way: UnderWay = field(default_factory=UnderWay, repr=False)

    @property
    def restoring(self) -> dict[int, Amount]:
        """Shard -> how far its restore is, while one runs."""
        return self.under_way.shards


class RewindQuery:
    """A running job: Spark's query and the supervisor around it.

    Made by `start()`. The supervisor is a daemon thread of the driver; it ends with the query.

    Attributes:
        progress: A `Progress`: what the query has done and does now, for people and monitoring.
    """

    def __init__(self, plan: QueryPlan) -> None:
        self._plan = plan
        self._query: StreamingQuery | None = None
        self._error: BaseException | None = None
        self._stopping = threading.Event()
        self._done = threading.Event()
        self._publishing: set[int] = set()
        self._counted = -1, Counter[str]()
        """Of the newest micro-batch."""
        self._gate, self._ending = threading.Lock(), False
        self._drained: dict[int, tuple[int, int]] = {}  # shard -> micro-batch that drained, and for which request
        self._asked: int | None = None
        self._restoring = False
        self._quiet: int | None = None
        self._partitions: dict[int, frozenset[tuple[str, int]]] = {}
        self._committed = -1
        self._raised: BaseException | None = None
        self._patience = Patience(plan.patience_s, plan.checkpoint)
        self.progress = Progress(under_way=plan.under_way)
        self._query = self._first_start()
        self._thread = threading.Thread(target=self._drive, name="rewind-supervisor", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        """Say shards, newest micro-batch, lag, messages refused as too late in it, and what the query is doing.

        Also what shards have queued, and how far restores are.
        """
        progress, spark = self.progress, self._query.lastProgress if self._query is not None else None
        late = sum(int(one.get("metrics", {}).get("errors_out_of_retention", 0)) for one in progress.last)
        state = "running" if self.is_active else "failed" if self._error is not None else "ended"
        if self.is_active and self._restoring:
            state = "restoring"
        elif self.is_active and progress.waiting:
            state = f"waiting: {progress.waiting}"
        mended = [f"; shard {shard}: {count} micro-batches queued" for shard, count in progress.queued.items()]
        mended += [f"; shard {shard} under restore: {amount}" for shard, amount in progress.restoring.items()]
        lag = "unknown" if spark is None else _lag(spark["sources"])
        return (
            f"<RewindQuery {self._plan.checkpoint}: {state}; shards {self._plan.shards}, "
            f"micro-batch {progress.version}, lag {lag}, too late {late}{''.join(mended)}>"
        )

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
            RuntimeError: Called by a listener or a sink's function: the query waits for those.
        """
        if self._waits_for_caller():
            raise RuntimeError("await_termination: the query waits for listeners and sinks, they cannot wait for it")
        ended = self._done.wait(timeout_s)
        if ended and self._error is not None:
            raise self._error
        return ended

    def stop(self) -> None:
        """Stop the query: the running micro-batch's tasks are cancelled. On return nothing of it runs any more.

        May be called at any time, from any thread, any number of times. A restore that is under way is ended, and made
        anew by the next start. A listener or a sink's function may call it too: there it only asks, since the query
        waits for them.
        """
        self._stopping.set()
        if self._waits_for_caller():
            return
        while self._thread.is_alive():
            self._end_restores()
            self._thread.join(CANCEL_S)

    def drain(self) -> None:
        """Flush pending updates and emit open windows with reason `drain`, in the next micro-batch.

        Raises:
            QueryStopped: The query was stopped or has ended.
        """
        if self._stopping.is_set() or self._done.is_set():
            raise QueryStopped(
                "the query has ended, nothing drains it",
                where=self._plan.checkpoint,
                command='start it again, and drain() that; or start it with until="end"',
            )
        self._plan.drain()

    def _waits_for_caller(self) -> bool:
        """Tell whether the supervisor, or what it waits for, waits for the calling thread to return."""
        return threading.current_thread() is self._thread or threading.get_ident() in self._publishing or is_telling()

    # ------------------------------------------------------------------------------------------------ the supervisor

    def _publish(self, frames: DataFrame, version: int) -> None:
        self._publishing.add(threading.get_ident())
        try:
            self._publish_one(frames, version)
        finally:
            self._publishing.discard(threading.get_ident())

    def _publish_one(self, frames: DataFrame, version: int) -> None:
        try:
            with self._gate:
                if self._ending:
                    self._until_stopped()
                self._plan.lease.check()
                self._plan.watch()
                shards = self._plan.publish(frames, version)
            self._published(version, shards)
        except Exception as error:
            if self._stopping.is_set():
                raise InterruptedError(INTERRUPTED) from None
            self._raised = error  # Spark's query carries only text
            if is_interruption(error):
                raise InterruptedError(INTERRUPTED) from None  # Spark knows whether its query was stopped
            raise MicroBatchFailed(read(error).text) from None
        self._plan.beside.pace(self._stopping.wait)
        if self._plan.window_ends is not None:
            self._plan.window_ends.published([shard.get("metrics", {}) for shard in shards])
            self._plan.window_ends.hold(self._stopping.wait)

    def _published(self, version: int, shards: list[dict[str, Any]]) -> None:
        """Take note of a micro-batch that is out."""
        progress = self.progress
        progress.version, progress.waiting = version, ""
        counted = Counter(micro_batches=1)
        for shard in shards:
            metrics = shard.get("metrics", {})
            counted["rows"] += int(metrics.get("rows", 0))
            counted["results"] += int(shard.get("results", 0))
            counted["errors"] += int(shard.get("errors", 0))
            if metrics.get("changelog_lost"):
                based(int(shard["shard"]), str(metrics["changelog_lost"]))
            self._plan.beside.published(int(shard["shard"]), version, metrics)
            if "commit" in metrics:
                self._plan.housekeeping.made(int(shard["shard"]), Commit.of_name(metrics["commit"]))
            if metrics.get("drained", -1) == version and self._plan.targets is not None:
                self._drained[int(shard["shard"])] = version, self._plan.drain_of(version)
            tries = moves(metrics)
            counted["adopted"] += "adopted" in metrics
            counted["moves"] += sum(not one.failed for one in tries)
            relay(tries, self._plan.listeners)
        known, before = self._counted
        for name in counted:  # one that Spark runs again is counted once
            more = counted[name] - (before[name] if known == version else 0)
            setattr(progress, name, getattr(progress, name) + more)
        self._counted = version, counted
        progress.last = shards
        progress.queued = {shard: queued.count for shard, queued in self._plan.beside.shards.items()}
        progress.warnings = warnings_of(version, shards)
        for warning in progress.warnings:
            log.warning("%s", warning)

    def _until_stopped(self) -> None:
        """Hold a micro-batch that begins behind the end of the input until Spark knows that the query is stopped.

        Raises:
            InterruptedError: Always.
        """
        deadline = time.monotonic() + STOP_S
        while self.query.isActive and time.monotonic() < deadline:
            time.sleep(POLL_S)
        raise InterruptedError(INTERRUPTED)

    def _first_start(self) -> StreamingQuery:
        """Start Spark's query; what passes is waited for, as after a failure of the query."""
        while True:
            try:
                return self._plan.start_query(_weakly(self))
            except Exception as error:
                failure = read(error)
                if failure.kind is Kind.FINAL:
                    if failure.error is error:
                        raise
                    raise failure.error from error
                time.sleep(self._patience.after(failure, self._committed))

    def _drive(self) -> None:
        with ExitStack() as last:
            last.callback(self._done.set)
            last.callback(self._end)
            self._run()

    def _end(self) -> None:
        """Stop Spark's query if anything but its end ended the supervisor, and give the checkpoint back."""
        with ExitStack() as last:
            last.callback(self._close)
            last.callback(self._plan.lease.release)
            try:
                if self.query.isActive:
                    self.query.stop()
            except Exception as error:  # the session is gone, or Spark's own bound on stopping is over
                log.warning("Spark's query could not be stopped: %s", error)
                self._error = self._error or error
            ended = self._stopping.is_set() or self._error is not None  # nobody waits for what is restored beside it
            self._plan.beside.join(self._end_restores if ended else None)
            self._end_copies()

    def _close(self) -> None:
        if not self._runs_on():  # else it could not be stopped, and may be publishing
            with _logged("the sink could not be closed"):  # everything is out: the query ended as it ended
                self._plan.close()

    def _end_copies(self) -> None:
        if self._plan.standby is not None:
            self._plan.standby.join()

    def _end_restores(self) -> None:
        with _logged("a restore could not be cancelled", logging.INFO):  # the session is gone: it fails with it
            self._plan.end_restores()

    def _run(self) -> None:
        try:
            failure = self._watched()
            while failure is not None:
                final = failure.kind is Kind.FINAL
                if self._stopping.is_set() and not (final and isinstance(failure.error, RewindError)):
                    log.info("the query was stopped in the middle of something: %s", failure.text)
                    return
                if final:
                    if not isinstance(failure.error, RewindError):
                        failure.error.add_note(f"What ended the query: {failure.text}")  # below Spark's long plans
                    raise failure.error
                pause_s = self._patience.after(failure, self._committed)
                self.progress.waiting = self._patience.said
                self._stopping.wait(pause_s)
                failure = self._again(failure)
        except BaseException as error:
            named = isinstance(error, RewindError)
            log.error("the query has ended: %s", summary(error) if not named else error, exc_info=not named)
            self._error = error

    def _again(self, failure: Failure) -> Failure | None:
        """Restore if that is needed, start the query again, and follow it; return what ended it, None for its end."""
        try:
            if failure.kind is Kind.RESTORE and not self._stopping.is_set():
                self._restoring = True
                try:
                    self._plan.beside.join(self._end_restores)  # all that it restores is restored here, and faster
                    self._end_copies()
                    self._plan.restore(failure.text)
                    self._plan.beside.restored(newest_in(self._plan.checkpoint, "commits"))
                finally:
                    self._restoring = False
                self.progress.restores += 1
        except Exception as error:
            found = read(error, self._plan.look_again)
            return replace(found, kind=Kind.RESTORE) if found.kind is Kind.PASSES else found
        if self._stopping.is_set():
            return None
        try:
            self._start_query()
        except Exception as error:
            return read(error, self._plan.look_again)
        return self._watched()

    def _watched(self) -> Failure | None:
        """Follow Spark's query until it ends; return what ended it."""
        try:
            error = self._watch()
        except Exception as raised:  # not Spark's: a request that could not be written, a lease that was taken
            error = raised
            late = self._stop_late()
            if late is not None and read(raised, self._plan.look_again).kind is not Kind.FINAL:
                error = late  # it runs on: nothing can be restored or started under it
        self._committed = max(self._committed, self._heard(self.query.lastProgress))
        return read(error, self._plan.look_again) if error is not None else None

    def _stop_late(self) -> Exception | None:
        """Stop Spark's query, again where Spark's own bound on it ran out; return why it still runs after `STOP_S`."""
        deadline, late = time.monotonic() + STOP_S, None
        while late is None or self._runs_on():
            try:
                self.query.stop()
                return None
            except Exception as error:
                if late is None:
                    log.warning("Spark's query does not stop: %s", summary(error))
                late = error
            if time.monotonic() > deadline:
                return late
            time.sleep(POLL_S)
        return None

    def _runs_on(self) -> bool:
        try:
            return bool(self.query.isActive)
        except Exception as error:  # the session is gone, and the query with it
            log.info("Spark does not say whether its query runs: %s", summary(error))
            return False

    def _watch(self) -> BaseException | None:
        """Follow Spark's query until it ends, and end it when it is to; give what ended it.

        Raises:
            CheckpointTaken: A newer start has taken the checkpoint over.
            QueryStopped: Somebody stopped Spark's query of a bounded run before its end.
        """
        query, clock, looks = self.query, HostClock(), 0
        while query.isActive:
            back_s = clock.went_back_s()
            if back_s and not self._stopping.is_set():
                query = self._start_anew(query, back_s)
            if self._stopping.is_set() or self._plan.lease.lost is not None:
                query.stop()
                break
            if looks % IDLE_LOOKS == 0 or self._plan.targets is not None or self.progress.version > self._committed:
                progress = query.lastProgress
                committed = self._heard(progress)
            looks += 1
            if committed > self._committed:
                self._plan.lease.check()
                with _logged("old files are not pruned now"):  # what cannot be deleted now is behind a later commit
                    self._plan.housekeeping.maintain(committed)
                self._committed = committed
                self._announce(progress)
            self._plan.beside.look(self._committed)
            if self._plan.standby is not None:
                self._plan.standby.look(self._plan.housekeeping.newest(self._committed), query)
                self.progress.copied = self._plan.standby.fetched
            if self._plan.targets is not None and self._reached_end(progress, committed):
                self._stop_between(query)
                return None
            time.sleep(POLL_S)
        self._plan.lease.check()
        error = _ended(query, self._raised)
        if error is None and not self._stopping.is_set():
            if self._plan.targets is not None:
                raise QueryStopped(
                    "Spark's query was stopped before the end of its input",
                    where=self._plan.checkpoint,
                    why="not by this handle: by Spark's session, or by the query's own stop()",
                    command="start it again: it goes on after the last committed micro-batch",
                )
            log.warning("Spark's query on %s was stopped, not by this handle", self._plan.checkpoint)
        return error

    def _heard(self, progress: Any) -> int:
        """Take note of Spark's last report; give the newest micro-batch that it has committed by that."""
        if progress is not None and "addBatch" not in progress["durationMs"]:
            self._patience.healthy()  # a trigger that looked at all sources, and found nothing new
        return _committed(progress)

    def _start_anew(self, query: StreamingQuery, back_s: float) -> StreamingQuery:
        """Start Spark's query again because the clock went back: its trigger waits for the old time (`host_clock`)."""
        log.warning(
            "the host's clock went back by %.0f s: Spark's query is started again, to go by the new time", back_s
        )
        query.stop()
        return self._start_query()

    def _start_query(self) -> StreamingQuery:
        """Start Spark's query, when a restore beside the one before has ended."""
        self._raised = None
        self._plan.beside.join()
        self._query = self._plan.start_query(_weakly(self))
        return self._query

    def _stop_between(self, query: StreamingQuery) -> None:
        """Stop Spark's query between two micro-batches: one that runs is waited for, at most `STOP_S` seconds."""
        free = self._gate.acquire(timeout=STOP_S)
        self._ending = True
        if free:
            self._gate.release()
        self._stopping.set()
        query.stop()

    def _announce(self, progress: Any) -> None:
        """Say in the log which source partitions came while the query runs; Spark reads them from their beginning."""
        for number, source in enumerate(progress["sources"]):
            now = frozenset(positions_in(source["endOffset"]))
            known = self._partitions.get(number) or frozenset(positions_in(source["startOffset"])) or now
            for topic, partition in sorted(now - known):
                log.warning(
                    "topic %s has a new partition, %d: it is read from its beginning", one_line(topic), partition
                )
            self._partitions[number] = known | now

    def _reached_end(self, progress: Any, committed: int) -> bool:
        if self._asked is not None:
            # a drain of an earlier start, planned or queued and only run now, says nothing of what came since
            done = [version for version, request in list(self._drained.values()) if request >= self._asked]
            return len(done) == self._plan.shards and not self._plan.beside.shards and committed >= max(done)
        targets = self._plan.targets or ()
        if progress is None or not _at(progress, targets):
            return False
        if None in targets and self._quiet in (None, progress["batchId"]):
            # the first one may be an earlier start's: planned before what lies in the source now came
            self._quiet = progress["batchId"]
            return False
        self._asked = self._plan.drain()
        return False


@contextmanager
def _logged(text: str, level: int = logging.WARNING) -> Iterator[None]:
    """Log what fails in a block and changes nothing of the query: filesystems and Spark raise kinds of their own."""
    try:
        yield
    except Exception as error:
        log.log(level, "%s: %s", text, summary(error))


def _weakly(query: RewindQuery) -> Callable[[DataFrame, int], None]:
    """Return what Spark calls with each micro-batch.

    The callback lives as long as Spark's query in the JVM, which lives as long as the handle holds it: were the handle
    held by it, also by the frames of what it raised, both would stay for ever. While it runs, its supervisor holds it.
    """
    of = weakref.ref(query)

    def publish(frames: DataFrame, version: int) -> None:
        alive = of()
        failed: Exception = InterruptedError(INTERRUPTED)
        if alive is not None:
            try:
                alive._publish(frames, version)
                return
            except Exception as error:
                failed = error.with_traceback(None)
                failed.__context__ = None
        del alive
        raise failed

    return publish


def _committed(progress: Any) -> int:
    """Give the newest micro-batch that Spark has committed by its last report, -1 for none.

    Spark reports after the commit; but a trigger that found nothing to do reports too, under the number of the
    micro-batch that will come next. Only a micro-batch that ran has `addBatch` among its durations.
    """
    if progress is None:
        return -1
    return int(progress["batchId"]) if "addBatch" in progress["durationMs"] else int(progress["batchId"]) - 1


def _lag(sources: Sequence[Any]) -> str:
    """Say how many offsets of the sources were there and not read, as of Spark's last report of them.

    >>> _lag([{"endOffset": '{"t": {"0": 5}}', "latestOffset": '{"t": {"0": 9}}'}])
    '4 messages'
    >>> _lag([{"endOffset": '{"format": 1, "asked": 0}', "latestOffset": None}])  # of the control stream
    '0 messages'
    >>> _lag([{"endOffset": '{"logOffset": 1}', "latestOffset": '{"logOffset": 9}'}])  # a DataFrame's
    'unknown'
    """
    total = 0
    for source in sources:
        read_to, there = positions_in(source["endOffset"]), positions_in(source["latestOffset"])
        if not read_to and not there and not is_ours(source["endOffset"]):
            return "unknown"
        total += sum(max(0, end - read_to.get(partition, 0)) for partition, end in there.items())
    return f"{total} messages"


def _at(progress: Any, targets: tuple[Mapping[tuple[str, int], int] | None, ...]) -> bool:
    """Tell whether every source has reached its target: sources come in the order of the job's inputs."""
    for source, target in zip(progress["sources"], targets, strict=False):
        if target is None:
            if source["startOffset"] != source["endOffset"]:
                return False
            continue
        reached = positions_in(source["endOffset"])
        if any(reached.get(partition, -1) < wanted for partition, wanted in target.items()):
            return False
    return True


def _ended(query: StreamingQuery, raised: BaseException | None) -> BaseException | None:
    """Return what ended Spark's query: what publishing raised where it did, else Spark's own with its chain."""
    error: BaseException | None = query.exception()
    if error is None or raised is not None:
        return raised if error is not None else None
    java = getattr(query, "_jsq", None)
    if java is None:
        return error
    failed = QueryFailed(str(error), java_chain(java.exception().get()))
    failed.__cause__ = error
    return failed
